#include "base/arena.h"

#include <algorithm>

#include "base/plan_device.h"

namespace fw {

void* Arena::alloc_bytes(size_t bytes) {
  const size_t alignment = device_->alignment();
  bytes = (std::max<size_t>(bytes, 1) + alignment - 1) / alignment * alignment;
  while (current_ < blocks_.size() && blocks_[current_].used + bytes > blocks_[current_].bytes) {
    // The next block is reused if it is large enough; otherwise it is passed over until the arena is rewound.
    if (current_ + 1 == blocks_.size()) break;
    ++current_;
  }
  if (current_ >= blocks_.size() || blocks_[current_].used + bytes > blocks_[current_].bytes) {
    const size_t size = std::max(block_bytes_, bytes);
    blocks_.push_back(
        {std::unique_ptr<std::byte, Release>(static_cast<std::byte*>(device_->allocate(size)), Release{device_}), size,
         0});
    current_ = blocks_.size() - 1;
  }
  Block& block = blocks_[current_];
  void* p = block.data.get() + block.used;
  block.used += bytes;
  if (auto* plan = dynamic_cast<PlanDevice*>(device_)) plan->note_used(block.data.get(), block.used);
  return p;
}

void* Arena::zeroed_bytes(size_t bytes) {
  void* p = alloc_bytes(bytes);
  device_->fill(p, 0, bytes);
  return p;
}

void Arena::rewind(Mark mark) {
  for (size_t i = mark.block; i < blocks_.size(); ++i) blocks_[i].used = i == mark.block ? mark.used : 0;
  current_ = mark.block;
}

size_t Arena::reserved_bytes() const {
  size_t total = 0;
  for (const Block& b : blocks_) total += b.bytes;
  return total;
}

}  // namespace fw
