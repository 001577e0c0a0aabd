// What 'fastweight eval' does with requests (tasks/request.h): reads them, or makes them of a raw file, scores and
// reports.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>

#include "cli/model_option.h"
#include "cli/options.h"
#include "report/table.h"

namespace fw::cli {

inline constexpr const char* kTasksHeading = "Tasks";  // of their options

struct RequestsToScore {
  std::string task;      // "": all of a file of requests
  std::string requests;  // file of requests, or
  std::string raw;       // a data set's file
  std::string out;       // folder for eval.json and samples.jsonl; "": none
  bool skip_bad = false;
  int64_t max_length = 2048;
  int64_t prefix = -1;
  std::string precision;
};

// Adds the options of these to eval's.
void declare_requests(Options& options, RequestsToScore& what);
// What can be said before a model is loaded. Throws Error(kUsage).
void check_requests(const RequestsToScore& what, const Options& options);
// The scores of its report ("results" of eval.json). Throws nlohmann::json::exception where they are not as it writes
// them.
Table score_table(const nlohmann::json& report);
// Returns the exit code. Throws Error.
int score_requests(OpenModel& open, const RequestsToScore& what, bool json);

}  // namespace fw::cli
