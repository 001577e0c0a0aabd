// The metrics of a run, read back from its metrics.jsonl.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace fw {

struct MetricPoint {
  int64_t step = 0;
  double loss = 0;  // nats per token, mean over the interval
  double tokens_per_second = 0;
  std::optional<double> eval_loss = {};  // nats per token of the held-out text
  std::optional<double> eval_bits_per_byte = {};
  std::optional<double> tokens = {}, epoch = {}, lr = {}, norm = {};  // none where the record lacks them
  std::optional<double> accuracy = {};                                // per cent; of tasks
};

// Points in order of step. A last line cut short (the run was killed while writing) is left out, and steps done again
// after a resume replace the earlier ones. Error(kUsage) for a missing file or any other line that is not a metric.
std::vector<MetricPoint> read_metrics(const std::string& path);

}  // namespace fw
