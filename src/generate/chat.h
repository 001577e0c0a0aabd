// Chat templates. A folder's template says what stands around the messages of a conversation. Templates are programs
// (Jinja), which are not run here: ChatML is recognised, the form that Qwen's models have, and others are refused.
#pragma once

#include <cstdint>
#include <string>

#include "tokenizer/tokenizer.h"

namespace fw {

// What stands around messages. After an answer comes `end`, which the model writes itself (end_token), then `between`.
struct ChatFormat {
  std::string before_system, after_system;
  std::string before_user, after_user;  // up to where the answer begins
  std::string end, between;
  int32_t end_token = -1;
};

// Of a model folder: chat_template.jinja, chat_template.json, or chat_template of tokenizer_config.json. Throws
// Error(kUsage) when there is none, when it is not ChatML, or when the tokenizer has no tokens for ChatML's marks.
ChatFormat chat_format(const std::string& folder, const Tokenizer& tokenizer);

}  // namespace fw
