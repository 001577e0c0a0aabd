// What is made of the commands' tables of options for other programs: completion scripts of three shells, and the man
// page. They are written at build time and installed (cmake/FastweightInstall.cmake), so they have what --help has.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "cli/command.h"

namespace fw::cli {

struct CommandTable {
  std::unique_ptr<Command> command;  // its members are the options' targets
  Options options;
};
std::vector<CommandTable> command_tables();

std::string bash_completion(const std::vector<CommandTable>& tables);
std::string zsh_completion(const std::vector<CommandTable>& tables);
std::string fish_completion(const std::vector<CommandTable>& tables);
// In the man macros of roff, which man and mandoc read.
std::string man_page(const std::vector<CommandTable>& tables);

}  // namespace fw::cli
