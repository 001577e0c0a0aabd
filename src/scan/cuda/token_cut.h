// What token_forward takes in which form, and how token_backward cuts a shape into blocks, and with it the size of its
// workspace: plain C++, for the plan too.
#pragma once

#include <cstdint>

namespace fw::cuda {

// Whether token_forward() is kStep or kHeads (pipeline.h): a few tokens of every sequence, not packed. starts:
// sequences without a slot begin from zero and are not skipped; kTokens alone has them.
constexpr bool few_tokens(bool packed, int64_t tokens, bool token_slots, bool starts) {
  constexpr int kMost = 4;  // a warp each (token/forward.cu: kStateWarps)
  return !packed && tokens > 0 && tokens <= kMost && !token_slots && !starts;
}

// How a shape is cut. A function of the shape and the number of SMs.
struct TokenCut {
  int channels;  // of a lane: 2, 4 or 8
  int rows;      // of a warp
  int warps;
  int tiles;        // of warps * rows values: more than one where V is large
  int64_t stretch;  // tokens whose states are kept at once
  int64_t stretches;
  int64_t state;  // floats of a state in the workspace
  int64_t block;  // floats of a block's workspace: stretches, then the states of one, then dS
  int64_t blocks;
};

TokenCut token_cut(int64_t sequences, int32_t HV, int32_t K, int32_t V, int64_t longest, int sm_count);

}  // namespace fw::cuda
