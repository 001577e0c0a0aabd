// requests: files of what 'fastweight eval --requests' scores: needle tasks, drawn, and data sets, from their
// publishers' files.
#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "base/error.h"
#include "base/file.h"
#include "base/stop.h"
#include "cli/command.h"
#include "cli/effects.h"
#include "cli/json_output.h"
#include "cli/model_option.h"
#include "cli/outputs.h"
#include "cli/run_config.h"
#include "cli/say.h"
#include "cli/signals.h"
#include "tasks/json_fields.h"
#include "tasks/needle.h"
#include "tasks/raw_requests.h"

namespace fw::cli {
namespace {

constexpr const char *kNeedles = "Needle tasks", *kDataSets = "Data sets";

class Requests : public Command {
 public:
  std::string name() const override { return "requests"; }
  std::string summary() const override {
    return "needle tasks, and data sets in their raw formats, as requests for eval";
  }
  std::string details() const override {
    return fmt::format(
        "Writes JSON lines, one request each (docs/tasks.md has the format), which 'fastweight eval --requests' "
        "scores.\n\n"
        "Needle tasks ({}) are drawn: --examples of them at each of --lengths, sized by the tokenizer of --model or by "
        "--tokenizer. All but niah_single_1 hide "
        "the needle in a text: --haystack.\n\n"
        "Data sets are read from their publishers' files, --raw: {}. docs/tasks.md names the fields that each must "
        "have.\n\n"
        "Examples:\n  fastweight requests niah_single_2 --model my-run --haystack essays.txt --lengths 1024,2048 --out "
        "niah.jsonl\n"
        "  fastweight requests piqa --raw piqa_validation.jsonl --out piqa.jsonl",
        fmt::join(needle_tasks(), ", "), fmt::join(raw_tasks(), ", "));
  }
  void declare(Options& options) override {
    options.positional("TASK", &task_, "name of the task", true);
    options.add("out", "FILE", &out_, "file of the requests");
    options.section("", kNeedles);
    options.add("model", "MODEL", &model_, "model or run folder, whose tokenizer sizes the texts");
    options.add("tokenizer", "SPEC", &tokenizer_,
                "bytes, or the path of a SentencePiece model or a tokenizer.json, instead of a model's");
    options.add(
        "haystack", "FILE", &haystack_,
        "text to hide needles in, plain, .gz or .zst; used from its beginning, and again where it is too short");
    options.add("lengths", "N,N,...", &lengths_, "most tokens of prompt and output together", ',');
    options.add("examples", "N", &examples_, "examples of each length");
    options.add("seed", "N", &seed_, "seed of the examples");
    options.section("", kDataSets);
    options.add("raw", "FILE", &raw_, "the data set's file, plain, .gz or .zst");
    options.add("skip_bad", "", &skip_bad_, "leave out lines that are not as they should be, instead of stopping");
    options.add("max_context", "N", &recall_.max_context,
                "of swde, fda, squad, nq, triviaqa, drop: tokens of prompt and output");
    options.add("trunc", "KIND", &trunc_, "of these: what is kept of a document that is longer").words = {
        "answer_window", "left"};
    options.add("as_stored", "", &recall_.as_stored, "of swde and fda: the text as it stands in the file");
  }
  int run(Options& options) override;

 private:
  std::vector<Request> draw(const Options& options) const;

  std::string task_, out_, model_, tokenizer_, haystack_, raw_, trunc_ = "answer_window";
  IntList lengths_{1024, 2048, 4096};
  int64_t examples_ = 500;
  uint64_t seed_ = 42;
  bool skip_bad_ = false;
  RecallOptions recall_;
};

std::vector<Request> Requests::draw(const Options& options) const {
  if (!needs_essay(task_))
    options.expect_without_effect({"--haystack"},
                                  fmt::format("for '{}', which hides its needles in lines of its own", task_));
  if (examples_ < 1) fail_usage("--examples: expected at least 1, got {}", examples_);
  if (lengths_.empty()) fail_usage("--lengths: expected at least one, got none");
  if (model_.empty() == tokenizer_.empty())
    fail_usage("the texts are sized by a tokenizer: give either --model MODEL or --tokenizer SPEC");
  const std::unique_ptr<Tokenizer> tokenizer =
      model_.empty() ? make_tokenizer(tokenizer_) : std::move(open_model(model_, "f32").tokenizer);
  if (needs_essay(task_) && haystack_.empty())
    fail_usage("'{}' hides its needles in a text: give one with --haystack", task_);
  const Essay essay = needs_essay(task_) ? Essay(read_text(haystack_), haystack_) : Essay();
  std::vector<NeedleTask> tasks;
  tasks.reserve(lengths_.size());
  for (const int64_t length : lengths_) {
    tasks.emplace_back(task_, length, *tokenizer, essay);
    tasks.back().example(seed_, 0);  // a length that is too short is known before any work
  }
  std::vector<Request> requests;
  requests.reserve(tasks.size() * static_cast<size_t>(examples_));
  for (const NeedleTask& task : tasks) {
    for (int64_t i = 0; i < examples_; ++i) {
      stop_point("drawing", static_cast<int64_t>(requests.size()), static_cast<int64_t>(tasks.size()) * examples_,
                 "requests");
      requests.push_back(task.example(seed_, static_cast<uint64_t>(i)));
    }
  }
  return requests;
}

int Requests::run(Options& options) {
  stop_on_signal();
  if (out_.empty()) fail_usage("--out: expected a file for the requests, got none");
  check_output(options, "--out", out_);
  const std::vector<std::string> needles = needle_tasks();
  const bool drawn = std::ranges::find(needles, task_) != needles.end();
  options.expect_only(StringList{"--out"} + flags_under(options, drawn ? kNeedles : kDataSets),
                      fmt::format("for '{}', which is {}", task_, drawn ? "drawn" : "read from its file, --raw"));
  RequestFile file;
  if (drawn) {
    file.requests = draw(options);
  } else {
    if (trunc_ != "left" && trunc_ != "answer_window")
      fail_usage("--trunc: expected answer_window or left, got '{}'", trunc_);
    if (recall_.max_context < 1) fail_usage("--max-context: expected at least 1, got {}", recall_.max_context);
    recall_.truncation = trunc_ == "left" ? Truncation::kLeft : Truncation::kAnswerWindow;
    const std::vector<std::string> known = raw_tasks(), recalls = recall_tasks();
    if (std::ranges::find(recalls, task_) == recalls.end()) {
      options.expect_without_effect({"--max-context", "--trunc", "--as-stored"},
                                    fmt::format("for '{}', which is none of {}", task_, fmt::join(recalls, ", ")));
    }
    if (recall_.as_stored)
      options.expect_without_effect({"--trunc"}, "with --as-stored: a document is cut at its left");
    if (task_ == "squad")
      options.expect_without_effect({"--trunc"}, "for 'squad', whose documents are always cut at their left");
    if (task_ != "swde" && task_ != "fda")
      options.expect_without_effect({"--as-stored"}, fmt::format("for '{}', which is neither swde nor fda", task_));
    if (raw_.empty() && std::ranges::find(known, task_) != known.end())
      fail_usage("--raw: expected the file of {}, got none", task_);
    file = requests_from_raw(task_, raw_, recall_, skip_bad_);
  }
  for (const std::string& line : file.skipped) say_aside("left out: {}\n", line);
  write_file_atomic(out_, [&](const FileSink& sink) {
    for (const Request& request : file.requests) {
      const std::string line = json_text(to_json(request), -1);
      sink(std::as_bytes(std::span(line)));
    }
  });
  say("{}: {} requests{}\n", out_, file.requests.size(),
      file.skipped.empty() ? "" : fmt::format(", {} lines left out", file.skipped.size()));
  return kExitOk;
}

}  // namespace

std::unique_ptr<Command> requests_command() { return std::make_unique<Requests>(); }

}  // namespace fw::cli
