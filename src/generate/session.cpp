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

// Tokens of a prompt that are read at once: on a GPU as many as fill it, and a multiple of the recurrence's chunks.
int64_t chunk_of(const Device& device) { return device.kind() == FW_DEVICE_CPU ? 2048 : 16384; }

}  // namespace

int32_t start_token(const Tokenizer& tokenizer) {
  const std::vector<int32_t> newline = tokenizer.encode("\n");
  return !newline.empty() && tokenizer.piece(newline.back()) == "\n" ? newline.back() : 0;
}

Session::Session(LanguageModel<float>& model, const Tokenizer& tokenizer, uint64_t seed)
    : model_(model),
      tokenizer_(tokenizer),
      state_(model.config(), 1, model.device()),
      logits_(static_cast<size_t>(model.config().vocab_size)),
      random_(seed) {
  if (tokenizer.vocab_size() > model.config().vocab_size) {
    fail_usage("the tokenizer has a vocabulary of {}, the model of {}: the model was trained with another tokenizer",
               tokenizer.vocab_size(), model.config().vocab_size);
  }
}

// A decoder is of one state, so the copy makes its own.
Session::Session(const Session& other)
    : model_(other.rewound().model_),
      tokenizer_(other.tokenizer_),
      state_(other.state_),
      logits_(other.logits()),
      random_(other.random_),
      tokens_seen_(other.tokens_seen_),
      recent_(other.recent_),
      drafts_(other.drafts_),
      lookup_(other.lookup_) {}

void Session::set_drafts(int64_t drafts) {
  if (drafts != 0) model_.require_drafts(drafts);
  logits();  // those of a decoder, which goes
  rewind();
  decoding_ = false;
  decoder_.reset();
  drafting_.reset();
  drafts_ = drafts;
  lookup_ = {};
  if (drafts > 0) lookup_.add(recent_);
}

void Session::reseed(uint64_t seed) {
  rewind();
  random_ = Random(seed);
}

uint64_t Session::draw_seed() {
  rewind();
  return random_.bits();
}

void Session::prefill(std::span<const int32_t> ids) { prefill(ids, chunk_of(model_.device())); }

void Session::prefill(std::span<const int32_t> ids, int64_t chunk) {
  if (chunk < 1) fail_usage("prefill: expected a chunk of at least 1 token, got {}", chunk);
  for (size_t i = 0; i < ids.size(); ++i) {
    if (ids[i] < 0 || ids[i] >= model_.config().vocab_size) {
      fail_usage("prefill: expected ids from 0 to {}, got {} at position {}", model_.config().vocab_size - 1, ids[i],
                 i);
    }
  }
  while (!ids.empty()) {
    stop_point("prompt", tokens_seen_, tokens_seen_ + static_cast<int64_t>(ids.size()), "tokens");
    const size_t count = std::min(ids.size(), static_cast<size_t>(chunk));
    append(ids.first(count));
    ids = ids.subspan(count);
  }
}

void Session::start() {
  if (tokens_seen_ > 0) return;
  const int32_t first = start_token(tokenizer_);
  append({&first, 1});
}

int32_t Session::next(const Sampling& sampling, double* logprob) {
  validate(sampling);
  start();
  if (drafts_ > 0) {
    const Drawn drawn = next_drafted(sampling, logprob != nullptr);
    if (logprob != nullptr) *logprob = drawn.logprob;
    remember({&drawn.id, 1});
    return drawn.id;
  }
  if (!decoding_) {
    if (decoder_ == nullptr) decoder_ = model_.decoder(state_);
    decoder_->begin(0, logits(), recent_);
    decoding_ = true;
  }
  const double uniform = sampling.temperature == 0 ? 0.0 : random_.uniform();
  // Models may have a vocabulary padded beyond the tokenizer's; those ids stand for nothing.
  decoder_->sample(tokenizer_.vocab_size(), sampling, {&uniform, 1}, logprob != nullptr);
  decoder_->step();
  logits_here_ = false;
  const Drawn drawn = decoder_->wait()[0];
  require_drawn(drawn);
  if (logprob != nullptr) *logprob = drawn.logprob;
  remember({&drawn.id, 1});
  return drawn.id;
}

Drawn Session::next_drafted(const Sampling& sampling, bool logprobs) {
  if (!(sampling == drawn_with_) || logprobs != has_logprobs_) rewind();
  drawn_with_ = sampling, has_logprobs_ = logprobs;
  if (!decoding_) {
    if (drafting_ == nullptr) drafting_ = std::make_unique<Drafting>(model_, state_, tokenizer_.vocab_size(), drafts_);
    drafting_->begin(0, logits(), lookup_, random_);
    decoding_ = true;
  }
  if (given_ == ahead_.size()) {
    const DraftCounts before = drafting_->counts(0);
    ahead_ = drafting_->next(sampling, logprobs)[0];
    given_ = 0;
    logits_here_ = false;
    counts_.drafted += drafting_->counts(0).drafted - before.drafted;
    counts_.accepted += drafting_->counts(0).accepted - before.accepted;
  }
  if (sampling.temperature != 0) random_.uniform();  // the token's
  return ahead_[given_++];
}

void Session::rewind() const {
  if (drafts_ == 0 || !decoding_) return;
  decoding_ = false;
  if (given_ > 0) drafting_->take_back(0, static_cast<int64_t>(given_), logits_);
  logits_here_ = true;
  ahead_.clear();
  given_ = 0;
}

void Session::append(std::span<const int32_t> ids) {
  rewind();
  const int64_t count = static_cast<int64_t>(ids.size());
  model_.forward_last(ids, SeqLayout({0, count}), state_,
                      Mat<float>(logits_.data(), 1, static_cast<int64_t>(logits_.size())));
  decoding_ = false;
  logits_here_ = true;
  remember(ids);
}

void Session::remember(std::span<const int32_t> ids) {
  tokens_seen_ += static_cast<int64_t>(ids.size());
  if (drafts_ > 0) lookup_.add(ids);
  recent_.insert(recent_.end(), ids.begin(), ids.end());
  // Twice as many before any are dropped: a token costs the same however long the text is.
  if (recent_.size() >= 2 * kMostRecent) recent_.erase(recent_.begin(), recent_.end() - kMostRecent);
}

const std::vector<float>& Session::logits() const {
  if (drafts_ > 0) {
    rewind();
  } else if (!logits_here_) {
    decoder_->read_logits(0, logits_);
  }
  logits_here_ = true;
  return logits_;
}

void Session::save(const std::string& path) const {
  rewind();
  SafetensorsWriter writer;
  state_.add_to(writer, model_.config().rule, model_.hash());
  writer.add<float>(kLogits, {static_cast<int64_t>(logits_.size())}, logits());
  writer.add<int64_t>(kTokensSeen, {1}, std::span(&tokens_seen_, 1));
  const std::span<const int32_t> recent = std::span(recent_).last(std::min<size_t>(recent_.size(), kMostRecent));
  if (!recent.empty()) writer.add<int32_t>(kRecent, {static_cast<int64_t>(recent.size())}, recent);
  writer.set_metadata(kRandom, random_.save());
  writer.write(path);
}

void Session::load(const std::string& path) {
  const SafetensorsReader reader(path);
  const auto random_text = reader.metadata().find(kRandom);
  if (random_text == reader.metadata().end())
    fail_usage("'{}': expected a saved session, it has no generator ({}) in its metadata", path, kRandom);
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
  rewind();
  // Last, because it changes the state; what follows cannot fail.
  state_.read_from(reader, path, model_.config().rule, model_.hash());
  logits_ = std::move(logits);
  logits_here_ = true;
  decoding_ = false;
  random_ = random;
  recent_ = std::move(recent);
  lookup_ = {};
  if (drafts_ > 0) lookup_.add(recent_);
  tokens_seen_ = tokens_seen;
}

namespace {

int64_t at_least_one(int64_t slots) {
  if (slots < 1) fail_usage("batch: expected at least 1 sequence, got {}", slots);
  return slots;
}

}  // namespace

SessionBatch::SessionBatch(LanguageModel<float>& model, const Tokenizer& tokenizer, int64_t slots, int64_t drafts)
    : tokenizer_(tokenizer),
      state_(model.config(), at_least_one(slots), model.device()),
      numbers_(static_cast<size_t>(slots)),
      used_(static_cast<size_t>(slots)),
      uniform_(static_cast<size_t>(slots)),
      single_(static_cast<size_t>(slots)) {
  if (drafts == 0) {
    decoder_ = model.decoder(state_);
  } else {
    drafting_ = std::make_unique<Drafting>(model, state_, tokenizer.vocab_size(), drafts);
    lookups_.resize(static_cast<size_t>(slots));
  }
}

void SessionBatch::put(int64_t slot, Session& session) {
  session.start();
  session.rewind();
  state_.put(slot, session.state_);
  used_[static_cast<size_t>(slot)] = 1;
  if (drafting_ == nullptr) {
    decoder_->begin(slot, session.logits(), session.recent_);
    numbers_[static_cast<size_t>(slot)] = session.random_;
    return;
  }
  PromptLookup& lookup = lookups_[static_cast<size_t>(slot)];
  lookup = session.lookup_;
  if (session.drafts_ == 0) lookup.add(session.recent_);
  drafting_->begin(slot, session.logits(), lookup, session.random_);
}

void SessionBatch::clear(int64_t slot) {
  used_[static_cast<size_t>(slot)] = 0;
  if (drafting_ != nullptr) drafting_->end(slot);
}

DraftCounts SessionBatch::draft_counts(int64_t slot) const {
  return drafting_ == nullptr ? DraftCounts() : drafting_->counts(slot);
}

std::span<const std::vector<Drawn>> SessionBatch::next_several(const Sampling& sampling, bool logprobs) {
  if (drafting_ == nullptr) {
    const std::span<const Drawn> drawn = next(sampling, logprobs);
    for (size_t n = 0; n < drawn.size(); ++n) single_[n].assign(1, drawn[n]);
    return single_;
  }
  validate(sampling);
  const std::span<const std::vector<Drawn>> given = drafting_->next(sampling, logprobs);
  for (size_t n = 0; n < given.size(); ++n) {
    for (const Drawn& drawn : given[n]) lookups_[n].add({&drawn.id, 1});
  }
  return given;
}

std::span<const Drawn> SessionBatch::next(const Sampling& sampling, bool logprobs) {
  validate(sampling);
  if (decoder_ == nullptr) fail_internal("sessions side by side: expected next_several() with drafts");
  for (size_t n = 0; n < used_.size(); ++n)
    uniform_[n] = used_[n] == 0 || sampling.temperature == 0 ? 0.0 : numbers_[n].uniform();
  decoder_->sample(tokenizer_.vocab_size(), sampling, uniform_, logprobs);
  decoder_->step();
  const std::span<const Drawn> drawn = decoder_->wait();
  for (size_t n = 0; n < used_.size(); ++n) {
    if (used_[n] != 0) require_drawn(drawn[n]);
  }
  return drawn;
}

}  // namespace fw
