#include "train/token_writer.h"

#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <optional>
#include <vector>

#include "base/checksum.h"
#include "base/error.h"
#include "base/file.h"
#include "base/folders.h"
#include "base/growing_file.h"
#include "base/stop.h"
#include "tokenizer/text_bytes.h"
#include "train/token_format.h"

namespace fw {
namespace {

namespace fs = std::filesystem;

// How far the files have come, and the text they stand for: the bytes of its documents and where they end, as a
// checksum.
struct Progress {
  uint64_t tokens = 0, documents = 0, last = 0, encoded = 0, ends = 0, checksum = 0;  // last: tokens of whole documents
  uint64_t exceptions = 0;                                                            // of bytes (token_format.h)
  // 1: the open document has its end token, and at most space after it
  uint64_t ended = 0;
};

constexpr std::pair<const char*, uint64_t Progress::*> kProgressKeys[] = {
    {"tokens", &Progress::tokens},         {"documents", &Progress::documents}, {"last", &Progress::last},
    {"encoded", &Progress::encoded},       {"ends", &Progress::ends},           {"checksum", &Progress::checksum},
    {"exceptions", &Progress::exceptions}, {"ended", &Progress::ended}};

std::string made_by(const Tokenizer& tokenizer, const std::string& separator, int32_t end) {
  Checksum sum;
  sum.add(separator);
  return fmt::format("{} {:016x} {:016x} {}", tokenizer.type(), tokenizer.checksum(), sum.value(), end);
}

// The text does not begin as the one that an interrupted call had read.
struct AnotherText {};

// The growing files of a token file: ids (after room for the header), offsets, and exceptions of bytes.
struct GrowingFiles {
  GrowingFile ids, offsets, exceptions;
};

// Documents to ids in the growing files. What an earlier call did (`before`) is only compared. end: the id after each
// document, or -1.
class Encoder {
 public:
  Encoder(const Tokenizer& tokenizer, GrowingFiles& files, size_t id_bytes, int32_t end, const Progress& before)
      : tokenizer_(tokenizer),
        text_bytes_(tokenizer),
        files_(files),
        id_bytes_(id_bytes),
        end_(end),
        before_(before),
        now_(before) {
    now_.encoded = now_.ends = 0;
    known_ = before.encoded + before.ends == 0;
  }

  void add(std::string_view framed) { waiting_ += framed; }
  // Encodes what can be encoded before the rest of the document is known.
  void encode_some() { encode(tokenizer_.whole_prefix(waiting_)); }

  void end_document() {
    encode(waiting_.size());
    sum_.add(std::string_view("\0", 1));
    ++now_.ends;
    if (!known_) return compare();
    if (now_.tokens == now_.last) return;
    if (end_ >= 0 && now_.ended == 0) {
      constexpr int64_t kNoText = 0;
      put({&end_, 1}, {&kNoText, 1});
    }
    now_.last = now_.tokens;
    now_.ended = 0;
    ++now_.documents;
    files_.offsets.append(std::as_bytes(std::span(&now_.last, 1)));
  }

  bool knows_bytes() const { return text_bytes_.known(); }
  // Whether what an earlier call did is over.
  bool caught_up() const { return known_; }
  Progress progress() const {
    Progress p = now_;
    p.checksum = sum_.value();
    return p;
  }

 private:
  void encode(size_t count) {
    std::string_view text = std::string_view(waiting_).substr(0, count);
    if (!known_ && !text.empty()) {
      const size_t old = static_cast<size_t>(std::min<uint64_t>(text.size(), before_.encoded - now_.encoded));
      sum_.add(text.substr(0, old));
      now_.encoded += old;
      text.remove_prefix(old);
      compare();
      if (!known_ && !text.empty()) throw AnotherText();
    }
    if (!text.empty()) {
      sum_.add(text);
      now_.encoded += text.size();
      const std::vector<int32_t> ids = tokenizer_.encode(text);
      if (text_bytes_.known()) text_bytes_.measure(text, ids, bytes_);
      put(ids, bytes_);
    }
    waiting_.erase(0, count);
  }

  // bytes: of each id, read where they are known.
  void put(std::span<const int32_t> ids, std::span<const int64_t> bytes) {
    packed_.resize(ids.size() * id_bytes_);
    for (size_t i = 0; i < ids.size(); ++i) std::memcpy(packed_.data() + i * id_bytes_, &ids[i], id_bytes_);
    files_.ids.append(packed_);
    for (size_t i = 0; i < ids.size(); ++i) {
      if (end_ >= 0) now_.ended = ids[i] == end_ || (now_.ended != 0 && text_bytes_.is_space(ids[i]));
      if (!text_bytes_.known() || bytes[i] == text_bytes_.piece(ids[i])) continue;
      const TokenBytes exception{now_.tokens + i, static_cast<uint64_t>(bytes[i])};
      files_.exceptions.append(std::as_bytes(std::span(&exception, 1)));
      ++now_.exceptions;
    }
    now_.tokens += ids.size();
  }

  void compare() {
    if (now_.ends > before_.ends) throw AnotherText();
    if (now_.encoded != before_.encoded || now_.ends != before_.ends) return;
    if (sum_.value() != before_.checksum) throw AnotherText();
    known_ = true;
  }

  const Tokenizer& tokenizer_;
  const TextBytes text_bytes_;
  GrowingFiles& files_;
  size_t id_bytes_;
  int32_t end_;
  const Progress before_;
  Progress now_;
  bool known_ = false;
  Checksum sum_;
  std::string waiting_;
  std::vector<std::byte> packed_;
  std::vector<int64_t> bytes_;
};

// A text that comes in pieces, cut into documents: with a separator "\n", the lines up to it, and the separator's line
// again.
class Framer {
 public:
  Framer(const std::string& separator, Encoder& encoder) : separator_(separator), encoder_(encoder) {}

  void add(std::string_view piece) {
    if (separator_.empty()) return content(piece);
    lines_ += piece;
    size_t line = 0;
    for (size_t end = lines_.find('\n', searched_); end != std::string::npos; end = lines_.find('\n', line)) {
      add_line(std::string_view(lines_).substr(line, end - line), true);
      line = end + 1;
    }
    lines_.erase(0, line);
    searched_ = lines_.size();
    // The beginning of a line that is too long to be the separator (and the '\r' after it) need not wait for its end.
    if (lines_.size() > separator_.size() + 1) {
      content(lines_);
      lines_.clear();
      searched_ = 0;
      inside_line_ = true;
    }
  }

  void end_text() {
    if (!lines_.empty()) add_line(lines_, false);
    lines_.clear();
    searched_ = 0;
    inside_line_ = false;
    end_document();
  }

  void encode_some() { encoder_.encode_some(); }
  uint64_t text_bytes() const { return bytes_; }
  int64_t separators() const { return separators_; }

 private:
  void add_line(std::string_view line, bool has_end) {
    std::string_view name = line;
    if (!name.empty() && name.back() == '\r') name.remove_suffix(1);
    if (!std::exchange(inside_line_, false) && name == separator_) {
      ++separators_;
      return end_document();
    }
    content(line);
    if (has_end) content("\n");
  }

  void content(std::string_view text) {
    if (text.empty()) return;
    if (!std::exchange(open_, true) && !separator_.empty()) encoder_.add("\n");
    encoder_.add(text);
    bytes_ += text.size();
    last_ = text.back();
  }

  void end_document() {
    if (!std::exchange(open_, false)) return;
    if (!separator_.empty()) {
      // The last line of a text may lack its end; the separator must stand on a line of its own.
      const std::string end = (last_ == '\n' ? "" : "\n") + separator_ + "\n";
      encoder_.add(end);
      bytes_ += end.size();
    }
    encoder_.end_document();
  }

  const std::string& separator_;
  Encoder& encoder_;
  std::string lines_;  // from the beginning of a line whose end has not come
  size_t searched_ = 0;
  bool open_ = false, inside_line_ = false;
  char last_ = '\0';
  uint64_t bytes_ = 0;
  int64_t separators_ = 0;
};

// The files of a token file that is being made.
class Parts {
 public:
  Parts(const std::string& target, const std::string& shown)
      : files{{target + ".tokenizing", shown},
              {target + ".tokenizing.offsets", shown},
              {target + ".tokenizing.bytes", shown}},
        target_(target),
        note_path_(target + ".tokenizing.json") {}
  // Without a note of how far they came the parts are worth nothing.
  ~Parts() {
    if (!done_ && !file_exists(note_path_)) {
      files.ids.remove();
      files.offsets.remove();
      files.exceptions.remove();
    }
  }
  Parts(const Parts&) = delete;
  Parts& operator=(const Parts&) = delete;

  // What an earlier call left, if it was the same work; otherwise the files hold what they begin with.
  Progress begin(const std::function<std::string()>& made_by, size_t id_bytes) {
    if (file_exists(note_path_)) {
      const Progress p = read_note(made_by());
      const uint64_t id_size = sizeof(TokenHeader) + p.tokens * id_bytes, offset_size = (p.documents + 1) * 8;
      const uint64_t exception_size = p.exceptions * sizeof(TokenBytes);
      if (p.encoded > 0 && p.tokens < files.ids.size() && p.documents < files.offsets.size() &&
          p.exceptions <= files.exceptions.size() && id_size <= files.ids.size() &&
          offset_size <= files.offsets.size() && exception_size <= files.exceptions.size()) {
        files.ids.truncate(id_size);
        files.offsets.truncate(offset_size);
        files.exceptions.truncate(exception_size);
        return p;
      }
    }
    clear();
    return {};
  }

  void clear() {
    ::unlink(note_path_.c_str());
    files.ids.truncate(0);
    files.offsets.truncate(0);
    files.exceptions.truncate(0);
    const TokenHeader room;
    files.ids.append(std::as_bytes(std::span(&room, 1)));
    const uint64_t first = 0;
    files.offsets.append(std::as_bytes(std::span(&first, 1)));
  }

  void note(const std::string& made_by, const Progress& progress) {
    files.ids.sync();
    files.offsets.sync();
    files.exceptions.sync();
    nlohmann::ordered_json json = {{"made_by", made_by}};
    for (const auto& [key, field] : kProgressKeys) json[key] = progress.*field;
    write_file_atomic(note_path_, json.dump() + "\n");
  }

  void finish(TokenHeader header, const TokenTrailer& trailer) {
    GrowingFile& ids = files.ids;
    const std::vector<std::byte> zeros(8);
    const uint64_t bytes = header.tokens * header.id_bytes;
    ids.append(std::span(zeros).first(padded_to_offsets(bytes) - bytes));
    const auto append = [&ids](std::span<const std::byte> part) { ids.append(part); };
    files.offsets.read(0, append);
    append(std::as_bytes(std::span(&trailer, 1)));
    files.exceptions.read(0, append);
    Checksum sum;
    sum.add(std::as_bytes(std::span(&header, 1)));
    ids.read(sizeof header, [&sum](std::span<const std::byte> part) { sum.add(part); });
    header.checksum = sum.value();
    ids.overwrite(0, std::as_bytes(std::span(&header, 1)));
    ids.replace(target_);
    done_ = true;
    ::unlink(note_path_.c_str());
    files.offsets.remove();
    files.exceptions.remove();
  }

  GrowingFiles files;

 private:
  Progress read_note(const std::string& made_by) const {
    Progress p;
    try {
      const auto json = nlohmann::json::parse(read_file(note_path_, size_t{1} << 16));
      if (json.at("made_by") != made_by) return {};
      for (const auto& [key, field] : kProgressKeys) p.*field = json.at(key).get<uint64_t>();
    } catch (const nlohmann::json::exception&) {
      return {};  // damaged: begin anew
    }
    return p;
  }

  std::string target_, note_path_;
  bool done_ = false;
};

// One pass over the texts. Returns nothing when they do not begin as those of the earlier call did.
std::optional<TokenFileStats> run(const TextOpener& open, const TokenizeOptions& options, const Tokenizer& tokenizer,
                                  const std::string& shown, Parts& parts) {
  TokenHeader header;
  header.vocab_size = static_cast<uint64_t>(tokenizer.vocab_size());
  header.tokenizer = tokenizer.checksum();
  header.id_bytes = header.vocab_size <= 0x100 ? 1 : header.vocab_size <= 0x10000 ? 2 : 4;
  const int32_t end = options.document_end ? tokenizer.end_of_text() : -1;
  std::string tag;
  const auto get_tag = [&] { return tag.empty() ? tag = made_by(tokenizer, options.separator, end) : tag; };

  Encoder encoder(tokenizer, parts.files, header.id_bytes, end, parts.begin(get_tag, header.id_bytes));
  Framer framer(options.separator, encoder);
  TokenFileStats stats;
  stats.end = end;
  uint64_t noted = encoder.progress().encoded, since = 0;
  bool known = encoder.caught_up();
  const auto update = [&] {
    const Progress p = encoder.progress();
    stats.tokens = static_cast<int64_t>(p.tokens);
    stats.documents = static_cast<int64_t>(p.documents);
    stats.bytes = static_cast<int64_t>(framer.text_bytes());
    stats.separators = framer.separators();
    if (!known && encoder.caught_up()) {
      known = true;
      stats.resumed_at = stats.bytes;
      noted = p.encoded;
    }
    return p;
  };
  const std::unique_ptr<TextSource> source = open();
  std::string piece(options.piece, '\0');
  try {
    while (stats.complete && source->next()) {
      while (const size_t n = source->read(piece)) {
        framer.add(std::string_view(piece).substr(0, n));
        encoder.encode_some();
        if ((since += n) < options.piece) continue;
        since = 0;
        const Progress p = update();
        stats.complete = !options.progress || options.progress(stats);
        if (options.go_on && known && (!stats.complete || p.encoded - noted >= options.safe_every)) {
          parts.note(get_tag(), p);
          noted = p.encoded;
        }
        if (!stats.complete) return stats;
      }
      framer.end_text();
    }
  } catch (const AnotherText&) {
    parts.clear();
    return std::nullopt;
  }
  update();
  if (!encoder.caught_up()) {
    parts.clear();
    return std::nullopt;
  }
  if (stats.documents == 0) fail_usage("cannot make the token file '{}': there is no text for it", shown);
  header.tokens = static_cast<uint64_t>(stats.tokens);
  header.documents = static_cast<uint64_t>(stats.documents);
  header.text_bytes = static_cast<uint64_t>(stats.bytes);
  parts.finish(header, {encoder.knows_bytes() ? 1U : 0U, end, encoder.progress().exceptions});
  return stats;
}

class MemoryTexts final : public TextSource {
 public:
  explicit MemoryTexts(std::span<const std::string> texts) : texts_(texts) {}
  const std::string& name() const override { return name_; }
  bool next() override {
    if (next_ == texts_.size()) return false;
    text_ = text_in_memory(texts_[next_++]);
    return text_->next();
  }
  size_t read(std::span<char> out) override { return text_->read(out); }

 private:
  const std::string name_ = "text";
  std::span<const std::string> texts_;
  size_t next_ = 0;
  std::unique_ptr<TextSource> text_;
};

}  // namespace

TokenFileStats write_token_file(const TextOpener& open, const TokenizeOptions& options, const Tokenizer& tokenizer,
                                const std::string& path) {
  if (options.separator.find_first_of("\r\n") != std::string::npos)
    fail_usage("document separator: expected the content of one line, got text with a line end");
  std::error_code ignored;
  if (fs::is_directory(path, ignored)) fail_io("cannot write '{}': expected a file, it is a folder", path);
  if (fs::exists(path, ignored) && !fs::is_regular_file(path, ignored)) {
    // A device or a pipe cannot be gone back in: the file is made elsewhere and copied.
    const TemporaryFolder folder;
    const std::string copy = folder.path() + "/tokens";
    const TokenFileStats stats = write_token_file(open, options, tokenizer, copy);
    if (!stats.complete) return stats;
    const MappedFile map(copy);
    ::unlink(copy.c_str());
    write_file_atomic(path, [&map](const FileSink& sink) { sink(map.bytes()); });
    return stats;
  }
  // A symbolic link keeps pointing at its target, and the target is what is replaced.
  Parts parts(fs::is_symlink(path, ignored) ? fs::weakly_canonical(path).string() : path, path);
  if (!options.go_on) parts.clear();
  for (;;) {
    if (const auto stats = run(open, options, tokenizer, path, parts)) return *stats;
  }
}

TokenFileStats write_token_file(std::span<const std::string> texts, const std::string& separator,
                                const Tokenizer& tokenizer, const std::string& path) {
  TokenizeOptions options;
  options.separator = separator;
  int64_t size = 0;
  for (const std::string& text : texts) size += static_cast<int64_t>(text.size());
  options.progress = [size](const TokenFileStats& stats) {
    stop_point("tokenization", stats.bytes, size, "bytes");
    return true;
  };
  return write_token_file([texts] { return std::make_unique<MemoryTexts>(texts); }, options, tokenizer, path);
}

TokenFileStats write_token_file(const std::string& text, const std::string& separator, const Tokenizer& tokenizer,
                                const std::string& path) {
  return write_token_file(std::span(&text, 1), separator, tokenizer, path);
}

}  // namespace fw
