// The adjoint of the preconditioner, chunk-parallel: from the last token of a chunk to the first, with D the gradient
// of A,
//     D += dM dM/dA_t     dg = alpha D.A_{t-1}     dbeta = D.khat^2     dkhat = 2 beta D khat     D = alpha D (+ dM dM/dA_{t-1}, the forms of the A before)
// A first kernel has what each chunk makes of D = 0, a second D after every chunk, a third the gradients. Where
// gradients() has made the chunks' share, only what D adds is left (precond/carry.cuh). See kernels.h.
//
// Roles as precond/forward.cu: a warp has eight tokens; A goes up and D, the gradient of A after, down through shared
// memory, a sync_threads() each.
#include "gpu/launch.h"
#include "scan/cuda/kernels.h"
#include "scan/cuda/precond/carry.cuh"
#include "scan/cuda/precond/chunk.cuh"

namespace fw::cuda {
namespace {

constexpr int kCenterThreads = 32;

// A before each of the warp's tokens, where each thread finds its own.
template <int kN>
FW_DEVICE char* kept_address(char* kept, int thread) {
  return kept + 4 * (kN < 4 ? kN : 4) * thread;
}
template <int kN>
FW_DEVICE void store_before(char* to, int r, const float (&a)[kN]) {
  constexpr int kPart = kN < 4 ? kN : 4, kParts = kN / kPart;
#pragma unroll
  for (int i = 0; i < kParts; ++i) {
    float part[kPart];
#pragma unroll
    for (int j = 0; j < kPart; ++j) part[j] = a[i * kPart + j];
    store_wide<kPart>(to + (r * kParts + i) * 4 * kPart * kPrecondThreads, 0, part);
  }
}
template <int kN>
FW_DEVICE void load_before(const char* from, int r, float (&a)[kN]) {
  constexpr int kPart = kN < 4 ? kN : 4, kParts = kN / kPart;
#pragma unroll
  for (int i = 0; i < kParts; ++i) {
    float part[kPart];
    load_wide<kPart>(from + (r * kParts + i) * 4 * kPart * kPrecondThreads, part);
#pragma unroll
    for (int j = 0; j < kPart; ++j) a[i * kPart + j] = part[j];
  }
}
template <int kN>
inline constexpr size_t kKeptBytes = sizeof(float) * kChunk * 32 * kN;

// Up the warp's tokens from the A before them: dm becomes what M says about the A that it is made of, and dcenter is
// reduced by what it says about the center. kept: null or kept_address().
template <int kN>
FW_DEVICE void through_m(const PrecondMap<float>& map, const RunGates& gates, const RunRows<kN>& k, float (&state)[kN],
                         RunRows<kN>& dm, float& dcenter, char* kept) {
#pragma unroll
  for (int r = 0; r < kRunTokens; ++r) {
    const float alpha = of_token(gates.alpha, r), gain = of_token(gates.gain, r);
    if (kept != nullptr) store_before<kN>(kept, r, state);
#pragma unroll
    for (int j = 0; j < kN; ++j) {
      const float before = state[j];
      state[j] = step_precond(alpha, gain, k[r][j], before);
      float center = 0;
      dm[r][j] = precond_gradient(map, max(map.previous ? before : state[j], kLeastState), dm[r][j], center);
      dcenter += center;
    }
  }
}

// The same numbers, but what was made of them before is not kept for what is made of them later: k k of all of them are
// registers.
template <int kN>
FW_DEVICE void forget_products(RunRows<kN>& k) {
#pragma unroll
  for (int r = 0; r < kRunTokens; ++r) {
#pragma unroll
    for (int j = 0; j < kN; ++j)
      k[r][j] = bits_float(static_cast<uint32_t>(opaque(static_cast<int>(float_bits(k[r][j])))));
  }
}

constexpr int min_blocks(int channels) { return channels == 8 ? 1 : 2; }

template <int kN>
struct BackwardShared {
  RunShared<kN> up, down;
  float center[kRuns];
};

// What a launch is about, alongside the arguments.
struct BackwardTensors {
  FlatTensor k, g, beta, dm, lo, dk, dg, dbeta;
  PrecondMap<float> map;
  float *products = nullptr, *behind = nullptr;  // of each chunk: [chunks, H], [chunks, H, K]
  int32_t chunks = 0;
  bool by_sequence = false;
};

enum class BackwardPass { kSums, kRows };  // the first kernel, the third

template <int kN, BackwardPass kPass>
__global__ void __launch_bounds__(kPrecondThreads, min_blocks(kN))
    precond_backward_kernel(const __grid_constant__ PrecondBackwardArgs a, const __grid_constant__ BackwardTensors f) {
  constexpr bool kSums = kPass == BackwardPass::kSums;
  const Problem& x = a.problem;
  BackwardShared<kN>& shared = *reinterpret_cast<BackwardShared<kN>*>(shared_memory());
  if (kSums) grid_dependency_launch();
  // The third from the last chunk on: what the first has left in the cache.
  const RunBlock c = run_block<kN>(x, f.chunks, f.by_sequence, !kSums);
  if (c.chunk < 0) return grid_dependency_wait();
  const int64_t index = static_cast<int64_t>(c.chunk) * x.H + c.h;
  const auto rows_of_dm = [&](int i) {
    TokenArg dm = workspace_rows(x, a.grads.dm, x.HV);
    dm.stride_h = x.K;
    return key_rows(dm, x.sequences, c.n, c.h * x.group + i);
  };
  const RunTensor<kN> keys(x, f.k, c, [&] { return key_rows(x.in.k, x.sequences, c.n, c.h); });
  const RunTensor<kN> dm(x, f.dm, c, [&] { return rows_of_dm(0); });
  RunRows<kN> k, da;
  keys.load(0, k);
  dm.load(0, da);
  const bool has_dk = !kSums && a.dk.data != nullptr, has_lo = has_dk && a.grads.d.k.data != nullptr;
  const RunTensor<kN> lo(x, f.lo, c,
                         [&] { return rows_of(has_lo ? a.grads.d.k : TokenArg{}, x.sequences, c.n, c.h * x.group); });
  if (has_lo) lo.prefetch(x.K, c.lane);
  const RawGates raw = load_gates(x, f.g, f.beta, c);
  float state[kN], d[kN];
  load_lane(a.boundaries, index, c.channel, x.K, state);
  if (!kSums) {
    grid_dependency_wait();
    load_lane(f.behind, index, c.channel, x.K, d);
  }
  keys.unpack(k);
  const RunGates gates = make_gates<kN>(x, raw, k, c.lane);
  put_run<kN>(gates, c.warp, c.lane, shared.up, [&](int r, float(&row)[kN]) {
#pragma unroll
    for (int j = 0; j < kN; ++j) row[j] = k[r][j];
  });
  FW_NO_UNROLL
  for (int i = 1; i < x.group; ++i) add_tokens(run_coord<kN>(rows_of_dm(i), c.token, c.count, c.channel, x.K), da);
  forget_products<kN>(k);
  sync_threads();
  run_start<Direction::kForward, kN>(c.warp, c.lane, shared.up, state);

  PrecondMap<float> map = f.map;
  if (x.rule.uses_precond_center()) map.center = x.precond_center[c.h * x.center_stride];
  char* const kept =
      kSums ? nullptr
            : kept_address<kN>(shared_memory() + sizeof(BackwardShared<kN>), static_cast<int>(thread_index()));
  float dcenter = 0;
  with_form(map, [&](const PrecondMap<float>& form) { through_m<kN>(form, gates, k, state, da, dcenter, kept); });
  if (kSums && a.dcenter_parts != nullptr) {
    const float part = warp_sum(dcenter);
    if (c.lane == 0) shared.center[c.warp] = part;
  }
  // D before the warp's tokens (its gradients through M: da) from 0 after them.
  {
    float sum[kN] = {};
#pragma unroll
    for (int r = kRunTokens - 1; r >= 0; --r) {
      const float alpha = of_token(gates.alpha, r);
#pragma unroll
      for (int j = 0; j < kN; ++j) sum[j] = map.previous ? fmaf(alpha, sum[j], da[r][j]) : alpha * (sum[j] + da[r][j]);
    }
#pragma unroll
    for (int j = 0; j < kN; ++j) shared.down.sum[c.warp][c.channel + j] = sum[j];
    if (c.lane == 0) shared.down.product[c.warp] = shared.up.product[c.warp];
  }
  sync_threads();

  if constexpr (kSums) {
    if (c.warp != 0) return;
    float sum[kN] = {};
    const float product = run_start<Direction::kReverse, kN>(-1, c.lane, shared.down, sum);
    store_lane(a.scratch, index, c.channel, x.K, sum);
    if (c.lane != 0) return;
    f.products[index] = product;
    if (a.dcenter_parts == nullptr) return;
    float total = 0;
    for (int i = 0; i < kRuns; ++i) total += shared.center[i];
    a.dcenter_parts[index] = total;
  } else {
    // D of every token (in da), and the sums over channels that the gates want.
    run_start<Direction::kReverse, kN>(c.warp, c.lane, shared.down, d);
    forget_products<kN>(k);
    float sums[2 * kRunTokens];
#pragma unroll
    for (int r = kRunTokens - 1; r >= 0; --r) {
      const float alpha = of_token(gates.alpha, r);
      float before[kN], with_state = 0, with_key = 0;
      load_before<kN>(kept, r, before);
#pragma unroll
      for (int j = 0; j < kN; ++j) {
        const float here = map.previous ? d[j] : d[j] + da[r][j];
        d[j] = map.previous ? fmaf(alpha, here, da[r][j]) : alpha * here;
        with_state = fmaf(here, before[j], with_state);
        with_key = fmaf(here, k[r][j] * k[r][j], with_key);
        da[r][j] = here;
      }
      sums[r] = with_state;
      sums[kRunTokens + r] = with_key;
    }
    // Lanes 2 r have the first of token r, lanes 16 + 2 r the second.
    const float total = scattered_sum<2 * kRunTokens>(sums, c.lane);
    const int own = c.lane / 2 % kRunTokens;
    const float alpha = of_token(gates.alpha, own), kn2 = of_token(gates.kn2, own);
    if (c.lane % 2 == 0 && own < c.count) {
      const bool of_alpha = c.lane < 16;
      float sum = !of_alpha ? kn2 * total : alpha == 0 ? 0.0f : alpha * total;
      const float* const more = of_alpha ? a.grads.dalpha_p : a.grads.dbeta_p;
      const int64_t token = (first_token(x.sequences, c.n) + c.token + own) * x.HV + c.h * x.group;
      for (int i = 0; more != nullptr && i < x.group; ++i) sum += more[token + i];
      const FlatTensor to{of_alpha ? f.dg.data : f.dbeta.data, of_alpha ? f.dg.step : f.dbeta.step,
                          of_alpha ? f.dg.head : f.dbeta.head, of_alpha ? f.dg.bf16 : f.dbeta.bf16};
      Rows rows{};
      if (to.data != nullptr) {
        rows = {flat_address(to, c.flat + own, c.h), 0, to.bf16};
      } else {
        rows = key_rows(of_alpha ? a.dprecond_g : a.dprecond_beta, x.sequences, c.n, c.h);
      }
      if (rows.data != nullptr) store_element(rows, c.token + own, 0, sum);
    }
    if (!has_dk) return;
    const bool normalised = x.rule.k_norm == Norm::kL2 && gates.square + static_cast<float>(x.rule.norm_eps) > 0;
    const float slope = normalised ? -2 * gates.gain * gates.kn2 : 0.0f;
    const RunTensor<kN> out(x, f.dk, c, [&] { return key_rows(a.dk, x.sequences, c.n, c.h); });
    constexpr int kAtOnce = kN == 8 ? 2 : 4;  // rows of the others
    float other[kAtOnce][kN];
#pragma unroll
    for (int r = 0; r < kRunTokens; ++r) {
      if (has_lo && r % kAtOnce == 0) {
        lo.load(r, other);
        lo.unpack(other);
        FW_NO_UNROLL
        for (int i = 1; i < x.group; ++i) {
          const Rows rows = rows_of(a.grads.d.k, x.sequences, c.n, c.h * x.group + i);
          add_tokens(run_coord<kN>(rows, c.token + r, c.count - r, c.channel, x.K), other);
        }
      }
      const float gain = 2 * of_token(gates.gain, r), with_key = shuffle(total, 16 + 2 * r),
                  factor = of_token(slope, r);
      const float common = factor != 0 ? factor * with_key : 0.0f;
      float row[kN];
#pragma unroll
      for (int j = 0; j < kN; ++j) {
        row[j] = fmaf(gain, da[r][j], common) * k[r][j];
        if (has_lo) row[j] += other[r % kAtOnce][j];
      }
      out.store(r, row);
    }
  }
}

// Sum over all chunks in an order that their number alone decides.
__global__ void __launch_bounds__(kCenterThreads)
    precond_center_kernel(const float* parts, int64_t chunks, const __grid_constant__ SequenceArg sequences, int H,
                          float* out, int64_t stride) {
  chunks = chunks_there(sequences, chunks);
  const int h = static_cast<int>(block_index_x());
  float sum = 0;
  for (int64_t i = thread_index(); i < chunks; i += kCenterThreads) sum += parts[i * H + h];
  sum = warp_sum(sum);
  if (thread_index() == 0) out[h * stride] = sum;
}

template <int kN>
void launch_kernels(const PrecondBackwardArgs& args, int64_t chunks, void* stream) {
  if constexpr (kN < 8) {
    if (args.share.rows != nullptr) return launch_carry<kN>(args, chunks, stream);
  }
  const Problem& x = args.problem;
  const Dim3 grid = chunk_grid(x, chunks);
  constexpr size_t kShared = sizeof(BackwardShared<kN>);
  BackwardTensors f;
  f.k = flat_rows(x, x.in.k, kN), f.dm = flat_rows(x, workspace_rows(x, args.grads.dm, x.HV), kN);
  f.g = flat_gates(x, x.in.precond_g), f.beta = flat_gates(x, x.in.precond_beta);
  TokenArg lo = args.grads.d.k;
  lo.stride_h *= x.group;
  f.lo = flat_rows(x, lo, kN), f.dk = flat_rows(x, args.dk, kN);
  f.dg = flat_gates(x, args.dprecond_g), f.dbeta = flat_gates(x, args.dprecond_beta);
  f.map = precond_map_of(x.rule);
  f.behind = args.scratch + chunks * x.H * x.K, f.products = f.behind + chunks * x.H * x.K;
  f.chunks = static_cast<int32_t>(chunks);
  f.by_sequence = by_sequence(x);
  launch(precond_backward_kernel<kN, BackwardPass::kSums>, grid, kPrecondThreads, kShared, stream, args, f);
  walk_chunks<Direction::kReverse>(
      x, {f.products, args.scratch, f.behind, args.d_final_precond, args.d_initial_precond, {}, {}}, stream);
  launch_overlapped(precond_backward_kernel<kN, BackwardPass::kRows>, grid, kPrecondThreads, kShared + kKeptBytes<kN>,
                    stream, args, f);
}

}  // namespace

PrecondShare precond_share(const Problem& x, float* scratch, float* center_parts, void* rows, int64_t chunks) {
  PrecondShare share;
  share.rows = static_cast<PrecondShare::Row*>(rows);
  share.sums = scratch;
  share.products = scratch + 2 * chunks * x.H * x.K;
  share.center = center_parts;
  return share;
}

void precond_backward(const PrecondBackwardArgs& args, int64_t chunks, void* stream) {
  const Problem& x = args.problem;
  if (x.K > 256) fail_internal("precond_backward: expected K <= 256, got {}", x.K);
  if (x.K <= 64) {
    launch_kernels<2>(args, chunks, stream);
  } else if (x.K <= 128) {
    launch_kernels<4>(args, chunks, stream);
  } else {
    launch_kernels<8>(args, chunks, stream);
  }
  if (args.dcenter == nullptr) return;
  launch(precond_center_kernel, Dim3{static_cast<unsigned>(x.H)}, kCenterThreads, 0, stream, args.dcenter_parts, chunks,
         x.sequences, x.H, args.dcenter, args.dcenter_stride);
}

}  // namespace fw::cuda
