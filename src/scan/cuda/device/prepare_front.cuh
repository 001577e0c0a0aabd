// The front of a chunk of 64 tokens of one value head on 8 warps: a warp has 8 neighbouring rows, a lane kN = key / 32
// neighbouring channels of each. Sums over the channels of the eight rows are made in one go, and each lane works out the
// coefficients (rule/front.h) of one row only.
#pragma once

#include "scan/cuda/device/front_rows.cuh"
#include "scan/cuda/device/panels.cuh"

namespace fw::cuda {

inline constexpr int kWarpRows = 8;
inline constexpr int kPrepareThreads = 256;

// Rows first .. first + rows - 1 of a sequence are the chunk's.
struct ChunkSpan {
  int first, rows;
};

// kN neighbouring bf16 numbers as they lie in memory.
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

// Which chunk of which sequence and head a block has.
struct ChunkPlace {
  int64_t item;  // chunk * HV + value head
  int n, hv;
  ChunkSpan span;
};
FW_DEVICE ChunkPlace chunk_place(const Problem& x) {
  ChunkPlace p;
  p.item = block_index_x();
  const int chunk = static_cast<int>(block_index_x() / static_cast<unsigned>(x.HV));
  p.hv = static_cast<int>(block_index_x() % static_cast<unsigned>(x.HV));
  p.n = sequence_of_chunk(x.sequences, chunk);
  p.span.first = (chunk - first_chunk(x.sequences, p.n)) * kChunk;
  const int left = sequence_length(x.sequences, p.n) - p.span.first;
  p.span.rows = left < kChunk ? left : kChunk;
  return p;
}

// Byte of this lane's channels of row r of its warp in a matrix of 32 kN columns.
template <int kN>
FW_DEVICE uint32_t lane_offset(int r) {
  const int lane = static_cast<int>(lane_index()), row = static_cast<int>(warp_index()) * kWarpRows + r, column = lane * kN;
  return static_cast<uint32_t>((column >> 6) * static_cast<int>(kPanelBytes) + row * 128 + ((((column >> 3) ^ r) & 7) << 4) + (column & 7) * 2);
}

// This lane's channels of row r of the warp: 0 past the chunk's rows and past K.
template <int kN>
FW_DEVICE void read_row_from_memory(const Problem& x, const TokenArg& tensor, const ChunkPlace& place, int r, float (&y)[kN]) {
  const int row = static_cast<int>(warp_index()) * kWarpRows + r;
  FW_UNROLL
  for (int j = 0; j < kN; ++j) y[j] = 0;
  if (row < place.span.rows) {
    load_channels(rows_of(tensor, x.sequences, place.n, place.hv), place.span.first + row, static_cast<int>(lane_index()) * kN, x.K, y);
  }
}

// Rows of a tensor on their way to `matrix` in shared memory (as panels), where the streams that are made of them will lie: a lane
// reads its channels of a row before it writes there. Held: bf16 rows with all channels and aligned; others are read from memory
// whenever they are wanted.
struct RawRows {
  const char* matrix = nullptr;
  bool held = false;
};

template <int kN>
FW_DEVICE RawRows fetch_rows(const Rows& rows, const ChunkSpan& span, int dim, char* matrix) {
  const uintptr_t bits = reinterpret_cast<uintptr_t>(rows.data) | static_cast<uintptr_t>(rows.stride * 2);
  const RawRows raw{matrix, rows.bf16 != 0 && dim == 32 * kN && (bits & 15) == 0};
  if (raw.held) {
    constexpr int kGranules = 4 * kN, kRows = 32 / kGranules;  // of a row; rows that the warp fetches at a time
    const int lane = static_cast<int>(lane_index()), granule = lane % kGranules;
    const uint32_t to = shared_address(matrix);
    FW_UNROLL
    for (int r = 0; r < kWarpRows; r += kRows) {
      const int row = static_cast<int>(warp_index()) * kWarpRows + r + lane / kGranules;
      const char* from = rows.data + (static_cast<int64_t>(span.first + row) * rows.stride + granule * 8) * 2;
      cp_async_16(to + granule_offset(row, granule), row < span.rows ? from : rows.data, row < span.rows);
    }
  }
  return raw;
}

// Row r of the warp: 0 past the chunk's rows.
template <int kN>
FW_DEVICE void read_row(const RawRows& raw, const Problem& x, const TokenArg& tensor, const ChunkPlace& place, int r, float (&y)[kN]) {
  if (raw.held) {
    const PackedChannels<kN> packed = load_packed<kN>(raw.matrix + lane_offset<kN>(r));
    FW_UNROLL
    for (int j = 0; j < kN / 2; ++j) y[2 * j] = bf16_low(packed.words[j]), y[2 * j + 1] = bf16_high(packed.words[j]);
  } else {
    read_row_from_memory(x, tensor, place, r, y);
  }
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

// The raw rows of the key side that are fetched ahead.
struct ChunkFront {
  RawRows q, k, b;
};

FW_DEVICE bool channel_erase(const Rule& rule) { return rule.uses_erase_gate() && rule.erase == Gate::kChannel; }

// Matrices: where q, k and (rules that have it) the erase gate go. Before they are read: front_arrived.
template <int kN>
FW_DEVICE ChunkFront fetch_front(const Problem& x, const ChunkPlace& place, char* q, char* k, char* b) {
  ChunkFront f;
  f.k = fetch_rows<kN>(rows_of(x.in.k, x.sequences, place.n, place.hv), place.span, x.K, k);
  f.q = fetch_rows<kN>(rows_of(x.in.q, x.sequences, place.n, place.hv), place.span, x.K, q);
  if (channel_erase(x.rule)) f.b = fetch_rows<kN>(rows_of(x.in.erase_gate, x.sequences, place.n, place.hv), place.span, x.K, b);
  cp_async_commit();
  return f;
}
FW_DEVICE void front_arrived() {
  cp_async_wait<0>();
  sync_warp();
}

// M of row r of the warp, 1 without a preconditioner.
template <int kN>
FW_DEVICE void read_m(const Problem& x, const ChunkPlace& place, int r, float (&m)[kN]) {
  const int row = static_cast<int>(warp_index()) * kWarpRows + r;
  FW_UNROLL
  for (int j = 0; j < kN; ++j) m[j] = 1;
  if (x.m == nullptr || row >= place.span.rows) return;
  const int64_t stride = static_cast<int64_t>(x.H) * x.K;
  const float* first = x.m + (first_token(x.sequences, place.n) * x.H + place.hv / x.group) * x.K;
  const Rows rows{reinterpret_cast<char*>(const_cast<float*>(first)), stride, 0};
  load_channels(rows, place.span.first + row, static_cast<int>(lane_index()) * kN, x.K, m);
}

// Mean over the channels of a gate, of the rows of the warp: that of row lane / 4.
FW_DEVICE float mean_gate(const Rows& rows, const ChunkSpan& span, int dim) {
  const int first = static_cast<int>(warp_index()) * kWarpRows;
  float sums[kWarpRows];
  FW_UNROLL
  for (int r = 0; r < kWarpRows; ++r) {
    sums[r] = 0;
    if (first + r < span.rows) {
      for (int i = static_cast<int>(lane_index()); i < dim; i += 32) sums[r] += load_element(rows, span.first + first + r, i);
    }
  }
  return sum_rows(sums) / static_cast<float>(dim);
}

template <int kN>
FW_DEVICE float square_sum(const float (&x)[kN]) {
  float sum = 0;
  FW_UNROLL
  for (int j = 0; j < kN; ++j) sum += x[j] * x[j];
  return sum;
}

// The coefficients of a row as they lie in shared memory; 0 past the chunk's rows.
struct RowCoefs {
  float4 read_erase;  // r_q, r_k, e_k, e_q
  float4 rest;        // e_p, w_k, z_v, 0
};

// Coefficients of the warp's rows, into coefs[64]; the warp itself may read its own afterwards.
template <int kN>
FW_DEVICE void make_coefs(const Problem& x, const ChunkFront& f, const ChunkPlace& place, RowCoefs* coefs) {
  const Rule& rule = x.rule;
  const int lane = static_cast<int>(lane_index()), row = static_cast<int>(warp_index()) * kWarpRows + lane / 4;
  const bool valid = row < place.span.rows;
  const FrontRows rows = front_rows(x, place.n, place.hv);
  FrontScalars<float> s;
  if (valid) front_gates(x, rows, place.span.first + row, s);

  float part[kWarpRows], y[kN];
  if (rule.q_norm == Norm::kL2) {
    FW_UNROLL
    for (int r = 0; r < kWarpRows; ++r) {
      read_row(f.q, x, x.in.q, place, r, y);
      part[r] = square_sum(y);
    }
    s.q2 = sum_rows(part);
  }
  if (rule.k_norm == Norm::kL2 || rule.gain_uses_key_norm()) {
    FW_UNROLL
    for (int r = 0; r < kWarpRows; ++r) {
      read_row(f.k, x, x.in.k, place, r, y);
      part[r] = square_sum(y);
    }
    s.k2 = sum_rows(part);
  }
  if (rule.uses_erase_key() && rule.k_norm == Norm::kL2) {
    FW_UNROLL
    for (int r = 0; r < kWarpRows; ++r) {
      read_row_from_memory(x, x.in.erase_key, place, r, y);
      part[r] = square_sum(y);
    }
    s.p2 = sum_rows(part);
  }
  if (rule.normaliser != Normaliser::kNone) {
    FW_UNROLL
    for (int r = 0; r < kWarpRows; ++r) {
      float m[kN];
      read_row(f.k, x, x.in.k, place, r, y);
      read_m(x, place, r, m);
      part[r] = 0;
      FW_UNROLL
      for (int j = 0; j < kN; ++j) part[r] += m[j] * y[j] * y[j];
    }
    s.kmk = sum_rows(part);
  }
  if (rule.uses_erase_gate() && rule.erase == Gate::kAveraged) s.erase = mean_gate(rows.b, place.span, x.K);
  if (rule.write == Gate::kAveraged) s.write = mean_gate(rows.c, place.span, x.V);

  const FrontCoefs<float> c = front_coefs(rule, x.scale, s);
  if (lane % 4 == 0) {
    coefs[row].read_erase = valid ? make_float4(c.r_q, c.r_k, c.e_k, c.e_q) : make_float4(0, 0, 0, 0);
    coefs[row].rest = valid ? make_float4(c.e_p, c.w_k, c.z_v, 0) : make_float4(0, 0, 0, 0);
  }
  sync_warp();
}

// Whether r, e and w are multiples of q, k and k.
FW_DEVICE bool plain_streams(const Problem& x) {
  return !channel_erase(x.rule) && !x.rule.uses_erase_key() && x.rule.feedback == Feedback::kNone && x.rule.read == Read::kPlain && x.m == nullptr;
}

// r, e and w of row r of the warp; m: its row of M.
template <int kN>
FW_DEVICE KeyStreams<kN> row_streams(const Problem& x, const ChunkFront& f, const ChunkPlace& place, const RowCoefs* coefs, int r, const float (&m)[kN]) {
  const RowCoefs c = coefs[static_cast<int>(warp_index()) * kWarpRows + r];
  RawKeyRow<kN> row;
  read_row(f.q, x, x.in.q, place, r, row.q);
  read_row(f.k, x, x.in.k, place, r, row.k);
  if (plain_streams(x)) {
    KeyStreams<kN> s;
    FW_UNROLL
    for (int j = 0; j < kN; ++j) {
      s.r[j] = c.read_erase.x * row.q[j];
      s.e[j] = c.read_erase.z * row.k[j];
      s.w[j] = c.rest.y * row.k[j];
    }
    return s;
  }
  FW_UNROLL
  for (int j = 0; j < kN; ++j) row.p[j] = 0, row.b[j] = 1, row.m[j] = m[j];
  if (x.rule.uses_erase_key()) read_row_from_memory(x, x.in.erase_key, place, r, row.p);
  if (channel_erase(x.rule)) read_row(f.b, x, x.in.erase_gate, place, r, row.b);
  FrontCoefs<float> all;
  all.r_q = c.read_erase.x, all.r_k = c.read_erase.y, all.e_k = c.read_erase.z, all.e_q = c.read_erase.w;
  all.e_p = c.rest.x, all.w_k = c.rest.y, all.z_v = c.rest.z;
  return key_streams(x, all, row);
}

}  // namespace fw::cuda
