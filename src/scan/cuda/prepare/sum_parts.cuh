// T and P of rules whose r or e is a sum of the raw q and k times scales per row (query feedback, corrected read). They
// are made from K K^T and Q K^T:
//     T_ij = (e_k,i (k_i.k_j) + e_q,i (q_i.k_j)) w_k,j exp(G_i - G_j), P likewise with r.
// Warps 0 to 3 have K K^T and then T, 4 to 7 Q K^T and then P. Who needs the other half's products finds them, before
// any factor, in T's memory.
#pragma once

#include "gpu/sm80/stores.cuh"
#include "scan/cuda/prepare/scalar_parts.cuh"

namespace fw::cuda {

// Where a lane leaves its products of a block for the same lane of the warp that has the block of the other matrix:
// within the block's rows of T.
struct Handover {
  float4* slots;
  FW_DEVICE Handover(char* t, int block)
      : slots(reinterpret_cast<float4*>(reinterpret_cast<float*>(t) + triangle_index(16 * block, 0)) +
              static_cast<int>(lane_index())) {}
  FW_DEVICE void put(int n, const float (&c)[4]) const { slots[32 * n] = make_float4(c[0], c[1], c[2], c[3]); }
  FW_DEVICE float4 get(int n) const { return slots[32 * n]; }
};

// c becomes own c + other d by rows of this lane, d the products of the other half; give: c overwrites d.
FW_DEVICE void add_products(const PairWork<true>& work, const Handover& handover, const float* own_rows,
                            const float* other_rows, bool give, float (&c)[8][4]) {
  const int i = work.row();
  const float own[2] = {own_rows[i], own_rows[i + 8]}, other[2] = {other_rows[i], other_rows[i + 8]};
  FW_UNROLL
  for (int n = 0; n < 8; ++n) {
    if (!work.has(n / 2)) continue;
    const float4 x = handover.get(n);
    if (give) handover.put(n, c[n]);
    const float d[4] = {x.x, x.y, x.z, x.w};
    FW_UNROLL
    for (int m = 0; m < 4; ++m) c[n][m] = own[m / 2] * c[n][m] + other[m / 2] * d[m];
  }
}

// A warp's part, of rules with such a sum or none. t: the memory of T; read_made: a half barrier, where who makes P
// says that T's memory is read.
struct SumPairs {
  const PairWork<true>& work;
  Handover handover;
  uint64_t* read_made;
  bool mixes_erase, mixes_read;

  FW_DEVICE SumPairs(const Rule& rule, const PairWork<true>& w, char* t, uint64_t* made)
      : work(w),
        handover(t, w.block),
        read_made(made),
        mixes_erase(rule.feedback != Feedback::kNone),
        mixes_read(rule.read != Read::kPlain) {}

  // In front of the block's barrier: c, the warp's products.
  FW_DEVICE void hand_over(const float (&c)[8][4]) const {
    if (work.strict == mixes_read) {  // where both are sums, Q K^T overwrites K K^T
      FW_UNROLL
      for (int n = 0; n < 8; ++n) {
        if (work.has(n / 2)) handover.put(n, c[n]);
      }
    }
  }

  // After it, which also tells of the factors by row: c becomes the warp's blocks of T or P, and T's memory is free for
  // them.
  template <class Rows>
  FW_DEVICE void mix(const Rows& rows, float (&c)[8][4]) const {
    if (mixes_read && !work.strict) {
      add_products(work, handover, rows.read_q, rows.read_k, mixes_erase, c);
      mbarrier_arrive(read_made);
    }
    if (mixes_erase && work.strict) {
      if (mixes_read) mbarrier_wait(read_made, 0);
      add_products(work, handover, rows.erase_k, rows.erase_q, false, c);
      sync_warp();
    }
    float factor[2] = {1, 1};
    if (!(work.strict ? mixes_erase : mixes_read)) {
      const float* own = work.strict ? rows.erase_k : rows.read_q;
      factor[0] = own[work.row()], factor[1] = own[work.row() + 8];
    }
    scale_pairs(work, rows, factor, c);
    if (mixes_read && !mixes_erase && work.strict) mbarrier_wait(read_made, 0);
  }
};

}  // namespace fw::cuda
