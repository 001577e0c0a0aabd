// The `tokenizers` package has tables of several versions of Unicode: characters that came later are nothing there.
// Punctuation and BERT's parts are of Unicode 8, StripAccents of Unicode 9.
#pragma once

#include <unicode/uchar.h>

namespace fw {

inline bool of_unicode(int newest, UChar32 c) {
  UVersionInfo version;
  u_charAge(c, version);
  return version[0] <= newest;
}

}  // namespace fw
