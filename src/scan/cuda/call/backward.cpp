// Backward of a call on the device: the stages of its pipeline, one after the other.
#include <algorithm>
#include <iterator>
#include <optional>
#include <vector>

#include "base/error.h"
#include "gpu/device.h"
#include "gpu/upload.h"
#include "scan/cuda/call/run.h"
#include "scan/cuda/pipeline.h"
#include "scan/cuda/require_device.h"
#include "scan/cuda/rewrites/gate_logits.h"
#include "scan/cuda/rewrites/split_k.h"
#include "scan/cuda/token_arg.h"

namespace fw::cuda {
namespace {

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

class BackwardRun {
 public:
  // kept: what forward left.
  BackwardRun(const Plan& plan, const DevicePlan& device, const Inputs<float>& in, const CallForms& forms,
              const Outputs<float>& d, const Inputs<float>& grads, const void* kept, void* workspace)
      : plan_(plan),
        device_(device),
        d_(d),
        grads_(grads),
        kept_at_(kept),
        kept_(const_cast<void*>(kept)),
        space_(workspace),
        form_parts_(forms.parts) {
    const BackwardRegions& r = device.backward;
    upload_tables(plan, r.common, space_);
    problem_ = problem_of(plan, device, with_fused_scalars(plan, forms.gates, in), forms.gates, r.common, space_);
    made_ = device.saved.boundaries.bytes > 0;
    boundaries_ = made_ ? kept_.at<float>(device.saved.boundaries) : space_.at<float>(r.common.boundaries);
    if (made_) problem_.precond_rows = kept_.at<uint16_t>(device.saved.precond_rows);
    CallTraits traits = call_traits(problem_, device);
    const bool sums_heads = r.head_sums.bytes > 0 && gradients_sum_heads(traits);
    grouped_.emplace(plan, device, grads, space_, sums_heads);
    heads_.d = grouped_->per_value_head();
    heads_.dm = space_.at<float>(r.dm);
    heads_.dalpha_p = space_.at<float>(r.dalpha_p);
    heads_.dbeta_p = space_.at<float>(r.dbeta_p);
    GradientArgs given;
    given.d_o = token_arg(plan, d.o), given.grads = heads_;
    add_gradients(given, traits);
    pipeline_ = plan_backward(traits, plan, device);
    if (pipeline_.makes_m) {  // in place of M
      problem_.boundaries = boundaries_;
      share_ = precond_share(problem_, space_.at<float>(r.common.scratch), space_.at<float>(r.dcenter),
                             space_.at(r.common.m), device.chunks);
    }
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
      case StageKind::kFirstReverse:
        return pipeline_.reverse == ReverseScan::kRaw ? first_raw_reverse() : first_reverse();
      case StageKind::kJoinReverse:
        return pipeline_.reverse == ReverseScan::kRaw ? join_raw_pass(plan_, device_, raw_, tables_, space_)
                                                      : join_reverse();
      case StageKind::kReverse:
        return reverse();
      case StageKind::kGradients:
        return pipeline_.reverse == ReverseScan::kRaw ? raw_gradients()
               : device_.k256                         ? k256_gradients_in_two_calls()
                                                      : tile_gradients();
      case StageKind::kK256Join:
        return k256_join(k256_join_, plan_.stream);
      case StageKind::kTokenBackward:
        return token_backward();
      case StageKind::kSumGroups:
        return grouped_->sum(problem_);
      case StageKind::kPrecondBackward:
        return precond_backward();
      case StageKind::kPrepare:
      case StageKind::kFirstScan:
      case StageKind::kJoin:
      case StageKind::kScan:
      case StageKind::kToken:
        fail_internal("backward: expected a stage of backward");
    }
  }

  // M of every token, from A before every chunk where forward has left it.
  void precond(StageKind stage) {
    PrecondForwardArgs args;
    args.problem = problem_;
    if (made_) args.problem.precond_rows = nullptr;  // they are made too
    args.m = space_.at<float>(device_.backward.common.m);
    args.boundaries = boundaries_;
    args.made = made_;
    args.scratch = space_.at<float>(device_.backward.common.scratch);
    args.slots = slot_arg(plan_);
    stage == StageKind::kPrecondTokens ? precond_tokens(args, plan_.stream)
                                       : precond_forward(args, device_.chunks, plan_.stream);
    problem_.m = args.m;
  }

  // ---- From chunk tiles
  void make_scan_args() {
    scan_ = reverse_scan_args(plan_, device_, problem_, d_, grads_, kept_at_, space_);
    if (device_.k256) return;
    scan_.chunk_tiles = kept_.at(device_.saved.chunk_tiles);
    scan_.keys = kept_.at<uint16_t>(device_.saved.keys);
    scan_.numbers = kept_.at<RowScalesBwd>(device_.saved.numbers);
    scan_.mixed = mixed_streams(plan_.rule);
    scan_.hi_lo = lo_tiles(device_.saved.hi_lo, kept_);
    if (device_.backward.ready.bytes > 0) {
      ready_.made = space_.at<uint32_t>(device_.backward.ready);
      ready_.scan_blocks = static_cast<int32_t>(device_.reverse_blocks);
      ready_.scan_time = device_.reverse_time;
      clear(ready_.made, device_.chunks * plan_.HV, plan_.stream);
    }
    scan_.made = ready_.made;
  }
  void first_reverse() {
    make_scan_args();
    const Segments& s = device_.segments;
    scan_.uses_decay_cutoff = decay_cutoff_arg(plan_, device_, problem_);
    tables_ = upload_segments(plan_, s, device_.backward.segments, s.first_of, s.backward_parts(), space_);
    scan_.sequences = tables_.sequences;
    ScanReverseArgs parts = scan_;
    parts.d_states = parts.v = nullptr;
    parts.made = nullptr;
    parts.d_final_state = {};
    parts.d_initial_state = segment_states(plan_, joined(), plan_.V);
    parts.parts = tables_.parts;
    scan_reverse(parts, pipeline_.reverse, device_.k_tile, plan_.stream);
  }
  void join_reverse() {
    join_segments(
        join_args(plan_, tables_.first, joined(), kept_.at<float>(device_.saved.maps), scan_.d_final_state, true),
        plan_.stream);
    scan_.d_final_state = segment_states(plan_, joined(), plan_.V);
    scan_.final_index = tables_.ends_of;
  }
  void reverse() {
    if (pipeline_.reverse == ReverseScan::kRaw) {
      if (!device_.segments.backward) make_raw_args();
      return additive_scan(raw_, device_.k_tile, plan_.stream);
    }
    if (!device_.segments.backward) make_scan_args();
    if (device_.k256) {
      k256_at_ = k256_prepare_args(device_, kept_at_, space_);
      return k256_reverse(scan_, pipeline_.reverse, k256_tiles(k256_at_), plan_.stream);
    }
    scan_reverse(scan_, pipeline_.reverse, device_.k_tile, plan_.stream);
  }
  void tile_gradients() {
    GradientArgs args;
    args.problem = problem_;
    args.d_o = scan_.d_o;
    args.shape = scan_.shape;
    args.pairs = scan_.pairs;
    args.states = kept_.at<uint16_t>(device_.saved.states);
    args.d_states = scan_.d_states;
    args.w = kept_.at<uint16_t>(device_.saved.w);
    args.v = scan_.v;
    args.v_is_dz = scan_.keys != nullptr || scan_.numbers != nullptr;
    args.numbers = scan_.numbers;
    args.grads = heads_;
    args.form_parts = form_parts_;
    if (pipeline_.sums_heads) args.head_sums = space_.at<float>(device_.backward.head_sums);
    args.precond = share_;
    args.ready = ready_;
    gradients(args, pipeline_.gradients, device_.k_tile, device_.chunks, plan_.stream);
  }
  float* joined() const { return space_.at<float>(device_.backward.segments.states); }

  // ---- Keys of more than 128 channels, in two calls
  void k256_gradients_in_two_calls() {
    K256JoinArgs& join = k256_join_;
    join.problem = problem_;
    join.d_q = heads_.d.q, join.d_k = heads_.d.k;
    const bool norms =
        plan_.rule.q_norm != Norm::kRaw || plan_.rule.k_norm != Norm::kRaw || plan_.rule.gain_uses_key_norm();
    const int64_t count = plan_.tokens() * plan_.HV;
    float* numbers = space_.at<float>(device_.backward.k256_scalars);
    const auto next = [&](bool there) {
      float* const at = there ? numbers : nullptr;
      if (there) numbers += count;
      return at;
    };
    for (const bool second : {false, true}) {
      GradientArgs args;
      args.problem = problem_;
      args.d_o = scan_.d_o;
      args.shape = scan_.shape;
      args.pairs = k256_at_.pairs;
      args.states = kept_.at<uint16_t>(device_.saved.states);
      args.d_states = scan_.d_states;
      args.w = kept_.at<uint16_t>(device_.saved.w);
      args.v = scan_.v;
      args.v_is_dz = scan_.is_delta;
      args.grads.d = heads_.d;
      args.half = {k256_at_.numbers, k256_at_.norms, second, join.q, join.k};
      const TokenArgs& all = args.grads.d;
      const auto of_channels = [&](const TokenArg& a) {
        const Rule& rule = plan_.rule;
        return &a == &all.g            ? rule.decay == Decay::kChannel
               : &a == &all.erase_gate ? channel_erase(rule)
                                       : &a == &all.write_gate && rule.write == Gate::kChannel;
      };
      for (int i = 0; i < K256JoinArgs::kNumbers; ++i) {
        TokenArg& to = args.grads.d.*kK256Scales[i];
        if (of_channels(to)) continue;
        float* const own = next(to.data != nullptr);
        join.numbers[i].to = to;
        join.numbers[i].parts[second ? 1 : 0] = own;
        if (own != nullptr) to = per_head(plan_, own, 1, false);
      }
      args.grads.dalpha_p = next(norms);
      args.grads.dbeta_p = next(norms);
      take_half(plan_.rule, args, second);
      k256_gradients(args, pipeline_.gradients, device_.chunks, plan_.stream);
      // the first half's go into the second's, whose own are left
      join.q = args.grads.dalpha_p, join.k = args.grads.dbeta_p;
    }
  }

  // ---- From the raw tensors
  void make_raw_args() {
    raw_.problem = problem_;
    raw_.problem.fused = {};  // they are values now
    raw_.sequences = problem_.sequences;
    raw_.reverse = true;
    raw_.d_o = token_arg(plan_, d_.o);
    raw_.from = state_arg(plan_, d_.final_state);
    raw_.to = state_arg(plan_, grads_.initial_state);
    raw_.states = space_.at<uint16_t>(device_.backward.d_states);
  }
  void first_raw_reverse() {
    make_raw_args();
    first_raw_pass(plan_, device_, raw_, tables_, space_);
  }
  void raw_gradients() {
    AdditiveGradientArgs args;
    args.problem = problem_;
    args.d_o = raw_.d_o;
    args.states = kept_.at<uint16_t>(device_.saved.states);
    args.d_states = raw_.states;
    args.grads = heads_;
    args.form_parts = form_parts_;
    // Where the host does not know how many chunks there are, nobody writes the shares of those that are not.
    if (form_parts_ != nullptr && problem_.sequences.bounded != 0)
      clear(reinterpret_cast<uint32_t*>(form_parts_), device_.chunks * plan_.HV * 2, plan_.stream);
    additive_gradients(args, device_.k_tile, device_.chunks, plan_.stream);
  }

  // ---- Token by token
  void token_backward() {
    TokenBackwardArgs args;
    args.problem = problem_;
    args.d_o = token_arg(plan_, d_.o);
    args.d_final_state = state_arg(plan_, d_.final_state);
    args.d_initial_state = state_arg(plan_, grads_.initial_state);
    args.grads = heads_;
    args.workspace = space_.at(device_.backward.token);
    cuda::token_backward(args, plan_.longest, plan_.stream);
  }

  void precond_backward() {
    const BackwardRegions& r = device_.backward;
    PrecondBackwardArgs args;
    args.problem = problem_;
    args.share = share_;
    args.boundaries = boundaries_;
    args.scratch = space_.at<float>(r.common.scratch);
    args.grads = heads_;
    args.d_final_precond = precond_arg(d_.final_precond);
    args.dk = token_arg(plan_, grads_.k);
    args.dprecond_g = token_arg(plan_, grads_.precond_g);
    args.dprecond_beta = token_arg(plan_, grads_.precond_beta);
    args.dcenter_parts = space_.at<float>(r.dcenter);
    args.dcenter = grads_.precond_center;
    args.dcenter_stride = grads_.center_stride;
    args.d_initial_precond = precond_arg(grads_.initial_precond);
    cuda::precond_backward(args, device_.chunks, plan_.stream);
  }

  const Plan& plan_;
  const DevicePlan& device_;
  const Outputs<float>& d_;
  const Inputs<float>& grads_;
  const void* kept_at_;
  Space kept_, space_;  // what forward left, and the workspace
  float* form_parts_;
  bool made_ = false;  // forward has left the boundaries
  float* boundaries_ = nullptr;
  Problem problem_;
  std::optional<GroupedGradients> grouped_;
  HeadGradients heads_;
  Pipeline pipeline_;
  PrecondShare share_;
  ScanReverseArgs scan_;
  TilesReady ready_;
  K256PrepareArgs k256_at_;
  K256JoinArgs k256_join_;
  AdditiveScanArgs raw_;
  SegmentTables tables_{};
};

}  // namespace

void scan_backward(const Plan& plan, const DevicePlan& device, const Inputs<float>& in, const CallForms& forms,
                   const Outputs<float>& d, const Inputs<float>& grads, const void* saved, void* workspace) {
  require_device(device.chunk_form);
  const void* kept = saved;
  if (kept == nullptr && device.saved.bytes > 0) {
    kept = workspace;
    workspace = static_cast<char*>(workspace) + device.saved.bytes;
    scan_forward(plan, device, in, forms, {}, const_cast<void*>(kept), workspace);
  }
  BackwardRun(plan, device, in, forms, d, grads, kept, workspace).run();
}

}  // namespace fw::cuda
