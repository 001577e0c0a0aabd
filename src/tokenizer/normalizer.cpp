#include "tokenizer/normalizer.h"

#include <unicode/bytestream.h>
#include <unicode/normalizer2.h>
#include <unicode/uchar.h>

#include <algorithm>

#include "base/error.h"
#include "tokenizer/byte_level.h"
#include "tokenizer/unicode_age.h"
#include "tokenizer/utf8.h"

namespace fw {
namespace {

bool is_ascii(std::string_view text) {
  return std::ranges::all_of(text, [](char c) { return static_cast<unsigned char>(c) < 0x80; });
}

size_t characters(std::string_view text) {
  return static_cast<size_t>(
      std::ranges::count_if(text, [](char c) { return (static_cast<unsigned char>(c) & 0xc0u) != 0x80u; }));
}

// The bytes of the first `count` characters.
size_t bytes_of_characters(std::string_view text, size_t count) {
  size_t i = 0;
  while (count-- > 0 && i < text.size()) utf8_next(text, i);
  return i;
}

std::string normal_form(const std::string& text, const char* name, UNormalization2Mode mode) {
  if (is_ascii(text)) return text;
  UErrorCode error = U_ZERO_ERROR;
  const icu::Normalizer2* form = icu::Normalizer2::getInstance(nullptr, name, mode, error);
  if (U_FAILURE(error)) fail_internal("ICU has no normal form {}: {}", name, u_errorName(error));
  if (text.size() > size_t{1} << 30)
    fail_usage("a text of {} bytes: expected at most 1 GiB where a tokenizer normalises it", text.size());
  std::string out;
  icu::StringByteSink<std::string> sink(&out);
  form->normalizeUTF8(0, icu::StringPiece(text.data(), static_cast<int32_t>(text.size())), sink, nullptr, error);
  if (U_FAILURE(error)) fail_internal("ICU cannot normalise: {}", u_errorName(error));
  return out;
}

// A character after the head that joins its last one is of the head then.
std::string normal_form(const std::string& text, const char* name, UNormalization2Mode mode, size_t& head) {
  std::string out = normal_form(text, name, mode);
  if (head > 0) head = bytes_of_characters(out, characters(normal_form(text.substr(0, head), name, mode)));
  return out;
}

// Calls put(character, bytes) for all characters, and moves the head's end with what it writes to `out`.
template <class Put>
void by_characters(std::string_view text, std::string& out, size_t& head, const Put& put) {
  const size_t before = head;
  head = 0;
  out.reserve(text.size());
  for (size_t i = 0; i < text.size();) {
    const size_t at = i;
    const char32_t c = utf8_next(text, i);
    put(c, text.substr(at, i - at));
    if (i <= before) head = out.size();
  }
}

// Character by character, as Rust's char::to_lowercase has it: no word is looked at.
std::string lowercase(std::string_view text, size_t& head) {
  std::string out;
  by_characters(text, out, head, [&](char32_t c, std::string_view) {
    if (c == 0x130) {  // the one that becomes two
      out += "i\u0307";
    } else {
      utf8_append(out, static_cast<char32_t>(u_tolower(static_cast<UChar32>(c))));
    }
  });
  return out;
}

std::string stripped(std::string_view text, bool left, bool right, size_t& head) {
  size_t begin = text.size(), end = 0;
  for (size_t i = 0; i < text.size();) {
    const size_t at = i;
    if (u_isUWhiteSpace(static_cast<UChar32>(utf8_next(text, i)))) continue;
    begin = std::min(begin, at);
    end = i;
  }
  if (!left) begin = 0;
  if (!right) end = text.size();
  head = begin < end && head > begin ? std::min(head, end) - begin : 0;
  return begin < end ? std::string(text.substr(begin, end - begin)) : std::string();
}

// StripAccents takes marks of all kinds, BERT's normalizer those that take no room.
bool is_mark(UChar32 c, bool bert) {
  if (bert) return u_charType(c) == U_NON_SPACING_MARK && of_unicode(8, c);
  return (U_GET_GC_MASK(c) & U_GC_M_MASK) != 0 && of_unicode(9, c);
}

std::string without_marks(std::string_view text, bool bert, size_t& head) {
  std::string out;
  by_characters(text, out, head, [&](char32_t c, std::string_view bytes) {
    if (!is_mark(static_cast<UChar32>(c), bert)) out.append(bytes);
  });
  return out;
}

// What comes in place of a match begins where the match's last character does; in place of nothing, where the character
// before does.
std::string replaced(std::string_view text, const Pattern& pattern, const std::string& content, size_t& head,
                     TextBudget& budget) {
  std::vector<Span> spans;
  PatternScan(pattern, budget).cut(text, spans);
  std::string out;
  out.reserve(text.size());
  const size_t before = head;
  head = 0;
  for (const Span& span : spans) {
    if (span.match) {
      // The package loses track of which characters stand where then.
      if (span.begin == span.end) {
        fail_usage(
            "the tokenizer's normalizer \"Replace\": the regular expression '{}' matches nothing: expected one that "
            "takes a character",
            utf8_start(pattern.source(), 60));
      }
      budget.grow(span.end - span.begin, content.size());
      out.append(content);
      if (before > 0 && span.end <= before) head = out.size();
    } else {
      if (span.begin < before) head = out.size() + std::min(span.end, before) - span.begin;
      out.append(text.substr(span.begin, span.end - span.begin));
    }
  }
  return out;
}

constexpr char32_t kAway = 0x110000;  // no character

// Characters as they are, changed or away: `of` returns kAway for the last.
template <class Of>
std::string by_character(std::string_view text, size_t& head, const Of& of) {
  std::string out;
  by_characters(text, out, head, [&](char32_t c, std::string_view bytes) {
    const char32_t to = of(c);
    if (to == kAway) return;
    if (to == c) {
      out.append(bytes);
    } else {
      utf8_append(out, to);
    }
  });
  return out;
}

bool within(char32_t c, char32_t least, char32_t most) { return c >= least && c <= most; }

// BERT's: control characters, formats and private ones go, white space becomes a space.
char32_t bert_cleaned(char32_t c) {
  if (c == 0 || c == 0xfffd) return kAway;
  if (c == '\t' || c == '\n' || c == '\r') return ' ';
  const auto kind = u_charType(static_cast<UChar32>(c));
  if (kind == U_CONTROL_CHAR || kind == U_PRIVATE_USE_CHAR ||
      (kind == U_FORMAT_CHAR && of_unicode(8, static_cast<UChar32>(c))))
    return kAway;
  return u_isUWhiteSpace(static_cast<UChar32>(c)) != 0 ? ' ' : c;
}

// A space on both sides of an ideograph; the blocks are those of BERT's program.
std::string spaced_ideographs(std::string_view text, size_t& head) {
  std::string out;
  by_characters(text, out, head, [&](char32_t c, std::string_view bytes) {
    const bool ideograph = within(c, 0x4e00, 0x9fff) || within(c, 0x3400, 0x4dbf) || within(c, 0xf900, 0xfaff) ||
                           within(c, 0x20000, 0x2a6df) || within(c, 0x2a700, 0x2b81f) || within(c, 0x2b920, 0x2ceaf) ||
                           within(c, 0x2f800, 0x2fa1f);
    if (ideograph) out += ' ';
    out.append(bytes);
    if (ideograph) out += ' ';
  });
  return out;
}

// SentencePiece's rule "nmt" without its normal form.
char32_t nmt(char32_t c) {
  if (within(c, 0x1, 0x8) || c == 0xb || within(c, 0xe, 0x1f) || c == 0x7f || c == 0x8f || c == 0x9f) return kAway;
  const bool space = c == '\t' || c == '\n' || c == 0xc || c == '\r' || c == 0x1680 || within(c, 0x200b, 0x200f) ||
                     c == 0x2028 || c == 0x2029 || c == 0x2581 || c == 0xfeff || c == 0xfffd;
  return space ? ' ' : c;
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
                                                            {"ByteLevel", Kind::kByteLevel},
                                                            {"Nmt", Kind::kNmt}};
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
  } else if (name == "BertNormalizer") {
    add_bert(part);
  } else if (name == "Precompiled") {
    steps_.push_back(
        {Kind::kPrecompiled, true, true, {}, {}, std::make_shared<const Precompiled>(part.at("precompiled_charsmap"))});
  } else {
    type.fail(
        fmt::format("the normalizer '{}' is not supported; NFC, NFD, NFKC, NFKD, Lowercase, Strip, StripAccents, "
                    "Replace, Prepend, ByteLevel, BertNormalizer, "
                    "Nmt, Precompiled and Sequence are",
                    utf8_start(name, 40)));
  }
}

void Normalizer::add_bert(const JsonPart& part) {
  const bool lowercase = part.flag_or("lowercase", true);
  const auto step = [&](Kind kind) { steps_.push_back({kind, true, true, {}, {}}); };
  if (part.flag_or("clean_text", true)) step(Kind::kBertClean);
  if (part.flag_or("handle_chinese_chars", true)) step(Kind::kBertChinese);
  if (part.flag_or("strip_accents", lowercase)) {
    step(Kind::kNfd);
    step(Kind::kBertAccents);
  }
  if (lowercase) step(Kind::kLowercase);
}

bool Normalizer::is_form() const {
  return std::ranges::all_of(steps_, [](const Step& s) { return s.kind <= Kind::kNfkd; });
}

std::string Normalizer::applied(const Step& step, const std::string& text, size_t& head, TextBudget& budget) {
  switch (step.kind) {
    case Kind::kNfc:
      return normal_form(text, "nfc", UNORM2_COMPOSE, head);
    case Kind::kNfd:
      return normal_form(text, "nfc", UNORM2_DECOMPOSE, head);
    case Kind::kNfkc:
      return normal_form(text, "nfkc", UNORM2_COMPOSE, head);
    case Kind::kNfkd:
      return normal_form(text, "nfkc", UNORM2_DECOMPOSE, head);
    case Kind::kLowercase:
      return lowercase(text, head);
    case Kind::kStrip:
      return stripped(text, step.left, step.right, head);
    case Kind::kStripAccents:
      return without_marks(text, false, head);
    case Kind::kBertAccents:
      return without_marks(text, true, head);
    case Kind::kReplace:
      return replaced(text, step.pattern, step.content, head, budget);
    case Kind::kPrepend:
      if (text.empty()) return text;
      if (head > 0) head += step.content.size();
      return step.content + text;
    case Kind::kByteLevel:
      head = to_byte_level(std::string_view(text).substr(0, head)).size();
      return to_byte_level(text);
    case Kind::kBertClean:
      return by_character(text, head, bert_cleaned);
    case Kind::kBertChinese:
      return spaced_ideographs(text, head);
    case Kind::kNmt:
      return by_character(text, head, nmt);
    case Kind::kPrecompiled:
      return step.table->apply(text, head);
  }
  fail_internal("no normalizer {}", static_cast<int>(step.kind));
}

std::string Normalizer::apply(std::string text, size_t& head, TextBudget& budget) const {
  for (const Step& step : steps_) {
    const size_t before = text.size();
    text = applied(step, text, head, budget);
    if (step.kind != Kind::kReplace) budget.grow(before, text.size());  // which looks at every match
  }
  return text;
}

}  // namespace fw
