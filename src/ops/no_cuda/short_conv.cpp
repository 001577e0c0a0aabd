// A build without CUDA: the short convolution of the C header on FW_DEVICE_CUDA says so.
#include "ops/short_conv.h"

#include "gpu/device.h"

namespace fw::cuda {

template <class T>
void conv_forward(Mat<const T>, const float*, const float*, int64_t, const PassLayout&, const T*, T*, Mat<T>, void*) {
  require_gpu();
}
template <class T>
void conv_backward(Mat<const T>, Mat<const T>, const float*, const float*, int64_t, const PassLayout&, const T*, Mat<T>,
                   float*, float*, float*, float*, void*) {
  require_gpu();
}

template void conv_forward<float>(Mat<const float>, const float*, const float*, int64_t, const PassLayout&,
                                  const float*, float*, Mat<float>, void*);
template void conv_forward<Bf16>(Mat<const Bf16>, const float*, const float*, int64_t, const PassLayout&, const Bf16*,
                                 Bf16*, Mat<Bf16>, void*);
template void conv_backward<float>(Mat<const float>, Mat<const float>, const float*, const float*, int64_t,
                                   const PassLayout&, const float*, Mat<float>, float*, float*, float*, float*, void*);
template void conv_backward<Bf16>(Mat<const Bf16>, Mat<const Bf16>, const float*, const float*, int64_t,
                                  const PassLayout&, const Bf16*, Mat<Bf16>, float*, float*, float*, float*, void*);

void upload_conv_offsets(const int64_t*, int64_t, int64_t*, void*) { require_gpu(); }
void make_conv_offsets(const void*, bool, int64_t, int64_t, int64_t, int32_t*, int64_t*, void*) { require_gpu(); }
void clear_floats(float*, int64_t, void*) { require_gpu(); }

}  // namespace fw::cuda
