// What both directions of a call share: regions of buffers as pointers, and the arguments of kernels made of a plan's.
#pragma once

#include <vector>

#include "scan/cuda/device_plan.h"
#include "scan/cuda/kernels.h"
#include "scan/cuda/scan.h"
#include "scan/tensors.h"

namespace fw::cuda {

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

TokenShape token_shape(const Plan& plan);
SlotArg slot_arg(const Plan& plan);
RingArg ring_arg(const Plan& plan, const Outputs<float>& out);
// The initial states (end: the final ones) of the chunk form.
StateArg at_slots(const Plan& plan, StateArg a, bool end);
DecayCutoffArg decay_cutoff_arg(const Plan& plan, const DevicePlan& device, const Problem& problem);
CheckpointArg checkpoint_arg(const Plan& plan, const StateArg& states, const SequenceArg& whole);
// The inputs of the call, without M.
Problem problem_of(const Plan& plan, const DevicePlan& device, const Inputs<float>& in, const FusedGates& fused,
                   const CommonRegions& regions, const Space& space);
// Tables of packed sequences.
void upload_tables(const Plan& plan, const CommonRegions& regions, const Space& space);
// The segments of a cut, as sequences, and the tables that the passes need alongside them.
struct SegmentTables {
  SequenceArg sequences;
  const int32_t *first, *ends_of, *parts, *sequence_of;
};
SegmentTables upload_segments(const Plan& plan, const Segments& s, const SegmentRegions& r,
                              const std::vector<int32_t>& ends_of, const std::vector<int32_t>& parts,
                              const Space& space);
// float [segments, HV, rows, K].
StateArg segment_states(const Plan& plan, float* data, int64_t rows);
JoinArgs join_args(const Plan& plan, const int32_t* first, float* states, const float* maps, const StateArg& from,
                   bool reverse);

// What the scans of chunk tiles and those of K above 128 are given alike, of whole sequences. saved: may be null
// forward.
ScanForwardArgs forward_scan_args(const Plan& plan, const DevicePlan& device, const Problem& problem,
                                  const Outputs<float>& out, void* saved);
ScanReverseArgs reverse_scan_args(const Plan& plan, const DevicePlan& device, const Problem& problem,
                                  const Outputs<float>& d, const Inputs<float>& grads, const void* saved,
                                  const Space& space);
HiLoTiles lo_tiles(const HiLoRegions& regions, const Space& space);
// Where k256_prepare() leaves what it makes, without z; space: of forward, where nothing is saved.
K256PrepareArgs k256_prepare_args(const DevicePlan& device, const void* saved, const Space& space);
K256Tiles k256_tiles(const K256PrepareArgs& at);

// Of rules that need no chunk tiles, of cut sequences: a first pass over the segments, which `scan` becomes one of, and
// the join, after which it starts from the joined states.
void first_raw_pass(const Plan& plan, const DevicePlan& device, AdditiveScanArgs& scan, SegmentTables& tables,
                    const Space& space);
void join_raw_pass(const Plan& plan, const DevicePlan& device, AdditiveScanArgs& scan, const SegmentTables& tables,
                   const Space& space);

}  // namespace fw::cuda
