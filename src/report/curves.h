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
};

// What is drawn of every run. The axes' labels say it in words.
// kLoss: training and held out
enum class CurveValue { kLoss, kTrainingLoss, kHeldOutLoss, kBitsPerByte, kNorm, kLearningRate, kSpeed, kAccuracy };
enum class CurveOver { kStep, kTokens, kEpoch };

// Names on the command line: loss, training, held-out, bits-per-byte, norm, lr, speed, accuracy; step, tokens, epoch.
// Error(kUsage) for others.
CurveValue parse_curve_value(const std::string& name);
CurveOver parse_curve_over(const std::string& name);

// One colour a run, its label in the key, a label on each axis; with kLoss the held-out curve of a run is dashed. Runs
// without such a value are left out; Error(kUsage) when none has any.
// A row for each run: steps, tokens, the last loss, the best held-out loss and where it was.
Table run_table(const std::vector<RunCurve>& runs);
PictureResult write_run_curves(const std::vector<RunCurve>& runs, CurveValue value, CurveOver over,
                               const std::string& title, const std::string& base);
std::string run_curves_script(const std::vector<RunCurve>& runs, CurveValue value, CurveOver over,
                              const std::string& title);

}  // namespace fw
