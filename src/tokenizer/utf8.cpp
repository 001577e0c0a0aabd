#include "tokenizer/utf8.h"

#include <cstdint>
#include <cstring>

namespace fw {

size_t utf8_length(std::string_view text) {
  const auto byte = [&](size_t i) { return static_cast<unsigned>(static_cast<unsigned char>(text[i])); };
  const auto follows = [&](size_t i) { return i < text.size() && (byte(i) & 0xc0u) == 0x80u; };
  const unsigned first = byte(0);
  if (first < 0x80) return 1;
  if (first >= 0xc2 && first < 0xe0) return follows(1) ? 2 : 0;
  if (first >= 0xe0 && first < 0xf0) {
    if (!follows(1) || !follows(2)) return 0;
    const unsigned code = (first & 0xfu) << 12 | (byte(1) & 0x3fu) << 6 | (byte(2) & 0x3fu);
    return code >= 0x800 && (code < 0xd800 || code > 0xdfff) ? 3 : 0;
  }
  if (first >= 0xf0 && first < 0xf5) {
    if (!follows(1) || !follows(2) || !follows(3)) return 0;
    const unsigned code = (first & 7u) << 18 | (byte(1) & 0x3fu) << 12 | (byte(2) & 0x3fu) << 6 | (byte(3) & 0x3fu);
    return code >= 0x10000 && code <= 0x10ffff ? 4 : 0;
  }
  return 0;
}

size_t utf8_prefix(std::string_view text) {
  size_t i = 0;
  while (i < text.size()) {
    uint64_t eight = 0x80;
    if (i + sizeof eight <= text.size()) std::memcpy(&eight, text.data() + i, sizeof eight);
    if ((eight & 0x8080808080808080u) == 0) {  // ASCII
      i += sizeof eight;
      continue;
    }
    const size_t length = utf8_length(text.substr(i));
    if (length == 0) return i;
    i += length;
  }
  return i;
}

std::string_view utf8_start(std::string_view text, size_t most) {
  const std::string_view start = text.substr(0, most);
  return start.substr(0, utf8_prefix(start));
}

char32_t utf8_next(std::string_view text, size_t& i) {
  const auto byte = [&](size_t k) { return static_cast<char32_t>(static_cast<unsigned char>(text[k])); };
  const char32_t first = byte(i);
  if (first < 0x80) return ++i, first;
  const size_t length = first < 0xe0 ? 2 : first < 0xf0 ? 3 : 4;
  char32_t code = first & (0xffu >> (length + 1));
  for (size_t k = 1; k < length; ++k) code = code << 6 | (byte(i + k) & 0x3fu);
  i += length;
  return code;
}

void utf8_append(std::string& text, char32_t character) {
  const auto put = [&](char32_t byte) { text += static_cast<char>(byte); };
  if (character < 0x80) return put(character);
  if (character < 0x800) {
    put(0xc0u | character >> 6);
  } else {
    if (character < 0x10000) {
      put(0xe0u | character >> 12);
    } else {
      put(0xf0u | character >> 18);
      put(0x80u | (character >> 12 & 0x3fu));
    }
    put(0x80u | (character >> 6 & 0x3fu));
  }
  put(0x80u | (character & 0x3fu));
}

}  // namespace fw
