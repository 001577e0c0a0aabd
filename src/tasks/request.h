// Requests: what a language model is asked in an evaluation, one JSON object a line. A file of them is made once, from
// a data set's raw files (raw_requests.h) or by drawing (needle.h); scoring (scoring.h) tokenizes and scores, and knows
// nothing of data sets.
//
//     {"task":"piqa","id":"7","type":"mc","ctx":"Question: ...\nAnswer:","choices":["a","b"],"gold":1}
//     {"task":"winogrande","id":"3","type":"mc_ctx","ctxs":["...","..."],"cont":"was too small.","gold":0}
//     {"task":"lambada","id":"0","type":"ll","ctx":"...","cont":" word"}
//     {"task":"wikitext","id":"0","type":"rolling","text":"...","n_words":1234,"n_bytes":6789}
//     {"task":"fda","id":"5","type":"gen","prompt_ctx":"<document>","prompt_q":" Key:","answers":["..."],"max_gen":48,
//      "until":["\n"],"metric":"contains","max_ctx":2000,"trunc":"answer_window"}
//     {"task":"niah_single_2","id":"0","type":"gen","prompt":"...","answers":["1234567"],"max_gen":128,"until":[],
//      "metric":"substr_all","max_len":4096}
//
// Choices, and the continuation of mc_ctx, are joined to their context by one space; "cont" of ll has it already.
#pragma once

#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

namespace fw {

enum class RequestKind { kChoices, kContexts, kLikelihood, kRolling, kGenerate };
enum class Truncation { kRefuse, kLeft, kAnswerWindow };  // kRefuse: "prompt", which is whole or nothing
enum class AnswerMetric { kContains, kSubstrAll };

struct Request {
  std::string task, id;
  std::string where;  // FILE:LINE
  RequestKind kind = RequestKind::kLikelihood;
  // kChoices, kLikelihood: one; kContexts: one a choice; kGenerate: prompt, or document
  std::vector<std::string> contexts;
  std::vector<std::string> choices;  // kChoices: the continuations; kContexts, kLikelihood: the one continuation
  int64_t gold = 0;                  // kChoices, kContexts: index of the right one
  std::string text;                  // kRolling
  int64_t words = 0, bytes = 0;      // of the raw text
  std::string question;              // kGenerate with a document: what follows it, never cut
  std::vector<std::string> answers, until;
  int64_t max_gen = 0;
  // kGenerate: most tokens of prompt and output together ("max_len", "max_ctx"); 0: the model's
  int64_t max_length = 0;
  Truncation truncation = Truncation::kRefuse;
  AnswerMetric metric = AnswerMetric::kContains;
};

nlohmann::json to_json(const Request& request);
// Throws Error(kUsage) "FILE:LINE: ..." for an object that is no request: a key that is missing or of the wrong type,
// an unknown type or word, a gold that is no choice, an empty continuation.
Request request_from_json(const nlohmann::json& json, const std::string& where);

struct RequestFile {
  std::vector<Request> requests;
  std::vector<std::string> skipped;  // why, of each line that was left out
};
// The requests of a file, plain or packed (train/byte_source.h). A line that is none is an Error(kUsage) naming file
// and line, or with skip_bad is left out and named in `skipped`. Throws Error(kUsage) when nothing is left. Empty lines
// are passed over. task: only requests of this name; "": all.
RequestFile read_requests(const std::string& path, const std::string& task, bool skip_bad);

}  // namespace fw
