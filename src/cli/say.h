// What the program tells people: on standard output (say) and on standard error (say_aside). Control characters in it,
// which come from names of files and of what stands in them, are shown and not sent (base/printable.h). What is meant
// for programs (JSON, the text of a model) goes another way.
#pragma once

#include <fmt/format.h>

#include <cstdio>
#include <string>
#include <utility>

namespace fw::cli {

// From here on say() and say_aside() say nothing: of several ranks (cli/ranks.h) one speaks.
void be_quiet();

// Throws std::system_error when it cannot be written.
void put_printable(std::FILE* file, const std::string& text);

// A page that is all that a command prints: the help, the manual page, a shell's completion. Shown as it is. A reader
// that goes away (| head) has seen what it wanted, and that is no error.
void show_page(const std::string& page);

template <class... Args>
void say(fmt::format_string<Args...> format, Args&&... args) {
  put_printable(stdout, fmt::format(format, std::forward<Args>(args)...));
}

template <class... Args>
void say_aside(fmt::format_string<Args...> format, Args&&... args) {
  put_printable(stderr, fmt::format(format, std::forward<Args>(args)...));
}

}  // namespace fw::cli
