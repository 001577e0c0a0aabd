// The selective scans (docs/rules/mamba.md) on this machine's processor in float32: microseconds a token, medians,
// forward and backward, of one sequence, 16 states a channel. Beside Mamba's a plain loop over tokens, rows and
// channels as a C++ compiler makes it.
//
//   selective_scan_cpu_bench [THREADS] [REPEATS] [CHANNELS]
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <vector>

#include "base/random.h"
#include "base/threads.h"
#include "cpu_times.h"
#include "ops/exec.h"

namespace {

constexpr int64_t kTokens = 1024, kStates = 16;

template <class Call>
double median_us_token(int repeats, const Call& call) {
  return fw::bench::median_us_token(fw::bench::wall_us, repeats, kTokens, call);
}

// Forward of Mamba's law as it is written down, blocks of channels on the threads.
void plain_loop(fw::Mat<const float> u, fw::Mat<const float> step, fw::Mat<const float> q, fw::Mat<const float> k,
                const float* rates, fw::Mat<float> y) {
  constexpr int64_t kBlock = 128;
  fw::parallel_for((u.cols + kBlock - 1) / kBlock, [&](int64_t block) {
    const int64_t first = block * kBlock, width = std::min(kBlock, u.cols - first);
    std::vector<float> s(static_cast<size_t>(kStates * kBlock));
    for (int64_t t = 0; t < u.rows; ++t) {
      float* out = y.row(t) + first;
      std::fill_n(out, width, 0.0F);
      for (int64_t n = 0; n < kStates; ++n) {
        float* row = s.data() + n * kBlock;
        const float key = k.row(t)[n], query = q.row(t)[n];
        for (int64_t c = 0; c < width; ++c) {
          row[c] = std::exp(step.row(t)[first + c] * rates[n * u.cols + first + c]) * row[c] +
                   key * step.row(t)[first + c] * u.row(t)[first + c];
          out[c] += query * row[c];
        }
      }
    }
  });
}

}  // namespace

int main(int argc, char** argv) {
  const int threads = argc > 1 ? std::atoi(argv[1]) : 2, repeats = argc > 2 ? std::atoi(argv[2]) : 9;
  const int64_t channels = argc > 3 ? std::atoi(argv[3]) : 4096;
  fw::set_num_threads(threads);
  fw::Random random(1);
  const auto numbers = [&](int64_t n, double low, double high) {
    std::vector<float> x(static_cast<size_t>(n));
    for (float& value : x) value = static_cast<float>(low + (high - low) * random.uniform());
    return x;
  };
  std::vector<float> u = numbers(kTokens * channels, -1, 1), step = numbers(kTokens * channels, 0.001, 0.1),
                     dy = numbers(kTokens * channels, -1, 1);
  std::vector<float> y(u.size()), du(u.size()), dstep(u.size()), q = numbers(kTokens * kStates, -1, 1),
                                                                 k = numbers(kTokens * kStates, -1, 1);
  std::vector<float> dq(q.size()), dk(k.size()), a_log(static_cast<size_t>(channels * kStates)), da(a_log.size()),
      rates(a_log.size());
  std::vector<float> skip(static_cast<size_t>(channels), 1.0F), dskip(skip.size());
  for (int64_t c = 0; c < channels; ++c) {
    for (int64_t n = 0; n < kStates; ++n) {
      a_log[static_cast<size_t>(c * kStates + n)] = std::log(static_cast<float>(n + 1));
      rates[static_cast<size_t>(n * channels + c)] = -static_cast<float>(n + 1);
    }
  }
  std::vector<float> checkpoints(static_cast<size_t>(fw::chunk_checkpoints(kTokens, 1) * kStates * channels));
  const auto wide = [&](std::vector<float>& x) { return fw::Mat<float>(x.data(), kTokens, channels); };
  const auto narrow = [&](std::vector<float>& x) { return fw::Mat<float>(x.data(), kTokens, kStates); };
  fw::Arena arena, contexts;
  const fw::Exec<float> exec{fw::host_ops<float>(), fw::host_device(), arena, contexts};
  const fw::SeqLayout layout({0, kTokens});
  const fw::PassLayout pass(layout);
  for (const fw::ScanLaw law : {fw::ScanLaw::kMamba, fw::ScanLaw::kLonghorn}) {
    const bool mamba = law == fw::ScanLaw::kMamba;
    const float* logs = mamba ? a_log.data() : nullptr;
    const auto forward = [&](float* keep) {
      exec.selective_scan_forward(law, wide(u), wide(step), narrow(q), narrow(k), logs, skip.data(), pass, nullptr,
                                  nullptr, keep, wide(y));
    };
    const double reading = median_us_token(repeats, [&] { forward(nullptr); }),
                 keeping = median_us_token(repeats, [&] { forward(checkpoints.data()); });
    const double backward = median_us_token(repeats, [&] {
      exec.selective_scan_backward(law, wide(dy), wide(u), wide(step), narrow(q), narrow(k), logs, skip.data(), pass,
                                   checkpoints.data(), nullptr, wide(du), wide(dstep), narrow(dq), narrow(dk),
                                   mamba ? da.data() : nullptr, dskip.data(), nullptr);
    });
    fmt::print(
        "{{\"law\": \"{}\", \"channels\": {}, \"states\": {}, \"threads\": {}, \"forward_us\": {:.3f}, "
        "\"forward_kept_us\": {:.3f}, \"backward_us\": {:.3f}",
        mamba ? "mamba" : "longhorn_diag", channels, kStates, threads, reading, keeping, backward);
    if (mamba) {
      const double plain = median_us_token(
          std::min(repeats, 3), [&] { plain_loop(wide(u), wide(step), narrow(q), narrow(k), rates.data(), wide(y)); });
      fmt::print(", \"plain_loop_forward_us\": {:.3f}", plain);
    }
    fmt::print("}}\n");
  }
  return 0;
}
