// Model folders: what is saved comes back bit for bit, and what is not this model's is an error that says so.
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <functional>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string>
#include <vector>

#include "base/error.h"
#include "base/safetensors.h"
#include "model/small_model.h"

namespace fw::testing {
namespace {

class ModelFolder : public ::testing::Test {
 protected:
  void SetUp() override {
    folder_ = (std::filesystem::path(::testing::TempDir()) / ("fw_model_" + std::to_string(::getpid()))).string();
    std::filesystem::remove_all(folder_);
  }
  void TearDown() override { std::filesystem::remove_all(folder_); }

  std::string load_error() const {
    try {
      load_model<float>(folder_);
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), ErrorKind::kUsage) << error.what();
      return error.what();
    }
    return "";
  }

  static std::string content(const std::string& path) {
    std::ifstream in(path, std::ios::binary);
    std::ostringstream out;
    out << in.rdbuf();
    return out.str();
  }
  static void put(const std::string& path, const std::string& text) { std::ofstream(path, std::ios::binary) << text; }

  // Writes the model's tensors again, changed.
  void rewrite(const LanguageModel<float>& model,
               const std::function<void(const ParamSpec&, SafetensorsWriter&, std::span<const float>)>& add) const {
    SafetensorsWriter writer;
    for (const ParamSpec& spec : model.params().specs()) {
      add(spec, writer,
          model.params().values().subspan(static_cast<size_t>(spec.offset), static_cast<size_t>(spec.size())));
    }
    writer.write(folder_ + "/model.safetensors");
  }

  std::string folder_;
};

TEST_F(ModelFolder, ComesBackBitForBit) {
  ModelConfig config = small_config("gated_deltanet2");
  config.tie_word_embeddings = false;
  config.output_gate_rank = 4;
  config.output_gate = "sigmoid";
  config.precond_x = 1.25;
  const LanguageModel<float> model = noisy_model<float>(config);
  save_model(folder_, model);
  const LanguageModel<float> loaded = load_model<float>(folder_);
  EXPECT_EQ(config_to_json(loaded.config()), config_to_json(config));
  EXPECT_TRUE(std::equal(model.params().values().begin(), model.params().values().end(),
                         loaded.params().values().begin(), loaded.params().values().end()));
  EXPECT_EQ(loaded.hash(), model.hash());
  EXPECT_EQ(load_model<double>(folder_).hash(), model.hash());
}

TEST_F(ModelFolder, NamesAreThoseOfHf) {
  save_model(folder_, noisy_model<double>(small_config("precond_gated_deltanet")));
  const SafetensorsReader reader(folder_ + "/model.safetensors");
  EXPECT_EQ(reader.tensors().at("model.layers.1.attn.q_conv1d.weight").shape, (std::vector<int64_t>{16, 1, 3}));
  for (const char* name : {"model.embeddings.weight",
                           "model.norm.weight",
                           "model.layers.0.attn_norm.weight",
                           "model.layers.0.mlp_norm.weight",
                           "model.layers.0.attn.q_proj.weight",
                           "model.layers.0.attn.A_log",
                           "model.layers.0.attn.dt_bias",
                           "model.layers.0.attn.a_proj.weight",
                           "model.layers.0.attn.b_proj.weight",
                           "model.layers.0.attn.g_proj.weight",
                           "model.layers.0.attn.o_norm.weight",
                           "model.layers.0.attn.o_proj.weight",
                           "model.layers.0.attn.a_atk_proj.weight",
                           "model.layers.0.attn.b_atk_proj.weight",
                           "model.layers.0.attn.A_log_atk",
                           "model.layers.0.attn.dt_bias_atk",
                           "model.layers.0.attn.log_atk_scale",
                           "model.layers.1.mlp.gate_proj.weight",
                           "model.layers.1.mlp.up_proj.weight",
                           "model.layers.1.mlp.down_proj.weight"}) {
    EXPECT_TRUE(reader.has(name)) << name;
  }
}

TEST_F(ModelFolder, MissingFilesAreErrors) {
  EXPECT_NE(load_error().find("config.json"), std::string::npos);
  save_model(folder_, noisy_model<float>(small_config("kda")));
  std::filesystem::remove(folder_ + "/model.safetensors");
  EXPECT_NE(load_error().find("model.safetensors"), std::string::npos);
}

TEST_F(ModelFolder, DamageIsAnError) {
  save_model(folder_, noisy_model<float>(small_config("kda")));
  const std::string path = folder_ + "/model.safetensors", good = content(path);
  for (size_t cut : {size_t{0}, size_t{4}, size_t{100}, good.size() / 2, good.size() - 1}) {
    put(path, good.substr(0, cut));
    EXPECT_NE(load_error().find("model.safetensors"), std::string::npos) << cut;
  }
  for (size_t at = 0; at < good.size(); at += good.size() / 37) {
    std::string bad = good;
    bad[at] = static_cast<char>(bad[at] ^ 16);
    put(path, bad);
    EXPECT_NE(load_error(), "") << "bit flipped in byte " << at;
  }
  put(path, good);
  EXPECT_EQ(load_error(), "");
}

TEST_F(ModelFolder, WrongTensorsAreErrors) {
  const LanguageModel<float> model = noisy_model<float>(small_config("kda"));
  save_model(folder_, model);
  const std::string name = "model.layers.0.attn.k_proj.weight";

  rewrite(model, [&](const ParamSpec& spec, SafetensorsWriter& w, std::span<const float> v) {
    if (spec.name != name) w.add<float>(spec.name, spec.shape, v);
  });
  EXPECT_NE(load_error().find(name), std::string::npos) << "missing";

  rewrite(model, [&](const ParamSpec& spec, SafetensorsWriter& w, std::span<const float> v) {
    w.add<float>(spec.name, spec.name == name ? std::vector<int64_t>{spec.shape[1], spec.shape[0]} : spec.shape, v);
  });
  EXPECT_NE(load_error().find(name), std::string::npos) << "shape";

  const std::vector<int32_t> numbers(16 * 12, 1);
  rewrite(model, [&](const ParamSpec& spec, SafetensorsWriter& w, std::span<const float> v) {
    if (spec.name == name) {
      w.add<int32_t>(spec.name, spec.shape, std::span<const int32_t>(numbers));
    } else {
      w.add<float>(spec.name, spec.shape, v);
    }
  });
  EXPECT_NE(load_error().find(name), std::string::npos) << "dtype";

  rewrite(model, [&](const ParamSpec& spec, SafetensorsWriter& w, std::span<const float> v) {
    w.add<float>(spec.name, spec.shape, v);
    if (spec.name == name) w.add<float>("model.layers.0.attn.kk_proj.weight", spec.shape, v);
  });
  const std::string extra = load_error();
  EXPECT_NE(extra.find("kk_proj"), std::string::npos) << extra;
  EXPECT_NE(extra.find("nearest: 'model.layers.0.attn.k_proj.weight'"), std::string::npos) << extra;
}

TEST_F(ModelFolder, WrongConfigurationIsAnError) {
  save_model(folder_, noisy_model<float>(small_config("kda")));
  const std::string path = folder_ + "/config.json";
  put(path, "{\"hidden_size\": ");
  EXPECT_NE(load_error().find("config.json"), std::string::npos);
  nlohmann::json json = config_to_json(small_config("kda"));
  json["hidden_size"] = 1 << 14;  // a configuration of another size must not be paid for in memory
  json["num_hidden_layers"] = 16;
  put(path, json.dump());
  EXPECT_NE(load_error().find("values for the configuration"), std::string::npos) << load_error();
}

TEST_F(ModelFolder, HashTellsModelsApart) {
  const ModelConfig config = small_config("kda");
  LanguageModel<float> a = noisy_model<float>(config), b = noisy_model<float>(config);
  EXPECT_EQ(a.hash(), b.hash());
  b.params().values()[7] += 1e-3F;
  EXPECT_NE(a.hash(), b.hash());
  EXPECT_NE(a.hash(), noisy_model<float>(small_config("gated_deltanet")).hash());
}

}  // namespace
}  // namespace fw::testing
