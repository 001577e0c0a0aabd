#include "base/communicator.h"

#include <algorithm>
#include <cstring>

namespace fw {
namespace {

class OneRank : public Communicator {
 public:
  int rank() const override { return 0; }
  int size() const override { return 1; }
  void all_to_all(std::span<const ConstPart> send, std::span<const Part> receive) override {
    if (send[0].bytes > 0) std::memcpy(receive[0].data, send[0].data, send[0].bytes);
  }
  void all_gather(std::span<const Part>) override {}
  void broadcast(Part, int) override {}
  void barrier() override {}
};

}  // namespace

Communicator& one_rank() {
  static OneRank rank;
  return rank;
}

bool any_rank(Communicator& ranks, bool holds) {
  if (ranks.size() == 1) return holds;
  std::vector<char> all(static_cast<size_t>(ranks.size()));
  std::vector<Part> parts;
  parts.reserve(all.size());
  for (char& one : all) parts.push_back({&one, 1});
  all[static_cast<size_t>(ranks.rank())] = holds ? 1 : 0;
  ranks.all_gather(parts);
  return std::any_of(all.begin(), all.end(), [](char one) { return one != 0; });
}

}  // namespace fw
