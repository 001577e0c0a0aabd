// Gates given as logits: values before the kernels that take them, gradients back after them. The sums over tokens that
// a_log and dt_bias take are in blocks of tokens and then over the blocks, both in order. See rewrites/gate_kernels.h.
//
// Roles, 256 threads: a gate a z, kN neighbouring token scalars (all heads) a thread and every kLanes-th token of the
// block's; lanes of one token are neighbours. Where there are sums: each thread's in shared memory, sync_threads(),
// then one thread a number adds those of all lanes.
//
// What a gate's law is and where its tensors lie is looked up once a thread, not in each token's turn, where the
// law was an indirect branch a number. Where all tensors of a gate are bf16 in vectors with tokens at one distance
// (walks()), rows are found by an addition and two tokens are on their way at once. What else there is takes a form
// that asks of every row what it is.
#include <algorithm>
#include <type_traits>

#include "gpu/launch.h"
#include "scan/cuda/common/gate_math.cuh"
#include "scan/cuda/common/tokens.cuh"
#include "scan/cuda/rewrites/gate_kernels.h"

namespace fw::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWideValues = 8, kWideGradients = 4;  // numbers of a thread where heads have vectors of so many

// Which numbers and tokens a thread has.
struct GateCut {
  int wide = 0;                          // many numbers a thread, or one
  int walk = 0;                          // walks()
  int units = 1, lanes = 1, tokens = 1;  // of a block: threads side by side, tokens at once, and in all
  int blocks = 0, columns = 0;           // over tokens, over numbers
};
// bf16, pieces of `wide` numbers where they can be loaded whole, and every token as far from the one before, in
// whatever sequence.
bool walks(const TokenArg& a, int wide, const GateTokens& tokens) {
  const bool even = tokens.all == tokens.batch || a.stride_b == tokens.batch * a.stride_t;
  return a.bf16 != 0 && reinterpret_cast<uintptr_t>(a.data) % (2 * static_cast<size_t>(wide)) == 0 &&
         a.stride_t % wide == 0 && a.stride_h % wide == 0 && even;
}

GateCut cut_of(const GateArg& gate, int wide, int64_t tokens, int64_t most_tokens, int64_t most_blocks) {
  GateCut cut;
  cut.wide = gate.channels % wide == 0 ? 1 : 0;
  const int units = gate.heads * gate.channels / (cut.wide != 0 ? wide : 1);
  while (cut.units < units && cut.units < kThreads) cut.units *= 2;
  cut.lanes = kThreads / cut.units;
  cut.columns = (units + cut.units - 1) / cut.units;
  // Tokens one after another for few blocks to begin, but no more than leave blocks for a whole GPU: few tokens
  // (decode) are a matter of latency.
  constexpr int64_t kBlocks = 1024;
  const int64_t most = std::max<int64_t>(most_tokens, cut.lanes), shared = tokens * cut.columns / kBlocks;
  cut.tokens = static_cast<int>(
      std::max<int64_t>(std::clamp<int64_t>(shared, cut.lanes, most), (tokens + most_blocks - 1) / most_blocks));
  cut.blocks = static_cast<int>((tokens + cut.tokens - 1) / cut.tokens);
  return cut;
}
struct GateCuts {
  GateCut of[kGates];
};
template <class Args, class GateOf>
Dim3 cut_gates(const Args& args, int wide, int64_t tokens, int64_t most_tokens, int64_t most_blocks,
               const GateOf& gate_of, GateCuts& cuts) {
  Dim3 grid{0, 0, static_cast<unsigned>(args.count)};
  for (int i = 0; i < args.count; ++i) {
    cuts.of[i] = cut_of(gate_of(args.gates[i]), wide, tokens, most_tokens, most_blocks);
    grid.x = std::max(grid.x, static_cast<unsigned>(cuts.of[i].blocks));
    grid.y = std::max(grid.y, static_cast<unsigned>(cuts.of[i].columns));
  }
  return grid;
}

FW_DEVICE bool has_block(const GateCut& cut) {
  return static_cast<int>(block_index_x()) < cut.blocks && static_cast<int>(block_index_y()) < cut.columns;
}

struct GateCoord {
  int lane, number, head, channel;  // number: of the row, of which this is the head and the channel; < 0: none
  int64_t first, end;               // tokens of the block; this thread has first + lane, first + lane + lanes, ..
};
FW_DEVICE GateCoord gate_coord(const GateArg& gate, const GateCut& cut, int n, const GateTokens& tokens) {
  const int thread = static_cast<int>(thread_index());
  GateCoord p;
  p.lane = thread / cut.units;
  p.number = (static_cast<int>(block_index_y()) * cut.units + thread % cut.units) * n;
  if (p.number >= gate.heads * gate.channels) p.number = -1;
  p.head = p.number / gate.channels, p.channel = p.number % gate.channels;
  p.first = int64_t{block_index_x()} * cut.tokens;
  const int64_t all = tokens_before(tokens.end, tokens.all);
  p.end = p.first + cut.tokens < all ? p.first + cut.tokens : all;
  return p;
}

template <int kN>
FW_DEVICE GateScalars<kN> gate_scalars(const GateArg& gate, const GateCoord& p) {
  return gate_scalars<kN>(gate.a_log, gate.dt_bias, p.head, p.channel);
}

// The row of a head of a token of a tensor.
FW_DEVICE Rows token_row(const TokenArg& a, const GateTokens& tokens, int64_t token, int head) {
  if (a.data == nullptr) return {};
  const unsigned batch = static_cast<unsigned>(tokens.batch), b = static_cast<unsigned>(token) / batch;
  const int64_t at = b * a.stride_b + (token - int64_t{b} * batch) * a.stride_t + head * a.stride_h;
  return {static_cast<char*>(a.data) + at * (a.bf16 != 0 ? 2 : 4), 0, a.bf16};
}

// body(law), of which the compiler knows the kind.
template <class Body>
FW_DEVICE void with_law(const GateLaw<float>& law, Body&& body) {
  const auto of = [&](auto given) { body(GateLaw<float>{decltype(given)::value, law.factor}); };
  switch (law.given) {
    case GateActivation::kSigmoid:
      return of(std::integral_constant<GateActivation, GateActivation::kSigmoid>());
    case GateActivation::kSoftplus:
      return of(std::integral_constant<GateActivation, GateActivation::kSoftplus>());
    case GateActivation::kLowerBound:
      return of(std::integral_constant<GateActivation, GateActivation::kLowerBound>());
    case GateActivation::kLogSigmoid:
      return of(std::integral_constant<GateActivation, GateActivation::kLogSigmoid>());
    default:
      return;
  }
}

// kN neighbouring bf16 values.
template <int kN>
struct Piece {
  uint32_t words[kN / 2];
};
template <int kN>
FW_DEVICE Piece<kN> load_piece(const char* at) {
  if constexpr (kN == 8) {
    const uint4 a = *reinterpret_cast<const uint4*>(at);
    return {{a.x, a.y, a.z, a.w}};
  } else {
    const uint2 a = *reinterpret_cast<const uint2*>(at);
    return {{a.x, a.y}};
  }
}
template <int kN>
FW_DEVICE void store_piece(char* at, const Piece<kN>& a) {
  if constexpr (kN == 8) {
    *reinterpret_cast<uint4*>(at) = make_uint4(a.words[0], a.words[1], a.words[2], a.words[3]);
  } else {
    *reinterpret_cast<uint2*>(at) = make_uint2(a.words[0], a.words[1]);
  }
}
FW_DEVICE char* number_of_token(const TokenArg& a, int64_t token, const GateCoord& p) {
  return static_cast<char*>(a.data) + 2 * (token * a.stride_t + int64_t{p.head} * a.stride_h + p.channel);
}

constexpr int kAtOnce = 2;  // tokens of a thread on their way

template <int kN>
FW_DEVICE void walk_values(const GateArg& gate, const TokenArg& values, const GateTokens& tokens, const GateCut& cut) {
  const GateCoord p = gate_coord(gate, cut, kN, tokens);
  if (p.number < 0) return;
  const GateScalars<kN> own = gate_scalars<kN>(gate, p);
  const int64_t first = p.first + p.lane, from_step = 2 * cut.lanes * gate.x.stride_t,
                to_step = 2 * cut.lanes * values.stride_t;
  const char* from = number_of_token(gate.x, first, p);
  char* to = number_of_token(values, first, p);
  const int end = static_cast<int>(p.end - p.first), lanes = cut.lanes;
  with_law(gate.law, [&](const GateLaw<float>& law) {
    for (int token = p.lane; token < end; token += kAtOnce * lanes) {
      Piece<kN> piece[kAtOnce] = {};
      FW_UNROLL
      for (int i = 0; i < kAtOnce; ++i) {
        if (token + i * lanes < end) piece[i] = load_piece<kN>(from + i * from_step);
      }
      FW_UNROLL
      for (int i = 0; i < kAtOnce; ++i) {
        FW_UNROLL
        for (int j = 0; j < kN; j += 2) {
          const uint32_t word = piece[i].words[j / 2];
          piece[i].words[j / 2] =
              pack_bf16(gate_value<RoundedGateMath>(law, own.rate[j], bf16_low(word) + own.bias[j]),
                        gate_value<RoundedGateMath>(law, own.rate[j + 1], bf16_high(word) + own.bias[j + 1]));
        }
        if (token + i * lanes < end) store_piece<kN>(to + i * to_step, piece[i]);
      }
      from += kAtOnce * from_step, to += kAtOnce * to_step;
    }
  });
}

template <int kN>
FW_DEVICE void make_values(const GateArg& gate, const TokenArg& values, const GateTokens& tokens, const GateCut& cut) {
  const GateCoord p = gate_coord(gate, cut, kN, tokens);
  if (p.number < 0) return;
  const GateScalars<kN> own = gate_scalars<kN>(gate, p);
  const TokenArg from = gate.x, to = values;
  const int channels = gate.channels, lanes = cut.lanes;
  with_law(gate.law, [&](const GateLaw<float>& law) {
    for (int64_t token = p.first + p.lane; token < p.end; token += lanes) {
      float x[kN];
      load_channels(token_row(from, tokens, token, p.head), 0, p.channel, channels, x);
      FW_UNROLL
      for (int j = 0; j < kN; ++j) x[j] = gate_value<GateMath>(law, own.rate[j], x[j] + own.bias[j]);
      store_channels(token_row(to, tokens, token, p.head), 0, p.channel, channels, x);
    }
  });
}

__global__ void __launch_bounds__(kThreads, 4)
    gate_values_kernel(const __grid_constant__ GateValuesArgs args, const __grid_constant__ GateTokens tokens,
                       const __grid_constant__ GateCuts cuts) {
  grid_dependency_wait();
  grid_dependency_launch();
  const unsigned i = block_index_z();
  const GateCut& cut = cuts.of[i];
  if (!has_block(cut)) return;
  if (cut.walk != 0) return walk_values<kWideValues>(args.gates[i], args.values[i], tokens, cut);
  cut.wide != 0 ? make_values<kWideValues>(args.gates[i], args.values[i], tokens, cut)
                : make_values<1>(args.gates[i], args.values[i], tokens, cut);
}

// The logits' gradients of this thread's numbers, and their sums over its tokens.
template <int kN>
FW_DEVICE void walk_gradients(const GateGradient& a, const GateCut& cut, const GateCoord& p, const GateScalars<kN>& own,
                              float (&of_bias)[kN], float (&of_rate)[kN]) {
  const GateArg& gate = a.gate;
  const int64_t first = p.first + p.lane, bytes = 2 * cut.lanes, step = bytes * gate.x.stride_t,
                d_step = bytes * a.d_values.stride_t;
  const int64_t to_step = bytes * a.d_x.stride_t;
  const char *from = number_of_token(gate.x, first, p), *from_d = number_of_token(a.d_values, first, p);
  char* to = a.d_x.data == nullptr ? nullptr : number_of_token(a.d_x, first, p);
  const int end = static_cast<int>(p.end - p.first), lanes = cut.lanes;
  with_law(gate.law, [&](const GateLaw<float>& law) {
    for (int token = p.lane; token < end; token += kAtOnce * lanes) {
      Piece<kN> x[kAtOnce] = {}, d[kAtOnce] = {};
      FW_UNROLL
      for (int i = 0; i < kAtOnce; ++i) {
        if (token + i * lanes < end) x[i] = load_piece<kN>(from + i * step), d[i] = load_piece<kN>(from_d + i * d_step);
      }
      FW_UNROLL
      for (int i = 0; i < kAtOnce; ++i) {
        if (token + i * lanes >= end) break;
        FW_UNROLL
        for (int j = 0; j < kN; j += 2) {
          float dx[2];
          FW_UNROLL
          for (int k = 0; k < 2; ++k) {
            const uint32_t word = x[i].words[j / 2], d_word = d[i].words[j / 2];
            const float d_value = k == 0 ? bf16_low(d_word) : bf16_high(d_word);
            const GatePoint<float> point = gate_point<RoundedGateMath>(
                law, own.rate[j + k], (k == 0 ? bf16_low(word) : bf16_high(word)) + own.bias[j + k]);
            of_rate[j + k] = fmaf(d_value, point.of_rate, of_rate[j + k]);
            dx[k] = d_value * point.slope;
            of_bias[j + k] += dx[k];
          }
          x[i].words[j / 2] = pack_bf16(dx[0], dx[1]);
        }
        if (to != nullptr) store_piece<kN>(to + i * to_step, x[i]);
      }
      from += kAtOnce * step, from_d += kAtOnce * d_step;
      if (to != nullptr) to += kAtOnce * to_step;
    }
  });
}

template <int kN>
FW_DEVICE void make_gradients(const GateGradient& a, const GateTokens& tokens, const GateCut& cut) {
  const GateArg& gate = a.gate;
  const GateCoord p = gate_coord(gate, cut, kN, tokens);
  float of_bias[kN] = {}, of_rate[kN] = {};
  if (p.number >= 0 && kN > 1 && cut.walk != 0) {
    if constexpr (kN > 1) walk_gradients<kN>(a, cut, p, gate_scalars<kN>(gate, p), of_bias, of_rate);
  } else if (p.number >= 0) {
    const GateScalars<kN> own = gate_scalars<kN>(gate, p);
    const TokenArg from = gate.x, from_d = a.d_values, to = a.d_x;
    const int channels = gate.channels, lanes = cut.lanes;
    with_law(gate.law, [&](const GateLaw<float>& law) {
      for (int64_t token = p.first + p.lane; token < p.end; token += lanes) {
        float x[kN], d[kN];
        load_channels(token_row(from, tokens, token, p.head), 0, p.channel, channels, x);
        load_channels(token_row(from_d, tokens, token, p.head), 0, p.channel, channels, d);
        FW_UNROLL
        for (int j = 0; j < kN; ++j) {
          const GatePoint<float> point = gate_point<GateMath>(law, own.rate[j], x[j] + own.bias[j]);
          of_rate[j] = fmaf(d[j], point.of_rate, of_rate[j]);
          d[j] *= point.slope;
          of_bias[j] += d[j];
        }
        if (to.data != nullptr) store_channels(token_row(to, tokens, token, p.head), 0, p.channel, channels, d);
      }
    });
  }
  if (a.parts == nullptr) return;
  const int row = gate.heads * gate.channels, thread = static_cast<int>(thread_index());
  float* const shared = reinterpret_cast<float*>(shared_memory());  // [2, kThreads, kN]
  FW_UNROLL
  for (int j = 0; j < kN; ++j) shared[thread * kN + j] = of_bias[j], shared[(kThreads + thread) * kN + j] = of_rate[j];
  sync_threads();
  if (p.lane != 0 || p.number < 0) return;
  float* const to = a.parts + int64_t{block_index_x()} * 2 * row + p.number;
  FW_UNROLL
  for (int j = 0; j < kN; ++j) {
    float sums[2] = {};
    for (int lane = 0; lane < cut.lanes; ++lane) {
      sums[0] += shared[(lane * cut.units + thread) * kN + j];
      sums[1] += shared[(kThreads + lane * cut.units + thread) * kN + j];
    }
    to[j] = sums[0], to[row + j] = sums[1];
  }
}

// Three blocks an SM: with registers for four walk_gradients() spills.
__global__ void __launch_bounds__(kThreads, 3)
    gate_gradients_kernel(const __grid_constant__ GateGradientsArgs args, const __grid_constant__ GateTokens tokens,
                          const __grid_constant__ GateCuts cuts) {
  grid_dependency_wait();
  grid_dependency_launch();
  const unsigned i = block_index_z();
  const GateCut& cut = cuts.of[i];
  if (!has_block(cut)) return;
  cut.wide != 0 ? make_gradients<kWideGradients>(args.gates[i], tokens, cut)
                : make_gradients<1>(args.gates[i], tokens, cut);
}

// The sums of the blocks. A block has a head in x, which of the two sums in y, a gate in z. Its threads have columns,
// channels side by side, and lanes, every so many of the parts: of few channels many lanes, since each walks alone.
// Sums of lanes and, where a head has one number, of columns are reduced pairwise.
constexpr int kSumThreads = 1024, kMostSumColumns = 128;
__global__ void __launch_bounds__(kSumThreads)
    gate_sums_kernel(const __grid_constant__ GateGradientsArgs args, const __grid_constant__ GateCuts cuts) {
  grid_dependency_wait();
  grid_dependency_launch();
  const GateGradient& a = args.gates[block_index_z()];
  const HeadArg& to = block_index_y() == 0 ? a.d_dt_bias : a.d_a_log;
  const int head = static_cast<int>(block_index_x()), heads = a.gate.heads, channels = a.gate.channels,
            row = heads * channels;
  if (to.data == nullptr || head >= heads) return;
  const bool fused = a.fused_parts > 0;
  const int64_t step = 2 * int64_t{row};  // of a block of tokens
  const int blocks = fused ? static_cast<int>(a.fused_parts) : cuts.of[block_index_z()].blocks;
  const float* const parts =
      a.parts + (fused ? 2 * head : head) * channels + static_cast<int>(block_index_y()) * (fused ? channels : row);
  int columns = 1;
  while (columns < channels && columns < kMostSumColumns) columns *= 2;
  const int thread = static_cast<int>(thread_index()), lanes = kSumThreads / columns, column = thread % columns,
            lane = thread / columns;
  const bool one_a_head = to.stride_k == 0 && channels > 1;
  float* const shared = reinterpret_cast<float*>(shared_memory());  // [lanes, columns]
  // Of shared[0 .. 2 count): those of the upper half to those of the lower, until `least` are left.
  const auto halve = [&](int count, int least) {
    for (; count >= least; count /= 2) {
      sync_threads();
      if (thread < count) shared[thread] += shared[thread + count];
    }
    sync_threads();
  };
  float all = 0;  // of the head's channels of this column, where it has one number
  for (int first = 0; first < channels; first += columns) {
    const int channel = first + column;
    float sum = 0;
    if (channel < channels) {
      const float* from = parts + channel;
#pragma unroll 8
      for (int block = lane; block < blocks; block += lanes) sum += from[block * step];
    }
    shared[thread] = sum;
    halve(kSumThreads / 2, columns);
    if (lane == 0 && channel < channels) {
      if (one_a_head) {
        all += shared[column];
      } else {
        to.data[head * to.stride_h + channel * to.stride_k] = shared[column];
      }
    }
    sync_threads();
  }
  if (!one_a_head) return;
  if (lane == 0) shared[column] = all;
  halve(columns / 2, 1);
  if (thread == 0) to.data[head * to.stride_h] = shared[0];
}

}  // namespace

void gate_values(const GateValuesArgs& args, const GateTokens& tokens, void* stream) {
  constexpr int64_t kAnyBlocks = int64_t{1} << 30, kMostTokens = 16;
  GateCuts cuts;
  const Dim3 grid = cut_gates(
      args, kWideValues, tokens.all, kMostTokens, kAnyBlocks,
      [](const GateArg& gate) -> const GateArg& { return gate; }, cuts);
  for (int i = 0; i < args.count; ++i) {
    const bool both = walks(args.gates[i].x, kWideValues, tokens) && walks(args.values[i], kWideValues, tokens);
    cuts.of[i].walk = cuts.of[i].wide != 0 && both ? 1 : 0;
  }
  launch_overlapped(gate_values_kernel, grid, kThreads, 0, stream, args, tokens, cuts);
}

void gate_gradients(const GateGradientsArgs& args, const GateTokens& tokens, void* stream) {
  constexpr int64_t kMostTokens = 32;
  GateCuts cuts;
  const Dim3 grid = cut_gates(
      args, kWideGradients, tokens.all, kMostTokens, kMostGateParts,
      [](const GateGradient& g) -> const GateArg& { return g.gate; }, cuts);
  unsigned heads = 0;
  bool any = false;
  for (int i = 0; i < args.count; ++i) {
    const GateGradient& a = args.gates[i];
    if (a.fused_parts > 0) {
      cuts.of[i].blocks = 0;
      heads = std::max(heads, static_cast<unsigned>(a.gate.heads));
      continue;
    }
    any = true;
    const bool all = walks(a.gate.x, kWideGradients, tokens) && walks(a.d_values, kWideGradients, tokens) &&
                     (a.d_x.data == nullptr || walks(a.d_x, kWideGradients, tokens));
    cuts.of[i].walk = cuts.of[i].wide != 0 && all ? 1 : 0;
    if (args.gates[i].parts != nullptr) heads = std::max(heads, static_cast<unsigned>(args.gates[i].gate.heads));
  }
  if (any)
    launch_overlapped(gate_gradients_kernel, grid, kThreads,
                      heads > 0 ? 2 * sizeof(float) * kThreads * kWideGradients : 0, stream, args, tokens, cuts);
  if (heads > 0)
    launch_overlapped(gate_sums_kernel, Dim3{heads, 2, static_cast<unsigned>(args.count)}, kSumThreads,
                      sizeof(float) * kSumThreads, stream, args, cuts);
}

}  // namespace fw::cuda
