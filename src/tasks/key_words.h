// Words of which needle tasks make their keys (adjective-noun).
#pragma once

#include <span>
#include <string_view>

namespace fw {

std::span<const std::string_view> key_adjectives();
std::span<const std::string_view> key_nouns();

}  // namespace fw
