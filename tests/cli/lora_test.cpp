// train --lora, and what reads its adapters: generate, eval, export --merge.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <nlohmann/json.hpp>
#include <sstream>

#include "cli/program.h"

namespace fw::test {
namespace {

using testing::HasSubstr;
using Args = std::vector<std::string>;

class LoraRun : public testing::Test {
 protected:
  static void SetUpTestSuite() {
    folder_ = std::make_unique<Folder>();
    spill(*folder_ / "text", small_text());
    ready_ = fw::test::run(tiny_train(*folder_ / "text", base()) + Args{"--layout", "fla"}).code == 0 &&
             fw::test::run(train(tuned())).code == 0;
  }
  static void TearDownTestSuite() { folder_.reset(); }
  void SetUp() override { ASSERT_TRUE(ready_); }

  static std::string base() { return *folder_ / "base"; }
  static std::string tuned() { return *folder_ / "tuned"; }
  static Args train(const std::string& out) {
    return {"train", "--from",   base(), "--lora",    "2",       "--text", *folder_ / "text",
            "--out", out,        "--lr", "1e-2",      "--steps", "6",      "--batch",
            "2",     "--length", "32",   "--threads", "1"};
  }
  static std::string adapters(const std::string& run) { return slurp(run + "/model/adapter_model.safetensors"); }
  static std::string error(const Args& args) {
    const Outcome outcome = fw::test::run(args);
    EXPECT_EQ(outcome.code, 2) << outcome.out;
    return outcome.err;
  }
  static double loss(const Args& args) {
    const Outcome outcome =
        fw::test::run(Args{"eval"} + args + Args{"--text", *folder_ / "text", "--context", "32", "--json"});
    EXPECT_EQ(outcome.code, 0) << outcome.err;
    return nlohmann::json::parse(outcome.out)["results"][0]["loss"];
  }

  static std::unique_ptr<Folder> folder_;
  static bool ready_;
};
std::unique_ptr<Folder> LoraRun::folder_;
bool LoraRun::ready_ = false;

// The commands of docs/howto/fine-tune.md, on a small model that came from another program's folder.
TEST_F(LoraRun, CommandsOfTheHowTo) {
  const std::string model = *folder_ / "published";
  ASSERT_EQ(fw::test::run({"export", base(), model}).code, 0);
  const std::string page = slurp(FW_SOURCE_DIR "/docs/howto/fine-tune.md");
  const size_t from = page.find("## A published model"), to = page.find("| `model_type`");
  ASSERT_TRUE(from != std::string::npos && to != std::string::npos && from < to);
  std::istringstream lines(page.substr(from, to - from));
  int commands = 0;
  for (std::string line; std::getline(lines, line);) {
    if (!line.starts_with("    fastweight ")) continue;
    std::istringstream words(line);
    Args args;
    for (std::string word; words >> word;) {
      if (word == "MODEL") word = model;
      if (word == "my.txt" || word == "held-out.txt") word = *folder_ / "text";
      if (word == "tuned" || word == "for-others") word.insert(0, *folder_ / "of-the-page-");
      args.push_back(word == "500" ? "3" : word);
    }
    args.erase(args.begin());
    if (args[0] == "train") args = args + Args{"--batch", "2", "--length", "32", "--threads", "1"};
    if (args[0] == "eval") args = args + Args{"--context", "32"};
    const Outcome outcome = fw::test::run(args);
    EXPECT_EQ(outcome.code, 0) << line << "\n" << outcome.err;
    EXPECT_FALSE(outcome.out.empty()) << line;
    ++commands;
  }
  EXPECT_EQ(commands, 10);
  EXPECT_NE(slurp(*folder_ / "of-the-page-for-others/model.safetensors"), slurp(model + "/model.safetensors"));
  EXPECT_EQ(nlohmann::json::parse(slurp(*folder_ / "of-the-page-for-others/config.json")),
            nlohmann::json::parse(slurp(model + "/config.json")));
}

TEST_F(LoraRun, WritesAdaptersAndLeavesTheBaseAlone) {
  const nlohmann::json config = nlohmann::json::parse(slurp(tuned() + "/model/adapter_config.json"));
  EXPECT_EQ(config["peft_type"], "LORA");
  EXPECT_EQ(config["r"], 2);
  EXPECT_EQ(config["lora_alpha"], 32);
  EXPECT_EQ(config["base_model_name_or_path"], base() + "/model");
  EXPECT_FALSE(std::filesystem::exists(tuned() + "/model/model.safetensors"));
  EXPECT_LT(loss({tuned()}), loss({base()}) - 1e-3);
  EXPECT_EQ(loss({base(), "--adapter", tuned()}), loss({tuned()}));
  EXPECT_EQ(loss({base(), "--adapter", tuned() + "/model"}), loss({tuned() + "/model"}));
  EXPECT_EQ(fw::test::run({"generate", tuned(), "--tokens", "5"}).code, 0);
}

TEST_F(LoraRun, ResumesToTheBitAndOnlyWithTheSameBase) {
  const std::string parted = *folder_ / "parted";
  ASSERT_EQ(fw::test::run(train(parted) + Args{"--checkpoint-every", "2", "--keep", "9"}).code, 0);
  EXPECT_EQ(adapters(parted), adapters(tuned()));
  std::filesystem::remove_all(parted + "/checkpoints/step-6");
  std::filesystem::remove_all(parted + "/model");
  const Outcome resumed = fw::test::run({"train", "--resume", "--out", parted});
  ASSERT_EQ(resumed.code, 0) << resumed.err;
  EXPECT_THAT(resumed.out, HasSubstr("resumed at step 4"));
  EXPECT_EQ(adapters(parted), adapters(tuned()));
  EXPECT_THAT(error({"train", "--resume", "--out", parted, "--steps", "9", "--lora", "3"}),
              HasSubstr("LoRA of rank 2, alpha 32, all"));
  std::filesystem::rename(base(), *folder_ / "moved");
  ASSERT_EQ(fw::test::run(tiny_train(*folder_ / "text", base()) + Args{"--layout", "fla", "--seed", "7"}).code, 0);
  EXPECT_THAT(error({"train", "--resume", "--out", parted, "--steps", "9"}),
              HasSubstr("a base model with the checksum"));
  std::filesystem::remove_all(base());
  EXPECT_THAT(error({"generate", tuned()}), HasSubstr("base_model_name_or_path"));
  std::filesystem::rename(*folder_ / "moved", base());
}

TEST_F(LoraRun, KeepsAndTestsTheBestAdapters) {
  const std::string out = *folder_ / "best";
  const Outcome outcome = fw::test::run(train(out) + Args{"--eval-every", "2", "--test", *folder_ / "text"});
  ASSERT_EQ(outcome.code, 0) << outcome.err;
  EXPECT_TRUE(std::filesystem::exists(out + "/best/adapter_model.safetensors"));
  const nlohmann::json test = nlohmann::json::parse(slurp(out + "/test.json"));
  EXPECT_NEAR(test["loss"].get<double>(), loss({base(), "--adapter", out + "/best"}), 1e-6);
}

TEST_F(LoraRun, ExportMergesThem) {
  const std::string merged = *folder_ / "merged";
  EXPECT_THAT(error({"export", tuned(), *folder_ / "unmerged"}),
              HasSubstr("holds LoRA adapters: add --merge to write merged weights"));
  EXPECT_THAT(error({"export", "--merge", base(), *folder_ / "unmerged"}), HasSubstr("--merge: expected adapters"));
  const Outcome outcome = fw::test::run({"export", "--merge", tuned(), merged});
  ASSERT_EQ(outcome.code, 0) << outcome.err;
  EXPECT_NEAR(loss({merged}), loss({tuned()}), 1e-5);
}

// Of a model that flash-linear-attention has no layer for.
TEST_F(LoraRun, ExportMergesAnOwnModel) {
  const std::string base = *folder_ / "own", tuned = *folder_ / "own-tuned", merged = *folder_ / "own-merged";
  ASSERT_EQ(fw::test::run(tiny_train(*folder_ / "text", base)).code, 0);
  ASSERT_EQ(fw::test::run({"train", "--from", base, "--lora", "2", "--text", *folder_ / "text", "--out", tuned, "--lr",
                           "1e-2", "--steps", "3", "--batch", "2", "--length", "32", "--threads", "1"})
                .code,
            0);
  EXPECT_THAT(error({"export", base, merged}), HasSubstr("flash-linear-attention has no model that computes this"));
  const Outcome outcome = fw::test::run({"export", "--merge", tuned, merged});
  ASSERT_EQ(outcome.code, 0) << outcome.err;
  EXPECT_THAT(outcome.out, HasSubstr("a model folder of fastweight, since flash-linear-attention has no model"));
  EXPECT_NEAR(loss({merged}), loss({tuned}), 1e-5);
  EXPECT_EQ(fw::test::run({"train", "--from", merged, "--text", *folder_ / "text", "--dry-run"}).code, 0);
}

TEST_F(LoraRun, MemoryIsPlannedWithoutGradientsOfTheModel) {
  const Outcome whole = fw::test::run({"train", "--from", base(), "--dry-run"}),
                lora = fw::test::run({"train", "--from", base(), "--lora", "2", "--dry-run"});
  ASSERT_EQ(lora.code, 0) << lora.err;
  EXPECT_THAT(lora.out, HasSubstr("adapters  LoRA of rank 2, alpha 32:"));
  const auto bytes = [](const std::string& text, const std::string& row) {
    const size_t at = text.find("\n" + row);
    return at == std::string::npos ? -1L
                                   : std::stol(text.substr(text.find_first_of("0123456789", at + 1 + row.size())));
  };
  EXPECT_EQ(bytes(lora.out, "frozen parameters, float"), 32) << lora.out;
  EXPECT_LT(bytes(lora.out, "moments, float32"), bytes(whole.out, "moments, float32"));
}

TEST_F(LoraRun, ErrorsSayWhatToDo) {
  const Args run = train(*folder_ / "refused");
  EXPECT_THAT(error(run + Args{"--lora", "0"}), HasSubstr("--lora: expected a rank of at least 1, got 0"));
  EXPECT_THAT(error(run + Args{"--lora-alpha", "0"}), HasSubstr("lora_alpha: expected a number > 0, got 0"));
  EXPECT_THAT(error(run + Args{"--lora-modules", "query"}), HasSubstr("lora_modules: 'query'"));
  EXPECT_THAT(error({"train", "--lora", "2", "--text", *folder_ / "text", "--out", *folder_ / "refused"}),
              HasSubstr("give it with --from"));
  EXPECT_THAT(error({"train", "--from", tuned(), "--text", *folder_ / "text", "--out", *folder_ / "refused"}),
              HasSubstr("export --merge"));
  EXPECT_FALSE(std::filesystem::exists(*folder_ / "refused/config.toml"));
}

}  // namespace
}  // namespace fw::test
