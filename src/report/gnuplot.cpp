#include "report/gnuplot.h"

#include <fmt/format.h>
#include <stdlib.h>

#include <filesystem>

#include "base/error.h"
#include "base/file.h"
#include "report/process.h"

namespace fw {
namespace {

// Removes what gnuplot wrote aside, whatever happens.
class SidePicture {
 public:
  explicit SidePicture(std::string path) : path_(std::move(path)) {}
  ~SidePicture() {
    std::error_code ignored;
    std::filesystem::remove(path_, ignored);
  }
  SidePicture(const SidePicture&) = delete;
  SidePicture& operator=(const SidePicture&) = delete;
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

}  // namespace

// gnuplot's single-quoted strings know one escape: a quote is written twice.
std::string gnuplot_quote(const std::string& text) {
  std::string out = "'";
  for (const char c : text) out += c == '\'' ? std::string("''") : std::string(1, c);
  return out + "'";
}

std::string draw_svg(int width, int height, const std::string& prefix, std::string& note, const GnuplotScript& script) {
  std::string folder = (std::filesystem::temp_directory_path() / "fastweight-picture-XXXXXX").string();
  if (::mkdtemp(folder.data()) == nullptr) fail_io("cannot make a folder for a picture in '{}'", std::filesystem::temp_directory_path().string());
  std::string svg;
  const std::string file = fmt::format("{}/picture.svg", folder);
  const ProcessResult run =
      run_process({"gnuplot", "-"},
                  script(fmt::format("svg size {},{} dynamic enhanced name '{}' background rgb 'white' font 'DejaVu Sans,13'", width, height, prefix), file));
  if (!run.started) {
    note = "gnuplot is not installed (Debian: apt-get install gnuplot-nox)";
  } else if (run.exit_code != 0) {
    note = fmt::format("gnuplot ended with code {}: {}", run.exit_code, run.output.substr(0, 300));
  } else {
    svg = read_file(file);
  }
  std::error_code ignored;
  std::filesystem::remove_all(folder, ignored);
  return svg;
}

PictureResult draw_picture(const std::string& what, const std::string& base, int width, int height, const GnuplotScript& script) {
  const std::pair<const char*, std::string> formats[] = {
      {".svg", fmt::format("svg size {},{} dynamic enhanced background rgb 'white' font 'DejaVu Sans,13'", width, height)},
      {".png", fmt::format("pngcairo size {},{} enhanced background rgb 'white' font 'DejaVu Sans,17' linewidth 1.5", width + width / 2, height + height / 2)},
  };
  PictureResult result;
  for (const auto& [suffix, terminal] : formats) {
    const std::string file = base + suffix;
    const SidePicture side(file + ".partial");
    const ProcessResult run = run_process({"gnuplot", "-"}, script(terminal, side.path()));
    if (!run.started) {
      result.note = fmt::format("no {}: gnuplot is not installed (Debian: apt-get install gnuplot-nox)", what);
      return result;
    }
    std::error_code error;
    const auto size = std::filesystem::file_size(side.path(), error);
    if (run.exit_code == 0 && !error && size > 0) {
      try {
        write_file_atomic(file, read_file(side.path()));
        result.files.push_back(file);
      } catch (const Error& failed) {
        result.note = failed.what();
      }
      continue;
    }
    std::string said = run.output.substr(0, 300);
    said.erase(said.find_last_not_of(" \n") + 1);
    result.note = fmt::format("{} was not drawn: gnuplot ended with code {}{}{}", file, run.exit_code, said.empty() ? "" : ": ", said);
  }
  return result;
}

}  // namespace fw
