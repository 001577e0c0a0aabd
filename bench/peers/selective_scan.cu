// The selective scan of Mamba's authors (state-spaces/mamba, csrc/selective_scan) beside `mamba_bench scan`, one JSON
// line a shape. It is bf16, with [B, D, L] rows as they take them, with skip. Gate and softplus are not in it: here
// they are operations of their own. Milliseconds by events, medians of 20 after 5. Nothing of theirs is kept here:
//
//     git clone https://github.com/state-spaces/mamba /tmp/mamba
//     nvcc -O3 -std=c++17 --use_fast_math --expt-relaxed-constexpr --expt-extended-lambda
//       -U__CUDA_NO_HALF_OPERATORS__ -U__CUDA_NO_HALF_CONVERSIONS__
//       -U__CUDA_NO_BFLOAT16_OPERATORS__ -U__CUDA_NO_BFLOAT16_CONVERSIONS__
//       -gencode=arch=compute_90a,code=sm_90a -I/tmp/mamba/csrc/selective_scan -I TORCH/include
//       bench/peers/selective_scan.cu -o /tmp/selective_scan_peer
//
// TORCH: the folder of an installed PyTorch, of which the kernels take headers alone.
//
//   selective_scan_peer [B T D N]...
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <vector>

#include "selective_scan_bwd_kernel.cuh"
#include "selective_scan_fwd_kernel.cuh"

namespace {

void require(cudaError_t status) {
  if (status == cudaSuccess) return;
  std::fprintf(stderr, "CUDA: %s\n", cudaGetErrorString(status));
  std::exit(1);
}

template <class T>
T* allocate(int64_t count) {
  void* p = nullptr;
  require(cudaMalloc(&p, static_cast<size_t>(count) * sizeof(T)));
  return static_cast<T*>(p);
}

__device__ float number(int64_t i) {
  return static_cast<float>(static_cast<unsigned>(i * 2654435761u) >> 8) * (1.0f / 16777216.0f);
}
template <class T>
__global__ void fill(T* to, int64_t count, float low, float high) {
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < count; i += int64_t{gridDim.x} * blockDim.x)
    to[i] = static_cast<T>(low + (high - low) * number(i));
}
template <class T>
T* random(int64_t count, float low = -1, float high = 1) {
  T* p = allocate<T>(count);
  fill<<<1024, 256>>>(p, count, low, high);
  require(cudaGetLastError());
  return p;
}

double median_ms(const std::function<void()>& call) {
  cudaEvent_t begin, end;
  require(cudaEventCreate(&begin));
  require(cudaEventCreate(&end));
  std::vector<float> times;
  for (int i = 0; i < 25; ++i) {
    require(cudaEventRecord(begin));
    call();
    require(cudaEventRecord(end));
    require(cudaEventSynchronize(end));
    float ms = 0;
    require(cudaEventElapsedTime(&ms, begin, end));
    if (i >= 5) times.push_back(ms);
  }
  std::sort(times.begin(), times.end());
  return times[times.size() / 2];
}

template <class Kernel, class Params>
void launch(Kernel kernel, const Params& p, int threads, int shared) {
  require(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared));
  kernel<<<dim3(p.batch, p.dim), threads, shared>>>(p);
  require(cudaGetLastError());
}

void run(int64_t B, int64_t T, int64_t D, int64_t N) {
  using X = at::BFloat16;
  if (T % 2048 != 0) {
    std::fprintf(stderr, "T: expected a multiple of 2048, got %lld\n", static_cast<long long>(T));
    std::exit(2);
  }
  const int64_t all = B * D * T, keys = B * N * T, chunks = (T + 2047) / 2048;
  SSMParamsBwd p{};
  p.batch = static_cast<int>(B), p.dim = static_cast<int>(D), p.seqlen = static_cast<int>(T),
  p.dstate = static_cast<int>(N), p.n_groups = 1;
  p.n_chunks = static_cast<int>(chunks), p.dim_ngroups_ratio = p.dim, p.is_variable_B = p.is_variable_C = true,
  p.delta_softplus = false;
  p.A_d_stride = N, p.A_dstate_stride = 1;
  p.B_batch_stride = p.C_batch_stride = p.B_group_stride = p.C_group_stride = N * T,
  p.B_dstate_stride = p.C_dstate_stride = T;
  p.u_batch_stride = p.delta_batch_stride = p.out_batch_stride = D * T,
  p.u_d_stride = p.delta_d_stride = p.out_d_stride = T;
  p.A_ptr = random<float>(D * N, -15, -1), p.B_ptr = random<X>(keys), p.C_ptr = random<X>(keys),
  p.D_ptr = random<float>(D);
  p.u_ptr = random<X>(all), p.delta_ptr = random<X>(all, 0.001f, 0.1f), p.out_ptr = allocate<X>(all),
  p.x_ptr = allocate<float>(B * D * chunks * N * 2);
  p.dout_batch_stride = p.du_batch_stride = p.ddelta_batch_stride = D * T,
  p.dout_d_stride = p.du_d_stride = p.ddelta_d_stride = T;
  p.dA_d_stride = N, p.dA_dstate_stride = 1,
  p.dB_batch_stride = p.dC_batch_stride = p.dB_group_stride = p.dC_group_stride = N * T;
  p.dB_dstate_stride = p.dC_dstate_stride = T;
  p.dout_ptr = random<X>(all), p.du_ptr = allocate<X>(all), p.ddelta_ptr = allocate<X>(all);
  // Of keys that change with the token: float32, as their interface has them, which rounds them behind.
  float *dA = allocate<float>(D * N), *dB = allocate<float>(keys), *dC = allocate<float>(keys),
        *dD = allocate<float>(D);
  p.dA_ptr = dA, p.dB_ptr = dB, p.dC_ptr = dC, p.dD_ptr = dD;
  // The forms that their launchers choose for sequences longer than 1,024 tokens, of a multiple of 2,048.
  using Forward = Selective_Scan_fwd_kernel_traits<128, 16, 1, true, true, true, false, X, float>;
  using Backward = Selective_Scan_bwd_kernel_traits<128, 16, true, true, true, false, false, X, float>;
  constexpr int kForwardShared = Forward::kSmemSize + Forward::kNRows * MAX_DSTATE * sizeof(typename Forward::scan_t);
  constexpr int kBackwardShared =
      Backward::kSmemSize + MAX_DSTATE * sizeof(typename Backward::scan_t) + (128 + 4 * MAX_DSTATE) * sizeof(float);
  const auto forward = [&] {
    launch(&selective_scan_fwd_kernel<Forward>, static_cast<const SSMParamsBase&>(p), 128, kForwardShared);
  };
  const double forward_ms = median_ms(forward);
  // They add to these, so their interface clears them first.
  const double backward_ms = median_ms([&] {
    require(cudaMemsetAsync(dA, 0, sizeof(float) * static_cast<size_t>(D * N)));
    require(cudaMemsetAsync(dB, 0, sizeof(float) * static_cast<size_t>(keys)));
    require(cudaMemsetAsync(dC, 0, sizeof(float) * static_cast<size_t>(keys)));
    require(cudaMemsetAsync(dD, 0, sizeof(float) * static_cast<size_t>(D)));
    launch(&selective_scan_bwd_kernel<Backward>, p, 128, kBackwardShared);
  });
  std::printf(
      "{\"peer\": \"state-spaces/mamba selective_scan\", \"B\": %lld, \"T\": %lld, \"D\": %lld, \"N\": %lld, "
      "\"forward_ms\": %.4f, \"backward_ms\": %.4f}\n",
      static_cast<long long>(B), static_cast<long long>(T), static_cast<long long>(D), static_cast<long long>(N),
      forward_ms, backward_ms);
  for (void* q : {p.A_ptr, p.B_ptr, p.C_ptr, p.D_ptr, p.u_ptr, p.delta_ptr, p.out_ptr, p.x_ptr, p.dout_ptr, p.du_ptr,
                  p.ddelta_ptr})
    require(cudaFree(q));
  for (float* q : {dA, dB, dC, dD}) require(cudaFree(q));
}

}  // namespace

int main(int argc, char** argv) {
  for (int i = 1; i + 3 < argc; i += 4)
    run(std::atoll(argv[i]), std::atoll(argv[i + 1]), std::atoll(argv[i + 2]), std::atoll(argv[i + 3]));
  return 0;
}
