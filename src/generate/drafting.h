// Drafting: sequences of one state that are decoded with drafts (model/draft_decoder.h), each from its own text
// (PromptLookup) and with its own random numbers. A sequence has one number for each token, so its text does not depend
// on drafts.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "base/random.h"
#include "generate/prompt_lookup.h"
#include "model/language_model.h"

namespace fw {

struct DraftCounts {
  int64_t drafted = 0, accepted = 0;  // tokens
};

class Drafting {
 public:
  // The model and the state outlive it. Tokens are drawn below vocab. Throws as LanguageModel::require_drafts().
  Drafting(LanguageModel<float>& model, ModelState<float>& state, int64_t vocab, int64_t drafts);
  // Sequence n goes on from its state, with logits of its next token. The caller adds to the lookup what next() gives,
  // and keeps it until end(n).
  void begin(int64_t n, std::span<const float> logits, const PromptLookup& lookup, const Random& numbers);
  void end(int64_t n) { sequences_[static_cast<size_t>(n)].lookup = nullptr; }
  // Tokens of each sequence that has begun, one or more; the state has seen them. Valid until the next call. Other
  // settings than before need begin() of all. Throws Error(kNumeric) where the logits of a first one are damaged.
  std::span<const std::vector<Drawn>> next(const Sampling& sampling, bool logprobs);
  // Of what next() gave only the first `tokens` of sequence n have come, and logits are of the token after them. The
  // sequence begins again after that.
  void take_back(int64_t n, int64_t tokens, std::span<float> logits);
  // Of sequence n since begin().
  const DraftCounts& counts(int64_t n) const { return sequences_[static_cast<size_t>(n)].counts; }

 private:
  struct Sequence {
    const PromptLookup* lookup = nullptr;  // null: it is not used
    Random numbers;
    bool has_next = false;
    Drawn next;  // drawn, and not read by the model
    DraftCounts counts;
  };
  double uniform(Sequence& sequence, const Sampling& sampling) const;
  void draw_first(const Sampling& sampling, bool logprobs);

  std::unique_ptr<DraftDecoder<float>> decoder_;
  int64_t vocab_, drafts_;
  std::vector<Sequence> sequences_;
  std::vector<std::vector<Drawn>> given_;  // [N]
  std::vector<int32_t> ids_;               // [N, tokens] of a pass
  std::vector<double> uniform_;            // [N, tokens]
};

}  // namespace fw
