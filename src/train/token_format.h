// The header of a token file (token_file.h describes the format), which the reader and the writer share.
#pragma once

#include <array>
#include <bit>
#include <cstdint>

namespace fw {

static_assert(std::endian::native == std::endian::little, "token files are little-endian and are used in place");

inline constexpr std::array<char, 8> kTokenMagic = {'F', 'W', 'T', 'O', 'K', 'E', 'N', '1'};

inline constexpr uint32_t kTokenVersion = 2;

struct TokenHeader {
  std::array<char, 8> magic = kTokenMagic;
  uint32_t version = kTokenVersion;
  uint32_t id_bytes = 1;
  uint64_t tokens = 0;
  uint64_t documents = 0;
  uint64_t vocab_size = 0;
  uint64_t text_bytes = 0;
  uint64_t checksum = 0;
  uint64_t tokenizer = 0;  // Tokenizer::checksum(); of version 1: 0
};
static_assert(sizeof(TokenHeader) == 64);

// Where the offsets begin, behind the ids.
inline uint64_t padded_to_offsets(uint64_t bytes_of_ids) { return (bytes_of_ids + 7) / 8 * 8; }

}  // namespace fw
