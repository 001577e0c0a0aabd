#include "report/curves.h"

#include <cmath>
#include <utility>

#include "report/plot.h"

namespace fw {

std::string loss_curve_script(const std::vector<MetricPoint>& points, const std::string& title) {
  Plot plot;
  plot.title = title;
  plot.x_label = "step";
  plot.y_label = "loss (nats per token)";
  plot.crop = true;
  PlotLine train{"training", "#3b6ea5", 1, false, {}}, held_out{"held out", "#c8553d", 1, true, {}};
  const auto add = [](PlotLine& line, int64_t step, double loss) {
    line.points.push_back({static_cast<double>(step), loss, loss, loss});
  };
  for (const MetricPoint& p : points) {
    add(train, p.step, p.loss);
    if (p.eval_loss) add(held_out, p.step, *p.eval_loss);
  }
  plot.lines = {std::move(train), std::move(held_out)};
  return plot_script(plot);
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
