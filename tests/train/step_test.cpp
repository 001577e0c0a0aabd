// The contract of a step without scored tokens: parameters and moments stay as they are.
#include "train/step.h"

#include <gtest/gtest.h>

#include <vector>

#include "base/random.h"
#include "train/training_support.h"

namespace fw::testing {
namespace {

TEST(Step, UpdatesNothingWithoutScoredTokens) {
  const ModelConfig config = tiny_model();
  LanguageModel<float> model(config);
  Random random(1);
  model.init(random);
  AdamW optimizer({.weight_decay = 0.5}, model.params());
  const auto parameters = [&] {
    std::vector<float> all;
    for (const ParamSpec& spec : model.params().specs()) {
      const HostView<float> values = model.params().host_values(spec);
      all.insert(all.end(), values.span().begin(), values.span().end());
    }
    return all;
  };
  Batch batch;
  for (int64_t t = 0; t < 16; ++t) batch.ids.push_back(static_cast<int32_t>(t));
  batch.targets.assign(batch.ids.size(), -1);
  batch.layout = SeqLayout::uniform(1, 16);
  const std::vector<float> before = parameters();
  const StepResult none = train_step(model, optimizer, {&batch, 1}, 1e-2, 1.0);
  EXPECT_EQ(none.count, 0);
  EXPECT_EQ(parameters(), before) << "weight decay without a gradient";
  EXPECT_EQ(optimizer.updates(), 0);
  batch.targets[3] = 5;
  EXPECT_EQ(train_step(model, optimizer, {&batch, 1}, 1e-2, 1.0).count, 1);
  EXPECT_NE(parameters(), before);
}

}  // namespace
}  // namespace fw::testing
