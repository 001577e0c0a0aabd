// Gradients of rules without an erase, from the raw tensors and the states that the scans left. sm90/additive/rows.cuh
// has the formulas, here without z in P and write. A block per chunk and value head.
//   dB_ij = (dO_i . v_j) r_i w_j z_j exp(G_i - G_j), i >= j
//   dq = Diag(read) dO S^T + dB k      dk = Diag(write z) v D^T + dB^T q      dz = Diag(write) k D + P^T dO
//   dG_i = q_i . dq_i - k_i . dk_i, and the sum of the later ones and of S_C (.) D is the gradient of a log-decay
// Before the last line dq and dk are without the norms' part. One warpgroup makes dq, the other dk; both half of the
// rest.
//
// Roles, 256 threads, two blocks an SM, which stay and take every grid-th chunk:
//   warp     does                                              waits for                    says so to                shared memory
//   all      load q, k (K first), v and d_o of a chunk        sync_threads                 keys_full, values_full    kQ, kK, kV, kDO
//   0        thread 0 loads S and D; factors of rows          keys_full (norms)            values_full, sync_threads kS, kD, FactorRows
//   1        finds the offsets of the next work tile                                             sync_threads              all_offsets
//   0 to 3   P, dq; half of dz and dv                          keys_full, values_full       sync_threads              reads all
//   4 to 7   dB, dk; the other half                            keys_full, values_full       sync_threads              reads all
#include <algorithm>

#include "gpu/device.h"
#include "gpu/launch.h"
#include "gpu/sm90/ptx.cuh"
#include "scan/cuda/common/front/token_scalars.cuh"
#include "scan/cuda/kernels.h"
#include "scan/cuda/sm90/additive/rows.cuh"

namespace fw::cuda {

namespace {

constexpr unsigned kGradientThreads = 256;

// By row: factors, z apart from them; |q|^2, |k|^2, then what takes the norms' part from dq and dk; sums.
struct GradientRows {
  FactorRows f;
  float z[kChunk], norms[2][kChunk], dots[2][kChunk], dz[2][kChunk];
  float tail[8], tails[kGradientThreads];
};

// Where the chunk's rows lie, made once: registers are scarce.
struct GradientOffsets {
  Rows v, d_o, q, k, g, beta, dq, dk, dv, dg, dbeta;  // of the chunk's first row
  int64_t first_tile;                                 // of the states
  int32_t count, hv;                                  // rows from there to the sequence's end
  int32_t item, work_tile;                            // of the block's items
};

// Shared memory: bytes. Values in blocks of 64.
template <int kTileK>
struct GradientShape {
  static constexpr int kMatrix = 64 * kTileK * 2;
  static constexpr int kQ = 0, kK = kMatrix, kV = 2 * kMatrix, kDO = kV + kSw128Bytes, kS = kDO + kSw128Bytes,
                       kD = kS + kMatrix, kP = kD + kMatrix, kB = kP + kSw128Bytes, kRows = kB + kSw128Bytes,
                       kOffsets = (kRows + static_cast<int>(sizeof(GradientRows)) + 15) / 16 * 16,
                       kBarriers = kOffsets + (3 * static_cast<int>(sizeof(GradientOffsets)) + 15) / 16 * 16;
  static constexpr int kShared = kBarriers + 16;
  static_assert(2 * (kShared + 1024) <= 228 * 1024);
};

// d = (or +=) left right over 16 kSteps summed numbers. left: tile [row][summed] or its transpose; right: tile
// [column][summed] or its transpose, of SW128 tiles.
template <int kColumns, int kSteps, bool kLeftTransposed, bool kRightTransposed>
FW_DEVICE void multiply(float (&d)[kColumns / 2], uint32_t left, uint32_t right, bool accumulate) {
  const uint64_t a = wgmma_descriptor(left, kLeftTransposed ? kSw128Bytes : 16, 1024),
                 b = wgmma_descriptor(right, kRightTransposed ? kSw128Bytes : 16, 1024);
  FW_UNROLL
  for (int s = 0; s < kSteps; ++s) {
    const int along = s / 4 * kSw128Bytes + s % 4 * 32, down = s * 2048;
    wgmma_ss<kColumns, kLeftTransposed, kRightTransposed>(d, descriptor_after(a, kLeftTransposed ? down : along),
                                                          descriptor_after(b, kRightTransposed ? down : along),
                                                          accumulate || s > 0);
  }
}

// From lane l of a quad having words j = 0 .. 3 for columns 8 j + 2 l and the next, to columns 8 l .. 8 l + 7.
FW_DEVICE void gather_quad(uint32_t (&w)[4], int thread) {
  const bool odd = (thread & 1) != 0, high = (thread & 2) != 0;
  const uint32_t a = shuffle_xor(odd ? w[0] : w[1], 1), b = shuffle_xor(odd ? w[2] : w[3], 1);
  const uint32_t x0 = odd ? a : w[0], x1 = odd ? w[1] : a, x2 = odd ? b : w[2], x3 = odd ? w[3] : b;
  const uint32_t c = shuffle_xor(high ? x0 : x2, 2), d = shuffle_xor(high ? x1 : x3, 2);
  w[0] = high ? c : x0, w[1] = high ? d : x1, w[2] = high ? x2 : c, w[3] = high ? x3 : d;
}

FW_DEVICE bool wide_rows(const Rows& x, int dim) {
  return x.bf16 != 0 && x.stride % 8 == 0 && dim % 8 == 0 && (reinterpret_cast<uintptr_t>(x.data) & 15) == 0;
}

// 8 row scales of a wide tensor: of columns first + 8 j + 2 (lane % 4) and the next. All lanes together.
FW_DEVICE void store_columns(const Rows& out, int row, bool valid, int first, int limit, const float (&x)[8],
                             int thread) {
  uint32_t w[4] = {pack_bf16(x[0], x[1]), pack_bf16(x[2], x[3]), pack_bf16(x[4], x[5]), pack_bf16(x[6], x[7])};
  gather_quad(w, thread);
  const int column = first + 8 * (thread & 3);
  if (valid && column < limit)
    *reinterpret_cast<uint4*>(out.data + 2 * (row * out.stride + column)) = make_uint4(w[0], w[1], w[2], w[3]);
}

FW_DEVICE TileRows chunk_tile(const Rows& rows, int count, int column, int dim) {
  const bool wide = rows.data != nullptr && wide_rows(rows, dim);
  return {rows, count, column, dim, wide};
}
// By each thread that loaded rows.
FW_DEVICE void arrive_loaded(bool copied, uint64_t* full) {
  if (copied) {
    cp_async_arrive(full);
  } else {
    cp_async_commit();
    cp_async_wait<0>();
    mbarrier_arrive(full);
  }
}

// Of SW128 tiles, 16 rows a warp and columns 16 k to 16 k + 15 as accumulators have them: word h + 2 g is row i + 8 h,
// columns 8 g + 2 (lane % 4) and the next.
FW_DEVICE void load_fragment(uint32_t (&w)[4], uint32_t tile, int k, int thread) {
  const int lane = thread & 31, row = 16 * (thread >> 5 & 3) + lane % 16, piece = (2 * (k % 4) + lane / 16) ^ (row & 7);
  ldmatrix_x4(w, tile + static_cast<uint32_t>(k / 4 * kSw128Bytes + row * 128 + piece * 16));
}

// Into such a SW128 tile.
FW_DEVICE void store_fragment(uint32_t tile, int k, const uint32_t (&w)[4], int thread) {
  const int lane = thread & 31, row = 16 * (thread >> 5 & 3) + lane % 16, piece = (2 * (k % 4) + lane / 16) ^ (row & 7);
  stmatrix_x4(tile + static_cast<uint32_t>(k / 4 * kSw128Bytes + row * 128 + piece * 16), w);
}

FW_DEVICE float quad_sum(float x) {
  x += shuffle_xor(x, 1);
  return x + shuffle_xor(x, 2);
}

// By a warp: where the rows of the item of a work tile lie, a tensor a lane; only the item's number, at least `items`,
// if there is none.
FW_DEVICE void find_offsets(const AdditiveGradientArgs& args, int work_tile, int items, int value_blocks,
                            GradientOffsets& to) {
  int item = static_cast<int>(block_index_x()) + work_tile * static_cast<int>(grid_size_x());
  if (item / args.problem.HV >= chunks_there(args.problem.sequences, INT32_MAX)) item = items;
  if (lane_index() == 0) to.item = item, to.work_tile = work_tile;
  if (item >= items) return;
  const Problem& x = args.problem;
  const SequenceArg& sequences = x.sequences;
  const int lane = static_cast<int>(lane_index());
  // Of a sequence alone the chunks do not begin at 0.
  const int order = item / x.HV, hv = item - order * x.HV;
  const int chunk = sequences.chunk_base != nullptr ? order + sequences.chunk_base[0] : order,
            n = sequence_of_chunk(sequences, chunk);
  const int first = (chunk - first_chunk(sequences, n)) * kChunk;
  if (lane < 11) {
    const TokenArgs& d = args.grads.d;
    const TokenArg* const in = lane == 0   ? &x.in.v
                               : lane == 1 ? &args.d_o
                               : lane == 2 ? &x.in.q
                               : lane == 3 ? &x.in.k
                               : lane == 4 ? &x.in.g
                                           : &x.in.beta;
    const TokenArg* const out = lane == 6 ? &d.q : lane == 7 ? &d.k : lane == 8 ? &d.v : lane == 9 ? &d.g : &d.beta;
    Rows r = rows_of(lane < 6 ? *in : *out, sequences, n, hv);
    if (r.data != nullptr) r.data += first * r.stride * (r.bf16 != 0 ? 2 : 4);
    (&to.v)[lane] = r;
  }
  if (lane == 0) {
    to.first_tile = (static_cast<int64_t>(chunk) * x.HV + hv) * value_blocks;
    to.count = sequence_length(sequences, n) - first;
    to.hv = hv;
  }
}

// Starts loading an item's rows into the L2 cache; by all threads. Small keys only: else what all blocks would have
// there is too much, and comes twice (measured with the states as well: half as many bytes again).
FW_DEVICE void prefetch_rows(const AdditiveGradientArgs& args, const GradientOffsets& offsets, int thread) {
  const Problem& x = args.problem;
  const int tensor = thread / kChunk, row = thread % kChunk;
  const Rows r = (&offsets.v)[tensor];  // v, d_o, q, k
  if (r.data == nullptr || row >= offsets.count) return;
  const int size = r.bf16 != 0 ? 2 : 4, bytes = (tensor < 2 ? x.V : x.K) * size;
  for (int at = 0; at < bytes; at += 128) prefetch_line(r.data + row * r.stride * size + at);
}

// By a warp: the factors of rows; with norms from |q|^2 and |k|^2 in rows.norms.
FW_DEVICE void make_factors(const Problem& x, const AdditiveScales& numbers, GradientRows& rows, bool normed) {
  const int lane = static_cast<int>(lane_index());
  const DecayRows d = decay_rows(numbers.g);
  float r[2], w[2];
  FW_UNROLL
  for (int e = 0; e < 2; ++e) {
    const int row = 2 * lane + e;
    const float q2 = normed ? rows.norms[0][row] : 0.0f, k2 = normed ? rows.norms[1][row] : 0.0f;
    const FrontCoefs<float> f = additive_coefs(x.rule, x.scale, e == 0 ? numbers.beta.x : numbers.beta.y, q2, k2);
    r[e] = f.r_q, w[e] = f.w_k;
    rows.z[row] = f.z_v;
    const float q_n = q_factor(x.rule, q2), k_n = k_factor(x.rule, k2);
    rows.norms[0][row] = x.rule.q_norm == Norm::kL2 ? q_n * q_n : 0.0f;
    rows.norms[1][row] = x.rule.k_norm == Norm::kL2 ? k_n * k_n : 0.0f;
  }
  rows.f.store_write(make_float2(w[0], w[1]), d.to_end, d.sum);
  rows.f.store_pairs(d, make_float2(r[0], r[1]), make_float2(w[0], w[1]));
}

// The first of a thread's two rows in products: that and the eighth after it.
FW_DEVICE int row_of(int thread) { return 16 * (thread >> 5 & 3) + ((thread & 31) >> 2); }

template <int kTileK>
__global__ void __launch_bounds__(kGradientThreads, 2)
    additive_gradient_kernel(const __grid_constant__ AdditiveGradientArgs args, int items) {
  using Shape = GradientShape<kTileK>;
  char* const shared = shared_memory();
  GradientRows& rows = *reinterpret_cast<GradientRows*>(shared + Shape::kRows);
  uint64_t* const keys_full = reinterpret_cast<uint64_t*>(shared + Shape::kBarriers);
  uint64_t* const values_full = keys_full + 1;
  if (thread_index() == 0) {
    mbarrier_init(keys_full, kGradientThreads);
    mbarrier_init(values_full, kGradientThreads + 1);
    mbarrier_init_fence();
  }
  sync_threads();
  grid_dependency_wait();
  grid_dependency_launch();

  const Problem& x = args.problem;
  const int value_blocks = (x.V + kValueBlock - 1) / kValueBlock;
  const auto next_slot = [](int slot) { return slot == 2 ? 0 : slot + 1; };
  auto* const all_offsets = reinterpret_cast<GradientOffsets*>(shared + Shape::kOffsets);
  if (warp_index() == 0) find_offsets(args, 0, items, value_blocks, all_offsets[0]);
  sync_threads();
  FW_NO_UNROLL
  for (int slot = 0; all_offsets[slot].item < items; slot = next_slot(slot)) {
    // Made again in each work tile, and not kept in registers.
    const int thread = opaque(static_cast<int>(thread_index())), lane = thread & 31, warp = shuffle(thread / 32, 0),
              group = warp / 4;
    const uint32_t base = shuffle(shared_address(shared), 0);
    const GradientOffsets& offsets = all_offsets[slot];
    AdditiveScales numbers{make_float2(0, 0), make_float2(1, 1)};
    if (warp == 0) numbers = load_row_scales(x.rule, offsets.g, offsets.beta, offsets.hv, 0, offsets.count);
    {
      bool copied = true;
      FW_NO_UNROLL
      for (int i = 0; i < 2; ++i) {
        const TileRows t = chunk_tile(i == 0 ? offsets.q : offsets.k, offsets.count, 0, x.K);
        copied =
            issue_rows<kTileK, kGradientThreads>(t, 0, shared + (i == 0 ? Shape::kQ : Shape::kK), thread) && copied;
      }
      arrive_loaded(copied, keys_full);
    }
    const auto issue_values = [&](int block) {
      const int column = block * kValueBlock;
      if (thread == 0) {
        fence_async_shared();  // rows that are not stored whole went through this buffer (`slow`)
        mbarrier_expect(values_full, 2 * Shape::kMatrix);
        bulk_load(shared + Shape::kS, args.states + (offsets.first_tile + block) * (64 * kTileK), Shape::kMatrix,
                  values_full);
        bulk_load(shared + Shape::kD, args.d_states + (offsets.first_tile + block) * (64 * kTileK), Shape::kMatrix,
                  values_full);
      }
      bool copied = true;
      FW_NO_UNROLL
      for (int i = 0; i < 2; ++i) {
        const TileRows t = chunk_tile(i == 0 ? offsets.v : offsets.d_o, offsets.count, column, x.V);
        copied = issue_rows<64, kGradientThreads>(t, 0, shared + (i == 0 ? Shape::kV : Shape::kDO), thread) && copied;
      }
      arrive_loaded(copied, values_full);
    };
    issue_values(0);
    // While that comes: the factors, unless norms are wanted for them, and where the next chunk lies.
    if (warp == 0 && !norms_matter(x.rule)) make_factors(x, numbers, rows, false);
    if (warp == 1) find_offsets(args, offsets.work_tile + 1, items, value_blocks, all_offsets[next_slot(slot)]);

    mbarrier_wait(keys_full, offsets.work_tile & 1);
    fence_async_shared();
    float pairs[16];  // columns 32 group ...
    wgmma_fence();
    multiply<32, kTileK / 16, false, false>(pairs, base + Shape::kQ, base + Shape::kK + group * 4096, false);
    wgmma_commit();
    if (norms_matter(x.rule)) {
      const int row = thread % 128 / 2;
      const float square = row_square<kTileK>(shared + (group == 0 ? Shape::kQ : Shape::kK), row);
      if (lane % 2 == 0) rows.norms[group][row] = square;
      sync_threads();
      if (warp == 0) make_factors(x, numbers, rows, true);
    }
    sync_threads();
    wgmma_wait<0>();
    keep(pairs);
    const auto store_pairs = [&](int to, int now) {
      FW_UNROLL
      for (int k = 0; k < 2; ++k) {
        const uint32_t packed[4] = {
            pack_bf16(pairs[8 * k], pairs[8 * k + 1]), pack_bf16(pairs[8 * k + 2], pairs[8 * k + 3]),
            pack_bf16(pairs[8 * k + 4], pairs[8 * k + 5]), pack_bf16(pairs[8 * k + 6], pairs[8 * k + 7])};
        store_fragment(base + to, 2 * group + k, packed, now);
      }
      fence_async_shared();
    };
    {
      const int now = opaque(thread);
      scale_pairs(now >> 5 & 3, pairs, rows.f, 4 * group, now & 31);
      store_pairs(Shape::kP, now);
    }
    if (kTileK == 64 && all_offsets[next_slot(slot)].item < items)
      prefetch_rows(args, all_offsets[next_slot(slot)], thread);

    float keys[kTileK / 2] = {};  // dq or dk
    FW_UNROLL
    for (int e = 0; e < 16; ++e) pairs[e] = 0;
    FW_NO_UNROLL
    for (int block = 0; block < value_blocks; ++block) {
      mbarrier_wait(values_full, (offsets.work_tile * value_blocks + block) & 1);
      fence_async_shared();
      if (block == 0) sync_threads();  // P
      float values[16];
      keep(keys), keep(pairs);
      wgmma_fence();
      multiply<32, kTileK / 16, false, false>(values, base + Shape::kK, base + Shape::kD + group * 4096, false);
      wgmma_commit();
      multiply<kTileK, 4, false, true>(keys, base + (group == 0 ? Shape::kDO : Shape::kV),
                                       base + (group == 0 ? Shape::kS : Shape::kD), true);
      multiply<32, 4, false, false>(pairs, base + Shape::kDO, base + Shape::kV + group * 4096, true);
      wgmma_commit();
      float& all_dots = rows.tails[opaque(thread)];
      float tail = block > 0 ? all_dots : 0.0f;
      FW_UNROLL
      for (int j = 0; j < Shape::kMatrix / 16 / static_cast<int>(kGradientThreads); ++j) {
        const char* at = shared + Shape::kS + 16 * (opaque(thread) + static_cast<int>(kGradientThreads) * j);
        const uint4 s = *reinterpret_cast<const uint4*>(at), d = *reinterpret_cast<const uint4*>(at + Shape::kMatrix);
        tail = dot_bf16x2(s.w, d.w, dot_bf16x2(s.z, d.z, dot_bf16x2(s.y, d.y, dot_bf16x2(s.x, d.x, tail))));
      }
      all_dots = tail;
      wgmma_wait<1>();
      keep(values);
      const int now = opaque(thread), row0 = row_of(now);
      const float kept[2] = {rows.f.write[row0], rows.f.write[row0 + 8]};
      FW_UNROLL
      for (int e = 0; e < 16; ++e) values[e] *= kept[e % 4 / 2];
      keep(values);
      wgmma_fence();
      multiply<32, 4, true, true>(values, base + Shape::kP, base + Shape::kDO + group * 64, true);
      wgmma_commit();
      wgmma_wait<0>();
      keep(values), keep(keys), keep(pairs);
      const bool gate = x.rule.uses_beta();
      const Rows dv = offsets.dv;
      const bool dv_wide = wide_rows(dv, x.V);
      const int count = offsets.count, column = block * kValueBlock + 32 * group;
      if (gate) {
        float value_dots[2] = {0, 0};
        FW_UNROLL
        for (int k = 0; k < 2; ++k) {
          uint32_t v[4];
          load_fragment(v, base + Shape::kV, 2 * group + k, now);
          FW_UNROLL
          for (int e = 0; e < 4; ++e)
            value_dots[e % 2] += bf16_low(v[e]) * values[8 * k + 2 * e] + bf16_high(v[e]) * values[8 * k + 2 * e + 1];
        }
        FW_UNROLL
        for (int half = 0; half < 2; ++half) {
          const float sum = quad_sum(value_dots[half]);
          float& all = rows.dz[group][row0 + 8 * half];
          if ((now & 3) == 0) all = block > 0 ? all + sum : sum;
        }
      }
      FW_UNROLL
      for (int half = 0; half < 2; ++half) {
        const int row = row0 + 8 * half;
        const float z = rows.z[row];
        float out[8];
        FW_UNROLL
        for (int j = 0; j < 4; ++j) {
          out[2 * j] = z * values[4 * j + 2 * half], out[2 * j + 1] = z * values[4 * j + 2 * half + 1];
        }
        if (dv_wide) {
          store_columns(dv, row, row < count && dv.data != nullptr, column, x.V, out, now);
        } else if (dv.data != nullptr && row < count) {
          FW_UNROLL
          for (int e = 0; e < 8; ++e) {
            const int at = column + 8 * (e / 2) + 2 * (now & 3) + e % 2;
            if (at < x.V) store_element(dv, row, at, out[e]);
          }
        }
      }
      if (block + 1 < value_blocks) {
        sync_threads();
        issue_values(block + 1);
      }
    }
    const int now = opaque(thread), i = row_of(now);
    scale_pairs(now >> 5 & 3, pairs, rows.f, 4 * group, now & 31);
    if (x.rule.uses_beta()) {
      FW_UNROLL
      for (int e = 0; e < 16; ++e) pairs[e] *= rows.z[32 * group + 8 * (e / 4) + 2 * (now & 3) + e % 2];
    }
    store_pairs(Shape::kB, now);
    float tail = rows.tails[now] * rows.f.gamma;
    const float* const factors = group == 0 ? rows.f.read : rows.f.write;
    const uint32_t raw = base + (group == 0 ? Shape::kQ : Shape::kK);
    const float f[2] = {factors[i] * (group == 0 ? 1.0f : rows.z[i]),
                        factors[i + 8] * (group == 0 ? 1.0f : rows.z[i + 8])};
    FW_UNROLL
    for (int e = 0; e < kTileK / 2; ++e) keys[e] *= f[e % 4 / 2];
    if (group == 1) {
      FW_UNROLL
      for (int k = 0; k < kTileK / 16; ++k) {
        uint32_t w[4];
        load_fragment(w, raw, k, now);
        FW_UNROLL
        for (int e = 0; e < 4; ++e)
          tail += bf16_low(w[e]) * keys[8 * k + 2 * e] + bf16_high(w[e]) * keys[8 * k + 2 * e + 1];
      }
    }
    tail = warp_sum(tail);
    if (lane == 0) rows.tail[warp] = tail;
    sync_threads();
    keep(keys);
    if (group == 0) {  // fence and wait in each branch: ptxas puts them there else
      wgmma_fence();
      multiply<kTileK, 4, false, true>(keys, base + Shape::kB, base + Shape::kK, true);
      wgmma_commit();
      wgmma_wait<0>();
    } else {
      wgmma_fence();
      multiply<kTileK, 4, true, true>(keys, base + Shape::kB, base + Shape::kQ, true);
      wgmma_commit();
      wgmma_wait<0>();
    }
    keep(keys);
    const int count = offsets.count;
    const Rows out = group == 0 ? offsets.dq : offsets.dk;
    const bool out_wide = wide_rows(out, x.K);
    // Rows of another form leave by way of shared memory.
    float* const slow = reinterpret_cast<float*>(shared + Shape::kV) + group * 64 * kTileK;
    static_assert(Shape::kV + 2 * 64 * kTileK * 4 <= Shape::kRows);
    const bool all_wide = wide_rows(offsets.dq, x.K) && wide_rows(offsets.dk, x.K);
    if (!all_wide) sync_threads();  // both groups' products are over
    float dots[2] = {0, 0};
    FW_UNROLL
    for (int k = 0; k < kTileK / 16; ++k) {
      uint32_t w[4];
      load_fragment(w, raw, k, now);
      FW_UNROLL
      for (int e = 0; e < 4; ++e)
        dots[e % 2] += bf16_low(w[e]) * keys[8 * k + 2 * e] + bf16_high(w[e]) * keys[8 * k + 2 * e + 1];
    }
    FW_UNROLL
    for (int half = 0; half < 2; ++half) {
      dots[half] = quad_sum(dots[half]);
      if ((now & 3) == 0) rows.dots[group][i + 8 * half] = dots[half];
    }
    if (norms_matter(x.rule)) {
      const float slopes[2] = {-rows.norms[group][i] * dots[0], -rows.norms[group][i + 8] * dots[1]};
      FW_UNROLL
      for (int k = 0; k < kTileK / 16; ++k) {
        uint32_t w[4];
        load_fragment(w, raw, k, now);
        FW_UNROLL
        for (int e = 0; e < 4; ++e)
          keys[8 * k + 2 * e] += slopes[e % 2] * bf16_low(w[e]),
              keys[8 * k + 2 * e + 1] += slopes[e % 2] * bf16_high(w[e]);
      }
    }
    FW_UNROLL
    for (int half = 0; half < 2; ++half) {
      const int row = i + 8 * half;
      FW_UNROLL
      for (int j = 0; j < kTileK / 8; j += 4) {
        float y[8];
        FW_UNROLL
        for (int e = 0; e < 8; ++e) y[e] = keys[4 * (j + e / 2) + 2 * half + e % 2];
        if (out_wide) {
          if (out.data != nullptr) store_columns(out, row, row < count, 8 * j, x.K, y, now);
        } else {
          FW_UNROLL
          for (int e = 0; e < 4; ++e)
            *reinterpret_cast<float2*>(slow + row * kTileK + 8 * (j + e) + 2 * (now & 3)) =
                make_float2(y[2 * e], y[2 * e + 1]);
        }
      }
    }
    sync_threads();
    if (!out_wide && out.data != nullptr) {
      FW_NO_UNROLL
      for (int item = thread % 128; item < 64 * (kTileK / 8); item += 128) {
        const int row = item / (kTileK / 8), column = item % (kTileK / 8) * 8;
        if (row >= count) break;
        float y[8];
        FW_UNROLL
        for (int e = 0; e < 8; ++e) y[e] = slow[row * kTileK + column + e];
        store_channels(out, row, column, x.K, y);
      }
    }
    const Rows dg = offsets.dg, dbeta = offsets.dbeta;
    if (warp == 0 && (dg.data != nullptr || args.form_parts != nullptr)) {
      float all_tail = 0;
      FW_UNROLL
      for (int e = 0; e < 8; ++e) all_tail += rows.tail[e];
      const float one = rows.dots[0][2 * lane] - rows.dots[1][2 * lane],
                  two = rows.dots[0][2 * lane + 1] - rows.dots[1][2 * lane + 1];
      float sum = one + two;
      FW_UNROLL
      for (int delta = 1; delta < 32; delta *= 2) {
        const float after = shuffle_down(sum, delta);
        if (lane + delta < 32) sum += after;
      }
      float d[2] = {sum + all_tail, sum - one + all_tail};
      if (x.fused.g.given != GateActivation::kValue) {
        float values[2] = {0, 0};
        FW_UNROLL
        for (int e = 0; e < 2; ++e) {
          if (2 * lane + e < count) {
            values[e] = load_element(offsets.g, 2 * lane + e, 0);
          } else {
            d[e] = 0;
          }
        }
        decay_logit_gradients(x.fused, offsets.hv, values, d,
                              args.form_parts != nullptr ? args.form_parts + 2 * int64_t{offsets.item} : nullptr);
      }
      if (dg.data != nullptr && 2 * lane < count) store_element(dg, 2 * lane, 0, d[0]);
      if (dg.data != nullptr && 2 * lane + 1 < count) store_element(dg, 2 * lane + 1, 0, d[1]);
    }
    if (dbeta.data != nullptr && thread >= 128 && thread - 128 < kChunk && thread - 128 < count) {
      float d = rows.dz[0][thread - 128] + rows.dz[1][thread - 128];
      if (x.fused.beta.given != GateActivation::kValue)
        d *= scalar_slope(x.fused.beta, load_element(offsets.beta, thread - 128, 0));
      store_element(dbeta, thread - 128, 0, d);
    }
    if (!all_wide) sync_threads();
  }
}

template <int kTileK>
void launch_gradients(const AdditiveGradientArgs& args, int64_t chunks, void* stream) {
  const int64_t items = chunks * args.problem.HV;
  const Dim3 grid{static_cast<unsigned>(std::min(items, 2 * persistent_ctas())), 1, 1};
  launch_overlapped(additive_gradient_kernel<kTileK>, grid, kGradientThreads, GradientShape<kTileK>::kShared, stream,
                    args, static_cast<int>(items));
}

}  // namespace

void additive_gradients(const AdditiveGradientArgs& args, int k_tile, int64_t chunks, void* stream) {
  if (args.problem.K > k_tile || (k_tile != 64 && k_tile != 128))
    throw Error(ErrorKind::kInternal,
                fmt::format("additive_gradients: expected a K tile of 64 or 128 and at least K, got {} and K {}",
                            k_tile, args.problem.K));
  k_tile == 64 ? launch_gradients<64>(args, chunks, stream) : launch_gradients<128>(args, chunks, stream);
}

}  // namespace fw::cuda
