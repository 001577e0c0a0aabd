#include "tasks/request.h"

#include <nlohmann/json.hpp>

#include "base/error.h"
#include "base/nearest.h"
#include "base/python_json.h"
#include "tasks/json_fields.h"

namespace fw {
namespace {

using nlohmann::json;

constexpr int64_t kMost = int64_t{1} << 40;

template <class Kind>
struct Word {
  const char* word;
  Kind kind;
};
constexpr Word<RequestKind> kKinds[] = {{"mc", RequestKind::kChoices},
                                        {"mc_ctx", RequestKind::kContexts},
                                        {"ll", RequestKind::kLikelihood},
                                        {"rolling", RequestKind::kRolling},
                                        {"gen", RequestKind::kGenerate}};
constexpr Word<AnswerMetric> kMetrics[] = {{"contains", AnswerMetric::kContains},
                                           {"substr_all", AnswerMetric::kSubstrAll}};
constexpr Word<Truncation> kTruncations[] = {{"left", Truncation::kLeft}, {"answer_window", Truncation::kAnswerWindow}};

template <class Kind, size_t kCount>
Kind parse(const Word<Kind> (&words)[kCount], const JsonFields& fields, const char* key) {
  const std::string word = fields.text(key);
  std::vector<std::string> names;
  for (const auto& known : words) {
    if (word == known.word) return known.kind;
    names.emplace_back(known.word);
  }
  const std::string near = nearest(word, names);
  fields.fail(fmt::format("{}: expected one of {}, got '{}'{}", key, fmt::join(names, ", "), word,
                          near.empty() ? "" : fmt::format("; did you mean '{}'?", near)));
}

template <class Kind, size_t kCount>
const char* word_of(const Word<Kind> (&words)[kCount], Kind kind) {
  for (const auto& known : words) {
    if (known.kind == kind) return known.word;
  }
  fail_internal("a request's word has no name");
}

void check_texts(const JsonFields& fields, const char* key, const std::vector<std::string>& texts, size_t least) {
  if (texts.size() < least) fields.fail(fmt::format("{}: expected at least {}, got {}", key, least, texts.size()));
  for (const std::string& text : texts) {
    if (text.empty()) fields.fail(fmt::format("{}: expected texts, got an empty one", key));
  }
}

void read_generation(const JsonFields& fields, Request& r) {
  r.answers = fields.texts("answers");
  check_texts(fields, "answers", r.answers, 1);
  r.max_gen = fields.whole("max_gen", 1, 1 << 24);
  if (fields.has("until")) r.until = fields.texts("until");
  check_texts(fields, "until", r.until, 0);
  r.metric = parse(kMetrics, fields, "metric");
  if (fields.has("prompt")) {
    r.contexts = {fields.text("prompt")};
    r.truncation = Truncation::kRefuse;
    if (fields.has("max_len")) r.max_length = fields.whole("max_len", 1, kMost);
    return;
  }
  r.contexts = {fields.text("prompt_ctx")};
  r.question = fields.text("prompt_q");
  r.truncation = parse(kTruncations, fields, "trunc");
  r.max_length = fields.whole("max_ctx", 1, kMost);
}

}  // namespace

json to_json(const Request& r) {
  json line{{"task", r.task}, {"id", r.id}, {"type", word_of(kKinds, r.kind)}};
  switch (r.kind) {
    case RequestKind::kChoices:
      line.update({{"ctx", r.contexts.front()}, {"choices", r.choices}, {"gold", r.gold}});
      break;
    case RequestKind::kContexts:
      line.update({{"ctxs", r.contexts}, {"cont", r.choices.front()}, {"gold", r.gold}});
      break;
    case RequestKind::kLikelihood:
      line.update({{"ctx", r.contexts.front()}, {"cont", r.choices.front()}});
      break;
    case RequestKind::kRolling:
      line.update({{"text", r.text}, {"n_words", r.words}, {"n_bytes", r.bytes}});
      break;
    case RequestKind::kGenerate:
      line.update({{"answers", r.answers},
                   {"max_gen", r.max_gen},
                   {"until", r.until},
                   {"metric", word_of(kMetrics, r.metric)}});
      if (r.truncation == Truncation::kRefuse) {
        line["prompt"] = r.contexts.front();
        if (r.max_length > 0) line["max_len"] = r.max_length;
      } else {
        line.update({{"prompt_ctx", r.contexts.front()},
                     {"prompt_q", r.question},
                     {"max_ctx", r.max_length},
                     {"trunc", word_of(kTruncations, r.truncation)}});
      }
      break;
  }
  return line;
}

Request request_from_json(const json& line, const std::string& where) {
  const JsonFields fields(line, where);
  Request r;
  r.where = where;
  r.task = fields.text("task");
  if (r.task.empty()) fields.fail("task: expected a name, got an empty one");
  r.id = fields.text_or_number("id");
  r.kind = parse(kKinds, fields, "type");
  switch (r.kind) {
    case RequestKind::kChoices:
      r.contexts = {fields.text("ctx")};
      r.choices = fields.texts("choices");
      check_texts(fields, "choices", r.choices, 2);
      r.gold = fields.whole("gold", 0, static_cast<int64_t>(r.choices.size()) - 1);
      break;
    case RequestKind::kContexts:
      r.contexts = fields.texts("ctxs");
      if (r.contexts.size() < 2) fields.fail(fmt::format("ctxs: expected at least 2, got {}", r.contexts.size()));
      r.choices = {fields.text("cont")};
      check_texts(fields, "cont", r.choices, 1);
      r.gold = fields.whole("gold", 0, static_cast<int64_t>(r.contexts.size()) - 1);
      break;
    case RequestKind::kLikelihood:
      r.contexts = {fields.text("ctx")};
      r.choices = {fields.text("cont")};
      check_texts(fields, "cont", r.choices, 1);
      break;
    case RequestKind::kRolling:
      r.text = fields.text("text");
      check_texts(fields, "text", {r.text}, 1);
      r.words = fields.whole("n_words", 1, kMost);
      r.bytes = fields.whole("n_bytes", 1, kMost);
      break;
    case RequestKind::kGenerate:
      read_generation(fields, r);
      break;
  }
  return r;
}

RequestFile read_requests(const std::string& path, const std::string& task, bool skip_bad) {
  RequestFile file;
  std::vector<std::string> others;
  for_each_line(path, [&](std::string_view line, const std::string& where) {
    try {
      Request request = request_from_json(parse_python_json(line, where), where);
      if (task.empty() || request.task == task) {
        file.requests.push_back(std::move(request));
      } else if (std::find(others.begin(), others.end(), request.task) == others.end()) {
        others.push_back(request.task);
      }
    } catch (const Error& error) {
      if (!skip_bad) throw Error(ErrorKind::kUsage, fmt::format("{}; --skip-bad leaves such lines out", error.what()));
      file.skipped.emplace_back(error.what());
    }
  });
  if (!file.requests.empty()) return file;
  if (!others.empty())
    fail_usage("'{}': it has no request of the task '{}'; its tasks are {}", path, task, fmt::join(others, ", "));
  fail_usage("'{}': expected requests, one JSON object a line, got none{}", path,
             file.skipped.empty() ? ""
                                  : fmt::format(" among {} lines that are not; the first: {}", file.skipped.size(),
                                                file.skipped.front()));
}

}  // namespace fw
