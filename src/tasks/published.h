// Accuracies that papers publish for these tasks, in per cent, to stand beside ours.
#pragma once

#include <cstdint>
#include <optional>

#include "tasks/cell_result.h"

namespace fw {

struct Published {
  double accuracy;  // of the authors' result files; where the paper's own table says otherwise, see `paper`
  double paper;     // < 0: the same
  int digits;       // after the point, as many as are known
};

// The published accuracy at a length of the judgement; none where the paper has no such model or trained it otherwise.
// Compared are the training (length, steps, batch, learning rate, optimizer) and the model (all keys but `init`).
// Which evaluations there are, and which of them is judged, is not compared.
//
// The paper's Mamba2 is Mamba-2's own layer without MLPs: `ssd` with --mlp none, not the rule `mamba2`. All are single
// runs (one seed, the best of the evaluations at the training length): a difference of less than about a point says
// nothing. Where the paper's table is above its result files the files count.
std::optional<Published> published(const TaskResult& result, int64_t length);

}  // namespace fw
