// The trapezoid of a Mamba-3 layer around the recurrence of its rows on the device (ops/cpu/mamba3_rows.cpp has the
// formulas):
// - step and decay,
// - weights,
// - what the token before a pass still writes,
// - what a token's own rows read too much or too little, with the skip.
#include "ops/cuda/elementwise.cuh"
#include "ops/cuda/head_rows.cuh"
#include "ops/cuda/math.cuh"
#include "ops/cuda/sequences.cuh"

namespace fw::cuda {
namespace {

constexpr int kThreads = 256;

struct Rate {
  float value, slope;
};
// max(f(x), floor), and its slope, 0 below the floor.
struct DecayRate {
  bool heavy_tail;
  float floor;
  explicit DecayRate(const Mamba3Decay& d) : heavy_tail(d.heavy_tail), floor(static_cast<float>(d.floor)) {}
  FW_DEVICE Rate operator()(float x) const {
    const float f = heavy_tail ? (x >= 0 ? 1.0f + x : 1.0f / (1.0f - x)) : softplus(x);
    if (f < floor) return {floor, 0.0f};
    return {f, heavy_tail ? (x >= 0 ? 1.0f : f * f) : sigmoid(x)};
  }
};

template <int N>
struct TimeColumns {
  float shift[N];
};
struct Time {
  DecayRate rate;
  const float* bias;

  template <int N>
  FW_DEVICE TimeColumns<N> columns(int64_t c) const {
    TimeColumns<N> of;
    FW_UNROLL for (int k = 0; k < N; ++k) of.shift[k] = bias[c + k];
    return of;
  }
  // in: dt_in, a_in;  out: dt, g
  template <int N, int I, int O>
  FW_DEVICE void operator()(const TimeColumns<N>& of, int64_t, const float (&in)[I][N], float (&out)[O][N]) const {
    FW_UNROLL for (int k = 0; k < N; ++k) {
      out[0][k] = softplus(in[0][k] + of.shift[k]);
      out[1][k] = -rate(in[1][k]).value * out[0][k];
    }
  }
  // in: d_dt, dg, dt_in, a_in;  out: ddt_in, da_in;  sums: of ddt_in
  template <int N, int I, int O>
  FW_DEVICE void operator()(const TimeColumns<N>& of, int64_t, const float (&in)[I][N], float (&out)[O][N],
                            float (&sums)[1][N]) const {
    FW_UNROLL for (int k = 0; k < N; ++k) {
      const float x = in[2][k] + of.shift[k];
      const Rate a = rate(in[3][k]);
      out[0][k] = (in[0][k] - a.value * in[1][k]) * sigmoid(x);
      out[1][k] = -in[1][k] * softplus(x) * a.slope;
      sums[0][k] += out[0][k];
    }
  }
};

// ---- weights: a thread a token and head ------------------------------------------------------------------------------------------------------------------

template <class T>
struct WeightArgs {
  PassSequences sequences;
  int heads, rank;
  int64_t tokens;
  Accessor2d<const T> dt, trap;

  // What a token's rows are written with one token earlier.
  FW_DEVICE float before(int64_t t, int64_t h) const { return sigmoid(-trap.get(t, h)) * dt.get(t, h); }
};

template <class T>
__global__ void __launch_bounds__(kThreads)
    weights_kernel(const WeightArgs<T> a, Accessor2d<const float> g, Accessor2d<float> now, Accessor2d<float> ahead,
                   Accessor2d<T> gate, Accessor2d<float> row_g, Accessor2d<float> first) {
  follow();
  const int64_t item = int64_t{block_index_x()} * kThreads + thread_index(), t = item / a.heads, h = item - t * a.heads;
  if (t < a.sequences.count) {  // one of the sequences, too
    const int64_t begin = a.sequences.offsets[t];
    first.set(t, h, begin < a.sequences.offsets[t + 1] ? a.before(begin, h) : 0.0f);
  }
  if (t >= a.tokens) return;
  const float here = sigmoid(a.trap.get(t, h)) * a.dt.get(t, h);
  const float next = t + 1 < a.sequences.offsets[a.sequences.sequence_of(t) + 1] ? a.before(t + 1, h) : 0.0f;
  now.set(t, h, here);
  ahead.set(t, h, next);
  for (int r = 0; r < a.rank; ++r) {
    gate.set(t * a.rank + r, h, here + next);
    row_g.set(t * a.rank + r, h, r == 0 ? g.get(t, h) : 0.0f);
  }
}

template <class T>
struct WeightGradients {
  Accessor2d<const float> dnow, dahead, drow_g, dfirst;
  Accessor2d<const T> dgate;
  Accessor2d<T> d_dt, dtrap;
  Accessor2d<float> dg;
};

template <class T>
__global__ void __launch_bounds__(kThreads) weight_gradients_kernel(const WeightArgs<T> a, const WeightGradients<T> d) {
  const int64_t item = int64_t{block_index_x()} * kThreads + thread_index(), t = item / a.heads, h = item - t * a.heads;
  if (t >= a.tokens) return;
  const auto of_gate = [&](int64_t at) {
    float sum = 0;
    for (int r = 0; r < a.rank; ++r) sum += d.dgate.get(at * a.rank + r, h);
    return sum;
  };
  const int64_t n = a.sequences.sequence_of(t);
  float before = 0;  // the gradient of what the token before gives this one
  if (t > a.sequences.offsets[n]) {
    before = d.dahead.get(t - 1, h) + of_gate(t - 1);
  } else if (d.dfirst.data != nullptr) {
    before = d.dfirst.get(n, h);
  }
  const float lam = sigmoid(a.trap.get(t, h)), complement = sigmoid(-a.trap.get(t, h)),
              of_now = d.dnow.get(t, h) + of_gate(t);
  d.dtrap.set(t, h, a.dt.get(t, h) * (of_now - before) * lam * complement);
  d.d_dt.set(t, h, d.d_dt.get(t, h) + lam * of_now + complement * before);
  d.dg.set(t, h, d.drow_g.get(t * a.rank, h));
}

// ---- carry: a block a sequence and head ------------------------------------------------------------------------------------------------------------------

template <class T>
struct CarryArgs {
  const int64_t* offsets;
  int64_t heads, rank, state, head_dim;
  FW_DEVICE int64_t key(int64_t n, int64_t r, int64_t h) const { return ((n * rank + r) * heads + h) * state; }
  FW_DEVICE int64_t value(int64_t n, int64_t r, int64_t h) const { return ((n * rank + r) * heads + h) * head_dim; }
};

template <class T>
__global__ void __launch_bounds__(kThreads)
    carry_kernel(const CarryArgs<T> a, Accessor2d<const float> first, Accessor2d<const T> k_rows,
                 Accessor2d<const T> v_rows, T* k_last, T* v_last, float* s) {
  follow();
  const int64_t n = block_index_x() / a.heads, h = block_index_x() % a.heads, end = a.offsets[n + 1],
                size = a.state * a.head_dim;
  if (a.offsets[n] == end) return;
  float* const to = s + int64_t{block_index_x()} * size;
  const float weight = first.get(n, h);
  for (int64_t i = thread_index(); i < size; i += kThreads) {
    const int64_t c = i / a.head_dim, p = i - c * a.head_dim;
    float sum = 0;
    for (int64_t r = 0; r < a.rank; ++r)
      sum += number(k_last[a.key(n, r, h) + c]) * number(v_last[a.value(n, r, h) + p]);
    to[i] += weight * sum;
  }
  sync_threads();  // they have been read
  for (int64_t i = thread_index(); i < a.rank * a.state; i += kThreads) {
    const int64_t r = i / a.state, c = i - r * a.state;
    k_last[a.key(n, r, h) + c] = k_rows.data[((end - 1) * a.rank + r) * k_rows.stride + h * a.state + c];
  }
  for (int64_t i = thread_index(); i < a.rank * a.head_dim; i += kThreads) {
    const int64_t r = i / a.head_dim, p = i - r * a.head_dim;
    v_last[a.value(n, r, h) + p] = v_rows.data[((end - 1) * a.rank + r) * v_rows.stride + h * a.head_dim + p];
  }
}

template <class T>
__global__ void __launch_bounds__(kThreads)
    carry_gradients_kernel(const CarryArgs<T> a, const float* ds, Accessor2d<const float> first, const T* k_last,
                           const T* v_last, Accessor2d<float> dfirst, T* dk_last, T* dv_last) {
  float* const sums = reinterpret_cast<float*>(shared_memory());  // [warps]
  const int64_t n = block_index_x() / a.heads, h = block_index_x() % a.heads;
  const int lane = static_cast<int>(lane_index()), warp = static_cast<int>(warp_index());
  const float* const of = ds + int64_t{block_index_x()} * a.state * a.head_dim;
  const float weight = first.get(n, h);
  float all = 0;
  for (int64_t i = warp; i < a.rank * a.state; i += kThreads / 32) {
    const int64_t r = i / a.state, c = i - r * a.state;
    float along = 0;
    for (int64_t p = lane; p < a.head_dim; p += 32)
      along += of[c * a.head_dim + p] * number(v_last[a.value(n, r, h) + p]);
    along = warp_sum(along);
    all += number(k_last[a.key(n, r, h) + c]) * along;
    if (dk_last != nullptr && lane == 0) dk_last[a.key(n, r, h) + c] = stored<T>(weight * along);
  }
  if (lane == 0) sums[warp] = all;
  sync_threads();
  if (thread_index() == 0) {
    float sum = 0;
    for (int w = 0; w < kThreads / 32; ++w) sum += sums[w];
    dfirst.set(n, h, sum);
  }
  if (dv_last == nullptr) return;
  for (int64_t i = thread_index(); i < a.rank * a.head_dim; i += kThreads) {
    const int64_t r = i / a.head_dim, p = i - r * a.head_dim;
    float sum = 0;
    for (int64_t c = 0; c < a.state; ++c) sum += number(k_last[a.key(n, r, h) + c]) * of[c * a.head_dim + p];
    dv_last[a.value(n, r, h) + p] = stored<T>(weight * sum);
  }
}

// ---- near: forward a thread a packet of a token's columns; backward neighbouring lanes a token and head ---------------------------------------------------

template <class T>
struct DiagArgs {
  int heads, dim, rank;
  int64_t tokens;
  Accessor2d<const float> qk_self, now, ahead;
  Mat<const T> v, d_o;
  const float* skip;
  Mat<T> o, dv;
  Accessor2d<float> dqk_self, dnow, dahead;
  float* of_skip;  // [T, H]

  // What met_ij is multiplied with, and the weight of row j in row i.
  FW_DEVICE float factor(int64_t t, int h, int i, int j) const { return j <= i ? -ahead.get(t, h) : now.get(t, h); }
  FW_DEVICE int index(int h, int i, int j) const { return (h * rank + i) * rank + j; }
  FW_DEVICE float weight(int64_t t, int h, int i, int j) const {
    return factor(t, h, i, j) * qk_self.get(t, index(h, i, j)) + (i == j && skip != nullptr ? skip[h] : 0.0f);
  }
};

template <class T, int N, bool kOneRow>
__global__ void __launch_bounds__(kElementThreads) diag_kernel(const DiagArgs<T> a, const Cut cut) {
  follow();
  constexpr int kAhead = kOneRow ? 4 : 1;
  const PacketCoord coord(cut);
  if (coord.packet >= cut.packets) return;
  const int64_t c = coord.packet * N, down = kElementThreads >> cut.log_across,
                first = coord.block * down * kAhead + coord.row;
  const int h = static_cast<int>(c) / a.dim;
  Packet<T, N> o[kAhead], v[kAhead];
  if constexpr (kOneRow) {
    FW_UNROLL for (int i = 0; i < kAhead; ++i) {
      const int64_t t = first + i * down;
      if (t >= a.tokens) continue;
      o[i].load(a.o.data + t * a.o.stride + c);
      v[i].load(a.v.data + t * a.v.stride + c);
    }
  }
  const int rank = kOneRow ? 1 : a.rank;
  FW_UNROLL for (int ahead = 0; ahead < kAhead; ++ahead) {
    const int64_t t = first + ahead * down;
    if (t >= a.tokens) continue;
    for (int i = 0; i < rank; ++i) {
      T* const row = a.o.data + (t * rank + i) * a.o.stride + c;
      float sum[N], x[N];
      if constexpr (!kOneRow) o[0].load(row);
      o[ahead].get(sum);
      for (int j = 0; j < rank; ++j) {
        const float weight = a.weight(t, h, i, j);
        if constexpr (!kOneRow) v[0].load(a.v.data + (t * rank + j) * a.v.stride + c);
        v[ahead].get(x);
        FW_UNROLL for (int k = 0; k < N; ++k) sum[k] += weight * x[k];
      }
      o[ahead].set(sum);
      o[ahead].store(row);
    }
  }
}

FW_DEVICE float lanes_sum(float x, int lanes) {
  for (int mask = lanes / 2; mask > 0; mask /= 2) x += shuffle_xor(x, mask);
  return x;
}

// lanes: a power of two; one row of one packet a lane (kOneRow) stays in registers, several heads of which are asked
// for at a time.
template <class T, int N, bool kOneRow>
__global__ void __launch_bounds__(kThreads) diag_gradients_kernel(const DiagArgs<T> a, int lanes) {
  constexpr int kAhead = kOneRow ? 4 : 1;
  const int slots = kThreads / lanes, slot = static_cast<int>(thread_index()) / lanes,
            lane = static_cast<int>(thread_index()) % lanes;
  const int64_t first = int64_t{block_index_x()} * slots * kAhead + slot, heads = a.tokens * a.heads;
  Packet<T, N> grad[kAhead], v[kAhead], dv[kAhead];
  const auto at = [&](const auto& m, int64_t row, int64_t h) { return m.data + row * m.stride + h * a.dim; };
  if constexpr (kOneRow) {
    FW_UNROLL for (int i = 0; i < kAhead; ++i) {
      const int64_t item = first + int64_t{i} * slots, t = static_cast<unsigned>(item) / static_cast<unsigned>(a.heads),
                    h = item - t * a.heads;
      if (item >= heads || lane * N >= a.dim) continue;
      grad[i].load(at(a.d_o, t, h) + lane * N);
      v[i].load(at(a.v, t, h) + lane * N);
      dv[i].load(at(a.dv, t, h) + lane * N);
    }
  }
  FW_UNROLL for (int ahead = 0; ahead < kAhead; ++ahead) {
    const int64_t item = first + int64_t{ahead} * slots,
                  t = static_cast<unsigned>(item) / static_cast<unsigned>(a.heads);
    const int h = static_cast<int>(item - t * a.heads), rank = kOneRow ? 1 : a.rank;
    const bool there = item < heads;  // lanes without a head take part in the sums
    float of_now = 0, of_ahead = 0, of_skip = 0;
    for (int i = 0; i < rank; ++i) {
      for (int j = 0; j < rank; ++j) {
        float sum = 0;
        const auto add = [&] {
          float x[N], y[N];
          grad[ahead].get(x);
          v[ahead].get(y);
          FW_UNROLL for (int k = 0; k < N; ++k) sum += x[k] * y[k];
        };
        if constexpr (kOneRow) {
          if (there && lane * N < a.dim) add();
        } else {
          for (int c = lane * N; there && c < a.dim; c += lanes * N) {
            grad[0].load(at(a.d_o, t * rank + i, h) + c);
            v[0].load(at(a.v, t * rank + j, h) + c);
            add();
          }
        }
        sum = lanes_sum(sum, lanes);
        if (!there) continue;
        const float product = a.qk_self.get(t, a.index(h, i, j));
        (j <= i ? of_ahead : of_now) += (j <= i ? -product : product) * sum;
        if (i == j) of_skip += sum;
        if (lane == 0) a.dqk_self.set(t, a.index(h, i, j), a.factor(t, h, i, j) * sum);
      }
    }
    if (!there) continue;
    if (lane == 0) {
      a.dnow.set(t, h, of_now);
      a.dahead.set(t, h, of_ahead);
      if (a.of_skip != nullptr) a.of_skip[item] = of_skip;
    }
    for (int j = 0; j < rank; ++j) {
      const auto add_to = [&](int c) {
        T* const to = at(a.dv, t * rank + j, h) + c;
        float sum[N], x[N];
        if constexpr (!kOneRow) dv[0].load(to);
        dv[ahead].get(sum);
        for (int i = 0; i < rank; ++i) {
          const float weight = a.weight(t, h, i, j);
          if constexpr (!kOneRow) grad[0].load(at(a.d_o, t * rank + i, h) + c);
          grad[ahead].get(x);
          FW_UNROLL for (int k = 0; k < N; ++k) sum[k] += weight * x[k];
        }
        dv[ahead].set(sum);
        dv[ahead].store(to);
      };
      if constexpr (kOneRow) {
        if (lane * N < a.dim) add_to(lane * N);
      } else {
        for (int c = lane * N; c < a.dim; c += lanes * N) add_to(c);
      }
    }
  }
}

// in: one number a column;  sums: of it
struct Sum : Plain {
  template <int N, int I, int O>
  FW_DEVICE void operator()(const Nothing&, int64_t, const float (&in)[I][N], float (&)[O][N],
                            float (&sums)[1][N]) const {
    FW_UNROLL for (int k = 0; k < N; ++k) sums[0][k] += in[0][k];
  }
};

template <class T>
DiagArgs<T> diag_args(const Mamba3Shape& shape, Mat<const float> qk_self, Mat<const T> v, Mat<const float> now,
                      Mat<const float> ahead, const float* skip) {
  DiagArgs<T> a{};
  a.heads = static_cast<int>(shape.heads), a.dim = static_cast<int>(shape.head_dim),
  a.rank = static_cast<int>(shape.rank), a.tokens = now.rows;
  a.qk_self = Accessor2d(qk_self), a.now = Accessor2d(now), a.ahead = Accessor2d(ahead), a.v = v, a.skip = skip;
  return a;
}

template <class T>
WeightArgs<T> weight_args(const Mamba3Shape& shape, Mat<const T> dt, Mat<const T> trap, const PassLayout& layout) {
  return {PassSequences(layout), static_cast<int>(shape.heads), static_cast<int>(shape.rank), dt.rows, Accessor2d(dt),
          Accessor2d(trap)};
}

template <class T>
CarryArgs<T> carry_args(const Mamba3Shape& shape, const int64_t* offsets) {
  return {offsets, shape.heads, shape.rank, shape.state, shape.head_dim};
}

}  // namespace

namespace ops {

template <class T>
void mamba3_time_forward(const Exec<T>& exec, const Mamba3Decay& decay, Mat<const T> dt_in, Mat<const T> a_in,
                         const Wide<T>* bias, Mat<T> dt, Mat<Wide<T>> g) {
  elementwise<4>(Time{DecayRate(decay), bias}, dt.rows, dt.cols, operands(dt_in, a_in), operands(dt, g),
                 exec.device.stream());
}

template <class T>
void mamba3_time_backward(const Exec<T>& exec, const Mamba3Decay& decay, Mat<const T> d_dt, Mat<const Wide<T>> dg,
                          Mat<const T> dt_in, Mat<const T> a_in, const Wide<T>* bias, Mat<T> ddt_in, Mat<T> da_in,
                          Wide<T>* dbias) {
  elementwise_sums<1, 2>(exec, Time{DecayRate(decay), bias}, dt_in.rows, dt_in.cols, operands(d_dt, dg, dt_in, a_in),
                         operands(ddt_in, da_in), [&](const float* partial, int64_t blocks) {
                           add_column_sums(partial, blocks, dt_in.cols, dbias, exec.device.stream());
                         });
}

template <class T>
void mamba3_weights_forward(const Exec<T>& exec, const Mamba3Shape& shape, Mat<const T> dt, Mat<const T> trap,
                            Mat<const Wide<T>> g, const PassLayout& layout, Mat<Wide<T>> now, Mat<Wide<T>> ahead,
                            Mat<T> gate, Mat<Wide<T>> row_g, Mat<Wide<T>> first) {
  const int64_t items = std::max(dt.rows, layout.host.count()) * shape.heads;
  launch_following(dt.rows, weights_kernel<T>, Dim3{static_cast<unsigned>(parts_of(items, kThreads))}, kThreads, 0,
                   exec.device.stream(), weight_args<T>(shape, dt, trap, layout), Accessor2d(g), Accessor2d(now),
                   Accessor2d(ahead), Accessor2d(gate), Accessor2d(row_g), Accessor2d(first));
}

template <class T>
void mamba3_weights_backward(const Exec<T>& exec, const Mamba3Shape& shape, Mat<const Wide<T>> dnow,
                             Mat<const Wide<T>> dahead, Mat<const T> dgate, Mat<const Wide<T>> drow_g,
                             Mat<const Wide<T>> dfirst, Mat<const T> dt, Mat<const T> trap, const PassLayout& layout,
                             Mat<T> d_dt, Mat<T> dtrap, Mat<Wide<T>> dg) {
  const WeightGradients<T> d{Accessor2d(dnow),  Accessor2d(dahead), Accessor2d(drow_g), Accessor2d(dfirst),
                             Accessor2d(dgate), Accessor2d(d_dt),   Accessor2d(dtrap),  Accessor2d(dg)};
  launch(weight_gradients_kernel<T>, Dim3{static_cast<unsigned>(parts_of(dt.rows * shape.heads, kThreads))}, kThreads,
         0, exec.device.stream(), weight_args<T>(shape, dt, trap, layout), d);
}

template <class T>
void mamba3_carry_forward(const Exec<T>& exec, const Mamba3Shape& shape, Mat<const Wide<T>> first, Mat<const T> k_rows,
                          Mat<const T> v_rows, const PassLayout& layout, T* k_last, T* v_last, Wide<T>* s) {
  launch_following(k_rows.rows, carry_kernel<T>, Dim3{static_cast<unsigned>(layout.host.count() * shape.heads)},
                   kThreads, 0, exec.device.stream(), carry_args<T>(shape, layout.offsets), Accessor2d(first),
                   Accessor2d(k_rows), Accessor2d(v_rows), k_last, v_last, s);
}

template <class T>
void mamba3_carry_backward(const Exec<T>& exec, const Mamba3Shape& shape, const Wide<T>* ds, Mat<const Wide<T>> first,
                           const T* k_last, const T* v_last, Mat<Wide<T>> dfirst, T* dk_last, T* dv_last) {
  launch(carry_gradients_kernel<T>, Dim3{static_cast<unsigned>(first.rows * shape.heads)}, kThreads,
         sizeof(float) * (kThreads / 32), exec.device.stream(), carry_args<T>(shape, nullptr), ds, Accessor2d(first),
         k_last, v_last, Accessor2d(dfirst), dk_last, dv_last);
}

template <class T>
void mamba3_diag_forward(const Exec<T>& exec, const Mamba3Shape& shape, Mat<const Wide<T>> qk_self, Mat<const T> v,
                         Mat<const Wide<T>> now, Mat<const Wide<T>> ahead, const Wide<T>* skip, Mat<T> o) {
  constexpr int kN = kPacket<T>;
  DiagArgs<T> a = diag_args(shape, qk_self, v, now, ahead, skip);
  a.o = o;
  const auto run = [&]<int N, bool kOneRow>() {
    const Cut cut(a.tokens, o.cols / N, 8);
    launch_following(a.tokens, diag_kernel<T, N, kOneRow>,
                     Dim3{static_cast<unsigned>(cut.row_blocks(cut.down() * (kOneRow ? 4 : 1)) * cut.column_blocks)},
                     kElementThreads, 0, exec.device.stream(), a, cut);
  };
  const bool packets = shape.head_dim % kN == 0 && in_packets<T>(o.data, o.stride) && in_packets<T>(v.data, v.stride);
  if (shape.rank == 1) {
    packets ? run.template operator()<kN, true>() : run.template operator()<1, true>();
  } else {
    packets ? run.template operator()<kN, false>() : run.template operator()<1, false>();
  }
}

template <class T>
void mamba3_diag_backward(const Exec<T>& exec, const Mamba3Shape& shape, Mat<const T> d_o, Mat<const Wide<T>> qk_self,
                          Mat<const T> v, Mat<const Wide<T>> now, Mat<const Wide<T>> ahead, const Wide<T>* skip,
                          Mat<T> dv, Mat<Wide<T>> dqk_self, Mat<Wide<T>> dnow, Mat<Wide<T>> dahead, Wide<T>* dskip) {
  constexpr int kN = kPacket<T>;
  const int64_t heads = now.rows * shape.heads;
  if (heads == 0) return;
  void* const stream = exec.device.stream();
  const ArenaMark mark(exec.arena);
  DiagArgs<T> a = diag_args(shape, qk_self, v, now, ahead, skip);
  a.d_o = d_o, a.dv = dv, a.dqk_self = Accessor2d(dqk_self), a.dnow = Accessor2d(dnow), a.dahead = Accessor2d(dahead);
  a.of_skip = skip != nullptr ? near_sums(exec.arena, now.rows, shape.heads) : nullptr;
  const auto run = [&]<int N, bool kOneRow>(int lanes) {
    const int64_t of_block = int64_t{kThreads / lanes} * (kOneRow ? 4 : 1);
    launch(diag_gradients_kernel<T, N, kOneRow>, Dim3{static_cast<unsigned>(parts_of(heads, of_block))}, kThreads, 0,
           stream, a, lanes);
  };
  const auto with_lanes = [&]<int N>() {
    int lanes = 1;
    while (lanes < 32 && lanes * N < a.dim) lanes *= 2;
    shape.rank == 1 && lanes* N >= a.dim ? run.template operator()<N, true>(lanes)
                                         : run.template operator()<N, false>(lanes);
  };
  const bool packets = a.dim % kN == 0 && in_packets<T>(d_o.data, d_o.stride) && in_packets<T>(v.data, v.stride) &&
                       in_packets<T>(dv.data, dv.stride);
  packets ? with_lanes.template operator()<kN>() : with_lanes.template operator()<1>();
  if (skip == nullptr) return;
  elementwise_sums<1, 4>(
      exec, Sum{}, now.rows, shape.heads, operands(Mat<const float>(a.of_skip, now.rows, shape.heads)), Operands<>{},
      [&](const float* partial, int64_t blocks) { add_column_sums(partial, blocks, shape.heads, dskip, stream); });
}

#define FW_INSTANTIATE(T)                                                                                              \
  template void mamba3_time_forward<T>(const Exec<T>&, const Mamba3Decay&, Mat<const T>, Mat<const T>, const float*,   \
                                       Mat<T>, Mat<float>);                                                            \
  template void mamba3_time_backward<T>(const Exec<T>&, const Mamba3Decay&, Mat<const T>, Mat<const float>,            \
                                        Mat<const T>, Mat<const T>, const float*, Mat<T>, Mat<T>, float*);             \
  template void mamba3_weights_forward<T>(const Exec<T>&, const Mamba3Shape&, Mat<const T>, Mat<const T>,              \
                                          Mat<const float>, const PassLayout&, Mat<float>, Mat<float>, Mat<T>,         \
                                          Mat<float>, Mat<float>);                                                     \
  template void mamba3_weights_backward<T>(const Exec<T>&, const Mamba3Shape&, Mat<const float>, Mat<const float>,     \
                                           Mat<const T>, Mat<const float>, Mat<const float>, Mat<const T>,             \
                                           Mat<const T>, const PassLayout&, Mat<T>, Mat<T>, Mat<float>);               \
  template void mamba3_carry_forward<T>(const Exec<T>&, const Mamba3Shape&, Mat<const float>, Mat<const T>,            \
                                        Mat<const T>, const PassLayout&, T*, T*, float*);                              \
  template void mamba3_carry_backward<T>(const Exec<T>&, const Mamba3Shape&, const float*, Mat<const float>, const T*, \
                                         const T*, Mat<float>, T*, T*);                                                \
  template void mamba3_diag_forward<T>(const Exec<T>&, const Mamba3Shape&, Mat<const float>, Mat<const T>,             \
                                       Mat<const float>, Mat<const float>, const float*, Mat<T>);                      \
  template void mamba3_diag_backward<T>(const Exec<T>&, const Mamba3Shape&, Mat<const T>, Mat<const float>,            \
                                        Mat<const T>, Mat<const float>, Mat<const float>, const float*, Mat<T>,        \
                                        Mat<float>, Mat<float>, Mat<float>, float*);
FW_INSTANTIATE(float)
FW_INSTANTIATE(Bf16)
#undef FW_INSTANTIATE

}  // namespace ops
}  // namespace fw::cuda
