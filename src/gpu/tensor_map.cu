// The driver's function that encodes a map is asked for by name, so that nothing links to the driver.
#include <cstring>

#include "gpu/launch.h"
#include "gpu/tensor_map.h"
#ifndef FW_CUDA_EMULATION
#include <cuda.h>
#endif

namespace fw::cuda {
#ifdef FW_CUDA_EMULATION

bool make_tensor_map(const TokenArg& a, int64_t B, int64_t T, int64_t heads, int64_t dim, TensorMap& map, int rows) {
  if (!tma_compatible(a, B, T, heads, dim)) return false;
  const emulation::TensorBox box{
      static_cast<const char*>(a.data), {dim, heads, T, B}, {2, 2 * a.stride_h, 2 * a.stride_t, 2 * a.stride_b}, rows};
  static_assert(sizeof box <= sizeof map);
  std::memcpy(&map, &box, sizeof box);
  return true;
}

#else

namespace {

using Encode = decltype(&cuTensorMapEncodeTiled);
Encode find_encode() {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found;
  const cudaError_t status =
      cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &found);
  if (status != cudaSuccess) cudaGetLastError();
  return status == cudaSuccess && found == cudaDriverEntryPointSuccess ? reinterpret_cast<Encode>(function) : nullptr;
}

}  // namespace

bool make_tensor_map(const TokenArg& a, int64_t B, int64_t T, int64_t heads, int64_t dim, TensorMap& map, int rows) {
  static const Encode encode = find_encode();
  if (encode == nullptr || !tma_compatible(a, B, T, heads, dim)) return false;
  static_assert(sizeof(CUtensorMap) == sizeof map && alignof(CUtensorMap) <= alignof(TensorMap));
  // A stride that nothing steps by must still be one that the driver takes.
  const auto bytes = [&](int64_t stride, int64_t count) {
    return static_cast<cuuint64_t>(2 * (count > 1 ? stride : dim));
  };
  const cuuint64_t dims[4] = {static_cast<cuuint64_t>(dim), static_cast<cuuint64_t>(heads), static_cast<cuuint64_t>(T),
                              static_cast<cuuint64_t>(B)};
  const cuuint64_t strides[3] = {bytes(a.stride_h, heads), bytes(a.stride_t, T), bytes(a.stride_b, B)};
  const cuuint32_t box[4] = {64, 1, static_cast<cuuint32_t>(rows), 1}, steps[4] = {1, 1, 1, 1};
  return encode(reinterpret_cast<CUtensorMap*>(&map), CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 4, a.data, dims, strides, box,
                steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

#endif

}  // namespace fw::cuda
