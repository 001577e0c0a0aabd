// export: a model folder of ours as flash-linear-attention lays it out.
#include <fmt/format.h>

#include <nlohmann/json.hpp>

#include "base/error.h"
#include "cli/command.h"
#include "cli/model_option.h"
#include "cli/outputs.h"
#include "cli/run_config.h"
#include "cli/say.h"
#include "cli/side_files.h"
#include "model/adapters.h"
#include "model/interop/hf_config.h"
#include "model/language_model.h"
#include "model/other_tensors.h"

namespace fw::cli {
namespace {

class Export : public Command {
 public:
  std::string name() const override { return "export"; }
  std::string summary() const override { return "turn a model into a flash-linear-attention folder"; }
  std::string details() const override {
    return "MODEL is a model or run folder. TARGET is written with config.json and model.safetensors as "
           "flash-linear-attention reads them; what it has no "
           "layer "
           "for is an error that says which keys stand in the way, but with --merge it becomes a model folder of "
           "ours. Of an imported model the configuration is the one "
           "it came with, and so are tensors that "
           "have not been trained since. The tokenizer goes along as programs of the Hugging Face family read it "
           "(bytes as a tokenizer.json with a token for "
           "each byte), and so do chat templates and generation_config.json.\n\n"
           "With --merge, MODEL or --adapter has LoRA adapters, whose products are added to the weights.\n\n"
           "Examples:\n  fastweight export my-run for-fla\n  fastweight export --merge tuned merged";
  }
  void declare(Options& options) override {
    options.positional("MODEL", &model_, "model or run folder", true);
    options.positional("TARGET", &target_, "folder to write", true);
    options.add("merge", "", &merge_, "add the products of LoRA adapters to the weights");
    declare_adapter(options, adapter_);
    options.add("tokenizer", "SPEC", &tokenizer_, tokenizer_help());
  }
  int run(Options&) override {
    check_new_folder("TARGET", target_);
    OpenModel open = open_model(model_, "f32", tokenizer_, "cpu", adapter_, LoadFor::kTraining);
    if (!merge_ && !open.adapter.empty())
      fail_usage("'{}' holds LoRA adapters: add --merge to write merged weights", open.adapter);
    if (merge_ && open.adapter.empty())
      fail_usage("--merge: expected adapters, in MODEL or with --adapter, got '{}', a model without", open.folder);
    if (merge_) merge_adapters(open.model);
    std::string obstacle;
    const nlohmann::json config = layout_for_others(open.model.config(), obstacle);  // before the folder is made
    if (!obstacle.empty()) {
      write_own(open);
      say("{}: {}, a model folder of fastweight, since {}; tokenizer: {}\n", target_, describe(open.model.config()),
          obstacle, open.tokenizer->type());
      return kExitOk;
    }
    NewFolder target("TARGET", target_);
    save_tokenizer_for_others(target_, *open.tokenizer);
    copy_side_files(open.folder, target_, tokenizer_.empty());
    // its config.json last: a folder that has one is whole
    const OtherTensors others(open.folder);
    export_model(target_, open.model, open.tokenizer->end_of_text(), &others);
    target.keep();
    say("{}: {}, model_type {}; tokenizer: {}\n", target_, describe(open.model.config()),
        config.value("model_type", "mamba_ssm"), open.tokenizer->type());
    return kExitOk;
  }

 private:
  // The configuration; or why there is none, where a folder of ours does as well.
  nlohmann::json layout_for_others(const ModelConfig& config, std::string& obstacle) const {
    try {
      return config_to_hf(config);
    } catch (const Error& error) {
      if (!merge_ || !config.hf.empty() || error.kind() != ErrorKind::kUsage) throw;
      obstacle = error.what();
      return {};
    }
  }
  void write_own(const OpenModel& open) const {
    NewFolder target("TARGET", target_);
    open.tokenizer->save(target_);
    copy_side_files(open.folder, target_, tokenizer_.empty());
    save_model(target_, open.model);  // its config.json last: a folder that has one is whole
    target.keep();
  }

  bool merge_ = false;
  std::string model_, target_, adapter_, tokenizer_;
};

}  // namespace

std::unique_ptr<Command> export_command() { return std::make_unique<Export>(); }

}  // namespace fw::cli
