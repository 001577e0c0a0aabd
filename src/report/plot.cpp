#include "report/plot.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <map>
#include <optional>
#include <utility>

#include "report/gnuplot.h"

namespace fw {
namespace {

// Distinct in print and to most colour-blind readers: Okabe and Ito 2008, then darker and lighter ones between them.
constexpr std::array<const char*, 16> kPalette = {"#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9",
                                                  "#000000", "#882255", "#44aa99", "#999933", "#6f4fa0", "#8c564b",
                                                  "#117733", "#aa4499", "#88a0dd", "#7f7f7f"};

// A hue for each family of rules and layers.
constexpr std::pair<std::string_view, const char*> kColorOfFamily[] = {
    {"gated_deltanet", "#0072b2"},
    {"gated_deltanet2", "#d55e00"},
    {"kda", "#009e73"},
    {"kaczmarz", "#cc79a7"},
    {"qdelta", "#e69f00"},
    {"deltanet", "#56b4e9"},
    {"attention", "#000000"},
    {"window", "#8a8a3a"},
    {"precond_kda", "#882255"},
    {"precond_gated_deltanet", "#44aa99"},
    {"precond_deltanet", "#999933"},
    {"precond_linear", "#2f4b7c"},
    {"precond_longhorn", "#a05195"},
    {"precond_exact", "#665191"},
    {"comba", "#6f4fa0"},
    {"gla", "#8c564b"},
    {"hgrn2", "#c49c94"},
    {"mamba2", "#7f7f7f"},
    {"ssd", "#4d4d4d"},
    {"mamba", "#bcae1b"},
    {"mamba3", "#117733"},
    {"rwkv7", "#aa4499"},
    {"dplr", "#e377c2"},
    {"mesa", "#88a0dd"},
    {"longhorn", "#9edae5"},
    {"nlms", "#b5727d"},
    {"efla", "#6b8e23"},
    {"retnet", "#c0392b"},
    {"linear_attention", "#b8860b"},
};

// Dashes: 1 solid, 3 dotted, 4 dash and dot, 5 dash and two dots. 2 is the held-out curve's.
constexpr int kSolid = 1, kDots = 3, kDashDot = 4, kDashDots = 5;

// Beyond those of rules: for a rule's second line and those after it.
constexpr int kRuleDashes = 5;
constexpr const char* kLongDashes[] = {"(24,6)", "(24,5,6,5)", "(12,12)", "(30,5,4,5,4,5)"};

std::string dash_type(int dash) {
  return dash > kRuleDashes ? kLongDashes[static_cast<size_t>(dash - kRuleDashes - 1) % std::size(kLongDashes)]
                            : fmt::format("{}", dash);
}

// Rules that take the hue of another: darker: in a darker shade of it.
struct VariantLook {
  std::string_view name, family;
  int dash;
  bool darker = false;
};
constexpr VariantLook kVariants[] = {
    {"gated_deltanet2_b_only", "gated_deltanet2", kDashDots},
    {"gated_deltanet2_w_only", "gated_deltanet2", kDots},
    {"kaczmarz_full", "kaczmarz", kDashDots},
    {"kaczmarz_plain", "kaczmarz", kDots},
    {"kaczmarz_channel", "kaczmarz", kSolid, true},
    {"qdelta_fixed", "qdelta", kDashDots},
    {"qdelta_no_decay", "qdelta", kDots},
    {"precond_exact_read", "precond_exact", kDashDots},
    {"precond_mamba2", "precond_linear", kDashDots},
    {"precond_gla", "precond_linear", kDots},
    {"precond_low", "precond_gated_deltanet", kDashDots},
    {"precond_high", "precond_gated_deltanet", kDots},
    {"precond_tanh", "precond_gated_deltanet", kSolid, true},
    {"precond_norm_key", "precond_gated_deltanet", kDashDots, true},
    {"precond_norm_one_plus", "precond_gated_deltanet", kDots, true},
    {"precond_norm_gated", "precond_gated_deltanet", kDashDot, true},
    {"longhorn_diag", "longhorn", kDashDots},
};

constexpr double kLabelGap = 0.042;  // of the plot's height: a line of text
constexpr double kCharacter = 0.92;  // of the unit that gnuplot's margins have
constexpr size_t kMostLabels = 24;
constexpr const char* kBandMeaning = "     (band: mean ± standard deviation)";

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

// The value below which a share p of sorted values is.
double quantile_of(const std::vector<double>& sorted, double p) {
  return sorted[static_cast<size_t>(std::lround(p * static_cast<double>(sorted.size() - 1)))];
}

// The range of `values` without those far above or below the middle half of `means`.
PlotRange without_outliers(const std::vector<double>& values, std::vector<double> means) {
  std::ranges::sort(means);
  const double low = quantile_of(means, 0.25), high = quantile_of(means, 0.75), reach = 3 * (high - low);
  PlotRange range;
  for (const double y : values) {
    if (y >= low - reach && y <= high + reach) range.add(y);
  }
  return range;
}

// Where the lines are, with a margin.
PlotRange y_range(const Plot& plot, double last_x, double first_x) {
  PlotRange all, later;
  std::vector<double> values, means;
  const double begin = plot.log_x ? first_x : first_x + (last_x - first_x) / 10;
  for (const PlotLine& line : plot.lines) {
    for (const PlotPoint& p : line.points) {
      if (!is_drawn(plot, p)) continue;
      means.push_back(p.y);
      for (const double y : {p.y, p.low, p.high}) {
        if (!std::isfinite(y) || (plot.log_y && y <= 0)) continue;
        all.add(y);
        values.push_back(y);
        if (p.x >= begin) later.add(y);
      }
    }
  }
  if (plot.crop_outliers && !means.empty()) all = without_outliers(values, std::move(means));
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

namespace {

// Each channel `share` of the way to `target`.
std::string mixed(const std::string& color, int target, double share) {
  std::string out = "#";
  for (size_t i = 1; i < color.size(); i += 2) {
    const double from = std::stoi(color.substr(i, 2), nullptr, 16);
    out += fmt::format("{:02x}", static_cast<int>(std::lround(from + share * (target - from))));
  }
  return out;
}
std::string lighter(const std::string& color) { return mixed(color, 255, 0.45); }
std::string darker(const std::string& color) { return mixed(color, 0, 0.4); }

std::optional<LineLook> look_of_known(const std::string& name) {
  for (const auto& [family, color] : kColorOfFamily) {
    if (name == family) return LineLook{color, kSolid};
  }
  for (const VariantLook& variant : kVariants) {
    if (name != variant.name) continue;
    const LineLook family = *look_of_known(std::string(variant.family));
    return LineLook{variant.darker ? darker(family.color) : family.color, variant.dash};
  }
  constexpr std::string_view kNegative = "_neg";
  if (!name.ends_with(kNegative)) return std::nullopt;
  std::optional<LineLook> base = look_of_known(name.substr(0, name.size() - kNegative.size()));
  if (base) base->dash = kDashDot;
  return base;
}

// Of a composition, as "kaczmarz q_norm=raw", and of a name as "kda_mine" the rule that it begins with; else the
// palette's colour of the name.
LineLook look_of_other(const std::string& name) {
  constexpr int kDashes[] = {kSolid, kDashDot, kDashDots, kDots};
  const uint64_t number = name_number(name);
  for (size_t end = name.find_last_of(" _"); end != std::string::npos && end > 0;
       end = name.find_last_of(" _", end - 1)) {
    if (const auto base = look_of_known(name.substr(0, end)))
      return {mixed(base->color, 0, 0.2 + 0.02 * static_cast<double>(number % 10)), kDashes[1 + number % 3]};
  }
  return {color_of(static_cast<size_t>(number % kPalette.size())), kDashes[number / kPalette.size() % 4]};
}

// Without spaces around '+'.
std::string normal_name(const std::string& name) {
  std::string out;
  for (size_t i = 0; i < name.size(); ++i) {
    const size_t next = name.find_first_not_of(' ', i);
    const bool beside_plus = (!out.empty() && out.back() == '+') || (next != std::string::npos && name[next] == '+');
    if (name[i] != ' ' || (next != std::string::npos && !out.empty() && !beside_plus)) out += name[i];
  }
  return out;
}

}  // namespace

LineLook look_of(const std::string& rule) {
  const std::string name = normal_name(rule);
  const size_t plus = name.find('+');
  const std::string first = name.substr(0, plus);
  const std::optional<LineLook> known = look_of_known(first);
  LineLook look = known ? *known : look_of_other(first);
  if (plus == std::string::npos) return look;
  look.color = lighter(look.color);
  if (name.substr(plus + 1) != "window") look.dash = kDashDots;
  return look;
}

LineLook look_of(const std::string& rule, size_t index) {
  LineLook look = look_of(rule);
  if (index > 0) look.dash = kRuleDashes + 1 + static_cast<int>((index - 1) % std::size(kLongDashes));
  return look;
}

std::string color_of(const std::string& rule) { return look_of(rule).color; }

bool is_hybrid(const std::string& rule) { return rule.find('+') != std::string::npos; }

std::string family_of(const std::string& rule) {
  std::string name = normal_name(rule);
  for (const VariantLook& variant : kVariants) {
    if (name == variant.name) return std::string(variant.family);
  }
  if (name.ends_with("_neg") && look_of_known(name)) return name.substr(0, name.size() - 4);
  return name;
}

PlotPoint mean_point(double x, const std::vector<double>& values) {
  double mean = 0, squares = 0;
  for (const double y : values) mean += y / static_cast<double>(values.size());
  for (const double y : values) squares += (y - mean) * (y - mean);
  const double deviation = values.size() < 2 ? 0 : std::sqrt(squares / static_cast<double>(values.size() - 1));
  return {x, mean, mean - deviation, mean + deviation};
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
    if (values.size() == lines.size()) points.push_back(mean_point(x, values));
  }
  return points;
}

void limit_bands(Plot& plot, double low, double high) {
  for (PlotLine& line : plot.lines) {
    for (PlotPoint& p : line.points) p.low = std::max(p.low, low), p.high = std::min(p.high, high);
  }
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
    PlotRange drawn;
    for (const PlotPoint& p : line.points) {
      if (!is_drawn(plot, p)) continue;
      data += fmt::format("{} {}", p.x, p.y);
      // Where the mean leaves the picture the band ends: gnuplot cuts polygons at the border in the wrong place.
      if (has_band && (p.y < y.low || p.y > y.high)) {
        data += " NaN NaN";
      } else if (has_band) {
        const auto [low, high] = in_band(p) ? std::pair(p.low, p.high) : std::pair(p.y, p.y);
        data += fmt::format(" {} {}", std::max(low, y.low), std::min(high, y.high));
      }
      data += "\n";
      last = &p;
      drawn.add(p.y);
    }
    if (last == nullptr) continue;
    // A line that leaves the picture says how far it goes.
    std::string label = line.label;
    if (plot.crop_outliers && (drawn.low > y.high || drawn.high < y.low)) {
      label += fmt::format(" ({:.3g} to {:.3g})", drawn.low, drawn.high);
    } else if (plot.crop_outliers && drawn.high > y.high) {
      label += fmt::format(" (up to {:.3g})", drawn.high);
    } else if (plot.crop_outliers && drawn.low < y.low) {
      label += fmt::format(" (down to {:.3g})", drawn.low);
    }
    blocks += fmt::format("$line{} << END_OF_DATA\n{}END_OF_DATA\n", i, data);
    if (has_band) {
      bands += fmt::format(
          "{}$line{} using 1:3:4 with filledcurves linecolor rgb '{}' fillstyle transparent solid {} noborder "
          "notitle",
          bands.empty() ? "" : ", ", i, line.color, plot.lines.size() > 6 ? 0.08 : 0.15);
    }
    const bool single = line.points.size() == 1;
    lines += fmt::format("{}$line{} using 1:2 with {} dashtype {} linewidth 1.8 linecolor rgb '{}' title {} noenhanced",
                         lines.empty() ? "" : ", ", i,
                         line.markers || single ? "linespoints pointtype 7 pointsize 0.6" : "lines",
                         dash_type(line.dash), line.color, label.empty() ? "''" : gnuplot_quote(label));
    if (line.shows_label && !label.empty()) labels.push_back({share(last->y), label, line.color});
  }
  const std::string x_label = plot.x_label + (bands.empty() ? "" : kBandMeaning);
  std::string script = fmt::format("set title {} noenhanced\nset xlabel {} noenhanced\nset ylabel {} noenhanced\n",
                                   gnuplot_quote(plot.title), gnuplot_quote(x_label), gnuplot_quote(plot.y_label));
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
