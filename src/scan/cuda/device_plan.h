// What a call does on the device: which kernels in which form, and where everything lies in workspace and saved buffer.
// A plain function of the checked descriptor (scan/plan.h) and the device's number of SMs, without CUDA types: it is
// printed and tested where there is no GPU.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "gpu/device.h"
#include "scan/cuda/args.h"
#include "scan/plan.h"

namespace fw::cuda {

// Bytes at an offset of a buffer; bytes 0: not there.
struct Region {
  size_t offset = 0, bytes = 0;
};

// What both directions have in the workspace: tables of packed sequences, the preconditioner's rows.
struct CommonRegions {
  Region offsets, chunk_base;  // int32 [N + 1]
  // float [tokens, H, K]; where prepare() makes M, PrepareArgs::spare_m; where gradients() does, PrecondShare::Row
  // [tokens, H] (kernels.h)
  Region m;
  // of the preconditioner (kernels.h); backward of the chunk form has the boundaries from forward
  Region boundaries, scratch;
};

// A sequence of many chunks and few heads would leave most of the device idle: it is cut into segments, each a sequence
// to the scans. What a segment does to the state is affine: a first pass makes its parts, S -> M S + N, join_segments()
// walks over them, and the second pass starts every segment from its own state. Tables as the device sees them; empty:
// no cut.
struct Segments {
  int64_t chunks = 0;               // of a segment
  bool backward = false;            // the reverse scan is cut too
  std::vector<int32_t> offsets;     // tokens before segment i, then all
  std::vector<int32_t> chunk_base;  // chunks before it
  std::vector<int32_t> first;       // [N + 1]: segments before sequence n
  std::vector<int32_t> last_of;     // the sequence whose last segment it is, else -1 ...
  std::vector<int32_t> first_of;    // ... whose first segment it is
  std::vector<int32_t> sequence_of;
  // What the first pass makes of each segment: bit 0: N, bit 1: M (kernels.h).
  std::vector<int32_t> forward_parts(bool initial_state, bool save) const;
  std::vector<int32_t> backward_parts() const;
  int64_t count() const { return static_cast<int64_t>(last_of.size()); }
  explicit operator bool() const { return count() > 0; }
};
// Their copies and the join's arrays in the workspace.
struct SegmentRegions {
  // int32: offsets, chunk_base, first, last_of (backward: first_of), parts, sequence_of, one after the other
  Region tables;
  Region states;  // float [segments, HV, V, K]
  Region decays;  // float [segments, HV]: DevicePlan::direct
};

// HiLoTiles of rules that have them (kernels.h).
struct HiLoRegions {
  Region chunk_tiles, lo_parts;
};

struct ForwardRegions {
  CommonRegions common;
  // FwdTiles [chunks, HV], or what is smaller (what the tensors are is not known here): RowTiles, or RowScales and, if
  // not saved, IntraChunk. Of stores_k_hat() XMTiles, and in `streams` QETiles, if not saved. Not if direct
  Region chunk_tiles;
  HiLoRegions hi_lo;
  Region z;  // SW128 tiles [chunks, HV, value blocks]: rules whose write gate has a value a channel
  SegmentRegions segments;
  Region maps;  // float [segments, HV, K, K], where they are not saved
  Region streams;
  // of DevicePlan::k256, where they are not saved: Khat as SavedRegions, or RowScales; IntraChunk [chunks, HV]
  Region keys, numbers, pairs;
  size_t saving_bytes = 0;  // up to where that begins which is not there if it is saved
  size_t bytes = 0;
};

// Forward leaves these for backward: if direct, the states alone.
struct SavedRegions {
  Region chunk_tiles;  // BwdTiles [chunks, HV]; of stores_k_hat() QETiles, and
  Region keys;         // Khat, bf16 [chunks, HV, 64 k_tile]; or
  // RowScalesBwd [chunks, HV]: reverse_takes_rows(); RowScales: DevicePlan::k256 but stores_k_hat()
  Region numbers;
  Region norms;  // RowNorms [chunks, HV]: of DevicePlan::k256 with k256_sums() or k256_channels() (rule_traits.h)
  HiLoRegions hi_lo;
  Region pairs;         // IntraChunk [chunks, HV]
  Region states;        // S^T [chunks, HV, value blocks]
  Region w;             // SW128 tiles [chunks, HV, value blocks]
  Region maps;          // as ForwardRegions, where backward is cut too
  Region boundaries;    // as CommonRegions
  Region precond_rows;  // bf16 [tokens, H, K]: Problem::precond_rows
  size_t bytes = 0;
};

struct BackwardRegions {
  CommonRegions common;
  Region d_states, v;  // as states and w; v not if direct
  // Gradients per value head, float [tokens, HV, K], where the caller's tensor has fewer heads (or, of k, the
  // preconditioner adds to it).
  Region q, k, erase_key, erase_gate, g, dm;
  Region head_sums;          // GradientArgs::head_sums
  Region dalpha_p, dbeta_p;  // float [tokens, HV]
  Region dcenter;            // float [chunks, H]
  // float [2, .., tokens, HV], of DevicePlan::k256: what both calls make of gradients of one scalar per token and the
  // slopes of q and k
  Region k256_scalars;
  Region ready;  // TilesReady::made [chunks, HV] (kernels.h), where DevicePlan::overlap_grad_with_scan
  Region token;  // of token_backward
  SegmentRegions segments;
  size_t bytes = 0;
};

struct DevicePlan {
  int sm_count = 0;         // of the device that the plan is for,
  Arch arch = Arch::kSm90;  // and the machine code that it runs
  bool chunk_form = false;
  int k_tile = 0;        // 64 or 128, if k256 256: K padded, chunk form
  int value_blocks = 0;  // of 64 columns, chunk form
  bool z_tile = false;
  // No erase, streams that are q, k, v times a scale per row, one decay a token or none: from the raw tensors
  // (kernels.h, additive_*).
  bool direct = false;
  // K above 128 (kernels.h, k256_*).
  bool k256 = false;
  int64_t chunks = 0;  // of all sequences
  Segments segments;
  // there are segments, or would be of longer sequences: the descriptor says how many tokens one has, and a sequence's
  // bits are those alone
  bool cut = false;
  // Forward that does not save is one kernel (sm90/fused/), where TMA takes its tensors: there are about as many
  // sequences and value heads as SMs, or more.
  bool fused_forward = false;
  // No step of the rule lets a state grow, and decays are given: a first pass over a segment leaves out what they let
  // nothing through of (sm90/scan/decay_cutoff.cuh).
  bool uses_decay_cutoff = false;
  // The reverse scan leaves many SMs free for a while: the gradients begin there, with the tiles that it has left (but
  // for kernels that have no registers for it: they come after).
  bool overlap_grad_with_scan = false;
  // of the scan; those of short sequences alongside long ones, which are soon over, by their chunks
  int64_t reverse_blocks = 0;
  double reverse_time = 0;  // that it takes, in microseconds, about
  ForwardRegions forward;
  SavedRegions saved;
  BackwardRegions backward;
  // Without a saved buffer backward makes one at the start of its workspace; forward's own regions follow it and are
  // used up before backward's, which lie over them.
  size_t backward_alone_bytes() const;
};

// Whether a GPU has chunk kernels for the call.
bool can_take_chunks(const Plan& plan, Arch arch);
// Whether the call takes the chunk form, on a GPU that has it.
bool takes_chunks(const Plan& plan);
// Whether it takes that form as two calls, with K above 128 of split_rule() (rewrites/split_k.h).
bool takes_split_k(const Plan& plan);
// plan: as the kernels know it. For a device of so many SMs, whose kernels are those of `arch` (gpu/device.h). Throws
// Error(kUsage) for a chunk form that the device has not.
DevicePlan make_device_plan(const Plan& plan, int sm_count, Arch arch = Arch::kSm90);

}  // namespace fw::cuda
