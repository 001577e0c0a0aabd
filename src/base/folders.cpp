#include "base/folders.h"

#include <stdlib.h>
#include <unistd.h>

#include <cerrno>
#include <filesystem>
#include <system_error>

#include "base/error.h"
#include "base/file.h"

namespace fw {

namespace fs = std::filesystem;

TemporaryFolder::TemporaryFolder() {
  std::error_code error;
  const fs::path parent = fs::temp_directory_path(error);
  if (error) fail_io("cannot make a temporary folder: {}; TMPDIR says where", error.message());
  path_ = (parent / "fastweight-XXXXXX").string();
  if (::mkdtemp(path_.data()) == nullptr)
    fail_io("cannot make a temporary folder '{}': {}; TMPDIR says where", path_,
            std::generic_category().message(errno));
}

TemporaryFolder::~TemporaryFolder() {
  std::error_code ignored;
  fs::remove_all(path_, ignored);
}

void NewFolders::make(const std::string& path) {
  std::vector<std::string> missing;
  std::error_code ignored;
  for (fs::path folder = fs::path(path).lexically_normal(); !folder.empty() && !fs::exists(folder, ignored);
       folder = folder.parent_path()) {
    if (folder.has_filename()) missing.push_back(folder.string());
    if (folder == folder.parent_path()) break;
  }
  make_folders(path);
  made_.insert(made_.end(), missing.rbegin(), missing.rend());
}

NewFolders::~NewFolders() {
  for (; !made_.empty(); made_.pop_back()) ::rmdir(made_.back().c_str());  // refuses one that holds something
}

}  // namespace fw
