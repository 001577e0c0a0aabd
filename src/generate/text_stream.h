// One text on its way out of a session: token after token until a number of them, a stop text or an end token comes.
// And what a caller may want to know of it afterwards. Text comes in pieces of which no part is held back but what
// could be the beginning of a stop text.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "generate/session.h"

namespace fw {

struct GenerateOptions {
  Sampling sampling;
  int64_t tokens = 256;             // at most
  std::string stop;                 // ends before this text; "": none
  std::vector<int32_t> end_tokens;  // ends with any of these ids, which have no text
  bool logprobs = false;
  // the text is printed after its prompt: a space between words goes before its first token too
  bool behind_text = false;
};

enum class StopReason { kTokens, kStopText, kEndToken, kInterrupted };
const char* name(StopReason reason);  // tokens, stop, end, interrupted

struct Generated {
  std::string text;  // without stop text and end token
  // all that were drawn: those of the stop text and the end token too, which the state has seen
  std::vector<int32_t> ids;
  std::vector<double> logprobs;  // of ids, where asked for
  StopReason stopped_by = StopReason::kTokens;
  double seconds = 0;
  DraftCounts drafts;
};

// A text that is being made: takes token after token until it says that it is whole.
class TextStream {
 public:
  // put (may be null) gets the text as it comes. The options must outlive the object.
  TextStream(const Tokenizer& tokenizer, const GenerateOptions& options, std::function<void(const std::string&)> put);
  TextStream(TextStream&&) noexcept;
  ~TextStream();
  // Whether it wants no more.
  bool whole() const;
  // A token, and its logprob where the options ask for it.
  void add(int32_t id, double logprob);
  // The end, because it is whole or because of that.
  Generated finish(StopReason otherwise = StopReason::kInterrupted);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

// put (may be null) gets the text as it comes; interrupt (may be null) ends after the token during which it becomes
// true.
Generated generate(Session& session, const Tokenizer& tokenizer, const GenerateOptions& options,
                   const std::function<void(const std::string&)>& put, const std::atomic<bool>* interrupt);

}  // namespace fw
