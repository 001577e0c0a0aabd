#include "nn/decode_ring.h"

namespace fw {
namespace {

constexpr double kLeastShare = 0.25;
// At 3.3 TB/s, as steps of an H200 have it (docs/notes/2026-11-ring.md); 8 sequences of 16 heads of 128 x 128 save it.
constexpr double kLeastBytes = 6.5e6;

}  // namespace

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

int64_t ring_by_cost(const RecurrenceShape& shape, int64_t sequences, fw_device device, const RowLimits& rows) {
  if (device != FW_DEVICE_CUDA || !has_ring(shape.rule, device) || sequences <= rows.decode) return 0;
  const int64_t counted = sequences <= rows.swiglu ? kSomeSequences : sequences;
  const double without = step_traffic(shape, 0), saved = without - step_traffic(shape, kRingTokens);
  const double bytes = saved * static_cast<double>(counted * shape.v_heads) * sizeof(float);
  return saved >= kLeastShare * without && bytes >= kLeastBytes ? kRingTokens : 0;
}

int64_t choose_ring(const std::optional<int64_t>& given, const RecurrenceShape& shape, int64_t sequences,
                    fw_device device, const RowLimits& rows) {
  if (!given) return ring_by_cost(shape, sequences, device, rows);
  return has_ring(shape.rule, device) ? *given : 0;
}

}  // namespace fw
