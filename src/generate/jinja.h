// Jinja, as far as chat templates use it to write a conversation of texts: output, if, for, set, macro, comments and
// the whitespace rules that transformers sets (trim_blocks, lstrip_blocks). The whole template must parse. A filter, a
// test, a method or a function that is not known is an error where it is reached, so that templates may use others for
// tools and pictures.
#pragma once

#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <string_view>

namespace fw {

class JinjaTemplate {
 public:
  // Throws Error(kUsage) "<where>, line N: ...", as render() does.
  JinjaTemplate(std::string_view text, const std::string& where);
  ~JinjaTemplate();
  JinjaTemplate(JinjaTemplate&&) noexcept;
  JinjaTemplate& operator=(JinjaTemplate&&) noexcept;

  // `variables` is an object. A template that runs long or writes much is an error.
  std::string render(const nlohmann::ordered_json& variables) const;

 private:
  struct Program;
  std::unique_ptr<Program> program_;
};

}  // namespace fw
