// Session: a model, a tokenizer and one state as an object. Prefill runs by chunks, then every token costs the same time
// and memory however long the text is. The state can be saved, loaded and forked (a copy of a Session goes on by itself).
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "base/random.h"
#include "generate/sampling.h"
#include "model/language_model.h"
#include "tokenizer/tokenizer.h"

namespace fw {

// What a text that begins with nothing begins with: a newline, or id 0 where the tokenizer has no token for one.
int32_t start_token(const Tokenizer& tokenizer);

class Session {
 public:
  // Model and tokenizer must outlive the session and its copies. Throws Error(kUsage) when their vocabularies do not fit.
  Session(LanguageModel<float>& model, const Tokenizer& tokenizer, uint64_t seed);

  // Appends `ids` to what the session has seen, `chunk` >= 1 tokens at a time; may be called again at any point. Throws
  // Error(kUsage) for ids outside the vocabulary, before anything changes.
  void prefill(std::span<const int32_t> ids, int64_t chunk = 2048);

  // Samples the next token given all so far and appends it. A session that has seen nothing starts from
  // start_token(), which is not returned. logprob (may be null): log_probability() of the token.
  int32_t next(const Sampling& sampling, double* logprob = nullptr);

  // Other random numbers from here on.
  void reseed(uint64_t seed) { random_ = Random(seed); }
  // The seed of another fork: the next of the session's random numbers.
  uint64_t draw_seed() { return random_.bits(); }

  // One safetensors file: the model's state, the last logits, the generator, the count and the last ids. load() throws Error(kUsage) for
  // a damaged file and for one of another model, and then the session is as it was.
  void save(const std::string& path) const;
  void load(const std::string& path);

  int64_t tokens_seen() const { return tokens_seen_; }
  size_t state_bytes() const { return state_.bytes(); }

 private:
  void append(std::span<const int32_t> ids);

  LanguageModel<float>& model_;
  const Tokenizer& tokenizer_;
  ModelState<float> state_;
  std::vector<float> logits_;  // [vocab] of the next token; meaningless while tokens_seen_ is 0
  Random random_;
  int64_t tokens_seen_ = 0;
  std::vector<int32_t> recent_;  // the last ids, oldest first, kMostRecent of them at least where there are as many
};

}  // namespace fw
