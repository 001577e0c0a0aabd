// A power cut. The program runs under sync_log.c, which notes what is synced. Then every file in the folder that was
// written after its last fsync, or never synced, loses its content, as it may when the power goes. What the program
// says is written must be there all the same.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <map>
#include <set>
#include <sstream>
#include <thread>

#include "cli/program.h"

namespace fw::test {
namespace {

namespace fs = std::filesystem;
using testing::HasSubstr;
using testing::IsEmpty;
using Args = std::vector<std::string>;
using Inode = std::pair<unsigned long, unsigned long>;

struct Log {
  std::map<Inode, std::pair<long long, long long>> files;  // size and time at the last fsync
  std::set<std::string> open_renames;                      // into folders that were not synced since
};

Log read_log(const std::string& path) {
  Log log;
  std::map<Inode, std::set<std::string>> renamed;
  std::istringstream text(slurp(path));
  for (std::string line; std::getline(text, line);) {
    std::istringstream words(line);
    std::string kind, name;
    Inode inode;
    words >> kind >> inode.first >> inode.second;
    if (kind == "file") {
      auto& [size, time] = log.files[inode];
      words >> size >> time;
    } else if (kind == "folder") {
      renamed.erase(inode);
    } else {
      std::getline(words >> std::ws, name);
      renamed[inode].insert(name);
    }
  }
  for (const auto& [inode, names] : renamed) log.open_renames.insert(names.begin(), names.end());
  return log;
}

// Takes from every file below `folder` what was not synced; returns their names, from the folder on.
std::vector<std::string> cut_power(const std::string& folder, const Log& log) {
  std::vector<std::string> lost;
  for (const fs::directory_entry& entry : fs::recursive_directory_iterator(folder)) {
    struct stat info = {};
    if (!entry.is_regular_file() || ::lstat(entry.path().c_str(), &info) != 0 || info.st_size == 0) continue;
    const auto synced =
        log.files.find({static_cast<unsigned long>(info.st_dev), static_cast<unsigned long>(info.st_ino)});
    const long long time = static_cast<long long>(info.st_mtim.tv_sec) * 1000000000LL + info.st_mtim.tv_nsec;
    if (synced != log.files.end() && synced->second == std::pair<long long, long long>(info.st_size, time)) continue;
    fs::resize_file(entry.path(), 0);
    lost.push_back(fs::relative(entry.path(), folder).string());
  }
  std::sort(lost.begin(), lost.end());
  return lost;
}

class Durability : public testing::Test {
 protected:
  void SetUp() override {
#if !defined(FW_SYNC_LOG_LIBRARY)
    GTEST_SKIP() << "a sanitizer's runtime takes no library before it";
#endif
    spill(folder_ / "text", small_text());
  }
  Args launcher(bool loses = false) const {
    Args args{"/usr/bin/env", "FW_SYNC_LOG=" + log()};
#if defined(FW_SYNC_LOG_LIBRARY)
    args.push_back("LD_PRELOAD=" FW_SYNC_LOG_LIBRARY);
#endif
    if (loses) args.push_back("FW_LOSE_SYNC=1");
    return args;
  }
  std::string log() const { return folder_ / "sync.log"; }
  Outcome run_logged(const Args& args, bool loses = false) {
    fs::remove(log());
    return Program(args, "", "/dev/null", launcher(loses)).wait();
  }
  // A run that keeps checkpoints and its best model.
  Args train(const std::string& name, const std::string& steps) const {
    return tiny_train(folder_ / "text", folder_ / name) +
           Args{"--steps", steps, "--checkpoint-every", "2", "--eval-every", "2", "--valid-fraction", "0.2"};
  }
  // All of them: renamed, complete, and in folders that were synced afterwards.
  void expect_kept(const std::string& path) {
    const Log synced = read_log(log());
    EXPECT_THAT(cut_power(folder_ / path, synced), IsEmpty());
    EXPECT_THAT(synced.open_renames, IsEmpty());
  }

  Folder folder_;
};

// Logs and pictures of a run may lose their last lines; they are no part of the model.
bool is_record(const std::string& name) {
  return name.starts_with("metrics.") || name.starts_with("loss.") || name.starts_with("tensorboard/") ||
         name.ends_with(".lock");
}

TEST_F(Durability, ARunSurvivesAPowerCutAtItsEnd) {
  ASSERT_EQ(run_logged(train("run", "6")).code, 0);
  const Log synced = read_log(log());
  std::vector<std::string> lost = cut_power(folder_ / "run", synced);
  std::erase_if(lost, is_record);
  EXPECT_THAT(lost, IsEmpty());
  EXPECT_EQ(run({"generate", folder_ / "run", "--tokens", "4"}).code, 0);
  EXPECT_EQ(run({"generate", folder_ / "run/best", "--tokens", "4"}).code, 0);
  const Outcome resumed = run({"train", "--resume", "--out", folder_ / "run", "--steps", "8"});
  EXPECT_EQ(resumed.code, 0) << resumed.err;
  EXPECT_THAT(resumed.out, HasSubstr("resumed at step 6"));
}

TEST_F(Durability, ARunThatIsCutOffGoesOnFromItsNewestCheckpoint) {
  ASSERT_EQ(run(train("whole", "40")).code, 0);
  const std::string wanted = slurp(folder_ / "whole/model/model.safetensors");
  int resumed = 0;
  for (int i = 0; i < 5; ++i) {
    const std::string name = fmt::format("cut{}", i);
    fs::remove(log());
    Program program(train(name, "40"), "", "/dev/null", launcher());
    // After a checkpoint or two, at another moment each time.
    const std::string first = folder_ / (name + "/checkpoints/step-" + std::to_string(2 + 6 * i));
    for (int waited = 0; waited < 60000 && !fs::exists(first); ++waited)
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    std::this_thread::sleep_for(std::chrono::milliseconds(3 * i));
    program.signal(SIGKILL);
    program.wait();
    cut_power(folder_ / name, read_log(log()));
    const Outcome outcome = run({"train", "--resume", "--out", folder_ / name});
    EXPECT_EQ(outcome.code, 0) << outcome.err;
    EXPECT_EQ(outcome.err.find("damaged"), std::string::npos) << outcome.err;
    EXPECT_EQ(slurp(folder_ / (name + "/model/model.safetensors")), wanted);
    resumed += outcome.out.find("resumed at step") != std::string::npos ? 1 : 0;
  }
  EXPECT_EQ(resumed, 5);
}

TEST_F(Durability, FilesAndFoldersOfOtherCommandsSurvive) {
  ASSERT_EQ(run(train("run", "4") + Args{"--layout", "fla"}).code, 0);
  const auto kept = [&](const Args& args, const std::string& path) {
    SCOPED_TRACE(args.front());
    fs::create_directories(folder_ / path);
    const Outcome outcome = run_logged(args);
    ASSERT_EQ(outcome.code, 0) << outcome.err;
    expect_kept(path);
  };
  kept({"tokenize", folder_ / "text", "--out", folder_ / "tokens/t"}, "tokens");
  kept({"generate", folder_ / "run", "--tokens", "4", "--state-save", folder_ / "state/s"}, "state");
  kept({"export", folder_ / "run", folder_ / "exported"}, "exported");
  kept({"import", folder_ / "exported", folder_ / "imported"}, "imported");
  EXPECT_EQ(run({"generate", folder_ / "imported", "--tokens", "4", "--state-load", folder_ / "state/s"}).code, 0);
}

// The test's own test: a program without fsync is caught.
TEST_F(Durability, AProgramThatSyncsNothingLosesItsModel) {
  ASSERT_EQ(run_logged(train("run", "4"), true).code, 0);
  const std::vector<std::string> lost = cut_power(folder_ / "run", read_log(log()));
  for (const char* name :
       {"model/model.safetensors", "best/model.safetensors", "checkpoints/step-4/model.safetensors", "config.toml"}) {
    EXPECT_THAT(lost, testing::Contains(name));
  }
  EXPECT_EQ(run({"generate", folder_ / "run", "--tokens", "4"}).code, 2);
  EXPECT_NE(run({"train", "--resume", "--out", folder_ / "run", "--steps", "8"}).code, 0);
}

}  // namespace
}  // namespace fw::test
