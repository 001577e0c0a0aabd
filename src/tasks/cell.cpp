#include "tasks/cell.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <nlohmann/json.hpp>
#include <numeric>
#include <optional>

#include "base/device.h"
#include "base/error.h"
#include "base/file.h"
#include "base/folder_lock.h"
#include "base/folders.h"
#include "base/json.h"
#include "base/threads.h"
#include "tokenizer/tokenizer.h"
#include "train/checkpoint.h"
#include "train/optimizer.h"
#include "train/step.h"

namespace fw {
namespace {

using nlohmann::json;
using Clock = std::chrono::steady_clock;

// What a seed draws for: its weights, training examples, those judged while it trains, those of another length. Far
// apart, so that the splits of neighbouring seeds have nothing in common.
enum class Split : uint64_t { kTraining, kJudged, kLengths };
uint64_t split_seed(uint64_t seed, Split split, int64_t length = 0) {
  return (seed * 4 + static_cast<uint64_t>(split)) * 0x9e3779b97f4a7c15u + static_cast<uint64_t>(length);
}

// Training examples, batch by batch; the place in them is all the state there is. One segment is shuffled anew each
// time round and its batches run over its end. Several are a mixture, as Zoology trains on it: one after the other, in
// order, the same batches each time round.
class Examples {
 public:
  Examples(const std::string& task, const TaskRecipe& recipe, uint64_t seed)
      : batch_(recipe.batch), seed_(split_seed(seed, Split::kTraining)) {
    for (const TaskSegment& s : training_segments(recipe))
      segments_.push_back({task_of(recipe, task, s.length, s.pairs), s.examples});
    if (recipe.segments.empty()) order_.resize(static_cast<size_t>(recipe.examples));
  }

  Batch batch(int64_t step) {
    if (order_.empty()) return mixed(step);
    const Segment& segment = segments_.front();
    const int64_t count = static_cast<int64_t>(order_.size());
    std::vector<uint64_t> indices;
    for (int64_t i = step * batch_; i < (step + 1) * batch_; ++i) {
      if (i / count != round_) shuffle(i / count);
      indices.push_back(order_[static_cast<size_t>(i % count)]);
    }
    return draw(segment, seed_, indices);
  }

 private:
  struct Segment {
    std::unique_ptr<SyntheticTask> task;
    int64_t examples;
    int64_t steps(int64_t batch) const { return 1 + (examples - 1) / batch; }
  };

  // On all threads: a GPU waits for its next batch.
  static Batch draw(const Segment& segment, uint64_t seed, const std::vector<uint64_t>& indices) {
    const auto count = static_cast<int64_t>(indices.size());
    const auto length = static_cast<size_t>(segment.task->length());
    Batch batch;
    batch.layout = SeqLayout::uniform(count, segment.task->length());
    batch.ids.resize(indices.size() * length);
    batch.targets.resize(batch.ids.size());
    parallel_for(count, [&](int64_t i) {
      const auto at = static_cast<size_t>(i);
      segment.task->examples(seed, indices[at], 1, std::span(batch.ids).subspan(at * length, length),
                             std::span(batch.targets).subspan(at * length, length));
    });
    return batch;
  }

  Batch mixed(int64_t step) const {
    int64_t round = 0;
    for (const Segment& segment : segments_) round += segment.steps(batch_);
    step %= round;
    size_t s = 0;
    for (; step >= segments_[s].steps(batch_); ++s) step -= segments_[s].steps(batch_);
    const int64_t begin = step * batch_, end = std::min(begin + batch_, segments_[s].examples);
    std::vector<uint64_t> indices(static_cast<size_t>(end - begin));
    std::iota(indices.begin(), indices.end(), static_cast<uint64_t>(begin));
    return draw(segments_[s], seed_ + s + 1, indices);
  }

  void shuffle(int64_t round) {
    Random random(seed_ + static_cast<uint64_t>(round) * 0xd1342543de82ef95u);
    std::iota(order_.begin(), order_.end(), uint64_t{0});
    for (size_t i = order_.size(); i > 1; --i) std::swap(order_[i - 1], order_[random.below(i)]);
    round_ = round;
  }

  int64_t batch_, round_ = -1;
  uint64_t seed_;
  std::vector<Segment> segments_;
  std::vector<uint64_t> order_;  // of one segment; a mixture has none
};

// Throws CellDamaged for a file that is no JSON object.
json read_json(const std::string& folder, const char* name) {
  const std::string path = folder + "/" + name;
  json found;
  try {
    found = parse_json(read_file(path), "'" + path + "'");
  } catch (const Error& error) {
    throw CellDamaged(folder, error.what());
  }
  if (!found.is_object())
    throw CellDamaged(folder, fmt::format("'{}': expected a JSON object, got {}", path, shown(found)));
  return found;
}

// Throws CellDamaged where `there` are no settings, and Error(kUsage) where they are others.
void check_settings(const std::string& folder, const char* name, const json& there, const json& here) {
  const std::string where = fmt::format("{}/{}", folder, name);
  std::string difference;
  try {
    difference = settings_difference(there, here, where);
  } catch (const Error& error) {
    throw CellDamaged(folder, error.what());
  }
  if (!difference.empty())
    fail_usage("'{}' was made with other settings: {}; use these, or another folder", where, difference);
}

// Training, from its beginning or its checkpoint to its end.
struct Run {
  static constexpr int64_t kMaxSkippedInRow = 10;

  const TaskCell& cell;
  json settings;
  LanguageModel<float> model;
  AdamW optimizer;
  Examples examples;
  std::unique_ptr<Tokenizer> tokenizer;
  TrainerState state;
  std::vector<TaskPoint> curve;
  double seconds = 0;  // before this process
  Clock::time_point start = Clock::now();
  // when the last checkpoint was, and what it took, in seconds of elapsed()
  double written = 0, writing = 0;
  std::vector<std::vector<float>> best_values;  // of the parameters, of the best model that no checkpoint has yet
  std::string checkpoints;

  explicit Run(const TaskCell& c)
      : cell(c),
        settings(settings_to_json(c.task, c.recipe, c.model, c.lr, c.seed)),
        model(c.model, device_named(c.device)),
        optimizer({.beta1 = c.recipe.beta1, .beta2 = c.recipe.beta2, .weight_decay = c.recipe.weight_decay},
                  model.params()),
        examples(c.task, c.recipe, c.seed),
        tokenizer(id_tokenizer(task_of(c.recipe, c.task)->vocab_size())),
        checkpoints(c.folder + "/checkpoints") {
    Random random(c.seed);
    model.init(random);
    model.params().decay_all();
    state.config_hash = config_hash(c.model);
    state.seed = c.seed;
    state.length = c.recipe.length;
  }

  // What was there before: curve.json says of which settings and how long it took, the newest checkpoint that is whole
  // where to go on.
  void resume() {
    const std::string path = cell.folder + "/curve.json";
    clean_checkpoints(checkpoints);
    if (!file_exists(path)) return;
    const json found = read_json(cell.folder, "curve.json");
    check_settings(cell.folder, "curve.json", found.value("settings", json()), settings);
    std::vector<int64_t> steps = list_checkpoints(checkpoints);
    for (; !steps.empty(); steps.pop_back()) {
      const std::string folder = checkpoint_path(checkpoints, steps.back());
      try {
        state = verify_checkpoint(folder);
      } catch (const Error&) {
        continue;  // a damaged one; it is written again
      }
      break;
    }
    try {
      if (!steps.empty()) load_checkpoint(checkpoint_path(checkpoints, steps.back()), state, model, optimizer);
      const json time = found.value("seconds", json(0.0));
      if (!time.is_number()) fail_usage("'{}': expected a number of seconds, got {}", path, shown(time));
      seconds = time.get<double>();
      curve = curve_from_json(found.value("curve", json()), "'" + path + "'");
    } catch (const Error& error) {
      throw CellDamaged(cell.folder, error.what());
    }
    std::erase_if(curve, [&](const TaskPoint& p) { return p.step > state.step; });
  }

  double elapsed() const { return seconds + std::chrono::duration<double>(Clock::now() - start).count(); }

  void write_curve() const {
    write_file_atomic(
        cell.folder + "/curve.json",
        json{{"settings", settings}, {"seconds", elapsed()}, {"curve", curve_to_json(curve)}}.dump(1) + "\n");
  }

  void write_best() {
    if (best_values.empty()) return;
    LanguageModel<float> kept(cell.model);
    for (size_t i = 0; i < best_values.size(); ++i)
      kept.params().write_values(kept.params().specs()[i], best_values[i]);
    make_folders(cell.folder + "/best");
    save_model(cell.folder + "/best", kept);
    best_values.clear();
  }

  // Often enough that a kill costs little, seldom enough that writing does.
  bool checkpoint_due() const { return state.step == cell.recipe.steps || elapsed() - written >= 20 * writing; }

  void checkpoint() {
    const double begin = elapsed();
    make_folders(checkpoints);
    write_best();
    write_curve();
    state.updates = optimizer.updates();
    state.random = Random(cell.seed).save();
    if (list_checkpoints(checkpoints).empty() || list_checkpoints(checkpoints).back() != state.step)
      write_checkpoint(checkpoints, state, model, optimizer, *tokenizer);
    prune_checkpoints(checkpoints, state.step, 2);
    written = elapsed();
    writing = written - begin;
  }

  void step() {
    const Batch batch = examples.batch(state.step);
    const StepResult result = train_step(model, optimizer, {&batch, 1},
                                         task_learning_rate(cell.recipe, cell.lr, state.step), cell.recipe.clip);
    ++state.step;
    state.tokens += static_cast<int64_t>(batch.ids.size());
    if (result.finite) {
      state.skipped_in_row = 0;
      state.interval_nll += result.nll;
      state.interval_count += result.count;
      return;
    }
    ++state.skipped;
    if (++state.skipped_in_row < kMaxSkippedInRow) return;
    fail_numeric(
        "{}: steps {} to {}: loss or gradient norm not finite {} times in a row, training stopped; try a lower lr (now "
        "{:g})",
        cell.folder, state.step - kMaxSkippedInRow + 1, state.step, kMaxSkippedInRow, cell.lr);
  }

  const TaskPoint* best() const {
    const auto found = std::ranges::max_element(curve, std::less<>(), &TaskPoint::accuracy);  // the first of equal ones
    return found == curve.end() ? nullptr : &*found;
  }

  bool patient() const {
    if (cell.recipe.enough > 0 && !curve.empty() && curve.back().accuracy > cell.recipe.enough) return false;
    if (cell.recipe.patience == 0 || curve.empty()) return true;
    return curve.size() - 1 - static_cast<size_t>(best() - curve.data()) < static_cast<size_t>(cell.recipe.patience);
  }

  double accuracy(const std::atomic<bool>* stop) {
    const auto at = [&](int64_t length, int64_t pairs) {
      return judge(model, *task_of(cell.recipe, cell.task, length, pairs),
                   split_seed(cell.seed, Split::kJudged, pairs == 0 ? 0 : length * 65536 + pairs), cell.recipe.judged,
                   stop);
    };
    if (cell.recipe.segments.empty()) return at(0, 0).micro;
    const std::vector<TestPoint> points = test_points(cell.recipe);
    double sum = 0;
    for (const TestPoint& point : points) sum += at(point.length, point.pairs).macro;
    return sum / static_cast<double>(points.size());
  }

  // A point of the curve; false when *stop became true before it was measured.
  bool measure(const std::function<void(const TaskPoint&)>& on_point, const std::atomic<bool>* stop) {
    const double measured = accuracy(stop);
    if (stop != nullptr && stop->load()) return false;
    const double loss =
        state.interval_count > 0 ? state.interval_nll / static_cast<double>(state.interval_count) : std::nan("");
    curve.push_back({state.step, loss, measured});
    state.interval_nll = 0;
    state.interval_count = 0;
    if (!cell.recipe.last && best() == &curve.back()) {
      best_values.clear();
      for (const ParamSpec& spec : model.params().specs()) {
        const HostView<float> view = model.params().host_values(spec);
        best_values.emplace_back(view.span().begin(), view.span().end());
      }
    }
    if (on_point) on_point(curve.back());
    return true;
  }
};

}  // namespace

TaskAccuracy judge(LanguageModel<float>& model, const SyntheticTask& task, uint64_t seed, int64_t count,
                   const std::atomic<bool>* stop) {
  // Of one pass: no more than a step of the recipes has, whose memory is there. Only answers come back from the model's
  // device: the logits of mqar's 2000 examples at 256 tokens would be 17 GB.
  constexpr int64_t kPassTokens = 8192;
  const int64_t length = task.length(), group = std::clamp<int64_t>(kPassTokens / length, 1, count);
  std::vector<int32_t> tokens(static_cast<size_t>(group * length)), labels(tokens.size()), answers, predictions, asked;
  std::vector<int64_t> rows;
  for (int64_t first = 0; first < count; first += group) {
    if (stop != nullptr && stop->load()) break;
    const int64_t now = std::min(group, count - first);
    const auto size = static_cast<size_t>(now * length);
    task.examples(seed, static_cast<uint64_t>(first), now, tokens, labels);
    rows.clear();
    for (size_t i = 0; i < size; ++i) {
      if (labels[i] != kNoLabel) rows.push_back(static_cast<int64_t>(i));
    }
    answers.resize(rows.size());
    model.likeliest(std::span(tokens).first(size), rows, SeqLayout::uniform(now, length), nullptr, answers);
    const size_t before = predictions.size();
    predictions.resize(before + size, -1);
    for (size_t i = 0; i < rows.size(); ++i) predictions[before + static_cast<size_t>(rows[i])] = answers[i];
    asked.insert(asked.end(), labels.begin(), labels.begin() + static_cast<int64_t>(size));
  }
  return task_accuracy(predictions, asked, length);
}

bool read_result(const std::string& folder, TaskResult& result) {
  const std::string path = folder + "/result.json";
  if (!file_exists(path)) return false;
  const json found = read_json(folder, "result.json");
  try {
    result = task_result_from_json(found, "'" + path + "'");
  } catch (const Error& error) {
    throw CellDamaged(folder, error.what());
  }
  return true;
}

CellDamaged::CellDamaged(const std::string& folder, const std::string& why)
    : Error(ErrorKind::kUsage,
            fmt::format("the cell '{}' is damaged: {}. Remove the folder, and the same command does the cell anew",
                        folder, why)) {}

bool run_cell(const TaskCell& cell, const std::function<void(const TaskPoint&)>& on_point,
              const std::atomic<bool>* stop, const std::function<void(const std::string&)>& on_note,
              const std::function<void(int64_t)>& on_step) {
  const auto stopped = [&] { return stop != nullptr && stop->load(); };
  NewFolders made;
  made.make(cell.folder);
  const FolderLock lock(cell.folder);
  for (const std::string& folder : {cell.folder, cell.folder + "/best"}) remove_abandoned(folder);
  const std::string path = cell.folder + "/result.json";
  try {
    TaskResult finished;
    if (read_result(cell.folder, finished)) {
      check_settings(cell.folder, "result.json", read_json(cell.folder, "result.json"),
                     settings_to_json(cell.task, cell.recipe, cell.model, cell.lr, cell.seed));
      return true;
    }
  } catch (const CellDamaged& damaged) {
    // Its curve says of which settings it is, and its checkpoints what was trained.
    if (!file_exists(cell.folder + "/curve.json")) throw;
    if (on_note) on_note(fmt::format("made again from its checkpoint: {}", damaged.what()));
  }
  Run run(cell);
  run.resume();
  const TaskRecipe& recipe = cell.recipe;
  const auto due = [&] { return run.state.step == recipe.steps || run.state.step % recipe.eval_every == 0; };
  const auto measured = [&] { return !run.curve.empty() && run.curve.back().step == run.state.step; };
  while (run.patient()) {
    if (run.state.step > 0 && due() && !measured()) {
      if (!run.measure(on_point, stop)) break;
      if (run.checkpoint_due()) run.checkpoint();
      continue;  // patience may have ended
    }
    if (run.state.step >= recipe.steps || stopped()) break;
    run.step();
    if (on_step) on_step(run.state.step);
  }
  if (stopped()) {
    run.checkpoint();
    return false;
  }
  run.write_best();

  TaskResult result;
  result.task = cell.task;
  result.rule = cell.name.empty() ? cell.model.rule : cell.name;
  result.recipe = recipe;
  result.model = cell.model;
  result.lr = cell.lr;
  result.seed = cell.seed;
  result.parameters = parameter_count(cell.model);
  result.steps = result.judged_step = run.state.step;
  result.skipped = run.state.skipped;
  const TaskPoint* best = run.best();
  LanguageModel<float>* judged = &run.model;
  std::optional<LanguageModel<float>> kept;
  if (!recipe.last && best != nullptr && best->step != run.state.step) {
    Device& device = device_named(cell.device);
    try {
      judged = &kept.emplace(load_model<float>(cell.folder + "/best", device));
    } catch (const Error& error) {
      throw CellDamaged(cell.folder, error.what());
    }
    result.judged_step = best->step;
  }
  for (const auto& [length, pairs] : test_points(recipe)) {
    const std::unique_ptr<SyntheticTask> task = task_of(recipe, cell.task, length, pairs);
    const uint64_t seed = split_seed(cell.seed, Split::kLengths, length + pairs * 65536);
    result.scores.push_back({length, pairs, judge(*judged, *task, seed, recipe.judged, stop),
                             task->recalls_pairs() ? last_write_ceiling(*task, seed, recipe.judged) : -1});
    if (stopped()) {
      run.checkpoint();
      return false;
    }
  }
  result.curve = run.curve;
  result.provenance = cell.provenance;
  result.provenance.date = today_utc();
  result.seconds = run.elapsed();
  write_file_atomic(path, to_json(result).dump(1) + "\n");
  return true;
}

}  // namespace fw
