// Training on several ranks whose tensors lie on a device. The ranks are threads here, in turns, on one device. Tensors
// are staged through the host's memory, or carried by calls of NCCL that are answered in its place. In the emulation
// and on a GPU.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdlib>
#include <functional>
#include <memory>
#include <numeric>
#include <string>
#include <vector>

#include "base/device.h"
#include "base/error.h"
#include "base/staged_ranks.h"
#include "cuda/fake_nccl.h"
#include "support/thread_ranks.h"
#include "train/checkpoint.h"
#include "train/data_parallel.h"
#include "train/memory_plan.h"
#include "train/training_support.h"

namespace fw::testing {
namespace {

void on_device(int size, const std::function<void(Communicator&)>& body) { ThreadRanks::run(size, body, true); }

// What rank `from` has for rank `to`: `count` numbers that no other pair has.
std::vector<int32_t> numbers(int from, int to, int64_t count) {
  std::vector<int32_t> all(static_cast<size_t>(count));
  std::iota(all.begin(), all.end(), 1000000 * from + 100000 * to);
  return all;
}

enum class Carrier { kStaged, kNccl };
constexpr Carrier kCarriers[] = {Carrier::kStaged, Carrier::kNccl};

std::unique_ptr<Communicator> carry(Carrier carrier, FakeNccl& nccl, Communicator& host, Device& device,
                                    size_t staging) {
  if (carrier == Carrier::kNccl) return nccl::make_ranks(nccl.join(host), host, device);
  return std::make_unique<StagedRanks>(host, device, staging);
}

// Parts of many sizes, empty ones too; staged in pieces that are smaller than most.
void expect_arrivals(Carrier carrier, int size, size_t staging) {
  SCOPED_TRACE(fmt::format("{} ranks, {} bytes at a time", size, staging));
  FakeNccl nccl(size);
  on_device(size, [&](Communicator& host) {
    Device& device = cuda_device();
    const std::unique_ptr<Communicator> ranks = carry(carrier, nccl, host, device, staging);
    const int me = ranks->rank();
    // not the same both ways
    const auto count = [&](int from, int to) { return int64_t{(37 * from + 11 * to) % 5 * 23}; };
    std::vector<Buffer<int32_t>> out, in;
    std::vector<ConstPart> send;
    std::vector<Part> receive;
    send.reserve(static_cast<size_t>(size));
    receive.reserve(static_cast<size_t>(size));
    for (int other = 0; other < size; ++other) {
      out.emplace_back(device, count(me, other));
      out.back().write(0, numbers(me, other, count(me, other)));
      in.emplace_back(device, count(other, me));
    }
    for (const Buffer<int32_t>& buffer : out) send.push_back({buffer.data(), buffer.span().size_bytes()});
    for (Buffer<int32_t>& buffer : in) receive.push_back(part_of(buffer.span()));
    ranks->all_to_all(send, receive);
    for (int from = 0; from < size; ++from)
      EXPECT_EQ(in[static_cast<size_t>(from)].to_vector(), numbers(from, me, count(from, me)));

    std::vector<Part> parts;
    std::vector<Buffer<int32_t>> all;
    parts.reserve(static_cast<size_t>(size));
    all.reserve(static_cast<size_t>(size));
    for (int from = 0; from < size; ++from) all.emplace_back(device, 41 * from);
    all[static_cast<size_t>(me)].write(0, numbers(me, 0, 41 * me));
    for (Buffer<int32_t>& buffer : all) parts.push_back(part_of(buffer.span()));
    ranks->all_gather(parts);
    for (int from = 0; from < size; ++from)
      EXPECT_EQ(all[static_cast<size_t>(from)].to_vector(), numbers(from, 0, 41 * from));

    Buffer<int32_t> one(device, 777);
    if (me == size - 1) one.write(0, numbers(9, 9, 777));
    ranks->broadcast(part_of(one.span()), size - 1);
    EXPECT_EQ(one.to_vector(), numbers(9, 9, 777));
    ranks->barrier();
  });
}

TEST(DeviceRanksMemory, EachPartArrivesWhereItShould) {
  for (const int size : {1, 2, 3}) {
    for (const size_t staging : {size_t{64}, size_t{1000}, size_t{1} << 20})
      expect_arrivals(Carrier::kStaged, size, staging);
    expect_arrivals(Carrier::kNccl, size, 0);
  }
}

TEST(DeviceRanksMemory, WhatNcclSaysIsPassedOn) {
  FakeNccl nccl(1);
  nccl::Functions functions = nccl.join(one_rank());
  EXPECT_EQ(nccl::version_of(functions), "2.28.9");
  functions.GetVersion = [](int* version) {
    *version = 2708;
    return nccl::kSuccess;
  };
  EXPECT_EQ(nccl::version_of(functions), "2.7.8");
  const auto message = [&]() -> std::string {
    try {
      const auto ranks = nccl::make_ranks(functions, one_rank(), cuda_device());
      ranks->all_gather({});
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), ErrorKind::kIo);
      return error.what();
    }
    return "no error";
  };
  functions.CommGetAsyncError = [](nccl::Comm, nccl::Result* error) {
    *error = 6;
    return nccl::kSuccess;
  };
  EXPECT_EQ(message(),
            "all-gather: NCCL says: invalid usage. NCCL_DEBUG=WARN says more; FASTWEIGHT_NCCL=off goes without it, "
            "through the host's memory");
  functions.GetLastError = [](nccl::Comm) { return "a peer is gone"; };
  EXPECT_EQ(message(),
            "all-gather: NCCL says: invalid usage: a peer is gone. NCCL_DEBUG=WARN says more; FASTWEIGHT_NCCL=off goes "
            "without it, through the host's memory");
  functions.CommInitRank = [](nccl::Comm*, int, nccl::UniqueId, int) { return 5; };
  EXPECT_TRUE(message().starts_with("joining the ranks: NCCL says: invalid usage"));
}

Batch make_batch(int64_t tokens, int64_t vocab, Random& random) {
  Batch batch;
  for (int64_t t = 0; t < tokens; ++t) {
    batch.ids.push_back(static_cast<int32_t>(random.below(static_cast<uint64_t>(vocab))));
    batch.targets.push_back(t % 3 == 2 ? -1 : static_cast<int32_t>(random.below(static_cast<uint64_t>(vocab))));
  }
  batch.layout = SeqLayout({0, tokens});
  return batch;
}

struct Trained {
  std::vector<double> losses, norms;
  std::vector<float> values, moments;
};

// Two steps of five batches, whose last has no token. Of ranks that have not completed the values, those of rank 0 lack
// low parts of the others'.
Trained train(int size, MomentFormat format, GradientSums sums, Carrier carrier = Carrier::kStaged,
              bool complete = true) {
  Trained trained;
  ModelConfig config = tiny_model();
  config.vocab_size = 700;
  FakeNccl nccl(size);
  on_device(size, [&](Communicator& host) {
    LanguageModel<float> model(config, cuda_device());
    Random random(3);
    model.init(random);
    const std::unique_ptr<Communicator> tensors = carry(carrier, nccl, host, model.device(), size_t{1} << 16);
    DataParallel<float> parallel(host, *tensors, {.moments = format, .seed = 7}, model.params(), sums);
    Trained mine;
    for (int step = 0; step < 2; ++step) {
      std::vector<Batch> batches;
      for (const int64_t tokens : {14, 1, 9, 20, 0}) batches.push_back(make_batch(tokens, config.vocab_size, random));
      const StepResult result = parallel.step(model, batches, 1e-2, 1.0);
      EXPECT_TRUE(result.finite);
      mine.losses.push_back(result.nll);
      mine.norms.push_back(result.norm);
    }
    if (complete) parallel.complete(model.params());
    for (const ParamSpec& spec : model.params().specs()) {
      const HostView<float> view = model.params().host_values(spec);
      mine.values.insert(mine.values.end(), view.span().begin(), view.span().end());
    }
    const auto whole = parallel.whole(model.params());
    ASSERT_EQ(whole.has_value(), host.rank() == 0);
    if (!whole) return;
    for (const Buffer<float>* moments : {&whole->first(), &whole->second()})
      mine.moments.insert(mine.moments.end(), moments->span().begin(), moments->span().end());
    for (const Buffer<Bf16>* moments : {&whole->first_bf16(), &whole->second_bf16()}) {
      for (const Bf16 x : moments->span()) mine.moments.push_back(static_cast<float>(x.bits));
    }
    trained = std::move(mine);
  });
  return trained;
}

void expect_same(const Trained& got, const Trained& want) {
  EXPECT_EQ(got.losses, want.losses);
  EXPECT_EQ(got.norms, want.norms);
  EXPECT_EQ(got.values, want.values);
  EXPECT_EQ(got.moments, want.moments);
}

// Values are split here: the low parts, which passes do not read, are gathered at the end alone.
TEST(DeviceRanks, AnyNumberHasTheBitsOfOne) {
  for (const MomentFormat format : {MomentFormat::kFloat32, MomentFormat::kBf16}) {
    const Trained one = train(1, format, GradientSums::kApart);
    EXPECT_FALSE(one.moments.empty());
    for (const Carrier carrier : kCarriers) {
      const int size = (format == MomentFormat::kBf16) == (carrier == Carrier::kNccl) ? 2 : 3;
      SCOPED_TRACE(size);
      expect_same(train(size, format, GradientSums::kApart, carrier), one);
    }
  }
}

TEST(DeviceRanks, ValuesAreWholeOnceTheyAreCompleted) {
  const Trained one = train(1, MomentFormat::kFloat32, GradientSums::kApart);
  const Trained several = train(2, MomentFormat::kFloat32, GradientSums::kApart, Carrier::kStaged, false);
  EXPECT_EQ(several.moments, one.moments);
  EXPECT_NE(several.values, one.values);
  for (size_t i = 0; i < one.values.size(); ++i)
    ASSERT_NEAR(several.values[i], one.values[i], 1e-2 * std::abs(one.values[i]) + 1e-30) << i;
}

// The same but for the order of sums, and always the same.
TEST(DeviceRanks, SumsThatRunOnWithinEachRank) {
  const Trained one = train(1, MomentFormat::kFloat32, GradientSums::kApart),
                two = train(2, MomentFormat::kFloat32, GradientSums::kLocal);
  expect_same(train(2, MomentFormat::kFloat32, GradientSums::kLocal, Carrier::kNccl), two);
  ASSERT_EQ(two.losses.size(), one.losses.size());
  EXPECT_NEAR(two.losses[0], one.losses[0], 1e-6 * one.losses[0]);
  EXPECT_NEAR(two.norms[0], one.norms[0], 1e-4 * one.norms[0]);
  EXPECT_NEAR(two.losses[1], one.losses[1], 1e-2 * one.losses[1]);
}

// ---- runs

TrainConfig run_of(const std::string& out, const std::string& device = "cuda") {
  TrainConfig config = tiny_run(out);
  config.device = device;
  config.accumulate = 3;
  config.sums = "apart";
  config.batch = 1;
  config.length = 16;
  config.steps = 4;
  config.checkpoint_every = 2;
  config.eval_every = 2;
  config.valid_tokens = 40;
  return config;
}

// Whole runs choose what carries their tensors, and where there is NCCL they choose it. It joins ranks by waiting in
// its own call for all of them, which threads that take turns never come to (and it refuses two ranks of one device):
// these go through the host's memory.
class WithoutNccl {
 public:
  WithoutNccl() { ::setenv("FASTWEIGHT_NCCL", "off", 1); }
  ~WithoutNccl() { ::unsetenv("FASTWEIGHT_NCCL"); }
  WithoutNccl(const WithoutNccl&) = delete;
  WithoutNccl& operator=(const WithoutNccl&) = delete;
};

// From its newest checkpoint, if there is one, until it is done or has made `steps` steps.
void go_on(int size, const TempFolder& folder, const TrainConfig& config, int64_t steps = 1000) {
  std::atomic<bool> stop = false;
  const auto body = [&](Communicator& ranks) {
    const auto trainer = make_trainer(config, folder.path("data"), true, tiny_model(), ranks);
    EXPECT_EQ(trainer->transport().empty(), ranks.size() == 1 || config.device == "cpu");
    trainer->resume([](const std::string& warning) { ADD_FAILURE() << warning; });
    const int64_t last = trainer->step() + steps;
    EXPECT_EQ(trainer->run({}, &stop, [&](const StepProgress& p) { stop = p.step >= last; }), steps == 1000);
  };
  on_device(size, body);
}

TEST(DeviceRanks, ARunGoesOnWithAnotherNumberOfRanksAndLeavesTheSameFiles) {
  const WithoutNccl staged;
  const TempFolder folder;
  go_on(1, folder, run_of(folder.path("one")));
  for (const std::string name : {"two", "several"}) {
    TrainConfig config = run_of(folder.path(name));
    if (name == "several") {
      go_on(3, folder, config, 1);
      go_on(1, folder, config, 1);
    }
    go_on(2, folder, config);
    for (const char* part : {"/checkpoints/step-4", "/model", "/best"}) {
      EXPECT_EQ(folder_content(folder.path(name) + part), folder_content(folder.path("one") + part)) << name << part;
    }
    EXPECT_EQ(records(folder.path(name) + "/metrics.jsonl"), records(folder.path("one") + "/metrics.jsonl")) << name;
  }
}

// A checkpoint that ranks of the device wrote is one that ranks of the host take up, and the other way.
TEST(DeviceRanks, ACheckpointGoesOnOnTheOtherDevice) {
  const WithoutNccl staged;
  for (const auto& [first, second] : {std::pair<std::string, std::string>{"cuda", "cpu"}, {"cpu", "cuda"}}) {
    SCOPED_TRACE(fmt::format("{} to {}", first, second));
    const TempFolder folder;
    go_on(2, folder, run_of(folder.path("run"), first), 2);
    go_on(3, folder, run_of(folder.path("run"), second));
    EXPECT_EQ(verify_checkpoint(checkpoint_path(folder.path("run") + "/checkpoints", 4)).step, 4);
  }
}

// ---- memory

TEST(DeviceRanks, ThePlanHasWhatARankTakes) {
  ModelConfig model = tiny_model();
  model.vocab_size = 4000;
  const TrainConfig config = run_of("unused");
  for (const int size : {1, 2, 4}) {
    SCOPED_TRACE(size);
    const MemoryPlan plan = plan_memory(model, config, size);
    const LanguageModel<float> made(model, cuda_device());
    const auto extent = static_cast<size_t>(made.params().extent());
    size_t largest = 0;
    for (const ParamRange& range : rank_ranges(made.params(), size))
      largest = std::max(largest, static_cast<size_t>(range.size()));
    EXPECT_GE(largest * static_cast<size_t>(size), extent);
    EXPECT_EQ(plan.gradients, 4 * (extent + largest * static_cast<size_t>(size)));
    EXPECT_GE(plan.moments, 8 * largest);
    EXPECT_LT(plan.moments, 8 * largest + 4096 + extent / 64);  // and where a part's pieces lie
    EXPECT_EQ(plan.activations, plan_memory(model, config).activations);
    EXPECT_EQ(plan.messages, nccl_room(size));
    EXPECT_EQ(plan.messages == 0, size == 1);
  }
}

}  // namespace
}  // namespace fw::testing
