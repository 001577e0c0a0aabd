// Text to token files (token_file.h says what is in them), as a stream: memory does not grow with the text where the
// tokenizer can cut it (Tokenizer::whole_prefix), nor with what it makes.
//
// While it is made, a token file PATH is PATH.tokenizing, PATH.tokenizing.offsets and PATH.tokenizing.bytes. Every
// TokenizeOptions::safe_every bytes of text, and when it is stopped, PATH.tokenizing.json says how far it came. The
// next call with the same text, separator and tokenizer goes on from there, and the file in the end has the same bytes.
// Another text is noticed, and then it begins anew.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>

#include "tokenizer/tokenizer.h"
#include "train/text_source.h"

namespace fw {

struct TokenFileStats {
  int64_t tokens = 0, documents = 0, bytes = 0;  // bytes of the text: bits per byte = nll / ln 2 / bytes
  bool complete = true;                          // false: stopped, and nothing but the parts was written
  int64_t separators = 0;                        // lines that were the separator
  int64_t resumed_at = 0;                        // bytes of text that an earlier call had tokenized
  int32_t end = -1;                              // the id that ends each document; -1: none
};

struct TokenizeOptions {
  // each text is split at the lines that are equal to it ("%" for fortunes); "": each text is one document
  std::string separator;
  // Whether the tokenizer's end of text, if it has one, stands after each document. Where the text has it there
  // itself, white space after it or not, no second one comes.
  bool document_end = false;
  // from what an earlier call left, and leave that for a later one; false: of a text that can be read only once
  bool go_on = true;
  // Gets what there is so far after every `piece` bytes of text; false stops.
  std::function<bool(const TokenFileStats&)> progress;
  size_t piece = size_t{1} << 20;            // bytes of text read at a time
  uint64_t safe_every = uint64_t{64} << 20;  // bytes of text
};

// Opens the texts from their beginning; may be called twice.
using TextOpener = std::function<std::unique_ptr<TextSource>()>;

// Replaces `path` when all is there and synced. A document never spans two texts. Throws Error(kUsage) when there is no
// document in them or the separator is not one line, and what the texts throw; the old file is then as it was.
TokenFileStats write_token_file(const TextOpener& open, const TokenizeOptions& options, const Tokenizer& tokenizer,
                                const std::string& path);

// The same of texts in memory.
TokenFileStats write_token_file(std::span<const std::string> texts, const std::string& separator,
                                const Tokenizer& tokenizer, const std::string& path);
TokenFileStats write_token_file(const std::string& text, const std::string& separator, const Tokenizer& tokenizer,
                                const std::string& path);

}  // namespace fw
