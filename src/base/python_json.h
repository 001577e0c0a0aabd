// JSON as Python's json module writes it. Infinity, -Infinity and NaN stand bare in it, which JSON does not have.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>
#include <string_view>

namespace fw {

// As parse_json(). A bare Infinity, -Infinity or NaN becomes {"__float__": "Infinity"}, which is how transformers writes the same value.
nlohmann::json parse_python_json(std::string_view text, const std::string& where);

}  // namespace fw
