#include "model/state_rings.h"

#include <algorithm>

#include "nn/recurrence.h"

namespace fw {

template <class T>
StateRings<T>::StateRings(Device& device, int64_t sequences, int64_t tokens)
    : device_(&device),
      sequences_(sequences),
      tokens_(tokens),
      positions_(device, sequences),
      held_(static_cast<size_t>(sequences)) {
  clear();
}

template <class T>
void StateRings<T>::add(size_t layer, size_t tensor, const RecurrenceShape& shape) {
  Ring& ring = rings_.emplace_back();
  ring.layer = layer, ring.tensor = tensor;
  ring.shape = shape;
  ring.shape.ring = {tokens_, positions_.data()};
  ring.rows = Buffer<T>(*device_, sequences_ * shape.v_heads * tokens_ * ring_width(shape));
}

template <class T>
size_t StateRings<T>::bytes() const {
  size_t bytes = static_cast<size_t>(positions_.size()) * sizeof(int32_t);
  for (const Ring& ring : rings_) bytes += static_cast<size_t>(ring.rows.size()) * sizeof(T);
  return bytes;
}

template <class T>
void StateRings<T>::show(size_t layer, size_t tensor, StateView& view) {
  for (Ring& ring : rings_) {
    if (ring.layer != layer || ring.tensor != tensor) continue;
    view.ring = ring.rows.data();
    view.step_ring = ring.shape.ring;
  }
}

template <class T>
void StateRings<T>::advance() {
  for (int32_t& held : held_) held = (held + 1) % static_cast<int32_t>(tokens_);
}

template <class T>
void StateRings<T>::clear(int64_t sequence) {
  const auto before = static_cast<int32_t>(tokens_ - 1);
  held_[static_cast<size_t>(sequence)] = 0;
  positions_.write(sequence, {&before, 1});
}

template <class T>
void StateRings<T>::clear() {
  std::fill(held_.begin(), held_.end(), 0);
  positions_.write(0, std::vector<int32_t>(held_.size(), static_cast<int32_t>(tokens_ - 1)));
}

template <class T>
void StateRings<T>::fold(const std::function<T*(size_t layer, size_t tensor)>& states_of) {
  if (std::all_of(held_.begin(), held_.end(), [](int32_t held) { return held == 0; })) return;
  positions_.write(0, held_);
  for (Ring& ring : rings_)
    fold_rings(ring.shape, sequences_, states_of(ring.layer, ring.tensor), ring.rows.data(), *device_);
  clear();
}

template class StateRings<float>;
template class StateRings<double>;

}  // namespace fw
