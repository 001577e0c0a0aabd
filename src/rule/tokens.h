// The list of the recurrence's tensors of tokens (tokens.def) as a value.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string_view>

#include "rule/axes.h"

namespace fw {

// Heads a tensor has, and numbers of a token and head.
enum class TokenHeads { kKey, kValue, kEither };
enum class TokenWidth { kOne, kKey, kValue };

struct TokenSpec {
  std::string_view name;
  TokenHeads heads = TokenHeads::kKey;
  TokenWidth width = TokenWidth::kOne;
  bool used = false;  // by the rule

  constexpr bool one() const { return width == TokenWidth::kOne; }
  // Numbers of a token and head.
  constexpr int64_t channels(int64_t K, int64_t V) const { return one() ? 1 : width == TokenWidth::kKey ? K : V; }
};

#define FW_TOKEN(name, heads, width, used) +1
inline constexpr size_t kTokenTensors = 0
#include "rule/tokens.def"
    ;

// A tensor's number in token_specs().
enum class TokenIndex : size_t {
#define FW_TOKEN(name, heads, width, used) name,
#include "rule/tokens.def"
};

// Whether a tensor holds logarithms of decays.
constexpr bool is_log_decay(std::string_view name) { return name == "g" || name == "precond_g"; }

namespace tokens_detail {

// The enumerators of heads and width have names in common: each is looked up in its own.
struct HeadNames {
  static constexpr TokenHeads kKey = TokenHeads::kKey, kValue = TokenHeads::kValue, kEither = TokenHeads::kEither;
};
struct WidthNames {
  static constexpr TokenWidth kOne = TokenWidth::kOne, kKey = TokenWidth::kKey, kValue = TokenWidth::kValue;
};
#define FW_TOKEN(name, heads, width, used)                                           \
  struct Heads_##name : HeadNames {                                                  \
    static constexpr TokenHeads of([[maybe_unused]] const Rule& r) { return heads; } \
  };                                                                                 \
  struct Width_##name : WidthNames {                                                 \
    static constexpr TokenWidth of([[maybe_unused]] const Rule& r) { return width; } \
  };
#include "rule/tokens.def"

}  // namespace tokens_detail

constexpr std::array<TokenSpec, kTokenTensors> token_specs(const Rule& r) {
  return {{
#define FW_TOKEN(name, heads, width, used) \
  {#name, tokens_detail::Heads_##name::of(r), tokens_detail::Width_##name::of(r), used},
#include "rule/tokens.def"
  }};
}

}  // namespace fw
