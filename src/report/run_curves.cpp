// Several runs in one picture.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <optional>

#include "base/error.h"
#include "base/nearest.h"
#include "report/curves.h"
#include "report/plot.h"
#include "report/progress.h"

namespace fw {
namespace {

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

std::vector<PlotPoint> line_of_points(const std::vector<MetricPoint>& points, Number over, Number value) {
  std::vector<PlotPoint> line;
  for (const MetricPoint& point : points) {
    const std::optional<double> x = over(point), y = value(point);
    if (x && y && std::isfinite(*x) && std::isfinite(*y)) line.push_back({*x, *y, *y, *y});
  }
  return line;
}

// The runs of a curve: those of a group together.
std::vector<std::vector<const RunCurve*>> groups_of_runs(const std::vector<RunCurve>& runs) {
  std::vector<std::vector<const RunCurve*>> groups;
  for (const RunCurve& run : runs) {
    const auto found = std::find_if(groups.begin(), groups.end(), [&](const std::vector<const RunCurve*>& group) {
      return !run.group.empty() && group.front()->group == run.group;
    });
    found == groups.end() ? groups.push_back({&run}) : found->push_back(&run);
  }
  return groups;
}

// What the labels of a group begin with, without what counts its seeds.
std::string name_of_group(const std::vector<const RunCurve*>& group) {
  std::string name = group.front()->label;
  bool differ = false;
  for (const RunCurve* run : group) {
    const size_t same = static_cast<size_t>(
        std::mismatch(name.begin(), name.end(), run->label.begin(), run->label.end()).first - name.begin());
    differ = differ || same < name.size() || run->label.size() > same;
    name.resize(same);
  }
  if (differ) {
    const auto strip = [&](std::string_view end) {
      if (name.ends_with(end)) name.resize(name.size() - end.size());
    };
    name.erase(name.find_last_not_of("-_. ") + 1);
    strip("seed");
    strip("-s");
    name.erase(name.find_last_not_of("-_. ") + 1);
  }
  return name.empty() ? group.front()->label : name;
}

bool has_points(const RunCurve& run, const OverOfName& axis, const ValueOfName& what) {
  return !line_of_points(run.points, axis.number, what.first).empty();
}

bool is_loss(CurveValue value) {
  return value == CurveValue::kLoss || value == CurveValue::kTrainingLoss || value == CurveValue::kHeldOutLoss ||
         value == CurveValue::kBitsPerByte;
}

}  // namespace

CurveValue parse_curve_value(const std::string& name) { return parse<CurveValue>(kValues, "--value", name); }
const char* name_of(CurveValue value) { return kValues[static_cast<size_t>(value)].name; }
CurveOver parse_curve_over(const std::string& name) { return parse<CurveOver>(kOvers, "--over", name); }

std::string run_curves_script(const std::vector<RunCurve>& runs, CurveValue value, CurveOver over,
                              const std::string& title, const CurveLook& look) {
  const ValueOfName& what = kValues[static_cast<size_t>(value)];
  const OverOfName& axis = kOvers[static_cast<size_t>(over)];
  Plot plot;
  plot.title = title;
  plot.x_label = axis.axis;
  plot.y_label = what.axis;
  if (what.second != nullptr) plot.y_label += ", dashed: held out";
  plot.log_x = look.log_x;
  plot.log_y = look.log_y;
  plot.crop = look.crop && is_loss(value);
  const std::vector<std::vector<const RunCurve*>> groups = groups_of_runs(runs);
  // Of several curves of one rule a colour says which run it is.
  const bool by_rule = groups.size() == 1 || std::any_of(runs.begin(), runs.end(), [&](const RunCurve& run) {
                         return !run.rule.empty() && !runs.front().rule.empty() && run.rule != runs.front().rule;
                       });
  std::map<std::string, size_t> of_rule;
  for (size_t i = 0; i < groups.size(); ++i) {
    const RunCurve& first = *groups[i].front();
    const LineLook line_look =
        by_rule && !first.rule.empty() ? look_of(first.rule, of_rule[first.rule]++) : LineLook{color_of(i), 1};
    const auto add = [&](Number number, int dash, bool markers, const std::string& label, bool shows_label) {
      if (number == nullptr) return;
      std::vector<std::vector<PlotPoint>> lines;
      for (const RunCurve* run : groups[i]) {
        std::vector<PlotPoint> line = line_of_points(run->points, axis.number, number);
        if (!line.empty()) lines.push_back(std::move(line));
      }
      if (lines.empty()) return;
      plot.lines.push_back(
          {label, line_look.color, dash, markers, lines.size() == 1 ? lines.front() : mean_of(lines), shows_label});
    };
    const std::string name = name_of_group(groups[i]),
                      seeds = groups[i].size() > 1 ? fmt::format(" ({} seeds)", groups[i].size()) : "";
    add(what.first, line_look.dash, what.seldom, name + seeds, true);
    add(what.second, 2, true, name + seeds + ", held out", what.first == nullptr || !has_points(first, axis, what));
  }
  if (value == CurveValue::kAccuracy) limit_bands(plot, 0, 100);
  return plot_script(plot);
}

namespace {

// Seconds of a run's steps, by its speed between records.
double seconds_of(const std::vector<MetricPoint>& points) {
  double seconds = 0, before = 0;
  for (const MetricPoint& p : points) {
    if (p.tokens && p.tokens_per_second > 0) seconds += (*p.tokens - before) / p.tokens_per_second;
    before = p.tokens.value_or(before);
  }
  return seconds;
}

double median_speed(const std::vector<MetricPoint>& points) {
  std::vector<double> speeds;
  for (const MetricPoint& p : points) {
    if (p.tokens_per_second > 0) speeds.push_back(p.tokens_per_second);
  }
  if (speeds.empty()) return 0;
  std::sort(speeds.begin(), speeds.end());
  return speeds[speeds.size() / 2];
}

// Names of facts that runs differ in, in the order in which they come.
std::vector<std::string> differing_facts(const std::vector<RunCurve>& runs) {
  std::vector<std::string> names;
  for (const RunCurve& run : runs) {
    for (const auto& [name, value] : run.facts) {
      if (std::find(names.begin(), names.end(), name) == names.end()) names.push_back(name);
    }
  }
  std::erase_if(names, [&](const std::string& name) {
    return std::all_of(runs.begin(), runs.end(),
                       [&](const RunCurve& run) { return fact_of(run, name) == fact_of(runs.front(), name); });
  });
  return names;
}

}  // namespace

std::string fact_of(const RunCurve& run, const std::string& name) {
  const auto found =
      std::find_if(run.facts.begin(), run.facts.end(), [&](const auto& fact) { return fact.first == name; });
  return found == run.facts.end() ? "-" : found->second;
}

Table run_table(const std::vector<RunCurve>& runs) {
  Table table;
  table.column("run", Table::Align::kLeft);
  const std::vector<std::string> facts = differing_facts(runs);
  for (const std::string& name : facts) table.column(name, Table::Align::kLeft);
  const bool has_times =
      std::any_of(runs.begin(), runs.end(), [](const RunCurve& run) { return median_speed(run.points) > 0; });
  for (const char* heading : {"steps", "tokens", "last loss", "best held-out loss", "bits per byte", "at step"})
    table.column(heading);
  if (has_times) {
    table.column("tok/s");
    table.column("time");
  }
  std::vector<std::optional<double>> losses, bits, speeds;
  for (const RunCurve& curve : runs) {
    const MetricPoint* best = nullptr;
    for (const MetricPoint& point : curve.points) {
      if (point.eval_loss && (best == nullptr || *point.eval_loss < *best->eval_loss)) best = &point;
    }
    const auto number = [](std::optional<double> x, int digits) {
      return x && std::isfinite(*x) ? fmt::format("{:.{}f}", *x, digits) : "-";
    };
    std::vector<std::string> row{curve.label};
    for (const std::string& name : facts) row.push_back(fact_of(curve, name));
    const MetricPoint* last = curve.points.empty() ? nullptr : &curve.points.back();
    row.push_back(last == nullptr ? "0" : fmt::format("{}", last->step));
    row.push_back(last == nullptr ? "-" : number(last->tokens, 0));
    row.push_back(last == nullptr ? "-" : number(last->loss, 4));
    losses.push_back(best == nullptr ? std::nullopt : best->eval_loss);
    bits.push_back(best == nullptr ? std::nullopt : best->eval_bits_per_byte);
    row.push_back(number(losses.back(), 4));
    row.push_back(number(bits.back(), 4));
    row.push_back(best == nullptr ? "-" : fmt::format("{}", best->step));
    const double speed = median_speed(curve.points);
    speeds.push_back(speed > 0 ? std::optional(speed) : std::nullopt);
    if (has_times) {
      row.push_back(number(speeds.back(), 0));
      row.push_back(speed > 0 ? format_duration(seconds_of(curve.points)) : "-");
    }
    table.row(row);
  }
  const size_t first = 1 + facts.size();
  table.mark_best(first + 3, losses, Table::Best::kLowest);
  table.mark_best(first + 4, bits, Table::Best::kLowest);
  if (has_times) table.mark_best(first + 6, speeds, Table::Best::kHighest);
  return table;
}

PictureResult write_run_curves(const std::vector<RunCurve>& runs, CurveValue value, CurveOver over,
                               const std::string& title, const std::string& base, const CurveLook& look) {
  if (run_curves_script(runs, value, over, title, look).empty()) {
    fail_usage("no run has logged '{}' over '{}' yet: nothing to draw", kValues[static_cast<size_t>(value)].name,
               kOvers[static_cast<size_t>(over)].name);
  }
  return draw_picture("picture of the runs", base, 1080, 540,
                      [&] { return run_curves_script(runs, value, over, title, look); });
}

}  // namespace fw
