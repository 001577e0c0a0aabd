// import: a model folder of another program as one of ours.
#include <fmt/format.h>

#include "base/error.h"
#include "cli/command.h"
#include "cli/model_option.h"
#include "cli/outputs.h"
#include "cli/run_config.h"
#include "cli/say.h"
#include "cli/side_files.h"
#include "model/other_tensors.h"

namespace fw::cli {
namespace {

class Import : public Command {
 public:
  std::string name() const override { return "import"; }
  std::string summary() const override { return "turn a model of another program into one of ours"; }
  std::string details() const override {
    return "SOURCE has config.json and model.safetensors, or shards with their index, as flash-linear-attention and "
           "transformers save them (docs/conformance.md lists the models). TARGET is written with our "
           "configuration and names; the source's own configuration is kept in its key 'peer', so that 'fastweight "
           "export' gives back the same. The tokenizer, "
           "chat templates and generation_config.json go along, other files do not. (eval, generate and verify read "
           "SOURCE as it is.)\n\n"
           "Example:\n  fastweight import gated-deltanet-340M my-model --tokenizer spm.model";
  }
  void declare(Options& options) override {
    options.positional("SOURCE", &source_, "model folder of another program", true);
    options.positional("TARGET", &target_, "folder to write", true);
    options.add("tokenizer", "SPEC", &tokenizer_, tokenizer_help());
  }
  int run(Options&) override {
    if (is_adapter_folder(find_model_folder(source_)))
      fail_usage("SOURCE: expected a model, got adapters '{}': fastweight export --merge makes one of them", source_);
    if (!is_hf_folder(find_model_folder(source_))) fail_usage("SOURCE: '{}' is a model of ours already", source_);
    check_new_folder("TARGET", target_);
    OpenModel open = open_model(source_, "f32", tokenizer_, "cpu", "", LoadFor::kTraining);
    if (open.tokenizer->type() != "ids") open.model.set_tokenizer(open.tokenizer->checksum());
    NewFolder target("TARGET", target_);
    open.tokenizer->save(target_);
    copy_side_files(open.folder, target_, tokenizer_.empty());
    OtherTensors(open.folder).save(target_);
    save_model(target_, open.model);  // its config.json last: a folder that has one is whole
    target.keep();
    say("{}: {}; tokenizer: {}\n", target_, describe(open.model.config()), open.tokenizer->type());
    return kExitOk;
  }

 private:
  std::string source_, target_, tokenizer_;
};

}  // namespace

std::unique_ptr<Command> import_command() { return std::make_unique<Import>(); }

}  // namespace fw::cli
