#include "nn/mixers.h"

namespace fw {
namespace {

template <class T>
struct Make {
  const std::string& prefix;
  Params<Wide<T>>& params;
  std::unique_ptr<Mixer<T>> operator()(const RecurrentMixerSpec& spec) const {
    return std::make_unique<RecurrentMixer<T>>(spec, prefix, params);
  }
  std::unique_ptr<Mixer<T>> operator()(const AttentionSpec& spec) const {
    return std::make_unique<AttentionMixer<T>>(spec, prefix, params);
  }
  std::unique_ptr<Mixer<T>> operator()(const ConvSpec& spec) const {
    return std::make_unique<ConvMixer<T>>(spec, prefix, params);
  }
  std::unique_ptr<Mixer<T>> operator()(const SsdSpec& spec) const {
    return std::make_unique<SsdMixer<T>>(spec, prefix, params);
  }
  std::unique_ptr<Mixer<T>> operator()(const SelectiveSpec& spec) const {
    return std::make_unique<SelectiveMixer<T>>(spec, prefix, params);
  }
  std::unique_ptr<Mixer<T>> operator()(const MesaSpec& spec) const {
    return std::make_unique<MesaMixer<T>>(spec, prefix, params);
  }
  std::unique_ptr<Mixer<T>> operator()(const Rwkv7Spec& spec) const {
    return std::make_unique<Rwkv7Mixer<T>>(spec, prefix, params);
  }
  std::unique_ptr<Mixer<T>> operator()(const Mamba3Spec& spec) const {
    return std::make_unique<Mamba3Mixer<T>>(spec, prefix, params);
  }
  std::unique_ptr<Mixer<T>> operator()(const MlaSpec& spec) const {
    return std::make_unique<MlaMixer<T>>(spec, prefix, params);
  }
};

}  // namespace

template <class T>
std::unique_ptr<Mixer<T>> make_mixer(const MixerSpec& spec, const std::string& prefix, Params<Wide<T>>& params) {
  return std::visit(Make<T>{prefix, params}, spec);
}

template std::unique_ptr<Mixer<float>> make_mixer(const MixerSpec&, const std::string&, Params<float>&);
template std::unique_ptr<Mixer<double>> make_mixer(const MixerSpec&, const std::string&, Params<double>&);
template std::unique_ptr<Mixer<Bf16>> make_mixer(const MixerSpec&, const std::string&, Params<float>&);

}  // namespace fw
