#include "base/memory.h"

#include <gtest/gtest.h>

#include "base/base_support.h"
#include "base/file.h"
#include "base/temp_folder.h"

namespace fw {
namespace {

using testing::fails;
using testing::TempFolder;

// Folders in place of /proc and /sys/fs/cgroup.
struct System {
  TempFolder folder;
  std::string proc = folder.path("proc"), cgroup = folder.path("cgroup");

  void put(const std::string& path, const std::string& content) const {
    make_folders(path.substr(0, path.rfind('/')));
    write_file_atomic(path, content);
  }
  void meminfo(uint64_t kilobytes) const {
    put(proc + "/meminfo", fmt::format("MemTotal: 99999999 kB\nMemAvailable:   {} kB\nCached: 7 kB\n", kilobytes));
  }
  void group2(const std::string& path, const std::string& limit, uint64_t used, uint64_t cache) const {
    put(cgroup + path + "/memory.max", limit + "\n");
    put(cgroup + path + "/memory.current", fmt::format("{}\n", used));
    put(cgroup + path + "/memory.stat", fmt::format("anon 5\ninactive_file {}\nfile 9\n", cache));
  }
  std::optional<uint64_t> available() const { return available_memory(proc, cgroup); }
};

TEST(Memory, IsWhatTheSystemCanGive) {
  const System system;
  EXPECT_EQ(system.available(), std::nullopt);
  system.meminfo(1000);
  EXPECT_EQ(system.available(), 1000u << 10);
}

TEST(Memory, IsWhatTheNarrowestGroupLeaves) {
  const System system;
  system.meminfo(1000000);
  system.put(system.proc + "/self/cgroup", "0::/slice/job\n");
  system.group2("/slice/job", "max", 100, 0);
  EXPECT_EQ(system.available(), 1000000u << 10);
  system.group2("/slice", "5000", 3000, 500);  // above it; page cache that goes first is free
  EXPECT_EQ(system.available(), 2500u);
  system.group2("/slice/job", "2000", 1900, 0);
  EXPECT_EQ(system.available(), 100u);
  system.group2("/slice/job", "2000", 2100, 0);
  EXPECT_EQ(system.available(), 0u);
}

TEST(Memory, InAContainerTheRootIsTheGroup) {
  const System system;
  system.meminfo(1000000);
  system.put(system.proc + "/self/cgroup", "0::/a/path/of/the/host\n");
  system.group2("", "7000", 1000, 0);
  EXPECT_EQ(system.available(), 6000u);
}

TEST(Memory, VersionOneOfControlGroups) {
  const System system;
  system.meminfo(1000000);
  system.put(system.proc + "/self/cgroup", "5:cpu,cpuacct:/other\n4:memory:/job\n0::/\n");
  system.put(system.cgroup + "/memory/job/memory.limit_in_bytes", "9000\n");
  system.put(system.cgroup + "/memory/job/memory.usage_in_bytes", "4000\n");
  system.put(system.cgroup + "/memory/job/memory.stat", "cache 3\ntotal_inactive_file 1000\n");
  system.put(system.cgroup + "/memory/memory.limit_in_bytes", "9223372036854771712\n");
  system.put(system.cgroup + "/memory/memory.usage_in_bytes", "5000\n");
  EXPECT_EQ(system.available(), 6000u);
}

TEST(Memory, WhatDoesNotFitIsRefusedUnlessItIsAllowed) {
  ASSERT_TRUE(available_memory());
  require_memory(1, "nothing", "");
  EXPECT_TRUE(fails(ErrorKind::kUsage, {"a step takes more than 1024 TiB of memory", "are available: lower it"},
                    [] { require_memory(1e30, "a step", "lower it"); }));
  allow_too_much_memory(true);
  require_memory(1e30, "a step", "lower it");
  allow_too_much_memory(false);
  EXPECT_TRUE(fails(ErrorKind::kUsage, {"a step"}, [] { require_memory(1e30, "a step", "lower it"); }));
}

}  // namespace
}  // namespace fw
