// The command analyze on a tiny model: its files, its table, and what it says to what cannot be.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <nlohmann/json.hpp>

#include "cli/program.h"

namespace fw::test {
namespace {

using testing::HasSubstr;
using Args = std::vector<std::string>;

class AnalyzeCommand : public testing::Test {
 protected:
  void SetUp() override {
    spill(folder_ / "text", small_text());
    const Outcome outcome = run(tiny_train(folder_ / "text", folder_ / "run"));
    ASSERT_EQ(outcome.code, 0) << outcome.err;
  }
  Outcome analyze(const Args& more) const {
    return run(Args{"analyze", folder_ / "run", "--text", folder_ / "text", "--tokens", "300", "--context", "100",
                    "--every", "20"} +
               more);
  }
  Folder folder_;
};

TEST_F(AnalyzeCommand, WritesWhatItNames) {
  const std::string out = folder_ / "new/folder";
  const Outcome outcome = analyze({"--out", out});
  ASSERT_EQ(outcome.code, 0) << outcome.err;
  EXPECT_THAT(outcome.out, HasSubstr("300 tokens in 3 windows"));
  EXPECT_THAT(outcome.out, HasSubstr("eigenvalue"));
  const nlohmann::json json = nlohmann::json::parse(slurp(out + "/analysis.json"));
  EXPECT_EQ(json["model"], folder_ / "run/model");
  EXPECT_EQ(json["tokens"], 300);
  EXPECT_EQ(json["layers"][0]["over_time"]["state_norm"][0]["position"], nlohmann::json({20, 40, 60, 80, 100}));
  EXPECT_THAT(slurp(out + "/analysis.csv"), HasSubstr("\n0,1,erase_gate,mean,,,"));
  size_t named = 0;
  for (const auto& entry : std::filesystem::directory_iterator(out)) {
    EXPECT_THAT(outcome.out, HasSubstr("  " + entry.path().string() + "\n"));
    EXPECT_GT(entry.file_size(), 0u) << entry.path();
    ++named;
  }
  if (outcome.out.find("gnuplot") == std::string::npos) {
    EXPECT_THAT(slurp(out + "/eigenvalue.png"), testing::StartsWith("\x89PNG"));
    EXPECT_THAT(slurp(out + "/eigenvalue.svg"), HasSubstr("</svg>"));
    EXPECT_EQ(named, 2u + 2 * 12);
  }
}

#ifdef FW_EMULATED_PROGRAM
// The model's passes on a device: the same numbers but for bf16, and no warning that the replay is of another rule.
TEST_F(AnalyzeCommand, OnTheEmulatedDevice) {
  const Args how{"--no-pictures", "--layers", "0", "--out"};
  ASSERT_EQ(analyze(how + Args{folder_ / "cpu"}).code, 0);
  const Args args{"analyze", folder_ / "run", "--text", folder_ / "text", "--tokens", "300", "--context",
                  "100",     "--every",       "20",     "--device",       "cuda"};
  const Outcome outcome = Program(args + how + Args{folder_ / "cuda"}, "", "/dev/null", {}, FW_EMULATED_PROGRAM).wait();
  ASSERT_EQ(outcome.code, 0) << outcome.err;
  EXPECT_EQ(outcome.out.find("warning"), std::string::npos) << outcome.out;
  const nlohmann::json cpu = nlohmann::json::parse(slurp(folder_ / "cpu/analysis.json")),
                       cuda = nlohmann::json::parse(slurp(folder_ / "cuda/analysis.json"));
  EXPECT_EQ(cpu["device"], "cpu");
  EXPECT_EQ(cuda["device"], "cuda");
  EXPECT_EQ(cuda["tokens"], cpu["tokens"]);
  EXPECT_NEAR(cuda["loss"].get<double>(), cpu["loss"].get<double>(), 1e-2 * cpu["loss"].get<double>());
  EXPECT_GT(cuda["layers"][0]["replay_error"].get<double>(), 1e-4);
}
#endif

TEST_F(AnalyzeCommand, ThreadsChangeNothing) {
  ASSERT_EQ(analyze({"--no-pictures", "--out", folder_ / "a", "--threads", "1"}).code, 0);
  ASSERT_EQ(analyze({"--no-pictures", "--out", folder_ / "b", "--threads", "3"}).code, 0);
  EXPECT_EQ(slurp(folder_ / "a/analysis.json"), slurp(folder_ / "b/analysis.json"));
  EXPECT_FALSE(std::filesystem::exists(folder_ / "a/decay.png"));
}

TEST_F(AnalyzeCommand, SeveralRunsAreGathered) {
  ASSERT_EQ(run(tiny_train(folder_ / "text", folder_ / "other") + Args{"--rule", "kaczmarz"}).code, 0);
  const std::string out = folder_ / "set";
  const Args usual{"--text", folder_ / "text", "--tokens", "300", "--context", "100", "--every", "20", "--out", out};
  const Outcome outcome = run(Args{"analyze", folder_ / "run", folder_ / "other", folder_ / "run/model"} + usual);
  ASSERT_EQ(outcome.code, 0) << outcome.err;
  EXPECT_THAT(outcome.out, HasSubstr("run-2 (3 of 3)"));
  // A folder each, as alone.
  ASSERT_EQ(analyze({"--no-pictures", "--out", folder_ / "alone"}).code, 0);
  EXPECT_EQ(slurp(out + "/run/analysis.csv"), slurp(folder_ / "alone/analysis.csv"));
  EXPECT_TRUE(std::filesystem::exists(out + "/other/analysis.json"));
  const std::string table = slurp(out + "/comparison.md");
  EXPECT_THAT(table, HasSubstr("| run | other | run-2 |"));
  EXPECT_THAT(table, HasSubstr("| eigenvalue | "));
  EXPECT_THAT(slurp(out + "/comparison.csv"), HasSubstr("\nother,all,eigenvalue,mean,"));
  if (outcome.out.find("gnuplot") == std::string::npos) {
    for (const char* name : {"eigenvalue", "eigenvalue_depth", "cos_reads", "erase_gate_depth"}) {
      EXPECT_THAT(slurp(out + "/" + name + ".svg"), HasSubstr("</svg>")) << name;
    }
  }
  const auto refused = [&](const Args& args, const std::string& words) {
    const Outcome found = run(args);
    EXPECT_EQ(found.code, 2) << found.out;
    EXPECT_THAT(found.err, HasSubstr(words));
  };
  refused(Args{"analyze", folder_ / "run", folder_ / "none", "--text", folder_ / "text", "--out", folder_ / "no"},
          "MODEL: expected the folder of a model or of a run, got '");
  refused(Args{"analyze", folder_ / "run", folder_ / "other", "--text", "-", "--out", folder_ / "no"},
          "standard input can be read once");
  EXPECT_FALSE(std::filesystem::exists(folder_ / "no"));
}

TEST_F(AnalyzeCommand, BadInput) {
  const auto expect_error = [&](const Args& args, const std::string& words) {
    const Outcome outcome = run(args);
    EXPECT_EQ(outcome.code, 2) << outcome.out << outcome.err;
    EXPECT_THAT(outcome.err, HasSubstr(words));
    EXPECT_TRUE(outcome.err.starts_with("fastweight analyze: ")) << outcome.err;
    EXPECT_EQ(outcome.out, "");
  };
  const std::string model = folder_ / "run", text = folder_ / "text", out = folder_ / "out";
  const Args usual{"analyze", model, "--text", text, "--out", out};
  expect_error({"analyze"}, "MODEL is missing");
  std::filesystem::copy(model + "/model", folder_ / "alone", std::filesystem::copy_options::recursive);
  expect_error({"analyze", folder_ / "alone", "--out", out}, "--text");  // of a run it is the held-out data
  expect_error({"analyze", folder_ / "nowhere", "--text", text, "--out", out}, "nowhere");
  expect_error({"analyze", model, "--text", folder_ / "missing", "--out", out}, "missing");
  expect_error({"analyze", model, "--text", text, "--out", text}, text);  // a file where the folder should be
  expect_error(usual + Args{"--layers", "0,1"}, "layers: expected numbers from 0 to 0, got 1");
  expect_error(usual + Args{"--layers", "x"}, "--layers");
  expect_error(usual + Args{"--tokens", "-1"}, "tokens");
  expect_error(usual + Args{"--context", "-5"}, "context");
  expect_error(usual + Args{"--every", "0"}, "every");
  expect_error(usual + Args{"--bins", "1"}, "--bins: expected 2 to 1024, got 1");
  EXPECT_FALSE(std::filesystem::exists(out + "/analysis.json"));
}

}  // namespace
}  // namespace fw::test
