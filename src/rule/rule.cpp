#include "rule/rule.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <cstddef>
#include <iterator>

#include "base/error.h"
#include "base/nearest.h"
#include "base/printable.h"
#include "rule/formula.h"
#include "rule/reserved.h"

namespace fw {
namespace {

// In the order of Gain: names, and formulas where they depend on the key; {} is gain_eps.
struct GainText {
  const char *name, *formula;
};
constexpr GainText kGains[] = {
    {"one", ""},
    {"gate", ""},
    {"kaczmarz", "beta / (|k|^2 + {:g})"},
    {"nlms", "1 / (|k|^2 + {:g})"},
    {"longhorn", "beta / (1 + beta |k|^2)"},
    {"efla", "(1 - exp(-beta |k|^2)) / |k|^2"},
    {"precond_longhorn", "beta / (1 + beta k.(M k))"},
};

std::vector<std::string_view> gain_names() {
  std::vector<std::string_view> names;
  for (const GainText& gain : kGains) names.emplace_back(gain.name);
  return names;
}

#define FW_AXIS(field, type, ...)                                                                                   \
  AxisInfo {                                                                                                        \
#field, {__VA_ARGS__ },                                                                                         \
             [](const Rule& r) { return static_cast<int>(r.field); }, [](Rule & r,                                  \
                                                                         int v) { r.field = static_cast<type>(v); } \
  }

const std::vector<AxisInfo>& axes() {
  static const std::vector<AxisInfo> list = {
      FW_AXIS(decay, Decay, "none", "constant", "scalar", "channel"),
      FW_AXIS(update, Update, "delta", "additive"),
      FW_AXIS(gain, Gain, gain_names()),
      FW_AXIS(erase, Gate, "tied", "channel", "averaged", "scalar"),
      FW_AXIS(write, Gate, "tied", "channel", "averaged", "scalar"),
      FW_AXIS(erase_key, EraseKey, "tied", "own"),
      FW_AXIS(feedback, Feedback, "none", "learned", "fixed"),
      FW_AXIS(read, Read, "plain", "corrected"),
      FW_AXIS(precond, Precond, "none", "diagonal", "read"),
      FW_AXIS(precond_form, PrecondForm, "squash", "squash_low", "squash_high", "inverse", "inverse_previous", "tanh"),
      FW_AXIS(normaliser, Normaliser, "none", "key", "one_plus", "gated"),
      FW_AXIS(q_norm, Norm, "raw", "l2"),
      FW_AXIS(k_norm, Norm, "raw", "l2"),
      FW_AXIS(key_source, KeySource, "given", "decay"),
      FW_AXIS(erase_state, EraseState, "decayed", "previous"),
      FW_AXIS(erase_write, EraseWrite, "tied", "own"),
  };
  return list;
}

#undef FW_AXIS

constexpr std::array<NumberInfo, 7> kNumbers = {{
    {"norm_eps", &Rule::norm_eps},
    {"gain_eps", &Rule::gain_eps},
    {"gain_bound", &Rule::gain_bound},
    {"lambda", &Rule::lambda},
    {"precond_x", &Rule::precond_x},
    {"precond_eps", &Rule::precond_eps},
    {"precond_ridge", &Rule::precond_ridge},
}};

std::string join(const std::vector<std::string_view>& values) {
  std::string text;
  for (std::string_view v : values) text += (text.empty() ? "" : ", ") + std::string(v);
  return text;
}

std::vector<std::string> axis_names() {
  std::vector<std::string> names;
  for (const AxisInfo& a : axes()) names.emplace_back(a.name);
  for (const NumberInfo& n : kNumbers) names.emplace_back(n.name);
  return names;
}

std::string suggestion(std::string_view name, const std::vector<std::string>& known) {
  const std::string near = nearest(name, known);
  return near.empty() ? "" : fmt::format("; did you mean '{}'?", near);
}

// Texts and model files of fastweight 0.1 call the axis `update` solve, and its values online and offline.
void translate_solve(std::string_view& key, std::string_view& value) {
  if (key != "solve") return;
  if (value == "online") {
    value = "delta";
  } else if (value == "offline") {
    value = "additive";
  } else {
    fail_usage("rule: axis solve: expected online or offline (written update=delta or update=additive), got '{}'",
               value);
  }
  key = "update";
}

void set_axis(Rule& rule, std::string_view key, std::string_view value) {
  for (const AxisInfo& axis : axes()) {
    if (axis.name != key) continue;
    const auto it = std::find(axis.values.begin(), axis.values.end(), value);
    if (it == axis.values.end())
      fail_usage("rule: axis {}: expected one of {}, got '{}'", key, join(axis.values), value);
    axis.set(rule, static_cast<int>(it - axis.values.begin()));
    return;
  }
  for (const NumberInfo& number : kNumbers) {
    if (number.name != key) continue;
    double x = 0;
    const auto [end, error] = std::from_chars(value.data(), value.data() + value.size(), x);
    if (error != std::errc() || end != value.data() + value.size())
      fail_usage("rule: {}: expected a number, got '{}'", key, value);
    rule.*number.field = x;
    return;
  }
  fail_usage("rule: unknown axis '{}'{}", key, suggestion(key, axis_names()));
}

void check_range(std::string_view name, double value, double low, double high) {
  if (!(value >= low && value <= high))
    fail_usage("rule: {}: expected {} <= {} <= {}, got {}", name, low, name, high, value);
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
  std::vector<std::string_view> set;
  for (std::string_view word : list) {
    const size_t equals = word.find('=');
    if (equals == std::string_view::npos) fail_usage("rule: expected axis=value, got '{}'", word);
    std::string_view key = word.substr(0, equals), value = word.substr(equals + 1);
    translate_solve(key, value);
    if (std::find(set.begin(), set.end(), key) != set.end())
      fail_usage("rule: axis {}: expected one value, got a second with '{}'", key, word);
    set.push_back(key);
    set_axis(rule, key, value);
  }
}

Preset make_preset(std::string_view name, std::string_view text, std::string_view summary) {
  Rule rule;
  apply_axes(rule, words(text));
  validate(rule);
  return {name, rule, summary};
}

#define FW_PRESET(name, text, summary) make_preset(#name, text, summary),
std::vector<Preset> make_presets() {
  return {
#include "rule/presets.def"
  };
}
std::vector<Preset> make_ablations() {
  return {
#include "rule/ablations.def"
  };
}
#undef FW_PRESET

// The largest value that the preconditioner takes at the write key, its normaliser included, as k.(M k) sees it for a
// key of at most unit length.
double largest_write_factor(const Rule& rule) {
  if (!rule.preconditions_write() || rule.normaliser != Normaliser::kNone) return 1.0;
  return rule.precond_form == PrecondForm::kSquashLow ? 1.0 : rule.precond_x;
}

}  // namespace

void validate(const Rule& rule) {
  for (const AxisInfo& axis : axes()) {
    const int v = axis.get(rule);
    if (v < 0 || v >= static_cast<int>(axis.values.size())) {
      fail_usage("rule: axis {}: expected one of {} (0 to {}), got {}", axis.name, join(axis.values),
                 axis.values.size() - 1, v);
    }
  }
  check_range("norm_eps", rule.norm_eps, 0.0, 1.0);
  check_range("gain_eps", rule.gain_eps, 0.0, 1.0);
  check_range("gain_bound", rule.gain_bound, 0.0, 2.0);
  check_range("lambda", rule.lambda, 0.0, 1.0);
  check_range("precond_eps", rule.precond_eps, 1e-30, 1.0);
  check_range("precond_x", rule.precond_x, 1.0, 2.0);
  check_range("precond_ridge", rule.precond_ridge, 1e-6, 1e6);
  if (!rule.uses_k() && (rule.decay != Decay::kChannel || rule.uses_precond())) {
    fail_usage("rule: expected decay=channel and precond=none with key_source=decay, where k = 1 - exp(g), got '{}'",
               to_string(rule));
  }
  if (!rule.preconditions_write() || !rule.is_delta()) return;
  // 1 - s k.(M k) = 1 / (1 + beta k.(M k)), whatever M is.
  if (rule.gain == Gain::kPrecondLonghorn && rule.erase == Gate::kTied && rule.normaliser == Normaliser::kNone) return;
  if (!rule.precond_squashed() && rule.normaliser == Normaliser::kNone) {
    fail_usage(
        "rule: expected a normaliser (key, one_plus or gated) with precond_form=inverse or inverse_previous at the "
        "write key, got none: "
        "k.(M k) is not bounded without one, and an eigenvalue 1 - s k.(M k) would leave the unit disk");
  }
  const double largest = largest_write_factor(rule);
  if (rule.gain_bound * largest > 2.0) {
    // Rounded down, so that what is advised is accepted.
    const auto below = [](double x) { return std::floor(x * 1e4) / 1e4; };
    fail_usage(
        "rule: expected gain_bound * precond_x <= 2 (an eigenvalue 1 - s k.(M k) must stay in the unit disk), got {:g} "
        "* {:g} = {:g}; lower precond_x to {:g} "
        "or gain_bound to {:g}",
        rule.gain_bound, largest, rule.gain_bound * largest, below(2.0 / rule.gain_bound), below(2.0 / largest));
  }
}

std::span<const AxisInfo> rule_axes() { return axes(); }
std::span<const NumberInfo> rule_numbers() { return kNumbers; }

std::span<const Preset> presets() {
  static const std::vector<Preset> list = make_presets();
  return list;
}

std::span<const Preset> ablations() {
  static const std::vector<Preset> list = make_ablations();
  return list;
}

const Preset& preset(std::string_view name) {
  std::vector<std::string> names;
  for (const std::span<const Preset> list : {presets(), ablations()}) {
    for (const Preset& p : list) {
      if (p.name == name) return p;
      names.emplace_back(p.name);
    }
  }
  std::string near;
  for (const std::string& n : nearest_few(name, names, 3)) near += (near.empty() ? "nearest: " : ", ") + n;
  fail_usage("rule: unknown preset '{}'{} ({}'fastweight rules' lists all)", excerpt(name), suggestion(name, names),
             near.empty() ? "" : near + "; ");
}

std::string gain_formula(const Rule& rule) {
  return fmt::format(fmt::runtime(kGains[static_cast<size_t>(rule.gain)].formula), rule.gain_eps);
}

std::string to_string(const Rule& rule) {
  const Rule standard;
  std::string text;
  const auto add = [&](std::string_view key, const std::string& value) {
    text += fmt::format("{}{}={}", text.empty() ? "" : " ", key, value);
  };
  for (const AxisInfo& axis : axes()) {
    if (axis.get(rule) != axis.get(standard))
      add(axis.name, std::string(axis.values[static_cast<size_t>(axis.get(rule))]));
  }
  for (const NumberInfo& number : kNumbers) {
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

namespace {

// The fields of the C struct in the order of axes() and kNumbers.
constexpr int32_t fw_rule::*kAxisFields[] = {
    &fw_rule::decay,   &fw_rule::update,       &fw_rule::gain,        &fw_rule::erase,
    &fw_rule::write,   &fw_rule::erase_key,    &fw_rule::feedback,    &fw_rule::read,
    &fw_rule::precond, &fw_rule::precond_form, &fw_rule::normaliser,  &fw_rule::q_norm,
    &fw_rule::k_norm,  &fw_rule::key_source,   &fw_rule::erase_state, &fw_rule::erase_write};
constexpr double fw_rule::*kNumberFields[] = {&fw_rule::norm_eps,     &fw_rule::gain_eps,  &fw_rule::gain_bound,
                                              &fw_rule::lambda,       &fw_rule::precond_x, &fw_rule::precond_eps,
                                              &fw_rule::precond_ridge};
static_assert(std::size(kNumberFields) == kNumbers.size());

}  // namespace

Rule from_c(const fw_rule& c) {
  if (c.size != sizeof(c))
    fail_usage(
        "rule: size: expected {}, the bytes of fw_rule, got {}: call fw_rule_init or fw_desc_init before other fields "
        "are set",
        sizeof(c), c.size);
  for (const int64_t x : c.reserved) check_reserved("rule: reserved", x);
  Rule rule;
  for (size_t i = 0; i < std::size(kAxisFields); ++i) axes()[i].set(rule, c.*kAxisFields[i]);
  for (size_t i = 0; i < std::size(kNumberFields); ++i) rule.*kNumbers[i].field = c.*kNumberFields[i];
  validate(rule);
  return rule;
}

fw_rule to_c(const Rule& rule) {
  fw_rule c{};
  c.size = sizeof(c);
  for (size_t i = 0; i < std::size(kAxisFields); ++i) c.*kAxisFields[i] = axes()[i].get(rule);
  for (size_t i = 0; i < std::size(kNumberFields); ++i) c.*kNumberFields[i] = rule.*kNumbers[i].field;
  return c;
}

}  // namespace fw
