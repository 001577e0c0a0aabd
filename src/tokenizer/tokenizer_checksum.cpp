#include <algorithm>

#include "base/checksum.h"
#include "tokenizer/tokenizer.h"

namespace fw {

uint64_t tokenizer_checksum(std::string_view type, std::string_view definition) {
  Checksum sum;
  sum.add(type);
  sum.add(std::string_view("\n"));
  sum.add(definition);
  return std::max<uint64_t>(sum.value(), 1);
}

}  // namespace fw
