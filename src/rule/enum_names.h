// The names of the C header's constants, for messages. Each switch lists every value: one that it lacks does not
// compile (-Werror=switch). A new enum is one more function here; tests/scan/structs_test.cpp compares them with the
// header.
#pragma once

#include <cstdint>
#include <string>

#include "fastweight/fastweight.h"

namespace fw {

// Null for a number that the enum lacks. Only one up to the last constant becomes the enum: others are not its values.
#define FW_CASE(name) \
  case name:          \
    return #name;
constexpr const char* enum_name(fw_status /*type*/, int64_t number) {
  if (number < 0 || number > FW_ERROR_DEVICE) return nullptr;
  switch (static_cast<fw_status>(number)) {
    FW_CASE(FW_OK)
    FW_CASE(FW_ERROR_ARGUMENT)
    FW_CASE(FW_ERROR_WORKSPACE)
    FW_CASE(FW_ERROR_MEMORY)
    FW_CASE(FW_ERROR_INTERNAL)
    FW_CASE(FW_ERROR_DEVICE)
  }
  return nullptr;
}
constexpr const char* enum_name(fw_device /*type*/, int64_t number) {
  if (number < 0 || number > FW_DEVICE_CUDA) return nullptr;
  switch (static_cast<fw_device>(number)) {
    FW_CASE(FW_DEVICE_CPU)
    FW_CASE(FW_DEVICE_CUDA)
  }
  return nullptr;
}
constexpr const char* enum_name(fw_dtype /*type*/, int64_t number) {
  if (number < 0 || number > FW_F16) return nullptr;
  switch (static_cast<fw_dtype>(number)) {
    FW_CASE(FW_F32)
    FW_CASE(FW_F64)
    FW_CASE(FW_BF16)
    FW_CASE(FW_F16)
  }
  return nullptr;
}
constexpr const char* enum_name(fw_decay /*type*/, int64_t number) {
  if (number < 0 || number > FW_DECAY_CHANNEL) return nullptr;
  switch (static_cast<fw_decay>(number)) {
    FW_CASE(FW_DECAY_NONE)
    FW_CASE(FW_DECAY_CONSTANT)
    FW_CASE(FW_DECAY_SCALAR)
    FW_CASE(FW_DECAY_CHANNEL)
  }
  return nullptr;
}
constexpr const char* enum_name(fw_update /*type*/, int64_t number) {
  if (number < 0 || number > FW_UPDATE_ADDITIVE) return nullptr;
  switch (static_cast<fw_update>(number)) {
    FW_CASE(FW_UPDATE_DELTA)
    FW_CASE(FW_UPDATE_ADDITIVE)
  }
  return nullptr;
}
constexpr const char* enum_name(fw_gain /*type*/, int64_t number) {
  if (number < 0 || number > FW_GAIN_PRECOND_LONGHORN) return nullptr;
  switch (static_cast<fw_gain>(number)) {
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
constexpr const char* enum_name(fw_gate /*type*/, int64_t number) {
  if (number < 0 || number > FW_GATE_SCALAR) return nullptr;
  switch (static_cast<fw_gate>(number)) {
    FW_CASE(FW_GATE_TIED)
    FW_CASE(FW_GATE_CHANNEL)
    FW_CASE(FW_GATE_AVERAGED)
    FW_CASE(FW_GATE_SCALAR)
  }
  return nullptr;
}
constexpr const char* enum_name(fw_erase_key /*type*/, int64_t number) {
  if (number < 0 || number > FW_ERASE_KEY_OWN) return nullptr;
  switch (static_cast<fw_erase_key>(number)) {
    FW_CASE(FW_ERASE_KEY_TIED)
    FW_CASE(FW_ERASE_KEY_OWN)
  }
  return nullptr;
}
constexpr const char* enum_name(fw_erase_state /*type*/, int64_t number) {
  if (number < 0 || number > FW_ERASE_STATE_PREVIOUS) return nullptr;
  switch (static_cast<fw_erase_state>(number)) {
    FW_CASE(FW_ERASE_STATE_DECAYED)
    FW_CASE(FW_ERASE_STATE_PREVIOUS)
  }
  return nullptr;
}
constexpr const char* enum_name(fw_erase_write /*type*/, int64_t number) {
  if (number < 0 || number > FW_ERASE_WRITE_OWN) return nullptr;
  switch (static_cast<fw_erase_write>(number)) {
    FW_CASE(FW_ERASE_WRITE_TIED)
    FW_CASE(FW_ERASE_WRITE_OWN)
  }
  return nullptr;
}
constexpr const char* enum_name(fw_feedback /*type*/, int64_t number) {
  if (number < 0 || number > FW_FEEDBACK_FIXED) return nullptr;
  switch (static_cast<fw_feedback>(number)) {
    FW_CASE(FW_FEEDBACK_NONE)
    FW_CASE(FW_FEEDBACK_LEARNED)
    FW_CASE(FW_FEEDBACK_FIXED)
  }
  return nullptr;
}
constexpr const char* enum_name(fw_read /*type*/, int64_t number) {
  if (number < 0 || number > FW_READ_CORRECTED) return nullptr;
  switch (static_cast<fw_read>(number)) {
    FW_CASE(FW_READ_PLAIN)
    FW_CASE(FW_READ_CORRECTED)
  }
  return nullptr;
}
constexpr const char* enum_name(fw_precond /*type*/, int64_t number) {
  if (number < 0 || number > FW_PRECOND_READ) return nullptr;
  switch (static_cast<fw_precond>(number)) {
    FW_CASE(FW_PRECOND_NONE)
    FW_CASE(FW_PRECOND_DIAGONAL)
    FW_CASE(FW_PRECOND_READ)
  }
  return nullptr;
}
constexpr const char* enum_name(fw_precond_form /*type*/, int64_t number) {
  if (number < 0 || number > FW_PRECOND_FORM_TANH) return nullptr;
  switch (static_cast<fw_precond_form>(number)) {
    FW_CASE(FW_PRECOND_FORM_SQUASH)
    FW_CASE(FW_PRECOND_FORM_SQUASH_LOW)
    FW_CASE(FW_PRECOND_FORM_SQUASH_HIGH)
    FW_CASE(FW_PRECOND_FORM_INVERSE)
    FW_CASE(FW_PRECOND_FORM_INVERSE_PREVIOUS)
    FW_CASE(FW_PRECOND_FORM_TANH)
  }
  return nullptr;
}
constexpr const char* enum_name(fw_normaliser /*type*/, int64_t number) {
  if (number < 0 || number > FW_NORMALISER_GATED) return nullptr;
  switch (static_cast<fw_normaliser>(number)) {
    FW_CASE(FW_NORMALISER_NONE)
    FW_CASE(FW_NORMALISER_KEY)
    FW_CASE(FW_NORMALISER_ONE_PLUS)
    FW_CASE(FW_NORMALISER_GATED)
  }
  return nullptr;
}
constexpr const char* enum_name(fw_norm /*type*/, int64_t number) {
  if (number < 0 || number > FW_NORM_L2) return nullptr;
  switch (static_cast<fw_norm>(number)) {
    FW_CASE(FW_NORM_RAW)
    FW_CASE(FW_NORM_L2)
  }
  return nullptr;
}
constexpr const char* enum_name(fw_key_source /*type*/, int64_t number) {
  if (number < 0 || number > FW_KEY_SOURCE_DECAY) return nullptr;
  switch (static_cast<fw_key_source>(number)) {
    FW_CASE(FW_KEY_SOURCE_GIVEN)
    FW_CASE(FW_KEY_SOURCE_DECAY)
  }
  return nullptr;
}
constexpr const char* enum_name(fw_given /*type*/, int64_t number) {
  if (number < 0 || number > FW_GIVEN_LOGSIGMOID) return nullptr;
  switch (static_cast<fw_given>(number)) {
    FW_CASE(FW_GIVEN_VALUE)
    FW_CASE(FW_GIVEN_SIGMOID)
    FW_CASE(FW_GIVEN_SOFTPLUS)
    FW_CASE(FW_GIVEN_LOWER_BOUND)
    FW_CASE(FW_GIVEN_LOGSIGMOID)
  }
  return nullptr;
}
constexpr const char* enum_name(fw_form /*type*/, int64_t number) {
  if (number < 0 || number > FW_FORM_DECODE) return nullptr;
  switch (static_cast<fw_form>(number)) {
    FW_CASE(FW_FORM_AUTO)
    FW_CASE(FW_FORM_TOKEN)
    FW_CASE(FW_FORM_CHUNK)
    FW_CASE(FW_FORM_DECODE)
  }
  return nullptr;
}
constexpr const char* enum_name(fw_state_layout /*type*/, int64_t number) {
  if (number < 0 || number > FW_STATE_V_FIRST) return nullptr;
  switch (static_cast<fw_state_layout>(number)) {
    FW_CASE(FW_STATE_K_FIRST)
    FW_CASE(FW_STATE_V_FIRST)
  }
  return nullptr;
}
constexpr const char* enum_name(fw_seqlens_memory /*type*/, int64_t number) {
  if (number < 0 || number > FW_SEQLENS_DEVICE) return nullptr;
  switch (static_cast<fw_seqlens_memory>(number)) {
    FW_CASE(FW_SEQLENS_HOST)
    FW_CASE(FW_SEQLENS_DEVICE)
  }
  return nullptr;
}
constexpr const char* enum_name(fw_skipped /*type*/, int64_t number) {
  if (number < 0 || number > FW_SKIPPED_ZERO) return nullptr;
  switch (static_cast<fw_skipped>(number)) {
    FW_CASE(FW_SKIPPED_KEPT)
    FW_CASE(FW_SKIPPED_ZERO)
  }
  return nullptr;
}
#undef FW_CASE

// The name of a field's value, or the number where the enum has none.
template <class Enum>
std::string enum_text(int32_t value) {
  const char* name = enum_name(Enum{}, value);
  return name != nullptr ? name : std::to_string(value);
}

}  // namespace fw
