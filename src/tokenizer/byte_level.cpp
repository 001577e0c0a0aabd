#include "tokenizer/byte_level.h"

#include "tokenizer/utf8.h"

namespace fw {
namespace {

bool is_itself(unsigned byte) {
  return (byte >= 0x21 && byte <= 0x7e) || (byte >= 0xa1 && byte <= 0xac) || (byte >= 0xae && byte <= 0xff);
}

}  // namespace

const std::array<char32_t, 256>& byte_characters() {
  static const std::array<char32_t, 256> kCharacters = [] {
    std::array<char32_t, 256> characters{};
    char32_t next = 0x100;
    for (unsigned byte = 0; byte < 256; ++byte) characters[byte] = is_itself(byte) ? byte : next++;
    return characters;
  }();
  return kCharacters;
}

std::string to_byte_level(std::string_view bytes) {
  std::string text;
  text.reserve(bytes.size() * 2);
  for (const char c : bytes) utf8_append(text, byte_characters()[static_cast<unsigned char>(c)]);
  return text;
}

bool from_byte_level(std::string_view text, std::string& bytes) {
  static const std::array<int, 0x144> kBytes = [] {
    std::array<int, 0x144> of{};
    of.fill(-1);
    for (unsigned byte = 0; byte < 256; ++byte) of[byte_characters()[byte]] = static_cast<int>(byte);
    return of;
  }();
  const size_t before = bytes.size();
  if (utf8_prefix(text) < text.size()) return false;
  for (size_t i = 0; i < text.size();) {
    const char32_t character = utf8_next(text, i);
    const int byte = character < kBytes.size() ? kBytes[character] : -1;
    if (byte < 0) {
      bytes.resize(before);
      return false;
    }
    bytes += static_cast<char>(byte);
  }
  return true;
}

}  // namespace fw
