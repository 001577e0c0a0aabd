// Generation on every device there is. Attention of a decoded token is compared with the host's in double, drawn tokens
// with the host's. A decoder runs alongside passes of the model one after the other. It gives the same bits:
// - alone,
// - alongside others,
// - recorded,
// - after a prompt in between,
// - in a slot that another sequence has left.
#include <algorithm>
#include <cmath>
#include <limits>

#include "base/device.h"
#include "base/temp_folder.h"
#include "generate/session.h"
#include "model/language_model.h"
#include "nn/decode_ring.h"
#include "nn/recurrence.h"
#include "ops/backend.h"
#include "ops/cpu/sampling.h"
#include "ops/device_check.h"
#include "support/error_of.h"

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

// ---- decoders ---------------------------------------------------------------------------------------------------------------------

struct OneModel {
  std::string name;
  ModelConfig config;
};

ModelConfig config_of(const std::string& rule, const std::vector<std::string>& layers) {
  ModelConfig c;
  c.rule = rule;
  c.vocab_size = 260;
  c.hidden_size = 32;
  c.num_hidden_layers = static_cast<int64_t>(layers.size());
  c.layers = layers;
  c.num_heads = 2;
  c.head_dim = 16;
  c.intermediate_size = 48;
  c.window.window = 6;
  c.window.num_kv_heads = 1;
  c.window.num_heads = 2;
  return c;
}

// Experts that not every token passes, and fewer rows of each than tokens.
ModelConfig experts_config() {
  ModelConfig c = config_of("gated_deltanet", {"recurrent", "attention"});
  c.mlp = "experts";
  c.experts.num_experts = 5, c.experts.top_k = 2;
  c.experts.intermediate_size = c.experts.shared_size = 24;
  c.experts.shared_gate = true;
  return c;
}

std::vector<OneModel> decoder_models() {
  return {{"recurrent", config_of("gated_deltanet2", {"recurrent", "recurrent"})},
          {"preconditioned", config_of("precond_gated_deltanet", {"recurrent"})},
          {"hybrid", config_of("gated_deltanet2", {"conv", "recurrent", "window", "attention"})},
          {"ssd", config_of("gated_deltanet2", {"ssd", "mamba"})},
          {"experts", experts_config()}};
}

class Decoders : public ::testing::TestWithParam<std::string> {
 protected:
  // Far from uniform, so that every token seen changes the logits.
  static LanguageModel<float> model_of(const ModelConfig& config, Device& device) {
    LanguageModel<float> model(config, device);
    Random random(5);
    for (const ParamSpec& spec : model.params().specs()) {
      std::vector<double> values(static_cast<size_t>(spec.size()));
      spec.init(values, random);
      std::vector<float> larger;
      larger.reserve(values.size());
      for (const double x : values) larger.push_back(static_cast<float>(3 * x));
      model.params().write_values(spec, larger);
    }
    return model;
  }
  static std::vector<int32_t> some_ids(size_t count, uint64_t seed) {
    Random random(seed);
    std::vector<int32_t> ids(count);
    for (int32_t& id : ids) id = static_cast<int32_t>(random.below(256));
    return ids;
  }
  Device& device() const { return device_named(GetParam()); }
  std::unique_ptr<Tokenizer> tokenizer_ = byte_tokenizer();
};
INSTANTIATE_TEST_SUITE_P(Devices, Decoders, ::testing::ValuesIn([] {
                           std::vector<std::string> list = {"cpu"};
                           if (cases().size() > 2) list.emplace_back("cuda");
                           return list;
                         }()),
                         [](const auto& one) { return one.param; });

const Sampling kDrawn{0.9, 40, 0.95, 0.0, 1.1, 32};

// Logits and ids of a decoder are those of forward_last, to the bit: past the ring's end, over a page of the cache, and
// with a prompt in between.
TEST_P(Decoders, ADecoderIsThePassOfATokenAgainAndAgain) {
  for (const OneModel& one : decoder_models()) {
    SCOPED_TRACE(one.name);
    LanguageModel<float> model = model_of(one.config, device());
    ModelState<float> a(one.config, 1, device()), b(one.config, 1, device());
    std::vector<float> want(260), got(260);
    const Mat<float> logits(want.data(), 1, 260);
    // Of the hybrid, a cache's first page ends soon.
    const std::vector<int32_t> prompt = some_ids(one.name == "hybrid" ? kCacheRows - 8 : 11, 3);
    const SeqLayout first({0, static_cast<int64_t>(prompt.size())});
    model.forward_last(prompt, first, a, logits);
    model.forward_last(prompt, first, b, logits);
    const auto decoder = model.decoder(b);
    std::vector<int32_t> recent = prompt;
    decoder->begin(0, want, recent);
    Random random(7);
    for (int64_t i = 0; i < 12; ++i) {
      if (i == 5) {
        const std::vector<int32_t> more = some_ids(5, 4);
        model.forward_last(more, SeqLayout({0, 5}), a, logits);
        model.forward_last(more, SeqLayout({0, 5}), b, logits);
        recent.insert(recent.end(), more.begin(), more.end());
        decoder->begin(0, want, recent);
      }
      const double uniform = random.uniform();
      decoder->sample(256, kDrawn, {&uniform, 1}, false);
      decoder->step();
      const int32_t id = decoder->wait()[0].id;
      ASSERT_EQ(id, choose_token<float>(std::span(want).first(256), recent, kDrawn, uniform)) << "token " << i;
      recent.push_back(id);
      model.forward_last({&id, 1}, SeqLayout({0, 1}), a, logits);
      decoder->read_logits(0, got);
      ASSERT_EQ(got, want) << "token " << i;
    }
    EXPECT_EQ(a.positions(), b.positions());
    for (int64_t layer = 0; layer < a.layers(); ++layer) {
      for (const char* name : {"s", "tail", "k", "v"})
        EXPECT_EQ(a.values(layer, name), b.values(layer, name)) << layer << ' ' << name;
    }
  }
}

// Each slot gives what its session gives alone, to the bit while there are few; a slot that is left takes another one.
TEST_P(Decoders, SessionsSideBySideGiveWhatTheyGiveAlone) {
  const size_t slots = 3, texts = 5, tokens = 4;
  for (const OneModel& one : decoder_models()) {
    if (one.name == "recurrent" || one.name == "ssd") continue;
    SCOPED_TRACE(one.name);
    LanguageModel<float> model = model_of(one.config, device());
    std::vector<Session> sessions;
    sessions.reserve(texts);
    for (size_t i = 0; i < texts; ++i) {
      sessions.emplace_back(model, *tokenizer_, i + 1);
      sessions[i].prefill(some_ids(3 + 4 * i, i));  // ragged, shorter and longer than the window
    }
    std::vector<std::vector<int32_t>> want(texts), got(texts);
    std::vector<std::vector<double>> logprobs(texts);
    SessionBatch batch(model, *tokenizer_, slots);
    std::vector<size_t> at(slots);
    size_t next = 0;
    for (size_t n = 0; n < slots; ++n) batch.put(static_cast<int64_t>(n), sessions[at[n] = next++]);
    // Texts end at different times: text i has tokens + i of them.
    while (std::any_of(at.begin(), at.end(), [&](size_t i) { return i < texts; })) {
      const std::span<const Drawn> drawn = batch.next(kDrawn, true);
      for (size_t n = 0; n < slots; ++n) {
        if (at[n] == texts) continue;
        got[at[n]].push_back(drawn[n].id);
        logprobs[at[n]].push_back(drawn[n].logprob);
        if (got[at[n]].size() < tokens + at[n]) continue;
        batch.clear(static_cast<int64_t>(n));
        at[n] = next < texts ? next++ : texts;
        if (at[n] < texts) batch.put(static_cast<int64_t>(n), sessions[at[n]]);
      }
    }
    for (size_t i = 0; i < texts; ++i) {
      for (size_t t = 0; t < tokens + i; ++t) {
        double logprob = 0;
        want[i].push_back(sessions[i].next(kDrawn, &logprob));
        ASSERT_EQ(logprob, logprobs[i][t]) << "text " << i << ", token " << t;
      }
      EXPECT_EQ(got[i], want[i]) << "text " << i;
    }
  }
}

// A session that has decoded is saved, copied and told more as one that has only read is.
// Alongside some others a sequence has the bits that it has alongside many: products of 9 to 64 rows are the same
// kernel's.
TEST_P(Decoders, ASequenceAmongSomeHasItsBitsAmongMany) {
  if (GetParam() != "cuda") GTEST_SKIP() << "said of kernels of the device alone";
  const size_t tokens = 3;
  const auto among = [&](const ModelConfig& config, size_t slots) {
    LanguageModel<float> model = model_of(config, device());
    std::vector<Session> sessions;
    sessions.reserve(slots);
    SessionBatch batch(model, *tokenizer_, static_cast<int64_t>(slots));
    for (size_t i = 0; i < slots; ++i) {
      sessions.emplace_back(model, *tokenizer_, i + 1);
      sessions.back().prefill(some_ids(3 + i % 7, i));
    }
    for (size_t i = 0; i < slots; ++i) batch.put(static_cast<int64_t>(i), sessions[i]);
    std::vector<std::pair<int32_t, double>> drawn;
    for (size_t t = 0; t < tokens; ++t) {
      const std::span<const Drawn> all = batch.next(kDrawn, true);
      for (size_t i = 0; i < 9; ++i) drawn.emplace_back(all[i].id, all[i].logprob);
    }
    return drawn;
  };
  for (const ModelConfig& config : {config_of("gated_deltanet2", {"recurrent", "window"}), experts_config()}) {
    const auto want = among(config, 9);
    EXPECT_EQ(among(config, 17), want);
    if (config.mlp == "experts" && device_info().emulated) continue;  // it takes long
    EXPECT_EQ(among(config, 40), want);
  }
}

TEST_P(Decoders, ASessionGoesOnAfterItHasBeenSavedCopiedAndToldMore) {
  const ModelConfig config = config_of("gated_deltanet2", {"recurrent", "window", "attention"});
  LanguageModel<float> model = model_of(config, device());
  const TempFolder folder;
  const std::string path = folder.path("session.safetensors");
  const auto tokens_of = [](Session& session, int count) {
    std::vector<int32_t> ids;
    ids.reserve(static_cast<size_t>(count));
    for (int i = 0; i < count; ++i) ids.push_back(session.next(kDrawn));
    return ids;
  };
  Session session(model, *tokenizer_, 3);
  session.prefill(some_ids(8, 1));
  tokens_of(session, 3);
  session.save(path);
  Session copy = session, loaded(model, *tokenizer_, 9);
  tokens_of(loaded, 2);  // it has a decoder of its own when the file comes
  loaded.load(path);
  const std::vector<int32_t> more = some_ids(4, 2);
  for (Session* one : {&session, &copy, &loaded}) one->prefill(more);
  const std::vector<int32_t> want = tokens_of(session, 5);
  EXPECT_EQ(tokens_of(copy, 5), want);
  EXPECT_EQ(tokens_of(loaded, 5), want);
}

// Slots that nothing was put into go on too, over more than one page of a cache.
TEST_P(Decoders, UnusedSlotsChangeNothing) {
  if (GetParam() == "cuda" && device_info().emulated) GTEST_SKIP() << "too many tokens for the emulation";
  LanguageModel<float> model = model_of(config_of("gated_deltanet2", {"recurrent", "window", "attention"}), device());
  Session session(model, *tokenizer_, 3);
  session.prefill(some_ids(8, 1));
  SessionBatch batch(model, *tokenizer_, 3);
  batch.put(1, session);
  for (int64_t i = 0; i < 2 * kCacheRows + 9; ++i)
    ASSERT_EQ(batch.next(kDrawn, false)[1].id, session.next(kDrawn)) << "token " << i;
}

TEST_P(Decoders, ABatchHasAtLeastOneSlot) {
  LanguageModel<float> model = model_of(config_of("gated_deltanet2", {"recurrent"}), device());
  EXPECT_NE(error_of([&] { SessionBatch(model, *tokenizer_, 0); }).find("at least 1"), std::string::npos);
}

// With a ring that is folded after every token the bits are those without one; with a longer one ids are the same and
// logits are near. A prompt comes in the middle of the ring, and the state goes to a file there.
TEST_P(Decoders, ARingIsTheStatesThatItSpares) {
  for (const OneModel& one : decoder_models()) {
    if (one.name == "experts" || one.name == "hybrid") continue;  // their other layers have no ring
    SCOPED_TRACE(one.name);
    LanguageModel<float> model = model_of(one.config, device());
    const TempFolder folder;
    struct Text {
      std::vector<int32_t> ids;
      std::vector<float> logits;  // of all tokens
      std::vector<float> state;   // of the first layer with one
    };
    const auto text_of = [&](std::optional<int64_t> ring) {
      model.set_decode_ring(ring);
      ModelState<float> state(one.config, 1, device());
      std::vector<float> last(260);
      const Mat<float> logits(last.data(), 1, 260);
      const std::vector<int32_t> prompt = some_ids(11, 3), more = some_ids(5, 4);
      model.forward_last(prompt, SeqLayout({0, 11}), state, logits);
      const auto decoder = model.decoder(state);
      decoder->begin(0, last, prompt);
      Text text;
      for (int64_t i = 0; i < 13; ++i) {
        if (i == 6) {
          model.forward_last(more, SeqLayout({0, 5}), state, logits);
          decoder->begin(0, last, more);
        }
        const double uniform = 0;
        decoder->sample(256, {0.0, 0, 1.0}, {&uniform, 1}, false);
        decoder->step();
        text.ids.push_back(decoder->wait()[0].id);
        decoder->read_logits(0, last);
        text.logits.insert(text.logits.end(), last.begin(), last.end());
      }
      const std::string path = folder.path("state");
      state.save(path, one.config.rule, model.hash());
      ModelState<float> loaded(one.config, 1, device());
      loaded.load(path, one.config.rule, model.hash());
      EXPECT_EQ(loaded.positions(), std::vector<int64_t>{29});
      for (int64_t layer = 0; layer < state.layers() && text.state.empty(); ++layer) {
        text.state = state.values(layer, "s");
        EXPECT_EQ(loaded.values(layer, "s"), text.state);
      }
      return text;
    };
    const Text steps = text_of(0), folded = text_of(1);
    EXPECT_EQ(folded.ids, steps.ids);
    EXPECT_EQ(folded.logits, steps.logits);
    EXPECT_EQ(folded.state, steps.state);
    // Of models, as model_test has it for bf16 activations, and ring_test of the recurrence for float32.
    const double bound = device().kind() == FW_DEVICE_CUDA ? 3e-2 : 1e-4;
    for (const int64_t ring : {4, 16}) {
      const Text got = text_of(ring);
      const auto near = [&](std::span<const float> x, std::span<const float> y, const char* what) {
        expect_near({x.begin(), x.end()}, {y.begin(), y.end()}, bound, what);
      };
      // Up to a token where two are as likely: then each goes its own way.
      const size_t same =
          static_cast<size_t>(std::mismatch(got.ids.begin(), got.ids.end(), steps.ids.begin()).first - got.ids.begin());
      ASSERT_GT(same, 0U);
      near(std::span(got.logits).first(same * 260), std::span(steps.logits).first(same * 260), "logits");
      if (same == steps.ids.size()) {
        near(got.state, steps.state, "states");
      } else {
        const auto before = std::span(steps.logits).subspan((same - 1) * 260, 260);
        const double largest = *std::ranges::max_element(before, {}, [](float x) { return std::abs(x); });
        EXPECT_NEAR(before[static_cast<size_t>(got.ids[same])], before[static_cast<size_t>(steps.ids[same])],
                    bound * std::abs(largest))
            << "token " << same;
      }
    }
  }
}

// What says which rules have a ring agrees with the library, which also has room for one of each size of head.
TEST_P(Decoders, RulesHaveTheRingThatTheLibraryHas) {
  const int32_t position = 0;
  const fw_device kind = device().kind();
  for (const Preset& p : presets()) {
    for (const int64_t dim : {8, 64, 128, 256}) {
      RecurrenceShape shape{p.rule, 2, 2, dim, dim};
      shape.v_first = kind == FW_DEVICE_CUDA;
      shape.ring = {kRingTokens, &position};
      const bool found = error_of([&] { require_ring<float>(shape, 9, device()); }).empty();
      EXPECT_EQ(found, has_ring(p.rule, kind)) << p.name << ' ' << dim;
    }
  }
}

TEST_P(Decoders, HaveTheRingThatIsAskedFor) {
  ModelConfig config = config_of("gated_deltanet", {"recurrent", "attention"});
  LanguageModel<float> model(config, device());
  const auto tokens_of = [&](int64_t sequences) {
    ModelState<float> states(config, sequences, device());
    const auto decoder = model.decoder(states);
    return states.rings() == nullptr ? 0 : states.rings()->tokens();
  };
  EXPECT_EQ(tokens_of(9), 0);
  model.set_decode_ring(3);
  EXPECT_EQ(tokens_of(1), 3);
  model.set_decode_ring(0);
  EXPECT_EQ(tokens_of(9), 0);
}

// With drafts of which some are right, logits and states are those of single tokens: with their bits on the CPU, where
// few rows of a product do not depend on each other. On a GPU gates of several tokens are made by another kernel. Past
// the ring's end, over a page of the cache, with a prompt in between.
TEST_P(Decoders, DraftsHaveTheLogitsAndStatesOfSingleTokens) {
  const bool exact = device().kind() == FW_DEVICE_CPU;
  const auto compare = [&](const std::vector<float>& got, const std::vector<float>& want, double bound,
                           const std::string& what) {
    if (exact) {
      EXPECT_EQ(got, want) << what;
    } else {
      expect_near({got.begin(), got.end()}, {want.begin(), want.end()}, bound, what);
    }
  };
  std::vector<OneModel> list = decoder_models();
  list[3] = {"ssd", config_of("gated_deltanet2", {"ssd", "recurrent"})};
  list.push_back({"rotated", config_of("kda", {"attention", "window"})});
  for (const OneModel& one : list) {
    SCOPED_TRACE(one.name);
    LanguageModel<float> model = model_of(one.config, device());
    for (const int64_t drafts : {3, 7}) {
      SCOPED_TRACE(drafts);
      ModelState<float> single_state(one.config, 1, device()), state(one.config, 1, device());
      std::vector<float> want(260), got(260);
      const Mat<float> logits(want.data(), 1, 260);
      const std::vector<int32_t> prompt = some_ids(one.name == "hybrid" ? kCacheRows - 8 : 11, 3);
      const SeqLayout first({0, static_cast<int64_t>(prompt.size())});
      model.forward_last(prompt, first, single_state, logits);
      model.forward_last(prompt, first, state, logits);
      const auto single = model.decoder(single_state);
      const auto drafted = model.draft_decoder(state, drafts);
      single->begin(0, want, prompt);
      drafted->begin(0, want, prompt);
      Random numbers(7), ahead(7), choices(9);
      int32_t next = drafted->draw(0, 256, kDrawn, ahead.uniform(), false).id;
      for (int pass = 0; pass < 7; ++pass) {
        if (pass == 4) {
          const std::vector<int32_t> more = some_ids(5, 4);
          model.forward_last(more, SeqLayout({0, 5}), single_state, logits);
          model.forward_last(more, SeqLayout({0, 5}), state, logits);
          single->begin(0, want, more);
          drafted->begin(0, want, more);
          numbers = ahead = Random(8);
          next = drafted->draw(0, 256, kDrawn, ahead.uniform(), false).id;
        }
        const size_t tokens = pass == 2 ? 1 : static_cast<size_t>(drafts) + 1;
        // Single tokens tell what to draft. They go as far as the drafts are right.
        std::vector<int32_t> ids;
        const size_t right = 1 + choices.below(tokens);
        std::vector<double> uniform;
        for (size_t t = 0; t < right; ++t) {
          const double number = numbers.uniform();
          single->sample(256, kDrawn, {&number, 1}, false);
          single->step();
          ids.push_back(single->wait()[0].id);
          uniform.push_back(ahead.uniform());
        }
        single->read_logits(0, want);
        while (ids.size() < tokens) ids.push_back((ids.back() + 1) % 256);
        uniform.resize(tokens, 0.5);
        const std::span<const Drawn> drawn =
            drafted->read(static_cast<int64_t>(tokens), ids, 256, kDrawn, uniform, false);
        if (exact) {
          ASSERT_EQ(ids[0], next) << "pass " << pass;
          for (size_t t = 0; t + 1 < right; ++t) ASSERT_EQ(drawn[t].id, ids[t + 1]) << "pass " << pass << " row " << t;
        }
        next = drawn[right - 1].id;
        drafted->keep(0, static_cast<int64_t>(right));
        drafted->read_logits(0, static_cast<int64_t>(right) - 1, got);
        compare(got, want, 3e-2, "logits of pass " + std::to_string(pass));
      }
      EXPECT_EQ(state.positions(), single_state.positions());
      for (int64_t layer = 0; layer < state.layers(); ++layer) {
        for (const char* name : {"s", "a", "tail", "k", "v"}) {
          const std::vector<float> values = single_state.values(layer, name);
          if (!values.empty()) compare(state.values(layer, name), values, 3e-2, name + std::to_string(layer));
        }
      }
    }
  }
}

TEST_P(Decoders, RulesTakeTokensBackWhereTheLibraryDoes) {
  for (const Preset& p : presets()) {
    ModelConfig config = config_of(std::string(p.name), {"recurrent"});
    if (device().kind() == FW_DEVICE_CUDA && p.rule.uses_erase_write()) continue;
    LanguageModel<float> model(config, device());
    EXPECT_EQ(error_of([&] { model.require_drafts(4); }), "") << p.name;
  }
}

// Slots that begin at other times are at other places of their rings.
TEST_P(Decoders, SlotsOfARingHaveTheBitsOfEachAlone) {
  const ModelConfig config = config_of("gated_deltanet", {"recurrent", "ssd"});
  LanguageModel<float> model = model_of(config, device());
  model.set_decode_ring(4);
  std::vector<Session> sessions;
  for (size_t i = 0; i < 3; ++i) {
    sessions.emplace_back(model, *tokenizer_, i + 1);
    sessions[i].prefill(some_ids(3 + 4 * i, i));
  }
  SessionBatch batch(model, *tokenizer_, 2);
  std::vector<std::vector<int32_t>> got(3), want(3);
  size_t first = 0;
  batch.put(0, sessions[0]);
  batch.put(1, sessions[1]);
  for (int i = 0; i < 13; ++i) {
    if (i == 6) batch.put(0, sessions[first = 2]);  // in the middle of the ring of the text before
    const std::span<const Drawn> drawn = batch.next(kDrawn, false);
    got[first].push_back(drawn[0].id);
    got[1].push_back(drawn[1].id);
  }
  for (size_t i = 0; i < 3; ++i) {
    while (want[i].size() < got[i].size()) want[i].push_back(sessions[i].next(kDrawn));
    EXPECT_EQ(got[i], want[i]) << "text " << i;
  }
}

}  // namespace
}  // namespace fw::testing
