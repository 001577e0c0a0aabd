// Documents that end with the tokenizer's end of text: once each, whatever the text has there, and resumed as if never
// stopped.
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "base/base_support.h"
#include "base/file.h"
#include "tokenizer/tokenizer.h"
#include "train/token_writer.h"
#include "train/training_support.h"

namespace fw {
namespace {

using testing::TempFolder;
using Ids = std::vector<int32_t>;

constexpr int32_t kEnd = 4;

// Words of a small vocabulary, and an end: one 1, two 2, a line's end 3.
std::unique_ptr<Tokenizer> words() {
  const std::string text = R"({"version":"1.0","truncation":null,"padding":null,
    "added_tokens":[{"id":4,"content":"<|end|>","single_word":false,"lstrip":false,"rstrip":false,"normalized":false,"special":true}],
    "normalizer":null,"pre_tokenizer":{"type":"Split","pattern":{"String":" "},"behavior":"Removed","invert":false},"post_processor":null,"decoder":{"type":"Fuse"},
    "model":{"type":"WordLevel","vocab":{"?":0,"one":1,"two":2,"\n":3},"unk_token":"?"}})";
  return huggingface_tokenizer(text, nlohmann::json::parse(text), "words", "<|end|>");
}

class DocumentEnd : public ::testing::Test {
 protected:
  std::vector<Ids> documents(const std::vector<std::string>& texts, const std::string& separator = "",
                             bool end = true) {
    TokenizeOptions options;
    options.separator = separator;
    options.document_end = end;
    options.go_on = false;
    write_token_file(
        [&] {
          struct Texts final : TextSource {
            explicit Texts(const std::vector<std::string>& t) : texts(t) {}
            const std::string& name() const override { return texts[0]; }
            bool next() override { return at = 0, ++index < texts.size(); }
            size_t read(std::span<char> out) override {
              const size_t n = texts[index].copy(out.data(), out.size(), at);
              return at += n, n;
            }
            const std::vector<std::string>& texts;
            size_t index = static_cast<size_t>(-1), at = 0;
          };
          return std::make_unique<Texts>(texts);
        },
        options, *tokenizer_, folder_.path("tokens"));
    const TokenFile file(folder_.path("tokens"));
    EXPECT_EQ(file.end_token(), end ? kEnd : -1);
    std::vector<Ids> all;
    for (int64_t i = 0; i < file.documents(); ++i) {
      Ids& ids = all.emplace_back(static_cast<size_t>(file.document_begin(i + 1) - file.document_begin(i)));
      file.read(file.document_begin(i), ids);
    }
    return all;
  }

  TempFolder folder_;
  const std::unique_ptr<Tokenizer> tokenizer_ = words();
};

TEST_F(DocumentEnd, EachDocumentEndsOnce) {
  EXPECT_EQ(documents({"one two", "two"}), (std::vector<Ids>{{1, 2, kEnd}, {2, kEnd}}));
  EXPECT_EQ(documents({"one two", "two"}, "", false), (std::vector<Ids>{{1, 2}, {2}}));
  EXPECT_EQ(documents({"one", ""}), (std::vector<Ids>{{1, kEnd}})) << "a text of nothing is no document";
}

TEST_F(DocumentEnd, NeverTwice) {
  EXPECT_EQ(documents({"one<|end|>"}), (std::vector<Ids>{{1, kEnd}}));
  EXPECT_EQ(documents({"one <|end|> \n"}), (std::vector<Ids>{{1, kEnd, 3}})) << "space behind it is no new text";
  EXPECT_EQ(documents({"one<|end|>two"}), (std::vector<Ids>{{1, kEnd, 2, kEnd}}));
}

TEST_F(DocumentEnd, BehindTheSeparator) {
  EXPECT_EQ(documents({"one \n<|end|>\ntwo \n<|end|>\n"}, "<|end|>").size(), 2u);
  for (const Ids& ids : documents({"one \n<|end|>\ntwo \n<|end|>\n"}, "<|end|>"))
    EXPECT_EQ(std::count(ids.begin(), ids.end(), kEnd), 1);
  for (const Ids& ids : documents({"one \n%\ntwo \n%\n"}, "%")) EXPECT_EQ(ids.back(), kEnd);
}

// The end has no text, so it counts no bytes.
TEST_F(DocumentEnd, HasNoBytes) {
  documents({"one two"});
  const TokenFile file(folder_.path("tokens"));
  EXPECT_TRUE(file.knows_bytes());
  EXPECT_EQ(file.exception_at(2), 0);
  EXPECT_EQ(file.text_bytes(), 7);
}

TEST_F(DocumentEnd, AStoppedCallIsGoneOnWith) {
  std::string text;
  for (int i = 0; i < 500; ++i) text += i % 7 == 0 ? "\n<|end|>\n" : i % 3 == 0 ? "one " : "two ";
  for (const char* separator : {"", "<|end|>"}) {
    TokenizeOptions options;
    options.separator = separator;
    options.document_end = true;
    const std::string path = folder_.path("tokens");
    const TextOpener open = [&text] { return text_in_memory(text); };
    write_token_file(open, options, *tokenizer_, folder_.path("whole"));
    options.piece = 50;
    for (int stops = 0, calls = 0;; ++stops, calls = 0) {
      ASSERT_LT(stops, 1000);
      int64_t furthest = 0;
      options.progress = [&](const TokenFileStats& stats) {
        return stats.bytes <= furthest || ++calls < 4 + stops * 4;
      };
      if (write_token_file(open, options, *tokenizer_, path).complete) break;
    }
    EXPECT_TRUE(read_file(path) == read_file(folder_.path("whole"))) << separator;
    std::filesystem::remove(path);
  }
}

TEST_F(DocumentEnd, TokenizersWithoutAnEndHaveNone) {
  TokenizeOptions options;
  options.document_end = true;
  write_token_file([] { return text_in_memory("one"); }, options, *byte_tokenizer(), folder_.path("tokens"));
  EXPECT_EQ(TokenFile(folder_.path("tokens")).tokens(), 3);
}

}  // namespace
}  // namespace fw
