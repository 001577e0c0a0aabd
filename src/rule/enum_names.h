// The names of the C header's constants, for messages. Each switch lists every value: one that it lacks does not
// compile (-Werror=switch). A new enum is one more function here; tests/scan/enum_names_test.cpp compares them with the
// header.
#pragma once

#include <cstdint>
#include <string>

#include "fastweight/fastweight.h"

namespace fw {

// Null for a number that the enum lacks.
#define FW_CASE(name) \
  case name:          \
    return #name;
constexpr const char* enum_name(fw_status value) {
  switch (value) {
    FW_CASE(FW_OK)
    FW_CASE(FW_ERROR_ARGUMENT)
    FW_CASE(FW_ERROR_WORKSPACE)
    FW_CASE(FW_ERROR_MEMORY)
    FW_CASE(FW_ERROR_INTERNAL)
    FW_CASE(FW_ERROR_DEVICE)
  }
  return nullptr;
}
constexpr const char* enum_name(fw_device value) {
  switch (value) {
    FW_CASE(FW_DEVICE_CPU)
    FW_CASE(FW_DEVICE_CUDA)
  }
  return nullptr;
}
constexpr const char* enum_name(fw_dtype value) {
  switch (value) {
    FW_CASE(FW_F32)
    FW_CASE(FW_F64)
    FW_CASE(FW_BF16)
    FW_CASE(FW_F16)
  }
  return nullptr;
}
constexpr const char* enum_name(fw_decay value) {
  switch (value) {
    FW_CASE(FW_DECAY_NONE)
    FW_CASE(FW_DECAY_CONSTANT)
    FW_CASE(FW_DECAY_SCALAR)
    FW_CASE(FW_DECAY_CHANNEL)
  }
  return nullptr;
}
constexpr const char* enum_name(fw_update value) {
  switch (value) {
    FW_CASE(FW_UPDATE_DELTA)
    FW_CASE(FW_UPDATE_ADDITIVE)
  }
  return nullptr;
}
constexpr const char* enum_name(fw_gain value) {
  switch (value) {
    FW_CASE(FW_GAIN_ONE)
    FW_CASE(FW_GAIN_GATE)
    FW_CASE(FW_GAIN_KACZMARZ)
    FW_CASE(FW_GAIN_NLMS)
    FW_CASE(FW_GAIN_LONGHORN)
    FW_CASE(FW_GAIN_EFLA)
    FW_CASE(FW_GAIN_PRECOND_LONGHORN)
  }
  return nullptr;
}
constexpr const char* enum_name(fw_gate value) {
  switch (value) {
    FW_CASE(FW_GATE_TIED)
    FW_CASE(FW_GATE_CHANNEL)
    FW_CASE(FW_GATE_AVERAGED)
    FW_CASE(FW_GATE_SCALAR)
  }
  return nullptr;
}
constexpr const char* enum_name(fw_erase_key value) {
  switch (value) {
    FW_CASE(FW_ERASE_KEY_TIED)
    FW_CASE(FW_ERASE_KEY_OWN)
  }
  return nullptr;
}
constexpr const char* enum_name(fw_erase_state value) {
  switch (value) {
    FW_CASE(FW_ERASE_STATE_DECAYED)
    FW_CASE(FW_ERASE_STATE_PREVIOUS)
  }
  return nullptr;
}
constexpr const char* enum_name(fw_erase_write value) {
  switch (value) {
    FW_CASE(FW_ERASE_WRITE_TIED)
    FW_CASE(FW_ERASE_WRITE_OWN)
  }
  return nullptr;
}
constexpr const char* enum_name(fw_feedback value) {
  switch (value) {
    FW_CASE(FW_FEEDBACK_NONE)
    FW_CASE(FW_FEEDBACK_LEARNED)
    FW_CASE(FW_FEEDBACK_FIXED)
  }
  return nullptr;
}
constexpr const char* enum_name(fw_read value) {
  switch (value) {
    FW_CASE(FW_READ_PLAIN)
    FW_CASE(FW_READ_CORRECTED)
  }
  return nullptr;
}
constexpr const char* enum_name(fw_precond value) {
  switch (value) {
    FW_CASE(FW_PRECOND_NONE)
    FW_CASE(FW_PRECOND_DIAGONAL)
    FW_CASE(FW_PRECOND_READ)
  }
  return nullptr;
}
constexpr const char* enum_name(fw_precond_form value) {
  switch (value) {
    FW_CASE(FW_PRECOND_FORM_SQUASH)
    FW_CASE(FW_PRECOND_FORM_SQUASH_LOW)
    FW_CASE(FW_PRECOND_FORM_SQUASH_HIGH)
    FW_CASE(FW_PRECOND_FORM_INVERSE)
    FW_CASE(FW_PRECOND_FORM_INVERSE_PREVIOUS)
  }
  return nullptr;
}
constexpr const char* enum_name(fw_normaliser value) {
  switch (value) {
    FW_CASE(FW_NORMALISER_NONE)
    FW_CASE(FW_NORMALISER_KEY)
    FW_CASE(FW_NORMALISER_ONE_PLUS)
    FW_CASE(FW_NORMALISER_GATED)
  }
  return nullptr;
}
constexpr const char* enum_name(fw_norm value) {
  switch (value) {
    FW_CASE(FW_NORM_RAW)
    FW_CASE(FW_NORM_L2)
  }
  return nullptr;
}
constexpr const char* enum_name(fw_key_source value) {
  switch (value) {
    FW_CASE(FW_KEY_SOURCE_GIVEN)
    FW_CASE(FW_KEY_SOURCE_DECAY)
  }
  return nullptr;
}
constexpr const char* enum_name(fw_given value) {
  switch (value) {
    FW_CASE(FW_GIVEN_VALUE)
    FW_CASE(FW_GIVEN_SIGMOID)
    FW_CASE(FW_GIVEN_SOFTPLUS)
    FW_CASE(FW_GIVEN_LOWER_BOUND)
    FW_CASE(FW_GIVEN_LOGSIGMOID)
  }
  return nullptr;
}
constexpr const char* enum_name(fw_form value) {
  switch (value) {
    FW_CASE(FW_FORM_AUTO)
    FW_CASE(FW_FORM_TOKEN)
    FW_CASE(FW_FORM_CHUNK)
  }
  return nullptr;
}
constexpr const char* enum_name(fw_state_layout value) {
  switch (value) {
    FW_CASE(FW_STATE_K_FIRST)
    FW_CASE(FW_STATE_V_FIRST)
  }
  return nullptr;
}
constexpr const char* enum_name(fw_seqlens_memory value) {
  switch (value) {
    FW_CASE(FW_SEQLENS_HOST)
    FW_CASE(FW_SEQLENS_DEVICE)
  }
  return nullptr;
}
constexpr const char* enum_name(fw_skipped value) {
  switch (value) {
    FW_CASE(FW_SKIPPED_KEPT)
    FW_CASE(FW_SKIPPED_ZERO)
  }
  return nullptr;
}
#undef FW_CASE

// The name of a field's value, or the number where the enum has none.
template <class Enum>
std::string enum_text(int32_t value) {
  const char* name = enum_name(static_cast<Enum>(value));
  return name != nullptr ? name : std::to_string(value);
}

}  // namespace fw
