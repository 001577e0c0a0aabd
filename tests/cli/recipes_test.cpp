// The papers' models in recipes/papers: what fastweight info says of them and how they are trained, against the papers,
// their published scripts and models, and counts by hand.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "cli/program.h"

namespace fw::test {
namespace {

using Json = nlohmann::json;
using ::testing::HasSubstr;

const std::string kFolder = FW_SOURCE_DIR "/recipes/papers";

Json info(const std::string& path) {
  const Outcome outcome = run({"info", path, "--json"});
  EXPECT_EQ(outcome.code, 0) << path << ": " << outcome.err;
  return outcome.code == 0 ? Json::parse(outcome.out).at("model") : Json();
}

// What a paper, or its published script where the paper is silent, says of a model and its training.
struct Published {
  const char* file;
  const char* source;  // paper and section
  double parameters, within;
  int64_t layers;  // recurrent ones
  double state;    // numbers in the matrices of a recurrent layer
  // and what else it remembers: inputs of convolutions, the preconditioner, Mamba-3's last key and angles
  double beside;
  const char* init;
  double steps, tokens;  // of a step
  double lr, warmup, weight_decay;
};

// "340M" and the like are the papers' numbers to three digits or their tables' to four; 0 within: all digits, summed by
// hand or of a published model.
const std::vector<Published>& published() {
  constexpr const char* kPdn = "Preconditioned DeltaNet, 4.2 and E.1";
  constexpr const char* kKla = "Kaczmarz Linear Attention, appendix C";
  constexpr const char* kQ340 = "Q-Delta, 4.1, script of 340M";
  constexpr const char* kQ13 = "Q-Delta, 4.1, script of 1.3B";
  constexpr const char* kGdn2 = "Gated DeltaNet-2, 4: 1.3B, state 262,144 a layer";
  constexpr const char* kHybrid = "Gated DeltaNet-2, 4: 1.3B hybrid, cell of mixer, MLP, window of 2,048, MLP";
  constexpr const char* kNone = "no table of a paper: the layer of its authors, trained as Gated DeltaNet-2's models";
  constexpr double k512K = 524288, k2M = 2097152;
  static const std::vector<Published> rows = {
      {"340m-deltanet", kPdn, 341.6e6, 5e4, 24, 131072, 9216, "normal", 28610, k512K, 4e-4, 954, 0.01},
      {"340m-deltanet-neg", kPdn, 341.6e6, 5e4, 24, 131072, 9216, "normal", 28610, k512K, 4e-4, 954, 0.01},
      {"340m-precond-deltanet", kPdn, 342.0e6, 5e4, 24, 131072, 9216 + 1024, "normal", 28610, k512K, 4e-4, 954, 0.01},
      {"340m-gated-deltanet", kPdn, 341.8e6, 5e4, 24, 131072, 9216, "normal", 28610, k512K, 4e-4, 954, 0.01},
      {"340m-gated-deltanet-neg", kPdn, 341.8e6, 5e4, 24, 131072, 9216, "normal", 28610, k512K, 4e-4, 954, 0.01},
      {"340m-precond-gated-deltanet", kPdn, 342.2e6, 5e4, 24, 131072, 9216 + 1024, "normal", 28610, k512K, 4e-4, 954,
       0.01},
      {"340m-kda", kPdn, 354.2e6, 5e4, 24, 131072, 9216, "normal", 28610, k512K, 4e-4, 954, 0.01},
      {"340m-kda-neg", kPdn, 354.2e6, 5e4, 24, 131072, 9216, "normal", 28610, k512K, 4e-4, 954, 0.01},
      {"340m-precond-kda", kPdn, 354.6e6, 5e4, 24, 131072, 9216 + 1024, "normal", 28610, k512K, 4e-4, 954, 0.01},
      // Iso-parametric at 1B: within 0.2% of each other.
      {"1b-gated-deltanet", kPdn, 995.0e6, 5e4, 24, 229376, 16128, "normal", 95367, k512K, 4e-4, 954, 0.01},
      {"1b-precond-gated-deltanet", kPdn, 995.0e6, 2e6, 24, 229376, 16128 + 1792, "normal", 95367, k512K, 4e-4, 954,
       0.01},
      {"1b-kda", kPdn, 995.0e6, 2e6, 24, 201600, 15120, "normal", 95367, k512K, 4e-4, 954, 0.01},
      {"1b-precond-kda", kPdn, 995.0e6, 2e6, 24, 201600, 15120 + 1680, "normal", 95367, k512K, 4e-4, 954, 0.01},
      {"400m-kaczmarz", kKla, 0.4e9, 5e6, 24, 131072, 9216, "torch", 477, k2M, 1e-4, 10, 0.1},
      {"400m-gated-deltanet", kKla, 0.4e9, 5e6, 24, 131072, 9216, "torch", 477, k2M, 1e-4, 10, 0.1},
      {"400m-deltanet", kKla, 0.4e9, 5e6, 24, 131072, 9216, "torch", 477, k2M, 1e-4, 10, 0.1},
      {"400m-longhorn", kKla, 0.4e9, 5e6, 24, 131072, 9216, "torch", 477, k2M, 1e-4, 10, 0.1},
      {"400m-gla", kKla, 0.4e9, 5e6, 24, 131072, 0, "torch", 477, k2M, 1e-4, 10, 0.1},
      {"400m-mamba2", kKla, 0.38e9, 5e6, 48, 262144, 6912, "torch", 477, k2M, 1e-4, 10, 0.1},
      {"340m-qdelta", kQ340, 380.0e6, 5e4, 21, 196608, 9216, "normal", 28600, k512K, 1e-3, 1024, 0.1},
      {"qdelta-340m-gated-deltanet", kQ340, 380.0e6, 2e5, 21, 196608, 9216, "normal", 28600, k512K, 1e-3, 1024, 0.1},
      {"qdelta-340m-deltanet", kQ340, 380.0e6, 2.5e6, 21, 131072, 9216, "normal", 28600, k512K, 1e-3, 1024, 0.1},
      {"qdelta-340m-retnet", kQ340, 380.0e6, 2.5e6, 21, 524288, 0, "normal", 28600, k512K, 1e-3, 1024, 0.1},
      {"qdelta-340m-mamba", kQ340, 352797696, 0, 48, 32768, 6144, "normal", 28600, k512K, 1e-3, 1024, 0.1},
      {"qdelta-340m-mamba2", kQ340, 349619712, 0, 48, 262144, 6912, "normal", 28600, k512K, 1e-3, 1024, 0.1},
      // flame's gated_deltanet of 1B and, a layer, 2048 x 6 + 1.
      {"1.3b-qdelta", kQ13, 1387348732 + 21 * (2048 * 6 + 1), 0, 21, 786432, 18432, "normal", 57200, k512K, 4e-4, 2048,
       0.1},
      {"qdelta-1.3b-gated-deltanet", kQ13, 1387348732, 0, 21, 786432, 18432, "normal", 57200, k512K, 4e-4, 2048, 0.1},
      {"qdelta-1.3b-deltanet", kQ13, 1387.6e6, 3e6, 21, 262144, 18432, "normal", 57200, k512K, 4e-4, 2048, 0.1},
      {"qdelta-1.3b-retnet", kQ13, 1387.6e6, 3e6, 21, 1048576, 0, "normal", 57200, k512K, 4e-4, 2048, 0.1},
      {"qdelta-1.3b-mamba", kQ13, 1334740992, 0, 48, 65536, 12288, "normal", 57200, k512K, 4e-4, 2048, 0.1},
      {"qdelta-1.3b-mamba2", kQ13, 1306303488, 0, 48, 524288, 13056, "normal", 57200, k512K, 4e-4, 2048, 0.1},
      {"1.3b-gated-deltanet", kGdn2, 1.3e9, 4e6, 20, 262144, 18432, "xavier", 190735, k512K, 4e-4, 1907, 0.1},
      {"1.3b-kda", kGdn2, 1.3e9, 4e6, 20, 262144, 18432, "xavier", 190735, k512K, 4e-4, 1907, 0.1},
      {"1.3b-gated-deltanet2", kGdn2, 1.3e9, 4e6, 20, 262144, 18432, "xavier", 190735, k512K, 4e-4, 1907, 0.1},
      {"1.3b-mamba2", kGdn2, 1.3e9, 4e6, 20, 262144, 12672, "xavier", 190735, k512K, 4e-4, 1907, 0.1},
      {"1.3b-mamba3-siso", kGdn2, 1.3e9, 4e6, 20, 262144, 10240, "xavier", 190735, k512K, 4e-4, 1907, 0.1},
      {"1.3b-mamba3", kGdn2, 1.3e9, 4e6, 20, 262144, 34816, "xavier", 190735, k512K, 4e-4, 1907, 0.1},
      {"1.3b-transformer", kGdn2, 1.3e9, 4e6, 0, 0, 0, "xavier", 190735, k512K, 4e-4, 1907, 0.1},
      {"1.3b-gated-deltanet-hybrid", kHybrid, 1.3e9, 4e6, 10, 262144, 18432, "xavier", 190735, k512K, 4e-4, 1907, 0.1},
      {"1.3b-kda-hybrid", kHybrid, 1.3e9, 4e6, 10, 262144, 18432, "xavier", 190735, k512K, 4e-4, 1907, 0.1},
      {"1.3b-gated-deltanet2-hybrid", kHybrid, 1.3e9, 4e6, 10, 262144, 18432, "xavier", 190735, k512K, 4e-4, 1907, 0.1},
      {"1.3b-mamba2-hybrid", kHybrid, 1.3e9, 4e6, 10, 262144, 12672, "xavier", 190735, k512K, 4e-4, 1907, 0.1},
      {"1.3b-mamba3-siso-hybrid", kHybrid, 1.3e9, 4e6, 10, 262144, 10240, "xavier", 190735, k512K, 4e-4, 1907, 0.1},
      {"1.3b-mamba3-hybrid", kHybrid, 1.3e9, 4e6, 10, 262144, 34816, "xavier", 190735, k512K, 4e-4, 1907, 0.1},
      // By hand from the shapes of docs/rules/mamba.md and docs/models.md.
      {"1.3b-mamba", kNone, 1334740992, 0, 48, 65536, 12288, "xavier", 190735, k512K, 4e-4, 1907, 0.1},
      {"1.3b-mamba-hybrid", kNone, 1255385088, 0, 10, 65536, 12288, "xavier", 190735, k512K, 4e-4, 1907, 0.1},
      {"1.3b-longhorn-diag-hybrid", kNone, 1254729728, 0, 10, 65536, 12288, "xavier", 190735, k512K, 4e-4, 1907, 0.1},
      {"1.3b-samba", kNone, 1403935488, 0, 9, 73728, 13824, "xavier", 190735, k512K, 4e-4, 1907, 0.1},
      // By hand: four projections, two convolutions, two gates with bias, lambda, a norm.
      {"1.3b-mesa", kNone, 1366316800, 0, 24, 524288, 12288, "xavier", 190735, k512K, 4e-4, 1907, 0.1},
      {"1.3b-mesa-hybrid", kNone, 1159601728, 0, 10, 524288, 12288, "xavier", 190735, k512K, 4e-4, 1907, 0.1},
      // By hand: six mixes, four projections, ranks of 128, 128, 64 (not in the first layer) and 224, two vectors and
      // r_k, GroupNorm, channel mix, LayerNorms.
      {"1.3b-rwkv7", kNone, 1393186816, 0, 24, 131072, 4096, "xavier", 190735, k512K, 4e-4, 1907, 0.1},
      {"1.3b-rwkv7-hybrid", kNone, 1181065216, 0, 10, 131072, 2048, "xavier", 190735, k512K, 4e-4, 1907, 0.1},
      // By hand: in_proj of 8,912 rows, out_proj, biases and norms of B and C, dt_bias, D, three matrices of MIMO, MLP;
      // 1.50B is the published model's.
      {"1.5b-mamba3-mimo", "Mamba-3's published mamba3-mimo-1.5b", 1497082880, 0, 24, 524288, 53248, "xavier", 190735,
       k512K, 4e-4, 1907, 0.1}};
  return rows;
}

// A number or a word of a recipe, which has a key a line.
std::string value_of(const std::string& text, const std::string& key) {
  const size_t at = text.find("\n" + key + " = ");
  if (at == std::string::npos) return "";
  const size_t begin = at + key.size() + 4;
  std::string value = text.substr(begin, text.find('\n', begin) - begin);
  if (value.starts_with('"')) value = value.substr(1, value.size() - 2);
  return value;
}

TEST(Recipes, AreThePapersModels) {
  for (const Published& row : published()) {
    SCOPED_TRACE(std::string(row.file) + ": " + row.source);
    const Json model = info(kFolder + "/" + row.file + ".toml");
    ASSERT_TRUE(model.contains("parameters"));
    EXPECT_NEAR(model["parameters"].get<double>(), row.parameters, row.within);
    const auto layers = model["layers"].get<std::vector<std::string>>();
    const auto windows = std::count(layers.begin(), layers.end(), "window");
    EXPECT_EQ(static_cast<int64_t>(layers.size()) - windows - std::count(layers.begin(), layers.end(), "attention"),
              row.layers);
    const double width = std::stod(value_of(slurp(kFolder + "/" + row.file + ".toml"), "hidden_size"));
    const double rings = static_cast<double>(windows) * 2 * 2048 * width;  // keys and values of 2,048 tokens
    EXPECT_EQ(model["state_bytes"].get<double>(),
              4 * (static_cast<double>(row.layers) * (row.state + row.beside) + rings));
  }
}

TEST(Recipes, AreThePapersTraining) {
  for (const Published& row : published()) {
    SCOPED_TRACE(std::string(row.file) + ": " + row.source);
    const std::string text = slurp(kFolder + "/" + row.file + ".toml");
    const auto number = [&](const char* key) { return std::stod(value_of(text, key)); };
    const std::string init = value_of(text, "init");
    EXPECT_EQ(init.empty() ? "xavier" : init, row.init);
    EXPECT_EQ(number("steps"), row.steps);
    EXPECT_EQ(number("batch") * number("accumulate") * number("length"), row.tokens);
    EXPECT_EQ(number("lr"), row.lr);
    EXPECT_EQ(number("min_lr"), row.lr / 10);
    EXPECT_EQ(number("warmup"), row.warmup);
    EXPECT_EQ(number("weight_decay"), row.weight_decay);
    EXPECT_EQ(number("clip"), 1);
    // Only Preconditioned DeltaNet says where its warm-up starts.
    EXPECT_EQ(value_of(text, "warmup_from"), std::string(row.source).starts_with("Preconditioned") ? "4e-5" : "");
    EXPECT_EQ(value_of(text, "adam_eps"), std::string(row.source).starts_with("Q-Delta") ? "1e-15" : "");
  }
}

TEST(Recipes, HaveARowEach) {
  std::vector<std::string> files, rows;
  for (const auto& entry : std::filesystem::directory_iterator(kFolder)) files.push_back(entry.path().stem().string());
  for (const Published& row : published()) rows.emplace_back(row.file);
  EXPECT_THAT(files, testing::UnorderedElementsAreArray(rows));
}

TEST(Recipes, InfoSaysWhatTheyCost) {
  const Json hybrid = info(kFolder + "/1.3b-gated-deltanet2-hybrid.toml");
  EXPECT_EQ(hybrid.at("layers").size(), 20u);
  EXPECT_EQ(hybrid["layers"][18], "gated_deltanet2");
  EXPECT_EQ(hybrid["layers"][19], "window");
  // Ten matrices of 16 x 128 x 128, ten tails of 3 x 6,144, ten rings of 2 x 2,048 x 2,048.
  EXPECT_EQ(hybrid.at("state_bytes"), 10 * 4 * (16 * 128 * 128 + 3 * 6144 + 2 * 2048 * 2048));
  EXPECT_EQ(hybrid.at("state_bytes_token"), 0);
  EXPECT_EQ(hybrid.at("moment_bytes"), 8.0 * 1303207328);
  const Json transformer = info(kFolder + "/1.3b-transformer.toml");
  EXPECT_EQ(transformer.at("state_bytes"), 0);
  EXPECT_EQ(transformer.at("state_bytes_token"), 20 * 2 * 2048 * 4);
  EXPECT_EQ(transformer.at("flops_attention"), 20 * 4 * 2048 * 2048.5);
  const std::string text = run({"info", kFolder + "/1.3b-transformer.toml"}).out;
  EXPECT_THAT(text, HasSubstr("20 attention"));
  EXPECT_THAT(text, HasSubstr("1300318208"));
  EXPECT_THAT(text, HasSubstr("0 bytes a sequence and 327680 a token"));
}

// train --dry-run plans the same step; tests/train/memory_plan_test.cpp compares that with what a run takes.
TEST(Recipes, TheMemoryOfAStepIsThatOfTheDryRun) {
  for (const char* name : {"1.3b-gated-deltanet2-hybrid", "340m-deltanet"}) {
    const std::string path = kFolder + "/" + name + ".toml";
    const double bytes = info(path).at("step_bytes").get<double>();
    EXPECT_THAT(run({"train", "--dry-run", path}).out, HasSubstr(fmt::format("(planned: {:.0f} bytes)", bytes)));
    EXPECT_THAT(run({"info", path}).out, HasSubstr(fmt::format("({:.0f} bytes)", bytes)));
  }
  Folder folder;
  const Json all = info(kFolder + "/340m-deltanet.toml");
  std::string text = slurp(kFolder + "/340m-deltanet.toml");
  text.insert(text.find("steps ="), "recompute = \"all\"\n");
  spill(folder / "again.toml", text);
  const Json again = info(folder / "again.toml");
  EXPECT_EQ(again.at("recompute"), "all");
  EXPECT_LT(again.at("activation_bytes").get<double>(), 0.5 * all.at("activation_bytes").get<double>());
}

TEST(Recipes, InfoOfWhatIsNone) {
  Folder folder;
  EXPECT_EQ(run({"info", folder / "nothing.toml"}).code, 2);
  spill(folder / "bad.toml", "[model]\nnum_heads = 0\n");
  EXPECT_THAT(run({"info", folder / "bad.toml"}).err, HasSubstr("num_heads"));
}

}  // namespace
}  // namespace fw::test
