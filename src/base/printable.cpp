#include "base/printable.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

namespace fw {
namespace {

// Bytes of the character that begins here, or 0: it is cut, or these are no UTF-8. Which characters there are does not matter here.
size_t length_of(std::string_view text) {
  const auto first = static_cast<unsigned char>(text[0]);
  const size_t length = first < 0x80 ? 1 : (first & 0xe0) == 0xc0 ? 2 : (first & 0xf0) == 0xe0 ? 3 : (first & 0xf8) == 0xf0 ? 4 : 0;
  if (length > text.size()) return 0;
  for (size_t i = 1; i < length; ++i) {
    if ((static_cast<unsigned char>(text[i]) & 0xc0) != 0x80) return 0;
  }
  return length;
}

// Marks and overrides of direction, and separators of lines and paragraphs.
bool turns_text(unsigned c) { return c == 0x061c || c == 0x200e || c == 0x200f || (c >= 0x2028 && c <= 0x202e) || (c >= 0x2066 && c <= 0x2069); }

std::string escaped(std::string_view text, std::string_view kept) {
  std::string out;
  out.reserve(text.size());
  for (size_t i = 0; i < text.size();) {
    const size_t length = length_of(text.substr(i));
    const auto byte = [&](size_t at) { return static_cast<unsigned>(static_cast<unsigned char>(text[i + at])); };
    const unsigned c = length == 2   ? (byte(0) & 0x1f) << 6 | (byte(1) & 0x3f)
                       : length == 3 ? (byte(0) & 0xf) << 12 | (byte(1) & 0x3f) << 6 | (byte(2) & 0x3f)
                                     : 0;
    if (length > 1 && ((c >= 0x80 && c < 0xa0) || turns_text(c))) {
      out += fmt::format("\\u{:04x}", c);
    } else if (length <= 1 && ((byte(0) < 0x20 && kept.find(text[i]) == std::string_view::npos) || byte(0) == 0x7f || (byte(0) >= 0x80 && byte(0) < 0xa0))) {
      out += fmt::format("\\x{:02x}", byte(0));
    } else {
      out += text.substr(i, std::max<size_t>(length, 1));
    }
    i += std::max<size_t>(length, 1);
  }
  return out;
}

}  // namespace

std::string printable(std::string_view text) { return escaped(text, {}); }
std::string printable_lines(std::string_view text) { return escaped(text, "\n\t"); }

std::string PrintableStream::add(std::string_view piece) {
  held_ += piece;
  // A lead byte among the last three whose character is not whole waits.
  size_t whole = held_.size();
  for (size_t back = 1; back <= 3 && back <= held_.size(); ++back) {
    const auto byte = static_cast<unsigned char>(held_[held_.size() - back]);
    if ((byte & 0xc0) == 0x80) continue;
    const size_t wanted = byte >= 0xf0 ? 4 : byte >= 0xe0 ? 3 : byte >= 0xc0 ? 2 : 1;
    if (wanted > back) whole -= back;
    break;
  }
  std::string shown = printable_lines(std::string_view(held_).substr(0, whole));
  held_.erase(0, whole);
  return shown;
}

std::string PrintableStream::rest() { return printable_lines(std::exchange(held_, {})); }

}  // namespace fw
