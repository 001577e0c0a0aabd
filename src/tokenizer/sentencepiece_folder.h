// The files beside a SentencePiece model that other programs read with it: added_tokens.json, tokenizer_config.json and
// special_tokens_map.json.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "tokenizer/added_tokens.h"

namespace fw {

struct SentencePieceFolder {
  std::vector<AddedToken> tokens;
  std::string end;                                         // the token that ends a text; "": the model says it
  std::string source, end_source;                          // the files that say the tokens and the end, for errors
  std::vector<std::pair<std::string, std::string>> files;  // names and contents of those that are there
};

// Error(kUsage) by file and place for what is wrong or not supported. "": no folder.
SentencePieceFolder read_sentencepiece_folder(const std::string& folder);

}  // namespace fw
