// info RECIPE: what a model would be and cost, before anything of it is made.
#pragma once

#include <string>

#include "cli/json_output.h"

namespace fw::cli {

// Of a run file, or of the configuration in a model or run folder; Error(kUsage) when it is neither.
Json model_report(const std::string& path);
std::string model_text(const Json& report);

}  // namespace fw::cli
