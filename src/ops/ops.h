// Everything else a model needs besides the recurrence: the types of the operations' arguments and the table of one
// backend's functions. ops.def is the list with shapes and contracts; exec.h calls.
#pragma once

#include <cstdint>
#include <span>

#include "base/bf16.h"
#include "base/mat.h"
#include "base/seq_layout.h"
#include "ops/sampling.h"

namespace fw {

enum class Write { kOverwrite, kAccumulate };

// Operands of matrix products: the type itself, or rounded to bfloat16 with float accumulation (T = float only).
enum class Precision { kNative, kBf16 };

enum class GateKind { kNone, kSilu, kSigmoid };

// What q and k pass before the recurrence: nothing, elu(x) + 1, relu(x), silu(x), or the product of two learned affine
// maps of a head. Of RWKV-7's layers: tanh(x) and relu(x)^2.
enum class FeatureMap { kNone, kElu, kRelu, kSilu, kProduct, kTanh, kSquaredRelu };

// A factor of a token's position t = 1, 2, ... in its sequence: 1, 1/t, 1/sqrt(t), 1/log(t + 1).
enum class PositionFactor { kNone, kInverse, kInverseSqrt, kInverseLog };

enum class Rotation { kForward, kBackward };

// How the element [n, d] of a selective scan's state forgets and what is written to it, made of a channel's step and
// the key k:
//   kMamba: exp(step_d A_nd) and step_d k_n u_d, A = -exp(a_log)      kLonghorn: 1 - e_d k_n^2 and e_d k_n u_d, e = step / (1 + step |k|^2)
enum class ScanLaw { kMamba, kLonghorn };
// Tokens between the states that a selective scan keeps for its backward pass.
constexpr int64_t kScanChunk = 16;
// Rows for those states [N, D]: chunk i of a sequence that begins at token b is at b / kScanChunk + the sequence's
// number + i.
constexpr int64_t chunk_checkpoints(int64_t tokens, int64_t sequences) { return tokens / kScanChunk + sequences; }
// The same of mamba3_rotary: angles are summed in the digits that are kept between passes from chunk to chunk, and in a
// chunk in those that a turn needs.
constexpr int64_t kRotaryChunk = 16;
constexpr int64_t rotary_checkpoints(int64_t tokens, int64_t sequences) { return tokens / kRotaryChunk + sequences; }

// The type of parameters, their gradients and statistics beside activations of type T: the same, float beside bfloat16.
template <class T>
struct WideOf {
  using Type = T;
};
template <>
struct WideOf<Bf16> {
  using Type = float;
};
template <class T>
using Wide = typename WideOf<T>::Type;

template <class W>
struct LowRank;
// A weight [out, in] as products take it: its values, and where there is one (data not null) the copy in bf16 that
// Params keeps, for products whose operands are bf16.
template <class W>
struct Weight {
  Mat<const W> values;
  Mat<const Bf16> rounded;
  const LowRank<W>* low_rank = nullptr;  // [low_ranks]: what is added to some of its rows
  int64_t low_ranks = 0;
  Weight(Mat<const W> v, Mat<const Bf16> r) : values(v), rounded(r) {}
  Weight(Mat<const W> v) : values(v) {}  // NOLINT(google-explicit-constructor): a matrix is a weight
  Weight(Mat<W> v) : values(v) {}        // NOLINT(google-explicit-constructor)
};

// A low-rank addition to some rows of a weight (LoRA): W[first, first + rows) + scale B A with A [rank, in] and
// B [rows, rank]. Exec's linear operations compute it (low_rank.cpp); a backend's functions do not look at it.
template <class W>
struct LowRank {
  int64_t first = 0;
  const W* scale = nullptr;  // one number in device memory
  Weight<W> a{Mat<const W>()}, b{Mat<const W>()};
  Mat<W> da, db;  // their gradients; no data where they are not trained
};

// The sequences of a pass: on the host for what cuts work, in device memory for what kernels read. A host's layout is
// both.
struct PassLayout {
  const SeqLayout& host;
  const int64_t* offsets = nullptr;  // [N + 1]
  // [N]: tokens of each sequence before this pass; null: none
  const int64_t* positions = nullptr;
  // the same in host memory, where the host knows them
  const int64_t* host_positions = nullptr;
  PassLayout(const SeqLayout& layout, const int64_t* before = nullptr)  // NOLINT(google-explicit-constructor)
      : host(layout), offsets(layout.offsets().data()), positions(before) {}
  PassLayout(const SeqLayout& layout, const int64_t* device_offsets, const int64_t* before)
      : host(layout), offsets(device_offsets), positions(before) {}
};

// Rows that tokens left behind, by their position in their sequence: sequence n has `per_sequence` pages of `rows` rows
// of `width` values, found by the table, or one after the other from `first` on. Positions beyond the last page begin
// again at the first, so a single page is a ring of the last `rows` tokens.
template <class T>
struct Pages {
  T* first = nullptr;         // [N, per_sequence, rows, width] where there is no table
  T* const* table = nullptr;  // [N, per_sequence]
  int64_t per_sequence = 0;
  int64_t rows = 0;
  int64_t width = 0;
  bool aligned = false;  // each page of the table begins at a multiple of 16 bytes
  explicit operator bool() const { return first != nullptr || table != nullptr; }
  T* row(int64_t n, int64_t position) const {
    const int64_t page = n * per_sequence + position / rows % per_sequence;
    return (table != nullptr ? table[page] : first + page * rows * width) + position % rows * width;
  }
};

// Softmax attention of H query heads over HK key/value heads of D channels: query head h reads key/value head h / (H /
// HK).
struct AttentionShape {
  int64_t heads = 0;     // H
  int64_t kv_heads = 0;  // HK, divides H
  int64_t dim = 0;       // D
  int64_t window = 0;    // W: a token sees itself and the W-1 before it; 0: all before it
  double scale = 0;      // of the scores, usually D^-1/2
  // Rotary position embedding of q and k, as rotary() has it: of the first `rotated` channels of a head. 0: none.
  // Forward takes them rotated, backward's dq and dk are of what they were before, a step rotates them itself.
  double theta = 0;
  int64_t rotated = 0;
  bool turns() const { return theta > 0 && rotated > 0; }
};

// The solve of a Mesa layer: H heads of K x K, beside values of V columns in its state. With cg_steps 0 it is exact
// (Cholesky). Else it is conjugate gradients from 0 until the residual is cg_tolerance times the right-hand side, or
// after so many steps.
struct MesaShape {
  int64_t heads = 0;      // H
  int64_t key_dim = 0;    // K
  int64_t value_dim = 0;  // V
  double least = 0;       // lambda = softplus(parameter) + least
  int64_t cg_steps = 0;
  double cg_tolerance = 0;
};

// What a token's front of RWKV-7 computes with: heads of `dim` channels, and the norm of their keys. key_eps > 0:
// inside the root; 0: the norm itself, but at least 1e-12.
struct Rwkv7Shape {
  int64_t dim = 0;
  double key_eps = 0;
};

// The recurrence of a Mamba-3 layer and what lies around it:
// - H heads with a state of N x P,
// - G groups of heads that share queries and keys,
// - R rows a token (1: SISO),
// - NA rotated pairs of the N channels: (2i, 2i + 1), or (i, i + N / 2) with `rotate_half`.
struct Mamba3Shape {
  int64_t heads = 0;     // H
  int64_t groups = 1;    // G, divides H
  int64_t state = 0;     // N
  int64_t head_dim = 0;  // P
  int64_t rank = 1;      // R
  int64_t angles = 0;    // NA <= N / 2
  bool rotate_half = false;
};
// Its decay rate -max(f(x), floor): f = softplus, or f(x) = 1 + x from 0 on and 1 / (1 - x) below.
struct Mamba3Decay {
  bool heavy_tail = false;
  double floor = 0;
};

// How a token's scores choose its experts.
enum class RouterScore { kSoftmax, kSigmoid };
struct RouterShape {
  RouterScore score = RouterScore::kSoftmax;
  int64_t experts = 0;  // E
  int64_t chosen = 0;   // k <= E
  // E / groups experts each. Of several, the best_groups with the largest sums of their two best scores (+ bias) are
  // chosen from.
  int64_t groups = 1, best_groups = 1;
  bool normalised = true;  // the weights of a token sum to `scale`
  double scale = 1;
};
// The rows of T tokens times k chosen experts, sorted by expert, those of an expert in the order of the tokens. In
// device memory.
struct ExpertRows {
  int64_t experts = 0, chosen = 0;  // E, k
  int32_t* offsets = nullptr;       // [E + 1]: rows of expert e begin at offsets[e]
  int32_t* source = nullptr;        // [R]: row r is choice source[r] % k of token source[r] / k
  int32_t* row_of = nullptr;        // [R]: the row of choice j of token t is row_of[t k + j]
  int32_t* expert = nullptr;        // [R]: of row r
};

// A loss and the number of positions that were scored.
struct LossSum {
  double nll = 0;
  int64_t count = 0;
};

// What the passes of an optimiser step leave in device memory, for the host to read once.
struct StepSums {
  LossSum loss;
  double square_norm = 0;  // of the gradients
};

// A piece of one parameter in the flat buffers of all. Pieces have a fixed size, so that sums over them have a fixed
// order.
struct ParamPiece {
  int64_t begin = 0;  // in elements
  int32_t count = 0;
  int32_t decay = 0;     // 1: weight decay applies
  int64_t numbers = -1;  // of values that are split: where in `numbers` they lie once more; negative: nowhere
};
struct ParamPieces {
  const ParamPiece* data = nullptr;
  int64_t count = 0;
};

// The values of all parameters as the optimiser takes them: numbers, or (values null) split into the bf16 that products
// read and what that leaves out, low (split_value.h). The split ones come with float copies of the few that operations
// read as numbers.
template <class W>
struct ParamValues {
  W* values = nullptr;
  Bf16* rounded = nullptr;
  uint16_t* low = nullptr;
  W* numbers = nullptr;
};

// AdamW's moments: numbers, or (first null) bf16, rounded stochastically; W = float then.
template <class W>
struct MomentValues {
  W *first = nullptr, *second = nullptr;
  Bf16 *first_bf16 = nullptr, *second_bf16 = nullptr;
};

// The numbers of one AdamW update, the same for every element.
template <class W>
struct AdamWStep {
  W beta1, one_minus_beta1, beta2, one_minus_beta2, eps;
  W grad_scale;
  W step;              // lr / (1 - beta1^t)
  W inv_sqrt_debias2;  // 1 / sqrt(1 - beta2^t)
  W decay;             // lr * weight_decay
  // Of the random numbers that moments in bf16 are rounded with (stochastic_rounding.h). Element i of the pieces has
  // word (first + i) mod 4 of the counter ((first + i) / 4, update). Its lower half is for m and its upper half for v.
  // first: of what the pieces' elements are counted from, a multiple of 4.
  uint64_t seed = 0, update = 0, first = 0;
};

// Columns of a product's result that become scale * sigmoid of themselves.
struct SigmoidColumns {
  int64_t begin = 0, size = 0;
  double scale = 1;
};

// y = x W^T + bias.  x [T, in], W [out, in], bias [out] or null, y [T, out].
template <class T>
struct LinearPart {
  Mat<const T> x;
  Weight<Wide<T>> weight;
  const Wide<T>* bias;
  Mat<T> y;
};

template <class T>
struct Exec;

// One backend's functions. A backend that lacks one is a defect that a test of the table finds.
template <class T>
struct Ops {
  using W = Wide<T>;
#define FW_OP_ARGS(...) __VA_ARGS__
#define FW_FUSED_OP(name, args) bool (*name)(const Exec<T>&, FW_OP_ARGS args) = nullptr;
#define FW_OP(name, args) void (*name)(const Exec<T>&, FW_OP_ARGS args) = nullptr;
#include "ops/ops.def"
#undef FW_OP
#undef FW_OP_ARGS
};

// The host's operations; T is float or double.
template <class T>
const Ops<T>& host_ops();

}  // namespace fw
