#include <gtest/gtest.h>

#include "train/killed_run.h"

namespace fw {
namespace {

TEST(Kill, ARunKilledAtRandomMomentsEndsAsIfUndisturbed) { testing::expect_kills_leave_no_trace("cpu", 24); }

}  // namespace
}  // namespace fw
