#include "cli/say.h"

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
  if (std::fwrite(shown.data(), 1, shown.size(), file) != shown.size()) throw std::system_error(errno, std::generic_category(), "cannot write");
}

}  // namespace fw::cli
