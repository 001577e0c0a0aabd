#include "base/nearest.h"

#include <algorithm>
#include <numeric>
#include <utility>
#include <vector>

namespace fw {
namespace {

size_t edit_distance(std::string_view a, std::string_view b) {
  std::vector<size_t> row(b.size() + 1);
  std::iota(row.begin(), row.end(), size_t{0});
  for (size_t i = 1; i <= a.size(); ++i) {
    size_t diagonal = row[0];
    row[0] = i;
    for (size_t j = 1; j <= b.size(); ++j) {
      const size_t change = diagonal + (a[i - 1] == b[j - 1] ? 0 : 1);
      diagonal = row[j];
      row[j] = std::min({row[j] + 1, row[j - 1] + 1, change});
    }
  }
  return row[b.size()];
}

}  // namespace

std::string nearest(std::string_view name, std::span<const std::string> known) {
  std::string best;
  if (name.size() > kLongestName) return best;
  const size_t letters = std::max<size_t>(1, name.size() / 2);  // that may differ
  size_t best_distance = letters + 1, steps = 0;
  for (const std::string& candidate : known) {
    if (candidate.size() > kLongestName || candidate.size() > name.size() + letters ||
        name.size() > candidate.size() + letters)
      continue;
    steps += name.size() * candidate.size();
    if (steps > kMostSteps) break;
    const size_t d = edit_distance(name, candidate);
    if (d < best_distance) {
      best_distance = d;
      best = candidate;
    }
  }
  return best;
}

std::vector<std::string> nearest_few(std::string_view name, std::span<const std::string> known, size_t count) {
  std::vector<std::pair<size_t, std::string>> all;
  size_t steps = 0;
  for (const std::string& candidate : known) {
    if (name.size() > kLongestName || candidate.size() > kLongestName) continue;
    steps += name.size() * candidate.size();
    if (steps > kMostSteps) break;
    all.emplace_back(edit_distance(name, candidate), candidate);
  }
  std::stable_sort(all.begin(), all.end(), [](const auto& a, const auto& b) { return a.first < b.first; });
  std::vector<std::string> names;
  for (size_t i = 0; i < all.size() && i < count; ++i) names.push_back(all[i].second);
  return names;
}

}  // namespace fw
