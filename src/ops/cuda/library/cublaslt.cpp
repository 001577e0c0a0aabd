// Products by cuBLASLt. The library is not linked: a program runs without it until it multiplies on a GPU.
// The library thinks in columns: a row-major matrix is its transpose, so C' = op(B)' op(A)' is asked for.
#include <cublasLt.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdlib>
#include <map>
#include <tuple>
#include <type_traits>
#include <vector>

#include "base/cuda_library.h"
#include "base/device.h"
#include "base/error.h"
#include "ops/cuda/products.h"

namespace fw::cuda {
namespace {

// The functions, by their names in the library.
struct Functions {
  decltype(&::cublasLtCreate) Create = nullptr;
  decltype(&::cublasLtMatmulDescCreate) MatmulDescCreate = nullptr;
  decltype(&::cublasLtMatmulDescDestroy) MatmulDescDestroy = nullptr;
  decltype(&::cublasLtMatmulDescSetAttribute) MatmulDescSetAttribute = nullptr;
  decltype(&::cublasLtMatrixLayoutCreate) MatrixLayoutCreate = nullptr;
  decltype(&::cublasLtMatrixLayoutDestroy) MatrixLayoutDestroy = nullptr;
  decltype(&::cublasLtMatmulPreferenceCreate) MatmulPreferenceCreate = nullptr;
  decltype(&::cublasLtMatmulPreferenceDestroy) MatmulPreferenceDestroy = nullptr;
  decltype(&::cublasLtMatmulPreferenceSetAttribute) MatmulPreferenceSetAttribute = nullptr;
  decltype(&::cublasLtMatmulAlgoGetHeuristic) MatmulAlgoGetHeuristic = nullptr;
  decltype(&::cublasLtMatmul) Matmul = nullptr;
};

Functions open_library() {
  void* const library = open_cuda_library({"libcublasLt.so.13", "libcublasLt.so.12"});
  if (library == nullptr) {
    throw DeviceError(
        fmt::format("device: cuBLASLt (libcublasLt.so.13 or .12), which matrix products on a GPU need, was not "
                    "found{}; 'make gpu' brings it, or say with "
                    "FW_CUDA_LIBS in which folder it lies",
                    std::getenv("FW_CUDA_LIBS") != nullptr ? " in FW_CUDA_LIBS" : ""));
  }
  Functions functions;
  const auto find = [&](auto& function, const char* name) {
    function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(function_of(library, name));
    if (function == nullptr)
      throw DeviceError(fmt::format("device: cuBLASLt has no function {}: expected version 12 or 13", name));
  };
  find(functions.Create, "cublasLtCreate");
  find(functions.MatmulDescCreate, "cublasLtMatmulDescCreate");
  find(functions.MatmulDescDestroy, "cublasLtMatmulDescDestroy");
  find(functions.MatmulDescSetAttribute, "cublasLtMatmulDescSetAttribute");
  find(functions.MatrixLayoutCreate, "cublasLtMatrixLayoutCreate");
  find(functions.MatrixLayoutDestroy, "cublasLtMatrixLayoutDestroy");
  find(functions.MatmulPreferenceCreate, "cublasLtMatmulPreferenceCreate");
  find(functions.MatmulPreferenceDestroy, "cublasLtMatmulPreferenceDestroy");
  find(functions.MatmulPreferenceSetAttribute, "cublasLtMatmulPreferenceSetAttribute");
  find(functions.MatmulAlgoGetHeuristic, "cublasLtMatmulAlgoGetHeuristic");
  find(functions.Matmul, "cublasLtMatmul");
  return functions;
}

void expect(cublasStatus_t status, const char* what) {
  if (status != CUBLAS_STATUS_SUCCESS) fail_internal("cuBLASLt: {}: status {}", what, static_cast<int>(status));
}

cudaDataType_t type_of(fw_dtype dtype) { return dtype == FW_BF16 ? CUDA_R_16BF : CUDA_R_32F; }

// The largest power of two up to 256 that address and row length are multiples of.
uint32_t alignment(const void* data, int64_t stride, fw_dtype dtype) {
  const uint64_t bits =
      reinterpret_cast<uintptr_t>(data) | static_cast<uint64_t>(stride) * (dtype == FW_BF16 ? 2 : 4) | 256;
  return static_cast<uint32_t>(bits & (~bits + 1));
}

// One shape's descriptors and the algorithm that was chosen for it.
struct Plan {
  cublasLtMatmulDesc_t product = nullptr;
  cublasLtMatrixLayout_t first = nullptr, second = nullptr, addend = nullptr, result = nullptr;
  cublasLtMatmulAlgo_t algorithm = {};
};

class Products {
 public:
  Products() : call_(open_library()) {
    expect(call_.Create(&handle_), "cublasLtCreate");
    workspace_ = cuda_device().allocate(kProductsWorkspace);
  }

  void multiply(const Product& p, void* stream) {
    const Plan& plan = plan_of(p);
    const float one = 1, beta = p.addend != nullptr ? 1 : 0;
    expect(call_.Matmul(handle_, plan.product, &one, p.b, plan.first, p.a, plan.second, &beta,
                        p.addend != nullptr ? p.addend : p.c, plan.addend, p.c, plan.result, &plan.algorithm,
                        workspace_, kProductsWorkspace, static_cast<cudaStream_t>(stream)),
           "cublasLtMatmul");
  }

 private:
  using Key = std::tuple<int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, uint32_t, uint32_t, uint32_t,
                         uint32_t, int>;

  const Plan& plan_of(const Product& p) {
    const uint32_t a = alignment(p.a, p.a_stride, p.operands), b = alignment(p.b, p.b_stride, p.operands),
                   c = alignment(p.c, p.c_stride, p.result);
    const int64_t addend_stride = p.addend != nullptr ? p.addend_stride : p.c_stride;
    const uint32_t addend = p.addend != nullptr ? alignment(p.addend, addend_stride, p.result) : c;
    const int kinds = (p.operands == FW_BF16 ? 1 : 0) | (p.result == FW_BF16 ? 2 : 0) | (p.a_transposed ? 4 : 0) |
                      (p.b_transposed ? 8 : 0) |
                      (p.addend == nullptr ? 0
                       : p.addend == p.c   ? 16
                                           : 32);
    const Key key{p.m, p.n, p.k, p.a_stride, p.b_stride, p.c_stride, addend_stride, a, b, c, addend, kinds};
    const auto found = plans_.find(key);
    return found != plans_.end() ? found->second : plans_.emplace(key, make_plan(p, a, b, c, addend)).first->second;
  }

  cublasLtMatrixLayout_t layout(fw_dtype dtype, int64_t rows, int64_t columns, int64_t stride) const {
    cublasLtMatrixLayout_t made = nullptr;
    expect(call_.MatrixLayoutCreate(&made, type_of(dtype), static_cast<uint64_t>(rows), static_cast<uint64_t>(columns),
                                    stride),
           "layout of a matrix");
    return made;
  }
  template <class Value>
  void set(cublasLtMatmulDesc_t product, cublasLtMatmulDescAttributes_t attribute, const Value& value) const {
    expect(call_.MatmulDescSetAttribute(product, attribute, &value, sizeof(value)), "attribute of a product");
  }
  template <class Value>
  void set(cublasLtMatmulPreference_t preference, cublasLtMatmulPreferenceAttributes_t attribute,
           const Value& value) const {
    expect(call_.MatmulPreferenceSetAttribute(preference, attribute, &value, sizeof(value)), "preference of a product");
  }

  Plan make_plan(const Product& p, uint32_t a, uint32_t b, uint32_t c, uint32_t addend) const {
    Plan plan;
    expect(call_.MatmulDescCreate(&plan.product, CUBLAS_COMPUTE_32F, CUDA_R_32F), "description of a product");
    set(plan.product, CUBLASLT_MATMUL_DESC_TRANSA, p.b_transposed ? CUBLAS_OP_T : CUBLAS_OP_N);
    set(plan.product, CUBLASLT_MATMUL_DESC_TRANSB, p.a_transposed ? CUBLAS_OP_T : CUBLAS_OP_N);
    plan.first = p.b_transposed ? layout(p.operands, p.k, p.n, p.b_stride) : layout(p.operands, p.n, p.k, p.b_stride);
    plan.second = p.a_transposed ? layout(p.operands, p.m, p.k, p.a_stride) : layout(p.operands, p.k, p.m, p.a_stride);
    plan.result = layout(p.result, p.n, p.m, p.c_stride);
    plan.addend = p.addend != nullptr && p.addend != p.c ? layout(p.result, p.n, p.m, p.addend_stride) : plan.result;
    cublasLtMatmulPreference_t preference = nullptr;
    expect(call_.MatmulPreferenceCreate(&preference), "preference of a product");
    set(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, kProductsWorkspace);
    // Neither in place, which would depend on the order of arrival, nor in the type of the result.
    set(preference, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK,
        static_cast<uint32_t>(CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE));
    set(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, b);
    set(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, a);
    set(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, addend);
    set(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, c);
    cublasLtMatmulHeuristicResult_t chosen = {};
    int count = 0;
    const cublasStatus_t status = call_.MatmulAlgoGetHeuristic(
        handle_, plan.product, plan.first, plan.second, plan.addend, plan.result, preference, 1, &chosen, &count);
    call_.MatmulPreferenceDestroy(preference);
    if (status != CUBLAS_STATUS_SUCCESS || count == 0) {
      fail_internal("cuBLASLt: no algorithm for a product [{}, {}] x [{}, {}] with rows at {}, {} and {} (status {})",
                    p.m, p.k, p.k, p.n, p.a_stride, p.b_stride, p.c_stride, static_cast<int>(status));
    }
    plan.algorithm = chosen.algo;
    return plan;
  }

  Functions call_;
  cublasLtHandle_t handle_ = nullptr;
  void* workspace_ = nullptr;
  std::map<Key, Plan> plans_;
};

// Never destroyed, as the device is not.
Products& products() {
  static Products* const instance = new Products();
  return *instance;
}

}  // namespace

void multiply(const Product& product, void* stream) { products().multiply(product, stream); }
void require_products() { products(); }

}  // namespace fw::cuda
