// Offsets of packed sequences in device memory (FW_SEQLENS_DEVICE). A call gives the bits of one whose offsets the host
// knows, and leaves rows after the last sequence alone. One plan, in a captured graph where there is one, is replayed
// with other lengths.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <deque>
#include <functional>
#include <numeric>
#include <string>
#include <vector>

#include "cuda/device_runs.h"
#include "rule/rule.h"

namespace fw::testing {
namespace {

using ::testing::HasSubstr;

TEST(DeviceSeqlens, GiveTheBitsOfOffsetsOfTheHost) {
  uint64_t seed = 1200;
  for (const Preset& named : presets()) {
    if (named.rule.general_erase()) continue;
    ++seed;
    for (const fw_form form : {FW_FORM_CHUNK, FW_FORM_TOKEN}) {
      ProblemOptions options;
      options.sequences = form == FW_FORM_CHUNK ? SeqLayout({0, 65, 65, 66, 140}) : SeqLayout({0, 0, 9, 10, 23});
      options.H = 1;
      options.HV = 1 + static_cast<int64_t>(seed % 2);
      options.K = seed % 3 == 0 ? 40 : 64;
      options.V = seed % 3 == 1 ? 24 : 64;
      options.seed = seed;
      if (seed % 2 == 0) options.gates = logits_of(named.rule, GateActivation::kSoftplus);
      const Problem problem = of_bf16_numbers(random_problem(named.rule, options));
      SCOPED_TRACE(fmt::format("seed {}: {} {}", seed, named.name, describe(problem)));
      HeaderRun run = device_run(form);
      run.bf16 = seed % 4 == 0 ? HeaderRun::Bf16Tensors::kNone : HeaderRun::Bf16Tensors::kAll;
      run.seqlens = seed % 5 < 2 ? 32 : 64;
      run.segment = -1;
      run.saved = seed % 3 != 0;
      const ReferenceOutputs out = header_forward(problem, run);
      const ReferenceInputs grads = header_backward(problem, run);
      run.device_seqlens = true;
      for (const int64_t spare : {0, 150}) {
        if (emulated() && (spare == 0) == ((seed + form) % 2 == 0)) continue;
        run.spare_tokens = spare;
        EXPECT_TRUE(close(header_forward(problem, run), out, 0)) << spare;
        EXPECT_TRUE(close(header_backward(problem, run), grads, 0)) << spare;
      }
    }
  }
}

// A gated rule of one head, forward and backward through one plan.
class Replay {
 public:
  static constexpr int64_t kRoom = 300, kDim = 64, kSequences = 5;

  Replay(const char* rule, int64_t max_seqlen) {
    fw_desc_init(&desc);
    EXPECT_EQ(fw_rule_preset(rule, &desc.rule), FW_OK);
    desc.device = FW_DEVICE_CUDA;
    desc.operands = FW_BF16;
    desc.B = desc.H = desc.HV = 1;
    desc.T = kRoom;
    desc.K = desc.V = kDim;
    desc.seqlens.num_sequences = kSequences;
    desc.segment = -1;
    desc.seqlens.max_seqlen = max_seqlen;
    fw_inputs_init(&in);
    fw_inputs_init(&grads);
    fw_outputs_init(&out);
    fw_outputs_init(&d);
    const bool channel = desc.rule.decay == FW_DECAY_CHANNEL;
    in.q = rows(-0.5f, 0.5f), in.k = rows(-0.5f, 0.5f), in.v = rows(-1, 1),
    in.g = channel ? rows(-0.2f, 0) : numbers(-0.2f, 0);
    if (desc.rule.gain == FW_GAIN_GATE) in.beta = numbers(0, 1);
    grads.q = rows(0, 0), grads.k = rows(0, 0), grads.g = channel ? rows(0, 0) : numbers(0, 0);
    out.o = rows(0, 0), d.o = rows(-1, 1);
  }

  // What a call leaves, all rows, with memory full of NaN before it.
  template <class Body>
  std::vector<float> results(const Body& body) {
    for (const fw_tensor* t : {&grads.q, &grads.k, &grads.g, &out.o}) {
      for (const DeviceMemory& m : memory_) {
        if (m.data() == t->data) m.fill(0xff);
      }
    }
    body();
    std::vector<float> all;
    for (const fw_tensor* t : {&grads.q, &grads.k, &grads.g, &out.o}) {
      for (const DeviceMemory& m : memory_) {
        if (m.data() != t->data) continue;
        const size_t at = all.size();
        all.resize(at + m.size() / sizeof(float));
        m.to_host(all.data() + at, m.size());
      }
    }
    return all;
  }

  // The same of a call whose offsets the host knows; rows that no sequence has are left alone.
  std::vector<float> known(const std::vector<int64_t>& lengths) {
    fw_desc all = desc;
    std::vector<int64_t> whole = lengths;
    whole.push_back(kRoom);  // what is after them, as a sequence
    all.seqlens.memory = FW_SEQLENS_HOST;
    all.seqlens.cu_seqlens = whole.data();
    all.seqlens.num_sequences = kSequences + 1;
    all.seqlens.max_seqlen = 0;
    fw_sizes sizes;
    fw_sizes_init(&sizes);
    EXPECT_EQ(fw_workspace_query(&all, &sizes), FW_OK) << fw_last_error();
    const DeviceMemory saved(sizes.saved), space(std::max(sizes.forward, sizes.backward));
    std::vector<float> values = results([&] {
      EXPECT_EQ(fw_forward(&all, &in, &out, saved.data(), sizes.saved, space.data(), space.size()), FW_OK)
          << fw_last_error();
      EXPECT_EQ(fw_backward(&all, &in, &d, &grads, saved.data(), sizes.saved, space.data(), space.size()), FW_OK)
          << fw_last_error();
    });
    const std::vector<bool> own = rows_of(lengths.back());
    for (size_t i = 0; i < values.size(); ++i) {
      if (!own[i]) std::memset(&values[i], 0xff, sizeof(float));
    }
    last_ = lengths.back();
    return values;
  }

  // Bits: NaN are equal to NaN.
  static bool same(const std::vector<float>& a, const std::vector<float>& b) {
    return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
  }

  // Of the rows that the sequences of the last known() have.
  bool same_rows(const std::vector<float>& a, const std::vector<float>& b) const {
    const std::vector<bool> own = rows_of(last_);
    for (size_t i = 0; i < own.size(); ++i) {
      if (own[i] && std::bit_cast<uint32_t>(a[i]) != std::bit_cast<uint32_t>(b[i])) return false;
    }
    return a.size() == b.size();
  }

  fw_desc desc;
  fw_inputs in, grads;
  fw_outputs out, d;

 private:
  // Of the values of results(): whether they are of the first `tokens` rows.
  std::vector<bool> rows_of(int64_t tokens) const {
    std::vector<bool> own;
    for (const fw_tensor* t : {&grads.q, &grads.k, &grads.g, &out.o}) {
      if (t->data == nullptr) continue;
      const int64_t row = t->rank == 4 ? t->shape[3] : 1;
      own.insert(own.end(), static_cast<size_t>(tokens * row), true);
      own.insert(own.end(), static_cast<size_t>((kRoom - tokens) * row), false);
    }
    return own;
  }
  fw_tensor rows(float low, float high) { return make({1, kRoom, 1, kDim}, low, high); }
  fw_tensor numbers(float low, float high) { return make({1, kRoom, 1}, low, high); }
  fw_tensor make(const std::vector<int64_t>& shape, float low, float high) {
    std::vector<float> values(
        static_cast<size_t>(std::accumulate(shape.begin(), shape.end(), int64_t{1}, std::multiplies<>())));
    for (float& x : values) {
      seed_ = seed_ * 1664525u + 1013904223u;
      x = low + (high - low) * static_cast<float>(seed_ >> 8) * 0x1p-24f;
    }
    memory_.emplace_back(values.size() * sizeof(float));
    memory_.back().from_host(values.data(), values.size() * sizeof(float));
    return fw_tensor_of(memory_.back().data(), FW_F32, static_cast<int>(shape.size()), shape.data());
  }

  uint32_t seed_ = 7;
  int64_t last_ = 0;
  std::deque<DeviceMemory> memory_;
};

// A graph of forward, backward and a copy that loads the next lengths is replayed twice: the second time it has those.
// (The emulation runs it as it comes.)
TEST(DeviceSeqlens, OneGraphIsReplayedWithOtherLengths) {
  const std::vector<int64_t> first = {0, 70, 70, 200, 264, 300};
  const std::vector<std::vector<int64_t>> all_lengths = {
      first, {0, 1, 65, 66, 66, 70}, {0, 0, 0, 0, 0, 0}, {0, 200, 210, 210, 299, 299}};
  for (const char* rule : {"gated_deltanet", "kda", "mamba2"}) {
    Replay replay(rule, 200);
    fw_desc& desc = replay.desc;
    fw_sizes sizes;
    fw_sizes_init(&sizes);
    const size_t bytes = (Replay::kSequences + 1) * sizeof(int64_t);
    const DeviceMemory offsets(bytes), next(bytes);
    desc.seqlens.cu_seqlens = offsets.data();
    desc.seqlens.memory = FW_SEQLENS_DEVICE;
    ASSERT_EQ(fw_workspace_query(&desc, &sizes), FW_OK) << fw_last_error();
    const DeviceMemory saved(sizes.saved), space(std::max(sizes.forward, sizes.backward));
    for (const std::vector<int64_t>& lengths : all_lengths) {
      const std::vector<float> expected = replay.known(lengths);
      for (const DeviceMemory* m : {&saved, &space}) m->fill(0xff);
      offsets.from_host(first.data(), bytes);
      next.from_host(lengths.data(), bytes);
      const auto queue = [&](void* stream) {
        ASSERT_EQ(fw_forward(&desc, &replay.in, &replay.out, saved.data(), sizes.saved, space.data(), space.size()),
                  FW_OK)
            << fw_last_error();
        ASSERT_EQ(fw_backward(&desc, &replay.in, &replay.d, &replay.grads, saved.data(), sizes.saved, space.data(),
                              space.size()),
                  FW_OK)
            << fw_last_error();
        device_copy(offsets.data(), next.data(), bytes, stream);
      };
      if (emulated()) queue(nullptr);
      const std::vector<float> got = replay.results([&] {
        device_graph_times(0, 1, 1, [&](int, void* stream) {
          desc.stream = stream;
          queue(stream);
        });
      });
      desc.stream = nullptr;
      EXPECT_TRUE(emulated() ? Replay::same(got, expected) : replay.same_rows(got, expected))
          << rule << " of " << lengths.back() << " tokens";
    }
  }
}

// One plan, made once.
TEST(DeviceSeqlens, OnePlanServesOtherLengths) {
  Replay replay("kda", 0);
  fw_desc& desc = replay.desc;
  fw_sizes sizes;
  fw_sizes_init(&sizes);
  const DeviceMemory offsets((Replay::kSequences + 1) * sizeof(int64_t));
  desc.seqlens.cu_seqlens = offsets.data();
  desc.seqlens.memory = FW_SEQLENS_DEVICE;
  fw_plan* plan = nullptr;
  ASSERT_EQ(fw_plan_create(&desc, 0, &plan), FW_OK) << fw_last_error();
  ASSERT_EQ(fw_plan_sizes(plan, &sizes), FW_OK);
  const DeviceMemory saved(sizes.saved), space(std::max(sizes.forward, sizes.backward));
  for (const std::vector<int64_t>& lengths : {std::vector<int64_t>{0, 70, 70, 200, 264, 300}, {0, 1, 65, 66, 66, 70}}) {
    const std::vector<float> expected = replay.known(lengths);
    offsets.from_host(lengths.data(), lengths.size() * sizeof(int64_t));
    const std::vector<float> got = replay.results([&] {
      ASSERT_EQ(fw_plan_forward(plan, &replay.in, &replay.out, saved.data(), sizes.saved, space.data(), space.size()),
                FW_OK)
          << fw_last_error();
      ASSERT_EQ(fw_plan_backward(plan, &replay.in, &replay.d, &replay.grads, saved.data(), sizes.saved, space.data(),
                                 space.size()),
                FW_OK)
          << fw_last_error();
    });
    EXPECT_TRUE(Replay::same(got, expected)) << lengths.back() << " tokens";
  }
  fw_plan_destroy(plan);
}

// Offsets that are none reach no memory beyond the call's: they decrease, go beyond T, or a sequence is longer than
// max_seqlen.
TEST(DeviceSeqlens, OffsetsThatAreNoneStayInTheCallsMemory) {
  for (const fw_form form : {FW_FORM_CHUNK, FW_FORM_TOKEN}) {
    Replay replay("gated_deltanet", 100);
    fw_desc& desc = replay.desc;
    desc.form = form;
    fw_sizes sizes;
    fw_sizes_init(&sizes);
    const DeviceMemory offsets((Replay::kSequences + 1) * sizeof(int64_t));
    desc.seqlens.cu_seqlens = offsets.data();
    desc.seqlens.memory = FW_SEQLENS_DEVICE;
    ASSERT_EQ(fw_workspace_query(&desc, &sizes), FW_OK) << fw_last_error();
    const DeviceMemory saved(std::max<size_t>(sizes.saved, 64)), space(std::max(sizes.forward, sizes.backward));
    constexpr int64_t kFar = int64_t{1} << 40;
    for (const std::vector<int64_t>& lengths : {std::vector<int64_t>{0, 90, 40, 200, -7, 300},
                                                {0, 300, 300, 300, 300, 300},
                                                {0, kFar, 2 * kFar, 0, kFar, kFar}}) {
      offsets.from_host(lengths.data(), lengths.size() * sizeof(int64_t));
      void* const kept = sizes.saved > 0 ? saved.data() : nullptr;
      EXPECT_EQ(fw_forward(&desc, &replay.in, &replay.out, kept, sizes.saved, space.data(), space.size()), FW_OK)
          << fw_last_error();
      EXPECT_EQ(fw_backward(&desc, &replay.in, &replay.d, &replay.grads, kept, sizes.saved, space.data(), space.size()),
                FW_OK)
          << fw_last_error();
      device_synchronize();
    }
  }
}

TEST(DeviceSeqlens, WhatTheyCannotBeIsRefused) {
  fw_sizes sizes;
  fw_sizes_init(&sizes);
  const auto message = [&](auto&& change) {
    fw_desc desc = Replay("gated_deltanet", 0).desc;
    desc.seqlens.cu_seqlens = &desc;  // never read
    desc.seqlens.memory = FW_SEQLENS_DEVICE;
    change(desc);
    return fw_workspace_query(&desc, &sizes) == FW_OK ? std::string() : std::string(fw_last_error());
  };
  EXPECT_EQ(message([](fw_desc&) {}), "");
  EXPECT_THAT(message([](fw_desc& d) { d.device = FW_DEVICE_CPU, d.operands = 0; }),
              HasSubstr("seqlens.memory: expected FW_SEQLENS_HOST on the CPU"));
  EXPECT_THAT(message([](fw_desc& d) { d.seqlens.memory = 2; }),
              HasSubstr("seqlens.memory: expected FW_SEQLENS_HOST or FW_SEQLENS_DEVICE"));
  EXPECT_THAT(message([](fw_desc& d) { d.seqlens.max_seqlen = 301; }),
              HasSubstr("max_seqlen: expected 0 to T = 300, got 301"));
  EXPECT_THAT(message([](fw_desc& d) { d.segment = 64; }),
              HasSubstr("segment: expected 0 or -1 with FW_SEQLENS_DEVICE"));
}

}  // namespace
}  // namespace fw::testing
