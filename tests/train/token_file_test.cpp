#include "train/token_file.h"

#include <gtest/gtest.h>

#include <cstring>
#include <numeric>

#include "base/base_support.h"
#include "base/checksum.h"
#include "train/token_writer.h"
#include "train/training_support.h"

namespace fw {
namespace {

using testing::bytes_of;
using testing::caught;
using testing::fails;
using testing::FileSizeLimit;
using testing::TempFolder;

// Ids that a text of decimal numbers names: any vocabulary without training one.
class NumberTokenizer final : public Tokenizer {
 public:
  explicit NumberTokenizer(int32_t vocab_size) : vocab_size_(vocab_size) {}
  int32_t vocab_size() const override { return vocab_size_; }
  std::vector<int32_t> encode(std::string_view text) const override {
    std::vector<int32_t> ids;
    for (size_t i = 0; i < text.size();) {
      const size_t end = std::min(text.find(' ', i), text.size());
      ids.push_back(std::stoi(std::string(text.substr(i, end - i))));
      i = end + 1;
    }
    return ids;
  }
  std::string decode(const std::vector<int32_t>&) const override { return ""; }
  std::string piece(int32_t) const override { return ""; }
  std::string type() const override { return "numbers"; }
  uint64_t checksum() const override { return tokenizer_checksum(type(), std::to_string(vocab_size_)); }
  void save(const std::string&) const override {}

 private:
  int32_t vocab_size_;
};

std::vector<int32_t> ids_of(const TokenFile& file, int64_t begin, int64_t end) {
  std::vector<int32_t> ids(static_cast<size_t>(end - begin));
  file.read(begin, ids);
  return ids;
}

std::vector<std::string> documents_of(const TokenFile& file) {
  std::vector<std::string> documents;
  for (int64_t i = 0; i < file.documents(); ++i)
    documents.push_back(byte_tokenizer()->decode(ids_of(file, file.document_begin(i), file.document_begin(i + 1))));
  return documents;
}

std::vector<std::string> split(const std::vector<std::string>& texts, const std::string& separator) {
  const TempFolder folder;
  const TokenFileStats stats = write_token_file(texts, separator, *byte_tokenizer(), folder.path("tokens"));
  const TokenFile file(folder.path("tokens"));
  EXPECT_EQ(stats.documents, file.documents());
  EXPECT_EQ(stats.tokens, file.tokens());
  EXPECT_EQ(stats.bytes, file.text_bytes());
  // Every token but the newline before a document is a byte of the text.
  EXPECT_EQ(stats.bytes, separator.empty() ? stats.tokens : stats.tokens - stats.documents);
  return documents_of(file);
}

using Documents = std::vector<std::string>;

TEST(TokenFile, WithoutSeparatorATextIsOneDocumentAsItIs) {
  EXPECT_EQ(split({"a\n%\nb"}, ""), (Documents{"a\n%\nb"}));
  EXPECT_EQ(split({"a\n", "", "b"}, ""), (Documents{"a\n", "b"}));
}

TEST(TokenFile, DocumentsBeginWithANewlineAndEndWithTheSeparator) {
  EXPECT_EQ(split({"one\n%\ntwo\nlines\n%\n"}, "%"), (Documents{"\none\n%\n", "\ntwo\nlines\n%\n"}));
  EXPECT_EQ(split({"one\n%\ntwo"}, "%"), (Documents{"\none\n%\n", "\ntwo\n%\n"})) << "the last line may lack its end";
  EXPECT_EQ(split({"one\n%"}, "%"), (Documents{"\none\n%\n"}));
  EXPECT_EQ(split({"%\n%\none\n%\n%\n\n%\n"}, "%"), (Documents{"\none\n%\n", "\n\n%\n"}))
      << "documents without text are left out";
  EXPECT_EQ(split({"100%\n%%\n %\n% \n"}, "%"), (Documents{"\n100%\n%%\n %\n% \n%\n"}))
      << "only a line that is the separator separates";
  EXPECT_EQ(split({"one\r\n%\r\ntwo\r\n"}, "%"), (Documents{"\none\r\n%\n", "\ntwo\r\n%\n"}));
  EXPECT_EQ(split({"one\n", "two\n%\nthree\n"}, "%"), (Documents{"\none\n%\n", "\ntwo\n%\n", "\nthree\n%\n"}))
      << "no document spans two texts";
  EXPECT_EQ(split({"a\n<end>\nb\n"}, "<end>"), (Documents{"\na\n<end>\n", "\nb\n<end>\n"}));
}

TEST(TokenFile, NothingToWrite) {
  const TempFolder folder;
  const std::string path = folder.path("tokens");
  for (const char* text : {"", "%\n", "%\n%\n%"}) {
    EXPECT_TRUE(fails(ErrorKind::kUsage, {path, "no text"}, [&] {
      write_token_file(text, "%", *byte_tokenizer(), path);
    })) << text;
  }
  EXPECT_TRUE(fails(ErrorKind::kUsage, {path, "no text"}, [&] { write_token_file("", "", *byte_tokenizer(), path); }));
  EXPECT_TRUE(fails(ErrorKind::kUsage, {"separator", "one line"},
                    [&] { write_token_file("a", "%\n", *byte_tokenizer(), path); }));
  EXPECT_FALSE(file_exists(path));
}

TEST(TokenFile, WidthsOfIds) {
  const TempFolder folder;
  const std::string path = folder.path("tokens");
  struct Case {
    int32_t vocab_size;
    // header, 5 ids, padding, 2 offsets; after them the trailer, and the exception of the last token, which alone has
    // bytes
    uint64_t file_bytes;
  };
  for (const Case& c : {Case{10, 64 + 8 + 16}, Case{256, 64 + 8 + 16}, Case{257, 64 + 16 + 16},
                        Case{65536, 64 + 16 + 16}, Case{65537, 64 + 24 + 16}, Case{1 << 30, 64 + 24 + 16}}) {
    const int32_t last = c.vocab_size - 1;
    write_token_file("0 1 " + std::to_string(last) + " 2 " + std::to_string(last / 2), "",
                     NumberTokenizer(c.vocab_size), path);
    const TokenFile file(path);
    EXPECT_EQ(file.vocab_size(), c.vocab_size);
    EXPECT_EQ(read_file(path).size(), c.file_bytes + 24 + 16) << c.vocab_size;
    EXPECT_EQ(ids_of(file, 0, 5), (std::vector<int32_t>{0, 1, last, 2, last / 2}));
    EXPECT_EQ(ids_of(file, 2, 3), (std::vector<int32_t>{last}));
    EXPECT_TRUE(ids_of(file, 5, 5).empty());
  }
}

TEST(TokenFile, DocumentOfEveryToken) {
  const TempFolder folder;
  write_token_file("a\n%\nbcd\n%\n\n%\nefghi\n", "%", *byte_tokenizer(), folder.path("tokens"));
  const TokenFile file(folder.path("tokens"));
  int64_t expected = 0;
  for (int64_t t = 0; t < file.tokens(); ++t) {
    while (t >= file.document_begin(expected + 1)) ++expected;
    EXPECT_EQ(file.document_of(t), expected) << t;
  }
  EXPECT_EQ(file.document_begin(file.documents()), file.tokens());
  EXPECT_TRUE(fails(ErrorKind::kInternal, {"document -1"}, [&] { file.document_begin(-1); }));
  EXPECT_TRUE(fails(ErrorKind::kInternal, {"document"}, [&] { file.document_begin(file.documents() + 1); }));
  EXPECT_TRUE(fails(ErrorKind::kInternal, {"token"}, [&] { file.document_of(file.tokens()); }));
  std::vector<int32_t> two(2);
  EXPECT_TRUE(fails(ErrorKind::kInternal, {"tokens ["}, [&] { file.read(file.tokens() - 1, two); }));
  EXPECT_TRUE(fails(ErrorKind::kInternal, {"tokens ["}, [&] { file.read(-1, two); }));
}

std::string sample_file() {
  const TempFolder folder;
  write_token_file("a\n%\nbcd\n", "%", *byte_tokenizer(), folder.path("tokens"));
  return read_file(folder.path("tokens"));
}

TEST(TokenFile, EveryTruncationAndEveryFlippedBitIsAnError) {
  std::string content = sample_file();
  EXPECT_EQ(documents_of(TokenFile(bytes_of(content), "tokens")), (Documents{"\na\n%\n", "\nbcd\n%\n"}));
  for (size_t size = 0; size < content.size(); ++size) {
    const std::string part = content.substr(0, size);
    EXPECT_TRUE(fails(ErrorKind::kUsage, {"'tokens'"}, [&] { TokenFile(bytes_of(part), "tokens"); })) << size;
  }
  const std::string longer = content + std::string(8, '\0');
  EXPECT_TRUE(fails(ErrorKind::kUsage, {"'tokens'"}, [&] { TokenFile(bytes_of(longer), "tokens"); }));
  for (size_t bit = 0; bit < content.size() * 8; ++bit) {
    const auto flip = [&] { content[bit / 8] = static_cast<char>(content[bit / 8] ^ (1 << bit % 8)); };
    flip();
    EXPECT_TRUE(fails(ErrorKind::kUsage, {"'tokens'"}, [&] { TokenFile(bytes_of(content), "tokens"); }))
        << "bit " << bit;
    flip();
  }
}

// Puts a number into a file and gives it the checksum that fits, as somebody would who means harm.
std::string forged(size_t offset, uint64_t value, size_t bytes = 8) {
  std::string content = sample_file();
  std::memcpy(content.data() + offset, &value, bytes);
  std::memset(content.data() + 48, 0, 8);
  Checksum sum;
  sum.add(content);
  const uint64_t checksum = sum.value();
  std::memcpy(content.data() + 48, &checksum, 8);
  return content;
}

TEST(TokenFile, HostileNumbers) {
  constexpr uint64_t kHuge = uint64_t{1} << 63;
  constexpr size_t kOffsets = 64 + 16;  // 5 + 7 ids of one byte, padded
  struct Case {
    size_t offset;
    uint64_t value;
    size_t bytes;
    const char* words;
  };
  ASSERT_EQ(caught([] { TokenFile(bytes_of(forged(8, 3, 4)), "tokens"); }), std::nullopt)
      << "a forged file with nothing changed";
  constexpr size_t kTrailer = kOffsets + 24;
  for (const Case& c : {Case{kTrailer, 2, 8, "bytes known 2"},
                        Case{kTrailer + 8, ~uint64_t{1}, 8, "end token -2"},
                        Case{kTrailer + 8, 256, 8, "end token 256"},
                        Case{kTrailer + 16, 1, 8, "do not fit"},
                        Case{kTrailer + 16, kHuge, 8, "do not fit"},
                        Case{8, 4, 4, "version 4"},
                        Case{8, 0, 4, "version 0"},
                        Case{8, 1, 4, "do not fit"},
                        Case{8, 2, 4, "do not fit"},
                        Case{12, 0, 4, "ids of 0 bytes"},
                        Case{12, 3, 4, "ids of 3 bytes"},
                        Case{12, 2, 4, "do not fit"},
                        Case{16, 0, 8, "do not fit"},
                        Case{16, kHuge, 8, "do not fit"},
                        Case{16, ~uint64_t{0}, 8, "do not fit"},
                        Case{24, 0, 8, "do not fit"},
                        Case{24, kHuge, 8, "do not fit"},
                        Case{24, 3, 8, "do not fit"},
                        Case{32, 0, 8, "vocabulary of 0"},
                        Case{32, kHuge, 8, "vocabulary"},
                        Case{32, 100, 8, "id of token"},
                        Case{40, kHuge, 8, "bytes of text"},
                        Case{56, 0, 8, "a checksum"},
                        Case{kOffsets, 1, 8, "expected 0"},
                        Case{kOffsets + 8, 0, 8, "document 0"},
                        Case{kOffsets + 8, 13, 8, "document 0"},
                        Case{kOffsets + 8, kHuge, 8, "document 0"},
                        Case{kOffsets + 16, 11, 8, "expected 12"},
                        Case{kOffsets + 16, 5, 8, "document 1"}}) {
    const std::string content = forged(c.offset, c.value, c.bytes);
    EXPECT_TRUE(fails(ErrorKind::kUsage, {"'tokens'", c.words}, [&] { TokenFile(bytes_of(content), "tokens"); }))
        << c.offset << " = " << c.value;
  }
}

// As an earlier program wrote it: the offsets are the end.
TEST(TokenFile, FilesOfVersion2AreRead) {
  std::string content = sample_file();
  content.resize(content.size() - 24);
  const uint32_t version = 2;
  std::memcpy(content.data() + 8, &version, 4);
  std::memset(content.data() + 48, 0, 8);
  Checksum sum;
  sum.add(content);
  const uint64_t checksum = sum.value();
  std::memcpy(content.data() + 48, &checksum, 8);
  const TokenFile file(bytes_of(content), "tokens");
  EXPECT_EQ(documents_of(file), (Documents{"\na\n%\n", "\nbcd\n%\n"}));
  EXPECT_EQ(file.version(), 2);
  EXPECT_FALSE(file.knows_bytes());
  EXPECT_EQ(file.end_token(), -1);
  EXPECT_EQ(file.exception_at(3), std::nullopt);
}

TEST(TokenFile, FilesThatAreSomethingElse) {
  const TempFolder folder;
  EXPECT_TRUE(fails(ErrorKind::kUsage, {"missing", "No such file"}, [&] { TokenFile{folder.path("missing")}; }));
  EXPECT_TRUE(fails(ErrorKind::kUsage, {"folder"}, [&] { TokenFile{folder.path(".")}; }));
  write_file_atomic(folder.path("empty"), "");
  EXPECT_TRUE(fails(ErrorKind::kUsage, {folder.path("empty"), "0 bytes"}, [&] { TokenFile{folder.path("empty")}; }));
  write_file_atomic(folder.path("text"), std::string(1000, 'x'));
  EXPECT_TRUE(
      fails(ErrorKind::kUsage, {folder.path("text"), "not a token file"}, [&] { TokenFile{folder.path("text")}; }));
}

TEST(TokenFile, AFullDiskLeavesTheOldFile) {
  const TempFolder folder;
  const std::string path = folder.path("tokens");
  write_token_file("old", "", *byte_tokenizer(), path);
  {
    const FileSizeLimit limit(4096);
    EXPECT_TRUE(fails(ErrorKind::kIo, {path, "File too large"},
                      [&] { write_token_file(std::string(10000, 'x'), "", *byte_tokenizer(), path); }));
  }
  EXPECT_EQ(documents_of(TokenFile(path)), (Documents{"old"}));
}

}  // namespace
}  // namespace fw
