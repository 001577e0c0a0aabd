#include "model/known_tensors.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <optional>
#include <variant>
#include <vector>

#include "base/error.h"
#include "base/printable.h"

namespace fw {
namespace {

struct RotaryChannels {
  double theta = 0;
  int64_t channels = 0;
};

std::optional<RotaryChannels> rotation_of(const ModelConfig& config, int64_t layer) {
  const MixerSpec spec = config.layer_spec(layer);
  if (const auto* attention = std::get_if<AttentionSpec>(&spec)) {
    if (attention->rope_theta > 0 && attention->rotated > 0)
      return RotaryChannels{attention->rope_theta, attention->rotated};
  } else if (const auto* recurrent = std::get_if<RecurrentMixerSpec>(&spec)) {
    if (recurrent->query_key.rope_theta > 0)
      return RotaryChannels{recurrent->query_key.rope_theta, recurrent->query_key.key_dim};
  }
  return std::nullopt;
}

// The layers that a name speaks of: the one after "layers.", or all.
std::vector<int64_t> layers_of(const std::string& name, int64_t count) {
  constexpr std::string_view kLayers = "layers.";
  const size_t at = name.find(kLayers);
  std::vector<int64_t> layers;
  if (at == std::string::npos) {
    for (int64_t i = 0; i < count; ++i) layers.push_back(i);
    return layers;
  }
  int64_t layer = -1;
  const char* begin = name.data() + at + kLayers.size();
  const auto [end, error] = std::from_chars(begin, name.data() + name.size(), layer);
  if (error == std::errc() && end != name.data() + name.size() && *end == '.' && layer >= 0 && layer < count)
    layers.push_back(layer);
  return layers;
}

// What rounding of the file's type, and of a table that was made in float32, does to a value.
double tolerance(const std::string& dtype, bool of_angles) {
  const double rounding = dtype == "BF16" ? 0x1p-8 : dtype == "F16" ? 0x1p-10 : 1e-5;
  return of_angles ? std::max(rounding, 2e-3) : rounding;  // an angle of thousands has lost three digits of float32
}

}  // namespace

bool is_rotary_table(const ModelFiles& files, const std::string& name, const ModelConfig& config) {
  const std::string what = name.substr(name.rfind('.') + 1);
  const bool frequencies = what == "inv_freq";
  if (!frequencies && what != "cos_cached" && what != "sin_cached") return false;
  const TensorInfo& info = files.tensors().at(name);
  if (info.count() == 0) return false;
  std::vector<double> values(static_cast<size_t>(info.count()));
  files.read<double>(name, info.shape, values);
  const int64_t width = info.shape.empty() ? 1 : info.shape.back();
  const double bound = tolerance(info.dtype, !frequencies);
  bool known = false;
  for (const int64_t layer : layers_of(name, config.num_hidden_layers)) {
    const std::optional<RotaryChannels> rotation = rotation_of(config, layer);
    if (!rotation) continue;
    known = true;
    const int64_t half = rotation->channels / 2;
    const auto differs = [&](const std::string& expected) {
      fail_usage(
          "'{}': tensor '{}': expected the rotary table of theta = {} over {} channels, which the configuration says "
          "({}), got another: correct rope_theta in "
          "config.json",
          files.name(), excerpt(name), rotation->theta, rotation->channels, expected);
    };
    if (width != half && (frequencies || width != 2 * half)) differs(fmt::format("{} values, not {}", half, width));
    if (frequencies && info.count() != half) differs(fmt::format("{} values, not {}", half, info.count()));
    for (size_t i = 0; i < values.size(); ++i) {
      const auto channel = static_cast<int64_t>(i) % width % half;
      const double position = static_cast<double>(static_cast<int64_t>(i) / width);
      const double frequency =
          std::pow(rotation->theta, -2.0 * static_cast<double>(channel) / static_cast<double>(rotation->channels));
      const double angle = position * frequency;
      const double expected = frequencies ? frequency : what == "cos_cached" ? std::cos(angle) : std::sin(angle);
      const double error = std::abs(values[i] - expected);
      if (!(error <= bound * (frequencies ? expected : 1)))
        differs(fmt::format("value {}: {:.6g}, not {:.6g}", i, expected, values[i]));
    }
  }
  return known;
}

}  // namespace fw
