// Decoders with drafts (LanguageModel::draft_decoder): texts are those of single tokens, and states are as if what was
// taken back had never come. Passes of few rows have the bits of single tokens.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <string>
#include <vector>

#include "base/temp_folder.h"
#include "model/small_model.h"

namespace fw::testing {
namespace {

using ::testing::HasSubstr;

constexpr int64_t kVocab = 13;  // of small_config()

struct DraftedModel {
  std::string name;
  ModelConfig config;
  friend void PrintTo(const DraftedModel& one, std::ostream* os) { *os << one.name; }
};
std::vector<DraftedModel> drafted_models() {
  std::vector<DraftedModel> list;
  for (const char* rule : {"deltanet", "gated_deltanet2", "kda", "retnet", "precond_gated_deltanet", "comba", "hgrn2"})
    list.push_back({rule, small_config(rule)});
  const auto add = [&](const std::string& name, const std::vector<std::string>& layers) -> ModelConfig& {
    DraftedModel& one = list.emplace_back(DraftedModel{name, small_config("gated_deltanet")});
    one.config.num_hidden_layers = static_cast<int64_t>(layers.size());
    one.config.layers = layers;
    return one.config;
  };
  ModelConfig& attention = add("attention", {"recurrent", "attention"});
  attention.attention.num_heads = 4, attention.attention.num_kv_heads = 2;
  attention.attention.head_dim = 6, attention.attention.rope_theta = 10000;
  add("attention_alone", {"attention"}).attention.num_heads = 2;
  ModelConfig& window = add("window", {"window", "recurrent"});
  window.window.num_heads = 2, window.window.window = 5;
  window.window.rope_theta = 100;
  add("conv", {"conv", "recurrent"});
  ModelConfig& many = add("hybrid", {"recurrent", "ssd", "attention", "rwkv7", "window"});
  many.ssd.head_dim = 4, many.ssd.state_size = 8;
  many.attention.num_heads = 2;
  many.rwkv7.head_dim = 4;
  many.window.num_heads = 2, many.window.window = 3;
  ModelConfig& mla = add("mla", {"mla", "recurrent"});
  mla.mla.num_heads = 2, mla.mla.kv_rank = 6, mla.mla.key_dim = 4, mla.mla.shared_key_dim = 2, mla.mla.value_dim = 4;
  ModelConfig& mix = add("channel_mix", {"rwkv7"});
  mix.rwkv7.head_dim = 4;
  mix.mlp = "channel_mix";
  return list;
}

ModelConfig drafted_config(const std::string& name) {
  for (const DraftedModel& one : drafted_models()) {
    if (one.name == name) return one.config;
  }
  return {};
}

template <class T>
std::vector<T> read_prompt(LanguageModel<T>& model, ModelState<T>& state, const std::vector<int32_t>& ids) {
  Logits<T> last(1, kVocab);
  model.forward_last(ids, SeqLayout({0, static_cast<int64_t>(ids.size())}), state, last.mat());
  return last.values;
}

// Texts that begin with prompts of different lengths, and how they go on.
template <class T>
struct Prompts {
  Prompts(LanguageModel<T>& model, size_t count) {
    for (size_t n = 0; n < count; ++n) {
      ids.push_back(random_ids(static_cast<int64_t>(1 + 6 * n), kVocab, n + 3));
      states.emplace_back(model.config(), 1);
      logits.push_back(read_prompt(model, states.back(), ids.back()));
    }
  }
  ModelState<T> together(const ModelConfig& config) const {
    ModelState<T> all(config, static_cast<int64_t>(states.size()));
    for (size_t n = 0; n < states.size(); ++n) all.put(static_cast<int64_t>(n), states[n]);
    return all;
  }
  std::vector<std::vector<int32_t>> ids;
  std::vector<ModelState<T>> states;
  std::vector<std::vector<T>> logits;
};

Sampling greedy_sampling() {
  Sampling sampling;
  sampling.temperature = 0;
  return sampling;
}

// The random number of a text's token.
double uniform_of(size_t text, size_t token) { return Random(1000 * text + token).uniform(); }

// Single tokens of every text, each drawn from the logits after those before it; the state after them.
template <class T>
std::vector<std::vector<int32_t>> by_single_tokens(LanguageModel<T>& model, const Prompts<T>& prompts,
                                                   const std::vector<size_t>& lengths, const Sampling& sampling,
                                                   std::vector<ModelState<T>>& states) {
  std::vector<std::vector<int32_t>> texts(lengths.size());
  for (size_t n = 0; n < lengths.size(); ++n) {
    ModelState<T>& state = states.emplace_back(prompts.states[n]);
    const auto decoder = model.decoder(state);
    decoder->begin(0, prompts.logits[n], prompts.ids[n]);
    while (texts[n].size() < lengths[n]) {
      const double uniform = uniform_of(n, texts[n].size());
      decoder->sample(kVocab, sampling, {&uniform, 1}, false);
      decoder->step();
      texts[n].push_back(decoder->wait()[0].id);
    }
  }
  return texts;
}

// What is drafted in the place of a token of a text, which single tokens gave.
using Drafts = std::function<int32_t(size_t text, size_t token, int32_t right)>;
int32_t right_draft(size_t, size_t, int32_t right) { return right; }
int32_t wrong_draft(size_t, size_t, int32_t right) { return (right + 1) % kVocab; }
int32_t some_draft(size_t text, size_t token, int32_t right) {
  return Random(77 + 31 * text + token).below(3) == 0 ? (right + 1) % static_cast<int32_t>(kVocab) : right;
}

// A sequence's part of a state's tensor.
template <class T>
std::vector<T> state_part(const ModelState<T>& state, int64_t layer, const StateTensor& tensor, size_t n) {
  const std::vector<T> all = state.values(layer, tensor.name);
  const auto size_of = [&](size_t i) {
    return tensor.kind == StateKind::kCache ? state.positions()[i] * tensor.shape[1] : tensor.size();
  };
  int64_t first = 0;
  for (size_t i = 0; i < n; ++i) first += size_of(i);
  return {all.begin() + first, all.begin() + first + size_of(n)};
}

template <class T>
void expect_state(const ModelConfig& config, const ModelState<T>& got, size_t n, const ModelState<T>& want,
                  double bound) {
  EXPECT_EQ(got.positions()[n], want.positions()[0]);
  for (int64_t layer = 0; layer < got.layers(); ++layer) {
    for (const StateTensor& tensor : config.layer_state(layer)) {
      SCOPED_TRACE(::testing::Message() << "text " << n << ", layer " << layer << ' ' << tensor.name);
      const std::vector<T> part = state_part(got, layer, tensor, n), one = want.values(layer, tensor.name);
      if (bound == 0) {
        EXPECT_EQ(part, one);
      } else {
        EXPECT_LE(distance(part, one), bound);
      }
    }
  }
}

// The texts with drafts: as many tokens of each as `texts` has, after which its state is compared. Then it goes on.
template <class T>
void expect_with_drafts(LanguageModel<T>& model, const Prompts<T>& prompts,
                        const std::vector<std::vector<int32_t>>& texts, const std::vector<ModelState<T>>& want,
                        const Sampling& sampling, int64_t drafts, const Drafts& draft_of, double bound) {
  const size_t count = texts.size();
  ModelState<T> state = prompts.together(model.config());
  const auto decoder = model.draft_decoder(state, drafts);
  ASSERT_EQ(decoder->most_tokens(), drafts + 1);
  std::vector<std::vector<int32_t>> got(count);
  std::vector<int32_t> next(count);
  std::vector<char> whole(count, 0);
  for (size_t n = 0; n < count; ++n) {
    decoder->begin(static_cast<int64_t>(n), prompts.logits[n], prompts.ids[n]);
    next[n] = decoder->draw(static_cast<int64_t>(n), kVocab, sampling, uniform_of(n, 0), false).id;
  }
  for (size_t passes = 1; std::count(whole.begin(), whole.end(), 0) > 0; ++passes) {
    // Every fourth pass has no drafts.
    const size_t tokens = passes % 4 == 0 ? 1 : static_cast<size_t>(drafts) + 1;
    std::vector<int32_t> ids;
    std::vector<double> uniform;
    for (size_t n = 0; n < count; ++n) {
      ids.push_back(next[n]);
      for (size_t t = 1; t < tokens; ++t) {
        const size_t at = got[n].size() + t;
        ids.push_back(draft_of(n, at, at < texts[n].size() ? texts[n][at] : 0));
      }
      for (size_t t = 1; t <= tokens; ++t) uniform.push_back(uniform_of(n, got[n].size() + t));
    }
    const std::span<const Drawn> drawn =
        decoder->read(static_cast<int64_t>(tokens), ids, kVocab, sampling, uniform, false);
    std::vector<size_t> ended;
    for (size_t n = 0; n < count; ++n) {
      const size_t first = n * tokens;
      size_t kept = 1;
      while (kept < tokens && drawn[first + kept - 1].id == ids[first + kept]) ++kept;
      decoder->keep(static_cast<int64_t>(n), static_cast<int64_t>(kept));
      // It may end inside of what it keeps.
      const size_t left = whole[n] != 0 ? kept : texts[n].size() - got[n].size();
      if (left <= kept && whole[n] == 0) {
        whole[n] = 1, kept = left;
        decoder->keep(static_cast<int64_t>(n), static_cast<int64_t>(kept));
        ended.push_back(n);
      }
      got[n].insert(got[n].end(), ids.begin() + static_cast<int64_t>(first),
                    ids.begin() + static_cast<int64_t>(first + kept));
      next[n] = drawn[first + kept - 1].id;
    }
    for (const size_t n : ended) {
      ASSERT_EQ(got[n], texts[n]) << "text " << n;
      expect_state(model.config(), state, n, want[n], bound);
    }
  }
}

class DraftDecoding : public ::testing::TestWithParam<DraftedModel> {};
INSTANTIATE_TEST_SUITE_P(Models, DraftDecoding, ::testing::ValuesIn(drafted_models()),
                         [](const auto& one) { return one.param.name; });

template <class T>
void expect_texts(const ModelConfig& config, const std::vector<size_t>& counts, const std::vector<int64_t>& all_drafts,
                  const Sampling& sampling, double bound) {
  LanguageModel<T> model = noisy_model<T>(config);
  for (const size_t count : counts) {
    const Prompts<T> prompts(model, count);
    const std::vector<size_t> all_lengths{25, 18, 22};
    const std::vector<size_t> lengths(all_lengths.begin(), all_lengths.begin() + static_cast<int64_t>(count));
    std::vector<ModelState<T>> states;
    const std::vector<std::vector<int32_t>> texts = by_single_tokens(model, prompts, lengths, sampling, states);
    for (const int64_t drafts : all_drafts) {
      const auto few = static_cast<int64_t>(count) * (drafts + 1) <= kExactRows;
      int policy = 0;
      for (const Drafts& draft_of : {Drafts(right_draft), Drafts(wrong_draft), Drafts(some_draft)}) {
        SCOPED_TRACE(::testing::Message() << count << " texts, " << drafts << " drafts, policy " << policy++);
        expect_with_drafts(model, prompts, texts, states, sampling, drafts, draft_of, few ? 0 : bound);
      }
    }
  }
}

TEST_P(DraftDecoding, TheTextIsThatOfSingleTokens) {
  expect_texts<float>(GetParam().config, {1, 3}, {1, 4, 7}, greedy_sampling(), 1e-4);
  expect_texts<double>(GetParam().config, {3}, {7}, greedy_sampling(), 1e-10);
}

TEST_P(DraftDecoding, SoItIsWithRandomNumbers) {
  Sampling sampling;
  sampling.temperature = 0.9;
  sampling.top_p = 0.95;
  expect_texts<float>(GetParam().config, {3}, {4}, sampling, 0);
  sampling.repetition_penalty = 1.3;
  sampling.repetition_window = 9;
  expect_texts<float>(GetParam().config, {3}, {4}, sampling, 0);
}

// Whoever reads or replaces a state between passes finds it whole, and the decoder goes on from it.
TEST(DraftDecoder, OthersMayUseTheState) {
  const ModelConfig config = drafted_config("hybrid");
  LanguageModel<double> model = noisy_model<double>(config);
  const TempFolder folder;
  const Prompts<double> prompts(model, 1);
  ModelState<double> state = prompts.states[0], want = prompts.states[0];
  const auto decoder = model.draft_decoder(state, 4);
  std::vector<double> logits = prompts.logits[0];
  const auto read_three = [&](uint64_t seed) {
    decoder->begin(0, logits, {});
    const std::vector<int32_t> ids = random_ids(5, kVocab, seed);
    decoder->read(5, ids, kVocab, greedy_sampling(), std::vector<double>(5), false);
    decoder->keep(0, 3);
    decoder->read_logits(0, 2, logits);
    const std::vector<double> expected = read_prompt(model, want, {ids[0], ids[1], ids[2]});
    EXPECT_LE(distance(logits, expected), 1e-10);
  };
  const auto compare = [&](const ModelState<double>& got) { expect_state(config, got, 0, want, 1e-10); };
  read_three(1);
  compare(state);
  read_three(2);
  {
    ModelState<double> copy(config, 1);
    copy = state;
    compare(copy);
    ModelState<double> many(config, 2);
    many.put(1, state);
    expect_state(config, many, 1, want, 1e-10);
  }
  read_three(3);
  state.save(folder.path("state"), config.rule, model.hash());
  const std::vector<double> saved_logits = logits;
  ModelState<double> loaded(config, 1);
  loaded.load(folder.path("state"), config.rule, model.hash());
  compare(loaded);
  read_three(4);
  const std::vector<int32_t> more = random_ids(6, kVocab, 9);
  logits = read_prompt(model, state, more);
  EXPECT_LE(distance(logits, read_prompt(model, want, more)), 1e-10);
  read_three(5);
  compare(state);
  // A decoder of single tokens takes the state over.
  read_three(6);
  {
    const auto single = model.decoder(state);
    single->begin(0, logits, {});
    const double uniform = 0;
    single->sample(kVocab, greedy_sampling(), {&uniform, 1}, false);
    single->step();
    read_prompt(model, want, {single->wait()[0].id});
    compare(state);
  }
  // Another state takes the place of the one that was read.
  state.load(folder.path("state"), config.rule, model.hash());
  expect_state(config, state, 0, loaded, 0);
  logits = saved_logits;
  want = loaded;
  read_three(7);
  compare(state);
}

// Pages of caches come as a text grows, also those that only rows which are taken back reach.
TEST(DraftDecoder, CachesGrow) {
  const ModelConfig config = drafted_config("attention");
  LanguageModel<float> model = noisy_model<float>(config);
  const Prompts<float> prompts(model, 2);
  std::vector<ModelState<float>> states;
  const std::vector<std::vector<int32_t>> texts =
      by_single_tokens(model, prompts, {2 * kCacheRows + 20, kCacheRows - 2}, greedy_sampling(), states);
  for (const Drafts& draft_of : {Drafts(right_draft), Drafts(some_draft)})
    expect_with_drafts(model, prompts, texts, states, greedy_sampling(), 7, draft_of, 0);
}

TEST(DraftDecoder, WhatItCannotBeIsRefused) {
  for (const char* kind : {"mamba", "longhorn_diag", "mesa", "mamba3"}) {
    ModelConfig config = small_config("kda");
    config.layers = {"recurrent", kind};
    config.mamba3.head_dim = 4;
    LanguageModel<float> model = noisy_model<float>(config);
    ModelState<float> state(config, 1);
    EXPECT_THAT(error_of([&] { model.draft_decoder(state, 4); }),
                HasSubstr("layer 1 ('" + std::string(kind) + "') takes no tokens back, got 4"));
  }
  LanguageModel<float> model = noisy_model<float>(small_config("kda"));
  for (const int64_t drafts : {-1, 0, 17})
    EXPECT_THAT(error_of([&] { model.require_drafts(drafts); }),
                HasSubstr("drafts: expected 1 to 16, got " + std::to_string(drafts)));
  model.require_drafts(16);
  model.set_decode_ring(4);
  EXPECT_THAT(error_of([&] { model.require_drafts(2); }), HasSubstr("a decode ring of 4 tokens, got 2"));
}

}  // namespace
}  // namespace fw::testing
