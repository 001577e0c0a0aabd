// Attention against a loop over tokens in double: values and gradients, windows, grouped heads, packed sequences,
// tokens of earlier passes in rings and caches; decoding, bits of threads and of packing.
#include <fmt/ranges.h>

#include <numeric>

#include "op_check.h"
#include "ops/ops.h"

namespace fw::testing {
namespace {

struct Problem {
  std::vector<int64_t> lengths;
  std::vector<int64_t> past;  // of each sequence; empty: none
  int64_t heads = 2, kv_heads = 2, dim = 8, window = 0;
  double deviation = 1;

  SeqLayout layout() const {
    std::vector<int64_t> offsets = {0};
    for (const int64_t n : lengths) offsets.push_back(offsets.back() + n);
    return SeqLayout(offsets);
  }
  int64_t before(size_t n) const { return past.empty() ? 0 : past[n]; }
  AttentionShape shape() const { return {heads, kv_heads, dim, window, 1 / std::sqrt(static_cast<double>(dim))}; }
  std::string name() const {
    return fmt::format("lengths {} past {} heads {}/{} dim {} window {}", fmt::join(lengths, ","), fmt::join(past, ","),
                       heads, kv_heads, dim, window);
  }
};

// All tokens of a sequence, those of earlier passes first; q and gradients exist for all of them too.
struct Tensors {
  std::vector<double> q, k, v, d_o;
};

std::vector<Tensors> tensors_of(const Problem& p, uint64_t seed = 3) {
  Random random(seed);
  std::vector<Tensors> list;
  for (size_t n = 0; n < p.lengths.size(); ++n) {
    const int64_t tokens = p.before(n) + p.lengths[n];
    list.push_back({random_values(random, tokens * p.heads * p.dim, p.deviation),
                    random_values(random, tokens * p.kv_heads * p.dim, p.deviation),
                    random_values(random, tokens * p.kv_heads * p.dim),
                    random_values(random, tokens * p.heads * p.dim)});
  }
  return list;
}

struct Attended {
  std::vector<double> o, lse, dq, dk, dv;  // of the tokens of the pass, packed
};

Attended expected(const Problem& p, const std::vector<Tensors>& all) {
  Attended result;
  const int64_t D = p.dim, group = p.heads / p.kv_heads;
  const double scale = p.shape().scale;
  for (size_t n = 0; n < all.size(); ++n) {
    const Tensors& x = all[n];
    const int64_t past = p.before(n), end = past + p.lengths[n];
    std::vector<double> o(static_cast<size_t>(end * p.heads * D)), lse(static_cast<size_t>(end * p.heads)),
        dq(o.size()), dk(x.k.size()), dv(x.v.size());
    for (int64_t t = past; t < end; ++t) {
      for (int64_t h = 0; h < p.heads; ++h) {
        const int64_t g = h / group, first = p.window > 0 ? std::max<int64_t>(t - p.window + 1, 0) : 0;
        const double *q = &x.q[(t * p.heads + h) * D], *grad = &x.d_o[(t * p.heads + h) * D];
        double* out = &o[(t * p.heads + h) * D];
        std::vector<double> probs;
        double largest = -1e300, sum = 0, mean = 0;
        for (int64_t s = first; s <= t; ++s) {
          double dot = 0;
          for (int64_t c = 0; c < D; ++c) dot += q[c] * x.k[(s * p.kv_heads + g) * D + c];
          probs.push_back(scale * dot);
          largest = std::max(largest, probs.back());
        }
        for (double& e : probs) sum += e = std::exp(e - largest);
        lse[t * p.heads + h] = largest + std::log(sum);
        for (int64_t s = first; s <= t; ++s) {
          const double prob = probs[s - first] /= sum;
          for (int64_t c = 0; c < D; ++c) out[c] += prob * x.v[(s * p.kv_heads + g) * D + c];
        }
        for (int64_t c = 0; c < D; ++c) mean += out[c] * grad[c];
        for (int64_t s = first; s <= t; ++s) {
          const double* v = &x.v[(s * p.kv_heads + g) * D];
          double dp = 0;
          for (int64_t c = 0; c < D; ++c) dp += grad[c] * v[c];
          const double ds = scale * probs[s - first] * (dp - mean);
          for (int64_t c = 0; c < D; ++c) {
            dq[(t * p.heads + h) * D + c] += ds * x.k[(s * p.kv_heads + g) * D + c];
            dk[(s * p.kv_heads + g) * D + c] += ds * q[c];
            dv[(s * p.kv_heads + g) * D + c] += probs[s - first] * grad[c];
          }
        }
      }
    }
    const auto append = [&](std::vector<double>& to, const std::vector<double>& from, int64_t row) {
      to.insert(to.end(), from.begin() + past * row, from.end());
    };
    append(result.o, o, p.heads * D);
    append(result.lse, lse, p.heads);
    append(result.dq, dq, p.heads * D);
    append(result.dk, dk, p.kv_heads * D);
    append(result.dv, dv, p.kv_heads * D);
  }
  return result;
}

// Earlier tokens as a state keeps them: a ring of `window` rows, or pages of 5.
template <class T>
struct Past {
  Past(const Problem& p, const std::vector<Tensors>& all, std::vector<double> Tensors::*which) {
    const int64_t width = p.kv_heads * p.dim, sequences = static_cast<int64_t>(all.size());
    int64_t most = 1;
    for (size_t n = 0; n < all.size(); ++n) {
      positions.push_back(p.before(n));
      most = std::max(most, p.before(n) + p.lengths[n]);
    }
    const int64_t rows = p.window > 0 ? p.window : 5, pages = p.window > 0 ? 1 : (most + rows - 1) / rows;
    memory.assign(static_cast<size_t>(sequences * pages * rows * width), std::numeric_limits<T>::quiet_NaN());
    for (int64_t i = 0; i < sequences * pages; ++i) table.push_back(memory.data() + i * rows * width);
    view = {p.window > 0 ? memory.data() : nullptr, p.window > 0 ? nullptr : table.data(), pages, rows, width};
    for (size_t n = 0; n < all.size(); ++n) {
      const auto& values = all[n].*which;
      for (int64_t t = 0; t < p.before(n); ++t)
        std::copy_n(values.begin() + t * width, width, view.row(static_cast<int64_t>(n), t));
    }
  }
  std::vector<int64_t> positions;
  std::vector<T> memory;
  std::vector<T*> table;
  Pages<T> view;
};

template <class T>
Strided<T> now(const Problem& p, const std::vector<Tensors>& all, std::vector<double> Tensors::*which, int64_t cols) {
  std::vector<T> values;
  for (size_t n = 0; n < all.size(); ++n)
    values.insert(values.end(), (all[n].*which).begin() + p.before(n) * cols, (all[n].*which).end());
  return Strided<T>(p.layout().tokens(), cols, values);
}

template <class T>
Values<T> run(const Problem& p, const std::vector<Tensors>& all) {
  const int64_t tokens = p.layout().tokens(), wide = p.heads * p.dim, narrow = p.kv_heads * p.dim;
  const Strided<T> q = now<T>(p, all, &Tensors::q, wide), k = now<T>(p, all, &Tensors::k, narrow),
                   v = now<T>(p, all, &Tensors::v, narrow), d_o = now<T>(p, all, &Tensors::d_o, wide);
  Past<T> past_k(p, all, &Tensors::k), past_v(p, all, &Tensors::v);
  const SeqLayout layout = p.layout();
  const PassLayout pass(layout, p.past.empty() ? nullptr : past_k.positions.data());
  const Pages<T> none, seen_k = p.past.empty() ? none : past_k.view, seen_v = p.past.empty() ? none : past_v.view;
  Strided<T> o(tokens, wide), lse(tokens, p.heads), dq(tokens, wide), dk(tokens, narrow), dv(tokens, narrow);
  host_ops<T>().attention_forward(host_exec<T>(), q.view(), k.view(), v.view(), p.shape(), pass, seen_k, seen_v,
                                  o.mat(), lse.mat());
  host_ops<T>().attention_backward(host_exec<T>(), d_o.view(), q.view(), k.view(), v.view(), p.shape(), pass, seen_k,
                                   seen_v, o.view(), lse.view(), dq.mat(), dk.mat(), dv.mat());
  return {o.values(), lse.values(), dq.values(), dk.values(), dv.values()};
}

void check(const Problem& p) {
  SCOPED_TRACE(p.name());
  const std::vector<Tensors> all = tensors_of(p);
  const Attended want = expected(p, all);
  const std::vector<const std::vector<double>*> wants = {&want.o, &want.lse, &want.dq, &want.dk, &want.dv};
  const char* names[] = {"o", "lse", "dq", "dk", "dv"};
  const Values<double> wide = run<double>(p, all);
  const Values<float> narrow = run<float>(p, all);
  for (size_t i = 0; i < wants.size(); ++i) {
    // Of a size of at least 1, which the terms have that cancel (with a window of 1 in every digit): inputs are N(0,
    // 1).
    expect_close(wide[i], *wants[i], 1e-10, std::string(names[i]) + " double", 1);
    expect_close(narrow[i], *wants[i], 2e-5, std::string(names[i]) + " float", 1);
  }
}

TEST(Attention, EqualsALoop) {
  for (const int64_t tokens : {0, 1, 4, 5, 63, 64, 65, 130}) {
    for (const int64_t window : {0, 1, 2, 64, 200}) check({{tokens}, {}, 2, 2, 8, window});
  }
}

TEST(Attention, SeveralTilesOfQueriesAndKeys) {
  for (const int64_t window : {0, 1, 100, 300, 511}) check({{700}, {}, 1, 1, 24, window});
}

TEST(Attention, GroupedHeads) {
  for (const int64_t kv_heads : {1, 2, 4}) {
    for (const int64_t window : {0, 9}) check({{3, 40, 140}, {}, 4, kv_heads, 16, window});
  }
}

TEST(Attention, PackedSequences) {
  for (const int64_t window : {0, 2, 70}) check({{0, 1, 130, 0, 64, 3, 65, 0}, {}, 2, 1, 5, window});
}

TEST(Attention, SeesTheTokensOfEarlierPasses) {
  for (const int64_t window : {0, 1, 2, 7, 90}) check({{1, 4, 30, 140, 0, 5}, {300, 6, 0, 17, 9, 1}, 4, 2, 8, window});
}

// Long sequences of few heads are cut into parts in backward.
TEST(Attention, PartsOfALongSequence) {
  check({{2500}, {}, 2, 1, 4, 0});
  check({{2500}, {30}, 1, 1, 4, 1500});
}

// Token by token over a ring of the window's rows, which each step fills: what a pass over all tokens computes. The
// ring begins with NaN, which nobody may read.
template <class T>
void check_steps(const Problem& p, double tolerance) {
  SCOPED_TRACE(p.name());
  const std::vector<Tensors> all = tensors_of(p);
  const std::vector<double> want = expected(p, all).o;
  const int64_t wide = p.heads * p.dim, narrow = p.kv_heads * p.dim;
  std::vector<T> ring_k(static_cast<size_t>(p.window * narrow), std::numeric_limits<T>::quiet_NaN()), ring_v = ring_k;
  const Pages<T> past_k{ring_k.data(), nullptr, 1, p.window, narrow},
      past_v{ring_v.data(), nullptr, 1, p.window, narrow};
  const SeqLayout one = SeqLayout::uniform(1, 1);
  std::vector<T> got;
  for (int64_t t = 0; t < p.lengths[0]; ++t) {
    const auto row = [t](const std::vector<double>& values, int64_t cols) {
      return Strided<T>(1, cols, std::vector<T>(values.begin() + t * cols, values.begin() + (t + 1) * cols));
    };
    Strided<T> q = row(all[0].q, wide), k = row(all[0].k, narrow), v = row(all[0].v, narrow), o(1, wide);
    host_ops<T>().attention_step(host_exec<T>(), q.mat(), k.mat(), v.view(), p.shape(), PassLayout(one, &t), past_k,
                                 past_v, o.mat());
    const std::vector<T> values = o.values();
    got.insert(got.end(), values.begin(), values.end());
  }
  expect_close(got, want, tolerance, "o", 1);
}

TEST(Attention, StepsOfATokenEachAreThePassOverAll) {
  for (const int64_t window : {1, 2, 7, 90}) {
    check_steps<double>({{100}, {}, 4, 2, 8, window}, 1e-10);
    check_steps<float>({{100}, {}, 4, 2, 8, window}, 2e-5);
  }
}

// Attention that turns its heads is rotary around attention, to the bit: of q and k on their own and side by side, of a
// part of the channels, after tokens of earlier passes.
TEST(Attention, TurnsItsHeads) {
  const Problem p{{3, 0, 40}, {7, 0, 2}, 4, 2, 8, 9};
  const int64_t tokens = 43, wide = p.heads * p.dim, narrow = p.kv_heads * p.dim, columns = wide + 2 * narrow;
  Random random(4);
  const std::vector<double> values = random_values(random, tokens * columns),
                            d_values = random_values(random, tokens * wide);
  const SeqLayout layout = p.layout();
  const PassLayout pass(layout, p.past.data());
  const auto part = [&](std::vector<double>& x, int64_t at, int64_t cols) {
    return Mat<double>(x.data() + at, tokens, cols, columns);
  };
  const auto& ops = host_ops<double>();
  for (const int64_t rotated : {8, 4}) {
    AttentionShape turned = p.shape();
    turned.theta = 100, turned.rotated = rotated;
    const auto turn = [&](Mat<double> x, Rotation way, const PassLayout& where) {
      ops.rotary(host_exec<double>(), x, p.dim, rotated, turned.theta, where, way);
    };
    std::vector<double> x = values, d_o = d_values, o(tokens * wide), lse(tokens * p.heads), want(x.size()),
                        side(x.size()), apart_q(tokens * wide), apart_k(tokens * narrow);
    const Mat<double> q = part(x, 0, wide), k = part(x, wide, narrow), v = part(x, wide + narrow, narrow),
                      out(o.data(), tokens, wide), sums(lse.data(), tokens, p.heads), slopes(d_o.data(), tokens, wide);
    turn(part(x, 0, wide + narrow), Rotation::kForward, pass);
    ops.attention_forward(host_exec<double>(), q, k, v, p.shape(), pass, {}, {}, out, sums);
    const auto backward = [&](const AttentionShape& shape, Mat<double> dq, Mat<double> dk, Mat<double> dv) {
      ops.attention_backward(host_exec<double>(), slopes, q, k, v, shape, pass, {}, {}, out, sums, dq, dk, dv);
    };
    backward(p.shape(), part(want, 0, wide), part(want, wide, narrow), part(want, wide + narrow, narrow));
    const std::vector<double> unrotated = want;
    turn(part(want, 0, wide + narrow), Rotation::kBackward, pass);
    ASSERT_NE(want, unrotated);
    backward(turned, part(side, 0, wide), part(side, wide, narrow), part(side, wide + narrow, narrow));
    EXPECT_EQ(side, want);
    backward(turned, {apart_q.data(), tokens, wide}, {apart_k.data(), tokens, narrow},
             part(side, wide + narrow, narrow));
    for (int64_t t = 0; t < tokens; ++t) {
      for (int64_t c = 0; c < wide; ++c) EXPECT_EQ(apart_q[t * wide + c], want[t * columns + c]);
      for (int64_t c = 0; c < narrow; ++c) EXPECT_EQ(apart_k[t * narrow + c], want[t * columns + wide + c]);
    }

    // A token of each of 43 sequences, in rings of their own.
    const SeqLayout ones = SeqLayout::uniform(tokens, 1);
    std::vector<int64_t> before(tokens);
    std::iota(before.begin(), before.end(), 0);
    const PassLayout step(ones, before.data());
    const auto decoded = [&](bool inside) {
      std::vector<double> token = values, rings[2];
      for (auto& ring : rings) ring = random_values(random = Random(6), tokens * p.window * narrow);
      std::vector<double> result(tokens * wide);
      if (!inside) turn(part(token, 0, wide + narrow), Rotation::kForward, step);
      ops.attention_step(host_exec<double>(), part(token, 0, wide), part(token, wide, narrow),
                         part(token, wide + narrow, narrow), inside ? turned : p.shape(), step,
                         {rings[0].data(), nullptr, 1, p.window, narrow},
                         {rings[1].data(), nullptr, 1, p.window, narrow}, {result.data(), tokens, wide});
      for (const auto& ring : rings) result.insert(result.end(), ring.begin(), ring.end());
      return result;
    };
    EXPECT_EQ(decoded(true), decoded(false));
  }
}

TEST(Attention, AGatedStepIsTheStepTimesItsSigmoid) {
  const int64_t tokens = 5, H = 2, D = 4, wide = H * D;
  const AttentionShape shape{H, 1, D, 3, 0.5};
  const SeqLayout ones = SeqLayout::uniform(tokens, 1);
  const std::vector<int64_t> before = {0, 1, 2, 3, 9};
  const PassLayout step(ones, before.data());
  Random random(8);
  const std::vector<double> q = random_values(random, tokens * wide), k = random_values(random, tokens * D),
                            v = random_values(random, tokens * D), gate = random_values(random, tokens * wide),
                            ring = random_values(random, tokens * 3 * D);
  const auto stepped = [&](bool gated) {
    std::vector<double> queries = q, keys = k, gates = gate, past_k = ring, past_v = ring, o(tokens * wide);
    const Exec<double>& exec = host_exec<double>();
    const Mat<double> q_rows(queries.data(), tokens, wide), k_rows(keys.data(), tokens, D),
        gate_rows(gates.data(), tokens, wide), o_rows(o.data(), tokens, wide);
    const Mat<const double> v_rows(v.data(), tokens, D);
    const Pages<double> k_pages{past_k.data(), nullptr, 1, 3, D}, v_pages{past_v.data(), nullptr, 1, 3, D};
    if (gated) {
      exec.gated_attention_step(q_rows, k_rows, v_rows, gate_rows, shape, step, k_pages, v_pages, o_rows);
    } else {
      exec.attention_step(q_rows, k_rows, v_rows, shape, step, k_pages, v_pages, o_rows);
    }
    return o;
  };
  const std::vector<double> got = stepped(true), alone = stepped(false);
  for (size_t i = 0; i < got.size(); ++i) EXPECT_NEAR(got[i], alone[i] / (1 + std::exp(-gate[i])), 1e-12) << i;
}

TEST(Attention, LargeScoresDoNotOverflow) {
  Problem p{{150}, {}, 2, 2, 8, 0};
  p.deviation = 30;
  const std::vector<Tensors> all = tensors_of(p);
  const Attended want = expected(p, all);
  expect_close(run<double>(p, all)[0], want.o, 1e-10, "o");
  for (const std::vector<float>& values : run<float>(p, all)) {
    EXPECT_TRUE(std::all_of(values.begin(), values.end(), [](float x) { return std::isfinite(x); }));
  }
}

TEST(Attention, NaNStaysNaN) {
  const Problem p{{40}, {}, 1, 1, 8, 0};
  std::vector<Tensors> all = tensors_of(p);
  all[0].q[20 * 8 + 3] = std::numeric_limits<double>::quiet_NaN();
  const std::vector<float> o = run<float>(p, all)[0];
  for (int64_t t = 0; t < 40; ++t) EXPECT_EQ(std::isnan(o[static_cast<size_t>(t * 8)]), t == 20) << t;
}

TEST(Attention, BitsDoNotDependOnThreadsOrNeighbours) {
  const Problem packed{{40, 300, 1, 2100}, {}, 4, 2, 16, 0};
  const std::vector<Tensors> all = tensors_of(packed);
  Values<float> one, two;
  {
    const Threads limit(1);
    one = run<float>(packed, all);
  }
  {
    const Threads limit(2);
    two = run<float>(packed, all);
  }
  EXPECT_TRUE(same_bits(one, two));
  Values<float> joined(5);
  for (size_t n = 0; n < packed.lengths.size(); ++n) {
    Problem alone = packed;
    alone.lengths = {packed.lengths[n]};
    const Values<float> values = run<float>(alone, {all[n]});
    for (size_t i = 0; i < values.size(); ++i) joined[i].insert(joined[i].end(), values[i].begin(), values[i].end());
  }
  EXPECT_TRUE(same_bits(one, joined));
}

// A token at a time from what store_rows keeps is what one pass gives.
TEST(Attention, DecodeEqualsPrefill) {
  for (const int64_t window : {0, 1, 12}) {
    const Problem whole{{90}, {}, 4, 2, 8, window};
    const std::vector<Tensors> all = tensors_of(whole);
    const std::vector<double> want = expected(whole, all).o;
    Problem empty = whole;
    empty.lengths = {0};
    Past<double> keys(whole, all, &Tensors::k), values(whole, all, &Tensors::v);
    std::vector<double> got;
    int64_t position = 0;
    for (const int64_t n : {30, 1, 1, 5, 1, 1, 1, 20, 30}) {
      const auto part = [&](const std::vector<double>& x, int64_t width) {
        return Mat<const double>(x.data() + position * width, n, width);
      };
      const SeqLayout layout({0, n});
      const PassLayout pass(layout, &position);
      std::vector<double> o(static_cast<size_t>(n * 32)), lse(static_cast<size_t>(n * 4));
      host_ops<double>().attention_forward(host_exec<double>(), part(all[0].q, 32), part(all[0].k, 16),
                                           part(all[0].v, 16), whole.shape(), pass, keys.view, values.view,
                                           {o.data(), n, 32}, {lse.data(), n, 4});
      host_ops<double>().store_rows(host_exec<double>(), part(all[0].k, 16), pass, keys.view);
      host_ops<double>().store_rows(host_exec<double>(), part(all[0].v, 16), pass, values.view);
      got.insert(got.end(), o.begin(), o.end());
      position += n;
    }
    expect_close(got, want, 1e-12, fmt::format("window {}", window));
  }
}

// The rotation of a part of the channels leaves the others, and is that of a head of that width.
TEST(Rotary, OfAPartOfTheChannels) {
  Random random(5);
  const std::vector<double> x = random_values(random, 6 * 16);
  const SeqLayout layout({0, 4, 6});
  const std::vector<int64_t> before = {3, 0};
  std::vector<double> part = x, small;
  host_ops<double>().rotary(host_exec<double>(), {part.data(), 6, 16}, 8, 4, 100.0, PassLayout(layout, before.data()),
                            Rotation::kForward);
  for (int64_t i = 0; i < 12; ++i) small.insert(small.end(), x.begin() + i * 8, x.begin() + i * 8 + 4);
  host_ops<double>().rotary(host_exec<double>(), {small.data(), 6, 8}, 4, 4, 100.0, PassLayout(layout, before.data()),
                            Rotation::kForward);
  for (int64_t i = 0; i < 12; ++i) {
    for (int64_t c = 0; c < 8; ++c)
      EXPECT_EQ(part[i * 8 + c], c < 4 ? small[i * 4 + c] : x[i * 8 + c]) << i << " " << c;
  }
  EXPECT_NE(part, x);
  host_ops<double>().rotary(host_exec<double>(), {part.data(), 6, 16}, 8, 4, 100.0, PassLayout(layout, before.data()),
                            Rotation::kBackward);
  expect_close(part, x, 1e-14, "back");
}

}  // namespace
}  // namespace fw::testing
