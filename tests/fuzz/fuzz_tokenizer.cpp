// Fuzzes the reader of Hugging Face's tokenizer.json, and what it makes of texts: ids are of the vocabulary, and any of
// them decode.
#include <nlohmann/json.hpp>
#include <string>

#include "base/json.h"
#include "fuzz_support.h"
#include "tokenizer/tokenizer.h"

int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using fw::fuzz::require;
  fw::fuzz::expect_error_or_nothing([&] {
    const std::string text(reinterpret_cast<const char*>(data), size);
    const nlohmann::json json = fw::parse_json(text, "input");
    const auto tokenizer = fw::huggingface_tokenizer(text, json, "input");
    const int32_t vocab = tokenizer->vocab_size();
    for (const char* sample :
         {"", "a", " ab  abc\n", "\xc3\xbc e\xcc\x81 123's", "\xff\xe2\x96", "<s>\xe2\x96\x81 a<s>"}) {
      const std::vector<int32_t> ids = tokenizer->encode(sample);
      for (const int32_t id : ids) require(id >= 0 && id < vocab, "ids are of the vocabulary");
      for (const int32_t id : ids) tokenizer->piece(id);
      tokenizer->decode(ids);
      const size_t whole = tokenizer->whole_prefix(sample);
      std::vector<int32_t> parts = tokenizer->encode(std::string_view(sample).substr(0, whole));
      const std::vector<int32_t> rest = tokenizer->encode(std::string_view(sample).substr(whole));
      parts.insert(parts.end(), rest.begin(), rest.end());
      require(whole == 0 || parts == ids, "a whole prefix is encoded by itself");
    }
  });
  return 0;
}
