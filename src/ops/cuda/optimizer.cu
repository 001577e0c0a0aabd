// The optimiser on the device, over the pieces of all parameters in their flat buffers: the sum of squares of the
// gradients in double, and AdamW. A block has a piece. A piece's sum has the order of its threads, the sum of the
// pieces that of the pieces: both of the shape alone. AdamW takes values whole or split and moments in float or bf16:
// 28, 28, 24 or 20 bytes a parameter.
#include "gpu/launch.h"
#include "ops/cuda/operations.h"
#include "ops/cuda/packets.cuh"
#include "ops/cuda/scratch.h"
#include "ops/split_value.h"
#include "ops/stochastic_rounding.h"

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

// body(i), a template of N: kN numbers at a multiple of kN, or one; the piece's numbers before and after those are
// taken alone.
template <int kN, class Body>
FW_DEVICE void for_piece(const ParamPiece& piece, const Body& body) {
  const int64_t begin = piece.begin, end = begin + piece.count, thread = thread_index();
  const int64_t first = min(end, (begin + kN - 1) / kN * kN), last = max(first, end / kN * kN);
  if (begin + thread < first) body.template operator()<1>(begin + thread);
  for (int64_t i = first + thread * kN; i < last; i += int64_t{kThreads} * kN) body.template operator()<kN>(i);
  if (last + thread < end) body.template operator()<1>(last + thread);
}

template <class X>
__global__ void __launch_bounds__(kThreads) piece_squares_kernel(const X* x, const ParamPiece* pieces, double* sums) {
  double sum = 0;
  for_piece<kPacket<X>>(pieces[block_index_x()], [&]<int N>(int64_t i) {
    Packet<X, N> packet;
    packet.load(x + i);
    float v[N];
    packet.get(v);
    FW_UNROLL for (int k = 0; k < N; ++k) sum += static_cast<double>(v[k]) * static_cast<double>(v[k]);
  });
  sum = block_sum(sum, reinterpret_cast<double*>(shared_memory()));
  if (thread_index() == 0) sums[block_index_x()] = sum;
}

// One block; a thread has neighbouring pieces.
__global__ void __launch_bounds__(kThreads) add_squares_kernel(const double* sums, int64_t count, double* to) {
  const int64_t each = (count + kThreads - 1) / kThreads, begin = min(count, each * thread_index()),
                end = min(count, begin + each);
  double sum = 0;
  for (int64_t i = begin; i < end; ++i) sum += sums[i];
  sum = block_sum(sum, reinterpret_cast<double*>(shared_memory()));
  if (thread_index() == 0) *to = sum;
}

// Numbers of 16 bits at a multiple of N of them.
template <int N>
FW_DEVICE void load_u16(const void* from, int64_t i, uint32_t (&x)[N]) {
  Packet<Bf16, N> packet;
  packet.load(static_cast<const Bf16*>(from) + i);
  packet.get_u16(x);
}
template <int N>
FW_DEVICE void store_u16(void* to, int64_t i, const uint32_t (&x)[N]) {
  Packet<Bf16, N> packet;
  packet.set_u16(x);
  packet.store(static_cast<Bf16*>(to) + i);
}

// The words of elements i to i + N of the update, i + first a multiple of 4 unless N is 1.
template <int N>
FW_DEVICE void load_random(const AdamWStep<float>& s, int64_t i, uint32_t (&x)[N]) {
  const uint64_t index = s.first + static_cast<uint64_t>(i);
  if constexpr (N == 1) {
    const RandomWords words = random_words(index / 4, s.update, s.seed);
    const int which = static_cast<int>(index % 4);
    x[0] = which == 0 ? words.x[0] : which == 1 ? words.x[1] : which == 2 ? words.x[2] : words.x[3];
  } else {
    FW_UNROLL for (int j = 0; j < N; j += 4) {
      const RandomWords words = random_words((index + j) / 4, s.update, s.seed);
      FW_UNROLL for (int k = 0; k < 4; ++k) x[j + k] = words.x[k];
    }
  }
}

// Multiplications and additions are fused where the host fuses them (cpu/adamw.cpp), and nowhere else: the bits are the
// same.
template <bool kSplit, bool kNarrow>
__global__ void __launch_bounds__(kThreads)
    adamw_kernel(const AdamWStep<float> s, const ParamPiece* pieces, const float* grads,
                 const ParamValues<float> values, const MomentValues<float> moments) {
  const ParamPiece piece = pieces[block_index_x()];
  const float decay = piece.decay != 0 ? s.decay : 0.0f;
  for_piece<kSplit || kNarrow ? 8 : 4>(piece, [&]<int N>(int64_t i) {
    float grad[N], value[N], first[N], second[N];
    load_floats(grads + i, grad);
    if constexpr (kSplit) {
      uint32_t rounded[N], low[N];
      load_u16(values.rounded, i, rounded);
      load_u16(values.low, i, low);
      FW_UNROLL for (int k = 0; k < N; ++k) value[k] =
          bits_float(join_value({static_cast<uint16_t>(rounded[k]), static_cast<uint16_t>(low[k])}));
    } else {
      load_floats(values.values + i, value);
    }
    if constexpr (kNarrow) {
      uint32_t m[N], v[N];
      load_u16(moments.first_bf16, i, m);
      load_u16(moments.second_bf16, i, v);
      FW_UNROLL for (int k = 0; k < N; ++k) first[k] = bits_float(m[k] << 16), second[k] = bits_float(v[k] << 16);
    } else {
      load_floats(moments.first + i, first);
      load_floats(moments.second + i, second);
    }
    FW_UNROLL for (int k = 0; k < N; ++k) {
      const float g = grad[k] * s.grad_scale;
      first[k] = fmaf(s.one_minus_beta1, g, s.beta1 * first[k]);
      second[k] = fmaf(s.one_minus_beta2 * g, g, s.beta2 * second[k]);
      const float root = fmaf(sqrtf(second[k]), s.inv_sqrt_debias2, s.eps);
      value[k] -= fmaf(decay, value[k], s.step * first[k] / root);
    }
    if constexpr (kNarrow) {
      uint32_t random[N], m[N], v[N];
      load_random(s, i, random);
      FW_UNROLL for (int k = 0; k < N; ++k) {
        m[k] = round_stochastically(float_bits(first[k]), random[k]);
        v[k] = round_stochastically(float_bits(second[k]), random[k] >> 16);
      }
      store_u16(moments.first_bf16, i, m);
      store_u16(moments.second_bf16, i, v);
    } else {
      store_floats(moments.first + i, first);
      store_floats(moments.second + i, second);
    }
    if constexpr (kSplit) {
      uint32_t rounded[N], low[N];
      FW_UNROLL for (int k = 0; k < N; ++k) {
        const SplitValue split = split_value(float_bits(value[k]));
        rounded[k] = split.rounded;
        low[k] = split.low;
      }
      store_u16(values.rounded, i, rounded);
      store_u16(values.low, i, low);
      if (piece.numbers >= 0) {
        FW_UNROLL for (int k = 0; k < N; ++k) values.numbers[piece.numbers + i - piece.begin + k] = value[k];
      }
    } else {
      store_floats(values.values + i, value);
    }
  });
}

template <class X>
void sum_squares(Arena& arena, void* stream, const X* x, ParamPieces pieces, double* sum) {
  const Arena::Mark mark = arena.mark();
  double* sums = square_sums(arena, pieces.count);
  launch(piece_squares_kernel<X>, Dim3{static_cast<unsigned>(pieces.count)}, kThreads, kThreads * sizeof(double),
         stream, x, pieces.data, sums);
  launch(add_squares_kernel, Dim3{1}, kThreads, kThreads * sizeof(double), stream, sums, pieces.count, sum);
  arena.rewind(mark);
}

}  // namespace

namespace ops {

template <class T>
void square_sum(const Exec<T>& exec, const Wide<T>* x, ParamPieces pieces, double* sum) {
  sum_squares(exec.arena, exec.device.stream(), x, pieces, sum);
}

template <class T>
void bf16_square_sum(const Exec<T>& exec, const Bf16* x, ParamPieces pieces, double* sum) {
  sum_squares(exec.arena, exec.device.stream(), x, pieces, sum);
}

template <class T>
void adamw(const Exec<T>& exec, const AdamWStep<Wide<T>>& step, ParamPieces pieces, const Wide<T>* grads,
           ParamValues<Wide<T>> values, MomentValues<Wide<T>> moments) {
  const auto run = [&]<bool kSplit, bool kNarrow>() {
    launch(adamw_kernel<kSplit, kNarrow>, Dim3{static_cast<unsigned>(pieces.count)}, kThreads, 0, exec.device.stream(),
           step, pieces.data, grads, values, moments);
  };
  const bool narrow = moments.first == nullptr;
  if (values.values == nullptr) {
    narrow ? run.template operator()<true, true>() : run.template operator()<true, false>();
  } else {
    narrow ? run.template operator()<false, true>() : run.template operator()<false, false>();
  }
}

#define FW_INSTANTIATE(T)                                                                                        \
  template void square_sum<T>(const Exec<T>&, const float*, ParamPieces, double*);                               \
  template void bf16_square_sum<T>(const Exec<T>&, const Bf16*, ParamPieces, double*);                           \
  template void adamw<T>(const Exec<T>&, const AdamWStep<float>&, ParamPieces, const float*, ParamValues<float>, \
                         MomentValues<float>);
FW_INSTANTIATE(float)
FW_INSTANTIATE(Bf16)
#undef FW_INSTANTIATE

}  // namespace ops
}  // namespace fw::cuda
