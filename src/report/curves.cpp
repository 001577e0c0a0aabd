#include "report/curves.h"

#include <fmt/format.h>

#include <cmath>

namespace fw {

std::string loss_curve_script(const std::vector<MetricPoint>& points, const std::string& title) {
  std::string train, held_out;
  for (const MetricPoint& p : points) {
    if (std::isfinite(p.loss)) train += fmt::format("{} {}\n", p.step, p.loss);
    if (p.eval_loss && std::isfinite(*p.eval_loss)) held_out += fmt::format("{} {}\n", p.step, *p.eval_loss);
  }
  std::string script = fmt::format("set title {} noenhanced\n", gnuplot_quote(title));
  script +=
      "set xlabel 'step'\nset ylabel 'loss (nats per token)'\nset grid back linecolor rgb '#dddddd'\nset border 3 "
      "linecolor rgb '#555555'\n"
      "set tics nomirror\nset key top right\nset xrange [0:*]\n";
  std::vector<std::string> plots;
  if (!train.empty()) {
    script += "$train << END_OF_DATA\n" + train + "END_OF_DATA\n";
    plots.emplace_back("$train with lines linewidth 1.5 linecolor rgb '#3b6ea5' title 'training'");
  }
  if (!held_out.empty()) {
    script += "$held_out << END_OF_DATA\n" + held_out + "END_OF_DATA\n";
    plots.emplace_back(
        "$held_out with linespoints linewidth 1.5 pointtype 7 pointsize 0.7 linecolor rgb '#c8553d' title 'held out'");
  }
  script += fmt::format("plot {}\n", fmt::join(plots, ", "));
  return script;
}

PictureResult write_loss_curve(const std::vector<MetricPoint>& points, const std::string& title,
                               const std::string& base) {
  PictureResult result;
  bool any = false;
  for (const MetricPoint& p : points) any = any || std::isfinite(p.loss) || p.eval_loss.has_value();
  if (!any) {
    result.note = "no loss curve: nothing was logged yet";
    return result;
  }
  return draw_picture("loss curve", base, 880, 500, [&] { return loss_curve_script(points, title); });
}

}  // namespace fw
