// Curves of runs as SVG and PNG, drawn by gnuplot: the loss of one, and any measured value of several in one picture.
#pragma once

#include <string>
#include <vector>

#include "report/gnuplot.h"
#include "report/metrics.h"
#include "report/table.h"

namespace fw {

// Draws training loss in nats per token over steps, and the held-out loss where it was measured, into base + ".svg" and
// base + ".png". No picture is a note, not an error.
PictureResult write_loss_curve(const std::vector<MetricPoint>& points, const std::string& title,
                               const std::string& base);

// What gnuplot is given; for tests.
std::string loss_curve_script(const std::vector<MetricPoint>& points, const std::string& title);

// A run in a picture of several.
struct RunCurve {
  std::string label;
  std::vector<MetricPoint> points;
  std::string rule = {};  // its colour is the same in every picture; "": not known
  // Runs of a group are one curve, mean ± standard deviation; "": a run alone.
  std::string group = {};
  std::vector<std::pair<std::string, std::string>> facts = {};  // its settings by name; columns where runs differ
};
std::string fact_of(const RunCurve& run, const std::string& name);  // "-": it has none

struct CurveLook {
  bool log_x = false, log_y = false;
  bool crop = true;  // losses: the y axis leaves out what only the first tenth has
};

// What is drawn of every run. The axes' labels say it in words.
// kLoss: training and held out
enum class CurveValue { kLoss, kTrainingLoss, kHeldOutLoss, kBitsPerByte, kNorm, kLearningRate, kSpeed, kAccuracy };
enum class CurveOver { kStep, kTokens, kEpoch };

// Names on the command line: loss, training, held-out, bits-per-byte, norm, lr, speed, accuracy; step, tokens, epoch.
// Error(kUsage) for others.
CurveValue parse_curve_value(const std::string& name);
CurveOver parse_curve_over(const std::string& name);
const char* name_of(CurveValue value);

// A row for each run: what it differs in, steps, tokens, the last loss, the best held-out loss and where it was, median
// speed and time of the steps. The best values are marked.
Table run_table(const std::vector<RunCurve>& runs);
// One colour a rule; several curves of one rule alone have colours of their own. A label stands at the end of each.
// With kLoss the held-out curve of a run is dashed. Runs without such a value are left out. Error(kUsage) when none has
// any.
PictureResult write_run_curves(const std::vector<RunCurve>& runs, CurveValue value, CurveOver over,
                               const std::string& title, const std::string& base, const CurveLook& look = {});
std::string run_curves_script(const std::vector<RunCurve>& runs, CurveValue value, CurveOver over,
                              const std::string& title, const CurveLook& look = {});

}  // namespace fw
