// The state as an object: prefilling in pieces, decoding, forking, saving and loading all say what one pass over the
// whole says.
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <numeric>
#include <string>
#include <vector>

#include "base/error.h"
#include "model/small_model.h"

namespace fw::testing {
namespace {

std::vector<std::string> rules() {
  std::vector<std::string> list;
  for (const Preset& preset : presets()) list.emplace_back(preset.name);
  list.emplace_back("gated_deltanet2 gain=gate feedback=learned precond=diagonal");
  list.emplace_back("kaczmarz, gain_factor 1/sqrt(t)");  // the token's place passes through the state
  return list;
}

class ModelStateOf : public ::testing::TestWithParam<std::string> {};

TEST_P(ModelStateOf, PiecesEqualTheWhole) {
  const size_t comma = GetParam().find(", gain_factor ");
  ModelConfig config = small_config(GetParam().substr(0, comma));
  if (comma != std::string::npos) config.gain_factor = GetParam().substr(comma + 14);
  config.num_v_heads = 4;
  LanguageModel<double> model = noisy_model<double>(config);
  const int64_t tokens = 90;
  const std::vector<int32_t> ids = random_ids(tokens, config.vocab_size, 3);
  Logits<double> all(tokens, config.vocab_size);
  ModelState<double> whole(config, 1);
  model.forward_all(ids, SeqLayout({0, tokens}), &whole, all.mat());

  ModelState<double> state(config, 1);
  // single tokens run as decode steps, long pieces as chunks
  const std::vector<int64_t> cuts = {0, 1, 3, 68, 69, 70, tokens};
  for (size_t i = 0; i + 1 < cuts.size(); ++i) {
    const int64_t n = cuts[i + 1] - cuts[i];
    Logits<double> last(1, config.vocab_size);
    model.forward_last(std::span(ids).subspan(static_cast<size_t>(cuts[i]), static_cast<size_t>(n)), SeqLayout({0, n}),
                       state, last.mat());
    EXPECT_LE(distance(last.values, all.row(cuts[i + 1] - 1)), 1e-10) << "after " << cuts[i + 1];
  }
  for (int64_t i = 0; i < config.num_hidden_layers; ++i) {
    for (const StateTensor& tensor : config.layer_state(i)) {
      EXPECT_LE(distance(state.values(i, tensor.name), whole.values(i, tensor.name)), 1e-10) << tensor.name;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Rules, ModelStateOf, ::testing::ValuesIn(rules()));

// Models that look at the position of a token: it is that of the sequence, wherever the pieces are cut and whatever is
// packed.
ModelConfig rotating_config() {
  ModelConfig config = small_config("retnet");
  config.rope_theta = 30;
  config.feature_map = "product";
  return config;
}

TEST(ModelState, PositionsGoOnWithTheState) {
  const ModelConfig config = rotating_config();
  LanguageModel<double> model = noisy_model<double>(config);
  const std::vector<int32_t> ids = random_ids(50, config.vocab_size, 3);
  Logits<double> all(50, config.vocab_size), last(1, config.vocab_size);
  model.forward_all(ids, SeqLayout({0, 50}), nullptr, all.mat());
  ModelState<double> state(config, 1);
  const std::vector<size_t> cuts = {0, 20, 21, 22, 49, 50};
  for (size_t i = 0; i + 1 < cuts.size(); ++i) {
    const int64_t n = static_cast<int64_t>(cuts[i + 1] - cuts[i]);
    model.forward_last(std::span(ids).subspan(cuts[i], cuts[i + 1] - cuts[i]), SeqLayout({0, n}), state, last.mat());
    EXPECT_EQ(state.positions(), std::vector<int64_t>{static_cast<int64_t>(cuts[i + 1])});
    EXPECT_LE(distance(last.values, all.row(static_cast<int64_t>(cuts[i + 1]) - 1)), 1e-12);
  }
  state.reset();
  EXPECT_EQ(state.positions(), std::vector<int64_t>{0});
}

TEST(ModelState, PositionsRestartInPackedSequences) {
  const ModelConfig config = rotating_config();
  LanguageModel<double> model = noisy_model<double>(config);
  const std::vector<int32_t> ids = random_ids(30, config.vocab_size, 3);
  Logits<double> packed(30, config.vocab_size), alone(18, config.vocab_size);
  model.forward_all(ids, SeqLayout({0, 12, 12, 30}), nullptr, packed.mat());
  model.forward_all(std::span(ids).subspan(12), SeqLayout({0, 18}), nullptr, alone.mat());
  for (int64_t t = 0; t < 18; ++t) EXPECT_LE(distance(packed.row(12 + t), alone.row(t)), 1e-13) << t;
}

TEST(ModelState, DecodesManySequencesAtOnce) {
  const ModelConfig config = small_config("gated_deltanet2");
  LanguageModel<float> model = noisy_model<float>(config);
  const int64_t steps = 30, sequences = 3;
  const std::vector<int32_t> ids = random_ids(steps * sequences, config.vocab_size, 4);  // [step, sequence]
  ModelState<float> together(config, sequences);
  std::vector<ModelState<float>> alone(static_cast<size_t>(sequences), ModelState<float>(config, 1));
  Logits<float> rows(sequences, config.vocab_size), row(1, config.vocab_size);
  for (int64_t t = 0; t < steps; ++t) {
    const std::span<const int32_t> now =
        std::span(ids).subspan(static_cast<size_t>(t * sequences), static_cast<size_t>(sequences));
    model.forward_last(now, SeqLayout::uniform(sequences, 1), together, rows.mat());
    for (int64_t n = 0; n < sequences; ++n) {
      model.forward_last(now.subspan(static_cast<size_t>(n), 1), SeqLayout({0, 1}), alone[static_cast<size_t>(n)],
                         row.mat());
      ASSERT_LE(distance(rows.row(n), row.values), 1e-5) << "step " << t << " sequence " << n;
    }
  }
}

TEST(ModelState, DecodingKeepsItsMemory) {
  const ModelConfig config = small_config("precond_gated_deltanet");
  LanguageModel<float> model = noisy_model<float>(config);
  ModelState<float> state(config, 1);
  Logits<float> logits(1, config.vocab_size);
  const std::vector<int32_t> prefix = random_ids(300, config.vocab_size, 4);
  model.forward_last(prefix, SeqLayout({0, 300}), state, logits.mat());
  const size_t scratch = model.scratch_bytes(), bytes = state.bytes();
  const std::vector<int32_t> one = {3};
  for (int i = 0; i < 500; ++i) model.forward_last(one, SeqLayout({0, 1}), state, logits.mat());
  EXPECT_EQ(model.scratch_bytes(), scratch);
  EXPECT_EQ(state.bytes(), bytes);
}

// Scratch is that of the largest pass, however the sizes came.
TEST(ModelState, GrowingPassesDoNotAddUp) {
  const ModelConfig config = small_config("gated_deltanet2");
  LanguageModel<float> grown = noisy_model<float>(config), once = noisy_model<float>(config);
  for (int64_t n = 500; n <= 20000; n += 1500) {
    const std::vector<int32_t> ids = random_ids(n, config.vocab_size, 4);
    grown.evaluate(ids, ids, SeqLayout({0, n}));
  }
  const std::vector<int32_t> ids = random_ids(20000, config.vocab_size, 4);
  once.evaluate(ids, ids, SeqLayout({0, 20000}));
  EXPECT_EQ(grown.scratch_bytes(), once.scratch_bytes());
}

class StateFile : public ::testing::Test {
 protected:
  void SetUp() override {
    folder_ = std::filesystem::path(::testing::TempDir()) / ("fw_state_" + std::to_string(::getpid()));
    std::filesystem::create_directories(folder_);
    path_ = (folder_ / "state.safetensors").string();
  }
  void TearDown() override { std::filesystem::remove_all(folder_); }

  std::string error_of(ModelState<float>& state, const std::string& rule, const std::string& hash) const {
    try {
      state.load(path_, rule, hash);
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), ErrorKind::kUsage);
      return error.what();
    }
    return "";
  }

  std::filesystem::path folder_;
  std::string path_;
};

TEST_F(StateFile, ResumesBitForBit) {
  const ModelConfig config = small_config("precond_gated_deltanet");
  LanguageModel<float> model = noisy_model<float>(config);
  ModelState<float> state(config, 1);
  Logits<float> logits(1, config.vocab_size), resumed(1, config.vocab_size);
  const std::vector<int32_t> prefix = random_ids(40, config.vocab_size, 4), next = {1, 2, 3};
  model.forward_last(prefix, SeqLayout({0, 40}), state, logits.mat());
  state.save(path_, config.rule, model.hash());

  ModelState<float> loaded(config, 1);
  loaded.load(path_, config.rule, model.hash());
  model.forward_last(next, SeqLayout({0, 3}), state, logits.mat());
  model.forward_last(next, SeqLayout({0, 3}), loaded, resumed.mat());
  EXPECT_EQ(logits.values, resumed.values);
}

TEST_F(StateFile, KeepsPositions) {
  const ModelConfig config = rotating_config();
  LanguageModel<float> model = noisy_model<float>(config);
  ModelState<float> state(config, 2);
  Logits<float> logits(2, config.vocab_size), resumed(2, config.vocab_size);
  model.forward_last(random_ids(40, config.vocab_size, 4), SeqLayout({0, 33, 40}), state, logits.mat());
  state.save(path_, config.rule, model.hash());
  ModelState<float> loaded(config, 2);
  loaded.load(path_, config.rule, model.hash());
  EXPECT_EQ(loaded.positions(), (std::vector<int64_t>{33, 7}));
  ModelState<float> fork = loaded;
  const std::vector<int32_t> next = {1, 2};
  for (ModelState<float>* one : {&state, &fork})
    model.forward_last(next, SeqLayout({0, 1, 2}), *one, (one == &state ? logits : resumed).mat());
  EXPECT_EQ(logits.values, resumed.values);
  EXPECT_EQ(loaded.positions(), (std::vector<int64_t>{33, 7}));
}

// Written out here as versions before the declared tensors wrote it.
TEST_F(StateFile, LoadsWhatEarlierVersionsWrote) {
  const ModelConfig config = small_config("precond_gated_deltanet");
  const LanguageModel<float> model = noisy_model<float>(config);
  std::vector<float> s(2 * 8 * 8), a(2 * 8), tail(2 * (16 + 16 + 16));
  std::iota(s.begin(), s.end(), 1.0F);
  std::iota(a.begin(), a.end(), 2.0F);
  std::iota(tail.begin(), tail.end(), 3.0F);
  const std::vector<int64_t> position = {7};
  SafetensorsWriter writer;
  writer.set_metadata("state_layout", "S [N, HV, K, V] K-first; A [N, H, K]; tail [N, W-1, q | k | v]; position [N]");
  writer.set_metadata("state_dtype", "F32");
  writer.set_metadata("state_rule", config.rule);
  writer.set_metadata("state_model", model.hash());
  writer.add<int64_t>("state.position", {1}, position);
  for (const std::string layer : {"state.layers.0.", "state.layers.1."}) {
    writer.add<float>(layer + "s", {1, 2, 8, 8}, s);
    writer.add<float>(layer + "a", {1, 2, 8}, a);
    writer.add<float>(layer + "tail", {1, 2, 48}, tail);
  }
  writer.write(path_);
  ModelState<float> state(config, 1);
  state.load(path_, config.rule, model.hash());
  EXPECT_EQ(state.positions(), position);
  for (int64_t i = 0; i < 2; ++i) {
    EXPECT_EQ(state.values(i, "s"), s);
    EXPECT_EQ(state.values(i, "a"), a);
    EXPECT_EQ(state.values(i, "tail"), tail);
    EXPECT_TRUE(state.values(i, "k").empty());
  }
}

TEST_F(StateFile, RefusesWhatIsNotThisModels) {
  const ModelConfig config = small_config("gated_deltanet2");
  const LanguageModel<float> model = noisy_model<float>(config), other = noisy_model<float>(config, 6);
  ModelState<float> state(config, 1);
  state.prepare(SeqLayout({0, 0}));
  state.layer(0).data(0)[3] = 1.5F;
  state.save(path_, config.rule, model.hash());

  ModelState<float> loaded(config, 1);
  const std::string wrong_model = error_of(loaded, config.rule, other.hash());
  EXPECT_NE(wrong_model.find(model.hash()), std::string::npos) << wrong_model;
  EXPECT_NE(wrong_model.find(other.hash()), std::string::npos) << wrong_model;
  EXPECT_NE(error_of(loaded, "kda", model.hash()).find("state_rule"), std::string::npos);
  EXPECT_EQ(loaded.values(0, "s")[3], 0.0F);  // untouched

  ModelState<float> two(config, 2);
  EXPECT_NE(error_of(two, config.rule, model.hash()).find("state.position"), std::string::npos);
  ModelConfig deeper = config;
  deeper.num_hidden_layers = 3;
  ModelState<float> deep(deeper, 1);
  EXPECT_NE(error_of(deep, config.rule, model.hash()), "");
  ModelConfig shallower = config;
  shallower.num_hidden_layers = 1;
  ModelState<float> shallow(shallower, 1);
  EXPECT_NE(error_of(shallow, config.rule, model.hash()), "");
  ModelState<double> wide(config, 1);
  EXPECT_THROW(wide.load(path_, config.rule, model.hash()), Error);

  std::filesystem::resize_file(path_, std::filesystem::file_size(path_) - 5);
  EXPECT_NE(error_of(loaded, config.rule, model.hash()), "");
}

TEST(ModelState, RefusesWrongShapes) {
  const ModelConfig config = small_config("kda");
  LanguageModel<float> model = noisy_model<float>(config);
  ModelState<float> two(config, 2);
  Logits<float> logits(1, config.vocab_size);
  const std::vector<int32_t> ids = {1, 2}, high = {1, 13}, negative = {-1, 2};
  EXPECT_THROW(model.forward_last(ids, SeqLayout({0, 2}), two, logits.mat()), Error);
  ModelState<float> one(config, 1);
  EXPECT_THROW(model.forward_last(high, SeqLayout({0, 2}), one, logits.mat()), Error);
  EXPECT_THROW(model.forward_last(negative, SeqLayout({0, 2}), one, logits.mat()), Error);
  EXPECT_THROW(model.forward_last(ids, SeqLayout({0, 3}), one, logits.mat()), Error);
  EXPECT_THROW(model.forward_last(ids, SeqLayout({0, 2, 2}), two, logits.mat()), Error);
  EXPECT_THROW(model.evaluate(ids, high, SeqLayout({0, 2})), Error);
  EXPECT_NO_THROW(model.forward_last(ids, SeqLayout({0, 2}), one, logits.mat()));
}

}  // namespace
}  // namespace fw::testing
