// tokenize: text -> token file; trains SentencePiece models; says what is in a token file.
#include <fmt/format.h>

#include "base/error.h"
#include "base/file.h"
#include "base/stop.h"
#include "cli/command.h"
#include "cli/dataset.h"
#include "cli/outputs.h"
#include "cli/say.h"
#include "cli/signals.h"
#include "report/progress.h"
#include "tokenizer/tokenizer.h"
#include "train/byte_source.h"
#include "train/text_parts.h"
#include "train/token_file.h"
#include "train/token_writer.h"

namespace fw::cli {
namespace {

class Tokenize : public Command {
 public:
  std::string name() const override { return "tokenize"; }
  std::string summary() const override { return "make token files and SentencePiece models from text"; }
  std::string details() const override {
    return "Token files are what 'train' and 'eval' read (they also read text and tokenize it themselves). Text is "
           "read as a stream: memory does not grow with "
           "it "
           "(a SentencePiece model's does, with the longest document). Ctrl-C keeps what is done beside OUT "
           "(OUT.tokenizing...); the same command goes on from "
           "there.\n\n"
           "Examples:\n  fastweight tokenize my.txt --out my.tokens\n  fastweight tokenize my.txt "
           "--train-sentencepiece --vocab 4000 --out my.model\n"
           "  fastweight tokenize my.txt --tokenizer my.model --out my.tokens\n  fastweight tokenize --info my.tokens";
  }
  void declare(Options& options) override {
    options.positional("TEXT", &text_, "text files: plain or .jsonl, also .gz and .zst; patterns; or -: standard input",
                       false);
    options.add("out", "FILE", &out_, "where the token file, or the SentencePiece model, goes");
    options.add("tokenizer", "SPEC", &tokenizer_,
                "bytes, or the path of a SentencePiece model or of a tokenizer.json of Hugging Face's");
    options.add("field", "KEY", &field_, "of .jsonl files: the key whose string is the text");
    options.add("separator", "LINE", &separator_, "a line that separates documents");
    options.add("document_end", "", &document_end_,
                "end each document with the end-of-text token of the tokenizer, if it has one, so that a model learns "
                "where to stop");
    options.add("skip_bad", "", &skip_bad_,
                "leave out lines of .jsonl files that have no text, naming and counting them, instead of stopping");
    options.add("train_sentencepiece", "", &train_, "train a SentencePiece model on the text instead");
    options.add("vocab", "N", &vocab_, "pieces of that model");
    options.add("model_type", "TYPE", &model_type_, "of that model: unigram or bpe").words = {"unigram", "bpe"};
    options.add("info", "FILE", &info_, "say what is in a token file");
  }
  int run(Options& options) override;

 private:
  int show_info() const;
  int train_model() const;

  StringList text_;
  std::string out_, field_ = "text", tokenizer_ = "bytes", separator_, model_type_ = "unigram", info_;
  bool train_ = false, document_end_ = true, skip_bad_ = false;
  int64_t vocab_ = 4000;
};

int Tokenize::show_info() const {
  const TokenFile file(info_);
  say("{}: {} tokens, {} documents, vocabulary {}, made of {}\n", info_, file.tokens(), file.documents(),
      file.vocab_size(), format_bytes(static_cast<double>(file.text_bytes())));
  say("tokenizer: {}\n", file.tokenizer() == 0 ? "not known, the file is of version 1"
                                               : fmt::format("checksum {:016x}", file.tokenizer()));
  say("end of each document: {}\n", file.end_token() >= 0 ? fmt::format("token {}", file.end_token())
                                    : file.version() < 3  ? "not known"
                                                          : "as in the text");
  int64_t longest = 0;
  for (int64_t i = 0; i < file.documents(); ++i)
    longest = std::max(longest, file.document_begin(i + 1) - file.document_begin(i));
  if (file.documents() > 0) {
    say("documents: {:.1f} tokens on average, the longest {}\n",
        static_cast<double>(file.tokens()) / static_cast<double>(file.documents()), longest);
  }
  return kExitOk;
}

int Tokenize::train_model() const {
  if (text_.size() != 1) fail_usage("--train-sentencepiece: expected one text file, got {}", text_.size());
  constexpr int64_t kMost = 1 << 20;
  if (vocab_ < 1 || vocab_ > kMost) fail_usage("--vocab: expected 1 to {}, got {}", kMost, vocab_);
  if (text_[0] == "-")
    fail_usage(
        "--train-sentencepiece: expected a text file, which the trainer reads more than once, got standard input (-)");
  check_text(text_[0]);  // a text that is missing or empty is named before SentencePiece meets it
  if (is_json_lines(text_[0]) || !packing_of(text_[0]).empty()) {
    fail_usage(
        "--train-sentencepiece: expected a plain text, which SentencePiece reads itself, '{}' is {}: take its text out "
        "of it first",
        text_[0], is_json_lines(text_[0]) ? "JSON lines" : "packed");
  }
  train_sentencepiece(text_[0], out_, static_cast<int32_t>(vocab_), model_type_);
  say("{}: SentencePiece model, {} pieces\n", out_, sentencepiece_tokenizer(out_)->vocab_size());
  return kExitOk;
}

int Tokenize::run(Options& options) {
  if (!train_) stop_on_signal();  // SentencePiece's trainer looks at nothing
  if (!info_.empty()) {
    if (!text_.empty()) fail_usage("--info: expected no text beside it, got '{}'", text_.front());
    options.expect_only({"--info"}, "with --info, which says what is in a token file");
    return show_info();
  }
  if (text_.empty()) fail_usage("no text: give text files, or --info FILE");
  if (out_.empty()) fail_usage("--out is missing: where the result goes");
  if (train_) {
    options.expect_only({"--out", "--train-sentencepiece", "--vocab", "--model-type"},
                        "with --train-sentencepiece, which makes no token file");
  } else {
    options.expect_only(
        {"--out", "--tokenizer", "--field", "--separator", "--document-end", "--skip-bad", "--train-sentencepiece"},
        "without --train-sentencepiece: a token file is made");
  }
  const StringList files = expand_globs(text_);
  check_output(options, "--out", out_);
  for (const char* ending : {".tokenizing", ".tokenizing.offsets", ".tokenizing.json"})
    check_not_read(options, "--out", out_ + ending);
  if (train_) return train_model();
  const auto tokenizer = make_tokenizer(tokenizer_);
  for (const std::string& path : files) check_text(path);
  TokenizeOptions how;
  how.separator = separator_;
  how.document_end = document_end_;
  how.go_on = !reads_input(files);
  how.progress = tokenize_progress(stop_flag());
  BadLines bad;
  const LineRules rules = line_rules(field_, skip_bad_, bad);
  const TokenFileStats stats =
      write_token_file([&] { return open_parts(whole_texts(files), rules); }, how, *tokenizer, out_);
  how.progress = nullptr;  // and the bar is gone
  bad.say();
  if (!separator_.empty() && stats.separators == 0) say("note: {}\n", no_separator(separator_));
  if (stats.resumed_at > 0)
    say("went on behind the first {} of text\n", format_bytes(static_cast<double>(stats.resumed_at)));
  if (!stats.complete) {
    say("stopped after {} of text; {}\n", format_bytes(static_cast<double>(stats.bytes)),
        how.go_on ? "the same command goes on from there" : "nothing is kept, as standard input cannot be read again");
    return stopped_exit_code();
  }
  say("{}: {} tokens, {} documents, from {} ({:.2f} bytes a token)\n", out_, stats.tokens, stats.documents,
      format_bytes(static_cast<double>(stats.bytes)),
      stats.tokens > 0 ? static_cast<double>(stats.bytes) / static_cast<double>(stats.tokens) : 0.0);
  say("read: {}{}\n", kinds_of(files), bad.count() > 0 ? fmt::format("; {} lines left out", bad.count()) : "");
  if (stats.end >= 0) say("end of each document: token {} (--no-document-end leaves it out)\n", stats.end);
  return kExitOk;
}

}  // namespace

std::unique_ptr<Command> tokenize_command() { return std::make_unique<Tokenize>(); }

}  // namespace fw::cli
