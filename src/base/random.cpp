#include "base/random.h"

#include <cmath>
#include <sstream>

#include "base/error.h"

namespace fw {

double Random::uniform() { return static_cast<double>(bits() >> 11) * 0x1.0p-53; }

double Random::uniform(double low, double high) { return low + (high - low) * uniform(); }

double Random::normal() {
  const double u = 1.0 - uniform();  // (0, 1]: the logarithm is finite
  const double v = uniform();
  return std::sqrt(-2.0 * std::log(u)) * std::cos(6.283185307179586476925 * v);
}

uint64_t Random::below(uint64_t n) {
  const uint64_t limit = UINT64_MAX - UINT64_MAX % n;
  uint64_t x = bits();
  while (x >= limit) x = bits();
  return x % n;
}

std::string Random::save() const {
  std::ostringstream out;
  out << engine_;
  return out.str();
}

void Random::load(const std::string& text) {
  std::istringstream in(text);
  std::mt19937_64 engine;
  in >> engine;
  if (in.fail()) fail_usage("random generator state: expected the 312 words of a saved mt19937_64, got {} bytes of other text", text.size());
  engine_ = engine;
}

}  // namespace fw
