// Tasks of the bf16 products, cut by shape only. A task rounds the rows it multiplies, so that they are still in its
// cache: the rounded activations of a usual layer never exist as a whole.
#include "ops/cpu/bf16_linear.h"

namespace fw {
namespace {

// tokens of one product for dW: operands and result stay in L2
constexpr int64_t kChunk = 512;
constexpr int64_t kMaxGroups = 16;  // partial sums of dW
// elements of dW up to which partial sums are worth their memory
constexpr int64_t kMaxPartial = int64_t{512} * 1024;
constexpr int64_t kGradientRows = 256, kGradientCols = 512;  // tile of a larger dW

int64_t round_up(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }

// Rows whose operands and result stay in L2: of the result 512 KB. Fewer when there would be fewer than four tasks.
RowBlocks product_blocks(int64_t rows, int64_t cols) {
  const int64_t most = std::clamp<int64_t>((int64_t{1} << 17) / std::min(cols, kBf16TileCols) / 32 * 32, 64, 256);
  return {rows, std::min(most, std::max<int64_t>(32, round_up((rows + 3) / 4, 16)))};
}

// Tokens whose share of dW one task sums, in order, chunk by chunk.
struct TokenGroups {
  int64_t chunk;
  RowBlocks groups;

  explicit TokenGroups(int64_t tokens) {
    chunk = std::clamp<int64_t>(round_up((tokens + 7) / 8, 32), 64, kChunk);
    groups = {tokens, std::max(chunk, round_up((tokens + kMaxGroups - 1) / kMaxGroups, chunk))};
  }
};

Mat<Bf16> round_rows(Mat<const float> x, LocalScratch& scratch) {
  const Mat<Bf16> out(scratch.alloc<Bf16>(x.rows * x.cols), x.rows, x.cols);
  round_to_bf16(x, out);
  return out;
}

void product_with_tiles(Mat<const Bf16> a, const Bf16Tiles& tiles, Mat<float> c, bool accumulate) {
  for (size_t i = 0; i < tiles.size(); ++i) {
    bf16_gemm_packed(a.rows, a.data, a.stride, tiles[i], accumulate, c.data + static_cast<int64_t>(i) * kBf16TileCols,
                     c.stride);
  }
}

// dx and dW in one pass over the tokens; a group's share of dW goes to its own partial sum.
void backward_in_groups(Mat<const float> dy, Mat<const float> x, const Bf16Tiles& weight, Mat<float> dx,
                        Mat<float> dweight, bool accumulate) {
  const TokenGroups cut(dy.rows);
  const int64_t count = cut.groups.count();
  const int64_t size = dweight.rows * dweight.cols;
  LocalScratch scratch;
  float* partial = count > 1 && dweight.data != nullptr ? scratch.alloc<float>(count * size) : nullptr;
  parallel_for(count, [&](int64_t group) {
    const Mat<float> sum =
        partial == nullptr ? dweight : Mat<float>(partial + group * size, dweight.rows, dweight.cols);
    for (int64_t t = cut.groups.begin(group); t < cut.groups.end(group); t += cut.chunk) {
      const int64_t rows = std::min(cut.chunk, cut.groups.end(group) - t);
      LocalScratch local;
      const Mat<Bf16> dy_rows = round_rows(dy.row_range(t, rows), local);
      if (dx.data != nullptr) product_with_tiles(dy_rows, weight, dx.row_range(t, rows), accumulate);
      if (dweight.data == nullptr) continue;
      const Mat<Bf16> x_rows = round_rows(x.row_range(t, rows), local);
      const bool add = partial == nullptr || t > cut.groups.begin(group);
      bf16_gemm(Trans::kYes, Trans::kNo, sum.rows, sum.cols, rows, dy_rows.data, dy_rows.stride, x_rows.data,
                x_rows.stride, add, sum.data, sum.stride);
    }
  });
  if (partial == nullptr) return;
  for_row_blocks(RowBlocks::cut(dweight.rows, dweight.cols), [&](int64_t, int64_t begin, int64_t end) {
    for (int64_t o = begin; o < end; ++o) {
      float* row = dweight.row(o);
      for (int64_t group = 0; group < count; ++group) {
        const float* from = partial + group * size + o * dweight.cols;
        for (int64_t i = 0; i < dweight.cols; ++i) row[i] += from[i];
      }
    }
  });
}

// dW too large for partial sums: a task owns a tile of it and runs through all tokens.
void gradient_in_tiles(Mat<const Bf16> dy, Mat<const Bf16> x, Mat<float> dweight) {
  const RowBlocks rows{dweight.rows, kGradientRows};
  const RowBlocks cols{dweight.cols, kGradientCols};
  parallel_for(rows.count() * cols.count(), [&](int64_t task) {
    const int64_t i = rows.begin(task / cols.count());
    const int64_t j = cols.begin(task % cols.count());
    const int64_t m = rows.end(task / cols.count()) - i;
    const int64_t n = cols.end(task % cols.count()) - j;
    for (int64_t t = 0; t < x.rows; t += kChunk) {
      bf16_gemm(Trans::kYes, Trans::kNo, m, n, std::min(kChunk, x.rows - t), dy.row(t) + i, dy.stride, x.row(t) + j,
                x.stride, true, dweight.row(i) + j, dweight.stride);
    }
  });
}

// C = (C +) A op(B): row blocks by tiles. A's rows are rounded by the task when there is one tile only.
void product_in_blocks(Mat<const float> a, const Bf16Tiles& tiles, Mat<float> c, bool accumulate) {
  const RowBlocks blocks = product_blocks(a.rows, c.cols);
  if (tiles.size() == 1) {
    return parallel_for(blocks.count(), [&](int64_t block) {
      LocalScratch local;
      const int64_t begin = blocks.begin(block);
      const int64_t rows = blocks.end(block) - begin;
      product_with_tiles(round_rows(a.row_range(begin, rows), local), tiles, c.row_range(begin, rows), accumulate);
    });
  }
  LocalScratch scratch;
  const Mat<Bf16> rounded = bf16_copy(a, scratch);
  const int64_t count = static_cast<int64_t>(tiles.size());
  parallel_for(blocks.count() * count, [&](int64_t task) {
    const int64_t begin = blocks.begin(task / count);
    const int64_t tile = task % count;
    bf16_gemm_packed(blocks.end(task / count) - begin, rounded.row(begin), rounded.stride,
                     tiles[static_cast<size_t>(tile)], accumulate, c.row(begin) + tile * kBf16TileCols, c.stride);
  });
}

}  // namespace

Mat<Bf16> bf16_copy(Mat<const float> x, LocalScratch& scratch) {
  const Mat<Bf16> out(scratch.alloc<Bf16>(x.rows * x.cols), x.rows, x.cols);
  for_row_blocks(RowBlocks::cut(x.rows, x.cols), [&](int64_t, int64_t begin, int64_t end) {
    round_to_bf16(x.row_range(begin, end - begin), out.row_range(begin, end - begin));
  });
  return out;
}

Bf16Tiles bf16_tiles(Trans trans, Mat<const Bf16> weight, LocalScratch& scratch) {
  const int64_t k = trans == Trans::kYes ? weight.cols : weight.rows;
  const int64_t n = trans == Trans::kYes ? weight.rows : weight.cols;
  Bf16Tiles tiles;
  for (int64_t j = 0; j < n; j += kBf16TileCols) {
    const Bf16* tile = trans == Trans::kYes ? weight.row(j) : weight.data + j;
    tiles.push_back(pack_bf16(trans, std::min(kBf16TileCols, n - j), k, tile, weight.stride, scratch));
  }
  return tiles;
}

void bf16_linear_forward(Mat<const float> x, const Bf16Tiles& weight_trans, Mat<float> y, bool accumulate) {
  product_in_blocks(x, weight_trans, y, accumulate);
}

void bf16_linear_backward(Mat<const float> dy, Mat<const float> x, const Bf16Tiles& weight, Mat<float> dx,
                          Mat<float> dweight, bool accumulate) {
  // The cut is the same with and without dW, so that dx has the same bits.
  const int64_t weight_size = dy.cols * (dweight.data != nullptr ? dweight.cols : dx.cols);
  if (weight_size <= kMaxPartial) return backward_in_groups(dy, x, weight, dx, dweight, accumulate);
  if (dx.data != nullptr) product_in_blocks(dy, weight, dx, accumulate);
  if (dweight.data != nullptr) {
    LocalScratch scratch;
    const Mat<Bf16> dy_rounded = bf16_copy(dy, scratch);
    gradient_in_tiles(dy_rounded, bf16_copy(x, scratch), dweight);
  }
}

}  // namespace fw
