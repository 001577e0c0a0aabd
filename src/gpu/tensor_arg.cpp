#include "gpu/tensor_arg.h"

namespace fw::cuda {
namespace {

uint64_t address(const void* p) { return static_cast<uint64_t>(reinterpret_cast<uintptr_t>(p)); }
uint64_t stride_bits(const TokenArg& a) { return static_cast<uint64_t>(a.stride_b | a.stride_t | a.stride_h); }

}  // namespace

bool aligned_rows(const TokenArg& a) { return ((stride_bits(a) * (a.bf16 != 0 ? 2 : 4) | address(a.data)) & 15) == 0; }
bool is_vec16(const TokenArg& a, int dim) {
  return a.data != nullptr && a.bf16 != 0 && ((stride_bits(a) | static_cast<uint64_t>(dim)) & 7) == 0 &&
         (address(a.data) & 15) == 0;
}
bool is_vec2(const TokenArg& a, int dim) {
  return a.data != nullptr && ((stride_bits(a) | static_cast<uint64_t>(dim)) & 1) == 0 &&
         (address(a.data) & (a.bf16 != 0 ? 3 : 7)) == 0;
}
bool tma_compatible(const TokenArg& a, int64_t B, int64_t T, int64_t heads, int64_t dim) {
  constexpr int64_t kMostElements = int64_t{1} << 31, kMostBytes = int64_t{1} << 39;
  const auto stride = [](int64_t elements, int64_t count) {
    return count <= 1 || (elements > 0 && elements % 8 == 0 && 2 * elements < kMostBytes);
  };
  const auto count = [](int64_t n) { return n > 0 && n <= kMostElements; };
  return a.data != nullptr && a.bf16 != 0 && address(a.data) % 16 == 0 && dim % 8 == 0 && count(B) && count(T) &&
         count(heads) && count(dim) && stride(a.stride_b, B) && stride(a.stride_t, T) && stride(a.stride_h, heads);
}

}  // namespace fw::cuda
