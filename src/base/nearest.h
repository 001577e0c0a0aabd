// The known name closest to a misspelt one, for error messages.
#pragma once

#include <cstddef>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace fw {

// By edit distance; "" when nothing is near (more than half of the letters differ).
// Bounded work: names of more than kLongestName bytes are near to none, and after kMostSteps steps the search ends with
// what it has.
inline constexpr size_t kLongestName = 256;
inline constexpr size_t kMostSteps = 50'000'000;
std::string nearest(std::string_view name, std::span<const std::string> known);
// The nearest `count`, however far, the nearest first; none for a name that is too long.
std::vector<std::string> nearest_few(std::string_view name, std::span<const std::string> known, size_t count);

}  // namespace fw
