#include "cli/info_model.h"

#include <fmt/format.h>

#include <filesystem>
#include <map>

#include "base/error.h"
#include "cli/options.h"
#include "cli/recipe.h"
#include "cli/run_config.h"
#include "model/adapters.h"
#include "model/cost.h"
#include "model/language_model.h"
#include "report/progress.h"
#include "train/memory_plan.h"

namespace fw::cli {
namespace {

// A run file's keys, with the defaults that train has for those that it does not name.
void load_run_file(const std::string& path, ModelConfig& model, TrainConfig& train) {
  DataConfig data;
  Options options;
  options.add(key_tables(data));
  options.add(key_tables(train));
  options.add(key_tables(model));
  model.vocab_size = 0;
  load_recipe(path, options);
  if (model.vocab_size == 0) model.vocab_size = 256;  // bytes, which train takes unless a tokenizer is given
}

}  // namespace

ModelConfig model_of_recipe(const std::string& path, TrainConfig& train) {
  ModelConfig model;
  std::error_code error;
  if (std::filesystem::is_directory(path, error)) {
    const std::string folder = find_model_folder(path);
    model = read_model_config(is_adapter_folder(folder) ? base_of_adapters(folder) : folder);
  } else {
    load_run_file(path, model, train);
  }
  return model;
}

Json model_report(const std::string& path) {
  TrainConfig train;
  const ModelConfig model = model_of_recipe(path, train);
  validate(model);
  const ModelCost cost = cost_of(model, train.length);
  const MemoryPlan memory = plan_memory(model, train);
  const std::vector<std::string> names = recompute_names();
  Json layers = Json::array();
  for (int64_t i = 0; i < model.num_hidden_layers; ++i) layers.push_back(model.layer_rule(i));
  return {{"path", path},
          {"description", describe(model)},
          {"layers", layers},
          {"parameters", static_cast<int64_t>(cost.parameters)},
          {"active_parameters", static_cast<int64_t>(cost.active_parameters)},
          {"batch", train.batch},
          {"length", train.length},
          {"flops_token", cost.flops_token},
          {"flops_attention", cost.flops_attention},
          {"flops_recurrence", cost.flops_recurrence},
          {"state_bytes", static_cast<int64_t>(cost.state_bytes)},
          {"state_bytes_token", static_cast<int64_t>(cost.state_bytes_token)},
          {"device", train.device},
          {"moments", name_of(memory.format)},
          {"recompute", names[static_cast<size_t>(memory.recompute.level)]},
          {"recompute_layers", std::min(memory.recompute.layers, model.num_hidden_layers)},
          {"parameter_bytes", memory.parameters},
          {"gradient_bytes", memory.gradients},
          {"moment_bytes", memory.moments},
          {"operand_bytes", memory.operands},
          {"activation_bytes", memory.activations},
          {"library_bytes", memory.libraries},
          {"step_bytes", memory.total()}};
}

std::string model_text(const Json& report) {
  std::string text;
  const auto line = [&](const char* what, const std::string& value) { text += fmt::format("{:<14}{}\n", what, value); };
  const auto number = [&](const char* key) { return report.at(key).get<double>(); };
  line("model", report.at("description"));
  std::map<std::string, int> kinds;
  for (const Json& layer : report.at("layers")) ++kinds[layer.get<std::string>()];
  std::string layers;
  for (const auto& [kind, count] : kinds) layers += fmt::format("{}{} {}", layers.empty() ? "" : ", ", count, kind);
  line("layers", layers);
  const bool experts = number("active_parameters") < number("parameters");
  line("parameters", fmt::format("{:.0f}", number("parameters")) +
                         (experts ? fmt::format(", {:.0f} active in a token", number("active_parameters")) : ""));
  line("FLOPs a token", fmt::format("{:.4g} forward ({:.3g} of them attention's scores and values, {:.3g} the "
                                    "recurrence), {:.4g} a training step",
                                    number("flops_token"), number("flops_attention"), number("flops_recurrence"),
                                    3 * number("flops_token")));
  line("state",
       fmt::format(
           "{:.0f} bytes a sequence{}", number("state_bytes"),
           number("state_bytes_token") > 0 ? fmt::format(" and {:.0f} a token", number("state_bytes_token")) : ""));
  const auto bytes = [&](const char* key) { return format_bytes(number(key)); };
  line("training step", fmt::format("{} x {} tokens, {}: {} ({:.0f} bytes): parameters {}, gradients {}, moments {}, "
                                    "activations and workspace {}",
                                    report.at("batch").get<int64_t>(), report.at("length").get<int64_t>(),
                                    report.at("device") == "cpu" ? "float32" : "on a GPU", bytes("step_bytes"),
                                    number("step_bytes"), bytes("parameter_bytes"), bytes("gradient_bytes"),
                                    bytes("moment_bytes"), bytes("activation_bytes")));
  return text;
}

}  // namespace fw::cli
