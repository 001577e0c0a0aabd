// verify, import and export as a user runs them.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>
#include <sstream>

#include "base/safetensors.h"
#include "cli/program.h"
#include "support/shared.h"

namespace fw::test {
namespace {

using ::testing::HasSubstr;

class Verify : public ::testing::Test {
 protected:
  void SetUp() override {
    vectors_ = fw::testing::shared_path("vectors");
    if (vectors_.empty()) GTEST_SKIP() << fw::testing::kNoShared;
  }
  std::string model(const std::string& name) const { return vectors_ + "/models/" + name; }
  std::string vectors_;
  Folder folder_;
};

// What a clone without other programs' values proves itself with: computed by tools/make_conformance.py, which shares
// nothing with the sources, and by tools/make_hybrids.py.
TEST(Conformance, TheRepositorysOwnValues) {
  const std::string own = FW_SOURCE_DIR "/tests/conformance";
  for (const std::vector<std::string>& how :
       {std::vector<std::string>{"--tolerance", "1e-11"}, {"--dtype", "f32"}, {"--dtype", "f32", "--form", "token"}}) {
    const Outcome outcome = run(std::vector<std::string>{"verify", own} + how);
    EXPECT_EQ(outcome.code, 0) << outcome.out << outcome.err;
    EXPECT_THAT(outcome.out, HasSubstr(", 0 beyond, 0 rules or models unknown"));
    for (const char* compared :
         {"gated_deltanet2_neg", "kaczmarz", "qdelta", "precond_gated_deltanet", "comba", "lora", "linear_attn", "pkda",
          "training, norm", "qwen3_5", "olmo_hybrid", "qwen3_next", "kimi_linear"}) {
      EXPECT_THAT(outcome.out, HasSubstr(compared));
    }
  }
}

#ifdef FW_EMULATED_PROGRAM
// On a GPU: recurrences as float32 and as bf16, each within its own bounds.
TEST(Conformance, OnTheEmulatedDevice) {
  const std::string own = FW_SOURCE_DIR "/tests/conformance/ops.safetensors";
  const auto emulated = [](const std::vector<std::string>& args) {
    return Program(args, "", "/dev/null", {}, FW_EMULATED_PROGRAM).wait();
  };
  const Outcome outcome = emulated({"verify", own, "--device", "cuda"});
  EXPECT_EQ(outcome.code, 0) << outcome.out << outcome.err;
  EXPECT_THAT(outcome.out, HasSubstr("outputs, token form, f32"));
  EXPECT_THAT(outcome.out, HasSubstr("gradients, chunk form, bf16"));
  EXPECT_THAT(outcome.out, HasSubstr("emulated device, f32 and bf16: "));
  EXPECT_THAT(emulated({"verify", own, "--device", "cuda", "--dtype", "f64"}).err,
              HasSubstr("--dtype: expected f32 or bf16 on a GPU, got f64"));
  EXPECT_THAT(emulated({"verify", own, "--device", "cuda", "--dtype", "f32", "--form", "chunk"}).err,
              HasSubstr("--form: expected token"));
  const std::string model = FW_SOURCE_DIR "/tests/conformance/models/comba";
  EXPECT_THAT(emulated({"verify", model, "--device", "cuda", "--dtype", "f32"}).err,
              HasSubstr("--dtype: expected bf16 or none of a model on a GPU"));
}
#endif

// A value of it that is wrong by a millionth shows.
TEST(Conformance, AWrongValueFails) {
  Folder folder;
  std::string file = slurp(FW_SOURCE_DIR "/tests/conformance/ops.safetensors");
  uint64_t header = 0;
  std::memcpy(&header, file.data(), sizeof header);
  double value = 0;  // doubles come first: the one here is of the first gradient or output
  char* at = file.data() + sizeof header + header;
  std::memcpy(&value, at, sizeof value);
  value *= 1 + 1e-6;
  std::memcpy(at, &value, sizeof value);
  spill(folder / "ops.safetensors", file);
  EXPECT_EQ(run({"verify", folder / "ops.safetensors"}).code, 1);
}

// The whole folder: nothing of it may go missing unseen. The six values of the model comba are of a recurrence that
// erases after the decay, where the imported model erases before it (tests/train/model_conformance_test.cpp has them).
TEST_F(Verify, AllThatIsKnownPasses) {
  const Outcome all = run({"verify", vectors_});
  EXPECT_EQ(all.code, 1) << all.out << all.err;
  EXPECT_THAT(all.out, HasSubstr("170 within bounds, 6 beyond, 0 rules or models unknown"));
  std::istringstream lines(all.out);
  for (std::string line; std::getline(lines, line);) {
    if (line.find("FAILED") != std::string::npos) {
      EXPECT_EQ(line.substr(0, 6), "comba ") << line;
    }
  }
}

TEST_F(Verify, UnknownIsAFailureUnlessSkipped) {
  std::filesystem::create_directories(folder_ / "unheard");
  spill(folder_ / "unheard/config.json", R"({"model_type": "unheard"})");
  const Outcome outcome = run({"verify", folder_ / "unheard", model("linear_attn")});
  EXPECT_EQ(outcome.code, 1);
  EXPECT_THAT(outcome.out, HasSubstr("UNKNOWN"));
  EXPECT_EQ(run({"verify", folder_ / "unheard", "--skip-unknown"}).code, 0);
}

TEST_F(Verify, ScansThatAreNoRulesOfTheHeader) {
  const std::string more = fw::testing::shared_path("vectors_more");
  if (more.empty()) GTEST_SKIP() << fw::testing::kNoShared;
  for (const char* type : {"f64", "f32"}) {
    const Outcome outcome =
        run({"verify", more + "/ops_more.safetensors", "--dtype", type, "--skip-unknown", "--json"});
    EXPECT_EQ(outcome.code, 0) << outcome.out << outcome.err;
    const auto json = nlohmann::json::parse(outcome.out);
    for (const char* scan : {"mamba1", "longhorn_diag"}) {
      int64_t compared = 0;
      for (const auto& one : json.at("compared")) compared += one.at("subject") == scan ? 1 : 0;
      EXPECT_EQ(compared, 2) << scan;
      for (const auto& one : json.at("unknown")) EXPECT_NE(one.at("subject"), scan);
    }
    EXPECT_EQ(json.at("unknown"), nlohmann::json::array());
    std::map<std::string, int64_t> forms;
    for (const auto& one : json.at("compared")) ++forms[one.at("subject").get<std::string>()];
    // values and gradients in two forms
    for (const char* rule : {"mamba3", "mamba3_mimo", "mamba3_mimo_pairs"}) EXPECT_EQ(forms[rule], 4) << rule;
  }
}

TEST_F(Verify, ToleranceTypeAndForm) {
  EXPECT_EQ(run({"verify", model("gla"), "--dtype", "f32", "--tolerance", "1e-9"}).code, 1);
  const Outcome token = run({"verify", model("gla"), "--dtype", "f32", "--form", "token"});
  EXPECT_EQ(token.code, 0) << token.out;
  EXPECT_EQ(run({"verify", model("gla"), "--dtype", "bf16"}).code, 0);
  EXPECT_EQ(run({"verify", model("gla"), "--dtype", "f16"}).code, 2);
  EXPECT_EQ(run({"verify", model("gla"), "--form", "fast"}).code, 2);
  EXPECT_EQ(run({"verify", model("gla"), "--tolerance", "-1"}).code, 2);
}

TEST(VerifyInput, WhatCannotBeRead) {
  Folder folder;
  const auto error = [](const std::vector<std::string>& args) {
    const Outcome outcome = run(args);
    EXPECT_EQ(outcome.code, 2) << outcome.out;
    return outcome.err;
  };
  EXPECT_THAT(error({"verify"}), HasSubstr("PATH"));
  EXPECT_THAT(error({"verify", folder / "missing"}), HasSubstr("missing"));
  EXPECT_THAT(error({"verify", folder.path()}), HasSubstr("found none"));
  spill(folder / "ops.safetensors", "not one");
  EXPECT_THAT(error({"verify", folder / "ops.safetensors"}), HasSubstr("ops.safetensors"));
  EXPECT_THAT(error({"verify", folder.path()}), HasSubstr("ops.safetensors"));
  std::filesystem::create_directories(folder / "model");
  spill(folder / "model/config.json", "{\"model_type\": \"gla\"}");
  EXPECT_THAT(error({"verify", folder / "model"}), HasSubstr("io.safetensors"));
}

// One readable and one not: the table has the first, the exit code is of the second.
TEST_F(Verify, UnreadableBesideReadable) {
  spill(folder_ / "ops.safetensors", "not one");
  const Outcome outcome = run({"verify", folder_ / "ops.safetensors", model("linear_attn")});
  EXPECT_EQ(outcome.code, 2);
  EXPECT_THAT(outcome.out, HasSubstr("linear_attn"));
  EXPECT_THAT(outcome.out, HasSubstr("1 not readable"));
}

TEST_F(Verify, ImportGenerateEvaluateExport) {
  const std::string ours = folder_ / "ours", theirs = folder_ / "theirs";
  const Outcome imported = run({"import", model("retnet"), ours});
  EXPECT_EQ(imported.code, 0) << imported.err;
  // Prompt and text are ids, the folder having no tokenizer; greedy text of the folder itself and of the imported one.
  const std::vector<std::string> how = {"--prompt", "5 9 77 3 1 4", "--greedy", "--tokens", "8", "--no-echo"};
  const Outcome direct = run(std::vector<std::string>{"generate", model("retnet")} + how),
                through = run(std::vector<std::string>{"generate", ours} + how);
  EXPECT_EQ(direct.code, 0) << direct.err;
  EXPECT_EQ(direct.out, through.out);
  EXPECT_EQ(std::count(direct.out.begin(), direct.out.end(), ' '), 8);
  spill(folder_ / "ids", "1 2 3 4 5 6 7 8 9 10 11 12 100 99 98\n");
  const Outcome eval = run({"eval", model("retnet"), "--text", folder_ / "ids", "--context", "8"});
  EXPECT_EQ(eval.code, 0) << eval.err;
  spill(folder_ / "ids", "1 2 101");
  EXPECT_THAT(run({"eval", model("retnet"), "--text", folder_ / "ids"}).err,
              HasSubstr("expected numbers from 0 to 100 between spaces, got '101'"));

  const Outcome exported = run({"export", ours, theirs});
  EXPECT_EQ(exported.code, 0) << exported.err;
  EXPECT_THAT(exported.out, HasSubstr("model_type retnet"));
  EXPECT_EQ(run(std::vector<std::string>{"generate", theirs} + how).out, direct.out);

  EXPECT_THAT(run({"import", ours, folder_ / "again"}).err, HasSubstr("ours already"));
  EXPECT_THAT(run({"import", model("retnet"), ours}).err, HasSubstr("has a model already"));
  std::filesystem::create_directories(folder_ / "unheard");
  spill(folder_ / "unheard/config.json", "{\"model_type\": \"rwkv6\"}");
  EXPECT_THAT(run({"import", folder_ / "unheard", folder_ / "x"}).err, HasSubstr("rwkv6"));
  EXPECT_EQ(run({"import", folder_ / "nothing", folder_ / "x"}).code, 2);
  EXPECT_EQ(run({"import", model("retnet")}).code, 2);
}

}  // namespace
}  // namespace fw::test
