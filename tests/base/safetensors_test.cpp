#include "base/safetensors.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>

#include "base/base_support.h"
#include "base/file.h"
#include "base/temp_folder.h"

namespace fw {
namespace {

using testing::bytes_of;
using testing::caught;
using testing::fails;
using testing::FileSizeLimit;
using testing::TempFolder;

template <class T>
std::vector<T> values_of(const SafetensorsReader& reader, const std::string& name, const std::vector<int64_t>& shape) {
  std::vector<T> out(static_cast<size_t>(reader.tensors().at(name).count()));
  reader.read<T>(name, shape, std::span<T>(out));
  return out;
}

template <class T>
std::string raw(const std::vector<T>& values) {
  return {reinterpret_cast<const char*>(values.data()), values.size() * sizeof(T)};
}

// A file as another program may write it: this header, these bytes.
std::string file_of(const std::string& header, const std::string& data) {
  const uint64_t size = header.size();
  return raw(std::vector<uint64_t>{size}) + header + data;
}

SafetensorsReader reader_of(const std::string& content) { return SafetensorsReader(bytes_of(content), "model"); }

// A small file with several types, for damage of all kinds. The tensors' memory lives as long as this.
struct Sample {
  std::vector<float> weights = {1.5f, -2.0f, 0.0f, 3.25f, 1e30f, -1e-30f};
  std::vector<int64_t> steps = {-7, int64_t{1} << 40};
  std::vector<uint8_t> flags = {1, 0, 255};

  std::string write(const std::string& path) const {
    SafetensorsWriter writer;
    writer.add<float>("layer.weight", {2, 3}, weights);
    writer.add<int64_t>("steps", {2}, steps);
    writer.add<uint8_t>("flags", {3, 1}, flags);
    writer.set_metadata("format", "pt");
    writer.write(path);
    return read_file(path);
  }

  bool holds(const SafetensorsReader& reader) const {
    return reader.tensors().size() == 3 && values_of<float>(reader, "layer.weight", {2, 3}) == weights &&
           values_of<int64_t>(reader, "steps", {2}) == steps && values_of<uint8_t>(reader, "flags", {3, 1}) == flags &&
           reader.metadata().at("format") == "pt";
  }
};

TEST(Safetensors, RoundTripOfWhatTheWriterTakes) {
  const TempFolder folder;
  const Sample sample;
  sample.write(folder.path("file"));
  const SafetensorsReader reader(folder.path("file"));
  EXPECT_TRUE(sample.holds(reader));
  EXPECT_TRUE(reader.has("steps"));
  EXPECT_FALSE(reader.has("step"));
  EXPECT_EQ(reader.tensors().at("layer.weight").dtype, "F32");
  EXPECT_EQ(reader.tensors().at("steps").dtype, "I64");
  EXPECT_EQ(reader.tensors().at("flags").dtype, "U8");

  SafetensorsWriter writer;
  const std::vector<double> doubles = {1.0 / 3, -0.0, 1e300, std::numeric_limits<double>::denorm_min()};
  const std::vector<int32_t> ints = {std::numeric_limits<int32_t>::min(), 0, 5};
  writer.add<double>("d", {4}, doubles);
  writer.add<int32_t>("i", {1, 3, 1}, ints);
  writer.add<float>("scalar", {}, std::span(sample.weights.data(), 1));
  writer.add<float>("none", {0, 5}, std::span<const float>());
  writer.write(folder.path("other"));
  const SafetensorsReader other(folder.path("other"));
  EXPECT_EQ(raw(values_of<double>(other, "d", {4})), raw(doubles));
  EXPECT_EQ(values_of<int32_t>(other, "i", {1, 3, 1}), ints);
  EXPECT_EQ(values_of<float>(other, "scalar", {}), std::vector<float>{1.5f});
  EXPECT_TRUE(values_of<float>(other, "none", {0, 5}).empty());
}

TEST(Safetensors, EveryDtypeRoundTrips) {
  const TempFolder folder;
  const std::vector<std::pair<std::string, size_t>> dtypes = {
      {"F64", 8}, {"F32", 4}, {"F16", 2}, {"BF16", 2}, {"I64", 8},  {"I32", 4},     {"I16", 2},    {"I8", 1},
      {"U64", 8}, {"U32", 4}, {"U16", 2}, {"U8", 1},   {"BOOL", 1}, {"F8_E4M3", 1}, {"F8_E5M2", 1}};
  std::string data(64, '\0');
  std::iota(data.begin(), data.end(), '\x11');
  SafetensorsWriter writer;
  for (const auto& [dtype, size] : dtypes) writer.add("t_" + dtype, dtype, {3, 2}, bytes_of(data).first(6 * size));
  writer.write(folder.path("file"));
  const std::string content = read_file(folder.path("file"));
  const SafetensorsReader reader(bytes_of(content), "file");
  for (const auto& [dtype, size] : dtypes) {
    const TensorInfo& tensor = reader.tensors().at("t_" + dtype);
    EXPECT_EQ(tensor.dtype, dtype);
    EXPECT_EQ(tensor.shape, (std::vector<int64_t>{3, 2}));
    ASSERT_EQ(tensor.bytes.size(), 6 * size);
    EXPECT_EQ(std::memcmp(tensor.bytes.data(), data.data(), 6 * size), 0);
    // Readers that use a mapped file in place need this.
    EXPECT_EQ(static_cast<size_t>(tensor.bytes.data() - reinterpret_cast<const std::byte*>(content.data())) % size, 0u)
        << dtype;
  }
}

TEST(Safetensors, EveryHalfConvertsExactly) {
  std::vector<uint16_t> bits(65536);
  std::iota(bits.begin(), bits.end(), uint16_t{0});
  const std::string content = file_of(
      R"({"h":{"dtype":"F16","shape":[65536],"data_offsets":[0,131072]},"b":{"dtype":"BF16","shape":[65536],"data_offsets":[131072,262144]}})",
      raw(bits) + raw(bits));
  const SafetensorsReader reader = reader_of(content);
  const auto check = [&](const std::string& name, int exponent_bits, int fraction_bits) {
    const auto floats = values_of<float>(reader, name, {65536});
    const auto doubles = values_of<double>(reader, name, {65536});
    const int bias = (1 << (exponent_bits - 1)) - 1;
    for (uint32_t b = 0; b < 65536; ++b) {
      const int exponent = static_cast<int>(b >> fraction_bits) & ((1 << exponent_bits) - 1);
      const int fraction = static_cast<int>(b) & ((1 << fraction_bits) - 1);
      double expected = exponent == 0 ? std::ldexp(fraction, 1 - bias - fraction_bits)
                                      : std::ldexp(fraction + (1 << fraction_bits), exponent - bias - fraction_bits);
      if (exponent == (1 << exponent_bits) - 1)
        expected = fraction == 0 ? std::numeric_limits<double>::infinity() : std::numeric_limits<double>::quiet_NaN();
      if ((b & 0x8000u) != 0) expected = -expected;
      if (std::isnan(expected)) {
        ASSERT_TRUE(std::isnan(floats[b]) && std::isnan(doubles[b])) << name << " " << b;
      } else {
        ASSERT_EQ(floats[b], expected) << name << " " << b;
        ASSERT_EQ(doubles[b], expected) << name << " " << b;
        ASSERT_EQ(std::signbit(floats[b]), std::signbit(expected)) << name << " " << b;
      }
    }
  };
  check("h", 5, 10);
  check("b", 8, 7);
}

TEST(Safetensors, AFileOfAnotherProgram) {
  // No checksum, spaces, no metadata or metadata last, tensors that are not aligned.
  const std::string data = std::string("\x07", 1) + raw(std::vector<float>{2.5f, -1.0f});
  const std::string header =
      "{ \"w\" : "
      "{\"dtype\":\"F32\",\"data_offsets\":[1,9],\"shape\":[2]},\n\"b\":{\"shape\":[1],\"dtype\":\"U8\",\"data_"
      "offsets\":[0,1]}, "
      "\"__metadata__\":{\"format\":\"pt\"}}   ";
  const std::string content = file_of(header, data);
  const SafetensorsReader reader = reader_of(content);
  EXPECT_EQ(values_of<float>(reader, "w", {2}), (std::vector<float>{2.5f, -1.0f}));
  EXPECT_EQ(values_of<double>(reader, "w", {2}), (std::vector<double>{2.5, -1.0}));
  EXPECT_EQ(reader.metadata().at("format"), "pt");
  const std::string empty = file_of("{}", "");
  EXPECT_TRUE(reader_of(empty).tensors().empty());
}

TEST(Safetensors, WhatIsAskedForMustBeThere) {
  const TempFolder folder;
  const Sample sample;
  sample.write(folder.path("model"));
  const SafetensorsReader reader(folder.path("model"));
  std::vector<float> floats(6);
  std::vector<int32_t> ints(2);
  const std::vector<int64_t> shape = {2, 3}, turned = {3, 2}, flat = {6}, two = {2};
  const auto read = [&](const std::string& name, const std::vector<int64_t>& s) {
    return [&, name] { reader.read<float>(name, s, floats); };
  };
  EXPECT_TRUE(fails(ErrorKind::kUsage, {folder.path("model"), "'layer.weights' is missing", "'layer.weight'"},
                    read("layer.weights", shape)));
  EXPECT_TRUE(fails(ErrorKind::kUsage, {folder.path("model"), "'layer.weight'", "expected shape [3,2], got [2,3]"},
                    read("layer.weight", turned)));
  EXPECT_TRUE(fails(ErrorKind::kUsage, {"expected shape [6], got [2,3]"}, read("layer.weight", flat)));
  EXPECT_TRUE(fails(ErrorKind::kUsage,
                    {folder.path("model"), "'steps'", "expected dtype F32, F64, BF16 or F16, got I64"},
                    [&] { reader.read<float>("steps", two, std::span(floats).first(2)); }));
  EXPECT_TRUE(fails(ErrorKind::kUsage, {"'layer.weight'", "expected dtype I32 or I64, got F32"}, [&] {
    std::vector<int32_t> six(6);
    reader.read<int32_t>("layer.weight", shape, six);
  }));
  EXPECT_TRUE(fails(ErrorKind::kUsage, {folder.path("model"), "'steps'", "1099511627776 does not fit"},
                    [&] { reader.read<int32_t>("steps", two, ints); }));
  EXPECT_TRUE(fails(ErrorKind::kInternal, {"'layer.weight'"},
                    [&] { reader.read<float>("layer.weight", shape, std::span(floats).first(5)); }));
}

TEST(Safetensors, EveryTruncationIsAnError) {
  const TempFolder folder;
  const std::string content = Sample().write(folder.path("file"));
  for (size_t size = 0; size < content.size(); ++size) {
    const std::string part = content.substr(0, size);
    EXPECT_TRUE(fails(ErrorKind::kUsage, {"'model'"}, [&] { reader_of(part); }))
        << size << " of " << content.size() << " bytes";
  }
  write_file_atomic(folder.path("empty"), "");
  EXPECT_TRUE(fails(ErrorKind::kUsage, {folder.path("empty"), "0 bytes", "empty"},
                    [&] { SafetensorsReader{folder.path("empty")}; }));
  EXPECT_TRUE(fails(ErrorKind::kUsage, {"bytes follow the last tensor"}, [&] { reader_of(content + "x"); }));
}

TEST(Safetensors, EveryFlippedBitIsAnErrorOrHarmless) {
  const TempFolder folder;
  const Sample sample;
  std::string content = sample.write(folder.path("file"));
  const size_t header_end = content.find("}}") + 2;
  size_t harmless = 0;
  for (size_t bit = 0; bit < content.size() * 8; ++bit) {
    const auto flip = [&] { content[bit / 8] = static_cast<char>(content[bit / 8] ^ (1 << bit % 8)); };
    flip();
    const auto error = caught([&] {
      // A flip in the checksum's own name hides the checksum; then all else must be as it was.
      EXPECT_TRUE(sample.holds(reader_of(content))) << "bit " << bit << " changed the content unseen";
      EXPECT_LT(bit / 8, header_end) << "bit " << bit;
      ++harmless;
    });
    if (error) {
      EXPECT_EQ(error->kind(), ErrorKind::kUsage) << error->what();
    }
    flip();
  }
  EXPECT_LT(harmless, 19u * 8) << "more than the checksum's name can be changed unseen";
}

// Both headers are well-formed and all bytes of the tensors are as they were.
TEST(Safetensors, NamesThatWereExchangedAreRefused) {
  const TempFolder folder;
  const std::vector<float> a = {1, 2}, b = {3, 4};
  SafetensorsWriter writer;
  writer.add<float>("layer.q", {2}, a);
  writer.add<float>("layer.k", {2}, b);
  writer.write(folder.path("file"));
  std::string content = read_file(folder.path("file"));
  EXPECT_EQ(values_of<float>(reader_of(content), "layer.q", {2}), a);
  content[content.find("layer.q") + 6] = '?';
  content[content.find("layer.k") + 6] = 'q';
  content[content.find("layer.?") + 6] = 'k';
  EXPECT_TRUE(fails(ErrorKind::kUsage, {"checksum", "the file is damaged"}, [&] { reader_of(content); }));
}

TEST(Safetensors, HostileHeaders) {
  struct Case {
    const char* header;
    size_t data;
    const char* words;
  };
  const std::vector<Case> cases = {
      {"", 0, "not valid JSON"},
      {"[]", 0, "must be a JSON object"},
      {"7", 0, "must be a JSON object"},
      {"null", 0, "must be a JSON object"},
      {"{} {}", 0, "not valid JSON"},
      {"{\"a\":1}", 0, "got a number"},
      {"{\"a\":[]}", 0, "got an array"},
      {"{\"a\":{}}", 0, "one is missing"},
      {R"({"a":{"dtype":"U8","shape":[1]}})", 1, "one is missing"},
      {R"({"a":{"dtype":"U9","shape":[1],"data_offsets":[0,1]}})", 1, "unknown dtype 'U9'"},
      {R"({"a":{"dtype":7,"shape":[1],"data_offsets":[0,1]}})", 1, "expected text (dtype)"},
      {R"({"a":{"dtype":"U8","shape":1,"data_offsets":[0,1]}})", 1, "expected an array (shape)"},
      {R"({"a":{"dtype":"U8","shape":[[1]],"data_offsets":[0,1]}})", 1, "expected whole numbers >= 0 (shape)"},
      {R"({"a":{"dtype":"U8","shape":["1"],"data_offsets":[0,1]}})", 1, "expected whole numbers >= 0 (shape)"},
      {R"({"a":{"dtype":"U8","shape":[-1],"data_offsets":[0,1]}})", 1, "a negative number"},
      {R"({"a":{"dtype":"U8","shape":[1.0],"data_offsets":[0,1]}})", 1, "not whole or too large"},
      {R"({"a":{"dtype":"U8","shape":[1e0],"data_offsets":[0,1]}})", 1, "not whole or too large"},
      {R"({"a":{"dtype":"U8","shape":[99999999999999999999999],"data_offsets":[0,1]}})", 1, "not whole or too large"},
      {R"({"a":{"dtype":"U8","shape":[9223372036854775808],"data_offsets":[0,1]}})", 1, "too large"},
      {R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0]}})", 1, "expected [begin, end]"},
      {R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1,2]}})", 1, "expected [begin, end]"},
      {R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[1,0]}})", 1, "lie outside"},
      {R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0,2]}})", 1, "lie outside the 1 bytes"},
      {R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[18446744073709551615,18446744073709551615]}})", 1,
       "lie outside"},
      {R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[18446744073709551615,0]}})", 1, "lie outside"},
      {R"({"a":{"dtype":"U8","shape":[2],"data_offsets":[0,1]}})", 1, "does not take the 1 bytes"},
      {R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[0,1]}})", 1, "does not take the 1 bytes"},
      {R"({"a":{"dtype":"U8","shape":[],"data_offsets":[0,0]}})", 0, "does not take the 0 bytes"},
      // Products that are small again modulo 2^64: 2^32 * 2^32, and 2^62 elements of 4 bytes.
      {R"({"a":{"dtype":"U8","shape":[4294967296,4294967296],"data_offsets":[0,0]}})", 0, "does not take the 0 bytes"},
      {R"({"a":{"dtype":"F32","shape":[4611686018427387904],"data_offsets":[0,0]}})", 0, "does not take the 0 bytes"},
      {R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1],"x":1}})", 1, "got 'x'"},
      {R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1],"dtype":"U8"}})", 1, "'dtype' is there twice"},
      {R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}})",
       1, "twice"},
      {R"({"__metadata__":{},"__metadata__":{}})", 0, "twice"},
      {R"({"__metadata__":{"a":"1","a":"2"}})", 0, "twice"},
      {R"({"__metadata__":{"a":1}})", 0, "metadata values are text"},
      {R"({"__metadata__":{"a":{}}})", 0, "got an object"},
      {R"({"__metadata__":[]})", 0, "got an array"},
      {R"({"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]},"b":{"dtype":"U8","shape":[2],"data_offsets":[1,3]}})",
       3, "overlaps and holes"},
      {R"({"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]},"b":{"dtype":"U8","shape":[2],"data_offsets":[0,2]}})",
       2, "overlaps and holes"},
      {R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"b":{"dtype":"U8","shape":[1],"data_offsets":[2,3]}})",
       3, "overlaps and holes"},
      {R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}})", 2, "1 bytes follow the last tensor"},
      {R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]})", 1, "not valid JSON"},
      {"{\"\xff\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1]}}", 1, "not valid JSON"},
      {R"({"__metadata__":{"fastweight_checksum":"0000000000000000"}})", 0, "checksum"},
  };
  for (const Case& c : cases) {
    const std::string content = file_of(c.header, std::string(c.data, 'x'));
    EXPECT_TRUE(fails(ErrorKind::kUsage, {"'model'", c.words}, [&] { reader_of(content); })) << c.header;
  }
}

TEST(Safetensors, ChecksumsOfAnotherShapeAreLeftAlone) {
  for (const char* value : {"", "0", "\\u0030000000000000000", "00000000000000000000"}) {
    const std::string content =
        file_of(std::string(R"({"__metadata__":{"fastweight_checksum":")") + value + "\"}}", "");
    EXPECT_EQ(caught([&] { reader_of(content); }), std::nullopt) << value;
  }
}

TEST(Safetensors, HeaderLengthsThatCannotBe) {
  for (const uint64_t length : {uint64_t{3}, uint64_t{1} << 20, uint64_t{1} << 31, uint64_t{1} << 63,
                                std::numeric_limits<uint64_t>::max(), std::numeric_limits<uint64_t>::max() - 7}) {
    const std::string content = raw(std::vector<uint64_t>{length}) + "{}";
    EXPECT_TRUE(fails(ErrorKind::kUsage, {"'model'", std::to_string(length)}, [&] { reader_of(content); })) << length;
  }
}

TEST(Safetensors, DepthRankAndNamesHaveLimits) {
  const std::string deep = file_of(std::string(1000000, '['), "");
  EXPECT_TRUE(fails(ErrorKind::kUsage, {"must be a JSON object"}, [&] { reader_of(deep); }));
  std::string nested;
  for (int i = 0; i < 100000; ++i) nested += "{\"a\":";
  const std::string objects = file_of(nested, "");
  EXPECT_TRUE(fails(ErrorKind::kUsage, {"'a'"}, [&] { reader_of(objects); }));
  std::string ones = "1";
  for (int i = 0; i < 40; ++i) ones += ",1";
  const std::string rank = file_of(R"({"a":{"dtype":"U8","data_offsets":[0,1],"shape":[)" + ones + "]}}", "x");
  EXPECT_TRUE(fails(ErrorKind::kUsage, {"at most 32 dimensions"}, [&] { reader_of(rank); }));
  // A message stays short and printable whatever the name is.
  const std::string name = file_of("{\"" + std::string(100000, 'n') + "\\u001b\":7}", "");
  const auto error = caught([&] { reader_of(name); });
  ASSERT_TRUE(error);
  EXPECT_LT(std::strlen(error->what()), 300u);
  const std::string escape = file_of("{\"\\u001b[2J\":7}", "");
  EXPECT_EQ(std::string(caught([&] { reader_of(escape); })->what()).find('\x1b'), std::string::npos);
}

TEST(Safetensors, AFullDiskLeavesTheOldFile) {
  const TempFolder folder;
  const Sample sample;
  sample.write(folder.path("file"));
  const std::vector<float> large(100000, 1.0f);
  SafetensorsWriter writer;
  writer.add<float>("large", {100000}, large);
  {
    const FileSizeLimit limit(8192);
    EXPECT_TRUE(
        fails(ErrorKind::kIo, {folder.path("file"), "File too large"}, [&] { writer.write(folder.path("file")); }));
  }
  EXPECT_TRUE(sample.holds(SafetensorsReader(folder.path("file"))));
  EXPECT_EQ(folder.files(), 1u);
  EXPECT_TRUE(fails(ErrorKind::kIo, {"/dev/full", "No space left"}, [&] { writer.write("/dev/full"); }));
}

TEST(Safetensors, TheSameContentIsTheSameFile) {
  const TempFolder folder;
  const std::string first = Sample().write(folder.path("a"));
  EXPECT_EQ(Sample().write(folder.path("b")), first);
  SafetensorsWriter empty;
  empty.write(folder.path("empty"));
  EXPECT_TRUE(SafetensorsReader(folder.path("empty")).tensors().empty());
}

TEST(Safetensors, WhatTheWriterRefuses) {
  const std::vector<float> values(6);
  SafetensorsWriter writer;
  writer.add<float>("a", {6}, values);
  EXPECT_TRUE(fails(ErrorKind::kInternal, {"'a'", "taken"}, [&] { writer.add<float>("a", {6}, values); }));
  EXPECT_TRUE(fails(ErrorKind::kInternal, {"__metadata__"}, [&] { writer.add<float>("__metadata__", {6}, values); }));
  EXPECT_TRUE(
      fails(ErrorKind::kInternal, {"'b'", "needs 20 bytes, got 24"}, [&] { writer.add<float>("b", {5}, values); }));
  EXPECT_TRUE(
      fails(ErrorKind::kInternal, {"F33"}, [&] { writer.add("b", "F33", {6}, std::as_bytes(std::span(values))); }));
  writer.set_metadata("text", "\xff");
  EXPECT_TRUE(fails(ErrorKind::kUsage, {"/tmp/never", "UTF-8"}, [&] { writer.write("/tmp/never"); }));
}

TEST(Safetensors, ReaderOfAFolderOrAMissingFile) {
  const TempFolder folder;
  EXPECT_TRUE(fails(ErrorKind::kUsage, {folder.path(), "folder"}, [&] { SafetensorsReader{folder.path()}; }));
  EXPECT_TRUE(
      fails(ErrorKind::kUsage, {"missing", "No such file"}, [&] { SafetensorsReader{folder.path("missing")}; }));
}

}  // namespace
}  // namespace fw
