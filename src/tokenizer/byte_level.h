// Bytes as characters that can be seen, as GPT-2's tokenizer writes them: printable characters of Latin-1 are
// themselves, the other 68 bytes are U+0100 to U+0143 in order. A space is U+0120.
#pragma once

#include <array>
#include <string>
#include <string_view>

namespace fw {

const std::array<char32_t, 256>& byte_characters();
std::string to_byte_level(std::string_view bytes);
// Back; false, and nothing appended, where a character stands for no byte.
bool from_byte_level(std::string_view text, std::string& bytes);

}  // namespace fw
