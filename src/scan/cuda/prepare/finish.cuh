// The second half of prepare for online rules: from T and P to the images' x, m, y and q, in shared memory and then in memory.
#pragma once

#include <type_traits>

#include "scan/cuda/prepare/products.cuh"

namespace fw::cuda {

// Whether a chunk, of which this is the last row's `pair` (prepare/scalar_parts.cuh), keeps so much of the state that what bf16 takes from keys times their
// factors is to be seen in what the state has after many chunks: where all decay by more, errors fade sooner than they add up.
inline constexpr float kLastingChunk = -2.0f;
FW_DEVICE bool lasts(float last_pair) { return last_pair > kLastingChunk; }

// Shared memory of the second half. keys: Khat, or what it is a multiple of row by row (the factors are k_factors); becomes x.
// t: T as prepare/inverse.cuh wants it. a, p: panels. m: panel, may be the place of t. fine, p_low: where kFine; p_low: the panel
// of what p rounds off.
// Where the backward image is wanted, minus_e, q and y as in transform_reads; q becomes the backward image's, y may be the place
// of t where it is not that of m.
struct FinishBuffers {
  char *keys, *t, *a, *p, *m, *minus_e, *q, *y;
  const SplitFactors *k_factors, *e_factors;
  const float* q_factors;
  FineInverse fine = {};
  char* p_low = nullptr;
  bool exact_keys = false;  // the factors are powers of two: keys times them leave nothing out
  // kFine: what bf16 leaves out of the keys and of minus_e, or null; a matrix for what it leaves out of y, may be e_rests. (That of x goes where fine.low and
  // p_low were, which lie side by side.)
  char *key_rests = nullptr, *e_rests = nullptr, *y_rests = nullptr;
  const float* last_pair = nullptr;  // not kFine: of the chunk's rows, for lasts()
  uint64_t* claimed = nullptr;       // kClaimed: a half barrier
};

// A barrier in shared memory for four warps that arrive and go on and four that wait, which racecheck follows (and not named barriers, where warps
// meet unequally often). By thread 0 before a sync_threads() that is before any use.
FW_DEVICE uint64_t* start_half_barrier(char* at) {
  uint64_t* const barrier = reinterpret_cast<uint64_t*>(at);
  if (thread_index() == 0) {
    mbarrier_init(barrier, kPrepareThreads / 2);
    mbarrier_init_fence();
  }
  return barrier;
}

// Image: what the forward scan reads, ForwardImage, RowImage, ChunkNumbers or StreamImage.
template <int kKey, class Image = ForwardImage<kKey>>
struct ChunkImages {
  Image* forward;
  BackwardImage<kKey>* backward;  // may be null, and so may the others
  BackwardNumbers* numbers;
  PairImage* pairs;
  SolvedImage<kKey>* solved;  // of StreamImage
  uint16_t *keys, *z;
  FineImage<kKey>*forward_fine, *backward_fine;
  char *e_rests, *k_rests;
};

// Of a row of the chunk, with its decays: k of w, what e takes of k and of q (with the sign of -E), what r does. kMixed: of mixed_streams().
template <bool kMixed, int kKey, class Image>
FW_DEVICE void put_numbers(const ChunkImages<kKey, Image>& out, int row, float k, float2 erase, float2 read) {
  if (out.numbers == nullptr) return;
  out.numbers->k[row] = k, out.numbers->e[row] = erase.x, out.numbers->q[row] = read.y;
  if constexpr (kMixed) out.numbers->erase_q[row] = erase.y, out.numbers->read_k[row] = read.x;
}

template <int kKey, class Image = ForwardImage<kKey>>
FW_DEVICE ChunkImages<kKey, Image> chunk_images(const PrepareArgs& args, int64_t item) {
  ChunkImages<kKey, Image> out;
  const int64_t value_blocks = (args.problem.V + kValueBlock - 1) / kValueBlock;
  out.forward = static_cast<Image*>(args.forward) + item;
  out.backward = args.backward != nullptr ? static_cast<BackwardImage<kKey>*>(args.backward) + item : nullptr;
  out.numbers = args.numbers != nullptr ? args.numbers + item : nullptr;
  out.pairs = args.pairs != nullptr ? args.pairs + item : nullptr;
  out.solved = args.solved != nullptr ? static_cast<SolvedImage<kKey>*>(args.solved) + item : nullptr;
  out.keys = args.keys != nullptr ? args.keys + item * (64 * kKey) : nullptr;
  out.z = args.z != nullptr ? args.z + item * value_blocks * kPanel : nullptr;
  const auto fine = [&](const FineImages& all) { return all.images != nullptr ? static_cast<FineImage<kKey>*>(all.images) + item : nullptr; };
  const auto rests = [&](const FineImages& all) { return all.rests != nullptr ? reinterpret_cast<char*>(all.rests + item * (64 * kKey)) : nullptr; };
  out.forward_fine = fine(args.forward_fine), out.backward_fine = fine(args.backward_fine);
  out.e_rests = rests(args.forward_fine), out.k_rests = rests(args.backward_fine);
  return out;
}

// By one thread: X and M on their way to memory.
template <int kKey, class Image>
FW_DEVICE void store_solved(const ChunkImages<kKey, Image>& out, const char* x, const char* m) {
  bulk_store(out.solved->x, x, sizeof out.solved->x);
  bulk_store(out.solved->m, m, kPanelBytes);
}

// After warps 0 to 3 wrote the blocks of T, the one of its number each, and the others P: no barrier is wanted in between. Four warps
// invert; the others call first(a number of 4 for each warp), and then they, and two of the four when they are through, call
// meanwhile(a number of 6). wait_for_a: of invert().
template <bool kFine, class WaitForA, class First, class Meanwhile>
FW_DEVICE void solve(char* t, char* a, const FineInverse& fine, int warp, WaitForA&& wait_for_a, First&& first, Meanwhile&& meanwhile) {
  if (warp < 4) {
    invert<kFine>(reinterpret_cast<float*>(t), a, fine, warp, wait_for_a);
  } else {
    first(warp - 4);
    beside_invert();
  }
  if (warp >= 4 || warp % 2 == 0) meanwhile(warp >= 4 ? warp - 4 : 4 + warp / 2);
}
// The same where A and P are all that is wanted; behind it by thread 0 both on their way to memory, and read.
template <class First, class Meanwhile>
FW_DEVICE void finish_pairs(char* t, char* a, const char* p, int warp, PairImage* out, First&& first, Meanwhile&& meanwhile) {
  solve<false>(
      t, a, {}, warp, [] {}, first, meanwhile);
  fence_async_shared();
  sync_threads();
  if (thread_index() == 0) {
    bulk_store(out->a, a, kPanelBytes);
    bulk_store(out->p, p, kPanelBytes);
    bulk_commit();
    bulk_wait_read<0>();
  }
}

// solve(), and X, M and what the backward image has. kTraining: there may be one. kClaimed: the place of a is free once first() is over.
template <int kKey, RowForm kForm, bool kTraining, bool kClaimed, bool kFine, class Image, class First, class Meanwhile>
FW_DEVICE void finish_online(const FinishBuffers& s, int warp, const ChunkImages<kKey, Image>& out, First&& first, Meanwhile&& meanwhile) {
  solve<kFine>(
      s.t, s.a, s.fine, warp,
      [&] {
        if constexpr (kClaimed) mbarrier_wait(s.claimed, 0);
      },
      [&](int number) {
        first(number);
        if constexpr (kClaimed) mbarrier_arrive(s.claimed);
      },
      meanwhile);
  sync_threads();

  const SplitPanel a{shared_address(s.a), kFine ? shared_address(s.fine.low) : 0, s.exact_keys ? 2 : 3},
      p{shared_address(s.p), kFine ? shared_address(s.p_low) : 0};
  const auto address = [](const char* at) { return at != nullptr ? shared_address(at) : 0; };
  uint32_t x_rests[4][4];
  if (warp < kKey / 16) {
    if (kTraining && out.backward != nullptr) {
      ReadBuffers reads{shared_address(s.minus_e), shared_address(s.q), shared_address(s.y), s.e_factors, s.q_factors};
      if constexpr (kFine) reads.e_rests = address(s.e_rests), reads.y_rests = shared_address(s.y_rests);
      transform_reads<kForm, kFine>(reads, a, p.high, warp);
      sync_warp();
    }
    if constexpr (kFine) {
      transform_keys<kForm != RowForm::kStreams, true>(
          shared_address(s.keys), s.k_factors, a, warp, [](float(&)[8][4]) {}, address(s.key_rests), x_rests);
    } else {
      uint32_t keys = shared_address(s.keys);
      if constexpr (kKey == 128) keys = static_cast<uint32_t>(opaque(static_cast<int>(keys)));  // addresses are not kept from before: registers
      const int rounds = s.last_pair != nullptr && lasts(*s.last_pair) ? 2 : 1;
      transform_keys<kForm != RowForm::kStreams>(keys, s.k_factors, {a.high, 0, rounds}, warp);
    }
  }
  read_products<kFine>(p, a, s.m, warp);
  if constexpr (kFine) {
    sync_threads();  // nobody reads fine.low and p_low any more
    if (warp < kKey / 16) store_slice(shared_address(s.fine.low), warp, x_rests);
  }

  fence_async_shared();
  sync_threads();
  if (thread_index() == 0) {
    if constexpr (std::is_same_v<Image, StreamImage<kKey>>) {
      store_solved(out, s.keys, s.m);
    } else {
      bulk_store(out.forward->x, s.keys, sizeof out.forward->x);
      bulk_store(out.forward->m, s.m, kPanelBytes);
    }
    if (kTraining && out.backward != nullptr) {
      bulk_store(out.backward->y, s.y, sizeof out.backward->y);
      bulk_store(out.backward->q, s.q, sizeof out.backward->q);
      if constexpr (kFine) bulk_store(out.backward_fine->rest, s.y_rests, sizeof out.backward_fine->rest);
    }
    if constexpr (kFine) bulk_store(out.forward_fine->rest, s.fine.low, sizeof out.forward_fine->rest);
    if (out.pairs != nullptr) {
      bulk_store(out.pairs->a, s.a, kPanelBytes);
      bulk_store(out.pairs->p, s.p, kPanelBytes);
    }
    bulk_commit();
    bulk_wait_read<0>();
  }
}
inline constexpr int kMeanwhileWarps = 6;

// Offline rules: m = P, by all threads; finish_offline() before the block ends. x and q are written by others.
template <int kKey>
FW_DEVICE void start_offline(const char* p, const ChunkImages<kKey>& out) {
  fence_async_shared();
  sync_threads();
  if (thread_index() == 0) {
    bulk_store(out.forward->m, p, kPanelBytes);
    if (out.pairs != nullptr) bulk_store(out.pairs->p, p, kPanelBytes);
    bulk_commit();
  }
}
FW_DEVICE void finish_offline() {
  if (thread_index() == 0) bulk_wait_read<0>();
}

}  // namespace fw::cuda
