#include "cli/say.h"

#include <stdio_ext.h>

#include <cerrno>
#include <system_error>

#include "base/printable.h"

namespace fw::cli {

namespace {
bool g_quiet = false;
}

void be_quiet() { g_quiet = true; }

void put_printable(std::FILE* file, const std::string& text) {
  if (g_quiet) return;
  const std::string shown = printable_lines(text);
  if (std::fwrite(shown.data(), 1, shown.size(), file) != shown.size())
    throw std::system_error(errno, std::generic_category(), "cannot write");
}

void show_page(const std::string& page) {
  errno = 0;
  if (std::fwrite(page.data(), 1, page.size(), stdout) == page.size() && std::fflush(stdout) == 0) return;
  if (errno != EPIPE) throw std::system_error(errno, std::generic_category(), "cannot write");
  ::__fpurge(stdout);  // what nobody reads is not tried again
  std::clearerr(stdout);
}

}  // namespace fw::cli
