#include "analyze/comparison.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <functional>
#include <limits>
#include <optional>
#include <utility>

namespace fw {
namespace {

constexpr size_t kColumns = 4;  // panels of a row, at most
constexpr double kLow = 0.05, kHigh = 0.95;

// The heads of a layer together.
Distribution pooled(const LayerAnalysis& layer, const QuantityInfo& q) {
  Distribution all(q.scale(layer.rule));
  for (const Distribution& head : layer.of(q.id)) all.add(head);
  return all;
}

// Layers of a run whose bins have this scale together; nothing where there is no such layer.
std::optional<Distribution> pooled(const Analysis& run, const QuantityInfo& q, Distribution::Scale scale) {
  std::optional<Distribution> all;
  for (const LayerAnalysis& layer : run.layers) {
    if (!q.applies(layer.rule) || q.scale(layer.rule) != scale) continue;
    if (!all) all.emplace(scale);
    all->add(pooled(layer, q));
  }
  return all;
}

double mean_overlap(const LayerAnalysis& layer) {
  double sum = 0;
  for (const HeadAnalysis& head : layer.value_heads) sum += head.overlap.overlap;
  return sum / static_cast<double>(layer.value_heads.size());
}

FigureCurve line(FigureCurve::Kind kind, const char* color) { return {kind, color, {}, {}, {}}; }

void add_point(FigureCurve& curve, int64_t x, double y) {
  if (!std::isfinite(y)) return;
  curve.x.push_back(static_cast<double>(x));
  curve.y.push_back(y);
}

// Mean and quantiles of every layer that has the quantity.
void add_depth(FigurePanel& panel, const Analysis& run, const QuantityInfo& q, Distribution::Scale scale,
               const char* color) {
  FigureCurve mean = line(FigureCurve::Kind::kLine, color), low = line(FigureCurve::Kind::kDashed, color), high = low;
  for (const LayerAnalysis& layer : run.layers) {
    if (!q.applies(layer.rule) || q.scale(layer.rule) != scale) continue;
    const Distribution d = pooled(layer, q);
    add_point(mean, layer.layer, d.mean());
    add_point(low, layer.layer, d.quantile(kLow));
    add_point(high, layer.layer, d.quantile(kHigh));
  }
  for (FigureCurve* curve : {&low, &high, &mean}) panel.curves.push_back(std::move(*curve));
}

bool is_digit(char c) { return c >= '0' && c <= '9'; }

// The steps of checkpoints of one training, "step-200", "step-400" ...: names that differ in their last number alone.
// Else empty. In rising order, each with its run.
using Steps = std::vector<std::pair<int64_t, const NamedAnalysis*>>;
Steps steps_of(const std::vector<NamedAnalysis>& runs) {
  Steps steps;
  std::string stem;
  for (const NamedAnalysis& run : runs) {
    const size_t digits =
        run.name.size() - (std::ranges::find_if_not(run.name.rbegin(), run.name.rend(), is_digit) - run.name.rbegin());
    const std::string before = run.name.substr(0, digits), number = run.name.substr(digits);
    if (number.empty() || number.size() > 15 || (!steps.empty() && before != stem)) return {};
    stem = before;
    steps.emplace_back(std::stoll(number), &run);
  }
  std::ranges::sort(steps);  // a shell lists step-1000 before step-200
  return steps.size() > 1 ? steps : Steps();
}

class Figures {
 public:
  Figures(const std::vector<NamedAnalysis>& runs, int64_t bins) : runs_(runs), bins_(bins), steps_(steps_of(runs)) {}

  void quantity(const QuantityInfo& q, bool logarithmic, const std::string& suffix) {
    const Distribution::Scale scale = logarithmic ? Distribution::Scale::kLog10 : Distribution::Scale::kLinear;
    Figure spread =
        figure(fmt::format("{}{}", q.name, suffix),
               fmt::format("{}: {}; all heads and layers of a run", q.name, q.formula), q.name, "share of values");
    Figure depth =
        figure(fmt::format("{}{}_depth", q.name, suffix),
               fmt::format("{}: {}; over the layers: mean, 5% and 95% (dashed)", q.name, q.formula), "layer", q.name);
    spread.logarithmic = logarithmic;
    for (const NamedAnalysis& run : runs_) {
      const std::optional<Distribution> d = pooled(run.analysis, q, scale);
      if (!d || d->count() == 0) continue;
      spread.panels.push_back(
          {fmt::format("{}   mean {:.3g}", run.name, d->mean()), {bins_of(*d, bins_, kFigureBlue)}});
      FigurePanel panel{run.name, {}};
      add_depth(panel, run.analysis, q, scale, kFigureBlue);
      color_by_rule(spread.panels.back(), run.analysis.rule);
      color_by_rule(panel, run.analysis.rule);
      depth.panels.push_back(std::move(panel));
    }
    add(std::move(spread));
    add(std::move(depth));
    training(q, scale, suffix);
  }

  // Over the steps of a training whose checkpoints the runs are.
  void training(const QuantityInfo& q, Distribution::Scale scale, const std::string& suffix) {
    if (steps_.empty()) return;
    Figure course =
        figure(fmt::format("{}{}_training", q.name, suffix),
               fmt::format("{}: {}; over the steps of the training: mean, 5% and 95% (dashed) of all heads and layers",
                           q.name, q.formula),
               "step", q.name);
    FigureCurve mean = line(FigureCurve::Kind::kLine, kFigureBlue), low = line(FigureCurve::Kind::kDashed, kFigureBlue),
                high = low;
    for (const auto& [step, run] : steps_) {
      const std::optional<Distribution> d = pooled(run->analysis, q, scale);
      if (!d || d->count() == 0) continue;
      add_point(mean, step, d->mean());
      add_point(low, step, d->quantile(kLow));
      add_point(high, step, d->quantile(kHigh));
    }
    if (mean.x.empty()) return;
    course.panels.push_back({"", {std::move(low), std::move(high), std::move(mean)}});
    color_by_rule(course.panels.back(), runs_.front().analysis.rule);
    add(std::move(course));
  }

  void cosines() {
    const QuantityInfo &key = info(Quantity::kCosKeyRead), &query = info(Quantity::kCosQueryRead);
    const char* title = "cosine of v with the key's read S^T k (blue) and with the query's read o (red)";
    Figure spread =
        figure("cos_reads", fmt::format("{}; all heads and layers of a run", title), "cosine", "share of values");
    Figure depth = figure("cos_reads_depth", fmt::format("{}; over the layers: mean, 5% and 95% (dashed)", title),
                          "layer", "cosine");
    for (const NamedAnalysis& run : runs_) {
      const std::optional<Distribution> of_key = pooled(run.analysis, key, Distribution::Scale::kLinear),
                                        of_query = pooled(run.analysis, query, Distribution::Scale::kLinear);
      if (!of_key || !of_query || of_key->count() == 0 || of_query->count() == 0) continue;
      // Bins of the same width, so that the heights compare.
      const double width = std::max(of_key->histogram(bins_).width, of_query->histogram(bins_).width);
      spread.panels.push_back(
          {fmt::format("{}   {:.2f}, {:.2f}", run.name, of_key->mean(), of_query->mean()),
           {bins_of(*of_key, bins_, kFigureBlue, width), bins_of(*of_query, bins_, kFigureRed, width)}});
      FigurePanel panel{run.name, {}};
      add_depth(panel, run.analysis, key, Distribution::Scale::kLinear, kFigureBlue);
      add_depth(panel, run.analysis, query, Distribution::Scale::kLinear, kFigureRed);
      depth.panels.push_back(std::move(panel));
    }
    add(std::move(spread));
    add(std::move(depth));
    training(key, Distribution::Scale::kLinear, "");
    training(query, Distribution::Scale::kLinear, "");
  }

  void overlaps() {
    Figure depth =
        figure("subspace_overlap_depth",
               "overlap of the principal components of key reads and query reads; over the layers: mean over heads",
               "layer", "overlap");
    for (const NamedAnalysis& run : runs_) {
      FigureCurve mean = line(FigureCurve::Kind::kLine, kFigureBlue);
      for (const LayerAnalysis& layer : run.analysis.layers) add_point(mean, layer.layer, mean_overlap(layer));
      if (mean.x.empty()) continue;
      depth.panels.push_back({run.name, {std::move(mean)}});
      color_by_rule(depth.panels.back(), run.analysis.rule);
    }
    add(std::move(depth));
  }

  std::vector<Figure> take() { return std::move(figures_); }

 private:
  static Figure figure(const std::string& name, const std::string& title, std::string_view x, std::string_view y) {
    Figure figure;
    figure.name = name;
    figure.title = title;
    figure.x_label = x;
    figure.y_label = y;
    figure.whole_x = x == "layer";
    return figure;
  }
  void add(Figure figure) {
    if (figure.panels.empty()) return;
    figure.columns = std::min(figure.panels.size(), kColumns);
    figures_.push_back(std::move(figure));
  }

  const std::vector<NamedAnalysis>& runs_;
  int64_t bins_;
  Steps steps_;
  std::vector<Figure> figures_;
};

// A name in a row of CSV.
std::string csv_text(const std::string& text) {
  if (text.find_first_of(",\"\n\r") == std::string::npos) return text;
  std::string quoted = "\"";
  for (const char c : text) quoted += c == '"' ? std::string("\"\"") : std::string(1, c);
  return quoted + "\"";
}

// Of a distribution in a table.
std::string cell(const Distribution& d) {
  return d.count() == 0 ? "-" : fmt::format("{:.3g} ({:.3g} to {:.3g})", d.mean(), d.quantile(kLow), d.quantile(kHigh));
}

// Whether any layer of the runs has it with bins of this scale.
bool any_has(const std::vector<NamedAnalysis>& runs, const QuantityInfo& q, Distribution::Scale scale) {
  return std::ranges::any_of(runs,
                             [&](const NamedAnalysis& run) { return pooled(run.analysis, q, scale).has_value(); });
}

}  // namespace

std::vector<Figure> comparison_figures(const std::vector<NamedAnalysis>& runs, int64_t bins) {
  Figures figures(runs, bins);
  for (const QuantityInfo& q : quantities()) {
    if (q.id == Quantity::kCosKeyRead || q.id == Quantity::kCosQueryRead) continue;  // drawn together
    const bool linear = any_has(runs, q, Distribution::Scale::kLinear);
    if (linear) figures.quantity(q, false, "");
    if (any_has(runs, q, Distribution::Scale::kLog10)) figures.quantity(q, true, linear ? "_log" : "");
  }
  figures.cosines();
  figures.overlaps();
  return figures.take();
}

Table comparison_table(const std::vector<NamedAnalysis>& runs) {
  Table table;
  table.column("", Table::Align::kLeft);
  for (const NamedAnalysis& run : runs) table.column(run.name);
  const auto row = [&](std::string_view name, const std::function<std::string(const Analysis&)>& of) {
    std::vector<std::string> cells{std::string(name)};
    for (const NamedAnalysis& run : runs) cells.push_back(of(run.analysis));
    table.row(std::move(cells));
  };
  row("rule", [](const Analysis& run) { return run.rule; });
  row("tokens", [](const Analysis& run) { return fmt::format("{}", run.tokens); });
  row("nats per token",
      [](const Analysis& run) { return std::isfinite(run.loss) ? fmt::format("{:.4f}", run.loss) : "-"; });
  for (const QuantityInfo& q : quantities()) {
    if (!any_has(runs, q, Distribution::Scale::kLinear) && !any_has(runs, q, Distribution::Scale::kLog10)) continue;
    row(q.name, [&](const Analysis& run) {
      // Layers of raw and of normalised keys, if a run has both, have two distributions.
      std::string text;
      for (const auto scale : {Distribution::Scale::kLinear, Distribution::Scale::kLog10}) {
        if (const std::optional<Distribution> d = pooled(run, q, scale)) text += (text.empty() ? "" : ", ") + cell(*d);
      }
      return text.empty() ? "-" : text;
    });
  }
  row("subspace_overlap", [](const Analysis& run) {
    double sum = 0;
    for (const LayerAnalysis& layer : run.layers) sum += mean_overlap(layer);
    const double mean = sum / static_cast<double>(run.layers.size());
    return std::isfinite(mean) ? fmt::format("{:.3g}", mean) : "-";
  });
  return table;
}

std::string comparison_csv(const std::vector<NamedAnalysis>& runs) {
  std::string csv = "run,layer,quantity,statistic,value\n";
  for (const NamedAnalysis& run : runs) {
    const auto row = [&](const std::string& layer, std::string_view quantity, std::string_view statistic,
                         double value) {
      if (std::isfinite(value))
        csv += fmt::format("{},{},{},{},{}\n", csv_text(run.name), layer, quantity, statistic, value);
    };
    const auto rows = [&](const std::string& layer, const QuantityInfo& q, const Distribution& d) {
      row(layer, q.name, "count", static_cast<double>(d.count()));
      row(layer, q.name, "mean", d.mean());
      row(layer, q.name, "std", d.deviation());
      for (const auto& [name, p] : std::array<std::pair<const char*, double>, 5>{
               {{"q05", kLow}, {"q25", 0.25}, {"q50", 0.5}, {"q75", 0.75}, {"q95", kHigh}}}) {
        row(layer, q.name, name, d.quantile(p));
      }
    };
    for (const QuantityInfo& q : quantities()) {
      for (const LayerAnalysis& layer : run.analysis.layers) {
        if (q.applies(layer.rule)) rows(fmt::format("{}", layer.layer), q, pooled(layer, q));
      }
      const std::optional<Distribution> linear = pooled(run.analysis, q, Distribution::Scale::kLinear),
                                        logarithmic = pooled(run.analysis, q, Distribution::Scale::kLog10);
      if (linear) rows("all", q, *linear);
      if (logarithmic) rows(linear ? "all_log" : "all", q, *logarithmic);
    }
    for (const LayerAnalysis& layer : run.analysis.layers)
      row(fmt::format("{}", layer.layer), "subspace_overlap", "mean", mean_overlap(layer));
  }
  return csv;
}

}  // namespace fw
