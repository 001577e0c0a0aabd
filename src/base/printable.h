// Text that may come from anywhere (names of files above all), fit for a terminal: one that holds an escape sequence could otherwise
// redraw the screen, and one with a NUL would end what is said of it.
#pragma once

#include <string>
#include <string_view>

namespace fw {

// Control characters of ASCII as \x1b; those that UTF-8 writes as U+0080 to U+009F, and those that turn the direction of text or break its lines (U+202E and
// its like), as \u009b; bytes 0x80 to 0x9f that are no UTF-8 as \x9b.
std::string printable(std::string_view text);
// The same but for line ends and tabs, which text of several lines has.
std::string printable_lines(std::string_view text);

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
