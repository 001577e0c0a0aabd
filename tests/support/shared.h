// The folder shared/, which lies beside a checkout where the reference values are kept: $FASTWEIGHT_SHARED, ../shared
// of the sources, or /work/shared. Tests that need it skip themselves where it is not.
#pragma once

#include <cstdlib>
#include <filesystem>
#include <string>

namespace fw::testing {

// "" when `name` is in none of them.
inline std::string shared_path(const std::string& name) {
  const char* given = std::getenv("FASTWEIGHT_SHARED");
  for (const std::string& folder : {std::string(given == nullptr ? "" : given), std::string(FW_SOURCE_DIR "/../shared"),
                                    std::string("/work/shared")}) {
    const std::filesystem::path path = std::filesystem::path(folder) / name;
    if (!folder.empty() && std::filesystem::exists(path)) return path.string();
  }
  return "";
}

// Why a test skips.
inline const char* const kNoShared =
    "the folder shared/ is not here: it lies beside the checkout only where the reference values are kept (or set "
    "FASTWEIGHT_SHARED)";

}  // namespace fw::testing
