#include "cli/dataset.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>

#include "base/checksum.h"
#include "base/error.h"
#include "base/file.h"
#include "train/token_writer.h"

namespace fw::cli {
namespace {

// The fingerprint of tokens that are being made.
const std::string kUnfinished = "unfinished\n";
constexpr std::string_view kMagic = "FWTOKEN1";

std::string first_bytes(const std::string& path, size_t count) {
  std::ifstream in(path, std::ios::binary);
  std::string bytes(count, '\0');
  in.read(bytes.data(), static_cast<std::streamsize>(count));
  bytes.resize(static_cast<size_t>(in.gcount()));
  return bytes;
}

std::string read_text(const std::string& path) {
  std::string text = read_file(path);
  if (text.empty()) fail_usage("'{}': expected text, the file is empty", path);
  return text;
}

// What a set of token files came from, as one line.
class Fingerprint {
 public:
  void add(std::string_view part) {
    const uint64_t size = part.size();
    sum_.add(std::as_bytes(std::span(&size, 1)));  // the parts do not run into each other
    sum_.add(part);
  }
  void add_file(const std::string& path) {
    const MappedFile map(path);
    add({reinterpret_cast<const char*>(map.bytes().data()), map.bytes().size()});
  }
  std::string text() const { return fmt::format("{:016x}\n", sum_.value()); }

 private:
  Checksum sum_;
};

std::string fingerprint(const DataConfig& data, const Tokenizer& tokenizer) {
  Fingerprint print;
  print.add(tokenizer.type());
  print.add(fmt::format("{} {} {}", tokenizer.vocab_size(), data.valid_fraction, data.text.size()));
  print.add(data.separator);
  if (data.tokenizer.empty()) {  // of a model
    print.add(fmt::format("{:016x}", tokenizer.checksum()));
  } else if (data.tokenizer != "bytes") {
    print.add_file(data.tokenizer);
  }
  for (const std::string& path : data.text) print.add_file(path);
  if (!data.valid.empty()) print.add_file(data.valid);
  if (!data.test.empty()) print.add_file(data.test);
  return print.text();
}

void check_text(const std::string& path) {
  if (!is_token_file(path)) read_text(path);
}

std::shared_ptr<const TokenFile> open_tokens(const std::string& path) { return std::make_shared<const TokenFile>(path); }

}  // namespace

bool is_token_file(const std::string& path) { return first_bytes(path, kMagic.size()) == kMagic; }

StringList read_texts(const StringList& paths) {
  if (paths.empty()) fail_usage("no text: give a file with --text");
  StringList texts;
  for (const std::string& path : paths) texts.push_back(read_text(path));
  return texts;
}

Split hold_out(StringList texts, const std::string& separator, double share) {
  Split split;
  double total = 0, before = 0;
  for (const std::string& text : texts) total += static_cast<double>(text.size());
  for (std::string& text : texts) {
    const double size = static_cast<double>(text.size());
    const double train_share = size > 0 ? std::clamp((total * (1 - share) - before) / size, 0.0, 1.0) : 0.0;
    const size_t cut = held_out_begin(text, separator, 1 - train_share);
    if (cut < text.size()) split.valid.push_back(text.substr(cut));
    text.resize(cut);
    if (cut > 0) split.train.push_back(std::move(text));
    before += size;
  }
  return split;
}

size_t held_out_begin(const std::string& text, const std::string& separator, double valid_fraction) {
  if (valid_fraction <= 0) return text.size();
  if (valid_fraction >= 1) return 0;
  const auto at = static_cast<size_t>(std::floor(static_cast<double>(text.size()) * (1 - valid_fraction)));
  if (!separator.empty()) {
    const std::string line = "\n" + separator + "\n";
    const size_t found = text.find(line, at);
    return found == std::string::npos ? text.size() : found + line.size();
  }
  const size_t line = text.find('\n', at);
  if (line != std::string::npos && line + 1 < text.size()) return line + 1;
  // One long line: at least not inside a character of UTF-8.
  size_t cut = at;
  while (cut < text.size() && (static_cast<unsigned char>(text[cut]) & 0xC0) == 0x80) ++cut;
  return cut;
}

Dataset prepare_dataset(const DataConfig& data, const Tokenizer& tokenizer, const std::string& folder, bool resume) {
  validate(data);
  const bool tokens_given = std::any_of(data.text.begin(), data.text.end(), is_token_file);
  if (tokens_given && data.text.size() > 1)
    fail_usage("data.text: expected text files or one token file, got {} files with a token file among them", data.text.size());
  if (tokens_given && data.valid.empty() && data.valid_fraction > 0) {
    fail_usage("data.text: '{}' is a token file, of which no share can be held out: give a held-out file with --valid, or --valid-fraction 0", data.text[0]);
  }
  for (const std::string& path : data.text) check_text(path);
  if (!data.valid.empty()) check_text(data.valid);
  if (!data.test.empty()) check_text(data.test);

  const std::string cache = folder + "/data";
  const std::string train_path = cache + "/train.tokens", valid_path = cache + "/valid.tokens", test_path = cache + "/test.tokens",
                    print_path = cache + "/fingerprint";
  const std::string print = fingerprint(data, tokenizer);
  const std::string before = file_exists(print_path) ? read_file(print_path) : kUnfinished;
  const bool same = before == print;
  if (resume && before != kUnfinished && !same) {
    fail_usage(
        "--resume: the text, its split or the tokenizer is not what the run in '{}' began with: give back what it was, or begin anew in another folder (--out)",
        folder);
  }

  Dataset set;
  const bool valid_tokens = !data.valid.empty() && is_token_file(data.valid);
  const bool make_train = !tokens_given;
  const bool make_valid = !valid_tokens && (!data.valid.empty() || data.valid_fraction > 0);
  const bool make_test = !data.test.empty() && !is_token_file(data.test);
  if (!same && (make_train || make_valid || make_test)) {
    make_folders(cache);
    write_file_atomic(print_path, kUnfinished);  // first: what it stands for is about to change, and the folder is the run's
    if (make_train) {
      const bool hold = data.valid.empty() && make_valid;
      const Split split = hold_out(read_texts(data.text), data.separator, hold ? data.valid_fraction : 0);
      if (hold && (split.valid.empty() || split.train.empty())) {
        fail_usage("data.valid_fraction: the last {:g} of the text cannot be held out in whole {}: give more text, another --valid-fraction, or 0",
                   data.valid_fraction, data.separator.empty() ? "lines" : "documents");
      }
      if (hold) write_token_file(split.valid, data.separator, tokenizer, valid_path);
      write_token_file(split.train, data.separator, tokenizer, train_path);
    }
    if (!data.valid.empty() && make_valid) write_token_file(read_texts({data.valid}), data.separator, tokenizer, valid_path);
    if (make_test) write_token_file(read_texts({data.test}), data.separator, tokenizer, test_path);
    write_file_atomic(print_path, print);
  }
  set.train = open_tokens(make_train ? train_path : data.text[0]);
  if (make_train) set.files.push_back(train_path);
  if (make_valid) {
    set.valid = open_tokens(valid_path);
    set.files.push_back(valid_path);
  } else if (valid_tokens) {
    set.valid = open_tokens(data.valid);
  }
  if (!data.test.empty()) set.test = open_tokens(make_test ? test_path : data.test);
  if (make_test) set.files.push_back(test_path);
  return set;
}

TemporaryTokens::TemporaryTokens(const StringList& texts, const std::string& separator, const Tokenizer& tokenizer) {
  if (texts.size() == 1 && is_token_file(texts[0])) {
    file_ = std::make_unique<TokenFile>(texts[0]);
    check_tokenizer(*file_, tokenizer);
    return;
  }
  const StringList contents = read_texts(texts);
  std::error_code error;
  const std::filesystem::path parent = std::filesystem::temp_directory_path(error);
  if (error) fail_io("cannot make a temporary folder: {}; TMPDIR says where", error.message());
  std::string folder = (parent / "fastweight-XXXXXX").string();
  if (::mkdtemp(folder.data()) == nullptr) fail_io("cannot make a temporary folder '{}': {}; TMPDIR says where", folder, std::strerror(errno));
  // The folder goes as soon as the file in it is mapped: whatever ends the process later leaves nothing behind.
  try {
    write_token_file(contents, separator, tokenizer, folder + "/tokens");
    file_ = std::make_unique<TokenFile>(folder + "/tokens");
  } catch (...) {
    std::filesystem::remove_all(folder, error);
    throw;
  }
  std::filesystem::remove_all(folder, error);
}

}  // namespace fw::cli
