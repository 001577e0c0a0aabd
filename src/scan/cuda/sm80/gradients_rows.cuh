// gradients() of kernels.h by mma.sync, for rules of plain_streams() without a preconditioner: r, e and w are raw rows
// of q and k times a scale a row. So there are no tiles of streams, and the products take q and k as they are. The
// scales are in the rows of the accumulators and in two matrices (sm90/gradients/scalar/rows.cuh has the mathematics):
//   A = r_q p w_k     B = e_k t w_k
//   q takes  gamma r_q dO S0^T + A k      k takes  -gamma e_k dZ S0^T + B k  and  a w_k R D^T + A^T q + B^T k
//
// 4 kTileK threads, which do everything together; a block takes every grid-th chunk and value head. Shared memory holds
// q and k, and a stage with what a block of 64 value columns loads. Where the scans have not left R and dZ, A and P are
// over q and k until both are made of them. q, k and the first stage of the next work tile are copied while dq and dk
// are stored.
#pragma once

#include "scan/cuda/common/front/plain.cuh"
#include "scan/cuda/gradients/rows.cuh"
#include "scan/cuda/sm80/gradient_loads.cuh"

namespace fw::cuda {

template <WarpGradientTraits kTraits>
struct RowGradientShape {
  static constexpr int kTileK = kTraits.k_tile;
  static constexpr bool kMmaSync = true, kChannel = false, kDelta = kTraits.is_delta, kStreams = false, kGates = false,
                        kUnscaled = kTraits.has_unscaled_keys, kWhole = true;
  static constexpr bool kHalf = kTraits.has_half_of_keys;
  static_assert(!kHalf || (kTileK == kHalfTileK && !kUnscaled));
  static constexpr bool kSumsHeads = false, kNoDecayFix = kUnscaled, kFollows = false;
  static constexpr Residuals kResiduals = kUnscaled ? Residuals::kAlways : Residuals::kOfRule;
  static constexpr int kThreads = 4 * kTileK, kWarps = kThreads / 32, kGroups = kTileK / 32;
  static constexpr int kBlocksPerSm = 1;
  static constexpr double kTileTime = 0;  // kFollows

  // numbers from one state in memory to the next
  static constexpr int64_t kStateStep = 64 * (kHalf ? kMaxTileK : kTileK);
  static constexpr int kStateBytes = 64 * kTileK * 2, kKeyBytes = 2 * kStateBytes;
  static constexpr int kQ = 0, kK = kStateBytes;
  static constexpr int kA = 0, kP = kA + kSw128Bytes, kDR = kP + kSw128Bytes, kMadeEnd = kDR + kSw128Bytes;
  static constexpr int kStage = kKeyBytes > kMadeEnd ? kKeyBytes : kMadeEnd;
  static constexpr int kW = kStage, kV = kW + kSw128Bytes, kOut = kV + kSw128Bytes, kState = kOut + kSw128Bytes,
                       kDState = kState + kStateBytes, kStageEnd = kDState + kStateBytes;
  // The matrices A and B above, once the last stage has been read.
  static constexpr int kOfQ = kW, kOfK = kV;

  // G of two work tiles. Arrays of 64 floats: the scales, |q|^2, |k|^2, the gain, the gradient of z's scale (unscaled
  // keys: v.dz).
  static constexpr int kG = kStageEnd, kRq = kG + 512, kEk = kRq + 256, kWk = kEk + 256, kZv = kWk + 256,
                       kQ2 = kZv + 256, kK2 = kQ2 + 256, kBeta = kK2 + 256, kDZv = kBeta + 256, kVDz = kDZv + 256;
  static constexpr int kSums = 3;  // of q, k and k times what they take
  static constexpr int kPartial = kVDz + (kNoDecayFix ? 256 : 0), kWarpSums = kPartial + kSums * kGroups * 256,
                       kCoords = kWarpSums + 4 * kWarps, kBytes = kCoords + kCoordBytes;
  static_assert(kCoords % 16 == 0 && kBytes <= kSm80SharedBytes);
};

namespace row_gradients {

// What the scans have left is R and dZ: never where keys are unscaled or have more than 128 channels.
template <class Shape>
FW_DEVICE bool is_made(const WorkTile<Shape>& c) {
  return Shape::kDelta && !Shape::kUnscaled && !Shape::kHalf && c.args.v_is_dz && c.solved();
}

template <class Shape>
FW_DEVICE void load_keys(const WorkTile<Shape>& c, int work_tile) {
  const Problem& x = c.args.problem;
  copy_rows<Shape::kTileK>(c, c.rows_at(x.in.q, work_tile), work_tile, 0, x.K, Shape::kQ);
  copy_rows<Shape::kTileK>(c, c.rows_at(x.in.k, work_tile), work_tile, 0, x.K, Shape::kK);
}
// Bits of the numbers that a thread loads a work tile ahead: beta of its row, and (the last warp) two log-decays.
struct RowBits {
  uint32_t beta = 0, g[2] = {};
};
template <class Shape>
struct RowLanes {
  static constexpr int kLanes = Shape::kTileK / 16;
};
template <class Shape>
FW_DEVICE RowBits load_rows_ahead(const WorkTile<Shape>& c, int work_tile) {
  RowBits y;
  const Problem& x = c.args.problem;
  const int rows = c.rows(work_tile), row = static_cast<int>(static_cast<unsigned>(c.thread) / RowLanes<Shape>::kLanes);
  const auto bits = [](const Rows& from, int at) {
    return load_bits(from.bf16 != 0, from.data + at * from.stride * (from.bf16 != 0 ? 2 : 4));
  };
  if (x.rule.uses_beta() && row < rows) y.beta = bits(c.rows_at(x.in.beta, work_tile), row);
  if (c.warp == Shape::kWarps - 1 && x.rule.decay == Decay::kScalar) {
    const Rows g = c.rows_at(x.in.g, work_tile);
    FW_UNROLL
    for (int i = 0; i < 2; ++i) {
      if (2 * c.lane + i < rows) y.g[i] = bits(g, 2 * c.lane + i);
    }
  }
  return y;
}

// G, and the scales of rows: kLanes lanes a row.
template <class Shape>
FW_DEVICE void make_row_scales(const WorkTile<Shape>& c, int work_tile, const RowBits& numbers) {
  constexpr int kLanes = RowLanes<Shape>::kLanes;
  const Problem& x = c.args.problem;
  const unsigned thread = static_cast<unsigned>(c.thread);
  const int row = static_cast<int>(thread / kLanes), lane = static_cast<int>(thread % kLanes), rows = c.rows(work_tile);
  FrontScalars<float> s;
  if constexpr (Shape::kHalf) {
    const float2 squares = squares_of_row(c, work_tile, row);
    s.q2 = squares.x, s.k2 = squares.y;
  } else {
    float q2 = 0, k2 = 0;
    FW_UNROLL
    for (int i = 0; i < 2; ++i) {
      const char* at = c.memory + sw128_offset(row, 8 * lane + i * (Shape::kTileK / 2));
      const uint4 q = *reinterpret_cast<const uint4*>(at + Shape::kQ),
                  k = *reinterpret_cast<const uint4*>(at + Shape::kK);
      q2 = dot_16_bytes(q, q, q2), k2 = dot_16_bytes(k, k, k2);
    }
    s.q2 = group_sum<kLanes>(q2), s.k2 = group_sum<kLanes>(k2);
  }
  if (lane == 0) {
    if (x.rule.uses_beta()) s.beta = value_of_bits(x.in.beta.bf16 != 0, numbers.beta);
    FrontCoefs<float> f;
    if (row < rows) f = front_coefs(reduced_rule<true>(x.rule), x.scale, s);
    if constexpr (Shape::kUnscaled) f = unscaled_coefs(f).primed;
    c.floats(Shape::kRq)[row] = f.r_q, c.floats(Shape::kWk)[row] = f.w_k, c.floats(Shape::kZv)[row] = f.z_v;
    // Not 0, so that what it multiplies can be found again.
    c.floats(Shape::kEk)[row] = fabsf(f.e_k) > 1e-20f ? f.e_k : 1e-20f;
    c.floats(Shape::kQ2)[row] = s.q2, c.floats(Shape::kK2)[row] = s.k2, c.floats(Shape::kBeta)[row] = s.beta;
  }
  if (c.warp != Shape::kWarps - 1) return;
  float2 g = make_float2(0, 0);
  const bool first = 2 * c.lane < rows, second = 2 * c.lane + 1 < rows;
  if (x.rule.decay == Decay::kScalar) {
    const bool bf16 = x.in.g.bf16 != 0;
    g = make_float2(value_of_bits(bf16, numbers.g[0]), value_of_bits(bf16, numbers.g[1]));
  } else if (x.rule.decay == Decay::kConstant) {
    g.x = g.y = log1pf(-exp2f(-5.0f - static_cast<float>(c.hv(work_tile))));
  }
  sum_decay(c, work_tile, make_float2(first ? g.x : 0.0f, second ? g.y : 0.0f));
}

// The next block of values comes into the L2 cache, a line of 128 bytes a thread. After a work tile's last block that
// is the first one of the next work tile, with its q and k.
template <class Shape>
FW_DEVICE void prefetch_next(const WorkTile<Shape>& c, int work_tile, int block) {
  constexpr int kStateLines = Shape::kStateBytes / 128;
  const GradientArgs& x = c.args;
  const bool last = block + 1 == c.blocks;
  if (last) ++work_tile, block = 0;
  if (!last) ++block;
  if (!c.has(work_tile)) return;
  const int64_t tile = c.tile(work_tile) * c.blocks + block;
  FW_NO_UNROLL
  for (int line = c.thread; line < 2 * (64 + kStateLines) + 64; line += Shape::kThreads) {
    int of = line;
    const char* from;
    if (of < 2 * kStateLines) {
      const bool second = of >= kStateLines;
      if (second) of -= kStateLines;
      from = reinterpret_cast<const char*>((second ? x.d_states : x.states) + tile * Shape::kStateStep) + 128 * of;
    } else if ((of -= 2 * kStateLines) < 128) {
      const bool second = of >= 64;
      from = reinterpret_cast<const char*>((second ? x.v : x.w) + tile * kSw128Elements) + 128 * (of & 63);
    } else {
      of -= 128;
      const Rows d_o = c.rows_at(x.d_o, work_tile);
      if (of >= c.rows(work_tile)) continue;
      from = d_o.data + 2 * (of * d_o.stride + block * kValueBlock);
    }
    prefetch_line(from);
  }
  if (!last) return;
  constexpr int kRowLines = Shape::kTileK / 64;
  static_assert(2 * kRowLines * kChunk <= Shape::kThreads);
  const int row = c.thread / kRowLines & (kChunk - 1), column = (c.thread & (kRowLines - 1)) * 64;
  const bool of_k = c.thread >= kRowLines * kChunk;
  if (c.thread >= 2 * kRowLines * kChunk || row >= c.rows(work_tile) || column >= x.problem.K) return;
  const Rows rows = c.rows_at(of_k ? x.problem.in.k : x.problem.in.q, work_tile);
  prefetch_line(rows.data + 2 * (row * rows.stride + column));
}

// Where ldmatrix finds the warp's 32 key columns of a tile [summed][key columns], 16 each.
template <class Shape>
struct KeyColumns {
  uint32_t at[2];

  FW_DEVICE explicit KeyColumns(const WorkTile<Shape>& c) {
    FW_UNROLL
    for (int n = 0; n < 2; ++n) at[n] = b_fragment_trans(c.base, 0, 4 * c.group() + 2 * n);
  }
};

// Adds a stage's values to the products: what start_value_products() does, with each operand loaded once.
template <class Shape>
FW_DEVICE void add_value_products(const WorkTile<Shape>& c, StreamSums& sums, PairSums<Shape>& pairs) {
  const KeyColumns<Shape> columns(c);
  const int row = 16 * c.block_row();
  FW_UNROLL
  for (int k = 0; k < 4; ++k) {
    const uint32_t left = a_fragment(c.base, row, 2 * k), right = b_fragment(c.base, pair_column(c), 2 * k);
    uint32_t o[4], z[4], r[4], b[4];
    ldmatrix_x4(o, left + Shape::kOut);
    if constexpr (Shape::kDelta) ldmatrix_x4(z, left + Shape::kV);
    ldmatrix_x4(r, left + Shape::kW);
    FW_UNROLL
    for (int n = 0; n < 2; ++n) {
      ldmatrix_x4_trans(b, columns.at[n] + Shape::kState + 2048 * k);
      mma_bf16(sums.r[2 * n], o, b[0], b[1]);
      mma_bf16(sums.r[2 * n + 1], o, b[2], b[3]);
      if constexpr (Shape::kDelta) {
        mma_bf16(sums.e[2 * n], z, b[0], b[1]);
        mma_bf16(sums.e[2 * n + 1], z, b[2], b[3]);
      }
      ldmatrix_x4_trans(b, columns.at[n] + Shape::kDState + 2048 * k);
      mma_bf16(sums.w[2 * n], r, b[0], b[1]);
      mma_bf16(sums.w[2 * n + 1], r, b[2], b[3]);
    }
    FW_UNROLL
    for (int n = 0; n < PairSums<Shape>::kTiles / 2; ++n) {
      ldmatrix_x4(b, right + Shape::kW + 2048 * n);
      mma_bf16(pairs.p[2 * n], o, b[0], b[1]);
      mma_bf16(pairs.p[2 * n + 1], o, b[2], b[3]);
      if constexpr (Shape::kDelta) {
        mma_bf16(pairs.t[2 * n], z, b[0], b[1]);
        mma_bf16(pairs.t[2 * n + 1], z, b[2], b[3]);
      }
    }
  }
}

// Eight values of v of a thread's row, where R does not make the gain's gradient.
template <class Shape>
FW_DEVICE uint4 load_values(const WorkTile<Shape>& c, int work_tile, int block, int row) {
  const int column = block * kValueBlock + (c.thread & 7) * 8;
  const Rows v = c.rows_at(c.args.problem.in.v, work_tile);
  if (row >= c.rows(work_tile) || column >= c.args.problem.V) return make_uint4(0, 0, 0, 0);
  return *reinterpret_cast<const uint4*>(v.data + 2 * (row * v.stride + column));
}

// dv of a row's eight columns; adds them times v, or times R, to the row's sums.
template <class Shape>
FW_DEVICE void store_values(const WorkTile<Shape>& c, int work_tile, int block, int row, const uint4& values,
                            ValueSums& sums) {
  const int in_block = (c.thread & 7) * 8, column = block * kValueBlock + in_block;
  if (row >= c.rows(work_tile) || column >= c.args.problem.V) return;
  const Rows dv = c.rows_at(c.args.grads.d.v, work_tile);
  const char* at = c.memory + sw128_offset(row, in_block);
  const float z_v = c.floats(Shape::kZv)[row];
  const uint4 words = *reinterpret_cast<const uint4*>(at + Shape::kV);
  uint4 with = values;
  if (c.residual_gains()) {
    if (gain_by_residual(z_v)) {
      with = *reinterpret_cast<const uint4*>(at + Shape::kW);
    } else if constexpr (!Shape::kNoDecayFix) {
      with = load_values(c, work_tile, block, row);
    }
  }
  sums.gain = dot_16_bytes(words, with, sums.gain);
  if constexpr (Shape::kNoDecayFix) sums.v_dz = dot_16_bytes(words, values, sums.v_dz);
  float dz[8];
  unpack_8(words, dz);
  FW_UNROLL
  for (int j = 0; j < 8; ++j) dz[j] *= z_v;
  *reinterpret_cast<uint4*>(dv.data + 2 * (row * dv.stride + column)) = pack_8(dz);
}

// A and B, in place of what the last stage was.
template <class Shape>
FW_DEVICE void store_matrices_of_pairs(const WorkTile<Shape>& c, int work_tile, const PairSums<Shape>& pairs) {
  const float *g = c.work_tile_floats(Shape::kG, work_tile), *w_k = c.floats(Shape::kWk);
  float g_row[2], r_q[2], e_k[2];
  FW_UNROLL
  for (int half = 0; half < 2; ++half) {
    const int row = c.row() + 8 * half;
    g_row[half] = g[row], r_q[half] = c.floats(Shape::kRq)[row], e_k[half] = -c.floats(Shape::kEk)[row];
  }
  FW_UNROLL
  for (int j = 0; j < PairSums<Shape>::kTiles; ++j) {
    const int column = pair_column(c) + 8 * j + 2 * (c.lane & 3);
    const float2 g_column = *reinterpret_cast<const float2*>(g + column),
                 of_w = *reinterpret_cast<const float2*>(w_k + column);
    FW_UNROLL
    for (int half = 0; half < 2; ++half) {
      const int row = c.row() + 8 * half;
      float p[2], t[2];
      FW_UNROLL
      for (int i = 0; i < 2; ++i) {
        const float fall = g_row[half] - (i == 0 ? g_column.x : g_column.y),
                    factor = exp2_fast(fall < 0.0f ? fall : 0.0f) * (i == 0 ? of_w.x : of_w.y);
        p[i] = row >= column + i ? pairs.p[j][2 * half + i] * factor * r_q[half] : 0.0f;
        t[i] = row > column + i ? pairs.t[j][2 * half + i] * factor * e_k[half] : 0.0f;
      }
      pair_fragment(c, Shape::kOfQ, half, j) = pack_bf16(p[0], p[1]);
      if constexpr (Shape::kDelta) pair_fragment(c, Shape::kOfK, half, j) = pack_bf16(t[0], t[1]);
    }
  }
}

// The warp's 16 rows x 32 columns of q or k, as it has them in products.
template <class Shape>
struct KeyWords {
  uint32_t x[2][4];

  FW_DEVICE KeyWords(const WorkTile<Shape>& c, int tile) {
    FW_UNROLL
    for (int n = 0; n < 2; ++n)
      ldmatrix_x4(x[n], a_fragment(c.base, 16 * c.block_row(), 4 * c.group() + 2 * n) + static_cast<uint32_t>(tile));
  }
  // i: 2 half, or the next column of it.
  FW_DEVICE float at(int j, int i) const {
    const uint32_t word = x[j / 2][2 * (j % 2) + i / 2];
    return i % 2 == 0 ? bf16_low(word) : bf16_high(word);
  }
};

// The products with the states times the scales. Returns this thread's part of the sum of w (.) the states' part of dw;
// by_rows (NoDecayState): of r (.) that of dr and e (.) that of de.
template <class Shape>
FW_DEVICE float scale_sums(const WorkTile<Shape>& c, int work_tile, const KeyWords<Shape>& k, bool by_rows,
                           StreamSums& sums) {
  const float* g = c.work_tile_floats(Shape::kG, work_tile);
  float dot = 0;
  FW_UNROLL
  for (int half = 0; half < 2; ++half) {
    const int row = c.row() + 8 * half;
    const float gamma = exp2_fast(g[row]), of_r = gamma * c.floats(Shape::kRq)[row],
                of_e = -gamma * c.floats(Shape::kEk)[row], of_w = exp2_fast(g[63] - g[row]) * c.floats(Shape::kWk)[row];
    FW_UNROLL
    for (int j = 0; j < 4; ++j) {
      FW_UNROLL
      for (int i = 2 * half; i < 2 * half + 2; ++i) {
        sums.r[j][i] *= of_r;
        if constexpr (Shape::kDelta) sums.e[j][i] *= of_e;
        sums.w[j][i] *= of_w;
        dot += k.at(j, i) * (Shape::kNoDecayFix && by_rows ? sums.e[j][i] : sums.w[j][i]);
      }
    }
  }
  if (Shape::kNoDecayFix && by_rows) {
    const KeyWords<Shape> q(c, Shape::kQ);
    FW_UNROLL
    for (int i = 0; i < 16; ++i) dot += q.at(i / 4, i % 4) * sums.r[i / 4][i % 4];
  }
  return dot;
}

template <class Shape>
FW_DEVICE void add_key_products(const WorkTile<Shape>& c, StreamSums& sums) {
  const KeyColumns<Shape> columns(c);
  const int row = 16 * c.block_row();
  FW_UNROLL
  for (int t = 0; t < 4; ++t) {
    const uint32_t left = a_fragment(c.base, row, 2 * t), transposed = a_fragment_trans(c.base, 16 * t, row / 8);
    uint32_t of_q[4], of_k[4], to_q[4], to_k[4], b[4];
    ldmatrix_x4(of_q, left + Shape::kOfQ);
    ldmatrix_x4_trans(to_q, transposed + Shape::kOfQ);
    if constexpr (Shape::kDelta) {
      ldmatrix_x4(of_k, left + Shape::kOfK);
      ldmatrix_x4_trans(to_k, transposed + Shape::kOfK);
    }
    FW_UNROLL
    for (int n = 0; n < 2; ++n) {
      ldmatrix_x4_trans(b, columns.at[n] + Shape::kK + 2048 * t);
      mma_bf16(sums.r[2 * n], of_q, b[0], b[1]);
      mma_bf16(sums.r[2 * n + 1], of_q, b[2], b[3]);
      if constexpr (Shape::kDelta) {
        mma_bf16(sums.e[2 * n], of_k, b[0], b[1]);
        mma_bf16(sums.e[2 * n + 1], of_k, b[2], b[3]);
        mma_bf16(sums.w[2 * n], to_k, b[0], b[1]);
        mma_bf16(sums.w[2 * n + 1], to_k, b[2], b[3]);
      }
      ldmatrix_x4_trans(b, columns.at[n] + Shape::kQ + 2048 * t);
      mma_bf16(sums.w[2 * n], to_q, b[0], b[1]);
      mma_bf16(sums.w[2 * n + 1], to_q, b[2], b[3]);
    }
  }
}

template <class Shape>
FW_DEVICE void sum_key_rows(const WorkTile<Shape>& c, const KeyWords<Shape>& q, const KeyWords<Shape>& k,
                            const StreamSums& d) {
  FW_UNROLL
  for (int half = 0; half < 2; ++half) {
    float sums[Shape::kSums] = {};
    FW_UNROLL
    for (int j = 0; j < 4; ++j) {
      FW_UNROLL
      for (int i = 2 * half; i < 2 * half + 2; ++i) {
        sums[0] += q.at(j, i) * d.r[j][i];
        if constexpr (Shape::kDelta) sums[1] += k.at(j, i) * d.e[j][i];
        sums[2] += k.at(j, i) * d.w[j][i];
      }
    }
    store_row_sums(c, c.row() + 8 * half, sums);
  }
}

// What dq takes of q and dk of k, rows row() and row() + 8.
struct KeySlopes {
  float q[2], k[2];
};
// By each warp, two lanes a row: the gradients of the scales of its 16 rows; the first group's warps store beta's.
template <class Shape>
FW_DEVICE KeySlopes make_slopes(const WorkTile<Shape>& c, int work_tile) {
  const Problem& x = c.args.problem;
  const int row = 16 * c.block_row() + (c.lane >> 1);
  const auto sum = [&](int i) {
    const float* part = c.floats(Shape::kPartial) + (i * Shape::kGroups + (c.lane & 1)) * 64 + row;
    float y = part[0];
    if constexpr (Shape::kGroups == 4) y += part[128];
    return y + shuffle_xor(y, 1);
  };
  FrontCoefs<float> d;
  d.r_q = inverse_or_zero(c.floats(Shape::kRq)[row]) * sum(0);
  d.e_k = Shape::kDelta ? rcp_fast(c.floats(Shape::kEk)[row]) * sum(1) : 0.0f;
  d.w_k = inverse_or_zero(c.floats(Shape::kWk)[row]) * sum(2);
  d.z_v = Shape::kHalf && c.args.half.second ? 0.0f : c.floats(Shape::kDZv)[row];  // the first half has it
  FrontScalars<float> s;
  s.q2 = c.floats(Shape::kQ2)[row], s.k2 = c.floats(Shape::kK2)[row], s.beta = c.floats(Shape::kBeta)[row];
  const float r_dz = d.z_v;
  UnscaledCoefs unscaled;
  if constexpr (Shape::kUnscaled) {
    unscaled = unscaled_coefs(front_coefs(reduced_rule<true>(x.rule), x.scale, s));
    of_unscaled_coefs(d, unscaled.a, unscaled.b);
  }
  FrontScalars<float> ds = front_coefs_vjp(reduced_rule<true>(x.rule), x.scale, s, d);
  if (c.residual_gains() && gain_by_residual(c.floats(Shape::kZv)[row]))
    ds.beta =
        Shape::kUnscaled ? unscaled_gain_gradient(r_dz, unscaled.a, unscaled.b, s.beta) : gain_gradient(r_dz, s.beta);
  if (c.group() == 0 && (c.lane & 1) == 0 && row < c.rows(work_tile))
    store_one(c.rows_at(c.args.grads.d.beta, work_tile), row, ds.beta);
  float2 of = make_float2(2.0f * ds.q2, 2.0f * ds.k2);
  if constexpr (Shape::kHalf) of = join_half_slopes(c, work_tile, row, c.group() == 0 && (c.lane & 1) == 0, of);
  KeySlopes slopes;
  FW_UNROLL
  for (int half = 0; half < 2; ++half) {
    const int lane = 2 * (c.lane >> 2) + 16 * half;
    slopes.q[half] = shuffle(of.x, lane), slopes.k[half] = shuffle(of.y, lane);
  }
  return slopes;
}

template <class Shape>
FW_DEVICE void store_keys(const WorkTile<Shape>& c, int work_tile, const KeyWords<Shape>& q, const KeyWords<Shape>& k,
                          const StreamSums& d, const KeySlopes& slopes) {
  const Rows dq = c.rows_at(c.args.grads.d.q, work_tile), dk = c.rows_at(c.args.grads.d.k, work_tile);
  const bool wide_q = (c.all.pieces & kVec16DQ) != 0, wide_k = (c.all.pieces & kVec16DK) != 0;
  FW_UNROLL
  for (int half = 0; half < 2; ++half) {
    const int row = c.row() + 8 * half;
    const bool valid = row < c.rows(work_tile);
    float y[8], z[8];
    FW_UNROLL
    for (int j = 0; j < 8; ++j) {
      const int at = 2 * half + j % 2;
      y[j] = d.r[j / 2][at] + slopes.q[half] * q.at(j / 2, at);
      z[j] = d.w[j / 2][at] + slopes.k[half] * k.at(j / 2, at);
      if constexpr (Shape::kDelta) z[j] += d.e[j / 2][at];
    }
    store_fragment(c, dq, wide_q, row, valid, y);
    store_fragment(c, dk, wide_k, row, valid, z);
  }
}

// By one warp: dG of two rows a lane is q and k times what they take of r and e, less that of w, or (NoDecayState)
// r.dr - z.dz; then dg.
template <class Shape>
FW_DEVICE void store_decays(const WorkTile<Shape>& c, int work_tile) {
  if (c.rows_at(c.args.grads.d.g, work_tile).data == nullptr) return;
  float tail = 0;
  FW_UNROLL
  for (int i = 0; i < Shape::kWarps; ++i) tail += c.floats(Shape::kWarpSums)[i];
  float2 d = make_float2(0, 0);
  const NoDecayState<Shape> still(c, work_tile);
  if (Shape::kNoDecayFix && still.still) {
    const float2 z = *reinterpret_cast<const float2*>(c.floats(Shape::kZv) + 2 * c.lane),
                 v = *reinterpret_cast<const float2*>(c.floats(Shape::kVDz) + 2 * c.lane);
    d = make_float2(-z.x * v.x, -z.y * v.y);
  }
  FW_UNROLL
  for (int i = 0; i < Shape::kSums * Shape::kGroups; ++i) {
    if (!Shape::kDelta && i / Shape::kGroups == 1) continue;
    if (Shape::kNoDecayFix && still.still && i >= Shape::kGroups) continue;
    const float2 part = *reinterpret_cast<const float2*>(c.floats(Shape::kPartial) + 64 * i + 2 * c.lane);
    const float sign = i / Shape::kGroups == 2 ? -1.0f : 1.0f;
    d.x += sign * part.x, d.y += sign * part.y;
  }
  store_decay_gradient(c, work_tile, decay_gradient(c, work_tile, d, tail));
}

}  // namespace row_gradients

template <class Shape>
__global__ void __launch_bounds__(Shape::kThreads, 1)
    sm80_row_gradients_kernel(const __grid_constant__ GradientKernelArgs args) {
  using namespace row_gradients;
  constexpr int kLastWarp = Shape::kWarps - 1;
  WorkTile<Shape> c(args);
  if (c.warp == 0) c.find(0);
  sync_threads();
  const bool made = is_made(c);
  RowBits numbers;
  if (c.has(0)) {
    load_keys(c, 0);
    load_value_block(c, 0, 0);
    numbers = load_rows_ahead(c, 0);
  }
  FW_NO_UNROLL
  for (int work_tile = 0; c.has(work_tile); ++work_tile) {
    finish_loads();
    c.refresh();
    if (c.warp == 0) c.find(work_tile + 1);
    make_row_scales(c, work_tile, numbers);
    if (!made) {
      sync_threads();
      load_intra_chunk(c, work_tile);
      finish_loads();
    }

    StreamSums sums;
    float tail = 0;
    {
      PairSums<Shape> pairs;
      ValueSums values[Shape::kThreads == 256 ? 2 : 1] = {};
      FW_NO_UNROLL
      for (int block = 0; block < c.blocks; ++block) {
        if (!made) make_value_tiles(c, 0);
        add_value_products(c, sums, pairs);
        if (block == 0) sync_threads();  // scales of rows, and where the next work tile is
        prefetch_next(c, work_tile, block);
        FW_UNROLL
        for (int i = 0; i < static_cast<int>(sizeof values / sizeof values[0]); ++i) {
          if (Shape::kHalf && c.args.half.second) continue;  // the first half has them
          const int row = (c.thread >> 3) + 32 * i;
          const uint4 v = c.wants_values() ? load_values(c, work_tile, block, row) : make_uint4(0, 0, 0, 0);
          store_values(c, work_tile, block, row, v, values[i]);
        }
        const NoDecayState<Shape> still(c, work_tile);
        if (still.by_scans()) {
          tail = NoDecayWords<Shape>(c, still, block).dot(c, still, 0, tail);
        } else {
          tail = dot_states(c, 0, tail);
        }
        sync_threads();  // the stage has been read
        if (block + 1 == c.blocks) continue;
        load_value_block(c, work_tile, block + 1);
        finish_loads();
      }
      if (!made) load_keys(c, work_tile);
      store_matrices_of_pairs(c, work_tile, pairs);
      FW_UNROLL
      for (int i = 0; i < static_cast<int>(sizeof values / sizeof values[0]); ++i) {
        const float sum = group_sum<8>(values[i].gain);
        if ((c.thread & 7) == 0) c.floats(Shape::kDZv)[(c.thread >> 3) + 32 * i] = sum;
        if constexpr (Shape::kNoDecayFix) {
          const float v_dz = group_sum<8>(values[i].v_dz);
          if ((c.thread & 7) == 0) c.floats(Shape::kVDz)[(c.thread >> 3) + 32 * i] = v_dz;
        }
      }
    }
    finish_loads();
    c.refresh();
    const KeyWords<Shape> k(c, Shape::kK);
    const NoDecayState<Shape> still(c, work_tile);
    const float of_rows = scale_sums(c, work_tile, k, still.by_rows(), sums);
    if (!still.by_scans()) tail = tail * exp2_fast(c.work_tile_floats(Shape::kG, work_tile)[63]) + of_rows;
    tail = warp_sum(tail);
    if (c.lane == 0) c.floats(Shape::kWarpSums)[c.warp] = tail;
    add_key_products(c, sums);
    const KeyWords<Shape> q(c, Shape::kQ);
    sum_key_rows(c, q, k, sums);
    sync_threads();  // sums of rows; shared memory may be loaded
    if (c.has(work_tile + 1)) {
      load_keys(c, work_tile + 1);
      load_value_block(c, work_tile + 1, 0);
      numbers = load_rows_ahead(c, work_tile + 1);
    }
    store_keys(c, work_tile, q, k, sums, make_slopes(c, work_tile));
    if (c.warp == kLastWarp) store_decays(c, work_tile);
  }
}

}  // namespace fw::cuda
