// Products of few rows on the device against loops in double over the same numbers: a program of its own that prints a
// line per shape and fails with 1.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <type_traits>
#include <vector>

#include "device_buffer.h"
#include "ops/cuda/gemm_m8.h"
#include "test_numbers.h"

namespace fw::cuda {
namespace {

using testing::from_bf16;
using testing::Random;
using testing::to_bf16;

// Numbers as tensors of T have them, and T as memory has it.
template <class T>
using Stored = std::conditional_t<std::is_same_v<T, float>, float, uint16_t>;
template <class T>
Stored<T> stored_as(double x) {
  if constexpr (std::is_same_v<T, float>) {
    return static_cast<float>(x);
  } else {
    return to_bf16(x);
  }
}
double value(float x) { return static_cast<double>(x); }
double value(uint16_t x) { return from_bf16(x); }

int failures = 0;
void fail(const char* what) {
  std::printf("  FAILED: %s", what);
  ++failures;
}

struct Shape {
  int64_t rows, in, out, padding;
  bool bias = false, accumulate = false;
};

template <class T>
struct Problem {
  Shape s;
  std::vector<Stored<T>> x, weight, y;
  std::vector<float> bias;

  explicit Problem(const Shape& shape) : s(shape) {
    Random random{11};
    const auto fill = [&](std::vector<Stored<T>>& m, int64_t rows, int64_t cols) {
      m.assign(static_cast<size_t>(rows * (cols + s.padding)), stored_as<T>(std::nan("")));
      for (int64_t i = 0; i < rows; ++i) {
        for (int64_t c = 0; c < cols; ++c) m[static_cast<size_t>(i * (cols + s.padding) + c)] = stored_as<T>(random(1));
      }
    };
    fill(x, s.rows, s.in);
    fill(weight, s.out, s.in);
    fill(y, s.rows, s.out);
    for (int64_t i = 0; i < s.out; ++i) bias.push_back(static_cast<float>(random(1)));
  }

  // The rows first .. first + count of x.
  std::vector<Stored<T>> run(int64_t first, int64_t count) const {
    DeviceBuffer<Stored<T>> dx(x), dw(weight), dy(y);
    DeviceBuffer<float> db(bias);
    const auto at = [](DeviceBuffer<Stored<T>>& b) { return reinterpret_cast<T*>(b.data()); };
    const int64_t in = s.in + s.padding, out = s.out + s.padding;
    gemm_m8_linear<T>(Mat<const T>(at(dx) + first * in, count, s.in, in), Mat<const T>(at(dw), s.out, s.in, in),
                      s.bias ? db.data() : nullptr, Mat<T>(at(dy) + first * out, count, s.out, out),
                      s.accumulate ? Write::kAccumulate : Write::kOverwrite, nullptr);
    return dy.download();
  }
};

template <class T>
void check_shape(const Shape& s) {
  const bool bf16 = !std::is_same_v<T, float>;
  std::printf("%s %lld x %lld -> %lld%s%s%s", bf16 ? "bf16" : "float", static_cast<long long>(s.rows),
              static_cast<long long>(s.in), static_cast<long long>(s.out), s.padding > 0 ? ", rows apart" : "",
              s.bias ? ", bias" : "", s.accumulate ? ", added" : "");
  const Problem<T> p(s);
  const auto got = p.run(0, s.rows);
  // Half a unit of the last place of what is stored, and the sums in float32.
  const double unit = bf16 ? 1.0 / 256 : 1e-7, sums = 2e-7 * std::sqrt(static_cast<double>(s.in)) * 4;
  double worst = 0;
  for (int64_t m = 0; m < s.rows; ++m) {
    for (int64_t o = 0; o < s.out + s.padding; ++o) {
      const size_t index = static_cast<size_t>(m * (s.out + s.padding) + o);
      if (o >= s.out) {
        if (!std::isnan(value(got[index]))) fail("wrote beside its columns");
        continue;
      }
      double want = s.bias ? value(p.bias[static_cast<size_t>(o)]) : 0.0;
      for (int64_t c = 0; c < s.in; ++c) {
        want += value(p.x[static_cast<size_t>(m * (s.in + s.padding) + c)]) *
                value(p.weight[static_cast<size_t>(o * (s.in + s.padding) + c)]);
      }
      if (s.accumulate) want += value(p.y[index]);
      const double error = std::abs(value(got[index]) - want) /
                           (unit * std::abs(want) + sums * std::max(1.0, std::sqrt(static_cast<double>(s.in)) / 3));
      worst = std::isfinite(error) ? std::max(worst, error) : INFINITY;
    }
  }
  std::printf(": %.2f of the bound", worst);
  if (!(worst <= 1)) fail("values");
  if (s.rows > 1) {
    const auto alone = p.run(s.rows - 1, 1);
    const auto begin = static_cast<long>((s.rows - 1) * (s.out + s.padding));
    if (!std::equal(alone.begin() + begin, alone.begin() + begin + s.out, got.begin() + begin))
      fail("bits of a row alone");
  }
  std::printf("\n");
}

template <class T>
void check_all() {
  for (int64_t rows = 1; rows <= kGemmM8MaxM; ++rows) check_shape<T>({rows, 96, 37, 0});
  check_shape<T>({1, 8, 1, 0});
  check_shape<T>({1, 1, 3, 0, true});
  check_shape<T>({3, 17, 9, 0, false, true});
  check_shape<T>({2, 300, 65, 3, true});
  check_shape<T>({5, 512, 40, 8, true, true});
  check_shape<T>({1, 2048, 130, 8, true, true});
  check_shape<T>({8, 5632, 12, 0});
  check_shape<T>({1, 2056, 5, 0});
  check_shape<T>({3, 1024, 17, 0});
  check_shape<T>({2, 4104, 16, 0});
}

}  // namespace
}  // namespace fw::cuda

int main() {
  using namespace fw::cuda;
  if (!hopper()) return kNotRun;
  check_all<fw::Bf16>();
  check_all<float>();
  std::printf("%d failures\n", failures);
  return failures == 0 ? 0 : 1;
}
