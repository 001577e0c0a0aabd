#include "model/chosen_rows.h"

#include <algorithm>

namespace fw {

std::optional<ChosenRows> ChosenRows::few_scored(std::span<const int32_t> targets) {
  const auto is_scored = [](int32_t target) { return target >= 0; };
  const auto count = static_cast<size_t>(std::ranges::count_if(targets, is_scored));
  if (count == 0 || 2 * count > targets.size()) return std::nullopt;
  std::vector<int64_t> rows;
  rows.reserve(count);
  for (size_t t = 0; t < targets.size(); ++t) {
    if (is_scored(targets[t])) rows.push_back(static_cast<int64_t>(t));
  }
  return ChosenRows(rows);
}

std::vector<int32_t> ChosenRows::of(std::span<const int32_t> values) const {
  std::vector<int32_t> chosen;
  chosen.reserve(numbers_.size());
  for (const int32_t row : numbers_) chosen.push_back(values[static_cast<size_t>(row)]);
  return chosen;
}

}  // namespace fw
