// Input that cannot be: a clear error, exit code 2, nothing damaged.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "cli/program.h"

namespace fw::test {
namespace {

using testing::EndsWith;
using testing::HasSubstr;
using testing::StartsWith;
using Args = std::vector<std::string>;

void expect_error(const Args& args, const std::string& words) {
  const Outcome outcome = run(args);
  EXPECT_EQ(outcome.code, 2) << outcome.out << outcome.err;
  EXPECT_THAT(outcome.err, HasSubstr(words));
  EXPECT_TRUE(outcome.err.starts_with("fastweight " + args[0] + ": ")) << outcome.err;
}

TEST(BadText, MissingEmptyUnreadable) {
  Folder folder;
  const std::string missing = folder / "missing", empty = folder / "empty";
  spill(empty, "");
  expect_error({"train"}, "--text");
  for (const std::string& text : {missing, empty, folder.path()}) {
    expect_error(tiny_train(text, folder / "run"), text);
    EXPECT_FALSE(std::filesystem::exists(folder / "run/checkpoints"));
  }
  if (::geteuid() != 0) {  // root reads everything
    const std::string locked = folder / "locked";
    spill(locked, small_text());
    std::filesystem::permissions(locked, std::filesystem::perms::none);
    expect_error(tiny_train(locked, folder / "run"), locked);
  }
  expect_error({"train", folder / "missing.toml"}, "missing.toml");
  expect_error({"tokenize", missing, "--out", folder / "t"}, missing);
  expect_error({"tokenize", "--info", empty}, empty);
}

TEST(BadText, TooShortToLearnFrom) {
  Folder folder;
  spill(folder / "text", "a\n");
  expect_error(tiny_train(folder / "text", folder / "run") + Args{"--valid-fraction", "0"}, "");
  expect_error(tiny_train(folder / "text", folder / "run") + Args{"--valid-fraction", "1.5"}, "valid_fraction");
}

TEST(BadConfig, WhatCannotBe) {
  Folder folder;
  spill(folder / "text", small_text());
  const auto with = [&](const Args& more) { return tiny_train(folder / "text", folder / "run") + more; };
  expect_error(with({"--num-v-heads", "3"}), "num_v_heads");
  expect_error(with({"--hidden-size", "-16"}), "hidden_size");
  expect_error(with({"--head-dim", "0"}), "head_dim");
  expect_error(with({"--expand-v", "0.3"}), "expand_v");
  expect_error(with({"--batch", "0"}), "batch");
  expect_error(with({"--lr", "-1"}), "lr");
  expect_error(with({"--lr", "nan"}), "lr");
  expect_error(with({"--precision", "f16"}), "f16");
  expect_error(with({"--output-gate", "relu"}), "relu");
  expect_error(with({"--vocab-size", "100"}), "vocab");
  expect_error(with({"--rule", "precond_gated_deltanet", "--precond-x", "1.5", "--allow-neg-eigval"}), "precond_x");
  expect_error(with({"--rule", "decay=sideways"}), "sideways");
  // an integer that is no double exactly
  spill(folder / "large.toml", "[train]\nbeta1 = 9223372036854775807\n");
  expect_error(with({folder / "large.toml"}), "beta1");
  EXPECT_FALSE(std::filesystem::exists(folder / "run/checkpoints"));
}

// A switch takes nothing, true or false: "yes" must not quietly mean no.
// What an imported model came with is another program's: of any kind.
TEST(BadConfig, AHuggingFaceConfigurationOfAnotherKind) {
  Folder folder;
  spill(folder / "text", small_text());
  ASSERT_EQ(run(tiny_train(folder / "text", folder / "run")).code, 0);
  const std::string path = folder / "run/model/config.json";
  const auto config = nlohmann::json::parse(slurp(path));
  for (const char* hf : {"{}", "{\"config\":5}", "{\"config\":[]}", "{\"config\":null}",
                         "{\"config\":{\"eos_token_id\":[\"x\",null,1e30]}}"}) {
    auto other = config;
    other["peer"] = nlohmann::json::parse(hf);
    spill(path, other.dump());
    const Outcome outcome = run({"generate", folder / "run", "--tokens", "1", "--prompt", "a"});
    EXPECT_EQ(outcome.code, 0) << hf << outcome.err;
  }
}

TEST(BadSwitch, OtherValues) {
  for (const Args& args :
       {Args{"train", "--resume=yes"}, Args{"train", "--resume=1"}, Args{"train", "--resume="},
        Args{"train", "--tie-word-embeddings=banana"}, Args{"train", "--no-tie-word-embeddings=true"},
        Args{"generate", "x", "--greedy=1"}, Args{"generate", "x", "--greedy=on"}, Args{"eval", "x", "--json=TRUE"}}) {
    const std::string last = args.back();
    expect_error(args, last.substr(0, last.find('=')) + ": expected no value");
  }
  Folder folder;
  expect_error({"train", "--resume=true", "--out", folder / "run"}, "no checkpoint");
  expect_error({"train", "--resume=false", "--out", folder / "run"}, "no text");
}

TEST(BadResume, SaysWhatIsMissing) {
  Folder folder;
  spill(folder / "text", small_text());
  expect_error({"train", "--resume", "--out", folder / "run"}, "no checkpoint");
  ASSERT_EQ(run(tiny_train(folder / "text", folder / "run")).code, 0);
  std::filesystem::remove(folder / "run/config.toml");
  expect_error({"train", "--resume", "--out", folder / "run"}, folder / "run/config.toml");
}

class Damaged : public testing::Test {
 protected:
  void SetUp() override {
    spill(folder_ / "text", small_text());
    const Outcome outcome = run(tiny_train(folder_ / "text", run_) + Args{"--checkpoint-every", "2", "--keep", "3"});
    ASSERT_EQ(outcome.code, 0) << outcome.err;
  }
  std::string newest() const {
    std::string path;
    int64_t best = -1;
    for (const auto& entry : std::filesystem::directory_iterator(run_ + "/checkpoints")) {
      const std::string name = entry.path().filename().string();
      const int64_t step = std::stoll(name.substr(name.find_first_of("0123456789")));
      if (step > best) {
        best = step;
        path = entry.path().string();
      }
    }
    return path;
  }
  static void flip_bit(const std::string& path, size_t from_end) {
    std::string content = slurp(path);
    ASSERT_GT(content.size(), from_end);
    content[content.size() - from_end] = static_cast<char>(content[content.size() - from_end] ^ 4);
    spill(path, content);
  }
  Folder folder_;
  std::string run_ = folder_ / "run";
};

// Of steps behind the checkpoint, and one that a full disk cut.
TEST_F(Damaged, SamplesOfAResumedRunStandOnce) {
  const std::string path = run_ + "/samples.jsonl";
  std::filesystem::remove_all(newest());  // of step 6
  spill(path,
        "{\"step\":2,\"text\":\"a\"}\n{\"step\":4,\"text\":\"b\"}\n{\"step\":6,\"text\":\"c\"}\n{\"step\":6,\"te");
  ASSERT_EQ(run({"train", "--resume", "--out", run_, "--sample-every", "2"}).code, 0);
  const std::string samples = slurp(path);
  EXPECT_THAT(samples, StartsWith("{\"step\":2,\"text\":\"a\"}\n{\"step\":4,\"text\":\"b\"}\n{\"step\":6,\"text\":"));
  EXPECT_EQ(std::count(samples.begin(), samples.end(), '\n'), 3) << samples;
  EXPECT_THAT(samples, EndsWith("}\n"));
}

TEST_F(Damaged, NewestCheckpointIsPassedOver) {
  const std::string before = slurp(run_ + "/model/model.safetensors");
  flip_bit(newest() + "/model.safetensors", 100);
  const Outcome resumed = run({"train", "--resume", "--out", run_});
  EXPECT_EQ(resumed.code, 0) << resumed.err;
  EXPECT_THAT(resumed.err, HasSubstr("warning"));
  EXPECT_THAT(resumed.out, HasSubstr("resumed at step 4"));
  EXPECT_EQ(slurp(run_ + "/model/model.safetensors"), before);
}

TEST_F(Damaged, NoGoodCheckpointIsAnError) {
  for (const auto& entry : std::filesystem::directory_iterator(run_ + "/checkpoints")) {
    std::filesystem::resize_file(entry.path() / "optimizer.safetensors", 100);
  }
  expect_error({"train", "--resume", "--out", run_}, "checkpoints");
}

TEST_F(Damaged, ModelFiles) {
  const std::string weights = run_ + "/model/model.safetensors", config = run_ + "/model/config.json";
  const std::string good_weights = slurp(weights), good_config = slurp(config);
  const auto expect_unusable = [&](const std::string& words) {
    expect_error({"generate", run_, "--tokens", "1"}, words);
    expect_error({"eval", run_, "--text", folder_ / "text"}, words);
  };
  std::filesystem::resize_file(weights, good_weights.size() / 2);
  expect_unusable("model.safetensors");
  spill(weights, "");
  expect_unusable("model.safetensors");
  // The first byte of the header's length.
  spill(weights, "\xff" + good_weights.substr(1));
  expect_unusable("model.safetensors");
  std::filesystem::remove(weights);
  expect_unusable("model.safetensors");
  spill(weights, good_weights);

  spill(config, "{");
  expect_unusable("config.json");
  std::string other = good_config;
  other.replace(other.find("\"hidden_size\""), 13, "\"hidden_sise\"");
  spill(config, other);
  expect_unusable("hidden_size");
  spill(config, good_config);
  EXPECT_EQ(run({"generate", run_, "--tokens", "1"}).code, 0);

  expect_error({"generate", folder_ / "nowhere"}, "nowhere");
  expect_error({"generate", folder_.path()}, "not a model");
}

TEST_F(Damaged, States) {
  const std::string state = folder_ / "state";
  ASSERT_EQ(run({"generate", run_, "--tokens", "3", "--state-save", state}).code, 0);
  const std::string good = slurp(state);
  spill(state, good.substr(0, good.size() / 2));
  expect_error({"generate", run_, "--state-load", state}, state);
  // A state of another model.
  ASSERT_EQ(run(tiny_train(folder_ / "text", folder_ / "other") + Args{"--seed", "9"}).code, 0);
  spill(state, good);
  expect_error({"generate", folder_ / "other", "--state-load", state}, state);
}

TEST_F(Damaged, TokenFiles) {
  const std::string tokens = folder_ / "t.tokens";
  ASSERT_EQ(run({"tokenize", folder_ / "text", "--out", tokens}).code, 0);
  flip_bit(tokens, 200);
  expect_error({"eval", run_, "--text", tokens}, tokens);
  expect_error(tiny_train(tokens, folder_ / "r2") + Args{"--valid-fraction", "0"}, tokens);
}

TEST(BadGeneration, OptionsThatDoNotFit) {
  expect_error({"generate", "x", "--prompt", "a", "--prompt-file", "b"}, "--prompt-file");
  expect_error({"generate", "x", "--greedy", "--temperature", "1"}, "--temperature");
  expect_error({"generate", "x", "--temperature", "-1"}, "temperature");
  expect_error({"generate", "x", "--top-p", "2"}, "top_p");
  expect_error({"generate", "x", "--min-p", "-1"}, "min_p");
  expect_error({"generate", "x", "--repetition-penalty", "0"}, "repetition_penalty");
  expect_error({"generate", "x", "--samples", "0"}, "--samples");
  expect_error({"generate", "x", "--samples", "2", "--state-save", "s"}, "--state-save");
  expect_error({"generate", "x", "--conversation", "--samples", "2"}, "--samples");
  expect_error({"generate", "x", "--conversation", "--prompts", "p"}, "--prompts");
  expect_error({"generate", "x", "--after", "a"}, "--after");
  expect_error({"generate", "x", "--ignore-end", "--end-token", "1"}, "--ignore-end");
}

}  // namespace
}  // namespace fw::test
