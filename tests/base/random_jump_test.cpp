// A jump leaves a generator where drawing so many numbers leaves it.
#include "base/random_jump.h"

#include <gtest/gtest.h>

namespace fw {
namespace {

void draw(Random& random, int64_t count) {
  for (int64_t i = 0; i < count; ++i) random.bits();
}

TEST(RandomJump, IsSoManyDraws) {
  for (const int log : {0, 1, 8, 9, 15}) {
    const RandomJump jump(log);
    ASSERT_EQ(jump.draws(), int64_t{1} << log);
    // Fresh, in the middle of its words, at their last and just after them.
    for (const int64_t before : {0, 1, 100, 311, 312, 313, 1000}) {
      Random jumped(7), drawn(7);
      draw(jumped, before);
      draw(drawn, before);
      jump.apply(jumped);
      draw(drawn, jump.draws());
      ASSERT_EQ(jumped.save(), drawn.save()) << "2^" << log << " after " << before;
      for (int i = 0; i < 700; ++i)
        ASSERT_EQ(jumped.bits(), drawn.bits()) << "2^" << log << " after " << before << ", number " << i;
    }
  }
}

TEST(RandomJump, TwoJumpsAreOneTwiceAsLong) {
  const RandomJump half(39), whole(40);
  Random twice(3), once(3);
  half.apply(twice);
  half.apply(twice);
  whole.apply(once);
  for (int i = 0; i < 700; ++i) ASSERT_EQ(twice.bits(), once.bits());
}

}  // namespace
}  // namespace fw
