#include "tokenizer/text_bytes.h"

#include <unicode/normalizer2.h>
#include <unicode/uchar.h>
#include <unicode/unistr.h>

#include <algorithm>
#include <limits>
#include <optional>

#include "base/error.h"
#include "tokenizer/utf8.h"

namespace fw {
namespace {

constexpr char32_t kSpaceMark = 0x2581;  // U+2581, a space in many vocabularies
constexpr char32_t kUnknown = 0x110100;  // a piece that may stand for anything
constexpr char32_t kBytes = 0x110000;    // and a byte that is no UTF-8

// A character as it is compared, and what it belongs to: bytes of the text, or the token.
struct Unit {
  char32_t key;
  size_t begin;  // where its character begins, in bytes of the text; or the token
};

class Keys {
 public:
  Keys() {
    UErrorCode error = U_ZERO_ERROR;
    form_ = icu::Normalizer2::getNFKDInstance(error);
    if (U_FAILURE(error)) fail_internal("ICU has no NFKD: {}", u_errorName(error));
  }
  // The keys of a character: of its NFKD form, without case and without marks. There may be none. Those after the
  // first begin at `next`.
  void add(char32_t c, size_t begin, size_t next, std::vector<Unit>& units) const {
    if (c == kSpaceMark || (c < 0x110000 && u_isUWhiteSpace(static_cast<UChar32>(c))))
      return units.push_back({U' ', begin});
    if (c >= 0x110000) return units.push_back({c, begin});
    if (c < 0x80) return units.push_back({static_cast<char32_t>(c >= 'A' && c <= 'Z' ? c + ('a' - 'A') : c), begin});
    const size_t before = units.size();
    icu::UnicodeString form;
    if (!form_->getDecomposition(static_cast<UChar32>(c), form)) form = static_cast<UChar32>(c);
    for (int32_t i = 0; i < form.length(); i = form.moveIndex32(i, 1)) {
      const UChar32 one = form.char32At(i);
      if (u_charType(one) == U_NON_SPACING_MARK) continue;
      units.push_back({u_isUWhiteSpace(one) ? U' ' : static_cast<char32_t>(u_foldCase(one, U_FOLD_CASE_DEFAULT)),
                       units.size() == before ? begin : next});
    }
  }

 private:
  const icu::Normalizer2* form_ = nullptr;
};

// The character at byte i, which goes on after it.
char32_t next_character(std::string_view text, size_t& i) {
  if (utf8_length(text.substr(i)) > 0) return utf8_next(text, i);
  return kBytes + static_cast<unsigned char>(text[i++]);
}

bool is_unknown(std::string_view piece) {
  return piece == "<unk>" || piece == "[UNK]" || piece == "\xe2\x81\x87" || piece == "<UNK>";
}

// both go on; a character without a piece; a piece's character without text
enum class Step : char { kPair, kText, kPiece };

// Costs of an alignment. Spaces come and go cheaply: tokenizers add and drop them.
int cost_alone(const Unit& unit) { return unit.key == U' ' ? 2 : 8; }
int cost_pair(const Unit& text, const Unit& piece) {
  if (text.key == piece.key) return 0;
  if (piece.key == kUnknown) return 3;
  return 12;
}

// The least costly alignment of two beginnings, or of two whole sequences where nothing follows. Of equal ones that in
// which characters without a piece come late, so that they belong to the token before.
std::vector<Step> align(std::span<const Unit> text, std::span<const Unit> pieces, bool whole) {
  const size_t n = text.size(), m = pieces.size();
  std::vector<Step> step((n + 1) * (m + 1));
  std::vector<int> row(m + 1), last(n + 1);
  for (size_t j = 1; j <= m; ++j) row[j] = row[j - 1] + cost_alone(pieces[j - 1]), step[j] = Step::kPiece;
  last[0] = row[m];
  for (size_t i = 1; i <= n; ++i) {
    int corner = row[0];
    row[0] += cost_alone(text[i - 1]);
    step[i * (m + 1)] = Step::kText;
    for (size_t j = 1; j <= m; ++j) {
      const int pair = corner + cost_pair(text[i - 1], pieces[j - 1]), alone = row[j] + cost_alone(text[i - 1]);
      const int piece = row[j - 1] + (pieces[j - 1].key == kUnknown ? 8 : cost_alone(pieces[j - 1]));
      corner = row[j];
      row[j] = std::min({pair, alone, piece});
      step[i * (m + 1) + j] = row[j] == alone ? Step::kText : row[j] == pair ? Step::kPair : Step::kPiece;
    }
    last[i] = row[m];
  }
  size_t i = n, j = m;
  if (!whole) {
    // Where one of the two ends, the rest of the other is not part of the alignment.
    int least = std::numeric_limits<int>::max();
    for (size_t at = 0; at <= n; ++at) {
      if (last[at] < least) least = last[at], i = at, j = m;
    }
    for (size_t at = 0; at <= m; ++at) {
      if (row[at] < least) least = row[at], i = n, j = at;
    }
  }
  std::vector<Step> path;
  while (i > 0 || j > 0) {
    path.push_back(step[i * (m + 1) + j]);
    i -= path.back() != Step::kPiece;
    j -= path.back() != Step::kText;
  }
  std::ranges::reverse(path);
  return path;
}

// How much of an alignment is sure: up to the end of the first long run of equal characters; 0: it has none.
size_t sure_part(const std::vector<Step>& path, std::span<const Unit> text, std::span<const Unit> pieces) {
  constexpr size_t kRun = 12;
  size_t i = 0, j = 0, run = 0;
  for (size_t at = 0; at < path.size(); ++at) {
    run = path[at] == Step::kPair && text[i].key == pieces[j].key ? run + 1 : 0;
    i += path[at] != Step::kPiece;
    j += path[at] != Step::kText;
    if (run == kRun) return at + 1;
  }
  return 0;
}

constexpr size_t kWindow = 48, kLargestWindow = 768;  // units of an alignment

}  // namespace

TextBytes::TextBytes(const Tokenizer& tokenizer)
    : tokenizer_(tokenizer), known_(tokenizer.type() != "ids"), bytes_(tokenizer.type() == "bytes") {
  constexpr int32_t kOrdinary = 1 << 22;
  if (!known_ || tokenizer.vocab_size() > kOrdinary) return;
  pieces_.reserve(static_cast<size_t>(tokenizer.vocab_size()));
  for (int32_t id = 0; id < tokenizer.vocab_size(); ++id) pieces_.push_back(tokenizer.piece(id));
}

const std::string& TextBytes::text_of(int32_t id) const {
  if (!pieces_.empty()) return pieces_[static_cast<size_t>(id)];
  const auto found = looked_up_.find(id);
  return found != looked_up_.end() ? found->second : looked_up_.emplace(id, tokenizer_.piece(id)).first->second;
}

bool TextBytes::is_space(int32_t id) const {
  const std::string& piece = text_of(id);
  return !piece.empty() && piece.find_first_not_of(" \t\r\n\f\v") == std::string::npos;
}

void TextBytes::measure(std::string_view text, std::span<const int32_t> ids, std::vector<int64_t>& bytes) const {
  bytes.assign(ids.size(), bytes_ ? 1 : 0);
  if (ids.empty() || bytes_) return;
  const auto piece_of = [&](size_t token) -> const std::string& { return text_of(ids[token]); };
  std::optional<Keys> keys;
  size_t token = 0, at = 0;  // tokens and bytes before these are done
  for (size_t window = kWindow; token < ids.size();) {
    if (text.substr(at).starts_with(piece_of(token))) {
      bytes[token] = static_cast<int64_t>(piece_of(token).size());
      at += piece_of(token++).size();
      window = kWindow;
      continue;
    }
    if (!keys) keys.emplace();
    std::vector<Unit> theirs, ours;
    size_t text_end = at, token_end = token;
    while (theirs.size() < window && text_end < text.size()) {
      const size_t begin = text_end;
      const char32_t c = next_character(text, text_end);
      keys->add(c, begin, text_end, theirs);
    }
    std::string joined;
    std::vector<std::pair<size_t, size_t>> begins;  // in `joined`, of tokens
    for (size_t length = 0; length < window && token_end < ids.size(); ++token_end) {
      begins.emplace_back(joined.size(), token_end);
      joined += is_unknown(piece_of(token_end)) ? "\xff" : piece_of(token_end);
      length += std::max<size_t>(1, piece_of(token_end).size());
    }
    size_t of = 0;
    for (size_t i = 0; i < joined.size();) {
      while (of + 1 < begins.size() && begins[of + 1].first <= i) ++of;
      const size_t owner = begins[of].second;
      const bool unknown = is_unknown(piece_of(owner));
      const char32_t c = next_character(joined, i);
      unknown ? ours.push_back({kUnknown, owner}) : keys->add(c, owner, owner, ours);
    }
    bool whole = text_end == text.size() && token_end == ids.size();
    // Mostly only case or form differ, and then the first token is the same characters.
    const auto first = static_cast<size_t>(std::ranges::count(ours, token, &Unit::begin));
    const auto equal = std::ranges::mismatch(theirs, ours, {}, &Unit::key, &Unit::key);
    const auto run = static_cast<size_t>(equal.in1 - theirs.begin());
    std::vector<Step> path;
    size_t sure = run;
    if (first > 0 && run >= first) {
      path.assign(run, Step::kPair);
      whole = whole && run == theirs.size() && run == ours.size();
    } else {
      path = align(theirs, ours, whole);
      sure = whole ? path.size() : sure_part(path, theirs, ours);
    }
    if (sure == 0 && window < kLargestWindow) {
      window *= 2;
      continue;
    }
    if (path.empty()) break;
    if (sure == 0) sure = std::max<size_t>(1, path.size() / 2);

    // Tokens begin where their first character is taken; what lies between belongs to the one before.
    size_t i = 0, j = 0, current = token, begin = at;
    for (size_t s = 0; s < sure; ++s) {
      if (path[s] != Step::kText && (ours[j].begin > current || (j == 0 && token > 0))) {
        const size_t here = i < theirs.size() ? theirs[i].begin : text_end;
        bytes[j == 0 && token > 0 ? token - 1 : current] += static_cast<int64_t>(here - begin);
        begin = here;
        current = ours[j].begin;
      }
      i += path[s] != Step::kPiece;
      j += path[s] != Step::kText;
    }
    if (whole) {
      bytes[current] += static_cast<int64_t>(text.size() - begin);
      return;
    }
    if (current == token) {  // one token longer than all that was aligned
      const size_t here = i < theirs.size() ? theirs[i].begin : text_end;
      bytes[token++] += static_cast<int64_t>(here - begin);
      at = here;
      continue;
    }
    token = current;
    at = begin;
  }
  bytes.back() += static_cast<int64_t>(text.size() - at);
}

}  // namespace fw
