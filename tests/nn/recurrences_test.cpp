// Plans of recurrences are made once for a layout.
#include <gtest/gtest.h>

#include "base/threads.h"
#include "nn/recurrence.h"

namespace fw {
namespace {

TEST(Recurrences, LayersOfOneShapeAndPassesOfOneLayoutShareAPlan) {
  Recurrences<float> recurrences(host_device());
  const RecurrenceShape wide{preset("gated_deltanet").rule, 2, 2, 16, 32};
  RecurrenceShape narrow = wide;
  narrow.value_dim = 16;
  const Recurrence<float>& first = recurrences.of(wide, SeqLayout({0, 100}));
  const Recurrence<float>& other = recurrences.of(narrow, SeqLayout({0, 100}));
  EXPECT_NE(&first, &other);
  EXPECT_GT(first.saved_bytes(), other.saved_bytes());
  EXPECT_EQ(&first, &recurrences.of(wide, SeqLayout({0, 100})));
  EXPECT_EQ(&other, &recurrences.of(narrow, SeqLayout({0, 100})));
}

TEST(Recurrences, AnotherLayoutOrNumberOfThreadsHasPlansOfItsOwn) {
  Recurrences<float> recurrences(host_device());
  const RecurrenceShape shape{preset("deltanet").rule, 2, 2, 16, 16};
  const size_t saved = recurrences.of(shape, SeqLayout({0, 100})).saved_bytes();
  EXPECT_GT(recurrences.of(shape, SeqLayout({0, 10, 300})).saved_bytes(), saved);
  EXPECT_EQ(recurrences.of(shape, SeqLayout({0, 100})).saved_bytes(), saved);

  // Its workspace must be that of the threads that run: more of them want more.
  const int before = num_threads();
  set_num_threads(1);
  RecurrenceInputs<float> in;
  std::vector<float> q(static_cast<size_t>(64 * 2 * 16), 0.1F), beta(64 * 2, 0.5F), o(q.size());
  in.q = in.k = in.v = {q.data(), 64, 32};
  in.beta = {beta.data(), 64, 2};
  const SeqLayout layout({0, 8, 16, 24, 32, 40, 48, 56, 64});
  Arena arena;
  recurrences.of(shape, layout).forward(in, {o.data(), 64, 32}, nullptr, nullptr, nullptr, arena);
  const std::vector<float> alone = o;
  set_num_threads(4);
  // refused with the old plan
  recurrences.of(shape, layout).forward(in, {o.data(), 64, 32}, nullptr, nullptr, nullptr, arena);
  set_num_threads(before);
  EXPECT_EQ(o, alone);
}

}  // namespace
}  // namespace fw
