#include "scan/status.h"

#include <cstdint>

namespace fw {
namespace {

thread_local std::string t_error;

}  // namespace

fw_status failed(fw_status status, const std::string& message) {
  t_error = message;
  return status;
}

void check_buffer(const char* name, const void* p, size_t bytes, size_t needed, const char* query) {
  if (needed == 0) return;
  if (p == nullptr || bytes < needed) {
    throw WorkspaceError(fmt::format("{}: expected at least {} bytes ({}), got {}", name, needed, query,
                                     p == nullptr ? "NULL" : std::to_string(bytes)));
  }
  if (reinterpret_cast<uintptr_t>(p) % FW_ALIGNMENT != 0)
    throw WorkspaceError(
        fmt::format("{}: expected an address aligned to {} bytes (fw_alloc), got {}", name, FW_ALIGNMENT, p));
}

}  // namespace fw

extern "C" const char* fw_last_error(void) { return fw::t_error.c_str(); }
