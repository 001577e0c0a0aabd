#include "tokenizer/decoder.h"

#include <algorithm>
#include <charconv>

#include "base/error.h"
#include "tokenizer/byte_level.h"
#include "tokenizer/utf8.h"

namespace fw {
namespace {

void replace_all(std::string& text, std::string_view what, std::string_view with) {
  size_t at = text.find(what);
  if (at == std::string::npos) return;
  std::string out;
  size_t done = 0;
  for (; at != std::string::npos; at = text.find(what, done)) {
    out.append(text, done, at - done).append(with);
    done = at + what.size();
  }
  text.replace(0, done, out);
}

// A pattern reads characters: bytes that are none stay between.
void replace_matches(std::string& text, const Pattern& pattern, const std::string& with, TextBudget& budget) {
  std::vector<Span> spans;
  PatternScan scan(pattern, budget);
  std::string out;
  for (std::string_view rest = text; !rest.empty();) {
    const size_t valid = utf8_prefix(rest);
    scan.cut(rest.substr(0, valid), spans);
    for (const Span& span : spans) {
      if (span.match) budget.grow(span.end - span.begin, with.size());
      out.append(span.match ? std::string_view(with) : rest.substr(span.begin, span.end - span.begin));
    }
    if (valid < rest.size()) out += rest[valid];
    rest.remove_prefix(std::min(valid + 1, rest.size()));
  }
  text.swap(out);
}

void strip(std::string& text, std::string_view character, int64_t start, int64_t stop) {
  std::string_view rest(text);
  for (; start > 0 && rest.starts_with(character); --start) rest.remove_prefix(character.size());
  for (; stop > 0 && rest.ends_with(character); --stop) rest.remove_suffix(character.size());
  text = std::string(rest);
}

// <0x0A> is a byte; -1: it is none. A plus sign is read as Rust reads it.
int byte_of(std::string_view token) {
  if (token.size() != 6 || !token.starts_with("<0x") || token.back() != '>') return -1;
  std::string_view digits = token.substr(3, 2);
  if (digits[0] == '+') digits.remove_prefix(1);
  unsigned byte = 0;
  const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), byte, 16);
  return error == std::errc() && end == digits.data() + digits.size() ? static_cast<int>(byte) : -1;
}

// Bytes in a row are one token where they are characters, else a token each.
std::vector<std::string> with_bytes(std::vector<std::string> tokens) {
  std::vector<std::string> out;
  out.reserve(tokens.size());
  std::string bytes;
  const auto flush = [&] {
    if (bytes.empty()) return;
    if (utf8_prefix(bytes) == bytes.size()) {
      out.push_back(bytes);
    } else {
      for (const char c : bytes) out.emplace_back(1, c);
    }
    bytes.clear();
  };
  for (std::string& token : tokens) {
    if (const int byte = byte_of(token); byte >= 0) {
      bytes += static_cast<char>(byte);
      continue;
    }
    flush();
    out.push_back(std::move(token));
  }
  flush();
  return out;
}

// A token of words: a space in front where it is none that goes on. Spaces of English that tokenizers put in are taken
// away.
void word_piece(std::string& token, const std::string& prefix, bool clean, bool first) {
  if (!first) {
    if (token.starts_with(prefix)) {
      token.erase(0, prefix.size());
    } else {
      token.insert(0, 1, ' ');
    }
  }
  if (!clean) return;
  static constexpr std::pair<const char*, const char*> kCleaned[] = {
      {" .", "."},   {" ?", "?"},           {" !", "!"},   {" ,", ","},     {" ' ", "'"},   {" n't", "n't"},
      {" 'm", "'m"}, {" do not", " don't"}, {" 's", "'s"}, {" 've", "'ve"}, {" 're", "'re"}};
  for (const auto& [from, to] : kCleaned) replace_all(token, from, to);
}

}  // namespace

TokenDecoder::TokenDecoder(const JsonPart& part) : given_(true) { add(part); }

void TokenDecoder::add(const JsonPart& part) {
  const JsonPart type = part.at("type");
  const std::string& name = type.text();
  if (name == "Sequence") {
    for (const JsonPart& one : part.at("decoders").elements()) add(one);
  } else if (name == "ByteLevel") {
    steps_.push_back({Kind::kByteLevel, {}, ""});
  } else if (name == "ByteFallback") {
    steps_.push_back({Kind::kByteFallback, {}, ""});
  } else if (name == "Fuse") {
    steps_.push_back({Kind::kFuse, {}, ""});
  } else if (name == "Metaspace") {
    const bool prefix = part.flag_or("add_prefix_space", true) && part.text_or("prepend_scheme", "always") != "never";
    steps_.push_back({Kind::kMetaspace, {}, part.at("replacement").character(), 0, 0, prefix});
  } else if (name == "Replace") {
    steps_.push_back({Kind::kReplace, Pattern::from_json(part.at("pattern")), part.at("content").text()});
  } else if (name == "Strip") {
    constexpr int64_t kMost = 1 << 20;
    steps_.push_back({Kind::kStrip,
                      {},
                      part.at("content").character(),
                      part.at("start").integer(0, kMost),
                      part.at("stop").integer(0, kMost)});
  } else if (name == "BPEDecoder") {
    steps_.push_back({Kind::kBpe, {}, part.text_or("suffix", "</w>")});
    if (steps_.back().text.empty()) part.at("suffix").refuse("a text that is not empty");
  } else if (name == "WordPiece") {
    steps_.push_back({Kind::kWordPiece, {}, part.text_or("prefix", "##"), 0, 0, part.flag_or("cleanup", true)});
  } else {
    type.fail(
        fmt::format("the decoder '{}' is not supported; ByteLevel, ByteFallback, Fuse, Metaspace, Replace, Strip, "
                    "BPEDecoder, WordPiece and Sequence are",
                    utf8_start(name, 40)));
  }
}

std::string TokenDecoder::decode(std::vector<std::string> tokens) const {
  std::string out;
  if (!given_) {
    for (size_t i = 0; i < tokens.size(); ++i) {
      if (i > 0) out += ' ';
      out += tokens[i];
    }
    return out;
  }
  size_t bytes = 0;
  for (const std::string& token : tokens) bytes += token.size();
  TextBudget budget(bytes);
  for (const Step& step : steps_) {
    if (step.kind == Kind::kFuse || step.kind == Kind::kByteLevel) {
      std::string whole;
      for (const std::string& token : tokens) {
        if (step.kind == Kind::kFuse || !from_byte_level(token, whole)) whole += token;
      }
      tokens.assign(1, whole);
      continue;
    }
    if (step.kind == Kind::kByteFallback) {
      tokens = with_bytes(std::move(tokens));
      continue;
    }
    for (size_t i = 0; i < tokens.size(); ++i) {
      std::string& token = tokens[i];
      if (step.kind == Kind::kMetaspace) replace_all(token, step.text, i == 0 && step.prefix ? "" : " ");
      if (step.kind == Kind::kReplace) replace_matches(token, step.pattern, step.text, budget);
      if (step.kind == Kind::kStrip) strip(token, step.text, step.start, step.stop);
      if (step.kind == Kind::kBpe) replace_all(token, step.text, i + 1 < tokens.size() ? " " : "");
      if (step.kind == Kind::kWordPiece) word_piece(token, step.text, step.prefix, i == 0);
    }
  }
  for (const std::string& token : tokens) out += token;
  return out;
}

std::string TokenDecoder::piece(const std::string& token, bool first, TextBudget& budget) const {
  if (!given_) return first ? token : ' ' + token;
  std::string text = token;
  bool fused = false;
  for (const Step& step : steps_) {
    switch (step.kind) {
      case Kind::kFuse:
        fused = true;
        break;
      case Kind::kByteLevel:
        if (std::string bytes; from_byte_level(text, bytes)) text.swap(bytes);
        break;
      case Kind::kByteFallback:
        if (const int byte = byte_of(text); byte >= 0) text.assign(1, static_cast<char>(byte));
        break;
      case Kind::kMetaspace:
        replace_all(text, step.text, " ");
        break;
      case Kind::kReplace:
        replace_matches(text, step.pattern, step.text, budget);
        break;
      case Kind::kStrip:
        if (!fused) strip(text, step.text, step.start, step.stop);
        break;
      case Kind::kBpe:
        replace_all(text, step.text, " ");
        break;
      case Kind::kWordPiece:
        word_piece(text, step.text, step.prefix, first);
        break;
    }
  }
  return text;
}

}  // namespace fw
