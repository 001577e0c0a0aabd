// A Mesa layer's solve by conjugate gradients on every device, of heads that CUDA solves in chunks of 64 tokens where
// tensors are bf16 (mesa_chunks.cu): every length, states, decays, gates, scales, and when it ends.
#include <cmath>
#include <limits>

#include "ops/mesa_problem.h"

namespace fw::testing {
namespace {

class DeviceMesa : public OnDevice {
 protected:
  static bool is_bf16() { return GetParam().type == Type::kBf16; }
  static double bound() { return is_bf16() ? kMesaBound : 1e-6; }
  static std::vector<double> on_device(const MesaProblem& p, int64_t pad = 8) {
    return is_bf16() ? solve<Bf16>(*GetParam().device, p, pad) : solve<float>(*GetParam().device, p, pad);
  }
  static std::vector<double> on_host(const MesaProblem& p) { return solve<double>(host_device(), p); }
  static double error(const MesaProblem& p, const std::vector<double>& want, int64_t pad = 8) {
    return is_bf16() ? mesa_error<Bf16>(p, on_device(p, pad), want) : mesa_error<float>(p, on_device(p, pad), want);
  }
  static void expect_close(const MesaProblem& p, int64_t pad = 8) { EXPECT_LE(error(p, on_host(p), pad), bound()); }
};
// CUDA solves float tensors token by token (device_layers_test.cpp), which takes minutes in the emulation.
std::vector<Case> mesa_cases() {
  std::vector<Case> list = cases();
  std::erase_if(list, [](const Case& one) { return one.name == "HostDouble" || one.name == "CudaFloat"; });
  return list;
}
INSTANTIATE_TEST_SUITE_P(Devices, DeviceMesa, ::testing::ValuesIn(mesa_cases()),
                         [](const auto& one) { return one.param.name; });

const SeqLayout kEveryLength({0, 0, 1, 4, 4, 19, 35, 52, 115, 179, 244, 374, 374});  // 0 1 3 0 15 16 17 63 64 65 130 0

TEST_P(DeviceMesa, EveryLength) {
  for (const int64_t K : {64, 128}) {
    for (const bool state : {false, true}) {
      SCOPED_TRACE(::testing::Message() << "K " << K << ", state " << state);
      MesaProblem p = mesa_problem(kEveryLength, K == 64 ? 2 : 1, K, 11);
      if (state) add_mesa_state(p, 100, 12);
      expect_close(p);
    }
  }
}

TEST_P(DeviceMesa, RowsThatDoNotBeginAtSixteenBytes) { expect_close(mesa_problem(SeqLayout({0, 6}), 1, 64, 21), 3); }

// The bits of a sequence do not depend on what else is in the pass.
TEST_P(DeviceMesa, SequencesAloneAreThoseOfThePass) {
  for (const int64_t K : {64, 128}) {
    const SeqLayout all({0, 3, 3, 73, 78, 79});
    MesaProblem p = mesa_problem(all, 2, K, 31);
    add_mesa_state(p, 20, 32);
    const std::vector<double> together = on_device(p);
    for (int64_t n = 0; n < all.count(); ++n) {
      MesaProblem alone = p;
      alone.sequences = SeqLayout({0, all.length(n)});
      const auto cut = [&](const std::vector<double>& of, int64_t begin, int64_t end) {
        const auto width = static_cast<int64_t>(of.size()) / (&of == &p.state ? all.count() : all.tokens());
        return std::vector<double>(of.begin() + begin * width, of.begin() + end * width);
      };
      for (auto member : {&MesaProblem::rhs, &MesaProblem::k, &MesaProblem::beta, &MesaProblem::g})
        alone.*member = cut(p.*member, all.begin(n), all.end(n));
      alone.state = cut(p.state, n, n + 1);
      EXPECT_EQ(on_device(alone), cut(together, all.begin(n), all.end(n))) << "K " << K << ", sequence " << n;
    }
  }
}

// Decays that end what was before: a state, keys of an earlier chunk, keys of the same chunk.
TEST_P(DeviceMesa, StrongDecays) {
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  MesaProblem p = mesa_problem(SeqLayout({0, 140, 150}), 1, 64, 41);
  add_mesa_state(p, 100, 42);
  const std::pair<size_t, double> decays[] = {{5, -kInfinity}, {6, -kInfinity},  {20, -3000}, {21, -40},
                                              {40, 0},         {64, -kInfinity}, {90, -1e30}, {127, -kInfinity},
                                              {128, -90},      {140, -kInfinity}};
  for (const auto& [t, g] : decays) p.g[t] = static_cast<double>(static_cast<float>(g));
  expect_close(p);
  for (double& g : p.g) g = -kInfinity;
  expect_close(p);
  for (double& g : p.g) g = 0;
  expect_close(p);
}

TEST_P(DeviceMesa, GatesOfZero) {
  MesaProblem p = mesa_problem(SeqLayout({0, 80}), 2, 64, 51);
  for (size_t t = 0; t < p.beta.size(); t += 3) p.beta[t] = 0;
  expect_close(p);
  for (double& beta : p.beta) beta = 0;
  expect_close(p);
}

// Of keys that are nearly one, whose H has an eigenvalue some hundred times the others: with H rounded to bf16 it would
// be 7e-2. Against the exact solve.
TEST_P(DeviceMesa, AlikeKeys) {
  MesaProblem p = mesa_problem(SeqLayout({0, 75}), 1, 128, 61, 0.9);
  add_mesa_state(p, 400, 61, 0.9);
  for (int64_t t = 0; t < 75; t += 2) {  // right-hand sides along the keys, too
    for (int64_t i = 0; i < 128; ++i) p.rhs[p.at(t, 0, i)] = p.key(t, 0, i);
  }
  p.shape.cg_steps = 60;
  MesaProblem exact = p;
  exact.shape.cg_steps = 0;
  EXPECT_LE(error(p, on_host(exact)), is_bf16() ? 1e-3 : 1e-4);
}

// Right-hand sides of any size, and none.
TEST_P(DeviceMesa, Scales) {
  MesaProblem p = mesa_problem(SeqLayout({0, 70}), 1, 64, 71);
  const auto scale = [&](int64_t t, double by) {
    for (int64_t i = 0; i < 64; ++i) p.rhs[p.at(t, 0, i)] *= by;
  };
  scale(1, 0), scale(3, std::ldexp(1, -100)), scale(17, std::ldexp(1, 110)), scale(66, std::ldexp(1, -60));
  expect_close(p);
}

// One step is the same step in every arithmetic, and the second differs by the direction's rounding.
TEST_P(DeviceMesa, FewSteps) {
  MesaProblem p = mesa_problem(SeqLayout({0, 70}), 1, 64, 81, 0.5);
  for (const int64_t steps : {1, 2, 3}) {
    p.shape.cg_steps = steps;
    EXPECT_LE(error(p, on_host(p)), is_bf16() ? bound() + static_cast<double>(steps - 1) / 512 : bound()) << steps;
  }
}

// |(H + Diag(lambda)) x - rhs| / |rhs| of each token and head.
std::vector<double> residuals(MesaProblem& p, const std::vector<double>& x) {
  const int64_t K = p.key_dim();
  std::vector<double> all;
  for (int64_t n = 0; n < p.sequences.count(); ++n) {
    for (int64_t head = 0; head < p.heads(); ++head) {
      std::vector<double> H(static_cast<size_t>(K * K), 0.0);
      for (int64_t t = p.sequences.begin(n); t < p.sequences.end(n); ++t) {
        const auto gate = static_cast<size_t>(t * p.heads() + head);
        double error = 0, square = 0;
        for (int64_t i = 0; i < K; ++i) {
          double left =
              (std::log1p(std::exp(p.lambda[static_cast<size_t>(head * K + i)])) + p.shape.least) * x[p.at(t, head, i)];
          for (int64_t j = 0; j < K; ++j) {
            double& h = H[static_cast<size_t>(i * K + j)];
            h = std::exp(p.g[gate]) * h + p.beta[gate] * p.key(t, head, i) * p.key(t, head, j);
            left += h * x[p.at(t, head, j)];
          }
          error += std::pow(left - p.rhs[p.at(t, head, i)], 2), square += std::pow(p.rhs[p.at(t, head, i)], 2);
        }
        all.push_back(std::sqrt(error / square));
      }
    }
  }
  return all;
}

// A token is over at its tolerance, not long after it, whatever its neighbours need.
TEST_P(DeviceMesa, EndsAtItsTolerance) {
  MesaProblem p = mesa_problem(SeqLayout({0, 100}), 2, 64, 91, 0.5);
  p.shape.cg_tolerance = 0.05;
  double largest = 0, sum = 0;
  const std::vector<double> all = residuals(p, on_device(p));
  for (const double one : all) largest = std::max(largest, one), sum += one;
  // Rounding x to bf16 adds 2^-9 of |H + Diag(lambda)| |x|, here at most 12 |rhs|.
  EXPECT_LE(largest, 0.05 + (is_bf16() ? 12.0 / 512 : 0.0));
  EXPECT_GE(sum / static_cast<double>(all.size()), 0.01);
}

}  // namespace
}  // namespace fw::testing
