// Distributions, effective rank, subspaces, and one recurrence computed by hand.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <vector>

#include "analyze/distribution.h"
#include "analyze/replay.h"
#include "analyze/subspace.h"
#include "base/error.h"
#include "base/lapack.h"
#include "base/random.h"

namespace fw::testing {
namespace {

int64_t total(const Distribution::Histogram& h) {
  return std::accumulate(h.counts.begin(), h.counts.end(), int64_t{0});
}

TEST(Distribution, MomentsExtremesAndCounts) {
  Distribution d;
  for (const double x : {1.0, 2.0, 3.0, 6.0}) d.add(x);
  EXPECT_EQ(d.count(), 4);
  EXPECT_DOUBLE_EQ(d.mean(), 3);
  EXPECT_DOUBLE_EQ(d.deviation(), std::sqrt(14.0 / 4));
  EXPECT_EQ(d.min(), 1);
  EXPECT_EQ(d.max(), 6);
  d.add(std::numeric_limits<double>::quiet_NaN());
  d.add(std::numeric_limits<double>::infinity());
  EXPECT_EQ(d.count(), 4);
  EXPECT_EQ(d.skipped(), 2);
  EXPECT_EQ(total(d.histogram(8)), 4);
}

// Ranges that grow to both sides, over many orders of magnitude: nothing is lost, and every bin holds what lies between
// its edges.
TEST(Distribution, HistogramHoldsEveryValueBetweenItsEdges) {
  Random random(7);
  for (const double spread : {0.0, 1e-9, 1.0, 1e6}) {
    for (const double centre : {0.0, -3.0, 1.0, 1e5}) {
      Distribution d;
      std::vector<double> values;
      values.reserve(5000);
      for (int i = 0; i < 5000; ++i) values.push_back(centre + spread * random.normal() * (i % 100 == 0 ? 10 : 1));
      for (const double x : values) d.add(x);
      for (const int64_t bins : {2, 7, 64, 5000}) {
        const Distribution::Histogram h = d.histogram(bins);
        ASSERT_LE(static_cast<int64_t>(h.counts.size()), bins);
        ASSERT_EQ(h.edges.size(), h.counts.size() + 1);
        EXPECT_EQ(total(h), 5000);
        for (size_t i = 0; i < h.counts.size(); ++i) {
          ASSERT_LT(h.edges[i], h.edges[i + 1]);
          EXPECT_EQ(std::count_if(values.begin(), values.end(),
                                  [&](double x) { return x >= h.edges[i] && x < h.edges[i + 1]; }),
                    h.counts[i]);
        }
      }
      std::sort(values.begin(), values.end());
      for (const double p : {0.01, 0.5, 0.95})
        EXPECT_NEAR(d.quantile(p), values[static_cast<size_t>(p * 5000)],
                    (values.back() - values[0]) / 256 + 1e-5 * std::abs(centre));
    }
  }
}

// Two that are added are what one would be that had seen all values, whatever their ranges and whichever came first.
TEST(Distribution, AddedIsAsIfSeenTogether) {
  Random random(9);
  for (const auto scale : {Distribution::Scale::kLinear, Distribution::Scale::kLog10}) {
    for (const auto& [centre, spread] :
         std::vector<std::pair<double, double>>{{1, 1}, {1e4, 1e3}, {1e-6, 1e-9}, {1, 0}}) {
      std::vector<double> first, second;
      for (int i = 0; i < 700; ++i) first.push_back(std::abs(random.normal()));
      for (int i = 0; i < 300; ++i) second.push_back(std::abs(centre + spread * random.normal()));
      second.push_back(std::numeric_limits<double>::infinity());
      Distribution a(scale), b(scale), all(scale), empty(scale);
      for (const double x : first) a.add(x), all.add(x);
      for (const double x : second) b.add(x), all.add(x);
      Distribution ab = a, ba = b;
      ab.add(b);
      ba.add(a);
      ab.add(empty);
      empty.add(b);
      EXPECT_EQ(empty.count(), 300);
      EXPECT_EQ(empty.skipped(), 1);
      EXPECT_DOUBLE_EQ(empty.mean(), b.mean());
      for (const Distribution& sum : {ab, ba}) {
        EXPECT_EQ(sum.count(), 1000);
        EXPECT_EQ(sum.skipped(), 1);
        EXPECT_NEAR(sum.mean(), all.mean(), 1e-12 * std::abs(all.mean()));
        EXPECT_NEAR(sum.deviation(), all.deviation(), 1e-9 * all.deviation());
        EXPECT_EQ(sum.min(), all.min());
        EXPECT_EQ(sum.max(), all.max());
        std::vector<double> values = first;
        values.insert(values.end(), second.begin(), second.end() - 1);
        const Distribution::Histogram h = sum.histogram(64);
        EXPECT_EQ(total(h), 1000);
        for (size_t i = 0; i < h.counts.size(); ++i) {
          // Edges on a logarithmic scale are powers, which round: no value may be within rounding of one here.
          ASSERT_EQ(std::count_if(values.begin(), values.end(),
                                  [&](double x) { return x >= h.edges[i] && x < h.edges[i + 1]; }),
                    h.counts[i]);
        }
      }
    }
  }
  Distribution linear;
  EXPECT_THROW(linear.add(Distribution(Distribution::Scale::kLog10)), Error);
}

TEST(Distribution, AFewDozenBinsForAnyRange) {
  Random random(8);
  Distribution d;
  for (int i = 0; i < 100000; ++i) d.add(random.uniform());
  const Distribution::Histogram h = d.histogram(64);
  EXPECT_GE(h.counts.size(), 32u);
  for (const int64_t n : h.counts) EXPECT_NEAR(static_cast<double>(n) * static_cast<double>(h.counts.size()), 1e5, 1e4);
}

TEST(Distribution, LogarithmicBinsInUnitsOfTheValues) {
  Distribution d(Distribution::Scale::kLog10);
  for (const double x : {1e-6, 1e-3, 1.0, 1e3, 0.0, -1.0}) d.add(x);
  EXPECT_EQ(d.count(), 4);
  EXPECT_EQ(d.skipped(), 2);
  const Distribution::Histogram h = d.histogram(64);
  EXPECT_EQ(total(h), 4);
  EXPECT_LE(h.edges.front(), 1e-6 * (1 + 1e-9));
  EXPECT_GT(h.edges.back(), 1e3);
  EXPECT_NEAR(h.edges[2] / h.edges[1], h.edges[1] / h.edges[0], 1e-9);
  EXPECT_EQ(d.min(), 1e-6);
}

TEST(Distribution, NothingIsNan) {
  const Distribution d;
  EXPECT_TRUE(std::isnan(d.mean()) && std::isnan(d.min()) && std::isnan(d.quantile(0.5)));
  EXPECT_TRUE(d.histogram(10).counts.empty());
}

TEST(EffectiveRank, OfKnownMatrices) {
  EXPECT_NEAR(effective_rank(2, 2, std::vector<double>{3, 0, 0, 3}), 2, 1e-12);
  EXPECT_NEAR(effective_rank(2, 3, std::vector<double>{1, 2, 3, 2, 4, 6}), 1, 1e-6);  // rank one
  // Singular values 1 and 3: p = 1/4, 3/4.
  const double entropy = 0.25 * std::log(4.0) + 0.75 * std::log(4.0 / 3);
  EXPECT_NEAR(effective_rank(3, 2, std::vector<double>{0, 1, 0, 0, -3, 0}), std::exp(entropy), 1e-12);
  EXPECT_TRUE(std::isnan(effective_rank(2, 2, std::vector<double>(4, 0.0))));
  EXPECT_THROW(effective_rank(1, 1, std::vector<double>{std::nan("")}), Error);
}

TEST(Lapack, EigenvectorsAreRowsLargestFirst) {
  const SymmetricEigen e = symmetric_eigen(2, std::vector<double>{2, 1, 1, 2});
  EXPECT_NEAR(e.values[0], 3, 1e-12);
  EXPECT_NEAR(e.values[1], 1, 1e-12);
  EXPECT_NEAR(std::abs(e.vectors[0]), std::sqrt(0.5), 1e-12);
  EXPECT_NEAR(e.vectors[0], e.vectors[1], 1e-12);
  EXPECT_NEAR(e.vectors[2], -e.vectors[3], 1e-12);
  const std::vector<double> sigma = singular_values(2, 3, std::vector<double>{0, 2, 0, 0, 0, -5});
  ASSERT_EQ(sigma.size(), 2u);
  EXPECT_NEAR(sigma[0], 5, 1e-12);
  EXPECT_NEAR(sigma[1], 2, 1e-12);
}

// Vectors +-2 along axis 0 and +-1 along axis 1, about a mean that must not matter.
Moments along(const std::vector<int>& axes, int64_t V, double mean) {
  Moments m(V);
  double size = 2;
  for (const int axis : axes) {
    for (const double sign : {-1.0, 1.0}) {
      std::vector<double> x(static_cast<size_t>(V), mean);
      x[static_cast<size_t>(axis)] += sign * size;
      m.add(1, x.data());
    }
    size -= 1;
  }
  return m;
}

TEST(Subspaces, EqualAndOrthogonal) {
  const SubspaceOverlap equal = subspace_overlap(along({0, 1}, 4, 0), along({1, 0}, 4, 7));
  EXPECT_EQ(equal.components_a, 2);
  EXPECT_EQ(equal.components_b, 2);
  EXPECT_NEAR(equal.overlap, 1, 1e-12);
  EXPECT_NEAR(equal.by_rank[0], 0, 1e-12);  // the largest components are different axes
  EXPECT_NEAR(equal.by_rank[3], 1, 1e-12);
  EXPECT_DOUBLE_EQ(equal.chance, 0.5);
  EXPECT_NEAR(equal.explained_a[0], 0.8, 1e-12);

  EXPECT_NEAR(subspace_overlap(along({0, 1}, 4, 0), along({2, 3}, 4, 0)).overlap, 0, 1e-12);
  // one common axis of two
  EXPECT_NEAR(subspace_overlap(along({0, 1}, 4, 0), along({1, 2}, 4, 0)).overlap, 0.5, 1e-12);
}

// Reads b vary along the axes 0 and 1 with shares 0.8 and 0.2; of a, along 1 and 2, the second axis of b holds 0.8.
TEST(Subspaces, SharedEnergy) {
  const SharedEnergy e = shared_energy(along({1, 2}, 4, 3), along({0, 1}, 4, 0));
  ASSERT_EQ(e.own.size(), 4u);
  for (const auto& [r, own, shared] : {std::tuple<size_t, double, double>{0, 0.8, 0}, {1, 1, 0.8}, {3, 1, 1}}) {
    EXPECT_NEAR(e.own[r], own, 1e-12);
    EXPECT_NEAR(e.shared[r], shared, 1e-12);
  }
  EXPECT_TRUE(shared_energy(Moments(4), along({0, 1}, 4, 0)).shared.empty()) << "vectors that do not vary";
}

// Keys along the axes: the eigenvalues are the diagonal. Keys along one diagonal direction: one eigenvalue, a flat
// diagonal.
TEST(Subspaces, GramSpectrum) {
  Moments axes(3), diagonal(4);
  const std::vector<double> rows{0, 2, 0, 1, 0, 0, 0, 0, -1}, ones{1, -1, 1, 1};
  axes.add(3, rows.data());
  diagonal.add(1, ones.data());
  const GramSpectrum a = gram_spectrum(axes), d = gram_spectrum(diagonal);
  EXPECT_NEAR(a.alignment, 1, 1e-12);
  EXPECT_NEAR(d.alignment, 0.5, 1e-12);
  for (size_t i = 0; i < 3; ++i) EXPECT_NEAR(a.eigenvalues[i], a.diagonal[i], 1e-12);
  EXPECT_NEAR(a.diagonal[0], 4.0 / 6, 1e-12);
  EXPECT_NEAR(d.eigenvalues[0], 1, 1e-12);
  for (size_t i = 0; i < 4; ++i) EXPECT_NEAR(d.diagonal[i], 0.25, 1e-12);
  EXPECT_TRUE(std::isnan(gram_spectrum(Moments(2)).alignment));
}

TEST(Subspaces, WithoutVarianceThereIsNone) {
  Moments still(3);
  const std::vector<double> x{1, 2, 3};
  still.add(1, x.data());
  const SubspaceOverlap none = subspace_overlap(along({0}, 3, 0), still);
  EXPECT_EQ(none.components, 0);
  EXPECT_TRUE(std::isnan(none.overlap));
}

TEST(Subspaces, WhatIsNotFiniteSpansNothing) {
  Moments lost(2);
  const std::vector<double> x{1, std::numeric_limits<double>::infinity()};
  lost.add(1, x.data());
  const SubspaceOverlap none = subspace_overlap(along({0}, 2, 0), lost);
  EXPECT_EQ(none.components, 0);
  EXPECT_TRUE(std::isnan(none.overlap));
  EXPECT_TRUE(none.by_rank.empty());
}

// K = 2, V = 1, S = [4, 0]: decay 1/2, k on axis 0, q on axis 1, lambda = 1/2, s = 1.
TEST(Replay, OneTokenByHand) {
  HeadStreams x;
  x.count = 1;
  x.K = 2;
  x.V = 1;
  x.k = {1, 0};
  x.q = {0, 1};
  x.w = {1, 0};
  x.r = {1, 1};
  x.e = {1, 0.5};
  x.f = {0, 0.5};
  x.z = x.v = {3};
  x.decay = {0.5, 0.5};
  HeadReplay replay(2, 1);
  const std::vector<double> state{4, 6};
  replay.start(state.data());
  replay.step(x, 0);
  // Sbar = [2, 3]; e: 2 + 1.5; f: 1.5; u = 3 - 3.5; S = [1.5, 3].
  EXPECT_DOUBLE_EQ(replay.reads().erased[0], 3.5);
  EXPECT_DOUBLE_EQ(replay.reads().fed[0], 1.5);
  EXPECT_DOUBLE_EQ(replay.reads().u[0], -0.5);
  EXPECT_DOUBLE_EQ(replay.reads().key_read[0], 1.5);
  EXPECT_DOUBLE_EQ(replay.reads().o[0], 4.5);
  EXPECT_DOUBLE_EQ(replay.reads().prior_key[0], 4);
  EXPECT_DOUBLE_EQ(replay.reads().prior_query[0], 6);
  EXPECT_DOUBLE_EQ(replay.reads().left[0], 3);  // 1.5 + 0.5 * 3
}

}  // namespace
}  // namespace fw::testing
