// Tokens to experts and back: scores, the choice of the best, rows sorted by expert, and a product for each expert.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "ops/cpu/operations.h"
#include "ops/cpu/row_blocks.h"

namespace fw::cpu {
namespace {

constexpr double kLeastSum = 1e-20;  // added to the sum of chosen sigmoids, as published

template <class T>
void score_row(const RouterShape& shape, const T* logits, T* scores) {
  const int64_t E = shape.experts;
  if (shape.score == RouterScore::kSigmoid) {
    for (int64_t e = 0; e < E; ++e) scores[e] = T(1) / (T(1) + std::exp(-logits[e]));
    return;
  }
  const T most = *std::max_element(logits, logits + E);
  T sum = 0;
  for (int64_t e = 0; e < E; ++e) sum += scores[e] = std::exp(logits[e] - most);
  for (int64_t e = 0; e < E; ++e) scores[e] /= sum;
}

// The largest of x where it is free, the first of equal ones and of those that are NaN.
template <class T>
int64_t take_largest(const std::vector<T>& x, std::vector<char>& is_free) {
  int64_t best = -1;
  for (size_t i = 0; i < x.size(); ++i) {
    if (is_free[i] != 0 && (best < 0 || x[i] > x[static_cast<size_t>(best)])) best = static_cast<int64_t>(i);
  }
  is_free[static_cast<size_t>(best)] = 0;
  return best;
}

// Which experts a token may choose: all, or those of its best groups.
template <class T>
void open_groups(const RouterShape& shape, const std::vector<T>& choice, std::vector<char>& is_free) {
  std::fill(is_free.begin(), is_free.end(), static_cast<char>(shape.groups == shape.best_groups));
  if (shape.groups == shape.best_groups) return;
  const int64_t size = shape.experts / shape.groups;
  std::vector<T> sums(static_cast<size_t>(shape.groups));
  for (int64_t g = 0; g < shape.groups; ++g) {
    std::vector<T> of_group(choice.begin() + g * size, choice.begin() + (g + 1) * size);
    std::partial_sort(of_group.begin(), of_group.begin() + std::min<int64_t>(2, size), of_group.end(),
                      std::greater<T>());
    sums[static_cast<size_t>(g)] = of_group[0] + (size > 1 ? of_group[1] : T(0));
  }
  std::vector<char> group_is_free(sums.size(), 1);
  for (int64_t i = 0; i < shape.best_groups; ++i) {
    const int64_t g = take_largest(sums, group_is_free);
    std::fill_n(is_free.begin() + g * size, size, static_cast<char>(1));
  }
}

// Choices of all tokens to rows sorted by expert; rows.source holds the choices' experts at first.
void sort_rows(const ExpertRows& rows, int64_t tokens, int64_t* load) {
  const int64_t count = tokens * rows.chosen;
  std::fill_n(rows.offsets, rows.experts + 1, 0);
  for (int64_t i = 0; i < count; ++i) ++rows.offsets[rows.source[i] + 1];
  for (int64_t e = 0; e < rows.experts; ++e) {
    if (load != nullptr) load[e] += rows.offsets[e + 1];
    rows.offsets[e + 1] += rows.offsets[e];
  }
  std::vector<int32_t> next(rows.offsets, rows.offsets + rows.experts);
  for (int64_t i = 0; i < count; ++i) rows.row_of[i] = next[static_cast<size_t>(rows.source[i])]++;
  for (int64_t i = 0; i < count; ++i) rows.source[rows.row_of[i]] = static_cast<int32_t>(i);
  for (int64_t e = 0; e < rows.experts; ++e)
    std::fill(rows.expert + rows.offsets[e], rows.expert + rows.offsets[e + 1], static_cast<int32_t>(e));
}

// What a token's chosen scores are divided by.
template <class T, class Score>
T divisor(const RouterShape& shape, const Score& score) {
  if (!shape.normalised) return T(1);
  T sum = shape.score == RouterScore::kSigmoid ? static_cast<T>(kLeastSum) : T(0);
  for (int64_t j = 0; j < shape.chosen; ++j) sum += score(j);
  return sum;
}

template <class T>
Weight<T> weight_of(const Weight<T>& weight, int64_t expert, int64_t out) {
  const Mat<const Bf16> rounded =
      weight.rounded.data == nullptr ? weight.rounded : weight.rounded.row_range(expert * out, out);
  const Mat<const T> values = weight.values.data == nullptr ? Mat<const T>(nullptr, out, weight.values.cols)
                                                            : weight.values.row_range(expert * out, out);
  return {values, rounded};
}

// body(expert, first row, rows) of every expert that has rows.
template <class Body>
void for_experts(const ExpertRows& rows, const Body& body) {
  for (int64_t e = 0; e < rows.experts; ++e) {
    const int64_t begin = rows.offsets[e], count = rows.offsets[e + 1] - begin;
    if (count > 0) body(e, begin, count);
  }
}

}  // namespace

template <class T>
void route_forward(const Exec<T>&, const RouterShape& shape, Mat<const T> logits, const T* bias, Mat<T> scores,
                   const ExpertRows& rows, Mat<T> weights, int64_t* load) {
  const int64_t E = shape.experts, k = shape.chosen;
  for_row_blocks(RowBlocks::cut(logits.rows, E * k), [&](int64_t, int64_t begin, int64_t end) {
    std::vector<T> choice(static_cast<size_t>(E));
    std::vector<char> is_free(static_cast<size_t>(E));
    for (int64_t t = begin; t < end; ++t) {
      score_row(shape, logits.row(t), scores.row(t));
      for (int64_t e = 0; e < E; ++e)
        choice[static_cast<size_t>(e)] = scores.row(t)[e] + (bias != nullptr ? bias[e] : T(0));
      open_groups(shape, choice, is_free);
      for (int64_t j = 0; j < k; ++j) rows.source[t * k + j] = static_cast<int32_t>(take_largest(choice, is_free));
    }
  });
  sort_rows(rows, logits.rows, load);
  for_row_blocks(RowBlocks::cut(logits.rows, k), [&](int64_t, int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      const int32_t* own_rows = rows.row_of + t * k;
      const auto score = [&](int64_t j) { return scores.row(t)[rows.expert[own_rows[j]]]; };
      const T factor = static_cast<T>(shape.scale) / divisor<T>(shape, score);
      for (int64_t j = 0; j < k; ++j) *weights.row(own_rows[j]) = factor * score(j);
    }
  });
}

// With s the scores, a chosen one's weight is w = scale s / sum (or scale s), so ds = (scale dw - sum of dw w) / sum.
// A share of the balance's loss is s / (sum of all s).
template <class T>
void route_backward(const Exec<T>&, const RouterShape& shape, Mat<const T> dweights, Mat<const T> scores,
                    const ExpertRows& rows, Mat<const T> weights, T balance, Mat<T> dlogits) {
  const int64_t E = shape.experts, k = shape.chosen, tokens = scores.rows;
  std::vector<T> pull(static_cast<size_t>(E));  // of the balance, on an expert's share
  for (int64_t e = 0; e < E; ++e)
    pull[static_cast<size_t>(e)] = balance * static_cast<T>(E) * static_cast<T>(rows.offsets[e + 1] - rows.offsets[e]) /
                                   static_cast<T>(std::max<int64_t>(tokens, 1));
  for_row_blocks(RowBlocks::cut(tokens, E), [&](int64_t, int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      const T* s = scores.row(t);
      T* ds = dlogits.row(t);
      const int32_t* own_rows = rows.row_of + t * k;
      const auto expert = [&](int64_t j) { return rows.expert[own_rows[j]]; };
      std::fill_n(ds, E, T(0));
      if (balance != T(0)) {
        T all = 0, mean = 0;
        for (int64_t e = 0; e < E; ++e) all += s[e];
        for (int64_t e = 0; e < E; ++e) mean += pull[static_cast<size_t>(e)] * s[e] / all;
        for (int64_t e = 0; e < E; ++e) ds[e] = (pull[static_cast<size_t>(e)] - mean) / all;
      }
      const T sum = divisor<T>(shape, [&](int64_t j) { return s[expert(j)]; });
      T common = 0;
      if (shape.normalised) {
        for (int64_t j = 0; j < k; ++j) common += *dweights.row(own_rows[j]) * *weights.row(own_rows[j]);
      }
      for (int64_t j = 0; j < k; ++j)
        ds[expert(j)] += (static_cast<T>(shape.scale) * *dweights.row(own_rows[j]) - common) / sum;
      if (shape.score == RouterScore::kSigmoid) {
        for (int64_t e = 0; e < E; ++e) ds[e] *= s[e] * (T(1) - s[e]);
      } else {
        T mean = 0;
        for (int64_t e = 0; e < E; ++e) mean += s[e] * ds[e];
        for (int64_t e = 0; e < E; ++e) ds[e] = s[e] * (ds[e] - mean);
      }
    }
  });
}

template <class T>
void gather_expert_rows(const Exec<T>&, Mat<const T> x, const ExpertRows& rows, Mat<T> to) {
  for_row_blocks(RowBlocks::cut(to.rows, to.cols), [&](int64_t, int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r)
      std::memcpy(to.row(r), x.row(rows.source[r] / rows.chosen), static_cast<size_t>(to.cols) * sizeof(T));
  });
}

template <class T>
void sum_expert_rows(const Exec<T>&, Mat<const T> from, const ExpertRows& rows, Mat<T> to, Write write) {
  for_row_blocks(RowBlocks::cut(to.rows, to.cols * rows.chosen), [&](int64_t, int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      T* out = to.row(t);
      for (int64_t j = 0; j < rows.chosen; ++j) {
        const T* in = from.row(rows.row_of[t * rows.chosen + j]);
        const bool adds = j > 0 || write == Write::kAccumulate;
        for (int64_t c = 0; c < to.cols; ++c) out[c] = adds ? out[c] + in[c] : in[c];
      }
    }
  });
}

template <class T>
void expert_linear_forward(const Exec<T>& exec, Mat<const T> x, const ExpertRows& rows, Weight<T> weight, Mat<T> y) {
  for_experts(rows, [&](int64_t e, int64_t begin, int64_t count) {
    linear_forward<T>(exec, x.row_range(begin, count), weight_of(weight, e, y.cols), nullptr, y.row_range(begin, count),
                      Write::kOverwrite);
  });
}

template <class T>
void expert_linear_backward(const Exec<T>& exec, Mat<const T> dy, Mat<const T> x, const ExpertRows& rows,
                            Weight<T> weight, Mat<T> dx, Mat<T> dweight) {
  for_experts(rows, [&](int64_t e, int64_t begin, int64_t count) {
    const Mat<T> own = dweight.data == nullptr ? Mat<T>() : dweight.row_range(e * dy.cols, dy.cols);
    linear_backward<T>(exec, dy.row_range(begin, count), x.row_range(begin, count), weight_of(weight, e, dy.cols),
                       dx.row_range(begin, count), own, nullptr, Write::kOverwrite);
  });
}

template <class T>
void scale_rows_forward(const Exec<T>&, Mat<const T> x, Mat<const T> s, Mat<T> y) {
  for_row_blocks(RowBlocks::cut(x.rows, x.cols), [&](int64_t, int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      for (int64_t c = 0; c < x.cols; ++c) y.row(r)[c] = *s.row(r) * x.row(r)[c];
    }
  });
}

template <class T>
void scale_rows_backward(const Exec<T>&, Mat<const T> dy, Mat<const T> x, Mat<const T> s, Mat<T> dx, Mat<T> ds) {
  for_row_blocks(RowBlocks::cut(x.rows, x.cols), [&](int64_t, int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      T sum = 0;
      for (int64_t c = 0; c < x.cols; ++c) {
        const T grad = dy.row(r)[c];
        sum += grad * x.row(r)[c];
        dx.row(r)[c] = *s.row(r) * grad;
      }
      *ds.row(r) = sum;
    }
  });
}

#define FW_INSTANTIATE(T)                                                                                            \
  template void route_forward<T>(const Exec<T>&, const RouterShape&, Mat<const T>, const T*, Mat<T>,                 \
                                 const ExpertRows&, Mat<T>, int64_t*);                                               \
  template void route_backward<T>(const Exec<T>&, const RouterShape&, Mat<const T>, Mat<const T>, const ExpertRows&, \
                                  Mat<const T>, T, Mat<T>);                                                          \
  template void gather_expert_rows<T>(const Exec<T>&, Mat<const T>, const ExpertRows&, Mat<T>);                      \
  template void sum_expert_rows<T>(const Exec<T>&, Mat<const T>, const ExpertRows&, Mat<T>, Write);                  \
  template void expert_linear_forward<T>(const Exec<T>&, Mat<const T>, const ExpertRows&, Weight<T>, Mat<T>);        \
  template void expert_linear_backward<T>(const Exec<T>&, Mat<const T>, Mat<const T>, const ExpertRows&, Weight<T>,  \
                                          Mat<T>, Mat<T>);                                                           \
  template void scale_rows_forward<T>(const Exec<T>&, Mat<const T>, Mat<const T>, Mat<T>);                           \
  template void scale_rows_backward<T>(const Exec<T>&, Mat<const T>, Mat<const T>, Mat<const T>, Mat<T>, Mat<T>);
FW_INSTANTIATE(float)
FW_INSTANTIATE(double)
#undef FW_INSTANTIATE

}  // namespace fw::cpu
