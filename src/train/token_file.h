// Token files: memory-mapped ids with document boundaries; what training and evaluation read. token_writer.h makes
// them.
//
// Documents. With a separator ("%" for fortunes) a text is split at the lines that are the separator. A document is
// then newline, text, separator line. So a model learns from what a document starts: a newline, which a Session without
// a prompt begins with too. It also learns where a document ends: generation stops after the separator line. Every byte
// of text and separator is a target. Documents without text are left out. Without a separator the text is one document,
// exactly as it is. After each document stands the tokenizer's end of text, where the writer was asked for it
// (TokenizeOptions::document_end).
//
// Format, little-endian: a header of 64 bytes
//   0 "FWTOKEN1"   8 u32 version 3   12 u32 bytes of an id (1, 2, 4)   16 u64 tokens   24 u64 documents   32 u64 vocabulary
//   40 u64 bytes of text after the tokens   48 u64 base/checksum.h of the whole file with zeros here   56 u64 Tokenizer::checksum()
// then the ids, zeros up to a multiple of 8, and documents + 1 offsets (u64; the first 0, growing, the last = tokens).
// After them a trailer
//   u64 1 where the bytes of every token are known, else 0   i64 id that ends each document, or -1   u64 exceptions
// and the exceptions: u64 token, u64 bytes of the text that it stands for, where these are not those of its piece
// (tokenizer/text_bytes.h). Files of version 2 end with the offsets. Those of version 1 have zero at 56 as well: which
// tokenizer made them is not known, and they are taken where its size fits.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/file.h"
#include "base/seq_layout.h"
#include "tokenizer/tokenizer.h"

namespace fw {

class TokenFile {
 public:
  // Reads the file once to check it: header, sizes, checksum, offsets, ids < vocabulary. Throws Error(kUsage) naming
  // the file.
  explicit TokenFile(const std::string& path);
  // for the fuzzer and tests; content must outlive it
  TokenFile(std::span<const std::byte> content, const std::string& name);
  int64_t tokens() const { return tokens_; }        // >= 1
  int64_t documents() const { return documents_; }  // >= 1, none is empty
  int64_t vocab_size() const { return vocab_size_; }
  int64_t text_bytes() const { return text_bytes_; }
  uint64_t tokenizer() const { return tokenizer_; }  // checksum of the one that made it; 0: not known (version 1)
  uint64_t checksum() const { return checksum_; }    // of the whole file
  const std::string& name() const { return name_; }
  int version() const { return version_; }
  // that was put after each document; -1: none, or not known (before version 3)
  int32_t end_token() const { return end_; }
  // Whether the bytes of every token are known: of a token those of its piece, or what exception_at() says.
  bool knows_bytes() const { return knows_bytes_; }
  std::optional<int64_t> exception_at(int64_t token) const;
  int64_t document_begin(int64_t i) const;                 // i in [0, documents]; documents: tokens()
  int64_t document_of(int64_t token) const;                // the document that this token belongs to
  void read(int64_t begin, std::span<int32_t> out) const;  // ids [begin, begin + out.size())

 private:
  void parse(std::span<const std::byte> content);
  MappedFile map_;
  std::string name_;
  int64_t tokens_ = 0, documents_ = 0, vocab_size_ = 0, text_bytes_ = 0;
  uint64_t tokenizer_ = 0, checksum_ = 0;
  int id_bytes_ = 1, version_ = 0;
  int32_t end_ = -1;
  bool knows_bytes_ = false;
  int64_t exception_count_ = 0;
  const std::byte* ids_ = nullptr;
  const std::byte* offsets_ = nullptr;
  const std::byte* exceptions_ = nullptr;
};

// Throws Error(kUsage) when the file was made by another tokenizer: its vocabulary has another size, or the file knows
// its maker.
void check_tokenizer(const TokenFile& file, const Tokenizer& tokenizer);

// One training batch: sequences * length tokens packed one after the other, cut at document boundaries.
struct Batch {
  std::vector<int32_t> ids;
  std::vector<int32_t> targets;  // the next token of the document, also past the window; -1 at a document's last token
  SeqLayout layout;              // one sequence per piece of a document
};

// What is trained on: token files, each with its share of the windows.
struct TokenMix {
  struct Part {
    std::shared_ptr<const TokenFile> file;
    double weight = 1;  // > 0; the shares are the weights over their sum
  };
  std::vector<Part> parts;

  TokenMix(std::shared_ptr<const TokenFile> file)
      : parts{{std::move(file), 1}} {}  // NOLINT(google-explicit-constructor): a file alone is a mix
  TokenMix(std::shared_ptr<TokenFile> file) : parts{{std::move(file), 1}} {}  // NOLINT(google-explicit-constructor)
  explicit TokenMix(std::vector<Part> list) : parts(std::move(list)) {}
  int64_t tokens() const;
  int64_t documents() const;
  // "" for a file alone; otherwise every file's tokens and share, by which a checkpoint knows the mix again.
  std::string description() const;
};

// Windows of `length` tokens over the concatenated documents, in an order shuffled anew each epoch by `seed`. Position
// is the number of windows given out so far, and with the seed it is all the state there is (bit-exact resume). The
// place of the first window is drawn anew each epoch as well, so that the cuts differ; up to 2 * length - 2 tokens at
// the two ends are left out of an epoch.
//
// Of several files each has its own epochs. The next window is of the file that is furthest behind its share, so that
// the shares hold all along, not only on average, and follow from position.
class BatchSource {
 public:
  // Throws Error(kUsage) for sequences or length < 1, for a file with fewer than `length` tokens and for a weight that
  // is not positive.
  BatchSource(const TokenMix& mix, int64_t sequences, int64_t length, uint64_t seed);
  Batch next();
  int64_t position() const { return position_; }
  void seek(int64_t position);                            // >= 0
  int64_t windows_per_epoch() const { return windows_; }  // of all files together
  double epoch() const { return static_cast<double>(position_) / static_cast<double>(windows_); }

 private:
  struct Stream {
    std::shared_ptr<const TokenFile> file;
    double share;
    uint64_t seed;
    int64_t windows, given = 0;  // in an epoch; so far
    int64_t shuffled_epoch = -1;
    int64_t first = 0;           // where the first window of this epoch begins
    std::vector<int64_t> order;  // window numbers in the order of this epoch
  };
  size_t choose() const;
  void shuffle(Stream& stream, int64_t epoch) const;
  void add_window(Stream& stream, Batch& batch, std::vector<int64_t>& offsets);
  std::vector<Stream> streams_;
  int64_t sequences_, length_, position_ = 0, windows_ = 0;
};

}  // namespace fw
