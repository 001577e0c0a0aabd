// Tasks over a whole sequence, of Kaczmarz Linear Attention's experiments (synthetic.h has the interface): a text
// backwards, and stacks.
#pragma once

#include <memory>

#include "tasks/synthetic.h"

namespace fw {

// Vocabulary of 128, 127 separates. `length` tokens of [0, 127), the separator, the same backwards: each of these is
// asked for at the token before it, the first of them only with `first`. Chance: 1 / 127.
std::unique_ptr<SyntheticTask> palindrome(const TaskOptions& options);

// Vocabulary of 128: stacks 0 to 63, values 64 to 89, push 90, pop 91, query 92, filler 93 to 127. Triples (push,
// stack, value) with a probability of 0.6, else (pop, stack, query) of one of the stacks that hold something, and at
// its stack the value is asked for. One or two tokens of filler where the length is no multiple of 3.
std::unique_ptr<SyntheticTask> stack(const TaskOptions& options);

}  // namespace fw
