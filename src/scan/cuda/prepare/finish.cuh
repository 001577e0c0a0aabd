// The second half of prepare for delta rules: from T and P to the chunk tiles' x, m, y and q, in shared memory and then
// in memory.
#pragma once

#include <type_traits>

#include "gpu/sm80/stores.cuh"
#include "scan/cuda/prepare/products.cuh"

namespace fw::cuda {

// Whether a chunk keeps so much of the state that what bf16 takes from keys times their factors shows in the state
// after many chunks. `last_pair` is the `pair` of the chunk's last row (prepare/scalar_parts.cuh). Where all decay
// by more, errors fade sooner than they add up.
inline constexpr float kLastingChunk = -2.0f;
FW_DEVICE bool lasts(float last_pair) { return last_pair > kLastingChunk; }

// Shared memory of the second half. keys: Khat, or what it is a multiple of row by row (the factors are k_factors);
// becomes x.
// t: T as prepare/inverse.cuh wants it. a, p: SW128 tiles. m: SW128 tile, may be t. fine, p_low:
// where kHiLo; p_low: the SW128 tile of what p rounds off.
// Where the backward chunk tile is wanted, minus_e, q and y as in transform_reads; q becomes the backward chunk tile's,
// y may be t where m is not.
struct FinishBuffers {
  char *keys, *t, *a, *p, *m, *minus_e, *q, *y;
  const SplitFactors *k_factors, *e_factors;
  const float* q_factors;
  HiLoInverse hi_lo = {};
  char* p_low = nullptr;
  bool exact_keys = false;  // the factors are powers of two: keys times them leave nothing out
  // What bf16 leaves out of the keys, kHiLo or of streams, or null; kHiLo: the same of minus_e, and a matrix for what
  // it leaves out of y, may be e_lo. (That of x goes where fine.low and p_low were, which lie side by side.)
  char *keys_lo = nullptr, *e_lo = nullptr, *y_lo = nullptr;
  const float* last_pair = nullptr;  // not kHiLo: of the chunk's rows, for lasts()
  uint64_t* claimed = nullptr;       // kClaimed: a half barrier
};

// A barrier in shared memory for four warps that arrive and go on and four that wait, which racecheck follows (and not
// named barriers, where warps meet unequally often). By thread 0 before a sync_threads() that is before any use.
FW_DEVICE uint64_t* start_half_barrier(char* at) {
  uint64_t* const barrier = reinterpret_cast<uint64_t*>(at);
  if (thread_index() == 0) {
    mbarrier_init(barrier, kPrepareThreads / 2);
    mbarrier_init_fence();
  }
  return barrier;
}

// Image: what the forward scan reads, FwdTiles, RowTiles, RowScales or QETiles.
template <int kTileK, class ChunkTile = FwdTiles<kTileK>>
struct ChunkTiles {
  ChunkTile* forward;
  BwdTiles<kTileK>* backward;  // may be null, and so may the others
  RowScalesBwd* numbers;
  IntraChunk* pairs;
  XMTiles<kTileK>* solved;  // of QETiles
  uint16_t *keys, *z;
  LoTiles<kTileK>*forward_lo, *backward_lo;
  char *e_lo, *k_lo;
};

// Of a row of the chunk, with its decays: k of w, what e takes of k and of q (with the sign of -E), what r does.
// kMixed: of mixed_streams().
template <bool kMixed, int kTileK, class ChunkTile>
FW_DEVICE void put_row_scales(const ChunkTiles<kTileK, ChunkTile>& out, int row, float k, float2 erase, float2 read) {
  if (out.numbers == nullptr) return;
  out.numbers->k[row] = k, out.numbers->e[row] = erase.x, out.numbers->q[row] = read.y;
  if constexpr (kMixed) out.numbers->erase_q[row] = erase.y, out.numbers->read_k[row] = read.x;
}

template <int kTileK, class ChunkTile = FwdTiles<kTileK>>
FW_DEVICE ChunkTiles<kTileK, ChunkTile> chunk_tiles_of(const PrepareArgs& args, int64_t item) {
  ChunkTiles<kTileK, ChunkTile> out;
  const int64_t value_blocks = (args.problem.V + kValueBlock - 1) / kValueBlock;
  out.forward = static_cast<ChunkTile*>(args.forward) + item;
  out.backward = args.backward != nullptr ? static_cast<BwdTiles<kTileK>*>(args.backward) + item : nullptr;
  out.numbers = args.numbers != nullptr ? args.numbers + item : nullptr;
  out.pairs = args.pairs != nullptr ? args.pairs + item : nullptr;
  out.solved = args.solved != nullptr ? static_cast<XMTiles<kTileK>*>(args.solved) + item : nullptr;
  out.keys = args.keys != nullptr ? args.keys + item * (64 * kTileK) : nullptr;
  out.z = args.z != nullptr ? args.z + item * value_blocks * kSw128Elements : nullptr;
  const auto hi_lo = [&](const HiLoTiles& all) {
    return all.chunk_tiles != nullptr ? static_cast<LoTiles<kTileK>*>(all.chunk_tiles) + item : nullptr;
  };
  const auto lo_parts = [&](const HiLoTiles& all) {
    return all.lo_parts != nullptr ? reinterpret_cast<char*>(all.lo_parts + item * (64 * kTileK)) : nullptr;
  };
  out.forward_lo = hi_lo(args.forward_lo), out.backward_lo = hi_lo(args.backward_lo);
  out.e_lo = lo_parts(args.forward_lo), out.k_lo = lo_parts(args.backward_lo);
  return out;
}

// X and M on their way to memory; copy: of store_block().
template <int kTileK, class ChunkTile, class Copy>
FW_DEVICE void store_solved(const ChunkTiles<kTileK, ChunkTile>& out, const char* x, const char* m, Copy&& copy) {
  copy(out.solved->x, x, sizeof out.solved->x);
  copy(out.solved->m, m, kSw128Bytes);
}

// After warps 0 to 3 wrote the blocks of T, the one of its number each, and the others P: no barrier is wanted in
// between. Four warps invert; the others call first(a number of 4 for each warp), and then they, and two of the four
// when they are through, call meanwhile(a number of 6). wait_for_a: of invert().
template <bool kHiLo, class WaitForA, class First, class Meanwhile>
FW_DEVICE void solve(char* t, char* a, const HiLoInverse& hi_lo, int warp, WaitForA&& wait_for_a, First&& first,
                     Meanwhile&& meanwhile) {
  if (warp < 4) {
    invert<kHiLo>(reinterpret_cast<float*>(t), a, hi_lo, warp, wait_for_a);
  } else {
    first(warp - 4);
    overlap_invert<kHiLo>();
  }
  if (warp >= 4 || warp % 2 == 0) meanwhile(warp >= 4 ? warp - 4 : 4 + warp / 2);
}
// The same where A and P are all that is wanted; after it by thread 0 both on their way to memory, and read.
template <class First, class Meanwhile>
FW_DEVICE void finish_pairs(char* t, char* a, const char* p, int warp, IntraChunk* out, First&& first,
                            Meanwhile&& meanwhile) {
  solve<false>(
      t, a, {}, warp, [] {}, first, meanwhile);
  store_block([&](auto&& copy) {
    copy(out->a, a, kSw128Bytes);
    copy(out->p, p, kSw128Bytes);
  });
}

// solve(), and X, M and what the backward chunk tile has. kTraining: there may be one. kClaimed: the memory of a is
// free once first() is over.
template <int kTileK, RowForm kForm, bool kTraining, bool kClaimed, bool kHiLo, class ChunkTile, class First,
          class Meanwhile>
FW_DEVICE void finish_delta(const FinishBuffers& s, int warp, const ChunkTiles<kTileK, ChunkTile>& out, First&& first,
                            Meanwhile&& meanwhile) {
  solve<kHiLo>(
      s.t, s.a, s.hi_lo, warp,
      [&] {
        if constexpr (kClaimed) mbarrier_wait(s.claimed, 0);
      },
      [&](int number) {
        first(number);
        if constexpr (kClaimed) mbarrier_arrive(s.claimed);
      },
      meanwhile);
  sync_threads();

  const SplitSw128 a{shared_address(s.a), kHiLo ? shared_address(s.hi_lo.low) : 0, s.exact_keys ? 2 : 3},
      p{shared_address(s.p), kHiLo ? shared_address(s.p_low) : 0};
  const auto address = [](const char* at) { return at != nullptr ? shared_address(at) : 0; };
  uint32_t x_lo[4][4];
  if (warp < kTileK / 16) {
    if (kTraining && out.backward != nullptr) {
      ReadBuffers reads{shared_address(s.minus_e), shared_address(s.q), shared_address(s.y), s.e_factors, s.q_factors};
      if constexpr (kHiLo) reads.e_lo = address(s.e_lo), reads.y_lo = shared_address(s.y_lo);
      transform_reads<kForm, kHiLo>(reads, a, p.high, warp);
      sync_warp();
    }
    if constexpr (kHiLo) {
      transform_keys<kForm != RowForm::kStreams, true>(
          shared_address(s.keys), s.k_factors, a, warp, [](float(&)[8][4]) {}, address(s.keys_lo), x_lo);
    } else {
      uint32_t keys = shared_address(s.keys);
      // addresses are not kept from before: registers
      if constexpr (kTileK == 128) keys = static_cast<uint32_t>(opaque(static_cast<int>(keys)));
      if constexpr (kForm == RowForm::kStreams) {
        // Two calls, so that without lo parts there is no loop over parts.
        const auto middle = [](float(&)[8][4]) {};
        if (s.keys_lo != nullptr) {
          transform_keys<false, false>(keys, nullptr, a, warp, middle, shared_address(s.keys_lo));
        } else {
          transform_keys<false, false>(keys, nullptr, a, warp, middle);
        }
      } else {
        const int rounds = s.last_pair != nullptr && lasts(*s.last_pair) ? 2 : 1;
        transform_keys<true>(keys, s.k_factors, {a.high, 0, rounds}, warp);
      }
    }
  }
  read_products<kHiLo>(p, a, s.m, warp);
  if constexpr (kHiLo) {
    sync_threads();  // nobody reads fine.low and p_low any more
    if (warp < kTileK / 16) store_slice(shared_address(s.hi_lo.low), warp, x_lo);
  }

  store_block([&](auto&& copy) {
    if constexpr (std::is_same_v<ChunkTile, QETiles<kTileK>>) {
      store_solved(out, s.keys, s.m, copy);
    } else {
      copy(out.forward->x, s.keys, sizeof out.forward->x);
      copy(out.forward->m, s.m, kSw128Bytes);
    }
    if (kTraining && out.backward != nullptr) {
      copy(out.backward->y, s.y, sizeof out.backward->y);
      copy(out.backward->q, s.q, sizeof out.backward->q);
      if constexpr (kHiLo) copy(out.backward_lo->lo, s.y_lo, sizeof out.backward_lo->lo);
    }
    if constexpr (kHiLo) copy(out.forward_lo->lo, s.hi_lo.low, sizeof out.forward_lo->lo);
    if (out.pairs != nullptr) {
      copy(out.pairs->a, s.a, kSw128Bytes);
      copy(out.pairs->p, s.p, kSw128Bytes);
    }
  });
}
inline constexpr int kMeanwhileWarps = 6;

// What this block wrote to memory, a matrix [64, kTileK], back into shared memory.
template <int kTileK>
FW_DEVICE void bring(const void* chunk_tile, char* matrix, int thread, int threads) {
  constexpr uint32_t kBytes = 64 * kTileK * 2;
  for (uint32_t i = static_cast<uint32_t>(thread) * 16; i < kBytes; i += static_cast<uint32_t>(threads) * 16)
    cp_async_16(shared_address(matrix + i), static_cast<const char*>(chunk_tile) + i, true);
}

// Shared memory of finish_in_turns(), names as in FinishBuffers. keys_lo: of the keys if lo_parts, becomes that of x.
// reads: a matrix, over what E and Q do not need: p_low, and t and m after it. ones: 64 numbers.
struct TurnBuffers {
  char *keys, *keys_lo, *t, *a, *p, *p_low, *m, *reads;
  HiLoInverse hi_lo;
  const SplitFactors *k_factors, *e_factors;
  float* ones;
  bool exact_keys, lo_parts;
};

// finish_delta() with hi and lo parts in less shared memory. X and M leave first. Then E and Q come back from the
// forward chunk tile, where others have put them, for what the backward chunk tile has of them.
template <int kTileK, RowForm kForm, class First, class Meanwhile>
FW_DEVICE void finish_in_turns(const TurnBuffers& s, int warp, const ChunkTiles<kTileK>& out, First&& first,
                               Meanwhile&& meanwhile) {
  solve<true>(
      s.t, s.a, s.hi_lo, warp, [] {}, first, meanwhile);
  sync_threads();
  const SplitSw128 a{shared_address(s.a), shared_address(s.hi_lo.low), s.exact_keys ? 2 : 3},
      p{shared_address(s.p), shared_address(s.p_low)};
  const uint32_t keys = shared_address(s.keys), keys_lo = shared_address(s.keys_lo);
  if (warp < kTileK / 16) {
    uint32_t x_lo[4][4];
    transform_keys<kForm != RowForm::kStreams, true>(
        keys, s.k_factors, a, warp, [](float(&)[8][4]) {}, s.lo_parts ? keys_lo : 0, x_lo);
    store_slice(keys_lo, warp, x_lo);
  }
  read_products<true>(p, a, s.m, warp);
  store_block([&](auto&& copy) {
    copy(out.forward->x, s.keys, sizeof out.forward->x);
    copy(out.forward->m, s.m, kSw128Bytes);
    copy(out.forward_lo->lo, s.keys_lo, sizeof out.forward_lo->lo);
    if (out.pairs != nullptr) {
      copy(out.pairs->a, s.a, kSw128Bytes);
      copy(out.pairs->p, s.p, kSw128Bytes);
    }
  });
  if (out.backward == nullptr) return;
  sync_threads();
  const int thread = static_cast<int>(thread_index());
  bring<kTileK>(out.forward->e, s.keys, thread, kPrepareThreads);
  if (s.lo_parts) bring<kTileK>(out.e_lo, s.keys_lo, thread, kPrepareThreads);
  bring<kTileK>(out.forward->q, s.reads, thread, kPrepareThreads);
  cp_async_commit();
  if (thread < kChunk) s.ones[thread] = 1;
  cp_async_wait<0>();
  sync_threads();
  if (warp < kTileK / 16) {
    ReadBuffers reads{keys, shared_address(s.reads), keys, s.e_factors, s.ones};
    reads.e_lo = s.lo_parts ? keys_lo : 0, reads.y_lo = keys_lo;
    transform_reads<kForm, true>(reads, a, p.high, warp);
  }
  store_block([&](auto&& copy) {
    copy(out.backward->y, s.keys, sizeof out.backward->y);
    copy(out.backward->q, s.reads, sizeof out.backward->q);
    copy(out.backward_lo->lo, s.keys_lo, sizeof out.backward_lo->lo);
  });
}

// Additive rules: m = P, by all threads; finish_additive() before the block ends. x and q are written by others.
template <int kTileK>
FW_DEVICE void start_additive(const char* p, const ChunkTiles<kTileK>& out) {
  begin_stores([&](auto&& copy) {
    copy(out.forward->m, p, kSw128Bytes);
    if (out.pairs != nullptr) copy(out.pairs->p, p, kSw128Bytes);
  });
}
FW_DEVICE void finish_additive() { end_stores(); }

}  // namespace fw::cuda
