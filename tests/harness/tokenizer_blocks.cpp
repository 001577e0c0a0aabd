// Ids of texts, and the texts that they become again, for tokenizers_check.py:
//   tokenizer_blocks TOKENIZER TEXTS IDS BACK
// Says the MB of text that a second of processor time encodes. TEXTS are divided by NUL, as BACK is. IDS: for each text
// the number of its tokens (int64) and the ids (int32).
#include <algorithm>
#include <cstdio>
#include <ctime>
#include <string>
#include <vector>

#include "base/file.h"
#include "tokenizer/tokenizer.h"

namespace {

template <class T>
void append(std::string& out, const T* values, size_t count) {
  out.append(reinterpret_cast<const char*>(values), count * sizeof(T));
}

}  // namespace

int main(int argc, char** argv) try {
  if (argc != 5) return 2;
  const auto tokenizer = fw::make_tokenizer(argv[1]);
  const std::string texts = fw::read_file(argv[2]);
  std::string ids, back;
  double seconds = 0;
  for (size_t begin = 0; begin <= texts.size();) {
    const size_t end = std::min(texts.find('\0', begin), texts.size());
    const std::clock_t start = std::clock();
    const std::vector<int32_t> encoded = tokenizer->encode(std::string_view(texts).substr(begin, end - begin));
    seconds += static_cast<double>(std::clock() - start) / CLOCKS_PER_SEC;
    const auto count = static_cast<int64_t>(encoded.size());
    append(ids, &count, 1);
    append(ids, encoded.data(), encoded.size());
    back += tokenizer->decode(encoded);
    if (end < texts.size()) back += '\0';
    begin = end + 1;
  }
  fw::write_file_atomic(argv[3], ids);
  fw::write_file_atomic(argv[4], back);
  std::printf("%.1f MB/s\n", static_cast<double>(texts.size()) / 1e6 / seconds);
  return 0;
} catch (const std::exception& error) {
  std::fprintf(stderr, "%s\n", error.what());
  return 1;
}
