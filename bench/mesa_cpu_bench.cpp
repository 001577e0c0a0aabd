// The Mesa layer's recurrence (docs/rules/mesa.md) on this machine's processor in float32: microseconds of processor
// time a token, medians, of one sequence. The solve, exact and by conjugate gradients; the scan over the values v | k,
// forward and both calls of backward. And a plain loop over tokens, which scans and solves (by its own Cholesky, in
// float32) as the paper has it.
//
//   mesa_cpu_bench [THREADS] [REPEATS] [HEADS] [DIM]
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <vector>

#include "base/random.h"
#include "base/threads.h"
#include "cpu_times.h"
#include "nn/mesa_mixer.h"
#include "ops/backend.h"

namespace {

constexpr int64_t kTokens = 1024;
using Values = std::vector<float>;

template <class Call>
double median_us_token(int repeats, const Call& call) {
  return fw::bench::median_us_token(fw::bench::processor_us, repeats, kTokens, call);
}

// x = (H + Diag(lambda))^-1 q by Cholesky; a [K, K] is overwritten.
void solve(int64_t K, Values& a, Values& x) {
  for (int64_t j = 0; j < K; ++j) {
    for (int64_t i = j; i < K; ++i) {
      float sum = a[i * K + j];
      for (int64_t l = 0; l < j; ++l) sum -= a[i * K + l] * a[j * K + l];
      a[i * K + j] = i == j ? std::sqrt(sum) : sum / a[j * K + j];
    }
  }
  for (int64_t i = 0; i < K; ++i) {
    for (int64_t l = 0; l < i; ++l) x[i] -= a[i * K + l] * x[l];
    x[i] /= a[i * K + i];
  }
  for (int64_t i = K - 1; i >= 0; --i) {
    for (int64_t l = i + 1; l < K; ++l) x[i] -= a[l * K + i] * x[l];
    x[i] /= a[i * K + i];
  }
}

void plain_loop(int64_t heads, int64_t K, const Values& q, const Values& k, const Values& v, const Values& beta,
                const Values& g, float lambda, Values& o) {
  fw::parallel_for(heads, [&](int64_t h) {
    Values kk(static_cast<size_t>(K * K)), kv(kk.size()), a(kk.size()), x(static_cast<size_t>(K));
    for (int64_t t = 0; t < kTokens; ++t) {
      const float keep = std::exp(g[t * heads + h]), gain = beta[t * heads + h];
      const int64_t row = (t * heads + h) * K;
      for (int64_t i = 0; i < K; ++i) {
        const float key = gain * k[row + i];
        for (int64_t j = 0; j < K; ++j) kk[i * K + j] = keep * kk[i * K + j] + key * k[row + j];
        for (int64_t j = 0; j < K; ++j) kv[i * K + j] = keep * kv[i * K + j] + key * v[row + j];
        x[i] = q[row + i];
      }
      a = kk;
      for (int64_t i = 0; i < K; ++i) a[i * K + i] += lambda;
      solve(K, a, x);
      for (int64_t j = 0; j < K; ++j) o[row + j] = 0;
      for (int64_t i = 0; i < K; ++i) {
        for (int64_t j = 0; j < K; ++j) o[row + j] += x[i] * kv[i * K + j];
      }
    }
  });
}

}  // namespace

int main(int argc, char** argv) {
  const auto argument = [&](int i, int standard) { return argc > i ? std::atoi(argv[i]) : standard; };
  const int threads = argument(1, 1), repeats = argument(2, 5);
  const int64_t heads = argument(3, 16), dim = argument(4, 64);
  fw::set_num_threads(threads);
  fw::Random random(1);
  const auto numbers = [&](int64_t n, double low, double high) {
    Values x(static_cast<size_t>(n));
    for (float& value : x) value = static_cast<float>(low + (high - low) * random.uniform());
    return x;
  };
  const auto of = [](Values& x) { return fw::Mat<float>(x.data(), kTokens, static_cast<int64_t>(x.size()) / kTokens); };
  const int64_t size = heads * dim;
  // Keys and queries of about unit length.
  const double entry = std::sqrt(3.0 / static_cast<double>(dim));
  Values q = numbers(kTokens * size, -entry, entry), k = numbers(kTokens * size, -entry, entry),
         v = numbers(kTokens * size, -1, 1);
  Values beta = numbers(kTokens * heads, 0, 1), g = numbers(kTokens * heads, -0.1, 0),
         lambda(static_cast<size_t>(size), 0.0F), x(q.size()), o(q.size());
  Values both(2 * q.size()), out(both.size()), d_out = numbers(static_cast<int64_t>(both.size()), -1, 1);
  for (int64_t row = 0; row < kTokens * heads; ++row) {
    std::copy_n(v.begin() + row * dim, dim, both.begin() + 2 * row * dim);
    std::copy_n(k.begin() + row * dim, dim, both.begin() + (2 * row + 1) * dim);
  }

  const fw::SeqLayout layout({0, kTokens});
  fw::Arena arena, contexts;
  const fw::Exec<float> exec{fw::host_ops<float>(), fw::host_device(), arena, contexts};
  constexpr double least = 0.25;
  const auto solved = [&](int64_t steps) {
    const fw::MesaShape shape{heads, dim, dim, least, steps, 1e-6};
    return median_us_token(repeats, [&] {
      exec.mesa_solve(shape, of(q), of(k), of(beta), of(g), lambda.data(), fw::PassLayout(layout), nullptr, of(x));
    });
  };
  const double gradients_30 = solved(30), exact = solved(0);

  fw::Recurrences<float> recurrences(fw::host_device());
  const fw::Recurrence<float>& scan =
      recurrences.of({fw::MesaSpec::rule(), heads, heads, dim, 2 * dim, FW_FORM_AUTO, 1.0}, layout);
  fw::RecurrenceInputs<float> in, d;
  in.q = of(x), in.k = of(k), in.v = of(both), in.write_gate = of(beta), in.g = of(g);
  Values dq(q.size()), dk(q.size()), dv(both.size()), dbeta(beta.size()), dg(g.size());
  d.q = of(dq), d.k = of(dk), d.v = of(dv), d.write_gate = of(dbeta), d.g = of(dg);
  std::byte* saved =
      scan.saved_bytes() > 0 ? arena.alloc<std::byte>(static_cast<int64_t>(scan.saved_bytes())) : nullptr;
  const double forward = median_us_token(repeats, [&] { scan.forward(in, of(out), nullptr, nullptr, saved, arena); });
  const double backward = median_us_token(repeats, [&] {
    scan.backward(in, of(d_out), d, saved, arena);
    scan.backward(in, of(d_out), d, nullptr, arena);  // that of y has nothing saved
  });
  const double plain = median_us_token(std::min(repeats, 3), [&] {
    plain_loop(heads, dim, q, k, v, beta, g, std::log(2.0F) + static_cast<float>(least), o);
  });
  fmt::print(
      "{{\"heads\": {}, \"dim\": {}, \"threads\": {}, \"solve_exact_us\": {:.2f}, \"solve_30_steps_us\": {:.2f}, "
      "\"scan_forward_us\": {:.2f}, "
      "\"scan_backward_us\": {:.2f}, \"plain_loop_forward_us\": {:.2f}}}\n",
      heads, dim, threads, exact, gradients_30, forward, backward, plain);
  return 0;
}
