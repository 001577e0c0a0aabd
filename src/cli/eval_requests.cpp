#include "cli/eval_requests.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <nlohmann/json.hpp>

#include "base/error.h"
#include "base/file.h"
#include "base/folders.h"
#include "base/stop.h"
#include "cli/command.h"
#include "cli/json_output.h"
#include "cli/outputs.h"
#include "cli/say.h"
#include "report/progress.h"
#include "report/table.h"
#include "tasks/raw_requests.h"
#include "tasks/scoring.h"

namespace fw::cli {
namespace {

RequestFile read(const RequestsToScore& what) {
  return what.raw.empty() ? read_requests(what.requests, what.task, what.skip_bad)
                          : requests_from_raw(what.task, what.raw, {}, what.skip_bad);
}

Json report_of(const Scoring& scoring, const RequestFile& file) {
  Json results = Json::array();
  for (const TaskScores& task : scoring.scores()) {
    Json metrics = Json::array();
    for (const TaskScores::Metric& m : task.metrics) {
      metrics.push_back(
          {{"name", m.name}, {"value", m.value}, {"standard_error", m.error < 0 ? Json() : Json(m.error)}});
    }
    results.push_back(
        {{"task", task.task}, {"length", task.length}, {"requests", task.requests}, {"metrics", std::move(metrics)}});
  }
  return {{"truncated", scoring.truncated()},
          {"encoded_apart", scoring.apart()},
          {"left_out", file.skipped.size() + scoring.skipped().size()},
          {"results", std::move(results)}};
}

}  // namespace

Table score_table(const nlohmann::json& report) {
  Table table;
  table.column("task", Table::Align::kLeft);
  table.column("length");
  table.column("metric", Table::Align::kLeft);
  for (const char* heading : {"value", "standard error", "requests"}) table.column(heading);
  for (const nlohmann::json& task : report.at("results")) {
    const auto length = task.at("length").get<int64_t>();
    for (const nlohmann::json& m : task.at("metrics")) {
      const auto number = [&](const char* key) {
        return m.at(key).is_null() ? std::string("-") : fmt::format("{:.4f}", m.at(key).get<double>());
      };
      table.row({task.at("task").get<std::string>(), length > 0 ? fmt::format("{}", length) : "",
                 m.at("name").get<std::string>(), number("value"), number("standard_error"),
                 fmt::format("{}", task.at("requests").get<int64_t>())});
    }
  }
  return table;
}

void declare_requests(Options& options, RequestsToScore& what) {
  options.section("", kTasksHeading);
  options.add("requests", "FILE", &what.requests, "requests of 'fastweight requests' to score, instead of a text");
  options.add("raw", "FILE", &what.raw, "a data set's own file (see 'fastweight requests --help'), with --task");
  options.add("task", "NAME", &what.task, "of --requests: this task alone; of --raw: what the file is");
  options.add("skip_bad", "", &what.skip_bad, "leave out lines that are not as they should be, instead of stopping");
  options.add(
      "max_length", "N", &what.max_length,
      "tokens that the model is given at once, of what is longer the last; windows of whole texts; 0: no limit");
  options.add("prefix_token", "ID", &what.prefix,
              "token before a text that begins with nothing; -1: the end of text, else a newline");
  options.add("out", "FOLDER", &what.out, "writes eval.json and, for every request, a line of samples.jsonl");
}

void check_requests(const RequestsToScore& what, const Options& options) {
  if (what.requests.empty() == what.raw.empty()) fail_usage("--requests and --raw: give one of them");
  if (!what.raw.empty() && what.task.empty()) fail_usage("--raw: say with --task which data set '{}' is", what.raw);
  if (what.prefix < -1 || what.prefix > std::numeric_limits<int32_t>::max())
    fail_usage("--prefix-token: expected a token id, or -1, got {}", what.prefix);
  if (what.out.empty()) return;
  for (const char* name : {"/eval.json", "/samples.jsonl"}) {
    if (file_exists(what.out)) check_output(options, "--out", what.out + name);
  }
}

int score_requests(OpenModel& open, const RequestsToScore& what, bool json) {
  const RequestFile file = read(what);
  for (const std::string& line : file.skipped) say_aside("left out: {}\n", line);
  const ScoringOptions options{.max_length = what.max_length,
                               .prefix = static_cast<int32_t>(what.prefix),
                               .end_tokens = open.end_tokens,
                               .skip_bad = what.skip_bad};
  Scoring scoring(open.model, *open.tokenizer, options, file.requests);
  for (const std::string& request : scoring.skipped()) say_aside("left out: {}\n", request);
  ProgressBar bar(2);
  const auto total = static_cast<int64_t>(file.requests.size() - scoring.skipped().size());
  int64_t done = 0;
  bool finite = true;
  std::string samples;
  const auto take = [&](const Request& request, const RequestScore& score) {
    for (const auto& [name, value] : score.values) finite = finite && std::isfinite(value);
    finite = finite && std::ranges::all_of(score.log_likelihoods, [](double x) { return std::isfinite(x); });
    if (!what.out.empty()) samples += json_text(to_json(request, score), -1);
    ++done;
    if (bar.live()) bar.draw(fmt::format("{} of {} requests", done, total));
  };
  const auto write_samples = [&] {
    make_folders(what.out);
    write_file_atomic(what.out + "/samples.jsonl", samples);
  };
  try {
    scoring.run(take);
  } catch (const Stopped& stopped) {
    bar.clear();
    if (what.out.empty() || done == 0) throw;
    write_samples();
    throw Stopped(fmt::format("{}; the {} of {} requests that are done are in '{}/samples.jsonl'", stopped.what(), done,
                              total, what.out));
  }
  bar.clear();
  Json report = json_report("eval");
  report.update({{"model", open.folder},
                 {"requests", what.raw.empty() ? what.requests : what.raw},
                 {"precision", what.precision},
                 {"max_length", what.max_length}});
  report.update(report_of(scoring, file));
  if (!what.out.empty()) {
    write_samples();
    write_file_atomic(what.out + "/eval.json", json_text(report, 1));
  }
  if (json) {
    print_json_report(report);
  } else {
    say("{}", score_table(report).text());
    if (scoring.truncated() > 0)
      say("{} of {} requests are longer than the model is given: the left of their contexts was cut\n",
          scoring.truncated(), total);
    if (scoring.apart() > 0) {
      say("{} of {} requests have a continuation whose first token begins in the context: the tokens of the "
          "continuation alone were scored\n",
          scoring.apart(), total);
    }
    if (const size_t left_out = file.skipped.size() + scoring.skipped().size(); left_out > 0)
      say("{} requests were left out\n", left_out);
  }
  if (!finite)
    fail_numeric("a score of '{}' is not finite: its parameters are damaged, or it diverged in training", open.folder);
  return kExitOk;
}

}  // namespace fw::cli
