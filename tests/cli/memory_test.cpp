// What takes more memory than there is, is refused before the work, with what to lower.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>

#include "cli/program.h"

namespace fw::test {
namespace {

using testing::HasSubstr;
using Args = std::vector<std::string>;

void expect_refusal(const Args& args, const std::string& advice) {
  const Outcome outcome = run(args);
  EXPECT_EQ(outcome.code, 2) << outcome.out << outcome.err;
  EXPECT_THAT(outcome.err, HasSubstr(" of memory, "));
  EXPECT_THAT(outcome.err, HasSubstr(advice));
  EXPECT_LT(outcome.peak_kib, 600 << 10) << "taken before it was refused";
}

TEST(Memory, ATrainingStepThatDoesNotFit) {
  Folder folder;
  spill(folder / "text", small_text());
  const Args train = tiny_train(folder / "text", folder / "run");
  expect_refusal(train + Args{"--batch", "2000000", "--length", "1000", "--hidden-size", "4096"},
                 "lower batch or length");
  expect_refusal(train + Args{"--batch", "30000000", "--accumulate", "65536"}, "lower batch or length");
  EXPECT_FALSE(std::filesystem::exists(folder / "run"));
  EXPECT_THAT(run(train + Args{"--dry-run", "--batch", "1000000", "--length", "2000"}).err,
              HasSubstr("tokens to plan a step for"));
  expect_refusal({"bench", "--train", "--batch", "8000000", "--hidden-size", "4096"}, "lower batch or length");
}

TEST(Memory, ABenchmarkThatDoesNotFit) {
  const Args bench{"bench", "--rule", "deltanet,kda"};
  expect_refusal(bench + Args{"--key-dim", "4096", "--tokens", "2000000000"}, "--key-dim");
  EXPECT_THAT(run(bench + Args{"--key-dim", "100000"}).err, HasSubstr("K: expected 1 to 4096, got 100000"));
  expect_refusal(bench + Args{"--tokens", "2000000000"}, "lower --tokens");
  expect_refusal(bench + Args{"--heads", "65536", "--tokens", "100000"}, "--heads");
  expect_refusal(bench + Args{"--tokens", "2000000000", "--dtype", "f64"}, "lower --tokens");
  EXPECT_THAT(run(bench + Args{"--heads", "9000000000000000000"}).err, HasSubstr("H: expected 1 to 65536"));
}

// Beyond all address space, so that going on ends at once too, but in another way.
TEST(Memory, TheCheckCanBeSwitchedOff) {
  const Outcome outcome = run({"bench", "--rule", "deltanet", "--tokens", "10000000", "--heads", "4096", "--key-dim",
                               "4096", "--no-check-memory"});
  EXPECT_EQ(outcome.code, 1) << outcome.err;
  EXPECT_THAT(outcome.err, HasSubstr("out of memory"));
}

// A memory control group of this test's own, where the system lets it make one.
class ControlGroup {
 public:
  ControlGroup() {
    for (const auto& [base, limit] :
         {std::pair("/sys/fs/cgroup/memory", "memory.limit_in_bytes"), std::pair("/sys/fs/cgroup", "memory.max")}) {
      path_ = std::string(base) + "/fastweight-test-" + std::to_string(::getpid());
      if (::mkdir(path_.c_str(), 0755) != 0) continue;
      limit_ = path_ + "/" + limit;
      std::ofstream out(limit_);
      if (::access(limit_.c_str(), W_OK) == 0 && out << (size_t{1} << 30) && out.flush()) return;
      ::rmdir(path_.c_str());
    }
    limit_.clear();
  }
  ~ControlGroup() {
    if (!limit_.empty()) ::rmdir(path_.c_str());
  }
  ControlGroup(const ControlGroup&) = delete;
  ControlGroup& operator=(const ControlGroup&) = delete;
  bool is_there() const { return !limit_.empty(); }
  Outcome run_within(int mebibytes, const Args& args) const {
    std::ofstream(limit_) << (static_cast<size_t>(mebibytes) << 20);
    const std::string enter = "echo $$ > '" + path_ + "/cgroup.procs' && exec \"$@\"";
    return Program(args, "", "/dev/null", {"/bin/sh", "-c", enter, "sh"}).wait();
  }

 private:
  std::string path_, limit_;
};

// Whatever the limit is, what does not fit is refused, and the kernel has nothing to kill.
TEST(Memory, WithinAControlGroupNothingIsKilled) {
#if !defined(FW_SYNC_LOG_LIBRARY)
  GTEST_SKIP() << "a sanitizer's runtime takes memory that no plan counts";
#endif
  const ControlGroup group;
  if (!group.is_there()) GTEST_SKIP() << "no control group can be made here";
  Folder folder;
  std::string text;
  for (int i = 0; i < 4; ++i) text += small_text();
  spill(folder / "text", text);
  const Args train = {"train",
                      "--text",
                      folder / "text",
                      "--out",
                      folder / "run",
                      "--steps",
                      "1",
                      "--batch",
                      "1",
                      "--length",
                      "16",
                      "--warmup",
                      "0",
                      "--hidden-size",
                      "512",
                      "--num-hidden-layers",
                      "3",
                      "--num-heads",
                      "4",
                      "--head-dim",
                      "128"};
  ASSERT_EQ(run(train).code, 0);
  std::string prompts;
  for (int i = 0; i < 64; ++i) prompts += std::to_string(i) + "\n";
  spill(folder / "prompts", prompts);
  for (const Args& args :
       {Args{"analyze", folder / "run", "--tokens", "256", "--every", "64", "--out", folder / "a"},
        Args{"generate", folder / "run", "--batch", "64", "--prompts", folder / "prompts", "--tokens", "1"}}) {
    Outcome outcome;
    int refused = 0;
    for (int mebibytes = 82; outcome.code != 0 && mebibytes < 400; mebibytes += 3) {
      outcome = group.run_within(mebibytes, args + Args{"--threads", "1"});
      ASSERT_TRUE(outcome.code == 0 || outcome.code == 2) << args[0] << " within " << mebibytes << ": " << outcome.code;
      refused += outcome.code == 2;
    }
    EXPECT_EQ(outcome.code, 0) << args[0];
    EXPECT_GT(refused, 0) << args[0];
  }
}

}  // namespace
}  // namespace fw::test
