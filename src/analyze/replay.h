// The recurrence of one value head, token by token in double, with what an analysis wants to see on the way.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "analyze/streams.h"

namespace fw {

// What the state answers at one token, [V] each.
struct TokenReads {
  std::vector<double> o;         // S_t^T r: the query's read
  std::vector<double> key_read;  // S_t^T k: what the state, after the write, has under this token's key
  // S_{t-1}^T k and S_{t-1}^T q: what it has under both before decay and write
  std::vector<double> prior_key, prior_query;
  std::vector<double> erased;  // Sbar^T e; zeros without an erase
  // S_t^T e: what the erase key finds after the write; zeros without an erase
  std::vector<double> left;
  std::vector<double> fed;  // Sbar^T f; zeros without feedback
  std::vector<double> u;    // z - Sbar^T e: what is written
};

class HeadReplay {
 public:
  HeadReplay(int64_t K, int64_t V);
  // The state [K, V] from which it goes on; null: zero.
  template <class T>
  void start(const T* state);
  void step(const HeadStreams& x, int64_t i);
  const TokenReads& reads() const { return reads_; }  // of the last step
  std::span<const double> state() const { return s_; }

 private:
  int64_t K_, V_;
  std::vector<double> s_;
  TokenReads reads_;
};

}  // namespace fw
