// A picture of lines as a gnuplot script. It has labels at the ends of the lines, in their colours, bands around means,
// and cropped or logarithmic axes.
#pragma once

#include <optional>
#include <string>
#include <vector>

namespace fw {

struct PlotPoint {
  double x = 0, y = 0;
  double low = 0, high = 0;  // of the band; both y: none
};

struct PlotLine {
  std::string label;  // "": none
  std::string color;
  int dash = 1;          // gnuplot's dashtype up to 5; 6 to 9: long dashes
  bool markers = false;  // a dot at each point
  std::vector<PlotPoint> points;
  bool shows_label = true;  // at its end
};

struct Plot {
  std::string name;  // of its file
  std::string title, x_label, y_label;
  bool log_x = false, log_y = false;
  bool x_from_zero = true;  // of an x axis that is not logarithmic
  // The y axis ends where the largest value of the later nine tenths of the lines is, so that the beginning of training
  // does not take most of it.
  bool crop = false;
  // The y axis is as most lines need it. A line that leaves the picture says in its label how far it goes.
  bool crop_outliers = false;
  std::optional<double> mark_x;  // a dotted vertical line
  std::vector<PlotLine> lines;
};

// "" where no line has a point that can be drawn.
std::string plot_script(const Plot& plot);

// The look of a rule, a layer or a hybrid ("kda+window") is the same in every picture. A family of rules has one hue: a
// hybrid is lighter than its rule, ablations and rules with negative eigenvalues ("kda_neg") have other dashes. Named
// rules and layers have distinct looks. Other names take the look of the rule that they begin with, darker.
struct LineLook {
  std::string color;
  int dash = 1;
  bool operator==(const LineLook&) const = default;
};
LineLook look_of(const std::string& rule);
// Of the line `index` of a rule that has several in a picture, counted from 0.
LineLook look_of(const std::string& rule, size_t index);
std::string color_of(const std::string& rule);

bool is_hybrid(const std::string& rule);
// The rule of which this is an ablation or has negative eigenvalues; else its own name.
std::string family_of(const std::string& rule);
// Colours for what is no rule, by its place in the picture.
std::string color_of(size_t index);

// The mean of values, with a band of one standard deviation (n - 1), as tables have it.
PlotPoint mean_point(double x, const std::vector<double>& values);
// The same of several lines, at the points that all of them have.
std::vector<PlotPoint> mean_of(const std::vector<std::vector<PlotPoint>>& lines);
// Cuts bands at what a value can be.
void limit_bands(Plot& plot, double low, double high);

}  // namespace fw
