#include "train/evaluate.h"

#include <algorithm>
#include <cmath>
#include <numbers>
#include <vector>

#include "base/error.h"
#include "base/stop.h"
#include "tokenizer/text_bytes.h"

namespace fw {
namespace {

constexpr int64_t kPassTokens = kEvaluationTokens;

// Bytes of the text that tokens of a file stand for.
class FileBytes {
 public:
  FileBytes(const TokenFile& file, const Tokenizer& tokenizer)
      : file_(file), pieces_(tokenizer), known_(pieces_.known() && file.knows_bytes()) {
    if (pieces_.known() && file.version() < 3) known_ = pieces_are_the_text();
  }
  bool known() const { return known_; }
  int64_t of(int64_t token, int32_t id) const { return file_.exception_at(token).value_or(pieces_.piece(id)); }

 private:
  // Of a file that does not say it: the text has as many bytes as the pieces. Those of a text with a separator do not
  // count the newline that begins a document.
  bool pieces_are_the_text() const {
    constexpr int64_t kPart = int64_t{1} << 16;
    std::vector<int32_t> ids;
    int64_t sum = 0;
    for (int64_t begin = 0; begin < file_.tokens(); begin += kPart) {
      ids.resize(static_cast<size_t>(std::min(kPart, file_.tokens() - begin)));
      file_.read(begin, ids);
      for (const int32_t id : ids) sum += pieces_.piece(id);
    }
    return sum == file_.text_bytes() || sum == file_.text_bytes() + file_.documents();
  }

  const TokenFile& file_;
  const TextBytes pieces_;
  bool known_;
};

class Evaluation {
 public:
  Evaluation(LanguageModel<float>& model, const TokenFile& file, const Tokenizer& tokenizer)
      : model_(model), file_(file), file_bytes_(file, tokenizer) {}

  // Tokens [begin, end) in one line: starts from nothing, all but the first are scored. Short ones are packed, long
  // ones run in pieces of `piece` tokens with the state carried.
  void add_segment(int64_t begin, int64_t end, int64_t piece) {
    const int64_t length = end - begin;
    if (length <= 1) return;
    if (length <= piece) {
      if (static_cast<int64_t>(ids_.size()) + length > kPassTokens) flush();
      append(begin, end, end);
      offsets_.push_back(static_cast<int64_t>(ids_.size()));
      return;
    }
    flush();
    ModelState<float> state(model_.config(), 1, model_.device());
    // The last token has nothing to predict; a piece of it alone would be work for nothing.
    for (int64_t from = begin; from < end - 1; from += piece) {
      append(from, std::min(from + piece, end - 1), end);
      offsets_.push_back(static_cast<int64_t>(ids_.size()));
      run(&state);
    }
  }

  void flush() {
    if (!ids_.empty()) run(nullptr);
  }

  EvalResult result() const {
    EvalResult r;
    r.sum = sum_;
    if (file_bytes_.known()) r.bytes = bytes_;
    r.loss = sum_.nll / static_cast<double>(sum_.count);
    r.perplexity = std::exp(r.loss);
    r.bits_per_token = r.loss / std::numbers::ln2;
    if (file_bytes_.known() && bytes_ > 0) r.bits_per_byte = sum_.nll / std::numbers::ln2 / static_cast<double>(bytes_);
    return r;
  }

 private:
  // Tokens [begin, end) of a segment that ends at segment_end, and what they predict.
  void append(int64_t begin, int64_t end, int64_t segment_end) {
    const int64_t known = std::min(end + 1, segment_end) - begin;
    tokens_.resize(static_cast<size_t>(known));
    file_.read(begin, tokens_);
    const size_t count = static_cast<size_t>(end - begin);
    ids_.insert(ids_.end(), tokens_.begin(), tokens_.begin() + static_cast<int64_t>(count));
    targets_.insert(targets_.end(), tokens_.begin() + 1, tokens_.end());
    targets_.resize(ids_.size(), -1);
    if (!file_bytes_.known()) return;
    for (int64_t i = 1; i < known; ++i) bytes_ += file_bytes_.of(begin + i, tokens_[static_cast<size_t>(i)]);
  }

  void run(ModelState<float>* state) {
    stop_point("evaluation", tokens_done_, file_.tokens(), "tokens");
    tokens_done_ += static_cast<int64_t>(ids_.size());
    const LossSum sum = model_.evaluate(ids_, targets_, SeqLayout(offsets_), state);
    sum_.nll += sum.nll;
    sum_.count += sum.count;
    ids_.clear();
    targets_.clear();
    offsets_.assign(1, 0);
  }

  LanguageModel<float>& model_;
  const TokenFile& file_;
  const FileBytes file_bytes_;
  std::vector<int32_t> tokens_, ids_, targets_;
  std::vector<int64_t> offsets_{0};
  LossSum sum_;
  int64_t bytes_ = 0, tokens_done_ = 0;
};

}  // namespace

EvalResult evaluate_file(LanguageModel<float>& model, const TokenFile& file, const Tokenizer& tokenizer,
                         int64_t context, bool carry, int64_t limit) {
  if (context < 0) fail_usage("evaluation: context must be >= 0 tokens (0: whole documents), got {}", context);
  if (context == 1 && !carry)
    fail_usage(
        "evaluation: windows of 1 token that carry no state leave nothing to score; give a context of 2 or more, or "
        "carry the state");
  if (file.vocab_size() > model.config().vocab_size) {
    fail_usage(
        "evaluation: the token file has a vocabulary of {}, the model of {}: the file was made for another model",
        file.vocab_size(), model.config().vocab_size);
  }
  check_tokenizer(file, tokenizer);
  const bool whole = carry || context == 0;
  const int64_t piece = carry && context > 0 ? std::min(context, kPassTokens) : kPassTokens;
  const int64_t tokens = limit > 0 ? std::min(limit, file.tokens()) : file.tokens();
  Evaluation evaluation(model, file, tokenizer);
  for (int64_t i = 0; i < file.documents() && file.document_begin(i) < tokens; ++i) {
    const int64_t end = std::min(file.document_begin(i + 1), tokens);
    for (int64_t begin = file.document_begin(i); begin < end;) {
      const int64_t next = whole ? end : std::min(begin + context, end);
      evaluation.add_segment(begin, next, piece);
      begin = next;
    }
  }
  evaluation.flush();
  const EvalResult result = evaluation.result();
  if (result.sum.count == 0)
    fail_usage("evaluation: '{}' has no token to score: each of its documents is a single token{}", file.name(),
               limit > 0 ? fmt::format(" among the first {} tokens", limit) : "");
  return result;
}

}  // namespace fw
