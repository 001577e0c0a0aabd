#include "base/printable.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

namespace fw {
namespace {

struct CodePoint {
  uint32_t value = 0;
  size_t bytes = 0;  // 0: what begins here is not UTF-8
};

CodePoint code_point_at(std::string_view text, size_t at) {
  const auto byte = [&](size_t i) {
    return at + i < text.size() ? static_cast<uint32_t>(static_cast<unsigned char>(text[at + i])) : 0u;
  };
  const uint32_t first = byte(0);
  if (first < 0x80) return {first, 1};
  const size_t bytes = first >= 0xf0 ? 4 : first >= 0xe0 ? 3 : 2;
  uint32_t value = first & (0xffu >> (bytes + 1));
  for (size_t i = 1; i < bytes; ++i) {
    if ((byte(i) & 0xc0) != 0x80) return {};
    value = value << 6 | (byte(i) & 0x3f);
  }
  constexpr uint32_t kSmallest[] = {0, 0, 0x80, 0x800, 0x10000};
  const bool good = first >= 0xc0 && first < 0xf8 && value >= kSmallest[bytes] && value < 0x110000 &&
                    (value < 0xd800 || value >= 0xe000);
  return good ? CodePoint{value, bytes} : CodePoint{};
}

// C1 controls, line and paragraph separators, and what turns the direction of text.
bool is_shown(uint32_t c) {
  return (c >= 0x80 && c < 0xa0) || c == 0x061c || c == 0x200e || c == 0x200f || (c >= 0x2028 && c <= 0x202e) ||
         (c >= 0x2066 && c <= 0x2069);
}

std::string escaped(std::string_view text, std::string_view kept) {
  std::string out;
  out.reserve(text.size());
  for (size_t i = 0; i < text.size();) {
    const CodePoint c = code_point_at(text, i);
    if (c.bytes == 0) {
      // Terminals of 8 bits take these for the same controls.
      const auto byte = static_cast<unsigned char>(text[i]);
      out += byte < 0xa0 ? fmt::format("\\x{:02x}", byte) : std::string(1, text[i]);
      ++i;
      continue;
    }
    if ((c.value < 0x20 && kept.find(text[i]) == std::string_view::npos) || c.value == 0x7f) {
      out += fmt::format("\\x{:02x}", c.value);
    } else if (is_shown(c.value)) {
      out += fmt::format("\\u{:04x}", c.value);
    } else {
      out += text.substr(i, c.bytes);
    }
    i += c.bytes;
  }
  return out;
}

}  // namespace

std::string printable(std::string_view text) { return escaped(text, {}); }
std::string printable_lines(std::string_view text) { return escaped(text, "\n\t"); }

std::string excerpt(std::string_view text, size_t most) {
  if (text.size() <= most) return printable(text);
  size_t end = most;
  while (end > 0 && (static_cast<unsigned char>(text[end]) & 0xc0u) == 0x80u) --end;  // not inside a character
  return printable(text.substr(0, end)) + "...";
}

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
