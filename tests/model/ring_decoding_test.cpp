// Decoders with a ring (LanguageModel::set_decode_ring). Folded after every token they have the bits of steps, else
// logits and states are near. Whoever else reads a state in the middle of a ring finds it whole.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <optional>
#include <string>
#include <vector>

#include "base/temp_folder.h"
#include "model/small_model.h"
#include "nn/decode_ring.h"

namespace fw::testing {
namespace {

using ::testing::HasSubstr;

constexpr int64_t kPrompt = 11;

// Greedy decoding of a state's sequences.
template <class T>
class Greedy {
 public:
  Greedy(LanguageModel<T>& model, ModelState<T>& state)
      : vocab_(model.config().vocab_size), uniform_(static_cast<size_t>(state.sequences())) {
    decoder_ = model.decoder(state);
  }
  void begin(int64_t n, const std::vector<T>& logits) { decoder_->begin(n, logits, {}); }
  // A token of each; the ids.
  std::vector<int32_t> next() {
    Sampling greedy;
    greedy.temperature = 0;
    decoder_->sample(vocab_, greedy, uniform_, false);
    decoder_->step();
    std::vector<int32_t> ids;
    for (const Drawn& drawn : decoder_->wait()) ids.push_back(drawn.id);
    return ids;
  }
  std::vector<T> logits(int64_t n) {
    std::vector<T> to(static_cast<size_t>(vocab_));
    decoder_->read_logits(n, to);
    return to;
  }

 private:
  int64_t vocab_;
  std::vector<double> uniform_;
  std::unique_ptr<Decoder<T>> decoder_;
};

template <class T>
std::vector<T> read(LanguageModel<T>& model, ModelState<T>& state, const std::vector<int32_t>& ids) {
  Logits<T> last(1, model.config().vocab_size);
  model.forward_last(ids, SeqLayout({0, static_cast<int64_t>(ids.size())}), state, last.mat());
  return last.values;
}

template <class T>
ModelState<T> prompted(LanguageModel<T>& model, int64_t length, uint64_t seed, std::vector<T>& logits) {
  ModelState<T> state(model.config(), 1);
  logits = read(model, state, random_ids(length, model.config().vocab_size, seed));
  return state;
}

template <class T>
struct Text {
  std::vector<int32_t> ids;
  std::vector<std::vector<T>> logits;
  std::vector<std::vector<T>> states;  // "s" and "a" of each layer at the end
};

template <class T>
Text<T> text_of(LanguageModel<T>& model, std::optional<int64_t> ring, int64_t tokens) {
  model.set_decode_ring(ring);
  std::vector<T> logits;
  ModelState<T> state = prompted(model, kPrompt, 3, logits);
  Greedy<T> greedy(model, state);
  greedy.begin(0, logits);
  Text<T> text;
  for (int64_t i = 0; i < tokens; ++i) {
    text.ids.push_back(greedy.next()[0]);
    text.logits.push_back(greedy.logits(0));
  }
  EXPECT_EQ(state.positions(), std::vector<int64_t>{kPrompt + tokens});
  for (int64_t layer = 0; layer < state.layers(); ++layer) {
    for (const char* name : {"s", "a"}) text.states.push_back(state.values(layer, name));
  }
  return text;
}

template <class T>
void expect_near(const Text<T>& got, const Text<T>& want, double bound) {
  ASSERT_EQ(got.ids, want.ids);
  for (size_t i = 0; i < want.logits.size(); ++i)
    ASSERT_LE(distance(got.logits[i], want.logits[i]), bound) << "token " << i;
  for (size_t i = 0; i < want.states.size(); ++i) {
    if (want.states[i].empty()) continue;
    EXPECT_LE(distance(got.states[i], want.states[i]), bound) << "state " << i;
  }
}

std::vector<std::string> ring_rules() {
  std::vector<std::string> list;
  for (const Preset& preset : presets()) {
    if (has_ring(preset.rule, FW_DEVICE_CPU)) list.emplace_back(preset.name);
  }
  return list;
}
ModelConfig config_of(const std::string& rule) {
  ModelConfig config = small_config(rule);
  config.num_v_heads = 4;
  return config;
}
// Layers of every kind, two of which have a ring.
ModelConfig hybrid_config() {
  ModelConfig config = small_config("gated_deltanet2");
  config.num_hidden_layers = 4;
  config.layers = {"recurrent", "ssd", "attention", "rwkv7"};
  config.ssd.head_dim = 4, config.ssd.state_size = 8;
  config.attention.num_heads = 2;
  config.rwkv7.head_dim = 4;
  return config;
}

class RingDecoding : public ::testing::TestWithParam<std::string> {};
INSTANTIATE_TEST_SUITE_P(Rules, RingDecoding, ::testing::ValuesIn(ring_rules()));

TEST_P(RingDecoding, FoldedAfterEveryTokenItHasTheBitsOfSteps) {
  LanguageModel<float> model = noisy_model<float>(config_of(GetParam()));
  const Text<float> steps = text_of(model, 0, 9), got = text_of(model, 1, 9);
  EXPECT_EQ(got.ids, steps.ids);
  EXPECT_EQ(got.logits, steps.logits);
  EXPECT_EQ(got.states, steps.states);
}

TEST_P(RingDecoding, TheTextIsThatOfSteps) {
  LanguageModel<float> model = noisy_model<float>(config_of(GetParam()));
  LanguageModel<double> precise = noisy_model<double>(config_of(GetParam()));
  const Text<float> steps = text_of(model, 0, 20);
  const Text<double> precise_steps = text_of(precise, 0, 20);
  for (const int64_t tokens : {2, 5, 16, 64}) {
    SCOPED_TRACE(::testing::Message() << "ring of " << tokens);
    expect_near(text_of(model, tokens, 20), steps, 1e-4);
    expect_near(text_of(precise, tokens, 20), precise_steps, 1e-10);
  }
}

TEST(RingDecoding, OfHybridsToo) {
  LanguageModel<float> model = noisy_model<float>(hybrid_config());
  const Text<float> steps = text_of(model, 0, 40);
  EXPECT_EQ(text_of(model, 1, 40).logits, steps.logits);
  expect_near(text_of(model, 16, 40), steps, 1e-4);
  // Where nobody gives a number, the CPU writes states.
  EXPECT_EQ(text_of(model, std::nullopt, 40).logits, steps.logits);
}

// Against a state that is read in the middle of the ring, by whoever reads states.
TEST(RingDecoding, InTheMiddleOfARingAStateIsWhole) {
  const ModelConfig config = hybrid_config();
  LanguageModel<double> model = noisy_model<double>(config);
  const TempFolder folder;
  const std::string path = folder.path("state");
  std::vector<double> logits;
  model.set_decode_ring(0);
  ModelState<double> stepped = prompted(model, kPrompt, 3, logits);
  Greedy<double> steps(model, stepped);
  steps.begin(0, logits);
  model.set_decode_ring(8);
  ModelState<double> state = prompted(model, kPrompt, 3, logits);
  Greedy<double> ring(model, state);
  ring.begin(0, logits);
  const auto compare = [&](const ModelState<double>& got, const ModelState<double>& want, const char* what) {
    EXPECT_EQ(got.positions(), want.positions()) << what;
    for (int64_t layer = 0; layer < config.num_hidden_layers; ++layer) {
      for (const StateTensor& tensor : config.layer_state(layer)) {
        EXPECT_LE(distance(got.values(layer, tensor.name), want.values(layer, tensor.name)), 1e-10)
            << what << ", layer " << layer << ' ' << tensor.name;
      }
    }
  };
  const auto go_on = [&](int tokens) {
    for (int i = 0; i < tokens; ++i) ASSERT_EQ(ring.next(), steps.next());
    ASSERT_LE(distance(ring.logits(0), steps.logits(0)), 1e-10);
  };
  go_on(3);
  compare(state, stepped, "values()");
  go_on(5);
  {
    const ModelState<double> copy = state;
    compare(copy, stepped, "a copy");
  }
  go_on(4);
  {
    ModelState<double> other(config, 1);
    other = state;
    compare(other, stepped, "an assigned copy");
  }
  go_on(10);
  state.save(path, config.rule, model.hash());
  {
    ModelState<double> loaded(config, 1);
    loaded.load(path, config.rule, model.hash());
    compare(loaded, stepped, "a saved one");
  }
  go_on(3);
  {
    ModelState<double> many(config, 2);
    many.put(1, state);
    ModelState<double> expected(config, 2);
    expected.put(1, stepped);
    compare(many, expected, "one in a slot");
  }
  go_on(7);
  // A prompt of several tokens, one of a single token, and an evaluation that goes on from the state.
  for (const int64_t length : {6, 1}) {
    const std::vector<int32_t> more = random_ids(length, config.vocab_size, 9);
    steps.begin(0, read(model, stepped, more));
    ring.begin(0, read(model, state, more));
    compare(state, stepped, "after a prompt");
    go_on(5);
  }
  const std::vector<int32_t> ids = random_ids(12, config.vocab_size, 10);
  EXPECT_NEAR(model.evaluate(ids, ids, SeqLayout({0, 12}), &state).nll,
              model.evaluate(ids, ids, SeqLayout({0, 12}), &stepped).nll, 1e-9);
  compare(state, stepped, "after an evaluation");
}

// The same bits from a state that was saved in the middle of a ring, and from the one that went on.
TEST(RingDecoding, ASavedStateGoesOnWithTheSameBits) {
  LanguageModel<float> model = noisy_model<float>(hybrid_config());
  model.set_decode_ring(5);
  const TempFolder folder;
  const std::string path = folder.path("state");
  std::vector<float> logits;
  ModelState<float> state = prompted(model, kPrompt, 3, logits);
  Greedy<float> greedy(model, state);
  greedy.begin(0, logits);
  for (int i = 0; i < 8; ++i) greedy.next();
  state.save(path, model.config().rule, model.hash());
  // What a decoder's ring holds when another state takes the place of the one that it was of is dropped.
  ModelState<float> other(model.config(), 1);
  Greedy<float> goes_on(model, other);
  goes_on.begin(0, logits);
  for (int i = 0; i < 3; ++i) goes_on.next();
  other.load(path, model.config().rule, model.hash());
  goes_on.begin(0, greedy.logits(0));
  for (int i = 0; i < 12; ++i) {
    ASSERT_EQ(goes_on.next(), greedy.next());
    ASSERT_EQ(goes_on.logits(0), greedy.logits(0)) << "token " << i;
  }
  other.reset();
  for (const float x : other.values(0, "s")) ASSERT_EQ(x, 0.0F);
}

// A slot's bits depend neither on the others nor on who was there before.
TEST(RingDecoding, SlotsThatBeginAtOtherTimesHaveTheBitsOfEachAlone) {
  const ModelConfig config = hybrid_config();
  LanguageModel<float> model = noisy_model<float>(config);
  model.set_decode_ring(4);
  constexpr int64_t kSlots = 3, kTokens = 14;
  std::vector<std::vector<float>> want(kSlots + 1);
  std::vector<std::vector<int32_t>> ids(kSlots + 1);
  std::vector<ModelState<float>> prompts;
  std::vector<std::vector<float>> first(kSlots + 1);
  for (size_t n = 0; n <= kSlots; ++n) {
    prompts.push_back(prompted(model, 5 + static_cast<int64_t>(n), n + 1, first[n]));
    ModelState<float> alone = prompts[n];
    Greedy<float> greedy(model, alone);
    greedy.begin(0, first[n]);
    for (int64_t i = 0; i < kTokens; ++i) ids[n].push_back(greedy.next()[0]);
    want[n] = greedy.logits(0);
  }
  ModelState<float> states(config, kSlots);
  Greedy<float> together(model, states);
  std::vector<int64_t> text(kSlots, -1);
  std::vector<size_t> done(kSlots, 0);
  const auto put = [&](size_t slot, size_t n) {
    states.put(static_cast<int64_t>(slot), prompts[n]);
    together.begin(static_cast<int64_t>(slot), first[n]);
    text[slot] = static_cast<int64_t>(n), done[slot] = 0;
  };
  for (int64_t i = 0; i < kTokens + 20; ++i) {
    if (i == 0) put(1, 1);
    if (i == 2) put(0, 0);
    if (i == 5) put(2, 2);
    if (i == 2 + 3) put(0, 3);  // in the middle of a ring, another text takes the slot
    const std::vector<int32_t> drawn = together.next();
    for (size_t slot = 0; slot < kSlots; ++slot) {
      if (text[slot] < 0 || done[slot] == kTokens) continue;
      const auto n = static_cast<size_t>(text[slot]);
      ASSERT_EQ(drawn[slot], ids[n][done[slot]]) << "slot " << slot << " token " << done[slot];
      if (++done[slot] < kTokens) continue;
      EXPECT_EQ(together.logits(static_cast<int64_t>(slot)), want[n]) << "slot " << slot;
    }
  }
  EXPECT_EQ(done, std::vector<size_t>(kSlots, kTokens));
}

TEST(RingDecoding, RingsAreCountedWithTheState) {
  const ModelConfig config = hybrid_config();
  LanguageModel<float> model = noisy_model<float>(config);
  ModelState<float> state(config, 3);
  const size_t before = state.bytes();
  model.set_decode_ring(6);
  const auto decoder = model.decoder(state);
  size_t numbers = 0;
  for (int64_t layer = 0; layer < config.num_hidden_layers; ++layer) {
    for (const StateTensor& tensor : config.layer_state(layer)) {
      if (tensor.recurrence && has_ring(tensor.recurrence->rule, FW_DEVICE_CPU))
        numbers += static_cast<size_t>(tensor.recurrence->v_heads * ring_width(*tensor.recurrence));
    }
  }
  EXPECT_EQ(numbers, 2U * (8 + 8 + 8) + 6U * (8 + 4 + 1));  // gated_deltanet2 and ssd
  EXPECT_EQ(state.bytes() - before, 3 * (6 * numbers * sizeof(float) + sizeof(int32_t)));
  const ModelState<float> copy = state;
  EXPECT_EQ(copy.bytes(), before) << "a copy has no rings";
  model.set_decode_ring(0);
  model.decoder(state);
  EXPECT_EQ(state.bytes(), before);
}

TEST(RingDecoding, WhatItCannotBeIsRefused) {
  LanguageModel<float> model = noisy_model<float>(small_config("kda"));
  for (const int64_t tokens : {-1, 65}) {
    EXPECT_THAT(error_of([&] { model.set_decode_ring(tokens); }),
                HasSubstr("decode ring: expected 0 to 64 tokens, got " + std::to_string(tokens)));
  }
  EXPECT_EQ(model.decode_ring(), std::nullopt) << "what was refused changes nothing";
  model.set_decode_ring(64);
  EXPECT_EQ(model.decode_ring(), 64);
  LanguageModel<float> without = noisy_model<float>(small_config("dplr"));
  EXPECT_THAT(error_of([&] { without.set_decode_ring(4); }), HasSubstr("none of whose layers has a recurrence with a"));
  without.set_decode_ring(0);
  without.set_decode_ring(std::nullopt);
}

}  // namespace
}  // namespace fw::testing
