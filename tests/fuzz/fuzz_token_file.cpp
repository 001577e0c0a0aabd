// Fuzzes the token file reader: what it lets through has documents and ids as its header promises, and gives batches.
#include <cstring>
#include <memory>
#include <vector>

#include "base/checksum.h"
#include "fuzz_support.h"
#include "train/token_file.h"

namespace {

void read_all(std::span<const std::byte> content) {
  using fw::fuzz::require;
  const auto file = std::make_shared<const fw::TokenFile>(content, "input");
  require(file->tokens() >= 1 && static_cast<size_t>(file->tokens()) <= content.size(),
          "a token takes at least a byte");
  std::vector<int32_t> ids(static_cast<size_t>(file->tokens()));
  file->read(0, ids);
  for (const int32_t id : ids) require(id >= 0 && id < file->vocab_size(), "ids are in the vocabulary");
  require(file->document_begin(0) == 0 && file->document_begin(file->documents()) == file->tokens(),
          "documents cover the tokens");
  for (int64_t i = 0; i < file->documents(); ++i) {
    require(file->document_begin(i) < file->document_begin(i + 1), "no document is empty");
    require(file->document_of(file->document_begin(i)) == i, "a document's first token is its own");
  }
  fw::BatchSource source(file, 2, 1 + file->tokens() / 3, 1);
  for (int i = 0; i < 3; ++i) {
    const fw::Batch batch = source.next();
    require(batch.ids.size() == batch.targets.size() && batch.layout.tokens() == static_cast<int64_t>(batch.ids.size()),
            "a batch is whole");
  }
}

}  // namespace

int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const auto content = fw::fuzz::bytes_of(data, size);
  fw::fuzz::expect_error_or_nothing([&] { read_all(content); });
  // With the right checksum, so that what stands behind it is reached too.
  if (size < 64) return 0;
  std::vector<std::byte> forged(content.begin(), content.end());
  std::memset(forged.data() + 48, 0, 8);
  fw::Checksum sum;
  sum.add(forged);
  const uint64_t value = sum.value();
  std::memcpy(forged.data() + 48, &value, 8);
  fw::fuzz::expect_error_or_nothing([&] { read_all(forged); });
  return 0;
}
