// A block sums 32 columns: its warp w of kWarps the rows w, w + kWarps, ..., of which several are on their way at a
// time, then one warp the sums of the warps, in order. Few rows have few warps, so that the block has room alongside
// those of the kernel in front.
// The kernel in front, which leaves the partial sums, takes much longer than this: it begins before that one is over,
// and what starting it costs is hidden.
#include "ops/cuda/column_sums.h"
#include "ops/cuda/overlap.cuh"
#include "scan/cuda/machine/ptx.cuh"

namespace fw::cuda {
namespace {

constexpr int kManyWarps = 32, kSomeWarps = 16, kFewWarps = 8, kLoads = 16;  // loads: of a lane on their way

// A column of partial sums, and where its sum belongs.
struct Column {
  const float* partial;
  int64_t stride;
  float* to;
};
struct PlainColumns {
  const float* partial;
  int64_t count;
  float* to;
  FW_DEVICE Column at(int64_t c) const { return {partial + c, count, to + c}; }
};
// Those of a convolution: tap after tap, then the bias.
struct TapColumns {
  const float *weights, *biases;
  int64_t cols, taps, count;
  float *dweight, *dbias;
  FW_DEVICE Column at(int64_t c) const {
    if (c >= cols * taps) return {biases + c - cols * taps, cols, dbias + c - cols * taps};
    const unsigned tap = static_cast<unsigned>(c) / static_cast<unsigned>(cols);
    return {weights + c, cols * taps, dweight + (c - tap * cols) * taps + taps - 1 - tap};
  }
};

template <int kWarps, bool kAdd, class Of>
__global__ void __launch_bounds__(kWarps * 32) column_sums_kernel(const Of columns, int64_t rows) {
  follow();
  float* sums = reinterpret_cast<float*>(shared_memory());  // [kWarps, 32]
  const int lane = static_cast<int>(lane_index()), warp = static_cast<int>(warp_index());
  const int64_t c = int64_t{block_index_x()} * 32 + lane;
  const bool has = c < columns.count;
  const Column column = columns.at(has ? c : 0);
  float sum = 0, old = 0;
  if (kAdd && warp == 0 && has) old = *column.to;  // on its way with the others
  if (has) {
    for (int64_t first = warp; first < rows; first += kLoads * kWarps) {
      float x[kLoads];
      FW_UNROLL for (int i = 0; i < kLoads; ++i) {
        const int64_t r = first + i * kWarps;
        x[i] = r < rows ? column.partial[r * column.stride] : 0.0f;
      }
      FW_UNROLL for (int i = 0; i < kLoads; ++i) sum += x[i];
    }
  }
  sums[warp * 32 + lane] = sum;
  sync_threads();
  if (warp > 0 || !has) return;
  float total = sums[lane];
  FW_UNROLL for (int w = 1; w < kWarps; ++w) total += sums[w * 32 + lane];
  *column.to = kAdd ? old + total : total;
}

// A warp has a group.
__global__ void __launch_bounds__(32) group_sums_kernel(const float* sums, int64_t cols, int64_t group, float* to) {
  follow();
  const int64_t begin = int64_t{block_index_x()} * group, end = min(cols, begin + group);
  float sum = 0;
  for (int64_t c = begin + lane_index(); c < end; c += 32) sum += sums[c];
  sum = warp_sum(sum);
  if (lane_index() == 0) to[block_index_x()] += sum;
}

template <bool kAdd, class Of>
void column_sums(const Of& columns, int64_t rows, void* stream) {
  const auto run = [&]<int kWarps>() {
    launch_overlapped(column_sums_kernel<kWarps, kAdd, Of>, Dim3{static_cast<unsigned>((columns.count + 31) / 32)},
                      kWarps * 32, kWarps * 32 * sizeof(float), stream, columns, rows);
  };
  if (rows <= kFewWarps * kLoads) {
    run.template operator()<kFewWarps>();
  } else if (rows <= kSomeWarps * kLoads) {
    run.template operator()<kSomeWarps>();
  } else {
    run.template operator()<kManyWarps>();
  }
}

}  // namespace

void add_column_sums(const float* partial, int64_t rows, int64_t cols, float* to, void* stream) {
  if (rows > 0) column_sums<true>(PlainColumns{partial, cols, to}, rows, stream);
}

void set_column_sums(const float* partial, int64_t rows, int64_t cols, float* to, void* stream) {
  column_sums<false>(PlainColumns{partial, cols, to}, rows, stream);
}

void add_tap_sums(const float* weights, const float* biases, int64_t rows, int64_t cols, int64_t taps, float* dweight,
                  float* dbias, void* stream) {
  if (rows > 0)
    column_sums<true>(TapColumns{weights, biases, cols, taps, cols * (taps + 1), dweight, dbias}, rows, stream);
}

void add_group_sums(const float* partial, int64_t rows, int64_t cols, int64_t group, float* to, Arena& arena,
                    void* stream) {
  if (rows == 0) return;
  const Arena::Mark mark = arena.mark();
  float* sums = arena.alloc<float>(cols);
  set_column_sums(partial, rows, cols, sums, stream);
  launch_overlapped(group_sums_kernel, Dim3{static_cast<unsigned>((cols + group - 1) / group)}, 32, 0, stream, sums,
                    cols, group, to);
  arena.rewind(mark);
}

}  // namespace fw::cuda
