// The CUDA device's functions of ops.def, one operation a file. T is float or Bf16, of fused operations Bf16 alone;
// parameters and statistics are floats.
#pragma once

#include "ops/exec.h"

namespace fw::cuda::ops {

#define W Wide<T>
#define FW_OP_ARGS(...) __VA_ARGS__
#define FW_FUSED_OP(name, args) \
  template <class T>            \
  bool name(const Exec<T>&, FW_OP_ARGS args);
#define FW_OP(name, args) \
  template <class T>      \
  void name(const Exec<T>&, FW_OP_ARGS args);
#include "ops/ops.def"
#undef FW_OP
#undef FW_OP_ARGS
#undef W

}  // namespace fw::cuda::ops
