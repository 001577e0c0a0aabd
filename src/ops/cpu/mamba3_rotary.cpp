// The rotations of a Mamba-3 layer (ops.def). The angle is kept in turns and summed in double, so that it stays exact
// to its last digit however many tokens there were. Backward begins each chunk's sum from its checkpoint. Let u_t =
// u_{t-1} + tanh(angle_t) dt_t / 2, of which whole revolutions are dropped. A pair is rotated by theta = 2 pi u:
//     (x0, x1) -> (x0 cos - x1 sin, x0 sin + x1 cos)
// In backward b is dy rotated back. dTheta_t is the sum over s >= t of dtheta_s = b_1 x_0 - b_0 x_1 (= dy_1 y_0 - dy_0
// y_1) of queries and keys. Then:
//   dq^i = b + sum_j dmet_ij k^j        dk^j = b + sum_i dmet_ij q^i        dangle = pi dt (1 - tanh^2) dTheta        d_dt = pi sum of tanh dTheta
#include <cmath>

#include "ops/cpu/dot.h"
#include "ops/cpu/operations.h"
#include "ops/cpu/row_blocks.h"

namespace fw::cpu {
namespace {

constexpr double kPi = 3.14159265358979323846;

// The channels of pair a.
struct Pair {
  int64_t first, second;
};
Pair pair_of(const Mamba3Shape& shape, int64_t a) {
  return shape.rotate_half ? Pair{a, a + shape.state / 2} : Pair{2 * a, 2 * a + 1};
}

// tanh of all angles, once for heads that share them.
template <class T>
double* tanh_of(Mat<const T> angle, LocalScratch& scratch) {
  auto* table = scratch.alloc<double>(angle.rows * angle.cols);
  for_row_blocks(RowBlocks::cut(angle.rows, 4 * angle.cols), [&](int64_t, int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      for (int64_t c = 0; c < angle.cols; ++c)
        table[t * angle.cols + c] = std::tanh(static_cast<double>(angle.row(t)[c]));
    }
  });
  return table;
}

// Angles of a head kept in two numbers of T, H NA apart.
template <class T>
struct Kept {
  T* at;
  int64_t apart;

  double get(int64_t a) const { return static_cast<double>(at[a]) + static_cast<double>(at[apart + a]); }
  void set(int64_t a, double turn) const {
    using Value = std::remove_const_t<T>;
    at[a] = static_cast<Value>(turn);
    at[apart + a] = static_cast<Value>(turn - static_cast<double>(at[a]));
  }
};

template <class T>
struct Angles {
  const Mamba3Shape& shape;
  const PassLayout& layout;
  Mat<const T> dt;
  const double* tanhs;  // [T, columns]
  int64_t columns;

  int64_t all() const { return shape.heads * shape.angles; }
  const double* tanh_at(int64_t t, int64_t head) const {
    return tanhs + t * columns + (columns > shape.angles ? head * shape.angles : 0);
  }
  Kept<T> checkpoint(T* checkpoints, int64_t sequence, int64_t chunk, int64_t head) const {
    return {
        checkpoints + (layout.host.begin(sequence) / kRotaryChunk + sequence + chunk) * 2 * all() + head * shape.angles,
        all()};
  }
  // The turns of a chunk's tokens, onto sum [NA]; turns [T, H NA].
  void add_chunk(int64_t begin, int64_t end, int64_t head, double* sum, T* turns) const {
    for (int64_t t = begin; t < end; ++t) {
      const double* of_token = tanh_at(t, head);
      const double half = static_cast<double>(dt.row(t)[head]) / 2;
      T* out = turns + t * all() + head * shape.angles;
      for (int64_t a = 0; a < shape.angles; ++a) {
        sum[a] += of_token[a] * half;
        sum[a] -= std::nearbyint(sum[a]);
        out[a] = static_cast<T>(sum[a]);
      }
    }
  }
  // body(begin, end, chunk's number) for the chunks of a sequence.
  template <class Body>
  void for_chunks(int64_t sequence, const Body& body) const {
    const int64_t end = layout.host.end(sequence);
    int64_t chunk = 0;
    for (int64_t t = layout.host.begin(sequence); t < end; t += kRotaryChunk)
      body(t, std::min(end, t + kRotaryChunk), chunk++);
  }
};

// cos and sin of a head's turns.
template <class T>
void circle(const T* turns, int64_t count, T* cosine, T* sine) {
  for (int64_t a = 0; a < count; ++a) {
    const T theta = static_cast<T>(2 * kPi) * turns[a];
    cosine[a] = std::cos(theta);
    sine[a] = std::sin(theta);
  }
}

// A token's rows of a head with their biases, x [R, N].
template <class T>
void with_biases(const Mamba3Shape& shape, const T* row, const T* bias, int64_t head, T* x) {
  const int64_t N = shape.state;
  for (int64_t r = 0; r < shape.rank; ++r) {
    const T *in = row + (r * shape.groups + head / (shape.heads / shape.groups)) * N,
            *add = bias + (head * shape.rank + r) * N;
    for (int64_t n = 0; n < N; ++n) x[r * N + n] = in[n] + add[n];
  }
}

}  // namespace

template <class T>
void mamba3_rotary_forward(const Exec<T>&, const Mamba3Shape& shape, Mat<const T> q, Mat<const T> k, const T* q_bias,
                           const T* k_bias, Mat<const T> angle, Mat<const T> dt, const PassLayout& layout, T* start,
                           T* checkpoints, Mat<T> q_rows, Mat<T> k_rows, Mat<T> qk_self) {
  const int64_t H = shape.heads, N = shape.state, R = shape.rank, NA = shape.angles;
  LocalScratch scratch;
  const Angles<T> angles{shape, layout, dt, tanh_of(angle, scratch), angle.cols};
  T* turns = scratch.alloc<T>(dt.rows * H * NA);
  parallel_for(layout.host.count() * H, [&](int64_t task) {
    const int64_t sequence = task / H, head = task % H;
    LocalScratch local;
    auto* sum = local.alloc_zero<double>(NA);
    const Kept<T> kept{start == nullptr ? nullptr : start + sequence * 2 * H * NA + head * NA, H * NA};
    for (int64_t a = 0; start != nullptr && a < NA; ++a) sum[a] = kept.get(a);
    angles.for_chunks(sequence, [&](int64_t begin, int64_t end, int64_t chunk) {
      if (checkpoints != nullptr) {
        const Kept<T> checkpoint = angles.checkpoint(checkpoints, sequence, chunk, head);
        for (int64_t a = 0; a < NA; ++a) checkpoint.set(a, sum[a]);
      }
      angles.add_chunk(begin, end, head, sum, turns);
    });
    for (int64_t a = 0; start != nullptr && a < NA; ++a) kept.set(a, sum[a]);
  });
  for_row_blocks(RowBlocks::cut(dt.rows, (2 + R) * R * H * N), [&](int64_t, int64_t begin, int64_t end) {
    LocalScratch local;
    T *cosine = local.alloc<T>(NA), *sine = local.alloc<T>(NA), *queries = local.alloc<T>(R * N),
      *keys = local.alloc<T>(R * N);
    for (int64_t t = begin; t < end; ++t) {
      for (int64_t h = 0; h < H; ++h) {
        circle(turns + (t * H + h) * NA, NA, cosine, sine);
        with_biases(shape, q.row(t), q_bias, h, queries);
        with_biases(shape, k.row(t), k_bias, h, keys);
        for (int64_t i = 0; i < R; ++i) {
          for (int64_t j = 0; j < R; ++j) qk_self.row(t)[(h * R + i) * R + j] = dot(queries + i * N, keys + j * N, N);
        }
        for (int64_t r = 0; r < R; ++r) {
          const auto rotate = [&](const T* in, T* out) {
            std::copy_n(in, N, out);
            for (int64_t a = 0; a < NA; ++a) {
              const auto [i, j] = pair_of(shape, a);
              const T x = out[i], y = out[j];
              out[i] = x * cosine[a] - y * sine[a];
              out[j] = x * sine[a] + y * cosine[a];
            }
          };
          rotate(queries + r * N, q_rows.row(t * R + r) + h * N);
          rotate(keys + r * N, k_rows.row(t * R + r) + h * N);
        }
      }
    }
  });
}

template <class T>
void mamba3_rotary_backward(const Exec<T>&, const Mamba3Shape& shape, Mat<const T> dq_rows, Mat<const T> dk_rows,
                            Mat<const T> dqk_self, Mat<const T> q, Mat<const T> k, const T* q_bias, const T* k_bias,
                            Mat<const T> angle, Mat<const T> dt, const T* checkpoints, const PassLayout& layout,
                            Mat<T> dq, Mat<T> dk, Mat<T> dangle, Mat<T> d_dt, T* dq_bias, T* dk_bias, T* dstart) {
  const int64_t H = shape.heads, N = shape.state, R = shape.rank, NA = shape.angles, shared = H / shape.groups,
                own = angle.cols > NA ? NA : 0;
  LocalScratch scratch;
  const double* tanhs = tanh_of(angle, scratch);
  const Angles<T> angles{shape, layout, dt, tanhs, angle.cols};
  T* turns = scratch.alloc<T>(dt.rows * H * NA);
  parallel_for(layout.host.count() * H, [&](int64_t task) {
    const int64_t sequence = task / H, head = task % H;
    LocalScratch local;
    auto* sum = local.alloc<double>(NA);
    angles.for_chunks(sequence, [&](int64_t begin, int64_t end, int64_t chunk) {
      const Kept<T> checkpoint = angles.checkpoint(const_cast<T*>(checkpoints), sequence, chunk, head);  // only read
      for (int64_t a = 0; a < NA; ++a) sum[a] = checkpoint.get(a);
      angles.add_chunk(begin, end, head, sum, turns);
    });
  });
  auto* dtheta = scratch.alloc<double>(dt.rows * H * NA);
  const RowBlocks blocks = RowBlocks::cut(dt.rows, (4 + R) * R * H * N);
  PartialSums<T> of_q(blocks.count(), H * R * N), of_k(blocks.count(), H * R * N);
  for_row_blocks(blocks, [&](int64_t block, int64_t begin, int64_t end) {
    LocalScratch local;
    T *cosine = local.alloc<T>(NA), *sine = local.alloc<T>(NA), *back = local.alloc<T>(N),
      *queries = local.alloc<T>(R * N), *keys = local.alloc<T>(R * N);
    for (int64_t t = begin; t < end; ++t) {
      std::fill_n(dq.row(t), dq.cols, T(0));
      std::fill_n(dk.row(t), dk.cols, T(0));
      for (int64_t h = 0; h < H; ++h) {
        circle(turns + (t * H + h) * NA, NA, cosine, sine);
        with_biases(shape, q.row(t), q_bias, h, queries);
        with_biases(shape, k.row(t), k_bias, h, keys);
        const T* products = dqk_self.row(t) + h * R * R;
        double* sum = dtheta + (t * H + h) * NA;
        std::fill_n(sum, NA, 0.0);
        for (int64_t r = 0; r < R; ++r) {
          // weights: of the other's rows, each `apart` after the one before it.
          const auto rotate_back = [&](const T* grad, const T* x, const T* others, const T* weights, int64_t apart,
                                       T* d_in, T* d_bias) {
            std::copy_n(grad, N, back);
            for (int64_t a = 0; a < NA; ++a) {
              const auto [i, j] = pair_of(shape, a);
              back[i] = grad[i] * cosine[a] + grad[j] * sine[a];
              back[j] = grad[j] * cosine[a] - grad[i] * sine[a];
              sum[a] += static_cast<double>(back[j] * x[i] - back[i] * x[j]);
            }
            for (int64_t j = 0; j < R; ++j) {
              for (int64_t n = 0; n < N; ++n) back[n] += weights[j * apart] * others[j * N + n];
            }
            for (int64_t n = 0; n < N; ++n) {
              d_in[n] += back[n];
              d_bias[n] += back[n];
            }
          };
          const int64_t in = (r * shape.groups + h / shared) * N, bias = (h * R + r) * N;
          rotate_back(dq_rows.row(t * R + r) + h * N, queries + r * N, keys, products + r * R, 1, dq.row(t) + in,
                      of_q.block(block) + bias);
          rotate_back(dk_rows.row(t * R + r) + h * N, keys + r * N, queries, products + r, R, dk.row(t) + in,
                      of_k.block(block) + bias);
        }
      }
    }
  });
  of_q.add_to(dq_bias);
  of_k.add_to(dk_bias);

  // The sums over the tokens after, in place.
  parallel_for(layout.host.count() * H, [&](int64_t task) {
    const int64_t sequence = task / H, head = task % H;
    LocalScratch local;
    auto* sum = local.alloc_zero<double>(NA);
    for (int64_t t = layout.host.end(sequence); t-- > layout.host.begin(sequence);) {
      double* of_token = dtheta + (t * H + head) * NA;
      for (int64_t a = 0; a < NA; ++a) of_token[a] = sum[a] += of_token[a];
    }
    for (int64_t a = 0; dstart != nullptr && a < NA; ++a)
      dstart[(sequence * H + head) * NA + a] = static_cast<T>(sum[a]);
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

#define FW_INSTANTIATE(T)                                                                                             \
  template void mamba3_rotary_forward<T>(const Exec<T>&, const Mamba3Shape&, Mat<const T>, Mat<const T>, const T*,    \
                                         const T*, Mat<const T>, Mat<const T>, const PassLayout&, T*, T*, Mat<T>,     \
                                         Mat<T>, Mat<T>);                                                             \
  template void mamba3_rotary_backward<T>(const Exec<T>&, const Mamba3Shape&, Mat<const T>, Mat<const T>,             \
                                          Mat<const T>, Mat<const T>, Mat<const T>, const T*, const T*, Mat<const T>, \
                                          Mat<const T>, const T*, const PassLayout&, Mat<T>, Mat<T>, Mat<T>, Mat<T>,  \
                                          T*, T*, T*);
FW_INSTANTIATE(float)
FW_INSTANTIATE(double)
#undef FW_INSTANTIATE

}  // namespace fw::cpu
