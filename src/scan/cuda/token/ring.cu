// Decode that does not write the states (formulas: scan/ring.h). A block has value rows of one sequence and value head.
// Its key warps make the tokens' key sides and what these find of the ring's keys. The others take their rows of the
// state, which stay as they are, and of u through all tokens. Where a fold is due they store the state.
//
// Tensors (fw_ring of the C header): state [slots, HV, K, V] or [.., V, K]; ring [slots, HV, rows, K + V + decays].
//
// Roles:
//   kernel                   threads            warps 0 to 3                               other warps
//   token_ring_head_kernel   128                rows of the state through shared memory;   none
//                                               before, 0: the key side of the token, and
//                                               all: a share of the ring's groups
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
constexpr int head_blocks(TokenGates gates) { return gates == TokenGates::kLogits ? 4 : 5; }

// Positions that break the limits would leave the shared memory. Nothing to do: false.
FW_DEVICE bool takes_span(const TokenForwardArgs& a, const RingSpan& span, int length) {
  return (length > 0 || span.folds()) && span.position - span.base + length <= a.ring.span;
}
// The tokens of the block's sequence.
FW_DEVICE bool find_span(const TokenForwardArgs& a, const TokenCoord& coord, int& length, RingSpan& span) {
  const int all = sequence_length(a.problem.sequences, coord.n);
  length = all < a.ring.length ? all : a.ring.length;
  span = span_of(a.ring, coord.n, length);
  return takes_span(a, span, length);
}

// What token t finds of the ring's keys: of e, of r.
FW_DEVICE float* ring_coefs(const TokenForwardArgs& a, const RingCut& rc, int t, int of_r) {
  return reinterpret_cast<float*>(shared_memory() + rc.coefs) + (2 * t + of_r) * a.ring.span;
}

// The key side of the call's tokens, by key warp `warp`. The block of the first values writes the ring's keys.
template <int kN, TokenGates kGates>
FW_DEVICE void make_ring_keys(const TokenForwardArgs& a, const ForwardCut& cut, const RingCut& rc,
                              const TokenCoord& coord, const RingHead& ring, const RingSpan& span, int length, int warp,
                              int lane, const GateScalars<kN>& own) {
  const Problem& x = a.problem;
  const Rule& rule = x.rule;
  char* const shared = shared_memory();
  char *const keys = shared + rc.keys, *const decays = shared + rc.decays, *const products = shared + rc.products;
  const auto meet = [&] { rc.key_warps == 1 ? sync_warp() : named_barrier_sync(2, 32 * rc.key_warps); };
  const auto token_at = [&](int t) { return shared + t * cut.gather.bytes; };
  const int found = span.position - span.base;
  load_ring_keys<kN>(rule, x.K, x.V, coord.hv, ring, found, warp, rc.key_warps, rc.wide, lane, keys, decays);
  FW_NO_UNROLL
  for (int t = warp; t < length; t += rc.key_warps) {
    char* const token = token_at(t);
    make_token<kGates>(a, cut, coord, t, cut.tile, start_token(a, cut, coord, t, lane, token), own, lane, token);
    put_ring_key<kN>(rule, GatheredToken<kN>(cut.gather, token, lane), found + t, lane, keys, decays);
  }
  cp_async_wait<0>();
  meet();
  FW_NO_UNROLL
  for (int t = warp; t < length; t += rc.key_warps) {
    const GatheredToken<kN> token(cut.gather, token_at(t), lane);
    const int at = span.position + t;
    ring_coefficients<kN>(rule, token, span.begin(at) - span.base, found + t, a.ring.span, lane, keys, decays,
                          ring_coefs(a, rc, t, 0), products + 128 * kN * t);
    if (coord.v_tile == 0 && at >= span.kept()) store_ring_key<kN>(rule, x.K, x.V, token, ring.row(found + t), lane);
  }
  if (!span.folds()) return;
  meet();  // nobody reads the keys as they were any more
  if (warp != 0) return;
  FW_NO_UNROLL
  for (int from = span.base, i = a.ring.length; from < span.last; from += span.tokens, ++i)
    fold_ring_keys<kN>(rule, from - span.base, from - span.base + span.tokens, lane, keys, decays,
                       products + 128 * kN * i);
}

// A warp's kRows rows from value v0 of the head on, row0 of the tile, through all tokens; `rows` of them exist.
// Of a token: z(t, row) of a row of the warp, sum(t, first, last) what the lane adds of the ring's tokens `first` to
// `last`, to(last) its row of the ring. s is the state. fold(first, i, u, s): the call's i-th fold, of the tokens from
// `first` on, with u(j, values) as of fold_rows(). store() stores the new state, if it stays.
template <int kN, int kRows, class Values, class Sum, class To, class Fold, class Store>
FW_DEVICE void ring_rows(const TokenForwardArgs& a, const ForwardCut& cut, const RingCut& rc, const RingSpan& span,
                         const Rows& o_rows, int length, int v0, int row0, int rows, int lane, Values&& z, Sum&& sum,
                         To&& to, Fold&& fold, Store&& store, float (&s)[kRows][kN]) {
  char* const shared = shared_memory();
  float* const u = reinterpret_cast<float*>(shared + rc.u);
  const int row = row_of_lane<kRows>(lane), found = span.position - span.base;
  const bool writes = has_row<kRows>(lane) && row < rows;
  int folded = span.base;
  FW_NO_UNROLL
  for (int t = 0;; ++t) {
    const int at = span.position + t, end = t < length ? span.begin(at) : span.last;
    FW_NO_UNROLL
    for (; folded < end; folded += span.tokens) {
      const int first = folded - span.base;
      fold(
          first, first > 0 ? 1 : 0,
          [&](int j, float(&values)[kRows]) {
            load_wide<kRows>(reinterpret_cast<const char*>(u + (first + j) * rc.tile + row0), values);
          },
          s);
      round_rows(a.final_state.bf16 != 0, s);
      if (folded < span.stored) store();
    }
    if (t >= length) return;
    const GatheredToken<kN> token(cut.gather, shared + t * cut.gather.bytes, lane);
    const int first = end - span.base, last = found + t;
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
    // Lanes below 16 have the sum of e, the others that of r.
    float own = scattered_sum(sums, lane);
    if (last > first) own += sum(t, first, last);
    const float other = shuffle_xor(own, 16);
    const float of_e = lane < 16 ? own : other, of_r = lane < 16 ? other : own;
    const float residual = z(t, row) - of_e;
    if (writes) {
      if (o_rows.data != nullptr) store_element(o_rows, t, v0 + row, fmaf(token.rw, residual, of_r));
      if (at >= span.kept()) to(last)[a.problem.K + v0 + row] = residual;
    }
    if (has_row<kRows>(lane)) u[last * rc.tile + row0 + row] = residual;
    sync_warp();
  }
}

// Starts the copies of u of the `found` tokens in the ring, of `count` values from v0 on, by `threads` threads. To the
// tile's `room` rows from row0 on.
FW_DEVICE void load_ring_values(const TokenForwardArgs& a, const RingCut& rc, const RingHead& ring, int found, int v0,
                                int row0, int count, int room, int thread, int threads) {
  const int first = a.problem.K + v0;
  float* const u = reinterpret_cast<float*>(shared_memory() + rc.u) + row0;
  if (rc.wide) {
    // a row of the ring to each `units` threads
    const int units = room / 4, rows = static_cast<unsigned>(threads) / static_cast<unsigned>(units),
              first_row = static_cast<unsigned>(thread) / static_cast<unsigned>(units),
              at = 4 * (thread - first_row * units);
    const uint32_t base = shared_address(reinterpret_cast<char*>(u)) + 4 * static_cast<uint32_t>(at);
    if (thread >= rows * units) return;
    FW_NO_UNROLL
    for (int j = first_row; j < found; j += rows)
      cp_async_16(base + 4 * static_cast<uint32_t>(j * rc.tile), ring.row(j) + first + (at < count ? at : 0),
                  at < count);
    return;
  }
  constexpr int kMany = 4;
  FW_NO_UNROLL
  for (int at = thread; at < room; at += threads) {
    FW_NO_UNROLL
    for (int j = 0; j < found; j += kMany) {
      float x[kMany];
#pragma unroll
      for (int i = 0; i < kMany; ++i) x[i] = j + i < found && at < count ? ring.row(j + i)[first + at] : 0.0f;
#pragma unroll
      for (int i = 0; i < kMany; ++i) {
        if (j + i < found) u[(j + i) * rc.tile + at] = x[i];
      }
    }
  }
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
  const RingHead ring = ring_head(a.ring, coord.slot, coord.hv, span.base);
  WarpState<kN, kRows> state;
  if (warp >= kStateWarps) {
    make_ring_keys<kN, kGates>(a, cut, rc, coord, ring, span, length, warp - kStateWarps, lane, own);
  } else {
    state.load(a, cut, coord, warp, lane);
    load_ring_values(a, rc, ring, span.position - span.base, coord.v_tile, 0,
                     x.V - coord.v_tile < cut.tile ? x.V - coord.v_tile : cut.tile, cut.tile, 32 * warp + lane,
                     kStateThreads);
    cp_async_commit();
    state.arrived();
  }
  sync_threads();
  if (warp >= kStateWarps) return;
  state.finish(a, cut, coord, warp, lane);
  grid_dependency_launch();
  const int row0 = warp * kRows, v0 = coord.v_tile + row0;
  ring_rows<kN, kRows>(
      a, cut, rc, span, rows_of(a.o, x.sequences, coord.n, coord.hv), length, v0, row0, x.V - v0, lane,
      [&](int t, int row) {
        return reinterpret_cast<const float*>(shared_memory() + t * cut.gather.bytes +
                                              cut.gather.at[kRowV])[row0 + row];
      },
      // Even lanes add every second token, odd ones the others.
      [&](int t, int begin, int end) {
        const int part = begin + lane % 2;
        const float* const coefs = ring_coefs(a, rc, t, lane / 16);
        const float* const u = reinterpret_cast<const float*>(shared_memory() + rc.u) + row0 + row_of_lane<kRows>(lane);
        float sum = 0;
        FW_NO_UNROLL
        for (int j = part; j < end; j += 2) sum = fmaf(coefs[j], u[j * rc.tile], sum);
        sync_warp();
        return sum + shuffle_xor(sum, 1);
      },
      [&](int j) { return ring.row(j); },
      [&](int begin, int i, auto&& u, float(&s)[kRows][kN]) {
        const char* const shared = shared_memory();
        fold_rows<kN, kRows>(span.tokens, shared + rc.products + 128 * kN * (a.ring.length + i), lane,
                             FoldedKeys<kN>{shared + rc.keys + 128 * kN * begin, lane}, u, s);
      },
      [&] { state.store(a, cut, coord, coord.slot, warp, lane); }, state.s);
}

// What token_ring_head_kernel has of the ring: `count` tokens, from `first` on, are those that the call's token finds.
template <int kN>
struct HeadRing {
  const Problem& x;
  const RingHead rows;
  const char* products;  // of the groups
  int first, count, found, tokens, lane;
  bool wide;
  float constant;  // the decay, where it is not in the ring

  FW_DEVICE int groups() const { return (count + kRingGroup - 1) / kRingGroup; }
  FW_DEVICE int size(int group) const {
    const int remaining = count - kRingGroup * group;
    return remaining < kRingGroup ? remaining : kRingGroup;
  }
  FW_DEVICE void row(int j, float (&w)[kN], float (&alpha)[kN]) const {
    const float* const key = rows.row(j);
    load_ring_channels<kN>(wide, key, x.K, 0, lane, w);
    decay(key, alpha);
  }
  FW_DEVICE void decay(const float* key, float (&alpha)[kN]) const {
    const float* const from = key + x.K + x.V;
    if (x.rule.decay == Decay::kChannel) return load_ring_channels<kN>(wide, from, x.K, 1, lane, alpha);
    const float one = x.rule.decay == Decay::kScalar ? from[0] : constant;
#pragma unroll
    for (int c = 0; c < kN; ++c) alpha[c] = one;
  }
  FW_DEVICE void group(int g, float (&w)[kRingGroup][kN], float (&of_group)[kN]) const {
    const int from = first + kRingGroup * g;
    make_group<kN>(
        size(g), [&](int i, float(&key)[kN], float(&alpha)[kN]) { row(from + i, key, alpha); }, w, of_group);
  }
  // The decays of the groups from `last` - 1 down to g, times p.
  FW_DEVICE void multiply(int g, int last, float (&p)[kN]) const {
    FW_NO_UNROLL
    for (int i = last - 1; i >= g; --i) {
      float of_group[kN];
      load_wide<kN>(products + 128 * kN * i + 4 * kN * lane, of_group);
#pragma unroll
      for (int c = 0; c < kN; ++c) p[c] *= of_group[c];
    }
  }
  // Of token j of the fold, which is a row of the ring or the call's token.
  FW_DEVICE void folded(const GatheredToken<kN>& token, int j, float (&w)[kN], float (&alpha)[kN]) const {
    if (j < found) return row(j, w, alpha);
    token.w(w);
    token.alpha(alpha);
  }
  // The decays of the call's only fold.
  FW_DEVICE void fold_product(const GatheredToken<kN>& token, float (&p)[kN]) const {
#pragma unroll
    for (int c = 0; c < kN; ++c) p[c] = 1;
    FW_NO_UNROLL
    for (int end = tokens; end > 0; end -= kRingGroup) {
      float alpha[kRingGroup][kN], w[kN];
#pragma unroll
      for (int i = 0; i < kRingGroup; ++i) {
#pragma unroll
        for (int c = 0; c < kN; ++c) alpha[i][c] = 1;
        if (end - 1 - i >= 0) folded(token, end - 1 - i, w, alpha[i]);
      }
#pragma unroll
      for (int i = 0; i < kRingGroup; ++i) {
#pragma unroll
        for (int c = 0; c < kN; ++c) p[c] *= alpha[i][c];
      }
    }
  }
  // Keys of the fold, each loaded one token ahead.
  struct Keys {
    const HeadRing& ring;
    const GatheredToken<kN>& token;
    float p[kN], next[kN], next_alpha[kN];
    FW_DEVICE Keys(const HeadRing& of, const GatheredToken<kN>& own) : ring(of), token(own) {
#pragma unroll
      for (int c = 0; c < kN; ++c) p[c] = 1;
      ring.folded(token, ring.tokens - 1, next, next_alpha);
    }
    FW_DEVICE void operator()(int j, float (&w)[kN]) {
#pragma unroll
      for (int c = 0; c < kN; ++c) w[c] = next[c] * p[c], p[c] *= next_alpha[c];
      if (j > 0) ring.folded(token, j - 1, next, next_alpha);
    }
  };
};

// One token each, the states contiguous [V, K]: a block has half a head, its state on its way through shared memory.
template <int kN, TokenGates kGates>
__global__ void __launch_bounds__(kStateThreads, head_blocks(kGates))
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
  prefetch_rows(a, coord, first, last, lane);
  GateScalars<kN> own = {};
  if (kGates == TokenGates::kLogits && warp == 0) own = token_gate_scalars<kN>(x, coord.hv, lane);
  grid_dependency_wait();
  if (!find_slot(a, cut, coord)) return;
  // They are on their way while the copies below start.
  const int position = a.ring.positions[coord.n], previous = a.ring.previous != nullptr ? a.ring.previous[coord.n] : 0;
  const StateRef initial = state_of(x.initial_state, coord.slot, coord.hv);
  char* const token = shared_memory();
  char* const stage = token + cut.stage - coord.v_tile * row_bytes;  // row v at v row_bytes
  GatheredScalar scalar;
  if (warp == 0) scalar = start_token(a, cut, coord, 0, lane, token);
#pragma unroll 4
  for (int at = first * row_bytes + 16 * lane; at < last * row_bytes; at += 512)
    cp_async_16(shared_address(stage + at), initial.data + at, true);
  const RingSpan span = ring_span(a.ring.tokens, a.ring.previous != nullptr, position, previous, 1);
  if (!takes_span(a, span, 1)) return cp_async_wait<0>();
  const int found = span.position - span.base, begin = span.begin(span.position) - span.base;
  char* const products = token + rc.groups;
  const HeadRing<kN> ring{x,
                          ring_head(a.ring, coord.slot, coord.hv, span.base),
                          products,
                          begin,
                          found - begin,
                          found,
                          span.tokens,
                          lane,
                          rc.wide,
                          x.rule.decay == Decay::kConstant ? static_cast<float>(constant_decay(coord.hv)) : 1.0f};
  const int groups = ring.groups();
  if (first < last)
    load_ring_values(a, rc, ring.rows, found, first, first - coord.v_tile, last - first, per_warp, lane, 32);
  cp_async_commit();
  if (warp == 0) make_token<kGates>(a, cut, coord, 0, 0, scalar, own, lane, token, 1);
  // Warp 0, which has the token, has the last group of four. A warp's first one comes last and stays in registers.
  const int group = (warp + kStateWarps - 1) % kStateWarps;
  float w[kRingGroup][kN];
  FW_NO_UNROLL
  for (int g = group + (groups - 1 - group) / kStateWarps * kStateWarps; g >= 0 && g < groups; g -= kStateWarps) {
    float of_group[kN];
    ring.group(g, w, of_group);
    store_wide<kN>(products + 128 * kN * g + 4 * kN * lane, 0, of_group);
  }
  grid_dependency_launch();
  sync_threads();
  const GatheredToken<kN> k(cut.gather, token, lane);
  FW_NO_UNROLL
  for (int g = group; g < groups; g += kStateWarps) {
    float p[kN];
    if (g != group) ring.group(g, w, p);
    k.alpha(p);
    ring.multiply(g + 1, groups, p);
    group_coefficients<kN>(k, p, w, ring.size(g), a.ring.span, lane, ring_coefs(a, rc, 0, 0) + begin + kRingGroup * g);
  }
  if (warp == 0) {
    float p[kN];
    k.alpha(p);
    ring.multiply(0, groups, p);
    store_wide<kN>(token + rc.products + 4 * kN * lane, 0, p);
    if (span.folds()) {
      ring.fold_product(k, p);
      store_wide<kN>(token + rc.products + 128 * kN + 4 * kN * lane, 0, p);
    }
  }
  cp_async_wait<0>();
  sync_threads();
  const float z_v = reinterpret_cast<const float*>(token + cut.gather.rw_at)[1];
  const Rows o_rows = rows_of(a.o, x.sequences, coord.n, coord.hv);
  const int to = ring.rows.index(found);
  float z = 0, of_ring = 0;
  const bool whole = initial.bf16 == 0 && x.K == 32 * kN;
  FW_NO_UNROLL
  for (int v0 = first; v0 < last; v0 += kHeadRows) {
    const int rows = last - v0, row0 = v0 - coord.v_tile;
    float s[kHeadRows][kN] = {};
    if (whole && rows >= kHeadRows) {
#pragma unroll
      for (int i = 0; i < kHeadRows; ++i)
        load_wide<kN>(token + cut.stage + 128 * kN * (row0 + i) + 4 * kN * lane, s[i]);
    } else {
      load_packed_rows<kN, kHeadRows>({stage, 1, x.K, initial.bf16}, v0, rows, x.K, lane, s);
      if (initial.bf16 != 0) unpack_rows<kN, kHeadRows>(s);
    }
    // Of 16 rows at once: a lane has the sum of e, or of r, of one row, and its z.
    const int chunk = (v0 - first) % 16, row16 = lane % 16;
    if (chunk == 0) {
      const float* const coefs = ring_coefs(a, rc, 0, lane / 16);
      const float* const u = reinterpret_cast<const float*>(token + rc.u) + row0 + row16;
      const bool exists = row16 < rows;
      z = exists ? z_v * gathered_value<kGates>(x, cut.gather, token, row0 + row16) : 0.0f;
      float sums[2] = {};
      if (exists) {
#pragma unroll 4
        for (int j = begin; j < found; j += 2) {
          sums[0] = fmaf(coefs[j], u[j * rc.tile], sums[0]);
          if (j + 1 < found) sums[1] = fmaf(coefs[j + 1], u[(j + 1) * rc.tile], sums[1]);
        }
      }
      of_ring = sums[0] + sums[1];
      sync_warp();
    }
    ring_rows<kN, kHeadRows>(
        a, cut, rc, span, o_rows, 1, v0, row0, rows, lane, [&](int, int row) { return shuffle(z, chunk + row); },
        [&](int, int, int) { return shuffle(of_ring, lane / 16 * 16 + chunk + row_of_lane<kHeadRows>(lane)); },
        [&](int) { return ring.rows.data + to * ring.rows.stride; },
        [&](int, int, auto&& u, float(&state)[kHeadRows][kN]) {
          fold_rows<kN, kHeadRows>(span.tokens, token + rc.products + 128 * kN, lane,
                                   typename HeadRing<kN>::Keys(ring, k), u, state);
        },
        [&] {
          // The shuffle keeps the addresses where they are wanted: most tokens store nothing.
          const int hv = shuffle(coord.hv, 0);
          store_rows<kN, kHeadRows>(state_of(a.final_state, coord.slot, hv), v0, rows, x.K, lane, s);
        },
        s);
  }
  if (warp == 0 && coord.v_tile == 0 && span.position >= span.kept())
    store_ring_key<kN>(x.rule, x.K, x.V, k, ring.rows.row(found), lane);
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
  char *const keys = shared_memory(), *const decays = keys + 128 * kN * a.ring.tokens,
              *const product = decays + 128 * kN * a.ring.tokens;
  const StateRef state = state_of(a.state, slot, hv);
  float s[kRows][kN];
  load_state<kN, kRows>(state, v0, a.V, a.K, lane, s);
  FW_NO_UNROLL
  for (int base = span.base; base < span.position; base += a.ring.tokens) {
    const int end = base + a.ring.tokens < span.position ? base + a.ring.tokens : span.position;
    const RingHead ring = ring_head(a.ring, slot, hv, base);
    sync_threads();
    if (warp == 0) {
      load_ring_keys<kN>(a.rule, a.K, a.V, hv, ring, end - base, 0, 1, false, lane, keys, decays);
      sync_warp();
      fold_ring_keys<kN>(a.rule, 0, end - base, lane, keys, decays, product);
    }
    sync_threads();
    fold_rows<kN, kRows>(
        end - base, product, lane, FoldedKeys<kN>{keys, lane},
        [&](int j, float(&values)[kRows]) {
          const float* row = ring.row(j) + a.K;
#pragma unroll
          for (int i = 0; i < kRows; ++i) values[i] = v0 + i < a.V ? row[v0 + i] : 0.0f;
        },
        s);
    round_rows(state.bf16 != 0, s);
  }
  if (span.base < span.position) store_state<kN, kRows>(state, v0, a.V, a.K, lane, s);
}

// key_warps: of token_ring_kernel; 0: token_ring_head_kernel, which has no rows of the ring but u.
template <int kN>
RingCut ring_cut(const TokenForwardArgs& args, const ForwardCut& cut, int tile, int key_warps) {
  const RingArg& ring = args.ring;
  const Rule& rule = args.problem.rule;
  const int row = 128 * kN;
  const auto aligned = [](int bytes) { return (bytes + 15) / 16 * 16; };
  RingCut rc;
  rc.tile = tile;
  rc.key_warps = key_warps;
  rc.keys = rc.groups = after_tokens(cut, ring.length);
  rc.decays = rc.keys + row * ring.span;
  rc.products = key_warps == 0 ? rc.groups + row * ((ring.tokens - 1 + kRingGroup - 1) / kRingGroup)
                               : rc.decays + (rule.decay == Decay::kChannel ? row * ring.span : aligned(4 * ring.span));
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
  const RingCut rc = ring_cut<kN>(args, cut, kStateWarps * per_warp, 0);
  cut.stage = (rc.end + 127) / 128 * 128;
  launch_overlapped(
      x.fused.any() ? token_ring_head_kernel<kN, TokenGates::kLogits> : token_ring_head_kernel<kN, TokenGates::kValues>,
      Dim3{static_cast<unsigned>(blocks), static_cast<unsigned>((x.V + cut.tile - 1) / cut.tile)}, kStateThreads,
      static_cast<size_t>(cut.stage + row * cut.tile), stream, args, cut, rc);
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
