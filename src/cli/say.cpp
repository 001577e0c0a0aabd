#include "cli/say.h"

#include <cerrno>
#include <system_error>

#include "base/printable.h"

namespace fw::cli {

void put_printable(std::FILE* file, const std::string& text) {
  const std::string shown = printable_lines(text);
  if (std::fwrite(shown.data(), 1, shown.size(), file) != shown.size()) throw std::system_error(errno, std::generic_category(), "cannot write");
}

}  // namespace fw::cli
