// What the tests of the model share: a small configuration, parameters that are all far from their special values, ids.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "base/random.h"
#include "model/language_model.h"
#include "support/error_of.h"

namespace fw::testing {

inline ModelConfig small_config(const std::string& rule) {
  ModelConfig c;
  c.rule = rule;
  c.vocab_size = 13;
  c.hidden_size = 12;
  c.num_hidden_layers = 2;
  c.num_heads = 2;
  c.head_dim = 8;
  c.conv_size = 3;
  c.intermediate_size = 20;
  return c;
}

// The usual initialisation plus noise: no norm weight is 1, no bias 0, no gate at its middle.
template <class T>
LanguageModel<T> noisy_model(const ModelConfig& config, uint64_t seed = 5) {
  LanguageModel<T> model(config);
  Random random(seed);
  model.init(random);
  for (const ParamSpec& spec : model.params().specs()) {
    for (T& x : model.params().values().subspan(static_cast<size_t>(spec.offset), static_cast<size_t>(spec.size())))
      x += static_cast<T>(0.25 * random.normal());
  }
  return model;
}

inline std::vector<int32_t> random_ids(int64_t count, int64_t vocab, uint64_t seed) {
  Random random(seed);
  std::vector<int32_t> ids(static_cast<size_t>(count));
  for (int32_t& id : ids) id = static_cast<int32_t>(random.below(static_cast<uint64_t>(vocab)));
  return ids;
}

template <class T>
struct Logits {
  Logits(int64_t rows, int64_t cols) : values(static_cast<size_t>(rows * cols)), rows_(rows), cols_(cols) {}
  Mat<T> mat() { return {values.data(), rows_, cols_}; }
  std::vector<T> row(int64_t i) const { return {values.begin() + i * cols_, values.begin() + (i + 1) * cols_}; }
  std::vector<T> values;

 private:
  int64_t rows_, cols_;
};

// |a - b| / |b|, Euclidean.
template <class A, class B>
double distance(const A& a, const B& b) {
  double diff = 0, norm = 0;
  for (size_t i = 0; i < b.size(); ++i) {
    const double x = static_cast<double>(a[i]), y = static_cast<double>(b[i]);
    diff += (x - y) * (x - y);
    norm += y * y;
  }
  return std::sqrt(diff) / std::max(std::sqrt(norm), 1e-300);
}

}  // namespace fw::testing
