// fastweight requests and fastweight eval of what it writes: files, logs, refusals, and WikiText as the papers have it.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <sstream>

#include "cli/program.h"

namespace fw::test {
namespace {

using Json = nlohmann::json;
using testing::HasSubstr;
using Args = std::vector<std::string>;

class EvalRequests : public ::testing::Test {
 protected:
  static void SetUpTestSuite() {
    folder_ = new Folder;
    spill(*folder_ / "text", small_text());
    ASSERT_EQ(run(tiny_train(*folder_ / "text", *folder_ / "run")).code, 0);
  }
  static void TearDownTestSuite() { delete folder_; }
  static std::string path(const std::string& name) { return *folder_ / name; }
  static void refused(const Args& args, const std::string& why) {
    const Outcome outcome = run(args);
    EXPECT_EQ(outcome.code, 2) << outcome.out;
    EXPECT_THAT(outcome.err, HasSubstr(why));
  }
  static Folder* folder_;
};
Folder* EvalRequests::folder_ = nullptr;

std::vector<Json> lines_of(const std::string& text) {
  std::vector<Json> lines;
  std::istringstream in(text);
  for (std::string line; std::getline(in, line);) lines.push_back(Json::parse(line));
  return lines;
}

TEST_F(EvalRequests, NeedlesAreDrawnScoredAndLogged) {
  spill(path("essay"), "One sentence of it. Another one, a little longer. A third.");
  const Args draw{"requests",  "niah_multikey_1", "--model",    path("run"), "--haystack", path("essay"),
                  "--lengths", "1000,1500",       "--examples", "2",         "--out",      path("niah.jsonl")};
  const Outcome drawn = run(draw);
  ASSERT_EQ(drawn.code, 0) << drawn.err;
  const std::vector<Json> requests = lines_of(slurp(path("niah.jsonl")));
  ASSERT_EQ(requests.size(), 4u);
  EXPECT_EQ(requests[3].at("max_len"), 1500);
  EXPECT_EQ(requests[0].at("type"), "gen");
  const Outcome scored = run({"eval", path("run"), "--requests", path("niah.jsonl"), "--out", path("niah")});
  ASSERT_EQ(scored.code, 0) << scored.err;
  EXPECT_THAT(scored.out, HasSubstr("substr_all"));
  const std::vector<Json> samples = lines_of(slurp(path("niah/samples.jsonl")));
  ASSERT_EQ(samples.size(), 4u);
  EXPECT_EQ(samples[2].at("length"), 1500);
  EXPECT_EQ(samples[2].at("answers"), requests[2].at("answers"));
  EXPECT_TRUE(samples[2].at("output").is_string());
  const Json report = Json::parse(slurp(path("niah/eval.json")));
  ASSERT_EQ(report.at("results").size(), 2u);
  EXPECT_EQ(report["results"][1].at("length"), 1500);
  // The same once more.
  const std::string before = slurp(path("niah.jsonl"));
  ASSERT_EQ(run(draw).code, 0);
  EXPECT_EQ(slurp(path("niah.jsonl")), before);
}

// An independent way to the same number: eval of a text, whose only document is the page, from nothing; the newline
// that a text begins with is given.
TEST_F(EvalRequests, WikiTextAgreesWithTheLossOfTheText) {
  spill(path("wiki"), " = Title = \n \n the state decays , and a key reads . \n");
  const std::string page = " = Title =\n\nthe state decays, and a key reads.\n";
  spill(path("page"), "\n" + page);
  const Outcome text = run({"eval", path("run"), "--text", path("page"), "--context", "0", "--json"});
  ASSERT_EQ(text.code, 0) << text.err;
  const double nll = Json::parse(text.out).at("results").at(0).at("nll");
  const Outcome wiki = run({"eval", path("run"), "--task", "wikitext", "--raw", path("wiki"), "--json"});
  ASSERT_EQ(wiki.code, 0) << wiki.err;
  const Json metrics = Json::parse(wiki.out).at("results").at(0).at("metrics");
  const double words = 14, bytes = 53;  // "", =, Title, =, the ... . and "" of the raw text; its bytes
  EXPECT_EQ(metrics[0].at("name"), "word_perplexity");
  EXPECT_NEAR(metrics[0].at("value").get<double>() / std::exp(nll / words), 1, 1e-5);
  EXPECT_EQ(metrics[1].at("name"), "byte_perplexity");
  EXPECT_NEAR(metrics[1].at("value").get<double>() / std::exp(nll / bytes), 1, 1e-5);
  EXPECT_EQ(metrics[2].at("name"), "bits_per_byte");
  EXPECT_NEAR(metrics[2].at("value").get<double>(), nll / bytes / std::log(2.0), 1e-5);
}

TEST_F(EvalRequests, BadLinesAreNamedAndSkippedOnRequest) {
  const std::string good = R"({"task":"a","id":"0","type":"ll","ctx":"the state","cont":" decays"})";
  spill(path("bad"), good + "\n{\"task\":\"a\",\n" + good + "\n");
  refused({"eval", path("run"), "--requests", path("bad")}, path("bad") + ":2: expected JSON");
  const Outcome skipped = run({"eval", path("run"), "--requests", path("bad"), "--skip-bad"});
  EXPECT_EQ(skipped.code, 0) << skipped.err;
  EXPECT_THAT(skipped.err, HasSubstr("left out: " + path("bad") + ":2"));
  EXPECT_THAT(skipped.out, HasSubstr("1 requests were left out"));
  spill(path("raw"), "{\"text\": \"two words\"}\n{\"txt\": \"two words\"}\n");
  refused({"requests", "lambada", "--raw", path("raw"), "--out", path("l.jsonl")},
          path("raw") + ":2: the key \"text\" is missing");
  EXPECT_FALSE(std::filesystem::exists(path("l.jsonl")));
  EXPECT_EQ(run({"requests", "lambada", "--raw", path("raw"), "--skip-bad", "--out", path("l.jsonl")}).code, 0);
  EXPECT_EQ(lines_of(slurp(path("l.jsonl"))).size(), 1u);
}

TEST_F(EvalRequests, RefusesBeforeAnyWork) {
  spill(path("one"), R"({"task":"a","id":"0","type":"ll","ctx":"the state","cont":" decays"})");
  refused({"eval", path("run"), "--requests", path("one"), "--task", "b", "--out", path("no")},
          "no request of the task 'b'; its tasks are a");
  refused({"eval", path("run"), "--requests", path("one"), "--max-length", "3", "--out", path("no")},
          "a continuation of 7 tokens does not fit into --max-length 3");
  refused({"eval", path("run"), "--requests", path("one"), "--text", path("text")},
          "--text: expected no such option, which has no effect with --requests or --raw");
  refused({"eval", path("run"), "--text", path("text"), "--task", "wikitext"},
          "--task: expected no such option, which has no effect with --text");
  refused({"eval", path("run"), "--raw", path("one")}, "say with --task which data set");
  refused({"eval", path("run"), "--raw", path("one"), "--task", "wikitex"}, "did you mean 'wikitext'?");
  EXPECT_FALSE(std::filesystem::exists(path("no")));
  refused({"requests", "niah_single_1", "--tokenizer", "bytes"}, "--out: expected a file");
  refused({"requests", "niah_single_1", "--out", path("no")}, "give either --model MODEL or --tokenizer SPEC");
  refused({"requests", "niah_single_2", "--tokenizer", "bytes", "--out", path("no")}, "--haystack");
  refused({"requests", "niah_single_1", "--tokenizer", "bytes", "--lengths", "1000,300", "--out", path("no")},
          "more than the length of 300");
  refused({"requests", "piqa", "--out", path("no")}, "--raw: expected the file of piqa");
  refused({"requests", "piqa", "--raw", path("one"), "--seed", "3", "--out", path("no")},
          "--seed: expected no such option, which has no effect for 'piqa'");
  refused({"requests", "niah_single_1", "--raw", path("one"), "--out", path("no")},
          "--raw: expected no such option, which has no effect for 'niah_single_1'");
  EXPECT_FALSE(std::filesystem::exists(path("no")));
}

}  // namespace
}  // namespace fw::test
