// The products of a step, noted and run alone. In the emulation and on a GPU.
#include "ops/product_record.h"

#include <gtest/gtest.h>

#include <vector>

#include "base/device.h"
#include "base/error.h"
#include "base/random.h"
#include "gpu/device.h"
#include "model/language_model.h"
#include "ops/device_check.h"
#include "train/step.h"

namespace fw::testing {
namespace {

constexpr int64_t kTokens = 72, kWidth = 64, kInner = 96, kVocab = 67;

LanguageModel<float> small_model() {
  ModelConfig c;
  c.vocab_size = kVocab;
  c.hidden_size = kWidth;
  c.num_hidden_layers = 2;
  c.layers = {"window", "window"};
  c.num_heads = c.window.num_heads = 2;
  c.head_dim = 32;
  c.intermediate_size = kInner;
  c.window.window = 16;
  c.tie_word_embeddings = false;
  LanguageModel<float> model(c, cuda_device());
  Random random(3);
  model.init(random);
  return model;
}

Batch some_batch() {
  Batch batch;
  for (int64_t t = 0; t < kTokens; ++t) batch.ids.push_back(static_cast<int32_t>(t * 7 % kVocab));
  batch.targets = batch.ids;
  batch.layout = SeqLayout({0, kTokens});
  return batch;
}

std::vector<float> values_of(const LanguageModel<float>& model) {
  std::vector<float> all;
  for (const ParamSpec& spec : model.params().specs()) {
    const HostView<float> view = model.params().host_values(spec);
    all.insert(all.end(), view.span().begin(), view.span().end());
  }
  return all;
}

TEST(ProductRecord, NotesWhatAStepQueuesAndRunsItWithoutTouchingTheModel) {
  LanguageModel<float> model = small_model();
  AdamW optimizer({}, model.params());
  const Batch batch = some_batch();
  train_step(model, optimizer, {&batch, 1}, 1e-3, 1.0);  // nobody listens
  ProductRecord record;
  EXPECT_EQ(record.count(), 0);
  train_step(model, optimizer, {&batch, 1}, 1e-3, 1.0);
  // Of each layer q k v, o, gate and up, down, and the head, whose rows are no multiple of eight and so two products:
  // forward, and two products back.
  constexpr int kProducts = 3 * (2 * 4 + 2);
  EXPECT_EQ(record.count(), kProducts);
  const double weights = 2.0 * (kWidth * 3 * kWidth + kWidth * kWidth + 3 * kWidth * kInner) + kVocab * kWidth;
  EXPECT_EQ(record.flops(), 3 * 2 * weights * kTokens);
  EXPECT_THROW(ProductRecord(), Error);

  const std::vector<float> before = values_of(model);
  const std::vector<double> seconds = record.seconds_alone(cuda_device(), 2);
  ASSERT_EQ(seconds.size(), 2U);
  for (const double one : seconds) EXPECT_GT(one, 0);
  EXPECT_EQ(values_of(model), before);
  EXPECT_EQ(record.count(), kProducts) << "what it runs itself it does not note";
  train_step(model, optimizer, {&batch, 1}, 1e-3, 1.0);
  EXPECT_EQ(record.count(), kProducts) << "it listens no more";
}

// What is recomputed are products of the step too.
TEST(ProductRecord, HasWhatIsComputedAgain) {
  LanguageModel<float> model = small_model();
  model.set_recompute(Recompute::kAll);
  AdamW optimizer({}, model.params());
  const Batch batch = some_batch();
  ProductRecord record;
  train_step(model, optimizer, {&batch, 1}, 1e-3, 1.0);
  EXPECT_GT(record.count(), 3 * (2 * 4 + 2));
}

// Products of up to 64 bf16 rows are kernels of this library's own where their rows lie at multiples of 16 bytes.
TEST(ProductRecord, HasNoneOfFewOrSomeRows) {
  const auto noted = [](int64_t rows, int64_t in, int64_t pad) {
    Context<Bf16> on(cuda_device());
    constexpr int64_t kOut = 24;
    Matrix<Bf16> x(on.device, rows, in, pad, on.random(rows * in)), y(on.device, rows, kOut, 0),
        addend(on.device, rows, kOut, 3, on.random(rows * kOut));
    const Buffer<Bf16> rounded = on.buffer<Bf16>(on.random(kOut * in));
    const Weight<float> weight{{nullptr, kOut, in}, {rounded.data(), kOut, in}};
    const ProductRecord record;
    on.exec.linear_forward(x.mat(), weight, nullptr, y.mat(), Write::kOverwrite);
    on.exec.linear_add_forward(x.mat(), weight, addend.mat(), y.mat());
    return record.count();
  };
  EXPECT_EQ(noted(8, 64, 0), 0);
  const int some = cuda::current_arch() == cuda::Arch::kSm90 ? 0 : 2;  // Hopper alone has a kernel for these
  for (const int64_t rows : {9, 33, 64}) EXPECT_EQ(noted(rows, 64, 8), some) << rows;
  EXPECT_EQ(noted(65, 64, 0), 2);
  EXPECT_EQ(noted(9, 64, 3), 2) << "rows that are no packets";
  EXPECT_EQ(noted(9, 60, 0), 2) << "columns that are no packets";
}

}  // namespace
}  // namespace fw::testing
