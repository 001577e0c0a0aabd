// Every function of ptx.cuh against a plain loop: one line a test, the exit status says whether all are right. The same
// source is built by nvcc for a GPU and by the C++ compiler for the emulation, which thus is checked against the
// hardware.
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <limits>
#include <string>
#include <vector>

#include "device_buffer.h"
#include "ptx_kernels.cuh"
#include "scan/cuda/tiles.h"

namespace fw::cuda::test {
namespace {

int failures = 0;

// Counts what differs and shows the first.
class Test {
 public:
  explicit Test(std::string name) : name_(std::move(name)) {}
  ~Test() {
    std::printf("%s %s", wrong_ != 0 ? "WRONG " : std::uncaught_exceptions() > 0 ? "ENDED " : "ok    ", name_.c_str());
    if (wrong_) std::printf(": %d of %d, the first at %zu: %.9g, expected %.9g", wrong_, all_, where_, is_, expected_);
    std::printf("\n");
    std::fflush(stdout);
    failures += wrong_ != 0;
  }
  void equal(std::size_t where, double is, double expected, double tolerance = 0) {
    ++all_;
    if (is == expected || std::abs(is - expected) <= tolerance * std::abs(expected) ||
        (std::isnan(is) && std::isnan(expected)))
      return;
    if (wrong_++ == 0) where_ = where, is_ = is, expected_ = expected;
  }

 private:
  std::string name_;
  int wrong_ = 0, all_ = 0;
  std::size_t where_ = 0;
  double is_ = 0, expected_ = 0;
};

// On the host; ptx.cuh has the same for the device.
float host_float(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}
uint32_t host_bits(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return bits;
}
uint32_t host_bf16(float x) {
  if (std::isnan(x)) return 0x7fff;
  const uint32_t bits = host_bits(x);
  return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
// Small whole numbers: their products and sums are exact.
std::vector<float> whole_numbers(std::size_t size, uint32_t seed) {
  std::vector<float> values(size);
  for (float& x : values) {
    seed = seed * 1664525u + 1013904223u;
    x = static_cast<float>(static_cast<int>(seed >> 24) % 9 - 4);
  }
  return values;
}

void test_matrices() {
  DeviceBuffer<uint32_t> to(std::size_t{384});
  DeviceBuffer<uint16_t> stored(std::size_t{1024});
  launch(matrix_kernel, {1, 1, 1}, 32, 512, nullptr, MatrixArgs{to.data(), stored.data()});
  const auto loaded = to.download();
  const auto back = stored.download();
  for (unsigned kind = 0; kind < 3; ++kind) {
    Test test(kind == 0 ? "ldmatrix_x4" : kind == 1 ? "ldmatrix_x4_trans" : "ldmatrix_x2_trans");
    for (unsigned lane = 0; lane < 32; ++lane)
      for (unsigned i = 0; i < (kind < 2 ? 4u : 2u); ++i)
        for (unsigned e = 0; e < 2; ++e) {
          const unsigned row = lane / 4, column = 2 * (lane % 4) + e;
          test.equal(lane * 4 + i, loaded[kind * 128 + lane * 4 + i] >> 16 * e & 0xffff,
                     i * 64 + (kind != 0 ? column * 8 + row : row * 8 + column));
        }
  }
  constexpr const char* kStores[] = {"stmatrix_x4", "stmatrix_x4_trans", "store_matrix_words",
                                     "store_matrix_words, transposed"};
  for (unsigned kind = 0; kind < 4; ++kind) {
    Test test(kStores[kind]);
    for (unsigned lane = 0; lane < 32; ++lane)
      for (unsigned i = 0; i < 4; ++i)
        for (unsigned e = 0; e < 2; ++e) {
          const unsigned row = lane / 4, column = 2 * (lane % 4) + e;
          const unsigned index = i * 64 + (kind % 2 == 1 ? column * 8 + row : row * 8 + column);
          test.equal(index, back[kind * 256 + index], (lane * 4 + i) * 2 + e);
        }
  }
}

void test_warp_products() {
  const auto left = whole_numbers(64 * 128, 4), right = whole_numbers(128 * 64, 5);
  DeviceBuffer<float> a(left), b(right), d(std::vector<float>(kWarpProducts * 64 * 64));
  launch(warp_product_kernel, {1, 1, 1}, 128, 3 * kSw128Bytes, nullptr, WarpProductArgs{a.data(), b.data(), d.data()});
  const auto got = d.download();
  for (int product = 0; product < kWarpProducts; ++product) {
    Test test("warp product " + std::to_string(product));
    for (std::size_t i = 0; i < 64 * 64; ++i) {
      double sum = 0;
      for (std::size_t k = 0; k < (product == 4 ? 128u : 64u); ++k)
        sum += static_cast<double>(left[i / 64 * 128 + k]) * right[k * 64 + i % 64];
      test.equal(i, got[static_cast<std::size_t>(product) * 64 * 64 + i], sum);
    }
  }
}

void test_mma() {
  const auto a = whole_numbers(256, 1), b = whole_numbers(128, 2), c = whole_numbers(128, 3);
  DeviceBuffer<float> a_device(a), b_device(b), d(c), d_tf32(c);
  launch(mma_kernel, {1, 1, 1}, 32, 0, nullptr, MmaArgs{a_device.data(), b_device.data(), d.data(), d_tf32.data()});
  for (unsigned depth : {16u, 8u}) {
    Test test(depth == 16 ? "mma_bf16" : "mma_tf32");
    const auto is = (depth == 16 ? d : d_tf32).download();
    for (unsigned m = 0; m < 16; ++m)
      for (unsigned n = 0; n < 8; ++n) {
        double sum = c[m * 8 + n];
        for (unsigned k = 0; k < depth; ++k) sum += a[m * 16 + k] * b[k * 8 + n];
        test.equal(m * 8 + n, is[m * 8 + n], sum);
      }
  }
}

void test_numbers() {
  std::vector<float> x = {0.0f,    -0.0f, 1.0f,     -1.0f,  1.00390625f, 1.01171875f, -1.00390625f,
                          3.3e38f, 1e-3f, 65504.0f, 1e-40f, -150.0f,     127.5f,      -126.5f};
  for (uint32_t bits :
       {0x3f808000u, 0x3f818000u, 0x3f808001u, 0x3f801000u, 0x3f803000u, 0x3f800fffu, 0x7f7fffffu, 0xff7fffffu})
    x.push_back(host_float(bits));
  x.push_back(std::numeric_limits<float>::infinity());
  x.push_back(-std::numeric_limits<float>::infinity());
  for (float y : whole_numbers(200, 4)) x.push_back(y * 1.2345f);
  for (int i = -100; i <= 100; ++i) x.push_back(3.1415925f * static_cast<float>(i) / 100);
  DeviceBuffer<float> from(x);
  DeviceBuffer<uint32_t> to(x.size() * 7);
  launch(scalar_kernel, {static_cast<unsigned>((x.size() + 63) / 64), 1, 1}, 64, 0, nullptr,
         ScalarArgs{from.data(), to.data(), static_cast<unsigned>(x.size())});
  const auto y = to.download();
  Test bf16("bf16_bits, pack_bf16"), exp2("exp2_fast"), log2("log2_fast"), reciprocal("rcp_fast"), sine("sin_fast"),
      cosine("cos_fast");
  for (std::size_t i = 0; i < x.size(); ++i) {
    const uint32_t* is = &y[i * 7];
    bf16.equal(i, is[0], host_bf16(x[i]));
    bf16.equal(i, is[1], host_bf16(x[i]) | 0x3f800000u);
    const bool zero = std::abs(x[i]) < 1.1754944e-38f;
    const float normal = zero ? std::copysign(0.0f, x[i]) : x[i];
    double power = std::exp2(static_cast<double>(normal));
    if (power < 1.1754943e-38) power = 0;
    if (power > 3.5e38) power = INFINITY;
    exp2.equal(i, host_float(is[2]), power, 1e-6);
    // Near 1 the error is absolute.
    const double more = normal > 0.5f && normal < 2 ? 2 : 0;
    log2.equal(i, host_float(is[3]) + more, std::log2(normal) + more, 1e-6);
    double inverse = 1 / static_cast<double>(normal);
    if (std::abs(inverse) < 1.1754943e-38) inverse = 0;
    reciprocal.equal(i, host_float(is[4]), inverse, 1e-6);
    if (std::abs(x[i]) > 3.1415928f) continue;
    const double angle = static_cast<double>(x[i]);
    sine.equal(i, 1.5 + static_cast<double>(host_float(is[5])), 1.5 + std::sin(angle), 1e-6);
    cosine.equal(i, 1.5 + static_cast<double>(host_float(is[6])), 1.5 + std::cos(angle), 1e-6);
  }
}

void test_add_there() {
  constexpr unsigned kBlocks = 40, kThreads = 256, kAll = kBlocks * kThreads;
  DeviceBuffer<float4> sums(std::size_t{kAll}), to(std::size_t{3 * kAll});
  launch(add_there_kernel, {kBlocks, 1, 1}, kThreads, 0, nullptr, AddThereArgs{sums.data(), to.data()});
  const auto y = to.download();
  Test test("add_there, load_behind_l1");
  for (unsigned round = 0; round < 3; ++round) {
    for (unsigned i = 0; i < kAll; ++i) {
      const float4 is = y[round * kAll + i];
      const double x = i + round;
      test.equal(i, is.x, 0), test.equal(i, is.y, 0), test.equal(i, is.z, x + 6), test.equal(i, is.w, 8 - x);
    }
  }
}

void test_shuffles() {
  constexpr unsigned kBlocks = 3 * 2 * 2;
  DeviceBuffer<uint32_t> to(std::size_t{kBlocks * 64 * 10});
  launch(shuffle_kernel, {3, 2, 2}, 64, 0, nullptr, ShuffleArgs{to.data()});
  const auto y = to.download();
  Test test("grid, shuffles, ballot, warp_sum, warp_max");
  for (unsigned block = 0; block < kBlocks; ++block)
    for (unsigned thread = 0; thread < 64; ++thread) {
      const unsigned lane = thread % 32, first = block * 1000 + thread - lane;
      const uint32_t* is = &y[(block * 64 + thread) * 10];
      uint32_t ballot = 0;
      float sum = 0, largest = 0;
      for (unsigned i = 0; i < 32; ++i) {
        const unsigned other = thread - lane + i;
        ballot |= (other % 3 == 0 ? 1u : 0u) << i;
        sum += static_cast<float>(other);
        largest = std::fmax(largest, static_cast<float>(other ^ 21));
      }
      const unsigned far = lane ^ 12;  // earlier segments can be read, later ones not
      const unsigned expected[] = {first + (lane ^ 5),
                                   first + (far / 8 > lane / 8 ? lane : far),
                                   first + (lane + 3 < 32 ? lane + 3 : lane),
                                   first + (lane % 8 + 3 < 8 ? lane + 3 : lane),
                                   first + (lane >= 2 ? lane - 2 : lane),
                                   first + thread % 7,
                                   first + lane / 4 * 4 + 3,
                                   ballot,
                                   host_bits(sum),
                                   host_bits(largest)};
      for (unsigned i = 0; i < 10; ++i) test.equal((block * 64 + thread) * 10 + i, is[i], expected[i]);
    }
}

void test_copies() {
  constexpr unsigned kRows = 9;
  std::vector<uint32_t> from(kRows * 256);
  for (std::size_t i = 0; i < from.size(); ++i) from[i] = static_cast<uint32_t>(i * i);
  DeviceBuffer<uint32_t> from_device(from), sum(std::size_t{512});
  launch(copy_kernel, {1, 1, 1}, 64, 2048 + 8, nullptr, CopyArgs{from_device.data(), sum.data(), kRows});
  const auto is = sum.download();
  for (unsigned kind = 0; kind < 2; ++kind) {
    Test test(kind == 0 ? "cp_async_16, cp_async_wait" : "cp_async_arrive");
    for (unsigned i = 0; i < 256; ++i) {
      uint32_t expected = 0;
      for (unsigned row = 0; row < kRows; ++row) expected += (row + i / 4) % 3 ? from[row * 256 + i] : 0;
      test.equal(i, is[kind * 256 + i], expected);
    }
  }
}

void test_bulk() {
  constexpr std::size_t kRows = 11;
  const auto from = whole_numbers(kRows * kRow, 5);
  DeviceBuffer<float> from_device(from), to(kRows * kRow);
  launch(bulk_kernel, {1, 1, 1}, 256, kBulkShared, nullptr, BulkArgs{from_device.data(), to.data(), kRows});
  const auto stored = to.download();
  Test store("mbarrier, bulk_load, bulk_store");
  for (std::size_t i = 0; i < kRows * kRow; ++i) store.equal(i, stored[i], 2 * from[i]);
}

// Of a tensor [B, T, heads, dim] with rows farther apart than they are long: inside, over its ends, and what TMA does
// not take.
void test_tensor() {
  constexpr int kB = 2, kT = 70, kHeads = 3, kDim = 72, kToHead = 80, kToToken = kHeads * kToHead + 8,
                kToBatch = kT * kToToken + 16;
  std::vector<uint16_t> from(static_cast<std::size_t>(kB) * kToBatch);
  for (std::size_t i = 0; i < from.size(); ++i) from[i] = static_cast<uint16_t>(i * 40503u >> 3);
  DeviceBuffer<uint16_t> from_device(from), to(std::size_t{64 * 64});
  const TokenArg tensor{from_device.data(), kToBatch, kToToken, kToHead, 1, 1};
  Test test("tensor_load");
  TensorArgs args{{}, 0, 0, 0, 0, to.data()};
  test.equal(0, make_tensor_map(tensor, kB, kT, kHeads, kDim, args.map), true);
  // column, head, token, batch
  const int corners[][4] = {{0, 0, 0, 0}, {0, 2, 6, 1}, {64, 1, 0, 1}, {0, 1, 64, 0}, {64, 2, 64, 1}};
  for (const auto& corner : corners) {
    args.column = corner[0], args.head = corner[1], args.token = corner[2], args.batch = corner[3];
    launch(tensor_kernel, {1, 1, 1}, 128, kTensorShared, nullptr, args);
    const auto sw128 = to.download();
    for (int row = 0; row < 64; ++row) {
      for (int column = 0; column < 64; ++column) {
        const int c = args.column + column, t = args.token + row;
        const std::size_t at = static_cast<std::size_t>(args.batch) * kToBatch +
                               static_cast<std::size_t>(t) * kToToken + static_cast<std::size_t>(args.head) * kToHead;
        const uint16_t expected = c < kDim && t < kT ? from[at + static_cast<std::size_t>(c)] : uint16_t{0};
        test.equal(static_cast<std::size_t>(sw128_index(row, column)),
                   sw128[static_cast<std::size_t>(sw128_index(row, column))], expected);
      }
    }
  }
  for (const int rows : {16, 32, 128}) {
    test.equal(7, make_tensor_map(tensor, kB, kT, kHeads, kDim, args.map, rows), true);
    DeviceBuffer<uint16_t> sw128_tiles(static_cast<std::size_t>(rows) * 64);
    args.column = 64, args.head = 1, args.token = 60, args.batch = 1, args.to = sw128_tiles.data(), args.rows = rows;
    launch(tensor_kernel, {1, 1, 1}, 128, kTensorShared, nullptr, args);
    const auto sw128 = sw128_tiles.download();
    for (int row = 0; row < rows; ++row) {
      for (int column = 0; column < 64; ++column) {
        const int c = args.column + column, t = args.token + row;
        const std::size_t at = std::size_t{kToBatch} + static_cast<std::size_t>(t) * kToToken + kToHead;
        const uint16_t expected = c < kDim && t < kT ? from[at + static_cast<std::size_t>(c)] : uint16_t{0};
        const auto index = static_cast<std::size_t>(row * 64 + ((column / 8) ^ (row & 7)) * 8 + column % 8);
        test.equal(index, sw128[index], expected);
      }
    }
  }
  const auto refused = [&](const TokenArg& a, int64_t T, int64_t dim) {
    TensorMap map;
    return !make_tensor_map(a, kB, T, kHeads, dim, map);
  };
  TokenArg other = tensor;
  other.bf16 = 0;
  test.equal(1, refused(other, kT, kDim), true);
  other = tensor, other.data = from_device.data() + 1;
  test.equal(2, refused(other, kT, kDim), true);
  other = tensor, other.stride_h = 81;
  test.equal(3, refused(other, kT, kDim), true);
  other = tensor, other.data = nullptr;
  test.equal(4, refused(other, kT, kDim), true);
  test.equal(5, refused(tensor, 0, kDim), true);
  test.equal(6, refused(tensor, kT, 70), true);
}

// Three clusters of each size from `smallest` on, two rounds, a number of each thread in each: expected(cluster, the
// cluster's first block, block, thread, round).
template <class Expected>
void test_clusters(const char* name, void (*kernel)(ClusterArgs), std::size_t shared_bytes, unsigned smallest,
                   const Expected& expected) {
  Test test(name);
  for (unsigned cluster = smallest; cluster <= 8; cluster *= 2) {
    const unsigned blocks = 3 * cluster;
    DeviceBuffer<uint32_t> sums(std::size_t{2} * blocks * 128);
    launch_overlapped_clusters(kernel, {blocks, 1, 1}, cluster, 128, shared_bytes, nullptr,
                               ClusterArgs{sums.data(), static_cast<int>(cluster)});
    const auto is = sums.download();
    for (unsigned i = 0; i < 2 * blocks * 128; ++i) {
      const unsigned block = i / 128 % blocks;
      test.equal(i, is[i], expected(cluster, block / cluster * cluster, block, i % 128, i / (blocks * 128)));
    }
  }
}

void test_cluster_memory() {
  test_clusters("cluster_sync, cluster_memory", cluster_kernel, 512, 1,
                [](unsigned cluster, unsigned first, unsigned, unsigned thread, unsigned round) {
                  uint32_t sum = 0;
                  for (unsigned block = first; block < first + cluster; ++block)
                    sum = 3 * sum + (block + 1) * 1000 + (thread ^ 37) * (round + 1);
                  return sum;
                });
}

void test_cluster_copies() {
  test_clusters("cluster_copy, cluster_arrive, cluster_wait", cluster_copy_kernel, 1032, 2,
                [](unsigned cluster, unsigned first, unsigned block, unsigned thread, unsigned round) {
                  const unsigned before = first + (block - first + cluster - 1) % cluster;
                  return (before + 1) * 1000 + thread * (round + 1);
                });
}

void test_multicast() {
  constexpr int kClusters = 2, kRounds = 5;
  Test test("tensor_load_multicast, mbarrier_arrive_at");
  for (int cluster = 2; cluster <= 8; cluster *= 2) {
    const int rows = 8 * cluster, blocks = kClusters * cluster, tokens = kClusters * kRounds * rows;
    std::vector<uint16_t> from(static_cast<std::size_t>(tokens) * 64);
    for (std::size_t i = 0; i < from.size(); ++i) from[i] = static_cast<uint16_t>(i * 40503u >> 3);
    DeviceBuffer<uint16_t> from_device(from), to(static_cast<std::size_t>(blocks * kRounds * rows) * 64);
    MulticastArgs args{{}, to.data(), cluster, kRounds};
    const TokenArg tensor{from_device.data(), 0, 64, 0, 1, 1};
    test.equal(0, make_tensor_map(tensor, 1, tokens, 1, 64, args.map, 8), true);
    launch_overlapped_clusters(multicast_kernel, {static_cast<unsigned>(blocks), 1, 1}, static_cast<unsigned>(cluster),
                               128, kMulticastShared, nullptr, args);
    const auto is = to.download();
    for (std::size_t i = 0; i < is.size(); ++i) {
      const int at = static_cast<int>(i) / 64 % rows, piece = static_cast<int>(i) % 64 / 8 ^ at % 8,
                round = static_cast<int>(i) / (64 * rows) % kRounds,
                first = static_cast<int>(i) / (64 * rows * kRounds) / cluster;
      test.equal(i, is[i],
                 from[static_cast<std::size_t>(((first * kRounds + round) * rows + at) * 64 + piece * 8) + i % 8]);
    }
  }
}

void test_named_barriers() {
  constexpr int kRounds = 5;
  DeviceBuffer<uint32_t> y(std::size_t{128});
  launch(ping_kernel, {1, 1, 1}, 256, 512, nullptr, PingArgs{y.data(), kRounds});
  std::vector<uint32_t> row(128), last(128);
  for (unsigned i = 0; i < 128; ++i) row[i] = i;
  for (int round = 0; round < kRounds; ++round) {
    last = row;
    for (unsigned i = 0; i < 128; ++i) row[i] = 3 * last[(i + 1) % 128] + 1;
  }
  const auto is = y.download();
  Test test("named_barrier_sync, named_barrier_arrive");
  for (unsigned i = 0; i < 128; ++i) test.equal(i, is[i], row[i]);
}

void test_chain() {
  constexpr unsigned kSize = 256 * 64;
  std::vector<uint32_t> x(kSize);
  for (unsigned i = 0; i < kSize; ++i) x[i] = i;
  DeviceBuffer<uint32_t> first(x), second(std::size_t{kSize});
  launch(chain_kernel, {0, 1, 1}, 256, 0, nullptr, ChainArgs{nullptr, nullptr});
  for (int i = 0; i < 5; ++i) {
    launch_overlapped(chain_kernel, {64, 1, 1}, 256, 0, nullptr, ChainArgs{first.data(), second.data()});
    launch_overlapped(chain_kernel, {64, 1, 1}, 256, 0, nullptr, ChainArgs{second.data(), first.data()});
  }
  const auto is = first.download();
  Test test("launch_overlapped, grid_dependency_wait, empty grid");
  for (unsigned i = 0; i < kSize; ++i) test.equal(i, is[i], i + 10);
}

void test_counts() {
  constexpr unsigned kGroups = 150;
  DeviceBuffer<float> rows(std::size_t{kGroups * kCountGroup * kCountRow}), sums(std::size_t{kGroups});
  DeviceBuffer<uint32_t> plain(std::size_t{kGroups * kCountGroup}), counters(std::vector<uint32_t>(kGroups, 0)),
      plain_sums(std::size_t{kGroups});
  const CountArgs args{rows.data(), plain.data(), counters.data(), sums.data(), plain_sums.data()};
  launch(count_kernel, {kGroups * kCountGroup, 1, 1}, 128, kCountShared, nullptr, args);
  launch_overlapped(after_count_kernel, {kGroups, 1, 1}, 128, kCountShared, nullptr, args);
  const auto is = sums.download();
  const auto plain_is = plain_sums.download();
  Test test("release_add_one, wait_for_count, load_acquire, fence_async_global");
  for (unsigned group = 0; group < kGroups; ++group) {
    float sum = 0;
    uint32_t plain_sum = kCountGroup;
    for (unsigned block = group * kCountGroup; block < (group + 1) * kCountGroup; ++block) {
      for (unsigned i = 0; i < kCountRow; ++i) sum += static_cast<float>(block * 7 + i % 16);
      plain_sum += 3 * block + 1;
    }
    test.equal(group, is[group], sum);
    test.equal(group, plain_is[group], plain_sum);
  }
}

// rows x columns in SW128 tiles of 64 columns with the 128-byte swizzle, as wgmma.cuh describes them.
std::vector<uint16_t> sw128_tiles(const std::vector<float>& values, std::size_t rows, std::size_t columns) {
  std::vector<uint16_t> chunk_tile((columns + 63) / 64 * rows * 64);
  for (std::size_t r = 0; r < rows; ++r)
    for (std::size_t c = 0; c < columns; ++c)
      chunk_tile[c / 64 * rows * 64 + r * 64 + ((c % 64 / 8) ^ (r % 8)) * 8 + c % 8] =
          static_cast<uint16_t>(host_bf16(values[r * columns + c]));
  return chunk_tile;
}
std::vector<float> transposed(const std::vector<float>& values, std::size_t rows, std::size_t columns) {
  std::vector<float> result(values.size());
  for (std::size_t r = 0; r < rows; ++r)
    for (std::size_t c = 0; c < columns; ++c) result[c * rows + r] = values[r * columns + c];
  return result;
}

template <int N, bool kTransposeB, Left kLeft>
void test_wgmma() {
  const auto a = whole_numbers(64 * kDepth, 7), b = whole_numbers(kDepth * N, 8);
  std::vector<uint16_t> a_tile =
      kLeft == Left::kColumns ? sw128_tiles(transposed(a, 64, kDepth), kDepth, 64) : sw128_tiles(a, 64, kDepth);
  if (kLeft == Left::kRegisters)
    for (std::size_t i = 0; i < a.size(); ++i) a_tile[i] = static_cast<uint16_t>(host_bf16(a[i]));
  std::vector<uint16_t> b_tile =
      kTransposeB ? sw128_tiles(b, kDepth, N) : sw128_tiles(transposed(b, kDepth, N), N, kDepth);
  b_tile.resize((kWgmmaShared<N> - 64 * kDepth * 2) / 2);
  DeviceBuffer<uint16_t> a_device(a_tile), b_device(b_tile);
  DeviceBuffer<float> d(std::size_t{64 * N}), ones(std::size_t{64 * N});
  launch(wgmma_kernel<N, kTransposeB, kLeft>, {1, 1, 1}, 128, kWgmmaShared<N>, nullptr,
         WgmmaArgs{a_device.data(), b_device.data(), d.data(), ones.data()});
  const auto is = d.download(), plus_one = ones.download();
  const char* left = kLeft == Left::kRegisters ? "wgmma_rs"
                     : kLeft == Left::kRows    ? "wgmma_ss, a K-major"
                                               : "wgmma_ss, a M-major";
  Test test(std::string(left) + ", b " + (kTransposeB ? "N" : "K") + "-major, N = " + std::to_string(N));
  for (std::size_t m = 0; m < 64; ++m)
    for (std::size_t n = 0; n < N; ++n) {
      float sum = 0;
      for (std::size_t k = 0; k < kDepth; ++k) sum += a[m * kDepth + k] * b[k * N + n];
      test.equal(m * N + n, is[m * N + n], sum);
      test.equal(m * N + n, plus_one[m * N + n], sum + 1);
    }
}
template <int N, bool kTransposeB>
void test_wgmma_all() {
  test_wgmma<N, kTransposeB, Left::kRegisters>();
  test_wgmma<N, kTransposeB, Left::kRows>();
  test_wgmma<N, kTransposeB, Left::kColumns>();
}

int run_all() {
  if (!hopper()) return kNotRun;
  test_numbers();
  test_add_there();
  test_shuffles();
  test_matrices();
  test_mma();
  test_warp_products();
  test_copies();
  test_bulk();
  test_tensor();
  test_cluster_memory();
  test_cluster_copies();
  test_multicast();
  test_named_barriers();
  test_chain();
  test_counts();
  test_wgmma_all<32, false>();
  test_wgmma_all<32, true>();
  test_wgmma_all<64, false>();
  test_wgmma_all<64, true>();
  test_wgmma_all<128, false>();
  test_wgmma_all<128, true>();
  test_wgmma<8, false, Left::kRegisters>();
  test_wgmma<16, true, Left::kRegisters>();
  test_wgmma<16, false, Left::kRows>();
  test_wgmma<48, false, Left::kRegisters>();
  test_wgmma<96, false, Left::kRegisters>();
  std::printf("%d failures\n", failures);
  return failures ? 1 : 0;
}

}  // namespace
}  // namespace fw::cuda::test

int main() {
  try {
    return fw::cuda::test::run_all();
  } catch (const std::exception& error) {
    std::printf("%s\n", error.what());
    return 2;
  }
}
