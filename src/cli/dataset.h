// From texts to token files: what training and evaluation read. Training's are kept in the run folder (data/), with a
// checksum of everything they came from, so that a resumed run finds the same tokens and a changed text is noticed.
// Texts are streams (train/text_source.h): plain files, JSON lines, both also packed, and patterns of the shell that
// stand for several.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "base/agreement.h"
#include "cli/run_config.h"
#include "tokenizer/tokenizer.h"
#include "train/token_file.h"
#include "train/token_writer.h"

namespace fw::cli {

struct Dataset {
  // none: it was stopped before all was tokenized; the same call goes on from there
  std::optional<TokenMix> train;
  std::shared_ptr<const TokenFile> valid;  // null: nothing is held out
  std::shared_ptr<const TokenFile> test;   // null: none was given
  std::vector<std::string> files;          // token files in the run folder
  std::vector<std::string> notes;          // what a user should know
  int64_t text_bytes = 0;                  // that were tokenized when it was stopped
  Facts facts;                             // of the texts and token files, for ranks that must have the same
  std::string kinds;                       // of the files that were given (kinds_of)
};

struct PrepareOptions {
  // The run in the folder goes on, so a text that is not the one it began with is an Error(kUsage).
  bool resume = false;
  // Of a run that goes on: texts that are gone may be missed as long as their tokens are there.
  bool may_lack_text = false;
  // Of a rank that is not the first, which has made the files: nothing is written, and texts that differ are no error
  // here but differing facts.
  bool follow = false;
  // Whether what was made for the first time can be trained on: what it throws leaves no tokens behind. May be null.
  std::function<void(const TokenMix& train)> check;
  // As TokenizeOptions::progress.
  std::function<bool(const TokenFileStats&)> progress;
};

// Errors: texts that are missing, unreadable or empty, weights of some texts only, and a share of a token file that
// cannot be held out.
Dataset prepare_dataset(const DataConfig& data, const Tokenizer& tokenizer, const std::string& folder,
                        const PrepareOptions& options);

// Lines that were left out: the first ones by name, all counted.
class BadLines {
 public:
  // For LineRules::on_bad. A line that is read twice counts once.
  void add(const std::string& what);
  int64_t count() const { return static_cast<int64_t>(seen_.size()); }
  // On standard error, those that were named and how many there are.
  void say() const;

 private:
  std::vector<std::string> named_;
  std::set<uint64_t> seen_;  // checksums
};

// "1 file of plain text, 2 of JSON lines (gzip)"
std::string kinds_of(const StringList& files);

// What data.skip_bad and `field` say of JSON lines.
LineRules line_rules(const std::string& field, bool skip_bad, BadLines& bad);

// Shows on a terminal how far it is and stops when `stop` says so.
std::function<bool(const TokenFileStats&)> tokenize_progress(const std::atomic<bool>& stop);

// The files that data.text names, without weights and patterns.
StringList text_files(const DataConfig& data);
StringList expand_globs(const StringList& patterns);

// One token file of texts or of a token file, for evaluation. Tokens of texts live in a temporary file without a name.
class TemporaryTokens {
 public:
  // Documents end as they do in the text: no end of text is added.
  TemporaryTokens(const StringList& texts, const std::string& field, const std::string& separator,
                  const Tokenizer& tokenizer);
  const TokenFile& file() const { return *file_; }
  const std::string& note() const { return note_; }  // what may not be as meant; "" mostly

 private:
  std::unique_ptr<TokenFile> file_;
  std::string note_;
};

// The held-out tokens of the run that `model` is the folder of, or stands in (model/, best/, checkpoints/step-N): its
// data/valid.tokens, or the token file that its config.toml names. "": there are none.
std::string held_out_tokens(const std::string& model);

// Whether "-", standard input, is one of them. Error(kUsage) when it stands twice.
bool reads_input(const StringList& files);

// Error(kUsage) for a file that is missing, not readable or empty, and for a token file. Of standard input nothing is
// known before.
void check_text(const std::string& path);
bool is_token_file(const std::string& path);

// The note of a text without a line that is the separator.
std::string no_separator(const std::string& separator);

}  // namespace fw::cli
