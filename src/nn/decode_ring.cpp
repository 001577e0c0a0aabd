#include "nn/decode_ring.h"

namespace fw {

bool has_ring(const Rule& rule, fw_device device) {
  return !rule.uses_erase_write() && (device == FW_DEVICE_CPU || !rule.general_erase());
}

int64_t choose_ring(const std::optional<int64_t>& given, const Rule& rule, fw_device device) {
  return given && has_ring(rule, device) ? *given : 0;
}

}  // namespace fw
