// Between tensors of tokens of float16 or float32 and rows of bf16 or float32, all of a call in one kernel. Device
// memory only.
#pragma once

#include <cstdint>

#include "rule/tokens.h"
#include "scan/cuda/args.h"

namespace fw::cuda {

// caller: float16, or float32 if so said; its bf16 is not looked at. rows says what it is. divisor: unused.
struct StageTask {
  TokenArg caller, rows;
  int32_t caller_f32 = 0;
  int32_t heads = 0, dim = 0;
};
struct StageArgs {
  StageTask tasks[kTokenTensors];
  int32_t count = 0;
};
// Tokens of all sequences, and of a batch: all of them where sequences are packed. With an end there may be fewer.
struct StageTokens {
  int64_t all = 0, batch = 0;
  TokenEnd end;
};
void stage_rows(const StageArgs& args, const StageTokens& tokens, void* stream);
// Rounded to nearest even; beyond 65504 infinite.
void unstage_rows(const StageArgs& args, const StageTokens& tokens, void* stream);

}  // namespace fw::cuda
