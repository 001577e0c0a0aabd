#include "base/cuda_library.h"

#include <dlfcn.h>
#include <fmt/format.h>
#include <glob.h>

#include <algorithm>
#include <cstdlib>
#include <string>
#include <vector>

namespace fw {
namespace {

// In the order in which they are looked through; "": the loader's own.
std::vector<std::string> folders(bool given_alone) {
  std::vector<std::string> list;
  if (const char* given = std::getenv("FW_CUDA_LIBS")) {
    const std::string all = given;
    for (size_t at = 0, end; at <= all.size(); at = end + 1) {
      end = std::min(all.find(':', at), all.size());
      list.push_back(all.substr(at, end - at));
    }
    if (given_alone) return list;
  }
  list.emplace_back();  // the program's rpath and the loader's
  std::vector<std::string> patterns = {"/usr/local/cuda/lib64", "/usr/local/cuda/lib"};
  if (const char* home = std::getenv("HOME")) {
    patterns.push_back(fmt::format("{}/.cache/fastweight/cuda-*/nvidia/*/lib", home));
    patterns.push_back(fmt::format("{}/.local/lib/python3*/site-packages/nvidia/*/lib", home));
  }
  if (const char* venv = std::getenv("VIRTUAL_ENV"))
    patterns.push_back(fmt::format("{}/lib/python3*/site-packages/nvidia/*/lib", venv));
  patterns.insert(patterns.end(),
                  {"/usr/local/lib/python3*/*-packages/nvidia/*/lib", "/usr/lib/python3*/*-packages/nvidia/*/lib"});
  for (const std::string& pattern : patterns) {
    glob_t found = {};
    if (::glob(pattern.c_str(), 0, nullptr, &found) == 0) {
      for (size_t i = 0; i < found.gl_pathc; ++i) list.emplace_back(found.gl_pathv[i]);
    }
    ::globfree(&found);
  }
  return list;
}

}  // namespace

void* open_cuda_library(std::initializer_list<const char*> names, bool given_alone) {
  for (const std::string& folder : folders(given_alone)) {
    for (const char* name : names) {
      const std::string path = folder.empty() ? name : fmt::format("{}/{}", folder, name);
      if (void* const library = ::dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL)) return library;
    }
  }
  return nullptr;
}

void* function_of(void* library, const char* name) { return ::dlsym(library, name); }

}  // namespace fw
