#include "model/sizes.h"

#include <nlohmann/json.hpp>
#include <vector>

#include "base/error.h"
#include "base/nearest.h"
#include "rule/rule.h"

namespace fw {
namespace {

// Parameters with a vocabulary of 32,000 are in tests/model/sizes_test.cpp.
constexpr NamedSize kSizes[] = {
    // name, paper, layers, hidden, heads, head dimension, MLP, tied, gates, rank of a channel decay
    {"340m", "Preconditioned DeltaNet, 340M", 24, 1024, 8, 128, 2816, true, {"none", 0}, {"sigmoid", 128}, 128},
    {"400m", "Kaczmarz Linear Attention, 0.4B", 24, 1024, 8, 128, 2816, false, {"silu", 0}, {"silu", 0}, 128},
    {"1b", "Preconditioned DeltaNet, 1B", 24, 1792, 14, 128, 4864, true, {"none", 0}, {"sigmoid", 128}, 128},
    {"1.3b", "Gated DeltaNet-2, 1.3B without attention", 20, 2048, 16, 128, 5632, false, {"silu", 0}, {"silu", 128}, 128},
};

}  // namespace

std::span<const NamedSize> named_sizes() { return kSizes; }

std::vector<std::string> size_names() {
  std::vector<std::string> names;
  for (const NamedSize& size : kSizes) names.emplace_back(size.name);
  return names;
}

nlohmann::json size_keys(const std::string& name, const std::string& rule) {
  for (const NamedSize& size : kSizes) {
    if (name != size.name) continue;
    const bool channel = parse_rule(rule).decay == Decay::kChannel;
    const NamedSize::Gate& gate = channel ? size.channel_gate : size.gate;
    nlohmann::json keys = {{"num_hidden_layers", size.layers},
                           {"hidden_size", size.hidden},
                           {"num_heads", size.heads},
                           {"head_dim", size.head_dim},
                           {"output_gate", gate.kind},
                           {"output_gate_rank", gate.rank},
                           {"intermediate_size", size.intermediate},
                           {"tie_word_embeddings", size.tied}};
    if (channel) keys["decay_rank"] = size.decay_rank;
    return keys;
  }
  const std::vector<std::string> names = size_names();
  const std::string near = nearest(name, names);
  fail_usage("size: expected one of {}, got '{}'{}", fmt::join(names, ", "), name, near.empty() ? "" : fmt::format("; did you mean '{}'?", near));
}

}  // namespace fw
