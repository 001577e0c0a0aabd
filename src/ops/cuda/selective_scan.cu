// A state S [N, D] with a decay of each of its elements on the device (ops/cpu/selective_scan.cpp has the formulas). A thread has a channel, whose column
// of the state it keeps in registers, kStates rows of it (zero behind the last): neighbours read neighbouring channels, and the keys of a chunk of tokens
// lie in shared memory for all. Forward leaves a mark of the state before every chunk; backward goes through the chunks from the last, makes a chunk's
// states again from its mark, and sums dq and dk over a warp's channels by halving: 32 sums in 31 exchanges. Sums have an order of the shape alone.
#include <algorithm>

#include "ops/cuda/column_sums.h"
#include "ops/cuda/math.cuh"
#include "ops/cuda/operations.h"
#include "ops/cuda/packets.cuh"
#include "ops/cuda/scratch.h"
#include "scan/cuda/call/launch.h"

namespace fw::cuda {
namespace {

constexpr int kThreads = kScanChannels;  // channels of a block
constexpr int kWarps = kThreads / 32;
constexpr int kChunk = static_cast<int>(kScanChunk);
constexpr int kGroup = 16;  // rows of the state whose dq and dk a warp sums at once
constexpr int64_t kMostGroups = kScanGroups;

template <class T>
struct ScanArgs {
  Mat<const T> u, step, q, k;
  const float *a_log, *skip;
  const int64_t* offsets;

  // The place of the mark of a chunk's element [n, c].
  FW_DEVICE int64_t mark(int64_t sequence, int64_t chunk, int n, int64_t c) const {
    return ((offsets[sequence] / kChunk + sequence + chunk) * q.cols + n) * u.cols + c;
  }
};

template <class T>
struct ScanBackwardArgs {
  Mat<const T> dy;
  const float *marks, *ds_out;
  Mat<T> du, dstep;
  float* ds_in;
  float* of_keys;         // [blocks, T, 2 N]: dq, dk
  float* of_square;       // [blocks, T], of Longhorn
  float *of_a, *of_skip;  // [groups, D, N], of Mamba, times A; [groups, D]
  int64_t sequences, groups;
};

// The keys of a chunk, [kChunk, kStates] each with zeros behind the last row, and their squares' sums.
template <int kStates>
struct SharedKeys {
  float *q, *k, *square;
  FW_DEVICE explicit SharedKeys(float* memory) : q(memory), k(memory + kChunk * kStates), square(memory + 2 * kChunk * kStates) {}
  static constexpr int kFloats = 2 * kChunk * kStates + kChunk;

  // All threads of the block, which have read the last chunk's.
  template <class T>
  FW_DEVICE void load(const ScanArgs<T>& a, int64_t begin, int count) const {
    for (int i = static_cast<int>(thread_index()); i < count * kStates; i += kThreads) {
      const int t = i / kStates, n = i % kStates;
      const bool there = n < a.q.cols;
      q[i] = there ? number(a.q.data[(begin + t) * a.q.stride + n]) : 0.0f;
      k[i] = there ? number(a.k.data[(begin + t) * a.k.stride + n]) : 0.0f;
    }
    sync_threads();
    const int t = static_cast<int>(thread_index());
    if (t < count) {
      float sum = 0;
      for (int n = 0; n < kStates; ++n) sum += k[t * kStates + n] * k[t * kStates + n];
      square[t] = sum;
    }
    sync_threads();
  }
};

// A channel's A, times log2(e): its decays are powers of two.
template <ScanLaw law, int kStates, class T>
FW_DEVICE void load_rates(const ScanArgs<T>& a, int64_t c, bool active, float (&rate)[kStates]) {
  FW_UNROLL for (int n = 0; n < kStates; ++n) {
    rate[n] = law == ScanLaw::kMamba && active && n < a.q.cols ? -kLog2E * exp_fast(a.a_log[c * a.q.cols + n]) : 0.0f;
  }
}

template <ScanLaw law>
FW_DEVICE float write_size(float step, float square) {
  return law == ScanLaw::kMamba ? step : step / (1.0f + step * square);
}
template <ScanLaw law>
FW_DEVICE float element_decay(float e, float rate, float k) {
  return law == ScanLaw::kMamba ? exp2_fast(e * rate) : 1.0f - e * k * k;
}

template <class T, ScanLaw law, int kStates>
__global__ void __launch_bounds__(kThreads) scan_forward_kernel(const ScanArgs<T> a, const float* s_in, float* s_out, float* marks, Mat<T> y) {
  const SharedKeys<kStates> keys(reinterpret_cast<float*>(shared_memory()));
  const int64_t sequence = block_index_x(), c = int64_t{block_index_y()} * kThreads + thread_index(), D = a.u.cols;
  const int N = static_cast<int>(a.q.cols);
  const bool active = c < D;
  float s[kStates], rate[kStates];
  load_rates<law>(a, c, active, rate);
  FW_UNROLL for (int n = 0; n < kStates; ++n) s[n] = active && n < N && s_in != nullptr ? s_in[(sequence * N + n) * D + c] : 0.0f;
  const float skip = active ? a.skip[c] : 0.0f;
  const int64_t first = a.offsets[sequence], length = a.offsets[sequence + 1] - first;
  for (int64_t from = 0; from < length; from += kChunk) {
    const int count = static_cast<int>(min(int64_t{kChunk}, length - from));
    sync_threads();
    keys.load(a, first + from, count);
    if (!active) continue;
    if (marks != nullptr) {
      FW_UNROLL for (int n = 0; n < kStates; ++n) {
        if (n < N) marks[a.mark(sequence, from / kChunk, n, c)] = s[n];
      }
    }
    for (int t = 0; t < count; ++t) {
      const int64_t row = first + from + t;
      const float u = number(a.u.data[row * a.u.stride + c]), e = write_size<law>(number(a.step.data[row * a.step.stride + c]), keys.square[t]), z = e * u;
      float sum = skip * u;
      FW_UNROLL for (int n = 0; n < kStates; ++n) {
        const float k = keys.k[t * kStates + n];
        s[n] = element_decay<law>(e, rate[n], k) * s[n] + k * z;
        sum += keys.q[t * kStates + n] * s[n];
      }
      y.data[row * y.stride + c] = stored<T>(sum);
    }
  }
  if (!active || s_out == nullptr) return;
  FW_UNROLL for (int n = 0; n < kStates; ++n) {
    if (n < N) s_out[(sequence * N + n) * D + c] = s[n];
  }
}

// Lane i is left with the warp's sum of v[i].
FW_DEVICE float sums_by_halving(float (&v)[32]) {
  const int lane = static_cast<int>(lane_index());
  FW_UNROLL for (int half = 16; half > 0; half /= 2) {
    const bool upper = (lane & half) != 0;
    FW_UNROLL for (int i = 0; i < half; ++i) {
      const float kept = upper ? v[i + half] : v[i], sent = upper ? v[i] : v[i + half];
      v[i] = kept + shuffle_xor(sent, half);
    }
  }
  return v[0];
}

template <int kStates>
constexpr int kSumFloats = kWarps* kChunk*(2 * kStates + 1);  // [warps, kChunk, 2 kStates], [warps, kChunk]

template <class T, ScanLaw law, int kStates>
__global__ void __launch_bounds__(kThreads) scan_backward_kernel(const ScanArgs<T> a, const ScanBackwardArgs<T> g) {
  float* const memory = reinterpret_cast<float*>(shared_memory());
  const SharedKeys<kStates> keys(memory);
  float* const sums = memory + SharedKeys<kStates>::kFloats;
  float* const square_sums = sums + kWarps * kChunk * 2 * kStates;
  const int64_t group = block_index_x(), block = block_index_y(), c = block * kThreads + thread_index(), D = a.u.cols, tokens = a.u.rows;
  const int N = static_cast<int>(a.q.cols), warp = static_cast<int>(warp_index()), lane = static_cast<int>(lane_index());
  const bool active = c < D;
  float rate[kStates], drate[kStates] = {}, dskip = 0;
  load_rates<law>(a, c, active, rate);
  const float skip = active ? a.skip[c] : 0.0f;
  for (int64_t sequence = group * g.sequences / g.groups; sequence < (group + 1) * g.sequences / g.groups; ++sequence) {
    float ds[kStates];
    FW_UNROLL for (int n = 0; n < kStates; ++n) ds[n] = active && n < N && g.ds_out != nullptr ? g.ds_out[(sequence * N + n) * D + c] : 0.0f;
    const int64_t first = a.offsets[sequence], length = a.offsets[sequence + 1] - first;
    for (int64_t chunk = (length + kChunk - 1) / kChunk - 1; chunk >= 0; --chunk) {
      const int64_t begin = first + chunk * kChunk;
      const int count = static_cast<int>(min(int64_t{kChunk}, length - chunk * kChunk));
      sync_threads();
      keys.load(a, begin, count);
      float before[kChunk][kStates], s[kStates];
      FW_UNROLL for (int n = 0; n < kStates; ++n) s[n] = active && n < N ? g.marks[a.mark(sequence, chunk, n, c)] : 0.0f;
      const auto value = [&](const Mat<const T>& m, int t) { return active ? number(m.data[(begin + t) * m.stride + c]) : 0.0f; };
      for (int t = 0; t < count; ++t) {
        const float e = write_size<law>(value(a.step, t), keys.square[t]), z = e * value(a.u, t);
        FW_UNROLL for (int n = 0; n < kStates; ++n) {
          const float k = keys.k[t * kStates + n];
          before[t][n] = s[n];
          s[n] = element_decay<law>(e, rate[n], k) * s[n] + k * z;
        }
      }
      for (int t = count - 1; t >= 0; --t) {
        const float step = value(a.step, t), u = value(a.u, t), dy = value(g.dy, t), e = write_size<law>(step, keys.square[t]), z = e * u;
        float dz = 0, de = 0;
        FW_UNROLL for (int from = 0; from < kStates; from += kGroup) {
          float of_keys[2 * kGroup];
          FW_UNROLL for (int i = 0; i < kGroup; ++i) {
            const int n = from + i;
            const float k = keys.k[t * kStates + n], q = keys.q[t * kStates + n], old = before[t][n], decay = element_decay<law>(e, rate[n], k);
            of_keys[i] = (decay * old + k * z) * dy;
            const float grad = ds[n] + q * dy, of_decay = grad * old;
            dz += k * grad;
            of_keys[kGroup + i] = grad * z;
            if constexpr (law == ScanLaw::kMamba) {
              constexpr float kLn2 = 0.6931471805599453f;
              const float of_log = of_decay * decay;
              de += kLn2 * rate[n] * of_log;
              drate[n] += e * of_log;
            } else {
              de -= of_decay * k * k;
              of_keys[kGroup + i] -= 2.0f * of_decay * k * e;
            }
            ds[n] = grad * decay;
          }
          // [dq of the group | dk of the group]
          sums[(warp * kChunk + t) * 2 * kStates + 2 * from + lane] = sums_by_halving(of_keys);
        }
        de += u * dz;
        if constexpr (law == ScanLaw::kLonghorn) {
          float of_square = -e * e * de;
          FW_UNROLL for (int mask = 16; mask > 0; mask /= 2) of_square += shuffle_xor(of_square, mask);
          if (lane == 0) square_sums[warp * kChunk + t] = of_square;
          const float share = 1.0f / (1.0f + step * keys.square[t]);
          de *= share * share;
        }
        dskip += dy * u;
        if (active) {
          g.du.data[(begin + t) * g.du.stride + c] = stored<T>(skip * dy + e * dz);
          g.dstep.data[(begin + t) * g.dstep.stride + c] = stored<T>(de);
        }
      }
      sync_threads();
      for (int i = static_cast<int>(thread_index()); i < count * 2 * kStates; i += kThreads) {
        const int t = i / (2 * kStates), place = i % (2 * kStates), n = place / (2 * kGroup) * kGroup + place % kGroup;
        if (n >= N) continue;
        float sum = 0;
        FW_UNROLL for (int w = 0; w < kWarps; ++w) sum += sums[(w * kChunk + t) * 2 * kStates + place];
        g.of_keys[((block * tokens + begin + t) * 2 + place / kGroup % 2) * N + n] = sum;
      }
      if constexpr (law == ScanLaw::kLonghorn) {
        const int t = static_cast<int>(thread_index());
        if (t < count) {
          float sum = 0;
          FW_UNROLL for (int w = 0; w < kWarps; ++w) sum += square_sums[w * kChunk + t];
          g.of_square[block * tokens + begin + t] = sum;
        }
      }
    }
    if (active && g.ds_in != nullptr) {
      FW_UNROLL for (int n = 0; n < kStates; ++n) {
        if (n < N) g.ds_in[(sequence * N + n) * D + c] = ds[n];
      }
    }
  }
  if (!active) return;
  g.of_skip[group * D + c] = dskip;
  if constexpr (law == ScanLaw::kMamba) {
    // A = -exp(a_log): its own slope.
    FW_UNROLL for (int n = 0; n < kStates; ++n) {
      if (n < N) g.of_a[(group * D + c) * N + n] = drate[n] * -exp_fast(a.a_log[c * N + n]);
    }
  }
}

// dq, dk [T, N] from the blocks' sums; of_square is null but with Longhorn.
template <class T>
__global__ void __launch_bounds__(kThreads) add_keys_kernel(const float* of_keys, const float* of_square, int blocks, Mat<const T> k, Mat<T> dq, Mat<T> dk) {
  const int64_t i = int64_t{block_index_x()} * kThreads + thread_index(), t = i / k.cols, n = i % k.cols;
  if (t >= k.rows) return;
  float sum_q = 0, sum_k = 0, square = 0;
  for (int block = 0; block < blocks; ++block) {
    const float* from = of_keys + (block * k.rows + t) * 2 * k.cols + n;
    sum_q += from[0];
    sum_k += from[k.cols];
    if (of_square != nullptr) square += of_square[block * k.rows + t];
  }
  dq.data[t * dq.stride + n] = stored<T>(sum_q);
  dk.data[t * dk.stride + n] = stored<T>(sum_k + 2.0f * square * number(k.data[t * k.stride + n]));
}

// Calls run(law, states) with numbers of the compiler.
template <class Run>
void with_form(ScanLaw law, int64_t states, const Run& run) {
  constexpr int kFew = kGroup, kMany = 4 * kGroup;
  if (states > kMany) fail_usage("mixer.mamba.state_size: expected at most {} on CUDA, got {}", kMany, states);
  const auto with_states = [&]<ScanLaw of>() {
    if (states <= kFew) return run.template operator()<of, kFew>();
    run.template operator()<of, kMany>();
  };
  if (law == ScanLaw::kMamba) return with_states.template operator()<ScanLaw::kMamba>();
  with_states.template operator()<ScanLaw::kLonghorn>();
}

int64_t blocks_of(int64_t channels) { return (channels + kThreads - 1) / kThreads; }

}  // namespace

namespace ops {

template <class T>
void selective_scan_forward(const Exec<T>& exec, ScanLaw law, Mat<const T> u, Mat<const T> step, Mat<const T> q, Mat<const T> k, const Wide<T>* a_log,
                            const Wide<T>* skip, const PassLayout& layout, const Wide<T>* s_in, Wide<T>* s_out, Wide<T>* marks, Mat<T> y) {
  const ScanArgs<T> a{u, step, q, k, a_log, skip, layout.offsets};
  const Dim3 grid{static_cast<unsigned>(layout.host.count()), static_cast<unsigned>(blocks_of(u.cols))};
  with_form(law, q.cols, [&]<ScanLaw of, int kStates>() {
    launch(scan_forward_kernel<T, of, kStates>, grid, kThreads, sizeof(float) * SharedKeys<kStates>::kFloats, exec.device.stream(), a, s_in, s_out, marks, y);
  });
}

template <class T>
void selective_scan_backward(const Exec<T>& exec, ScanLaw law, Mat<const T> dy, Mat<const T> u, Mat<const T> step, Mat<const T> q, Mat<const T> k,
                             const Wide<T>* a_log, const Wide<T>* skip, const PassLayout& layout, const Wide<T>* marks, const Wide<T>* ds_out, Mat<T> du,
                             Mat<T> dstep, Mat<T> dq, Mat<T> dk, Wide<T>* da_log, Wide<T>* dskip, Wide<T>* ds_in) {
  const int64_t sequences = layout.host.count(), groups = std::min(sequences, kMostGroups), blocks = blocks_of(u.cols), tokens = u.rows;
  if (sequences == 0) return;
  void* stream = exec.device.stream();
  const ArenaMark mark(exec.arena);
  const SelectiveScratch scratch(exec.arena, law, tokens, sequences, u.cols, q.cols);
  const bool mamba = law == ScanLaw::kMamba;
  const ScanArgs<T> a{u, step, q, k, a_log, skip, layout.offsets};
  const ScanBackwardArgs<T> g{dy, marks, ds_out, du, dstep, ds_in, scratch.of_keys, scratch.of_square, scratch.of_a, scratch.of_skip, sequences, groups};
  const Dim3 grid{static_cast<unsigned>(groups), static_cast<unsigned>(blocks)};
  with_form(law, q.cols, [&]<ScanLaw of, int kStates>() {
    launch(scan_backward_kernel<T, of, kStates>, grid, kThreads, sizeof(float) * (SharedKeys<kStates>::kFloats + kSumFloats<kStates>), stream, a, g);
  });
  const Dim3 key_grid{static_cast<unsigned>((tokens * q.cols + kThreads - 1) / kThreads)};
  launch(add_keys_kernel<T>, key_grid, kThreads, 0, stream, g.of_keys, g.of_square, static_cast<int>(blocks), k, dq, dk);
  if (mamba) add_column_sums(g.of_a, groups, u.cols * q.cols, da_log, stream);
  add_column_sums(g.of_skip, groups, u.cols, dskip, stream);
}

#define FW_INSTANTIATE(T)                                                                                                                               \
  template void selective_scan_forward<T>(const Exec<T>&, ScanLaw, Mat<const T>, Mat<const T>, Mat<const T>, Mat<const T>, const float*, const float*,  \
                                          const PassLayout&, const float*, float*, float*, Mat<T>);                                                     \
  template void selective_scan_backward<T>(const Exec<T>&, ScanLaw, Mat<const T>, Mat<const T>, Mat<const T>, Mat<const T>, Mat<const T>, const float*, \
                                           const float*, const PassLayout&, const float*, const float*, Mat<T>, Mat<T>, Mat<T>, Mat<T>, float*, float*, \
                                           float*);
FW_INSTANTIATE(float)
FW_INSTANTIATE(Bf16)
#undef FW_INSTANTIATE

}  // namespace ops
}  // namespace fw::cuda
