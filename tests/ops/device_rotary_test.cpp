// Rotary position embedding on every device against the host in double: alone, and of heads that are normed before.
#include "ops/device_list.h"

namespace fw::testing {
namespace {

class DeviceRotary : public OnDevice {};
INSTANTIATE_TEST_SUITE_P(Devices, DeviceRotary, ::testing::ValuesIn(cases()),
                         [](const auto& one) { return one.param.name; });

TEST_P(DeviceRotary, Alone) {
  const struct {
    int64_t heads, dim, rotated, pad;
  } shapes[] = {{2, 128, 128, 0}, {3, 32, 16, 8}, {2, 6, 4, 1}, {1, 64, 2, 0}};
  for (const auto& s : shapes) {
    for (const Rotation turn : {Rotation::kForward, Rotation::kBackward}) {
      compare(GetParam(), [&](auto& run) {
        const SeqLayout sequences({0, 3, 3, 70});
        const Pass pass(run.on.device, sequences, {1000000, 0, 77});
        auto x = run.matrix(70, s.heads * s.dim, s.pad);
        run.on.exec.rotary(x.mat(), s.dim, s.rotated, 10000.0, pass.layout, turn);
        run.keep("x", x);
      });
    }
  }
}

// Norm and rotation of query and key heads: of the kernel for both, and of heads that it leaves to the operations.
TEST_P(DeviceRotary, OfNormedHeads) {
  const struct {
    int64_t heads, kv_heads, dim, rotated, pad;
  } shapes[] = {{4, 2, 256, 64, 0}, {3, 1, 64, 64, 8}, {2, 2, 24, 0, 0}, {2, 1, 6, 4, 1}};
  for (const auto& s : shapes) {
    SCOPED_TRACE(::testing::Message() << s.heads << " heads of " << s.dim);
    compare(
        GetParam(),
        [&](auto& run) {
          using W = typename std::decay_t<decltype(run)>::W;
          const SeqLayout sequences = SeqLayout::uniform(3, 1);
          const Pass pass(run.on.device, sequences, {1000000, 0, 77});
          auto q = run.matrix(3, s.heads * s.dim, s.pad, -20, 20), k = run.matrix(3, s.kv_heads * s.dim, s.pad);
          Buffer<W> q_norm = run.parameters(s.dim, 0.2, 2), k_norm = run.parameters(s.dim, 0.2, 2);
          const AttentionShape shape{s.heads, s.kv_heads, s.dim, 0, 1.0, 10000.0, s.rotated};
          run.on.exec.normed_rotary(q.mat(), k.mat(), q_norm.data(), k_norm.data(), W(1e-2), shape, pass.layout);
          run.keep("q", q);
          run.keep("k", k);
        },
        8e-3);  // rounded between the two
  }
}

}  // namespace
}  // namespace fw::testing
