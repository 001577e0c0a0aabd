// Communicator: what the ranks of a run tell each other. A rank is one process (tests: one thread) of several that run
// the same program; all of them make the same calls in the same order, with sizes that agree. Sizes are in bytes,
// memory is what the communicator carries: the host's, or a GPU's.
//
// A call that fails throws Error(kIo), or ends the process where the library below knows nothing else: a run cannot go
// on without one of its ranks.
#pragma once

#include <cstddef>
#include <span>
#include <vector>

namespace fw {

struct Part {
  void* data = nullptr;
  size_t bytes = 0;
};
struct ConstPart {
  const void* data = nullptr;
  size_t bytes = 0;
};
template <class T>
Part part_of(std::span<T> values) {
  return {values.data(), values.size_bytes()};
}

class Communicator {
 public:
  virtual ~Communicator() = default;
  virtual int rank() const = 0;  // 0 to size() - 1
  virtual int size() const = 0;

  // send[s] of rank r arrives in receive[r] of rank s; both have size() parts, of which any may be empty. The memory of
  // the two does not overlap.
  virtual void all_to_all(std::span<const ConstPart> send, std::span<const Part> receive) = 0;
  // parts[r] of rank r arrives in parts[r] of all others.
  virtual void all_gather(std::span<const Part> parts) = 0;
  virtual void broadcast(Part data, int from) = 0;
  virtual void barrier() = 0;
};

// The one rank of a process that was started alone.
Communicator& one_rank();

// Whether it holds on any rank. Of a communicator that carries host memory, as the next.
bool any_rank(Communicator& ranks, bool holds);
template <class T>
void broadcast_value(Communicator& ranks, T& value, int from = 0) {
  ranks.broadcast(part_of(std::span<T>(&value, 1)), from);
}

}  // namespace fw
