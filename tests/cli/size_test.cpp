// train --size: a model's widths by name; the model of a run file in bench.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "cli/program.h"

namespace fw::test {
namespace {

using testing::AllOf;
using testing::HasSubstr;
using Args = std::vector<std::string>;

// Widths that are trained in no time; the rest is the size's.
Args small_train(const Folder& folder, const std::string& out) {
  spill(folder / "text", small_text());
  return tiny_train(folder / "text", folder / out) + Args{"--steps", "0", "--intermediate-size", "32"};
}

TEST(Size, SetsWhatNobodySaidOtherwise) {
  Folder folder;
  const auto config = [&](const std::string& out, const Args& more) {
    const Outcome outcome = run(small_train(folder, out) + more);
    EXPECT_EQ(outcome.code, 0) << outcome.err;
    return slurp(folder / (out + "/config.toml"));
  };
  EXPECT_THAT(config("a", {"--size", "340m", "--rule", "gated_deltanet"}),
              AllOf(HasSubstr("\noutput_gate = 'none'\n"), HasSubstr("\ntie_word_embeddings = true\n"),
                    HasSubstr("\nhidden_size = 16\n")));
  EXPECT_THAT(config("b", {"--size", "1.3b", "--rule", "kda", "--decay-rank", "5"}),
              AllOf(HasSubstr("\noutput_gate_rank = 128\n"), HasSubstr("\ntie_word_embeddings = false\n"),
                    HasSubstr("\ndecay_rank = 5\n")));
  // gated_deltanet2 has a line of its own among the rules with a channel decay.
  EXPECT_THAT(config("e", {"--size", "1.3b", "--rule", "gated_deltanet2"}),
              AllOf(HasSubstr("\noutput_gate = 'silu'\n"), HasSubstr("\noutput_gate_rank = 0\n"),
                    HasSubstr("\ndecay_rank = 0\n")));
  EXPECT_THAT(config("d", {"--size", "1.3b-hybrid", "--window-window", "8", "--num-hidden-layers", "2"}),
              AllOf(HasSubstr("\nlayers = ['recurrent', 'window']\n"), HasSubstr("\nwindow = 8\n")));
  // A released model's size is its layers, rule and vocabulary too.
  EXPECT_THAT(config("q", {"--size", "qwen3.5-0.8b", "--num-hidden-layers", "4", "--vocab-size", "300",
                           "--attention-num-heads", "2", "--attention-head-dim", "8"}),
              AllOf(HasSubstr("\nlayers = ['recurrent', 'recurrent', 'recurrent', 'attention']\n"),
                    HasSubstr("\nrule = 'gated_deltanet'\n"), HasSubstr("\nnorm = 'zero_centered_rms'\n"),
                    HasSubstr("\nvocab_size = 300\n"), HasSubstr("\noutput_gate = true\n"),
                    HasSubstr("\nhead_dim = 8\n"), HasSubstr("\nnum_kv_heads = 2\n")));
  // A run file wins over the size as options do.
  spill(folder / "r.toml", "[model]\nrule = \"kda\"\noutput_gate = \"silu\"\n");
  EXPECT_THAT(config("c", {folder / "r.toml", "--size", "340m"}),
              AllOf(HasSubstr("\noutput_gate = 'silu'\n"), HasSubstr("\ndecay_rank = 128\n")));
}

TEST(Size, OptionsOfBenchWinOverIt) {
  const Outcome outcome = run({"bench",       "--prefill",
                               "16",          "--size",
                               "1.3b-hybrid", "--rule",
                               "kda",         "--hidden-size",
                               "16",          "--num-heads",
                               "1",           "--head-dim",
                               "8",           "--num-hidden-layers",
                               "2",           "--window-num-heads",
                               "2",           "--window-head-dim",
                               "8",           "--intermediate-size",
                               "16"});
  EXPECT_EQ(outcome.code, 0) << outcome.err;
  EXPECT_THAT(outcome.out, HasSubstr("generation: kda + window, 2 layers, width 16, 1 heads of 8"));
}

TEST(Recipe, BenchTimesItsModelAndOtherOptionsWin) {
  Folder folder;
  spill(folder / "r.toml",
        "[train]\nbatch = 2\n[model]\nrule = \"kda\"\nlayers = [\"recurrent\", \"window\"]\nhidden_size = 16\n"
        "num_hidden_layers = 4\nnum_heads = 1\nhead_dim = 8\nintermediate_size = 16\n[mixer.window]\nnum_heads = 2\n"
        "head_dim = 8\nwindow = 8\n");
  const auto timed = [&](const Args& more) {
    const Outcome outcome = run(Args{"bench", folder / "r.toml", "--threads", "1"} + more);
    EXPECT_EQ(outcome.code, 0) << outcome.err;
    return outcome.out;
  };
  EXPECT_THAT(timed({"--prefill", "16"}), HasSubstr("generation: kda + window, 4 layers, width 16, 1 heads of 8"));
  EXPECT_THAT(timed({"--prefill", "16", "--rule", "gated_deltanet", "--num-hidden-layers", "2", "--head-dim", "4"}),
              HasSubstr("generation: gated_deltanet + window, 2 layers, width 16, 1 heads of 4"));
  EXPECT_THAT(timed({"--train", "--steps", "1", "--batch", "1", "--length", "16"}),
              HasSubstr("kda + window, 4 layers"));
  EXPECT_THAT(timed({"--decode-model", "--decode-tokens", "200"}), HasSubstr("kda + window, 4 layers"));
  const auto refused = [&](const Args& more) {
    const Outcome outcome = run(Args{"bench"} + more);
    EXPECT_EQ(outcome.code, 2) << outcome.out;
    return outcome.err;
  };
  EXPECT_THAT(refused({folder / "r.toml"}), HasSubstr("RECIPE: expected --train"));
  EXPECT_THAT(refused({folder / "r.toml", "--train", "--size", "340m"}), HasSubstr("--size 340m: expected none with"));
  EXPECT_THAT(refused({folder / "none.toml", "--train"}), HasSubstr("none.toml"));
  spill(folder / "bad.toml", "[model]\nhead_dims = 8\n");
  EXPECT_THAT(refused({folder / "bad.toml", "--train"}), HasSubstr("did you mean 'head_dim'"));
}

TEST(Size, UnknownOrWithoutUseIsAnError) {
  Folder folder;
  const auto error = [&](const Args& more) {
    const Outcome outcome = run(more);
    EXPECT_EQ(outcome.code, 2) << outcome.out;
    return outcome.err;
  };
  EXPECT_THAT(error(small_train(folder, "a") + Args{"--size", "340"}),
              AllOf(HasSubstr("expected one of 340m, 400m, 1b, 1.3b, 1.3b-hybrid, qwen3.5-0.8b, "),
                    HasSubstr("got '340'; did you mean '340m'?")));
  EXPECT_THAT(error({"train", "--resume", "--out", folder / "a", "--size", "1b"}),
              HasSubstr("--resume: expected no --size"));
  EXPECT_THAT(error(small_train(folder, "a") + Args{"--size", "1b", "--from", "model"}),
              HasSubstr("--size 1b: expected none with --from"));
}

}  // namespace
}  // namespace fw::test
