// Tables of packed sequences in device memory.
#pragma once

#include <cstdint>

namespace fw::cuda {

inline constexpr int kChunk = 64;  // tokens C of a chunk, by which the tables count too

// The tables of packed sequences (scan/cuda/args.h: SequenceArg), [count + 1] each, from the tokens before every
// sequence and in all. They travel as kernel parameters (gpu/upload.h): a launch for every 16,000 sequences, or 8,000
// if one has more than 65,535 tokens.
void upload_sequences(const int64_t* sequences, int64_t count, int32_t* offsets, int32_t* chunk_base, void* stream);

// The same from offsets in device memory (int64_t if wide) that the host does not know: as their differences say, none
// below 0 or above `longest`, and not beyond T in all. One launch.
void make_sequences(const void* offsets, bool wide, int64_t count, int64_t longest, int64_t T, int32_t* made,
                    int32_t* chunk_base, void* stream);

}  // namespace fw::cuda
