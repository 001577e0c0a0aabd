// Which options have an effect in a call, as several commands ask it (Options::expect_only).
#pragma once

#include <span>
#include <string>

#include "base/keys.h"
#include "cli/options.h"
#include "model/config.h"

namespace fw::cli {

// The options under a heading of the help, and those of a configuration's keys, as they are on the command line.
StringList flags_under(const Options& options, const std::string& heading);
StringList flags_of(const KeyTables& tables);
StringList operator+(StringList a, const StringList& b);

// --precision is of the CPU: with another device it is Error(kUsage).
void expect_precision_of_cpu(const Options& options, const std::string& device);
// Error(kUsage) for a given option of a model that none of these models reads: of a kind of layer that none has, or of
// a part that others replace.
void expect_options_of_models(const Options& options, std::span<const ModelConfig> models);

}  // namespace fw::cli
