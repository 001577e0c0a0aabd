// The tensors of the C header by the names that the reference has for them.
#pragma once

#include "fastweight/fastweight.h"

namespace fw {

// The tensor of a C struct that stands for a field of the reference; the names are the same.
template <class Struct>
struct NamedTensor {
  const char* name;
  fw_tensor Struct::*tensor;
};

inline constexpr NamedTensor<fw_inputs> kInputTensors[] = {
    {"q", &fw_inputs::q},
    {"k", &fw_inputs::k},
    {"v", &fw_inputs::v},
    {"g", &fw_inputs::g},
    {"beta", &fw_inputs::beta},
    {"lambda", &fw_inputs::lambda},
    {"erase_key", &fw_inputs::erase_key},
    {"erase_gate", &fw_inputs::erase_gate},
    {"write_gate", &fw_inputs::write_gate},
    {"read_correction", &fw_inputs::read_correction},
    {"precond_g", &fw_inputs::precond_g},
    {"precond_beta", &fw_inputs::precond_beta},
    {"precond_center", &fw_inputs::precond_center},
    {"initial_state", &fw_inputs::initial_state},
    {"initial_precond", &fw_inputs::initial_precond},
};
inline constexpr NamedTensor<fw_outputs> kOutputTensors[] = {
    {"o", &fw_outputs::o},
    {"final_state", &fw_outputs::final_state},
    {"final_precond", &fw_outputs::final_precond},
};

}  // namespace fw
