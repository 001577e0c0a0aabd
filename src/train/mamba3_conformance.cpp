#include "train/mamba3_conformance.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <set>

#include "base/error.h"
#include "base/safetensors.h"
#include "nn/mamba3_scan.h"

namespace fw {
namespace {

constexpr double kTurn = 2 * 3.14159265358979323846;

struct Mamba3Rule {
  const char* name;
  bool mimo, rotate_half;
  bool heads_first;  // of k_end and what else the state has of a row: [B, H, R, ...], else [B, R, H, ...]
};
constexpr Mamba3Rule kRules[] = {
    {"mamba3", false, false, true}, {"mamba3_mimo", true, true, false}, {"mamba3_mimo_pairs", true, false, true}};

// One case of a rule, computed in T.
template <class T>
class Case {
 public:
  Case(const SafetensorsReader& reader, const std::string& path, const Mamba3Rule& rule, const std::string& name)
      : reader_(reader), path_(path), rule_(rule), name_(name) {
    const std::vector<int64_t> q = shape("q", rule.mimo ? 5 : 4), v = shape("v", 4), angle = shape("angle", 4);
    batch_ = v[0], length_ = v[1];
    shape_ = {v[2], q[q.size() - 2], q.back(), v[3], rule.mimo ? q[2] : 1, angle[3], rule.rotate_half};
    layout_ = SeqLayout::uniform(batch_, length_);
  }

  void compare(fw_form form, Comparison& outputs, Comparison& gradients) {
    const int64_t H = shape_.heads, N = shape_.state, P = shape_.head_dim, R = shape_.rank, NA = shape_.angles,
                  tokens = batch_ * length_;
    const Mamba3Scan<T> scan(shape_);
    const Exec<T> exec{host_ops<T>(), host_device(), arena_, contexts_};
    Recurrences<T> recurrences(host_device());
    const PassLayout layout(layout_);
    const std::vector<T>&v = get("v"), &z = get("z"), &skip = get("D");
    std::vector<T> rows = v;
    if (rule_.mimo) {
      rows.assign(v.size() * static_cast<size_t>(R), T(0));
      exec.mamba3_expand_forward(shape_, matrix(v, tokens), get("mimo_x").data(), matrix(rows, tokens * R));
    }
    Mamba3Inputs<T> in;
    in.q = in_place("q"), in.k = in_place("k"), in.dt = in_place("dt"), in.trap = in_place("trap"),
    in.g = in_place("g"), in.angle = in_place("angle");
    in.v = matrix(rows, tokens * R);
    const bool initial = reader_.has(tensor("S0"));
    const auto size = [](int64_t n) { return static_cast<size_t>(n); };
    std::vector<T> s(size(batch_ * H * N * P)), k(size(batch_ * R * H * N)), last(size(batch_ * R * H * P)),
        angle(size(batch_ * 2 * H * NA));
    if (initial) {
      s = get("S0"), k = rows_first(get("k0"), N), last = rows_first(get("v0"), P);
      const std::vector<double> start = numbers("angle0");
      for (int64_t i = 0; i < batch_ * H * NA; ++i) {
        const double turns = start[size(i)] / kTurn - std::nearbyint(start[size(i)] / kTurn);
        T* high = angle.data() + i / (H * NA) * 2 * H * NA + i % (H * NA);
        *high = static_cast<T>(turns);
        high[H * NA] = static_cast<T>(turns - static_cast<double>(*high));
      }
    }
    typename Mamba3Scan<T>::Context context;
    std::vector<T> o(rows.size()), y(v.size());
    const Mat<T> o_rows = matrix(o, tokens * R);
    const Mamba3Parameters<const T> parameters{get("q_bias").data(), get("k_bias").data(), skip.data()};
    scan.forward(exec, recurrences, layout, form, in, parameters, {s.data(), k.data(), last.data(), angle.data()}, true,
                 context, o_rows);
    const T *up = rule_.mimo ? get("mimo_z").data() : nullptr, *down = rule_.mimo ? get("mimo_o").data() : nullptr;
    exec.mamba3_gate_forward(shape_, o_rows, matrix(z, tokens), up, down, nullptr, T(0), matrix(y, tokens), nullptr);
    add(outputs, "o", y);
    add(outputs, "S", s);
    add(outputs, "k_end", rule_.heads_first ? heads_first(k, N) : k);
    if (reader_.has(tensor("v_end"))) add(outputs, "v_end", heads_first(last, P));
    if (reader_.has(tensor("angle_end"))) add_angle(outputs, angle);

    std::vector<T> dy = get("do"), ds = get("dS"), d_o(o.size()), drows(rows.size()), ds0(s.size()), dk0(k.size()),
                   dv0(last.size()), dangle0(size(batch_ * H * NA));
    std::map<std::string, std::vector<T>> d;
    for (const char* name :
         {"q", "k", "v", "z", "dt", "trap", "g", "angle", "q_bias", "k_bias", "D", "mimo_x", "mimo_z", "mimo_o"}) {
      if (std::string(name).rfind("mimo", 0) != 0 || rule_.mimo) d[name].resize(get(name).size());
    }
    const auto grad = [&](const char* name) { return matrix(d[name], tokens); };
    const auto mimo = [&](const char* name) { return rule_.mimo ? d[name].data() : nullptr; };
    exec.mamba3_gate_backward(shape_, matrix(dy, tokens), o_rows, matrix(z, tokens), up, down, nullptr, nullptr,
                              matrix(d_o, tokens * R), grad("z"), mimo("mimo_z"), mimo("mimo_o"), nullptr);
    const Mamba3Inputs<T> of{grad("q"), grad("k"),    matrix(drows, tokens * R), grad("dt"), grad("trap"),
                             grad("g"), grad("angle")};
    scan.backward(exec, recurrences, layout, form, in, parameters, context, matrix(d_o, tokens * R), ds.data(), of,
                  {d["q_bias"].data(), d["k_bias"].data(), d["D"].data()},
                  {ds0.data(), dk0.data(), dv0.data(), dangle0.data()});
    if (rule_.mimo) {
      exec.mamba3_expand_backward(shape_, matrix(drows, tokens * R), matrix(v, tokens), get("mimo_x").data(), grad("v"),
                                  d["mimo_x"].data());
    } else {
      d["v"] = drows;
    }
    for (const auto& [name, values] : d) add(gradients, "d_" + name, values);
    if (!initial) return;
    add(gradients, "d_S0", ds0);
    add(gradients, "d_k0", heads_first(dk0, N));
    add(gradients, "d_v0", heads_first(dv0, P));
    add(gradients, "d_angle0", dangle0);
  }

 private:
  std::string tensor(const std::string& name) const { return fmt::format("{}/{}/{}", rule_.name, name_, name); }
  std::vector<int64_t> shape(const std::string& name, size_t rank) const {
    const auto it = reader_.tensors().find(tensor(name));
    if (it == reader_.tensors().end()) fail_usage("'{}': tensor '{}' is missing", path_, tensor(name));
    if (it->second.shape.size() != rank)
      fail_usage("'{}': {}: expected {} dimensions, got {}", path_, tensor(name), rank, it->second.shape.size());
    return it->second.shape;
  }
  // What the sizes of q, v and angle say that a tensor of this name has.
  std::vector<int64_t> expected_shape(std::string name) const {
    const int64_t H = shape_.heads, N = shape_.state, P = shape_.head_dim, R = shape_.rank, G = shape_.groups,
                  B = batch_, L = length_;
    if (name.rfind("d_", 0) == 0) name = name.substr(2);
    if (name == "q" || name == "k")
      return rule_.mimo ? std::vector<int64_t>{B, L, R, G, N} : std::vector<int64_t>{B, L, G, N};
    if (name == "q_bias" || name == "k_bias")
      return rule_.mimo ? std::vector<int64_t>{H, R, N} : std::vector<int64_t>{H, N};
    if (name == "v" || name == "z" || name == "o" || name == "do") return {B, L, H, P};
    if (name == "D") return {H};
    if (name.rfind("mimo", 0) == 0) return {H, R, P};
    if (name == "angle") return {B, L, H, shape_.angles};
    if (name == "angle0" || name == "angle_end") return {B, H, shape_.angles};
    if (name == "S0" || name == "S" || name == "dS") return {B, H, N, P};
    if (name == "k_end" && !rule_.heads_first) return {B, R, H, N};
    if (name == "k0" || name == "k_end")
      return rule_.mimo ? std::vector<int64_t>{B, H, R, N} : std::vector<int64_t>{B, H, N};
    if (name == "v0" || name == "v_end")
      return rule_.mimo ? std::vector<int64_t>{B, H, R, P} : std::vector<int64_t>{B, H, P};
    return {B, L, H};
  }
  std::vector<double> numbers(const std::string& name) const {
    const std::vector<int64_t> sizes = expected_shape(name);
    if (reader_.tensors().find(tensor(name)) == reader_.tensors().end())
      fail_usage("'{}': tensor '{}' is missing", path_, tensor(name));
    int64_t count = 1;
    for (const int64_t n : sizes) count *= n;
    std::vector<double> values(static_cast<size_t>(count));
    reader_.read<double>(tensor(name), sizes, values);
    return values;
  }
  std::vector<T>& get(const std::string& name) {
    std::vector<T>& values = inputs_[name];
    if (values.empty()) {
      const std::vector<double> read = numbers(name);
      values.assign(read.begin(), read.end());
    }
    return values;
  }
  template <class Value>
  Mat<Value> matrix(std::vector<Value>& x, int64_t rows) const {
    return {x.data(), rows, static_cast<int64_t>(x.size()) / rows};
  }
  Mat<const T> matrix(const std::vector<T>& x, int64_t rows) const {
    return {x.data(), rows, static_cast<int64_t>(x.size()) / rows};
  }
  Mat<T> in_place(const std::string& name) { return matrix(get(name), batch_ * length_); }

  // [B, H, R, n] as [B, R, H, n], and back.
  std::vector<T> rows_first(const std::vector<T>& x, int64_t n) const {
    return exchanged(x, shape_.heads, shape_.rank, n);
  }
  std::vector<T> heads_first(const std::vector<T>& x, int64_t n) const {
    return exchanged(x, shape_.rank, shape_.heads, n);
  }
  std::vector<T> exchanged(const std::vector<T>& x, int64_t outer, int64_t inner, int64_t n) const {
    std::vector<T> y(x.size());
    for (int64_t b = 0; b < batch_; ++b) {
      for (int64_t i = 0; i < outer; ++i) {
        for (int64_t j = 0; j < inner; ++j)
          std::copy_n(x.data() + ((b * outer + i) * inner + j) * n, n, y.data() + ((b * inner + j) * outer + i) * n);
      }
    }
    return y;
  }

  void add(Comparison& worst, const std::string& name, const std::vector<T>& got) const {
    add(worst, name, std::vector<double>(got.begin(), got.end()), numbers(name));
  }
  void add(Comparison& worst, const std::string& name, const std::vector<double>& got,
           const std::vector<double>& expected) const {
    const double error = relative_error(got, expected);
    if (error <= worst.error && !worst.where.empty()) return;
    worst.error = error;
    worst.where = furthest_element(fmt::format("{}/{}", name_, name), expected_shape(name), got, expected);
  }
  // Angles are the same a whole turn apart.
  void add_angle(Comparison& worst, const std::vector<T>& turns) const {
    const std::vector<double> expected = numbers("angle_end");
    const int64_t of_sequence = shape_.heads * shape_.angles;
    std::vector<double> got(expected.size());
    for (int64_t i = 0; i < batch_ * of_sequence; ++i) {
      const T* high = turns.data() + i / of_sequence * 2 * of_sequence + i % of_sequence;
      double& angle = got[static_cast<size_t>(i)];
      angle = (static_cast<double>(*high) + static_cast<double>(high[of_sequence])) * kTurn;
      angle += kTurn * std::nearbyint((expected[static_cast<size_t>(i)] - angle) / kTurn);
    }
    add(worst, "angle_end", got, expected);
  }

  const SafetensorsReader& reader_;
  const std::string& path_;
  const Mamba3Rule& rule_;
  const std::string& name_;
  int64_t batch_ = 0, length_ = 0;
  Mamba3Shape shape_;
  SeqLayout layout_;
  std::map<std::string, std::vector<T>> inputs_;
  Arena arena_, contexts_;
};

}  // namespace

bool is_mamba3(std::string_view rule) {
  return std::ranges::any_of(kRules, [&](const Mamba3Rule& known) { return rule == known.name; });
}

std::vector<Comparison> check_mamba3(const std::string& path, ConformanceType type, const std::vector<fw_form>& forms,
                                     double bound) {
  const SafetensorsReader reader(path);
  std::vector<Comparison> found;
  for (const Mamba3Rule& rule : kRules) {
    const std::string prefix = fmt::format("{}/", rule.name);
    std::set<std::string> cases;
    for (const auto& [name, info] : reader.tensors()) {
      const size_t last = name.rfind('/');
      if (name.rfind(prefix, 0) == 0 && last > prefix.size())
        cases.insert(name.substr(prefix.size(), last - prefix.size()));
    }
    if (cases.empty()) continue;
    for (const fw_form form : forms) {
      const char* words = form == FW_FORM_TOKEN ? "token" : "chunk";
      Comparison outputs{rule.name, fmt::format("outputs, {} form", words), 0, bound, "", ""};
      Comparison gradients{rule.name, fmt::format("gradients, {} form", words), 0, bound, "", ""};
      for (const std::string& name : cases) {
        if (type == ConformanceType::kF64) {
          Case<double>(reader, path, rule, name).compare(form, outputs, gradients);
        } else {
          Case<float>(reader, path, rule, name).compare(form, outputs, gradients);
        }
      }
      found.push_back(outputs);
      found.push_back(gradients);
    }
  }
  return found;
}

}  // namespace fw
