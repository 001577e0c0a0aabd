// Sizes by name: the models of the papers, for `train --size`. THE table is in sizes.cpp; a new size is two lines
// there.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <span>
#include <string>
#include <vector>

namespace fw {

struct NamedSize {
  const char* name;   // "340m"
  const char* paper;  // whose model it is
  bool channel;       // the line of rules with a channel decay, else that of all others
  int64_t layers, hidden, heads, head_dim, intermediate;
  bool tied;  // one matrix for embedding and head
  const char* output_gate;
  int64_t output_gate_rank;  // 0: full
  int64_t decay_rank;        // of a channel decay
  bool hybrid;               // every second layer is a sliding window
};
std::span<const NamedSize> named_sizes();
std::vector<std::string> size_names();

// The size's keys of ModelConfig, those that a model of this rule can have; neither rule nor vocab_size is among them.
// Throws Error(kUsage) for an unknown name, with the nearest.
nlohmann::json size_keys(const std::string& name, const std::string& rule);

}  // namespace fw
