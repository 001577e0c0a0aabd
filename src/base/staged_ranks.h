// StagedRanks: the ranks of a Communicator that carries host memory, for the memory of the CUDA device. Memory is
// copied piece by piece to page-locked memory of the host, sent from there, and copied to the other's device. What
// carries a GPU's tensors where nothing below knows GPUs.
#pragma once

#include <memory>

#include "base/communicator.h"
#include "base/device.h"

namespace fw {

class StagedRanks final : public Communicator {
 public:
  static constexpr size_t kStaging = size_t{64} << 20;

  // Both outlive it. `staging`: bytes of host memory for what is sent, and as many for what is received; at least 16
  // for each rank.
  StagedRanks(Communicator& host, Device& device, size_t staging = kStaging);

  int rank() const override { return host_.rank(); }
  int size() const override { return host_.size(); }
  // What was queued on the device before is sent; what is received is there for what is queued after.
  void all_to_all(std::span<const ConstPart> send, std::span<const Part> receive) override;
  void all_gather(std::span<const Part> parts) override;
  void broadcast(Part data, int from) override;
  void barrier() override;

 private:
  std::byte* out(size_t slot) const { return out_.get() + slot * piece_; }
  std::byte* in(size_t slot) const { return in_.get() + slot * piece_; }

  Communicator& host_;
  Device& device_;
  size_t piece_;  // of what one rank sends another at a time
  std::shared_ptr<std::byte> out_, in_;
};

}  // namespace fw
