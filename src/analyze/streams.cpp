#include "analyze/streams.h"

#include <cmath>

#include "rule/decay.h"
#include "rule/front.h"
#include "rule/precond.h"

namespace fw {
namespace {

template <class T>
double square(const T* x, int64_t n) {
  double sum = 0;
  for (int64_t i = 0; i < n; ++i) sum += static_cast<double>(x[i]) * static_cast<double>(x[i]);
  return sum;
}

void resize(std::vector<double>& x, bool used, int64_t n) { x.resize(used ? static_cast<size_t>(n) : 0); }

// Row i of [count, n], or null.
double* row(std::vector<double>& x, int64_t i, int64_t n) { return x.empty() ? nullptr : x.data() + i * n; }
const double* row(const std::vector<double>& x, int64_t i, int64_t n) { return x.empty() ? nullptr : x.data() + i * n; }

// out = factor * x (.) gate, gate null: 1.
template <class T>
void scaled(int64_t n, double factor, const T* x, const double* gate, double* out) {
  for (int64_t j = 0; j < n; ++j) out[j] = factor * static_cast<double>(x[j]) * (gate != nullptr ? gate[j] : 1.0);
}

template <class T>
void load_decay(const RecurrenceView<T>& view, int64_t t, int64_t hv, int64_t h, double* alpha) {
  const int64_t K = view.key_dim;
  const Mat<T>& g = view.in.g;
  switch (view.rule.decay) {
    case Decay::kNone:
      return;
    case Decay::kConstant:
      std::fill_n(alpha, K, constant_decay(hv));
      return;
    case Decay::kScalar:
      std::fill_n(alpha, K, std::exp(static_cast<double>(g.row(t)[hv])));
      return;
    case Decay::kChannel: {
      const T* own = g.row(t) + (g.cols == view.v_heads * K ? hv : h) * K;  // of every value head or of every key head
      for (int64_t j = 0; j < K; ++j) alpha[j] = std::exp(static_cast<double>(own[j]));
      return;
    }
  }
}

}  // namespace

template <class T>
void load_precond(const RecurrenceView<T>& view, int64_t begin, int64_t count, int64_t h, std::vector<double>& state, PrecondStreams& out) {
  const int64_t K = view.key_dim;
  out.y.resize(static_cast<size_t>(count * K));
  out.m.resize(static_cast<size_t>(count * K));
  out.decay.resize(static_cast<size_t>(count));
  out.gain.resize(static_cast<size_t>(count));
  const double center = static_cast<double>(view.in.precond_center[h]);
  for (int64_t i = 0; i < count; ++i) {
    const T* k = view.in.k.row(begin + i) + h * K;
    const double kn = k_factor(view.rule, square(k, K));
    const double decay = std::exp(static_cast<double>(view.in.precond_g.row(begin + i)[h]));
    const double gain = static_cast<double>(view.in.precond_beta.row(begin + i)[h]);
    out.decay[static_cast<size_t>(i)] = decay;
    out.gain[static_cast<size_t>(i)] = gain;
    for (int64_t j = 0; j < K; ++j) {
      double& a = state[static_cast<size_t>(j)];
      a = precond_state(decay, gain, kn * static_cast<double>(k[j]), a);
      const double y = precond_raw(view.rule, a, center);
      out.y[static_cast<size_t>(i * K + j)] = y;
      out.m[static_cast<size_t>(i * K + j)] = precond_squash(view.rule, y);
    }
  }
}

template <class T>
void load_streams(const RecurrenceView<T>& view, int64_t begin, int64_t count, int64_t hv, const PrecondStreams* precond, HeadStreams& out) {
  const Rule& rule = view.rule;
  const RecurrenceInputs<T>& in = view.in;
  const int64_t K = view.key_dim, V = view.value_dim, h = hv / (view.v_heads / view.heads);
  const double scale = 1.0 / std::sqrt(static_cast<double>(K));
  out.count = count;
  out.K = K;
  out.V = V;
  for (std::vector<double>* x : {&out.k, &out.r, &out.w}) resize(*x, true, count * K);
  for (std::vector<double>* x : {&out.z, &out.v}) resize(*x, true, count * V);
  resize(out.e, rule.online(), count * K);
  resize(out.f, rule.uses_lambda(), count * K);
  resize(out.decay, rule.decay != Decay::kNone, count * K);
  resize(out.beta, rule.uses_beta(), count);
  resize(out.gain, rule.uses_gain(), count);
  resize(out.lambda, rule.uses_lambda(), count);
  resize(out.erase_gate, rule.uses_erase_gate(), count * K);
  resize(out.write_gate, rule.uses_write_gate(), count * V);
  out.scalar_decay = rule.decay == Decay::kScalar || rule.decay == Decay::kConstant;

  for (int64_t i = 0; i < count; ++i) {
    const int64_t t = begin + i;
    const size_t at = static_cast<size_t>(i);
    const T* q = in.q.row(t) + h * K;
    const T* k = in.k.row(t) + h * K;
    const T* v = in.v.row(t) + hv * V;
    FrontScalars<double> x{square(q, K), square(k, K), 1.0, 0.0};
    if (rule.uses_beta()) out.beta[at] = x.beta = static_cast<double>(in.beta.row(t)[hv]);
    if (rule.uses_lambda()) out.lambda[at] = x.lambda = static_cast<double>(in.lambda.row(t)[hv]);
    const FrontCoefs<double> c = front_coefs(rule, scale, x);
    const double kn = k_factor(rule, x.k2);
    const GainPair<double> gain = gain_pair(rule, x.k2 * kn * kn, x.beta);
    if (rule.uses_gain()) out.gain[at] = gain.s_rho / gain.rho;
    if (rule.uses_erase_gate()) scaled(K, 1.0, in.erase.row(t) + h * K, nullptr, row(out.erase_gate, i, K));
    if (rule.uses_write_gate()) scaled(V, 1.0, in.write.row(t) + hv * V, nullptr, row(out.write_gate, i, V));
    load_decay(view, t, hv, h, row(out.decay, i, K));

    const double* m = precond != nullptr ? row(precond->m, i, K) : nullptr;
    scaled(K, kn, k, nullptr, row(out.k, i, K));
    scaled(K, c.r_q, q, rule.preconditions_read() ? m : nullptr, row(out.r, i, K));
    scaled(K, c.w_k * gain.rho, k, rule.preconditions_write() ? m : nullptr, row(out.w, i, K));
    scaled(V, c.z_v / gain.rho, v, row(out.write_gate, i, V), row(out.z, i, V));
    scaled(V, 1.0, v, nullptr, row(out.v, i, V));
    if (!rule.online()) continue;
    const double* b = row(out.erase_gate, i, K);
    double* e = row(out.e, i, K);
    scaled(K, c.e_k / gain.rho, k, b, e);
    if (!rule.uses_lambda()) continue;
    double* f = row(out.f, i, K);
    scaled(K, c.e_q / gain.rho, q, b, f);
    for (int64_t j = 0; j < K; ++j) e[j] += f[j];
  }
}

template void load_precond<float>(const RecurrenceView<float>&, int64_t, int64_t, int64_t, std::vector<double>&, PrecondStreams&);
template void load_precond<double>(const RecurrenceView<double>&, int64_t, int64_t, int64_t, std::vector<double>&, PrecondStreams&);
template void load_streams<float>(const RecurrenceView<float>&, int64_t, int64_t, int64_t, const PrecondStreams*, HeadStreams&);
template void load_streams<double>(const RecurrenceView<double>&, int64_t, int64_t, int64_t, const PrecondStreams*, HeadStreams&);

}  // namespace fw
