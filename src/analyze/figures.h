// The pictures of an analysis: one for each quantity, a panel for each layer (rows) and head (columns).
#pragma once

#include <string>
#include <vector>

#include "analyze/run.h"
#include "report/gnuplot.h"

namespace fw {

// One curve of a panel: points for lines, or bins [x, x_end) with a height.
struct FigureCurve {
  enum class Kind { kBins, kLine, kDashed };
  Kind kind = Kind::kLine;
  std::string color;
  std::vector<double> x, x_end, y;
};

struct FigurePanel {
  std::string title;
  std::vector<FigureCurve> curves;
};

struct Figure {
  std::string name;   // of its files
  std::string title;  // above all panels
  std::string x_label, y_label;
  bool logarithmic = false;
  bool whole_x = false;  // x counts: ticks at whole numbers
  size_t columns = 0;
  std::vector<FigurePanel> panels;  // row by row; one without curves stays empty
};

inline constexpr const char *kFigureBlue = "#3b6ea5", *kFigureRed = "#c8553d";

// What is blue in a panel without red takes the rule's colour, which it has in all pictures (report/plot.h).
void color_by_rule(FigurePanel& panel, const std::string& rule);

// A histogram as a curve of shares, at most `bins` of them and each at least `width` wide (Distribution::histogram).
FigureCurve bins_of(const Distribution& d, int64_t bins, const char* color, double width = 0);

// What there is to draw, without what would be empty. At most kFigureLayers x kFigureHeads panels: of larger models
// evenly spaced ones, and the title says so.
inline constexpr size_t kFigureLayers = 12, kFigureHeads = 8;
std::vector<Figure> analysis_figures(const Analysis& analysis, int64_t bins);

// What gnuplot is given; for tests.
std::string figure_script(const Figure& figure);

// Draws all of them into folder/NAME.svg and .png.
PictureResult write_figures(const std::vector<Figure>& figures, const std::string& folder);

}  // namespace fw
