// --json of every command that has it: docs/json.md lists exactly the keys that come, and the values are those of the
// text.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <nlohmann/json.hpp>
#include <regex>
#include <set>
#include <sstream>

#include "base/safetensors.h"
#include "cli/program.h"
#include "rule/rule.h"

namespace fw::test {
namespace {

using testing::HasSubstr;
using Json = nlohmann::json;
using Args = std::vector<std::string>;
using Paths = std::set<std::string>;

// The keys that docs/json.md has in the tables of a section.
Paths documented(const std::string& section) {
  std::istringstream in(slurp(FW_SOURCE_DIR "/docs/json.md"));
  Paths found;
  bool here = false;
  for (std::string line; std::getline(in, line);) {
    if (line.starts_with("## ")) here = line == "## " + section;
    if (!here || !line.starts_with("| `")) continue;
    const std::string cell = line.substr(0, line.find(" | "));
    static const std::regex kCode("`([^`]+)`");
    for (std::sregex_iterator at(cell.begin(), cell.end(), kCode), end; at != end; ++at) found.insert((*at)[1]);
  }
  EXPECT_FALSE(found.empty()) << "docs/json.md has no table under " << section;
  return found;
}

// The paths of all values, as docs/json.md writes them; below what it has as a.* only that.
void add_paths(const Json& json, const std::string& path, const Paths& known, Paths& found) {
  const bool objects = json.is_array() && !json.empty() && json.front().is_object();
  if (objects) {
    for (const Json& item : json) add_paths(item, path + "[]", known, found);
  } else if (json.is_object() && known.count(path + ".*") > 0) {
    found.insert(path + ".*");
  } else if (json.is_object()) {
    for (const auto& [key, value] : json.items())
      add_paths(value, path.empty() ? key : fmt::format("{}.{}", path, key), known, found);
  } else {
    found.insert(path);
  }
}

// All of these together have every key of the section, and no other.
void expect_documented(const std::string& section, const std::vector<Json>& reports) {
  Paths known = documented(section), found;
  if (section != "generate") known.insert({"fastweight", "commit", "command"});
  for (const Json& report : reports) add_paths(report, "", known, found);
  // An array that was empty shows no keys of its objects.
  std::erase_if(found, [&](const std::string& path) {
    return known.count(path) == 0 &&
           std::any_of(known.begin(), known.end(), [&](const std::string& k) { return k.starts_with(path + "[]."); });
  });
  EXPECT_EQ(found, known);
}

Outcome checked(const Args& args, int code = 0) {
  Outcome outcome = run(args);
  EXPECT_EQ(outcome.code, code) << outcome.out << outcome.err;
  return outcome;
}

Json json_of(const Args& args, int code = 0) {
  Json json = Json::parse(checked(args + Args{"--json"}, code).out);
  EXPECT_EQ(json.at("command"), args[0]);
  EXPECT_EQ("fastweight " + json.at("fastweight").get<std::string>() + "\n", run({"--version"}).out);
  return json;
}

// Cells of the rows of a table, which stand two spaces or more apart.
std::vector<Args> rows(const std::string& text) {
  std::vector<Args> found;
  std::istringstream in(text);
  static const std::regex kGap("  +");
  for (std::string line; std::getline(in, line);) {
    Args cells;
    for (std::sregex_token_iterator at(line.begin(), line.end(), kGap, -1), end; at != end; ++at) {
      if (at->length() > 0) cells.push_back(*at);
    }
    found.push_back(cells);
  }
  return found;
}

Args row_of(const std::string& text, const Args& first) {
  for (const Args& row : rows(text)) {
    if (row.size() >= first.size() && std::equal(first.begin(), first.end(), row.begin())) return row;
  }
  ADD_FAILURE() << "no row of " << first[0] << " in\n" << text;
  return Args(20);
}

TEST(JsonOutput, TrainsProfileIsTheTextsTable) {
  Folder folder;
  const Args small{"--hidden-size",
                   "16",
                   "--num-hidden-layers",
                   "2",
                   "--num-heads",
                   "2",
                   "--head-dim",
                   "8",
                   "--intermediate-size",
                   "32",
                   "--layers",
                   "recurrent,window",
                   "--batch",
                   "2",
                   "--length",
                   "40",
                   "--threads",
                   "1"};
  const std::string text =
      checked(Args{"train", "--profile", "--out", folder / "run", "--json", folder / "profile.json"} + small).out;
  EXPECT_FALSE(std::filesystem::exists(folder / "run"));
  const Json json = Json::parse(slurp(folder / "profile.json"));
  expect_documented("train", {json});
  const Json& profile = json.at("profile");
  double shares = 0, ms = 0;
  for (const auto& [kind, share] : profile.at("shares").items()) {
    EXPECT_GT(share.get<double>(), 0) << kind;
    shares += share.get<double>();
  }
  EXPECT_NEAR(shares, 1, 1e-9);
  for (const char* name : {"linear_forward", "linear_backward", "cross_entropy_backward", "recurrence_forward",
                           "recurrence_backward", "attention_backward", "adamw"}) {
    EXPECT_EQ(row_of(text, {name})[0], name);
  }
  for (const Json& row : profile.at("operations")) {
    EXPECT_GT(row.at("bytes").get<double>(), 0) << row;
    EXPECT_GE(row.at("calls").get<int64_t>(), 1) << row;
    ms += row.at("ms").get<double>();
  }
  EXPECT_NEAR(ms, profile.at("operations_ms").get<double>(), 1e-6 * ms);
  EXPECT_EQ(run({"train", "--json", folder / "x"}).code, 2);
  EXPECT_EQ(run(Args{"train", "--profile", "--dry-run"} + small).code, 2);
}

TEST(JsonOutput, RulesHasWhatTheTextHas) {
  const Json all = json_of({"rules"}), one = json_of({"rules", "kda", "update=additive"});
  expect_documented("rules", {all, one});
  const std::string list = checked({"rules"}).out, table = checked({"rules", "--markdown"}).out;
  ASSERT_EQ(all.at("rules").size(), presets().size());
  ASSERT_EQ(all.at("ablations").size(), ablations().size());
  for (const Json& rule : all.at("rules")) {
    const std::string name = rule.at("name");
    EXPECT_THAT(list, HasSubstr("\n  " + name + " "));
    EXPECT_THAT(table, HasSubstr(fmt::format("| {} | {} |", name, rule.at("axes").at("decay").get<std::string>())));
    const std::string text = checked({"rules", name}).out;
    EXPECT_THAT(text, HasSubstr("  " + name + ": " + rule.at("summary").get<std::string>() + "\n"));
    EXPECT_THAT(text, HasSubstr("  axes: " + rule.at("text").get<std::string>() + "\n"));
    for (const std::string line : rule.at("formulas")) EXPECT_THAT(text, HasSubstr("    " + line + "\n"));
    const std::string rest = text.substr(text.find("  inputs: ")), inputs = rest.substr(0, rest.find("\n  step: "));
    // Of a gate the text says in brackets that there is one a head.
    const std::string unscaled = std::regex_replace(inputs, std::regex("\\([^)]*\\)"), "");
    EXPECT_EQ(static_cast<size_t>(std::count(unscaled.begin(), unscaled.end(), ',')) + 1, rule.at("inputs").size())
        << inputs;
    // The text is one that gives the rule again.
    EXPECT_EQ(parse_rule(rule.at("text").get<std::string>()), preset(name).rule) << name;
    EXPECT_THAT(rule.at("same_as").get<Args>(), testing::Contains(name));
  }
  for (const auto& [axis, words] : all.at("axes").items()) {
    EXPECT_THAT(list, HasSubstr(fmt::format("  {:<13} {}", axis, words[0].get<std::string>())));
    for (const Json& rule : all.at("rules"))
      EXPECT_THAT(words.get<Args>(), testing::Contains(rule.at("axes").at(axis).get<std::string>()));
  }
  for (const auto& [number, value] : all.at("numbers").items())
    EXPECT_THAT(list, HasSubstr(fmt::format(" {}={:g}", number, value.get<double>())));
  ASSERT_EQ(one.at("rules").size(), 1u);
  EXPECT_EQ(one["rules"][0]["name"], "kda update=additive");
  EXPECT_EQ(one["rules"][0]["axes"]["update"], "additive");
  EXPECT_EQ(json_of({"rules", "--compose", "kda update=additive"}), one);
  EXPECT_EQ(run({"rules", "--json", "--markdown"}).code, 2);
}

TEST(JsonOutput, InfoHasWhatTheTextHas) {
  const Json json = json_of({"info", "--threads", "1"}),
             model = json_of({"info", FW_SOURCE_DIR "/recipes/shakespeare.toml"});
  expect_documented("info", {json, model});
  const std::string text = checked({"info", "--threads", "1"}).out;
  const auto line = [&](const std::string& what, const std::string& value) {
    EXPECT_THAT(text, HasSubstr(fmt::format("{:<14}{}\n", what, value)));
  };
  const std::string commit = json.at("commit");
  line("version", json.at("fastweight").get<std::string>() + (commit.empty() ? "" : ", commit " + commit));
  line("build", json.at("build"));
  line("compiler", json.at("compiler"));
  line("SIMD target", json.at("simd_target"));
  line("oneDNN", json.at("onednn").at("version").get<std::string>() + ", " + json["onednn"]["isa"].get<std::string>());
  line("cores", json.at("cores").dump());
  line("threads", "1");
  EXPECT_EQ(json.at("threads"), 1);
  line("backends", fmt::format("{}", fmt::join(json.at("backends").get<Args>(), ", ")));
  line("presets", fmt::format("{}", fmt::join(json.at("presets").get<Args>(), " ")));
}

TEST(JsonOutput, SelftestHasWhatTheTextHas) {
  const Args command{"selftest", "--rule", "deltanet,mamba2", "--threads", "1"};
  const Json json = json_of(command);
  expect_documented("selftest", {json});
  const std::string text = checked(command).out;
  ASSERT_EQ(json.at("results").size(), 4u);
  for (const Json& result : json.at("results")) {
    Args row{result.at("rule"), result.at("type")};
    for (const Json& check : result.at("checks")) {
      row.push_back(fmt::format("{:.1e}", check.at("error").get<double>()));
      EXPECT_EQ(check.at("ok"), check["error"].get<double>() <= check.at("bound").get<double>());
      EXPECT_NE(check.at("tensor"), "");
    }
    row.emplace_back(result.at("ok") ? "ok" : "FAILED");
    EXPECT_EQ(row_of(text, {row[0], row[1]}), row);
  }
  EXPECT_THAT(text, HasSubstr(fmt::format("{} on {}: all within bounds", json["fastweight"].get<std::string>(),
                                          json.at("runs_on").get<std::string>())));
  EXPECT_EQ(json.at("failed"), 0);
  EXPECT_EQ(json.at("device"), "cpu");
}

class JsonOfARun : public testing::Test {
 protected:
  static void SetUpTestSuite() {
    folder_ = std::make_unique<Folder>();
    spill(*folder_ / "text", small_text());
    ASSERT_EQ(run(tiny_train(*folder_ / "text", *folder_ / "run")).code, 0);
  }
  static void TearDownTestSuite() { folder_.reset(); }
  static std::unique_ptr<Folder> folder_;
};
std::unique_ptr<Folder> JsonOfARun::folder_;

TEST_F(JsonOfARun, Generate) {
  const Outcome outcome = checked({"generate", *folder_ / "run", "--tokens", "5", "--json"});
  expect_documented("generate", {Json::parse(outcome.out)});
}

TEST_F(JsonOfARun, EvalOfRequestsHasWhatTheTextHas) {
  const std::string path = *folder_ / "requests.jsonl";
  spill(path, R"({"task":"a","id":"0","type":"mc","ctx":"the state","choices":["decays","key"],"gold":0}
{"task":"a","id":"1","type":"mc","ctx":"the key","choices":["reads","was"],"gold":1}
)");
  const Args command{"eval", *folder_ / "run", "--requests", path};
  const Json json = json_of(command);
  expect_documented("eval of requests", {json});
  const std::string text = checked(command).out;
  const Json& result = json.at("results").at(0);
  EXPECT_EQ(result.at("requests"), 2);
  for (const Json& metric : result.at("metrics")) {
    EXPECT_THAT(text, HasSubstr(fmt::format("{}  ", metric.at("name").get<std::string>())));
    EXPECT_THAT(text, HasSubstr(fmt::format("{:.4f}", metric.at("value").get<double>())));
    EXPECT_THAT(text, HasSubstr(fmt::format("{:.4f}", metric.at("standard_error").get<double>())));
  }
}

TEST_F(JsonOfARun, EvalHasWhatTheTextHas) {
  const Args command{"eval", *folder_ / "run", "--text", *folder_ / "text", "--context", "32,0"};
  const Json json = json_of(command);
  expect_documented("eval", {json});
  const std::string text = checked(command).out;
  ASSERT_EQ(json.at("results").size(), 2u);
  for (const Json& r : json.at("results")) {
    const std::string context = r.at("context") == 0 ? "document" : r["context"].dump();
    const double loss = r.at("loss"), nll = r.at("nll"), tokens = r.at("tokens"), bytes = r.at("bytes");
    EXPECT_EQ(row_of(text, {context}),
              (Args{context, "anew", r["tokens"].dump(), fmt::format("{:.4f}", r.at("bits_per_byte").get<double>()),
                    fmt::format("{:.4f}", loss), fmt::format("{:.3f}", r.at("perplexity").get<double>())}));
    EXPECT_EQ(r.at("carry"), false);
    EXPECT_NEAR(loss, nll / tokens, 1e-12);
    EXPECT_NEAR(r["bits_per_byte"].get<double>(), nll / std::log(2.0) / bytes, 1e-12);
    EXPECT_NEAR(r.at("bits_per_token").get<double>(), loss / std::log(2.0), 1e-12);
  }
  EXPECT_EQ(json.at("text"), Json::array({*folder_ / "text"}));
  EXPECT_EQ(json.at("precision"), "f32");
  EXPECT_EQ(json.at("model"), *folder_ / "run/model");
}

// A model with what it writes after 40 ids as the values of another program: one that agrees, one that does not, an
// unknown one and a damaged one.
TEST_F(JsonOfARun, VerifyHasWhatTheTextHas) {
  std::vector<int64_t> prompt;
  std::string ids;
  for (int64_t i = 0; i < 40; ++i) ids += fmt::format("{} ", prompt.emplace_back(32 + 2 * i));
  const Outcome written = checked(
      {"generate", *folder_ / "run", "--tokenizer", "ids", "--prompt", ids, "--greedy", "--tokens", "6", "--json"});
  std::vector<int64_t> greedy = Json::parse(written.out).at("ids");
  const std::string vectors = *folder_ / "vectors";
  const auto model = [&](const std::string& name) {
    std::filesystem::create_directories(vectors);
    std::filesystem::copy(*folder_ / "run/model", vectors + "/" + name);
    SafetensorsWriter writer;
    writer.add<int64_t>("input_ids", {1, 40}, prompt);
    writer.add<int64_t>("greedy", {1, 6}, greedy);
    writer.write(vectors + "/" + name + "/io.safetensors");
  };
  model("agrees");
  greedy[3] = (greedy[3] + 1) % 256;
  model("differs");
  std::filesystem::create_directories(vectors + "/unknown");
  spill(vectors + "/unknown/config.json", "{\"model_type\": \"rwkv6\"}");
  spill(vectors + "/unknown/io.safetensors", slurp(vectors + "/agrees/io.safetensors"));

  const Json json = json_of({"verify", vectors}, 1);
  const std::string text = checked({"verify", vectors}, 1).out;
  ASSERT_EQ(json.at("compared").size(), 2u) << json.dump(2);
  for (const Json& c : json.at("compared")) {
    EXPECT_EQ(row_of(text, {c.at("subject")}),
              (Args{c["subject"], c.at("compared"), fmt::format("{:.1e}", c.at("error").get<double>()),
                    fmt::format("{:g}", c.at("bound").get<double>()), c.at("where"), c.at("ok") ? "ok" : "FAILED"}));
  }
  ASSERT_EQ(json.at("unknown").size(), 1u);
  EXPECT_THAT(text, HasSubstr(json["unknown"][0].at("reason").get<std::string>()));
  EXPECT_THAT(text, HasSubstr(fmt::format("{}: {} within bounds, {} beyond, {} rules or models unknown",
                                          json.at("dtype").get<std::string>(), json.at("passed").get<int>(),
                                          json.at("failed").get<int>(), json["unknown"].size())));
  EXPECT_EQ(json["passed"], 1);
  EXPECT_EQ(json["failed"], 1);
  EXPECT_EQ(json.at("unreadable"), Json::array());
  spill(vectors + "/damaged.safetensors", "not one");
  const Json damaged = json_of({"verify", vectors}, 2);
  ASSERT_EQ(damaged.at("unreadable").size(), 1u);
  EXPECT_THAT(damaged["unreadable"][0].get<std::string>(), HasSubstr("damaged.safetensors"));
  expect_documented("verify", {json, damaged});
}

TEST(JsonOutput, BenchHasWhatTheTextHas) {
  const Folder folder;
  const Outcome recurrence =
      checked({"bench", "--rule", "kda,mamba2", "--tokens", "32", "--heads", "2", "--key-dim", "16", "--value-dim",
               "16", "--repeats", "2", "--threads", "1", "--commit", "abc", "--json", folder / "recurrence"});
  const Outcome models = checked({"bench",
                                  "--train",
                                  "--decode-model",
                                  "--steps",
                                  "2",
                                  "--batch",
                                  "2",
                                  "--length",
                                  "16",
                                  "--decode-tokens",
                                  "300",
                                  "--decode-drafts",
                                  "3",
                                  "--hidden-size",
                                  "16",
                                  "--num-hidden-layers",
                                  "1",
                                  "--num-heads",
                                  "1",
                                  "--head-dim",
                                  "16",
                                  "--threads",
                                  "1",
                                  "--json",
                                  folder / "models"});
  const Outcome generation = checked({"bench",
                                      "--decode-sequences",
                                      "1,5",
                                      "--decode-seen",
                                      "7,40",
                                      "--decode-drafts",
                                      "2",
                                      "--prefill",
                                      "60",
                                      "--prefill-sequences",
                                      "2",
                                      "--hidden-size",
                                      "16",
                                      "--num-hidden-layers",
                                      "2",
                                      "--layers",
                                      "recurrent,window",
                                      "--num-heads",
                                      "1",
                                      "--head-dim",
                                      "16",
                                      "--threads",
                                      "1",
                                      "--json",
                                      folder / "generation"});
  const Json third = Json::parse(slurp(folder / "generation"));
  ASSERT_EQ(third.at("generation").at("results").size(), 4U);
  for (const Json& row : third.at("generation").at("results")) {
    EXPECT_THAT(generation.out, HasSubstr(fmt::format("{:.0f}", row.at("tok_s").get<double>())));
    EXPECT_NEAR(row.at("tok_s").get<double>() * row.at("ms_per_token").at("median").get<double>(),
                1e3 * row.at("sequences").get<double>(), 1);
    EXPECT_THAT(generation.out, HasSubstr(fmt::format("{:.0f}", row.at("drafted_tok_s").get<double>())));
    EXPECT_EQ(row.at("drafts"), 2);
    EXPECT_EQ(row.at("accepted"), 1);
  }
  EXPECT_THAT(generation.out, HasSubstr("prefill of 2 times 60 tokens"));
  const Json first = Json::parse(slurp(folder / "recurrence")), second = Json::parse(slurp(folder / "models"));
  expect_documented("bench", {first, second, third});
  EXPECT_EQ(first.at("commit"), "abc");
  const auto of = [](const Json& figures, int digits) {
    return fmt::format("{:.{}f} ({:.{}f})", figures.at("median").get<double>(), digits,
                       figures.at("best").get<double>(), digits);
  };
  for (const Json& r : first.at("recurrence").at("results")) {
    const std::string form = r.at("form") == "token" ? "token" : "chunk " + r.at("chunk").dump();
    EXPECT_EQ(row_of(recurrence.out, {r.at("rule")}),
              (Args{r["rule"], form, of(r.at("forward_us_per_token"), 2), of(r.at("forward_backward_us_per_token"), 2),
                    fmt::format("{:.2f}", r.at("backward_over_forward").at("median").get<double>()),
                    of(r.at("decode_us_per_token"), 2), fmt::format("{:.1f}", r.at("forward_gflops").get<double>()),
                    fmt::format("{:.1f}", r.at("forward_backward_gflops").get<double>()),
                    fmt::format("{:.1f}", r.at("forward_gb_per_s").get<double>()),
                    fmt::format("{:.1f}", r.at("decode_gb_per_s").get<double>())}));
  }
  for (const Json& r : second.at("train").at("results")) {
    const Args row = row_of(models.out, {r.at("precision")});
    EXPECT_EQ(row.at(1), fmt::format("{:.0f}", r.at("tokens_per_second").at("median").get<double>()));
    EXPECT_EQ(row.at(3), fmt::format("{:.1f}", r.at("ms_per_step").at("median").get<double>()));
  }
  for (const char* end : {"first", "last"}) {
    const Json& r = second.at("decode").at(end);
    EXPECT_EQ(row_of(models.out, {r.at("at_token").dump()}).at(1),
              fmt::format("{:.1f}", r.at("us_per_token").at("median").get<double>()));
  }
}

}  // namespace
}  // namespace fw::test
