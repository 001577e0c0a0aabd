// analyze: what the heads of a model do on a text: gates, eigenvalues, reads and states, as JSON, CSV and pictures.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <optional>

#include "analyze/comparison.h"
#include "analyze/figures.h"
#include "analyze/run.h"
#include "analyze/tables.h"
#include "base/error.h"
#include "base/file.h"
#include "base/folders.h"
#include "base/memory.h"
#include "cli/command.h"
#include "cli/dataset.h"
#include "cli/json_output.h"
#include "cli/model_option.h"
#include "cli/outputs.h"
#include "cli/say.h"
#include "cli/signals.h"
#include "train/evaluate.h"
#include "train/memory_plan.h"

namespace fw::cli {
namespace {

class Analyze : public Command {
 public:
  std::string name() const override { return "analyze"; }
  std::string summary() const override {
    return "gates, eigenvalues, reads and states of every head on a text, as JSON, CSV and pictures";
  }
  std::string details() const override {
    return "The recurrence of every head is replayed in double, on the CPU, from what the model gave it; with --device "
           "cuda the model itself runs on a GPU, "
           "in bf16. Into the folder --out go analysis.json (all numbers), analysis.csv (one number a row) and a "
           "picture for each quantity with a panel for "
           "each layer and head, as PNG and SVG. docs/analyze.md defines the "
           "quantities.\n\n"
           "Of several models each has a folder of its own in --out, by its name; into --out itself go comparison.md "
           "(a table), comparison.csv and pictures "
           "with a panel for each model: every quantity over all heads and layers, and over the depth.\n\n"
           "Without --text the held-out data of the run is read, of several runs that of the first.\n\n"
           "Examples:\n  fastweight analyze my-run --out my-analysis\n  fastweight analyze my-run --text held-out.txt "
           "--tokens 8192 --out my-analysis\n"
           "  fastweight analyze run-gdn run-kaczmarz run-qdelta --text held-out.txt --out comparison";
  }
  void declare(Options& options) override {
    options.positional("MODEL", &models_,
                       "model folders, or run folders (their finished model, else the newest checkpoint)", true);
    options.add("text", "FILE", &text_,
                "text (plain or .jsonl, also .gz and .zst), a pattern, a token file, or - for standard input; several "
                "times for several texts");
    options.add("field", "KEY", &field_, "of .jsonl files: the key whose string is the text");
    options.add("tokens", "N", &analyze_.tokens, "tokens to look at, from the beginning; 0: all");
    options.add("context", "LEN", &analyze_.context,
                "tokens of a window, which starts from nothing; 0: whole documents");
    options.add("layers", "N,N,...", &analyze_.layers, "only these layers, counted from 0", ',');
    options.add("every", "N", &analyze_.every, "tokens between two looks at the state's norm and rank");
    options.add("bins", "N", &bins_, "bins of a histogram, at most");
    options.add("separator", "LINE", &separator_, "a line that separates documents");
    options.add("out", "DIR", &out_, "folder for the results; files of the same names are replaced");
    options.add("pictures", "", &pictures_, "draw the pictures, with gnuplot");
    options.add("device", "DEVICE", &device_,
                std::string(device_help()) + ": of the model's passes; the replay is the CPU's");
    declare_threads(options, threads_);
    declare_memory_check(options, check_memory_);
  }
  int run(Options& options) override;

 private:
  void refuse_picture(const std::string& text, const std::string& folder) const;
  void check_outputs(const Options& options, const std::string& folder, const std::vector<std::string>& names);
  Analysis analyze_one(const std::string& model, const std::string& folder) const;
  void compare(const std::vector<NamedAnalysis>& runs) const;

  std::string field_ = "text", separator_, out_ = "analysis", device_ = "cpu";
  StringList models_, text_;
  AnalyzeOptions analyze_;
  int64_t bins_ = 64, threads_ = 0;
  bool pictures_ = true, check_memory_ = true;
  NewFolders folders_;
};

// A text that lies in the folder of the results under a name that a picture can have.
void Analyze::refuse_picture(const std::string& text, const std::string& folder) const {
  const std::filesystem::path path(text), parent = path.has_parent_path() ? path.parent_path() : ".";
  if (!pictures_ || (path.extension() != ".svg" && path.extension() != ".png") || !same_file(parent.string(), folder))
    return;
  fail_usage("--out: a picture of the results could replace '{}', which is read: choose another folder than '{}'", text,
             folder);
}

// A difference beyond rounding would mean that the analysis and the model compute different rules. On a GPU the model's
// outputs are bf16 and so are the operands of their products (docs/numerics.md has what that makes of each rule: up to
// 1.7e-2).
void print_replay_error(const Analysis& analysis, bool on_cpu) {
  const double rounding = on_cpu ? 1e-2 : 3e-2;
  double worst = 0;
  for (const LayerAnalysis& layer : analysis.layers) {
    const double error = layer.replay_error();
    if (!(error <= rounding))
      say("warning: layer {}: the replay differs from the model's own output by {:.1e} of it: do not trust its "
          "numbers\n",
          layer.layer, error);
    if (!(error <= worst)) worst = error;  // also one that is not a number
  }
  say("replay against the model's own output: relative difference at most {:.1e}\n", worst);
}

// Before the work, so that a folder that cannot be made costs nothing.
void Analyze::check_outputs(const Options& options, const std::string& folder, const std::vector<std::string>& names) {
  folders_.make(folder);
  for (const std::string& name : names) check_output(options, "--out", fmt::format("{}/{}", folder, name));
  for (const std::string& text : text_) refuse_picture(text, folder);
}

void print_pictures(const PictureResult& pictures) {
  for (const std::string& file : pictures.files) say("  {}\n", file);
}

Analysis Analyze::analyze_one(const std::string& model, const std::string& folder) const {
  std::optional<OpenModel> open = open_model(model, "f32", "", device_);
  require_memory_of_pass(
      open->model,
      analyze_.context > 0 ? std::min<int64_t>(analyze_.context, 16 * kEvaluationTokens) : kEvaluationTokens,
      "lower --context, or read fewer --layers; --no-check-memory tries all the same");
  const TemporaryTokens tokens(text_, field_, separator_, *open->tokenizer);
  if (!tokens.note().empty()) say_aside("note: {}\n", tokens.note());
  Analysis analysis = analyze_text(open->model, tokens.file(), analyze_);
  const std::string opened = open->folder;
  const bool on_cpu = open->model.device().kind() == FW_DEVICE_CPU;
  open.reset();  // gnuplot takes its memory

  const std::string json = folder + "/analysis.json", csv = folder + "/analysis.csv";
  nlohmann::ordered_json report = analysis_json(analysis, bins_);
  report["model"] = opened;
  report["text"] = text_;
  report["device"] = device_;
  write_file_atomic(json, json_text(report, -1));
  write_file_atomic(csv, analysis_csv(analysis, bins_));
  const PictureResult pictures = pictures_ ? write_figures(analysis_figures(analysis, bins_), folder) : PictureResult{};

  say("{}: {} tokens in {} windows, {:.4f} nats per token\n\n{}\n", analysis.rule, analysis.tokens, analysis.windows,
      analysis.loss, analysis_table(analysis).text());
  print_replay_error(analysis, on_cpu);
  if (!pictures.note.empty()) say("note: {}\n", pictures.note);
  say("files:\n  {}\n  {}\n", json, csv);
  print_pictures(pictures);
  if (analysis.tokens > analysis.windows && !std::isfinite(analysis.loss))
    fail_numeric("the loss of '{}' is not finite: what is shown is of a model that diverged", opened);
  return analysis;
}

void Analyze::compare(const std::vector<NamedAnalysis>& runs) const {
  const std::string table = out_ + "/comparison.md", csv = out_ + "/comparison.csv";
  write_file_atomic(
      table, fmt::format("Mean, and 5% and 95% quantiles, over all heads, layers and tokens; docs/analyze.md has the "
                         "quantities. Text: {}.\n\n{}",
                         markdown_text(fmt::format("{}", fmt::join(text_, ", "))), comparison_table(runs).markdown()));
  write_file_atomic(csv, comparison_csv(runs));
  const PictureResult pictures = pictures_ ? write_figures(comparison_figures(runs, bins_), out_) : PictureResult{};
  say("\n{}\n", comparison_table(runs).text());
  if (!pictures.note.empty()) say("note: {}\n", pictures.note);
  say("files:\n  {}\n  {}\n", table, csv);
  print_pictures(pictures);
}

// What a run is called among others: its folder's last name, that of the run where the folder is a run's model/;
// numbered where another has the name.
std::vector<std::string> names_of(const StringList& models) {
  std::vector<std::string> names;
  for (const std::string& model : models) {
    std::filesystem::path path = std::filesystem::absolute(model).lexically_normal();
    if (!path.has_filename()) path = path.parent_path();
    if (path.filename() == "model" && path.has_parent_path() && path.parent_path().has_filename())
      path = path.parent_path();
    const std::string own = path.filename().string();
    std::string name = own;
    for (int number = 2; std::ranges::find(names, name) != names.end(); ++number)
      name = fmt::format("{}-{}", own, number);
    names.push_back(name);
  }
  return names;
}

int Analyze::run(Options& options) {
  stop_on_signal();
  apply_threads(threads_);
  allow_too_much_memory(!check_memory_);
  if (text_.empty()) {
    options.expect_without_effect({"--field", "--separator"},
                                  "without --text: the held-out tokens of the run are read");
    if (const std::string held = held_out_tokens(models_.front()); !held.empty()) text_ = {held};
    if (text_.empty())
      fail_usage("no text: give a file with --text; '{}' is no run with held-out data", models_.front());
    say_aside("text: the held-out data of the run, '{}'\n", text_.front());
  }
  if (bins_ < 2 || bins_ > Distribution::kBins)
    fail_usage("--bins: expected 2 to {}, got {}", Distribution::kBins, bins_);
  if (out_.empty()) fail_usage("--out: expected a folder, got nothing");
  const std::vector<std::string> files{"analysis.json", "analysis.csv"};
  if (models_.size() == 1) {
    check_outputs(options, out_, files);
    analyze_one(models_.front(), out_);
    return kExitOk;
  }
  if (std::ranges::find(text_, "-") != text_.end())
    fail_usage("--text: standard input can be read once, for one model; give a file for {}", models_.size());
  const std::vector<std::string> names = names_of(models_);
  for (const std::string& model : models_) {
    if (!std::filesystem::is_directory(model))
      fail_usage("MODEL: expected the folder of a model or of a run, got '{}'", model);
  }
  check_outputs(options, out_, {"comparison.md", "comparison.csv"});
  for (const std::string& name : names) check_outputs(options, out_ + "/" + name, files);
  std::vector<NamedAnalysis> runs;
  for (size_t i = 0; i < models_.size(); ++i) {
    say("{}{} ({} of {})\n", i > 0 ? "\n" : "", names[i], i + 1, models_.size());
    try {
      runs.push_back({names[i], analyze_one(models_[i], out_ + "/" + names[i])});
    } catch (const Error& error) {
      if (error.kind() != ErrorKind::kNumeric) throw;
      say("left out of the comparison: {}\n", error.what());
    }
  }
  if (runs.empty()) fail_numeric("all {} models diverged", models_.size());
  compare(runs);
  return runs.size() == models_.size() ? kExitOk : kExitFailed;
}

}  // namespace

std::unique_ptr<Command> analyze_command() { return std::make_unique<Analyze>(); }

}  // namespace fw::cli
