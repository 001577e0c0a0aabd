// What a result of this process says of where it comes from.
#pragma once

#include <string>

#include "base/provenance.h"

namespace fw::cli {

// device: as --device has it, and there. The date is today's.
Provenance provenance_here(const std::string& device);

}  // namespace fw::cli
