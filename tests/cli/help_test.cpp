// Help, and what the program says to words it does not know.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "cli/program.h"
#include "rule/rule.h"

namespace fw::test {
namespace {

using testing::ContainsRegex;
using testing::HasSubstr;
using testing::Not;

const std::vector<std::string> kCommands{
    "train",  "eval",   "analyze", "generate",   "bench", "info", "rules",  "selftest", "tokenize", "verify",
    "import", "export", "curves",  "completion", "man",   "task", "report", "sweep",    "requests"};

TEST(Help, OverviewNamesEveryCommand) {
  const Outcome overview = run({"--help"});
  EXPECT_EQ(overview.code, 0);
  for (const std::string& command : kCommands) EXPECT_THAT(overview.out, HasSubstr("\n  " + command + " "));
  EXPECT_EQ(run({"-h"}).out, overview.out);
  const Outcome nothing = run({});
  EXPECT_EQ(nothing.code, 2);
  EXPECT_EQ(nothing.err, overview.out);
}

TEST(Help, EveryCommandExplainsItsOptions) {
  for (const std::string& command : kCommands) {
    const Outcome help = run({command, "--help"});
    EXPECT_EQ(help.code, 0) << command;
    EXPECT_THAT(help.out, HasSubstr("Usage: fastweight " + command));
    EXPECT_EQ(help.err, "") << command;
    // One-letter options: only -h.
    for (size_t at = help.out.find("\n  -"); at != std::string::npos; at = help.out.find("\n  -", at + 1)) {
      EXPECT_EQ(help.out.substr(at + 3, 2), "--") << command << ": " << help.out.substr(at, 40);
    }
  }
}

TEST(Help, RunFileKeysAreOptions) {
  const Outcome help = run({"train", "--help", "all"});
  for (const char* option : {"--lr X", "--min-lr X", "--batch N", "--rule RULE", "--text FILE", "--num-hidden-layers N",
                             "--no-tie-word-embeddings"}) {
    EXPECT_THAT(help.out, HasSubstr(option));
  }
  for (const char* table : {"[model]", "[train]", "[data]"}) EXPECT_THAT(help.out, HasSubstr(table));
}

// Of train's many options the help shows those that people use; all, or those of a topic, on request.
TEST(Help, OfTrainHasTopics) {
  const auto count = [](const std::string& page) {
    int options = 0;
    for (size_t at = page.find("\n  --"); at != std::string::npos; at = page.find("\n  --", at + 1)) ++options;
    return options;
  };
  const Outcome few = run({"train", "--help"}), all = run({"train", "--help", "all"}),
                one = run({"train", "-h", "mamba3"});
  EXPECT_EQ(few.code, 0);
  EXPECT_LT(count(few.out), 35);
  EXPECT_GT(count(all.out), 120);
  for (const char* option : {"--lr X", "--rule RULE", "--text FILE", "--resume", "--help TOPIC"})
    EXPECT_THAT(few.out, HasSubstr(option));
  EXPECT_THAT(one.out, HasSubstr("--mamba3-"));
  EXPECT_EQ(one.out.find("--lr X"), std::string::npos);
  const Outcome wrong = run({"train", "--help", "mamba4"});
  EXPECT_EQ(wrong.code, 2);
  EXPECT_THAT(wrong.err, HasSubstr("did you mean 'mamba'?"));
  EXPECT_EQ(run({"eval", "--help", "all"}).out, run({"eval", "--help"}).out);
}

TEST(Help, HeadingsAreBoldWhereTheTerminalHasThat) {
  EXPECT_THAT(run_on_terminal({"eval", "--help"}, {"TERM=xterm"}), HasSubstr("\x1b[1mOptions:\x1b[0m"));
  EXPECT_EQ(run_on_terminal({"eval", "--help"}, {"TERM=dumb"}).find('\x1b'), std::string::npos);
  EXPECT_EQ(run_on_terminal({"eval", "--help"}, {"TERM=xterm", "NO_COLOR=1"}).find('\x1b'), std::string::npos);
}

// An option that no timing of the call reads.
TEST(Bench, RefusesOptionsWithoutEffect) {
  const auto refused = [](const std::vector<std::string>& args, const std::string& option) {
    const Outcome outcome = run(args);
    EXPECT_EQ(outcome.code, 2);
    EXPECT_EQ(outcome.out, "");
    EXPECT_THAT(outcome.err, HasSubstr(option + ": expected no such option"));
  };
  refused({"bench", "--hidden-size", "64"}, "--hidden-size");
  refused({"bench", "--steps", "3"}, "--steps");
  refused({"bench", "--train", "--tokens", "64"}, "--tokens");
  refused({"bench", "--train", "--decode-tokens", "64"}, "--decode-tokens");
  refused({"bench", "--prefill", "16", "--decode-seen", "64"}, "--decode-seen");
  EXPECT_THAT(run({"bench", "--train", "--rule", "kda,gla"}).err, HasSubstr("--rule: expected one rule"));
  EXPECT_THAT(run({"bench", "--rules", "kda"}).err, HasSubstr("did you mean --rule?"));
}

TEST(Unknown, CommandOptionAndPresetGetTheNearestName) {
  const Outcome command = run({"trian"});
  EXPECT_EQ(command.code, 2);
  EXPECT_THAT(command.err, HasSubstr("unknown command 'trian'; did you mean 'train'?"));

  const Outcome option = run({"train", "--lrr", "1"});
  EXPECT_EQ(option.code, 2);
  EXPECT_THAT(option.err, HasSubstr("unknown option '--lrr'; did you mean --lr?"));
  EXPECT_THAT(run({"train", "--min_lr", "1"}).err, HasSubstr("did you mean --min-lr?"));
  EXPECT_EQ(run({"train", "-x"}).code, 2);

  Folder folder;
  spill(folder / "text", small_text());
  const Outcome preset =
      run(tiny_train(folder / "text", folder / "run") + std::vector<std::string>{"--rule", "gated_deltnet"});
  EXPECT_EQ(preset.code, 2);
  EXPECT_THAT(preset.err, HasSubstr("gated_deltanet"));
  const Outcome rule = run({"rules", "kdaa"});
  EXPECT_EQ(rule.code, 2);
  EXPECT_THAT(rule.err, HasSubstr("kda"));
}

TEST(Unknown, ValuesOfTheWrongKind) {
  const auto error = [](const std::vector<std::string>& args) {
    const Outcome outcome = run(args);
    EXPECT_EQ(outcome.code, 2);
    EXPECT_EQ(outcome.out, "");
    return outcome.err;
  };
  EXPECT_THAT(error({"train", "--lr", "fast"}), HasSubstr("--lr: expected a number, got 'fast'"));
  EXPECT_THAT(error({"train", "--steps", "3.5"}), HasSubstr("--steps: expected a whole number, got '3.5'"));
  EXPECT_THAT(error({"train", "--seed", "-1"}), HasSubstr("--seed: expected a whole number >= 0, got -1"));
  EXPECT_THAT(error({"train", "--lr"}), HasSubstr("--lr"));
  EXPECT_THAT(error({"eval"}), HasSubstr("MODEL is missing"));
  EXPECT_THAT(error({"eval", "a", "b", "--text", "c"}), HasSubstr("unexpected argument 'b'"));
  EXPECT_THAT(error({"eval", "a", "--text", "c", "--context", "12,,3"}), HasSubstr("--context"));
  EXPECT_THAT(error({"info", "--threads", "-2"}), HasSubstr("--threads"));
  EXPECT_THAT(error({"bench", "--form", "chunky"}), HasSubstr("--form: expected auto, chunk or token, got 'chunky'"));
}

TEST(RunFile, ErrorsNameFileAndLine) {
  Folder folder;
  const auto error = [&](const std::string& toml) {
    spill(folder / "r.toml", toml);
    const Outcome outcome = run({"train", folder / "r.toml"});
    EXPECT_EQ(outcome.code, 2);
    return outcome.err;
  };
  const std::string file = folder / "r.toml";
  EXPECT_THAT(error("[train]\nsteps = 3\nlrr = 1.0\n"),
              HasSubstr(file + ":3: unknown key 'lrr' in [train]; did you mean 'lr'?"));
  EXPECT_THAT(error("[train]\nrule = \"kda\"\n"),
              HasSubstr(file + ":2: unknown key 'rule' in [train]; it belongs into [model]"));
  EXPECT_THAT(error("\n[trian]\nsteps = 3\n"), HasSubstr("unknown table 'trian'; did you mean [train]?"));
  EXPECT_THAT(error("lr = 1.0\n"), HasSubstr(file + ":1: key 'lr' belongs into the table [train]"));
  EXPECT_THAT(error("[train]\nlr = \"fast\"\n"),
              HasSubstr(file + ":2: train.lr: expected a number, got the string \"fast\""));
  EXPECT_THAT(error("[train]\nsteps = 2.5\n"),
              HasSubstr(file + ":2: train.steps: expected an integer, got the number 2.5"));
  EXPECT_THAT(error("[data]\ntext = [\"a\", 3]\n"),
              HasSubstr(file + ":2: data.text: expected strings only, got the integer 3"));
  EXPECT_THAT(error("[model]\ntie_word_embeddings = 1\n"), HasSubstr("expected true or false"));
  EXPECT_THAT(error("[train]\nsteps = \n"), HasSubstr(file + ":2: not valid TOML"));
  // A wrong value is an error even where the command line would win.
  spill(file, "[train]\nlr = \"fast\"\n");
  EXPECT_THAT(run({"train", file, "--lr", "1e-3"}).err, HasSubstr("train.lr: expected a number"));
}

TEST(Commands, RulesListsEveryPreset) {
  const Outcome list = run({"rules"});
  EXPECT_EQ(list.code, 0);
  for (const Preset& p : presets()) {
    EXPECT_THAT(list.out, HasSubstr("\n  " + std::string(p.name) + " "));
    const Outcome one = run({"rules", std::string(p.name)});
    EXPECT_EQ(one.code, 0);
    EXPECT_THAT(one.out, HasSubstr(std::string(p.summary)));
  }
  const Outcome axes = run({"rules", "kda", "update=additive"});
  EXPECT_EQ(axes.code, 0);
  EXPECT_THAT(axes.out, HasSubstr("erase  e = 0"));
  for (const Preset& p : ablations()) EXPECT_THAT(list.out, HasSubstr("\n  " + std::string(p.name) + " "));
}

TEST(Commands, RulesShowsAnyComposition) {
  const Outcome all =
      run({"rules", "--compose",
           "decay=channel gain=kaczmarz erase=channel write=channel feedback=learned precond=diagonal"});
  EXPECT_EQ(all.code, 0);
  EXPECT_THAT(all.out, HasSubstr("e = b (.) (k + lambda q)"));
  EXPECT_THAT(all.out, HasSubstr("z = c (.) v"));
  EXPECT_THAT(all.out, HasSubstr("w = M (.) k"));
  const Outcome named = run({"rules", "--compose", "decay=scalar gain=gate q_norm=l2 k_norm=l2"});
  EXPECT_THAT(named.out, HasSubstr("gated_deltanet: "));
  const Outcome unstable = run({"rules", "--compose", "gain=gate gain_bound=2 precond=diagonal"});
  EXPECT_EQ(unstable.code, 2);
  EXPECT_THAT(unstable.err, HasSubstr("gain_bound * precond_x <= 2"));
  const Outcome unknown = run({"rules", "--compose", "decay=channel gian=kaczmarz"});
  EXPECT_EQ(unknown.code, 2);
  EXPECT_THAT(unknown.err, HasSubstr("did you mean 'gain'"));
  EXPECT_EQ(run({"rules", "kda", "--compose", "decay=none"}).code, 2);
}

TEST(Commands, InfoNamesBuildAndPresets) {
  const Outcome info = run({"info", "--threads", "1"});
  EXPECT_EQ(info.code, 0);
  for (const char* word : {"version", "SIMD target", "oneDNN", "threads       1", "gated_deltanet2"})
    EXPECT_THAT(info.out, HasSubstr(word));
}

TEST(Commands, SelftestPassesForAPresetAndForAxes) {
  const Outcome test =
      run({"selftest", "--rule", "gated_deltanet2,decay=channel gain=kaczmarz q_norm=l2 feedback=learned"});
  EXPECT_EQ(test.code, 0) << test.out << test.err;
  EXPECT_THAT(test.out, HasSubstr("all within bounds"));
  EXPECT_THAT(test.out, Not(HasSubstr("FAILED")));
}

#ifdef FW_EMULATED_PROGRAM
// dplr is there with as many key heads as value heads.
TEST(Commands, SelftestOnTheEmulatedDevice) {
  const Outcome test =
      Program({"selftest", "--device", "cuda", "--rule", "dplr"}, "", "/dev/null", {}, FW_EMULATED_PROGRAM).wait();
  EXPECT_EQ(test.code, 0) << test.out << test.err;
  EXPECT_THAT(test.out, ContainsRegex("dplr +float "));
  EXPECT_THAT(test.out, ContainsRegex("dplr +bf16"));
}
#endif

TEST(Commands, BenchWritesTableAndJson) {
  Folder folder;
  const Outcome bench = run({"bench", "--rule", "kda,mamba2", "--tokens", "32", "--heads", "2", "--key-dim", "16",
                             "--value-dim", "16", "--repeats", "2", "--threads", "1", "--json", folder / "bench.json"});
  EXPECT_EQ(bench.code, 0) << bench.err;
  EXPECT_THAT(bench.out, HasSubstr("kda"));
  const std::string json = slurp(folder / "bench.json");
  for (const char* key : {"forward_us_per_token", "forward_backward_us_per_token", "decode_us_per_token",
                          "backward_over_forward", "\"rule\": \"mamba2\"", "\"median\"", "\"best\""}) {
    EXPECT_THAT(json, HasSubstr(key));
  }
}

TEST(Commands, BenchTimesModels) {
  const Outcome bench = run({"bench",
                             "--train",
                             "--decode-model",
                             "--steps",
                             "2",
                             "--batch",
                             "2",
                             "--length",
                             "16",
                             "--decode-tokens",
                             "300",
                             "--hidden-size",
                             "16",
                             "--num-hidden-layers",
                             "1",
                             "--num-heads",
                             "1",
                             "--head-dim",
                             "16",
                             "--threads",
                             "1"});
  EXPECT_EQ(bench.code, 0) << bench.err;
  for (const char* word : {"f32", "bf16", "peak memory", "at token", "300 tokens in"})
    EXPECT_THAT(bench.out, HasSubstr(word));
}

}  // namespace
}  // namespace fw::test
