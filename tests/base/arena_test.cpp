#include "base/arena.h"

#include <gtest/gtest.h>

#include <cstring>

namespace fw {
namespace {

bool aligned(const void* p) { return reinterpret_cast<uintptr_t>(p) % 64 == 0; }

TEST(Arena, PiecesAreAlignedAndApart) {
  Arena arena(1024);
  std::vector<std::pair<uint8_t*, int64_t>> pieces;
  for (const int64_t n : {1, 0, 63, 64, 65, 1000, 5000, 3, 1024}) {
    auto* p = arena.alloc<uint8_t>(n);
    EXPECT_TRUE(aligned(p));
    std::memset(p, static_cast<int>(pieces.size() + 1), static_cast<size_t>(n));
    pieces.emplace_back(p, n);
  }
  for (size_t i = 0; i < pieces.size(); ++i) {
    for (int64_t j = 0; j < pieces[i].second; ++j)
      ASSERT_EQ(pieces[i].first[j], i + 1) << "piece " << i << " was written over";
  }
}

TEST(Arena, ReleaseKeepsTheMemoryForTheNextPass) {
  Arena arena(4096);
  const auto pass = [&] {
    std::vector<void*> out;
    out.reserve(20);
    for (int i = 0; i < 20; ++i) out.push_back(arena.alloc<double>(100));
    return out;
  };
  const auto first = pass();
  const size_t reserved = arena.reserved_bytes();
  arena.release();
  EXPECT_EQ(pass(), first);
  EXPECT_EQ(arena.reserved_bytes(), reserved);
}

TEST(Arena, RewindGivesBackWhatCameAfterTheMark) {
  Arena arena(512);
  auto* kept = arena.alloc<int32_t>(10);
  for (int i = 0; i < 10; ++i) kept[i] = i;
  const Arena::Mark mark = arena.mark();
  void* after = arena.alloc<int32_t>(10);
  arena.alloc<int32_t>(1000);
  arena.rewind(mark);
  EXPECT_EQ(arena.alloc<int32_t>(10), after);
  for (int i = 0; i < 10; ++i) EXPECT_EQ(kept[i], i);
}

TEST(Arena, MarkOfAnEmptyArena) {
  Arena arena(256);
  const Arena::Mark mark = arena.mark();
  void* first = arena.alloc<float>(8);
  arena.alloc<float>(500);
  arena.rewind(mark);
  EXPECT_EQ(arena.alloc<float>(8), first);
}

TEST(Arena, ZeroedMemoryIsZeroAfterUse) {
  Arena arena(256);
  std::memset(arena.alloc<uint8_t>(200), 0xff, 200);
  arena.release();
  const auto* p = arena.alloc_zero<uint8_t>(200);
  for (int i = 0; i < 200; ++i) ASSERT_EQ(p[i], 0);
}

TEST(Arena, BlocksOfAnOddSize) {
  Arena arena(100);
  for (int i = 0; i < 5; ++i) EXPECT_TRUE(aligned(arena.alloc<uint8_t>(90)));
}

}  // namespace
}  // namespace fw
