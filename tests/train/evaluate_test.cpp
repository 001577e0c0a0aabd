#include "train/evaluate.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <span>
#include <vector>

#include "base/checksum.h"
#include "base/error.h"
#include "base/file.h"
#include "tokenizer/text_bytes.h"
#include "train/token_writer.h"
#include "training_support.h"

namespace fw {
namespace {

using testing::byte_file;
using testing::sample_text;
using testing::TempFolder;

// Bytes whose text is of different lengths, as with tokens of several bytes.
class UnevenTokenizer : public Tokenizer {
 public:
  int32_t vocab_size() const override { return 256; }
  std::vector<int32_t> encode(std::string_view text) const override { return byte_tokenizer()->encode(text); }
  std::string decode(const std::vector<int32_t>& ids) const override { return byte_tokenizer()->decode(ids); }
  std::string piece(int32_t id) const override { return std::string(static_cast<size_t>(id % 4), 'x'); }
  std::string type() const override { return "uneven"; }
  uint64_t checksum() const override { return byte_tokenizer()->checksum(); }  // the same ids of the same text
  void save(const std::string&) const override {}
};

LanguageModel<float> random_model() {
  ModelConfig config = testing::tiny_model();
  config.init = "normal";
  LanguageModel<float> model(config);
  Random random(21);
  model.init(random);
  // Far from uniform, so that what was seen before matters.
  for (float& value : model.params().values()) value *= 4;
  return model;
}

struct Expected {
  double nll = 0;
  int64_t count = 0, bytes = 0;
};

// Each segment [begin, end) of a document alone through forward_all, log-softmax in double.
Expected expected_loss(LanguageModel<float>& model, const TokenFile& file, int64_t window) {
  Expected e;
  for (int64_t i = 0; i < file.documents(); ++i) {
    for (int64_t begin = file.document_begin(i); begin < file.document_begin(i + 1); begin += window) {
      const int64_t length = std::min(window, file.document_begin(i + 1) - begin);
      std::vector<int32_t> ids(static_cast<size_t>(length));
      file.read(begin, ids);
      std::vector<float> logits(static_cast<size_t>(length) * 256);
      model.forward_all(ids, SeqLayout({0, length}), nullptr, Mat<float>(logits.data(), length, 256));
      for (int64_t t = 1; t < length; ++t) {
        const float* row = logits.data() + (t - 1) * 256;
        const double top = *std::max_element(row, row + 256);
        double sum = 0;
        for (int v = 0; v < 256; ++v) sum += std::exp(row[v] - top);
        const int32_t id = ids[static_cast<size_t>(t)];
        e.nll += top + std::log(sum) - row[id];
        ++e.count;
        e.bytes += id % 4;
      }
    }
  }
  return e;
}

// Documents of 1 token, of a few, and one longer than a pass of the evaluation.
std::string mixed_text() {
  std::string text = "a\n%\n" + sample_text(9, 5) + "%\n";
  for (int i = 0; i < 700; ++i) text += "abcdefg" + std::to_string(i);
  return text + "\n%\nb\n";
}

TEST(Evaluate, ScoresEveryTokenButTheFirstOfEveryWindow) {
  const TempFolder folder;
  LanguageModel<float> model = random_model();
  const auto file = byte_file(mixed_text(), folder.path("tokens"));
  ASSERT_GT(file->tokens(), 5000);
  for (const int64_t context : {2, 7, 64, 1000, 6000}) {
    const Expected e = expected_loss(model, *file, context);
    const EvalResult r = evaluate_file(model, *file, UnevenTokenizer(), context, false);
    EXPECT_EQ(r.sum.count, e.count) << context;
    EXPECT_EQ(r.bytes, e.bytes) << context;
    EXPECT_NEAR(r.sum.nll / e.nll, 1.0, 1e-5) << context;
  }
}

TEST(Evaluate, CarriesTheStateFromWindowToWindowInsideADocument) {
  const TempFolder folder;
  LanguageModel<float> model = random_model();
  const auto file = byte_file(mixed_text(), folder.path("tokens"));
  const Expected e = expected_loss(model, *file, file->tokens());
  EXPECT_EQ(e.count, file->tokens() - file->documents());
  for (const int64_t context : {0, 1, 2, 7, 64, 1000, 6000}) {
    const EvalResult r = evaluate_file(model, *file, UnevenTokenizer(), context, true);
    EXPECT_EQ(r.sum.count, e.count) << context;
    EXPECT_EQ(r.bytes, e.bytes) << context;
    EXPECT_NEAR(r.sum.nll / e.nll, 1.0, 1e-5) << context;
  }
  // Whole documents are the same thing, carried or not.
  EXPECT_EQ(evaluate_file(model, *file, UnevenTokenizer(), 0, false).sum.nll,
            evaluate_file(model, *file, UnevenTokenizer(), 0, true).sum.nll);
  // The state does matter.
  EXPECT_GT(std::abs(expected_loss(model, *file, 8).nll / static_cast<double>(expected_loss(model, *file, 8).count) /
                         (e.nll / static_cast<double>(e.count)) -
                     1),
            1e-3);
}

TEST(Evaluate, TheUnitsFollowFromNats) {
  const TempFolder folder;
  LanguageModel<float> model = random_model();
  const auto file = byte_file(sample_text(10, 6), folder.path("tokens"));
  const EvalResult r = evaluate_file(model, *file, UnevenTokenizer(), 32, true);
  EXPECT_DOUBLE_EQ(r.loss, r.sum.nll / static_cast<double>(r.sum.count));
  EXPECT_DOUBLE_EQ(r.perplexity, std::exp(r.loss));
  EXPECT_DOUBLE_EQ(r.bits_per_token, r.loss / std::log(2.0));
  ASSERT_TRUE(r.bytes && r.bits_per_byte);
  EXPECT_DOUBLE_EQ(*r.bits_per_byte, r.sum.nll / std::log(2.0) / static_cast<double>(*r.bytes));
  EXPECT_NE(r.bits_per_byte, r.bits_per_token);
  const EvalResult bytes = evaluate_file(model, *file, *byte_tokenizer(), 32, true);
  EXPECT_EQ(bytes.bytes, bytes.sum.count);
}

// Bytes whose letters it writes with an accent, as a tokenizer that drops accents does the other way round: a piece has
// two bytes more than the text.
class AccentTokenizer final : public UnevenTokenizer {
 public:
  std::string piece(int32_t id) const override {
    return id >= 'a' && id <= 'z' ? std::string(1, static_cast<char>(id)) + "\xcc\x81" : byte_tokenizer()->piece(id);
  }
};

TEST(Evaluate, CountsTheBytesOfTheTextNotOfThePieces) {
  const TempFolder folder;
  LanguageModel<float> model = random_model();
  const AccentTokenizer tokenizer;
  write_token_file(mixed_text(), "%", tokenizer, folder.path("tokens"));
  const TokenFile file(folder.path("tokens"));
  ASSERT_TRUE(file.knows_bytes());
  for (const int64_t context : {0, 7, 64}) {
    const EvalResult r = evaluate_file(model, file, tokenizer, context, false);
    EXPECT_EQ(r.bytes, r.sum.count) << context;
  }
  int64_t all = 0;
  const TextBytes pieces(tokenizer);
  std::vector<int32_t> ids(static_cast<size_t>(file.tokens()));
  file.read(0, ids);
  for (int64_t i = 0; i < file.tokens(); ++i)
    all += file.exception_at(i).value_or(pieces.piece(ids[static_cast<size_t>(i)]));
  EXPECT_EQ(all, file.text_bytes() + file.documents()) << "the newline that begins a document is no text";
}

// A file of an earlier program says nothing of bytes: they are known where the pieces are the text.
TEST(Evaluate, OfAnOldFileBytesAreKnownWherePiecesAreTheText) {
  const TempFolder folder;
  LanguageModel<float> model = random_model();
  byte_file(mixed_text(), folder.path("tokens"));
  std::string content = read_file(folder.path("tokens"));
  content.resize(content.size() - 24);
  content[8] = 2;
  std::fill_n(content.begin() + 48, 8, '\0');
  Checksum sum;
  sum.add(content);
  const uint64_t checksum = sum.value();
  std::memcpy(content.data() + 48, &checksum, 8);
  const TokenFile old(std::as_bytes(std::span(content)), "old");
  const EvalResult bytes = evaluate_file(model, old, *byte_tokenizer(), 64, false);
  EXPECT_EQ(bytes.bytes, bytes.sum.count);
  const EvalResult uneven = evaluate_file(model, old, UnevenTokenizer(), 64, false);
  EXPECT_EQ(uneven.bytes, std::nullopt);
  EXPECT_EQ(uneven.bits_per_byte, std::nullopt);
  EXPECT_DOUBLE_EQ(uneven.loss, bytes.loss);
}

// The text after ids that are numbers is not there.
TEST(Evaluate, OfNumbersNoBytesAreKnown) {
  const TempFolder folder;
  LanguageModel<float> model = random_model();
  const auto ids = id_tokenizer(256);
  write_token_file("1 2 3 4 5 6 7 8\n", "", *ids, folder.path("tokens"));
  const EvalResult r = evaluate_file(model, TokenFile(folder.path("tokens")), *ids, 0, false);
  EXPECT_EQ(r.sum.count, 7);
  EXPECT_EQ(r.bytes, std::nullopt);
  EXPECT_EQ(r.bits_per_byte, std::nullopt);
}

TEST(Evaluate, RefusesWhatCannotBeScored) {
  const TempFolder folder;
  LanguageModel<float> model = random_model();
  const auto file = byte_file(sample_text(10, 6), folder.path("tokens"));
  const auto tokenizer = byte_tokenizer();
  EXPECT_THROW(evaluate_file(model, *file, *tokenizer, -1, true), Error);
  EXPECT_THROW(evaluate_file(model, *file, *tokenizer, 1, false), Error);
  write_token_file("a", "", *tokenizer, folder.path("single"));  // no separator: nothing is added to the one byte
  const auto single = std::make_shared<const TokenFile>(folder.path("single"));
  EXPECT_THROW(evaluate_file(model, *single, *tokenizer, 16, true), Error);
  ModelConfig small = testing::tiny_model();
  small.vocab_size = 64;
  LanguageModel<float> other(small);
  EXPECT_THROW(evaluate_file(other, *file, *tokenizer, 16, true), Error);
}

}  // namespace
}  // namespace fw
