// Loss curves as SVG and PNG, drawn by gnuplot.
#pragma once

#include <string>
#include <vector>

#include "report/gnuplot.h"
#include "report/metrics.h"

namespace fw {

// Draws training loss in nats per token over steps, and the held-out loss where it was measured, into base + ".svg" and
// base + ".png". No picture is a note, not an error.
PictureResult write_loss_curve(const std::vector<MetricPoint>& points, const std::string& title, const std::string& base);

// What gnuplot is given for one terminal ("svg ..." or "pngcairo ..."); for tests.
std::string loss_curve_script(const std::vector<MetricPoint>& points, const std::string& title, const std::string& terminal, const std::string& file);

}  // namespace fw
