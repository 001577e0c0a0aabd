// What makes a decoded token, on every device there is. Its attention is compared with the host's in double, drawn
// tokens with the host's.
#include <algorithm>
#include <cmath>
#include <limits>

#include "base/device.h"
#include "ops/backend.h"
#include "ops/cpu/sampling.h"
#include "ops/device_check.h"

namespace fw::testing {
namespace {

class Decode : public OnDevice {};
INSTANTIATE_TEST_SUITE_P(Devices, Decode, ::testing::ValuesIn(cases()), [](const auto& one) { return one.param.name; });

struct Rows {
  AttentionShape shape;
  int64_t pages, rows;             // of a sequence: one page is a ring
  std::vector<int64_t> positions;  // tokens before this one
  bool table;                      // pages lie anywhere
};

// The output's gate: none, in the step, or by operations after it.
enum class Gated { kNot, kInside, kAfter };

// One step from random pages; o, and then all pages. The gate is the query before the step.
template <class T>
std::vector<std::vector<double>> step_of(Device& device, const Rows& s, const std::vector<double>& numbers,
                                         int64_t only = -1, Gated gated = Gated::kNot) {
  Context<T> on(device);
  const int64_t N = only < 0 ? static_cast<int64_t>(s.positions.size()) : 1, first = std::max<int64_t>(only, 0);
  const int64_t queries = s.shape.heads * s.shape.dim, width = s.shape.kv_heads * s.shape.dim,
                of_sequence = s.pages * s.rows * width;
  const double* from = numbers.data();
  const auto take = [&](int64_t cols) {
    std::vector<double> out(from + first * cols, from + (first + N) * cols);
    from += static_cast<int64_t>(s.positions.size()) * cols;
    return out;
  };
  Matrix<T> q(device, N, queries, 8, take(queries)), k(device, N, width, 8, take(width)),
      v(device, N, width, 8, take(width)), o(device, N, queries, 8);
  Buffer<T> past_k = on.template buffer<T>(take(of_sequence)), past_v = on.template buffer<T>(take(of_sequence));
  const SeqLayout sequences = SeqLayout::uniform(N, 1);
  Buffer<int64_t> offsets(device, N + 1), positions(device, N);
  offsets.write(0, sequences.offsets());
  positions.write(0, std::span(s.positions).subspan(static_cast<size_t>(first), static_cast<size_t>(N)));
  // The table of pages lists them one after the other.
  Buffer<T*> tables[2] = {Buffer<T*>(device, N * s.pages), Buffer<T*>(device, N * s.pages)};
  const auto pages = [&](Buffer<T>& memory, Buffer<T*>& table) {
    if (!s.table) return Pages<T>{memory.data(), nullptr, s.pages, s.rows, width};
    std::vector<T*> list;
    for (int64_t i = 0; i < N * s.pages; ++i) list.push_back(memory.data() + i * s.rows * width);
    table.write(0, list);
    return Pages<T>{nullptr, table.data(), s.pages, s.rows, width, width % 8 == 0};
  };
  const PassLayout layout(sequences, offsets.data(), positions.data());
  const Pages<T> keys = pages(past_k, tables[0]), values = pages(past_v, tables[1]);
  Matrix<T> gate(device, N, queries, 8, q.values());
  if (gated == Gated::kInside) {
    on.exec.gated_attention_step(q.mat(), k.mat(), v.mat(), gate.mat(), s.shape, layout, keys, values, o.mat());
  } else {
    on.exec.attention_step(q.mat(), k.mat(), v.mat(), s.shape, layout, keys, values, o.mat());
  }
  if (gated == Gated::kAfter) {
    on.exec.sigmoid_gate_forward(gate.mat(), nullptr, Wide<T>(1), gate.mat());
    on.exec.product_forward(o.mat(), gate.mat(), o.mat());
  }
  return {o.values(), values_of(past_k), values_of(past_v)};
}

std::vector<Rows> all_rows() {
  return {
      {{1, 1, 8, 1, 0.5}, 1, 1, {0, 1, 7}, false},                          // a window of one token
      {{2, 1, 8, 2, 0.5}, 1, 2, {0, 1, 2, 9}, false},                       // of two, heads share keys
      {{2, 2, 24, 20, 0.3}, 1, 20, {0, 18, 19, 20, 21, 39, 40}, false},     // the ring's end
      {{4, 1, 32, 300, 0.2}, 1, 300, {0, 127, 128, 299, 300, 777}, false},  // runs, and the last of one row
      // three heads share; a ring with more rows than the window
      {{6, 2, 16, 33, 0.2}, 1, 40, {0, 32, 33, 100}, false},
      {{3, 3, 5, 50, 0.2}, 1, 50, {3, 60}, false},           // rows that are no packets
      {{2, 1, 16, 0, 0.25}, 4, 70, {0, 69, 70, 279}, true},  // all before, in pages
      {{8, 1, 576, 0, 0.05}, 1, 150, {0, 127, 149}, false},  // latents of published models
      {{3, 1, 257, 20, 0.06}, 1, 20, {0, 21}, false},
      {{1, 1, 128, 0, 0.1}, 8, 256, {5, 1500, 2047}, true},
      {{1, 1, 8, 0, 0.3}, 1, 9000, {8191, 8192, 8999}, false},  // more than 64 runs of 128
      // Heads of 64 and 128 channels, whose bf16 rows are tiles of a kernel of products.
      {{2, 2, 128, 150, 0.1}, 1, 150, {0, 15, 16, 63, 64, 127, 128, 149, 150, 431}, false},
      {{16, 2, 64, 300, 0.12}, 1, 300, {7, 127, 128, 299, 777}, false},  // eight heads share
      {{16, 1, 64, 40, 0.12}, 1, 40, {39, 100}, false},                  // sixteen
      {{3, 1, 64, 0, 0.12}, 30, 7, {0, 6, 7, 150, 209}, true},           // a run has many pages
      {{1, 1, 64, 100, 0.12}, 1, 100, {int64_t{5} << 32, 99}, false},    // more tokens than 32 bits count
      {{1, 1, 64, 0, 0.12}, 1, 9000, {8191, 8192, 8999}, false},
      // Of 256 channels: four heads share, as published models have it, and sixteen; a window; in pages, a part turned.
      {{16, 4, 256, 0, 0.06}, 1, 300, {0, 15, 127, 128, 299}, false},
      {{16, 1, 256, 40, 0.06}, 1, 40, {39, 100}, false},
      {{2, 1, 256, 0, 0.06, 10000, 64}, 4, 70, {0, 69, 70, 279}, true},
      // Turned queries and keys, by that kernel (in the emulation). The token's own row is:
      // - in the tiles that are asked for at first,
      // - in a later one (8319: the last of a run of 160),
      // - in a run after a block's first.
      //
      // Where pages lie anywhere, and eight or sixteen heads share. Of a part of the channels, or of other heads, by
      // rotary.
      {{4, 2, 128, 150, 0.1, 10000, 128}, 1, 150, {0, 15, 16, 127, 128, 149, 150, 431, int64_t{1} << 20}, false},
      {{1, 1, 64, 0, 0.12, 500, 64}, 1, 9000, {8190, 8192, 8319, 8999}, false},
      {{8, 1, 64, 0, 0.12, 10000, 64}, 30, 7, {0, 6, 7, 150, 209}, true},
      {{16, 1, 128, 40, 0.1, 10000, 128}, 1, 40, {39, 100}, false},
      {{2, 1, 128, 0, 0.1, 10000, 64}, 4, 70, {0, 69, 70, 279}, true},
      {{3, 1, 6, 20, 0.3, 100, 4}, 1, 20, {0, 21}, false},
  };
}

TEST_P(Decode, AttentionOfAStepIsTheHosts) {
  for (const Rows& s : all_rows()) {
    SCOPED_TRACE(::testing::Message() << s.shape.heads << " heads, window " << s.shape.window << ", rows " << s.rows);
    with_type([&](auto on) {
      using T = typename std::remove_cvref_t<decltype(on)>::Activation;
      const int64_t N = static_cast<int64_t>(s.positions.size()), width = s.shape.kv_heads * s.shape.dim;
      const std::vector<double> numbers =
          on.random(N * (s.shape.heads * s.shape.dim + 2 * width + 2 * s.pages * s.rows * width));
      const auto want = step_of<double>(host_device(), s, numbers), got = step_of<T>(on.device, s, numbers);
      expect_near(got[0], want[0], kTolerance<T>, "o");
      if (s.shape.turns()) {
        expect_near(got[1], want[1], kTolerance<T>, "keys");
      } else {
        EXPECT_EQ(got[1], want[1]) << "keys";
      }
      EXPECT_EQ(got[2], want[2]) << "values";
      for (int64_t n = 0; n < N; ++n) {
        const auto alone = step_of<T>(on.device, s, numbers, n);
        const auto begin = got[0].begin() + n * s.shape.heads * s.shape.dim;
        EXPECT_EQ(alone[0], std::vector<double>(begin, begin + s.shape.heads * s.shape.dim))
            << "sequence " << n << " alone has other bits";
      }
    });
  }
}

TEST_P(Decode, AttentionOfAGatedStepHasTheBitsOfOperations) {
  for (const Rows& s : all_rows()) {
    SCOPED_TRACE(::testing::Message() << s.shape.heads << " heads of " << s.shape.dim);
    with_type([&](auto on) {
      using T = typename std::remove_cvref_t<decltype(on)>::Activation;
      const int64_t N = static_cast<int64_t>(s.positions.size()), width = s.shape.kv_heads * s.shape.dim;
      const std::vector<double> numbers =
          on.random(N * (s.shape.heads * s.shape.dim + 2 * width + 2 * s.pages * s.rows * width));
      EXPECT_EQ(step_of<T>(on.device, s, numbers, -1, Gated::kInside),
                step_of<T>(on.device, s, numbers, -1, Gated::kAfter));
    });
  }
}

// Heads of as many packets as a warp has lanes, of fewer, of no power of two, and those that no kernel takes at once;
// rotated whole, in part and not.
TEST_P(Decode, HeadsNormedAndRotatedHaveTheBitsOfOperations) {
  struct Heads {
    AttentionShape shape;
    std::vector<int64_t> positions;
    bool together;  // keys lie behind the queries
  };
  for (const Heads& s : std::vector<Heads>{{{16, 4, 256, 0, 1, 10000, 64}, {5}, true},
                                           {{9, 3, 128, 0, 1, 500, 128}, {0, 77, int64_t{1} << 33}, false},
                                           {{3, 1, 64, 0, 1, 0, 0}, {1, 2}, true},
                                           {{5, 5, 96, 0, 1, 10000, 32}, {3, 4000}, false},
                                           {{2, 1, 24, 0, 1, 100, 20}, {9}, true},
                                           {{2, 2, 5, 0, 1, 100, 4}, {9}, false},
                                           {{1, 1, 320, 0, 1, 100, 64}, {9, 10}, false},
                                           {{2, 1, 64, 0, 1, 100, 64}, std::vector<int64_t>(70, 3), true}}) {
    SCOPED_TRACE(::testing::Message() << s.shape.heads << " heads of " << s.shape.dim);
    with_type([&](auto on) {
      using T = typename std::remove_cvref_t<decltype(on)>::Activation;
      using W = Wide<T>;
      const int64_t N = static_cast<int64_t>(s.positions.size()), D = s.shape.dim, queries = s.shape.heads * D,
                    keys = s.shape.kv_heads * D;
      const std::vector<double> rows = on.random(N * (queries + keys));
      const Buffer<W> q_norm = on.template buffer<W>(on.random(D)), k_norm = on.template buffer<W>(on.random(D));
      const SeqLayout sequences = SeqLayout::uniform(N, 1);
      Buffer<int64_t> offsets(on.device, N + 1), positions(on.device, N);
      offsets.write(0, sequences.offsets());
      positions.write(0, s.positions);
      const PassLayout layout(sequences, offsets.data(), positions.data());
      const auto run = [&](bool at_once) {
        Matrix<T> both(on.device, N, queries + keys, 8, rows),
            apart(on.device, N, keys, 8, std::vector<double>(static_cast<size_t>(N * keys)));
        const Mat<T> q = both.mat().col_range(0, queries), behind = both.mat().col_range(queries, keys);
        const Mat<T> k = s.together ? behind : apart.mat();
        if (!s.together) on.exec.copy_rows(behind, k);
        if (at_once) {
          on.exec.normed_rotary(q, k, q_norm.data(), k_norm.data(), W(1e-2), s.shape, layout);
        } else {
          Buffer<W> rstd(on.device, N * s.shape.heads);
          for (const auto& [x, norm] : {std::pair{q, q_norm.data()}, std::pair{k, k_norm.data()}}) {
            on.exec.gated_rmsnorm_forward(x, Mat<const T>(), nullptr, norm, W(1e-2), D, GateKind::kNone, x,
                                          rstd.data());
            if (s.shape.turns()) on.exec.rotary(x, D, s.shape.rotated, s.shape.theta, layout, Rotation::kForward);
          }
        }
        return std::vector<std::vector<double>>{both.values(), apart.values()};
      };
      EXPECT_EQ(run(true), run(false));
    });
  }
}

// Heads whose eight rows have room alongside a product's sums, and wider ones. Of the host nobody says it: its products
// are a library's.
TEST_P(Decode, ARowBehindAGatedNormHasItsBitsAlone) {
  if (GetParam().device->kind() == FW_DEVICE_CPU) GTEST_SKIP() << "products of a library";
  for (const int64_t heads : {int64_t{3}, int64_t{50}}) {
    SCOPED_TRACE(::testing::Message() << heads << " heads");
    with_type([&](auto on) {
      using T = typename std::remove_cvref_t<decltype(on)>::Activation;
      const int64_t rows = row_limits(*GetParam().device).decode, dim = 128, in = heads * dim, out = 1000;
      const std::vector<double> o = on.random(rows * in), gate = on.random(rows * in);
      Buffer<Wide<T>> weight = on.template buffer<Wide<T>>(on.random(out * in)),
                      norm = on.template buffer<Wide<T>>(on.random(dim));
      const Buffer<Bf16> rounded = on.template buffer<Bf16>(values_of(weight));
      const auto run = [&](int64_t first, int64_t count) {
        const auto part = [&](const std::vector<double>& of) {
          return std::vector<double>(of.begin() + first * in, of.begin() + (first + count) * in);
        };
        Matrix<T> x(on.device, count, in, 8, part(o)), g(on.device, count, in, 8, part(gate)),
            y(on.device, count, out, 8);
        on.exec.gated_linear_forward(
            x.mat(), g.mat(), norm.data(), Wide<T>(1e-5), dim, GateKind::kSilu,
            Weight<Wide<T>>(Mat<const Wide<T>>(weight.data(), out, in), Mat<const Bf16>(rounded.data(), out, in)),
            y.mat(), Write::kOverwrite);
        return y.values();
      };
      const std::vector<double> all = run(0, rows);
      for (int64_t n = 0; n < rows; ++n)
        EXPECT_EQ(run(n, 1), std::vector<double>(all.begin() + n * out, all.begin() + (n + 1) * out)) << "row " << n;
    });
  }
}

// ---- drawn tokens -----------------------------------------------------------------------------------------------------------------

struct Draws {
  std::vector<Drawn> drawn;
  std::vector<int32_t> ids;
};

template <class T>
Draws draw(Device& device, const std::vector<double>& logits, int64_t vocab, int64_t cols, const Sampling& sampling,
           const std::vector<double>& uniform, const std::vector<std::vector<int32_t>>& recent) {
  Context<T> on(device);
  const int64_t N = static_cast<int64_t>(uniform.size());
  Matrix<T> rows(device, N, cols, 3, logits);
  Buffer<int32_t> ring(device, N * kMostRecent), ids(device, N);
  Buffer<int64_t> seen(device, N), positions(device, N);
  Buffer<Drawn> drawn(device, N);
  // Those of a decoder's ring of three tokens: counted on round it.
  Buffer<int32_t> in_ring(device, N);
  for (int64_t n = 0; n < N; ++n) {
    const auto before = static_cast<int32_t>(n % 3);
    in_ring.write(n, {&before, 1});
    // The ring has gone round, so that the window lies over its end.
    const std::vector<int32_t>& list = recent[static_cast<size_t>(n)];
    const int64_t count = kMostRecent + static_cast<int64_t>(list.size()) / 2;
    for (size_t i = 0; i < list.size(); ++i) {
      const int64_t at = count - static_cast<int64_t>(list.size() - i);
      ring.write(n * kMostRecent + at % kMostRecent, {&list[i], 1});
    }
    seen.write(n, {&count, 1});
  }
  DrawStreams streams;
  streams.uniform = uniform.data();
  streams.recent = ring.data(), streams.seen = seen.data(), streams.positions = positions.data(),
  streams.ids = ids.data(), streams.drawn = drawn.data();
  streams.logprobs = true;
  if (vocab != 1) streams.ring_positions = in_ring.data(), streams.ring_tokens = 3;
  on.exec.sample_tokens(rows.mat(), vocab, sampling, streams);
  const std::vector<int32_t> of_ring = in_ring.to_vector();
  for (int64_t n = 0; n < N; ++n)
    EXPECT_EQ(of_ring[static_cast<size_t>(n)], vocab != 1 ? (n + 1) % 3 : n % 3) << "sequence " << n;
  for (const int64_t position : positions.to_vector()) EXPECT_EQ(position, 1);
  const std::vector<int32_t> left = ids.to_vector();
  for (int64_t n = 0; n < N; ++n) {
    const int64_t count = kMostRecent + static_cast<int64_t>(recent[static_cast<size_t>(n)].size()) / 2;
    EXPECT_EQ(seen.to_vector()[static_cast<size_t>(n)], count + 1);
    EXPECT_EQ(ring.to_vector()[static_cast<size_t>(n * kMostRecent + count % kMostRecent)],
              left[static_cast<size_t>(n)]);
  }
  return {drawn.to_vector(), left};
}

TEST_P(Decode, DrawsWhatTheHostDraws) {
  const Sampling settings[] = {{0.0, 5, 0.9},
                               {0.0, 0, 1.0, 0.0, 1.3, 10},
                               {1.0, 0, 1.0},
                               {5.0, 7, 1.0},
                               {0.3, 0, 0.9},
                               {1.0, 20, 0.6, 0.05},
                               {3.0, 100000, 1e-9},
                               {1.0, 1, 1.0, 1.0},
                               {2.0, 30, 0.95, 0.0, 1.3, 10},
                               {1.0, 0, 1.0, 0.02, 0.8, 64}};
  with_type([&](auto on) {
    using T = typename std::remove_cvref_t<decltype(on)>::Activation;
    using Number = std::conditional_t<std::is_same_v<T, double>, double, float>;  // what the host calculates with
    Random random(11);
    for (const int64_t vocab : {int64_t{1}, int64_t{40}, int64_t{700}}) {
      const int64_t cols = vocab + (vocab == 40 ? 9 : 0), N = 3;
      for (const Sampling& sampling : settings) {
        std::vector<double> logits, uniform;
        for (int64_t i = 0; i < N * cols; ++i)
          logits.push_back(value_of(stored<T>(static_cast<double>(static_cast<float>(4 * random.normal())))));
        // many equal ones
        for (int64_t c = 0; c < cols; ++c) logits[static_cast<size_t>(c)] = static_cast<double>(c % 3);
        // beyond the tokenizer's
        for (int64_t c = vocab; c < cols; ++c) logits[static_cast<size_t>(cols + c)] = 100;
        if (vocab > 1)
          logits[static_cast<size_t>(2 * cols)] = -std::numeric_limits<double>::infinity(),
                                         logits[static_cast<size_t>(2 * cols + 1)] = -0.0;
        std::vector<std::vector<int32_t>> recent(static_cast<size_t>(N));
        for (int64_t n = 0; n < N; ++n) {
          uniform.push_back(n == 0 && vocab == 40 ? 1 - 0x1p-53 : random.uniform());
          for (int i = 0; i < 90; ++i)
            recent[static_cast<size_t>(n)].push_back(
                static_cast<int32_t>(random.below(static_cast<uint64_t>(vocab) + 2)));
        }
        const Draws got = draw<T>(on.device, logits, vocab, cols, sampling, uniform, recent);
        for (int64_t n = 0; n < N; ++n) {
          const auto row = std::vector<Number>(logits.begin() + n * cols, logits.begin() + n * cols + vocab);
          const int32_t id =
              choose_token<Number>(row, recent[static_cast<size_t>(n)], sampling, uniform[static_cast<size_t>(n)]);
          SCOPED_TRACE(::testing::Message()
                       << "vocabulary " << vocab << ", row " << n << ", temperature " << sampling.temperature
                       << ", top_k " << sampling.top_k << ", top_p " << sampling.top_p << ", min_p " << sampling.min_p
                       << ", penalty " << sampling.repetition_penalty);
          ASSERT_EQ(got.drawn[static_cast<size_t>(n)].id, id);
          ASSERT_EQ(got.ids[static_cast<size_t>(n)], id);
          const auto all = std::vector<Number>(logits.begin() + n * cols, logits.begin() + (n + 1) * cols);
          ASSERT_NEAR(got.drawn[static_cast<size_t>(n)].logprob, token_log_probability<Number>(all, id), 1e-9);
        }
      }
    }
  });
}

// Every token comes as often as its probability says: the numbers of one row in small steps.
TEST_P(Decode, EveryQuantileHasItsToken) {
  with_type([&](auto on) {
    using T = typename std::remove_cvref_t<decltype(on)>::Activation;
    const std::vector<double> row = {0.5, -1, 2, 2, 0, -3, 1};
    constexpr int64_t kSteps = 60;
    std::vector<double> logits, uniform;
    for (int64_t i = 0; i < kSteps; ++i) {
      logits.insert(logits.end(), row.begin(), row.end());
      uniform.push_back((static_cast<double>(i) + 0.5) / kSteps);
    }
    const Draws got =
        draw<T>(on.device, logits, 7, 7, {0.7, 0, 1.0}, uniform, std::vector<std::vector<int32_t>>(kSteps));
    const std::vector<float> floats(row.begin(), row.end());
    for (int64_t i = 0; i < kSteps; ++i)
      ASSERT_EQ(got.ids[static_cast<size_t>(i)],
                choose_token<float>(floats, {}, {0.7, 0, 1.0}, uniform[static_cast<size_t>(i)]));
  });
}

TEST_P(Decode, DamagedLogitsDrawNothing) {
  with_type([&](auto on) {
    using T = typename std::remove_cvref_t<decltype(on)>::Activation;
    constexpr double kInf = std::numeric_limits<double>::infinity(), kNan = std::numeric_limits<double>::quiet_NaN();
    for (const double temperature : {0.0, 1.0}) {
      for (const double penalty : {1.0, 1.5}) {
        const Draws got = draw<T>(on.device, {1, kNan, 2, 1, kInf, 2, -kInf, -kInf, -kInf, 1, 2, 3}, 3, 3,
                                  {temperature, 0, 1.0, 0, penalty}, {0.1, 0.1, 0.1, 0.1}, {{1}, {1}, {1}, {1}});
        for (size_t n = 0; n < 3; ++n) {
          EXPECT_EQ(got.drawn[n].id, -1) << n;
          EXPECT_EQ(got.ids[n], 0) << n;  // what reads it stays inside of the vocabulary
        }
        EXPECT_GE(got.drawn[3].id, 0);
      }
    }
  });
}

}  // namespace
}  // namespace fw::testing
