// prepare against the definitions of recurrence.md (sections 1 and 4) in double, chunk by chunk: every entry of every
// chunk tile, for the named rules and for random ones. One line a test with the largest relative error of each chunk
// tile; the exit status says whether all are within bounds. Built by nvcc for a GPU and by the C++ compiler for the
// emulation. prepare_test [random rules] [seed]
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <random>
#include <string>
#include <type_traits>
#include <vector>

#include "cuda/selected.h"
#include "device_buffer.h"
#include "gpu/ptx.cuh"
#include "prepare_problem.h"
#include "scan/cuda/kernels.h"
#include "test_numbers.h"

namespace fw::cuda::test {
namespace {

// The largest relative L2 error of a chunk, by name of the chunk tile.
using Errors = std::map<std::string, double>;

void note(Errors& errors, const std::string& name, double error) {
  double& worst = errors[name];
  if (!(error <= worst) && !std::isnan(worst)) worst = error;
}

void compare(Errors& errors, const std::string& name, const uint16_t* chunk_tile, const Matrix& expected, int columns,
             double least = 0, double growth = 1) {
  double difference = 0, norm = 0;
  for (int i = 0; i < 64; ++i) {
    for (int j = 0; j < columns; ++j) {
      const double is = from_bf16(chunk_tile[sw128_index(i, j)]),
                   should = expected[static_cast<std::size_t>(i * columns + j)];
      difference += (is - should) * (is - should);
      norm += should * should;
    }
  }
  // An chunk tile of numbers that are all next to nothing (decays of thousands) is compared with 1e-30.
  note(errors, name, std::sqrt(difference) / std::max({std::sqrt(norm), least, 1e-30}) / growth);
}

// A matrix with its lo parts, if there are any, rows times scale, if that is there.
void compare_hi_lo(Errors& errors, const std::string& name, const uint16_t* chunk_tile, const uint16_t* lo_parts,
                   const float* scale, const Matrix& expected, int columns, double growth = 1) {
  double difference = 0, norm = 0;
  for (int i = 0; i < 64; ++i) {
    for (int j = 0; j < columns; ++j) {
      const std::size_t at = static_cast<std::size_t>(sw128_index(i, j));
      const double sum = from_bf16(chunk_tile[at]) + (lo_parts != nullptr ? from_bf16(lo_parts[at]) : 0),
                   is = scale != nullptr ? scale[i] * sum : sum;
      const double should = expected[static_cast<std::size_t>(i * columns + j)];
      difference += (is - should) * (is - should);
      norm += should * should;
    }
  }
  note(errors, name, std::sqrt(difference) / std::max(std::sqrt(norm), 1e-30) / growth);
}

void compare(Errors& errors, const std::string& name, const float* is, const Matrix& expected) {
  for (std::size_t i = 0; i < expected.size(); ++i)
    note(errors, name, std::abs(is[i] - expected[i]) / std::max(std::abs(expected[i]), 1e-30));
}

// Rows of tensors of the chunk's tokens `first` to first + rows - 1, each times a scale per row, summed.
struct Scaled {
  const float* factors;  // null: nothing
  const Tensor& raw;
};
void compare_rows(Errors& errors, const std::string& name, const Scaled& a, const Scaled& b, int K, int64_t first,
                  int rows, int head, const Matrix& expected, int columns) {
  double difference = 0, norm = 0;
  for (const Scaled& x : {a, b}) {
    for (int i = rows; i < 64 && x.factors != nullptr; ++i) {
      if (x.factors[i] != 0) note(errors, name, kInfinity);
    }
  }
  const auto value = [&](const Scaled& x, int i, int j) {
    return x.factors != nullptr && i < rows ? x.factors[i] * x.raw.at(first + i, head, j) : 0.0;
  };
  for (int i = 0; i < 64; ++i) {
    for (int j = 0; j < K; ++j) {
      const double is = value(a, i, j) + value(b, i, j), should = expected[static_cast<std::size_t>(i * columns + j)];
      difference += (is - should) * (is - should);
      norm += should * should;
    }
  }
  note(errors, name, std::sqrt(difference) / std::max(std::sqrt(norm), 1e-30));
}

// Of rules with stores_k_hat(): the two parts of a FwdTiles, and both as one.
template <int kTileK>
struct InParts {
  DeviceBuffer<uint8_t> streams, solved;
  std::size_t items;
  explicit InParts(std::size_t n)
      : streams(n * sizeof(QETiles<kTileK>)), solved(n * sizeof(XMTiles<kTileK>)), items(n) {}
  void give(PrepareArgs& args) { args.forward = streams.data(), args.solved = solved.data(); }
  std::vector<uint8_t> joined() const {
    const std::vector<uint8_t> first = streams.download(), second = solved.download();
    std::vector<uint8_t> all(items * sizeof(FwdTiles<kTileK>));
    for (std::size_t i = 0; i < items; ++i) {
      auto& chunk_tile = reinterpret_cast<FwdTiles<kTileK>*>(all.data())[i];
      const auto& s = reinterpret_cast<const QETiles<kTileK>*>(first.data())[i];
      const auto& x = reinterpret_cast<const XMTiles<kTileK>*>(second.data())[i];
      std::memcpy(chunk_tile.e, s.e, sizeof chunk_tile.e), std::memcpy(chunk_tile.q, s.q, sizeof chunk_tile.q);
      std::memcpy(chunk_tile.x, x.x, sizeof chunk_tile.x), std::memcpy(chunk_tile.m, x.m, sizeof chunk_tile.m);
      std::memcpy(chunk_tile.gamma, s.gamma, sizeof chunk_tile.gamma),
          std::memcpy(chunk_tile.z_scale, s.z_scale, sizeof chunk_tile.z_scale);
    }
    return all;
  }
};

// What prepare leaves for the forward scan.
template <int kTileK>
Tiles tiles_of(const Problem& problem, const Case& test, int64_t chunks) {
  PrepareArgs args;
  args.problem = problem;
  return selected(args, kTileK, chunks, test.cut).leaves;
}

template <int kTileK>
Errors run_case(const Case& test, std::vector<uint8_t>* bits) {
  const Rule& rule = test.rule;
  const bool packed = !test.lengths.empty();
  int64_t T = test.T;
  std::vector<int32_t> offsets = {0}, bases = {0};
  if (packed) {
    for (const int length : test.lengths) {
      offsets.push_back(offsets.back() + length);
      bases.push_back(bases.back() + (length + 63) / 64);
    }
    T = offsets.back();
  }
  Case sized = test;
  if (packed) sized.B = 1;
  const Inputs in = make_inputs(sized, T);
  const DeviceBuffer<int32_t> device_offsets(offsets), device_bases(bases);

  PrepareArgs args;
  args.problem = problem_of(sized, in, T);
  Problem& x = args.problem;
  if (packed) {
    x.sequences.offsets = const_cast<DeviceBuffer<int32_t>&>(device_offsets).data();
    x.sequences.chunk_base = const_cast<DeviceBuffer<int32_t>&>(device_bases).data();
    x.sequences.N = static_cast<int32_t>(test.lengths.size());
  } else {
    x.sequences.N = sized.B, x.sequences.T = static_cast<int32_t>(T),
    x.sequences.chunks = static_cast<int32_t>((T + 63) / 64);
  }
  const int64_t chunks = packed ? bases.back() : sized.B * ((T + 63) / 64), items = chunks * test.HV;
  const int value_blocks = (test.V + 63) / 64;
  const Tiles leaves = tiles_of<kTileK>(x, test, chunks);
  const bool of_rows = leaves == kRowTiles, of_pairs = (leaves & kIntraChunk) != 0, of_keys = stores_k_hat(rule);
  DeviceBuffer<uint8_t> forward(static_cast<std::size_t>(items) * (of_pairs  ? sizeof(RowScales)
                                                                   : of_rows ? sizeof(RowTiles<kTileK>)
                                                                             : sizeof(FwdTiles<kTileK>))),
      backward(static_cast<std::size_t>(items) * sizeof(BwdTiles<kTileK>)),
      numbers(static_cast<std::size_t>(items) * sizeof(RowScalesBwd)),
      pairs(static_cast<std::size_t>(items) * sizeof(IntraChunk)),
      z(static_cast<std::size_t>(items) * static_cast<std::size_t>(value_blocks) * (2 * kSw128Elements)),
      forward_lo(static_cast<std::size_t>(items) * sizeof(LoTiles<kTileK>)),
      backward_lo(static_cast<std::size_t>(items) * sizeof(LoTiles<kTileK>)),
      e_lo(static_cast<std::size_t>(items) * (128 * kTileK)), k_lo(static_cast<std::size_t>(items) * (128 * kTileK));
  const bool hi_lo = uses_hi_lo(rule), by_rows = reverse_takes_rows(rule);
  const bool all = bits == nullptr || bits->empty();
  InParts<kTileK> parts(of_keys ? static_cast<std::size_t>(items) : 0);
  DeviceBuffer<uint16_t> keys(of_keys ? static_cast<std::size_t>(items) * (64 * kTileK) : 0);
  args.forward = forward.data();
  args.keeps_intra_chunk = of_pairs;
  if (of_keys) parts.give(args);
  args.backward = all && !by_rows && !of_keys ? backward.data() : nullptr;
  args.keys = all && of_keys ? keys.data() : nullptr;
  args.numbers = all && by_rows ? reinterpret_cast<RowScalesBwd*>(numbers.data()) : nullptr;
  args.pairs = all || of_pairs ? reinterpret_cast<IntraChunk*>(pairs.data()) : nullptr;
  args.z = test.z ? reinterpret_cast<uint16_t*>(z.data()) : nullptr;
  const auto lo_tiles = [&](DeviceBuffer<uint8_t>& chunk_tiles, DeviceBuffer<uint8_t>& lo_parts) {
    return HiLoTiles{chunk_tiles.data(), test.keys_lo ? reinterpret_cast<uint16_t*>(lo_parts.data()) : nullptr};
  };
  if (hi_lo) args.forward_lo = lo_tiles(forward_lo, e_lo);
  if (hi_lo && all) args.backward_lo = lo_tiles(backward_lo, k_lo);
  prepare(args, selected(args, kTileK, chunks, test.cut), kTileK, chunks, nullptr);

  const std::vector<uint16_t> key_matrices = keys.download();
  const std::vector<uint8_t> forward_bytes = of_keys ? parts.joined() : forward.download(),
                             backward_bytes = backward.download(), number_bytes = numbers.download(),
                             pair_bytes = pairs.download(), z_bytes = z.download();
  const std::vector<uint8_t> forward_lo_bytes = forward_lo.download(), backward_lo_bytes = backward_lo.download(),
                             e_lo_bytes = e_lo.download(), k_lo_bytes = k_lo.download();
  if (bits != nullptr) {
    *bits = forward_bytes;
    if (of_pairs) bits->insert(bits->end(), pair_bytes.begin(), pair_bytes.end());
    bits->insert(bits->end(), forward_lo_bytes.begin(), forward_lo_bytes.end());
  }
  Errors errors;
  if (!all) return errors;
  for (int64_t chunk = 0; chunk < chunks; ++chunk) {
    int n = 0;
    while (packed ? bases[static_cast<std::size_t>(n) + 1] <= chunk : (n + 1) * ((T + 63) / 64) <= chunk) ++n;
    const int64_t begin = packed ? offsets[static_cast<std::size_t>(n)] : n * T,
                  length = packed ? test.lengths[static_cast<std::size_t>(n)] : T;
    const int64_t local = (chunk - (packed ? bases[static_cast<std::size_t>(n)] : n * ((T + 63) / 64))) * 64;
    const int rows = static_cast<int>(std::min<int64_t>(64, length - local));
    for (int hv = 0; hv < test.HV; ++hv) {
      const std::size_t item = static_cast<std::size_t>(chunk * test.HV + hv);
      const Chunk expected = reference_chunk(test, in, x.scale, begin + local, rows, hv, kTileK);
      const auto& b = reinterpret_cast<const BwdTiles<kTileK>*>(backward_bytes.data())[item];
      const auto& pair = reinterpret_cast<const IntraChunk*>(pair_bytes.data())[item];
      const double few = rows < 8 ? 2 : 1;  // hardly a mean
      const auto compare_forward = [&](const auto& f, const Matrix& gamma) {
        compare(errors, "gamma", f.gamma, gamma);
        compare(errors, "z_scale", f.z_scale, expected.z_scale);
      };
      const auto compare_products = [&](const auto& f) {
        compare(errors, "x", f.x, expected.x, kTileK, 0, expected.growth);
        compare(errors, "m", f.m, expected.m, 64, few * expected.p_terms, expected.growth);
      };
      const auto compare_reads = [&](const auto& f, const float* erase_q, const float* read_k) {
        const int head = hv / (test.HV / test.H);
        compare_rows(errors, "rows e", {f.e, in.k}, {erase_q, in.q}, test.K, begin + local, rows, head, expected.e,
                     kTileK);
        compare_rows(errors, "rows q", {f.q, in.q}, {read_k, in.k}, test.K, begin + local, rows, head, expected.q,
                     kTileK);
      };
      if (of_pairs) {
        const auto& f = reinterpret_cast<const RowScales*>(forward_bytes.data())[item];
        compare_forward(f, Matrix(4, expected.gamma[0]));
        compare_reads(f, mixed_streams(rule) ? f.erase_q : nullptr, mixed_streams(rule) ? f.read_k : nullptr);
        compare_rows(errors, "rows k", {f.k, in.k}, {nullptr, in.q}, test.K, begin + local, rows,
                     hv / (test.HV / test.H), expected.k, kTileK);
      } else if (of_rows) {
        const auto& f = reinterpret_cast<const RowTiles<kTileK>*>(forward_bytes.data())[item];
        compare_forward(f, Matrix(4, expected.gamma[0]));
        compare_products(f);
        compare_reads(f, nullptr, nullptr);
      } else {
        const auto& f = reinterpret_cast<const FwdTiles<kTileK>*>(forward_bytes.data())[item];
        compare_forward(f, expected.gamma);
        compare_products(f);
        compare(errors, "q", f.q, expected.q, kTileK);
        if (rule.is_delta() && !hi_lo) compare(errors, "e", f.e, expected.e, kTileK);
      }
      if (by_rows) {
        const auto& numbers_of = reinterpret_cast<const RowScalesBwd*>(number_bytes.data())[item];
        const int head = hv / (test.HV / test.H);
        compare(errors, "gamma", numbers_of.gamma, Matrix(4, expected.gamma[0]));
        const float *const erase_q = mixed_streams(rule) ? numbers_of.erase_q : nullptr, *const read_k =
                                                                                             mixed_streams(rule)
                                                                                                 ? numbers_of.read_k
                                                                                                 : nullptr;
        const auto rows_of = [&](const char* name, const Scaled& one, const Scaled& other, const Matrix& of) {
          compare_rows(errors, name, one, other, test.K, begin + local, rows, head, of, kTileK);
        };
        rows_of("rows k", {numbers_of.k, in.k}, {nullptr, in.q}, expected.k);
        rows_of("rows e", {numbers_of.e, in.k}, {erase_q, in.q}, expected.e);
        rows_of("rows q", {numbers_of.q, in.q}, {read_k, in.k}, expected.q);
      } else if (!of_keys) {
        compare(errors, "gamma", b.gamma, expected.gamma);
      }
      if (hi_lo) {
        const auto& f = reinterpret_cast<const FwdTiles<kTileK>*>(forward_bytes.data())[item];
        const auto hi_lo_of = [&](const std::vector<uint8_t>& bytes) -> const LoTiles<kTileK>& {
          return reinterpret_cast<const LoTiles<kTileK>*>(bytes.data())[item];
        };
        const auto lo_of = [&](const std::vector<uint8_t>& bytes) {
          return test.keys_lo ? reinterpret_cast<const uint16_t*>(bytes.data()) + item * (64 * kTileK) : nullptr;
        };
        const LoTiles<kTileK>&ff = hi_lo_of(forward_lo_bytes), &bf = hi_lo_of(backward_lo_bytes);
        // Both terms of all operands: as good as the decays and norms.
        compare_hi_lo(errors, "fine e", f.e, lo_of(e_lo_bytes), ff.scale, expected.e, kTileK);
        compare_hi_lo(errors, "fine k", b.k, lo_of(k_lo_bytes), bf.scale, expected.k, kTileK);
        compare_hi_lo(errors, "fine x", f.x, ff.lo, nullptr, expected.x, kTileK, expected.growth);
        compare_hi_lo(errors, "fine y", b.y, bf.lo, nullptr, expected.y, kTileK, expected.growth);
      } else if (!by_rows) {
        compare(errors, "k", of_keys ? &key_matrices[item * (64 * kTileK)] : b.k, expected.k, kTileK);
      }
      compare(errors, "p", pair.p, expected.p, 64, few * expected.p_terms);
      if (!by_rows && !of_keys) compare(errors, "qt", b.q, expected.qt, kTileK, 0, expected.growth);
      if (rule.is_delta()) {
        if (!by_rows && !of_keys) compare(errors, "y", b.y, expected.y, kTileK, 0, expected.growth);
        compare(errors, "a", pair.a, expected.a, 64, 0, expected.growth);
        double residual = 0;
        for (int i = 0; i < 64; ++i) {
          for (int j = 0; j < 64; ++j) {
            double sum = i == j ? -1 : 0;
            for (int m = j; m <= i; ++m) {
              sum += (m == i ? 1 : expected.t[static_cast<std::size_t>(i * 64 + m)]) *
                     from_bf16(pair.a[sw128_index(m, j)]) /
                     (expected.of_row[static_cast<std::size_t>(m)] * expected.of_column[static_cast<std::size_t>(j)]);
            }
            residual = std::max(residual, std::abs(sum));
          }
        }
        note(errors, "residual", residual / (expected.growth * expected.growth));
      }
      if (!test.z) continue;
      const uint16_t* sw128_tiles = reinterpret_cast<const uint16_t*>(z_bytes.data()) +
                                    item * static_cast<std::size_t>(value_blocks * kSw128Elements);
      Matrix values(static_cast<std::size_t>(64 * value_blocks * 64));
      Case raw = test;
      raw.z = false;
      const Chunk scales = reference_chunk(raw, in, x.scale, begin + local, rows, hv, kTileK);
      for (int i = 0; i < rows; ++i) {
        for (int j = 0; j < test.V; ++j) {
          const double gate =
              rule.write == Gate::kChannel ? in.c.at(begin + local + i, hv / (test.HV / in.c.heads), j) : 1;
          values[static_cast<std::size_t>(i * value_blocks * 64 + j)] =
              scales.z_scale[static_cast<std::size_t>(i)] * gate *
              in.v.at(begin + local + i, hv / (test.HV / in.v.heads), j);
        }
      }
      compare(errors, "z", sw128_tiles, values, value_blocks * 64);
    }
  }
  return errors;
}

int failures = 0;

void run(const Case& test, uint64_t seed) {
  const auto once = [&](std::vector<uint8_t>* bits) {
    generator.seed(seed);
    return test.K <= 64 ? run_case<64>(test, bits) : run_case<128>(test, bits);
  };
  const Errors errors = once(nullptr);
  std::string line;
  bool good = true;
  for (const auto& [name, error] : errors) {
    const double bound = name == "gamma" || name == "z_scale" ? 1e-4
                         : name == "residual"                 ? 64 * test.tolerance
                         : name.rfind("fine", 0) == 0 && (test.types != Types::kFloat || test.keys_lo) ? 1e-4
                         : name.rfind("rows", 0) == 0                                                  ? 1e-4
                                                                                                       : test.tolerance;
    const bool hi_lo = error <= bound;
    good = good && hi_lo;
    char text[64];
    std::snprintf(text, sizeof text, " %s%s %.1e", hi_lo ? "" : "*", name.c_str(), error);
    line += text;
  }
  // Again, and the forward chunk tile alone: the same bits.
  std::vector<uint8_t> first, second = {1};
  once(&first);
  once(&second);
  if (first != second) good = false, line += " BITS DIFFER";
  failures += !good;
  std::printf("%s %-34s%s\n", good ? "ok   " : "WRONG", test.name.c_str(), line.c_str());
  std::fflush(stdout);
}

// Tokens that come later change nothing: the first 100 of 130 tokens have the same chunk tiles as 100 tokens. And nor
// do neighbours: a packed sequence has the chunk tiles that it has alone.
template <int kTileK>
bool same_reads(const FwdTiles<kTileK>& a, const FwdTiles<kTileK>& b, bool is_delta, int row) {
  bool same = true;
  for (int j = 0; j < kTileK; ++j)
    same = same && a.q[sw128_index(row, j)] == b.q[sw128_index(row, j)] &&
           (!is_delta || a.e[sw128_index(row, j)] == b.e[sw128_index(row, j)]);
  return same;
}
template <int kTileK>
bool same_reads(const RowTiles<kTileK>& a, const RowTiles<kTileK>& b, bool, int row) {
  return a.q[row] == b.q[row] && a.e[row] == b.e[row];
}
// Where A and P are left: what of the chunk tiles above there is of them.
struct Pairs {
  RowScales numbers;
  IntraChunk pair;
};
// Of a row, on which later ones have no influence: how many numbers differ. whole: both chunks have the same rows.
template <int kTileK, class Forward>
int differences(const Forward& a, const Forward& b, bool is_delta, bool whole, int row) {
  int wrong = 0;
  if constexpr (std::is_same_v<Forward, Pairs>) {
    for (int j = 0; j < 64; ++j) {
      const int at = sw128_index(row, j);
      wrong += (a.pair.a[at] != b.pair.a[at]) + (a.pair.p[at] != b.pair.p[at]);
    }
    const RowScales &x = a.numbers, &y = b.numbers;
    // there may be nothing
    const auto other_bits = [](float one, float other) { return std::memcmp(&one, &other, sizeof one) != 0; };
    return wrong + (x.e[row] != y.e[row]) + (x.q[row] != y.q[row]) + (whole && x.k[row] != y.k[row]) +
           (x.z_scale[row] != y.z_scale[row]) + other_bits(x.erase_q[row], y.erase_q[row]) +
           other_bits(x.read_k[row], y.read_k[row]);
  } else {
    for (int j = 0; whole && j < kTileK; ++j) wrong += a.x[sw128_index(row, j)] != b.x[sw128_index(row, j)];
    for (int j = 0; j < 64; ++j) wrong += a.m[sw128_index(row, j)] != b.m[sw128_index(row, j)];
    return wrong + !same_reads(a, b, is_delta, row) + (a.z_scale[row] != b.z_scale[row]);
  }
}

template <int kTileK, class Forward>
void run_bits(const Case& test, const Inputs& in) {
  struct ChunkTilesOf {
    Forward forward;
    LoTiles<kTileK> hi_lo;
    uint16_t e_lo[64 * kTileK];
  };
  // all of it is compared
  static_assert(sizeof(ChunkTilesOf) == sizeof(Forward) + sizeof(LoTiles<kTileK>) + sizeof(ChunkTilesOf::e_lo));
  const auto chunk_tiles = [&](const Problem& problem, int64_t chunks) {
    const std::size_t items = static_cast<std::size_t>(chunks * test.HV);
    constexpr bool kPairs = std::is_same_v<Forward, Pairs>;
    constexpr std::size_t kForward = kPairs ? sizeof(RowScales) : sizeof(Forward);
    DeviceBuffer<uint8_t> forward(items * kForward), pairs(items * sizeof(IntraChunk)),
        hi_lo(items * sizeof(LoTiles<kTileK>)), lo_parts(items * sizeof(ChunkTilesOf::e_lo));
    PrepareArgs args;
    args.problem = problem;
    args.forward = forward.data();
    args.keeps_intra_chunk = kPairs;
    if (kPairs) args.pairs = reinterpret_cast<IntraChunk*>(pairs.data());
    InParts<kTileK> parts(stores_k_hat(test.rule) ? items : 0);
    if (stores_k_hat(test.rule)) parts.give(args);
    if (uses_hi_lo(test.rule))
      args.forward_lo = {hi_lo.data(), test.keys_lo ? reinterpret_cast<uint16_t*>(lo_parts.data()) : nullptr};
    prepare(args, selected(args, kTileK, chunks, test.cut), kTileK, chunks, nullptr);
    const std::vector<uint8_t> bytes = stores_k_hat(test.rule) ? parts.joined() : forward.download(),
                               lo_bytes = hi_lo.download(), lo_bytes_of = lo_parts.download(),
                               pair_bytes = pairs.download();
    std::vector<ChunkTilesOf> result(items);  // zeros
    for (std::size_t i = 0; i < items; ++i) {
      ChunkTilesOf& x = result[i];
      std::memcpy(static_cast<void*>(&x.forward), &bytes[i * kForward], kForward);
      if constexpr (kPairs) std::memcpy(&x.forward.pair, &pair_bytes[i * sizeof(IntraChunk)], sizeof(IntraChunk));
      if (uses_hi_lo(test.rule))
        std::memcpy(static_cast<void*>(&x.hi_lo), &lo_bytes[i * sizeof x.hi_lo], sizeof x.hi_lo);
      if (test.keys_lo) std::memcpy(x.e_lo, &lo_bytes_of[i * sizeof x.e_lo], sizeof x.e_lo);
    }
    return result;
  };
  const auto sequences = [](Problem problem, int T) {
    problem.sequences.N = 1, problem.sequences.T = T, problem.sequences.chunks = (T + 63) / 64;
    return problem;
  };
  const Problem whole = problem_of(test, in, 130);
  const auto longer = chunk_tiles(sequences(whole, 130), 3), shorter = chunk_tiles(sequences(whole, 100), 2);

  Problem packed = whole, alone = whole;
  const DeviceBuffer<int32_t> offsets(std::vector<int32_t>{0, 30, 130}), bases(std::vector<int32_t>{0, 1, 3});
  packed.sequences.offsets = const_cast<DeviceBuffer<int32_t>&>(offsets).data();
  packed.sequences.chunk_base = const_cast<DeviceBuffer<int32_t>&>(bases).data();
  packed.sequences.N = 2;
  for (TokenArg* a : {
#define FW_TOKEN(name, heads, width, used) &alone.in.name,
#include "rule/tokens.def"
       }) {
    if (a->data != nullptr) a->data = static_cast<char*>(a->data) + 30 * a->stride_t * (a->bf16 != 0 ? 2 : 4);
  }
  if (alone.m != nullptr) alone.m += static_cast<int64_t>(30) * test.H * test.K;
  const auto together = chunk_tiles(packed, 3), single = chunk_tiles(sequences(alone, 100), 2);

  int wrong = 0;
  for (int chunk = 0; chunk < 2; ++chunk) {
    for (int hv = 0; hv < test.HV; ++hv) {
      const std::size_t item = static_cast<std::size_t>(chunk * test.HV + hv);
      const ChunkTilesOf &more = longer[item], &less = shorter[item];
      for (int i = 0; i < (chunk == 0 ? 64 : 36); ++i) {
        for (int j = 0; j < kTileK; ++j) {
          const int at = sw128_index(i, j);
          wrong += (chunk == 0 && more.hi_lo.lo[at] != less.hi_lo.lo[at]) || more.e_lo[at] != less.e_lo[at];
        }
        wrong += differences<kTileK>(more.forward, less.forward, test.rule.is_delta(), chunk == 0, i) +
                 (more.hi_lo.scale[i] != less.hi_lo.scale[i]);
      }
      wrong +=
          std::memcmp(&together[item + static_cast<std::size_t>(test.HV)], &single[item], sizeof(ChunkTilesOf)) != 0;
    }
  }
  failures += wrong != 0;
  std::printf("%s bits of %s: %d differ\n", wrong == 0 ? "ok   " : "WRONG", test.name.c_str(), wrong);
}
template <int kTileK>
void run_bits(const Case& test, uint64_t seed) {
  generator.seed(seed);
  const Inputs in = make_inputs(test, 130);
  const Tiles leaves = tiles_of<kTileK>(problem_of(test, in, 130), test, 3);
  if ((leaves & kIntraChunk) != 0) {
    run_bits<kTileK, Pairs>(test, in);
  } else if (leaves == kRowTiles) {
    run_bits<kTileK, RowTiles<kTileK>>(test, in);
  } else {
    run_bits<kTileK, FwdTiles<kTileK>>(test, in);
  }
}

Rule rule_of(Decay decay, Gain gain, Norm norm) {
  Rule rule;
  rule.decay = decay, rule.gain = gain, rule.q_norm = rule.k_norm = norm;
  return rule;
}
Rule additive(Decay decay) {
  Rule rule;
  rule.decay = decay, rule.update = Update::kAdditive;
  return rule;
}

std::vector<Case> named_cases() {
  const Rule gdn = rule_of(Decay::kScalar, Gain::kGate, Norm::kL2),
             kda = rule_of(Decay::kChannel, Gain::kGate, Norm::kL2),
             delta = rule_of(Decay::kNone, Gain::kGate, Norm::kL2);
  Rule gdn2 = rule_of(Decay::kChannel, Gain::kOne, Norm::kL2), qdelta = gdn,
       kaczmarz = rule_of(Decay::kScalar, Gain::kKaczmarz, Norm::kL2), comba = gdn, precond = kda,
       precond_read = additive(Decay::kChannel);
  gdn2.erase = gdn2.write = Gate::kChannel;
  qdelta.feedback = Feedback::kLearned;
  kaczmarz.k_norm = Norm::kRaw;
  comba.erase = Gate::kScalar, comba.read = Read::kCorrected;
  precond.precond = Precond::kDiagonal;
  precond_read.precond = Precond::kRead, precond_read.gain = Gain::kGate;
  std::vector<Case> cases;
  const auto add = [&](std::string name, const Rule& rule) -> Case& {
    Case& added = cases.emplace_back();
    added.name = std::move(name), added.rule = rule;
    return added;
  };
  add("gated_deltanet", gdn).T = 130;
  add("kda", kda).T = 130;
  add("deltanet", delta).beta_max = 2;
  add("gated_deltanet2", gdn2).z = true;
  add("gated_deltanet2 b to 2", gdn2).beta_max = 2;
  add("qdelta", qdelta);
  add("kaczmarz", kaczmarz);
  add("comba", comba);
  add("precond_kda", precond);
  add("linear_attention", additive(Decay::kNone));
  add("retnet", additive(Decay::kConstant));
  add("mamba2", additive(Decay::kScalar));
  add("gla", additive(Decay::kChannel));
  add("precond_gla", precond_read);
  const std::vector<std::pair<std::string, std::vector<double>>> decays = {
      {"0", {0}},
      {"-5", {-5}},
      {"-20", {-20}},
      {"-12", {-12}},
      {"-.05 and -1000", {-0.05, -0.05, -0.05, -0.05, -0.05, -0.05, -0.05, -0.05, -0.05, -1000}},
      {"all", {0, -0.05, -1, -5, -20, -1000, -1e4, -kInfinity}},
      {"-.05 and -inf", {-0.05, -0.05, -0.05, -0.05, -0.05, -0.05, -0.05, -0.05, -0.05, -kInfinity}},
      {"-inf", {-kInfinity}}};
  for (const auto& [name, values] : decays) {
    add("gated_deltanet g " + name, gdn).decays = values;
    add("kda g " + name, kda).decays = values;
    add("gla g " + name, additive(Decay::kChannel)).decays = values;
  }
  for (const double beta : {1.0, 2.0}) {
    for (const Rule& rule : {gdn, kda, qdelta}) {
      // What 64 keys that are nearly one do to rounding errors of T is not prepare's: see the residual.
      const std::string name = std::string(rule.feedback == Feedback::kLearned ? "qdelta"
                                           : rule.decay == Decay::kScalar      ? "gated_deltanet"
                                                                               : "kda") +
                               (beta > 1 ? " beta to 2" : "");
      Case& alike = add(name + " cos .9", rule);
      alike.keys = Keys::kAlike, alike.beta_max = beta, alike.tolerance = beta > 1 ? 3e-2 : 1e-2;
      Case& same = add(name + " identical", rule);
      same.keys = Keys::kIdentical, same.beta_max = beta, same.tolerance = beta > 1 ? 3e-2 : 1e-2;
    }
  }
  // With a gain above 1 what A, P and the keys lose in bf16 is in the products too: no chunk tile is worse than its own
  // rounding.
  for (Rule rule : {delta, gdn}) {
    rule.gain_bound = 2;
    const std::string name = std::string(rule.decay == Decay::kNone ? "deltanet" : "gated_deltanet") + " gain_bound 2";
    for (const Keys keys : {Keys::kRandom, Keys::kAlike, Keys::kIdentical}) {
      Case& test = add(name + (keys == Keys::kRandom ? "" : keys == Keys::kAlike ? " cos .9" : " identical"), rule);
      test.keys = keys, test.beta_max = 2, test.tolerance = 3.5e-3, test.T = 130;
      if (rule.uses_g()) test.decays = {-1e-3};
      Case& small = add(name + " K 64", rule);
      small.keys = keys, small.beta_max = 2, small.tolerance = 3.5e-3, small.K = small.V = 64, small.z = true,
      small.HV = 4;
      Case& floats = add(name + " float32", rule);  // rounded before they meet
      floats.keys = keys, floats.beta_max = 2, floats.tolerance = keys == Keys::kIdentical ? 3e-2 : 1e-2,
      floats.types = Types::kFloat;
      Case& all = add(name + " float32 with lo", rule);
      all.keys = keys, all.beta_max = 2, all.tolerance = 4.5e-3, all.types = Types::kFloat, all.keys_lo = true,
      all.T = 130;
      if (rule.uses_g()) all.decays = {-0.05};
      Case& odd = add(name + " float32 with lo, K 40", rule);
      odd.keys = keys, odd.beta_max = 2, odd.tolerance = 4.5e-3, odd.types = Types::kFloat, odd.keys_lo = true,
      odd.K = 40, odd.HV = 4;
      Case& unaligned = add(name + " rows not aligned", rule);
      unaligned.keys = keys, unaligned.beta_max = 2, unaligned.tolerance = 3.5e-3, unaligned.types = Types::kPadded;
    }
  }
  // The same with a decay for each channel: lo parts of all operands, whatever the tensors are.
  Rule sums = kda;
  sums.feedback = Feedback::kLearned;
  for (auto [name, rule] : {std::pair<std::string, Rule>{"kda", kda},
                            {"gated_deltanet2", gdn2},
                            {"precond_kda", precond},
                            {"kda with feedback", sums}}) {
    rule.gain_bound = 2;
    const auto form = [&, prefix = name + " gain_bound 2", channels = rule](const char* what) -> Case& {
      Case& test = add(prefix + what, channels);
      test.keys_lo = true, test.beta_max = 2, test.tolerance = 4.5e-3, test.z = channels.write == Gate::kChannel;
      return test;
    };
    form("").T = 130;
    Case& still = form(" g 0 cos .9");
    still.decays = {0}, still.keys = Keys::kAlike, still.T = 130;
    Case& small = form(" K 64");
    small.K = small.V = 64, small.HV = 6, small.B = 2, small.T = 150, small.decays = {-1e-3}, small.z = true;
    Case& mixed = form(" 0, -20, -1000");
    mixed.decays = {0, 0, 0, 0, -0.05, -0.05, -0.05, -20, -1000}, mixed.T = 90;
    Case& some = form(" -.01, -inf, K 64");
    some.K = 64, some.decays = {-0.01}, some.T = 128, some.rare_decay = -kInfinity;
    Case& packed = form(" packed");
    packed.lengths = {0, 5, 64, 0, 0, 70, 1, 129, 0}, packed.H = 1;
    Case& floats = form(" float32");
    floats.types = Types::kFloat, floats.T = 100;
    Case& odd = form(" float32, K 40");
    odd.types = Types::kFloat, odd.K = 40, odd.keys = Keys::kAlike, odd.HV = 4;
    Case& unaligned = form(" rows not aligned");
    unaligned.types = Types::kPadded, unaligned.decays = {-1, -5};
  }
  // Rules whose e or r, or both, are sums of q and k.
  Rule both = comba, fixed = delta;
  both.feedback = Feedback::kLearned, both.write = Gate::kScalar;
  fixed.feedback = Feedback::kFixed, fixed.lambda = 0.7, fixed.gain = Gain::kKaczmarz, fixed.k_norm = Norm::kRaw;
  for (const auto& [name, rule] : {std::pair<std::string, Rule>{"qdelta", qdelta},
                                   {"comba", comba},
                                   {"qdelta and comba", both},
                                   {"fixed feedback", fixed}}) {
    for (const int T : {1, 15, 17, 63, 130}) {
      Case& test = add(name + " T " + std::to_string(T), rule);
      test.T = T, test.H = 2, test.HV = 4, test.bf16_gates = T % 2 == 0;
    }
    for (const int K : {64, 128}) {
      Case& small = add(name + " K " + std::to_string(K), rule);
      small.K = K, small.V = 72, small.T = 70, small.B = 2, small.H = 1, small.HV = 3, small.z = true;
      Case& packed = add(name + " packed, K " + std::to_string(K), rule);
      packed.lengths = {0, 5, 64, 0, 0, 70, 1, 0}, packed.H = 1, packed.K = K;
      Case& alike = add(name + " cos .9, K " + std::to_string(K), rule);
      alike.keys = Keys::kAlike, alike.K = K, alike.tolerance = 1e-2;
    }
    Case& decays_of_all = add(name + " g all", rule);
    decays_of_all.decays = {0, -0.05, -1, -5, -20, -1000, -1e4, -kInfinity}, decays_of_all.T = 100;
    Case& floats = add(name + " float32", rule);
    floats.types = Types::kFloat, floats.T = 40;
  }
  for (const int T : {1, 15, 16, 17, 63, 65}) {
    add("gated_deltanet T " + std::to_string(T), gdn).T = T;
    add("kda T " + std::to_string(T), kda).T = T;
  }
  // Whole bf16 rows with one decay a channel: the kernel of its own, all its forms.
  Rule kaczmarz_channel = rule_of(Decay::kChannel, Gain::kKaczmarz, Norm::kL2), gated = kda;
  kaczmarz_channel.k_norm = Norm::kRaw;
  gated.erase = gated.write = Gate::kScalar;
  for (const Rule& rule : {kda, precond, kaczmarz_channel, gated}) {
    for (const int K : {64, 128}) {
      for (const Decays type : {Decays::kBf16, Decays::kFloat}) {
        const std::string name = std::string(rule.uses_precond()            ? "precond_kda"
                                             : rule.gain == Gain::kKaczmarz ? "kaczmarz_channel"
                                             : rule.uses_erase_gate()       ? "kda scalar gates"
                                                                            : "kda") +
                                 " K " + std::to_string(K) + (type == Decays::kBf16 ? " bf16 g" : " float32 g");
        const auto form = [&](const char* what) -> Case& {
          Case& test = add(name + what, rule);
          test.K = test.V = K, test.decay_type = type;
          return test;
        };
        Case& groups = form(" groups");
        groups.T = 150, groups.B = 2, groups.HV = 6;
        Case& mixed = form(" 0, -20, -1000");
        mixed.decays = {0, 0, 0, 0, -0.05, -0.05, -0.05, -20, -1000}, mixed.T = 90;
        Case& some = form(" -.01, -inf");
        some.decays = {-0.01}, some.T = 128, some.rare_decay = -kInfinity;
        Case& packed = form(" packed");
        packed.lengths = {0, 5, 64, 0, 0, 70, 1, 129, 0}, packed.H = 1;
      }
    }
  }
  // There with gates of channels: with bf16 log-decays, Z is wanted or values have no such gate. The others are the
  // other kernel's.
  Rule erase_only = gdn2, gain_one_plus = gdn2;
  erase_only.write = Gate::kTied, erase_only.gain = Gain::kGate;
  gain_one_plus.gain = Gain::kLonghorn;
  for (const Rule& rule : {gdn2, erase_only, gain_one_plus}) {
    for (const int K : {64, 128}) {
      const std::string name = std::string(rule.write == Gate::kTied      ? "erase gates"
                                           : rule.gain == Gain::kLonghorn ? "gdn2 longhorn"
                                                                          : "gated_deltanet2") +
                               " K " + std::to_string(K);
      const auto form = [&](const char* what) -> Case& {
        Case& test = add(name + what, rule);
        test.K = K, test.decay_type = Decays::kBf16, test.z = rule.write == Gate::kChannel;
        return test;
      };
      Case& groups = form(" groups");
      groups.T = 150, groups.B = 2, groups.HV = 6;
      Case& mixed = form(" 0, -20, -1000");
      mixed.decays = {0, 0, 0, 0, -0.05, -0.05, -0.05, -20, -1000}, mixed.T = 90, mixed.V = 40, mixed.beta_max = 2;
      Case& some = form(" -.01, -inf");
      some.decays = {-0.01}, some.T = 128, some.rare_decay = -kInfinity, some.V = 64;
      Case& packed = form(" packed");
      packed.lengths = {0, 5, 64, 0, 0, 70, 1, 129, 0}, packed.H = 1, packed.V = 72;
      Case& other = form(" V 100");
      other.T = 70, other.V = 100;
      Case& floats = form(" float32 g");
      floats.T = 70, floats.decay_type = Decays::kFloat;
    }
  }
  for (const Rule& rule : {gdn, kda, additive(Decay::kScalar), additive(Decay::kChannel)}) {
    for (const int K : {16, 64, 100}) {
      Case& test = add("K " + std::to_string(K), rule);
      test.K = K, test.V = 72, test.z = K != 64, test.T = 70, test.HV = 4, test.B = 2;
    }
    Case& packed = add("packed", rule);
    packed.lengths = {0, 5, 64, 0, 0, 70, 1, 0}, packed.H = 1;
    Case& floats = add("float32", rule);
    floats.types = Types::kFloat, floats.T = 40, floats.z = true;
    Case& padded = add("rows not aligned", rule);
    padded.types = Types::kPadded, padded.T = 40;
  }
  return cases;
}

Case random_case(int i) {
  Case test;
  Rule& rule = test.rule;
  rule.decay = static_cast<Decay>(below(4));
  rule.update = below(4) == 0 ? Update::kAdditive : Update::kDelta;
  rule.gain = static_cast<Gain>(below(6));
  rule.erase = below(2) ? Gate::kTied : static_cast<Gate>(below(4));
  rule.write = below(2) ? Gate::kTied : static_cast<Gate>(below(4));
  rule.erase_key = below(4) == 0 && rule.is_delta() ? EraseKey::kOwn : EraseKey::kTied;
  rule.feedback = below(2) ? Feedback::kNone : static_cast<Feedback>(below(3));
  rule.read = below(3) == 0 ? Read::kCorrected : Read::kPlain;
  rule.precond = below(2) ? Precond::kNone : static_cast<Precond>(below(3));
  if (rule.precond != Precond::kNone) rule.normaliser = static_cast<Normaliser>(below(4));
  rule.q_norm = static_cast<Norm>(below(2)), rule.k_norm = static_cast<Norm>(below(2));
  if (!rule.is_delta()) rule.erase = Gate::kTied, rule.feedback = Feedback::kNone;
  test.H = 1 + below(2), test.HV = test.H * (1 + below(3));
  test.K = std::vector<int>{16, 33, 64, 100, 128}[static_cast<std::size_t>(below(5))];
  test.V = std::vector<int>{16, 64, 100, 128}[static_cast<std::size_t>(below(4))];
  test.T = std::vector<int>{1, 17, 63, 64, 65, 100}[static_cast<std::size_t>(below(6))];
  test.types = static_cast<Types>(below(3));
  test.z = below(2) != 0 || rule.write == Gate::kChannel;
  test.decays = below(2) ? std::vector<double>{-0.05} : std::vector<double>{-0.01, -0.1, -1, -5, -1000, -kInfinity};
  test.tolerance = 1.5e-2;
  test.name = "random " + std::to_string(i) + " d" + std::to_string(static_cast<int>(rule.decay)) + " " +
              (rule.is_delta() ? "on" : "off") + " g" + std::to_string(static_cast<int>(rule.gain)) + " K" +
              std::to_string(test.K) + " T" + std::to_string(test.T);
  return test;
}

}  // namespace
}  // namespace fw::cuda::test

int main(int argc, char** argv) {
  using namespace fw::cuda::test;
  if (!fw::cuda::hopper()) return fw::cuda::kNotRun;
  const int random = argc > 1 ? std::atoi(argv[1]) : 40;
  const uint64_t seed = argc > 2 ? std::strtoull(argv[2], nullptr, 10) : 1;
  try {
    uint64_t i = 0;
    for (const Case& test : named_cases()) {
      ++i;
      if (!fw::cuda::testing::in_share(i)) continue;
      for (const bool cut : {false, true}) {
        if (cut && !fw::cuda::sums_of_rows(test.rule)) continue;
        Case one = test;
        one.cut = cut;
        if (cut) one.name += ", cut";
        run(one, seed + i - 1);
        if (test.T != 64 && test.T != 130) continue;
        one.B = 1, one.lengths.clear();
        if (one.K == 128) run_bits<128>(one, seed + i);
        one.K = 64;
        run_bits<64>(one, seed + i);
      }
    }
    for (int r = 0; r < random; ++r) {
      if (!fw::cuda::testing::in_share(static_cast<uint64_t>(r))) continue;
      generator.seed(seed + 1000 + static_cast<uint64_t>(r));
      Case test = random_case(r);
      test.cut = r % 2 == 1;
      run(test, seed + 2000 + static_cast<uint64_t>(r));
    }
    std::printf("%d failures\n", failures);
  } catch (const std::exception& error) {
    std::printf("%s\n", error.what());
    return 2;
  }
  return failures ? 1 : 0;
}
