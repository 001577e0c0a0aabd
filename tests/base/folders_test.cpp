#include "base/folders.h"

#include <gtest/gtest.h>
#include <sys/stat.h>

#include <filesystem>
#include <fstream>

#include "base/base_support.h"
#include "base/error.h"
#include "base/temp_folder.h"

namespace fw {
namespace {

using testing::fails;
using testing::TempFolder;
namespace fs = std::filesystem;

TEST(TemporaryFolder, IsNewOfThisUserAloneAndGoesWithAllInIt) {
  std::string path, other;
  {
    const TemporaryFolder folder, second;
    path = folder.path();
    other = second.path();
    struct stat info = {};
    ASSERT_EQ(::stat(path.c_str(), &info), 0);
    EXPECT_EQ(info.st_mode & 07777, 0700u);
    EXPECT_NE(path, other);
    fs::create_directories(path + "/below");
    std::ofstream(path + "/below/file") << "x";
  }
  EXPECT_FALSE(fs::exists(path));
  EXPECT_FALSE(fs::exists(other));
}

TEST(NewFolders, ThoseThatStayEmptyGoAgain) {
  const TempFolder folder;
  fs::create_directories(folder.path("old"));
  {
    NewFolders made;
    made.make(folder.path("a/b/c"));
    made.make(folder.path("old/new/"));
    made.make(folder.path("kept/file's"));
    EXPECT_TRUE(fs::is_directory(folder.path("a/b/c")));
    EXPECT_TRUE(fs::is_directory(folder.path("old/new")));
    std::ofstream(folder.path("kept/file's/file")) << "x";
  }
  EXPECT_FALSE(fs::exists(folder.path("a")));
  EXPECT_TRUE(fs::exists(folder.path("old")));
  EXPECT_FALSE(fs::exists(folder.path("old/new")));
  EXPECT_TRUE(fs::exists(folder.path("kept/file's/file")));
  NewFolders made;
  std::ofstream(folder.path("file")) << "x";
  EXPECT_TRUE(fails(ErrorKind::kIo, {"cannot make the folder"}, [&] { made.make(folder.path("file/below")); }));
}

}  // namespace
}  // namespace fw
