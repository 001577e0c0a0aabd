// Into and out of the rows of a Mamba-3 layer (ops.def): values spread over R rows, and rows normed, gated and summed.
// Backward of the latter, with a = up z, s = sigmoid(a), m the normed row (times its weight) and c = dy down:
//   dm = c a s        ddown = dy m a s        da = c m (s + a s (1 - s))        dz = sum_j da up        dup = da z
// and through the norm, with n = o rstd and e = dm norm:   d_o = rstd (e - n mean(e n))        dnorm = dm n
#include <cmath>

#include "ops/cpu/operations.h"
#include "ops/cpu/row_blocks.h"

namespace fw::cpu {

template <class T>
void mamba3_expand_forward(const Exec<T>&, const Mamba3Shape& shape, Mat<const T> x, const T* up, Mat<T> rows) {
  const int64_t P = shape.head_dim, R = shape.rank;
  for_row_blocks(RowBlocks::cut(x.rows, R * x.cols), [&](int64_t, int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      for (int64_t h = 0; h < shape.heads; ++h) {
        for (int64_t r = 0; r < R; ++r) {
          const T *in = x.row(t) + h * P, *factor = up + (h * R + r) * P;
          T* out = rows.row(t * R + r) + h * P;
          for (int64_t p = 0; p < P; ++p) out[p] = in[p] * factor[p];
        }
      }
    }
  });
}

template <class T>
void mamba3_expand_backward(const Exec<T>&, const Mamba3Shape& shape, Mat<const T> drows, Mat<const T> x, const T* up,
                            Mat<T> dx, T* dup) {
  const int64_t P = shape.head_dim, R = shape.rank;
  const RowBlocks blocks = RowBlocks::cut(x.rows, R * x.cols);
  PartialSums<T> partial(blocks.count(), R * x.cols);
  for_row_blocks(blocks, [&](int64_t block, int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      std::fill_n(dx.row(t), dx.cols, T(0));
      for (int64_t h = 0; h < shape.heads; ++h) {
        for (int64_t r = 0; r < R; ++r) {
          const T *grad = drows.row(t * R + r) + h * P, *in = x.row(t) + h * P, *factor = up + (h * R + r) * P;
          T *out = dx.row(t) + h * P, *sum = partial.block(block) + (h * R + r) * P;
          for (int64_t p = 0; p < P; ++p) {
            out[p] += grad[p] * factor[p];
            sum[p] += grad[p] * in[p];
          }
        }
      }
    }
  });
  partial.add_to(dup);
}

template <class T>
void mamba3_gate_forward(const Exec<T>&, const Mamba3Shape& shape, Mat<const T> o, Mat<const T> z, const T* up,
                         const T* down, const T* norm, T eps, Mat<T> y, T* rstd) {
  const int64_t H = shape.heads, P = shape.head_dim, R = shape.rank;
  for_row_blocks(RowBlocks::cut(z.rows, 4 * R * z.cols), [&](int64_t, int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      std::fill_n(y.row(t), y.cols, T(0));
      for (int64_t h = 0; h < H; ++h) {
        for (int64_t r = 0; r < R; ++r) {
          const T* in = o.row(t * R + r) + h * P;
          T scale = 1;
          if (norm != nullptr) {
            T squares = 0;
            for (int64_t p = 0; p < P; ++p) squares += in[p] * in[p];
            scale = rstd[(t * R + r) * H + h] = T(1) / std::sqrt(squares / static_cast<T>(P) + eps);
          }
          for (int64_t p = 0; p < P; ++p) {
            const int64_t c = h * P + p, w = (h * R + r) * P + p;
            const T a = up != nullptr ? up[w] * z.row(t)[c] : z.row(t)[c];
            const T m = in[p] * scale * (norm != nullptr ? norm[c] : T(1)) * (down != nullptr ? down[w] : T(1));
            y.row(t)[c] += m * a / (T(1) + std::exp(-a));
          }
        }
      }
    }
  });
}

template <class T>
void mamba3_gate_backward(const Exec<T>&, const Mamba3Shape& shape, Mat<const T> dy, Mat<const T> o, Mat<const T> z,
                          const T* up, const T* down, const T* norm, const T* rstd, Mat<T> d_o, Mat<T> dz, T* dup,
                          T* ddown, T* dnorm) {
  const int64_t H = shape.heads, P = shape.head_dim, R = shape.rank, weights = R * z.cols;
  const RowBlocks blocks = RowBlocks::cut(z.rows, 8 * R * z.cols);
  PartialSums<T> of_up(blocks.count(), up != nullptr ? weights : 0),
      of_down(blocks.count(), down != nullptr ? weights : 0), of_norm(blocks.count(), norm != nullptr ? z.cols : 0);
  for_row_blocks(blocks, [&](int64_t block, int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      std::fill_n(dz.row(t), dz.cols, T(0));
      for (int64_t h = 0; h < H; ++h) {
        for (int64_t r = 0; r < R; ++r) {
          const T* in = o.row(t * R + r) + h * P;
          T* d_in = d_o.row(t * R + r) + h * P;
          const T scale = norm != nullptr ? rstd[(t * R + r) * H + h] : T(1);
          T along = 0;
          for (int64_t p = 0; p < P; ++p) {
            const int64_t c = h * P + p, w = (h * R + r) * P + p;
            const T x = z.row(t)[c], a = up != nullptr ? up[w] * x : x, s = T(1) / (T(1) + std::exp(-a)),
                    weight = norm != nullptr ? norm[c] : T(1);
            const T n = in[p] * scale, m = n * weight, grad = dy.row(t)[c],
                    of_row = down != nullptr ? grad * down[w] : grad;
            const T da = of_row * m * (s + a * s * (T(1) - s)), dm = of_row * a * s;
            dz.row(t)[c] += up != nullptr ? da * up[w] : da;
            if (up != nullptr) of_up.block(block)[w] += da * x;
            if (down != nullptr) of_down.block(block)[w] += grad * m * a * s;
            if (norm != nullptr) of_norm.block(block)[c] += dm * n;
            d_in[p] = dm * weight * scale;
            along += dm * weight * n;
          }
          if (norm == nullptr) continue;
          const T mean = along / static_cast<T>(P) * scale * scale;
          for (int64_t p = 0; p < P; ++p) d_in[p] -= mean * in[p];
        }
      }
    }
  });
  if (up != nullptr) of_up.add_to(dup);
  if (down != nullptr) of_down.add_to(ddown);
  if (norm != nullptr) of_norm.add_to(dnorm);
}

#define FW_INSTANTIATE(T)                                                                                             \
  template void mamba3_expand_forward<T>(const Exec<T>&, const Mamba3Shape&, Mat<const T>, const T*, Mat<T>);         \
  template void mamba3_expand_backward<T>(const Exec<T>&, const Mamba3Shape&, Mat<const T>, Mat<const T>, const T*,   \
                                          Mat<T>, T*);                                                                \
  template void mamba3_gate_forward<T>(const Exec<T>&, const Mamba3Shape&, Mat<const T>, Mat<const T>, const T*,      \
                                       const T*, const T*, T, Mat<T>, T*);                                            \
  template void mamba3_gate_backward<T>(const Exec<T>&, const Mamba3Shape&, Mat<const T>, Mat<const T>, Mat<const T>, \
                                        const T*, const T*, const T*, const T*, Mat<T>, Mat<T>, T*, T*, T*);
FW_INSTANTIATE(float)
FW_INSTANTIATE(double)
#undef FW_INSTANTIATE

}  // namespace fw::cpu
