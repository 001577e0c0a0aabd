// Classes of characters as Rust's regular expressions have them, which the `tokenizers` package uses around added
// tokens and for the pre-tokenizer Whitespace.
#pragma once

#include <unicode/uchar.h>

namespace fw {

// \w
inline bool is_word(char32_t c) {
  const auto u = static_cast<UChar32>(c);
  return u_hasBinaryProperty(u, UCHAR_ALPHABETIC) != 0 ||
         (U_GET_GC_MASK(u) & (U_GC_M_MASK | U_GC_ND_MASK | U_GC_PC_MASK)) != 0 || c == 0x200c || c == 0x200d;
}

// \s
inline bool is_space(char32_t c) { return u_isUWhiteSpace(static_cast<UChar32>(c)) != 0; }

}  // namespace fw
