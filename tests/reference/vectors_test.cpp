// The reference against values that other people's code computed (../shared/vectors/README.md): outputs and gradients of
// every rule there that the axes express, in float64.
#include <gtest/gtest.h>

#include "base/safetensors.h"
#include "support/recurrence.h"
#include "support/shared.h"

namespace fw {
namespace {

using testing::close;

constexpr double kBound = 1e-12;
const std::string kFile = testing::shared_path("vectors/ops.safetensors");

// A rule of the file: its axes (q and k are given normalised: raw) and the names of its tensors.
struct VectorRule {
  std::string name;
  const char* axes;
  std::vector<std::pair<const char*, std::vector<double> ReferenceInputs::*>> inputs;
  std::vector<const char*> cases = {"short", "odd", "chunk", "h0"};
};

using In = ReferenceInputs;

const std::vector<VectorRule>& vector_rules() {
  static const std::vector<VectorRule> list = {
      {"linear_attn", "solve=offline", {}},
      {"mamba2", "decay=scalar solve=offline", {{"g", &In::g}}},
      {"gla", "decay=channel solve=offline", {{"g", &In::g}}},
      {"gdn", "decay=scalar gain=gate", {{"g", &In::g}, {"beta", &In::beta}}},
      {"gdn_raw_keys", "decay=scalar gain=gate", {{"g", &In::g}, {"beta", &In::beta}}},
      {"kda", "decay=channel gain=gate", {{"g", &In::g}, {"beta", &In::beta}}},
      {"gdn2", "decay=channel erase=channel write=channel", {{"g", &In::g}, {"b", &In::erase_gate}, {"w", &In::write_gate}}},
      {"gdn2_neg", "decay=channel erase=channel write=channel gain_bound=2", {{"g", &In::g}, {"b", &In::erase_gate}, {"w", &In::write_gate}}},
      {"pgdn",
       "decay=scalar gain=gate precond=diagonal",
       {{"g", &In::g}, {"beta", &In::beta}, {"g_atk", &In::precond_g}, {"beta_atk", &In::precond_beta}, {"log_atk_scale", &In::precond_center}}},
      {"pkda",
       "decay=channel gain=gate precond=diagonal",
       {{"g", &In::g}, {"beta", &In::beta}, {"g_atk", &In::precond_g}, {"beta_atk", &In::precond_beta}, {"log_atk_scale", &In::precond_center}}},
      {"qdelta", "decay=scalar gain=gate feedback=learned", {{"g", &In::g}, {"beta", &In::beta}, {"lam", &In::lambda}}},
  };
  return list;
}

const SafetensorsReader& file() {
  static const SafetensorsReader reader{kFile};
  return reader;
}

std::vector<double> read(const std::string& name) {
  const auto found = file().tensors().find(name);
  if (found == file().tensors().end()) {
    ADD_FAILURE() << kFile << " has no tensor " << name;
    return {};
  }
  std::vector<double> values(static_cast<size_t>(found->second.count()));
  file().read<double>(name, found->second.shape, values);
  return values;
}

std::vector<double> read_if_there(const std::string& name) { return file().has(name) ? read(name) : std::vector<double>(); }

// The rule's problem of one case, without the inputs that only this rule has.
ReferenceProblem read_problem(const Rule& rule, const std::string& path) {
  const std::vector<int64_t>& q = file().tensors().at(path + "q").shape;  // [B, T, H, K]
  ReferenceProblem p;
  p.rule = rule;
  p.shape.sequences = SeqLayout::uniform(q[0], q[1]);
  p.shape.H = p.shape.HV = q[2];
  p.shape.K = q[3];
  p.shape.V = file().tensors().at(path + "v").shape[3];
  p.in.q = read(path + "q");
  p.in.k = read(path + "k");
  p.in.v = read(path + "v");
  p.in.initial_state = read_if_there(path + "S0");
  p.in.initial_precond = read_if_there(path + "A0");
  p.d.o = read(path + "do");
  p.d.final_state = read(path + "dS");
  return p;
}

ReferenceOutputs read_outputs(const std::string& path) { return {read(path + "o"), read(path + "S"), read_if_there(path + "A")}; }

ReferenceInputs read_gradients(const std::string& path) {
  ReferenceInputs d;
  d.q = read(path + "d_q");
  d.k = read(path + "d_k");
  d.v = read(path + "d_v");
  d.initial_state = read_if_there(path + "d_S0");
  d.initial_precond = read_if_there(path + "d_A0");
  return d;
}

class Vectors : public ::testing::Test {
 protected:
  void SetUp() override {
    if (kFile.empty()) GTEST_SKIP() << testing::kNoShared;
  }
};

class VectorsOf : public Vectors, public ::testing::WithParamInterface<VectorRule> {};

TEST_P(VectorsOf, OutputsAndGradients) {
  const VectorRule& rule = GetParam();
  for (const char* name : rule.cases) {
    const std::string path = rule.name + "/" + name + "/";
    SCOPED_TRACE(path);
    ReferenceProblem p = read_problem(parse_rule(rule.axes), path);
    ReferenceInputs gradients = read_gradients(path);
    for (const auto& [tensor, field] : rule.inputs) {
      p.in.*field = read(path + tensor);
      gradients.*field = read(path + "d_" + tensor);
    }
    EXPECT_TRUE(close(p.forward(), read_outputs(path), kBound));
    EXPECT_TRUE(close(p.backward(), gradients, kBound));
  }
}

INSTANTIATE_TEST_SUITE_P(Ops, VectorsOf, ::testing::ValuesIn(vector_rules()), [](const auto& param) { return param.param.name; });

// Comba's recurrence e = beta p, z = beta v for a key p of its own: a channel erase gate beta p / k makes any erase key.
TEST_F(Vectors, CombaThroughTheEraseGate) {
  for (const char* name : {"short", "odd", "chunk", "h0"}) {
    const std::string path = std::string("comba/") + name + "/";
    SCOPED_TRACE(path);
    ReferenceProblem p = read_problem(parse_rule("decay=scalar gain=gate erase=channel"), path);
    const std::vector<double> erase_key = read(path + "p");
    p.in.g = read(path + "g");
    p.in.beta = read(path + "beta");
    p.in.erase_gate.resize(erase_key.size());
    const size_t K = static_cast<size_t>(p.shape.K);
    for (size_t i = 0; i < erase_key.size(); ++i) p.in.erase_gate[i] = p.in.beta[i / K] * erase_key[i] / p.in.k[i];
    EXPECT_TRUE(close(p.forward(), read_outputs(path), kBound));

    const ReferenceInputs got = p.backward();
    ReferenceInputs expected = read_gradients(path);
    expected.g = read(path + "d_g");
    expected.beta = read(path + "d_beta");
    const std::vector<double> d_p = read(path + "d_p");
    // The gate has k and beta inside: what flows through it moves from their gradients to that of p.
    std::vector<double> got_p(d_p.size());
    ReferenceInputs moved = got;
    moved.erase_gate.clear();
    for (size_t i = 0; i < d_p.size(); ++i) {
      const double d_gate = got.erase_gate[i];
      got_p[i] = d_gate * p.in.beta[i / K] / p.in.k[i];
      moved.beta[i / K] += d_gate * erase_key[i] / p.in.k[i];
      moved.k[i] -= d_gate * p.in.erase_gate[i] / p.in.k[i];
    }
    EXPECT_LE(relative_error(got_p, d_p), kBound);
    EXPECT_TRUE(close(moved, expected, kBound));
  }
}

}  // namespace
}  // namespace fw
