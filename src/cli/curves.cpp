// curves: what several runs measured, in one picture and one table.
#include "report/curves.h"

#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <map>

#include "base/error.h"
#include "cli/command.h"
#include "cli/outputs.h"
#include "cli/run_facts.h"
#include "cli/say.h"
#include "report/metrics.h"

namespace fw::cli {
namespace {

namespace fs = std::filesystem;

class Curves : public Command {
 public:
  std::string name() const override { return "curves"; }
  std::string summary() const override { return "several runs in one picture"; }
  std::string details() const override {
    return "Draws OUT.svg and OUT.png from the runs' metrics.jsonl, whether the runs are finished, going on or "
           "stopped, and prints a table of them.\n\n"
           "A rule has one colour in all pictures. Runs that differ in their seed alone are one curve: the mean, with "
           "a band of one standard deviation.\n\n"
           "VALUE: loss (training, and held out dashed), training, held-out, bits-per-byte, norm, lr or speed.\n\n"
           "Example:\n  fastweight curves run-a run-b run-c --label \"lr 1e-3\" --label \"lr 2e-3\" --label \"lr "
           "4e-3\" --value held-out --out lr";
  }
  void declare(Options& options) override {
    options.positional("RUN", &runs_, "run folders, or files as metrics.jsonl", true);
    options.add("out", "OUT", &out_, "name of the pictures, without .svg and .png");
    options.add(
        "label", "TEXT", &labels_,
        "what the picture calls a run; once for each, in their order; runs of one label are a curve, the mean with "
        "a band of one standard deviation; without: the folder's name");
    options.add("value", "VALUE", &value_, "what is drawn").words = {"loss", "training", "held-out", "bits-per-byte",
                                                                     "norm", "lr",       "speed"};
    options.add("over", "AXIS", &over_, "step, tokens or epoch").words = {"step", "tokens", "epoch"};
    options.add("log", "AXES", &log_, "axes that are logarithmic").words = {"x", "y", "xy"};
    options.add("crop", "", &crop_, "the axis of a loss leaves out what only the first tenth of a run has");
    options.add("title", "TEXT", &title_, "above the picture");
  }
  int run(Options& options) override;

 private:
  StringList runs_, labels_;
  std::string out_ = "curves", value_ = "loss", over_ = "step", log_, title_;
  bool crop_ = true;
};

// Folders' own names; whole paths where two have the same.
StringList names_of(const StringList& runs) {
  StringList names;
  std::map<std::string, int> count;
  for (const std::string& run : runs) {
    fs::path path = fs::path(run).lexically_normal();
    if (!path.has_filename()) path = path.parent_path();  // a slash at the end
    names.push_back(path.filename() == "metrics.jsonl" && path.has_parent_path()
                        ? path.parent_path().filename().string()
                        : path.filename().string());
    ++count[names.back()];
  }
  for (size_t i = 0; i < names.size(); ++i) {
    if (count[names[i]] > 1 || names[i].empty() || names[i] == ".") names[i] = runs[i];
  }
  return names;
}

std::vector<MetricPoint> read_run(const std::string& run) {
  std::error_code error;
  const std::string path = fs::is_directory(run, error) ? (fs::path(run) / "metrics.jsonl").string() : run;
  if (!fs::exists(path, error))
    fail_usage("RUN: expected a run folder or its metrics.jsonl, but there is no '{}'", path);
  return read_metrics(path);
}

int Curves::run(Options& options) {
  const CurveValue value = parse_curve_value(value_);
  const CurveOver over = parse_curve_over(over_);
  if (out_.empty()) fail_usage("--out: expected the name of a picture, got nothing");
  for (const char* ending : {".svg", ".png"}) check_output(options, "--out", out_ + ending);
  if (!labels_.empty() && labels_.size() != runs_.size())
    fail_usage("--label: expected one for each of the {} runs, or none, got {}", runs_.size(), labels_.size());
  const StringList labels = labels_.empty() ? names_of(runs_) : labels_;
  if (log_.find_first_not_of("xy") != std::string::npos) fail_usage("--log: expected x, y or xy, got '{}'", log_);
  std::vector<RunCurve> curves;
  for (size_t i = 0; i < runs_.size(); ++i) {
    curves.push_back({labels[i], read_run(runs_[i])});
    add_facts(runs_[i], curves.back());
    if (!labels_.empty()) curves.back().group = labels_[i];
  }
  const CurveLook look{log_.find('x') != std::string::npos, log_.find('y') != std::string::npos, crop_};
  const PictureResult picture = write_run_curves(curves, value, over, title_, out_, look);
  say("{}\n", run_table(curves).text());
  for (const std::string& file : picture.files) say("{}\n", file);
  if (!picture.note.empty()) fail_usage("{}", picture.note);
  return kExitOk;
}

}  // namespace

std::unique_ptr<Command> curves_command() { return std::make_unique<Curves>(); }

}  // namespace fw::cli
