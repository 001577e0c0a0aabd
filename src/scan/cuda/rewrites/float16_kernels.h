// Between float16 tensors of tokens and rows of bf16 or float32, all of a call in one kernel. Device memory only.
#pragma once

#include <cstdint>

#include "rule/tokens.h"
#include "scan/cuda/args.h"

namespace fw::cuda {

// The float16 side's TokenArg has the strides of its 16-bit elements and is not looked at as bf16; the other says what
// it is. divisor: unused.
struct Float16Task {
  TokenArg f16, rows;
  int32_t heads = 0, dim = 0;
};
struct Float16Args {
  Float16Task tasks[kTokenTensors];
  int32_t count = 0;
};
// Tokens of all sequences, and of a batch: all of them where sequences are packed. With an end there may be fewer.
struct Float16Tokens {
  int64_t all = 0, batch = 0;
  TokenEnd end;
};
void from_float16(const Float16Args& args, const Float16Tokens& tokens, void* stream);
// Rounded to nearest even; beyond 65504 infinite.
void to_float16(const Float16Args& args, const Float16Tokens& tokens, void* stream);

}  // namespace fw::cuda
