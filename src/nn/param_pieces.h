// How parameters are cut into pieces, for what runs over all of them (ops.def, optimiser): by their declarations alone.
#pragma once

#include <vector>

#include "nn/params.h"

namespace fw {

// In the order of the flat buffers; numbers is -1.
std::vector<ParamPiece> pieces_of(const std::vector<ParamSpec>& specs);

}  // namespace fw
