// What tests of operations on every device share: which devices and types there are, matrices of a device with columns
// that must not be touched, and the context that operations run in.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <string>
#include <type_traits>
#include <vector>

#include "base/bf16.h"
#include "base/buffer.h"
#include "base/error.h"
#include "base/random.h"
#include "ops/backend.h"

namespace fw::testing {

enum class Type { kDouble, kFloat, kBf16 };

struct Case {
  std::string name;
  Device* device;
  Type type;
};

inline std::vector<Case> cases() {
  std::vector<Case> list = {{"HostDouble", &host_device(), Type::kDouble}, {"HostFloat", &host_device(), Type::kFloat}};
  try {
    Device& cuda = cuda_device();
    list.push_back({"CudaFloat", &cuda, Type::kFloat});
    list.push_back({"CudaBf16", &cuda, Type::kBf16});
  } catch (const DeviceError&) {
  }
  return list;
}

template <class T>
T stored(double x) {
  if constexpr (std::is_same_v<T, Bf16>) {
    const float value = static_cast<float>(x);
    Bf16 out;
    round_to_bf16(1, &value, &out);
    return out;
  } else {
    return static_cast<T>(x);
  }
}
template <class T>
double value_of(T x) {
  if constexpr (std::is_same_v<T, Bf16>) {
    float out = 0;
    widen_bf16(1, &x, &out);
    return static_cast<double>(out);
  } else {
    return static_cast<double>(x);
  }
}

// Of a result of type T, as a share of the largest value; half a unit of bf16's last place is 2^-9.
template <class T>
inline constexpr double kTolerance = std::is_same_v<T, double>  ? 1e-12
                                     : std::is_same_v<T, float> ? 5e-6
                                                                : 4e-3;

inline void expect_near(const std::vector<double>& got, const std::vector<double>& want, double tolerance,
                        const std::string& what) {
  ASSERT_EQ(got.size(), want.size()) << what;
  double largest = 1e-3;
  for (const double w : want) largest = std::max(largest, std::abs(w));
  for (size_t i = 0; i < want.size(); ++i) ASSERT_NEAR(got[i], want[i], tolerance * largest) << what << " at " << i;
}

// A matrix of the device; columns after each row hold NaN, which must neither be read nor overwritten.
template <class T>
class Matrix {
 public:
  Matrix(Device& device, int64_t rows, int64_t cols, int64_t pad)
      : rows_(rows), cols_(cols), stride_(cols + pad), memory_(device, rows * stride_) {
    fill({});
  }
  Matrix(Device& device, int64_t rows, int64_t cols, int64_t pad, const std::vector<double>& values)
      : Matrix(device, rows, cols, pad) {
    fill(values);
  }

  Mat<T> mat() { return {memory_.data(), rows_, cols_, stride_}; }
  std::vector<double> values() const {
    const std::vector<T> all = memory_.to_vector();
    std::vector<double> out;
    for (int64_t r = 0; r < rows_; ++r) {
      for (int64_t c = 0; c < stride_; ++c) {
        const double x = value_of(all[static_cast<size_t>(r * stride_ + c)]);
        if (c < cols_) {
          out.push_back(x);
        } else {
          EXPECT_TRUE(std::isnan(x)) << "column " << c << " of row " << r << " was overwritten";
        }
      }
    }
    return out;
  }

 private:
  void fill(const std::vector<double>& values) {
    std::vector<T> all(static_cast<size_t>(rows_ * stride_), stored<T>(std::numeric_limits<double>::quiet_NaN()));
    for (int64_t r = 0; r < rows_ && !values.empty(); ++r) {
      for (int64_t c = 0; c < cols_; ++c)
        all[static_cast<size_t>(r * stride_ + c)] = stored<T>(values[static_cast<size_t>(r * cols_ + c)]);
    }
    memory_.write(0, all);
  }

  int64_t rows_, cols_, stride_;
  Buffer<T> memory_;
};

template <class T>
struct Context {
  Device& device;
  Arena arena{device}, contexts;
  Exec<T> exec{table_of<T>(device), device, arena, contexts};
  using W = Wide<T>;
  using Activation = T;

  explicit Context(Device& d) : device(d) {}
  // Random numbers of T.
  std::vector<double> random(int64_t n) {
    std::vector<double> out(static_cast<size_t>(n));
    for (double& x : out) x = value_of(stored<T>(static_cast<double>(static_cast<float>(generator.normal()))));
    return out;
  }
  std::vector<double> random_wide(int64_t n) {
    std::vector<double> out(static_cast<size_t>(n));
    for (double& x : out) x = static_cast<double>(static_cast<float>(generator.normal()));
    return out;
  }
  template <class V>
  Buffer<V> buffer(const std::vector<double>& values) {
    std::vector<V> converted;
    converted.reserve(values.size());
    for (const double x : values) converted.push_back(stored<V>(x));
    Buffer<V> memory(device, static_cast<int64_t>(values.size()));
    memory.write(0, converted);
    return memory;
  }
  Random generator{5};
};

template <class V>
std::vector<double> values_of(const Buffer<V>& memory) {
  std::vector<double> out;
  out.reserve(static_cast<size_t>(memory.size()));
  for (const V x : memory.to_vector()) out.push_back(value_of(x));
  return out;
}

class OnDevice : public ::testing::TestWithParam<Case> {
 protected:
  template <class Body>
  void with_type(const Body& body) {
    Device& device = *GetParam().device;
    if (GetParam().type == Type::kDouble) body(Context<double>(device));
    if (GetParam().type == Type::kFloat) body(Context<float>(device));
    if (GetParam().type == Type::kBf16) body(Context<Bf16>(device));
  }
};

}  // namespace fw::testing
