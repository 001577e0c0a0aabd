#include "tokenizer/pattern.h"

#define ONIG_ESCAPE_UCHAR_COLLISION 1  // UChar is a name of ICU, which may be in the same unit
#include <oniguruma.h>

#include <algorithm>
#include <array>

#include "base/error.h"
#include "tokenizer/utf8.h"

namespace fw {
namespace {

constexpr size_t kMostBytes = size_t{1} << 30;
// Steps of a search that are not counted: nearly all searches of published patterns need fewer.
constexpr uint64_t kFirstSteps = 64;
constexpr unsigned kMostStack = 1u << 25;  // entries of about 40 bytes
constexpr unsigned kMostDepth = 500;       // of groups in groups: the compiler recurses

// Oniguruma's own syntax without callouts: those run actions beside the match, and keep numbers from one match to the
// next.
const OnigSyntaxType& syntax() {
  static const OnigSyntaxType kSyntax = [] {
    OnigEncoding encoding = ONIG_ENCODING_UTF8;
    if (onig_initialize(&encoding, 1) != ONIG_NORMAL) fail_internal("Oniguruma cannot be initialized");
    onig_set_parse_depth_limit(kMostDepth);
    OnigSyntaxType own;
    onig_copy_syntax(&own, OnigDefaultSyntax);
    onig_set_syntax_op2(&own, onig_get_syntax_op2(&own) &
                                  ~(ONIG_SYN_OP2_QMARK_BRACE_CALLOUT_CONTENTS | ONIG_SYN_OP2_ASTERISK_CALLOUT_NAME));
    return own;
  }();
  return kSyntax;
}

// The name of a property as Oniguruma compares it: without spaces, '-' and '_', in small letters.
std::string plain_name(std::string_view name) {
  std::string out;
  for (const char c : name) {
    if (c != ' ' && c != '-' && c != '_') out += c >= 'A' && c <= 'Z' ? static_cast<char>(c - 'A' + 'a') : c;
  }
  return out;
}

// Oniguruma 6.9.8 in the words of 6.9.10, which the package has: [[:punct:]] has symbols, \p{Word} is \w, \R works
// after a repeat, and .* after what takes no character. `fault`: what cannot be said so.
std::string translated(std::string_view pattern, std::string& fault) {
  std::string out;
  bool looks_behind = false, ascii = false, line_end = false, punctuation = false, any = false;
  int depth = 0;  // of sets in sets
  const auto copy = [&](size_t& i, size_t end) {
    out.append(pattern.substr(i, end - i));
    i = end;
  };
  for (size_t i = 0; i < pattern.size();) {
    const std::string_view rest = pattern.substr(i);
    if (rest[0] == '\\' && rest.size() > 1) {
      const size_t close = rest.find('}');
      if ((rest[1] == 'p' || rest[1] == 'P') && rest.size() > 2 && rest[2] == '{' && close != std::string_view::npos) {
        const std::string_view inside = rest.substr(3, close - 3);
        const bool inverted = inside.starts_with('^');
        if (plain_name(inside.substr(inverted ? 1 : 0)) == "word") {
          out += inverted == (rest[1] == 'P') ? "\\w" : "\\W";
          i += close + 1;
        } else {
          copy(i, i + close + 1);
        }
      } else if (rest[1] == 'R' && depth == 0) {
        line_end = true;
        out += "(?>\\r\\n|[\\n-\\r\\x{85}\\x{2028}\\x{2029}])";
        i += 2;
      } else {
        any = any || (depth == 0 && (rest[1] == 'O' || rest[1] == 'N'));
        copy(i, i + 2);
      }
    } else if (depth == 0 && rest.starts_with("(?(") && rest.size() > 3 &&
               std::string_view("0123456789+-<'").find(rest[3]) == std::string_view::npos) {
      fault =
          "a condition that is a pattern, (?(pattern)...), is not supported: Debian 12's Oniguruma reads it "
          "differently than the tokenizers package's";
      copy(i, i + 3);
    } else if (depth == 0 && rest.starts_with("(?#")) {
      copy(i, std::min(pattern.size(), pattern.find(')', i)));
    } else if (depth > 0 && (rest.starts_with("[:punct:]") || rest.starts_with("[:^punct:]"))) {
      punctuation = true;
      out += rest[2] == '^' ? "[^\\p{P}\\p{S}]" : "\\p{P}\\p{S}";
      i += rest.find(']') + 1;
    } else if (depth > 0 && rest.starts_with("[:") && rest.find(":]") < 20) {
      copy(i, i + rest.find(":]") + 2);
    } else if (depth == 0 && rest.starts_with("(?")) {
      looks_behind = looks_behind || rest.starts_with("(?<=") || rest.starts_with("(?<!");
      const size_t letters = rest.find_first_not_of("imxWDSPIL-", 2);
      ascii = ascii || rest.substr(0, letters).find('P') != std::string_view::npos;
      copy(i, i + 2);
    } else if (rest[0] == '[') {
      ++depth;
      size_t end = i + 1;
      if (end < pattern.size() && pattern[end] == '^') ++end;
      // A bracket right at the beginning is itself where another one closes the set.
      if (end < pattern.size() && pattern[end] == ']' && pattern.find(']', end + 1) != std::string_view::npos) ++end;
      copy(i, end);
    } else {
      if (rest[0] == ']' && depth > 0) --depth;
      any = any || (depth == 0 && rest[0] == '.');
      copy(i, i + 1);
    }
  }
  // After what takes no character, .* is looked for at the beginnings of lines alone; a first branch that never
  // matches keeps Oniguruma from that.
  if (any) out.insert(0, "(?!)|");
  if (looks_behind && line_end)
    fault =
        "\\R and a lookbehind in one pattern are not supported: Debian 12's Oniguruma reads them differently than the "
        "tokenizers package's";
  if (ascii && punctuation)
    fault =
        "[:punct:] and the option (?P) in one pattern are not supported: Debian 12's Oniguruma reads them differently "
        "than the tokenizers package's";
  return out;
}

const OnigUChar* bytes_of(std::string_view text) { return reinterpret_cast<const OnigUChar*>(text.data()); }

std::string message(int code, OnigErrorInfo* info = nullptr) {
  std::array<OnigUChar, ONIG_MAX_ERROR_MESSAGE_LEN> text{};
  const int length =
      info != nullptr ? onig_error_code_to_str(text.data(), code, info) : onig_error_code_to_str(text.data(), code);
  return {reinterpret_cast<const char*>(text.data()), static_cast<size_t>(std::max(length, 0))};
}

// Null, and why, where the text is no pattern.
std::shared_ptr<re_pattern_buffer> compiled(const std::string& source, std::string& error) {
  const std::string pattern = translated(source, error);
  if (!error.empty()) return nullptr;
  regex_t* regex = nullptr;
  OnigErrorInfo info{};
  auto* own_syntax = const_cast<OnigSyntaxType*>(&syntax());  // the library does not write to it
  const int code = onig_new(&regex, bytes_of(pattern), bytes_of(pattern) + pattern.size(), ONIG_OPTION_NONE,
                            ONIG_ENCODING_UTF8, own_syntax, &info);
  if (code == ONIG_NORMAL) return {regex, onig_free};
  error = message(code, &info);
  return nullptr;
}

}  // namespace

Pattern Pattern::from_json(const JsonPart& part) {
  Pattern result;
  if (part.has("String")) {
    const JsonPart text = part.at("String");
    result.literal_ = text.text();
    if (result.literal_.empty()) text.refuse("a text that is not empty");
    return result;
  }
  if (!part.has("Regex")) part.refuse("{\"String\": ...} or {\"Regex\": ...}");
  const JsonPart regex = part.at("Regex");
  result.source_ = regex.text();
  if (result.source_.size() > size_t{1} << 16) regex.refuse("a regular expression of at most 64 KiB");
  std::string error;
  result.regex_ = compiled(result.source_, error);
  if (result.regex_ == nullptr) {
    regex.fail(fmt::format("expected a regular expression in Oniguruma's syntax without callouts, got '{1}': {0}",
                           error, utf8_start(result.source_, 60)));
  }
  return result;
}

Pattern Pattern::of_program(const char* pattern) {
  Pattern result;
  std::string error;
  result.source_ = pattern;
  result.regex_ = compiled(result.source_, error);
  if (result.regex_ == nullptr) fail_internal("the regular expression '{}': {}", pattern, error);
  return result;
}

struct PatternScan::Engine {
  Engine() : region(onig_region_new()), param(onig_new_match_param()) {
    if (region == nullptr || param == nullptr) fail_usage("out of memory for a regular expression of the tokenizer");
    onig_initialize_match_param(param);
    onig_set_match_stack_limit_size_of_match_param(param, kMostStack);
  }
  ~Engine() {
    if (region != nullptr) onig_region_free(region, 1);
    if (param != nullptr) onig_free_match_param(param);
  }
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  OnigRegion* region;
  OnigMatchParam* param;
};

PatternScan::PatternScan(const Pattern& pattern, TextBudget& budget) : pattern_(pattern), budget_(budget) {
  if (pattern_.is_regex()) engine_ = std::make_unique<Engine>();
}

PatternScan::~PatternScan() = default;

// A search that ends without an answer at its limit of steps begins again with a larger one, so that the budget is
// looked at on the way.
bool PatternScan::search(std::string_view text, size_t begin) {
  const std::string_view shown(pattern_.source_);
  const OnigUChar *all = bytes_of(text), *end = all + text.size();
  for (uint64_t steps = kFirstSteps;; steps = std::min(steps * 4, budget_.steps_left())) {
    onig_set_retry_limit_in_search_of_match_param(engine_->param, steps);
    const int found = onig_search_with_param(pattern_.regex_.get(), all, end, all + begin, end, engine_->region,
                                             ONIG_OPTION_NONE, engine_->param);
    if (found == ONIGERR_RETRY_LIMIT_IN_SEARCH_OVER || found == ONIGERR_RETRY_LIMIT_IN_MATCH_OVER) {
      budget_.spend(steps, shown);
      budget_.searched(shown, true);
      continue;
    }
    budget_.searched(shown, false);
    if (found == ONIG_MISMATCH) return false;
    if (found < 0) {
      fail_usage("the tokenizer's regular expression '{}' fails on a text of {} bytes: Oniguruma says \"{}\"",
                 utf8_start(shown, 60), text.size(), message(found));
    }
    return true;
  }
}

void PatternScan::find(std::string_view text) {
  found_.clear();
  if (!pattern_.is_regex()) {
    const std::string& wanted = pattern_.literal_;
    for (size_t at = text.find(wanted); at != std::string_view::npos; at = text.find(wanted, at + wanted.size()))
      found_.push_back({at, at + wanted.size(), true});
    return;
  }
  if (text.size() > kMostBytes)
    fail_usage("a text of {} bytes in one document: expected at most 1 GiB where a tokenizer's pattern cuts it",
               text.size());
  size_t last = std::string_view::npos;  // the end of the match before
  for (size_t at = 0; at <= text.size() && search(text, at);) {
    const auto begin = static_cast<size_t>(engine_->region->beg[0]), end = static_cast<size_t>(engine_->region->end[0]);
    if (begin == end && end == last) {  // nothing, right after a match
      at = at < text.size() ? at + utf8_length(text.substr(at)) : at + 1;
      continue;
    }
    if (begin > end || (last != std::string_view::npos && begin < last)) {
      fail_usage(
          "the tokenizer's regular expression '{}' matches backwards (\\K in a lookaround): expected matches one "
          "behind the other",
          utf8_start(pattern_.source_, 60));
    }
    found_.push_back({begin, end, true});
    at = last = end;
  }
}

void PatternScan::cut(std::string_view text, std::vector<Span>& spans) {
  spans.clear();
  if (text.empty()) return;
  find(text);
  size_t end = 0;
  for (const Span& match : found_) {
    if (match.begin > end) spans.push_back({end, match.begin, false});
    spans.push_back(match);
    end = match.end;
  }
  if (end < text.size()) spans.push_back({end, text.size(), false});
}

}  // namespace fw
