// The four warps that load what the computing warps of the gradient kernel (sm90/gradients/scalar/kernel.cuh) need: two
// copy, and two make the numbers of rows, a thread a row.
#pragma once

#include "gpu/sm90/ptx.cuh"
#include "scan/cuda/common/front/token_scalars.cuh"
#include "scan/cuda/gradients/phases.cuh"
#include "scan/cuda/sm90/gradients/general/loads.cuh"
#include "scan/cuda/sm90/gradients/scalar/layout.cuh"

namespace fw::cuda {

template <class Shape>
FW_DEVICE FrontCoefs<float> scalar_coefs(const ScalarChunk<Shape>& c, const FrontScalars<float>& s) {
  const Problem& x = c.args.problem;
  if constexpr (Shape::kLinear) {
    if (!c.plain()) return front_coefs(linear_rule(x.rule), x.scale, s);
  }
  return front_coefs(reduced_rule<true>(x.rule), x.scale, s);
}

// A thread's numbers from memory, a work tile ahead: of its row, and (first warp) two log-decays.
struct RowScaleRegs {
  FrontScalars<float> gates;
  float2 g;
  float precond_g, precond_beta;
};
template <class Shape>
FW_DEVICE void publish_precond(const ScalarChunk<Shape>& c, int work_tile, int row, const RowScaleRegs& numbers,
                               float k2);
template <class Shape>
FW_DEVICE void store_center_share(const ScalarChunk<Shape>& c, int work_tile);
template <class Shape>
FW_DEVICE RowScaleRegs load_row_gates(const ScalarChunk<Shape>& c, int work_tile, int row) {
  RowScaleRegs y;
  y.g = make_float2(0, 0);
  y.precond_g = y.precond_beta = 0;
  if (!c.has(work_tile)) return y;
  const Problem& p = c.args.problem;
  FrontScalars<float>& s = y.gates;
  const int rows = c.rows(work_tile);
  if (row < rows) {
    if (p.rule.uses_beta()) s.beta = load_element(c.rows_at(p.in.beta, work_tile), row, 0);
    if constexpr (Shape::kMakesM) {
      y.precond_g = load_element(c.rows_at(p.in.precond_g, work_tile), row, 0);
      y.precond_beta = load_element(c.rows_at(p.in.precond_beta, work_tile), row, 0);
    }
    if (!c.plain()) {
      load_gates<Numbers::kExceptBeta>(
          p.rule, false, s, [&](const TokenArg& from) { return load_element(c.rows_at(from, work_tile), row, 0); },
          p.in);
    }
  }
  if (row < 32) {
    const int first = 2 * row;
    if (p.rule.decay == Decay::kScalar) {
      const Rows g = c.rows_at(p.in.g, work_tile);
      if (first < rows) y.g.x = load_element(g, first, 0);
      if (first + 1 < rows) y.g.y = load_element(g, first + 1, 0);
    } else if (p.rule.decay == Decay::kConstant) {
      const float g = log1pf(-exp2f(-5.0f - static_cast<float>(c.hv(work_tile))));
      y.g = make_float2(first < rows ? g : 0.0f, first + 1 < rows ? g : 0.0f);
    }
  }
  return y;
}

// 64 rows of bf16 from `column` on into a tile, by copies of 16 bytes.
template <int kColumns, class Shape>
FW_DEVICE void copy_rows(const ScalarChunk<Shape>& c, const Rows& from, int loader, int rows, int column, int limit,
                         int to) {
  constexpr int kAtoms = kColumns / 8, kRows = Shape::kProducers / kAtoms;
  const int first = loader / kAtoms, in_tile = loader % kAtoms * 8;
  const int64_t step = 2 * kRows * from.stride;
  const char* p = from.data + 2 * (first * from.stride + column + in_tile);
  const int valid_rows = column + in_tile < limit ? rows : 0;
  FW_NO_UNROLL
  for (int row = first; row < 64; row += 4 * kRows) {
    FW_UNROLL
    for (int i = 0; i < 4; ++i, p += step) {
      const bool valid = row + i * kRows < valid_rows;
      cp_async_16(c.base + to + sw128_offset(row + i * kRows, in_tile), valid ? p : from.data, valid);
    }
  }
}

template <class Shape>
FW_DEVICE void load_stage(const ScalarChunk<Shape>& c, int loader, int stage, int work_tile, int block) {
  if (!c.has(work_tile)) return;
  const GradientArgs& x = c.args;
  const int at_stage = stage * Shape::kStageBytes;
  uint64_t* barrier = c.full(stage);
  if (loader < 4) {  // an chunk tile each
    const bool state = loader >= 2;
    const uint16_t* from = loader == 0 ? x.w : loader == 1 ? x.v : loader == 2 ? x.states : x.d_states;
    const int elements = state ? 64 * Shape::kTileK : kSw128Elements;
    const int64_t step = state ? Shape::kStateStep : kSw128Elements;
    const int to = loader == 0 ? Shape::kW : loader == 1 ? Shape::kV : loader == 2 ? Shape::kState : Shape::kDState;
    mbarrier_expect(barrier, 2 * elements);
    bulk_load(c.memory + at_stage + to, from + (c.tile(work_tile) * c.blocks + block) * step, 2 * elements, barrier);
  }
  const Rows d_o = c.rows_at(x.d_o, work_tile);
  const int column = block * kValueBlock, V = x.problem.V;
  if (c.pieces(kVec16DOut)) {
    copy_rows<kValueBlock>(c, d_o, loader, c.rows(work_tile), column, V, at_stage + Shape::kOut);
    cp_async_arrive(barrier);
    return;
  }
  FW_NO_UNROLL
  for (int item = loader; item < 64 * 8; item += Shape::kProducers) {
    const int row = item / 8, in_tile = item % 8 * 8;
    float y[8] = {};
    if (d_o.data != nullptr && row < c.rows(work_tile) && column + in_tile < V)
      load_channels(d_o, row, column + in_tile, V, y);
    *reinterpret_cast<uint4*>(c.memory + at_stage + Shape::kOut + sw128_offset(row, in_tile)) = pack_8(y);
  }
  mbarrier_arrive(barrier);
}

template <class Shape>
FW_DEVICE void load_tile_pairs(const ScalarChunk<Shape>& c, int work_tile) {
  if (!c.has(work_tile)) return;
  const IntraChunk& from = c.args.pairs[c.tile(work_tile)];
  const bool p = !c.has_dz(), a = Shape::kDelta && !c.has_residuals();
  mbarrier_expect(c.pairs_full(), ((a ? 1 : 0) + (p ? 1 : 0)) * kSw128Bytes);
  if (a) bulk_load(c.memory + Shape::kA, from.a, kSw128Bytes, c.pairs_full());
  if (p) bulk_load(c.memory + Shape::kP, from.p, kSw128Bytes, c.pairs_full());
}

// Rows of q or k of any kind into a tile, with zeros after their channels.
template <class Shape>
FW_DEVICE void fill_rows(const ScalarChunk<Shape>& c, const Rows& from, int loader, int rows, int to) {
  constexpr int kAtoms = Shape::kTileK / 8;
  FW_NO_UNROLL
  for (int item = loader; item < 64 * kAtoms; item += Shape::kProducers) {
    const int row = item / kAtoms, column = item % kAtoms * 8;
    float y[8] = {};
    if (row < rows) load_channels(from, row, column, c.args.problem.K, y);
    *reinterpret_cast<uint4*>(c.memory + to + sw128_offset(row, column)) = pack_8(y);
  }
}

template <class Shape>
FW_DEVICE void load_tile_keys(const ScalarChunk<Shape>& c, int loader, int work_tile) {
  if (!c.has(work_tile)) return;
  const Problem& x = c.args.problem;
  const int to = Shape::kRead + c.key_offset(work_tile), rows = c.rows(work_tile);
  if constexpr (Shape::kHalf) {
    if (!c.pieces(kVec16Keys)) {
      fill_rows(c, c.rows_at(x.in.q, work_tile), loader, rows, to);
      fill_rows(c, c.rows_at(x.in.k, work_tile), loader, rows, to + Shape::kStateBytes);
      mbarrier_arrive(c.keys_full(work_tile));
      return;
    }
  }
  copy_rows<Shape::kTileK>(c, c.rows_at(x.in.q, work_tile), loader, rows, 0, x.K, to);
  copy_rows<Shape::kTileK>(c, c.rows_at(x.in.k, work_tile), loader, rows, 0, x.K, to + Shape::kStateBytes);
  cp_async_arrive(c.keys_full(work_tile));
}

// What the computing warps read from memory themselves comes into the L2 cache.
template <class Shape>
FW_DEVICE void prefetch_rows(const ScalarChunk<Shape>& c, int loader, int work_tile) {
  if (!c.has(work_tile) || loader >= c.rows(work_tile)) return;
  const Problem& p = c.args.problem;
  if (c.wants_values()) {
    const Rows v = c.rows_at(p.in.v, work_tile);
    const int size = v.bf16 != 0 ? 2 : 4;
    for (int at = 0; at < p.V * size; at += 128) prefetch_line(v.data + loader * v.stride * size + at);
  }
  if constexpr (Shape::kMakesM) {
    if (32 * loader < p.K) prefetch_line(p.boundaries + c.tile(work_tile) * p.K + 32 * loader);
  } else if constexpr (Shape::kPrecond) {
    const Rows m = c.workspace_rows(WorkTile<Shape>::kM, p.H * p.K, work_tile);
    for (int at = 0; at < p.K * 4; at += 128) prefetch_line(m.data + loader * m.stride * 4 + at);
  }
}

// The squares of the row in a tile, summed.
template <class Shape>
FW_DEVICE float square_row(const ScalarChunk<Shape>& c, int tile, int row) {
  float sum = 0;
  FW_NO_UNROLL
  for (int first = 0; first < Shape::kTileK / 8; first += 4) {
    FW_UNROLL
    for (int i = 0; i < 4; ++i) {
      const uint4 x = *reinterpret_cast<const uint4*>(c.memory + tile + sw128_offset(row, 8 * (first + i)));
      sum = dot_16_bytes(x, x, sum);
    }
  }
  return sum;
}

// The row scales that the computing warps take.
template <class Shape>
FW_DEVICE void publish_rows(const ScalarChunk<Shape>& c, int work_tile, int row, const RowScaleRegs& numbers) {
  if (!c.has(work_tile)) return;
  const Problem& x = c.args.problem;
  if (row < 32) sum_decay(c, work_tile, numbers.g);
  mbarrier_wait(c.keys_full(work_tile), work_tile / 2 & 1);
  FrontScalars<float> s = numbers.gates;
  [[maybe_unused]] const int tile = Shape::kRead + c.key_offset(work_tile);
  if constexpr (Shape::kHalf && Shape::kMixes) {
    const RowNorms& all = c.args.half.norms[c.tile(work_tile)];
    s.q2 = all.q2[row], s.k2 = all.k2[row];
  } else if constexpr (Shape::kHalf) {
    const RowScales& all = c.args.half.numbers[c.tile(work_tile)];
    s.q2 = all.q2[row], s.k2 = all.k2[row];
  } else {
    if (x.rule.q_norm == Norm::kL2) s.q2 = square_row(c, tile, row);
    if (x.rule.k_norm == Norm::kL2 || x.rule.gain_uses_key_norm()) s.k2 = square_row(c, tile + Shape::kStateBytes, row);
  }
  FrontCoefs<float> f;
  if (row < c.rows(work_tile)) f = scalar_coefs(c, s);
  float a = 1, b = 1;
  if constexpr (Shape::kUnscaled) {
    if (row < c.rows(work_tile)) {
      const UnscaledCoefs y = unscaled_coefs(f);
      f = y.primed, a = y.a, b = y.b;
    }
  }
  c.norms(work_tile)[row] = s.q2, c.norms(work_tile)[64 + row] = s.k2;
  c.work_tile_floats(Shape::kBeta, work_tile)[row] = s.beta;
  using Chunk = ScalarChunk<Shape>;
  float* to = c.coefficients(work_tile) + row;
  // e_k not 0, so that what it multiplies can be found again.
  to[Chunk::kRq] = f.r_q, to[Chunk::kWk] = f.w_k, to[Chunk::kEk] = fabsf(f.e_k) > 1e-20f ? f.e_k : 1e-20f,
  to[Chunk::kZv] = f.z_v;
  if constexpr (Shape::kLinear) {
    to[Chunk::kRk] = f.r_k, to[Chunk::kEq] = f.e_q;
    float* gates = c.gate_scalars(work_tile) + row;
    gates[0] = s.erase, gates[64] = s.write;
    for_all_scalars<Numbers::kExceptBeta>([&, to = gates + 64](float y) mutable { *(to += 64) = y; }, s);
  }
  if constexpr (Shape::kUnscaled) to[Chunk::kOfE] = a, to[Chunk::kOfW] = b;
  if constexpr (Shape::kMakesM) publish_precond(c, work_tile, row, numbers, s.k2);
  mbarrier_arrive(c.rows_full(work_tile));
}

// The log-decays of two rows of a lane, where dg becomes that of logits. By a warp, as the next.
template <class Shape>
FW_DEVICE float2 fused_decays_of_tile(const ScalarChunk<Shape>& c, int work_tile) {
  const Problem& x = c.args.problem;
  float2 g = make_float2(0, 0);
  if (Shape::kPrecond || Shape::kHalf || x.fused.g.given == GateActivation::kValue) return g;
  const Rows from = c.rows_at(x.in.g, work_tile);
  if (2 * c.lane < c.rows(work_tile)) g.x = load_element(from, 2 * c.lane, 0);
  if (2 * c.lane + 1 < c.rows(work_tile)) g.y = load_element(from, 2 * c.lane + 1, 0);
  return g;
}
// dg from dG of the rows and the tail. values: fused_decays_of_tile().
template <class Shape>
FW_DEVICE void store_decay_gradient_of_tile(const ScalarChunk<Shape>& c, int work_tile, const float2& values) {
  const bool stores = c.rows_at(c.args.grads.d.g, work_tile).data != nullptr;
  if (!stores && c.args.form_parts == nullptr) return;
  const float tail = group_sum<16>(c.warp_sums(work_tile)[c.lane & 15]);
  float2 dg = decay_gradient(
      c, work_tile, *reinterpret_cast<const float2*>(c.work_tile_floats(Shape::kDG, work_tile) + 2 * c.lane), tail);
  if constexpr (!Shape::kPrecond && !Shape::kHalf) {
    const FusedGates& fused = c.args.problem.fused;
    if (fused.g.given != GateActivation::kValue) {
      const int rows = c.rows(work_tile);
      const float of_rows[2] = {values.x, values.y};
      float d[2] = {2 * c.lane < rows ? dg.x : 0.0f, 2 * c.lane + 1 < rows ? dg.y : 0.0f};
      decay_logit_gradients(fused, c.hv(work_tile), of_rows, d,
                            c.args.form_parts != nullptr ? c.args.form_parts + 2 * c.tile(work_tile) : nullptr);
      dg = make_float2(d[0], d[1]);
    }
  }
  if (stores) store_decay_gradient(c, work_tile, dg);
}

// Value blocks in the order in which the stages take them.
struct LoadStep {
  int work_tile = 0, block = 0, stage = 0;
};
template <class Shape>
FW_DEVICE void load_next_step(const ScalarChunk<Shape>& c, int loader, LoadStep& at) {
  load_stage(c, loader, at.stage, at.work_tile, at.block);
  if (++at.block == c.blocks) at.block = 0, ++at.work_tile;
  if (++at.stage == Shape::kStages) at.stage = 0;
}

// By two warps: what is copied into shared memory. The first work tiles have a start of their own: -2 and -1.
template <class Shape>
FW_DEVICE void copy_chunks(const ScalarChunk<Shape>& c) {
  const int loader = c.thread - Shape::kThreads;
  LoadStep step;
  int stage = 0, phase = 0;
  FW_NO_UNROLL
  for (int work_tile = -2; work_tile < 0 || c.has(work_tile); ++work_tile) {
    const bool running = work_tile >= 0;
    const int steps = running ? c.blocks : work_tile < -1 ? 0 : Shape::kStages;
    if (running && loader == 0 && c.has(work_tile + 1) && !c.has_residuals())
      bulk_prefetch(&c.args.pairs[c.tile(work_tile + 1)], sizeof(IntraChunk));
    FW_NO_UNROLL
    for (int i = 0; i < steps; ++i) {
      if (running) {
        mbarrier_wait(c.empty(stage), phase);
        if (++stage == Shape::kStages) stage = 0, phase ^= 1;
      }
      load_next_step(c, loader, step);
    }
    if (work_tile >= -1 && loader == 0) {  // who waits for it loads, and so cannot miss a phase
      if (running) mbarrier_wait(c.pairs_empty(), work_tile & 1);
      load_tile_pairs(c, work_tile + 1);
    }
    if (running) mbarrier_wait(c.is_last_of_tile(work_tile), work_tile / 2 & 1);
    load_tile_keys(c, loader, work_tile + 2);
    // Three stages take these warps to a work tile whose coords the other two have only just written; with two, an
    // arrival lies between.
    if (Shape::kStages > 2 && running) mbarrier_wait(c.coords_ready(work_tile), work_tile / 4 & 1);
  }
}

// By two warps: the row scales, and where the rows of later work tiles are.
template <class Shape>
FW_DEVICE void make_row_scales(const ScalarChunk<Shape>& c) {
  const int row = c.thread - Shape::kThreads - Shape::kProducers;
  RowScaleRegs numbers = load_row_gates(c, 0, row);
  FW_NO_UNROLL
  for (int work_tile = -1; work_tile < 0 || c.has(work_tile); ++work_tile) {
    publish_rows(c, work_tile + 1, row, numbers);
    numbers = load_row_gates(c, work_tile + 2, row);
    prefetch_rows(c, row, work_tile + 2);
    if (work_tile < 0) continue;
    float2 values = make_float2(0, 0);
    if (row < 32) values = fused_decays_of_tile(c, work_tile);
    mbarrier_wait(c.is_last_of_tile(work_tile), work_tile / 2 & 1);
    if (row < 32) store_decay_gradient_of_tile(c, work_tile, values);
    if constexpr (Shape::kMakesM) {
      if (row >= 32) store_center_share(c, work_tile);
    }
    sync_loaders();
    if (row < 32) continue;
    c.find(work_tile + 4);  // in place of this work tile
    if constexpr (Shape::kStages > 2) mbarrier_arrive(c.coords_ready(work_tile));
  }
}

}  // namespace fw::cuda
