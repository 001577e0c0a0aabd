// Gates given as logits: values in front of the kernels that take them, gradients back behind them, and the sums over tokens that a_log and dt_bias
// take, in blocks of tokens and then over the blocks, both in order. See kernels.h.
//
// Roles, 256 threads: a thread has kN neighbouring numbers of a token (all heads) and every kLanes-th token of the block's; lanes of one token are
// neighbours. Where there are sums: each thread's in shared memory, sync_threads(), then one thread a number adds those of all lanes.
#include <algorithm>

#include "scan/cuda/call/kernels.h"
#include "scan/cuda/call/launch.h"
#include "scan/cuda/gates/math.cuh"
#include "scan/cuda/machine/tokens.cuh"

namespace fw::cuda {
namespace {

constexpr int kThreads = 256;

// Which numbers and tokens a thread has.
struct GateCut {
  int units = 1, lanes = 1, tokens = 1;  // of a block: units of kN numbers side by side, tokens at once, and in all
};
GateCut cut_of(const GateArg& gate, int n, int64_t tokens, int64_t most_blocks) {
  GateCut cut;
  const int units = gate.heads * gate.channels / n;
  while (cut.units < units && cut.units < kThreads) cut.units *= 2;
  cut.lanes = kThreads / cut.units;
  constexpr int64_t kLeast = 32;
  cut.tokens = static_cast<int>(std::max<int64_t>({kLeast, cut.lanes, (tokens + most_blocks - 1) / most_blocks}));
  return cut;
}
Dim3 grid_of(const GateArg& gate, int n, const GateCut& cut, int64_t tokens) {
  const int units = gate.heads * gate.channels / n;
  return {static_cast<unsigned>((tokens + cut.tokens - 1) / cut.tokens), static_cast<unsigned>((units + cut.units - 1) / cut.units)};
}
bool wide(const GateArg& gate) { return gate.channels % 4 == 0; }

struct GatePlace {
  int lane, number, head, channel;  // number: of the row, of which this is the head and the channel; < 0: none
};
template <int kN>
FW_DEVICE GatePlace gate_place(const GateArg& gate, const GateCut& cut) {
  const int thread = static_cast<int>(thread_index());
  GatePlace p;
  p.lane = thread / cut.units;
  p.number = (static_cast<int>(block_index_y()) * cut.units + thread % cut.units) * kN;
  if (p.number >= gate.heads * gate.channels) p.number = -1;
  p.head = p.number / gate.channels, p.channel = p.number % gate.channels;
  return p;
}

template <int kN>
struct GateNumbers {
  float bias[kN], rate[kN];
};
template <int kN>
FW_DEVICE GateNumbers<kN> gate_numbers(const GateArg& gate, const GatePlace& p) {
  GateNumbers<kN> x;
  FW_UNROLL
  for (int j = 0; j < kN; ++j) {
    x.bias[j] = gate.dt_bias.data != nullptr ? gate.dt_bias.data[p.head * gate.dt_bias.stride_h + (p.channel + j) * gate.dt_bias.stride_k] : 0.0f;
    x.rate[j] = gate.a_log.data != nullptr ? GateMath::exp(gate.a_log.data[p.head * gate.a_log.stride_h + (p.channel + j) * gate.a_log.stride_k]) : 1.0f;
  }
  return x;
}

// The row of a head of a token of a caller's tensor.
FW_DEVICE Rows token_row(const TokenArg& a, const SequenceArg& s, int64_t token, int head) {
  if (a.data == nullptr) return {};
  const unsigned T = s.T > 0 ? static_cast<unsigned>(s.T) : 1, b = s.offsets != nullptr ? 0 : static_cast<unsigned>(token) / T;
  const int64_t at = b * a.stride_b + (token - int64_t{b} * T) * a.stride_t + head * a.stride_h;
  return {static_cast<char*>(a.data) + at * (a.bf16 != 0 ? 2 : 4), 0, a.bf16};
}

template <int kN>
__global__ void __launch_bounds__(kThreads)
    gate_values_kernel(const __grid_constant__ GateArg gate, const __grid_constant__ SequenceArg sequences, int64_t tokens, GateCut cut) {
  const GatePlace p = gate_place<kN>(gate, cut);
  if (p.number < 0) return;
  const GateNumbers<kN> own = gate_numbers<kN>(gate, p);
  const int64_t first = int64_t{block_index_x()} * cut.tokens, end = first + cut.tokens < tokens ? first + cut.tokens : tokens;
  for (int64_t token = first + p.lane; token < end; token += cut.lanes) {
    float x[kN];
    load_channels(token_row(gate.x, sequences, token, p.head), 0, p.channel, gate.channels, x);
    FW_UNROLL
    for (int j = 0; j < kN; ++j) x[j] = gate_value<GateMath>(gate.law, own.rate[j], x[j] + own.bias[j]);
    store_channels(token_row(gate.values, sequences, token, p.head), 0, p.channel, gate.channels, x);
  }
}

template <int kN>
__global__ void __launch_bounds__(kThreads)
    gate_gradients_kernel(const __grid_constant__ GateArg gate, const __grid_constant__ TokenArg dvalues, const __grid_constant__ TokenArg dx, float* parts,
                          const __grid_constant__ SequenceArg sequences, int64_t tokens, GateCut cut) {
  const GatePlace p = gate_place<kN>(gate, cut);
  float of_bias[kN] = {}, of_rate[kN] = {};
  if (p.number >= 0) {
    const GateNumbers<kN> own = gate_numbers<kN>(gate, p);
    const int64_t first = int64_t{block_index_x()} * cut.tokens, end = first + cut.tokens < tokens ? first + cut.tokens : tokens;
    for (int64_t token = first + p.lane; token < end; token += cut.lanes) {
      float x[kN], d[kN];
      load_channels(token_row(gate.x, sequences, token, p.head), 0, p.channel, gate.channels, x);
      load_channels(token_row(dvalues, sequences, token, p.head), 0, p.channel, gate.channels, d);
      FW_UNROLL
      for (int j = 0; j < kN; ++j) {
        const GatePoint<float> point = gate_point<GateMath>(gate.law, own.rate[j], x[j] + own.bias[j]);
        of_rate[j] = fmaf(d[j], point.of_rate, of_rate[j]);
        d[j] *= point.slope;
        of_bias[j] += d[j];
      }
      if (dx.data != nullptr) store_channels(token_row(dx, sequences, token, p.head), 0, p.channel, gate.channels, d);
    }
  }
  if (parts == nullptr) return;
  const int row = gate.heads * gate.channels, thread = static_cast<int>(thread_index());
  float* const shared = reinterpret_cast<float*>(shared_memory());  // [2, kThreads, kN]
  FW_UNROLL
  for (int j = 0; j < kN; ++j) shared[thread * kN + j] = of_bias[j], shared[(kThreads + thread) * kN + j] = of_rate[j];
  sync_threads();
  if (p.lane != 0 || p.number < 0) return;
  float* const to = parts + int64_t{block_index_x()} * 2 * row + p.number;
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

// A block has a head, and which of the two sums in y; its threads have channels and, in lanes, every kLanes-th part.
constexpr int kSumColumns = 32, kSumLanes = 8;
__global__ void __launch_bounds__(kSumColumns* kSumLanes) gate_sums_kernel(const float* parts, int blocks, int heads, int channels,
                                                                           const __grid_constant__ HeadArg of_bias, const __grid_constant__ HeadArg of_rate) {
  const HeadArg& to = block_index_y() == 0 ? of_bias : of_rate;
  if (to.data == nullptr) return;
  const int head = static_cast<int>(block_index_x()), row = heads * channels;
  const int column = static_cast<int>(thread_index()) % kSumColumns, lane = static_cast<int>(thread_index()) / kSumColumns;
  float* const shared = reinterpret_cast<float*>(shared_memory());  // [kSumLanes, kSumColumns]
  float all = 0;                                                    // of the head, where it has one number
  for (int first = 0; first < channels; first += kSumColumns) {
    const int channel = first + column;
    float sum = 0;
    if (channel < channels) {
      const float* from = parts + (block_index_y() == 0 ? 0 : row) + head * channels + channel;
      for (int block = lane; block < blocks; block += kSumLanes) sum += from[int64_t{block} * 2 * row];
    }
    shared[thread_index()] = sum;
    sync_threads();
    if (lane == 0 && channel < channels) {
      sum = 0;
      for (int i = 0; i < kSumLanes; ++i) sum += shared[i * kSumColumns + column];
      if (to.stride_k != 0 || channels == 1) {
        to.data[head * to.stride_h + channel * to.stride_k] = sum;
      } else {
        all += sum;
      }
    }
    sync_threads();
  }
  if (to.stride_k != 0 || channels == 1) return;
  if (lane == 0) shared[column] = all;
  sync_threads();
  if (thread_index() != 0) return;
  for (int i = 1; i < kSumColumns; ++i) all += shared[i];
  to.data[head * to.stride_h] = all;
}

}  // namespace

void gate_values(const GateArg& gate, const SequenceArg& sequences, int64_t tokens, void* stream) {
  constexpr int64_t kAnyBlocks = int64_t{1} << 30;
  const int n = wide(gate) ? 4 : 1;
  const GateCut cut = cut_of(gate, n, tokens, kAnyBlocks);
  launch(n == 4 ? gate_values_kernel<4> : gate_values_kernel<1>, grid_of(gate, n, cut, tokens), kThreads, 0, stream, gate, sequences, tokens, cut);
}

void gate_gradients(const GateGradientArgs& args, const SequenceArg& sequences, int64_t tokens, void* stream) {
  const GateArg& gate = args.gate;
  const int n = wide(gate) ? 4 : 1;
  const GateCut cut = cut_of(gate, n, tokens, kMostGateParts);
  const Dim3 grid = grid_of(gate, n, cut, tokens);
  const bool sums = args.d_a_log.data != nullptr || args.d_dt_bias.data != nullptr;
  launch(n == 4 ? gate_gradients_kernel<4> : gate_gradients_kernel<1>, grid, kThreads, sums ? 2 * sizeof(float) * kThreads * static_cast<size_t>(n) : 0, stream,
         gate, args.d_values, args.d_x, sums ? args.parts : nullptr, sequences, tokens, cut);
  if (!sums) return;
  launch(gate_sums_kernel, Dim3{static_cast<unsigned>(gate.heads), 2}, kSumColumns * kSumLanes, sizeof(float) * kSumColumns * kSumLanes, stream, args.parts,
         static_cast<int>(grid.x), gate.heads, gate.channels, args.d_dt_bias, args.d_a_log);
}

}  // namespace fw::cuda
