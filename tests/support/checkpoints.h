// Checkpoints of fw_forward (fw_desc.checkpoint_interval), on any device. The outputs do not know that they are made.
// Each is the final state of the tokens before it. A call that starts from one gives what the undisturbed one
// gave. All of this holds to the bit.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>

#include "support/recurrence.h"

namespace fw::testing {

// Of sequence n alone, from token `begin` to token `end`.
inline Problem tokens_of(const Problem& problem, int64_t n, int64_t begin, int64_t end) {
  return slice_tokens(slice_sequence(problem, n), begin, end);
}

// heads: also that each is the final state of the tokens before it. every: those after other numbers of tokens are
// not looked at (of sequences that are cut).
inline void expect_checkpoints(const Problem& p, const HeaderRun& run, int64_t interval, int64_t every = 1,
                               bool heads = true) {
  SCOPED_TRACE(describe(p));
  HeaderRun alone = run;
  alone.pool = alone.device_seqlens = alone.forward_saves = false;
  alone.spare_tokens = 0;
  HeaderRun plain = run;
  plain.pool = false;
  const ReferenceOutputs undisturbed = header_forward(p, plain);
  const HeaderCheckpoints got = header_checkpoints(p, run, interval);
  EXPECT_TRUE(close(got.outputs, undisturbed, 0));
  const SeqLayout& sequences = p.shape.sequences;
  for (const HeaderCheckpoint& c : got.all) {
    SCOPED_TRACE(::testing::Message() << "sequence " << c.sequence << " after " << c.tokens << " tokens");
    if (c.tokens % every != 0) continue;
    if (heads) {
      const ReferenceOutputs head = header_forward(tokens_of(p, c.sequence, 0, c.tokens), alone);
      EXPECT_EQ(c.state, head.final_state);
      EXPECT_EQ(c.precond, head.final_precond);
    }
    const int64_t length = sequences.length(c.sequence), row = p.shape.HV * p.shape.V;
    if (length == c.tokens || run.bf16_states) continue;
    Problem rest = tokens_of(p, c.sequence, c.tokens, length);
    rest.in.initial_state = c.state;
    rest.in.initial_precond = c.precond;
    const ReferenceOutputs out = header_forward(rest, alone);
    const auto own = undisturbed.o.begin() + (sequences.begin(c.sequence) + c.tokens) * row;
    EXPECT_TRUE(std::equal(out.o.begin(), out.o.end(), own)) << "o";
    const auto same = [&](const std::vector<double>& mine, const std::vector<double>& all) {
      const size_t size = mine.size();
      return std::equal(mine.begin(), mine.end(), all.begin() + c.sequence * static_cast<int64_t>(size));
    };
    EXPECT_TRUE(same(out.final_state, undisturbed.final_state)) << "final_state";
    EXPECT_TRUE(same(out.final_precond, undisturbed.final_precond)) << "final_precond";
  }
}

}  // namespace fw::testing
