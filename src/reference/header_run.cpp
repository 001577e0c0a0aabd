#include "reference/header_run.h"

#include <algorithm>
#include <cmath>
#include <string>

#include "base/error.h"
#include "reference/fields.h"
#include "reference/header_layout.h"

namespace fw {
namespace {

using namespace header;

// fw_forward with states at slots of a pool.
template <class T>
ReferenceOutputs run_pool(const ReferenceProblem& p, const HeaderRun& run) {
  const ReferenceShape& s = p.shape;
  const int64_t sequences = s.sequences.count();
  FieldPool states(p.in.initial_state, static_cast<size_t>(s.HV * s.K * s.V), sequences, run.state_in_place,
                   run.bf16_states);
  FieldPool preconds(p.in.initial_precond, static_cast<size_t>(s.H * s.K), sequences, run.state_in_place, false);
  if (p.rule.uses_precond() && preconds.starts != states.starts)
    fail_internal("header run: expected states and preconditioners of the same sequences");
  const DeviceNumbers starts(states.starts, run.device), ends(states.ends, run.device);
  ReferenceProblem rest = p;
  rest.in.initial_state.clear();
  rest.in.initial_precond.clear();
  Layout<T> layout(rest, run);
  fw_desc& desc = layout.options();
  desc.state_pool.slots = starts.data();
  desc.state_pool.num_slots = states.slots();
  desc.state_pool.final_slots = ends.data();
  fw_inputs in;
  fw_outputs out;
  fw_inputs_init(&in);
  fw_outputs_init(&out);
  layout.give(in, kInputTensors, reference_input_fields(), rest.in);
  layout.have_bf16_states(run.bf16_states);
  Tensor<T>& pool = layout.add("initial_state", {states.slots(), s.HV, s.K, s.V}, &states.values(), in.initial_state);
  out.final_state = in.initial_state;
  Tensor<T>* const precond_pool = p.rule.uses_precond() ? &layout.add("initial_precond", {preconds.slots(), s.H, s.K},
                                                                      &preconds.values(), in.initial_precond)
                                                        : nullptr;
  out.final_precond = in.initial_precond;
  Tensor<T>& o = layout.add("o", reference_output_fields()[0].shape(p.rule, s), nullptr, out.o);
  const fw_sizes sizes = layout.sizes();
  const GuardedBytes workspace(sizes.forward, run.device);
  Layout<T>::expect_ok(fw_forward(layout.desc(), &in, &out, nullptr, 0, workspace.data(), workspace.size()),
                       "fw_forward");
  workspace.check("workspace");
  layout.check();
  ReferenceOutputs result;
  result.o = layout.read("o", o);
  result.final_state = states.finals(layout.read("initial_state", pool));
  if (precond_pool != nullptr) result.final_precond = preconds.finals(layout.read("initial_precond", *precond_pool));
  return result;
}

template <class T>
ReferenceOutputs run_forward(const ReferenceProblem& p, const HeaderRun& run, Call call) {
  if (run.pool && call == Call::kForward) return run_pool<T>(p, run);
  Layout<T> layout(p, run);
  layout.have_bf16_states(run.bf16_states);
  fw_inputs in;
  fw_outputs out;
  fw_inputs_init(&in);
  fw_outputs_init(&out);
  layout.give(in, kInputTensors, reference_input_fields(), p.in);
  for (const auto& field : reference_output_fields()) {
    const std::vector<int64_t> shape = field.shape(p.rule, p.shape);
    if (shape.empty()) continue;
    const std::string name = field.name;
    const fw_tensor& initial = name == "final_state" ? in.initial_state : in.initial_precond;
    fw_tensor& tensor = tensor_of(out, kOutputTensors, field.name);
    if (run.state_in_place && name != "o" && initial.data != nullptr) {
      tensor = initial;
    } else {
      layout.add(field.name, shape, nullptr, tensor);
    }
  }
  const fw_sizes sizes = layout.sizes();
  const GuardedBytes workspace(run.forward_saves ? sizes.forward_saving : sizes.forward, run.device),
      saved(run.forward_saves ? sizes.saved : 0, run.device);
  if (call == Call::kForward) {
    void* const kept = run.forward_saves ? saved.data() : nullptr;
    Layout<T>::expect_ok(fw_forward(layout.desc(), &in, &out, kept, kept != nullptr ? saved.size() : 0,
                                    workspace.data(), workspace.size()),
                         "fw_forward");
    saved.check("saved");
  } else {
    Layout<T>::expect_ok(fw_step(layout.desc(), &in, &out, workspace.data(), workspace.size()), "fw_step");
  }
  workspace.check("workspace");
  layout.check();
  ReferenceOutputs result;
  for (const auto& field : reference_output_fields()) {
    const fw_tensor& tensor = tensor_of(out, kOutputTensors, field.name);
    if (tensor.data != nullptr) result.*field.values = layout.read(field.name, *layout.find(tensor));
  }
  return result;
}

// Where checkpoints go, in the order of sequences and tokens; -1: nowhere.
struct CheckpointRows {
  std::vector<int32_t> slots;  // [N, columns], without `pool` empty
  std::vector<int32_t> of;
  int64_t columns = 1, count = 0;  // of slots; of rows

  CheckpointRows(const SeqLayout& sequences, const fw_desc& desc, int64_t interval, bool pool)
      : count(desc.B * (desc.T / interval)) {
    for (int64_t n = 0; n < sequences.count(); ++n) columns = std::max(columns, sequences.length(n) / interval);
    int32_t next = 1;  // of the pool, whose slot 0 is nobody's
    for (int64_t n = 0; n < sequences.count(); ++n) {
      const int64_t own = sequences.length(n) / interval,
                    base = desc.seqlens.cu_seqlens != nullptr ? sequences.begin(n) / interval : n * (desc.T / interval);
      for (int64_t i = 0; i < own; ++i)
        of.push_back(!pool ? static_cast<int32_t>(base + i) : (n + i) % 3 == 2 ? -1 : next++);
    }
    if (!pool) return;
    count = next;
    for (int32_t& slot : of) slot = slot > 0 ? next - slot : slot;  // the last first
    size_t at = 0;
    for (int64_t n = 0; n < sequences.count(); ++n) {
      for (int64_t i = 0; i < columns; ++i) slots.push_back(i < sequences.length(n) / interval ? of[at++] : -7);
    }
  }
};

template <class T>
HeaderCheckpoints run_checkpoints(const ReferenceProblem& p, const HeaderRun& run, int64_t interval) {
  const ReferenceShape& s = p.shape;
  Layout<T> layout(p, run);
  layout.have_bf16_states(run.bf16_states);
  fw_desc& desc = layout.options();
  desc.checkpoints.interval = interval;
  const CheckpointRows rows(s.sequences, desc, interval, run.pool);
  const DeviceNumbers slots(rows.slots, run.device);
  if (run.pool) {
    desc.checkpoints.slots = slots.data();
    desc.checkpoints.columns = rows.columns;
    desc.checkpoints.num_slots = rows.count;
    if (run.device_seqlens) desc.seqlens.max_seqlen = std::min(desc.T, rows.columns * interval + interval - 1);
  }
  fw_inputs in;
  fw_outputs out;
  fw_inputs_init(&in);
  fw_outputs_init(&out);
  layout.give(in, kInputTensors, reference_input_fields(), p.in);
  for (const auto& field : reference_output_fields()) {
    const std::vector<int64_t> shape = field.shape(p.rule, s);
    if (!shape.empty()) layout.add(field.name, shape, nullptr, tensor_of(out, kOutputTensors, field.name));
  }
  const Tensor<T>& states = layout.add("checkpoints", {rows.count, s.HV, s.K, s.V}, nullptr, out.checkpoints);
  const Tensor<T>* const preconds = p.rule.uses_precond() ? &layout.add("precond_checkpoints", {rows.count, s.H, s.K},
                                                                        nullptr, out.precond_checkpoints)
                                                          : nullptr;
  const fw_sizes sizes = layout.sizes();
  const GuardedBytes workspace(run.forward_saves ? sizes.forward_saving : sizes.forward, run.device),
      saved(run.forward_saves ? sizes.saved : 0, run.device);
  void* const kept = run.forward_saves ? saved.data() : nullptr;
  Layout<T>::expect_ok(fw_forward(layout.desc(), &in, &out, kept, kept != nullptr ? saved.size() : 0, workspace.data(),
                                  workspace.size()),
                       "fw_forward");
  workspace.check("workspace");
  layout.check();
  HeaderCheckpoints result;
  for (const auto& field : reference_output_fields()) {
    const fw_tensor& tensor = tensor_of(out, kOutputTensors, field.name);
    if (tensor.data != nullptr) result.outputs.*field.values = layout.read(field.name, *layout.find(tensor));
  }
  std::vector<double> all = layout.read("checkpoints", states), all_preconds;
  if (preconds != nullptr) all_preconds = preconds->get();
  const auto take = [](std::vector<double>& from, int32_t row, int64_t size) {
    if (from.empty()) return std::vector<double>{};
    const auto at = from.begin() + row * size;
    std::vector<double> taken(at, at + size);
    std::fill(at, at + size, std::nan(""));
    return taken;
  };
  size_t at = 0;
  for (int64_t n = 0; n < s.sequences.count(); ++n) {
    for (int64_t tokens = interval; tokens <= s.sequences.length(n); tokens += interval) {
      const int32_t row = rows.of[at++];
      if (row >= 0)
        result.all.push_back({n, tokens, take(all, row, s.HV * s.K * s.V), take(all_preconds, row, s.H * s.K)});
    }
  }
  for (const std::vector<double>* rest : {&all, &all_preconds}) {
    if (std::any_of(rest->begin(), rest->end(), [](double x) { return !std::isnan(x); }))
      fail_internal("header run: a checkpoint that is nobody's was written");
  }
  return result;
}

template <class T>
ReferenceInputs run_backward(const ReferenceProblem& p, const HeaderRun& run) {
  Layout<T> layout(p, run);
  fw_inputs in, grads;
  fw_outputs out, d;
  fw_inputs_init(&in);
  fw_inputs_init(&grads);
  fw_outputs_init(&out);
  fw_outputs_init(&d);
  layout.have_bf16_states(run.bf16_states);
  layout.give(in, kInputTensors, reference_input_fields(), p.in);
  layout.have_bf16_states(false);  // of gradients none are
  layout.give(d, kOutputTensors, reference_output_fields(), p.d);
  const fw_sizes sizes = layout.sizes();
  const GuardedBytes forward_space(sizes.forward_saving, run.device), saved(sizes.saved, run.device);
  const GuardedBytes backward_space(run.saved ? sizes.backward : sizes.backward_alone, run.device);
  if (run.saved) {
    const bool moves = run.forward_padding >= 0;
    HeaderRun elsewhere = run;
    if (moves) elsewhere.row_padding = run.forward_padding;
    Layout<T> moved(p, elsewhere);
    Layout<T>& at = moves ? moved : layout;
    fw_inputs inputs = in;
    if (moves) {
      fw_inputs_init(&inputs);
      moved.have_bf16_states(run.bf16_states);
      moved.give(inputs, kInputTensors, reference_input_fields(), p.in);
    }
    at.add("o", reference_output_fields()[0].shape(p.rule, p.shape), nullptr, out.o);
    Layout<T>::expect_ok(
        fw_forward(at.desc(), &inputs, &out, saved.data(), saved.size(), forward_space.data(), forward_space.size()),
        "fw_forward");
    forward_space.check("forward workspace");
    saved.check("saved");
  }
  for (const auto& field : reference_input_fields()) {
    if (tensor_of(in, kInputTensors, field.name).data == nullptr) continue;
    layout.add(field.name, field.shape(p.rule, p.shape), nullptr, tensor_of(grads, kInputTensors, field.name));
  }
  Layout<T>::expect_ok(fw_backward(layout.desc(), &in, &d, &grads, run.saved ? saved.data() : nullptr,
                                   run.saved ? saved.size() : 0, backward_space.data(), backward_space.size()),
                       "fw_backward");
  backward_space.check("backward workspace");
  layout.check();
  ReferenceInputs result;
  for (const auto& field : reference_input_fields()) {
    const fw_tensor& tensor = tensor_of(grads, kInputTensors, field.name);
    if (tensor.data != nullptr) result.*field.values = layout.read(field.name, *layout.find(tensor));
  }
  return result;
}

// The states of all drafted tokens: slot 0 is nobody's, then `drafted` of each sequence.
struct StatePool {
  int64_t drafted = 0, slots = 0;
  std::vector<double> states, preconds;
  int64_t slot(int64_t n, int64_t t) const { return 1 + n * drafted + t; }
};

// One call of a speculation on the tokens of `part`. A sequence without any has no slot.
template <class T>
std::vector<double> run_speculation(const ReferenceProblem& part, const HeaderRun& run,
                                    const std::vector<int32_t>& accepted, StatePool& pool) {
  const ReferenceShape& s = part.shape;
  Layout<T> layout(part, run);
  std::vector<int32_t> slots;
  for (int64_t n = 0; n < s.sequences.count(); ++n) {
    for (int64_t t = 0; t < pool.drafted; ++t)
      slots.push_back(s.sequences.length(n) > 0 ? static_cast<int32_t>(pool.slot(n, t)) : 0);
  }
  const DeviceNumbers token_slots(slots, run.device), taken(accepted, run.device);
  fw_desc& desc = layout.options();
  desc.speculation.token_slots = token_slots.data();
  desc.speculation.columns = pool.drafted;
  desc.speculation.num_slots = pool.slots;
  desc.speculation.accepted = taken.data();
  desc.state_pool.first_slot = 1;
  desc.state_pool.skipped = FW_SKIPPED_ZERO;
  if (run.device_seqlens) desc.seqlens.max_seqlen = std::min(pool.drafted, desc.T);
  fw_inputs in;
  fw_outputs out;
  fw_inputs_init(&in);
  fw_outputs_init(&out);
  layout.give(in, kInputTensors, reference_input_fields(), part.in);
  Tensor<T>& states = layout.add("initial_state", {pool.slots, s.HV, s.K, s.V}, &pool.states, in.initial_state);
  out.final_state = in.initial_state;
  Tensor<T>* const preconds = part.rule.uses_precond() ? &layout.add("initial_precond", {pool.slots, s.H, s.K},
                                                                     &pool.preconds, in.initial_precond)
                                                       : nullptr;
  out.final_precond = in.initial_precond;
  Tensor<T>& o = layout.add("o", reference_output_fields()[0].shape(part.rule, s), nullptr, out.o);
  const fw_sizes sizes = layout.sizes();
  const GuardedBytes workspace(sizes.forward, run.device);
  Layout<T>::expect_ok(fw_step(layout.desc(), &in, &out, workspace.data(), workspace.size()), "fw_step");
  workspace.check("workspace");
  layout.check();
  pool.states = layout.read("initial_state", states);
  if (preconds != nullptr) pool.preconds = layout.read("initial_precond", *preconds);
  return layout.read("o", o);
}

// States and rings of sequences at every second slot of a pool, the last sequence first. What is nobody's is NaN.
struct RingPool {
  int64_t slots = 0, rows = 0, width = 0;
  std::vector<double> states, preconds, ring;
  std::vector<int32_t> positions, previous;
  size_t slot(int64_t n) const { return positions.size() * 2 - 1 - static_cast<size_t>(2 * n); }
};

// One call with a ring on the tokens of `part`.
template <class T>
std::vector<double> run_ring(const ReferenceProblem& part, const HeaderRun& run, const HeaderRing& ring, Call call,
                             RingPool& pool) {
  const ReferenceShape& s = part.shape;
  Layout<T> layout(part, run);
  layout.have_bf16_states(run.bf16_states);
  std::vector<int32_t> own;
  for (int64_t n = 0; n < s.sequences.count(); ++n) own.push_back(static_cast<int32_t>(pool.slot(n)));
  const DeviceNumbers slots(own, run.device), positions(pool.positions, run.device),
      previous(pool.previous, run.device);
  fw_desc& desc = layout.options();
  desc.state_pool.slots = slots.data();
  desc.state_pool.num_slots = pool.slots;
  desc.ring.tokens = ring.tokens;
  desc.ring.rows = pool.rows;
  desc.ring.positions = positions.data();
  if (ring.takes_back) desc.ring.previous = previous.data();
  if (run.device_seqlens) desc.seqlens.max_seqlen = std::min(ring.per_call, desc.T);
  fw_inputs in;
  fw_outputs out;
  fw_inputs_init(&in);
  fw_outputs_init(&out);
  layout.give(in, kInputTensors, reference_input_fields(), part.in);
  Tensor<T>& states = layout.add("initial_state", {pool.slots, s.HV, s.K, s.V}, &pool.states, in.initial_state);
  out.final_state = in.initial_state;
  Tensor<T>* const preconds = part.rule.uses_precond() ? &layout.add("initial_precond", {pool.slots, s.H, s.K},
                                                                     &pool.preconds, in.initial_precond)
                                                       : nullptr;
  out.final_precond = in.initial_precond;
  Tensor<T>& rings = layout.add("ring", {pool.slots, s.HV, pool.rows, pool.width}, &pool.ring, out.ring);
  Tensor<T>& o = layout.add("o", reference_output_fields()[0].shape(part.rule, s), nullptr, out.o);
  const fw_sizes sizes = layout.sizes();
  const GuardedBytes workspace(sizes.forward, run.device);
  if (call == Call::kStep) {
    Layout<T>::expect_ok(fw_step(layout.desc(), &in, &out, workspace.data(), workspace.size()), "fw_step");
  } else {
    Layout<T>::expect_ok(fw_forward(layout.desc(), &in, &out, nullptr, 0, workspace.data(), workspace.size()),
                         "fw_forward");
  }
  workspace.check("workspace");
  layout.check();
  pool.states = layout.read("initial_state", states);
  if (preconds != nullptr) pool.preconds = layout.read("initial_precond", *preconds);
  pool.ring = layout.read("ring", rings);
  return layout.read("o", o);
}

ReferenceOutputs forward_in(const ReferenceProblem& p, const HeaderRun& run, Call call) {
  return run.dtype == FW_F32 ? run_forward<float>(p, run, call) : run_forward<double>(p, run, call);
}

}  // namespace

ReferenceOutputs header_forward(const ReferenceProblem& p, const HeaderRun& run) {
  return forward_in(p, run, Call::kForward);
}

ReferenceInputs header_backward(const ReferenceProblem& p, const HeaderRun& run) {
  return run.dtype == FW_F32 ? run_backward<float>(p, run) : run_backward<double>(p, run);
}

HeaderCheckpoints header_checkpoints(const ReferenceProblem& p, const HeaderRun& run, int64_t interval) {
  return run.dtype == FW_F32 ? run_checkpoints<float>(p, run, interval) : run_checkpoints<double>(p, run, interval);
}

ReferenceOutputs header_speculation(const ReferenceProblem& p, const HeaderRun& run, int64_t drafted) {
  if (drafted < 1) fail_usage("header run: drafted: expected at least 1, got {}", drafted);
  const ReferenceShape& s = p.shape;
  const size_t count = static_cast<size_t>(s.sequences.count()), state = static_cast<size_t>(s.HV * s.K * s.V),
               precond = static_cast<size_t>(s.H * s.K);
  StatePool pool;
  pool.drafted = drafted;
  pool.slots = 1 + s.sequences.count() * drafted;
  pool.states.assign(static_cast<size_t>(pool.slots) * state, std::nan(""));
  if (p.rule.uses_precond()) pool.preconds.assign(static_cast<size_t>(pool.slots) * precond, std::nan(""));
  const auto copy = [](const std::vector<double>& from, size_t a, std::vector<double>& to, size_t b, size_t size) {
    if (to.empty()) return;
    if (from.empty()) {
      std::fill_n(to.begin() + static_cast<std::ptrdiff_t>(b * size), size, 0.0);
    } else {
      std::copy_n(from.begin() + static_cast<std::ptrdiff_t>(a * size), size,
                  to.begin() + static_cast<std::ptrdiff_t>(b * size));
    }
  };
  for (size_t n = 0; n < count; ++n) {  // before the first token: column 0
    const size_t slot = static_cast<size_t>(pool.slot(static_cast<int64_t>(n), 0));
    copy(p.in.initial_state, n, pool.states, slot, state);
    copy(p.in.initial_precond, n, pool.preconds, slot, precond);
  }
  ReferenceProblem all = p;
  all.in.initial_state.clear();
  all.in.initial_precond.clear();
  ReferenceOutputs result;
  for (const auto& field : reference_output_fields())
    (result.*field.values).assign(static_cast<size_t>(field.count(p.rule, s)), 0.0);
  std::vector<int32_t> accepted(count, 0);
  std::vector<int64_t> done(count, 0);
  for (int32_t call = 0;; ++call) {
    const ReferenceProblem part = slice_tokens(all, done, drafted);
    const SeqLayout& rows = part.shape.sequences;
    if (rows.tokens() == 0) break;
    const std::vector<double> o = run.dtype == FW_F32 ? run_speculation<float>(part, run, accepted, pool)
                                                      : run_speculation<double>(part, run, accepted, pool);
    for (size_t i = 0; i < count; ++i) {
      const int64_t n = static_cast<int64_t>(i), row = s.HV * s.V;
      if (rows.length(n) == 0) continue;
      accepted[i] = 1 + static_cast<int32_t>((call + n) % rows.length(n));
      std::copy_n(o.begin() + rows.begin(n) * row, accepted[i] * row,
                  result.o.begin() + (s.sequences.begin(n) + done[i]) * row);
      done[i] += accepted[i];
    }
  }
  for (size_t n = 0; n < count; ++n) {
    const size_t slot = static_cast<size_t>(pool.slot(static_cast<int64_t>(n), std::max(accepted[n], 1) - 1));
    copy(pool.states, slot, result.final_state, n, state);
    copy(pool.preconds, slot, result.final_precond, n, precond);
  }
  return result;
}

ReferenceOutputs header_ring(const ReferenceProblem& p, const HeaderRun& run, const HeaderRing& ring) {
  const ReferenceShape& s = p.shape;
  const int64_t N = s.sequences.count();
  const size_t count = static_cast<size_t>(N), state = static_cast<size_t>(s.HV * s.K * s.V),
               precond = static_cast<size_t>(s.H * s.K);
  RingPool pool;
  pool.slots = 2 * N + 1;
  pool.rows = ring.tokens - 1 + (ring.takes_back ? 2 : 1) * ring.per_call + ring.spare_rows;
  pool.width = s.K + s.V + (p.rule.decay == Decay::kChannel ? s.K : p.rule.decay == Decay::kScalar ? 1 : 0);
  pool.positions.assign(count, 0);
  pool.previous.assign(count, 0);
  const size_t slots = static_cast<size_t>(pool.slots), ring_size = static_cast<size_t>(s.HV * pool.rows * pool.width);
  pool.ring.assign(slots * ring_size, std::nan(""));
  const auto fill = [&](const std::vector<double>& from, size_t size) {
    std::vector<double> all(slots * size, std::nan(""));
    for (size_t n = 0; n < count; ++n) {
      const auto to = all.begin() + static_cast<std::ptrdiff_t>(pool.slot(static_cast<int64_t>(n)) * size);
      from.empty() ? std::fill_n(to, size, 0.0)
                   : std::copy_n(from.begin() + static_cast<std::ptrdiff_t>(n * size), size, to);
    }
    return all;
  };
  pool.states = fill(p.in.initial_state, state);
  if (p.rule.uses_precond()) pool.preconds = fill(p.in.initial_precond, precond);
  ReferenceProblem all = p;
  all.in.initial_state.clear();
  all.in.initial_precond.clear();
  ReferenceOutputs result;
  for (const auto& field : reference_output_fields())
    (result.*field.values).assign(static_cast<size_t>(field.count(p.rule, s)), 0.0);
  std::vector<int64_t> done(count, 0);
  for (int32_t call = 0;; ++call) {
    const bool forward = ring.forward_every > 0 && call % ring.forward_every == 0;
    const ReferenceProblem part = slice_tokens(all, done, ring.per_call);
    const SeqLayout& rows = part.shape.sequences;
    const Call kind = forward || rows.tokens() == 0 ? Call::kForward : Call::kStep;
    const std::vector<double> o = run.dtype == FW_F32 ? run_ring<float>(part, run, ring, kind, pool)
                                                      : run_ring<double>(part, run, ring, kind, pool);
    if (rows.tokens() == 0) break;
    for (size_t i = 0; i < count; ++i) {
      const int64_t n = static_cast<int64_t>(i), row = s.HV * s.V;
      const int64_t stay = ring.takes_back && kind == Call::kStep ? (call + n) % (rows.length(n) + 1) : rows.length(n);
      std::copy_n(o.begin() + rows.begin(n) * row, stay * row,
                  result.o.begin() + (s.sequences.begin(n) + done[i]) * row);
      done[i] += stay;
      pool.previous[i] = kind == Call::kForward ? 0 : pool.positions[i];
      pool.positions[i] = kind == Call::kForward ? 0 : pool.positions[i] + static_cast<int32_t>(stay);
    }
  }
  const auto take = [&](std::vector<double>& from, size_t size, std::vector<double>* to) {
    for (size_t n = 0; n < count; ++n) {
      const auto at = from.begin() + static_cast<std::ptrdiff_t>(pool.slot(static_cast<int64_t>(n)) * size);
      if (to != nullptr) std::copy_n(at, size, to->begin() + static_cast<std::ptrdiff_t>(n * size));
      std::fill_n(at, size, std::nan(""));
    }
    if (!std::all_of(from.begin(), from.end(), [](double x) { return std::isnan(x); }))
      fail_internal("header run: a slot that is nobody's was written");
  };
  take(pool.states, state, &result.final_state);
  if (p.rule.uses_precond()) take(pool.preconds, precond, &result.final_precond);
  take(pool.ring, ring_size, nullptr);
  return result;
}

ReferenceOutputs header_steps(const ReferenceProblem& p, const HeaderRun& run, int64_t tokens_per_call) {
  if (tokens_per_call < 1) fail_usage("header run: tokens_per_call: expected at least 1, got {}", tokens_per_call);
  const ReferenceShape& s = p.shape;
  int64_t longest = 0;
  for (int64_t n = 0; n < s.sequences.count(); ++n) longest = std::max(longest, s.sequences.length(n));

  ReferenceOutputs all;
  for (const auto& field : reference_output_fields())
    (all.*field.values).assign(static_cast<size_t>(field.count(p.rule, s)), 0.0);
  if (!p.in.initial_state.empty()) all.final_state = p.in.initial_state;
  if (!p.in.initial_precond.empty()) all.final_precond = p.in.initial_precond;
  HeaderRun step = run;
  step.state_in_place = true;
  for (int64_t begin = 0; begin < longest; begin += tokens_per_call) {
    ReferenceProblem part = slice_tokens(p, begin, begin + tokens_per_call);
    part.in.initial_state = all.final_state;
    part.in.initial_precond = all.final_precond;
    ReferenceOutputs out = forward_in(part, step, Call::kStep);
    all.final_state = std::move(out.final_state);
    all.final_precond = std::move(out.final_precond);
    const int64_t row = s.HV * s.V;
    for (int64_t n = 0; n < s.sequences.count(); ++n) {
      const int64_t from = part.shape.sequences.begin(n) * row, count = part.shape.sequences.length(n) * row;
      std::copy_n(out.o.begin() + from, count,
                  all.o.begin() + (s.sequences.begin(n) + std::min(begin, s.sequences.length(n))) * row);
    }
  }
  return all;
}

}  // namespace fw
