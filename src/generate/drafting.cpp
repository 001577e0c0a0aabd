#include "generate/drafting.h"

#include <algorithm>

#include "generate/sampling.h"

namespace fw {

Drafting::Drafting(LanguageModel<float>& model, ModelState<float>& state, int64_t vocab, int64_t drafts)
    : decoder_(model.draft_decoder(state, drafts)),
      vocab_(vocab),
      drafts_(drafts),
      sequences_(static_cast<size_t>(state.sequences())),
      given_(sequences_.size()) {}

void Drafting::begin(int64_t n, std::span<const float> logits, const PromptLookup& lookup, const Random& numbers) {
  decoder_->begin(n, logits, lookup.text());
  Sequence& sequence = sequences_[static_cast<size_t>(n)];
  sequence.lookup = &lookup;
  sequence.numbers = numbers;
  sequence.has_next = false;
  sequence.counts = {};
}

double Drafting::uniform(Sequence& sequence, const Sampling& sampling) const {
  return sampling.temperature == 0 ? 0.0 : sequence.numbers.uniform();
}

void Drafting::draw_first(const Sampling& sampling, bool logprobs) {
  for (size_t n = 0; n < sequences_.size(); ++n) {
    Sequence& sequence = sequences_[n];
    if (sequence.lookup == nullptr) continue;
    if (!sequence.has_next) {
      sequence.next = decoder_->draw(static_cast<int64_t>(n), vocab_, sampling, uniform(sequence, sampling), logprobs);
      sequence.has_next = true;
    }
    require_drawn(sequence.next);
  }
}

std::span<const std::vector<Drawn>> Drafting::next(const Sampling& sampling, bool logprobs) {
  draw_first(sampling, logprobs);
  const auto count = static_cast<int64_t>(sequences_.size());
  // A long window of recent ids has no room for those of drafts that do not come.
  const bool has_room =
      sampling.repetition_penalty == 1 || sampling.repetition_window <= kMostRecent - decoder_->most_tokens();
  std::vector<std::vector<int32_t>> drafts(sequences_.size());
  bool any = false;
  for (size_t n = 0; n < sequences_.size() && has_room; ++n) {
    const Sequence& sequence = sequences_[n];
    if (sequence.lookup != nullptr) drafts[n] = sequence.lookup->draft(sequence.next.id, drafts_);
    any = any || !drafts[n].empty();
  }
  const int64_t tokens = any ? decoder_->most_tokens() : 1;
  ids_.assign(static_cast<size_t>(count * tokens), 0);
  uniform_.assign(ids_.size(), 0.0);
  for (size_t n = 0; n < sequences_.size(); ++n) {
    const Sequence& sequence = sequences_[n];
    if (sequence.lookup == nullptr) continue;
    const size_t first = n * static_cast<size_t>(tokens);
    ids_[first] = sequence.next.id;
    std::copy(drafts[n].begin(), drafts[n].end(), ids_.begin() + static_cast<int64_t>(first) + 1);
    if (sampling.temperature == 0) continue;
    Random ahead = sequence.numbers;
    for (size_t t = 0; t < static_cast<size_t>(tokens); ++t) uniform_[first + t] = ahead.uniform();
  }
  const std::span<const Drawn> drawn = decoder_->read(tokens, ids_, vocab_, sampling, uniform_, logprobs);
  for (size_t n = 0; n < sequences_.size(); ++n) {
    Sequence& sequence = sequences_[n];
    given_[n].clear();
    if (sequence.lookup == nullptr) {
      decoder_->keep(static_cast<int64_t>(n), 1);
      continue;
    }
    given_[n].push_back(sequence.next);
    const size_t first = n * static_cast<size_t>(tokens);
    size_t kept = 0;
    while (kept < drafts[n].size() && drawn[first + kept].id == drafts[n][kept])
      given_[n].push_back(drawn[first + kept++]);
    sequence.next = drawn[first + kept];
    for (size_t i = 0; i <= kept; ++i) uniform(sequence, sampling);  // those that came
    decoder_->keep(static_cast<int64_t>(n), static_cast<int64_t>(kept) + 1);
    sequence.counts.drafted += static_cast<int64_t>(drafts[n].size());
    sequence.counts.accepted += static_cast<int64_t>(kept);
  }
  return given_;
}

void Drafting::take_back(int64_t n, int64_t tokens, std::span<float> logits) {
  decoder_->keep(n, tokens);
  decoder_->read_logits(n, tokens - 1, logits);
  end(n);
}

}  // namespace fw
