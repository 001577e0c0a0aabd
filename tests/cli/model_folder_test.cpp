// Model folders of other programs as they come, and what import, export and train --from carry besides the model.
// tests/cli/cases has small ones with right values (numpy in float64, transformers 5.24).
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "base/folder_lock.h"
#include "cli/program.h"

namespace fw::test {
namespace {

using testing::HasSubstr;
using testing::Not;
using Args = std::vector<std::string>;
using Json = nlohmann::json;
namespace fs = std::filesystem;

Outcome ok(const Args& args) {
  Outcome outcome = run(args);
  EXPECT_EQ(outcome.code, 0) << args[0] << ": " << outcome.err;
  return outcome;
}

std::vector<std::string> files_of(const std::string& folder) {
  std::vector<std::string> names;
  for (const auto& entry : fs::directory_iterator(folder)) names.push_back(entry.path().filename().string());
  std::sort(names.begin(), names.end());
  return names;
}

double nll(const std::string& model) {
  const Outcome outcome =
      ok({"eval", model, "--text", case_path("ids.txt"), "--tokenizer", "ids", "--context", "0", "--json"});
  return Json::parse(outcome.out)["results"][0]["nll"].get<double>();
}

TEST(ModelFolder, TheEpsilonOfTransformersModels) {
  EXPECT_NEAR(nll(case_path("hfx_mamba2_eps")), 48.87812, 2e-5);
  EXPECT_NEAR(nll(case_path("hfx_mamba_eps")), 51.42689, 2e-5);
}

TEST(ModelFolder, InfinityAsPythonWritesIt) {
  Folder folder;
  copy_case("hfx_mamba2_eps", folder / "m");
  fs::copy_file(case_path("m2_inf/config.json"), folder / "m/config.json", fs::copy_options::overwrite_existing);
  EXPECT_GT(nll(folder / "m"), 0);
  EXPECT_THAT(ok({"info", folder / "m"}).out, HasSubstr("parameters"));
  ok({"import", folder / "m", folder / "ours"});
  EXPECT_EQ(nll(folder / "ours"), nll(folder / "m"));
  ok({"export", folder / "ours", folder / "theirs"});
  EXPECT_EQ(nll(folder / "theirs"), nll(folder / "m"));
}

TEST(ModelFolder, AnUnknownKeyIsAnErrorOrAWarning) {
  Folder folder;
  copy_case("two_ends", folder / "m");
  const Json good = Json::parse(slurp(folder / "m/config.json"));
  Json config = good;
  config["logit_scale"] = 2.0;
  spill(folder / "m/config.json", config.dump());
  const Outcome refused = run({"eval", folder / "m", "--text", case_path("ids.txt")});
  EXPECT_EQ(refused.code, 2);
  EXPECT_THAT(refused.err, HasSubstr("logit_scale: expected 1.0"));
  config = good;
  config["note"] = "of us";
  spill(folder / "m/config.json", config.dump());
  EXPECT_THAT(ok({"eval", folder / "m", "--text", case_path("ids.txt")}).err,
              HasSubstr("warning: '" + (folder / "m/config.json") + "': note: this key is not known"));
}

Json generated(const std::string& model) {
  return Json::parse(ok({"generate", model, "--prompt", "ab", "--tokens", "8", "--greedy", "--json"}).out);
}
TEST(ModelFolder, TheEndsOfGenerationConfig) {
  Folder folder;
  const Json there = generated(case_path("two_ends"));
  copy_case("two_ends", folder / "one");
  fs::remove(folder / "one/generation_config.json");
  EXPECT_EQ(there["ids"].size(), 4U);
  EXPECT_EQ(there["ids"][3], 257);
  EXPECT_EQ(there["stopped_by"], "end");
  EXPECT_EQ(generated(folder / "one")["ids"].size(), 8U);

  // The second end goes through import, export and training.
  ok({"import", case_path("two_ends"), folder / "ours"});
  ok({"export", folder / "ours", folder / "theirs"});
  spill(folder / "text", small_text());
  ok({"train", "--from", folder / "ours", "--text", folder / "text", "--out", folder / "run", "--steps", "1", "--batch",
      "1", "--length", "8", "--lr", "1e-9", "--min-lr", "0"});
  for (const char* name : {"ours", "theirs", "run"}) {
    Json report = generated(folder / name);
    EXPECT_EQ(report["ids"], there["ids"]) << name << report;
  }
  fs::remove(folder / "ours/generation_config.json");  // the configuration has noted it
  EXPECT_EQ(generated(folder / "ours")["ids"], there["ids"]);

  spill(folder / "one/generation_config.json", R"({"eos_token_id": "end"})");
  const Outcome refused = run({"generate", folder / "one", "--prompt", "ab", "--tokens", "1"});
  EXPECT_EQ(refused.code, 2);
  EXPECT_THAT(refused.err, HasSubstr("generation_config.json': eos_token_id: expected an id or a list of ids"));
}

TEST(ModelFolder, TheFilesOfTheTokenizerGoAlongAndNoOthers) {
  Folder folder;
  copy_case("two_ends", folder / "m");
  const std::vector<std::pair<std::string, std::string>> side = {
      {"special_tokens_map.json", R"({"eos_token": "<|end|>"})"},
      {"tokenizer_config.json", R"({"eos_token": "<|end|>", "chat_template": "{{ messages }}"})"},
      {"chat_template.jinja", "{{ messages }}"}};
  for (const auto& [name, text] : side) spill(folder / "m/" + name, text);
  for (const char* name : {"consolidated.safetensors", "pytorch_model.bin", "optimizer.pt"})
    spill(folder / "m/" + std::string(name), std::string(1 << 20, 'x'));
  ok({"import", folder / "m", folder / "ours"});
  ok({"export", folder / "ours", folder / "theirs"});
  for (const char* name : {"ours", "theirs"}) {
    for (const auto& [file, text] : side) EXPECT_EQ(slurp(folder / name + "/" + file), text) << name;
    EXPECT_EQ(slurp(folder / name + "/tokenizer.json"), slurp(case_path("two_ends/tokenizer.json"))) << name;
    EXPECT_EQ(slurp(folder / name + "/generation_config.json"), slurp(case_path("two_ends/generation_config.json")))
        << name;
    EXPECT_EQ(
        files_of(folder / name),
        (std::vector<std::string>{"chat_template.jinja", "config.json", "generation_config.json", "model.safetensors",
                                  "special_tokens_map.json", "tokenizer.json", "tokenizer_config.json"}));
  }
  EXPECT_EQ(Json::parse(slurp(folder / "theirs/config.json")), Json::parse(slurp(folder / "m/config.json")));
}

TEST(ModelFolder, ExportKeepsTheByteTokenizerAndSaysThatNothingEnds) {
  Folder folder;
  spill(folder / "text", small_text());
  ok(tiny_train(folder / "text", folder / "run") + Args{"--layout", "fla", "--steps", "1"});
  EXPECT_THAT(ok({"export", folder / "run", folder / "theirs"}).out, HasSubstr("tokenizer: bytes"));
  const Json definition = Json::parse(slurp(folder / "theirs/tokenizer.json")),
             config = Json::parse(slurp(folder / "theirs/config.json"));
  EXPECT_EQ(definition["model"]["type"], "BPE");
  EXPECT_EQ(definition["model"]["vocab"]["a"], 97);
  EXPECT_EQ(definition["model"]["vocab"].size(), 256U);
  for (const char* key : {"eos_token_id", "bos_token_id", "pad_token_id"})
    EXPECT_TRUE(config.contains(key) && config[key].is_null()) << key;
  EXPECT_THAT(ok({"import", folder / "theirs", folder / "back"}).out, HasSubstr("tokenizer: bytes"));
  const Args eval = {"--text", folder / "text", "--context", "64", "--json"};
  const auto results = [&](const std::string& model) {
    return Json::parse(ok(Args{"eval", model} + eval).out)["results"];
  };
  EXPECT_EQ(results(folder / "theirs"), results(folder / "run"));
  EXPECT_EQ(results(folder / "back"), results(folder / "run"));
  // The same file read as a Hugging Face tokenizer has the same ids.
  ok({"tokenize", folder / "text", "--tokenizer", folder / "theirs/tokenizer.json", "--out", folder / "tokens"});
  EXPECT_EQ(Json::parse(ok({"eval", folder / "run", "--tokenizer", "ids", "--context", "64", "--json", "--text",
                            case_path("ids.txt")})
                            .out)["results"]
                .size(),
            1U);
}

TEST(ModelFolder, TwoCommandsDoNotFillOneFolder) {
  Folder folder;
  fs::create_directory(folder / "target");
  {
    const FolderLock lock(folder / "target");
    const Outcome refused = run({"import", case_path("two_ends"), folder / "target"});
    EXPECT_EQ(refused.code, 2);
    EXPECT_THAT(refused.err, HasSubstr("is in use by process"));
    EXPECT_EQ(files_of(folder / "target"), std::vector<std::string>{".lock"});
  }
  ok({"import", case_path("two_ends"), folder / "target"});
  const std::vector<std::string> whole = files_of(folder / "target");
  EXPECT_THAT(whole, Not(testing::Contains(".lock")));
  EXPECT_EQ(run({"import", case_path("hfx_mamba_eps"), folder / "target"}).code, 2);

  // Begun together, one of them has the folder, and all of it is of one model.
  const std::string a = case_path("hfx_mamba_eps"), b = case_path("hfx_mamba2_eps");
  for (int round = 0; round < 10; ++round) {
    const std::string target = folder / ("both" + std::to_string(round));
    Program first({"import", a, target}), second({"import", b, target});
    const int codes[] = {first.wait().code, second.wait().code};
    EXPECT_TRUE((codes[0] == 0) != (codes[1] == 0)) << codes[0] << " " << codes[1];
    EXPECT_EQ(nll(target), nll(codes[0] == 0 ? a : b));
  }
}

TEST(ModelFolder, AFailedCommandLeavesNoFolder) {
  Folder folder;
  copy_case("two_ends", folder / "m");
  spill(folder / "m/special_tokens_map.json", "x");
  fs::remove(folder / "m/special_tokens_map.json");
  fs::create_directory(folder / "m/special_tokens_map.json");  // cannot be read
  EXPECT_EQ(run({"import", folder / "m", folder / "new/deep/target"}).code, 2);
  EXPECT_FALSE(fs::exists(folder / "new"));
  fs::create_directory(folder / "empty");
  EXPECT_EQ(run({"import", folder / "m", folder / "empty"}).code, 2);
  EXPECT_TRUE(files_of(folder / "empty").empty());
}

TEST(ModelFolder, CountsAreWholeNumbers) {
  const Json model = Json::parse(ok({"info", case_path("two_ends"), "--json"}).out)["model"];
  for (const char* key : {"parameters", "state_bytes", "state_bytes_token", "step_bytes"})
    EXPECT_TRUE(model[key].is_number_integer()) << key << model[key];
  EXPECT_EQ(model["parameters"], 34888);
}

TEST(ModelFolder, UnknownNamesSayTheNearestAndWhereTheListIs) {
  const Outcome rule = run({"train", "--rule", "gated_deltane", "--text", "x", "--out", "y"});
  EXPECT_EQ(rule.code, 2);
  EXPECT_THAT(rule.err, HasSubstr("unknown preset 'gated_deltane'; did you mean 'gated_deltanet'? (nearest: "
                                  "gated_deltanet, gated_deltanet2, "));
  EXPECT_THAT(rule.err, HasSubstr("'fastweight rules' lists all"));
  EXPECT_LT(rule.err.size(), 200U);
  Folder folder;
  spill(folder / "text", small_text());
  const Outcome layout =
      run(tiny_train(folder / "text", folder / "run") + Args{"--layout", "fla", "--rule", "kaczmarz"});
  EXPECT_EQ(layout.code, 2);
  EXPECT_THAT(layout.err, HasSubstr("its nearest is gated_deltanet"));
  EXPECT_THAT(layout.err, Not(HasSubstr("samba")));
}

}  // namespace
}  // namespace fw::test
