// Run files: TOML whose tables and keys are those of the option table.
#pragma once

#include <string>
#include <vector>

#include "cli/options.h"

namespace fw::cli {

// Sets every target that the file names and the command line did not. Error(kUsage) with file:line for text that is not
// TOML, unknown tables and keys (with the nearest known name) and values of the wrong type.
void load_recipe(const std::string& path, Options& options);

// All keys with their values as they are now: the resolved run file. Of each table first the keys that differ from the
// defaults. Tables of `unused` are left out where no key differs.
std::string to_toml(const Options& options, const std::string& comment, const std::vector<std::string>& unused = {});

// Keys whose values differ between two tables of the same command, as "train.lr: 0.003 -> 0.002".
std::vector<std::string> differences(const Options& before, const Options& now);

}  // namespace fw::cli
