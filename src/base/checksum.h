// Checksum of what is kept on disk: finds flipped bits and swapped blocks; it is no protection against intent.
// FNV-1a over 64-bit little-endian words instead of bytes (eight times faster), with a fold after each product so that
// high bits reach the low ones. Every step is a bijection of the running value, so one changed word always changes the
// result. The last word is padded with zero bytes and the length is mixed in at the end. Pieces may be of any size.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

namespace fw {

class Checksum {
 public:
  void add(std::span<const std::byte> bytes);
  void add(std::string_view text) { add(std::as_bytes(std::span(text.data(), text.size()))); }
  uint64_t value() const;  // of all bytes added so far

 private:
  uint64_t hash_ = 0xcbf29ce484222325u;
  uint64_t length_ = 0;
  uint64_t partial_ = 0;  // bytes of an unfinished word
};

}  // namespace fw
