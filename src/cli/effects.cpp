#include "cli/effects.h"

#include <fmt/format.h>

#include <algorithm>

#include "base/error.h"

namespace fw::cli {

StringList flags_under(const Options& options, const std::string& heading) {
  StringList flags;
  for (const Option& option : options.entries()) {
    if (option.heading == heading) flags.push_back(option.flag);
  }
  return flags;
}

StringList flags_of(const KeyTables& tables) {
  StringList flags;
  for (const KeyTable& table : tables) {
    for (const Key& key : table.keys) flags.push_back(flag_of(table, key));
  }
  return flags;
}

StringList operator+(StringList a, const StringList& b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}

void expect_precision_of_cpu(const Options& options, const std::string& device) {
  if (device != "cpu")
    options.expect_without_effect({"--precision"},
                                  fmt::format("with --device {}, whose matrix products have bf16 operands", device));
}

void expect_options_of_models(const Options& options, std::span<const ModelConfig> models) {
  if (models.empty()) return;
  const auto all = [&](const auto& holds) { return std::all_of(models.begin(), models.end(), holds); };
  ModelConfig any = models.front();
  for (const KeyTable& table : key_tables(any)) {
    const auto lacks = [&](const ModelConfig& model) {
      const std::vector<std::string> unused = unused_tables(model);
      return std::find(unused.begin(), unused.end(), table.name) != unused.end();
    };
    if (!all(lacks)) continue;
    options.expect_without_effect(flags_of({table}), fmt::format("for a model without layers of [{}]", table.name));
  }
  if (all([](const ModelConfig& model) { return model.mlp == "none"; })) {
    options.expect_without_effect({"--intermediate-size", "--hidden-ratio"}, "with --mlp none");
  }
  if (options.given("intermediate_size") && all([](const ModelConfig& model) { return model.intermediate_size > 0; })) {
    options.expect_without_effect({"--hidden-ratio"}, "with --intermediate-size");
  }
}

}  // namespace fw::cli
