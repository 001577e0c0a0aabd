// What backward recomputes instead of keeping it: the same loss and gradients to the bit at every level, in less
// memory.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "model/small_model.h"

namespace fw::testing {
namespace {

constexpr Recompute kLevels[] = {Recompute::kNone, Recompute::kElementwise, Recompute::kRecurrence, Recompute::kMlp,
                                 Recompute::kAll};

struct Named {
  std::string name;
  ModelConfig config;
};

std::vector<Named> models() {
  std::vector<Named> list;
  for (const char* rule : {"gated_deltanet2", "comba", "kaczmarz", "precond_gated_deltanet", "qdelta", "gla"})
    list.push_back({rule, small_config(rule)});
  const auto add = [&](const std::string& name, const std::string& rule, auto change) {
    list.push_back({name, small_config(rule)});
    change(list.back().config);
  };
  // Nothing stands between the projections and the recurrence: what is turned and corrected there is turned and
  // corrected in place.
  add("without_convolution", "comba read=plain", [](ModelConfig& c) {
    c.raw_read_correction = true;
    c.conv_size = 0;
    c.rope_theta = 100;
  });
  add("corrected_before_the_norms", "comba read=plain", [](ModelConfig& c) { c.raw_read_correction = true; });
  add("maps", "gla", [](ModelConfig& c) { c.feature_map = "product"; });
  add("maps_without_convolution", "linear_attention", [](ModelConfig& c) {
    c.feature_map = "elu";
    c.conv_size = 0;
    c.rope_theta = 100;
  });
  add("hybrid", "gated_deltanet2", [](ModelConfig& c) {
    c.layers = {"conv", "recurrent", "window", "attention"};
    c.num_hidden_layers = 4;
    c.window.window = 5;
  });
  add("norms_behind", "gated_deltanet", [](ModelConfig& c) {
    c.layers = {"recurrent", "attention"};
    c.norm = "zero_centered_rms";
    c.attention.qk_norm = c.attention.output_gate = c.attention.post_norm = true;
  });
  add("experts", "gated_deltanet2", [](ModelConfig& c) {
    c.layers = {"recurrent", "mla"};
    c.mla = {2, 6, 4, 2, 5};
    c.mlp = "experts";
    c.experts.num_experts = 5;
    c.experts.shared_size = 6;
    c.experts.shared_gate = true;
  });
  add("without_mlp", "gated_deltanet2", [](ModelConfig& c) { c.mlp = "none"; });
  // A value of the first layer that the later ones read, an MLP that remembers, LayerNorms.
  add("rwkv7", "gated_deltanet2", [](ModelConfig& c) {
    c.layers = {"rwkv7"};
    c.num_hidden_layers = 3;
    c.norm = "layer";
    c.embedding_norm = true;
    c.mlp = "channel_mix";
    c.rwkv7.head_dim = 4;
  });
  // Several rows a token in the recurrence, and a state that later tokens' weights enter.
  add("mamba3_mimo", "gated_deltanet2", [](ModelConfig& c) {
    c.layers = {"mamba3", "window"};
    c.window.window = 5;
    c.mamba3.head_dim = 6;
    c.mamba3.state_size = 8;
    c.mamba3.mimo_rank = 2;
    c.mamba3.output_norm = true;
  });
  return list;
}

struct Step {
  double nll = 0;
  std::vector<float> grads;
  std::vector<std::vector<float>> state;
};

// Two passes over packed sequences, the second from the state that the first left, if there is one.
Step step_of(const ModelConfig& config, const RecomputeLayers& what, const SeqLayout& layout, bool with_state) {
  LanguageModel<float> model = noisy_model<float>(config);
  model.set_recompute(what);
  ModelState<float> state(config, layout.count());
  ModelState<float>* given = with_state ? &state : nullptr;
  Step step;
  model.begin_step();
  for (uint64_t pass = 0; pass < 2; ++pass) {
    const std::vector<int32_t> ids = random_ids(layout.tokens(), config.vocab_size, 3 + pass),
                               targets = random_ids(layout.tokens(), config.vocab_size, 7 + pass);
    model.accumulate(ids, targets, layout, 0.5, given);
  }
  step.nll = model.read_sums().loss.nll;
  for (const ParamSpec& spec : model.params().specs()) {
    const HostView<float> grads = model.params().host_grads(spec);
    step.grads.insert(step.grads.end(), grads.span().begin(), grads.span().end());
  }
  for (const char* name : {"s", "a", "tail", "k", "v"}) {
    for (int64_t i = 0; i < state.layers(); ++i) step.state.push_back(state.values(i, name));
  }
  return step;
}

class RecomputeOf : public ::testing::TestWithParam<Named> {};

TEST_P(RecomputeOf, GradientsHaveTheSameBits) {
  // Sequences of one token would take the decode step in a pass that keeps nothing.
  for (const SeqLayout& layout : {SeqLayout({0, 37, 38, 75}), SeqLayout({0, 1, 2, 3})}) {
    for (const bool with_state : {false, true}) {
      const Step kept = step_of(GetParam().config, {}, layout, with_state);
      std::vector<RecomputeLayers> all;
      for (const Recompute level : kLevels) all.insert(all.end(), {{level}, {level, 1}});
      for (const RecomputeLayers& what : all) {
        SCOPED_TRACE(::testing::Message()
                     << recompute_names()[static_cast<size_t>(what.level)] << " of " << what.layers << " layers, "
                     << layout.tokens() << " tokens" << (with_state ? ", with a state" : ""));
        const Step step = step_of(GetParam().config, what, layout, with_state);
        EXPECT_EQ(step.nll, kept.nll);
        EXPECT_EQ(step.grads, kept.grads);
        EXPECT_EQ(step.state, kept.state);
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Models, RecomputeOf, ::testing::ValuesIn(models()),
                         [](const auto& one) { return one.param.name; });

TEST(Recompute, EachLevelTakesLessMemory) {
  ModelConfig config = small_config("gated_deltanet2");
  config.hidden_size = 64;
  config.head_dim = 32;
  config.num_hidden_layers = 6;
  config.intermediate_size = 192;
  const SeqLayout layout = SeqLayout::uniform(2, 1000);
  const std::vector<int32_t> ids = random_ids(layout.tokens(), config.vocab_size, 3);
  const double residual = static_cast<double>(layout.tokens() * config.hidden_size) * sizeof(float);
  std::vector<double> bytes;
  const Recompute levels[] = {Recompute::kNone, Recompute::kElementwise, Recompute::kRecurrence, Recompute::kAll};
  for (const Recompute level : levels) {
    LanguageModel<float> model = noisy_model<float>(config);
    model.set_recompute(level);
    model.forward_backward(ids, ids, layout, 1.0);
    bytes.push_back(static_cast<double>(model.scratch_bytes()));
    const size_t first = model.scratch_bytes();
    model.forward_backward(ids, ids, layout, 1.0);
    EXPECT_EQ(model.scratch_bytes(), first);
  }
  for (size_t i = 1; i < bytes.size(); ++i)
    EXPECT_LT(bytes[i], 0.9 * bytes[i - 1]) << recompute_names()[static_cast<size_t>(levels[i])];
  // Of a layer two rows of the residual stream a token stay, beside what one layer needs at a time.
  EXPECT_LT(bytes[3] - bytes[0] / 6, 0.5 * bytes[0]);
  EXPECT_GT(bytes[3], 2 * 6 * residual);
}

// What the arena's blocks do not hide where gate and up are larger than one of them.
TEST(Recompute, TheMlpsProductIsNotKept) {
  ModelConfig config = small_config("gated_deltanet2");
  config.num_hidden_layers = 4;
  config.intermediate_size = 1000;
  const SeqLayout layout = SeqLayout::uniform(1, 1000);
  const std::vector<int32_t> ids = random_ids(layout.tokens(), config.vocab_size, 3);
  const auto bytes = [&](Recompute level) {
    LanguageModel<float> model = noisy_model<float>(config);
    model.set_recompute(level);
    model.forward_backward(ids, ids, layout, 1.0);
    return static_cast<double>(model.scratch_bytes());
  };
  const double product = static_cast<double>(layout.tokens() * 2 * config.intermediate_size) * sizeof(float);
  EXPECT_LT(bytes(Recompute::kMlp), bytes(Recompute::kRecurrence) - 2.5 * product);  // of four, one at a time
}

TEST(Recompute, ItsNamesAreItsLevels) {
  for (const Recompute level : kLevels)
    EXPECT_EQ(parse_recompute(recompute_names()[static_cast<size_t>(level)]), level);
}

}  // namespace
}  // namespace fw::testing
