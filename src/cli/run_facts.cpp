#include "cli/run_facts.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <string_view>

#include "base/error.h"
#include "base/file.h"
#include "cli/options.h"
#include "cli/outputs.h"
#include "cli/recipe.h"
#include "cli/run_config.h"
#include "model/config.h"
#include "train/trainer.h"

namespace fw::cli {
namespace {

// Keys that do not say what a run is.
constexpr std::array<std::string_view, 8> kNoFacts = {"out",         "log_every",        "eval_every", "sample_every",
                                                      "tensorboard", "checkpoint_every", "keep",       "valid_tokens"};

}  // namespace

std::string program_of_run(const std::string& folder) {
  constexpr size_t kMostHead = 400;
  const std::string head = file_start(folder + "/config.toml", kMostHead), line = std::string("\n") + kRunFileProgram;
  const size_t at = head.find(line);
  if (at == std::string::npos) return "";
  const size_t begin = at + line.size();
  return head.substr(begin, head.find('\n', begin) - begin);
}

void add_facts(const std::string& folder, RunCurve& curve) {
  const std::string path = folder + "/config.toml";
  if (!file_exists(path)) return;
  ModelConfig model;
  TrainConfig train;
  DataConfig data;
  Options options;
  options.add(key_tables(data));
  options.add(key_tables(train));
  options.add(key_tables(model));
  model.vocab_size = 0;
  try {
    load_recipe(path, options);
    curve.rule = model.mixers();
  } catch (const Error&) {  // of another version: a run without facts
    return;
  }
  if (const std::string program = program_of_run(folder); !program.empty())
    curve.facts.emplace_back("program", program);
  for (const Option& option : options.entries()) {
    if (option.section == "train" && std::find(kNoFacts.begin(), kNoFacts.end(), option.key) != kNoFacts.end())
      continue;
    const std::string value = to_text(option.target);
    const std::string name =
        option.section.find('.') == std::string::npos ? option.key : fmt::format("{}.{}", option.section, option.key);
    curve.facts.emplace_back(name, value.empty() ? "-" : value);
    if (option.key != "seed") curve.group += fmt::format("{}={}\n", name, value);
  }
}

}  // namespace fw::cli
