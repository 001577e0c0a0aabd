// Text that may come from anywhere (names of files above all), fit for a terminal: one that holds an escape sequence could otherwise
// redraw the screen, and one with a NUL would end what is said of it.
#pragma once

#include <string>
#include <string_view>

namespace fw {

// Control characters of ASCII, and those that UTF-8 writes as U+0080 to U+009F, as \x1b or \u009b.
std::string printable(std::string_view text);
// The same but for line ends and tabs, which text of several lines has.
std::string printable_lines(std::string_view text);

// What a message quotes of a file or an argument: printable, and cut where a line would not bear it.
inline constexpr size_t kExcerptBytes = 160;
std::string excerpt(std::string_view text, size_t most = kExcerptBytes);

}  // namespace fw
