// Scores of requests (request.h) under a model, zero-shot, as lm-evaluation-harness computes them:
//
//   mc, mc_ctx   the choice with the greatest log-likelihood (acc); mc also divided by the choice's length in code points (acc_norm)
//   ll           log-likelihood of the continuation; acc: each of its tokens is the likeliest
//   rolling      log-likelihood of a whole text, by raw words and bytes
//   gen          greedy output until a stop text, the end of text or max_gen tokens; whether it has an answer (contains), the share of the answers that
//                it has (substr_all), both without regard to case
//
// Tokens of a continuation c after a context x are those of x + c from the number of tokens of x on; white space at
// the end of x belongs to c. Where one token spans the join, so that none is left for c, those of c alone are scored.
// An empty context is the prefix token, or the first token of c where it is that. What is too long for max_length loses
// its left.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "model/language_model.h"
#include "tasks/request.h"
#include "tokenizer/tokenizer.h"

namespace fw {

struct ScoringOptions {
  // tokens that the model is given at once; 0: no limit. A request's own max_len or max_ctx goes before it
  int64_t max_length = 2048;
  // token before a text that begins with nothing; < 0: the end of text, else a newline, else 0
  int32_t prefix = -1;
  std::vector<int32_t> end_tokens = {};  // of an output
  bool skip_bad = false;                 // requests that cannot be scored are left out, instead of being an error
};

struct RequestScore {
  // By the names of the metrics. Of log-likelihoods and texts "log_likelihood", of which perplexities are made.
  std::map<std::string, double> values;
  std::vector<double> log_likelihoods;  // mc, mc_ctx: of the choices
  int64_t chosen = -1;                  // mc, mc_ctx
  std::string output;                   // gen
};

struct TaskScores {
  std::string task;
  int64_t length = 0;  // of needle tasks, which have one ("max_len")
  int64_t requests = 0;
  struct Metric {
    std::string name;
    double value = 0;
    double error = -1;  // standard error of the mean (n - 1); < 0: none
  };
  std::vector<Metric> metrics;
};

// Tokens of all requests, made before anything is scored, so that what cannot be scored is known first.
class Scoring {
 public:
  // Model, tokenizer and requests must outlive it. Throws Error(kUsage) naming the request for:
  // - a continuation or an output that is longer than max_length,
  // - a question that leaves no room for its document,
  // - a prompt of its own length (needles) that this tokenizer makes longer.
  //
  // With skip_bad only where no request is left. Throws Stopped (base/stop.h).
  Scoring(LanguageModel<float>& model, const Tokenizer& tokenizer, const ScoringOptions& options,
          const std::vector<Request>& requests);
  ~Scoring();
  Scoring(const Scoring&) = delete;
  Scoring& operator=(const Scoring&) = delete;

  int64_t truncated() const;                        // requests that lose something of their context
  int64_t apart() const;                            // requests with a continuation that was encoded alone
  const std::vector<std::string>& skipped() const;  // why, of each request that was left out
  // In order; on_score sees each as it is done. Throws Stopped (base/stop.h).
  void run(const std::function<void(const Request&, const RequestScore&)>& on_score);
  // A line for each task (and length) in the order in which they come.
  std::vector<TaskScores> scores() const;
  int64_t contexts_read() const;  // how often a context was read: once for all choices that share it

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

// A line of the log of examples.
nlohmann::json to_json(const Request& request, const RequestScore& score);

}  // namespace fw
