// SeqLayout: packed sequences. Tokens of all sequences lie one after the other; sequence n is [offset(n), offset(n+1)).
// One object goes to convolution, preconditioner and recurrence alike, so that all restart at the same places.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace fw {

class SeqLayout {
 public:
  SeqLayout() : offsets_{0} {}
  // offsets: N + 1 values, first 0, not decreasing (empty sequences are legal). Throws Error(kUsage) otherwise.
  explicit SeqLayout(std::vector<int64_t> offsets);
  static SeqLayout uniform(int64_t sequences, int64_t length);

  int64_t count() const { return static_cast<int64_t>(offsets_.size()) - 1; }
  int64_t tokens() const { return offsets_.back(); }
  int64_t begin(int64_t n) const { return offsets_[static_cast<size_t>(n)]; }
  int64_t end(int64_t n) const { return offsets_[static_cast<size_t>(n) + 1]; }
  int64_t length(int64_t n) const { return end(n) - begin(n); }
  // Whether each sequence has one token, as in decoding.
  bool single_tokens() const {
    for (int64_t n = 0; n < count(); ++n) {
      if (length(n) != 1) return false;
    }
    return true;
  }
  const std::vector<int64_t>& offsets() const { return offsets_; }

 private:
  std::vector<int64_t> offsets_;
};

}  // namespace fw
