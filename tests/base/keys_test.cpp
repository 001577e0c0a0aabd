// Keys of a configuration: JSON both ways with tables inside, ranges and their messages, the names of options.
#include "base/keys.h"

#include <gtest/gtest.h>

#include <limits>
#include <nlohmann/json.hpp>

#include "base/error.h"
#include "support/error_of.h"

namespace fw {
namespace {

using testing::error_of;
using Json = nlohmann::json;

struct Config {
  int64_t size = 4;
  double rate = 0.5;
  std::string kind = "soft", folder = "out";
  bool on = false;
  uint64_t seed = 1;
  StringList layers{"a"};
  IntList offsets{1, 2};
  int64_t window = 2048, heads = 4;

  KeyTables tables() {
    return {{"model",
             "Model",
             {{"size", "N", "size", &size, between(1, 8)},
              {"rate", "X", "rate", &rate, number("a number > 0", [](double x) { return x > 0; })},
              {"kind", "KIND", "one of {}", &kind, one_of({"soft", "hard", "none"})},
              {"folder", "FOLDER", "where", &folder, not_empty("the name of a folder")},
              {"on", "", "a switch", &on, any_value()},
              {"seed", "N", "seed", &seed, any_value()},
              {"layers", "NAME,NAME,...", "list", &layers, any_value()},
              {"offsets", "N,N,...", "list", &offsets, any_value()}}},
            {"mixer.window",
             "Windows",
             {{"window", "N", "tokens", &window, at_least(1)}, {"num_heads", "N", "heads", &heads, any_value()}}}};
  }
};

std::string read_error(const Json& json) {
  Config config;
  return error_of([&] { keys_from_json(config.tables(), json, "file", {"model_type"}); });
}

std::string range_error(void (*change)(Config&), bool as_in_run_file = false) {
  Config config;
  change(config);
  return error_of([&] { check_ranges(config.tables(), as_in_run_file); });
}

TEST(Keys, JsonGoesBothWaysWithTablesInside) {
  Config config;
  config.size = 7, config.rate = 0.1, config.kind = "none", config.on = true, config.seed = uint64_t{1} << 62;
  config.layers = {"a", "b"}, config.offsets = {}, config.window = 64;
  Json json = Json::object();
  keys_to_json(config.tables(), json);
  EXPECT_EQ(json.at("mixer"), Json::parse(R"({"window": {"window": 64, "num_heads": 4}})"));
  EXPECT_EQ(json.size(), 9U);
  Config read;
  keys_from_json(read.tables(), Json::parse(json.dump()), "file", {});
  Json again = Json::object();
  keys_to_json(read.tables(), again);
  EXPECT_EQ(again, json);
}

TEST(Keys, WhatIsNotThereKeepsItsValue) {
  Config config;
  keys_from_json(config.tables(), Json::parse(R"({"model_type": 3, "mixer": {"window": {"num_heads": 2}}})"), "file",
                 {"model_type"});
  EXPECT_EQ(config.heads, 2);
  EXPECT_EQ(config.window, 2048);
  EXPECT_EQ(config.size, 4);
}

TEST(Keys, JsonErrorsNameTheKey) {
  EXPECT_EQ(read_error({{"sizze", 1}}), "file: unknown key \"sizze\"; did you mean 'size'?");
  EXPECT_EQ(read_error(Json::parse(R"({"mixer": {"windw": {}}})")),
            "file: unknown key \"windw\" in mixer; did you mean 'window'?");
  EXPECT_EQ(read_error(Json::parse(R"({"mixer": {"window": {"size": 1}}})")),
            "file: unknown key \"size\" in mixer.window");
  EXPECT_EQ(read_error(Json::parse(R"({"mixer": 1})")), "file: mixer: expected an object, got 1");
  EXPECT_EQ(read_error(Json::parse(R"({"mixer": {"window": {"window": "a"}}})")),
            "file: mixer.window.window: expected a whole number, got \"a\"");
  EXPECT_EQ(read_error({{"seed", -1}}), "file: seed: expected a whole number >= 0, got -1");
  EXPECT_EQ(read_error({{"layers", "a"}}), "file: layers: expected an array of strings, got \"a\"");
  EXPECT_EQ(read_error(Json::parse(R"({"layers": ["a", 1]})")),
            "file: layers: expected an array of strings, got [\"a\",1]");
  EXPECT_EQ(read_error(Json::parse(R"({"offsets": [1, 1.5]})")),
            "file: offsets: expected an array of whole numbers, got [1,1.5]");
}

TEST(Keys, ValuesOutOfRangeNameTheKeyAndWhatWasExpected) {
  EXPECT_EQ(range_error([](Config&) {}), "");
  EXPECT_EQ(range_error([](Config& c) { c.size = 9; }), "size: expected 1 to 8, got 9");
  EXPECT_EQ(range_error([](Config& c) { c.rate = 0; }), "rate: expected a number > 0, got 0");
  EXPECT_EQ(range_error([](Config& c) { c.rate = std::numeric_limits<double>::infinity(); }),
            "rate: expected a number > 0, got inf");
  EXPECT_EQ(range_error([](Config& c) { c.kind = "sift"; }),
            "kind: expected soft, hard or none, got 'sift'; did you mean 'soft'?");
  EXPECT_EQ(range_error([](Config& c) { c.folder = ""; }), "folder: expected the name of a folder, got nothing");
  EXPECT_EQ(range_error([](Config& c) { c.window = 0; }), "mixer.window.window: expected a whole number >= 1, got 0");
  EXPECT_EQ(range_error([](Config& c) { c.size = 9; }, true), "model.size (--size): expected 1 to 8, got 9");
}

TEST(Keys, OptionsAndHelpFollowFromTheTable) {
  Config config;
  const KeyTables tables = config.tables();
  EXPECT_EQ(tables[0].keys[2].help, "one of soft, hard or none");
  EXPECT_EQ(flag_of(tables[0], tables[0].keys[0]), "--size");
  EXPECT_EQ(flag_of(tables[1], tables[1].keys[1]), "--window-num-heads");
}

}  // namespace
}  // namespace fw
