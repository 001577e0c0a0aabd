// Offsets of the sequences of a short convolution that the C header calls, in device memory. No work waits.
#include <cstring>
#include <vector>

#include "gpu/launch.h"
#include "gpu/ptx.cuh"
#include "gpu/sequences.h"
#include "gpu/upload.h"
#include "ops/short_conv.h"

namespace fw::cuda {
namespace {

constexpr unsigned kOfBlock = 256;

// The last is `tokens` whatever the caller wrote: a thread that looks for a token's sequence finds one.
__global__ void __launch_bounds__(kOfBlock)
    widen_offsets_kernel(const int32_t* from, int64_t count, int64_t tokens, int64_t* made) {
  const int64_t i = int64_t{block_index_x()} * kOfBlock + thread_index();
  if (i < count) made[i] = from[i];
  if (i == count) made[i] = tokens;
}

}  // namespace

void upload_conv_offsets(const int64_t* offsets, int64_t count, int64_t* made, void* stream) {
  std::vector<int32_t> words(2 * static_cast<size_t>(count + 1));
  std::memcpy(words.data(), offsets, words.size() * sizeof(int32_t));
  upload(words.data(), static_cast<int64_t>(words.size()), reinterpret_cast<int32_t*>(made), stream);
}

void make_conv_offsets(const void* offsets, bool wide, int64_t count, int64_t longest, int64_t tokens, int32_t* scratch,
                       int64_t* made, void* stream) {
  make_sequences(offsets, wide, count, longest, tokens, scratch, scratch + count + 1, stream);
  launch(widen_offsets_kernel, Dim3{static_cast<unsigned>((count + kOfBlock) / kOfBlock)}, kOfBlock, 0, stream, scratch,
         count, tokens, made);
}

void clear_floats(float* to, int64_t count, void* stream) { clear(reinterpret_cast<uint32_t*>(to), count, stream); }

}  // namespace fw::cuda
