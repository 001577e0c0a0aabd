// Text that may come from anywhere (names of files above all), fit for a terminal. An escape sequence in it could
// otherwise redraw the screen, and a NUL would end what is said of it.
#pragma once

#include <string>
#include <string_view>

namespace fw {

// Shown as \x1b or \u202e:
// - control characters of ASCII and of U+0080 to U+009F,
// - separators of lines,
// - what turns the order of characters (U+061C, U+200E, U+200F, U+202A to U+202E, U+2066 to U+2069),
// - bytes 0x80 to 0x9f that are no part of UTF-8.
std::string printable(std::string_view text);
// The same but for line ends and tabs, which text of several lines has.
std::string printable_lines(std::string_view text);

// What a message quotes of a file or an argument: printable, and cut where a line would not bear it.
inline constexpr size_t kExcerptBytes = 160;
std::string excerpt(std::string_view text, size_t most = kExcerptBytes);

// The same of a text that comes in pieces, which may cut characters.
class PrintableStream {
 public:
  // What can be shown of all that came.
  std::string add(std::string_view piece);
  // The beginning of a character whose rest did not come.
  std::string rest();

 private:
  std::string held_;
};

}  // namespace fw
