// An analysis as JSON, as CSV, and as a table for the terminal. docs/analyze.md describes the two files.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>

#include "analyze/run.h"
#include "report/table.h"

namespace fw {

// bins: of the histograms, at most. Numbers that are none (a mean of nothing) are null.
nlohmann::ordered_json analysis_json(const Analysis& analysis, int64_t bins);
// layer,head,quantity,statistic,x,x_end,value: one number a row.
std::string analysis_csv(const Analysis& analysis, int64_t bins);
// One row for each value head, or for each layer (means over its heads) when there are more than `rows` heads.
Table analysis_table(const Analysis& analysis, int64_t rows = 48);

}  // namespace fw
