// Before and after the recurrence of RWKV-7 (Peng et al. 2025), head by head. With s = exp(-1/2), kk = k k_k, N its
// norm, p = kk / N:
//   g = -s sigmoid(decay)    a = sigmoid(rate)    f = p a    key = k (1 + (a - 1) k_a)
// and backward, with dP = dp + df a:
//   dkk = (dP - p (dP.p)) / N          da = df p + dkey k k_a     drate = da a (1 - a)     ddecay = g (1 + g / s) dg
//   dk = dkk k_k + dkey (1 + (a - 1) k_a)     dk_k = sum dkk k     dk_a = sum dkey k (a - 1)
// N below its floor is a constant: dkk = dP / N there. With an epsilon N = sqrt(|kk|^2 + eps), and the same formula
// holds.
#include <cmath>

#include "ops/cpu/operations.h"
#include "ops/cpu/row_blocks.h"

namespace fw::cpu {
namespace {

constexpr double kDecayScale = 0.60653065971263342;  // exp(-1/2)
constexpr double kLeastNorm = 1e-12;

template <class T>
T sigmoid(T x) {
  return T(1) / (T(1) + std::exp(-x));
}

// 1 / N of a head's kk, and whether it moves with it.
struct Inverse {
  double value;
  bool moves;
};
template <class T>
Inverse inverse_norm(const T* k, const T* k_k, int64_t dim, double eps) {
  double square = eps;
  for (int64_t i = 0; i < dim; ++i) {
    const double x = static_cast<double>(k[i] * k_k[i]);
    square += x * x;
  }
  const double norm = std::sqrt(square);
  if (eps > 0 || norm > kLeastNorm) return {1 / norm, true};
  return {1 / kLeastNorm, false};
}

}  // namespace

template <class T>
void rwkv7_front_forward(const Exec<T>&, const Rwkv7Shape& shape, Mat<const T> decay, Mat<const T> rate, Mat<const T> k,
                         const T* k_k, const T* k_a, Mat<T> g, Mat<T> p, Mat<T> f, Mat<T> key) {
  for_row_blocks(RowBlocks::cut(k.rows, k.cols), [&](int64_t, int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      for (int64_t first = 0; first < k.cols; first += shape.dim) {
        const T inverse = static_cast<T>(inverse_norm(k.row(t) + first, k_k + first, shape.dim, shape.key_eps).value);
        for (int64_t c = first; c < first + shape.dim; ++c) {
          const T a = sigmoid(rate.row(t)[c]), unit = k.row(t)[c] * k_k[c] * inverse;
          g.row(t)[c] = -static_cast<T>(kDecayScale) * sigmoid(decay.row(t)[c]);
          p.row(t)[c] = unit;
          f.row(t)[c] = unit * a;
          key.row(t)[c] = k.row(t)[c] * (T(1) + (a - T(1)) * k_a[c]);
        }
      }
    }
  });
}

template <class T>
void rwkv7_front_backward(const Exec<T>&, const Rwkv7Shape& shape, Mat<const T> dg, Mat<const T> dp, Mat<const T> df,
                          Mat<const T> dkey, Mat<const T> decay, Mat<const T> rate, Mat<const T> k, const T* k_k,
                          const T* k_a, Mat<T> ddecay, Mat<T> drate, Mat<T> dk, T* dk_k, T* dk_a) {
  const RowBlocks blocks = RowBlocks::cut(k.rows, k.cols);
  PartialSums<T> of_k(blocks.count(), k.cols), of_a(blocks.count(), k.cols);
  for_row_blocks(blocks, [&](int64_t block, int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      for (int64_t first = 0; first < k.cols; first += shape.dim) {
        const Inverse norm = inverse_norm(k.row(t) + first, k_k + first, shape.dim, shape.key_eps);
        const T inverse = static_cast<T>(norm.value);
        T along = 0;
        for (int64_t c = first; norm.moves && c < first + shape.dim; ++c) {
          along += (dp.row(t)[c] + df.row(t)[c] * sigmoid(rate.row(t)[c])) * k.row(t)[c] * k_k[c] * inverse;
        }
        for (int64_t c = first; c < first + shape.dim; ++c) {
          const T key_in = k.row(t)[c], a = sigmoid(rate.row(t)[c]), unit = key_in * k_k[c] * inverse,
                  s = sigmoid(decay.row(t)[c]);
          const T dkk = (dp.row(t)[c] + df.row(t)[c] * a - unit * along) * inverse, of_key = dkey.row(t)[c];
          ddecay.row(t)[c] = -static_cast<T>(kDecayScale) * s * (T(1) - s) * dg.row(t)[c];
          drate.row(t)[c] = (df.row(t)[c] * unit + of_key * key_in * k_a[c]) * a * (T(1) - a);
          dk.row(t)[c] = dkk * k_k[c] + of_key * (T(1) + (a - T(1)) * k_a[c]);
          of_k.block(block)[c] += dkk * key_in;
          of_a.block(block)[c] += of_key * key_in * (a - T(1));
        }
      }
    }
  });
  of_k.add_to(dk_k);
  of_a.add_to(dk_a);
}

template <class T>
void mixed_value_forward(const Exec<T>&, Mat<const T> x, Mat<const T> to, Mat<const T> gate, Mat<T> y) {
  for_row_blocks(RowBlocks::cut(x.rows, x.cols), [&](int64_t, int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      for (int64_t c = 0; c < x.cols; ++c)
        y.row(t)[c] = x.row(t)[c] + (to.row(t)[c] - x.row(t)[c]) * sigmoid(gate.row(t)[c]);
    }
  });
}

template <class T>
void mixed_value_backward(const Exec<T>&, Mat<const T> dy, Mat<const T> x, Mat<const T> to, Mat<const T> gate,
                          Mat<T> dx, Mat<T> dto, Mat<T> dgate) {
  for_row_blocks(RowBlocks::cut(x.rows, x.cols), [&](int64_t, int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      for (int64_t c = 0; c < x.cols; ++c) {
        const T s = sigmoid(gate.row(t)[c]), grad = dy.row(t)[c];
        dgate.row(t)[c] = grad * (to.row(t)[c] - x.row(t)[c]) * s * (T(1) - s);
        dto.row(t)[c] += grad * s;
        dx.row(t)[c] = grad * (T(1) - s);
      }
    }
  });
}

template <class T>
void bonus_gate_forward(const Exec<T>&, Mat<const T> o, Mat<const T> r, Mat<const T> key, Mat<const T> v,
                        Mat<const T> gate, const T* r_k, int64_t dim, Mat<T> y) {
  for_row_blocks(RowBlocks::cut(o.rows, o.cols), [&](int64_t, int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      for (int64_t first = 0; first < o.cols; first += dim) {
        T sum = 0;
        for (int64_t c = first; c < first + dim; ++c) sum += r.row(t)[c] * key.row(t)[c] * r_k[c];
        for (int64_t c = first; c < first + dim; ++c) y.row(t)[c] = (o.row(t)[c] + sum * v.row(t)[c]) * gate.row(t)[c];
      }
    }
  });
}

template <class T>
void bonus_gate_backward(const Exec<T>&, Mat<const T> dy, Mat<const T> o, Mat<const T> r, Mat<const T> key,
                         Mat<const T> v, Mat<const T> gate, const T* r_k, int64_t dim, Mat<T> d_o, Mat<T> dr,
                         Mat<T> dkey, Mat<T> dv, Mat<T> dgate, T* dr_k) {
  const RowBlocks blocks = RowBlocks::cut(o.rows, o.cols);
  PartialSums<T> partial(blocks.count(), o.cols);
  for_row_blocks(blocks, [&](int64_t block, int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      for (int64_t first = 0; first < o.cols; first += dim) {
        T sum = 0, dsum = 0;
        for (int64_t c = first; c < first + dim; ++c) {
          sum += r.row(t)[c] * key.row(t)[c] * r_k[c];
          dsum += dy.row(t)[c] * gate.row(t)[c] * v.row(t)[c];
        }
        for (int64_t c = first; c < first + dim; ++c) {
          const T gated = dy.row(t)[c] * gate.row(t)[c], read = r.row(t)[c], written = key.row(t)[c];
          dgate.row(t)[c] = dy.row(t)[c] * (o.row(t)[c] + sum * v.row(t)[c]);
          d_o.row(t)[c] = gated;
          dv.row(t)[c] = sum * gated;
          dr.row(t)[c] = dsum * written * r_k[c];
          dkey.row(t)[c] = dsum * read * r_k[c];
          partial.block(block)[c] += dsum * read * written;
        }
      }
    }
  });
  partial.add_to(dr_k);
}

#define FW_INSTANTIATE(T)                                                                                             \
  template void rwkv7_front_forward<T>(const Exec<T>&, const Rwkv7Shape&, Mat<const T>, Mat<const T>, Mat<const T>,   \
                                       const T*, const T*, Mat<T>, Mat<T>, Mat<T>, Mat<T>);                           \
  template void rwkv7_front_backward<T>(const Exec<T>&, const Rwkv7Shape&, Mat<const T>, Mat<const T>, Mat<const T>,  \
                                        Mat<const T>, Mat<const T>, Mat<const T>, Mat<const T>, const T*, const T*,   \
                                        Mat<T>, Mat<T>, Mat<T>, T*, T*);                                              \
  template void mixed_value_forward<T>(const Exec<T>&, Mat<const T>, Mat<const T>, Mat<const T>, Mat<T>);             \
  template void mixed_value_backward<T>(const Exec<T>&, Mat<const T>, Mat<const T>, Mat<const T>, Mat<const T>,       \
                                        Mat<T>, Mat<T>, Mat<T>);                                                      \
  template void bonus_gate_forward<T>(const Exec<T>&, Mat<const T>, Mat<const T>, Mat<const T>, Mat<const T>,         \
                                      Mat<const T>, const T*, int64_t, Mat<T>);                                       \
  template void bonus_gate_backward<T>(const Exec<T>&, Mat<const T>, Mat<const T>, Mat<const T>, Mat<const T>,        \
                                       Mat<const T>, Mat<const T>, const T*, int64_t, Mat<T>, Mat<T>, Mat<T>, Mat<T>, \
                                       Mat<T>, T*);
FW_INSTANTIATE(float)
FW_INSTANTIATE(double)
#undef FW_INSTANTIATE

}  // namespace fw::cpu
