// Several runs in one picture.
#include <fmt/format.h>

#include <cmath>
#include <optional>

#include "base/error.h"
#include "base/nearest.h"
#include "report/curves.h"

namespace fw {
namespace {

// Distinct in print and to most colour-blind readers (Okabe and Ito 2008); more runs than colours begin again with
// another width.
constexpr const char* kColours[] = {"#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000"};

using Number = std::optional<double> (*)(const MetricPoint&);

struct ValueOfName {
  const char* name;
  const char* axis;
  Number first;
  Number second;  // null, or the dashed curve
  bool seldom;    // whether the first is measured at some records only: then the points show where
};

std::optional<double> training(const MetricPoint& p) { return p.loss; }
std::optional<double> held_out(const MetricPoint& p) { return p.eval_loss; }

// In the order of CurveValue.
constexpr ValueOfName kValues[] = {
    {"loss", "loss (nats per token)", training, held_out, false},
    {"training", "training loss (nats per token)", training, nullptr, false},
    {"held-out", "held-out loss (nats per token)", held_out, nullptr, true},
    {"bits-per-byte", "held out (bits per byte)", [](const MetricPoint& p) { return p.eval_bits_per_byte; }, nullptr,
     true},
    {"norm", "norm of the gradient", [](const MetricPoint& p) { return p.norm; }, nullptr, false},
    {"lr", "learning rate", [](const MetricPoint& p) { return p.lr; }, nullptr, false},
    {"speed", "tokens per second", [](const MetricPoint& p) { return std::optional(p.tokens_per_second); }, nullptr,
     false},
    {"accuracy", "accuracy (per cent)", [](const MetricPoint& p) { return p.accuracy; }, nullptr, false},
};

struct OverOfName {
  const char* name;
  const char* axis;
  Number number;
};

// In the order of CurveOver.
constexpr OverOfName kOvers[] = {
    {"step", "step", [](const MetricPoint& p) { return std::optional(static_cast<double>(p.step)); }},
    {"tokens", "tokens", [](const MetricPoint& p) { return p.tokens; }},
    {"epoch", "epochs (passes over the data)", [](const MetricPoint& p) { return p.epoch; }},
};

template <class Kind, class Entry, size_t kCount>
Kind parse(const Entry (&entries)[kCount], const char* what, const std::string& name) {
  std::vector<std::string> names;
  for (size_t i = 0; i < kCount; ++i) {
    if (name == entries[i].name) return static_cast<Kind>(i);
    names.emplace_back(entries[i].name);
  }
  const std::string near = nearest(name, names);
  fail_usage("{}: expected one of {}, got '{}'{}", what, fmt::join(names, ", "), name,
             near.empty() ? "" : fmt::format("; did you mean '{}'?", near));
}

std::string data(const std::vector<MetricPoint>& points, Number over, Number value) {
  std::string lines;
  for (const MetricPoint& point : points) {
    const std::optional<double> x = over(point), y = value(point);
    if (x && y && std::isfinite(*x) && std::isfinite(*y)) lines += fmt::format("{} {}\n", *x, *y);
  }
  return lines;
}

}  // namespace

CurveValue parse_curve_value(const std::string& name) { return parse<CurveValue>(kValues, "--value", name); }
CurveOver parse_curve_over(const std::string& name) { return parse<CurveOver>(kOvers, "--over", name); }

std::string run_curves_script(const std::vector<RunCurve>& runs, CurveValue value, CurveOver over,
                              const std::string& title) {
  const ValueOfName& what = kValues[static_cast<size_t>(value)];
  const OverOfName& axis = kOvers[static_cast<size_t>(over)];
  std::string blocks, plots;
  for (size_t i = 0; i < runs.size(); ++i) {
    const char* colour = kColours[i % std::size(kColours)];
    const double width = i < std::size(kColours) ? 1.5 : 3;
    const auto add = [&](const std::string& name, Number number, const char* style, const std::string& label) {
      const std::string lines = number == nullptr ? "" : data(runs[i].points, axis.number, number);
      if (lines.empty()) return;
      blocks += fmt::format("${} << END_OF_DATA\n{}END_OF_DATA\n", name, lines);
      plots += fmt::format("{}${} with {} linewidth {} linecolor rgb '{}' title {} noenhanced",
                           plots.empty() ? "" : ", ", name, style, width, colour, gnuplot_quote(label));
    };
    add(fmt::format("run{}", i), what.first, what.seldom ? "linespoints pointtype 7 pointsize 0.6" : "lines",
        runs[i].label);
    add(fmt::format("run{}held", i), what.second, "linespoints dashtype 2 pointtype 7 pointsize 0.6",
        runs[i].label + ", held out");
  }
  if (plots.empty()) return {};
  return fmt::format(
      "set title {} noenhanced\nset xlabel '{}'\nset ylabel '{}'\n"
      "set grid back linecolor rgb '#dddddd'\nset border 3 linecolor rgb '#555555'\nset tics nomirror\nset key outside "
      "right top\nset xrange [0:*]\n"
      "{}plot {}\n",
      gnuplot_quote(title), axis.axis, what.axis, blocks, plots);
}

Table run_table(const std::vector<RunCurve>& runs) {
  Table table;
  table.column("run", Table::Align::kLeft);
  for (const char* heading : {"steps", "tokens", "last loss", "best held-out loss", "bits per byte", "at step"})
    table.column(heading);
  for (const RunCurve& curve : runs) {
    const MetricPoint* best = nullptr;
    for (const MetricPoint& point : curve.points) {
      if (point.eval_loss && (best == nullptr || *point.eval_loss < *best->eval_loss)) best = &point;
    }
    const auto number = [](std::optional<double> x, int digits) {
      return x && std::isfinite(*x) ? fmt::format("{:.{}f}", *x, digits) : "-";
    };
    std::vector<std::string> row{curve.label, "0", "-", "-", "-", "-", "-"};
    if (!curve.points.empty()) {
      const MetricPoint& last = curve.points.back();
      row[1] = fmt::format("{}", last.step);
      row[2] = number(last.tokens, 0);
      row[3] = number(last.loss, 4);
    }
    if (best != nullptr) {
      row[4] = number(best->eval_loss, 4);
      row[5] = number(best->eval_bits_per_byte, 4);
      row[6] = fmt::format("{}", best->step);
    }
    table.row(row);
  }
  return table;
}

PictureResult write_run_curves(const std::vector<RunCurve>& runs, CurveValue value, CurveOver over,
                               const std::string& title, const std::string& base) {
  if (run_curves_script(runs, value, over, title).empty()) {
    fail_usage("no run has logged '{}' over '{}' yet: nothing to draw", kValues[static_cast<size_t>(value)].name,
               kOvers[static_cast<size_t>(over)].name);
  }
  return draw_picture("picture of the runs", base, 1080, 540,
                      [&] { return run_curves_script(runs, value, over, title); });
}

}  // namespace fw
