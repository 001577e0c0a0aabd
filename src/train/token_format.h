// The header of a token file (token_file.h describes the format), which the reader and the writer share.
#pragma once

#include <array>
#include <bit>
#include <cstdint>

namespace fw {

static_assert(std::endian::native == std::endian::little, "token files are little-endian and are used in place");

inline constexpr std::array<char, 8> kTokenMagic = {'F', 'W', 'T', 'O', 'K', 'E', 'N', '1'};

inline constexpr uint32_t kTokenVersion = 3;

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

// After the offsets, from version 3 on; `exceptions` TokenBytes follow it.
struct TokenTrailer {
  uint64_t knows_bytes = 0;  // 1: the bytes of every token are known, 0: they are not, and there are no exceptions
  int64_t end = -1;          // the id that was put after each document; -1: none
  uint64_t exceptions = 0;
};
static_assert(sizeof(TokenTrailer) == 24);

// A token that stands for another number of bytes of the text than its piece has. They are sorted by token.
struct TokenBytes {
  uint64_t token = 0, bytes = 0;
};
static_assert(sizeof(TokenBytes) == 16);

// Where the offsets begin, after the ids.
inline uint64_t padded_to_offsets(uint64_t bytes_of_ids) { return (bytes_of_ids + 7) / 8 * 8; }

}  // namespace fw
