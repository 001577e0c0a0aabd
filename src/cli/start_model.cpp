#include "cli/start_model.h"

#include <algorithm>
#include <nlohmann/json.hpp>

#include "base/error.h"
#include "base/file.h"
#include "base/json.h"
#include "cli/model_option.h"
#include "model/interop/hf_config.h"
#include "model/sizes.h"
#include "train/checkpoint.h"

namespace fw::cli {
namespace {

// Configuration and tokenizer of the run's newest checkpoint that has them whole.
StartModel of_checkpoints(const std::string& run) {
  const std::string folder = run + "/checkpoints";
  std::vector<int64_t> newest_first = list_checkpoints(folder);
  std::reverse(newest_first.begin(), newest_first.end());
  std::string damage = "there is none";
  for (const int64_t step : newest_first) {
    const std::string path = checkpoint_path(folder, step), config = path + "/config.json";
    try {
      return {load_tokenizer(path),
              config_from_json(parse_json(read_file(config), "'" + config + "'"), "'" + config + "'"),
              {},
              {},
              {}};
    } catch (const Error& error) {
      damage = error.what();
    }
  }
  fail_usage("--resume: expected a checkpoint with model and tokenizer in '{}': {}", folder, damage);
}

StartModel of_model(const std::string& path) {
  OpenModel open = open_model(path, "f32", "", "cpu", "", LoadFor::kTraining);
  if (!open.adapter.empty())
    fail_usage(
        "--from: expected a model, got adapters '{}': 'fastweight export --merge {} FOLDER' makes a model of them",
        open.adapter, path);
  ModelConfig config = open.model.config();
  return {std::move(open.tokenizer), std::move(config), std::move(open.model), open.folder,
          fmt::format("from      {}\n", open.folder)};
}

// A model that came without a tokenizer speaks ids and takes any; any other keeps its own.
void choose_tokenizer(StartModel& start, const std::string& from, const std::string& spec) {
  if (spec.empty()) return;
  std::shared_ptr<const Tokenizer> given = make_tokenizer(spec);
  if (start.tokenizer->type() != "ids" || given->type() == "ids") {
    if (start.tokenizer->checksum() == given->checksum()) return;
    fail_usage(
        "tokenizer: '{}' was given ({} of {} ids), but the model of --from, '{}', has its own ({} of {} ids): leave "
        "--tokenizer out",
        spec, given->type(), given->vocab_size(), from, start.tokenizer->type(), start.tokenizer->vocab_size());
  }
  if (given->vocab_size() > start.config.vocab_size) {
    fail_usage("tokenizer: '{}' has {} ids, but the model of --from, '{}', has a vocabulary of {}", spec,
               given->vocab_size(), from, start.config.vocab_size);
  }
  start.tokenizer = std::move(given);
}

bool says_the_same(const std::string& key, const std::string& a, const std::string& b) {
  if (a == b) return true;
  if (key == "vocab_size") return a == "0";                  // the tokenizer's, which is the model's
  if (key == "rule") return parse_rule(a) == parse_rule(b);  // a name, or its axes
  return false;
}

void refuse_contradictions(const ModelConfig& wanted, const std::string& from, const Options& options,
                           ModelConfig config) {
  ModelConfig said = wanted;
  const KeyTables ours = key_tables(said), theirs = key_tables(config);
  for (size_t t = 0; t < ours.size(); ++t) {
    for (size_t k = 0; k < ours[t].keys.size(); ++k) {
      const Key& key = ours[t].keys[k];
      const std::string mine = to_text(key.target), its = to_text(theirs[t].keys[k].target);
      if (!options.said(ours[t].name, key.name) || says_the_same(key.name, mine, its)) continue;
      fail_usage(
          "{}.{}: {} was given ({}), but the model of --from, '{}', has {}: leave it out, or train a new model without "
          "--from",
          ours[t].name, key.name, mine, flag_of(ours[t], key), from, its);
    }
  }
}

// num_heads; of the tables inside, mixer.window.num_heads.
std::vector<std::string> said_keys(const ModelConfig& config, const Options& options) {
  ModelConfig copy = config;
  std::vector<std::string> names;
  for (const KeyTable& table : key_tables(copy)) {
    for (const Key& key : table.keys) {
      if (options.said(table.name, key.name))
        names.push_back(table.name == "model" ? key.name : table.name + "." + key.name);
    }
  }
  return names;
}

}  // namespace

void apply_size(const std::string& size, const Options& options, ModelConfig& config) {
  nlohmann::json keys = size_keys(size, config.rule);
  for (const std::string& said : said_keys(config, options)) {
    std::string path = "/" + said;
    std::replace(path.begin(), path.end(), '.', '/');
    const nlohmann::json::json_pointer key(path);
    if (keys.contains(key)) keys[key.parent_pointer()].erase(key.back());
  }
  keys_from_json(key_tables(config), keys, "size", {});
}

void apply_model(const ModelConfig& model, const Options& options, ModelConfig& config) {
  nlohmann::json ours, said = nlohmann::json::object();
  keys_to_json(key_tables(config), ours);
  for (const std::string& name : said_keys(config, options)) {
    std::string path = "/" + name;
    std::replace(path.begin(), path.end(), '.', '/');
    const nlohmann::json::json_pointer key(path);
    said[key] = ours.at(key);
  }
  config = model;
  keys_from_json(key_tables(config), said, "options", {});
}

StartModel start_model(const ModelConfig& wanted, const TrainConfig& train, const DataConfig& data,
                       const Options& options, bool resume) {
  const bool fla = train.layout == "fla";
  if (!train.from.empty()) {
    // A run with LoRA needs it in every process.
    StartModel start = resume && train.lora == 0 ? of_checkpoints(train.out) : of_model(train.from);
    choose_tokenizer(start, train.from, data.tokenizer);
    refuse_contradictions(wanted, train.from, options, start.config);
    if (fla)
      start.note +=
          fmt::format("layout    fla, model_type {}\n", config_to_hf(start.config).value("model_type", "mamba_ssm"));
    return start;
  }
  StartModel start{make_tokenizer(data.tokenizer), wanted, {}, {}, {}};
  if (start.config.vocab_size == 0) start.config.vocab_size = start.tokenizer->vocab_size();
  validate(start.config);
  if (fla) {
    const HfLayout layout = hf_layout(start.config, said_keys(start.config, options));
    start.config = layout.config;
    start.note = fmt::format(
        "layout    fla, {}{}\n", layout.type,
        layout.changes.empty() ? "" : fmt::format(", for which the model has {}", fmt::join(layout.changes, ", ")));
  }
  return start;
}

}  // namespace fw::cli
