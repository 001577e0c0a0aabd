#include "train/checkpoint.h"

#include <gtest/gtest.h>
#include <malloc.h>
#include <signal.h>
#include <sys/resource.h>

#include <atomic>
#include <filesystem>
#include <functional>

#include "base/error.h"
#include "base/safetensors.h"
#include "training_support.h"

// What buffers of the host are made of, counted. (A sanitizer has an allocator of its own.)
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define FW_COUNTS_BUFFERS 0
#else
#define FW_COUNTS_BUFFERS 1
static std::atomic<size_t> buffer_bytes{0};
extern "C" void* aligned_alloc(size_t alignment, size_t bytes) noexcept {
  buffer_bytes += bytes;
  return ::memalign(alignment, bytes);
}
#endif

namespace fw {
namespace {

namespace fs = std::filesystem;
using testing::folder_content;
using testing::make_trainer;
using testing::read_text;
using testing::TempFolder;
using testing::tiny_model;
using testing::tiny_run;
using testing::write_text;

std::vector<float> values(Trainer& trainer) {
  return {trainer.model().params().values().begin(), trainer.model().params().values().end()};
}

std::string message_of(const std::function<void()>& action, ErrorKind kind) {
  try {
    action();
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), kind) << error.what();
    return error.what();
  }
  ADD_FAILURE() << "no error";
  return {};
}

// While it lives, no file can grow beyond `bytes`: what a program sees of a full disk (write() fails half-way).
class FullDisk {
 public:
  explicit FullDisk(rlim_t bytes) : handler_(::signal(SIGXFSZ, SIG_IGN)) {
    ::getrlimit(RLIMIT_FSIZE, &old_);
    rlimit limit = old_;
    limit.rlim_cur = bytes;
    ::setrlimit(RLIMIT_FSIZE, &limit);
  }
  ~FullDisk() {
    ::setrlimit(RLIMIT_FSIZE, &old_);
    ::signal(SIGXFSZ, handler_);
  }
  FullDisk(const FullDisk&) = delete;
  FullDisk& operator=(const FullDisk&) = delete;

 private:
  rlimit old_ = {};
  void (*handler_)(int);
};

class CheckpointTest : public ::testing::Test {
 protected:
  // A finished run of 15 steps with the checkpoints step-10 and step-15.
  void SetUp() override {
    whole_ = make_trainer(tiny_run(folder_.path("whole")), folder_.path("data"));
    whole_->run(nullptr, nullptr);
  }

  // A copy of that run to be damaged.
  TrainConfig copy() {
    const std::string out = folder_.path("copy" + std::to_string(copies_++));
    fs::copy(folder_.path("whole"), out, fs::copy_options::recursive);
    return tiny_run(out);
  }

  // Resume must warn, naming `file`, fall back to step 10, and reach the same end; the damaged folder is then good
  // again.
  void expect_fallback(const TrainConfig& config, const std::string& file, const std::string& damage) {
    SCOPED_TRACE(file + ": " + damage);
    const auto trainer = make_trainer(config, folder_.path("data"));
    std::string warnings;
    ASSERT_TRUE(trainer->resume([&](const std::string& warning) { warnings += warning; }));
    EXPECT_NE(warnings.find("step-15"), std::string::npos) << warnings;
    EXPECT_NE(warnings.find(file), std::string::npos) << warnings;
    ASSERT_EQ(trainer->step(), 10);
    ASSERT_TRUE(trainer->run(nullptr, nullptr));
    EXPECT_EQ(values(*trainer), values(*whole_));
    EXPECT_EQ(folder_content(config.out + "/checkpoints/step-15"),
              folder_content(folder_.path("whole/checkpoints/step-15")));
    fs::remove_all(config.out);
  }

  TempFolder folder_;
  std::unique_ptr<Trainer> whole_;
  int copies_ = 0;
};

const char* const kFiles[] = {"config.json", "model.safetensors", "optimizer.safetensors", "tokenizer.json",
                              "trainer.json"};

TEST_F(CheckpointTest, HoldsTheFilesOfAModelFolderAndTheTrainers) {
  std::vector<std::string> names;
  for (const auto& item : folder_content(folder_.path("whole/checkpoints/step-15"))) names.push_back(item.first);
  EXPECT_EQ(names, std::vector<std::string>(std::begin(kFiles), std::end(kFiles)));
}

TEST_F(CheckpointTest, TruncatedFilesAreFoundAndTheOneBeforeIsUsed) {
  for (const char* file : kFiles) {
    for (const double part : {0.0, 0.5, 0.999}) {
      const TrainConfig config = copy();
      const std::string path = config.out + "/checkpoints/step-15/" + file;
      const auto size = fs::file_size(path);
      fs::resize_file(path, std::min(size - 1, static_cast<uintmax_t>(static_cast<double>(size) * part)));
      expect_fallback(config, file, "truncated to " + std::to_string(fs::file_size(path)));
    }
  }
}

TEST_F(CheckpointTest, MissingFilesAreFoundAndTheOneBeforeIsUsed) {
  for (const char* file : kFiles) {
    const TrainConfig config = copy();
    fs::remove(config.out + "/checkpoints/step-15/" + file);
    expect_fallback(config, file, "removed");
  }
}

TEST_F(CheckpointTest, FlippedBitsAreFoundAndTheOneBeforeIsUsed) {
  Random random(8);
  for (const char* file : kFiles) {
    for (int i = 0; i < 4; ++i) {
      const TrainConfig config = copy();
      const std::string path = config.out + "/checkpoints/step-15/" + file;
      std::string content = read_text(path);
      const size_t byte = i == 0 ? 0 : i == 1 ? content.size() - 1 : random.below(content.size());
      const int bit = static_cast<int>(random.below(8));
      content[byte] = static_cast<char>(content[byte] ^ (1 << bit));
      write_text(path, content);
      expect_fallback(config, file, "bit " + std::to_string(bit) + " of byte " + std::to_string(byte));
    }
  }
}

// trainer.json has no file that vouches for it: every one of its bytes must count.
TEST_F(CheckpointTest, EveryByteOfTrainerJsonCounts) {
  const TrainConfig config = copy();
  const std::string path = config.out + "/checkpoints/step-15", content = read_text(path + "/trainer.json");
  EXPECT_EQ(verify_checkpoint(path).step, 15);
  Random random(9);
  for (size_t byte = 0; byte < content.size(); byte += 1 + random.below(20)) {
    std::string damaged = content;
    damaged[byte] = static_cast<char>(damaged[byte] ^ (1 << random.below(8)));
    write_text(path + "/trainer.json", damaged);
    EXPECT_THROW(verify_checkpoint(path), Error) << byte;
  }
}

TEST_F(CheckpointTest, WhenAllAreDamagedItIsAnErrorAndNothingChanges) {
  const TrainConfig config = copy();
  for (const char* step : {"step-10", "step-15"})
    fs::resize_file(config.out + "/checkpoints/" + step + "/model.safetensors", 100);
  const auto trainer = make_trainer(config, folder_.path("data"));
  const std::vector<float> before = values(*trainer);
  int warnings = 0;
  const std::string message =
      message_of([&] { trainer->resume([&](const std::string&) { ++warnings; }); }, ErrorKind::kUsage);
  EXPECT_NE(message.find("model.safetensors"), std::string::npos) << message;
  EXPECT_EQ(warnings, 2);
  EXPECT_EQ(values(*trainer), before);
  EXPECT_EQ(list_checkpoints(config.out + "/checkpoints"), (std::vector<int64_t>{10, 15}));
}

TEST_F(CheckpointTest, NoCheckpointIsNoError) {
  const auto trainer = make_trainer(tiny_run(folder_.path("new")), folder_.path("data"));
  EXPECT_FALSE(trainer->resume([](const std::string& warning) { ADD_FAILURE() << warning; }));
  EXPECT_FALSE(fs::exists(folder_.path("new")));
}

TEST_F(CheckpointTest, ACheckpointOfAnotherRunIsAnErrorThatSaysWhatDiffers) {
  const TrainConfig config = copy();
  const auto refused = [&](const TrainConfig& run, const ModelConfig& model) {
    const auto trainer = make_trainer(run, folder_.path("data"), false, model);
    return message_of([&] { trainer->resume(nullptr); }, ErrorKind::kUsage);
  };
  ModelConfig model = tiny_model();
  model.intermediate_size = 48;
  std::string message = refused(config, model);
  EXPECT_NE(message.find("intermediate_size (checkpoint: 32, this run: 48)"), std::string::npos) << message;
  model = tiny_model();
  model.rule = "gated_deltanet";
  message = refused(config, model);
  EXPECT_NE(message.find("rule"), std::string::npos) << message;
  TrainConfig seed = config;
  seed.seed = 77;
  message = refused(seed, tiny_model());
  EXPECT_NE(message.find("seed 1"), std::string::npos) << message;
  TrainConfig length = config;
  length.length = 16;
  message = refused(length, tiny_model());
  EXPECT_NE(message.find("length 32"), std::string::npos) << message;
}

TEST_F(CheckpointTest, AFullDiskLeavesTheOnesBeforeAndNothingHalfWritten) {
  const std::string folder = copy().out + "/checkpoints";
  const auto before10 = folder_content(folder + "/step-10"), before15 = folder_content(folder + "/step-15");
  const auto model_bytes = fs::file_size(folder + "/step-15/model.safetensors");
  TrainerState state = verify_checkpoint(folder + "/step-15");
  const AdamW optimizer({}, whole_->model().params());
  // Too small for config.json, for model.safetensors, for optimizer.safetensors; a new one and one to be replaced.
  for (const rlim_t bytes :
       {rlim_t{50}, static_cast<rlim_t>(model_bytes / 2), static_cast<rlim_t>(model_bytes + model_bytes / 2)}) {
    for (const int64_t step : {17, 15}) {
      state.step = step;
      std::string message;
      {
        const FullDisk full(bytes);
        message = message_of([&] { write_checkpoint(folder, state, whole_->model(), optimizer, *byte_tokenizer()); },
                             ErrorKind::kIo);
      }
      EXPECT_NE(message.find("step-" + std::to_string(step)), std::string::npos) << message;
      EXPECT_EQ(folder_content(folder),
                (std::map<std::string, std::string>{{"step-10", "(folder)"}, {"step-15", "(folder)"}}))
          << bytes;
      EXPECT_EQ(folder_content(folder + "/step-10"), before10);
      EXPECT_EQ(folder_content(folder + "/step-15"), before15);
    }
  }
}

TEST_F(CheckpointTest, ARunThatFindsTheDiskFullCanBeResumed) {
  TrainConfig config = tiny_run(folder_.path("full"));
  config.log_every = 100;
  const auto model_bytes = fs::file_size(folder_.path("whole/model/model.safetensors"));
  {
    const auto trainer = make_trainer(config, folder_.path("data"));
    std::atomic<bool> stop{true};
    ASSERT_FALSE(trainer->run(nullptr, &stop));  // step-0
    const FullDisk full(model_bytes / 2);
    message_of([&] { trainer->run(nullptr, nullptr); }, ErrorKind::kIo);
    EXPECT_EQ(trainer->step(), 5);
  }
  const auto trainer = make_trainer(config, folder_.path("data"));
  ASSERT_TRUE(trainer->resume([](const std::string& warning) { ADD_FAILURE() << warning; }));
  EXPECT_EQ(trainer->step(), 0);
  ASSERT_TRUE(trainer->run(nullptr, nullptr));
  EXPECT_EQ(values(*trainer), values(*whole_));
}

TEST_F(CheckpointTest, TheLastKeepAreKept) {
  EXPECT_EQ(list_checkpoints(folder_.path("whole/checkpoints")), (std::vector<int64_t>{10, 15}));
  TrainConfig config = tiny_run(folder_.path("keep"));
  config.checkpoint_every = 2;
  for (const int64_t keep : {1, 3, 50}) {
    config.keep = keep;
    config.out = folder_.path("keep" + std::to_string(keep));
    make_trainer(config, folder_.path("data"))->run(nullptr, nullptr);
    std::vector<int64_t> expected = {2, 4, 6, 8, 10, 12, 14, 15};
    if (keep < 8) expected.erase(expected.begin(), expected.end() - keep);
    EXPECT_EQ(list_checkpoints(config.out + "/checkpoints"), expected);
    EXPECT_EQ(folder_content(config.out + "/checkpoints").size(), expected.size());
  }
}

// A damaged newer checkpoint must not push out the good one that the run goes on from.
TEST_F(CheckpointTest, PruningCountsNoCheckpointsAheadOfTheRun) {
  TrainConfig config = copy();
  config.keep = 1;
  config.checkpoint_every = 1;
  fs::resize_file(config.out + "/checkpoints/step-15/model.safetensors", 100);
  const auto trainer = make_trainer(config, folder_.path("data"));
  ASSERT_TRUE(trainer->resume(nullptr));
  std::atomic<bool> stop{false};
  config.log_every = 1;
  const auto watched = make_trainer(config, folder_.path("data"));
  ASSERT_TRUE(watched->resume(nullptr));
  // the record of step 10, which is due now, comes before
  EXPECT_FALSE(watched->run([&](const LogRecord& r) { stop = r.step == 11; }, &stop));
  EXPECT_EQ(list_checkpoints(config.out + "/checkpoints"), (std::vector<int64_t>{11, 15}));
  const auto again = make_trainer(config, folder_.path("data"));
  ASSERT_TRUE(again->resume(nullptr));
  EXPECT_EQ(again->step(), 11);
}

TEST_F(CheckpointTest, LeftoversOfAKilledRunAreRemoved) {
  const TrainConfig config = copy();
  const std::string folder = config.out + "/checkpoints";
  for (const char* name : {"/.tmp-write-20", "/.tmp-remove-5"}) {
    fs::create_directories(folder + name);
    write_text(folder + name + "/model.safetensors", "half");
  }
  const auto trainer = make_trainer(config, folder_.path("data"));
  ASSERT_TRUE(trainer->resume(nullptr));
  EXPECT_EQ(folder_content(folder).size(), 2u);
}

// Killed after its last checkpoint, before an older one was removed: the run that goes on from there has nothing to
// write, and removes it all the same.
TEST_F(CheckpointTest, OldOnesOfAKilledRunAreRemoved) {
  const TrainConfig config = copy();
  const std::string folder = config.out + "/checkpoints";
  fs::copy(folder + "/step-10", folder + "/step-5", fs::copy_options::recursive);
  const auto trainer = make_trainer(config, folder_.path("data"));
  ASSERT_TRUE(trainer->resume([](const std::string& warning) { ADD_FAILURE() << warning; }));
  EXPECT_EQ(list_checkpoints(folder).size(), 3u) << "removed before the run goes on";
  ASSERT_TRUE(trainer->run(nullptr, nullptr));
  EXPECT_EQ(list_checkpoints(folder), (std::vector<int64_t>{10, 15}));
}

TEST_F(CheckpointTest, LoadingMakesNoSecondModel) {
#if FW_COUNTS_BUFFERS
  const std::string path = folder_.path("whole/checkpoints/step-15");
  LanguageModel<float> model(whole_->model().config());
  AdamW optimizer({}, model.params());
  const TrainerState state = verify_checkpoint(path);
  const size_t before = buffer_bytes, parameters = static_cast<size_t>(model.params().size());
  const LanguageModel<float> another(model.config());
  ASSERT_GE(buffer_bytes - before, parameters * sizeof(float)) << "the count does not see a model";
  const size_t begin = buffer_bytes;
  load_checkpoint(path, state, model, optimizer);
  EXPECT_EQ(buffer_bytes - begin, 0u) << "bytes of buffers, of a model of " << parameters << " parameters";
  EXPECT_EQ(std::vector<float>(model.params().values().begin(), model.params().values().end()), values(*whole_));
  EXPECT_EQ(optimizer.updates(), 15);
#endif
}

// A file that lacks the last thing that is read: nothing has changed then, neither the parameters nor the moments.
TEST_F(CheckpointTest, WhatCannotBeLoadedWholeChangesNothing) {
  const std::string path = copy().out + "/checkpoints/step-15";
  const TrainerState state = verify_checkpoint(path);
  LanguageModel<float> model(whole_->model().config());
  Random random(9);
  model.init(random);
  AdamW optimizer({}, model.params());
  const std::string last = "v." + model.params().specs().back().name;
  const std::string moments = path + "/optimizer.safetensors";
  {
    const std::string whole = path + "/whole.safetensors";
    fs::copy(moments, whole);
    const SafetensorsReader reader(whole);
    SafetensorsWriter writer;
    for (const auto& [name, tensor] : reader.tensors()) {
      if (name != last) writer.add(name, tensor.dtype, tensor.shape, tensor.bytes);
    }
    writer.write(moments);
  }
  const std::string hash = model.hash();
  EXPECT_NE(message_of([&] { load_checkpoint(path, state, model, optimizer); }, ErrorKind::kUsage).find(last),
            std::string::npos);
  EXPECT_EQ(model.hash(), hash);
  const auto zero = [](const Buffer<float>& buffer) {
    return std::all_of(buffer.span().begin(), buffer.span().end(), [](float x) { return x == 0; });
  };
  EXPECT_TRUE(zero(optimizer.first()));
  EXPECT_TRUE(zero(optimizer.second()));
  EXPECT_EQ(optimizer.updates(), 0);

  // Another model's.
  ModelConfig other = model.config();
  other.num_hidden_layers += 1;
  LanguageModel<float> larger(other);
  AdamW of_larger({}, larger.params());
  EXPECT_NE(message_of([&] { load_checkpoint(path, state, larger, of_larger); }, ErrorKind::kUsage).find("step-15"),
            std::string::npos);
}

TEST_F(CheckpointTest, OnlyFoldersNamedStepNCount) {
  const TempFolder other;
  for (const char* name : {"step-7", "step-007", "step-", "step--1", "step-3x", "step-99999999999999999999", "other"})
    fs::create_directories(other.path(name));
  EXPECT_EQ(list_checkpoints(other.path("")), std::vector<int64_t>{7});
  EXPECT_TRUE(list_checkpoints(other.path("absent")).empty());
}

}  // namespace
}  // namespace fw
