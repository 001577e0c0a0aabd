// The papers' models in recipes/papers: what fastweight info says of them, against counts that were checked elsewhere
// (flash-linear-attention's models, the papers' tables), and that train takes every file.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <map>
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

TEST(Recipes, HaveThePapersParameters) {
  // Millions to a tenth where a paper or its code says so, else all digits.
  const std::map<std::string, std::pair<double, double>> known = {
      {"340m-deltanet", {341.6e6, 5e4}},
      {"340m-gated-deltanet", {341.8e6, 5e4}},
      {"340m-precond-gated-deltanet", {342.2e6, 5e4}},
      {"340m-kda", {354.2e6, 5e4}},
      {"340m-precond-kda", {354.6e6, 5e4}},
      {"340m-qdelta", {367.2e6, 5e4}},
      // flame's gated_deltanet of 1B (1.387B) and, a layer,
      // 2048 x 6 + 1
      {"1.3b-qdelta", {1387348732 + 21 * (2048 * 6 + 1), 0}},
      {"1b-gated-deltanet", {995.0e6, 5e4}},
      {"1b-kda", {902.7e6, 5e4}},
      {"1b-precond-kda", {903.8e6, 5e4}},
      {"400m-kaczmarz", {399.7e6, 5e4}},
      {"1b-precond-gated-deltanet", {996.2e6, 5e4}},
      {"1.3b-gated-deltanet2", {1348080448, 0}},
      {"1.3b-gated-deltanet2-hybrid", {1253420448, 0}},
      {"1.3b-gated-deltanet-hybrid", {1201606208, 0}},
      {"1.3b-kda-hybrid", {1169862048, 0}},
      {"1.3b-transformer", {1158760448, 0}},
      // Summed by hand from the shapes of
      // docs/rules/mamba.md and mamba2.md
      {"1.3b-mamba", {1334740992, 0}},
      {"1.3b-mamba-hybrid", {1255385088, 0}},
      {"1.3b-longhorn-diag-hybrid", {1254729728, 0}},
      {"1.3b-mamba2", {1306303488, 0}},
      {"1.3b-mamba2-hybrid", {1249460608, 0}},
      {"1.3b-samba", {1403935488, 0}},
      // By hand: four projections, two convolutions, two
      // gates with bias, lambda, a norm.
      {"1.3b-mesa", {1366316800, 0}},
      {"1.3b-mesa-hybrid", {1159601728, 0}},
      // By hand: six mixes, four projections, ranks of 128,
      // 128, 64 (not in the first layer) and 224, two
      // vectors and r_k, GroupNorm, channel mix,
      // LayerNorms.
      {"1.3b-rwkv7", {1393186816, 0}},
      {"1.3b-rwkv7-hybrid", {1181065216, 0}},
      // By hand: in_proj of 8,912 (9,440) rows, out_proj,
      // biases and norms of B and C, dt_bias, D, three
      // matrices of MIMO, MLP; 1.50B is the published
      // model's.
      {"1.3b-mamba3", {1357667328, 0}},
      {"1.3b-mamba3-hybrid", {1258213888, 0}},
      {"1.5b-mamba3-mimo", {1497082880, 0}}};
  size_t found = 0;
  for (const auto& entry : std::filesystem::directory_iterator(kFolder)) {
    if (entry.path().extension() != ".toml") continue;
    const auto count = known.find(entry.path().stem().string());
    ASSERT_NE(count, known.end()) << entry.path();
    EXPECT_NEAR(info(entry.path().string()).at("parameters").get<double>(), count->second.first, count->second.second)
        << entry.path();
    ++found;
  }
  EXPECT_EQ(found, known.size());
}

TEST(Recipes, InfoSaysWhatTheyCost) {
  const Json hybrid = info(kFolder + "/1.3b-gated-deltanet2-hybrid.toml");
  EXPECT_EQ(hybrid.at("layers").size(), 20u);
  EXPECT_EQ(hybrid["layers"][18], "gated_deltanet2");
  EXPECT_EQ(hybrid["layers"][19], "window");
  // Ten matrices of 16 x 128 x 128, ten tails of 3 x 6,144, ten rings of 2 x 2,048 x 2,048.
  EXPECT_EQ(hybrid.at("state_bytes"), 10 * 4 * (16 * 128 * 128 + 3 * 6144 + 2 * 2048 * 2048));
  EXPECT_EQ(hybrid.at("state_bytes_token"), 0);
  EXPECT_EQ(hybrid.at("moment_bytes"), 8.0 * 1253420448);
  const Json transformer = info(kFolder + "/1.3b-transformer.toml");
  EXPECT_EQ(transformer.at("state_bytes"), 0);
  EXPECT_EQ(transformer.at("state_bytes_token"), 20 * 2 * 2048 * 4);
  EXPECT_EQ(transformer.at("flops_attention"), 20 * 4 * 2048 * 2048.5);
  const std::string text = run({"info", kFolder + "/1.3b-transformer.toml"}).out;
  EXPECT_THAT(text, HasSubstr("20 attention"));
  EXPECT_THAT(text, HasSubstr("1158760448"));
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
