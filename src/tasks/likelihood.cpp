#include "tasks/likelihood.h"

#include <algorithm>

#include "base/error.h"
#include "base/stop.h"
#include "generate/sampling.h"

namespace fw {
namespace {

constexpr int64_t kPassTokens = 2048;  // of one pass through the model: bounds the memory
constexpr int64_t kLogitRows = 256;    // whose logits exist at once

}  // namespace

void LikelihoodScorer::read_context(std::span<const int32_t> context) {
  if (state_ && std::ranges::equal(context_, context)) return;
  context_.assign(context.begin(), context.end());
  state_.emplace(model_.config(), 1, model_.device());
  ++contexts_read_;
  std::vector<float> unused(static_cast<size_t>(model_.config().vocab_size));
  for (std::span<const int32_t> rest = context.first(context.size() - 1); !rest.empty();) {
    stop_point("scoring", static_cast<int64_t>(context.size() - rest.size()), static_cast<int64_t>(context.size()),
               "tokens of a context");
    const auto now = rest.first(std::min(rest.size(), static_cast<size_t>(kPassTokens)));
    model_.forward_last(now, SeqLayout({0, static_cast<int64_t>(now.size())}), *state_,
                        {unused.data(), 1, static_cast<int64_t>(unused.size())});
    rest = rest.subspan(now.size());
  }
}

Likelihood LikelihoodScorer::continuation(std::span<const int32_t> context, std::span<const int32_t> tokens) {
  if (context.empty() || tokens.empty())
    fail_internal("likelihood: expected a context and a continuation, got {} and {} tokens", context.size(),
                  tokens.size());
  const auto count = static_cast<int64_t>(tokens.size());
  if (max_length_ > 0 && count > max_length_)
    fail_internal("likelihood: a continuation of {} tokens for a model that is given {}", count, max_length_);
  // The last token is predicted, not given.
  if (max_length_ > 0) context = context.last(std::min(context.size(), static_cast<size_t>(max_length_ + 1 - count)));
  read_context(context);
  ModelState<float> state = *state_;
  std::vector<int32_t> given{context.back()};
  given.insert(given.end(), tokens.begin(), tokens.end() - 1);
  const int64_t vocab = model_.config().vocab_size;
  std::vector<float> logits(static_cast<size_t>(std::min(count, kLogitRows) * vocab));
  Likelihood result;
  for (int64_t begin = 0; begin < count; begin += kLogitRows) {
    stop_point("scoring", begin, count, "tokens of a continuation");
    const int64_t rows = std::min(kLogitRows, count - begin);
    model_.forward_all(std::span(given).subspan(static_cast<size_t>(begin), static_cast<size_t>(rows)),
                       SeqLayout({0, rows}), &state, {logits.data(), rows, vocab});
    for (int64_t i = 0; i < rows; ++i) {
      const auto row = std::span(logits).subspan(static_cast<size_t>(i * vocab), static_cast<size_t>(vocab));
      const int32_t token = tokens[static_cast<size_t>(begin + i)];
      result.log_likelihood += log_probability(row, token);
      result.greedy = result.greedy && std::ranges::max_element(row) - row.begin() == token;
    }
  }
  return result;
}

double LikelihoodScorer::window(std::span<const int32_t> given, std::span<const int32_t> scored) {
  const size_t before = given.size() - scored.size();
  ModelState<float> state(model_.config(), 1, model_.device());
  double sum = 0;
  for (size_t begin = 0; begin < given.size(); begin += kPassTokens) {
    stop_point("scoring", static_cast<int64_t>(begin), static_cast<int64_t>(given.size()), "tokens of a window");
    const size_t count = std::min(given.size() - begin, static_cast<size_t>(kPassTokens));
    std::vector<int32_t> targets(count, -1);
    for (size_t i = 0; i < count; ++i) {
      if (begin + i >= before) targets[i] = scored[begin + i - before];
    }
    sum -=
        model_.evaluate(given.subspan(begin, count), targets, SeqLayout({0, static_cast<int64_t>(count)}), &state).nll;
  }
  return sum;
}

double LikelihoodScorer::rolling(std::span<const int32_t> tokens, int32_t prefix) {
  std::vector<int32_t> all{prefix};
  all.insert(all.end(), tokens.begin(), tokens.end());
  const std::span<const int32_t> whole(all);
  const size_t most = max_length_ > 0 ? static_cast<size_t>(max_length_) : std::max<size_t>(tokens.size(), 1);
  double sum = 0;
  for (size_t done = 0; done < tokens.size();) {
    stop_point("scoring", static_cast<int64_t>(done), static_cast<int64_t>(tokens.size()), "tokens");
    const size_t scored = std::min(most, tokens.size() - done);
    const size_t end = done + scored;  // whole[end] is the last token that is scored
    const size_t given = std::min(end, done == 0 ? scored : most);
    sum += window(whole.subspan(end - given, given), whole.subspan(done + 1, scored));
    done = end;
  }
  return sum;
}

}  // namespace fw
