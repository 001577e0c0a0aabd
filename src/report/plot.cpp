#include "report/plot.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <map>
#include <utility>

#include "report/gnuplot.h"

namespace fw {
namespace {

// Distinct in print and to most colour-blind readers: Okabe and Ito 2008, then darker and lighter ones between them.
constexpr std::array<const char*, 16> kPalette = {"#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9",
                                                  "#000000", "#882255", "#44aa99", "#999933", "#6f4fa0", "#8c564b",
                                                  "#117733", "#aa4499", "#88a0dd", "#7f7f7f"};

// What the papers' pictures compare most; another rule takes the palette's colour of its name.
constexpr std::pair<std::string_view, const char*> kColorOfRule[] = {
    {"gated_deltanet", "#0072b2"},
    {"gated_deltanet2", "#d55e00"},
    {"kda", "#009e73"},
    {"kaczmarz", "#cc79a7"},
    {"qdelta", "#e69f00"},
    {"deltanet", "#56b4e9"},
    {"attention", "#000000"},
    {"precond_kda", "#882255"},
    {"precond_gated_deltanet", "#44aa99"},
    {"precond_deltanet", "#999933"},
    {"comba", "#6f4fa0"},
    {"gla", "#8c564b"},
    {"mamba2", "#7f7f7f"},
    {"ssd", "#4d4d4d"},
    {"mamba3", "#117733"},
    {"rwkv7", "#aa4499"},
    {"mesa", "#88a0dd"},
    {"linear_attention", "#b8860b"},
    {"gated_deltanet2 + window", "#f4a582"},
    {"kda + window", "#66c2a5"},
    {"gated_deltanet + window", "#92c5de"},
};

constexpr double kLabelGap = 0.042;  // of the plot's height: a line of text
constexpr double kCharacter = 0.85;  // of the unit that gnuplot's margins have
constexpr size_t kMostLabels = 24;

struct PlotRange {
  double low = std::numeric_limits<double>::infinity(), high = -low;
  void add(double x) {
    low = std::min(low, x);
    high = std::max(high, x);
  }
};

bool is_drawn(const Plot& plot, const PlotPoint& p) {
  const auto fits = [](double x, bool log) { return std::isfinite(x) && (!log || x > 0); };
  return fits(p.x, plot.log_x) && fits(p.y, plot.log_y);
}

// Where the lines are, with a margin.
PlotRange y_range(const Plot& plot, double last_x, double first_x) {
  PlotRange all, later;
  const double begin = plot.log_x ? first_x : first_x + (last_x - first_x) / 10;
  for (const PlotLine& line : plot.lines) {
    for (const PlotPoint& p : line.points) {
      if (!is_drawn(plot, p)) continue;
      for (const double y : {p.y, p.low, p.high}) {
        if (!std::isfinite(y) || (plot.log_y && y <= 0)) continue;
        all.add(y);
        if (p.x >= begin) later.add(y);
      }
    }
  }
  if (plot.crop && later.low < later.high) all.high = std::min(all.high, later.high);
  if (!(all.low < all.high)) {
    const double around = all.low == 0 ? 1 : std::abs(all.low) / 10;
    return {all.low - around, all.high + around};
  }
  if (plot.log_y) return {all.low / std::pow(all.high / all.low, 0.03), all.high * std::pow(all.high / all.low, 0.03)};
  const double margin = 0.04 * (all.high - all.low);
  return {all.low >= 0 ? std::max(0.0, all.low - margin) : all.low - margin, all.high + margin};
}

struct EndLabel {
  double at;  // of the plot's height
  std::string text, color;
};

// Moved apart, in order, as little as need be.
void spread_labels(std::vector<EndLabel>& labels) {
  std::stable_sort(labels.begin(), labels.end(), [](const EndLabel& a, const EndLabel& b) { return a.at < b.at; });
  for (size_t i = 0; i < labels.size(); ++i) {
    labels[i].at = std::clamp(labels[i].at, 0.0, 1.0);
    if (i > 0) labels[i].at = std::max(labels[i].at, labels[i - 1].at + kLabelGap);
  }
  double above = 1 + kLabelGap;
  for (size_t i = labels.size(); i-- > 0;) {
    labels[i].at = std::min(labels[i].at, above - kLabelGap);
    above = labels[i].at;
  }
}

uint64_t name_number(const std::string& name) {
  uint64_t hash = 14695981039346656037u;  // FNV-1a
  for (const char c : name) hash = (hash ^ static_cast<unsigned char>(c)) * 1099511628211u;
  return hash;
}

}  // namespace

std::string color_of(size_t index) { return kPalette[index % kPalette.size()]; }

std::string color_of(const std::string& rule) {
  for (const auto& [name, color] : kColorOfRule) {
    if (rule == name) return color;
  }
  return color_of(static_cast<size_t>(name_number(rule) % kPalette.size()));
}

std::vector<PlotPoint> mean_of(const std::vector<std::vector<PlotPoint>>& lines) {
  std::map<double, std::vector<double>> at;
  for (const std::vector<PlotPoint>& line : lines) {
    for (const PlotPoint& p : line) {
      if (std::isfinite(p.x) && std::isfinite(p.y)) at[p.x].push_back(p.y);
    }
  }
  std::vector<PlotPoint> points;
  for (const auto& [x, values] : at) {
    if (values.size() < lines.size()) continue;
    double mean = 0;
    for (const double y : values) mean += y / static_cast<double>(values.size());
    const auto [low, high] = std::minmax_element(values.begin(), values.end());
    points.push_back({x, mean, *low, *high});
  }
  return points;
}

std::string plot_script(const Plot& plot) {
  PlotRange x;
  for (const PlotLine& line : plot.lines) {
    for (const PlotPoint& p : line.points) {
      if (is_drawn(plot, p)) x.add(p.x);
    }
  }
  if (!(x.low <= x.high)) return {};
  const PlotRange y = y_range(plot, x.high, x.low);
  const auto share = [&](double value) {
    return plot.log_y ? std::log(value / y.low) / std::log(y.high / y.low) : (value - y.low) / (y.high - y.low);
  };
  std::string blocks, bands, lines;
  std::vector<EndLabel> labels;
  for (size_t i = 0; i < plot.lines.size(); ++i) {
    const PlotLine& line = plot.lines[i];
    const auto in_band = [&](const PlotPoint& p) { return p.low < p.high && (!plot.log_y || p.low > 0); };
    const bool has_band = std::any_of(line.points.begin(), line.points.end(),
                                      [&](const PlotPoint& p) { return is_drawn(plot, p) && in_band(p); });
    std::string data;
    const PlotPoint* last = nullptr;
    for (const PlotPoint& p : line.points) {
      if (!is_drawn(plot, p)) continue;
      data += fmt::format("{} {}", p.x, p.y);
      if (has_band) data += fmt::format(" {} {}", in_band(p) ? p.low : p.y, in_band(p) ? p.high : p.y);
      data += "\n";
      last = &p;
    }
    if (last == nullptr) continue;
    blocks += fmt::format("$line{} << END_OF_DATA\n{}END_OF_DATA\n", i, data);
    if (has_band) {
      bands += fmt::format(
          "{}$line{} using 1:3:4 with filledcurves linecolor rgb '{}' fillstyle transparent solid 0.15 noborder "
          "notitle",
          bands.empty() ? "" : ", ", i, line.color);
    }
    const bool single = line.points.size() == 1;
    lines += fmt::format("{}$line{} using 1:2 with {} dashtype {} linewidth 1.8 linecolor rgb '{}' title {} noenhanced",
                         lines.empty() ? "" : ", ", i,
                         line.markers || single ? "linespoints pointtype 7 pointsize 0.6" : "lines", line.dash,
                         line.color, line.label.empty() ? "''" : gnuplot_quote(line.label));
    if (line.shows_label && !line.label.empty()) labels.push_back({share(last->y), line.label, line.color});
  }
  std::string script = fmt::format("set title {} noenhanced\nset xlabel {} noenhanced\nset ylabel {} noenhanced\n",
                                   gnuplot_quote(plot.title), gnuplot_quote(plot.x_label), gnuplot_quote(plot.y_label));
  script +=
      "set grid back linecolor rgb '#dddddd'\nset border 3 linecolor rgb '#555555'\nset tics nomirror\n"
      "set clip two\n";
  if (plot.log_x) script += "set logscale x 2\n";
  if (plot.log_y) script += "set logscale y\n";
  script += plot.log_x ? fmt::format("set xrange [{}:{}]\n", x.low / 1.05, x.high * 1.05)
                       : fmt::format("set xrange [{}:{}]\n", plot.x_from_zero ? std::min(0.0, x.low) : x.low,
                                     x.low < x.high || x.high > 0 ? fmt::format("{}", x.high) : "*");
  script += fmt::format("set yrange [{}:{}]\n", y.low, y.high);
  if (labels.size() > kMostLabels) {
    script += "set key outside right top font ',9'\n";
  } else {
    spread_labels(labels);
    size_t longest = 0;
    for (size_t i = 0; i < labels.size(); ++i) {
      longest = std::max(longest, labels[i].text.size());
      script += fmt::format("set label {} {} at graph 1.012, graph {:.4f} left noenhanced textcolor rgb '{}'\n", i + 1,
                            gnuplot_quote(labels[i].text), labels[i].at, labels[i].color);
    }
    script += fmt::format("set key off\nset rmargin {:.1f}\n", kCharacter * static_cast<double>(longest) + 2);
  }
  if (plot.mark_x && *plot.mark_x >= x.low && *plot.mark_x <= x.high)
    script += fmt::format(
        "set arrow 1 from first {0}, graph 0 to first {0}, graph 1 nohead dashtype 3 linecolor rgb "
        "'#888888'\n",
        *plot.mark_x);
  return script + blocks + fmt::format("plot {}{}{}\n", bands, bands.empty() ? "" : ", ", lines);
}

}  // namespace fw
