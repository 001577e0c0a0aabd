// Token files: memory-mapped ids with document boundaries; what training and evaluation read. Format (little-endian):
// 64-byte header {magic "FWTOKEN1", u32 version, u32 id bytes (1, 2 or 4), u64 tokens, u64 documents, u64 vocab size,
// u64 checksum of the rest (XXH-like 64 bit is not needed: FNV-1a), padding}, ids, padding to 8, documents + 1 offsets u64.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/file.h"
#include "base/seq_layout.h"
#include "train/tokenizer.h"

namespace fw {

class TokenFile {
 public:
  explicit TokenFile(const std::string& path);   // checks header, sizes, offsets, ids < vocab
  int64_t tokens() const { return tokens_; }
  int64_t documents() const { return documents_; }
  int64_t vocab_size() const { return vocab_size_; }
  int64_t document_begin(int64_t i) const;
  void read(int64_t begin, std::span<int32_t> out) const;  // ids [begin, begin + out.size())

 private:
  MappedFile map_;
  int64_t tokens_ = 0, documents_ = 0, vocab_size_ = 0;
  int id_bytes_ = 1;
  const std::byte* ids_ = nullptr;
  const std::byte* offsets_ = nullptr;
};

struct TokenFileStats {
  int64_t tokens = 0, documents = 0, bytes = 0;  // bytes of the text: bits per byte = nll / ln 2 / bytes
};

// Tokenizes a text into a token file. separator: documents are split at this line ("%" for fortunes), "" = one document.
TokenFileStats write_token_file(const std::string& text, const std::string& separator, const Tokenizer& tokenizer, const std::string& path);

// One training batch: sequences * length tokens packed one after the other, cut at document boundaries.
struct Batch {
  std::vector<int32_t> ids;
  std::vector<int32_t> targets;   // the next token; -1 at the last token of a document (nothing to predict)
  SeqLayout layout;               // one sequence per piece of a document
};

// Windows of `length` tokens over the concatenated documents, in an order shuffled anew each epoch by `seed`; position is
// the number of windows given out so far, and with the seed it is all the state there is (bit-exact resume).
class BatchSource {
 public:
  BatchSource(std::shared_ptr<const TokenFile> file, int64_t sequences, int64_t length, uint64_t seed);
  Batch next();
  int64_t position() const { return position_; }
  void seek(int64_t position);
  double epoch() const;

 private:
  std::shared_ptr<const TokenFile> file_;
  int64_t sequences_, length_, position_ = 0;
  uint64_t seed_;
  int64_t shuffled_epoch_ = -1;
  std::vector<int64_t> order_;
};

}  // namespace fw
