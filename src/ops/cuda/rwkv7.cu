// Before and after the recurrence of RWKV-7 (Peng et al. 2025) on the device: formulas and gradients as
// ops/cpu/rwkv7.cpp has them, head by head, and the mix with the first layer's value, number by number.
#include "ops/cuda/elementwise.cuh"
#include "ops/cuda/head_rows.cuh"
#include "ops/cuda/math.cuh"

namespace fw::cuda {
namespace {

constexpr float kDecayScale = 0.60653065971263342f;  // exp(-1/2)
constexpr float kLeastNorm = 1e-12f;

// 1 / N of a head's k (.) k_k, and whether it moves with it.
struct Inverse {
  float value;
  bool moves;
};
template <class T>
FW_DEVICE Inverse inverse_norm(const Accessor2d<const T>& k, const float* k_k, float eps, int64_t t, int64_t first,
                               int dim, int lane) {
  const float norm = sqrtf(head_sum(first, dim, lane,
                                    [&](int64_t c, int) {
                                      const float x = k.get(t, c) * k_k[c];
                                      return x * x;
                                    }) +
                           eps);
  if (eps > 0 || norm > kLeastNorm) return {1.0f / norm, true};
  return {1.0f / kLeastNorm, false};
}

template <class T>
struct Front {
  Accessor2d<const T> decay, rate, k;
  Accessor2d<float> g;
  Accessor2d<T> p, f, key;
  const float *k_k, *k_a;
  float eps;

  FW_DEVICE void operator()(int64_t t, int64_t first, int dim, int lane, float*) const {
    const float inverse = inverse_norm(k, k_k, eps, t, first, dim, lane).value;
    for_head(first, dim, lane, [&](int64_t c, int) {
      const float a = sigmoid(rate.get(t, c)), in = k.get(t, c), unit = in * k_k[c] * inverse;
      g.set(t, c, -kDecayScale * sigmoid(decay.get(t, c)));
      p.set(t, c, unit);
      f.set(t, c, unit * a);
      key.set(t, c, in * (1.0f + (a - 1.0f) * k_a[c]));
    });
  }
};

template <class T>
struct FrontBackward {
  Accessor2d<const float> dg;
  Accessor2d<const T> dp, df, dkey, decay, rate, k;
  Accessor2d<T> ddecay, drate, dk;
  const float *k_k, *k_a;
  float eps;

  FW_DEVICE void operator()(int64_t t, int64_t first, int dim, int lane, float* sums) const {
    const Inverse norm = inverse_norm(k, k_k, eps, t, first, dim, lane);
    const float along = head_sum(first, dim, lane, [&](int64_t c, int) {
      return (dp.get(t, c) + df.get(t, c) * sigmoid(rate.get(t, c))) * (k.get(t, c) * k_k[c] * norm.value);
    });
    for_head(first, dim, lane, [&](int64_t c, int i) {
      const float in = k.get(t, c), a = sigmoid(rate.get(t, c)), s = sigmoid(decay.get(t, c)),
                  unit = in * k_k[c] * norm.value;
      const float of_f = df.get(t, c), of_key = dkey.get(t, c);
      const float dkk = (dp.get(t, c) + of_f * a - (norm.moves ? unit * along : 0.0f)) * norm.value;
      ddecay.set(t, c, -kDecayScale * s * (1.0f - s) * dg.get(t, c));
      drate.set(t, c, (of_f * unit + of_key * in * k_a[c]) * a * (1.0f - a));
      dk.set(t, c, dkk * k_k[c] + of_key * (1.0f + (a - 1.0f) * k_a[c]));
      sums[i] += dkk * in;
      sums[dim + i] += of_key * in * (a - 1.0f);
    });
  }
};

template <class T>
struct Bonus {
  Accessor2d<const T> o, r, key, v, gate;
  Accessor2d<T> y;
  const float* r_k;

  FW_DEVICE void operator()(int64_t t, int64_t first, int dim, int lane, float*) const {
    const float sum = head_sum(first, dim, lane, [&](int64_t c, int) { return r.get(t, c) * key.get(t, c) * r_k[c]; });
    for_head(first, dim, lane,
             [&](int64_t c, int) { y.set(t, c, (o.get(t, c) + sum * v.get(t, c)) * gate.get(t, c)); });
  }
};

template <class T>
struct BonusBackward {
  Accessor2d<const T> dy, o, r, key, v, gate;
  Accessor2d<T> d_o, dr, dkey, dv, dgate;
  const float* r_k;

  FW_DEVICE void operator()(int64_t t, int64_t first, int dim, int lane, float* sums) const {
    const float sum = head_sum(first, dim, lane, [&](int64_t c, int) { return r.get(t, c) * key.get(t, c) * r_k[c]; });
    const float dsum =
        head_sum(first, dim, lane, [&](int64_t c, int) { return dy.get(t, c) * gate.get(t, c) * v.get(t, c); });
    for_head(first, dim, lane, [&](int64_t c, int i) {
      const float grad = dy.get(t, c), gated = grad * gate.get(t, c), read = r.get(t, c), written = key.get(t, c);
      dgate.set(t, c, grad * (o.get(t, c) + sum * v.get(t, c)));
      d_o.set(t, c, gated);
      dv.set(t, c, sum * gated);
      dr.set(t, c, dsum * written * r_k[c]);
      dkey.set(t, c, dsum * read * r_k[c]);
      sums[i] += dsum * read * written;
    });
  }
};

// in: x, to, gate
struct Mixed : Plain {
  template <int N, int I, int O>
  FW_DEVICE void operator()(const Nothing&, int64_t, const float (&in)[I][N], float (&out)[O][N]) const {
    FW_UNROLL for (int k = 0; k < N; ++k) out[0][k] = in[0][k] + (in[1][k] - in[0][k]) * sigmoid(in[2][k]);
  }
};
// in: dy, x, to, gate, dto;  out: dx, dto, dgate
struct MixedBackward : Plain {
  template <int N, int I, int O>
  FW_DEVICE void operator()(const Nothing&, int64_t, const float (&in)[I][N], float (&out)[O][N]) const {
    FW_UNROLL for (int k = 0; k < N; ++k) {
      const float s = sigmoid(in[3][k]), grad = in[0][k];
      out[0][k] = grad * (1.0f - s);
      out[1][k] = in[4][k] + grad * s;
      out[2][k] = grad * (in[2][k] - in[1][k]) * s * (1.0f - s);
    }
  }
};

}  // namespace

namespace ops {

template <class T>
void rwkv7_front_forward(const Exec<T>& exec, const Rwkv7Shape& shape, Mat<const T> decay, Mat<const T> rate,
                         Mat<const T> k, const Wide<T>* k_k, const Wide<T>* k_a, Mat<Wide<T>> g, Mat<T> p, Mat<T> f,
                         Mat<T> key) {
  const Front<T> front{
      Accessor2d(decay), Accessor2d(rate), Accessor2d(k), Accessor2d(g), Accessor2d(p),
      Accessor2d(f),     Accessor2d(key),  k_k,           k_a,           static_cast<float>(shape.key_eps)};
  for_head_rows(exec, front, k.rows, k.cols / shape.dim, shape.dim);
}

template <class T>
void rwkv7_front_backward(const Exec<T>& exec, const Rwkv7Shape& shape, Mat<const Wide<T>> dg, Mat<const T> dp,
                          Mat<const T> df, Mat<const T> dkey, Mat<const T> decay, Mat<const T> rate, Mat<const T> k,
                          const Wide<T>* k_k, const Wide<T>* k_a, Mat<T> ddecay, Mat<T> drate, Mat<T> dk, Wide<T>* dk_k,
                          Wide<T>* dk_a) {
  const FrontBackward<T> back{Accessor2d(dg),
                              Accessor2d(dp),
                              Accessor2d(df),
                              Accessor2d(dkey),
                              Accessor2d(decay),
                              Accessor2d(rate),
                              Accessor2d(k),
                              Accessor2d(ddecay),
                              Accessor2d(drate),
                              Accessor2d(dk),
                              k_k,
                              k_a,
                              static_cast<float>(shape.key_eps)};
  sum_head_rows<2>(exec, back, k.rows, k.cols / shape.dim, shape.dim, [&](const float* partial, int64_t runs) {
    add_column_sums(partial, runs, k.cols, dk_k, exec.device.stream());
    add_column_sums(partial + runs * k.cols, runs, k.cols, dk_a, exec.device.stream());
  });
}

template <class T>
void mixed_value_forward(const Exec<T>& exec, Mat<const T> x, Mat<const T> to, Mat<const T> gate, Mat<T> y) {
  elementwise<2>(Mixed{}, x.rows, x.cols, operands(x, to, gate), operands(y), exec.device.stream());
}

template <class T>
void mixed_value_backward(const Exec<T>& exec, Mat<const T> dy, Mat<const T> x, Mat<const T> to, Mat<const T> gate,
                          Mat<T> dx, Mat<T> dto, Mat<T> dgate) {
  elementwise<1>(MixedBackward{}, x.rows, x.cols, operands(dy, x, to, gate, Mat<const T>(dto)),
                 operands(dx, dto, dgate), exec.device.stream());
}

template <class T>
void bonus_gate_forward(const Exec<T>& exec, Mat<const T> o, Mat<const T> r, Mat<const T> key, Mat<const T> v,
                        Mat<const T> gate, const Wide<T>* r_k, int64_t dim, Mat<T> y) {
  for_head_rows(
      exec,
      Bonus<T>{Accessor2d(o), Accessor2d(r), Accessor2d(key), Accessor2d(v), Accessor2d(gate), Accessor2d(y), r_k},
      o.rows, o.cols / dim, dim);
}

template <class T>
void bonus_gate_backward(const Exec<T>& exec, Mat<const T> dy, Mat<const T> o, Mat<const T> r, Mat<const T> key,
                         Mat<const T> v, Mat<const T> gate, const Wide<T>* r_k, int64_t dim, Mat<T> d_o, Mat<T> dr,
                         Mat<T> dkey, Mat<T> dv, Mat<T> dgate, Wide<T>* dr_k) {
  const BonusBackward<T> back{Accessor2d(dy),   Accessor2d(o),    Accessor2d(r),     Accessor2d(key),
                              Accessor2d(v),    Accessor2d(gate), Accessor2d(d_o),   Accessor2d(dr),
                              Accessor2d(dkey), Accessor2d(dv),   Accessor2d(dgate), r_k};
  sum_head_rows<1>(exec, back, o.rows, o.cols / dim, dim, [&](const float* partial, int64_t runs) {
    add_column_sums(partial, runs, o.cols, dr_k, exec.device.stream());
  });
}

#define FW_INSTANTIATE(T)                                                                                           \
  template void rwkv7_front_forward<T>(const Exec<T>&, const Rwkv7Shape&, Mat<const T>, Mat<const T>, Mat<const T>, \
                                       const float*, const float*, Mat<float>, Mat<T>, Mat<T>, Mat<T>);             \
  template void rwkv7_front_backward<T>(const Exec<T>&, const Rwkv7Shape&, Mat<const float>, Mat<const T>,          \
                                        Mat<const T>, Mat<const T>, Mat<const T>, Mat<const T>, Mat<const T>,       \
                                        const float*, const float*, Mat<T>, Mat<T>, Mat<T>, float*, float*);        \
  template void mixed_value_forward<T>(const Exec<T>&, Mat<const T>, Mat<const T>, Mat<const T>, Mat<T>);           \
  template void mixed_value_backward<T>(const Exec<T>&, Mat<const T>, Mat<const T>, Mat<const T>, Mat<const T>,     \
                                        Mat<T>, Mat<T>, Mat<T>);                                                    \
  template void bonus_gate_forward<T>(const Exec<T>&, Mat<const T>, Mat<const T>, Mat<const T>, Mat<const T>,       \
                                      Mat<const T>, const float*, int64_t, Mat<T>);                                 \
  template void bonus_gate_backward<T>(const Exec<T>&, Mat<const T>, Mat<const T>, Mat<const T>, Mat<const T>,      \
                                       Mat<const T>, Mat<const T>, const float*, int64_t, Mat<T>, Mat<T>, Mat<T>,   \
                                       Mat<T>, Mat<T>, float*);
FW_INSTANTIATE(float)
FW_INSTANTIATE(Bf16)
#undef FW_INSTANTIATE

}  // namespace ops
}  // namespace fw::cuda
