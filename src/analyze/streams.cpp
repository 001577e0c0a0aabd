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

// out += factor * x (.) gate
template <class T>
void add_scaled(int64_t n, double factor, const T* x, const double* gate, double* out) {
  if (factor == 0) return;
  for (int64_t j = 0; j < n; ++j) out[j] += factor * static_cast<double>(x[j]) * (gate != nullptr ? gate[j] : 1.0);
}

// Of row i of [count, n].
double mean(const std::vector<double>& x, int64_t i, int64_t n) {
  double sum = 0;
  for (int64_t j = 0; j < n; ++j) sum += row(x, i, n)[j];
  return sum / static_cast<double>(n);
}

// k of one token and key head before its norm: a tensor, or what the decay takes away.
template <class T>
void load_key(const RecurrenceView<T>& view, int64_t t, int64_t h, std::vector<double>& k) {
  const T* x = (view.rule.uses_k() ? view.in.k : view.in.g).row(t) + h * view.key_dim;
  for (size_t j = 0; j < k.size(); ++j)
    k[j] = view.rule.uses_k() ? static_cast<double>(x[j]) : -std::expm1(static_cast<double>(x[j]));
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
void load_precond(const RecurrenceView<T>& view, int64_t begin, int64_t count, int64_t h, std::vector<double>& state,
                  PrecondStreams& out) {
  const int64_t K = view.key_dim;
  const double center = view.in.precond_center != nullptr ? static_cast<double>(view.in.precond_center[h]) : 0.0;
  const PrecondMap<double> map = precond_map(view.rule, std::log(view.rule.precond_x), center);
  resize(out.y, map.squashed, count * K);
  resize(out.m, true, count * K);
  resize(out.decay, true, count);
  resize(out.gain, true, count);
  for (int64_t i = 0; i < count; ++i) {
    const T* k = view.in.k.row(begin + i) + h * K;
    const double kn = k_factor(view.rule, square(k, K));
    const double decay = std::exp(static_cast<double>(view.in.precond_g.row(begin + i)[h]));
    const double gain = static_cast<double>(view.in.precond_beta.row(begin + i)[h]);
    out.decay[static_cast<size_t>(i)] = decay;
    out.gain[static_cast<size_t>(i)] = gain;
    double* m = row(out.m, i, K);
    for (int64_t j = 0; j < K; ++j) {
      double& a = state[static_cast<size_t>(j)];
      const double before = a;
      a = precond_state(decay, gain, kn * static_cast<double>(k[j]), a);
      if (map.squashed) row(out.y, i, K)[j] = PrecondElements<PlainMath<double>>::argument(map, a + map.eps);
      m[j] = PrecondElements<PlainMath<double>>::value(map, map.previous ? before : a);
    }
  }
}

namespace {

// What the coefficients of token i depend on. Gates that are one number a head enter here, channel gates only as means.
template <class T>
FrontScalars<double> front_scalars(const RecurrenceView<T>& view, int64_t t, const double* k, int64_t hv, int64_t i,
                                   const PrecondStreams* precond, const HeadStreams& out) {
  const Rule& rule = view.rule;
  const int64_t K = view.key_dim, h = hv / (view.v_heads / view.heads);
  FrontScalars<double> x;
  x.q2 = square(view.in.q.row(t) + h * K, K);
  x.k2 = square(k, K);
  if (rule.uses_erase_key()) x.p2 = square(view.in.erase_key.row(t) + h * K, K);
  for (int64_t j = 0; j < K; ++j) {
    const double m = precond != nullptr ? row(precond->m, i, K)[j] : 1.0;
    x.kmk += m * k[j] * k[j];
  }
  if (rule.feedback == Feedback::kFixed) x.lambda = rule.lambda;
  for_each_scalar(
      rule, [&](double& to, const Mat<T>& from) { to = static_cast<double>(from.row(t)[hv]); }, x, view.in);
  if (rule.uses_erase_gate() && rule.erase != Gate::kChannel) x.erase = mean(out.erase_gate, i, out.erase_gate_dim());
  if (rule.uses_write_gate() && rule.write != Gate::kChannel) x.write = mean(out.write_gate, i, out.write_gate_dim());
  if (precond != nullptr) {
    x.alpha_p = precond->decay[static_cast<size_t>(i)];
    x.beta_p = precond->gain[static_cast<size_t>(i)];
  }
  return x;
}

}  // namespace

template <class T>
void load_streams(const RecurrenceView<T>& view, int64_t begin, int64_t count, int64_t hv,
                  const PrecondStreams* precond, HeadStreams& out) {
  const Rule& rule = view.rule;
  const RecurrenceInputs<T>& in = view.in;
  const int64_t K = view.key_dim, V = view.value_dim, h = hv / (view.v_heads / view.heads);
  const double scale = view.scale > 0 ? view.scale : 1.0 / std::sqrt(static_cast<double>(K));
  out.count = count;
  out.K = K;
  out.V = V;
  for (std::vector<double>* x : {&out.k, &out.q, &out.r, &out.w}) resize(*x, true, count * K);
  for (std::vector<double>* x : {&out.z, &out.v}) resize(*x, true, count * V);
  resize(out.e, rule.is_delta(), count * K);
  resize(out.f, rule.is_delta() && rule.feedback != Feedback::kNone, count * K);
  resize(out.taken, rule.uses_erase_write(), count * K);
  resize(out.decay, rule.decay != Decay::kNone, count * K);
  resize(out.beta, rule.uses_beta(), count);
  resize(out.gain, rule.uses_gain(), count);
  resize(out.lambda, rule.uses_lambda(), count);
  const int64_t b_dim = rule.erase == Gate::kScalar ? 1 : K, c_dim = rule.write == Gate::kScalar ? 1 : V;
  resize(out.erase_gate, rule.uses_erase_gate(), count * b_dim);
  resize(out.write_gate, rule.uses_write_gate(), count * c_dim);
  out.erases_before_decay = rule.erases_before_decay();
  out.scalar_decay = rule.decay == Decay::kScalar || rule.decay == Decay::kConstant;

  std::vector<double> key(static_cast<size_t>(K));
  for (int64_t i = 0; i < count; ++i) {
    const int64_t t = begin + i;
    const size_t at = static_cast<size_t>(i);
    const T* q = in.q.row(t) + h * K;
    load_key(view, t, h, key);
    const double* k = key.data();
    const T* v = in.v.row(t) + hv * V;
    if (rule.uses_erase_gate())
      scaled(b_dim, 1.0, in.erase_gate.row(t) + (rule.erase == Gate::kScalar ? hv : h * K), nullptr,
             row(out.erase_gate, i, b_dim));
    if (rule.uses_write_gate())
      scaled(c_dim, 1.0, in.write_gate.row(t) + hv * c_dim, nullptr, row(out.write_gate, i, c_dim));
    load_decay(view, t, hv, h, row(out.decay, i, K));
    const FrontScalars<double> x = front_scalars(view, t, k, hv, i, precond, out);
    const FrontCoefs<double> c = front_coefs(rule, scale, x);
    const FrontFactors<double> factors = front_factors(rule, x);
    const double rho = factors.gain.rho;
    if (rule.uses_beta()) out.beta[at] = x.beta;
    if (rule.uses_lambda()) out.lambda[at] = x.lambda;
    if (rule.uses_gain()) out.gain[at] = factors.gain.s_rho / rho;

    const double* m = precond != nullptr ? row(precond->m, i, K) : nullptr;
    const double* m_r = rule.preconditions_read() ? m : nullptr;
    scaled(K, factors.kn, k, nullptr, row(out.k, i, K));
    scaled(K, c.r_q / scale, q, nullptr, row(out.q, i, K));
    scaled(K, c.r_q, q, m_r, row(out.r, i, K));
    add_scaled(K, c.r_k, k, m_r, row(out.r, i, K));
    scaled(K, c.w_k * rho, k, rule.preconditions_write() ? m : nullptr, row(out.w, i, K));
    scaled(V, c.z_v / rho, v, rule.write == Gate::kChannel ? row(out.write_gate, i, V) : nullptr, row(out.z, i, V));
    scaled(V, 1.0, v, nullptr, row(out.v, i, V));
    if (!rule.is_delta()) continue;
    const double* b = rule.erase == Gate::kChannel ? row(out.erase_gate, i, K) : nullptr;
    double* e = row(out.e, i, K);
    if (rule.uses_erase_write()) scaled(K, 1.0, in.erase_write.row(t) + h * K, nullptr, row(out.taken, i, K));
    scaled(K, c.e_k / rho, k, b, e);
    if (rule.uses_erase_key()) add_scaled(K, c.e_p / rho, in.erase_key.row(t) + h * K, b, e);
    if (out.f.empty()) continue;
    double* f = row(out.f, i, K);
    scaled(K, c.e_q / rho, q, b, f);
    for (int64_t j = 0; j < K; ++j) e[j] += f[j];
  }
}

template void load_precond<float>(const RecurrenceView<float>&, int64_t, int64_t, int64_t, std::vector<double>&,
                                  PrecondStreams&);
template void load_precond<double>(const RecurrenceView<double>&, int64_t, int64_t, int64_t, std::vector<double>&,
                                   PrecondStreams&);
template void load_streams<float>(const RecurrenceView<float>&, int64_t, int64_t, int64_t, const PrecondStreams*,
                                  HeadStreams&);
template void load_streams<double>(const RecurrenceView<double>&, int64_t, int64_t, int64_t, const PrecondStreams*,
                                   HeadStreams&);

}  // namespace fw
