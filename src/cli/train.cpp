// train: text -> model folder, with a progress bar or log lines, held-out evaluation, loss curve and resume.
#include <fmt/format.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <optional>
#include <system_error>

#include "base/agreement.h"
#include "base/checksum.h"
#include "base/error.h"
#include "base/file.h"
#include "base/folder_lock.h"
#include "base/folders.h"
#include "base/memory.h"
#include "base/stop.h"
#include "base/threads.h"
#include "cli/build_name.h"
#include "cli/command.h"
#include "cli/dataset.h"
#include "cli/dry_run.h"
#include "cli/effects.h"
#include "cli/json_output.h"
#include "cli/outputs.h"
#include "cli/profile.h"
#include "cli/ranks.h"
#include "cli/recipe.h"
#include "cli/run_config.h"
#include "cli/say.h"
#include "cli/side_files.h"
#include "cli/signals.h"
#include "cli/start_model.h"
#include "fastweight/fastweight.h"
#include "generate/session.h"
#include "generate/text_stream.h"
#include "model/cost.h"
#include "model/other_tensors.h"
#include "model/sizes.h"
#include "report/curves.h"
#include "report/metrics.h"
#include "report/progress.h"
#include "report/table.h"
#include "rule/step_bound.h"
#include "train/checkpoint.h"
#include "train/memory_plan.h"
#include "train/metrics.h"
#include "train/trainer.h"

namespace fw::cli {
namespace {

namespace fs = std::filesystem;

struct TrainOptions {
  std::string recipe;
  bool resume = false;
  bool dry_run = false;
  bool profile = false;
  std::string json;
  bool check_memory = true;
  std::string size;
  int64_t threads = 0;
  ModelConfig model;
  TrainConfig train;
  DataConfig data;

  TrainOptions() {
    model.vocab_size = 0;  // the tokenizer's
    model.rule = "gated_deltanet2";
  }
  void declare(Options& options) {
    options.positional("RECIPE", &recipe, "run file (TOML), such as recipes/shakespeare.toml; options win over it",
                       false);
    options.section("", "Run");
    options.add("resume", "", &resume, "go on from the newest checkpoint in --out, bit for bit as if never stopped");
    options.add(
        "dry_run", "", &dry_run,
        "say what the run would be (layers, memory and time of a step, the resolved run file) and write nothing");
    options.add("profile", "", &profile,
                "time every operation of a step of such a run on random tokens (bytes, operations, share of what the "
                "device can do), and write nothing");
    options.add("json", "FILE", &json, "with --profile: write its figures as JSON as well").writes();
    options.add(
        "size", "NAME", &size,
        fmt::format("the model's widths by name: {}; other options win over them", fmt::join(size_names(), ", ")));
    declare_threads(options, threads);
    declare_memory_check(options, check_memory);
    options.add(key_tables(data));
    options.add(key_tables(train));
    options.add(key_tables(model));
    options.show_first({"--resume",     "--dry-run",     "--size",
                        "--threads",    "--text",        "--valid",
                        "--test",       "--tokenizer",   "--field",
                        "--separator",  "--out",         "--from",
                        "--lora",       "--steps",       "--batch",
                        "--length",     "--lr",          "--seed",
                        "--precision",  "--device",      "--memory",
                        "--eval-every", "--patience",    "--rule",
                        "--layers",     "--hidden-size", "--num-hidden-layers",
                        "--num-heads",  "--head-dim",    "--sample-every"});
  }
};

// A number, or - where it is not known or not finite.
std::string number_or_dash(double value, int digits) {
  return std::isfinite(value) ? fmt::format("{:.{}f}", value, digits) : "-";
}

double or_nan(const std::optional<double>& value) { return value.value_or(std::numeric_limits<double>::quiet_NaN()); }

// Says how a run goes: lines, or a bar when standard output is a terminal.
class Reporter {
 public:
  explicit Reporter(int64_t steps) : steps_(steps), bar_(STDOUT_FILENO) {}

  void header() {
    if (!bar_.live())
      print(fmt::format("{:>8}  {:>8}  {:>8}  {:>9}  {:>8}  {:>9}\n", "step", "loss", "norm", "lr", "ms", "tok/s"));
  }
  void record(const LogRecord& r) {
    last_ = r;
    if (r.eval_loss >= 0) last_eval_ = r;
    if (r.skipped > skipped_) {
      bar_.clear();
      print(fmt::format("note: {} steps skipped so far, their loss or gradient norm was not finite\n", r.skipped));
      skipped_ = r.skipped;
    }
    if (!bar_.live() || r.eval_loss >= 0) {
      bar_.clear();
      std::string line = bar_.live() ? fmt::format("step {}", r.step)
                                     : fmt::format("{:>8}  {:>8}  {:>8}  {:>9.3g}  {:>8}  {:>9}", r.step,
                                                   number_or_dash(r.loss, 4), number_or_dash(r.norm, 3), r.lr,
                                                   number_or_dash(r.ms, 1), number_or_dash(r.tokens_per_second, 0));
      if (r.expert_peak >= 0)
        line += fmt::format("  experts: busiest {:.2f} of the mean, {} idle", r.expert_peak, r.experts_idle);
      if (r.eval_loss >= 0) line += fmt::format("  held out: loss {:.4f}", r.eval_loss);
      if (r.eval_loss >= 0 && !std::isnan(r.eval_bits_per_byte))
        line += fmt::format(", {:.4f} bits per byte", r.eval_bits_per_byte);
      print(line + "\n");
    }
    // The mean over recent intervals: one slow step must not make the time left jump.
    if (std::isfinite(r.ms)) ms_ = ms_ > 0 ? 0.7 * ms_ + 0.3 * r.ms : r.ms;
    show(r.step, r.loss, r.tokens_per_second, ms_);
  }
  // Between two records, as often as an eye follows.
  void step(const StepProgress& p) {
    if (!bar_.live() || std::chrono::steady_clock::now() - shown_ < std::chrono::milliseconds(100)) return;
    show(p.step, p.loss, p.tokens_per_second, ms_ > 0 ? ms_ : p.ms);
  }
  void sample(int64_t step, const std::string& text) {
    bar_.clear();
    print(fmt::format("sample at step {}:\n{}{}", step, text, text.ends_with('\n') ? "" : "\n"));
  }
  void end() { bar_.clear(); }
  const std::optional<LogRecord>& last_eval() const { return last_eval_; }
  const std::optional<LogRecord>& last() const { return last_; }

 private:
  void show(int64_t step, double loss, double tokens_per_second, double ms) {
    bar_.show({step, steps_, loss, tokens_per_second, ms * 1e-3 * static_cast<double>(steps_ - step)});
    shown_ = std::chrono::steady_clock::now();
  }
  // Said at once, so that a reader that has gone ends the run while it can still be saved.
  static void print(const std::string& text) {
    put_printable(stdout, text);
    if (std::fflush(stdout) != 0)
      fail_io("cannot write to standard output: {}", std::generic_category().message(errno));
  }

  int64_t steps_;
  ProgressBar bar_;
  std::chrono::steady_clock::time_point shown_;
  double ms_ = 0;
  int64_t skipped_ = 0;
  std::optional<LogRecord> last_, last_eval_;
};

// What the model writes from nothing, always with the same random numbers. It changes nothing of the run.
std::string sample_of(LanguageModel<float>& model, const Tokenizer& tokenizer, uint64_t seed) {
  GenerateOptions options;
  options.tokens = 100;
  options.sampling.temperature = 0.8;
  if (tokenizer.end_of_text() >= 0) options.end_tokens = {tokenizer.end_of_text()};
  try {
    Session session(model, tokenizer, seed);
    return generate(session, tokenizer, options, nullptr, &stop_flag()).text;
  } catch (const Stopped&) {
    return "(stopped)";
  } catch (const Error& error) {
    if (error.kind() != ErrorKind::kNumeric) throw;
    return fmt::format("(none: {})", error.what());  // the run says itself when it does not recover
  }
}

// A line of samples.jsonl.
void keep_sample(const std::string& run, int64_t step, const std::string& text) {
  const std::string path = run + "/samples.jsonl";
  const nlohmann::json sample = {{"step", step}, {"text", text}};
  std::ofstream file(path, std::ios::app);
  file << sample.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace) << '\n';
  if (!file.flush()) fail_io("cannot write '{}'", path);
}

// A name as a shell takes it.
std::string shell_word(const std::string& name) {
  constexpr std::string_view kPlain = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-./+,:@%=";
  if (!name.empty() && name.find_first_not_of(kPlain) == std::string::npos && name.front() != '-') return name;
  std::string quoted = "'";
  for (const char c : name) quoted += c == '\'' ? std::string("'\\''") : std::string(1, c);
  return quoted + "'";
}

// Seconds of all cores.
double process_cpu_seconds() {
  timespec now{};
  ::clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

bool has_checkpoints(const std::string& out) { return !list_checkpoints(out + "/checkpoints").empty(); }

class Train : public Command {
 public:
  std::string name() const override { return "train"; }
  std::string summary() const override { return "train a language model on a text file"; }
  std::string details() const override {
    return "Every option with a table in its heading is also a key of the run file. The resolved run file is saved as "
           "config.toml in the run folder; running "
           "from it gives the same run. Ctrl-C, SIGTERM and SIGHUP write a checkpoint and end with exit code 130, 143 "
           "or 129; --resume --out FOLDER goes on, "
           "bit for bit. While a run works in its folder, .lock in it keeps others out.\n\n"
           "On several CPUs, machines or GPUs: mpirun -n N fastweight train ..., with --accumulate of N or more; with "
           "--device cuda each rank takes a GPU, and "
           "NCCL "
           "carries the tensors, or MPI where it is not found or FASTWEIGHT_NCCL=off.\n\n"
           "The run folder, new, empty or of an earlier run: model/ (config.json, model.safetensors, tokenizer.json), "
           "checkpoints/, best/ (the model with the "
           "lowest held-out loss, with --eval-every), data/, config.toml, metrics.jsonl, metrics.csv, loss.svg, "
           "loss.png, samples.jsonl (with --sample-every).\n\nExamples:\n  fastweight train --text my.txt --out "
           "my-run\n  fastweight train "
           "recipes/shakespeare.toml --text shakespeare.txt --steps "
           "500\n"
           "  fastweight train --resume --out my-run\n"
           "  fastweight train --from my-run --text other.txt --out tuned\n"
           "  fastweight train --from my-run --lora 16 --text other.txt --out adapters";
  }
  void declare(Options& options) override { o_.declare(options); }
  int run(Options& options) override;
  bool on_ranks() const override { return true; }

 private:
  std::string resolved_run_file() const;
  bool documents_end() const;
  void load(Options& options);
  void check_options(const Options& options) const;
  int plan(const Options& options);
  int profile(const Options& options);
  void describe_run(Trainer& trainer, const Dataset& data, int ranks) const;
  void keep_side_files() const;
  void finish(Trainer& trainer, const Dataset& data, const Tokenizer& tokenizer, const Reporter& reporter);
  void test(Trainer& trainer, const Dataset& data, const Tokenizer& tokenizer) const;
  void note_changes(const Options& options) const;
  void check_folder(const Options& options) const;
  int train(const Options& options, Communicator& ranks);
  Facts facts(const Options& options) const;
  void warn() const;

  TrainOptions o_;
};

// What a run that is resumed without a run file began with; "" when the options say it all.
std::string Train::resolved_run_file() const {
  std::string path = o_.train.out + "/config.toml";
  if (file_exists(path)) return path;
  if (!has_checkpoints(o_.train.out)) {
    fail_usage(
        "--resume: no checkpoint in '{}/checkpoints'; leave --resume out to begin, or say with --out where the run is",
        o_.train.out);
  }
  if (o_.data.text.empty())
    fail_usage(
        "--resume: '{}', the run file of the run, is missing: give the run file or the options that it began with",
        path);
  return "";
}

// Whether the documents of a run that is resumed have an end, where nobody says it: a run whose file does not know the
// key began without.
bool Train::documents_end() const {
  const std::string path = o_.train.out + "/config.toml";
  if (!file_exists(path)) return o_.data.document_end;
  TrainOptions before;
  Options table;
  before.declare(table);
  load_recipe(path, table);
  return table.said("data", "document_end") && before.data.document_end;
}

// Run file and options into the configuration, checked as far as it can be without touching a file of the run.
void Train::load(Options& options) {
  if (o_.resume && options.given("from"))
    fail_usage("--resume: expected no --from: the run goes on with the model that it has, got --from '{}'",
               o_.train.from);
  if (o_.resume && o_.dry_run) fail_usage("--resume: expected no --dry-run, which says what a new run would be");
  if (!o_.json.empty() && !o_.profile)
    fail_usage("--json: expected --profile, whose figures it writes, got '{}' alone", o_.json);
  if (o_.profile && (o_.resume || o_.dry_run))
    fail_usage("--profile: expected neither --resume nor --dry-run: it times a step of a new run");
  if (o_.resume && !o_.size.empty())
    fail_usage("--resume: expected no --size: the run goes on with the model that it has, got --size {}", o_.size);
  if (o_.recipe.empty() && o_.resume) o_.recipe = resolved_run_file();
  if (!o_.recipe.empty()) load_recipe(o_.recipe, options);
  if (!o_.size.empty()) {
    if (!o_.train.from.empty())
      fail_usage("--size {}: expected none with --from, whose model '{}' has its own", o_.size, o_.train.from);
    apply_size(o_.size, options, o_.model);
  }
  if (options.given("lora") && o_.train.lora == 0)
    fail_usage("--lora: expected a rank of at least 1, got 0: leave it out to train the model itself");
  if (o_.train.from.empty() && o_.data.tokenizer.empty()) o_.data.tokenizer = "bytes";
  apply_threads(o_.threads);
  allow_too_much_memory(!o_.check_memory);
  if (o_.resume && !options.said("data", "document_end")) o_.data.document_end = documents_end();
  // A rate below the default of its end goes down to a tenth, as the defaults do.
  if (!options.said("train", "min_lr") && o_.train.min_lr > o_.train.lr) o_.train.min_lr = o_.train.lr / 10;
  validate(o_.train);
  if (!(o_.dry_run || o_.profile) || !o_.data.text.empty()) validate(o_.data);
  for (const auto& [key, files] : {std::pair<const char*, StringList>{"text", o_.data.text},
                                   {"valid", {o_.data.valid}},
                                   {"test", {o_.data.test}}}) {
    if (reads_input(files))
      fail_usage(
          "data.{}: training reads its texts more than once, which standard input (-) cannot be: save it in a file",
          key);
  }
  make_paths_absolute(o_.data, o_.train);
  to_toml(options, "");  // what cannot stand in a run file is refused before the work
}

// Options that others leave without effect. --dry-run and --profile take all options of the run that they describe.
void Train::check_options(const Options& options) const {
  expect_options_of_models(options, {&o_.model, 1});
  expect_precision_of_cpu(options, o_.train.device);
  if (!o_.data.valid.empty())
    options.expect_without_effect({"--valid-fraction"}, "with --valid, whose text is held out");
  if (o_.data.valid.empty() && o_.data.valid_fraction == 0)
    options.expect_without_effect({"--eval-every", "--valid-tokens"},
                                  "with --valid-fraction 0, which holds nothing out");
  if (o_.train.lora == 0) options.expect_without_effect({"--lora-alpha", "--lora-modules"}, "without --lora");
  if (o_.train.schedule == "constant") options.expect_without_effect({"--min-lr"}, "with --schedule constant");
  if (o_.train.schedule != "wsd")
    options.expect_without_effect({"--decay-share"}, fmt::format("with --schedule {}", o_.train.schedule));
}

// A resumed run may be given other settings (more steps, say); which ones is said, because the bits then differ.
void Train::note_changes(const Options& options) const {
  const std::string path = o_.train.out + "/config.toml";
  if (!file_exists(path)) return;
  TrainOptions before;
  Options table;
  before.declare(table);
  load_recipe(path, table);
  if (!table.said("data", "document_end")) before.data.document_end = false;
  for (const std::string& change : differences(table, options)) {
    if (!change.starts_with("train.out:")) say("note: not as the run began: {}\n", change);
  }
}

void Train::describe_run(Trainer& trainer, const Dataset& data, int ranks) const {
  const double parameters = static_cast<double>(trainer.model().params().size());
  say("model     {} ({} parameters)\n", describe(o_.model), format_count(parameters));
  if (o_.train.lora > 0) {
    say("adapters  LoRA of rank {}, alpha {}: {} trained parameters; the model is frozen\n", o_.train.lora,
        o_.train.lora_alpha, format_count(static_cast<double>(trainer.model().trained().size())));
  }
  std::string held_out = "none";
  if (data.valid) held_out = fmt::format("{} tokens", format_count(static_cast<double>(data.valid->tokens())));
  if (data.valid && o_.train.valid_tokens > 0)
    held_out += fmt::format(", the first {} of which are read", o_.train.valid_tokens);
  if (data.test) held_out += fmt::format(", test: {} tokens", format_count(static_cast<double>(data.test->tokens())));
  const double step_tokens = static_cast<double>(o_.train.batch * o_.train.length * o_.train.accumulate);
  const int32_t end = data.train->parts.front().file->end_token();
  say("data      {} tokens in {} documents{}, held out: {}\n", format_count(static_cast<double>(data.train->tokens())),
      data.train->documents(), end >= 0 ? fmt::format(" that end with token {}", end) : "", held_out);
  if (!data.kinds.empty()) say("text      {}\n", data.kinds);
  const std::string where = trainer.model().device().kind() == FW_DEVICE_CUDA
                                ? fmt::format("{}, bf16 activations", device_info().name)
                                : fmt::format("{}, {} threads", o_.train.precision, num_threads());
  say("training  {} steps of {} tokens ({:.1f} epochs), {}{}\n", o_.train.steps, format_count(step_tokens),
      static_cast<double>(o_.train.steps) * step_tokens / static_cast<double>(data.train->tokens()), where,
      ranks > 1 ? fmt::format(", {} ranks", ranks) : "");
  if (!trainer.transport().empty()) {
    const bool nccl = trainer.transport().starts_with("NCCL");
    say("ranks     tensors go by {}{}\n", trainer.transport(),
        nccl
            ? fmt::format("; room for its buffers in --memory: {}", format_bytes(static_cast<double>(nccl_room(ranks))))
            : "");
  }
  if (!o_.train.memory.empty())
    say("memory    at most {} a step: recompute {}\n", o_.train.memory,
        describe(trainer.planned_recompute().value_or(RecomputeLayers{}), o_.model.num_hidden_layers));
  if (trainer.moments() == MomentFormat::kBf16)
    say("moments   bf16, rounded stochastically{}\n",
        o_.train.moments == "auto" ? " (as the checkpoint has them, or no step with float32 moments fits --memory)"
                                   : "");
  std::fflush(stdout);
}

// What was set apart is looked at once, by the model that the held-out text chose.
void Train::test(Trainer& trainer, const Dataset& data, const Tokenizer& tokenizer) const {
  const std::string best = best_path(o_.train.out);
  const bool kept = trainer.best().step >= 0 && read_best(o_.train.out).step == trainer.best().step;
  if (trainer.best().step >= 0 && !kept)
    say("note: '{}' is not the model of step {} any more; the last model is tested\n", best, trainer.best().step);
  std::optional<LanguageModel<float>> chosen;
  if (kept) {
    const AdapterConfig* adapters = trainer.model().adapters();
    chosen.emplace(load_model<float>(adapters != nullptr ? adapters->base : best, trainer.model().device()));
    if (adapters != nullptr) load_adapters(best, *chosen);
    if (o_.train.precision == "bf16") chosen->set_precision(Precision::kBf16);
  }
  const int64_t step = kept ? trainer.best().step : trainer.step(), length = std::max<int64_t>(o_.train.length, 2);
  const EvalResult result = evaluate_file(kept ? *chosen : trainer.model(), *data.test, tokenizer, length, false);
  say("test      model of step {}, windows of {} tokens: loss {:.4f}, {} bits per byte, perplexity {:.3f}\n", step,
      length, result.loss, number_or_dash(or_nan(result.bits_per_byte), 4), result.perplexity);
  const nlohmann::json bits = result.bits_per_byte ? nlohmann::json(*result.bits_per_byte) : nlohmann::json();
  const nlohmann::json record = {{"model", kept ? "best" : "model"}, {"step", step},        {"context", length},
                                 {"tokens", result.sum.count},       {"loss", result.loss}, {"bits_per_byte", bits}};
  write_file_atomic(o_.train.out + "/test.json", record.dump(2) + "\n");
}

// What the folder of --from has beside its model goes with the new one, where it is still there.
void Train::keep_side_files() const {
  std::error_code error;
  if (o_.train.from.empty() || !std::filesystem::is_directory(o_.train.from, error)) return;
  const std::string from = find_model_folder(o_.train.from);
  for (const char* name : {"/model", "/best"}) {
    if (!file_exists(o_.train.out + name + "/config.json")) continue;
    copy_side_files(from, o_.train.out + name, o_.data.tokenizer.empty());
    OtherTensors(from).save(o_.train.out + name);
  }
}

void Train::finish(Trainer& trainer, const Dataset& data, const Tokenizer& tokenizer, const Reporter& reporter) {
  const std::string& out = o_.train.out;
  if (data.valid) {
    const int64_t length = std::max<int64_t>(o_.train.length, 2);
    // The last record has the first of the two figures, unless a finished run was resumed.
    double window_loss, window_bits;
    if (const auto& last = reporter.last_eval(); last && last->step == trainer.step()) {
      window_loss = last->eval_loss;
      window_bits = last->eval_bits_per_byte;
    } else {
      const EvalResult windows =
          evaluate_file(trainer.model(), *data.valid, tokenizer, length, false, o_.train.valid_tokens);
      window_loss = windows.loss;
      window_bits = or_nan(windows.bits_per_byte);
    }
    const EvalResult carried =
        evaluate_file(trainer.model(), *data.valid, tokenizer, length, true, o_.train.valid_tokens);
    Table table;
    table.column("held-out text", Table::Align::kLeft);
    table.column("bits per byte");
    table.column("loss (nats/token)");
    table.column("perplexity");
    const auto row = [&](const std::string& what, double bits, double loss) {
      table.row({what, number_or_dash(bits, 4), fmt::format("{:.4f}", loss), fmt::format("{:.3f}", std::exp(loss))});
    };
    row(fmt::format("windows of {} tokens, each from nothing", length), window_bits, window_loss);
    row("state carried through each document", or_nan(carried.bits_per_byte), carried.loss);
    say("\n{}\n", table.text());
  }
  if (const size_t peak = trainer.model().device().peak_bytes(); peak > 0)
    say("memory    {} of the GPU at most\n", format_bytes(static_cast<double>(peak)));
  const BestRecord best = trainer.best();
  if (best.step >= 0) say("best      step {}, held-out loss {:.4f}\n", best.step, best.loss);
  if (data.test) test(trainer, data, tokenizer);
  const std::string title =
      fmt::format("{}, {} layers, width {}", o_.model.mixers(), o_.model.num_hidden_layers, o_.model.hidden_size);
  const PictureResult curve = write_loss_curve(read_metrics(out + "/metrics.jsonl"), title, out + "/loss");
  if (!curve.note.empty()) say("note: {}\n", curve.note);

  say("files:\n");
  const auto file = [](const std::string& path, const std::string& what) { say("  {:<36}  {}\n", path, what); };
  file(out + "/model/", o_.train.lora > 0
                            ? "the adapters: adapter_config.json, adapter_model.safetensors, tokenizer.json"
                            : "the model: config.json, model.safetensors, tokenizer.json");
  if (best.step >= 0) file(best_path(out) + "/", "the model with the lowest held-out loss");
  if (data.test) file(out + "/test.json", "the test's values");
  for (const std::string& path : curve.files) file(path, "loss curve");
  file(out + "/metrics.jsonl", "one record a log line");
  file(out + "/metrics.csv", "the same as a table");
  if (o_.train.tensorboard) file(out + "/tensorboard/", "the same for TensorBoard: tensorboard --logdir " + out);
  file(out + "/config.toml", "the resolved run file: gives this run again");
  if (has_checkpoints(out)) file(out + "/checkpoints/", "for --resume");
  for (const std::string& path : data.files) file(path, "tokens");
  say("next:\n");
  say("  fastweight generate {} --tokens 200\n", shell_word(out));
  if (data.valid)
    say("  fastweight eval {}\n  fastweight analyze {} --out {}\n", shell_word(out), shell_word(out),
        shell_word(out + "-analysis"));
}

int Train::plan(const Options& options) {
  const StartModel start = start_model(o_.model, o_.train, o_.data, options, false);
  o_.model = start.config;
  check_options(options);
  say("{}", start.note);
  warn();
  say("{}\n",
      to_toml(options, "The resolved run: 'fastweight train' with this file is this run.", unused_tables(o_.model)));
  print_plan(o_.model, o_.train);
  return kExitOk;
}

int Train::profile(const Options& options) {
  if (!o_.json.empty()) check_output(options, "--json", o_.json);
  const StartModel start = start_model(o_.model, o_.train, o_.data, options, false);
  o_.model = start.config;
  check_options(options);
  if (o_.train.device == "cpu") require_memory_of_step(o_.model, o_.train);
  Json report = json_report("train");
  report["profile"] = profile_step(o_.model, o_.train);
  if (!o_.json.empty()) {
    write_file_atomic(o_.json, json_text(report, 2));
    say("written: {}\n", o_.json);
  }
  return kExitOk;
}

// What is accepted and seldom meant. A rule whose step can let the state grow trains well or not, but a run that
// diverges should not come as a surprise.
void Train::warn() const {
  if (o_.train.steps > 0 && o_.train.warmup >= o_.train.steps) {
    say_aside("fastweight train: warning: warmup: {} steps of the {} that the run has: its learning rate only rises\n",
              o_.train.warmup, o_.train.steps);
  }
  const StepBound bound = step_bound(o_.model.resolved_rule());
  if (!bound.bounded)
    say_aside("fastweight train: warning: rule '{}': the step is {}\n", o_.model.rule, describe(bound));
}

int Train::run(Options& options) {
  stop_on_signal();
  load(options);
  if (o_.dry_run || o_.profile) {
    if (launched().size > 1)
      fail_usage("--dry-run, --profile: expected one process, started as one of {}", launched().size);
    return o_.dry_run ? plan(options) : profile(options);
  }
  Communicator& ranks = open_ranks();
  if (ranks.size() > 1) {
    require_agreement(ranks, facts(options));
    if (o_.train.accumulate < ranks.size()) {
      fail_usage(
          "accumulate: expected at least {}, a batch of every step for each rank, got {}: give --accumulate {}, and "
          "the batch of each with --batch",
          ranks.size(), o_.train.accumulate, ranks.size());
    }
    if (options.given("sums") && o_.train.sums == "running") {
      fail_usage("--sums: expected apart or local on {} ranks, got running, which is of one", ranks.size());
    }
    if (o_.train.sums == "running") o_.train.sums = "apart";
    if (o_.train.device != "cpu") take_gpu(ranks, rank_on_machine(), o_.train.device);
    if (ranks.rank() > 0) be_quiet();
  }
  const int code = train(options, ranks);
  return ranks.rank() == 0 ? code : kExitOk;
}

std::string program_checksum() {
  try {
    const MappedFile program("/proc/self/exe");
    Checksum sum;
    sum.add(program.bytes());
    return fmt::format("{:016x}", sum.value());
  } catch (const Error&) {  // no /proc; the version has to do
    return "not known";
  }
}

// What this rank was started with, but for what may differ: threads, and which GPU.
Facts Train::facts(const Options& options) const {
  Facts facts{{"the program", fmt::format("fastweight {}, checksum {}", fw_version(), program_checksum())},
              {"--resume", o_.resume ? "on" : "off"},
              {"the folder --out", fs::weakly_canonical(o_.train.out).string()}};
  for (const Option& option : options.entries()) {
    if (option.section.empty()) continue;
    std::string value = to_text(option.target);
    if (option.section == "train" && option.key == "out") continue;
    if (option.section == "train" && option.key == "device") value = value.substr(0, value.find(':'));
    facts.emplace_back(fmt::format("{}.{}", option.section, option.key), value);
  }
  return facts;
}

// Of what the run begins with.
uint64_t checksum_of(const Params<float>& params) {
  Checksum sum;
  for (const ParamSpec& spec : params.specs()) sum.add(std::as_bytes(params.host_values(spec).span()));
  return sum.value();
}

// Whether a run may begin, or go on, in its folder.
void Train::check_folder(const Options& options) const {
  const std::string& out = o_.train.out;
  if (!o_.resume && has_checkpoints(out)) {
    fail_usage(
        "'{}' holds checkpoints of an earlier run: --resume goes on from there; to begin anew, give another folder "
        "with --out or remove this one",
        out);
  }
  if (o_.resume && !has_checkpoints(out))
    fail_usage(
        "--resume: no checkpoint in '{}/checkpoints'; leave --resume out to begin, or say with --out where the run is",
        out);

  if (!o_.resume) check_run_folder(options, out);
}

// A stop was heard on some ranks, and the exit code is made of the signal.
void share_signal(Communicator& ranks) {
  std::vector<int> signals(static_cast<size_t>(ranks.size()));
  signals[static_cast<size_t>(ranks.rank())] = stop_signal();
  std::vector<Part> parts;
  parts.reserve(signals.size());
  for (int& one : signals) parts.push_back(part_of(std::span<int>(&one, 1)));
  ranks.all_gather(parts);
  for (const int one : signals) {
    if (one != 0) note_signal(one);
  }
}

// Of several ranks the first makes all files; the others find them. Its errors end them too.
int Train::train(const Options& options, Communicator& ranks) {
  const auto begin = std::chrono::steady_clock::now();
  const std::string& out = o_.train.out;
  const bool leads = ranks.rank() == 0;
  if (leads) check_folder(options);
  ranks.barrier();
  StartModel start = start_model(o_.model, o_.train, o_.data, options, o_.resume);
  o_.model = start.config;
  check_options(options);
  const std::shared_ptr<const Tokenizer> tokenizer = start.tokenizer;
  if (o_.train.device == "cpu") {
    const bool evaluates = !o_.data.valid.empty() || o_.data.valid_fraction > 0;
    require_memory_of_step(o_.model, o_.train, "",
                           memory_beside_steps(o_.model, o_.train, evaluates, !o_.data.test.empty()));
  }
  NewFolders made;
  std::optional<FolderLock> lock;
  if (leads) {
    made.make(out);
    lock.emplace(out);
    for (const char* folder : {"", "/data", "/model"}) remove_abandoned(out + folder);
  }
  PrepareOptions how;
  how.resume = o_.resume;
  how.may_lack_text = !options.given("text") && !options.given("valid");
  how.follow = !leads;
  how.check = [&](const TokenMix& mix) {
    for (const TokenMix::Part& part : mix.parts) check_data_file(*part.file, *tokenizer, o_.model);
    const BatchSource enough(mix, o_.train.batch, o_.train.length, o_.train.seed);
  };
  how.progress = tokenize_progress(stop_flag());
  const auto prepare = [&] { return prepare_dataset(o_.data, *tokenizer, out, how); };
  Dataset data;
  if (leads) data = prepare();
  for (const std::string& note : data.notes) say("note: {}\n", note);
  bool prepared = data.train.has_value();
  broadcast_value(ranks, prepared);
  if (prepared && !leads) data = prepare();
  if (!prepared) {
    say("stopped after tokenizing {}; the same command goes on from there\n",
        format_bytes(static_cast<double>(data.text_bytes)));
    return stopped_exit_code();
  }
  if (ranks.size() > 1) {
    data.facts.emplace_back("the model", config_to_json(o_.model).dump());
    data.facts.emplace_back("the tokenizer",
                            fmt::format("{} with checksum {:016x}", tokenizer->type(), tokenizer->checksum()));
    require_agreement(ranks, data.facts);
  }
  if (data.test) check_data_file(*data.test, *tokenizer, o_.model);
  Trainer trainer(o_.train, o_.model, tokenizer, *data.train, data.valid, ranks, start.folder);
  if (start.model) trainer.start_from(*start.model);
  start.model.reset();
  if (o_.resume) {
    trainer.resume([](const std::string& warning) { say_aside("fastweight train: warning: {}\n", warning); });
    if (leads) note_changes(options);
    // A step's sample is written before its checkpoint.
    if (leads) drop_records_after(out + "/samples.jsonl", trainer.step());
  }
  if (ranks.size() > 1)
    require_agreement(
        ranks, {{"the step", fmt::format("{}", trainer.step())},
                {"the model's parameters", fmt::format("checksum {:016x}", checksum_of(trainer.model().trained()))}});
  if (leads) {
    const std::string head = fmt::format("{}\n{}{}", kRunFileComment, kRunFileProgram, build_name());
    write_file_atomic(out + "/config.toml", to_toml(options, head, unused_tables(o_.model)));
  }
  say("{}", start.note);
  describe_run(trainer, data, ranks.size());
  warn();
  if (o_.resume) say("resumed at step {}\n", trainer.step());

  Reporter reporter(o_.train.steps);
  reporter.header();
  const int64_t first_step = trainer.step();
  const auto run_begin = std::chrono::steady_clock::now();
  const double cpu_begin = process_cpu_seconds();
  const auto on_step = [&](const StepProgress& p) {
    reporter.step(p);
    if (o_.train.sample_every > 0 && p.step % o_.train.sample_every == 0) {
      const std::string text = sample_of(trainer.model(), *tokenizer, o_.train.seed);
      reporter.sample(p.step, text);
      keep_sample(out, p.step, text);
    }
  };
  const bool done = trainer.run([&](const LogRecord& record) { reporter.record(record); }, &stop_flag(), on_step);
  reporter.end();
  if (!done) {
    share_signal(ranks);
    say("stopped at step {} of {}; the checkpoint is written. To go on: fastweight train --resume --out {}\n",
        trainer.step(), o_.train.steps, out);
    return stopped_exit_code();
  }
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  say("trained {} steps in {}\n", trainer.step(), format_duration(seconds));
  if (const int64_t steps = trainer.step() - first_step; steps > 0) {
    const double run_seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - run_begin).count();
    const double tokens = static_cast<double>(steps * o_.train.batch * o_.train.length * o_.train.accumulate);
    // Backward takes twice what forward does.
    const double operations = 3 * tokens * cost_of(o_.model, o_.train.length).flops_token;
    say("speed     {:.0f} tok/s, {:.1f} ms a step on average, with evaluations and checkpoints\n", tokens / run_seconds,
        1e3 * run_seconds / static_cast<double>(steps));
    say("cost      {} tokens, {:.3g} operations, {:.2f} hours of a core\n", format_count(tokens), operations,
        (process_cpu_seconds() - cpu_begin) / 3600);
  }
  if (trainer.out_of_patience() && trainer.step() < o_.train.steps) {
    say("ended early: {} evaluations in a row were not better than that of step {}\n", o_.train.patience,
        trainer.best().step);
  }
  std::fflush(stdout);
  if (!leads) return kExitOk;
  keep_side_files();
  try {
    finish(trainer, data, *tokenizer, reporter);
  } catch (const Stopped& stopped) {
    say("{}; checkpoint and model are written. To evaluate again: fastweight train --resume --out {}\n", stopped.what(),
        out);
    return stopped_exit_code();
  }
  return kExitOk;
}

}  // namespace

std::unique_ptr<Command> train_command() { return std::make_unique<Train>(); }

}  // namespace fw::cli
