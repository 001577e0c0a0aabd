// metrics.jsonl and metrics.csv of a run folder: one line a record, flushed line by line. For TensorBoard also an event
// file tensorboard/events.out.tfevents.fastweight (event_file.h), with the tags train/loss, train/norm, lr,
// tokens_per_second, epoch, skipped, experts/peak, held_out/loss and held_out/bits_per_byte.
#pragma once

#include <cstdint>
#include <cstdio>
#include <memory>
#include <optional>
#include <string>

#include "train/event_file.h"
#include "train/trainer.h"

namespace fw {

// Rewrites a file of JSON lines, if it is there, without records after step `step`, which a resumed run writes again,
// without what is no record, and without a last line that has no end. Returns the last record's step; -1: none. Throws
// Error(kIo).
int64_t drop_records_after(const std::string& path, int64_t step);

class MetricsLog {
 public:
  // Opens the files in `folder` to append, after dropping what an earlier run wrote after step `step` (and a last line
  // that it did not finish): a resumed run writes these records again. Throws Error(kIo).
  MetricsLog(const std::string& folder, int64_t step, bool tensorboard = false);
  void append(const LogRecord& record);             // throws Error(kIo)
  int64_t last_step() const { return last_step_; }  // of the last record in the files; -1: none

 private:
  struct Close {
    void operator()(std::FILE* file) const { std::fclose(file); }
  };
  using File = std::unique_ptr<std::FILE, Close>;
  static void append_line(const File& file, const std::string& path, const std::string& line);

  std::string json_path_, csv_path_;
  int64_t last_step_ = -1;
  File json_, csv_;
  std::optional<EventFile> events_;
};

}  // namespace fw
