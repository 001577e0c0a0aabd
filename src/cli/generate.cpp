// generate: streams text from a model; the state can be kept and taken up again.
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cstdio>

#include "base/error.h"
#include "base/file.h"
#include "base/stop.h"
#include "cli/command.h"
#include "cli/model_option.h"
#include "cli/signals.h"
#include "generate/session.h"
#include "report/progress.h"

namespace fw::cli {
namespace {

// Text on its way out: holds back what could be the beginning of the stop string, so that no part of it is printed.
class StopFilter {
 public:
  explicit StopFilter(std::string stop) : stop_(std::move(stop)) {}

  // What may be printed now. After the stop string has come, nothing more.
  std::string add(const std::string& piece) {
    if (stopped_) return {};
    held_ += piece;
    if (stop_.empty()) return take(held_.size());
    if (const size_t at = held_.find(stop_); at != std::string::npos) {
      stopped_ = true;
      return take(at);
    }
    size_t keep = std::min(held_.size(), stop_.size() - 1);
    while (keep > 0 && !stop_.starts_with(std::string_view(held_).substr(held_.size() - keep))) --keep;
    return take(held_.size() - keep);
  }
  std::string rest() { return stopped_ ? std::string() : take(held_.size()); }
  bool stopped() const { return stopped_; }

 private:
  std::string take(size_t n) {
    std::string out = held_.substr(0, n);
    held_.erase(0, n);
    return out;
  }
  std::string stop_, held_;
  bool stopped_ = false;
};

class Generate : public Command {
 public:
  std::string name() const override { return "generate"; }
  std::string summary() const override { return "write text with a model"; }
  std::string details() const override {
    return "Text goes to standard output as it is made. The prompt is read by chunks; then every token costs the same time and memory however long the text "
           "is. Without a prompt the text begins after a line break.\n\n"
           "Examples:\n  fastweight generate my-run --prompt \"To be\" --tokens 200 --temperature 0.8 --top-p 0.95\n"
           "  fastweight generate my-run --prompt-file chat.txt --state-save chat.state\n"
           "  fastweight generate my-run --state-load chat.state --prompt \"And then?\" --state-save chat.state";
  }
  void declare(Options& options) override {
    options.positional("MODEL", &model_, "model folder, or run folder (its finished model, else its newest checkpoint)", true);
    options.add("prompt", "TEXT", &prompt_, "text to go on from");
    options.add("prompt_file", "FILE", &prompt_file_, "the same from a file");
    options.add("echo", "", &echo_, "print the prompt first");
    options.add("tokens", "N", &tokens_, "tokens to write");
    options.add("stop", "TEXT", &stop_, "stop before this text, which is not printed");
    options.section("", "Sampling");
    options.add("temperature", "X", &sampling_.temperature, "0 takes the likeliest token, 1 samples from the model as it is");
    options.add("top_k", "N", &sampling_.top_k, "only the likeliest N tokens; 0: all");
    options.add("top_p", "X", &sampling_.top_p, "only the likeliest tokens that together have this probability");
    options.add("greedy", "", &greedy_, "the likeliest token always");
    options.add("seed", "N", &seed_, "of the random numbers; a loaded state brings its own");
    options.section("", "State");
    options.add("state_save", "FILE", &state_save_, "keep the state at the end");
    options.add("state_load", "FILE", &state_load_, "go on from a kept state, without its text");
    options.section("", "Other");
    options.add("tokenizer", "SPEC", &tokenizer_, tokenizer_help());
    options.add("precision", "TYPE", &precision_, "operands of matrix products: f32 or bf16");
    options.add("stats", "", &stats_, "say time and memory on standard error at the end");
    declare_threads(options, threads_);
  }
  int run(Options& options) override;

 private:
  void check(const Options& options);
  bool stream(Session& session, const Tokenizer& tokenizer);
  static void put(const std::string& text) {
    if (std::fwrite(text.data(), 1, text.size(), stdout) != text.size() || std::fflush(stdout) != 0) fail_io("cannot write to standard output");
  }

  std::string model_, prompt_, prompt_file_, stop_, state_save_, state_load_, tokenizer_, precision_ = "f32";
  bool echo_ = false, greedy_ = false, stats_ = false;
  int64_t tokens_ = 256, threads_ = 0;
  uint64_t seed_ = 1;
  Sampling sampling_;
};

void Generate::check(const Options& options) {
  if (options.given("prompt") && options.given("prompt_file")) fail_usage("--prompt and --prompt-file: expected one of them, both came");
  if (greedy_ && options.given("temperature")) fail_usage("--greedy and --temperature: expected one of them, both came");
  if (!state_load_.empty() && options.given("seed"))
    fail_usage("--seed: a state loaded with --state-load goes on with its own random numbers; leave one of them out");
  if (tokens_ < 0) fail_usage("--tokens: expected a whole number >= 0, got {}", tokens_);
  if (greedy_) sampling_.temperature = 0;
  validate(sampling_);
  if (!prompt_file_.empty()) prompt_ = read_file(prompt_file_);
}

// Returns whether the text given with --stop came.
bool Generate::stream(Session& session, const Tokenizer& tokenizer) {
  StopFilter filter(stop_);
  const auto begin = std::chrono::steady_clock::now();
  int64_t written = 0;
  for (; written < tokens_ && !filter.stopped() && !stop_flag(); ++written) put(filter.add(tokenizer.piece(session.next(sampling_))));
  put(filter.rest());
  if (stats_) {
    const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
    fmt::print(stderr, "\n{} tokens in {:.2f} s, {:.1f} us each; state {}\n", written, seconds,
               written > 0 ? 1e6 * seconds / static_cast<double>(written) : 0.0, format_bytes(static_cast<double>(session.state_bytes())));
  }
  return filter.stopped();
}

int Generate::run(Options& options) {
  stop_on_signal();
  apply_threads(threads_);
  check(options);
  OpenModel open = open_model(model_, precision_, tokenizer_);
  Session session(open.model, *open.tokenizer, seed_);
  if (!state_load_.empty()) session.load(state_load_);
  const auto begin = std::chrono::steady_clock::now();
  const std::vector<int32_t> ids = open.tokenizer->encode(prompt_);
  session.prefill(ids);
  if (stats_ && !ids.empty()) {
    const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
    fmt::print(stderr, "prompt: {} tokens in {:.3f} s\n", ids.size(), seconds);
  }
  if (echo_) put(prompt_);
  const bool stopped = stream(session, *open.tokenizer);
  // A line break for the reader's terminal belongs to no token, so a pipe gets exactly the text.
  if (is_terminal(1) && !stopped) put("\n");
  if (!state_save_.empty()) session.save(state_save_);
  if (stop_flag()) throw Stopped(fmt::format("stopped after {} tokens{}", session.tokens_seen(), state_save_.empty() ? "" : "; the state is saved"));
  return kExitOk;
}

}  // namespace

std::unique_ptr<Command> generate_command() { return std::make_unique<Generate>(); }

}  // namespace fw::cli
