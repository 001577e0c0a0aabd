// Models that flash-linear-attention saved (shared/vectors/models: their weights, logits, loss, gradients and greedy
// continuations, computed by its code in float64) run here: the same names and shapes, the same numbers.
#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "base/safetensors.h"
#include "model/small_model.h"

namespace fw::testing {
namespace {

using Json = nlohmann::json;

constexpr const char* kFolder = "/work/shared/vectors/models";

int64_t or_else(const Json& json, const char* key, int64_t standard) {
  return json.contains(key) && !json[key].is_null() ? json[key].get<int64_t>() : standard;
}

// The peer's configuration as ours.
ModelConfig translate(const Json& json) {
  Json mixer = json;
  const bool gdn2 = json.contains("mixer_override");
  if (gdn2) mixer = json["mixer_override"];
  const std::string type = json["model_type"];
  ModelConfig c;
  c.vocab_size = json["vocab_size"];
  c.hidden_size = json["hidden_size"];
  c.num_hidden_layers = json["num_hidden_layers"];
  c.conv_size = json["conv_size"];
  c.norm_eps = json["norm_eps"];
  c.tie_word_embeddings = json["tie_word_embeddings"];
  c.intermediate_size = (static_cast<int64_t>(json["hidden_ratio"].get<double>() * static_cast<double>(c.hidden_size) * 2 / 3) + 255) / 256 * 256;
  c.num_heads = mixer["num_heads"];
  c.num_v_heads = or_else(mixer, "num_v_heads", 0);
  c.allow_neg_eigval = mixer.value("allow_neg_eigval", false);
  if (type == "delta_net") {
    const double key_size = json["expand_k"].get<double>() * static_cast<double>(c.hidden_size);
    c.rule = "deltanet";
    c.head_dim = static_cast<int64_t>(key_size) / c.num_heads;
    c.expand_v = json["expand_v"].get<double>() / json["expand_k"].get<double>();
    c.output_gate = json["use_gate"].get<bool>() ? "silu" : "none";
    return c;
  }
  c.head_dim = mixer["head_dim"];
  c.expand_v = mixer["expand_v"];
  if (type == "gated_deltanet" || type == "precond_gated_deltanet") {
    c.rule = type;
    c.output_gate = json["use_gate"].get<bool>() ? "silu" : "none";
  } else {  // kda and its kin: low-rank decay and output gate
    c.rule = gdn2 ? "gated_deltanet2" : type == "precond_kda" ? "kda precond=diagonal" : "kda";
    c.output_gate = "sigmoid";
    c.output_gate_rank = c.head_v_dim();
    c.decay_rank = c.head_v_dim();
    c.decay_per_value_head = !gdn2;
  }
  if (json.contains("squash_x")) c.precond_x = json["squash_x"];
  return c;
}

// Our name of a parameter as the peer's file has it. The preconditioned kda calls the preconditioner's decay a_proj.
std::string peer_name(const std::string& name, const std::string& type) {
  const size_t at = type == "precond_kda" ? name.find("a_atk_proj") : std::string::npos;
  return at == std::string::npos ? name : name.substr(0, at) + "a_proj.weight";
}

class Conformance : public ::testing::TestWithParam<std::string> {};

TEST_P(Conformance, EqualsThePeer) {
  const std::string folder = std::string(kFolder) + "/" + GetParam();
  if (!std::filesystem::exists(folder)) GTEST_SKIP() << folder << " is not here";
  std::ifstream file(folder + "/config.json");
  const Json json = Json::parse(file);
  const ModelConfig config = translate(json);
  LanguageModel<double> model(config);
  Params<double>& params = model.params();
  const SafetensorsReader weights(folder + "/model.safetensors"), io(folder + "/io.safetensors");
  ASSERT_EQ(weights.tensors().size(), params.specs().size());
  for (const ParamSpec& spec : params.specs()) {
    weights.read<double>(peer_name(spec.name, json["model_type"]), spec.shape,
                         params.values().subspan(static_cast<size_t>(spec.offset), static_cast<size_t>(spec.size())));
  }

  constexpr int64_t kSequences = 2, kLength = 150, kTokens = kSequences * kLength;
  const SeqLayout layout = SeqLayout::uniform(kSequences, kLength);
  std::vector<int32_t> ids(kTokens), targets(kTokens);
  io.read<int32_t>("input_ids", std::vector<int64_t>{kSequences, kLength}, std::span<int32_t>(ids));
  for (int64_t t = 0; t < kTokens; ++t) targets[static_cast<size_t>(t)] = (t + 1) % kLength == 0 ? -1 : ids[static_cast<size_t>(t) + 1];

  Logits<double> logits(kTokens, config.vocab_size), expected(kTokens, config.vocab_size);
  io.read<double>("logits", std::vector<int64_t>{kSequences, kLength, config.vocab_size}, std::span<double>(expected.values));
  model.forward_all(ids, layout, nullptr, logits.mat());
  EXPECT_LE(distance(logits.values, expected.values), 1e-7);  // they are float32

  double loss = 0;
  io.read<double>("loss", std::vector<int64_t>{1}, std::span<double>(&loss, 1));
  params.zero_grads();
  const LossSum sum = model.forward_backward(ids, targets, layout, 1.0 / (kTokens - kSequences));
  EXPECT_NEAR(sum.nll / static_cast<double>(sum.count), loss, 1e-9 * loss);

  double square = 0;
  for (double g : params.grads()) square += g * g;
  for (const ParamSpec& spec : params.specs()) {
    std::vector<double> grad(static_cast<size_t>(spec.size()));
    io.read<double>("grad/" + peer_name(spec.name, json["model_type"]), spec.shape, std::span<double>(grad));
    double diff = 0, norm = 0;
    for (size_t i = 0; i < grad.size(); ++i) {
      diff += std::pow(params.grads()[static_cast<size_t>(spec.offset) + i] - grad[i], 2);
      norm += grad[i] * grad[i];
    }
    EXPECT_LE(std::sqrt(diff), 1e-6 * std::max(std::sqrt(norm), 1e-3 * std::sqrt(square))) << spec.name;
  }
}

// The tokens that follow a prefix of 40: prefill by chunks, then one step a token.
TEST_P(Conformance, ContinuesGreedilyAsThePeer) {
  const std::string folder = std::string(kFolder) + "/" + GetParam();
  if (!std::filesystem::exists(folder)) GTEST_SKIP() << folder << " is not here";
  std::ifstream file(folder + "/config.json");
  const Json json = Json::parse(file);
  const ModelConfig config = translate(json);
  LanguageModel<float> model(config);
  const SafetensorsReader weights(folder + "/model.safetensors"), io(folder + "/io.safetensors");
  for (const ParamSpec& spec : model.params().specs()) {
    weights.read<float>(peer_name(spec.name, json["model_type"]), spec.shape,
                        model.params().values().subspan(static_cast<size_t>(spec.offset), static_cast<size_t>(spec.size())));
  }
  std::vector<int32_t> ids(300), greedy(24);
  io.read<int32_t>("input_ids", std::vector<int64_t>{2, 150}, std::span<int32_t>(ids));
  io.read<int32_t>("greedy", std::vector<int64_t>{1, 24}, std::span<int32_t>(greedy));
  ModelState<float> state(config, 1);
  Logits<float> logits(1, config.vocab_size);
  model.forward_last(std::span<const int32_t>(ids).first(40), SeqLayout({0, 40}), state, logits.mat());
  for (size_t i = 0; i < greedy.size(); ++i) {
    const int32_t next = static_cast<int32_t>(std::max_element(logits.values.begin(), logits.values.end()) - logits.values.begin());
    ASSERT_EQ(next, greedy[i]) << "token " << i;
    model.forward_last(std::span(&next, 1), SeqLayout({0, 1}), state, logits.mat());
  }
}

INSTANTIATE_TEST_SUITE_P(Peers, Conformance,
                         ::testing::Values("gdn2", "gdn2_gva_neg", "gated_deltanet", "gated_deltanet_gva_neg", "kda", "kda_gva_neg", "delta_net",
                                           "delta_net_neg", "precond_gated_deltanet", "precond_gated_deltanet_gva", "precond_kda"),
                         [](const auto& peer) { return peer.param; });

}  // namespace
}  // namespace fw::testing
