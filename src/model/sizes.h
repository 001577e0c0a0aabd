// Sizes by name: the models of the papers, for `train --size`, and released hybrids. THE tables are in sizes.cpp; a new
// size of a paper is a line for each kind of rule there.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <span>
#include <string>
#include <vector>

namespace fw {

// Which rules a line is for. A rule without a line of its own kind takes that of the kind before.
enum class SizeKind { kAll, kChannelDecay, kChannelGates };

struct NamedSize {
  const char* name;   // "340m"
  const char* paper;  // whose model it is
  SizeKind kind;      // kChannelGates: channel decay and an erase gate of every channel, as gated_deltanet2 has
  int64_t layers, hidden, heads, head_dim, intermediate;
  bool tied;  // one matrix for embedding and head
  const char* output_gate;
  int64_t output_gate_rank;  // 0: full
  int64_t decay_rank;        // of a channel decay; 0: full
  bool hybrid;               // every second layer is a sliding window
};
std::span<const NamedSize> named_sizes();
std::vector<std::string> size_names();

// The size's keys of ModelConfig, those that a model of this rule can have; neither rule nor vocab_size is among them.
// Of a released model all keys, with rule and vocab_size.
// Throws Error(kUsage) for an unknown name, with the nearest.
nlohmann::json size_keys(const std::string& name, const std::string& rule);

}  // namespace fw
