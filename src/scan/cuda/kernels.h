// The device kernels as host functions: each queues its kernels on a stream (cudaStream_t as void*) and returns. No
// allocation, no synchronisation. Throws Error(kInternal) if a launch is refused. Every pointer is device memory.
#pragma once

#include <cstdint>

#include "rule/token_scalars.h"
#include "scan/cuda/args.h"
#include "scan/cuda/kernel_ids.h"
#include "scan/cuda/tiles.h"

namespace fw::cuda {

// ---- token/: the recurrence one token at a time in float32 (any axes, K <= 256, any V): decode, short inputs, the
// oracle.

// Tokens that are not in the states yet (scan/plan.h: Ring). data null: all are.
struct RingArg {
  float* data = nullptr;  // [slots, HV, rows, K + V + decays]
  int64_t stride_n = 0, stride_h = 0, stride_r = 0;
  const int32_t* positions = nullptr;  // [N]
  const int32_t* previous = nullptr;   // [N]; null: no token is taken back
  int32_t tokens = 0, rows = 0;        // from fold to fold; of the ring
  int32_t length = 0, span = 0;        // tokens of a call, and rows that it sees, at most
};

struct TokenForwardArgs {
  Problem problem;
  TokenArg o;
  StateArg final_state;  // may be the memory of problem.initial_state
  SlotArg slots;
  CheckpointArg checkpoints;  // not with slots of tokens
  // With a preconditioner and no problem.m, one token a sequence (not packed, no slots of tokens): the step of A is
  // made here too. May be the memory of problem.initial_precond, may be absent.
  StateArg final_precond;
  RingArg ring;  // final_state is then the memory of problem.initial_state, and written after a fold alone
};
// choice: select_token() (pipeline.h). Bits do not depend on it.
void token_forward(const TokenForwardArgs& args, const TokenChoice& choice, void* stream);

// Gradients per value head, not summed over groups: each TokenArg of d has divisor 1 (absent: not computed).
// d.precond_g and d.precond_beta are not this kernel's.
struct HeadGradients {
  TokenArgs d;
  // [tokens, HV, K]: of M; null without a preconditioner. gradients(), of a rule without normaliser, heads alone in
  // their group: may be
  float* dm = nullptr;
  // the memory of M
  // [tokens, HV]: of the preconditioner's log-decay and gain past M (Normaliser::kGated); else null
  float* dalpha_p = nullptr;
  float* dbeta_p = nullptr;
};

struct TokenBackwardArgs {
  Problem problem;
  TokenArg d_o;              // may be absent: zero
  StateArg d_final_state;    // may be absent
  StateArg d_initial_state;  // may be absent
  HeadGradients grads;
  void* workspace = nullptr;  // token_backward_bytes
};
// A function of shape and device alone: `longest` tokens of the longest sequence.
int64_t token_backward_bytes(int64_t sequences, int32_t HV, int32_t K, int32_t V, int64_t longest, int sm_count);
void token_backward(const TokenBackwardArgs& args, int64_t longest, void* stream);

// ---- precond/: the diagonal preconditioner (recurrence.md 3), chunk-parallel

struct PrecondForwardArgs {
  Problem problem;              // m unused
  float* m = nullptr;           // [tokens, H, K], and problem.precond_rows unless null; null: only the boundaries
  float* boundaries = nullptr;  // [chunks, H, K]: A before every chunk
  bool made = false;            // the boundaries are there already: only M
  float* scratch = nullptr;     // [chunks, H, K + 1]
  StateArg final_precond;       // may be absent
  SlotArg slots;                // as TokenForwardArgs; not those of tokens
  CheckpointArg checkpoints;    // of A
};
void precond_forward(const PrecondForwardArgs& args, int64_t chunks, void* stream);
// One token after the other: M of every token, and A after it to the token's slot, or without slots of tokens after the
// last one to the sequence's own. The bits of steps. boundaries and scratch are not used.
void precond_tokens(const PrecondForwardArgs& args, void* stream);

// What gradients() makes of the preconditioner where it makes M itself: the gradients as if none reached a chunk's last
// A from after, and with what numbers one that does, D, adds to them. It adds linearly.
struct PrecondShare {
  // Of a token and key head, with g the log-decay and k the key:
  struct Row {
    float of_key;   // what k takes of D: 2 of_key (D - of_norm (D.k^2)) k
    float of_beta;  // what the gain takes of D: of_beta (D.k^2)
    float of_norm;  // (its normalisation, or 0)
    float unused;
    float dg, dbeta;  // as if D were 0
    float more[2];
  };
  Row* rows = nullptr;        // [tokens, H]; null: M is in memory
  float* sums = nullptr;      // [chunks, H, K]: the gradient of A before the chunk
  float* products = nullptr;  // [chunks, H]: of the chunk's decays
  float* center = nullptr;    // [chunks, H]: what the center takes
};

struct PrecondBackwardArgs {
  Problem problem;
  const float* boundaries = nullptr;  // as precond_forward left it
  float* scratch = nullptr;           // [chunks, H, 2 K + 2]
  // if it is there, with precond_share() of scratch: dk has what gradients() made, and grads is not read
  PrecondShare share;
  // dm, dalpha_p, dbeta_p as made; d.k: what the rule adds to it, per value head; may be the memory of dk (group 1)
  HeadGradients grads;
  StateArg d_final_precond;  // may be absent
  // out, per key head (absent: not computed); dk: the sum over the group and this
  TokenArg dk, dprecond_g, dprecond_beta;
  float* dcenter_parts = nullptr;  // [chunks, H], summed in order into
  float* dcenter = nullptr;        // [H], may be null
  int64_t dcenter_stride = 1;
  StateArg d_initial_precond;  // may be absent
};
void precond_backward(const PrecondBackwardArgs& args, int64_t chunks, void* stream);
// Where gradients() leaves it.
PrecondShare precond_share(const Problem& problem, float* scratch, float* center_parts, void* rows, int64_t chunks);

// out[t, h, :] = sum over the group of in[t, hv, :] in order, in float32; in: [tokens, HV, dim] contiguous.
void sum_groups(const Problem& problem, const TokenArg& in, int32_t dim, const TokenArg& out, void* stream);

// ---- the chunk form: matrix products of bf16 operands; k_tile 64 or 128 (K padded), any V

// Of rules with uses_hi_lo() (rule_traits.h).
struct HiLoTiles {
  void* chunk_tiles = nullptr;  // LoTiles<k_tile> [chunks, HV]; null: other rules
  // [chunks, HV, 64 k_tile] as SW128 tiles: what bf16 leaves out of e (k), or null: nothing, or it is not wanted
  uint16_t* lo_parts = nullptr;
};

struct PrepareArgs {
  Problem problem;
  // FwdTiles<k_tile> [chunks, HV]; kRowTiles: RowTiles<k_tile>; kRowScales: RowScales, and
  // then `pairs` is there; where stores_k_hat() (rule_traits.h) QETiles<k_tile>
  void* forward = nullptr;
  bool keeps_intra_chunk = false;  // kIntraChunk
  bool after_gate_kernel = false;  // gate_values() is the kernel in front: q and k were there before it began
  void* solved = nullptr;          // XMTiles<k_tile> [chunks, HV], where stores_k_hat()
  void* backward = nullptr;        // BwdTiles<k_tile> [chunks, HV], or null
  // [chunks, HV, 64 k_tile], in its place where stores_k_hat(): Khat as SW128 tiles; with pairs; or null
  uint16_t* keys = nullptr;
  // [chunks, HV], in its place for rules with reverse_takes_rows() (rule_traits.h), or null
  RowScalesBwd* numbers = nullptr;
  HiLoTiles forward_lo, backward_lo;  // both have lo parts or none
  IntraChunk* pairs = nullptr;        // [chunks, HV], or null
  uint16_t* z = nullptr;              // [chunks, HV, value blocks, SW128 tile], or null: the scan scales v itself
  // [tokens, H, K], where prepare() makes M and channels decay: M of some chunks meanwhile
  float* spare_m = nullptr;
};
// choice: select_prepare() (pipeline.h), with buffers for what it leaves.
void prepare(const PrepareArgs& args, const PrepareChoice& choice, int k_tile, int64_t chunks, void* stream);
// How many batches and tokens of a batch tensors of tokens have (packed: 1 and all), for TMA; 0: it is not asked.
struct TokenShape {
  int64_t B = 0, T = 0;
};

// q and k: for the forward scan of kRowTiles or kRowScales (kernels.def), for the reverse scan
// where reverse_takes_rows() (rule_traits.h).
struct ScanRows {
  TokenArg q, k;  // k.data null: other problems
};

// ---- fused/: the whole forward in one kernel, of calls and tensors that fuses_forward() takes (pipeline.h)

struct FusedForwardArgs {
  Problem problem;  // initial_state unused
  TokenShape shape;
  TokenArg o;
  StateArg initial_state, final_state;  // may be absent (zero; not written)
  float norm_eps = 0, gain_eps = 0;     // of the rule: fused_forward() sets them
};
void fused_forward(const FusedForwardArgs& args, void* stream);

// What tells the scans' first passes over segments how long a state lasts (sm90/scan/decay_cutoff.cuh), of rules whose
// step is a symmetric contraction.
struct DecayCutoffArg {
  TokenArg g;            // log-decays, not absent
  int32_t channels = 0;  // 1 or K; 0: not told
  FusedGates fused;      // of channels: g are logits of this law
};

struct ScanForwardArgs {
  SequenceArg sequences;
  int32_t HV = 0, K = 0, V = 0;
  bool is_delta = true;
  // FwdTiles<k_tile>; with `rows` RowTiles<k_tile>, and with `pairs` RowScales; with `solved` QETiles<k_tile>
  const void* chunk_tiles = nullptr;
  const void* solved = nullptr;       // XMTiles<k_tile>, where stores_k_hat()
  const IntraChunk* pairs = nullptr;  // [chunks, HV], of kIntraChunk
  HiLoTiles hi_lo;
  ScanRows rows;
  TokenShape shape;  // of q, k and v
  TokenArg v;        // raw values, used where z is null
  const uint16_t* z = nullptr;
  TokenArg o;                           // may be absent
  StateArg initial_state, final_state;  // may be absent (zero; not written)
  CheckpointArg checkpoints;            // those on the way: where a segment begins copy_checkpoints() has them
  uint16_t* states = nullptr;           // S^T at every chunk's start, or null
  uint16_t* w = nullptr;                // W (with pairs: U) of every chunk, or null (both or none)
  // Segments of sequences as sequences (plan.h):
  // if there: [N, HV, K, K], the affine part of what a segment does to the state, by value blocks of its own:
  StateArg maps;
  // of a state that is the unit matrix and Z = 0
  const int32_t* parts = nullptr;        // [N]: bit 0: the value blocks run, bit 1: those of the map run; null: all
  DecayCutoffArg uses_decay_cutoff;      // with parts
  const int32_t* final_index = nullptr;  // [N]: where final_state has that of sequence n, -1: nowhere; null: n
};
// kernel: select_forward_scan() for the tiles that are given.
void scan_forward(const ScanForwardArgs& args, ForwardScan kernel, int k_tile, void* stream);

// For gradients() that begin while the reverse scan still runs, with the last chunks.
struct TilesReady {
  // [chunks, HV]: how many of the tile's D and V, two a value block, are in memory; zero before. null: the scan is over
  // before
  uint32_t* made = nullptr;
  int32_t scan_blocks = 0;  // of the scan, each of which has an SM for itself
  // microseconds that it takes, about: what is made of it is how the tiles are spread, not what comes out
  double scan_time = 0;
};

struct ScanReverseArgs {
  SequenceArg sequences;
  int32_t HV = 0, K = 0, V = 0;
  bool is_delta = true;
  // BwdTiles<k_tile>; with `keys` QETiles<k_tile>, and pairs; or null, and in its place numbers, pairs and rows
  const void* chunk_tiles = nullptr;
  const uint16_t* keys = nullptr;  // [chunks, HV, 64 k_tile], where stores_k_hat()
  const RowScalesBwd* numbers = nullptr;
  bool mixed = false;  // the numbers are those of mixed_streams()
  const IntraChunk* pairs = nullptr;
  ScanRows rows;
  HiLoTiles hi_lo;
  TokenArg d_o;                             // may be absent: zero
  TokenShape shape;                         // of d_o, q and k
  StateArg d_final_state, d_initial_state;  // may be absent (zero; not written)
  uint16_t* d_states = nullptr;             // D^T at every chunk's end, or null
  uint16_t* v = nullptr;                    // V (with numbers or keys: dZ) of every chunk, or null (both or none)
  const int32_t* parts = nullptr;           // as ScanForwardArgs; bit 0
  DecayCutoffArg uses_decay_cutoff;         // with parts
  const int32_t* final_index = nullptr;     // where d_initial_state has that of sequence n
  uint32_t* made = nullptr;                 // TilesReady::made, or null
};
void scan_reverse(const ScanReverseArgs& args, ReverseScan kernel, int k_tile, void* stream);

// From segment to segment. M are the maps and `states` [segments, HV, V, K] what each leaves of a zero state. The
// result is the state at the start of every segment of sequence n. With reverse it is the gradient at its end: states
// are then what it leaves of a zero gradient, and M is transposed. In place: states[j] is read, then written.
struct JoinArgs {
  int32_t N = 0, HV = 0, K = 0, V = 0;     // K at most 128
  const int32_t* first_segment = nullptr;  // [N + 1]
  const float* maps = nullptr;             // [segments, HV, K, K]: row k' is what a unit state at k' becomes
  float* states = nullptr;
  StateArg from;  // the initial state (the gradient of the final one) of the sequences, may be absent: zero
  bool reverse = false;
};
void join_segments(const JoinArgs& args, void* stream);
// Checkpoints where a segment begins: of `states` [segments, HV, V, K] as the join has left them.
void copy_checkpoints(const CheckpointArg& args, const SequenceArg& segments, int32_t HV, int32_t K, int32_t V,
                      const float* states, void* stream);

// gradients() of half of the channels: 0 to 127, then the others (`second`). Each half makes its own part of what all
// channels make together, in float [tokens, HV]. These are the gradients of numbers a token, and the slopes by which dq
// and dk grow with q and k where rows have norms. args.grads.d.beta, d.g and the like lead there, and the slopes go to
// args.grads.dalpha_p and dbeta_p. The second half takes those of the first too, so that its dq and dk are whole. dv
// comes of the first.
struct K256Half {
  const RowScales* numbers = nullptr;  // null: channels decay, or not of such keys
  const RowNorms* norms = nullptr;     // where streams are sums, or channels decay: |q|^2 and |k|^2 are here
  bool second = false;
  const float *q = nullptr, *k = nullptr;  // of the second: the first half's slopes; null: there are none
};

struct GradientArgs {
  Problem problem;
  TokenArg d_o;      // may be absent: zero
  TokenShape shape;  // of d_o
  const IntraChunk* pairs = nullptr;
  const uint16_t* states = nullptr;  // S^T, D^T, W, V as the scans left them
  const uint16_t* d_states = nullptr;
  const uint16_t* w = nullptr;
  const uint16_t* v = nullptr;
  bool v_is_dz = false;  // reverse_takes_rows() or stores_k_hat(): P is not read
  // with v_is_dz, of its first chunk: whether w is U (then A is not read either); null: it is W
  const RowScalesBwd* numbers = nullptr;
  HeadGradients grads;
  TilesReady ready;  // if it is there, scan_reverse() with it is the kernel before this one on the stream
  // Where problem.fused has log-decays and a_log or dt_bias want a gradient: [chunks, HV, 2, K or 1], each chunk's
  // share of dt_bias's and of a_log's.
  float* form_parts = nullptr;
  // where gradients_sum_heads() (pipeline.h): head_sums_bytes(), not cleared; grads.d.q and k have then a head for each
  // key head
  float* head_sums = nullptr;
  PrecondShare precond;  // where gradients_make_m(): from problem.boundaries; problem.m and grads.dm are not used
  K256Half half;         // of k256_gradients()
};
void gradients(const GradientArgs& args, GradientKernel kernel, int k_tile, int64_t chunks, void* stream);
// 64 rows of dq and of dk for each block, of which there are at most two an SM.
constexpr int64_t head_sums_bytes(int k_tile, int64_t key_tiles, int64_t sm_count) {
  const int64_t blocks = key_tiles < 2 * sm_count ? key_tiles : 2 * sm_count;
  return blocks * 2 * kChunk * k_tile * int64_t{sizeof(float)};
}

// ---- k256/: the chunk form with keys of 129 to 256 channels, of rules with k256_rule() (rule_traits.h); any rows. In
// memory there are numbers, A and P (where each channel has its own decay: chunk tiles and Khat of 256 channels, A and
// P), and what the scans save as above with k_tile 256.

// Streams are rows of q alone (nothing is erased), rows of q and k, sums of both (k256_sums()), or what prepare makes
// of them (k256_channels()).
enum class K256Form { kAdditive, kRows, kSums, kKeys };

struct K256PrepareArgs {
  Problem problem;
  RowScales* numbers = nullptr;               // [chunks, HV]
  IntraChunk* pairs = nullptr;                // [chunks, HV]; additive: without A
  RowNorms* norms = nullptr;                  // [chunks, HV], where streams are sums or kKeys; or null
  QETiles<kMaxTileK>* chunk_tiles = nullptr;  // kKeys, [chunks, HV], in place of the numbers, and
  uint16_t* keys = nullptr;                   // [chunks, HV, 64 k_tile]: Khat as SW128 tiles
  uint16_t* z = nullptr;                      // kKeys: as PrepareArgs
};
void k256_prepare(const K256PrepareArgs& args, PrepareKernel kernel, int64_t chunks, void* stream);
// What the scans have of it, by the form.
struct K256Tiles {
  const RowScales* numbers = nullptr;
  const IntraChunk* pairs = nullptr;
  const QETiles<kMaxTileK>* chunk_tiles = nullptr;
  const uint16_t* keys = nullptr;
};
// Of the arguments without chunk tiles, solved, pairs, maps, parts and what belongs to these; z: of kKeys.
void k256_forward(const ScanForwardArgs& args, ForwardScan kernel, const K256Tiles& chunk_tiles, void* stream);
// The same; v: dZ, additive V as scan_reverse() leaves it.
void k256_reverse(const ScanReverseArgs& args, ReverseScan kernel, const K256Tiles& chunk_tiles, void* stream);

// problem, grads: of a half (K256Half); pairs as k256_prepare() left them, states, d_states: of the half's first tile.
void k256_gradients(const GradientArgs& args, GradientKernel kernel, int64_t chunks, void* stream);
// Adds up what both calls have left of gradients of one scalar per token, and adds to dq and dk of the first call what
// the second's slopes make of its rows.
struct K256JoinArgs {
  Problem problem;
  struct Number {
    const float* parts[2] = {};  // [tokens, HV]; null: not asked for
    TokenArg to;
  };
  static constexpr int kNumbers = kTokenScalars + 3;  // and g and the gates on e and on z
  Number numbers[kNumbers];
  const float *q = nullptr, *k = nullptr;  // the second half's slopes; null: there are none
  TokenArg d_q, d_k;
};
void k256_join(const K256JoinArgs& args, void* stream);

// ---- additive/: the chunk form of rules without an erase, with one decay a token or none (plan.h:
// DevicePlan::direct). Their streams are q, k, v times a scale per row. It works from the raw tensors, without chunk
// tiles. What they leave: S^T and D^T as above.

struct AdditiveScanArgs {
  Problem problem;        // initial_state unused
  SequenceArg sequences;  // of the problem, or its segments
  bool reverse = false;   // D from q and d_o instead of S from k and v
  TokenArg o;             // forward; may be absent: the states alone
  TokenArg d_o;           // reverse; may be absent: zero
  // initial and final state, or the gradients of the final and the initial one; may be absent (zero; not written)
  StateArg from, to;
  CheckpointArg checkpoints;             // forward, as ScanForwardArgs
  uint16_t* states = nullptr;            // S^T at every chunk's start (reverse: D^T at its end), or null
  float* decays = nullptr;               // [N, HV]: what is left of a state after the sequence, or null
  const int32_t* parts = nullptr;        // as ScanForwardArgs; bit 0
  const int32_t* final_index = nullptr;  // where `to` has that of sequence n
};
void additive_scan(const AdditiveScanArgs& args, int k_tile, void* stream);

// join_segments where what a segment does to a state is to multiply it by its decay. In place as there.
struct AdditiveJoinArgs {
  int32_t N = 0, HV = 0, K = 0, V = 0;
  const int32_t* first_segment = nullptr;  // [N + 1]
  const float* decays = nullptr;           // [segments, HV]
  float* states = nullptr;                 // [segments, HV, V, K]
  StateArg from;                           // may be absent: zero
  bool reverse = false;
};
void additive_join(const AdditiveJoinArgs& args, void* stream);

struct AdditiveGradientArgs {
  Problem problem;
  TokenArg d_o;  // may be absent: zero
  const uint16_t* states = nullptr;
  const uint16_t* d_states = nullptr;
  HeadGradients grads;
  float* form_parts = nullptr;  // as GradientArgs
};
void additive_gradients(const AdditiveGradientArgs& args, int k_tile, int64_t chunks, void* stream);

}  // namespace fw::cuda
