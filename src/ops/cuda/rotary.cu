// Rotary position embedding on the device. One token's sines and cosines serve all of its heads.
#include "gpu/launch.h"
#include "ops/cuda/operations.h"
#include "ops/cuda/overlap.cuh"
#include "ops/cuda/packets.cuh"
#include "ops/cuda/rotary.cuh"
#include "ops/cuda/sequences.cuh"

namespace fw::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kTokens = 4;  // of a block, or one of a decoded token's pass, where there are too few for the machine

template <class T>
struct RotaryArgs {
  T* x;
  int64_t stride, rows;
  int heads, dim, half;
  int tokens;        // of a block
  double log2_step;  // log2 of the ratio of neighbouring frequencies, < 0
  float sign;
  PassSequences sequences;
};

template <class T, int N>
__global__ void __launch_bounds__(kThreads) rotary_kernel(const RotaryArgs<T> a) {
  float2* rotations = reinterpret_cast<float2*>(shared_memory());  // [a.tokens, half]: cosine, sine
  const int64_t first = int64_t{block_index_x()} * a.tokens;
  const int tokens = static_cast<int>(min(int64_t{a.tokens}, a.rows - first)),
            thread = static_cast<int>(thread_index());
  for (int i = thread; i < tokens * a.half; i += kThreads) {
    const int token = i / a.half, c = i - token * a.half;
    const float angle = rotary_angle(rotary_share(a.log2_step, c), a.sequences.position_of(first + token));
    rotations[i] = make_float2(cosf(angle), a.sign * sinf(angle));
  }
  follow();  // positions were there before the pass
  sync_threads();
  const int packets = a.half / N, of_token = a.heads * packets;
  for (int i = thread; i < tokens * of_token; i += kThreads) {
    const int token = i / of_token, in_token = i - token * of_token, head = in_token / packets,
              c = (in_token - head * packets) * N;
    T* at = a.x + (first + token) * a.stride + int64_t{head} * a.dim + c;
    Packet<T, N> low, high;
    low.load(at);
    high.load(at + a.half);
    float x[N], y[N];
    low.get(x);
    high.get(y);
    FW_UNROLL for (int k = 0; k < N; ++k) {
      const float2 of = rotations[token * a.half + c + k];
      rotate_pair(x[k], y[k], of.x, of.y);
    }
    low.set(x);
    high.set(y);
    low.store(at);
    high.store(at + a.half);
  }
}

}  // namespace

namespace ops {

template <class T>
void rotary(const Exec<T>& exec, Mat<T> x, int64_t dim, int64_t rotated, double theta, const PassLayout& layout,
            Rotation rotation) {
  if (x.rows == 0 || rotated == 0) return;
  const int half = static_cast<int>(rotated / 2), tokens = x.rows <= kOverlappedRows ? 1 : kTokens;
  const RotaryArgs<T> args{x.data,
                           x.stride,
                           x.rows,
                           static_cast<int>(x.cols / dim),
                           static_cast<int>(dim),
                           half,
                           tokens,
                           rotary_log2_step(theta, rotated),
                           rotation == Rotation::kForward ? 1.0F : -1.0F,
                           PassSequences(layout)};
  const Dim3 grid{static_cast<unsigned>((x.rows + tokens - 1) / tokens)};
  const size_t shared = sizeof(float2) * static_cast<size_t>(tokens * half);
  if (half % kPacket<T> == 0 && dim % kPacket<T> == 0 && in_packets<T>(x.data, x.stride)) {
    launch_following(x.rows, rotary_kernel<T, kPacket<T>>, grid, kThreads, shared, exec.device.stream(), args);
  } else {
    launch_following(x.rows, rotary_kernel<T, 1>, grid, kThreads, shared, exec.device.stream(), args);
  }
}

template void rotary<float>(const Exec<float>&, Mat<float>, int64_t, int64_t, double, const PassLayout&, Rotation);
template void rotary<Bf16>(const Exec<Bf16>&, Mat<Bf16>, int64_t, int64_t, double, const PassLayout&, Rotation);

}  // namespace ops
}  // namespace fw::cuda
