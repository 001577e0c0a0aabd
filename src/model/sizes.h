// Sizes by name: the models of the papers, for `train --size`. THE table is in sizes.cpp; a new size is a line there.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <span>
#include <string>
#include <vector>

namespace fw {

struct NamedSize {
  const char* name;   // "340m"
  const char* paper;  // whose model it is
  int64_t layers, hidden, heads, head_dim, intermediate;
  bool tied;  // one matrix for embedding and head
  struct Gate {
    const char* kind;
    int64_t rank;        // 0: full
  } gate, channel_gate;  // on the mixer's output: of rules without and with a channel decay
  int64_t decay_rank;    // of a channel decay
};
std::span<const NamedSize> named_sizes();
std::vector<std::string> size_names();

// The size's keys of ModelConfig, those that a model of this rule can have; neither rule nor vocab_size is among them. Throws
// Error(kUsage) for an unknown name, with the nearest.
nlohmann::json size_keys(const std::string& name, const std::string& rule);

}  // namespace fw
