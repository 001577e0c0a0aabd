// analyze: what the heads of a model do on a text: gates, eigenvalues, reads and states, as JSON, CSV and pictures.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "analyze/figures.h"
#include "analyze/run.h"
#include "analyze/tables.h"
#include "base/error.h"
#include "base/file.h"
#include "base/memory.h"
#include "cli/command.h"
#include "cli/dataset.h"
#include "cli/json_output.h"
#include "cli/model_option.h"
#include "cli/outputs.h"
#include "cli/say.h"
#include "cli/signals.h"

namespace fw::cli {
namespace {

class Analyze : public Command {
 public:
  std::string name() const override { return "analyze"; }
  std::string summary() const override { return "gates, eigenvalues, reads and states of every head on a text, as JSON, CSV and pictures"; }
  std::string details() const override {
    return "The recurrence of every head is replayed in double from what the model gave it. Into the folder --out go analysis.json (all numbers), analysis.csv "
           "(one number a row) and a picture for each quantity with a panel for each layer and head, as PNG and SVG. docs/analyze.md defines the "
           "quantities.\n\n"
           "Example:\n  fastweight analyze my-run --text held-out.txt --tokens 8192 --out my-analysis";
  }
  void declare(Options& options) override {
    options.positional("MODEL", &model_, "model folder, or run folder (its finished model, else its newest checkpoint)", true);
    options.add("text", "FILE", &text_,
                "text (plain or .jsonl, also .gz and .zst), a pattern, a token file, or - for standard input; several times for several texts");
    options.add("field", "KEY", &field_, "of .jsonl files: the key whose string is the text");
    options.add("tokens", "N", &analyze_.tokens, "tokens to look at, from the beginning; 0: all");
    options.add("context", "LEN", &analyze_.context, "tokens of a window, which starts from nothing; 0: whole documents");
    options.add("layers", "N,N,...", &analyze_.layers, "only these layers, counted from 0", ',');
    options.add("every", "N", &analyze_.every, "tokens between two looks at the state's norm and rank");
    options.add("bins", "N", &bins_, "bins of a histogram, at most");
    options.add("separator", "LINE", &separator_, "a line that separates documents");
    options.add("out", "DIR", &out_, "folder for the results; files of the same names are replaced");
    options.add("pictures", "", &pictures_, "draw the pictures, with gnuplot");
    declare_threads(options, threads_);
    declare_memory_check(options, check_memory_);
  }
  int run(Options& options) override;

 private:
  void refuse_picture(const std::string& text) const;

  std::string model_, field_ = "text", separator_, out_ = "analysis";
  StringList text_;
  AnalyzeOptions analyze_;
  int64_t bins_ = 64, threads_ = 0;
  bool pictures_ = true, check_memory_ = true;
};

// A text that lies in the folder of the results under a name that a picture can have.
void Analyze::refuse_picture(const std::string& text) const {
  const std::filesystem::path path(text), parent = path.has_parent_path() ? path.parent_path() : ".";
  if (!pictures_ || (path.extension() != ".svg" && path.extension() != ".png") || !same_file(parent.string(), out_)) return;
  fail_usage("--out: a picture of the results could replace '{}', which is read: choose another folder than '{}'", text, out_);
}

// A difference beyond rounding would mean that the analysis and the model compute different rules.
void print_replay_error(const Analysis& analysis) {
  constexpr double kRounding = 1e-2;
  double worst = 0;
  for (const LayerAnalysis& layer : analysis.layers) {
    const double error = layer.replay_error();
    if (!(error <= kRounding))
      say("warning: layer {}: the replay differs from the model's own output by {:.1e} of it: do not trust its numbers\n", layer.layer, error);
    if (!(error <= worst)) worst = error;  // also one that is not a number
  }
  say("replay against the model's own output: relative difference at most {:.1e}\n", worst);
}

int Analyze::run(Options&) {
  stop_on_signal();
  apply_threads(threads_);
  allow_too_much_memory(!check_memory_);
  if (text_.empty()) fail_usage("no text: give a file with --text");
  if (bins_ < 2 || bins_ > Distribution::kBins) fail_usage("--bins: expected 2 to {}, got {}", Distribution::kBins, bins_);
  if (out_.empty()) fail_usage("--out: expected a folder, got nothing");
  // Before the work, so that a folder that cannot be made costs nothing.
  make_folders(out_);
  const std::string json = out_ + "/analysis.json", csv = out_ + "/analysis.csv";
  check_output("--out", json, text_);
  check_output("--out", csv, text_);
  for (const std::string& text : text_) refuse_picture(text);
  OpenModel open = open_model(model_, "f32");
  const TemporaryTokens tokens(text_, field_, separator_, *open.tokenizer);
  if (!tokens.note().empty()) say_aside("note: {}\n", tokens.note());
  const Analysis analysis = analyze_text(open.model, tokens.file(), analyze_);

  nlohmann::ordered_json report = analysis_json(analysis, bins_);
  report["model"] = open.folder;
  report["text"] = text_;
  write_file_atomic(json, json_text(report, -1));
  write_file_atomic(csv, analysis_csv(analysis, bins_));
  const PictureResult pictures = pictures_ ? write_figures(analysis_figures(analysis, bins_), out_) : PictureResult{};

  say("{}: {} tokens in {} windows, {:.4f} nats per token\n\n{}\n", analysis.rule, analysis.tokens, analysis.windows, analysis.loss,
      analysis_table(analysis).text());
  print_replay_error(analysis);
  if (!pictures.note.empty()) say("note: {}\n", pictures.note);
  say("files:\n  {}\n  {}\n", json, csv);
  for (const std::string& file : pictures.files) say("  {}\n", file);
  if (analysis.tokens > analysis.windows && !std::isfinite(analysis.loss))
    fail_numeric("the loss of '{}' is not finite: what is shown is of a model that diverged", open.folder);
  return kExitOk;
}

}  // namespace

std::unique_ptr<Command> analyze_command() { return std::make_unique<Analyze>(); }

}  // namespace fw::cli
