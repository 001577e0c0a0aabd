// Regular expressions of tokenizer.json files as the `tokenizers` package reads them (Oniguruma), added tokens around
// white space, and what bounds the work that a file of others can ask for. Right values are those of the package
// 0.23.3; tests/harness/tokenizers_fuzz.py compares random ones.
#include <dlfcn.h>
#include <gtest/gtest.h>
#include <regex.h>

#include <nlohmann/json.hpp>

#include "base/base_support.h"
#include "tokenizer/tokenizer.h"
#include "tokenizer/utf8.h"

namespace fw::patterns {
namespace {

using testing::fails;
using Ids = std::vector<int32_t>;
using Json = nlohmann::json;

std::unique_ptr<Tokenizer> tokenizer_of(const Json& json) {
  return huggingface_tokenizer(json.dump(), json, "t.json", "");
}

Json split(const std::string& regex, const std::string& behavior = "Isolated") {
  return {{"type", "Split"}, {"pattern", {{"Regex", regex}}}, {"behavior", behavior}, {"invert", false}};
}

// Every character is a token.
Json characters(const Json& pre_tokenizer, const std::string& of) {
  Json json = {
      {"pre_tokenizer", pre_tokenizer},
      {"model", {{"type", "BPE"}, {"vocab", Json::object()}, {"merges", Json::array()}, {"ignore_merges", true}}}};
  int id = 0;
  for (size_t i = 0; i < of.size();) {
    const size_t at = i;
    utf8_next(of, i);
    json["model"]["vocab"][of.substr(at, i - at)] = id++;
  }
  return json;
}

// A text with '|' before each of its pieces.
std::string pieces(const Json& pre_tokenizer, const std::string& text) {
  const Json mark = {{"type", "Metaspace"}, {"replacement", "|"}, {"prepend_scheme", "always"}, {"split", false}};
  Json json = characters({{"type", "Sequence"}, {"pretokenizers", {pre_tokenizer, mark}}}, text + "|");
  json["decoder"] = {{"type", "Fuse"}};
  const auto t = tokenizer_of(json);
  return t->decode(t->encode(text));
}

std::string cut(const std::string& regex, const std::string& text) { return pieces(split(regex), text); }

// libonig has functions of these names for a regex_t of its own, which no other library of the process must get.
TEST(Patterns, ThePosixFunctionsAreTheSystems) {
  Dl_info info = {};
  ASSERT_NE(::dladdr(reinterpret_cast<void*>(&::regcomp), &info), 0);
  EXPECT_EQ(std::string(info.dli_fname).find("onig"), std::string::npos) << info.dli_fname;
  EXPECT_EQ(::dlsym(RTLD_DEFAULT, "regcomp"), reinterpret_cast<void*>(&::regcomp));
}

TEST(Patterns, MeanWhatOnigurumaMakesOfThem) {
  EXPECT_EQ(cut("[0-9]{1,3}+", "1234567"), "|1234567") << "a repeat of a repeat";
  EXPECT_EQ(cut("[0-9]{1,3}", "1234567"), "|123|456|7");
  EXPECT_EQ(cut("a++b", "aaab"), "|aaab") << "possessive";
  EXPECT_EQ(cut("a++a", "aaa"), "|aaa") << "which gives nothing back: no match";
  EXPECT_EQ(cut("(?m:a.b)", "a\nbc"), "|a\nb|c") << "m: a dot is a line break too";
  EXPECT_EQ(cut("a.b", "a\nbc"), "|a\nbc");
  EXPECT_EQ(cut("[[:punct:]]", "a+b,c"), "|a|+|b|,|c") << "has symbols";
  EXPECT_EQ(cut("[[:^punct:]]+", "a+b"), "|a|+|b");
  EXPECT_EQ(cut("\\p{Punct}", "a+b,c"), "|a+b|,|c") << "has none";
  EXPECT_EQ(cut("[[:xdigit:]]+", "xafg\u0660"), "|x|af|g\u0660");
  EXPECT_EQ(cut("\\h+", "xaf09g"), "|x|af09|g") << "hexadecimal digits";
  EXPECT_EQ(cut("[[:alpha:]]+", "1a\u00e9\u4e2d2"), "|1|a\u00e9\u4e2d|2");
  EXPECT_EQ(cut("\\w+", "x\u00b2\u200d"), "|x\u00b2|\u200d");
  EXPECT_EQ(cut("\\p{Word}+", "x\u00b2\u200d"), "|x\u00b2|\u200d");
  EXPECT_EQ(cut("\\O", "\n"), "|\n");
  EXPECT_EQ(cut(".+\\R", "ab\r\nc"), "|ab\r\n|c");
  EXPECT_EQ(cut("\\s*\\R", "a  \nb"), "|a||\n|b") << "spaces become marks too";
  EXPECT_EQ(cut("(?=b)\\O*", " bc"), "||bc");
  EXPECT_EQ(cut("(?=b)(?m:.)*\\X", " bc"), "||bc");
  EXPECT_EQ(cut("\\X", "e\u0301x"), "|e\u0301|x");
  EXPECT_EQ(cut("\\bb", "b,bb"), "|b|,|b|b");
  EXPECT_EQ(cut("[a-c&&[^b]]+", "abc"), "|a|b|c");
  EXPECT_EQ(cut("(?<=a)b", "abb"), "|a|b|b");
  EXPECT_EQ(cut("(?>a|ab)c", "abc"), "|abc") << "an atomic group does not go back";
  EXPECT_EQ(cut("^b", "a\nb"), "|a\n|b") << "of a line";
  EXPECT_EQ(cut("", "ab"), "|a|b");
}

TEST(Patterns, ThreeDigitsFromTheRight) {
  const Json pre = {
      {"type", "Sequence"},
      {"pretokenizers", {split("\\p{Nd}+"), split("\\A\\p{Nd}{1,2}(?=\\p{Nd}{3}+\\z)"), split("\\p{Nd}{3}")}}};
  EXPECT_EQ(pieces(pre, "1234567"), "|1|234|567");
  EXPECT_EQ(pieces(pre, "12,3456"), "|12|,|3|456");
}

TEST(Patterns, WhatCannotBeSaidIsRefused) {
  const auto refused = [](const std::string& regex, const std::string& why) {
    return fails(ErrorKind::kUsage, {"'t.json': pre_tokenizer.pattern.Regex", why},
                 [&] { tokenizer_of(characters(split(regex), "a")); });
  };
  EXPECT_TRUE(refused("(", "unmatched parenthesis"));
  EXPECT_TRUE(refused("a(?{x})", "without callouts"));
  EXPECT_TRUE(refused("(*FAIL)", "without callouts"));
  EXPECT_TRUE(refused("(?(a)b|c)", "a condition that is a pattern"));
  EXPECT_TRUE(refused("(?<!\\R)a", "\\R and a lookbehind"));
  EXPECT_TRUE(refused("(?P)[[:punct:]]", "[:punct:] and the option (?P)"));
  EXPECT_TRUE(refused(std::string(2000, '(') + std::string(2000, ')'), "depth limit"));
  Json json = characters(nullptr, "ab");
  json["normalizer"] = {{"type", "Replace"}, {"pattern", {{"Regex", "b??"}}}, {"content", "a"}};
  EXPECT_TRUE(fails(ErrorKind::kUsage, {"Replace", "matches nothing"}, [&] { tokenizer_of(json)->encode("a"); }));
  const auto error = testing::caught([&] { tokenizer_of(characters(split(std::string(59, 'a') + "\u00e9("), "a")); });
  ASSERT_TRUE(error);
  const std::string message = error->what();
  EXPECT_EQ(utf8_prefix(message), message.size()) << "an error does not end in the middle of a character";
}

TEST(Patterns, WorkIsBoundedForAWholeTextAndNotForEachPiece) {
  // Each line is a piece of its own, and alone below every limit.
  const Json pre = {{"type", "Sequence"}, {"pretokenizers", {split("\n", "Removed"), split("(a+)+$x")}}};
  const auto t = tokenizer_of(characters(pre, "ab\n"));
  std::string text;
  for (int line = 0; line < 2000; ++line) text += std::string(15, 'a') + "b\n";
  EXPECT_EQ(t->encode(text.substr(0, 170)).size(), 160u);
  EXPECT_TRUE(fails(ErrorKind::kUsage, {"takes too long", "(a+)+$x", fmt::format("{} bytes", text.size())},
                    [&] { t->encode(text); }));
}

TEST(Normalizers, AReplaceThatDoublesIsStopped) {
  const Json doubled = {{"type", "Replace"}, {"pattern", {{"String", "a"}}}, {"content", "aa"}};
  Json json = characters(nullptr, "ab");
  json["normalizer"] = {{"type", "Sequence"}, {"normalizers", Json::array()}};
  for (int i = 0; i < 40; ++i) json["normalizer"]["normalizers"].push_back(doubled);
  EXPECT_EQ(tokenizer_of(json)->encode("b").size(), 1u);
  EXPECT_TRUE(fails(ErrorKind::kUsage, {"of a text of 1", "\"Replace\""}, [&] { tokenizer_of(json)->encode("a"); }));
  json["added_tokens"] = {{{"id", 2}, {"content", "xa"}, {"normalized", true}}};
  EXPECT_TRUE(fails(ErrorKind::kUsage, {"\"Replace\""}, [&] { tokenizer_of(json); }))
      << "an added token is normalised as the file is read";
  json.erase("added_tokens");
  json["decoder"] = {{"type", "Sequence"}, {"decoders", json["normalizer"]["normalizers"]}};
  json["normalizer"] = nullptr;
  EXPECT_TRUE(fails(ErrorKind::kUsage, {"\"Replace\""}, [&] { tokenizer_of(json); })) << "and a decoder's as well";
}

TEST(Normalizers, NmtKeepsNul) {
  Json json = {
      {"normalizer", {{"type", "Nmt"}}},
      {"model",
       {{"type", "BPE"}, {"vocab", {{std::string(1, '\0'), 0}, {"a", 1}, {"b", 2}}}, {"merges", Json::array()}}}};
  EXPECT_EQ(tokenizer_of(json)->encode(std::string("a\0b", 3)), (Ids{1, 0, 2}));
}

Json added(int id, const std::string& content, bool lstrip, bool rstrip) {
  return {{"id", id},         {"content", content},  {"single_word", false}, {"lstrip", lstrip},
          {"rstrip", rstrip}, {"normalized", false}, {"special", true}};
}

TEST(AddedTokens, WhiteSpaceThatSeveralTake) {
  Json json = characters(nullptr, "ab ");
  json["added_tokens"] = Json::array({added(2, " ", true, true)});
  EXPECT_EQ(tokenizer_of(json)->encode("a   b"), (Ids{0, 2, 1}))
      << "the first takes it all, and of the others nothing is left";
  json["added_tokens"] = {added(3, "<s>", false, true), added(2, " ", true, false)};
  EXPECT_TRUE(fails(ErrorKind::kUsage, {"' '", "rstrip", "lstrip"}, [&] { tokenizer_of(json)->encode("<s>  b"); }));
}

TEST(AddedTokens, LongOnesThatAlmostMatchAndMuchWhiteSpace) {
  Json json = characters(nullptr, "ab ");
  json["added_tokens"] = {added(3, std::string(100000, 'a') + "b", false, false), added(2, " ", true, true)};
  const auto t = tokenizer_of(json);
  EXPECT_EQ(t->encode(std::string(200000, 'a')), Ids(200000, 0));
  EXPECT_EQ(t->encode(std::string(200000, ' ')), Ids{2});
  EXPECT_EQ(t->encode(std::string(100001, 'a') + "b"), (Ids{0, 3}));
}

TEST(AddedTokens, DecodeToWhatIsLookedFor) {
  Json json = characters(nullptr, "abcx");
  json["normalizer"] = {{"type", "Lowercase"}};
  json["added_tokens"] = {{{"id", 4}, {"content", "ABC"}, {"normalized", true}}};
  const auto t = tokenizer_of(json);
  EXPECT_EQ(t->encode("xabcx"), (Ids{3, 4, 3}));
  EXPECT_EQ(t->decode({3, 4}), "x abc");
}

TEST(WordPiece, LongWordsTakeTimeThatGrowsWithThem) {
  const Json json = {{"model",
                      {{"type", "WordPiece"},
                       {"unk_token", "[UNK]"},
                       {"max_input_chars_per_word", 1 << 30},
                       {"vocab", {{"[UNK]", 0}, {"a", 1}, {"##a", 2}, {"##" + std::string(50000, 'a') + "b", 3}}}}}};
  const auto t = tokenizer_of(json);
  const Ids ids = t->encode(std::string(200000, 'a'));
  ASSERT_EQ(ids.size(), 200000u);
  EXPECT_EQ(ids[0], 1);
  EXPECT_EQ(ids[1], 2);
  EXPECT_EQ(t->encode(std::string(50001, 'a') + "b"), (Ids{1, 3}));
  EXPECT_EQ(t->encode("ab"), Ids{0});
}

TEST(Unigram, LongTokensThatAlmostMatch) {
  Json vocab = Json::array();
  for (const std::string& word : {std::string("<unk>"), std::string("a"), std::string(100000, 'a') + "b"})
    vocab.push_back(Json::array({word, -1.0}));
  const auto t = tokenizer_of({{"model", {{"type", "Unigram"}, {"unk_id", 0}, {"vocab", vocab}}}});
  EXPECT_EQ(t->encode(std::string(200000, 'a')), Ids(200000, 1));
  EXPECT_EQ(t->encode(std::string(100001, 'a') + "b"), (Ids{1, 2}));
}

TEST(Decoders, WordsOfAStreamAreJoinedBySpaces) {
  const Json json = {{"pre_tokenizer", {{"type", "Whitespace"}}},
                     {"model", {{"type", "WordLevel"}, {"vocab", {{"alpha", 0}, {"beta", 1}, {"<unk>", 2}}}}}};
  const auto t = tokenizer_of(json);
  EXPECT_EQ(t->decode({0, 1}), "alpha beta");
  EXPECT_EQ(t->first_piece(0) + t->piece(1), "alpha beta");
}

TEST(Decoders, BytesInARowAreOneToken) {
  Json json = characters(nullptr, "ab");
  for (int byte = 0; byte < 256; ++byte) json["model"]["vocab"][fmt::format("<0x{:02X}>", byte)] = 2 + byte;
  const Json strip = {{"type", "Strip"}, {"content", " "}, {"start", 1}, {"stop", 0}};
  json["decoder"] = {{"type", "Sequence"}, {"decoders", {{{"type", "ByteFallback"}}, strip}}};
  EXPECT_EQ(tokenizer_of(json)->decode({2 + ' ', 2 + ' ', 0, 2 + ' '}), " a")
      << "a space goes from each token, and two bytes are one";
  json["decoder"] = {{"type", "BPEDecoder"}, {"suffix", ""}};
  EXPECT_TRUE(fails(ErrorKind::kUsage, {"decoder.suffix", "not empty"}, [&] { tokenizer_of(json); }));
}

TEST(PreTokenizers, MetaspaceKnowsTheFirstCharacter) {
  Json json =
      characters({{"type", "Sequence"},
                  {"pretokenizers",
                   {{{"type", "WhitespaceSplit"}},
                    {{"type", "Metaspace"}, {"replacement", "_"}, {"prepend_scheme", "first"}, {"split", false}}}}},
                 "ab_");
  json["normalizer"] = {{"type", "Prepend"}, {"prepend", " "}};
  EXPECT_EQ(tokenizer_of(json)->encode("a b"), (Ids{2, 0, 1}))
      << "the space that was put in front is the first character too";
  EXPECT_EQ(tokenizer_of(json)->encode(" a"), Ids{0});
}

}  // namespace
}  // namespace fw::patterns
