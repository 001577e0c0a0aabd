#include "scan/cuda/call/run.h"

#include "gpu/sequences.h"
#include "gpu/upload.h"
#include "scan/cuda/token_arg.h"
#include "scan/cuda/traits.h"

namespace fw::cuda {
namespace {

void upload_table(const Plan& plan, const std::vector<int32_t>& values, const Region& region, const Space& space) {
  upload(values.data(), static_cast<int64_t>(values.size()), space.at<int32_t>(region), plan.stream);
}

}  // namespace

TokenShape token_shape(const Plan& plan) { return {plan.packed ? 1 : plan.B, plan.packed ? plan.tokens() : plan.T}; }

SlotArg slot_arg(const Plan& plan) {
  const Slots& s = plan.slots;
  SlotArg a;
  a.own = s.own, a.tokens = s.tokens, a.finals = s.finals, a.accepted = s.accepted;
  a.columns = static_cast<int32_t>(s.columns), a.first = s.first, a.token_rows = s.token_rows;
  a.skips = s.skips ? 1 : 0, a.clears = s.clears ? 1 : 0;
  return a;
}
RingArg ring_arg(const Plan& plan, const Outputs<float>& out) {
  const Ring& r = plan.ring;
  RingArg a;
  if (!r) return a;
  a.data = out.ring.data;
  a.stride_n = out.ring.stride_n, a.stride_h = out.ring.stride_h, a.stride_r = out.ring.stride_r;
  a.positions = r.positions, a.previous = r.previous;
  a.tokens = static_cast<int32_t>(r.tokens), a.rows = static_cast<int32_t>(r.rows);
  a.length = static_cast<int32_t>(plan.longest), a.span = static_cast<int32_t>(plan.ring_span_rows());
  return a;
}
StateArg at_slots(const Plan& plan, StateArg a, bool end) {
  a.slots = end && plan.slots.finals != nullptr ? plan.slots.finals : plan.slots.own;
  a.first_slot = plan.slots.first;
  return a;
}

DecayCutoffArg decay_cutoff_arg(const Plan& plan, const DevicePlan& device, const Problem& problem) {
  if (!device.uses_decay_cutoff) return {};
  if (problem.rule.decay == Decay::kChannel) return {problem.in.g, problem.K, problem.fused};
  // Of logits forward's kernels have left the values.
  return {problem.fused.g.given == GateActivation::kValue ? problem.in.g
                                                          : per_head(plan, problem.fused.numbers.g, 1, false),
          1,
          {}};
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

Problem problem_of(const Plan& plan, const DevicePlan& device, const Inputs<float>& in, const FusedGates& fused,
                   const CommonRegions& regions, const Space& space) {
  Problem x = problem_shape(plan);
  x.fused = fused;
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

K256PrepareArgs k256_prepare_args(const DevicePlan& device, const void* saved, const Space& space) {
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

void first_raw_pass(const Plan& plan, const DevicePlan& device, AdditiveScanArgs& scan, SegmentTables& tables,
                    const Space& space) {
  const Segments& s = device.segments;
  const SegmentRegions& r = scan.reverse ? device.backward.segments : device.forward.segments;
  const std::vector<int32_t> parts = scan.reverse ? s.backward_parts() : s.forward_parts(false, false);
  tables = upload_segments(plan, s, r, scan.reverse ? s.first_of : s.last_of, parts, space);
  scan.sequences = tables.sequences;
  AdditiveScanArgs own = scan;
  own.o = {};
  own.states = nullptr;
  own.checkpoints = {};
  own.from = {};
  own.to = segment_states(plan, space.at<float>(r.states), plan.V);
  own.decays = space.at<float>(r.decays);
  own.parts = tables.parts;
  additive_scan(own, device.k_tile, plan.stream);
}

void join_raw_pass(const Plan& plan, const DevicePlan& device, AdditiveScanArgs& scan, const SegmentTables& tables,
                   const Space& space) {
  const SegmentRegions& r = scan.reverse ? device.backward.segments : device.forward.segments;
  AdditiveJoinArgs join;
  join.N = static_cast<int32_t>(plan.N);
  join.HV = static_cast<int32_t>(plan.HV);
  join.K = static_cast<int32_t>(plan.K);
  join.V = static_cast<int32_t>(plan.V);
  join.first_segment = tables.first;
  join.decays = space.at<float>(r.decays);
  join.states = space.at<float>(r.states);
  join.from = scan.from;
  join.reverse = scan.reverse;
  additive_join(join, plan.stream);
  scan.checkpoints.sequence_of = tables.sequence_of;
  copy_checkpoints(scan.checkpoints, scan.sequences, join.HV, join.K, join.V, join.states, plan.stream);
  scan.from = segment_states(plan, join.states, plan.V);
  scan.final_index = tables.ends_of;
}

}  // namespace fw::cuda
