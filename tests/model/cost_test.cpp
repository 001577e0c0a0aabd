// Costs that a configuration says against what a model has and takes.
#include "model/cost.h"

#include <gtest/gtest.h>

#include "model/small_model.h"

namespace fw::testing {
namespace {

std::vector<ModelConfig> models() {
  std::vector<ModelConfig> list;
  for (const StringList& layers : {StringList{}, {"attention"}, {"window", "recurrent"}, {"conv", "kda", "window"}}) {
    ModelConfig c = small_config("gated_deltanet2");
    c.hidden_size = 48;
    c.head_dim = 16;
    c.intermediate_size = 96;
    c.num_hidden_layers = 6;
    c.layers = layers;
    c.window.window = 20;
    list.push_back(c);
  }
  list[0].rule = "precond_gated_deltanet";
  list[2].decay_rank = list[2].output_gate_rank = 4;
  list[1].mlp = "none";
  return list;
}

// Parameters and state exactly.
TEST(Cost, IsWhatAModelTakes) {
  for (const ModelConfig& config : models()) {
    SCOPED_TRACE(config.mixers());
    constexpr int64_t kLength = 1000;
    const ModelCost cost = cost_of(config, kLength);
    LanguageModel<float> model = noisy_model<float>(config);
    EXPECT_EQ(cost.parameters, static_cast<double>(model.params().size()));
    ModelState<float> state(config, 1);
    EXPECT_EQ(cost.state_bytes, static_cast<double>(state.bytes() - sizeof(int64_t)));
    Logits<float> logits(1, config.vocab_size);
    model.forward_last(random_ids(kCacheRows, config.vocab_size, 1), SeqLayout({0, kCacheRows}), state, logits.mat());
    EXPECT_EQ(cost.state_bytes + cost.state_bytes_token * kCacheRows,
              static_cast<double>(state.bytes() - sizeof(int64_t)));
  }
}

// A token passes the router, 2 of 5 experts and the shared one; the first layers have an MLP.
TEST(Cost, ExpertsThatATokenPasses) {
  ModelConfig c = small_config("gated_deltanet2"), none = c;
  c.num_hidden_layers = none.num_hidden_layers = 3;
  none.mlp = "none";
  c.mlp = "experts";
  c.experts.num_experts = 5;
  c.experts.intermediate_size = 7;
  c.experts.shared_size = 6;
  c.experts.dense_layers = 1;
  const ModelCost cost = cost_of(c, 100), without = cost_of(none, 100);
  const double d = 12, expert = 3 * 7 * d, other = 5 * d + 3 * 6 * d, dense = 3 * 20 * d;
  EXPECT_EQ(cost.parameters, without.parameters + 3 * d + dense + 2 * (5 * expert + other));
  EXPECT_EQ(cost.active_parameters, without.parameters + 3 * d + dense + 2 * (2 * expert + other));
  EXPECT_NEAR(cost.flops_token, without.flops_token + 2 * (dense + 2 * (2 * expert + other)), 1e-6);
  EXPECT_EQ(without.active_parameters, without.parameters);
  EXPECT_EQ(static_cast<double>(LanguageModel<float>(c).params().size()), cost.parameters);
}

// Twice the weights that multiply, and attention's pairs of tokens.
TEST(Cost, OperationsOfAToken) {
  ModelConfig c = small_config("gated_deltanet2");
  c.layers = {"attention"};
  c.num_hidden_layers = 3;
  const double d = 12, layer = 4 * d * d + 3 * d * 20, head = 13 * d;
  ModelCost cost = cost_of(c, 100);
  EXPECT_EQ(cost.flops_attention, 3 * 4 * d * 50.5);
  EXPECT_EQ(cost.flops_token, 2 * (3 * layer + head) + cost.flops_attention);
  EXPECT_EQ(cost.flops_recurrence, 0);
  c.layers = {"window"};
  c.window.window = 10;
  EXPECT_EQ(cost_of(c, 100).flops_attention, 3 * 4 * d * (55 + 90 * 10) / 100);
  EXPECT_EQ(cost_of(c, 5).flops_attention, 3 * 4 * d * 3);
  c.layers = {};
  cost = cost_of(c, 100);
  EXPECT_EQ(cost.flops_recurrence, 3 * 7 * 2 * 8 * 8);  // decay, erase, write, read of 2 heads
  EXPECT_EQ(cost_of(c, 100000).flops_token, cost.flops_token);
}

}  // namespace
}  // namespace fw::testing
