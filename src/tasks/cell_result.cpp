#include "tasks/cell_result.h"

#include <cmath>
#include <nlohmann/json.hpp>

#include "base/error.h"
#include "base/json.h"

namespace fw {
namespace {

using nlohmann::json;

double number(const json& value) { return value.is_null() ? std::nan("") : value.get<double>(); }

// "recipe.steps (there: 100, here: 200)" of the first setting that differs; "" when all are the same.
std::string first_difference(const json& there, const json& here, const std::string& path = {}) {
  if (there.is_object() && here.is_object()) {
    for (const auto& [key, value] : here.items()) {
      const std::string inside = path.empty() ? key : fmt::format("{}.{}", path, key);
      if (!there.contains(key)) return fmt::format("{} (there: missing, here: {})", inside, shown(value));
      if (std::string difference = first_difference(there.at(key), value, inside); !difference.empty())
        return difference;
    }
    return {};
  }
  return there == here ? "" : fmt::format("{} (there: {}, here: {})", path, shown(there), shown(here));
}

}  // namespace

json curve_to_json(const std::vector<TaskPoint>& curve) {
  json points = json::array();
  for (const TaskPoint& p : curve) points.push_back({{"step", p.step}, {"loss", p.loss}, {"accuracy", p.accuracy}});
  return points;
}

std::vector<TaskPoint> curve_from_json(const json& points, const std::string& where) {
  std::vector<TaskPoint> curve;
  if (!points.is_array()) fail_usage("{}: expected a curve, an array of points, got {}", where, shown(points));
  try {
    for (const json& p : points)
      curve.push_back({p.at("step").get<int64_t>(), number(p.at("loss")), p.at("accuracy").get<double>()});
  } catch (const json::exception& error) {
    fail_usage("{}: expected a curve, an array of points, got something else: {}", where, error.what());
  }
  return curve;
}

json settings_to_json(const std::string& task, TaskRecipe recipe, const ModelConfig& model, double lr, uint64_t seed) {
  json settings{
      {"task", task}, {"lr", lr}, {"seed", seed}, {"recipe", json::object()}, {"model", config_to_json(model)}};
  keys_to_json(key_tables(recipe), settings["recipe"]);
  return settings;
}

// Keys that a recipe of an earlier version did not have are what they are without being said.
std::string settings_difference(const json& there, const json& here, const std::string& where) {
  if (!there.is_object()) fail_usage("{}: expected the settings of a cell, got {}", where, shown(there));
  json complete = there;
  json& said = complete["recipe"];
  if (said.is_null()) said = json::object();
  if (!said.is_object()) fail_usage("{}: expected the keys of a recipe, got {}", where, shown(said));
  TaskRecipe recipe;
  keys_from_json(key_tables(recipe), said, where, {});
  keys_to_json(key_tables(recipe), said);
  return first_difference(complete, here);
}

json to_json(const TaskResult& r) {
  json result = settings_to_json(r.task, r.recipe, r.model, r.lr, r.seed);
  json scores = json::array();
  for (const TaskScore& s : r.scores) {
    scores.push_back({{"length", s.length},
                      {"labels", s.accuracy.labels},
                      {"correct", s.accuracy.correct},
                      {"micro", s.accuracy.micro},
                      {"macro", s.accuracy.macro}});
    if (s.pairs > 0) scores.back()["pairs"] = s.pairs;
    if (s.ceiling >= 0) scores.back()["ceiling"] = s.ceiling;
  }
  result.update({{"rule", r.rule},
                 {"parameters", static_cast<int64_t>(r.parameters)},
                 {"steps", r.steps},
                 {"skipped", r.skipped},
                 {"judged_step", r.judged_step},
                 {"seconds", r.seconds},
                 {"scores", scores},
                 {"curve", curve_to_json(r.curve)},
                 {"provenance", to_json(r.provenance)}});
  return result;
}

TaskResult task_result_from_json(const json& found, const std::string& where) {
  TaskResult r;
  try {
    r.task = found.at("task").get<std::string>();
    r.rule = found.at("rule").get<std::string>();
    keys_from_json(key_tables(r.recipe), found.at("recipe"), where, {});
    r.model = config_from_json(found.at("model"), where);
    r.lr = found.at("lr").get<double>();
    r.seed = found.at("seed").get<uint64_t>();
    r.parameters = found.at("parameters").get<double>();
    r.steps = found.at("steps").get<int64_t>();
    r.skipped = found.at("skipped").get<int64_t>();
    r.judged_step = found.at("judged_step").get<int64_t>();
    r.seconds = found.at("seconds").get<double>();
    r.curve = curve_from_json(found.at("curve"), where);
    r.provenance = provenance_from_json(found.value("provenance", json()));  // none in older results
    for (const json& s : found.at("scores")) {
      r.scores.push_back({s.at("length").get<int64_t>(),
                          s.value("pairs", int64_t{0}),
                          {s.at("labels").get<int64_t>(), s.at("correct").get<int64_t>(), s.at("micro").get<double>(),
                           s.at("macro").get<double>()},
                          s.value("ceiling", -1.0)});
    }
  } catch (const json::exception& error) {
    fail_usage("{}: not the result of a task: {}", where, error.what());
  }
  if (r.scores.empty()) fail_usage("{}: not the result of a task: expected at least one of 'scores', got none", where);
  for (const TaskScore& s : r.scores) {
    if (s.length < 1 || s.pairs < 0)
      fail_usage("{}: not the result of a task: expected scores of lengths of at least 1, got {}", where, s.length);
  }
  return r;
}

}  // namespace fw
