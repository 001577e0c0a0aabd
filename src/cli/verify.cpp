// verify: values and gradients against those that another program computed, for recurrences and for whole models.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <filesystem>

#include "base/device.h"
#include "base/error.h"
#include "base/stop.h"
#include "cli/command.h"
#include "cli/json_output.h"
#include "cli/model_option.h"
#include "cli/say.h"
#include "cli/signals.h"
#include "reference/ops_conformance.h"
#include "report/table.h"
#include "train/mamba3_conformance.h"
#include "train/model_conformance.h"
#include "train/scan_conformance.h"

namespace fw::cli {
namespace {

namespace fs = std::filesystem;

// Files of operations and folders of models below `path`, itself included, in the order of their names.
void find_cases(const fs::path& path, std::vector<fs::path>& found) {
  std::error_code error;
  if (!fs::is_directory(path, error)) {
    found.push_back(path);  // a file, or nothing: opening it says which
    return;
  }
  if (is_model_folder(path.string())) {
    found.push_back(path);
    return;
  }
  std::vector<fs::path> entries;
  for (const auto& entry : fs::directory_iterator(path, error)) {
    if (entry.is_directory(error) || entry.path().extension() == ".safetensors") entries.push_back(entry.path());
  }
  if (error) fail_io("'{}': {}", path.string(), error.message());
  std::sort(entries.begin(), entries.end());
  for (const fs::path& entry : entries) find_cases(entry, found);
}

class Verify : public Command {
 public:
  std::string name() const override { return "verify"; }
  std::string summary() const override { return "compare with values that another program computed"; }
  std::string details() const override {
    return fmt::format(
        "A PATH is a safetensors file of recurrences (tensors RULE/CASE/TENSOR), a model folder with io.safetensors "
        "beside config.json and model.safetensors "
        "(ours or flash-linear-attention's), or a folder with some of these below it; docs/conformance.md has their "
        "tensors.\n\n"
        "--device cuda runs them on a GPU: recurrences in the token form (f32) and in the chunk form with bf16 "
        "operands (bf16), both unless --dtype says one; "
        "models with bf16 activations, as they train there: logits, loss and gradients {:g}, training loss {:g}.\n\n"
        "Errors are relative, by tensor (Euclidean norm). Bounds: recurrences {:g} in f64, {:g} in f32, {:g} in bf16; "
        "models logits {:g}, loss {:g}, gradients "
        "{:g}, training loss {:g}, training norm {:g} in f64 and f32, and those of docs/conformance.md in bf16. "
        "--dtype bf16 gives a recurrence "
        "bf16 tensors "
        "and a model's matrix products bf16 operands; sums are float32. Training steps run in the same type, but the "
        "norms in f32 are those at the weights of "
        "a training in f64; neither is compared in bf16.\n\n"
        "Exit code 1 when something is beyond its bound, or is of a rule or model that this program does not have; 2 "
        "for what cannot be read.\n\n"
        "Example:\n  fastweight verify tests/conformance --skip-unknown",
        device_model_bounds().logits, device_model_bounds().trace_loss, ops_bound(ConformanceType::kF64),
        ops_bound(ConformanceType::kF32), ops_bound(ConformanceType::kBf16), ModelBounds().logits, ModelBounds().loss,
        ModelBounds().gradients, ModelBounds().trace_loss, ModelBounds().trace_norm);
  }
  void declare(Options& options) override {
    options.positional("PATH", &paths_, "files and folders to compare with", true);
    options.add("dtype", "TYPE", &dtype_, "compute in f64, f32 or bf16; without: f64, on a GPU what it has").words = {
        "f64", "f32", "bf16"};
    options.add("device", "DEVICE", &device_, device_help());
    options
        .add("form", "FORM", &form_,
             "of the recurrence: chunk, token, or auto (recurrences: both; models: as they run)")
        .words = {"auto", "chunk", "token"};
    options.add("tolerance", "X", &tolerance_,
                "largest relative error that passes, instead of the bounds; 0: the bounds");
    options.add("skip_unknown", "", &skip_unknown_, "rules and models that this program does not have are no failure");
    options.add("json", "", &json_, "print JSON instead of a table");
    declare_threads(options, threads_);
  }
  int run(Options& options) override;

 private:
  std::vector<Comparison> check(const std::string& path) const;
  std::vector<Comparison> check_recurrences(const std::string& path, ConformanceType type) const;
  void settings();
  bool on_gpu() const { return device_at_->kind() == FW_DEVICE_CUDA; }
  bool asks(const char* type) const { return dtype_.empty() || dtype_ == type; }

  StringList paths_;
  std::string dtype_, form_ = "auto", device_ = "cpu";
  double tolerance_ = 0;
  bool skip_unknown_ = false, json_ = false;
  int64_t threads_ = 0;
  Device* device_at_ = nullptr;
  fw_form only_form_ = FW_FORM_AUTO;
};

void Verify::settings() {
  if (!dtype_.empty() && dtype_ != "f64" && dtype_ != "f32" && dtype_ != "bf16")
    fail_usage("--dtype: expected f64, f32 or bf16, got '{}'", dtype_);
  if (form_ != "auto" && form_ != "chunk" && form_ != "token")
    fail_usage("--form: expected chunk, token or auto, got '{}'", form_);
  if (!(tolerance_ >= 0 && std::isfinite(tolerance_)))
    fail_usage("--tolerance: expected a number >= 0, got {}", tolerance_);
  if (form_ != "auto") only_form_ = form_ == "chunk" ? FW_FORM_CHUNK : FW_FORM_TOKEN;
  device_at_ = &device_named(device_);
  if (!on_gpu()) {
    if (dtype_.empty()) dtype_ = "f64";
    return;
  }
  if (fw_device_check(FW_DEVICE_CUDA) != FW_OK) fail_usage("{}", fw_last_error());
  if (dtype_ == "f64") fail_usage("--dtype: expected f32 or bf16 on a GPU, got f64");
  if (dtype_ == "f32" && only_form_ == FW_FORM_CHUNK)
    fail_usage("--form: expected token with --dtype f32 on a GPU, whose chunk form has bf16 operands, got chunk");
}

std::vector<Comparison> Verify::check_recurrences(const std::string& path, ConformanceType type) const {
  OpsConformanceOptions options;
  options.type = type;
  options.device = device_at_->kind();
  if (on_gpu()) options.forms = {type == ConformanceType::kF32 ? FW_FORM_TOKEN : FW_FORM_CHUNK};
  if (only_form_ != FW_FORM_AUTO) options.forms = {only_form_};
  std::vector<Comparison> found = check_ops(path, options);
  // Systems that are no rules of the C header.
  const auto add = [&](std::vector<Comparison> more) {
    for (Comparison& c : more) {
      std::erase_if(found,
                    [&](const Comparison& other) { return !other.unknown.empty() && other.subject == c.subject; });
      found.push_back(std::move(c));
    }
  };
  add(check_scans(path, type, ops_bound(type), *device_at_));
  if (!on_gpu()) add(check_mamba3(path, type, options.forms, ops_bound(type)));
  for (Comparison& c : found) {
    if (on_gpu() && !c.unknown.empty() && is_mamba3(c.subject))
      c.unknown = "recurrences are compared on the CPU; models run on a GPU";
    if (on_gpu() && c.unknown.empty()) c.what += type == ConformanceType::kF32 ? ", f32" : ", bf16";
  }
  return found;
}

std::vector<Comparison> Verify::check(const std::string& path) const {
  std::error_code error;
  std::vector<Comparison> found;
  if (fs::is_directory(path, error)) {
    if (on_gpu() && dtype_ == "f32")
      fail_usage("'{}': --dtype: expected bf16 or none of a model on a GPU, where its activations are bf16, got f32",
                 path);
    const ConformanceType type = dtype_ == "f64"   ? ConformanceType::kF64
                                 : dtype_ == "f32" ? ConformanceType::kF32
                                                   : ConformanceType::kBf16;
    found = check_model(path, {type, only_form_, device_at_});
  } else {
    const std::pair<const char*, ConformanceType> types[] = {
        {"f64", ConformanceType::kF64}, {"f32", ConformanceType::kF32}, {"bf16", ConformanceType::kBf16}};
    for (const auto& [name, type] : types) {
      if (!asks(name) || (on_gpu() && type == ConformanceType::kF64)) continue;
      if (on_gpu() && type == ConformanceType::kF32 && only_form_ == FW_FORM_CHUNK) continue;
      for (Comparison& c : check_recurrences(path, type)) {
        const auto known = [&](const Comparison& other) {
          return !other.unknown.empty() && other.subject == c.subject;
        };
        if (c.unknown.empty() || std::ranges::none_of(found, known)) found.push_back(std::move(c));
      }
    }
  }
  for (Comparison& c : found) {
    if (tolerance_ > 0 && c.bound > 0) c.bound = tolerance_;  // tokens are equal or not
  }
  return found;
}

int Verify::run(Options&) {
  stop_on_signal();
  apply_threads(threads_);
  settings();
  std::vector<fs::path> cases;
  for (const std::string& path : paths_) {
    const size_t before = cases.size();
    find_cases(path, cases);
    if (cases.size() == before)
      fail_usage("'{}': expected a safetensors file, a model folder or a folder with some below it, and found none",
                 path);
  }

  Table table;
  table.column("rule or model", Table::Align::kLeft);
  table.column("compared", Table::Align::kLeft);
  table.column("largest error");
  table.column("bound");
  table.column("where", Table::Align::kLeft);
  table.column("", Table::Align::kLeft);
  std::vector<std::string> unreadable;
  Json compared = Json::array(), not_known = Json::array();
  int64_t passed = 0, failed = 0, unknown = 0, widened = 0;
  for (const fs::path& path : cases) {
    stop_point("comparison", &path - cases.data(), static_cast<int64_t>(cases.size()), "files and models");
    std::vector<Comparison> found;
    try {
      found = check(path.string());
    } catch (const Error& error) {
      if (error.kind() != ErrorKind::kUsage && error.kind() != ErrorKind::kIo) throw;
      unreadable.emplace_back(error.what());
      continue;
    }
    for (const Comparison& c : found) {
      if (!c.unknown.empty()) {
        ++unknown;
        table.row({c.subject, "", "", "", c.unknown, skip_unknown_ ? "unknown, skipped" : "UNKNOWN"});
        not_known.push_back({{"subject", c.subject}, {"reason", c.unknown}});
        continue;
      }
      ++(c.passes() ? passed : failed);
      if (c.passes() && c.widened) ++widened;
      table.row({c.subject, c.what, fmt::format("{:.1e}", c.error), fmt::format("{:g}", c.bound), c.where,
                 c.passes() ? "ok" : "FAILED"});
      compared.push_back({{"subject", c.subject},
                          {"compared", c.what},
                          {"error", c.error},
                          {"bound", c.bound},
                          {"where", c.where},
                          {"widened", c.widened},
                          {"ok", c.passes()}});
    }
  }
  const std::string types = dtype_.empty() ? "f32 and bf16" : dtype_;  // on a GPU
  if (json_) {
    Json report = json_report("verify");
    report.update({{"dtype", types}, {"form", form_}, {"device", device_}, {"passed", passed}, {"failed", failed}});
    report["compared"] = std::move(compared);
    report["unknown"] = std::move(not_known);
    report["unreadable"] = unreadable;
    print_json_report(report);
  } else {
    if (!table.empty()) say("{}", table.text());
    say("{}{}: {} within bounds{}, {} beyond, {} rules or models unknown{}\n",
        on_gpu() ? device_info().name + ", " : "", types, passed,
        widened == 0 ? ""
                     : fmt::format(" ({} of them within {:g} times what bf16 does to the model on the CPU)", widened,
                                   kDeviceConditioning),
        failed, unknown, unreadable.empty() ? "" : fmt::format(", {} not readable", unreadable.size()));
  }
  std::fflush(stdout);
  for (const std::string& reason : unreadable) say_aside("fastweight verify: {}\n", reason);
  if (!unreadable.empty()) return kExitUsage;
  return failed > 0 || (unknown > 0 && !skip_unknown_) ? kExitFailed : kExitOk;
}

}  // namespace

std::unique_ptr<Command> verify_command() { return std::make_unique<Verify>(); }

}  // namespace fw::cli
