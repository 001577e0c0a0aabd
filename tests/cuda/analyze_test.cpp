// The analysis of a model whose passes run on the device: what its recurrences were given comes to the host, where they
// are replayed. Alongside the CPU's.
#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <vector>

#include "analyze/analyzer.h"
#include "base/device.h"
#include "base/random.h"
#include "model/language_model.h"

namespace fw::testing {
namespace {

ModelConfig small(const std::string& rule, const std::vector<std::string>& layers) {
  ModelConfig c;
  c.rule = rule;
  c.vocab_size = 67;
  c.hidden_size = 64;
  c.num_hidden_layers = static_cast<int64_t>(layers.size());
  c.layers = layers;
  c.num_heads = 2;
  c.num_v_heads = 4;
  c.head_dim = 32;
  c.intermediate_size = 96;
  c.window.window = 24;
  c.rwkv7.head_dim = 32;
  return c;
}

// Two passes over a state, as analyze goes through a long window.
std::vector<LayerAnalysis> analysed(LanguageModel<float>& model) {
  Analyzer<float> analyzer({}, 16);
  model.observe(&analyzer);
  ModelState<float> state(model.config(), 2, model.device());
  Random random(7);
  for (int64_t pass = 0; pass < 2; ++pass) {
    const SeqLayout layout({0, 70, 140});
    std::vector<int32_t> ids(static_cast<size_t>(layout.tokens()));
    for (int32_t& id : ids) id = static_cast<int32_t>(random.below(67));
    analyzer.set_position(pass * 70);
    model.evaluate(ids, std::vector<int32_t>(ids.size(), -1), layout, &state);
  }
  model.observe(nullptr);
  return analyzer.take();
}

class DeviceAnalysis : public ::testing::TestWithParam<std::string> {};

TEST_P(DeviceAnalysis, HasTheQuantitiesOfTheCpu) {
  const bool rwkv = GetParam() == "rwkv7";
  ModelConfig config =
      small(rwkv ? "kda" : GetParam(), rwkv ? std::vector<std::string>{"rwkv7", "window", "rwkv7"}
                                            : std::vector<std::string>{"recurrent", "window", "recurrent"});
  LanguageModel<float> host(config), device(config, cuda_device());
  Random random(3);
  host.init(random);
  for (const ParamSpec& spec : host.params().specs())
    device.params().write_values(spec, host.params().host_values(spec).span());
  const std::vector<LayerAnalysis> want = analysed(host), got = analysed(device);
  ASSERT_EQ(got.size(), 2U);  // the window has no recurrence
  for (size_t l = 0; l < got.size(); ++l) {
    EXPECT_EQ(got[l].layer, static_cast<int64_t>(2 * l));
    EXPECT_LE(want[l].replay_error(), 2e-5);
    EXPECT_LE(got[l].replay_error(), 2e-2);
    EXPECT_GT(got[l].replay_error(), 1e-4);  // outputs are bf16: it was the device
    for (const QuantityInfo& q : quantities()) {
      SCOPED_TRACE(::testing::Message() << "layer " << got[l].layer << " " << q.name);
      ASSERT_EQ(got[l].of(q.id).size(), want[l].of(q.id).size());
      for (size_t h = 0; h < got[l].of(q.id).size(); ++h) {
        const Distribution &a = got[l].of(q.id)[h], &b = want[l].of(q.id)[h];
        EXPECT_EQ(a.count() + a.skipped(), b.count() + b.skipped());
        EXPECT_NEAR(a.mean(), b.mean(), 3e-2 * (std::abs(b.mean()) + b.deviation()));
      }
    }
  }
  // Nobody watches any more.
  const std::vector<int32_t> ids(10, 1), targets(10, -1);
  device.evaluate(ids, targets, SeqLayout({0, 10}));
}
INSTANTIATE_TEST_SUITE_P(Rules, DeviceAnalysis,
                         ::testing::Values("gated_deltanet2", "precond_gated_deltanet", "qdelta", "rwkv7"),
                         [](const auto& one) { return one.param; });

}  // namespace
}  // namespace fw::testing
