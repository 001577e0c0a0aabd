// Attention's elementwise part, on a tile of scores: row i is the query at position `query` + i, column j the key at
// `key` + j. What a query does not see (keys after it, keys before its window) counts as probability 0. And the
// products of a few queries with the rows of a tile, for decoding, which reads keys and values once.
#pragma once

#include <cstdint>

#include "base/mat.h"

namespace fw {

template <class T>
struct ScoreTile {
  Mat<T> scores;
  int64_t query, key;
  int64_t window;  // 0: all keys before
};

// Scores become exp(score - largest) with largest[i] raised to the tile's largest where that is larger; sum[i] and the
// rows of o, which stand for the old one, are scaled to the new.
template <class T>
void attention_softmax(const ScoreTile<T>& tile, T* largest, T* sum, Mat<T> o);

// Scores become probabilities exp(score - lse[i]), and dprobs (the gradient with respect to them) becomes that of the
// unscaled scores: scale p (dp - delta[i]). lse and delta lie lse_stride and 1 apart.
template <class T>
void attention_softmax_backward(const ScoreTile<T>& tile, const T* lse, int64_t lse_stride, const T* delta, T scale,
                                Mat<T> dprobs);

// scores [R, n] = q [R, D] k^T, k [n, D]
template <class T>
void attention_few_scores(Mat<const T> q, Mat<const T> k, Mat<T> scores);
// o [R, D] += probs [R, n] v, v [n, D]
template <class T>
void attention_few_values(Mat<const T> probs, Mat<const T> v, Mat<T> o);

}  // namespace fw
