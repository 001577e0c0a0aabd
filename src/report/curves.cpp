#include "report/curves.h"

#include <fmt/format.h>

#include <cmath>
#include <cstdio>
#include <filesystem>

#include "base/error.h"
#include "base/file.h"
#include "report/process.h"

namespace fw {
namespace {

// gnuplot's single-quoted strings know one escape: a quote is written twice.
std::string quote(const std::string& text) {
  std::string out = "'";
  for (const char c : text) out += c == '\'' ? std::string("''") : std::string(1, c);
  return out + "'";
}

struct Format {
  const char* suffix;
  const char* terminal;
};
constexpr Format kFormats[] = {
    {".svg", "svg size 880,500 dynamic enhanced background rgb 'white' font 'DejaVu Sans,13'"},
    {".png", "pngcairo size 1320,750 enhanced background rgb 'white' font 'DejaVu Sans,17' linewidth 1.5"},
};

}  // namespace

std::string loss_curve_script(const std::vector<MetricPoint>& points, const std::string& title, const std::string& terminal, const std::string& file) {
  std::string train, held_out;
  for (const MetricPoint& p : points) {
    if (std::isfinite(p.loss)) train += fmt::format("{} {}\n", p.step, p.loss);
    if (p.eval_loss && std::isfinite(*p.eval_loss)) held_out += fmt::format("{} {}\n", p.step, *p.eval_loss);
  }
  std::string script = fmt::format("set terminal {}\nset output {}\n", terminal, quote(file));
  script += fmt::format("set title {} noenhanced\n", quote(title));
  script +=
      "set xlabel 'step'\nset ylabel 'loss (nats per token)'\nset grid back linecolor rgb '#dddddd'\nset border 3 linecolor rgb '#555555'\n"
      "set tics nomirror\nset key top right\nset xrange [0:*]\n";
  std::vector<std::string> plots;
  if (!train.empty()) {
    script += "$train << END_OF_DATA\n" + train + "END_OF_DATA\n";
    plots.emplace_back("$train with lines linewidth 1.5 linecolor rgb '#3b6ea5' title 'training'");
  }
  if (!held_out.empty()) {
    script += "$held_out << END_OF_DATA\n" + held_out + "END_OF_DATA\n";
    plots.emplace_back("$held_out with linespoints linewidth 1.5 pointtype 7 pointsize 0.7 linecolor rgb '#c8553d' title 'held out'");
  }
  script += fmt::format("plot {}\nunset output\n", fmt::join(plots, ", "));
  return script;
}

CurveResult write_loss_curve(const std::vector<MetricPoint>& points, const std::string& title, const std::string& base) {
  CurveResult result;
  bool any = false;
  for (const MetricPoint& p : points) any = any || std::isfinite(p.loss) || p.eval_loss.has_value();
  if (!any) {
    result.note = "no loss curve: nothing was logged yet";
    return result;
  }
  for (const Format& format : kFormats) {
    const std::string file = base + format.suffix;
    const std::string side = file + ".partial";  // an old picture stays until the new one is whole
    const ProcessResult run = run_process({"gnuplot", "-"}, loss_curve_script(points, title, format.terminal, side));
    std::error_code error;
    const auto size = std::filesystem::file_size(side, error);
    if (run.started && run.exit_code == 0 && !error && size > 0) {
      std::filesystem::rename(side, file, error);
      if (!error) {
        result.files.push_back(file);
        continue;
      }
    }
    std::filesystem::remove(side, error);
    if (!run.started) {
      result.note = "no loss curve: gnuplot is not installed (Debian: apt-get install gnuplot-nox)";
      return result;
    }
    std::string said = run.output.substr(0, 300);
    said.erase(said.find_last_not_of(" \n") + 1);
    result.note = fmt::format("{} was not drawn: gnuplot ended with code {}{}{}", file, run.exit_code, said.empty() ? "" : ": ", said);
  }
  return result;
}

}  // namespace fw
