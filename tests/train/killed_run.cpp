#include "train/killed_run.h"

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <map>
#include <thread>

#include "base/random.h"
#include "train/training_support.h"

extern char** environ;

namespace fw::testing {
namespace {

namespace fs = std::filesystem;
using Clock = std::chrono::steady_clock;

constexpr const char *kFolder = "FW_TEST_TRAIN_IN", *kDevice = "FW_TEST_TRAIN_ON", *kMoments = "FW_TEST_TRAIN_MOMENTS";

// An emulated device takes many times as long a step: fewer of them show the same.
int64_t steps_on(const std::string& device) { return device == "cpu" ? 40 : 12; }

TrainConfig run_config(const std::string& folder, const std::string& device) {
  TrainConfig config = tiny_run(folder + "/run");
  config.device = device;
  config.steps = steps_on(device);
  if (const char* moments = std::getenv(kMoments)) config.moments = moments;
  config.checkpoint_every = 2;
  return config;
}

// Trains in the folder that the environment names, from the newest checkpoint if there is one, and ends the process.
class TrainInstead : public ::testing::Environment {
 public:
  void SetUp() override {
    const char *folder = std::getenv(kFolder), *device = std::getenv(kDevice);
    if (folder == nullptr || device == nullptr) return;
    int status = 1;
    try {
      const auto trainer = make_trainer(run_config(folder, device), std::string(folder) + "/data");
      trainer->resume([&](const std::string& warning) {
        // What a killed process leaves must never look like a checkpoint.
        std::fprintf(stderr, "%s\n", warning.c_str());
        std::_Exit(2);
      });
      status = trainer->run(nullptr, nullptr) ? 0 : 1;
    } catch (const std::exception& error) {
      std::fprintf(stderr, "%s\n", error.what());
    }
    std::_Exit(status);
  }
};

const ::testing::Environment* const kTrainInstead = ::testing::AddGlobalTestEnvironment(new TrainInstead);

pid_t start_training(const std::string& folder, const std::string& device, const std::string& moments) {
  static const std::string self = fs::read_symlink("/proc/self/exe").string();
  std::vector<std::string> environment = {fmt::format("{}={}", kFolder, folder), fmt::format("{}={}", kDevice, device),
                                          fmt::format("{}={}", kMoments, moments)};
  for (char** entry = environ; *entry != nullptr; ++entry) environment.emplace_back(*entry);
  std::vector<char*> pointers;
  pointers.reserve(environment.size() + 1);
  for (std::string& entry : environment) pointers.push_back(entry.data());
  pointers.push_back(nullptr);
  std::string program = self, quiet = "--gtest_brief=1";
  char* const arguments[] = {program.data(), quiet.data(), nullptr};
  const pid_t child = ::fork();
  if (child == 0) {  // nothing but exec between fork and the new program
    ::execve(program.data(), arguments, pointers.data());
    ::_exit(127);
  }
  return child;
}

// Whether a checkpoint is being written or removed right now.
bool at_checkpoint(const std::string& folder) {
  std::error_code ignored;
  for (fs::directory_iterator entry(folder + "/run/checkpoints", ignored), end; !ignored && entry != end;
       entry.increment(ignored)) {
    if (entry->path().filename().string().starts_with(".tmp-")) return true;
  }
  return false;
}

struct Outcome {
  bool killed = false;
  int status = 0;  // of one that ended by itself
};

// Kills the process after `delay`, or, with at_write, so long after the moment that a checkpoint is first seen being
// written.
Outcome kill_after(pid_t child, const std::string& folder, std::chrono::microseconds delay, bool at_write) {
  auto from = Clock::now();
  bool armed = !at_write;
  int status = 0;
  for (;;) {
    if (::waitpid(child, &status, WNOHANG) == child) return {false, WIFEXITED(status) ? WEXITSTATUS(status) : -1};
    if (!armed && at_checkpoint(folder)) {
      armed = true;
      from = Clock::now();
    }
    if (armed && Clock::now() - from >= delay) break;
    std::this_thread::sleep_for(std::chrono::microseconds(50));
  }
  ::kill(child, SIGKILL);
  ::waitpid(child, &status, 0);
  return {WIFSIGNALED(status), WIFEXITED(status) ? WEXITSTATUS(status) : -1};
}

// "" if two folders hold the same, else which file is more, less or other.
std::string difference(const std::map<std::string, std::string>& got,
                       const std::map<std::string, std::string>& expected) {
  for (const auto& [name, content] : got) {
    const auto found = expected.find(name);
    if (found == expected.end()) return "unexpected file " + name;
    if (found->second != content) return "other content in " + name;
  }
  for (const auto& [name, content] : expected) {
    if (got.count(name) == 0) return "no file " + name;
  }
  return "";
}

}  // namespace

void expect_kills_leave_no_trace(const std::string& device, int kills_wanted, const std::string& moments) {
  const TempFolder folder;
  const std::string last = "/run/checkpoints/step-" + std::to_string(steps_on(device));
  const std::string whole = folder.path("whole");
  fs::create_directories(whole);
  const auto start = Clock::now();
  int status = -1;
  ASSERT_EQ(::waitpid(start_training(whole, device, moments), &status, 0) > 0, true);
  ASSERT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;
  const auto whole_time = std::chrono::duration_cast<std::chrono::microseconds>(Clock::now() - start);
  const auto expected = folder_content(whole + last);
  ASSERT_EQ(expected.count("model.safetensors"), 1u);

  Random random(static_cast<uint64_t>(Clock::now().time_since_epoch().count()));
  int kills = 0, runs = 0;
  while (kills < kills_wanted) {
    const std::string here = folder.path("run" + std::to_string(runs++));
    fs::create_directories(here);
    // Each process gets a part of a whole run's time before it is killed; after 12 kills the run may go to its end.
    for (int in_this_run = 0;;) {
      const bool at_write = random.below(2) == 0;
      const auto delay = std::chrono::microseconds(
          in_this_run < 12 ? random.below(at_write ? 3000 : static_cast<uint64_t>(whole_time.count()))
                           : uint64_t{600000000});
      const Outcome outcome =
          kill_after(start_training(here, device, moments), here, delay, at_write && in_this_run < 12);
      if (outcome.killed) {
        ++kills;
        ++in_this_run;
        continue;
      }
      ASSERT_EQ(outcome.status, 0) << "after " << kills << " kills";
      break;
    }
    ASSERT_EQ(difference(folder_content(here + last), expected), "") << "after " << kills << " kills";
    ASSERT_EQ(difference(folder_content(here + "/run/model"), folder_content(whole + "/run/model")), "");
    EXPECT_EQ(folder_content(here + "/run/checkpoints").size(), 2u);
    ASSERT_LT(runs, 100) << "processes end before they can be killed";
  }
}

}  // namespace fw::testing
