// Numbers of the host in device memory, and zeros: through kernel parameters, so that nothing waits and a graph may hold it.
#pragma once

#include <cstdint>

namespace fw::cuda {

// The tables of packed sequences (args.h: SequenceArg), [count + 1] each, from the tokens before every sequence and in all: a launch for every 16,000
// sequences, or 8,000 if one has more than 65,535 tokens.
void upload_sequences(const int64_t* sequences, int64_t count, int32_t* offsets, int32_t* chunk_base, void* stream);

}  // namespace fw::cuda
