// Parts of texts against the same done in memory; JSON lines; streams that come in small pieces.
#include "train/text_parts.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <stdexcept>

#include "base/error.h"
#include "base/random.h"

namespace fw {
namespace {

namespace fs = std::filesystem;

class TextParts : public testing::Test {
 protected:
  void SetUp() override {
    std::string path = (fs::temp_directory_path() / "fw-parts-test-XXXXXX").string();
    ASSERT_NE(::mkdtemp(path.data()), nullptr);
    folder_ = path;
  }
  void TearDown() override { fs::remove_all(folder_); }
  std::string put(const std::string& name, const std::string& content) const {
    std::ofstream(folder_ + "/" + name, std::ios::binary) << content;
    return folder_ + "/" + name;
  }
  std::string folder_;
};

std::vector<std::string> read_all(TextSource& source, size_t piece = 7) {
  std::vector<std::string> texts;
  std::string buffer(piece, '\0');
  while (source.next()) {
    texts.emplace_back();
    while (const size_t n = source.read(buffer)) texts.back().append(buffer, 0, n);
  }
  return texts;
}

std::vector<std::string> content(const std::vector<TextPart>& parts) {
  return parts.empty() ? std::vector<std::string>() : read_all(*open_parts(parts, "text"));
}

// Where a text in memory is cut.
size_t cut_in_memory(const std::string& text, const std::string& separator, size_t at) {
  if (!separator.empty()) {
    const std::string line = "\n" + separator + "\n";
    const size_t found = text.find(line, at);
    return found == std::string::npos ? text.size() : found + line.size();
  }
  const size_t line = text.find('\n', at);
  if (line != std::string::npos && line + 1 < text.size()) return line + 1;
  size_t cut = at;
  while (cut < text.size() && (static_cast<unsigned char>(text[cut]) & 0xC0) == 0x80) ++cut;
  return cut;
}

// Gives few bytes at a time, as packed files do at the edges of their blocks.
class Dripping final : public TextSource {
 public:
  Dripping(std::string text, size_t most) : text_(std::move(text)), most_(most) {}
  const std::string& name() const override { return text_; }
  bool next() override { return true; }
  size_t read(std::span<char> out) override {
    const size_t n = std::min({out.size(), most_, text_.size() - at_});
    std::copy_n(text_.data() + at_, n, out.data());
    at_ += n;
    return n;
  }

 private:
  std::string text_;
  size_t most_, at_ = 0;
};

TEST(FindCut, AsInMemoryWhateverThePieces) {
  Random random(5);
  const std::string alphabet[] = {"a", "\n", "%", "\n%\n", "\xC3\xA9", "\xE2\x82\xAC"};
  for (int round = 0; round < 400; ++round) {
    std::string text;
    const uint64_t letters = random.below(40), kinds = round % 4 == 0 ? 1 : 6;
    for (uint64_t i = 0; i < letters; ++i) text += alphabet[kinds == 1 ? 4 : random.below(kinds)];
    for (const std::string separator : {"", "%", "%%"}) {
      for (size_t at = 0; at < text.size(); ++at) {
        Dripping source(text, 1 + random.below(5));
        EXPECT_EQ(find_cut(source, at, separator), cut_in_memory(text, separator, at))
            << testing::PrintToString(text) << " at " << at << " '" << separator << "'";
      }
    }
  }
}

TEST_F(TextParts, NothingIsLostAndTheShareIsHeldOut) {
  std::string long_text, documents;
  for (int i = 0; i < 60000; ++i) long_text += "line " + std::to_string(i) + "\n";  // more than one piece of the reader
  for (int i = 0; i < 100; ++i) documents += "document " + std::to_string(i) + "\nof two lines\n%\n";
  const std::string a = put("a", long_text), b = put("b", documents);
  for (const double share : {0.0, 0.001, 0.1, 0.5, 0.9}) {
    for (const std::string separator : {"", "%"}) {
      const TextSplit split = hold_out({a, b}, "text", separator, share);
      std::string train, valid;
      for (const std::string& text : content(split.train)) train += text;
      for (const std::string& text : content(split.valid)) valid += text;
      EXPECT_EQ(train + valid, long_text + documents);
      const double total = static_cast<double>(train.size() + valid.size());
      const double cut = total * (1 - share);
      EXPECT_GE(static_cast<double>(train.size()), std::floor(cut) - 1);
      if (separator.empty() || cut > static_cast<double>(long_text.size())) {
        EXPECT_LE(static_cast<double>(train.size()), cut + 40);
      }
      if (!valid.empty() && separator.empty()) {
        EXPECT_TRUE(valid.starts_with("line ") || valid.starts_with("document ") || valid.starts_with("of two") ||
                    valid[0] == '%');
      }
    }
  }
}

TEST_F(TextParts, OfJsonLinesWholeTextsAreHeldOut) {
  std::string lines;
  for (int i = 0; i < 10; ++i)
    lines += "{\"id\": " + std::to_string(i) + ", \"body\": \"text number " + std::to_string(i) + "\"}\n\n";
  const std::string path = put("x.jsonl", lines);
  const TextSplit split = hold_out({path}, "body", "", 0.25);
  const auto texts = [](const std::vector<TextPart>& parts) { return read_all(*open_parts(parts, "body")); };
  EXPECT_EQ(texts(split.train).size(), 8u);
  EXPECT_THAT(texts(split.valid), testing::ElementsAre("text number 8", "text number 9"));
  EXPECT_EQ(texts({{path, 3, 5}}), (std::vector<std::string>{"text number 3", "text number 4"}));
  EXPECT_EQ(hold_out({path}, "body", "", 0.01).valid, (std::vector<TextPart>{}));
}

TEST_F(TextParts, AFileWithoutTextIsNamed) {
  const std::string empty = put("empty.jsonl", "\n\n");
  try {
    hold_out({put("full", "text\n"), empty}, "text", "", 0.1);
    FAIL() << "accepted";
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kUsage);
    EXPECT_THAT(error.what(), testing::HasSubstr("empty.jsonl"));
  }
}

}  // namespace
}  // namespace fw
