// UTF-8, character by character.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace fw {

// Length of the character at the start of a text that is not empty, 0 if its bytes are none (overlong, surrogate, cut,
// stray).
size_t utf8_length(std::string_view text);
// How many bytes from the start on are whole characters.
size_t utf8_prefix(std::string_view text);
// The first characters of a text, at most `most` bytes: what an error quotes.
std::string_view utf8_start(std::string_view text, size_t most);
// The character at byte i of valid UTF-8; i goes on after it.
char32_t utf8_next(std::string_view text, size_t& i);
void utf8_append(std::string& text, char32_t character);

}  // namespace fw
