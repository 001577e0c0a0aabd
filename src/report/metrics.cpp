#include "report/metrics.h"

#include <map>
#include <nlohmann/json.hpp>

#include "base/error.h"
#include "base/file.h"
#include "base/json.h"

namespace fw {

std::vector<MetricPoint> read_metrics(const std::string& path) {
  const std::string text = read_file(path);
  std::map<int64_t, MetricPoint> points;
  int64_t line = 0;
  for (size_t at = 0; at < text.size();) {
    ++line;
    const size_t end = text.find('\n', at);
    if (end == std::string::npos) break;  // no line break: the writer was stopped here
    const std::string_view record(text.data() + at, end - at);
    at = end + 1;
    if (record.empty()) continue;
    const nlohmann::json json = parse_json(record, fmt::format("{}:{}", path, line));
    if (!json.is_object() || !json.contains("step") || !json["step"].is_number_integer()) {
      fail_usage("{}:{}: expected a JSON object with an integer 'step', got '{}'", path, line, record.substr(0, 80));
    }
    MetricPoint point;
    point.step = json["step"].get<int64_t>();
    const auto number = [&](const char* key) -> std::optional<double> {
      const auto it = json.find(key);
      if (it == json.end() || !it->is_number()) return std::nullopt;  // null: not finite, or not measured
      return it->get<double>();
    };
    const auto measured = [&](const char* key) -> std::optional<double> {
      const auto value = number(key);
      return value && *value >= 0 ? value : std::nullopt;
    };
    point.loss = number("loss").value_or(std::numeric_limits<double>::quiet_NaN());
    point.tokens_per_second = number("tokens_per_second").value_or(0);
    point.eval_loss = measured("eval_loss");
    point.eval_bits_per_byte = measured("eval_bits_per_byte");
    point.tokens = number("tokens");
    point.epoch = number("epoch");
    point.lr = number("lr");
    point.norm = number("norm");
    points.erase(points.lower_bound(point.step), points.end());
    points.emplace(point.step, point);
  }
  std::vector<MetricPoint> out;
  out.reserve(points.size());
  for (const auto& [step, point] : points) out.push_back(point);
  return out;
}

}  // namespace fw
