// Into and out of the rows of a Mamba-3 layer on the device: formulas and gradients as ops/cpu/mamba3_gate.cpp has
// them, head by head. One row without norm and factors is SwiGLU of z and o.
#include "ops/cuda/head_rows.cuh"
#include "ops/cuda/math.cuh"

namespace fw::cuda {
namespace {

template <class T>
struct Spread {
  Accessor2d<const T> x;
  Accessor2d<T> rows;
  const float* up;
  int rank;

  FW_DEVICE void operator()(int64_t t, int64_t first, int dim, int lane, float*) const {
    for_head(first, dim, lane, [&](int64_t c, int i) {
      const float in = x.get(t, c);
      for (int r = 0; r < rank; ++r) rows.set(t * rank + r, c, in * up[(c - i) * rank + r * dim + i]);
    });
  }
};

template <class T>
struct ExpandBackward {
  Accessor2d<const T> drows, x;
  Accessor2d<T> dx;
  const float* up;
  int rank;

  // sums: of up
  FW_DEVICE void operator()(int64_t t, int64_t first, int dim, int lane, float* sums) const {
    for_head(first, dim, lane, [&](int64_t c, int i) {
      const float in = x.get(t, c);
      float sum = 0;
      for (int r = 0; r < rank; ++r) {
        const float grad = drows.get(t * rank + r, c);
        sum += grad * up[(c - i) * rank + r * dim + i];
        sums[r * dim + i] += grad * in;
      }
      dx.set(t, c, sum);
    });
  }
};

// up, down, norm may be null.
template <class T>
struct Gate {
  Accessor2d<const T> o, z;
  const float *up, *down, *norm;
  float eps;
  int rank, heads;
  Accessor2d<T> y;
  float* rstd;

  FW_DEVICE float factor(const float* of, int64_t c, int i, int dim, int r) const {
    return of != nullptr ? of[(c - i) * rank + r * dim + i] : 1.0f;
  }
  FW_DEVICE float scale(int64_t t, int64_t first, int dim, int r) const {
    return norm != nullptr ? rstd[(t * rank + r) * heads + first / dim] : 1.0f;
  }

  FW_DEVICE void operator()(int64_t t, int64_t first, int dim, int lane, float*) const {
    for (int r = 0; norm != nullptr && r < rank; ++r) {
      const float squares =
          head_sum(first, dim, lane, [&](int64_t c, int) { return o.get(t * rank + r, c) * o.get(t * rank + r, c); });
      if (lane == 0) rstd[(t * rank + r) * heads + first / dim] = 1.0f / sqrtf(squares / static_cast<float>(dim) + eps);
    }
    sync_warp();
    for_head(first, dim, lane, [&](int64_t c, int i) {
      const float x = z.get(t, c), weight = norm != nullptr ? norm[c] : 1.0f;
      float sum = 0;
      for (int r = 0; r < rank; ++r) {
        const float a = factor(up, c, i, dim, r) * x;
        sum += o.get(t * rank + r, c) * scale(t, first, dim, r) * weight * factor(down, c, i, dim, r) * a * sigmoid(a);
      }
      y.set(t, c, sum);
    });
  }
};

template <class T>
struct GateBackward {
  Gate<T> of;  // its rstd as forward left it
  Accessor2d<const T> dy;
  Accessor2d<T> d_o, dz;

  // sums: of up and of down where they are, of norm where it is
  FW_DEVICE void operator()(int64_t t, int64_t first, int dim, int lane, float* sums) const {
    const int rank = of.rank, factors = of.up != nullptr ? rank : 0;
    for_head(first, dim, lane, [&](int64_t c, int i) {
      const float x = of.z.get(t, c), weight = of.norm != nullptr ? of.norm[c] : 1.0f, grad = dy.get(t, c);
      float of_z = 0, of_norm = 0;
      for (int r = 0; r < rank; ++r) {
        const float up = of.factor(of.up, c, i, dim, r), a = up * x, s = sigmoid(a),
                    n = of.o.get(t * rank + r, c) * of.scale(t, first, dim, r), m = n * weight;
        const float of_row = grad * of.factor(of.down, c, i, dim, r), da = of_row * m * silu_slope(a, s);
        of_z += da * up;
        of_norm += of_row * a * s * n;
        if (factors > 0) {
          sums[r * dim + i] += da * x;
          sums[(rank + r) * dim + i] += grad * m * a * s;
        }
      }
      if (of.norm != nullptr) sums[2 * factors * dim + i] += of_norm;
      dz.set(t, c, of_z);
    });
    for (int r = 0; r < rank; ++r) {
      const float scale = of.scale(t, first, dim, r);
      const auto of_m = [&](int64_t c, int i) {  // e: the gradient of the normed row
        const float a = of.factor(of.up, c, i, dim, r) * of.z.get(t, c);
        return dy.get(t, c) * of.factor(of.down, c, i, dim, r) * a * sigmoid(a) *
               (of.norm != nullptr ? of.norm[c] : 1.0f);
      };
      float mean = 0;
      if (of.norm != nullptr)
        mean = head_sum(first, dim, lane,
                        [&](int64_t c, int i) { return of_m(c, i) * of.o.get(t * rank + r, c) * scale; }) /
               static_cast<float>(dim);
      for_head(first, dim, lane, [&](int64_t c, int i) {
        d_o.set(t * rank + r, c, scale * (of_m(c, i) - of.o.get(t * rank + r, c) * scale * mean));
      });
    }
  }
};

bool is_plain(const Mamba3Shape& shape, const float* up, const float* norm) {
  return shape.rank == 1 && up == nullptr && norm == nullptr;
}

// to[h, r, p] += sums[r, h, p]
__global__ void __launch_bounds__(256) add_factors_kernel(const float* sums, int rank, int heads, int dim, float* to) {
  const int i = static_cast<int>(block_index_x() * 256 + thread_index());
  if (i >= rank * heads * dim) return;
  const int p = i % dim, r = i / dim % rank, h = i / (dim * rank);
  to[i] += sums[(r * heads + h) * dim + p];
}

// partial [R, runs, H P]: of a factor [H, R, P].
void add_factor_sums(const Mamba3Shape& shape, const float* partial, int64_t runs, float* to, float* sums,
                     void* stream) {
  const int64_t columns = shape.heads * shape.head_dim;
  for (int64_t r = 0; r < shape.rank; ++r)
    set_column_sums(partial + r * runs * columns, runs, columns, sums + r * columns, stream);
  launch(add_factors_kernel, Dim3{static_cast<unsigned>(parts_of(shape.rank * columns, 256))}, 256, 0, stream, sums,
         static_cast<int>(shape.rank), static_cast<int>(shape.heads), static_cast<int>(shape.head_dim), to);
}

}  // namespace

namespace ops {

template <class T>
void mamba3_expand_forward(const Exec<T>& exec, const Mamba3Shape& shape, Mat<const T> x, const Wide<T>* up,
                           Mat<T> rows) {
  for_head_rows(exec, Spread<T>{Accessor2d(x), Accessor2d(rows), up, static_cast<int>(shape.rank)}, x.rows, shape.heads,
                shape.head_dim);
}

template <class T>
void mamba3_expand_backward(const Exec<T>& exec, const Mamba3Shape& shape, Mat<const T> drows, Mat<const T> x,
                            const Wide<T>* up, Mat<T> dx, Wide<T>* dup) {
  const ArenaMark mark(exec.arena);
  float* const sums = factor_sums(exec.arena, shape);
  sum_head_rows(exec,
                ExpandBackward<T>{Accessor2d(drows), Accessor2d(x), Accessor2d(dx), up, static_cast<int>(shape.rank)},
                shape.rank, x.rows, shape.heads, shape.head_dim, [&](const float* partial, int64_t runs) {
                  add_factor_sums(shape, partial, runs, dup, sums, exec.device.stream());
                });
}

template <class T>
void mamba3_gate_forward(const Exec<T>& exec, const Mamba3Shape& shape, Mat<const T> o, Mat<const T> z,
                         const Wide<T>* up, const Wide<T>* down, const Wide<T>* norm, Wide<T> eps, Mat<T> y,
                         Wide<T>* rstd) {
  if (is_plain(shape, up, norm)) return swiglu_forward(exec, z, o, y);
  for_head_rows(exec,
                Gate<T>{Accessor2d(o), Accessor2d(z), up, down, norm, eps, static_cast<int>(shape.rank),
                        static_cast<int>(shape.heads), Accessor2d(y), rstd},
                z.rows, shape.heads, shape.head_dim);
}

template <class T>
void mamba3_gate_backward(const Exec<T>& exec, const Mamba3Shape& shape, Mat<const T> dy, Mat<const T> o,
                          Mat<const T> z, const Wide<T>* up, const Wide<T>* down, const Wide<T>* norm,
                          const Wide<T>* rstd, Mat<T> d_o, Mat<T> dz, Wide<T>* dup, Wide<T>* ddown, Wide<T>* dnorm) {
  if (is_plain(shape, up, norm)) return swiglu_backward(exec, dy, z, o, dz, d_o);
  void* const stream = exec.device.stream();
  const ArenaMark mark(exec.arena);
  const int64_t factors = up != nullptr ? shape.rank : 0, columns = z.cols;
  float* const sums = factors > 0 ? factor_sums(exec.arena, shape) : nullptr;
  const GateBackward<T> back{// only read
                             {Accessor2d(o),
                              Accessor2d(z),
                              up,
                              down,
                              norm,
                              0,
                              static_cast<int>(shape.rank),
                              static_cast<int>(shape.heads),
                              {},
                              const_cast<float*>(rstd)},
                             Accessor2d(dy),
                             Accessor2d(d_o),
                             Accessor2d(dz)};
  sum_head_rows(exec, back, 2 * factors + (norm != nullptr ? 1 : 0), z.rows, shape.heads, shape.head_dim,
                [&](const float* partial, int64_t runs) {
                  if (factors > 0) {
                    add_factor_sums(shape, partial, runs, dup, sums, stream);
                    add_factor_sums(shape, partial + factors * runs * columns, runs, ddown, sums, stream);
                  }
                  if (norm != nullptr)
                    add_column_sums(partial + 2 * factors * runs * columns, runs, columns, dnorm, stream);
                });
}

#define FW_INSTANTIATE(T)                                                                                             \
  template void mamba3_expand_forward<T>(const Exec<T>&, const Mamba3Shape&, Mat<const T>, const float*, Mat<T>);     \
  template void mamba3_expand_backward<T>(const Exec<T>&, const Mamba3Shape&, Mat<const T>, Mat<const T>,             \
                                          const float*, Mat<T>, float*);                                              \
  template void mamba3_gate_forward<T>(const Exec<T>&, const Mamba3Shape&, Mat<const T>, Mat<const T>, const float*,  \
                                       const float*, const float*, float, Mat<T>, float*);                            \
  template void mamba3_gate_backward<T>(const Exec<T>&, const Mamba3Shape&, Mat<const T>, Mat<const T>, Mat<const T>, \
                                        const float*, const float*, const float*, const float*, Mat<T>, Mat<T>,       \
                                        float*, float*, float*);
FW_INSTANTIATE(float)
FW_INSTANTIATE(Bf16)
#undef FW_INSTANTIATE

}  // namespace ops
}  // namespace fw::cuda
