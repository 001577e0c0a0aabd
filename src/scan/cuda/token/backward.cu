// Gradients of the recurrence one token at a time, float32 (recurrence.md section 1 and its adjoint). A block takes one
// sequence and value head after the other, with all their value rows, so that sums over V stay inside it. The states
// before the tokens of a stretch of about sqrt(T) tokens are made again from the one at its start, of which a first
// sweep leaves all:
//     Sbar = Diag(alpha) S_{t-1}   u = z - Sbar^T e   dS += r dO^T           dr = S_t dO    dw = dS u   du = dz = dS^T w
//     de = -Sbar du                dSbar = dS - e du^T   dg = sum_v Sbar (.) dSbar          dS_{t-1} = Diag(alpha) dSbar
// Every thread reads back only what it wrote itself. See kernels.h.
//
// Roles: every warp has rows of the state in registers. Sums over values are reduced in two alternating buffers of
// shared memory, and the warp whose turn it is finishes the token while the others go on; one sync_threads() a token.
#include <cmath>

#include "gpu/device.h"
#include "gpu/launch.h"
#include "scan/cuda/common/state/state_rows.cuh"
#include "scan/cuda/kernels.h"
#include "scan/cuda/token_cut.h"

namespace fw::cuda {
namespace {

// What the warps of a block leave for the one that finishes a token: [warp][dr, de, dw, dg][32 kN], then [warp] of sum
// v c dz.
constexpr int kParts = 4;
template <int kN>
constexpr int partial_floats(int warps) {
  return warps * (kParts * 32 * kN + 1);
}

template <int kN>
FW_DEVICE void store_lane(float* p, int lane, const float (&x)[kN]) {
#pragma unroll
  for (int j = 0; j < kN; ++j) p[lane * kN + j] = x[j];
}

// Sum over warps, in order, of one of the parts.
template <int kN>
FW_DEVICE void sum_parts(const float* partial, int part, int warps, int lane, float (&x)[kN]) {
#pragma unroll
  for (int j = 0; j < kN; ++j) x[j] = 0;
  for (int w = 0; w < warps; ++w) {
    const float* p = partial + (w * kParts + part) * 32 * kN + lane * kN;
#pragma unroll
    for (int j = 0; j < kN; ++j) x[j] += p[j];
  }
}

// Rows of the gradients of one sequence and value head.
struct GradientRows : TokenRows {
  float *dm, *dalpha_p, *dbeta_p;  // of the first token
};
FW_DEVICE GradientRows gradient_rows(const Problem& x, const HeadGradients& grads, int n, int hv) {
  const SequenceArg& s = x.sequences;
  GradientRows r;
  find_rows(grads.d, s, n, hv, r);
  const int64_t at = first_token(s, n) * x.HV + hv;
  r.dm = grads.dm != nullptr ? grads.dm + at * x.K : nullptr;
  r.dalpha_p = grads.dalpha_p != nullptr ? grads.dalpha_p + at : nullptr;
  r.dbeta_p = grads.dbeta_p != nullptr ? grads.dbeta_p + at : nullptr;
  return r;
}

FW_DEVICE void store_mean(const Rows& rows, int t, int count, float sum, int lane) {
  for (int i = lane; i < count; i += 32) store_element(rows, t, i, sum / static_cast<float>(count));
}

// From the gradients of a token's streams to those of its inputs (but v and a channel's write gate): one warp.
template <int kN>
FW_DEVICE void finish_token(const Problem& x, const FrontRows& f, const GradientRows& out, const float* partial,
                            int warps, int t, int lane) {
  const int first = lane * kN;
  const Rule& rule = x.rule;
  KeyStreams<kN> d;
  sum_parts<kN>(partial, 0, warps, lane, d.r);
  sum_parts<kN>(partial, 1, warps, lane, d.e);
  sum_parts<kN>(partial, 2, warps, lane, d.w);
  if (out.g.data != nullptr) {
    float dg[kN];
    sum_parts<kN>(partial, 3, warps, lane, dg);
    if (rule.decay == Decay::kChannel) {
      store_channels(out.g, t, first, x.K, dg);
    } else {
      float sum = 0;
#pragma unroll
      for (int j = 0; j < kN; ++j) sum += dg[j];
      sum = group_sum<32>(sum);
      if (lane == 0) store_element(out.g, t, 0, sum);
    }
  }
  const RawKeyRow<kN> row = load_key_row<kN>(x, f, t, lane);
  const FrontScalars<float> s = front_scalars<32, kN>(x, f, row, t, lane);
  const FrontCoefs<float> c = front_coefs(rule, x.scale, s);
  const float z_v = lane < warps ? partial[warps * kParts * 32 * kN + lane] : 0.0f;
  const FrontCoefs<float> dc = sum_coefficient_gradients<32>(key_coefficient_gradients(x, row, d), z_v);
  const FrontScalars<float> ds = front_coefs_vjp(rule, x.scale, s, dc);
  const RawKeyRow<kN> g = key_row_gradients(x, c, ds, row, d);
  if (out.q.data != nullptr) store_channels(out.q, t, first, x.K, g.q);
  if (out.k.data != nullptr) store_channels(out.k, t, first, x.K, g.k);
  if (out.erase_key.data != nullptr) store_channels(out.erase_key, t, first, x.K, g.p);
  if (out.dm != nullptr) {
#pragma unroll
    for (int j = 0; j < kN; ++j) {
      if (first + j < x.K) out.dm[static_cast<int64_t>(t) * x.HV * x.K + first + j] = g.m[j];
    }
  }
  if (out.erase_gate.data != nullptr && rule.erase == Gate::kChannel)
    store_channels(out.erase_gate, t, first, x.K, g.b);
  if (out.erase_gate.data != nullptr && rule.erase == Gate::kAveraged)
    store_mean(out.erase_gate, t, x.K, ds.erase, lane);
  if (out.write_gate.data != nullptr && rule.write == Gate::kAveraged)
    store_mean(out.write_gate, t, x.V, ds.write, lane);
  if (lane != 0) return;
  if (out.erase_gate.data != nullptr && rule.erase == Gate::kScalar) store_element(out.erase_gate, t, 0, ds.erase);
  if (out.write_gate.data != nullptr && rule.write == Gate::kScalar) store_element(out.write_gate, t, 0, ds.write);
  for_all_scalars(
      [t](const Rows& rows, float y) {
        if (rows.data != nullptr) store_element(rows, t, 0, y);
      },
      out, ds);
  if (out.dalpha_p != nullptr) out.dalpha_p[static_cast<int64_t>(t) * x.HV] = ds.alpha_p * s.alpha_p;
  if (out.dbeta_p != nullptr) out.dbeta_p[static_cast<int64_t>(t) * x.HV] = ds.beta_p;
}

// Gradients with respect to one token's key side, of the rows that this warp has seen.
template <int kN>
struct KeyGradients {
  float r[kN] = {}, e[kN] = {}, w[kN] = {}, g[kN] = {};
  float z_v = 0;
};

// One token back on the rows of a warp. s: the state before the token (changed); d: dS after it, then before it.
template <int kN, int kRows>
FW_DEVICE void token_step_back(const KeyToken<kN>& k, float z, float d_o, int lane, float (&s)[kRows][kN],
                               float (&d)[kRows][kN], KeyGradients<kN>& sum, float& dz) {
  float sums[2 * kRows];
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    float u = 0, du = 0;
#pragma unroll
    for (int j = 0; j < kN; ++j) {
      s[i][j] *= k.factor[j];
      u = fmaf(k.key.e[j], s[i][j], u);
      du = fmaf(k.key.w[j], d[i][j], du);
    }
    sums[i] = u;
    sums[kRows + i] = du;
  }
  const float own = scattered_sum(sums, lane), other = shuffle_xor(own, 16);
  const float residual = z - (lane < 16 ? own : other);
  dz = fmaf(k.rw, d_o, lane < 16 ? other : own);
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    constexpr int kStep = row_lane<kRows>(1);
    const float u = shuffle(residual, i * kStep), du = shuffle(dz, i * kStep), go = shuffle(d_o, i * kStep);
#pragma unroll
    for (int j = 0; j < kN; ++j) {
      sum.r[j] = fmaf(fmaf(k.key.w[j], u, s[i][j]), go, sum.r[j]);
      const float after = fmaf(k.key.r[j], go, d[i][j]);
      sum.w[j] = fmaf(after, u, sum.w[j]);
      sum.e[j] = fmaf(-s[i][j], du, sum.e[j]);
      const float bar = fmaf(-k.key.e[j], du, after);
      sum.g[j] = fmaf(s[i][j], bar, sum.g[j]);
      d[i][j] = k.factor[j] * bar;
    }
  }
}

template <int kN, int kRows>
FW_DEVICE void load_state_rows(const float* p, float (&s)[kRows][kN]) {
#pragma unroll
  for (int i = 0; i < kRows; ++i) load_wide<kN>(reinterpret_cast<const char*>(p + i * 32 * kN), s[i]);
}
template <int kN, int kRows>
FW_DEVICE void store_state_rows(float* p, const float (&s)[kRows][kN]) {
#pragma unroll
  for (int i = 0; i < kRows; ++i) store_wide<kN>(reinterpret_cast<char*>(p + i * 32 * kN), 0, s[i]);
}

// The rows of a warp in parts, so that not all of a state and of its gradient need registers at once.
constexpr int kPart = 4;
template <int kN, int kRows>
FW_DEVICE void load_parts(const float* p, float (&d)[kRows / kPart][kPart][kN]) {
#pragma unroll
  for (int i = 0; i < kRows / kPart; ++i) load_state_rows<kN, kPart>(p + i * kPart * 32 * kN, d[i]);
}
template <int kN, int kRows>
FW_DEVICE void store_parts(float* p, const float (&d)[kRows / kPart][kPart][kN]) {
#pragma unroll
  for (int i = 0; i < kRows / kPart; ++i) store_state_rows<kN, kPart>(p + i * kPart * 32 * kN, d[i]);
}

// Where the tensors of the block's sequence and value head lie. In shared memory: it would take a hundred registers.
struct Item {
  FrontRows f;
  GradientRows out;
  Rows d_o;
};
constexpr int kItemBytes = 1024;
static_assert(sizeof(Item) <= kItemBytes);

template <int kN>
FW_DEVICE KeyToken<kN> token_of(const Problem& x, const Item& at, int n, int hv, int t, int lane) {
  const KeyInputs<kN> in = load_key_inputs<kN>(x, at.f, at.f.g, t, lane);
  return key_token(x, hv, in, [&](const TokenArg& gate, int count) {
    return row_mean(rows_of(gate, x.sequences, n, hv), t, count, lane);
  });
}

template <int kN, int kRows>
__global__ void __launch_bounds__(kN == 8 ? 256 : 512)
    token_backward_kernel(const __grid_constant__ TokenBackwardArgs a, const __grid_constant__ TokenCut cut) {
  const Problem& x = a.problem;
  const int lane = static_cast<int>(lane_index()), warp = static_cast<int>(warp_index());
  Item& at = *reinterpret_cast<Item*>(shared_memory());
  float* const partials = reinterpret_cast<float*>(shared_memory() + kItemBytes);
  const int floats = partial_floats<kN>(cut.warps);
  // This thread's offset in a state of the workspace, of the first tile.
  float* const starts =
      static_cast<float*>(a.workspace) + block_index_x() * cut.block + (warp * kRows * 32 + lane) * kN;
  float* const states = starts + cut.stretches * cut.state;
  float* const d_states = states + cut.stretch * cut.state;
  const int64_t tile_floats = static_cast<int64_t>(cut.warps) * kRows * 32 * kN;
  int turn = 0;  // counts tokens: whose turn it is to finish one, and the half of the partial sums in use
  const int64_t items = static_cast<int64_t>(x.sequences.N) * x.HV;
  for (int64_t item = block_index_x(); item < items; item += grid_size_x()) {
    const int n = static_cast<int>(item / x.HV), hv = static_cast<int>(item % x.HV);
    sync_threads();
    if (thread_index() == 0)
      at = {front_rows(x, n, hv), gradient_rows(x, a.grads, n, hv), rows_of(a.d_o, x.sequences, n, hv)};
    sync_threads();
    const int length = sequence_length(x.sequences, n), stretch = static_cast<int>(cut.stretch);
    const int last = length > 0 ? (length - 1) / stretch : -1;
    FW_NO_UNROLL
    for (int tile = 0; tile < cut.tiles; ++tile) {
      float d[kRows][kN];
      load_state<kN, kRows>(state_of(a.d_final_state, n, hv), (tile * cut.warps + warp) * kRows, x.V, x.K, lane, d);
      store_state_rows<kN, kRows>(d_states + tile * tile_floats, d);
    }
    // The first sweep leaves the state at every stretch's start; then stretch by stretch from the last: its states, and
    // back.
    FW_NO_UNROLL
    for (int i = last + 1; i >= 0 && last >= 0; --i) {
      const bool sweep = i > last;
      const int begin = sweep ? 0 : i * stretch, end = sweep       ? last * stretch + 1
                                                       : i == last ? length
                                                                   : begin + stretch;
      FW_NO_UNROLL
      for (int tile = 0; tile < cut.tiles; ++tile) {
        const int v0 = (tile * cut.warps + warp) * kRows, v = v0 + row_of_lane<kRows>(lane);
        float s[kRows][kN];
        if (sweep) {
          load_state<kN, kRows>(state_of(x.initial_state, n, hv), v0, x.V, x.K, lane, s);
        } else {
          load_state_rows<kN, kRows>(starts + i * cut.state + tile * tile_floats, s);
        }
        FW_NO_UNROLL
        for (int t = begin; t < end; ++t) {
          if (!sweep) store_state_rows<kN, kRows>(states + (t - begin) * cut.state + tile * tile_floats, s);
          if (sweep && t % stretch == 0)
            store_state_rows<kN, kRows>(starts + t / stretch * cut.state + tile * tile_floats, s);
          if (t + 1 == end) break;
          const KeyToken<kN> k = token_of<kN>(x, at, n, hv, t, lane);
          const ValueToken value = load_value(x, at.f, t, v);
          float o;
          token_step<kN, kRows>(k, k.z_v * (value.v * value.gate), lane, s, o);
        }
      }
      if (sweep) continue;
      float d[kRows / kPart][kPart][kN];  // stays here where there is one tile
      load_parts<kN, kRows>(d_states, d);
      FW_NO_UNROLL
      for (int t = end - 1; t >= begin; --t, ++turn) {
        KeyGradients<kN> sum;
        const KeyToken<kN> k = token_of<kN>(x, at, n, hv, t, lane);
        FW_NO_UNROLL
        for (int tile = 0; tile < cut.tiles; ++tile) {
          if (cut.tiles > 1) load_parts<kN, kRows>(d_states + tile * tile_floats, d);
#pragma unroll
          for (int part = 0; part < kRows / kPart; ++part) {
            float s[kPart][kN];
            load_state_rows<kN, kPart>(states + (t - begin) * cut.state + tile * tile_floats + part * kPart * 32 * kN,
                                       s);
            const int v = (tile * cut.warps + warp) * kRows + part * kPart + row_of_lane<kPart>(lane);
            const ValueToken value = load_value(x, at.f, t, v);
            const float d_o = at.d_o.data != nullptr && v < x.V ? load_element(at.d_o, t, v) : 0.0f;
            float dz;
            token_step_back<kN, kPart>(k, k.z_v * (value.v * value.gate), d_o, lane, s, d[part], sum, dz);
            if (has_row<kPart>(lane) && v < x.V) {
              sum.z_v += value.v * value.gate * dz;
              if (at.out.v.data != nullptr) store_element(at.out.v, t, v, k.z_v * value.gate * dz);
              if (at.out.write_gate.data != nullptr && x.rule.write == Gate::kChannel)
                store_element(at.out.write_gate, t, v, k.z_v * value.v * dz);
            }
          }
          if (cut.tiles > 1) store_parts<kN, kRows>(d_states + tile * tile_floats, d);
        }
        float* const partial = partials + turn % 2 * floats;
        float* const mine = partial + warp * kParts * 32 * kN;
        store_lane<kN>(mine, lane, sum.r);
        store_lane<kN>(mine + 32 * kN, lane, sum.e);
        store_lane<kN>(mine + 64 * kN, lane, sum.w);
        store_lane<kN>(mine + 96 * kN, lane, sum.g);
        const float z_v = group_sum<32>(sum.z_v);
        if (lane == 0) partial[cut.warps * kParts * 32 * kN + warp] = z_v;
        sync_threads();
        // The warp whose work tile it is was done with the other half before it came here.
        if (turn % cut.warps == warp) finish_token<kN>(x, at.f, at.out, partial, cut.warps, t, lane);
      }
      if (cut.tiles == 1) store_parts<kN, kRows>(d_states, d);
    }
    FW_NO_UNROLL
    for (int tile = 0; tile < cut.tiles; ++tile) {
      float d[kRows][kN];
      load_state_rows<kN, kRows>(d_states + tile * tile_floats, d);
      store_state<kN, kRows>(state_of(a.d_initial_state, n, hv), (tile * cut.warps + warp) * kRows, x.V, x.K, lane, d);
    }
  }
}

template <int kN, int kRows>
void launch_cut(const TokenBackwardArgs& args, const TokenCut& cut, void* stream) {
  const size_t shared = kItemBytes + 2 * sizeof(float) * static_cast<size_t>(partial_floats<kN>(cut.warps));
  launch(token_backward_kernel<kN, kRows>, Dim3{static_cast<unsigned>(cut.blocks)},
         static_cast<unsigned>(32 * cut.warps), shared, stream, args, cut);
}

}  // namespace

void token_backward(const TokenBackwardArgs& args, int64_t longest, void* stream) {
  const Problem& x = args.problem;
  if (x.K > 256) fail_internal("token_backward: expected K <= 256, got {}", x.K);
  const TokenCut cut = token_cut(x.sequences.N, x.HV, x.K, x.V, longest, sm_count());
  if (cut.channels == 2) return launch_cut<2, 8>(args, cut, stream);
  if (cut.channels == 4) return launch_cut<4, 8>(args, cut, stream);
  launch_cut<8, 4>(args, cut, stream);
}

}  // namespace fw::cuda
