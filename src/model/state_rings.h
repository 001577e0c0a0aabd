// StateRings: what N sequences have seen that is not in the matrix states of a ModelState yet. Each recurrence has a
// ring of their last tokens [N, HV, tokens, ring_width()] (nn/decode_ring.h); all rings share one position a sequence.
// A step folds a sequence's ring into its states where the position comes round to 0. fold() does so at any position.
// T: the type of the states.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

#include "base/buffer.h"
#include "nn/layer_state.h"

namespace fw {

template <class T>
class StateRings {
 public:
  // tokens: from fold to fold, 1 or more.
  StateRings(Device& device, int64_t sequences, int64_t tokens);
  // A ring for tensor `tensor` of a layer, the states of this recurrence.
  void add(size_t layer, size_t tensor, const RecurrenceShape& shape);
  bool empty() const { return rings_.empty(); }
  int64_t tokens() const { return tokens_; }
  size_t bytes() const;
  // The ring of a view of this tensor, where it has one.
  void show(size_t layer, size_t tensor, StateView& view);
  // [N] in device memory, for a sampler to count on: where the last token of each sequence is in its rings, tokens - 1
  // before the first.
  int32_t* positions() { return positions_.data(); }
  // A pass has put a token of each sequence into the rings.
  void advance();
  // What the rings hold of a sequence, or of all of them, is dropped.
  void clear(int64_t sequence);
  void clear();
  // All that the rings hold goes into the states, which states_of(layer, tensor) gives.
  void fold(const std::function<T*(size_t layer, size_t tensor)>& states_of);

 private:
  struct Ring {
    size_t layer = 0, tensor = 0;
    RecurrenceShape shape;
    Buffer<T> rows;
  };

  Device* device_;
  int64_t sequences_, tokens_;
  std::vector<Ring> rings_;
  Buffer<int32_t> positions_;
  std::vector<int32_t> held_;  // [N]: tokens in the rings that are not in the states
};

}  // namespace fw
