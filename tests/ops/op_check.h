// One harness for all operations. An operation under test says how to run forward and backward on flat arrays and gives
// its formula in plain scalar double. check_op compares:
// - values,
// - gradients (against finite differences of the formula),
// - float against double,
// - accumulation,
// - bits over numbers of threads.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "base/mat.h"
#include "base/random.h"
#include "base/threads.h"
#include "ops/exec.h"
#include "support/left_out.h"

namespace fw::testing {

// The host's context, with scratch memory of the test program.
template <class T>
Exec<T> host_exec(Precision precision = Precision::kNative) {
  static Arena arena, contexts;
  return {host_ops<T>(), host_device(), arena, contexts, precision};
}

template <class T>
using Values = std::vector<std::vector<T>>;

// A matrix with unused columns after each row. They hold NaN, so that reading them spoils a result; they must still
// hold it when the values are taken out, so that writing them is seen.
template <class T>
class Strided {
 public:
  static constexpr int64_t kPad = 3;

  Strided(int64_t rows, int64_t cols)
      : rows_(rows),
        cols_(cols),
        data_(static_cast<size_t>(rows * (cols + kPad)), std::numeric_limits<T>::quiet_NaN()) {}
  Strided(int64_t rows, int64_t cols, const std::vector<T>& values) : Strided(rows, cols) {
    EXPECT_EQ(values.size(), static_cast<size_t>(rows * cols));
    for (int64_t r = 0; r < rows; ++r) std::copy_n(values.data() + r * cols, cols, mat().row(r));
  }

  Mat<T> mat() { return {data_.data(), rows_, cols_, cols_ + kPad}; }
  Mat<const T> view() const { return {data_.data(), rows_, cols_, cols_ + kPad}; }

  std::vector<T> values() const {
    std::vector<T> out;
    for (int64_t r = 0; r < rows_; ++r) {
      const T* row = view().row(r);
      out.insert(out.end(), row, row + cols_);
      for (int64_t c = cols_; c < cols_ + kPad; ++c)
        EXPECT_TRUE(std::isnan(row[c])) << "column " << c << " of row " << r << " was overwritten";
    }
    return out;
  }

 private:
  int64_t rows_;
  int64_t cols_;
  std::vector<T> data_;
};

inline std::vector<double> random_values(Random& random, int64_t n, double deviation = 1.0) {
  std::vector<double> out(static_cast<size_t>(n));
  // Rounded to float, so that a float run sees the same numbers.
  for (double& v : out) v = static_cast<double>(static_cast<float>(deviation * random.normal()));
  return out;
}

template <class T>
Values<T> cast(const Values<double>& values) {
  Values<T> out;
  for (const auto& v : values) out.emplace_back(v.begin(), v.end());
  return out;
}

// |got - want| <= tolerance times the largest |want| (or `floor`, if that is larger).
template <class T>
void expect_close(const std::vector<T>& got, const std::vector<double>& want, double tolerance, const std::string& what,
                  double floor = 1e-3) {
  ASSERT_EQ(got.size(), want.size()) << what;
  double scale = floor;
  for (double w : want) scale = std::max(scale, std::abs(w));
  for (size_t i = 0; i < want.size(); ++i) {
    ASSERT_LE(std::abs(static_cast<double>(got[i]) - want[i]), tolerance * scale)
        << what << " at " << i << ": got " << got[i] << ", expected " << want[i];
  }
}

template <class T>
bool same_bits(const Values<T>& a, const Values<T>& b) {
  if (a.size() != b.size()) return false;
  for (size_t i = 0; i < a.size(); ++i) {
    if (a[i].size() != b[i].size()) return false;
    if (!a[i].empty() && std::memcmp(a[i].data(), b[i].data(), a[i].size() * sizeof(T)) != 0) return false;
  }
  return true;
}

class Threads {
 public:
  explicit Threads(int n) { set_num_threads(n); }
  ~Threads() { set_num_threads(0); }
};

inline double weighted_sum(const Values<double>& outputs, const Values<double>& douts) {
  double sum = 0;
  for (size_t o = 0; o < outputs.size(); ++o) {
    for (size_t i = 0; i < outputs[o].size(); ++i) sum += outputs[o][i] * douts[o][i];
  }
  return sum;
}

// Five-point central difference of sum(formula * douts) in element i of input `which`.
template <class Op>
double finite_difference(const Op& op, Values<double>& inputs, const Values<double>& douts, size_t which, size_t i) {
  const double h = 1e-3, x = inputs[which][i];
  const auto at = [&](double offset) {
    inputs[which][i] = x + offset;
    return weighted_sum(op.formula(inputs), douts);
  };
  const double difference = (8 * (at(h) - at(-h)) - (at(2 * h) - at(-2 * h))) / (12 * h);
  inputs[which][i] = x;
  return difference;
}
// In every element.
template <class Op>
std::vector<double> finite_difference(const Op& op, Values<double> inputs, const Values<double>& douts, size_t which) {
  std::vector<double> out;
  for (size_t i = 0; i < inputs[which].size(); ++i) out.push_back(finite_difference(op, inputs, douts, which, i));
  return out;
}

// Op:
//   Values<double> inputs(Random&)                    values of all inputs and parameters
//   std::vector<bool> accumulates()                   per input: whether backward adds to the gradient it finds
//   Values<double> formula(inputs)                    outputs in scalar double
//   Values<T> forward<T>(inputs)                      outputs of the operation
//   Values<T> backward<T>(inputs, douts, before)      gradients of all inputs, `before` in accumulating ones; an input
//                                                     without gradient gives an empty vector
struct Tolerance {
  double forward = 1e-13;
  double gradient = 1e-8;
  double float_forward = 2e-6;
  double float_gradient = 1e-5;
};

template <class Op>
void check_op(const Op& op, const std::string& name, Tolerance tolerance = {}) {
  SCOPED_TRACE(name);
  Random random(7);
  Values<double> inputs = op.inputs(random);
  const Values<double> want = op.formula(inputs);
  const Values<double> got = op.template forward<double>(inputs);
  const Values<float> got_float = op.template forward<float>(cast<float>(inputs));
  ASSERT_EQ(got.size(), want.size());
  Values<double> douts;
  for (size_t o = 0; o < want.size(); ++o) {
    expect_close(got[o], want[o], tolerance.forward, name + " double output " + std::to_string(o));
    expect_close(got_float[o], want[o], tolerance.float_forward, name + " float output " + std::to_string(o));
    douts.push_back(random_values(random, static_cast<int64_t>(want[o].size())));
  }

  Values<double> before;
  for (const auto& v : inputs) before.push_back(random_values(random, static_cast<int64_t>(v.size())));
  const Values<double> gradients = op.template backward<double>(inputs, douts, before);
  const Values<float> gradients_float =
      op.template backward<float>(cast<float>(inputs), cast<float>(douts), cast<float>(before));
  ASSERT_EQ(gradients.size(), inputs.size());
  const std::vector<bool> accumulates = op.accumulates();
  for (size_t i = 0; i < inputs.size(); ++i) {
    if (gradients[i].empty() && !inputs[i].empty()) continue;
    // With a sanitizer twelve elements have a difference, for the formula is not what it watches.
    std::vector<double> expected = gradients[i];
    const auto share = static_cast<int64_t>(expected.size() + 11) / 12;
    for (size_t j = 0; j < expected.size(); ++j) {
      if (left_out(static_cast<int64_t>(j), share)) continue;
      expected[j] = finite_difference(op, inputs, douts, i, j) + (accumulates[i] ? before[i][j] : 0);
    }
    expect_close(gradients[i], expected, tolerance.gradient, name + " gradient of input " + std::to_string(i));
    expect_close(gradients_float[i], gradients[i], tolerance.float_gradient,
                 name + " float gradient of input " + std::to_string(i));
  }
}

// The bits of forward and backward with 1, 2 and 3 threads.
template <class Op>
void check_threads(const Op& op, const std::string& name) {
  SCOPED_TRACE(name);
  Random random(11);
  const Values<double> inputs = op.inputs(random);
  Values<double> before;
  for (const auto& v : inputs) before.push_back(random_values(random, static_cast<int64_t>(v.size())));
  Values<float> outputs;
  Values<float> gradients;
  Values<float> douts;
  for (int threads = 1; threads <= 3; ++threads) {
    const Threads limit(threads);
    const Values<float> out = op.template forward<float>(cast<float>(inputs));
    if (threads == 1) {
      for (const auto& v : out) {
        const std::vector<double> d = random_values(random, static_cast<int64_t>(v.size()));
        douts.emplace_back(d.begin(), d.end());
      }
    }
    const Values<float> grad = op.template backward<float>(cast<float>(inputs), douts, cast<float>(before));
    if (threads == 1) {
      outputs = out;
      gradients = grad;
    } else {
      EXPECT_TRUE(same_bits(out, outputs)) << name << ": outputs differ between 1 and " << threads << " threads";
      EXPECT_TRUE(same_bits(grad, gradients)) << name << ": gradients differ between 1 and " << threads << " threads";
    }
  }
}

}  // namespace fw::testing
