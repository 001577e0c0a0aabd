// bench: times the recurrence of each rule, training steps and decoding on this machine; a table, and JSON.
#include <fmt/format.h>

#include <cmath>
#include <string>
#include <thread>
#include <vector>

#include "base/error.h"
#include "base/file.h"
#include "base/memory.h"
#include "base/threads.h"
#include "cli/bench_report.h"
#include "cli/command.h"
#include "cli/effects.h"
#include "cli/info_model.h"
#include "cli/json_output.h"
#include "cli/model_option.h"
#include "cli/outputs.h"
#include "cli/ranks.h"
#include "cli/run_config.h"
#include "cli/say.h"
#include "cli/signals.h"
#include "cli/start_model.h"
#include "fastweight/fastweight.h"
#include "model/sizes.h"
#include "nn/decode_ring.h"
#include "rule/rule.h"

namespace fw::cli {
namespace {

constexpr const char* kRecurrence = "Recurrence";

class Bench : public Command {
 public:
  std::string name() const override { return "bench"; }
  std::string summary() const override { return "time the recurrence, training steps and decoding on this machine"; }
  std::string details() const override {
    return "Without --train, --decode-model, --decode-sequences or --prefill: the recurrence of each rule. Each figure "
           "is the median of the repeats, the best "
           "behind it: on a shared machine "
           "the median says what one gets and the best what the code can do. Forward, backward and decode are timed in "
           "turn, and bwd/fwd is the median of the "
           "ratios of neighbours.\n\n"
           "GFLOP/s counts the algebra of the chunk form and nothing else, per token and value head with chunks of C "
           "(token form: C = 1): forward "
           "6 K V + 2 C (K + V), without erase 4 K V + (C + 1) (K + V); backward twice that. GB/s counts the caller's "
           "tensors once each; decode: the state in "
           "and out and one token's inputs.\n\n"
           "Examples:\n  fastweight bench --rule gated_deltanet,kda --threads 2\n  fastweight bench --train --json "
           "train.json\n"
           "  mpirun -n 2 fastweight bench --train --device cuda --accumulate 2\n"
           "  fastweight bench --decode-model --decode-tokens 100000\n"
           "  fastweight bench recipes/papers/340m-qdelta.toml --prefill 16384 --device cuda\n"
           "  fastweight bench --decode-sequences 1,64 --decode-seen 512,2048 --prefill 131072 --device cuda --json "
           "generation.json";
  }
  void declare(Options& options) override {
    options.positional("RECIPE", &recipe_,
                       "a run file (recipes/), a model or a run folder: its model is timed; other options win over it",
                       false);
    options.add("json", "FILE", &json_, "write the results as JSON as well").writes();
    declare_threads(options, threads_);
    declare_memory_check(options, check_memory_);
    options
        .add("device", "NAME", &device_,
             "cpu or cuda; of the recurrence on cuda: times by events on the device, --operands bf16 unless it is "
             "given")
        .words = {"cpu", "cuda"};
    options.add("commit", "TEXT", &commit_, "of the sources, for the JSON, in place of the program's own");
    options
        .add("rule", "RULE,...", &rules_,
             "time these rules (names or axes); without: the recurrence of all named rules, a model with "
             "gated_deltanet2",
             ',')
        .words = rule_names();
    options.section("", kRecurrence);
    options.add("tokens", "N", &recurrence_.tokens, "tokens of a sequence");
    options.add("sequences", "N", &recurrence_.batch, "sequences");
    options.add("beside", "N", &recurrence_.beside,
                "with --device cuda: N short sequences besides, all of them packed");
    options.add("beside_tokens", "N", &recurrence_.beside_tokens, "tokens of a short sequence");
    options.add("heads", "N", &recurrence_.heads, "key heads");
    options.add("value_heads", "N", &recurrence_.value_heads, "value heads; 0: as many");
    options.add("key_dim", "N", &recurrence_.key_dim, "key dimension");
    options.add("value_dim", "N", &recurrence_.value_dim, "value dimension");
    options
        .add("dtype", "TYPE", &recurrence_.dtype,
             "of the tensors of tokens: f32, f64 or bf16; with --device cuda f32, bf16 or f16. States and sums are "
             "float32 but with f64; without: f32, with --device cuda bf16")
        .words = {"f32", "f64", "bf16", "f16"};
    options.add("operands", "TYPE", &recurrence_.operands, "of the chunk form's matrix products: f32 or bf16").words = {
        "f32", "bf16"};
    options.add("form", "FORM", &recurrence_.form, "auto, chunk or token").words = {"auto", "chunk", "token"};
    options.add("chunk", "N", &recurrence_.chunk, "rows of a chunk; 0: the library's choice");
    options.add("segment", "N", &recurrence_.segment,
                "with --device cuda: tokens of the segments that long sequences are cut into, a multiple of 64; 0: the "
                "library's choice, -1: none");
    options
        .add("gates", "HOW", &recurrence_.gates,
             "values, or with --device cuda logits (of --dtype, with a_log and dt_bias)")
        .words = {"values", "logits"};
    options
        .add("state_layout", "NAME", &recurrence_.state_layout,
             "with --device cuda: of the states that decoding reads and writes, v_first [V, K] or k_first [K, V]")
        .words = {"v_first", "k_first"};
    options.add("decay_scale", "X", &recurrence_.decay_scale,
                "factor of the log-decays, which are minus the softplus of normal numbers");
    options.add("repeats", "N", &recurrence_.repeats, "times each is timed");
    options.section("", "Models");
    options.add("train", "", &train_, "time training steps of the model below, on the CPU in f32 and in bf16");
    options.add("decode_model", "", &decode_,
                "time decoding with the model below, at the start and at the end of a long text");
    options.add("size", "NAME", &size_,
                fmt::format("of a model that is timed: {}; other options win over it", fmt::join(size_names(), ", ")));
    options.add("batch", "N", &model_.batch, "sequences of a training step");
    options.add("length", "N", &model_.length, "tokens of a sequence of a training step");
    options.add("accumulate", "N", &model_.accumulate, "batches whose gradients make one training step");
    options
        .add("sums", "HOW", &model_.sums,
             "of several ranks (mpirun, with --train --device cuda): apart or local, as train has it")
        .words = {"apart", "local"};
    options.add("steps", "N", &model_.steps, "training steps timed");
    options.add("recompute", "LEVEL", &model_.recompute, "of training steps: what backward recomputes").words =
        recompute_names();
    options.add("memory", "SIZE", &model_.memory,
                "most that a training step may take, such as 22G: what it needs is recomputed, then moments are bf16");
    options.add("moments", "FORMAT", &model_.moments, "of training steps: auto, float32, or bf16").words = {
        "auto", "float32", "bf16"};
    options.add("decode_tokens", "N", &model_.decode_tokens, "tokens decoded");
    options.add("decode_sequences", "N,N,...", &model_.decode_sequences,
                "time the model generating so many sequences side by side, greedily", ',');
    options.add("decode_seen", "N,N,...", &model_.decode_seen,
                "tokens that each of them has seen before (without: 512); 256 more are timed at most", ',');
    options.add("decode_ring", "N", &decode_ring_, decode_ring_help()).default_text.clear();
    options.add("decode_drafts", "N", &model_.decode_drafts,
                "time decoding with N drafts a pass beside it, all of which are right; 0: do not");
    options.add("prefill", "N", &model_.prefill, "time the model reading a prompt of N tokens; 0: do not");
    options.add("prefill_sequences", "N", &model_.prefill_sequences, "prompts that are read side by side");
    options.add(model_tables(), false);
  }
  int run(Options& options) override;
  bool on_ranks() const override { return true; }

 private:
  // Keys of the model but for its rule, which --rule says.
  KeyTables model_tables() {
    KeyTables tables = key_tables(model_.model);
    std::erase_if(tables.front().keys, [](const Key& key) { return key.name == "rule"; });
    return tables;
  }
  bool generates() const { return !model_.decode_sequences.empty() || model_.prefill != 0; }
  bool times_a_model() const { return train_ || decode_ || generates(); }
  void check_options(const Options& options);
  void check(const Options& options) const;
  Communicator& join_ranks();

  std::string recipe_, json_, device_ = "cpu", commit_, size_;
  StringList rules_;
  int64_t threads_ = 0, decode_ring_ = kRingTokens;
  bool train_ = false, decode_ = false, check_memory_ = true;
  RecurrenceBench recurrence_;
  ModelBench model_;
};

// An option that no timing of this call reads is an error.
void Bench::check_options(const Options& options) {
  const StringList always{"--json", "--threads", "--check-memory", "--device", "--rule", "--commit"};
  const StringList of_steps{"--batch", "--length",    "--accumulate", "--sums",
                            "--steps", "--recompute", "--memory",     "--moments"};
  const StringList of_models{
      "--train",       "--decode-model",  "--decode-tokens", "--decode-sequences",  "--decode-seen",
      "--decode-ring", "--decode-drafts", "--prefill",       "--prefill-sequences", "--size"};
  if (times_a_model()) {
    options.expect_only(always + of_steps + of_models + flags_of(model_tables()),
                        "with --train, --decode-model, --decode-sequences or --prefill, which time a model");
    if (!train_) options.expect_without_effect(of_steps, "without --train");
    if (!decode_) options.expect_without_effect({"--decode-tokens"}, "without --decode-model");
    if (model_.decode_sequences.empty()) options.expect_without_effect({"--decode-seen"}, "without --decode-sequences");
    if (!decode_ && model_.decode_sequences.empty())
      options.expect_without_effect({"--decode-ring", "--decode-drafts"},
                                    "without --decode-model or --decode-sequences");
    if (model_.prefill == 0) options.expect_without_effect({"--prefill-sequences"}, "without --prefill");
    if (launched().size == 1)
      options.expect_without_effect({"--sums"}, "in one process: it is of the gradients of several ranks");
  } else {
    options.expect_only(
        always + flags_under(options, kRecurrence) + StringList{"--prefill"},
        "without --train, --decode-model, --decode-sequences or --prefill: the recurrence alone is timed");
    if (recurrence_.beside == 0) options.expect_without_effect({"--beside-tokens"}, "without --beside");
    if (recurrence_.form == "token") options.expect_without_effect({"--chunk", "--operands"}, "with --form token");
  }
  if (json_.empty()) options.expect_without_effect({"--commit"}, "without --json, the only place where it is written");
  if (!recipe_.empty()) {
    if (!times_a_model())
      fail_usage(
          "RECIPE: expected --train, --decode-model, --decode-sequences or --prefill with it, which time a model; got "
          "'{}' alone",
          recipe_);
    if (!size_.empty()) fail_usage("--size {}: expected none with RECIPE ('{}')", size_, recipe_);
  }
  if (!times_a_model()) {
    recurrence_.rules = rules_;
  } else if (rules_.size() > 1) {
    fail_usage("--rule: expected one rule where a model is timed, got {}", rules_.size());
  } else {
    if (!rules_.empty()) model_.model.rule = rules_.front();
    if (!recipe_.empty()) {
      TrainConfig train;
      apply_model(model_of_recipe(recipe_, train), options, model_.model);
    }
    if (!size_.empty()) apply_size(size_, options, model_.model);
    if (!rules_.empty()) model_.model.rule = rules_.front();  // a released model's size has a rule
  }
}

void Bench::check(const Options& options) const {
  if (times_a_model()) {
    validate(model_.model);
    expect_options_of_models(options, {&model_.model, 1});
  }
  const auto at_least_one = [](const char* option, int64_t value) {
    if (value < 1) fail_usage("{}: expected a whole number >= 1, got {}", option, value);
  };
  at_least_one("--tokens", recurrence_.tokens);
  at_least_one("--sequences", recurrence_.batch);
  at_least_one("--heads", recurrence_.heads);
  at_least_one("--key-dim", recurrence_.key_dim);
  at_least_one("--value-dim", recurrence_.value_dim);
  at_least_one("--repeats", recurrence_.repeats);
  if (recurrence_.value_heads != 0 &&
      (recurrence_.value_heads < 0 || recurrence_.value_heads % recurrence_.heads != 0)) {
    fail_usage("--value-heads: expected a multiple of --heads ({}), got {}", recurrence_.heads,
               recurrence_.value_heads);
  }
  if (device_ != "cpu" && device_ != "cuda") fail_usage("--device: expected cpu or cuda, got '{}'", device_);
}

// Those that one step is timed on; one where nothing launched more.
Communicator& Bench::join_ranks() {
  const Launch launch = launched();
  if (launch.size == 1) return open_ranks();
  if (!train_ || device_ != "cuda" || decode_ || generates()) {
    fail_usage(
        "expected one process, started as rank {} of {}: only --train with --device cuda, and nothing beside it, is "
        "timed on several ranks",
        launch.rank, launch.size);
  }
  Communicator& ranks = open_ranks();
  if (model_.accumulate < ranks.size()) {
    fail_usage("--accumulate: expected at least {}, a batch of every step for each rank, got {}", ranks.size(),
               model_.accumulate);
  }
  take_gpu(ranks, rank_on_machine(), device_);
  if (ranks.rank() > 0) be_quiet();
  return ranks;
}

int Bench::run(Options& options) {
  stop_on_signal();
  apply_threads(threads_);
  allow_too_much_memory(!check_memory_);
  check_options(options);
  check(options);
  if (!json_.empty()) check_output(options, "--json", json_);
  if (device_ == "cuda" && !options.given("operands")) recurrence_.operands = "bf16";
  if (device_ == "cuda" && !options.given("dtype")) recurrence_.dtype = "bf16";
  if (recurrence_.gates != "values" && (recurrence_.gates != "logits" || device_ != "cuda"))
    fail_usage("--gates: expected values or, with --device cuda, logits, got '{}'", recurrence_.gates);
  if (!(recurrence_.decay_scale >= 0) || std::isinf(recurrence_.decay_scale))
    fail_usage("--decay-scale: expected a number >= 0, got {}", recurrence_.decay_scale);
  if (recurrence_.beside < 0 || recurrence_.beside_tokens < 1 || (recurrence_.beside > 0 && device_ != "cuda"))
    fail_usage("--beside: expected 0 or more sequences of 1 token or more, with --device cuda; got {} of {}",
               recurrence_.beside, recurrence_.beside_tokens);
  if (recurrence_.segment != 0 && (device_ != "cuda" || recurrence_.segment < -1 || recurrence_.segment % 64 > 0))
    fail_usage("--segment: expected 0 or, with --device cuda, -1 or a multiple of 64; got {}", recurrence_.segment);
  if (recurrence_.state_layout != "v_first" && (recurrence_.state_layout != "k_first" || device_ != "cuda"))
    fail_usage("--state-layout: expected v_first or, with --device cuda, k_first, got '{}'", recurrence_.state_layout);
  if (recurrence_.decay_scale != 1 && recurrence_.gates == "logits")
    fail_usage("--decay-scale: scales log-decays that are values, and --gates logits gives none");
  if (recurrence_.rules.empty()) {
    for (const Preset& p : presets()) recurrence_.rules.emplace_back(p.name);
  }
  if (model_.sums != "apart" && model_.sums != "local")
    fail_usage("--sums: expected apart or local, got '{}'", model_.sums);
  Communicator& ranks = join_ranks();
  Json report = json_report("bench");
  report.update(
      {{"simd", fw_simd_target()}, {"threads", num_threads()}, {"cores", std::thread::hardware_concurrency()}});
  model_.device = device_;
  if (options.given("decode_ring")) model_.decode_ring = decode_ring_;
  if (train_) report["train"] = device_ == "cuda" ? bench_train_device(model_, ranks) : bench_train(model_);
  if (decode_) report["decode"] = bench_decode(model_);
  if (generates()) report["generation"] = bench_generation(model_);
  if (!commit_.empty()) report["commit"] = commit_;
  if (!times_a_model())
    report["recurrence"] = device_ == "cuda" ? bench_device(recurrence_) : bench_recurrence(recurrence_);
  if (!json_.empty() && ranks.rank() == 0) {
    write_file_atomic(json_, json_text(report, 2));
    say("written: {}\n", json_);
  }
  return kExitOk;
}

}  // namespace

std::unique_ptr<Command> bench_command() { return std::make_unique<Bench>(); }

}  // namespace fw::cli
