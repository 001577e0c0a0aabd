// Softmax attention on this machine's processor, forward and forward with backward: medians in milliseconds of float32,
// one sequence, 8 heads of 64, T = 2048, causal and with a window of 512. bench/peers/attention_cpu.py times PyTorch on
// the same shapes.
//
//   attention_cpu_bench [THREADS] [REPEATS]
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdlib>
#include <vector>

#include "base/random.h"
#include "base/threads.h"
#include "ops/exec.h"

namespace {

constexpr int64_t kTokens = 2048, kHeads = 8, kDim = 64, kWidth = kHeads * kDim;

template <class Call>
double median_ms(int repeats, const Call& call) {
  std::vector<double> times;
  call();
  for (int i = 0; i < repeats; ++i) {
    const auto begin = std::chrono::steady_clock::now();
    call();
    times.push_back(std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - begin).count());
  }
  std::sort(times.begin(), times.end());
  return times[times.size() / 2];
}

}  // namespace

int main(int argc, char** argv) {
  const int threads = argc > 1 ? std::atoi(argv[1]) : 2, repeats = argc > 2 ? std::atoi(argv[2]) : 15;
  fw::set_num_threads(threads);
  fw::Random random(1);
  std::vector<std::vector<float>> memory(9, std::vector<float>(static_cast<size_t>(kTokens * kWidth)));
  for (std::vector<float>& m : memory)
    std::generate(m.begin(), m.end(), [&] { return static_cast<float>(random.normal()); });
  const auto mat = [&](size_t i, int64_t cols = kWidth) { return fw::Mat<float>{memory[i].data(), kTokens, cols}; };
  fw::Arena arena, contexts;
  const fw::Exec<float> exec{fw::host_ops<float>(), fw::host_device(), arena, contexts};
  const fw::SeqLayout layout({0, kTokens});
  for (const int64_t window : {int64_t{0}, int64_t{512}}) {
    const fw::AttentionShape shape{kHeads, kHeads, kDim, window, 1 / std::sqrt(static_cast<double>(kDim))};
    const auto forward = [&] {
      exec.attention_forward(mat(0), mat(1), mat(2), shape, layout, fw::Pages<float>{}, fw::Pages<float>{}, mat(3),
                             mat(4, kHeads));
    };
    const auto both = [&] {
      forward();
      exec.attention_backward(mat(5), mat(0), mat(1), mat(2), shape, layout, fw::Pages<float>{}, fw::Pages<float>{},
                              mat(3), mat(4, kHeads), mat(6), mat(7), mat(8));
    };
    fmt::print("{{\"T\": {}, \"heads\": {}, \"dim\": {}, \"window\": {}, \"threads\": {}, \"forward_ms\": {:.2f}, ",
               kTokens, kHeads, kDim, window, threads, median_ms(repeats, forward));
    fmt::print("\"forward_backward_ms\": {:.2f}}}\n", median_ms(repeats, both));
  }
  return 0;
}
