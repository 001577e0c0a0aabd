// Tables, the progress line, metrics and loss curves.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <map>
#include <nlohmann/json.hpp>
#include <set>

#include "base/error.h"
#include "cli/program.h"
#include "report/curves.h"
#include "report/metrics.h"
#include "report/plot.h"
#include "report/process.h"
#include "report/progress.h"
#include "report/table.h"
#include "rule/rule.h"

namespace fw::test {
namespace {

using testing::HasSubstr;
using testing::Not;

TEST(Table, AlignsByCharactersNotBytes) {
  Table table;
  table.column("name", Table::Align::kLeft);
  table.column("n");
  table.row({"é", "1"});
  table.row({"long name", "234"});
  EXPECT_EQ(table.text(), "name         n\n--------------\né            1\nlong name  234\n");
  EXPECT_EQ(table.markdown(), "| name | n |\n|---|---:|\n| é | 1 |\n| long name | 234 |\n");
  EXPECT_THROW(table.row({"one"}), Error);
}

TEST(Table, WrapsAtSpaces) {
  EXPECT_EQ(wrap("one two three", 7, 2), "one two\n  three");
  EXPECT_EQ(wrap("a\n\nb", 10, 1), "a\n\n b");
  EXPECT_EQ(wrap("unbreakable", 4, 0), "unbreakable");
}

TEST(Progress, LineFitsAndTellsTheFacts) {
  const Progress half{50, 100, 1.25, 9812, 65};
  const std::string line = progress_line(half, 100);
  EXPECT_EQ(line, "[" + std::string(20, '#') + std::string(20, '.') +
                      "]  50%  step 50/100  loss 1.2500  9.8k tok/s  1:05 left");
  for (int width = 0; width < 120; ++width) EXPECT_LE(progress_line(half, width).size(), static_cast<size_t>(width));
  EXPECT_THAT(progress_line({0, 100, 0, 0, -1}, 100), Not(HasSubstr("loss")));
  EXPECT_THAT(progress_line({100, 100, 1, 1, 0}, 100), Not(HasSubstr(".]")));
}

TEST(Progress, Units) {
  EXPECT_EQ(format_duration(7), "0:07");
  EXPECT_EQ(format_duration(3753), "1:02:33");
  EXPECT_EQ(format_duration(NAN), "?");
  EXPECT_EQ(format_count(950), "950");
  EXPECT_EQ(format_count(999.9), "1.0k");
  EXPECT_EQ(format_count(1234567), "1.2M");
  EXPECT_EQ(format_bytes(12345678), "11.8 MiB");
  EXPECT_EQ(format_bytes(22.0 * 0x1p30), "22.00 GiB");
  EXPECT_EQ(format_bytes(1023), "1023 bytes");
}

TEST(Metrics, LaterRecordsOfAStepWinAndACutLineIsLeftOut) {
  Folder folder;
  const std::string path = folder / "metrics.jsonl";
  spill(path,
        "{\"step\":10,\"loss\":3.0}\n{\"step\":20,\"loss\":2.5,\"eval_loss\":2.6,\"eval_bits_per_byte\":3.7}\n{"
        "\"step\":30,\"loss\":2.4}\n"
        "{\"step\":20,\"loss\":2.2}\n{\"step\":30,\"loss\":null}\n{\"step\":40,\"lo");
  const std::vector<MetricPoint> points = read_metrics(path);
  ASSERT_EQ(points.size(), 3u);
  EXPECT_EQ(points[1].step, 20);
  EXPECT_EQ(points[1].loss, 2.2);
  EXPECT_FALSE(points[1].eval_loss.has_value());
  EXPECT_TRUE(std::isnan(points[2].loss));
  spill(path, "{\"step\":10,\"loss\":3.0}\nnonsense\n");
  try {
    read_metrics(path);
    FAIL() << "nonsense was read";
  } catch (const Error& error) {
    EXPECT_THAT(error.what(), HasSubstr(path + ":2"));
  }
}

// Names of others are no markup.
TEST(Table, TextInMarkdownAndHtmlIsText) {
  EXPECT_EQ(markdown_text("a\n# b"), "a\\\\x0a\\# b");
  EXPECT_EQ(markdown_text("<script> [l](http://x) **b** `c` x|y \\| &amp;"),
            "\\<script\\> \\[l\\](http\\://x) \\*\\*b\\*\\* \\`c\\` x\\|y \\\\\\| \\&amp;");
  EXPECT_EQ(markdown_text("# a"), "\\# a");
  EXPECT_EQ(markdown_text("1. a"), "1\\. a");
  for (const char* plain : {"0.5", "-0.5", "-"}) EXPECT_EQ(markdown_text(plain), plain);
  EXPECT_EQ(markdown_text("- a"), "\\- a");
  EXPECT_EQ(markdown_text("_a_ www.x"), "\\_a\\_ www\\.x");
  EXPECT_EQ(markdown_text("gated_deltanet+window, lr 1e-3 (0.5) & more"),
            "gated_deltanet+window, lr 1e-3 (0.5) & more");
  EXPECT_EQ(html_text("<a href='x' title=\"y\">&\x1b"), "&lt;a href=&#39;x&#39; title=&quot;y&quot;&gt;&amp;\\x1b");
}

TEST(Curves, ScriptHasFinitePointsOnlyAndQuotes) {
  const std::vector<MetricPoint> points{{10, 3.0, 0, {}, {}}, {20, NAN, 0, {}, {}}, {30, 2.0, 0, 2.5, 3.6}};
  const std::string script = loss_curve_script(points, "it's");
  EXPECT_THAT(script, HasSubstr("set title \"it\\047s\""));
  EXPECT_THAT(script, HasSubstr("10 3\n30 2\n"));
  EXPECT_THAT(script, HasSubstr("30 2.5\n"));
  EXPECT_THAT(script, Not(HasSubstr("nan")));
}

TEST(Curves, SeveralRunsShareAPicture) {
  MetricPoint a{10, 3.0, 5, {}, {}}, b{20, 2.0, 6, 2.5, 3.6};
  a.tokens = 1000;
  b.tokens = 2000;
  b.lr = 0.1;
  const std::vector<RunCurve> runs{{"it's", {a, b}}, {"small", {a, {30, NAN, 0, 2.25, {}}}}, {"empty", {}}};
  const std::string loss = run_curves_script(runs, CurveValue::kLoss, CurveOver::kStep, "two");
  EXPECT_THAT(loss, HasSubstr("set xlabel \"step\""));
  EXPECT_THAT(loss, HasSubstr("set ylabel \"loss (nats per token), dashed: held out\""));
  EXPECT_THAT(loss, HasSubstr("10 3\n20 2\n"));
  EXPECT_THAT(loss, HasSubstr("title \"it\\047s\" noenhanced"));
  EXPECT_THAT(loss, HasSubstr("title \"small, held out\" noenhanced"));
  EXPECT_THAT(loss, HasSubstr("30 2.25\n"));
  EXPECT_THAT(loss, Not(HasSubstr("empty")));
  EXPECT_THAT(loss, Not(HasSubstr("nan")));
  const std::string rate = run_curves_script(runs, CurveValue::kLearningRate, CurveOver::kTokens, "");
  EXPECT_THAT(rate, HasSubstr("set xlabel \"tokens\""));
  EXPECT_THAT(rate, HasSubstr("set ylabel \"learning rate\""));
  EXPECT_THAT(rate, HasSubstr("2000 0.1\n"));
  EXPECT_EQ(run_curves_script({runs[2]}, CurveValue::kLoss, CurveOver::kStep, ""), "");
  EXPECT_THROW(write_run_curves({runs[2]}, CurveValue::kLoss, CurveOver::kStep, "", "/nonexistent/f"), Error);
  EXPECT_THROW(parse_curve_value("los"), Error);
  EXPECT_THROW(parse_curve_over("time"), Error);
}

std::string color_in(const std::string& script, const std::string& label) {
  const size_t title = script.find(" title \"" + label + "\""), color = script.rfind("linecolor rgb '", title);
  return title == std::string::npos ? "" : script.substr(color + 15, 7);
}

TEST(Curves, ARuleHasOneColourWhateverElseIsInThePicture) {
  const MetricPoint a{10, 3.0, 5, {}, {}}, b{20, 2.0, 6, {}, {}};
  const RunCurve kda{"a", {a, b}, "kda"}, mamba{"b", {a, b}, "mamba2"}, other{"c", {a, b}, "kda"};
  const std::string two = run_curves_script({kda, mamba}, CurveValue::kLoss, CurveOver::kStep, ""),
                    three = run_curves_script({mamba, other, kda}, CurveValue::kLoss, CurveOver::kStep, "");
  EXPECT_EQ(color_in(two, "a"), color_of("kda"));
  EXPECT_EQ(color_in(three, "a"), color_of("kda"));
  EXPECT_EQ(color_in(three, "b"), color_in(two, "b"));
  EXPECT_NE(color_of("kda"), color_of("mamba2"));
  // A curve alone has its rule's colour; several of one rule have colours of their own.
  EXPECT_EQ(color_in(run_curves_script({kda}, CurveValue::kLoss, CurveOver::kStep, ""), "a"), color_of("kda"));
  const std::string same = run_curves_script({kda, other}, CurveValue::kLoss, CurveOver::kStep, "");
  EXPECT_NE(color_in(same, "a"), color_in(same, "c"));
}

TEST(Looks, NamedRulesAndLayersDiffer) {
  std::set<std::string> names;
  for (const auto& list : {presets(), ablations()}) {
    for (const Preset& rule : list) names.insert(std::string(rule.name));
  }
  for (const char* layer : {"ssd", "mamba", "longhorn_diag", "mesa", "rwkv7", "mamba3", "attention", "window"})
    names.insert(layer);
  const nlohmann::json results = nlohmann::json::parse(slurp(FW_SOURCE_DIR "/docs/results/lm-100m/results.json"));
  for (const nlohmann::json& one : results.at("runs")) names.insert(one.at("model").get<std::string>());
  for (const char* first : {"gated_deltanet", "gated_deltanet2", "kda", "ssd", "mamba3", "kaczmarz", "qdelta"})
    names.insert(std::string(first) + "+window");
  std::map<std::pair<std::string, int>, std::string> seen;
  for (const std::string& name : names) {
    const LineLook look = look_of(name);
    const auto [other, is_new] = seen.insert({{look.color, look.dash}, name});
    EXPECT_TRUE(is_new) << name << " looks like " << other->second;
    EXPECT_NE(look.dash, 2) << name << ": dashes of the held-out curve";
  }
  EXPECT_GE(seen.size(), 55u);
}

TEST(Looks, VariantsHaveTheHueOfTheirRule) {
  EXPECT_EQ(look_of("gated_deltanet2 + window"), look_of("gated_deltanet2+window"));
  EXPECT_EQ(look_of(" kda "), look_of("kda"));
  for (const char* variant : {"kda_neg", "qdelta_no_decay", "gated_deltanet2_b_only"}) {
    const std::string rule = family_of(variant);
    EXPECT_EQ(color_of(variant), color_of(rule));
    EXPECT_NE(look_of(variant), look_of(rule));
  }
  EXPECT_EQ(family_of("precond_norm_key"), "precond_gated_deltanet");
  EXPECT_EQ(family_of("my_neg"), "my_neg");
  EXPECT_NE(look_of("kaczmarz q_norm=raw"), look_of("kaczmarz"));
  EXPECT_EQ(look_of("kda", 1).color, color_of("kda"));
  EXPECT_NE(look_of("kda", 1), look_of("kda"));
}

TEST(Plots, ALineOutsideOfTheCroppedAxisSaysHowFarItGoes) {
  Plot plot;
  plot.crop_outliers = true;
  for (const double y : {1.0, 1.1, 1.2, 1.3})
    plot.lines.push_back({"near", "#000000", 1, false, {{0, y, y, y}, {1, y, y, y}}});
  plot.lines.push_back({"far", "#000000", 1, false, {{0, 1.2, 1.1, 1.3}, {1, 9, 8, 10}}});
  plot.lines.push_back({"farther", "#000000", 1, false, {{0, 7, 7, 7}, {1, 8, 8, 8}}});
  const std::string script = plot_script(plot);
  EXPECT_THAT(script, HasSubstr("\"far (up to 9)\""));
  EXPECT_THAT(script, HasSubstr("\"farther (7 to 8)\""));
  EXPECT_THAT(script, HasSubstr("\"near\""));
  EXPECT_THAT(script, HasSubstr("set yrange [0.988:1.312]"));
  EXPECT_THAT(script, HasSubstr("0 1.2 1.1 1.3\n1 9 NaN NaN\n"));  // no band outside
}

TEST(Curves, RunsOfAGroupAreTheirMeanAndABand) {
  const auto run = [](double loss) {
    RunCurve curve{"kda", {{10, loss, 5, {}, {}}, {20, loss - 1, 6, {}, {}}}};
    curve.group = "g";
    return curve;
  };
  const std::string script =
      run_curves_script({run(3), run(4)}, CurveValue::kTrainingLoss, CurveOver::kStep, "", {false, true, false});
  EXPECT_THAT(script, HasSubstr("10 3.5 2.79"));  // of 3 and 4 the standard deviation is 0.707
  EXPECT_THAT(script, HasSubstr("(band: mean ± standard deviation)"));
  EXPECT_THAT(script, HasSubstr("filledcurves"));
  EXPECT_THAT(script, HasSubstr("\"kda (2 seeds)\""));
  EXPECT_THAT(script, HasSubstr("set logscale y\n"));
}

// The first step is far above all others.
TEST(Plots, ACroppedAxisLeavesTheBeginningOut) {
  Plot plot;
  plot.lines = {{"a", "#000000", 1, false, {{0, 90, 90, 90}, {50, 3, 3, 3}, {100, 2, 2, 2}}}};
  EXPECT_THAT(plot_script(plot), HasSubstr("set yrange [0:"));
  plot.crop = true;
  EXPECT_THAT(plot_script(plot), HasSubstr("set yrange [1.96:3.04]"));
}

TEST(Plots, LabelsAtTheEndsStandApart) {
  Plot plot;
  for (const char* name : {"a", "b", "c"})
    plot.lines.push_back({name, "#000000", 1, false, {{0, 0, 0, 0}, {1, 1, 1, 1}}});
  const std::string script = plot_script(plot);
  EXPECT_THAT(script, HasSubstr("set key off"));
  std::vector<double> at;
  for (size_t i = 0; (i = script.find("1.012, graph ", i)) != std::string::npos; ++i)
    at.push_back(std::stod(script.substr(i + 13)));
  ASSERT_EQ(at.size(), 3u);
  EXPECT_GE(at[1] - at[0], 0.04);
  EXPECT_GE(at[2] - at[1], 0.04);
  EXPECT_LE(at[2], 1.0);
  EXPECT_EQ(plot_script(Plot{}), "");
}

TEST(Table, TheBestValuesAreBold) {
  Table table;
  table.column("run", Table::Align::kLeft);
  table.column("loss");
  for (const char* loss : {"2", "1", "-"}) table.row({"r", loss});
  table.mark_best(1, {2.0, 1.0, std::nullopt}, Table::Best::kLowest);
  EXPECT_THAT(table.markdown(), HasSubstr("| r | 2 |\n| r | **1** |\n"));
  EXPECT_THAT(table.html(), HasSubstr("<strong>1</strong>"));
  EXPECT_THAT(table.text(), Not(HasSubstr("*")));
}

TEST(Table, ComesBackFromMarkdown) {
  Table table;
  table.column("a run", Table::Align::kLeft);
  table.column("x_|y");
  table.row({"<b> *c* \\", ""});
  table.row({"-", "1.5 (0.1)"});
  const std::string markdown = table.markdown();
  EXPECT_EQ(table_from_markdown(markdown).markdown(), markdown);
  EXPECT_EQ(plain_text(markdown_text("<b> *c* | \\")), "<b> *c* | \\");
  for (const char* other : {"", "words", "| a |\n", "| a |\n|---|\n| b | c |\n", "| a |\n|---|\nwords\n"})
    EXPECT_THROW(table_from_markdown(other), Error) << other;
}

TEST(Curves, TheTableHasTheSettingsInWhichRunsDiffer) {
  RunCurve a{"a", {{10, 3.0, 100, 2.5, 3.6}}}, b{"b", {{10, 2.0, 200, 2.4, 3.5}}};
  a.facts = {{"lr", "0.1"}, {"batch", "4"}};
  b.facts = {{"lr", "0.2"}, {"batch", "4"}};
  const std::string table = run_table({a, b}).markdown();
  EXPECT_THAT(table, HasSubstr("| run | lr | steps |"));
  EXPECT_THAT(table, HasSubstr("| b | 0.2 | 10 | - | 2.0000 | **2.4000** | **3.5000** | 10 | **200** |"));
}

// Whatever a label holds stays inside its string: quotes side by side, back quotes, line ends.
TEST(Curves, NoTextIsCode) {
  const std::string quoted = gnuplot_quote("a''b `touch x` \"c\" \\ $d @e\n!touch x");
  EXPECT_EQ(quoted.find_first_of("'`\n@$!"), std::string::npos) << quoted;
  EXPECT_EQ(std::count(quoted.begin(), quoted.end(), '"'), 2) << quoted;
  EXPECT_EQ(gnuplot_quote(std::vector<std::string>{"two", "lines"}), "\"two\\nlines\"");
}

TEST(Curves, NothingToDrawIsANote) {
  const PictureResult result = write_loss_curve({}, "title", "/nonexistent/loss");
  EXPECT_TRUE(result.files.empty());
  EXPECT_THAT(result.note, HasSubstr("nothing was logged"));
}

TEST(Process, GivesInputAndTakesOutputOfAnySize) {
  const std::string large(200000, 'x');
  const ProcessResult echo = run_process({"cat"}, large);
  EXPECT_TRUE(echo.started);
  EXPECT_EQ(echo.exit_code, 0);
  EXPECT_EQ(echo.output, large);
  const ProcessResult complaint = run_process({"sh", "-c", "echo of use; cat >&2"}, large);
  EXPECT_EQ(complaint.output, "of use\n");
  EXPECT_EQ(complaint.errors, large.substr(0, 64 << 10));
  // No shell: the argument arrives as it is.
  EXPECT_EQ(run_process({"printf", "%s", "$HOME; *"}, "").output, "$HOME; *");
}

TEST(Process, SaysHowItEnded) {
  EXPECT_EQ(run_process({"false"}, "").exit_code, 1);
  // Ends without reading: the pipe breaks, and that must not end this program.
  EXPECT_EQ(run_process({"true"}, std::string(1 << 20, 'x')).exit_code, 0);
  EXPECT_FALSE(run_process({"no-such-program-anywhere"}, "").started);
}

}  // namespace
}  // namespace fw::test
