#include "model/interop/hf_config.h"

#include <algorithm>
#include <initializer_list>
#include <iterator>
#include <nlohmann/json.hpp>
#include <set>
#include <sstream>
#include <string_view>
#include <vector>

#include "base/error.h"
#include "base/nearest.h"
#include "base/printable.h"
#include "model/interop/hf_types.h"

namespace fw {
namespace {

using Json = nlohmann::json;
using hf::Type;

constexpr const char* kOurs = "fastweight";

constexpr const char* kMambaSsm = "mamba_ssm";

// state-spaces/mamba's configurations name no type.
bool is_mamba_ssm(const Json& config) {
  return config.is_object() && config.find("model_type") == config.end() && config.find("d_model") != config.end();
}

// The type's name: model_type, or that of a mixer in its place.
std::string type_name(const Json& config) {
  const auto text = [](const Json& json, const char* key) {
    const auto it = json.find(key);
    return it != json.end() && it->is_string() ? it->get<std::string>() : std::string();
  };
  const auto mixer = config.find("mixer_override");
  if (mixer != config.end() && mixer->is_object()) return text(*mixer, "type");
  if (is_mamba_ssm(config)) return kMambaSsm;
  return text(config, "model_type");
}

const Type* find_type(const std::string& name) {
  for (const Type& type : hf::types()) {
    if (name == type.name) return &type;
  }
  return nullptr;
}

// The keys of a recurrence where there is none, and of attention where there is none, say nothing.
ModelConfig meaning_of_layers(ModelConfig c) {
  const ModelConfig standard;
  StringList kinds;
  bool attention = false, window = false, conv = false, ssd = false, mamba = false, mesa = false, rwkv7 = false,
       mamba3 = false, mla = false;
  for (int64_t i = 0; i < c.num_hidden_layers; ++i) {
    const LayerKind kind = c.layer_kind(i);
    attention = attention || kind == LayerKind::kAttention;
    window = window || kind == LayerKind::kWindow;
    conv = conv || kind == LayerKind::kConv;
    ssd = ssd || kind == LayerKind::kSsd;
    mamba = mamba || kind == LayerKind::kMamba || kind == LayerKind::kLonghornDiag;
    mesa = mesa || kind == LayerKind::kMesa;
    rwkv7 = rwkv7 || kind == LayerKind::kRwkv7;
    mamba3 = mamba3 || kind == LayerKind::kMamba3;
    mla = mla || kind == LayerKind::kMla;
    const std::string& name = c.layers.empty() ? c.rule : c.layers[static_cast<size_t>(i) % c.layers.size()];
    kinds.push_back(kind == LayerKind::kRecurrent && c.layer_rule(i) == c.rule ? "recurrent" : name);
  }
  const auto resolve = [&](AttentionKeys& keys) {
    const AttentionSpec spec = c.attention_spec(keys, 0);
    keys.num_heads = spec.heads;
    keys.num_kv_heads = spec.kv_heads;
    keys.head_dim = spec.head_dim;
    if (!keys.qk_norm) keys.qk_norm_eps = AttentionKeys().qk_norm_eps;
    if (keys.rope_theta == 0) keys.rope_fraction = 1;
  };
  if (attention) resolve(c.attention);
  if (window) resolve(c.window);
  if (!attention) c.attention = {};
  if (!window) c.window = {};
  if (!conv) c.conv = {};
  if (!ssd) c.ssd = {};
  if (mamba) {
    c.mamba.dt_rank = c.selective_spec(ScanLaw::kMamba).rank;
  } else {
    c.mamba = {};
  }
  if (mesa) {
    const MesaSpec spec = c.mesa_spec();
    c.mesa.num_heads = spec.heads;
    c.mesa.head_dim = spec.dim;
  } else {
    c.mesa = {};
  }
  if (rwkv7) {
    const Rwkv7Spec spec = c.rwkv7_spec(0);
    c.rwkv7 = {spec.dim, spec.decay_rank, spec.rate_rank, spec.value_rank, spec.gate_rank, spec.key_eps};
  } else {
    c.rwkv7 = {};
  }
  if (mamba3) {
    c.mamba3.rotation = c.mamba3_spec().rotate_half ? "halves" : "pairs";
  } else {
    c.mamba3 = {};
  }
  if (mla) {
    c.mla.num_heads = c.mla_spec().heads;
  } else {
    c.mla = {};
  }
  if (c.mlp != "experts") {
    c.experts = {};
  } else {
    c.experts.intermediate_size = c.mlp_spec(c.num_hidden_layers - 1).experts.size;
    c.experts.balance = 0;  // of training alone
    if (c.dense_layers() == 0) c.intermediate_size = c.experts.intermediate_size;
  }
  if (!c.has_recurrence()) {
    ModelConfig plain;
    plain.experts = c.experts;
    plain.layers = c.layers;
    plain.mlp = c.mlp;
    plain.attention = c.attention;
    plain.window = c.window;
    plain.conv = c.conv;
    plain.ssd = c.ssd;
    plain.mamba = c.mamba;
    plain.mesa = c.mesa;
    plain.rwkv7 = c.rwkv7;
    plain.mamba3 = c.mamba3;
    plain.mla = c.mla;
    plain.norm = c.norm;
    plain.embedding_norm = c.embedding_norm;
    plain.vocab_size = c.vocab_size;
    plain.hidden_size = c.hidden_size;
    plain.num_hidden_layers = c.num_hidden_layers;
    plain.intermediate_size = c.intermediate_size;
    plain.hidden_ratio = c.hidden_ratio;
    plain.norm_eps = c.norm_eps;
    plain.tie_word_embeddings = c.tie_word_embeddings;
    c = plain;
  }
  kinds.resize(hf::period(kinds));
  c.layers = kinds == StringList{"recurrent"} ? StringList{} : kinds;
  return c;
}

// What a configuration says, whichever way it says it: two models with equal ones compute the same.
ModelConfig meaning(ModelConfig c) {
  c = meaning_of_layers(std::move(c));
  const Rule rule = c.resolved_rule();
  c.intermediate_size = c.mlp_size();
  c.hidden_ratio = ModelConfig().hidden_ratio;
  c.num_v_heads = c.v_heads();
  c.expand_v = static_cast<double>(c.head_v_dim()) / static_cast<double>(c.head_dim);
  if (!rule.uses_precond()) c.precond_x = ModelConfig().precond_x;
  if (c.output_norm_eps == c.norm_eps) c.output_norm_eps = 0;
  if (c.output_gate_rank == 0) c.output_gate_bias = true;
  // A decay of every value head is one of every key head where they are as many.
  if (c.num_v_heads == c.num_heads) c.decay_per_value_head = false;
  Rule plain = rule;
  if (!rule.uses_precond()) plain.precond_x = Rule().precond_x;
  c.rule = to_string(plain);
  c.allow_neg_eigval = false;
  c.init.clear();
  c.hf.clear();
  return c;
}

struct Difference {
  std::string key;
  Json ours, theirs;
};

std::vector<Difference> differences_of(const ModelConfig& ours, const ModelConfig& theirs) {
  ModelConfig a_copy = ours, b_copy = theirs;
  Json a = Json::object(), b = Json::object();
  keys_to_json(key_tables(a_copy), a);
  keys_to_json(key_tables(b_copy), b);
  std::vector<Difference> list;
  const auto compare = [&](const std::string& prefix, const Json& x, const Json& y) {
    for (const auto& [key, value] : x.items()) {
      if (!value.is_object() && value != y.at(key)) list.push_back({prefix + key, value, y.at(key)});
    }
  };
  compare("", a, b);
  for (const char* part : {"mixer", "ffn"}) {
    for (const auto& [table, keys] : a.at(part).items())
      compare(fmt::format("{}.{}.", part, table), keys, b.at(part).at(table));
  }
  return list;
}

std::string differences(const ModelConfig& ours, const ModelConfig& theirs) {
  std::string text;
  for (const Difference& d : differences_of(ours, theirs)) {
    text += fmt::format("{}{} = {} (here {})", text.empty() ? "" : ", ", d.key, d.theirs.dump(), d.ours.dump());
  }
  return text;
}

// Axes and numbers that one rule has and the other has not.
size_t rule_distance(const ModelConfig& ours, const ModelConfig& theirs) {
  const auto words = [](const std::string& rule) {
    std::set<std::string> all;
    std::istringstream in(rule);
    for (std::string word; in >> word;) all.insert(word);
    return all;
  };
  const std::set<std::string> a = words(ours.rule), b = words(theirs.rule);
  std::vector<std::string> either;
  std::set_symmetric_difference(a.begin(), a.end(), b.begin(), b.end(), std::back_inserter(either));
  return either.size();
}

// An axis of the rule, and the list of layers, weigh more than all other keys.
constexpr size_t kStructure = 1000;

size_t count_differences(const ModelConfig& ours, const ModelConfig& theirs) {
  size_t n = 0;
  for (const Difference& d : differences_of(ours, theirs)) n += d.key == "layers" ? kStructure : 1;
  return n;
}

// What a type's model would be that is as much like a configuration as the type allows.
struct Candidate {
  const Type* type = nullptr;
  Json json;           // the type's configuration
  ModelConfig theirs;  // its meaning
  size_t distance = 0;
};

// Why types do not have these sizes: what the first of them said, and what the one said that is called as the rule is.
struct Obstacles {
  std::string first, own;
};

// The types that have these sizes, the nearest first.
std::vector<Candidate> candidates(const ModelConfig& config, Obstacles& obstacles) {
  const ModelConfig ours = meaning(config);
  std::vector<Candidate> all;
  for (const Type& type : hf::types()) {
    if (type.write == nullptr) continue;
    Candidate candidate{&type, {{"model_type", type.name}}, {}, 0};
    type.write(config, candidate.json);
    if (type.tensor == nullptr && candidate.json.value("model_type", kMambaSsm) != "transformer" && !type.mamba_ssm)
      hf::write_hybrid(config, candidate.json);
    try {
      candidate.theirs = meaning(config_from_hf(candidate.json, type.name));
    } catch (const Error& error) {
      if (obstacles.first.empty()) obstacles.first = error.what();
      if (config.rule == type.name) obstacles.own = error.what();
      continue;
    }
    // A rule that is called as a type is nearest to it, however its layer computes it.
    const size_t axes = config.rule == type.name ? 0 : rule_distance(ours, candidate.theirs);
    candidate.distance = kStructure * axes + count_differences(ours, candidate.theirs);
    all.push_back(std::move(candidate));
  }
  std::stable_sort(all.begin(), all.end(),
                   [](const Candidate& a, const Candidate& b) { return a.distance < b.distance; });
  return all;
}

}  // namespace

bool is_hf_config(const Json& config) {
  if (is_mamba_ssm(config)) return true;
  const auto it = config.is_object() ? config.find("model_type") : config.end();
  return config.is_object() && it != config.end() && it->is_string() && *it != kOurs;
}

std::string unknown_hf_model(const Json& config) {
  const std::string name = type_name(config);
  if (name.empty()) return "a mixer without a type";
  // The one mixer that takes another's place, and only there.
  const auto mixer = config.find("mixer_override");
  const bool replaced = mixer != config.end() && !mixer->is_null();
  if (find_type(name) == nullptr || replaced != (name == "gdn2")) return replaced ? name + " as mixer" : name;
  return "";
}

ModelConfig config_from_hf(const Json& config, const std::string& where, StringList* warnings) {
  if (!is_hf_config(config))
    fail_usage("{}: model_type: expected one of flash-linear-attention, got {}", where,
               shown(config.is_object() ? config.value("model_type", Json()) : config));
  if (const std::string unknown = unknown_hf_model(config); !unknown.empty()) {
    std::vector<std::string> known;
    for (const Type& type : hf::types()) known.emplace_back(type.name);
    std::string near;
    for (const std::string& name : nearest_few(unknown, known, 3))
      near += fmt::format("{}{}", near.empty() ? " (nearest: " : ", ", name);
    fail_usage("{}: model_type: expected one of the {} that docs/conformance.md lists{}, got {}", where, known.size(),
               near.empty() ? "" : near + ")", excerpt(unknown));
  }
  const hf::Keys keys(config, where, warnings);
  ModelConfig c;
  find_type(type_name(config))->read(keys, c);
  if (c.layers.empty() && find_type(type_name(config))->tensor == nullptr) hf::read_hybrid(keys, c);
  keys.finish();
  c.hf = Json{{"config", config}}.dump(-1, ' ', false, Json::error_handler_t::replace);
  try {
    validate(c);
  } catch (const Error& error) {
    throw Error(error.kind(), where + ": " + error.what());
  }
  return c;
}

Json config_to_hf(const ModelConfig& config) {
  validate(config);
  const ModelConfig ours = meaning(config);
  if (!config.hf.empty()) {
    const Json hf = Json::parse(config.hf);
    const auto it = hf.find("config");
    if (it == hf.end())
      fail_usage("config.json: peer: expected a key 'config', as 'fastweight import' writes it, got {}", shown(hf));
    const ModelConfig theirs = meaning(config_from_hf(*it, "config.json: peer.config"));
    if (ours == theirs) return *it;
    fail_usage(
        "config.json: peer.config no longer says what the keys beside it say: {}; remove the key 'peer' to export it "
        "as it is now",
        differences(ours, theirs));
  }
  Obstacles obstacles;
  const std::vector<Candidate> types = candidates(config, obstacles);
  for (const Candidate& type : types) {
    if (ours == type.theirs) return type.json;
  }
  fail_usage("flash-linear-attention has no model that computes this; its nearest is {}, which wants {}",
             types.empty() ? "none" : types.front().type->name,
             types.empty() ? obstacles.first : differences(ours, types.front().theirs));
}

HfLayout hf_layout(const ModelConfig& wanted, const std::vector<std::string>& fixed) {
  validate(wanted);
  const ModelConfig ours = meaning(wanted);
  Obstacles obstacles;
  const std::vector<Candidate> types = candidates(wanted, obstacles);
  if (types.empty()) fail_usage("layout fla: flash-linear-attention has no model of these sizes: {}", obstacles.first);
  const auto same_rule = std::find_if(types.begin(), types.end(), [&](const Candidate& type) {
    return type.theirs.rule == ours.rule && type.theirs.layers == ours.layers;
  });
  if (same_rule == types.end()) {
    fail_usage(
        "layout fla: flash-linear-attention has no layer that computes the rule '{}'; its nearest is {}, which wants "
        "{}. Give that, or train without "
        "the layout and without an export{}",
        wanted.rule, types.front().type->name, differences(ours, types.front().theirs),
        obstacles.own.empty() ? "" : fmt::format(" (not of these sizes: {})", obstacles.own));
  }
  HfLayout layout{same_rule->type->name, wanted, {}};
  Json json = config_to_json(wanted);
  for (const Difference& d : differences_of(ours, same_rule->theirs)) {
    if (std::find(fixed.begin(), fixed.end(), d.key) != fixed.end()) {
      fail_usage("layout fla: {} wants {} = {}, but {} was given: leave {} out, or train without the layout",
                 layout.type, d.key, d.theirs.dump(), d.ours.dump(), d.key);
    }
    layout.changes.push_back(fmt::format("{} = {} (else {})", d.key, d.theirs.dump(), d.ours.dump()));
    std::string pointer = "/" + d.key;
    std::replace(pointer.begin(), pointer.end(), '.', '/');
    json[Json::json_pointer(pointer)] = d.theirs;
  }
  layout.config = config_from_json(json, "layout fla");
  config_to_hf(layout.config);  // says what is missing, should a key not be enough
  return layout;
}

namespace {

// "model.layers.0.attn.D" -> "backbone.layers.0.mixer.D".
std::string backbone_name(const std::string& name, const Type& type) {
  const std::string of_mixer = fmt::format(".{}.", type.norm);
  std::vector<hf::Rename> parts = {{".model.norm.", ".backbone.norm_f."},
                                   {".model.", ".backbone."},
                                   {".attn.", ".mixer."},
                                   {".attn_norm.", of_mixer.c_str()}};
  if (type.mamba_ssm) {
    const std::initializer_list<hf::Rename> more = {{".embeddings.", ".embedding."},
                                                    {".mlp_norm.", ".norm2."},
                                                    {".up_proj.", ".fc1."},
                                                    {".gate_proj.", ".fc1."},
                                                    {".down_proj.", ".fc2."}};
    parts.insert(parts.end(), more);
  }
  std::string result = "." + name;
  for (const hf::Rename& part : parts) {
    const std::string ours = part.ours;
    if (const size_t at = result.find(ours); at != std::string::npos) result.replace(at, ours.size(), part.theirs);
  }
  return result.substr(1);
}

}  // namespace

HfNames::HfNames(const Json& hf_config) : type_(find_type(type_name(hf_config))) {
  if (type_ == nullptr) return;
  if (type_->tensor != nullptr) config_ = config_from_hf(hf_config, "config.json");
  // Anything but false is true: the readers of the types that have these keys checked them.
  const auto holds = [&](const char* key) { return hf_config.value(key, Json(true)) != Json(false); };
  use_output_gate_ = holds("use_output_gate");
  tied_ = holds("tie_embeddings");
}

std::string HfNames::renamed(const std::string& name) const {
  if (type_->norm != nullptr) return backbone_name(name, *type_);
  std::string result = "." + name + ".";
  const auto rename_part = [&](const std::string& ours, const std::string& theirs) {
    const size_t at = result.find(ours);
    if (at != std::string::npos) result.replace(at, ours.size(), theirs);
  };
  for (const hf::Rename& rename : type_->renames) {
    if (rename.ours != nullptr)
      rename_part(fmt::format(".attn.{}.", rename.ours), fmt::format(".attn.{}.", rename.theirs));
  }
  if (type_->mlp != nullptr) {
    rename_part(".mlp.", fmt::format(".{}.", type_->mlp));
    rename_part(".mlp_norm.", fmt::format(".{}_norm.", type_->mlp));
    rename_part(".model.embeddings_norm.", ".model.layers.0.pre_norm.");
  }
  // The norm that is not fused with a gate.
  if (const size_t at = result.find(".g_norm_swish_gate."); at != std::string::npos && !use_output_gate_)
    result.replace(at, 19, ".g_norm.");
  return result.substr(1, result.size() - 2);
}

HfTensor HfNames::tensor(const ParamSpec& spec) const {
  if (type_ == nullptr) return {spec.name};
  if (type_->tensor != nullptr) {
    HfTensor tensor = type_->tensor(config_, spec);
    constexpr std::string_view kModel = "model.";
    if (tensor.name.starts_with(kModel)) tensor.name.replace(0, kModel.size(), type_->prefix);
    return tensor;
  }
  HfTensor tensor{renamed(spec.name)};
  if (!type_->mamba_ssm || tensor.name.find(".mlp.fc1.") == std::string::npos) return tensor;
  // What is gated first, then the gate.
  tensor.rows = 2 * spec.shape[0];
  if (spec.name.find(".gate_proj.") != std::string::npos) tensor.first = spec.shape[0];
  return tensor;
}

HfTensor HfNames::other_tensor(const ParamSpec& spec) const {
  return type_ != nullptr && type_->other_tensor != nullptr ? type_->other_tensor(config_, spec) : HfTensor();
}

std::string HfNames::tied_head() const { return type_ != nullptr && type_->mamba_ssm && tied_ ? "lm_head.weight" : ""; }

bool HfNames::is_aside(const std::string& tensor) const {
  return type_ != nullptr && std::ranges::any_of(type_->aside, [&](const char* begin) {
           return begin != nullptr && tensor.starts_with(begin);
         });
}

}  // namespace fw
