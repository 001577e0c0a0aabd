#include "analyze/run.h"

#include <algorithm>
#include <limits>

#include "base/error.h"
#include "base/stop.h"

namespace fw {
namespace {

// Tokens of one pass through the model: bounds the memory, whatever the length of a window.
constexpr int64_t kPassTokens = 4096;

void check(const LanguageModel<float>& model, const TokenFile& file, const AnalyzeOptions& options) {
  const int64_t layers = model.config().num_hidden_layers;
  for (const int64_t layer : options.layers) {
    if (layer < 0 || layer >= layers) fail_usage("layers: expected numbers from 0 to {}, got {}", layers - 1, layer);
  }
  if (options.tokens < 0) fail_usage("tokens: expected a number >= 0 (0: the whole text), got {}", options.tokens);
  if (options.context < 0)
    fail_usage("context: expected a number of tokens >= 0 (0: whole documents), got {}", options.context);
  if (file.vocab_size() > model.config().vocab_size) {
    fail_usage("'{}' has a vocabulary of {}, the model of {}: the file was made for another model", file.name(),
               file.vocab_size(), model.config().vocab_size);
  }
}

// The observer leaves the model even if something throws.
class Watch {
 public:
  Watch(LanguageModel<float>& model, PassObserver<float>* observer) : model_(model) { model_.observe(observer); }
  ~Watch() { model_.observe(nullptr); }
  Watch(const Watch&) = delete;
  Watch& operator=(const Watch&) = delete;

 private:
  LanguageModel<float>& model_;
};

}  // namespace

Analysis analyze_text(LanguageModel<float>& model, const TokenFile& file, const AnalyzeOptions& options) {
  check(model, file, options);
  Analysis result;
  result.rule = model.config().mixers();
  result.context = options.context;
  result.every = options.every;
  Analyzer<float> analyzer(options.layers, options.every);
  const Watch watch(model, &analyzer);
  const int64_t limit = options.tokens > 0 ? std::min(options.tokens, file.tokens()) : file.tokens();
  LossSum sum;
  std::vector<int32_t> ids, targets;
  for (int64_t document = 0; document < file.documents() && result.tokens < limit; ++document) {
    const int64_t end = file.document_begin(document + 1);
    for (int64_t begin = file.document_begin(document); begin < end && result.tokens < limit;) {
      const int64_t length =
          std::min({options.context > 0 ? options.context : end, end - begin, limit - result.tokens});
      ids.resize(static_cast<size_t>(length));
      file.read(begin, ids);
      ModelState<float> state(model.config(), 1, model.device());
      for (int64_t from = 0; from < length; from += kPassTokens) {
        const int64_t count = std::min(kPassTokens, length - from);
        stop_point("analysis", result.tokens + from, limit, "tokens");
        targets.assign(ids.begin() + from + 1, ids.begin() + std::min(from + count + 1, length));
        targets.resize(static_cast<size_t>(count), -1);
        analyzer.set_position(from);
        const LossSum piece =
            model.evaluate(std::span<const int32_t>(ids).subspan(static_cast<size_t>(from), static_cast<size_t>(count)),
                           targets, SeqLayout({0, count}), &state);
        sum.nll += piece.nll;
        sum.count += piece.count;
      }
      ++result.windows;
      result.tokens += length;
      begin += length;
    }
  }
  result.loss = sum.count > 0 ? sum.nll / static_cast<double>(sum.count) : std::numeric_limits<double>::quiet_NaN();
  result.layers = analyzer.take();
  if (result.layers.empty()) fail_usage("layers: expected at least one with a recurrence, got none");
  return result;
}

}  // namespace fw
