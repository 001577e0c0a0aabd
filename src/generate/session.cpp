#include "generate/session.h"

#include <algorithm>

#include "base/error.h"
#include "base/safetensors.h"
#include "base/stop.h"

namespace fw {
namespace {

constexpr const char* kLogits = "session.logits";
constexpr const char* kTokensSeen = "session.tokens_seen";
constexpr const char* kRecent = "session.recent";
constexpr const char* kRandom = "session_random";  // metadata

}  // namespace

int32_t start_token(const Tokenizer& tokenizer) {
  const std::vector<int32_t> newline = tokenizer.encode("\n");
  return !newline.empty() && tokenizer.piece(newline.back()) == "\n" ? newline.back() : 0;
}

Session::Session(LanguageModel<float>& model, const Tokenizer& tokenizer, uint64_t seed)
    : model_(model), tokenizer_(tokenizer), state_(model.config(), 1, model.device()), logits_(static_cast<size_t>(model.config().vocab_size)), random_(seed) {
  if (tokenizer.vocab_size() > model.config().vocab_size) {
    fail_usage("the tokenizer has a vocabulary of {}, the model of {}: the model was trained with another tokenizer", tokenizer.vocab_size(),
               model.config().vocab_size);
  }
}

void Session::prefill(std::span<const int32_t> ids, int64_t chunk) {
  if (chunk < 1) fail_usage("prefill: expected a chunk of at least 1 token, got {}", chunk);
  for (size_t i = 0; i < ids.size(); ++i) {
    if (ids[i] < 0 || ids[i] >= model_.config().vocab_size) {
      fail_usage("prefill: expected ids from 0 to {}, got {} at position {}", model_.config().vocab_size - 1, ids[i], i);
    }
  }
  while (!ids.empty()) {
    stop_point("prompt", tokens_seen_, tokens_seen_ + static_cast<int64_t>(ids.size()), "tokens");
    const size_t count = std::min(ids.size(), static_cast<size_t>(chunk));
    append(ids.first(count));
    ids = ids.subspan(count);
  }
}

int32_t Session::next(const Sampling& sampling, double* logprob) {
  if (tokens_seen_ == 0) {
    const int32_t start = start_token(tokenizer_);
    append({&start, 1});
  }
  // Models may have a vocabulary padded beyond the tokenizer's; those ids stand for nothing.
  const auto logits = std::span(logits_).first(static_cast<size_t>(tokenizer_.vocab_size()));
  const int32_t id = sample(logits, recent_, sampling, random_);
  if (logprob != nullptr) *logprob = log_probability(logits, id);
  append({&id, 1});
  return id;
}

void Session::append(std::span<const int32_t> ids) {
  const int64_t count = static_cast<int64_t>(ids.size());
  model_.forward_last(ids, SeqLayout({0, count}), state_, Mat<float>(logits_.data(), 1, static_cast<int64_t>(logits_.size())));
  tokens_seen_ += count;
  recent_.insert(recent_.end(), ids.begin(), ids.end());
  // Twice as many before any are dropped: a token costs the same however long the text is.
  if (recent_.size() >= 2 * kMostRecent) recent_.erase(recent_.begin(), recent_.end() - kMostRecent);
}

void Session::save(const std::string& path) const {
  SafetensorsWriter writer;
  state_.add_to(writer, model_.config().rule, model_.hash());
  writer.add<float>(kLogits, {static_cast<int64_t>(logits_.size())}, logits_);
  writer.add<int64_t>(kTokensSeen, {1}, std::span(&tokens_seen_, 1));
  const std::span<const int32_t> recent = std::span(recent_).last(std::min<size_t>(recent_.size(), kMostRecent));
  if (!recent.empty()) writer.add<int32_t>(kRecent, {static_cast<int64_t>(recent.size())}, recent);
  writer.set_metadata(kRandom, random_.save());
  writer.write(path);
}

void Session::load(const std::string& path) {
  const SafetensorsReader reader(path);
  const auto random_text = reader.metadata().find(kRandom);
  if (random_text == reader.metadata().end()) fail_usage("'{}': expected a saved session, it has no generator ({}) in its metadata", path, kRandom);
  std::vector<float> logits(logits_.size());
  int64_t tokens_seen = 0;
  Random random;
  const int64_t vocab = static_cast<int64_t>(logits.size()), one = 1;
  reader.read<float>(kLogits, {&vocab, 1}, logits);
  reader.read<int64_t>(kTokensSeen, {&one, 1}, {&tokens_seen, 1});
  if (tokens_seen < 0) fail_usage("'{}': {}: expected a number >= 0, got {}", path, kTokensSeen, tokens_seen);
  random.load(random_text->second);
  std::vector<int32_t> recent;
  if (reader.has(kRecent)) {
    recent.resize(static_cast<size_t>(std::min<int64_t>(reader.tensors().at(kRecent).count(), kMostRecent)));
    const int64_t count = static_cast<int64_t>(recent.size());
    reader.read<int32_t>(kRecent, {&count, 1}, recent);
  }
  // Last, because it changes the state; what follows cannot fail.
  state_.read_from(reader, path, model_.config().rule, model_.hash());
  logits_ = std::move(logits);
  random_ = random;
  recent_ = std::move(recent);
  tokens_seen_ = tokens_seen;
}

}  // namespace fw
