// Draws the first values of parameters, in the order of the specs: the numbers are those of one generator that goes through them all, whoever draws them.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "base/random.h"
#include "nn/init.h"

namespace fw {

struct ParamSpec;  // nn/params.h

// Of the initialisers of init.h: how many numbers of the generator each value takes; of others -1, not known.
int draws_of(const Initialiser& init);
// Whether it must be given all values of a parameter at once, because it counts them.
bool counts_places(const Initialiser& init);

// Calls write(spec, at, values) for all values of every spec, each once: those from `at` on. random is afterwards where drawing them one by one leaves it.
// Long draws are cut into pieces of 2^log_piece numbers (base/random_jump.h), which threads make side by side; T is float or double.
inline constexpr int kLogPiece = 22;
template <class T>
void draw_parameters(const std::vector<ParamSpec>& specs, Random& random,
                     const std::function<void(const ParamSpec& spec, int64_t at, std::span<const T> values)>& write, int log_piece = kLogPiece);

}  // namespace fw
