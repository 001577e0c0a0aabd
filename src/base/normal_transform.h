// A normal number of two numbers of the generator (Box and Muller 1958), with the same bits on the host and on a CUDA
// device. Logarithm and cosine are sums and products of doubles, each rounded by itself, in an order that is written
// here. (The functions of the two standard libraries differ in their last bit now and then, and so do products that a
// compiler adds on unrounded.) Both are within 3 units in the last place.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__CUDACC__)
#define FW_SIDE __device__
#else
#define FW_SIDE
#endif

namespace fw::normal_detail {

#if defined(__CUDACC__)
FW_SIDE inline double product(double a, double b) { return __dmul_rn(a, b); }
FW_SIDE inline double sum(double a, double b) { return __dadd_rn(a, b); }
FW_SIDE inline double quotient(double a, double b) { return __ddiv_rn(a, b); }
FW_SIDE inline double root(double a) { return __dsqrt_rn(a); }
#else
// For base/random.cpp alone, which is compiled with -ffp-contract=off.
inline double product(double a, double b) { return a * b; }
inline double sum(double a, double b) { return a + b; }
inline double quotient(double a, double b) { return a / b; }
inline double root(double a) { return std::sqrt(a); }
#endif

// c[0] + x (c[1] + x (c[2] + ...))
template <int kCount>
FW_SIDE inline double polynomial(const double (&c)[kCount], double x) {
  double y = c[kCount - 1];
  for (int i = kCount - 2; i >= 0; --i) y = sum(product(y, x), c[i]);
  return y;
}

// log(n 2^-53), 1 <= n <= 2^53: with n 2^-53 = 2^k f, 0.7 < f <= 1.42, and s = (f - 1) / (f + 1) it is k log 2 + 2 s (1
// + s^2/3 + s^4/5 + ...), |s| < 0.172.
FW_SIDE inline double log_of_share(uint64_t n) {
  const double series[] = {1.0 / 3,  1.0 / 5,  1.0 / 7,  1.0 / 9,  1.0 / 11,
                           1.0 / 13, 1.0 / 15, 1.0 / 17, 1.0 / 19, 1.0 / 21};
  constexpr double kHigh = 0x1.62e42feep-1, kLow = 0x1.a39ef35793c76p-33;  // of log 2: k kHigh is exact
  double f = static_cast<double>(n);
  uint64_t bits = 0;
  memcpy(&bits, &f, sizeof(bits));
  int k = static_cast<int>(bits >> 52) - 1023 - 53;
  bits = (bits & 0x000fffffffffffff) | 0x3ff0000000000000;
  memcpy(&f, &bits, sizeof(f));
  if (f > 1.4142135623730951) {
    f = product(f, 0.5);
    ++k;
  }
  const double s = quotient(sum(f, -1.0), sum(f, 1.0)), z = product(s, s), twice = sum(s, s);
  const double rest = product(product(twice, z), polynomial(series, z));
  return sum(product(k, kHigh), sum(twice, sum(rest, product(k, kLow))));
}

// cos(2 pi n 2^-53), 0 <= n < 2^53: by quarters of a turn, the rest at most an eighth either way.
FW_SIDE inline double cos_of_turn(uint64_t n) {
  const double cosine[] = {1.0,
                           -1.0 / 2,
                           1.0 / 24,
                           -1.0 / 720,
                           1.0 / 40320,
                           -1.0 / 3628800,
                           1.0 / 479001600,
                           -1.0 / 87178291200,
                           1.0 / 20922789888000,
                           -1.0 / 6402373705728000};
  const double sine[] = {1.0,
                         -1.0 / 6,
                         1.0 / 120,
                         -1.0 / 5040,
                         1.0 / 362880,
                         -1.0 / 39916800,
                         1.0 / 6227020800,
                         -1.0 / 1307674368000,
                         1.0 / 355687428096000};
  const uint64_t quarter = (n + (uint64_t{1} << 50)) >> 51;
  // of a quarter, exact
  const double part =
      product(static_cast<double>(static_cast<int64_t>(n) - static_cast<int64_t>(quarter << 51)), 0x1p-51);
  const double angle = product(part, 1.5707963267948966), square = product(angle, angle);
  const double value = quarter % 2 == 0 ? polynomial(cosine, square) : product(angle, polynomial(sine, square));
  return quarter % 4 == 1 || quarter % 4 == 2 ? -value : value;
}

FW_SIDE inline double normal(uint64_t first, uint64_t second) {
  return product(root(product(-2.0, log_of_share((uint64_t{1} << 53) - (first >> 11)))), cos_of_turn(second >> 11));
}
FW_SIDE inline double uniform(uint64_t bits, double low, double width) {
  return sum(low, product(width, product(static_cast<double>(bits >> 11), 0x1p-53)));
}

}  // namespace fw::normal_detail

namespace fw {

// normal_of: mean 0, deviation 1, of 64 random bits twice, of which it takes the upper 53; of the first the share lies
// in (0, 1], whose logarithm is finite.
// uniform_of: in [low, low + width).
#if defined(__CUDACC__)
FW_SIDE inline double normal_of(uint64_t first, uint64_t second) { return normal_detail::normal(first, second); }
FW_SIDE inline double uniform_of(uint64_t bits, double low, double width) {
  return normal_detail::uniform(bits, low, width);
}
#else
double normal_of(uint64_t first, uint64_t second);
double uniform_of(uint64_t bits, double low, double width);
#endif

}  // namespace fw

#undef FW_SIDE
