// sweep lm: language models of several rules and layers on one text, at one size, in one table.
#pragma once

#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <string>

#include "cli/command.h"
#include "report/page.h"

namespace fw::cli {

// The word after `sweep` that asks for it.
inline constexpr const char* kLanguageModels = "lm";

std::unique_ptr<Command> sweep_lm_command();

// What results.json of such a sweep holds, for a page of results. Error(kUsage) for another file.
bool is_lm_results(const nlohmann::json& results);
PageSection lm_section(const std::string& title, const nlohmann::json& results);

}  // namespace fw::cli
