// export: a model folder of ours as flash-linear-attention lays it out.
#include <fmt/format.h>

#include <nlohmann/json.hpp>

#include "cli/command.h"
#include "cli/outputs.h"
#include "cli/run_config.h"
#include "cli/say.h"
#include "model/language_model.h"
#include "model/peer.h"

namespace fw::cli {
namespace {

class Export : public Command {
 public:
  std::string name() const override { return "export"; }
  std::string summary() const override { return "turn a model into a flash-linear-attention folder"; }
  std::string details() const override {
    return "MODEL is a model or run folder. TARGET is written with config.json and model.safetensors as flash-linear-attention reads them; what it has no "
           "layer "
           "for is an error that says which keys stand in the way. Of an imported model the configuration is the one it came with, and so are tensors that "
           "have not been trained since. The tokenizer is not written: those are files of another library.\n\n"
           "Example:\n  fastweight export my-run for-fla";
  }
  void declare(Options& options) override {
    options.positional("MODEL", &model_, "model or run folder", true);
    options.positional("TARGET", &target_, "folder to write", true);
  }
  int run(Options&) override {
    check_new_folder("TARGET", target_);
    const LanguageModel<float> model = load_model<float>(find_model_folder(model_));
    export_model(target_, model);
    say("{}: {}, model_type {}\n", target_, describe(model.config()), config_to_peer(model.config()).value("model_type", "mamba_ssm"));
    return kExitOk;
  }

 private:
  std::string model_, target_;
};

}  // namespace

std::unique_ptr<Command> export_command() { return std::make_unique<Export>(); }

}  // namespace fw::cli
