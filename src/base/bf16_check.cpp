#include "base/bf16_check.h"

#include <vector>

#include "base/threads.h"

namespace fw {
namespace {

struct Form {
  Trans ta, tb;
  int64_t m, n, k;
  bool accumulate;
  int64_t gap;  // elements between the rows of an operand
};

// Integers from -4 to 4 in no order.
std::vector<float> integers(int64_t count, uint32_t seed) {
  std::vector<float> values(static_cast<size_t>(count));
  uint32_t state = seed;
  for (float& value : values) {
    state = state * 1664525U + 1013904223U;
    value = static_cast<float>(static_cast<int>((state >> 16) % 9) - 4);
  }
  return values;
}

std::vector<Bf16> as_bf16(const std::vector<float>& values) {
  std::vector<Bf16> out(values.size());
  round_to_bf16(static_cast<int64_t>(values.size()), values.data(), out.data());
  return out;
}

bool right(Bf16Product product, const Form& f) {
  const int64_t lda = (f.ta == Trans::kNo ? f.k : f.m) + f.gap, ldb = (f.tb == Trans::kNo ? f.n : f.k) + f.gap,
                ldc = f.n + f.gap;
  const std::vector<float> a = integers((f.ta == Trans::kNo ? f.m : f.k) * lda, 1),
                           b = integers((f.tb == Trans::kNo ? f.k : f.n) * ldb, 2);
  const std::vector<Bf16> a_bits = as_bf16(a), b_bits = as_bf16(b);
  std::vector<float> expected = integers(f.m * ldc, 3);
  std::vector<float> c = expected;
  for (int64_t i = 0; i < f.m; ++i) {
    for (int64_t j = 0; j < f.n; ++j) {
      float sum = f.accumulate ? expected[static_cast<size_t>(i * ldc + j)] : 0.0F;
      for (int64_t l = 0; l < f.k; ++l) {
        sum += a[static_cast<size_t>(f.ta == Trans::kNo ? i * lda + l : l * lda + i)] *
               b[static_cast<size_t>(f.tb == Trans::kNo ? l * ldb + j : j * ldb + l)];
      }
      expected[static_cast<size_t>(i * ldc + j)] = sum;
    }
  }
  parallel_for(1, [&](int64_t) {
    product(f.ta, f.tb, f.m, f.n, f.k, a_bits.data(), lda, b_bits.data(), ldb, f.accumulate, c.data(), ldc);
  });
  return c == expected;
}

}  // namespace

bool bf16_products_are_right(Bf16Product plain, Bf16Product packed) {
  struct Shape {
    int64_t m, n, k, gap;
  };
  for (const Shape& s : {Shape{33, 17, 65, 0}, Shape{64, 48, 64, 0}, Shape{40, 96, 24, 8}}) {
    for (const Trans ta : {Trans::kNo, Trans::kYes}) {
      for (const Trans tb : {Trans::kNo, Trans::kYes}) {
        for (const bool accumulate : {false, true}) {
          const Form form{ta, tb, s.m, s.n, s.k, accumulate, s.gap};
          if (!right(plain, form) || (ta == Trans::kNo && !right(packed, form))) return false;
        }
      }
    }
  }
  return true;
}

}  // namespace fw
