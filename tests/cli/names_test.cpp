// Names are names: of paths and labels no part is code in another program's language, whatever program a text is
// generated for.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>

#include "cli/program.h"
#include "report/process.h"

namespace fw::test {
namespace {

namespace fs = std::filesystem;
using testing::HasSubstr;
using testing::Not;
using Args = std::vector<std::string>;

class TextOfOthers : public testing::Test {
 protected:
  static void SetUpTestSuite() {
    folder_ = std::make_unique<Folder>();
    spill(*folder_ / "text", small_text());
    ASSERT_EQ(run(tiny_train(*folder_ / "text", *folder_ / "m")).code, 0);
    ASSERT_EQ(run(sweep(*folder_ / "sw")).code, 0);
  }
  static void TearDownTestSuite() { folder_.reset(); }
  static Args sweep(const std::string& out) {
    const Args sizes{"--hidden-size",       "8", "--num-heads", "1", "--head-dim", "8",
                     "--intermediate-size", "8", "--threads",   "1"};
    return Args{"sweep",    "palindrome", "--rule",    "mamba2", "--out",   out,
                "--length", "4",          "--lengths", "4",      "--steps", "4"} +
           Args{"--batch", "4", "--judged", "4", "--eval-every", "2"} + sizes;
  }
  // In the test's folder, so that names are relative and the commands of a shell would leave files there.
  static Outcome in_folder(const Args& args, const std::string& before = "") {
    return Program(args, "", "/dev/null", {"/bin/sh", "-c", "cd \"$0\" && " + before + " exec \"$@\"", folder_->path()})
        .wait();
  }
  static bool has_gnuplot() { return run_process({"gnuplot", "--version"}, "").started; }
  static void expect_no_command_ran() {
    for (const fs::directory_entry& entry : fs::directory_iterator(folder_->path())) {
      EXPECT_FALSE(entry.path().filename().string().starts_with("pwned")) << entry.path();
    }
  }
  static std::unique_ptr<Folder> folder_;
};
std::unique_ptr<Folder> TextOfOthers::folder_;

TEST_F(TextOfOthers, ALineBreakInAPathIsNoCommandOfGnuplots) {
  const Outcome trained = in_folder(tiny_train("text", "t\n!touch pwned_train #"));
  EXPECT_EQ(trained.code, 0) << trained.err;
  const Outcome swept = in_folder(sweep("s\n!touch pwned_sweep #"));
  EXPECT_EQ(swept.code, 0) << swept.err;
  const Outcome drawn = in_folder({"curves", "m", "--out", "x\n!touch pwned_curves #"});
  const Outcome analyzed =
      in_folder({"analyze", "m", "--text", "text", "--tokens", "64", "--out", "a\n!touch pwned_analyze #"});
  EXPECT_EQ(analyzed.code, 0) << analyzed.err;
  const Outcome reported =
      in_folder({"report", "sw", "--out", "r"},
                "mkdir 'tmp\n!touch pwned_report #' && TMPDIR=\"$PWD/tmp\n!touch pwned_report #\"");
  EXPECT_EQ(reported.code, 0) << reported.err;
  expect_no_command_ran();
  if (!has_gnuplot()) GTEST_SKIP() << "gnuplot is not installed: nothing was drawn";
  EXPECT_EQ(drawn.code, 0) << drawn.err;
  for (const char* file :
       {"t\n!touch pwned_train #/loss.png", "s\n!touch pwned_sweep #/accuracy.svg", "x\n!touch pwned_curves #.png"}) {
    EXPECT_GT(slurp(*folder_ / file).size(), 1000u) << file;
  }
  EXPECT_THAT(slurp(*folder_ / "r.html"), HasSubstr("<svg"));
}

TEST_F(TextOfOthers, LabelsAreText) {
  if (!has_gnuplot()) GTEST_SKIP() << "gnuplot is not installed";
  const std::string label = "a''b `touch pwned_back` \"c\" \\n <i> $x @y";
  const Outcome drawn =
      in_folder({"curves", "m", "--label", label, "--title", label + "\n!touch pwned_title", "--out", "labels"});
  EXPECT_EQ(drawn.code, 0) << drawn.err;
  expect_no_command_ran();
  const std::string svg = slurp(*folder_ / "labels.svg");
  EXPECT_THAT(svg, HasSubstr("a''b `touch pwned_back` "));
  EXPECT_THAT(svg, HasSubstr("&lt;i"));
  EXPECT_THAT(svg, HasSubstr("\\x0a!touch pwned_title"));
}

// A file of settings in the working folder, which may be somebody else's, or in HOME.
TEST_F(TextOfOthers, GnuplotReadsNoSettings) {
  spill(*folder_ / ".gnuplot", "!touch pwned_settings\n");
  in_folder({"curves", "m", "--out", "c"}, "HOME=\"$PWD\"");
  expect_no_command_ran();
}

TEST_F(TextOfOthers, ReportsHaveThemAsText) {
  const std::string folder = "b\n# [l](u) | `c` <b>";
  fs::copy(*folder_ / "m", *folder_ / folder, fs::copy_options::recursive);
  const Outcome reported = in_folder({"report", folder, "--title", "a\n# <script>x<script>", "--out", "page"});
  ASSERT_EQ(reported.code, 0) << reported.err;
  const std::string markdown = slurp(*folder_ / "page.md");
  EXPECT_THAT(markdown, HasSubstr("# a\\\\x0a\\# \\<script\\>x\\<script\\>\n"));
  EXPECT_THAT(markdown, HasSubstr("| b\\\\x0a\\# \\[l\\](u) \\| \\`c\\` \\<b\\> |"));
  const std::string html = slurp(*folder_ / "page.html");
  EXPECT_THAT(html, Not(HasSubstr("<script>")));
  EXPECT_THAT(html, HasSubstr("# &lt;script&gt;x"));
}

// A run file has every name as one string, and gives it back.
TEST_F(TextOfOthers, RunFilesGiveThemBack) {
  for (const char* name :
       {"a'''b\"\"\"c", "line\n[train]\nsteps = 99\n#", "tab\tback\\slash 'q' \"d\"", "u\x7f\x1b[31m"}) {
    fs::copy_file(*folder_ / "text", *folder_ / name);
    const Outcome first = in_folder(tiny_train(name, "toml-a"));
    ASSERT_EQ(first.code, 0) << first.err;
    const Outcome again = in_folder({"train", "toml-a/config.toml", "--out", "toml-b"});
    EXPECT_EQ(again.code, 0) << again.err;
    EXPECT_EQ(slurp(*folder_ / "toml-a/model/model.safetensors"), slurp(*folder_ / "toml-b/model/model.safetensors"));
    for (const char* out : {"toml-a", "toml-b"}) fs::remove_all(*folder_ / out);
  }
}

// What people stop reading is no error; what is written for other programs is.
TEST_F(TextOfOthers, PagesMayBeReadInPart) {
  const auto errors_of = [](const std::string& args) {
    const std::string script = "{ sleep 0.2; \"$0\" " + args + "; echo code $? >&2; } | true";
    return run_process({"bash", "-c", script, std::string(FW_BINARY_DIR) + "/fastweight"}, "").errors;
  };
  for (const char* args : {"--help", "train --help", "man", "completion bash", "--version"})
    EXPECT_EQ(errors_of(args), "code 0\n") << args;
  EXPECT_THAT(errors_of("rules --json"), HasSubstr("code 2"));
}

}  // namespace
}  // namespace fw::test
