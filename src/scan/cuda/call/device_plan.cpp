#include "scan/cuda/device_plan.h"

#include <fmt/format.h>

#include <algorithm>

#include "base/error.h"
#include "rule/step_bound.h"
#include "rule/tokens.h"
#include "scan/cuda/kernels.h"
#include "scan/cuda/rule_traits.h"
#include "scan/cuda/tiles.h"

namespace fw::cuda {
namespace {

constexpr size_t kAlign = 1024;
constexpr int64_t kMostChunkKey = 128, kLargestTileK = kMaxTileK;

class Regions {
 public:
  Region take(int64_t bytes, bool needed = true) {
    if (!needed || bytes <= 0) return {};
    const Region region{used_, static_cast<size_t>(bytes)};
    used_ += (region.bytes + kAlign - 1) / kAlign * kAlign;
    return region;
  }
  size_t used() const { return used_; }

 private:
  size_t used_ = 0;
};

template <template <int> class ChunkTile>
int64_t tiles_bytes(int k_tile) {
  return static_cast<int64_t>(k_tile == 64    ? sizeof(ChunkTile<64>)
                              : k_tile == 128 ? sizeof(ChunkTile<128>)
                                              : sizeof(ChunkTile<kMaxTileK>));
}

constexpr int64_t kFloat = sizeof(float);

CommonRegions common_regions(const Plan& plan, const DevicePlan& device, bool backward, Regions& regions) {
  CommonRegions r;
  r.offsets = regions.take((plan.N + 1) * int64_t{sizeof(int32_t)}, plan.packed);
  r.chunk_base = regions.take((plan.N + 1) * int64_t{sizeof(int32_t)}, plan.packed);
  const bool precond = plan.rule.uses_precond();
  r.m = regions.take(plan.tokens() * plan.H * plan.K * kFloat, precond);
  r.boundaries = regions.take(device.chunks * plan.H * plan.K * kFloat, precond && !(backward && device.chunk_form));
  r.scratch = regions.take(device.chunks * plan.H * (backward ? 2 * plan.K + 2 : plan.K + 1) * kFloat, precond);
  return r;
}

// What a pass of a scan takes for a chunk, in microseconds (measured on an H200, docs/notes): the length of its chain
// of products or, where all SMs run one, what memory gives.
struct PassCost {
  double chain, memory;
  double of(int64_t blocks, int64_t chunks, int64_t sm_count) const {
    const double load = static_cast<double>(std::min(blocks, sm_count)) / static_cast<double>(sm_count);
    const int64_t rounds = (blocks + sm_count - 1) / sm_count;
    return static_cast<double>(rounds * chunks) * std::max(chain, memory * load);
  }
};
struct Costs {
  PassCost forward, forward_part, reverse, reverse_part;
  double join_step, two_kernels;  // a step of the join; what a cut costs besides
  // what an SM takes for a chunk and value head in gradients(); 0: these never begin alongside the scan
  double gradient_work_tile;
};
constexpr Costs kTileCosts{{0.9, 1.6}, {0.65, 1.3}, {0.86, 2.1}, {0.8, 1.7}, 5, 0, 13.2};
// From the raw tensors. Forward without what it saves: it is the same cut in both.
constexpr Costs kDirectCosts{{1.0, 1.1}, {0.5, 0.6}, {0.6, 1.1}, {0.5, 0.6}, 1, 10, 0};

// The reverse scan, and the gradients after or alongside it.
struct ReversePass {
  bool follow = false;  // the gradients: alongside it
  double scan = 0, all = 0;
};

// Blocks and chunks of a call, for the choice of segments and of how the gradients come after the reverse scan.
// Sequences of different lengths count as equal ones, all as long as the longest and with as many chunks in all. Blocks
// of short ones are soon over and leave their SMs to others.
struct SegmentShape {
  Costs costs;
  int64_t sm_count, chunks, tiles, blocks, map_blocks;
  SegmentShape(const Plan& plan, const DevicePlan& device)
      : costs(device.direct ? kDirectCosts : kTileCosts),
        sm_count(device.sm_count),
        chunks((plan.longest + kChunk - 1) / kChunk),
        tiles(plan.total_chunks() * plan.HV),
        blocks(as_long_as_the_longest(plan.V)),
        map_blocks(device.direct ? 0 : as_long_as_the_longest(plan.K)) {}
  int64_t as_long_as_the_longest(int64_t columns) const {
    return chunks > 0 ? (tiles * ((columns + kValueBlock - 1) / kValueBlock) + chunks - 1) / chunks : 0;
  }
  int64_t length(int64_t count) const { return (chunks + count - 1) / count; }
  double forward(int64_t count) const {
    if (count == 1) return costs.forward.of(blocks, chunks, sm_count);
    return costs.forward_part.of((count - 1) * blocks + (count - 2) * map_blocks, length(count), sm_count) +
           costs.join_step * static_cast<double>(count) + costs.two_kernels +
           costs.forward.of(count * blocks, length(count), sm_count);
  }
  // With the gradients.
  double reverse(int64_t count) const {
    if (count == 1) return reverse_pass(blocks, chunks).all;
    return costs.reverse_part.of((count - 1) * blocks, length(count), sm_count) +
           costs.join_step * static_cast<double>(count) + costs.two_kernels +
           reverse_pass(count * blocks, length(count)).all;
  }
  // The scan of sequences or segments of so many chunks. Alongside each other both take longer, for they wait for the
  // same memory; and the gradients' blocks look some work tiles ahead, so that their last ones begin when the scan is
  // over. Within kLittle microseconds the model does not tell: alongside.
  ReversePass reverse_pass(int64_t scan_blocks, int64_t length) const {
    constexpr double kScanSlower = 1.95, kGradientsSlower = 1.05, kTilesAhead = 4, kLittle = 10;
    // with 48 and more each slows the other by more than is gained
    constexpr int64_t kMostBlocks = 40, kLeastChunks = 4;
    const auto work_tiles = [&](int64_t of) {
      return std::max(1.0, static_cast<double>(tiles) / static_cast<double>(of));
    };
    const double scan = costs.reverse.of(scan_blocks, length, sm_count),
                 all = scan + costs.gradient_work_tile * work_tiles(sm_count);
    if (costs.gradient_work_tile == 0 || scan_blocks > kMostBlocks || chunks < kLeastChunks) return {false, scan, all};
    const int64_t free = sm_count - scan_blocks;
    const double work_tile = kGradientsSlower * costs.gradient_work_tile, alone = work_tile * work_tiles(free),
                 both = std::min(alone, kScanSlower * scan);
    const double slower = both + scan - both / kScanSlower;
    const double lo = std::max(work_tile * std::min(kTilesAhead, work_tiles(free)),
                               (alone - both) * static_cast<double>(free) / static_cast<double>(sm_count));
    if (slower + lo > all + kLittle) return {false, scan, all};
    return {true, slower, slower + lo};
  }
};
constexpr double kWorthIt = 0.95;

// Chunks of a segment by the shape of the call; 0: no cut.
int64_t best_segment(const Plan& plan, const DevicePlan& device) {
  constexpr int64_t kMostSegments = 16, kLeastChunks = 16;
  const SegmentShape shape(plan, device);
  int64_t best = 1;
  for (int64_t count = 2; count <= kMostSegments && shape.chunks / count >= kLeastChunks; ++count) {
    // Of chunk tiles one cut or another costs the same besides.
    if (shape.forward(count) < (best == 1 || device.direct ? kWorthIt : 1.0) * shape.forward(best)) best = count;
  }
  return best == 1 ? 0 : shape.length(best);
}

// Whether backward is cut as well: its passes move more.
bool cut_backward(const Plan& plan, const DevicePlan& device, int64_t segment) {
  const SegmentShape shape(plan, device);
  return plan.segment > 0 || shape.reverse((shape.chunks + segment - 1) / segment) < kWorthIt * shape.reverse(1);
}

Segments cut(const Plan& plan, int64_t chunks) {
  Segments s;
  if (chunks == 0) return s;
  s.chunks = chunks;
  s.first.push_back(0);
  bool any = false;
  for (int64_t n = 0; n < plan.N; ++n) {
    const int64_t count = std::max<int64_t>(1, (plan.chunks(n) + chunks - 1) / chunks);
    any = any || count > 1;
    for (int64_t i = 0; i < count; ++i) {
      s.offsets.push_back(static_cast<int32_t>(plan.first_token(n) + i * chunks * kChunk));
      s.chunk_base.push_back(static_cast<int32_t>(plan.first_chunk(n) + i * chunks));
      s.last_of.push_back(i + 1 == count ? static_cast<int32_t>(n) : -1);
      s.first_of.push_back(i == 0 ? static_cast<int32_t>(n) : -1);
      s.sequence_of.push_back(static_cast<int32_t>(n));
    }
    s.first.push_back(static_cast<int32_t>(s.last_of.size()));
  }
  if (!any) return {};
  s.offsets.push_back(static_cast<int32_t>(plan.tokens()));
  s.chunk_base.push_back(static_cast<int32_t>(plan.total_chunks()));
  return s;
}

bool uses_decay_cutoff(const Plan& plan) { return plan.rule.uses_g() && step_bound(plan.rule).shrinks_by_decay; }

SegmentRegions segment_regions(const Plan& plan, const DevicePlan& device, Regions& regions) {
  const Segments& s = device.segments;
  SegmentRegions r;
  if (!s) return r;
  r.tables = regions.take(static_cast<int64_t>(
      (s.offsets.size() + s.chunk_base.size() + s.first.size() + 3 * s.last_of.size()) * sizeof(int32_t)));
  r.states = regions.take(s.count() * plan.HV * plan.V * plan.K * kFloat);
  r.decays = regions.take(s.count() * plan.HV * kFloat, device.direct);
  return r;
}

// Whether forward as one kernel takes less time than prepare and scan. It has an SM for each sequence and value head,
// for each chunk and for two more while its pipeline fills.
bool fused_forward_pays(const Plan& plan, const DevicePlan& device) {
  constexpr double kChunkTime = 2.9, kPrepareTime = 1.6;  // microseconds of an SM (H200)
  constexpr int64_t kFirstChunks = 2;
  const SegmentShape shape(plan, device);
  if (shape.chunks == 0) return false;
  const int64_t heads = (shape.tiles + shape.chunks - 1) / shape.chunks,
                rounds = (heads + shape.sm_count - 1) / shape.sm_count;
  const double fused = kChunkTime * static_cast<double>(rounds * (shape.chunks + kFirstChunks)),
               apart = shape.forward(1) +
                       kPrepareTime * static_cast<double>(shape.tiles) / static_cast<double>(shape.sm_count);
  return fused < kWorthIt * apart;
}
bool takes_fused_forward(const Plan& plan, const DevicePlan& device) {
  constexpr int64_t kDim = 128;
  return fused_forward_rule(plan.rule) && plan.K == kDim && plan.V == kDim && plan.segment == 0 && !device.segments &&
         plan.checkpoints.interval == 0 && plan.form != FW_FORM_DECODE && device.arch >= Arch::kSm90 &&
         fused_forward_pays(plan, device);
}

// Whether and how the gradients begin alongside the reverse scan.
void plan_gradients(const Plan& plan, DevicePlan& device) {
  const SegmentShape shape(plan, device);
  const bool is_cut = device.segments.backward;
  device.reverse_blocks = is_cut ? device.segments.count() * plan.HV * device.value_blocks : shape.blocks;
  if (plan.device_offsets != nullptr) return;  // it waits for every tile that there may be
  const ReversePass pass = shape.reverse_pass(device.reverse_blocks, is_cut ? device.segments.chunks : shape.chunks);
  device.overlap_grad_with_scan = pass.follow;
  device.reverse_time = pass.scan;
}

// Rests of e and k are nothing where those are the raw keys and these bf16 values. (Where a call with bf16 tensors has
// float32 keys after all, they are rounded before anything is made of them.)
HiLoRegions hi_lo_regions(const Plan& plan, const DevicePlan& device, Regions& regions) {
  HiLoRegions r;
  if (!device.chunk_form || !uses_hi_lo(plan.rule)) return r;
  const int64_t tiles = device.chunks * plan.HV;
  r.chunk_tiles = regions.take(tiles * tiles_bytes<LoTiles>(device.k_tile));
  r.lo_parts = regions.take(tiles * kChunk * device.k_tile * 2, !(plan.bf16_io && keeps_raw_keys(plan.rule)));
  return r;
}

ForwardRegions forward_regions(const Plan& plan, const DevicePlan& device) {
  Regions regions;
  ForwardRegions r;
  r.common = common_regions(plan, device, false, regions);
  const int64_t tiles = device.chunks * plan.HV;
  const bool chunk_tiles = device.chunk_form && !device.direct && !device.k256;
  const bool keys = stores_k_hat(plan.rule);
  r.chunk_tiles = regions.take(
      tiles * (keys ? tiles_bytes<XMTiles>(device.k_tile) : tiles_bytes<FwdTiles>(device.k_tile)), chunk_tiles);
  r.hi_lo = hi_lo_regions(plan, device, regions);
  r.z = regions.take(tiles * device.value_blocks * kSw128Elements * 2, device.z_tile);
  r.segments = segment_regions(plan, device, regions);
  r.maps = regions.take(device.segments.count() * plan.HV * plan.K * plan.K * kFloat, !device.direct);
  r.saving_bytes = regions.used();
  r.streams = regions.take(tiles * tiles_bytes<QETiles>(device.k_tile), (chunk_tiles || device.k256) && keys);
  r.keys = regions.take(tiles * kChunk * device.k_tile * 2, device.k256 && keys);
  r.numbers = regions.take(tiles * int64_t{sizeof(RowScales)}, device.k256 && !keys);
  r.pairs = regions.take(tiles * int64_t{sizeof(IntraChunk)}, device.k256);
  r.bytes = regions.used();
  return r;
}

SavedRegions saved_regions(const Plan& plan, const DevicePlan& device) {
  SavedRegions r;
  if (!device.chunk_form) return r;
  Regions regions;
  const int64_t tiles = device.chunks * plan.HV;
  const bool chunk_tiles = !device.direct, keys = chunk_tiles && stores_k_hat(plan.rule);
  const bool rows = (device.k256 && !keys) || reverse_takes_rows(plan.rule);
  r.chunk_tiles =
      regions.take(tiles * (keys ? tiles_bytes<QETiles>(device.k_tile) : tiles_bytes<BwdTiles>(device.k_tile)),
                   chunk_tiles && !rows);
  r.keys = regions.take(tiles * kChunk * device.k_tile * 2, keys);
  r.numbers = regions.take(tiles * static_cast<int64_t>(device.k256 ? sizeof(RowScales) : sizeof(RowScalesBwd)),
                           chunk_tiles && rows);
  r.norms = regions.take(tiles * int64_t{sizeof(RowNorms)}, device.k256 && (keys || k256_sums(plan.rule)));
  r.hi_lo = hi_lo_regions(plan, device, regions);
  r.pairs = regions.take(tiles * int64_t{sizeof(IntraChunk)}, chunk_tiles);
  r.states = regions.take(tiles * device.value_blocks * kValueBlock * device.k_tile * 2);
  r.w = regions.take(tiles * device.value_blocks * kSw128Elements * 2, chunk_tiles);
  if (device.segments.backward && chunk_tiles)
    r.maps = regions.take(device.segments.count() * plan.HV * plan.K * plan.K * kFloat);
  r.boundaries = regions.take(device.chunks * plan.H * plan.K * kFloat, plan.rule.uses_precond());
  r.precond_rows =
      regions.take(plan.tokens() * plan.H * plan.K * 2, plan.rule.uses_precond() && plan.rule.decay == Decay::kChannel);
  r.bytes = regions.used();
  return r;
}

BackwardRegions backward_regions(const Plan& plan, const DevicePlan& device) {
  Regions regions;
  BackwardRegions r;
  r.common = common_regions(plan, device, true, regions);
  const Rule& rule = plan.rule;
  const bool precond = rule.uses_precond(), grouped = plan.group() > 1;
  const int64_t row = plan.tokens() * plan.HV * plan.K * kFloat, scalar = plan.tokens() * plan.HV * kFloat;
  r.q = regions.take(row, grouped);
  r.k = regions.take(row, grouped);
  r.erase_key = regions.take(row, grouped && rule.uses_erase_key());
  r.erase_gate = regions.take(row, grouped && rule.uses_erase_gate() && rule.erase != Gate::kScalar);
  r.g = regions.take(row, grouped && rule.decay == Decay::kChannel);
  // The chunk form's gradients read M of an element before they write dM of it, and nobody reads M after them; but with
  // a normaliser its gradient takes M of the whole row once more.
  const bool in_place = device.chunk_form && !grouped && !rule.uses_key_form();
  r.dm = precond && in_place ? r.common.m : regions.take(row, precond);
  const bool gated = precond && rule.normaliser == Normaliser::kGated;
  r.dalpha_p = regions.take(scalar, gated);
  r.dbeta_p = regions.take(scalar, gated);
  r.head_sums = regions.take(head_sums_bytes(device.k_tile, device.chunks * plan.H, device.sm_count),
                             grouped && device.chunk_form && !device.direct && !device.k256 && !precond);
  r.dcenter = regions.take(device.chunks * plan.H * kFloat, rule.uses_precond_center());
  const int64_t tiles = device.chunks * plan.HV;
  r.d_states = regions.take(tiles * device.value_blocks * kValueBlock * device.k_tile * 2, device.chunk_form);
  r.v = regions.take(tiles * device.value_blocks * kSw128Elements * 2, device.chunk_form && !device.direct);
  const auto specs = token_specs(rule);
  const int64_t numbers =
      std::count_if(specs.begin(), specs.end(), [](const TokenSpec& spec) { return spec.used && spec.one(); });
  r.k256_scalars = regions.take(2 * (numbers + 2) * scalar, device.k256);
  r.ready = regions.take(tiles * int64_t{sizeof(uint32_t)}, device.overlap_grad_with_scan);
  r.token = regions.take(token_backward_bytes(plan.N, static_cast<int32_t>(plan.HV), static_cast<int32_t>(plan.K),
                                              static_cast<int32_t>(plan.V), plan.longest, device.sm_count),
                         !device.chunk_form);
  if (device.segments.backward) r.segments = segment_regions(plan, device, regions);
  r.bytes = regions.used();
  return r;
}

}  // namespace

// The last segment leaves nothing to another one; the first starts from the initial state, which M carries on if there
// is one. Backward carries D through M of all but the first.
std::vector<int32_t> Segments::forward_parts(bool initial_state, bool save) const {
  std::vector<int32_t> parts;
  for (size_t i = 0; i < last_of.size(); ++i) {
    const bool is_first = first_of[i] >= 0, is_last = last_of[i] >= 0;
    const bool map = !(is_first && is_last) && (is_first ? initial_state : save || !is_last);
    parts.push_back((is_last ? 0 : 1) | (map ? 2 : 0));
  }
  return parts;
}

std::vector<int32_t> Segments::backward_parts() const {
  std::vector<int32_t> parts;
  for (const int32_t n : first_of) parts.push_back(n >= 0 ? 0 : 1);
  return parts;
}

namespace {

// The most blocks that a kernel of the plan has in a grid's first dimension: of the scans, with those of the segments'
// maps, or of the token form and the preconditioner's walk.
void check_grids(const Plan& plan, const DevicePlan& device) {
  constexpr int64_t kMost = (int64_t{1} << 31) - 1, kLeastRows = 8, kLanes = 32;
  const int64_t sequences = std::max(plan.N, device.segments.count());
  const int64_t of_scan = device.chunk_form ? device.value_blocks + 2 : 1;
  const int64_t blocks = std::max({sequences * plan.HV * of_scan, plan.N * plan.HV * ((plan.K + kLanes - 1) / kLanes),
                                   2 * plan.N * (plan.V / kLeastRows + 1)});
  if (blocks > kMost) {
    fail_usage(
        "descriptor: sequences: expected so many that a CUDA grid has at most {} blocks, got {} of {} value heads, "
        "which want {}; pass fewer in a call",
        kMost, plan.N, plan.HV, blocks);
  }
}

// What blocks have in shared memory at most. token/ring: of each token its tensors and products, of each row of the
// ring keys, decays, values and coefficients, and 32 KiB of the state. Its fold in front of a forward call: keys and
// decays of the ring.
void check_ring(const Plan& plan, Arch arch) {
  if (!plan.ring) return;
  const int64_t kMost = arch >= Arch::kSm90 ? kSm90SharedBytes : kSm80SharedBytes, kState = 33 * 1024, kTokenRows = 9,
                kValues = 128;
  const int64_t channels = plan.K <= 64 ? 64 : plan.K <= 128 ? 128 : 256, rows = plan.ring_span_rows();
  const int64_t token = kTokenRows * channels + 3 * kValues + 2 * rows,
                row = (plan.decay_kind() == DecayKind::kChannel ? 2 : 1) * channels + kValues + 4;
  const bool step = plan.slots.skips;
  const int64_t bytes = step ? kState + kFloat * (plan.longest * token + rows * row + 2 * channels)
                             : kFloat * channels * (2 * plan.ring.tokens + 1);
  if (bytes <= kMost) return;
  fail_usage(
      "descriptor: ring.tokens: expected so few tokens that those of a ring with K {}{} have room in a block's {} "
      "bytes of shared memory on CUDA, got {}, for which {} are wanted",
      plan.K, step ? fmt::format(", and {} tokens a call,", plan.longest) : "", kMost, plan.ring.tokens, bytes);
}

}  // namespace

size_t DevicePlan::backward_alone_bytes() const { return saved.bytes + std::max(forward.saving_bytes, backward.bytes); }

namespace {
bool takes_k256(const Plan& plan) {
  return plan.K > kMostChunkKey && plan.K <= kLargestTileK && !plan.rule.general_erase() && k256_rule(plan.rule);
}
bool in_two_calls(const Plan& plan) {
  return plan.K > kMostChunkKey && plan.K <= 2 * kMostChunkKey && !plan.rule.general_erase() && split_rule(plan.rule);
}
bool can_take_chunks(const Plan& plan) {
  return plan.bf16_operands && (plan.K <= kMostChunkKey || takes_k256(plan) || in_two_calls(plan));
}
// Of GPUs older than Hopper, or newer (sm80/).
bool sm80_takes_chunks(const Plan& plan) {
  return can_take_chunks(plan) && (plan.K <= kMostChunkKey || plan.rule.decay != Decay::kChannel || in_two_calls(plan));
}
}  // namespace
bool can_take_chunks(const Plan& plan, Arch arch) {
  return arch >= Arch::kSm90 ? can_take_chunks(plan) : sm80_takes_chunks(plan);
}
bool takes_split_k(const Plan& plan) { return takes_chunks(plan) && in_two_calls(plan); }
bool takes_chunks(const Plan& plan) { return can_take_chunks(plan) && plan.form != FW_FORM_TOKEN; }

DevicePlan make_device_plan(const Plan& plan, int sm_count, Arch arch) {
  DevicePlan device;
  device.sm_count = sm_count;
  device.arch = arch;
  const bool can = can_take_chunks(plan, arch);
  if (plan.form == FW_FORM_CHUNK && !can && can_take_chunks(plan)) {
    fail_usage(
        "descriptor: form: expected FW_FORM_AUTO or FW_FORM_TOKEN, since this GPU is not of compute capability 9.0 and "
        "its chunk kernels take K at most {} of rules with a decay a channel and an erase, got FW_FORM_CHUNK with K {} "
        "and rule {}",
        kMostChunkKey, plan.K, to_string(plan.rule));
  }
  if (plan.form == FW_FORM_CHUNK && !can) {
    fail_usage(
        "descriptor: form: expected FW_FORM_AUTO or FW_FORM_TOKEN, since the chunk form on CUDA needs operands FW_BF16 "
        "and K at most {} ({} for the rules in "
        "docs/internals/gpu_kernels.md), got FW_FORM_CHUNK with operands {}, K {} and rule {}",
        kMostChunkKey, kLargestTileK, plan.bf16_operands ? "FW_BF16" : "FW_F32", plan.K, to_string(plan.rule));
  }
  device.chunk_form = takes_chunks(plan) && can;
  device.chunks = plan.total_chunks();
  if (takes_split_k(plan)) fail_internal("a device plan: expected one of the two calls of K {}", plan.K);
  if (device.chunk_form) {
    device.k256 = plan.K > kMostChunkKey;
    device.k_tile = plan.K <= 64 ? 64 : device.k256 ? kMaxTileK : 128;
    device.value_blocks = static_cast<int>((plan.V + kValueBlock - 1) / kValueBlock);
    device.z_tile = plan.rule.write == Gate::kChannel;
    device.direct = arch >= Arch::kSm90 && direct_rule(plan.rule) && !device.k256;
    if (plan.device_offsets == nullptr && !device.k256)
      device.segments =
          cut(plan, plan.segment == 0 ? best_segment(plan, device) : std::max<int64_t>(0, plan.segment / kChunk));
    device.cut = device.segments || plan.segment > 0;
    device.segments.backward = device.segments && cut_backward(plan, device, device.segments.chunks);
    device.fused_forward = takes_fused_forward(plan, device);
    device.uses_decay_cutoff = arch >= Arch::kSm90 && device.segments && !device.direct && uses_decay_cutoff(plan);
    if (arch >= Arch::kSm90 && !device.k256) plan_gradients(plan, device);
  }
  check_grids(plan, device);
  check_ring(plan, arch);
  device.forward = forward_regions(plan, device);
  device.saved = saved_regions(plan, device);
  device.backward = backward_regions(plan, device);
  return device;
}

}  // namespace fw::cuda
