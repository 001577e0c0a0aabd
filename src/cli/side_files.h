// The files of a model folder beside config.json and the tensors: the tokenizer's and what says how texts end. import,
// export and train --from carry these and no others, so that a folder with other weights in it is not copied.
#pragma once

#include <string>

#include "cli/model_option.h"

namespace fw::cli {

// Those of `from` that `to` does not have; tokenizer_config.json replaces the shorter one that a tokenizer writes.
// of_tokenizer false: generation_config.json alone, for a model that got another tokenizer. The tokenizer's own file
// (tokenizer.json, tokenizer.model) is not among them: Tokenizer::save() writes it.
void copy_side_files(const std::string& from, const std::string& to, bool of_tokenizer);

// The tokenizer as programs of the Hugging Face family read it: bytes as a tokenizer.json with a token for each byte,
// SentencePiece as tokenizer.model; ids have no file.
void save_tokenizer_for_others(const std::string& folder, const Tokenizer& tokenizer);
// Whether a tokenizer.json is the one that save_tokenizer_for_others() writes of bytes.
bool is_exported_byte_tokenizer(const std::string& path);

}  // namespace fw::cli
