// What the tests of lists of operations share: an operation runs on the host in double and on a device in its type,
// with the same (rounded) random numbers, and what it leaves is compared.
#pragma once

#include <cmath>
#include <string>
#include <type_traits>
#include <vector>

#include "ops/device_check.h"

namespace fw::testing {

struct Result {
  std::string name;
  std::vector<double> values;
  bool wide;  // of the type of parameters
};

// One run of an operation with activations of type T; random numbers are those of type R, which is under test.
template <class T, class R>
struct Run {
  using W = Wide<T>;
  Context<T> on;
  std::vector<Result> results;
  explicit Run(Device& device) : on(device) {}

  std::vector<double> numbers(int64_t n, double from, double to) {
    std::vector<double> out(static_cast<size_t>(n));
    for (double& x : out) x = value_of(stored<R>(from + (to - from) * on.generator.uniform()));
    return out;
  }
  Matrix<T> matrix(int64_t rows, int64_t cols, int64_t pad, double from = -2, double to = 2) {
    return Matrix<T>(on.device, rows, cols, pad, numbers(rows * cols, from, to));
  }
  // Without numbers: an output.
  Matrix<T> out(int64_t rows, int64_t cols, int64_t pad) { return Matrix<T>(on.device, rows, cols, pad); }
  Matrix<W> wide(int64_t rows, int64_t cols, int64_t pad) {
    Matrix<W> x(on.device, rows, cols, pad, as_floats(numbers(rows * cols, -2, 2)));
    return x;
  }
  Matrix<W> wide_out(int64_t rows, int64_t cols, int64_t pad) { return Matrix<W>(on.device, rows, cols, pad); }
  Buffer<W> parameters(int64_t n, double from = -1, double to = 1) {
    return on.template buffer<W>(as_floats(numbers(n, from, to)));
  }
  void keep(const std::string& name, const Matrix<T>& x) { results.push_back({name, x.values(), false}); }
  void keep_wide(const std::string& name, const Matrix<W>& x) { results.push_back({name, x.values(), true}); }
  void keep_wide(const std::string& name, const Buffer<W>& x) { results.push_back({name, values_of(x), true}); }

  static std::vector<double> as_floats(std::vector<double> x) {
    for (double& value : x) value = static_cast<double>(static_cast<float>(value));
    return x;
  }
};

// body(run) on the host in double and on the device in its type. `bf16`: tolerance where activations are bf16.
template <class Body>
void compare(const Case& one, const Body& body, double bf16 = kTolerance<Bf16>) {
  const auto with = [&]<class T>() {
    Run<double, T> host(host_device());
    body(host);
    Run<T, T> device(*one.device);
    body(device);
    ASSERT_EQ(host.results.size(), device.results.size());
    for (size_t i = 0; i < host.results.size(); ++i) {
      const Result& result = device.results[i];
      const bool rounded = std::is_same_v<T, Bf16> && !result.wide;
      expect_near(result.values, host.results[i].values,
                  rounded                     ? bf16
                  : std::is_same_v<T, double> ? 1e-12
                                              : 1e-5,
                  result.name);
    }
  };
  if (one.type == Type::kFloat) with.template operator()<float>();
  if (one.type == Type::kBf16) with.template operator()<Bf16>();
}

struct Shape {
  int64_t rows, cols, pad;
};
inline const Shape kShapes[] = {{0, 16, 0}, {1, 1, 0},    {1, 520, 8},   {63, 24, 8}, {64, 48, 3},
                                {65, 5, 2}, {130, 16, 0}, {300, 264, 8}, {40, 33, 0}};

template <class Body>
void for_shapes(const Body& body) {
  for (const Shape& s : kShapes) {
    SCOPED_TRACE(::testing::Message() << s.rows << " x " << s.cols << " + " << s.pad);
    body(s);
  }
}

// A layout in a device's memory.
struct Pass {
  Buffer<int64_t> offsets, positions;
  PassLayout layout;
  Pass(Device& device, const SeqLayout& sequences, const std::vector<int64_t>& before)
      : offsets(device, sequences.count() + 1),
        positions(device, static_cast<int64_t>(before.size())),
        layout(sequences, offsets.data(), positions.data()) {
    offsets.write(0, sequences.offsets());
    positions.write(0, before);
  }
};

}  // namespace fw::testing
