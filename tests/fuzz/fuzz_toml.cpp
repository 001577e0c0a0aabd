// Fuzzes the reader of run files' text: what it lets through is a table that can be walked and printed.
#include <sstream>

#include "cli/toml_text.h"
#include "fuzz_support.h"

int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  fw::fuzz::expect_error_or_nothing([&] {
    const toml::table table = fw::cli::parse_toml(std::string_view(reinterpret_cast<const char*>(data), size), "input");
    std::ostringstream text;
    text << table;
  });
  return 0;
}
