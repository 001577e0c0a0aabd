#include "tokenizer/decoder.h"

#include <algorithm>
#include <charconv>

#include "base/error.h"
#include "tokenizer/byte_level.h"
#include "tokenizer/utf8.h"

namespace fw {
namespace {

void replace_all(std::string& text, std::string_view what, std::string_view with) {
  if (what.empty()) return;
  for (size_t at = text.find(what); at != std::string::npos; at = text.find(what, at + with.size())) text.replace(at, what.size(), with);
}

// A pattern reads characters: bytes that are none stay between.
void replace_matches(std::string& text, const Pattern& pattern, const std::string& with) {
  std::vector<Span> spans;
  PatternScan scan(pattern);
  std::string out;
  for (std::string_view rest = text; !rest.empty();) {
    const size_t valid = utf8_prefix(rest);
    scan.cut(rest.substr(0, valid), spans);
    for (const Span& span : spans) out.append(span.match ? std::string_view(with) : rest.substr(span.begin, span.end - span.begin));
    if (valid < rest.size()) out += rest[valid];
    rest.remove_prefix(std::min(valid + 1, rest.size()));
  }
  text.swap(out);
}

void strip(std::string& text, std::string_view character, int64_t start, int64_t stop) {
  for (; start > 0 && text.starts_with(character); --start) text.erase(0, character.size());
  for (; stop > 0 && text.ends_with(character); --stop) text.erase(text.size() - character.size());
}

// <0x0A> is a byte.
void byte_of(std::string& token) {
  if (token.size() != 6 || !token.starts_with("<0x") || token.back() != '>') return;
  unsigned byte = 0;
  const auto [end, error] = std::from_chars(token.data() + 3, token.data() + 5, byte, 16);
  if (error == std::errc() && end == token.data() + 5) token.assign(1, static_cast<char>(byte));
}

// A token of words: a space in front where it is none that goes on. Spaces of English that tokenizers put in are taken away.
void word_piece(std::string& token, const std::string& prefix, bool clean, bool first) {
  if (!first) {
    if (token.starts_with(prefix)) {
      token.erase(0, prefix.size());
    } else {
      token.insert(0, 1, ' ');
    }
  }
  if (!clean) return;
  static constexpr std::pair<const char*, const char*> kCleaned[] = {{" .", "."},   {" ?", "?"},     {" !", "!"},    {" ,", ","},
                                                                     {" ' ", "'"},  {" n't", "n't"}, {" 'm", "'m"},  {" do not", " don't"},
                                                                     {" 's", "'s"}, {" 've", "'ve"}, {" 're", "'re"}};
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
    steps_.push_back({Kind::kStrip, {}, part.at("content").character(), part.at("start").integer(0, kMost), part.at("stop").integer(0, kMost)});
  } else if (name == "BPEDecoder") {
    steps_.push_back({Kind::kBpe, {}, part.text_or("suffix", "</w>")});
  } else if (name == "WordPiece") {
    steps_.push_back({Kind::kWordPiece, {}, part.text_or("prefix", "##"), 0, 0, part.flag_or("cleanup", true)});
  } else {
    type.fail(fmt::format("the decoder '{}' is not supported; ByteLevel, ByteFallback, Fuse, Metaspace, Replace, Strip, BPEDecoder, WordPiece and Sequence are",
                          name.substr(0, 40)));
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
  for (const Step& step : steps_) {
    if (step.kind == Kind::kFuse || step.kind == Kind::kByteLevel) {
      std::string whole;
      for (const std::string& token : tokens) {
        if (step.kind == Kind::kFuse || !from_byte_level(token, whole)) whole += token;
      }
      tokens.assign(1, whole);
      continue;
    }
    for (size_t i = 0; i < tokens.size(); ++i) {
      std::string& token = tokens[i];
      if (step.kind == Kind::kByteFallback) byte_of(token);
      if (step.kind == Kind::kMetaspace) replace_all(token, step.text, i == 0 && step.prefix ? "" : " ");
      if (step.kind == Kind::kReplace) replace_matches(token, step.pattern, step.text);
      if (step.kind == Kind::kStrip) strip(token, step.text, step.start, step.stop);
      if (step.kind == Kind::kBpe) replace_all(token, step.text, i + 1 < tokens.size() ? " " : "");
      if (step.kind == Kind::kWordPiece) word_piece(token, step.text, step.prefix, i == 0);
    }
  }
  for (const std::string& token : tokens) out += token;
  return out;
}

std::string TokenDecoder::piece(const std::string& token) const {
  std::string text = token;
  bool fused = false;
  for (const Step& step : steps_) {
    if (step.kind == Kind::kFuse) fused = true;
    if (step.kind == Kind::kByteLevel) {
      std::string bytes;
      if (from_byte_level(text, bytes)) text.swap(bytes);
    }
    if (step.kind == Kind::kByteFallback) byte_of(text);
    if (step.kind == Kind::kMetaspace) replace_all(text, step.text, " ");
    if (step.kind == Kind::kReplace) replace_matches(text, step.pattern, step.text);
    if (step.kind == Kind::kStrip && !fused) strip(text, step.text, step.start, step.stop);
    if (step.kind == Kind::kBpe) replace_all(text, step.text, " ");
    if (step.kind == Kind::kWordPiece) word_piece(text, step.text, step.prefix, false);
  }
  return text;
}

}  // namespace fw
