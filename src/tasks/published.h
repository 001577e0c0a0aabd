// Accuracies that papers publish for these tasks, in per cent, to stand beside ours.
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>

namespace fw {

struct Published {
  double accuracy;  // of the authors' result files; where the paper's own table says otherwise, see `paper`
  double paper;     // < 0: the same
};

// Of a rule or layer on a task at a length of the judgement, trained as the task's recipe says. The paper's Mamba2 is
// Mamba-2's own layer without MLPs: `ssd` with has_mlp = false, not the rule `mamba2`. Single runs (one seed, the best
// of the evaluations at the training length): a difference of less than about a point says nothing. Where the paper's
// table is above its result files the files count.
std::optional<Published> published(std::string_view task, std::string_view layer, bool has_mlp, int64_t length);

}  // namespace fw
