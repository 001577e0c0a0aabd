#include "base/nearest.h"

#include <gtest/gtest.h>

#include <array>
#include <vector>

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

// A name of a hostile file may have megabytes, and so may those that it is compared with.
TEST(Nearest, LongNamesAreNearToNone) {
  const std::string huge(size_t{64} << 20, 'x');
  EXPECT_EQ(nearest(huge, kNames), "");
  EXPECT_EQ(nearest("hiden_size", std::vector<std::string>{huge, "hidden_size"}), "hidden_size");
  EXPECT_TRUE(nearest_few(huge, kNames, 3).empty());
  const std::vector<std::string> many(100'000, std::string(kLongestName, 'y'));  // 7e9 steps without a bound
  EXPECT_EQ(nearest(std::string(kLongestName, 'z'), many), "");
  EXPECT_FALSE(nearest_few(std::string(kLongestName, 'z'), many, 3).empty());
}

TEST(Nearest, AFew) {
  EXPECT_EQ(nearest_few("head_size", kNames, 2), (std::vector<std::string>{"head_dim", "hidden_size"}));
  EXPECT_EQ(nearest_few("lr", kNames, 9).size(), 4U);
}

TEST(Nearest, TheFirstOfEquallyNearOnes) {
  const std::array<std::string, 2> names = {"abcd", "abce"};
  EXPECT_EQ(nearest("abcf", names), "abcd");
}

}  // namespace
}  // namespace fw
