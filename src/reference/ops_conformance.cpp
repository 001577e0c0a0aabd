#include "reference/ops_conformance.h"

#include <cmath>
#include <map>
#include <set>

#include "base/error.h"
#include "base/safetensors.h"
#include "base/stop.h"
#include "reference/header_run.h"
#include "reference/mesa.h"

namespace fw {
namespace {

// An input of the reference as the file calls it.
struct Input {
  const char* tensor;
  const char* field;
};

class OpsFile;

// A gradient that the file has of something that an input was made of.
struct DerivedGradient {
  const char* tensor;  // "f", whose gradient is the file's d_f
  std::vector<double> values;
};

struct VectorRule {
  const char* name;
  const char* axes;  // raw q and k: they come normalised
  std::vector<Input> inputs;
  // Inputs that a few lines of a layer make of the file's tensors, and the gradients of those tensors from the
  // recurrence's; null: none.
  void (*derive)(const OpsFile&, const std::string& prefix, ReferenceProblem&) = nullptr;
  std::vector<DerivedGradient> (*derived_gradients)(const OpsFile&, const std::string& prefix, const ReferenceProblem&,
                                                    const ReferenceInputs&) = nullptr;
  double scale = 0;  // of the read; 0: K^-1/2
};

void derive_hgrn2(const OpsFile& file, const std::string& prefix, ReferenceProblem& p);
std::vector<DerivedGradient> hgrn2_gradients(const OpsFile& file, const std::string& prefix, const ReferenceProblem& p,
                                             const ReferenceInputs& d);
void derive_dplr(const OpsFile& file, const std::string& prefix, ReferenceProblem& p);
std::vector<DerivedGradient> dplr_gradients(const OpsFile& file, const std::string& prefix, const ReferenceProblem& p,
                                            const ReferenceInputs& d);
void derive_rwkv7(const OpsFile& file, const std::string& prefix, ReferenceProblem& p);
std::vector<DerivedGradient> rwkv7_gradients(const OpsFile& file, const std::string& prefix, const ReferenceProblem& p,
                                             const ReferenceInputs& d);

// What every rule has, and what some have.
const std::vector<Input>& common_inputs() {
  static const std::vector<Input> list = {
      {"q", "q"}, {"k", "k"}, {"v", "v"}, {"S0", "initial_state"}, {"A0", "initial_precond"}};
  return list;
}

const std::vector<VectorRule>& vector_rules() {
  static const Input g{"g", "g"}, beta{"beta", "beta"}, erase{"b", "erase_gate"}, write{"w", "write_gate"};
  static const Input decay{"g_atk", "precond_g"}, gain{"beta_atk", "precond_beta"},
      center{"log_atk_scale", "precond_center"};
  static const Input low_rank{"b", "erase_write"};
  static constexpr const char* kDplr = "decay=channel erase_key=own erase_state=previous erase_write=own";
  static const std::vector<VectorRule> list = {
      {"linear_attn", "update=additive", {}},
      {"mamba2", "decay=scalar update=additive", {g}},
      {"gla", "decay=channel update=additive", {g}},
      {"gdn", "decay=scalar gain=gate", {g, beta}},
      {"gdn_raw_keys", "decay=scalar gain=gate", {g, beta}},
      {"kda", "decay=channel gain=gate", {g, beta}},
      {"gdn2", "decay=channel erase=channel write=channel", {g, erase, write}},
      {"gdn2_neg", "decay=channel erase=channel write=channel gain_bound=2", {g, erase, write}},
      {"pgdn", "decay=scalar gain=gate precond=diagonal", {g, beta, decay, gain, center}},
      {"pkda", "decay=channel gain=gate precond=diagonal", {g, beta, decay, gain, center}},
      {"comba", "decay=scalar gain=gate erase_key=own", {g, beta, {"p", "erase_key"}}},
      {"comba_previous", "decay=scalar gain=gate erase_key=own erase_state=previous", {g, beta, {"p", "erase_key"}}},
      {"qdelta", "decay=scalar gain=gate feedback=learned", {g, beta, {"lam", "lambda"}}},
      {"hgrn2", "decay=channel update=additive key_source=decay", {}, derive_hgrn2, hgrn2_gradients},
      {"dplr", kDplr, {g, low_rank}, derive_dplr, dplr_gradients},
      {"dplr_hard", kDplr, {g, low_rank}, derive_dplr, dplr_gradients},
      {"rwkv7", kDplr, {{"r", "q"}}, derive_rwkv7, rwkv7_gradients, 1},
  };
  return list;
}

// In bf16 the denominator of a gradient is at least this share of all gradients of the case together. The reason is the
// gradient of the preconditioner's centre, which is 1e-3 of them. It is a sum over tokens that all but cancels, which
// inputs of 8 bits cannot give to two digits.
constexpr double kBf16Floor = 1e-2;

constexpr Input kOutputs[] = {{"o", "o"}, {"S", "final_state"}, {"A", "final_precond"}};

template <class Struct>
std::vector<double> Struct::*field_of(std::span<const ReferenceField<Struct>> fields, std::string_view name) {
  for (const auto& field : fields) {
    if (name == field.name) return field.values;
  }
  fail_internal("conformance cases: the reference has no field {}", name);
}

class OpsFile {
 public:
  explicit OpsFile(const std::string& path) : path_(path), reader_(path) {
    for (const auto& [name, info] : reader_.tensors()) {
      const size_t first = name.find('/'), last = name.rfind('/');
      if (first == std::string::npos || first == last || first == 0 || last == name.size() - 1) {
        fail_usage("'{}': expected tensors <rule>/<case>/<tensor>, got '{}'", path, name);
      }
      cases_[name.substr(0, first)].insert(name.substr(first + 1, last - first - 1));
    }
    if (cases_.empty()) fail_usage("'{}': expected tensors <rule>/<case>/<tensor>, got none", path);
  }

  const std::map<std::string, std::set<std::string>>& cases() const { return cases_; }
  bool has(const std::string& name) const { return reader_.has(name); }
  const std::vector<int64_t>& shape(const std::string& name, size_t rank) const {
    const auto it = reader_.tensors().find(name);
    if (it == reader_.tensors().end()) fail_usage("'{}': tensor '{}' is missing", path_, name);
    if (it->second.shape.size() != rank)
      fail_usage("'{}': {}: expected {} dimensions, got {}", path_, name, rank, it->second.shape.size());
    return it->second.shape;
  }
  std::vector<double> read(const std::string& name, int64_t count) const {
    const auto it = reader_.tensors().find(name);
    if (it == reader_.tensors().end()) fail_usage("'{}': tensor '{}' is missing", path_, name);
    if (it->second.count() != count)
      fail_usage("'{}': {}: expected {} values for the sizes of q and v, got {}", path_, name, count,
                 it->second.count());
    std::vector<double> values(static_cast<size_t>(count));
    reader_.read<double>(name, it->second.shape, values);
    return values;
  }
  // Where `got` is furthest from what the file says.
  std::string furthest(const std::string& name, const std::string& short_name, std::span<const double> got,
                       std::span<const double> expected) const {
    return furthest_element(short_name, reader_.tensors().at(name).shape, got, expected);
  }

 private:
  std::string path_;
  SafetensorsReader reader_;
  std::map<std::string, std::set<std::string>> cases_;
};

// HGRN2: exp g = b + (1 - b) sigmoid(f) with the lower bound b [H, K].
void derive_hgrn2(const OpsFile& file, const std::string& prefix, ReferenceProblem& p) {
  const int64_t channels = p.shape.H * p.shape.K;
  const std::vector<double> f = file.read(prefix + "f", p.shape.sequences.tokens() * channels),
                            b = file.read(prefix + "lower_bound", channels);
  p.in.g.resize(f.size());
  for (size_t i = 0; i < f.size(); ++i) p.in.g[i] = std::log1p(-(1 - b[i % b.size()]) / (1 + std::exp(f[i])));
}

std::vector<DerivedGradient> hgrn2_gradients(const OpsFile& file, const std::string& prefix, const ReferenceProblem& p,
                                             const ReferenceInputs& d) {
  const int64_t channels = p.shape.H * p.shape.K;
  const std::vector<double> f = file.read(prefix + "f", p.shape.sequences.tokens() * channels),
                            b = file.read(prefix + "lower_bound", channels);
  std::vector<double> df(f.size()), db(b.size());
  for (size_t i = 0; i < f.size(); ++i) {
    const double s = 1 / (1 + std::exp(-f[i])), dalpha = d.g[i] / std::exp(p.in.g[i]);
    df[i] = dalpha * (1 - b[i % b.size()]) * s * (1 - s);
    db[i % b.size()] += dalpha * (1 - s);
  }
  return {{"f", df}, {"lower_bound", db}};
}

// S += b (a^T S): a is the erase key with the other sign.
void derive_dplr(const OpsFile& file, const std::string& prefix, ReferenceProblem& p) {
  p.in.erase_key = file.read(prefix + "a", p.shape.sequences.tokens() * p.shape.H * p.shape.K);
  for (double& x : p.in.erase_key) x = -x;
}

std::vector<DerivedGradient> dplr_gradients(const OpsFile&, const std::string&, const ReferenceProblem&,
                                            const ReferenceInputs& d) {
  std::vector<double> da = d.erase_key;
  for (double& x : da) x = -x;
  return {{"a", da}};
}

// RWKV-7: log-decay -exp(w), erase key kk, taken away along kk a.
void derive_rwkv7(const OpsFile& file, const std::string& prefix, ReferenceProblem& p) {
  const int64_t count = p.shape.sequences.tokens() * p.shape.H * p.shape.K;
  p.in.g = file.read(prefix + "w", count);
  for (double& x : p.in.g) x = -std::exp(x);
  p.in.erase_key = file.read(prefix + "kk", count);
  p.in.erase_write = file.read(prefix + "a", count);
  for (size_t i = 0; i < p.in.g.size(); ++i) p.in.erase_write[i] *= p.in.erase_key[i];
}

std::vector<DerivedGradient> rwkv7_gradients(const OpsFile& file, const std::string& prefix, const ReferenceProblem& p,
                                             const ReferenceInputs& d) {
  const std::vector<double> a = file.read(prefix + "a", static_cast<int64_t>(d.g.size()));
  std::vector<double> dw(a.size()), dkk(a.size()), da(a.size());
  for (size_t i = 0; i < a.size(); ++i) {
    dw[i] = d.g[i] * p.in.g[i];
    dkk[i] = d.erase_key[i] + d.erase_write[i] * a[i];
    da[i] = d.erase_write[i] * p.in.erase_key[i];
  }
  return {{"w", dw}, {"kk", dkk}, {"a", da}};
}

ReferenceProblem read_problem(const OpsFile& file, const VectorRule& rule, const std::string& prefix) {
  ReferenceProblem p;
  p.rule = parse_rule(rule.axes);
  std::map<std::string_view, const char*> tensor_of;
  for (const Input& input : common_inputs()) tensor_of[input.field] = input.tensor;
  for (const Input& input : rule.inputs) tensor_of[input.field] = input.tensor;
  const std::vector<int64_t>& q = file.shape(prefix + tensor_of.at("q"), 4);
  const std::vector<int64_t>& v = file.shape(prefix + "v", 4);
  p.shape.sequences = SeqLayout::uniform(q[0], q[1]);
  p.shape.H = q[2];
  p.shape.HV = v[2];
  p.shape.K = q[3];
  p.shape.V = v[3];
  p.shape.scale = rule.scale;
  if (p.rule.decay == Decay::kChannel && rule.derive == nullptr) p.shape.g_heads = file.shape(prefix + "g", 4)[2];
  if (rule.derive != nullptr) rule.derive(file, prefix, p);
  for (const auto& field : reference_input_fields()) {
    const int64_t count = field.count(p.rule, p.shape);
    if (!(p.in.*field.values).empty()) continue;  // derived
    const auto tensor = tensor_of.find(field.name);
    if (count == 0 && field.shape(p.rule, p.shape).empty()) continue;
    if (tensor == tensor_of.end())
      fail_internal("conformance cases: rule {} has an input {} without a name in the file", rule.name, field.name);
    const std::string name = prefix + tensor->second;
    if (field.optional && !file.has(name)) continue;
    p.in.*field.values = file.read(name, count);
  }
  for (const auto& [tensor, field] : {Input{"do", "o"}, Input{"dS", "final_state"}}) {
    const auto& fields = reference_output_fields();
    for (const auto& f : fields) {
      if (std::string_view(f.name) == field && file.has(prefix + tensor))
        p.d.*f.values = file.read(prefix + tensor, f.count(p.rule, p.shape));
    }
  }
  return p;
}

// The worst of several tensors.
struct Worst {
  double error = -1;
  std::string where = "nothing to compare";
  void add(const OpsFile& file, const std::string& name, const std::string& short_name, std::span<const double> got,
           double floor) {
    const std::vector<double> expected = file.read(name, static_cast<int64_t>(got.size()));
    const double e = relative_error(got, expected, floor);
    if (e <= error) return;
    error = e;
    where = file.furthest(name, short_name, got, expected);
  }
};

// Outputs and gradients of one rule, over all its cases.
template <class Forward, class Backward>
void compare_rule(const OpsFile& file, const VectorRule& rule, const std::set<std::string>& cases, const char* what,
                  ConformanceType type, const Forward& forward, const Backward& backward,
                  std::vector<Comparison>& found) {
  Worst outputs, gradients;
  for (const std::string& one : cases) {
    const std::string prefix = fmt::format("{}/{}/", rule.name, one);
    const ReferenceProblem p = read_problem(file, rule, prefix);
    const ReferenceOutputs out = forward(p);
    for (const Input& output : kOutputs) {
      const std::vector<double>& got = out.*field_of(reference_output_fields(), output.field);
      if (file.has(prefix + output.tensor))
        outputs.add(file, prefix + output.tensor, fmt::format("{}/{}", one, output.tensor), got, 0);
    }
    const ReferenceInputs d = backward(p);
    std::vector<Input> inputs = common_inputs();
    inputs.insert(inputs.end(), rule.inputs.begin(), rule.inputs.end());
    std::erase_if(inputs, [&](const Input& input) { return !file.has(prefix + "d_" + input.tensor); });
    double square = 0;
    for (const Input& input : inputs)
      square += std::pow(euclidean_norm(d.*field_of(reference_input_fields(), input.field)), 2);
    const double floor = type == ConformanceType::kBf16 ? kBf16Floor * std::sqrt(square) : 0;
    for (const Input& input : inputs) {
      const std::string tensor = std::string("d_") + input.tensor;
      gradients.add(file, prefix + tensor, fmt::format("{}/{}", one, tensor),
                    d.*field_of(reference_input_fields(), input.field), floor);
    }
    if (rule.derived_gradients == nullptr) continue;
    for (const DerivedGradient& derived : rule.derived_gradients(file, prefix, p, d)) {
      const std::string tensor = std::string("d_") + derived.tensor;
      gradients.add(file, prefix + tensor, fmt::format("{}/{}", one, tensor), derived.values, floor);
    }
  }
  found.push_back({rule.name, fmt::format("outputs, {}", what), outputs.error, ops_bound(type), outputs.where, ""});
  found.push_back(
      {rule.name, fmt::format("gradients, {}", what), gradients.error, ops_bound(type), gradients.where, ""});
}

// Mesa: the recurrence by `forward` and `backward`, the solve by the reference.
MesaProblem read_mesa(const OpsFile& file, const std::string& prefix) {
  const std::vector<int64_t>& q = file.shape(prefix + "q", 4);
  MesaProblem p;
  p.shape.sequences = SeqLayout::uniform(q[0], q[1]);
  p.shape.H = p.shape.HV = q[2];
  p.shape.K = p.shape.V = q[3];
  const int64_t heads = p.shape.sequences.tokens() * p.shape.H, rows = heads * p.shape.K,
                states = q[0] * q[2] * q[3] * q[3];
  const auto optional = [&](const char* tensor, int64_t count) {
    return file.has(prefix + tensor) ? file.read(prefix + tensor, count) : std::vector<double>();
  };
  p.q = file.read(prefix + "q", rows);
  p.k = file.read(prefix + "k", rows);
  p.v = file.read(prefix + "v", rows);
  p.g = file.read(prefix + "g", heads);
  p.beta = file.read(prefix + "beta", heads);
  p.lambda = file.read(prefix + "lamb", p.shape.H * p.shape.K);
  p.h_kv = optional("Hkv0", states);
  p.h_kk = optional("Hkk0", states);
  p.d_o = optional("do", rows);
  p.d_h_kv = optional("dHkv", states);
  p.d_h_kk = optional("dHkk", states);
  return p;
}

// The rows of each sequence's last token.
std::vector<double> last_tokens(const ReferenceShape& shape, const std::vector<double>& o) {
  const auto width = static_cast<std::ptrdiff_t>(shape.HV * shape.V);
  std::vector<double> rows;
  for (int64_t n = 0; n < shape.sequences.count(); ++n) {
    const auto end = o.begin() + static_cast<std::ptrdiff_t>(shape.sequences.end(n)) * width;
    rows.insert(rows.end(), end - width, end);
  }
  return rows;
}

// How far 30 steps of conjugate gradients (a tolerance of 1e-5 in both quotients) may be from the exact solve that is
// computed here.
constexpr double kMesaSteps = 2e-3;

bool is_mesa(const std::string& name) { return name == "mesa" || name == "mesa_state"; }

void compare_mesa(const OpsFile& file, const std::string& name, const std::set<std::string>& cases, const char* what,
                  ConformanceType type, const RunForward& forward, const RunBackward& backward,
                  std::vector<Comparison>& found) {
  Worst outputs, gradients, approximate;
  for (const std::string& one : cases) {
    const std::string prefix = fmt::format("{}/{}/", name, one);
    const MesaProblem p = read_mesa(file, prefix);
    const auto add = [&](Worst& worst, const std::string& tensor, const std::vector<double>& got) {
      if (file.has(prefix + tensor)) worst.add(file, prefix + tensor, fmt::format("{}/{}", one, tensor), got, 0);
    };
    const MesaResults out = mesa_forward(p, forward);
    add(outputs, "o", out.o);
    add(outputs, "Hkv", out.h_kv);
    add(outputs, "Hkk", out.h_kk);
    add(approximate, "o_cg30", out.o);
    add(approximate, "o_step30", last_tokens(p.shape, out.o));
    const MesaGradients d = mesa_backward(p, backward);
    add(gradients, "d_q", d.q);
    add(gradients, "d_k", d.k);
    add(gradients, "d_v", d.v);
    add(gradients, "d_g", d.g);
    add(gradients, "d_beta", d.beta);
    add(gradients, "d_lamb", d.lambda);
    add(gradients, "d_Hkv0", d.h_kv);
    add(gradients, "d_Hkk0", d.h_kk);
  }
  found.push_back({name, fmt::format("outputs, {}", what), outputs.error, ops_bound(type), outputs.where, ""});
  found.push_back({name, fmt::format("gradients, {}", what), gradients.error, ops_bound(type), gradients.where, ""});
  if (approximate.error >= 0)
    found.push_back({name, fmt::format("30 steps of the other program, {}", what), approximate.error,
                     std::max(kMesaSteps, ops_bound(type)), approximate.where, ""});
}

}  // namespace

double ops_bound(ConformanceType type) {
  return type == ConformanceType::kF64 ? 1e-9 : type == ConformanceType::kF32 ? 5e-5 : 2e-2;
}

std::vector<Comparison> check_ops(const std::string& path, const OpsConformanceOptions& options) {
  const OpsFile file(path);
  std::vector<Comparison> found;
  for (const auto& [name, cases] : file.cases()) {
    stop_point("comparison", static_cast<int64_t>(found.size()), -1, "comparisons");
    const VectorRule* rule = nullptr;
    for (const VectorRule& known : vector_rules()) {
      if (name == known.name) rule = &known;
    }
    if (rule == nullptr && !is_mesa(name)) {
      found.push_back({name, "", 0, 0, "", "a rule of this name"});
      continue;
    }
    if (options.reference) {
      const auto forward = [](const ReferenceProblem& p) { return p.forward(); };
      const auto backward = [](const ReferenceProblem& p) { return p.backward(); };
      if (is_mesa(name)) {
        compare_mesa(file, name, cases, "reference", ConformanceType::kF64, forward, backward, found);
      } else {
        compare_rule(file, *rule, cases, "reference", ConformanceType::kF64, forward, backward, found);
      }
      continue;
    }
    for (const fw_form form : options.forms) {
      HeaderRun run;
      const bool cuda = options.device == FW_DEVICE_CUDA;
      run.device = options.device;
      run.bf16_operands = cuda && form == FW_FORM_CHUNK;
      run.dtype = options.type == ConformanceType::kF64 ? FW_F64 : FW_F32;
      run.form = form;
      if (options.type == ConformanceType::kBf16) run.bf16 = HeaderRun::Bf16Tensors::kStreams;
      const auto forward = [&](const ReferenceProblem& p) { return header_forward(p, run); };
      const auto backward = [&](const ReferenceProblem& p) { return header_backward(p, run); };
      const char* form_name = form == FW_FORM_CHUNK   ? "chunk form"
                              : form == FW_FORM_TOKEN ? "token form"
                                                      : "automatic form";
      if (is_mesa(name)) {
        compare_mesa(file, name, cases, form_name, options.type, forward, backward, found);
      } else {
        compare_rule(file, *rule, cases, form_name, options.type, forward, backward, found);
      }
    }
  }
  for (const Comparison& c : found) {
    if (c.error < 0) fail_usage("'{}': {}: there are no {} to compare with", path, c.subject, c.what);
  }
  return found;
}

}  // namespace fw
