// Forward of a call on the device: the stages of its pipeline, one after the other.
#include "base/error.h"
#include "gpu/device.h"
#include "scan/cuda/call/run.h"
#include "scan/cuda/pipeline.h"
#include "scan/cuda/require_device.h"
#include "scan/cuda/token/ring.h"
#include "scan/cuda/token_arg.h"

namespace fw::cuda {
namespace {

class ForwardRun {
 public:
  ForwardRun(const Plan& plan, const DevicePlan& device, const Inputs<float>& in, const CallForms& forms,
             const Outputs<float>& out, void* saved, void* workspace)
      : plan_(plan), device_(device), out_(out), saved_(saved), kept_(saved), space_(workspace) {
    upload_tables(plan, device.forward.common, space_);
    problem_ = problem_of(plan, device, in, forms.gates, device.forward.common, space_);
    if (saved == nullptr && !device.uses_decay_cutoff) problem_.fused.numbers = {};  // nobody reads them
    // Tables and M take kernels of their own, and a gate of channels is loaded with q and k.
    after_gate_kernel_ = forms.made_last && !plan.packed && !plan.rule.uses_precond() && !channel_erase(plan.rule);
    CallTraits traits = call_traits(problem_, device);
    if (device.chunk_form) {
      traits.sm_count = static_cast<int32_t>(persistent_ctas());
      traits.one_kernel =
          saved == nullptr && fuses_forward(problem_, device, token_shape(plan), token_arg(plan, out.o));
    } else {
      make_token_args();
      add_states(token_, traits);
    }
    pipeline_ = plan_forward(traits, plan, device);
  }

  void run() {
    for (const StageKind stage : pipeline_) run(stage);
  }

 private:
  void run(StageKind stage) {
    switch (stage) {
      case StageKind::kPrecond:
      case StageKind::kPrecondTokens:
        return precond(stage);
      case StageKind::kPrepare:
        return device_.k256 ? prepare_k256() : prepare_tiles();
      case StageKind::kFirstScan:
        return pipeline_.scan == ForwardScan::kRaw ? first_raw_scan() : first_scan();
      case StageKind::kJoin:
        return pipeline_.scan == ForwardScan::kRaw ? join_raw() : join();
      case StageKind::kScan:
        return scan();
      case StageKind::kToken:
        return token();
      case StageKind::kFirstReverse:
      case StageKind::kJoinReverse:
      case StageKind::kReverse:
      case StageKind::kGradients:
      case StageKind::kK256Join:
      case StageKind::kTokenBackward:
      case StageKind::kSumGroups:
      case StageKind::kPrecondBackward:
        fail_internal("forward: expected a stage of forward");
    }
  }

  void precond(StageKind stage) {
    const bool save = saved_ != nullptr && device_.saved.boundaries.bytes > 0;
    if (save) problem_.precond_rows = kept_.at<uint16_t>(device_.saved.precond_rows);
    PrecondForwardArgs args;
    args.problem = problem_;
    args.boundaries =
        save ? kept_.at<float>(device_.saved.boundaries) : space_.at<float>(device_.forward.common.boundaries);
    if (!pipeline_.makes_m) args.m = space_.at<float>(device_.forward.common.m);
    args.scratch = space_.at<float>(device_.forward.common.scratch);
    args.final_precond = precond_arg(out_.final_precond);
    args.slots = slot_arg(plan_);
    args.checkpoints = checkpoint_arg(plan_, precond_arg(out_.precond_checkpoints), problem_.sequences);
    stage == StageKind::kPrecondTokens ? precond_tokens(args, plan_.stream)
                                       : precond_forward(args, device_.chunks, plan_.stream);
    problem_.m = args.m;
    if (pipeline_.makes_m) problem_.boundaries = args.boundaries;
  }

  void prepare_tiles() {
    const bool save = saved_ != nullptr, keys = stores_k_hat(plan_.rule);
    PrepareArgs& args = prepared_;
    args.problem = problem_;
    args.after_gate_kernel = after_gate_kernel_;
    args.forward = space_.at(device_.forward.chunk_tiles);
    if (keys) {
      args.solved = args.forward;
      args.forward = save ? kept_.at(device_.saved.chunk_tiles) : space_.at(device_.forward.streams);
      if (save) args.keys = kept_.at<uint16_t>(device_.saved.keys);
    }
    args.backward = save && !keys ? kept_.at(device_.saved.chunk_tiles) : nullptr;
    args.numbers = save ? kept_.at<RowScalesBwd>(device_.saved.numbers) : nullptr;
    args.forward_lo = lo_tiles(device_.forward.hi_lo, space_);
    if (save) args.backward_lo = lo_tiles(device_.saved.hi_lo, kept_);
    args.pairs = save ? kept_.at<IntraChunk>(device_.saved.pairs) : nullptr;
    args.keeps_intra_chunk = (pipeline_.prepare.leaves & kIntraChunk) != 0;
    if (!save && args.keeps_intra_chunk) {  // A and P in place of chunk tiles, after the numbers
      args.pairs = reinterpret_cast<IntraChunk*>(static_cast<RowScales*>(args.forward) + device_.chunks * plan_.HV);
      static_assert(sizeof(RowScales) + sizeof(IntraChunk) <= sizeof(FwdTiles<64>));
    }
    args.z = space_.at<uint16_t>(device_.forward.z);
    args.spare_m = space_.at<float>(device_.forward.common.m);
    prepare(args, pipeline_.prepare, device_.k_tile, device_.chunks, plan_.stream);

    scan_ = forward_scan_args(plan_, device_, problem_, out_, saved_);
    scan_.chunk_tiles = args.forward;
    scan_.hi_lo = args.forward_lo;
    scan_.z = args.z;
    if (args.keeps_intra_chunk) scan_.pairs = args.pairs;
    scan_.solved = args.solved;
    if ((pipeline_.prepare.leaves & (kRowTiles | kRowScales)) != 0) scan_.rows = {problem_.in.q, problem_.in.k};
    scan_.uses_decay_cutoff = decay_cutoff_arg(plan_, device_, problem_);
  }
  void prepare_k256() {
    K256PrepareArgs args = k256_prepare_args(device_, saved_, space_);
    args.problem = problem_;
    args.z = space_.at<uint16_t>(device_.forward.z);
    k256_prepare(args, pipeline_.prepare.kernel, device_.chunks, plan_.stream);
    k256_ = k256_tiles(args);
    scan_ = forward_scan_args(plan_, device_, problem_, out_, saved_);
    scan_.rows = {problem_.in.q, problem_.in.k};
    scan_.z = args.z;
  }

  // What each segment does to a state.
  void first_scan() {
    const Segments& s = device_.segments;
    tables_ =
        upload_segments(plan_, s, device_.forward.segments, s.last_of,
                        s.forward_parts(scan_.initial_state.data != nullptr, s.backward && saved_ != nullptr), space_);
    scan_.sequences = tables_.sequences;
    ScanForwardArgs parts = scan_;
    parts.o = {};
    parts.states = parts.w = nullptr;
    parts.checkpoints = {};
    parts.initial_state = {};
    parts.final_state = segment_states(plan_, joined(), plan_.V);
    parts.maps = segment_states(plan_, maps(), plan_.K);
    parts.parts = tables_.parts;
    scan_forward(parts, pipeline_.scan, device_.k_tile, plan_.stream);
  }
  // The state where each segment begins.
  void join() {
    join_segments(join_args(plan_, tables_.first, joined(), maps(), scan_.initial_state, false), plan_.stream);
    scan_.checkpoints.sequence_of = tables_.sequence_of;
    copy_checkpoints(scan_.checkpoints, scan_.sequences, scan_.HV, scan_.K, scan_.V, joined(), plan_.stream);
    scan_.initial_state = segment_states(plan_, joined(), plan_.V);
    scan_.final_index = tables_.ends_of;
  }
  void scan() {
    if (pipeline_.scan == ForwardScan::kFused) {
      fused_forward(fused_args(), plan_.stream);
    } else if (pipeline_.scan == ForwardScan::kRaw) {
      if (!device_.segments) raw_ = raw_args();
      additive_scan(raw_, device_.k_tile, plan_.stream);
    } else if (device_.k256) {
      k256_forward(scan_, pipeline_.scan, k256_, plan_.stream);
    } else {
      scan_forward(scan_, pipeline_.scan, device_.k_tile, plan_.stream);
    }
  }
  float* joined() const { return space_.at<float>(device_.forward.segments.states); }
  float* maps() const {
    return saved_ != nullptr && device_.segments.backward ? kept_.at<float>(device_.saved.maps)
                                                          : space_.at<float>(device_.forward.maps);
  }

  // ---- From the raw tensors
  FusedForwardArgs fused_args() const {
    FusedForwardArgs args;
    args.problem = problem_;
    args.shape = token_shape(plan_);
    args.o = token_arg(plan_, out_.o);
    args.initial_state = at_slots(plan_, problem_.initial_state, false);
    args.final_state = at_slots(plan_, state_arg(plan_, out_.final_state), true);
    return args;
  }
  AdditiveScanArgs raw_args() const {
    AdditiveScanArgs scan;
    scan.problem = problem_;
    scan.sequences = problem_.sequences;
    scan.o = token_arg(plan_, out_.o);
    scan.from = at_slots(plan_, problem_.initial_state, false);
    scan.to = at_slots(plan_, state_arg(plan_, out_.final_state), true);
    scan.checkpoints = checkpoint_arg(plan_, state_arg(plan_, out_.checkpoints), problem_.sequences);
    if (saved_ != nullptr) scan.states = kept_.at<uint16_t>(device_.saved.states);
    return scan;
  }
  void first_raw_scan() {
    raw_ = raw_args();
    first_raw_pass(plan_, device_, raw_, tables_, space_);
  }
  void join_raw() { join_raw_pass(plan_, device_, raw_, tables_, space_); }

  // ---- Token by token
  void make_token_args() {
    token_.problem = problem_;
    token_.o = token_arg(plan_, out_.o);
    token_.final_state = state_arg(plan_, out_.final_state);
    token_.slots = slot_arg(plan_);
    token_.checkpoints = checkpoint_arg(plan_, state_arg(plan_, out_.checkpoints), problem_.sequences);
    if (plan_.slots.skips) token_.ring = ring_arg(plan_, out_);
  }
  void token() {
    token_.problem = problem_;
    if (pipeline_.steps_precond) token_.final_precond = precond_arg(out_.final_precond);
    token_forward(token_, pipeline_.token, plan_.stream);
  }

  const Plan& plan_;
  const DevicePlan& device_;
  const Outputs<float>& out_;
  void* saved_;
  Space kept_, space_;  // what forward leaves, and the workspace
  bool after_gate_kernel_ = false;
  Problem problem_;
  Pipeline pipeline_;
  PrepareArgs prepared_;
  K256Tiles k256_;
  ScanForwardArgs scan_;
  AdditiveScanArgs raw_;
  SegmentTables tables_{};
  TokenForwardArgs token_;
};

}  // namespace

void scan_forward(const Plan& plan, const DevicePlan& device, const Inputs<float>& in, const CallForms& forms,
                  const Outputs<float>& out, void* saved, void* workspace) {
  require_device(device.chunk_form);
  if (plan.N == 0) return;
  ForwardRun(plan, device, in, forms, out, saved, workspace).run();
}

void fold_ring(const Plan& plan, const Inputs<float>& in, const Outputs<float>& out) {
  RingFoldArgs args;
  args.N = static_cast<int32_t>(plan.N), args.HV = static_cast<int32_t>(plan.HV);
  args.K = static_cast<int32_t>(plan.K), args.V = static_cast<int32_t>(plan.V);
  args.rule = plan.rule;
  args.slots = slot_arg(plan);
  args.state = state_arg(plan, in.initial_state);
  args.ring = ring_arg(plan, out);
  fold_ring(args, plan.stream);
}

}  // namespace fw::cuda
