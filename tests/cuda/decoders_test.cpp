// Decoders of models on every device there is. A decoder runs alongside passes of the model one after the other. It
// gives the same bits:
// - alone,
// - alongside others,
// - recorded,
// - after a prompt in between,
// - in a slot that another sequence has left.
#include <algorithm>
#include <cmath>

#include "base/device.h"
#include "base/temp_folder.h"
#include "generate/session.h"
#include "model/language_model.h"
#include "nn/decode_ring.h"
#include "nn/recurrence.h"
#include "ops/backend.h"
#include "ops/cpu/sampling.h"
#include "ops/device_check.h"
#include "support/error_of.h"

namespace fw::testing {
namespace {

struct OneModel {
  std::string name;
  ModelConfig config;
};

ModelConfig config_of(const std::string& rule, const std::vector<std::string>& layers) {
  ModelConfig c;
  c.rule = rule;
  c.vocab_size = 260;
  c.hidden_size = 32;
  c.num_hidden_layers = static_cast<int64_t>(layers.size());
  c.layers = layers;
  c.num_heads = 2;
  c.head_dim = 16;
  c.intermediate_size = 48;
  c.window.window = 6;
  c.window.num_kv_heads = 1;
  c.window.num_heads = 2;
  return c;
}

// Experts that not every token passes, and fewer rows of each than tokens.
ModelConfig experts_config() {
  ModelConfig c = config_of("gated_deltanet", {"recurrent", "attention"});
  c.mlp = "experts";
  c.experts.num_experts = 5, c.experts.top_k = 2;
  c.experts.intermediate_size = c.experts.shared_size = 24;
  c.experts.shared_gate = true;
  return c;
}

std::vector<OneModel> decoder_models() {
  return {{"recurrent", config_of("gated_deltanet2", {"recurrent", "recurrent"})},
          {"preconditioned", config_of("precond_gated_deltanet", {"recurrent"})},
          {"hybrid", config_of("gated_deltanet2", {"conv", "recurrent", "window", "attention"})},
          {"ssd", config_of("gated_deltanet2", {"ssd", "mamba"})},
          {"experts", experts_config()}};
}

class Decoders : public ::testing::TestWithParam<std::string> {
 protected:
  // Far from uniform, so that every token seen changes the logits.
  static LanguageModel<float> model_of(const ModelConfig& config, Device& device) {
    LanguageModel<float> model(config, device);
    Random random(5);
    for (const ParamSpec& spec : model.params().specs()) {
      std::vector<double> values(static_cast<size_t>(spec.size()));
      spec.init(values, random);
      std::vector<float> larger;
      larger.reserve(values.size());
      for (const double x : values) larger.push_back(static_cast<float>(3 * x));
      model.params().write_values(spec, larger);
    }
    return model;
  }
  static std::vector<int32_t> some_ids(size_t count, uint64_t seed) {
    Random random(seed);
    std::vector<int32_t> ids(count);
    for (int32_t& id : ids) id = static_cast<int32_t>(random.below(256));
    return ids;
  }
  Device& device() const { return device_named(GetParam()); }
  std::unique_ptr<Tokenizer> tokenizer_ = byte_tokenizer();
};
INSTANTIATE_TEST_SUITE_P(Devices, Decoders, ::testing::ValuesIn([] {
                           std::vector<std::string> list = {"cpu"};
                           if (cases().size() > 2) list.emplace_back("cuda");
                           return list;
                         }()),
                         [](const auto& one) { return one.param; });

const Sampling kDrawn{0.9, 40, 0.95, 0.0, 1.1, 32};

// Logits and ids of a decoder are those of forward_last, to the bit: past the ring's end, over a page of the cache, and
// with a prompt in between.
TEST_P(Decoders, ADecoderIsThePassOfATokenAgainAndAgain) {
  for (const OneModel& one : decoder_models()) {
    SCOPED_TRACE(one.name);
    LanguageModel<float> model = model_of(one.config, device());
    ModelState<float> a(one.config, 1, device()), b(one.config, 1, device());
    std::vector<float> want(260), got(260);
    const Mat<float> logits(want.data(), 1, 260);
    // Of the hybrid, a cache's first page ends soon.
    const std::vector<int32_t> prompt = some_ids(one.name == "hybrid" ? kCacheRows - 8 : 11, 3);
    const SeqLayout first({0, static_cast<int64_t>(prompt.size())});
    model.forward_last(prompt, first, a, logits);
    model.forward_last(prompt, first, b, logits);
    const auto decoder = model.decoder(b);
    std::vector<int32_t> recent = prompt;
    decoder->begin(0, want, recent);
    Random random(7);
    for (int64_t i = 0; i < 12; ++i) {
      if (i == 5) {
        const std::vector<int32_t> more = some_ids(5, 4);
        model.forward_last(more, SeqLayout({0, 5}), a, logits);
        model.forward_last(more, SeqLayout({0, 5}), b, logits);
        recent.insert(recent.end(), more.begin(), more.end());
        decoder->begin(0, want, recent);
      }
      const double uniform = random.uniform();
      decoder->sample(256, kDrawn, {&uniform, 1}, false);
      decoder->step();
      const int32_t id = decoder->wait()[0].id;
      ASSERT_EQ(id, choose_token<float>(std::span(want).first(256), recent, kDrawn, uniform)) << "token " << i;
      recent.push_back(id);
      model.forward_last({&id, 1}, SeqLayout({0, 1}), a, logits);
      decoder->read_logits(0, got);
      ASSERT_EQ(got, want) << "token " << i;
    }
    EXPECT_EQ(a.positions(), b.positions());
    for (int64_t layer = 0; layer < a.layers(); ++layer) {
      for (const char* name : {"s", "tail", "k", "v"})
        EXPECT_EQ(a.values(layer, name), b.values(layer, name)) << layer << ' ' << name;
    }
  }
}

// Each slot gives what its session gives alone, to the bit while there are few; a slot that is left takes another one.
TEST_P(Decoders, SessionsSideBySideGiveWhatTheyGiveAlone) {
  const size_t slots = 3, texts = 5, tokens = 4;
  for (const OneModel& one : decoder_models()) {
    if (one.name == "recurrent" || one.name == "ssd") continue;
    SCOPED_TRACE(one.name);
    LanguageModel<float> model = model_of(one.config, device());
    std::vector<Session> sessions;
    sessions.reserve(texts);
    for (size_t i = 0; i < texts; ++i) {
      sessions.emplace_back(model, *tokenizer_, i + 1);
      sessions[i].prefill(some_ids(3 + 4 * i, i));  // ragged, shorter and longer than the window
    }
    std::vector<std::vector<int32_t>> want(texts), got(texts);
    std::vector<std::vector<double>> logprobs(texts);
    SessionBatch batch(model, *tokenizer_, slots);
    std::vector<size_t> at(slots);
    size_t next = 0;
    for (size_t n = 0; n < slots; ++n) batch.put(static_cast<int64_t>(n), sessions[at[n] = next++]);
    // Texts end at different times: text i has tokens + i of them.
    while (std::any_of(at.begin(), at.end(), [&](size_t i) { return i < texts; })) {
      const std::span<const Drawn> drawn = batch.next(kDrawn, true);
      for (size_t n = 0; n < slots; ++n) {
        if (at[n] == texts) continue;
        got[at[n]].push_back(drawn[n].id);
        logprobs[at[n]].push_back(drawn[n].logprob);
        if (got[at[n]].size() < tokens + at[n]) continue;
        batch.clear(static_cast<int64_t>(n));
        at[n] = next < texts ? next++ : texts;
        if (at[n] < texts) batch.put(static_cast<int64_t>(n), sessions[at[n]]);
      }
    }
    for (size_t i = 0; i < texts; ++i) {
      for (size_t t = 0; t < tokens + i; ++t) {
        double logprob = 0;
        want[i].push_back(sessions[i].next(kDrawn, &logprob));
        ASSERT_EQ(logprob, logprobs[i][t]) << "text " << i << ", token " << t;
      }
      EXPECT_EQ(got[i], want[i]) << "text " << i;
    }
  }
}

// A session that has decoded is saved, copied and told more as one that has only read is.
// Alongside some others a sequence has the bits that it has alongside many: products of 9 to 32 rows are the same
// kernel's, and those of 33 to 64.
TEST_P(Decoders, ASequenceAmongSomeHasItsBitsAmongMany) {
  if (GetParam() != "cuda") GTEST_SKIP() << "said of kernels of the device alone";
  const size_t tokens = 3;
  const auto among = [&](const ModelConfig& config, size_t slots) {
    LanguageModel<float> model = model_of(config, device());
    std::vector<Session> sessions;
    sessions.reserve(slots);
    SessionBatch batch(model, *tokenizer_, static_cast<int64_t>(slots));
    for (size_t i = 0; i < slots; ++i) {
      sessions.emplace_back(model, *tokenizer_, i + 1);
      sessions.back().prefill(some_ids(3 + i % 7, i));
    }
    for (size_t i = 0; i < slots; ++i) batch.put(static_cast<int64_t>(i), sessions[i]);
    std::vector<std::pair<int32_t, double>> drawn;
    for (size_t t = 0; t < tokens; ++t) {
      const std::span<const Drawn> all = batch.next(kDrawn, true);
      for (size_t i = 0; i < 9; ++i) drawn.emplace_back(all[i].id, all[i].logprob);
    }
    return drawn;
  };
  for (const ModelConfig& config : {config_of("gated_deltanet2", {"recurrent", "window"}), experts_config()}) {
    const auto want = among(config, 9);
    EXPECT_EQ(among(config, 17), want);
    if (config.mlp == "experts" && device_info().emulated) continue;  // it takes long
    EXPECT_EQ(among(config, 32), want);
    EXPECT_EQ(among(config, 47), among(config, 33));
  }
}

TEST_P(Decoders, ASessionGoesOnAfterItHasBeenSavedCopiedAndToldMore) {
  const ModelConfig config = config_of("gated_deltanet2", {"recurrent", "window", "attention"});
  LanguageModel<float> model = model_of(config, device());
  const TempFolder folder;
  const std::string path = folder.path("session.safetensors");
  const auto tokens_of = [](Session& session, int count) {
    std::vector<int32_t> ids;
    ids.reserve(static_cast<size_t>(count));
    for (int i = 0; i < count; ++i) ids.push_back(session.next(kDrawn));
    return ids;
  };
  Session session(model, *tokenizer_, 3);
  session.prefill(some_ids(8, 1));
  tokens_of(session, 3);
  session.save(path);
  Session copy = session, loaded(model, *tokenizer_, 9);
  tokens_of(loaded, 2);  // it has a decoder of its own when the file comes
  loaded.load(path);
  const std::vector<int32_t> more = some_ids(4, 2);
  for (Session* one : {&session, &copy, &loaded}) one->prefill(more);
  const std::vector<int32_t> want = tokens_of(session, 5);
  EXPECT_EQ(tokens_of(copy, 5), want);
  EXPECT_EQ(tokens_of(loaded, 5), want);
}

// Slots that nothing was put into go on too, over more than one page of a cache.
TEST_P(Decoders, UnusedSlotsChangeNothing) {
  if (GetParam() == "cuda" && device_info().emulated) GTEST_SKIP() << "too many tokens for the emulation";
  LanguageModel<float> model = model_of(config_of("gated_deltanet2", {"recurrent", "window", "attention"}), device());
  Session session(model, *tokenizer_, 3);
  session.prefill(some_ids(8, 1));
  SessionBatch batch(model, *tokenizer_, 3);
  batch.put(1, session);
  for (int64_t i = 0; i < 2 * kCacheRows + 9; ++i)
    ASSERT_EQ(batch.next(kDrawn, false)[1].id, session.next(kDrawn)) << "token " << i;
}

TEST_P(Decoders, ABatchHasAtLeastOneSlot) {
  LanguageModel<float> model = model_of(config_of("gated_deltanet2", {"recurrent"}), device());
  EXPECT_NE(error_of([&] { SessionBatch(model, *tokenizer_, 0); }).find("at least 1"), std::string::npos);
}

// With a ring that is folded after every token the bits are those without one; with a longer one ids are the same and
// logits are near. A prompt comes in the middle of the ring, and the state goes to a file there.
TEST_P(Decoders, ARingIsTheStatesThatItSpares) {
  for (const OneModel& one : decoder_models()) {
    if (one.name == "experts" || one.name == "hybrid") continue;  // their other layers have no ring
    SCOPED_TRACE(one.name);
    LanguageModel<float> model = model_of(one.config, device());
    const TempFolder folder;
    struct Text {
      std::vector<int32_t> ids;
      std::vector<float> logits;  // of all tokens
      std::vector<float> state;   // of the first layer with one
    };
    const auto text_of = [&](std::optional<int64_t> ring) {
      model.set_decode_ring(ring);
      ModelState<float> state(one.config, 1, device());
      std::vector<float> last(260);
      const Mat<float> logits(last.data(), 1, 260);
      const std::vector<int32_t> prompt = some_ids(11, 3), more = some_ids(5, 4);
      model.forward_last(prompt, SeqLayout({0, 11}), state, logits);
      const auto decoder = model.decoder(state);
      decoder->begin(0, last, prompt);
      Text text;
      for (int64_t i = 0; i < 13; ++i) {
        if (i == 6) {
          model.forward_last(more, SeqLayout({0, 5}), state, logits);
          decoder->begin(0, last, more);
        }
        const double uniform = 0;
        decoder->sample(256, {0.0, 0, 1.0}, {&uniform, 1}, false);
        decoder->step();
        text.ids.push_back(decoder->wait()[0].id);
        decoder->read_logits(0, last);
        text.logits.insert(text.logits.end(), last.begin(), last.end());
      }
      const std::string path = folder.path("state");
      state.save(path, one.config.rule, model.hash());
      ModelState<float> loaded(one.config, 1, device());
      loaded.load(path, one.config.rule, model.hash());
      EXPECT_EQ(loaded.positions(), std::vector<int64_t>{29});
      for (int64_t layer = 0; layer < state.layers() && text.state.empty(); ++layer) {
        text.state = state.values(layer, "s");
        EXPECT_EQ(loaded.values(layer, "s"), text.state);
      }
      return text;
    };
    const Text steps = text_of(0), folded = text_of(1);
    EXPECT_EQ(folded.ids, steps.ids);
    EXPECT_EQ(folded.logits, steps.logits);
    EXPECT_EQ(folded.state, steps.state);
    // Of models, as model_test has it for bf16 activations, and ring_test of the recurrence for float32.
    const double bound = device().kind() == FW_DEVICE_CUDA ? 3e-2 : 1e-4;
    for (const int64_t ring : {4, 16}) {
      const Text got = text_of(ring);
      const auto near = [&](std::span<const float> x, std::span<const float> y, const char* what) {
        expect_near({x.begin(), x.end()}, {y.begin(), y.end()}, bound, what);
      };
      // Up to a token where two are as likely: then each goes its own way.
      const size_t same =
          static_cast<size_t>(std::mismatch(got.ids.begin(), got.ids.end(), steps.ids.begin()).first - got.ids.begin());
      ASSERT_GT(same, 0U);
      near(std::span(got.logits).first(same * 260), std::span(steps.logits).first(same * 260), "logits");
      if (same == steps.ids.size()) {
        near(got.state, steps.state, "states");
      } else {
        const auto before = std::span(steps.logits).subspan((same - 1) * 260, 260);
        const double largest = *std::ranges::max_element(before, {}, [](float x) { return std::abs(x); });
        EXPECT_NEAR(before[static_cast<size_t>(got.ids[same])], before[static_cast<size_t>(steps.ids[same])],
                    bound * std::abs(largest))
            << "token " << same;
      }
    }
  }
}

// What says which rules have a ring agrees with the library, which also has room for one of each size of head.
TEST_P(Decoders, RulesHaveTheRingThatTheLibraryHas) {
  const int32_t position = 0;
  const fw_device kind = device().kind();
  for (const Preset& p : presets()) {
    for (const int64_t dim : {8, 64, 128, 256}) {
      RecurrenceShape shape{p.rule, 2, 2, dim, dim};
      shape.v_first = kind == FW_DEVICE_CUDA;
      shape.ring = {kRingTokens, &position};
      const bool found = error_of([&] { require_ring<float>(shape, 9, device()); }).empty();
      EXPECT_EQ(found, has_ring(p.rule, kind)) << p.name << ' ' << dim;
    }
  }
}

TEST_P(Decoders, HaveTheRingThatIsAskedFor) {
  ModelConfig config = config_of("gated_deltanet", {"recurrent", "attention"});
  LanguageModel<float> model(config, device());
  const auto tokens_of = [&](int64_t sequences) {
    ModelState<float> states(config, sequences, device());
    const auto decoder = model.decoder(states);
    return states.rings() == nullptr ? 0 : states.rings()->tokens();
  };
  EXPECT_EQ(tokens_of(9), 0);
  model.set_decode_ring(3);
  EXPECT_EQ(tokens_of(1), 3);
  model.set_decode_ring(0);
  EXPECT_EQ(tokens_of(9), 0);
}

// With drafts of which some are right, logits and states are those of single tokens: with their bits on the CPU, where
// few rows of a product do not depend on each other. On a GPU gates of several tokens are made by another kernel. Past
// the ring's end, over a page of the cache, with a prompt in between.
TEST_P(Decoders, DraftsHaveTheLogitsAndStatesOfSingleTokens) {
  const bool exact = device().kind() == FW_DEVICE_CPU;
  const auto compare = [&](const std::vector<float>& got, const std::vector<float>& want, double bound,
                           const std::string& what) {
    if (exact) {
      EXPECT_EQ(got, want) << what;
    } else {
      expect_near({got.begin(), got.end()}, {want.begin(), want.end()}, bound, what);
    }
  };
  std::vector<OneModel> list = decoder_models();
  list[3] = {"ssd", config_of("gated_deltanet2", {"ssd", "recurrent"})};
  list.push_back({"rotated", config_of("kda", {"attention", "window"})});
  for (const OneModel& one : list) {
    SCOPED_TRACE(one.name);
    LanguageModel<float> model = model_of(one.config, device());
    for (const int64_t drafts : {3, 7}) {
      SCOPED_TRACE(drafts);
      ModelState<float> single_state(one.config, 1, device()), state(one.config, 1, device());
      std::vector<float> want(260), got(260);
      const Mat<float> logits(want.data(), 1, 260);
      const std::vector<int32_t> prompt = some_ids(one.name == "hybrid" ? kCacheRows - 8 : 11, 3);
      const SeqLayout first({0, static_cast<int64_t>(prompt.size())});
      model.forward_last(prompt, first, single_state, logits);
      model.forward_last(prompt, first, state, logits);
      const auto single = model.decoder(single_state);
      const auto drafted = model.draft_decoder(state, drafts);
      single->begin(0, want, prompt);
      drafted->begin(0, want, prompt);
      Random numbers(7), ahead(7), choices(9);
      int32_t next = drafted->draw(0, 256, kDrawn, ahead.uniform(), false).id;
      for (int pass = 0; pass < 7; ++pass) {
        if (pass == 4) {
          const std::vector<int32_t> more = some_ids(5, 4);
          model.forward_last(more, SeqLayout({0, 5}), single_state, logits);
          model.forward_last(more, SeqLayout({0, 5}), state, logits);
          single->begin(0, want, more);
          drafted->begin(0, want, more);
          numbers = ahead = Random(8);
          next = drafted->draw(0, 256, kDrawn, ahead.uniform(), false).id;
        }
        const size_t tokens = pass == 2 ? 1 : static_cast<size_t>(drafts) + 1;
        // Single tokens tell what to draft. They go as far as the drafts are right.
        std::vector<int32_t> ids;
        const size_t right = 1 + choices.below(tokens);
        std::vector<double> uniform;
        for (size_t t = 0; t < right; ++t) {
          const double number = numbers.uniform();
          single->sample(256, kDrawn, {&number, 1}, false);
          single->step();
          ids.push_back(single->wait()[0].id);
          uniform.push_back(ahead.uniform());
        }
        single->read_logits(0, want);
        while (ids.size() < tokens) ids.push_back((ids.back() + 1) % 256);
        uniform.resize(tokens, 0.5);
        const std::span<const Drawn> drawn =
            drafted->read(static_cast<int64_t>(tokens), ids, 256, kDrawn, uniform, false);
        if (exact) {
          ASSERT_EQ(ids[0], next) << "pass " << pass;
          for (size_t t = 0; t + 1 < right; ++t) ASSERT_EQ(drawn[t].id, ids[t + 1]) << "pass " << pass << " row " << t;
        }
        next = drawn[right - 1].id;
        drafted->keep(0, static_cast<int64_t>(right));
        drafted->read_logits(0, static_cast<int64_t>(right) - 1, got);
        compare(got, want, 3e-2, "logits of pass " + std::to_string(pass));
      }
      EXPECT_EQ(state.positions(), single_state.positions());
      for (int64_t layer = 0; layer < state.layers(); ++layer) {
        for (const char* name : {"s", "a", "tail", "k", "v"}) {
          const std::vector<float> values = single_state.values(layer, name);
          if (!values.empty()) compare(state.values(layer, name), values, 3e-2, name + std::to_string(layer));
        }
      }
    }
  }
}

TEST_P(Decoders, RulesTakeTokensBackWhereTheLibraryDoes) {
  for (const Preset& p : presets()) {
    ModelConfig config = config_of(std::string(p.name), {"recurrent"});
    if (device().kind() == FW_DEVICE_CUDA && p.rule.uses_erase_write()) continue;
    LanguageModel<float> model(config, device());
    EXPECT_EQ(error_of([&] { model.require_drafts(4); }), "") << p.name;
  }
}

// Slots that begin at other times are at other places of their rings.
TEST_P(Decoders, SlotsOfARingHaveTheBitsOfEachAlone) {
  const ModelConfig config = config_of("gated_deltanet", {"recurrent", "ssd"});
  LanguageModel<float> model = model_of(config, device());
  model.set_decode_ring(4);
  std::vector<Session> sessions;
  for (size_t i = 0; i < 3; ++i) {
    sessions.emplace_back(model, *tokenizer_, i + 1);
    sessions[i].prefill(some_ids(3 + 4 * i, i));
  }
  SessionBatch batch(model, *tokenizer_, 2);
  std::vector<std::vector<int32_t>> got(3), want(3);
  size_t first = 0;
  batch.put(0, sessions[0]);
  batch.put(1, sessions[1]);
  for (int i = 0; i < 13; ++i) {
    if (i == 6) batch.put(0, sessions[first = 2]);  // in the middle of the ring of the text before
    const std::span<const Drawn> drawn = batch.next(kDrawn, false);
    got[first].push_back(drawn[0].id);
    got[1].push_back(drawn[1].id);
  }
  for (size_t i = 0; i < 3; ++i) {
    while (want[i].size() < got[i].size()) want[i].push_back(sessions[i].next(kDrawn));
    EXPECT_EQ(got[i], want[i]) << "text " << i;
  }
}

}  // namespace
}  // namespace fw::testing
