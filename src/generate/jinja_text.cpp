#include "generate/jinja_text.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace fw::jinja {

std::string_view trimmed(std::string_view text, std::string_view what, bool left, bool right) {
  if (left) text.remove_prefix(std::min(text.find_first_not_of(what), text.size()));
  if (right) text = text.substr(0, text.find_last_not_of(what) + 1);
  return text;
}

size_t find_text(std::string_view text, std::string_view what, size_t begin) {
  if (begin > text.size()) return std::string_view::npos;
  const void* found = ::memmem(text.data() + begin, text.size() - begin, what.data(), what.size());
  return found == nullptr ? std::string_view::npos : static_cast<size_t>(static_cast<const char*>(found) - text.data());
}

std::string in_case(std::string text, bool upper) {
  for (char& c : text) {
    if (upper ? c >= 'a' && c <= 'z' : c >= 'A' && c <= 'Z') c = static_cast<char>(c ^ 0x20);
  }
  return text;
}

std::string capitalized(std::string text, bool every_word) {
  text = in_case(std::move(text), false);
  bool begins = true;
  for (char& c : text) {
    const bool letter = c >= 'a' && c <= 'z';
    if (letter && begins) c = static_cast<char>(c ^ 0x20);
    begins = every_word && !letter;
  }
  return text;
}

}  // namespace fw::jinja
