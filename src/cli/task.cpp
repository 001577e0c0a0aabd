// task: examples of the papers' synthetic tasks, or one model trained and judged on one. sweep: a grid of them, rules by learning rates by seeds.
#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "base/device.h"
#include "base/error.h"
#include "base/file.h"
#include "base/folder_lock.h"
#include "base/folders.h"
#include "base/memory.h"
#include "cli/command.h"
#include "cli/model_option.h"
#include "cli/outputs.h"
#include "cli/say.h"
#include "cli/signals.h"
#include "report/task_table.h"
#include "tasks/cell.h"
#include "train/memory_plan.h"

namespace fw::cli {
namespace {

namespace fs = std::filesystem;

class Task : public Command {
 public:
  explicit Task(bool sweep) : sweep_(sweep) { model_.vocab_size = 0; }
  std::string name() const override { return sweep_ ? "sweep" : "task"; }
  std::string summary() const override {
    return sweep_ ? "a grid of rules, learning rates and seeds on a synthetic task, goes on where it was stopped"
                  : "examples of a paper's synthetic task, or models trained and judged on it";
  }
  std::string details() const override {
    const std::string cells =
        "Every rule, learning rate and seed is a cell, a folder of its own under OUT/cells. Cells that are finished are not run again, one that was "
        "interrupted or killed goes on from its checkpoint to the same bits, and several processes may share one OUT: each cell is done by one of them. "
        "OUT/table.md, results.json, accuracy.svg and accuracy.png are made of what is finished.\n\n";
    const std::string tasks = fmt::format("Tasks: {}. docs/tasks.md says where they come from, and their traps.\n\n", fmt::join(synthetic_tasks(), ", "));
    if (sweep_) {
      return fmt::format(
          "{}{}Examples:\n  fastweight sweep mqar --rule kaczmarz,gated_deltanet --lr 5e-4,1e-3 --seeds 1,2,3 --out mqar\n"
          "  fastweight sweep mqar_zoology --segments zoology --rule deltanet --layers conv,recurrent --mlp none --lr 1e-3,3.16e-3 --out zoology",
          tasks, cells);
    }
    return fmt::format(
        "{}With --draw N: N examples as JSON lines (tokens, and labels, {} where nothing is asked) to OUT, or to standard output.\n\n"
        "With --rule: as 'fastweight sweep'. {}Examples:\n  fastweight task stack --draw 5\n  fastweight task mqar --rule kaczmarz --out mqar",
        tasks, kNoLabel, cells);
  }
  void declare(Options& options) override {
    options.positional("TASK", &task_, "name of the task", true);
    options.section("", "Run");
    options.add("rule", "RULE,...", &rules_,
                "rules to train, names of 'fastweight rules'; R+window: layers of R and of a window in turn; attention: a Transformer", ',');
    options.add("lr", "X,X,...", &rates_, "learning rates, constant over the run", ',');
    options.add("seeds", "N,N,...", &seeds_, "seeds, of weights and examples", ',');
    options.add("out", "FOLDER", &out_, sweep_ ? "folder of the cells and the table" : "folder of the cells and the table (with --draw: file)");
    if (!sweep_) options.add("draw", "N", &draw_, "write N examples instead of training");
    options.add("device", "DEVICE", &device_, device_help());
    declare_threads(options, threads_);
    declare_memory_check(options, check_memory_);
    options.add(key_tables(recipe_), false);
    KeyTables tables = key_tables(model_);
    std::erase_if(tables.front().keys, [](const Key& key) { return key.name == "rule" || key.name == "vocab_size"; });
    options.add(tables, false);
  }
  int run(Options& options) override;

 private:
  int draw(const Options& options) const;
  std::vector<TaskCell> cells() const;
  void check_memory(const std::vector<TaskCell>& cells) const;
  int run_all(const std::vector<TaskCell>& cells) const;
  void report(const std::vector<TaskCell>& cells) const;

  bool sweep_;
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
  for (const std::string& rule : rules_) {
    ModelConfig model = model_;
    set_mixers(model, rule);
    model.vocab_size = task_of(recipe_, task_)->vocab_size();
    validate(model);
    std::string name = rule;
    std::ranges::replace_if(
        name, [](char c) { return std::isalnum(static_cast<unsigned char>(c)) == 0 && c != '_' && c != '.' && c != '+'; }, '-');
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
                      rule};
        const auto same = [&](const TaskCell& other) { return other.folder == cell.folder; };
        if (std::ranges::any_of(cells, same)) fail_usage("--rule, --lr, --seeds: '{}' is named twice", fs::path(cell.folder).filename().string());
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
    for (const TaskSegment& s : training_segments(recipe_)) step.length = std::max(step.length, task_of(recipe_, task_, s.length, s.pairs)->length());
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
  NewFolders made;
  made.make(out_);
  for (size_t i = 0; i < cells.size() && !stop.load(); ++i) {
    const TaskCell& cell = cells[i];
    const std::string name = fs::path(cell.folder).filename().string();
    say("{} ({} of {})\n", name, i + 1, cells.size());
    std::fflush(stdout);
    try {
      run_cell(
          cell,
          [&](const TaskPoint& p) {
            say("  step {:>6}  loss {:.4f}  accuracy {:.2f}%\n", p.step, p.loss, 100 * p.accuracy);
            std::fflush(stdout);
          },
          &stop, [](const std::string& note) { say("  {}\n", note); });
    } catch (const CellDamaged& error) {  // the others go on
      say("  {}\n", error.what());
      ++damaged;
    } catch (const FolderLocked& locked) {
      say("  left to another process: {}\n", locked.what());
      ++busy;
    } catch (const Error& error) {
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
  if (busy > 0) say("{} cells are being done by other processes; the same command makes the table when they are\n", busy);
  if (failed > 0) say("{} cells did not train\n", failed);
  if (damaged > 0) fail_usage("{} of {} cells are damaged and were left out; above stands which, and what to do", damaged, cells.size());
  return failed > 0 ? kExitFailed : kExitOk;
}

int Task::run(Options& options) {
  apply_threads(threads_);
  if (seeds_.empty()) fail_usage("--seeds: expected at least one, got none");
  complete(recipe_, task_);
  if (draw_ < 0) fail_usage("--draw: expected a number of examples, got {}", draw_);
  if (!sweep_ && options.given("draw")) return draw(options);
  if (rules_.empty()) fail_usage("nothing to do: give --rule RULE,... to train{}", sweep_ ? "" : ", or --draw N for examples");
  if (rates_.empty()) fail_usage("--lr: expected at least one, got none");
  if (out_.empty()) fail_usage("--out: expected a folder for the cells and the table, got none");
  // The task's own model where the command line says nothing.
  ModelConfig standard = task_model(task_);
  const KeyTables ours = key_tables(model_), theirs = key_tables(standard);
  for (size_t t = 0; t < ours.size(); ++t) {
    for (size_t k = 0; k < ours[t].keys.size(); ++k) {
      const std::string& name = ours[t].keys[k].name;
      if (t > 0 || name == "rule" || name == "vocab_size" || options.given(name)) continue;
      std::visit([&](auto* to) { *to = *std::get<decltype(to)>(theirs[t].keys[k].target); }, ours[t].keys[k].target);
    }
  }
  device_named(device_);  // one that is not there is said before any work
  allow_too_much_memory(!check_memory_);
  const std::vector<TaskCell> all = cells();
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
