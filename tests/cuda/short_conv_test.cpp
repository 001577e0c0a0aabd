// fw_short_conv_* on the device against the same calls on the CPU: sequences of one length and packed, offsets of the
// host and of the device, float32 and bfloat16, steps.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "base/bf16.h"
#include "base/device.h"
#include "base/random.h"
#include "fastweight/fastweight.h"

namespace fw {
namespace {

enum class Offsets { kNone, kHost, kDevice };

struct Problem {
  int64_t B, T, D, W;
  Offsets where = Offsets::kNone;
  std::vector<int64_t> offsets = {};
  bool step = false;
  int64_t sequences() const { return where == Offsets::kNone ? B : static_cast<int64_t>(offsets.size()) - 1; }
  int64_t rows() const { return B * T; }
};

using Floats = std::vector<float>;
Floats random_floats(Random& random, int64_t n) {
  Floats values(static_cast<size_t>(n));
  for (float& x : values) x = static_cast<float>(random.normal());
  // Exact in bfloat16, so that both devices see the same numbers.
  round_to_bf16_values(n, values.data(), values.data());
  return values;
}

// Numbers in device memory, as float32 or bfloat16.
class OnDevice {
 public:
  OnDevice(const Floats& values, bool bf16) : count_(values.size()), bf16_(bf16), memory_(bytes()) {
    std::vector<Bf16> narrow(values.size());
    round_to_bf16(static_cast<int64_t>(values.size()), values.data(), narrow.data());
    if (!values.empty()) memory_.from_host(bf16 ? static_cast<const void*>(narrow.data()) : values.data(), bytes());
  }
  fw_tensor tensor(std::initializer_list<int64_t> shape) const {
    return fw_tensor_of(count_ == 0 ? nullptr : memory_.data(), bf16_ ? FW_BF16 : FW_F32,
                        static_cast<int>(shape.size()), shape.begin());
  }
  Floats values() const {
    Floats out(count_);
    if (count_ == 0) return out;
    if (!bf16_) {
      memory_.to_host(out.data(), bytes());
      return out;
    }
    std::vector<Bf16> narrow(count_);
    memory_.to_host(narrow.data(), bytes());
    widen_bf16(static_cast<int64_t>(count_), narrow.data(), out.data());
    return out;
  }

 private:
  size_t bytes() const { return count_ * (bf16_ ? sizeof(Bf16) : sizeof(float)); }
  size_t count_;
  bool bf16_;
  DeviceMemory memory_;
};

void expect_near(const Floats& got, const Floats& want, float tolerance, const char* what) {
  float scale = 1e-3F;
  for (const float w : want) scale = std::max(scale, std::abs(w));
  ASSERT_EQ(got.size(), want.size()) << what;
  for (size_t i = 0; i < want.size(); ++i) ASSERT_NEAR(got[i], want[i], tolerance * scale) << what << " at " << i;
}

struct Host {
  Floats y, state, dx, dweight, dbias;
};

fw_short_conv conv_of(const Problem& p) {
  fw_short_conv conv;
  fw_short_conv_init(&conv);
  conv.B = p.B, conv.T = p.T, conv.D = p.D, conv.W = p.W;
  if (p.where != Offsets::kNone) {
    conv.seqlens.cu_seqlens = p.offsets.data();
    conv.seqlens.num_sequences = p.sequences();
  }
  return conv;
}

fw_tensor host_tensor(const Floats& values, std::initializer_list<int64_t> shape) {
  return fw_tensor_of(values.empty() ? nullptr : const_cast<float*>(values.data()), FW_F32,
                      static_cast<int>(shape.size()), shape.begin());
}

void check(const Problem& p, bool bf16) {
  Random random(11);
  const int64_t N = p.sequences(), states = N * (p.W - 1) * p.D;
  const Floats x = random_floats(random, p.rows() * p.D), weight = random_floats(random, p.D * p.W),
               bias = random_floats(random, p.D), state = random_floats(random, states),
               dy = random_floats(random, p.rows() * p.D);
  Host want;
  want.y = want.dx = x, want.state = state, want.dweight = weight, want.dbias = bias;
  fw_short_conv conv = conv_of(p);
  fw_short_conv_tensors t, d;
  fw_short_conv_tensors_init(&t);
  fw_short_conv_tensors_init(&d);
  t.x = host_tensor(x, {p.B, p.T, p.D}), t.weight = host_tensor(weight, {p.D, p.W}), t.bias = host_tensor(bias, {p.D});
  t.initial_state = host_tensor(state, {N, p.W - 1, p.D});
  d.y = host_tensor(dy, {p.B, p.T, p.D}), d.x = host_tensor(want.dx, {p.B, p.T, p.D});
  d.weight = host_tensor(want.dweight, {p.D, p.W}), d.bias = host_tensor(want.dbias, {p.D});
  ASSERT_EQ(fw_short_conv_backward(&conv, &t, &d, nullptr, 0), FW_OK) << fw_last_error();
  t.y = host_tensor(want.y, {p.B, p.T, p.D}), t.final_state = host_tensor(want.state, {N, p.W - 1, p.D});
  ASSERT_EQ(fw_short_conv_forward(&conv, &t, nullptr, 0), FW_OK) << fw_last_error();

  conv.device = FW_DEVICE_CUDA;
  conv.dtype = bf16 ? FW_BF16 : FW_F32;
  const DeviceMemory offsets(sizeof(int64_t) * std::max<size_t>(p.offsets.size(), 1));
  if (p.where == Offsets::kDevice) {
    offsets.from_host(p.offsets.data(), sizeof(int64_t) * p.offsets.size());
    conv.seqlens.memory = FW_SEQLENS_DEVICE;
    conv.seqlens.cu_seqlens = offsets.data();
  }
  fw_sizes sizes;
  fw_sizes_init(&sizes);
  ASSERT_EQ(fw_short_conv_query(&conv, &sizes), FW_OK) << fw_last_error();
  const DeviceMemory space(std::max({sizes.forward, sizes.backward, size_t{64}}));
  space.fill(0xff);
  const OnDevice xs(x, bf16), ws(weight, false), bs(bias, false), ss(state, bf16), dys(dy, bf16), ys(want.y, bf16),
      dxs(want.dx, bf16), dws(weight, false), dbs(bias, false), fs(state, bf16);
  t.x = xs.tensor({p.B, p.T, p.D}), t.weight = ws.tensor({p.D, p.W}), t.bias = bs.tensor({p.D});
  t.initial_state = ss.tensor({N, p.W - 1, p.D});
  t.y.data = t.final_state.data = nullptr;
  d.y = dys.tensor({p.B, p.T, p.D}), d.x = dxs.tensor({p.B, p.T, p.D});
  d.weight = dws.tensor({p.D, p.W}), d.bias = dbs.tensor({p.D});
  EXPECT_EQ(fw_short_conv_backward(&conv, &t, &d, space.data(), 0), FW_ERROR_WORKSPACE);
  ASSERT_EQ(fw_short_conv_backward(&conv, &t, &d, space.data(), space.size()), FW_OK) << fw_last_error();
  t.y = ys.tensor({p.B, p.T, p.D});
  if (p.step) {
    ASSERT_EQ(fw_short_conv_step(&conv, &t, space.data(), space.size()), FW_OK) << fw_last_error();
  } else {
    t.final_state = fs.tensor({N, p.W - 1, p.D});
    ASSERT_EQ(fw_short_conv_forward(&conv, &t, space.data(), space.size()), FW_OK) << fw_last_error();
  }
  const float row = bf16 ? 8e-3F : 1e-5F;
  expect_near(ys.values(), want.y, row, "y");
  expect_near((p.step ? ss : fs).values(), want.state, 0, "final_state");
  expect_near(dxs.values(), want.dx, row, "gradient of x");
  expect_near(dws.values(), want.dweight, 2e-5F, "gradient of weight");
  expect_near(dbs.values(), want.dbias, 2e-5F, "gradient of bias");
}

TEST(DeviceShortConv, IsThatOfTheCpu) {
  for (const bool bf16 : {false, true}) {
    check({2, 70, 24, 4}, bf16);
    check({1, 9, 7, 2}, bf16);
    check({3, 1, 16, 4, Offsets::kNone, {}, true}, bf16);
    for (const Offsets where : {Offsets::kHost, Offsets::kDevice})
      check({1, 150, 20, 4, where, {0, 0, 1, 80, 82, 150, 150}}, bf16);
  }
}

}  // namespace
}  // namespace fw
