// Query and key heads of a decoded token, normed and rotated in place in one kernel (ops.def). It has the bits of the
// two norms and the rotation, which alone are three kernels of a few rows each. As many neighbouring lanes as a head
// has packets have the head in registers. The lanes that hold a pair of channels exchange them.
//   normed_rotary_kernel   grid: heads / heads of a block, tokens
#include <bit>

#include "ops/cuda/math.cuh"
#include "ops/cuda/operations.h"
#include "ops/cuda/overlap.cuh"
#include "ops/cuda/packets.cuh"
#include "ops/cuda/rotary.cuh"
#include "ops/cuda/sequences.cuh"

namespace fw::cuda {
namespace {

constexpr int kThreads = 256, kPacketSize = 8;

struct NormedRotaryArgs {
  Mat<Bf16> q, k;
  int q_heads, heads, dim;  // heads: of both
  int lanes;                // of a head: a power of two, at most a warp's
  int half;                 // channels that rotate with as many others; 0: none
  const float *q_norm, *k_norm;
  float eps;
  double log2_step;
  PassSequences sequences;
};

__global__ void __launch_bounds__(kThreads) normed_rotary_kernel(const NormedRotaryArgs a) {
  float2* const rotations = reinterpret_cast<float2*>(shared_memory());  // [half]: cosine, sine
  const int thread = static_cast<int>(thread_index()), slots = kThreads / a.lanes, lane = thread % a.lanes;
  const int64_t token = block_index_y();
  const int head = static_cast<int>(block_index_x()) * slots + thread / a.lanes, c = lane * kPacketSize;
  const bool is_key = head >= a.q_heads, has_columns = head < a.heads && c < a.dim;
  float weight[kPacketSize] = {};
  if (has_columns) load_floats((is_key ? a.k_norm : a.q_norm) + c, weight);
  for (int i = thread; i < a.half; i += kThreads) {
    const float angle = rotary_angle(rotary_share(a.log2_step, i), a.sequences.position_of(token));
    rotations[i] = make_float2(cosf(angle), sinf(angle));
  }
  follow();
  sync_threads();
  const Mat<Bf16>& of = is_key ? a.k : a.q;
  Bf16* const at = of.data + token * of.stride + int64_t{is_key ? head - a.q_heads : head} * a.dim + c;
  Packet<Bf16, kPacketSize> packet = {};
  if (has_columns) packet.load(at);
  float v[kPacketSize], squares = 0;
  packet.get(v);
  FW_UNROLL for (int k = 0; k < kPacketSize; ++k) squares += v[k] * v[k];
  for (int mask = a.lanes / 2; mask > 0; mask /= 2) squares += shuffle_xor(squares, mask);
  const float rstd = 1.0f / sqrtf(squares / static_cast<float>(a.dim) + a.eps);
  FW_UNROLL for (int k = 0; k < kPacketSize; ++k) v[k] = v[k] * rstd * weight[k];
  packet.set(v);
  packet.get(v);  // rounded, as the norm leaves it
  // Channel c of the first half with c + half.
  const int apart = a.half / kPacketSize;
  const bool first = lane < apart, rotates = lane < 2 * apart;
  const int other = static_cast<int>(lane_index()) + (!rotates ? 0 : first ? apart : -apart);
  FW_UNROLL for (int k = 0; k < kPacketSize; ++k) {
    const float theirs = shuffle(v[k], other);
    if (!rotates) continue;
    const float2 by = rotations[first ? c + k : c + k - a.half];
    float x = first ? v[k] : theirs, y = first ? theirs : v[k];
    rotate_pair(x, y, by.x, by.y);
    v[k] = first ? x : y;
  }
  packet.set(v);
  if (has_columns) packet.store(at);
}

}  // namespace

namespace ops {

template <>
bool normed_rotary(const Exec<Bf16>& exec, Mat<Bf16> q, Mat<Bf16> k, const float* q_norm, const float* k_norm,
                   float eps, const AttentionShape& shape, const PassLayout& layout) {
  const int64_t half = shape.turns() ? shape.rotated / 2 : 0;
  if (shape.dim % kPacketSize != 0 || shape.dim > 32 * kPacketSize || half % kPacketSize != 0 ||
      q.rows > kOverlappedRows || !in_packets<Bf16>(q.data, q.stride) || !in_packets<Bf16>(k.data, k.stride) ||
      !in_packets<float>(q_norm, 0) || !in_packets<float>(k_norm, 0))
    return false;
  if (q.rows == 0) return true;
  const int lanes = static_cast<int>(std::bit_ceil(static_cast<uint64_t>(shape.dim / kPacketSize)));
  const int64_t slots = kThreads / lanes, heads = shape.heads + shape.kv_heads;
  const NormedRotaryArgs args{q,
                              k,
                              static_cast<int>(shape.heads),
                              static_cast<int>(heads),
                              static_cast<int>(shape.dim),
                              lanes,
                              static_cast<int>(half),
                              q_norm,
                              k_norm,
                              eps,
                              half > 0 ? rotary_log2_step(shape.theta, shape.rotated) : 0.0,
                              PassSequences(layout)};
  launch_following(q.rows, normed_rotary_kernel,
                   Dim3{static_cast<unsigned>((heads + slots - 1) / slots), static_cast<unsigned>(q.rows)}, kThreads,
                   sizeof(float2) * static_cast<size_t>(half), exec.device.stream(), args);
  return true;
}

}  // namespace ops
}  // namespace fw::cuda
