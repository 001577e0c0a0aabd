// ArenaMark: what is taken from an arena while it lives goes back at its end.
#pragma once

#include "base/arena.h"

namespace fw {

class ArenaMark {
 public:
  explicit ArenaMark(Arena& arena) : arena_(arena), mark_(arena.mark()) {}
  ~ArenaMark() { arena_.rewind(mark_); }
  ArenaMark(const ArenaMark&) = delete;
  ArenaMark& operator=(const ArenaMark&) = delete;

 private:
  Arena& arena_;
  Arena::Mark mark_;
};

}  // namespace fw
