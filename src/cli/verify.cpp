// verify: values and gradients against those that another program computed, for recurrences and for whole models.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <filesystem>

#include "base/error.h"
#include "base/stop.h"
#include "cli/command.h"
#include "cli/json_output.h"
#include "cli/say.h"
#include "cli/signals.h"
#include "reference/ops_vectors.h"
#include "report/table.h"
#include "train/mamba3_vectors.h"
#include "train/model_vectors.h"
#include "train/scan_vectors.h"

namespace fw::cli {
namespace {

namespace fs = std::filesystem;

// Files of operations and folders of models below `path`, itself included, in the order of their names.
void find_vectors(const fs::path& path, std::vector<fs::path>& found) {
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
  for (const fs::path& entry : entries) find_vectors(entry, found);
}

class Verify : public Command {
 public:
  std::string name() const override { return "verify"; }
  std::string summary() const override { return "compare with values that another program computed"; }
  std::string details() const override {
    return fmt::format(
        "A PATH is a safetensors file of recurrences (tensors RULE/CASE/TENSOR), a model folder with io.safetensors beside config.json and model.safetensors "
        "(ours or flash-linear-attention's), or a folder with some of these below it; docs/conformance.md has their tensors.\n\n"
        "Errors are relative, by tensor (Euclidean norm). Bounds: recurrences {:g} in f64, {:g} in f32, {:g} in bf16; models logits {:g}, loss {:g}, gradients "
        "{:g}, training loss {:g}, training norm {:g} in f64 and f32, and those of docs/conformance.md in bf16. --dtype bf16 gives a recurrence "
        "bf16 tensors "
        "and a model's matrix products bf16 operands; sums are float32. Training steps run in the same type, but the norms in f32 are those at the weights of "
        "a training in f64; neither is compared in bf16.\n\n"
        "Exit code 1 when something is beyond its bound, or is of a rule or model that this program does not have; 2 for what cannot be read.\n\n"
        "Example:\n  fastweight verify vectors/ops.safetensors vectors/models --skip-unknown",
        ops_bound(VectorType::kF64), ops_bound(VectorType::kF32), ops_bound(VectorType::kBf16), ModelBounds().logits, ModelBounds().loss,
        ModelBounds().gradients, ModelBounds().trace_loss, ModelBounds().trace_norm);
  }
  void declare(Options& options) override {
    options.positional("PATH", &paths_, "files and folders to compare with", true);
    options.add("dtype", "TYPE", &dtype_, "compute in f64, f32 or bf16").words = {"f64", "f32", "bf16"};
    options.add("form", "FORM", &form_, "of the recurrence: chunk, token, or auto (recurrences: both; models: as they run)").words = {"auto", "chunk", "token"};
    options.add("tolerance", "X", &tolerance_, "largest relative error that passes, instead of the bounds; 0: the bounds");
    options.add("skip_unknown", "", &skip_unknown_, "rules and models that this program does not have are no failure");
    options.add("json", "", &json_, "print JSON instead of a table");
    declare_threads(options, threads_);
  }
  int run(Options& options) override;

 private:
  std::vector<Comparison> check(const std::string& path) const;
  void settings();

  StringList paths_;
  std::string dtype_ = "f64", form_ = "auto";
  double tolerance_ = 0;
  bool skip_unknown_ = false, json_ = false;
  int64_t threads_ = 0;
  OpsVectorOptions ops_;
  ModelVectorOptions model_;
};

void Verify::settings() {
  if (dtype_ != "f64" && dtype_ != "f32" && dtype_ != "bf16") fail_usage("--dtype: expected f64, f32 or bf16, got '{}'", dtype_);
  if (form_ != "auto" && form_ != "chunk" && form_ != "token") fail_usage("--form: expected chunk, token or auto, got '{}'", form_);
  if (!(tolerance_ >= 0 && std::isfinite(tolerance_))) fail_usage("--tolerance: expected a number >= 0, got {}", tolerance_);
  model_.type = ops_.type = dtype_ == "f64" ? VectorType::kF64 : dtype_ == "f32" ? VectorType::kF32 : VectorType::kBf16;
  if (form_ == "auto") return;
  model_.form = form_ == "chunk" ? FW_FORM_CHUNK : FW_FORM_TOKEN;
  ops_.forms = {model_.form};
}

std::vector<Comparison> Verify::check(const std::string& path) const {
  std::error_code error;
  const bool model = fs::is_directory(path, error);
  std::vector<Comparison> found = model ? check_model(path, model_) : check_ops(path, ops_);
  // Systems that are no rules of the C header.
  const auto add = [&](std::vector<Comparison> more) {
    for (Comparison& c : more) {
      std::erase_if(found, [&](const Comparison& other) { return !other.unknown.empty() && other.subject == c.subject; });
      found.push_back(std::move(c));
    }
  };
  if (!model) add(check_scans(path, ops_.type, ops_bound(ops_.type)));
  if (!model) add(check_mamba3(path, ops_.type, ops_.forms, ops_bound(ops_.type)));
  for (Comparison& c : found) {
    if (tolerance_ > 0 && c.bound > 0) c.bound = tolerance_;  // tokens are equal or not
  }
  return found;
}

int Verify::run(Options&) {
  stop_on_signal();
  apply_threads(threads_);
  settings();
  std::vector<fs::path> vectors;
  for (const std::string& path : paths_) {
    const size_t before = vectors.size();
    find_vectors(path, vectors);
    if (vectors.size() == before) fail_usage("'{}': expected a safetensors file, a model folder or a folder with some below it, and found none", path);
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
  int64_t passed = 0, failed = 0, unknown = 0;
  for (const fs::path& path : vectors) {
    stop_point("comparison", &path - vectors.data(), static_cast<int64_t>(vectors.size()), "files and models");
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
      table.row({c.subject, c.what, fmt::format("{:.1e}", c.error), fmt::format("{:g}", c.bound), c.where, c.passes() ? "ok" : "FAILED"});
      compared.push_back({{"subject", c.subject}, {"compared", c.what}, {"error", c.error}, {"bound", c.bound}, {"where", c.where}, {"ok", c.passes()}});
    }
  }
  if (json_) {
    Json report = json_report("verify");
    report.update({{"dtype", dtype_}, {"form", form_}, {"passed", passed}, {"failed", failed}});
    report["compared"] = std::move(compared);
    report["unknown"] = std::move(not_known);
    report["unreadable"] = unreadable;
    print_json_report(report);
  } else {
    if (!table.empty()) say("{}", table.text());
    say("{}: {} within bounds, {} beyond, {} rules or models unknown{}\n", dtype_, passed, failed, unknown,
        unreadable.empty() ? "" : fmt::format(", {} not readable", unreadable.size()));
  }
  std::fflush(stdout);
  for (const std::string& reason : unreadable) say_aside("fastweight verify: {}\n", reason);
  if (!unreadable.empty()) return kExitUsage;
  return failed > 0 || (unknown > 0 && !skip_unknown_) ? kExitFailed : kExitOk;
}

}  // namespace

std::unique_ptr<Command> verify_command() { return std::make_unique<Verify>(); }

}  // namespace fw::cli
