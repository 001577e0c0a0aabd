#include "analyze/figures.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>

#include "report/plot.h"

namespace fw {
namespace {

constexpr const char* kGrey = "#888888";
constexpr int kPanelWidth = 230, kPanelHeight = 150, kHeadHeight = 40;

// At most `most` of 0 ... count - 1, evenly spaced, with both ends.
std::vector<size_t> spaced(size_t count, size_t most) {
  std::vector<size_t> list;
  const size_t n = std::min(count, most);
  for (size_t i = 0; i < n; ++i) list.push_back(n < 2 ? 0 : i * (count - 1) / (n - 1));
  return list;
}

FigureCurve line_of(const PositionSeries& series, int64_t every) {
  FigureCurve curve{FigureCurve::Kind::kLine, kFigureBlue, {}, {}, {}};
  for (size_t i = 0; i < series.sum.size(); ++i) {
    if (series.windows[i] == 0) continue;
    curve.x.push_back(static_cast<double>(static_cast<int64_t>(i + 1) * every));
    curve.y.push_back(series.mean(i));
  }
  return curve;
}

// A panel's curves, and what its title says of them.
using MakePanel = std::function<FigurePanel(const LayerAnalysis&, size_t head)>;

using Layers = std::vector<const LayerAnalysis*>;
Layers layers_where(const Analysis& analysis, const std::function<bool(const LayerAnalysis&)>& holds) {
  Layers found;
  for (const LayerAnalysis& layer : analysis.layers) {
    if (holds(layer)) found.push_back(&layer);
  }
  return found;
}

// A row for each of these layers; `heads` says how many a layer has.
Figure make_figure(const Analysis& analysis, const Layers& rows, const std::string& name, const std::string& title,
                   const std::function<int64_t(const LayerAnalysis&)>& heads_of, const MakePanel& make) {
  Figure figure;
  figure.name = name;
  size_t heads = 0;
  for (const LayerAnalysis* layer : rows) heads = std::max(heads, static_cast<size_t>(heads_of(*layer)));
  const std::vector<size_t> layers = spaced(rows.size(), kFigureLayers), columns = spaced(heads, kFigureHeads);
  figure.columns = columns.size();
  figure.title = title;
  if (layers.size() < rows.size() || columns.size() < heads) {
    figure.title +=
        fmt::format(" ({} of {} layers, {} of {} heads)", layers.size(), rows.size(), columns.size(), heads);
  }
  figure.title += fmt::format(" [{}]", analysis.rule);
  for (const size_t l : layers) {
    const LayerAnalysis& layer = *rows[l];
    for (const size_t h : columns) {
      const bool there = h < static_cast<size_t>(heads_of(layer));
      FigurePanel panel = there ? make(layer, h) : FigurePanel{};
      panel.title = fmt::format("layer {}, head {}{}", layer.layer, h, panel.title);
      figure.panels.push_back(std::move(panel));
    }
  }
  return figure;
}

int64_t value_heads(const LayerAnalysis& layer) { return layer.v_heads; }

std::string mean_text(const Distribution& d) { return d.count() > 0 ? fmt::format("   mean {:.3g}", d.mean()) : ""; }

bool has_points(const Figure& figure) {
  return std::any_of(figure.panels.begin(), figure.panels.end(), [](const FigurePanel& panel) {
    return std::any_of(panel.curves.begin(), panel.curves.end(),
                       [](const FigureCurve& curve) { return !curve.x.empty(); });
  });
}

// A step of 1, 2 or 5 times a power of ten that cuts a length into at most four.
double tick_step(double length) {
  const double power = std::pow(10.0, std::floor(std::log10(length / 4)));
  for (const double factor : {1.0, 2.0, 5.0}) {
    if (factor * power * 4 >= length) return factor * power;
  }
  return 10 * power;
}

// The range that all panels share; gnuplot widens an empty one.
struct Range {
  double low = std::numeric_limits<double>::infinity(), high = -low;
  void add(double x) {
    low = std::min(low, x);
    high = std::max(high, x);
  }
  bool empty() const { return !(low < high); }
  // axis: "x" or "y"
  std::string settings(const std::string& axis, bool logarithmic, bool whole = false) const {
    if (empty()) return "";
    const std::string range = fmt::format("set {}range [{}:{}]\n", axis, low, high);
    if (!logarithmic)
      return range + fmt::format("set {}tics {}\n", axis, std::max(tick_step(high - low), whole ? 1.0 : 0.0));
    const double decades = std::ceil(std::log10(high / low) / 4);
    return range + fmt::format("set logscale {0}\nset {0}tics 1e{1}\nset format {0} '10^{{%T}}'\n", axis,
                               std::max(decades, 1.0));
  }
};

}  // namespace

void color_by_rule(FigurePanel& panel, const std::string& rule) {
  const auto is = [](const char* color) { return [color](const FigureCurve& curve) { return curve.color == color; }; };
  if (std::any_of(panel.curves.begin(), panel.curves.end(), is(kFigureRed))) return;
  for (FigureCurve& curve : panel.curves) {
    if (is(kFigureBlue)(curve)) curve.color = color_of(rule);
  }
}

FigureCurve bins_of(const Distribution& d, int64_t bins, const char* color, double width) {
  FigureCurve curve{FigureCurve::Kind::kBins, color, {}, {}, {}};
  const Distribution::Histogram h = d.histogram(bins, width);
  for (size_t i = 0; i < h.counts.size(); ++i) {
    curve.x.push_back(h.edges[i]);
    curve.x_end.push_back(h.edges[i + 1]);
    curve.y.push_back(static_cast<double>(h.counts[i]) / static_cast<double>(d.count()));
  }
  return curve;
}

std::vector<Figure> analysis_figures(const Analysis& analysis, int64_t bins) {
  std::vector<Figure> figures;
  if (analysis.layers.empty()) return figures;
  constexpr const char* kShare = "share of values";
  const auto label = [&figures](std::string_view x, std::string_view y) {
    figures.back().x_label = x;
    figures.back().y_label = y;
  };
  const Layers all = layers_where(analysis, [](const LayerAnalysis&) { return true; });
  for (const QuantityInfo& q : quantities()) {
    // The state is drawn over time, and the two cosines together.
    const bool elsewhere = q.id == Quantity::kStateNorm || q.id == Quantity::kEffectiveRank ||
                           q.id == Quantity::kCosKeyRead || q.id == Quantity::kCosQueryRead;
    if (elsewhere) continue;
    const auto heads_of = [&q](const LayerAnalysis& layer) {
      return q.of_key_head(layer.rule) ? layer.heads : layer.v_heads;
    };
    const auto panel = [&](const LayerAnalysis& layer, size_t h) -> FigurePanel {
      const Distribution& d = layer.of(q.id)[h];
      return {mean_text(d), {bins_of(d, bins, kFigureBlue)}};
    };
    // Layers may have different rules: those without the quantity have no row, and those with another axis a picture of
    // their own.
    Layers with[2];
    for (const LayerAnalysis* layer : all) {
      if (q.applies(layer->rule)) with[q.logarithmic(layer->rule) ? 1 : 0].push_back(layer);
    }
    for (const bool logarithmic : {false, true}) {
      const Layers& layers = with[logarithmic ? 1 : 0];
      if (layers.empty()) continue;
      const bool second = logarithmic && !with[0].empty();
      figures.push_back(make_figure(analysis, layers, fmt::format("{}{}", q.name, second ? "_log" : ""),
                                    fmt::format("{}: {}", q.name, q.formula), heads_of, panel));
      figures.back().logarithmic = logarithmic;
      label(q.name, kShare);
    }
  }
  figures.push_back(make_figure(
      analysis, all, "cos_reads", "cosine of v with the key's read S^T k (blue) and with the query's read o (red)",
      value_heads, [&](const LayerAnalysis& layer, size_t h) -> FigurePanel {
        const Distribution &key = layer.of(Quantity::kCosKeyRead)[h], &query = layer.of(Quantity::kCosQueryRead)[h];
        // Bins of the same width, so that the heights compare.
        const double width = std::max(key.histogram(bins).width, query.histogram(bins).width);
        return {fmt::format("   {:.2f}, {:.2f}", key.mean(), query.mean()),
                {bins_of(key, bins, kFigureBlue, width), bins_of(query, bins, kFigureRed, width)}};
      }));
  label("cosine", kShare);
  figures.push_back(make_figure(
      analysis, all, "subspace_overlap",
      "overlap of the first r principal components of key reads and query reads, over r (dashed: chance)", value_heads,
      [&](const LayerAnalysis& layer, size_t h) -> FigurePanel {
        const SubspaceOverlap& o = layer.value_heads[h].overlap;
        FigureCurve line{FigureCurve::Kind::kLine, kFigureBlue, {}, {}, o.by_rank};
        FigureCurve chance{FigureCurve::Kind::kDashed, kGrey, {}, {}, {}};
        for (size_t r = 1; r <= o.by_rank.size(); ++r) {
          line.x.push_back(static_cast<double>(r));
          chance.x.push_back(static_cast<double>(r));
          chance.y.push_back(static_cast<double>(r) / static_cast<double>(o.by_rank.size()));
        }
        return {o.components > 0 ? fmt::format("   {:.2f} at r = {}", o.overlap, o.components) : "", {chance, line}};
      }));
  label("r", "overlap");
  // Values numbered from 1.
  const auto numbered = [](const std::vector<double>& y, FigureCurve::Kind kind, const char* color) {
    FigureCurve curve{kind, color, {}, {}, y};
    for (size_t r = 1; r <= y.size(); ++r) curve.x.push_back(static_cast<double>(r));
    return curve;
  };
  figures.push_back(make_figure(analysis, all, "prior_energy",
                                "share in the first r principal components of the query reads S_{t-1}^T q: of "
                                "themselves (dashed), of the key reads S_{t-1}^T k",
                                value_heads, [&](const LayerAnalysis& layer, size_t h) -> FigurePanel {
                                  const SharedEnergy& e = layer.value_heads[h].energy;
                                  return {"",
                                          {numbered(e.own, FigureCurve::Kind::kDashed, kGrey),
                                           numbered(e.shared, FigureCurve::Kind::kLine, kFigureBlue)}};
                                }));
  label("r", "share");
  const auto key_heads = [](const LayerAnalysis& layer) { return layer.heads; };
  figures.push_back(make_figure(
      analysis, all, "key_gram", "Gram matrix of the keys: eigenvalues and, dashed, its diagonal, shares of the trace",
      key_heads, [&](const LayerAnalysis& layer, size_t h) -> FigurePanel {
        const GramSpectrum& g = layer.key_heads[h].gram;
        return {std::isfinite(g.alignment) ? fmt::format("   alignment {:.2f}", g.alignment) : "",
                {numbered(g.diagonal, FigureCurve::Kind::kDashed, kGrey),
                 numbered(g.eigenvalues, FigureCurve::Kind::kLine, kFigureBlue)}};
      }));
  label("number", "share");
  const Layers squashed =
      layers_where(analysis, [](const LayerAnalysis& layer) { return layer.rule.uses_precond_center(); });
  if (!squashed.empty()) {
    figures.push_back(make_figure(
        analysis, squashed, "saturation", "mean of |y| / (1 + |y|) over the channels, over the position in the window",
        key_heads, [&](const LayerAnalysis& layer, size_t h) -> FigurePanel {
          const KeyHeadAnalysis& key = layer.key_heads[h];
          return {fmt::format("   center {:.2f}", key.center), {line_of(key.saturation, analysis.every)}};
        }));
    label("position (tokens)", "saturation");
  }
  const auto over_time = [&](const char* name, const char* title, const char* what,
                             PositionSeries HeadAnalysis::*series) {
    figures.push_back(
        make_figure(analysis, all, name, title, value_heads, [&](const LayerAnalysis& layer, size_t h) -> FigurePanel {
          return {"", {line_of(layer.value_heads[h].*series, analysis.every)}};
        }));
    label("position (tokens)", what);
  };
  over_time("state_norm", "norm of the state |S| over the position in the window", "|S|", &HeadAnalysis::state_norm);
  over_time("effective_rank", "effective rank of the state over the position in the window", "rank",
            &HeadAnalysis::effective_rank);
  std::erase_if(figures, [](const Figure& figure) { return !has_points(figure); });
  for (Figure& figure : figures) {
    for (FigurePanel& panel : figure.panels) color_by_rule(panel, analysis.rule);
  }
  return figures;
}

namespace {

// Words in lines as long as a row of panels bears.
std::string wrapped_title(const std::string& text, size_t columns) {
  const size_t width = std::max<size_t>(columns, 3) * 34;  // a picture is at least three panels wide
  std::vector<std::string> lines(1);
  for (size_t i = 0; i < text.size();) {
    const size_t end = std::min(text.find(' ', i), text.size());
    std::string& line = lines.back();
    const std::string word = text.substr(i, end - i);
    i = end + 1;
    if (line.empty()) {
      line = word;
    } else if (line.size() + 1 + word.size() <= width) {
      line += " " + word;
    } else {
      lines.push_back(word);
    }
  }
  return gnuplot_quote(lines);
}

}  // namespace

std::string figure_script(const Figure& figure) {
  const size_t rows = (figure.panels.size() + figure.columns - 1) / figure.columns;
  Range x_range, y_range;
  bool bins = false;
  for (const FigurePanel& panel : figure.panels) {
    for (const FigureCurve& curve : panel.curves) {
      bins = bins || curve.kind == FigureCurve::Kind::kBins;
      for (const double x : curve.x) x_range.add(x);
      for (const double x : curve.x_end) x_range.add(x);
      for (const double y : curve.y) y_range.add(y);
    }
  }
  std::string script = fmt::format("set multiplot layout {},{} title {} noenhanced font ',12'\n", rows, figure.columns,
                                   wrapped_title(figure.title, figure.columns));
  script +=
      "unset key\nset border 3 linecolor rgb '#555555'\nset tics nomirror out scale 0.5 font ',8'\nset xtics offset "
      "0,0.4\nset style fill transparent solid "
      "0.6 "
      "noborder\nset lmargin 8\nset rmargin 2\nset bmargin 2.4\nset tmargin 2\n";
  script +=
      fmt::format("set xlabel {} noenhanced font ',8' offset 0,1.4\nset ylabel {} noenhanced font ',8' offset 2,0\n",
                  gnuplot_quote(figure.x_label), gnuplot_quote(figure.y_label));
  script += x_range.settings("x", figure.logarithmic, figure.whole_x);
  if (bins) {
    script += "set yrange [0:*]\nset ytics autofreq\n";  // of each panel its own: heads spread differently
  } else {
    y_range.add(0);
    script += y_range.settings("y", false);
  }
  for (const FigurePanel& panel : figure.panels) {
    script += fmt::format("set title {} noenhanced font ',9' offset 0,-0.7\n", gnuplot_quote(panel.title));
    std::string data;
    std::vector<std::string> plots;
    for (const FigureCurve& curve : panel.curves) {
      if (curve.x.empty()) continue;
      const std::string name = fmt::format("$curve{}", plots.size());
      data += name + " << END_OF_DATA\n";
      for (size_t i = 0; i < curve.x.size(); ++i) {
        if (curve.kind == FigureCurve::Kind::kBins) {
          data += fmt::format("{} {} {}\n", (curve.x[i] + curve.x_end[i]) / 2, curve.y[i], curve.x_end[i] - curve.x[i]);
        } else {
          data += fmt::format("{} {}\n", curve.x[i], curve.y[i]);
        }
      }
      data += "END_OF_DATA\n";
      switch (curve.kind) {
        case FigureCurve::Kind::kBins:
          plots.push_back(fmt::format("{} using 1:2:3 with boxes linecolor rgb '{}'", name, curve.color));
          break;
        case FigureCurve::Kind::kLine:
          plots.push_back(fmt::format("{} with lines linewidth 1.5 linecolor rgb '{}'", name, curve.color));
          break;
        case FigureCurve::Kind::kDashed:
          plots.push_back(fmt::format("{} with lines dashtype 2 linecolor rgb '{}'", name, curve.color));
          break;
      }
    }
    script +=
        plots.empty() ? std::string("set multiplot next\n") : data + fmt::format("plot {}\n", fmt::join(plots, ", "));
  }
  return script + "unset multiplot\n";
}

PictureResult write_figures(const std::vector<Figure>& figures, const std::string& folder) {
  PictureResult all;
  for (const Figure& figure : figures) {
    const int rows = static_cast<int>((figure.panels.size() + figure.columns - 1) / figure.columns);
    const int width = std::max(static_cast<int>(figure.columns) * kPanelWidth, 3 * kPanelWidth);
    const PictureResult one = draw_picture("picture of " + figure.name, folder + "/" + figure.name, width,
                                           rows * kPanelHeight + kHeadHeight, [&] { return figure_script(figure); });
    all.files.insert(all.files.end(), one.files.begin(), one.files.end());
    if (all.note.empty()) all.note = one.note;
    if (one.files.empty()) break;  // no gnuplot: the others would fail the same way
  }
  return all;
}

}  // namespace fw
