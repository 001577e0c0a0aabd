// Mamba-3's recurrence (docs/rules/mamba3.md) on this machine's processor in float32: microseconds of processor time a
// token, medians, forward and backward, of one sequence. Beside it the rule mamba2 over as many rows, which is the scan
// inside, and a plain loop over tokens as the paper has it.
//
//   mamba3_cpu_bench [THREADS] [REPEATS] [HEADS] [STATE] [HEAD_DIM]
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <vector>

#include "base/random.h"
#include "base/threads.h"
#include "cpu_times.h"
#include "nn/mamba3_scan.h"

namespace {

constexpr int64_t kTokens = 1024;
using Values = std::vector<float>;

template <class Call>
double median_us_token(int repeats, const Call& call) {
  return fw::bench::median_us_token(fw::bench::processor_us, repeats, kTokens, call);
}

// S = a S + (1 - lam) dt a sum_j k'^j v'^jT + lam dt sum_j k^j v^jT, y^i = S^T q^i, of rows that are turned already;
// heads on the threads.
void plain_loop(const fw::Mamba3Shape& shape, const Values& q, const Values& k, const Values& v, const Values& dt,
                const Values& trap, const Values& g, Values& y) {
  const int64_t H = shape.heads, N = shape.state, P = shape.head_dim, R = shape.rank;
  fw::parallel_for(H, [&](int64_t h) {
    Values s(static_cast<size_t>(N * P));
    for (int64_t t = 0; t < kTokens; ++t) {
      const auto at = static_cast<size_t>(t * H + h);
      const float lam = 1 / (1 + std::exp(-trap[at])), keep = std::exp(g[at]), before = (1 - lam) * dt[at] * keep,
                  now = lam * dt[at];
      for (float& x : s) x *= keep;
      for (int64_t r = 0; r < R; ++r) {
        const int64_t row = (t * R + r) * H + h, last = row - R * H;
        for (int64_t n = 0; n < N; ++n) {
          for (int64_t p = 0; t > 0 && p < P; ++p) s[n * P + p] += before * k[last * N + n] * v[last * P + p];
          for (int64_t p = 0; p < P; ++p) s[n * P + p] += now * k[row * N + n] * v[row * P + p];
        }
      }
      for (int64_t r = 0; r < R; ++r) {
        const int64_t row = (t * R + r) * H + h;
        std::fill_n(y.begin() + row * P, P, 0.0F);
        for (int64_t n = 0; n < N; ++n) {
          for (int64_t p = 0; p < P; ++p) y[row * P + p] += q[row * N + n] * s[n * P + p];
        }
      }
    }
  });
}

}  // namespace

int main(int argc, char** argv) {
  const auto argument = [&](int i, int standard) { return argc > i ? std::atoi(argv[i]) : standard; };
  const int threads = argument(1, 1), repeats = argument(2, 5);
  const int64_t heads = argument(3, 16), state = argument(4, 128), head_dim = argument(5, 64);
  fw::set_num_threads(threads);
  fw::Random random(1);
  const auto numbers = [&](int64_t n, double low, double high) {
    Values x(static_cast<size_t>(n));
    for (float& value : x) value = static_cast<float>(low + (high - low) * random.uniform());
    return x;
  };
  const fw::SeqLayout layout({0, kTokens});
  for (const int64_t rank : {1, 4}) {
    const fw::Mamba3Shape shape{heads, 1, state, head_dim, rank, state / 4, rank > 1};
    const int64_t keys = heads * state, values = heads * head_dim;
    Values q = numbers(kTokens * rank * state, -1, 1), k = q, v = numbers(kTokens * rank * values, -1, 1),
           dt = numbers(kTokens * heads, 0.001, 0.1);
    Values trap = numbers(kTokens * heads, -2, 2), g = numbers(kTokens * heads, -0.1, 0),
           angle = numbers(kTokens * shape.angles, -1, 1);
    Values bias = numbers(heads * rank * state, 0.5, 1.5), o(v.size()),
           d_o = numbers(static_cast<int64_t>(v.size()), -1, 1);
    Values dq(q.size()), dk(q.size()), dv(v.size()), ddt(dt.size()), dtrap(dt.size()), dg(dt.size()),
        dangle(angle.size()), dbias(bias.size());
    const auto of = [&](Values& x, int64_t rows = kTokens) {
      return fw::Mat<float>(x.data(), rows, static_cast<int64_t>(x.size()) / rows);
    };
    fw::Arena arena, contexts;
    const fw::Exec<float> exec{fw::host_ops<float>(), fw::host_device(), arena, contexts};
    fw::Recurrences<float> recurrences(fw::host_device());
    const fw::Mamba3Scan<float> scan(shape);
    const fw::Mamba3Inputs<float> in{of(q), of(k), of(v, kTokens * rank), of(dt), of(trap), of(g), of(angle)};
    const fw::Mamba3Inputs<float> d{of(dq), of(dk), of(dv, kTokens * rank), of(ddt), of(dtrap), of(dg), of(dangle)};
    fw::Mamba3Scan<float>::Context context;
    const fw::Mamba3Parameters<const float> parameters{bias.data(), bias.data(), nullptr};
    const auto forward = [&](bool keep) {
      scan.forward(exec, recurrences, fw::PassLayout(layout), FW_FORM_AUTO, in, parameters, {}, keep, context,
                   of(o, kTokens * rank));
    };
    const auto passing = [&](const auto& call) {
      const fw::Arena::Mark mark = arena.mark();
      call();
      arena.rewind(mark);
    };
    const double reading = median_us_token(repeats, [&] { passing([&] { forward(false); }); });
    const double keeping = median_us_token(repeats, [&] { passing([&] { forward(true); }); });
    forward(true);
    const double backward = median_us_token(repeats, [&] {
      passing([&] {
        scan.backward(exec, recurrences, fw::PassLayout(layout), FW_FORM_AUTO, in, parameters, context,
                      of(d_o, kTokens * rank), nullptr, d, {dbias.data(), dbias.data(), nullptr}, {});
      });
    });
    const fw::Recurrence<float>& inside = recurrences.of(scan.recurrence(FW_FORM_AUTO), layout);
    const double inside_forward = median_us_token(
        repeats, [&] { inside.forward(context.rows, of(o, kTokens * rank), nullptr, nullptr, context.saved, arena); });
    fw::RecurrenceInputs<float> rows;
    Values rotated_dq(static_cast<size_t>(kTokens * rank * keys)), rotated_dk(rotated_dq.size()),
        dgate(static_cast<size_t>(kTokens * rank * heads)), drow_g(dgate.size());
    rows.q = of(rotated_dq, kTokens * rank), rows.k = of(rotated_dk, kTokens * rank), rows.v = d.v,
    rows.write_gate = of(dgate, kTokens * rank);
    rows.g = of(drow_g, kTokens * rank);
    const double inside_backward = median_us_token(
        repeats, [&] { inside.backward(context.rows, of(d_o, kTokens * rank), rows, context.saved, arena); });
    Values rotated_q(rotated_dq.size()), rotated_k(rotated_dq.size());
    for (int64_t t = 0; t < kTokens * rank; ++t) {
      std::copy_n(context.rows.q.row(t), keys, rotated_q.begin() + t * keys);
      std::copy_n(context.rows.k.row(t), keys, rotated_k.begin() + t * keys);
    }
    const double plain =
        median_us_token(std::min(repeats, 3), [&] { plain_loop(shape, rotated_q, rotated_k, v, dt, trap, g, o); });
    fmt::print(
        "{{\"rank\": {}, \"heads\": {}, \"state\": {}, \"head_dim\": {}, \"threads\": {}, \"forward_us\": {:.2f}, "
        "\"forward_kept_us\": {:.2f}, "
        "\"backward_us\": {:.2f}, "
        "\"mamba2_forward_us\": {:.2f}, \"mamba2_backward_us\": {:.2f}, \"plain_loop_forward_us\": {:.2f}}}\n",
        rank, heads, state, head_dim, threads, reading, keeping, backward, inside_forward, inside_backward, plain);
  }
  return 0;
}
