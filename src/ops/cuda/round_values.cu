// Values rounded to bf16 as the bf16 of split values is (ops/split_value.h): a thread has four neighbours at a
// time.
#include <algorithm>

#include "gpu/launch.h"
#include "ops/cuda/operations.h"
#include "ops/cuda/packets.cuh"
#include "ops/split_value.h"

namespace fw::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kAhead = 4;  // packets of a thread that are on their way at a time

template <int N>
__global__ void __launch_bounds__(kThreads) round_kernel(const float* from, int64_t packets, Bf16* to) {
  const int64_t first = int64_t{block_index_x()} * kAhead * kThreads + thread_index();
  float x[kAhead][N];
  FW_UNROLL for (int i = 0; i < kAhead; ++i) {
    if (first + i * kThreads < packets) load_floats(from + (first + i * kThreads) * N, x[i]);
  }
  FW_UNROLL for (int i = 0; i < kAhead; ++i) {
    if (first + i * kThreads >= packets) continue;
    uint32_t rounded[N];
    FW_UNROLL for (int k = 0; k < N; ++k) rounded[k] = split_value(float_bits(x[i][k])).rounded;
    Packet<Bf16, N> out;
    out.set_u16(rounded);
    out.store(to + (first + i * kThreads) * N);
  }
}

template <int N>
void launch_round(const float* from, int64_t packets, Bf16* to, void* stream) {
  launch(round_kernel<N>, Dim3{static_cast<unsigned>((packets + kAhead * kThreads - 1) / (kAhead * kThreads))},
         kThreads, 0, stream, from, packets, to);
}

}  // namespace

namespace ops {

template <class T>
void round_values(const Exec<T>& exec, const Wide<T>* from, int64_t n, Bf16* to) {
  const bool aligned = reinterpret_cast<uintptr_t>(from) % 16 == 0 && reinterpret_cast<uintptr_t>(to) % 8 == 0;
  const int64_t whole = aligned ? n / 4 : 0;
  launch_round<4>(from, whole, to, exec.device.stream());
  launch_round<1>(from + 4 * whole, n - 4 * whole, to + 4 * whole, exec.device.stream());
}
template void round_values<float>(const Exec<float>&, const float*, int64_t, Bf16*);
template void round_values<Bf16>(const Exec<Bf16>&, const float*, int64_t, Bf16*);

}  // namespace ops
}  // namespace fw::cuda
