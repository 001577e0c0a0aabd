// A whole forward and backward inside a captured graph: nothing in a call allocates, waits or reads host memory later
// (packed sequences have tables that come from the host).
#include <gtest/gtest.h>

#include "cuda/device_runs.h"

namespace fw::testing {
namespace {

TEST(Graph, ForwardAndBackwardCanBeCaptured) {
  constexpr int64_t kTokens = 200, kDim = 64;
  const std::vector<int64_t> shape4 = {1, kTokens, 1, kDim}, shape3 = {1, kTokens, 1};
  const size_t rows = kTokens * kDim * sizeof(float), gates = kTokens * sizeof(float);
  const auto make = [](size_t bytes, unsigned seed) {
    std::vector<float> values(bytes / sizeof(float));
    for (float& x : values) {
      seed = seed * 1664525u + 1013904223u;
      x = static_cast<float>(seed >> 8) * 0x1p-24f - 0.5f;
    }
    DeviceMemory memory(bytes);
    memory.from_host(values.data(), bytes);
    return memory;
  };
  const DeviceMemory q = make(rows, 1), k = make(rows, 2), v = make(rows, 3), beta = make(gates, 4),
                     d_o = make(rows, 5);
  std::vector<float> decay(kTokens, -0.1f);
  const DeviceMemory g(gates), o(rows), dq(rows), dk(rows);
  g.from_host(decay.data(), gates);

  fw_desc desc;
  fw_desc_init(&desc);
  ASSERT_EQ(fw_rule_preset("gated_deltanet", &desc.rule), FW_OK);
  desc.device = FW_DEVICE_CUDA;
  desc.operands = FW_BF16;
  desc.B = desc.H = desc.HV = 1;
  desc.T = kTokens;
  desc.K = desc.V = kDim;
  desc.segment = 64;
  std::vector<int64_t> offsets = {0, 70, 70, kTokens};
  desc.seqlens.num_sequences = 3;
  fw_inputs in, grads;
  fw_outputs out, d;
  fw_inputs_init(&in);
  fw_inputs_init(&grads);
  fw_outputs_init(&out);
  fw_outputs_init(&d);
  const auto tensor = [](const DeviceMemory& memory, const std::vector<int64_t>& shape) {
    return fw_tensor_of(memory.data(), FW_F32, static_cast<int>(shape.size()), shape.data());
  };
  in.q = tensor(q, shape4);
  in.k = tensor(k, shape4);
  in.v = tensor(v, shape4);
  in.g = tensor(g, shape3);
  in.beta = tensor(beta, shape3);
  out.o = tensor(o, shape4);
  d.o = tensor(d_o, shape4);
  grads.q = tensor(dq, shape4);
  grads.k = tensor(dk, shape4);
  desc.seqlens.cu_seqlens = offsets.data();
  fw_sizes sizes;
  fw_sizes_init(&sizes);
  ASSERT_EQ(fw_workspace_query(&desc, &sizes), FW_OK) << fw_last_error();
  const DeviceMemory saved(sizes.saved), space(std::max(sizes.forward, sizes.backward));
  const auto call = [&](int, void* stream) {
    desc.stream = stream;
    ASSERT_EQ(fw_forward(&desc, &in, &out, saved.data(), saved.size(), space.data(), space.size()), FW_OK)
        << fw_last_error();
    ASSERT_EQ(fw_backward(&desc, &in, &d, &grads, saved.data(), saved.size(), space.data(), space.size()), FW_OK)
        << fw_last_error();
  };
  const auto results = [&] {
    std::vector<float> values(3 * rows / sizeof(float));
    o.to_host(values.data(), rows);
    dq.to_host(values.data() + rows / sizeof(float), rows);
    dk.to_host(values.data() + 2 * rows / sizeof(float), rows);
    return values;
  };
  call(0, nullptr);
  const std::vector<float> plain = results();
  for (const DeviceMemory* memory : {&o, &dq, &dk, &space, &saved}) memory->fill(0xff);
  // The offsets are overwritten between capture and replay: the graph has its own.
  int captured = 0;
  device_graph_times(0, 1, 1, [&](int i, void* stream) {
    call(i, stream);
    if (!emulated()) offsets.assign(offsets.size(), -1);
    ++captured;
  });
  EXPECT_GE(captured, 1);
  EXPECT_EQ(results(), plain);
}

}  // namespace
}  // namespace fw::testing
