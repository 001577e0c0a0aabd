// report: tables and curves of a set of runs, sweeps and evaluations, as one page.
#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <set>
#include <sstream>

#include "base/error.h"
#include "base/file.h"
#include "base/json.h"
#include "cli/command.h"
#include "cli/eval_requests.h"
#include "cli/outputs.h"
#include "cli/run_facts.h"
#include "cli/say.h"
#include "cli/sweep_lm.h"
#include "report/metrics.h"
#include "report/page.h"
#include "report/task_table.h"

namespace fw::cli {
namespace {

namespace fs = std::filesystem;

class Report : public Command {
 public:
  std::string name() const override { return "report"; }
  std::string summary() const override { return "tables and curves of runs, sweeps and evaluations in one page"; }
  std::string details() const override {
    return "Writes OUT.html, which needs nothing else (no network, no scripts; curves are inside, drawn by gnuplot), "
           "and the same tables in OUT.md.\n\n"
           "Folders: of sweeps (results.json), of evaluations ('eval --out': eval.json), of analyses (analysis.json, "
           "with "
           "their pictures), of training runs (metrics.jsonl, together in one section: their table has the settings "
           "that "
           "differ, and the last text of --sample-every). The best values of a table are bold.\n\n"
           "Example:\n  fastweight report mqar stack run-a run-b piqa --out comparison";
  }
  void declare(Options& options) override {
    options.positional("DIR", &folders_, "folders of sweeps, evaluations and runs", true);
    options.add("out", "OUT", &out_, "name of the page, without .html and .md");
    options.add("title", "TEXT", &title_, "of the page");
  }
  int run(Options& options) override;

 private:
  StringList folders_;
  std::string out_ = "report", title_ = "fastweight: runs";
};

std::string shown_name(const std::string& folder) {
  const fs::path path = fs::path(folder).lexically_normal();
  return path.has_filename() ? path.filename().string() : path.parent_path().filename().string();
}

nlohmann::json read_json(const std::string& path) { return parse_json(read_file(path), fmt::format("'{}'", path)); }

PageSection sweep_section(const std::string& folder) {
  const std::string path = fmt::format("{}/results.json", folder);
  std::vector<TaskResult> results;
  const nlohmann::json found = read_json(path);
  if (is_lm_results(found)) return lm_section(shown_name(folder), found);
  results.reserve(found.size());
  for (const nlohmann::json& one : found) results.push_back(task_result_from_json(one, fmt::format("'{}'", path)));
  PageSection section;
  section.title = shown_name(folder);
  section.text = results.empty() ? "No cell is finished yet." : task_caption(results);
  if (!results.empty()) section.table = task_table(results);
  section.curves = task_curves(results);
  section.value = CurveValue::kAccuracy;
  section.plots.push_back(task_lengths(results));
  return section;
}

PageSection eval_section(const std::string& folder) {
  const std::string path = fmt::format("{}/eval.json", folder);
  const nlohmann::json found = read_json(path);
  PageSection section;
  try {
    section.title = shown_name(folder);
    section.text =
        fmt::format("{} on {}", found.at("model").get<std::string>(), found.at("requests").get<std::string>());
    section.table = score_table(found);
  } catch (const nlohmann::json::exception& error) {
    fail_usage("'{}': not what 'fastweight eval --out' writes: {}", path, error.what());
  }
  return section;
}

// What 'fastweight analyze' wrote: its pictures, by name.
PageSection analysis_section(const std::string& folder) {
  const std::string path = fmt::format("{}/analysis.json", folder);
  const nlohmann::json found = read_json(path);
  PageSection section;
  section.title = shown_name(folder);
  try {
    const nlohmann::json& loss = found.at("loss");
    section.text = fmt::format("Analysis of {} ({}) on {}: {} tokens in {} windows, {} nats per token.",
                               found.at("model").get<std::string>(), found.at("rule").get<std::string>(),
                               fmt::join(found.at("text").get<StringList>(), ", "), found.at("tokens").get<int64_t>(),
                               found.at("windows").get<int64_t>(),
                               loss.is_number() ? fmt::format("{:.4f}", loss.get<double>()) : "-");
  } catch (const nlohmann::json::exception& error) {
    fail_usage("'{}': not what 'fastweight analyze' writes: {}", path, error.what());
  }
  std::set<std::string> pictures;
  for (const fs::directory_entry& entry : fs::directory_iterator(folder)) {
    if (entry.path().extension() == ".svg") pictures.insert(entry.path().string());
  }
  constexpr size_t kMostBytes = size_t{16} << 20;
  for (const std::string& picture : pictures) section.svgs.push_back(read_file(picture, kMostBytes));
  return section;
}

// The last text of samples.jsonl, if there is one.
void add_sample(const std::string& folder, const std::string& name, PageSection& section) {
  const std::string path = fmt::format("{}/samples.jsonl", folder);
  if (!file_exists(path)) return;
  std::istringstream lines(read_file(path));
  std::string line, last;
  while (std::getline(lines, line)) {
    if (nlohmann::json::accept(line)) last = line;  // a run that was killed may have cut one
  }
  try {
    const nlohmann::json sample = nlohmann::json::parse(last.empty() ? "{}" : last);
    section.quotations.emplace_back(fmt::format("{}, step {}", name, sample.at("step").get<int64_t>()),
                                    sample.at("text").get<std::string>());
  } catch (const nlohmann::json::exception& error) {
    fail_usage("'{}': expected lines with step and text: {}", path, error.what());
  }
}

int Report::run(Options& options) {
  if (out_.empty()) fail_usage("--out: expected the name of a page, got nothing");
  for (const char* ending : {".html", ".md"}) check_output(options, "--out", out_ + ending);
  std::vector<PageSection> sections;
  PageSection runs;
  runs.title = "Training runs";
  for (const std::string& folder : folders_) {
    const auto has = [&](const char* name) { return file_exists(fmt::format("{}/{}", folder, name)); };
    if (has("results.json")) {
      sections.push_back(sweep_section(folder));
    } else if (has("eval.json")) {
      sections.push_back(eval_section(folder));
    } else if (has("metrics.jsonl")) {
      runs.curves.push_back({shown_name(folder), read_metrics(fmt::format("{}/metrics.jsonl", folder))});
      add_facts(folder, runs.curves.back());
      add_sample(folder, shown_name(folder), runs);
    } else if (has("analysis.json")) {
      sections.push_back(analysis_section(folder));
    } else {
      fail_usage(
          "DIR: '{}' has no results.json (a sweep), eval.json (an evaluation), analysis.json (an analysis) or "
          "metrics.jsonl (a run)",
          folder);
    }
  }
  if (!runs.curves.empty()) {
    runs.table = run_table(runs.curves);
    sections.push_back(std::move(runs));
  }
  write_file_atomic(out_ + ".html", html_page(title_, sections));
  write_file_atomic(out_ + ".md", markdown_page(title_, sections));
  say("{0}.html\n{0}.md\n", out_);
  return kExitOk;
}

}  // namespace

std::unique_ptr<Command> report_command() { return std::make_unique<Report>(); }

}  // namespace fw::cli
