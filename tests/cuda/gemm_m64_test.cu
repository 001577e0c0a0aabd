// Products of some rows on the device against loops in double over the same numbers: a program of its own that prints a
// line per shape and fails with 1.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <vector>

#include "device_buffer.h"
#include "ops/cuda/gemm_m32.h"
#include "ops/cuda/gemm_m64.h"
#include "test_numbers.h"

namespace fw::cuda {
namespace {

using testing::from_bf16;
using testing::Random;
using testing::to_bf16;
using Bits = std::vector<uint16_t>;

int failures = 0;
void fail(const char* what) {
  std::printf("  FAILED: %s", what);
  ++failures;
}

enum class Added { kNothing, kItself, kApart };

struct Shape {
  int64_t width() const { return swiglu ? out / 2 : out; }  // of y
  // rows of y that lie apart begin at multiples of four
  int64_t beside() const { return padding > 0 ? padding + 3 - (width() + 3) % 4 : 0; }
  int64_t rows, in, out, padding;
  GemmM64Tiles tiles;  // rows 0: the kernel of up to 32 rows, which chooses so many slices
  bool bias = false;
  Added added = Added::kNothing;
  bool swiglu = false;  // out: of the weight
};

// Rows of a matrix lie between rows that are no numbers, and so do their columns.
struct Matrix {
  int64_t rows, cols, stride;
  Bits bits;
  static constexpr int64_t kAround = 3;
  Matrix(Random& random, int64_t r, int64_t c, int64_t padding) : rows(r), cols(c), stride(c + padding) {
    bits.assign(static_cast<size_t>((rows + 2 * kAround) * stride), to_bf16(std::nan("")));
    for (int64_t i = 0; i < rows; ++i) {
      for (int64_t j = 0; j < cols; ++j) bits[index(i, j)] = to_bf16(random(1));
    }
  }
  size_t index(int64_t i, int64_t j) const { return static_cast<size_t>((kAround + i) * stride + j); }
  double operator()(int64_t i, int64_t j) const { return from_bf16(bits[index(i, j)]); }
};

// A matrix on the device, or rows of it.
struct OnDevice {
  const Matrix& m;
  DeviceBuffer<uint16_t> memory;
  explicit OnDevice(const Matrix& matrix) : m(matrix), memory(matrix.bits) {}
  Mat<Bf16> mat(int64_t first, int64_t count) {
    return Mat<Bf16>(reinterpret_cast<Bf16*>(memory.data()) + static_cast<int64_t>(m.index(first, 0)), count, m.cols,
                     m.stride);
  }
};

struct Problem {
  Shape s;
  Random random{11};
  Matrix x, weight, y, addend;
  std::vector<float> bias;

  explicit Problem(const Shape& shape)
      : s(shape),
        x(random, s.rows, s.in, s.padding),
        weight(random, s.out, s.in, s.padding),
        y(random, s.rows, s.width(), s.beside()),
        addend(random, s.rows, s.width(), s.beside() + 4) {
    for (int64_t i = 0; i < s.out; ++i) bias.push_back(static_cast<float>(random(1)));
  }

  // Of the rows first .. first + count of x.
  Bits run(int64_t first, int64_t count) const {
    OnDevice dx(x), dw(weight), dy(y), da(addend);
    DeviceBuffer<float> db(bias);
    const Mat<const Bf16> before = s.added == Added::kItself  ? dy.mat(first, count)
                                   : s.added == Added::kApart ? da.mat(first, count)
                                                              : Mat<Bf16>();
    if (s.swiglu && s.tiles.rows == 0) {
      gemm_m32_swiglu(dx.mat(first, count), dw.mat(0, s.out), dy.mat(first, count), nullptr);
    } else if (s.swiglu) {
      gemm_m64_swiglu(dx.mat(first, count), dw.mat(0, s.out), dy.mat(first, count), s.tiles, nullptr);
    } else if (s.tiles.rows == 0) {
      gemm_m32_linear(dx.mat(first, count), dw.mat(0, s.out), s.bias ? db.data() : nullptr, before,
                      dy.mat(first, count), nullptr);
    } else {
      gemm_m64_linear(dx.mat(first, count), dw.mat(0, s.out), s.bias ? db.data() : nullptr, before,
                      dy.mat(first, count), s.tiles, nullptr);
    }
    return dy.memory.download();
  }
  bool same_row(const Bits& a, const Bits& b, int64_t row) const {
    const auto begin = static_cast<std::ptrdiff_t>(y.index(row, 0));
    return std::equal(a.begin() + begin, a.begin() + begin + s.width(), b.begin() + begin);
  }
};

void check_shape(const Shape& s) {
  std::printf("%lld x %lld -> %lld, %d rows a block, %d slices%s%s%s%s", static_cast<long long>(s.rows),
              static_cast<long long>(s.in), static_cast<long long>(s.out), s.tiles.rows, s.tiles.slices,
              s.padding > 0 ? ", rows apart" : "", s.bias ? ", bias" : "",
              s.added == Added::kItself  ? ", added"
              : s.added == Added::kApart ? ", addend"
                                         : "",
              s.swiglu ? ", swiglu" : "");
  if (s.tiles.rows == 0 && gemm_m32_slices(s.out, s.in) != s.tiles.slices) fail("slices");
  const Problem p(s);
  const Bits got = p.run(0, s.rows);
  // Half a unit of the last place of what is stored, and the sums in float32.
  const double sums =
      2e-7 * std::sqrt(static_cast<double>(s.in)) * 4 * std::max(1.0, std::sqrt(static_cast<double>(s.in)) / 3);
  double worst = 0;
  for (int64_t m = 0; m < s.rows; ++m) {
    for (int64_t o = 0; o < s.width(); ++o) {
      const auto product = [&](int64_t row) {
        double sum = 0;
        for (int64_t c = 0; c < s.in; ++c) sum += p.x(m, c) * p.weight(row, c);
        return sum;
      };
      double want = product(o) + (s.bias ? static_cast<double>(p.bias[static_cast<size_t>(o)]) : 0.0);
      // The second factor makes what the first lacks larger, and the other way round.
      const double factor = s.swiglu ? product(s.width() + o) : 0,
                   size = s.swiglu ? 1.1 * std::abs(factor) + std::abs(want) : 1;
      if (s.swiglu) want *= factor / (1 + std::exp(-want));
      if (s.added != Added::kNothing) want += s.added == Added::kItself ? p.y(m, o) : p.addend(m, o);
      const double error = std::abs(from_bf16(got[p.y.index(m, o)]) - want) / (std::abs(want) / 256 + sums * size);
      worst = std::isfinite(error) ? std::max(worst, error) : INFINITY;
    }
  }
  std::printf(": %.2f of the bound", worst);
  if (!(worst <= 1)) fail("values");
  Bits around = got;
  for (int64_t m = 0; m < s.rows; ++m) {
    for (int64_t o = 0; o < s.width(); ++o) around[p.y.index(m, o)] = p.y.bits[p.y.index(m, o)];
  }
  if (around != p.y.bits) fail("wrote beside its rows or columns");
  if (p.run(0, s.rows) != got) fail("bits of a second run");
  // With other rows, of every number that a kernel is made for.
  for (const int64_t count : {int64_t{1}, int64_t{9}, int64_t{17}}) {
    if (count >= s.rows) continue;
    const int64_t first = s.rows - count;
    const Bits fewer = p.run(first, count);
    for (int64_t m = first; m < s.rows; ++m) {
      if (!p.same_row(fewer, got, m)) {
        fail("bits of a row with others beside it");
        break;
      }
    }
  }
  std::printf("\n");
}

// One after the other, each from what the one in front has made.
void check_chain(int64_t rows) {
  constexpr int64_t kWidth = 520;
  std::printf("a chain of %d rows", static_cast<int>(rows));
  Random random{5};
  const Matrix x(random, rows, kWidth, 0), first(random, kWidth, kWidth, 0), second(random, kWidth, kWidth, 0),
      blank(random, rows, kWidth, 0);
  const auto run = [&](bool waits) {
    OnDevice dx(x), d1(first), d2(second), between(blank), out(blank);
    gemm_m64_linear(dx.mat(0, rows), d1.mat(0, kWidth), nullptr, {}, between.mat(0, rows), nullptr);
    if (waits) between.memory.download();
    gemm_m64_linear(between.mat(0, rows), d2.mat(0, kWidth), nullptr, {}, out.mat(0, rows), nullptr);
    if (waits) out.memory.download();
    gemm_m64_linear(out.mat(0, rows), d1.mat(0, kWidth), nullptr, out.mat(0, rows), between.mat(0, rows), nullptr);
    return between.memory.download();
  };
  if (run(false) != run(true)) fail("bits");
  std::printf("\n");
}

void check_takes() {
  std::printf("what is taken");
  alignas(16) static Bf16 memory[64];
  const auto x = [&](int64_t rows, int64_t in, int64_t stride, int64_t at = 0) {
    return Mat<const Bf16>(memory + at, rows, in, stride);
  };
  const auto takes = [&](Mat<const Bf16> a, Mat<const Bf16> w, bool expected) {
    if (takes_gemm_m64(a, w) != expected) fail("takes_gemm_m64");
  };
  takes(x(9, 64, 64), x(5, 64, 64), true);
  takes(x(64, 8, 16), x(5, 8, 24), true);
  takes(x(65, 64, 64), x(5, 64, 64), false);
  takes(x(0, 64, 64), x(5, 64, 64), false);
  takes(x(9, 64, 64), x(0, 64, 64), false);
  takes(x(9, 60, 64), x(5, 60, 64), false);
  takes(x(9, 64, 68), x(5, 64, 64), false);
  takes(x(9, 64, 64), x(5, 64, 68), false);
  takes(x(9, 56, 64, 4), x(5, 56, 64), false);
  takes(x(9, 56, 64), x(5, 56, 64, 4), false);
  if (!takes_gemm_m32(x(32, 64, 64), x(5, 64, 64)) || takes_gemm_m32(x(33, 64, 64), x(5, 64, 64)))
    fail("takes_gemm_m32");
  std::printf("\n");
}

// Of all shapes: tiles that there are, every row of W in one, and no slice without a stage.
void check_tiles() {
  std::printf("tiles");
  const int64_t widths[][3] = {{10496, 2048, 2}, {6144, 2048, 2},  {2048, 2048, 8}, {11264, 2048, 2},
                               {2048, 5632, 8},  {32000, 2048, 1}, {1024, 1024, 4}};
  for (const auto& w : widths) {
    if (gemm_m32_slices(w[0], w[1]) != w[2]) fail("slices of a weight");
  }
  struct Case {
    int64_t out, in;
    bool swiglu;
    int rows, slices;
  };
  for (const Case& c : {Case{10496, 2048, false, 48, 1},
                        {6144, 2048, false, 32, 1},
                        {2048, 2048, false, 48, 4},
                        {11264, 2048, true, 48, 1},
                        {2048, 5632, false, 48, 4},
                        {32000, 2048, false, 128, 1},
                        {1024, 1024, false, 32, 2},
                        {4096, 4096, false, 64, 4},
                        {2048, 128, false, 32, 1},
                        {16, 4096, false, 32, 4}}) {
    const GemmM64Tiles tiles = gemm_m64_tiles(c.out, c.in, c.swiglu);
    if (tiles.rows != c.rows || tiles.slices != c.slices) {
      std::printf(" %d rows, %d slices of %d x %d", tiles.rows, tiles.slices, static_cast<int>(c.out),
                  static_cast<int>(c.in));
      fail("tiles of a weight");
    }
  }
  for (int64_t out = 1; out < 20000; out += out < 600 ? 1 : 97) {
    for (const int64_t in : {8, 64, 128, 512, 520, 1024, 2056, 9216}) {
      for (const bool swiglu : {false, true}) {
        const GemmM64Tiles t = gemm_m64_tiles(out, in, swiglu);
        const bool rows = t.rows % 16 == 0 && t.rows >= 32 && t.rows <= 128 && t.rows != 112,
                   slices = t.slices == 1 || (!swiglu && t.rows <= 64 && (t.slices == 2 || t.slices == 4));
        if (!rows || !slices || (in + 63) / 64 < t.slices) fail("tiles of a shape");
      }
    }
  }
  std::printf("\n");
}

void check_all() {
  check_takes();
  check_tiles();
  for (const int64_t rows : {20, 40}) check_chain(rows);
  for (const int64_t rows : {1, 9, 16, 17, 31, 32}) check_shape({rows, 72, 37, 0, {0, 1}});
  check_shape({32, 8, 1, 0, {0, 1}});
  check_shape({9, 64, 128, 0, {0, 1}, true});
  check_shape({23, 448, 200, 8, {0, 1}, true, Added::kItself});  // a ring's second round
  check_shape({32, 448, 130, 0, {0, 1}, false, Added::kApart});
  check_shape({16, 448, 129, 24, {0, 1}, true});
  check_shape({32, 512, 133, 8, {0, 2}, true, Added::kApart});
  check_shape({20, 904, 256, 0, {0, 2}, false, Added::kItself});
  check_shape({9, 1032, 260, 16, {0, 4}, true, Added::kItself});
  check_shape({32, 1024, 128, 0, {0, 4}});
  check_shape({32, 2048, 136, 0, {0, 8}, true, Added::kItself});
  check_shape({31, 2056, 66, 8, {0, 8}, true, Added::kApart});
  check_shape({12, 5632, 131, 0, {0, 8}, false, Added::kItself});
  check_shape({20, 5632, 64, 0, {0, 8}, true});
  check_shape({9, 72, 74, 0, {0, 1}, false, Added::kNothing, true});
  check_shape({32, 448, 400, 8, {0, 1}, false, Added::kNothing, true});
  check_shape({32, 520, 140, 0, {0, 2}, false, Added::kNothing, true});
  check_shape({17, 1024, 256, 24, {0, 4}, false, Added::kNothing, true});
  check_shape({32, 2048, 134, 0, {0, 8}, false, Added::kNothing, true});
  for (const int64_t rows : {1, 9, 16, 17, 32, 33, 63, 64}) check_shape({rows, 72, 37, 0, {32, 1}});
  check_shape({64, 8, 1, 0, {32, 1}});
  check_shape({9, 64, 128, 0, {32, 1}, true});
  check_shape({33, 1096, 200, 8, {32, 1}, true, Added::kItself});  // a ring's second round
  check_shape({64, 576, 130, 0, {48, 1}, false, Added::kApart});
  check_shape({16, 1032, 129, 24, {64, 1}, true});
  check_shape({64, 1024, 333, 8, {80, 1}, true, Added::kApart});
  check_shape({20, 904, 256, 0, {96, 1}, false, Added::kItself});
  check_shape({57, 712, 515, 0, {128, 1}, true, Added::kItself});
  check_shape({9, 1032, 260, 16, {32, 2}, true, Added::kItself});
  check_shape({64, 1024, 128, 0, {32, 2}});
  check_shape({64, 3200, 136, 0, {64, 2}, true, Added::kItself});
  check_shape({50, 2056, 99, 0, {48, 2}, false, Added::kApart});
  check_shape({63, 2056, 66, 8, {32, 4}, true, Added::kApart});
  check_shape({12, 5632, 131, 0, {32, 4}, false, Added::kItself});
  check_shape({40, 4104, 100, 0, {48, 4}, true});
  check_shape({64, 5632, 135, 0, {64, 4}, true});
  check_shape({9, 72, 74, 0, {32, 1}, false, Added::kNothing, true});
  check_shape({64, 448, 400, 8, {32, 1}, false, Added::kNothing, true});
  check_shape({32, 1096, 140, 0, {48, 1}, false, Added::kNothing, true});
  check_shape({50, 520, 140, 0, {64, 1}, false, Added::kNothing, true});
  check_shape({17, 1024, 256, 24, {80, 1}, false, Added::kNothing, true});
  check_shape({64, 712, 134, 0, {96, 1}, false, Added::kNothing, true});
  check_shape({64, 520, 262, 0, {128, 1}, false, Added::kNothing, true});
}

}  // namespace
}  // namespace fw::cuda

int main() {
  using namespace fw::cuda;
  if (!hopper()) return kNotRun;
  check_all();
  std::printf("%d failures\n", failures);
  return failures == 0 ? 0 : 1;
}
