// tokenizer.json of BERT's and SentencePiece's kind: WordPiece, WordLevel, and the normalizers that come with them. Ids
// and texts were worked out by hand; tests/harness/tokenizers_check.py compares whole texts with the `tokenizers`
// package.
#include <gtest/gtest.h>

#include <map>
#include <nlohmann/json.hpp>

#include "base/base_support.h"
#include "tokenizer/tokenizer.h"

namespace fw {
namespace {

using testing::fails;
using Ids = std::vector<int32_t>;
using Json = nlohmann::json;

std::unique_ptr<Tokenizer> tokenizer_of(const Json& json) {
  return huggingface_tokenizer(json.dump(), json, "t.json", "");
}

Json bert() {
  Json vocab;
  int id = 0;
  for (const char* token : {"[UNK]",    "un", "##aff", "##able", "##a", "a", "able", "!",  ".",   "\u4e2d",
                            "##\u00e9", "e",  "ca",    "##fe",   "n",   "'", "t",    "do", "not", "##"}) {
    vocab[token] = id++;
  }
  return {{"normalizer",
           {{"type", "BertNormalizer"},
            {"clean_text", true},
            {"handle_chinese_chars", true},
            {"strip_accents", nullptr},
            {"lowercase", true}}},
          {"pre_tokenizer", {{"type", "BertPreTokenizer"}}},
          {"decoder", {{"type", "WordPiece"}, {"prefix", "##"}, {"cleanup", true}}},
          {"model",
           {{"type", "WordPiece"},
            {"unk_token", "[UNK]"},
            {"continuing_subword_prefix", "##"},
            {"max_input_chars_per_word", 12},
            {"vocab", vocab}}}};
}

TEST(WordPiece, TheLongestTokensFromTheLeftOrTheUnknownOne) {
  const auto t = tokenizer_of(bert());
  EXPECT_EQ(t->encode("unaffable"), (Ids{1, 2, 3}));
  EXPECT_EQ(t->encode("able unable"), (Ids{6, 1, 3}));
  EXPECT_EQ(t->encode("una unx"), (Ids{1, 4, 0})) << "a word that cannot be cut to its end is one unknown token";
  EXPECT_EQ(t->encode("unaaaaaaaaaa"), (Ids{1, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4}));
  EXPECT_EQ(t->encode("unaaaaaaaaaaa"), Ids{0}) << "13 characters";
  EXPECT_EQ(t->encode("a##"), (Ids{5, 0, 0}))
      << "the prefix in a text is punctuation, and ## alone no beginning of a token";
  EXPECT_EQ(t->encode(""), Ids{});
  Json json = bert();
  json["model"].erase("type");  // as files of before 2022 have it
  EXPECT_EQ(tokenizer_of(json)->encode("unaffable"), (Ids{1, 2, 3}));
  json["model"]["unk_token"] = "<none>";
  EXPECT_TRUE(fails(ErrorKind::kUsage, {"no token for 'xyz'", "'<none>'"}, [&] { tokenizer_of(json)->encode("xyz"); }));
}

TEST(WordPiece, LongestWordsAreCountedInCharacters) {
  Json json = bert();
  json["normalizer"] = nullptr;
  json["model"]["max_input_chars_per_word"] = 3;
  EXPECT_EQ(tokenizer_of(json)->encode("e\u00e9\u00e9"), (Ids{11, 10, 10})) << "5 bytes";
  EXPECT_EQ(tokenizer_of(json)->encode("e\u00e9\u00e9\u00e9"), Ids{0});
}

TEST(WordPiece, DecodesWithSpacesBetweenWordsAndWithoutThoseOfEnglish) {
  const auto t = tokenizer_of(bert());
  EXPECT_EQ(t->decode({1, 2, 3, 7}), "unaffable!");
  EXPECT_EQ(t->decode({17, 18, 8}), "do not.") << "only a token itself is cleaned";
  EXPECT_EQ(t->decode({14, 15, 16}), "n ' t");
  EXPECT_EQ(t->decode({2, 3}), "##affable") << "the first token stays what it is";
  Json json = bert();
  json["decoder"]["cleanup"] = false;
  EXPECT_EQ(tokenizer_of(json)->decode({5, 7}), "a !");
  EXPECT_EQ(t->piece(3), "able");
  EXPECT_EQ(t->piece(5), " a");
}

TEST(WordLevel, AWordIsATokenOrUnknown) {
  const Json json = {
      {"pre_tokenizer", {{"type", "WhitespaceSplit"}}},
      {"model", {{"type", "WordLevel"}, {"vocab", {{"<unk>", 3}, {"a", 0}, {"bc", 7}}}, {"unk_token", "<unk>"}}}};
  const auto t = tokenizer_of(json);
  EXPECT_EQ(t->encode("bc a b  bc"), (Ids{7, 0, 3, 7}));
  EXPECT_EQ(t->vocab_size(), 8);
}

// What a normalizer makes of a text: every character is a token, decoded without anything between.
std::string normalised(const Json& normalizer, const std::string& text) {
  Json vocab;
  for (int byte = 0; byte < 256; ++byte) vocab[fmt::format("<0x{:02X}>", byte)] = byte;
  const Json json = {
      {"normalizer", normalizer},
      {"decoder", {{"type", "Sequence"}, {"decoders", {{{"type", "ByteFallback"}}, {{"type", "Fuse"}}}}}},
      {"model", {{"type", "BPE"}, {"byte_fallback", true}, {"vocab", vocab}, {"merges", Json::array()}}}};
  const auto t = tokenizer_of(json);
  return t->decode(t->encode(text));
}

TEST(BertNormalizer, CleansCutsIdeographsAndTakesAccentsAndCapitals) {
  const auto with = [](bool clean, bool chinese, Json accents, bool lowercase) {
    return Json{{"type", "BertNormalizer"},
                {"clean_text", clean},
                {"handle_chinese_chars", chinese},
                {"strip_accents", std::move(accents)},
                {"lowercase", lowercase}};
  };
  EXPECT_EQ(normalised(with(true, true, nullptr, true), "H\u00c9\u4e2d\tx\u200b\u0007"), "he \u4e2d  x");
  EXPECT_EQ(normalised(with(true, false, false, false), "\u00a0a\u3000\ufffd\u00ad\ue000b"), " a b");
  EXPECT_EQ(normalised(with(false, false, nullptr, false), "\u00c9\u4e2d\t"), "\u00c9\u4e2d\t")
      << "accents go with capitals where nothing is said";
  EXPECT_EQ(normalised(with(false, false, true, false), "\u00c9"), "E");
  EXPECT_EQ(normalised(with(false, false, false, true), "\u00c9"), "\u00e9");
}

TEST(NmtNormalizer, ControlsGoAndSpacesOfAllKindsBecomeOne) {
  EXPECT_EQ(normalised({{"type", "Nmt"}}, "a\u0001b\tc\u200bd\u2581e\ufeff"), "ab c d e ");
  EXPECT_EQ(normalised({{"type", "Nmt"}}, "a\u00a0\u3000"), "a\u00a0\u3000") << "which its normal form would change";
}

std::string base64(const std::string& bytes) {
  constexpr const char* kDigits = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
  std::string out;
  for (size_t i = 0; i < bytes.size(); i += 3) {
    uint32_t bits = 0;
    for (size_t k = 0; k < 3; ++k)
      bits = bits << 8 | (i + k < bytes.size() ? static_cast<unsigned char>(bytes[i + k]) : 0);
    for (size_t k = 0; k < 4; ++k) out += i + k > bytes.size() ? '=' : kDigits[bits >> (18 - 6 * k) & 63];
  }
  return out;
}

std::string little_endian(uint32_t value) {
  std::string out;
  for (int i = 0; i < 4; ++i) out += static_cast<char>(value >> (8 * i) & 0xff);
  return out;
}

// A table as SentencePiece lays it out. Every node has 256 places of its own for its children.
std::string charsmap(const std::map<std::string, std::string>& changes) {
  std::string texts;
  std::map<std::string, uint32_t> values, nodes{{"", 1}};
  for (const auto& [from, to] : changes) {
    values[from] = static_cast<uint32_t>(texts.size());
    texts += to + '\0';
    for (size_t length = 1; length <= from.size(); ++length)
      nodes.try_emplace(from.substr(0, length), static_cast<uint32_t>(nodes.size() + 1));
  }
  std::vector<uint32_t> units((nodes.size() + 2) * 256, 0);
  for (const auto& [node, block] : nodes) {
    const uint32_t label = node.empty() ? 0 : static_cast<unsigned char>(node.back());
    const uint32_t index = node.empty() ? 0 : nodes[node.substr(0, node.size() - 1)] * 256 ^ label;
    units[index] = (index ^ block * 256) << 10 | label | (values.contains(node) ? 1u << 8 : 0);
    if (values.contains(node)) units[block * 256] = 1u << 31 | values[node];
  }
  std::string bytes = little_endian(static_cast<uint32_t>(units.size() * 4));
  for (const uint32_t unit : units) bytes += little_endian(unit);
  return base64(bytes + texts);
}

TEST(PrecompiledNormalizer, ClustersAndCharactersAsTheTableHasThem) {
  const Json table = {{"type", "Precompiled"},
                      {"precompiled_charsmap", charsmap({{"A\u0300", "\u00c0"},
                                                         {"\ufb01", "fi"},
                                                         {"\n", " "},
                                                         {"\r", ""},
                                                         {"\u00ad", ""},
                                                         {"x", "y"},
                                                         {"xq\u0301", "z"},
                                                         {"\u3000", " "}})}};
  EXPECT_EQ(normalised(table, "A\u0300 \ufb01n\n"), "\u00c0 fin ");
  EXPECT_EQ(normalised(table, "A A\u0301"), "A A\u0301") << "what the table has not stays";
  EXPECT_EQ(normalised(table, "a\r\nb"), "ab") << "one cluster, of whose beginnings the shortest counts";
  EXPECT_EQ(normalised(table, "x\u0301!"), "y!") << "and so a mark is lost";
  EXPECT_EQ(normalised(table, "x\u0301\u0301\u0301"), "y\u0301\u0301\u0301") << "7 bytes: character by character";
  EXPECT_EQ(normalised(table, "\u00ad"), "");
  EXPECT_EQ(normalised(table, "plain\u3000word"), "plain word");
  EXPECT_EQ(normalised(table, std::string("a\0b\n", 4)), std::string("a\0b ", 4));
  EXPECT_EQ(normalised(table, ""), "");
}

TEST(PrecompiledNormalizer, RefusesWhatIsNoTable) {
  const auto refused = [](const std::string& text, const std::string& why) {
    return fails(ErrorKind::kUsage, {"'t.json': normalizer.precompiled_charsmap: ", why}, [&] {
      normalised({{"type", "Precompiled"}, {"precompiled_charsmap", text}}, "a");
    });
  };
  EXPECT_TRUE(refused("abc", "base64"));
  EXPECT_TRUE(refused("ab!=", "base64"));
  EXPECT_TRUE(refused("", "fewer than 4 bytes"));
  EXPECT_TRUE(refused(base64(little_endian(8) + little_endian(0)), "a size of 8"));
  EXPECT_TRUE(refused(base64(little_endian(0) + "abc"), "a size of 0"));
  EXPECT_TRUE(refused(base64(little_endian(4) + little_endian(0) + "a\xff"), "byte 1 is none"));
  // Places that are not there are found on the way, and lead nowhere.
  std::string wild = little_endian(1024);
  for (uint32_t i = 0; i < 256; ++i) wild += little_endian(i == 0 ? 0 : (0xffffff00 & ~(1u << 31)) | i);
  EXPECT_EQ(normalised({{"type", "Precompiled"}, {"precompiled_charsmap", base64(wild)}}, "a\u00e9"), "a\u00e9");
}

}  // namespace
}  // namespace fw
