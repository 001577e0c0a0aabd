#include "train/text_parts.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "base/error.h"

namespace fw {
namespace {

constexpr size_t kPiece = size_t{1} << 18;
constexpr uint64_t kAll = std::numeric_limits<uint64_t>::max();

// Passes over `count` bytes, or what is left; returns how many there were.
uint64_t skip(TextSource& text, uint64_t count) {
  std::string piece(kPiece, '\0');
  uint64_t passed = 0;
  while (passed < count) {
    const size_t n = text.read(std::span(piece).first(static_cast<size_t>(std::min<uint64_t>(kPiece, count - passed))));
    if (n == 0) break;
    passed += n;
  }
  return passed;
}

class Parts final : public TextSource {
 public:
  Parts(std::vector<TextPart> parts, LineRules lines) : parts_(std::move(parts)), lines_(std::move(lines)) {}
  const std::string& name() const override { return source_ ? source_->name() : parts_.front().path; }

  bool next() override {
    while (part_ < parts_.size()) {
      const TextPart& part = parts_[part_];
      if (is_json_lines(part.path)) {
        if (next_line(part)) return true;
      } else if (!source_) {
        source_ = open_text(part.path, rules());
        source_->next();
        skip(*source_, part.begin);
        remaining_ = part.end - part.begin;
        return true;
      }
      source_.reset();
      ++part_;
    }
    return false;
  }

  size_t read(std::span<char> out) override {
    const size_t n = source_->read(out.first(static_cast<size_t>(std::min<uint64_t>(out.size(), remaining_))));
    remaining_ -= n;
    return n;
  }

 private:
  // Lines that are left out are told of once: by the part that they stand in.
  LineRules rules() {
    LineRules rules = lines_;
    if (lines_.on_bad) {
      rules.on_bad = [this](const std::string& what) {
        if (!passing_) lines_.on_bad(what);
      };
    }
    return rules;
  }
  bool next_line(const TextPart& part) {
    if (!source_) {
      source_ = open_text(part.path, rules());
      passing_ = true;
      for (line_ = 0; line_ < part.begin; ++line_) source_->next();
      passing_ = false;
    }
    remaining_ = kAll;
    return line_++ < part.end && source_->next();
  }

  std::vector<TextPart> parts_;
  LineRules lines_;
  bool passing_ = false;  // over texts that are not of the part
  size_t part_ = 0;
  std::unique_ptr<TextSource> source_;
  uint64_t line_ = 0;          // texts of JSON lines that were begun
  uint64_t remaining_ = kAll;  // bytes of this text
};

// Bytes of text in a file.
uint64_t measure(const std::string& path, const LineRules& lines) {
  const auto source = open_text(path, lines);
  uint64_t bytes = 0;
  while (source->next()) bytes += skip(*source, kAll);
  if (bytes == 0) fail_usage("'{}': expected text, the file is empty", path);
  return bytes;
}

struct Cut {
  uint64_t at;
  bool more;  // there is something after it
};

// The first of the JSON lines that begins at or after `at` bytes of text.
Cut line_at(TextSource& source, uint64_t at) {
  uint64_t bytes = 0, line = 0;
  while (source.next()) {
    if (bytes >= at) return {line, true};
    bytes += skip(source, kAll);
    ++line;
  }
  return {line, false};
}

Cut cut_of(const std::string& path, const LineRules& lines, const std::string& separator, uint64_t at, uint64_t size) {
  const auto source = open_text(path, lines);
  if (is_json_lines(path)) return line_at(*source, at);
  source->next();
  const uint64_t cut = find_cut(*source, at, separator);
  return {cut, cut < size};
}

}  // namespace

std::unique_ptr<TextSource> open_parts(std::vector<TextPart> parts, const LineRules& lines) {
  if (parts.empty()) fail_internal("open_parts: no part");
  return std::make_unique<Parts>(std::move(parts), lines);
}

std::vector<TextPart> whole_texts(const std::vector<std::string>& paths) {
  std::vector<TextPart> parts;
  parts.reserve(paths.size());
  for (const std::string& path : paths) parts.push_back({path});
  return parts;
}

uint64_t find_cut(TextSource& text, uint64_t at, const std::string& separator) {
  const std::string end = separator.empty() ? "\n" : "\n" + separator + "\n";
  uint64_t offset = skip(text, at);  // of window[0] in the text
  std::string window, piece(kPiece, '\0');
  // Without a separator: where a character of UTF-8 begins, for a text that is one long line.
  uint64_t character = kAll;
  while (const size_t n = text.read(piece)) {
    const size_t fresh = window.size();
    window.append(piece, 0, n);
    for (size_t i = fresh; i < window.size() && character == kAll; ++i) {
      if ((static_cast<unsigned char>(window[i]) & 0xC0) != 0x80) character = offset + i;
    }
    const size_t found = window.find(end);
    if (found != std::string::npos) {
      const uint64_t cut = offset + found + end.size();
      if (!separator.empty()) return cut;
      // A line's end that is the text's end leaves nothing to hold out.
      if (found + 1 < window.size() || text.read(std::span(piece).first(1)) > 0) return cut;
      return std::min(character, offset + window.size());
    }
    const size_t keep = std::min(window.size(), end.size() - 1);
    offset += window.size() - keep;
    window.erase(0, window.size() - keep);
  }
  const uint64_t size = offset + window.size();
  return separator.empty() ? std::min(character, size) : size;
}

TextSplit hold_out(const std::vector<std::string>& paths, const LineRules& lines, const std::string& separator,
                   double share) {
  LineRules quiet = lines;
  if (lines.on_bad) quiet.on_bad = [](const std::string&) {};
  std::vector<uint64_t> sizes;
  double total = 0, before = 0;
  for (const std::string& path : paths) total += static_cast<double>(sizes.emplace_back(measure(path, quiet)));
  TextSplit split;
  for (size_t i = 0; i < paths.size(); ++i) {
    const double size = static_cast<double>(sizes[i]);
    const double held = 1 - std::clamp((total * (1 - share) - before) / size, 0.0, 1.0);
    before += size;
    if (held <= 0) {
      split.train.push_back({paths[i]});
    } else if (held >= 1) {
      split.valid.push_back({paths[i]});
    } else {
      const Cut cut =
          cut_of(paths[i], quiet, separator, static_cast<uint64_t>(std::floor(size * (1 - held))), sizes[i]);
      if (cut.at > 0) split.train.push_back({paths[i], 0, cut.at});
      if (cut.more) split.valid.push_back({paths[i], cut.at});
    }
  }
  return split;
}

}  // namespace fw
