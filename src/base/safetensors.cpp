#include "base/safetensors.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <limits>
#include <nlohmann/json.hpp>
#include <tuple>
#include <type_traits>

#include "base/checksum.h"
#include "base/error.h"
#include "base/nearest.h"
#include "base/printable.h"

namespace fw {
namespace {

static_assert(std::endian::native == std::endian::little, "tensors are little-endian and are used in place");

constexpr size_t kMaxHeader = size_t{100} << 20;  // the limit of the format's own implementation
constexpr size_t kMaxRank = 32;
constexpr size_t kNoOffset = static_cast<size_t>(-1);
// Our files carry a checksum of header and tensors in their metadata; the header counts with the value all zeros.
constexpr std::string_view kChecksumKey = "fastweight_checksum";
constexpr std::string_view kNoChecksum = "0000000000000000";

struct Dtype {
  std::string_view name;
  size_t bytes;
};
constexpr std::array<Dtype, 15> kDtypes = {{{"F64", 8},
                                            {"I64", 8},
                                            {"U64", 8},
                                            {"F32", 4},
                                            {"I32", 4},
                                            {"U32", 4},
                                            {"F16", 2},
                                            {"BF16", 2},
                                            {"I16", 2},
                                            {"U16", 2},
                                            {"I8", 1},
                                            {"U8", 1},
                                            {"BOOL", 1},
                                            {"F8_E4M3", 1},
                                            {"F8_E5M2", 1}}};

size_t dtype_bytes(std::string_view name) {
  for (const Dtype& d : kDtypes) {
    if (d.name == name) return d.bytes;
  }
  return 0;
}

std::string shape_text(std::span<const int64_t> shape) { return fmt::format("[{}]", fmt::join(shape, ",")); }

// Number of elements, or -1 when it does not fit or a dimension is negative.
int64_t element_count(std::span<const int64_t> shape) {
  int64_t count = 1;
  for (const int64_t d : shape) {
    if (d < 0 || __builtin_mul_overflow(count, d, &count)) return -1;
  }
  return count;
}

struct Entry {
  std::string dtype;
  std::vector<int64_t> shape;
  uint64_t begin = 0, end = 0;
};

// The header as events, so that a hostile one costs no more than its own size: nothing deeper than the format allows,
// no name twice, no number that is not a whole one >= 0.
class HeaderParser : public nlohmann::json_sax<nlohmann::json> {
 public:
  explicit HeaderParser(const std::string& file) : file_(file) {}
  std::map<std::string, Entry> entries;
  std::map<std::string, std::string> metadata;

  bool null() override { return unexpected("null"); }
  bool boolean(bool) override { return unexpected("true or false"); }
  bool number_integer(number_integer_t value) override {
    return value < 0 ? unexpected("a negative number") : number(static_cast<uint64_t>(value));
  }
  bool number_unsigned(number_unsigned_t value) override { return number(value); }
  bool number_float(number_float_t, const string_t&) override {
    return unexpected("a number that is not whole or too large");
  }
  bool binary(binary_t&) override { return unexpected("binary data"); }

  bool string(string_t& value) override {
    if (state_ == ParserState::kMetadataValue) {
      metadata[key_] = std::move(value);
      state_ = ParserState::kMetadata;
      return true;
    }
    if (state_ != ParserState::kDtype) return unexpected("text");
    if (dtype_bytes(value) == 0) fail("unknown dtype '{}'", excerpt(value));
    entry_.dtype = std::move(value);
    state_ = ParserState::kTensor;
    return true;
  }

  bool start_object(std::size_t) override {
    if (state_ == ParserState::kBegin) {
      state_ = ParserState::kHeader;
    } else if (state_ == ParserState::kHeaderValue) {
      state_ = name_ == "__metadata__" ? ParserState::kMetadata : ParserState::kTensor;
      entry_ = Entry();
      seen_ = 0;
      offsets_ = 0;
    } else {
      return unexpected("an object");
    }
    return true;
  }

  bool key(string_t& value) override {
    if (state_ == ParserState::kHeader) {
      name_ = std::move(value);
      // Metadata twice is as ambiguous as a tensor twice.
      if (entries.count(name_) != 0 || (name_ == "__metadata__" && metadata_seen_)) fail("is in the header twice");
      metadata_seen_ = metadata_seen_ || name_ == "__metadata__";
      state_ = ParserState::kHeaderValue;
    } else if (state_ == ParserState::kMetadata) {
      key_ = std::move(value);
      if (metadata.count(key_) != 0) fail("key '{}' is there twice", excerpt(key_));
      state_ = ParserState::kMetadataValue;
    } else {
      if (value == "dtype") return field(1, ParserState::kDtype, value);
      if (value == "shape") return field(2, ParserState::kShape, value);
      if (value == "data_offsets") return field(4, ParserState::kOffsets, value);
      fail("expected the keys dtype, shape and data_offsets, got '{}'", excerpt(value));
    }
    return true;
  }

  bool end_object() override {
    if (state_ == ParserState::kTensor) {
      if (seen_ != 7) fail("expected dtype, shape and data_offsets, one is missing");
      entries[name_] = std::move(entry_);
      state_ = ParserState::kHeader;
    } else if (state_ == ParserState::kMetadata) {
      state_ = ParserState::kHeader;
    } else {
      state_ = ParserState::kEnd;
    }
    return true;
  }

  bool start_array(std::size_t) override {
    if (state_ == ParserState::kShape) {
      state_ = ParserState::kShapeValues;
    } else if (state_ == ParserState::kOffsets) {
      state_ = ParserState::kOffsetValues;
    } else {
      return unexpected("an array");
    }
    return true;
  }

  bool end_array() override {
    if (state_ == ParserState::kOffsetValues && offsets_ != 2)
      fail("data_offsets: expected [begin, end], got {} numbers", offsets_);
    state_ = ParserState::kTensor;
    return true;
  }

  bool parse_error(std::size_t position, const std::string&, const nlohmann::detail::exception&) override {
    fail_usage(
        "'{}': the safetensors header is not valid JSON at byte {}; the file is damaged or not a safetensors file",
        file_, 8 + position);
  }

 private:
  // What comes next.
  enum class ParserState {
    kBegin,
    kHeader,
    kHeaderValue,
    kMetadata,
    kMetadataValue,
    kTensor,
    kDtype,
    kShape,
    kShapeValues,
    kOffsets,
    kOffsetValues,
    kEnd
  };

  template <class... Args>
  [[noreturn]] void fail(fmt::format_string<Args...> format, Args&&... args) const {
    fail_usage("'{}': tensor '{}': {}", file_, excerpt(name_), fmt::format(format, std::forward<Args>(args)...));
  }

  bool unexpected(const char* what) const {
    if (state_ == ParserState::kBegin)
      fail_usage("'{}': the safetensors header must be a JSON object, got {}", file_, what);
    static constexpr std::array<const char*, 12> kExpected = {"an object",
                                                              "a name",
                                                              "an object",
                                                              "a key",
                                                              "text (metadata values are text)",
                                                              "a key",
                                                              "text (dtype)",
                                                              "an array (shape)",
                                                              "whole numbers >= 0 (shape)",
                                                              "an array (data_offsets)",
                                                              "whole numbers >= 0 (data_offsets)",
                                                              "the end"};
    fail("expected {}, got {}", kExpected[static_cast<size_t>(state_)], what);
  }

  bool field(int bit, ParserState next, const std::string& key) {
    if ((seen_ & bit) != 0) fail("key '{}' is there twice", key);
    seen_ |= bit;
    state_ = next;
    return true;
  }

  bool number(uint64_t value) {
    if (state_ == ParserState::kShapeValues) {
      if (value > static_cast<uint64_t>(std::numeric_limits<int64_t>::max())) fail("shape: {} is too large", value);
      if (entry_.shape.size() == kMaxRank) fail("shape: expected at most {} dimensions, got more", kMaxRank);
      entry_.shape.push_back(static_cast<int64_t>(value));
    } else if (state_ == ParserState::kOffsetValues) {
      if (offsets_ == 2) fail("data_offsets: expected [begin, end], got more numbers");
      (offsets_++ == 0 ? entry_.begin : entry_.end) = value;
    } else {
      return unexpected("a number");
    }
    return true;
  }

  const std::string& file_;
  ParserState state_ = ParserState::kBegin;
  std::string name_, key_;
  Entry entry_;
  int seen_ = 0, offsets_ = 0;
  bool metadata_seen_ = false;
};

float half_to_float(uint16_t half) {
  const uint32_t sign = (half & 0x8000u) << 16;
  const uint32_t exponent = (half >> 10) & 31u;
  const uint32_t fraction = half & 1023u;
  if (exponent == 31) return std::bit_cast<float>(sign | 0x7f800000u | fraction << 13);
  if (exponent != 0) return std::bit_cast<float>(sign | (exponent + 112) << 23 | fraction << 13);
  const float magnitude = static_cast<float>(fraction) * 0x1.0p-24f;  // subnormal: exact in float
  return sign != 0 ? -magnitude : magnitude;
}

float bfloat_to_float(uint16_t bits) { return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16); }

// Tensors of other programs need not be aligned, hence memcpy.
template <class From, class T, class Convert>
void convert(std::span<const std::byte> bytes, std::span<T> out, Convert&& one) {
  for (size_t i = 0; i < out.size(); ++i) {
    From value;
    std::memcpy(&value, bytes.data() + i * sizeof(From), sizeof(From));
    out[i] = one(value);
  }
}

// The dtypes that read<T> takes.
template <class T>
constexpr std::string_view readable_dtypes() {
  if constexpr (std::is_floating_point_v<T>) return "F32, F64, BF16 or F16";
  if constexpr (std::is_same_v<T, uint8_t>) return "U8";
  return "I32 or I64";
}

template <class T>
bool convert_from(const std::string& dtype, std::span<const std::byte> bytes, std::span<T> out) {
  if constexpr (std::is_floating_point_v<T>) {
    if (dtype == "F32") return convert<float>(bytes, out, [](float x) { return static_cast<T>(x); }), true;
    if (dtype == "F64") return convert<double>(bytes, out, [](double x) { return static_cast<T>(x); }), true;
    if (dtype == "BF16")
      return convert<uint16_t>(bytes, out, [](uint16_t x) { return static_cast<T>(bfloat_to_float(x)); }), true;
    if (dtype == "F16")
      return convert<uint16_t>(bytes, out, [](uint16_t x) { return static_cast<T>(half_to_float(x)); }), true;
  } else if constexpr (std::is_same_v<T, uint8_t>) {
    if (dtype == "U8") return convert<uint8_t>(bytes, out, [](uint8_t x) { return x; }), true;
  } else {
    if (dtype == "I32") return convert<int32_t>(bytes, out, [](int32_t x) { return static_cast<T>(x); }), true;
    if (dtype == "I64") {
      convert<int64_t>(bytes, out, [](int64_t x) {
        if (x < std::numeric_limits<T>::min() || x > std::numeric_limits<T>::max())
          fail_usage("the value {} does not fit 32 bits", x);
        return static_cast<T>(x);
      });
      return true;
    }
  }
  return false;
}

// Where the checksum's value stands in the header text; kNoPlace if it is not written as our writer writes it.
size_t checksum_offset(std::string_view header) {
  const size_t key = header.find(fmt::format("\"{}\":\"", kChecksumKey));
  return key == std::string_view::npos ? kNoOffset : key + kChecksumKey.size() + 4;
}

uint64_t checksum_of(std::string_view header, size_t offset, std::span<const std::span<const std::byte>> data) {
  Checksum sum;
  sum.add(header.substr(0, offset));
  sum.add(kNoChecksum);
  sum.add(header.substr(offset + kNoChecksum.size()));
  for (const auto& bytes : data) sum.add(bytes);
  return sum.value();
}

}  // namespace

int64_t TensorInfo::count() const { return element_count(shape); }

SafetensorsReader::SafetensorsReader(const std::string& path) : map_(path), name_(path) {
  parse(map_.bytes());
  forget(map_.bytes());  // the checksum is of all
}

SafetensorsReader::SafetensorsReader(std::span<const std::byte> content, const std::string& name) : name_(name) {
  parse(content);
}

void SafetensorsReader::parse(std::span<const std::byte> content) {
  if (content.size() < 8) {
    fail_usage(
        "'{}': expected a safetensors file (an 8-byte header length first), it has {} bytes: empty, truncated or not a "
        "safetensors file",
        name_, content.size());
  }
  uint64_t header_bytes = 0;
  std::memcpy(&header_bytes, content.data(), 8);
  if (header_bytes > kMaxHeader || header_bytes > content.size() - 8) {
    fail_usage(
        "'{}': its first 8 bytes say that {} bytes of header follow, the file has {}: truncated, damaged or not a "
        "safetensors file",
        name_, header_bytes, content.size() - 8);
  }
  const std::string_view header(reinterpret_cast<const char*>(content.data()) + 8, header_bytes);
  const std::span<const std::byte> data = content.subspan(8 + header_bytes);

  HeaderParser parser(name_);
  if (!nlohmann::json::sax_parse(header.begin(), header.end(), &parser))
    fail_usage("'{}': the safetensors header cannot be read", name_);
  metadata_ = std::move(parser.metadata);

  std::vector<const std::pair<const std::string, Entry>*> order;
  for (const auto& item : parser.entries) order.push_back(&item);
  std::sort(order.begin(), order.end(), [](const auto* a, const auto* b) {
    return std::tie(a->second.begin, a->second.end, a->first) < std::tie(b->second.begin, b->second.end, b->first);
  });
  uint64_t position = 0;
  for (const auto* item : order) {
    const Entry& e = item->second;
    const std::string tensor = excerpt(item->first);
    if (e.begin > e.end || e.end > data.size()) {
      fail_usage(
          "'{}': tensor '{}': data_offsets [{}, {}] lie outside the {} bytes that the file has for tensors: truncated "
          "or damaged",
          name_, tensor, e.begin, e.end, data.size());
    }
    if (e.begin != position) {
      fail_usage(
          "'{}': tensor '{}': its bytes begin at {}, the tensor before it ends at {}: overlaps and holes are not "
          "allowed",
          name_, tensor, e.begin, position);
    }
    position = e.end;
    const int64_t count = element_count(e.shape);
    uint64_t bytes = 0;
    if (count < 0 || __builtin_mul_overflow(static_cast<uint64_t>(count), dtype_bytes(e.dtype), &bytes) ||
        bytes != e.end - e.begin) {
      fail_usage("'{}': tensor '{}': {} of shape {} does not take the {} bytes that data_offsets give it", name_,
                 tensor, e.dtype, shape_text(e.shape), e.end - e.begin);
    }
    tensors_[item->first] = TensorInfo{e.dtype, e.shape, data.subspan(e.begin, e.end - e.begin)};
  }
  if (position != data.size()) {
    fail_usage("'{}': {} bytes follow the last tensor, expected none: damaged, or two files in one", name_,
               data.size() - position);
  }

  const auto sum = metadata_.find(std::string(kChecksumKey));
  if (sum == metadata_.end()) return;
  const size_t offset = checksum_offset(header);
  // A header that another program has laid out anew cannot be checked; one written here can.
  if (offset == kNoOffset || sum->second.size() != kNoChecksum.size() ||
      header.substr(offset, kNoChecksum.size()) != sum->second)
    return;
  const std::array<std::span<const std::byte>, 1> all = {data};
  const std::string actual = fmt::format("{:016x}", checksum_of(header, offset, all));
  if (actual != sum->second) {
    fail_usage(
        "'{}': checksum {} expected, {} found: the file is damaged (use another copy; if a program changed it on "
        "purpose, remove {} from its metadata)",
        name_, excerpt(sum->second), actual, kChecksumKey);
  }
}

template <class T>
void SafetensorsReader::read(const std::string& name, std::span<const int64_t> shape, std::span<T> out) const {
  const auto found = tensors_.find(name);
  if (found == tensors_.end()) {
    std::vector<std::string> names;
    for (const auto& item : tensors_) names.push_back(item.first);
    const std::string near = nearest(name, names);
    fail_usage("'{}': tensor '{}' is missing{}", name_, name,
               near.empty() ? "" : fmt::format(" (the nearest name there is '{}')", excerpt(near)));
  }
  const TensorInfo& tensor = found->second;
  if (!std::equal(shape.begin(), shape.end(), tensor.shape.begin(), tensor.shape.end())) {
    fail_usage("'{}': tensor '{}': expected shape {}, got {}", name_, name, shape_text(shape),
               shape_text(tensor.shape));
  }
  if (static_cast<int64_t>(out.size()) != tensor.count())
    fail_internal("tensor '{}': {} values asked for, shape {}", name, out.size(), shape_text(shape));
  bool known = false;
  try {
    known = convert_from<T>(tensor.dtype, tensor.bytes, out);
  } catch (const Error& error) {
    fail_usage("'{}': tensor '{}': {}", name_, name, error.what());
  }
  if (!known)
    fail_usage("'{}': tensor '{}': expected dtype {}, got {}", name_, name, readable_dtypes<T>(), tensor.dtype);
}

template void SafetensorsReader::read(const std::string&, std::span<const int64_t>, std::span<float>) const;
template void SafetensorsReader::read(const std::string&, std::span<const int64_t>, std::span<double>) const;
template void SafetensorsReader::read(const std::string&, std::span<const int64_t>, std::span<int32_t>) const;
template void SafetensorsReader::read(const std::string&, std::span<const int64_t>, std::span<int64_t>) const;
template void SafetensorsReader::read(const std::string&, std::span<const int64_t>, std::span<uint8_t>) const;

void SafetensorsWriter::add(const std::string& name, const std::string& dtype, std::vector<int64_t> shape,
                            std::span<const std::byte> bytes) {
  const size_t element = dtype_bytes(dtype);
  const int64_t count = element_count(shape);
  if (element == 0) fail_internal("tensor '{}': unknown dtype '{}'", name, dtype);
  if (count < 0 || static_cast<size_t>(count) * element != bytes.size()) {
    fail_internal("tensor '{}': {} of shape {} needs {} bytes, got {}", name, dtype, shape_text(shape),
                  static_cast<size_t>(count) * element, bytes.size());
  }
  if (name == "__metadata__" || !tensors_.emplace(name, TensorInfo{dtype, std::move(shape), bytes}).second) {
    fail_internal("tensor '{}': the name is taken", name);
  }
}

template <class T>
void SafetensorsWriter::add(const std::string& name, std::vector<int64_t> shape, std::span<const T> values) {
  const char* dtype = std::is_same_v<T, float>     ? "F32"
                      : std::is_same_v<T, double>  ? "F64"
                      : std::is_same_v<T, int32_t> ? "I32"
                      : std::is_same_v<T, int64_t> ? "I64"
                                                   : "U8";
  add(name, dtype, std::move(shape), std::as_bytes(values));
}

template void SafetensorsWriter::add(const std::string&, std::vector<int64_t>, std::span<const float>);
template void SafetensorsWriter::add(const std::string&, std::vector<int64_t>, std::span<const double>);
template void SafetensorsWriter::add(const std::string&, std::vector<int64_t>, std::span<const int32_t>);
template void SafetensorsWriter::add(const std::string&, std::vector<int64_t>, std::span<const int64_t>);
template void SafetensorsWriter::add(const std::string&, std::vector<int64_t>, std::span<const uint8_t>);

template <class T>
void SafetensorsWriter::add_copy(const std::string& name, std::vector<int64_t> shape, std::span<const T> values) {
  const std::span<const std::byte> bytes = std::as_bytes(values);
  copies_.emplace_back(bytes.begin(), bytes.end());
  // Vectors of bytes are aligned for any of the types, and a deque leaves them where they are.
  add<T>(name, std::move(shape), {reinterpret_cast<const T*>(copies_.back().data()), values.size()});
}
template void SafetensorsWriter::add_copy(const std::string&, std::vector<int64_t>, std::span<const float>);
template void SafetensorsWriter::add_copy(const std::string&, std::vector<int64_t>, std::span<const double>);

void SafetensorsWriter::write(const std::string& path) const {
  std::vector<const std::pair<const std::string, TensorInfo>*> order;
  for (const auto& item : tensors_) order.push_back(&item);
  std::stable_sort(order.begin(), order.end(), [](const auto* a, const auto* b) {
    return dtype_bytes(a->second.dtype) > dtype_bytes(b->second.dtype);
  });

  nlohmann::ordered_json header;
  header["__metadata__"][std::string(kChecksumKey)] = std::string(kNoChecksum);
  for (const auto& [key, value] : metadata_) {
    if (key != kChecksumKey) header["__metadata__"][key] = value;
  }
  std::vector<std::span<const std::byte>> data;
  size_t position = 0;
  for (const auto* item : order) {
    const TensorInfo& t = item->second;
    header[item->first] = {
        {"dtype", t.dtype}, {"shape", t.shape}, {"data_offsets", {position, position + t.bytes.size()}}};
    position += t.bytes.size();
    data.push_back(t.bytes);
  }
  std::string text;
  try {
    text = header.dump();
  } catch (const nlohmann::json::exception& error) {
    fail_usage("cannot write '{}': a name or a metadata value is not UTF-8 text ({})", path, error.what());
  }
  // The header's first key is the checksum's, so this finds ours and not a value that looks like it.
  text.append((8 - text.size() % 8) % 8, ' ');
  const size_t offset = checksum_offset(text);
  text.replace(offset, kNoChecksum.size(), fmt::format("{:016x}", checksum_of(text, offset, data)));

  const uint64_t header_bytes = text.size();
  write_file_atomic(path, [&](const FileSink& sink) {
    sink(std::as_bytes(std::span(&header_bytes, 1)));
    sink(std::as_bytes(std::span(text.data(), text.size())));
    for (const auto& bytes : data) sink(bytes);
  });
}

}  // namespace fw
