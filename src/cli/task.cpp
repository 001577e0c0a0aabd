// task: examples of the papers' synthetic tasks, or one model trained and judged on one. sweep: a grid of them, rules
// by learning rates by seeds.
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <chrono>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "base/device.h"
#include "base/error.h"
#include "base/file.h"
#include "base/folder_lock.h"
#include "base/folders.h"
#include "base/memory.h"
#include "cli/command.h"
#include "cli/effects.h"
#include "cli/made_by.h"
#include "cli/model_option.h"
#include "cli/outputs.h"
#include "cli/say.h"
#include "cli/signals.h"
#include "report/progress.h"
#include "report/task_table.h"
#include "tasks/cell.h"
#include "tasks/small.h"
#include "train/memory_plan.h"

namespace fw::cli {
namespace {

namespace fs = std::filesystem;

// How far a sweep is: a bar on a terminal, and once, as soon as it can be told, how long all of it takes.
class SweepProgress {
 public:
  explicit SweepProgress(size_t cells) : cells_(cells) {}
  // Cell `index` begins, which has so many steps.
  void begin(size_t index, int64_t steps) {
    index_ = index;
    steps_ = steps;
    first_ = -1;
  }
  void step(int64_t done) {
    const Clock::time_point now = Clock::now();
    if (first_ < 0) {  // the step itself is not counted: it made the first allocations
      first_ = done;
      begun_ = now;
      return;
    }
    const double seconds = std::chrono::duration<double>(now - begun_).count(),
                 each = seconds / static_cast<double>(done - first_);
    const double left = each * static_cast<double>(steps_ - done);
    // Enough to tell: 20 steps, or a second of long ones.
    constexpr int64_t kMeasured = 20;
    constexpr double kMeasuredSeconds = 1;
    if (!said_ && (done - first_ >= kMeasured || seconds >= kMeasuredSeconds)) {
      said_ = true;
      const double all = left + each * static_cast<double>(steps_) * static_cast<double>(cells_ - index_ - 1);
      constexpr double kLong = 1800;
      clear();
      say("  {:.1f} ms a step: about {} for this cell{}{}\n", 1e3 * each, format_duration(left),
          cells_ > index_ + 1
              ? fmt::format(", {} for the {} cells to do, evaluations aside", format_duration(all), cells_ - index_)
              : ", evaluations aside",
          all > kLong ? " (--small shows the effect of every task within two minutes)" : "");
      std::fflush(stdout);
    }
    if (bar_.live()) bar_.show({done, steps_, 0, 0, left});
  }
  void clear() { bar_.clear(); }

 private:
  using Clock = std::chrono::steady_clock;
  ProgressBar bar_{STDOUT_FILENO};
  size_t cells_, index_ = 0;
  int64_t steps_ = 0, first_ = -1;
  bool said_ = false;
  Clock::time_point begun_;
};

// "length 256, 10000 steps, ..." of every task, for the help: what 0 stands for.
std::string defaults_of_tasks() {
  std::string text = "Without options (the papers' settings):\n";
  for (const std::string& task : synthetic_tasks()) {
    TaskRecipe recipe;
    const TaskOptions options = default_options(task);
    const bool needs_text = hides_in_text(task);
    recipe.length = options.length;
    if (!needs_text) complete(recipe, task);
    const ModelConfig model = task_model(task);
    text += fmt::format("  {:<15}  length {}{}{}; {}{} heads of {}\n", task, options.length,
                        options.pairs > 0 ? fmt::format(", {} pairs", options.pairs) : "",
                        options.vocab_size > 0 ? fmt::format(", vocabulary {}", options.vocab_size) : "",
                        needs_text ? ""
                                   : fmt::format("{} steps, judged every {} at {}; ", recipe.steps, recipe.eval_every,
                                                 fmt::join(recipe.lengths, ",")),
                        model.num_heads, model.head_dim);
  }
  return text;
}

class Task : public Command {
 public:
  explicit Task(bool sweep) : sweep_(sweep), model_(task_model("mqar")) { model_.vocab_size = 0; }
  std::string name() const override { return sweep_ ? "sweep" : "task"; }
  std::string summary() const override {
    return sweep_ ? "a grid of rules, learning rates and seeds on a synthetic task, goes on where it was stopped"
                  : "examples of a paper's synthetic task, or models trained and judged on it";
  }
  std::string details() const override {
    const std::string cells =
        "Every rule, learning rate and seed is a cell, a folder of its own under OUT/cells. Cells that are finished "
        "are not run again, one that was "
        "interrupted or killed goes on from its checkpoint to the same bits, and several processes may share one OUT: "
        "each cell is done by one of them. "
        "OUT/table.md, results.json, accuracy.svg and accuracy.png are made of what is finished.\n\n";
    const std::string tasks = fmt::format("Tasks: {}. docs/tasks.md says where they come from, and their traps.\n\n",
                                          fmt::join(synthetic_tasks(), ", "));
    if (sweep_) {
      return fmt::format(
          "{}{}{}\n'fastweight sweep lm' is the same of language models: 'fastweight sweep lm --help'.\n\nExamples:\n  "
          "fastweight sweep mqar --small --out small\n  fastweight sweep mqar --rule "
          "kaczmarz,gated_deltanet --lr 5e-4,1e-3 --seeds 1,2,3 "
          "--out mqar\n"
          "  fastweight sweep mqar_zoology --segments zoology --rule deltanet --layers conv,recurrent --mlp none --lr "
          "1e-3,3.16e-3 --out zoology",
          tasks, cells, defaults_of_tasks());
    }
    return fmt::format(
        "{}With --draw N: N examples as JSON lines (tokens, and labels, {} where nothing is asked) to OUT, or to "
        "standard output.\n\n"
        "With --rule: as 'fastweight sweep'. {}{}\nExamples:\n  fastweight task stack --draw 5\n  fastweight task mqar "
        "--rule kaczmarz --out mqar",
        tasks, kNoLabel, cells, defaults_of_tasks());
  }
  void declare(Options& options) override {
    options.positional("TASK", &task_, fmt::format("the task: {}", fmt::join(synthetic_tasks(), ", ")), true).words =
        synthetic_tasks();
    options.section("", "Run");
    options.add("rule", "RULE,...", &rules_,
                "rules to train, names of 'fastweight rules'; X+window: layers of X and of a window in turn; "
                "attention: a Transformer",
                ',');
    options.add("lr", "X,X,...", &rates_, "learning rates, constant over the run", ',');
    options.add("seeds", "N,N,...", &seeds_, "seeds, of weights and examples", ',');
    options.add("out", "FOLDER", &out_,
                sweep_ ? "folder of the cells and the table" : "folder of the cells and the table (with --draw: file)");
    options.add("small", "", &small_,
                "settings that show the task's effect within two minutes on two cores, where no option says otherwise: "
                "rules gated_deltanet and mamba2");
    if (!sweep_) options.add("draw", "N", &draw_, "write N examples instead of training");
    options.add("device", "DEVICE", &device_, device_help());
    declare_threads(options, threads_);
    declare_memory_check(options, check_memory_);
    options.add(key_tables(recipe_), false);
    KeyTables tables = key_tables(model_);
    std::erase_if(tables.front().keys, [](const Key& key) { return key.name == "rule" || key.name == "vocab_size"; });
    options.add(tables, false);
    for (Option& option : options.entries()) {
      if (option.key == "num_heads") option.default_text += "; palindrome and stack: 2";
      if (option.key == "head_dim") option.default_text += "; palindrome and stack: 96";
    }
  }
  int run(Options& options) override;

 private:
  void check_options(const Options& options, bool draws) const;
  // Takes what the command line does not say from a small task, or from the paper's model.
  void take_small(const Options& options);
  void take_model(const Options& options, ModelConfig standard);
  int draw(const Options& options) const;
  std::vector<TaskCell> cells() const;
  void check_memory(const std::vector<TaskCell>& cells) const;
  int run_all(const std::vector<TaskCell>& cells) const;
  void report(const std::vector<TaskCell>& cells) const;

  bool sweep_, small_ = false;
  bool check_memory_ = true;
  std::string task_, out_, device_ = "cpu";
  StringList rules_, rates_{"1e-3"};
  IntList seeds_{1};
  int64_t draw_ = 0, threads_ = 0;
  TaskRecipe recipe_;
  ModelConfig model_;
};

int Task::draw(const Options& options) const {
  const auto task = task_of(recipe_, task_);
  const auto line = [&](int64_t i) {
    const TaskExample one = task->example(static_cast<uint64_t>(seeds_.front()), static_cast<uint64_t>(i));
    return nlohmann::json{{"tokens", one.tokens}, {"labels", one.labels}}.dump() + "\n";
  };
  if (out_.empty()) {
    for (int64_t i = 0; i < draw_; ++i) fmt::print("{}", line(i));
    return kExitOk;
  }
  check_output(options, "--out", out_);
  write_file_atomic(out_, [&](const FileSink& sink) {
    for (int64_t i = 0; i < draw_; ++i) {
      const std::string text = line(i);
      sink(std::as_bytes(std::span(text)));
    }
  });
  return kExitOk;
}

double parse_rate(const std::string& text) {
  double rate = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), rate);
  if (error != std::errc() || end != text.data() + text.size() || !(rate > 0) || !std::isfinite(rate)) {
    fail_usage("--lr: expected numbers > 0 with commas between them, got '{}'", text);
  }
  return rate;
}

std::vector<TaskCell> Task::cells() const {
  std::vector<TaskCell> cells;
  const Provenance provenance = provenance_here(device_);
  for (const std::string& rule : rules_) {
    ModelConfig model = model_;
    set_mixers(model, rule);
    model.vocab_size = task_of(recipe_, task_)->vocab_size();
    validate(model);
    std::string name = rule;
    std::ranges::replace_if(
        name,
        [](char c) { return std::isalnum(static_cast<unsigned char>(c)) == 0 && c != '_' && c != '.' && c != '+'; },
        '-');
    for (const std::string& rate : rates_) {
      for (const int64_t seed : seeds_) {
        if (seed < 0) fail_usage("--seeds: expected numbers of at least 0, got {}", seed);
        TaskCell cell{task_,
                      fmt::format("{}/cells/{}-lr{:g}-seed{}", out_, name, parse_rate(rate), seed),
                      recipe_,
                      model,
                      parse_rate(rate),
                      static_cast<uint64_t>(seed),
                      device_,
                      rule,
                      provenance};
        const auto same = [&](const TaskCell& other) { return other.folder == cell.folder; };
        if (std::ranges::any_of(cells, same))
          fail_usage("--rule, --lr, --seeds: '{}' is named twice", fs::path(cell.folder).filename().string());
        cells.push_back(std::move(cell));
      }
    }
  }
  return cells;
}

// Of the longest step of every rule that is still to do, before a folder is made.
void Task::check_memory(const std::vector<TaskCell>& cells) const {
  std::string checked;
  for (const TaskCell& cell : cells) {
    if (cell.device != "cpu" || cell.name == checked || file_exists(cell.folder + "/result.json")) continue;
    TrainConfig step;
    step.batch = recipe_.batch;
    step.length = 1;
    for (const TaskSegment& s : training_segments(recipe_))
      step.length = std::max(step.length, task_of(recipe_, task_, s.length, s.pairs)->length());
    require_memory_of_step(cell.model, step, "batch, length or the model's sizes");
    checked = cell.name;
  }
}

void Task::report(const std::vector<TaskCell>& cells) const {
  std::vector<TaskResult> results;
  nlohmann::json all = nlohmann::json::array();
  for (const TaskCell& cell : cells) {
    TaskResult result;
    try {
      if (!read_result(cell.folder, result)) continue;
    } catch (const CellDamaged&) {  // said when it was run
      continue;
    }
    all.push_back(to_json(result));
    results.push_back(std::move(result));
  }
  write_file_atomic(out_ + "/results.json", all.dump(1) + "\n");
  write_file_atomic(out_ + "/table.md", task_report(results));
  if (results.empty()) return;
  say("{}\n", task_table(results).text());
  const PictureResult picture = write_task_curves(results, out_ + "/accuracy");
  for (const std::string& file : picture.files) say("{}\n", file);
  if (!picture.note.empty()) say("note: {}\n", picture.note);
  say("{}/table.md\n{}/results.json\n", out_, out_);
}

int Task::run_all(const std::vector<TaskCell>& cells) const {
  const std::atomic<bool>& stop = stop_on_signal();
  int64_t busy = 0, failed = 0, damaged = 0;
  SweepProgress progress(cells.size());
  NewFolders made;
  made.make(out_);
  for (size_t i = 0; i < cells.size() && !stop.load(); ++i) {
    const TaskCell& cell = cells[i];
    const std::string name = fs::path(cell.folder).filename().string();
    say("{} ({} of {})\n", name, i + 1, cells.size());
    std::fflush(stdout);
    progress.begin(i, cell.recipe.steps);
    try {
      run_cell(
          cell,
          [&](const TaskPoint& p) {
            progress.clear();
            say("  step {:>6}  loss {:.4f}  accuracy {:.2f}%\n", p.step, p.loss, 100 * p.accuracy);
            std::fflush(stdout);
          },
          &stop, [](const std::string& note) { say("  {}\n", note); }, [&](int64_t step) { progress.step(step); });
      progress.clear();
    } catch (const CellDamaged& error) {  // the others go on
      progress.clear();
      say("  {}\n", error.what());
      ++damaged;
    } catch (const FolderLocked& locked) {
      progress.clear();
      say("  left to another process: {}\n", locked.what());
      ++busy;
    } catch (const Error& error) {
      progress.clear();
      if (error.kind() != ErrorKind::kNumeric) throw;
      say("  {}\n", error.what());
      ++failed;
    }
  }
  report(cells);
  if (stop.load()) {
    say("interrupted; the same command goes on\n");
    return stopped_exit_code();
  }
  if (busy > 0)
    say("{} cells are being done by other processes; the same command makes the table when they are\n", busy);
  if (failed > 0) say("{} cells did not train\n", failed);
  if (damaged > 0)
    fail_usage("{} of {} cells are damaged and were left out; above stands which, and what to do", damaged,
               cells.size());
  return failed > 0 ? kExitFailed : kExitOk;
}

void Task::take_small(const Options& options) {
  SmallTask small = small_task(task_, recipe_.haystack);
  const KeyTables ours = key_tables(recipe_), theirs = key_tables(small.recipe);
  for (size_t k = 0; k < ours.front().keys.size(); ++k) {
    const Key& key = ours.front().keys[k];
    if (!options.given(key.name))
      std::visit([&](auto* to) { *to = *std::get<decltype(to)>(theirs.front().keys[k].target); }, key.target);
  }
  take_model(options, small.model);
  if (!options.given("lr")) rates_ = {fmt::format("{:g}", small.lr)};
  if (!options.given("seeds")) seeds_ = {static_cast<int64_t>(small.seed)};
  if (!options.given("rule")) rules_ = {"gated_deltanet", "mamba2"};
  if (out_.empty()) out_ = task_ + "-small";
}

void Task::take_model(const Options& options, ModelConfig standard) {
  const KeyTables ours = key_tables(model_), theirs = key_tables(standard);
  for (size_t k = 0; k < ours.front().keys.size(); ++k) {
    const std::string& name = ours.front().keys[k].name;
    if (name == "rule" || name == "vocab_size" || options.given(name)) continue;
    std::visit([&](auto* to) { *to = *std::get<decltype(to)>(theirs.front().keys[k].target); },
               ours.front().keys[k].target);
  }
}

// An option that this task, or what is asked of it, does not read is an error.
void Task::check_options(const Options& options, bool draws) const {
  const TaskOptions standard = default_options(task_);
  const std::string of_task = fmt::format("for the task {}", task_);
  if (standard.pairs == 0) options.expect_without_effect({"--pairs", "--vocabulary"}, of_task);
  if (standard.passes == 0)
    options.expect_without_effect({"--passes", "--power", "--noise", "--segments", "--tests"}, of_task);
  if (task_ != "palindrome") options.expect_without_effect({"--first"}, of_task);
  if (!hides_in_text(task_)) options.expect_without_effect({"--haystack"}, of_task);
  if (!recipe_.segments.empty())
    options.expect_without_effect({"--length", "--pairs", "--examples"}, "with --segments, which says them");
  if (!draws) return;
  options.expect_only({"--draw", "--out", "--seeds", "--length", "--pairs", "--vocabulary", "--passes", "--power",
                       "--noise", "--first", "--haystack"},
                      "with --draw, which trains nothing");
  if (seeds_.size() > 1) fail_usage("--seeds: expected one seed with --draw, got {}", seeds_.size());
}

int Task::run(Options& options) {
  apply_threads(threads_);
  if (seeds_.empty()) fail_usage("--seeds: expected at least one, got none");
  const bool draws = !sweep_ && options.given("draw");
  check_options(options, draws);
  take_model(options, task_model(task_));
  if (small_) take_small(options);
  complete(recipe_, task_);
  if (draw_ < 0) fail_usage("--draw: expected a number of examples, got {}", draw_);
  if (draws) return draw(options);
  if (rules_.empty())
    fail_usage("nothing to do: give --rule RULE,... to train, or --small for a first look{}",
               sweep_ ? "" : ", or --draw N for examples");
  if (rates_.empty()) fail_usage("--lr: expected at least one, got none");
  if (out_.empty()) fail_usage("--out: expected a folder for the cells and the table, got none");
  device_named(device_);  // one that is not there is said before any work
  allow_too_much_memory(!check_memory_);
  const std::vector<TaskCell> all = cells();
  std::vector<ModelConfig> models;
  models.reserve(all.size());
  for (const TaskCell& cell : all) models.push_back(cell.model);
  expect_options_of_models(options, models);
  // Before the training, so that a table that cannot be written costs nothing.
  for (const char* name : {"results.json", "table.md", "accuracy.svg", "accuracy.png"}) {
    if (file_exists(out_)) check_output(options, "--out", fmt::format("{}/{}", out_, name));
  }
  check_memory(all);
  return run_all(all);
}

}  // namespace

std::unique_ptr<Command> task_command() { return std::make_unique<Task>(false); }
std::unique_ptr<Command> sweep_command() { return std::make_unique<Task>(true); }

}  // namespace fw::cli
