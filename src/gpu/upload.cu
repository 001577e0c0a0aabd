// Numbers of the host as kernel parameters, and zeros. See upload.h.
#include <algorithm>

#include "gpu/launch.h"
#include "gpu/ptx.cuh"
#include "gpu/upload.h"

namespace fw::cuda {
namespace {

// A kernel takes 32,764 bytes of parameters at most; few numbers go in the 4 KiB that cost nothing more than a launch.
template <int kCount>
struct Values {
  int32_t at[kCount];
};

template <int kCount>
__global__ void upload_kernel(const __grid_constant__ Values<kCount> values, int count, int32_t* device) {
  for (int i = static_cast<int>(block_index_x() * block_size() + thread_index()); i < count;
       i += static_cast<int>(grid_size_x() * block_size()))
    device[i] = values.at[i];
}

template <int kCount>
void upload_some(const int32_t* values, int count, int32_t* device, void* stream) {
  Values<kCount> copy;
  std::copy_n(values, count, copy.at);
  std::fill_n(copy.at + count, kCount - count, 0);
  constexpr int kOfBlock = 256;
  launch(upload_kernel<kCount>, Dim3{static_cast<unsigned>((count + kOfBlock - 1) / kOfBlock)}, kOfBlock, 0, stream,
         copy, count, device);
}

__global__ void clear_kernel(uint32_t* device, int64_t count) {
  for (int64_t i = int64_t{block_index_x()} * block_size() + thread_index(); i < count;
       i += int64_t{grid_size_x()} * block_size())
    device[i] = 0;
}

}  // namespace

void clear(uint32_t* device, int64_t count, void* stream) {
  constexpr int64_t kOfBlock = 256, kMostBlocks = 256;
  launch(clear_kernel, Dim3{static_cast<unsigned>(std::min(kMostBlocks, (count + kOfBlock - 1) / kOfBlock))}, kOfBlock,
         0, stream, device, count);
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
