// Gated RMSNorm per head on the device: y = n weight act(x) with n = o rstd over the head's columns, x = gate + bias.
// Backward, with h = dy weight act(x):
//   d_o = rstd (h - n mean(h n))     dgate = dy n weight act'(x)     dweight = sum of dy n act(x)
// A row here is a head of a token. As many neighbouring lanes as it has packets, at most 32, have a row, so that its
// sums are shuffles. A row of one packet a lane stays in registers, and several of them are on their way at a time; a
// wider one is read twice. Backward has half as many warps an SM as forward. What a row needs, its rstd too, is asked
// for kAhead rows before. Nothing is computed twice, and dgate, which does not wait for the mean, leaves first.
#include <algorithm>

#include "gpu/launch.h"
#include "ops/cuda/column_sums.h"
#include "ops/cuda/gate_kind.cuh"
#include "ops/cuda/math.cuh"
#include "ops/cuda/operations.h"
#include "ops/cuda/overlap.cuh"
#include "ops/cuda/packets.cuh"
#include "ops/cuda/scratch.h"

namespace fw::cuda {
namespace {

constexpr int kThreads = 256;

template <class T>
struct Heads {
  T* data;
  int64_t stride;
};

template <class T>
struct GatedArgs {
  int64_t rows;                // heads of all tokens
  int heads, dim, lanes;       // lanes of a row
  Heads<const T> o, gate, dy;  // dy: backward
  Heads<T> out, dgate;         // y, or d_o and dgate
  const float* weight;
  float* rstd;
  float eps;
  float* partial;  // backward: [blocks, dim]
  GateKind kind;
  const float* gate_bias = nullptr;  // [heads, dim]
  int rotations = 0;                 // backward: rows of a slot of a block

  template <class V>
  FW_DEVICE V* at(const Heads<V>& tensor, int64_t row) const {
    const int64_t token = static_cast<unsigned>(row) / static_cast<unsigned>(heads);
    return tensor.data + token * tensor.stride + (row - token * heads) * dim;
  }
  // Of the head's columns from c on.
  template <int N>
  FW_DEVICE void add_bias(float (&gate)[N], unsigned head, int c) const {
    if (gate_bias == nullptr) return;
    float bias[N];
    load_floats(gate_bias + head * dim + c, bias);
    FW_UNROLL for (int k = 0; k < N; ++k) gate[k] += bias[k];
  }
};

FW_DEVICE float lanes_sum(float x, int lanes) {
  for (int mask = lanes / 2; mask > 0; mask /= 2) x += shuffle_xor(x, mask);
  return x;
}

// body(c) for the first columns of the lane's packets.
template <int N, bool kKept, class Body>
FW_DEVICE void for_columns(int lane, int lanes, int dim, const Body& body) {
  if constexpr (kKept) {
    if (lane * N < dim) body(lane * N);
  } else {
    for (int c = lane * N; c < dim; c += lanes * N) body(c);
  }
}

// kBias: here, unlike in backward, a bias takes registers, and so warps, from all rows that have none.
template <class T, int N, bool kKept, bool kBias>
__global__ void __launch_bounds__(kThreads) gated_rmsnorm_forward_kernel(const GatedArgs<T> a) {
  constexpr int kAhead = kKept ? 4 : 1;
  const int slots = kThreads / a.lanes, slot = static_cast<int>(thread_index()) / a.lanes,
            lane = static_cast<int>(thread_index()) % a.lanes;
  // A parameter, which no kernel in front writes. After the wait it would stand in line after the weights that the
  // product after this kernel asks for.
  float kept_weight[N] = {};
  if constexpr (kKept) {
    if (lane * N < a.dim) load_floats(a.weight + lane * N, kept_weight);
  }
  follow();
  const int64_t first = int64_t{block_index_x()} * slots * kAhead + slot;
  const bool gated = a.kind != GateKind::kNone;
  Packet<T, N> os[kAhead], gates[kAhead];
  if constexpr (kKept) {
    FW_UNROLL for (int i = 0; i < kAhead; ++i) {
      const int64_t row = first + int64_t{i} * slots;
      if (row >= a.rows || lane * N >= a.dim) continue;
      os[i].load(a.at(a.o, row) + lane * N);
      if (gated) gates[i].load(a.at(a.gate, row) + lane * N);
    }
  }
  FW_UNROLL for (int i = 0; i < kAhead; ++i) {
    const int64_t row = first + int64_t{i} * slots;
    const bool has_row = row < a.rows;  // lanes without one take part in the sums
    float squares = 0;
    if (has_row) {
      for_columns<N, kKept>(lane, a.lanes, a.dim, [&](int c) {
        if constexpr (!kKept) os[i].load(a.at(a.o, row) + c);
        float v[N];
        os[i].get(v);
        FW_UNROLL for (int k = 0; k < N; ++k) squares += v[k] * v[k];
      });
    }
    const float rstd = 1.0f / sqrtf(lanes_sum(squares, a.lanes) / static_cast<float>(a.dim) + a.eps);
    if (!has_row) continue;
    if (lane == 0) a.rstd[row] = rstd;
    for_columns<N, kKept>(lane, a.lanes, a.dim, [&](int c) {
      if constexpr (!kKept) {
        os[i].load(a.at(a.o, row) + c);
        if (gated) gates[i].load(a.at(a.gate, row) + c);
      }
      float v[N], x[N], w[N];
      os[i].get(v);
      gates[i].get(x);
      if constexpr (kBias) a.add_bias(x, static_cast<unsigned>(row) % static_cast<unsigned>(a.heads), c);
      if constexpr (kKept) {
        FW_UNROLL for (int k = 0; k < N; ++k) w[k] = kept_weight[k];
      } else {
        load_floats(a.weight + c, w);
      }
      FW_UNROLL for (int k = 0; k < N; ++k) v[k] = v[k] * rstd * w[k] * gate_of(a.kind, x[k]).act;
      Packet<T, N> out;
      out.set(v);
      out.store(a.at(a.out, row) + c);
    });
  }
}

// dweight of the block: what its slots have in sums [slots, dim], in their order.
template <class T>
FW_DEVICE void store_sums(const GatedArgs<T>& a, const float* sums, int slots) {
  sync_threads();
  for (int c = static_cast<int>(thread_index()); c < a.dim; c += kThreads) {
    float sum = sums[c];
    for (int i = 1; i < slots; ++i) sum += sums[i * a.dim + c];
    a.partial[int64_t{block_index_x()} * a.dim + c] = sum;
  }
}

// Where a row lies; the next one of its slot without a division.
struct RowCoord {
  unsigned token, head;
  template <class T>
  FW_DEVICE RowCoord(const GatedArgs<T>& a, int64_t row)
      : token(static_cast<unsigned>(row) / static_cast<unsigned>(a.heads)),
        head(static_cast<unsigned>(row) - token * static_cast<unsigned>(a.heads)) {}
  FW_DEVICE void step(unsigned tokens, unsigned of_heads, unsigned heads) {
    token += tokens, head += of_heads;
    if (head >= heads) head -= heads, ++token;
  }
  template <class V>
  FW_DEVICE V* at(const Heads<V>& tensor, int dim, int c) const {
    return tensor.data + token * tensor.stride + (static_cast<int>(head) * dim + c);
  }
};

// A slot has the rows slot, slot + slots, ... of its block. Rows of one packet a lane.
template <class T, int N>
__global__ void __launch_bounds__(kThreads) gated_rmsnorm_backward_kernel(const GatedArgs<T> a) {
  constexpr int kAhead = 2;
  follow();                                                 // for the kernel that adds the sums
  float* sums = reinterpret_cast<float*>(shared_memory());  // [slots, dim]
  const int slots = kThreads / a.lanes, slot = static_cast<int>(thread_index()) / a.lanes,
            c = static_cast<int>(thread_index()) % a.lanes * N;
  const unsigned heads = static_cast<unsigned>(a.heads), tokens = static_cast<unsigned>(a.rows / a.heads);
  const unsigned step_tokens = static_cast<unsigned>(slots) / heads, step_heads = static_cast<unsigned>(slots) % heads;
  const bool gated = a.kind != GateKind::kNone, has_columns = c < a.dim;
  float weight[N] = {}, dweight[N] = {};
  if (has_columns) load_floats(a.weight + c, weight);
  struct Row {
    Packet<T, N> o, gate, dy;
    float rstd = 0;
  };
  Row rows[kAhead];
  RowCoord coord(a, int64_t{block_index_x()} * slots * a.rotations + slot), next = coord;
  const auto load_next = [&](Row& row) {
    if (has_columns && next.token < tokens) {
      row.o.load(next.at(a.o, a.dim, c));
      row.dy.load(next.at(a.dy, a.dim, c));
      if (gated) row.gate.load(next.at(a.gate, a.dim, c));
      row.rstd = a.rstd[int64_t{next.token} * heads + next.head];
    }
    next.step(step_tokens, step_heads, heads);
  };
  FW_UNROLL for (int i = 0; i < kAhead; ++i) load_next(rows[i]);
  for (int rotation = 0; rotation < a.rotations; rotation += kAhead) {  // of which kAhead is a divisor
    FW_UNROLL for (int i = 0; i < kAhead; ++i) {
      const Row row = rows[i];
      if (rotation + i + kAhead < a.rotations) load_next(rows[i]);
      const bool has_row = has_columns && coord.token < tokens;  // lanes without one take part in the sums
      float n[N], h[N], dot = 0;
      if (has_row) {
        float x[N];
        row.o.get(n);
        row.dy.get(h);
        row.gate.get(x);
        a.add_bias(x, coord.head, c);
        FW_UNROLL for (int k = 0; k < N; ++k) {
          const Gate gate = gate_of(a.kind, x[k]);
          n[k] *= row.rstd;
          const float of_act = h[k] * n[k];
          dweight[k] += of_act * gate.act;
          x[k] = of_act * weight[k] * gate.slope;
          h[k] *= weight[k] * gate.act;
          dot += h[k] * n[k];
        }
        if (gated) {
          Packet<T, N> out;
          out.set(x);
          out.store(coord.at(a.dgate, a.dim, c));
        }
      }
      const float mean = lanes_sum(dot, a.lanes) / static_cast<float>(a.dim);
      if (has_row) {
        FW_UNROLL for (int k = 0; k < N; ++k) h[k] = row.rstd * (h[k] - n[k] * mean);
        Packet<T, N> out;
        out.set(h);
        out.store(coord.at(a.out, a.dim, c));
      }
      coord.step(step_tokens, step_heads, heads);
    }
  }
  if (has_columns) {
    FW_UNROLL for (int k = 0; k < N; ++k) sums[slot * a.dim + c + k] = dweight[k];
  }
  store_sums(a, sums, slots);
}

// Wider rows, read twice.
template <class T, int N>
__global__ void __launch_bounds__(kThreads) wide_gated_rmsnorm_backward_kernel(const GatedArgs<T> a) {
  follow();
  float* sums = reinterpret_cast<float*>(shared_memory());  // [slots, dim]
  const int slots = kThreads / a.lanes, slot = static_cast<int>(thread_index()) / a.lanes,
            lane = static_cast<int>(thread_index()) % a.lanes;
  const int64_t first = int64_t{block_index_x()} * slots * a.rotations + slot;
  const bool gated = a.kind != GateKind::kNone;
  float* own = sums + slot * a.dim;
  for_columns<N, false>(lane, a.lanes, a.dim, [&](int c) { FW_UNROLL for (int k = 0; k < N; ++k) own[c + k] = 0; });
  for (int rotation = 0; rotation < a.rotations; ++rotation) {
    const int64_t row = first + int64_t{rotation} * slots;
    const bool has_row = row < a.rows;
    const float rstd = has_row ? a.rstd[row] : 0.0f;
    // body(c, normed, gate, dy weight, dy) for the columns from c on
    const auto for_row = [&](const auto& body) {
      if (!has_row) return;
      for_columns<N, false>(lane, a.lanes, a.dim, [&](int c) {
        Packet<T, N> os, gates, dys;
        os.load(a.at(a.o, row) + c);
        dys.load(a.at(a.dy, row) + c);
        if (gated) gates.load(a.at(a.gate, row) + c);
        float n[N], x[N], grad[N], w[N];
        os.get(n);
        gates.get(x);
        a.add_bias(x, static_cast<unsigned>(row) % static_cast<unsigned>(a.heads), c);
        dys.get(grad);
        load_floats(a.weight + c, w);
        FW_UNROLL for (int k = 0; k < N; ++k) n[k] *= rstd;
        body(c, n, x, grad, w);
      });
    };
    float dot = 0;
    for_row([&](int c, const float(&n)[N], const float(&x)[N], const float(&grad)[N], const float(&w)[N]) {
      FW_UNROLL for (int k = 0; k < N; ++k) {
        const float sum = grad[k] * gate_of(a.kind, x[k]).act * n[k];
        dot += sum * w[k];
        own[c + k] += sum;
      }
    });
    const float mean = lanes_sum(dot, a.lanes) / static_cast<float>(a.dim);
    for_row([&](int c, const float(&n)[N], const float(&x)[N], const float(&grad)[N], const float(&w)[N]) {
      float d_o[N], dgate[N];
      FW_UNROLL for (int k = 0; k < N; ++k) {
        const Gate gate = gate_of(a.kind, x[k]);
        const float slope = grad[k] * w[k];
        d_o[k] = rstd * (slope * gate.act - n[k] * mean);
        dgate[k] = slope * n[k] * gate.slope;
      }
      Packet<T, N> out;
      out.set(d_o);
      out.store(a.at(a.out, row) + c);
      if (!gated) return;
      out.set(dgate);
      out.store(a.at(a.dgate, row) + c);
    });
  }
  store_sums(a, sums, slots);
}

// Calls run(N, whether a row is kept) with numbers of the compiler, once the lanes are known.
template <class T, class Run>
void with_form(GatedArgs<T>& a, const Run& run) {
  const auto in_rows = [&](const void* data, int64_t stride) { return data == nullptr || in_packets<T>(data, stride); };
  const bool packets = a.dim % kPacket<T> == 0 && in_rows(a.o.data, a.o.stride) &&
                       in_rows(a.gate.data, a.gate.stride) && in_rows(a.dy.data, a.dy.stride) &&
                       in_rows(a.out.data, a.out.stride) && in_rows(a.dgate.data, a.dgate.stride) &&
                       in_packets<float>(a.weight, 0) && (a.gate_bias == nullptr || in_packets<float>(a.gate_bias, 0));
  const auto with_lanes = [&]<int N>() {
    a.lanes = 1;
    while (a.lanes < 32 && a.lanes * N < a.dim) a.lanes *= 2;
    if (a.lanes * N >= a.dim) {
      run.template operator()<N, true>();
    } else {
      run.template operator()<N, false>();
    }
  };
  packets ? with_lanes.template operator()<kPacket<T>>() : with_lanes.template operator()<1>();
}

}  // namespace

namespace ops {

template <class T>
void gated_rmsnorm_forward(const Exec<T>& exec, Mat<const T> o, Mat<const T> gate, const Wide<T>* gate_bias,
                           const Wide<T>* weight, Wide<T> eps, int64_t head_dim, GateKind kind, Mat<T> y,
                           Wide<T>* rstd) {
  if (o.rows == 0) return;
  const int64_t heads = o.cols / head_dim;
  if (kind == GateKind::kNone) gate = {};
  GatedArgs<T> a{o.rows * heads,
                 static_cast<int>(heads),
                 static_cast<int>(head_dim),
                 0,
                 {o.data, o.stride},
                 {gate.data, gate.stride},
                 {},
                 {y.data, y.stride},
                 {},
                 weight,
                 rstd,
                 eps,
                 nullptr,
                 kind,
                 gate_bias};
  with_form(a, [&]<int N, bool kKept>() {
    const int64_t rows = kThreads / a.lanes * (kKept ? 4 : 1);
    launch_following(o.rows,
                     gate_bias != nullptr ? gated_rmsnorm_forward_kernel<T, N, kKept, true>
                                          : gated_rmsnorm_forward_kernel<T, N, kKept, false>,
                     Dim3{static_cast<unsigned>((a.rows + rows - 1) / rows)}, kThreads, 0, exec.device.stream(), a);
  });
}

template <class T>
void gated_rmsnorm_backward(const Exec<T>& exec, Mat<const T> dy, Mat<const T> o, Mat<const T> gate,
                            const Wide<T>* gate_bias, const Wide<T>* weight, const Wide<T>* rstd, int64_t head_dim,
                            GateKind kind, Mat<T> d_o, Mat<T> dgate, Wide<T>* dweight) {
  if (o.rows == 0) return;
  const Arena::Mark mark = exec.arena.mark();
  const int64_t heads = o.cols / head_dim;
  if (kind == GateKind::kNone) gate = {}, dgate = {};
  GatedArgs<T> a{o.rows * heads,
                 static_cast<int>(heads),
                 static_cast<int>(head_dim),
                 0,
                 {o.data, o.stride},
                 {gate.data, gate.stride},
                 {dy.data, dy.stride},
                 {d_o.data, d_o.stride},
                 {dgate.data, dgate.stride},
                 weight,
                 const_cast<float*>(rstd),
                 0,
                 nullptr,
                 kind,
                 gate_bias};  // rstd is only read
  const auto run = [&](auto* kernel, bool kept) {
    const int64_t slots = kThreads / a.lanes;
    a.rotations = kept ? std::max(kHeadNormRotations, a.lanes) : kHeadNormRotations;
    const int64_t blocks = parts_of(a.rows, slots * a.rotations);
    a.partial = partial_sums(exec.arena, head_norm_sums(a.rows), head_dim);
    launch(kernel, Dim3{static_cast<unsigned>(blocks)}, kThreads, sizeof(float) * static_cast<size_t>(slots * head_dim),
           exec.device.stream(), a);
    add_column_sums(a.partial, blocks, head_dim, dweight, exec.device.stream());
  };
  with_form(a, [&]<int N, bool kKept>() {
    if constexpr (kKept) {
      run(gated_rmsnorm_backward_kernel<T, N>, true);
    } else {
      run(wide_gated_rmsnorm_backward_kernel<T, N>, false);
    }
  });
  exec.arena.rewind(mark);
}

#define FW_INSTANTIATE(T)                                                                                         \
  template void gated_rmsnorm_forward<T>(const Exec<T>&, Mat<const T>, Mat<const T>, const float*, const float*,  \
                                         float, int64_t, GateKind, Mat<T>, float*);                               \
  template void gated_rmsnorm_backward<T>(const Exec<T>&, Mat<const T>, Mat<const T>, Mat<const T>, const float*, \
                                          const float*, const float*, int64_t, GateKind, Mat<T>, Mat<T>, float*);
FW_INSTANTIATE(float)
FW_INSTANTIATE(Bf16)
#undef FW_INSTANTIATE

}  // namespace ops
}  // namespace fw::cuda
