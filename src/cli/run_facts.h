// What the run file of a run says of it, for tables and pictures of several runs.
#pragma once

#include <string>

#include "report/curves.h"

namespace fw::cli {

// Fills rule, facts (the program that made the run, and the keys of config.toml but for those of folders and of what is
// logged) and group (all keys but the seed) of a run. Where the folder has no run file that can be read, nothing.
void add_facts(const std::string& folder, RunCurve& curve);
// The build that made the run in a folder ("fastweight 0.2.0, commit 0123abcd"); "" where its run file names none.
std::string program_of_run(const std::string& folder);

}  // namespace fw::cli
