// The trapezoid of a Mamba-3 layer around the recurrence of its rows (ops.def, docs/rules/mamba3.md):
// - step and decay,
// - weights,
// - what the token before a pass still writes,
// - what a token's own rows read too much or too little.
//
// With lam = sigmoid(trap), now = lam dt, and before = ahead of the token before it (or first):
//   dtrap = dt (dnow - dbefore) lam (1 - lam)        d_dt = lam dnow + (1 - lam) dbefore
#include <cmath>

#include "ops/cpu/dot.h"
#include "ops/cpu/operations.h"
#include "ops/cpu/row_blocks.h"

namespace fw::cpu {
namespace {

template <class T>
T sigmoid(T x) {
  return T(1) / (T(1) + std::exp(-x));
}
template <class T>
T softplus(T x) {
  return std::max(x, T(0)) + std::log1p(std::exp(-std::abs(x)));  // no exponent above zero
}

template <class T>
T rate(const Mamba3Decay& decay, T x) {
  const T f = decay.heavy_tail ? (x >= T(0) ? T(1) + x : T(1) / (T(1) - x)) : softplus(x);
  return std::max(f, static_cast<T>(decay.floor));
}
// Of the rate in x: 0 below the floor.
template <class T>
T rate_slope(const Mamba3Decay& decay, T x) {
  if (decay.heavy_tail) {
    const T f = x >= T(0) ? T(1) + x : T(1) / (T(1) - x);
    return f < static_cast<T>(decay.floor) ? T(0) : x >= T(0) ? T(1) : f * f;
  }
  return softplus(x) < static_cast<T>(decay.floor) ? T(0) : sigmoid(x);
}

// y += s x
template <class T>
void add_scaled(T s, const T* x, int64_t n, T* y) {
  for (int64_t i = 0; i < n; ++i) y[i] += s * x[i];
}

}  // namespace

template <class T>
void mamba3_time_forward(const Exec<T>&, const Mamba3Decay& decay, Mat<const T> dt_in, Mat<const T> a_in, const T* bias,
                         Mat<T> dt, Mat<T> g) {
  for_row_blocks(RowBlocks::cut(dt.rows, 4 * dt.cols), [&](int64_t, int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      for (int64_t h = 0; h < dt.cols; ++h) {
        const T step = softplus(dt_in.row(t)[h] + bias[h]);
        dt.row(t)[h] = step;
        g.row(t)[h] = -rate(decay, a_in.row(t)[h]) * step;
      }
    }
  });
}

template <class T>
void mamba3_time_backward(const Exec<T>&, const Mamba3Decay& decay, Mat<const T> d_dt, Mat<const T> dg,
                          Mat<const T> dt_in, Mat<const T> a_in, const T* bias, Mat<T> ddt_in, Mat<T> da_in, T* dbias) {
  const RowBlocks blocks = RowBlocks::cut(dt_in.rows, 4 * dt_in.cols);
  PartialSums<T> partial(blocks.count(), dt_in.cols);
  for_row_blocks(blocks, [&](int64_t block, int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      for (int64_t h = 0; h < dt_in.cols; ++h) {
        const T x = dt_in.row(t)[h] + bias[h], a = a_in.row(t)[h], of_g = dg.row(t)[h];
        const T grad = (d_dt.row(t)[h] - rate(decay, a) * of_g) * sigmoid(x);
        da_in.row(t)[h] = -of_g * softplus(x) * rate_slope(decay, a);
        ddt_in.row(t)[h] = grad;
        partial.block(block)[h] += grad;
      }
    }
  });
  partial.add_to(dbias);
}

template <class T>
void mamba3_weights_forward(const Exec<T>&, const Mamba3Shape& shape, Mat<const T> dt, Mat<const T> trap,
                            Mat<const T> g, const PassLayout& layout, Mat<T> now, Mat<T> ahead, Mat<T> gate,
                            Mat<T> row_g, Mat<T> first) {
  const int64_t R = shape.rank;
  parallel_for(layout.host.count(), [&](int64_t n) {
    const int64_t begin = layout.host.begin(n), end = layout.host.end(n);
    for (int64_t h = 0; h < shape.heads; ++h)
      first.row(n)[h] = begin < end ? sigmoid(-trap.row(begin)[h]) * dt.row(begin)[h] : T(0);
    for (int64_t t = begin; t < end; ++t) {
      for (int64_t h = 0; h < shape.heads; ++h) {
        const T here = sigmoid(trap.row(t)[h]) * dt.row(t)[h],
                next = t + 1 < end ? sigmoid(-trap.row(t + 1)[h]) * dt.row(t + 1)[h] : T(0);
        now.row(t)[h] = here;
        ahead.row(t)[h] = next;
        for (int64_t r = 0; r < R; ++r) {
          gate.row(t * R + r)[h] = here + next;
          row_g.row(t * R + r)[h] = r == 0 ? g.row(t)[h] : T(0);
        }
      }
    }
  });
}

template <class T>
void mamba3_weights_backward(const Exec<T>&, const Mamba3Shape& shape, Mat<const T> dnow, Mat<const T> dahead,
                             Mat<const T> dgate, Mat<const T> drow_g, Mat<const T> dfirst, Mat<const T> dt,
                             Mat<const T> trap, const PassLayout& layout, Mat<T> d_dt, Mat<T> dtrap, Mat<T> dg) {
  const int64_t R = shape.rank;
  parallel_for(layout.host.count(), [&](int64_t n) {
    LocalScratch scratch;
    T* before = scratch.alloc<T>(shape.heads);  // the gradient of what the token before a token gives it
    for (int64_t h = 0; h < shape.heads; ++h) before[h] = dfirst.data != nullptr ? dfirst.row(n)[h] : T(0);
    for (int64_t t = layout.host.begin(n); t < layout.host.end(n); ++t) {
      for (int64_t h = 0; h < shape.heads; ++h) {
        T both = 0;
        for (int64_t r = 0; r < R; ++r) both += dgate.row(t * R + r)[h];
        const T lam = sigmoid(trap.row(t)[h]), complement = sigmoid(-trap.row(t)[h]), of_now = dnow.row(t)[h] + both;
        dtrap.row(t)[h] = dt.row(t)[h] * (of_now - before[h]) * lam * complement;
        d_dt.row(t)[h] += lam * of_now + complement * before[h];
        dg.row(t)[h] = drow_g.row(t * R)[h];
        before[h] = dahead.row(t)[h] + both;
      }
    }
  });
}

template <class T>
void mamba3_carry_forward(const Exec<T>&, const Mamba3Shape& shape, Mat<const T> first, Mat<const T> k_rows,
                          Mat<const T> v_rows, const PassLayout& layout, T* k_last, T* v_last, T* s) {
  const int64_t H = shape.heads, N = shape.state, P = shape.head_dim, R = shape.rank;
  parallel_for(layout.host.count() * H, [&](int64_t task) {
    const int64_t n = task / H, h = task % H, end = layout.host.end(n);
    if (layout.host.begin(n) == end) return;
    for (int64_t r = 0; r < R; ++r) {
      T *k = k_last + ((n * R + r) * H + h) * N, *v = v_last + ((n * R + r) * H + h) * P;
      for (int64_t i = 0; i < N; ++i) add_scaled(first.row(n)[h] * k[i], v, P, s + (task * N + i) * P);
      const int64_t row = (end - 1) * R + r;
      std::copy_n(k_rows.row(row) + h * N, N, k);
      std::copy_n(v_rows.row(row) + h * P, P, v);
    }
  });
}

template <class T>
void mamba3_carry_backward(const Exec<T>&, const Mamba3Shape& shape, const T* ds, Mat<const T> first, const T* k_last,
                           const T* v_last, Mat<T> dfirst, T* dk_last, T* dv_last) {
  const int64_t H = shape.heads, N = shape.state, P = shape.head_dim, R = shape.rank;
  parallel_for(first.rows * H, [&](int64_t task) {
    const int64_t n = task / H, h = task % H;
    double sum = 0;
    for (int64_t r = 0; r < R; ++r) {
      const int64_t offset = (n * R + r) * H + h;
      const T *k = k_last + offset * N, *v = v_last + offset * P;
      if (dv_last != nullptr) std::fill_n(dv_last + offset * P, P, T(0));
      for (int64_t i = 0; i < N; ++i) {
        const T* row = ds + (task * N + i) * P;
        const T along = dot(row, v, P);
        sum += static_cast<double>(k[i] * along);
        if (dk_last != nullptr) dk_last[offset * N + i] = first.row(n)[h] * along;
        if (dv_last != nullptr) add_scaled(first.row(n)[h] * k[i], row, P, dv_last + offset * P);
      }
    }
    dfirst.row(n)[h] = static_cast<T>(sum);
  });
}

namespace {

// What row i of a token reads of row j, of its own head.
template <class T>
T diag_weight(int64_t i, int64_t j, T qk_self, T now, T ahead, const T* skip, int64_t head) {
  return (j <= i ? -ahead : now) * qk_self + (i == j && skip != nullptr ? skip[head] : T(0));
}

}  // namespace

template <class T>
void mamba3_diag_forward(const Exec<T>&, const Mamba3Shape& shape, Mat<const T> qk_self, Mat<const T> v,
                         Mat<const T> now, Mat<const T> ahead, const T* skip, Mat<T> o) {
  const int64_t H = shape.heads, P = shape.head_dim, R = shape.rank;
  for_row_blocks(RowBlocks::cut(now.rows, R * R * H * P), [&](int64_t, int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      for (int64_t h = 0; h < H; ++h) {
        for (int64_t i = 0; i < R; ++i) {
          for (int64_t j = 0; j < R; ++j) {
            const T weight =
                diag_weight(i, j, qk_self.row(t)[(h * R + i) * R + j], now.row(t)[h], ahead.row(t)[h], skip, h);
            add_scaled(weight, v.row(t * R + j) + h * P, P, o.row(t * R + i) + h * P);
          }
        }
      }
    }
  });
}

template <class T>
void mamba3_diag_backward(const Exec<T>&, const Mamba3Shape& shape, Mat<const T> d_o, Mat<const T> qk_self,
                          Mat<const T> v, Mat<const T> now, Mat<const T> ahead, const T* skip, Mat<T> dv,
                          Mat<T> dqk_self, Mat<T> dnow, Mat<T> dahead, T* dskip) {
  const int64_t H = shape.heads, P = shape.head_dim, R = shape.rank;
  const RowBlocks blocks = RowBlocks::cut(now.rows, 2 * R * R * H * P);
  PartialSums<T> of_skip(blocks.count(), skip != nullptr ? H : 0);
  for_row_blocks(blocks, [&](int64_t block, int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      for (int64_t h = 0; h < H; ++h) {
        T of_now = 0, of_ahead = 0;
        for (int64_t i = 0; i < R; ++i) {
          const T* grad = d_o.row(t * R + i) + h * P;
          for (int64_t j = 0; j < R; ++j) {
            const int64_t offset = (h * R + i) * R + j;
            const T product = qk_self.row(t)[offset], d_weight = dot(grad, v.row(t * R + j) + h * P, P);
            (j <= i ? of_ahead : of_now) += (j <= i ? -product : product) * d_weight;
            dqk_self.row(t)[offset] = (j <= i ? -ahead.row(t)[h] : now.row(t)[h]) * d_weight;
            if (i == j && skip != nullptr) of_skip.block(block)[h] += d_weight;
            add_scaled(diag_weight(i, j, product, now.row(t)[h], ahead.row(t)[h], skip, h), grad, P,
                       dv.row(t * R + j) + h * P);
          }
        }
        dnow.row(t)[h] = of_now;
        dahead.row(t)[h] = of_ahead;
      }
    }
  });
  if (skip != nullptr) of_skip.add_to(dskip);
}

#define FW_INSTANTIATE(T)                                                                                             \
  template void mamba3_time_forward<T>(const Exec<T>&, const Mamba3Decay&, Mat<const T>, Mat<const T>, const T*,      \
                                       Mat<T>, Mat<T>);                                                               \
  template void mamba3_time_backward<T>(const Exec<T>&, const Mamba3Decay&, Mat<const T>, Mat<const T>, Mat<const T>, \
                                        Mat<const T>, const T*, Mat<T>, Mat<T>, T*);                                  \
  template void mamba3_weights_forward<T>(const Exec<T>&, const Mamba3Shape&, Mat<const T>, Mat<const T>,             \
                                          Mat<const T>, const PassLayout&, Mat<T>, Mat<T>, Mat<T>, Mat<T>, Mat<T>);   \
  template void mamba3_weights_backward<T>(const Exec<T>&, const Mamba3Shape&, Mat<const T>, Mat<const T>,            \
                                           Mat<const T>, Mat<const T>, Mat<const T>, Mat<const T>, Mat<const T>,      \
                                           const PassLayout&, Mat<T>, Mat<T>, Mat<T>);                                \
  template void mamba3_carry_forward<T>(const Exec<T>&, const Mamba3Shape&, Mat<const T>, Mat<const T>, Mat<const T>, \
                                        const PassLayout&, T*, T*, T*);                                               \
  template void mamba3_carry_backward<T>(const Exec<T>&, const Mamba3Shape&, const T*, Mat<const T>, const T*,        \
                                         const T*, Mat<T>, T*, T*);                                                   \
  template void mamba3_diag_forward<T>(const Exec<T>&, const Mamba3Shape&, Mat<const T>, Mat<const T>, Mat<const T>,  \
                                       Mat<const T>, const T*, Mat<T>);                                               \
  template void mamba3_diag_backward<T>(const Exec<T>&, const Mamba3Shape&, Mat<const T>, Mat<const T>, Mat<const T>, \
                                        Mat<const T>, Mat<const T>, const T*, Mat<T>, Mat<T>, Mat<T>, Mat<T>, T*);
FW_INSTANTIATE(float)
FW_INSTANTIATE(double)
#undef FW_INSTANTIATE

}  // namespace fw::cpu
