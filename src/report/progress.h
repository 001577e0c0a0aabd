// The live line of a run on a terminal: bar, share done, loss, speed, time left.
#pragma once

#include <cstdint>
#include <string>

namespace fw {

struct Progress {
  int64_t done = 0, total = 0;
  double loss = 0;
  double tokens_per_second = 0;
  double seconds_left = -1;  // < 0: unknown
};

// One line of at most `width` characters without a line break: "[#####.....]  50%  step 100/200  loss 1.234  9.8k tok/s
// 1:05 left".
std::string progress_line(const Progress& progress, int width);

// "0:07", "12:05", "1:02:33"
std::string format_duration(double seconds);
// 950, "9.8k", "1.2M"
std::string format_count(double value);
// "11.8 MiB": binary units, which --memory 22G means too.
std::string format_bytes(double bytes);

bool is_terminal(int fd);
// Whether escape sequences may go there: a terminal, TERM names one that knows them (not dumb), and NO_COLOR does not
// ask for none.
bool can_redraw(int fd);
int terminal_width(int fd);  // 80 when it cannot be told

// The line on the terminal `fd`: draws over itself, vanishes when other text is to be written. Does nothing where
// can_redraw() says no.
class ProgressBar {
 public:
  explicit ProgressBar(int fd) : fd_(fd), live_(can_redraw(fd)) {}
  ~ProgressBar() { clear(); }
  ProgressBar(const ProgressBar&) = delete;
  ProgressBar& operator=(const ProgressBar&) = delete;
  bool live() const { return live_; }
  void show(const Progress& progress);
  void draw(const std::string& line);  // cut to the width
  void clear();

 private:
  void put(const std::string& text) const;
  int fd_;
  bool live_;
  bool drawn_ = false;
};

}  // namespace fw
