#include "base/seq_layout.h"

#include "base/error.h"

namespace fw {

SeqLayout::SeqLayout(std::vector<int64_t> offsets) : offsets_(std::move(offsets)) {
  if (offsets_.empty() || offsets_.front() != 0) {
    fail_usage("sequence offsets: expected N + 1 values that begin with 0, got {}",
               offsets_.empty() ? std::string("none") : fmt::format("{} first", offsets_.front()));
  }
  for (size_t i = 1; i < offsets_.size(); ++i) {
    if (offsets_[i] < offsets_[i - 1]) {
      fail_usage("sequence offsets: expected values that do not decrease, got {} after {} at index {}", offsets_[i],
                 offsets_[i - 1], i);
    }
  }
}

SeqLayout SeqLayout::uniform(int64_t sequences, int64_t length) {
  std::vector<int64_t> offsets(static_cast<size_t>(sequences) + 1);
  for (size_t i = 0; i < offsets.size(); ++i) offsets[i] = static_cast<int64_t>(i) * length;
  return SeqLayout(std::move(offsets));
}

}  // namespace fw
