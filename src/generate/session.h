// Session: a model, a tokenizer and one state as an object. Prefill runs by chunks, then every token costs the same time
// and memory however long the text is. The state can be saved, loaded and forked.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "base/random.h"
#include "model/language_model.h"
#include "train/tokenizer.h"

namespace fw {

struct Sampling {
  double temperature = 1.0;  // 0: greedy
  int64_t top_k = 0;         // 0: off
  double top_p = 1.0;        // nucleus
};
void validate(const Sampling& sampling);
// One id from logits [vocab]. Deterministic for a state of `random`; ties go to the smaller id.
int32_t sample(std::span<const float> logits, const Sampling& sampling, Random& random);

class Session {
 public:
  Session(LanguageModel<float>& model, const Tokenizer& tokenizer, uint64_t seed);
  void prefill(std::span<const int32_t> ids, int64_t chunk = 2048);  // may be called again
  // Next token given all so far. A session that has seen nothing starts from a newline (or id 0 without one).
  int32_t next(const Sampling& sampling);
  void save(const std::string& path) const;   // state, last logits and generator
  void load(const std::string& path);
  int64_t tokens_seen() const { return tokens_seen_; }
  size_t state_bytes() const { return state_.bytes(); }

 private:
  LanguageModel<float>& model_;
  const Tokenizer& tokenizer_;
  ModelState<float> state_;
  std::vector<float> logits_;
  Random random_;
  int64_t tokens_seen_ = 0;
};

}  // namespace fw
