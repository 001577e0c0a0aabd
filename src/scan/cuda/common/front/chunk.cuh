// The front of a chunk of 64 tokens of one value head on 8 warps: a warp has 8 neighbouring rows, a lane kN = key / 32
// neighbouring channels of each. Norms are diagonals of matrix products where the raw rows lie in shared memory, and
// each lane works out the coefficients (rule/front.h) of one row only.
#pragma once

#include <type_traits>

#include "gpu/launch.h"
#include "gpu/sw128_atoms.cuh"
#include "scan/cuda/common/front/rows.cuh"
#include "scan/cuda/common/front/token_scalars.cuh"
#include "scan/cuda/common/front/unscaled_keys.cuh"
#include "scan/cuda/common/precond_rows.cuh"

namespace fw::cuda {

inline constexpr int kWarpRows = 8;
inline constexpr int kPrepareThreads = 256;
// Blocks of prepare for whose registers an SM has room: before Hopper shared memory holds half as many.
constexpr int resident_blocks(int on_hopper) { return FW_HOPPER != 0 ? on_hopper : (on_hopper + 1) / 2; }

// The warp's number as one number for all its lanes, so that branches on it are known to keep the warp together.
FW_DEVICE int uniform_warp() { return shuffle(static_cast<int>(warp_index()), 0); }

// Rows first .. first + rows - 1 of a sequence are the chunk's.
struct ChunkSpan {
  int first, rows;
};

// kN neighbouring bf16 values as they lie in memory.
template <int kN>
struct PackedChannels {
  uint32_t words[kN / 2];
};
template <int kN>
FW_DEVICE PackedChannels<kN> pack_channels(const float (&x)[kN]) {
  PackedChannels<kN> packed;
  FW_UNROLL
  for (int j = 0; j < kN / 2; ++j) packed.words[j] = pack_bf16(x[2 * j], x[2 * j + 1]);
  return packed;
}
// What that leaves out.
template <int kN>
FW_DEVICE PackedChannels<kN> pack_lo_parts(const float (&x)[kN], const PackedChannels<kN>& packed) {
  PackedChannels<kN> lo_parts;
  FW_UNROLL
  for (int j = 0; j < kN / 2; ++j) lo_parts.words[j] = pack_lo(packed.words[j], x[2 * j], x[2 * j + 1]);
  return lo_parts;
}
template <int kN>
FW_DEVICE void store_packed(void* to, const PackedChannels<kN>& x) {
  if constexpr (kN == 4) {
    *static_cast<uint2*>(to) = make_uint2(x.words[0], x.words[1]);
  } else {
    *static_cast<uint32_t*>(to) = x.words[0];
  }
}
template <int kN>
FW_DEVICE PackedChannels<kN> load_packed(const void* from) {
  if constexpr (kN == 4) {
    const uint2 x = *static_cast<const uint2*>(from);
    return {{x.x, x.y}};
  } else {
    return {{*static_cast<const uint32_t*>(from)}};
  }
}

template <int kN>
FW_DEVICE void load_floats(const float* from, float (&x)[kN]) {
  if constexpr (kN == 4) {
    const float4 y = *reinterpret_cast<const float4*>(from);
    x[0] = y.x, x[1] = y.y, x[2] = y.z, x[3] = y.w;
  } else {
    const float2 y = *reinterpret_cast<const float2*>(from);
    x[0] = y.x, x[1] = y.y;
  }
}
template <int kN>
FW_DEVICE void store_floats(float* to, const float (&x)[kN]) {
  if constexpr (kN == 4) {
    *reinterpret_cast<float4*>(to) = make_float4(x[0], x[1], x[2], x[3]);
  } else {
    *reinterpret_cast<float2*>(to) = make_float2(x[0], x[1]);
  }
}

// Which chunk of which sequence and head a block has.
struct ChunkCoord {
  int64_t item;         // chunk * HV + value head
  int n, hv, key_head;  // sequence, value head, key head
  int batch, token;     // of the chunk's first row in tensors [B, T, ...]
  ChunkSpan span;
};
// The grid: heads, then chunks in y and z, which may be more than there are: then rows < 0.
inline constexpr int64_t kGridChunks = 32768;
inline Dim3 prepare_grid(const Problem& x, int64_t chunks) {
  const int64_t y = chunks < kGridChunks ? chunks : kGridChunks;
  return {static_cast<unsigned>(x.HV), static_cast<unsigned>(y),
          static_cast<unsigned>(y == 0 ? 0 : (chunks + y - 1) / y)};
}
// The block's chunk, of all.
FW_DEVICE unsigned block_chunk() {
  return grid_size_y() * grid_size_z() - 1 - (block_index_y() + block_index_z() * grid_size_y());
}
// From the last chunk on: the scan begins at the first, whose chunk tiles are then still in the L2 cache, as is what a
// pass over k before this has left there.
FW_DEVICE ChunkCoord chunk_coord(const Problem& x, int hv = static_cast<int>(block_index_x())) {
  ChunkCoord p;
  const unsigned chunk = block_chunk();
  p.hv = hv;
  p.item = static_cast<int64_t>(chunk) * x.HV + p.hv;
  p.key_head = x.group == 1 ? p.hv : static_cast<int>(static_cast<unsigned>(hv) / static_cast<unsigned>(x.group));
  const SequenceArg& s = x.sequences;
  if ((grid_size_z() > 1 || s.bounded != 0) &&
      chunk >= static_cast<unsigned>(s.chunk_base == nullptr ? s.N * s.chunks : s.chunk_base[s.N])) {
    p.span.rows = -1;
    return p;
  }
  p.n = s.chunk_base != nullptr ? sequence_of_chunk(s, static_cast<int>(chunk))
        : s.N == 1              ? 0
                                : static_cast<int>(chunk / static_cast<unsigned>(s.chunks));
  p.span.first = (static_cast<int>(chunk) - first_chunk(s, p.n)) * kChunk;
  p.batch = s.offsets != nullptr ? 0 : p.n;
  p.token = p.span.first + (s.offsets != nullptr ? s.offsets[p.n] : 0);
  const int left = sequence_length(s, p.n) - p.span.first;
  p.span.rows = left < kChunk ? left : kChunk;
  return p;
}

// A row of the chunk: rows_of (tokens.cuh) with the divisions of all tensors made once. The divisor is 1 or the group.
FW_DEVICE char* row_address(const TokenArg& a, const ChunkCoord& coord, int row) {
  const int64_t offset = coord.batch * a.stride_b + (coord.token + row) * a.stride_t +
                         (a.divisor == 1 ? coord.hv : coord.key_head) * a.stride_h;
  return static_cast<char*>(a.data) + (offset << (a.bf16 != 0 ? 1 : 2));
}
// Rows of the chunk, numbered from its first.
FW_DEVICE Rows chunk_rows(const TokenArg& a, const ChunkCoord& coord) {
  return {row_address(a, coord, 0), a.stride_t, a.bf16};
}

// Byte of this lane's channels of row r of its warp in a matrix of 32 kN columns.
template <int kN>
FW_DEVICE uint32_t lane_offset(int r) {
  const int lane = static_cast<int>(lane_index()), row = static_cast<int>(warp_index()) * kWarpRows + r,
            column = lane * kN;
  return static_cast<uint32_t>((column >> 6) * static_cast<int>(kSw128Bytes) + row * 128 +
                               ((((column >> 3) ^ r) & 7) << 4) + (column & 7) * 2);
}

// Raw rows of the key side that the host says can be fetched (PrepareChoice::fetched) come into shared memory ahead of
// their use. They come to where the streams that are made of them will lie: a lane reads its channels of a row before
// it writes there. K: channels that the tensor has; the others are zeros.
template <int kN>
FW_DEVICE void fetch_rows(const TokenArg& tensor, const ChunkCoord& coord, int K, char* matrix) {
  constexpr int kAtoms = 4 * kN, kRows = 32 / kAtoms;  // of a row; rows that the warp fetches at a time
  const int lane = static_cast<int>(lane_index()), atom = lane % kAtoms,
            first = static_cast<int>(warp_index()) * kWarpRows + lane / kAtoms;
  const char* from = row_address(tensor, coord, first) + atom * 16;
  const int64_t step = tensor.stride_t * (2 * kRows);
  const uint32_t to = shared_address(matrix);
  const int rows = atom * 8 < K ? coord.span.rows : 0;
  FW_UNROLL
  for (int r = 0; r < kWarpRows; r += kRows) {
    const bool valid = first + r < rows;
    cp_async_16(to + atom_offset(first + r, atom), valid ? from : static_cast<const char*>(tensor.data), valid);
    from += step;
  }
}

// Where the raw rows of q and k lie, and those of the erase gate or of an erase key of its own (never both:
// PrepareChoice::fetched).
struct RawMatrices {
  char *q, *k, *b;
};
template <int kN>
FW_DEVICE void fetch_front(const Problem& x, const ChunkCoord& coord, const RawMatrices& raw) {
  fetch_rows<kN>(x.in.k, coord, x.K, raw.k);
  fetch_rows<kN>(x.in.q, coord, x.K, raw.q);
  if (channel_erase(x.rule)) fetch_rows<kN>(x.in.erase_gate, coord, x.K, raw.b);
  if (x.rule.uses_erase_key()) fetch_rows<kN>(x.in.erase_key, coord, x.K, raw.b);
  cp_async_commit();
}
FW_DEVICE void front_arrived() {
  cp_async_wait<0>();
  sync_warp();
}

// A fetched row r of the warp: 0 past the chunk's rows.
template <int kN>
FW_DEVICE void fetched_row(const char* matrix, int r, float (&y)[kN]) {
  const PackedChannels<kN> packed = load_packed<kN>(matrix + lane_offset<kN>(r));
  FW_UNROLL
  for (int j = 0; j < kN / 2; ++j) y[2 * j] = bf16_low(packed.words[j]), y[2 * j + 1] = bf16_high(packed.words[j]);
}

// Any row r of the warp, from memory: the neutral row past the chunk's rows.
template <int kN>
FW_DEVICE RawKeyRow<kN> row_from_memory(const Problem& x, const FrontRows& rows, const ChunkCoord& coord, int r) {
  const int row = static_cast<int>(warp_index()) * kWarpRows + r;
  if (row < coord.span.rows) return load_key_row<kN>(x, rows, coord.span.first + row, static_cast<int>(lane_index()));
  RawKeyRow<kN> none;
  FW_UNROLL
  for (int j = 0; j < kN; ++j) none.q[j] = none.k[j] = none.p[j] = 0, none.b[j] = none.m[j] = 1;
  return none;
}

// M of this lane's channels of the warp's rows, whole rows only.
struct MRows {
  const float* first = nullptr;  // of the warp's first row; null without a preconditioner
  int32_t stride = 0;
  int rows = 0;  // that the warp has
};
FW_DEVICE MRows m_rows(const Problem& x, const float* all, const ChunkCoord& coord, int channel) {
  MRows m;
  if (all == nullptr) return m;
  const int first = static_cast<int>(warp_index()) * kWarpRows;
  m.stride = x.H * x.K;
  m.first = all + (first_token(x.sequences, coord.n) + coord.span.first + first) * static_cast<int64_t>(m.stride) +
            coord.key_head * x.K + channel;
  m.rows = coord.span.rows - first;
  return m;
}
FW_DEVICE MRows m_rows(const Problem& x, const ChunkCoord& coord, int channel) {
  return m_rows(x, x.m, coord, channel);
}
template <int kN>
FW_DEVICE void load_m(const MRows& rows, int r, float (&m)[kN]) {
  FW_UNROLL
  for (int j = 0; j < kN; ++j) m[j] = 1;
  if (r < rows.rows) load_floats(rows.first + r * rows.stride, m);
}

// Sums over the warp of eight numbers a lane: number lane / 4 of them.
FW_DEVICE float sum_rows(const float (&x)[kWarpRows]) {
  const int lane = static_cast<int>(lane_index());
  float half[4], quarter[2];
  FW_UNROLL
  for (int i = 0; i < 4; ++i) {
    const bool high = (lane & 16) != 0;
    half[i] = (high ? x[i + 4] : x[i]) + shuffle_xor(high ? x[i] : x[i + 4], 16);
  }
  FW_UNROLL
  for (int i = 0; i < 2; ++i) {
    const bool high = (lane & 8) != 0;
    quarter[i] = (high ? half[i + 2] : half[i]) + shuffle_xor(high ? half[i] : half[i + 2], 8);
  }
  const bool high = (lane & 4) != 0;
  float sum = (high ? quarter[1] : quarter[0]) + shuffle_xor(high ? quarter[0] : quarter[1], 4);
  sum += shuffle_xor(sum, 2);
  sum += shuffle_xor(sum, 1);
  return sum;
}

// Mean over the channels of a gate, of the rows of the warp: that of row lane / 4.
FW_DEVICE float mean_gate(const TokenArg& gate, const ChunkCoord& coord, int dim) {
  const Rows rows = chunk_rows(gate, coord);
  const int first = static_cast<int>(warp_index()) * kWarpRows, lane = static_cast<int>(lane_index());
  float mean = 0;
  FW_NO_UNROLL
  for (int r = 0; r < kWarpRows; ++r) {
    float sum = 0;
    if (first + r < coord.span.rows) {
      FW_NO_UNROLL
      for (int i = lane; i < dim; i += 32) sum += load_element(rows, first + r, i);
    }
    sum = warp_sum(sum) / static_cast<float>(dim);
    if (lane / 4 == r) mean = sum;
  }
  return mean;
}

// The gates of a row that are one number each.
FW_DEVICE float gate_of_row(const TokenArg& a, const ChunkCoord& coord, int row) {
  const void* at = row_address(a, coord, row);
  return a.bf16 != 0 ? bf16_value(*static_cast<const uint16_t*>(at)) : *static_cast<const float*>(at);
}
FW_DEVICE void row_gates(const Problem& x, const ChunkCoord& coord, int row, FrontScalars<float>& s) {
  load_gates(
      x.rule, x.m != nullptr, s, [&](const TokenArg& a) { return gate_of_row(a, coord, row); }, x.in);
}

// |q|^2 and |k|^2 of the warp's fetched row lane / 4: the diagonals of Q Q^T and K K^T, with the rows of q and k as one left operand
// of 16 rows, whose registers are also the right ones. kFewRegisters: more products and fewer registers.
template <int kN, bool kFewRegisters = false>
FW_DEVICE float2 fetched_squares(const RawMatrices& raw) {
  const int lane = static_cast<int>(lane_index()), i = lane >> 3,
            row = static_cast<int>(warp_index()) * kWarpRows + (lane & 7);
  const uint32_t matrix = shared_address((i & 1) != 0 ? raw.k : raw.q) + static_cast<uint32_t>(row * 128) +
                          static_cast<uint32_t>(((i >> 1) ^ (row & 7)) << 4);
  float q[4] = {0, 0, 0, 0}, k[4] = {0, 0, 0, 0};
  FW_UNROLL
  for (int step = 0; step < 2 * kN; ++step) {
    uint32_t a[4];
    ldmatrix_x4(a, fragment_offset(matrix, 0, 2 * step));
    if constexpr (kFewRegisters) {
      FW_UNROLL
      for (int half = 0; half < 4; half += 2) {
        mma_bf16_k8(q, a[half], a[half + 1], a[half]);
        mma_bf16_k8(k, a[half], a[half + 1], a[half + 1]);
      }
    } else {
      mma_bf16(q, a, a[0], a[2]);
      mma_bf16(k, a, a[1], a[3]);
    }
  }
  const bool odd = (lane & 4) != 0;
  const int from = (lane & 28) + (lane >> 3);
  return make_float2(shuffle(odd ? q[1] : q[0], from), shuffle(odd ? k[3] : k[2], from));
}

FW_DEVICE bool uses_norms(const Rule& rule) {
  return rule.q_norm == Norm::kL2 || rule.k_norm == Norm::kL2 || rule.gain_uses_key_norm();
}

// The norms that a rule's coefficients need, of row lane / 4 of the warp.
template <int kN>
FW_DEVICE void fetched_norms(const Problem& x, const ChunkCoord& coord, const RawMatrices& raw,
                             FrontScalars<float>& s) {
  if (uses_norms(x.rule)) {
    const float2 squares = fetched_squares<kN>(raw);
    s.q2 = squares.x, s.k2 = squares.y;
  }
  if (x.rule.uses_key_form()) {
    float part[kWarpRows], y[kN];
    const MRows rows = m_rows(x, coord, static_cast<int>(lane_index()) * kN);
    FW_UNROLL
    for (int r = 0; r < kWarpRows; ++r) {
      float m[kN];
      fetched_row(raw.k, r, y);
      load_m(rows, r, m);
      part[r] = 0;
      FW_UNROLL
      for (int j = 0; j < kN; ++j) part[r] += m[j] * y[j] * y[j];
    }
    s.kmk = sum_rows(part);
  }
}
// rounded: of q and k as bf16 has them, as the gradients take them.
template <int kN>
FW_DEVICE void norms_from_memory(const Problem& x, const ChunkCoord& coord, bool rounded, FrontScalars<float>& s) {
  const FrontRows rows = front_rows(x, coord.n, coord.hv);
  FW_NO_UNROLL
  for (int r = 0; r < kWarpRows; ++r) {
    RawKeyRow<kN> row = row_from_memory<kN>(x, rows, coord, r);
    if (rounded) {
      FW_UNROLL
      for (int j = 0; j < kN; ++j)
        row.q[j] = bf16_value(bf16_bits(row.q[j])), row.k[j] = bf16_value(bf16_bits(row.k[j]));
    }
    float q2 = 0, k2 = 0, p2 = 0, kmk = 0;
    FW_UNROLL
    for (int j = 0; j < kN; ++j) {
      q2 += row.q[j] * row.q[j], k2 += row.k[j] * row.k[j], p2 += row.p[j] * row.p[j];
      kmk += row.m[j] * row.k[j] * row.k[j];
    }
    q2 = warp_sum(q2), k2 = warp_sum(k2), p2 = warp_sum(p2), kmk = warp_sum(kmk);
    if (static_cast<int>(lane_index()) / 4 == r) s.q2 = q2, s.k2 = k2, s.p2 = p2, s.kmk = kmk;
  }
}

// The coefficients of a row as they lie in shared memory; 0 past the chunk's rows.
struct RowScaleCoefs {
  float4 read_erase;  // r_q, r_k, e_k, e_q
  float4 lo;          // e_p, w_k, z_v, 0
};
FW_DEVICE void put_coefs(RowScaleCoefs& to, const FrontCoefs<float>& c, bool valid) {
  to.read_erase = valid ? make_float4(c.r_q, c.r_k, c.e_k, c.e_q) : make_float4(0, 0, 0, 0);
  to.lo = valid ? make_float4(c.e_p, c.w_k, c.z_v, 0) : make_float4(0, 0, 0, 0);
}

// M is read from memory, or there is none.
struct NoPrecondRows {
  static constexpr bool kMakes = false;
};
// M of fetched rows that is made here, row after row of the warp: A of this lane's channels.
template <int kN>
struct PrecondRows {
  static constexpr bool kMakes = true;
  RunShared<kN>* shared = nullptr;  // null: as NoPrecondRows
  PrecondMap<float> map;            // squashed
  float a[kN];                      // before the chunk, later before the warp's next row

  // A before the chunk is on its way.
  FW_DEVICE void load(const Problem& x, const ChunkCoord& coord, const PrecondMap<float>& form, RunShared<kN>* to) {
    if (x.boundaries == nullptr) return;
    shared = to;
    map = form;
    if (x.rule.uses_precond_center()) map.center = x.precond_center[coord.key_head * x.center_stride];
    const int64_t chunk = first_chunk(x.sequences, coord.n) + coord.span.first / kChunk;
    load_floats(x.boundaries + (chunk * x.H + coord.key_head) * x.K + static_cast<int>(lane_index()) * kN, a);
  }
  // After the block's barrier.
  FW_DEVICE void start() {
    if (shared != nullptr)
      run_start<Direction::kForward, kN>(static_cast<int>(warp_index()), static_cast<int>(lane_index()), *shared, a);
  }
  FW_DEVICE void next(float alpha, float gain, const float (&k)[kN], float (&m)[kN]) {
    FW_UNROLL
    for (int j = 0; j < kN; j += 2) {
      a[j] = step_precond(alpha, gain, k[j], a[j]), a[j + 1] = step_precond(alpha, gain, k[j + 1], a[j + 1]);
      const float2 both = squashed_m(map, make_float2(a[j] + map.eps, a[j + 1] + map.eps));
      m[j] = both.x, m[j + 1] = both.y;
    }
  }
};

// Coefficients of the warp's rows, into coefs[64]; the warp itself may read its own afterwards. Where M is made here,
// alpha and the gain of the preconditioner are in place of e_p and 0. rounded: norms_from_memory().
template <int kN, class Precond>
FW_DEVICE void make_coefs(const Problem& x, const ChunkCoord& coord, bool fetched, const RawMatrices& raw,
                          const Precond& precond, RowScaleCoefs* coefs, bool rounded = false) {
  const int lane = static_cast<int>(lane_index()), row = static_cast<int>(warp_index()) * kWarpRows + lane / 4;
  const bool valid = row < coord.span.rows;
  FrontScalars<float> s;
  if (valid) row_gates(x, coord, row, s);
  if (fetched) {
    front_arrived();
    fetched_norms<kN>(x, coord, raw, s);
  } else {
    norms_from_memory<kN>(x, coord, rounded, s);
  }
  if (x.rule.uses_erase_gate() && x.rule.erase == Gate::kAveraged) s.erase = mean_gate(x.in.erase_gate, coord, x.K);
  if (x.rule.write == Gate::kAveraged) s.write = mean_gate(x.in.write_gate, coord, x.V);
  const FrontCoefs<float> c = front_coefs(x.rule, x.scale, s);
  if (lane % 4 == 0) put_coefs(coefs[row], c, valid);
  if constexpr (Precond::kMakes) {
    if (precond.shared != nullptr) {
      float g = 0, beta = 0;
      if (valid) g = gate_of_row(x.in.precond_g, coord, row), beta = gate_of_row(x.in.precond_beta, coord, row);
      const RunGates gates = run_gates(x.rule, g, beta, s.k2);
      put_run<kN>(gates, static_cast<int>(warp_index()), lane, *precond.shared,
                  [&](int r, float(&k)[kN]) { fetched_row(raw.k, r, k); });
      if (lane % 4 == 0) coefs[row].lo.x = gates.alpha, coefs[row].lo.w = gates.gain;
    }
  }
  sync_warp();
}

template <int kN>
FW_DEVICE void make_coefs(const Problem& x, const ChunkCoord& coord, bool fetched, const RawMatrices& raw,
                          RowScaleCoefs* coefs) {
  make_coefs<kN>(x, coord, fetched, raw, NoPrecondRows(), coefs);
}

// Where raw rows can be fetched the coefficients of row_multiples() are made by two warps for all rows.

// The row whose coefficients a lane makes, or -1.
FW_DEVICE int coefficient_row(int warp) {
  return warp == 0 ? static_cast<int>(lane_index()) : warp == 7 ? 32 + static_cast<int>(lane_index()) : -1;
}

// Of such a rule: the gates of a row (neutral past the chunk's rows), and its coefficients. The rule says once more
// what it is for the compiler.
struct PlainGates {
  float beta = 1, erase = 1, write = 1;
};
FW_DEVICE PlainGates plain_gates(const Problem& x, const ChunkCoord& coord, int row) {
  const auto gate = [&](const TokenArg& a) {
    const void* at = row_address(a, coord, row);
    return a.bf16 != 0 ? bf16_value(*static_cast<const uint16_t*>(at)) : *static_cast<const float*>(at);
  };
  PlainGates s;
  if (row < 0 || row >= coord.span.rows) return s;
  if (x.rule.uses_beta()) s.beta = gate(x.in.beta);
  if (x.rule.uses_erase_gate() && x.rule.erase == Gate::kScalar) s.erase = gate(x.in.erase_gate);
  if (x.rule.write == Gate::kScalar) s.write = gate(x.in.write_gate);
  return s;
}
// A number of a row that was computed from a logit, to where later kernels find it.
FW_DEVICE void store_scalar(const Problem& x, const ChunkCoord& coord, int row, float* all, float value) {
  const unsigned token = static_cast<unsigned>(coord.batch * x.T + coord.token + row);
  if (all != nullptr) all[uint64_t{token} * static_cast<unsigned>(x.HV) + static_cast<unsigned>(coord.hv)] = value;
}
// What plain_gates() has loaded become values, where they are logits. leaves: of several lanes with the same row one.
FW_DEVICE void form_gates(const Problem& x, const ChunkCoord& coord, int row, bool leaves, PlainGates& s) {
  if (row < 0 || row >= coord.span.rows) return;
  const auto form = [&](const GateLaw<float>& law, float* all, float& y) {
    if (law.given == GateActivation::kValue) return;
    y = fused_scalar(law, y);
    if (leaves) store_scalar(x, coord, row, all, y);
  };
  form(x.fused.beta, x.fused.numbers.beta, s.beta);
  if (x.rule.erase == Gate::kScalar) form(x.fused.erase_gate, x.fused.numbers.erase_gate, s.erase);
  if (x.rule.write == Gate::kScalar) form(x.fused.write_gate, x.fused.numbers.write_gate, s.write);
}
FW_DEVICE FrontCoefs<float> plain_coefs(const Problem& x, const PlainGates& gates, float q2, float k2) {
  Rule rule = x.rule;
  rule.erase_key = EraseKey::kTied, rule.feedback = Feedback::kNone, rule.read = Read::kPlain,
  rule.precond = Precond::kNone;
  rule.normaliser = Normaliser::kNone;
  FrontScalars<float> s;
  s.q2 = q2, s.k2 = k2, s.beta = gates.beta, s.erase = gates.erase, s.write = gates.write;
  return front_coefs(rule, x.scale, s);
}

// Of rules of which r or e are sums of the raw q and k (sums_of_rows()): the gates of a row as they lie in memory (0
// past the chunk's rows). So no load is waited for before the others are under way.
struct GateBits : TokenScalars<uint32_t> {
  uint32_t erase = 0, write = 0;
};
FW_DEVICE GateBits gate_bits(const Problem& x, const ChunkCoord& coord, int row) {
  GateBits s;
  if (row < 0 || row >= coord.span.rows) return s;
  const auto load = [&](const TokenArg& a, uint32_t& bits) {
    const void* at = row_address(a, coord, row);
    if (a.bf16 != 0) {
      bits = *static_cast<const uint16_t*>(at);
    } else {
      bits = *static_cast<const uint32_t*>(at);
    }
  };
  const Rule& rule = x.rule;
  for_each_scalar(rule, load, x.in, s);
  if (rule.uses_erase_gate() && rule.erase == Gate::kScalar) load(x.in.erase_gate, s.erase);
  if (rule.write == Gate::kScalar) load(x.in.write_gate, s.write);
  return s;
}
FW_DEVICE FrontCoefs<float> sum_coefs(const Problem& x, const ChunkCoord& coord, int row, const GateBits& gates,
                                      float q2, float k2) {
  const auto value = [](const TokenArg& a, uint32_t bits) { return bits_float(bits << (a.bf16 != 0 ? 16 : 0)); };
  const auto form = [&](const GateLaw<float>& law, float* all, float& y) {
    if (law.given == GateActivation::kValue || row >= coord.span.rows) return;
    y = fused_scalar(law, y);
    store_scalar(x, coord, row, all, y);
  };
  Rule rule = x.rule;
  rule.erase_key = EraseKey::kTied, rule.precond = Precond::kNone, rule.normaliser = Normaliser::kNone;
  FrontScalars<float> s;
  s.q2 = q2, s.k2 = k2;
  if (rule.feedback == Feedback::kFixed) s.lambda = static_cast<float>(rule.lambda);
  for_each_scalar(
      rule, [&](const TokenArg& a, uint32_t bits, float& to) { to = value(a, bits); }, x.in, gates, s);
  if (rule.uses_erase_gate() && rule.erase == Gate::kScalar) s.erase = value(x.in.erase_gate, gates.erase);
  if (rule.write == Gate::kScalar) s.write = value(x.in.write_gate, gates.write);
  form(x.fused.beta, x.fused.numbers.beta, s.beta), form(x.fused.lambda, x.fused.numbers.lambda, s.lambda);
  form(x.fused.erase_gate, x.fused.numbers.erase_gate, s.erase),
      form(x.fused.write_gate, x.fused.numbers.write_gate, s.write);
  return front_coefs(rule, x.scale, s);
}

// Calls body(r, streams) for the rows of the warp, from memory.
template <int kN, class Body>
FW_DEVICE void for_each_row(const Problem& x, const ChunkCoord& coord, const RowScaleCoefs* coefs, Body&& body) {
  coefs += warp_index() * kWarpRows;
  const FrontRows rows = front_rows(x, coord.n, coord.hv);
  FW_NO_UNROLL
  for (int r = 0; r < kWarpRows; ++r) {
    FrontCoefs<float> c;
    c.r_q = coefs[r].read_erase.x, c.r_k = coefs[r].read_erase.y, c.e_k = coefs[r].read_erase.z,
    c.e_q = coefs[r].read_erase.w;
    c.e_p = coefs[r].lo.x, c.w_k = coefs[r].lo.y;
    body(r, key_streams(x, c, row_from_memory<kN>(x, rows, coord, r)));
  }
}
// The same of fetched rows, unrolled. body(r) may overwrite the row.
template <int kN, bool kPlain, class Precond, class Body>
FW_DEVICE void for_each_fetched_row(const Problem& x, const ChunkCoord& coord, const RawMatrices& raw,
                                    Precond&& precond, const RowScaleCoefs* coefs, Body&& body) {
  constexpr bool kMakes = std::remove_reference_t<Precond>::kMakes;
  coefs += warp_index() * kWarpRows;
  const bool mixed = !kPlain && (x.rule.feedback != Feedback::kNone || x.rule.read != Read::kPlain),
             gate = channel_erase(x.rule);
  const bool own_key = !kPlain && !kMakes && x.rule.uses_erase_key();
  const bool on_read = x.rule.preconditions_read();
  MRows m_all;
  bool makes = false;
  if constexpr (!kPlain) m_all = m_rows(x, coord, static_cast<int>(lane_index()) * kN);
  if constexpr (kMakes) {
    makes = precond.shared != nullptr;
    precond.start();
  }
  FW_UNROLL
  for (int r = 0; r < kWarpRows; ++r) {
    const float4 c = coefs[r].read_erase;
    const float4 lo = coefs[r].lo;
    const float w_k = lo.y;
    float q[kN], k[kN];
    fetched_row(raw.q, r, q);
    fetched_row(raw.k, r, k);
    KeyStreams<kN> s;
    FW_UNROLL
    for (int j = 0; j < kN; ++j) s.r[j] = c.x * q[j], s.e[j] = c.z * k[j], s.w[j] = w_k * k[j];
    if (mixed) {
      FW_UNROLL
      for (int j = 0; j < kN; ++j) s.r[j] += c.y * k[j], s.e[j] += c.w * q[j];
    }
    if (gate) {
      float b[kN];
      fetched_row(raw.b, r, b);
      FW_UNROLL
      for (int j = 0; j < kN; ++j) s.e[j] *= b[j];
    }
    if (own_key) {
      float p[kN];
      fetched_row(raw.b, r, p);
      FW_UNROLL
      for (int j = 0; j < kN; ++j) s.e[j] += lo.x * p[j];
    }
    if (!kPlain && (makes || m_all.first != nullptr)) {
      float m[kN];
      if constexpr (kMakes) {
        if (makes) precond.next(lo.x, lo.w, k, m);
      }
      if (!makes) load_m(m_all, r, m);
      FW_UNROLL
      for (int j = 0; j < kN; ++j) s.r[j] *= on_read ? m[j] : 1.0f, s.w[j] *= on_read ? 1.0f : m[j];
    }
    body(r, s);
  }
}

template <int kN, bool kPlain, class Body>
FW_DEVICE void for_each_fetched_row(const Problem& x, const ChunkCoord& coord, const RawMatrices& raw,
                                    const RowScaleCoefs* coefs, Body&& body) {
  for_each_fetched_row<kN, kPlain>(x, coord, raw, NoPrecondRows(), coefs, static_cast<Body&&>(body));
}

}  // namespace fw::cuda
