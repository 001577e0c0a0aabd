// A state S [N, D] with a decay of each of its elements on the device (ops/cpu/selective_scan.cpp has the formulas). A
// thread has kOf rows of a channel's column of the state in registers, kLanes neighbouring threads have the channel:
// many short chains, each with its elements side by side. What a chunk of tokens reads lies in shared memory while the
// next chunk's is on its way. Forward leaves a mark of the state before every chunk; backward goes through the chunks
// from the last, makes a chunk's states and decays again from its mark and keeps them in registers. What is summed over
// lanes (y, dz, the gradient of the step over a channel's; dq and dk over channels) is halved from token to token
// (halving.cuh). After the last token of a chunk steps and values are zero: they change nothing. Sums have an order of
// the shape alone.
#include <algorithm>

#include "gpu/launch.h"
#include "ops/cuda/column_sums.h"
#include "ops/cuda/halving.cuh"
#include "ops/cuda/math.cuh"
#include "ops/cuda/operations.h"
#include "ops/cuda/packets.cuh"
#include "ops/cuda/scratch.h"

namespace fw::cuda {
namespace {

constexpr int kSpan = static_cast<int>(kScanChunk);
constexpr int kOf = 4;  // rows of the state of a thread

template <class T>
struct ScanArgs {
  Mat<const T> u, step, q, k;
  const float *a_log, *skip;
  const int64_t* offsets;
  int parts;            // that every sequence is cut into
  const float* starts;  // [sequences, parts, N, D]: states before (backward: gradients after) each part; null: not cut

  // The index of the mark of a chunk's element [n, c].
  FW_DEVICE int64_t mark(int64_t sequence, int64_t chunk, int n, int64_t c) const {
    return ((offsets[sequence] / kSpan + sequence + chunk) * q.cols + n) * u.cols + c;
  }
};

// A part of a sequence: tokens from `begin` of the sequence on, at multiples of a stage.
// forward stages several chunks at a time: what does not grow with the tokens of a stage, barriers and the way through
constexpr int kStage = 4 * kSpan;
// memory, is most of a short one
struct ScanPart {
  int64_t begin, length;
  template <class T>
  FW_DEVICE ScanPart(const ScanArgs<T>& a, int64_t sequence, int part) {
    const int64_t all = a.offsets[sequence + 1] - a.offsets[sequence],
                  of_part = ((all + a.parts - 1) / a.parts + kStage - 1) / kStage * kStage;
    begin = min(all, of_part * part);
    length = min(all - begin, of_part);
  }
};

template <class T>
struct ScanBackwardArgs {
  Mat<const T> dy;
  const float *marks, *ds_out;
  Mat<T> du, dstep;
  float* ds_in;
  float* of_keys;          // [blocks, T, 2 N]: dq, dk
  float* of_square;        // [blocks, T], of Longhorn
  float *of_a, *of_skip;   // [groups, D, N], of Mamba, times A; [groups, D]
  int64_t pieces, groups;  // parts of all sequences
};

// Who does what: the block's channels, in threads of kLanes each. kPackets: rows are taken in packets of 16 bytes.
template <class T, int kLanesOf, int kThreadsOf, bool kPackets>
struct Form {
  static constexpr int kLanes = kLanesOf, kThreads = kThreadsOf, kStates = kLanes * kOf, kChannels = kThreads / kLanes,
                       kWarps = kThreads / 32;
  static constexpr int kWide = kPackets ? kPacket<T> : 1;
  static_assert(kChannels % kWide == 0 && kStates % kWide == 0);
};

// A stage's rows of kColumns columns on their way into shared memory, as floats, zeros after its tokens and after the
// last column.
template <class T, class F, int kTokens, int kColumns>
struct RowsAhead {
  static constexpr int kOfRow = kColumns / F::kWide, kCount = (kTokens * kOfRow + F::kThreads - 1) / F::kThreads;
  Packet<T, F::kWide> held[kCount];

  FW_DEVICE void load(const Mat<const T>& from, int64_t begin, int count, int64_t column) {
    FW_UNROLL for (int i = 0; i < kCount; ++i) {
      const int index = static_cast<int>(thread_index()) + i * F::kThreads, t = index / kOfRow,
                c = index % kOfRow * F::kWide;
      held[i] = {};
      if (index < kTokens * kOfRow && t < count && column + c < from.cols)
        held[i].load(from.data + (begin + t) * from.stride + column + c);
    }
  }
  FW_DEVICE void store(float* to) const {  // [kTokens, kColumns]
    FW_UNROLL for (int i = 0; i < kCount; ++i) {
      const int index = static_cast<int>(thread_index()) + i * F::kThreads;
      if (index >= kTokens * kOfRow) continue;
      float x[F::kWide];
      held[i].get(x);
      FW_UNROLL for (int j = 0; j < F::kWide; ++j) to[index * F::kWide + j] = x[j];
    }
  }
};
// The way back, of the block's channels.
template <class T, class F>
FW_DEVICE void store_rows(const float* from, const Mat<T>& to, int64_t begin, int count, int64_t column) {
  constexpr int kOfRow = F::kChannels / F::kWide;
  for (int index = static_cast<int>(thread_index()); index < count * kOfRow; index += F::kThreads) {
    const int t = index / kOfRow, c = index % kOfRow * F::kWide;
    if (column + c >= to.cols) continue;
    float x[F::kWide];
    FW_UNROLL for (int j = 0; j < F::kWide; ++j) x[j] = from[index * F::kWide + j];
    Packet<T, F::kWide> packet;
    packet.set(x);
    packet.store(to.data + (begin + t) * to.stride + column + c);
  }
}

// A stage in shared memory.
template <class F, int kTokensOf>
struct Chunk {
  static constexpr int kTokens = kTokensOf, kColumns = kTokens * F::kChannels, kKeys = kTokens * F::kStates;
  static constexpr int kFloats = 2 * kColumns + 2 * kKeys + kTokens;
  float *u, *step, *q, *k, *square;
  FW_DEVICE explicit Chunk(float* memory)
      // k, q: at multiples of 16 bytes
      : u(memory), step(memory + kColumns), q(memory + 2 * kColumns), k(q + kKeys), square(k + kKeys) {}
};

template <class T, class F, int kTokens>
struct ChunkAhead {
  RowsAhead<T, F, kTokens, F::kChannels> u, step;
  RowsAhead<T, F, kTokens, F::kStates> q, k;

  FW_DEVICE void load(const ScanArgs<T>& a, int64_t begin, int count, int64_t column) {
    u.load(a.u, begin, count, column);
    step.load(a.step, begin, count, column);
    q.load(a.q, begin, count, 0);
    k.load(a.k, begin, count, 0);
  }
  FW_DEVICE void store(const Chunk<F, kTokens>& to) const {
    u.store(to.u);
    step.store(to.step);
    q.store(to.q);
    k.store(to.k);
  }
};

// |k|^2 of a stage's tokens, which is there; all threads.
template <class F, int kTokens>
FW_DEVICE void make_squares(const Chunk<F, kTokens>& chunk) {
  const int t = static_cast<int>(thread_index());
  if (t < kTokens) {
    float sum = 0;
    for (int n = 0; n < F::kStates; ++n) sum += chunk.k[t * F::kStates + n] * chunk.k[t * F::kStates + n];
    chunk.square[t] = sum;
  }
  sync_threads();
}

// A channel's A, times log2(e): its decays are powers of two.
template <ScanLaw law, class T>
FW_DEVICE void load_rates(const ScanArgs<T>& a, int64_t c, int first, bool active, float (&rate)[kOf]) {
  FW_UNROLL for (int i = 0; i < kOf; ++i) {
    rate[i] = law == ScanLaw::kMamba && active && first + i < a.q.cols
                  ? -kLog2E * exp_fast(a.a_log[c * a.q.cols + first + i])
                  : 0.0f;
  }
}

template <ScanLaw law>
FW_DEVICE float write_size(float step, const float* square) {
  if constexpr (law == ScanLaw::kMamba) return step;
  return step / (1.0f + step * *square);
}
template <ScanLaw law>
FW_DEVICE float element_decay(float e, float rate, float k) {
  return law == ScanLaw::kMamba ? exp2_fast(e * rate) : 1.0f - e * k * k;
}

template <class T, ScanLaw law, class F>
__global__ void __launch_bounds__(F::kThreads, F::kThreads == 256 ? 4 : 2)
    scan_forward_kernel(const ScanArgs<T> a, const float* s_in, float* s_out, float* marks, Mat<T> y) {
  const Chunk<F, kStage> chunk(reinterpret_cast<float*>(shared_memory()));
  float* const out = chunk.u + Chunk<F, kStage>::kFloats;  // [kStage, channels]
  const int thread = static_cast<int>(thread_index()), lane = thread % F::kLanes, channel = thread / F::kLanes,
            first_row = lane * kOf;
  const int64_t sequence = block_index_x(), column = int64_t{block_index_y()} * F::kChannels, c = column + channel,
                D = a.u.cols;
  const int N = static_cast<int>(a.q.cols), of_sequence = static_cast<int>(block_index_z());
  const bool active = c < D;
  float s[kOf], rate[kOf];
  load_rates<law>(a, c, first_row, active, rate);
  const auto has = [&](int i) { return active && first_row + i < N; };
  const float* const start = a.starts != nullptr ? a.starts + int64_t{of_sequence} * N * D : s_in;
  const int64_t start_index = a.starts != nullptr ? sequence * a.parts : sequence;
  FW_UNROLL for (int i = 0; i < kOf; ++i) s[i] =
      has(i) && start != nullptr ? start[(start_index * N + first_row + i) * D + c] : 0.0f;
  const float skip = active ? a.skip[c] : 0.0f;
  const ScanPart part(a, sequence, of_sequence);
  const int64_t first = a.offsets[sequence] + part.begin, length = part.length;
  ChunkAhead<T, F, kStage> ahead;
  const auto tokens = [&](int64_t from) { return static_cast<int>(min(int64_t{kStage}, length - from)); };
  if (length > 0) ahead.load(a, first, tokens(0), column);
  for (int64_t from = 0; from < length; from += kStage) {
    const int count = tokens(from);
    ahead.store(chunk);
    sync_threads();
    if constexpr (law == ScanLaw::kLonghorn) make_squares(chunk);
    if (from + kStage < length) ahead.load(a, first + from + kStage, tokens(from + kStage), column);
    for (int span = 0; span < count; span += kSpan) {
      if (marks != nullptr) {
        FW_UNROLL for (int i = 0; i < kOf; ++i) {
          if (has(i)) marks[a.mark(sequence, (part.begin + from + span) / kSpan, first_row + i, c)] = s[i];
        }
      }
      // stored after all loads of the span: a store between would hold back those of the next tokens
      float reads[kSpan / F::kLanes];
      FW_UNROLL for (int group = 0; group < kSpan; group += F::kLanes) {
        float read[F::kLanes];
        FW_UNROLL for (int j = 0; j < F::kLanes; ++j) {
          const int t = span + group + j;
          const float u = chunk.u[t * F::kChannels + channel],
                      e = write_size<law>(chunk.step[t * F::kChannels + channel], chunk.square + t), z = e * u;
          float k[kOf], q[kOf];
          load_floats(chunk.k + t * F::kStates + first_row, k);
          load_floats(chunk.q + t * F::kStates + first_row, q);
          float sum = 0;
          FW_UNROLL for (int i = 0; i < kOf; ++i) {
            s[i] = element_decay<law>(e, rate[i], k[i]) * s[i] + k[i] * z;
            sum += q[i] * s[i];
          }
          read[j] = sum;
        }
        halve<F::kLanes, 1>(read);
        reads[group / F::kLanes] = read[0] + skip * chunk.u[(span + group + lane) * F::kChannels + channel];
      }
      FW_UNROLL for (int i = 0; i < kSpan / F::kLanes; ++i)
          out[(span + i * F::kLanes + lane) * F::kChannels + channel] = reads[i];
    }
    sync_threads();
    store_rows<T, F>(out, y, first + from, count, column);
  }
  if (s_out == nullptr || of_sequence + 1 < a.parts) return;
  FW_UNROLL for (int i = 0; i < kOf; ++i) {
    if (has(i)) s_out[(sequence * N + first_row + i) * D + c] = s[i];
  }
}

// What a part makes of a state, or from its end of a gradient dy is given of: `states`, from zero, and `decays`, what
// it multiplies elements by. Of all parts but the last (backward: the first), which no other one follows.
template <class T, ScanLaw law, class F, bool kBack>
__global__ void __launch_bounds__(F::kThreads, 2)
    scan_part_kernel(const ScanArgs<T> a, const Mat<const T> dy, float* states, float* decays) {
  const Chunk<F, kStage> chunk(reinterpret_cast<float*>(shared_memory()));
  const int thread = static_cast<int>(thread_index()), channel = thread / F::kLanes,
            first_row = thread % F::kLanes * kOf, N = static_cast<int>(a.q.cols);
  const int of_sequence = static_cast<int>(block_index_z()) + (kBack ? 1 : 0);
  const int64_t sequence = block_index_x(), column = int64_t{block_index_y()} * F::kChannels, c = column + channel,
                D = a.u.cols;
  const bool active = c < D;
  float s[kOf] = {}, kept[kOf], rate[kOf];
  load_rates<law>(a, c, first_row, active, rate);
  FW_UNROLL for (int i = 0; i < kOf; ++i) kept[i] = 1;
  const ScanPart part(a, sequence, of_sequence);
  const int64_t first = a.offsets[sequence] + part.begin, stages = (part.length + kStage - 1) / kStage;
  ChunkAhead<T, F, kStage> ahead;
  RowsAhead<T, F, kStage, F::kChannels> dy_ahead;
  const auto load = [&](int64_t i) {
    const int64_t from = (kBack ? stages - 1 - i : i) * kStage;
    const int count = static_cast<int>(min(int64_t{kStage}, part.length - from));
    ahead.load(a, first + from, count, column);
    if constexpr (kBack) dy_ahead.load(dy, first + from, count, column);
  };
  if (stages > 0) load(0);
  for (int64_t stage = 0; stage < stages; ++stage) {
    ahead.store(chunk);
    if constexpr (kBack) dy_ahead.store(chunk.u);  // u is not wanted there
    sync_threads();
    if constexpr (law == ScanLaw::kLonghorn) make_squares(chunk);
    if (stage + 1 < stages) load(stage + 1);
    for (int span = 0; span < kStage; span += kSpan) {
      FW_UNROLL for (int i = 0; i < kSpan; ++i) {
        const int t = kBack ? kStage - 1 - span - i : span + i, at = t * F::kChannels + channel;
        const float e = write_size<law>(chunk.step[at], chunk.square + t), x = chunk.u[at];  // u, or dy
        float k[kOf], q[kOf];
        load_floats(chunk.k + t * F::kStates + first_row, k);
        if constexpr (kBack) load_floats(chunk.q + t * F::kStates + first_row, q);
        FW_UNROLL for (int j = 0; j < kOf; ++j) {
          const float decay = element_decay<law>(e, rate[j], k[j]);
          s[j] = kBack ? (s[j] + q[j] * x) * decay : decay * s[j] + k[j] * (e * x);
          kept[j] *= decay;
        }
      }
    }
    sync_threads();
  }
  FW_UNROLL for (int i = 0; i < kOf; ++i) {
    if (!active || first_row + i >= N) continue;
    const int64_t at = ((sequence * a.parts + of_sequence) * N + first_row + i) * D + c;
    states[at] = s[i], decays[at] = kept[i];
  }
}

constexpr int kJoinThreads = 256;

// The states before each part (kBack: gradients after it), in place of what the parts make of zero. from:
// [sequences, N D] or null.
template <bool kBack>
__global__ void __launch_bounds__(kJoinThreads)
    join_parts_kernel(const float* from, const float* decays, int parts, int64_t elements, float* states) {
  const int64_t i = int64_t{block_index_x()} * kJoinThreads + thread_index(), sequence = block_index_y();
  if (i >= elements) return;
  float carry = from != nullptr ? from[sequence * elements + i] : 0.0f;
  for (int step = 0; step < parts; ++step) {
    const int64_t at = (sequence * parts + (kBack ? parts - 1 - step : step)) * elements + i;
    const bool follows = step + 1 < parts;
    const float made = follows ? states[at] : 0.0f, kept = follows ? decays[at] : 0.0f;
    states[at] = carry;
    carry = kept * carry + made;
  }
}

// Shared memory of backward after the chunk's: dy, du, dstep [kSpan, channels]; sums of dq and dk [warps, kSpan, 2
// states]; with Longhorn those of |k|^2.
template <class F>
constexpr int kBackwardFloats = Chunk<F, kSpan>::kFloats + 4 * kSpan* F::kChannels + F::kWarps* kSpan * 2 * F::kStates;

template <class T, ScanLaw law, class F>
__global__ void __launch_bounds__(F::kThreads) scan_backward_kernel(const ScanArgs<T> a, const ScanBackwardArgs<T> g) {
  constexpr int kColumns = kSpan * F::kChannels, kBoth = 2 * F::kStates, kWarpChannels = 32 / F::kLanes,
                kLeft = 2 * kOf / kWarpChannels;
  static_assert(kLeft > 0);
  const Chunk<F, kSpan> chunk(reinterpret_cast<float*>(shared_memory()));
  float *const dy = chunk.u + Chunk<F, kSpan>::kFloats, *const du = dy + kColumns, *const dstep = du + kColumns,
               *const of_square = dstep + kColumns;
  float* const sums = of_square + kColumns;
  const int thread = static_cast<int>(thread_index()), lane = thread % F::kLanes, channel = thread / F::kLanes,
            first_row = lane * kOf;
  const int warp = static_cast<int>(warp_index()), part = static_cast<int>(lane_index()) / F::kLanes;
  const int64_t group = block_index_x(), block = block_index_y(), column = block * F::kChannels, c = column + channel,
                D = a.u.cols, all = a.u.rows;
  const int N = static_cast<int>(a.q.cols);
  const bool active = c < D;
  const auto has = [&](int i) { return active && first_row + i < N; };
  float rate[kOf], drate[kOf] = {}, dskip = 0;
  load_rates<law>(a, c, first_row, active, rate);
  const float skip = active ? a.skip[c] : 0.0f;
  for (int64_t piece = group * g.pieces / g.groups; piece < (group + 1) * g.pieces / g.groups; ++piece) {
    const int64_t sequence = a.parts == 1 ? piece : piece / a.parts;
    const int of_sequence = static_cast<int>(piece - sequence * a.parts);
    float ds[kOf], mark[kOf];
    // by pieces, which are sequences where these are not cut
    const float* const end = a.starts != nullptr ? a.starts : g.ds_out;
    FW_UNROLL for (int i = 0; i < kOf; ++i) ds[i] =
        has(i) && end != nullptr ? end[(piece * N + first_row + i) * D + c] : 0.0f;
    const ScanPart part_of(a, sequence, of_sequence);
    const int64_t first = a.offsets[sequence] + part_of.begin, length = part_of.length,
                  chunks = (length + kSpan - 1) / kSpan, marks_before = part_of.begin / kSpan;
    ChunkAhead<T, F, kSpan> ahead;
    RowsAhead<T, F, kSpan, F::kChannels> dy_ahead;
    const auto load = [&](int64_t at) {
      const int count = static_cast<int>(min(int64_t{kSpan}, length - at * kSpan));
      ahead.load(a, first + at * kSpan, count, column);
      dy_ahead.load(g.dy, first + at * kSpan, count, column);
      FW_UNROLL for (int i = 0; i < kOf; ++i) mark[i] =
          has(i) ? g.marks[a.mark(sequence, marks_before + at, first_row + i, c)] : 0.0f;
    };
    if (chunks > 0) load(chunks - 1);
    for (int64_t at = chunks - 1; at >= 0; --at) {
      const int64_t begin = first + at * kSpan;
      const int count = static_cast<int>(min(int64_t{kSpan}, length - at * kSpan));
      ahead.store(chunk);
      dy_ahead.store(dy);
      sync_threads();
      if constexpr (law == ScanLaw::kLonghorn) make_squares(chunk);
      float s[kOf];
      FW_UNROLL for (int i = 0; i < kOf; ++i) s[i] = mark[i];
      if (at > 0) load(at - 1);
      float before[kSpan][kOf], decay[kSpan][kOf];
      FW_UNROLL for (int t = 0; t < kSpan; ++t) {
        const int index = t * F::kChannels + channel;
        const float e = write_size<law>(chunk.step[index], chunk.square + t), z = e * chunk.u[index];
        float k[kOf];
        load_floats(chunk.k + t * F::kStates + first_row, k);
        FW_UNROLL for (int i = 0; i < kOf; ++i) {
          before[t][i] = s[i];
          decay[t][i] = element_decay<law>(e, rate[i], k[i]);
          s[i] = decay[t][i] * s[i] + k[i] * z;
        }
      }
      FW_UNROLL for (int from = kSpan - F::kLanes; from >= 0; from -= F::kLanes) {
        float of_z[F::kLanes], of_e[F::kLanes], left[F::kLanes][kLeft];
        FW_UNROLL for (int j = F::kLanes - 1; j >= 0; --j) {
          const int t = from + j, index = t * F::kChannels + channel;
          const float grad_y = dy[index], e = write_size<law>(chunk.step[index], chunk.square + t),
                      z = e * chunk.u[index];
          float k[kOf], q[kOf], of_keys[2 * kOf], dz = 0, de = 0;
          load_floats(chunk.k + t * F::kStates + first_row, k);
          load_floats(chunk.q + t * F::kStates + first_row, q);
          FW_UNROLL for (int i = 0; i < kOf; ++i) {
            const float old = before[t][i], kept = decay[t][i];
            of_keys[i] = (kept * old + k[i] * z) * grad_y;
            const float grad = ds[i] + q[i] * grad_y, of_decay = grad * old;
            dz += k[i] * grad;
            of_keys[kOf + i] = grad * z;
            if constexpr (law == ScanLaw::kMamba) {
              const float of_log = of_decay * kept;
              de += rate[i] * of_log;
              drate[i] += e * of_log;
            } else {
              de -= of_decay * k[i] * k[i];
              of_keys[kOf + i] -= 2.0f * of_decay * k[i] * e;
            }
            ds[i] = grad * kept;
          }
          of_z[j] = dz, of_e[j] = de;
          // [dq of the rows | dk of the rows] over the warp's channels
          halve<kWarpChannels, F::kLanes>(of_keys);
          FW_UNROLL for (int i = 0; i < kLeft; ++i) left[j][i] = of_keys[i];
        }
        FW_UNROLL for (int j = 0; j < F::kLanes; ++j) {
          FW_UNROLL for (int i = 0; i < kLeft; ++i) {
            const int number = part * kLeft + i;
            sums[(warp * kSpan + from + j) * kBoth + number / kOf * F::kStates + first_row + number % kOf] = left[j][i];
          }
        }
        halve<F::kLanes, 1>(of_z);
        halve<F::kLanes, 1>(of_e);
        const int t = from + lane, index = t * F::kChannels + channel;
        const float u = chunk.u[index], step = chunk.step[index], e = write_size<law>(step, chunk.square + t);
        constexpr float kLn2 = 0.6931471805599453f;
        float de = (law == ScanLaw::kMamba ? kLn2 * of_e[0] : of_e[0]) + u * of_z[0];
        if constexpr (law == ScanLaw::kLonghorn) {
          of_square[index] = active ? -e * e * de : 0.0f;
          const float share = 1.0f / (1.0f + step * chunk.square[t]);
          de *= share * share;
        }
        dskip += dy[index] * u;
        du[index] = skip * dy[index] + e * of_z[0];
        dstep[index] = de;
      }
      sync_threads();
      store_rows<T, F>(du, g.du, begin, count, column);
      store_rows<T, F>(dstep, g.dstep, begin, count, column);
      for (int i = thread; i < count * kBoth; i += F::kThreads) {
        const int t = i / kBoth, n = i % F::kStates, which = i / F::kStates % 2;
        if (n >= N) continue;
        float sum = 0;
        FW_UNROLL for (int w = 0; w < F::kWarps; ++w) sum += sums[(w * kSpan + t) * kBoth + which * F::kStates + n];
        g.of_keys[((block * all + begin + t) * 2 + which) * N + n] = sum;
      }
      if constexpr (law == ScanLaw::kLonghorn) {
        if (thread < count) {
          float sum = 0;
          for (int i = 0; i < F::kChannels; ++i) sum += of_square[thread * F::kChannels + i];
          g.of_square[block * all + begin + thread] = sum;
        }
      }
    }
    if (g.ds_in != nullptr && of_sequence == 0) {
      FW_UNROLL for (int i = 0; i < kOf; ++i) {
        if (has(i)) g.ds_in[(sequence * N + first_row + i) * D + c] = ds[i];
      }
    }
  }
  FW_UNROLL for (int mask = 1; mask < F::kLanes; mask *= 2) dskip += shuffle_xor(dskip, mask);
  if (!active) return;
  if (lane == 0) g.of_skip[group * D + c] = dskip;
  if constexpr (law == ScanLaw::kMamba) {
    // A = -exp(a_log): its own slope.
    FW_UNROLL for (int i = 0; i < kOf; ++i) {
      if (has(i)) g.of_a[(group * D + c) * N + first_row + i] = drate[i] * -exp_fast(a.a_log[c * N + first_row + i]);
    }
  }
}

constexpr int kKeyThreads = 256;

// dq, dk [T, N] from the blocks' sums; of_square is null but with Longhorn.
template <class T>
__global__ void __launch_bounds__(kKeyThreads)
    add_keys_kernel(const float* of_keys, const float* of_square, int blocks, Mat<const T> k, Mat<T> dq, Mat<T> dk) {
  const int64_t i = int64_t{block_index_x()} * kKeyThreads + thread_index(), t = i / k.cols, n = i % k.cols;
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

// Calls run(law, form) with numbers of the compiler. sequences: side by side.
template <class T, class Run>
void with_form(ScanLaw law, int64_t states, int64_t channels, int64_t sequences, bool packets, const Run& run) {
  if (states > kScanMostStates)
    fail_usage("mixer.mamba.state_size: expected at most {} on CUDA, got {}", kScanMostStates, states);
  const auto with_law = [&]<ScanLaw of>() {
    if (states > kScanFewStates) return run.template operator()<of, Form<T, 16, 128, false>>();
    if (!packets) return run.template operator()<of, Form<T, 4, 128, false>>();
    if (scan_channels(channels, states, sequences, true) == 32)
      return run.template operator()<of, Form<T, 4, 128, true>>();
    run.template operator()<of, Form<T, 4, 256, true>>();
  };
  if (law == ScanLaw::kMamba) return with_law.template operator()<ScanLaw::kMamba>();
  with_law.template operator()<ScanLaw::kLonghorn>();
}

// The starts of all parts, where there are several.
template <bool kBack, class T>
void cut(const Exec<T>& exec, ScanLaw law, ScanArgs<T>& a, const Mat<const T>& dy, int64_t sequences, bool packets,
         const float* from, const ScanPartsScratch& between) {
  if (between.states == nullptr) return;
  void* const stream = exec.device.stream();
  with_form<T>(law, a.q.cols, a.u.cols, sequences, packets, [&]<ScanLaw of, class F>() {
    const Dim3 grid{static_cast<unsigned>(sequences), static_cast<unsigned>(parts_of(a.u.cols, F::kChannels)),
                    static_cast<unsigned>(a.parts - 1)};
    launch(scan_part_kernel<T, of, F, kBack>, grid, F::kThreads, sizeof(float) * Chunk<F, kStage>::kFloats, stream, a,
           dy, between.states, between.decays);
  });
  const int64_t elements = a.u.cols * a.q.cols;
  launch(join_parts_kernel<kBack>,
         Dim3{static_cast<unsigned>(parts_of(elements, kJoinThreads)), static_cast<unsigned>(sequences)}, kJoinThreads,
         0, stream, from, between.decays, a.parts, elements, between.states);
  a.starts = between.states;
}

}  // namespace

namespace ops {

template <class T>
void selective_scan_forward(const Exec<T>& exec, ScanLaw law, Mat<const T> u, Mat<const T> step, Mat<const T> q,
                            Mat<const T> k, const Wide<T>* a_log, const Wide<T>* skip, const PassLayout& layout,
                            const Wide<T>* s_in, Wide<T>* s_out, Wide<T>* marks, Mat<T> y) {
  const int64_t sequences = layout.host.count();
  const bool packets = scan_in_packets(u, step, q, k, y);
  const int64_t parts = scan_parts(layout.host, u.cols, q.cols, packets);
  const ArenaMark mark(exec.arena);
  const ScanPartsScratch between(exec.arena, sequences, parts, u.cols, q.cols);
  ScanArgs<T> a{u, step, q, k, a_log, skip, layout.offsets, static_cast<int>(parts), nullptr};
  cut<false>(exec, law, a, Mat<const T>{}, sequences, packets, s_in, between);
  with_form<T>(law, q.cols, u.cols, sequences, packets, [&]<ScanLaw of, class F>() {
    const Dim3 grid{static_cast<unsigned>(sequences), static_cast<unsigned>(parts_of(u.cols, F::kChannels)),
                    static_cast<unsigned>(parts)};
    launch(scan_forward_kernel<T, of, F>, grid, F::kThreads,
           sizeof(float) * (Chunk<F, kStage>::kFloats + kStage * F::kChannels), exec.device.stream(), a, s_in, s_out,
           marks, y);
  });
}

template <class T>
void selective_scan_backward(const Exec<T>& exec, ScanLaw law, Mat<const T> dy, Mat<const T> u, Mat<const T> step,
                             Mat<const T> q, Mat<const T> k, const Wide<T>* a_log, const Wide<T>* skip,
                             const PassLayout& layout, const Wide<T>* marks, const Wide<T>* ds_out, Mat<T> du,
                             Mat<T> dstep, Mat<T> dq, Mat<T> dk, Wide<T>* da_log, Wide<T>* dskip, Wide<T>* ds_in) {
  const bool packets = scan_in_packets(u, step, q, k, dy, du, dstep);
  const int64_t sequences = layout.host.count(), parts = scan_parts(layout.host, u.cols, q.cols, packets),
                tokens = u.rows;
  const int64_t pieces = sequences * parts, groups = std::min(pieces, kScanGroups);
  if (sequences == 0) return;
  void* stream = exec.device.stream();
  const ArenaMark mark(exec.arena);
  const SelectiveScratch scratch(exec.arena, law, tokens, pieces, u.cols, q.cols, packets);
  const ScanPartsScratch between(exec.arena, sequences, parts, u.cols, q.cols);
  ScanArgs<T> a{u, step, q, k, a_log, skip, layout.offsets, static_cast<int>(parts), nullptr};
  cut<true>(exec, law, a, dy, sequences, packets, ds_out, between);
  const ScanBackwardArgs<T> g{dy,           marks,           ds_out,          du,
                              dstep,        ds_in,           scratch.of_keys, scratch.of_square,
                              scratch.of_a, scratch.of_skip, pieces,          groups};
  int64_t blocks = 0;
  with_form<T>(law, q.cols, u.cols, groups, packets, [&]<ScanLaw of, class F>() {
    blocks = parts_of(u.cols, F::kChannels);
    launch(scan_backward_kernel<T, of, F>, Dim3{static_cast<unsigned>(groups), static_cast<unsigned>(blocks)},
           F::kThreads, sizeof(float) * kBackwardFloats<F>, stream, a, g);
  });
  launch(add_keys_kernel<T>, Dim3{static_cast<unsigned>(parts_of(tokens * q.cols, kKeyThreads))}, kKeyThreads, 0,
         stream, g.of_keys, g.of_square, static_cast<int>(blocks), k, dq, dk);
  if (law == ScanLaw::kMamba) add_column_sums(g.of_a, groups, u.cols * q.cols, da_log, stream);
  add_column_sums(g.of_skip, groups, u.cols, dskip, stream);
}

#define FW_INSTANTIATE(T)                                                                                              \
  template void selective_scan_forward<T>(const Exec<T>&, ScanLaw, Mat<const T>, Mat<const T>, Mat<const T>,           \
                                          Mat<const T>, const float*, const float*, const PassLayout&, const float*,   \
                                          float*, float*, Mat<T>);                                                     \
  template void selective_scan_backward<T>(const Exec<T>&, ScanLaw, Mat<const T>, Mat<const T>, Mat<const T>,          \
                                           Mat<const T>, Mat<const T>, const float*, const float*, const PassLayout&,  \
                                           const float*, const float*, Mat<T>, Mat<T>, Mat<T>, Mat<T>, float*, float*, \
                                           float*);
FW_INSTANTIATE(float)
FW_INSTANTIATE(Bf16)
#undef FW_INSTANTIATE

}  // namespace ops
}  // namespace fw::cuda
