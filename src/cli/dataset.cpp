#include "cli/dataset.h"

#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <system_error>

#include "base/checksum.h"
#include "base/error.h"
#include "base/file.h"
#include "base/folders.h"
#include "base/stop.h"
#include "cli/options.h"
#include "cli/recipe.h"
#include "cli/say.h"
#include "report/progress.h"
#include "train/byte_source.h"
#include "train/text_parts.h"
#include "train/trainer.h"

namespace fw::cli {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view kMagic = "FWTOKEN1";
// The fingerprint of tokens that are being made.
const std::string kUnfinished = "unfinished\n";

// One entry of data.text: a file or a pattern, and a weight if it says one.
struct Entry {
  std::string pattern;
  std::optional<double> weight;
};

// "books/*.txt:0.7": what stands after the last colon is a weight if it is a number, unless a file is called so.
Entry parse_entry(const std::string& text) {
  const size_t colon = text.rfind(':');
  if (colon == std::string::npos || colon == 0 || file_exists(text)) return {text, {}};
  double weight = 0;
  const char *begin = text.data() + colon + 1, *end = text.data() + text.size();
  const auto [rest, error] = std::from_chars(begin, end, weight);
  if (error != std::errc() || rest != end || begin == end) return {text, {}};
  if (!(weight > 0 && std::isfinite(weight)))
    fail_usage("data.text: expected a weight > 0 behind the colon of '{}'", text);
  return {text.substr(0, colon), weight};
}

// Texts that are read one after the other, and their share of the training windows.
struct Source {
  StringList patterns, files;
  double weight = 1;
  bool tokens = false;  // the one file is a token file
};

// Without weights all entries are one source.
std::vector<Source> parse_sources(const StringList& texts) {
  std::vector<Source> sources;
  size_t weighted = 0;
  for (const std::string& text : texts) {
    const Entry entry = parse_entry(text);
    if (entry.weight) ++weighted;
    if (entry.weight || sources.empty()) sources.push_back({});
    sources.back().patterns.push_back(entry.pattern);
    sources.back().weight = entry.weight.value_or(1);
  }
  if (weighted != 0 && weighted != texts.size()) {
    const auto plain =
        std::find_if(texts.begin(), texts.end(), [](const std::string& text) { return !parse_entry(text).weight; });
    fail_usage("data.text: expected a weight behind each of the {} texts or behind none, '{}' has none", texts.size(),
               *plain);
  }
  return sources;
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
    const uint64_t size = fs::file_size(path);
    Checksum alone;
    sum_.add(std::as_bytes(std::span(&size, 1)));
    std::ifstream in(path, std::ios::binary);
    std::string piece(size_t{1} << 20, '\0');
    for (uint64_t rest = size; rest > 0;) {
      in.read(piece.data(), static_cast<std::streamsize>(std::min<uint64_t>(piece.size(), rest)));
      if (in.gcount() <= 0) fail_io("cannot read '{}'", path);
      sum_.add(std::string_view(piece).substr(0, static_cast<size_t>(in.gcount())));
      alone.add(std::string_view(piece).substr(0, static_cast<size_t>(in.gcount())));
      rest -= static_cast<uint64_t>(in.gcount());
    }
    files_.emplace_back(fmt::format("the file '{}'", path),
                        fmt::format("{} bytes with checksum {:016x}", size, alone.value()));
  }
  const Facts& files() const { return files_; }
  std::string text() const { return fmt::format("{:016x}\n", sum_.value()); }

 private:
  Checksum sum_;
  Facts files_;
};

// as_before: as older runs have it, of which the field of a test does not count.
Fingerprint fingerprint(const DataConfig& data, const std::vector<Source>& sources, const Tokenizer& tokenizer,
                        bool as_before = false) {
  Fingerprint print;
  const StringList files = text_files(data);
  print.add(tokenizer.type());
  print.add(fmt::format("{} {} {}", tokenizer.vocab_size(), data.valid_fraction, files.size()));
  print.add(data.separator);
  if (data.tokenizer.empty()) {  // of a model
    print.add(fmt::format("{:016x}", tokenizer.checksum()));
  } else if (data.tokenizer != "bytes") {
    print.add_file(data.tokenizer);
  }
  for (const std::string& path : files) print.add_file(path);
  if (!data.valid.empty()) print.add_file(data.valid);
  if (!data.test.empty()) print.add_file(data.test);
  const bool reads_lines = std::any_of(files.begin(), files.end(), is_json_lines) || is_json_lines(data.valid);
  if (reads_lines) print.add(data.field);
  if (!as_before && !reads_lines && is_json_lines(data.test)) print.add("test " + data.field);
  if (data.skip_bad && (reads_lines || is_json_lines(data.test))) print.add("without bad lines");
  if (data.document_end && tokenizer.end_of_text() >= 0) print.add(fmt::format("end {}", tokenizer.end_of_text()));
  if (sources.size() > 1) {
    for (const Source& source : sources) print.add(fmt::format("{} {}", source.files.size(), source.weight));
  }
  return print;
}

// What may be read as text or is a token file.
void check_file(const std::string& path) {
  if (!is_token_file(path)) check_text(path);
}

void check_sources(const DataConfig& data, std::vector<Source>& sources) {
  for (Source& source : sources) {
    source.files = expand_globs(source.patterns);
    const size_t count = source.files.size();
    const auto tokens = std::find_if(source.files.begin(), source.files.end(), is_token_file);
    if (tokens == source.files.end()) continue;
    if (count > 1)
      fail_usage("data.text: expected text files or one token file, got {} files with a token file among them, '{}'",
                 count, *tokens);
    if (data.valid.empty() && data.valid_fraction > 0) {
      fail_usage(
          "data.text: '{}' is a token file, of which no share can be held out: give a held-out file with --valid, or "
          "--valid-fraction 0",
          *tokens);
    }
    source.tokens = true;
  }
}

// Makes the token files of a run folder.
class Preparation {
 public:
  Preparation(const DataConfig& data, const Tokenizer& tokenizer, const std::string& folder,
              const PrepareOptions& options)
      : data_(data),
        tokenizer_(tokenizer),
        options_(options),
        folder_(folder),
        cache_(folder + "/data"),
        sources_(parse_sources(data.text)) {}

  Dataset run() {
    std::string before = file_exists(print_path()) ? read_file(print_path()) : kUnfinished;
    if (before != kUnfinished && lacks_text()) {
      set_.notes.push_back(
          fmt::format("the text is no longer where it was; the run goes on with its tokens in '{}'", cache_));
    } else {
      check_sources(data_, sources_);
      for (const std::string& path : text_files(data_)) check_file(path);
      if (!data_.valid.empty()) check_file(data_.valid);
      if (!data_.test.empty()) check_file(data_.test);
      const Fingerprint found = fingerprint(data_, sources_, tokenizer_);
      const std::string print = found.text();
      set_.facts = found.files();
      set_.facts.emplace_back("texts, their split and the tokenizer", print.substr(0, print.size() - 1));
      set_.kinds = kinds_of(text_files(data_));
      if (options_.follow) return followed();
      if (options_.resume && before != print && before == fingerprint(data_, sources_, tokenizer_, true).text())
        before = print;
      if (options_.resume && before != kUnfinished && before != print) {
        fail_usage(
            "--resume: the text, its split or the tokenizer is not what the run in '{}' began with: give back what it "
            "was, or begin anew in another folder "
            "(--out)",
            folder_);
      }
      if (before != print && (makes_train() || makes_valid() || makes_test())) {
        const bool fresh = !file_exists(cache_);
        make_folders(cache_);
        try {
          // first: what it stands for is about to change, and the folder is the run's
          write_file_atomic(print_path(), kUnfinished);
          if (!make()) return std::move(set_);
          if (fresh && options_.check) options_.check(mix());
        } catch (...) {
          if (fresh) discard();
          throw;
        }
        write_file_atomic(print_path(), print);
        bad_.say();
        if (bad_.count() > 0) set_.notes.push_back(fmt::format("{} lines without a text were left out", bad_.count()));
        if (!data_.separator.empty() && separators_ == 0) set_.notes.push_back(no_separator(data_.separator));
      }
    }
    return followed();
  }

 private:
  Dataset followed() {
    open();
    const auto add = [&](const TokenFile& file) {
      set_.facts.emplace_back(fmt::format("the tokens '{}'", file.name()),
                              fmt::format("{} with checksum {:016x}", file.tokens(), file.checksum()));
    };
    for (const TokenMix::Part& part : set_.train->parts) add(*part.file);
    if (set_.valid) add(*set_.valid);
    if (set_.test) add(*set_.test);
    return std::move(set_);
  }
  std::string print_path() const { return cache_ + "/fingerprint"; }
  std::string test_path() const { return cache_ + "/test.tokens"; }
  std::string valid_path() const { return cache_ + "/valid.tokens"; }
  std::string train_path(size_t source) const {
    return sources_.size() == 1 ? cache_ + "/train.tokens" : fmt::format("{}/train-{}.tokens", cache_, source);
  }
  bool makes_train() const {
    return std::any_of(sources_.begin(), sources_.end(), [](const Source& s) { return !s.tokens; });
  }
  bool valid_is_tokens() const { return !data_.valid.empty() && is_token_file(data_.valid); }
  bool makes_valid() const { return !valid_is_tokens() && (!data_.valid.empty() || data_.valid_fraction > 0); }

  bool makes_test() const { return !data_.test.empty() && !is_token_file(data_.test); }

  // Of a resumed run: a text is gone, and all that is made of texts is there.
  bool lacks_text() const {
    if (!options_.resume || !options_.may_lack_text) return false;
    const auto gone = [](const std::string& path) {
      return path.find_first_of("*?[") == std::string::npos && !file_exists(path);
    };
    bool any = (!data_.valid.empty() && gone(data_.valid)) || (!data_.test.empty() && gone(data_.test));
    for (const Source& source : sources_)
      any = any || std::any_of(source.patterns.begin(), source.patterns.end(), gone);
    if (!any || (makes_valid() && !file_exists(valid_path())) || (makes_test() && !file_exists(test_path())))
      return false;
    for (size_t i = 0; i < sources_.size(); ++i) {
      if (!file_exists(train_path(i))) return false;
    }
    return true;
  }

  // What a call that failed made, unless a part of it can be gone on with.
  void discard() const {
    std::error_code ignored;
    for (fs::directory_iterator entry(cache_, ignored), end; !ignored && entry != end; entry.increment(ignored)) {
      if (entry->path().extension() == ".json") return;  // the note of tokens that are not whole yet
    }
    fs::remove_all(cache_, ignored);
  }

  // Returns false when it was stopped.
  bool make() {
    const bool hold = data_.valid.empty() && makes_valid();
    std::vector<std::vector<TextPart>> train(sources_.size());
    std::vector<TextPart> valid;
    for (size_t i = 0; i < sources_.size(); ++i) {
      if (sources_[i].tokens) continue;
      TextSplit split{whole_texts(sources_[i].files), {}};
      if (hold) split = hold_out(sources_[i].files, rules(), data_.separator, data_.valid_fraction);
      if (hold && (split.valid.empty() || split.train.empty())) {
        fail_usage(
            "data.valid_fraction: the last {:g} of the text{} cannot be held out in whole {}: give more text, another "
            "--valid-fraction, or 0{}",
            data_.valid_fraction, sources_.size() > 1 ? fmt::format(" '{}'", sources_[i].patterns[0]) : "",
            data_.separator.empty() ? "lines" : "documents",
            data_.separator.empty()
                ? ""
                : fmt::format(" (documents end at lines that are '{}': are there any?)", data_.separator));
      }
      train[i] = std::move(split.train);
      valid.insert(valid.end(), split.valid.begin(), split.valid.end());
    }
    if (hold && !write(valid, valid_path())) return false;
    for (size_t i = 0; i < sources_.size(); ++i) {
      if (!sources_[i].tokens && !write(train[i], train_path(i))) return false;
    }
    if (!data_.valid.empty() && makes_valid() && !write(whole_texts({data_.valid}), valid_path())) return false;
    return !makes_test() || write(whole_texts({data_.test}), test_path());
  }

  LineRules rules() { return line_rules(data_.field, data_.skip_bad, bad_); }

  bool write(const std::vector<TextPart>& parts, const std::string& path) {
    TokenizeOptions options;
    options.separator = data_.separator;
    options.document_end = data_.document_end;
    options.progress = options_.progress;
    const TokenFileStats stats =
        write_token_file([&] { return open_parts(parts, rules()); }, options, tokenizer_, path);
    set_.text_bytes += stats.bytes;
    separators_ += stats.separators;
    return stats.complete;
  }

  TokenMix mix() const {
    std::vector<TokenMix::Part> parts;
    for (size_t i = 0; i < sources_.size(); ++i) {
      parts.push_back({std::make_shared<const TokenFile>(sources_[i].tokens ? sources_[i].files[0] : train_path(i)),
                       sources_[i].weight});
    }
    return TokenMix(std::move(parts));
  }

  void open() {
    const auto tokens = [](const std::string& path) { return std::make_shared<const TokenFile>(path); };
    for (size_t i = 0; i < sources_.size(); ++i) {
      if (!sources_[i].tokens) set_.files.push_back(train_path(i));
    }
    set_.train.emplace(mix());
    if (makes_valid()) {
      set_.valid = tokens(valid_path());
      set_.files.push_back(valid_path());
    } else if (valid_is_tokens()) {
      set_.valid = tokens(data_.valid);
    }
    if (!data_.test.empty()) set_.test = tokens(makes_test() ? test_path() : data_.test);
    if (makes_test()) set_.files.push_back(test_path());
  }

  const DataConfig& data_;
  const Tokenizer& tokenizer_;
  const PrepareOptions& options_;
  std::string folder_, cache_;
  std::vector<Source> sources_;
  int64_t separators_ = 0;  // lines of the texts
  BadLines bad_;
  Dataset set_;
};

}  // namespace

std::string no_separator(const std::string& separator) {
  return fmt::format("no line of the text is the separator '{}': each text is one document", separator);
}

void BadLines::add(const std::string& what) {
  constexpr size_t kNamed = 20;
  Checksum sum;
  sum.add(what);
  if (seen_.insert(sum.value()).second && named_.size() < kNamed) named_.push_back(what);
}

void BadLines::say() const {
  for (const std::string& line : named_) say_aside("left out: {}\n", line);
  if (seen_.size() > named_.size())
    say_aside("left out: {} lines in all; the first {} are named\n", seen_.size(), named_.size());
}

LineRules line_rules(const std::string& field, bool skip_bad, BadLines& bad) {
  LineRules rules(field);
  rules.advice = "; --skip-bad leaves such lines out";
  if (skip_bad) rules.on_bad = [&bad](const std::string& what) { bad.add(what); };
  return rules;
}

std::string kinds_of(const StringList& files) {
  std::vector<std::pair<std::string, int64_t>> kinds;
  for (const std::string& path : files) {
    std::string kind = "plain text";
    if (path != "-" && is_token_file(path)) {
      kind = "tokens";
    } else if (path == "-") {
      kind = "standard input";
    } else {
      if (is_json_lines(path)) kind = "JSON lines";
      if (const std::string packing = packing_of(path); !packing.empty()) kind += " (" + packing + ")";
    }
    const auto known = std::ranges::find(kinds, kind, &std::pair<std::string, int64_t>::first);
    if (known == kinds.end()) {
      kinds.emplace_back(kind, 1);
    } else {
      ++known->second;
    }
  }
  std::string text;
  for (const auto& [kind, count] : kinds) {
    if (kind == "standard input") {
      text += (text.empty() ? "" : ", ") + kind;
    } else {
      text += fmt::format("{}{}{} of {}", text.empty() ? "" : ", ", count,
                          text.empty() ? count == 1 ? " file" : " files" : "", kind);
    }
  }
  return text;
}

std::string held_out_tokens(const std::string& model) {
  fs::path folder = fs::path(model).lexically_normal();
  if (!folder.has_filename()) folder = folder.parent_path();
  std::error_code error;
  folder = fs::absolute(folder, error);
  for (int up = 0; up < 3 && !error; ++up, folder = folder.parent_path()) {  // RUN/checkpoints/step-N at most
    std::string tokens = (folder / "data" / "valid.tokens").string(), run_file = (folder / "config.toml").string();
    if (file_exists(tokens)) return tokens;
    if (!file_exists(run_file)) continue;
    DataConfig data;
    TrainConfig train;
    ModelConfig config;
    Options table;
    table.add(key_tables(data));
    table.add(key_tables(train));
    table.add(key_tables(config));
    load_recipe(run_file, table);
    return !data.valid.empty() && is_token_file(data.valid) ? data.valid : "";
  }
  return "";
}

bool is_token_file(const std::string& path) { return file_start(path, kMagic.size()) == kMagic; }

bool reads_input(const StringList& files) {
  const auto count = std::count(files.begin(), files.end(), "-");
  if (count > 1) fail_usage("-: expected standard input once, it was given {} times", count);
  return count == 1;
}

void check_text(const std::string& path) {
  if (path == "-") return;
  if (is_token_file(path)) fail_usage("'{}': expected text, it is a token file already", path);
  char first = '\0';
  if (open_bytes(path)->read(std::span(&first, 1)) == 0) fail_usage("'{}': expected text, the file is empty", path);
}

StringList expand_globs(const StringList& patterns) {
  StringList files;
  for (const std::string& pattern : patterns) {
    const StringList found = expand_glob(pattern);
    files.insert(files.end(), found.begin(), found.end());
  }
  return files;
}

StringList text_files(const DataConfig& data) {
  StringList patterns;
  for (const std::string& text : data.text) patterns.push_back(parse_entry(text).pattern);
  return expand_globs(patterns);
}

Dataset prepare_dataset(const DataConfig& data, const Tokenizer& tokenizer, const std::string& folder,
                        const PrepareOptions& options) {
  validate(data);
  return Preparation(data, tokenizer, folder, options).run();
}

std::function<bool(const TokenFileStats&)> tokenize_progress(const std::atomic<bool>& stop) {
  const auto bar = std::make_shared<ProgressBar>(STDOUT_FILENO);
  return [&stop, bar](const TokenFileStats& stats) {
    bar->draw(fmt::format("tokenizing: {} of text, {} tokens, {} documents",
                          format_bytes(static_cast<double>(stats.bytes)),
                          format_count(static_cast<double>(stats.tokens)), stats.documents));
    return !stop;
  };
}

TemporaryTokens::TemporaryTokens(const StringList& texts, const std::string& field, const std::string& separator,
                                 const Tokenizer& tokenizer) {
  const StringList files = expand_globs(texts);
  if (files.empty()) fail_usage("no text: give a file with --text");
  if (files.size() == 1 && is_token_file(files[0])) {
    file_ = std::make_unique<TokenFile>(files[0]);
    check_tokenizer(*file_, tokenizer);
    return;
  }
  reads_input(files);
  for (const std::string& path : files) check_text(path);
  // The folder goes as soon as the file in it is mapped: whatever ends the process later leaves nothing behind.
  const TemporaryFolder folder;
  TokenizeOptions options;
  options.separator = separator;
  options.progress = [](const TokenFileStats& stats) {
    stop_point("tokenization", stats.bytes, -1, "bytes");
    return true;
  };
  options.go_on = false;
  const TokenFileStats stats = write_token_file([&] { return open_parts(whole_texts(files), field); }, options,
                                                tokenizer, folder.path() + "/tokens");
  if (!separator.empty() && stats.separators == 0) note_ = no_separator(separator);
  file_ = std::make_unique<TokenFile>(folder.path() + "/tokens");
}

}  // namespace fw::cli
