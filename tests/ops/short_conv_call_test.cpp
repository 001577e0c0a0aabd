// fw_short_conv_* on the CPU: values and gradients against a formula in plain double, the engine's operation to the
// bit, sequences packed and cut, steps, and what the calls refuse.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>

#include <cmath>
#include <functional>
#include <string>
#include <vector>

#include "fastweight/fastweight.h"
#include "op_check.h"

namespace fw::testing {
namespace {

using ::testing::StartsWith;

// B sequences of T tokens, or those of `offsets` packed.
struct ConvCall {
  int64_t B, T, D, W;
  bool bias = true, state = true;
  std::vector<int64_t> offsets = {};

  int64_t sequences() const { return offsets.empty() ? B : static_cast<int64_t>(offsets.size()) - 1; }
  int64_t begin(int64_t n) const { return offsets.empty() ? n * T : offsets[static_cast<size_t>(n)]; }
  int64_t end(int64_t n) const { return offsets.empty() ? (n + 1) * T : offsets[static_cast<size_t>(n) + 1]; }
  int64_t rows() const { return B * T; }
  int64_t state_size() const { return sequences() * (W - 1) * D; }

  fw_short_conv conv(fw_dtype dtype) const {
    fw_short_conv c;
    fw_short_conv_init(&c);
    c.dtype = dtype;
    c.B = B, c.T = T, c.D = D, c.W = W;
    if (!offsets.empty()) c.seqlens.cu_seqlens = offsets.data(), c.seqlens.num_sequences = sequences();
    return c;
  }

  // x, weight, initial_state, bias; empty where the call has none.
  Values<double> inputs(Random& random) const {
    Values<double> in{random_values(random, rows() * D), random_values(random, D * W),
                      random_values(random, state_size()), random_values(random, D)};
    if (!state) in[2].clear();
    if (!bias) in[3].clear();
    return in;
  }
  std::vector<bool> accumulates() const { return {false, false, false, false}; }

  Values<double> formula(const Values<double>& in) const {
    std::vector<double> y(in[0].size());
    const auto at = [&](int64_t n, int64_t position, int64_t c) {
      if (position >= 0) return in[0][static_cast<size_t>((begin(n) + position) * D + c)];
      return state ? in[2][static_cast<size_t>((n * (W - 1) + W - 1 + position) * D + c)] : 0.0;
    };
    for (int64_t n = 0; n < sequences(); ++n) {
      for (int64_t t = 0; t < end(n) - begin(n); ++t) {
        for (int64_t c = 0; c < D; ++c) {
          double p = bias ? in[3][static_cast<size_t>(c)] : 0;
          for (int64_t j = 0; j < W; ++j) p += in[1][static_cast<size_t>(c * W + W - 1 - j)] * at(n, t - j, c);
          y[static_cast<size_t>((begin(n) + t) * D + c)] = p / (1 + std::exp(-p));
        }
      }
    }
    return {y};
  }

  template <class T_>
  static fw_tensor tensor(const std::vector<T_>& values, std::initializer_list<int64_t> shape) {
    const fw_dtype dtype = sizeof(T_) == sizeof(double) ? FW_F64 : FW_F32;
    fw_tensor t = fw_tensor_of(const_cast<T_*>(values.data()), dtype, static_cast<int>(shape.size()), shape.begin());
    if (values.empty()) t.data = nullptr;
    return t;
  }
  // Rows of x and y in a wider matrix.
  template <class T_>
  fw_tensor rows_of(const Strided<T_>& values) const {
    const int64_t shape[3] = {B, T, D};
    const Mat<const T_> m = values.view();
    fw_tensor t = fw_tensor_of(const_cast<T_*>(m.data), sizeof(T_) == sizeof(double) ? FW_F64 : FW_F32, 3, shape);
    t.stride[1] = m.stride, t.stride[0] = T * m.stride;
    return t;
  }
  template <class T_>
  fw_short_conv_tensors sources(const Values<T_>& in, const Strided<T_>& x) const {
    fw_short_conv_tensors t;
    fw_short_conv_tensors_init(&t);
    t.x = rows_of(x);
    t.weight = tensor(in[1], {D, W});
    t.bias = tensor(in[3], {D});
    t.initial_state = tensor(in[2], {sequences(), W - 1, D});
    return t;
  }

  template <class T_>
  Values<T_> forward(const Values<T_>& in) const {
    const Strided<T_> x(rows(), D, in[0]);
    Strided<T_> y(rows(), D);
    std::vector<T_> final_state(static_cast<size_t>(state_size()));
    fw_short_conv_tensors t = sources(in, x);
    t.y = rows_of(y);
    t.final_state = tensor(final_state, {sequences(), W - 1, D});
    const fw_short_conv c = conv(sizeof(T_) == sizeof(double) ? FW_F64 : FW_F32);
    EXPECT_EQ(fw_short_conv_forward(&c, &t, nullptr, 0), FW_OK) << fw_last_error();
    last_state<T_>() = final_state;
    return {y.values()};
  }
  template <class T_>
  Values<T_> backward(const Values<T_>& in, const Values<T_>& douts, const Values<T_>& before) const {
    const Strided<T_> x(rows(), D, in[0]), dy(rows(), D, douts[0]);
    Strided<T_> dx(rows(), D);
    std::vector<T_> dweight(before[1].begin(), before[1].end()), dbias(before[3].begin(), before[3].end());
    const fw_short_conv_tensors t = sources(in, x);
    fw_short_conv_tensors d;
    fw_short_conv_tensors_init(&d);
    d.y = rows_of(dy), d.x = rows_of(dx);
    d.weight = tensor(dweight, {D, W});
    d.bias = tensor(dbias, {D});
    const fw_short_conv c = conv(sizeof(T_) == sizeof(double) ? FW_F64 : FW_F32);
    EXPECT_EQ(fw_short_conv_backward(&c, &t, &d, nullptr, 0), FW_OK) << fw_last_error();
    return {dx.values(), dweight, {}, dbias};
  }
  // The final state of the last forward.
  template <class T_>
  static std::vector<T_>& last_state() {
    static std::vector<T_> values;
    return values;
  }
};

TEST(ShortConvCall, ValuesAndGradients) {
  for (const bool extras : {false, true}) {
    for (const int64_t W : {1, 2, 4, 7}) check_op(ConvCall{2, 6, 5, W, extras, extras}, "of two sequences");
    check_op(ConvCall{1, 11, 24, 4, extras, extras, {0, 0, 5, 5, 6, 8, 11, 11}}, "packed");
  }
}

TEST(ShortConvCall, HasTheBitsOfTheEnginesOperation) {
  const ConvCall call{1, 300, 48, 4, true, true, {0, 3, 3, 170, 300}};
  Random random(3);
  const Values<float> in = cast<float>(call.inputs(random));
  const std::vector<float> got = call.forward<float>(in)[0], state = ConvCall::last_state<float>();
  std::vector<float> y(got.size()), tails(state.size());
  host_ops<float>().short_conv_forward(host_exec<float>(), {in[0].data(), 300, 48}, in[1].data(), in[3].data(), 4,
                                       SeqLayout(call.offsets), in[2].data(), tails.data(), {y.data(), 300, 48});
  EXPECT_TRUE(same_bits<float>({got, state}, {y, tails}));
}

TEST(ShortConvCall, ASequenceHasTheSameBitsAloneAndCutAndStepByStep) {
  const ConvCall whole{1, 9, 7, 4, true, false};
  Random random(5);
  const Values<float> in = cast<float>(whole.inputs(random));
  const std::vector<float> y = whole.forward<float>(in)[0], final_state = ConvCall::last_state<float>();
  const auto part = [&](int64_t from, int64_t to) {
    return std::vector<float>(in[0].begin() + from * 7, in[0].begin() + to * 7);
  };
  for (int64_t cut = 0; cut <= 9; ++cut) {
    std::vector<float> pieces, state(3 * 7, 0.0F);
    for (const auto& [from, to] : {std::pair(int64_t{0}, cut), std::pair(cut, int64_t{9})}) {
      const ConvCall piece{1, to - from, 7, 4};
      const Values<float> values = piece.forward<float>({part(from, to), in[1], state, in[3]});
      pieces.insert(pieces.end(), values[0].begin(), values[0].end());
      state = ConvCall::last_state<float>();
    }
    EXPECT_EQ(pieces, y) << "cut after " << cut;
    EXPECT_EQ(state, final_state) << "cut after " << cut;
  }
  // Two sequences that are the same one.
  std::vector<float> state(2 * 3 * 7, 0.0F);
  const ConvCall one{2, 1, 7, 4};
  for (int64_t t = 0; t < 9; ++t) {
    std::vector<float> both = part(t, t + 1), out(2 * 7);
    both.insert(both.end(), both.begin(), both.begin() + 7);
    fw_short_conv_tensors tensors;
    fw_short_conv_tensors_init(&tensors);
    tensors.x = ConvCall::tensor(both, {2, 1, 7}), tensors.y = ConvCall::tensor(out, {2, 1, 7});
    tensors.weight = ConvCall::tensor(in[1], {7, 4}), tensors.bias = ConvCall::tensor(in[3], {7});
    tensors.initial_state = ConvCall::tensor(state, {2, 3, 7});
    const fw_short_conv conv = one.conv(FW_F32);
    ASSERT_EQ(fw_short_conv_step(&conv, &tensors, nullptr, 0), FW_OK) << fw_last_error();
    for (int64_t c = 0; c < 14; ++c) EXPECT_EQ(out[static_cast<size_t>(c)], y[static_cast<size_t>(t * 7 + c % 7)]) << t;
  }
  for (size_t i = 0; i < state.size(); ++i) EXPECT_EQ(state[i], final_state[i % 21]) << i;
}

TEST(ShortConvCall, SaysWhichArgumentIsWrong) {
  const ConvCall call{2, 3, 4, 3};
  Random random(7);
  const Values<float> in = cast<float>(call.inputs(random));
  const Strided<float> x(6, 4, in[0]);
  Strided<float> y(6, 4), dx(6, 4);
  std::vector<float> dweight(12), dbias(4), state(2 * 2 * 4);
  using Conv = fw_short_conv;
  using Tensors = fw_short_conv_tensors;
  const auto message = [&](const std::function<void(Conv&, Tensors&, Tensors&)>& change, char kind) -> std::string {
    Conv c = call.conv(FW_F32);
    Tensors t = call.sources(in, x), d;
    fw_short_conv_tensors_init(&d);
    if (kind != 'b') t.y = call.rows_of(y);
    d.y = d.x = call.rows_of(dx), d.weight = ConvCall::tensor(dweight, {4, 3}), d.bias = ConvCall::tensor(dbias, {4});
    change(c, t, d);
    const fw_status status = kind == 'b'   ? fw_short_conv_backward(&c, &t, &d, nullptr, 0)
                             : kind == 's' ? fw_short_conv_step(&c, &t, nullptr, 0)
                                           : fw_short_conv_forward(&c, &t, nullptr, 0);
    return status == FW_OK ? "" : fw_last_error();
  };
  EXPECT_EQ(message([](Conv&, Tensors&, Tensors&) {}, 'f'), "");
  EXPECT_EQ(message([](Conv&, Tensors&, Tensors&) {}, 'b'), "");
  struct Case {
    const char* expected;
    std::function<void(Conv&, Tensors&, Tensors&)> change;
    char kind = 'f';
  };
  const int64_t decreasing[] = {0, 2, 1}, late[] = {1, 3}, far[] = {0, 4};
  const auto packed = [](Conv& c, const int64_t* offsets, int64_t count) {
    c.B = 1, c.T = 3, c.seqlens.cu_seqlens = offsets, c.seqlens.num_sequences = count;
  };
  const Case cases[] = {
      {"conv: size: expected at most ", [](Conv& c, Tensors&, Tensors&) { c.size += 8; }},
      {"tensors: size: expected at most ", [](Conv&, Tensors& t, Tensors&) { t.size += 8; }},
      {"conv: reserved: expected 0, got 1", [](Conv& c, Tensors&, Tensors&) { c.reserved = 1; }},
      {"conv: dtype: expected FW_F32 or FW_F64 on the CPU, got FW_BF16",
       [](Conv& c, Tensors&, Tensors&) { c.dtype = FW_BF16; }},
      {"conv: device: expected FW_DEVICE_CPU or FW_DEVICE_CUDA, got 5",
       [](Conv& c, Tensors&, Tensors&) { c.device = 5; }},
      {"conv: device_number: expected -1 ", [](Conv& c, Tensors&, Tensors&) { c.device_number = -2; }},
      {"conv: B: expected 0 to ", [](Conv& c, Tensors&, Tensors&) { c.B = -1; }},
      {"conv: T: expected at most ", [](Conv& c, Tensors&, Tensors&) { c.B = c.T = int64_t{1} << 30; }},
      {"conv: D: expected 1 to 16777216, got 0", [](Conv& c, Tensors&, Tensors&) { c.D = 0; }},
      {"conv: W: expected 1 to 256, got 257", [](Conv& c, Tensors&, Tensors&) { c.W = 257; }},
      {"conv: W: expected 1 to 8, got 9", [](Conv& c, Tensors&, Tensors&) { c.device = FW_DEVICE_CUDA, c.W = 9; }},
      {"conv: B: expected 1 with cu_seqlens, got 2", [&](Conv& c, Tensors&, Tensors&) { packed(c, far, 1), c.B = 2; }},
      {"conv: seqlens.cu_seqlens[0]: expected 0, got 1", [&](Conv& c, Tensors&, Tensors&) { packed(c, late, 1); }},
      {"conv: seqlens.cu_seqlens[1]: expected T = 3, got 4", [&](Conv& c, Tensors&, Tensors&) { packed(c, far, 1); }},
      {"conv: seqlens.cu_seqlens[2]: expected at least 2 (offsets do not decrease), got 1",
       [&](Conv& c, Tensors&, Tensors&) { packed(c, decreasing, 2); }},
      {"conv: seqlens.bits: expected 32 or 64, got 16",
       [&](Conv& c, Tensors&, Tensors&) { packed(c, far, 1), c.seqlens.bits = 16; }},
      {"conv: seqlens.memory: expected FW_SEQLENS_HOST on the CPU, got FW_SEQLENS_DEVICE",
       [&](Conv& c, Tensors&, Tensors&) { packed(c, far, 1), c.seqlens.memory = FW_SEQLENS_DEVICE; }},
      {"x: expected a tensor, got none", [](Conv&, Tensors& t, Tensors&) { t.x.data = nullptr; }},
      {"x: dtype: expected FW_F32, got FW_F64", [](Conv&, Tensors& t, Tensors&) { t.x.dtype = FW_F64; }},
      {"x: shape: expected [2, 3, 4], got [2, 3, 5]", [](Conv&, Tensors& t, Tensors&) { t.x.shape[2] = 5; }},
      {"x: stride[2]: expected 1 (contiguous), got 2", [](Conv&, Tensors& t, Tensors&) { t.x.stride[2] = 2; }},
      {"x: stride[1]: expected D = 4 or more elements, got 3", [](Conv&, Tensors& t, Tensors&) { t.x.stride[1] = 3; }},
      {"x: stride[0]: expected 21, that of all tokens, got 22",
       [](Conv&, Tensors& t, Tensors&) { t.x.stride[0] = 22; }},
      {"weight: rank: expected 2, got 3", [](Conv&, Tensors& t, Tensors&) { t.weight.rank = 3; }},
      {"weight: stride[0]: expected 3 (contiguous), got 4",
       [](Conv&, Tensors& t, Tensors&) { t.weight.stride[0] = 4; }},
      {"bias: shape: expected [4], got [3]", [](Conv&, Tensors& t, Tensors&) { t.bias.shape[0] = 3; }},
      {"initial_state: shape: expected [2, 2, 4], got [2, 3, 4]",
       [](Conv&, Tensors& t, Tensors&) { t.initial_state.shape[1] = 3; }},
      {"y: expected a tensor, got none", [](Conv&, Tensors& t, Tensors&) { t.y.data = nullptr; }},
      {"y: expected none (backward does not read it), got a tensor", [&](Conv&, Tensors& t, Tensors&) { t.y = t.x; },
       'b'},
      {"gradient of y: expected a tensor, got none", [](Conv&, Tensors&, Tensors& d) { d.y.data = nullptr; }, 'b'},
      {"gradient of x: expected a tensor, got none", [](Conv&, Tensors&, Tensors& d) { d.x.data = nullptr; }, 'b'},
      {"gradient of weight: expected a tensor, got none", [](Conv&, Tensors&, Tensors& d) { d.weight.data = nullptr; },
       'b'},
      {"gradient of bias: expected a tensor, got none", [](Conv&, Tensors&, Tensors& d) { d.bias.data = nullptr; },
       'b'},
      {"gradient of bias: expected none (there is no bias), got a tensor",
       [](Conv&, Tensors& t, Tensors&) { t.bias.data = nullptr; }, 'b'},
      {"gradient of initial_state: expected none (states have no gradient), got a tensor",
       [&](Conv&, Tensors& t, Tensors& d) { d.initial_state = t.initial_state; }, 'b'},
      {"conv: T: expected 1 in fw_short_conv_step, got 3", [](Conv&, Tensors&, Tensors&) {}, 's'},
      {"conv: seqlens.cu_seqlens: expected NULL in fw_short_conv_step, got an address",
       [&](Conv& c, Tensors&, Tensors&) {
         static const int64_t one[] = {0, 1};
         c.B = c.T = 1, c.seqlens.cu_seqlens = one, c.seqlens.num_sequences = 1;
       },
       's'},
      {"initial_state: expected a tensor, which the step updates in place, got none",
       [](Conv& c, Tensors& t, Tensors&) { c.T = 1, t.initial_state.data = nullptr; }, 's'},
  };
  for (const Case& c : cases) EXPECT_THAT(message(c.change, c.kind), StartsWith(c.expected));
  for (const int shift : {59, 62}) {
    const auto change = [&](Conv& c, Tensors& t, Tensors&) {
      c.T = t.x.shape[1] = t.y.shape[1] = 1;
      t.x.stride[0] = (int64_t{1} << shift) + 4;
    };
    EXPECT_THAT(message(change, 'f'), StartsWith("x: stride[0]: expected strides that reach at most "));
  }
  EXPECT_EQ(fw_short_conv_forward(nullptr, nullptr, nullptr, 0), FW_ERROR_ARGUMENT);
  EXPECT_STREQ(fw_last_error(), "conv: expected a struct, got NULL");
  EXPECT_EQ(fw_short_conv_query(nullptr, nullptr), FW_ERROR_ARGUMENT);
}

// No call has a list of them.
TEST(ShortConvCall, ManyEmptySequencesTakeNoMemory) {
  fw_short_conv c = ConvCall{2147482000, 0, 4, 1}.conv(FW_F32);
  fw_sizes sizes;
  fw_sizes_init(&sizes);
  const auto peak = [] {
    rusage used{};
    ::getrusage(RUSAGE_SELF, &used);
    return used.ru_maxrss;
  };
  const long before = peak();
  fw_short_conv_tensors t;
  fw_short_conv_tensors_init(&t);
  float weight[4] = {};
  const int64_t shape[2] = {4, 1};
  t.weight = fw_tensor_of(weight, FW_F32, 2, shape);
  EXPECT_EQ(fw_short_conv_query(&c, &sizes), FW_OK);
  EXPECT_EQ(fw_short_conv_forward(&c, &t, nullptr, 0), FW_OK);
  EXPECT_LT(peak() - before, 1L << 20) << "KiB";
}

}  // namespace
}  // namespace fw::testing
