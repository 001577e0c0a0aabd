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
#define FW_TOKEN(name, heads, width, used) {#name, &fw_inputs::name},
#include "rule/tokens.def"
    {"precond_center", &fw_inputs::precond_center},
    {"initial_state", &fw_inputs::initial_state},
    {"initial_precond", &fw_inputs::initial_precond},
    {"a_log", &fw_inputs::a_log},
    {"dt_bias", &fw_inputs::dt_bias},
    {"precond_a_log", &fw_inputs::precond_a_log},
    {"precond_dt_bias", &fw_inputs::precond_dt_bias},
};
inline constexpr NamedTensor<fw_outputs> kOutputTensors[] = {
    {"o", &fw_outputs::o},
    {"final_state", &fw_outputs::final_state},
    {"final_precond", &fw_outputs::final_precond},
};

}  // namespace fw
