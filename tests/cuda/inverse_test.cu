// A = (I + T)^-1 of prepare (prepare/inverse.cuh) against the inverse in double: which of its two roundings a T gets,
// and what each leaves. One line a test; the exit status says whether all are right. Built by nvcc for a GPU and by
// the C++ compiler for the emulation.
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <random>
#include <string>
#include <vector>

#include "device_buffer.h"
#include "gpu/launch.h"
#include "gpu/ptx.cuh"
#include "gpu/sw128.h"
#include "scan/cuda/prepare/inverse.cuh"
#include "test_numbers.h"

namespace fw::cuda::test {
namespace {

constexpr int kRows = 64;

struct InverseArgs {
  const float* t;  // [64, 64]
  uint16_t* a;     // a SW128 tile
};
__global__ void inverse_kernel(const __grid_constant__ InverseArgs args) {
  char* const a = shared_memory();
  float* const t = reinterpret_cast<float*>(a + kSw128Bytes);
  const int thread = static_cast<int>(thread_index()), warp = thread / 32;
  if (warp < 4) {
    for (int i = 16 * warp; i < 16 * warp + 16; ++i) {
      for (int j = thread % 32; j < 16 * warp + 16; j += 32) t[triangle_index(i, j)] = args.t[i * kRows + j];
    }
    invert<false>(t, a, {}, warp, [] {});
  } else {
    overlap_invert<false>();
  }
  sync_threads();
  for (int i = thread; i < kSw128Elements; i += 256) args.a[i] = reinterpret_cast<const uint16_t*>(a)[i];
}

using Matrix = std::vector<double>;
std::size_t at(int i, int j) { return static_cast<std::size_t>(i * kRows + j); }

// T_ij = f(i, j) below the diagonal, as float32 numbers.
template <class Entry>
Matrix triangle(Entry&& entry) {
  Matrix t(kRows * kRows, 0.0);
  for (int i = 0; i < kRows; ++i) {
    for (int j = 0; j < i; ++j) t[at(i, j)] = static_cast<float>(entry(i, j));
  }
  return t;
}
Matrix inverse(const Matrix& t) {
  Matrix a(kRows * kRows, 0.0);
  for (int j = 0; j < kRows; ++j) {
    for (int i = j; i < kRows; ++i) {
      a[at(i, j)] = i == j ? 1 : 0;
      for (int m = j; m < i; ++m) a[at(i, j)] -= t[at(i, m)] * a[at(m, j)];
    }
  }
  return a;
}
Matrix on_device(const Matrix& t) {
  DeviceBuffer<float> from(std::vector<float>(t.begin(), t.end()));
  DeviceBuffer<uint16_t> to(static_cast<std::size_t>(kSw128Elements));
  launch(inverse_kernel, {1, 1, 1}, 256, static_cast<int>(kSw128Bytes + kTriangleBytes), nullptr,
         InverseArgs{from.data(), to.data()});
  const std::vector<uint16_t> tile = to.download();
  Matrix a(kRows * kRows);
  for (int i = 0; i < kRows; ++i) {
    for (int j = 0; j < kRows; ++j) a[at(i, j)] = testing::from_bf16(tile[static_cast<std::size_t>(sw128_index(i, j))]);
  }
  return a;
}

constexpr int kFirst = 16;  // row whose rounding may be another
// Unit roundoffs.
constexpr double kBf16 = 0x1p-8, kTf32 = 0x1p-11;

// The largest multiple of its bound that an entry is off by: of A, where every entry is rounded once at the end ...
double error_of_entries(const Matrix& t, const Matrix& a, int rows) {
  const Matrix exact = inverse(t);
  double worst = 0;
  for (int i = 0; i < rows; ++i) {
    for (int j = 0; j < kRows; ++j) {
      double sum = 0;
      for (int m = j; m < i; ++m) sum += std::abs(t[at(i, m)] * exact[at(m, j)]);
      const double bound = kBf16 * std::abs(exact[at(i, j)]) + 2 * kTf32 * sum + 1e-6;
      worst = std::max(worst, std::abs(a[at(i, j)] - exact[at(i, j)]) / bound);
    }
  }
  return worst;
}
// ... and of (I + T) A - I, where rows are made of rounded ones. Of T the blocks left of the diagonal's are TF32.
double error_of_residual(const Matrix& t, const Matrix& a) {
  double worst = 0;
  for (int i = kFirst; i < kRows; ++i) {
    for (int j = 0; j < kRows; ++j) {
      double sum = a[at(i, j)] - (i == j ? 1 : 0), size = 0;
      for (int m = 0; m < i; ++m) {
        sum += t[at(i, m)] * a[at(m, j)];
        if (m < i / 16 * 16) size += std::abs(t[at(i, m)] * a[at(m, j)]);
      }
      worst = std::max(worst, std::abs(sum) / (kBf16 * std::abs(a[at(i, j)]) + kTf32 * size + 1e-6));
    }
  }
  return worst;
}

int failures = 0;

enum class Rounding { kAtTheEnd, kRowByRow };
void expect(const std::string& name, const Matrix& t, Rounding rounding) {
  const Matrix a = on_device(t);
  const bool at_the_end = rounding == Rounding::kAtTheEnd;
  const double entries = error_of_entries(t, a, at_the_end ? kRows : kFirst), residual = error_of_residual(t, a);
  const bool right = entries <= 1 && (at_the_end ? residual > 1 : residual <= 1);
  std::printf("%s %s: entries %.3g, residual %.3g of their bounds\n", right ? "ok    " : "WRONG ", name.c_str(),
              entries, residual);
  failures += right ? 0 : 1;
}

void run() {
  std::mt19937 random(7);
  std::normal_distribution<double> normal;
  const auto noise = [&](double size) { return size * normal(random); };
  const auto alike = Rounding::kRowByRow, others = Rounding::kAtTheEnd;
  expect("equal keys", triangle([](int, int) { return 0.99967; }), alike);
  expect("equal keys, small steps", triangle([](int, int) { return 0.3; }), alike);
  expect("nearly equal keys", triangle([&](int, int) { return 0.9997 + noise(1e-3); }), alike);
  expect("two in turn", triangle([](int i, int j) { return (i + j) % 2 == 0 ? 0.99967 : 0.113; }), alike);
  expect("four in turn", triangle([](int i, int j) { return (i + j) % 4 == 0 ? 0.9 : -0.07; }), alike);
  expect("opposite keys in turn", triangle([](int i, int j) { return (i + j) % 2 == 0 ? 0.85 : -0.85; }), alike);
  expect("five in turn", triangle([](int i, int j) { return (i + j) % 5 == 0 ? 0.9 : -0.07; }), others);
  expect("random keys", triangle([&](int, int) { return noise(0.1); }), others);
  expect("equal keys that decay", triangle([](int i, int j) { return 0.97 * std::pow(0.8, i - j); }), others);
  expect("equal keys at small steps", triangle([](int, int) { return 0.24; }), others);
  expect("equal keys from token 16 on", triangle([&](int, int j) { return j >= 16 ? 0.85 : noise(0.05); }), others);
  // The edge: of 32 pairs of columns of rows 8 to 15 so many have an entry above a quarter.
  for (const int pairs : {15, 16}) {
    const auto entry = [&](int i, int j) {
      const bool large = i >= 8 && i < 16 && j < 8 && 4 * (i - 8) + j / 2 < pairs && j % 2 == i % 2;
      return large ? -0.26 : 0.1 + noise(0.02);
    };
    expect("large: " + std::to_string(pairs) + " pairs", triangle(entry), pairs == 16 ? alike : others);
  }
  // No bits of a row depend on the rows below it.
  const Matrix whole = triangle([&](int, int) { return 0.9 + noise(0.01); });
  const Matrix of_whole = on_device(whole);
  for (const int rows : {15, 16, 17, 40}) {
    const Matrix a = on_device(triangle([&](int i, int j) { return i < rows ? whole[at(i, j)] : 0; }));
    int differ = 0;
    for (int i = 0; i < rows; ++i) {
      for (int j = 0; j < kRows; ++j) differ += a[at(i, j)] != of_whole[at(i, j)];
    }
    std::printf("%s %d rows alone: %d bits differ\n", differ == 0 ? "ok    " : "WRONG ", rows, differ);
    failures += differ == 0 ? 0 : 1;
  }
}

}  // namespace
}  // namespace fw::cuda::test

int main() {
  using namespace fw::cuda::test;
  try {
    run();
    std::printf("%d failures\n", failures);
  } catch (const std::exception& error) {
    std::printf("%s\n", error.what());
    return 2;
  }
  return failures != 0 ? 1 : 0;
}
