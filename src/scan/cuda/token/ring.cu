// Decode that does not write the states (formulas: scan/ring.h). A block has value rows of one sequence and value head.
// Its key warps make the tokens' key sides and what these find of the ring's keys. The others take their rows of the
// state, which stay as they are, and of u through all tokens. Where a fold is due they store the state.
//
// Tensors (fw_ring of the C header): state [slots, HV, K, V] or [.., V, K]; ring [slots, HV, rows, K + V + decays].
//
// Roles:
//   kernel                   threads            warps 0 to 3                               other warps
//   token_ring_head_kernel   160                rows of the state through shared memory    4: the key side of the token
//   token_ring_kernel        128 + 32 a token   rows of the state in registers             4 to 7: every fourth token's key side
//   ring_fold_kernel         128                rows of the state in registers; warp 0: the keys
// Key warps meet at named barrier 2; keys go to the rows by sync_threads(). New rows of the ring are never among those
// that the call reads.
#include <algorithm>

#include "base/error.h"
#include "gpu/device.h"
#include "gpu/launch.h"
#include "scan/cuda/token/ring.h"
#include "scan/cuda/token/ring_keys.cuh"

namespace fw::cuda {
namespace {

constexpr int kMostKeyWarps = 4, kHeadRows = 8;
// Of an SM: what makes values of logits has more in registers.
constexpr int head_blocks(TokenGates gates) { return gates == TokenGates::kLogits ? 3 : 4; }

// The tokens of the block's sequence; nothing to do: false.
FW_DEVICE bool find_span(const TokenForwardArgs& a, const TokenCoord& coord, int& length, RingSpan& span) {
  const int all = sequence_length(a.problem.sequences, coord.n);
  length = all < a.ring.length ? all : a.ring.length;
  span = span_of(a.ring, coord.n, length);
  // Positions that break the limits would leave the shared memory.
  return (length > 0 || span.folds()) && span.position - span.base + length <= a.ring.span;
}

// The key side of the call's tokens, by key warp `warp`. The block of the first values writes the ring's keys.
template <int kN, TokenGates kGates>
FW_DEVICE void make_ring_keys(const TokenForwardArgs& a, const ForwardCut& cut, const RingCut& rc,
                              const TokenCoord& coord, const RingSpan& span, int length, int tile, int warp, int lane,
                              const GateScalars<kN>& own) {
  const Problem& x = a.problem;
  const Rule& rule = x.rule;
  const RingHead ring = ring_head(a.ring, coord.slot, coord.hv);
  char* const shared = shared_memory();
  char *const keys = shared + rc.keys, *const decays = shared + rc.decays, *const products = shared + rc.products;
  const auto meet = [&] { rc.key_warps == 1 ? sync_warp() : named_barrier_sync(2, 32 * rc.key_warps); };
  const auto token_at = [&](int t) { return shared + t * cut.gather.bytes; };
  load_ring_keys<kN>(rule, x.K, x.V, coord.hv, ring, span.base, span.position, warp, rc.key_warps, rc.wide, lane, keys,
                     decays);
  const int found = span.position - span.base;
  FW_NO_UNROLL
  for (int t = warp; t < length; t += rc.key_warps) {
    char* const token = token_at(t);
    make_token<kGates>(a, cut, coord, t, tile, start_token(a, cut, coord, t, lane, token), own, lane, token);
    put_ring_key<kN>(rule, GatheredToken<kN>(cut.gather, token, lane), found + t, lane, keys, decays);
  }
  cp_async_wait<0>();
  meet();
  FW_NO_UNROLL
  for (int t = warp; t < length; t += rc.key_warps) {
    const GatheredToken<kN> token(cut.gather, token_at(t), lane);
    const int at = span.position + t;
    ring_coefficients<kN>(rule, token, span.begin(at) - span.base, found + t, lane, keys, decays,
                          reinterpret_cast<float2*>(shared + rc.coefs) + t * a.ring.span, products + 128 * kN * t);
    if (coord.v_tile == 0 && at >= span.kept()) store_ring_key<kN>(rule, x.K, x.V, token, ring.row(at), lane);
  }
  if (!span.folds()) return;
  meet();  // nobody reads the keys as they were any more
  if (warp != 0) return;
  FW_NO_UNROLL
  for (int from = span.base, i = a.ring.length; from < span.last; from += span.tokens, ++i)
    fold_ring_keys<kN>(rule, from - span.base, from - span.base + span.tokens, lane, keys, decays,
                       products + 128 * kN * i);
}

// A warp's kRows rows from value v0 of the head on, row0 of the tile, through all tokens; `rows` of them exist. z(t,
// row): of a row of the warp. s is the state, and after a fold the new one, which store() stores if it stays.
template <int kN, int kRows, class Values, class Store>
FW_DEVICE void ring_rows(const TokenForwardArgs& a, const ForwardCut& cut, const RingCut& rc, const TokenCoord& coord,
                         const RingSpan& span, int length, int v0, int row0, int rows, int lane, Values&& z,
                         Store&& store, float (&s)[kRows][kN]) {
  char* const shared = shared_memory();
  float* const u = reinterpret_cast<float*>(shared + rc.u);
  const RingHead ring = ring_head(a.ring, coord.slot, coord.hv);
  const Rows o_rows = rows_of(a.o, a.problem.sequences, coord.n, coord.hv);
  const int row = row_of_lane<kRows>(lane), found = span.position - span.base;
  const bool writes = has_row<kRows>(lane) && row < rows;
  int folded = span.base;
  const auto fold_until = [&](int end) {
    FW_NO_UNROLL
    for (; folded < end; folded += span.tokens) {
      const int first = folded - span.base, i = a.ring.length + (folded > span.base ? 1 : 0);
      fold_rows<kN, kRows>(
          shared + rc.keys + 128 * kN * first, span.tokens, shared + rc.products + 128 * kN * i, lane,
          [&](int j, float(&values)[kRows]) {
            load_wide<kRows>(reinterpret_cast<const char*>(u + (first + j) * rc.tile + row0), values);
          },
          s);
      round_rows(a.final_state.bf16 != 0, s);
      if (folded < span.stored) store();
    }
  };
  FW_NO_UNROLL
  for (int t = 0; t < length; ++t) {
    const GatheredToken<kN> token(cut.gather, shared + t * cut.gather.bytes, lane);
    const int at = span.position + t, first = span.begin(at) - span.base, last = found + t;
    fold_until(first + span.base);
    float sums[2 * kRows];
    {
      float p[kN], e[kN], r[kN];
      load_wide<kN>(shared + rc.products + 128 * kN * t + 4 * kN * lane, p);
      token.e(e);
      token.r(r);
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        float of_e = 0, of_r = 0;
#pragma unroll
        for (int c = 0; c < kN; ++c) {
          const float decayed = s[i][c] * p[c];
          of_e = fmaf(e[c], decayed, of_e);
          of_r = fmaf(r[c], decayed, of_r);
        }
        sums[i] = of_e;
        sums[kRows + i] = of_r;
      }
    }
    const float own = scattered_sum(sums, lane), other = shuffle_xor(own, 16);
    float of_e = lane < 16 ? own : other, of_r = lane < 16 ? other : own;
    const float2* coefs = reinterpret_cast<const float2*>(shared + rc.coefs) + t * a.ring.span;
    FW_NO_UNROLL
    for (int j = first; j < last; ++j) {
      const float2 c = coefs[j];
      const float before = u[j * rc.tile + row0 + row];
      of_e = fmaf(c.x, before, of_e);
      of_r = fmaf(c.y, before, of_r);
    }
    const float residual = z(t, row) - of_e;
    if (writes) {
      if (o_rows.data != nullptr) store_element(o_rows, t, v0 + row, fmaf(token.rw, residual, of_r));
      if (at >= span.kept()) ring.row(at)[a.problem.K + v0 + row] = residual;
    }
    if (has_row<kRows>(lane)) u[last * rc.tile + row0 + row] = residual;
    sync_warp();
  }
  fold_until(span.last);
}

// u of the tokens in the ring, of `count` values from v0 on, to the tile's rows from row0 on, by `threads` threads.
FW_DEVICE void load_ring_values(const TokenForwardArgs& a, const RingCut& rc, const RingHead& ring,
                                const RingSpan& span, int v0, int row0, int count, int room, int thread, int threads) {
  const int found = span.position - span.base, K = a.problem.K;
  float* const u = reinterpret_cast<float*>(shared_memory() + rc.u);
  if (rc.wide) {
    const int units = room / 4;
    const uint32_t base = shared_address(reinterpret_cast<char*>(u));
    FW_NO_UNROLL
    for (int i = thread; i < found * units; i += threads) {
      const int j = i / units, at = i % units * 4;
      const float* from = ring.row(span.base + j) + K + v0;
      cp_async_16(base + 4 * static_cast<uint32_t>(j * rc.tile + row0 + at), at < count ? from + at : from, at < count);
    }
  } else {
    FW_NO_UNROLL
    for (int i = thread; i < found * room; i += threads) {
      const int j = i / room, at = i % room;
      u[j * rc.tile + row0 + at] = at < count ? ring.row(span.base + j)[K + v0 + at] : 0.0f;
    }
  }
  cp_async_commit();
}

// Any states, packed sequences, several tokens a call.
template <int kN, int kRows, TokenGates kGates>
__global__ void __launch_bounds__(kStateThreads + 32 * kMostKeyWarps, kN == 8 ? 1 : 2)
    token_ring_kernel(const __grid_constant__ TokenForwardArgs a, const __grid_constant__ ForwardCut cut,
                      const __grid_constant__ RingCut rc) {
  const Problem& x = a.problem;
  const int lane = static_cast<int>(lane_index()), warp = static_cast<int>(warp_index());
  TokenCoord coord = tile_coord<kN, kRows>(cut);
  if (cut.initial == StateAccess::kChannels && warp < kStateWarps)
    prefetch_rows(a, coord, coord.v_tile + warp * kRows, coord.v_tile + (warp + 1) * kRows, lane);
  if (cut.initial == StateAccess::kStaged && warp < kStateWarps)
    prefetch_tile(a, coord, 32 * warp + lane, kStateThreads);
  GateScalars<kN> own = {};
  if (kGates == TokenGates::kLogits && warp >= kStateWarps) own = token_gate_scalars<kN>(x, coord.hv, lane);
  grid_dependency_wait();
  int length;
  RingSpan span;
  if (!find_slot(a, cut, coord) || !find_span(a, coord, length, span)) return;
  WarpState<kN, kRows> state;
  if (warp >= kStateWarps) {
    make_ring_keys<kN, kGates>(a, cut, rc, coord, span, length, cut.tile, warp - kStateWarps, lane, own);
  } else {
    state.load(a, cut, coord, warp, lane);
    load_ring_values(a, rc, ring_head(a.ring, coord.slot, coord.hv), span, coord.v_tile, 0,
                     x.V - coord.v_tile < cut.tile ? x.V - coord.v_tile : cut.tile, cut.tile, 32 * warp + lane,
                     kStateThreads);
    state.arrived();
  }
  sync_threads();
  if (warp >= kStateWarps) return;
  state.finish(a, cut, coord, warp, lane);
  grid_dependency_launch();
  const int row0 = warp * kRows, v0 = coord.v_tile + row0;
  ring_rows<kN, kRows>(
      a, cut, rc, coord, span, length, v0, row0, x.V - v0, lane,
      [&](int t, int row) {
        return reinterpret_cast<const float*>(shared_memory() + t * cut.gather.bytes +
                                              cut.gather.at[kRowV])[row0 + row];
      },
      [&] { state.store(a, cut, coord, coord.slot, warp, lane); }, state.s);
}

// One token each, the states contiguous [V, K]: a block has half a head, its state on its way through shared memory.
template <int kN, TokenGates kGates>
__global__ void __launch_bounds__(32 * (kStateWarps + 1), head_blocks(kGates))
    token_ring_head_kernel(const __grid_constant__ TokenForwardArgs a, const __grid_constant__ ForwardCut cut,
                           const __grid_constant__ RingCut rc) {
  const Problem& x = a.problem;
  const int lane = static_cast<int>(lane_index()), warp = static_cast<int>(warp_index());
  TokenCoord coord;
  coord.n = static_cast<int>(block_index_x() / static_cast<unsigned>(x.HV)),
  coord.hv = static_cast<int>(block_index_x() % static_cast<unsigned>(x.HV));
  coord.v_tile = static_cast<int>(block_index_y()) * cut.tile;
  const int row_bytes = x.K * (x.initial_state.bf16 != 0 ? 2 : 4),
            per_warp = (cut.tile + kStateWarps * kHeadRows - 1) / (kStateWarps * kHeadRows) * kHeadRows;
  const int end = coord.v_tile + cut.tile < x.V ? coord.v_tile + cut.tile : x.V;
  const int first = coord.v_tile + warp * per_warp, last = first + per_warp < end ? first + per_warp : end;
  if (warp < kStateWarps) prefetch_rows(a, coord, first, last, lane);
  GateScalars<kN> own = {};
  if (kGates == TokenGates::kLogits && warp == kStateWarps) own = token_gate_scalars<kN>(x, coord.hv, lane);
  grid_dependency_wait();
  int length;
  RingSpan span;
  if (!find_slot(a, cut, coord) || !find_span(a, coord, length, span)) return;
  const StateRef initial = state_of(x.initial_state, coord.slot, coord.hv);
  char* const stage = shared_memory() + cut.stage - coord.v_tile * row_bytes;  // row v at v row_bytes
  if (warp == kStateWarps) {
    make_ring_keys<kN, kGates>(a, cut, rc, coord, span, 1, 0, 0, lane, own);
  } else if (first < last) {
    load_ring_values(a, rc, ring_head(a.ring, coord.slot, coord.hv), span, first, first - coord.v_tile, last - first,
                     per_warp, lane, 32);
    FW_NO_UNROLL
    for (int v = first; v < last; v += kHeadRows) {
      const int after = (v + kHeadRows < last ? v + kHeadRows : last) * row_bytes;
      for (int at = v * row_bytes + 16 * lane; at < after; at += 512)
        cp_async_16(shared_address(stage + at), initial.data + at, true);
      cp_async_commit();
    }
  }
  grid_dependency_launch();
  sync_threads();
  if (warp == kStateWarps) return;
  const char* const token = shared_memory();
  const float z_v = reinterpret_cast<const float*>(token + cut.gather.rw_at)[1];
  const StateRef staged{stage, 1, x.K, initial.bf16}, final = state_of(a.final_state, coord.slot, coord.hv);
  FW_NO_UNROLL
  for (int v0 = first; v0 < last; v0 += kHeadRows) {
    const int rows = last - v0, row0 = v0 - coord.v_tile;
    wait_for_copies((rows - 1) / kHeadRows);
    sync_warp();
    float s[kHeadRows][kN] = {};
    load_packed_rows<kN, kHeadRows>(staged, v0, rows, x.K, lane, s);
    if (initial.bf16 != 0) unpack_rows<kN, kHeadRows>(s);
    ring_rows<kN, kHeadRows>(
        a, cut, rc, coord, span, 1, v0, row0, rows, lane,
        [&](int, int row) {
          return row < rows ? z_v * gathered_value<kGates>(x, cut.gather, token, row0 + row) : 0.0f;
        },
        [&] { store_rows<kN, kHeadRows>(final, v0, rows, x.K, lane, s); }, s);
  }
}

// All that is in the ring, fold after fold. No kernel of decoding: the values of u come from memory.
template <int kN>
__global__ void __launch_bounds__(kStateThreads) ring_fold_kernel(const __grid_constant__ RingFoldArgs a) {
  constexpr int kRows = 8;
  const int lane = static_cast<int>(lane_index()), warp = static_cast<int>(warp_index());
  const int n = static_cast<int>(block_index_x()), hv = static_cast<int>(block_index_y()),
            v0 = static_cast<int>(block_index_z()) * kStateWarps * kRows + warp * kRows;
  grid_dependency_wait();
  grid_dependency_launch();
  const int slot = start_slot(a.slots, n);
  if (slot < 0) return;
  const RingSpan span = span_of(a.ring, n, 0);
  const RingHead ring = ring_head(a.ring, slot, hv);
  char *const keys = shared_memory(), *const decays = keys + 128 * kN * a.ring.tokens,
              *const product = decays + 128 * kN * a.ring.tokens;
  const StateRef state = state_of(a.state, slot, hv);
  float s[kRows][kN];
  load_state<kN, kRows>(state, v0, a.V, a.K, lane, s);
  FW_NO_UNROLL
  for (int base = span.base; base < span.position; base += a.ring.tokens) {
    const int end = base + a.ring.tokens < span.position ? base + a.ring.tokens : span.position;
    sync_threads();
    if (warp == 0) {
      load_ring_keys<kN>(a.rule, a.K, a.V, hv, ring, base, end, 0, 1, false, lane, keys, decays);
      sync_warp();
      fold_ring_keys<kN>(a.rule, 0, end - base, lane, keys, decays, product);
    }
    sync_threads();
    fold_rows<kN, kRows>(
        keys, end - base, product, lane,
        [&](int j, float(&values)[kRows]) {
          const float* row = ring.row(base + j) + a.K;
#pragma unroll
          for (int i = 0; i < kRows; ++i) values[i] = v0 + i < a.V ? row[v0 + i] : 0.0f;
        },
        s);
    round_rows(state.bf16 != 0, s);
  }
  if (span.base < span.position) store_state<kN, kRows>(state, v0, a.V, a.K, lane, s);
}

// tokens: of a call, at most.
template <int kN>
RingCut ring_cut(const TokenForwardArgs& args, const ForwardCut& cut, int tile, int key_warps) {
  const RingArg& ring = args.ring;
  const Rule& rule = args.problem.rule;
  const int row = 128 * kN;
  const auto aligned = [](int bytes) { return (bytes + 15) / 16 * 16; };
  RingCut rc;
  rc.tile = tile;
  rc.key_warps = key_warps;
  rc.keys = after_tokens(cut, ring.length);
  rc.decays = rc.keys + row * ring.span;
  rc.products = rc.decays + (rule.decay == Decay::kChannel ? row * ring.span : aligned(4 * ring.span));
  rc.coefs = rc.products + row * (ring.length + 2);
  rc.u = rc.coefs + aligned(8 * ring.length * ring.span);
  rc.end = rc.u + 4 * tile * ring.span;
  const int64_t strides = ring.stride_n | ring.stride_h | ring.stride_r | args.problem.K | args.problem.V;
  rc.wide = (reinterpret_cast<uintptr_t>(ring.data) & 15) == 0 && (strides & 3) == 0;
  return rc;
}

template <int kN, int kRows>
void launch_rows(const TokenForwardArgs& args, void* stream) {
  const Problem& x = args.problem;
  ForwardCut cut = forward_cut<kN>(args, kRows * kStateWarps, false);
  const int key_warps = std::min(args.ring.length, kMostKeyWarps);
  const RingCut rc = ring_cut<kN>(args, cut, cut.tile, key_warps);
  cut.stage = (rc.end + 127) / 128 * 128;
  const int64_t staged = std::max(stage_bytes(x.initial_state, cut.initial, kN, cut.tile),
                                  stage_bytes(args.final_state, cut.final, kN, cut.tile));
  const Dim3 grid{static_cast<unsigned>(static_cast<int64_t>(x.sequences.N) << cut.log_tiles),
                  static_cast<unsigned>(x.HV)};
  launch_overlapped(x.fused.any() ? token_ring_kernel<kN, kRows, TokenGates::kLogits>
                                  : token_ring_kernel<kN, kRows, TokenGates::kValues>,
                    grid, static_cast<unsigned>(kStateThreads + 32 * key_warps),
                    static_cast<size_t>(cut.stage + staged), stream, args, cut, rc);
  precond_step(args, cut, kN, stream);
}

template <int kN>
void launch_heads(const TokenForwardArgs& args, int parts, void* stream) {
  const Problem& x = args.problem;
  const int64_t blocks = static_cast<int64_t>(x.sequences.N) * x.HV, row = x.K * (x.initial_state.bf16 != 0 ? 2 : 4);
  ForwardCut cut = forward_cut<kN>(args, ((x.V + parts - 1) / parts + 7) / 8 * 8, x.group == 1 && parts == 1);
  const int per_warp = (cut.tile + kStateWarps * kHeadRows - 1) / (kStateWarps * kHeadRows) * kHeadRows;
  const RingCut rc = ring_cut<kN>(args, cut, kStateWarps * per_warp, 1);
  cut.stage = (rc.end + 127) / 128 * 128;
  launch_overlapped(
      x.fused.any() ? token_ring_head_kernel<kN, TokenGates::kLogits> : token_ring_head_kernel<kN, TokenGates::kValues>,
      Dim3{static_cast<unsigned>(blocks), static_cast<unsigned>((x.V + cut.tile - 1) / cut.tile)},
      32 * (kStateWarps + 1), static_cast<size_t>(cut.stage + row * cut.tile), stream, args, cut, rc);
  precond_step(args, cut, kN, stream);
}

template <int kN>
void launch_channels(const TokenForwardArgs& args, const TokenChoice& choice, void* stream) {
  if constexpr (kN < 8) {
    if (choice.kernel == TokenKernel::kRingHeads) return launch_heads<kN>(args, choice.parts, stream);
  }
  choice.rows == 8 ? launch_rows<kN, 8>(args, stream) : launch_rows<kN, 2>(args, stream);
}

template <int kN>
void launch_fold(const RingFoldArgs& args, void* stream) {
  constexpr int kTile = 8 * kStateWarps;
  launch_overlapped(ring_fold_kernel<kN>,
                    Dim3{static_cast<unsigned>(args.N), static_cast<unsigned>(args.HV),
                         static_cast<unsigned>((args.V + kTile - 1) / kTile)},
                    kStateThreads, static_cast<size_t>(128 * kN * (2 * args.ring.tokens + 1)), stream, args);
}

}  // namespace

void token_ring(const TokenForwardArgs& args, const TokenChoice& choice, void* stream) {
  switch (choice.channels) {
    case 2:
      return launch_channels<2>(args, choice, stream);
    case 4:
      return launch_channels<4>(args, choice, stream);
    default:
      return launch_channels<8>(args, choice, stream);
  }
}

void fold_ring(const RingFoldArgs& args, void* stream) {
  const int K = args.K;
  if (K > 256) fail_internal("fold_ring: expected K <= 256, got {}", K);
  K <= 64 ? launch_fold<2>(args, stream) : K <= 128 ? launch_fold<4>(args, stream) : launch_fold<8>(args, stream);
}

}  // namespace fw::cuda
