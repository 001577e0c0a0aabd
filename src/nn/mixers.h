// The kinds of mixer that a layer can have, each by its specification. Everything above asks here and knows no kind: a
// new one is a member of the variant and a case in mixers.cpp.
#pragma once

#include <memory>
#include <string>
#include <variant>
#include <vector>

#include "nn/attention_mixer.h"
#include "nn/conv_mixer.h"
#include "nn/mamba3_mixer.h"
#include "nn/mesa_mixer.h"
#include "nn/mixer.h"
#include "nn/mla_mixer.h"
#include "nn/recurrent_mixer.h"
#include "nn/rwkv7_mixer.h"
#include "nn/selective_mixer.h"
#include "nn/ssd_mixer.h"

namespace fw {

using MixerSpec = std::variant<RecurrentMixerSpec, AttentionSpec, ConvSpec, SsdSpec, SelectiveSpec, MesaSpec, Rwkv7Spec,
                               Mamba3Spec, MlaSpec>;

// In order of declaration, names with `prefix` before them; no memory is allocated for values.
inline std::vector<ParamSpec> mixer_parameters(const MixerSpec& spec, const std::string& prefix) {
  return std::visit([&](const auto& s) { return mixer_parameters(s, prefix); }, spec);
}
inline std::vector<StateTensor> mixer_state(const MixerSpec& spec) {
  return std::visit([](const auto& s) { return mixer_state(s); }, spec);
}
// Declares its parameters.
template <class T>
std::unique_ptr<Mixer<T>> make_mixer(const MixerSpec& spec, const std::string& prefix, Params<Wide<T>>& params);

}  // namespace fw
