// eval: loss, perplexity and bits per byte of a text at given context lengths, with the state carried or not; or the
// scores of requests (eval_requests.h).
#include <fmt/format.h>

#include <cmath>

#include "base/error.h"
#include "base/memory.h"
#include "cli/command.h"
#include "cli/dataset.h"
#include "cli/effects.h"
#include "cli/eval_requests.h"
#include "cli/json_output.h"
#include "cli/model_option.h"
#include "cli/say.h"
#include "cli/signals.h"
#include "report/progress.h"
#include "report/table.h"
#include "train/evaluate.h"
#include "train/memory_plan.h"

namespace fw::cli {
namespace {

class Eval : public Command {
 public:
  std::string name() const override { return "eval"; }
  std::string summary() const override {
    return "loss, perplexity and bits per byte of a text; scores of language-model tasks";
  }
  std::string details() const override {
    return "Only real tokens are scored: there is no padding, and the first token of what starts from nothing is not "
           "scored. Bits per byte counts the bytes "
           "of the text that the scored tokens stand for, so that tokenizers can be compared; it is - where a token "
           "file does not know them.\n\n"
           "Every window of --context tokens starts from nothing, so that the row of a longer context says what the "
           "model gains from it. With --carry the "
           "state "
           "goes on through each document instead; the length in which it is read then changes nothing but "
           "rounding.\n\n"
           "With --requests or --raw it scores tasks as lm-evaluation-harness does, zero-shot: multiple choice (acc, "
           "acc_norm), last words (perplexity, acc), "
           "whole texts (word and byte perplexity, bits per byte), recall and needles (greedy output; contains, "
           "substr_all). docs/tasks.md has the details.\n\n"
           "Without --text the held-out data of the run is scored.\n\n"
           "Examples:\n  fastweight eval my-run\n  fastweight eval my-run --text held-out.txt --context 256,1024\n  "
           "fastweight eval my-run --text held-out.txt "
           "--context 1024 --carry\n"
           "  fastweight eval my-run --requests piqa.jsonl --out piqa\n  fastweight eval my-run --task wikitext --raw "
           "wiki.test.raw";
  }
  void declare(Options& options) override {
    options.positional("MODEL", &model_, "model folder, or run folder (its finished model, else its newest checkpoint)",
                       true);
    options.add("text", "FILE", &text_,
                "text (plain or .jsonl, also .gz and .zst), a pattern, a token file, or - for standard input; several "
                "times for several texts");
    options.add("field", "KEY", &field_, "of .jsonl files: the key whose string is the text");
    options.add("context", "N,N,...", &context_, "tokens of a window; 0: whole documents", ',');
    options.add("carry", "", &carry_, "carry the state from window to window inside a document");
    options.add("separator", "LINE", &separator_, "a line that separates documents");
    options.add("tokenizer", "SPEC", &tokenizer_, tokenizer_help());
    declare_adapter(options, adapter_);
    options.add("device", "DEVICE", &device_, device_help());
    options.add("precision", "TYPE", &precision_, "operands of matrix products on the CPU: f32 or bf16").words = {
        "f32", "bf16"};
    options.add("decode_bits", "", &decode_bits_, decode_bits_help());
    options.add("json", "", &json_, "print JSON instead of a table");
    declare_threads(options, threads_);
    declare_memory_check(options, check_memory_);
    declare_requests(options, requests_);
  }
  int run(Options& options) override;

 private:
  std::string model_, field_ = "text", separator_, tokenizer_, adapter_, precision_ = "f32", device_ = "cpu";
  StringList text_;
  IntList context_{256, 1024};
  bool carry_ = false, json_ = false, decode_bits_ = false, check_memory_ = true;
  RequestsToScore requests_;
  int64_t threads_ = 0;
};

int Eval::run(Options& options) {
  stop_on_signal();
  apply_threads(threads_);
  allow_too_much_memory(!check_memory_);
  const StringList always{"--adapter",     "--tokenizer", "--device",  "--precision",
                          "--decode-bits", "--json",      "--threads", "--check-memory"};
  expect_precision_of_cpu(options, device_);
  if (!requests_.requests.empty() || !requests_.raw.empty()) {
    options.expect_only(always + flags_under(options, kTasksHeading),
                        "with --requests or --raw, which are scored as docs/tasks.md says");
    requests_.precision = precision_;
    check_requests(requests_, options);
    OpenModel open = open_model(model_, precision_, tokenizer_, device_, adapter_);
    open.model.set_decode_bits(decode_bits_);
    require_memory_of_pass(open.model, kEvaluationTokens, "--no-check-memory tries all the same");
    return score_requests(open, requests_, json_);
  }
  StringList read = always + StringList{"--text", "--context", "--carry"};
  if (!text_.empty()) read = read + StringList{"--field", "--separator"};
  options.expect_only(read, text_.empty()
                                ? "without --text, --requests and --raw: the held-out tokens of the run are scored"
                                : "with --text: it is of tasks, which --requests FILE or --raw FILE gives");
  if (text_.empty()) {
    if (const std::string held = held_out_tokens(model_); !held.empty()) text_ = {held};
    if (text_.empty())
      fail_usage("no text: give a file with --text (or requests with --requests); '{}' is no run with held-out data",
                 model_);
    say_aside("text: the held-out data of the run, '{}'\n", text_.front());
  }
  for (const int64_t context : context_) {
    if (context < 0) fail_usage("--context: expected numbers of tokens >= 0, got {}", context);
  }
  OpenModel open = open_model(model_, precision_, tokenizer_, device_, adapter_);
  open.model.set_decode_bits(decode_bits_);
  require_memory_of_pass(open.model, kEvaluationTokens, "--no-check-memory tries all the same");
  const TemporaryTokens tokens(text_, field_, separator_, *open.tokenizer);
  if (!tokens.note().empty()) say_aside("note: {}\n", tokens.note());

  Table table;
  for (const char* heading : {"context", "state", "tokens scored", "bits per byte", "loss (nats/token)", "perplexity"})
    table.column(heading);
  Json results = Json::array();
  bool finite = true;
  for (const int64_t context : context_) {
    const EvalResult r = evaluate_file(open.model, tokens.file(), *open.tokenizer, context, carry_);
    finite = finite && std::isfinite(r.loss);
    table.row({context == 0 ? "document" : fmt::format("{}", context), carry_ ? "carried" : "anew",
               fmt::format("{}", r.sum.count), r.bits_per_byte ? fmt::format("{:.4f}", *r.bits_per_byte) : "-",
               fmt::format("{:.4f}", r.loss), fmt::format("{:.3f}", r.perplexity)});
    results.push_back({{"context", context},
                       {"carry", carry_},
                       {"tokens", r.sum.count},
                       {"bytes", r.bytes ? Json(*r.bytes) : Json()},
                       {"nll", r.sum.nll},
                       {"loss", r.loss},
                       {"perplexity", r.perplexity},
                       {"bits_per_byte", r.bits_per_byte ? Json(*r.bits_per_byte) : Json()},
                       {"bits_per_token", r.bits_per_token}});
  }
  if (json_) {
    Json report = json_report("eval");
    report["adapter"] = open.adapter.empty() ? Json() : Json(open.adapter);
    report.update({{"model", open.folder}, {"text", text_}, {"device", device_}, {"precision", precision_}});
    report["results"] = std::move(results);
    print_json_report(report);
  } else {
    say("{}", table.text());
  }
  if (!finite)
    fail_numeric("the loss of '{}' is not finite: its parameters are damaged, or it diverged in training", open.folder);
  return kExitOk;
}

}  // namespace

std::unique_ptr<Command> eval_command() { return std::make_unique<Eval>(); }

}  // namespace fw::cli
