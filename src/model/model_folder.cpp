// Model folders: config.json + model.safetensors, as other programs of the family lay them out.
#include <algorithm>
#include <bit>
#include <charconv>
#include <cstring>
#include <deque>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <type_traits>
#include <unordered_set>
#include <vector>

#include "base/error.h"
#include "base/file.h"
#include "base/json.h"
#include "base/memory.h"
#include "base/nearest.h"
#include "base/plan_device.h"
#include "base/printable.h"
#include "base/python_json.h"
#include "base/safetensors.h"
#include "model/interop/hf_config.h"
#include "model/known_tensors.h"
#include "model/language_model.h"
#include "model/model_files.h"
#include "model/other_tensors.h"

namespace fw {
namespace {

using Json = nlohmann::json;

constexpr size_t kMaxConfigBytes = size_t{1} << 20;
constexpr const char* kHead = "lm_head.weight";
constexpr const char* kTokenizerKey = "fastweight_tokenizer";  // in the metadata of model.safetensors

// A folder's configuration and what its files call our parameters.
struct Folder {
  ModelConfig config;
  Json hf = {};                       // a Hugging Face configuration; null in a folder of ours
  std::optional<HfNames> names = {};  // of that
  HfTensor tensor(const ParamSpec& spec, const ModelFiles& files) const {
    if (!names) return {spec.name};
    HfTensor tensor = names->tensor(spec);
    if (is_in(tensor.name, spec, files)) return tensor;
    HfTensor other = names->other_tensor(spec);
    return !other.name.empty() && is_in(other.name, spec, files) ? other : tensor;
  }
  // Whole, or where it is of all experts as tensors of each.
  static bool is_in(const std::string& name, const ParamSpec& spec, const ModelFiles& files) {
    return files.has(name) || (spec.stacked && files.has(single_experts(name, spec).front().name));
  }
  bool is_aside(const std::string& tensor) const { return names && names->is_aside(tensor); }
};

Json read_json(const std::string& path) {
  return parse_python_config(read_file(path, kMaxConfigBytes), "'" + path + "'");
}

Folder read_config(const std::string& path, StringList* warnings = nullptr) {
  const Json json = read_json(path);
  const std::string where = "'" + path + "'";
  if (!is_hf_config(json)) return {config_from_json(json, where)};
  ModelConfig config = config_from_hf(json, where, warnings);
  return {std::move(config), json, HfNames(json)};
}

// Tensors beside the parameters: a head that is the embedding, and tables of the rotary embedding. They must say what
// the configuration says.
bool is_known(const ModelFiles& files, const std::string& name, const ModelConfig& config) {
  return (config.tie_word_embeddings && name == kHead) || is_rotary_table(files, name, config);
}

std::vector<int64_t> without_ones(const std::vector<int64_t>& shape) {
  std::vector<int64_t> result;
  std::copy_if(shape.begin(), shape.end(), std::back_inserter(result), [](int64_t n) { return n != 1; });
  return result;
}

// The shape that the file has a parameter in. A Hugging Face file's may have other dimensions of 1 (A_log [1, 1, H,
// 1]).
std::vector<int64_t> shape_in_file(const Folder& folder, const ModelFiles& reader, const std::string& name,
                                   const std::vector<int64_t>& shape) {
  const auto it = reader.tensors().find(name);
  if (folder.hf.is_null() || it == reader.tensors().end() || without_ones(it->second.shape) != without_ones(shape))
    return shape;
  return it->second.shape;
}

void expect_no_f64(const ModelFiles& reader, const std::string& name, const TensorInfo& info) {
  if (info.dtype != "F64") return;
  fail_usage("'{}': {}: expected F32, BF16 or F16, got F64, which does not fit this program's parameters",
             reader.name(), name);
}

// The type of a tensor for each expert's matrix, by the name that one tensor of all would have; of those of another
// type than the first by their own.
void remember_experts(Json& tensors, const std::string& name, const std::vector<HfPart>& parts,
                      const ModelFiles& reader) {
  std::string first;
  for (const HfPart& part : parts) {
    const auto it = reader.tensors().find(part.name);
    if (it == reader.tensors().end()) continue;  // read() says so
    const TensorInfo& info = it->second;
    expect_no_f64(reader, part.name, info);
    if (first.empty()) {
      first = info.dtype;
      tensors[name]["dtype"] = first;
    } else if (info.dtype != first) {
      tensors[part.name]["dtype"] = info.dtype;
    }
  }
}

// What an export needs to give back imported tensors as they were.
void remember_tensors(ModelConfig& config, const Folder& folder, const ModelFiles& reader,
                      std::span<const ParamSpec> specs) {
  Json tensors = Json::object(), other_names = Json::object(), single = Json::array();
  for (const ParamSpec& spec : specs) {
    const HfTensor tensor = folder.tensor(spec, reader);
    const std::string& name = tensor.name;
    if (name != folder.names->tensor(spec).name) other_names[spec.name] = name;
    if (spec.stacked && !reader.has(name)) {
      single.push_back(spec.name);
      remember_experts(tensors, name, single_experts(name, spec), reader);
      continue;
    }
    const auto it = reader.tensors().find(name);
    if (it == reader.tensors().end()) continue;  // read() says so
    const TensorInfo& info = it->second;
    expect_no_f64(reader, name, info);
    if (info.dtype != "F32") tensors[name]["dtype"] = info.dtype;
    if (info.shape != whole_shape(tensor, spec)) tensors[name]["shape"] = info.shape;
  }
  if (tensors.empty() && other_names.empty() && single.empty()) return;
  Json hf = Json::parse(config.hf);
  if (!tensors.empty()) hf["tensors"] = tensors;
  if (!other_names.empty()) hf["other_names"] = other_names;
  if (!single.empty()) hf["single_experts"] = single;
  config.hf = hf.dump();
}

// The ids that end a text by generation_config.json go with the model, into checkpoints too.
void remember_ends(ModelConfig& config, const std::string& folder) {
  const std::vector<int64_t> ends = generation_ends(folder);
  if (ends.empty()) return;
  Json hf = Json::parse(config.hf);
  hf["end_tokens"] = ends;
  config.hf = hf.dump();
}

// Type and shape that a parameter had in the imported file, as remember_tensors() noted them.
std::pair<std::string, std::vector<int64_t>> as_it_was(const Json& tensors, const std::string& name,
                                                       const std::vector<int64_t>& own) {
  try {
    const Json tensor = tensors.value(name, Json::object());
    const std::vector<int64_t> shape = tensor.value("shape", own);
    if (without_ones(shape) != without_ones(own)) {
      fail_usage("config.json: peer.tensors.{}.shape: expected the parameter's with other dimensions of 1, got {}",
                 name, tensor["shape"].dump());
    }
    return {tensor.value("dtype", "F32"), shape};
  } catch (const Json::exception& error) {
    fail_usage("config.json: peer.tensors: expected what 'fastweight import' writes, got something else: {}",
               error.what());
  }
}

// The bits of x as bfloat16 or half precision; none when it is not exactly one.
std::optional<uint16_t> as_bf16(float x) {
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  if ((bits & 0xffffu) != 0) return std::nullopt;
  return static_cast<uint16_t>(bits >> 16);
}

std::optional<uint16_t> as_f16(float x) {
  const uint32_t bits = std::bit_cast<uint32_t>(x), sign = bits >> 16 & 0x8000u, fraction = bits & 0x7fffffu;
  const int exponent = static_cast<int>(bits >> 23 & 0xffu) - 127;
  const auto shifted = [](uint32_t value, int by) -> std::optional<uint32_t> {
    if (by > 24 || (value & ((1u << by) - 1)) != 0) return std::nullopt;
    return value >> by;
  };
  std::optional<uint32_t> magnitude;
  if (exponent == -127) {
    if (fraction == 0) magnitude = 0;  // zero; a float's subnormal is below a half's
  } else if (exponent > 15) {          // infinity and NaN have 128
    if (exponent == 128 && shifted(fraction, 13)) magnitude = 0x7c00u | fraction >> 13;
  } else if (exponent >= -14) {
    if (shifted(fraction, 13)) magnitude = static_cast<uint32_t>(exponent + 15) << 10 | fraction >> 13;
  } else {
    magnitude = shifted(0x800000u | fraction, -1 - exponent);
  }
  if (!magnitude) return std::nullopt;
  return static_cast<uint16_t>(sign | *magnitude);
}

// Parameters as tensors of a file: f32, or f16 or bf16 where every value is one of those. Owns what it converted until
// write().
class TensorWriter {
 public:
  void add(const std::string& name, const std::string& dtype, const std::vector<int64_t>& shape,
           std::span<const float> values) {
    std::vector<uint16_t> fp16;
    if (dtype == "BF16" || dtype == "F16") {
      for (const float x : values) {
        const std::optional<uint16_t> half = dtype == "BF16" ? as_bf16(x) : as_f16(x);
        if (!half) break;
        fp16.push_back(*half);
      }
    }
    if (fp16.empty() || fp16.size() != values.size()) {
      writer_.add<float>(name, shape, values);
      return;
    }
    fp16_.push_back(std::move(fp16));
    writer_.add(name, dtype, shape, std::as_bytes(std::span(fp16_.back())));
  }
  void write(const std::string& path, const OtherTensors* others) {
    if (others != nullptr) others->add_to(writer_);
    writer_.set_metadata("format", "pt");  // what loaders of the Hugging Face family look for
    writer_.write(path);
  }

 private:
  SafetensorsWriter writer_;
  std::deque<std::vector<uint16_t>> fp16_;
};

// What save_model() wrote; 0 in files of other programs and of before.
uint64_t saved_tokenizer(const ModelFiles& reader) {
  const auto it = reader.metadata().find(kTokenizerKey);
  if (it == reader.metadata().end()) return 0;
  const std::string& text = it->second;
  uint64_t checksum = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), checksum, 16);
  if (error != std::errc() || end != text.data() + text.size())
    fail_usage("'{}': metadata: {}: expected 16 hexadecimal digits, got something else", reader.name(), kTokenizerKey);
  return checksum;
}

}  // namespace

template <class T>
void save_model(const std::string& folder, const LanguageModel<T>& model) {
  make_folders(folder);
  SafetensorsWriter writer;
  writer.set_metadata("format", "pt");
  if (model.tokenizer() != 0) writer.set_metadata(kTokenizerKey, fmt::format("{:016x}", model.tokenizer()));
  const Params<T>& params = model.params();
  std::deque<HostView<T>> views;  // and what they are in float32 live until the file is written
  std::deque<std::vector<float>> converted;
  for (const ParamSpec& spec : params.specs()) {
    const std::span<const T> values = views.emplace_back(params.host_values(spec)).span();
    if constexpr (std::is_same_v<T, float>) {
      writer.add<float>(spec.name, spec.shape, values);
    } else {
      std::vector<float>& rounded = converted.emplace_back(values.size());
      std::transform(values.begin(), values.end(), rounded.begin(), [](T x) { return static_cast<float>(x); });
      writer.add<float>(spec.name, spec.shape, rounded);
    }
  }
  writer.write(folder + "/model.safetensors");
  write_file_atomic(folder + "/config.json", config_to_json(model.config()).dump(2) + "\n");
}

ModelConfig read_model_config(const std::string& folder, StringList* warnings) {
  return read_config(folder + "/config.json", warnings).config;
}

std::vector<int64_t> generation_ends(const std::string& folder) {
  const std::string path = folder + "/generation_config.json";
  if (!file_exists(path)) return {};
  const Json json = read_json(path);
  if (!json.is_object()) fail_usage("'{}': expected an object, got {}", path, shown(json));
  const auto found = json.find("eos_token_id");
  if (found == json.end() || found->is_null()) return {};
  std::vector<int64_t> ids;
  for (const Json& id : found->is_array() ? *found : Json::array({*found})) {
    if (!id.is_number_integer() || id.get<double>() < -1 || id.get<double>() > 2147483647.0) {
      fail_usage("'{}': eos_token_id: expected an id or a list of ids, got {}", path, shown(*found));
    }
    ids.push_back(id.get<int64_t>());
  }
  return ids;
}

bool is_hf_folder(const std::string& folder) { return is_hf_config(read_json(folder + "/config.json")); }

void export_model(const std::string& folder, const LanguageModel<float>& model, int32_t end_of_text,
                  const OtherTensors* others) {
  Json config = config_to_hf(model.config());
  if (model.config().hf.empty() && config.contains("model_type")) {
    config["eos_token_id"] = end_of_text >= 0 ? Json(end_of_text) : Json();
    for (const char* key : {"bos_token_id", "pad_token_id"}) config[key] = Json();
  }
  TensorWriter writer;
  std::deque<HostView<float>> views;
  struct Shared {
    std::vector<float> values;
    int64_t filled = 0;
  };
  std::map<std::string, Shared> shared;  // tensors of several parameters
  const HfNames names(config);
  const Json hf = model.config().hf.empty() ? Json::object() : Json::parse(model.config().hf);
  const Json other_names = hf.value("other_names", Json::object()), was = hf.value("tensors", Json::object()),
             single = hf.value("single_experts", Json::array());
  for (const ParamSpec& spec : model.params().specs()) {
    HfTensor tensor = names.tensor(spec);
    if (const auto other = other_names.find(spec.name); other != other_names.end()) {
      tensor = names.other_tensor(spec);
      if (tensor.name.empty() || *other != tensor.name)
        fail_usage("config.json: peer.other_names.{}: expected {}, got {}", spec.name,
                   tensor.name.empty() ? "no such key" : tensor.name, shown(*other));
    }
    const auto [dtype, shape] = as_it_was(was, tensor.name, whole_shape(tensor, spec));
    std::span<const float> values = views.emplace_back(model.params().host_values(spec)).span();
    const bool by_expert = std::any_of(single.begin(), single.end(), [&](const Json& one) { return one == spec.name; });
    if (spec.stacked && by_expert) {
      for (const HfPart& part : single_experts(tensor.name, spec)) {
        const std::string type = was.contains(part.name) ? as_it_was(was, part.name, part.shape).first : dtype;
        writer.add(part.name, type, part.shape,
                   values.subspan(static_cast<size_t>(part.first), static_cast<size_t>(part.shape[0] * part.shape[1])));
      }
      continue;
    }
    if (tensor.rows > 0) {
      Shared& whole = shared[tensor.name];
      whole.values.resize(static_cast<size_t>(tensor.rows * spec.size() / spec.shape[0]));
      put_part<float>(tensor, spec, values, whole.values);
      whole.filled += spec.size();
      if (whole.filled < static_cast<int64_t>(whole.values.size())) continue;  // other parts come
      values = whole.values;
    }
    writer.add(tensor.name, dtype, shape, values);
    // The embedding is declared first, and is the head where there is none.
    const std::string head = &spec == model.params().specs().data() ? names.tied_head() : "";
    if (!head.empty()) writer.add(head, dtype, shape, values);
  }
  make_folders(folder);
  writer.write(folder + "/model.safetensors", others);
  write_file_atomic(folder + "/config.json", config.dump(2) + "\n");
}

namespace {

// Where the values of a parameter lie in the files.
struct WeightSource {
  HfTensor tensor;
  std::vector<int64_t> shape;  // of the tensor as the file has it
  std::vector<HfPart> parts;   // experts one by one in its place
};

WeightSource source_of(const Folder& folder, const ModelFiles& files, const ParamSpec& spec) {
  WeightSource source;
  source.tensor = folder.tensor(spec, files);
  source.shape = shape_in_file(folder, files, source.tensor.name, whole_shape(source.tensor, spec));
  if (folder.hf.is_null() || !spec.stacked || files.has(source.tensor.name)) return source;
  std::vector<HfPart> single = single_experts(source.tensor.name, spec);
  if (files.has(single.front().name)) source.parts = std::move(single);
  return source;
}

// Whether all operands of products are bf16 in the files.
bool only_bf16(const Folder& folder, const ModelFiles& files) {
  const auto is_bf16 = [&](const std::string& name) {
    const auto found = files.tensors().find(name);
    return found != files.tensors().end() && found->second.dtype == "BF16";
  };
  PlanDevice device;
  const LanguageModel<float> planned(folder.config, device);
  return std::ranges::all_of(planned.params().specs(), [&](const ParamSpec& spec) {
    if (!spec.operand()) return true;
    const WeightSource source = source_of(folder, files, spec);
    if (source.parts.empty()) return is_bf16(source.tensor.name);
    return std::ranges::all_of(source.parts, [&](const HfPart& part) { return is_bf16(part.name); });
  });
}

// Calls body(bytes, first value) for the tensors of the source, if all are of this type and the parameter's values in
// their order. Returns whether they are.
template <class Body>
bool for_tensors(const WeightSource& source, const ModelFiles& files, const ParamSpec& spec, const char* dtype,
                 const Body& body) {
  if (source.tensor.rows > 0) return false;
  std::vector<std::pair<std::span<const std::byte>, int64_t>> found;
  const auto add = [&](const std::string& name, std::span<const int64_t> shape, int64_t first) {
    if (files.bytes_of(name, dtype, shape) == nullptr) return false;
    found.emplace_back(files.tensors().at(name).bytes, first);
    return true;
  };
  bool all = true;
  for (const HfPart& part : source.parts) all = all && add(part.name, part.shape, part.first);
  if (source.parts.empty()) all = add(source.tensor.name, source.shape, 0);
  if (!all || spec.size() == 0) return false;
  for (const auto& [bytes, first] : found) body(bytes, first);
  return true;
}

template <class T>
void read_values(const WeightSource& source, const ModelFiles& files, std::span<T> out) {
  for (const HfPart& part : source.parts) {
    const int64_t count = part.shape[0] * part.shape[1];
    files.read<T>(part.name, part.shape, out.subspan(static_cast<size_t>(part.first), static_cast<size_t>(count)));
  }
  if (source.parts.empty()) files.read<T>(source.tensor.name, source.shape, out);
}

// Straight into the parameter where it takes the values as they are; `values` is what else they pass.
template <class T>
void read_parameter(const WeightSource& source, const ModelFiles& files, const ParamSpec& spec, Params<T>& params,
                    std::vector<T>& values) {
  const HfTensor& tensor = source.tensor;
  if (params.takes_bf16(spec) && for_tensors(source, files, spec, "BF16", [&](auto bytes, int64_t first) {
        params.write_bf16(spec, first, bytes);
      })) {
    for (const HfPart& part : source.parts) files.forget(part.name);
    if (source.parts.empty()) files.forget(tensor.name);
    return;
  }
  if (tensor.rows == 0) {
    if (const std::span<T> own = params.values_in_place(spec); !own.empty()) return read_values(source, files, own);
  }
  values.resize(static_cast<size_t>(tensor.rows > 0 ? tensor.rows * spec.size() / spec.shape[0] : spec.size()));
  read_values<T>(source, files, values);
  if (tensor.rows > 0) {
    params.write_values(spec, part_of<T>(tensor, spec, values));
  } else {
    params.write_values(spec, values);
  }
}

}  // namespace

template <class T>
LanguageModel<T> load_model(const std::string& folder, Device& device, LoadFor use) {
  Folder source = read_config(folder + "/config.json");
  const ModelFiles reader(folder);
  const std::string& path = reader.name();
  double found = 0;
  for (const auto& [name, info] : reader.tensors()) found += static_cast<double>(info.count());
  // Before memory is taken: a configuration that has little to do with the file beside it.
  const double expected = parameter_count(source.config);
  if (expected > 2 * found + 1e6)
    fail_usage("'{}': expected {:.0f} values for the configuration beside it, got {:.0f}", path, expected, found);

  const bool keeps_bf16 =
      std::is_same_v<T, float> && use == LoadFor::kForward && !only_plans(device) && only_bf16(source, reader);
  if (device.host_memory())
    require_memory(
        expected * static_cast<double>(keeps_bf16 ? sizeof(Bf16) : sizeof(T)), fmt::format("the model '{}'", folder),
        "it wants a machine with more; --no-check-memory, of the commands that run models, tries all the same");
  LanguageModel<T> model(source.config, device, keeps_bf16 ? MasterFormat::kBf16 : MasterFormat::kBf16PlusLow);
  model.set_tokenizer(saved_tokenizer(reader));
  Params<T>& params = model.params();
  std::vector<WeightSource> sources;
  std::vector<std::string> names;
  std::unordered_set<std::string> known;
  for (const ParamSpec& spec : params.specs()) {
    const WeightSource& of = sources.emplace_back(source_of(source, reader, spec));
    names.push_back(of.tensor.name);
    known.insert(of.tensor.name);
    for (const HfPart& part : of.parts) known.insert(part.name);
  }
  for (const auto& [name, info] : reader.tensors()) {
    if (known.count(name) != 0 || source.is_aside(name) || is_known(reader, name, source.config)) continue;
    const std::string near = nearest(name, names);
    fail_usage("'{}': unexpected tensor '{}': the configuration beside it has no such parameter{}", path, excerpt(name),
               near.empty() ? "" : fmt::format(" (nearest: '{}')", near));
  }
  std::vector<T> values;
  for (size_t i = 0; i < names.size(); ++i) {
    const ParamSpec& spec = params.specs()[i];
    read_parameter(sources[i], reader, spec, params, values);
    // The embedding is declared first, and is the head where there is none.
    if (i > 0 || !source.config.tie_word_embeddings || !reader.has(kHead)) continue;
    std::vector<T> of_head(static_cast<size_t>(spec.size()));
    reader.read<T>(kHead, shape_in_file(source, reader, kHead, whole_shape(sources[i].tensor, spec)), of_head);
    if (!std::ranges::equal(params.host_values(spec).span(), of_head)) {
      fail_usage(
          "'{}': {}: expected the embedding's values, as {} = true says, got others: set the key to false where the "
          "head is a matrix of its own",
          path, kHead, source.hf.contains("tie_embeddings") ? "tie_embeddings" : "tie_word_embeddings");
    }
  }
  if (!source.hf.is_null()) {
    remember_ends(source.config, folder);
    remember_tensors(source.config, source, reader, params.specs());
    model.set_hf(source.config.hf);
  }
  return model;
}

template void save_model<float>(const std::string&, const LanguageModel<float>&);
template void save_model<double>(const std::string&, const LanguageModel<double>&);
template LanguageModel<float> load_model<float>(const std::string&, Device&, LoadFor);
template LanguageModel<double> load_model<double>(const std::string&, Device&, LoadFor);

}  // namespace fw
