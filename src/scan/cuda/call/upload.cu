// Numbers of the host as kernel parameters, the tables of packed sequences, and zeros. See upload.h and kernels.h.
#include <algorithm>

#include "scan/cuda/call/kernels.h"
#include "scan/cuda/call/launch.h"
#include "scan/cuda/call/upload.h"
#include "scan/cuda/machine/ptx.cuh"

namespace fw::cuda {
namespace {

// A kernel takes 32,764 bytes of parameters at most; few numbers go in the 4 KiB that cost nothing more than a launch.
template <int kCount>
struct Values {
  int32_t at[kCount];
};

template <int kCount>
__global__ void upload_kernel(const __grid_constant__ Values<kCount> values, int count, int32_t* device) {
  for (int i = static_cast<int>(block_index_x() * block_size() + thread_index()); i < count; i += static_cast<int>(grid_size_x() * block_size()))
    device[i] = values.at[i];
}

template <int kCount>
void upload_some(const int32_t* values, int count, int32_t* device, void* stream) {
  Values<kCount> copy;
  std::copy_n(values, count, copy.at);
  std::fill_n(copy.at + count, kCount - count, 0);
  constexpr int kThreads = 256;
  launch(upload_kernel<kCount>, Dim3{static_cast<unsigned>((count + kThreads - 1) / kThreads)}, kThreads, 0, stream, copy, count, device);
}

// Lengths of the sequences from number `first` on, as kernel parameters: what both tables are made of in half or a quarter of their bytes.
template <class Length, int kCount>
struct Lengths {
  Length of[kCount];
};
constexpr int kSumThreads = 1024;

// One block. tokens, chunks: before sequence `first`.
template <class Length, int kCount>
__global__ void __launch_bounds__(kSumThreads) sequences_kernel(const __grid_constant__ Lengths<Length, kCount> lengths, int first, int count, int tokens,
                                                                int chunks, int32_t* offsets, int32_t* chunk_base) {
  constexpr int kEach = (kCount + kSumThreads - 1) / kSumThreads, kWarps = kSumThreads / 32;
  int32_t(*const sums)[2] = reinterpret_cast<int32_t(*)[2]>(shared_memory());  // of a warp's sequences
  const int begin = static_cast<int>(thread_index()) * kEach, lane = static_cast<int>(lane_index());
  const auto each = [&](auto&& body) {
    for (int i = begin; i < begin + kEach && i < count; ++i) body(i, static_cast<int32_t>(lengths.of[i]));
  };
  int own[2] = {}, before[2];
  each([&](int, int32_t length) { own[0] += length, own[1] += (length + kChunk - 1) / kChunk; });
  for (int part = 0; part < 2; ++part) {
    int sum = own[part];
    for (int step = 1; step < 32; step *= 2) {
      const int32_t other = shuffle_up(sum, step);
      if (lane >= step) sum += other;
    }
    before[part] = sum - own[part];
    if (lane == 31) sums[warp_index()][part] = sum;
  }
  sync_threads();
  for (unsigned i = 0; i < static_cast<unsigned>(kWarps) && i < warp_index(); ++i) before[0] += sums[i][0], before[1] += sums[i][1];
  int at = tokens + before[0], chunk = chunks + before[1];
  if (begin == 0 && first == 0) offsets[0] = chunk_base[0] = 0;
  each([&](int i, int32_t length) {
    offsets[first + i + 1] = at += length;
    chunk_base[first + i + 1] = chunk += (length + kChunk - 1) / kChunk;
  });
}

template <class Length, int kCount>
void upload_lengths(const int64_t* from, int first, int count, int tokens, int chunks, int32_t* offsets, int32_t* chunk_base, void* stream) {
  Lengths<Length, kCount> lengths;
  for (int i = 0; i < kCount; ++i) lengths.of[i] = static_cast<Length>(i < count ? from[i + 1] - from[i] : 0);
  launch(sequences_kernel<Length, kCount>, Dim3{1}, kSumThreads, 2 * sizeof(int32_t) * kSumThreads / 32, stream, lengths, first, count, tokens, chunks, offsets,
         chunk_base);
}

__global__ void clear_kernel(uint32_t* device, int64_t count) {
  for (int64_t i = int64_t{block_index_x()} * block_size() + thread_index(); i < count; i += int64_t{grid_size_x()} * block_size()) device[i] = 0;
}

}  // namespace

void clear(uint32_t* device, int64_t count, void* stream) {
  constexpr int64_t kThreads = 256, kMostBlocks = 256;
  launch(clear_kernel, Dim3{static_cast<unsigned>(std::min(kMostBlocks, (count + kThreads - 1) / kThreads))}, kThreads, 0, stream, device, count);
}

void upload_sequences(const int64_t* sequences, int64_t count, int32_t* offsets, int32_t* chunk_base, void* stream) {
  constexpr int64_t kFew = 500, kMany = 8000;
  bool is_short = true;
  for (int64_t i = 0; i < count; ++i) is_short = is_short && sequences[i + 1] - sequences[i] <= UINT16_MAX;
  const int64_t most = is_short ? 2 * kMany : kMany, few = is_short ? 2 * kFew : kFew;
  int64_t chunks = 0;
  for (int64_t first = 0; first < count; first += most) {
    const int64_t* const from = sequences + first;
    const int some = static_cast<int>(std::min(most, count - first)), at = static_cast<int>(first);
    const int before = static_cast<int>(from[0]), base = static_cast<int>(chunks);
    const auto place = [&](auto lengths) { lengths(from, at, some, before, base, offsets, chunk_base, stream); };
    if (is_short) {
      place(some <= few ? upload_lengths<uint16_t, 2 * kFew> : upload_lengths<uint16_t, 2 * kMany>);
    } else {
      place(some <= few ? upload_lengths<int32_t, kFew> : upload_lengths<int32_t, kMany>);
    }
    for (int i = 0; i < some; ++i) chunks += (from[i + 1] - from[i] + kChunk - 1) / kChunk;
  }
}

void upload(const int32_t* values, int64_t count, int32_t* device, void* stream) {
  constexpr int64_t kFew = 1000, kMany = 8000;
  for (int64_t i = 0; i < count; i += kMany) {
    const int some = static_cast<int>(std::min(kMany, count - i));
    if (some <= kFew) {
      upload_some<kFew>(values + i, some, device + i, stream);
    } else {
      upload_some<kMany>(values + i, some, device + i, stream);
    }
  }
}

}  // namespace fw::cuda
