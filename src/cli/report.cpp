// report: tables and curves of a set of runs, sweeps and evaluations, as one page.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <map>
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
#include "report/gnuplot.h"
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
           "Folders: of sweeps (results.json), of evaluations ('eval --out': eval.json), of analyses (analysis.json or "
           "comparison.md, with their pictures), of training runs (metrics.jsonl, together in one section: their table "
           "has the settings "
           "that "
           "differ, and the last text of --sample-every). A folder with none of these files is searched for such "
           "folders. The best values of a table are bold.\n\n"
           "Examples:\n  fastweight report mqar stack run-a run-b piqa --out comparison\n"
           "  fastweight report docs/results --out results";
  }
  void declare(Options& options) override {
    options.positional("DIR", &folders_, "folders of sweeps, evaluations, analyses and runs, or folders of these",
                       true);
    options.add("out", "OUT", &out_, "name of the page, without .html and .md");
    options.add("title", "TEXT", &title_, "of the page");
    options.add("pictures", "FOLDER", &pictures_, "also draw the curves as SVG and PNG files into this folder");
  }
  int run(Options& options) override;

 private:
  StringList folders_;
  std::string out_ = "report", title_ = "fastweight: runs", pictures_;
};

std::string shown_name(const std::string& folder) {
  const fs::path path = fs::path(folder).lexically_normal();
  return path.has_filename() ? path.filename().string() : path.parent_path().filename().string();
}

nlohmann::json read_json(const std::string& path) { return parse_json(read_file(path), fmt::format("'{}'", path)); }

// A folder that has a section, or a row in the table of runs.
struct ResultFolder {
  std::string path, title;
};

constexpr const char* kFilesOfResults[] = {"results.json", "eval.json", "metrics.jsonl", "analysis.json",
                                           "comparison.md"};

bool has_result(const std::string& folder) {
  return std::ranges::any_of(kFilesOfResults,
                             [&](const char* name) { return file_exists(fmt::format("{}/{}", folder, name)); });
}

// `folder` if it has results, else the folders in it that have, in the order of their names. A title is the path below
// `folder`, after `prefix`. Hidden folders and links are not searched.
void find_results(const std::string& folder, const std::string& title, const std::string& prefix,
                  std::vector<ResultFolder>& found) {
  if (has_result(folder)) {
    found.push_back({folder, title});
    return;
  }
  std::error_code error;
  std::set<std::string> names;
  for (fs::directory_iterator entry(folder, error), end; !error && entry != end; entry.increment(error)) {
    const std::string name = entry->path().filename().string();
    std::error_code unreadable;
    if (!name.starts_with('.') && !entry->is_symlink(unreadable) && entry->is_directory(unreadable)) names.insert(name);
  }
  for (const std::string& name : names)
    find_results((fs::path(folder) / name).string(), prefix + name, prefix + name + "/", found);
}

// The titles begin with the folder's name where several folders are given.
std::vector<ResultFolder> find_results(const StringList& folders) {
  std::vector<ResultFolder> found;
  for (const std::string& folder : folders) {
    const size_t before = found.size();
    const std::string name = shown_name(folder);
    find_results(folder, name, folders.size() > 1 ? name + "/" : "", found);
    if (found.size() == before) {
      fail_usage(
          "DIR: '{}' has no results.json (a sweep), eval.json (an evaluation), analysis.json (an analysis), "
          "comparison.md (several analyses) or metrics.jsonl (a run), and no folder in it has one",
          folder);
    }
  }
  return found;
}

PageSection sweep_section(const ResultFolder& result) {
  const std::string& folder = result.path;
  const std::string path = fmt::format("{}/results.json", folder);
  std::vector<TaskResult> results;
  const nlohmann::json found = read_json(path);
  if (is_lm_results(found)) return lm_section(result.title, found);
  results.reserve(found.size());
  for (const nlohmann::json& one : found) results.push_back(task_result_from_json(one, fmt::format("'{}'", path)));
  PageSection section;
  section.title = result.title;
  section.text = results.empty() ? "No cell is finished yet."
                                 : task_caption(results) + " After ± and as a band: the standard deviation over seeds.";
  if (!results.empty()) section.table = task_table(results);
  section.curves = task_curves(results);
  section.value = CurveValue::kAccuracy;
  section.plots.push_back(task_lengths(results));
  return section;
}

PageSection eval_section(const ResultFolder& result) {
  const std::string& folder = result.path;
  const std::string path = fmt::format("{}/eval.json", folder);
  const nlohmann::json found = read_json(path);
  PageSection section;
  try {
    section.title = result.title;
    section.text =
        fmt::format("{} on {}", found.at("model").get<std::string>(), found.at("requests").get<std::string>());
    section.table = score_table(found);
  } catch (const nlohmann::json::exception& error) {
    fail_usage("'{}': not what 'fastweight eval --out' writes: {}", path, error.what());
  }
  return section;
}

// The SVG files of a folder, by name.
StringList pictures_of(const std::string& folder) {
  std::set<std::string> pictures;
  for (const fs::directory_entry& entry : fs::directory_iterator(folder)) {
    if (entry.path().extension() == ".svg") pictures.insert(entry.path().string());
  }
  constexpr size_t kMostBytes = size_t{16} << 20;
  StringList svgs;
  for (const std::string& picture : pictures) svgs.push_back(read_file(picture, kMostBytes));
  return svgs;
}

// A quantity a row: its mean over all tokens of all heads, and the lowest and the highest mean of a head.
Table means_table(const nlohmann::json& layers) {
  struct Mean {
    double sum = 0, count = 0, low = INFINITY, high = -INFINITY;
  };
  std::map<std::string, Mean> means;
  for (const nlohmann::json& layer : layers) {
    for (const auto& [name, quantity] : layer.at("quantities").items()) {
      for (const nlohmann::json& head : quantity.at("heads")) {
        if (!head.at("mean").is_number()) continue;  // a head that has none
        const double mean = head.at("mean").get<double>(), count = head.at("count").get<double>();
        Mean& all = means[name];
        all.sum += mean * count;
        all.count += count;
        all.low = std::min(all.low, mean);
        all.high = std::max(all.high, mean);
      }
    }
  }
  Table table;
  table.column("quantity", Table::Align::kLeft);
  for (const char* heading : {"mean", "lowest head", "highest head"}) table.column(heading);
  for (const auto& [name, mean] : means) {
    if (mean.count > 0)
      table.row({name, fmt::format("{:.4g}", mean.sum / mean.count), fmt::format("{:.4g}", mean.low),
                 fmt::format("{:.4g}", mean.high)});
  }
  return table;
}

// What 'fastweight analyze' wrote of a model.
PageSection analysis_section(const ResultFolder& result) {
  const std::string path = fmt::format("{}/analysis.json", result.path);
  const nlohmann::json found = read_json(path);
  PageSection section;
  section.title = result.title;
  try {
    const nlohmann::json& loss = found.at("loss");
    section.text = fmt::format("Analysis of {} ({}) on {}: {} tokens in {} windows, {} nats per token.",
                               found.at("model").get<std::string>(), found.at("rule").get<std::string>(),
                               fmt::join(found.at("text").get<StringList>(), ", "), found.at("tokens").get<int64_t>(),
                               found.at("windows").get<int64_t>(),
                               loss.is_number() ? fmt::format("{:.4f}", loss.get<double>()) : "-");
    section.table = means_table(found.at("layers"));
  } catch (const nlohmann::json::exception& error) {
    fail_usage("'{}': not what 'fastweight analyze' writes: {}", path, error.what());
  }
  section.svgs = pictures_of(result.path);
  return section;
}

// What it wrote of several models: a paragraph, an empty line and a table. The folders of the models are not read.
PageSection comparison_section(const ResultFolder& result) {
  const std::string path = fmt::format("{}/comparison.md", result.path), text = read_file(path);
  const size_t end = text.find("\n\n");
  PageSection section;
  section.title = result.title;
  section.text = plain_text(text.substr(0, end));
  try {
    section.table = table_from_markdown(end == std::string::npos ? "" : text.substr(end + 2));
  } catch (const Error& error) {
    fail_usage("'{}': not what 'fastweight analyze' writes: {}", path, error.what());
  }
  section.svgs = pictures_of(result.path);
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
  for (const ResultFolder& result : find_results(folders_)) {
    const auto has = [&](const char* name) { return file_exists(fmt::format("{}/{}", result.path, name)); };
    if (has("results.json")) {
      sections.push_back(sweep_section(result));
    } else if (has("eval.json")) {
      sections.push_back(eval_section(result));
    } else if (has("metrics.jsonl")) {
      runs.curves.push_back({result.title, read_metrics(fmt::format("{}/metrics.jsonl", result.path))});
      add_facts(result.path, runs.curves.back());
      add_sample(result.path, result.title, runs);
    } else if (has("analysis.json")) {
      sections.push_back(analysis_section(result));
    } else {
      sections.push_back(comparison_section(result));
    }
  }
  if (!runs.curves.empty()) {
    runs.table = run_table(runs.curves);
    sections.push_back(std::move(runs));
  }
  std::vector<SectionPicture> pictures;
  if (!pictures_.empty()) {
    pictures = section_pictures(sections);
    make_folders(pictures_);
    for (const SectionPicture& picture : pictures) {
      for (const char* ending : {".svg", ".png"})
        check_output(options, "--pictures", fmt::format("{}/{}{}", pictures_, picture.name, ending));
    }
  }
  write_file_atomic(out_ + ".html", html_page(title_, sections));
  write_file_atomic(out_ + ".md", markdown_page(title_, sections));
  say("{0}.html\n{0}.md\n", out_);
  for (const SectionPicture& picture : pictures) {
    const PictureResult drawn = draw_picture("picture " + picture.name, fmt::format("{}/{}", pictures_, picture.name),
                                             1080, 540, [&] { return picture.script; });
    for (const std::string& file : drawn.files) say("{}\n", file);
    if (!drawn.note.empty()) say("note: {}\n", drawn.note);
    if (drawn.files.empty()) break;  // no gnuplot: the others would fail the same way
  }
  return kExitOk;
}

}  // namespace

std::unique_ptr<Command> report_command() { return std::make_unique<Report>(); }

}  // namespace fw::cli
