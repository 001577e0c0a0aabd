#include "base/printable.h"

#include <fmt/format.h>

namespace fw {
namespace {

std::string escaped(std::string_view text, std::string_view kept) {
  std::string out;
  out.reserve(text.size());
  for (size_t i = 0; i < text.size(); ++i) {
    const auto byte = static_cast<unsigned char>(text[i]);
    const auto next = i + 1 < text.size() ? static_cast<unsigned char>(text[i + 1]) : 0;
    if (byte == 0xc2 && next >= 0x80 && next < 0xa0) {
      out += fmt::format("\\u{:04x}", next);
      ++i;
    } else if ((byte < 0x20 && kept.find(text[i]) == std::string_view::npos) || byte == 0x7f) {
      out += fmt::format("\\x{:02x}", byte);
    } else {
      out += text[i];
    }
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

}  // namespace fw
