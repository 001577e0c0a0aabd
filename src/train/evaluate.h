// Evaluation: the loss of a token file under a model, as loss, perplexity and bits per byte.
#pragma once

#include <cstdint>
#include <optional>

#include "model/language_model.h"
#include "tokenizer/tokenizer.h"
#include "train/token_file.h"

namespace fw {

// Tokens of one pass through the model: bounds the memory, whatever the length of documents and windows.
inline constexpr int64_t kEvaluationTokens = 4096;

struct EvalResult {
  LossSum sum;                   // nats and number of scored tokens
  std::optional<int64_t> bytes;  // of the text that the scored tokens stand for, where the token file knows them
  double loss = 0;               // nats per scored token
  double perplexity = 0;
  std::optional<double> bits_per_byte;  // where bytes are known, and there are some
  double bits_per_token = 0;
};

// The whole file in windows of `context` tokens (documents never share one; context 0: whole documents).
//   carry: the state goes on from window to window inside a document, so every token but a document's first is scored;
//   otherwise every window starts from nothing and its first token is not scored. There is no padding to score. The
//   bytes behind bits per byte are those of the text that the scored tokens stand for, whatever a normalizer made of
//   it. Throws Error(kUsage) for a negative context, for windows of one token that carry nothing, for a file whose
//   vocabulary is not the model's and for one without a token to score. Stopped when base/stop.h says so. limit: only
//   the first so many tokens of the file; 0: all.
EvalResult evaluate_file(LanguageModel<float>& model, const TokenFile& file, const Tokenizer& tokenizer,
                         int64_t context, bool carry, int64_t limit = 0);

}  // namespace fw
