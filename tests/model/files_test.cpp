// Model folders as they come: shards with an index, weights in another form, tensors that say nothing new.
#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "base/file.h"
#include "base/temp_folder.h"
#include "model/interop/hf_config.h"
#include "model/model_files.h"
#include "model/small_model.h"

namespace fw::testing {
namespace {

using Json = nlohmann::json;

Json hf_config(bool tied) {
  return {{"model_type", "gated_deltanet"},
          {"hidden_size", 32},
          {"num_hidden_layers", 2},
          {"num_heads", 2},
          {"head_dim", 8},
          {"vocab_size", 50},
          {"tie_word_embeddings", tied},
          {"attn", {{"layers", {1}}, {"num_heads", 2}, {"rope_theta", 500.0}}}};
}

// A folder of flash-linear-attention's with one file.
void write_hf(const std::string& folder, const LanguageModel<float>& model) {
  export_model(folder, model);
  ASSERT_TRUE(is_hf_folder(folder));
}

LanguageModel<float> hf_model(bool tied) { return noisy_model<float>(config_from_hf(hf_config(tied), "here")); }

struct Part {
  std::string name;
  std::vector<int64_t> shape;
  std::vector<float> values;
};

std::vector<Part> parts_of(const std::string& path) {
  const SafetensorsReader reader(path);
  std::vector<Part> parts;
  for (const auto& [name, info] : reader.tensors()) {
    parts.push_back({name, info.shape, std::vector<float>(static_cast<size_t>(info.count()))});
    reader.read<float>(name, info.shape, std::span<float>(parts.back().values));
  }
  return parts;
}

void write_parts(const std::string& path, std::span<const Part> parts) {
  SafetensorsWriter writer;
  for (const Part& part : parts) writer.add<float>(part.name, part.shape, std::span<const float>(part.values));
  writer.write(path);
}

// The folder's one file as two, with their index.
void split(const std::string& folder) {
  const std::vector<Part> parts = parts_of(folder + "/model.safetensors");
  const size_t half = parts.size() / 2;
  const std::string names[] = {"model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"};
  write_parts(folder + "/" + names[0], std::span(parts).first(half));
  write_parts(folder + "/" + names[1], std::span(parts).subspan(half));
  Json map;
  for (size_t i = 0; i < parts.size(); ++i) map[parts[i].name] = names[i < half ? 0 : 1];
  write_file_atomic(folder + "/model.safetensors.index.json",
                    Json{{"metadata", {{"total_size", 1}}}, {"weight_map", map}}.dump());
  std::filesystem::remove(folder + "/model.safetensors");
}

TEST(ModelFiles, ShardsAreReadAsTheyLie) {
  const LanguageModel<float> model = hf_model(false);
  TempFolder hf, ours;
  write_hf(hf.path(), model);
  save_model(ours.path(), model);
  for (const std::string& folder : {hf.path(), ours.path()}) {
    split(folder);
    EXPECT_EQ(load_model<float>(folder).hash(), model.hash());
    EXPECT_FALSE(file_exists(folder + "/model.safetensors"));
    EXPECT_EQ(model_file_names(folder).size(), 2U);
  }
}

TEST(ModelFiles, AMissingShardIsNamed) {
  TempFolder folder;
  write_hf(folder.path(), hf_model(false));
  split(folder.path());
  std::filesystem::remove(folder.path("model-00002-of-00002.safetensors"));
  const std::string words = error_of([&] { load_model<float>(folder.path()); });
  EXPECT_NE(words.find("model.safetensors.index.json': 1 of 2 shards"), std::string::npos) << words;
  EXPECT_NE(words.find("'model-00002-of-00002.safetensors': fetch them too"), std::string::npos) << words;
  std::filesystem::remove(folder.path("model.safetensors.index.json"));
  EXPECT_NE(error_of([&] { load_model<float>(folder.path()); }).find("fetch the index too"), std::string::npos);
}

TEST(ModelFiles, AnIndexNamesFilesOfItsFolderAlone) {
  TempFolder folder, elsewhere;
  write_hf(folder.path(), hf_model(false));
  split(folder.path());
  const Json good = Json::parse(read_file(folder.path("model.safetensors.index.json")));
  std::filesystem::copy(folder.path("model-00001-of-00002.safetensors"), elsewhere.path("x.safetensors"));
  const auto error = [&](const Json& file) {
    Json index = good;
    index["weight_map"]["lm_head.weight"] = file;
    write_file_atomic(folder.path("model.safetensors.index.json"), index.dump());
    return error_of([&] { load_model<float>(folder.path()); });
  };
  for (const Json& file :
       {Json(elsewhere.path("x.safetensors")),
        Json("../" + std::filesystem::path(elsewhere.path()).filename().string() + "/x.safetensors"),
        Json("config.json"), Json(""), Json(".safetensors"), Json(std::string("a\0.safetensors", 14)), Json(3)}) {
    const std::string words = error(file);
    EXPECT_NE(words.find("weight_map: lm_head.weight: expected the name of a"), std::string::npos)
        << file << ": " << words;
  }
  // it lies in the first
  EXPECT_NE(error("model-00002-of-00002.safetensors").find("lm_head.weight"), std::string::npos);
  write_file_atomic(folder.path("model.safetensors.index.json"), "{}");
  EXPECT_NE(error_of([&] { load_model<float>(folder.path()); }).find("weight_map: expected an object"),
            std::string::npos);
}

TEST(ModelFiles, OtherFormsOfWeightsAreNamedWithWhatToDo) {
  TempFolder folder;
  write_file_atomic(folder.path("config.json"), hf_config(false).dump());
  EXPECT_NE(error_of([&] { load_model<float>(folder.path()); }).find("got neither"), std::string::npos);
  write_file_atomic(folder.path("pytorch_model.bin"), "PK");
  const std::string words = error_of([&] { load_model<float>(folder.path()); });
  EXPECT_NE(words.find("got 'pytorch_model.bin'"), std::string::npos) << words;
  EXPECT_NE(words.find("save_pretrained"), std::string::npos) << words;
}

// Adds a tensor to the folder's file.
void add(const std::string& folder, const Part& part) {
  std::vector<Part> parts = parts_of(folder + "/model.safetensors");
  parts.push_back(part);
  write_parts(folder + "/model.safetensors", parts);
}

TEST(ModelFiles, ATiedHeadThatIsStoredTooSaysNothingNew) {
  const LanguageModel<float> model = hf_model(true);
  TempFolder hf, ours;
  write_hf(hf.path(), model);
  save_model(ours.path(), model);
  for (const std::string& folder : {hf.path(), ours.path()}) {
    Part head = {"lm_head.weight", {}, {}};
    for (const Part& part : parts_of(folder + "/model.safetensors")) {
      if (part.name == "model.embeddings.weight") head = {"lm_head.weight", part.shape, part.values};
    }
    ASSERT_FALSE(head.values.empty());
    std::vector<Part> parts = parts_of(folder + "/model.safetensors");
    add(folder, head);
    EXPECT_EQ(load_model<float>(folder).hash(), model.hash());
    head.values[5] += 1;
    write_parts(folder + "/model.safetensors", parts);
    add(folder, head);
    const std::string words = error_of([&] { load_model<float>(folder); });
    EXPECT_NE(words.find("lm_head.weight: expected the embedding's values, as tie_word_embeddings = true says"),
              std::string::npos)
        << words;
  }
}

TEST(ModelFiles, RotaryTablesSayNothingNew) {
  const LanguageModel<float> model = hf_model(false);
  TempFolder folder;
  const auto with = [&](const Part& part) {
    write_hf(folder.path(), model);
    add(folder.path(), part);
    std::string words;
    words = error_of([&] { EXPECT_EQ(load_model<float>(folder.path()).hash(), model.hash()); });
    return words;
  };
  const auto frequencies = [](double theta) {
    std::vector<float> values;
    for (int i = 0; i < 8; ++i) values.push_back(static_cast<float>(std::pow(theta, -i / 8.0)));
    return values;
  };
  const std::string name = "model.layers.1.attn.rotary.inv_freq";
  EXPECT_EQ(with({name, {8}, frequencies(500)}), "");
  EXPECT_EQ(with({"model.rotary_emb.inv_freq", {8}, frequencies(500)}), "");
  EXPECT_NE(with({name, {8}, frequencies(10000)}).find("expected the rotary table of theta = 500 over 16 channels"),
            std::string::npos);
  EXPECT_NE(with({name, {4}, {1, 1, 1, 1}}).find("8 values, not 4"), std::string::npos);
  // no attention there
  EXPECT_NE(with({"model.layers.0.attn.rotary.inv_freq", {8}, frequencies(500)}).find("unexpected tensor"),
            std::string::npos);
  EXPECT_NE(with({"model.layers.9.attn.rotary.inv_freq", {8}, frequencies(500)}).find("unexpected tensor"),
            std::string::npos);
  std::vector<float> cosines;
  for (int t = 0; t < 20; ++t) {
    for (int i = 0; i < 16; ++i) cosines.push_back(static_cast<float>(std::cos(t * std::pow(500.0, -(i % 8) / 8.0))));
  }
  const std::string table = "model.layers.1.attn.rotary.cos_cached";
  EXPECT_EQ(with({table, {20, 16}, cosines}), "");
  cosines[40] += 0.1F;
  EXPECT_NE(with({table, {20, 16}, cosines}).find("value 40"), std::string::npos);
}

}  // namespace
}  // namespace fw::testing
