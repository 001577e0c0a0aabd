#include "cli/model_option.h"

#include "base/error.h"
#include "cli/run_config.h"

namespace fw::cli {

OpenModel open_model(const std::string& path, const std::string& precision) {
  if (precision != "f32" && precision != "bf16") fail_usage("--precision: expected f32 or bf16, got '{}'", precision);
  const std::string folder = find_model_folder(path);
  OpenModel open{folder, load_model<float>(folder), load_tokenizer(folder)};
  open.model.set_precision(precision == "bf16" ? Precision::kBf16 : Precision::kNative);
  if (open.tokenizer->vocab_size() > open.model.config().vocab_size) {
    fail_usage("'{}': the tokenizer has a vocabulary of {}, the model of {}: they do not belong together", folder, open.tokenizer->vocab_size(),
               open.model.config().vocab_size);
  }
  return open;
}

}  // namespace fw::cli
