// fastweight task: examples, a small table, and what it refuses.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include <filesystem>
#include <memory>
#include <nlohmann/json.hpp>
#include <sstream>

#include "cli/program.h"

namespace fw::test {
namespace {

using testing::ContainsRegex;
using testing::HasSubstr;
using testing::StartsWith;

std::vector<std::string> small(const std::string& out) {
  return {"task",
          "palindrome",
          "--rule",
          "gated_deltanet,mamba2",
          "--seeds",
          "1,2",
          "--out",
          out,
          "--length",
          "4",
          "--lengths",
          "4,6",
          "--steps",
          "6",
          "--batch",
          "4",
          "--judged",
          "10",
          "--eval-every",
          "3",
          "--hidden-size",
          "8",
          "--num-heads",
          "1",
          "--head-dim",
          "8",
          "--threads",
          "1",
          "--intermediate-size",
          "8"};
}

TEST(TaskCommand, DrawsExamples) {
  const Outcome outcome = run({"task", "stack", "--draw", "3", "--length", "12"});
  ASSERT_EQ(outcome.code, 0) << outcome.err;
  std::istringstream lines(outcome.out);
  std::string line;
  int count = 0;
  for (; std::getline(lines, line); ++count) {
    const auto example = nlohmann::json::parse(line);
    EXPECT_EQ(example.at("tokens").size(), 12u);
    EXPECT_EQ(example.at("labels").size(), 12u);
    EXPECT_EQ(example.at("tokens").at(0), 90);
  }
  EXPECT_EQ(count, 3);
  const Folder folder;
  EXPECT_EQ(run({"task", "stack", "--draw", "3", "--length", "12", "--out", folder / "s.jsonl"}).code, 0);
  EXPECT_EQ(slurp(folder / "s.jsonl"), outcome.out);
}

TEST(TaskCommand, ATableOfRulesAndSeedsThatIsGoneOnWith) {
  const Folder folder;
  const Outcome first = run(small(folder / "t"));
  ASSERT_EQ(first.code, 0) << first.err << first.out;
  EXPECT_THAT(first.out, HasSubstr("mamba2-lr0.001-seed2 (4 of 4)"));
  const std::string table = slurp(folder / "t/table.md");
  EXPECT_THAT(table, HasSubstr("| gated_deltanet | 0.001 | 2 |"));
  const auto results = nlohmann::json::parse(slurp(folder / "t/results.json"));
  ASSERT_EQ(results.size(), 4u);
  const auto& provenance = results[0].at("provenance");
  EXPECT_THAT(provenance.at("program").get<std::string>(), StartsWith("fastweight "));
  EXPECT_THAT(provenance.at("command").get<std::string>(), StartsWith("fastweight task palindrome "));
  EXPECT_THAT(provenance.at("date").get<std::string>(), ContainsRegex("^20..-..-..$"));
  EXPECT_NE(provenance.at("device").get<std::string>(), "");
  EXPECT_THAT(table, HasSubstr(" Provenance: program fastweight "));
  // One cell is taken away: it alone is done again, to the same table.
  std::filesystem::remove_all(folder / "t/cells/mamba2-lr0.001-seed1");
  const Outcome second = run(small(folder / "t"));
  ASSERT_EQ(second.code, 0) << second.err;
  EXPECT_EQ(slurp(folder / "t/table.md"), table);
  EXPECT_THAT(second.out, HasSubstr("step      3"));
  EXPECT_EQ(second.out.find("step      3"), second.out.rfind("step      3")) << "other cells were done again:\n"
                                                                             << second.out;
  // Other settings do not mix with these.
  auto other = small(folder / "t");
  other.insert(other.end(), {"--clip", "2"});
  const Outcome refused = run(other);
  EXPECT_EQ(refused.code, 2);
  EXPECT_THAT(refused.err, HasSubstr("recipe.clip (there: 1.0, here: 2.0)"));
  EXPECT_EQ(slurp(folder / "t/table.md"), table);
}

std::vector<std::string> small_sweep(const std::string& out) {
  std::vector<std::string> args = small(out);
  args[0] = "sweep";
  return args + std::vector<std::string>{"--steps", "60", "--eval-every", "10"};
}

std::string results_without_time(const std::string& out) {
  auto results = nlohmann::json::parse(slurp(out + "/results.json"));
  for (auto& result : results) {
    result.erase("seconds");
    result.erase("provenance");
  }
  return results.dump();
}

size_t times(const std::string& text, const std::string& part) {
  size_t count = 0;
  for (size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) ++count;
  return count;
}

// One damaged cell costs itself alone: the others are done, the table is made, and the end says that something is
// missing.
TEST(Sweep, ADamagedCellDoesNotStopTheOthers) {
  const Folder folder;
  ASSERT_EQ(run(small_sweep(folder / "s")).code, 0);
  const std::string first = folder / "s/cells/gated_deltanet-lr0.001-seed1",
                    last = folder / "s/cells/mamba2-lr0.001-seed2";
  const std::string whole = results_without_time(folder / "s");
  spill(first + "/curve.json", "[]");
  std::filesystem::remove(first + "/result.json");
  std::filesystem::remove_all(last);
  const Outcome damaged = run(small_sweep(folder / "s"));
  EXPECT_EQ(damaged.code, 2) << damaged.out;
  EXPECT_THAT(damaged.out, HasSubstr("the cell '" + first + "' is damaged"));
  EXPECT_THAT(damaged.err, HasSubstr("1 of 4 cells are damaged"));
  EXPECT_EQ(nlohmann::json::parse(slurp(folder / "s/results.json")).size(), 3u);
  std::filesystem::remove_all(first);
  // A result without scores was a crash of the table.
  auto result = nlohmann::json::parse(slurp(last + "/result.json"));
  result["scores"] = nlohmann::json::array();
  spill(last + "/result.json", result.dump());
  const Outcome mended = run(small_sweep(folder / "s"));
  EXPECT_EQ(mended.code, 0) << mended.err;
  EXPECT_THAT(mended.out, HasSubstr("made again from its checkpoint"));
  EXPECT_EQ(results_without_time(folder / "s"), whole);
}

// Processes that end together write the same table and pictures: nobody's side file is taken away, and what stands
// there is whole.
TEST(Sweep, ProcessesThatEndTogetherDoNotDisturbEachOther) {
  const Folder folder;
  ASSERT_EQ(run(small_sweep(folder / "s")).code, 0);
  for (int round = 0; round < 3; ++round) {
    std::vector<std::unique_ptr<Program>> programs;
    programs.reserve(3);
    for (int i = 0; i < 3; ++i) programs.push_back(std::make_unique<Program>(small_sweep(folder / "s")));
    for (const auto& program : programs) {
      const Outcome outcome = program->wait();
      EXPECT_EQ(outcome.code, 0) << outcome.err;
      EXPECT_EQ(outcome.out.find("was not drawn"), std::string::npos) << outcome.out;
    }
  }
  for (const auto& entry : std::filesystem::directory_iterator(folder / "s")) {
    const std::string name = entry.path().filename().string();
    EXPECT_TRUE(name.find(".tmp-") == std::string::npos && name.find(".partial") == std::string::npos) << name;
  }
}

TEST(Sweep, KilledAtAnyTimeItGoesOnToTheSameResults) {
  const Folder folder;
  ASSERT_EQ(run(small_sweep(folder / "whole")).code, 0);
  int killed = 0;
  for (const char* until : {"step     10", "step     30", "seed2 (2 of 4)", "step     50"}) {
    Program program(small_sweep(folder / "cut"));
    for (int i = 0; i < 2000 && program.out().find(until) == std::string::npos; ++i) usleep(2000);
    program.signal(SIGKILL);
    killed += program.wait().code == 128 + SIGKILL;
  }
  EXPECT_GE(killed, 2);
  ASSERT_EQ(run(small_sweep(folder / "cut")).code, 0);
  EXPECT_EQ(results_without_time(folder / "cut"), results_without_time(folder / "whole"));
}

TEST(Sweep, TwoProcessesShareAFolderAndDoEachCellOnce) {
  const Folder folder;
  ASSERT_EQ(run(small_sweep(folder / "alone")).code, 0);
  Program first(small_sweep(folder / "shared"));
  Program second(small_sweep(folder / "shared"));
  const Outcome a = first.wait(), b = second.wait();
  EXPECT_EQ(a.code, 0) << a.err;
  EXPECT_EQ(b.code, 0) << b.err;
  // Each of the four cells was measured for the last time once, by one of the two.
  EXPECT_EQ(times(a.out, "step     60") + times(b.out, "step     60"), 4u) << a.out << b.out;
  const Outcome last = run(small_sweep(folder / "shared"));
  EXPECT_EQ(last.code, 0);
  EXPECT_EQ(times(last.out, "step "), 0u) << "a finished cell was run again:\n" << last.out;
  EXPECT_EQ(results_without_time(folder / "shared"), results_without_time(folder / "alone"));
}

TEST(TaskCommand, RefusesBeforeAnyWork) {
  const Folder folder;
  const auto refused = [](const std::vector<std::string>& args, const std::string& why) {
    const Outcome outcome = run(args);
    EXPECT_EQ(outcome.code, 2) << outcome.out;
    EXPECT_THAT(outcome.err, HasSubstr(why));
  };
  refused({"task", "mqa", "--draw", "1"}, "did you mean 'mqar'?");
  refused({"task", "mqar"}, "give --rule RULE,... to train, or --small for a first look, or --draw N");
  refused({"sweep", "mqar"}, "give --rule RULE,... to train");
  refused({"sweep", "mqar", "--draw", "1"}, "unknown option '--draw'");
  refused({"task", "mqar", "--rule", "kda"}, "--out: expected a folder");
  refused({"task", "mqar", "--rule", "kdaa", "--out", folder / "t"}, "kdaa");
  refused({"task", "mqar", "--rule", "kda", "--lr", "fast", "--out", folder / "t"}, "--lr: expected numbers > 0");
  refused({"task", "mqar", "--rule", "kda,kda", "--out", folder / "t"}, "is named twice");
  refused({"task", "mqar", "--rule", "kda", "--lengths", "60", "--out", folder / "t"},
          "length: expected at least 2 pairs + 3");
  refused({"task", "mqar", "--rule", "kda", "--device", "gpu", "--out", folder / "t"}, "expected cpu, cuda or cuda:N");
  refused({"task", "mqar_zoology", "--rule", "kda", "--vocabulary", "8", "--out", folder / "t"},
          "pairs: expected 1 to 3 (keys are distinct");
  // 10,000 sequences of 16,384 tokens of 256 floats, and much more: no machine that tests has it.
  const std::vector<std::string> large = {"sweep",    "mqar",  "--rule",    "kda",   "--batch", "10000",
                                          "--length", "16384", "--lengths", "16384", "--out",   folder / "t"};
  refused(large, "a training step");
  EXPECT_FALSE(std::filesystem::exists(folder / "t"));
}

}  // namespace
}  // namespace fw::test
