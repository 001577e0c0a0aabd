#include "train/event_file.h"

#include <bit>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <optional>
#include <system_error>

#include "base/crc32c.h"
#include "base/error.h"
#include "base/file.h"

namespace fw {
namespace {

static_assert(std::endian::native == std::endian::little, "numbers are written as they lie in memory");

constexpr size_t kHead = 12, kTail = 4;  // bytes of a record before and after its payload

enum WireType : uint32_t { kVarint = 0, kFixed64 = 1, kBytes = 2, kFixed32 = 5 };

template <class T>
std::string raw(T value) {
  return {reinterpret_cast<const char*>(&value), sizeof(value)};
}

template <class T>
T read_raw(std::string_view bytes, size_t at) {
  T value;
  std::memcpy(&value, bytes.data() + at, sizeof(value));
  return value;
}

std::string varint(uint64_t value) {
  std::string bytes;
  for (; value >= 0x80; value >>= 7) bytes.push_back(static_cast<char>(value | 0x80));
  bytes.push_back(static_cast<char>(value));
  return bytes;
}

std::string key(uint32_t field, WireType type) { return varint(field << 3 | type); }

std::string bytes_field(uint32_t field, std::string_view content) {
  return (key(field, kBytes) + varint(content.size())).append(content);
}

std::string event_head(double wall_time, int64_t step) {
  return key(1, kFixed64) + raw(wall_time) + key(2, kVarint) + varint(static_cast<uint64_t>(step));
}

// The checksum of a stretch that may itself have checksums in it.
uint32_t masked(std::string_view bytes) {
  const uint32_t crc = crc32c(bytes);
  return std::rotr(crc, 15) + 0xa282ead8;
}

std::string record(std::string_view payload) {
  const std::string length = raw(static_cast<uint64_t>(payload.size()));
  return (length + raw(masked(length))).append(payload) + raw(masked(payload));
}

// The payload of the record that `bytes` begin with; none when it is cut short or damaged.
std::optional<std::string_view> first_payload(std::string_view bytes) {
  if (bytes.size() < kHead + kTail || read_raw<uint32_t>(bytes, 8) != masked(bytes.substr(0, 8))) return std::nullopt;
  const auto length = read_raw<uint64_t>(bytes, 0);
  if (length > bytes.size() - kHead - kTail) return std::nullopt;
  const std::string_view payload = bytes.substr(kHead, length);
  if (read_raw<uint32_t>(bytes, kHead + length) != masked(payload)) return std::nullopt;
  return payload;
}

// The step of an event, which append() writes after the wall time; 0 where there is none.
int64_t step_of(std::string_view payload) {
  const std::string step_key = key(2, kVarint);
  size_t at = 1 + sizeof(double);
  if (payload.size() <= at || payload.substr(at, 1) != step_key) return 0;
  uint64_t step = 0;
  for (int shift = 0; ++at < payload.size() && shift < 63; shift += 7) {
    const auto byte = static_cast<unsigned char>(payload[at]);
    step |= static_cast<uint64_t>(byte & 0x7f) << shift;
    if (byte < 0x80) break;
  }
  return static_cast<int64_t>(step);
}

std::string kept_records(const std::string& path, int64_t step) {
  if (!file_exists(path)) return {};
  const std::string content = read_file(path);
  std::string kept;
  std::string_view remaining = content;
  while (const auto payload = first_payload(remaining)) {
    const size_t size = kHead + payload->size() + kTail;
    if (step_of(*payload) <= step) kept.append(remaining.substr(0, size));
    remaining.remove_prefix(size);
  }
  return kept;
}

double now() { return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count(); }

}  // namespace

EventFile::EventFile(const std::string& path, int64_t step) : path_(path) {
  std::string kept = kept_records(path, step);
  if (kept.empty()) kept = record(event_head(now(), 0) + bytes_field(3, "brain.Event:2"));
  write_file_atomic(path, kept);
  file_.reset(std::fopen(path.c_str(), "ae"));
  if (file_ == nullptr) fail_io("cannot write '{}': {}", path, std::generic_category().message(errno));
}

void EventFile::append(int64_t step, double wall_time, std::span<const EventScalar> scalars) {
  std::string summary;
  for (const EventScalar& scalar : scalars) {
    summary += bytes_field(1, bytes_field(1, scalar.tag) + key(2, kFixed32) + raw(static_cast<float>(scalar.value)));
  }
  write(event_head(wall_time, step) + bytes_field(5, summary));
}

void EventFile::write(std::string_view payload) {
  const std::string bytes = record(payload);
  if (std::fwrite(bytes.data(), 1, bytes.size(), file_.get()) != bytes.size() || std::fflush(file_.get()) != 0) {
    fail_io("cannot write '{}': {}", path_, std::generic_category().message(errno));
  }
}

}  // namespace fw
