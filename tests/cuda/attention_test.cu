// Attention on the device against loops in double over the same bf16 values: a program of its own that prints a line
// per case and fails with 1. An argument: only cases whose name has it. In the emulation small cases only.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <string>
#include <vector>

#include "device_buffer.h"
#include "ops/cuda/attention.h"
#include "test_numbers.h"

namespace fw::cuda {
namespace {

using testing::from_bf16;
using testing::Random;
using testing::to_bf16;
constexpr uint16_t kNan16 = 0x7fc0;

#ifdef FW_CUDA_EMULATION
constexpr int kBlocks = 3;
#else
constexpr int kBlocks = 132;
#endif

struct Case {
  std::string name;
  int heads, kv_heads, dim, window;
  std::vector<int> queries;
  std::vector<int> history = {};  // keys before the first query, by sequence
  bool damaged = false;           // every second sequence has no numbers
  int padding = 0;                // elements between rows
  double spread = 1;              // of the queries
  double theta = 0;               // q and k have been turned, of which the kernels know nothing but in what they leave
};

struct Problem {
  const Case& c;
  std::vector<int64_t> past_lengths() const {
    return c.history.empty() ? std::vector<int64_t>(1) : std::vector<int64_t>(c.history.begin(), c.history.end());
  }
  std::vector<AttentionSequence> sequences;
  int query_rows = 0, key_rows = 0, group, q_row, kv_row;
  std::vector<uint16_t> q, k, v, d_o;

  explicit Problem(const Case& one)
      : c(one),
        group(one.heads / one.kv_heads),
        q_row(one.heads * one.dim + one.padding),
        kv_row(one.kv_heads * one.dim + one.padding) {
    for (size_t n = 0; n < c.queries.size(); ++n) {
      const int before = n < c.history.size() ? c.history[n] : 0;
      sequences.push_back({query_rows, c.queries[n], key_rows, c.queries[n] + before});
      query_rows += c.queries[n];
      key_rows += c.queries[n] + before;
    }
    Random random{7};
    const auto fill = [&](std::vector<uint16_t>& x, int rows, int row, double spread) {
      x.resize(static_cast<size_t>(rows) * row);
      for (uint16_t& value : x) value = to_bf16(random(spread));
    };
    fill(q, query_rows, q_row, 2 * c.spread);
    fill(k, key_rows, kv_row, 2);
    fill(v, key_rows, kv_row, 1);
    fill(d_o, query_rows, q_row, 1);
    for (size_t n = 1; c.damaged && n < sequences.size(); n += 2) {
      const AttentionSequence& s = sequences[n];
      for (auto* x : {&q, &d_o})
        std::fill_n(x->begin() + static_cast<long>(s.query) * q_row, static_cast<long>(s.queries) * q_row, kNan16);
      for (auto* x : {&k, &v})
        std::fill_n(x->begin() + static_cast<long>(s.key) * kv_row, static_cast<long>(s.keys) * kv_row, kNan16);
    }
  }
};

// (x, y) of the halves of a head at a position back by its angle.
void rotate_back(const Case& c, int64_t position, double* head) {
  for (int i = 0; c.theta > 0 && i < c.dim / 2; ++i) {
    const double angle = static_cast<double>(position) * std::pow(c.theta, -2.0 * i / c.dim), x = head[i],
                 y = head[i + c.dim / 2];
    head[i] = x * std::cos(angle) + y * std::sin(angle);
    head[i + c.dim / 2] = y * std::cos(angle) - x * std::sin(angle);
  }
}

struct Results {
  std::vector<uint16_t> o, dq, dk, dv;
  std::vector<float> lse;
  bool operator==(const Results& other) const {
    return o == other.o && dq == other.dq && dk == other.dk && dv == other.dv && lse == other.lse;
  }
};

Results run(const Problem& p, int blocks = kBlocks) {
  const Case& c = p.c;
  DeviceBuffer<uint16_t> q(p.q), k(p.k), v(p.v), d_o(p.d_o), o(p.q.size()), dq(p.q.size()), dk(p.k.size()),
      dv(p.v.size());
  DeviceBuffer<float> lse(static_cast<size_t>(c.heads) * p.query_rows),
      delta(static_cast<size_t>(c.heads) * p.query_rows);
  DeviceBuffer<AttentionTile> query_tiles(attention_tiles(p.sequences, false, c.window)),
      key_tiles(attention_tiles(p.sequences, true, c.window));
  AttentionArgs args;
  const auto of_queries = [&](DeviceBuffer<uint16_t>& x) { return TokenArg{x.data(), 0, p.q_row, c.dim, 1, 1}; };
  const auto of_keys = [&](DeviceBuffer<uint16_t>& x) { return TokenArg{x.data(), 0, p.kv_row, c.dim, 1, 1}; };
  args.q = of_queries(q), args.o = of_queries(o), args.d_o = of_queries(d_o), args.dq = of_queries(dq);
  args.k = of_keys(k), args.v = of_keys(v), args.dk = of_keys(dk), args.dv = of_keys(dv);
  args.lse = lse.data(), args.delta = delta.data();
  args.heads = c.heads, args.kv_heads = c.kv_heads, args.dim = c.dim, args.window = c.window;
  args.query_rows = p.query_rows, args.key_rows = p.key_rows;
  args.scale = 1 / std::sqrt(static_cast<float>(c.dim));
  args.sm_count = blocks;
  DeviceBuffer<int64_t> positions(p.past_lengths());
  args.theta = c.theta;
  if (!c.history.empty()) args.positions = positions.data();
  args.tiles = query_tiles.data(),
  args.tile_count = static_cast<int>(attention_tiles(p.sequences, false, c.window).size());
  attention_forward(args, nullptr);
  attention_backward_queries(args, nullptr);
  args.tiles = key_tiles.data(),
  args.tile_count = static_cast<int>(attention_tiles(p.sequences, true, c.window).size());
  attention_backward_keys(args, nullptr);
  return {o.download(), dq.download(), dk.download(), dv.download(), lse.download()};
}

struct Expected {
  std::vector<double> o, dq, dk, dv, lse, largest;  // largest: of a row's scores, in powers of two as lse is
};

Expected reference(const Problem& p) {
  const Case& c = p.c;
  Expected e;
  e.o.resize(p.q.size()), e.dq.resize(p.q.size()), e.dk.resize(p.k.size()), e.dv.resize(p.v.size());
  e.lse.resize(static_cast<size_t>(c.heads) * p.query_rows), e.largest.resize(e.lse.size());
  const double scale = 1 / std::sqrt(static_cast<float>(c.dim));
  for (size_t n = 0; n < p.sequences.size(); ++n) {
    if (c.damaged && n % 2 == 1) continue;
    const AttentionSequence& s = p.sequences[n];
    for (int h = 0; h < c.heads; ++h) {
      for (int i = 0; i < s.queries; ++i) {
        const int position = i + s.keys - s.queries, from = c.window == 0 ? 0 : std::max(0, position - c.window + 1);
        const size_t row = static_cast<size_t>(s.query + i) * p.q_row + h * c.dim;
        const auto key_row = [&](int j) { return static_cast<size_t>(s.key + j) * p.kv_row + h / p.group * c.dim; };
        std::vector<double> score(static_cast<size_t>(position - from + 1));
        double top = -INFINITY, sum = 0;
        for (int j = from; j <= position; ++j) {
          double dot = 0;
          for (int d = 0; d < c.dim; ++d) dot += from_bf16(p.q[row + d]) * from_bf16(p.k[key_row(j) + d]);
          top = std::max(top, score[j - from] = dot * scale);
        }
        double& largest = e.largest[static_cast<size_t>(h) * p.query_rows + s.query + i];
        for (const double x : score) largest = std::max(largest, std::abs(x) * 1.4426950408889634);
        for (double& x : score) sum += x = std::exp(x - top);
        e.lse[static_cast<size_t>(h) * p.query_rows + s.query + i] = (top + std::log(sum)) * 1.4426950408889634;
        double delta = 0;
        std::vector<double> dp(score.size());
        for (int j = from; j <= position; ++j) {
          score[j - from] /= sum;
          for (int d = 0; d < c.dim; ++d) {
            e.o[row + d] += score[j - from] * from_bf16(p.v[key_row(j) + d]);
            dp[j - from] += from_bf16(p.d_o[row + d]) * from_bf16(p.v[key_row(j) + d]);
          }
          delta += score[j - from] * dp[j - from];
        }
        for (int j = from; j <= position; ++j) {
          const double ds = score[j - from] * (dp[j - from] - delta) * scale;
          for (int d = 0; d < c.dim; ++d) {
            e.dq[row + d] += ds * from_bf16(p.k[key_row(j) + d]);
            e.dk[key_row(j) + d] += ds * from_bf16(p.q[row + d]);
            e.dv[key_row(j) + d] += score[j - from] * from_bf16(p.d_o[row + d]);
          }
        }
      }
    }
    const int64_t before = s.keys - s.queries;
    for (int h = 0; h < c.heads; ++h) {
      for (int i = 0; i < s.queries; ++i)
        rotate_back(c, before + i, e.dq.data() + static_cast<size_t>(s.query + i) * p.q_row + h * c.dim);
    }
    for (int h = 0; h < c.kv_heads; ++h) {
      for (int j = 0; j < s.keys; ++j)
        rotate_back(c, j, e.dk.data() + static_cast<size_t>(s.key + j) * p.kv_row + h * c.dim);
    }
  }
  return e;
}

int failures = 0;

void fail(const char* what) {
  std::printf("  %s FAILED", what);
  ++failures;
}

// Relative L2 error over the rows of good sequences; what lies between rows must be untouched.
void compare(const char* what, const Problem& p, bool of_queries, const std::vector<uint16_t>& got,
             const std::vector<double>& want, double limit) {
  const int row = of_queries ? p.q_row : p.kv_row, width = row - p.c.padding;
  double error = 0, norm = 0;
  bool touched = false, missing = false;
  for (size_t n = 0; n < p.sequences.size(); ++n) {
    const AttentionSequence& s = p.sequences[n];
    const int first = of_queries ? s.query : s.key, rows = of_queries ? s.queries : s.keys;
    for (int t = first; t < first + rows; ++t) {
      for (int i = 0; i < row; ++i) {
        const size_t at = static_cast<size_t>(t) * row + i;
        if (i >= width) {
          touched = touched || got[at] != 0xffff;
        } else if (!(p.c.damaged && n % 2 == 1)) {
          const double x = from_bf16(got[at]);
          missing = missing || !std::isfinite(x);
          error += (x - want[at]) * (x - want[at]);
          norm += want[at] * want[at];
        }
      }
    }
  }
  const double relative = norm > 0 ? std::sqrt(error / norm) : std::sqrt(error);
  std::printf(" %s %.1e", what, relative);
  if (missing || !(relative <= limit)) fail(what);
  if (touched) fail("outside");
}

// A sequence alone has the bits that it has among others.
void alone(const Case& c, const Problem& p, const Results& all, size_t n) {
  Case one = c;
  one.queries = {c.queries[n]};
  one.history = {p.sequences[n].keys - p.sequences[n].queries};
  one.damaged = false;
  Problem single(one);
  const AttentionSequence& s = p.sequences[n];
  const auto part = [](const std::vector<uint16_t>& x, int first, int rows, int row) {
    return std::vector<uint16_t>(x.begin() + static_cast<long>(first) * row,
                                 x.begin() + static_cast<long>(first + rows) * row);
  };
  single.q = part(p.q, s.query, s.queries, p.q_row), single.d_o = part(p.d_o, s.query, s.queries, p.q_row);
  single.k = part(p.k, s.key, s.keys, p.kv_row), single.v = part(p.v, s.key, s.keys, p.kv_row);
  const Results r = run(single);
  if (r.o != part(all.o, s.query, s.queries, p.q_row) || r.dq != part(all.dq, s.query, s.queries, p.q_row) ||
      r.dk != part(all.dk, s.key, s.keys, p.kv_row) || r.dv != part(all.dv, s.key, s.keys, p.kv_row)) {
    fail("bits alone");
  }
}

void check_case(const Case& c) {
  std::printf("%s:", c.name.c_str());
  const Problem p(c);
  const Results got = run(p);
  const Expected want = reference(p);
  compare("o", p, true, got.o, want.o, 6e-3);
  compare("dq", p, true, got.dq, want.dq, 1e-2);
  compare("dk", p, false, got.dk, want.dk, 1e-2);
  compare("dv", p, false, got.dv, want.dv, 1e-2);
  double worst = 0;
  for (size_t n = 0; n < p.sequences.size(); ++n) {
    if (c.damaged && n % 2 == 1) continue;
    for (int h = 0; h < c.heads; ++h) {
      for (int i = 0; i < p.sequences[n].queries; ++i) {
        const size_t at = static_cast<size_t>(h) * p.query_rows + p.sequences[n].query + i;
        // A score is rounded with every 16 channels and by its scale, the sum of the weights with every key.
        const double bound = 1e-5 + want.largest[at] * 0x1p-23 * (c.dim / 16 + 2);
        const double difference = std::abs(got.lse[at] - want.lse[at]) / bound;
        worst = std::isfinite(difference) ? std::max(worst, difference) : INFINITY;
      }
    }
  }
  std::printf(" lse %.2f of the bound", worst);
  if (!(worst <= 1)) fail("lse");
  if (!c.damaged && !(run(p) == got)) fail("bits again");
  if (!c.damaged && !(run(p, 2) == got)) fail("bits of other blocks");
  if (p.sequences.size() > 1) alone(c, p, got, 2 % p.sequences.size());
  std::printf("\n");
}

std::vector<Case> cases() {
  std::vector<Case> list = {
      {"one token", 1, 1, 64, 0, {1}},
      {"64 tokens", 2, 2, 64, 0, {64}},
      {"65 tokens, dim 128", 1, 1, 128, 0, {65}},
      {"200 tokens, dim 128", 1, 1, 128, 0, {200}},
      {"window 1", 1, 1, 64, 1, {130}},
      {"window 2", 1, 1, 64, 2, {63}},
      {"window 100", 1, 1, 64, 100, {300}},
      {"window past the end", 1, 1, 64, 1000, {130}},
      {"window 64, dim 128", 1, 1, 128, 64, {256}},
      {"groups of three", 6, 2, 64, 0, {130}},
      {"groups, window, dim 128", 4, 1, 128, 70, {150}},
      {"dim 96", 2, 1, 96, 0, {100}},
      {"dim 48, rows apart", 2, 2, 48, 40, {129}, {}, false, 8},
      {"dim 256", 1, 1, 256, 0, {200}},
      {"dim 200, rows apart", 2, 1, 200, 0, {100}, {}, false, 8},
      {"packed, dim 256, window", 2, 1, 256, 70, {65, 3, 130}},
      {"packed, neighbours without numbers, dim 256", 2, 2, 256, 0, {130, 40, 65}, {}, true},
      {"history, dim 256", 2, 1, 256, 0, {70, 1}, {100, 64}},
      {"one token, dim 136", 2, 1, 136, 0, {1}},
      {"window 1, dim 256", 1, 1, 256, 1, {65}},
      {"packed, dim 192, groups of three, window", 6, 2, 192, 40, {63, 0, 64, 65}},
      {"packed, dim 136, rows apart", 2, 2, 136, 0, {65, 63, 0, 129}, {}, false, 8},
      {"packed, dim 248, history, window, neighbours without numbers",
       2,
       1,
       248,
       90,
       {65, 1, 64},
       {63, 200, 130},
       true},
      {"large scores, dim 256", 1, 1, 256, 0, {130}, {}, false, 0, 40},
      {"packed", 2, 1, 64, 0, {5, 130, 63, 0, 64, 1}},
      {"packed, window", 2, 2, 64, 33, {100, 7, 190}},
      {"packed, neighbours without numbers", 2, 1, 64, 50, {70, 100, 129, 3, 64}, {}, true},
      {"packed, neighbours without numbers, dim 128", 2, 1, 128, 0, {130, 40, 65}, {}, true},
      {"history", 2, 1, 64, 0, {70, 1, 30}, {100, 64, 0}},
      {"history, window", 2, 1, 64, 90, {70, 1, 140}, {100, 200, 5}},
      {"large scores", 1, 1, 64, 0, {150}, {}, false, 0, 40},
      {"turned", 2, 1, 64, 0, {70, 1, 130}, {}, false, 0, 1, 10000},
      {"turned, dim 128, rows apart", 2, 2, 128, 50, {65, 200}, {}, false, 8, 1, 500},
      {"turned, history", 2, 1, 64, 90, {70, 1, 140}, {100, 200, 5}, false, 0, 1, 10000},
  };
#ifndef FW_CUDA_EMULATION
  list.push_back({"2048 tokens, 8 heads of 128", 8, 8, 128, 0, {2048}});
  list.push_back({"2048 tokens, 8 heads of 256", 8, 2, 256, 0, {2048}});
  list.push_back({"window 2048 of 4096 tokens, groups of four", 8, 2, 128, 2048, {4096}});
  list.push_back({"window 512 of 3000 tokens, packed", 4, 2, 64, 512, {1000, 3000, 17, 2049}});
#endif
  return list;
}

}  // namespace
}  // namespace fw::cuda

int main(int argc, char** argv) {
  using namespace fw::cuda;
  if (current_arch() == Arch::kNone) return kNotRun;
  const std::string only = argc > 1 ? argv[1] : "";
  for (const Case& c : cases()) {
    if (c.name.find(only) != std::string::npos) check_case(c);
  }
  std::printf("%d failures\n", failures);
  return failures == 0 ? 0 : 1;
}
