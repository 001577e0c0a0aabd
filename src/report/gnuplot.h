// Pictures drawn by gnuplot, as SVG and PNG.
#pragma once

#include <functional>
#include <string>
#include <string_view>
#include <vector>

namespace fw {

struct PictureResult {
  std::vector<std::string> files;  // what was written
  std::string note;                // why something was not; "" if all is there
};

// What gnuplot is given after "set terminal". The picture comes on its standard output, so that no path is in a
// script.
using GnuplotScript = std::function<std::string()>;

// Draws base + ".svg", width x height pixels, and base + ".png", half as large again. `what` names the picture in a
// note. An old picture stays until the new one is whole. A missing or failing gnuplot is a note, not an error: a run
// does not fail over its picture.
PictureResult draw_picture(const std::string& what, const std::string& base, int width, int height,
                           const GnuplotScript& script);

// The same picture as the text of an SVG file whose names begin with `prefix`, so that several can stand in one page;
// "" when it could not be drawn, and then note says why.
std::string draw_svg(int width, int height, const std::string& prefix, std::string& note, const GnuplotScript& script);

// Text as a gnuplot string: the only way of text into a script. No character of it means anything to gnuplot, and
// control characters are shown (printable()).
std::string gnuplot_quote(std::string_view text);
// The same of several lines.
std::string gnuplot_quote(const std::vector<std::string>& lines);

}  // namespace fw
