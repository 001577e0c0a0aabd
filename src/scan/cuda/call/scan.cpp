#include "scan/cuda/scan.h"

#include <algorithm>
#include <iterator>
#include <vector>

#include "gpu/upload.h"
#include "scan/cuda/common/sequences.h"
#include "scan/cuda/device_plan.h"
#include "scan/cuda/rewrites/gate_logits.h"
#include "scan/cuda/rewrites/split_k.h"
#include "scan/cuda/select.h"
#include "scan/cuda/token_arg.h"

namespace fw::cuda {
namespace {

// Regions of a buffer as pointers.
class Space {
 public:
  explicit Space(void* base) : base_(static_cast<char*>(base)) {}
  template <class T = void>
  T* at(const Region& region) const {
    return region.bytes > 0 ? reinterpret_cast<T*>(base_ + region.offset) : nullptr;
  }

 private:
  char* base_;
};

TokenShape token_shape(const Plan& plan) { return {plan.packed ? 1 : plan.B, plan.packed ? plan.tokens() : plan.T}; }

SlotArg slot_arg(const Plan& plan) {
  const Slots& s = plan.slots;
  SlotArg a;
  a.own = s.own, a.tokens = s.tokens, a.finals = s.finals, a.accepted = s.accepted;
  a.columns = static_cast<int32_t>(s.columns), a.first = s.first;
  a.skips = s.skips ? 1 : 0, a.clears = s.clears ? 1 : 0;
  return a;
}
// The initial states (end: the final ones) of the chunk form.
StateArg at_slots(const Plan& plan, StateArg a, bool end) {
  a.slots = end && plan.slots.finals != nullptr ? plan.slots.finals : plan.slots.own;
  a.first_slot = plan.slots.first;
  return a;
}

DecayCutoffArg decay_cutoff_arg(const Plan& plan, const DevicePlan& device, const Problem& problem) {
  if (!device.uses_decay_cutoff) return {};
  if (problem.rule.decay == Decay::kChannel) return {problem.in.g, problem.K, problem.fused};
  // Of logits forward's kernels have left the values.
  return {
      problem.fused.g.given == Given::kValue ? problem.in.g : per_head(plan, problem.fused.numbers.g, 1, false), 1, {}};
}

CheckpointArg checkpoint_arg(const Plan& plan, const StateArg& states, const SequenceArg& whole) {
  CheckpointArg a;
  if (states.data == nullptr) return a;
  a.states = states;
  a.slots = plan.checkpoints.slots;
  a.columns = static_cast<int32_t>(plan.checkpoints.columns);
  a.first_slot = plan.slots.first;
  a.chunks = static_cast<int32_t>(plan.checkpoints.interval / kChunk);
  a.whole = whole;
  return a;
}

// The inputs of the call, without M.
Problem problem_of(const Plan& plan, const DevicePlan& device, const Inputs<float>& in, const FusedGates& fused,
                   const CommonRegions& regions, const Space& space) {
  Problem x;
  x.fused = fused;
  x.rule = plan.rule;
  x.scale = static_cast<float>(plan.scale);
  x.B = static_cast<int32_t>(plan.B);
  x.T = static_cast<int32_t>(plan.T);
  x.H = static_cast<int32_t>(plan.H);
  x.HV = static_cast<int32_t>(plan.HV);
  x.K = static_cast<int32_t>(plan.K);
  x.V = static_cast<int32_t>(plan.V);
  x.group = static_cast<int32_t>(plan.group());
  x.tokens = plan.tokens();
  x.sequences.N = static_cast<int32_t>(plan.N);
  x.sequences.T = x.T;
  x.sequences.chunks = plan.N > 0 ? static_cast<int32_t>(device.chunks / plan.N) : 0;
  x.sequences.offsets = space.at<int32_t>(regions.offsets);
  x.sequences.chunk_base = space.at<int32_t>(regions.chunk_base);
  x.sequences.bounded = plan.device_offsets != nullptr ? 1 : 0;
  x.in = token_args(plan, in);
  x.precond_center = in.precond_center;
  x.center_stride = in.center_stride;
  x.initial_state = state_arg(plan, in.initial_state);
  x.initial_precond = precond_arg(in.initial_precond);
  return x;
}

void upload_table(const Plan& plan, const std::vector<int32_t>& values, const Region& region, const Space& space) {
  upload(values.data(), static_cast<int64_t>(values.size()), space.at<int32_t>(region), plan.stream);
}

void upload_tables(const Plan& plan, const CommonRegions& regions, const Space& space) {
  if (!plan.packed) return;
  if (plan.device_offsets != nullptr) {
    make_sequences(plan.device_offsets, plan.offsets_are_64, plan.N, plan.longest, plan.T,
                   space.at<int32_t>(regions.offsets), space.at<int32_t>(regions.chunk_base), plan.stream);
    return;
  }
  upload_sequences(plan.offsets.data(), plan.N, space.at<int32_t>(regions.offsets),
                   space.at<int32_t>(regions.chunk_base), plan.stream);
}

// The segments of a cut, as sequences, and the tables that the passes need alongside them.
struct SegmentTables {
  SequenceArg sequences;
  const int32_t *first, *ends_of, *parts, *sequence_of;
};
SegmentTables upload_segments(const Plan& plan, const Segments& s, const SegmentRegions& r,
                              const std::vector<int32_t>& ends_of, const std::vector<int32_t>& parts,
                              const Space& space) {
  std::vector<int32_t> all;
  const int32_t* base = space.at<int32_t>(r.tables);
  const auto append = [&](const std::vector<int32_t>& table) {
    const int32_t* at = base + all.size();
    all.insert(all.end(), table.begin(), table.end());
    return at;
  };
  SegmentTables t;
  t.sequences.offsets = append(s.offsets);
  t.sequences.chunk_base = append(s.chunk_base);
  t.sequences.N = static_cast<int32_t>(s.count());
  t.sequences.T = static_cast<int32_t>(plan.T);
  t.sequences.batch = plan.packed ? 0 : t.sequences.T;
  t.first = append(s.first);
  t.ends_of = append(ends_of);
  t.parts = append(parts);
  t.sequence_of = append(s.sequence_of);
  upload_table(plan, all, r.tables, space);
  return t;
}

// float [segments, HV, rows, K].
StateArg segment_states(const Plan& plan, float* data, int64_t rows) {
  StateArg a;
  a.data = data;
  a.stride_k = 1;
  a.stride_v = plan.K;
  a.stride_h = rows * plan.K;
  a.stride_n = plan.HV * a.stride_h;
  return a;
}

JoinArgs join_args(const Plan& plan, const int32_t* first, float* states, const float* maps, const StateArg& from,
                   bool reverse) {
  JoinArgs join;
  join.N = static_cast<int32_t>(plan.N);
  join.HV = static_cast<int32_t>(plan.HV);
  join.K = static_cast<int32_t>(plan.K);
  join.V = static_cast<int32_t>(plan.V);
  join.first_segment = first;
  join.maps = maps;
  join.states = states;
  join.from = from;
  join.reverse = reverse;
  return join;
}

// Runs the passes of a cut sequence: `scan` as for the whole call.
void scan_segments_forward(const Plan& plan, const DevicePlan& device, ScanForwardArgs scan, float* maps,
                           const Space& space) {
  const SegmentRegions& r = device.forward.segments;
  const Segments& s = device.segments;
  const SegmentTables tables =
      upload_segments(plan, s, r, s.last_of,
                      s.forward_parts(scan.initial_state.data != nullptr, s.backward && scan.states != nullptr), space);
  float* const joined = space.at<float>(r.states);
  const StateArg states = segment_states(plan, joined, plan.V);
  scan.sequences = tables.sequences;
  ScanForwardArgs parts = scan;
  parts.o = {};
  parts.states = parts.w = nullptr;
  parts.checkpoints = {};
  parts.initial_state = {};
  parts.final_state = states;
  parts.maps = segment_states(plan, maps, plan.K);
  parts.parts = tables.parts;
  scan_forward(parts, device.key, plan.stream);
  join_segments(join_args(plan, tables.first, joined, maps, scan.initial_state, false), plan.stream);
  scan.checkpoints.sequence_of = tables.sequence_of;
  copy_checkpoints(scan.checkpoints, scan.sequences, scan.HV, scan.K, scan.V, joined, plan.stream);
  scan.initial_state = states;
  scan.final_index = tables.ends_of;
  scan_forward(scan, device.key, plan.stream);
}

void scan_segments_reverse(const Plan& plan, const DevicePlan& device, ScanReverseArgs scan, const float* maps,
                           const Space& space) {
  const SegmentRegions& r = device.backward.segments;
  const Segments& s = device.segments;
  const SegmentTables tables = upload_segments(plan, s, r, s.first_of, s.backward_parts(), space);
  float* const joined = space.at<float>(r.states);
  const StateArg states = segment_states(plan, joined, plan.V);
  scan.sequences = tables.sequences;
  ScanReverseArgs parts = scan;
  parts.d_states = parts.v = nullptr;
  parts.made = nullptr;
  parts.d_final_state = {};
  parts.d_initial_state = states;
  parts.parts = tables.parts;
  scan_reverse(parts, device.key, plan.stream);
  join_segments(join_args(plan, tables.first, joined, maps, scan.d_final_state, true), plan.stream);
  scan.d_final_state = states;
  scan.final_index = tables.ends_of;
  scan_reverse(scan, device.key, plan.stream);
}

// M of the preconditioner, into the workspace (or elsewhere: prepare() or gradients() make it), and A before every
// chunk; final_precond may be absent.
// made: A is there.
void make_precond(const Plan& plan, const DevicePlan& device, const CommonRegions& regions, const Space& space,
                  float* boundaries, bool made, bool elsewhere, const StateArg& final_precond,
                  const StateArg& checkpoints, Problem& problem) {
  if (!plan.rule.uses_precond()) return;
  PrecondForwardArgs args;
  args.problem = problem;
  if (elsewhere) problem.boundaries = boundaries;
  if (elsewhere && made) return;
  args.m = elsewhere ? nullptr : space.at<float>(regions.m);
  args.boundaries = boundaries;
  args.made = made;
  if (made) args.problem.precond_rows = nullptr;  // so are they
  args.scratch = space.at<float>(regions.scratch);
  args.final_precond = final_precond;
  args.slots = slot_arg(plan);
  args.checkpoints = checkpoint_arg(plan, checkpoints, problem.sequences);
  if (plan.slots.tokens != nullptr) {
    precond_tokens(args, plan.stream);
  } else {
    precond_forward(args, device.chunks, plan.stream);
  }
  problem.m = args.m;
}

// What the scans of chunk tiles and those of K above 128 are given alike, of whole sequences. saved: may be null
// forward.
ScanForwardArgs forward_scan_args(const Plan& plan, const DevicePlan& device, const Problem& problem,
                                  const Outputs<float>& out, void* saved) {
  ScanForwardArgs scan;
  scan.sequences = problem.sequences;
  scan.HV = problem.HV;
  scan.K = problem.K;
  scan.V = problem.V;
  scan.is_delta = plan.rule.is_delta();
  scan.shape = token_shape(plan);
  scan.v = problem.in.v;
  scan.o = token_arg(plan, out.o);
  scan.initial_state = at_slots(plan, problem.initial_state, false);
  scan.final_state = at_slots(plan, state_arg(plan, out.final_state), true);
  scan.checkpoints = checkpoint_arg(plan, state_arg(plan, out.checkpoints), problem.sequences);
  if (saved != nullptr) {
    scan.states = Space(saved).at<uint16_t>(device.saved.states);
    scan.w = Space(saved).at<uint16_t>(device.saved.w);
  }
  return scan;
}
ScanReverseArgs reverse_scan_args(const Plan& plan, const DevicePlan& device, const Problem& problem,
                                  const Outputs<float>& d, const Inputs<float>& grads, const void* saved,
                                  const Space& space) {
  ScanReverseArgs scan;
  scan.sequences = problem.sequences;
  scan.HV = problem.HV;
  scan.K = problem.K;
  scan.V = problem.V;
  scan.is_delta = plan.rule.is_delta();
  scan.pairs = Space(const_cast<void*>(saved)).at<IntraChunk>(device.saved.pairs);
  scan.rows = {problem.in.q, problem.in.k};
  scan.d_o = token_arg(plan, d.o);
  scan.shape = token_shape(plan);
  scan.d_final_state = state_arg(plan, d.final_state);
  scan.d_initial_state = state_arg(plan, grads.initial_state);
  scan.d_states = space.at<uint16_t>(device.backward.d_states);
  scan.v = space.at<uint16_t>(device.backward.v);
  return scan;
}

HiLoTiles lo_tiles(const HiLoRegions& regions, const Space& space) {
  return {space.at(regions.chunk_tiles), space.at<uint16_t>(regions.lo_parts)};
}

void chunk_forward(const Plan& plan, const DevicePlan& device, const Problem& problem, bool gates_made_last,
                   const Outputs<float>& out, void* saved, const Space& space) {
  const Space kept(saved);
  const bool save = saved != nullptr;
  PrepareArgs prepared;
  prepared.problem = problem;
  // Tables and M take kernels of their own, and a gate of channels is loaded with q and k.
  prepared.after_gate_kernel =
      gates_made_last && !plan.packed && !plan.rule.uses_precond() && !channel_erase(plan.rule);
  const bool keys = stores_k_hat(plan.rule);
  prepared.forward = space.at(device.forward.chunk_tiles);
  if (keys) {
    prepared.solved = prepared.forward;
    prepared.forward = save ? kept.at(device.saved.chunk_tiles) : space.at(device.forward.streams);
    if (save) prepared.keys = kept.at<uint16_t>(device.saved.keys);
  }
  prepared.backward = save && !keys ? kept.at(device.saved.chunk_tiles) : nullptr;
  prepared.numbers = save ? kept.at<RowScalesBwd>(device.saved.numbers) : nullptr;
  prepared.forward_lo = lo_tiles(device.forward.hi_lo, space);
  if (save) prepared.backward_lo = lo_tiles(device.saved.hi_lo, kept);
  prepared.pairs = save ? kept.at<IntraChunk>(device.saved.pairs) : nullptr;
  prepared.keeps_intra_chunk = scan_reads_intra_chunk(problem, device.key, device.cut);
  if (!save && prepared.keeps_intra_chunk) {  // A and P in the place of chunk tiles, after the numbers
    prepared.pairs = reinterpret_cast<IntraChunk*>(static_cast<RowScales*>(prepared.forward) + device.chunks * plan.HV);
    static_assert(sizeof(RowScales) + sizeof(IntraChunk) <= sizeof(FwdTiles<64>));
  }
  prepared.z = space.at<uint16_t>(device.forward.z);
  prepared.spare_m = space.at<float>(device.forward.common.m);
  prepare(prepared, device.key, device.chunks, plan.stream);

  ScanForwardArgs scan = forward_scan_args(plan, device, problem, out, saved);
  scan.chunk_tiles = prepared.forward;
  scan.hi_lo = prepared.forward_lo;
  scan.z = prepared.z;
  if (prepared.keeps_intra_chunk) scan.pairs = prepared.pairs;
  scan.solved = prepared.solved;
  scan.mixed = mixed_streams(plan.rule);
  if (scan.pairs != nullptr || scan_reads_rows(problem, device.key)) scan.rows = {problem.in.q, problem.in.k};
  if (device.segments) {
    scan.uses_decay_cutoff = decay_cutoff_arg(plan, device, problem);
    scan_segments_forward(
        plan, device, scan,
        save && device.segments.backward ? kept.at<float>(device.saved.maps) : space.at<float>(device.forward.maps),
        space);
  } else {
    scan_forward(scan, device.key, plan.stream);
  }
}

// ---- Keys of more than 128 channels

// Where k256_prepare() leaves what it makes, without z; space: of forward, where nothing is saved.
K256PrepareArgs k256_places(const DevicePlan& device, const void* saved, const Space& space) {
  K256PrepareArgs at;
  if (saved == nullptr) {
    at.numbers = space.at<RowScales>(device.forward.numbers);
    at.pairs = space.at<IntraChunk>(device.forward.pairs);
    at.chunk_tiles = space.at<QETiles<kMaxTileK>>(device.forward.streams);
    at.keys = space.at<uint16_t>(device.forward.keys);
    return at;
  }
  const Space kept(const_cast<void*>(saved));
  at.numbers = kept.at<RowScales>(device.saved.numbers);
  at.pairs = kept.at<IntraChunk>(device.saved.pairs);
  at.norms = kept.at<RowNorms>(device.saved.norms);
  at.chunk_tiles = kept.at<QETiles<kMaxTileK>>(device.saved.chunk_tiles);
  at.keys = kept.at<uint16_t>(device.saved.keys);
  return at;
}
K256Tiles k256_tiles(const K256PrepareArgs& at) { return {at.numbers, at.pairs, at.chunk_tiles, at.keys}; }

void forward_of_k256(const Plan& plan, const DevicePlan& device, const Problem& problem, const Outputs<float>& out,
                     void* saved, const Space& space) {
  K256PrepareArgs prepared = k256_places(device, saved, space);
  prepared.problem = problem;
  prepared.z = space.at<uint16_t>(device.forward.z);
  k256_prepare(prepared, device.chunks, plan.stream);
  ScanForwardArgs scan = forward_scan_args(plan, device, problem, out, saved);
  scan.rows = {problem.in.q, problem.in.k};
  scan.z = prepared.z;
  k256_forward(scan, select_k256(plan.rule), k256_tiles(prepared), plan.stream);
}

// Half of the channels: those of the key side's tensors and of the gradients of these.
void take_half(const Rule& rule, GradientArgs& args, bool second) {
  if (!second) {
    args.problem.K = kHalfTileK;
    return;
  }
  args.problem.K -= kHalfTileK;
  for (TokenArgs* all : {&args.problem.in, &args.grads.d}) {
    all->q = from_channel(all->q, kHalfTileK), all->k = from_channel(all->k, kHalfTileK);
    if (rule.decay == Decay::kChannel) all->g = from_channel(all->g, kHalfTileK);
    if (channel_erase(rule)) all->erase_gate = from_channel(all->erase_gate, kHalfTileK);
  }
  args.states += 64 * kHalfTileK;
  args.d_states += 64 * kHalfTileK;
  args.grads.d.v = {};  // the first half makes it, and
  if (rule.write == Gate::kChannel) args.grads.d.write_gate = {};
}

// The tensors of one scalar per token and value head that k256_rule() may take (g and the gates where they are that).
constexpr TokenArg TokenArgs::*kK256Scales[] = {
#define FW_TOKEN_SCALAR(name, neutral, used) &TokenArgs::name,
#include "rule/tokens.def"
    &TokenArgs::g, &TokenArgs::erase_gate, &TokenArgs::write_gate};
static_assert(std::size(kK256Scales) == K256JoinArgs::kNumbers);

void backward_of_k256(const Plan& plan, const DevicePlan& device, const Problem& problem, const Outputs<float>& d,
                      const Inputs<float>& grads, const void* saved, const HeadGradients& heads, const Space& space) {
  const Space kept(const_cast<void*>(saved));
  const K256PrepareArgs prepared = k256_places(device, saved, space);
  const ScanReverseArgs scan = reverse_scan_args(plan, device, problem, d, grads, saved, space);
  k256_reverse(scan, select_k256(plan.rule), k256_tiles(prepared), plan.stream);

  K256JoinArgs join;
  join.problem = problem;
  join.d_q = heads.d.q, join.d_k = heads.d.k;
  const bool norms = plan.rule.q_norm != Norm::kRaw || plan.rule.k_norm != Norm::kRaw || plan.rule.gain_uses_key_norm();
  const int64_t count = plan.tokens() * plan.HV;
  float* numbers = space.at<float>(device.backward.halves);
  const auto next = [&](bool there) {
    float* const at = there ? numbers : nullptr;
    if (there) numbers += count;
    return at;
  };
  for (const bool second : {false, true}) {
    GradientArgs args;
    args.problem = problem;
    args.d_o = scan.d_o;
    args.shape = scan.shape;
    args.pairs = prepared.pairs;
    args.states = kept.at<uint16_t>(device.saved.states);
    args.d_states = scan.d_states;
    args.w = kept.at<uint16_t>(device.saved.w);
    args.v = scan.v;
    args.v_is_dz = scan.is_delta;
    args.grads.d = heads.d;
    args.half = {prepared.numbers, prepared.norms, second, join.q, join.k};
    const TokenArgs& all = args.grads.d;
    const auto of_channels = [&](const TokenArg& a) {
      const Rule& rule = plan.rule;
      return &a == &all.g            ? rule.decay == Decay::kChannel
             : &a == &all.erase_gate ? channel_erase(rule)
                                     : &a == &all.write_gate && rule.write == Gate::kChannel;
    };
    for (int i = 0; i < K256JoinArgs::kNumbers; ++i) {
      TokenArg& to = args.grads.d.*kK256Scales[i];
      if (of_channels(to)) continue;
      float* const own = next(to.data != nullptr);
      join.numbers[i].to = to;
      join.numbers[i].halves[second ? 1 : 0] = own;
      if (own != nullptr) to = per_head(plan, own, 1, false);
    }
    args.grads.dalpha_p = next(norms);
    args.grads.dbeta_p = next(norms);
    take_half(plan.rule, args, second);
    k256_gradients(args, device.chunks, plan.stream);
    // the first half's go into the second's, whose own are left
    join.q = args.grads.dalpha_p, join.k = args.grads.dbeta_p;
  }
  k256_join(join, plan.stream);
}

// ---- Rules that need no chunk tiles

AdditiveScanArgs additive_forward_args(const Plan& plan, const DevicePlan& device, const Problem& problem,
                                       const Outputs<float>& out, void* saved) {
  AdditiveScanArgs scan;
  scan.problem = problem;
  scan.sequences = problem.sequences;
  scan.o = token_arg(plan, out.o);
  scan.from = at_slots(plan, problem.initial_state, false);
  scan.to = at_slots(plan, state_arg(plan, out.final_state), true);
  scan.checkpoints = checkpoint_arg(plan, state_arg(plan, out.checkpoints), problem.sequences);
  scan.states = saved != nullptr ? Space(saved).at<uint16_t>(device.saved.states) : nullptr;
  return scan;
}

// `scan` as for the whole call: of a cut sequence the segments' own parts first, then everything from the segments' own
// states.
void additive_scans(const Plan& plan, const DevicePlan& device, AdditiveScanArgs scan, const Space& space) {
  const Segments& s = device.segments;
  if (!s || (scan.reverse && !s.backward)) {
    additive_scan(scan, device.key, plan.stream);
    return;
  }
  const SegmentRegions& r = scan.reverse ? device.backward.segments : device.forward.segments;
  const std::vector<int32_t> parts = scan.reverse ? s.backward_parts() : s.forward_parts(false, false);
  const SegmentTables tables = upload_segments(plan, s, r, scan.reverse ? s.first_of : s.last_of, parts, space);
  scan.sequences = tables.sequences;
  AdditiveScanArgs own = scan;
  own.o = {};
  own.states = nullptr;
  own.checkpoints = {};
  own.from = {};
  own.to = segment_states(plan, space.at<float>(r.states), plan.V);
  own.decays = space.at<float>(r.decays);
  own.parts = tables.parts;
  additive_scan(own, device.key, plan.stream);
  AdditiveJoinArgs join;
  join.N = static_cast<int32_t>(plan.N);
  join.HV = static_cast<int32_t>(plan.HV);
  join.K = static_cast<int32_t>(plan.K);
  join.V = static_cast<int32_t>(plan.V);
  join.first_segment = tables.first;
  join.decays = own.decays;
  join.states = space.at<float>(r.states);
  join.from = scan.from;
  join.reverse = scan.reverse;
  additive_join(join, plan.stream);
  scan.checkpoints.sequence_of = tables.sequence_of;
  copy_checkpoints(scan.checkpoints, scan.sequences, join.HV, join.K, join.V, join.states, plan.stream);
  scan.from = own.to;
  scan.final_index = tables.ends_of;
  additive_scan(scan, device.key, plan.stream);
}

void additive_backward(const Plan& plan, const DevicePlan& device, const Problem& problem, const Outputs<float>& d,
                       const Inputs<float>& grads, const void* saved, const HeadGradients& heads, float* form_parts,
                       const Space& space) {
  AdditiveScanArgs scan;
  scan.problem = problem;
  scan.problem.fused = {};  // they are values now
  scan.sequences = problem.sequences;
  scan.reverse = true;
  scan.d_o = token_arg(plan, d.o);
  scan.from = state_arg(plan, d.final_state);
  scan.to = state_arg(plan, grads.initial_state);
  scan.states = space.at<uint16_t>(device.backward.d_states);
  additive_scans(plan, device, scan, space);
  AdditiveGradientArgs args;
  args.problem = problem;
  args.d_o = scan.d_o;
  args.states = Space(const_cast<void*>(saved)).at<uint16_t>(device.saved.states);
  args.d_states = scan.states;
  args.grads = heads;
  args.form_parts = form_parts;
  // Where the host does not know how many chunks there are, nobody writes the shares of those that are not.
  if (form_parts != nullptr && problem.sequences.bounded != 0)
    clear(reinterpret_cast<uint32_t*>(form_parts), device.chunks * plan.HV * 2, plan.stream);
  additive_gradients(args, device.key, device.chunks, plan.stream);
}

void forward_on(const Plan& plan, const DevicePlan& device, const Inputs<float>& in, const CallForms& forms,
                const Outputs<float>& out, void* saved, void* workspace) {
  const Space space(workspace);
  upload_tables(plan, device.forward.common, space);
  Problem problem = problem_of(plan, device, in, forms.gates, device.forward.common, space);
  if (saved == nullptr && !device.uses_decay_cutoff) problem.fused.numbers = {};  // nobody reads them
  // One token a sequence: token_forward makes the step of A itself.
  const bool steps_precond = !device.chunk_form && !plan.packed && plan.T == 1 && plan.slots.tokens == nullptr &&
                             (plan.slots.skips || !plan.slots);
  if (!steps_precond) {
    const bool save = saved != nullptr && device.saved.boundaries.bytes > 0;
    if (save) problem.precond_rows = Space(saved).at<uint16_t>(device.saved.precond_rows);
    float* const boundaries =
        save ? Space(saved).at<float>(device.saved.boundaries) : space.at<float>(device.forward.common.boundaries);
    const bool elsewhere = device.chunk_form && prepare_makes_m(problem, device.key);
    make_precond(plan, device, device.forward.common, space, boundaries, false, elsewhere,
                 precond_arg(out.final_precond), precond_arg(out.precond_checkpoints), problem);
  }
  if (device.direct) {
    additive_scans(plan, device, additive_forward_args(plan, device, problem, out, saved), space);
    return;
  }
  if (device.k256) {
    forward_of_k256(plan, device, problem, out, saved, space);
    return;
  }
  if (device.chunk_form) {
    chunk_forward(plan, device, problem, forms.made_last, out, saved, space);
    return;
  }
  TokenForwardArgs args;
  args.problem = problem;
  args.o = token_arg(plan, out.o);
  args.final_state = state_arg(plan, out.final_state);
  args.slots = slot_arg(plan);
  args.checkpoints = checkpoint_arg(plan, state_arg(plan, out.checkpoints), problem.sequences);
  if (steps_precond && plan.rule.uses_precond()) args.final_precond = precond_arg(out.final_precond);
  token_forward(args, plan.stream);
}

// Gradients of key-side tensors per value head: the caller's tensor where it has one head for each, else the workspace,
// and then a sum over the group. In the chunk form the heads' gradients of a tensor whose own is bf16 are bf16 too.
// Each is rounded once, as the sum is. That is as much as their operands were rounded, and half the bytes. Of
// log-decays, whose gradients are sums along the sequence, they are float32.
class GroupedGradients {
 public:
  // sums: gradients() adds up those of q and k itself.
  GroupedGradients(const Plan& plan, const DevicePlan& device, const Inputs<float>& grads, const Space& space,
                   bool sums)
      : plan_(plan), rounds_(device.chunk_form) {
    const BackwardRegions& r = device.backward;
    d_ = token_args(plan, grads);
    d_.precond_g = d_.precond_beta = TokenArg{};
    if (!sums) {
      redirect(d_.q, r.q, space, false);
      redirect(d_.k, r.k, space, plan.rule.uses_precond() && plan.group() > 1);
    }
    redirect(d_.erase_key, r.erase_key, space, false);
    redirect(d_.erase_gate, r.erase_gate, space, false);
    rounds_ = false;
    redirect(d_.g, r.g, space, false);
    if (plan.rule.uses_precond())
      sums_.erase(std::remove_if(sums_.begin(), sums_.end(), [&](const Sum& s) { return s.region == &r.k; }),
                  sums_.end());
  }
  const TokenArgs& per_value_head() const { return d_; }
  void sum(const Problem& problem) const {
    for (const Sum& s : sums_) sum_groups(problem, s.from, problem.K, s.to, plan_.stream);
  }

 private:
  struct Sum {
    TokenArg from, to;
    const Region* region;
  };
  // always: the preconditioner adds them to its own. (Of heads alone in their group it finds them in the caller's
  // tensor.)
  void redirect(TokenArg& arg, const Region& region, const Space& space, bool always) {
    if (!always && (arg.data == nullptr || arg.divisor == 1)) return;
    const TokenArg own = per_head(plan_, space.at(region), plan_.K, rounds_ && arg.bf16 != 0 && !always);
    sums_.push_back({own, arg, &region});
    arg = own;
  }

  const Plan& plan_;
  bool rounds_;
  TokenArgs d_;
  std::vector<Sum> sums_;
};

void finish_precond(const Plan& plan, const DevicePlan& device, const Problem& problem, const Outputs<float>& d,
                    const Inputs<float>& grads, const HeadGradients& heads, const PrecondShare& share,
                    const float* boundaries, const Space& space) {
  const BackwardRegions& r = device.backward;
  PrecondBackwardArgs args;
  args.problem = problem;
  args.share = share;
  args.boundaries = boundaries;
  args.scratch = space.at<float>(r.common.scratch);
  args.grads = heads;
  args.d_final_precond = precond_arg(d.final_precond);
  args.dk = token_arg(plan, grads.k);
  args.dprecond_g = token_arg(plan, grads.precond_g);
  args.dprecond_beta = token_arg(plan, grads.precond_beta);
  args.dcenter_parts = space.at<float>(r.dcenter);
  args.dcenter = grads.precond_center;
  args.dcenter_stride = grads.center_stride;
  args.d_initial_precond = precond_arg(grads.initial_precond);
  precond_backward(args, device.chunks, plan.stream);
}

void chunk_backward(const Plan& plan, const DevicePlan& device, const Problem& problem, const Outputs<float>& d,
                    const Inputs<float>& grads, const void* saved, const HeadGradients& heads,
                    const PrecondShare& share, float* form_parts, float* head_sums, const Space& space) {
  const Space kept(const_cast<void*>(saved));
  ScanReverseArgs scan = reverse_scan_args(plan, device, problem, d, grads, saved, space);
  scan.chunk_tiles = kept.at(device.saved.chunk_tiles);
  scan.keys = kept.at<uint16_t>(device.saved.keys);
  scan.numbers = kept.at<RowScalesBwd>(device.saved.numbers);
  scan.mixed = mixed_streams(plan.rule);
  scan.hi_lo = lo_tiles(device.saved.hi_lo, kept);
  TilesReady ready;
  if (device.backward.ready.bytes > 0) {
    ready.made = space.at<uint32_t>(device.backward.ready);
    ready.scan_blocks = static_cast<int32_t>(device.reverse_blocks);
    ready.scan_time = device.reverse_time;
    clear(ready.made, device.chunks * plan.HV, plan.stream);
  }
  scan.made = ready.made;
  if (device.segments.backward) {
    scan.uses_decay_cutoff = decay_cutoff_arg(plan, device, problem);
    scan_segments_reverse(plan, device, scan, kept.at<float>(device.saved.maps), space);
  } else {
    scan_reverse(scan, device.key, plan.stream);
  }

  GradientArgs args;
  args.problem = problem;
  args.d_o = scan.d_o;
  args.shape = scan.shape;
  args.pairs = scan.pairs;
  args.states = kept.at<uint16_t>(device.saved.states);
  args.d_states = scan.d_states;
  args.w = kept.at<uint16_t>(device.saved.w);
  args.v = scan.v;
  args.v_is_dz = scan.keys != nullptr || scan.numbers != nullptr;
  args.numbers = scan.numbers;
  args.grads = heads;
  args.form_parts = form_parts;
  args.head_sums = head_sums;
  args.precond = share;
  args.ready = ready;
  gradients(args, device.key, device.chunks, plan.stream);
}

// ---- Two halves of the keys (split_k.h)

// to[t, h, :] = the sum of both halves' rows. half: any of the two; space: its workspace, where the tables of packed
// sequences are.
void add_halves(const Plan& plan, const DevicePlan& half, const CommonRegions& regions, const Inputs<float>& in,
                void* rows, const TokenTensor<float>& to, const Space& space) {
  if (!to) return;
  Problem pairs = problem_of(plan, half, in, {}, regions, space);
  pairs.H = pairs.HV, pairs.HV = 2 * pairs.H, pairs.group = 2;
  TokenArg from;
  from.data = rows;
  sum_groups(pairs, from, static_cast<int32_t>(to.dim), token_arg(plan, to), plan.stream);
}

void forward_of_split_k(const Plan& plan, const SplitK& halves, const Inputs<float>& in, const Outputs<float>& out,
                        void* saved, void* workspace) {
  char* const space = static_cast<char*>(workspace);
  void* const o = space + halves.o.offset;
  for (int i = 0; i < 2; ++i) {
    Outputs<float> own = half_of(plan, out, i);
    own.o = half_rows(plan, out.o, o, i);
    scan_forward(halves.plans[i], halves.devices[i], half_of(plan, in, i), {}, own,
                 saved == nullptr ? nullptr : static_cast<char*>(saved) + halves.saved[i], space + halves.forward_at);
  }
  add_halves(plan, halves.devices[1], halves.devices[1].forward.common, in, o, out.o, Space(space + halves.forward_at));
}

void backward_of_split_k(const Plan& plan, const SplitK& halves, const Inputs<float>& in, const Outputs<float>& d,
                         const Inputs<float>& grads, const void* saved, void* workspace) {
  char* const space = static_cast<char*>(workspace);
  void *const d_v = space + halves.d_v.offset, *const d_beta = space + halves.d_beta.offset;
  for (int i = 0; i < 2; ++i) {
    Inputs<float> own = half_of(plan, grads, i);
    own.v = half_rows(plan, grads.v, d_v, i);
    own.beta = half_rows(plan, grads.beta, d_beta, i);
    scan_backward(halves.plans[i], halves.devices[i], half_of(plan, in, i), {}, half_of(plan, d, i), own,
                  static_cast<const char*>(saved) + halves.saved[i], space + halves.backward_at);
  }
  const DevicePlan& half = halves.devices[1];
  const Space tables(space + halves.backward_at);
  add_halves(plan, half, half.backward.common, in, d_v, grads.v, tables);
  add_halves(plan, half, half.backward.common, in, d_beta, grads.beta, tables);
}

}  // namespace

FusedGates fuses_gates(const Plan& plan, const DevicePlan& device, const Inputs<float>& in, const FusedGates& gates,
                       const Inputs<float>* grads, bool made) {
  PrepareArgs args;
  args.problem = problem_of(plan, device, in, gates, {}, Space(nullptr));
  uint16_t place = 0;
  if (device.z_tile) args.z = &place;
  if (device.forward.hi_lo.lo_parts.bytes > 0) args.forward_lo.lo_parts = &place;
  TokenArgs gradients;
  if (grads != nullptr) gradients = token_args(plan, *grads);
  return fused_in_kernels(plan, device, gates, args, grads != nullptr ? &gradients : nullptr, made);
}

void scan_forward(const Plan& plan, const DevicePlan& device, const Inputs<float>& in, const CallForms& forms,
                  const Outputs<float>& out, void* saved, void* workspace) {
  require_device(device.chunk_form);
  if (plan.N == 0) return;
  if (device.halves != nullptr) return forward_of_split_k(plan, *device.halves, in, out, saved, workspace);
  forward_on(plan, device, in, forms, out, saved, workspace);
}

void scan_backward(const Plan& plan, const DevicePlan& device, const Inputs<float>& in, const CallForms& forms,
                   const Outputs<float>& d, const Inputs<float>& grads, const void* saved, void* workspace) {
  require_device(device.chunk_form);
  const void* kept = saved;
  if (kept == nullptr && device.saved.bytes > 0) {
    kept = workspace;
    workspace = static_cast<char*>(workspace) + device.saved.bytes;
    scan_forward(plan, device, in, forms, {}, const_cast<void*>(kept), workspace);
  }
  if (device.halves != nullptr) return backward_of_split_k(plan, *device.halves, in, d, grads, kept, workspace);
  const Space space(workspace);
  const BackwardRegions& r = device.backward;
  upload_tables(plan, r.common, space);
  Problem problem = problem_of(plan, device, with_fused_scalars(plan, forms.gates, in), forms.gates, r.common, space);
  const bool made = device.saved.boundaries.bytes > 0;
  float* const boundaries =
      made ? Space(const_cast<void*>(kept)).at<float>(device.saved.boundaries) : space.at<float>(r.common.boundaries);
  if (made) problem.precond_rows = Space(const_cast<void*>(kept)).at<uint16_t>(device.saved.precond_rows);
  const bool sums_heads = r.head_sums.bytes > 0 && gradients_sum_heads(problem);
  const GroupedGradients grouped(plan, device, grads, space, sums_heads);
  HeadGradients heads;
  heads.d = grouped.per_value_head();
  heads.dm = space.at<float>(r.dm);
  heads.dalpha_p = space.at<float>(r.dalpha_p);
  heads.dbeta_p = space.at<float>(r.dbeta_p);
  GradientArgs places;
  places.problem = problem, places.d_o = token_arg(plan, d.o), places.grads = heads;
  make_precond(plan, device, r.common, space, boundaries, made, device.chunk_form && gradients_make_m(places), {}, {},
               problem);
  PrecondShare share;
  if (problem.boundaries != nullptr)  // in the place of M
    share = precond_share(problem, space.at<float>(r.common.scratch), space.at<float>(r.dcenter), space.at(r.common.m),
                          device.chunks);
  if (device.direct) {
    additive_backward(plan, device, problem, d, grads, kept, heads, forms.parts, space);
  } else if (device.k256) {
    backward_of_k256(plan, device, problem, d, grads, kept, heads, space);
  } else if (device.chunk_form) {
    chunk_backward(plan, device, problem, d, grads, kept, heads, share, forms.parts,
                   sums_heads ? space.at<float>(r.head_sums) : nullptr, space);
  } else {
    TokenBackwardArgs args;
    args.problem = problem;
    args.d_o = token_arg(plan, d.o);
    args.d_final_state = state_arg(plan, d.final_state);
    args.d_initial_state = state_arg(plan, grads.initial_state);
    args.grads = heads;
    args.workspace = space.at(r.token);
    token_backward(args, plan.longest, plan.stream);
  }
  grouped.sum(problem);
  if (plan.rule.uses_precond()) finish_precond(plan, device, problem, d, grads, heads, share, boundaries, space);
}

}  // namespace fw::cuda
