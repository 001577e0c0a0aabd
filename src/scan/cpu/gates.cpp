#include "scan/cpu/gates.h"

#include <cmath>
#include <vector>

#include "base/threads.h"

namespace fw::cpu {
namespace {

// What a log-decay has besides its logits; nothing for other gates.
template <class T>
const DecayParameters<T>& parameters_of(const Inputs<T>& in, const GateSpec& spec) {
  static const DecayParameters<T> none;
  return !spec.decay ? none : spec.token == static_cast<size_t>(TokenIndex::g) ? in.decay : in.precond_decay;
}

// One number for each of a row, `absent` where there is none; and of a_log its exponential.
template <class T>
std::vector<T> row_of(const TokenTensor<T>& x, const HeadTensor<T>& parameter, T absent, bool exponential) {
  std::vector<T> row(static_cast<size_t>(padded(x.heads * x.dim)), absent);
  if (!parameter) return row;
  for (int64_t h = 0; h < x.heads; ++h) {
    for (int64_t j = 0; j < x.dim; ++j) {
      const T value = parameter.data[h * parameter.stride_h + j * parameter.stride_k];
      row[static_cast<size_t>(h * x.dim + j)] = exponential ? std::exp(value) : value;
    }
  }
  return row;
}

// Heads of a token of a caller's tensor.
template <class T>
int64_t offset_of(const Plan& plan, const TokenTensor<T>& x, int64_t token, int64_t head) {
  const int64_t b = plan.packed ? 0 : token / plan.T, t = plan.packed ? token : token % plan.T;
  return b * x.stride_b + t * x.stride_t + head * x.stride_h;
}
template <class T>
void load_row(const Plan& plan, const TokenTensor<T>& x, int64_t token, T* row) {
  for (int64_t h = 0; h < x.heads; ++h, row += x.dim) {
    const int64_t at = offset_of(plan, x, token, h);
    if (x.narrow()) {
      x.widen(at, x.dim, row);
    } else {
      std::copy_n(x.data + at, x.dim, row);
    }
  }
}
template <class T>
void store_row(const Plan& plan, const T* row, const TokenTensor<T>& x, int64_t token) {
  for (int64_t h = 0; h < x.heads; ++h, row += x.dim) {
    const int64_t at = offset_of(plan, x, token, h);
    if (x.narrow()) {
      x.round(at, x.dim, row);
    } else {
      std::copy_n(row, x.dim, x.data + at);
    }
  }
}

// sums: one for each number of a row of logits x; added over the channels where the parameter has one for a head.
template <class T>
void store_sums(const TokenTensor<T>& x, const std::vector<double>& sums, const HeadTensor<T>& to) {
  if (!to) return;
  for (int64_t h = 0; h < x.heads; ++h) {
    const double* const of_head = sums.data() + h * x.dim;
    if (to.stride_k == 0) {
      double all = 0;
      for (int64_t j = 0; j < x.dim; ++j) all += of_head[j];
      to.data[h * to.stride_h] = static_cast<T>(all);
      continue;
    }
    for (int64_t j = 0; j < x.dim; ++j) to.data[h * to.stride_h + j * to.stride_k] = static_cast<T>(of_head[j]);
  }
}

}  // namespace

template <class T>
GatePass<T>::GatePass(const Plan& plan, bool backward, Bump<T>& bump) : plan_(plan) {
  const auto gates = gate_specs(plan.rule, plan.gates);
  const auto tokens = token_specs(plan.rule);
  for (size_t i = 0; i < kGates; ++i) {
    Gate& gate = gates_[i];
    gate.spec = gates[i];
    if (!gate.spec.logits()) continue;
    const TokenSpec& token = tokens[gate.spec.token];
    // Of the most heads that it may have: the plan does not know the tensor.
    const int64_t most = (token.heads == TokenHeads::kKey ? plan.H : plan.HV) * token.channels(plan.K, plan.V);
    gate.values = bump.take(plan.tokens() * most);
    if (!backward) continue;
    gate.grads = bump.take(plan.tokens() * most);
    if (gate.spec.decay) gate.parts = bump.take(blocks() * 2 * padded(most));
  }
}

template <class T>
TokenTensor<T> GatePass<T>::rows_of(const TokenTensor<T>& like, T* data) const {
  TokenTensor<T> rows;
  rows.data = data;
  rows.heads = like.heads;
  rows.dim = rows.stride_h = like.dim;
  rows.stride_t = row(like);
  rows.stride_b = plan_.T * rows.stride_t;
  return rows;
}

template <class T>
template <class Body>
void GatePass<T>::for_blocks(Body&& body) const {
  parallel_for(blocks(),
               [&](int64_t block) { body(block, block * kBlock, std::min(plan_.tokens(), (block + 1) * kBlock)); });
}

template <class T>
Inputs<T> GatePass<T>::values(const Inputs<T>& in) const {
  Inputs<T> made = in;
  for (const Gate& gate : gates_) {
    const TokenTensor<T>& x = in.*kInputTokens<T>[gate.spec.token];
    if (!gate.spec.logits() || !x) continue;
    const TokenTensor<T> values = made.*kInputTokens<T>[gate.spec.token] = rows_of(x, gate.values);
    const DecayParameters<T>& parameters = parameters_of(in, gate.spec);
    const std::vector<T> bias = row_of(x, parameters.dt_bias, T(0), false),
                         rate = row_of(x, parameters.a_log, T(1), true);
    const GateLaw<T> law = gate_law<T>(gate.spec);
    for_blocks([&](int64_t, int64_t begin, int64_t end) {
      std::vector<T> logits(bias.size()), row_values(bias.size());
      for (int64_t token = begin; token < end; ++token) {
        load_row(plan_, x, token, logits.data());
        gate_kernels<T>().forward(law, row(x), logits.data(), bias.data(), rate.data(), row_values.data());
        std::copy_n(row_values.data(), row(x), values.data + token * row(x));
      }
    });
  }
  return made;
}

template <class T>
Inputs<T> GatePass<T>::open(const Inputs<T>& in, const Inputs<T>& grads) const {
  Inputs<T> opened = grads;
  for (const Gate& gate : gates_) {
    TokenTensor<T>& of = opened.*kInputTokens<T>[gate.spec.token];
    if (gate.spec.logits() && (of || parameters_of(grads, gate.spec)))
      of = rows_of(in.*kInputTokens<T>[gate.spec.token], gate.grads);
  }
  return opened;
}

template <class T>
void GatePass<T>::close(const Inputs<T>& in, const Inputs<T>& opened, const Inputs<T>& grads) const {
  for (const Gate& gate : gates_) {
    const TokenTensor<T>&x = in.*kInputTokens<T>[gate.spec.token], &dvalues = opened.*kInputTokens<T>[gate.spec.token];
    if (!gate.spec.logits() || !dvalues) continue;
    const TokenTensor<T>& dx = grads.*kInputTokens<T>[gate.spec.token];
    const DecayParameters<T>& parameters = parameters_of(in, gate.spec);
    const std::vector<T> bias = row_of(x, parameters.dt_bias, T(0), false),
                         rate = row_of(x, parameters.a_log, T(1), true);
    const GateLaw<T> law = gate_law<T>(gate.spec);
    const int64_t stride = padded(row(x));
    for_blocks([&](int64_t block, int64_t begin, int64_t end) {
      std::vector<T> logits(bias.size()), d(bias.size()), own_sums(gate.parts == nullptr ? 2 * bias.size() : 0);
      T* const sums = gate.parts == nullptr ? own_sums.data() : gate.parts + block * 2 * stride;
      std::fill_n(sums, 2 * stride, T(0));
      for (int64_t token = begin; token < end; ++token) {
        load_row(plan_, x, token, logits.data());
        std::copy_n(dvalues.data + token * row(x), row(x), d.data());
        gate_kernels<T>().backward(law, row(x), logits.data(), bias.data(), rate.data(), d.data(), d.data(), sums,
                                   sums + stride);
        if (dx) store_row(plan_, d.data(), dx, token);
      }
    });
    const DecayParameters<T>& to = parameters_of(grads, gate.spec);
    if (!to) continue;
    std::vector<double> all[2];
    for (int64_t part = 0; part < 2; ++part) {
      all[part].assign(static_cast<size_t>(row(x)), 0.0);
      for (int64_t block = 0; block < blocks(); ++block) {
        for (int64_t i = 0; i < row(x); ++i)
          all[part][static_cast<size_t>(i)] += static_cast<double>(gate.parts[(block * 2 + part) * stride + i]);
      }
    }
    store_sums(x, all[0], to.dt_bias);
    store_sums(x, all[1], to.a_log);
  }
}

template class GatePass<float>;
template class GatePass<double>;

}  // namespace fw::cpu
