// Models whose layers are a list: attention, windows, gated convolutions and recurrences in turn. Gradients, decoding
// and packing, the state that each kind declares (ring, cache), its file, its memory.
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "base/plan_device.h"
#include "base/temp_folder.h"
#include "model/small_model.h"
#include "support/finite_difference.h"

namespace fw::testing {
namespace {

struct Layers {
  std::string name;
  ModelConfig config;
};

ModelConfig config_of(const StringList& layers) {
  ModelConfig c = small_config("gated_deltanet2");
  c.layers = layers;
  c.num_hidden_layers = static_cast<int64_t>(layers.size());
  c.window.window = 7;
  return c;
}

// Grouped heads, part of the channels turned, norms and biases; heads of another width than hidden_size / num_heads.
void use_all(AttentionKeys& keys) {
  keys.num_heads = 4;
  keys.num_kv_heads = 2;
  keys.head_dim = 8;
  keys.rope_theta = 50;
  keys.rope_fraction = 0.5;
  keys.qk_norm = true;
  keys.qkv_bias = true;
}

std::vector<Layers> models() {
  std::vector<Layers> list;
  const auto add = [&](const std::string& name, const StringList& layers, auto change) {
    list.push_back({name, config_of(layers)});
    change(list.back().config);
  };
  const auto as_is = [](ModelConfig&) {};
  add("attention", {"attention"}, as_is);
  add("window", {"window"}, as_is);
  add("window_of_one", {"window"}, [](ModelConfig& c) { c.window.window = 1; });
  add("window_of_two", {"window"}, [](ModelConfig& c) { c.window.window = 2; });
  add("window_of_more_than_the_text", {"window"}, [](ModelConfig& c) { c.window.window = 300; });
  add("attention_with_all_options", {"attention", "attention"}, [](ModelConfig& c) { use_all(c.attention); });
  add("window_with_all_options", {"window", "window"}, [](ModelConfig& c) { use_all(c.window); });
  add("attention_without_positions", {"attention"}, [](ModelConfig& c) { c.attention.rope_theta = 0; });
  add("gated_attention", {"recurrent", "attention"}, [](ModelConfig& c) {
    use_all(c.attention);
    c.norm = "zero_centered_rms";
    c.attention.output_gate = true;
  });
  add("norms_behind", {"recurrent", "attention", "window"}, [](ModelConfig& c) {
    use_all(c.attention);
    c.attention.qk_norm_all_heads = c.attention.post_norm = c.window.post_norm = true;
    c.attention.qk_norm_eps = 1e-3;
  });
  add("hybrid", {"recurrent", "window"}, as_is);
  add("every_kind", {"conv", "recurrent", "window", "kaczmarz", "attention"}, [](ModelConfig& c) {
    use_all(c.attention);
    c.tie_word_embeddings = false;
  });
  for (const int64_t dim : {48, 96}) {
    add("heads_of_" + std::to_string(dim), {"recurrent", "attention"}, [&](ModelConfig& c) {
      c.head_dim = dim;
      c.expand_v = 2;
      c.attention.head_dim = 2 * dim;
    });
  }
  add("mamba2", {"ssd", "ssd"}, [](ModelConfig& c) {
    c.mlp = "none";
    c.ssd.head_dim = 6;
    c.ssd.state_size = 5;
    c.ssd.num_groups = 2;
    c.ssd.conv_size = 3;
  });
  add("mamba2_in_a_hybrid", {"ssd", "window", "recurrent"}, [](ModelConfig& c) {
    c.ssd.expand = 1;
    c.ssd.head_dim = 4;
    c.ssd.state_size = 8;
    c.ssd.conv_size = 1;
  });
  add("mamba", {"mamba", "mamba"}, [](ModelConfig& c) {
    c.mlp = "none";
    c.mamba.state_size = 5;
    c.mamba.dt_rank = 3;
  });
  add("samba", {"mamba", "window"}, [](ModelConfig& c) { c.mamba.conv_size = 1; });
  add("longhorn_diag", {"longhorn_diag", "recurrent"}, [](ModelConfig& c) {
    c.mamba.expand = 1;
    c.mamba.state_size = 6;
    c.mamba.conv_size = 3;
  });
  add("mesa", {"mesa", "mesa"}, [](ModelConfig& c) {
    c.mesa.head_dim = 5;
    c.mesa.conv_size = 3;
    c.mesa.output_gate = "silu";
  });
  add("mesa_in_a_hybrid", {"recurrent", "mesa", "attention"}, [](ModelConfig& c) {
    c.mesa.num_heads = 3;
    c.mesa.head_dim = 4;
    c.mesa.conv_size = 1;
    c.mesa.cg_steps = 20;
    c.mesa.cg_tolerance = 1e-14;
  });
  // RWKV-7 as it is published, and its layer among others, after their norms and before their MLP; the second such
  // layer of the list is not the first.
  const auto as_published = [](ModelConfig& c) {
    c.norm = "layer";
    c.embedding_norm = true;
    c.mlp = "channel_mix";
    c.tie_word_embeddings = false;
    c.rwkv7 = {6, 3, 4, 5, 7, 0};
  };
  add("rwkv7", {"rwkv7", "rwkv7", "rwkv7"}, as_published);
  add("rwkv7_in_a_hybrid", {"window", "rwkv7", "recurrent", "rwkv7"}, [](ModelConfig& c) {
    c.rwkv7.head_dim = 4;
    c.rwkv7.key_eps = 1e-3;
  });
  // Mamba-3: SISO with shared groups, MIMO of either rotation, with all options, of one row; its turns over the cuts of
  // a text.
  add("mamba3", {"mamba3", "mamba3"}, [](ModelConfig& c) {
    c.mlp = "none";
    c.mamba3.head_dim = 6;
    c.mamba3.state_size = 8;
    c.mamba3.num_groups = 2;
  });
  add("mamba3_mimo", {"mamba3", "mamba3"}, [](ModelConfig& c) {
    c.mamba3.expand = 1;
    c.mamba3.head_dim = 4;
    c.mamba3.state_size = 6;
    c.mamba3.mimo_rank = 3;
    c.mamba3.rope_fraction = 1;
    c.mamba3.decay_activation = "heavy_tail";
    c.mamba3.decay_floor = 0.3;
    c.mamba3.output_norm = true;
  });
  add("mamba3_in_a_hybrid", {"mamba3", "window", "recurrent"}, [](ModelConfig& c) {
    c.mamba3.expand = 1;
    c.mamba3.head_dim = 6;
    c.mamba3.state_size = 7;
    c.mamba3.mimo_rank = 2;
    c.mamba3.rotation = "pairs";
    c.mamba3.decay_floor = 0;
  });
  add("mamba3_mimo_of_one", {"mamba3"}, [](ModelConfig& c) {
    c.mamba3.head_dim = 12;
    c.mamba3.state_size = 4;
    c.mamba3.mimo_rank = 1;
    c.mamba3.output_norm = true;
  });
  add("channel_mix_and_layer_norms", {"recurrent", "attention"}, [](ModelConfig& c) {
    c.norm = "layer";
    c.mlp = "channel_mix";
    c.intermediate_size = 40;
  });
  add("mla", {"mla", "mla"}, [](ModelConfig& c) {
    c.mla.num_heads = 3;
    c.mla.kv_rank = 7;
    c.mla.key_dim = 5;
    c.mla.shared_key_dim = 3;
    c.mla.value_dim = 6;
  });
  add("mla_in_a_hybrid", {"recurrent", "mla"}, [](ModelConfig& c) {
    c.mla.kv_rank = 12;
    c.mla.key_dim = 4;
    c.mla.shared_key_dim = 0;
    c.mla.value_dim = 3;
    c.mlp = "none";
  });
  add("experts", {"recurrent", "attention"}, [](ModelConfig& c) {
    c.mlp = "experts";
    c.experts.num_experts = 3;
    c.experts.shared_size = 6;
    c.experts.shared_gate = true;
  });
  add("experts_of_a_sigmoid_router", {"recurrent", "window", "recurrent"}, [](ModelConfig& c) {
    c.mlp = "experts";
    c.experts.num_experts = 6;
    c.experts.intermediate_size = 7;
    c.experts.shared_size = 5;
    c.experts.dense_layers = 1;
    c.experts.router = "sigmoid";
    c.experts.scale = 2.5;
    c.experts.groups = 3;
    c.experts.top_groups = 2;
    c.experts.correction_bias = true;
  });
  add("all_experts", {"window"}, [](ModelConfig& c) {
    c.mlp = "experts";
    c.experts.num_experts = c.experts.top_k = 4;
    c.experts.normalise = false;
  });
  add("zoology", {"conv", "recurrent"}, [](ModelConfig& c) { c.mlp = "none"; });
  add("convolution_of_one", {"conv"}, [](ModelConfig& c) {
    c.conv.kernel = 1;
    c.mlp = "none";
  });
  add("attention_without_mlp", {"attention", "window"}, [](ModelConfig& c) { c.mlp = "none"; });
  return list;
}

class ModelLayers : public ::testing::TestWithParam<Layers> {};

// A few values of every parameter, with an empty sequence and one of a single token among them.
TEST_P(ModelLayers, GradientsEqualCentralDifferences) {
  const ModelConfig& config = GetParam().config;
  LanguageModel<double> model = noisy_model<double>(config);
  const SeqLayout layout({0, 9, 9, 10, 24});
  const std::vector<int32_t> ids = random_ids(24, config.vocab_size, 1), targets = random_ids(24, config.vocab_size, 2);
  model.forward_backward(ids, targets, layout, 1.0);
  const std::vector<double> grads(model.params().grads().begin(), model.params().grads().end());
  double square = 0;
  for (const double g : grads) square += g * g;
  const auto loss = [&] { return model.evaluate(ids, targets, layout).nll; };
  for (const ParamSpec& spec : model.params().specs()) {
    double diff = 0, norm = 0, largest = 0;
    const std::vector<size_t> indices = sample_indices(static_cast<size_t>(spec.size()), 6, 3);
    for (const size_t i : indices) {
      const size_t at = static_cast<size_t>(spec.offset) + i;
      const double expected = difference(loss, model.params().values()[at], 2e-5);
      diff += (grads[at] - expected) * (grads[at] - expected);
      norm += expected * expected;
      largest = std::max(largest, std::abs(grads[at]));
    }
    const double share = std::sqrt(square * static_cast<double>(indices.size()) / static_cast<double>(grads.size()));
    EXPECT_LE(std::sqrt(diff), 1e-6 * std::max(std::sqrt(norm), 1e-2 * share))
        << spec.name << ": |difference| " << std::sqrt(norm);
    // A window of one sees itself only: neither queries nor keys matter.
    const bool no_influence = config.window.window == 1 && (spec.name.find("q_proj") != std::string::npos ||
                                                            spec.name.find("k_proj") != std::string::npos);
    EXPECT_EQ(largest > 1e-12, !no_influence && !spec.buffer) << spec.name;
  }
}

// Pieces of every length: single tokens, shorter and longer than a window and a page of the cache.
template <class T>
void expect_pieces_equal(const ModelConfig& config, double tolerance) {
  LanguageModel<T> model = noisy_model<T>(config);
  const int64_t tokens = 600;
  const std::vector<int32_t> ids = random_ids(tokens, config.vocab_size, 3);
  Logits<T> all(tokens, config.vocab_size), last(1, config.vocab_size);
  ModelState<T> whole(config, 1), state(config, 1);
  model.forward_all(ids, SeqLayout({0, tokens}), &whole, all.mat());
  const std::vector<int64_t> cuts = {0, 1, 3, 4, 5, 68, 69, 132, 133, 134, 264, 520, 521, tokens};
  for (size_t i = 0; i + 1 < cuts.size(); ++i) {
    const int64_t n = cuts[i + 1] - cuts[i];
    model.forward_last(std::span(ids).subspan(static_cast<size_t>(cuts[i]), static_cast<size_t>(n)), SeqLayout({0, n}),
                       state, last.mat());
    EXPECT_LE(distance(last.values, all.row(cuts[i + 1] - 1)), tolerance) << "after " << cuts[i + 1];
  }
  for (int64_t i = 0; i < config.num_hidden_layers; ++i) {
    for (const StateTensor& tensor : config.layer_state(i)) {
      EXPECT_LE(distance(state.values(i, tensor.name), whole.values(i, tensor.name)), tolerance)
          << "layer " << i << " " << tensor.name;
    }
  }
}

TEST_P(ModelLayers, DecodeEqualsPrefill) { expect_pieces_equal<double>(GetParam().config, 1e-10); }
TEST_P(ModelLayers, DecodeEqualsPrefillInFloat) { expect_pieces_equal<float>(GetParam().config, 2e-4); }

TEST_P(ModelLayers, PackedEqualsSeparate) {
  const ModelConfig& config = GetParam().config;
  LanguageModel<double> model = noisy_model<double>(config);
  const SeqLayout layout({0, 0, 1, 64, 129, 129, 259, 322});  // 0, 1, 63, 65, 0, 130, 63 tokens
  const int64_t tokens = layout.tokens();
  const std::vector<int32_t> ids = random_ids(tokens, config.vocab_size, 3),
                             targets = random_ids(tokens, config.vocab_size, 4);
  Logits<double> packed(tokens, config.vocab_size);
  model.forward_all(ids, layout, nullptr, packed.mat());
  model.params().zero_grads();
  model.forward_backward(ids, targets, layout, 1.0);
  const std::vector<double> together(model.params().grads().begin(), model.params().grads().end());
  model.params().zero_grads();
  for (int64_t n = 0; n < layout.count(); ++n) {
    const auto first = static_cast<size_t>(layout.begin(n)), count = static_cast<size_t>(layout.length(n));
    const SeqLayout one({0, layout.length(n)});
    Logits<double> alone(layout.length(n), config.vocab_size);
    model.forward_all(std::span(ids).subspan(first, count), one, nullptr, alone.mat());
    for (int64_t t = 0; t < layout.length(n); ++t)
      EXPECT_LE(distance(packed.row(layout.begin(n) + t), alone.row(t)), 1e-12) << n << ", " << t;
    model.forward_backward(std::span(ids).subspan(first, count), std::span(targets).subspan(first, count), one, 1.0);
  }
  EXPECT_LE(distance(model.params().grads(), together), 1e-10);
}

// Training a text in pieces: what a piece reads of the pieces before it is held fixed, also while the ring is
// overwritten.
TEST_P(ModelLayers, CarriesStateForward) {
  const ModelConfig& config = GetParam().config;
  LanguageModel<double> model = noisy_model<double>(config);
  const std::vector<int32_t> ids = random_ids(30, config.vocab_size, 1), targets = random_ids(30, config.vocab_size, 2);
  const std::span<const int32_t> i(ids), t(targets);
  const double whole = model.evaluate(ids, targets, SeqLayout({0, 30})).nll;
  ModelState<double> state(config, 1);
  double sum = model.forward_backward(i.first(12), t.first(12), SeqLayout({0, 12}), 1.0, &state).nll;
  const ModelState<double> middle = state;
  model.params().zero_grads();
  sum += model.forward_backward(i.subspan(12), t.subspan(12), SeqLayout({0, 18}), 1.0, &state).nll;
  EXPECT_NEAR(sum, whole, 1e-10 * whole);
  const std::vector<double> grads(model.params().grads().begin(), model.params().grads().end());
  double norm = 0, error = 0;
  for (const double g : grads) norm += g * g;
  const auto loss = [&] {
    ModelState<double> from = middle;
    return model.evaluate(i.subspan(12), t.subspan(12), SeqLayout({0, 18}), &from).nll;
  };
  const std::vector<size_t> indices = sample_indices(grads.size(), 80, 1);
  for (const size_t at : indices) error += std::pow(grads[at] - difference(loss, model.params().values()[at], 2e-5), 2);
  EXPECT_LE(std::sqrt(error),
            1e-6 * std::sqrt(norm * static_cast<double>(indices.size()) / static_cast<double>(grads.size())));
}

TEST_P(ModelLayers, StateFilesAndForksGoOnBitForBit) {
  const ModelConfig& config = GetParam().config;
  TempFolder folder;
  LanguageModel<float> model = noisy_model<float>(config);
  ModelState<float> state(config, 3), loaded(config, 3);
  Logits<float> logits(3, config.vocab_size), other(3, config.vocab_size);
  model.forward_last(random_ids(310, config.vocab_size, 4), SeqLayout({0, 300, 303, 310}), state, logits.mat());
  state.save(folder.path("state.safetensors"), config.rule, model.hash());
  loaded.load(folder.path("state.safetensors"), config.rule, model.hash());
  ModelState<float> fork = state;
  const std::vector<int32_t> next = {1, 2, 3, 4, 5}, another = {6, 7, 8};
  const SeqLayout layout({0, 1, 3, 5});
  model.forward_last(another, SeqLayout({0, 1, 2, 3}), fork, other.mat());  // what the fork sees its origin does not
  model.forward_last(next, layout, state, logits.mat());
  model.forward_last(next, layout, loaded, other.mat());
  EXPECT_EQ(logits.values, other.values);
  EXPECT_NE(fork.positions(), state.positions());
}

TEST_P(ModelLayers, ConfigurationsComeBackFromJson) {
  const ModelConfig& config = GetParam().config;
  EXPECT_EQ(config_from_json(config_to_json(config), "here"), config);
  EXPECT_EQ(static_cast<double>(LanguageModel<float>(config).params().size()), parameter_count(config));
}

// Mesa's and Mamba-3's layers sum otherwise when they decode.
bool refuses_decode_bits(const ModelConfig& config) {
  const bool refused =
      config.mixers().find("mesa") != std::string::npos || config.mixers().find("mamba3") != std::string::npos;
  const std::string error = error_of([&] { LanguageModel<float>(config).set_decode_bits(true); });
  EXPECT_EQ(error.find("decode_bits: expected a model without layers of mesa and mamba3") == 0, refused) << error;
  return refused;
}

// set_decode_bits(): logits, losses and states of whole texts, in training too, are those of decoding, to the bit.
TEST_P(ModelLayers, TrainingHasTheBitsOfDecoding) {
  const ModelConfig& config = GetParam().config;
  if (refuses_decode_bits(config)) return;
  for (const Precision precision : {Precision::kNative, Precision::kBf16}) {
    LanguageModel<float> model = noisy_model<float>(config);
    model.set_decode_bits(true);
    model.set_precision(precision);
    const int64_t tokens = 270, sequences = 6;
    const std::vector<int32_t> ids = random_ids(tokens, config.vocab_size, 3),
                               targets = random_ids(tokens, config.vocab_size, 4);
    const SeqLayout layout({0, tokens});
    Logits<float> whole(tokens, config.vocab_size), row(1, config.vocab_size), rows(sequences, config.vocab_size);
    ModelState<float> after(config, 1), one(config, 1), many(config, sequences), pieces(config, 1);
    model.forward_all(ids, layout, &after, whole.mat());
    for (int64_t t = 0; t < tokens; ++t) {
      const std::vector<int32_t> now(static_cast<size_t>(sequences), ids[static_cast<size_t>(t)]);
      model.forward_last(std::span(now).first(1), SeqLayout({0, 1}), one, row.mat());
      ASSERT_EQ(row.values, whole.row(t)) << "token " << t;
      model.forward_last(now, SeqLayout::uniform(sequences, 1), many, rows.mat());
      ASSERT_EQ(rows.row(sequences - 1), whole.row(t)) << "token " << t << " beside others";
    }
    const std::vector<int64_t> cuts = {0, 2, 70, 71, tokens};
    for (size_t i = 0; i + 1 < cuts.size(); ++i) {
      const int64_t n = cuts[i + 1] - cuts[i];
      model.forward_last(std::span(ids).subspan(static_cast<size_t>(cuts[i]), static_cast<size_t>(n)),
                         SeqLayout({0, n}), pieces, row.mat());
      EXPECT_EQ(row.values, whole.row(cuts[i + 1] - 1)) << "after " << cuts[i + 1];
    }
    for (int64_t i = 0; i < config.num_hidden_layers; ++i) {
      for (const StateTensor& tensor : config.layer_state(i))
        EXPECT_EQ(one.values(i, tensor.name), after.values(i, tensor.name)) << "layer " << i << " " << tensor.name;
    }
    std::vector<float> nll(static_cast<size_t>(tokens));
    model.evaluate(ids, targets, layout, nullptr, nll.data());
    double sum = 0;
    for (const float x : nll) sum += static_cast<double>(x);
    EXPECT_EQ(model.forward_backward(ids, targets, layout, 1.0).nll, sum);
  }
}

TEST_P(ModelLayers, GradientsWithTheBitsOfDecodingAreThoseWithout) {
  const ModelConfig& config = GetParam().config;
  if (refuses_decode_bits(config)) return;
  const SeqLayout layout({0, 9, 9, 10, 80});
  const std::vector<int32_t> ids = random_ids(80, config.vocab_size, 1), targets = random_ids(80, config.vocab_size, 2);
  std::vector<std::vector<double>> grads;
  for (const bool on : {false, true}) {
    LanguageModel<double> model = noisy_model<double>(config);
    model.set_decode_bits(on);
    model.forward_backward(ids, targets, layout, 1.0);
    grads.emplace_back(model.params().grads().begin(), model.params().grads().end());
  }
  EXPECT_LE(distance(grads[1], grads[0]), 1e-10);
}

INSTANTIATE_TEST_SUITE_P(Kinds, ModelLayers, ::testing::ValuesIn(models()),
                         [](const auto& one) { return one.param.name; });

// In training a loss is added that is least where all experts have as many rows; what is said is the loss without it.
// What the experts had is counted in training passes alone.
TEST(Layers, BalanceOfExperts) {
  ModelConfig config = config_of({"attention", "attention"});
  config.mlp = "experts";
  config.experts.num_experts = 3;
  const SeqLayout layout({0, 9, 24});
  const std::vector<int32_t> ids = random_ids(24, config.vocab_size, 1), targets = random_ids(24, config.vocab_size, 2);
  const auto gradients = [&](double balance, std::vector<int64_t>* load) {
    config.experts.balance = balance;
    LanguageModel<double> model = noisy_model<double>(config);
    model.evaluate(ids, targets, layout);
    EXPECT_EQ(model.take_expert_load(), std::vector<int64_t>(6, 0));
    const double nll = model.forward_backward(ids, targets, layout, 1.0 / 24).nll;
    EXPECT_EQ(nll, model.evaluate(ids, targets, layout).nll);
    *load = model.take_expert_load();
    EXPECT_EQ(model.take_expert_load(), std::vector<int64_t>(6, 0));
    return std::vector<double>(model.params().grads().begin(), model.params().grads().end());
  };
  std::vector<int64_t> load, same;
  const std::vector<double> without = gradients(0, &load), with = gradients(0.5, &same), more = gradients(1, &same);
  EXPECT_EQ(load, same);
  for (const size_t layer : {size_t{0}, size_t{3}}) EXPECT_EQ(load[layer] + load[layer + 1] + load[layer + 2], 48);
  // Linear in the coefficient, and not nothing.
  std::vector<double> half(without.size()), whole(without.size());
  for (size_t i = 0; i < without.size(); ++i) half[i] = 2 * (with[i] - without[i]), whole[i] = more[i] - without[i];
  EXPECT_LE(distance(half, whole), 1e-9);
  double norm = 0;
  for (const double x : whole) norm += x * x;
  EXPECT_GT(norm, 1e-8);
}

// Latent attention against its definition: keys and values of every head made of the latent, then attention.
TEST(Layers, LatentAttentionIsAttentionToExpandedKeys) {
  ModelConfig config = config_of({"mla"});
  config.mlp = "none";
  config.mla = {2, 7, 5, 3, 6};
  LanguageModel<double> model = noisy_model<double>(config);
  const int64_t d = config.hidden_size, T = 9, H = 2, R = 7, K = 5, S = 3, V = 6;
  const std::vector<int32_t> ids = random_ids(T, config.vocab_size, 3);
  const auto parameter = [&](const std::string& name, int64_t cols) {
    const auto index = static_cast<size_t>(std::as_const(model.params()).find(name));
    const ParamSpec& spec = model.params().specs()[index];
    return Mat<const double>(std::as_const(model.params()).value(static_cast<int>(index)), spec.size() / cols, cols);
  };
  const auto dot = [](const double* a, const double* b, int64_t n) {
    double sum = 0;
    for (int64_t i = 0; i < n; ++i) sum += a[i] * b[i];
    return sum;
  };
  const auto normed = [&](std::vector<double> x, const Mat<const double>& weight, double eps) {
    const double scale = 1 / std::sqrt(dot(x.data(), x.data(), weight.cols) / static_cast<double>(weight.cols) + eps);
    for (int64_t i = 0; i < weight.cols; ++i) x[static_cast<size_t>(i)] *= scale * weight.data[i];
    return x;
  };
  const auto times = [&](const std::vector<double>& x, const Mat<const double>& weight) {
    std::vector<double> y;
    for (int64_t o = 0; o < weight.rows; ++o) y.push_back(dot(x.data(), weight.row(o), weight.cols));
    return y;
  };
  const std::string layer = "model.layers.0.";
  const auto embedding = parameter("model.embeddings.weight", d), up = parameter(layer + "attn.kv_b_proj.weight", R);
  std::vector<std::vector<double>> keys, expanded;
  Logits<double> got(T, config.vocab_size);
  model.forward_all(ids, SeqLayout({0, T}), nullptr, got.mat());
  for (int64_t t = 0; t < T; ++t) {
    std::vector<double> x(embedding.row(ids[static_cast<size_t>(t)]), embedding.row(ids[static_cast<size_t>(t)]) + d);
    const std::vector<double> in = normed(x, parameter(layer + "attn_norm.weight", d), config.norm_eps);
    const std::vector<double> q = times(in, parameter(layer + "attn.q_proj.weight", d));
    keys.push_back(times(in, parameter(layer + "attn.kv_a_proj_with_mqa.weight", d)));
    keys.back() = normed(keys.back(), parameter(layer + "attn.kv_a_layernorm.weight", R), 1e-6);
    expanded.push_back(times(keys.back(), up));
    std::vector<double> o(static_cast<size_t>(H * V));
    for (int64_t h = 0; h < H; ++h) {
      double sum = 0;
      for (int64_t s = 0; s <= t; ++s) {
        const double* of = expanded[static_cast<size_t>(s)].data() + h * (K + V);
        const double score = dot(q.data() + h * (K + S), of, K) +
                             dot(q.data() + h * (K + S) + K, keys[static_cast<size_t>(s)].data() + R, S);
        const double p = std::exp(score / std::sqrt(static_cast<double>(K + S)));
        sum += p;
        for (int64_t c = 0; c < V; ++c) o[static_cast<size_t>(h * V + c)] += p * of[K + c];
      }
      for (int64_t c = 0; c < V; ++c) o[static_cast<size_t>(h * V + c)] /= sum;
    }
    const std::vector<double> y = times(o, parameter(layer + "attn.o_proj.weight", H * V));
    for (size_t i = 0; i < y.size(); ++i) x[i] += y[i];
    const std::vector<double> last = normed(x, parameter("model.norm.weight", d), config.norm_eps);
    EXPECT_LE(distance(got.row(t), times(last, embedding)), 1e-12) << t;
  }
}

// A window over the whole text is attention to all of it.
TEST(Layers, AWideWindowIsAttention) {
  for (const int64_t tokens : {1, 63, 64, 65, 130}) {
    ModelConfig wide = config_of({"window"}), all = config_of({"attention"});
    wide.window.window = tokens;
    const std::vector<int32_t> ids = random_ids(tokens, wide.vocab_size, 3);
    Logits<double> a(tokens, wide.vocab_size), b(tokens, wide.vocab_size), c(tokens, wide.vocab_size);
    noisy_model<double>(wide).forward_all(ids, SeqLayout({0, tokens}), nullptr, a.mat());
    noisy_model<double>(all).forward_all(ids, SeqLayout({0, tokens}), nullptr, b.mat());
    EXPECT_LE(distance(a.values, b.values), 1e-12) << tokens;
    if (tokens == 1) continue;
    wide.window.window = tokens - 1;
    noisy_model<double>(wide).forward_all(ids, SeqLayout({0, tokens}), nullptr, c.mat());
    EXPECT_LE(distance(c.row(tokens - 2), b.row(tokens - 2)), 1e-12) << tokens;
    EXPECT_GT(distance(c.row(tokens - 1), b.row(tokens - 1)), 1e-6) << tokens;
  }
}

// Depth is the list repeated: layer 4 of two kinds is of the first.
TEST(Layers, TheListRepeatsToTheDepth) {
  ModelConfig config = config_of({"recurrent", "window"});
  config.num_hidden_layers = 5;
  const auto kind = [&](int64_t i) { return mixer_state(config.layer_spec(i))[0].kind; };
  for (int64_t i = 0; i < 5; ++i) EXPECT_EQ(kind(i), i % 2 == 0 ? StateKind::kMatrix : StateKind::kRing) << i;
  config.layers = {"kaczmarz", "attention", "recurrent"};
  EXPECT_EQ(config.layer_rule(0), "kaczmarz");
  EXPECT_EQ(config.layer_rule(3), "kaczmarz");
  EXPECT_EQ(config.layer_rule(5), "gated_deltanet2");
  EXPECT_EQ(kind(4), StateKind::kCache);
}

TEST(Layers, CachesGrowByPages) {
  const ModelConfig config = config_of({"attention", "window"});
  LanguageModel<float> model = noisy_model<float>(config);
  ModelState<float> state(config, 1);
  Logits<float> logits(1, config.vocab_size);
  const size_t page = 2 * static_cast<size_t>(kCacheRows) * 12 * sizeof(float), empty = state.bytes();
  const std::vector<int32_t> one = {3};
  for (int64_t t = 1; t <= 2 * kCacheRows + 1; ++t) {
    model.forward_last(one, SeqLayout({0, 1}), state, logits.mat());
    ASSERT_EQ(state.bytes(), empty + page * static_cast<size_t>((t + kCacheRows - 1) / kCacheRows)) << t;
  }
  state.reset();
  EXPECT_EQ(state.bytes(), empty);
}

// State and scratch of a window do not depend on how much was read.
TEST(Layers, DecodingAWindowKeepsItsMemory) {
  ModelConfig config = config_of({"recurrent", "window"});
  config.window.window = 16;
  LanguageModel<float> model = noisy_model<float>(config);
  ModelState<float> state(config, 1);
  Logits<float> logits(1, config.vocab_size);
  model.forward_last(random_ids(300, config.vocab_size, 4), SeqLayout({0, 300}), state, logits.mat());
  const size_t scratch = model.scratch_bytes(), bytes = state.bytes();
  const std::vector<int32_t> one = {3};
  for (int i = 0; i < 100000; ++i) model.forward_last(one, SeqLayout({0, 1}), state, logits.mat());
  EXPECT_EQ(state.positions(), std::vector<int64_t>{100300});
  EXPECT_EQ(model.scratch_bytes(), scratch);
  EXPECT_EQ(state.bytes(), bytes);
}

TEST(Layers, WhatIsWrongIsNamed) {
  const auto error = [](auto change) {
    ModelConfig c = config_of({"attention", "window"});
    change(c);
    return error_of([&] { validate(c); });
  };
  EXPECT_NE(error([](ModelConfig& c) {
              c.layers = {"recurent", "window"};
            }).find("layers: 'recurent'"),
            std::string::npos);
  EXPECT_NE(
      error([](ModelConfig& c) { c.num_hidden_layers = 1; }).find("layers: expected at most num_hidden_layers = 1"),
      std::string::npos);
  EXPECT_NE(error([](ModelConfig& c) { c.window.num_kv_heads = 3; }).find("mixer.window.num_kv_heads"),
            std::string::npos);
  EXPECT_NE(error([](ModelConfig& c) { c.attention.num_heads = 5; }).find("mixer.attention.head_dim"),
            std::string::npos);
  EXPECT_NE(error([](ModelConfig& c) { c.attention.rope_fraction = 0.1; }).find("mixer.attention.rope_fraction"),
            std::string::npos);
  EXPECT_NE(error([](ModelConfig& c) { c.window.window = 0; }).find("mixer.window.window"), std::string::npos);
  EXPECT_NE(error([](ModelConfig& c) { c.conv.kernel = 0; }).find("mixer.conv.kernel"), std::string::npos);
  EXPECT_NE(error([](ModelConfig& c) { c.mlp = "gelu"; }).find("mlp"), std::string::npos);
  // Keys of kinds that a model does not have are only held to their own ranges.
  EXPECT_EQ(error([](ModelConfig& c) { c.layers = {"recurrent"}, c.window.num_kv_heads = 3; }), "");

  const auto mamba3 = [&](auto change) {
    return error([&](ModelConfig& c) {
      c.layers = {"mamba3", "window"};
      c.mamba3 = {};
      c.mamba3.head_dim = 6;
      change(c.mamba3);
    });
  };
  EXPECT_EQ(mamba3([](Mamba3Keys&) {}), "");
  EXPECT_NE(mamba3([](Mamba3Keys& k) { k.head_dim = 7; }).find("mixer.mamba3.head_dim: expected a number that divides"),
            std::string::npos);
  EXPECT_NE(mamba3([](Mamba3Keys& k) { k.num_groups = 3; }).find("mixer.mamba3.num_groups"), std::string::npos);
  EXPECT_NE(mamba3([](Mamba3Keys& k) { k.rope_fraction = 0.01; }).find("mixer.mamba3.rope_fraction"),
            std::string::npos);
  EXPECT_NE(mamba3([](Mamba3Keys& k) { k.rope_fraction = 1.5; }).find("0 < rope_fraction <= 1"), std::string::npos);
  EXPECT_NE(mamba3([](Mamba3Keys& k) {
              k.state_size = 7, k.mimo_rank = 2;
            }).find("mixer.mamba3.state_size: expected an even number"),
            std::string::npos);
  EXPECT_EQ(mamba3([](Mamba3Keys& k) { k.state_size = 7, k.mimo_rank = 2, k.rotation = "pairs"; }), "");
}

// A model that a CUDA device cannot run is refused where it is made, with no memory taken, whichever of its layers it
// is.
TEST(ModelOfADevice, IsRefusedThereForWhatItLacks) {
  const auto error = [](const ModelConfig& config) {
    PlanDevice device(FW_DEVICE_CUDA);
    std::string words = error_of([&] { LanguageModel<float> model(config, device); });
    EXPECT_TRUE(words.empty() || device.peak_bytes() == 0) << words;
    return words;
  };
  EXPECT_EQ(error(config_of({"kda", "window"})), "");
  EXPECT_EQ(error(config_of({"window", "gated_deltanet erase_state=previous"})), "");
  EXPECT_NE(error(config_of({"precond_tanh", "window"})).find("expected the CPU, or precond_form=squash"),
            std::string::npos);
  EXPECT_NE(error(config_of({"window", "kda erase_state=previous"}))
                .find("expected the CPU, or k_norm=raw with erase_state=previous"),
            std::string::npos);
  ModelConfig grouped = small_config("dplr");
  EXPECT_EQ(error(grouped), "");
  grouped.num_v_heads = 2 * grouped.num_heads;
  EXPECT_NE(error(grouped).find("expected the CPU, or as many key heads as value heads"), std::string::npos);
  ModelConfig layer_norm = small_config("kda"), channel_mix = layer_norm, rwkv7 = config_of({"window", "rwkv7"}),
              mamba3 = config_of({"window", "mamba3"});
  layer_norm.norm = "layer";
  channel_mix.mlp = "channel_mix";
  rwkv7.rwkv7.head_dim = 4;
  mamba3.mamba3.head_dim = 4;
  for (const ModelConfig& config : {layer_norm, channel_mix, rwkv7, mamba3, config_of({"mesa"})})
    EXPECT_EQ(error(config), "");
  ModelConfig experts = small_config("kda");
  experts.mlp = "experts";
  experts.experts.num_experts = 8192;
  EXPECT_EQ(error(experts), "");
  experts.experts.num_experts = 8193;
  EXPECT_NE(error(experts).find("at most 8192 experts of a layer on CUDA devices, got 8193"), std::string::npos);
  ModelConfig latent = config_of({"recurrent", "mla"});
  latent.mla.kv_rank = 704;
  EXPECT_EQ(error(latent), "");
  latent.mla.kv_rank = 705;
  EXPECT_NE(error(latent).find("kv_rank + shared_key_dim of at most 768 on CUDA devices, got 769"), std::string::npos);
  ModelConfig many_rows = config_of({"mamba3"});
  many_rows.hidden_size = 226;
  many_rows.mamba3.head_dim = 452;
  many_rows.mamba3.mimo_rank = 64;
  EXPECT_EQ(error(many_rows),
            "device: expected the CPU, or Mamba-3 layers with (2 mimo_rank + 1) head_dim of at most 58112 on CUDA "
            "devices, got 58308");
  ModelConfig wide = config_of({"window", "mesa"});
  wide.mesa.head_dim = 160;
  EXPECT_EQ(error(wide), "");
  wide.mesa.head_dim = 161;
  EXPECT_NE(
      error(wide).find("expected the CPU, or Mesa layers with a head_dim of at most 160 on CUDA devices, got 161"),
      std::string::npos);
}

}  // namespace
}  // namespace fw::testing
