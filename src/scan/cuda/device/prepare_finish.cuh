// The second half of prepare for online rules: from T and P to the images' x, m, y and q, in shared memory and then in memory.
#pragma once

#include "scan/cuda/device/prepare_products.cuh"

namespace fw::cuda {

// Shared memory of the second half. keys: Khat (scalar decay: w, with exp(G_C - G) in a_rows), becomes x. t: 16 KiB of float32 T,
// later m. minus_e, q: as in the forward image, where the backward image is wanted; become y and its q.
struct FinishBuffers {
  char *keys, *t, *a, *a_rows, *p, *minus_e, *q;
};

template <int kKey>
struct ChunkImages {
  ForwardImage<kKey>* forward;
  BackwardImage<kKey>* backward;  // may be null, and so may the others
  PairImage* pairs;
  uint16_t* z;
};

template <int kKey>
FW_DEVICE ChunkImages<kKey> chunk_images(const PrepareArgs& args, int64_t item) {
  ChunkImages<kKey> out;
  const int64_t value_blocks = (args.problem.V + kValueBlock - 1) / kValueBlock;
  out.forward = static_cast<ForwardImage<kKey>*>(args.forward) + item;
  out.backward = args.backward != nullptr ? static_cast<BackwardImage<kKey>*>(args.backward) + item : nullptr;
  out.pairs = args.pairs != nullptr ? args.pairs + item : nullptr;
  out.z = args.z != nullptr ? args.z + item * value_blocks * kPanel : nullptr;
  return out;
}

// After T and P were written, by all threads and with a barrier behind them. Warps 0 and 1 invert; the others call `meanwhile`
// (thread of 192).
template <int kKey, class Meanwhile>
FW_DEVICE void finish_online(const FinishBuffers& s, const float* suffix, const ChunkImages<kKey>& out, Meanwhile&& meanwhile) {
  const int warp = static_cast<int>(warp_index()), thread = static_cast<int>(thread_index());
  if (warp < 2) {
    invert(reinterpret_cast<float*>(s.t));
  } else {
    meanwhile(thread - 64);
  }
  sync_threads();
  round_inverse(reinterpret_cast<const float*>(s.t), s.a, s.a_rows, suffix);
  sync_threads();

  const uint32_t a = shared_address(s.a), p = shared_address(s.p);
  const uint32_t a_rows = s.a_rows != nullptr ? shared_address(s.a_rows) : a;
  constexpr int kSlices = kKey / 16;
  if (warp < kSlices) transform_keys(shared_address(s.keys), a_rows, warp);
  if (out.backward != nullptr && warp >= 8 - kSlices) transform_reads(shared_address(s.minus_e), shared_address(s.q), a, p, warp - (8 - kSlices));
  read_products(p, a, s.t);

  fence_async_shared();
  sync_threads();
  if (thread == 0) {
    bulk_store(out.forward->x, s.keys, sizeof out.forward->x);
    bulk_store(out.forward->m, s.t, kPanelBytes);
    if (out.backward != nullptr) {
      bulk_store(out.backward->y, s.minus_e, sizeof out.backward->y);
      bulk_store(out.backward->q, s.q, sizeof out.backward->q);
    }
    if (out.pairs != nullptr) {
      bulk_store(out.pairs->a, s.a, kPanelBytes);
      bulk_store(out.pairs->p, s.p, kPanelBytes);
    }
    bulk_commit();
    bulk_wait_read<0>();
  }
}

// The same for offline rules, where x and q are written already: m = P.
template <int kKey>
FW_DEVICE void finish_offline(const char* p, const ChunkImages<kKey>& out) {
  fence_async_shared();
  sync_threads();
  if (thread_index() == 0) {
    bulk_store(out.forward->m, p, kPanelBytes);
    if (out.pairs != nullptr) bulk_store(out.pairs->p, p, kPanelBytes);
    bulk_commit();
    bulk_wait_read<0>();
  }
}

}  // namespace fw::cuda
