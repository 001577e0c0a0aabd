// Log-likelihoods of token sequences under a model, with the windows and truncations of lm-evaluation-harness.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "model/language_model.h"

namespace fw {

struct Likelihood {
  double log_likelihood = 0;  // nats, of all tokens of the continuation
  bool greedy = true;         // each of them is the likeliest token where it stands
};

class LikelihoodScorer {
 public:
  // max_length: most tokens that the model is given at once; what is longer loses its left. 0: no limit. The model must
  // outlive it.
  LikelihoodScorer(LanguageModel<float>& model, int64_t max_length) : model_(model), max_length_(max_length) {}

  // context and continuation have at least one token, the continuation at most max_length. Calls with the same context
  // one after the other read it once: its state is kept and forked.
  Likelihood continuation(std::span<const int32_t> context, std::span<const int32_t> tokens);

  // Sum over all tokens. They are cut into windows of max_length that start from nothing; each is given one token
  // before it (the first `prefix`), the last one, which is shorter, as many as make it a whole window. Every token is
  // scored once.
  double rolling(std::span<const int32_t> tokens, int32_t prefix);

  int64_t contexts_read() const { return contexts_read_; }

 private:
  void read_context(std::span<const int32_t> context);
  double window(std::span<const int32_t> given, std::span<const int32_t> scored);

  LanguageModel<float>& model_;
  int64_t max_length_;
  std::vector<int32_t> context_;  // that state_ has seen, and its last token, which it has not
  std::optional<ModelState<float>> state_;
  int64_t contexts_read_ = 0;
};

}  // namespace fw
