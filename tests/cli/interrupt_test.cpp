// Signals, closed pipes, limits and two processes: nothing that was computed is lost, and every end has its exit code.
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <limits>
#include <random>
#include <thread>

#include "cli/program.h"

namespace fw::test {
namespace {

using testing::HasSubstr;
using Args = std::vector<std::string>;
namespace fs = std::filesystem;

const std::string kProgram = std::string(FW_BINARY_DIR) + "/fastweight";

void sleep_ms(int milliseconds) { std::this_thread::sleep_for(std::chrono::milliseconds(milliseconds)); }

void wait_for(const Program& program, const std::string& words) {
  for (int i = 0; i < 30000 && program.out().find(words) == std::string::npos; ++i) sleep_ms(1);
}

void wait_for_file(const std::string& path) {
  for (int i = 0; i < 3000 && !fs::exists(path); ++i) sleep_ms(10);
}

// A text that a tiny model needs a while for.
std::string long_text() {
  std::string text;
  for (int i = 0; i < 30; ++i) text += small_text();
  return text;
}

// Runs the arguments through a shell, `before` them and `after` them; the exit code of the program itself, -1 without
// one.
int shell(const std::string& before, const Args& args, const std::string& after, const Folder& folder) {
  std::string script = before + "\n{ '" + kProgram + "'";
  for (const std::string& a : args) script += " '" + a + "'";
  spill(folder / "script", script + " 2> '" + (folder / "shell.err") + "'; echo $? > '" + (folder / "shell.code") +
                               "'; } " + after + "\n");
  fs::remove(folder / "shell.code");
  [[maybe_unused]] const int of_shell = std::system(("sh '" + (folder / "script") + "'").c_str());
  const std::string code = slurp(folder / "shell.code");
  return code.empty() ? -1 : std::stoi(code);
}

class Interrupt : public testing::Test {
 protected:
  void SetUp() override {
    spill(text(), small_text());
    spill(held_out(), long_text());
  }
  std::string text() const { return folder_ / "text"; }
  std::string held_out() const { return folder_ / "held-out"; }
  Args endless(const std::string& out) const {
    return tiny_train(text(), out) + Args{"--steps", "1000000", "--log-every", "1"};
  }
  std::string model() const {
    const Outcome trained = run(tiny_train(text(), folder_ / "model-run"));
    EXPECT_EQ(trained.code, 0) << trained.err;
    return folder_ / "model-run";
  }
  Folder folder_;
};

// Kernels of oneDNN's run on all threads; before signals were kept from them, one run in four of the default model died
// of a single Ctrl-C. Interrupted and resumed until it is done, a run ends in the bits of one that nobody disturbed.
TEST_F(Interrupt, AHundredAtRandomMomentsLoseNothing) {
  const Args config =
      tiny_train(text(), "") +
      Args{"--steps",    "12", "--batch",   "4", "--length",           "64", "--hidden-size", "64", "--num-heads", "2",
           "--head-dim", "32", "--threads", "3", "--checkpoint-every", "5",  "--eval-every",  "6"};
  // Microseconds from when the handlers stand, which is when the first line is there, to the end, of the shortest run
  // that nobody disturbed. A run that met a busy machine would let most signals come too late.
  int64_t whole = std::numeric_limits<int64_t>::max();
  const auto time_of = [&](Program& program, bool begun, const std::function<void()>& meanwhile) {
    wait_for(program, "model ");
    const auto begin = std::chrono::steady_clock::now();
    meanwhile();
    Outcome outcome = program.wait();
    const auto passed =
        std::chrono::duration_cast<std::chrono::microseconds>(std::chrono::steady_clock::now() - begin).count();
    if (outcome.code == 0 && !begun) whole = std::min<int64_t>(whole, passed + 1);
    return outcome;
  };
  Program undisturbed(config + Args{"--out", folder_ / "whole"});
  ASSERT_EQ(time_of(undisturbed, false, [] {}).code, 0);
  const std::string expected = slurp(folder_ / "whole/model/model.safetensors");
  ASSERT_FALSE(expected.empty());
  std::mt19937 random(20);
  int interrupts = 0, runs = 0;
  while (interrupts < 100) {
    const std::string out = folder_ / ("run" + std::to_string(runs++));
    ASSERT_LT(runs, 200) << "runs end before they can be interrupted: " << interrupts << " were, of a run's " << whole
                         << " us";
    for (int in_this_run = 0;; ++in_this_run) {
      const bool resume = fs::exists(out + "/checkpoints") && !fs::is_empty(out + "/checkpoints");
      Program program(config + Args{"--out", out} + (resume ? Args{"--resume"} : Args{}));
      // Not before the handlers stand: until then a signal ends the program as it ends any.
      const Outcome outcome = time_of(program, resume, [&] {
        if (in_this_run >= 30) return;
        std::this_thread::sleep_for(std::chrono::microseconds(random() % static_cast<unsigned>(whole)));
        program.signal(random() % 3 == 0 ? SIGTERM : SIGINT);
      });
      if (outcome.code == 0) break;
      ASSERT_TRUE(outcome.code == 130 || outcome.code == 143) << outcome.code << outcome.out << outcome.err;
      ++interrupts;
    }
    ASSERT_EQ(slurp(out + "/model/model.safetensors"), expected) << "after " << interrupts << " interrupts";
    EXPECT_FALSE(fs::exists(out + "/.lock"));
  }
}

TEST_F(Interrupt, EverySignalHasItsExitCode) {
  for (const int number : {SIGINT, SIGTERM, SIGHUP}) {
    const std::string out = folder_ / ("run" + std::to_string(number));
    Program program(endless(out));
    wait_for(program, "\n       3  ");
    program.signal(number);
    const Outcome outcome = program.wait();
    EXPECT_EQ(outcome.code, 128 + number) << outcome.out << outcome.err;
    EXPECT_THAT(outcome.out, HasSubstr("the checkpoint is written"));
    EXPECT_FALSE(fs::is_empty(out + "/checkpoints"));
  }
}

// A pipe whose writer says nothing.
TEST_F(Interrupt, AlsoWhileStandardInputIsWaitedFor) {
  const std::string pipe = folder_ / "pipe", out = folder_ / "t";
  ASSERT_EQ(::mkfifo(pipe.c_str(), 0600), 0);
  const int writer = ::open(pipe.c_str(), O_RDWR | O_CLOEXEC);
  ASSERT_GE(writer, 0);
  Program program({"tokenize", "-", "--out", out}, "", pipe);
  wait_for_file(out + ".tokenizing");
  program.signal(SIGINT);
  const Outcome outcome = program.wait();
  ::close(writer);
  EXPECT_EQ(outcome.code, 130);
  EXPECT_THAT(outcome.err, HasSubstr("stopped while standard input was read"));
  EXPECT_FALSE(fs::exists(out + ".tokenizing")) << "what nobody can go on from";
  EXPECT_FALSE(fs::exists(out));
}

TEST_F(Interrupt, TheSecondEndsTheProgramAtOnce) {
  // A step of some seconds, so that the first is still being done when the second comes.
  Program program(tiny_train(text(), folder_ / "run") + Args{"--steps", "1000", "--accumulate", "30000"});
  wait_for(program, "loss");
  sleep_ms(300);  // into the step: before it the first signal would be enough
  program.signal(SIGINT);
  sleep_ms(50);
  program.signal(SIGINT);  // so soon after, it is the same wish: timeout(1) sends each signal twice
  sleep_ms(400);
  program.signal(SIGINT);
  EXPECT_EQ(program.wait().code, 4);
}

TEST_F(Interrupt, LongLoopsSayHowFarTheyCame) {
  const std::string run_folder = model(), temporary = folder_ / "tmp";
  fs::create_directories(temporary);
  ::setenv("TMPDIR", temporary.c_str(), 1);
  std::string contexts = "2";  // so many that it takes long
  for (int i = 3; i < 200; ++i) contexts += "," + std::to_string(i);
  const std::vector<std::pair<Args, std::string>> commands = {
      {{"eval", run_folder, "--text", held_out(), "--context", contexts, "--threads", "1"}, "tokens"},
      {{"analyze", run_folder, "--text", held_out(), "--out", folder_ / "analysis", "--tokens", "0", "--every", "1",
        "--threads", "1"},
       "tokens"},
      {{"bench", "--repeats", "100000", "--tokens", "64", "--threads", "1"}, "repeats of this rule"},
      {{"bench", "--decode-model", "--decode-tokens", "100000000", "--threads", "1"}, "tokens"},
      {{"bench", "--train", "--steps", "1000000", "--batch", "1", "--length", "16", "--threads", "1"},
       "training steps"},
      {{"selftest", "--threads", "1"}, "rules"},
  };
  for (const auto& [args, unit] : commands) {
    Program program(args);
    sleep_ms(700);
    program.signal(SIGINT);
    const Outcome outcome = program.wait();
    EXPECT_EQ(outcome.code, 130) << args[0] << outcome.out << outcome.err;
    EXPECT_THAT(outcome.err, testing::ContainsRegex("stopped after [0-9]+ of [0-9]+ " + unit)) << args[0];
  }
  EXPECT_TRUE(fs::is_empty(temporary));
  ::unsetenv("TMPDIR");
}

TEST_F(Interrupt, GenerateSavesItsState) {
  const std::string run_folder = model(), state = folder_ / "state";
  Program program({"generate", run_folder, "--tokens", "100000000", "--state-save", state, "--threads", "1"});
  for (int i = 0; i < 3000 && program.out().size() < 200; ++i) sleep_ms(10);
  program.signal(SIGINT);
  const Outcome outcome = program.wait();
  EXPECT_EQ(outcome.code, 130) << outcome.err;
  const Outcome more = run({"generate", run_folder, "--tokens", "20", "--state-load", state});
  EXPECT_EQ(more.code, 0) << more.err;
  EXPECT_EQ(more.out.size(), 20u);
}

TEST_F(Interrupt, AnEvaluationAfterTheLastStepMayBeLeft) {
  const std::string out = folder_ / "run";
  Program program(tiny_train(text(), out) + Args{"--valid", held_out(), "--length", "2", "--batch", "64"});
  wait_for_file(out + "/model/tokenizer.json");  // written last of the model
  program.signal(SIGTERM);
  const Outcome outcome = program.wait();
  EXPECT_EQ(outcome.code, 143) << outcome.out << outcome.err;
  EXPECT_THAT(outcome.out, HasSubstr("checkpoint and model are written"));
  EXPECT_TRUE(fs::exists(out + "/checkpoints/step-6/trainer.json"));
  EXPECT_EQ(run({"generate", out, "--tokens", "5"}).code, 0);
  EXPECT_EQ(run({"train", "--resume", "--out", out}).code, 0);
  EXPECT_THAT(slurp(out + "/metrics.jsonl"), HasSubstr("eval_loss"));
}

TEST_F(Interrupt, AReaderThatGoesAwayCostsNothing) {
  const std::string out = folder_ / "run";
  EXPECT_EQ(shell("true", endless(out), "| head -n 7 > /dev/null", folder_), 2);
  EXPECT_THAT(slurp(folder_ / "shell.err"), HasSubstr("Broken pipe; stopped at step "));
  EXPECT_FALSE(fs::is_empty(out + "/checkpoints"));
  EXPECT_EQ(shell("true", {"rules"}, "> /dev/full", folder_), 2);
  EXPECT_THAT(slurp(folder_ / "shell.err"), HasSubstr("No space left on device"));
}

TEST_F(Interrupt, ALimitOnFileSizesIsAnOrdinaryError) {
  const std::string out = folder_ / "run";
  // 80 KiB are enough for the tokens, not for the moments of the checkpoint.
  const int code = shell("ulimit -f 80", tiny_train(text(), out) + Args{"--hidden-size", "64"}, "> /dev/null", folder_);
  EXPECT_EQ(code, 2);
  EXPECT_THAT(slurp(folder_ / "shell.err"), HasSubstr("File too large"));
}

TEST_F(Interrupt, TwoProcessesDoNotShareARunFolder) {
  const std::string out = folder_ / "run";
  Program program(endless(out) + Args{"--checkpoint-every", "1"});
  wait_for_file(out + "/checkpoints/step-2");
  for (const Args& args : {Args{"train", "--resume", "--out", out}, endless(out) + Args{"--resume"}}) {
    const Outcome second = run(args);
    EXPECT_EQ(second.code, 2) << second.out;
    EXPECT_THAT(second.err, testing::ContainsRegex("in use by process [0-9]+ on "));
  }
  program.signal(SIGKILL);
  program.wait();
  const std::string before = slurp(out + "/.lock");
  EXPECT_THAT(before, HasSubstr("process "));
  // What is left of the lock hinders nobody.
  Program next({"train", "--resume", "--out", out});
  wait_for(next, "resumed at step");
  next.signal(SIGINT);
  EXPECT_EQ(next.wait().code, 130);
  EXPECT_FALSE(fs::exists(out + "/.lock"));
}

TEST_F(Interrupt, ARunThatDivergesDoesNotEndAsASuccess) {
  const std::string out = folder_ / "run";
  const Outcome trained = run(tiny_train(text(), out) + Args{"--steps", "3", "--lr", "1e9"});
  EXPECT_EQ(trained.code, 1) << trained.out;
  EXPECT_THAT(trained.err, HasSubstr("not finite"));
  EXPECT_FALSE(fs::exists(out + "/model"));
  for (const Args& args : {Args{"eval", out, "--text", text()},
                           Args{"analyze", out, "--text", text(), "--out", folder_ / "a", "--no-pictures"}}) {
    const Outcome outcome = run(args);
    EXPECT_EQ(outcome.code, 1) << args[0] << outcome.out;
    EXPECT_THAT(outcome.err, HasSubstr("not finite")) << args[0];
    EXPECT_EQ(outcome.out.find("at most 0"), std::string::npos);
  }
}

TEST_F(Interrupt, WhatTheSystemRefusesIsNoDefectOfTheProgram) {
  const std::string run_folder = model();
  const auto refused = [&](const std::string& before, const Args& args, const std::string& after,
                           const std::string& reason) {
    EXPECT_EQ(shell(before, args, after, folder_), 2) << args[0] << slurp(folder_ / "shell.err");
    EXPECT_THAT(slurp(folder_ / "shell.err"), HasSubstr(reason));
    EXPECT_EQ(slurp(folder_ / "shell.err").find("unexpected"), std::string::npos);
  };
  refused("true", tiny_train("", folder_ / "r1"), "> /dev/null", "");
  refused("true", tiny_train(text(), ""), "> /dev/null", "out");
  refused("true", {"eval", "", "--text", text()}, "> /dev/null", "");
  refused("true", {"tokenize", "", "--out", folder_ / "t"}, "> /dev/null", "");
  refused("export TMPDIR=/nonexistent", {"eval", run_folder, "--text", text()}, "> /dev/null", "TMPDIR");
  refused("cd '" + folder_.path() + "'; mkdir gone; cd gone; rmdir ../gone", {"train", "--text", "a", "--out", "b"},
          "> /dev/null", "No such file or directory");
  refused("true", {"eval", run_folder, "--text", text()}, "> /dev/full", "No space left on device");
  refused("true", {"bench", "--tokens", "4611686018427387904", "--rule", "deltanet"}, "> /dev/null", "");
}

// Root has no limit on its processes: as root the program is started as nobody.
TEST_F(Interrupt, WhereNoThreadMayBeStarted) {
  const std::string become = ::geteuid() == 0 ? "setpriv --reuid=65534 --regid=65534 --clear-groups " : "";
  const auto as_nobody = [&](const std::string& limit, const Args& args = {"rules"}) {
    const Args launcher{"/bin/sh", "-c", become + "bash -c '" + limit + "; exec \"$@\"' sh \"$@\"", "sh"};
    return Program(args, "", "/dev/null", launcher).wait();
  };
  if (as_nobody("true").code != 0) GTEST_SKIP() << "another user cannot be become, or may not read the program";
  const Outcome outcome = as_nobody("ulimit -u 1");
  EXPECT_EQ(outcome.code, 2) << outcome.out;
  EXPECT_THAT(outcome.err, HasSubstr("the system refused a thread"));
  // And later ones.
  const Outcome later = as_nobody("ulimit -u 3", {"bench", "--rule", "deltanet", "--tokens", "128", "--threads", "8"});
  EXPECT_EQ(later.code, 2) << later.err;
  EXPECT_THAT(later.err, HasSubstr("cannot start thread"));
}

// A run is finished without its picture, whatever keeps gnuplot from being started.
TEST_F(Interrupt, APictureThatCannotBeDrawnIsANote) {
  const std::string out = folder_ / "run";
  Outcome outcome;
  // As many files as the training needs and no more; how many that are depends on the libraries.
  for (int files = 6; files < 16 && outcome.code != 0; ++files) {
    fs::remove_all(out);
    outcome = Program(tiny_train(text(), out), "", "/dev/null",
                      {"/bin/sh", "-c", "ulimit -n " + std::to_string(files) + "; exec \"$@\"", "sh"})
                  .wait();
  }
  EXPECT_EQ(outcome.code, 0) << outcome.err;
  EXPECT_THAT(outcome.out, HasSubstr("note: "));
  EXPECT_THAT(outcome.out, HasSubstr("model.safetensors"));
}

// Tokens for a pipe are made in a folder that nobody can foresee, and nothing of it stays.
TEST_F(Interrupt, TemporaryFilesAreNobodyElses) {
  const std::string temporary = folder_ / "tmp", precious = folder_ / "precious";
  fs::create_directories(temporary);
  spill(precious, "content");
  // What the shell becomes has its number.
  const std::string script =
      "ln -s \"$1\" \"$2/fastweight-$$.tokens\"; mkfifo \"$3\"; cat \"$3\" > \"$3.read\" & export TMPDIR=\"$2\"; shift "
      "3; exec \"$@\"";
  const std::string pipe = folder_ / "pipe";
  const Outcome outcome = Program({"tokenize", text(), "--out", pipe}, "", "/dev/null",
                                  {"/bin/sh", "-c", script, "sh", precious, temporary, pipe})
                              .wait();
  EXPECT_EQ(outcome.code, 0) << outcome.err;
  EXPECT_EQ(slurp(precious), "content");
  wait_for_file(pipe + ".read");
  EXPECT_FALSE(fs::exists(pipe + ".tokenizing"));
  for (const fs::directory_entry& entry : fs::directory_iterator(temporary))
    EXPECT_TRUE(entry.is_symlink()) << entry.path();
}

}  // namespace
}  // namespace fw::test
