// A configuration of another program, read key by key. Every key that is asked for is noted, so that finish() finds
// those that no reader knows: a number or a switch among them may change what the model computes and is an error. A
// text is a warning.
#pragma once

#include <initializer_list>
#include <nlohmann/json.hpp>
#include <set>
#include <string>

#include "base/error.h"
#include "base/keys.h"

namespace fw::hf {

using Json = nlohmann::json;

class Keys {
 public:
  // warnings: what finish() has to say that is no error; may be null.
  Keys(const Json& json, std::string where, StringList* warnings = nullptr)
      : json_(json), where_(std::move(where)), warnings_(warnings) {}

  // A key that is absent or null is not there.
  const Json* find(const char* key) const;
  bool has(const char* key) const { return find(key) != nullptr; }
  // Whether the key is there with the value null.
  bool is_null(const char* key) const;
  // These give the value, or `standard` where there is none.
  int64_t whole(const char* key, int64_t standard) const;
  double number(const char* key, double standard) const;
  bool truth(const char* key, bool standard) const;
  std::string text(const char* key, const char* standard) const;

  // Of a key that programs spell differently: the spelling that is there, or the first. Two that are there must have
  // the same value.
  const char* spelling(std::initializer_list<const char*> names) const;
  // The layer here computes one value of this key only.
  void must_be(const char* key, const Json& only) const;
  void must_be_one_of(const char* key, std::initializer_list<const char*> names) const;
  void must_be_absent(const char* key) const;
  // A key that another key decides (num_heads beside head_dim) must say the same.
  void must_agree(const char* key, int64_t value, const std::string& formula) const;
  // Keys that change no number of a model that has its weights: kernels, caches, first values.
  void have_no_effect(std::initializer_list<const char*> keys) const;

  // The object of this key; it must be there. It has a finish() of its own.
  Keys inner(const char* key) const;
  // Error(kUsage) for a key with numbers or switches that no reader looked up and that is in no list.
  void finish() const;

  [[noreturn]] void fail(const char* key, const std::string& expected, const Json& came) const;
  const std::string& where() const { return where_; }
  StringList* warnings() const { return warnings_; }

 private:
  const Json& json_;
  std::string where_;
  StringList* warnings_;
  mutable std::set<std::string> known_;
};

}  // namespace fw::hf
