// Two tokenizers of one size make ids that look alike: token files and models remember theirs, and another one is
// refused.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <filesystem>

#include "base/checksum.h"
#include "cli/program.h"

namespace fw::test {
namespace {

namespace fs = std::filesystem;
using testing::HasSubstr;
using Args = std::vector<std::string>;

// Two SentencePiece models of 290 pieces, a model trained with the first, and a token file of each.
class TokenizerIdentity : public testing::Test {
 protected:
  static void SetUpTestSuite() {
    folder_ = std::make_unique<Folder>();
    spill(at("text"), small_text());
    for (const char* type : {"unigram", "bpe"}) {
      const std::string model = at(std::string(type) + ".model");
      ASSERT_EQ(
          run({"tokenize", at("text"), "--train-sentencepiece", "--vocab", "290", "--model-type", type, "--out", model})
              .code,
          0);
      ASSERT_EQ(run({"tokenize", at("text"), "--tokenizer", model, "--out", at(std::string(type) + ".tokens")}).code,
                0);
    }
    const Outcome trained = run(tiny_train(at("text"), at("run")) + Args{"--tokenizer", at("unigram.model")});
    ASSERT_EQ(trained.code, 0) << trained.err;
  }
  static void TearDownTestSuite() { folder_.reset(); }

  static std::string at(const std::string& name) { return *folder_ / name; }
  static void expect_refused(const Args& args, const std::string& words) {
    const Outcome outcome = run(args);
    EXPECT_EQ(outcome.code, 2) << outcome.out << outcome.err;
    EXPECT_THAT(outcome.err, HasSubstr(words));
  }
  static void expect_hi_lo(const Args& args) {
    const Outcome outcome = run(args);
    EXPECT_EQ(outcome.code, 0) << outcome.err;
  }
  // A copy of the model, to be spoiled.
  static std::string copy(const std::string& name) {
    fs::copy(at("run/model"), at(name), fs::copy_options::recursive);
    return at(name);
  }

  static std::unique_ptr<Folder> folder_;
};
std::unique_ptr<Folder> TokenizerIdentity::folder_;

TEST_F(TokenizerIdentity, TokenFilesOfAnother) {
  expect_hi_lo({"eval", at("run"), "--text", at("unigram.tokens"), "--context", "64"});
  expect_refused({"eval", at("run"), "--text", at("bpe.tokens"), "--context", "64"}, "another tokenizer");
  expect_refused({"analyze", at("run"), "--text", at("bpe.tokens"), "--out", at("analysis")}, "another tokenizer");
  const Args train = tiny_train(at("unigram.tokens"), at("run2")) + Args{"--valid-fraction", "0"};
  expect_refused(train + Args{"--tokenizer", at("bpe.model")}, "another tokenizer");
  expect_hi_lo(train + Args{"--tokenizer", at("unigram.model")});
}

TEST_F(TokenizerIdentity, TheModelsOwn) {
  const Args generate{"generate", at("run"), "--tokens", "3"};
  expect_hi_lo(generate);
  expect_hi_lo(generate + Args{"--tokenizer", at("unigram.model")});
  expect_hi_lo(generate + Args{"--tokenizer", "ids"});  // numbers are not text
  expect_refused(generate + Args{"--tokenizer", "bytes"}, "--tokenizer");
  expect_refused(generate + Args{"--tokenizer", at("bpe.model")}, "--tokenizer");
}

TEST_F(TokenizerIdentity, FoldersThatLostOrExchangedTheirs) {
  const std::string without_json = copy("without-json");
  fs::remove(without_json + "/tokenizer.json");
  expect_refused({"generate", without_json, "--tokens", "3"}, "tokenizer.json");
  expect_refused({"eval", without_json, "--text", at("text")}, "tokenizer.json");
  fs::remove(without_json + "/tokenizer.model");
  expect_refused({"generate", without_json, "--tokens", "3"}, "tokenizer.json");
  expect_hi_lo({"generate", without_json, "--tokens", "3", "--tokenizer", at("unigram.model")});

  const std::string exchanged = copy("exchanged");
  fs::copy_file(at("bpe.model"), exchanged + "/tokenizer.model", fs::copy_options::overwrite_existing);
  expect_refused({"generate", exchanged, "--tokens", "3"}, "exchanged");
  spill(exchanged + "/tokenizer.json", "{\"type\": \"sentencepiece\", \"model\": \"tokenizer.model\"}");
  expect_refused({"generate", exchanged, "--tokens", "3"}, "another tokenizer");
  spill(exchanged + "/tokenizer.json", "{\"type\": \"bytes\"}");
  expect_refused({"generate", exchanged, "--tokens", "3"}, "another tokenizer");
}

// The header of a file of version 1, which says nothing of its tokenizer: taken where the size fits.
TEST_F(TokenizerIdentity, OldTokenFilesAreRead) {
  std::string content = slurp(at("bpe.tokens"));
  const auto put = [&content](size_t at, auto value) { std::memcpy(content.data() + at, &value, sizeof value); };
  content.resize(content.size() - 24);  // and has no trailer
  put(8, uint32_t{1});
  put(48, uint64_t{0});
  put(56, uint64_t{0});
  Checksum sum;
  sum.add(content);
  put(48, sum.value());
  spill(at("old.tokens"), content);
  expect_hi_lo({"eval", at("run"), "--text", at("old.tokens"), "--context", "64"});
  EXPECT_THAT(run({"tokenize", "--info", at("old.tokens")}).out, HasSubstr("not known"));
  EXPECT_THAT(run({"tokenize", "--info", at("bpe.tokens")}).out, HasSubstr("tokenizer: checksum"));
}

}  // namespace
}  // namespace fw::test
