// Runs a reference problem through the kernels that go token by token and those of the preconditioner
// (scan/cuda/kernels.h), on a GPU or in the emulation, and returns doubles. Outputs and workspaces begin as NaN.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "base/bf16.h"
#include "cuda/device_buffer.h"
#include "cuda/selected.h"
#include "gpu/device.h"
#include "gpu/upload.h"
#include "reference/problem.h"
#include "rule/token_scalars.h"
#include "scan/cuda/kernels.h"

namespace fw::cuda::test {

struct TokenRun {
  bool bf16_inputs = false;   // the problem's numbers are bf16 values then
  bool bf16_outputs = false;  // o
  bool bf16_state = false;
  bool v_first = false;
  bool packed = false;  // although all sequences are equally long
  bool in_place = false;
  int64_t padding = 0;  // elements between tokens
  bool d_o = true, d_final = true;
  std::vector<int32_t> slots;  // empty: none
};

// Tensors on the device, kept until the run is over.
class TokenDevice {
 public:
  TokenDevice(const ReferenceProblem& p, const TokenRun& run) : p_(p), run_(run), s_(p.shape) {
    const SeqLayout& q = s_.sequences;
    bool equal = q.count() > 0;
    for (int64_t n = 0; n < q.count(); ++n) equal = equal && q.length(n) == q.length(0);
    packed_ = run.packed || !equal;
    x_.rule = p.rule;
    x_.scale = static_cast<float>(s_.scale != 0 ? s_.scale : 1 / std::sqrt(static_cast<double>(s_.K)));
    x_.B = packed_ ? 1 : static_cast<int32_t>(q.count());
    x_.T = static_cast<int32_t>(packed_ ? q.tokens() : q.length(0));
    x_.H = static_cast<int32_t>(s_.H);
    x_.HV = static_cast<int32_t>(s_.HV);
    x_.K = static_cast<int32_t>(s_.K);
    x_.V = static_cast<int32_t>(s_.V);
    x_.group = x_.HV / x_.H;
    x_.tokens = q.tokens();
    std::vector<int32_t> offsets = {0}, bases = {0};
    for (int64_t n = 0; n < q.count(); ++n) {
      offsets.push_back(static_cast<int32_t>(q.end(n)));
      bases.push_back(bases.back() + static_cast<int32_t>((q.length(n) + kChunk - 1) / kChunk));
      longest_ = std::max(longest_, q.length(n));
    }
    chunks_ = bases.back();
    x_.sequences.N = static_cast<int32_t>(q.count());
    x_.sequences.T = x_.T;
    if (packed_) {
      x_.sequences.offsets = table(offsets);
      x_.sequences.chunk_base = table(bases);
    } else {
      x_.sequences.chunks = static_cast<int32_t>(chunks_ / q.count());
    }
    const ReferenceInputs& in = p.in;
    TokenArgs& a = x_.in;
    a.q = input(in.q, s_.H, s_.K), a.k = input(in.k, s_.H, s_.K), a.v = input(in.v, s_.HV, s_.V);
    if (p.rule.decay == Decay::kChannel) a.g = input(in.g, g_heads(), s_.K);
    if (p.rule.decay == Decay::kScalar) a.g = input(in.g, s_.HV, 1);
    for_all_scalars([&](TokenArg& to, const std::vector<double>& values) { to = input(values, s_.HV, 1); }, a, in);
    a.erase_key = input(in.erase_key, s_.H, s_.K);
    a.erase_gate =
        p.rule.erase == Gate::kScalar ? input(in.erase_gate, s_.HV, 1) : input(in.erase_gate, erase_heads(), s_.K);
    a.write_gate = p.rule.write == Gate::kScalar ? input(in.write_gate, s_.HV, 1) : input(in.write_gate, s_.HV, s_.V);
    a.precond_g = input(in.precond_g, s_.H, 1), a.precond_beta = input(in.precond_beta, s_.H, 1);
    if (!in.precond_center.empty()) x_.precond_center = floats(in.precond_center)->data();
    if (!run.slots.empty()) slots_ = table(run.slots);
    slot_count_ = q.count();
    for (const int32_t slot : run.slots) slot_count_ = std::max<int64_t>(slot_count_, slot + 2);
  }

  ReferenceOutputs forward() {
    ReferenceOutputs out;
    x_.initial_state = state(p_.in.initial_state);
    StateArg final_state = run_.in_place && x_.initial_state.data != nullptr ? x_.initial_state : state({});
    if (!(run_.in_place && x_.initial_state.data != nullptr)) final_state = fresh_state();
    StateArg final_precond;
    if (p_.rule.uses_precond()) {
      x_.initial_precond = precond_state(p_.in.initial_precond);
      final_precond = run_.in_place && x_.initial_precond.data != nullptr ? x_.initial_precond : fresh_precond();
      if (!steps()) make_m(final_precond);
    }
    TokenForwardArgs args;
    if (steps()) args.final_precond = final_precond;
    args.problem = x_;
    args.o = output(s_.HV, s_.V, run_.bf16_outputs);
    args.final_state = final_state;
    args.slots = slot_arg();
    token_forward(args, selected(args), nullptr);
    out.o = read(args.o, s_.HV, s_.V);
    out.final_state = read_state(final_state);
    if (p_.rule.uses_precond()) out.final_precond = read_precond(final_precond);
    return out;
  }

  ReferenceInputs backward() {
    ReferenceInputs grad;
    const Rule& rule = p_.rule;
    x_.initial_state = state(p_.in.initial_state);
    if (rule.uses_precond()) {
      x_.initial_precond = precond_state(p_.in.initial_precond);
      make_m({});
    }
    TokenBackwardArgs args;
    args.problem = x_;
    if (run_.d_o) args.d_o = input(p_.d.o, s_.HV, s_.V);
    if (run_.d_final) args.d_final_state = state(p_.d.final_state);
    if (!p_.in.initial_state.empty()) args.d_initial_state = fresh_state();
    TokenArgs& d = args.grads.d;
    const auto head_output = [&](const std::vector<double>& like, int64_t dim) {
      return like.empty() ? TokenArg{} : output(s_.HV, dim, false, 0);
    };
    d.q = head_output(p_.in.q, s_.K), d.k = head_output(p_.in.k, s_.K), d.v = head_output(p_.in.v, s_.V);
    d.g = head_output(p_.in.g, rule.decay == Decay::kChannel ? s_.K : 1);
    for_all_scalars([&](TokenArg& to, const std::vector<double>& like) { to = head_output(like, 1); }, d, p_.in);
    d.erase_key = head_output(p_.in.erase_key, s_.K);
    d.erase_gate = head_output(p_.in.erase_gate, rule.erase == Gate::kScalar ? 1 : s_.K);
    d.write_gate = head_output(p_.in.write_gate, rule.write == Gate::kScalar ? 1 : s_.V);
    if (rule.uses_precond()) {
      args.grads.dm = floats(static_cast<size_t>(x_.tokens * s_.HV * s_.K))->data();
      if (rule.normaliser == Normaliser::kGated) {
        args.grads.dalpha_p = floats(static_cast<size_t>(x_.tokens * s_.HV))->data();
        args.grads.dbeta_p = floats(static_cast<size_t>(x_.tokens * s_.HV))->data();
      }
    }
    args.workspace =
        floats(static_cast<size_t>(token_backward_bytes(s_.sequences.count(), x_.HV, x_.K, x_.V, longest_, sm_count()) /
                                   4))
            ->data();
    token_backward(args, longest_, nullptr);

    const auto summed = [&](const TokenArg& from, int64_t heads, int64_t dim) {
      if (from.data == nullptr) return std::vector<double>{};
      if (heads == s_.HV) return read(from, heads, dim);
      const TokenArg to = output(heads, dim, false);
      sum_groups(x_, from, static_cast<int32_t>(dim), to, nullptr);
      return read(to, heads, dim);
    };
    grad.q = summed(d.q, s_.H, s_.K);
    grad.erase_key = summed(d.erase_key, s_.H, s_.K);
    grad.v = read(d.v, s_.HV, s_.V);
    grad.g = summed(d.g, rule.decay == Decay::kChannel ? g_heads() : s_.HV, rule.decay == Decay::kChannel ? s_.K : 1);
    grad.erase_gate = summed(d.erase_gate, rule.erase == Gate::kScalar ? s_.HV : erase_heads(),
                             rule.erase == Gate::kScalar ? 1 : s_.K);
    grad.write_gate = read(d.write_gate, s_.HV, rule.write == Gate::kScalar ? 1 : s_.V);
    for_all_scalars([&](std::vector<double>& to, const TokenArg& from) { to = read(from, s_.HV, 1); }, grad, d);
    if (args.d_initial_state.data != nullptr) grad.initial_state = read_state(args.d_initial_state);
    if (!rule.uses_precond()) {
      grad.k = summed(d.k, s_.H, s_.K);
      return grad;
    }
    PrecondBackwardArgs b;
    b.problem = x_;
    b.boundaries = boundaries_;
    b.scratch = floats(static_cast<size_t>(chunks_ * s_.H * (2 * s_.K + 2)))->data();
    b.grads = args.grads;
    if (run_.d_final) b.d_final_precond = precond_state(p_.d.final_precond);
    b.dk = output(s_.H, s_.K, false), b.dprecond_g = output(s_.H, 1, false), b.dprecond_beta = output(s_.H, 1, false);
    b.dk.divisor = b.dprecond_g.divisor = b.dprecond_beta.divisor = x_.group;
    b.dcenter_parts = floats(static_cast<size_t>(chunks_ * s_.H))->data();
    DeviceBuffer<float>* center = rule.uses_precond_center() ? floats(static_cast<size_t>(s_.H)) : nullptr;
    b.dcenter = center != nullptr ? center->data() : nullptr;
    if (!p_.in.initial_precond.empty()) b.d_initial_precond = fresh_precond();
    precond_backward(b, chunks_, nullptr);
    grad.k = read(b.dk, s_.H, s_.K);
    grad.precond_g = read(b.dprecond_g, s_.H, 1);
    grad.precond_beta = read(b.dprecond_beta, s_.H, 1);
    if (center != nullptr) {
      const std::vector<float> values = center->download();
      grad.precond_center.assign(values.begin(), values.end());
    }
    if (b.d_initial_precond.data != nullptr) grad.initial_precond = read_precond(b.d_initial_precond);
    return grad;
  }

 private:
  // One token a sequence: token_forward makes M itself.
  bool steps() const { return p_.rule.uses_precond() && !packed_ && x_.T == 1; }
  int64_t g_heads() const { return s_.g_heads == 0 ? s_.H : s_.g_heads; }
  int64_t erase_heads() const { return s_.erase_heads == 0 ? s_.H : s_.erase_heads; }

  DeviceBuffer<float>* floats(size_t count) {
    return floats_
        .emplace_back(
            std::make_unique<DeviceBuffer<float>>(std::vector<float>(count, std::numeric_limits<float>::quiet_NaN())))
        .get();
  }
  DeviceBuffer<float>* floats(const std::vector<double>& values) {
    return floats_.emplace_back(std::make_unique<DeviceBuffer<float>>(std::vector<float>(values.begin(), values.end())))
        .get();
  }
  DeviceBuffer<uint16_t>* bf16s(const std::vector<double>& values) {
    std::vector<uint16_t> bits(values.size());
    for (size_t i = 0; i < values.size(); ++i) bits[i] = bf16_bits_of(static_cast<float>(values[i]));
    return bf16s_.emplace_back(std::make_unique<DeviceBuffer<uint16_t>>(bits)).get();
  }
  const int32_t* table(const std::vector<int32_t>& values) {
    DeviceBuffer<int32_t>* buffer =
        ints_.emplace_back(std::make_unique<DeviceBuffer<int32_t>>(std::vector<int32_t>(values.size(), -7))).get();
    upload(values.data(), static_cast<int64_t>(values.size()), buffer->data(), nullptr);
    return buffer->data();
  }
  static uint16_t bf16_bits_of(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    return static_cast<uint16_t>(x != x ? 0x7fffu : (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
  }
  static double value_of(uint16_t bits) {
    const uint32_t wide = static_cast<uint32_t>(bits) << 16;
    float x;
    std::memcpy(&x, &wide, 4);
    return static_cast<double>(x);
  }

  TokenArg arg(int64_t heads, int64_t dim, bool bf16, int64_t padding) const {
    TokenArg a;
    a.bf16 = bf16 ? 1 : 0;
    a.stride_h = dim;
    a.stride_t = heads * dim + padding;
    a.stride_b = x_.T * a.stride_t;
    a.divisor = static_cast<int32_t>(s_.HV / heads);
    return a;
  }
  TokenArg input(const std::vector<double>& values, int64_t heads, int64_t dim) {
    if (values.empty() && (x_.tokens > 0 || heads * dim == 0)) return {};
    TokenArg a = arg(heads, dim, run_.bf16_inputs, run_.padding);
    std::vector<double> padded(static_cast<size_t>(x_.tokens * a.stride_t), std::nan(""));
    for (int64_t t = 0; t < x_.tokens; ++t)
      std::copy_n(values.begin() + t * heads * dim, heads * dim, padded.begin() + t * a.stride_t);
    a.data = run_.bf16_inputs ? static_cast<void*>(bf16s(padded)->data()) : floats(padded)->data();
    return a;
  }
  TokenArg output(int64_t heads, int64_t dim, bool bf16, int64_t padding = -1) {
    TokenArg a = arg(heads, dim, bf16, padding < 0 ? run_.padding : padding);
    const std::vector<double> nothing(static_cast<size_t>(x_.tokens * a.stride_t), std::nan(""));
    a.data = bf16 ? static_cast<void*>(bf16s(nothing)->data()) : floats(nothing)->data();
    return a;
  }
  template <class T>
  static std::vector<T> downloaded(std::vector<std::unique_ptr<DeviceBuffer<T>>>& list, const void* data) {
    for (const auto& buffer : list) {
      if (buffer->data() == data) return buffer->download();
    }
    return {};
  }
  std::vector<double> values_at(const void* data, bool bf16) {
    if (!bf16) {
      const std::vector<float> values = downloaded(floats_, data);
      return {values.begin(), values.end()};
    }
    std::vector<double> values;
    for (const uint16_t bits : downloaded(bf16s_, data)) values.push_back(value_of(bits));
    return values;
  }
  std::vector<double> read(const TokenArg& a, int64_t heads, int64_t dim) {
    std::vector<double> out;
    if (a.data == nullptr || x_.tokens == 0) return out;
    const std::vector<double> values = values_at(a.data, a.bf16 != 0);
    for (int64_t t = 0; t < x_.tokens; ++t)
      out.insert(out.end(), values.begin() + t * a.stride_t, values.begin() + t * a.stride_t + heads * dim);
    return out;
  }

  // As fw_step's: a sequence below slot 0 is skipped.
  SlotArg slot_arg() const {
    SlotArg slots;
    slots.own = slots_;
    slots.skips = slots_ != nullptr ? 1 : 0;
    return slots;
  }
  int64_t slot(int64_t n) const { return run_.slots.empty() ? n : run_.slots[static_cast<size_t>(n)]; }
  StateArg state_shape() const {
    StateArg a;
    a.bf16 = run_.bf16_state ? 1 : 0;
    a.stride_h = s_.K * s_.V;
    a.stride_n = a.stride_h * s_.HV;
    a.stride_k = run_.v_first ? 1 : s_.V;
    a.stride_v = run_.v_first ? s_.K : 1;
    return a;
  }
  StateArg state(const std::vector<double>& values) {
    if (values.empty()) return {};
    StateArg a = fresh_state(&values);
    return a;
  }
  StateArg fresh_state(const std::vector<double>* values = nullptr) {
    StateArg a = state_shape();
    std::vector<double> all(static_cast<size_t>(slot_count_ * a.stride_n), std::nan(""));
    for (int64_t i = 0; values != nullptr && i < static_cast<int64_t>(values->size()); ++i) {
      const int64_t v = i % s_.V, k = i / s_.V % s_.K, h = i / s_.V / s_.K % s_.HV, n = i / s_.V / s_.K / s_.HV;
      if (slot(n) >= 0)
        all[static_cast<size_t>(slot(n) * a.stride_n + h * a.stride_h + k * a.stride_k + v * a.stride_v)] =
            (*values)[static_cast<size_t>(i)];
    }
    a.data = run_.bf16_state ? static_cast<void*>(bf16s(all)->data()) : floats(all)->data();
    return a;
  }
  std::vector<double> read_state(const StateArg& a) {
    const std::vector<double> all = values_at(a.data, a.bf16 != 0);
    std::vector<double> values(static_cast<size_t>(s_.sequences.count() * s_.HV * s_.K * s_.V));
    for (int64_t i = 0; i < static_cast<int64_t>(values.size()); ++i) {
      const int64_t v = i % s_.V, k = i / s_.V % s_.K, h = i / s_.V / s_.K % s_.HV, n = i / s_.V / s_.K / s_.HV;
      if (slot(n) >= 0)
        values[static_cast<size_t>(i)] =
            all[static_cast<size_t>(slot(n) * a.stride_n + h * a.stride_h + k * a.stride_k + v * a.stride_v)];
    }
    return values;
  }
  StateArg precond_shape() const {
    StateArg a;
    a.stride_k = 1;
    a.stride_h = s_.K + 3;
    a.stride_n = a.stride_h * s_.H;
    return a;
  }
  StateArg precond_state(const std::vector<double>& values) {
    if (values.empty()) return {};
    return fresh_precond(&values);
  }
  StateArg fresh_precond(const std::vector<double>* values = nullptr) {
    StateArg a = precond_shape();
    std::vector<double> all(static_cast<size_t>(slot_count_ * a.stride_n), std::nan(""));
    for (int64_t i = 0; values != nullptr && i < static_cast<int64_t>(values->size()); ++i) {
      const int64_t n = i / s_.K / s_.H;
      if (slot(n) >= 0)
        all[static_cast<size_t>(slot(n) * a.stride_n + i / s_.K % s_.H * a.stride_h + i % s_.K)] =
            (*values)[static_cast<size_t>(i)];
    }
    a.data = floats(all)->data();
    return a;
  }
  std::vector<double> read_precond(const StateArg& a) {
    const std::vector<double> all = values_at(a.data, false);
    std::vector<double> values(static_cast<size_t>(s_.sequences.count() * s_.H * s_.K));
    for (int64_t i = 0; i < static_cast<int64_t>(values.size()); ++i) {
      const int64_t n = i / s_.K / s_.H;
      if (slot(n) >= 0)
        values[static_cast<size_t>(i)] =
            all[static_cast<size_t>(slot(n) * a.stride_n + i / s_.K % s_.H * a.stride_h + i % s_.K)];
    }
    return values;
  }
  void make_m(const StateArg& final_precond) {
    PrecondForwardArgs args;
    args.problem = x_;
    float* m = floats(static_cast<size_t>(x_.tokens * s_.H * s_.K))->data();
    args.m = m;
    boundaries_ = floats(static_cast<size_t>(chunks_ * s_.H * s_.K))->data();
    args.boundaries = boundaries_;
    args.scratch = floats(static_cast<size_t>(chunks_ * s_.H * (s_.K + 1)))->data();
    args.final_precond = final_precond;
    args.slots = slot_arg();
    precond_forward(args, chunks_, nullptr);
    x_.m = m;
  }

  const ReferenceProblem& p_;
  const TokenRun& run_;
  const ReferenceShape& s_;
  Problem x_;
  bool packed_ = false;
  int64_t chunks_ = 0, longest_ = 0, slot_count_ = 0;
  const int32_t* slots_ = nullptr;
  float* boundaries_ = nullptr;
  std::vector<std::unique_ptr<DeviceBuffer<float>>> floats_;
  std::vector<std::unique_ptr<DeviceBuffer<uint16_t>>> bf16s_;
  std::vector<std::unique_ptr<DeviceBuffer<int32_t>>> ints_;
};

}  // namespace fw::cuda::test
