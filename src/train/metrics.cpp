#include "train/metrics.h"

#include <cerrno>
#include <charconv>
#include <chrono>
#include <cmath>
#include <functional>
#include <nlohmann/json.hpp>
#include <string_view>
#include <system_error>
#include <vector>

#include "base/error.h"
#include "base/file.h"
#include "base/json.h"

namespace fw {
namespace {

constexpr std::string_view kCsvHeader =
    "step,tokens,loss,norm,lr,ms,tokens_per_second,epoch,skipped,eval_loss,eval_bits_per_byte";

// JSON has no word for numbers that are not finite; null is what plotting tools read as a gap.
std::string json_number(double value) { return std::isfinite(value) ? fmt::format("{:.9g}", value) : "null"; }

std::string json_line(const LogRecord& r) {
  std::string line = fmt::format(
      R"({{"step":{},"tokens":{},"loss":{},"norm":{},"lr":{},"ms":{},"tokens_per_second":{},"epoch":{},"skipped":{})",
      r.step, r.tokens, json_number(r.loss), json_number(r.norm), json_number(r.lr), json_number(r.ms),
      json_number(r.tokens_per_second), json_number(r.epoch), r.skipped);
  if (r.expert_peak >= 0)
    line += fmt::format(R"(,"expert_peak":{},"experts_idle":{})", json_number(r.expert_peak), r.experts_idle);
  if (!(r.eval_loss < 0))
    line += fmt::format(R"(,"eval_loss":{},"eval_bits_per_byte":{})", json_number(r.eval_loss),
                        json_number(r.eval_bits_per_byte));
  return line + "}\n";
}

// "nan" has no sign, whatever the bits say.
std::string csv_number(double value) { return std::isnan(value) ? "nan" : fmt::format("{:.9g}", value); }

std::string csv_line(const LogRecord& r) {
  std::string line = fmt::format("{},{}", r.step, r.tokens);
  for (const double value : {r.loss, r.norm, r.lr, r.ms, r.tokens_per_second, r.epoch}) line += "," + csv_number(value);
  line += fmt::format(",{}", r.skipped);
  if (r.eval_loss < 0) return line + ",,\n";
  return line + fmt::format(",{},{}\n", csv_number(r.eval_loss), csv_number(r.eval_bits_per_byte));
}

std::vector<EventScalar> scalars(const LogRecord& r) {
  std::vector<EventScalar> all = {{"train/loss", r.loss}, {"train/norm", r.norm},
                                  {"lr", r.lr},           {"tokens_per_second", r.tokens_per_second},
                                  {"epoch", r.epoch},     {"skipped", static_cast<double>(r.skipped)}};
  if (r.expert_peak >= 0) all.push_back({"experts/peak", r.expert_peak});
  if (!(r.eval_loss < 0)) {
    all.push_back({"held_out/loss", r.eval_loss});
    if (!std::isnan(r.eval_bits_per_byte)) all.push_back({"held_out/bits_per_byte", r.eval_bits_per_byte});
  }
  return all;
}

// The finished lines of `path` that `keep` accepts; nothing if there is no such file.
std::string kept_lines(const std::string& path, const std::function<bool(std::string_view)>& keep) {
  if (!file_exists(path)) return {};
  const std::string content = read_file(path);
  std::string kept;
  for (size_t begin = 0, end; (end = content.find('\n', begin)) != std::string::npos; begin = end + 1) {
    const std::string_view line(content.data() + begin, end - begin);
    if (keep(line)) kept.append(line).push_back('\n');
  }
  return kept;
}

// -1: the line is no record.
int64_t json_step(std::string_view line) {
  try {
    const nlohmann::json record = parse_json(line, "metrics");
    if (!record.is_object()) return -1;
    const auto found = record.find("step");
    return found != record.end() && found->is_number_integer() ? found->get<int64_t>() : -1;
  } catch (const Error&) {
    return -1;
  }
}

bool csv_step_at_most(std::string_view line, int64_t step) {
  int64_t value = 0;
  const auto [stop, error] = std::from_chars(line.data(), line.data() + line.size(), value);
  return error == std::errc() && stop != line.data() + line.size() && *stop == ',' && value <= step;
}

std::FILE* open_to_append(const std::string& path) {
  std::FILE* file = std::fopen(path.c_str(), "ae");
  if (file == nullptr) fail_io("cannot write '{}': {}", path, std::generic_category().message(errno));
  return file;
}

}  // namespace

int64_t drop_records_after(const std::string& path, int64_t step) {
  if (!file_exists(path)) return -1;
  int64_t last = -1;
  write_file_atomic(path, kept_lines(path, [&](std::string_view line) {
                      const int64_t of_line = json_step(line);
                      const bool keep = of_line >= 0 && of_line <= step;
                      if (keep) last = of_line;
                      return keep;
                    }));
  return last;
}

MetricsLog::MetricsLog(const std::string& folder, int64_t step, bool tensorboard)
    : json_path_(folder + "/metrics.jsonl"), csv_path_(folder + "/metrics.csv") {
  if (!file_exists(json_path_)) write_file_atomic(json_path_, "");
  last_step_ = drop_records_after(json_path_, step);
  // A record that reached only this file, which is written first, is made again.
  const int64_t csv_step = last_step_ == step ? step : step - 1;
  write_file_atomic(csv_path_,
                    fmt::format("{}\n{}", kCsvHeader, kept_lines(csv_path_, [csv_step](std::string_view line) {
                                  return csv_step_at_most(line, csv_step);
                                })));
  json_.reset(open_to_append(json_path_));
  csv_.reset(open_to_append(csv_path_));
  if (tensorboard) {
    make_folders(folder + "/tensorboard");
    events_.emplace(folder + "/tensorboard/events.out.tfevents.fastweight", csv_step);
  }
}

void MetricsLog::append(const LogRecord& record) {
  append_line(csv_, csv_path_, csv_line(record));
  if (events_)
    events_->append(record.step,
                    std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count(),
                    scalars(record));
  append_line(json_, json_path_, json_line(record));
  last_step_ = record.step;
}

void MetricsLog::append_line(const File& file, const std::string& path, const std::string& line) {
  if (std::fwrite(line.data(), 1, line.size(), file.get()) != line.size() || std::fflush(file.get()) != 0) {
    fail_io("cannot write '{}': {}", path, std::generic_category().message(errno));
  }
}

}  // namespace fw
