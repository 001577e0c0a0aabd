// generate: streams text from a model. One text, several from one state, one a line of a file, or a conversation; the
// state can be kept and taken up again.
#include <fmt/format.h>

#include <chrono>
#include <cstdio>
#include <deque>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "base/error.h"
#include "base/file.h"
#include "base/memory.h"
#include "base/printable.h"
#include "base/stop.h"
#include "cli/command.h"
#include "cli/effects.h"
#include "cli/json_output.h"
#include "cli/line_input.h"
#include "cli/model_option.h"
#include "cli/outputs.h"
#include "cli/run_config.h"
#include "cli/say.h"
#include "cli/signals.h"
#include "generate/chat.h"
#include "generate/session.h"
#include "generate/text_stream.h"
#include "nn/decode_ring.h"
#include "report/progress.h"
#include "train/byte_source.h"
#include "train/memory_plan.h"
#include "train/text_source.h"

namespace fw::cli {
namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point begin) { return std::chrono::duration<double>(Clock::now() - begin).count(); }

void put_bytes(const std::string& text) {
  if (std::fwrite(text.data(), 1, text.size(), stdout) != text.size() || std::fflush(stdout) != 0)
    fail_io("cannot write to standard output");
}

// A pipe gets the bytes. A terminal shows control characters, so that neither a model nor a prompt writes escape
// sequences there.
void put(const std::string& text) {
  static const bool terminal = is_terminal(1);
  static PrintableStream shown;
  put_bytes(terminal ? shown.add(text) : text);
}

constexpr size_t kMostInput = size_t{1} << 40;

// What was read before a text, for statistics and JSON.
struct Prompt {
  std::string text;
  int64_t tokens = 0;
  double seconds = 0;
};

class Generate : public Command {
 public:
  std::string name() const override { return "generate"; }
  std::string summary() const override { return "write text with a model"; }
  std::string details() const override {
    return "Text goes to standard output as it is made, behind its prompt (--no-echo leaves the prompt out). On a "
           "terminal control characters in it are shown; "
           "a "
           "pipe gets the bytes. The prompt is read by chunks; then every token costs the same time and memory however "
           "long the text "
           "is. Without a prompt the text begins after a line break.\n\n"
           "--samples and --prompts read the prompt once and go on from copies of its state: sample I (from 0) is what "
           "--seed SEED+I writes, and what a line "
           "of "
           "--prompts gives does not depend on the other lines. --batch N makes N of these texts at a time, for which "
           "the model's weights are read once; "
           "matrix "
           "products of more than 8 (on the CPU 4) sequences round differently than those of one, and so do "
           "recurrences with a ring (--ring). So do --drafts on a GPU, and on the CPU in passes of more than 16 rows. "
           "--conversation keeps "
           "the state from line to line of standard "
           "input; "
           "after a stop text it has seen that text too.\n\n"
           "--json prints one object a text; docs/json.md has its keys.\n\n"
           "Examples:\n  fastweight generate my-run --prompt \"To be\" --tokens 200 --temperature 0.8 --top-p 0.95\n"
           "  fastweight generate my-run --prompt-file long.txt --samples 4 --json\n"
           "  fastweight generate my-run --prompt-file examples.txt --prompts questions.txt --greedy --stop $'\\n'\n"
           "  fastweight generate my-run --prompts questions.jsonl --batch 64 --device cuda --json\n"
           "  fastweight generate my-run --conversation --stop $'\\n' --state-save chat.state\n"
           "  fastweight generate my-run --state-load chat.state --prompt \"And then?\" --state-save chat.state";
  }
  void declare(Options& options) override {
    options.positional("MODEL", &model_, "model folder, or run folder (its finished model, else its newest checkpoint)",
                       true);
    options.add("prompt", "TEXT", &prompt_, "text to go on from");
    options.add("prompt_file", "FILE", &prompt_file_, "the same from a file; -: standard input");
    options.add("prompts", "FILE", &prompts_,
                "a text for each line of a file (-: standard input; .jsonl: for each \"prompt\"), each read after the "
                "prompt and the loaded state");
    options.add("conversation", "", &conversation_,
                "a text for each line of standard input, each after all that came before");
    options.add("chat", "", &chat_,
                "prompts are messages to a chat model, written as the folder's chat template has them");
    options.add("system", "TEXT", &system_, "with --chat: the system message");
    options.add("before", "TEXT", &before_, "read before each line of --prompts and --conversation");
    options.add("after", "TEXT", &after_,
                "read after each such line; without: a line break in a conversation, nothing with --prompts");
    options.add("samples", "N", &samples_, "texts from each prompt");
    options.add("batch", "N", &batch_,
                "of --prompts and --samples: texts made side by side, each printed when it is whole");
    options.add("echo", "", &echo_,
                "print the prompt before the text; without: so, but not in a conversation and never with --json");
    options.add("tokens", "N", &generate_.tokens, "tokens to write at most");
    options.add("stop", "TEXT", &generate_.stop, "stop before this text, which is not printed");
    options.add("end_token", "ID,ID,...", &end_tokens_,
                "stop at these tokens; without: the end-of-text token of tokenizer or model, if there is one", ',');
    options.add("ignore_end", "", &ignore_end_, "do not stop at an end-of-text token");
    options.section("", "Sampling");
    Sampling& sampling = generate_.sampling;
    options.add("temperature", "X", &sampling.temperature,
                "0 takes the likeliest token, 1 samples from the model as it is");
    options.add("top_k", "N", &sampling.top_k, "only the likeliest N tokens; 0: all");
    options.add("top_p", "X", &sampling.top_p, "only the likeliest tokens that together have this probability");
    options.add("min_p", "X", &sampling.min_p,
                "only tokens with this share of the likeliest one's probability; 0: all");
    options.add("repetition_penalty", "X", &sampling.repetition_penalty,
                "above 1 makes tokens that came recently less likely");
    options.add("repetition_window", "N", &sampling.repetition_window, "how many tokens are recent");
    options.add("greedy", "", &greedy_, "the likeliest token always");
    options.add("seed", "N", &seed_, "of the random numbers; without, a loaded state goes on with its own");
    options.section("", "State");
    options.add("state_save", "FILE", &state_save_, "keep the state at the end").writes();
    options.add("state_load", "FILE", &state_load_, "go on from a kept state, without its text");
    options.section("", "Other");
    options.add("tokenizer", "SPEC", &tokenizer_, tokenizer_help());
    declare_adapter(options, adapter_);
    options.add("device", "DEVICE", &device_, device_help());
    options.add("precision", "TYPE", &precision_, "operands of matrix products on the CPU: f32 or bf16").words = {
        "f32", "bf16"};
    options.add("decode_bits", "", &decode_bits_, decode_bits_help());
    options.add("ring", "N", &ring_, decode_ring_help()).default_text.clear();
    options.add("drafts", "N", &drafts_, drafts_help());
    options.add("json", "", &json_,
                "print one JSON object a text, with token ids and log-probabilities, instead of the text");
    options.add("stats", "", &stats_, "say time and memory on standard error at the end");
    declare_threads(options, threads_);
    declare_memory_check(options, check_memory_);
  }
  int run(Options& options) override;

 private:
  void check(const Options& options);
  Prompt read(Session& session, const Tokenizer& tokenizer, const std::string& text) const;
  bool write(Session& session, const Tokenizer& tokenizer, const Prompt& prompt, int64_t prompt_index, int64_t sample);
  bool write_samples(const Session& state, const Tokenizer& tokenizer, const Prompt& prompt, int64_t prompt_index);
  bool write_prompts(const Session& prefix, const Tokenizer& tokenizer);
  bool converse(Session& session, const Tokenizer& tokenizer);
  std::string begin_message(const Session& session) const;
  std::string message(const std::string& line) const;
  void head(const Prompt& prompt, int64_t prompt_index, int64_t sample) const;
  void tail(const Generated& g, const Prompt& prompt, int64_t prompt_index, int64_t sample, size_t state_bytes) const;
  void submit(Session& session, const Tokenizer& tokenizer, const Prompt& prompt, int64_t prompt_index, int64_t sample);
  void advance();
  void print_whole();
  bool several() const { return samples_ > 1 || !prompts_.empty(); }

  std::string model_, adapter_, prompt_, prompt_file_, prompts_, before_, after_, state_save_, state_load_, tokenizer_,
      precision_ = "f32", device_ = "cpu";
  bool chat_ = false;
  std::string system_;
  ChatFormat format_;      // with --chat
  bool answered_ = false;  // the session ends with an answer
  bool conversation_ = false, echo_ = true, greedy_ = false, ignore_end_ = false, json_ = false, stats_ = false,
       decode_bits_ = false, check_memory_ = true;
  int64_t samples_ = 1, threads_ = 0, ring_ = kRingTokens, drafts_ = 0;
  IntList end_tokens_;
  uint64_t seed_ = 1;
  GenerateOptions generate_;
  std::vector<std::optional<uint64_t>> seeds_;  // of each sample; none: the session's own numbers
  const std::atomic<bool>* stop_ = nullptr;

  // A text that is being made beside others, or waits to be printed.
  struct Text {
    Prompt prompt;
    int64_t prompt_index = 0, sample = 0;
    TextStream stream;
    size_t state_bytes = 0;
    int64_t slot = -1;  // its place; none: it is whole
    DraftCounts drafts;
  };
  int64_t batch_ = 1;
  std::unique_ptr<SessionBatch> side_by_side_;
  std::deque<Text> texts_;  // in the order in which they are printed
  std::vector<int64_t> free_slots_;
};

void Generate::check(const Options& options) {
  if (options.given("prompt") && options.given("prompt_file"))
    fail_usage("--prompt and --prompt-file: expected one of them, both came");
  if (greedy_ && options.given("temperature"))
    fail_usage("--greedy and --temperature: expected one of them, both came");
  if (conversation_ && !prompts_.empty()) fail_usage("--conversation and --prompts: expected one of them, both came");
  if (conversation_ && samples_ != 1)
    fail_usage("--samples: a conversation goes on from one text; leave one of them out");
  if (!state_save_.empty() && several())
    fail_usage("--state-save: expected one text whose state to keep; leave it out, or --samples and --prompts");
  expect_precision_of_cpu(options, device_);
  if (json_ && echo_)
    options.expect_without_effect({"--echo"}, "with --json, which prints the number of the prompt and never its text");
  if (!chat_ && options.given("system")) fail_usage("--system: expected --chat, whose first message it is");
  if (chat_) {
    if (options.given("before") || options.given("after"))
      fail_usage("--chat: expected neither --before nor --after, which the chat template says");
    if ((conversation_ || !prompts_.empty()) && (options.given("prompt") || options.given("prompt_file"))) {
      fail_usage(
          "--chat: expected no --prompt beside --conversation or --prompts, whose lines are the messages; a message "
          "before them is --system");
    }
    if (!state_load_.empty() && options.given("system"))
      fail_usage("--system: expected none with --state-load, which goes on with a conversation");
    if (!options.given("echo")) echo_ = false;
  }
  if (!conversation_ && prompts_.empty() && (options.given("before") || options.given("after"))) {
    fail_usage("--before and --after: are for the lines of --prompts or --conversation, of which neither came");
  }
  if (decode_bits_ && options.given("ring") && ring_ > 1)
    fail_usage("--ring: expected 0 or 1 with --decode-bits, which a ring of more tokens does not keep, got {}", ring_);
  if (drafts_ < 0 || drafts_ > kMostDrafts) fail_usage("--drafts: expected 0 to {}, got {}", kMostDrafts, drafts_);
  if (ignore_end_ && options.given("end_token"))
    fail_usage("--ignore-end and --end-token: expected one of them, both came");
  if (prompt_file_ == "-" && (prompts_ == "-" || conversation_)) {  // --prompts with a conversation is refused above
    fail_usage("--prompt-file -, --prompts - and --conversation: expected one of them; each reads standard input");
  }
  constexpr int64_t kMostBatch = 4096;
  if (batch_ < 1 || batch_ > kMostBatch) fail_usage("--batch: expected 1 to {}, got {}", kMostBatch, batch_);
  if (batch_ > 1 && !several())
    fail_usage("--batch: expected several texts to make side by side (--prompts or --samples), got one");
  constexpr int64_t kMostSamples = 1 << 20;
  if (samples_ < 1 || samples_ > kMostSamples)
    fail_usage("--samples: expected 1 to {}, got {}", kMostSamples, samples_);
  if (generate_.tokens < 0) fail_usage("--tokens: expected a whole number >= 0, got {}", generate_.tokens);
  if (greedy_) generate_.sampling.temperature = 0;
  if (generate_.sampling.temperature == 0) {
    options.expect_without_effect({"--top-k", "--top-p", "--min-p"},
                                  "with --greedy or --temperature 0: the likeliest token is taken");
    if (state_save_.empty())
      options.expect_without_effect({"--seed"},
                                    "with --greedy or --temperature 0 and no --state-save: nothing is drawn");
  }
  if (generate_.sampling.repetition_penalty == 1)
    options.expect_without_effect({"--repetition-window"}, "without --repetition-penalty");
  validate(generate_.sampling);
  if (conversation_ && !chat_ && !options.given("after")) after_.assign(1, '\n');
  // What is typed in a conversation stands there already.
  if (conversation_ && !options.given("echo")) echo_ = false;
  generate_.logprobs = json_;
  generate_.behind_text = echo_ && !json_;
  if (prompt_file_.empty()) return;
  prompt_ = read_file_or_input(prompt_file_, kMostInput);
  drop_byte_order_mark(prompt_, prompt_file_ == "-" ? "standard input" : prompt_file_);
}

Prompt Generate::read(Session& session, const Tokenizer& tokenizer, const std::string& text) const {
  const auto begin = Clock::now();
  const std::vector<int32_t> ids = tokenizer.encode(text);
  session.prefill(ids);
  Prompt prompt{text, static_cast<int64_t>(ids.size()), seconds_since(begin)};
  if (stats_ && prompt.tokens > 0) say_aside("prompt: {} tokens in {:.3f} s\n", prompt.tokens, prompt.seconds);
  return prompt;
}

// What goes before a text, without JSON.
void Generate::head(const Prompt& prompt, int64_t prompt_index, int64_t sample) const {
  if (several() && (prompt_index > 0 || sample > 0)) put("\n");
  if (several())
    put(prompts_.empty() ? fmt::format("--- sample {}\n", sample)
                         : fmt::format("--- prompt {}, sample {}\n", prompt_index, sample));
  if (echo_) put(prompt.text);
}

// And what goes after it, or all of it as JSON.
void Generate::tail(const Generated& g, const Prompt& prompt, int64_t prompt_index, int64_t sample,
                    size_t state_bytes) const {
  if (json_) {
    print_json_line({{"prompt", prompt_index},
                     {"sample", sample},
                     {"text", g.text},
                     {"ids", g.ids},
                     {"logprobs", g.logprobs},
                     {"stopped_by", fw::name(g.stopped_by)},
                     {"prompt_tokens", prompt.tokens},
                     {"prompt_seconds", prompt.seconds},
                     {"seconds", g.seconds}});
  }
  // A line break for the reader's terminal belongs to no token, so a pipe gets exactly the text.
  const bool line_open = g.text.empty() || g.text.back() != '\n';
  if (!json_ &&
      ((conversation_ && line_open) || (!conversation_ && is_terminal(1) && g.stopped_by != StopReason::kStopText)))
    put("\n");
  if (stats_) {
    const auto tokens = g.ids.size();
    say_aside("\n{} tokens in {:.2f} s, {:.1f} us each; state {}{}\n", tokens, g.seconds,
              tokens > 0 ? 1e6 * g.seconds / static_cast<double>(tokens) : 0.0,
              format_bytes(static_cast<double>(state_bytes)),
              drafts_ > 0 ? fmt::format("; {} of {} drafts accepted", g.drafts.accepted, g.drafts.drafted) : "");
  }
}

// One text. Returns false when it was interrupted.
bool Generate::write(Session& session, const Tokenizer& tokenizer, const Prompt& prompt, int64_t prompt_index,
                     int64_t sample) {
  if (!json_) head(prompt, prompt_index, sample);
  const Generated g = generate(session, tokenizer, generate_, json_ ? nullptr : put, stop_);
  tail(g, prompt, prompt_index, sample, session.state_bytes());
  return g.stopped_by != StopReason::kInterrupted;
}

// A text takes a free place beside the others, after they have been taken on until there is one.
void Generate::submit(Session& session, const Tokenizer& tokenizer, const Prompt& prompt, int64_t prompt_index,
                      int64_t sample) {
  while (free_slots_.empty()) advance();
  Text& text = texts_.emplace_back(Text{prompt,
                                        prompt_index,
                                        sample,
                                        TextStream(tokenizer, generate_, nullptr),
                                        session.state_bytes(),
                                        free_slots_.back(),
                                        {}});
  if (text.stream.whole()) {
    text.slot = -1;  // of no token
    return;
  }
  free_slots_.pop_back();
  side_by_side_->put(text.slot, session);
}

// A token of each text, or several; those that are whole leave their places, and are printed when all before them were.
void Generate::advance() {
  const std::span<const std::vector<Drawn>> drawn = side_by_side_->next_several(generate_.sampling, generate_.logprobs);
  for (Text& text : texts_) {
    if (text.slot < 0) continue;
    for (const Drawn& one : drawn[static_cast<size_t>(text.slot)]) {
      if (!text.stream.whole()) text.stream.add(one.id, one.logprob);
    }
    if (!text.stream.whole()) continue;
    text.drafts = side_by_side_->draft_counts(text.slot);
    side_by_side_->clear(text.slot);
    free_slots_.push_back(text.slot);
    text.slot = -1;
  }
  print_whole();
}

void Generate::print_whole() {
  while (!texts_.empty() && texts_.front().slot < 0) {
    Text& text = texts_.front();
    Generated g = text.stream.finish();
    g.drafts = text.drafts;
    if (!json_) head(text.prompt, text.prompt_index, text.sample);
    if (!json_) put(g.text);
    tail(g, text.prompt, text.prompt_index, text.sample, text.state_bytes);
    texts_.pop_front();
  }
}

bool Generate::write_samples(const Session& state, const Tokenizer& tokenizer, const Prompt& prompt,
                             int64_t prompt_index) {
  for (int64_t i = 0; i < samples_; ++i) {
    Session fork = state;
    if (seeds_[static_cast<size_t>(i)]) fork.reseed(*seeds_[static_cast<size_t>(i)]);
    if (side_by_side_ != nullptr) {
      submit(fork, tokenizer, prompt, prompt_index, i);
      continue;
    }
    if (!write(fork, tokenizer, prompt, prompt_index, i)) return false;
  }
  return true;
}

bool Generate::write_prompts(const Session& prefix, const Tokenizer& tokenizer) {
  int64_t index = 0;
  const auto one = [&](const std::string& line) {
    Session session = prefix;
    const Prompt prompt = read(session, tokenizer, begin_message(prefix) + message(line) + after_);
    return write_samples(session, tokenizer, prompt, index++);
  };
  if (prompts_ == "-") {
    // Without --batch each line is answered before the next is waited for.
    static const std::atomic<bool> never = false;
    LineInput input(stop_ != nullptr ? *stop_ : never);
    for (std::string line; input.next(line);) {
      if (!one(line)) return false;
    }
  } else {
    const bool lines = !is_json_lines(prompts_);
    LineRules rules("prompt");
    rules.has_option = false;
    const auto source = open_text(prompts_, rules);
    std::string waiting, piece(size_t{1} << 16, '\0');
    const auto line_of = [&](std::string line) {
      if (lines && line.ends_with('\r')) line.pop_back();
      return line;
    };
    while (source->next()) {
      while (const size_t n = source->read(piece)) {
        waiting.append(piece, 0, n);
        size_t begin = 0;
        for (size_t end; lines && (end = waiting.find('\n', begin)) != std::string::npos; begin = end + 1) {
          if (!one(line_of(waiting.substr(begin, end - begin)))) return false;
        }
        waiting.erase(0, begin);
      }
      if ((!lines || !waiting.empty()) && !one(line_of(waiting))) return false;
      waiting.clear();
    }
  }
  if (index == 0) fail_usage("'{}': expected prompts, one a line, the file is empty", prompts_);
  return true;
}

// What goes before a line. With --chat, after an answer: the answer's end, where the model has not written it itself,
// and what stands between.
std::string Generate::begin_message(const Session& session) const {
  if (!chat_ || !answered_) return before_;
  return session.last_token() == format_.end_token ? format_.between : format_.end + format_.between;
}

std::string Generate::message(const std::string& line) const {
  constexpr const char* kSpace = " \t\n\r\f\v";
  if (!chat_ || !format_.trims_messages) return line;
  const size_t begin = std::min(line.find_first_not_of(kSpace), line.size());
  return line.substr(begin, line.find_last_not_of(kSpace) + 1 - begin);
}

bool Generate::converse(Session& session, const Tokenizer& tokenizer) {
  LineInput input(*stop_);
  const bool ask = is_terminal(0) && is_terminal(1) && !json_;
  std::string line;
  for (int64_t turn = 0;; ++turn) {
    if (ask) put("> ");
    if (!input.next(line)) break;
    const Prompt prompt = read(session, tokenizer, begin_message(session) + message(line) + after_);
    if (!write(session, tokenizer, prompt, turn, 0)) break;
    answered_ = true;
  }
  if (ask) put("\n");
  return !*stop_;
}

int Generate::run(Options& options) {
  apply_threads(threads_);
  allow_too_much_memory(!check_memory_);
  check(options);
  if (!state_save_.empty()) check_output(options, "--state-save", state_save_, "--state-load");
  OpenModel open = open_model(model_, precision_, tokenizer_, device_, adapter_);
  open.model.set_decode_bits(decode_bits_);
  if (options.given("ring")) open.model.set_decode_ring(ring_);
  const Tokenizer& tokenizer = *open.tokenizer;
  if (!ignore_end_) generate_.end_tokens = open.end_tokens;
  if (options.given("end_token")) {
    generate_.end_tokens.clear();
    for (const int64_t id : end_tokens_) {
      if (id < 0 || id >= tokenizer.vocab_size())
        fail_usage("--end-token: expected ids from 0 to {}, got {}", tokenizer.vocab_size() - 1, id);
      generate_.end_tokens.push_back(static_cast<int32_t>(id));
    }
  }
  if (chat_) {
    format_ = chat_format(open.folder, tokenizer, options.given("system") ? std::optional(system_) : std::nullopt);
    after_ = format_.after_user;
    if (!ignore_end_ && !options.given("end_token")) generate_.end_tokens.push_back(format_.end_token);
  }
  Session session(open.model, tokenizer, seed_);
  session.set_drafts(drafts_);
  answered_ = !state_load_.empty();
  if (!state_load_.empty()) session.load(state_load_);
  const bool own_numbers = !state_load_.empty() && !options.given("seed");
  if (!own_numbers) session.reseed(seed_);
  Session numbers = session;
  seeds_.assign(1, std::nullopt);
  for (int64_t i = 1; i < samples_; ++i)
    seeds_.emplace_back(own_numbers ? numbers.draw_seed() : seed_ + static_cast<uint64_t>(i));

  require_memory_of_decoding(
      open.model, batch_,
      batch_ > 1 ? "lower --batch; --no-check-memory tries all the same" : "--no-check-memory tries all the same",
      drafts_);
  if (batch_ > 1) {
    side_by_side_ = std::make_unique<SessionBatch>(open.model, tokenizer, batch_, drafts_);
    for (int64_t slot = batch_; slot-- > 0;) free_slots_.push_back(slot);
  }

  // A state that is to be kept, and a conversation's, is kept when Ctrl-C comes; anything else may just end.
  if (!state_save_.empty() || conversation_) stop_ = &stop_on_signal();
  if (chat_) {
    const std::string first = answered_ ? "" : format_.first;
    if (conversation_ || !prompts_.empty()) {
      // What no message can change is read once, before all of them.
      prompt_ = first.substr(0, tokenizer.whole_prefix(first));
      before_ = first.substr(prompt_.size());
    } else {
      before_ = first;
      prompt_ = begin_message(session) + message(prompt_) + after_;
    }
  }
  const Prompt prompt = read(session, tokenizer, prompt_);
  bool whole;
  if (conversation_) {
    if (echo_ && !json_) put(prompt_);
    whole = converse(session, tokenizer);
  } else if (!prompts_.empty()) {
    whole = write_prompts(session, tokenizer);
  } else if (samples_ > 1) {
    whole = write_samples(session, tokenizer, prompt, 0);
  } else {
    whole = write(session, tokenizer, prompt, 0, 0);
  }
  if (!state_save_.empty()) session.save(state_save_);
  if (whole && side_by_side_ != nullptr) {
    print_whole();  // those of no token
    while (!texts_.empty()) advance();
  }
  if (!whole)
    throw Stopped(state_save_.empty() ? "stopped" : fmt::format("stopped; the state is saved in '{}'", state_save_));
  return kExitOk;
}

}  // namespace

std::unique_ptr<Command> generate_command() { return std::make_unique<Generate>(); }

}  // namespace fw::cli
