// AdamW on the device beside the host's, to the bit: values whole and split, moments in float and in bf16.
#include <bit>
#include <numeric>

#include "ops/device_check.h"
#include "ops/split_value.h"

namespace fw::testing {
namespace {

// Pieces that begin at odd offsets, of one value and of none, long ones; some decay, some have numbers beside them.
std::vector<ParamPiece> pieces() {
  return {{0, 4096, 1},        {4096, 5, 0, 3},  {4101, 1, 1}, {4102, 0, 0},
          {4103, 2000, 0, 16}, {6112, 16384, 1}, {22496, 7, 1}};
}
constexpr int64_t kSize = 22503, kNumbers = 2016;

struct State {
  std::vector<float> values, m, v;
  std::vector<float> numbers;
};

std::vector<float> random_floats(Random& random, double size, bool positive = false) {
  std::vector<float> out(kSize);
  for (float& x : out) {
    const double value = size * random.normal();
    x = static_cast<float>(positive ? std::abs(value) : value);
  }
  return out;
}

std::vector<float> as_floats(const std::vector<Bf16>& x) {
  std::vector<float> out(x.size());
  widen_bf16(static_cast<int64_t>(x.size()), x.data(), out.data());
  return out;
}

// Three updates; moments begin at zero. from: the elements before this range, as its numbers are counted.
template <class T>
State run(Device& device, bool split, bool narrow, uint64_t first = 0) {
  Context<T> on(device);
  Random random(9);
  const std::vector<float> values = random_floats(random, 1);
  const std::vector<ParamPiece> list = pieces();
  Buffer<ParamPiece> memory(device, static_cast<int64_t>(list.size()));
  memory.write(0, list);
  Buffer<float> whole(device, split ? 0 : kSize), numbers(device, kNumbers), m(device, narrow ? 0 : kSize),
      v(device, narrow ? 0 : kSize), grads(device, kSize);
  Buffer<Bf16> rounded(device, split ? kSize : 0), m_bf16(device, narrow ? kSize : 0),
      v_bf16(device, narrow ? kSize : 0);
  Buffer<uint16_t> low(device, split ? kSize : 0);
  if (split) {
    std::vector<Bf16> upper;
    std::vector<uint16_t> lower;
    for (const float x : values) {
      const SplitValue both = split_value(std::bit_cast<uint32_t>(x));
      upper.push_back({both.rounded});
      lower.push_back(both.low);
    }
    rounded.write(0, upper);
    low.write(0, lower);
  } else {
    whole.write(0, values);
  }
  for (uint64_t t = 1; t <= 3; ++t) {
    grads.write(0, random_floats(random, 0.1));
    AdamWStep<float> step{0.9F, 0.1F, 0.95F, 0.05F, 1e-8F, 0.7F, 0.01F, 1.5F, 0.001F};
    step.seed = 0x123456789abcdefull;
    step.update = t;
    step.first = first;
    on.exec.adamw(step, ParamPieces{memory.data(), memory.size()}, grads.data(),
                  ParamValues<float>{whole.data(), rounded.data(), low.data(), numbers.data()},
                  MomentValues<float>{m.data(), v.data(), m_bf16.data(), v_bf16.data()});
  }
  State state;
  if (split) {
    const std::vector<Bf16> upper = rounded.to_vector();
    const std::vector<uint16_t> lower = low.to_vector();
    for (size_t i = 0; i < upper.size(); ++i)
      state.values.push_back(std::bit_cast<float>(join_value({upper[i].bits, lower[i]})));
  } else {
    state.values = whole.to_vector();
  }
  state.m = narrow ? as_floats(m_bf16.to_vector()) : m.to_vector();
  state.v = narrow ? as_floats(v_bf16.to_vector()) : v.to_vector();
  state.numbers = numbers.to_vector();
  return state;
}

class DeviceOptimizer : public OnDevice {
 protected:
  State run_there(bool split, bool narrow, uint64_t first = 0) {
    Device& device = *GetParam().device;
    return GetParam().type == Type::kBf16 ? run<Bf16>(device, split, narrow, first)
                                          : run<float>(device, split, narrow, first);
  }
  bool splits() const { return GetParam().device != &host_device(); }
};
std::vector<Case> of_floats() {
  std::vector<Case> list = cases();
  std::erase_if(list, [](const Case& one) { return one.type == Type::kDouble; });
  return list;
}
INSTANTIATE_TEST_SUITE_P(Devices, DeviceOptimizer, ::testing::ValuesIn(of_floats()),
                         [](const auto& one) { return one.param.name; });

TEST_P(DeviceOptimizer, HasTheHostsBitsSplitAndWholeWithMomentsOfEitherFormat) {
  for (const bool narrow : {false, true}) {
    const State want = run<float>(host_device(), false, narrow);
    for (const bool split : {false, true}) {
      if (split && !splits()) continue;
      SCOPED_TRACE(::testing::Message() << (split ? "split" : "whole") << (narrow ? ", bf16 moments" : ""));
      const State got = run_there(split, narrow);
      EXPECT_EQ(got.values, want.values);
      EXPECT_EQ(got.m, want.m);
      EXPECT_EQ(got.v, want.v);
      if (!split) continue;
      for (const ParamPiece& piece : pieces()) {
        if (piece.numbers < 0) continue;
        for (int64_t i = 0; i < piece.count; ++i)
          ASSERT_EQ(got.numbers[static_cast<size_t>(piece.numbers + i)],
                    got.values[static_cast<size_t>(piece.begin + i)])
              << i;
      }
      EXPECT_EQ(got.numbers[0], 0) << "what no piece has";
    }
  }
}

// Another range of the same parameters draws other numbers, and moments in bf16 stay near those in float.
TEST_P(DeviceOptimizer, MomentsInBf16AreNearAndTheirRoundingIsOfTheIndex) {
  const State wide = run_there(splits(), false), narrow = run_there(splits(), true),
              elsewhere = run_there(splits(), true, 1 << 20);
  EXPECT_NE(narrow.m, elsewhere.m);
  double error = 0, size = 0;
  for (size_t i = 0; i < wide.m.size(); ++i) {
    // Three roundings, each of less than a unit (2^-7 of the value and of what was before it).
    ASSERT_NEAR(narrow.v[i], wide.v[i], 3 * 0x1p-7 * wide.v[i]) << i;
    error += static_cast<double>(narrow.m[i] - wide.m[i]);
    size += std::abs(static_cast<double>(wide.m[i]));
  }
  EXPECT_LT(std::abs(error), 1e-4 * size) << "the mean of the errors";
}

}  // namespace
}  // namespace fw::testing
