// Jinja as chat templates use it. Expected texts are what Jinja 3.1 writes with transformers' settings.
#include "generate/jinja.h"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "base/error.h"
#include "base/stop.h"

namespace fw {
namespace {

using ::testing::HasSubstr;
using Variables = nlohmann::ordered_json;

Variables conversation() {
  return {{"messages",
           {{{"role", "system"}, {"content", " be kind "}},
            {{"role", "user"}, {"content", "Hi"}},
            {{"role", "assistant"}, {"content", "<think>\nwhy\n</think>\n\nyes"}}}},
          {"tools", nullptr},
          {"on", true}};
}

std::string rendered(const std::string& text) { return JinjaTemplate(text, "'t'").render(conversation()); }

std::string failure(const std::string& text) {
  try {
    rendered(text);
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

TEST(Jinja, Expressions) {
  const std::pair<const char*, const char*> cases[] = {
      {"{{ messages[0].role }} {{ messages[-1]['role'] }}", "system assistant"},
      {"{{ messages|length - 1 }} {{ messages[1:]|length }} {{ messages[::-1][0].role }}", "2 2 assistant"},
      {"{{ 'a' ~ 1 ~ none ~ true }} {{ 'A' 'B' }} {{ 'a' + \"\\n\\u00e9\" }}", "a1NoneTrue AB a\n\xc3\xa9"},
      {"{{ -3 // 2 }} {{ -7 % 3 }} {{ 7 % 3 * 2 + 1 }} {{ 7 / 2 }} {{ 1.0 }}", "-2 2 3 3.5 1.0"},
      {"{{ -5|string|length }} {{ -(2 + 3)|string }} {{ 1 - 5|string|length }} {{ 2 * -3|string|length }}", "2 -5 0 4"},
      {"{{ 'x' in 'xyz' and not 'q' in 'xyz' }} {{ 'role' in messages[0] }} {{ 3 not in [1, 2] }}", "True True True"},
      {"{{ 'then' if on else 'else' }}{{ 'then' if not on }}", "then"},
      {"{{ nothing }}{{ nothing is defined }} {{ nothing|default('d') }} {{ tools is none }}", "False d True"},
      {"{{ nothing or 'b' }} {{ '' and 'c' }} {{ 1 < 2 }} {{ 'a' >= 'b' }}", "b  True False"},
      {"{{ messages[0].content|trim|upper }} {{ messages[0].content.strip().split('e')[0] }}", "BE KIND b"},
      {"{{ messages[2].content.split('</think>')[-1].lstrip('\\n') }}", "yes"},
      {"{{ messages[2].content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') }}", "why"},
      {"{{ messages|selectattr('role', 'equalto', 'system')|list|length > 0 }}", "True"},
      {"{{ messages|rejectattr('role', 'eq', 'system')|map(attribute='role')|join(', ') }}", "user, assistant"},
      {"{{ messages[0].get('name', none) is not none }} {{ {'a': 1, 'b': 2}.items()|list|length }}", "False 2"},
      {"{{ messages[1].content.startswith('H') }} {{ 'two words'|title }} {{ 'ABC'.capitalize() }}",
       "True Two Words Abc"},
      {"{{ messages[1].content is string }} {{ messages[1] is mapping }} {{ messages is iterable }} {{ 3 is odd }}",
       "True True True True"},
  };
  for (const auto& [text, expected] : cases) EXPECT_EQ(rendered(text), expected) << text;
}

TEST(Jinja, Statements) {
  const std::pair<const char*, const char*> cases[] = {
      {"{% for m in messages if m.role != 'system' %}{{ loop.index }}/{{ loop.length }}{{ m.role }}"
       "{% if not loop.last %}, {% endif %}{% endfor %}",
       "1/2user, 2/2assistant"},
      {"{% for x in [] %}x{% else %}none{% endfor %}", "none"},
      {"{% for i in range(5) %}{% if i == 1 %}{% continue %}{% elif i == 3 %}{% break %}{% endif %}{{ i }}{% endfor %}",
       "02"},
      {"{% for k, v in {'p': 1, 'q': 2}.items() %}{{ k }}={{ v }};{% endfor %}", "p=1;q=2;"},
      // What a loop sets is the loop's own, but for namespaces.
      {"{% set n = 0 %}{% set ns = namespace(n=0) %}{% for m in messages %}{% set n = n + 1 %}{% set ns.n = ns.n + 1 %}"
       "{% endfor %}{{ n }} {{ ns.n }}",
       "0 3"},
      {"{% macro say(what, end='!') %}{{ what ~ end }}{% endmacro %}{{ say('a') }}{{ say('b', end='?') }}", "a!b?"},
      {"{% set x %}block {{ 1 + 1 }}{% endset %}{{ x }}", "block 2"},
      {"{% with a = 'x' %}{{ a }}{% endwith %}{{ a }}{% generation %}y{% endgeneration %}", "xy"},
      {"{{ messages[1].content }}{% if messages|length > 9 %}{{ 'a'|tojson }}{{ unknown() }}{% endif %}", "Hi"},
  };
  for (const auto& [text, expected] : cases) EXPECT_EQ(rendered(text), expected) << text;
}

TEST(Jinja, SpaceAroundTags) {
  const std::pair<const char*, const char*> cases[] = {
      {"a\n  {% if on %}\nb\n  {% endif %}\nc\n", "a\nb\nc"}, {"a\n  {%- if on -%}\n b {% endif %}", "ab "},
      {"a {%+ if on +%}\n b{% endif %}", "a \n b"},           {"a\n  {# note #}\nb", "a\nb"},
      {"a {{- ' b ' -}} c\n{{ 'd' }}\ne", "a b c\nd\ne"},     {"x {% if on %}\ny{% endif %}", "x y"},
      {"{{ '%}' }}{{ {'a': {'b': 1}}['a']['b'] }}", "%}1"},   {"a\r\nb{% if on %}\r\nc{% endif %}", "a\nbc"},
  };
  for (const auto& [text, expected] : cases) EXPECT_EQ(rendered(text), expected) << text;
}

TEST(Jinja, ErrorsSayWhatAndWhere) {
  EXPECT_THAT(failure("a\n{{ 'x'|tojson }}"), HasSubstr("'t', line 2: the filter 'tojson' is not understood"));
  EXPECT_THAT(failure("{% if 1 is prime %}{% endif %}"), HasSubstr("the test 'prime' is not understood"));
  EXPECT_THAT(failure("{{ strftime_now('%d') }}"), HasSubstr("the function 'strftime_now' is not understood"));
  EXPECT_THAT(failure("{{ 'x'.encode() }}"), HasSubstr("the method 'encode' is not understood"));
  EXPECT_THAT(failure("{{ raise_exception('No system') }}"), HasSubstr("refuses this conversation: No system"));
  EXPECT_THAT(failure("{{ nothing.role }}"), HasSubstr("'role' of something undefined"));
  EXPECT_THAT(failure("{{ 'a' + 1 }}"), HasSubstr("'+' of these values"));
  EXPECT_THAT(failure("{{ messages }}"), HasSubstr("a list or an object as text"));
  EXPECT_THAT(failure("{% import 'x' %}"), HasSubstr("{% import %} is not understood"));
  EXPECT_THAT(failure("{% if on %}"), HasSubstr("expected {% endif %}, got the end"));
  EXPECT_THAT(failure("{{ 1 + }}"), HasSubstr("expected an expression"));
  EXPECT_THAT(failure("{{ 'x }}"), HasSubstr("a string has no end"));
  EXPECT_THAT(failure("{# x"), HasSubstr("a comment has no #}"));
}

// What would take all time or memory; with a sanitizer it takes a minute.
TEST(Jinja, WorkAndTextAreBounded) {
  EXPECT_THAT(failure("{% for a in range(9999) %}{% for b in range(9999) %}{% endfor %}{% endfor %}"),
              HasSubstr("at most 300000 steps, got more"));
  EXPECT_THAT(failure("{% set ns = namespace(a='aaaaaaaa') %}{% for i in range(99) %}{% set ns.a = ns.a + ns.a %}"
                      "{% endfor %}"),
              HasSubstr("a text of at most 16777216 bytes, got "));
}

// Few steps that copy, compare or search much.
TEST(Jinja, SizesOfStepsAreBounded) {
  const auto times = [](int count, const std::string& text) {
    std::string all;
    for (int i = 0; i < count; ++i) all += text;
    return all;
  };
  const std::string lists = "{% set a = [1] %}" + times(30, "{% set a = [a, a] %}");
  const std::string texts = "{% set s = 'aaaaaaaaaaaaaaaa' %}" + times(19, "{% set s = s + s %}");
  EXPECT_THAT(failure(lists), HasSubstr("copies and compares at most 4194304 values (128 bytes of text count as one)"));
  const std::string loop = "{% for i in range(99000) %}", end = "{% endfor %}";
  for (const char* body : {"{% if s == s %}{% endif %}", "{% if 'b' in s %}{% endif %}", "{% set t = s|upper %}",
                           "{% set t = [s] %}", "{% if s|length %}{% endif %}", "{% if s < s %}{% endif %}"}) {
    const std::string whole = fmt::format("{}{}{}{}", texts, loop, body, end);
    EXPECT_THAT(failure(whole), HasSubstr("copies and compares at most")) << body;
  }
  EXPECT_THAT(failure(texts + "{{ s|replace('a', s) }}"), HasSubstr("a text of at most 16777216 bytes, got "));
  EXPECT_THAT(failure(texts + "{{ s.replace('a', 'bbb') }}"), HasSubstr("a text of at most 16777216 bytes, got "));
  EXPECT_THAT(failure(texts + "{{ s.split('a')|length }}"), HasSubstr("split(): expected at most 100000 parts"));
  // Search is linear, also for what is almost found everywhere.
  EXPECT_EQ(rendered(texts + "{{ (s ~ 'b') in (s ~ s) }}"), "False");
}

TEST(Jinja, AConversationOfMegabytesIsWritten) {
  Variables many = conversation();
  for (int i = 0; i < 2000; ++i) many["messages"].push_back({{"role", "user"}, {"content", std::string(4000, 'x')}});
  const std::string text =
      JinjaTemplate(
          "{% for m in messages %}{% if loop.index0 > 0 and messages[loop.index0 - 1].role != 'system' and "
          "messages|length "
          "> 3 and messages[-1].content|trim|length %}{{ m['content'] | trim + m.role }}{% endif %}{% endfor %}",
          "'t'")
          .render(many);
  EXPECT_GT(text.size(), size_t{2000} * 4000);
}

TEST(Jinja, EndsWhenItIsAskedToStop) {
  request_stop();
  EXPECT_THROW(rendered("{{ 1 }}"), Stopped);
  withdraw_stop();
}

TEST(Jinja, DepthAndLengthAreBounded) {
  EXPECT_THAT(failure("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}"),
              HasSubstr("at most 400 blocks, expressions and macros in one another"));
  EXPECT_THAT(failure("{{ " + std::string(300, '(') + "1" + std::string(300, ')') + " }}"),
              HasSubstr("in one another"));
  std::string sum = "{{ 1";
  for (int i = 0; i < 3000; ++i) sum += " + 1";
  EXPECT_THAT(failure(sum + " }}"), HasSubstr("parts of a block or an output, got more"));
}

}  // namespace
}  // namespace fw
