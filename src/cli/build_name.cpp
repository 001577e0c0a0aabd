#include "cli/build_name.h"

#include <fmt/format.h>

#include "cli/commit.h"
#include "fastweight/fastweight.h"

namespace fw::cli {

std::string build_commit() { return FW_COMMIT; }

std::string build_name() {
  const std::string commit = build_commit();
  return fmt::format("fastweight {}{}{}", fw_version(), commit.empty() ? "" : ", commit ", commit);
}

}  // namespace fw::cli
