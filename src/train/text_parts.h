// Parts of texts: what is trained on and what is held out of the same files, as streams.
#pragma once

#include <cstdint>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "train/text_source.h"

namespace fw {

// Of a plain text the bytes [begin, end), of JSON lines the texts [begin, end).
struct TextPart {
  std::string path;
  uint64_t begin = 0, end = std::numeric_limits<uint64_t>::max();
  bool operator==(const TextPart&) const = default;
};

// One text after the other. Errors are those of open_text. Of lines that are left out, on_bad gets those of the part
// and none before it.
std::unique_ptr<TextSource> open_parts(std::vector<TextPart> parts, const LineRules& lines);

// The whole of each file.
std::vector<TextPart> whole_texts(const std::vector<std::string>& paths);

// The end of the texts, one after the other, is held out, from where the share begins. In a plain text it is held out
// from the first document after that offset, or the first line without a separator. Of JSON lines whole texts. Reads
// each file once to see how much text is in it, and the one with the cut again; on_bad is told of nothing.
// Error(kUsage) naming a file without text.
struct TextSplit {
  std::vector<TextPart> train, valid;
};
TextSplit hold_out(const std::vector<std::string>& paths, const LineRules& lines, const std::string& separator,
                   double share);

// The first offset at or after `at` where a plain text can be cut; its size when there is none. For tests of hold_out.
uint64_t find_cut(TextSource& text, uint64_t at, const std::string& separator);

}  // namespace fw
