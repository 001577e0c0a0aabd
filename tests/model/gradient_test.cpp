// Whole-model gradients in double against central differences: every parameter of one small model per preset, and of
// models with the options that change what is computed.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <vector>

#include "model/small_model.h"
#include "support/finite_difference.h"

namespace fw::testing {
namespace {

struct Case {
  std::string name;
  ModelConfig config;
  std::vector<int64_t> offsets = {0, 9, 9, 10, 24};  // an empty sequence and one of a single token among them
  size_t samples = 6;                                // of each parameter
};

void check_gradients(const Case& test) {
  constexpr double kScale = 0.37;
  LanguageModel<double> model = noisy_model<double>(test.config);
  const SeqLayout layout(test.offsets);
  const std::vector<int32_t> ids = random_ids(layout.tokens(), test.config.vocab_size, 1);
  std::vector<int32_t> targets = random_ids(layout.tokens(), test.config.vocab_size, 2);
  targets[3] = -1;  // not scored

  Params<double>& params = model.params();
  params.zero_grads();
  const LossSum sum = model.forward_backward(ids, targets, layout, kScale);
  EXPECT_EQ(sum.count, layout.tokens() - 1);
  const LossSum only = model.evaluate(ids, targets, layout);
  EXPECT_NEAR(only.nll, sum.nll, 1e-10 * std::abs(sum.nll));
  const std::vector<double> grads(params.grads().begin(), params.grads().end());
  double square = 0;
  for (double g : grads) square += g * g;
  const double total = std::sqrt(square);
  ASSERT_GT(total, 0.0);

  const auto loss = [&] { return kScale * model.evaluate(ids, targets, layout).nll; };
  for (size_t p = 0; p < params.specs().size(); ++p) {
    const ParamSpec& spec = params.specs()[p];
    double diff = 0, norm = 0;
    const std::vector<size_t> indices = sample_indices(static_cast<size_t>(spec.size()), test.samples, p);
    for (size_t i : indices) {
      const size_t at = static_cast<size_t>(spec.offset) + i;
      // Small steps: Q-Delta is not contractive, its loss bends strongly (h = 1e-4 is 2e-6 off, h = 2e-5 below 1e-8).
      const double expected = difference(loss, params.values()[at], 2e-5);
      diff += (grads[at] - expected) * (grads[at] - expected);
      norm += expected * expected;
    }
    // Of the sampled values; a parameter whose gradient is far below the model's is held to the model's scale.
    const double share = std::sqrt(static_cast<double>(indices.size()) / static_cast<double>(grads.size()));
    EXPECT_LE(std::sqrt(diff), 1e-6 * std::max(std::sqrt(norm), 1e-2 * total * share))
        << spec.name << ": |difference| " << std::sqrt(norm);
  }
}

class ModelGradient : public ::testing::TestWithParam<Case> {};

TEST_P(ModelGradient, EqualsCentralDifferences) { check_gradients(GetParam()); }

std::vector<Case> preset_cases() {
  std::vector<Case> list;
  for (const Preset& preset : presets())
    list.push_back({std::string(preset.name), small_config(std::string(preset.name))});
  return list;
}

std::vector<Case> option_cases() {
  std::vector<Case> list;
  const auto add = [&](const std::string& name, const std::string& rule, auto change) {
    Case c{name, small_config(rule)};
    change(c.config);
    list.push_back(c);
  };
  add("untied", "gated_deltanet", [](ModelConfig& c) { c.tie_word_embeddings = false; });
  add("low_rank", "kda", [](ModelConfig& c) {
    c.decay_rank = 5;
    c.output_gate_rank = 3;
    c.output_gate = "sigmoid";
  });
  add("low_rank_without_bias", "kda", [](ModelConfig& c) {
    c.output_gate_rank = 3;
    c.output_gate_bias = false;
  });
  add("grouped_heads_gated_deltanet", "gated_deltanet", [](ModelConfig& c) { c.num_v_heads = 4; });
  add("grouped_heads_gated_deltanet2", "gated_deltanet2", [](ModelConfig& c) { c.num_v_heads = 4; });
  add("grouped_heads_precond", "precond_gated_deltanet", [](ModelConfig& c) {
    c.num_heads = 1;
    c.num_v_heads = 2;
  });
  add("decay_per_value_head", "kda", [](ModelConfig& c) {
    c.num_v_heads = 4;
    c.decay_per_value_head = true;
    c.decay_rank = 4;
  });
  add("wide_values", "qdelta", [](ModelConfig& c) { c.expand_v = 2; });
  add("narrow_values", "kaczmarz", [](ModelConfig& c) { c.expand_v = 0.5; });
  add("no_convolution", "gated_deltanet2", [](ModelConfig& c) { c.conv_size = 0; });
  add("convolution_of_one", "kaczmarz", [](ModelConfig& c) { c.conv_size = 1; });
  add("negative_gain", "deltanet", [](ModelConfig& c) { c.allow_neg_eigval = true; });
  add("negative_erase_gate", "gated_deltanet2", [](ModelConfig& c) { c.allow_neg_eigval = true; });
  add("no_output_gate", "mamba2", [](ModelConfig& c) { c.output_gate = "none"; });
  add("sigmoid_output_gate", "gla", [](ModelConfig& c) { c.output_gate = "sigmoid"; });
  add("gain_beside_erase_gate", "kda erase=channel feedback=learned",
      [](ModelConfig& c) { c.allow_neg_eigval = true; });
  add("write_gate_beside_gain", "kaczmarz decay=channel write=channel feedback=learned", [](ModelConfig&) {});
  add("everything", "gated_deltanet2 gain=gate feedback=learned precond=diagonal", [](ModelConfig& c) {
    c.num_v_heads = 4;
    c.expand_v = 1.5;
    c.decay_rank = 4;
    c.output_gate_rank = 4;
    c.tie_word_embeddings = false;
  });
  add("own_erase_key", "gated_deltanet erase_key=own read=corrected write=scalar",
      [](ModelConfig& c) { c.num_v_heads = 4; });
  add("scalar_gates", "kda erase=scalar write=scalar", [](ModelConfig& c) { c.allow_neg_eigval = true; });
  add("learned_gain", "kaczmarz", [](ModelConfig& c) { c.gain_source = "learned"; });
  for (const char* factor : {"1/t", "1/sqrt(t)", "1/log(t+1)"}) {
    add(fmt::format("gain_factor_{}", list.size()), "kaczmarz", [&](ModelConfig& c) { c.gain_factor = factor; });
  }
  add("single_gate", "kaczmarz", [](ModelConfig& c) { c.single_gate = true; });
  add("single_learned_gate", "kaczmarz", [](ModelConfig& c) {
    c.single_gate = true;
    c.gain_source = "learned";
    c.gain_factor = "1/t";
  });
  add("exp_precond_center", "precond_gated_deltanet", [](ModelConfig& c) { c.precond_center = "exp"; });
  add("tied_precond", "precond_gated_deltanet", [](ModelConfig& c) {
    c.precond_gates = "tied";
    c.num_v_heads = 4;
  });
  add("tied_precond_no_decay", "precond_exact", [](ModelConfig& c) { c.precond_gates = "tied"; });
  add("tied_precond_single_gate", "precond_norm_gated", [](ModelConfig& c) {
    c.precond_gates = "tied";
    c.single_gate = true;
  });
  add("comba_grouped", "comba", [](ModelConfig& c) { c.num_v_heads = 4; });
  for (const Preset& ablation : ablations())
    list.push_back({std::string(ablation.name), small_config(std::string(ablation.name)), {0, 5, 11}, 1});
  add("log_sigmoid_decay", "gla", [](ModelConfig& c) { c.decay_gate = "logsigmoid"; });
  add("log_sigmoid_decay_of_low_rank", "gated_deltanet2", [](ModelConfig& c) {
    c.decay_gate = "logsigmoid";
    c.decay_rank = 5;
  });
  add("learned_feature_map", "linear_attention", [](ModelConfig& c) {
    c.feature_map = "product";
    c.conv_size = 0;
    c.num_v_heads = 4;
  });
  add("elu_feature_map", "gla", [](ModelConfig& c) { c.feature_map = "elu"; });
  add("relu_feature_map", "gated_deltanet", [](ModelConfig& c) { c.feature_map = "relu"; });
  add("rotary", "retnet", [](ModelConfig& c) {
    c.rope_theta = 100;
    c.conv_size = 0;
    c.expand_v = 2;
  });
  add("rotary_after_a_learned_feature_map", "kda", [](ModelConfig& c) {
    c.feature_map = "product";
    c.rope_theta = 10000;
    c.num_v_heads = 4;
  });
  add("raw_read_correction", "decay=scalar gain=gate erase_key=own q_norm=l2 k_norm=l2",
      [](ModelConfig& c) { c.raw_read_correction = true; });
  add("raw_read_correction_by_the_key", "gated_deltanet", [](ModelConfig& c) {
    c.raw_read_correction = true;
    c.conv_size = 0;
    c.feature_map = "elu";
    c.rope_theta = 50;
  });
  add("decay_bounded_by_layer", "hgrn2", [](ModelConfig& c) {
    c.num_hidden_layers = 3;
    c.decay_gate = "bounded";
    c.feature_map = "silu";
    c.output_norm = "width";
    c.output_norm_eps = 1e-3;
    c.conv_size = 0;
    c.output_gate = "none";
  });
  add("decay_bounded_in_a_delta_rule", "kda", [](ModelConfig& c) {
    c.decay_gate = "bounded";
    c.num_v_heads = 4;
    c.output_norm = "width";
  });
  add("keys_of_the_decay", "kda key_source=decay", [](ModelConfig& c) {
    c.feature_map = "product";
    c.rope_theta = 100;
    c.num_v_heads = 4;
  });
  Case chunks{"chunks", small_config("gated_deltanet2"), {0, 70, 71, 150}, 2};
  chunks.config.num_hidden_layers = 1;
  list.push_back(chunks);
  return list;
}

std::string case_name(const ::testing::TestParamInfo<Case>& info) { return info.param.name; }

INSTANTIATE_TEST_SUITE_P(Presets, ModelGradient, ::testing::ValuesIn(preset_cases()), case_name);
INSTANTIATE_TEST_SUITE_P(Options, ModelGradient, ::testing::ValuesIn(option_cases()), case_name);

TEST(ModelGradient, AccumulatesAndScales) {
  const ModelConfig config = small_config("gated_deltanet2");
  LanguageModel<double> model = noisy_model<double>(config);
  const SeqLayout layout({0, 7, 12});
  const std::vector<int32_t> ids = random_ids(12, config.vocab_size, 1), targets = random_ids(12, config.vocab_size, 2);
  model.forward_backward(ids, targets, layout, 1.0);
  const std::vector<double> once(model.params().grads().begin(), model.params().grads().end());
  model.forward_backward(ids, targets, layout, 2.0);
  std::vector<double> expected = once;
  for (double& x : expected) x *= 3.0;
  EXPECT_LE(distance(model.params().grads(), expected), 1e-13);
}

// The final state of one pass is the initial state of the next: the losses are those of the undivided text.
TEST(ModelGradient, CarriesStateForward) {
  const ModelConfig config = small_config("precond_gated_deltanet");
  LanguageModel<double> model = noisy_model<double>(config);
  const std::vector<int32_t> ids = random_ids(20, config.vocab_size, 1), targets = random_ids(20, config.vocab_size, 2);
  const double whole = model.evaluate(ids, targets, SeqLayout({0, 20})).nll;
  ModelState<double> state(config, 1);
  const std::span<const int32_t> i(ids), t(targets);
  double sum = model.forward_backward(i.first(8), t.first(8), SeqLayout({0, 8}), 1.0, &state).nll;
  model.params().zero_grads();
  const ModelState<double> middle = state;
  sum += model.forward_backward(i.subspan(8), t.subspan(8), SeqLayout({0, 12}), 1.0, &state).nll;
  EXPECT_NEAR(sum, whole, 1e-10 * whole);

  // Gradients of the second piece, with the initial state held fixed.
  const std::vector<double> grads(model.params().grads().begin(), model.params().grads().end());
  double norm = 0;
  for (double g : grads) norm += g * g;
  const auto loss = [&] {
    ModelState<double> from = middle;
    return model.evaluate(i.subspan(8), t.subspan(8), SeqLayout({0, 12}), &from).nll;
  };
  double error = 0;
  const std::vector<size_t> indices = sample_indices(grads.size(), 60, 1);
  for (size_t at : indices) error += std::pow(grads[at] - difference(loss, model.params().values()[at]), 2);
  EXPECT_LE(std::sqrt(error),
            1e-6 * std::sqrt(norm * static_cast<double>(indices.size()) / static_cast<double>(grads.size())));
}

}  // namespace
}  // namespace fw::testing
