// The kernels of rules without an erase (kernels.h: offline_*) against the recurrence token by token in double: a
// program of its own that prints a line per case and fails with 1. An argument: only cases whose name has it.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <limits>
#include <string>
#include <vector>

#include "device_buffer.h"
#include "scan/cuda/kernels.h"
#include "test_numbers.h"

namespace fw::cuda {
namespace {

using testing::from_bf16;
using testing::kNan;
using testing::Random;
using testing::to_bf16;

struct Case {
  std::string name;
  int key, K, V, H, HV;
  std::vector<int> lengths;
  bool packed = false, bf16 = true, norms = false, gate = false;
  Decay decay = Decay::kScalar;
  bool edge_decays = false, states = true;  // initial state and gradient of the final one
  int row_padding = 0;                      // elements between rows of tokens
  bool has_d_o = true;
};

// A tensor [tokens, heads, dim] of numbers that bf16 has.
struct Tensor {
  bool bf16 = false;
  int heads = 1, dim = 1, row = 1;
  std::vector<double> x;
  Tensor() = default;
  Tensor(bool is_bf16, int tokens, int h, int d, int padding)
      : bf16(is_bf16), heads(h), dim(d), row(h * d + padding), x(static_cast<size_t>(tokens) * row, std::nan("")) {}
  double& at(int t, int h, int i) { return x[static_cast<size_t>(t) * row + h * dim + i]; }
  void fill(Random& random, double scale) {
    for (double& y : x) y = from_bf16(to_bf16(random(scale)));
  }
};
struct DeviceTensor {
  Tensor shape;
  DeviceBuffer<float> f;
  DeviceBuffer<uint16_t> h;
  explicit DeviceTensor(const Tensor& t) : shape(t), f(floats(t)), h(bf16_of(t)) {}
  TokenArg arg(int T, bool packed, int HV) {
    void* data = shape.bf16 ? static_cast<void*>(h.data()) : static_cast<void*>(f.data());
    return {data,
            packed ? 0 : static_cast<int64_t>(T) * shape.row,
            shape.row,
            shape.dim,
            shape.bf16 ? 1 : 0,
            HV / shape.heads};
  }
  Tensor download() {
    Tensor t = shape;
    if (t.bf16) {
      const std::vector<uint16_t> y = h.download();
      for (size_t i = 0; i < y.size(); ++i) t.x[i] = from_bf16(y[i]);
    } else {
      const std::vector<float> y = f.download();
      for (size_t i = 0; i < y.size(); ++i) t.x[i] = static_cast<double>(y[i]);
    }
    return t;
  }

 private:
  static std::vector<float> floats(const Tensor& t) {
    std::vector<float> y;
    if (!t.bf16)
      for (const double x : t.x) y.push_back(static_cast<float>(x));
    return y;
  }
  static std::vector<uint16_t> bf16_of(const Tensor& t) {
    std::vector<uint16_t> y;
    if (t.bf16)
      for (const double x : t.x) y.push_back(std::isnan(x) ? 0x7fc0 : to_bf16(x));
    return y;
  }
};

bool same(const std::vector<double>& a, const std::vector<double>& b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(),
                    [](double x, double y) { return x == y || (std::isnan(x) && std::isnan(y)); });
}

int failures = 0;
void fail(const char* what) {
  std::printf("  %s FAILED", what);
  ++failures;
}

// Relative L2 error, or infinite where a number that must be written is not.
struct Difference {
  double error = 0, norm = 0;
  void add(double got, double want) {
    if (!std::isfinite(got)) error = std::numeric_limits<double>::infinity();
    error += (got - want) * (got - want);
    norm += want * want;
  }
  void report(const char* what, double limit) const {
    const double relative = norm > 0 ? std::sqrt(error / norm) : std::sqrt(error);
    const bool good = relative <= limit;
    std::printf("  %s %.1e", what, relative);
    if (!good) fail("");
  }
};

struct Results {
  Tensor o, dq, dk, dv, dg, dbeta;
  std::vector<float> last, d_first;
  std::vector<uint16_t> states, d_states;
};

class Run {
 public:
  explicit Run(const Case& one) : c(one), N(static_cast<int>(c.lengths.size())), blocks((c.V + 63) / 64) {
    offsets = {0}, chunk_base = {0};
    for (const int length : c.lengths) {
      offsets.push_back(offsets.back() + length);
      chunk_base.push_back(chunk_base.back() + (length + 63) / 64);
    }
    tokens = offsets.back(), chunks = chunk_base.back();
    Random random{777};
    const int pad = c.row_padding;
    q = Tensor(c.bf16, tokens, c.H, c.K, pad), k = q, v = Tensor(c.bf16, tokens, c.HV, c.V, pad), d_o = v;
    g = Tensor(false, tokens, c.HV, 1, 0), beta = Tensor(c.bf16, tokens, c.HV, 1, 0);
    q.fill(random, 1), k.fill(random, 1), v.fill(random, 1), d_o.fill(random, 1), beta.fill(random, 1);
    for (size_t i = 0; i < g.x.size(); ++i) {
      g.x[i] = from_bf16(to_bf16(random(0.1) - 0.1));
      const double edges[] = {0, -20, -1000, -std::numeric_limits<double>::infinity()};
      if (c.edge_decays && i % 11 < 4) g.x[i] = edges[i % 11];
    }
    const size_t size = static_cast<size_t>(N) * c.HV * c.K * c.V;
    for (size_t i = 0; i < size; ++i)
      first.push_back(static_cast<float>(random(1))), d_last.push_back(static_cast<float>(random(1)));
    rule.update = Update::kAdditive, rule.decay = c.decay;
    if (c.norms) rule.q_norm = rule.k_norm = Norm::kL2;
    if (c.gate) rule.gain = Gain::kGate;
    scale = 1 / std::sqrt(static_cast<double>(c.K));
  }

  Results device(bool alone) {
    DeviceTensor dev_q(q), dev_k(k), dev_v(v), dev_do(d_o), dev_g(g), dev_beta(beta);
    DeviceTensor o(Tensor(c.bf16, tokens, c.HV, c.V, c.row_padding));
    const bool grouped = c.H != c.HV;  // float32 of each value head
    DeviceTensor dq(Tensor(c.bf16 && !grouped, tokens, c.HV, c.K, grouped ? 0 : c.row_padding)), dk(dq.shape);
    DeviceTensor dv(o.shape), dg(Tensor(false, tokens, c.HV, 1, 0)), dbeta(Tensor(c.bf16, tokens, c.HV, 1, 0));
    DeviceBuffer<float> from(first), to(std::vector<float>(first.size(), kNan)), d_to(d_last),
        d_from(std::vector<float>(first.size(), kNan));
    const size_t tiles = static_cast<size_t>(chunks) * c.HV * blocks * 64 * c.key;
    DeviceBuffer<uint16_t> states(tiles), d_states(tiles);
    DeviceBuffer<int32_t> dev_offsets(offsets), dev_base(chunk_base);
    const int T = c.packed ? tokens : c.lengths[0];
    for (int n = 0; n < (alone ? N : 1); ++n) {
      SequenceArg sequences{nullptr, nullptr, N, T, (T + 63) / 64};
      if (c.packed) sequences = {dev_offsets.data(), dev_base.data(), N, 0, 0};
      if (alone) sequences = {dev_offsets.data() + n, dev_base.data() + n, 1, 0, 0};
      Problem x;
      x.rule = rule, x.scale = static_cast<float>(scale);
      x.B = c.packed ? 1 : N, x.T = T, x.H = c.H, x.HV = c.HV, x.K = c.K, x.V = c.V, x.group = c.HV / c.H,
      x.tokens = tokens;
      x.sequences = sequences;
      x.in.q = dev_q.arg(T, c.packed, c.HV), x.in.k = dev_k.arg(T, c.packed, c.HV),
      x.in.v = dev_v.arg(T, c.packed, c.HV);
      if (c.decay == Decay::kScalar) x.in.g = dev_g.arg(T, c.packed, c.HV);
      if (c.gate) x.in.beta = dev_beta.arg(T, c.packed, c.HV);
      const auto state = [&](float* data) {
        const int64_t head = static_cast<int64_t>(c.K) * c.V;
        return StateArg{data + n * c.HV * head, c.HV * head, head, c.V, 1, 0};
      };
      AdditiveScanArgs scan;
      scan.problem = x, scan.sequences = sequences;
      scan.o = o.arg(T, c.packed, c.HV);
      if (c.states) scan.from = state(from.data());
      scan.to = state(to.data());
      scan.states = states.data();
      additive_scan(scan, c.key, nullptr);
      scan = {};
      scan.problem = x, scan.sequences = sequences, scan.reverse = true;
      if (c.has_d_o) scan.d_o = dev_do.arg(T, c.packed, c.HV);
      if (c.states) scan.from = state(d_to.data());
      scan.to = state(d_from.data());
      scan.states = d_states.data();
      additive_scan(scan, c.key, nullptr);
      AdditiveGradientArgs grad;
      grad.problem = x, grad.d_o = scan.d_o, grad.states = states.data(), grad.d_states = d_states.data();
      grad.grads.d.q = dq.arg(T, c.packed, c.HV), grad.grads.d.k = dk.arg(T, c.packed, c.HV),
      grad.grads.d.v = dv.arg(T, c.packed, c.HV);
      if (c.decay == Decay::kScalar) grad.grads.d.g = dg.arg(T, c.packed, c.HV);
      if (c.gate) grad.grads.d.beta = dbeta.arg(T, c.packed, c.HV);
      const int of_n = alone ? chunk_base[n + 1] - chunk_base[n] : chunks;
      additive_gradients(grad, c.key, of_n, nullptr);
    }
    return {o.download(),     dq.download(), dk.download(),     dv.download(),     dg.download(),
            dbeta.download(), to.download(), d_from.download(), states.download(), d_states.download()};
  }

  void check(Results& got) {
    Difference o, last, d_first, dq, dk, dv, dg, dbeta;
    const int K = c.K, V = c.V, group = c.HV / c.H;
    for (int n = 0; n < N; ++n)
      for (int hv = 0; hv < c.HV; ++hv) {
        const int h = hv / group, T = c.lengths[n], t0 = offsets[n];
        const size_t head = (static_cast<size_t>(n) * c.HV + hv) * K * V;
        std::vector<double> s(static_cast<size_t>(T + 1) * K * V, 0.0), a(T), qn(T), kn(T), z(T);
        if (c.states) std::copy_n(first.begin() + head, K * V, s.begin());
        for (int t = 0; t < T; ++t) {
          a[t] = c.decay == Decay::kScalar     ? std::exp(g.at(t0 + t, hv, 0))
                 : c.decay == Decay::kConstant ? 1 - std::ldexp(1.0, -5 - hv)
                                               : 1;
          double q2 = 0, k2 = 0;
          for (int i = 0; i < K; ++i)
            q2 += q.at(t0 + t, h, i) * q.at(t0 + t, h, i), k2 += k.at(t0 + t, h, i) * k.at(t0 + t, h, i);
          qn[t] = c.norms ? 1 / std::sqrt(q2 + 1e-6) : 1, kn[t] = c.norms ? 1 / std::sqrt(k2 + 1e-6) : 1;
          z[t] = c.gate ? beta.at(t0 + t, hv, 0) : 1;
          const double* before = s.data() + static_cast<size_t>(t) * K * V;
          double* after = s.data() + static_cast<size_t>(t + 1) * K * V;
          for (int i = 0; i < K; ++i)
            for (int j = 0; j < V; ++j)
              after[i * V + j] = a[t] * before[i * V + j] + kn[t] * k.at(t0 + t, h, i) * z[t] * v.at(t0 + t, hv, j);
          for (int j = 0; j < V; ++j) {
            double y = 0;
            for (int i = 0; i < K; ++i) y += after[i * V + j] * scale * qn[t] * q.at(t0 + t, h, i);
            o.add(got.o.at(t0 + t, hv, j), y);
          }
        }
        for (int i = 0; i < K * V; ++i) last.add(got.last[head + i], s[static_cast<size_t>(T) * K * V + i]);
        std::vector<double> d(static_cast<size_t>(K) * V, 0.0);
        if (c.states) std::copy_n(d_last.begin() + head, K * V, d.begin());
        for (int t = T - 1; t >= 0; --t) {
          const double* before = s.data() + static_cast<size_t>(t) * K * V;
          const double* after = s.data() + static_cast<size_t>(t + 1) * K * V;
          std::vector<double> dr(K, 0.0), dw(K, 0.0), dz(V, 0.0);
          double want_dg = 0;
          for (int i = 0; i < K; ++i)
            for (int j = 0; j < V; ++j) {
              const double of_o = c.has_d_o ? d_o.at(t0 + t, hv, j) : 0;
              d[i * V + j] += scale * qn[t] * q.at(t0 + t, h, i) * of_o;
              dr[i] += after[i * V + j] * of_o;
              dw[i] += d[i * V + j] * z[t] * v.at(t0 + t, hv, j);
              dz[j] += d[i * V + j] * kn[t] * k.at(t0 + t, h, i);
              want_dg += a[t] * d[i * V + j] * before[i * V + j];
              d[i * V + j] *= a[t];
            }
          double q_dr = 0, k_dw = 0, want_beta = 0;
          for (int i = 0; i < K; ++i) q_dr += q.at(t0 + t, h, i) * dr[i], k_dw += k.at(t0 + t, h, i) * dw[i];
          const int head_of_d = hv;
          for (int i = 0; i < K; ++i) {
            const double of_q =
                scale * (qn[t] * dr[i] - (c.norms ? qn[t] * qn[t] * qn[t] * q_dr * q.at(t0 + t, h, i) : 0));
            const double of_k = kn[t] * dw[i] - (c.norms ? kn[t] * kn[t] * kn[t] * k_dw * k.at(t0 + t, h, i) : 0);
            dq.add(got.dq.at(t0 + t, head_of_d, i), of_q), dk.add(got.dk.at(t0 + t, head_of_d, i), of_k);
          }
          for (int j = 0; j < V; ++j) {
            dv.add(got.dv.at(t0 + t, hv, j), z[t] * dz[j]);
            want_beta += v.at(t0 + t, hv, j) * dz[j];
          }
          if (c.gate) dbeta.add(got.dbeta.at(t0 + t, hv, 0), want_beta);
          if (c.decay == Decay::kScalar) dg.add(got.dg.at(t0 + t, hv, 0), want_dg);
        }
        for (int i = 0; i < K * V; ++i) d_first.add(got.d_first[head + i], d[i]);
      }

    o.report("o", 6e-3), last.report("final", 6e-3), d_first.report("d_initial", 6e-3);
    dq.report("dq", 1e-2), dk.report("dk", 1e-2), dv.report("dv", 1e-2);
    if (c.decay == Decay::kScalar) dg.report("dg", 2e-2);
    if (c.gate) dbeta.report("dbeta", 2e-2);
    // Between rows nothing is written.
    for (Tensor* t : {&got.o, &got.dv, &got.dq, &got.dk})
      for (int i = 0; i < tokens; ++i)
        for (int j = t->heads * t->dim; j < t->row; ++j)
          if (!std::isnan(t->x[static_cast<size_t>(i) * t->row + j])) return fail("nothing between the rows");
  }

 private:
  const Case& c;
  int N, blocks, tokens, chunks;
  std::vector<int32_t> offsets, chunk_base;
  Tensor q, k, v, d_o, g, beta;
  std::vector<float> first, d_last;
  Rule rule;
  double scale;
};

void test(const Case& c) {
  std::printf("%-24s", c.name.c_str());
  std::fflush(stdout);
  Run run(c);
  Results got = run.device(false), again = run.device(c.packed);
  if (!(same(got.o.x, again.o.x) && same(got.dq.x, again.dq.x) && same(got.dk.x, again.dk.x) &&
        same(got.dv.x, again.dv.x) && same(got.dg.x, again.dg.x) && same(got.dbeta.x, again.dbeta.x) &&
        got.last == again.last && got.d_first == again.d_first && got.states == again.states &&
        got.d_states == again.d_states))
    fail("same bits again, each sequence alone");
  run.check(got);
  std::printf("\n");
  std::fflush(stdout);
}

}  // namespace
}  // namespace fw::cuda

int main(int argc, char** argv) {
  using fw::Decay;
  using fw::cuda::Case;
  if (!fw::cuda::hopper()) return fw::cuda::kNotRun;
  std::vector<Case> cases;
  const auto add = [&](Case c) -> Case& { return cases.emplace_back(std::move(c)); };
  add({"usual", 128, 128, 128, 2, 2, {200}});
  add({"key 64", 64, 64, 64, 1, 1, {256}});
  add({"two sequences, groups", 64, 64, 128, 1, 2, {130, 130}});
  add({"float32", 128, 128, 64, 1, 1, {129}}).bf16 = false;
  {
    Case& c = add({"odd sizes", 64, 37, 75, 1, 1, {70}});
    c.row_padding = 3;
  }
  {
    Case& c = add({"odd sizes, padded rows", 128, 96, 72, 1, 2, {65}});
    c.row_padding = 8;
  }
  {
    Case& c = add({"packed", 64, 64, 72, 2, 2, {65, 0, 1, 128, 3}});
    c.packed = true, c.edge_decays = true;
  }
  {
    Case& c = add({"edge decays", 128, 128, 64, 1, 1, {193}});
    c.edge_decays = true, c.gate = true;
  }
  {
    Case& c = add({"norms, gate", 128, 128, 128, 1, 1, {150}});
    c.norms = c.gate = true;
  }
  {
    Case& c = add({"norms, no decay", 64, 48, 64, 1, 2, {100}});
    c.norms = true, c.decay = Decay::kNone, c.states = false;
  }
  {
    Case& c = add({"constant decay", 128, 128, 128, 2, 2, {140}});
    c.decay = Decay::kConstant;
  }
  {
    Case& c = add({"no d_o", 64, 64, 64, 1, 1, {100}});
    c.has_d_o = false;
  }
  add({"no tokens", 64, 64, 64, 1, 1, {0}});
  for (const Case& c : cases)
    if (argc < 2 || c.name.find(argv[1]) != std::string::npos) fw::cuda::test(c);
  std::printf(fw::cuda::failures == 0 ? "all good\n" : "%d FAILED\n", fw::cuda::failures);
  return fw::cuda::failures == 0 ? 0 : 1;
}
