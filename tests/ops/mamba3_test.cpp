// The operations of Mamba-3's layers: values, gradients, packed sequences, states, and an angle over a million tokens.
#include <fmt/format.h>

#include <algorithm>

#include "op_check.h"
#include "ops/ops.h"

namespace fw::testing {
namespace {

double sigmoid(double x) { return 1 / (1 + std::exp(-x)); }
double softplus(double x) { return std::log1p(std::exp(x)); }

const std::vector<std::vector<int64_t>> kLayouts{{0, 5}, {0, 0, 3, 4, 4, 8}, {0, 1}, {0, 0}};
const std::vector<int64_t> kChunks{0, kRotaryChunk + 2, kRotaryChunk + 3};  // one sequence of two chunks

struct TimeOp {
  int64_t rows, heads;
  Mamba3Decay decay;

  // dt_in, a_in, bias
  Values<double> inputs(Random& random) const {
    return {random_values(random, rows * heads), random_values(random, rows * heads, 2), random_values(random, heads)};
  }
  std::vector<bool> accumulates() const { return {false, false, true}; }
  Values<double> formula(const Values<double>& in) const {
    Values<double> out(2, std::vector<double>(in[0].size()));
    for (size_t i = 0; i < in[0].size(); ++i) {
      const double a = in[1][i], rate = decay.heavy_tail ? (a < 0 ? 1 / (1 - a) : 1 + a) : softplus(a);
      out[0][i] = softplus(in[0][i] + in[2][i % heads]);
      out[1][i] = -std::max(rate, decay.floor) * out[0][i];
    }
    return out;
  }
  template <class T>
  Values<T> forward(const Values<T>& in) const {
    const Strided<T> dt_in(rows, heads, in[0]), a_in(rows, heads, in[1]);
    Strided<T> dt(rows, heads), g(rows, heads);
    host_ops<T>().mamba3_time_forward(host_exec<T>(), decay, dt_in.view(), a_in.view(), in[2].data(), dt.mat(),
                                      g.mat());
    return {dt.values(), g.values()};
  }
  template <class T>
  Values<T> backward(const Values<T>& in, const Values<T>& douts, const Values<T>& before) const {
    const Strided<T> dt_in(rows, heads, in[0]), a_in(rows, heads, in[1]), dg(rows, heads, douts[1]);
    Strided<T> d_dt(rows, heads, douts[0]), da_in(rows, heads);
    std::vector<T> dbias = before[2];
    // In place of the gradient of dt.
    host_ops<T>().mamba3_time_backward(host_exec<T>(), decay, d_dt.view(), dg.view(), dt_in.view(), a_in.view(),
                                       in[2].data(), d_dt.mat(), da_in.mat(), dbias.data());
    return {d_dt.values(), da_in.values(), dbias};
  }
};

TEST(Mamba3Time, ValuesAndGradients) {
  for (const bool heavy : {false, true}) {
    for (const double floor : {0.0, 1e-4, 0.7}) {  // the last lies above a part of the rates
      for (const int64_t rows : {0, 1, 6})
        check_op(TimeOp{rows, 3, {heavy, floor}}, fmt::format("{} rows, heavy tail {}, floor {}", rows, heavy, floor));
    }
  }
}
TEST(Mamba3Time, BitsDoNotDependOnThreads) { check_threads(TimeOp{3000, 8, {true, 1e-4}}, "time"); }

struct WeightsOp {
  std::vector<int64_t> offsets;
  Mamba3Shape shape;

  int64_t rows() const { return offsets.back(); }
  int64_t sequences() const { return static_cast<int64_t>(offsets.size()) - 1; }
  // dt, trap, g
  Values<double> inputs(Random& random) const {
    Values<double> in;
    for (int i = 0; i < 3; ++i) in.push_back(random_values(random, rows() * shape.heads));
    return in;
  }
  std::vector<bool> accumulates() const { return {true, false, false}; }
  // now, ahead, gate, row_g, first
  Values<double> formula(const Values<double>& in) const {
    const int64_t H = shape.heads, R = shape.rank;
    const auto before = [&](int64_t t, int64_t h) { return (1 - sigmoid(in[1][t * H + h])) * in[0][t * H + h]; };
    Values<double> out(5);
    for (int i = 0; i < 2; ++i) out[i].resize(in[0].size());
    for (int i = 2; i < 4; ++i) out[i].resize(in[0].size() * R);
    for (int64_t n = 0; n < sequences(); ++n) {
      for (int64_t h = 0; h < H; ++h) out[4].push_back(offsets[n] < offsets[n + 1] ? before(offsets[n], h) : 0);
      for (int64_t t = offsets[n]; t < offsets[n + 1]; ++t) {
        for (int64_t h = 0; h < H; ++h) {
          out[0][t * H + h] = sigmoid(in[1][t * H + h]) * in[0][t * H + h];
          out[1][t * H + h] = t + 1 < offsets[n + 1] ? before(t + 1, h) : 0;
          for (int64_t r = 0; r < R; ++r) {
            out[2][(t * R + r) * H + h] = out[0][t * H + h] + out[1][t * H + h];
            out[3][(t * R + r) * H + h] = r > 0 ? 0 : in[2][t * H + h];
          }
        }
      }
    }
    return out;
  }
  template <class T>
  Values<T> forward(const Values<T>& in) const {
    const int64_t H = shape.heads, R = shape.rank;
    const Strided<T> dt(rows(), H, in[0]), trap(rows(), H, in[1]), g(rows(), H, in[2]);
    Strided<T> now(rows(), H), ahead(rows(), H), gate(rows() * R, H), row_g(rows() * R, H), first(sequences(), H);
    const SeqLayout layout(offsets);
    host_ops<T>().mamba3_weights_forward(host_exec<T>(), shape, dt.view(), trap.view(), g.view(), layout, now.mat(),
                                         ahead.mat(), gate.mat(), row_g.mat(), first.mat());
    return {now.values(), ahead.values(), gate.values(), row_g.values(), first.values()};
  }
  template <class T>
  Values<T> backward(const Values<T>& in, const Values<T>& douts, const Values<T>& before) const {
    const int64_t H = shape.heads, R = shape.rank;
    const Strided<T> dt(rows(), H, in[0]), trap(rows(), H, in[1]);
    const Strided<T> dnow(rows(), H, douts[0]), dahead(rows(), H, douts[1]), dgate(rows() * R, H, douts[2]),
        drow_g(rows() * R, H, douts[3]), dfirst(sequences(), H, douts[4]);
    Strided<T> d_dt(rows(), H, before[0]), dtrap(rows(), H), dg(rows(), H);
    const SeqLayout layout(offsets);
    host_ops<T>().mamba3_weights_backward(host_exec<T>(), shape, dnow.view(), dahead.view(), dgate.view(),
                                          drow_g.view(), dfirst.view(), dt.view(), trap.view(), layout, d_dt.mat(),
                                          dtrap.mat(), dg.mat());
    return {d_dt.values(), dtrap.values(), dg.values()};
  }
};

TEST(Mamba3Weights, ValuesAndGradients) {
  for (const auto& offsets : kLayouts) {
    for (const int64_t rank : {1, 3})
      check_op(WeightsOp{offsets, {2, 1, 4, 4, rank, 1}}, fmt::format("{} tokens, rank {}", offsets.back(), rank));
  }
}
TEST(Mamba3Weights, BitsDoNotDependOnThreads) {
  check_threads(WeightsOp{{0, 300, 300, 301, 500}, {4, 1, 4, 4, 2, 1}}, "weights");
}

struct RotaryOp {
  std::vector<int64_t> offsets;
  Mamba3Shape shape;
  bool shared;  // angles of all heads

  int64_t rows() const { return offsets.back(); }
  int64_t sequences() const { return static_cast<int64_t>(offsets.size()) - 1; }
  int64_t width() const { return shape.rank * shape.groups * shape.state; }
  int64_t rotated() const { return shape.heads * shape.angles; }
  int64_t angle_columns() const { return shared ? shape.angles : rotated(); }
  // q, k, q_bias, k_bias, angle, dt, start (radians)
  Values<double> inputs(Random& random) const {
    const int64_t biases = shape.heads * shape.rank * shape.state;
    return {random_values(random, rows() * width()),
            random_values(random, rows() * width()),
            random_values(random, biases),
            random_values(random, biases),
            random_values(random, rows() * angle_columns()),
            random_values(random, rows() * shape.heads),
            random_values(random, sequences() * rotated())};
  }
  std::vector<bool> accumulates() const { return {false, false, true, true, false, false, false}; }
  // q_rows, k_rows, qk_self
  Values<double> formula(const Values<double>& in) const {
    const int64_t H = shape.heads, N = shape.state, R = shape.rank, NA = shape.angles;
    Values<double> out(2, std::vector<double>(rows() * R * H * N));
    out.emplace_back(rows() * H * R * R);
    for (int64_t n = 0; n < sequences(); ++n) {
      std::vector<double> theta(in[6].begin() + n * rotated(), in[6].begin() + (n + 1) * rotated());
      for (int64_t t = offsets[n]; t < offsets[n + 1]; ++t) {
        for (int64_t h = 0; h < H; ++h) {
          for (int64_t a = 0; a < NA; ++a)
            theta[h * NA + a] +=
                M_PI * std::tanh(in[4][t * angle_columns() + (shared ? a : h * NA + a)]) * in[5][t * H + h];
          for (int64_t r = 0; r < R; ++r) {
            for (int which = 0; which < 2; ++which) {
              std::vector<double> x(N);
              for (int64_t c = 0; c < N; ++c)
                x[c] = in[which][t * width() + (r * shape.groups + h * shape.groups / H) * N + c] +
                       in[2 + which][(h * R + r) * N + c];
              for (int64_t a = 0; a < NA; ++a) {
                double &first = x[shape.rotate_half ? a : 2 * a],
                       &second = x[shape.rotate_half ? a + N / 2 : 2 * a + 1];
                const double x0 = first, x1 = second, angle = theta[h * NA + a];
                first = std::cos(angle) * x0 - std::sin(angle) * x1;
                second = std::sin(angle) * x0 + std::cos(angle) * x1;
              }
              std::copy_n(x.begin(), N, out[which].begin() + ((t * R + r) * H + h) * N);
            }
          }
        }
      }
    }
    for (size_t x = 0; x < out[2].size(); ++x) {  // of the rotated rows
      const int64_t i = static_cast<int64_t>(x), of_token = H * R * R, t = i / of_token, h = i % of_token / (R * R);
      for (int64_t c = 0; c < N; ++c)
        out[2][x] += out[0][((t * R + i / R % R) * H + h) * N + c] * out[1][((t * R + i % R) * H + h) * N + c];
    }
    return out;
  }
  template <class T>
  struct Rotated {
    Strided<T> q, k, qk_self;
    std::vector<T> start, checkpoints;
  };
  template <class T>
  Rotated<T> run(const Values<T>& in) const {
    const int64_t H = shape.heads, N = shape.state, R = shape.rank;
    const Strided<T> q(rows(), width(), in[0]), k(rows(), width(), in[1]), angle(rows(), angle_columns(), in[4]),
        dt(rows(), H, in[5]);
    Rotated<T> out{{rows() * R, H * N},
                   {rows() * R, H * N},
                   {rows(), H * R * R},
                   std::vector<T>(2 * in[6].size()),
                   std::vector<T>(rotary_checkpoints(rows(), sequences()) * 2 * rotated())};
    for (int64_t n = 0; n < sequences(); ++n) {
      for (int64_t i = 0; i < rotated(); ++i) {
        const double turns = static_cast<double>(in[6][n * rotated() + i]) / (2 * M_PI);
        out.start[2 * n * rotated() + i] = static_cast<T>(turns);
        out.start[(2 * n + 1) * rotated() + i] = static_cast<T>(turns - static_cast<double>(static_cast<T>(turns)));
      }
    }
    const SeqLayout layout(offsets);
    host_ops<T>().mamba3_rotary_forward(host_exec<T>(), shape, q.view(), k.view(), in[2].data(), in[3].data(),
                                        angle.view(), dt.view(), layout, out.start.data(), out.checkpoints.data(),
                                        out.q.mat(), out.k.mat(), out.qk_self.mat());
    return out;
  }
  template <class T>
  Values<T> forward(const Values<T>& in) const {
    const Rotated<T> out = run(in);
    return {out.q.values(), out.k.values(), out.qk_self.values()};
  }
  template <class T>
  Values<T> backward(const Values<T>& in, const Values<T>& douts, const Values<T>& before) const {
    const int64_t H = shape.heads, N = shape.state, R = shape.rank;
    const Rotated<T> out = run(in);
    const Strided<T> q(rows(), width(), in[0]), k(rows(), width(), in[1]), angle(rows(), angle_columns(), in[4]),
        dt(rows(), H, in[5]), dq_rows(rows() * R, H * N, douts[0]), dk_rows(rows() * R, H * N, douts[1]),
        dqk_self(rows(), H * R * R, douts[2]);
    Strided<T> dq(rows(), width()), dk(rows(), width()), dangle(rows(), angle_columns()), d_dt(rows(), H);
    std::vector<T> dq_bias = before[2], dk_bias = before[3], dstart(in[6].size());
    const SeqLayout layout(offsets);
    host_ops<T>().mamba3_rotary_backward(host_exec<T>(), shape, dq_rows.view(), dk_rows.view(), dqk_self.view(),
                                         q.view(), k.view(), in[2].data(), in[3].data(), angle.view(), dt.view(),
                                         out.checkpoints.data(), layout, dq.mat(), dk.mat(), dangle.mat(), d_dt.mat(),
                                         dq_bias.data(), dk_bias.data(), dstart.data());
    return {dq.values(), dk.values(), dq_bias, dk_bias, dangle.values(), d_dt.values(), dstart};
  }
};

TEST(Mamba3Rotary, ValuesAndGradients) {
  const Mamba3Shape shapes[] = {
      {2, 1, 6, 4, 1, 2, false}, {4, 2, 7, 4, 3, 3, false}, {3, 3, 6, 4, 2, 3, true}, {2, 2, 8, 4, 1, 2, true}};
  for (const auto& offsets : kLayouts) {
    for (const Mamba3Shape& shape : shapes) {
      for (const bool shared : {false, true}) {
        check_op(RotaryOp{offsets, shape, shared},
                 fmt::format("{} tokens, {} channels, shared {}", offsets.back(), shape.state, shared));
      }
    }
  }
}
TEST(Mamba3Rotary, ValuesAndGradientsOfSeveralChunks) {
  check_op(RotaryOp{kChunks, {2, 1, 4, 4, 1, 2, false}, true}, "two chunks");
}
TEST(Mamba3Rotary, BitsDoNotDependOnThreads) {
  check_threads(RotaryOp{{0, 300, 300, 301, 500}, {4, 2, 8, 4, 2, 4, true}, true}, "turn");
}

// A million tokens in float, all at once and in pieces that begin with what the state kept. A key (1, 0) is rotated by
// the sum in long double to a few roundings of a float's angle. Summed in float32 radians it would be off by far more
// than a whole pair of digits.
TEST(Mamba3Rotary, AMillionTokensLoseNothing) {
  constexpr int64_t kTokens = 1'000'000, kPiece = 999;
  const Mamba3Shape shape{1, 1, 2, 1, 1, 1, false};
  Random random(5);
  std::vector<float> q(2 * kTokens, 0.0f), unit{1, 0}, angle(kTokens), dt(kTokens), whole_keys(2 * kTokens),
      keys(2 * kTokens), out(2 * kTokens), qk_self(kTokens);
  for (int64_t t = 0; t < kTokens; ++t) {
    angle[t] = static_cast<float>(0.5 + random.normal());
    dt[t] = static_cast<float>(0.02 + 0.01 * std::abs(random.normal()));
  }
  const auto run = [&](int64_t first, int64_t count, float* state, std::vector<float>& to) {
    const SeqLayout layout({0, count});
    host_ops<float>().mamba3_rotary_forward(
        host_exec<float>(), shape, Mat<const float>(q.data(), count, 2), Mat<const float>(q.data(), count, 2),
        unit.data(), unit.data(), Mat<const float>(angle.data() + first, count, 1),
        Mat<const float>(dt.data() + first, count, 1), layout, state, nullptr, Mat<float>(out.data(), count, 2),
        Mat<float>(to.data() + 2 * first, count, 2), Mat<float>(qk_self.data(), count, 1));
  };
  float whole[2] = {0, 0}, pieces[2] = {0, 0};
  run(0, kTokens, whole, whole_keys);
  for (int64_t t = 0; t < kTokens; t += kPiece) run(t, std::min(kPiece, kTokens - t), pieces, keys);
  long double sum = 0;
  double worst = 0, worst_again = 0;
  const auto off = [&](double got) {
    const double d = static_cast<double>(sum - static_cast<long double>(got));
    return std::abs(d - std::nearbyint(d));
  };
  for (int64_t t = 0; t < kTokens; ++t) {
    sum += std::tanh(static_cast<double>(angle[t])) * static_cast<double>(dt[t]) / 2;
    const auto turn = [&](const std::vector<float>& from) {
      return std::atan2(static_cast<double>(from[2 * t + 1]), static_cast<double>(from[2 * t])) / (2 * M_PI);
    };
    worst = std::max(worst, off(turn(whole_keys)));
    worst_again = std::max(worst_again, off(turn(keys)));
  }
  EXPECT_GT(static_cast<double>(sum), 1000);  // whole turns were dropped
  // Half a turn as a float, the same in radians, a cosine and a sine: each is rounded once.
  EXPECT_LE(worst, 8e-8);
  EXPECT_LE(worst_again, 8e-8);
  EXPECT_LE(off(static_cast<double>(whole[0]) + static_cast<double>(whole[1])), 1e-9);
  EXPECT_LE(off(static_cast<double>(pieces[0]) + static_cast<double>(pieces[1])), 1e-9);
}

struct CarryOp {
  std::vector<int64_t> offsets;
  Mamba3Shape shape;

  int64_t sequences() const { return static_cast<int64_t>(offsets.size()) - 1; }
  // first, k_last, v_last, s
  Values<double> inputs(Random& random) const {
    const int64_t n = sequences() * shape.heads;
    return {random_values(random, n), random_values(random, n * shape.rank * shape.state),
            random_values(random, n * shape.rank * shape.head_dim),
            random_values(random, n * shape.state * shape.head_dim)};
  }
  std::vector<bool> accumulates() const { return {false, false, false, false}; }
  Values<double> formula(const Values<double>& in) const {
    const int64_t H = shape.heads, N = shape.state, P = shape.head_dim, R = shape.rank;
    std::vector<double> s = in[3];
    for (int64_t n = 0; n < sequences(); ++n) {
      for (int64_t i = 0; i < R * H * N * P && offsets[n] < offsets[n + 1]; ++i) {
        const int64_t r = i / (H * N * P), h = i / (N * P) % H, c = i / P % N, p = i % P, row = (n * R + r) * H + h;
        s[((n * H + h) * N + c) * P + p] += in[0][n * H + h] * in[1][row * N + c] * in[2][row * P + p];
      }
    }
    return {s};
  }
  template <class T>
  Values<T> forward(const Values<T>& in) const {
    const int64_t H = shape.heads, N = shape.state, P = shape.head_dim, R = shape.rank, rows = offsets.back() * R;
    Random random(2);
    const std::vector<double> keys = random_values(random, rows * H * N), values = random_values(random, rows * H * P);
    const Strided<T> first(sequences(), H, in[0]), k_rows(rows, H * N, {keys.begin(), keys.end()}),
        v_rows(rows, H * P, {values.begin(), values.end()});
    std::vector<T> k = in[1], v = in[2], s = in[3];
    const SeqLayout layout(offsets);
    host_ops<T>().mamba3_carry_forward(host_exec<T>(), shape, first.view(), k_rows.view(), v_rows.view(), layout,
                                       k.data(), v.data(), s.data());
    for (int64_t n = 0; n < sequences(); ++n) {  // the last token's rows, or what was there
      for (int64_t i = 0; i < R * H * N; ++i) {
        const bool empty = layout.length(n) == 0;
        EXPECT_EQ(k[n * R * H * N + i], empty ? in[1][n * R * H * N + i]
                                              : k_rows.view().row((offsets[n + 1] - 1) *
                                                                  R)[i / (H * N) * k_rows.view().stride + i % (H * N)]);
      }
      for (int64_t i = 0; i < R * H * P; ++i) {
        const bool empty = layout.length(n) == 0;
        EXPECT_EQ(v[n * R * H * P + i], empty ? in[2][n * R * H * P + i]
                                              : v_rows.view().row((offsets[n + 1] - 1) *
                                                                  R)[i / (H * P) * v_rows.view().stride + i % (H * P)]);
      }
    }
    return {s};
  }
  template <class T>
  Values<T> backward(const Values<T>& in, const Values<T>& douts, const Values<T>&) const {
    const Strided<T> first(sequences(), shape.heads, in[0]);
    Strided<T> dfirst(sequences(), shape.heads), again(sequences(), shape.heads);
    std::vector<T> dk(in[1].size()), dv(in[2].size());
    const Exec<T> exec = host_exec<T>();
    exec.mamba3_carry_backward(shape, douts[0].data(), first.view(), in[1].data(), in[2].data(), dfirst.mat(),
                               dk.data(), dv.data());
    exec.mamba3_carry_backward(shape, douts[0].data(), first.view(), in[1].data(), in[2].data(), again.mat(),
                               static_cast<T*>(nullptr), static_cast<T*>(nullptr));
    EXPECT_TRUE(same_bits<T>({dfirst.values()}, {again.values()})) << "without the state's gradients it differs";
    return {dfirst.values(), dk, dv, {}};
  }
};

TEST(Mamba3Carry, ValuesAndGradients) {
  for (const int64_t rank : {1, 3})
    check_op(CarryOp{{0, 2, 3, 7}, {2, 1, 3, 5, rank, 1}}, fmt::format("rank {}", rank));
}
TEST(Mamba3Carry, BitsDoNotDependOnThreads) { check_threads(CarryOp{{0, 5, 6, 7, 9}, {8, 1, 16, 16, 2, 1}}, "carry"); }
TEST(Mamba3Carry, AnEmptySequenceKeepsItsState) {
  const CarryOp op{{0, 2, 2}, {1, 1, 2, 2, 1, 1}};
  Random random(3);
  const Values<double> in = op.inputs(random);
  expect_close(op.forward<double>(in)[0], op.formula(in)[0], 1e-14, "s");
}

struct DiagOp {
  int64_t rows;
  Mamba3Shape shape;
  bool skips;

  int64_t values() const { return shape.heads * shape.head_dim; }
  int64_t products() const { return shape.heads * shape.rank * shape.rank; }
  // qk_self, v, now, ahead, skip, o
  Values<double> inputs(Random& random) const {
    const int64_t all = rows * shape.rank;
    return {random_values(random, rows * products()),       random_values(random, all * values()),
            random_values(random, rows * shape.heads),      random_values(random, rows * shape.heads),
            random_values(random, skips ? shape.heads : 0), random_values(random, all * values())};
  }
  std::vector<bool> accumulates() const { return {false, true, false, false, true, false}; }
  Values<double> formula(const Values<double>& in) const {
    const int64_t H = shape.heads, P = shape.head_dim, R = shape.rank;
    std::vector<double> o = in[5];
    for (int64_t x = 0; x < rows * H * R * R; ++x) {
      const int64_t t = x / (H * R * R), h = x / (R * R) % H, i = x / R % R, j = x % R, to = t * R + i,
                    from = t * R + j;
      const double weight =
          (j <= i ? -in[3][t * H + h] : in[2][t * H + h]) * in[0][x] + (i == j && skips ? in[4][h] : 0);
      for (int64_t p = 0; p < P; ++p) o[(to * H + h) * P + p] += weight * in[1][(from * H + h) * P + p];
    }
    return {o};
  }
  template <class T>
  Values<T> forward(const Values<T>& in) const {
    const int64_t all = rows * shape.rank;
    const Strided<T> qk_self(rows, products(), in[0]), v(all, values(), in[1]), now(rows, shape.heads, in[2]),
        ahead(rows, shape.heads, in[3]);
    Strided<T> o(all, values(), in[5]);
    host_ops<T>().mamba3_diag_forward(host_exec<T>(), shape, qk_self.view(), v.view(), now.view(), ahead.view(),
                                      skips ? in[4].data() : nullptr, o.mat());
    return {o.values()};
  }
  template <class T>
  Values<T> backward(const Values<T>& in, const Values<T>& douts, const Values<T>& before) const {
    const int64_t all = rows * shape.rank;
    const Strided<T> qk_self(rows, products(), in[0]), v(all, values(), in[1]), now(rows, shape.heads, in[2]),
        ahead(rows, shape.heads, in[3]), d_o(all, values(), douts[0]);
    Strided<T> dv(all, values(), before[1]), dqk_self(rows, products()), dnow(rows, shape.heads),
        dahead(rows, shape.heads);
    std::vector<T> dskip = before[4];
    host_ops<T>().mamba3_diag_backward(host_exec<T>(), shape, d_o.view(), qk_self.view(), v.view(), now.view(),
                                       ahead.view(), skips ? in[4].data() : nullptr, dv.mat(), dqk_self.mat(),
                                       dnow.mat(), dahead.mat(), skips ? dskip.data() : nullptr);
    return {dqk_self.values(), dv.values(), dnow.values(), dahead.values(), dskip, {}};
  }
};

TEST(Mamba3Diag, ValuesAndGradients) {
  for (const int64_t rows : {0, 1, 3}) {
    for (const int64_t rank : {1, 2, 3}) {
      for (const bool skips : {false, true}) {
        check_op(DiagOp{rows, {2, 1, 5, 3, rank, 1}, skips},
                 fmt::format("{} tokens, rank {}, skip {}", rows, rank, skips));
      }
    }
  }
}
TEST(Mamba3Diag, BitsDoNotDependOnThreads) { check_threads(DiagOp{300, {4, 1, 16, 16, 2, 1}, true}, "near"); }

struct ExpandOp {
  int64_t rows;
  Mamba3Shape shape;

  int64_t cols() const { return shape.heads * shape.head_dim; }
  Values<double> inputs(Random& random) const {
    return {random_values(random, rows * cols()), random_values(random, shape.rank * cols())};
  }
  std::vector<bool> accumulates() const { return {false, true}; }
  Values<double> formula(const Values<double>& in) const {
    const int64_t P = shape.head_dim, R = shape.rank;
    std::vector<double> y(in[0].size() * R);
    for (int64_t i = 0; i < static_cast<int64_t>(y.size()); ++i) {
      const int64_t t = i / (R * cols()), r = i / cols() % R, h = i / P % shape.heads, p = i % P;
      y[i] = in[0][t * cols() + h * P + p] * in[1][(h * R + r) * P + p];
    }
    return {y};
  }
  template <class T>
  Values<T> forward(const Values<T>& in) const {
    const Strided<T> x(rows, cols(), in[0]);
    Strided<T> y(rows * shape.rank, cols());
    host_ops<T>().mamba3_expand_forward(host_exec<T>(), shape, x.view(), in[1].data(), y.mat());
    return {y.values()};
  }
  template <class T>
  Values<T> backward(const Values<T>& in, const Values<T>& douts, const Values<T>& before) const {
    const Strided<T> x(rows, cols(), in[0]), dy(rows * shape.rank, cols(), douts[0]);
    Strided<T> dx(rows, cols());
    std::vector<T> dup = before[1];
    host_ops<T>().mamba3_expand_backward(host_exec<T>(), shape, dy.view(), x.view(), in[1].data(), dx.mat(),
                                         dup.data());
    return {dx.values(), dup};
  }
};

TEST(Mamba3Expand, ValuesAndGradients) {
  for (const int64_t rows : {0, 1, 4}) {
    for (const int64_t rank : {1, 3})
      check_op(ExpandOp{rows, {2, 1, 1, 5, rank, 1}}, fmt::format("{} tokens, rank {}", rows, rank));
  }
}
TEST(Mamba3Expand, BitsDoNotDependOnThreads) { check_threads(ExpandOp{700, {3, 1, 1, 16, 2, 1}}, "spread"); }

struct GateOp {
  int64_t rows;
  Mamba3Shape shape;
  bool mimo, norm;
  static constexpr double kEps = 1e-2;

  int64_t cols() const { return shape.heads * shape.head_dim; }
  // o, z, up, down, norm
  Values<double> inputs(Random& random) const {
    const int64_t weights = mimo ? shape.rank * cols() : 0;
    return {random_values(random, rows * shape.rank * cols()), random_values(random, rows * cols()),
            random_values(random, weights), random_values(random, weights), random_values(random, norm ? cols() : 0)};
  }
  std::vector<bool> accumulates() const { return {false, false, true, true, true}; }
  Values<double> formula(const Values<double>& in) const {
    const int64_t P = shape.head_dim, R = shape.rank, H = shape.heads;
    std::vector<double> y(in[1].size());
    for (int64_t x = 0; x < rows * R * H; ++x) {
      const int64_t t = x / (R * H), r = x / H % R, h = x % H;
      double square = 0;
      for (int64_t p = 0; p < P; ++p) square += std::pow(in[0][x * P + p], 2) / static_cast<double>(P);
      for (int64_t p = 0; p < P; ++p) {
        const int64_t c = h * P + p, w = (h * R + r) * P + p;
        const double a = in[1][t * cols() + c] * (mimo ? in[2][w] : 1),
                     scale = norm ? in[4][c] / std::sqrt(square + kEps) : 1;
        y[t * cols() + c] += (mimo ? in[3][w] : 1) * in[0][x * P + p] * scale * a * sigmoid(a);
      }
    }
    return {y};
  }
  template <class T>
  const T* optional(const std::vector<T>& x) const {
    return x.empty() ? nullptr : x.data();
  }
  template <class T>
  std::vector<T> run(const Values<T>& in, Mat<T> y) const {
    const Strided<T> o(rows * shape.rank, cols(), in[0]), z(rows, cols(), in[1]);
    std::vector<T> rstd(static_cast<size_t>(rows * shape.rank * shape.heads));
    host_ops<T>().mamba3_gate_forward(host_exec<T>(), shape, o.view(), z.view(), optional(in[2]), optional(in[3]),
                                      optional(in[4]), T(kEps), y, norm ? rstd.data() : nullptr);
    return rstd;
  }
  template <class T>
  Values<T> forward(const Values<T>& in) const {
    Strided<T> y(rows, cols());
    run<T>(in, y.mat());
    return {y.values()};
  }
  template <class T>
  Values<T> backward(const Values<T>& in, const Values<T>& douts, const Values<T>& before) const {
    const Strided<T> o(rows * shape.rank, cols(), in[0]), z(rows, cols(), in[1]), dy(rows, cols(), douts[0]);
    Strided<T> y(rows, cols()), d_o(rows * shape.rank, cols()), dz(rows, cols());
    const std::vector<T> rstd = run<T>(in, y.mat());
    std::vector<T> dup = before[2], ddown = before[3], dnorm = before[4];
    host_ops<T>().mamba3_gate_backward(host_exec<T>(), shape, dy.view(), o.view(), z.view(), optional(in[2]),
                                       optional(in[3]), optional(in[4]), norm ? rstd.data() : nullptr, d_o.mat(),
                                       dz.mat(), mimo ? dup.data() : nullptr, mimo ? ddown.data() : nullptr,
                                       norm ? dnorm.data() : nullptr);
    return {d_o.values(), dz.values(), dup, ddown, dnorm};
  }
};

TEST(Mamba3Gate, ValuesAndGradients) {
  for (const int64_t rows : {0, 1, 3}) {
    for (const bool norm : {false, true}) {
      check_op(GateOp{rows, {2, 1, 1, 5, 1, 1}, false, norm}, fmt::format("{} tokens, SISO, norm {}", rows, norm));
      for (const int64_t rank : {1, 3})
        check_op(GateOp{rows, {2, 1, 1, 5, rank, 1}, true, norm},
                 fmt::format("{} tokens, rank {}, norm {}", rows, rank, norm));
    }
  }
}
TEST(Mamba3Gate, BitsDoNotDependOnThreads) { check_threads(GateOp{500, {3, 1, 1, 16, 2, 1}, true, true}, "gate"); }

}  // namespace
}  // namespace fw::testing
