// The reference of the selective scans: its gradients against finite differences, and Mamba's law against linear
// attention with a head for every channel.
#include "reference/element_scan.h"

#include <gtest/gtest.h>

#include <cmath>

#include "reference/problem.h"

namespace fw::testing {
namespace {

double loss(const ElementScan& scan, const ElementScan::Inputs& in, const ElementScan::Outputs& d) {
  const ElementScan::Outputs out = scan.forward(in);
  double sum = 0;
  for (size_t i = 0; i < out.y.size(); ++i) sum += out.y[i] * d.y[i];
  for (size_t i = 0; i < out.s.size(); ++i) sum += out.s[i] * d.s[i];
  return sum;
}

TEST(ElementScan, GradientsAreFiniteDifferences) {
  constexpr double kStep = 1e-3;
  using Field = std::vector<double> ElementScan::Inputs::*;
  for (const bool longhorn : {false, true}) {
    const ElementScan scan{longhorn, SeqLayout({0, 3, 3, 5}), 2, 3};
    const ElementScan::Outputs d = scan.random_cotangents(2);
    ElementScan::Inputs in = scan.random(1);
    const ElementScan::Inputs gradients = scan.backward(in, d);
    for (const Field field :
         {&ElementScan::Inputs::u, &ElementScan::Inputs::step, &ElementScan::Inputs::q, &ElementScan::Inputs::k,
          &ElementScan::Inputs::a, &ElementScan::Inputs::skip, &ElementScan::Inputs::s0}) {
      ASSERT_EQ((gradients.*field).size(), (in.*field).size());
      for (size_t i = 0; i < (in.*field).size(); ++i) {
        const double x = (in.*field)[i];
        const auto at = [&](double offset) {
          (in.*field)[i] = x + offset;
          return loss(scan, in, d);
        };
        const double expected = (8 * (at(kStep) - at(-kStep)) - (at(2 * kStep) - at(-2 * kStep))) / (12 * kStep);
        (in.*field)[i] = x;
        EXPECT_NEAR((gradients.*field)[i], expected, 1e-8 * std::max(1.0, std::abs(expected)))
            << (longhorn ? "longhorn, " : "mamba, ") << i;
      }
    }
  }
}

// H = HV = D heads, K = N, V = 1, g = step a, z = step u: what the rule with a channel decay computes (its scale is
// N^-1/2).
TEST(ElementScan, MambaIsLinearAttentionWithAHeadForEveryChannel) {
  const ElementScan scan{false, SeqLayout({0, 7, 12}), 3, 4};
  const ElementScan::Inputs in = scan.random(3);
  const ElementScan::Outputs want = scan.forward(in);
  ReferenceProblem p;
  p.rule = parse_rule("decay=channel update=additive");
  p.shape.sequences = scan.sequences;
  p.shape.H = p.shape.HV = scan.channels;
  p.shape.g_heads = scan.channels;
  p.shape.K = scan.states;
  p.shape.V = 1;
  for (int64_t t = 0; t < scan.sequences.tokens(); ++t) {
    for (int64_t c = 0; c < scan.channels; ++c) {
      const size_t at = static_cast<size_t>(t * scan.channels + c);
      p.in.v.push_back(in.step[at] * in.u[at]);
      for (int64_t n = 0; n < scan.states; ++n) {
        p.in.q.push_back(2 * in.q[static_cast<size_t>(t * scan.states + n)]);  // N^1/2
        p.in.k.push_back(in.k[static_cast<size_t>(t * scan.states + n)]);
        p.in.g.push_back(in.step[at] * in.a[static_cast<size_t>(c * scan.states + n)]);
      }
    }
  }
  for (int64_t i = 0; i < 2; ++i) {
    for (int64_t c = 0; c < scan.channels; ++c) {
      for (int64_t n = 0; n < scan.states; ++n)
        p.in.initial_state.push_back(in.s0[static_cast<size_t>((i * scan.states + n) * scan.channels + c)]);
    }
  }
  const ReferenceOutputs got = p.forward();
  ASSERT_EQ(got.o.size(), want.y.size());
  for (size_t i = 0; i < want.y.size(); ++i)
    EXPECT_NEAR(got.o[i] + in.skip[i % static_cast<size_t>(scan.channels)] * in.u[i], want.y[i], 1e-12) << i;
}

}  // namespace
}  // namespace fw::testing
