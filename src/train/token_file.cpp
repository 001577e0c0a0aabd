#include "train/token_file.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <utility>

#include "base/checksum.h"
#include "base/error.h"
#include "base/random.h"
#include "train/token_format.h"

namespace fw {
namespace {

template <class T>
T load(const std::byte* at) {
  T value;
  std::memcpy(&value, at, sizeof(T));
  return value;
}

template <class Id>
void copy_ids(const std::byte* ids, int64_t begin, std::span<int32_t> out) {
  for (size_t i = 0; i < out.size(); ++i)
    out[i] = static_cast<int32_t>(load<Id>(ids + (static_cast<size_t>(begin) + i) * sizeof(Id)));
}

// Position of the first id >= vocab_size, or tokens.
template <class Id>
uint64_t first_bad(const std::byte* ids, uint64_t tokens, uint64_t vocab_size) {
  if (vocab_size > std::numeric_limits<Id>::max()) return tokens;
  for (uint64_t i = 0; i < tokens; ++i) {
    if (load<Id>(ids + i * sizeof(Id)) >= vocab_size) return i;
  }
  return tokens;
}

}  // namespace

TokenFile::TokenFile(const std::string& path) : map_(path), name_(path) { parse(map_.bytes()); }

TokenFile::TokenFile(std::span<const std::byte> content, const std::string& name) : name_(name) { parse(content); }

void TokenFile::parse(std::span<const std::byte> content) {
  if (content.size() < sizeof(TokenHeader)) {
    fail_usage(
        "'{}': expected a token file (a header of {} bytes first), it has {} bytes: empty, truncated or another kind "
        "of file",
        name_, sizeof(TokenHeader), content.size());
  }
  TokenHeader header = load<TokenHeader>(content.data());
  if (header.magic != kTokenMagic) fail_usage("'{}': not a token file (it does not begin with FWTOKEN1)", name_);
  if (header.version < 1 || header.version > kTokenVersion) {
    fail_usage("'{}': token file of version {}, this program reads versions 1 to {}", name_, header.version,
               kTokenVersion);
  }
  if (header.id_bytes != 1 && header.id_bytes != 2 && header.id_bytes != 4)
    fail_usage("'{}': ids of {} bytes, expected 1, 2 or 4: damaged", name_, header.id_bytes);
  // Bounded by the file's size before anything is multiplied.
  const bool counts =
      header.tokens > 0 && header.documents > 0 && header.tokens <= content.size() && header.documents <= header.tokens;
  const uint64_t offsets_end =
      counts ? sizeof(TokenHeader) + padded_to_offsets(header.tokens * header.id_bytes) + (header.documents + 1) * 8
             : 0;
  TokenTrailer trailer;
  bool fits = counts && offsets_end == content.size();
  if (header.version > 2) {
    fits = counts && offsets_end <= content.size() && content.size() - offsets_end >= sizeof trailer;
    if (fits) trailer = load<TokenTrailer>(content.data() + offsets_end);
    const uint64_t remaining = fits ? content.size() - offsets_end - sizeof trailer : 0;
    fits = fits && trailer.exceptions <= header.tokens && remaining == trailer.exceptions * sizeof(TokenBytes);
  }
  if (!fits) {
    fail_usage("'{}': {} bytes do not fit {} tokens of {} bytes in {} documents: truncated or damaged", name_,
               content.size(), header.tokens, header.id_bytes, header.documents);
  }
  const uint64_t expected = std::exchange(header.checksum, 0);
  Checksum sum;
  sum.add(std::as_bytes(std::span(&header, 1)));
  sum.add(content.subspan(sizeof(TokenHeader)));
  if (sum.value() != expected)
    fail_usage("'{}': checksum {:016x} expected, {:016x} found: the file is damaged, make it again", name_, expected,
               sum.value());
  checksum_ = expected;

  if (header.vocab_size == 0 || header.vocab_size > static_cast<uint64_t>(std::numeric_limits<int32_t>::max())) {
    fail_usage("'{}': vocabulary of {}, expected 1 to 2^31 - 1", name_, header.vocab_size);
  }
  if (header.text_bytes > static_cast<uint64_t>(std::numeric_limits<int64_t>::max()))
    fail_usage("'{}': {} bytes of text cannot be", name_, header.text_bytes);
  if (trailer.knows_bytes > 1 || (trailer.knows_bytes == 0 && trailer.exceptions > 0) || trailer.end < -1 ||
      trailer.end >= static_cast<int64_t>(header.vocab_size)) {
    fail_usage(
        "'{}': bytes known {}, {} exceptions, end token {}: expected 0 or 1, none where they are not known, and -1 or "
        "an id of the vocabulary of {}",
        name_, trailer.knows_bytes, trailer.exceptions, trailer.end, header.vocab_size);
  }
  if ((header.version == 1) != (header.tokenizer == 0)) {
    fail_usage("'{}': the header's last field, its tokenizer, is {:016x}, expected {} in version {}", name_,
               header.tokenizer, header.version == 1 ? "0" : "a checksum", header.version);
  }
  ids_ = content.data() + sizeof(TokenHeader);
  offsets_ = ids_ + padded_to_offsets(header.tokens * header.id_bytes);
  tokens_ = static_cast<int64_t>(header.tokens);
  documents_ = static_cast<int64_t>(header.documents);
  vocab_size_ = static_cast<int64_t>(header.vocab_size);
  text_bytes_ = static_cast<int64_t>(header.text_bytes);
  tokenizer_ = header.tokenizer;
  id_bytes_ = static_cast<int>(header.id_bytes);
  version_ = static_cast<int>(header.version);
  end_ = static_cast<int32_t>(trailer.end);
  knows_bytes_ = trailer.knows_bytes != 0;
  exceptions_ = content.data() + offsets_end + sizeof trailer;
  exception_count_ = static_cast<int64_t>(trailer.exceptions);
  uint64_t least = 0;
  for (int64_t i = 0; i < exception_count_; ++i) {
    const auto exception = load<TokenBytes>(exceptions_ + i * static_cast<int64_t>(sizeof(TokenBytes)));
    constexpr uint64_t kMostBytes = uint64_t{1} << 40;
    if (exception.token < least || exception.token >= header.tokens || exception.bytes > kMostBytes) {
      fail_usage("'{}': exception {} says {} bytes of token {}: expected growing tokens below {}", name_, i,
                 exception.bytes, exception.token, header.tokens);
    }
    least = exception.token + 1;
  }

  uint64_t previous = load<uint64_t>(offsets_);
  if (previous != 0) fail_usage("'{}': the first document begins at token {}, expected 0", name_, previous);
  for (int64_t i = 1; i <= documents_; ++i) {
    const auto offset = load<uint64_t>(offsets_ + i * 8);
    if (offset <= previous || offset > header.tokens)
      fail_usage("'{}': document {} ends at token {}, it begins at {}", name_, i - 1, offset, previous);
    previous = offset;
  }
  if (previous != header.tokens)
    fail_usage("'{}': the last document ends at token {}, expected {}", name_, previous, header.tokens);
  const uint64_t bad = id_bytes_ == 1   ? first_bad<uint8_t>(ids_, header.tokens, header.vocab_size)
                       : id_bytes_ == 2 ? first_bad<uint16_t>(ids_, header.tokens, header.vocab_size)
                                        : first_bad<uint32_t>(ids_, header.tokens, header.vocab_size);
  if (bad != header.tokens)
    fail_usage("'{}': the id of token {} is not below the vocabulary of {}", name_, bad, header.vocab_size);
}

int64_t TokenFile::document_begin(int64_t i) const {
  if (i < 0 || i > documents_) fail_internal("'{}': document {} of {} asked for", name_, i, documents_);
  return static_cast<int64_t>(load<uint64_t>(offsets_ + i * 8));
}

int64_t TokenFile::document_of(int64_t token) const {
  if (token < 0 || token >= tokens_) fail_internal("'{}': token {} of {} asked for", name_, token, tokens_);
  int64_t low = 0, high = documents_;  // begin(low) <= token < begin(high)
  while (high - low > 1) {
    const int64_t middle = low + (high - low) / 2;
    (document_begin(middle) <= token ? low : high) = middle;
  }
  return low;
}

void TokenFile::read(int64_t begin, std::span<int32_t> out) const {
  if (begin < 0 || begin > tokens_ || static_cast<int64_t>(out.size()) > tokens_ - begin) {
    fail_internal("'{}': tokens [{}, {}) of {} asked for", name_, begin, begin + static_cast<int64_t>(out.size()),
                  tokens_);
  }
  if (id_bytes_ == 1) return copy_ids<uint8_t>(ids_, begin, out);
  if (id_bytes_ == 2) return copy_ids<uint16_t>(ids_, begin, out);
  copy_ids<uint32_t>(ids_, begin, out);
}

std::optional<int64_t> TokenFile::exception_at(int64_t token) const {
  const auto at = [this](int64_t i) {
    return load<TokenBytes>(exceptions_ + i * static_cast<int64_t>(sizeof(TokenBytes)));
  };
  int64_t low = 0, high = exception_count_;  // the first whose token is not below lies in [low, high]
  while (low < high) {
    const int64_t middle = low + (high - low) / 2;
    if (at(middle).token < static_cast<uint64_t>(token)) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  if (low == exception_count_ || at(low).token != static_cast<uint64_t>(token)) return std::nullopt;
  return static_cast<int64_t>(at(low).bytes);
}

void check_tokenizer(const TokenFile& file, const Tokenizer& tokenizer) {
  if (file.vocab_size() != tokenizer.vocab_size()) {
    fail_usage("'{}' has a vocabulary of {}, the tokenizer ({}) of {}: the file was made with another tokenizer",
               file.name(), file.vocab_size(), tokenizer.type(), tokenizer.vocab_size());
  }
  if (file.tokenizer() != 0 && file.tokenizer() != tokenizer.checksum()) {
    fail_usage(
        "'{}' was made with another tokenizer (checksum {:016x}, this one, {}, has {:016x}): its ids mean other text; "
        "make it again from the text",
        file.name(), file.tokenizer(), tokenizer.type(), tokenizer.checksum());
  }
}

int64_t TokenMix::tokens() const {
  return std::accumulate(parts.begin(), parts.end(), int64_t{0},
                         [](int64_t sum, const Part& p) { return sum + p.file->tokens(); });
}

int64_t TokenMix::documents() const {
  return std::accumulate(parts.begin(), parts.end(), int64_t{0},
                         [](int64_t sum, const Part& p) { return sum + p.file->documents(); });
}

std::string TokenMix::description() const {
  if (parts.size() == 1) return "";
  double sum = 0;
  for (const Part& part : parts) sum += part.weight;
  std::string text;
  for (const Part& part : parts)
    text += fmt::format("{}{} tokens x {}", text.empty() ? "" : ", ", part.file->tokens(), part.weight / sum);
  return text;
}

BatchSource::BatchSource(const TokenMix& mix, int64_t sequences, int64_t length, uint64_t seed)
    : sequences_(sequences), length_(length) {
  if (sequences < 1) fail_usage("batch: expected at least 1 sequence, got {}", sequences);
  if (length < 1) fail_usage("length: expected windows of at least 1 token, got {}", length);
  if (mix.parts.empty()) fail_internal("BatchSource: no file");
  double sum = 0;
  for (const TokenMix::Part& part : mix.parts) {
    if (!(part.weight > 0 && std::isfinite(part.weight)))
      fail_usage("'{}': expected a weight > 0, got {}", part.file->name(), part.weight);
    sum += part.weight;
  }
  for (const TokenMix::Part& part : mix.parts) {
    const int64_t tokens = part.file->tokens();
    if (tokens < length) {
      fail_usage("'{}' has {} tokens, a window takes {}: use more text or a length of at most {}", part.file->name(),
                 tokens, length, tokens);
    }
    // Room to move the first window by up to length - 1 tokens, where the file has it.
    const int64_t windows = std::max<int64_t>(1, (tokens - (length - 1)) / length);
    const uint64_t own_seed = seed + streams_.size() * 0xd1342543de82ef95u;
    streams_.push_back(
        {.file = part.file, .share = part.weight / sum, .seed = own_seed, .windows = windows, .order = {}});
    windows_ += windows;
  }
}

size_t BatchSource::choose() const {
  size_t best = 0;
  double furthest = -std::numeric_limits<double>::infinity();
  for (size_t i = 0; i < streams_.size() && streams_.size() > 1; ++i) {
    const double behind =
        streams_[i].share * static_cast<double>(position_ + 1) - static_cast<double>(streams_[i].given);
    if (behind > furthest) {
      furthest = behind;
      best = i;
    }
  }
  return best;
}

void BatchSource::seek(int64_t position) {
  if (position < 0) fail_usage("data position: expected a number of windows >= 0, got {}", position);
  for (Stream& stream : streams_) stream.given = 0;
  if (streams_.size() == 1) streams_[0].given = position;
  for (position_ = streams_.size() == 1 ? position : 0; position_ < position; ++position_) ++streams_[choose()].given;
}

void BatchSource::shuffle(Stream& stream, int64_t epoch) const {
  // One generator per epoch, so that any epoch can be reached without going through the ones before it.
  Random random(stream.seed * 0x9e3779b97f4a7c15u + static_cast<uint64_t>(epoch));
  const int64_t room = std::min(length_ - 1, stream.file->tokens() - stream.windows * length_);
  stream.first = static_cast<int64_t>(random.below(static_cast<uint64_t>(room) + 1));
  std::vector<int64_t>& order = stream.order;
  order.resize(static_cast<size_t>(stream.windows));
  std::iota(order.begin(), order.end(), int64_t{0});
  for (size_t i = order.size(); i > 1; --i) std::swap(order[i - 1], order[random.below(i)]);
  stream.shuffled_epoch = epoch;
}

void BatchSource::add_window(Stream& stream, Batch& batch, std::vector<int64_t>& offsets) {
  const TokenFile& file = *stream.file;
  if (stream.given / stream.windows != stream.shuffled_epoch) shuffle(stream, stream.given / stream.windows);
  const int64_t begin = stream.first + stream.order[static_cast<size_t>(stream.given++ % stream.windows)] * length_;
  const int64_t end = begin + length_;
  std::vector<int32_t> window(static_cast<size_t>(std::min(length_ + 1, file.tokens() - begin)));
  file.read(begin, window);
  batch.ids.insert(batch.ids.end(), window.begin(), window.begin() + length_);
  batch.targets.insert(batch.targets.end(), window.begin() + 1, window.end());
  batch.targets.resize(batch.ids.size(), -1);  // the file's last token has no successor
  const int64_t base = static_cast<int64_t>(batch.ids.size()) - length_ - begin;
  int64_t document = file.document_of(begin);
  for (int64_t boundary = file.document_begin(++document); boundary <= end;
       boundary = file.document_begin(++document)) {
    batch.targets[static_cast<size_t>(base + boundary - 1)] = -1;
    if (boundary == end) break;
    offsets.push_back(base + boundary);
  }
  offsets.push_back(base + end);
}

Batch BatchSource::next() {
  Batch batch;
  const auto total = static_cast<size_t>(sequences_ * length_);
  batch.ids.reserve(total);
  batch.targets.reserve(total);
  std::vector<int64_t> offsets = {0};
  for (int64_t s = 0; s < sequences_; ++s, ++position_) add_window(streams_[choose()], batch, offsets);
  batch.layout = SeqLayout(std::move(offsets));
  return batch;
}

}  // namespace fw
