// Training on ranks that mpirun starts, and what a build without MPI says.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>

#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <thread>

#include "cli/program.h"

namespace fw::test {
namespace {

using testing::HasSubstr;
using Args = std::vector<std::string>;
namespace fs = std::filesystem;

// Two variables of the environment while it lives.
class Launched {
 public:
  Launched(const char* rank, const char* size) {
    ::setenv("OMPI_COMM_WORLD_RANK", rank, 1);
    ::setenv("OMPI_COMM_WORLD_SIZE", size, 1);
  }
  ~Launched() {
    ::unsetenv("OMPI_COMM_WORLD_RANK");
    ::unsetenv("OMPI_COMM_WORLD_SIZE");
  }
};

TEST(Ranks, OtherCommandsRunOnOne) {
  const Launched launched("1", "4");
  const Outcome outcome = run({"rules"});
  EXPECT_EQ(outcome.code, 2);
  EXPECT_THAT(outcome.err, HasSubstr("rank 1 of 4"));
  EXPECT_THAT(outcome.err, HasSubstr("only train, and bench --train --device cuda, run on several ranks"));
}

TEST(Ranks, ADryRunIsOfOne) {
  const Launched launched("0", "2");
  const Outcome outcome = run({"train", "--dry-run"});
  EXPECT_EQ(outcome.code, 2);
  EXPECT_THAT(outcome.err, HasSubstr("--dry-run, --profile: expected one process, started as one of 2"));
}

#ifndef FW_MPIRUN
TEST(Ranks, ABuildWithoutMpiSaysWhatIsMissing) {
  const Folder folder;
  spill(folder / "text", small_text());
  const Launched launched("0", "2");
  const Outcome outcome = run(tiny_train(folder / "text", folder / "run") + Args{"--accumulate", "2"});
  EXPECT_EQ(outcome.code, 2);
  EXPECT_THAT(outcome.err, HasSubstr("this build has no MPI"));
  EXPECT_FALSE(fs::exists(folder / "run"));
}
#else

Args mpirun(int ranks) {
  // Root is what containers have; more ranks than cores is what a test has.
  ::setenv("OMPI_ALLOW_RUN_AS_ROOT", "1", 1);
  ::setenv("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1", 1);
  return {FW_MPIRUN, "--oversubscribe",    "--bind-to", "none", "--mca", "btl_vader_single_copy_mechanism", "none",
          "-n",      std::to_string(ranks)};
}

class RanksOfMpi : public testing::Test {
 protected:
  void SetUp() override { spill(folder_ / "text", small_text()); }
  Args config(const std::string& out) const {
    return tiny_train(folder_ / "text", folder_ / out) +
           Args{"--accumulate", "4", "--steps", "12", "--checkpoint-every", "4", "--threads", "1"};
  }
  Outcome on(int ranks, const Args& args) const { return Program(args, "", "/dev/null", mpirun(ranks)).wait(); }
  std::string model(const std::string& out) const { return slurp(folder_ / (out + "/model/model.safetensors")); }
  std::string moments(const std::string& out) const {
    return slurp(folder_ / (out + "/checkpoints/step-12/optimizer.safetensors"));
  }

  Folder folder_;
};

size_t count(const std::string& text, const std::string& word) {
  size_t n = 0;
  for (size_t at = text.find(word); at != std::string::npos; at = text.find(word, at + 1)) ++n;
  return n;
}

TEST_F(RanksOfMpi, TwoAndFourHaveTheBitsOfOne) {
  const Outcome one = run(config("one") + Args{"--sums", "apart"});
  ASSERT_EQ(one.code, 0) << one.err;
  for (const int ranks : {2, 4}) {
    const std::string out = "of-" + std::to_string(ranks);
    const Outcome several = on(ranks, config(out));
    ASSERT_EQ(several.code, 0) << several.err;
    EXPECT_THAT(several.out, HasSubstr(", " + std::to_string(ranks) + " ranks"));
    EXPECT_EQ(count(several.out, "training "), 1u) << "one rank speaks:\n" << several.out;
    EXPECT_EQ(model(out), model("one"));
    EXPECT_EQ(moments(out), moments("one"));
    EXPECT_THAT(slurp(folder_ / (out + "/config.toml")), HasSubstr("sums = 'apart'"));
    EXPECT_FALSE(fs::exists(folder_ / (out + "/.lock")));
  }
}

// Processes whose parent is `parent`.
std::vector<pid_t> children(pid_t parent) {
  std::vector<pid_t> found;
  for (const fs::directory_entry& entry : fs::directory_iterator("/proc")) {
    const std::string name = entry.path().filename().string();
    if (name.find_first_not_of("0123456789") != std::string::npos) continue;
    const std::string stat = slurp(entry.path() / "stat");
    const size_t end = stat.rfind(") ");  // after the command's name: " S PARENT ..."
    if (end != std::string::npos && std::atoi(stat.c_str() + end + 4) == parent)
      found.push_back(static_cast<pid_t>(std::atoi(name.c_str())));
  }
  return found;
}

// Not one that has ended and that nobody has asked how (of a container's first process nobody may).
bool lives(pid_t process) {
  const std::string stat = slurp("/proc/" + std::to_string(process) + "/stat");
  const size_t end = stat.rfind(") ");
  return end != std::string::npos && stat[end + 2] != 'Z' && stat[end + 2] != 'X';
}

void wait_until(const std::function<bool()>& holds) {
  for (int i = 0; i < 3000 && !holds(); ++i) std::this_thread::sleep_for(std::chrono::milliseconds(10));
}

TEST_F(RanksOfMpi, OneIsKilledAllStopAndTheRunGoesOnWithAnotherNumber) {
  Program program(config("run") + Args{"--steps", "1000000", "--checkpoint-every", "1", "--schedule", "constant",
                                       "--warmup", "0", "--keep", "1000"},
                  "", "/dev/null", mpirun(4));
  wait_until([&] { return fs::exists(folder_ / "run/checkpoints/step-3"); });
  const std::vector<pid_t> ranks = children(program.pid());
  ASSERT_EQ(ranks.size(), 4u);
  ::kill(ranks[2], SIGKILL);
  const Outcome killed = program.wait();
  EXPECT_NE(killed.code, 0);
  EXPECT_THAT(killed.out + killed.err, HasSubstr("signal 9"));
  for (const pid_t rank : ranks) {
    wait_until([&] { return !lives(rank); });
    EXPECT_FALSE(lives(rank));
  }

  const Outcome resumed = on(2, {"train", "--resume", "--out", folder_ / "run", "--steps", "0"});
  EXPECT_EQ(resumed.code, 0) << resumed.err;
}

// The same bits, too: a run of fixed length that is killed at a step and goes on with another number of ranks.
TEST_F(RanksOfMpi, AKilledRunEndsInTheBitsOfAnUndisturbedOne) {
  ASSERT_EQ(run(config("whole") + Args{"--sums", "apart"}).code, 0);
  for (const int next : {1, 2}) {
    const std::string out = "run-" + std::to_string(next);
    Program program(config(out), "", "/dev/null", mpirun(4));
    wait_until([&] { return fs::exists(folder_ / (out + "/checkpoints/step-4")); });
    const std::vector<pid_t> ranks = children(program.pid());
    if (!ranks.empty()) ::kill(ranks.back(), SIGKILL);
    program.wait();
    const Args resume = {"train", "--resume", "--out", folder_ / out};
    const Outcome resumed = next == 1 ? run(resume) : on(next, resume);
    ASSERT_EQ(resumed.code, 0) << resumed.err;
    EXPECT_EQ(model(out), model("whole"));
    EXPECT_EQ(moments(out), moments("whole"));
  }
}

TEST_F(RanksOfMpi, ASignalStopsAllAfterACheckpoint) {
  Program program(config("run") + Args{"--steps", "1000000"}, "", "/dev/null", mpirun(2));
  wait_until([&] { return fs::exists(folder_ / "run/checkpoints/step-4"); });
  for (const pid_t rank : children(program.pid())) {
    ::kill(rank, SIGTERM);
    break;  // one that hears of it is enough
  }
  const Outcome stopped = program.wait();
  EXPECT_NE(stopped.code, 0);
  EXPECT_THAT(stopped.out, HasSubstr("the checkpoint is written"));
  EXPECT_EQ(on(2, {"train", "--resume", "--out", folder_ / "run", "--steps", "8"}).code, 0);
}

// Ranks that were started with different arguments would send each other parts of other sizes, wait for ever, or train
// a wrong model.
TEST_F(RanksOfMpi, RanksThatDisagreeEndBeforeTheFirstStep) {
  const auto of_two = [&](const Args& first, const Args& second) {
    return on(1, config("run") + first + Args{":", "-n", "1", std::string(FW_BINARY_DIR) + "/fastweight"} +
                     config("run") + second);
  };
  spill(folder_ / "other", small_text() + "and more\n");
  const std::pair<Args, std::string> cases[] = {{{"--hidden-size", "32"}, "model.hidden_size (rank 0: 16, rank 1: 32)"},
                                                {{"--accumulate", "6"}, "train.accumulate (rank 0: 4, rank 1: 6)"},
                                                {{"--sums", "local"}, "train.sums (rank 0: running, rank 1: local)"},
                                                {{"--eval-every", "7"}, "train.eval_every"},
                                                {{"--checkpoint-every", "7"}, "train.checkpoint_every"},
                                                {{"--log-every", "7"}, "train.log_every"},
                                                {{"--seed", "9"}, "train.seed (rank 0: 1, rank 1: 9)"},
                                                {{"--lr", "1"}, "train.lr"},
                                                {{"--batch", "4"}, "train.batch"},
                                                {{"--text", folder_ / "other"}, "data.text"},
                                                {{"--out", folder_ / "elsewhere"}, "the folder --out"}};
  for (const auto& [more, difference] : cases) {
    const Outcome outcome = of_two({}, more);
    EXPECT_EQ(outcome.code, 2) << difference << outcome.err;
    EXPECT_EQ(count(outcome.err, "the ranks were not started alike"), 2u) << outcome.err;
    EXPECT_THAT(outcome.err, HasSubstr(difference));
    EXPECT_FALSE(fs::exists(folder_ / "run")) << difference;
  }
}

// A launcher for each rank that shows it another file under the same name is what a stale copy on one machine is.
TEST_F(RanksOfMpi, AStaleTextOnOneMachineIsNamed) {
  const Args begin = {"sh", "-c", "cd \"$0$OMPI_COMM_WORLD_RANK\" && exec \"$@\"", folder_ / "at"};
  for (const char* rank : {"at0", "at1"}) fs::create_directories(folder_ / rank);
  // One path, which stands for another file on each: a link through the working directory.
  fs::create_symlink("/proc/self/cwd/text", folder_ / "linked");
  spill(folder_ / "at0/text", small_text());
  spill(folder_ / "at1/text", small_text() + "stale\n");
  const Outcome outcome =
      Program(tiny_train(folder_ / "linked", folder_ / "run") + Args{"--accumulate", "4", "--threads", "1"}, "",
              "/dev/null", mpirun(2) + begin)
          .wait();
  EXPECT_EQ(outcome.code, 2) << outcome.err;
  EXPECT_THAT(outcome.err, HasSubstr("the file '" + folder_ / "linked" + "'"));
  EXPECT_FALSE(fs::exists(folder_ / "run/model"));
}

TEST_F(RanksOfMpi, ASignalToAnyRankGivesItsExitCode) {
  Program program(config("run") + Args{"--steps", "1000000"}, "", "/dev/null", mpirun(3));
  wait_until([&] { return fs::exists(folder_ / "run/checkpoints/step-4"); });
  const std::vector<pid_t> ranks = children(program.pid());
  ASSERT_EQ(ranks.size(), 3u);
  for (const pid_t rank : ranks) {
    const std::string environment = slurp("/proc/" + std::to_string(rank) + "/environ");
    if (environment.find(std::string("OMPI_COMM_WORLD_RANK=2") + '\0') != std::string::npos) ::kill(rank, SIGTERM);
  }
  const Outcome stopped = program.wait();
  EXPECT_EQ(stopped.code, 128 + SIGTERM);
  EXPECT_THAT(stopped.out, HasSubstr("the checkpoint is written"));
}

TEST_F(RanksOfMpi, ErrorsEndAllAndAreSaid) {
  const Outcome few = on(2, config("run") + Args{"--accumulate", "1"});
  EXPECT_NE(few.code, 0);
  EXPECT_THAT(few.err, HasSubstr("accumulate: expected at least 2"));
  EXPECT_THAT(few.err, HasSubstr("--accumulate 2"));
  const Outcome running = on(2, config("run") + Args{"--sums", "running"});
  EXPECT_NE(running.code, 0);
  EXPECT_THAT(running.err, HasSubstr("--sums: expected apart or local on 2 ranks"));
  EXPECT_FALSE(fs::exists(folder_ / "run"));
  ASSERT_EQ(on(2, config("run")).code, 0);
  const Outcome again = on(2, config("run"));  // only the first rank looks
  EXPECT_NE(again.code, 0);
  EXPECT_THAT(again.err, HasSubstr("holds checkpoints of an earlier run"));
  EXPECT_THAT(again.err, HasSubstr("rank 0 of 2"));
}

#ifdef FW_EMULATED_PROGRAM
// Ranks on GPUs that are emulated, one each; the tensors go through the host's memory.
class RanksOfGpus : public RanksOfMpi {
 protected:
  Args gpu_config(const std::string& out) const {
    return tiny_train(folder_ / "text", folder_ / out) + Args{"--device",
                                                              "cuda",
                                                              "--accumulate",
                                                              "3",
                                                              "--steps",
                                                              "3",
                                                              "--batch",
                                                              "1",
                                                              "--length",
                                                              "12",
                                                              "--log-every",
                                                              "1",
                                                              "--checkpoint-every",
                                                              "1",
                                                              "--threads",
                                                              "1",
                                                              "--valid-fraction",
                                                              "0"};
  }
  // launch: mpirun's options.
  Outcome on_gpus(int ranks, const Args& args, const Args& launch = {}) const {
    return Program(args, "", "/dev/null", mpirun(ranks) + launch, FW_EMULATED_PROGRAM).wait();
  }
};

TEST_F(RanksOfGpus, SeveralHaveTheBitsOfOneAndGoOnWithAnotherNumber) {
  const Outcome one =
      Program(gpu_config("one") + Args{"--sums", "apart"}, "", "/dev/null", {}, FW_EMULATED_PROGRAM).wait();
  ASSERT_EQ(one.code, 0) << one.err;
  const std::string moments = "/checkpoints/step-3/optimizer.safetensors";
  const Outcome two = on_gpus(2, gpu_config("two"));
  ASSERT_EQ(two.code, 0) << two.err;
  EXPECT_THAT(two.out, HasSubstr(", 2 ranks"));
  EXPECT_THAT(two.out, HasSubstr("ranks     tensors go by "));
  EXPECT_THAT(slurp(folder_ / "two/config.toml"), HasSubstr("device = 'cuda'"));
  EXPECT_EQ(model("two"), model("one"));
  EXPECT_EQ(slurp(folder_ / ("two" + moments)), slurp(folder_ / ("one" + moments)));

  Program killed(gpu_config("killed"), "", "/dev/null", mpirun(3), FW_EMULATED_PROGRAM);
  wait_until([&] { return fs::exists(folder_ / "killed/checkpoints/step-1"); });
  const std::vector<pid_t> ranks = children(killed.pid());
  if (!ranks.empty()) ::kill(ranks.back(), SIGKILL);
  killed.wait();
  const Outcome resumed = on_gpus(2, {"train", "--resume", "--out", folder_ / "killed"});
  ASSERT_EQ(resumed.code, 0) << resumed.err;
  EXPECT_EQ(model("killed"), model("one"));
  EXPECT_EQ(slurp(folder_ / ("killed" + moments)), slurp(folder_ / ("one" + moments)));
}

TEST_F(RanksOfGpus, FewerGpusThanRanks) {
  const Outcome few = on_gpus(3, gpu_config("run"), {"-x", "FW_EMULATION_GPUS=2"});
  EXPECT_NE(few.code, 0);
  EXPECT_THAT(
      few.err,
      HasSubstr("expected a GPU for each of the 3 ranks on this machine, found 2: start at most 2 here (mpirun -n 2)"));
  const Outcome shared = on_gpus(2, gpu_config("run"), {"-x", "FW_EMULATION_GPUS=1"});
  EXPECT_NE(shared.code, 0);
  EXPECT_THAT(shared.err, HasSubstr("found 1; ranks 0 and 1 would share GPU emulated 0"));
  EXPECT_FALSE(fs::exists(folder_ / "run"));
}
#endif

TEST_F(RanksOfMpi, ADivergedRunSaysSoOnce) {
  const Outcome diverged =
      on(2, config("run") + Args{"--lr", "1e30", "--clip", "0", "--steps", "100", "--min-lr", "1e30", "--warmup", "0"});
  EXPECT_NE(diverged.code, 0);
  EXPECT_EQ(count(diverged.err, "fastweight train"), 1u) << diverged.err;
}
#endif

}  // namespace
}  // namespace fw::test
