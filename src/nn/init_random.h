// Initialises parameters at random, in the order of the specs. One generator goes through them all, whichever thread or
// device computes a value.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <vector>

#include "base/device.h"
#include "base/random.h"
#include "nn/init.h"
#include "ops/ops.h"

namespace fw {

struct ParamSpec;  // nn/params.h

// Of the initialisers of init.h: how many numbers of the generator each value takes; of others -1, not known.
int draws_of(const Initialiser& init);
// An initialiser whose values are scale times a normal number (of two), or low + scale times a uniform one (of one).
struct LinearDraw {
  int draws;
  double scale, low;
};
std::optional<LinearDraw> linear_draw_of(const Initialiser& init);
// Whether it must be given all values of a parameter at once, because it counts them.
bool counts_indices(const Initialiser& init);

// Calls write(spec, at, values) for all values of every spec, each once: those from `at` on. random is afterwards where
// drawing them one by one leaves it. Long draws are cut into pieces of 2^log_piece numbers (base/random_jump.h), which
// threads make side by side; T is float or double.
inline constexpr int kLogPiece = 22;
template <class T>
void init_random(const std::vector<ParamSpec>& specs, Random& random,
                 const std::function<void(const ParamSpec& spec, int64_t at, std::span<const T> values)>& write,
                 int log_piece = kLogPiece);

// The same values, drawn on the CUDA device where they lie: `to` as ParamValues has them, numbers_of(spec) the offset
// of its float copy in to.numbers or -1. What no LinearDraw makes, which is little, comes from the host through `write`
// as above. random as above. False, and nothing is done, where a spec does not say what it draws, or all draw fewer
// than `at_least` numbers: for those the host is as fast.
// what Params::init() gives for at_least; the bits do not depend on it
inline int64_t init_on_device_from = int64_t{1} << 23;
bool init_random_on_cuda(
    const std::vector<ParamSpec>& specs, Random& random, Device& device, ParamValues<float> to,
    const std::function<int64_t(const ParamSpec&)>& numbers_of,
    const std::function<void(const ParamSpec& spec, int64_t at, std::span<const float> values)>& write,
    int64_t at_least);

}  // namespace fw
