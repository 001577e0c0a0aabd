#include "base/checksum.h"

#include <bit>
#include <cstring>

namespace fw {
namespace {

static_assert(std::endian::native == std::endian::little, "files are little-endian and are used in place");

uint64_t mix(uint64_t hash, uint64_t word) {
  hash = (hash ^ word) * 0x100000001b3u;
  return hash ^ (hash >> 32);
}

}  // namespace

void Checksum::add(std::span<const std::byte> bytes) {
  size_t i = 0;
  for (; i < bytes.size() && length_ % 8 != 0; ++i) {
    partial_ |= std::to_integer<uint64_t>(bytes[i]) << (8 * (length_ % 8));
    if (++length_ % 8 == 0) {
      hash_ = mix(hash_, partial_);
      partial_ = 0;
    }
  }
  uint64_t hash = hash_;
  const size_t whole = i + (bytes.size() - i) / 8 * 8;
  length_ += whole - i;
  for (; i < whole; i += 8) {
    uint64_t word;
    std::memcpy(&word, bytes.data() + i, 8);
    hash = mix(hash, word);
  }
  hash_ = hash;
  for (; i < bytes.size(); ++i) partial_ |= std::to_integer<uint64_t>(bytes[i]) << (8 * (length_++ % 8));
}

uint64_t Checksum::value() const {
  const uint64_t hash = length_ % 8 != 0 ? mix(hash_, partial_) : hash_;
  return mix(hash, length_);
}

}  // namespace fw
