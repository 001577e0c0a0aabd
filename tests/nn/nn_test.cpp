// Parameters, initialisation, the mixer's plan, and a block around a mixer of another kind.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "base/error.h"
#include "nn/activations.h"
#include "nn/block.h"
#include "nn/init.h"
#include "nn/params.h"
#include "nn/recurrent_mixer.h"

namespace fw::testing {
namespace {

ParamSpec spec_of(const std::string& name, std::vector<int64_t> shape) {
  return {name, std::move(shape), constant_init(2.0), true};
}

TEST(Params, LieInOrderOfDeclaration) {
  Params<float> params;
  const int a = params.declare(spec_of("a", {2, 3}));
  ParamSpec second = spec_of("b", {4, 3});
  second.continues = true;
  const int b = params.declare(std::move(second)), d = params.declare(spec_of("d", {5}));
  EXPECT_THROW(params.declare(spec_of("a", {1})), Error);
  params.allocate();
  EXPECT_THROW(params.declare(spec_of("c", {1})), Error);
  EXPECT_EQ(params.size(), 23);
  EXPECT_EQ(params.value(b), params.value(a) + 6);  // one matrix of 6 rows
  EXPECT_EQ(params.matrix(a, 6, 3).data, params.value(a));
  EXPECT_THROW(params.matrix(a, 7, 3), Error);  // d does not continue it
  EXPECT_EQ(params.value(d), params.value(a) + 32);
  for (int i : {a, d}) EXPECT_EQ(reinterpret_cast<uintptr_t>(params.value(i)) % 64, 0U);
  EXPECT_TRUE(std::all_of(params.values().begin(), params.values().end(), [](float x) { return x == 0.0F; }));
  Random random(1);
  params.init(random);
  for (size_t i = 0; i < params.values().size(); ++i)
    EXPECT_EQ(params.values()[i], i < 18 || i >= 32 ? 2.0F : 0.0F) << i;
}

TEST(Params, GradientsComeWithTheFirstZeroing) {
  Params<double> params;
  params.declare(spec_of("a", {5}));
  params.allocate();
  EXPECT_FALSE(params.has_grads());
  params.zero_grads();
  ASSERT_TRUE(params.has_grads());
  params.grads()[3] = 1;
  params.zero_grads();
  EXPECT_EQ(params.grads()[3], 0.0);
}

// The copy for products is made once an update: asked for again only after something that may have changed the values.
TEST(Params, TheRoundedCopyIsAskedForOnceAChange) {
  Params<float> params;
  const int a = params.declare(spec_of("a", {2, 3}));
  params.declare(spec_of("b", {40}));
  params.allocate();
  const Params<float>& unchanged = params;
  EXPECT_EQ(unchanged.weight(a, 2, 3).rounded.data, nullptr);
  Bf16* copy = params.old_rounded();
  ASSERT_NE(copy, nullptr);
  EXPECT_EQ(unchanged.weight(a, 2, 3).rounded.data, copy + (unchanged.value(a) - unchanged.values().data()));
  EXPECT_EQ(params.old_rounded(), nullptr);

  const auto expect_old = [&] {
    EXPECT_EQ(unchanged.weight(a, 2, 3).rounded.data, nullptr);
    EXPECT_EQ(params.old_rounded(), copy);
    EXPECT_EQ(params.old_rounded(), nullptr);
  };
  params.values()[0] = 1;
  expect_old();
  params.write_values(params.specs()[1], std::vector<float>(40, 3.0F));
  expect_old();
  Random random(1);
  params.init(random);
  expect_old();
}

// Split in two: host and operations find what whole ones have, and a matrix of products no numbers.
TEST(Params, SplitValuesAreTheSameNumbers) {
  const auto make = [](MasterFormat master_format) {
    Params<float> params;
    ParamSpec matrix = {"w", {3, 7}, normal_init(1.0), true}, more = {"x", {2, 7}, normal_init(1.0), true, true},
              table = {"t", {4, 2}, normal_init(1.0), true};
    table.fp32_param = true;
    params.declare(std::move(matrix));
    params.declare(std::move(more));
    params.declare({"bias", {5}, normal_init(1.0), false});
    params.declare({"bias2", {5}, normal_init(1.0), false, true});
    params.declare(std::move(table));
    params.allocate(host_device(), master_format);
    Random random(5);
    params.init(random);
    return params;
  };
  Params<float> split = make(MasterFormat::kBf16PlusLow), whole = make(MasterFormat::kFp32);
  const auto expect_same = [&] {
    for (const ParamSpec& spec : whole.specs()) {
      const HostView<float> a = split.host_values(spec), b = whole.host_values(spec);
      EXPECT_TRUE(std::equal(a.span().begin(), a.span().end(), b.span().begin(), b.span().end())) << spec.name;
    }
    for (const char* name : {"bias", "t"}) {
      const int i = whole.find(name);
      // of bias into the one that continues it
      EXPECT_TRUE(std::equal(whole.value(i), whole.value(i) + 8, split.value(i))) << name;
    }
  };
  expect_same();
  for (size_t i = 0; i < 5; ++i) {
    std::vector<float> values(static_cast<size_t>(whole.specs()[i].size()), 0.1F + static_cast<float>(i));
    values[0] = -1.00390625F;  // half way between two bf16 numbers
    whole.write_values(whole.specs()[i], values);
    split.write_values(split.specs()[i], values);
  }
  expect_same();
  const Weight<float> weight = split.weight(0, 5, 7);
  EXPECT_EQ(weight.values.data, nullptr);
  EXPECT_EQ(weight.rounded.data[0].bits, 0xbf81);  // away from zero
  EXPECT_EQ(split.old_rounded(), nullptr);
  EXPECT_THROW(split.value(0), Error);
  EXPECT_THROW(split.values(), Error);
  EXPECT_THROW(split.rows(0), Error);
  EXPECT_THROW(Params<double>().allocate(host_device(), MasterFormat::kBf16PlusLow), Error);
  const std::vector<ParamPiece> pieces(split.pieces().data, split.pieces().data + split.pieces().count);
  ASSERT_EQ(pieces.size(), 5U);
  EXPECT_EQ(pieces[0].numbers, -1);
  EXPECT_EQ(pieces[2].numbers, 0);
  EXPECT_EQ(pieces[3].numbers, 5);
  EXPECT_EQ(pieces[4].numbers, 16);
}

struct Range {
  double low, high, mean;
};

Range range_of(const Initialiser& init) {
  std::vector<double> values(20000);
  Random random(7);
  init(values, random);
  double sum = 0;
  for (double x : values) sum += x;
  return {*std::min_element(values.begin(), values.end()), *std::max_element(values.begin(), values.end()),
          sum / static_cast<double>(values.size())};
}

TEST(Init, FollowsTheTable) {
  const double bound = std::exp2(-2.5) * std::sqrt(6.0 / (64 + 192));
  const Range xavier = range_of(projection_init(InitScheme::kXavier, 64, 192));
  EXPECT_LE(xavier.high, bound);
  EXPECT_GE(xavier.high, 0.99 * bound);
  EXPECT_GE(xavier.low, -bound);
  EXPECT_LE(xavier.low, -0.99 * bound);

  const Range normal = range_of(projection_init(InitScheme::kNormal, 64, 192));
  EXPECT_GT(normal.high, 3 * 0.02);
  EXPECT_LT(normal.high, 6 * 0.02);

  const Range a = range_of(decay_a_init(0.0));
  EXPECT_GE(a.low, std::log(1e-4));
  EXPECT_LE(a.high, std::log(16.0));
  EXPECT_GE(a.high, std::log(15.9));
  EXPECT_GE(range_of(decay_a_init(1.0)).low, 0.0);

  const auto softplus = [](double x) { return std::log1p(std::exp(x)); };
  const Range delta = range_of(decay_delta_init());
  EXPECT_NEAR(softplus(delta.low), 1e-3, 1e-5);
  EXPECT_NEAR(softplus(delta.high), 0.1, 1e-3);
}

RecurrentMixerSpec mixer_spec(const std::string& rule) {
  RecurrentMixerSpec spec;
  spec.rule = parse_rule(rule);
  spec.hidden = 24;
  spec.heads = 2;
  spec.v_heads = 4;
  spec.key_dim = 8;
  spec.value_dim = 6;
  spec.conv_size = 4;
  return spec;
}

std::set<std::string> parameter_names(const RecurrentMixerSpec& spec) {
  std::set<std::string> names;
  for (const ParamSpec& p : mixer_parameters(spec, "")) names.insert(p.name);
  return names;
}

TEST(Mixer, ProjectionsFollowFromTheRule) {
  const std::set<std::string> common = {"q_proj.weight",   "k_proj.weight",   "v_proj.weight",
                                        "g_proj.weight",   "o_proj.weight",   "q_conv1d.weight",
                                        "k_conv1d.weight", "v_conv1d.weight", "o_norm.weight"};
  const auto with = [&](std::set<std::string> more) {
    more.insert(common.begin(), common.end());
    return more;
  };
  EXPECT_EQ(parameter_names(mixer_spec("linear_attention")), common);
  EXPECT_EQ(parameter_names(mixer_spec("retnet")), common);
  EXPECT_EQ(parameter_names(mixer_spec("mamba2")), with({"a_proj.weight", "A_log", "dt_bias"}));
  EXPECT_EQ(parameter_names(mixer_spec("gla")), with({"f_proj.weight", "A_log", "dt_bias"}));
  EXPECT_EQ(parameter_names(mixer_spec("deltanet")), with({"b_proj.weight"}));
  EXPECT_EQ(parameter_names(mixer_spec("kaczmarz")), with({"b_proj.weight", "a_proj.weight", "A_log", "dt_bias"}));
  EXPECT_EQ(parameter_names(mixer_spec("gated_deltanet2")),
            with({"b_proj.weight", "w_proj.weight", "f_proj.weight", "A_log", "dt_bias"}));
  EXPECT_EQ(parameter_names(mixer_spec("qdelta")),
            with({"b_proj.weight", "a_proj.weight", "A_log", "dt_bias", "l_proj.weight", "l_bias"}));
  EXPECT_EQ(parameter_names(mixer_spec("deltanet erase=channel")), with({"b_proj.weight", "beta_proj.weight"}));
  EXPECT_EQ(
      parameter_names(mixer_spec("deltanet precond=diagonal")),
      with({"b_proj.weight", "a_atk_proj.weight", "b_atk_proj.weight", "A_log_atk", "dt_bias_atk", "log_atk_scale"}));
}

TEST(Mixer, StackIsOneMatrix) {
  RecurrentMixerSpec spec = mixer_spec("gated_deltanet2 gain=gate feedback=learned precond=diagonal");
  spec.gate_rank = 5;
  spec.decay_rank = 3;
  Params<float> params;
  const RecurrentMixer<float> mixer(spec, "attn.", params);
  const Projections projections(spec);
  int64_t rows = 0;
  for (const ParamSpec& p : params.specs()) {
    if (rows == projections.columns) break;
    ASSERT_EQ(p.shape.size(), 2U) << p.name;
    EXPECT_EQ(p.shape[1], spec.hidden) << p.name;
    EXPECT_EQ(p.offset, rows * spec.hidden) << p.name;
    rows += p.shape[0];
  }
  EXPECT_EQ(rows, projections.columns);
  EXPECT_EQ(projections.q.begin, 0);
  EXPECT_EQ(projections.k.begin, projections.q.size);
  EXPECT_EQ(projections.v.begin, 2 * projections.q.size);
}

TEST(Mixer, NoDecayOfVectors) {
  for (const ParamSpec& p : mixer_parameters(mixer_spec("gated_deltanet2 precond=diagonal feedback=learned"), "")) {
    EXPECT_EQ(p.weight_decay, p.shape.size() >= 2)
        << p.name;  // a convolution [D, 1, W] too, as other programs train it
  }
}

// y = 3 x: the smallest mixer. A block asks no more of one than this.
template <class T>
class Triple final : public Mixer<T> {
 public:
  MixerContext* forward(const Pass<T>&, Mat<const T> x, LayerState<T>, Mat<T> y) const override {
    for (int64_t t = 0; t < x.rows; ++t)
      std::transform(x.row(t), x.row(t) + x.cols, y.row(t), [](T v) { return 3 * v; });
    return nullptr;
  }
  void backward(const Pass<T>& pass, MixerContext*, Mat<const T>, Mat<const T> dy, Mat<T> dx) const override {
    forward(pass, dy, {}, dx);
  }
};

TEST(Block, TakesAnyMixer) {
  Params<double> params;
  const Block<double> block("b.", {6, 10, InitScheme::kXavier}, {NormKind::kRms, 6, 1e-5}, NormPosition::kBefore, 0,
                            params, [](const std::string& prefix) {
                              EXPECT_EQ(prefix, "b.attn.");
                              return std::make_unique<Triple<double>>();
                            });
  params.allocate();
  Random random(3);
  params.init(random);
  for (double& x : params.values()) x += 0.3 * random.normal();
  params.zero_grads();

  const SeqLayout layout({0, 4});
  Arena arena;
  std::vector<double> input(4 * 6), weight(4 * 6);
  for (double& x : input) x = random.normal();
  for (double& x : weight) x = random.normal();
  const auto run = [&](bool keep, Block<double>::Context& context, const Pass<double>& pass) {
    Residual<double> r;
    r.x = new_matrix<double>(arena, 4, 6);
    if (!keep) r.delta = new_matrix<double>(arena, 4, 6);
    for (int64_t t = 0; t < 4; ++t) std::copy_n(input.data() + t * 6, 6, r.x.row(t));
    block.forward(pass, r, {}, &context);
    double sum = 0;
    for (int64_t t = 0; t < 4; ++t) {
      for (int64_t i = 0; i < 6; ++i)
        sum += weight[static_cast<size_t>(t * 6 + i)] * (r.x.row(t)[i] + r.delta.row(t)[i]);
    }
    return sum;
  };
  Arena contexts;
  const Exec<double> exec{host_ops<double>(), host_device(), arena, contexts};
  Recurrences<double> recurrences(host_device());
  const auto evaluate = [&] {
    arena.release();
    Block<double>::Context unused;
    return run(false, unused, Pass<double>{params, layout, exec, recurrences, false});
  };
  Block<double>::Context context;
  const Pass<double> pass{params, layout, exec, recurrences, true};
  const double kept = run(true, context, pass);
  const Mat<double> dx = new_matrix<double>(arena, 4, 6);
  for (int64_t t = 0; t < 4; ++t) std::copy_n(weight.data() + t * 6, 6, dx.row(t));
  block.backward(pass, context, dx);
  std::vector<double> dinput;
  for (int64_t t = 0; t < 4; ++t) dinput.insert(dinput.end(), dx.row(t), dx.row(t) + 6);
  EXPECT_NEAR(evaluate(), kept, 1e-12);

  const auto slope = [&](double& x) {
    const double h = 1e-5, saved = x;
    x = saved + h;
    const double above = evaluate();
    x = saved - h;
    const double below = evaluate();
    x = saved;
    return (above - below) / (2 * h);
  };
  for (size_t i = 0; i < input.size(); ++i) EXPECT_NEAR(dinput[i], slope(input[i]), 1e-7) << "input " << i;
  for (size_t i = 0; i < params.values().size(); i += 7)
    EXPECT_NEAR(params.grads()[i], slope(params.values()[i]), 1e-7) << "parameter " << i;
}

}  // namespace
}  // namespace fw::testing
