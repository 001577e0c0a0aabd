// Standard input line by line, for conversations and prompts: a signal that asks to stop ends the waiting.
#pragma once

#include <atomic>
#include <string>

namespace fw::cli {

class LineInput {
 public:
  explicit LineInput(const std::atomic<bool>& stop) : stop_(stop) {}
  // The next line without its end, which is \n or \r\n; the first without a byte order mark. False at the end of the
  // input and when `stop` is true. Error(kIo) when it cannot be read, Error(kUsage) for a line beyond 64 MiB.
  bool next(std::string& line);

 private:
  bool fill();
  bool finish(std::string& line, bool any);
  const std::atomic<bool>& stop_;
  std::string buffer_;
  bool ended_ = false, begun_ = false;
};

}  // namespace fw::cli
