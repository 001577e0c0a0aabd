// The scans of the chunk form against loops in double over random tiles: a program of its own that prints a line per
// case and fails with 1. An argument: only cases whose name has it.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "cuda/selected.h"
#include "scan_cases.h"

namespace fw::cuda {
namespace {

using testing::Random;

// Relative L2 error, or infinite where a number that must be written is not.
struct Difference {
  double error = 0, norm = 0;
  void add(double got, double want) {
    if (!std::isfinite(got)) error = std::numeric_limits<double>::infinity();
    error += (got - want) * (got - want);
    norm += want * want;
  }
  double relative() const { return norm > 0 ? std::sqrt(error / norm) : std::sqrt(error); }
};

int failures = 0;

void report(const char* what, bool rounded, const Difference& d, double limit) {
  const bool good = d.relative() <= limit;
  if (!good) ++failures;
  if (!good || !rounded)
    std::printf("  %s%s %.1e%s", what, rounded ? " (rounded)" : "", d.relative(), good ? "" : " FAILED");
}

void fail(const char* what) {
  std::printf("  %s FAILED", what);
  ++failures;
}

double rounded(double x, bool rounds) { return rounds ? from_bf16(to_bf16(x)) : x; }

void random_matrix(uint16_t* sw128_tiles, int rows, int columns, double scale, Random& random) {
  for (int i = 0; i < rows; ++i)
    for (int j = 0; j < columns; ++j) sw128_tiles[sw128_index(i, j)] = to_bf16(random(scale));
}

// Of matrices with numbers of at most `scale`: the most that rounding leaves out of them.
constexpr double kLoOf = 0x1p-9;

// The lo tile of a chunk, and what e (k) leaves out; no number where there is none.
template <int kTileK>
struct HiLo {
  std::vector<LoTiles<kTileK>> chunk_tiles;
  std::vector<uint16_t> lo_parts;
  explicit HiLo(size_t count) : chunk_tiles(count), lo_parts(count * 64 * kTileK, 0) {
    std::memset(static_cast<void*>(chunk_tiles.data()), 0, count * sizeof(chunk_tiles[0]));
  }
  void fill(size_t at, const Case& c, int rows, double rest_of, double key_lo_of, Random& random) {
    random_matrix(chunk_tiles[at].lo, rows, c.K, rest_of * kLoOf, random);
    for (int t = 0; t < 64; ++t) chunk_tiles[at].scale[t] = t < rows ? static_cast<float>(random(1.2)) : 0.0f;
    if (c.keys_lo) random_matrix(&lo_parts[at * 64 * kTileK], rows, c.K, key_lo_of * kLoOf, random);
  }
  double lo(size_t at, int row, int column) const { return from_bf16(chunk_tiles[at].lo[sw128_index(row, column)]); }
  double key_lo(size_t at, int row, int column) const {
    return from_bf16(lo_parts[at * 64 * kTileK + static_cast<size_t>(sw128_index(row, column))]);
  }
};
template <int kTileK>
struct DeviceHiLo {
  DeviceBuffer<LoTiles<kTileK>> chunk_tiles;
  DeviceBuffer<uint16_t> lo_parts;
  const Case& c;
  DeviceHiLo(const Case& one, const HiLo<kTileK>& hi_lo)
      : chunk_tiles(hi_lo.chunk_tiles), lo_parts(hi_lo.lo_parts), c(one) {}
  HiLoTiles args() {
    return c.hi_lo ? HiLoTiles{chunk_tiles.data(), c.keys_lo ? lo_parts.data() : nullptr} : HiLoTiles{};
  }
};

// As rounded(), of an operand whose rest is an operand too.
double rounded(const Case& c, double x, bool rounds) {
  return c.hi_lo ? rounded(x, rounds) + rounded(x - rounded(x, rounds), rounds) : rounded(x, rounds);
}

// ---- Forward

// Random rows of keys, of all sequences.
std::vector<uint16_t> random_rows(const Layout& at, double scale, Random& random) {
  std::vector<uint16_t> rows(static_cast<size_t>(at.tokens) * at.key_row());
  for (uint16_t& x : rows) x = to_bf16(random(scale));
  for (int n = 0; n < at.N; ++n) {
    const auto begin = rows.begin() + static_cast<ptrdiff_t>(at.offsets[n]) * at.key_row();
    if (at.is_damaged(n)) std::fill_n(begin, static_cast<size_t>(at.c.lengths[n]) * at.key_row(), kNan16);
  }
  return rows;
}

template <int kTileK>
void test_forward(const Case& c) {
  const Layout at(c);
  Random random{12345};
  const size_t heads = static_cast<size_t>(at.N) * c.HV;
  std::vector<FwdTiles<kTileK>> chunk_tiles(static_cast<size_t>(at.chunks) * c.HV);
  Tensor v(c.bf16, static_cast<size_t>(at.tokens) * at.row), initial(c.state_bf16, heads * c.K * c.V);
  std::vector<uint16_t> z(static_cast<size_t>(at.chunks) * c.HV * at.blocks * kSw128Elements, kNan16);
  HiLo<kTileK> hi_lo(chunk_tiles.size());
  std::vector<RowTiles<kTileK>> row_tiles(chunk_tiles.size());
  std::vector<RowScales> numbers(chunk_tiles.size());
  std::vector<IntraChunk> pairs(chunk_tiles.size());
  std::vector<QETiles<kTileK>> qe_tiles(chunk_tiles.size());
  std::vector<XMTiles<kTileK>> xm_tiles(chunk_tiles.size());
  const std::vector<uint16_t> keys = random_rows(at, 0.3, random), reads = random_rows(at, 0.9, random);
  std::memset(static_cast<void*>(chunk_tiles.data()), 0, chunk_tiles.size() * sizeof(chunk_tiles[0]));
  std::memset(static_cast<void*>(row_tiles.data()), 0, row_tiles.size() * sizeof(row_tiles[0]));
  std::memset(static_cast<void*>(numbers.data()), 0, numbers.size() * sizeof(numbers[0]));
  std::memset(static_cast<void*>(pairs.data()), 0, pairs.size() * sizeof(pairs[0]));
  std::memset(static_cast<void*>(qe_tiles.data()), 0, qe_tiles.size() * sizeof(qe_tiles[0]));
  std::memset(static_cast<void*>(xm_tiles.data()), 0, xm_tiles.size() * sizeof(xm_tiles[0]));
  for (int n = 0; n < at.N; ++n) {
    for (int hv = 0; hv < c.HV; ++hv) {
      for (int k = 0; k < c.K; ++k)
        for (int i = 0; i < c.V; ++i) initial.set(at.state_at(n, hv, k, i), random(1));
      for (int t = 0; t < c.lengths[n]; ++t)
        for (int i = 0; i < c.V; ++i) v.set(at.token_at(n, t, hv, i), at.is_damaged(n) ? kNan : random(1));
      for (int chunk = 0; 64 * chunk < c.lengths[n]; ++chunk) {
        auto& chunk_tile = chunk_tiles[at.chunk_tile(n, chunk, hv)];
        const int rows = at.rows(n, chunk);
        random_matrix(chunk_tile.e, rows, c.K, 0.05, random);
        random_matrix(chunk_tile.q, rows, c.K, 0.15, random);
        random_matrix(chunk_tile.x, rows, c.K, 0.15, random);
        for (int i = 0; i < rows; ++i)
          for (int j = 0; j <= i; ++j) chunk_tile.m[sw128_index(i, j)] = to_bf16(random(0.1));
        for (int k = 0; k < kTileK; ++k) chunk_tile.gamma[k] = k == 3 ? 0.0f : static_cast<float>(0.5 + random(0.5));
        if (c.hi_lo) hi_lo.fill(at.chunk_tile(n, chunk, hv), c, rows, 0.15, 0.05, random);
        for (int t = 0; t < rows; ++t)
          chunk_tile.z_scale[t] = c.prepared_z ? 1.0f : static_cast<float>(1 + random(0.9));
        if (c.rows) {
          auto& of_rows = row_tiles[at.chunk_tile(n, chunk, hv)];
          std::memcpy(of_rows.x, chunk_tile.x, sizeof chunk_tile.x);
          std::memcpy(of_rows.m, chunk_tile.m, sizeof chunk_tile.m);
          std::memcpy(of_rows.z_scale, chunk_tile.z_scale, sizeof chunk_tile.z_scale);
          std::fill_n(chunk_tile.gamma, kTileK, chunk == 3 ? 0.0f : chunk_tile.gamma[0]);
          std::copy_n(chunk_tile.gamma, 4, of_rows.gamma);
          for (int t = 0; t < rows; ++t)
            of_rows.e[t] = static_cast<float>(random(0.2)), of_rows.q[t] = static_cast<float>(random(0.2));
          std::fill_n(chunk_tile.e, 64 * kTileK, kNan16);
          std::fill_n(chunk_tile.q, 64 * kTileK, kNan16);
          if (c.pairs) {
            RowScales& of_chunk = numbers[at.chunk_tile(n, chunk, hv)];
            IntraChunk& pair = pairs[at.chunk_tile(n, chunk, hv)];
            std::memcpy(of_chunk.e, of_rows.e, sizeof of_rows.e), std::memcpy(of_chunk.q, of_rows.q, sizeof of_rows.q);
            std::memcpy(of_chunk.z_scale, chunk_tile.z_scale, sizeof chunk_tile.z_scale);
            std::copy_n(chunk_tile.gamma, 4, of_chunk.gamma);
            for (int t = 0; c.mixed && t < rows; ++t)
              of_chunk.erase_q[t] = static_cast<float>(random(0.1)),
              of_chunk.read_k[t] = static_cast<float>(random(0.3));
            for (int t = 0; t < 64; ++t) of_chunk.k[t] = t < rows ? static_cast<float>(0.3 + random(0.2)) : 0.0f;
            for (int i = 0; i < 64; ++i)
              for (int j = 0; j <= i; ++j) pair.a[sw128_index(i, j)] = to_bf16(i == j ? 1 : i < rows ? random(0.1) : 0);
            std::memcpy(pair.p, chunk_tile.m, sizeof pair.p);
            std::fill_n(chunk_tile.x, 64 * kTileK, kNan16);
            std::fill_n(of_rows.x, 64 * kTileK, kNan16);
          }
        }
        for (int b = 0; b < at.blocks; ++b)
          for (int t = 0; t < 64; ++t)
            for (int i = 0; i < 64; ++i) {
              const bool inside = t < rows && 64 * b + i < c.V;
              z[at.tile(n, chunk, hv, b) * kSw128Elements + sw128_index(t, i)] =
                  inside ? to_bf16(v.at(at.token_at(n, 64 * chunk + t, hv, 64 * b + i))) : 0;
            }
        if (c.keys) {
          QETiles<kTileK>& streams = qe_tiles[at.chunk_tile(n, chunk, hv)];
          XMTiles<kTileK>& solved = xm_tiles[at.chunk_tile(n, chunk, hv)];
          std::memcpy(streams.e, chunk_tile.e, sizeof chunk_tile.e),
              std::memcpy(streams.q, chunk_tile.q, sizeof chunk_tile.q);
          std::memcpy(streams.gamma, chunk_tile.gamma, sizeof chunk_tile.gamma),
              std::memcpy(streams.z_scale, chunk_tile.z_scale, sizeof chunk_tile.z_scale);
          std::memcpy(solved.x, chunk_tile.x, sizeof chunk_tile.x),
              std::memcpy(solved.m, chunk_tile.m, sizeof chunk_tile.m);
          if (!c.out) {
            std::fill_n(streams.q, 64 * kTileK, kNan16);
            std::fill_n(solved.m, kSw128Elements, kNan16);
          }
        }
        // What this variant must not read.
        if (!c.is_delta) std::fill_n(chunk_tile.e, 64 * kTileK, kNan16);
        if (!c.out) {
          std::fill_n(chunk_tile.q, 64 * kTileK, kNan16);
          std::fill_n(chunk_tile.m, kSw128Elements, kNan16);
        }
      }
    }
  }

  struct Outputs {
    Tensor o, final_state;
    std::vector<uint16_t> states, w;
  };
  const auto run = [&](bool alone) {
    DeviceBuffer<FwdTiles<kTileK>> device_tiles(chunk_tiles);
    DeviceBuffer<RowTiles<kTileK>> device_row_tiles(row_tiles);
    DeviceBuffer<RowScales> device_scalars(numbers);
    DeviceBuffer<IntraChunk> device_pairs(pairs);
    DeviceBuffer<QETiles<kTileK>> device_streams(qe_tiles);
    DeviceBuffer<XMTiles<kTileK>> device_solved(xm_tiles);
    DeviceBuffer<uint16_t> device_keys(keys), device_reads(reads);
    DeviceTensor device_v(v), device_initial(initial), device_o(Tensor(c.bf16, v.h.size() + v.f.size())),
        device_final(Tensor(c.state_bf16, heads * c.K * c.V));
    DeviceBuffer<uint16_t> device_z(z), states(std::vector<uint16_t>(z.size() / 64 * kTileK, kNan16)),
        w(std::vector<uint16_t>(z.size(), kNan16));
    DeviceBuffer<int32_t> offsets(at.offsets), chunk_base(at.chunk_base);
    DeviceHiLo<kTileK> device_hi_lo(c, hi_lo);
    ScanForwardArgs args;
    args.hi_lo = device_hi_lo.args();
    args.sequences = at.sequence_arg(offsets.data(), chunk_base.data());
    args.HV = c.HV, args.K = c.K, args.V = c.V, args.is_delta = c.is_delta;
    args.chunk_tiles = device_tiles.data();
    args.shape = at.shape();
    if (c.rows) {
      args.chunk_tiles = device_row_tiles.data();
      args.rows = {at.key_arg(device_reads.data()), at.key_arg(device_keys.data())};
    }
    if (c.pairs) args.chunk_tiles = device_scalars.data(), args.pairs = device_pairs.data();
    if (c.keys) args.chunk_tiles = device_streams.data(), args.solved = device_solved.data();
    if (c.prepared_z) {
      args.z = device_z.data();
    } else {
      args.v = at.token_arg(device_v.data());
    }
    if (c.out) args.o = at.token_arg(device_o.data());
    if (c.save) args.states = states.data(), args.w = w.data();
    for (int n = 0; n < (alone ? at.N : 1); ++n) {
      if (alone) args.sequences = {offsets.data() + n, chunk_base.data() + n, 1, 0, 0};
      if (c.has_initial) args.initial_state = at.state_arg(device_initial.data(), n);
      args.final_state = at.state_arg(device_final.data(), n);
      scan_forward(args, selected(args, c.mixed), kTileK, nullptr);
    }
    return Outputs{device_o.download(), device_final.download(), states.download(), w.download()};
  };
  const Outputs got = run(false);
  const Outputs again = run(c.packed);
  if (!(got.o.same_bits(again.o) && got.final_state.same_bits(again.final_state) && got.states == again.states &&
        got.w == again.w)) {
    fail("same bits again, each sequence alone");
  }

  for (const bool rounds : {false, true}) {
    Difference o, final_state, states, w_saved;
    for (int n = 0; n < at.N; ++n) {
      if (at.is_damaged(n)) continue;
      for (int hv = 0; hv < c.HV; ++hv) {
        std::vector<double> s(static_cast<size_t>(kTileK) * at.blocks * 64, 0.0);  // [kTileK, V padded]
        const int padded = at.blocks * 64;
        if (c.has_initial)
          for (int k = 0; k < c.K; ++k)
            for (int i = 0; i < c.V; ++i) s[static_cast<size_t>(k) * padded + i] = initial.at(at.state_at(n, hv, k, i));
        for (int chunk = 0; 64 * chunk < c.lengths[n]; ++chunk) {
          const size_t index = at.chunk_tile(n, chunk, hv);
          const auto& chunk_tile = chunk_tiles[index];
          const int rows = at.rows(n, chunk);
          const auto of_row = [&](const std::vector<uint16_t>& raw, const float* factors, int t, int k) {
            return t < rows ? factors[t] * from_bf16(raw[at.key_at(n, 64 * chunk + t, hv, k)]) : 0.0;
          };
          const auto more = [&](const std::vector<uint16_t>& raw, const float* factors, int t, int k) {
            return c.pairs && c.mixed ? of_row(raw, factors, t, k) : 0.0;
          };
          const auto e_at = [&](int t, int k) {
            return c.rows ? of_row(keys, row_tiles[index].e, t, k) + more(reads, numbers[index].erase_q, t, k)
                          : from_bf16(chunk_tile.e[sw128_index(t, k)]);
          };
          const auto q_at = [&](int t, int k) {
            return c.rows ? of_row(reads, row_tiles[index].q, t, k) + more(keys, numbers[index].read_k, t, k)
                          : from_bf16(chunk_tile.q[sw128_index(t, k)]);
          };
          // What the rest of w meets is x, and not the rest of that.
          std::vector<double> w_lo(static_cast<size_t>(64) * padded, 0.0), e_operand(s);
          for (double& x : e_operand) x = rounded(c, x, rounds);
          std::vector<double> w(static_cast<size_t>(64) * padded, 0.0), operand(s);
          for (double& x : operand) x = rounded(x, rounds);
          for (int i = 0; i < padded; ++i) {
            const int b = i / 64;
            for (int t = 0; t < 64; ++t) {
              double x = t < rows && i < c.V
                             ? chunk_tile.z_scale[t] * rounded(v.at(at.token_at(n, 64 * chunk + t, hv, i)), rounds)
                             : 0;
              if (c.is_delta)
                for (int k = 0; k < c.K; ++k) {
                  const size_t from = static_cast<size_t>(k) * padded + i;
                  const double e = e_at(t, k);
                  x += c.hi_lo ? hi_lo.chunk_tiles[index].scale[t] *
                                     (e * e_operand[from] + hi_lo.key_lo(index, t, k) * operand[from])
                               : e * operand[from];
                }
              const double nearest = rounded(x, rounds);
              w[static_cast<size_t>(t) * padded + i] = nearest;
              if (c.hi_lo) w_lo[static_cast<size_t>(t) * padded + i] = rounded(x - nearest, rounds);
              if (c.save && !c.pairs)
                w_saved.add(from_bf16(got.w[at.tile(n, chunk, hv, b) * kSw128Elements + sw128_index(t, i % 64)]), x);
            }
            std::vector<double> u(64), scaled(64);  // c.pairs
            for (int t = 0; c.pairs && t < 64; ++t) {
              double x = 0;
              for (int j = 0; j <= t; ++j)
                x += from_bf16(pairs[index].a[sw128_index(t, j)]) * w[static_cast<size_t>(j) * padded + i];
              if (c.save)
                w_saved.add(from_bf16(got.w[at.tile(n, chunk, hv, b) * kSw128Elements + sw128_index(t, i % 64)]), x);
              u[static_cast<size_t>(t)] = rounded(x, rounds),
              scaled[static_cast<size_t>(t)] = rounded(numbers[index].k[t] * x, rounds);
            }
            if (c.save)
              for (int k = 0; k < kTileK; ++k)
                states.add(from_bf16(got.states[at.tile(n, chunk, hv, b) * (64 * kTileK) + sw128_index(i % 64, k)]),
                           s[static_cast<size_t>(k) * padded + i]);
            if (c.out && i < c.V)
              for (int t = 0; t < rows; ++t) {
                double x = 0;
                for (int k = 0; k < c.K; ++k) x += q_at(t, k) * operand[static_cast<size_t>(k) * padded + i];
                for (int j = 0; j < 64; ++j) {
                  x += from_bf16(chunk_tile.m[sw128_index(t, j)]) *
                       (c.pairs ? u[static_cast<size_t>(j)] : w[static_cast<size_t>(j) * padded + i]);
                }
                o.add(got.o.at(at.token_at(n, 64 * chunk + t, hv, i)), c.bf16 ? rounded(x, rounds) : x);
              }
            for (int k = 0; k < c.K; ++k) {
              double x = chunk_tile.gamma[k] * s[static_cast<size_t>(k) * padded + i];
              for (int t = 0; t < 64; ++t) {
                const size_t from = static_cast<size_t>(t) * padded + i;
                if (c.pairs) {
                  x += t < rows ? from_bf16(keys[at.key_at(n, 64 * chunk + t, hv, k)]) * scaled[static_cast<size_t>(t)]
                                : 0;
                  continue;
                }
                x += from_bf16(chunk_tile.x[sw128_index(t, k)]) * (w[from] + w_lo[from]) +
                     (c.hi_lo ? hi_lo.lo(index, t, k) * w[from] : 0);
              }
              s[static_cast<size_t>(k) * padded + i] = x;
            }
          }
        }
        for (int k = 0; k < c.K; ++k)
          for (int i = 0; i < c.V; ++i)
            final_state.add(got.final_state.at(at.state_at(n, hv, k, i)), s[static_cast<size_t>(k) * padded + i]);
      }
    }
    // Rounding where the kernel rounds leaves what float32 sums and different roundings of ties change; outputs
    // in bf16 are themselves only that good.
    const double limit = rounds ? 4e-4 : 6e-3;
    if (c.out) report("o", rounds, o, limit);
    // The state of hi/lo tiles is that of float32 but for products of two lo parts, even without rounding.
    report("final", rounds, final_state, c.state_bf16 && (rounds || c.hi_lo) ? 3e-3 : c.hi_lo && c.bf16 ? 2e-5 : limit);
    if (c.save) report("states", rounds, states, rounds ? 3e-3 : limit);
    if (c.save) report("w", rounds, w_saved, rounds ? 3e-3 : limit);
  }
  // Between rows nothing is written.
  for (int t = 0; t < at.tokens; ++t)
    for (int i = c.HV * c.V; i < at.row; ++i)
      if (!std::isnan(got.o.at(static_cast<size_t>(t) * at.row + i))) {
        return fail("nothing between the rows of o");
      }
}

// ---- Reverse

template <int kTileK>
void test_reverse(const Case& c) {
  const Layout at(c);
  Random random{54321};
  const size_t heads = static_cast<size_t>(at.N) * c.HV, tiles = static_cast<size_t>(at.chunks) * c.HV * at.blocks;
  std::vector<BwdTiles<kTileK>> chunk_tiles(static_cast<size_t>(at.chunks) * c.HV);
  HiLo<kTileK> hi_lo(chunk_tiles.size());
  Tensor d_o(c.bf16, static_cast<size_t>(at.tokens) * at.row), d_final(c.state_bf16, heads * c.K * c.V);
  std::memset(static_cast<void*>(chunk_tiles.data()), 0, chunk_tiles.size() * sizeof(chunk_tiles[0]));
  for (int n = 0; n < at.N; ++n) {
    for (int hv = 0; hv < c.HV; ++hv) {
      for (int k = 0; k < c.K; ++k)
        for (int i = 0; i < c.V; ++i) d_final.set(at.state_at(n, hv, k, i), random(1));
      for (int t = 0; t < c.lengths[n]; ++t)
        for (int i = 0; i < c.V; ++i) d_o.set(at.token_at(n, t, hv, i), at.is_damaged(n) ? kNan : random(1));
      for (int chunk = 0; 64 * chunk < c.lengths[n]; ++chunk) {
        auto& chunk_tile = chunk_tiles[at.chunk_tile(n, chunk, hv)];
        const int rows = at.rows(n, chunk);
        random_matrix(chunk_tile.k, rows, c.K, 0.1, random);
        random_matrix(chunk_tile.y, rows, c.K, 0.1, random);
        random_matrix(chunk_tile.q, rows, c.K, 0.15, random);
        for (int k = 0; k < kTileK; ++k) chunk_tile.gamma[k] = k == 5 ? 0.0f : static_cast<float>(0.5 + random(0.5));
        if (c.hi_lo) hi_lo.fill(at.chunk_tile(n, chunk, hv), c, rows, 0.1, 0.1, random);
        if (!c.is_delta) std::fill_n(chunk_tile.y, 64 * kTileK, kNan16);
      }
    }
  }

  struct Outputs {
    Tensor d_initial;
    std::vector<uint16_t> d_states, v;
  };
  const auto run = [&](bool alone, bool save = true) {
    DeviceBuffer<BwdTiles<kTileK>> device_tiles(chunk_tiles);
    DeviceTensor device_d_o(d_o), device_final(d_final), device_initial(Tensor(c.state_bf16, heads * c.K * c.V));
    DeviceBuffer<uint16_t> d_states(std::vector<uint16_t>(tiles * 64 * kTileK, kNan16)),
        v(std::vector<uint16_t>(tiles * kSw128Elements, kNan16));
    DeviceBuffer<int32_t> offsets(at.offsets), chunk_base(at.chunk_base);
    DeviceHiLo<kTileK> device_hi_lo(c, hi_lo);
    ScanReverseArgs args;
    args.hi_lo = device_hi_lo.args();
    args.sequences = at.sequence_arg(offsets.data(), chunk_base.data());
    args.HV = c.HV, args.K = c.K, args.V = c.V, args.is_delta = c.is_delta;
    args.chunk_tiles = device_tiles.data();
    if (c.has_d_o) args.d_o = at.token_arg(device_d_o.data());
    args.shape = at.shape();
    if (save) args.d_states = d_states.data(), args.v = v.data();
    for (int n = 0; n < (alone ? at.N : 1); ++n) {
      if (alone) args.sequences = {offsets.data() + n, chunk_base.data() + n, 1, 0, 0};
      if (c.has_initial) args.d_final_state = at.state_arg(device_final.data(), n);
      args.d_initial_state = at.state_arg(device_initial.data(), n);
      scan_reverse(args, selected(args), kTileK, nullptr);
    }
    return Outputs{device_initial.download(), d_states.download(), v.download()};
  };
  const Outputs got = run(false);
  const Outputs again = run(c.packed);
  if (!c.save && !got.d_initial.same_bits(run(false, false).d_initial)) fail("same bits without what is saved");
  if (!(got.d_initial.same_bits(again.d_initial) && got.d_states == again.d_states && got.v == again.v)) {
    fail("same bits again, each sequence alone");
  }

  for (const bool rounds : {false, true}) {
    Difference d_initial, d_states, v_saved;
    for (int n = 0; n < at.N; ++n) {
      if (at.is_damaged(n)) continue;
      for (int hv = 0; hv < c.HV; ++hv) {
        const int padded = at.blocks * 64;
        std::vector<double> d(static_cast<size_t>(kTileK) * padded, 0.0);
        if (c.has_initial)
          for (int k = 0; k < c.K; ++k)
            for (int i = 0; i < c.V; ++i) d[static_cast<size_t>(k) * padded + i] = d_final.at(at.state_at(n, hv, k, i));
        for (int chunk = (c.lengths[n] + 63) / 64 - 1; chunk >= 0; --chunk) {
          const size_t index = at.chunk_tile(n, chunk, hv);
          const auto& chunk_tile = chunk_tiles[index];
          const int rows = at.rows(n, chunk);
          for (int i = 0; i < padded; ++i) {
            const size_t tile = at.tile(n, chunk, hv, i / 64);
            double v[64], v_lo[64], grad[64];
            for (int t = 0; t < 64; ++t) {
              v[t] = 0;
              for (int k = 0; k < c.K; ++k) {
                const double key = from_bf16(chunk_tile.k[sw128_index(t, k)]),
                             state = d[static_cast<size_t>(k) * padded + i];
                v[t] += key * rounded(c, state, rounds) +
                        (c.hi_lo ? hi_lo.key_lo(index, t, k) * rounded(state, rounds) : 0);
              }
              if (c.hi_lo) v[t] *= hi_lo.chunk_tiles[index].scale[t];
              v_saved.add(from_bf16(got.v[tile * kSw128Elements + sw128_index(t, i % 64)]), v[t]);
              const double nearest = rounded(v[t], rounds);
              v_lo[t] = c.hi_lo ? rounded(v[t] - nearest, rounds) : 0;
              v[t] = nearest;
              grad[t] =
                  c.has_d_o && t < rows && i < c.V ? rounded(d_o.at(at.token_at(n, 64 * chunk + t, hv, i)), rounds) : 0;
            }
            for (int k = 0; k < kTileK; ++k)
              d_states.add(from_bf16(got.d_states[tile * (64 * kTileK) + sw128_index(i % 64, k)]),
                           d[static_cast<size_t>(k) * padded + i]);
            for (int k = 0; k < c.K; ++k) {
              double x = chunk_tile.gamma[k] * d[static_cast<size_t>(k) * padded + i];
              for (int t = 0; t < 64; ++t) {
                x += from_bf16(chunk_tile.q[sw128_index(t, k)]) * grad[t];
                if (c.is_delta)
                  x -= from_bf16(chunk_tile.y[sw128_index(t, k)]) * (v[t] + v_lo[t]) +
                       (c.hi_lo ? hi_lo.lo(index, t, k) * v[t] : 0);
              }
              d[static_cast<size_t>(k) * padded + i] = x;
            }
          }
        }
        for (int k = 0; k < c.K; ++k)
          for (int i = 0; i < c.V; ++i)
            d_initial.add(got.d_initial.at(at.state_at(n, hv, k, i)), d[static_cast<size_t>(k) * padded + i]);
      }
    }
    report("d_init", rounds, d_initial,
           c.state_bf16 && (rounds || c.hi_lo) ? 3e-3
           : c.hi_lo && c.bf16                 ? 2e-5
           : rounds                            ? 4e-4
                                               : 6e-3);
    report("d_states", rounds, d_states, rounds ? 3e-3 : 6e-3);
    report("v", rounds, v_saved, rounds ? 3e-3 : 6e-3);
  }
}

// Of raw rows, A, P and row scales, or (c.keys) of QETiles, Khat, A and P (sm90/scan/reverse.cu).
template <int kTileK>
void test_reverse_rows(const Case& c) {
  const Layout at(c);
  Random random{67890};
  const size_t heads = static_cast<size_t>(at.N) * c.HV, tiles = static_cast<size_t>(at.chunks) * c.HV * at.blocks;
  std::vector<IntraChunk> pairs(static_cast<size_t>(at.chunks) * c.HV);
  std::vector<RowScalesBwd> numbers(pairs.size());
  std::vector<QETiles<kTileK>> chunk_tiles(pairs.size());
  std::vector<uint16_t> key_rows(pairs.size() * 64 * kTileK, 0);
  const auto key_matrix = [&](size_t index) { return &key_rows[index * 64 * kTileK]; };
  std::memset(static_cast<void*>(chunk_tiles.data()), 0, chunk_tiles.size() * sizeof(chunk_tiles[0]));
  const std::vector<uint16_t> keys = random_rows(at, 0.3, random), reads = random_rows(at, 0.3, random);
  Tensor d_o(c.bf16, static_cast<size_t>(at.tokens) * at.row), d_final(c.state_bf16, heads * c.K * c.V);
  std::memset(static_cast<void*>(pairs.data()), 0, pairs.size() * sizeof(pairs[0]));
  std::memset(static_cast<void*>(numbers.data()), 0, numbers.size() * sizeof(numbers[0]));
  for (int n = 0; n < at.N; ++n) {
    for (int hv = 0; hv < c.HV; ++hv) {
      for (int k = 0; k < c.K; ++k)
        for (int i = 0; i < c.V; ++i) d_final.set(at.state_at(n, hv, k, i), random(1));
      for (int t = 0; t < c.lengths[n]; ++t)
        for (int i = 0; i < c.V; ++i) d_o.set(at.token_at(n, t, hv, i), at.is_damaged(n) ? kNan : random(1));
      for (int chunk = 0; 64 * chunk < c.lengths[n]; ++chunk) {
        const size_t index = at.chunk_tile(n, chunk, hv);
        const int rows = at.rows(n, chunk);
        for (int i = 0; i < rows; ++i) {
          for (int j = 0; j <= i; ++j) {
            pairs[index].p[sw128_index(i, j)] = to_bf16(random(0.2));
            pairs[index].a[sw128_index(i, j)] = i == j ? to_bf16(1) : to_bf16(random(0.1));
          }
          numbers[index].k[i] = static_cast<float>(random(0.5)), numbers[index].e[i] = static_cast<float>(random(0.5));
          numbers[index].q[i] = static_cast<float>(random(0.7));
          if (c.mixed)
            numbers[index].erase_q[i] = static_cast<float>(random(0.3)),
            numbers[index].read_k[i] = static_cast<float>(random(0.3));
        }
        std::fill_n(numbers[index].gamma, 4, static_cast<float>(0.5 + random(0.5)));
        if (c.keys) {
          random_matrix(key_matrix(index), rows, c.K, 0.1, random);
          random_matrix(chunk_tiles[index].e, rows, c.K, 0.1, random);
          random_matrix(chunk_tiles[index].q, rows, c.K, 0.15, random);
          for (int k = 0; k < kTileK; ++k)
            chunk_tiles[index].gamma[k] = k == 5 ? 0.0f : static_cast<float>(0.5 + random(0.5));
        }
      }
    }
  }

  struct Outputs {
    Tensor d_initial;
    std::vector<uint16_t> d_states, dz;
  };
  const auto run = [&](bool alone, bool save = true) {
    DeviceBuffer<IntraChunk> device_pairs(pairs);
    DeviceBuffer<RowScalesBwd> device_scalars(numbers);
    DeviceBuffer<QETiles<kTileK>> device_tiles(chunk_tiles);
    DeviceBuffer<uint16_t> device_key_rows(key_rows);
    DeviceBuffer<uint16_t> device_keys(keys), device_reads(reads);
    DeviceTensor device_d_o(d_o), device_final(d_final), device_initial(Tensor(c.state_bf16, heads * c.K * c.V));
    DeviceBuffer<uint16_t> d_states(std::vector<uint16_t>(tiles * 64 * kTileK, kNan16)),
        dz(std::vector<uint16_t>(tiles * kSw128Elements, kNan16));
    DeviceBuffer<int32_t> offsets(at.offsets), chunk_base(at.chunk_base);
    ScanReverseArgs args;
    args.sequences = at.sequence_arg(offsets.data(), chunk_base.data());
    args.HV = c.HV, args.K = c.K, args.V = c.V;
    args.pairs = device_pairs.data();
    if (c.keys) {
      args.chunk_tiles = device_tiles.data(), args.keys = device_key_rows.data();
    } else {
      args.numbers = device_scalars.data(), args.mixed = c.mixed;
      args.rows = {at.key_arg(device_reads.data()), at.key_arg(device_keys.data())};
    }
    if (c.has_d_o) args.d_o = at.token_arg(device_d_o.data());
    args.shape = at.shape();
    if (save) args.d_states = d_states.data(), args.v = dz.data();
    for (int n = 0; n < (alone ? at.N : 1); ++n) {
      if (alone) args.sequences = {offsets.data() + n, chunk_base.data() + n, 1, 0, 0};
      if (c.has_initial) args.d_final_state = at.state_arg(device_final.data(), n);
      args.d_initial_state = at.state_arg(device_initial.data(), n);
      scan_reverse(args, selected(args), kTileK, nullptr);
    }
    return Outputs{device_initial.download(), d_states.download(), dz.download()};
  };
  const Outputs got = run(false);
  const Outputs again = run(c.packed);
  if (!c.save && !got.d_initial.same_bits(run(false, false).d_initial)) fail("same bits without what is saved");
  if (!(got.d_initial.same_bits(again.d_initial) && got.d_states == again.d_states && got.dz == again.dz))
    fail("same bits again, each sequence alone");

  for (const bool rounds : {false, true}) {
    Difference d_initial, d_states, dz_saved;
    for (int n = 0; n < at.N; ++n) {
      if (at.is_damaged(n)) continue;
      for (int hv = 0; hv < c.HV; ++hv) {
        const int padded = at.blocks * 64;
        std::vector<double> d(static_cast<size_t>(kTileK) * padded, 0.0);
        if (c.has_initial)
          for (int k = 0; k < c.K; ++k)
            for (int i = 0; i < c.V; ++i) d[static_cast<size_t>(k) * padded + i] = d_final.at(at.state_at(n, hv, k, i));
        for (int chunk = (c.lengths[n] + 63) / 64 - 1; chunk >= 0; --chunk) {
          const size_t index = at.chunk_tile(n, chunk, hv);
          const IntraChunk& pair = pairs[index];
          const RowScalesBwd& of = numbers[index];
          const QETiles<kTileK>& chunk_tile = chunk_tiles[index];
          const int rows = at.rows(n, chunk);
          const auto row = [&](const std::vector<uint16_t>& raw, int t, int k) {
            return from_bf16(raw[at.key_at(n, 64 * chunk + t, hv, k)]);
          };
          for (int i = 0; i < padded; ++i) {
            const size_t tile = at.tile(n, chunk, hv, i / 64);
            double grad[64] = {}, dr[64] = {}, dz[64] = {};
            for (int t = 0; t < rows && c.has_d_o && i < c.V; ++t)
              grad[t] = rounded(d_o.at(at.token_at(n, 64 * chunk + t, hv, i)), rounds);
            for (int t = 0; t < rows; ++t) {
              double x = 0;
              for (int k = 0; k < c.K; ++k) {
                x += (c.keys ? from_bf16(key_matrix(index)[sw128_index(t, k)]) : row(keys, t, k)) *
                     rounded(d[static_cast<size_t>(k) * padded + i], rounds);
              }
              if (!c.keys) x *= of.k[t];
              for (int j = 0; j < rows; ++j) x += from_bf16(pair.p[sw128_index(j, t)]) * grad[j];
              dr[t] = rounded(x, rounds);
            }
            for (int t = 0; t < 64; ++t) {
              for (int j = 0; j < rows; ++j) dz[t] += from_bf16(pair.a[sw128_index(j, t)]) * dr[j];
              dz_saved.add(from_bf16(got.dz[tile * kSw128Elements + sw128_index(t, i % 64)]), dz[t]);
            }
            for (int k = 0; k < kTileK; ++k)
              d_states.add(from_bf16(got.d_states[tile * (64 * kTileK) + sw128_index(i % 64, k)]),
                           d[static_cast<size_t>(k) * padded + i]);
            for (int k = 0; k < c.K; ++k) {
              double x = (c.keys ? chunk_tile.gamma[k] : of.gamma[0]) * d[static_cast<size_t>(k) * padded + i];
              for (int t = 0; t < rows; ++t) {
                if (c.keys) {
                  x += from_bf16(chunk_tile.q[sw128_index(t, k)]) * grad[t] +
                       from_bf16(chunk_tile.e[sw128_index(t, k)]) * rounded(dz[t], rounds);
                  continue;
                }
                x += row(reads, t, k) * rounded(of.q[t] * grad[t] + of.erase_q[t] * dz[t], rounds);
                x += row(keys, t, k) * rounded(of.read_k[t] * grad[t] + of.e[t] * dz[t], rounds);
              }
              d[static_cast<size_t>(k) * padded + i] = x;
            }
          }
        }
        for (int k = 0; k < c.K; ++k)
          for (int i = 0; i < c.V; ++i)
            d_initial.add(got.d_initial.at(at.state_at(n, hv, k, i)), d[static_cast<size_t>(k) * padded + i]);
      }
    }
    report("d_init", rounds, d_initial, c.state_bf16 && rounds ? 3e-3 : rounds ? 4e-4 : 6e-3);
    report("d_states", rounds, d_states, rounds ? 3e-3 : 6e-3);
    report("dz", rounds, dz_saved, rounds ? 3e-3 : 6e-3);
  }
}

void test(const Case& c, bool forward) {
  std::printf("%-42s", c.name.c_str());
  if (forward) {
    c.key == 64 ? test_forward<64>(c) : test_forward<128>(c);
  } else if (c.rows || c.keys) {
    c.key == 64 ? test_reverse_rows<64>(c) : test_reverse_rows<128>(c);
  } else {
    c.key == 64 ? test_reverse<64>(c) : test_reverse<128>(c);
  }
  std::printf("\n");
  std::fflush(stdout);
}

}  // namespace
}  // namespace fw::cuda

int main(int argc, char** argv) {
  if (!fw::cuda::hopper()) return fw::cuda::kNotRun;
  uint64_t index = 0;
  for (const bool forward : {true, false}) {
    for (fw::cuda::Case c : fw::cuda::cases()) {
      if (c.pairs && !forward) continue;
      if (!fw::cuda::testing::in_share(index++)) continue;
      c.name = (forward ? "forward " : "reverse ") + c.name;
      if (argc > 1 && c.name.find(argv[1]) == std::string::npos) continue;
      fw::cuda::test(c, forward);
    }
  }
  std::printf(fw::cuda::failures == 0 ? "all good\n" : "%d FAILED\n", fw::cuda::failures);
  return fw::cuda::failures == 0 ? 0 : 1;
}
