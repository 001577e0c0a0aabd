// Random numbers that are the same on every machine: the generator is std::mt19937_64, whose sequence the standard
// fixes; the mappings to uniform and normal values are ours, because the standard's distributions are not portable.
// The whole state is a short text, so that a checkpoint can hold it.
#pragma once

#include <cstdint>
#include <random>
#include <string>

namespace fw {

class Random {
 public:
  explicit Random(uint64_t seed = 0) : engine_(seed) {}

  uint64_t bits() { return engine_(); }
  double uniform();                         // [0, 1), 53 bits
  double uniform(double low, double high);  // [low, high)
  double normal();                          // mean 0, deviation 1 (Box-Muller, no cached second value)
  uint64_t below(uint64_t n);               // 0 <= result < n, unbiased; n >= 1

  std::string save() const;
  void load(const std::string& text);  // throws Error(kUsage) when it is not a saved state

 private:
  std::mt19937_64 engine_;
};

}  // namespace fw
