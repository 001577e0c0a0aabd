// Limits of address space (ulimit -v), under which OpenBLAS's own initialisation does not return.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "cli/program.h"

namespace fw::test {
namespace {

using ::testing::HasSubstr;

Outcome within(const std::string& kilobytes, const std::vector<std::string>& args) {
  return Program(args, "", "/dev/null", {"/bin/sh", "-c", "ulimit -v " + kilobytes + "; exec timeout 60 \"$0\" \"$@\""})
      .wait();
}

TEST(AddressSpace, CommandsThatMultiplyNothingInDoubleRun) {
  const Outcome version = within("350000", {"--version"});
  EXPECT_EQ(version.code, 0) << version.err;
  EXPECT_EQ(within("350000", {"rules", "kda"}).code, 0);
}

TEST(AddressSpace, WhatOpenBlasLacksIsSaid) {
  const Outcome f64 = within("350000", {"bench", "--rule", "gated_deltanet", "--dtype", "f64", "--tokens", "64",
                                        "--heads", "1", "--threads", "1"});
  EXPECT_EQ(f64.code, 2) << f64.err;
  EXPECT_THAT(f64.err, HasSubstr("address space"));
}

}  // namespace
}  // namespace fw::test
