// Kernels of ptx_test.cu: each uses one group of the functions of ptx.cuh and writes what it sees. Sizes are in the
// kernels' comments.
#pragma once

#include "gpu/sm80/products.cuh"
#include "gpu/sm90/multicast.cuh"
#include "gpu/sm90/ptx.cuh"

namespace fw::cuda::test {

// ---- 32 threads, 512 bytes of shared memory: four 8x8 matrices whose elements are their numbers. to[3][32][4], and
// back: stored[4][256], the last two without stmatrix.
struct MatrixArgs {
  uint32_t* to;
  uint16_t* stored;
};
__global__ void matrix_kernel(const __grid_constant__ MatrixArgs args) {
  auto* memory = reinterpret_cast<uint16_t*>(shared_memory());
  const unsigned lane = lane_index();
  for (unsigned i = lane; i < 256; i += 32) memory[i] = static_cast<uint16_t>(i);
  sync_threads();
  const uint32_t row = shared_address(memory + lane * 8);
  uint32_t r[4], s[2];
  ldmatrix_x4(r, row);
  for (unsigned i = 0; i < 4; ++i) args.to[lane * 4 + i] = r[i];
  ldmatrix_x4_trans(r, row);
  for (unsigned i = 0; i < 4; ++i) args.to[128 + lane * 4 + i] = r[i];
  ldmatrix_x2_trans(s, shared_address(memory + lane % 16 * 8));
  for (unsigned i = 0; i < 2; ++i) args.to[256 + lane * 4 + i] = s[i];
  sync_threads();
  for (unsigned i = 0; i < 4; ++i) r[i] = (lane * 4 + i) << 1 | ((lane * 4 + i) << 1 | 1) << 16;
  stmatrix_x4(row, r);
  sync_threads();
  for (unsigned i = lane; i < 256; i += 32) args.stored[i] = memory[i];
  sync_threads();
  stmatrix_x4_trans(row, r);
  sync_threads();
  for (unsigned i = lane; i < 256; i += 32) args.stored[256 + i] = memory[i];
  sync_threads();
  store_matrix_words<false>(row, r);
  sync_threads();
  for (unsigned i = lane; i < 256; i += 32) args.stored[512 + i] = memory[i];
  sync_threads();
  store_matrix_words<true>(row, r);
  sync_threads();
  for (unsigned i = lane; i < 256; i += 32) args.stored[768 + i] = memory[i];
}

// ---- 128 threads, three SW128 tiles of shared memory: products of four warps (gpu/sm80/products.cuh). left, row by
// row: [64, 128], right: [128, 64]; d: [kWarpProducts][64, 64], from zero:
//   0 to 3   left[:, :64] right[:64], each operand as it is or from its transpose (mma_tiles)
//   4        left right[:, :64] from the rows of the right's transpose (mma_rows)
//   5        left[:, :64] right[:64] (mma_outer)
struct WarpProductArgs {
  const float *left, *right;
  float* d;
};
inline constexpr int kWarpProducts = 6;
__global__ void warp_product_kernel(const __grid_constant__ WarpProductArgs args) {
  char* const shared = shared_memory();
  const uint32_t base = shared_address(shared);
  auto* const tiles = reinterpret_cast<uint16_t*>(shared);
  const int thread = static_cast<int>(thread_index()), row = 16 * warp_in_group() + static_cast<int>(lane_index()) / 4,
            column = 2 * (static_cast<int>(lane_index()) % 4);
  const auto fill = [&](int tile, const float* from, int step, bool transposed) {
    for (int i = thread; i < 64 * 64; i += 128)
      tiles[tile * kSw128Elements + sw128_index(i / 64, i % 64)] =
          bf16_bits(transposed ? from[i % 64 * step + i / 64] : from[i / 64 * step + i % 64]);
  };
  uint32_t a[8][4];
  for (int k = 0; k < 8; ++k) {
    for (int i = 0; i < 4; ++i) {
      const float* from = args.left + (row + 8 * (i % 2)) * 128 + 16 * k + 8 * (i / 2) + column;
      a[k][i] = pack_bf16(from[0], from[1]);
    }
  }
  for (int product = 0; product < kWarpProducts; ++product) {
    const bool left_transposed = product == 1 || product == 3, right_transposed = product < 2 || product == 5;
    sync_threads();
    fill(0, args.left, 128, left_transposed);
    fill(1, args.right, 64, !right_transposed);
    fill(2, args.right + 64 * 64, 64, true);
    sync_threads();
    float d[32], part[16];
    clear_sums(d);
    if (product == 0) mma_tiles<64, false, true>(d, base, base + kSw128Bytes);
    if (product == 1) mma_tiles<64, true, true>(d, base, base + kSw128Bytes);
    if (product == 2) mma_tiles<64, false, false>(d, base, base + kSw128Bytes);
    if (product == 3) {  // half of the columns at a time
      for (int half = 0; half < 2; ++half) {
        clear_sums(part);
        mma_tiles<32, true, false>(part, base, base + kSw128Bytes + static_cast<uint32_t>(half * 32 * 128));
        for (int i = 0; i < 16; ++i) d[16 * half + i] = part[i];
      }
    }
    if (product == 4) mma_rows(d, a, base + kSw128Bytes);
    if (product == 5) {
      const uint32_t first[4][4] = {{a[0][0], a[0][1], a[0][2], a[0][3]},
                                    {a[1][0], a[1][1], a[1][2], a[1][3]},
                                    {a[2][0], a[2][1], a[2][2], a[2][3]},
                                    {a[3][0], a[3][1], a[3][2], a[3][3]}};
      mma_outer(d, first, base + kSw128Bytes);
    }
    for (int i = 0; i < 32; ++i)
      args.d[product * 64 * 64 + (row + i % 4 / 2 * 8) * 64 + i / 4 * 8 + column + i % 2] = d[i];
  }
}

// ---- 32 threads: d (16 x 8) += a b for bf16 (a 16 x 16, b 16 x 8) and tf32 (a 16 x 8, b 8 x 8), all row by row.
struct MmaArgs {
  const float *a, *b;
  float *d, *d_tf32;
};
__global__ void mma_kernel(const __grid_constant__ MmaArgs args) {
  const unsigned row = lane_index() / 4, t = lane_index() % 4;
  uint32_t a[4], b[2];
  for (unsigned i = 0; i < 4; ++i) {
    const float* from = args.a + (row + 8 * (i % 2)) * 16 + 8 * (i / 2) + 2 * t;
    a[i] = pack_bf16(from[0], from[1]);
  }
  for (unsigned i = 0; i < 2; ++i)
    b[i] = pack_bf16(args.b[(8 * i + 2 * t) * 8 + row], args.b[(8 * i + 2 * t + 1) * 8 + row]);
  float d[4];
  for (unsigned i = 0; i < 4; ++i) d[i] = args.d[(row + 8 * (i / 2)) * 8 + 2 * t + i % 2];
  mma_bf16(d, a, b[0], b[1]);
  for (unsigned i = 0; i < 4; ++i) args.d[(row + 8 * (i / 2)) * 8 + 2 * t + i % 2] = d[i];

  // Small whole numbers, which tf32 has as float32 does.
  for (unsigned i = 0; i < 4; ++i) a[i] = float_bits(args.a[(row + 8 * (i % 2)) * 16 + 4 * (i / 2) + t]);
  for (unsigned i = 0; i < 2; ++i) b[i] = float_bits(args.b[(4 * i + t) * 8 + row]);
  for (unsigned i = 0; i < 4; ++i) d[i] = args.d_tf32[(row + 8 * (i / 2)) * 8 + 2 * t + i % 2];
  mma_tf32(d, a, b[0], b[1]);
  for (unsigned i = 0; i < 4; ++i) args.d_tf32[(row + 8 * (i / 2)) * 8 + 2 * t + i % 2] = d[i];
}

// ---- Any number of threads: y[7 n]: conversions of x[n].
struct ScalarArgs {
  const float* x;
  uint32_t* y;
  unsigned n;
};
__global__ void scalar_kernel(const __grid_constant__ ScalarArgs args) {
  const unsigned i = block_index_x() * block_size() + thread_index();
  if (i >= args.n) return;
  const float x = args.x[i];
  uint32_t* y = args.y + i * 7;
  y[0] = bf16_bits(x);
  y[1] = pack_bf16(x, 1.0f);
  y[2] = float_bits(exp2_fast(x));
  y[3] = float_bits(log2_fast(x));
  y[4] = float_bits(rcp_fast(x));
  y[5] = float_bits(sin_fast(x));
  y[6] = float_bits(cos_fast(x));
}

// ---- Any number of threads: what a thread stores and then adds to an address of its own, three times over:
// sums[n][4], to[3][n][4].
struct AddThereArgs {
  float4* sums;
  float4* to;
};
inline constexpr float kLargeTerm = 1e8f;  // alongside which 1 is lost: the order of a sum tells
__global__ void add_there_kernel(const __grid_constant__ AddThereArgs args) {
  const unsigned i = block_index_x() * block_size() + thread_index(), all = grid_size_x() * block_size();
  const float own = static_cast<float>(i);
  for (unsigned round = 0; round < 3; ++round) {
    const float x = own + static_cast<float>(round);
    args.sums[i] = make_float4(kLargeTerm, 1, x, -x);
    add_there(args.sums + i, make_float4(1, kLargeTerm, 2, 3));
    add_there(args.sums + i, make_float4(-kLargeTerm, -kLargeTerm, 4, 5));
    args.to[round * all + i] = load_past_l1(args.sums + i);
  }
}

// ---- Grid and shuffles: to[block][64][10], 64 threads a block.
struct ShuffleArgs {
  uint32_t* to;
};
__global__ void shuffle_kernel(const __grid_constant__ ShuffleArgs args) {
  const unsigned block = (block_index_z() * grid_size_y() + block_index_y()) * grid_size_x() + block_index_x(),
                 thread = thread_index();
  uint32_t* to = args.to + (block * block_size() + thread) * 10;
  const uint32_t x = block * 1000 + thread;
  to[0] = shuffle_xor(x, 5);
  to[1] = shuffle_xor(x, 12, 8);
  to[2] = shuffle_down(x, 3);
  to[3] = shuffle_down(x, 3, 8);
  to[4] = shuffle_up(x, 2);
  to[5] = shuffle(x, static_cast<int>(thread % 7));
  to[6] = shuffle(x, 3, 4);
  to[7] = warp_ballot(thread % 3 == 0);
  to[8] = float_bits(warp_sum(static_cast<float>(thread)));
  to[9] = float_bits(warp_max(static_cast<float>(thread ^ 21)));
}

// ---- cp.async in two stages: 64 threads add rows of 64 x 16 bytes; every third piece is not there. 2048 bytes of
// shared memory, then the same with a barrier instead of cp_async_wait. sum[2][256]
struct CopyArgs {
  const uint32_t* from;  // rows x 256
  uint32_t* sum;
  int rows;
};
__global__ void copy_kernel(const __grid_constant__ CopyArgs args) {
  const unsigned thread = thread_index();
  char* memory = shared_memory();
  auto start = [&](int row) {
    if (row < args.rows) {
      const bool valid = (static_cast<unsigned>(row) + thread) % 3 != 0;
      cp_async_16(shared_address(memory + row % 2 * 1024 + thread * 16),
                  valid ? args.from + row * 256 + thread * 4 : nullptr, valid);
    }
  };
  uint32_t sum[4] = {};
  start(0);
  cp_async_commit();
  for (int row = 0; row < args.rows; ++row) {
    start(row + 1);
    cp_async_commit();
    cp_async_wait<1>();
    sync_threads();
    // The piece of another thread.
    const auto* piece = reinterpret_cast<const uint32_t*>(memory + row % 2 * 1024 + (thread ^ 33) * 16);
    for (int i = 0; i < 4; ++i) sum[i] += piece[i];
    sync_threads();
  }
  for (unsigned i = 0; i < 4; ++i) args.sum[(thread ^ 33) * 4 + i] = sum[i];

  auto* barrier = reinterpret_cast<uint64_t*>(memory + 2048);
  if (thread == 0) {
    mbarrier_init(barrier, 64);
    mbarrier_init_fence();
  }
  sync_threads();
  for (int i = 0; i < 4; ++i) sum[i] = 0;
  for (int row = 0; row < args.rows; ++row) {
    start(row);
    cp_async_arrive(barrier);
    mbarrier_wait(barrier, row & 1);
    const auto* piece = reinterpret_cast<const uint32_t*>(memory + row % 2 * 1024 + (thread ^ 33) * 16);
    for (int i = 0; i < 4; ++i) sum[i] += piece[i];
    sync_threads();
  }
  for (unsigned i = 0; i < 4; ++i) args.sum[256 + (thread ^ 33) * 4 + i] = sum[i];
}

// A SW128 tile of a tensor (tensor_map.h) as it lies in shared memory, of as many rows as the map says.
struct TensorArgs {
  TensorMap map;
  int column, head, token, batch;
  uint16_t* to;
  int rows = 64;  // up to 128
};
inline constexpr std::size_t kTensorShared = 2 * kTensorBytes + 8;
__global__ void __launch_bounds__(128, 1) tensor_kernel(const __grid_constant__ TensorArgs args) {
  char* const sw128 = shared_memory();
  uint64_t* const full = reinterpret_cast<uint64_t*>(sw128 + 2 * kTensorBytes);
  if (thread_index() == 0) {
    mbarrier_init(full, 1);
    mbarrier_init_fence();
  }
  sync_threads();
  if (thread_index() == 0) {
    mbarrier_expect(full, static_cast<uint32_t>(args.rows) * 128);
    tensor_load(sw128, args.map, args.column, args.head, args.token, args.batch, full);
  }
  mbarrier_wait(full, 0);
  for (int i = static_cast<int>(thread_index()); i < args.rows * 64; i += 128)
    args.to[i] = reinterpret_cast<const uint16_t*>(sw128)[i];
}

// Blocks of a cluster: each writes its numbers, adds up those of all in another order of threads, and writes others
// when all have read.
struct ClusterArgs {
  uint32_t* sums;  // [blocks, 128], twice
  int cluster;
};
__global__ void __launch_bounds__(128) cluster_kernel(const ClusterArgs args) {
  uint32_t* const mine = reinterpret_cast<uint32_t*>(shared_memory());
  const unsigned thread = thread_index(), block = block_index_x();
  for (unsigned round = 0; round < 2; ++round) {
    mine[thread] = (block + 1) * 1000 + thread * (round + 1);
    cluster_sync();
    uint32_t sum = 0;
    for (int rank = 0; rank < args.cluster; ++rank) sum = 3 * sum + *cluster_memory(mine + (thread ^ 37), rank);
    args.sums[(round * grid_size_x() + block) * 128 + thread] = sum;
    cluster_sync();
  }
}

// Blocks of a cluster: each sends its numbers to the next one, in each of two rounds. Shared memory: own numbers, those
// of the block in front, a barrier.
__global__ void __launch_bounds__(128) cluster_copy_kernel(const ClusterArgs args) {
  auto* const mine = reinterpret_cast<uint32_t*>(shared_memory());
  auto* const received = mine + 128;
  auto* const come = reinterpret_cast<uint64_t*>(received + 128);
  const unsigned thread = thread_index(), block = block_index_x();
  const int next = (static_cast<int>(block) % args.cluster + 1) % args.cluster;
  if (thread == 0) {
    mbarrier_init(come, 1);
    mbarrier_init_fence();
  }
  sync_threads();
  for (unsigned round = 0; round < 2; ++round) {
    if (thread == 0) mbarrier_expect(come, 512);
    mine[thread] = (block + 1) * 1000 + thread * (round + 1);
    fence_async_shared();
    sync_threads();
    cluster_arrive();
    cluster_wait();  // all expect
    if (thread == 0) cluster_copy(received, next, mine, 512, come);
    mbarrier_wait(come, static_cast<int>(round));
    args.sums[(round * grid_size_x() + block) * 128 + thread] = received[thread];
    cluster_arrive();
    cluster_wait();  // all have read
  }
}

// Blocks of a cluster: each sends 8 rows of a tensor to all, several times to the same place, and tells all when it has
// read what came. Shared memory: a tile of the rows of all, two barriers.
struct MulticastArgs {
  TensorMap map;
  uint16_t* to;  // [blocks, rounds, 8 cluster, 64], tiles as they lie in shared memory
  int cluster, rounds;
};
inline constexpr std::size_t kMulticastShared = kTensorBytes + 16;
__global__ void __launch_bounds__(128) multicast_kernel(const __grid_constant__ MulticastArgs args) {
  char* const tile = shared_memory();
  auto *const full = reinterpret_cast<uint64_t*>(tile + kTensorBytes), *const empty = full + 1;
  const int thread = static_cast<int>(thread_index()), block = static_cast<int>(block_index_x()),
            rank = block % args.cluster, rows = 8 * args.cluster;
  if (thread == 0) {
    mbarrier_init(full, 1);
    mbarrier_init(empty, args.cluster);
    mbarrier_init_fence();
  }
  sync_threads();
  cluster_arrive();
  cluster_wait();
  for (int round = 0; round < args.rounds; ++round) {
    if (thread == 0) {
      if (round > 0) mbarrier_wait(empty, (round - 1) % 2);
      mbarrier_expect(full, static_cast<uint32_t>(rows) * 128);
      tensor_load_multicast(tile + 1024 * rank, args.map, 0, 0,
                            (block / args.cluster * args.rounds + round) * rows + 8 * rank, 0, full,
                            (1u << args.cluster) - 1);
    }
    mbarrier_wait(full, round % 2);
    for (int i = thread; i < rows * 64; i += 128)
      args.to[(block * args.rounds + round) * rows * 64 + i] = reinterpret_cast<const uint16_t*>(tile)[i];
    sync_threads();
    if (round + 1 < args.rounds && thread < args.cluster) mbarrier_arrive_at(empty, thread);
  }
  cluster_arrive();
  cluster_wait();
}

// ---- Bulk copies: a producer warpgroup (one thread of it) loads rows of 512 floats through three stages, 128
// consumers double them, and store each row. Shared memory: 3 stages, 2 rows out, 6 barriers.
struct BulkArgs {
  const float* from;  // rows x 512
  float* to;
  int rows;
};
inline constexpr int kRow = 512, kStages = 3;
inline constexpr unsigned kBulkShared = 5 * kRow * 4 + 64;
__global__ void __launch_bounds__(256, 1) bulk_kernel(const __grid_constant__ BulkArgs args) {
  auto* stages = reinterpret_cast<float*>(shared_memory());
  float* out = stages + kStages * kRow;
  auto *full = reinterpret_cast<uint64_t*>(out + 2 * kRow), *empty = full + kStages;
  if (thread_index() == 0) {
    for (int i = 0; i < kStages; ++i) {
      mbarrier_init(full + i, 1);
      mbarrier_init(empty + i, 128);
    }
    mbarrier_init_fence();
  }
  sync_threads();
  if (thread_index() < 128) {
    register_count_decrease<40>();
    if (thread_index() != 0) return;
    for (int row = 0; row < args.rows; ++row) {
      const int stage = row % kStages;
      mbarrier_wait(empty + stage, (row / kStages & 1) ^ 1);
      mbarrier_expect(full + stage, kRow * 4);
      bulk_prefetch(args.from + row * kRow, kRow * 4);
      for (int half = 0; half < 2; ++half)
        bulk_load(stages + stage * kRow + half * kRow / 2, args.from + row * kRow + half * kRow / 2, kRow * 2,
                  full + stage);
    }
    return;
  }
  register_count_increase<232>();
  const int thread = static_cast<int>(thread_index()) - 128;
  for (int row = 0; row < args.rows; ++row) {
    const int stage = row % kStages;
    if (thread == 0) bulk_wait_read<1>();  // the row before the last has left
    named_barrier_sync(1, 128);
    mbarrier_wait(full + stage, row / kStages & 1);
    for (int i = 0; i < 4; ++i) out[row % 2 * kRow + thread + i * 128] = 2 * stages[stage * kRow + thread + i * 128];
    mbarrier_arrive(empty + stage);
    fence_async_shared();
    named_barrier_sync(1, 128);
    if (thread == 0) {
      bulk_store(args.to + row * kRow, out + row % 2 * kRow, kRow * 4);
      bulk_commit();
    }
  }
  if (thread == 0) bulk_wait<0>();
}

// ---- Named barriers: warpgroups 0 and 1 hand a row of 128 numbers to and fro without waiting more than they must.
// y[128]
struct PingArgs {
  uint32_t* y;
  int rounds;
};
__global__ void __launch_bounds__(256) ping_kernel(const __grid_constant__ PingArgs args) {
  auto* row = reinterpret_cast<uint32_t*>(shared_memory());
  const unsigned thread = thread_index() % 128;
  const bool first = thread_index() < 128;
  if (first) row[thread] = thread;
  for (int round = 0; round < args.rounds; ++round) {
    if (first) {
      named_barrier_arrive(1, 256);  // the row is there
      named_barrier_sync(2, 256);    // and back
      row[thread] += 1;
    } else {
      named_barrier_sync(1, 256);
      const uint32_t x = row[(thread + 1) % 128];
      named_barrier_sync(3, 128);
      row[thread] = 3 * x;
      named_barrier_arrive(2, 256);
    }
  }
  if (first) args.y[thread] = row[thread];
}

// ---- Two kernels of a stream, the second launched early: y[i] = x[i] + 1.
struct ChainArgs {
  const uint32_t* x;
  uint32_t* y;
};
__global__ void chain_kernel(const __grid_constant__ ChainArgs args) {
  grid_dependency_launch_first();  // nothing is touched before the wait
  grid_dependency_wait();
  const unsigned i = block_index_x() * block_size() + thread_index();
  args.y[i] = args.x[i] + 1;
}

// ---- What a kernel has left so far, counted, for one that may run alongside it. A block of 128 threads fills 512
// numbers by TMA and ordinary stores. It adds one to the counter of its group of kCountGroup blocks. Block i of the
// other, 128 threads, waits for the group's count and adds up what its blocks left.
inline constexpr unsigned kCountGroup = 4, kCountRow = 512, kCountShared = kCountRow * 4 + 64;
struct CountArgs {
  float* rows;  // [blocks, kCountRow]
  uint32_t *plain, *counters;
  float* sums;  // [groups]: of rows
  uint32_t* plain_sums;
};
__global__ void count_kernel(const __grid_constant__ CountArgs args) {
  grid_dependency_launch();
  auto* row = reinterpret_cast<float*>(shared_memory());
  const unsigned block = block_index_x(), thread = thread_index();
  for (unsigned i = thread; i < kCountRow; i += block_size()) row[i] = static_cast<float>(block * 7 + i % 16);
  fence_async_shared();
  sync_threads();
  if (thread != 0) return;
  args.plain[block] = 3 * block + 1;
  bulk_store(args.rows + block * kCountRow, row, kCountRow * 4);
  bulk_commit();
  bulk_wait<0>();
  fence_async_global();
  release_add_one(args.counters + block / kCountGroup);
}
__global__ void after_count_kernel(const __grid_constant__ CountArgs args) {
  auto* row = reinterpret_cast<float*>(shared_memory());
  auto* full = reinterpret_cast<uint64_t*>(shared_memory() + kCountRow * 4);
  const unsigned group = block_index_x();
  if (thread_index() == 0) {
    mbarrier_init(full, 1);
    mbarrier_init_fence();
    wait_for_count(args.counters + group, kCountGroup);
    fence_async_global();
    float sum = 0;
    uint32_t plain = 0;
    for (unsigned i = 0; i < kCountGroup; ++i) {
      const unsigned block = group * kCountGroup + i;
      mbarrier_expect(full, kCountRow * 4);
      bulk_load(row, args.rows + block * kCountRow, kCountRow * 4, full);
      mbarrier_wait(full, static_cast<int>(i & 1));
      for (unsigned j = 0; j < kCountRow; ++j) sum += row[j];
      plain += args.plain[block];
    }
    args.sums[group] = sum;
    args.plain_sums[group] = plain + load_acquire(args.counters + group);
  }
  grid_dependency_wait();
}

// ---- wgmma: d (64 x N) = a (64 x 128) b (128 x N), twice, the second added to ones; 128 threads. a and b come as the
// bytes that lie in shared memory.
struct WgmmaArgs {
  const uint16_t* a;  // row by row for the register operand, else SW128 tiles
  const uint16_t* b;
  float *d, *ones;
};
enum class Left { kRegisters, kRows, kColumns };
inline constexpr unsigned kDepth = 128, kSw128Bytes = kDepth * 128;  // columns SW128 tiles: kDepth rows of 64 columns
template <int N>
inline constexpr unsigned kWgmmaShared = 64 * kDepth * 2 + kDepth*(N < 64 ? 64 : N) * 2;

template <int N, bool kTransposeB, Left kLeft>
__global__ void __launch_bounds__(128, 1) wgmma_kernel(const __grid_constant__ WgmmaArgs args) {
  constexpr unsigned kA = 64 * kDepth * 2;
  constexpr unsigned kB = kWgmmaShared<N> - kA;
  char* memory = shared_memory();
  const unsigned thread = thread_index();
  for (unsigned i = thread; i < kA / 16; i += 128)
    reinterpret_cast<uint4*>(memory)[i] = reinterpret_cast<const uint4*>(args.a)[i];
  for (unsigned i = thread; i < kB / 16; i += 128)
    reinterpret_cast<uint4*>(memory + kA)[i] = reinterpret_cast<const uint4*>(args.b)[i];
  fence_async_shared();
  sync_threads();

  const unsigned row = 16 * warp_index() + lane_index() / 4, column = 2 * (lane_index() % 4);
  uint32_t a[kDepth / 16][4];
  FW_UNROLL
  for (unsigned k = 0; k < kDepth / 16; ++k) {
    FW_UNROLL
    for (unsigned i = 0; i < 4; ++i)
      a[k][i] =
          *reinterpret_cast<const uint32_t*>(args.a + (row + 8 * (i % 2)) * kDepth + 16 * k + 8 * (i / 2) + column);
  }
  const uint32_t a_base = shared_address(memory), b_base = shared_address(memory + kA);
  float d[N / 2], ones[N / 2];
  FW_UNROLL
  for (int i = 0; i < N / 2; ++i) d[i] = 1e30f, ones[i] = 1;
  auto multiply = [&](float(&to)[N / 2], bool accumulate) {
    FW_UNROLL
    for (unsigned k = 0; k < kDepth / 16; ++k) {
      const uint64_t b = kTransposeB ? wgmma_descriptor(b_base + k * 2048, kSw128Bytes, 1024)
                                     : wgmma_descriptor(b_base + k / 4 * N * 128 + k % 4 * 32, 16, 1024);
      if constexpr (kLeft == Left::kRegisters)
        wgmma_rs<N, kTransposeB>(to, a[k], b, accumulate || k > 0);
      else if constexpr (kLeft == Left::kRows)
        wgmma_ss<N, false, kTransposeB>(to, wgmma_descriptor(a_base + k / 4 * 8192 + k % 4 * 32, 16, 1024), b,
                                        accumulate || k > 0);
      else
        wgmma_ss<N, true, kTransposeB>(to, wgmma_descriptor(a_base + k * 2048, kSw128Bytes, 1024), b,
                                       accumulate || k > 0);
    }
    wgmma_commit();
  };
  wgmma_fence();
  multiply(d, false);
  multiply(ones, true);
  wgmma_wait<1>();
  keep(d);
  FW_UNROLL
  for (unsigned i = 0; i < N / 2; ++i) args.d[(row + 8 * (i / 2 % 2)) * N + 8 * (i / 4) + column + i % 2] = d[i];
  wgmma_wait<0>();
  keep(ones);
  FW_UNROLL
  for (unsigned i = 0; i < N / 2; ++i) args.ones[(row + 8 * (i / 2 % 2)) * N + 8 * (i / 4) + column + i % 2] = ones[i];
}

}  // namespace fw::cuda::test
