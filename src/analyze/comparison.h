// Analyses of several runs on one text, gathered. Each quantity has its distribution over all heads, layers and tokens
// of a run, and how it goes with depth. Each run has a panel, all with the same axes. A table of all of them.
#pragma once

#include <string>
#include <vector>

#include "analyze/figures.h"
#include "analyze/run.h"
#include "report/table.h"

namespace fw {

struct NamedAnalysis {
  std::string name;  // of the run, among the others
  Analysis analysis;
};

// NAME: the histograms. NAME_depth: mean and 5% and 95% quantiles (dashed) of every layer. cos_reads and
// cos_reads_depth: both cosines, key's blue, query's red; subspace_overlap_depth: the mean over heads. Runs whose rule
// has no such quantity have no panel; where some runs' bins are logarithmic and others' are not, the former have
// pictures of their own, NAME_log.
std::vector<Figure> comparison_figures(const std::vector<NamedAnalysis>& runs, int64_t bins);

// A row for each quantity, a column for each run: mean, and the quantiles of 5% and 95% after it, over all heads,
// layers and tokens.
Table comparison_table(const std::vector<NamedAnalysis>& runs);

// run,layer,quantity,statistic,value: one number a row; the layer is "all" for all of them together (and "all_log" for
// those with logarithmic bins where a run has both).
std::string comparison_csv(const std::vector<NamedAnalysis>& runs);

}  // namespace fw
