// What a new user meets first: info, the help of sweeps, a small sweep, and device names without a GPU.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <nlohmann/json.hpp>
#include <string>

#include "cli/program.h"
#include "tasks/synthetic.h"

namespace fw::test {
namespace {

using testing::ContainsRegex;
using testing::HasSubstr;
using testing::Not;

TEST(Info, SaysWhatTheBuildAndTheMachineHave) {
  const Outcome text = run({"info"});
  ASSERT_EQ(text.code, 0) << text.err;
  for (const char* line :
       {"\nCPU features  ", "\ndevice code   ", "\nGPU           ", "\nbackends      CPU", "\nranks         "})
    EXPECT_THAT(text.out, HasSubstr(line));
  const auto json = nlohmann::json::parse(run({"info", "--json"}).out);
  const bool device_code = !json.at("device_code").is_null();
  EXPECT_EQ(json.at("backends").size(), device_code ? 2U : 1U);
  if (::access("/dev/nvidiactl", F_OK) != 0) {
    EXPECT_TRUE(json.at("gpu").at("name").is_null());
    EXPECT_THAT(text.out, HasSubstr("no NVIDIA GPU found"));
    EXPECT_THAT(text.out, Not(HasSubstr("driver version")));
  }
}

#ifdef FW_EMULATED_PROGRAM
TEST(Info, NamesTheEmulatedDevice) {
  const Outcome text = Program({"info"}, "", "/dev/null", {}, FW_EMULATED_PROGRAM).wait();
  ASSERT_EQ(text.code, 0) << text.err;
  EXPECT_THAT(text.out, HasSubstr("backends      CPU, CUDA"));
  EXPECT_THAT(text.out, HasSubstr("emulated device"));
}
#endif

TEST(Device, IsRefusedInWordsWhereThereIsNone) {
  if (::access("/dev/nvidiactl", F_OK) == 0) GTEST_SKIP() << "a GPU is here";
  const Outcome refused = run({"bench", "--device", "cuda", "--rule", "kda"});
  EXPECT_EQ(refused.code, 2);
  EXPECT_THAT(refused.err, ContainsRegex("no NVIDIA GPU was found|no device code"));
  EXPECT_THAT(refused.err, Not(HasSubstr("driver version")));
}

// Both commands name the tasks and what they run without options.
TEST(Sweep, HelpShowsTheDefaultsThatRun) {
  for (const char* command : {"sweep", "task"}) {
    const std::string help = run({command, "--help"}).out;
    for (const std::string& task : synthetic_tasks()) EXPECT_THAT(help, ContainsRegex(task + " +length [0-9]+"));
    EXPECT_THAT(help, HasSubstr("[256]"));  // hidden_size of the papers' models
    EXPECT_THAT(help, HasSubstr("--small"));
  }
}

TEST(Sweep, SmallNeedsNoOtherOption) {
  const Folder folder;
  const Outcome small =
      run({"sweep", "one_pair", "--small", "--out", folder / "out", "--steps", "30", "--eval-every", "30"});
  ASSERT_EQ(small.code, 0) << small.err;
  EXPECT_THAT(small.out, HasSubstr("ms a step: about"));
  const auto results = nlohmann::json::parse(slurp(folder / "out/results.json"));
  ASSERT_EQ(results.size(), 2U);
  EXPECT_EQ(results[0].at("rule"), "gated_deltanet");
  EXPECT_EQ(results[1].at("rule"), "mamba2");
  EXPECT_EQ(results[0].at("recipe").at("steps"), 30);
  EXPECT_EQ(results[0].at("model").at("hidden_size"), 32);
}

// A run that takes hours says so after a few of its long steps.
TEST(Sweep, TheTimeOfLongStepsIsSaidEarly) {
  const Folder folder;
  const Outcome paper = run({"sweep", "mqar", "--rule", "deltanet", "--out", folder / "out", "--steps", "5",
                             "--threads", "1", "--judged", "1", "--eval-every", "5", "--lengths", "128"});
  ASSERT_EQ(paper.code, 0) << paper.err;
  EXPECT_THAT(paper.out, HasSubstr("ms a step: about"));
}

// What `make demo` begins with. Bytes without a model take 8 bits, letters without context about 4.2.
TEST(Examples, TheModelOfShakespeareKnowsEnglish) {
  const Folder folder;
  const std::string model = std::string(FW_SOURCE_DIR) + "/examples/shakespeare";
  EXPECT_LT(std::filesystem::file_size(model + "/model.safetensors"), 8000000U);
  spill(folder / "text", "Now is the winter of our discontent, and I will tell thee what the king hath said to me.\n");
  const Outcome scored = run({"eval", model, "--text", folder / "text", "--context", "0", "--json"});
  ASSERT_EQ(scored.code, 0) << scored.err;
  EXPECT_LT(nlohmann::json::parse(scored.out)["results"][0]["bits_per_byte"].get<double>(), 2.5);
}

TEST(Task, DrawRefusesOptionsOfTraining) {
  const Outcome refused = run({"task", "mqar", "--draw", "2", "--lr", "1e-3"});
  EXPECT_EQ(refused.code, 2);
  EXPECT_THAT(refused.err, HasSubstr("--lr: expected no such option, which has no effect with --draw"));
}

}  // namespace
}  // namespace fw::test
