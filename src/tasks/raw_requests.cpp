#include "tasks/raw_requests.h"

#include <algorithm>

#include "base/error.h"
#include "base/nearest.h"
#include "base/python_json.h"
#include "tasks/json_fields.h"
#include "tasks/unicode.h"

namespace fw {
namespace {

using Fill = void (*)(const JsonFields& raw, const RecallOptions& recall, Request& request);

void replace_all(std::string& text, std::string_view from, std::string_view to) {
  std::string out;
  size_t begin = 0;
  for (size_t at = text.find(from); at != std::string::npos; at = text.find(from, begin)) {
    out.append(text, begin, at - begin).append(to);
    begin = at + from.size();
  }
  text = out.append(text, begin);
}

void choose(Request& r, std::string context, std::vector<std::string> choices, int64_t gold) {
  r.kind = RequestKind::kChoices;
  r.contexts = {std::move(context)};
  r.choices = std::move(choices);
  r.gold = gold;
}

// An index that some files have as a number and others as a string of one.
int64_t index_of(const JsonFields& raw, const char* key, int64_t first, int64_t count) {
  const std::string text = raw.text_or_number(key);
  for (int64_t i = 0; i < count; ++i) {
    if (text == fmt::format("{}", first + i)) return i;
  }
  raw.fail(fmt::format("{}: expected {} to {}, got '{}'", key, first, first + count - 1, text));
}

std::vector<std::string> texts_or_one(const JsonFields& raw, const char* key) {
  return raw.at(key).is_string() ? std::vector<std::string>{raw.text(key)} : raw.texts(key);
}

void piqa(const JsonFields& raw, const RecallOptions&, Request& r) {
  choose(r, fmt::format("Question: {}\nAnswer:", raw.text("goal")), {raw.text("sol1"), raw.text("sol2")},
         index_of(raw, "label", 0, 2));
}

std::string hellaswag_text(std::string_view raw) {
  std::string text(stripped(raw));
  replace_all(text, " [title]", ". ");
  text = replaced(text, "\\[.*?\\]", "");
  replace_all(text, "  ", " ");
  return text;
}

void hellaswag(const JsonFields& raw, const RecallOptions&, Request& r) {
  std::vector<std::string> endings = raw.texts("endings");
  std::ranges::transform(endings, endings.begin(), hellaswag_text);
  const auto count = static_cast<int64_t>(endings.size());
  const std::string context =
      fmt::format("{}: {} {}", raw.text("activity_label"), raw.text("ctx_a"), capitalized(raw.text("ctx_b")));
  choose(r, hellaswag_text(context), std::move(endings), index_of(raw, "label", 0, count));
}

void winogrande(const JsonFields& raw, const RecallOptions&, Request& r) {
  const std::string sentence = raw.text("sentence");
  const size_t gap = sentence.find('_');
  if (gap == std::string::npos) raw.fail("sentence: expected one with a '_', got none");
  const std::string before = sentence.substr(0, gap);
  r.kind = RequestKind::kContexts;
  r.contexts = {fmt::format("{}{}", before, raw.text("option1")), fmt::format("{}{}", before, raw.text("option2"))};
  r.choices = {std::string(stripped(std::string_view(sentence).substr(gap + 1)))};
  r.gold = index_of(raw, "answer", 1, 2);
}

void lettered(const JsonFields& raw, std::string context, Request& r) {
  const JsonFields choices(raw.at("choices"), fmt::format("{}: choices", raw.where()));
  const std::vector<std::string> labels = choices.texts("label");
  std::vector<std::string> texts = choices.texts("text");
  const auto found = std::ranges::find(labels, raw.text_or_number("answerKey"));
  if (found == labels.end() || labels.size() != texts.size()) {
    raw.fail(fmt::format("answerKey: expected one of {}, a label for each of {} choices, got '{}'",
                         fmt::join(labels, ", "), texts.size(), raw.text_or_number("answerKey")));
  }
  choose(r, std::move(context), std::move(texts), found - labels.begin());
}

void arc(const JsonFields& raw, const RecallOptions&, Request& r) {
  lettered(raw, fmt::format("Question: {}\nAnswer:", raw.text("question")), r);
}
void openbookqa(const JsonFields& raw, const RecallOptions&, Request& r) {
  lettered(raw, raw.text("question_stem"), r);
}

void social_iqa(const JsonFields& raw, const RecallOptions&, Request& r) {
  choose(r, fmt::format("Q: {} {}\nA:", raw.text("context"), raw.text("question")),
         {raw.text("answerA"), raw.text("answerB"), raw.text("answerC")}, index_of(raw, "label", 1, 3));
}

void boolq(const JsonFields& raw, const RecallOptions&, Request& r) {
  choose(r, fmt::format("{}\nQuestion: {}?\nAnswer:", raw.text("passage"), raw.text("question")), {"no", "yes"},
         index_of(raw, "label", 0, 2));
}

void sciq(const JsonFields& raw, const RecallOptions&, Request& r) {
  choose(r, fmt::format("{}\nQuestion: {}\nAnswer:", raw.text("support"), raw.text("question")),
         {raw.text("distractor1"), raw.text("distractor2"), raw.text("distractor3"), raw.text("correct_answer")}, 3);
}

void lambada(const JsonFields& raw, const RecallOptions&, Request& r) {
  const std::string text = raw.text("text");
  const size_t space = text.rfind(' ');
  if (space == std::string::npos || space + 1 == text.size())
    raw.fail("text: expected words with a last one behind a space, got none");
  r.kind = RequestKind::kLikelihood;
  r.contexts = {text.substr(0, space)};
  r.choices = {text.substr(space)};
}

void fill_page(std::string_view page, Request& r) {
  r.kind = RequestKind::kRolling;
  r.text = wikitext_detokenized(page);
  r.words = pieces_between_space(page);
  r.bytes = static_cast<int64_t>(page.size());
}

void wikitext(const JsonFields& raw, const RecallOptions&, Request& r) { fill_page(raw.text("page"), r); }

void recall(const RecallOptions& options, std::string document, std::string question, std::vector<std::string> answers,
            Request& r) {
  constexpr int64_t kOutput = 48;
  r.kind = RequestKind::kGenerate;
  r.contexts = {std::move(document)};
  r.question = std::move(question);
  r.answers = std::move(answers);
  r.max_gen = kOutput;
  r.until = {"\n"};
  r.max_length = options.max_context;
  r.truncation = r.question.empty() ? Truncation::kLeft : options.truncation;
  r.metric = AnswerMetric::kContains;
}

void drop_tail(std::string& text, std::string_view tail) {
  text.erase(text.size() - trailing_space(text));
  if (!tail.empty() && text.ends_with(tail)) text.erase(text.size() - tail.size());
  text.erase(text.size() - trailing_space(text));
}

void keyed(const JsonFields& raw, const RecallOptions& options, const char* joint, Request& r) {
  std::string text = raw.text("text");
  const std::string key = raw.text("key");
  if (options.as_stored) {
    recall(options, std::move(text), "", texts_or_one(raw, "value"), r);
    return;
  }
  if (const size_t summary = text.rfind("Summary of information above"); summary != std::string::npos)
    text.erase(summary);
  drop_tail(text, ":");
  drop_tail(text, key);
  recall(options, std::move(text), fmt::format("{}{}:", joint, key), texts_or_one(raw, "value"), r);
}

void swde(const JsonFields& raw, const RecallOptions& options, Request& r) { keyed(raw, options, ". ", r); }
void fda(const JsonFields& raw, const RecallOptions& options, Request& r) { keyed(raw, options, " ", r); }
void squad(const JsonFields& raw, const RecallOptions& options, Request& r) {
  recall(options, raw.text("text"), "", texts_or_one(raw, "value"), r);
}

void asked(const JsonFields& raw, const RecallOptions& options, Request& r) {
  std::string document = raw.text("context");
  const std::string question = raw.text("question");
  for (const char* mark : {"[PAR]", "[DOC]", "[TLE]"}) replace_all(document, mark, "");
  drop_tail(document, question);
  recall(options, std::move(document), fmt::format(". {}", question), texts_or_one(raw, "answers"), r);
}

struct Known {
  const char* name;
  Fill fill;
};
constexpr Known kKnown[] = {{"piqa", piqa},
                            {"hellaswag", hellaswag},
                            {"winogrande", winogrande},
                            {"arc_easy", arc},
                            {"arc_challenge", arc},
                            {"openbookqa", openbookqa},
                            {"social_iqa", social_iqa},
                            {"boolq", boolq},
                            {"sciq", sciq},
                            {"lambada", lambada},
                            {"wikitext", wikitext},
                            {"swde", swde},
                            {"fda", fda},
                            {"squad", squad},
                            {"nq", asked},
                            {"triviaqa", asked},
                            {"drop", asked}};

bool is_title(std::string_view line) {
  line = stripped(line);
  return line.size() > 4 && line.starts_with("= ") && line.ends_with(" =") && !line.starts_with("= =") &&
         !line.ends_with("= =");
}

// Pages of a text, each from its title to the next; what stands before the first is a page when it has a word.
std::vector<Request> wikitext_pages(const std::string& text, const std::string& path) {
  std::vector<size_t> begins{0};
  for (size_t begin = 0; begin < text.size();) {
    const size_t end = std::min(text.find('\n', begin), text.size());
    if (begin > 0 && is_title(std::string_view(text).substr(begin, end - begin))) begins.push_back(begin);
    begin = end + 1;
  }
  begins.push_back(text.size());
  std::vector<Request> pages;
  for (size_t i = 0; i + 1 < begins.size(); ++i) {
    const std::string_view page = std::string_view(text).substr(begins[i], begins[i + 1] - begins[i]);
    if (stripped(page).empty()) continue;
    Request& r = pages.emplace_back();
    r.where = fmt::format("{}: page {}", path, pages.size() - 1);
    fill_page(page, r);
  }
  return pages;
}

bool is_json_object(std::string_view text) {
  const size_t first = text.find_first_not_of(" \t\r\n");
  return first != std::string_view::npos && text[first] == '{';
}

}  // namespace

std::vector<std::string> raw_tasks() {
  std::vector<std::string> names;
  names.reserve(std::size(kKnown));
  for (const Known& known : kKnown) names.emplace_back(known.name);
  return names;
}

std::vector<std::string> recall_tasks() {
  std::vector<std::string> names;
  for (const Known& known : kKnown) {
    if (known.fill == swde || known.fill == fda || known.fill == squad || known.fill == asked)
      names.emplace_back(known.name);
  }
  return names;
}

RequestFile requests_from_raw(const std::string& task, const std::string& path, const RecallOptions& recall,
                              bool skip_bad) {
  const auto known = std::ranges::find_if(kKnown, [&](const Known& k) { return task == k.name; });
  if (known == std::end(kKnown)) {
    const std::string near = nearest(task, raw_tasks());
    fail_usage("no raw format is known of the task '{}'; expected one of {}{}", task, fmt::join(raw_tasks(), ", "),
               near.empty() ? "" : fmt::format("; did you mean '{}'?", near));
  }
  RequestFile file;
  const std::string text = task == "wikitext" ? read_text(path) : std::string();
  if (!text.empty() && !is_json_object(text)) {
    file.requests = wikitext_pages(text, path);
  } else {
    for_each_line(path, [&](std::string_view line, const std::string& where) {
      try {
        const nlohmann::json json = parse_python_json(line, where);
        Request request;
        request.where = where;
        known->fill(JsonFields(json, where), recall, request);
        request.task = task;
        // What would be refused among requests is refused here.
        request_from_json(to_json(request), where);
        file.requests.push_back(std::move(request));
      } catch (const Error& error) {
        if (!skip_bad)
          throw Error(ErrorKind::kUsage, fmt::format("{}; --skip-bad leaves such lines out", error.what()));
        file.skipped.emplace_back(error.what());
      }
    });
  }
  if (file.requests.empty()) fail_usage("'{}': expected the raw file of {}, got nothing of it", path, task);
  for (size_t i = 0; i < file.requests.size(); ++i) {
    file.requests[i].task = task;  // of pages
    file.requests[i].id = fmt::format("{}", i);
  }
  return file;
}

std::string wikitext_detokenized(std::string_view page) {
  std::string text(page);
  replace_all(text, "s '", "s'");
  for (const char mark : {'-', ',', '.'}) replace_all(text, fmt::format(" @{}@ ", mark), std::string_view(&mark, 1));
  for (const char mark : {':', ';', '.', '!', '?', ','})
    replace_all(text, fmt::format(" {} ", mark), fmt::format("{} ", mark));
  text = replaced(text, R"(\(\s*([^\)]*?)\s*\))", "($1)");
  text = replaced(text, R"(\[\s*([^\]]*?)\s*\])", "[$1]");
  text = replaced(text, R"(\{\s*([^}]*?)\s*\})", "{$1}");
  text = replaced(text, R"("\s*([^"]*?)\s*")", "\"$1\"");
  text = replaced(text, R"('\s*([^']*?)\s*')", "'$1'");
  replace_all(text, "= = = =", "====");
  replace_all(text, "= = =", "===");
  replace_all(text, "= =", "==");
  replace_all(text, " \u00b0 ", "\u00b0");
  replace_all(text, " \n", "\n");
  replace_all(text, "\n ", "\n");
  replace_all(text, " N ", " 1 ");
  replace_all(text, " 's", "'s");
  return text;
}

}  // namespace fw
