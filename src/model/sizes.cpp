#include "model/sizes.h"

#include <nlohmann/json.hpp>
#include <vector>

#include "base/error.h"
#include "base/nearest.h"
#include "rule/rule.h"

namespace fw {
namespace {

// Parameters with a vocabulary of 32,000 are in tests/model/sizes_test.cpp. Where a paper does not give its layers,
// they are those with which the count is the paper's.
constexpr const char *kPreconditioned = "Preconditioned DeltaNet", *kKaczmarz = "Kaczmarz Linear Attention",
                     *kGdn2 = "Gated DeltaNet-2";
constexpr NamedSize kSizes[] = {
    // name, paper, channel decay, layers, hidden, heads, head dimension, MLP, tied, gate, its rank, rank of a channel
    // decay, windows
    {"340m", kPreconditioned, false, 24, 1024, 8, 128, 2816, true, "none", 0, 0, false},
    {"340m", kPreconditioned, true, 24, 1024, 8, 128, 2816, true, "sigmoid", 128, 128, false},
    {"400m", kKaczmarz, false, 24, 1024, 8, 128, 2816, false, "silu", 0, 0, false},
    {"400m", kKaczmarz, true, 24, 1024, 8, 128, 2816, false, "silu", 0, 128, false},
    {"1b", kPreconditioned, false, 24, 1792, 14, 128, 4864, true, "none", 0, 0, false},
    {"1b", kPreconditioned, true, 24, 1680, 14, 120, 4608, true, "sigmoid", 120, 120, false},
    {"1.3b", kGdn2, false, 20, 2048, 16, 128, 5632, false, "silu", 0, 0, false},
    {"1.3b", kGdn2, true, 20, 2048, 16, 128, 5632, false, "silu", 128, 128, false},
    {"1.3b-hybrid", kGdn2, false, 20, 2048, 16, 128, 5632, false, "silu", 0, 0, true},
    {"1.3b-hybrid", kGdn2, true, 20, 2048, 16, 128, 5632, false, "silu", 128, 128, true},
};

}  // namespace

std::span<const NamedSize> named_sizes() { return kSizes; }

std::vector<std::string> size_names() {
  std::vector<std::string> names;
  for (const NamedSize& size : kSizes) {
    if (!size.channel) names.emplace_back(size.name);
  }
  return names;
}

nlohmann::json size_keys(const std::string& name, const std::string& rule) {
  for (const NamedSize& size : kSizes) {
    if (name != size.name || size.channel != (parse_rule(rule).decay == Decay::kChannel)) continue;
    nlohmann::json keys = {{"num_hidden_layers", size.layers},
                           {"hidden_size", size.hidden},
                           {"num_heads", size.heads},
                           {"head_dim", size.head_dim},
                           {"output_gate", size.output_gate},
                           {"output_gate_rank", size.output_gate_rank},
                           {"intermediate_size", size.intermediate},
                           {"tie_word_embeddings", size.tied}};
    if (size.channel) keys["decay_rank"] = size.decay_rank;
    // a window of 2,048 with the model's heads, as a window is
    if (size.hybrid) keys["layers"] = {"recurrent", "window"};
    return keys;
  }
  const std::vector<std::string> names = size_names();
  const std::string near = nearest(name, names);
  fail_usage("size: expected one of {}, got '{}'{}", fmt::join(names, ", "), name,
             near.empty() ? "" : fmt::format("; did you mean '{}'?", near));
}

}  // namespace fw
