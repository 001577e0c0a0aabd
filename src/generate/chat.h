// Chat templates. A folder's template is a Jinja program that writes a whole conversation. It is run here on
// conversations of known messages, which shows what stands around any message.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "tokenizer/tokenizer.h"

namespace fw {

// What stands around messages. After an answer comes `end`, which the model writes itself (end_token), then `between`.
struct ChatFormat {
  std::string first;       // up to the first message of the user, with the system message
  std::string after_user;  // up to where the answer begins
  std::string end, between;
  int32_t end_token = -1;
  bool trims_messages = false;  // spaces around a message are left out
};

// Of a model folder: chat_template.jinja, chat_template.json, or chat_template of tokenizer_config.json. Without
// `system` the template may write a system message of its own. Throws Error(kUsage) when there is no template and when
// it uses what is not understood (jinja.h). It does so too when turns are written differently depending on other turns,
// and when an answer does not end with a special token.
ChatFormat chat_format(const std::string& folder, const Tokenizer& tokenizer, const std::optional<std::string>& system);

}  // namespace fw
