// First values of a model's parameters drawn on the CUDA device, where drawing them on the host and sending them takes
// seconds. The numbers are those of the host's generator (base/random.h), the values to the bit those of nn/init.h.
// nn/init_random.h says which pieces of the generator make which.
#pragma once

#include <cstdint>
#include <span>

#include "base/device.h"
#include "ops/ops.h"

namespace fw {

// Values of one parameter: each from `draws` numbers that follow one another. 2: scale normal; 1: low + scale uniform.
struct DrawnRange {
  int64_t first;    // number of the whole draw that the first value begins with; growing from range to range
  int64_t count;    // values
  int64_t at;       // of the first value in the flat buffers
  int64_t numbers;  // of its float copy in ParamValues::numbers; -1: none
  double scale, low;
  int32_t draws;
};

// Queues on the device: all values of `ranges`, in `to` as ParamValues has them whole or split. words [pieces,
// kRandomWords]: of each piece of `piece` numbers the words of its first (base/random_jump.h). A value whose numbers
// lie in two pieces is the first one's.
void draw_on_cuda(Device& device, std::span<const uint64_t> words, int64_t piece, std::span<const DrawnRange> ranges,
                  ParamValues<float> to);

}  // namespace fw
