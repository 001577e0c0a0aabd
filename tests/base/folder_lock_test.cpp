#include "base/folder_lock.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <optional>

#include "base/base_support.h"
#include "base/error.h"
#include "temp_folder.h"

namespace fw {
namespace {

using testing::TempFolder;

TEST(FolderLock, ASecondOneIsRefusedAndToldWhoHasIt) {
  const TempFolder folder;
  const std::string path = folder.path();
  std::optional<FolderLock> first(path);
  try {
    const FolderLock second(path);
    FAIL() << "two locks on one folder";
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kUsage);
    EXPECT_NE(std::string(error.what()).find("process " + std::to_string(::getpid()) + " on "), std::string::npos)
        << error.what();
  }
  EXPECT_TRUE(std::filesystem::exists(path + "/" + kLockFile));
  first.reset();
  EXPECT_FALSE(std::filesystem::exists(path + "/" + kLockFile));
  EXPECT_NO_THROW(FolderLock{path});
}

TEST(FolderLock, AProcessThatIsKilledLeavesAFileButNoLock) {
  const TempFolder folder;
  const std::string path = folder.path();
  int ready[2];
  ASSERT_EQ(::pipe(ready), 0);
  const pid_t child = ::fork();
  if (child == 0) {
    const FolderLock lock(path);
    [[maybe_unused]] const ssize_t n = ::write(ready[1], "x", 1);
    ::pause();
    ::_exit(0);
  }
  char byte;
  ASSERT_EQ(::read(ready[0], &byte, 1), 1);
  EXPECT_THROW(FolderLock{path}, Error);
  ::kill(child, SIGKILL);
  ::waitpid(child, nullptr, 0);
  ::close(ready[0]);
  ::close(ready[1]);
  EXPECT_TRUE(std::filesystem::exists(path + "/" + kLockFile));
  EXPECT_NO_THROW(FolderLock{path});
}

// Another name of a file of somebody else's, which taking the lock would write.
TEST(FolderLock, ALinkIsNotWritten) {
  const TempFolder folder;
  std::ofstream(folder.path("precious")) << "content";
  std::filesystem::create_hard_link(folder.path("precious"), folder.path(kLockFile));
  EXPECT_THROW(FolderLock{folder.path()}, Error);
  std::filesystem::remove(folder.path(kLockFile));
  std::filesystem::create_symlink("precious", folder.path(kLockFile));
  EXPECT_THROW(FolderLock{folder.path()}, Error);
  std::ifstream in(folder.path("precious"));
  std::string content;
  EXPECT_TRUE(in >> content && content == "content");
}

// The reason is that of the file's limit, also where a part of the text was written.
TEST(FolderLock, AFileThatCannotBeWritten) {
  const TempFolder folder;
  const testing::FileSizeLimit limit(4);
  EXPECT_TRUE(testing::fails(ErrorKind::kIo, {kLockFile, "File too large"}, [&] { FolderLock{folder.path()}; }));
  EXPECT_EQ(folder.files(), 0u);
}

TEST(FolderLock, AFolderThatIsNotThere) {
  const TempFolder folder;
  EXPECT_THROW(FolderLock{folder.path("missing")}, Error);
}

}  // namespace
}  // namespace fw
