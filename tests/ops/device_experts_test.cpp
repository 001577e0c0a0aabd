// The operations of experts on every device against the host in double, and a second time with the same bits.
#include <fmt/format.h>

#include <numeric>

#include "ops/device_list.h"

namespace fw::testing {
namespace {

class DeviceExperts : public OnDevice {};
INSTANTIATE_TEST_SUITE_P(Devices, DeviceExperts, ::testing::ValuesIn(cases()),
                         [](const auto& one) { return one.param.name; });

template <class T, class Body>
std::vector<Result> results_of(Device& device, const Body& body) {
  Run<T, T> run(device);
  body(run);
  return run.results;
}

// compare(), and the same bits again. roundings: of bf16, from the input to a result.
template <class Body>
void compare_twice(const Case& one, const Body& body, int roundings = 1) {
  compare(one, body, roundings * kTolerance<Bf16>);
  const auto again = [&]<class T>() {
    const std::vector<Result> first = results_of<T>(*one.device, body), second = results_of<T>(*one.device, body);
    for (size_t i = 0; i < first.size(); ++i) EXPECT_EQ(first[i].values, second[i].values) << first[i].name;
  };
  if (one.type == Type::kFloat) again.template operator()<float>();
  if (one.type == Type::kBf16) again.template operator()<Bf16>();
}

// Rows in a device's memory.
struct DeviceRows {
  Buffer<int32_t> offsets, source, row_of, expert;
  ExpertRows rows;
  DeviceRows(Device& device, int64_t experts, int64_t chosen, int64_t count)
      : offsets(device, experts + 1), source(device, count), row_of(device, count), expert(device, count) {
    rows = {experts, chosen, offsets.data(), source.data(), row_of.data(), expert.data()};
  }
  // So many rows of each expert, in the order of the choices.
  DeviceRows(Device& device, const std::vector<int32_t>& counts, int64_t chosen)
      : DeviceRows(device, static_cast<int64_t>(counts.size()), chosen,
                   std::accumulate(counts.begin(), counts.end(), int64_t{0})) {
    std::vector<int32_t> ends{0}, of;
    for (size_t e = 0; e < counts.size(); ++e) {
      ends.push_back(ends.back() + counts[e]);
      of.insert(of.end(), static_cast<size_t>(counts[e]), static_cast<int32_t>(e));
    }
    std::vector<int32_t> same(of.size());
    std::iota(same.begin(), same.end(), 0);
    offsets.write(0, ends);
    expert.write(0, of);
    source.write(0, same);
    row_of.write(0, same);
  }
};

template <class R, class N>
void keep_whole(R& run, const std::string& name, const Buffer<N>& numbers) {
  std::vector<double> values;
  for (const N x : numbers.to_vector()) values.push_back(static_cast<double>(x));
  run.results.push_back({name, values, true});
}
template <class R>
void keep_rows(R& run, const DeviceRows& rows) {
  keep_whole(run, "offsets", rows.offsets);
  keep_whole(run, "source", rows.source);
  keep_whole(run, "row_of", rows.row_of);
  keep_whole(run, "expert", rows.expert);
}

// One block's tokens and more, choices of one tile and of several, experts of less and more than a warp.
TEST_P(DeviceExperts, Route) {
  struct Shape {
    int64_t tokens, experts, chosen, groups, best, pad;
  };
  for (const Shape& s : {Shape{0, 4, 2, 1, 1, 0},
                         {1, 1, 1, 1, 1, 0},
                         {1, 70, 10, 1, 1, 2},
                         {7, 12, 3, 4, 2, 4},
                         {40, 5, 5, 1, 1, 1},
                         {65, 5, 5, 1, 1, 3},
                         {130, 40, 8, 8, 3, 0},
                         {70, 600, 2, 1, 1, 0}}) {
    for (const RouterScore score : {RouterScore::kSoftmax, RouterScore::kSigmoid}) {
      const bool is_sigmoid = score == RouterScore::kSigmoid, with_bias = is_sigmoid || s.groups > 1;
      SCOPED_TRACE(fmt::format("{} tokens, {} of {} experts, {}", s.tokens, s.chosen, s.experts,
                               is_sigmoid ? "sigmoid" : "softmax"));
      const RouterShape shape{score, s.experts, s.chosen, s.groups, s.best, s.tokens % 2 == 1, 1.7};
      compare_twice(GetParam(), [&](auto& run) {
        using W = typename std::decay_t<decltype(run)>::W;
        auto logits = run.matrix(s.tokens, s.experts, s.pad), scores = run.out(s.tokens, s.experts, s.pad),
             weights = run.out(s.tokens * s.chosen, 1, 0);
        Buffer<W> bias = run.parameters(s.experts, -0.4, 0.4);
        DeviceRows rows(run.on.device, s.experts, s.chosen, s.tokens * s.chosen);
        Buffer<int64_t> load(run.on.device, s.experts);
        load.write(0, std::vector<int64_t>(static_cast<size_t>(s.experts), 3));
        run.on.exec.route_forward(shape, logits.mat(), with_bias ? bias.data() : nullptr, scores.mat(), rows.rows,
                                  weights.mat(), load.data());
        run.keep("scores", scores);
        run.keep("weights", weights);
        keep_rows(run, rows);
        keep_whole(run, "load", load);
        run.on.exec.route_forward(shape, logits.mat(), nullptr, logits.mat(), rows.rows, weights.mat(), nullptr);
        run.keep("scores in the logits' row_of", logits);
        keep_rows(run, rows);

        auto given = run.matrix(s.tokens, s.experts, s.pad, 0.1, 0.9), dweights = run.matrix(s.tokens * s.chosen, 1, 0),
             of = run.matrix(s.tokens * s.chosen, 1, 0, 0.1, 0.9), dlogits = run.out(s.tokens, s.experts, s.pad);
        for (const double balance : {0.0, 0.25}) {
          run.on.exec.route_backward(shape, dweights.mat(), given.mat(), rows.rows, of.mat(), static_cast<W>(balance),
                                     dlogits.mat());
          run.keep("dlogits", dlogits);
        }
      });
    }
  }
}

// Equal scores and scores that are no numbers: the smallest experts, and every row has a row_of.
TEST_P(DeviceExperts, TiesAndNaN) {
  for (const double x : {0.0, std::nan("")}) {
    for (const int64_t tokens : {int64_t{3}, int64_t{66}}) {
      with_type([&](auto&& on) {
        using T = typename std::decay_t<decltype(on)>::Activation;
        Matrix<T> logits(on.device, tokens, 6, 2, std::vector<double>(static_cast<size_t>(tokens * 6), x)),
            weights(on.device, tokens * 2, 1, 0);
        DeviceRows rows(on.device, 6, 2, tokens * 2);
        on.exec.route_forward(RouterShape{RouterScore::kSigmoid, 6, 2}, logits.mat(), nullptr, logits.mat(), rows.rows,
                              weights.mat(), nullptr);
        const auto n = static_cast<int32_t>(tokens);
        EXPECT_EQ(rows.offsets.to_vector(), (std::vector<int32_t>{0, n, 2 * n, 2 * n, 2 * n, 2 * n, 2 * n}));
        const std::vector<int32_t> source = rows.source.to_vector(), row_of = rows.row_of.to_vector();
        for (int32_t t = 0; t < n; ++t) {
          for (int32_t j = 0; j < 2; ++j) {
            EXPECT_EQ(row_of[static_cast<size_t>(2 * t + j)], j * n + t);
            EXPECT_EQ(source[static_cast<size_t>(j * n + t)], 2 * t + j);
          }
        }
      });
    }
  }
}

// Experts without rows, with one and with all; few rows, tiles of 32, 64 and 128 rows, and widths that tensor cores do
// not take.
TEST_P(DeviceExperts, Linear) {
  struct Shape {
    std::vector<int32_t> counts;
    int64_t chosen, in, out, pad;
  };
  for (const Shape& s : {Shape{{0, 0}, 1, 8, 8, 0},
                         {{1}, 1, 24, 17, 0},
                         {{0, 0, 9, 0}, 3, 264, 40, 8},
                         {{3, 0, 9, 8, 1}, 3, 5, 7, 3},
                         {{0, 2, 0}, 2, 2056, 16, 0},
                         {{0, 1, 65, 0, 64}, 1, 40, 136, 8},
                         {{65}, 1, 72, 24, 0},
                         {{300}, 1, 24, 136, 8},
                         {{0, 70, 0}, 1, 5, 7, 3}}) {
    SCOPED_TRACE(fmt::format("{} experts, {} rows, {} to {}", s.counts.size(),
                             std::accumulate(s.counts.begin(), s.counts.end(), 0), s.in, s.out));
    compare_twice(GetParam(), [&](auto& run) {
      using W = typename std::decay_t<decltype(run)>::W;
      const DeviceRows rows(run.on.device, s.counts, s.chosen);
      const int64_t R = rows.source.size(), E = rows.rows.experts;
      Buffer<W> values = run.parameters(E * s.out * s.in), dweight = run.parameters(E * s.out * s.in);
      Buffer<Bf16> rounded(run.on.device, values.size());
      run.on.exec.round_values(values.data(), values.size(), rounded.data());
      const Weight<W> weight({values.data(), E * s.out, s.in}, {rounded.data(), E * s.out, s.in});
      auto x = run.matrix(R, s.in, s.pad), dy = run.matrix(R, s.out, s.pad), y = run.out(R, s.out, s.pad),
           dx = run.out(R, s.in, s.pad);
      run.on.exec.expert_linear_forward(x.mat(), rows.rows, weight, y.mat());
      run.keep("y", y);
      run.on.exec.expert_linear_backward(dy.mat(), x.mat(), rows.rows, weight, dx.mat(),
                                         Mat<W>(dweight.data(), E * s.out, s.in));
      run.keep("dx", dx);
      run.keep_wide("dweight", dweight);
      run.on.exec.expert_linear_backward(dy.mat(), x.mat(), rows.rows, weight, dx.mat(), Mat<W>());
      run.keep("dx alone", dx);
    });
  }
}

// A row has the same bits with and without others of its expert, as long as there are few tokens.
TEST_P(DeviceExperts, ARowHasItsBitsAlone) {
  if (GetParam().device->kind() == FW_DEVICE_CPU) GTEST_SKIP() << "products of a library";
  with_type([&](auto&& on) {
    using T = typename std::decay_t<decltype(on)>::Activation;
    using W = Wide<T>;
    const int64_t in = 520, out = 24, chosen = 2;
    const Buffer<W> values = on.template buffer<W>(on.random(2 * out * in));
    Buffer<Bf16> rounded(on.device, values.size());
    on.exec.round_values(values.data(), values.size(), rounded.data());
    const Weight<W> weight({values.data(), 2 * out, in}, {rounded.data(), 2 * out, in});
    const std::vector<double> x = on.random(24 * in);
    const auto rows_of = [&](const std::vector<int32_t>& counts, int64_t first) {
      const DeviceRows rows(on.device, counts, chosen);
      const int64_t count = rows.source.size();
      Matrix<T> from(on.device, count, in, 0,
                     std::vector<double>(x.begin() + first * in, x.begin() + (first + count) * in)),
          y(on.device, count, out, 0);
      on.exec.expert_linear_forward(from.mat(), rows.rows, weight, y.mat());
      return y.values();
    };
    const std::vector<double> all = rows_of({5, 19}, 0);
    for (const int64_t row : {4, 5, 13, 23}) {
      const std::vector<double> alone = rows_of(row < 5 ? std::vector<int32_t>{1, 0} : std::vector<int32_t>{0, 1}, row);
      EXPECT_TRUE(std::equal(alone.begin(), alone.end(), all.begin() + row * out)) << row;
    }
  });
}

// What a layer calls, in its order: a decoded token's kernels, and those of more.
TEST_P(DeviceExperts, FromRouterToSum) {
  const int64_t experts = 5, chosen = 2, cols = 40;
  for (const int64_t tokens : {20, 65}) {
    compare_twice(
        GetParam(),
        [&](auto& run) {
          using W = typename std::decay_t<decltype(run)>::W;
          const int64_t R = tokens * chosen;
          Buffer<W> values = run.parameters(experts * cols * cols), dweight = run.parameters(values.size());
          Buffer<Bf16> rounded(run.on.device, values.size());
          run.on.exec.round_values(values.data(), values.size(), rounded.data());
          const Weight<W> weight({values.data(), experts * cols, cols}, {rounded.data(), experts * cols, cols});
          auto logits = run.matrix(tokens, experts, 3), weights = run.out(R, 1, 0), x = run.matrix(tokens, cols, 0),
               sorted = run.out(R, cols, 0), product = run.out(R, cols, 0), dx = run.out(R, cols, 0),
               y = run.out(tokens, cols, 0);
          DeviceRows rows(run.on.device, experts, chosen, R);
          const RouterShape shape{RouterScore::kSigmoid, experts, chosen};
          run.on.exec.route_forward(shape, logits.mat(), nullptr, logits.mat(), rows.rows, weights.mat(), nullptr);
          run.on.exec.gather_expert_rows(x.mat(), rows.rows, sorted.mat());
          run.on.exec.expert_linear_forward(sorted.mat(), rows.rows, weight, product.mat());
          run.on.exec.scale_rows_forward(product.mat(), weights.mat(), product.mat());
          run.on.exec.sum_expert_rows(product.mat(), rows.rows, y.mat(), Write::kOverwrite);
          run.on.exec.gather_expert_rows(x.mat(), rows.rows, product.mat());
          run.on.exec.expert_linear_backward(product.mat(), sorted.mat(), rows.rows, weight, dx.mat(),
                                             Mat<W>(dweight.data(), experts * cols, cols));
          keep_rows(run, rows);
          run.keep("y", y);
          run.keep("dx", dx);
          run.keep_wide("dweight", dweight);
        },
        4);  // weights, product, scaled, sum
  }
}

TEST_P(DeviceExperts, RowsThereAndBack) {
  struct Shape {
    int64_t tokens, experts, chosen, cols, pad;
  };
  for (const Shape& s : {Shape{1, 9, 5, 24, 8}, {65, 5, 2, 520, 0}, {3, 4, 1, 5, 1}}) {
    SCOPED_TRACE(fmt::format("{} tokens, {} of {} experts, {} columns", s.tokens, s.chosen, s.experts, s.cols));
    compare_twice(GetParam(), [&](auto& run) {
      const int64_t R = s.tokens * s.chosen;
      auto logits = run.matrix(s.tokens, s.experts, 0), weights = run.out(R, 1, 0);
      DeviceRows rows(run.on.device, s.experts, s.chosen, R);
      run.on.exec.route_forward(RouterShape{RouterScore::kSoftmax, s.experts, s.chosen}, logits.mat(), nullptr,
                                logits.mat(), rows.rows, weights.mat(), nullptr);
      auto x = run.matrix(s.tokens, s.cols, s.pad), sorted = run.out(R, s.cols, s.pad),
           from = run.matrix(R, s.cols, s.pad), sum = run.out(s.tokens, s.cols, s.pad);
      run.on.exec.gather_expert_rows(x.mat(), rows.rows, sorted.mat());
      run.keep("sorted", sorted);
      run.on.exec.sum_expert_rows(from.mat(), rows.rows, sum.mat(), Write::kOverwrite);
      run.keep("sum", sum);
      run.on.exec.sum_expert_rows(from.mat(), rows.rows, x.mat(), Write::kAccumulate);
      run.keep("added", x);

      auto s_of = run.matrix(R, 1, 0), dy = run.matrix(R, s.cols, s.pad), dx = run.out(R, s.cols, s.pad),
           ds = run.out(R, 1, 0);
      run.on.exec.scale_rows_forward(from.mat(), s_of.mat(), dx.mat());
      run.keep("scaled", dx);
      run.on.exec.scale_rows_backward(dy.mat(), from.mat(), s_of.mat(), dx.mat(), ds.mat());
      run.keep("dx", dx);
      run.keep("ds", ds);
      run.on.exec.scale_rows_backward(dy.mat(), from.mat(), s_of.mat(), dy.mat(), ds.mat());
      run.keep("dx in row_of", dy);
      run.on.exec.scale_rows_forward(from.mat(), s_of.mat(), from.mat());
      run.keep("scaled in row_of", from);
    });
  }
}

}  // namespace
}  // namespace fw::testing
