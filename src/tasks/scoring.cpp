#include "tasks/scoring.h"

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <numbers>
#include <optional>

#include "base/error.h"
#include "base/stop.h"
#include "generate/session.h"
#include "tasks/likelihood.h"
#include "tasks/unicode.h"

namespace fw {
namespace {

using Ids = std::vector<int32_t>;

// The tokens of a request. Of choices a context and a continuation each; of a text the continuation alone; of
// generation the context alone.
struct Prepared {
  std::vector<Ids> contexts, continuations;
  bool truncated = false, apart = false;
};

std::string name_of(const Request& r) { return fmt::format("{} (task {}, id {})", r.where, r.task, r.id); }

int32_t prefix_of(const Tokenizer& tokenizer, int32_t given) {
  if (given >= 0) return given;
  return tokenizer.end_of_text() >= 0 ? tokenizer.end_of_text() : start_token(tokenizer);
}

// Without control characters, as RULER reads an output: each becomes the end of a line.
std::string cleaned(std::string_view output) {
  std::string text(stripped(output));
  std::ranges::replace_if(
      text, [](char c) { return static_cast<unsigned char>(c) < 0x20; }, '\n');
  return std::string(stripped(text));
}

double answered(const Request& r, const std::string& output) {
  const std::string text = r.metric == AnswerMetric::kSubstrAll ? cleaned(output) : output;
  const auto found =
      std::ranges::count_if(r.answers, [&](const std::string& answer) { return contains_ignoring_case(text, answer); });
  return r.metric == AnswerMetric::kContains ? static_cast<double>(found > 0)
                                             : static_cast<double>(found) / static_cast<double>(r.answers.size());
}

const char* metric_of(const Request& r) { return r.metric == AnswerMetric::kContains ? "contains" : "substr_all"; }

// Index of the largest, the first of equal ones.
int64_t largest(const std::vector<double>& values) { return std::ranges::max_element(values) - values.begin(); }

TaskScores::Metric mean_of(const std::string& name, const std::vector<double>& values) {
  const auto n = static_cast<double>(values.size());
  double mean = 0, squares = 0;
  for (const double x : values) mean += x / n;
  for (const double x : values) squares += (x - mean) * (x - mean);
  return {name, mean, values.size() > 1 ? std::sqrt(squares / (n - 1) / n) : -1};
}

}  // namespace

struct Scoring::Impl {
  LanguageModel<float>& model;
  const Tokenizer& tokenizer;
  ScoringOptions options;
  const std::vector<Request>& requests;
  int32_t prefix;
  LikelihoodScorer likelihood;
  // Of each request; none: it was left out, or is not done.
  std::vector<std::optional<Prepared>> prepared;
  std::vector<std::optional<RequestScore>> done;
  std::vector<std::string> skipped;

  Impl(LanguageModel<float>& m, const Tokenizer& t, const ScoringOptions& o, const std::vector<Request>& r)
      : model(m), tokenizer(t), options(o), requests(r), prefix(prefix_of(t, o.prefix)), likelihood(m, o.max_length) {
    if (options.max_length < 0)
      fail_usage("max_length: expected a number of tokens, or 0 for no limit, got {}", options.max_length);
    if (prefix >= model.config().vocab_size)
      fail_usage("prefix token: expected 0 to {}, got {}", model.config().vocab_size - 1, prefix);
    prepared.resize(requests.size());
    for (size_t i = 0; i < requests.size(); ++i) {
      stop_point("encoding", static_cast<int64_t>(i), static_cast<int64_t>(requests.size()), "requests");
      try {
        prepared[i] = prepare(requests[i]);
      } catch (const Error& error) {
        if (error.kind() != ErrorKind::kUsage) throw;
        if (!options.skip_bad) fail_usage("{}; --skip-bad leaves such requests out", error.what());
        skipped.emplace_back(error.what());
      }
    }
    if (skipped.size() == requests.size() && !skipped.empty())
      fail_usage("none of {} requests can be scored; the first: {}", skipped.size(), skipped.front());
  }

  Ids encode(const Request& r, const std::string& text) const {
    try {
      return tokenizer.encode(text);
    } catch (const Error& error) {
      throw Error(error.kind(), fmt::format("{}: {}", name_of(r), error.what()));
    }
  }

  void add_pair(const Request& r, std::string context, std::string continuation, Prepared& p) const {
    const size_t space = trailing_space(context);
    continuation.insert(0, context, context.size() - space);
    context.erase(context.size() - space);
    Ids given = encode(r, context), all = encode(r, context + continuation);
    if (given.empty()) {
      given = {prefix};
      if (all.size() > 1 && all.front() == prefix) all.erase(all.begin());
    } else if (all.size() > given.size()) {
      all.erase(all.begin(), all.begin() + static_cast<int64_t>(given.size()));
    } else {
      all = encode(r, continuation);
      p.apart = true;
    }
    if (all.empty()) fail_usage("{}: the continuation '{}' has no token", name_of(r), continuation);
    const auto length = static_cast<int64_t>(all.size());
    if (options.max_length > 0 && length > options.max_length) {
      fail_usage("{}: a continuation of {} tokens does not fit into --max-length {}", name_of(r), length,
                 options.max_length);
    }
    p.truncated =
        p.truncated || (options.max_length > 0 && static_cast<int64_t>(given.size()) + length > options.max_length + 1);
    p.contexts.push_back(std::move(given));
    p.continuations.push_back(std::move(all));
  }

  // The document's tokens that are kept: `room` of them around the first answer (half before it, as far as both ends
  // allow), or the last ones.
  Ids cut(const Request& r, Ids document, size_t room) const {
    if (document.size() <= room) return document;
    size_t begin = document.size() - room;
    if (r.truncation == Truncation::kAnswerWindow) {
      size_t first = std::string::npos;  // bytes
      for (const std::string& answer : r.answers) first = std::min(first, r.contexts.front().find(answer));
      const size_t at = first == std::string::npos ? 0 : encode(r, r.contexts.front().substr(0, first)).size();
      begin = std::min(begin, at - std::min(at, room / 2));
    }
    return {document.begin() + static_cast<int64_t>(begin), document.begin() + static_cast<int64_t>(begin + room)};
  }

  Ids prompt(const Request& r, bool& truncated) const {
    const int64_t limit = r.max_length > 0 ? r.max_length : options.max_length, room = limit - r.max_gen;
    const auto fits = [&](size_t tokens) { return limit == 0 || static_cast<int64_t>(tokens) <= room; };
    Ids whole = encode(r, r.contexts.front() + r.question);
    if (whole.empty()) whole = {prefix};
    if (fits(whole.size())) return whole;
    if (r.truncation == Truncation::kRefuse && r.max_length > 0) {
      fail_usage(
          "{}: the prompt has {} tokens with this tokenizer, and with {} of the output it is longer than its length of "
          "{}: draw the task with the model's "
          "tokenizer",
          name_of(r), whole.size(), r.max_gen, limit);
    }
    truncated = true;
    const Ids question = encode(r, r.question);
    if (room < 1 || static_cast<int64_t>(question.size()) >= room) {
      fail_usage("{}: a question of {} tokens and an output of {} leave no room for a document within {}", name_of(r),
                 question.size(), r.max_gen, limit);
    }
    Ids kept = cut(r, encode(r, r.contexts.front()), static_cast<size_t>(room) - question.size());
    kept.insert(kept.end(), question.begin(), question.end());
    return kept;
  }

  Prepared prepare(const Request& r) const {
    Prepared p;
    switch (r.kind) {
      case RequestKind::kChoices:
        for (const std::string& choice : r.choices) add_pair(r, r.contexts.front(), fmt::format(" {}", choice), p);
        break;
      case RequestKind::kContexts:
        for (const std::string& context : r.contexts) add_pair(r, context, fmt::format(" {}", r.choices.front()), p);
        break;
      case RequestKind::kLikelihood:
        add_pair(r, r.contexts.front(), r.choices.front(), p);
        break;
      case RequestKind::kRolling:
        p.continuations = {encode(r, r.text)};
        break;
      case RequestKind::kGenerate:
        p.contexts = {prompt(r, p.truncated)};
        break;
    }
    return p;
  }

  std::string generated(const Request& r, const Ids& prompt) const {
    Session session(model, tokenizer, 0);
    session.prefill(prompt);
    std::string text;
    size_t longest = 0;
    for (const std::string& stop : r.until) longest = std::max(longest, stop.size());
    for (int64_t i = 0; i < r.max_gen; ++i) {
      stop_point("output", i, r.max_gen, "tokens");
      const int32_t id = session.next({.temperature = 0});
      if (std::ranges::find(options.end_tokens, id) != options.end_tokens.end()) break;
      // A stop text ends in what is new.
      const size_t from = text.size() - std::min(text.size(), longest);
      text += i == 0 ? tokenizer.first_piece(id) : tokenizer.piece(id);
      size_t end = std::string::npos;
      for (const std::string& stop : r.until) end = std::min(end, text.find(stop, from));
      if (end != std::string::npos) return text.substr(0, end);
    }
    return text;
  }

  RequestScore score(const Request& r, const Prepared& p) {
    RequestScore s;
    std::vector<double> by_length;
    switch (r.kind) {
      case RequestKind::kChoices:
      case RequestKind::kContexts:
        for (size_t i = 0; i < p.contexts.size(); ++i) {
          s.log_likelihoods.push_back(likelihood.continuation(p.contexts[i], p.continuations[i]).log_likelihood);
          if (r.kind == RequestKind::kChoices)
            by_length.push_back(s.log_likelihoods.back() / static_cast<double>(code_points(r.choices[i])));
        }
        s.chosen = largest(s.log_likelihoods);
        s.values["acc"] = static_cast<double>(s.chosen == r.gold);
        if (r.kind == RequestKind::kChoices) s.values["acc_norm"] = static_cast<double>(largest(by_length) == r.gold);
        break;
      case RequestKind::kLikelihood: {
        const Likelihood one = likelihood.continuation(p.contexts.front(), p.continuations.front());
        s.values["log_likelihood"] = one.log_likelihood;
        s.values["acc"] = static_cast<double>(one.greedy);
        break;
      }
      case RequestKind::kRolling:
        s.values["log_likelihood"] = likelihood.rolling(p.continuations.front(), prefix);
        break;
      case RequestKind::kGenerate:
        s.output = generated(r, p.contexts.front());
        s.values[metric_of(r)] = answered(r, s.output);
        break;
    }
    return s;
  }

  // Requests of one task (and length), all of one kind or of several.
  TaskScores summary(const std::string& task, int64_t length, const std::vector<size_t>& which) const {
    TaskScores t{task, length, static_cast<int64_t>(which.size()), {}};
    std::map<std::string, std::vector<double>> means;
    double text_sum = 0, words = 0, bytes = 0;
    std::vector<double> lasts;
    for (const size_t i : which) {
      for (const auto& [name, value] : done[i]->values) {
        if (name != "log_likelihood") means[name].push_back(value);
      }
      if (requests[i].kind == RequestKind::kLikelihood) lasts.push_back(done[i]->values.at("log_likelihood"));
      if (requests[i].kind != RequestKind::kRolling) continue;
      text_sum += done[i]->values.at("log_likelihood");
      words += static_cast<double>(requests[i].words);
      bytes += static_cast<double>(requests[i].bytes);
    }
    if (!lasts.empty()) t.metrics.push_back({"perplexity", std::exp(-mean_of("", lasts).value), -1});
    if (words > 0) {
      t.metrics.push_back({"word_perplexity", std::exp(-text_sum / words), -1});
      t.metrics.push_back({"byte_perplexity", std::exp(-text_sum / bytes), -1});
      t.metrics.push_back({"bits_per_byte", -text_sum / bytes / std::numbers::ln2, -1});
    }
    for (const auto& [name, values] : means) t.metrics.push_back(mean_of(name, values));
    return t;
  }
};

Scoring::Scoring(LanguageModel<float>& model, const Tokenizer& tokenizer, const ScoringOptions& options,
                 const std::vector<Request>& requests)
    : impl_(std::make_unique<Impl>(model, tokenizer, options, requests)) {}
Scoring::~Scoring() = default;

int64_t Scoring::truncated() const {
  return std::ranges::count_if(impl_->prepared, [](const std::optional<Prepared>& p) { return p && p->truncated; });
}
int64_t Scoring::apart() const {
  return std::ranges::count_if(impl_->prepared, [](const std::optional<Prepared>& p) { return p && p->apart; });
}
const std::vector<std::string>& Scoring::skipped() const { return impl_->skipped; }
int64_t Scoring::contexts_read() const { return impl_->likelihood.contexts_read(); }

void Scoring::run(const std::function<void(const Request&, const RequestScore&)>& on_score) {
  impl_->done.assign(impl_->requests.size(), std::nullopt);
  for (size_t i = 0; i < impl_->requests.size(); ++i) {
    if (!impl_->prepared[i]) continue;
    stop_point("scoring", static_cast<int64_t>(i), static_cast<int64_t>(impl_->requests.size()), "requests");
    impl_->done[i] = impl_->score(impl_->requests[i], *impl_->prepared[i]);
    if (on_score) on_score(impl_->requests[i], *impl_->done[i]);
  }
}

std::vector<TaskScores> Scoring::scores() const {
  std::vector<std::pair<std::string, int64_t>> order;
  std::map<std::pair<std::string, int64_t>, std::vector<size_t>> groups;
  for (size_t i = 0; i < impl_->done.size(); ++i) {
    if (!impl_->done[i]) continue;
    const Request& r = impl_->requests[i];
    const std::pair<std::string, int64_t> key{r.task, r.truncation == Truncation::kRefuse ? r.max_length : 0};
    if (groups[key].empty()) order.push_back(key);
    groups[key].push_back(i);
  }
  std::vector<TaskScores> result;
  result.reserve(order.size());
  for (const auto& key : order) result.push_back(impl_->summary(key.first, key.second, groups.at(key)));
  return result;
}

nlohmann::json to_json(const Request& r, const RequestScore& s) {
  nlohmann::json line{{"task", r.task}, {"id", r.id}, {"metrics", s.values}};
  if (r.max_length > 0) line["length"] = r.max_length;
  if (!s.log_likelihoods.empty())
    line.update({{"log_likelihoods", s.log_likelihoods}, {"chosen", s.chosen}, {"gold", r.gold}});
  if (r.kind == RequestKind::kGenerate) line.update({{"output", s.output}, {"answers", r.answers}});
  return line;
}

}  // namespace fw
