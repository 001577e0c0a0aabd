#include "base/file.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <fstream>

#include "base/base_support.h"
#include "base/temp_folder.h"

namespace fw {
namespace {

using testing::bytes_of;
using testing::fails;
using testing::FileSizeLimit;
using testing::TempFolder;

std::string text_of(std::span<const std::byte> bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

TEST(File, RoundTripOfEmptySmallAndLarge) {
  const TempFolder folder;
  for (const size_t size : {size_t{0}, size_t{1}, size_t{4096}, size_t{3} << 20}) {
    std::string content(size, '\0');
    for (size_t i = 0; i < size; ++i) content[i] = static_cast<char>(i * 131 >> 3);
    const std::string path = folder.path("file");
    write_file_atomic(path, content);
    EXPECT_EQ(read_file(path), content);
    EXPECT_EQ(text_of(MappedFile(path).bytes()), content);
  }
  EXPECT_EQ(folder.files(), 1u) << "something was left beside the file";
}

TEST(File, PiecesOfAnySizeArriveInOrder) {
  const TempFolder folder;
  std::string expected;
  write_file_atomic(folder.path("file"), [&](const FileSink& sink) {
    for (const size_t size : {size_t{0}, size_t{1}, size_t{7}, size_t{1} << 18, size_t{3}, (size_t{1} << 18) - 3,
                              size_t{1} << 20, size_t{5}, size_t{200000}, size_t{100000}}) {
      const std::string piece(size, static_cast<char>('a' + expected.size() % 26));
      sink(bytes_of(piece));
      expected += piece;
    }
  });
  EXPECT_EQ(read_file(folder.path("file")), expected);
}

TEST(File, AWriterThatThrowsLeavesTheOldFile) {
  const TempFolder folder;
  write_file_atomic(folder.path("file"), "old");
  EXPECT_THROW(write_file_atomic(folder.path("file"),
                                 [](const FileSink& sink) {
                                   sink(bytes_of("half of the new"));
                                   throw std::runtime_error("stop");
                                 }),
               std::runtime_error);
  EXPECT_EQ(read_file(folder.path("file")), "old");
  EXPECT_EQ(folder.files(), 1u);
}

TEST(File, AFullDiskLeavesTheOldFileAndNothingBesideIt) {
  const TempFolder folder;
  const std::string path = folder.path("file");
  write_file_atomic(path, "old");
  // smaller and larger than the buffer: late and early failure
  for (const size_t size : {size_t{5000}, size_t{1} << 20}) {
    const FileSizeLimit limit(4096);
    EXPECT_TRUE(
        fails(ErrorKind::kIo, {path, "File too large"}, [&] { write_file_atomic(path, std::string(size, 'x')); }));
  }
  EXPECT_EQ(read_file(path), "old");
  EXPECT_EQ(folder.files(), 1u);
  EXPECT_TRUE(
      fails(ErrorKind::kIo, {"/dev/full", "No space left on device"}, [] { write_file_atomic("/dev/full", "x"); }));
}

std::vector<std::string> names_in(const std::string& folder) {
  std::vector<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator(folder))
    names.push_back(entry.path().filename().string());
  std::sort(names.begin(), names.end());
  return names;
}

// A process that was killed while writing cannot remove its side file; the next one that writes the file does.
TEST(File, WhatAKilledProcessLeftGoesWithTheNextWriting) {
  const TempFolder folder;
  const auto killed_while_writing = [&](const std::string& name) {
    const pid_t child = ::fork();
    if (child == 0) {
      write_file_atomic(folder.path(name), [](const FileSink& sink) {
        sink(std::as_bytes(std::span("half")));
        ::raise(SIGKILL);
      });
      ::_exit(0);
    }
    int status = 0;
    return ::waitpid(child, &status, 0) == child && WIFSIGNALED(status);
  };
  ASSERT_TRUE(killed_while_writing("file"));
  ASSERT_TRUE(killed_while_writing("file2"));
  ASSERT_EQ(folder.files(), 2u);
  // Not ours: of other forms.
  for (const char* other : {"file.tmp-1x-0", "file.tmp-0123456789ag", "file.tmp-0123456789abc", "0123456789ab"})
    std::ofstream(folder.path(other)) << "x";
  write_file_atomic(folder.path("file"), "whole");
  EXPECT_EQ(read_file(folder.path("file")), "whole");
  EXPECT_EQ(folder.files(), 6u) << "file, what is left of file2, and four of others";
  remove_abandoned(folder.path());
  EXPECT_THAT(names_in(folder.path()), ::testing::ElementsAre("0123456789ab", "file", "file.tmp-0123456789abc",
                                                              "file.tmp-0123456789ag", "file.tmp-1x-0"));
}

// Who writes is known by a lock: the number of a process says nothing in another PID namespace, or on another host.
TEST(File, WhatAnotherOpeningWritesStays) {
  const TempFolder folder;
  write_file_atomic(folder.path("file"), [&](const FileSink& sink) {
    sink(std::as_bytes(std::span("first", 5)));
    write_file_atomic(folder.path("file"), "second");
    remove_abandoned(folder.path());
    EXPECT_EQ(folder.files(), 2u);
    EXPECT_EQ(read_file(folder.path("file")), "second");
  });
  EXPECT_EQ(read_file(folder.path("file")), "first");
  EXPECT_EQ(folder.files(), 1u);
}

// Several processes that write one file and clean up after each other: no writing fails, and the file is whole at
// every moment.
TEST(File, ProcessesThatWriteOneFileDoNotDisturbEachOther) {
  const TempFolder folder;
  const std::string path = folder.path("file");
  write_file_atomic(path, std::string(50000, 'a'));
  std::vector<pid_t> children;
  for (int i = 0; i < 4; ++i) {
    const pid_t child = ::fork();
    if (child == 0) {
      int code = 0;
      try {
        for (int round = 0; round < 60; ++round) {
          write_file_atomic(path, std::string(50000, static_cast<char>('a' + i)));
          const std::string found = read_file(path);
          if (found.size() != 50000 || found.find_first_not_of(found[0]) != std::string::npos) code = 1;
          remove_abandoned(folder.path());
        }
      } catch (const std::exception&) {
        code = 2;
      }
      ::_exit(code);
    }
    children.push_back(child);
  }
  for (const pid_t child : children) {
    int status = 0;
    ASSERT_EQ(::waitpid(child, &status, 0), child);
    EXPECT_EQ(WEXITSTATUS(status), 0);
  }
  EXPECT_EQ(folder.files(), 1u);
}

TEST(File, DevicesAreWrittenNotReplaced) {
  write_file_atomic("/dev/null", "gone");
  struct stat info = {};
  ASSERT_EQ(stat("/dev/null", &info), 0);
  EXPECT_TRUE(S_ISCHR(info.st_mode));
}

TEST(File, WritingWhereItCannotBe) {
  const TempFolder folder;
  EXPECT_TRUE(fails(ErrorKind::kIo, {folder.path(), "it is a folder"}, [&] { write_file_atomic(folder.path(), "x"); }));
  EXPECT_TRUE(fails(ErrorKind::kIo, {"no/such/file", "No such file or directory"},
                    [&] { write_file_atomic(folder.path("no/such/file"), "x"); }));
  write_file_atomic(folder.path("file"), "x");
  EXPECT_TRUE(fails(ErrorKind::kIo, {"file/below", "Not a directory"},
                    [&] { write_file_atomic(folder.path("file/below"), "x"); }));
}

TEST(File, ModeAndSymbolicLinkStay) {
  const TempFolder folder;
  write_file_atomic(folder.path("target"), "old");
  ASSERT_EQ(chmod(folder.path("target").c_str(), 0640), 0);
  std::filesystem::create_symlink("target", folder.path("link"));
  write_file_atomic(folder.path("link"), "new");
  EXPECT_TRUE(std::filesystem::is_symlink(folder.path("link")));
  EXPECT_EQ(read_file(folder.path("target")), "new");
  struct stat info = {};
  ASSERT_EQ(stat(folder.path("target").c_str(), &info), 0);
  EXPECT_EQ(info.st_mode & 0777, 0640u);
}

TEST(File, ReadingWhatIsNotAFile) {
  const TempFolder folder;
  const std::string missing = folder.path("missing");
  EXPECT_TRUE(fails(ErrorKind::kUsage, {missing, "No such file or directory"}, [&] { read_file(missing); }));
  EXPECT_TRUE(fails(ErrorKind::kUsage, {missing, "No such file or directory"}, [&] { MappedFile{missing}; }));
  EXPECT_TRUE(fails(ErrorKind::kUsage, {folder.path(), "it is a folder"}, [&] { read_file(folder.path()); }));
  EXPECT_TRUE(fails(ErrorKind::kUsage, {folder.path(), "it is a folder"}, [&] { MappedFile{folder.path()}; }));
  EXPECT_TRUE(fails(ErrorKind::kUsage, {"/dev/null", "regular file"}, [] { MappedFile("/dev/null"); }));
}

TEST(File, LimitOnTheSize) {
  const TempFolder folder;
  write_file_atomic(folder.path("file"), "12345");
  EXPECT_EQ(read_file(folder.path("file"), 5), "12345");
  EXPECT_TRUE(fails(ErrorKind::kUsage, {"at most 4 bytes", "it has 5"}, [&] { read_file(folder.path("file"), 4); }));
  EXPECT_TRUE(fails(ErrorKind::kUsage, {"/dev/zero", "regular file"}, [] { read_file("/dev/zero", 1000); }));
}

// A named pipe that nobody writes to would be waited for without end.
TEST(File, DevicesAndPipesAreRefused) {
  const TempFolder folder;
  const std::string pipe = folder.path("pipe");
  ASSERT_EQ(::mkfifo(pipe.c_str(), 0600), 0);
  EXPECT_TRUE(fails(ErrorKind::kUsage, {pipe, "expected a regular file"}, [&] { read_file(pipe); }));
  EXPECT_TRUE(fails(ErrorKind::kUsage, {pipe, "expected a regular file"}, [&] { MappedFile{pipe}; }));
  EXPECT_EQ(file_start(pipe, 8), "");
  EXPECT_EQ(file_start("/dev/zero", 8), "");
  EXPECT_EQ(file_start(folder.path("missing"), 8), "");
  write_file_atomic(folder.path("file"), "12345");
  EXPECT_EQ(file_start(folder.path("file"), 3), "123");
  EXPECT_EQ(file_start(folder.path("file"), 8), "12345");
}

TEST(File, OneFileUnderTwoNames) {
  const TempFolder folder;
  const std::string file = folder.path("file"), other = folder.path("other"), link = folder.path("link"),
                    hard = folder.path("hard");
  write_file_atomic(file, "x");
  write_file_atomic(other, "x");
  std::filesystem::create_symlink("file", link);
  std::filesystem::create_hard_link(file, hard);
  EXPECT_TRUE(same_file(file, folder.path("./file")));
  EXPECT_TRUE(same_file(file, link));
  EXPECT_TRUE(same_file(file, hard));
  EXPECT_FALSE(same_file(file, other));
  EXPECT_FALSE(same_file(folder.path("missing"), folder.path("missing")));
}

TEST(File, FilesThatDoNotSayTheirSize) { EXPECT_NE(read_file("/proc/self/status").find("Name:"), std::string::npos); }

// Permission bits do not bind root: as root the test takes another user's identity for these calls.
TEST(File, PermissionDenied) {
  const TempFolder folder;
  ASSERT_EQ(chmod(folder.path().c_str(), 0755), 0);
  write_file_atomic(folder.path("secret"), "x");
  ASSERT_EQ(chmod(folder.path("secret").c_str(), 0), 0);
  const bool root = geteuid() == 0;
  if (root && seteuid(65534) != 0)
    GTEST_SKIP() << "root that may not become another user: permissions cannot be tested";
  if (!root) {
    ASSERT_EQ(chmod(folder.path().c_str(), 0555), 0);
  }
  const auto read =
      fails(ErrorKind::kUsage, {"secret", "Permission denied"}, [&] { read_file(folder.path("secret")); });
  const auto map =
      fails(ErrorKind::kUsage, {"secret", "Permission denied"}, [&] { MappedFile{folder.path("secret")}; });
  const auto write =
      fails(ErrorKind::kIo, {"other", "Permission denied"}, [&] { write_file_atomic(folder.path("other"), "x"); });
  const auto make = fails(ErrorKind::kIo, {"below", "Permission denied"}, [&] { make_folders(folder.path("below")); });
  if (root) {
    ASSERT_EQ(seteuid(0), 0);
  }
  if (!root) {
    ASSERT_EQ(chmod(folder.path().c_str(), 0755), 0);
  }
  EXPECT_TRUE(read);
  EXPECT_TRUE(map);
  EXPECT_TRUE(write);
  EXPECT_TRUE(make);
}

TEST(File, Folders) {
  const TempFolder folder;
  make_folders(folder.path("a/b/c"));
  make_folders(folder.path("a/b/c"));
  EXPECT_TRUE(std::filesystem::is_directory(folder.path("a/b/c")));
  EXPECT_TRUE(file_exists(folder.path("a/b")));
  EXPECT_FALSE(file_exists(folder.path("a/x")));
  sync_folder(folder.path("a"));
  write_file_atomic(folder.path("file"), "x");
  EXPECT_TRUE(fails(ErrorKind::kIo, {"cannot make the folder", "file"}, [&] { make_folders(folder.path("file")); }));
  EXPECT_TRUE(fails(ErrorKind::kIo, {"cannot make the folder", "file/below"},
                    [&] { make_folders(folder.path("file/below")); }));
  EXPECT_TRUE(fails(ErrorKind::kIo, {"No such file or directory"}, [&] { sync_folder(folder.path("missing")); }));
}

TEST(File, AMapOutlivesItsNameAndMoves) {
  const TempFolder folder;
  write_file_atomic(folder.path("file"), "content");
  MappedFile first(folder.path("file"));
  MappedFile second(std::move(first));
  write_file_atomic(folder.path("file"), "replaced");  // the map still shows what it was opened on
  EXPECT_EQ(text_of(second.bytes()), "content");
  MappedFile third;
  third = std::move(second);
  EXPECT_EQ(text_of(third.bytes()), "content");
  EXPECT_EQ(third.path(), folder.path("file"));
  EXPECT_TRUE(MappedFile().bytes().empty());
}

}  // namespace
}  // namespace fw
