#include "rule/rule.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>

#include "base/error.h"
#include "base/nearest.h"

namespace fw {
namespace {

// One axis: its name, its values in order of their numbers, and how to reach the field.
struct Axis {
  std::string_view name;
  std::vector<std::string_view> values;
  int (*get)(const Rule&);
  void (*set)(Rule&, int);
};

#define FW_AXIS(field, type, ...)                                                                                                            \
  Axis {                                                                                                                                     \
#field, {__VA_ARGS__ }, [](const Rule& r) { return static_cast<int>(r.field); }, [](Rule & r, int v) { r.field = static_cast<type>(v); } \
  }

const std::vector<Axis>& axes() {
  static const std::vector<Axis> list = {
      FW_AXIS(decay, Decay, "none", "constant", "scalar", "channel"),
      FW_AXIS(solve, Solve, "online", "offline"),
      FW_AXIS(gain, Gain, "one", "gate", "kaczmarz", "nlms", "longhorn", "efla"),
      FW_AXIS(erase, Gate, "tied", "channel"),
      FW_AXIS(write, Gate, "tied", "channel"),
      FW_AXIS(feedback, Feedback, "none", "learned"),
      FW_AXIS(precond, Precond, "none", "diagonal", "read"),
      FW_AXIS(q_norm, Norm, "raw", "l2"),
      FW_AXIS(k_norm, Norm, "raw", "l2"),
  };
  return list;
}

#undef FW_AXIS

struct Number {
  std::string_view name;
  double Rule::*field;
};

constexpr std::array<Number, 5> kNumbers = {{
    {"norm_eps", &Rule::norm_eps},
    {"gain_eps", &Rule::gain_eps},
    {"gain_bound", &Rule::gain_bound},
    {"precond_x", &Rule::precond_x},
    {"precond_eps", &Rule::precond_eps},
}};

std::string join(const std::vector<std::string_view>& values) {
  std::string text;
  for (std::string_view v : values) text += (text.empty() ? "" : ", ") + std::string(v);
  return text;
}

std::vector<std::string> axis_names() {
  std::vector<std::string> names;
  for (const Axis& a : axes()) names.emplace_back(a.name);
  for (const Number& n : kNumbers) names.emplace_back(n.name);
  return names;
}

std::string suggestion(std::string_view name, const std::vector<std::string>& known) {
  const std::string near = nearest(name, known);
  return near.empty() ? "" : fmt::format("; did you mean '{}'?", near);
}

void set_axis(Rule& rule, std::string_view key, std::string_view value) {
  for (const Axis& axis : axes()) {
    if (axis.name != key) continue;
    const auto it = std::find(axis.values.begin(), axis.values.end(), value);
    if (it == axis.values.end()) fail_usage("rule: axis {}: expected one of {}, got '{}'", key, join(axis.values), value);
    axis.set(rule, static_cast<int>(it - axis.values.begin()));
    return;
  }
  for (const Number& number : kNumbers) {
    if (number.name != key) continue;
    double x = 0;
    const auto [end, error] = std::from_chars(value.data(), value.data() + value.size(), x);
    if (error != std::errc() || end != value.data() + value.size()) fail_usage("rule: {}: expected a number, got '{}'", key, value);
    rule.*number.field = x;
    return;
  }
  fail_usage("rule: unknown axis '{}'{}", key, suggestion(key, axis_names()));
}

void check_range(std::string_view name, double value, double low, double high) {
  if (!(value >= low && value <= high)) fail_usage("rule: {}: expected {} <= {} <= {}, got {}", name, low, name, high, value);
}

// Whitespace-separated words.
std::vector<std::string_view> words(std::string_view text) {
  std::vector<std::string_view> out;
  for (size_t i = 0; i < text.size();) {
    const size_t begin = text.find_first_not_of(" \t\n", i);
    if (begin == std::string_view::npos) break;
    const size_t end = std::min(text.find_first_of(" \t\n", begin), text.size());
    out.push_back(text.substr(begin, end - begin));
    i = end;
  }
  return out;
}

void apply_axes(Rule& rule, std::span<const std::string_view> list) {
  for (std::string_view word : list) {
    const size_t equals = word.find('=');
    if (equals == std::string_view::npos) fail_usage("rule: expected axis=value, got '{}'", word);
    set_axis(rule, word.substr(0, equals), word.substr(equals + 1));
  }
}

std::vector<Preset> make_presets() {
  std::vector<Preset> list;
  const auto add = [&](std::string_view name, std::string_view text, std::string_view summary) {
    Rule rule;
    apply_axes(rule, words(text));
    validate(rule);
    list.push_back({name, rule, summary});
  };
#define FW_PRESET(name, text, summary) add(#name, text, summary);
#include "rule/presets.def"
#undef FW_PRESET
  return list;
}

}  // namespace

void validate(const Rule& rule) {
  for (const Axis& axis : axes()) {
    const int v = axis.get(rule);
    if (v < 0 || v >= static_cast<int>(axis.values.size())) {
      fail_usage("rule: axis {}: expected one of {} (0 to {}), got {}", axis.name, join(axis.values), axis.values.size() - 1, v);
    }
  }
  check_range("norm_eps", rule.norm_eps, 0.0, 1.0);
  check_range("gain_eps", rule.gain_eps, 0.0, 1.0);
  check_range("gain_bound", rule.gain_bound, 0.0, 2.0);
  check_range("precond_eps", rule.precond_eps, 1e-30, 1.0);
  check_range("precond_x", rule.precond_x, 1.0, 2.0);
  if (rule.preconditions_write() && rule.online() && rule.gain_bound * rule.precond_x > 2.0) {
    fail_usage("rule: expected gain_bound * precond_x <= 2 (an eigenvalue 1 - s k.(M k) must stay in the unit disk), got {} * {} = {}; lower precond_x to {}",
               rule.gain_bound, rule.precond_x, rule.gain_bound * rule.precond_x, 2.0 / rule.gain_bound);
  }
}

std::span<const Preset> presets() {
  static const std::vector<Preset> list = make_presets();
  return list;
}

const Preset& preset(std::string_view name) {
  std::vector<std::string> names;
  for (const Preset& p : presets()) {
    if (p.name == name) return p;
    names.emplace_back(p.name);
  }
  std::string all;
  for (const std::string& n : names) all += (all.empty() ? "" : ", ") + n;
  fail_usage("rule: unknown preset '{}'{} (known: {})", name, suggestion(name, names), all);
}

std::string to_string(const Rule& rule) {
  const Rule standard;
  std::string text;
  const auto add = [&](std::string_view key, const std::string& value) { text += fmt::format("{}{}={}", text.empty() ? "" : " ", key, value); };
  for (const Axis& axis : axes()) {
    if (axis.get(rule) != axis.get(standard)) add(axis.name, std::string(axis.values[static_cast<size_t>(axis.get(rule))]));
  }
  for (const Number& number : kNumbers) {
    if (rule.*number.field != standard.*number.field) add(number.name, fmt::format("{}", rule.*number.field));
  }
  return text.empty() ? "decay=none" : text;
}

Rule parse_rule(std::string_view text) {
  const std::vector<std::string_view> list = words(text);
  if (list.empty()) fail_usage("rule: expected a preset's name or axis=value ..., got an empty text");
  Rule rule;
  std::span<const std::string_view> rest(list);
  if (list.front().find('=') == std::string_view::npos) {
    rule = preset(list.front()).rule;
    rest = rest.subspan(1);
  }
  apply_axes(rule, rest);
  validate(rule);
  return rule;
}

Rule from_c(const fw_rule& c) {
  Rule rule;
  const std::array<int32_t, 9> values = {c.decay, c.solve, c.gain, c.erase, c.write, c.feedback, c.precond, c.q_norm, c.k_norm};
  for (size_t i = 0; i < values.size(); ++i) axes()[i].set(rule, values[i]);
  rule.norm_eps = c.norm_eps;
  rule.gain_eps = c.gain_eps;
  rule.gain_bound = c.gain_bound;
  rule.precond_x = c.precond_x;
  rule.precond_eps = c.precond_eps;
  validate(rule);
  return rule;
}

fw_rule to_c(const Rule& rule) {
  fw_rule c{};
  c.size = sizeof(c);
  c.decay = static_cast<int32_t>(rule.decay);
  c.solve = static_cast<int32_t>(rule.solve);
  c.gain = static_cast<int32_t>(rule.gain);
  c.erase = static_cast<int32_t>(rule.erase);
  c.write = static_cast<int32_t>(rule.write);
  c.feedback = static_cast<int32_t>(rule.feedback);
  c.precond = static_cast<int32_t>(rule.precond);
  c.q_norm = static_cast<int32_t>(rule.q_norm);
  c.k_norm = static_cast<int32_t>(rule.k_norm);
  c.norm_eps = rule.norm_eps;
  c.gain_eps = rule.gain_eps;
  c.gain_bound = rule.gain_bound;
  c.precond_x = rule.precond_x;
  c.precond_eps = rule.precond_eps;
  return c;
}

}  // namespace fw
