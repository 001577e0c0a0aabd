// Fuzzes SentencePiece models: what passes the check of their tables is loaded by the library and used. Ids are of the
// vocabulary, and any of them decode.
#include <string>
#include <vector>

#include "fuzz_support.h"
#include "tokenizer/tokenizer.h"

int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using fw::fuzz::require;
  fw::fuzz::expect_error_or_nothing([&] {
    const auto tokenizer =
        fw::sentencepiece_tokenizer(std::string(reinterpret_cast<const char*>(data), size), "input", "");
    const int32_t vocab = tokenizer->vocab_size();
    for (const char* sample : {"", "a", " ab  abc\n", "\xc3\xbc e\xcc\x81 123's", "\xff\xe2\x96",
                               "<s>\xe2\x96\x81 a<s>", "\xef\xac\x81\xe3\x80\x80"}) {
      const std::vector<int32_t> ids = tokenizer->encode(sample);
      for (const int32_t id : ids) require(id >= 0 && id < vocab, "ids are of the vocabulary");
      for (const int32_t id : ids) tokenizer->piece(id);
      tokenizer->decode(ids);
    }
  });
  return 0;
}
