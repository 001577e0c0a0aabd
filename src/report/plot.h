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
  int dash = 1;          // gnuplot's dashtype
  bool markers = false;  // a dot at each point
  std::vector<PlotPoint> points;
  bool shows_label = true;  // at its end
};

struct Plot {
  std::string title, x_label, y_label;
  bool log_x = false, log_y = false;
  bool x_from_zero = true;  // of an x axis that is not logarithmic
  // The y axis ends where the largest value of the later nine tenths of the lines is, so that the beginning of training
  // does not take most of it.
  bool crop = false;
  std::optional<double> mark_x;  // a dotted vertical line
  std::vector<PlotLine> lines;
};

// "" where no line has a point that can be drawn.
std::string plot_script(const Plot& plot);

// The colour of a rule, a layer or a model of several ("kda + window"), the same in every picture.
std::string color_of(const std::string& rule);
// Colours for what is no rule, by its place in the picture.
std::string color_of(size_t index);

// The mean of several lines at the points that all of them have, with a band from the lowest to the highest.
std::vector<PlotPoint> mean_of(const std::vector<std::vector<PlotPoint>>& lines);

}  // namespace fw
