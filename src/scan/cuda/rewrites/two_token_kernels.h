// The kernels of rules that run as two rows a token (rewrites/dplr_as_two_tokens.h): a call's tensors to rows and back.
// Device memory only.
#pragma once

#include <cstdint>

#include "rule/tokens.h"
#include "scan/cuda/args.h"

namespace fw::cuda {

// What row 2t, which erases, and row 2t + 1, which writes, have of token t: x its number, y that of the other tensor, 0
// where that is absent.
//   kBoth: x, x     kFirst: x, 0     kSecond: 0, x     kPair: y, x     kDecay: max(x, least), 0     kErase: x exp(-max(y, least)), 0
enum class RowsOf : int32_t { kBoth, kFirst, kSecond, kPair, kDecay, kErase };

struct ExpandTask {
  RowsOf kind = RowsOf::kBoth;
  TokenArg from, other, to;  // other: of kErase a scalar per head where other_dim is 1; to: [B, 2 T, heads, dim]
  int32_t heads = 0, dim = 0, other_dim = 0;
};

// The gradient of what token t gave its rows: first d[2t] + second d[2t + 1] (a row with the factor 0 is not read), and
// of
//   kErase: + exp(-max(g, least)) e[2t]                the erase vector's, with e the gradient of its rows
//   kDecay: - sum p exp(-max(g, least)) e[2t]          a log-decay's, which the erase vector p is divided by; 0 below `least`
// d absent: 0. The sum: over the channels of p, where the decay is one number.
enum class RowsBack : int32_t { kPlain, kErase, kDecay };
struct JoinTask {
  RowsBack kind = RowsBack::kPlain;
  float first = 0, second = 0;
  TokenArg rows, erased, g, p, to;  // g absent: 0
  int32_t heads = 0, dim = 0, g_dim = 0, key_dim = 0;
};

// Tokens of all sequences and of a batch: all of them where sequences are packed; heads: the most that a tensor has.
struct RowTokens {
  int64_t all = 0, batch = 0;
  int32_t heads = 0;
};
inline constexpr int kRowTasks = static_cast<int>(kTokenTensors) + 1;
struct ExpandArgs {
  ExpandTask tasks[kRowTasks];
  int32_t count = 0;
  // log-decays below count as this one where an erase vector is divided by its decay (rewrites/dplr_as_two_tokens.h)
  float least = 0;
};
struct ReduceRowsArgs {
  JoinTask tasks[kRowTasks];
  int32_t count = 0;
  float least = 0;
};
void expand_rows(const ExpandArgs& args, const RowTokens& tokens, void* stream);
void reduce_rows(const ReduceRowsArgs& args, const RowTokens& tokens, void* stream);

}  // namespace fw::cuda
