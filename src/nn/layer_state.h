// What a mixer remembers of a sequence: it DECLARES the tensors, in order; the model's state (model/state.h) owns,
// forks, saves and loads whatever is declared and hands views of it to each pass.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "nn/recurrence_shape.h"
#include "ops/ops.h"

namespace fw {

enum class StateKind {
  kMatrix,  // a block of values of fixed size: a matrix state, the last inputs of a convolution
  kRing,    // [W, width]: rows of the last W tokens, that of position p at p mod W
  kCache,   // [rows of a page, width]: rows of all tokens, a page more whenever the last is full
};

// What takes tokens back that a pass has read (model/state_drafts.h). Rows of kRing and kCache are taken back by their
// position alone.
enum class TakesBack {
  kNothing,
  kSlots,  // a step of the recurrence leaves the state after each token
  kTail,   // [W - 1, width], the rows of the last tokens
};

struct StateTensor {
  std::string name;  // "s": its name in a file is state.layers.I.s
  StateKind kind = StateKind::kMatrix;
  std::vector<int64_t> shape;  // of one sequence; of one page of a cache
  bool wide = false;           // of the type of statistics (Wide<T>), not of activations
  bool v_first = false;        // [heads, K, V], but on a GPU, where it is [heads, V, K]
  // The recurrence whose matrix states it holds, whose steps may have slots or a ring (decode_ring.h).
  std::optional<RecurrenceShape> recurrence = std::nullopt;
  TakesBack takes_back = TakesBack::kNothing;  // of a kMatrix
  int64_t size() const {
    int64_t n = 1;
    for (const int64_t s : shape) n *= s;
    return n;
  }
};

inline StateTensor tail_tensor(std::string name, int64_t rows, int64_t width) {
  StateTensor tensor{std::move(name), StateKind::kMatrix, {rows, width}};
  tensor.takes_back = TakesBack::kTail;
  return tensor;
}

// of a page: growth is seldom and costs no copy, and an unfinished page wastes little
constexpr int64_t kCacheRows = 256;

// From [.., rows, columns] to [.., columns, rows].
template <class T>
std::vector<T> transposed(const std::vector<T>& values, int64_t rows, int64_t columns) {
  std::vector<T> to(values.size());
  const auto size = static_cast<size_t>(rows * columns);
  for (size_t first = 0; first < values.size(); first += size) {
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t c = 0; c < columns; ++c)
        to[first + static_cast<size_t>(c * rows + r)] = values[first + static_cast<size_t>(r * columns + c)];
    }
  }
  return to;
}

// One declared tensor of N sequences, of the type that the device stores it in.
struct StateView {
  void* data = nullptr;  // kMatrix, kRing: [N, shape]
  int64_t bytes = 0;     // at data
  // kCache: [N, per_sequence] pages, with room for the tokens of the pass
  void* const* table = nullptr;
  int64_t per_sequence = 0, rows = 0, width = 0;  // kRing (one page, at `data`), kCache: as Pages has them
  // Of steps that write no state: the ring [N, HV, step_ring.tokens, ring_width()]; null: none
  void* ring = nullptr;
  StepRing step_ring = {};
  // Of passes with drafts, whose layout has each token as a sequence. `data` is then
  //   of kSlots   the pool of `slots`
  //   of kTail    [N, rows, width], of which row put[t] is for token t, and get[t, per_sequence] are those before it
  // and a kRing has a table with the same page for all tokens of a sequence.
  int64_t draft_tokens = 0;  // of a sequence; 0: another pass
  StepSlots slots = {};
  const int32_t *put = nullptr, *get = nullptr;
  bool operator==(const StateView&) const = default;
};

// All tensors of a layer in the order in which its mixer declared them, updated in place by forward; without state
// (every sequence begins from nothing, final values are not wanted) false.
template <class T>
class LayerState {
 public:
  LayerState() = default;
  LayerState(const StateView* list, int64_t n) : tensors(list), count(n) {}
  const StateView* tensors = nullptr;
  int64_t count = 0;
  explicit operator bool() const { return tensors != nullptr; }
  // Null without state and for index -1: a tensor that this mixer did not declare.
  T* data(int index) const { return static_cast<T*>(at(index).data); }
  Wide<T>* wide(int index) const { return static_cast<Wide<T>*>(at(index).data); }
  // Of a recurrence's states; without a ring null and one of 0 tokens.
  Wide<T>* ring(int index) const { return static_cast<Wide<T>*>(at(index).ring); }
  StepRing step_ring(int index) const { return at(index).step_ring; }
  StepSlots slots(int index) const { return at(index).slots; }
  // Whether the pass has drafts, of which some may be taken back.
  bool has_drafts(int index) const { return at(index).draft_tokens > 0; }
  const StateView& view(int index) const { return at(index); }
  Pages<T> pages(int index) const {
    const StateView& view = at(index);
    // A table of pages is one of pointers, whatever they point to.
    // devices align their memory
    return {static_cast<T*>(view.data),
            reinterpret_cast<T* const*>(view.table),
            view.per_sequence,
            view.rows,
            view.width,
            true};
  }

 private:
  const StateView& at(int index) const {
    static constexpr StateView kNone;
    return tensors == nullptr || index < 0 ? kNone : tensors[index];
  }
};

}  // namespace fw
