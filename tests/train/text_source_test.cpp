// Texts as streams: plain, packed, JSON lines; what is damaged is named; memory stays bounded.
#include "train/text_source.h"

#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <zlib.h>
#include <zstd.h>

#include <cstdio>
#include <vector>

#include "base/base_support.h"
#include "base/file.h"
#include "train/training_support.h"

namespace fw {
namespace {

using testing::fails;
using testing::TempFolder;
using Texts = std::vector<std::string>;

std::string rest_of(TextSource& source, size_t piece) {
  std::string text, buffer(piece, '\0');
  while (const size_t n = source.read(buffer)) text.append(buffer, 0, n);
  return text;
}

Texts texts_of(TextSource& source, size_t piece = 1000) {
  Texts texts;
  while (source.next()) texts.push_back(rest_of(source, piece));
  return texts;
}

std::string gzip(std::string_view text) {
  z_stream stream = {};
  if (deflateInit2(&stream, 6, Z_DEFLATED, MAX_WBITS + 16, 8, Z_DEFAULT_STRATEGY) != Z_OK) throw std::bad_alloc();
  std::string packed(deflateBound(&stream, text.size()) + 64, '\0');
  stream.next_in = reinterpret_cast<Bytef*>(const_cast<char*>(text.data()));
  stream.avail_in = static_cast<uInt>(text.size());
  stream.next_out = reinterpret_cast<Bytef*>(packed.data());
  stream.avail_out = static_cast<uInt>(packed.size());
  deflate(&stream, Z_FINISH);
  packed.resize(stream.total_out);
  deflateEnd(&stream);
  return packed;
}

std::string zstd(std::string_view text) {
  ZSTD_CCtx* context = ZSTD_createCCtx();
  ZSTD_CCtx_setParameter(context, ZSTD_c_checksumFlag, 1);
  std::string packed(ZSTD_compressBound(text.size()), '\0');
  packed.resize(ZSTD_compress2(context, packed.data(), packed.size(), text.data(), text.size()));
  ZSTD_freeCCtx(context);
  return packed;
}

class TextSourceTest : public ::testing::Test {
 protected:
  std::string file(const std::string& name, std::string_view content) {
    write_file_atomic(folder_.path(name), content);
    return folder_.path(name);
  }
  Texts read(const std::string& path, const std::string& field = "text", size_t piece = 1000) {
    return texts_of(*open_text(path, field), piece);
  }

  TempFolder folder_;
  const std::string long_text_ = testing::sample_text(300, 5) + std::string("\0\xff\xfe", 3);
};

TEST_F(TextSourceTest, PlainAndPackedAreTheSameBytes) {
  ASSERT_GT(long_text_.size(), 10000u);
  const std::string half = long_text_.substr(0, 5000), other = long_text_.substr(5000);
  for (const std::string& path : {file("plain", long_text_), file("a.gz", gzip(long_text_)),
                                  file("b.zst", zstd(long_text_)), file("named.anyhow", gzip(long_text_)),
                                  file("members.gz", gzip(half) + gzip("") + gzip(other) + std::string(512, '\0')),
                                  file("frames.zst", zstd(half) + zstd("") + zstd(other))}) {
    for (const size_t piece : {1, 1000, 1 << 20})
      EXPECT_TRUE(read(path, "text", piece) == Texts{long_text_}) << path << ", pieces of " << piece;
  }
  const auto memory = text_in_memory(long_text_);
  EXPECT_TRUE(texts_of(*memory) == Texts{long_text_});
  EXPECT_EQ(read(file("empty.gz", gzip(""))), Texts{""});
  EXPECT_EQ(read(file("empty", "")), Texts{""});
}

TEST_F(TextSourceTest, PackedFilesThatAreDamagedAreNamed) {
  for (const auto& [name, good] :
       {std::pair<std::string, std::string>{"x.gz", gzip(long_text_)}, {"x.zst", zstd(long_text_)}}) {
    for (const size_t size : {good.size() - 1, good.size() / 2, size_t{5}}) {
      const std::string path = file(name, good.substr(0, size));
      EXPECT_TRUE(fails(ErrorKind::kUsage, {path, "damaged"}, [&] { read(path); })) << name << " cut at " << size;
    }
    std::string flipped = good;
    flipped[good.size() / 2] = static_cast<char>(flipped[good.size() / 2] ^ 16);
    const std::string path = file(name, flipped);
    EXPECT_TRUE(fails(ErrorKind::kUsage, {path, "damaged"}, [&] { read(path); })) << name;
    const std::string longer = file(name, good + "something else");
    EXPECT_TRUE(fails(ErrorKind::kUsage, {longer, "damaged"}, [&] { read(longer); })) << name;
    const std::string text = file(name, "not packed");
    EXPECT_TRUE(fails(ErrorKind::kUsage, {text, "something else"}, [&] { read(text); })) << name;
  }
}

TEST_F(TextSourceTest, JsonLinesAreOneTextEach) {
  const std::string lines =
      "{\"text\": \"one\\nline\", \"id\": 7}\n\n  {\"meta\": {\"text\": [1, {\"text\": \"no\"}]}, \"text\": \"\xc3\xa4 "
      "\\u00e4\"}\r\n{\"text\": \"\"}\n"
      "{\"body\": \"b\", \"text\": \"last\"}";
  const Texts expected{"one\nline", "\xc3\xa4 \xc3\xa4", "", "last"};
  EXPECT_EQ(read(file("a.jsonl", lines)), expected);
  EXPECT_EQ(read(file("a.ndjson", lines + "\n")), expected);
  EXPECT_EQ(read(file("a.jsonl.gz", gzip(lines)), "text", 1), expected);
  EXPECT_EQ(read(file("a.jsonl.zst", zstd(lines))), expected);
  EXPECT_EQ(read(file("b.jsonl", "{\"body\": \"x\", \"text\": 3}\n"), "body"), Texts{"x"});
  // A text that is passed over leaves the next where it should be.
  const auto source = open_text(file("c.jsonl", lines));
  ASSERT_TRUE(source->next() && source->next() && source->next() && source->next());
  EXPECT_EQ(rest_of(*source, 100), "last");
  EXPECT_FALSE(source->next());
}

TEST_F(TextSourceTest, JsonLinesThatAreNoneNameFileAndLine) {
  const auto error = [&](const std::string& line, std::initializer_list<std::string_view> words) {
    const std::string path = file("bad.jsonl", "{\"text\": \"good\"}\n\n" + line + "\n");
    EXPECT_TRUE(fails(ErrorKind::kUsage, {path + ":3: "}, [&] { read(path); })) << line.substr(0, 50);
    EXPECT_TRUE(fails(ErrorKind::kUsage, words, [&] { read(path); })) << line.substr(0, 50);
  };
  error("{\"text\": \"cut", {"not valid JSON", "column"});
  error("{\"text\": \"a\"} {}", {"not valid JSON"});
  error("plain words", {"not valid JSON"});
  error("{\"text\": \"\xff\"}", {"not valid JSON"});
  error("{\"text\": 3}", {"\"text\" is not a string", "--field"});
  error("{\"text\": {\"text\": \"x\"}}", {"\"text\" is not a string", "--field"});
  error("{\"body\": \"x\"}", {"no key \"text\"", "--field"});
  error("[\"text\"]", {"expected a JSON object"});
  error("\"text\"", {"expected a JSON object"});
  // Nothing recurses, and the message does not repeat the line.
  error(std::string(1000000, '['), {"not valid JSON"});
  error("{\"text\": \"" + std::string(1000000, 'x'), {"not valid JSON"});
  const auto message = testing::caught([&] { read(folder_.path("bad.jsonl")); });
  ASSERT_TRUE(message);
  EXPECT_LT(std::string(message->what()).size(), folder_.path("bad.jsonl").size() + 300);
}

int64_t peak_kib() {
  rusage usage = {};
  getrusage(RUSAGE_SELF, &usage);
  return usage.ru_maxrss;
}

// 512 MiB of zeros are half a megabyte packed; read as a text they pass through, and as a line of JSON they are
// refused.
TEST_F(TextSourceTest, WhatUnpacksToMuchTakesNoMemory) {
  std::string member = gzip(std::string(size_t{16} << 20, ' '));
  std::string bomb;
  for (int i = 0; i < 32; ++i) bomb += member;
  const int64_t before = peak_kib();
  const auto source = open_text(file("bomb.gz", bomb));
  size_t total = 0;
  std::string piece(1 << 16, '\0');
  ASSERT_TRUE(source->next());
  while (const size_t n = source->read(piece)) total += n;
  EXPECT_EQ(total, size_t{512} << 20);
  EXPECT_LT(peak_kib() - before, 64 * 1024);
  const std::string line = file("bomb.jsonl.gz", bomb);
  EXPECT_TRUE(fails(ErrorKind::kUsage, {line + ":1", "256 MiB"}, [&] { read(line); }));
}

TEST_F(TextSourceTest, FilesThatAreNoText) {
  EXPECT_TRUE(fails(ErrorKind::kUsage, {"missing", "No such file"}, [&] { open_text(folder_.path("missing")); }));
  EXPECT_TRUE(fails(ErrorKind::kUsage, {"folder"}, [&] { open_text(folder_.path("")); }));
  EXPECT_TRUE(fails(ErrorKind::kUsage, {"regular file"}, [&] { open_text("/dev/zero"); }));
  ASSERT_EQ(::mkfifo(folder_.path("pipe").c_str(), 0600), 0);
  EXPECT_TRUE(fails(ErrorKind::kUsage, {"pipe", "regular file"}, [&] { open_text(folder_.path("pipe")); }));
  const std::string parquet = file("x.parquet", "PAR1 and so on");
  EXPECT_TRUE(fails(ErrorKind::kUsage, {parquet, "Parquet is not read", "to_json"}, [&] { open_text(parquet); }));
}

TEST_F(TextSourceTest, PatternsAreFilesInOrder) {
  for (const char* name : {"b.txt", "a.txt", "c.text", "odd[1].txt"}) file(name, "x");
  const auto in_folder = [&](Texts names) {
    for (std::string& name : names) name = folder_.path(name);
    return names;
  };
  EXPECT_EQ(expand_glob(folder_.path("*.txt")), in_folder({"a.txt", "b.txt", "odd[1].txt"}));
  EXPECT_EQ(expand_glob(folder_.path("?.t[e]xt")), in_folder({"c.text"}));
  EXPECT_EQ(expand_glob(folder_.path("odd[1].txt")), in_folder({"odd[1].txt"})) << "a file of this name is there";
  EXPECT_EQ(expand_glob(folder_.path("missing")), in_folder({"missing"}));
  EXPECT_TRUE(fails(ErrorKind::kUsage, {"*.none", "no file matches"}, [&] { expand_glob(folder_.path("*.none")); }));
}

TEST_F(TextSourceTest, LinesThatAreNoTextAreLeftOutAndNamed) {
  const std::string path = file("odd.jsonl",
                                "{\"text\": \"one\"}\n{\"text\": null}\n{\"other\": \"x\"}\n{\"text\": \"half \\ud83d "
                                "of a pair\"}\n{\"text\": \"two\"}\n");
  LineRules lines;
  std::vector<std::string> bad;
  lines.on_bad = [&bad](const std::string& what) { bad.push_back(what); };
  EXPECT_EQ(texts_of(*open_text(path, lines), 1000), (Texts{"one", "two"}));
  ASSERT_EQ(bad.size(), 3u);
  EXPECT_NE(bad[0].find("odd.jsonl:2: \"text\" is not a string"), std::string::npos) << bad[0];
  EXPECT_NE(bad[1].find("odd.jsonl:3: no key"), std::string::npos) << bad[1];
  EXPECT_NE(bad[2].find("odd.jsonl:4: not valid JSON"), std::string::npos) << bad[2];
  EXPECT_TRUE(fails(ErrorKind::kUsage, {"odd.jsonl:2"}, [&] { texts_of(*open_text(path), 1000); }));
}

TEST_F(TextSourceTest, NumbersAsPythonWritesThem) {
  EXPECT_EQ(
      read(file("nan.jsonl",
                "{\"text\": \"abc\", \"score\": NaN}\n{\"a\": [-Infinity, 1e999, Infinity], \"text\": \"NaN\"}\n")),
      (Texts{"abc", "NaN"}));
  EXPECT_TRUE(
      fails(ErrorKind::kUsage, {"f.jsonl:1", "not a string"}, [&] { read(file("f.jsonl", "{\"text\": NaN}\n")); }));
  EXPECT_TRUE(fails(ErrorKind::kUsage, {"f.jsonl:1", "not valid JSON"},
                    [&] { read(file("f.jsonl", "{\"text\": \"a\", \"b\": nan}\n")); }));
}

TEST_F(TextSourceTest, ByteOrderMarks) {
  EXPECT_EQ(read(file("bom.txt", "\xef\xbb\xbfhello\xef\xbb\xbf")), (Texts{"hello\xef\xbb\xbf"})) << "only the first";
  EXPECT_EQ(read(file("bom.jsonl", "\xef\xbb\xbf{\"text\": \"a\"}\n")), (Texts{"a"}));
  EXPECT_EQ(read(file("bom.txt", "\xef\xbb\xbfhello"), "text", 1), (Texts{"hello"}));
  EXPECT_EQ(read(file("short.txt", "\xef\xbb")), (Texts{"\xef\xbb"}));
  EXPECT_TRUE(
      fails(ErrorKind::kUsage, {"u16", "UTF-16", "iconv"}, [&] { read(file("u16", std::string("\xff\xfeh\0", 4))); }));
  EXPECT_TRUE(fails(ErrorKind::kUsage, {"u16", "UTF-16"}, [&] { read(file("u16", std::string("\xfe\xff\0h", 4))); }));
  EXPECT_TRUE(
      fails(ErrorKind::kUsage, {"u32", "UTF-32"}, [&] { read(file("u32", std::string("\xff\xfe\0\0h\0\0\0", 8))); }));
}

// pzstd writes frames that are skipped; --long asks for more memory than a reader gives.
TEST_F(TextSourceTest, FramesOfZstd) {
  const std::string skipped = std::string("\x50\x2a\x4d\x18\4\0\0\0", 8) + "abcd";
  EXPECT_EQ(read(file("p.zst", skipped + zstd("one ") + skipped + zstd("two"))), (Texts{"one two"}));
  const auto with_window = [](int log) {
    return std::string("\x28\xb5\x2f\xfd\0", 5) + static_cast<char>((log - 10) << 3) + std::string("\x11\0\0hi", 5);
  };
  EXPECT_EQ(read(file("27.zst", with_window(27))), (Texts{"hi"}));
  EXPECT_TRUE(
      fails(ErrorKind::kUsage, {"28.zst", "128 MiB", "--long"}, [&] { read(file("28.zst", with_window(28))); }));
}

TEST_F(TextSourceTest, OtherPackingsAreNamed) {
  EXPECT_TRUE(
      fails(ErrorKind::kUsage, {"a.xz", "xz -dc"}, [&] { read(file("a.xz", std::string("\xfd\x37zXZ\0rest", 10))); }));
  EXPECT_TRUE(fails(ErrorKind::kUsage, {"a.bz2", "bzip2 -dc"}, [&] { read(file("a.bz2", "BZh91AY&SYrest")); }));
  EXPECT_TRUE(fails(ErrorKind::kUsage, {"a.bz2", "bzip2 -dc"}, [&] { read(file("a.bz2", "BZh41AY&SYrest")); }));
  EXPECT_EQ(read(file("text", "BZhe is a word")), (Texts{"BZhe is a word"}));
}

}  // namespace
}  // namespace fw
