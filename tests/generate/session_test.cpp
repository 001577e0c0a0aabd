#include "generate/session.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <sstream>

#include "base/error.h"
#include "base/safetensors.h"

namespace fw {
namespace {

namespace fs = std::filesystem;

const Sampling kSampling{0.9, 40, 0.95};
const Sampling kGreedy{0.0, 0, 1.0};

ModelConfig small_model(const std::string& rule = "gated_deltanet2") {
  ModelConfig config;
  config.rule = rule;
  config.hidden_size = 32;
  config.num_hidden_layers = 2;
  config.num_heads = 2;
  config.head_dim = 8;
  config.intermediate_size = 48;
  config.init = "normal";
  return config;
}

LanguageModel<float> random_model(const ModelConfig& config, uint64_t seed = 5) {
  LanguageModel<float> model(config);
  Random random(seed);
  model.init(random);
  // Far from uniform, so that every token seen changes the logits.
  for (float& value : model.params().values()) value *= 4;
  return model;
}

std::vector<int32_t> some_ids(size_t count) {
  Random random(17);
  std::vector<int32_t> ids(count);
  for (int32_t& id : ids) id = static_cast<int32_t>(random.below(256));
  return ids;
}

std::vector<int32_t> generate(Session& session, int count, const Sampling& sampling = kSampling) {
  std::vector<int32_t> ids;
  ids.reserve(static_cast<size_t>(count));
  for (int i = 0; i < count; ++i) ids.push_back(session.next(sampling));
  return ids;
}

class SessionTest : public ::testing::Test {
 protected:
  SessionTest() {
    std::string pattern = (fs::temp_directory_path() / "fastweight-session-XXXXXX").string();
    folder_ = ::mkdtemp(pattern.data());
  }
  ~SessionTest() override { fs::remove_all(folder_); }
  std::string path(const std::string& name) const { return folder_ + "/" + name; }

  std::string folder_;
  std::unique_ptr<Tokenizer> tokenizer_ = byte_tokenizer();
};

// A sampler's log-probabilities are those that the trainer computes of the same text.
TEST_F(SessionTest, LogProbabilitiesAreThoseOfTraining) {
  for (const char* rule : {"gated_deltanet2", "precond_kda"}) {
    LanguageModel<float> model = random_model(small_model(rule));
    model.set_decode_bits(true);
    std::vector<int32_t> ids = some_ids(70);
    const size_t prompt = ids.size();
    Session session(model, *tokenizer_, 1);
    session.prefill(ids);
    std::vector<double> sampled(90);
    for (double& logprob : sampled) ids.push_back(session.next(kSampling, &logprob));
    std::vector<int32_t> targets(ids.begin() + 1, ids.end());
    targets.push_back(-1);
    std::vector<float> nll(ids.size());
    model.evaluate(ids, targets, SeqLayout({0, static_cast<int64_t>(ids.size())}), nullptr, nll.data());
    for (size_t i = 0; i < sampled.size(); ++i)
      EXPECT_EQ(sampled[i], -static_cast<double>(nll[prompt - 1 + i])) << rule << ", token " << i;
  }
}

TEST_F(SessionTest, GreedyContinuesWithTheLikeliestToken) {
  LanguageModel<float> model = random_model(small_model());
  std::vector<int32_t> ids = some_ids(37);
  Session session(model, *tokenizer_, 1);
  session.prefill(ids);
  for (int i = 0; i < 20; ++i) {
    std::vector<float> logits(ids.size() * 256);
    const int64_t length = static_cast<int64_t>(ids.size());
    model.forward_all(ids, SeqLayout({0, length}), nullptr, Mat<float>(logits.data(), length, 256));
    const auto last = logits.end() - 256, best = std::max_element(last, logits.end());
    const int32_t next = session.next(kGreedy);
    // The step form and the chunk form round differently: equal but for near ties.
    EXPECT_GE(*(last + next), *best - 1e-3f * std::abs(*best)) << i;
    ids.push_back(next);
  }
  EXPECT_EQ(session.tokens_seen(), 57);
}

TEST_F(SessionTest, PrefillMayBeSplitInAnyWay) {
  LanguageModel<float> model = random_model(small_model());
  const std::vector<int32_t> ids = some_ids(130);
  // What the session has learned of the prompt, seen through the file that it saves.
  const auto logits_after = [&](const std::function<void(Session&)>& feed) {
    Session session(model, *tokenizer_, 1);
    feed(session);
    EXPECT_EQ(session.tokens_seen(), 130);
    session.save(path("state"));
    std::vector<float> logits(256);
    const int64_t vocab = 256;
    SafetensorsReader(path("state")).read<float>("session.logits", {&vocab, 1}, logits);
    return logits;
  };
  const std::vector<float> whole = logits_after([&](Session& s) { s.prefill(ids); });
  const float scale = std::abs(
      *std::max_element(whole.begin(), whole.end(), [](float a, float b) { return std::abs(a) < std::abs(b); }));
  for (const int64_t chunk : {1, 2, 3, 63, 64, 65, 129}) {
    const std::vector<float> split = logits_after([&](Session& s) { s.prefill(ids, chunk); });
    for (size_t i = 0; i < 256; ++i) ASSERT_NEAR(split[i], whole[i], 1e-4 * scale) << "chunk " << chunk << " id " << i;
  }
  const std::vector<float> twice = logits_after([&](Session& s) {
    s.prefill(std::span(ids).first(65), 65);
    s.prefill({}, 5);
    s.prefill(std::span(ids).subspan(65), 65);
  });
  EXPECT_EQ(twice, logits_after([&](Session& s) { s.prefill(ids, 65); }));
}

TEST_F(SessionTest, TheSameSeedGivesTheSameTextAndAnotherAnother) {
  LanguageModel<float> model = random_model(small_model());
  Session a(model, *tokenizer_, 7), b(model, *tokenizer_, 7), c(model, *tokenizer_, 8);
  const auto text = generate(a, 60);
  EXPECT_EQ(text, generate(b, 60));
  EXPECT_NE(text, generate(c, 60));
}

TEST_F(SessionTest, AnEmptySessionStartsFromANewline) {
  LanguageModel<float> model = random_model(small_model());
  Session empty(model, *tokenizer_, 7), newline(model, *tokenizer_, 7);
  const int32_t id = '\n';
  newline.prefill({&id, 1});
  EXPECT_EQ(generate(empty, 30), generate(newline, 30));
  EXPECT_EQ(empty.tokens_seen(), 31);
}

// For a rule with a state beside S (the preconditioner's) and for one without convolution, too.
TEST_F(SessionTest, SavedAndLoadedItGoesOnAsIfNeverStopped) {
  for (const char* rule : {"gated_deltanet2", "precond_gated_deltanet", "retnet"}) {
    ModelConfig config = small_model(rule);
    if (config.rule == "retnet") config.conv_size = 0;
    LanguageModel<float> model = random_model(config);
    Session session(model, *tokenizer_, 3);
    session.prefill(some_ids(50));
    generate(session, 10);
    session.save(path("saved"));
    const auto expected = generate(session, 40);

    Session other(model, *tokenizer_, 1234);
    generate(other, 5);
    other.load(path("saved"));
    EXPECT_EQ(other.tokens_seen(), 60) << rule;
    EXPECT_EQ(generate(other, 40), expected) << rule;
  }
}

TEST_F(SessionTest, ACopyGoesOnByItself) {
  LanguageModel<float> model = random_model(small_model());
  Session session(model, *tokenizer_, 3);
  session.prefill(some_ids(20));
  Session fork = session;
  const auto expected = generate(session, 30);
  EXPECT_EQ(generate(fork, 30), expected);
}

// With a ring that is in its middle when the session is saved, forked, or reads more. It holds tokens then that are not
// in the state.
TEST_F(SessionTest, WithARingItIsTheSameSession) {
  LanguageModel<float> model = random_model(small_model());
  const auto conversation = [&](std::optional<int64_t> ring) {
    model.set_decode_ring(ring);
    Session session(model, *tokenizer_, 3);
    std::vector<int32_t> said;
    for (const size_t turn : {20U, 1U, 7U}) {
      session.prefill(some_ids(turn));
      const std::vector<int32_t> answer = generate(session, 21, kGreedy);
      said.insert(said.end(), answer.begin(), answer.end());
    }
    return said;
  };
  const std::vector<int32_t> steps = conversation(0);
  EXPECT_EQ(conversation(1), steps);
  EXPECT_EQ(conversation(16), steps);

  model.set_decode_ring(8);
  Session session(model, *tokenizer_, 3);
  session.prefill(some_ids(50));
  const size_t without = session.state_bytes();
  generate(session, 11);
  EXPECT_GT(session.state_bytes(), without);
  session.save(path("saved"));
  Session fork = session;
  EXPECT_EQ(fork.state_bytes(), without) << "a fork has rings of its own when it generates";
  Session other(model, *tokenizer_, 1234);
  generate(other, 5);
  other.load(path("saved"));
  const auto expected = generate(session, 40);
  EXPECT_EQ(generate(other, 40), expected);
  EXPECT_EQ(generate(fork, 40), expected);
  // In a slot beside others, whose rings are elsewhere.
  SessionBatch batch(model, *tokenizer_, 2);
  Session third(model, *tokenizer_, 1);
  third.load(path("saved"));
  Session stranger(model, *tokenizer_, 5);
  batch.put(0, stranger);
  for (int i = 0; i < 3; ++i) batch.next(kSampling, false);
  batch.put(1, third);
  std::vector<int32_t> beside;
  beside.reserve(40);
  for (int i = 0; i < 40; ++i) beside.push_back(batch.next(kSampling, false)[1].id);
  EXPECT_EQ(beside, expected);
}

// Text that repeats, so that there are drafts, of which some are right.
std::vector<int32_t> some_repeating_ids() {
  std::vector<int32_t> ids = some_ids(12);
  for (int i = 0; i < 3; ++i) ids.insert(ids.end(), ids.begin(), ids.begin() + 12);
  return ids;
}

// With the state between tokens that were read together: it is saved, forked, read on, and drawn from with other
// settings. Nothing of that shows. There are few ids, so that some drafts are right.
TEST_F(SessionTest, WithDraftsItIsTheSameSession) {
  ModelConfig config = small_model();
  config.num_hidden_layers = 3;
  config.layers = {"recurrent", "window", "attention"};
  config.window.window = 6;
  config.vocab_size = 7;
  const std::unique_ptr<Tokenizer> tokenizer = id_tokenizer(7);
  LanguageModel<float> model = random_model(config);
  const Sampling penalised{0.7, 0, 1.0, 0.0, 1.2, 20}, at_most{0.7, 0, 1.0, 0.0, 1.2, kMostRecent};
  const auto conversation = [&](int64_t drafts, DraftCounts& counts) {
    Session session(model, *tokenizer, 3);
    session.set_drafts(drafts);
    std::vector<int32_t> said;
    std::vector<double> logprobs;
    const auto speak = [&](Session& of, int count, const Sampling& sampling) {
      for (int i = 0; i < count; ++i) {
        double logprob = 0;
        said.push_back(of.next(sampling, i % 5 == 4 ? &logprob : nullptr));
        logprobs.push_back(logprob);
      }
    };
    speak(session, 3, kGreedy);  // after a start token alone
    for (const int turn : {20, 1, 7}) {
      std::vector<int32_t> ids = turn == 20 ? some_repeating_ids() : some_ids(static_cast<size_t>(turn));
      for (int32_t& id : ids) id %= 7;
      session.prefill(ids);
      for (const Sampling& sampling : {kGreedy, kSampling, penalised, at_most}) speak(session, turn, sampling);
    }
    session.save(path("drafted"));
    Session fork = session;
    speak(fork, 9, kSampling);
    Session loaded(model, *tokenizer, 99);
    loaded.set_drafts(drafts);
    speak(loaded, 4, kGreedy);
    loaded.load(path("drafted"));
    speak(loaded, 9, kSampling);
    fork.reseed(5);
    speak(fork, 9, kSampling);
    said.push_back(static_cast<int32_t>(fork.draw_seed() % 1000));
    speak(fork, 9, kSampling);
    fork.set_drafts(drafts == 0 ? 3 : 0);
    speak(fork, 9, kGreedy);
    speak(session, 30, kGreedy);
    EXPECT_EQ(session.tokens_seen(), 1 + 3 + 48 + 8 + 4 * 28 + 30);
    EXPECT_EQ(session.last_token(), said.back());
    counts = session.draft_counts();
    return std::pair(said, logprobs);
  };
  DraftCounts counts;
  const auto plain = conversation(0, counts);
  EXPECT_EQ(counts.drafted, 0);
  for (const int64_t drafts : {4, 15}) {
    SCOPED_TRACE(drafts);
    const auto got = conversation(drafts, counts);
    EXPECT_EQ(got.first, plain.first);
    EXPECT_EQ(got.second, plain.second);
    EXPECT_GT(counts.drafted, counts.accepted) << "some are taken back";
    EXPECT_GT(counts.accepted, 0);
  }
}

TEST_F(SessionTest, SideBySideWithDraftsEachIsAsAlone) {
  LanguageModel<float> model = random_model(small_model());
  constexpr size_t kTexts = 5, kSlots = 3;
  std::vector<std::vector<int32_t>> want(kTexts), got(kTexts);
  std::vector<Session> sessions;
  for (size_t i = 0; i < kTexts; ++i) {
    sessions.emplace_back(model, *tokenizer_, i + 1);
    sessions[i].set_drafts(i % 2 == 0 ? 4 : 0);  // a batch has its own
    sessions[i].prefill(i == 1 ? some_repeating_ids() : some_ids(5 + 7 * i));
    sessions[i].next(kGreedy);
    Session alone = sessions[i];
    alone.set_drafts(0);
    want[i] = generate(alone, static_cast<int>(20 + 3 * i), kGreedy);
  }
  SessionBatch batch(model, *tokenizer_, kSlots, 4);
  std::vector<size_t> at(kSlots);
  size_t next = 0;
  for (size_t n = 0; n < kSlots; ++n) batch.put(static_cast<int64_t>(n), sessions[at[n] = next++]);
  int64_t drafted = 0;
  while (std::any_of(at.begin(), at.end(), [&](size_t i) { return i < kTexts; })) {
    const std::span<const std::vector<Drawn>> drawn = batch.next_several(kGreedy, false);
    for (size_t n = 0; n < kSlots; ++n) {
      if (at[n] == kTexts) continue;
      for (const Drawn& one : drawn[n]) got[at[n]].push_back(one.id);
      if (got[at[n]].size() < want[at[n]].size()) continue;
      got[at[n]].resize(want[at[n]].size());
      drafted += batch.draft_counts(static_cast<int64_t>(n)).drafted;
      batch.clear(static_cast<int64_t>(n));
      at[n] = next < kTexts ? next++ : kTexts;
      if (at[n] < kTexts) batch.put(static_cast<int64_t>(n), sessions[at[n]]);
    }
  }
  EXPECT_EQ(got, want);
  EXPECT_GT(drafted, 0);
  // One token each without drafts.
  SessionBatch plain(model, *tokenizer_, 1);
  plain.put(0, sessions[0]);
  for (size_t i = 0; i < 5; ++i) {
    const std::span<const std::vector<Drawn>> drawn = plain.next_several(kGreedy, false);
    ASSERT_EQ(drawn[0].size(), 1U);
    EXPECT_EQ(drawn[0][0].id, want[0][i]);
  }
}

TEST_F(SessionTest, DraftsThatCannotBeAreRefused) {
  ModelConfig config = small_model();
  config.layers = {"mesa"};
  LanguageModel<float> model = random_model(config);
  Session session(model, *tokenizer_, 3);
  EXPECT_THROW(session.set_drafts(4), Error);
  session.set_drafts(0);
  EXPECT_THROW(SessionBatch(model, *tokenizer_, 2, 4), Error);
}

TEST_F(SessionTest, TheStateDoesNotGrow) {
  LanguageModel<float> model = random_model(small_model());
  Session session(model, *tokenizer_, 3);
  generate(session, 5);
  const size_t state = session.state_bytes(), scratch = model.scratch_bytes();
  EXPECT_GT(state, 0u);
  generate(session, 500);
  EXPECT_EQ(session.state_bytes(), state);
  EXPECT_EQ(model.scratch_bytes(), scratch);
}

TEST_F(SessionTest, AFileThatDoesNotFitChangesNothing) {
  LanguageModel<float> model = random_model(small_model()), other = random_model(small_model(), 6);
  Session session(model, *tokenizer_, 3);
  session.prefill(some_ids(20));
  session.save(path("good"));
  Session copy = session;
  const auto expected = generate(copy, 20);

  Session stranger(other, *tokenizer_, 3);
  generate(stranger, 3);
  stranger.save(path("stranger"));
  std::ifstream in(path("good"), std::ios::binary);
  std::stringstream content;
  content << in.rdbuf();
  const std::string good = content.str();
  const auto write = [&](const char* name, const std::string& bytes) {
    std::ofstream(path(name), std::ios::binary) << bytes;
  };
  write("empty", "");
  write("truncated", good.substr(0, good.size() - 5));
  std::string flipped = good;
  flipped[good.size() / 2] = static_cast<char>(flipped[good.size() / 2] ^ 4);
  write("flipped", flipped);
  SafetensorsWriter writer;
  const std::vector<float> unrelated = {1, 2};
  writer.add<float>("weight", {2}, unrelated);
  writer.write(path("unrelated"));
  for (const char* name : {"stranger", "empty", "truncated", "flipped", "unrelated", "absent"}) {
    try {
      session.load(path(name));
      ADD_FAILURE() << name << " was loaded";
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), ErrorKind::kUsage) << error.what();
      EXPECT_NE(std::string(error.what()).find(name), std::string::npos) << error.what();
    }
  }
  EXPECT_EQ(generate(session, 20), expected);
}

TEST_F(SessionTest, RefusesIdsAndChunksThatCannotBe) {
  LanguageModel<float> model = random_model(small_model());
  Session session(model, *tokenizer_, 3);
  const std::vector<int32_t> high = {1, 256}, low = {-1};
  EXPECT_THROW(session.prefill(high), Error);
  EXPECT_THROW(session.prefill(low), Error);
  EXPECT_THROW(session.prefill(std::vector<int32_t>{1}, 0), Error);
  EXPECT_EQ(session.tokens_seen(), 0);
  ModelConfig config = small_model();
  config.vocab_size = 200;
  LanguageModel<float> small = random_model(config);
  EXPECT_THROW(Session(small, *tokenizer_, 1), Error);
}

TEST_F(SessionTest, AnotherSeedIsWhatItWouldHaveBeenFromTheStart) {
  LanguageModel<float> model = random_model(small_model());
  Session session(model, *tokenizer_, 3), other(model, *tokenizer_, 8);
  session.prefill(some_ids(20));
  other.prefill(some_ids(20));
  Session fork = session;
  fork.reseed(8);
  const auto expected = generate(other, 30);
  EXPECT_EQ(generate(fork, 30), expected);
  EXPECT_NE(generate(session, 30), expected);
}

// The window reaches over prompt, samples and a saved state.
TEST_F(SessionTest, RepetitionPenaltySeesWhatWasReadAndSaved) {
  LanguageModel<float> model = random_model(small_model());
  Sampling never_again;
  never_again.temperature = 0;
  never_again.repetition_penalty = 1e6;
  never_again.repetition_window = 200;
  Session session(model, *tokenizer_, 3);
  const std::vector<int32_t> prompt = some_ids(50);
  session.prefill(prompt);
  std::vector<int32_t> seen = generate(session, 60, never_again);
  session.save(path("saved"));
  Session loaded(model, *tokenizer_, 1);
  loaded.load(path("saved"));
  const auto rest = generate(session, 60, never_again);
  EXPECT_EQ(generate(loaded, 60, never_again), rest);
  seen.insert(seen.end(), prompt.begin(), prompt.end());
  int repeated = 0;
  for (const int32_t id : rest) repeated += std::find(seen.begin(), seen.end(), id) != seen.end();
  EXPECT_EQ(repeated, 0) << "the largest logit of 256 is positive, and one of a recent id is next to 0 or far down";
}

TEST_F(SessionTest, RecentIdsAreKeptAsLongAsAWindowMayBe) {
  LanguageModel<float> model = random_model(small_model());
  Sampling sampling;
  sampling.repetition_penalty = 1.3;
  sampling.repetition_window = kMostRecent;
  Session session(model, *tokenizer_, 3);
  session.prefill(some_ids(3 * kMostRecent + 100));
  session.save(path("saved"));
  Session loaded(model, *tokenizer_, 1);
  loaded.load(path("saved"));
  EXPECT_EQ(generate(loaded, 20, sampling), generate(session, 20, sampling));
}

// A model may have more ids than its tokenizer; they are never given out.
TEST_F(SessionTest, IdsBeyondTheTokenizerNeverCome) {
  ModelConfig config = small_model();
  config.vocab_size = 2000;
  LanguageModel<float> model = random_model(config);
  Session session(model, *tokenizer_, 3);
  for (const int32_t id : generate(session, 300, {3.0, 0, 1.0})) ASSERT_LT(id, 256);
}

}  // namespace
}  // namespace fw
