// Rotary position embedding. Angles are made in double: a position of a million times a frequency of 1 needs more
// digits than a float has. One token's sines and cosines serve all of its heads.
#include <cmath>

#include "ops/cpu/operations.h"
#include "ops/cpu/positions.h"
#include "ops/cpu/row_blocks.h"

namespace fw {

namespace cpu {

template <class T>
void rotary(const Exec<T>&, Mat<T> x, int64_t dim, int64_t rotated, double theta, const PassLayout& layout,
            Rotation turn) {
  const int64_t half = rotated / 2;
  LocalScratch scratch;
  double* frequency = scratch.alloc<double>(half);
  for (int64_t c = 0; c < half; ++c)
    frequency[c] = std::pow(theta, -2.0 * static_cast<double>(c) / static_cast<double>(rotated));
  int64_t* position = scratch.alloc<int64_t>(x.rows);
  for_each_position(layout, [&](int64_t t, int64_t at) { position[t] = at; });
  for_row_blocks(RowBlocks::cut(x.rows, x.cols), [&](int64_t, int64_t begin, int64_t end) {
    LocalScratch local;
    T* cosine = local.alloc<T>(half);
    T* sine = local.alloc<T>(half);
    for (int64_t t = begin; t < end; ++t) {
      for (int64_t c = 0; c < half; ++c) {
        const double angle = static_cast<double>(position[t]) * frequency[c];
        cosine[c] = static_cast<T>(std::cos(angle));
        sine[c] = static_cast<T>(turn == Rotation::kForward ? std::sin(angle) : -std::sin(angle));
      }
      for (T* head = x.row(t); head < x.row(t) + x.cols; head += dim) {
        for (int64_t c = 0; c < half; ++c) {
          const T a = head[c], b = head[c + half];
          head[c] = a * cosine[c] - b * sine[c];
          head[c + half] = a * sine[c] + b * cosine[c];
        }
      }
    }
  });
}

template void rotary(const Exec<float>&, Mat<float>, int64_t, int64_t, double, const PassLayout&, Rotation);
template void rotary(const Exec<double>&, Mat<double>, int64_t, int64_t, double, const PassLayout&, Rotation);

}  // namespace cpu
}  // namespace fw
