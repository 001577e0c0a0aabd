// Small inputs of other programs with the right value of each: numpy in float64, the `tokenizers` package 0.23.3,
// transformers 5.24. What concerns prompts, bad lines, ends and configurations is in generate_test.cpp, texts_test.cpp
// and model_folder_test.cpp.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "cli/program.h"
#include "train/token_file.h"

namespace fw::test {
namespace {

using testing::HasSubstr;
using Args = std::vector<std::string>;
using Ids = std::vector<int32_t>;
using Json = nlohmann::json;
namespace fs = std::filesystem;

Outcome expect_run(const Args& args) {
  Outcome outcome = run(args);
  EXPECT_EQ(outcome.code, 0) << args[0] << ": " << outcome.err;
  return outcome;
}

Ids ids_of(const Folder& folder, const std::string& text, const std::string& tokenizer) {
  expect_run({"tokenize", text, "--tokenizer", case_path(tokenizer), "--no-document-end", "--out", folder / "tokens"});
  const TokenFile file(folder / "tokens");
  Ids ids(static_cast<size_t>(file.tokens()));
  file.read(0, ids);
  return ids;
}

Json scored(const std::string& model, const std::string& text) {
  return Json::parse(expect_run({"eval", model, "--text", text, "--context", "0", "--json"}).out)["results"][0];
}

TEST(Cases, IdsAreThoseOfTheTokenizersPackage) {
  const Folder folder;
  const auto ids = [&](const std::string& text, const std::string& tokenizer) {
    spill(folder / "text", text);
    return ids_of(folder, folder / "text", tokenizer);
  };
  EXPECT_EQ(ids("1234567", "interval.json"), (Ids{24, 46, 68, 7})) << "{1,3}+ repeats a repeat: pieces of any length";
  EXPECT_EQ(ids("1234567", "groups_of_three.json"), (Ids{1, 35, 4, 68, 7})) << "1, 234, 567";
  EXPECT_EQ(ids("a+b", "punct.json"), (Ids{256, 258, 257})) << "[[:punct:]] has symbols";
  EXPECT_EQ(ids(std::string("a\0b", 3), "nmt_nul.json"), (Ids{1, 0, 2}));
}

TEST(Cases, MarksOfAChatBesideASentencePieceModel) {
  const Folder folder;
  const Ids ids = ids_of(folder, case_path("chat.jsonl"), "sp_model/tokenizer.model");
  EXPECT_EQ(ids, (Ids{300, 279, 261, 278, 276, 268, 266, 301}));
  EXPECT_THAT(expect_run({"tokenize", case_path("chat.jsonl"), "--tokenizer", case_path("sp_model/tokenizer.model"),
                          "--out", folder / "ended"})
                  .out,
              HasSubstr("end of each document: token 301"));
  EXPECT_EQ(TokenFile(folder / "ended").tokens(), 8) << "the end stands there already, and is not put twice";
}

TEST(Cases, BitsPerByteCountTheBytesOfTheText) {
  const Json result = scored(case_path("bpb_unigram"), case_path("bpb.txt"));
  EXPECT_EQ(result["bytes"], 1176);
  EXPECT_NEAR(result["bits_per_byte"].get<double>(), 4.8049, 5e-5);
}

TEST(Cases, LogProbabilitiesCountTheLogitsBeyondTheTokenizer) {
  const Outcome outcome = expect_run(
      {"generate", case_path("padded"), "--prompt", "hello", "--tokens", "1", "--greedy", "--json", "--ignore-end"});
  EXPECT_NEAR(Json::parse(outcome.out)["logprobs"][0].get<double>(), -2.3929, 5e-5);
}

TEST(Cases, WordsWithoutADecoderAreJoinedBySpaces) {
  EXPECT_THAT(expect_run({"generate", case_path("words_model"), "--prompt", "alpha", "--greedy", "--tokens", "3"}).out,
              HasSubstr("alpha beta gamma delta"));
}

TEST(Cases, ATokenThatSpansContextAndContinuation) {
  const Folder folder;
  const Outcome outcome =
      expect_run({"eval", case_path("join_model"), "--requests", case_path("join.jsonl"), "--out", folder / "scores"});
  EXPECT_THAT(outcome.out, HasSubstr("1 of 3 requests have a continuation whose first token begins in the context"));
  const std::string lines = slurp(folder / "scores/samples.jsonl");
  int seen = 0;
  for (size_t at = 0; at < lines.size(); at = lines.find('\n', at) + 1) {
    const Json line = Json::parse(lines.substr(at, lines.find('\n', at) - at));
    ++seen;
    if (line["id"] == "1") EXPECT_NEAR(line["metrics"]["log_likelihood"].get<double>(), -5.4176, 5e-5) << line;
  }
  EXPECT_EQ(seen, 3);
}

// An equal head beside tied embeddings says nothing new; one that differs is an error.
TEST(Cases, ATiedHeadThatIsStoredTwice) {
  const Folder folder;
  copy_case("two_ends", folder / "m");
  Json config = Json::parse(slurp(folder / "m/config.json"));
  config["tie_word_embeddings"] = true;
  spill(folder / "m/config.json", config.dump());
  const Outcome refused = run({"eval", folder / "m", "--text", case_path("small.txt")});
  EXPECT_EQ(refused.code, 2);
  EXPECT_THAT(refused.err, HasSubstr("lm_head.weight"));

  std::string file = slurp(folder / "m/model.safetensors");
  uint64_t header = 0;
  std::memcpy(&header, file.data(), sizeof header);
  const Json tensors = Json::parse(file.substr(8, header));
  const auto [head, end] = tensors["lm_head.weight"]["data_offsets"].get<std::pair<size_t, size_t>>();
  const size_t embeddings = tensors["model.embeddings.weight"]["data_offsets"][0];
  file.replace(8 + header + head, end - head, file.substr(8 + header + embeddings, end - head));
  spill(folder / "m/model.safetensors", file);
  EXPECT_NEAR(scored(folder / "m", case_path("small.txt"))["nll"].get<double>(), 146.392914, 1e-4);
}

TEST(Cases, AShardThatWasNotFetched) {
  const Folder folder;
  copy_case("two_ends", folder / "m");
  fs::rename(folder / "m/model.safetensors", folder / "m/model-00001-of-00002.safetensors");
  const std::string there = slurp(folder / "m/model-00001-of-00002.safetensors");
  uint64_t header = 0;
  std::memcpy(&header, there.data(), sizeof header);
  Json index;
  const Json tensors = Json::parse(there.substr(8, header));
  for (const auto& [name, tensor] : tensors.items())
    if (name != "__metadata__") index["weight_map"][name] = "model-00001-of-00002.safetensors";
  const auto error = [&] {
    spill(folder / "m/model.safetensors.index.json", index.dump());
    const Outcome outcome = run({"eval", folder / "m", "--text", case_path("small.txt"), "--context", "0"});
    return std::to_string(outcome.code) + " " + outcome.err;
  };
  EXPECT_EQ(error(), "0 ");
  index["weight_map"]["lm_head.weight"] = "model-00002-of-00002.safetensors";
  const std::string said = error();
  EXPECT_THAT(said, testing::StartsWith("2 "));
  EXPECT_THAT(said, HasSubstr("model-00002-of-00002.safetensors"));
  EXPECT_THAT(said, HasSubstr("model.safetensors.index.json"));
}

}  // namespace
}  // namespace fw::test
