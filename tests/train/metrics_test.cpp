#include "train/metrics.h"

#include <gtest/gtest.h>

#include <limits>
#include <nlohmann/json.hpp>
#include <sstream>
#include <vector>

#include "base/file.h"
#include "training_support.h"

namespace fw {
namespace {

using testing::read_text;
using testing::TempFolder;

LogRecord record(int64_t step) {
  LogRecord r;
  r.step = step;
  r.tokens = step * 100;
  r.loss = 5.0 / static_cast<double>(step);
  r.norm = 0.25;
  r.lr = 1e-3;
  return r;
}

std::vector<std::string> lines(const std::string& path) {
  std::istringstream in(read_text(path));
  std::vector<std::string> all;
  for (std::string line; std::getline(in, line);) all.push_back(line);
  return all;
}

TEST(Metrics, WritesALineARecordInBothForms) {
  const TempFolder folder;
  make_folders(folder.path("run"));
  MetricsLog log(folder.path("run"), 0);
  log.append(record(10));
  LogRecord evaluated = record(20);
  evaluated.eval_loss = 1.5;
  evaluated.eval_bits_per_byte = 2.25;
  evaluated.expert_peak = 1.25;
  evaluated.experts_idle = 3;
  log.append(evaluated);
  // Both must be there before the log is closed: a run that is killed loses nothing.
  const auto json = lines(folder.path("run/metrics.jsonl")), csv = lines(folder.path("run/metrics.csv"));
  ASSERT_EQ(json.size(), 2u);
  const auto first = nlohmann::json::parse(json[0]), second = nlohmann::json::parse(json[1]);
  EXPECT_EQ(first.at("step"), 10);
  EXPECT_EQ(first.at("tokens"), 1000);
  EXPECT_DOUBLE_EQ(first.at("loss").get<double>(), 0.5);
  EXPECT_FALSE(first.contains("eval_loss") || first.contains("expert_peak"));
  EXPECT_EQ(second.at("expert_peak"), 1.25);
  EXPECT_EQ(second.at("experts_idle"), 3);
  EXPECT_DOUBLE_EQ(second.at("eval_bits_per_byte").get<double>(), 2.25);
  ASSERT_EQ(csv.size(), 3u);
  EXPECT_EQ(csv[0], "step,tokens,loss,norm,lr,ms,tokens_per_second,epoch,skipped,eval_loss,eval_bits_per_byte");
  EXPECT_EQ(csv[1], "10,1000,0.5,0.25,0.001,0,0,0,0,,");
  EXPECT_EQ(csv[2], "20,2000,0.25,0.25,0.001,0,0,0,0,1.5,2.25");
}

TEST(Metrics, NumbersThatAreNotFiniteStayReadable) {
  const TempFolder folder;
  make_folders(folder.path("run"));
  MetricsLog log(folder.path("run"), 0);
  LogRecord bad = record(10);
  bad.loss = std::numeric_limits<double>::quiet_NaN();
  bad.norm = std::numeric_limits<double>::infinity();
  log.append(bad);
  const auto json = nlohmann::json::parse(lines(folder.path("run/metrics.jsonl")).at(0));
  EXPECT_TRUE(json.at("loss").is_null());
  EXPECT_TRUE(json.at("norm").is_null());
  EXPECT_TRUE(lines(folder.path("run/metrics.csv")).at(1).starts_with("10,1000,nan,inf,"));
}

TEST(Metrics, OpeningDropsWhatCameAfterTheStepAndUnfinishedLines) {
  const TempFolder folder;
  make_folders(folder.path("run"));
  {
    MetricsLog log(folder.path("run"), 0);
    for (const int64_t step : {10, 20, 30}) log.append(record(step));
  }
  testing::write_text(folder.path("run/metrics.jsonl"),
                      read_text(folder.path("run/metrics.jsonl")) + R"({"step":5,"tok)");
  testing::write_text(folder.path("run/metrics.csv"), read_text(folder.path("run/metrics.csv")) + "4");
  {
    MetricsLog log(folder.path("run"), 20);
    log.append(record(25));
  }
  const auto json = lines(folder.path("run/metrics.jsonl")), csv = lines(folder.path("run/metrics.csv"));
  ASSERT_EQ(json.size(), 3u);
  EXPECT_EQ(nlohmann::json::parse(json[1]).at("step"), 20);
  EXPECT_EQ(nlohmann::json::parse(json[2]).at("step"), 25);
  ASSERT_EQ(csv.size(), 4u);
  EXPECT_TRUE(csv[2].starts_with("20,"));
  EXPECT_TRUE(csv[3].starts_with("25,"));
}

TEST(Metrics, TensorBoardGetsTheSameRecordsAndGoesOnAfterAResume) {
  const TempFolder folder;
  make_folders(folder.path("run"));
  const std::string events = folder.path("run/tensorboard/events.out.tfevents.fastweight");
  { MetricsLog(folder.path("run"), 0).append(record(10)); }
  EXPECT_FALSE(std::filesystem::exists(events));
  {
    MetricsLog log(folder.path("run"), 0, true);
    for (const int64_t step : {10, 20, 30}) log.append(record(step));
  }
  const std::string whole = read_text(events);
  EXPECT_NE(whole.find("train/loss"), std::string::npos);
  EXPECT_EQ(whole.find("held_out"), std::string::npos);
  { MetricsLog log(folder.path("run"), 20, true); }
  EXPECT_EQ(read_text(events), whole.substr(0, read_text(events).size()));
  EXPECT_LT(read_text(events).size(), whole.size());
  LogRecord evaluated = record(30);
  evaluated.eval_loss = 1.5;
  { MetricsLog(folder.path("run"), 20, true).append(evaluated); }
  EXPECT_NE(read_text(events).find("held_out/bits_per_byte"), std::string::npos);
}

}  // namespace
}  // namespace fw
