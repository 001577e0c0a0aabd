#include "tokenizer/precompiled.h"

#include <unicode/brkiter.h>
#include <unicode/utext.h>

#include <algorithm>
#include <array>
#include <memory>

#include "base/error.h"
#include "tokenizer/utf8.h"

namespace fw {
namespace {

std::optional<std::string> from_base64(std::string_view text) {
  constexpr std::string_view kDigits = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
  std::array<int, 256> digits{};
  digits.fill(-1);
  for (size_t i = 0; i < kDigits.size(); ++i) digits[static_cast<unsigned char>(kDigits[i])] = static_cast<int>(i);
  if (text.size() % 4 != 0) return std::nullopt;
  for (int padding = 0; padding < 2 && text.ends_with('='); ++padding) text.remove_suffix(1);
  std::string out;
  out.reserve(text.size() * 3 / 4);
  uint32_t bits = 0;
  int count = 0;
  for (const char c : text) {
    const int digit = digits[static_cast<unsigned char>(c)];
    if (digit < 0) return std::nullopt;
    bits = bits << 6 | static_cast<uint32_t>(digit);
    count += 6;
    if (count >= 8) {
      count -= 8;
      out += static_cast<char>(bits >> count & 0xff);
    }
  }
  return out;
}

uint32_t little_endian(std::string_view bytes) {
  uint32_t value = 0;
  for (size_t i = 0; i < 4; ++i) value |= uint32_t{static_cast<unsigned char>(bytes[i])} << (8 * i);
  return value;
}

bool is_ascii(char c) { return static_cast<unsigned char>(c) < 0x80; }

// Calls body(cluster) for the grapheme clusters of a text, with ICU's rules.
template <class Body>
void for_clusters(std::string_view text, const Body& body) {
  UErrorCode error = U_ZERO_ERROR;
  thread_local const std::unique_ptr<icu::BreakIterator> clusters(
      icu::BreakIterator::createCharacterInstance(icu::Locale::getRoot(), error));
  if (clusters == nullptr || U_FAILURE(error)) fail_internal("ICU has no grapheme clusters: {}", u_errorName(error));
  UText view = UTEXT_INITIALIZER;
  utext_openUTF8(&view, text.data(), static_cast<int64_t>(text.size()), &error);
  clusters->setText(&view, error);
  if (U_FAILURE(error)) fail_internal("ICU cannot read a text: {}", u_errorName(error));
  int32_t begin = clusters->first();
  for (int32_t end = clusters->next(); end != icu::BreakIterator::DONE; begin = end, end = clusters->next()) {
    body(text.substr(static_cast<size_t>(begin), static_cast<size_t>(end - begin)));
  }
  utext_close(&view);
}

}  // namespace

Precompiled::Precompiled(const JsonPart& part) {
  const std::optional<std::string> bytes = from_base64(part.text());
  if (!bytes) part.refuse("base64");
  const std::string_view all(*bytes);
  if (all.size() < 4) part.fail("expected the size of a table and the table, got fewer than 4 bytes");
  const size_t size = little_endian(all);
  if (size % 4 != 0 || size == 0 || size > all.size() - 4) {
    part.fail(
        fmt::format("expected a table of whole numbers of 4 bytes within the {} bytes that are there, got a size of {}",
                    all.size() - 4, size));
  }
  units_.reserve(size / 4);
  for (size_t i = 0; i < size; i += 4) units_.push_back(little_endian(all.substr(4 + i)));
  texts_ = all.substr(4 + size);
  if (const size_t valid = utf8_prefix(texts_); valid != texts_.size())
    part.fail(fmt::format("expected texts of UTF-8 behind the table, byte {} is none", valid));
}

// What the shortest beginning of `part` that is in the table becomes. A unit of the double array has the byte that
// leads to it, the distance to its children and whether a value hangs on it. A damaged table leads nowhere.
std::optional<std::string_view> Precompiled::replacement(std::string_view part) const {
  const auto distance = [](uint32_t unit) { return (unit >> 10) << ((unit & (1u << 9)) >> 6); };
  uint32_t index = distance(units_[0]);
  for (const char c : part) {
    const uint32_t byte = static_cast<unsigned char>(c);
    if (byte == 0) return std::nullopt;
    index ^= byte;
    if (index >= units_.size()) return std::nullopt;
    const uint32_t unit = units_[index];
    if ((unit & (1u << 31 | 0xff)) != byte) return std::nullopt;
    index ^= distance(unit);
    if (index >= units_.size()) return std::nullopt;
    if ((unit >> 8 & 1) == 0) continue;
    const size_t begin = units_[index] & ~(1u << 31);
    if (begin >= texts_.size() || (static_cast<unsigned char>(texts_[begin]) & 0xc0) == 0x80) return std::nullopt;
    return std::string_view(texts_).substr(begin, std::min(texts_.find('\0', begin), texts_.size()) - begin);
  }
  return std::nullopt;
}

void Precompiled::character(std::string_view text, std::string& out) const {
  out.append(replacement(text).value_or(text));
}

void Precompiled::cluster(std::string_view text, std::string& out) const {
  constexpr size_t kWhole = 6;  // bytes
  if (text.size() < kWhole) {
    if (const auto other = replacement(text)) {
      out.append(*other);
      return;
    }
  }
  for (size_t i = 0; i < text.size();) {
    const size_t length = utf8_length(text.substr(i));
    character(text.substr(i, length), out);
    i += length;
  }
}

// A cluster ends between two ASCII characters, but for CR LF: only what is not ASCII, with a character on each side, is
// looked at by ICU.
std::string Precompiled::apply(std::string_view text, size_t& head) const {
  const size_t before = head;
  head = 0;
  if (text.size() > size_t{1} << 30)
    fail_usage("a text of {} bytes: expected at most 1 GiB where a tokenizer normalises it", text.size());
  std::string out;
  out.reserve(text.size());
  const auto ends_behind = [&](size_t i) {  // an ASCII character that is a cluster's last
    return i + 1 == text.size() || (is_ascii(text[i + 1]) && !(text[i] == '\r' && text[i + 1] == '\n'));
  };
  for (size_t begin = 0; begin < text.size();) {
    size_t end = begin;
    while (end < text.size() && !(is_ascii(text[end]) && ends_behind(end))) ++end;
    end = std::min(end + 1, text.size());
    const std::string_view part = text.substr(begin, end - begin);
    size_t done = begin;
    const auto moved = [&](std::string_view one) {
      if (done < before) head = out.size();
      done += one.size();
    };
    if (part.size() == 1) {
      character(part, out);
      moved(part);
    } else {
      for_clusters(part, [&](std::string_view one) {
        cluster(one, out);
        moved(one);
      });
    }
    begin = end;
  }
  return out;
}

}  // namespace fw
