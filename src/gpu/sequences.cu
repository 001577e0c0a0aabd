// The tables of packed sequences. See sequences.h.
#include <algorithm>

#include "gpu/launch.h"
#include "gpu/ptx.cuh"
#include "gpu/sequences.h"

namespace fw::cuda {
namespace {

// Lengths of the sequences from number `first` on, as kernel parameters: what both tables are made of in half or a
// quarter of their bytes. A thread has one of them (to read parameters, each lane its own, takes an SM a work tile a
// lane), and of each block the host says what comes before its first.
constexpr int kSumThreads = 1024;
template <class Length, int kCount>
struct Lengths {
  static constexpr int kBlocks = (kCount + kSumThreads - 1) / kSumThreads;
  Length of[kCount];
  int32_t tokens[kBlocks], chunks[kBlocks];
};

template <class Length, int kCount>
__global__ void __launch_bounds__(kSumThreads)
    sequences_kernel(const __grid_constant__ Lengths<Length, kCount> lengths, int first, int count, int32_t* offsets,
                     int32_t* chunk_base) {
  constexpr int kWarps = kSumThreads / 32;
  int32_t(*const sums)[2] = reinterpret_cast<int32_t(*)[2]>(shared_memory());  // of a warp's sequences
  const int block = static_cast<int>(block_index_x()), i = block * kSumThreads + static_cast<int>(thread_index()),
            lane = static_cast<int>(lane_index());
  const int32_t length = i < count ? static_cast<int32_t>(lengths.of[i]) : 0;
  int sum[2] = {length, (length + kChunk - 1) / kChunk};  // up to and with this one
  for (int part = 0; part < 2; ++part) {
    for (int step = 1; step < 32; step *= 2) {
      const int32_t other = shuffle_up(sum[part], step);
      if (lane >= step) sum[part] += other;
    }
    if (lane == 31) sums[warp_index()][part] = sum[part];
  }
  sync_threads();
  int at = lengths.tokens[block], chunk = lengths.chunks[block];
  for (unsigned warp = 0; warp < static_cast<unsigned>(kWarps) && warp < warp_index(); ++warp)
    at += sums[warp][0], chunk += sums[warp][1];
  if (i == 0 && first == 0) offsets[0] = chunk_base[0] = 0;
  if (i < count) offsets[first + i + 1] = at + sum[0], chunk_base[first + i + 1] = chunk + sum[1];
}

template <class Length, int kCount>
void upload_lengths(const int64_t* from, int first, int count, int tokens, int chunks, int32_t* offsets,
                    int32_t* chunk_base, void* stream) {
  Lengths<Length, kCount> lengths;
  for (int i = 0; i < kCount; ++i) {
    if (i % kSumThreads == 0) lengths.tokens[i / kSumThreads] = tokens, lengths.chunks[i / kSumThreads] = chunks;
    const int64_t length = i < count ? from[i + 1] - from[i] : 0;
    lengths.of[i] = static_cast<Length>(length);
    tokens += static_cast<int>(length), chunks += static_cast<int>((length + kChunk - 1) / kChunk);
  }
  const Dim3 grid{static_cast<unsigned>((count + kSumThreads - 1) / kSumThreads)};
  launch(sequences_kernel<Length, kCount>, grid, kSumThreads, 2 * sizeof(int32_t) * kSumThreads / 32, stream, lengths,
         first, count, offsets, chunk_base);
}

// What the threads before this one load, in order, joined by `join`, to which 0 adds nothing; total: of all. By all
// kSumThreads threads, `sums` is theirs.
template <class Join>
FW_DEVICE unsigned joined_before(unsigned own, unsigned* sums, const Join& join, unsigned& total) {
  const unsigned lane = lane_index(), warp = warp_index();
  unsigned sum = own;
  for (int step = 1; step < 32; step *= 2) {
    const unsigned other = static_cast<unsigned>(shuffle_up(static_cast<int>(sum), step));
    if (lane >= static_cast<unsigned>(step)) sum = join(other, sum);
  }
  const unsigned of_lanes = static_cast<unsigned>(shuffle_up(static_cast<int>(sum), 1));
  if (lane == 31) sums[warp] = sum;
  sync_threads();
  unsigned before = 0;
  total = 0;
  for (unsigned i = 0; i < static_cast<unsigned>(kSumThreads) / 32; ++i) {
    if (i == warp) before = total;
    total = join(total, sums[i]);
  }
  sync_threads();
  return lane == 0 ? before : join(before, of_lanes);
}

// One block, as many sequences at a time as it has threads.
template <class Offset>
__global__ void __launch_bounds__(kSumThreads)
    make_sequences_kernel(const Offset* from, int count, unsigned longest, unsigned T, int32_t* offsets,
                          int32_t* chunk_base) {
  unsigned* const sums = reinterpret_cast<unsigned*>(shared_memory());
  // Lengths are below 2^31 and so is T: two of them do not overflow.
  const auto within = [T](unsigned a, unsigned b) { return a + b < T ? a + b : T; };
  const auto plus = [](unsigned a, unsigned b) { return a + b; };
  unsigned tokens = 0, chunks = 0;  // before these sequences
  if (thread_index() == 0) offsets[0] = chunk_base[0] = 0;
  for (int first = 0; first < count; first += kSumThreads) {
    const int n = first + static_cast<int>(thread_index());
    const int64_t given = n < count ? static_cast<int64_t>(from[n + 1]) - static_cast<int64_t>(from[n]) : 0;
    const unsigned length = given < 0 ? 0 : given < int64_t{longest} ? static_cast<unsigned>(given) : longest;
    unsigned some, some_chunks;
    const unsigned begin = within(tokens, joined_before(length, sums, within, some)), end = within(begin, length);
    const unsigned own = (end - begin + kChunk - 1) / kChunk,
                   base = chunks + joined_before(own, sums, plus, some_chunks);
    if (n < count) offsets[n + 1] = static_cast<int32_t>(end), chunk_base[n + 1] = static_cast<int32_t>(base + own);
    tokens = within(tokens, some), chunks += some_chunks;
  }
}

}  // namespace

void upload_sequences(const int64_t* sequences, int64_t count, int32_t* offsets, int32_t* chunk_base, void* stream) {
  constexpr int64_t kFew = 500, kMany = 8000;
  bool is_short = true;
  for (int64_t i = 0; i < count; ++i) is_short = is_short && sequences[i + 1] - sequences[i] <= UINT16_MAX;
  const int64_t most = is_short ? 2 * kMany : kMany, few = is_short ? 2 * kFew : kFew;
  int64_t chunks = 0;
  for (int64_t first = 0; first < count; first += most) {
    const int64_t* const from = sequences + first;
    const int some = static_cast<int>(std::min(most, count - first)), at = static_cast<int>(first);
    const int before = static_cast<int>(from[0]), base = static_cast<int>(chunks);
    const auto upload = [&](auto lengths) { lengths(from, at, some, before, base, offsets, chunk_base, stream); };
    if (is_short) {
      upload(some <= few ? upload_lengths<uint16_t, 2 * kFew> : upload_lengths<uint16_t, 2 * kMany>);
    } else {
      upload(some <= few ? upload_lengths<int32_t, kFew> : upload_lengths<int32_t, kMany>);
    }
    for (int i = 0; i < some; ++i) chunks += (from[i + 1] - from[i] + kChunk - 1) / kChunk;
  }
}

void make_sequences(const void* offsets, bool wide, int64_t count, int64_t longest, int64_t T, int32_t* made,
                    int32_t* chunk_base, void* stream) {
  constexpr size_t kShared = sizeof(unsigned) * kSumThreads / 32;
  const int sequences = static_cast<int>(count);
  const unsigned most = static_cast<unsigned>(longest), all = static_cast<unsigned>(T);
  if (wide) {
    launch(make_sequences_kernel<int64_t>, Dim3{1}, kSumThreads, kShared, stream, static_cast<const int64_t*>(offsets),
           sequences, most, all, made, chunk_base);
  } else {
    launch(make_sequences_kernel<int32_t>, Dim3{1}, kSumThreads, kShared, stream, static_cast<const int32_t*>(offsets),
           sequences, most, all, made, chunk_base);
  }
}

}  // namespace fw::cuda
