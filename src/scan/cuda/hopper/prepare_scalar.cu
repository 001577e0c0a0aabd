// prepare where all channels of a token decay alike, or not at all: T and P are products of the undecayed streams times the matrix
// exp(G_i - G_j), in float32. Where the streams are multiples of the raw q and k, those are the operands as they came, and the
// coefficients are factors of the result. A block has one chunk of one value head.
#include "scan/cuda/device/prepare_finish.cuh"
#include "scan/cuda/launch.h"
#include "scan/cuda/prepare_kernels.h"

namespace fw::cuda {
namespace {

// Sums of log2-decays. gamma: exp(G_i); suffix: exp(G_C - G_i); pair: G_i with the decay of a token bounded from below, so that
// differences of it keep their digits. What the bound cuts off is 1e-12 of a product.
// left and right: factors of the rows of T and P and of the columns of both, 1 unless the operands are raw; keys: of the rows of A in
// A^T Khat.
struct ScalarDecays {
  float gamma[kChunk], suffix[kChunk], pair[kChunk], left[2][kChunk], right[kChunk], keys[kChunk];
};
inline constexpr float kLowestStep = -40.0f;

// By one warp, two tokens a lane. Sums only, no differences: g may be -inf.
FW_DEVICE void scalar_decays(const Problem& x, const ChunkPlace& place, ScalarDecays& d, float& gamma_end) {
  const int lane = static_cast<int>(lane_index());
  float g[2] = {0, 0};
  if (x.rule.decay == Decay::kScalar) {
    const Rows rows = chunk_rows(x.in.g, place);
    FW_UNROLL
    for (int i = 0; i < 2; ++i) {
      if (2 * lane + i < place.span.rows) g[i] = load_element(rows, 2 * lane + i, 0) * kLog2E;
    }
  } else if (x.rule.decay == Decay::kConstant) {  // log(constant_decay(head)) of rule/decay.h
    const float decay = log1pf(-exp2f(-5.0f - static_cast<float>(place.hv))) * kLog2E;
    FW_UNROLL
    for (int i = 0; i < 2; ++i) {
      if (2 * lane + i < place.span.rows) g[i] = decay;
    }
  }
  const float bounded[2] = {max(g[0], kLowestStep), max(g[1], kLowestStep)};
  float prefix = g[0] + g[1], suffix = g[0] + g[1], pair = bounded[0] + bounded[1];
  FW_UNROLL
  for (int distance = 1; distance < 32; distance *= 2) {
    const float before = shuffle_up(prefix, distance), after = shuffle_down(suffix, distance), pair_before = shuffle_up(pair, distance);
    if (lane >= distance) prefix += before, pair += pair_before;
    if (lane + distance < 32) suffix += after;
  }
  gamma_end = exp2_fast(shuffle(prefix, 31));
  float before = shuffle_up(prefix, 1), after = shuffle_down(suffix, 1), pair_before = shuffle_up(pair, 1);
  if (lane == 0) before = pair_before = 0;
  if (lane == 31) after = 0;
  *reinterpret_cast<float2*>(d.gamma + 2 * lane) = make_float2(exp2_fast(before + g[0]), exp2_fast(prefix));
  *reinterpret_cast<float2*>(d.suffix + 2 * lane) = make_float2(exp2_fast(g[1] + after), exp2_fast(after));
  *reinterpret_cast<float2*>(d.pair + 2 * lane) = make_float2(pair_before + bounded[0], pair);
}

// Shared memory: keys (w; becomes x), then e and r, whose place T, A and A with scaled rows take, P, -E and Q where the backward
// image is wanted.
template <int kKey, bool kOnline>
struct ScalarLayout {
  static constexpr uint32_t kOperand = 2 * kChunk * kKey;
  static constexpr uint32_t kWork = kOnline ? 4 * kPanelBytes : kOperand;
  static constexpr uint32_t kKeys = 0, kReads = kOnline ? 2 * kOperand : kOperand, kErase = kOperand;
  [[maybe_unused]] static constexpr uint32_t kT = kOperand, kA = kT + 2 * kPanelBytes, kARows = kA + kPanelBytes;
  static constexpr uint32_t kP = kOperand + kWork, kCoefs = kP + kPanelBytes, kDecays = kCoefs + kChunk * sizeof(RowCoefs);
  static constexpr uint32_t kForwardBytes = kDecays + sizeof(ScalarDecays);
  static constexpr uint32_t kMinusE = (kForwardBytes + 127) / 128 * 128, kQ = kMinusE + kOperand, kBackwardBytes = kQ + kOperand;
};

// The streams of a row of the warp: to shared memory for T and P, and with their decays to the images.
template <int kKey, bool kOnline>
FW_DEVICE void scalar_row(int r, const KeyStreams<kKey / 32>& s, char* shared, const ScalarDecays& decays, const ChunkImages<kKey>& out) {
  using Layout = ScalarLayout<kKey, kOnline>;
  constexpr int kN = kKey / 32;
  const int row = static_cast<int>(warp_index()) * kWarpRows + r;
  const uint32_t at = lane_offset<kN>(r);
  const float gamma = decays.gamma[row], suffix = decays.suffix[row];
  float q[kN], e[kN], k[kN];
  FW_UNROLL
  for (int j = 0; j < kN; ++j) q[j] = gamma * s.r[j], e[j] = -gamma * s.e[j], k[j] = suffix * s.w[j];
  const PackedChannels<kN> q_packed = pack_channels(q);

  store_packed(shared + Layout::kReads + at, pack_channels(s.r));
  store_packed(shared + Layout::kKeys + at, pack_channels(s.w));
  store_packed(reinterpret_cast<char*>(out.forward->q) + at, q_packed);
  if constexpr (kOnline) {
    const PackedChannels<kN> e_packed = pack_channels(e);
    store_packed(shared + Layout::kErase + at, pack_channels(s.e));
    store_packed(reinterpret_cast<char*>(out.forward->e) + at, e_packed);
    if (out.backward != nullptr) {
      store_packed(shared + Layout::kMinusE + at, e_packed);
      store_packed(shared + Layout::kQ + at, q_packed);
    }
  } else {
    store_packed(reinterpret_cast<char*>(out.forward->x) + at, pack_channels(k));
    if (out.backward != nullptr) store_packed(reinterpret_cast<char*>(out.backward->q) + at, q_packed);
  }
  if (out.backward != nullptr) store_packed(reinterpret_cast<char*>(out.backward->k) + at, pack_channels(k));
}

// The same where r, e and w are multiples of the fetched q, k and k, which stay where they are.
template <int kKey, bool kOnline>
FW_DEVICE void plain_rows(char* shared, const RowCoefs* coefs, const ScalarDecays& decays, const ChunkImages<kKey>& out) {
  using Layout = ScalarLayout<kKey, kOnline>;
  constexpr int kN = kKey / 32;
  FW_UNROLL
  for (int r = 0; r < kWarpRows; ++r) {
    const int row = static_cast<int>(warp_index()) * kWarpRows + r;
    const uint32_t at = lane_offset<kN>(r);
    const float4 c = coefs[row].read_erase;
    const float gamma = decays.gamma[row], r_q = gamma * c.x, e_k = -gamma * c.z, w_k = decays.suffix[row] * coefs[row].rest.y;
    float raw_q[kN], raw_k[kN], q[kN], e[kN], k[kN];
    fetched_row(shared + Layout::kReads, r, raw_q);
    fetched_row(shared + Layout::kKeys, r, raw_k);
    FW_UNROLL
    for (int j = 0; j < kN; ++j) q[j] = r_q * raw_q[j], e[j] = e_k * raw_k[j], k[j] = w_k * raw_k[j];
    const PackedChannels<kN> q_packed = pack_channels(q);
    store_packed(reinterpret_cast<char*>(out.forward->q) + at, q_packed);
    if constexpr (kOnline) {
      const PackedChannels<kN> e_packed = pack_channels(e);
      store_packed(reinterpret_cast<char*>(out.forward->e) + at, e_packed);
      if (out.backward != nullptr) {
        store_packed(shared + Layout::kMinusE + at, e_packed);
        store_packed(shared + Layout::kQ + at, q_packed);
      }
    } else {
      store_packed(reinterpret_cast<char*>(out.forward->x) + at, pack_channels(k));
      if (out.backward != nullptr) store_packed(reinterpret_cast<char*>(out.backward->q) + at, q_packed);
    }
    if (out.backward != nullptr) store_packed(reinterpret_cast<char*>(out.backward->k) + at, pack_channels(k));
  }
}

// T and P. Online, warps 0 to 3 have the blocks of 16 rows of T and 4 to 7 those of P; offline the halves have every second block
// of columns of P.
template <int kKey, bool kOnline>
FW_DEVICE void scalar_pairs(char* shared, const ScalarDecays& decays, bool plain) {
  using Layout = ScalarLayout<kKey, kOnline>;
  const int lane = static_cast<int>(lane_index()), warp = static_cast<int>(warp_index()), half = warp >> 2;
  const int block = half == 0 ? warp : 7 - warp;  // the two warps of one scheduler share its work evenly
  const bool strict = kOnline && half == 0;
  const uint32_t base = shared_address(shared), right = base + Layout::kKeys;
  const uint32_t left = !strict ? base + Layout::kReads : plain ? right : base + Layout::kErase;
  float c[8][4];
  FW_UNROLL
  for (int n = 0; n < 8; ++n) {
    FW_UNROLL
    for (int i = 0; i < 4; ++i) c[n][i] = 0;
  }
  FW_UNROLL
  for (int k = 0; k < kKey / 16; ++k) {
    uint32_t a[4];
    ldmatrix_x4(a, a_fragment(left, 16 * block, 2 * k));
    FW_UNROLL
    for (int j = 0; j < 4; ++j) {
      if (j > block || (!kOnline && (j & 1) != half)) continue;
      uint32_t b[4];
      ldmatrix_x4(b, b_fragment(right, 16 * j, 2 * k));
      mma_bf16(c[2 * j], a, b[0], b[1]);
      mma_bf16(c[2 * j + 1], a, b[2], b[3]);
    }
  }

  const int i = 16 * block + (lane >> 2);
  const float row[2] = {decays.pair[i], decays.pair[i + 8]};
  const float factor[2] = {decays.left[strict][i], decays.left[strict][i + 8]};
  FW_UNROLL
  for (int n = 0; n < 8; ++n) {
    if (n / 2 > block || (!kOnline && (n / 2 & 1) != half)) continue;
    const int j = 8 * n + 2 * (lane & 3);
    const float2 column = *reinterpret_cast<const float2*>(decays.pair + j), right_factor = *reinterpret_cast<const float2*>(decays.right + j);
    float difference[4] = {row[0] - column.x, row[0] - column.y, row[1] - column.x, row[1] - column.y};
    if (n / 2 == block) {  // above the diagonal it is positive, and what comes of it is thrown away
      FW_UNROLL
      for (int m = 0; m < 4; ++m) difference[m] = min(difference[m], 0.0f);
    }
    FW_UNROLL
    for (int m = 0; m < 4; ++m) c[n][m] *= exp2_fast(difference[m]) * (factor[m / 2] * (m % 2 == 0 ? right_factor.x : right_factor.y));
  }
  if constexpr (kOnline) sync_threads();  // T takes the place of e
  FW_UNROLL
  for (int n = 0; n < 8; ++n) {
    if (!kOnline && (n / 2 & 1) != half) continue;
    if (strict) {
      if (n / 2 <= block) store_pairs<true>(shared + Layout::kT, block, n, c[n]);
    } else {
      store_pairs<false>(shared + Layout::kP, block, n, c[n]);
    }
  }
}

template <int kKey, bool kOnline>
__global__ void __launch_bounds__(kPrepareThreads, 3) prepare_scalar_kernel(const __grid_constant__ PrepareArgs args, int fetched) {
  using Layout = ScalarLayout<kKey, kOnline>;
  constexpr int kN = kKey / 32;
  const Problem& x = args.problem;
  char* shared = shared_memory();
  RowCoefs* coefs = reinterpret_cast<RowCoefs*>(shared + Layout::kCoefs);
  ScalarDecays& decays = *reinterpret_cast<ScalarDecays*>(shared + Layout::kDecays);
  const ChunkPlace place = chunk_place(x);
  const ChunkImages<kKey> out = chunk_images<kKey>(args, place.item);
  const int thread = static_cast<int>(thread_index());

  const RawMatrices raw{shared + Layout::kReads, shared + Layout::kKeys, shared + Layout::kErase};
  if (fetched != 0) fetch_front<kN>(x, place, raw);
  if (warp_index() == 0) {
    float gamma_end;
    scalar_decays(x, place, decays, gamma_end);
    FW_UNROLL
    for (int j = 0; j < kN; ++j) {
      out.forward->gamma[thread + 32 * j] = gamma_end;
      if (out.backward != nullptr) out.backward->gamma[thread + 32 * j] = gamma_end;
    }
  }
  make_coefs<kN>(x, place, fetched != 0, raw, coefs);
  sync_threads();
  const bool plain = fetched != 0 && plain_streams(x);
  if (thread < kChunk) {
    const RowCoefs c = coefs[thread];
    out.forward->z_scale[thread] = out.z == nullptr ? c.rest.z : thread < place.span.rows ? 1.0f : 0.0f;
    decays.left[0][thread] = plain ? c.read_erase.x : 1.0f;
    decays.left[1][thread] = plain ? c.read_erase.z : 1.0f;
    decays.right[thread] = plain ? c.rest.y : 1.0f;
    decays.keys[thread] = plain ? decays.suffix[thread] * c.rest.y : decays.suffix[thread];
  }
  if (plain) {
    plain_rows<kKey, kOnline>(shared, coefs, decays, out);
  } else {
    for_each_row<kN>(x, place, fetched != 0, raw, coefs, [&](int r, const KeyStreams<kN>& s) { scalar_row<kKey, kOnline>(r, s, shared, decays, out); });
  }
  sync_threads();
  scalar_pairs<kKey, kOnline>(shared, decays, plain);

  if constexpr (kOnline) {
    sync_threads();
    const FinishBuffers buffers{shared + Layout::kKeys, shared + Layout::kT,      shared + Layout::kA, shared + Layout::kARows,
                                shared + Layout::kP,    shared + Layout::kMinusE, shared + Layout::kQ};
    finish_online<kKey>(buffers, decays.keys, out, [&](int other) {
      if (out.z != nullptr) write_values(x, place, coefs, out.z, other, kPrepareThreads - 64);
    });
  } else {
    if (out.z != nullptr) write_values(x, place, coefs, out.z, thread, kPrepareThreads);
    finish_offline<kKey>(shared + Layout::kP, out);
  }
}

template <int kKey, bool kOnline>
void launch_scalar(const PrepareArgs& args, int64_t chunks, void* stream) {
  using Layout = ScalarLayout<kKey, kOnline>;
  const uint32_t bytes = kOnline && args.backward != nullptr ? Layout::kBackwardBytes : Layout::kForwardBytes;
  launch(prepare_scalar_kernel<kKey, kOnline>, Dim3{static_cast<unsigned>(chunks * args.problem.HV)}, kPrepareThreads, bytes, stream, args,
         static_cast<int>(can_fetch(args.problem, kKey)));
}

}  // namespace

void prepare_scalar(const PrepareArgs& args, int key, int64_t chunks, void* stream) {
  const bool online = args.problem.rule.online();
  if (key == 128) {
    online ? launch_scalar<128, true>(args, chunks, stream) : launch_scalar<128, false>(args, chunks, stream);
  } else {
    online ? launch_scalar<64, true>(args, chunks, stream) : launch_scalar<64, false>(args, chunks, stream);
  }
}

}  // namespace fw::cuda
