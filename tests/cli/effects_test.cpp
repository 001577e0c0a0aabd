// An option that a call does not read is an error. For every command and mode: each option of the command's help is
// given to a call of this mode, which must refuse it as one without effect, or must not. The calls fail soon after for
// another reason (a model, text or folder that is not there).
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <regex>
#include <set>
#include <sstream>

#include "cli/program.h"

namespace fw::test {
namespace {

using testing::HasSubstr;
using testing::Not;
using Args = std::vector<std::string>;

constexpr const char* kRefused = "expected no such option";

struct Declared {
  bool is_switch = false;
  std::string value;  // the default, or "1": what every check of values lets through, or refuses with another message
};

// The options of a command, read from its help: a new option is in this test without being named here.
std::map<std::string, Declared> options_of(const std::string& command) {
  std::map<std::string, Declared> options;
  std::string entry;
  const auto take = [&] {
    static const std::regex kOption(R"(^  (--[a-z0-9-]+)(, --no-[a-z0-9-]+)?( [A-Z][A-Za-z,.:]*)?(  |$))"),
        kDefault(R"(\[([^\[\];]+)(;[^\[\]]*)?\]$)");
    std::smatch option, standard;
    if (!std::regex_search(entry, option, kOption)) return;
    Declared found{!option[3].matched, "1"};
    if (std::regex_search(entry, standard, kDefault)) found.value = standard[1];
    options[option[1]] = found;
  };
  std::istringstream help(run({command, "--help", "all"}).out);
  for (std::string line; std::getline(help, line);) {
    if (line.starts_with("    ") && !entry.empty()) {
      entry += "  " + line.substr(line.find_first_not_of(' '));
      continue;
    }
    take();
    entry = line.starts_with("  --") ? line : "";
  }
  take();
  options.erase("--help");
  return options;
}

struct Mode {
  const char* name;
  Args call;                    // a call of the mode
  std::set<std::string> reads;  // the options that have an effect in it; those of the call are not named
  bool all_but = false;         // `reads` are those that have none
};

std::set<std::string> with_prefix(const std::string& command, const std::vector<std::string>& prefixes,
                                  std::set<std::string> more = {}) {
  for (const auto& [flag, option] : options_of(command)) {
    for (const std::string& prefix : prefixes) {
      if (flag.starts_with(prefix)) more.insert(flag);
    }
  }
  return more;
}

// Layers other than the rule's.
const std::vector<std::string> kLayerPrefixes{"--attention-", "--window-", "--conv-kernel", "--ssd-", "--mamba-",
                                              "--mesa-",      "--rwkv7-",  "--mamba3-",     "--mla-", "--experts-"};

class Effects : public testing::Test {
 protected:
  // other_modes: options that no mode here reads, because they ask for another one, or are of layers that none of their
  // models has.
  void check(const std::string& command, const std::vector<Mode>& modes,
             const std::set<std::string>& other_modes = {}) {
    const std::map<std::string, Declared> options = options_of(command);
    std::set<std::string> read_somewhere;
    for (const Mode& mode : modes) {
      SCOPED_TRACE(command + ", " + mode.name);
      for (const std::string& flag : mode.reads)
        EXPECT_TRUE(options.contains(flag)) << flag << " is no option of " << command;
      const Outcome plain = run(Args{command} + mode.call);
      EXPECT_THAT(plain.err, Not(HasSubstr(kRefused)));
      for (const auto& [flag, option] : options) {
        if (std::find(mode.call.begin(), mode.call.end(), flag) != mode.call.end()) {
          read_somewhere.insert(flag);
          continue;
        }
        const bool reads = mode.reads.contains(flag) != mode.all_but;
        if (reads && other_modes.contains(flag)) continue;
        if (reads) read_somewhere.insert(flag);
        const Outcome outcome =
            run(Args{command} + mode.call + (option.is_switch ? Args{flag} : Args{flag, option.value}));
        if (reads) {
          EXPECT_THAT(outcome.err, Not(HasSubstr(kRefused))) << flag;
        } else {
          EXPECT_EQ(outcome.code, 2) << flag << " " << option.value << ": " << outcome.err;
          EXPECT_THAT(outcome.err, HasSubstr(flag + ": " + kRefused)) << flag << " " << option.value;
        }
      }
    }
    for (const auto& [flag, option] : options)
      EXPECT_TRUE(read_somewhere.contains(flag) || other_modes.contains(flag))
          << command << " reads " << flag << " in no mode";
  }
  void accepted(const Args& args) { EXPECT_THAT(run(args).err, Not(HasSubstr(kRefused))); }
  void refused(const Args& args, const std::string& flag) {
    const Outcome outcome = run(args);
    EXPECT_EQ(outcome.code, 2);
    EXPECT_THAT(outcome.err, HasSubstr(flag + ": " + kRefused));
  }

  Folder folder_;
  const std::string none_ = folder_ / "none";
};

TEST_F(Effects, Eval) {
  const std::set<std::string> of_requests{"--task", "--skip-bad", "--max-length", "--prefix-token", "--out"};
  const std::set<std::string> of_texts{"--context", "--carry", "--field", "--separator"};
  std::set<std::string> held_out = of_requests, others = of_texts;
  held_out.insert({"--field", "--separator"});
  others.insert("--text");
  check("eval",
        {{"held-out text", {none_}, held_out, true},
         {"requests", {none_, "--requests", none_}, others, true},
         {"raw", {none_, "--raw", none_, "--task", "piqa"}, others, true}},
        {"--field", "--separator"});
  const Args text{"eval", none_, "--text", none_};
  for (const std::string& flag : of_requests)
    refused(text + (flag == "--skip-bad" ? Args{flag} : Args{flag, "1"}), flag);
  for (const std::string& flag : of_texts) accepted(text + (flag == "--carry" ? Args{flag} : Args{flag, "1"}));
  refused({"eval", none_, "--device", "cuda", "--precision", "bf16"}, "--precision");
}

TEST_F(Effects, Requests) {
  const std::string out = folder_ / "out";
  check("requests",
        {{"drawn",
          {"niah_single_2", "--out", out, "--tokenizer", none_},
          {"--model", "--haystack", "--lengths", "--examples", "--seed"}},
         {"of lines",
          {"niah_single_1", "--out", out, "--tokenizer", none_},
          {"--model", "--lengths", "--examples", "--seed"}},
         {"choices", {"piqa", "--out", out, "--raw", none_}, {"--skip-bad"}},
         {"recall", {"nq", "--out", out, "--raw", none_}, {"--skip-bad", "--max-context", "--trunc"}},
         {"squad", {"squad", "--out", out, "--raw", none_}, {"--skip-bad", "--max-context"}},
         {"swde", {"swde", "--out", out, "--raw", none_}, {"--skip-bad", "--max-context", "--trunc", "--as-stored"}}});
  refused({"requests", "swde", "--out", out, "--raw", none_, "--as-stored", "--trunc", "left"}, "--trunc");
}

TEST_F(Effects, Analyze) {
  check("analyze",
        {{"held-out text", {none_}, {"--field", "--separator"}, true}, {"text", {none_, "--text", none_}, {}, true}});
}

TEST_F(Effects, Tokenize) {
  const std::string out = folder_ / "out";
  check("tokenize",
        {{"token file",
          {none_, "--out", out},
          {"--tokenizer", "--field", "--separator", "--document-end", "--skip-bad", "--train-sentencepiece", "--info"}},
         {"SentencePiece", {none_, "--out", out, "--train-sentencepiece"}, {"--vocab", "--model-type", "--info"}},
         {"info", {"--info", none_}, {}}},
        {"--info"});
}

TEST_F(Effects, Generate) {
  check("generate",
        {{"one text", {none_}, {"--repetition-window"}, true},
         {"JSON", {none_, "--json"}, {"--repetition-window", "--echo"}, true},
         {"greedy", {none_, "--greedy"}, {"--repetition-window", "--top-k", "--top-p", "--min-p", "--seed"}, true},
         {"penalty", {none_, "--repetition-penalty", "1.1"}, {}, true},
         {"GPU", {none_, "--device", "cuda"}, {"--repetition-window", "--precision"}, true}});
}

TEST_F(Effects, Rules) {
  check("rules", {{"list", {}, {"--compose", "--markdown", "--json"}}, {"one rule", {"kda"}, {"--compose", "--json"}}});
  refused({"rules", "--compose", "decay=channel", "--markdown"}, "--markdown");
}

TEST_F(Effects, Bench) {
  const std::set<std::string> layers = with_prefix("bench", kLayerPrefixes);
  std::set<std::string> training = layers, others = layers;
  training.insert({"--tokens",        "--sequences", "--beside",           "--beside-tokens", "--heads",
                   "--value-heads",   "--key-dim",   "--value-dim",        "--dtype",         "--operands",
                   "--form",          "--chunk",     "--segment",          "--gates",         "--decay-scale",
                   "--state-layout",  "--repeats",   "--decode-tokens",    "--decode-seen",   "--decode-ring",
                   "--decode-drafts", "--sums",      "--prefill-sequences"});
  others.insert({"--sums", "--beside-tokens", "--decode-tokens", "--decode-seen", "--decode-ring", "--decode-drafts",
                 "--prefill-sequences"});
  check(
      "bench",
      {{"recurrence",
        {"--device", "none", "--json", none_},
        {"--threads",      "--check-memory", "--rule",        "--commit",           "--tokens",      "--sequences",
         "--beside",       "--heads",        "--value-heads", "--key-dim",          "--value-dim",   "--dtype",
         "--operands",     "--form",         "--chunk",       "--segment",          "--gates",       "--repeats",
         "--decode-model", "--prefill",      "--train",       "--decode-sequences", "--decay-scale", "--state-layout"}},
       {"training", {"--device", "none", "--json", none_, "--train"}, training, true}},
      others);
  const Args bench{"bench", "--device", "none"};
  refused(bench + Args{"--commit", "x"}, "--commit");
  refused(bench + Args{"--form", "token", "--chunk", "64"}, "--chunk");
  refused(bench + Args{"--form", "token", "--operands", "f32"}, "--operands");
  for (const char* flag : {"--batch", "--length", "--accumulate", "--sums", "--steps", "--recompute", "--memory",
                           "--moments", "--decode-seen"}) {
    refused(bench + Args{"--decode-model", flag, "1"}, flag);
  }
  refused(bench + Args{"--prefill", "16", "--decode-tokens", "64"}, "--decode-tokens");
  refused(bench + Args{"--prefill", "16", "--decode-ring", "4"}, "--decode-ring");
  refused(bench + Args{"--decode-sequences", "2", "--prefill-sequences", "4"}, "--prefill-sequences");
  accepted(bench + Args{"--decode-model", "--decode-tokens", "64"});
  refused(bench + Args{"--prefill", "16", "--decode-drafts", "4"}, "--decode-drafts");
  accepted(bench + Args{"--decode-model", "--decode-ring", "4"});
  accepted(bench + Args{"--decode-model", "--decode-drafts", "4"});
  accepted(bench + Args{"--decode-sequences", "2", "--decode-seen", "64"});
  accepted(bench + Args{"--device", "none", "--beside", "2", "--beside-tokens", "64"});
  accepted(bench + Args{"--train", "--layers", "recurrent,window", "--window-window", "64"});
}

TEST_F(Effects, TaskAndSweep) {
  spill(folder_ / "file", "");
  const std::string out = folder_ / "file/out";  // no folder can be made there
  const std::set<std::string> layers = with_prefix("task", kLayerPrefixes);
  std::set<std::string> training = layers, others = layers;
  training.insert({"--passes", "--power", "--noise", "--segments", "--tests", "--first", "--haystack"});
  others.insert({"--draw", "--segments", "--tests", "--first", "--haystack"});
  check("task",
        {{"examples",
          {"mqar_zoology", "--draw", "1", "--out", folder_ / "examples"},
          {"--seeds", "--length", "--pairs", "--vocabulary", "--passes", "--power", "--noise"}},
         {"training", {"mqar", "--rule", "kda", "--out", out}, training, true}},
        others);
  const Args stack{"sweep", "stack", "--rule", "kda", "--out", out},
      mixture{"sweep", "mqar_zoology", "--segments", "zoology", "--rule", "kda", "--out", out};
  for (const char* flag : {"--pairs", "--vocabulary", "--passes", "--power", "--segments", "--tests", "--haystack"})
    refused(stack + Args{flag, "1"}, flag);
  for (const char* flag : {"--noise", "--first"}) refused(stack + Args{flag}, flag);
  refused(stack + Args{"--layers", "window,recurrent", "--mamba3-expand", "2"}, "--mamba3-expand");
  accepted(stack + Args{"--layers", "window,recurrent", "--window-window", "64"});
  for (const char* flag : {"--length", "--pairs", "--examples"}) refused(mixture + Args{flag, "64"}, flag);
  accepted(mixture + Args{"--tests", "zoology", "--noise"});
  accepted({"sweep", "palindrome", "--rule", "kda", "--out", out, "--first"});
  accepted({"sweep", "niah_single_2", "--rule", "kda", "--out", out, "--haystack", none_});
  EXPECT_THAT(run({"task", "stack", "--draw", "1", "--seeds", "1,2"}).err,
              HasSubstr("--seeds: expected one seed with --draw, got 2"));
}

TEST_F(Effects, Train) {
  spill(folder_ / "file", "");
  const Args base{"--text", none_, "--out", folder_ / "file/out"}, train = Args{"train"} + base;
  const std::set<std::string> layers = with_prefix("train", kLayerPrefixes);
  std::set<std::string> without = layers, others = layers;
  without.insert({"--decay-share", "--lora-alpha", "--lora-modules"});
  others.insert({"--decay-share", "--lora-alpha", "--lora-modules", "--dry-run", "--profile"});
  check("train", {{"a new run", base, without, true}}, others);
  refused(train + Args{"--valid", none_, "--valid-fraction", "0.1"}, "--valid-fraction");
  refused(train + Args{"--valid-fraction", "0", "--eval-every", "5"}, "--eval-every");
  refused(train + Args{"--valid-fraction", "0", "--valid-tokens", "5"}, "--valid-tokens");
  refused(train + Args{"--schedule", "constant", "--min-lr", "1e-4"}, "--min-lr");
  accepted(train + Args{"--schedule", "wsd", "--decay-share", "0.1"});
  accepted(train + Args{"--from", none_, "--lora", "2", "--lora-alpha", "4", "--lora-modules", "q_proj"});
  refused(train + Args{"--mlp", "none", "--hidden-ratio", "4"}, "--hidden-ratio");
  refused(train + Args{"--intermediate-size", "64", "--hidden-ratio", "4"}, "--hidden-ratio");
  refused(train + Args{"--device", "cuda", "--precision", "bf16"}, "--precision");
  refused(train + Args{"--layers", "window", "--ssd-expand", "2"}, "--ssd-expand");
  accepted(train + Args{"--layers", "recurrent,window", "--window-window", "64"});
}

// Commands with one mode.
TEST_F(Effects, OthersReadAll) {
  check("curves", {{"all", {none_}, {}, true}});
  check("report", {{"all", {none_}, {}, true}});
  check("info", {{"model", {none_}, {}, true}});
  check("selftest", {{"all", {"--device", "none"}, {}, true}});
  check("verify", {{"all", {none_}, {}, true}});
  check("import", {{"all", {none_, folder_ / "out"}, {}, true}});
  check("export", {{"all", {none_, folder_ / "out"}, {}, true}});
}

}  // namespace
}  // namespace fw::test
