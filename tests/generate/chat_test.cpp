// What stands around messages, read from templates of the shapes that are published.
#include "generate/chat.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <utility>

#include "base/error.h"
#include "base/file.h"
#include "base/temp_folder.h"

namespace fw {
namespace {

using ::testing::HasSubstr;
using testing::TempFolder;

// Bytes, and marks that are tokens of their own.
class MarkTokenizer : public Tokenizer {
 public:
  explicit MarkTokenizer(std::vector<std::string> marks) : marks_(std::move(marks)) {}
  int32_t vocab_size() const override { return 256 + static_cast<int32_t>(marks_.size()); }
  std::vector<int32_t> encode(std::string_view text) const override {
    std::vector<int32_t> ids;
    while (!text.empty()) {
      const auto mark = std::ranges::find_if(marks_, [&](const std::string& one) { return text.starts_with(one); });
      const bool found = mark != marks_.end();
      ids.push_back(found ? 256 + static_cast<int32_t>(mark - marks_.begin()) : static_cast<unsigned char>(text[0]));
      text.remove_prefix(found ? mark->size() : 1);
    }
    return ids;
  }
  std::string piece(int32_t id) const override {
    return id < 256 ? std::string(1, static_cast<char>(id)) : marks_[static_cast<size_t>(id - 256)];
  }
  std::string decode(const std::vector<int32_t>& ids) const override {
    std::string text;
    for (const int32_t id : ids) text += piece(id);
    return text;
  }
  std::string type() const override { return "marks"; }
  uint64_t checksum() const override { return 1; }
  void save(const std::string&) const override {}

 private:
  std::vector<std::string> marks_;
};

class ChatFormats : public ::testing::Test {
 protected:
  ChatFormat of(const std::string& text, const std::optional<std::string>& system = std::nullopt) {
    put("chat_template.jinja", text);
    return chat_format(folder_.path(), tokenizer_, system);
  }
  void put(const std::string& name, const std::string& text) { write_file_atomic(folder_.path(name), text); }
  std::string failure(const std::string& text, const std::optional<std::string>& system = std::nullopt) {
    try {
      of(text, system);
    } catch (const Error& error) {
      return error.what();
    }
    return "";
  }

  TempFolder folder_;
  MarkTokenizer tokenizer_{{"<|im_start|>", "<|im_end|>", "<|im_user|>", "<|im_assistant|>", "<|im_system|>",
                            "<|im_middle|>", "<|endoftext|>", "</s>"}};
};

constexpr const char* kPlain =
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}";

TEST_F(ChatFormats, ChatMl) {
  const ChatFormat plain = of(kPlain);
  EXPECT_EQ(plain.first, "<|im_start|>user\n");
  EXPECT_EQ(plain.after_user, "<|im_end|>\n<|im_start|>assistant\n");
  EXPECT_EQ(plain.end, "<|im_end|>");
  EXPECT_EQ(plain.between, "\n<|im_start|>user\n");
  EXPECT_EQ(plain.end_token, 257);
  EXPECT_FALSE(plain.trims_messages);
  EXPECT_EQ(of(kPlain, "be kind").first, "<|im_start|>system\nbe kind<|im_end|>\n<|im_start|>user\n");
}

// Qwen3.5's and Qwen3-Next's: messages are trimmed, and an answer begins with its thoughts or with none.
TEST_F(ChatFormats, ThinkingBegins) {
  const auto with = [](const std::string& opening) {
    return "{%- macro text(content) %}{{- content }}{%- endmacro %}"
           "{%- for m in messages %}{{- '<|im_start|>' + m.role + '\\n' + text(m.content)|trim + '<|im_end|>\\n' }}"
           "{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}" +
           opening + "{%- endif %}";
  };
  const std::string answer = "<|im_end|>\n<|im_start|>assistant\n", empty = "<think>\n\n</think>\n\n";
  const std::string off = "{%- if enable_thinking is defined and enable_thinking is false %}{{- '" + empty + "' }}";
  const ChatFormat format = of(with(off + "{%- else %}{{- '<think>\\n' }}{%- endif %}"));
  EXPECT_EQ(format.after_user, answer + "<think>\n");
  EXPECT_EQ(format.between, "\n<|im_start|>user\n");
  EXPECT_TRUE(format.trims_messages);
  EXPECT_EQ(of(with(off + "{%- endif %}")).after_user, answer);
  EXPECT_EQ(
      of(with("{%- if enable_thinking is defined and enable_thinking is true %}{{- '<think>\\n' }}{%- else %}{{- '" +
              empty + "' }}{%- endif %}"))
          .after_user,
      answer + empty);
}

// OLMo's: a system message of the template's own, words after that of the user, and the end token by its name.
TEST_F(ChatFormats, OlmoHybrid) {
  put("tokenizer_config.json", R"({"bos_token": null, "eos_token": {"content": "<|endoftext|>"}})");
  const std::string text =
      "{% set has_system = messages|selectattr('role', 'equalto', 'system')|list|length > 0 %}{% if not has_system %}"
      "{{ '<|im_start|>system\\nYou are a test.<|im_end|>\\n' }}{% endif %}{% for message in messages %}"
      "{% if message['role'] == 'system' %}{{ '<|im_start|>system\\n' + message['content'] }}"
      "{% if message.get('functions', none) is not none %}{{ message['functions']|tojson }}{% else %}"
      "{{ ' No functions.<|im_end|>\\n' }}{% endif %}{% elif message['role'] == 'user' %}"
      "{{ '<|im_start|>user\\n' + message['content'] + '<|im_end|>\\n' }}{% elif message['role'] == 'assistant' %}"
      "{{ '<|im_start|>assistant\\n' + message['content'] }}{% if not loop.last %}{{ '<|im_end|>\\n' }}{% else %}"
      "{{ eos_token }}{% endif %}{% endif %}{% if loop.last and add_generation_prompt %}"
      "{{ '<|im_start|>assistant\\n' }}{% endif %}{% endfor %}";
  EXPECT_EQ(of(text).first, "<|im_start|>system\nYou are a test.<|im_end|>\n<|im_start|>user\n");
  EXPECT_EQ(of(text, "Sys.").first, "<|im_start|>system\nSys. No functions.<|im_end|>\n<|im_start|>user\n");
  EXPECT_EQ(of(text).end_token, 257);
  // The older one of the family.
  const ChatFormat tulu =
      of("{{ bos_token }}{% for m in messages %}{{ '<|' + m.role + '|>\\n' + m.content }}{% if m.role == 'assistant' %}"
         "{{ eos_token }}{% endif %}{{ '\\n' }}{% if loop.last and add_generation_prompt %}{{ '<|assistant|>\\n' }}"
         "{% endif %}{% endfor %}");
  EXPECT_EQ(tulu.first, "<|user|>\n");
  EXPECT_EQ(tulu.end, "<|endoftext|>");
  EXPECT_EQ(tulu.between, "\n<|user|>\n");
}

TEST_F(ChatFormats, KimiLinear) {
  const std::string text =
      "{%- for message in messages -%}\n  {%- if loop.first and messages[0]['role'] != 'system' -%}\n"
      "    <|im_system|>system<|im_middle|>You are a test.<|im_end|>\n  {%- endif -%}\n"
      "  {%- if message['role'] == 'system' -%}\n    <|im_system|>system<|im_middle|>\n"
      "  {%- elif message['role'] == 'user' -%}\n    <|im_user|>user<|im_middle|>\n"
      "  {%- elif message['role'] == 'assistant' -%}\n    <|im_assistant|>assistant<|im_middle|>\n  {%- endif -%}\n"
      "  {%- if message['content'] is string -%}\n    {{- message['content'] + '<|im_end|>' -}}\n  {%- endif -%}\n"
      "{%- endfor -%}\n{%- if add_generation_prompt -%}\n  <|im_assistant|>assistant<|im_middle|>\n{%- endif -%}\n";
  const ChatFormat format = of(text);
  EXPECT_EQ(format.first, "<|im_system|>system<|im_middle|>You are a test.<|im_end|><|im_user|>user<|im_middle|>");
  EXPECT_EQ(format.after_user, "<|im_end|><|im_assistant|>assistant<|im_middle|>");
  EXPECT_EQ(format.end, "<|im_end|>");
  EXPECT_EQ(format.between, "<|im_user|>user<|im_middle|>");
  EXPECT_EQ(of(text, "S").first, "<|im_system|>system<|im_middle|>S<|im_end|><|im_user|>user<|im_middle|>");
}

TEST_F(ChatFormats, TemplatesInOtherFiles) {
  put("tokenizer_config.json",
      R"({"chat_template": [{"name": "tool_use", "template": "x"},
                                      {"name": "default", "template": "{% for m in messages %}{{ m.content }}</s>{% endfor %}"}]})");
  EXPECT_EQ(chat_format(folder_.path(), tokenizer_, std::nullopt).end, "</s>");
  put("chat_template.json", R"({"chat_template": "{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}"})");
  EXPECT_EQ(chat_format(folder_.path(), tokenizer_, std::nullopt).end, "<|im_end|>");
}

TEST_F(ChatFormats, WhatIsNoFormatIsRefused) {
  EXPECT_THAT(failure("{{ messages[0].content|tojson }}"),
              HasSubstr("chat_template.jinja', line 1: the filter 'tojson' is not understood"));
  EXPECT_THAT(failure("hello"), HasSubstr("expected each message to be written once"));
  EXPECT_THAT(failure("{% for m in messages %}{{ m.content }}{{ m.content }}{% endfor %}"),
              HasSubstr("expected each message to be written once"));
  EXPECT_THAT(failure("{% for m in messages %}{{ loop.index }}{{ m.content }}</s>{% endfor %}"),
              HasSubstr("depending on other turns"));
  EXPECT_THAT(failure("{% for m in messages %}{{ m.role }}: {{ m.content }}\n\n{% endfor %}assistant:"),
              HasSubstr("expected a special token of the tokenizer at the end of an answer"));
  EXPECT_THAT(failure("{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}" +
                          std::string(kPlain),
                      "be kind"),
              HasSubstr("refuses this conversation: no system"));
}

}  // namespace
}  // namespace fw
