// The table of a sweep of language models, of results made by hand: differences to a base model, the loss of the
// training, where the runs come from.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "cli/program.h"

namespace fw::test {
namespace {

using nlohmann::json;
using testing::AllOf;
using testing::HasSubstr;
using testing::Not;

json one_run(const std::string& model, int64_t seed, double loss, double lr = 1e-3) {
  const json contexts = json::array(
      {{{"context", 64}, {"loss", loss}, {"perplexity", std::exp(loss)}, {"bits_per_byte", 2 * loss}},
       {{"context", 256}, {"loss", loss - 1}, {"perplexity", std::exp(loss - 1)}, {"bits_per_byte", 2 * loss - 2}}});
  return {{"model", model},
          {"lr", lr},
          {"seed", seed},
          {"parameters", 1e6},
          {"state_bytes", 1024},
          {"state_bytes_token", 0},
          {"training_tokens", 1000},
          {"tokens_per_second", 5000},
          {"contexts", contexts}};
}

// The page that `report` makes of these runs.
std::string page_of(const json& runs, const std::string& base) {
  const Folder folder;
  std::filesystem::create_directory(folder / "lm");
  json results = {{"sweep", "lm"}, {"text", {"a.txt"}},    {"valid", "b.txt"},
                  {"steps", 10},   {"tokens_a_step", 100}, {"runs", runs}};
  if (!base.empty()) results["base"] = base;
  spill(folder / "lm/results.json", results.dump());
  const Outcome outcome = run({"report", folder / "lm", "--out", folder / "page"});
  EXPECT_EQ(outcome.code, 0) << outcome.err;
  return slurp(folder / "page.md");
}

TEST(SweepLmTable, DifferencesToTheBaseArePairedBySeed) {
  const json runs = {one_run("kda", 1, 3.0), one_run("kda", 2, 3.5),       one_run("ssd", 1, 3.1),
                     one_run("ssd", 2, 3.5), one_run("attention", 2, 3.3), one_run("gla", 7, 2.0)};
  const std::string page = page_of(runs, "kda");
  // 2 * 0.1 and 0 bits per byte: mean 0.1, deviation 0.1414; one common seed; none
  EXPECT_THAT(
      page,
      AllOf(HasSubstr("| from kda at 64 | from kda at 256 | ktok/s |"), HasSubstr("| - | - | 5.0 ± 0.0 |"),
            HasSubstr("| +0.1000 ± 0.1414 | +0.1000 ± 0.1414 | 5.0 ± 0.0 |"), HasSubstr("| -0.4000 | -0.4000 | 5.0 |"),
            HasSubstr("| - | - | 5.0 |"), HasSubstr("difference in bits per byte to that model, paired by seed")));
  EXPECT_THAT(page_of(runs, ""), Not(HasSubstr("from kda")));
}

TEST(SweepLmTable, WithoutBytesTheDifferenceIsOfTheLossAndOfOneRate) {
  json runs = {one_run("kda", 1, 3.0), one_run("kda", 1, 4.0, 2e-3), one_run("ssd", 1, 3.5),
               one_run("ssd", 1, 4.25, 2e-3)};
  for (json& one : runs) {
    for (json& context : one["contexts"]) context["bits_per_byte"] = nullptr;
  }
  EXPECT_THAT(page_of(runs, "kda"), AllOf(HasSubstr("difference in loss to that model"),
                                          HasSubstr("| +0.5000 | +0.5000 |"), HasSubstr("| +0.2500 | +0.2500 |")));
}

TEST(SweepLmTable, TrainLossAndProvenanceWhereTheyAreKnown) {
  json runs = {one_run("kda", 1, 3.0), one_run("kda", 2, 3.5), one_run("ssd", 1, 3.1)};
  runs[2]["program"] = "fastweight 0.1";  // as earlier versions have it
  const std::string old = page_of(runs, "");
  EXPECT_THAT(old, AllOf(Not(HasSubstr("train loss")), HasSubstr("Provenance: program several.")));
  for (size_t i = 0; i < 2; ++i) {
    runs[i]["training"] = {{"loss", 2.5 + static_cast<double>(i)},
                           {"records", 10},
                           {"curve", json::array({{{"step", 10}, {"loss", 3.0}}})}};
    runs[i]["provenance"] = {{"program", "fastweight 0.1"},
                             {"command", "fastweight sweep lm"},
                             {"device", "NVIDIA H200"},
                             {"date", "2026-12-01"}};
  }
  EXPECT_THAT(page_of(runs, ""),
              AllOf(HasSubstr("| train loss | ktok/s |"), HasSubstr("3.0000 ± 0.7071"), HasSubstr("| - | 5.0 |"),
                    HasSubstr("The train loss is the mean of the last 10 records of a run."),
                    HasSubstr("Provenance: program fastweight 0.1, device several, date several, command several.")));
  runs.erase(2);
  EXPECT_THAT(page_of(runs, ""),
              HasSubstr("Provenance: program fastweight 0.1, device NVIDIA H200, date 2026-12-01, command fastweight "
                        "sweep lm."));
}

}  // namespace
}  // namespace fw::test
