#include "base/random.h"

#include <sstream>

#include "base/error.h"
#include "base/normal_transform.h"

namespace fw {

double normal_of(uint64_t first, uint64_t second) { return normal_detail::normal(first, second); }
double uniform_of(uint64_t bits, double low, double width) { return normal_detail::uniform(bits, low, width); }

double Random::uniform() { return uniform_of(bits(), 0, 1); }

double Random::uniform(double low, double high) { return uniform_of(bits(), low, high - low); }

double Random::normal() {
  const uint64_t first = bits();
  return normal_of(first, bits());
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
  if (in.fail())
    fail_usage("random generator state: expected the 312 words of a saved mt19937_64, got {} bytes of other text",
               text.size());
  engine_ = engine;
}

}  // namespace fw
