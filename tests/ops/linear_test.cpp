// Linear layers: both precisions, few and many rows, tiles with remainders, every combination of gradients.
#include <array>
#include <bit>
#include <cstdlib>
#include <filesystem>

#include "op_check.h"
#include "ops/ops.h"

namespace fw::testing {
namespace {

std::string fmt_name(int64_t rows, int64_t in, int64_t out) {
  return "linear of " + std::to_string(rows) + " rows, " + std::to_string(in) + " to " + std::to_string(out);
}

struct LinearOp {
  int64_t rows, in_dim, out_dim;
  bool bias = false;
  Write write = Write::kOverwrite;
  Precision precision = Precision::kNative;

  // x, W, bias, and what y holds before (kAccumulate)
  Values<double> inputs(Random& random) const {
    Values<double> in{random_values(random, rows * in_dim), random_values(random, out_dim * in_dim),
                      random_values(random, out_dim), random_values(random, rows * out_dim)};
    if (!bias) in[2].clear();
    return in;
  }
  std::vector<bool> accumulates() const { return {write == Write::kAccumulate, true, true, false}; }
  Values<double> formula(const Values<double>& in) const {
    std::vector<double> y(static_cast<size_t>(rows * out_dim));
    for (int64_t t = 0; t < rows; ++t) {
      for (int64_t o = 0; o < out_dim; ++o) {
        double sum = (bias ? in[2][o] : 0.0) + (write == Write::kAccumulate ? in[3][t * out_dim + o] : 0.0);
        for (int64_t i = 0; i < in_dim; ++i) sum += in[0][t * in_dim + i] * in[1][o * in_dim + i];
        y[t * out_dim + o] = sum;
      }
    }
    return {y};
  }
  template <class T>
  Values<T> forward(const Values<T>& in) const {
    const Strided<T> x(rows, in_dim, in[0]);
    const Strided<T> weight(out_dim, in_dim, in[1]);
    Strided<T> y = write == Write::kAccumulate ? Strided<T>(rows, out_dim, in[3]) : Strided<T>(rows, out_dim);
    host_ops<T>().linear_forward(host_exec<T>(precision), x.view(), weight.view(), bias ? in[2].data() : nullptr,
                                 y.mat(), write);
    return {y.values()};
  }
  template <class T>
  Values<T> backward(const Values<T>& in, const Values<T>& douts, const Values<T>& before) const {
    const Strided<T> x(rows, in_dim, in[0]);
    const Strided<T> weight(out_dim, in_dim, in[1]);
    const Strided<T> dy(rows, out_dim, douts[0]);
    const auto fresh_dx = [&] {
      return write == Write::kAccumulate ? Strided<T>(rows, in_dim, before[0]) : Strided<T>(rows, in_dim);
    };
    Strided<T> dx = fresh_dx();
    Strided<T> dweight(out_dim, in_dim, before[1]);
    std::vector<T> dbias = before[2];
    host_ops<T>().linear_backward(host_exec<T>(precision), dy.view(), x.view(), weight.view(), dx.mat(), dweight.mat(),
                                  bias ? dbias.data() : nullptr, write);
    // One at a time gives the same bits.
    Strided<T> only_dx = fresh_dx();
    Strided<T> only_dweight(out_dim, in_dim, before[1]);
    host_ops<T>().linear_backward(host_exec<T>(precision), dy.view(), x.view(), weight.view(), only_dx.mat(), {},
                                  nullptr, write);
    host_ops<T>().linear_backward(host_exec<T>(precision), dy.view(), x.view(), weight.view(), {}, only_dweight.mat(),
                                  nullptr, write);
    EXPECT_TRUE(same_bits<T>({only_dx.values(), only_dweight.values()}, {dx.values(), dweight.values()}))
        << "gradients depend on each other";
    return {dx.values(), dweight.values(), dbias, {}};
  }
};

TEST(Linear, ValuesAndGradients) {
  for (int64_t rows : {1, 3, 4, 5, 17}) {
    for (const auto& [in, out] : std::vector<std::pair<int64_t, int64_t>>{{1, 1}, {7, 24}, {24, 7}, {65, 3}}) {
      for (bool bias : {false, true}) {
        for (Write write : {Write::kOverwrite, Write::kAccumulate}) {
          check_op(LinearOp{rows, in, out, bias, write}, fmt_name(rows, in, out));
        }
      }
    }
  }
}

// y = addend + x W^T is what accumulating into a copy of the addend is.
TEST(Linear, AddsAnAddend) {
  for (const int64_t rows : {0, 3, 17}) {
    Random random(29);
    constexpr int64_t kIn = 24, kOut = 7;
    const Strided<double> x(rows, kIn, random_values(random, rows * kIn)),
        weight(kOut, kIn, random_values(random, kOut * kIn));
    const Strided<double> addend(rows, kOut, random_values(random, rows * kOut));
    Strided<double> expected = addend, apart(rows, kOut);
    host_ops<double>().linear_forward(host_exec<double>(), x.view(), weight.view(), nullptr, expected.mat(),
                                      Write::kAccumulate);
    host_ops<double>().linear_add_forward(host_exec<double>(), x.view(), weight.view(), addend.view(), apart.mat());
    EXPECT_EQ(apart.values(), expected.values()) << rows;
  }
}

// A weight that is kept in bf16 alone gives what its widened values give, bit for bit.
TEST(Linear, Bf16WeightsGiveTheBitsOfTheirValues) {
  struct Case {
    int64_t rows, in, out;
  };
  for (const Case& c : std::vector<Case>{{1, 7, 5}, {2, 600, 40}, {4, 129, 700}, {5, 65, 530}, {1100, 70, 1030}}) {
    const int64_t rows = c.rows, in = c.in, out = c.out;  // clang 14 captures no structured binding
    Random random(7);
    const Values<float> values = cast<float>({random_values(random, rows * in), random_values(random, out * in),
                                              random_values(random, rows * out), random_values(random, out)});
    std::vector<Bf16> narrow(values[1].size());
    std::vector<float> wide(values[1].size());
    round_to_bf16(out * in, values[1].data(), narrow.data());
    widen_bf16(out * in, narrow.data(), wide.data());
    const Mat<const float> x(values[0].data(), rows, in), dy(values[2].data(), rows, out);
    const Weight<float> as_values(Mat<const float>(wide.data(), out, in)),
        as_bf16(Mat<const float>(nullptr, out, in), {narrow.data(), out, in});
    for (const Precision precision : {Precision::kNative, Precision::kBf16}) {
      const auto results = [&](const Weight<float>& weight) {
        Values<float> got;
        for (const Write write : {Write::kOverwrite, Write::kAccumulate}) {
          std::vector<float> y = values[2], dx = values[0];
          host_ops<float>().linear_forward(host_exec<float>(precision), x, weight, values[3].data(),
                                           {y.data(), rows, out}, write);
          host_ops<float>().linear_backward(host_exec<float>(precision), dy, x, weight, {dx.data(), rows, in}, {},
                                            nullptr, write);
          got.push_back(y);
          got.push_back(dx);
        }
        const std::vector<int32_t> ids{static_cast<int32_t>(out - 1), 0, 1};
        std::vector<float> rows_of_table(ids.size() * static_cast<size_t>(in));
        host_ops<float>().embedding_forward(host_exec<float>(precision), ids.data(), weight,
                                            {rows_of_table.data(), static_cast<int64_t>(ids.size()), in});
        got.push_back(rows_of_table);
        return got;
      };
      EXPECT_TRUE(same_bits<float>(results(as_bf16), results(as_values))) << fmt_name(rows, in, out);
    }
  }
}

TEST(Linear, NoRows) { check_op(LinearOp{0, 7, 5, true}, "linear of nothing"); }

TEST(Linear, BitsDoNotDependOnThreads) {
  for (Precision precision : {Precision::kNative, Precision::kBf16}) {
    check_threads(LinearOp{1500, 65, 150, true, Write::kOverwrite, precision}, "linear");
    check_threads(LinearOp{3, 600, 400, true, Write::kOverwrite, precision}, "linear of few rows");
  }
}

TEST(Linear, FewRowsDoNotDependOnEachOther) {
  for (Precision precision : {Precision::kNative, Precision::kBf16}) {
    const LinearOp four{4, 100, 50, false, Write::kOverwrite, precision};
    Random random(3);
    const Values<float> in = cast<float>(four.inputs(random));
    const std::vector<float> all = four.forward<float>(in)[0];
    for (int64_t rows = 1; rows < 4; ++rows) {
      const LinearOp some{rows, 100, 50, false, Write::kOverwrite, precision};
      const std::vector<float> x(in[0].end() - rows * 100, in[0].end());
      EXPECT_EQ(some.forward<float>({x, in[1], {}, {}})[0], std::vector<float>(all.end() - rows * 50, all.end()))
          << rows << " rows";
    }
  }
}

// Round to nearest even by the definition: of the two neighbours in bfloat16, the nearer, or the even one.
double round_bf16(double value) {
  if (value == 0) return 0;
  int exponent = 0;
  const double mantissa = std::frexp(value, &exponent);  // [0.5, 1): 8 bits are kept
  return std::ldexp(std::nearbyint(std::ldexp(mantissa, 8)), exponent - 8);
}

std::vector<double> rounded(std::vector<double> values) {
  for (double& v : values) v = round_bf16(v);
  return values;
}

// Products of rounded operands are exact in float, so what remains are float sums: tight against the formula.
void check_bf16(const LinearOp& op) {
  SCOPED_TRACE(fmt_name(op.rows, op.in_dim, op.out_dim));
  Random random(9);
  const Values<double> in = op.inputs(random);
  const Values<double> in_rounded{rounded(in[0]), rounded(in[1]), in[2], in[3]};
  expect_close(op.forward<float>(cast<float>(in))[0], op.formula(in_rounded)[0], 2e-6, "bf16 y");

  const Values<double> dy{random_values(random, op.rows * op.out_dim)};
  const std::vector<double> dyr = rounded(dy[0]);
  Values<double> before;
  for (const auto& v : in) before.push_back(random_values(random, static_cast<int64_t>(v.size())));
  std::vector<double> dx = op.write == Write::kAccumulate ? before[0] : std::vector<double>(in[0].size(), 0.0);
  std::vector<double> dw = before[1];
  for (int64_t t = 0; t < op.rows; ++t) {
    for (int64_t o = 0; o < op.out_dim; ++o) {
      for (int64_t i = 0; i < op.in_dim; ++i) {
        dx[t * op.in_dim + i] += dyr[t * op.out_dim + o] * in_rounded[1][o * op.in_dim + i];
        dw[o * op.in_dim + i] += dyr[t * op.out_dim + o] * in_rounded[0][t * op.in_dim + i];
      }
    }
  }
  const Values<float> got = op.backward<float>(cast<float>(in), cast<float>(dy), cast<float>(before));
  expect_close(got[0], dx, 2e-6, "bf16 dx");
  expect_close(got[1], dw, 2e-6, "bf16 dweight");
}

void check_bf16_cases() {
  for (Write write : {Write::kOverwrite, Write::kAccumulate}) {
    for (int64_t rows : {1, 3, 5, 17, 100}) {
      check_bf16({rows, 24, 65, false, write, Precision::kBf16});
      check_bf16({rows, 65, 7, true, write, Precision::kBf16});
    }
    check_bf16({7, 1, 1, false, write, Precision::kBf16});
    const bool adds = write == Write::kAccumulate;
    if (!left_out(adds ? 1 : 2, 2))
      check_bf16({1100, 40, 48, false, write, Precision::kBf16});  // several blocks of rows
    if (!left_out(adds ? 2 : 1, 2)) check_bf16({40, 1030, 1030, false, write, Precision::kBf16});  // ... of columns
  }
}

TEST(Linear, Bf16IsTheProductOfRoundedOperands) { check_bf16_cases(); }

// The same where oneDNN has no bf16 products. oneDNN reads the limit once per process: the test runs itself with it.
TEST(Linear, Bf16WithoutLibrarySupport) {
  if (std::getenv("DNNL_MAX_CPU_ISA") != nullptr) GTEST_SKIP() << "this is the run with the limit";
  const std::string command = "DNNL_MAX_CPU_ISA=AVX2 '" + std::filesystem::read_symlink("/proc/self/exe").string() +
                              "' --gtest_filter=Linear.Bf16IsTheProductOfRoundedOperands > /dev/null 2>&1";
  EXPECT_EQ(std::system(command.c_str()), 0) << command;
}

// With the copy that a model keeps of its parameters.
TEST(Linear, Bf16HasTheSameBitsWithAKeptCopy) {
  for (const auto& shape : std::vector<std::array<int64_t, 3>>{{3, 24, 65}, {17, 65, 7}, {100, 24, 1030}}) {
    const int64_t rows = shape[0], in = shape[1], out = shape[2];
    Random random(4);
    const Values<float> values = cast<float>(LinearOp{rows, in, out}.inputs(random));
    const Strided<float> x(rows, in, values[0]), dy(rows, out, values[3]);
    const Mat<const float> weight(values[1].data(), out, in);
    std::vector<Bf16> copy(values[1].size());
    round_to_bf16(static_cast<int64_t>(copy.size()), values[1].data(), copy.data());
    const auto run = [&](const Weight<float>& w) {
      Strided<float> y(rows, out), dx(rows, in), dweight(out, in, values[1]);
      host_ops<float>().linear_forward(host_exec<float>(Precision::kBf16), x.view(), w, nullptr, y.mat(),
                                       Write::kOverwrite);
      host_ops<float>().linear_backward(host_exec<float>(Precision::kBf16), dy.view(), x.view(), w, dx.mat(),
                                        dweight.mat(), nullptr, Write::kOverwrite);
      return Values<float>{y.values(), dx.values(), dweight.values()};
    };
    EXPECT_TRUE(same_bits(run(weight), run({weight, {copy.data(), out, in}}))) << fmt_name(rows, in, out);
  }
}

TEST(Linear, Bf16KeepsNanAndInfinity) {
  const float inf = std::numeric_limits<float>::infinity();
  // A NaN whose payload lies in the dropped half only, and the largest float, which rounds to infinity.
  const float quiet = std::bit_cast<float>(uint32_t{0x7F800001});
  for (int64_t rows : {1, 8}) {
    for (float special : {quiet, inf, std::numeric_limits<float>::max()}) {
      std::vector<float> x(static_cast<size_t>(rows) * 16, 0.0F);
      x[3] = special;
      const std::vector<float> weight(16, 1.0F);
      std::vector<float> y(static_cast<size_t>(rows));
      host_ops<float>().linear_forward(host_exec<float>(Precision::kBf16), {x.data(), rows, 16},
                                       Mat<const float>{weight.data(), 1, 16}, nullptr, {y.data(), rows, 1},
                                       Write::kOverwrite);
      if (std::isnan(special)) {
        EXPECT_TRUE(std::isnan(y[0])) << rows << " rows";
      } else {
        EXPECT_EQ(y[0], inf) << rows << " rows";
      }
      for (size_t t = 1; t < y.size(); ++t) EXPECT_EQ(y[t], 0.0F);
    }
  }
}

}  // namespace
}  // namespace fw::testing
