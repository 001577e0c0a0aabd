#include "nn/decode_ring.h"

namespace fw {
bool has_ring(const Rule& rule, fw_device device) {
  return !rule.uses_erase_write() && (device == FW_DEVICE_CPU || !rule.general_erase());
}

double step_traffic(const RecurrenceShape& shape, int64_t ring_tokens) {
  const auto state = static_cast<double>(shape.key_dim * shape.value_dim);
  if (ring_tokens == 0) return 2 * state;
  const auto tokens = static_cast<double>(ring_tokens), row = static_cast<double>(ring_width(shape));
  // From 0 to tokens - 1 rows are read, one is written, and the fold writes the state.
  return state + state / tokens + row * ((tokens - 1) / 2 + 1);
}

int64_t choose_ring(const std::optional<int64_t>& given, const Rule& rule, fw_device device) {
  return given && has_ring(rule, device) ? *given : 0;
}

}  // namespace fw
