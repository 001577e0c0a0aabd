// From text files to token files: what training and evaluation read. Training's are kept in the run folder (data/), with a
// checksum of everything they came from, so that a resumed run finds the same tokens and a changed text is noticed.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "cli/run_config.h"
#include "tokenizer/tokenizer.h"
#include "train/token_file.h"

namespace fw::cli {

struct Dataset {
  std::shared_ptr<const TokenFile> train;
  std::shared_ptr<const TokenFile> valid;  // null: nothing is held out
  std::shared_ptr<const TokenFile> test;   // null: none was given
  std::vector<std::string> files;          // token files in the run folder
};

// resume: the run in `folder` goes on, so a text that is not the one it began with is an Error(kUsage). Other errors: texts
// that are missing, unreadable or empty, and a share of a token file that cannot be held out.
Dataset prepare_dataset(const DataConfig& data, const Tokenizer& tokenizer, const std::string& folder, bool resume);

// One token file of texts or of a token file, for evaluation. Tokens of texts live in a temporary file without a name.
class TemporaryTokens {
 public:
  TemporaryTokens(const StringList& texts, const std::string& separator, const Tokenizer& tokenizer);
  const TokenFile& file() const { return *file_; }

 private:
  std::unique_ptr<TokenFile> file_;
};

// Error(kUsage) for files that are missing or empty.
StringList read_texts(const StringList& paths);

// The end of the texts, one after the other, is held out: from where the share begins, or rather from the first document
// after that place, or the first line without a separator.
struct Split {
  StringList train, valid;
};
Split hold_out(StringList texts, const std::string& separator, double share);
size_t held_out_begin(const std::string& text, const std::string& separator, double valid_fraction);

bool is_token_file(const std::string& path);

}  // namespace fw::cli
