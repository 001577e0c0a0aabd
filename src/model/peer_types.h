// The types of flash-linear-attention's models (peer.h): how each one's configuration reads as ours and ours as its, and what its parameters are called.
// A new type is a reader, a writer and a line of the table in peer_types.cpp.
#pragma once

#include <array>
#include <cmath>
#include <nlohmann/json.hpp>
#include <span>
#include <string>
#include <utility>

#include "base/error.h"
#include "model/config.h"

namespace fw::peer {

using Json = nlohmann::json;

// The peer's configuration with its defaults: keys that are absent or null have the value that the caller names.
class Keys {
 public:
  Keys(const Json& json, std::string where) : json_(json), where_(std::move(where)) {}

  const Json* find(const char* key) const {
    const auto it = json_.find(key);
    return it == json_.end() || it->is_null() ? nullptr : &*it;
  }
  int64_t whole(const char* key, int64_t standard) const {
    const Json* value = find(key);
    if (value == nullptr) return standard;
    constexpr double kMost = 4e18;
    if (!value->is_number_integer() || std::abs(value->get<double>()) > kMost) fail(key, "a whole number", *value);
    return value->get<int64_t>();
  }
  double number(const char* key, double standard) const {
    const Json* value = find(key);
    if (value == nullptr) return standard;
    if (!value->is_number() || !(std::abs(value->get<double>()) < 1e12)) fail(key, "a number", *value);
    return value->get<double>();
  }
  bool truth(const char* key, bool standard) const {
    const Json* value = find(key);
    if (value == nullptr) return standard;
    if (!value->is_boolean()) fail(key, "true or false", *value);
    return value->get<bool>();
  }
  std::string text(const char* key, const char* standard) const {
    const Json* value = find(key);
    if (value == nullptr) return standard;
    if (!value->is_string()) fail(key, "a string", *value);
    return value->get<std::string>();
  }
  // The layer here computes one value of this key only.
  void must_be(const char* key, const Json& only) const {
    const Json* value = find(key);
    if (value != nullptr && *value != only) fail(key, shown(only) + " (nothing else is computed here)", *value);
  }
  void must_be_absent(const char* key) const {
    const Json* value = find(key);
    if (value != nullptr) fail(key, "null (nothing else is computed here)", *value);
  }
  [[noreturn]] void fail(const char* key, const std::string& expected, const Json& came) const {
    fail_usage("{}: {}: expected {}, got {}", where_, key, expected, shown(came));
  }
  const std::string& where() const { return where_; }

 private:
  const Json& json_;
  std::string where_;
};

// Another name that a peer's type has for one of our parameters; both are parts of a name between dots.
struct Rename {
  const char* ours;
  const char* theirs;
};

// One type of model: its configuration as ours, ours as its, and what its parameters are called.
struct Type {
  const char* name;  // model_type, or that of the mixer (gdn2)
  void (*read)(const Keys&, ModelConfig&);
  void (*write)(const ModelConfig&, Json&);
  std::array<Rename, 2> renames = {};
  // Of the state-space models, which have "backbone" for our "model", "mixer" for "attn": what they call the norm before the mixer.
  const char* norm = nullptr;
  const char* mlp = nullptr;  // of RWKV-7: what they call "mlp"; the norm behind the embedding is then the first layer's "pre_norm"
  bool mamba_ssm = false;     // of state-spaces/mamba: no model_type, an MLP of two tensors, a tied head beside the embedding
};

// All of them. The first that says the same as a model of our own is what it is exported as.
std::span<const Type> types();

// A hybrid: the layers that `attn` names have attention in the mixer's place.
void read_hybrid(const Keys& keys, ModelConfig& c);
void write_hybrid(const ModelConfig& c, Json& json);

// The length of the shortest beginning that repeated to the length gives the whole list.
size_t period(const StringList& list);

}  // namespace fw::peer
