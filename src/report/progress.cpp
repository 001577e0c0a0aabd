#include "report/progress.h"

#include <fmt/format.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstdlib>
#include <string_view>

namespace fw {

std::string format_duration(double seconds) {
  if (!(seconds >= 0) || seconds > 1e9) return "?";
  const auto s = static_cast<int64_t>(std::llround(seconds));
  if (s >= 3600) return fmt::format("{}:{:02}:{:02}", s / 3600, s / 60 % 60, s % 60);
  return fmt::format("{}:{:02}", s / 60, s % 60);
}

std::string format_count(double value) {
  if (value >= 999.95e6) return fmt::format("{:.1f}G", value / 1e9);
  if (value >= 999.95e3) return fmt::format("{:.1f}M", value / 1e6);
  if (value >= 999.5) return fmt::format("{:.1f}k", value / 1e3);
  return fmt::format("{:.0f}", value);
}

std::string format_bytes(double bytes) {
  if (bytes >= 1023.95 * 0x1p20) return fmt::format("{:.2f} GiB", bytes / 0x1p30);
  if (bytes >= 1023.95 * 0x1p10) return fmt::format("{:.1f} MiB", bytes / 0x1p20);
  if (bytes >= 1023.5) return fmt::format("{:.1f} KiB", bytes / 0x1p10);
  return fmt::format("{:.0f} bytes", bytes);
}

std::string progress_line(const Progress& p, int width) {
  const double share =
      p.total > 0 ? std::clamp(static_cast<double>(p.done) / static_cast<double>(p.total), 0.0, 1.0) : 0.0;
  std::string facts = fmt::format(" {:3.0f}%  step {}/{}", std::floor(share * 100), p.done, p.total);
  if (p.done > 0) facts += fmt::format("  loss {:.4f}  {} tok/s", p.loss, format_count(p.tokens_per_second));
  if (p.seconds_left >= 0) facts += fmt::format("  {} left", format_duration(p.seconds_left));
  const int room = width - static_cast<int>(facts.size()) - 2;
  if (room >= 8) {
    const int cells = std::min(room, 40);
    const int full = static_cast<int>(share * cells);
    facts = fmt::format("[{:#<{}}{:.<{}}]{}", "", full, "", cells - full, facts);
  } else {
    facts.erase(0, 1);
  }
  if (static_cast<int>(facts.size()) > width) facts.resize(static_cast<size_t>(std::max(width, 0)));
  return facts;
}

bool is_terminal(int fd) { return ::isatty(fd) == 1; }

bool can_redraw(int fd) {
  const auto value_of = [](const char* name) {
    const char* value = std::getenv(name);
    return std::string_view(value == nullptr ? "" : value);
  };
  const std::string_view term = value_of("TERM");
  return is_terminal(fd) && !term.empty() && term != "dumb" && value_of("NO_COLOR").empty();
}

int terminal_width(int fd) {
  winsize size{};
  if (::ioctl(fd, TIOCGWINSZ, &size) != 0 || size.ws_col == 0) return 80;
  return size.ws_col;
}

void ProgressBar::put(const std::string& text) const {
  // A terminal that goes away must not end a run: what cannot be drawn is dropped.
  size_t at = 0;
  while (at < text.size()) {
    const ssize_t n = ::write(fd_, text.data() + at, text.size() - at);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return;
    at += static_cast<size_t>(n);
  }
}

void ProgressBar::show(const Progress& progress) {
  if (!live_) return;
  draw(progress_line(progress, terminal_width(fd_) - 1));
}

void ProgressBar::draw(const std::string& line) {
  if (!live_) return;
  put("\r\033[K" + line.substr(0, static_cast<size_t>(std::max(terminal_width(fd_) - 1, 1))));
  drawn_ = true;
}

void ProgressBar::clear() {
  if (drawn_) put("\r\033[K");
  drawn_ = false;
}

}  // namespace fw
