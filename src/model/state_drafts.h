// StateDrafts: where the tensors of a ModelState lie while N sequences decode with drafts. A pass reads up to M tokens
// of each sequence, and some of them are taken back. What a token leaves has a place by the token's position. So a
// sequence takes tokens back by going on from a smaller position, and nothing is copied.
//   kSlots     [N, M, state]: the state after the token at position p is in slot p mod M
//   kTail      [N, W - 1 + M, width]: the row of position p is row p mod (W - 1 + M)
//   kRing      [N, W - 1 + M, width]: the same of a window of W
//   kCache     as it is
// Whoever else reads or replaces a state stores what is here first, or drops it.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

#include "base/buffer.h"
#include "nn/layer_state.h"

namespace fw {

class StateDrafts {
 public:
  // tokens: M, 1 or more.
  StateDrafts(Device& device, int64_t sequences, int64_t tokens);
  // A place for a tensor of a layer, which may be one of another kind. number_bytes: of one of its numbers.
  void add(size_t layer, size_t tensor, const StateTensor& spec, int64_t number_bytes);
  int64_t tokens() const { return tokens_; }
  size_t bytes() const;

  // The memory of a tensor [N, shape].
  using Values = std::function<std::byte*(size_t layer, size_t tensor)>;
  // Brings the sequences that are not here, which have seen so many tokens.
  void load(const Values& values, const std::vector<int64_t>& positions);
  // What is here goes to where it came from, and is dropped.
  void store(const Values& values, const std::vector<int64_t>& positions);
  // Drops a sequence, or all.
  void clear(int64_t sequence) { here_[static_cast<size_t>(sequence)] = 0; }
  void clear() { std::fill(here_.begin(), here_.end(), 0); }

  // The next pass has `tokens` of each sequence, of which the first is at positions[n].
  void set_positions(int64_t tokens, const std::vector<int64_t>& positions);
  // [N, tokens] in device memory: the positions of the pass.
  const int64_t* positions() const { return reinterpret_cast<const int64_t*>(tables_.data()); }
  // What a pass of `tokens` works on, of a tensor whose view of other passes this is.
  void show(size_t layer, size_t tensor, int64_t tokens, StateView& view);
  // Passes have 1 token or M.
  int64_t pass_index(int64_t tokens) const { return tokens == tokens_ ? 1 : 0; }

 private:
  // Rows of a tensor that a sequence needs of its last tokens.
  struct Part {
    size_t layer = 0, tensor = 0;
    TakesBack takes_back = TakesBack::kNothing;    // kNothing: a window
    int64_t held = 0;                              // rows before a sequence's next token
    int64_t value_rows = 0, rows = 0;              // of a sequence, there and here
    int64_t width = 0, row_bytes = 0, stride = 0;  // bytes, of a row and of a sequence's rows
    Buffer<std::byte> memory;
    std::array<Buffer<void*>, 2> pages;  // of a window, for each kind of pass
  };
  // The numbers of rows that a pass puts and gets, of tails of one size; where they are in the tables, in bytes.
  struct Tails {
    int64_t held = 0, put = 0, get = 0;
  };
  void copy(Part& part, const Values& values, int64_t sequence, int64_t position, bool here);
  const Tails& tails(int64_t held) const;
  template <class Value>
  Value* table(int64_t at) {
    return reinterpret_cast<Value*>(tables_.data() + at);
  }

  Device* device_;
  int64_t sequences_, tokens_;
  std::vector<Part> parts_;
  std::vector<Tails> tails_;
  std::vector<char> here_;  // [N]
  // What changes from pass to pass goes to the device at once: positions [N, M], then int32: slots [N] and [N, M], rows
  // of tails.
  int64_t from_ = 0, to_ = 0;
  std::vector<std::byte> host_tables_;
  Buffer<std::byte> tables_;
};

}  // namespace fw
