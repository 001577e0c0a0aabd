#include "base/nearest.h"

#include <gtest/gtest.h>

#include <array>

namespace fw {
namespace {

const std::array<std::string, 4> kNames = {"hidden_size", "head_dim", "num_heads", "lr"};

TEST(Nearest, FindsAMisspeltName) {
  EXPECT_EQ(nearest("hiden_size", kNames), "hidden_size");
  EXPECT_EQ(nearest("num_head", kNames), "num_heads");
  EXPECT_EQ(nearest("haed_dim", kNames), "head_dim");
  EXPECT_EQ(nearest("lr", kNames), "lr");
  EXPECT_EQ(nearest("l", kNames), "lr");
}

TEST(Nearest, NothingNear) {
  EXPECT_EQ(nearest("zzzzzzzzzzzz", kNames), "");
  EXPECT_EQ(nearest("", {}), "");
  EXPECT_EQ(nearest("lr", {}), "");
}

TEST(Nearest, TheFirstOfEquallyNearOnes) {
  const std::array<std::string, 2> names = {"abcd", "abce"};
  EXPECT_EQ(nearest("abcf", names), "abcd");
}

}  // namespace
}  // namespace fw
