// tokenizer.json of Hugging Face's tokenizers: small ones whose ids were worked out by hand, and what is refused.
// tests/harness/tokenizers_check.py compares whole texts with the package itself.
#include <gtest/gtest.h>

#include <array>
#include <nlohmann/json.hpp>
#include <thread>

#include "base/base_support.h"
#include "base/file.h"
#include "base/json.h"
#include "base/random.h"
#include "base/temp_folder.h"
#include "tokenizer/byte_level.h"
#include "tokenizer/tokenizer.h"
#include "tokenizer/utf8.h"

namespace fw {
namespace {

using testing::fails;
using testing::TempFolder;
using Ids = std::vector<int32_t>;
using Json = nlohmann::json;

std::unique_ptr<Tokenizer> tokenizer_of(const Json& json, const std::string& end = "") {
  return huggingface_tokenizer(json.dump(), json, "t.json", end);
}

Ids plus(Ids a, const Ids& b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}

// All 256 byte characters (ids 0 to 255, by byte), then words: 256 "ab", 257 "abc", 258 " a", 259 " ab", 260 "bc".
Json byte_level(bool pairs = false) {
  Json vocab;
  for (int byte = 0; byte < 256; ++byte) vocab[to_byte_level(std::string(1, static_cast<char>(byte)))] = byte;
  const std::string space = to_byte_level(" ");
  int id = 256;
  for (const std::string& word : {std::string("ab"), std::string("abc"), space + "a", space + "ab", std::string("bc")})
    vocab[word] = id++;
  Json merges = Json::array();
  const std::array<std::pair<std::string, std::string>, 5> list = {
      {{"b", "c"}, {"a", "b"}, {"ab", "c"}, {space, "a"}, {space, "ab"}}};
  for (const auto& [left, right] : list) {
    if (pairs) {
      merges.push_back({left, right});
    } else {
      merges.push_back(fmt::format("{} {}", left, right));
    }
  }
  return {{"version", "1.0"},
          {"added_tokens", Json::array()},
          {"normalizer", nullptr},
          {"pre_tokenizer", {{"type", "ByteLevel"}, {"add_prefix_space", false}, {"use_regex", true}}},
          {"post_processor", nullptr},
          {"decoder", {{"type", "ByteLevel"}}},
          {"model", {{"type", "BPE"}, {"vocab", vocab}, {"merges", merges}}}};
}

// 0 <unk>, then pieces with scores.
Json unigram() {
  Json vocab = Json::array();
  constexpr std::array<std::pair<const char*, double>, 8> kVec16 = {{{"<unk>", 0},
                                                                     {"\u2581", -3},
                                                                     {"\u2581a", -2.5},
                                                                     {"a", -2},
                                                                     {"b", -2},
                                                                     {"ab", -3.5},
                                                                     {"\u2581ab", -5.5},
                                                                     {"bb", -4}}};
  for (const auto& [piece, score] : kVec16) vocab.push_back(Json::array({piece, score}));
  return {{"pre_tokenizer",
           {{"type", "Metaspace"}, {"replacement", "\u2581"}, {"prepend_scheme", "always"}, {"split", true}}},
          {"decoder", {{"type", "Metaspace"}, {"replacement", "\u2581"}, {"prepend_scheme", "always"}}},
          {"model", {{"type", "Unigram"}, {"unk_id", 0}, {"vocab", vocab}}}};
}

Json added(int id, const std::string& content, const Json& more = Json::object()) {
  Json token = {{"id", id},        {"content", content},  {"single_word", false}, {"lstrip", false},
                {"rstrip", false}, {"normalized", false}, {"special", true}};
  token.update(more);
  return token;
}

TEST(HuggingFaceBpe, MergesInTheOrderOfTheList) {
  for (const bool pairs : {false, true}) {
    const auto t = tokenizer_of(byte_level(pairs));
    EXPECT_EQ(t->vocab_size(), 261);
    EXPECT_EQ(t->type(), "huggingface");
    EXPECT_EQ(t->encode("abc"), (Ids{'a', 260})) << "b c comes before a b";
    EXPECT_EQ(t->encode("abab"), (Ids{256, 256}));
    EXPECT_EQ(t->encode("ab ab"), (Ids{256, 259})) << "a b comes before the space and a";
    EXPECT_EQ(t->encode(" a  a"), (Ids{258, ' ', 258}));
    EXPECT_EQ(t->encode(""), Ids{});
    EXPECT_EQ(t->encode("\u00fc\n"), (Ids{0xc3, 0xbc, '\n'}));
  }
}

TEST(HuggingFaceBpe, WholePiecesWithIgnoreMerges) {
  Json json = byte_level();
  json["model"]["ignore_merges"] = true;
  EXPECT_EQ(tokenizer_of(json)->encode("abc ab"), (Ids{257, 259}));
}

TEST(HuggingFaceBpe, CutsWhereThePatternSays) {
  // Llama 3's: three digits, a contraction in any case, line ends after punctuation.
  Json json = byte_level();
  const std::string pattern =
      R"((?i:'s|'t)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)";
  Json split = {{"type", "Split"}, {"pattern", {{"Regex", pattern}}}, {"behavior", "Isolated"}, {"invert", false}};
  json["pre_tokenizer"] = {
      {"type", "Sequence"},
      {"pretokenizers",
       {split, {{"type", "ByteLevel"}, {"add_prefix_space", false}, {"trim_offsets", true}, {"use_regex", false}}}}};
  Json& vocab = json["model"]["vocab"];
  json["model"]["ignore_merges"] = true;
  const std::string space = to_byte_level(" ");
  const std::array<std::string, 6> pieces = {
      "'S",       "123", "45", fmt::format("{}!?{}", space, to_byte_level("\n")), fmt::format("{}{}", space, space),
      space + "x"};
  for (size_t i = 0; i < pieces.size(); ++i) vocab[pieces[i]] = 300 + i;
  EXPECT_EQ(tokenizer_of(json)->encode("a'S12345 !?\n   x"), (Ids{'a', 300, 301, 302, 303, 304, 305}));
}

TEST(HuggingFaceBpe, BytesThatAreNoUtf8ComeBack) {
  const auto t = tokenizer_of(byte_level());
  std::string all;
  for (int byte = 0; byte < 256; ++byte) all += static_cast<char>(byte);
  Random random(3);
  for (int i = 0; i < 300; ++i) {
    std::string text;
    for (uint64_t n = random.below(20); n > 0; --n)
      text += random.below(3) == 0 ? std::string("ab ") : std::string(1, static_cast<char>(random.below(256)));
    const Ids ids = t->encode(text);
    ASSERT_EQ(t->decode(ids), text);
    std::string streamed;
    for (const int32_t id : ids) streamed += t->piece(id);
    ASSERT_EQ(streamed, text);
  }
  EXPECT_EQ(t->decode(t->encode(all)), all);
}

TEST(HuggingFaceBpe, UnknownCharacters) {
  Json json = {
      {"model", {{"type", "BPE"}, {"vocab", {{"<unk>", 0}, {"a", 1}, {"b", 2}, {"ab", 3}}}, {"merges", {"a b"}}}}};
  EXPECT_EQ(tokenizer_of(json)->encode("xayyb"), (Ids{3}))
      << "no unk_token: they are left out, and their neighbours meet";
  json["model"]["unk_token"] = "<unk>";
  EXPECT_EQ(tokenizer_of(json)->encode("xayyb"), (Ids{0, 1, 0, 0, 2}));
  json["model"]["fuse_unk"] = true;
  EXPECT_EQ(tokenizer_of(json)->encode("xayyb"), (Ids{0, 1, 0, 2}));
  EXPECT_EQ(tokenizer_of(json)->decode({3, 0}), "ab <unk>") << "no decoder: tokens with spaces between";
  json["model"]["unk_token"] = "<other>";
  EXPECT_TRUE(fails(ErrorKind::kUsage, {"<other>", "'x'"}, [&] { tokenizer_of(json)->encode("x"); }));
  json["model"]["byte_fallback"] = true;
  for (int byte = 0; byte < 256; ++byte) json["model"]["vocab"][fmt::format("<0x{:02X}>", byte)] = 10 + byte;
  json["decoder"] = {{"type", "Sequence"}, {"decoders", {{{"type", "ByteFallback"}}, {{"type", "Fuse"}}}}};
  const auto t = tokenizer_of(json);
  EXPECT_EQ(t->encode("\u00fcab"), (Ids{10 + 0xc3, 10 + 0xbc, 3}));
  EXPECT_EQ(t->decode({10 + 0xc3, 10 + 0xbc, 3}), "\u00fcab");
  EXPECT_EQ(t->piece(10 + 0xc3), "\xc3");
}

TEST(HuggingFaceBpe, EndsOfWords) {
  const Json vocab = {{"a", 0}, {"b</w>", 1}, {"ab</w>", 2}, {"a</w>", 3}};
  const Json json = {
      {"pre_tokenizer", {{"type", "WhitespaceSplit"}}},
      {"decoder", {{"type", "BPEDecoder"}, {"suffix", "</w>"}}},
      {"model", {{"type", "BPE"}, {"vocab", vocab}, {"merges", {"a b</w>"}}, {"end_of_word_suffix", "</w>"}}}};
  EXPECT_EQ(tokenizer_of(json)->encode(" ab  a aab"), (Ids{2, 3, 0, 2}));
  EXPECT_EQ(tokenizer_of(json)->decode({2, 3, 0, 2}), "ab a aab");
}

TEST(HuggingFaceUnigram, ThePathOfTheBestScore) {
  const auto t = tokenizer_of(unigram());
  EXPECT_EQ(t->encode("ab"), (Ids{2, 4})) << "-2.5 - 2 is more than -5.5 and than -3 - 3.5";
  EXPECT_EQ(t->encode("bb"), (Ids{1, 7})) << "as much as two tokens of -2: what was found first stays";
  EXPECT_EQ(t->encode("a  b"), (Ids{2, 1, 1, 4}));
  EXPECT_EQ(t->encode("xyb"), (Ids{1, 0, 4})) << "unknown ones in a row are one";
  EXPECT_EQ(t->decode({2, 4, 1, 4}), "ab b");
  Json json = unigram();
  json["model"]["unk_id"] = nullptr;
  EXPECT_TRUE(fails(ErrorKind::kUsage, {"'x'", "unk_id"}, [&] { tokenizer_of(json)->encode("ax"); }));
}

TEST(HuggingFaceUnigram, WhereMetaspaceBegins) {
  Json json = unigram();
  json["added_tokens"] = Json::array({added(8, "<s>")});
  EXPECT_EQ(tokenizer_of(json)->encode("a<s>a"), (Ids{2, 8, 2}));
  json["pre_tokenizer"]["prepend_scheme"] = "first";
  EXPECT_EQ(tokenizer_of(json)->encode("a<s>a"), (Ids{2, 8, 3}));
  EXPECT_EQ(tokenizer_of(json)->encode("<s>a a"), (Ids{8, 3, 2}));
  json["pre_tokenizer"]["prepend_scheme"] = "never";
  EXPECT_EQ(tokenizer_of(json)->encode("a<s>a"), (Ids{3, 8, 3}));
}

TEST(HuggingFaceAddedTokens, FoundBeforeEverythingElse) {
  Json json = byte_level();
  json["added_tokens"] = Json::array({added(261, "<m>", {{"lstrip", true}}), added(262, "<m>x", {{"rstrip", true}}),
                                      added(263, "ab", {{"single_word", true}}), added(264, "abc")});
  json["added_tokens"][2]["id"] = 256;  // the model has it
  json["added_tokens"][3]["id"] = 257;
  json["added_tokens"][1]["id"] = 262;
  const auto t = tokenizer_of(json, "<m>");
  EXPECT_EQ(t->vocab_size(), 263);
  EXPECT_EQ(t->encode("a \n<m> b"), (Ids{'a', 261, ' ', 'b'})) << "takes the space before";
  EXPECT_EQ(t->encode("<m>x  b"), (Ids{262, 'b'})) << "the longest counts, and it takes the space behind";
  EXPECT_EQ(t->encode("abc.ab"), (Ids{257, '.', 256}));
  EXPECT_EQ(t->encode("xab"), (Ids{'x', 256})) << "inside a word the model makes the same of it";
  EXPECT_EQ(t->end_of_text(), 261);
  EXPECT_EQ(t->piece(261), "<m>");
  EXPECT_EQ(t->decode({'a', 261, 262}), "a<m><m>x");
}

TEST(HuggingFaceNormalizer, EachOfThem) {
  const auto ids = [](const Json& normalizer, const std::string& text) {
    Json json = byte_level();
    json["normalizer"] = normalizer;
    const auto t = tokenizer_of(json);
    return t->decode(t->encode(text));
  };
  EXPECT_EQ(ids({{"type", "NFC"}}, "e\u0301\ufb01"), "\u00e9\ufb01");
  EXPECT_EQ(ids({{"type", "NFD"}}, "\u00e9"), "e\u0301");
  EXPECT_EQ(ids({{"type", "NFKC"}}, "\ufb01\u00a0"), "fi ");
  EXPECT_EQ(ids({{"type", "NFKD"}}, "\ufb01\u00e9"), "fie\u0301");
  EXPECT_EQ(ids({{"type", "Lowercase"}}, "A\u0130\u03a3"), "ai\u0307\u03c3");
  EXPECT_EQ(ids({{"type", "Strip"}, {"strip_left", true}, {"strip_right", false}}, " \t a "), "a ");
  EXPECT_EQ(ids({{"type", "StripAccents"}}, "e\u0301a"), "ea");
  EXPECT_EQ(ids({{"type", "StripAccents"}}, "a\u0903\u20dda\u0d3b"), "aa\u0d3b")
      << "marks that take room and that enclose; the last came after Unicode 9";
  EXPECT_EQ(ids({{"type", "Prepend"}, {"prepend", ">"}}, "a"), ">a");
  EXPECT_EQ(ids({{"type", "Replace"}, {"pattern", {{"String", "aa"}}}, {"content", "b"}}, "aaa"), "ba");
  EXPECT_EQ(ids({{"type", "Replace"}, {"pattern", {{"Regex", " {2,}"}}}, {"content", " "}}, "a   b"), "a b");
  const Json both = {{{"type", "Lowercase"}}, {{"type", "Prepend"}, {"prepend", "X"}}};
  EXPECT_EQ(ids({{"type", "Sequence"}, {"normalizers", both}}, "A"), "Xa");
}

TEST(HuggingFacePreTokenizer, WhatBecomesOfMatches) {
  // Pieces are tokens of their own with ignore_merges: their lengths say where the text was cut.
  const auto cut = [](const Json& pre, const std::string& text) {
    Json json = {
        {"pre_tokenizer", pre},
        {"model", {{"type", "BPE"}, {"vocab", Json::object()}, {"merges", Json::array()}, {"ignore_merges", true}}}};
    int id = 0;
    for (size_t begin = 0; begin < text.size(); ++begin) {
      for (size_t length = 1; begin + length <= text.size(); ++length) {
        const std::string part = text.substr(begin, length);
        if (utf8_prefix(part) == length && !json["model"]["vocab"].contains(part)) json["model"]["vocab"][part] = id++;
      }
    }
    const auto t = tokenizer_of(json);
    return t->decode(t->encode(text));  // with spaces between
  };
  const auto split = [](const std::string& behavior, bool invert = false) {
    return Json{{"type", "Split"}, {"pattern", {{"String", "-"}}}, {"behavior", behavior}, {"invert", invert}};
  };
  EXPECT_EQ(cut(split("Isolated"), "a--b"), "a - - b");
  EXPECT_EQ(cut(split("Removed"), "a--b"), "a b");
  EXPECT_EQ(cut(split("Removed", true), "a--b"), "- -");
  EXPECT_EQ(cut(split("MergedWithPrevious"), "a--b"), "a- - b");
  EXPECT_EQ(cut(split("MergedWithNext"), "a--b"), "a - -b");
  EXPECT_EQ(cut(split("Contiguous"), "a--b"), "a -- b");
  EXPECT_EQ(cut({{"type", "Digits"}, {"individual_digits", true}}, "a12b"), "a 1 2 b");
  EXPECT_EQ(cut({{"type", "Digits"}}, "a12b"), "a 12 b");
  EXPECT_EQ(cut({{"type", "Punctuation"}}, "a,.b"), "a , . b");
  EXPECT_EQ(cut({{"type", "BertPreTokenizer"}}, "a\tb,c"), "a b , c");
  EXPECT_EQ(cut({{"type", "Whitespace"}}, "a1\t.,b"), "a1 ., b");
  EXPECT_EQ(cut({{"type", "CharDelimiterSplit"}, {"delimiter", "-"}}, "a-b"), "a b");
  // \w has numbers that are no digits and no joiner, as Oniguruma has it.
  EXPECT_EQ(cut({{"type", "Split"}, {"pattern", {{"Regex", "\\w+"}}}, {"behavior", "Isolated"}}, "x\u00b2\u200d"),
            "x\u00b2 \u200d");
  EXPECT_EQ(cut({{"type", "Split"}, {"pattern", {{"Regex", "^b"}}}, {"behavior", "Removed"}}, "a\nb"), "a\n")
      << "^ is a line's";
}

TEST(HuggingFace, ATextThatComesInPieces) {
  const auto t = tokenizer_of(byte_level());
  EXPECT_EQ(t->whole_prefix("ab ab a"), 5u);
  EXPECT_EQ(t->whole_prefix("ab ab "), 2u) << "what follows a space is not known";
  EXPECT_EQ(t->whole_prefix("ab.  1"), 0u);
  Random random(9);
  constexpr std::array<const char*, 10> kParts = {"ab", " ab", "a", " ", "\n", ".", "12", "'s", "\u00fc", "e\u0301"};
  for (int i = 0; i < 500; ++i) {
    std::string text;
    for (uint64_t n = random.below(30); n > 0; --n) text += kParts[random.below(kParts.size())];
    const std::string begun = text.substr(0, random.below(text.size() + 1));
    const size_t whole = t->whole_prefix(begun);
    ASSERT_EQ(plus(t->encode(text.substr(0, whole)), t->encode(text.substr(whole))), t->encode(text)) << text;
  }
  Json json = byte_level();
  json["added_tokens"] = Json::array({added(261, "a b")});
  EXPECT_EQ(tokenizer_of(json)->whole_prefix("ab ab a"), 0u) << "a token with a space";
  json = byte_level();
  json["pre_tokenizer"] = {{"type", "Sequence"},
                           {"pretokenizers",
                            {{{"type", "Split"}, {"pattern", {{"Regex", "b a"}}}, {"behavior", "Isolated"}},
                             {{"type", "ByteLevel"}, {"add_prefix_space", false}, {"use_regex", false}}}}};
  EXPECT_EQ(tokenizer_of(json)->whole_prefix("ab ab a"), 0u) << "a pattern that is not known";
}

TEST(HuggingFace, LongTextsInPartsAndThreads) {
  const auto t = tokenizer_of(byte_level());
  std::string text;
  Random random(4);
  while (text.size() < (size_t{9} << 18)) text += random.below(4) == 0 ? " ab" : " abc";
  const Ids ids = t->encode(text);
  EXPECT_EQ(t->decode(ids), text);
  Json whole = byte_level();
  whole["added_tokens"] = Json::array({added(261, " never ")});  // and so is not cut into parts
  EXPECT_EQ(tokenizer_of(whole)->encode(text), ids);
  std::vector<std::thread> threads;
  std::array<bool, 2> same{};
  threads.reserve(same.size());
  for (bool& one : same) threads.emplace_back([&] { one = t->encode(text) == ids; });
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(same, (std::array<bool, 2>{true, true}));
}

TEST(HuggingFace, SavedAndLoaded) {
  const TempFolder folder;
  const std::string here = folder.path(".");
  Json json = byte_level();
  json["added_tokens"] = Json::array({added(261, "<end>")});
  write_file_atomic(folder.path("given.json"), json.dump(2));
  write_file_atomic(folder.path("tokenizer_config.json"), R"({"eos_token": {"content": "<end>"}})");
  const auto given = make_tokenizer(folder.path("given.json"));
  EXPECT_EQ(given->end_of_text(), 261);
  make_folders(folder.path("model"));
  given->save(folder.path("model"));
  const auto loaded = load_tokenizer(folder.path("model"));
  EXPECT_EQ(loaded->checksum(), given->checksum());
  EXPECT_EQ(loaded->end_of_text(), 261);
  EXPECT_EQ(loaded->encode("ab <end>"), given->encode("ab <end>"));
  json["model"]["merges"].erase(4);
  EXPECT_NE(tokenizer_of(json)->checksum(), given->checksum());
  write_file_atomic(folder.path("tokenizer_config.json"), "{");
  EXPECT_TRUE(
      fails(ErrorKind::kUsage, {"tokenizer_config.json", "JSON"}, [&] { make_tokenizer(folder.path("given.json")); }));
}

TEST(HuggingFace, IdsOutsideTheVocabularyAndHoles) {
  Json json = byte_level();
  json["model"]["vocab"]["far"] = 300;
  const auto t = tokenizer_of(json);
  EXPECT_EQ(t->vocab_size(), 301);
  EXPECT_EQ(t->decode({'a', 280, 300}), "afar");
  EXPECT_EQ(t->piece(280), "");
  EXPECT_TRUE(fails(ErrorKind::kUsage, {"301"}, [&] { t->piece(301); }));
  EXPECT_TRUE(fails(ErrorKind::kUsage, {"-1"}, [&] { t->decode({-1}); }));
}

TEST(HuggingFace, RefusedByNameAndPosition) {
  struct Case {
    const char* pointer;
    Json value;
    std::vector<std::string> words;
  };
  const std::vector<Case> cases = {
      {"/model/type", "WordFragment", {"model.type", "'WordFragment' is not supported"}},
      {"/model", Json::array(), {"model: expected an object"}},
      {"/model/vocab", nullptr, {"model", "\"vocab\""}},
      {"/model/vocab/a", -1, {"model.vocab", "'a'", "-1"}},
      {"/model/vocab/a", "x", {"model.vocab", "'a'"}},
      {"/model/vocab/b", 97, {"model.vocab", "same id"}},
      {"/model/merges/1", "a", {"model.merges[1]", "two tokens"}},
      {"/model/merges/1", "a b c", {"model.merges[1]", "two tokens"}},
      {"/model/merges/1", Json::array({"a"}), {"model.merges[1]"}},
      {"/model/merges/2", "a zz", {"model.merges[2]", "'zz' is not in the vocabulary"}},
      {"/model/merges/2", "b b", {"model.merges[2]", "'bb' is not in the vocabulary"}},
      {"/model/dropout", 0.1, {"model.dropout", "0.1"}},
      {"/model/fuse_unk", 3, {"model.fuse_unk", "true or false"}},
      {"/normalizer", {{"type", "Precompiled"}}, {"normalizer: expected the key \"precompiled_charsmap\""}},
      {"/normalizer",
       {{"type", "Sequence"}, {"normalizers", {{{"type", "NFC"}}, {{"type", "Nmx"}}}}},
       {"normalizer.normalizers[1].type", "'Nmx'"}},
      {"/normalizer",
       {{"type", "Replace"}, {"pattern", {{"Regex", "("}}}, {"content", ""}},
       {"normalizer.pattern.Regex", "unmatched parenthesis"}},
      {"/pre_tokenizer/type", "UnicodeScripts", {"pre_tokenizer.type", "'UnicodeScripts'"}},
      {"/pre_tokenizer",
       {{"type", "Split"}, {"pattern", {{"Regex", "(*FAIL)"}}}, {"behavior", "Isolated"}},
       {"pre_tokenizer.pattern.Regex", "without callouts"}},
      {"/pre_tokenizer",
       {{"type", "Split"}, {"pattern", {{"String", "x"}}}, {"behavior", "Kept"}},
       {"pre_tokenizer.behavior", "Removed, Isolated"}},
      {"/pre_tokenizer",
       {{"type", "Metaspace"}, {"replacement", "ab"}},
       {"pre_tokenizer.replacement", "one character"}},
      {"/pre_tokenizer",
       {{"type", "Metaspace"}, {"replacement", "_"}, {"prepend_scheme", "last"}},
       {"prepend_scheme", "always, first or never"}},
      {"/decoder/type", "CTC", {"decoder.type", "'CTC'"}},
      {"/added_tokens", Json::array({added(500, "<s>")}), {"added_tokens[0].id", "261", "500"}},
      {"/added_tokens", Json::array({added(261, "")}), {"added_tokens[0].content"}},
      {"/added_tokens", Json::array({{{"id", 261}}}), {"added_tokens[0]", "\"content\""}},
  };
  for (const Case& c : cases) {
    Json json = byte_level();
    json[Json::json_pointer(c.pointer)] = c.value;
    const auto error = testing::caught([&] { tokenizer_of(json); });
    ASSERT_TRUE(error) << c.pointer << " " << c.value.dump();
    EXPECT_EQ(error->kind(), ErrorKind::kUsage);
    const std::string message = error->what();
    EXPECT_TRUE(message.starts_with("'t.json': ")) << message;
    for (const std::string& word : c.words)
      EXPECT_NE(message.find(word), std::string::npos) << "'" << word << "' is not in: " << message;
  }
  for (const auto& [pointer, value] : std::vector<std::pair<const char*, Json>>{
           {"/model/vocab/1", 3}, {"/model/vocab/1", Json::array({"a", "b"})}, {"/model/unk_id", 8}}) {
    Json json = unigram();
    json[Json::json_pointer(pointer)] = value;
    EXPECT_TRUE(fails(ErrorKind::kUsage, {"'t.json': model."}, [&] { tokenizer_of(json); })) << pointer;
  }
}

TEST(HuggingFace, APatternThatNeverEndsIsStopped) {
  Json json = byte_level();
  json["pre_tokenizer"] = {{"type", "Split"}, {"pattern", {{"Regex", "(a+)+$x"}}}, {"behavior", "Isolated"}};
  EXPECT_TRUE(fails(ErrorKind::kUsage, {"takes too long", "(a+)+$x"},
                    [&] { tokenizer_of(json)->encode(std::string(40, 'a') + "b"); }));
}

}  // namespace
}  // namespace fw
