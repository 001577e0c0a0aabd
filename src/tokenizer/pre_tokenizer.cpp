#include "tokenizer/pre_tokenizer.h"

#include <unicode/uchar.h>

#include <algorithm>
#include <array>
#include <optional>

#include "base/error.h"
#include "tokenizer/byte_level.h"
#include "tokenizer/unicode_age.h"
#include "tokenizer/unicode_classes.h"
#include "tokenizer/utf8.h"

namespace fw {
namespace {

// GPT-2's pattern, which ByteLevel has built in.
constexpr const char* kGpt2 = R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)";

// Patterns of published models in which a space that a letter follows always begins a piece, and an ASCII letter before
// it always ends one: GPT-2, Llama 3 (and cl100k), Qwen 2, GPT-4o.
constexpr std::array<const char*, 4> kCutBeforeWords = {
    kGpt2,
    R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)",
    R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)",
    R"([^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+)"};

bool is_punctuation(UChar32 c) {
  return (c < 0x80 && std::ispunct(static_cast<int>(c)) != 0) || (u_ispunct(c) != 0 && of_unicode(8, c));
}

}  // namespace

PreTokenizer::PreTokenizer(const JsonPart& part) {
  add(part);
  bytes_last_ = !steps_.empty() && steps_.back().kind == Kind::kByteLevel;
  cuts_before_words_ = bytes_last_ && known_to_cut_before_words();
}

// One known pattern, and nothing else that cuts.
bool PreTokenizer::known_to_cut_before_words() const {
  int patterns = 0;
  for (const Step& step : steps_) {
    if (step.kind == Kind::kByteLevel
            ? step.prefix
            : step.kind != Kind::kPattern || step.invert || step.behavior != Behavior::kIsolated)
      return false;
    if (step.kind == Kind::kByteLevel && !step.use_regex) continue;
    if (!std::ranges::any_of(kCutBeforeWords, [&](const char* known) { return step.pattern.source() == known; }))
      return false;
    ++patterns;
  }
  return patterns == 1;
}

PreTokenizer::Behavior PreTokenizer::behavior_of(const JsonPart& part, const char* otherwise) {
  const std::string name = part.text_or("behavior", otherwise);
  static constexpr std::pair<const char*, Behavior> kNames[] = {{"Removed", Behavior::kRemoved},
                                                                {"Isolated", Behavior::kIsolated},
                                                                {"MergedWithPrevious", Behavior::kMergedWithPrevious},
                                                                {"MergedWithNext", Behavior::kMergedWithNext},
                                                                {"Contiguous", Behavior::kContiguous}};
  for (const auto& [known, value] : kNames) {
    if (name == known) return value;
  }
  part.at("behavior").refuse("Removed, Isolated, MergedWithPrevious, MergedWithNext or Contiguous");
}

void PreTokenizer::add_class(Class of, Behavior behavior, std::string character) {
  Step& step = steps_.emplace_back();
  step.kind = Kind::kClass;
  step.of = of;
  step.behavior = behavior;
  step.character = std::move(character);
}

void PreTokenizer::add_metaspace(const JsonPart& part) {
  Step step;
  step.kind = Kind::kMetaspace;
  step.character = part.at("replacement").character();
  step.split = part.flag_or("split", true);
  const bool prefix = part.flag_or("add_prefix_space", true);
  const std::string scheme = part.text_or("prepend_scheme", prefix ? "always" : "never");
  if (scheme == "always" || scheme == "first") {
    step.scheme = scheme == "first" ? Step::Scheme::kFirst : Step::Scheme::kAlways;
    if (!prefix) part.at("prepend_scheme").refuse("never, since add_prefix_space is false");
  } else if (scheme != "never") {
    part.at("prepend_scheme").refuse("always, first or never");
  }
  steps_.push_back(std::move(step));
}

void PreTokenizer::add(const JsonPart& part) {
  const JsonPart type = part.at("type");
  const std::string& name = type.text();
  if (name == "Sequence") {
    for (const JsonPart& one : part.at("pretokenizers").elements()) add(one);
  } else if (name == "ByteLevel") {
    Step& step = steps_.emplace_back();
    step.kind = Kind::kByteLevel;
    step.prefix = part.flag_or("add_prefix_space", true);
    step.use_regex = part.flag_or("use_regex", true);
    if (step.use_regex) step.pattern = Pattern::of_program(kGpt2);
  } else if (name == "Split") {
    Step& step = steps_.emplace_back();
    step.pattern = Pattern::from_json(part.at("pattern"));
    step.behavior = behavior_of(part, "");
    step.invert = part.flag_or("invert", false);
  } else if (name == "Metaspace") {
    add_metaspace(part);
  } else if (name == "Digits") {
    add_class(Class::kNumber, part.flag_or("individual_digits", false) ? Behavior::kIsolated : Behavior::kContiguous);
  } else if (name == "Punctuation") {
    add_class(Class::kPunctuation, behavior_of(part, "Isolated"));
  } else if (name == "WhitespaceSplit") {
    add_class(Class::kSpace, Behavior::kRemoved);
  } else if (name == "BertPreTokenizer") {
    add_class(Class::kSpace, Behavior::kRemoved);
    add_class(Class::kPunctuation, Behavior::kIsolated);
  } else if (name == "CharDelimiterSplit") {
    add_class(Class::kCharacter, Behavior::kRemoved, part.at("delimiter").character());
  } else if (name == "Whitespace") {
    steps_.emplace_back().kind = Kind::kWords;
  } else {
    type.fail(
        fmt::format("the pre-tokenizer '{}' is not supported; ByteLevel, Split, Metaspace, Digits, Punctuation, "
                    "Whitespace, WhitespaceSplit, "
                    "BertPreTokenizer, CharDelimiterSplit and Sequence are",
                    utf8_start(name, 40)));
  }
}

// Matches, and the runs between them.
void PreTokenizer::class_spans(const Step& step, std::string_view text, std::vector<Span>& spans) {
  spans.clear();
  size_t open = 0, i = 0;
  while (i < text.size()) {
    const size_t at = i;
    const auto c = static_cast<UChar32>(utf8_next(text, i));
    const bool match = step.of == Class::kSpace         ? u_isUWhiteSpace(c) != 0
                       : step.of == Class::kNumber      ? (U_GET_GC_MASK(c) & U_GC_N_MASK) != 0
                       : step.of == Class::kPunctuation ? is_punctuation(c)
                                                        : text.substr(at, i - at) == step.character;
    if (!match) continue;
    if (open < at) spans.push_back({open, at, false});
    spans.push_back({at, i, true});
    open = i;
  }
  if (open < text.size()) spans.push_back({open, text.size(), false});
}

// Runs of word characters, and runs of what is neither that nor white space.
void PreTokenizer::word_spans(std::string_view text, std::vector<Span>& spans) {
  spans.clear();
  enum class Of { kNone, kSpace, kWord, kOther } of = Of::kNone;
  for (size_t i = 0; i < text.size();) {
    const size_t at = i;
    const char32_t c = utf8_next(text, i);
    const Of found = is_word(c) ? Of::kWord : is_space(c) ? Of::kSpace : Of::kOther;
    if (found == Of::kSpace) {
      of = found;
    } else if (found == of) {
      spans.back().end = i;
    } else {
      spans.push_back({at, i, true});
      of = found;
    }
  }
}

// What stays of matches and gaps, in place.
void PreTokenizer::merge(std::vector<Span>& spans, Behavior behavior) {
  if (behavior == Behavior::kIsolated) return;
  if (behavior == Behavior::kRemoved) {
    std::erase_if(spans, [](const Span& s) { return s.match; });
    return;
  }
  std::vector<Span> merged;
  merged.reserve(spans.size());
  const bool backward = behavior == Behavior::kMergedWithNext;
  if (backward) std::ranges::reverse(spans);
  bool previous = false;
  for (const Span& span : spans) {
    const bool joins = behavior == Behavior::kContiguous ? span.match == previous : span.match && !previous;
    previous = span.match;
    if (!joins || merged.empty()) {
      merged.push_back(span);
    } else if (backward) {
      merged.back().begin = span.begin;
    } else {
      merged.back().end = span.end;
    }
  }
  if (backward) std::ranges::reverse(merged);
  spans.swap(merged);
}

Pieces PreTokenizer::apply(std::string_view text, size_t text_head, TextBudget& budget) const {
  Pieces pieces;
  if (!text.empty()) pieces.list.push_back({text, text_head});
  std::vector<Pieces::Piece> cut;
  std::vector<Span> spans;
  for (size_t s = 0; s < steps_.size(); ++s) {
    const Step& step = steps_[s];
    std::optional<PatternScan> scan;
    if (step.kind == Kind::kPattern || step.use_regex) scan.emplace(step.pattern, budget);
    cut.clear();
    cut.reserve(pieces.list.size());
    for (const auto& piece : pieces.list) {
      std::string_view whole = piece.text;
      size_t head = piece.head;
      spans.clear();
      if (step.kind == Kind::kMetaspace) {
        std::string marked;
        marked.reserve(whole.size() + step.character.size());
        for (size_t i = 0; i < whole.size(); ++i) {
          whole[i] == ' ' ? marked.append(step.character) : marked.append(1, whole[i]);
          if (i + 1 == piece.head) head = marked.size();
        }
        const bool prepend =
            step.scheme == Step::Scheme::kAlways || (step.scheme == Step::Scheme::kFirst && piece.head > 0);
        if (prepend && !marked.starts_with(step.character)) {
          marked.insert(0, step.character);
          if (head > 0) head += step.character.size();
        }
        whole = pieces.owned.emplace_back(std::move(marked));
        if (step.split) {
          Step mark;
          mark.of = Class::kCharacter;
          mark.character = step.character;
          class_spans(mark, whole, spans);
          merge(spans, Behavior::kMergedWithNext);
        }
      } else if (step.kind == Kind::kByteLevel) {
        if (step.prefix && whole.front() != ' ') {
          whole = pieces.owned.emplace_back(fmt::format(" {}", whole));
          if (head > 0) ++head;
        }
        if (scan) scan->cut(whole, spans);
      } else if (step.kind == Kind::kWords) {
        word_spans(whole, spans);
      } else {
        if (scan) {
          scan->cut(whole, spans);
        } else {
          class_spans(step, whole, spans);
        }
        if (step.invert) std::ranges::for_each(spans, [](Span& span) { span.match = !span.match; });
        merge(spans, step.behavior);
      }
      const bool splits =
          !(step.kind == Kind::kMetaspace && !step.split) && !(step.kind == Kind::kByteLevel && !step.use_regex);
      if (!splits) spans.push_back({0, whole.size(), false});
      for (const Span& span : spans) {
        if (span.begin < span.end)
          cut.push_back({whole.substr(span.begin, span.end - span.begin), head - std::min(head, span.begin)});
      }
    }
    if (step.kind == Kind::kByteLevel && s + 1 < steps_.size()) {
      for (auto& piece : cut) {
        piece.head = to_byte_level(piece.text.substr(0, piece.head)).size();
        piece.text = pieces.owned.emplace_back(to_byte_level(piece.text));
      }
    }
    pieces.list.swap(cut);
  }
  return pieces;
}

}  // namespace fw
