#include "tokenizer/sentencepiece_check.h"

#include <fmt/format.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <optional>
#include <vector>

#include "tokenizer/utf8.h"

namespace fw {
namespace {

constexpr size_t kMostTable = size_t{1} << 24;  // bytes; published ones have 300 kB

// A field of a message of Protocol Buffers.
struct Field {
  uint64_t number = 0;
  unsigned kind = 0;       // 0: a number, 1: 8 bytes, 2: bytes behind their length, 5: 4 bytes
  std::string_view bytes;  // of kinds 1, 2 and 5
};

class Message {
 public:
  explicit Message(std::string_view bytes) : rest_(bytes) {}
  // False at the end and at damage, which damaged() tells apart.
  bool next(Field& field) {
    if (rest_.empty()) return false;
    const auto key = number();
    if (!key) return fail();
    field.number = *key >> 3;
    field.kind = static_cast<unsigned>(*key & 7);
    if (field.number == 0) return fail();
    size_t size = 0;
    switch (field.kind) {
      case 0:
        return number() ? true : fail();
      case 1:
        size = 8;
        break;
      case 5:
        size = 4;
        break;
      case 2: {
        const auto length = number();
        if (!length || *length > rest_.size()) return fail();
        size = static_cast<size_t>(*length);
        break;
      }
      default:  // groups, which no model has
        return fail();
    }
    if (size > rest_.size()) return fail();
    field.bytes = rest_.substr(0, size);
    rest_.remove_prefix(size);
    return true;
  }
  bool damaged() const { return damaged_; }

 private:
  bool fail() {
    damaged_ = true;
    return false;
  }
  std::optional<uint64_t> number() {
    uint64_t value = 0;
    for (unsigned shift = 0; shift < 64 && !rest_.empty(); shift += 7) {
      const auto byte = static_cast<unsigned char>(rest_[0]);
      rest_.remove_prefix(1);
      value |= uint64_t{byte & 127u} << shift;
      if (byte < 128) return value;
    }
    return std::nullopt;
  }

  std::string_view rest_;
  bool damaged_ = false;
};

uint32_t little_endian(std::string_view bytes) {
  uint32_t value = 0;
  for (size_t i = 0; i < 4; ++i) value |= uint32_t{static_cast<unsigned char>(bytes[i])} << (8 * i);
  return value;
}

// A double array (precompiled.h) and its texts. Every place that the library can reach with any bytes must be in the
// array.
std::string table_fault(std::string_view table) {
  if (table.empty()) return "";
  if (table.size() > kMostTable)
    return fmt::format("a table of {} bytes: expected at most {}", table.size(), kMostTable);
  if (table.size() < 8) return "a table of fewer than 8 bytes";
  const size_t size = little_endian(table);
  if (size == 0 || size % 1024 != 0 || size > table.size() - 4) {
    return fmt::format("a table of {} bytes in {}: expected blocks of 1024 bytes within what is there", size,
                       table.size() - 4);
  }
  const size_t count = size / 4;
  const auto unit = [&](size_t index) { return little_endian(table.substr(4 + 4 * index)); };
  const std::string_view texts = table.substr(4 + size);
  if (utf8_prefix(texts) != texts.size()) return "texts behind the table that are not UTF-8";
  if (!texts.empty() && texts.back() != '\0') return "texts behind the table that do not end";
  std::vector<bool> seen(count, false);
  std::vector<size_t> open{0};
  seen[0] = true;
  while (!open.empty()) {
    const size_t index = open.back();
    open.pop_back();
    const uint32_t here = unit(index);
    const size_t children = index ^ (size_t{here >> 10} << ((here & (1u << 9)) >> 6));
    if ((children | 255) >= count) return fmt::format("a table of {} places that leads to place {}", count, children);
    if ((here >> 8 & 1) != 0) {
      const size_t text = unit(children) & ~(1u << 31);
      if (text >= texts.size())
        return fmt::format("a table that leads to byte {} of texts of {} bytes", text, texts.size());
      if ((static_cast<unsigned char>(texts[text]) & 0xc0u) == 0x80u)
        return "a table that leads into the middle of a character";
    }
    for (uint32_t byte = 0; byte < 256; ++byte) {
      const size_t child = children ^ byte;
      if (!seen[child] && (unit(child) & (1u << 31 | 0xff)) == byte) {
        seen[child] = true;
        open.push_back(child);
      }
    }
  }
  return "";
}

std::string normalizer_fault(std::string_view bytes) {
  Message message(bytes);
  for (Field field; message.next(field);) {
    if (field.number != 2) continue;
    if (field.kind != 2) return "precompiled_charsmap: no bytes";
    if (const std::string fault = table_fault(field.bytes); !fault.empty()) return "precompiled_charsmap: " + fault;
  }
  return message.damaged() ? "not a message" : "";
}

std::string piece_fault(std::string_view bytes) {
  Message message(bytes);
  for (Field field; message.next(field);) {
    if (field.number == 1 && field.kind == 2) {
      if (field.bytes.find('\0') != std::string_view::npos) return "the text has a NUL";
      if (utf8_prefix(field.bytes) != field.bytes.size()) return "the text is not UTF-8";
    }
    if (field.number == 2 && field.kind == 5) {
      const uint32_t bits = little_endian(field.bytes);
      float score = 0;
      std::memcpy(&score, &bits, sizeof score);
      if (!std::isfinite(score)) return "the score is not finite";
    }
  }
  return message.damaged() ? "not a message" : "";
}

}  // namespace

std::string sentencepiece_fault(std::string_view model) {
  Message message(model);
  size_t pieces = 0;
  for (Field field; message.next(field);) {
    std::string fault;
    if (field.number == 1 && field.kind == 2) {
      fault = piece_fault(field.bytes);
      if (!fault.empty()) return fmt::format("piece {}: {}", pieces, fault);
      ++pieces;
    } else if (field.number == 3 && field.kind == 2) {
      fault = normalizer_fault(field.bytes);
      if (!fault.empty()) return "normalizer_spec: " + fault;
    } else if (field.number == 5 && field.kind == 2) {
      fault = normalizer_fault(field.bytes);
      if (!fault.empty()) return "denormalizer_spec: " + fault;
    }
  }
  if (message.damaged()) return "it ends in the middle, or is no message of Protocol Buffers";
  return pieces == 0 ? "it has no pieces" : "";
}

}  // namespace fw
