#include "base/crc32c.h"

#include <array>

namespace fw {
namespace {

constexpr std::array<uint32_t, 256> table() {
  constexpr uint32_t kPolynomial = 0x82f63b78;  // reflected
  std::array<uint32_t, 256> table{};
  for (uint32_t byte = 0; byte < 256; ++byte) {
    uint32_t rest = byte;
    for (int bit = 0; bit < 8; ++bit) rest = rest >> 1 ^ (rest & 1 ? kPolynomial : 0);
    table[byte] = rest;
  }
  return table;
}

}  // namespace

uint32_t crc32c(std::string_view bytes) {
  static constexpr std::array<uint32_t, 256> kTable = table();
  uint32_t rest = ~uint32_t{0};
  for (const char c : bytes) rest = rest >> 8 ^ kTable[(rest ^ static_cast<unsigned char>(c)) & 0xff];
  return ~rest;
}

}  // namespace fw
