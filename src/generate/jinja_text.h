// What templates do with text (jinja.cpp). Letters are ASCII letters.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace fw::jinja {

// Without the characters of `what` at its ends.
std::string_view trimmed(std::string_view text, std::string_view what, bool left, bool right);
// As text.find(what, begin), in time linear in the text whatever `what` is.
size_t find_text(std::string_view text, std::string_view what, size_t begin);
std::string in_case(std::string text, bool upper);
// The first letter large and the others small, of the text or of every word.
std::string capitalized(std::string text, bool every_word);

}  // namespace fw::jinja
