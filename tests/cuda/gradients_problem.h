// Random problems for the gradient kernel: raw inputs, the recurrence of recurrence.md one token at a time in double
// with its adjoint, and from the same numbers the tiles that the scans would leave. For gradients_test.cu and
// gradients_bench.cu.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "cuda/selected.h"
#include "rule/front.h"
#include "scan/cuda/kernels.h"

#ifndef FW_CUDA_EMULATION
#include <cuda_runtime.h>
#endif

namespace gradients_test {

using fw::cuda::TokenArg;

inline uint16_t to_bf16(double x) {
  const float f = static_cast<float>(x);
  uint32_t bits;
  std::memcpy(&bits, &f, 4);
  if (std::isnan(f)) return 0x7fc0;
  bits += 0x7fff + (bits >> 16 & 1);
  return static_cast<uint16_t>(bits >> 16);
}
inline double from_bf16(uint16_t x) {
  const uint32_t bits = static_cast<uint32_t>(x) << 16;
  float f;
  std::memcpy(&f, &bits, 4);
  return f;
}

#ifdef FW_CUDA_EMULATION
inline void* device_alloc(size_t bytes) { return std::aligned_alloc(256, (bytes + 511) / 256 * 256); }
inline void device_free(void* p) { std::free(p); }
inline void to_device(void* to, const void* from, size_t bytes) { std::memcpy(to, from, bytes); }
inline void from_device(void* to, const void* from, size_t bytes) { std::memcpy(to, from, bytes); }
#else
inline void must(cudaError_t e) {
  if (e == cudaSuccess) return;
  std::fprintf(stderr, "CUDA: %s\n", cudaGetErrorString(e));
  std::exit(2);
}
inline void* device_alloc(size_t bytes) {
  void* p = nullptr;
  must(cudaMalloc(&p, bytes + 256));
  return p;
}
inline void device_free(void* p) { must(cudaFree(p)); }
inline void to_device(void* to, const void* from, size_t bytes) {
  must(cudaMemcpy(to, from, bytes, cudaMemcpyHostToDevice));
}
inline void from_device(void* to, const void* from, size_t bytes) {
  must(cudaMemcpy(to, from, bytes, cudaMemcpyDeviceToHost));
}
#endif

// A tensor [rows (tokens), heads, dim] in double, and its memory on the device with a stride of its own.
struct Tensor {
  int64_t tokens = 0;
  int heads = 0, dim = 0, pad = 0;  // pad: elements between the rows of heads
  bool bf16 = false;
  int T = 0;  // tokens of a batch row
  std::vector<double> x;
  void* device = nullptr;

  double& at(int64_t t, int h, int i) { return x[(t * heads + h) * dim + i]; }
  double at(int64_t t, int h, int i) const { return x[(t * heads + h) * dim + i]; }
  int row() const { return dim + pad; }
  size_t bytes() const { return static_cast<size_t>(tokens) * heads * row() * (bf16 ? 2 : 4); }
  void make(int64_t tokens_, int heads_, int dim_, bool bf16_, int pad_) {
    tokens = tokens_, heads = heads_, dim = dim_, bf16 = bf16_, pad = pad_;
    x.assign(tokens * heads * dim, 0.0);
  }
  void round() {
    for (double& v : x) v = bf16 ? from_bf16(to_bf16(v)) : static_cast<double>(static_cast<float>(v));
  }
  void upload(bool poison) {
    std::vector<char> raw(bytes());
    for (int64_t r = 0; r < tokens * heads; ++r) {
      for (int i = 0; i < row(); ++i) {
        const double v = poison || i >= dim ? NAN : x[r * dim + i];
        const int64_t at = r * row() + i;
        if (bf16) {
          reinterpret_cast<uint16_t*>(raw.data())[at] = to_bf16(v);
        } else {
          reinterpret_cast<float*>(raw.data())[at] = static_cast<float>(v);
        }
      }
    }
    device = device_alloc(bytes());
    to_device(device, raw.data(), bytes());
  }
  void download() {
    std::vector<char> raw(bytes());
    from_device(raw.data(), device, bytes());
    for (int64_t r = 0; r < tokens * heads; ++r) {
      for (int i = 0; i < dim; ++i) {
        const int64_t at = r * row() + i;
        x[r * dim + i] =
            bf16 ? from_bf16(reinterpret_cast<uint16_t*>(raw.data())[at]) : reinterpret_cast<float*>(raw.data())[at];
      }
    }
  }
  TokenArg arg(int divisor) const {
    if (device == nullptr) return {};
    TokenArg a;
    a.data = device;
    a.stride_h = row();
    a.stride_t = static_cast<int64_t>(heads) * row();
    a.stride_b = a.stride_t * T;
    a.bf16 = bf16 ? 1 : 0;
    a.divisor = divisor;
    return a;
  }
};

struct Case {
  std::string name;
  fw::Rule rule;
  int B = 1, T = 64, H = 1, HV = 1, K = 64, V = 64;
  std::vector<int> lengths;  // packed, if not empty (then T is their sum)
  std::string decay = "mild";
  bool bf16 = true;
  int pad = 0;  // odd: nothing is aligned
  bool g_per_value_head = true;
  bool d_out = true;
  uint64_t seed = 1;
};

using Vector = std::vector<double>;

class Run {
 public:
  explicit Run(const Case& c) : c_(c), random_(c.seed) {
    tokens_ = c.lengths.empty() ? static_cast<int64_t>(c.B) * c.T : c.T;
    key_ = c.K <= 64 ? 64 : 128;
    blocks_ = (c.V + 63) / 64;
    offsets_ = {0}, bases_ = {0};
    const int N = c.lengths.empty() ? c.B : static_cast<int>(c.lengths.size());
    for (int n = 0; n < N; ++n) {
      const int length = c.lengths.empty() ? c.T : c.lengths[n];
      offsets_.push_back(offsets_.back() + length);
      bases_.push_back(bases_.back() + (length + 63) / 64);
    }
  }
  ~Run() {
    for (void* p : owned_) device_free(p);
    for (Tensor* t : tensors_) {
      if (t->device != nullptr) device_free(t->device);
    }
  }
  Run(const Run&) = delete;

  // Largest relative L2 error relative to its bound.
  double check(bool print) {
    make_inputs();
    oracle();
    run_kernel();
    return compare(print);
  }
  // The bits of all gradients.
  const std::vector<uint64_t>& bits() const { return bits_; }

 private:
  double normal(double sigma = 1) { return sigma * std::normal_distribution<double>()(random_); }
  double uniform(double a, double b) { return std::uniform_real_distribution<double>(a, b)(random_); }

  void fill(Tensor& t, int heads, int dim, bool bf16, double (*map)(double), double sigma) {
    t.make(tokens_, heads, dim, bf16, c_.pad);
    t.T = c_.T;
    for (double& v : t.x) v = map(normal(sigma));
    t.round();
    t.upload(false);
    tensors_.push_back(&t);
  }
  static double same(double x) { return x; }
  static double sigmoid(double x) { return 1 / (1 + std::exp(-x)); }
  static double spread(double x) { return std::exp(std::log(1.5) * x / (1 + std::fabs(x))); }  // in [1/1.5, 1.5]

  double log_decay() {
    const std::string& d = c_.decay;
    if (d == "none") return 0;
    if (d == "mild") return -0.05 * uniform(0.2, 2);
    if (d == "strong") return -5 * uniform(0.5, 1.5);
    const double u = uniform(0, 1);
    if (d == "reset") return u < 0.02 ? -INFINITY : u < 0.06 ? -1000 : -0.05 * uniform(0, 2);
    return u < 0.15 ? -INFINITY : u < 0.3 ? -1000 : u < 0.4 ? -20 : u < 0.5 ? 0 : -0.5 * uniform(0, 2);  // mixed
  }

  void make_inputs() {
    const fw::Rule& r = c_.rule;
    const bool l2k = r.k_norm == fw::Norm::kL2;
    const double k_size = l2k || r.gain == fw::Gain::kKaczmarz || r.gain == fw::Gain::kNlms || r.gain == fw::Gain::kEfla
                              ? 1
                              : 1 / std::sqrt(c_.K);
    fill(q_, c_.H, c_.K, c_.bf16, same, 1);
    fill(k_, c_.H, c_.K, c_.bf16, same, k_size);
    fill(v_, c_.HV, c_.V, c_.bf16, same, 1);
    fill(d_o_, c_.HV, c_.V, c_.bf16, same, 1);
    fw::for_each_scalar(
        r, [&](Tensor& x) { fill(x, c_.HV, 1, c_.bf16 && &x != &numbers_.beta, sigmoid, 1); }, numbers_);
    if (r.uses_erase_key()) fill(p_, c_.H, c_.K, c_.bf16, same, 1);
    if (r.uses_erase_gate()) fill(b_, c_.HV, r.erase == fw::Gate::kScalar ? 1 : c_.K, c_.bf16, sigmoid, 1);
    if (r.uses_write_gate()) fill(gate_, c_.HV, r.write == fw::Gate::kScalar ? 1 : c_.V, c_.bf16, sigmoid, 1);
    if (r.uses_precond()) {
      const int pad = c_.pad;
      c_.pad = 0;
      fill(m_, c_.H, c_.K, false, spread, 1);
      c_.pad = pad;
      if (r.normaliser == fw::Normaliser::kGated) {
        fill(
            pg_, c_.H, 1, false, [](double x) { return -std::fabs(x); }, 1);
        fill(pb_, c_.H, 1, false, sigmoid, 1);
      }
    }
    if (r.uses_g()) {
      g_.make(tokens_, c_.g_per_value_head ? c_.HV : c_.H, r.decay == fw::Decay::kChannel ? c_.K : 1,
              c_.bf16 && c_.decay == "mild", c_.pad);
      g_.T = c_.T;
      for (double& x : g_.x) x = log_decay();
      g_.round();
      g_.upload(false);
      tensors_.push_back(&g_);
    }
    if (!c_.d_out) d_o_.x.assign(d_o_.x.size(), 0.0);
  }

  // The front of a token and value head in double.
  struct Front {
    fw::FrontScalars<double> s;
    fw::FrontCoefs<double> c;
    Vector q, k, p, b, m, v, gate, r, e, w, z;
  };
  static double mean(const Vector& x) {
    double sum = 0;
    for (double v : x) sum += v;
    return sum / static_cast<double>(x.size());
  }
  Front front(int64_t t, int hv) const {
    const fw::Rule& rule = c_.rule;
    const int h = hv / (c_.HV / c_.H), K = c_.K, V = c_.V;
    Front f;
    const auto row = [&](const Tensor& x, int head, int dim, double neutral) {
      Vector y(dim, neutral);
      if (!x.x.empty() && x.dim == dim) {
        for (int i = 0; i < dim; ++i) y[i] = x.at(t, head, i);
      }
      return y;
    };
    f.q = row(q_, h, K, 0), f.k = row(k_, h, K, 0), f.p = row(p_, h, K, 0), f.m = row(m_, h, K, 1),
    f.v = row(v_, hv, V, 0);
    const Vector b = row(b_, hv, K, 1), gate = row(gate_, hv, V, 1);
    f.b = rule.uses_erase_gate() && rule.erase == fw::Gate::kChannel ? b : Vector(K, 1);
    f.gate = rule.write == fw::Gate::kChannel ? gate : Vector(V, 1);
    for (int i = 0; i < K; ++i) {
      f.s.q2 += f.q[i] * f.q[i], f.s.k2 += f.k[i] * f.k[i], f.s.p2 += f.p[i] * f.p[i];
      f.s.kmk += f.m[i] * f.k[i] * f.k[i];
    }
    const auto scalar = [&](const Tensor& x, int head, double& to) {
      if (!x.x.empty() && x.dim == 1) to = x.at(t, head, 0);
    };
    fw::for_all_scalars([&](const Tensor& x, double& to) { scalar(x, hv, to); }, numbers_, f.s);
    if (rule.feedback == fw::Feedback::kFixed) f.s.lambda = rule.lambda;
    if (rule.erase == fw::Gate::kScalar) scalar(b_, hv, f.s.erase);
    if (rule.uses_erase_gate() && rule.erase == fw::Gate::kAveraged) f.s.erase = mean(b);
    if (rule.write == fw::Gate::kScalar) scalar(gate_, hv, f.s.write);
    if (rule.write == fw::Gate::kAveraged) f.s.write = mean(gate);
    if (rule.normaliser == fw::Normaliser::kGated) {
      scalar(pg_, h, f.s.alpha_p), scalar(pb_, h, f.s.beta_p);
      f.s.alpha_p = std::exp(f.s.alpha_p);
    }
    f.c = fw::front_coefs<double>(rule, scale(), f.s);
    f.r.resize(K), f.e.resize(K), f.w.resize(K), f.z.resize(V);
    for (int i = 0; i < K; ++i) {
      f.r[i] = (rule.preconditions_read() ? f.m[i] : 1) * (f.c.r_q * f.q[i] + f.c.r_k * f.k[i]);
      f.e[i] = rule.is_delta() ? f.b[i] * (f.c.e_k * f.k[i] + f.c.e_q * f.q[i] + f.c.e_p * f.p[i]) : 0;
      f.w[i] = (rule.preconditions_read() ? 1 : f.m[i]) * f.c.w_k * f.k[i];
    }
    for (int i = 0; i < V; ++i) f.z[i] = f.gate[i] * f.c.z_v * f.v[i];
    return f;
  }
  double scale() const { return 1 / std::sqrt(static_cast<double>(c_.K)); }
  double step(int64_t t, int hv, int k) const {
    switch (c_.rule.decay) {
      case fw::Decay::kNone:
        return 0;
      case fw::Decay::kConstant:
        return std::log1p(-std::exp2(-5.0 - hv));
      case fw::Decay::kScalar:
        return g_.at(t, c_.g_per_value_head ? hv : hv / (c_.HV / c_.H), 0);
      case fw::Decay::kChannel:
        return g_.at(t, c_.g_per_value_head ? hv : hv / (c_.HV / c_.H), k);
    }
    return 0;
  }

  struct Gradient {
    Tensor want, got;
    // a number that is a sum of many terms may come out small by chance: the sum of the squares of the terms
    double scale = 0;
  };
  void want(Gradient& x, int dim) { x.want.make(tokens_, c_.HV, dim, false, 0); }

  void oracle() {
    const fw::Rule& rule = c_.rule;
    const int K = c_.K, V = c_.V, chunks = bases_.back();
    const bool is_delta = rule.is_delta();
    want(dq_, K), want(dk_, K), want(dv_, V), want(dg_, rule.decay == fw::Decay::kChannel ? K : 1);
    fw::for_all_scalars([&](Gradient& x) { want(x, 1); }, dscalars_);
    want(dp_, K), want(db_, b_.dim), want(dgate_, gate_.dim), want(dm_, K), want(dpg_, 1), want(dpb_, 1);
    const int64_t tiles = static_cast<int64_t>(chunks) * c_.HV;
    pairs_.assign(tiles * 2 * 4096, 0);
    states_.assign(tiles * blocks_ * 64 * key_, 0), d_states_ = states_;
    w_.assign(tiles * blocks_ * 4096, 0), big_v_ = w_;
    for (int n = 0; n + 1 < static_cast<int>(offsets_.size()); ++n) {
      for (int hv = 0; hv < c_.HV; ++hv) {
        const int64_t first = offsets_[n];
        const int length = offsets_[n + 1] - offsets_[n];
        if (length == 0) continue;
        std::vector<Front> f;
        for (int t = 0; t < length; ++t) f.push_back(front(first + t, hv));
        std::vector<Vector> S(length + 1, Vector(K * V)), bar(length, Vector(K * V)), D(length + 1, Vector(K * V));
        std::vector<Vector> u(length, Vector(V));
        for (double& x : S[0]) x = normal();
        for (int t = 0; t < length; ++t) {
          u[t] = f[t].z;
          for (int k = 0; k < K; ++k) {
            const double a = std::exp(step(first + t, hv, k));
            for (int v = 0; v < V; ++v) {
              bar[t][k * V + v] = a * S[t][k * V + v];
              u[t][v] -= bar[t][k * V + v] * f[t].e[k];
            }
          }
          for (int k = 0; k < K; ++k) {
            for (int v = 0; v < V; ++v) S[t + 1][k * V + v] = bar[t][k * V + v] + f[t].w[k] * u[t][v];
          }
        }
        for (double& x : D[length]) x = normal(0.3);
        for (int t = length - 1; t >= 0; --t) {
          Vector d = D[t + 1], dr(K), de(K), dw(K), du(V), dg(K);
          const Front& x = f[t];
          const auto d_o = [&](int v) { return d_o_.at(first + t, hv, v); };
          for (int k = 0; k < K; ++k) {
            for (int v = 0; v < V; ++v) {
              d[k * V + v] += x.r[k] * d_o(v);
              dr[k] += S[t + 1][k * V + v] * d_o(v);
              dw[k] += d[k * V + v] * u[t][v];
              du[v] += d[k * V + v] * x.w[k];
            }
          }
          for (int k = 0; k < K; ++k) {
            const double a = std::exp(step(first + t, hv, k));
            for (int v = 0; v < V; ++v) {
              if (is_delta) {
                de[k] -= bar[t][k * V + v] * du[v];
                d[k * V + v] -= x.e[k] * du[v];
              }
              dg[k] += d[k * V + v] * bar[t][k * V + v];
              D[t][k * V + v] = a * d[k * V + v];
            }
          }
          front_vjp(first + t, hv, x, dr, de, dw, du, dg);
        }
        for (int c = 0; c * 64 < length; ++c)
          chunk_tiles(bases_[n] + c, hv, first, c * 64, std::min(64, length - c * 64), f, S[c * 64],
                      D[std::min(length, c * 64 + 64)]);
      }
    }
  }

  void front_vjp(int64_t t, int hv, const Front& x, const Vector& dr, const Vector& de, const Vector& dw,
                 const Vector& dz, const Vector& dg) {
    const fw::Rule& rule = c_.rule;
    const int K = c_.K, V = c_.V;
    const bool on_read = rule.preconditions_read();
    fw::FrontCoefs<double> d;
    for (int i = 0; i < K; ++i) {
      const double mr = on_read ? x.m[i] : 1, mw = on_read ? 1 : x.m[i];
      d.r_q += mr * x.q[i] * dr[i], d.r_k += mr * x.k[i] * dr[i], d.w_k += mw * x.k[i] * dw[i];
      d.e_k += x.b[i] * x.k[i] * de[i], d.e_q += x.b[i] * x.q[i] * de[i], d.e_p += x.b[i] * x.p[i] * de[i];
    }
    for (int i = 0; i < V; ++i) d.z_v += x.v[i] * x.gate[i] * dz[i];
    const fw::FrontScalars<double> ds = fw::front_coefs_vjp<double>(rule, scale(), x.s, d);
    scales(x, dr, de, dw, dz);
    const fw::FrontCoefs<double>& c = x.c;
    for (int i = 0; i < K; ++i) {
      const double mr = on_read ? x.m[i] : 1, mw = on_read ? 1 : x.m[i], bde = x.b[i] * de[i];
      dq_.want.at(t, hv, i) = c.r_q * mr * dr[i] + c.e_q * bde + 2 * ds.q2 * x.q[i];
      dk_.want.at(t, hv, i) =
          c.r_k * mr * dr[i] + c.e_k * bde + c.w_k * mw * dw[i] + 2 * (ds.k2 + ds.kmk * x.m[i]) * x.k[i];
      dp_.want.at(t, hv, i) = c.e_p * bde + 2 * ds.p2 * x.p[i];
      if (rule.erase == fw::Gate::kChannel && rule.is_delta())
        db_.want.at(t, hv, i) = de[i] * (c.e_k * x.k[i] + c.e_q * x.q[i] + c.e_p * x.p[i]);
      if (rule.erase == fw::Gate::kAveraged && rule.is_delta()) db_.want.at(t, hv, i) = ds.erase / K;
      dm_.want.at(t, hv, i) =
          (on_read ? dr[i] * (c.r_q * x.q[i] + c.r_k * x.k[i]) : dw[i] * c.w_k * x.k[i]) + ds.kmk * x.k[i] * x.k[i];
      if (rule.decay == fw::Decay::kChannel) dg_.want.at(t, hv, i) = dg[i];
      if (rule.decay == fw::Decay::kScalar) dg_.want.at(t, hv, 0) += dg[i], dg_.scale += dg[i] * dg[i];
    }
    for (int i = 0; i < V; ++i) {
      dv_.want.at(t, hv, i) = c.z_v * x.gate[i] * dz[i];
      if (rule.write == fw::Gate::kChannel) dgate_.want.at(t, hv, i) = c.z_v * x.v[i] * dz[i];
      if (rule.write == fw::Gate::kAveraged) dgate_.want.at(t, hv, i) = ds.write / V;
    }
    if (rule.erase == fw::Gate::kScalar && rule.is_delta()) db_.want.at(t, hv, 0) = ds.erase;
    if (rule.write == fw::Gate::kScalar) dgate_.want.at(t, hv, 0) = ds.write;
    fw::for_all_scalars([&](Gradient& to, double y) { to.want.at(t, hv, 0) = y; }, dscalars_, ds);
    dpg_.want.at(t, hv, 0) = ds.alpha_p * x.s.alpha_p, dpb_.want.at(t, hv, 0) = ds.beta_p;
  }

  // The natural sizes of the scalars' gradients.
  void scales(const Front& x, const Vector& dr, const Vector& de, const Vector& dw, const Vector& dz) {
    const auto square = [](double a) { return a * a; };
    const auto add = [&](double fw::FrontCoefs<double>::*which, double size2) {
      fw::FrontCoefs<double> d;
      d.*which = 1;
      const fw::FrontScalars<double> ds = fw::front_coefs_vjp<double>(c_.rule, scale(), x.s, d);
      fw::for_all_scalars([&](Gradient& to, double y) { to.scale += square(y) * size2; }, dscalars_, ds);
      db_.scale += db_.want.dim == 0 ? 0 : square(ds.erase) * size2 / db_.want.dim,
          dgate_.scale += dgate_.want.dim == 0 ? 0 : square(ds.write) * size2 / dgate_.want.dim;
      dpg_.scale += square(ds.alpha_p * x.s.alpha_p) * size2, dpb_.scale += square(ds.beta_p) * size2;
    };
    fw::FrontCoefs<double> size2;
    for (int i = 0; i < c_.K; ++i) {
      size2.r_q += square(x.q[i] * dr[i]), size2.r_k += square(x.k[i] * dr[i]), size2.w_k += square(x.k[i] * dw[i]);
      size2.e_k += square(x.b[i] * x.k[i] * de[i]), size2.e_q += square(x.b[i] * x.q[i] * de[i]),
          size2.e_p += square(x.b[i] * x.p[i] * de[i]);
    }
    for (int i = 0; i < c_.V; ++i) size2.z_v += square(x.v[i] * x.gate[i] * dz[i]);
    for (const auto which : {&fw::FrontCoefs<double>::r_q, &fw::FrontCoefs<double>::r_k, &fw::FrontCoefs<double>::e_k,
                             &fw::FrontCoefs<double>::e_q, &fw::FrontCoefs<double>::e_p, &fw::FrontCoefs<double>::w_k,
                             &fw::FrontCoefs<double>::z_v}) {
      add(which, size2.*which);
    }
  }

  // The tiles of rows start .. start + rows of a sequence (recurrence.md 4).
  void chunk_tiles(int chunk, int hv, int64_t first, int start, int rows, const std::vector<Front>& f, const Vector& S0,
                   const Vector& D) {
    const int K = c_.K, V = c_.V;
    const bool is_delta = c_.rule.is_delta();
    const auto decay = [&](int from, int to, int k) {  // of steps from + 1 .. to
      double sum = 0;
      for (int i = from + 1; i <= to; ++i) sum += step(first + start + i, hv, k);
      return std::exp(sum);
    };
    std::vector<Vector> T(rows, Vector(rows)), P = T, A = T;
    std::vector<Vector> gamma(rows, Vector(K)), lo = gamma;
    for (int k = 0; k < K; ++k) {
      for (int i = 0; i < rows; ++i) {
        gamma[i][k] = decay(-1, i, k), lo[i][k] = decay(i, rows - 1, k);
        double sum = 0;
        for (int j = i; j >= 0; --j) {
          const double w = f[start + j].w[k] * std::exp(sum);
          P[i][j] += f[start + i].r[k] * w;
          if (j < i) T[i][j] += f[start + i].e[k] * w;
          sum += step(first + start + j, hv, k);
        }
      }
    }
    for (int j = 0; j < rows; ++j) {
      for (int i = j; i < rows; ++i) {
        A[i][j] = i == j;
        for (int l = j; l < i; ++l) A[i][j] -= T[i][l] * A[l][j];
      }
    }
    const int64_t tile = static_cast<int64_t>(chunk) * c_.HV + hv;
    for (int i = 0; i < rows; ++i) {
      for (int j = 0; j < rows; ++j) {
        pairs_[tile * 8192 + fw::cuda::sw128_index(i, j)] = is_delta ? to_bf16(A[i][j]) : 0x7fc0;
        pairs_[tile * 8192 + 4096 + fw::cuda::sw128_index(i, j)] = to_bf16(P[i][j]);
      }
    }
    for (int i = rows; i < 64 && is_delta; ++i) pairs_[tile * 8192 + fw::cuda::sw128_index(i, i)] = to_bf16(1);
    for (int v = 0; v < V; ++v) {
      const int64_t at = tile * blocks_ + v / 64;
      for (int k = 0; k < K; ++k) {
        states_[at * 64 * key_ + fw::cuda::sw128_index(v % 64, k)] = to_bf16(S0[k * V + v]);
        d_states_[at * 64 * key_ + fw::cuda::sw128_index(v % 64, k)] = to_bf16(D[k * V + v]);
      }
      for (int i = 0; i < rows; ++i) {
        double w = f[start + i].z[v], big_v = 0;
        for (int k = 0; k < K; ++k) {
          w -= gamma[i][k] * f[start + i].e[k] * S0[k * V + v];
          big_v += lo[i][k] * f[start + i].w[k] * D[k * V + v];
        }
        w_[at * 4096 + fw::cuda::sw128_index(i, v % 64)] = to_bf16(w);
        big_v_[at * 4096 + fw::cuda::sw128_index(i, v % 64)] = to_bf16(big_v);
      }
    }
  }

  template <class T>
  T* upload(const std::vector<T>& x) {
    T* p = static_cast<T*>(device_alloc(x.size() * sizeof(T) + 16));
    to_device(p, x.data(), x.size() * sizeof(T));
    owned_.push_back(p);
    return p;
  }
  void out(Gradient& x, bool asked, bool bf16, TokenArg* arg, const char* name, double bound = 1e-2) {
    if (!asked) return;
    x.got.make(tokens_, c_.HV, x.want.dim, bf16, c_.pad);
    x.got.T = c_.T;
    x.got.upload(true);
    tensors_.push_back(&x.got);
    if (arg != nullptr) *arg = x.got.arg(1);
    outputs_.push_back({&x, name, bound});
  }

  void run_kernel() {
    const fw::Rule& r = c_.rule;
    fw::cuda::GradientArgs a;
    fw::cuda::Problem& p = a.problem;
    p.rule = r;
    p.scale = static_cast<float>(scale());
    p.B = c_.B, p.T = c_.T, p.H = c_.H, p.HV = c_.HV, p.K = c_.K, p.V = c_.V, p.group = c_.HV / c_.H;
    p.tokens = tokens_;
    p.sequences.N = static_cast<int>(offsets_.size()) - 1;
    p.sequences.T = c_.T;
    p.sequences.chunks = (c_.T + 63) / 64;
    if (!c_.lengths.empty()) {
      p.sequences.offsets = upload(offsets_);
      p.sequences.chunk_base = upload(bases_);
    }
    p.in.q = q_.arg(p.group), p.in.k = k_.arg(p.group), p.in.v = v_.arg(1);
    fw::for_all_scalars([](TokenArg& to, const Tensor& x) { to = x.arg(1); }, p.in, numbers_);
    p.in.g = g_.arg(c_.g_per_value_head ? 1 : p.group);
    p.in.erase_key = p_.arg(p.group), p.in.erase_gate = b_.arg(1), p.in.write_gate = gate_.arg(1);
    p.in.precond_g = pg_.arg(p.group), p.in.precond_beta = pb_.arg(p.group);
    p.m = static_cast<const float*>(m_.device);
    if (c_.d_out) a.d_o = d_o_.arg(1);
    a.pairs = reinterpret_cast<const fw::cuda::IntraChunk*>(upload(pairs_));
    a.states = upload(states_), a.d_states = upload(d_states_), a.w = upload(w_), a.v = upload(big_v_);
    fw::cuda::TokenArgs& d = a.grads.d;
    const bool strong = c_.decay != "mild" && c_.decay != "none";
    out(dq_, true, c_.bf16, &d.q, "dq"), out(dk_, true, false, &d.k, "dk"), out(dv_, true, c_.bf16, &d.v, "dv");
    out(dg_, r.uses_g(), false, &d.g, "dg", strong ? 2e-2 : 1e-2);
    fw::for_each_scalar(
        r, [&](Gradient& x, TokenArg& to, const char* name) { out(x, true, false, &to, name); }, dscalars_, d,
        fw::kTokenScalarNames);
    out(dp_, r.uses_erase_key(), c_.bf16, &d.erase_key, "dp");
    out(db_, r.uses_erase_gate(), c_.bf16, &d.erase_gate, "db"),
        out(dgate_, r.uses_write_gate(), c_.bf16, &d.write_gate, "dwg");
    if (r.uses_precond()) {
      const int pad = c_.pad;
      c_.pad = 0;
      out(dm_, true, false, nullptr, "dm");
      a.grads.dm = static_cast<float*>(dm_.got.device);
      if (r.normaliser == fw::Normaliser::kGated) {
        out(dpg_, true, false, nullptr, "dalpha_p"), out(dpb_, true, false, nullptr, "dbeta_p");
        a.grads.dalpha_p = static_cast<float*>(dpg_.got.device), a.grads.dbeta_p = static_cast<float*>(dpb_.got.device);
      }
      c_.pad = pad;
    }
    fw::cuda::gradients(a, fw::cuda::selected(a, key_, bases_.back()), key_, bases_.back(), nullptr);
#ifndef FW_CUDA_EMULATION
    must(cudaDeviceSynchronize());
#endif
  }

  double compare(bool print) {
    double worst = 0;
    std::string line;
    for (auto& o : outputs_) {
      Tensor& got = o.gradient->got;
      const Tensor& want = o.gradient->want;
      got.download();
      double error = 0, size = 0;
      bool finite = true;
      for (size_t i = 0; i < want.x.size(); ++i) {
        error += (got.x[i] - want.x[i]) * (got.x[i] - want.x[i]);
        size += want.x[i] * want.x[i];
        finite = finite && std::isfinite(got.x[i]);
        uint64_t word;
        std::memcpy(&word, &got.x[i], 8);
        bits_.push_back(word);
      }
      size = std::max(size, o.gradient->scale);
      const double relative = want.x.empty() ? 0
                              : !finite      ? INFINITY
                              : size > 0     ? std::sqrt(error / size)
                                             : std::sqrt(error);
      worst = std::max(worst, relative / o.bound);
      char text[64];
      std::snprintf(text, sizeof text, " %s %.1e%s", o.name, relative, relative > o.bound ? "!" : "");
      line += text;
    }
    if (print || !(worst <= 1))
      std::printf("%-4s %s T%d H%d/%d K%d V%d %s%s:%s\n", worst <= 1 ? "ok" : "FAIL", c_.name.c_str(), c_.T, c_.H,
                  c_.HV, c_.K, c_.V, c_.decay.c_str(), c_.bf16 ? "" : " f32", line.c_str());
    std::fflush(stdout);
    return worst;
  }

  Case c_;
  std::mt19937_64 random_;
  int64_t tokens_ = 0;
  int key_ = 64, blocks_ = 1;
  std::vector<int32_t> offsets_, bases_;
  Tensor q_, k_, v_, g_, p_, b_, gate_, m_, pg_, pb_, d_o_;
  fw::TokenScalars<Tensor> numbers_;
  Gradient dq_, dk_, dv_, dg_, dp_, db_, dgate_, dm_, dpg_, dpb_;
  fw::TokenScalars<Gradient> dscalars_;
  std::vector<uint16_t> pairs_, states_, d_states_, w_, big_v_;
  struct Output {
    Gradient* gradient;
    const char* name;
    double bound;
  };
  std::vector<Output> outputs_;
  std::vector<Tensor*> tensors_;
  std::vector<void*> owned_;
  std::vector<uint64_t> bits_;
};

inline fw::Rule rule_of(const std::string& name) {
  fw::Rule r;
  const auto hat = [&] { r.q_norm = r.k_norm = fw::Norm::kL2; };
  r.gain = fw::Gain::kGate;
  if (name == "linear_attention" || name == "retnet" || name == "mamba2" || name == "gla") {
    r.gain = fw::Gain::kOne, r.update = fw::Update::kAdditive;
    r.decay = name == "retnet"   ? fw::Decay::kConstant
              : name == "mamba2" ? fw::Decay::kScalar
              : name == "gla"    ? fw::Decay::kChannel
                                 : fw::Decay::kNone;
  } else if (name == "kaczmarz") {
    r.decay = fw::Decay::kScalar, r.gain = fw::Gain::kKaczmarz, r.q_norm = fw::Norm::kL2;
  } else if (name == "kaczmarz_channel") {
    r.decay = fw::Decay::kChannel, r.gain = fw::Gain::kKaczmarz, r.q_norm = fw::Norm::kL2;
  } else if (name == "efla" || name == "nlms") {
    r.gain = name == "efla" ? fw::Gain::kEfla : fw::Gain::kNlms;
  } else if (name == "linear_corrected") {
    r.gain = fw::Gain::kOne, r.update = fw::Update::kAdditive, r.decay = fw::Decay::kScalar,
    r.read = fw::Read::kCorrected, r.write = fw::Gate::kScalar;
  } else {
    hat();
    if (name != "deltanet") r.decay = fw::Decay::kScalar;
    if (name == "kda") r.decay = fw::Decay::kChannel;
    if (name == "gated_deltanet2" || name == "averaged") {
      r.decay = fw::Decay::kChannel, r.gain = fw::Gain::kOne;
      r.erase = r.write = name == "averaged" ? fw::Gate::kAveraged : fw::Gate::kChannel;
    }
    if (name == "averaged_write") r.write = fw::Gate::kAveraged;
    if (name == "qdelta") r.feedback = fw::Feedback::kLearned;
    if (name == "comba") r.erase = fw::Gate::kScalar, r.read = fw::Read::kCorrected;
    if (name == "precond_gated_deltanet") r.precond = fw::Precond::kDiagonal;
    if (name == "precond_kda_gated")
      r.precond = fw::Precond::kDiagonal, r.decay = fw::Decay::kChannel, r.normaliser = fw::Normaliser::kGated;
    if (name == "precond_gla")
      r.precond = fw::Precond::kRead, r.decay = fw::Decay::kChannel, r.update = fw::Update::kAdditive;
    if (name == "longhorn") r.decay = fw::Decay::kNone, r.gain = fw::Gain::kLonghorn, r.q_norm = fw::Norm::kRaw;
    if (name == "all_linear") {  // what there is without channel gates, at once
      r.gain = fw::Gain::kKaczmarz, r.k_norm = fw::Norm::kRaw, r.feedback = fw::Feedback::kFixed, r.lambda = 0.8;
      r.read = fw::Read::kCorrected, r.write = fw::Gate::kScalar;
    }
    if (name == "own_key") r.erase_key = fw::EraseKey::kOwn;
    if (name.ends_with("_channel") || name == "precond_kda") r.decay = fw::Decay::kChannel;
    if (name == "precond_kda") r.precond = fw::Precond::kDiagonal;
    if (name == "comba_channel") r.erase = fw::Gate::kScalar, r.read = fw::Read::kCorrected;
    if (name == "own_key_channel" || name == "all_channel")
      r.erase_key = fw::EraseKey::kOwn, r.feedback = fw::Feedback::kLearned;
    if (name == "all_channel") {
      r.erase = r.write = fw::Gate::kChannel, r.read = fw::Read::kCorrected, r.gain = fw::Gain::kKaczmarz;
      r.precond = fw::Precond::kRead, r.normaliser = fw::Normaliser::kOnePlus;
    }
  }
  return r;
}

}  // namespace gradients_test
