// Whole runs: train, evaluate, generate, resume, interrupt; precedence and the resolved run file.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>

#include <chrono>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <thread>

#include "cli/program.h"

namespace fw::test {
namespace {

using testing::HasSubstr;
using Json = nlohmann::json;
using Args = std::vector<std::string>;

// One trained tiny run that the tests below read and do not change.
class Run : public testing::Test {
 protected:
  static void SetUpTestSuite() {
    folder_ = std::make_unique<Folder>();
    spill(*folder_ / "text", small_text());
    trained_ = fw::test::run(tiny_train(*folder_ / "text", *folder_ / "run"));
  }
  static void TearDownTestSuite() { folder_.reset(); }
  void SetUp() override { ASSERT_EQ(trained_.code, 0) << trained_.out << trained_.err; }

  static std::string text() { return *folder_ / "text"; }
  static std::string run_folder() { return *folder_ / "run"; }
  static std::string weights(const std::string& run) { return slurp(run + "/model/model.safetensors"); }

  static std::unique_ptr<Folder> folder_;
  static Outcome trained_;
};
std::unique_ptr<Folder> Run::folder_;
Outcome Run::trained_;

TEST_F(Run, NamesWhatItMade) {
  for (const char* file : {"model/config.json", "model/model.safetensors", "metrics.jsonl", "metrics.csv",
                           "config.toml", "data/train.tokens", "data/valid.tokens"}) {
    EXPECT_TRUE(std::filesystem::exists(run_folder() + "/" + file)) << file;
  }
  EXPECT_THAT(trained_.out, HasSubstr("bits per byte"));
  EXPECT_THAT(trained_.out, HasSubstr("perplexity"));
  // Every path in the list of files exists.
  size_t at = trained_.out.find("files:\n");
  ASSERT_NE(at, std::string::npos);
  at += 7;
  int named = 0;
  const size_t next = trained_.out.find("next:\n");
  ASSERT_NE(next, std::string::npos);
  while (at < next) {
    const size_t end = trained_.out.find('\n', at);
    const std::string line = trained_.out.substr(at, end - at);
    const std::string path = line.substr(2, line.find("  ", 2) - 2);
    EXPECT_TRUE(std::filesystem::exists(path)) << line;
    ++named;
    at = end + 1;
  }
  EXPECT_GE(named, 6);
}

TEST_F(Run, DrawsTheLossCurveOrSaysWhyNot) {
  const std::string svg = slurp(run_folder() + "/loss.svg"), png = slurp(run_folder() + "/loss.png");
  if (trained_.out.find("gnuplot is not installed") != std::string::npos) {
    EXPECT_EQ(svg + png, "");
    return;
  }
  EXPECT_THAT(svg, HasSubstr("<svg"));
  EXPECT_EQ(png.substr(1, 3), "PNG");
}

TEST_F(Run, WithoutGnuplotThereIsANote) {
  Program program(tiny_train(text(), *folder_ / "no-gnuplot"), "/nonexistent");
  const Outcome outcome = program.wait();
  EXPECT_EQ(outcome.code, 0) << outcome.err;
  EXPECT_THAT(outcome.out, HasSubstr("gnuplot is not installed"));
}

TEST_F(Run, WritesForTensorBoardWhenAsked) {
  EXPECT_FALSE(std::filesystem::exists(run_folder() + "/tensorboard"));
  const std::string out = *folder_ / "tensorboard-run";
  const Outcome outcome = fw::test::run(tiny_train(text(), out) + Args{"--tensorboard"});
  ASSERT_EQ(outcome.code, 0) << outcome.err;
  EXPECT_THAT(outcome.out, HasSubstr(out + "/tensorboard/"));
  const std::string events = slurp(out + "/tensorboard/events.out.tfevents.fastweight");
  for (const char* tag : {"train/loss", "lr", "held_out/loss", "held_out/bits_per_byte"})
    EXPECT_THAT(events, HasSubstr(tag));
}

TEST_F(Run, ResolvedRunFileGivesTheSameRun) {
  const Outcome again =
      fw::test::run({"train", run_folder() + "/config.toml", "--out", *folder_ / "again", "--threads", "2"});
  ASSERT_EQ(again.code, 0) << again.err;
  EXPECT_EQ(weights(*folder_ / "again"), weights(run_folder()));
}

TEST_F(Run, OptionWinsOverFileAndFileOverDefault) {
  spill(*folder_ / "r.toml",
        "[train]\nsteps = 5\nbatch = 2\nlength = 32\n[model]\nhidden_size = 16\nnum_hidden_layers = 1\nnum_heads = "
        "2\nhead_dim = 8\n[data]\ntext = \"" +
            text() + "\"\n");
  const Outcome outcome =
      fw::test::run({"train", *folder_ / "r.toml", "--steps", "1", "--out", *folder_ / "precedence"});
  ASSERT_EQ(outcome.code, 0) << outcome.err;
  const std::string config = slurp(*folder_ / "precedence/config.toml");
  EXPECT_THAT(config, HasSubstr("\nsteps = 1\n"));         // option
  EXPECT_THAT(config, HasSubstr("\nbatch = 2\n"));         // file
  EXPECT_THAT(config, HasSubstr("\nbeta2 = 0.95\n"));      // default
  EXPECT_THAT(config, HasSubstr("\nvocab_size = 256\n"));  // resolved
}

TEST_F(Run, ResumeContinuesBitForBit) {
  const std::string out = *folder_ / "resumed";
  const Args config{"train", run_folder() + "/config.toml", "--out", out};
  // A run that checkpoints every 2 steps loses its last checkpoint, as if it had been stopped after step 4.
  ASSERT_EQ(fw::test::run(config + Args{"--checkpoint-every", "2", "--keep", "5"}).code, 0);
  ASSERT_EQ(weights(out), weights(run_folder()));
  ASSERT_TRUE(std::filesystem::remove_all(out + "/checkpoints/step-6") > 0 ||
              std::filesystem::exists(out + "/checkpoints"));
  for (const auto& entry : std::filesystem::directory_iterator(out + "/checkpoints")) {
    const std::string name = entry.path().filename().string();
    if (name.find('6') != std::string::npos) std::filesystem::remove_all(entry.path());
  }
  std::filesystem::remove_all(out + "/model");
  const Outcome resumed = fw::test::run({"train", "--resume", "--out", out});
  ASSERT_EQ(resumed.code, 0) << resumed.err;
  EXPECT_THAT(resumed.out, HasSubstr("resumed at step 4"));
  EXPECT_EQ(weights(out), weights(run_folder()));
}

TEST_F(Run, AnotherRunIsNotOverwritten) {
  const std::string before = weights(run_folder());
  const Outcome outcome = fw::test::run(tiny_train(text(), run_folder()));
  EXPECT_EQ(outcome.code, 2);
  EXPECT_THAT(outcome.err, HasSubstr("--resume"));
  EXPECT_EQ(weights(run_folder()), before);
}

TEST_F(Run, ResumeNoticesAnotherText) {
  const std::string out = *folder_ / "changed", own_text = *folder_ / "own-text";
  spill(own_text, small_text());
  ASSERT_EQ(fw::test::run(tiny_train(own_text, out)).code, 0);
  spill(own_text, small_text() + "more\n");
  const Outcome outcome = fw::test::run({"train", "--resume", "--out", out});
  EXPECT_EQ(outcome.code, 2);
  EXPECT_THAT(outcome.err, HasSubstr("text"));
}

TEST_F(Run, CtrlCWritesACheckpointAndLeaves) {
  const std::string out = *folder_ / "interrupted";
  Program program(tiny_train(text(), out) + Args{"--steps", "1000000", "--log-every", "1"});
  for (int i = 0; i < 3000 && program.out().find("\n       3  ") == std::string::npos; ++i)
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  program.signal(SIGINT);
  const Outcome outcome = program.wait();
  EXPECT_EQ(outcome.code, 130) << outcome.out << outcome.err;
  EXPECT_THAT(outcome.out, HasSubstr("--resume"));
  // It can be gone on from: a few steps more than it had done.
  const size_t at = outcome.out.find("stopped at step ");
  ASSERT_NE(at, std::string::npos) << outcome.out;
  const int step = std::stoi(outcome.out.substr(at + 16));
  const Outcome resumed = fw::test::run({"train", "--resume", "--out", out, "--steps", std::to_string(step + 2)});
  EXPECT_EQ(resumed.code, 0) << resumed.err;
  EXPECT_THAT(resumed.out, HasSubstr("resumed at step " + std::to_string(step)));
  EXPECT_THAT(resumed.out, HasSubstr("train.steps: 1000000 -> " + std::to_string(step + 2)));
}

// Every context is read anew unless --carry is given: the two rows differ, and are those of --no-carry.
TEST_F(Run, EvalReportsEveryContext) {
  const Args eval{"eval", run_folder(), "--text", text(), "--context", "16,64"};
  const Outcome table = fw::test::run(eval);
  ASSERT_EQ(table.code, 0) << table.err;
  EXPECT_EQ(table.out, fw::test::run(eval + Args{"--no-carry"}).out);
  const Json anew = Json::parse(fw::test::run(eval + Args{"--json"}).out);
  EXPECT_LT(anew["results"][0]["tokens"], anew["results"][1]["tokens"]);
  EXPECT_NE(anew["results"][0]["loss"], anew["results"][1]["loss"]);
  EXPECT_THAT(table.out, HasSubstr("bits per byte"));
  const Outcome json =
      fw::test::run({"eval", run_folder(), "--text", text(), "--context", "16,0", "--carry", "--json"});
  ASSERT_EQ(json.code, 0) << json.err;
  const Json report = Json::parse(json.out);
  const int64_t bytes = static_cast<int64_t>(small_text().size());
  ASSERT_EQ(report.at("results").size(), 2u);
  for (const Json& result : report.at("results")) {
    EXPECT_EQ(result.at("tokens"), bytes - 1);  // all but the first: bytes are tokens
    EXPECT_EQ(result.at("bytes"), bytes - 1);
    EXPECT_NEAR(result.at("perplexity").get<double>(), std::exp(result.at("loss").get<double>()), 1e-9);
    EXPECT_GT(result.at("bits_per_byte").get<double>(), 1.0);
    EXPECT_LT(result.at("bits_per_byte").get<double>(), 9.0);
  }
  // The state is carried: the length of the windows does not matter beyond rounding.
  EXPECT_NEAR(report["results"][0]["loss"].get<double>(), report["results"][1]["loss"].get<double>(), 1e-5);
}

TEST_F(Run, GenerateIsDeterministicAndStops) {
  const auto generate = [&](const Args& more) {
    const Outcome outcome = fw::test::run(Args{"generate", run_folder(), "--no-echo", "--prompt", "the state "} + more);
    EXPECT_EQ(outcome.code, 0) << outcome.err;
    return outcome.out;
  };
  const std::string greedy = generate({"--greedy", "--tokens", "30"});
  EXPECT_EQ(greedy.size(), 30u);
  EXPECT_EQ(generate({"--greedy", "--tokens", "30", "--threads", "1"}), greedy);
  const std::string one = generate({"--tokens", "40", "--seed", "1"});
  EXPECT_EQ(generate({"--tokens", "40", "--seed", "1"}), one);
  EXPECT_NE(generate({"--tokens", "40", "--seed", "2"}), one);
  // Everything before the stop text, and nothing of it.
  const std::string stop = one.substr(20, 3);
  EXPECT_EQ(generate({"--tokens", "40", "--seed", "1", "--stop", stop}), one.substr(0, one.find(stop)));
}

TEST_F(Run, AStateResumesTheText) {
  const std::string state = *folder_ / "chat.state";
  const auto generate = [&](const Args& more) {
    const Outcome outcome = fw::test::run(Args{"generate", run_folder(), "--no-echo"} + more);
    EXPECT_EQ(outcome.code, 0) << outcome.err;
    return outcome.out;
  };
  const std::string whole = generate({"--prompt", "key", "--tokens", "40"});
  const std::string first = generate({"--prompt", "key", "--tokens", "15", "--state-save", state});
  EXPECT_EQ(first + generate({"--tokens", "25", "--state-load", state}), whole);
}

// A hybrid through its whole life: its layers on the command line and in the resolved file, interrupted and resumed,
// evaluated, its state (matrices, a ring, a cache) saved in the middle of a text.
TEST_F(Run, AHybridTrainsResumesAndGenerates) {
  const std::string out = *folder_ / "hybrid", state = *folder_ / "hybrid.state";
  const Args how = {"--layers",
                    "recurrent,window,attention,conv",
                    "--num-hidden-layers",
                    "4",
                    "--window-window",
                    "5",
                    "--window-num-kv-heads",
                    "1",
                    "--attention-qk-norm"};
  ASSERT_EQ(fw::test::run(tiny_train(text(), out) + how + Args{"--checkpoint-every", "2", "--keep", "5"}).code, 0);
  EXPECT_THAT(slurp(out + "/config.toml"), HasSubstr("layers = ['recurrent', 'window', 'attention', 'conv']"));
  EXPECT_THAT(slurp(out + "/config.toml"), HasSubstr("[mixer.window]\nwindow = 5\n"));
  const Outcome again = fw::test::run({"train", out + "/config.toml", "--out", *folder_ / "hybrid-again"});
  ASSERT_EQ(again.code, 0) << again.err;
  EXPECT_THAT(again.out, HasSubstr("gated_deltanet2 + window + attention + conv, 4 layers"));
  EXPECT_EQ(weights(*folder_ / "hybrid-again"), weights(out));

  const std::string before = weights(out);
  for (const auto& entry : std::filesystem::directory_iterator(out + "/checkpoints")) {
    if (entry.path().filename().string().find('6') != std::string::npos) std::filesystem::remove_all(entry.path());
  }
  std::filesystem::remove_all(out + "/model");
  const Outcome resumed = fw::test::run({"train", "--resume", "--out", out});
  ASSERT_EQ(resumed.code, 0) << resumed.err;
  EXPECT_THAT(resumed.out, HasSubstr("resumed at step 4"));
  EXPECT_EQ(weights(out), before);

  const auto generate = [&](const Args& more) {
    const Outcome outcome = fw::test::run(Args{"generate", out, "--no-echo"} + more);
    EXPECT_EQ(outcome.code, 0) << outcome.err;
    return outcome.out;
  };
  const std::string whole = generate({"--prompt", "key", "--tokens", "40"});
  const std::string first = generate({"--prompt", "key", "--tokens", "15", "--state-save", state});
  EXPECT_EQ(first + generate({"--tokens", "25", "--state-load", state}), whole);
  EXPECT_EQ(fw::test::run({"eval", out, "--text", text()}).code, 0);
}

TEST_F(Run, TokenFilesTrainTheSameModel) {
  // The held-out part and the rest, as the run above cut them.
  const std::string out = *folder_ / "from-tokens";
  const Outcome info = fw::test::run({"tokenize", "--info", run_folder() + "/data/train.tokens"});
  EXPECT_EQ(info.code, 0) << info.err;
  EXPECT_THAT(info.out, HasSubstr("1 documents, vocabulary 256"));
  Args args =
      tiny_train(run_folder() + "/data/train.tokens", out) + Args{"--valid", run_folder() + "/data/valid.tokens"};
  const Outcome outcome = fw::test::run(args);
  ASSERT_EQ(outcome.code, 0) << outcome.err;
  EXPECT_EQ(weights(out), weights(run_folder()));
}

TEST_F(Run, SentencePieceFromTextToText) {
  const std::string model = *folder_ / "pieces.model", out = *folder_ / "pieces-run";
  const Outcome trained =
      fw::test::run({"tokenize", text(), "--train-sentencepiece", "--vocab", "290", "--out", model});
  ASSERT_EQ(trained.code, 0) << trained.err;
  const Outcome outcome = fw::test::run(tiny_train(text(), out) + Args{"--tokenizer", model});
  ASSERT_EQ(outcome.code, 0) << outcome.err;
  EXPECT_THAT(slurp(out + "/config.toml"), HasSubstr("vocab_size = 290"));
  const Outcome generated = fw::test::run({"generate", out, "--tokens", "10", "--prompt", "the"});
  EXPECT_EQ(generated.code, 0) << generated.err;
  EXPECT_FALSE(generated.out.empty());
}

}  // namespace
}  // namespace fw::test
