// The front of a chunk of 64 tokens of one value head on 8 warps: a warp has 8 neighbouring rows, a lane kN = key / 32
// neighbouring channels of each. Sums over the channels of the eight rows are made in one go, and each lane works out the
// coefficients (rule/front.h) of one row only.
#pragma once

#include "scan/cuda/device/front_rows.cuh"

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

// This lane's channels of its warp's rows. Held in registers where the tensor is bf16 with all of the channels and aligned rows;
// else read again whenever they are wanted.
template <int kN>
struct RowTile {
  Rows rows;
  PackedChannels<kN> packed[kWarpRows];
  bool held = false;
};

template <int kN>
FW_DEVICE RowTile<kN> load_tile(const Rows& rows, const ChunkSpan& span, int dim) {
  RowTile<kN> tile;
  tile.rows = rows;
  const uintptr_t bits = reinterpret_cast<uintptr_t>(rows.data) | static_cast<uintptr_t>(rows.stride * 2);
  tile.held = rows.bf16 != 0 && dim == 32 * kN && (bits & (2 * kN - 1)) == 0;
  const int row = static_cast<int>(warp_index()) * kWarpRows;
  const char* from = rows.data + (static_cast<int64_t>(span.first + row) * rows.stride + static_cast<int>(lane_index()) * kN) * 2;
  FW_UNROLL
  for (int r = 0; r < kWarpRows; ++r) {
    tile.packed[r] = {};
    if (tile.held && row + r < span.rows) tile.packed[r] = load_packed<kN>(from + r * rows.stride * 2);
  }
  return tile;
}

// Row r of the warp: 0 past the chunk's rows.
template <int kN>
FW_DEVICE void tile_row(const RowTile<kN>& tile, const ChunkSpan& span, int dim, int r, float (&x)[kN]) {
  if (tile.held) {
    FW_UNROLL
    for (int j = 0; j < kN / 2; ++j) x[2 * j] = bf16_low(tile.packed[r].words[j]), x[2 * j + 1] = bf16_high(tile.packed[r].words[j]);
  } else {
    const int row = static_cast<int>(warp_index()) * kWarpRows + r;
    FW_UNROLL
    for (int j = 0; j < kN; ++j) x[j] = 0;
    if (row < span.rows) load_channels(tile.rows, span.first + row, static_cast<int>(lane_index()) * kN, dim, x);
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

template <int kN>
struct ChunkFront {
  FrontRows rows;
  RowTile<kN> q, k, b;
};

template <int kN>
FW_DEVICE ChunkFront<kN> load_front(const Problem& x, const ChunkSpan& span, int n, int hv) {
  ChunkFront<kN> f;
  f.rows = front_rows(x, n, hv);
  f.q = load_tile<kN>(f.rows.q, span, x.K);
  f.k = load_tile<kN>(f.rows.k, span, x.K);
  const bool gate = x.rule.uses_erase_gate() && x.rule.erase == Gate::kChannel;
  if (gate) f.b = load_tile<kN>(f.rows.b, span, x.K);
  return f;
}

// The rows of the key side that are not held in registers; neutral where a rule has none.
template <int kN>
FW_DEVICE void load_erase_key(const Problem& x, const ChunkFront<kN>& f, const ChunkSpan& span, int r, float (&p)[kN]) {
  const int row = static_cast<int>(warp_index()) * kWarpRows + r;
  FW_UNROLL
  for (int j = 0; j < kN; ++j) p[j] = 0;
  if (x.rule.uses_erase_key() && row < span.rows) load_channels(f.rows.p, span.first + row, static_cast<int>(lane_index()) * kN, x.K, p);
}
template <int kN>
FW_DEVICE void load_m(const Problem& x, const ChunkFront<kN>& f, const ChunkSpan& span, int r, float (&m)[kN]) {
  const int row = static_cast<int>(warp_index()) * kWarpRows + r;
  FW_UNROLL
  for (int j = 0; j < kN; ++j) m[j] = 1;
  if (f.rows.m == nullptr || row >= span.rows) return;
  const Rows rows{reinterpret_cast<char*>(const_cast<float*>(f.rows.m)), f.rows.m_stride, 0};
  load_channels(rows, span.first + row, static_cast<int>(lane_index()) * kN, x.K, m);
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

// The coefficients of a row as they lie in shared memory; 0 past the chunk's rows.
struct RowCoefs {
  float4 read_erase;  // r_q, r_k, e_k, e_q
  float4 rest;        // e_p, w_k, z_v, 0
};

// Coefficients of the warp's rows, into coefs[64]; the warp itself may read its own afterwards.
template <int kN>
FW_DEVICE void make_coefs(const Problem& x, const ChunkFront<kN>& f, const ChunkSpan& span, RowCoefs* coefs) {
  const Rule& rule = x.rule;
  FrontScalars<float> s;
  float part[kWarpRows], a[kN], b[kN];
  if (rule.q_norm == Norm::kL2) {
    FW_UNROLL
    for (int r = 0; r < kWarpRows; ++r) {
      tile_row(f.q, span, x.K, r, a);
      part[r] = 0;
      FW_UNROLL
      for (int j = 0; j < kN; ++j) part[r] += a[j] * a[j];
    }
    s.q2 = sum_rows(part);
  }
  if (rule.k_norm == Norm::kL2 || rule.gain_uses_key_norm()) {
    FW_UNROLL
    for (int r = 0; r < kWarpRows; ++r) {
      tile_row(f.k, span, x.K, r, a);
      part[r] = 0;
      FW_UNROLL
      for (int j = 0; j < kN; ++j) part[r] += a[j] * a[j];
    }
    s.k2 = sum_rows(part);
  }
  if (rule.uses_erase_key() && rule.k_norm == Norm::kL2) {
    FW_UNROLL
    for (int r = 0; r < kWarpRows; ++r) {
      load_erase_key(x, f, span, r, a);
      part[r] = 0;
      FW_UNROLL
      for (int j = 0; j < kN; ++j) part[r] += a[j] * a[j];
    }
    s.p2 = sum_rows(part);
  }
  if (rule.normaliser != Normaliser::kNone) {
    FW_UNROLL
    for (int r = 0; r < kWarpRows; ++r) {
      tile_row(f.k, span, x.K, r, a);
      load_m(x, f, span, r, b);
      part[r] = 0;
      FW_UNROLL
      for (int j = 0; j < kN; ++j) part[r] += b[j] * a[j] * a[j];
    }
    s.kmk = sum_rows(part);
  }
  if (rule.uses_erase_gate() && rule.erase == Gate::kAveraged) s.erase = mean_gate(f.rows.b, span, x.K);
  if (rule.write == Gate::kAveraged) s.write = mean_gate(f.rows.c, span, x.V);

  const int lane = static_cast<int>(lane_index()), row = static_cast<int>(warp_index()) * kWarpRows + lane / 4;
  const bool valid = row < span.rows;
  if (valid) front_gates(x, f.rows, span.first + row, s);
  const FrontCoefs<float> c = front_coefs(rule, x.scale, s);
  if (lane % 4 == 0) {
    coefs[row].read_erase = valid ? make_float4(c.r_q, c.r_k, c.e_k, c.e_q) : make_float4(0, 0, 0, 0);
    coefs[row].rest = valid ? make_float4(c.e_p, c.w_k, c.z_v, 0) : make_float4(0, 0, 0, 0);
  }
  sync_warp();
}

// Whether r, e and w are multiples of q, k and k.
FW_DEVICE bool plain_streams(const Rule& rule, const float* m) {
  return !(rule.uses_erase_gate() && rule.erase == Gate::kChannel) && !rule.uses_erase_key() && rule.feedback == Feedback::kNone &&
         rule.read == Read::kPlain && m == nullptr;
}

// r, e and w of row r of the warp.
template <int kN>
FW_DEVICE KeyStreams<kN> row_streams(const Problem& x, const ChunkFront<kN>& f, const ChunkSpan& span, const RowCoefs* coefs, int r) {
  const RowCoefs c = coefs[static_cast<int>(warp_index()) * kWarpRows + r];
  RawKeyRow<kN> row;
  tile_row(f.q, span, x.K, r, row.q);
  tile_row(f.k, span, x.K, r, row.k);
  if (plain_streams(x.rule, f.rows.m)) {
    KeyStreams<kN> s;
    FW_UNROLL
    for (int j = 0; j < kN; ++j) {
      s.r[j] = c.read_erase.x * row.q[j];
      s.e[j] = c.read_erase.z * row.k[j];
      s.w[j] = c.rest.y * row.k[j];
    }
    return s;
  }
  load_erase_key(x, f, span, r, row.p);
  load_m(x, f, span, r, row.m);
  FW_UNROLL
  for (int j = 0; j < kN; ++j) row.b[j] = 1;
  if (x.rule.uses_erase_gate() && x.rule.erase == Gate::kChannel) tile_row(f.b, span, x.K, r, row.b);
  FrontCoefs<float> all;
  all.r_q = c.read_erase.x, all.r_k = c.read_erase.y, all.e_k = c.read_erase.z, all.e_q = c.read_erase.w;
  all.e_p = c.rest.x, all.w_k = c.rest.y, all.z_v = c.rest.z;
  return key_streams(x, all, row);
}

}  // namespace fw::cuda
