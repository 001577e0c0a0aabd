// Fuzzes the readers of a sweep's cells (result.json, curve.json): what they let through writes and reads back the
// same, and has the scores that a table shows.
#include <nlohmann/json.hpp>

#include "base/json.h"
#include "fuzz_support.h"
#include "tasks/cell_result.h"

int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using fw::fuzz::require;
  nlohmann::json json;
  fw::fuzz::expect_error_or_nothing(
      [&] { json = fw::parse_json(std::string_view(reinterpret_cast<const char*>(data), size), "input"); });
  fw::fuzz::expect_error_or_nothing([&] {
    const fw::TaskResult result = fw::task_result_from_json(json, "input");
    require(!result.scores.empty(), "a result has scores");
    const nlohmann::json written = fw::to_json(result);
    require(fw::to_json(fw::task_result_from_json(nlohmann::json::parse(written.dump()), "written")).dump() ==
                written.dump(),
            "a result reads back as it was written");
    fw::settings_difference(
        json, fw::settings_to_json(result.task, result.recipe, result.model, result.lr, result.seed), "input");
  });
  fw::fuzz::expect_error_or_nothing(
      [&] { fw::curve_from_json(json.is_object() && json.contains("curve") ? json["curve"] : json, "input"); });
  fw::fuzz::expect_error_or_nothing([&] {
    fw::settings_difference(json.is_object() && json.contains("settings") ? json["settings"] : json,
                            nlohmann::json::object(), "input");
  });
  return 0;
}
