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

Generated generate(Session& session, const Tokenizer& tokenizer, const GenerateOptions& options, const std::function<void(const std::string&)>& put,
                   const std::atomic<bool>* interrupt) {
  const auto begin = std::chrono::steady_clock::now();
  StopFilter filter(options.stop);
  Generated result;
  const auto out = [&](const std::string& text) {
    if (text.empty()) return;
    result.text += text;
    if (put) put(text);
  };
  while (static_cast<int64_t>(result.ids.size()) < options.tokens) {
    if (interrupt != nullptr && *interrupt) {
      result.stopped_by = StopReason::kInterrupted;
      break;
    }
    double logprob = 0;
    const int32_t id = session.next(options.sampling, options.logprobs ? &logprob : nullptr);
    result.ids.push_back(id);
    if (options.logprobs) result.logprobs.push_back(logprob);
    if (std::find(options.end_tokens.begin(), options.end_tokens.end(), id) != options.end_tokens.end()) {
      result.stopped_by = StopReason::kEndToken;
      break;
    }
    out(filter.add(tokenizer.piece(id)));
    if (filter.stopped()) {
      result.stopped_by = StopReason::kStopText;
      break;
    }
  }
  out(filter.rest());
  result.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  return result;
}

}  // namespace fw
