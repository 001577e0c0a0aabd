#include "generate/text_stream.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include "base/error.h"

namespace fw {
namespace {

// Holds back what could be the beginning of the stop text, so that no part of it comes out.
class StopFilter {
 public:
  explicit StopFilter(const std::string& stop) : stop_(stop) {}

  // What may go out now. After the stop text has come, nothing more.
  std::string add(const std::string& piece) {
    held_ += piece;
    if (stop_.empty()) return take(held_.size());
    if (const size_t at = held_.find(stop_); at != std::string::npos) {
      stopped_ = true;
      return take(at);
    }
    size_t keep = std::min(held_.size(), stop_.size() - 1);
    while (keep > 0 && !stop_.starts_with(std::string_view(held_).substr(held_.size() - keep))) --keep;
    return take(held_.size() - keep);
  }
  std::string rest() { return stopped_ ? std::string() : take(held_.size()); }
  bool stopped() const { return stopped_; }

 private:
  std::string take(size_t n) {
    std::string out = held_.substr(0, n);
    held_.erase(0, n);
    return out;
  }
  const std::string& stop_;
  std::string held_;
  bool stopped_ = false;
};

}  // namespace

const char* name(StopReason reason) {
  switch (reason) {
    case StopReason::kTokens:
      return "tokens";
    case StopReason::kStopText:
      return "stop";
    case StopReason::kEndToken:
      return "end";
    case StopReason::kInterrupted:
      return "interrupted";
  }
  fail_internal("no name for stop reason {}", static_cast<int>(reason));
}

struct TextStream::Impl {
  Impl(const Tokenizer& t, const GenerateOptions& o, std::function<void(const std::string&)> p)
      : tokenizer(t), options(o), put(std::move(p)), filter(o.stop), whole(o.tokens <= 0) {}
  void out(const std::string& text) {
    if (text.empty()) return;
    result.text += text;
    if (put) put(text);
  }

  const Tokenizer& tokenizer;
  const GenerateOptions& options;
  std::function<void(const std::string&)> put;
  StopFilter filter;
  bool whole;
  Generated result;
  std::chrono::steady_clock::time_point begin = std::chrono::steady_clock::now();
};

TextStream::TextStream(const Tokenizer& tokenizer, const GenerateOptions& options,
                       std::function<void(const std::string&)> put)
    : impl_(std::make_unique<Impl>(tokenizer, options, std::move(put))) {}
TextStream::TextStream(TextStream&&) noexcept = default;
TextStream::~TextStream() = default;

bool TextStream::whole() const { return impl_->whole; }

void TextStream::add(int32_t id, double logprob) {
  Impl& m = *impl_;
  Generated& result = m.result;
  result.ids.push_back(id);
  if (m.options.logprobs) result.logprobs.push_back(logprob);
  m.whole = static_cast<int64_t>(result.ids.size()) >= m.options.tokens;
  const auto stop = [&](StopReason reason) {
    result.stopped_by = reason;
    m.whole = true;
  };
  if (std::find(m.options.end_tokens.begin(), m.options.end_tokens.end(), id) != m.options.end_tokens.end())
    return stop(StopReason::kEndToken);
  m.out(m.filter.add(result.ids.size() == 1 && !m.options.behind_text ? m.tokenizer.first_piece(id)
                                                                      : m.tokenizer.piece(id)));
  if (m.filter.stopped()) stop(StopReason::kStopText);
}

Generated TextStream::finish(StopReason otherwise) {
  Impl& m = *impl_;
  if (!m.whole) m.result.stopped_by = otherwise;
  m.out(m.filter.rest());
  m.result.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - m.begin).count();
  return std::move(m.result);
}

Generated generate(Session& session, const Tokenizer& tokenizer, const GenerateOptions& options,
                   const std::function<void(const std::string&)>& put, const std::atomic<bool>* interrupt) {
  TextStream stream(tokenizer, options, put);
  const DraftCounts before = session.draft_counts();
  while (!stream.whole() && !(interrupt != nullptr && *interrupt)) {
    double logprob = 0;
    const int32_t id = session.next(options.sampling, options.logprobs ? &logprob : nullptr);
    stream.add(id, logprob);
  }
  Generated result = stream.finish();
  result.drafts.drafted = session.draft_counts().drafted - before.drafted;
  result.drafts.accepted = session.draft_counts().accepted - before.accepted;
  return result;
}

}  // namespace fw
