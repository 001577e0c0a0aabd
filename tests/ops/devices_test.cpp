// Operations on every device that this program has: the host alone in test_ops; the host and a GPU, or the host and the
// emulated device, in the programs of tests/cuda. Results against loops in double on the same (rounded) numbers. The
// host's own operations are checked against finite differences in the other files of this folder.
#include <signal.h>

#include "ops/device_check.h"

namespace fw::testing {
namespace {

INSTANTIATE_TEST_SUITE_P(Devices, OnDevice, ::testing::ValuesIn(cases()),
                         [](const auto& one) { return one.param.name; });

struct NormShape {
  int64_t rows, cols, pad;
};

// Forms of the device's kernels: rows of one lane's packets to rows of a block, not aligned ones, wider ones than are
// kept in registers, and more rows than warps.
const NormShape kNormShapes[] = {{1, 1, 0},    {5, 24, 3},   {70, 48, 16},  {3, 513, 3},    {3, 520, 8},  {3, 1024, 8},
                                 {3, 2048, 0}, {2, 8184, 8}, {2, 16384, 0}, {2, 16400, 16}, {2200, 16, 0}};

template <class T>
void check_norm(Context<T>& on, const NormShape& shape, bool add, Write write) {
  using W = Wide<T>;
  SCOPED_TRACE(::testing::Message() << shape.rows << " x " << shape.cols << " + " << shape.pad << (add ? " add" : "")
                                    << (write == Write::kAccumulate ? " accumulate" : ""));
  const int64_t rows = shape.rows, cols = shape.cols, pad = shape.pad;
  constexpr double kEps = 1e-2;
  const std::vector<double> x0 = on.random(rows * cols), delta = on.random(rows * cols), weight = on.random_wide(cols),
                            dy = on.random(rows * cols);
  const std::vector<double> dx0 = on.random(rows * cols), dweight0 = on.random_wide(cols);

  Matrix<T> x(on.device, rows, cols, pad, x0), d(on.device, rows, cols, pad, delta), y(on.device, rows, cols, pad);
  Buffer<W> w = on.template buffer<W>(weight), rstd(on.device, rows);
  if (add) {
    on.exec.add_rmsnorm_forward(x.mat(), d.mat(), w.data(), static_cast<W>(kEps), y.mat(), rstd.data());
  } else {
    on.exec.rmsnorm_forward(x.mat(), w.data(), static_cast<W>(kEps), y.mat(), rstd.data());
  }
  std::vector<double> sum = x0, want_y(sum.size()), want_rstd, want_dx(sum.size()), want_dweight = dweight0;
  for (size_t i = 0; add && i < sum.size(); ++i) sum[i] = value_of(stored<T>(sum[i] + delta[i]));
  for (int64_t t = 0; t < rows; ++t) {
    const auto at = [&](int64_t c) { return static_cast<size_t>(t * cols + c); };
    double squares = 0, dot = 0;
    for (int64_t c = 0; c < cols; ++c) squares += sum[at(c)] * sum[at(c)];
    const double r = 1 / std::sqrt(squares / static_cast<double>(cols) + kEps);
    want_rstd.push_back(r);
    for (int64_t c = 0; c < cols; ++c) {
      want_y[at(c)] = sum[at(c)] * r * weight[static_cast<size_t>(c)];
      dot += dy[at(c)] * weight[static_cast<size_t>(c)] * sum[at(c)] * r;
      want_dweight[static_cast<size_t>(c)] += dy[at(c)] * sum[at(c)] * r;
    }
    for (int64_t c = 0; c < cols; ++c) {
      want_dx[at(c)] =
          r * (dy[at(c)] * weight[static_cast<size_t>(c)] - sum[at(c)] * r * dot / static_cast<double>(cols));
      if (write == Write::kAccumulate) want_dx[at(c)] += dx0[at(c)];
    }
  }
  expect_near(x.values(), sum, std::min(kTolerance<T>, kTolerance<W>), "x");
  expect_near(y.values(), want_y, kTolerance<T>, "y");
  expect_near(values_of(rstd), want_rstd, kTolerance<W>, "rstd");

  Matrix<T> dys(on.device, rows, cols, pad, dy), dx(on.device, rows, cols, pad, dx0);
  Buffer<W> dweight = on.template buffer<W>(dweight0);
  on.exec.rmsnorm_backward(dys.mat(), x.mat(), w.data(), rstd.data(), dx.mat(), dweight.data(), write);
  expect_near(dx.values(), want_dx, kTolerance<T>, "dx");
  expect_near(values_of(dweight), want_dweight, kTolerance<W>, "dweight");
}

TEST_P(OnDevice, Rmsnorm) {
  with_type([](auto&& on) {
    for (const NormShape& shape : kNormShapes) {
      check_norm(on, shape, false, Write::kOverwrite);
      check_norm(on, shape, true, Write::kAccumulate);
    }
  });
}

struct ConvShape {
  int64_t width, cols, pad;
  bool tails, in_place, bias = false;
};

template <class T>
void check_conv(Context<T>& on, const ConvShape& shape, const SeqLayout& layout) {
  using W = Wide<T>;
  SCOPED_TRACE(::testing::Message() << "width " << shape.width << ", " << layout.tokens() << " x " << shape.cols
                                    << " + " << shape.pad << (shape.tails ? " tails" : "")
                                    << (shape.in_place ? " in place" : "") << (shape.bias ? " bias" : ""));
  const int64_t width = shape.width, cols = shape.cols, pad = shape.pad;
  const bool tails = shape.tails, in_place = shape.in_place;
  const int64_t tokens = layout.tokens(), kept = width - 1;
  const std::vector<double> x = on.random(tokens * cols), dy = on.random(tokens * cols),
                            weight = on.random_wide(cols * width);
  const std::vector<double> tail = on.random(layout.count() * kept * cols), dweight0 = on.random_wide(cols * width);
  const std::vector<double> bias = shape.bias ? on.random_wide(cols) : std::vector<double>(static_cast<size_t>(cols)),
                            dbias0 = on.random_wide(cols);

  // The input of sequence n at a position of its own, which may lie before its first.
  const auto input = [&](int64_t n, int64_t position, int64_t c) {
    if (position >= 0) return x[static_cast<size_t>((layout.begin(n) + position) * cols + c)];
    return tails ? tail[static_cast<size_t>((n * kept + kept + position) * cols + c)] : 0.0;
  };
  std::vector<double> want_y(x.size()), want_dx(x.size()), want_dweight = dweight0, want_dbias = dbias0, want_tail;
  for (int64_t n = 0; n < layout.count(); ++n) {
    for (int64_t position = 0; position < layout.length(n); ++position) {
      for (int64_t c = 0; c < cols; ++c) {
        const size_t at = static_cast<size_t>((layout.begin(n) + position) * cols + c);
        double p = bias[static_cast<size_t>(c)];
        for (int64_t j = 0; j < width; ++j)
          p += weight[static_cast<size_t>(c * width + width - 1 - j)] * input(n, position - j, c);
        const double s = 1 / (1 + std::exp(-p)), dp = dy[at] * s * (1 + p * (1 - s));
        want_y[at] = p * s;
        want_dbias[static_cast<size_t>(c)] += dp;
        for (int64_t j = 0; j < width; ++j) {
          want_dweight[static_cast<size_t>(c * width + width - 1 - j)] += dp * input(n, position - j, c);
          if (position >= j)
            want_dx[at - static_cast<size_t>(j * cols)] += weight[static_cast<size_t>(c * width + width - 1 - j)] * dp;
        }
      }
    }
    for (int64_t i = 0; i < kept; ++i) {
      for (int64_t c = 0; c < cols; ++c) want_tail.push_back(input(n, layout.length(n) - kept + i, c));
    }
  }

  Matrix<T> xs(on.device, tokens, cols, pad, x), ys(on.device, tokens, cols, pad),
      dys(on.device, tokens, cols, pad, dy), dx(on.device, tokens, cols, pad);
  Buffer<W> w = on.template buffer<W>(weight), dweight = on.template buffer<W>(dweight0),
            of_bias = on.template buffer<W>(bias), dbias = on.template buffer<W>(dbias0);
  const W* b = shape.bias ? of_bias.data() : nullptr;
  Buffer<T> tail_in = on.template buffer<T>(tail), tail_out(on.device, tail_in.size()),
            before = on.template buffer<T>(tail);
  Buffer<int64_t> offsets(on.device, layout.count() + 1);
  offsets.write(0, layout.offsets());
  const PassLayout pass(layout, offsets.data(), nullptr);
  const T* in = tails ? tail_in.data() : nullptr;
  T* out = in_place ? tail_in.data() : tail_out.data();
  on.exec.short_conv_forward(xs.mat(), w.data(), b, width, pass, in, out, ys.mat());
  expect_near(ys.values(), want_y, kTolerance<T>, "y");
  expect_near(values_of(in_place ? tail_in : tail_out), want_tail, 0, "tails");
  on.exec.short_conv_backward(dys.mat(), xs.mat(), w.data(), b, width, pass, tails ? before.data() : nullptr, dx.mat(),
                              dweight.data(), shape.bias ? dbias.data() : nullptr);
  expect_near(dx.values(), want_dx, kTolerance<T>, "dx");
  if (shape.bias) expect_near(values_of(dbias), want_dbias, kTolerance<W>, "dbias");
  expect_near(values_of(dweight), want_dweight, kTolerance<W>, "dweight");
}

TEST_P(OnDevice, ShortConv) {
  with_type([](auto&& on) {
    // One token, sequences that end inside and at the end of the kernels' runs of tokens, empty ones, shorter ones than
    // the window.
    const SeqLayout layouts[] = {SeqLayout({0, 1}), SeqLayout({0, 0, 1, 3, 3, 130, 192, 200, 201}),
                                 SeqLayout({0, 300})};
    for (const SeqLayout& layout : layouts) {
      check_conv(on, {4, 24, 0, true, true}, layout);
      check_conv(on, {4, 16, 8, false, false}, layout);
      check_conv(on, {4, 24, 8, true, false, true}, layout);
      check_conv(on, {3, 5, 0, true, true, true}, layout);
      check_conv(on, {4, 5, 3, true, false}, layout);
    }
    for (const int64_t width : {1, 2, 3, 5, 6, 7, 8}) check_conv(on, {width, 8, 0, true, width % 2 == 0}, layouts[1]);
    check_conv(on, {4, 1032, 8, true, true}, SeqLayout({0, 3, 9}));
  });
}

// Sums over tokens of more blocks than a device runs at a time.
template <class T>
void check_bits(Context<T>& on) {
  using W = Wide<T>;
  const int64_t rows = 2500, cols = 72;
  const std::vector<double> x = on.random(rows * cols), dy = on.random(rows * cols), weight = on.random_wide(cols);
  const auto run = [&] {
    Buffer<W> w = on.template buffer<W>(weight), rstd(on.device, rows), dweight(on.device, cols);
    Matrix<T> xs(on.device, rows, cols, 0, x), dys(on.device, rows, cols, 0, dy), out(on.device, rows, cols, 0);
    on.exec.rmsnorm_forward(xs.mat(), w.data(), static_cast<W>(1e-5), out.mat(), rstd.data());
    on.exec.rmsnorm_backward(dys.mat(), xs.mat(), w.data(), rstd.data(), out.mat(), dweight.data(), Write::kOverwrite);
    return values_of(dweight);
  };
  EXPECT_EQ(run(), run());
}

TEST_P(OnDevice, TheSameCallGivesTheSameBits) {
  with_type([](auto&& on) { check_bits(on); });
}

// Where the host cannot read a device's memory, a pointer that it follows by mistake is a fault and not a wrong number.
TEST_P(OnDevice, MemoryOfADeviceFaultsInTheHost) {
  Device& device = *GetParam().device;
  if (device.host_memory()) return;
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  Buffer<int> memory(device, 4);
  EXPECT_EXIT(*const_cast<volatile int*>(memory.data()) = 1, ::testing::KilledBySignal(SIGSEGV), "");
  EXPECT_EXIT(static_cast<void>(*const_cast<const volatile int*>(memory.data() + 3)),
              ::testing::KilledBySignal(SIGSEGV), "");
  EXPECT_EQ(memory.to_vector(), std::vector<int>(4, 0));
}

}  // namespace
}  // namespace fw::testing
