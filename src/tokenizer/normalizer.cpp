#include "tokenizer/normalizer.h"

#include <unicode/bytestream.h>
#include <unicode/normalizer2.h>
#include <unicode/uchar.h>

#include <algorithm>

#include "base/error.h"
#include "tokenizer/byte_level.h"
#include "tokenizer/utf8.h"

namespace fw {
namespace {

bool is_ascii(std::string_view text) {
  return std::ranges::all_of(text, [](char c) { return static_cast<unsigned char>(c) < 0x80; });
}

std::string normal_form(const std::string& text, const char* name, UNormalization2Mode mode) {
  if (is_ascii(text)) return text;
  UErrorCode error = U_ZERO_ERROR;
  const icu::Normalizer2* form = icu::Normalizer2::getInstance(nullptr, name, mode, error);
  if (U_FAILURE(error)) fail_internal("ICU has no normal form {}: {}", name, u_errorName(error));
  if (text.size() > size_t{1} << 30) fail_usage("a text of {} bytes: expected at most 1 GiB where a tokenizer normalises it", text.size());
  std::string out;
  icu::StringByteSink<std::string> sink(&out);
  form->normalizeUTF8(0, icu::StringPiece(text.data(), static_cast<int32_t>(text.size())), sink, nullptr, error);
  if (U_FAILURE(error)) fail_internal("ICU cannot normalise: {}", u_errorName(error));
  return out;
}

// Character by character, as Rust's char::to_lowercase has it: no word is looked at.
std::string lowercase(std::string_view text) {
  std::string out;
  out.reserve(text.size());
  for (size_t i = 0; i < text.size();) {
    const char32_t c = utf8_next(text, i);
    if (c == 0x130) {  // the one that becomes two
      out += "i\u0307";
    } else {
      utf8_append(out, static_cast<char32_t>(u_tolower(static_cast<UChar32>(c))));
    }
  }
  return out;
}

std::string stripped(std::string_view text, bool left, bool right, bool& first) {
  size_t begin = text.size(), end = 0;
  for (size_t i = 0; i < text.size();) {
    const size_t at = i;
    if (u_isUWhiteSpace(static_cast<UChar32>(utf8_next(text, i)))) continue;
    begin = std::min(begin, at);
    end = i;
  }
  if (!left) begin = 0;
  if (!right) end = text.size();
  first = first && begin == 0;
  return begin < end ? std::string(text.substr(begin, end - begin)) : std::string();
}

std::string without_marks(std::string_view text, bool& first) {
  std::string out;
  for (size_t i = 0; i < text.size();) {
    const size_t at = i;
    const char32_t c = utf8_next(text, i);
    if (u_charType(static_cast<UChar32>(c)) == U_NON_SPACING_MARK) {
      if (at == 0) first = false;
    } else {
      out.append(text.substr(at, i - at));
    }
  }
  return out;
}

std::string replaced(std::string_view text, const Pattern& pattern, const std::string& content, bool& first) {
  std::vector<Span> spans;
  PatternScan(pattern).cut(text, spans);
  std::string out;
  out.reserve(text.size());
  for (const Span& span : spans) {
    if (!span.match) {
      out.append(text.substr(span.begin, span.end - span.begin));
    } else {
      out.append(content);
      if (span.begin == 0 && span.end > 0 && content.empty()) first = false;
    }
  }
  return out;
}

}  // namespace

Normalizer::Normalizer(const JsonPart& part) { add(part); }

void Normalizer::add(const JsonPart& part) {
  const JsonPart type = part.at("type");
  const std::string& name = type.text();
  static constexpr std::pair<const char*, Kind> kPlain[] = {{"NFC", Kind::kNfc},
                                                            {"NFD", Kind::kNfd},
                                                            {"NFKC", Kind::kNfkc},
                                                            {"NFKD", Kind::kNfkd},
                                                            {"Lowercase", Kind::kLowercase},
                                                            {"StripAccents", Kind::kStripAccents},
                                                            {"ByteLevel", Kind::kByteLevel}};
  if (name == "Sequence") {
    for (const JsonPart& one : part.at("normalizers").elements()) add(one);
    return;
  }
  const auto* plain = std::ranges::find_if(kPlain, [&](const auto& known) { return name == known.first; });
  if (plain != std::end(kPlain)) {
    steps_.push_back({plain->second, true, true, {}, {}});
  } else if (name == "Strip") {
    steps_.push_back({Kind::kStrip, part.flag_or("strip_left", true), part.flag_or("strip_right", true), {}, {}});
  } else if (name == "Replace") {
    steps_.push_back({Kind::kReplace, true, true, Pattern::from_json(part.at("pattern")), part.at("content").text()});
  } else if (name == "Prepend") {
    steps_.push_back({Kind::kPrepend, true, true, {}, part.at("prepend").text()});
  } else {
    type.fail(
        fmt::format("the normalizer '{}' is not supported; NFC, NFD, NFKC, NFKD, Lowercase, Strip, StripAccents, Replace, Prepend, ByteLevel and Sequence are",
                    name.substr(0, 40)));
  }
}

bool Normalizer::is_form() const {
  return std::ranges::all_of(steps_, [](const Step& s) { return s.kind <= Kind::kNfkd; });
}

std::string Normalizer::applied(const Step& step, const std::string& text, bool& first) {
  switch (step.kind) {
    case Kind::kNfc:
      return normal_form(text, "nfc", UNORM2_COMPOSE);
    case Kind::kNfd:
      return normal_form(text, "nfc", UNORM2_DECOMPOSE);
    case Kind::kNfkc:
      return normal_form(text, "nfkc", UNORM2_COMPOSE);
    case Kind::kNfkd:
      return normal_form(text, "nfkc", UNORM2_DECOMPOSE);
    case Kind::kLowercase:
      return lowercase(text);
    case Kind::kStrip:
      return stripped(text, step.left, step.right, first);
    case Kind::kStripAccents:
      return without_marks(text, first);
    case Kind::kReplace:
      return replaced(text, step.pattern, step.content, first);
    case Kind::kPrepend:
      return text.empty() ? text : step.content + text;
    case Kind::kByteLevel:
      return to_byte_level(text);
  }
  fail_internal("no normalizer {}", static_cast<int>(step.kind));
}

std::string Normalizer::apply(std::string text, bool& first) const {
  for (const Step& step : steps_) text = applied(step, text, first);
  return text;
}

}  // namespace fw
