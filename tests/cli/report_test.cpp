// Tables, the progress line, metrics and loss curves.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>

#include "base/error.h"
#include "cli/program.h"
#include "report/curves.h"
#include "report/metrics.h"
#include "report/process.h"
#include "report/progress.h"
#include "report/table.h"

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
  EXPECT_EQ(line, "[" + std::string(20, '#') + std::string(20, '.') + "]  50%  step 50/100  loss 1.2500  9.8k tok/s  1:05 left");
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
        "{\"step\":10,\"loss\":3.0}\n{\"step\":20,\"loss\":2.5,\"eval_loss\":2.6,\"eval_bits_per_byte\":3.7}\n{\"step\":30,\"loss\":2.4}\n"
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

TEST(Curves, ScriptHasFinitePointsOnlyAndQuotes) {
  const std::vector<MetricPoint> points{{10, 3.0, 0, {}, {}}, {20, NAN, 0, {}, {}}, {30, 2.0, 0, 2.5, 3.6}};
  const std::string script = loss_curve_script(points, "it's", "svg", "a'b.svg");
  EXPECT_THAT(script, HasSubstr("set title 'it''s'"));
  EXPECT_THAT(script, HasSubstr("set output 'a''b.svg'"));
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
  const std::string loss = run_curves_script(runs, CurveValue::kLoss, CurveOver::kStep, "two", "svg", "f.svg");
  EXPECT_THAT(loss, HasSubstr("set xlabel 'step'"));
  EXPECT_THAT(loss, HasSubstr("set ylabel 'loss (nats per token)'"));
  EXPECT_THAT(loss, HasSubstr("10 3\n20 2\n"));
  EXPECT_THAT(loss, HasSubstr("title 'it''s' noenhanced"));
  EXPECT_THAT(loss, HasSubstr("title 'small, held out' noenhanced"));
  EXPECT_THAT(loss, HasSubstr("30 2.25\n"));
  EXPECT_THAT(loss, Not(HasSubstr("empty")));
  EXPECT_THAT(loss, Not(HasSubstr("nan")));
  const std::string rate = run_curves_script(runs, CurveValue::kLearningRate, CurveOver::kTokens, "", "svg", "f.svg");
  EXPECT_THAT(rate, HasSubstr("set xlabel 'tokens'"));
  EXPECT_THAT(rate, HasSubstr("set ylabel 'learning rate'"));
  EXPECT_THAT(rate, HasSubstr("2000 0.1\n"));
  EXPECT_EQ(run_curves_script({runs[2]}, CurveValue::kLoss, CurveOver::kStep, "", "svg", "f.svg"), "");
  EXPECT_THROW(write_run_curves({runs[2]}, CurveValue::kLoss, CurveOver::kStep, "", "/nonexistent/f"), Error);
  EXPECT_THROW(parse_curve_value("los"), Error);
  EXPECT_THROW(parse_curve_over("time"), Error);
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
  EXPECT_EQ(echo.output, large.substr(0, 64 << 10));
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
