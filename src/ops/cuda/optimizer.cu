// The optimiser on the device, over the pieces of all parameters in their flat buffers: the sum of squares of the gradients in double, and AdamW. A
// block has a piece. A piece's sum has the order of its threads, the sum of the pieces that of the pieces: both of the shape alone.
#include "ops/cuda/operations.h"
#include "ops/cuda/packets.cuh"
#include "ops/cuda/scratch.h"
#include "scan/cuda/call/launch.h"

namespace fw::cuda {
namespace {

constexpr int kThreads = 256;

// The sum over a block's threads in all of thread 0, in pairs whose order is fixed. shared [kThreads]
FW_DEVICE double block_sum(double x, double* shared) {
  const int thread = static_cast<int>(thread_index());
  shared[thread] = x;
  sync_threads();
  for (int half = kThreads / 2; half > 0; half /= 2) {
    if (thread < half) shared[thread] += shared[thread + half];
    sync_threads();
  }
  return shared[0];
}

// body(i, n): n = 4 numbers at a multiple of 16 bytes, or one; the piece's numbers before and behind those are taken alone.
template <class Body>
FW_DEVICE void for_piece(const ParamPiece& piece, const Body& body) {
  const int64_t begin = piece.begin, end = begin + piece.count, thread = thread_index();
  const int64_t first = min(end, (begin + 3) / 4 * 4), last = max(first, end / 4 * 4);
  if (begin + thread < first) body.template operator()<1>(begin + thread);
  for (int64_t i = first + thread * 4; i < last; i += int64_t{kThreads} * 4) body.template operator()<4>(i);
  if (last + thread < end) body.template operator()<1>(last + thread);
}

__global__ void __launch_bounds__(kThreads) piece_squares_kernel(const float* x, const ParamPiece* pieces, double* sums) {
  double sum = 0;
  for_piece(pieces[block_index_x()], [&]<int N>(int64_t i) {
    float v[N];
    load_floats(x + i, v);
    FW_UNROLL for (int k = 0; k < N; ++k) sum += static_cast<double>(v[k]) * static_cast<double>(v[k]);
  });
  sum = block_sum(sum, reinterpret_cast<double*>(shared_memory()));
  if (thread_index() == 0) sums[block_index_x()] = sum;
}

// One block; a thread has neighbouring pieces.
__global__ void __launch_bounds__(kThreads) add_squares_kernel(const double* sums, int64_t count, double* to) {
  const int64_t each = (count + kThreads - 1) / kThreads, begin = min(count, each * thread_index()), end = min(count, begin + each);
  double sum = 0;
  for (int64_t i = begin; i < end; ++i) sum += sums[i];
  sum = block_sum(sum, reinterpret_cast<double*>(shared_memory()));
  if (thread_index() == 0) *to = sum;
}

template <int N>
FW_DEVICE void store_floats(float* to, const float (&x)[N]) {
  Packet<float, N> packet;
  packet.set(x);
  packet.store(to);
}

__global__ void __launch_bounds__(kThreads)
    adamw_kernel(const AdamWStep<float> s, const ParamPiece* pieces, const float* grads, float* values, float* m, float* v) {
  const ParamPiece piece = pieces[block_index_x()];
  const float decay = piece.decay != 0 ? s.decay : 0.0f;
  for_piece(piece, [&]<int N>(int64_t i) {
    float grad[N], value[N], first[N], second[N];
    load_floats(grads + i, grad);
    load_floats(values + i, value);
    load_floats(m + i, first);
    load_floats(v + i, second);
    FW_UNROLL for (int k = 0; k < N; ++k) {
      const float g = grad[k] * s.grad_scale;
      first[k] = s.one_minus_beta1 * g + s.beta1 * first[k];
      second[k] = s.one_minus_beta2 * g * g + s.beta2 * second[k];
      value[k] -= s.step * first[k] / (sqrtf(second[k]) * s.inv_sqrt_debias2 + s.eps) + decay * value[k];
    }
    store_floats(m + i, first);
    store_floats(v + i, second);
    store_floats(values + i, value);
  });
}

}  // namespace

namespace ops {

template <class T>
void square_sum(const Exec<T>& exec, const Wide<T>* x, ParamPieces pieces, double* sum) {
  const Arena::Mark mark = exec.arena.mark();
  double* sums = square_sums(exec.arena, pieces.count);
  void* stream = exec.device.stream();
  launch(piece_squares_kernel, Dim3{static_cast<unsigned>(pieces.count)}, kThreads, kThreads * sizeof(double), stream, x, pieces.data, sums);
  launch(add_squares_kernel, Dim3{1}, kThreads, kThreads * sizeof(double), stream, sums, pieces.count, sum);
  exec.arena.rewind(mark);
}

template <class T>
void adamw(const Exec<T>& exec, const AdamWStep<Wide<T>>& step, ParamPieces pieces, const Wide<T>* grads, Wide<T>* values, Wide<T>* m, Wide<T>* v) {
  launch(adamw_kernel, Dim3{static_cast<unsigned>(pieces.count)}, kThreads, 0, exec.device.stream(), step, pieces.data, grads, values, m, v);
}

#define FW_INSTANTIATE(T)                                                          \
  template void square_sum<T>(const Exec<T>&, const float*, ParamPieces, double*); \
  template void adamw<T>(const Exec<T>&, const AdamWStep<float>&, ParamPieces, const float*, float*, float*, float*);
FW_INSTANTIATE(float)
FW_INSTANTIATE(Bf16)
#undef FW_INSTANTIATE

}  // namespace ops
}  // namespace fw::cuda
