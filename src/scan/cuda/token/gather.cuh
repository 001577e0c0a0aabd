// The inputs of a token on their way into shared memory, whatever they are: the host lists the tensors that the rule
// reads, a warp starts the copies of all of them and waits once. As they lie in memory; TokenGather says where what is.
#pragma once

#include "scan/cuda/common/gate_math.cuh"
#include "scan/cuda/common/precond_rows.cuh"
#include "scan/cuda/common/state/state_rows.cuh"

namespace fw::cuda {

enum GatherRow { kRowQ, kRowK, kRowG, kRowEraseGate, kRowEraseKey, kRowM, kRowA, kRowV, kRowWriteGate, kGatherRows };
// The token scalars as they lie in shared memory, by the names of their tensors.
struct GatheredScalars : TokenScalars<float> {
  float g, erase_gate, write_gate, precond_g, precond_beta;
};
inline constexpr int kGatherScalars = static_cast<int>(sizeof(GatheredScalars) / sizeof(float));

// A tensor to be copied: a row of each token or, of values, the tile's part of it.
struct GatherTask {
  const char* data = nullptr;
  int64_t stride_b = 0, stride_t = 0, stride_h = 0;  // bytes
  int32_t divisor = 1, size = 4;                     // of value heads; of an element
  int32_t to = 0;                                    // byte offset of the token
  int32_t room = 0, limit = 0;                       // elements there, of which those at limit and above are 0
  bool values = false;                               // elements from the tile's first on
  bool states = false;                               // stride_b is that of slots
  bool wide = false;                                 // 16 bytes at a time
};
struct TokenGather {
  GatherTask rows[kGatherRows], scalars[kGatherScalars];
  int32_t row_count = 0, scalar_count = 0;
  int32_t scalars_at = 0, rw_at = 0, bytes = 0;  // of a token; at rw_at: r . w, then the coefficient of the values
  int32_t at[kGatherRows] = {};                  // where the rows are, by GatherRow
  // with a preconditioner: M is not read but made (M of the only token of a sequence)
  bool makes_m = false;
};

// Where the streams of a token are, once it is made: in place of the first rows.
enum TokenStream { kStreamE, kStreamR, kStreamW, kStreamAlpha, kStreams };

// For lanes of `channels` and tiles of `tile` values. Host.
inline TokenGather token_gather(const Problem& x, int channels, int tile) {
  TokenGather g;
  g.makes_m = x.rule.uses_precond() && x.m == nullptr;
  const Rule& rule = x.rule;
  const auto fill = [](GatherTask& task, const TokenArg& a) {
    task.data = static_cast<const char*>(a.data);
    task.size = a.bf16 != 0 ? 2 : 4;
    task.stride_b = a.stride_b * task.size, task.stride_t = a.stride_t * task.size,
    task.stride_h = a.stride_h * task.size;
    task.divisor = a.divisor;
  };
  const auto row = [&](GatherRow which, bool used, const TokenArg& a, bool values) {
    if (!used) return;
    GatherTask& task = g.rows[g.row_count++];
    fill(task, a);
    task.values = values;
    task.room = values ? tile : 32 * channels;
    task.limit = values ? x.V : x.K;
    const int64_t address =
        static_cast<int64_t>(reinterpret_cast<uintptr_t>(task.data)) | task.stride_b | task.stride_t | task.stride_h;
    task.wide = ((address | task.limit * task.size | task.room * task.size) & 15) == 0;
    task.to = g.at[which] = g.bytes;
    g.bytes += (4 * task.room + 15) / 16 * 16;
  };
  TokenArg m;
  m.data = const_cast<float*>(x.m);
  m.stride_h = x.K, m.stride_t = static_cast<int64_t>(x.H) * x.K, m.stride_b = x.T * m.stride_t;
  m.divisor = x.group;
  row(kRowQ, true, x.in.q, false);
  row(kRowK, true, x.in.k, false);
  row(kRowG, rule.decay == Decay::kChannel, x.in.g, false);
  row(kRowEraseGate, rule.uses_erase_gate() && rule.erase == Gate::kChannel, x.in.erase_gate, false);
  row(kRowEraseKey, rule.uses_erase_key(), x.in.erase_key, false);
  row(kRowM, x.m != nullptr, m, false);
  const StateArg& squares = x.initial_precond;
  if (g.makes_m) g.at[kRowM] = g.bytes, g.bytes += 128 * channels;
  if (g.makes_m && squares.data != nullptr) {
    row(kRowA, true, {squares.data, squares.stride_n, 0, squares.stride_h, squares.bf16, x.group}, false);
    g.rows[g.row_count - 1].states = true;
  }
  g.bytes = g.bytes < kStreams * 128 * channels ? kStreams * 128 * channels : g.bytes;
  row(kRowV, true, x.in.v, true);
  row(kRowWriteGate, rule.write == Gate::kChannel, x.in.write_gate, true);
  g.scalars_at = g.bytes;
  const GatheredScalars numbers{};
  const auto scalar = [&](const float& which, bool used, const TokenArg& a) {
    if (!used) return;
    GatherTask& task = g.scalars[g.scalar_count++];
    fill(task, a);
    task.to = g.scalars_at +
              static_cast<int32_t>(reinterpret_cast<const char*>(&which) - reinterpret_cast<const char*>(&numbers));
  };
  scalar(numbers.g, rule.decay == Decay::kScalar, x.in.g);
  for_each_scalar(
      rule, [&](const float& which, const TokenArg& a) { scalar(which, true, a); }, numbers, x.in);
  scalar(numbers.erase_gate, rule.uses_erase_gate() && rule.erase == Gate::kScalar, x.in.erase_gate);
  scalar(numbers.write_gate, rule.write == Gate::kScalar, x.in.write_gate);
  const bool precond_gates = g.makes_m || (x.m != nullptr && rule.normaliser == Normaliser::kGated);
  scalar(numbers.precond_g, precond_gates, x.in.precond_g);
  scalar(numbers.precond_beta, precond_gates, x.in.precond_beta);
  g.bytes += (4 * kGatherScalars + 15) / 16 * 16;
  g.rw_at = g.bytes;
  g.bytes += 16;
  return g;
}

// Token `token` of batch b.
FW_DEVICE const char* gather_source(const GatherTask& task, int64_t b, int64_t token, int hv) {
  const unsigned head = static_cast<unsigned>(hv), divisor = static_cast<unsigned>(task.divisor);
  return task.data + b * task.stride_b + token * task.stride_t +
         static_cast<int64_t>(divisor == 1 ? head : head / divisor) * task.stride_h;
}
// A lane's number of the token, on its way.
struct GatheredScalar {
  uint32_t bits = 0;
  int32_t to = -1;  // byte offset of the token; -1: none
};
// Starts the copies of a token's tensors to `to`, by a warp; they are there after finish_gather(), a wait for the
// copies and sync_warp().
FW_DEVICE GatheredScalar start_gather(const TokenGather& g, int64_t b, int64_t token, int slot, int hv, int v_tile,
                                      int lane, char* to) {
  GatheredScalar scalar;
  if (lane < g.scalar_count) {
    const GatherTask& task = g.scalars[lane];
    const char* from = gather_source(task, b, token, hv);
    scalar.bits =
        task.size == 2 ? uint32_t{*reinterpret_cast<const uint16_t*>(from)} : *reinterpret_cast<const uint32_t*>(from);
    scalar.to = task.to + (task.size == 2 ? 2 : 0);  // of a bf16 number: of its upper half
  }
  const uint32_t base = shared_address(to);
#pragma unroll 2
  for (int i = 0; i < g.row_count; ++i) {
    const GatherTask& task = g.rows[i];
    const int first = task.values ? v_tile : 0, limit = (task.limit - first) * task.size, room = task.room * task.size;
    const char* from = gather_source(task, task.states ? slot : b, token, hv) + first * task.size;
    if (task.wide) {
      FW_NO_UNROLL
      for (int at = 16 * lane; at < room; at += 512)
        cp_async_16(base + static_cast<uint32_t>(task.to + at), at < limit ? from + at : from, at < limit);
    } else {
      FW_NO_UNROLL
      for (int at = task.size * lane; at < room; at += task.size * 32) {
        if (task.size == 2) {
          *reinterpret_cast<uint16_t*>(to + task.to + at) =
              at < limit ? *reinterpret_cast<const uint16_t*>(from + at) : uint16_t{0};
        } else {
          *reinterpret_cast<uint32_t*>(to + task.to + at) =
              at < limit ? *reinterpret_cast<const uint32_t*>(from + at) : 0u;
        }
      }
    }
  }
  cp_async_commit();
  return scalar;
}
FW_DEVICE void finish_gather(const GatheredScalar& scalar, char* to) {
  if (scalar.to >= 0) *reinterpret_cast<uint32_t*>(to + scalar.to / 4 * 4) = scalar.bits << (scalar.to % 4 * 8);
}

// kN neighbouring numbers in shared memory.
template <int kN>
FW_DEVICE void gathered_channels(const char* row, bool bf16, int lane, float (&x)[kN]) {
  if (bf16) {
    uint32_t words[kN / 2];
    load_wide<kN>(row + 2 * kN * lane, words);
#pragma unroll
    for (int j = 0; j < kN; j += 2) x[j] = bf16_low(words[j / 2]), x[j + 1] = bf16_high(words[j / 2]);
  } else {
    load_wide<kN>(row + 4 * kN * lane, x);
  }
}
// What a head's map has that is in memory: loaded while the token is on its way.
FW_DEVICE float precond_center(const Problem& x, int key_head) {
  return x.rule.uses_precond_center() ? x.precond_center[key_head * x.center_stride] : 0.0f;
}
// A step of A (a: before the token, then after it) and M, from the token's key. The same bits as the kernels of the
// preconditioner (common/precond_rows.cuh), hence their order of the sum.
template <int kN>
FW_DEVICE void step_precond(const Problem& x, PrecondMap<float> map, float center, float g, float beta, int lane,
                            const float (&k)[kN], float (&a)[kN], float (&m)[kN]) {
  float square = 0;
#pragma unroll
  for (int j = 0; j < kN; ++j) square = fmaf(k[j], k[j], square);
  const RunGates gates = run_gates(x.rule, g, beta, warp_sum(square));
  map.center = center;
#pragma unroll
  for (int j = 0; j < kN; ++j) {
    const float before = a[j];
    a[j] = step_precond(gates.alpha, gates.gain, k[j], before);
    m[j] = lane * kN + j < x.K ? PrecondElements<FastMath>::value(map, map.previous ? before : a[j]) : 1.0f;
  }
}
// M of a gathered token to where a gathered M would be; a: A after the token.
template <int kN>
FW_DEVICE void make_m(const Problem& x, const TokenGather& g, const PrecondMap<float>& map, float center, int lane,
                      char* token, float (&a)[kN]) {
  float k[kN], m[kN];
  gathered_channels<kN>(token + g.at[kRowK], x.in.k.bf16 != 0, lane, k);
#pragma unroll
  for (int j = 0; j < kN; ++j) a[j] = 0;
  if (x.initial_precond.data != nullptr)
    gathered_channels<kN>(token + g.at[kRowA], x.initial_precond.bf16 != 0, lane, a);
  const GatheredScalars& s = *reinterpret_cast<const GatheredScalars*>(token + g.scalars_at);
  step_precond(x, map, center, s.precond_g, s.precond_beta, lane, k, a, m);
  store_wide<kN>(token + g.at[kRowM] + 4 * kN * lane, 0, m);  // this lane reads it
}

// What a lane's log-decays are made of where they are logits (problem.fused). No kernel in front writes it, so it is
// loaded ahead of the wait for that.
template <int kN>
FW_DEVICE GateScalars<kN> token_gate_scalars(const Problem& x, int hv, int lane) {
  GateScalars<kN> own = {};
  if (x.fused.g.given == GateActivation::kValue) return own;
  const bool channels = x.rule.decay == Decay::kChannel;
  const int first = channels ? lane * kN : 0, head = x.in.g.divisor == 1 ? hv : hv / x.in.g.divisor;
#pragma unroll
  for (int j = 0; j < kN; ++j) {
    if (channels ? first + j >= x.K : j > 0) break;
    const GateScalars<1> one = gate_scalars<1>(x.fused.a_log, x.fused.dt_bias, head, first + j);
    own.bias[j] = one.bias[0], own.rate[j] = one.rate[0];
  }
  return own;
}
// factor times the sigmoid of x, to about two units in the last place.
FW_DEVICE float exact_gate(float factor, float x) {
  const float e = exp2_fast(-kLog2E * std::abs(x));
  return factor * ((x < 0 ? e : 1.0f) * rcp_fast(1.0f + e));
}
FW_DEVICE float exact_decay(bool sigmoid, const DecayLaw& law, float x) {
  const float t = fmaf(law.slope, x, law.at_0), e = exp2_fast(-std::abs(t));
  if (sigmoid) return law.size * ((t < 0 ? e : 1.0f) * rcp_fast(1.0f + e));
  return law.size * fmaf(kLn2, max(t, 0.0f), GateMath::log1p(e));
}
// A gate's value where it is a logit.
FW_DEVICE float fused_value(const GateLaw<float>& law, float x) {
  return law.given == GateActivation::kValue ? x : exact_gate(law.factor, x);
}

// Whether tensors of gates and decays may be logits: a form of its own, since a decoded token waits for every line of
// code.
enum class TokenGates { kValues, kLogits };

// own: token_gate_scalars() of the lane.
template <TokenGates kGates, int kN>
FW_DEVICE KeyInputs<kN> gathered_inputs(const Problem& x, const TokenGather& g, const GateScalars<kN>& own,
                                        const char* token, int lane) {
  const Rule& rule = x.rule;
  KeyInputs<kN> in;
  gathered_channels<kN>(token + g.at[kRowQ], x.in.q.bf16 != 0, lane, in.row.q);
  gathered_channels<kN>(token + g.at[kRowK], x.in.k.bf16 != 0, lane, in.row.k);
#pragma unroll
  for (int j = 0; j < kN; ++j) in.row.p[j] = 0, in.row.b[j] = in.row.m[j] = 1;
  const GatheredScalars& s = *reinterpret_cast<const GatheredScalars*>(token + g.scalars_at);
  if (rule.decay == Decay::kChannel) {
    gathered_channels<kN>(token + g.at[kRowG], x.in.g.bf16 != 0, lane, in.g);
  } else {
    in.g[0] = s.g;
  }
  const FusedGates& fused = x.fused;
  if (kGates == TokenGates::kLogits && fused.g.given != GateActivation::kValue) {
    const bool sigmoid = fused.g.given == GateActivation::kLowerBound;
#pragma unroll
    for (int j = 0; j < kN; ++j) {
      if (j == 0 || rule.decay == Decay::kChannel)
        in.g[j] = exact_decay(sigmoid, DecayLaw(fused.g, own.bias[j], own.rate[j]), in.g[j]);
    }
  }
  if (rule.uses_erase_key())
    gathered_channels<kN>(token + g.at[kRowEraseKey], x.in.erase_key.bf16 != 0, lane, in.row.p);
  if (rule.uses_erase_gate() && rule.erase == Gate::kChannel)
    gathered_channels<kN>(token + g.at[kRowEraseGate], x.in.erase_gate.bf16 != 0, lane, in.row.b);
  if (g.makes_m || x.m != nullptr) gathered_channels<kN>(token + g.at[kRowM], false, lane, in.row.m);
  load_gates(
      rule, g.makes_m || x.m != nullptr, in.gates, [](float y) { return y; }, s);
  if constexpr (kGates == TokenGates::kLogits) {
    if (rule.uses_erase_gate() && rule.erase == Gate::kChannel) {
#pragma unroll
      for (int j = 0; j < kN; ++j) in.row.b[j] = fused_value(fused.erase_gate, in.row.b[j]);
    }
    if (rule.uses_erase_gate() && rule.erase == Gate::kScalar)
      in.gates.erase = fused_value(fused.erase_gate, in.gates.erase);
    if (rule.write == Gate::kScalar) in.gates.write = fused_value(fused.write_gate, in.gates.write);
    if (rule.uses_beta()) in.gates.beta = fused_value(fused.beta, in.gates.beta);
  }
  return in;
}

// Value i of the tile as it was gathered, with its gate.
template <TokenGates kGates>
FW_DEVICE float gathered_value(const Problem& x, const TokenGather& g, const char* token, int i) {
  const auto value = [&](GatherRow which, const TokenArg& a) {
    const char* row = token + g.at[which];
    return a.bf16 != 0 ? bf16_value(reinterpret_cast<const uint16_t*>(row)[i]) : reinterpret_cast<const float*>(row)[i];
  };
  if (x.rule.write != Gate::kChannel) return value(kRowV, x.in.v);
  const float gate = value(kRowWriteGate, x.in.write_gate);
  return value(kRowV, x.in.v) * (kGates == TokenGates::kLogits ? fused_value(x.fused.write_gate, gate) : gate);
}

// The token's streams, in place of its inputs, by the warp that has read them; of a tile of at most 32 values z too, in
// place of the values (0: none).
template <TokenGates kGates, int kN>
FW_DEVICE void put_token(const Problem& x, const TokenGather& g, const KeyToken<kN>& k, int tile, int lane,
                         char* token) {
  const float z = lane < tile ? k.z_v * gathered_value<kGates>(x, g, token, lane) : 0.0f;
  sync_warp();  // all lanes have what they read
  if (lane < tile) reinterpret_cast<float*>(token + g.at[kRowV])[lane] = z;
  char* const p = token + 4 * kN * lane;
  store_wide<kN>(p + kStreamE * 128 * kN, 0, k.key.e);
  store_wide<kN>(p + kStreamR * 128 * kN, 0, k.key.r);
  store_wide<kN>(p + kStreamW * 128 * kN, 0, k.key.w);
  store_wide<kN>(p + kStreamAlpha * 128 * kN, 0, k.factor);
  if (lane == 0) *reinterpret_cast<float2*>(token + g.rw_at) = make_float2(k.rw, k.z_v);
}
// A token's streams in shared memory, for token_step().
template <int kN>
struct GatheredToken {
  const char* streams;  // at this lane's channels
  float rw;

  FW_DEVICE GatheredToken(const TokenGather& g, const char* token, int lane)
      : streams(token + 4 * kN * lane), rw(*reinterpret_cast<const float*>(token + g.rw_at)) {}
  FW_DEVICE void e(float (&x)[kN]) const { load_wide<kN>(streams + kStreamE * 128 * kN, x); }
  FW_DEVICE void r(float (&x)[kN]) const { load_wide<kN>(streams + kStreamR * 128 * kN, x); }
  FW_DEVICE void w(float (&x)[kN]) const { load_wide<kN>(streams + kStreamW * 128 * kN, x); }
  FW_DEVICE void alpha(float (&x)[kN]) const { load_wide<kN>(streams + kStreamAlpha * 128 * kN, x); }
};

}  // namespace fw::cuda
