// The turns of a Mamba-3 layer (ops.def). The angle is kept in turns and summed in double, so that it stays exact to its last digit however many tokens there
// were: with u_t = u_{t-1} + tanh(angle_t) dt_t / 2, of which whole turns are dropped, a pair is turned by theta = 2 pi u,
//   (x0, x1) -> (x0 cos - x1 sin, x0 sin + x1 cos)
// and backward, with y the turned pair and dTheta_t the sum over s >= t of dtheta_s = dy_1 y_0 - dy_0 y_1 of queries and keys:
//   dx = turned back dy        dangle = pi dt (1 - tanh^2) dTheta        d_dt = pi sum of tanh dTheta
#include <cmath>

#include "ops/cpu/operations.h"
#include "ops/cpu/row_blocks.h"

namespace fw::cpu {
namespace {

constexpr double kPi = 3.14159265358979323846;

// The channels of pair a.
struct Pair {
  int64_t first, second;
};
Pair pair_of(const Mamba3Shape& shape, int64_t a) { return shape.halves ? Pair{a, a + shape.state / 2} : Pair{2 * a, 2 * a + 1}; }

// tanh of all angles, once for heads that share them.
template <class T>
double* tanh_of(Mat<const T> angle, LocalScratch& scratch) {
  auto* table = scratch.alloc<double>(angle.rows * angle.cols);
  for_row_blocks(RowBlocks::cut(angle.rows, 4 * angle.cols), [&](int64_t, int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      for (int64_t c = 0; c < angle.cols; ++c) table[t * angle.cols + c] = std::tanh(static_cast<double>(angle.row(t)[c]));
    }
  });
  return table;
}

// cos and sin of a head's turns.
template <class T>
void circle(const T* turns, int64_t count, T* cosine, T* sine) {
  for (int64_t a = 0; a < count; ++a) {
    const T theta = static_cast<T>(2 * kPi) * turns[a];
    cosine[a] = std::cos(theta);
    sine[a] = std::sin(theta);
  }
}

}  // namespace

template <class T>
void mamba3_turn_forward(const Exec<T>&, const Mamba3Shape& shape, Mat<const T> q, Mat<const T> k, const T* q_bias, const T* k_bias, Mat<const T> angle,
                         Mat<const T> dt, const PassLayout& layout, T* start, Mat<T> turns, Mat<T> q_rows, Mat<T> k_rows) {
  const int64_t H = shape.heads, N = shape.state, R = shape.rank, NA = shape.angles, shared = H / shape.groups, own = angle.cols > NA ? NA : 0;
  LocalScratch scratch;
  const double* tanhs = tanh_of(angle, scratch);
  parallel_for(layout.host.count() * H, [&](int64_t task) {
    const int64_t sequence = task / H, head = task % H;
    LocalScratch local;
    auto* sum = local.alloc_zero<double>(NA);
    T* high = start == nullptr ? nullptr : start + sequence * 2 * H * NA + head * NA;
    T* rest = high == nullptr ? nullptr : high + H * NA;
    for (int64_t a = 0; high != nullptr && a < NA; ++a) sum[a] = static_cast<double>(high[a]) + static_cast<double>(rest[a]);
    for (int64_t t = layout.host.begin(sequence); t < layout.host.end(sequence); ++t) {
      const double* of_token = tanhs + t * angle.cols + head * own;
      const double half = static_cast<double>(dt.row(t)[head]) / 2;
      T* out = turns.row(t) + head * NA;
      for (int64_t a = 0; a < NA; ++a) {
        sum[a] += of_token[a] * half;
        sum[a] -= std::nearbyint(sum[a]);
        out[a] = static_cast<T>(sum[a]);
      }
    }
    for (int64_t a = 0; high != nullptr && a < NA; ++a) {
      high[a] = static_cast<T>(sum[a]);
      rest[a] = static_cast<T>(sum[a] - static_cast<double>(high[a]));
    }
  });
  for_row_blocks(RowBlocks::cut(dt.rows, 2 * R * H * N), [&](int64_t, int64_t begin, int64_t end) {
    LocalScratch local;
    T *cosine = local.alloc<T>(NA), *sine = local.alloc<T>(NA);
    for (int64_t t = begin; t < end; ++t) {
      for (int64_t h = 0; h < H; ++h) {
        circle(turns.row(t) + h * NA, NA, cosine, sine);
        for (int64_t r = 0; r < R; ++r) {
          const auto turn = [&](const T* in, const T* bias, T* out) {
            for (int64_t n = 0; n < N; ++n) out[n] = in[n] + bias[n];
            for (int64_t a = 0; a < NA; ++a) {
              const auto [i, j] = pair_of(shape, a);
              const T x = out[i], y = out[j];
              out[i] = x * cosine[a] - y * sine[a];
              out[j] = x * sine[a] + y * cosine[a];
            }
          };
          const int64_t in = (r * shape.groups + h / shared) * N, bias = (h * R + r) * N;
          turn(q.row(t) + in, q_bias + bias, q_rows.row(t * R + r) + h * N);
          turn(k.row(t) + in, k_bias + bias, k_rows.row(t * R + r) + h * N);
        }
      }
    }
  });
}

template <class T>
void mamba3_turn_backward(const Exec<T>&, const Mamba3Shape& shape, Mat<const T> dq_rows, Mat<const T> dk_rows, Mat<const T> q_rows, Mat<const T> k_rows,
                          Mat<const T> angle, Mat<const T> dt, Mat<const T> turns, const PassLayout& layout, Mat<T> dq, Mat<T> dk, Mat<T> dangle, Mat<T> d_dt,
                          T* dq_bias, T* dk_bias, T* dstart) {
  const int64_t H = shape.heads, N = shape.state, R = shape.rank, NA = shape.angles, shared = H / shape.groups, own = angle.cols > NA ? NA : 0;
  LocalScratch scratch;
  const double* tanhs = tanh_of(angle, scratch);
  auto* dtheta = scratch.alloc<double>(dt.rows * H * NA);
  const RowBlocks blocks = RowBlocks::cut(dt.rows, 4 * R * H * N);
  PartialSums<T> of_q(blocks.count(), H * R * N), of_k(blocks.count(), H * R * N);
  for_row_blocks(blocks, [&](int64_t block, int64_t begin, int64_t end) {
    LocalScratch local;
    T *cosine = local.alloc<T>(NA), *sine = local.alloc<T>(NA), *back = local.alloc<T>(N);
    for (int64_t t = begin; t < end; ++t) {
      std::fill_n(dq.row(t), dq.cols, T(0));
      std::fill_n(dk.row(t), dk.cols, T(0));
      for (int64_t h = 0; h < H; ++h) {
        circle(turns.row(t) + h * NA, NA, cosine, sine);
        double* sum = dtheta + (t * H + h) * NA;
        std::fill_n(sum, NA, 0.0);
        for (int64_t r = 0; r < R; ++r) {
          const auto turn_back = [&](const T* grad, const T* turned, T* d_in, T* d_bias) {
            std::copy_n(grad, N, back);
            for (int64_t a = 0; a < NA; ++a) {
              const auto [i, j] = pair_of(shape, a);
              sum[a] += static_cast<double>(grad[j] * turned[i] - grad[i] * turned[j]);
              back[i] = grad[i] * cosine[a] + grad[j] * sine[a];
              back[j] = grad[j] * cosine[a] - grad[i] * sine[a];
            }
            for (int64_t n = 0; n < N; ++n) {
              d_in[n] += back[n];
              d_bias[n] += back[n];
            }
          };
          const int64_t in = (r * shape.groups + h / shared) * N, bias = (h * R + r) * N;
          turn_back(dq_rows.row(t * R + r) + h * N, q_rows.row(t * R + r) + h * N, dq.row(t) + in, of_q.block(block) + bias);
          turn_back(dk_rows.row(t * R + r) + h * N, k_rows.row(t * R + r) + h * N, dk.row(t) + in, of_k.block(block) + bias);
        }
      }
    }
  });
  of_q.add_to(dq_bias);
  of_k.add_to(dk_bias);

  // The sums over the tokens behind, in place.
  parallel_for(layout.host.count() * H, [&](int64_t task) {
    const int64_t sequence = task / H, head = task % H;
    LocalScratch local;
    auto* sum = local.alloc_zero<double>(NA);
    for (int64_t t = layout.host.end(sequence); t-- > layout.host.begin(sequence);) {
      double* of_token = dtheta + (t * H + head) * NA;
      for (int64_t a = 0; a < NA; ++a) of_token[a] = sum[a] += of_token[a];
    }
    for (int64_t a = 0; dstart != nullptr && a < NA; ++a) dstart[(sequence * H + head) * NA + a] = static_cast<T>(sum[a]);
  });
  for_row_blocks(RowBlocks::cut(dt.rows, H * NA), [&](int64_t, int64_t begin, int64_t end) {
    LocalScratch local;
    auto* of_angle = local.alloc<double>(angle.cols);
    for (int64_t t = begin; t < end; ++t) {
      std::fill_n(of_angle, angle.cols, 0.0);
      for (int64_t h = 0; h < H; ++h) {
        const double* sum = dtheta + (t * H + h) * NA;
        const double* of_token = tanhs + t * angle.cols + h * own;
        const double step = static_cast<double>(dt.row(t)[h]);
        double of_step = 0;
        for (int64_t a = 0; a < NA; ++a) {
          of_step += sum[a] * of_token[a];
          of_angle[h * own + a] += sum[a] * step * (1 - of_token[a] * of_token[a]);
        }
        d_dt.row(t)[h] = static_cast<T>(kPi * of_step);
      }
      for (int64_t c = 0; c < angle.cols; ++c) dangle.row(t)[c] = static_cast<T>(kPi * of_angle[c]);
    }
  });
}

#define FW_INSTANTIATE(T)                                                                                                                              \
  template void mamba3_turn_forward<T>(const Exec<T>&, const Mamba3Shape&, Mat<const T>, Mat<const T>, const T*, const T*, Mat<const T>, Mat<const T>, \
                                       const PassLayout&, T*, Mat<T>, Mat<T>, Mat<T>);                                                                 \
  template void mamba3_turn_backward<T>(const Exec<T>&, const Mamba3Shape&, Mat<const T>, Mat<const T>, Mat<const T>, Mat<const T>, Mat<const T>,      \
                                        Mat<const T>, Mat<const T>, const PassLayout&, Mat<T>, Mat<T>, Mat<T>, Mat<T>, T*, T*, T*);
FW_INSTANTIATE(float)
FW_INSTANTIATE(double)
#undef FW_INSTANTIATE

}  // namespace fw::cpu
