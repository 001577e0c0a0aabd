#include "cli/line_input.h"

#include <poll.h>
#include <unistd.h>

#include <cerrno>
#include <system_error>
#include <utility>

#include "base/error.h"
#include "train/byte_source.h"

namespace fw::cli {

bool LineInput::fill() {
  // A signal between the look at the flag and poll() would otherwise be waited out.
  constexpr int kMilliseconds = 200;
  pollfd input = {STDIN_FILENO, POLLIN, 0};
  while (!stop_) {
    const int ready = ::poll(&input, 1, kMilliseconds);
    if (ready == 0 || (ready < 0 && errno == EINTR)) continue;
    char piece[4096];
    const ssize_t n = ready < 0 ? -1 : ::read(STDIN_FILENO, piece, sizeof piece);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) fail_io("cannot read standard input: {}", std::generic_category().message(errno));
    buffer_.append(piece, static_cast<size_t>(n));
    return n > 0;
  }
  return false;
}

// What every line has in common once it is whole.
bool LineInput::finish(std::string& line, bool any) {
  if (!std::exchange(begun_, true)) drop_byte_order_mark(line, "standard input");
  if (line.ends_with('\r')) line.pop_back();
  return any && !stop_;
}

bool LineInput::next(std::string& line) {
  constexpr size_t kLongest = size_t{64} << 20;
  size_t searched = 0;
  for (;;) {
    const size_t end = buffer_.find('\n', searched);
    if (end != std::string::npos) {
      line = buffer_.substr(0, end);
      buffer_.erase(0, end + 1);
      return finish(line, true);
    }
    searched = buffer_.size();
    if (searched > kLongest)
      fail_usage("standard input: expected lines of at most {} MiB, this one is longer", kLongest >> 20);
    if (!ended_ && fill()) continue;
    ended_ = true;
    line = std::move(buffer_);
    buffer_.clear();
    return finish(line, !line.empty());
  }
}

}  // namespace fw::cli
