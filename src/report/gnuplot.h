// Pictures drawn by gnuplot, as SVG and PNG.
#pragma once

#include <functional>
#include <string>
#include <vector>

namespace fw {

struct PictureResult {
  std::vector<std::string> files;  // what was written
  std::string note;                // why something was not; "" if all is there
};

// A picture in one file: script(terminal, file) is all that gnuplot is given.
using GnuplotScript = std::function<std::string(const std::string& terminal, const std::string& file)>;

// Draws base + ".svg", width x height pixels, and base + ".png", half as large again. `what` names the picture in a note.
// An old picture stays until the new one is whole. A missing or failing gnuplot is a note, not an error: a run does not
// fail over its picture.
PictureResult draw_picture(const std::string& what, const std::string& base, int width, int height, const GnuplotScript& script);

// The same picture as the text of an SVG file whose names begin with `prefix`, so that several can stand in one page; "" when it could not be drawn,
// and then note says why.
std::string draw_svg(int width, int height, const std::string& prefix, std::string& note, const GnuplotScript& script);

// Text as a gnuplot string.
std::string gnuplot_quote(const std::string& text);

}  // namespace fw
