// Session: a model, a tokenizer and one state as an object. Prefill runs by chunks, then every token costs the same
// time and memory however long the text is. The state can be saved, loaded and forked (a copy of a Session goes on by
// itself).
// SessionBatch: several that go on side by side, so that the model's weights are read once for all of them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/random.h"
#include "generate/drafting.h"
#include "generate/prompt_lookup.h"
#include "generate/sampling.h"
#include "model/language_model.h"
#include "tokenizer/tokenizer.h"

namespace fw {

// What a text that begins with nothing begins with: a newline, or id 0 where the tokenizer has no token for one.
int32_t start_token(const Tokenizer& tokenizer);

class Session {
 public:
  // Model and tokenizer must outlive the session and its copies. Throws Error(kUsage) when their vocabularies do not
  // fit.
  Session(LanguageModel<float>& model, const Tokenizer& tokenizer, uint64_t seed);
  Session(const Session& other);
  Session& operator=(const Session&) = delete;

  // Appends `ids` to what the session has seen, `chunk` >= 1 tokens at a time, or as many as the device likes; may be
  // called again at any point. Throws Error(kUsage) for ids outside the vocabulary, before anything changes.
  void prefill(std::span<const int32_t> ids, int64_t chunk);
  void prefill(std::span<const int32_t> ids);

  // Samples the next token given all so far and appends it. A session that has seen nothing starts from start_token(),
  // which is not returned. logprob (may be null): log_probability() of the token. Throws Error(kNumeric) where the
  // logits are damaged, and the session is then of no more use.
  int32_t next(const Sampling& sampling, double* logprob = nullptr);

  // Up to so many tokens are drafted from the text and read together (generate/drafting.h); 0, as at first: none. What
  // next() gives stays, but for the rounding that model/draft_decoder.h names. Throws as
  // LanguageModel::require_drafts().
  void set_drafts(int64_t drafts);
  const DraftCounts& draft_counts() const { return counts_; }

  // Other random numbers from here on.
  void reseed(uint64_t seed);
  // The seed of another fork: the next of the session's random numbers.
  uint64_t draw_seed();

  // One safetensors file: the model's state, the last logits, the generator, the count and the last ids. load() throws
  // Error(kUsage) for a damaged file and for one of another model, and then the session is as it was.
  void save(const std::string& path) const;
  void load(const std::string& path);

  int64_t tokens_seen() const { return tokens_seen_; }
  int32_t last_token() const { return recent_.empty() ? -1 : recent_.back(); }  // that it has seen; -1: none
  size_t state_bytes() const { return state_.bytes(); }

 private:
  friend class SessionBatch;
  void start();  // with start_token(), where nothing was seen
  void append(std::span<const int32_t> ids);
  void remember(std::span<const int32_t> ids);
  Drawn next_drafted(const Sampling& sampling, bool logprobs);
  // Takes back what was drawn ahead of next(), so that the state is that of the tokens which it gave.
  void rewind() const;
  const Session& rewound() const {
    rewind();
    return *this;
  }
  const std::vector<float>& logits() const;

  LanguageModel<float>& model_;
  const Tokenizer& tokenizer_;
  ModelState<float> state_;
  std::unique_ptr<Decoder<float>> decoder_;  // made by the first next()
  mutable bool decoding_ = false;            // the decoder is where the session is
  // [vocab] of the next token; meaningless while tokens_seen_ is 0. While decoding they lie in the decoder, and here is
  // a copy or nothing.
  mutable std::vector<float> logits_;
  mutable bool logits_here_ = true;
  Random random_;
  int64_t tokens_seen_ = 0;
  std::vector<int32_t> recent_;  // the last ids, oldest first, kMostRecent of them at least where there are as many
  int64_t drafts_ = 0;
  PromptLookup lookup_;                 // with drafts: of all ids
  std::unique_ptr<Drafting> drafting_;  // made by the first next() with drafts, in place of the decoder
  // Tokens that the state has seen since the last pass with drafts, and how many of them next() has given. They were
  // drawn with these settings.
  mutable std::vector<Drawn> ahead_;
  mutable size_t given_ = 0;
  Sampling drawn_with_;
  bool has_logprobs_ = false;
  DraftCounts counts_;
};

// Up to `slots` sessions, a token of each at a time, each with its own state, random numbers and recent ids. What one
// gives does not depend on the others. The exception is the rounding of matrix products where there are more than
// Decoder's few rows (docs/internals/token.md).
class SessionBatch {
 public:
  // Model and tokenizer must outlive it. Throws Error(kUsage) for slots < 1. drafts: as Session::set_drafts() has it.
  SessionBatch(LanguageModel<float>& model, const Tokenizer& tokenizer, int64_t slots, int64_t drafts = 0);
  int64_t slots() const { return static_cast<int64_t>(numbers_.size()); }
  // The slot goes on as a copy of the session would (which has then seen start_token() at least).
  void put(int64_t slot, Session& session);
  // Nothing of it is used any more.
  void clear(int64_t slot);
  // A token for each slot that is used (the others' are meaningless), valid until the next call. Throws as
  // Session::next(). Without drafts.
  std::span<const Drawn> next(const Sampling& sampling, bool logprobs);
  // The same of one or more tokens a slot, with drafts or without. With them `sampling` stays the same.
  std::span<const std::vector<Drawn>> next_several(const Sampling& sampling, bool logprobs);
  // Of the session in a slot, since put().
  DraftCounts draft_counts(int64_t slot) const;

 private:
  const Tokenizer& tokenizer_;
  ModelState<float> state_;
  std::unique_ptr<Decoder<float>> decoder_;
  std::unique_ptr<Drafting> drafting_;  // in place of the decoder
  std::vector<PromptLookup> lookups_;   // with drafts
  std::vector<Random> numbers_;
  std::vector<char> used_;
  std::vector<double> uniform_;
  std::vector<std::vector<Drawn>> single_;  // of next_several() without drafts
};

}  // namespace fw
