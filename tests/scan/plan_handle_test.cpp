// fw_plan: the same bits as calls with a descriptor, from many threads, and what it refuses.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "base/threads.h"
#include "fastweight/fastweight.h"

namespace fw {
namespace {

using ::testing::HasSubstr;

// gated_deltanet of two sequences of 40 tokens; every call has its own results.
struct Call {
  static constexpr int64_t kTokens = 40, kDim = 16;
  Call() {
    fw_desc_init(&desc);
    EXPECT_EQ(fw_rule_preset("gated_deltanet", &desc.rule), FW_OK);
    desc.B = 2, desc.T = kTokens, desc.H = desc.HV = 2, desc.K = desc.V = kDim;
    fw_inputs_init(&in);
    fw_outputs_init(&out);
    fw_outputs_init(&d);
    fw_inputs_init(&grads);
    const int64_t rows[4] = {2, kTokens, 2, kDim}, gates[3] = {2, kTokens, 2};
    for (size_t i = 0; i < numbers.size(); ++i) numbers[i] = -0.01f * static_cast<float>(i % 37);
    in.q = in.k = in.v = d.o = fw_tensor_of(numbers.data(), FW_F32, 4, rows);
    in.g = in.beta = fw_tensor_of(numbers.data(), FW_F32, 3, gates);
    out.o = fw_tensor_of(o.data(), FW_F32, 4, rows);
    grads.q = fw_tensor_of(dq.data(), FW_F32, 4, rows);
    grads.g = fw_tensor_of(dg.data(), FW_F32, 3, gates);
  }
  std::vector<float> numbers = std::vector<float>(2 * kTokens * 2 * kDim), o = numbers, dq = numbers,
                     dg = std::vector<float>(2 * kTokens * 2);
  fw_desc desc;
  fw_inputs in, grads;
  fw_outputs out, d;
};

struct Space {
  explicit Space(size_t bytes) : bytes_(bytes), memory_(bytes + 64) {
    data = memory_.data();
    size_t room = memory_.size();
    data = std::align(64, bytes_, data, room);
  }
  size_t size() const { return bytes_; }
  void* data = nullptr;

 private:
  size_t bytes_;
  std::vector<unsigned char> memory_;
};

struct Destroy {
  void operator()(fw_plan* plan) const { fw_plan_destroy(plan); }
};
using Plan = std::unique_ptr<fw_plan, Destroy>;
Plan plan_of(const fw_desc& desc, bool step) {
  fw_plan* plan = nullptr;
  EXPECT_EQ(fw_plan_create(&desc, step ? 1 : 0, &plan), FW_OK) << fw_last_error();
  return Plan(plan);
}
fw_sizes sizes_of(const Plan& plan) {
  fw_sizes sizes;
  fw_sizes_init(&sizes);
  EXPECT_EQ(fw_plan_sizes(plan.get(), &sizes), FW_OK);
  return sizes;
}

void run(const Plan& plan, Call& call) {
  const fw_sizes sizes = sizes_of(plan);
  const Space space(std::max(sizes.forward, sizes.backward)), saved(sizes.saved);
  ASSERT_EQ(fw_plan_forward(plan.get(), &call.in, &call.out, saved.data, saved.size(), space.data, space.size()), FW_OK)
      << fw_last_error();
  ASSERT_EQ(
      fw_plan_backward(plan.get(), &call.in, &call.d, &call.grads, saved.data, saved.size(), space.data, space.size()),
      FW_OK)
      << fw_last_error();
}

TEST(PlanHandle, GivesTheBitsOfCallsWithADescriptor) {
  Call direct;
  fw_sizes sizes;
  fw_sizes_init(&sizes);
  ASSERT_EQ(fw_workspace_query(&direct.desc, &sizes), FW_OK);
  const Space space(std::max(sizes.forward, sizes.backward)), saved(sizes.saved);
  ASSERT_EQ(fw_forward(&direct.desc, &direct.in, &direct.out, saved.data, saved.size(), space.data, space.size()),
            FW_OK);
  ASSERT_EQ(fw_backward(&direct.desc, &direct.in, &direct.d, &direct.grads, saved.data, saved.size(), space.data,
                        space.size()),
            FW_OK);

  std::vector<Call> calls(4);
  const Plan plan = plan_of(calls[0].desc, false);
  EXPECT_EQ(sizes_of(plan).saved, sizes.saved);
  calls[0].desc.T = 1;  // the plan has its own
  std::vector<std::thread> threads;
  threads.reserve(calls.size());
  for (Call& call : calls) threads.emplace_back([&] { run(plan, call); });
  for (std::thread& thread : threads) thread.join();
  for (const Call& call : calls) {
    EXPECT_EQ(call.o, direct.o);
    EXPECT_EQ(call.dq, direct.dq);
    EXPECT_EQ(call.dg, direct.dg);
  }
}

TEST(PlanHandle, StepsWithPlansMadeForThem) {
  Call direct, planned;
  fw_sizes sizes;
  fw_sizes_init(&sizes);
  ASSERT_EQ(fw_workspace_query(&direct.desc, &sizes), FW_OK);
  const Plan plan = plan_of(planned.desc, true);
  const Space space(std::max(sizes.forward, sizes_of(plan).forward));
  ASSERT_EQ(fw_step(&direct.desc, &direct.in, &direct.out, space.data, space.size()), FW_OK);
  ASSERT_EQ(fw_plan_step(plan.get(), &planned.in, &planned.out, space.data, space.size()), FW_OK) << fw_last_error();
  EXPECT_EQ(planned.o, direct.o);
  EXPECT_EQ(fw_plan_forward(plan.get(), &planned.in, &planned.out, nullptr, 0, space.data, space.size()),
            FW_ERROR_ARGUMENT);
  EXPECT_THAT(fw_last_error(), HasSubstr("plan: expected one that was created without `step`"));
}

TEST(PlanHandle, AStepFitsTheWorkspaceOfItsDescriptor) {
  for (const char* rule : {"gated_deltanet", "kda", "mamba2", "retnet", "precond_gated_deltanet", "dplr"}) {
    for (const fw_device device : {FW_DEVICE_CPU, FW_DEVICE_CUDA}) {
      for (const int32_t io : {int32_t{FW_F32}, int32_t{FW_BF16}, int32_t{FW_F16}}) {
        for (const int64_t tokens : {1, 5}) {
          fw_desc desc;
          fw_desc_init(&desc);
          ASSERT_EQ(fw_rule_preset(rule, &desc.rule), FW_OK);
          desc.device = device;
          desc.B = 3, desc.T = tokens, desc.H = desc.HV = 2, desc.K = desc.V = 64;
          desc.operands = FW_BF16;
          if (io != FW_F32) desc.io_dtype = io;
          fw_sizes sizes;
          fw_sizes_init(&sizes);
          ASSERT_EQ(fw_workspace_query(&desc, &sizes), FW_OK) << fw_last_error();
          EXPECT_GE(sizes.forward, sizes_of(plan_of(desc, true)).forward)
              << rule << ", device " << device << ", type " << io << ", " << tokens << " tokens";
        }
      }
    }
  }
}

TEST(PlanHandle, RefusesWhatItCannotDo) {
  Call call;
  fw_plan* plan = nullptr;
  call.desc.K = 0;
  EXPECT_EQ(fw_plan_create(&call.desc, 0, &plan), FW_ERROR_ARGUMENT);
  EXPECT_EQ(plan, nullptr);
  EXPECT_EQ(fw_plan_create(&call.desc, 0, nullptr), FW_ERROR_ARGUMENT);
  EXPECT_EQ(fw_plan_step(nullptr, &call.in, &call.out, nullptr, 0), FW_ERROR_ARGUMENT);
  fw_plan_destroy(nullptr);
  call.desc.K = Call::kDim;
  call.desc.device_number = -2;
  EXPECT_EQ(fw_plan_create(&call.desc, 0, &plan), FW_ERROR_ARGUMENT);
  EXPECT_THAT(fw_last_error(), HasSubstr("device_number"));
}

// A workspace has a part for every thread that there was: more threads later change neither the workspace nor the bits.
TEST(PlanHandle, KeepsTheThreadsThatItWasMadeWith) {
  Call call;
  set_num_threads(1);
  const Plan plan = plan_of(call.desc, false);
  run(plan, call);
  const std::vector<float> alone = call.o;
  set_num_threads(3);
  call.o.assign(call.o.size(), 7);
  run(plan, call);
  EXPECT_EQ(call.o, alone);
  set_num_threads(0);
}

// One thread calls with what the query asked for, another changes the number of threads all the while. A call runs with
// what it was planned for or refuses the workspace, and never writes after it.
TEST(PlanHandle, OtherThreadsMaySetTheNumberOfThreadsMeanwhile) {
  Call call;
  std::atomic<bool> stop = false;
  set_num_threads(1);
  std::thread flips([&] {
    while (!stop) {
      fw_set_threads(1);
      std::this_thread::yield();
      fw_set_threads(8);
    }
  });
  constexpr size_t kBehind = size_t{1} << 20;
  int refused = 0;
  for (int i = 0; i < 2000; ++i) {
    fw_sizes sizes;
    fw_sizes_init(&sizes);
    ASSERT_EQ(fw_workspace_query(&call.desc, &sizes), FW_OK);
    const Space space(sizes.forward + kBehind);
    const fw_status status = fw_forward(&call.desc, &call.in, &call.out, nullptr, 0, space.data, sizes.forward);
    refused += status == FW_OK ? 0 : 1;
    if (status != FW_OK) {
      ASSERT_EQ(status, FW_ERROR_WORKSPACE) << fw_last_error();
    }
    const auto* bytes = static_cast<const unsigned char*>(space.data) + sizes.forward;
    ASSERT_TRUE(std::all_of(bytes, bytes + kBehind, [](unsigned char c) { return c == 0; }))
        << "call " << i << " wrote behind its workspace";
  }
  stop = true;
  flips.join();
  set_num_threads(0);
  EXPECT_LT(refused, 2000);
}

}  // namespace
}  // namespace fw
