// What every function of the C header does around its work: exceptions become a status and fw_last_error()'s message.
#pragma once

#include <cstddef>
#include <new>
#include <stdexcept>
#include <string>

#include "base/error.h"
#include "fastweight/fastweight.h"

namespace fw {

// Sets the message of fw_last_error(); returns the status.
fw_status failed(fw_status status, const std::string& message);

class WorkspaceError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// Throws WorkspaceError unless there are `needed` bytes at an aligned address; query: the function that says the size.
void check_buffer(const char* name, const void* p, size_t bytes, size_t needed, const char* query);

// Elements that a caller's tensor may reach: its bytes fit a pointer's difference.
constexpr int64_t kMostExtent = int64_t{1} << 59;

// Runs body; whatever it throws becomes a status and a message.
template <class Body>
fw_status guarded(const Body& body) {
  try {
    body();
    return FW_OK;
  } catch (const WorkspaceError& e) {
    return failed(FW_ERROR_WORKSPACE, e.what());
  } catch (const DeviceError& e) {
    return failed(FW_ERROR_DEVICE, e.what());
  } catch (const Error& e) {
    // What the system refuses (a thread) is no wrong argument.
    if (e.kind() == ErrorKind::kIo) return failed(FW_ERROR_MEMORY, e.what());
    return failed(e.kind() == ErrorKind::kInternal ? FW_ERROR_INTERNAL : FW_ERROR_ARGUMENT, e.what());
  } catch (const std::bad_alloc&) {
    return failed(FW_ERROR_MEMORY, "out of memory");
  } catch (const std::exception& e) {
    return failed(FW_ERROR_INTERNAL, e.what());
  }
}

template <class Struct>
const Struct& not_null(const Struct* p, const char* name) {
  if (p == nullptr) fail_usage("{}: expected a struct, got NULL", name);
  return *p;
}

}  // namespace fw
