// Times of the elementwise operations of src/ops/cuda in bf16, one JSON line each: milliseconds, the bytes that must move (each tensor once), and
// their rate as a share of a copy's on the same device in the same run.
//
//   elementwise_bench [tokens width conv_channels]
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <vector>

#include "base/buffer.h"
#include "ops/backend.h"
#include "scan/cuda/call/launch.h"

namespace {

using namespace fw;

// Median of 20 calls on the device's stream, after 5 that do not count.
double median_ms(const Device& device, const std::function<void()>& call) {
  const auto stream = static_cast<cudaStream_t>(device.stream());
  cudaEvent_t begin, end;
  cuda::check(cudaEventCreate(&begin), "event");
  cuda::check(cudaEventCreate(&end), "event");
  std::vector<float> times;
  for (int i = 0; i < 25; ++i) {
    cuda::check(cudaEventRecord(begin, stream), "event");
    call();
    cuda::check(cudaEventRecord(end, stream), "event");
    cuda::check(cudaEventSynchronize(end), "a kernel");
    float ms = 0;
    cuda::check(cudaEventElapsedTime(&ms, begin, end), "event");
    if (i >= 5) times.push_back(ms);
  }
  cuda::check(cudaEventDestroy(begin), "event");
  cuda::check(cudaEventDestroy(end), "event");
  std::sort(times.begin(), times.end());
  return static_cast<double>(times[times.size() / 2]);
}

void time_all(int64_t tokens, int64_t width, int64_t channels) {
  Device& device = cuda_device();
  Arena arena(device), contexts;
  const Exec<Bf16> exec{table_of<Bf16>(device), device, arena, contexts};
  // Bits of small numbers: times do not depend on them, but zeros could be told apart by the memory.
  const auto tensor = [&](int64_t rows, int64_t cols) {
    Buffer<Bf16> memory(device, rows * cols);
    std::vector<Bf16> values(static_cast<size_t>(rows * cols));
    uint32_t seed = 1;
    for (Bf16& x : values) {
      seed = seed * 1664525u + 1013904223u;
      x.bits = static_cast<uint16_t>(0x3f00u | seed >> 25 | (seed >> 9 & 0x8000u));
    }
    memory.write(0, values);
    return memory;
  };
  double copy_rate = 0;  // GB/s
  const auto report = [&](const char* name, double bytes, const std::function<void()>& call) {
    const double ms = median_ms(device, call), rate = bytes / ms * 1e-6;
    if (copy_rate == 0) copy_rate = rate;
    std::printf("{\"operation\": \"%s\", \"ms\": %.4f, \"MB\": %.1f, \"GB_s\": %.0f, \"of_copy\": %.3f}\n", name, ms, bytes * 1e-6, rate, rate / copy_rate);
    std::fflush(stdout);
  };

  const double u = 2.0 * static_cast<double>(tokens * width), c = 2.0 * static_cast<double>(tokens * channels);
  {
    Buffer<Bf16> from = tensor(tokens, channels), to(device, tokens * channels);
    report("copy", 2 * c, [&] { device.copy(to.data(), from.data(), static_cast<size_t>(c)); });
  }
  {
    Buffer<Bf16> x = tensor(tokens, width), delta = tensor(tokens, width), y = tensor(tokens, width);
    Buffer<float> weight(device, width), rstd(device, tokens), dweight(device, width);
    const auto mat = [&](Buffer<Bf16>& b) { return Mat<Bf16>(b.data(), tokens, width); };
    report("rmsnorm_forward", 2 * u, [&] { exec.rmsnorm_forward(mat(x), weight.data(), 1e-6F, mat(y), rstd.data()); });
    report("add_rmsnorm_forward", 4 * u, [&] { exec.add_rmsnorm_forward(mat(x), mat(delta), weight.data(), 1e-6F, mat(y), rstd.data()); });
    report("rmsnorm_backward", 3 * u,
           [&] { exec.rmsnorm_backward(mat(delta), mat(x), weight.data(), rstd.data(), mat(y), dweight.data(), Write::kOverwrite); });
    report("rmsnorm_backward accumulating", 4 * u,
           [&] { exec.rmsnorm_backward(mat(delta), mat(x), weight.data(), rstd.data(), mat(y), dweight.data(), Write::kAccumulate); });
  }
  constexpr int64_t kWidth = 4, kSequences = 8;
  const SeqLayout layout = SeqLayout::uniform(kSequences, tokens / kSequences);
  Buffer<int64_t> offsets(device, kSequences + 1);
  offsets.write(0, layout.offsets());
  const PassLayout pass(layout, offsets.data(), nullptr);
  Buffer<Bf16> x = tensor(tokens, channels), dy = tensor(tokens, channels), y = tensor(tokens, channels);
  Buffer<float> weight(device, channels * kWidth), dweight(device, channels * kWidth);
  const auto mat = [&](Buffer<Bf16>& b) { return Mat<Bf16>(b.data(), tokens, channels); };
  report("short_conv_forward", 2 * c, [&] { exec.short_conv_forward(mat(x), weight.data(), nullptr, kWidth, pass, nullptr, nullptr, mat(y)); });
  report("short_conv_backward", 3 * c,
         [&] { exec.short_conv_backward(mat(dy), mat(x), weight.data(), nullptr, kWidth, pass, nullptr, mat(y), dweight.data(), nullptr); });
}

}  // namespace

int main(int argc, char** argv) {
  const auto number = [&](int i, int64_t usual) { return argc > i ? std::atoll(argv[i]) : usual; };
  time_all(number(1, 16384), number(2, 2048), number(3, 6144));
  return 0;
}
