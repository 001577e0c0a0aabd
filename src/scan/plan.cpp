#include "scan/plan.h"

#include <algorithm>
#include <cmath>
#include <string_view>

#include "base/error.h"
#include "base/threads.h"
#include "rule/enum_names.h"
#include "rule/reserved.h"
#include "scan/backend.h"
#include "scan/ring.h"

namespace fw {
namespace {

// Measured (docs/notes/2026-11-cpu.md): the chunk form's products want many rows, a channel decay pays for wide
// triangles, and from two tokens on products are faster than one token at a time.
constexpr int64_t kChunkScalar = 64;
constexpr int64_t kChunkChannel = 32;
constexpr int64_t kChunkToken = 16;
constexpr int64_t kTokenFormLimit = 1;
constexpr int64_t kMostKey = 4096;
constexpr int64_t kMostHeads = 1 << 16;

void check_positive(std::string_view name, int64_t value, int64_t most) {
  if (value < 1 || value > most) fail_usage("descriptor: {}: expected 1 to {}, got {}", name, most, value);
}

template <class Int>
std::vector<int64_t> copy_offsets(const void* data, int64_t count) {
  const Int* p = static_cast<const Int*>(data);
  return std::vector<int64_t>(p, p + count);
}

void read_offsets(const fw_desc& desc, Plan& plan) {
  if (desc.B != 1) fail_usage("descriptor: B: expected 1 with cu_seqlens, got {}", desc.B);
  check_positive("seqlens.num_sequences", desc.seqlens.num_sequences, int64_t{1} << 40);
  if (desc.seqlens.bits != 32 && desc.seqlens.bits != 64)
    fail_usage("descriptor: seqlens.bits: expected 32 or 64, got {}", desc.seqlens.bits);
  plan.packed = true;
  plan.N = desc.seqlens.num_sequences;
  if (desc.seqlens.memory == FW_SEQLENS_DEVICE) {
    if (desc.seqlens.max_seqlen < 0 || desc.seqlens.max_seqlen > desc.T)
      fail_usage("descriptor: seqlens.max_seqlen: expected 0 to T = {}, got {}", desc.T, desc.seqlens.max_seqlen);
    plan.device_offsets = desc.seqlens.cu_seqlens;
    plan.offsets_are_64 = desc.seqlens.bits == 64;
    return;
  }
  plan.offsets = desc.seqlens.bits == 32 ? copy_offsets<int32_t>(desc.seqlens.cu_seqlens, plan.N + 1)
                                         : copy_offsets<int64_t>(desc.seqlens.cu_seqlens, plan.N + 1);
  if (plan.offsets.front() != 0)
    fail_usage("descriptor: seqlens.cu_seqlens[0]: expected 0, got {}", plan.offsets.front());
  for (size_t i = 1; i < plan.offsets.size(); ++i) {
    if (plan.offsets[i] < plan.offsets[i - 1]) {
      fail_usage("descriptor: seqlens.cu_seqlens[{}]: expected at least {} (offsets do not decrease), got {}", i,
                 plan.offsets[i - 1], plan.offsets[i]);
    }
  }
  if (plan.offsets.back() != desc.T)
    fail_usage("descriptor: seqlens.cu_seqlens[{}]: expected T = {}, got {}", plan.N, desc.T, plan.offsets.back());
}

void check_slots(const fw_desc& desc, bool step) {
  constexpr int64_t kMost = int64_t{1} << 31;
  if (desc.state_pool.slots != nullptr) check_positive("state_pool.num_slots", desc.state_pool.num_slots, kMost);
  if (desc.state_pool.first_slot < 0)
    fail_usage("descriptor: state_pool.first_slot: expected 0 or more, got {}", desc.state_pool.first_slot);
  if (desc.state_pool.skipped != FW_SKIPPED_KEPT && desc.state_pool.skipped != FW_SKIPPED_ZERO) {
    fail_usage("descriptor: state_pool.skipped: expected FW_SKIPPED_KEPT or FW_SKIPPED_ZERO, got {}",
               enum_text<fw_skipped>(desc.state_pool.skipped));
  }
  if (desc.state_pool.final_slots != nullptr && (step || desc.state_pool.slots == nullptr))
    fail_usage("descriptor: state_pool.final_slots: expected NULL {}, got an address",
               step ? "in fw_step" : "without slots");
  if (desc.speculation.token_slots == nullptr) {
    if (desc.speculation.accepted != nullptr)
      fail_usage("descriptor: speculation.accepted: expected NULL without token_slots, got an address");
    return;
  }
  check_positive("speculation.columns", desc.speculation.columns, kMost);
  check_positive("speculation.num_slots", desc.speculation.num_slots, kMost);
  if (desc.speculation.accepted != nullptr && desc.state_pool.slots != nullptr)
    fail_usage(
        "descriptor: state_pool.slots: expected NULL with accepted, which says where sequences start, got an address");
}

constexpr int64_t kCheckpointTokens = 64;

// chunk: rows of the plan's chunks.
Checkpoints read_checkpoints(const fw_desc& desc, bool step, int64_t chunk) {
  constexpr int64_t kMost = (int64_t{1} << 31) - 1;
  Checkpoints c;
  if (desc.checkpoints.interval == 0) {
    if (desc.checkpoints.slots != nullptr)
      fail_usage("descriptor: checkpoints.slots: expected NULL without checkpoints.interval, got an address");
    return c;
  }
  if (step)
    fail_usage("descriptor: checkpoints.interval: expected 0 in fw_step (token_slots keep states there), got {}",
               desc.checkpoints.interval);
  if (desc.checkpoints.interval < 0 || desc.checkpoints.interval % kCheckpointTokens != 0 ||
      desc.checkpoints.interval % chunk != 0) {
    fail_usage("descriptor: checkpoints.interval: expected 0 or a multiple of {} tokens{}, got {}", kCheckpointTokens,
               kCheckpointTokens % chunk != 0 ? fmt::format(" and of the chunk {}", chunk) : "",
               desc.checkpoints.interval);
  }
  c.interval = desc.checkpoints.interval;
  c.count = desc.B * (desc.T / c.interval);
  if (desc.checkpoints.slots == nullptr) return c;
  check_positive("checkpoints.columns", desc.checkpoints.columns, kMost);
  check_positive("checkpoints.num_slots", desc.checkpoints.num_slots, kMost);
  c.slots = desc.checkpoints.slots;
  c.columns = desc.checkpoints.columns;
  c.count = desc.checkpoints.num_slots;
  return c;
}

// Of a plan that has all but its ring and sequences.
Ring read_ring(const fw_desc& desc, bool step, const Plan& plan) {
  Ring r;
  if (desc.ring.tokens == 0) {
    if (desc.ring.rows != 0 || desc.ring.positions != nullptr || desc.ring.previous != nullptr) {
      fail_usage(
          "descriptor: ring: expected rows 0, positions NULL and previous NULL without ring.tokens, got {} rows and {}",
          desc.ring.rows, desc.ring.positions != nullptr || desc.ring.previous != nullptr ? "an address" : "NULL");
    }
    return r;
  }
  check_positive("ring.tokens", desc.ring.tokens, kMostRingTokens);
  if (desc.ring.positions == nullptr)
    fail_usage("descriptor: ring.positions: expected [N] positions with ring.tokens {}, got NULL", desc.ring.tokens);
  if (plan.rule.uses_erase_write()) {
    fail_usage("descriptor: ring.tokens: expected 0 with erase_write=own, whose step writes along two vectors, got {}",
               desc.ring.tokens);
  }
  if (desc.ring.previous != nullptr && plan.rule.uses_precond()) {
    fail_usage(
        "descriptor: ring.previous: expected NULL with a preconditioner, whose state takes no token back, got an "
        "address");
  }
  if (step && desc.speculation.token_slots != nullptr) {
    fail_usage(
        "descriptor: speculation.token_slots: expected NULL with ring.tokens, where ring.previous takes tokens back, "
        "got an address");
  }
  r.tokens = desc.ring.tokens, r.rows = desc.ring.rows;
  r.positions = desc.ring.positions, r.previous = desc.ring.previous;
  r.decays = plan.rule.decay == Decay::kChannel ? plan.K : plan.rule.decay == Decay::kScalar ? 1 : 0;
  return r;
}

// step: of fw_step, which takes a few tokens; a forward call finds any number of tokens in the ring.
void check_ring(const Plan& plan, bool step) {
  if (!plan.ring) return;
  if (step && plan.longest > plan.ring.tokens) {
    fail_usage("descriptor: ring.tokens: expected at least {}, the tokens of the longest sequence{}, got {}",
               plan.longest, plan.device_offsets != nullptr ? " that max_seqlen allows" : "", plan.ring.tokens);
  }
  constexpr int64_t kMost = 4096;
  const int64_t least = step ? plan.ring_span_rows() : plan.ring.tokens;
  if (plan.ring.rows < least || plan.ring.rows > kMost) {
    fail_usage("descriptor: ring.rows: expected {} to {} with ring.tokens {} and {} tokens a sequence{}, got {}", least,
               kMost, plan.ring.tokens, plan.longest, plan.ring.keeps() ? ", some of which may be taken back" : "",
               plan.ring.rows);
  }
}

void check_columns(const Plan& plan) {
  const Checkpoints& c = plan.checkpoints;
  if (c.slots != nullptr && plan.longest / c.interval > c.columns) {
    fail_usage(
        "descriptor: checkpoints.columns: expected at least {}, the checkpoints of the longest sequence{}, got {}",
        plan.longest / c.interval, plan.device_offsets != nullptr ? " that max_seqlen allows" : "", c.columns);
  }
  if (plan.slots.tokens == nullptr || plan.longest <= plan.slots.columns) return;
  fail_usage("descriptor: speculation.columns: expected at least {}, the tokens of the longest sequence{}, got {}",
             plan.longest, plan.device_offsets != nullptr ? " that max_seqlen allows" : "", plan.slots.columns);
}

// Sizes of buffers are sums of a few dozen of these products, in bytes of int64_t.
void check_sizes(const Plan& plan) {
  const auto heads = static_cast<double>(plan.HV), key = static_cast<double>(padded(plan.K)),
             value = static_cast<double>(padded(plan.V));
  const double rows = static_cast<double>(plan.tokens()) * heads * (key + value);
  const double states =
      (static_cast<double>(plan.total_chunks()) + static_cast<double>(plan.N) + 1) * heads * key * value;
  const double triangles = static_cast<double>(plan.total_chunks()) * heads * static_cast<double>(plan.triangle_size());
  constexpr double kMost = 1e15;  // elements: a petabyte is more than any machine has, and a thousandth of what wraps
  const double all = rows + states + triangles;
  if (all <= kMost) return;
  fail_usage(
      "descriptor: expected B, T, HV, K and V whose tensors and states have at most {:g} elements in all, got {:.3g}, "
      "with {} tokens, HV {}, K {} and V {}",
      kMost, all, plan.tokens(), plan.HV, plan.K, plan.V);
}

}  // namespace

std::string ring_text(const Plan& plan) {
  if (!plan.ring) return {};
  return fmt::format("ring: fw_step folds {} tokens at once into the state, ring of {} rows of {} numbers{}\n",
                     plan.ring.tokens, plan.ring.rows, plan.ring_width(),
                     plan.ring.keeps() ? ", tokens may be taken back" : "");
}

int64_t Plan::ring_span_rows() const { return ring_rows(ring.tokens, ring.keeps(), longest); }

DecayKind Plan::decay_kind() const {
  switch (rule.decay) {
    case Decay::kNone:
      return DecayKind::kNone;
    case Decay::kConstant:
    case Decay::kScalar:
      return DecayKind::kScalar;
    case Decay::kChannel:
      return DecayKind::kChannel;
  }
  return DecayKind::kNone;
}

bool Plan::token_form(int64_t n) const {
  return form == FW_FORM_TOKEN || form == FW_FORM_DECODE || (form == FW_FORM_AUTO && length(n) <= kTokenFormLimit);
}

Plan make_plan(const fw_desc& desc, bool step) {
  check_reserved("descriptor: reserved", desc.reserved);
  for (const int64_t x : desc.seqlens.reserved) check_reserved("descriptor: seqlens.reserved", x);
  for (const int64_t x : desc.state_pool.reserved) check_reserved("descriptor: state_pool.reserved", x);
  for (const int64_t x : desc.speculation.reserved) check_reserved("descriptor: speculation.reserved", x);
  for (const int64_t x : desc.checkpoints.reserved) check_reserved("descriptor: checkpoints.reserved", x);
  for (const int64_t x : desc.ring.reserved) check_reserved("descriptor: ring.reserved", x);
  if (desc.dtype != FW_F32 && desc.dtype != FW_F64)
    fail_usage("descriptor: dtype: expected FW_F32 or FW_F64, got {}", enum_text<fw_dtype>(desc.dtype));
  const bool bf16 = desc.io_dtype == FW_BF16, f16 = desc.io_dtype == FW_F16;
  if (desc.io_dtype != 0 && desc.io_dtype != desc.dtype && !((bf16 || f16) && desc.dtype == FW_F32)) {
    fail_usage("descriptor: io_dtype: expected 0, the dtype {} or, with dtype FW_F32, FW_BF16 or FW_F16, got {}",
               enum_text<fw_dtype>(desc.dtype), enum_text<fw_dtype>(desc.io_dtype));
  }
  const bool bf16_operands = desc.operands == FW_BF16 && desc.dtype == FW_F32;
  if (desc.operands != 0 && desc.operands != desc.dtype && !bf16_operands) {
    fail_usage("descriptor: operands: expected 0, the dtype {} or, with dtype FW_F32, FW_BF16, got {}",
               enum_text<fw_dtype>(desc.dtype), enum_text<fw_dtype>(desc.operands));
  }
  if (desc.form < FW_FORM_AUTO || desc.form > FW_FORM_DECODE)
    fail_usage("descriptor: form: expected FW_FORM_AUTO, FW_FORM_TOKEN, FW_FORM_CHUNK or FW_FORM_DECODE, got {}",
               enum_text<fw_form>(desc.form));
  if (desc.state_layout != FW_STATE_K_FIRST && desc.state_layout != FW_STATE_V_FIRST) {
    fail_usage("descriptor: state_layout: expected FW_STATE_K_FIRST or FW_STATE_V_FIRST, got {}",
               enum_text<fw_state_layout>(desc.state_layout));
  }
  constexpr int64_t kMost = int64_t{1} << 31;
  if (desc.B < 0 || desc.B > kMost) fail_usage("descriptor: B: expected 0 to {}, got {}", kMost, desc.B);
  if (desc.T < 0 || desc.T > kMost) fail_usage("descriptor: T: expected 0 to {}, got {}", kMost, desc.T);
  check_positive("H", desc.H, kMostHeads);
  if (desc.HV % desc.H != 0) fail_usage("descriptor: HV: expected a multiple of H = {}, got {}", desc.H, desc.HV);
  check_positive("V", desc.V, 1 << 16);
  if (desc.chunk != 0) check_positive("chunk", desc.chunk, 1024);
  if (!std::isfinite(desc.scale))
    fail_usage("descriptor: scale: expected a finite number (0: K^-1/2), got {}", desc.scale);

  const Backend* backend = backend_of(desc.device);
  if (backend == nullptr)
    fail_usage("descriptor: device: expected FW_DEVICE_CPU or FW_DEVICE_CUDA, got {}",
               enum_text<fw_device>(desc.device));
  if (desc.dtype == FW_F64 && !backend->doubles)
    fail_usage("descriptor: dtype: expected FW_F32 on {}, got {}", backend->name, enum_text<fw_dtype>(desc.dtype));
  check_positive("K", desc.K, std::min(kMostKey, backend->most_key));
  check_positive("HV", desc.HV, std::min(kMostHeads, backend->most_heads));
  if (desc.segment < -1 || (desc.segment > 0 && (!backend->segments || desc.segment % backend->chunk != 0))) {
    fail_usage("descriptor: segment: expected 0{} on {}, got {}",
               backend->segments ? fmt::format(", -1 or a multiple of {}", backend->chunk) : " or -1", backend->name,
               desc.segment);
  }
  if (desc.device_number < -1)
    fail_usage("descriptor: device_number: expected -1 (the current one) or a number from 0 on, got {}",
               desc.device_number);
  if (desc.seqlens.memory != FW_SEQLENS_HOST &&
      (desc.seqlens.memory != FW_SEQLENS_DEVICE || !backend->device_seqlens)) {
    fail_usage("descriptor: seqlens.memory: expected FW_SEQLENS_HOST{} on {}, got {}",
               backend->device_seqlens ? " or FW_SEQLENS_DEVICE" : "", backend->name,
               enum_text<fw_seqlens_memory>(desc.seqlens.memory));
  }
  if (desc.seqlens.memory == FW_SEQLENS_DEVICE && desc.segment > 0)
    fail_usage("descriptor: segment: expected 0 or -1 with FW_SEQLENS_DEVICE, got {}", desc.segment);
  check_slots(desc, step);

  Plan plan;
  plan.backend = backend;
  plan.device_number = desc.device_number;
  plan.stream = desc.stream;
  plan.slots = {desc.state_pool.slots,
                desc.speculation.token_slots,
                desc.speculation.accepted,
                desc.state_pool.final_slots,
                desc.speculation.columns,
                desc.state_pool.first_slot,
                desc.state_pool.skipped == FW_SKIPPED_ZERO,
                step};
  plan.segment = desc.segment;
  plan.rule = from_c(desc.rule);
  plan.gates = from_c(desc.gates);
  validate(plan.gates, plan.rule);
  plan.dtype = static_cast<fw_dtype>(desc.dtype);
  plan.bf16_io = bf16;
  plan.f16_io = f16;
  plan.bf16_operands = bf16_operands;
  plan.form = static_cast<fw_form>(desc.form);
  plan.bits_of_steps = step || plan.form == FW_FORM_DECODE;
  plan.state_layout = static_cast<fw_state_layout>(desc.state_layout);
  plan.B = desc.B;
  plan.T = desc.T;
  plan.H = desc.H;
  plan.HV = desc.HV;
  if (const char* expected = backend->lacks(plan.rule, plan.H, plan.HV)) {
    fail_usage("rule: expected {} on {}, got '{}' with {} key and {} value heads; run it on the CPU", expected,
               backend->name, to_string(plan.rule), plan.H, plan.HV);
  }
  plan.K = desc.K;
  plan.V = desc.V;
  plan.scale = desc.scale != 0 ? desc.scale : 1.0 / std::sqrt(static_cast<double>(desc.K));
  const int64_t preferred = plan.form == FW_FORM_TOKEN                 ? kChunkToken
                            : plan.decay_kind() == DecayKind::kChannel ? kChunkChannel
                                                                       : kChunkScalar;
  if (backend->chunk != 0 && desc.chunk != 0 && desc.chunk != backend->chunk) {
    fail_usage("descriptor: chunk: expected 0 or {} on {}, got {}", backend->chunk, backend->name, desc.chunk);
  }
  plan.chunk = backend->chunk != 0 ? backend->chunk : desc.chunk != 0 ? desc.chunk : preferred;
  plan.checkpoints = read_checkpoints(desc, step, plan.chunk);
  plan.ring = read_ring(desc, step, plan);
  plan.threads = num_threads();
  if (desc.seqlens.cu_seqlens != nullptr) {
    read_offsets(desc, plan);
  } else {
    plan.N = desc.B;
  }
  plan.states = desc.state_pool.slots != nullptr       ? desc.state_pool.num_slots
                : desc.speculation.accepted != nullptr ? desc.speculation.num_slots
                                                       : plan.N;
  plan.final_states = desc.speculation.token_slots != nullptr ? desc.speculation.num_slots : plan.states;
  if (plan.tokens() > backend->most_tokens) {
    fail_usage("descriptor: T: expected at most {} tokens in all on {}, got {}", backend->most_tokens, backend->name,
               plan.tokens());
  }
  if (plan.device_offsets != nullptr) {
    // As many chunks as N sequences of T tokens in all have at most: each has one that is not whole, and each chunk a
    // token.
    plan.longest = plan.longest_token_form = desc.seqlens.max_seqlen > 0 ? desc.seqlens.max_seqlen : plan.T;
    plan.chunk_base = {std::min(plan.T, (plan.T + (plan.chunk - 1) * plan.N) / plan.chunk)};
    check_columns(plan);
    check_ring(plan, step);
    check_sizes(plan);
    return plan;
  }
  if (!plan.packed) {
    plan.longest = plan.N > 0 ? plan.T : 0;
    plan.longest_token_form = plan.N > 0 && plan.token_backward(0) ? plan.T : 0;
    check_columns(plan);
    check_ring(plan, step);
    check_sizes(plan);
    return plan;
  }
  plan.chunk_base.resize(static_cast<size_t>(plan.N) + 1);
  plan.chunk_base[0] = 0;
  for (int64_t n = 0; n < plan.N; ++n) {
    plan.chunk_base[static_cast<size_t>(n) + 1] = plan.chunk_base[static_cast<size_t>(n)] + plan.chunks(n);
    plan.longest = std::max(plan.longest, plan.length(n));
    if (plan.token_backward(n)) plan.longest_token_form = std::max(plan.longest_token_form, plan.length(n));
  }
  check_columns(plan);
  check_ring(plan, step);
  check_sizes(plan);
  return plan;
}

}  // namespace fw
