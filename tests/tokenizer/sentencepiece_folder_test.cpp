// SentencePiece models that were damaged or made to harm, and the files beside a model.
#include <gtest/gtest.h>

#include <cstring>
#include <limits>

#include "base/base_support.h"
#include "base/file.h"
#include "base/temp_folder.h"
#include "tokenizer/tokenizer.h"

namespace fw::sentencepiece_folder {
namespace {

using testing::fails;
using testing::TempFolder;
using Ids = std::vector<int32_t>;

std::string varint(uint64_t value) {
  std::string out;
  for (; value >= 128; value >>= 7) out += static_cast<char>(value % 128 + 128);
  return out + static_cast<char>(value);
}
std::string bytes(int field, const std::string& content) {
  return varint(static_cast<uint64_t>(field) << 3 | 2) + varint(content.size()) + content;
}
std::string little_endian(uint32_t value) {
  std::string out;
  for (int i = 0; i < 4; ++i) out += static_cast<char>(value >> (8 * i) & 0xff);
  return out;
}

// A piece of a model; kinds: 1 normal, 2 unknown, 3 control.
std::string piece(const std::string& text, float score, int kind = 1) {
  uint32_t bits = 0;
  std::memcpy(&bits, &score, sizeof bits);
  return bytes(1, bytes(1, text) + varint(2 << 3 | 5) + little_endian(bits) + varint(3 << 3) +
                      varint(static_cast<uint64_t>(kind)));
}

// 0 <unk>, 1 <s>, 2 </s>, 3 "\u2581", 4 a, 5 b, 6 y, 7 "\u2581a".
std::string model_of(const std::string& normalizer, float score = -2) {
  return piece("<unk>", 0, 2) + piece("<s>", 0, 3) + piece("</s>", 0, 3) + piece("\u2581", score) + piece("a", -2) +
         piece("b", -2) + piece("y", -2) + piece("\u2581a", -3) + normalizer;
}

// A table in which x becomes what stands at `text` of `texts`. `children`: where those of x are.
std::string table(uint32_t children, uint32_t text, const std::string& texts) {
  std::vector<uint32_t> units(768, 0);
  units[0] = 256u << 10;
  const uint32_t x = 256u ^ 'x';
  units[x] = (x ^ children) << 10 | 1u << 8 | 'x';
  units[512] = 1u << 31 | text;
  std::string out = little_endian(static_cast<uint32_t>(units.size() * 4));
  for (const uint32_t unit : units) out += little_endian(unit);
  return out + texts;
}

const std::string kTexts("y\0", 2);

std::unique_ptr<Tokenizer> of_model(const std::string& model) { return sentencepiece_tokenizer(model, "x.model", ""); }

TEST(SentencePieceCheck, ATableIsLookedThroughBeforeTheLibraryFollowsIt) {
  const auto good = of_model(model_of(bytes(3, bytes(2, table(512, 0, kTexts)))));
  EXPECT_EQ(good->encode("xb"), (Ids{3, 6, 5})) << "x becomes y";
  const auto refused = [](const std::string& model, const std::string& why) {
    return fails(ErrorKind::kUsage, {"'x.model'", "damaged", why}, [&] { of_model(model); });
  };
  for (const int field : {3, 5}) {
    const auto with = [&](const std::string& charsmap) { return model_of(bytes(field, bytes(2, charsmap))); };
    EXPECT_TRUE(refused(with(table(1u << 20, 0, kTexts)), "leads to place"));
    EXPECT_TRUE(refused(with(table(512, 7, kTexts)), "leads to byte 7 of texts of 2 bytes"));
    EXPECT_TRUE(refused(with(table(512, 0, "y")), "do not end"));
    EXPECT_TRUE(refused(with(table(512, 0, std::string("\xff\0", 2))), "not UTF-8"));
    EXPECT_TRUE(refused(with(little_endian(1 << 20) + "abcd"), "blocks of 1024 bytes"));
    EXPECT_TRUE(refused(with("abc"), "fewer than 8 bytes"));
  }
  EXPECT_TRUE(refused(model_of("", std::numeric_limits<float>::quiet_NaN()), "piece 3: the score is not finite"));
  EXPECT_TRUE(refused(model_of("") + piece(std::string("a\0b", 3), 0), "piece 8: the text has a NUL"));
  EXPECT_TRUE(refused(model_of("").substr(0, 40), "ends in the middle"));
  EXPECT_TRUE(refused("", "no pieces"));
}

class SentencePieceFolderTest : public ::testing::Test {
 protected:
  void SetUp() override { write_file_atomic(path("tokenizer.model"), model_of("")); }
  std::string path(const std::string& name) const { return folder_.path(name); }
  void spill(const std::string& name, const std::string& text) const { write_file_atomic(path(name), text); }
  std::unique_ptr<Tokenizer> load() const { return make_tokenizer(path("tokenizer.model")); }

  TempFolder folder_;
};

TEST_F(SentencePieceFolderTest, TokensOfAddedTokensJson) {
  const Ids alone = load()->encode("<m>a</s>");
  spill("added_tokens.json", R"({"<n>": 9, "<m>": 8})");
  spill("tokenizer_config.json", R"({"eos_token": "<n>"})");
  const auto t = load();
  EXPECT_EQ(t->vocab_size(), 10);
  EXPECT_NE(t->encode("<m>a</s>"), alone);
  EXPECT_EQ(t->encode("<m>a<n>"), (Ids{8, 7, 9}))
      << "a text behind a token is encoded by itself: it begins with a space";
  EXPECT_EQ(t->encode("<m>a</s>"), (Ids{8, 7, 2})) << "control pieces are found too";
  EXPECT_EQ(t->encode("<m>\xff"), (Ids{8, 3, 0}));
  EXPECT_EQ(t->end_of_text(), 9);
  EXPECT_EQ(t->decode({8, 7, 9}), "<m> a<n>");
  EXPECT_EQ(t->piece(9), "<n>");
}

TEST_F(SentencePieceFolderTest, TokensOfTheConfiguration) {
  spill(
      "tokenizer_config.json",
      R"({"added_tokens_decoder": {"2": {"content": "</s>"}, "8": {"content": "<m>", "lstrip": true, "rstrip": true}}})");
  spill("special_tokens_map.json", R"({"eos_token": {"content": "<m>"}})");
  const auto t = load();
  EXPECT_EQ(t->encode("a  <m>  b"), (Ids{7, 8, 3, 5}));
  EXPECT_EQ(t->end_of_text(), 8);
  spill("special_tokens_map.json", "{}");
  EXPECT_EQ(load()->end_of_text(), 2) << "the model's";
}

TEST_F(SentencePieceFolderTest, SavedAndLoadedWithTheModel) {
  spill("added_tokens.json", R"({"<m>": 8})");
  spill("special_tokens_map.json", R"({"eos_token": "<m>"})");
  const auto t = load();
  make_folders(path("model"));
  t->save(path("model"));
  const auto again = load_tokenizer(path("model"));
  EXPECT_EQ(again->checksum(), t->checksum());
  EXPECT_EQ(again->encode("a<m>"), t->encode("a<m>"));
  EXPECT_EQ(again->end_of_text(), 8);
  spill("added_tokens.json", "{}");
  spill("special_tokens_map.json", "{}");
  EXPECT_NE(load()->checksum(), t->checksum());
}

TEST_F(SentencePieceFolderTest, WhatIsWrongIsNamed) {
  const auto refused = [&](const std::string& name, const std::string& text, const std::string& why) {
    spill(name, text);
    const bool named = fails(ErrorKind::kUsage, {name, why}, [&] { load(); });
    spill(name, "{}");
    return named;
  };
  EXPECT_TRUE(refused("added_tokens.json", R"({"<m>": 9})", "expected the id 8"));
  EXPECT_TRUE(refused("added_tokens.json", R"({"<m>": 4})", "at which the model has 'a'"));
  EXPECT_TRUE(refused("added_tokens.json", R"({"<m>": -1})", "-1"));
  EXPECT_TRUE(refused("added_tokens.json", R"([])", "an object"));
  EXPECT_TRUE(refused("tokenizer_config.json", R"({"eos_token": "<end>"})", "'<end>'"));
  EXPECT_TRUE(refused("tokenizer_config.json", R"({"legacy": false})", "legacy"));
  EXPECT_TRUE(refused("tokenizer_config.json", R"({"added_tokens_decoder": {"x": {"content": "<m>"}}})", "an id"));
  spill("added_tokens.json", R"({"<m>": 9})");
  EXPECT_TRUE(refused("tokenizer_config.json", R"({"added_tokens_decoder": {"8": {"content": "<m>"}}})", "8"));
}

}  // namespace
}  // namespace fw::sentencepiece_folder
