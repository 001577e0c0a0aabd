// The known name closest to a misspelt one, for error messages.
#pragma once

#include <span>
#include <string>
#include <string_view>

namespace fw {

// By edit distance; "" when nothing is near (more than half of the letters differ).
std::string nearest(std::string_view name, std::span<const std::string> known);

}  // namespace fw
