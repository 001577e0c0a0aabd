#include "report/gnuplot.h"

#include <fmt/format.h>

#include <utility>

#include "base/error.h"
#include "base/file.h"
#include "base/printable.h"
#include "report/process.h"

namespace fw {
namespace {

struct Drawn {
  bool started = false;
  std::string picture;  // "": there is none, and `note` says why
  std::string note;
};

// -d: a .gnuplot of the user's or of the working folder is not read.
Drawn draw(const std::string& terminal, const GnuplotScript& script) {
  Drawn drawn;
  try {
    ProcessResult run = run_process({"gnuplot", "-d", "-"}, fmt::format("set terminal {}\n{}", terminal, script()));
    drawn.started = run.started;
    if (!run.started) {
      drawn.note = "gnuplot is not installed (Debian: apt-get install gnuplot-nox)";
    } else if (run.exit_code == 0 && !run.output.empty()) {
      drawn.picture = std::move(run.output);
    } else {
      std::string said = run.errors.substr(0, 300);
      said.erase(said.find_last_not_of(" \n") + 1);
      drawn.note = fmt::format("gnuplot ended with code {}{}{}", run.exit_code, said.empty() ? "" : ": ", said);
    }
  } catch (const Error& error) {  // no pipe, no process: a run does not fail over its picture
    drawn.note = error.what();
  }
  return drawn;
}

std::string svg_terminal(int width, int height, const std::string& more = {}) {
  return fmt::format("svg size {},{} dynamic enhanced {}background rgb 'white' font 'DejaVu Sans,13'", width, height,
                     more);
}

// Inside double quotes, where \ooo is a character by its number. All that may mean something is written so: gnuplot
// runs what stands in back quotes, and reads two quotes side by side as two strings.
std::string gnuplot_characters(std::string_view text) {
  std::string out;
  for (const char c : printable(text)) {
    const auto byte = static_cast<unsigned char>(c);
    const bool plain = byte >= 0x80 || (byte >= 'a' && byte <= 'z') || (byte >= 'A' && byte <= 'Z') ||
                       (byte >= '0' && byte <= '9') ||
                       std::string_view(" ,.:_()+-/=").find(c) != std::string_view::npos;
    out += plain ? std::string(1, c) : fmt::format("\\{:03o}", byte);
  }
  return out;
}

}  // namespace

std::string gnuplot_quote(std::string_view text) { return "\"" + gnuplot_characters(text) + "\""; }

std::string gnuplot_quote(const std::vector<std::string>& lines) {
  std::string out = "\"";
  for (size_t i = 0; i < lines.size(); ++i) out += (i > 0 ? "\\n" : "") + gnuplot_characters(lines[i]);
  return out + "\"";
}

std::string draw_svg(int width, int height, const std::string& prefix, std::string& note, const GnuplotScript& script) {
  Drawn drawn = draw(svg_terminal(width, height, fmt::format("name {} ", gnuplot_quote(prefix))), script);
  note = drawn.note;
  return std::move(drawn.picture);
}

PictureResult draw_picture(const std::string& what, const std::string& base, int width, int height,
                           const GnuplotScript& script) {
  const std::pair<const char*, std::string> formats[] = {
      {".svg", svg_terminal(width, height)},
      {".png", fmt::format("pngcairo size {},{} enhanced background rgb 'white' font 'DejaVu Sans,17' linewidth 1.5",
                           width + width / 2, height + height / 2)},
  };
  PictureResult result;
  for (const auto& [suffix, terminal] : formats) {
    const std::string file = base + suffix;
    const Drawn drawn = draw(terminal, script);
    if (drawn.picture.empty()) {
      result.note = drawn.started ? fmt::format("{} was not drawn: {}", file, drawn.note)
                                  : fmt::format("no {}: {}", what, drawn.note);
      if (!drawn.started) return result;
      continue;
    }
    try {
      write_file_atomic(file, drawn.picture);
      result.files.push_back(file);
    } catch (const Error& failed) {
      result.note = failed.what();
    }
  }
  return result;
}

}  // namespace fw
