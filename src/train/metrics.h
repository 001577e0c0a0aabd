// metrics.jsonl and metrics.csv of a run folder: one line a record, flushed line by line.
#pragma once

#include <cstdint>
#include <cstdio>
#include <memory>
#include <string>

#include "train/trainer.h"

namespace fw {

class MetricsLog {
 public:
  // Opens both files in `folder` to append, after dropping what an earlier run wrote after step `step` (and a last line
  // that it did not finish): a resumed run writes these records again. Throws Error(kIo).
  MetricsLog(const std::string& folder, int64_t step);
  void append(const LogRecord& record);  // throws Error(kIo)

 private:
  struct Close {
    void operator()(std::FILE* file) const { std::fclose(file); }
  };
  using File = std::unique_ptr<std::FILE, Close>;
  static void append_line(const File& file, const std::string& path, const std::string& line);

  std::string json_path_, csv_path_;
  File json_, csv_;
};

}  // namespace fw
