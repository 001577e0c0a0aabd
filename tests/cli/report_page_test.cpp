// fastweight report: a page of a sweep, an evaluation and two runs, which needs nothing else; the same tables in
// Markdown; and what a browser shows.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <regex>

#include "cli/program.h"
#include "report/process.h"

namespace fw::test {
namespace {

using testing::AllOf;
using testing::HasSubstr;
using testing::Not;
using Args = std::vector<std::string>;

class ReportPage : public ::testing::Test {
 protected:
  static void SetUpTestSuite() {
    folder_ = new Folder;
    spill(path("text"), small_text());
    ASSERT_EQ(run(tiny_train(path("text"), path("run-a")) + Args{"--sample-every", "6"}).code, 0);
    ASSERT_EQ(run(tiny_train(path("text"), path("run <b>")) + Args{"--lr", "3e-3"}).code, 0);
    ASSERT_EQ(run({"analyze", path("run-a"), "--out", path("analysis")}).code, 0);
    const Outcome swept = run({"sweep",
                               "stack",
                               "--rule",
                               "kda,mamba2",
                               "--seeds",
                               "1,2",
                               "--out",
                               path("sweep"),
                               "--length",
                               "30",
                               "--lengths",
                               "30,60",
                               "--steps",
                               "4",
                               "--batch",
                               "2",
                               "--judged",
                               "4",
                               "--eval-every",
                               "2",
                               "--hidden-size",
                               "8",
                               "--num-heads",
                               "1",
                               "--head-dim",
                               "8",
                               "--intermediate-size",
                               "8"});
    ASSERT_EQ(swept.code, 0) << swept.err;
    spill(path("requests"), R"({"task":"words & more","id":"0","type":"ll","ctx":"the state","cont":" decays"})");
    ASSERT_EQ(run({"eval", path("run-a"), "--requests", path("requests"), "--out", path("words")}).code, 0);
  }
  static void TearDownTestSuite() { delete folder_; }
  static std::string path(const std::string& name) { return *folder_ / name; }
  static Outcome report(const std::string& out) {
    return run({"report", path("sweep"), path("words"), path("run-a"), path("run <b>"), "--out", path(out), "--title",
                "A & B"});
  }
  static size_t times(const std::string& text, const std::string& part) {
    size_t count = 0;
    for (size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) ++count;
    return count;
  }
  static Folder* folder_;
};
Folder* ReportPage::folder_ = nullptr;

TEST_F(ReportPage, HasTablesAndCurvesAndNeedsNothingElse) {
  const Outcome outcome = report("page");
  ASSERT_EQ(outcome.code, 0) << outcome.err;
  const std::string page = slurp(path("page.html"));
  EXPECT_TRUE(page.starts_with("<!DOCTYPE html>"));
  EXPECT_THAT(page, HasSubstr("<title>A &amp; B</title>"));
  EXPECT_EQ(times(page, "<table>"), 3u);
  EXPECT_EQ(times(page, "<svg"), 3u);     // two of the sweep, one of the runs
  EXPECT_THAT(page, HasSubstr("<pre>"));  // what run-a wrote
  EXPECT_THAT(page, HasSubstr("<td>words &amp; more</td>"));
  EXPECT_THAT(page, HasSubstr("<td>run &lt;b&gt;</td>"));
  EXPECT_THAT(page, Not(HasSubstr("run <b>")));
  EXPECT_THAT(page, HasSubstr("<td>kda</td>"));
  for (const char* outside : {"src=", "<script", "<link", "@import", "url(http"})
    EXPECT_THAT(page, Not(HasSubstr(outside))) << outside;
  const std::string markdown = slurp(path("page.md"));
  EXPECT_THAT(markdown, HasSubstr("## sweep\n"));
  EXPECT_THAT(markdown, HasSubstr("| kda | 0.001 | 2 |"));
  EXPECT_THAT(markdown, HasSubstr("| words & more |"));
  EXPECT_THAT(markdown, HasSubstr("| run-a | 0.002 | 6 |"));
}

TEST_F(ReportPage, RunsShowWhatTheyDifferInAndAnalysesTheirPictures) {
  ASSERT_EQ(run({"report", path("run-a"), path("run <b>"), path("analysis"), "--out", path("facts")}).code, 0);
  const std::string markdown = slurp(path("facts") + ".md"), page = slurp(path("facts") + ".html");
  EXPECT_THAT(markdown, HasSubstr("| run | lr | steps |"));
  EXPECT_THAT(markdown, HasSubstr("| run \\<b\\> | 0.003 | 6 |"));
  EXPECT_THAT(markdown, HasSubstr("### run-a, step 6"));
  EXPECT_THAT(markdown, HasSubstr("**"));
  EXPECT_THAT(page, HasSubstr("Analysis of "));
  EXPECT_THAT(markdown, HasSubstr("| quantity | mean | lowest head | highest head |\n"));
  EXPECT_THAT(markdown, HasSubstr("| erase_gate | "));
  EXPECT_GE(times(page, "<svg"), 4u);
  for (const char* outside : {"src=", "<script", "<link"}) EXPECT_THAT(page, Not(HasSubstr(outside))) << outside;
}

// Runs of different builds say so, as the run file's second line does.
TEST_F(ReportPage, RunsOfDifferentProgramsNameThem) {
  const std::string text = slurp(path("run-a/config.toml")), mark = "\n# Made by fastweight ";
  const size_t at = text.find(mark);
  ASSERT_NE(at, std::string::npos);
  const size_t begin = at + mark.size() - std::string("fastweight ").size(), end = text.find('\n', begin);
  std::filesystem::create_directories(path("run-old"));
  std::filesystem::copy_file(path("run-a/metrics.jsonl"), path("run-old/metrics.jsonl"));
  spill(path("run-old/config.toml"), text.substr(0, begin) + "fastweight 0.2.0, commit 0123abcd" + text.substr(end));
  ASSERT_EQ(run({"report", path("run-a"), path("run-old"), "--out", path("programs")}).code, 0);
  const std::string markdown = slurp(path("programs") + ".md");
  EXPECT_THAT(markdown, HasSubstr("| run | program | steps |"));
  EXPECT_THAT(markdown, HasSubstr("| run-a | " + text.substr(begin, end - begin) + " | 6 |"));
  EXPECT_THAT(markdown, HasSubstr("| run-old | fastweight 0.2.0, commit 0123abcd | 6 |"));
}

// What a person sees: the tables' text and the curves' lines are in the page that the browser made of the file.
TEST_F(ReportPage, ABrowserShowsIt) {
  ASSERT_EQ(report("shown").code, 0);
  const Args browser{"chromium",
                     "--headless",
                     "--no-sandbox",
                     "--disable-gpu",
                     "--user-data-dir=" + path("browser"),
                     "--virtual-time-budget=2000"};
  const std::string url = "file://" + path("shown.html");
  const ProcessResult shot =
      run_process(browser + Args{"--window-size=1200,2000", "--screenshot=" + path("shown.png"), url}, "");
  if (!shot.started) GTEST_SKIP() << "chromium is not installed (Debian: apt-get install chromium)";
  ASSERT_EQ(shot.exit_code, 0) << shot.output;
  EXPECT_GT(std::filesystem::file_size(path("shown.png")), 20000u);  // an empty page of this size has 10 kB
  const ProcessResult dom =
      run_process({"sh", "-c", "exec \"$@\" 2>/dev/null >'" + path("dom") + "'", "sh", "chromium", "--headless",
                   "--no-sandbox", "--disable-gpu", "--user-data-dir=" + path("browser"), "--dump-dom", url},
                  "");
  ASSERT_EQ(dom.exit_code, 0);
  const std::string shown = slurp(path("dom"));
  EXPECT_EQ(times(shown, "<tbody>"), 3u);  // the browser's own: each table was read as one
  EXPECT_GE(times(shown, "<path"), 4u);
  EXPECT_THAT(shown, HasSubstr("accuracy (per cent)"));
}

TEST_F(ReportPage, RefusesOtherFolders) {
  std::filesystem::create_directories(path("empty"));
  const Outcome outcome = run({"report", path("empty"), "--out", path("no")});
  EXPECT_EQ(outcome.code, 2);
  EXPECT_THAT(outcome.err,
              HasSubstr("has no results.json (a sweep), eval.json (an evaluation), analysis.json (an analysis), "
                        "comparison.md (several analyses) or metrics.jsonl (a run)"));
  std::filesystem::create_directories(path("bad"));
  spill(path("bad/eval.json"), "{\"model\": 3}");
  EXPECT_THAT(run({"report", path("bad"), "--out", path("no")}).err,
              HasSubstr("not what 'fastweight eval --out' writes"));
  EXPECT_FALSE(std::filesystem::exists(path("no.html")));
}

TEST_F(ReportPage, FindsTheResultsInAFolder) {
  namespace fs = std::filesystem;
  for (const char* folder : {"all/b/deep", "all/a", "all/runs", "all/.hidden", "all/empty"})
    fs::create_directories(path(folder));
  for (const char* folder : {"all/b/deep", "all/.hidden"})
    fs::copy_file(path("sweep/results.json"), path(folder) + "/results.json");
  fs::copy_file(path("words/eval.json"), path("all/a/eval.json"));
  fs::copy(path("run-a"), path("all/runs/one"), fs::copy_options::recursive);
  fs::create_directory_symlink("..", path("all/a-link"));
  ASSERT_EQ(run({"report", path("all"), "--out", path("found")}).code, 0);
  const std::string markdown = slurp(path("found") + ".md");
  const size_t first = markdown.find("## a\n"), second = markdown.find("## b/deep\n");
  ASSERT_NE(second, std::string::npos) << markdown;
  EXPECT_LT(first, second);
  EXPECT_EQ(times(markdown, "\n## "), 3u);  // and the runs
  EXPECT_THAT(markdown, HasSubstr("| runs/one | "));
  // Of several folders each title has its folder's name.
  ASSERT_EQ(run({"report", path("all/b"), path("words"), "--out", path("found")}).code, 0);
  EXPECT_THAT(slurp(path("found") + ".md"), AllOf(HasSubstr("## b/deep\n"), HasSubstr("## words\n")));
}

TEST_F(ReportPage, ReadsAComparisonOfAnalyses) {
  const Outcome analyzed = run({"analyze", path("run-a"), path("run <b>"), "--out", path("compared")});
  ASSERT_EQ(analyzed.code, 0) << analyzed.err;
  ASSERT_EQ(run({"report", path("compared"), "--out", path("comparison-page")}).code, 0);
  const std::string markdown = slurp(path("comparison-page") + ".md"), written = slurp(path("compared/comparison.md"));
  EXPECT_THAT(markdown, HasSubstr(written));
  EXPECT_THAT(markdown, HasSubstr("## compared\n"));
  EXPECT_EQ(times(markdown, "\n## "), 1u);
  const bool drawn = analyzed.out.find("gnuplot") == std::string::npos;
  EXPECT_GE(times(slurp(path("comparison-page.html")), "<svg"), drawn ? 2u : 0u);
  spill(path("compared/comparison.md"), "words\n\nno table\n");
  EXPECT_THAT(run({"report", path("compared"), "--out", path("no")}).err,
              HasSubstr("not what 'fastweight analyze' writes"));
}

TEST_F(ReportPage, DrawsItsPicturesIntoAFolder) {
  const Outcome outcome =
      run({"report", path("sweep"), path("run-a"), "--out", path("drawn"), "--pictures", path("new/pictures")});
  ASSERT_EQ(outcome.code, 0) << outcome.err;
  if (outcome.out.find("gnuplot") != std::string::npos) GTEST_SKIP() << "gnuplot is not installed";
  for (const char* name : {"sweep-accuracy", "sweep-lengths", "Training-runs-loss"}) {
    const std::string file = path("new/pictures/") + name + ".svg";
    EXPECT_THAT(outcome.out, HasSubstr(file + "\n"));
    EXPECT_THAT(slurp(file), HasSubstr("<svg"));
  }
}

TEST_F(ReportPage, ReadsTheResultsOfTheRepository) {
  const std::string results = FW_SOURCE_DIR "/docs/results";
  const Outcome outcome = run({"report", results, "--out", path("results")});
  ASSERT_EQ(outcome.code, 0) << outcome.err;
  const std::string markdown = slurp(path("results") + ".md");
  size_t folders = 0;
  for (const auto& entry : std::filesystem::recursive_directory_iterator(results)) {
    if (entry.path().filename() != "results.json") continue;
    ++folders;
    const std::string title = entry.path().parent_path().lexically_relative(results).string();
    EXPECT_THAT(markdown, HasSubstr("\n## " + title + "\n"));
  }
  EXPECT_EQ(times(markdown, "\n## "), folders);
  EXPECT_GE(folders, 20u);
}

}  // namespace
}  // namespace fw::test
