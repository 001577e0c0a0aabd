#include "train/checkpoint.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <deque>
#include <filesystem>
#include <limits>
#include <map>
#include <nlohmann/json.hpp>
#include <string_view>
#include <system_error>

#include "base/checksum.h"
#include "base/error.h"
#include "base/file.h"
#include "base/json.h"
#include "base/safetensors.h"

namespace fw {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

constexpr std::string_view kPrefix = "step-";
constexpr std::string_view kTemporary = ".tmp-";
constexpr int kFormat = 1;
// trainer.json counts into its own checksum with this in the checksum's place.
constexpr std::string_view kChecksumKey = "\"checksum\": \"";
constexpr std::string_view kNoChecksum = "0000000000000000";

std::string inside(const std::string& folder, const std::string& name) { return (fs::path(folder) / name).string(); }

std::string hex(uint64_t value) { return fmt::format("{:016x}", value); }

std::string checksum_of_text(std::string_view text) {
  Checksum sum;
  sum.add(text);
  return hex(sum.value());
}

std::string checksum_of_file(const std::string& path) {
  const MappedFile file(path);
  Checksum sum;
  sum.add(file.bytes());
  return hex(sum.value());
}

// -1 if `name` is not step-N with N written without sign and leading zeros.
int64_t step_of_name(const std::string& name) {
  if (!name.starts_with(kPrefix)) return -1;
  int64_t step = -1;
  const auto [stop, error] = std::from_chars(name.data() + kPrefix.size(), name.data() + name.size(), step);
  if (error != std::errc() || stop != name.data() + name.size() || step < 0) return -1;
  return name == fmt::format("{}{}", kPrefix, step) ? step : -1;
}

void sync_file(const std::string& path) {
  const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) fail_io("cannot sync '{}': {}", path, std::generic_category().message(errno));
  const int error = ::fsync(fd) == 0 ? 0 : errno;
  ::close(fd);
  if (error != 0) fail_io("cannot sync '{}': {}", path, std::generic_category().message(error));
}

std::vector<std::string> files_in(const std::string& folder) {
  std::vector<std::string> names;
  for (const fs::directory_entry& entry : fs::directory_iterator(folder))
    names.push_back(entry.path().filename().string());
  std::sort(names.begin(), names.end());
  return names;
}

json state_to_json(const TrainerState& s) {
  return {{"step", s.step},
          {"updates", s.updates},
          {"position", s.position},
          {"tokens", s.tokens},
          {"skipped", s.skipped},
          {"skipped_in_row", s.skipped_in_row},
          {"interval_nll", s.interval_nll},
          {"interval_count", s.interval_count},
          {"norm", s.norm},
          {"random", s.random},
          {"best_step", s.best_step},
          {"best_loss", s.best_loss},
          {"not_better", s.not_better},
          {"judged_step", s.judged_step},
          {"config_hash", s.config_hash},
          {"seed", s.seed},
          {"length", s.length},
          {"train_tokens", s.train_tokens},
          {"train_documents", s.train_documents},
          {"mix", s.mix},
          {"adapters", s.adapters},
          {"base", s.base}};
}

TrainerState state_from_json(const json& j) {
  TrainerState s;
  j.at("step").get_to(s.step);
  j.at("updates").get_to(s.updates);
  j.at("position").get_to(s.position);
  j.at("tokens").get_to(s.tokens);
  j.at("skipped").get_to(s.skipped);
  j.at("skipped_in_row").get_to(s.skipped_in_row);
  j.at("interval_nll").get_to(s.interval_nll);
  j.at("interval_count").get_to(s.interval_count);
  // Checkpoints of before have none, and JSON no word for one that is not finite.
  const auto norm = j.find("norm");
  s.norm = norm != j.end() && norm->is_number() ? norm->get<double>() : std::numeric_limits<double>::quiet_NaN();
  j.at("random").get_to(s.random);
  s.best_step = j.value("best_step", s.best_step);  // since 0.2: checkpoints before it have none of these
  s.best_loss = j.value("best_loss", s.best_loss);
  s.not_better = j.value("not_better", s.not_better);
  s.judged_step = j.value("judged_step", s.judged_step);
  j.at("config_hash").get_to(s.config_hash);
  j.at("seed").get_to(s.seed);
  j.at("length").get_to(s.length);
  j.at("train_tokens").get_to(s.train_tokens);
  j.at("train_documents").get_to(s.train_documents);
  s.mix = j.value("mix", std::string());            // of checkpoints from before there were mixes: of one file
  s.adapters = j.value("adapters", std::string());  // since 0.3, with `base`
  s.base = j.value("base", std::string());
  return s;
}

void write_trainer_json(const std::string& folder, const TrainerState& state) {
  json files = json::object();
  for (const std::string& name : files_in(folder)) files[name] = checksum_of_file(inside(folder, name));
  const json content = {
      {"format", kFormat}, {"checksum", kNoChecksum}, {"state", state_to_json(state)}, {"files", files}};
  std::string text = content.dump(2) + "\n";
  const size_t offset = text.find(fmt::format("{}{}\"", kChecksumKey, kNoChecksum)) + kChecksumKey.size();
  text.replace(offset, kNoChecksum.size(), checksum_of_text(text));
  write_file_atomic(folder + "/trainer.json", text);
}

void write_moments(const std::string& path, const LanguageModel<float>& model, const AdamW& optimizer) {
  SafetensorsWriter writer;
  if (optimizer.format() == MomentFormat::kBf16) {
    std::deque<HostView<Bf16>> views;
    for (const ParamSpec& spec : model.trained().specs()) {
      for (const auto& [name, moments] : {std::pair<const char*, const Buffer<Bf16>*>{"m.", &optimizer.first_bf16()},
                                          {"v.", &optimizer.second_bf16()}})
        writer.add(name + spec.name, "BF16", spec.shape,
                   std::as_bytes(views.emplace_back(moments->host(spec.offset, spec.size())).span()));
    }
    return writer.write(path);
  }
  std::deque<HostView<float>> views;
  for (const ParamSpec& spec : model.trained().specs()) {
    writer.add<float>("m." + spec.name, spec.shape,
                      views.emplace_back(optimizer.first().host(spec.offset, spec.size())).span());
    writer.add<float>("v." + spec.name, spec.shape,
                      views.emplace_back(optimizer.second().host(spec.offset, spec.size())).span());
  }
  writer.write(path);
}

// Out of the way by a rename first: a half-removed folder must not look like a checkpoint.
void remove_checkpoint(const std::string& folder, int64_t step) {
  const std::string aside = fmt::format("{}/{}remove-{}", folder, kTemporary, step);
  fs::remove_all(aside);
  fs::rename(checkpoint_path(folder, step), aside);
  fs::remove_all(aside);
}

}  // namespace

std::string config_hash(const ModelConfig& config) { return checksum_of_text(config_to_json(config).dump()); }

std::string checkpoint_path(const std::string& folder, int64_t step) {
  return fmt::format("{}/{}{}", folder, kPrefix, step);
}

std::vector<int64_t> list_checkpoints(const std::string& folder) {
  std::vector<int64_t> steps;
  if (!file_exists(folder)) return steps;
  try {
    for (const std::string& name : files_in(folder)) {
      if (const int64_t step = step_of_name(name); step >= 0) steps.push_back(step);
    }
  } catch (const fs::filesystem_error& error) {
    fail_io("cannot read the folder of checkpoints '{}': {}", folder, error.code().message());
  }
  std::sort(steps.begin(), steps.end());
  return steps;
}

void clean_checkpoints(const std::string& folder) {
  if (!file_exists(folder)) return;
  try {
    for (const std::string& name : files_in(folder)) {
      if (name.starts_with(kTemporary)) fs::remove_all(inside(folder, name));
    }
  } catch (const fs::filesystem_error& error) {
    fail_io("cannot remove what an interrupted run left in '{}': {}", folder, error.code().message());
  }
}

void write_checkpoint(const std::string& folder, const TrainerState& state, const LanguageModel<float>& model,
                      const AdamW& optimizer, const Tokenizer& tokenizer) {
  const std::string aside = fmt::format("{}/{}write-{}", folder, kTemporary, state.step);
  const std::string path = checkpoint_path(folder, state.step);
  try {
    make_folders(folder);
    fs::remove_all(aside);
    make_folders(aside);
    save_trained(aside, model);
    if (model.adapters() != nullptr)
      write_file_atomic(aside + "/config.json", config_to_json(model.config()).dump(2) + "\n");
    tokenizer.save(aside);
    write_moments(aside + "/optimizer.safetensors", model, optimizer);
    write_trainer_json(aside, state);
    for (const std::string& name : files_in(aside)) sync_file(inside(aside, name));
    sync_folder(aside);
    // One that is there already was found damaged (a good one is not written again): the older ones stand for it
    // meanwhile.
    if (file_exists(path)) remove_checkpoint(folder, state.step);
    fs::rename(aside, path);
    sync_folder(folder);
  } catch (const std::exception& error) {
    std::error_code ignored;
    fs::remove_all(aside, ignored);
    fail_io(
        "checkpoint '{}' was not written: {}; the checkpoints before it are untouched, and --resume goes on from them",
        path, error.what());
  }
}

void prune_checkpoints(const std::string& folder, int64_t newest, int64_t keep) {
  std::vector<int64_t> steps = list_checkpoints(folder);
  std::erase_if(steps, [newest](int64_t step) { return step > newest; });
  try {
    for (size_t i = 0; i + static_cast<size_t>(keep) < steps.size(); ++i) remove_checkpoint(folder, steps[i]);
  } catch (const fs::filesystem_error& error) {
    fail_io("cannot remove an old checkpoint in '{}': {}", folder, error.code().message());
  }
}

TrainerState verify_checkpoint(const std::string& path) {
  const std::string file = path + "/trainer.json";
  std::string text = read_file(file, size_t{64} << 20);
  const size_t offset = text.find(kChecksumKey);
  if (offset == std::string::npos || text.size() - offset < kChecksumKey.size() + kNoChecksum.size()) {
    fail_usage("'{}': damaged (no checksum in it, {} bytes long)", file, text.size());
  }
  const std::string expected = text.substr(offset + kChecksumKey.size(), kNoChecksum.size());
  text.replace(offset + kChecksumKey.size(), kNoChecksum.size(), kNoChecksum);
  if (checksum_of_text(text) != expected)
    fail_usage("'{}': damaged (checksum {} expected, {} found)", file, expected, checksum_of_text(text));
  TrainerState state;
  std::map<std::string, std::string> files;
  try {
    const json content = parse_json(text, "'" + file + "'");
    if (content.at("format") != kFormat)
      fail_usage("'{}': format {} expected, {} found: written by another version of fastweight", file, kFormat,
                 content.at("format").dump());
    state = state_from_json(content.at("state"));
    content.at("files").get_to(files);
  } catch (const json::exception& error) {
    fail_usage("'{}': not what fastweight writes: {}", file, error.what());
  }
  const char* const values = state.adapters.empty() ? "model.safetensors" : "adapter_model.safetensors";
  for (const char* name : {"config.json", values, "optimizer.safetensors", "tokenizer.json"}) {
    if (files.count(name) == 0) fail_usage("'{}': does not list {}, which a checkpoint must have", file, name);
  }
  for (const auto& [name, sum] : files) {
    const std::string actual = checksum_of_file(inside(path, name));
    if (actual != sum) fail_usage("'{}/{}': damaged (checksum {} expected, {} found)", path, name, sum, actual);
  }
  return state;
}

MomentFormat moments_of_checkpoint(const std::string& path) {
  const SafetensorsReader moments(path + "/optimizer.safetensors");
  for (const auto& [name, info] : moments.tensors()) {
    if (info.dtype == "BF16") return MomentFormat::kBf16;
  }
  return MomentFormat::kFloat32;
}

void load_checkpoint(const std::string& path, const TrainerState& state, LanguageModel<float>& model,
                     AdamW& optimizer) {
  const bool adapts = model.adapters() != nullptr;
  const SafetensorsReader parameters(path + (adapts ? "/adapter_model.safetensors" : "/model.safetensors")),
      moments(path + "/optimizer.safetensors");
  const std::vector<ParamSpec>& specs = model.trained().specs();
  if (parameters.tensors().size() != specs.size()) {
    fail_usage("'{}': expected the {} parameters of this run's model, got {}", path, specs.size(),
               parameters.tensors().size());
  }
  const AdapterRows rows(model);
  std::vector<float> values;
  const auto read = [&values](const SafetensorsReader& reader, const std::string& name, const ParamSpec& spec,
                              const std::vector<int64_t>& shape) {
    values.resize(static_cast<size_t>(spec.size()));
    reader.read<float>(name, shape, values);
  };
  // Read twice, so that nothing need be held a second time: what can fail does so before anything has changed, and
  // model and optimiser change together or not at all.
  for (const bool write : {false, true}) {
    for (const ParamSpec& spec : specs) {
      read(parameters, adapts ? adapter_tensor(spec) : spec.name, spec, rows.file_shape(spec));
      rows.reorder(spec, values, false);
      if (write) model.trained().write_values(spec, values);
      read(moments, "m." + spec.name, spec, spec.shape);
      if (write) optimizer.write_first(spec.offset, values);
      read(moments, "v." + spec.name, spec, spec.shape);
      if (write) optimizer.write_second(spec.offset, values);
    }
  }
  optimizer.set_updates(state.updates);
}

}  // namespace fw
