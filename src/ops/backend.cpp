#include "ops/backend.h"

#include <limits>
#include <string_view>
#include <type_traits>

#include "base/error.h"
#include "base/plan_device.h"
#include "ops/cuda/gemm_m64.h"
#include "ops/cuda/gemm_m8.h"
#include "ops/cuda/kinds.h"
#include "ops/cuda/products.h"
#include "ops/profile.h"

namespace fw {
namespace {

template <class T>
inline constexpr bool kOnHost = std::is_same_v<T, float> || std::is_same_v<T, double>;
template <class T>
inline constexpr bool kOnCuda = std::is_same_v<T, float> || std::is_same_v<T, Bf16>;

// The first operation that a table lacks of those that every model needs, or of those of one kind of layers; or null.
template <class T>
const char* missing(const Ops<T>& ops) {
#define FW_LAYER_OP(kind, name, args)
#define FW_OP(name, args) \
  if (ops.name == nullptr) return #name;
#include "ops/ops.def"
#undef FW_OP
  return nullptr;
}
template <class T>
const char* missing(const Ops<T>& ops, std::string_view layer) {
#define FW_LAYER_OP(kind, name, args) \
  if (layer == #kind && ops.name == nullptr) return #name;
#define FW_OP(name, args)
#include "ops/ops.def"
#undef FW_OP
  return nullptr;
}

}  // namespace

template <class T>
const Ops<T>& plain_table_of(const Device& device) {
  static constexpr Ops<T> kNone;
  if constexpr (kOnHost<T>) {
    if (device.kind() == FW_DEVICE_CPU) return only_plans(device) ? planned_ops<T>() : host_ops<T>();
  }
  if constexpr (kOnCuda<T>) {
    if (device.kind() == FW_DEVICE_CUDA) return only_plans(device) ? planned_cuda_ops<T>() : cuda_ops<T>();
  }
  return kNone;
}

template <class T>
const Ops<T>& table_of(const Device& device) {
  return Profile::current() != nullptr && !only_plans(device) ? profiled_ops<T>() : plain_table_of<T>(device);
}

template <class T>
const Ops<T>& ops_of(const Device& device) {
  if (const char* name = missing(plain_table_of<T>(device)))
    fail_usage("device: expected the CPU: models of this type do not run on CUDA devices (no operation {})", name);
  if (device.kind() == FW_DEVICE_CUDA && !only_plans(device)) require_cuda_libraries();
  return table_of<T>(device);
}

template <class T>
void require_layer(std::string_view kind, const Device& device) {
  const char* name = missing(plain_table_of<T>(device), kind);
  if (name != nullptr)
    fail_usage("device: expected the CPU: layers called {} do not run on CUDA devices (no operation {})", kind, name);
}

LayerLimits layer_limits(const Device& device) {
  constexpr int64_t kNone = std::numeric_limits<int64_t>::max();
  if (device.kind() == FW_DEVICE_CPU) return {kNone, kNone, kNone, kNone};
  return {cuda::kinds::kMostAttentionDim, cuda::kinds::kMostMesaKey, cuda::kinds::kMostMamba3Sums,
          cuda::kinds::kMostExperts};
}

RowLimits row_limits(const Device& device) {
  if (device.kind() == FW_DEVICE_CPU) return {8, 64};  // no kernel of its own: the routes alone
  return {cuda::kGemmM8MaxM, cuda::kGemmM64MaxM};
}

size_t arena_block(const Device& device) {
  if (device.kind() == FW_DEVICE_CPU) return size_t{4} << 20;
  return only_plans(device) ? size_t{1} << 40 : size_t{64} << 20;
}

size_t library_bytes(const Device& device) { return device.kind() == FW_DEVICE_CUDA ? cuda::kProductsWorkspace : 0; }

template const Ops<float>& plain_table_of<float>(const Device&);
template const Ops<double>& plain_table_of<double>(const Device&);
template const Ops<Bf16>& plain_table_of<Bf16>(const Device&);
template const Ops<float>& table_of<float>(const Device&);
template const Ops<double>& table_of<double>(const Device&);
template const Ops<Bf16>& table_of<Bf16>(const Device&);
template const Ops<float>& ops_of<float>(const Device&);
template const Ops<double>& ops_of<double>(const Device&);
template const Ops<Bf16>& ops_of<Bf16>(const Device&);
template void require_layer<float>(std::string_view, const Device&);
template void require_layer<double>(std::string_view, const Device&);
template void require_layer<Bf16>(std::string_view, const Device&);

}  // namespace fw
