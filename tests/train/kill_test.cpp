#include <gtest/gtest.h>

#include "train/killed_run.h"

namespace fw {
namespace {

TEST(Kill, ARunKilledAtRandomMomentsEndsAsIfUndisturbed) { testing::expect_kills_leave_no_trace("cpu", 24); }
TEST(Kill, AndSoWithMomentsInBf16) { testing::expect_kills_leave_no_trace("cpu", 8, "bf16"); }

}  // namespace
}  // namespace fw
