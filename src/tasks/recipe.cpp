#include "tasks/recipe.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <numbers>

#include "base/error.h"

namespace fw {
namespace {

// So that no product of a few of them leaves 64 bits.
constexpr int64_t kMostOfAll = int64_t{1} << 40;

// "64x4x100000": `count` whole numbers of at least 1 with an x between them.
std::vector<int64_t> parse_numbers(const std::string& text, size_t count, const char* option) {
  std::vector<int64_t> numbers;
  bool good = true;
  for (size_t begin = 0; begin <= text.size() && good;) {
    const size_t end = std::min(text.find('x', begin), text.size());
    int64_t number = 0;
    const auto [rest, error] = std::from_chars(text.data() + begin, text.data() + end, number);
    good = error == std::errc() && rest == text.data() + end && number >= 1;
    numbers.push_back(number);  // NOLINT(performance-inefficient-vector-operation): two or three
    begin = end + 1;
  }
  for (const int64_t number : numbers) {
    if (good && number > kMostOfAll)
      fail_usage("{}: expected numbers of at most {}, got {} in '{}'", option, kMostOfAll, number, text);
  }
  if (!good || numbers.size() != count)
    fail_usage("{}: expected {} or zoology, with commas between them, got '{}'", option,
               count == 3 ? "LENGTHxPAIRSxCOUNT" : "LENGTHxPAIRS", text);
  return numbers;
}

}  // namespace

std::unique_ptr<SyntheticTask> task_of(const TaskRecipe& recipe, const std::string& task, int64_t length,
                                       int64_t pairs) {
  return make_task(task, {.length = length == 0 ? recipe.length : length,
                          .pairs = pairs == 0 ? recipe.pairs : pairs,
                          .vocab_size = recipe.vocabulary,
                          .passes = recipe.passes,
                          .power = recipe.power,
                          .noise = recipe.noise,
                          .first = recipe.first,
                          .haystack = recipe.haystack});
}

// "zoology" said out, and what follows from a mixture: 32 times round it, judged after each.
void complete_mixture(TaskRecipe& recipe, const std::string& task) {
  if (recipe.segments.empty()) {
    if (!recipe.tests.empty())
      fail_usage("tests: these are of a mixture; give it with --segments, or lengths with --lengths");
    return;
  }
  if (task != "mqar_zoology") fail_usage("segments: a mixture is trained on by mqar_zoology only, not by {}", task);
  if (recipe.segments == StringList{"zoology"}) {
    recipe.segments.clear();
    for (const TaskSegment& s : zoology_training())
      recipe.segments.push_back(fmt::format("{}x{}x{}", s.length, s.pairs, s.examples));
  }
  if (recipe.tests.empty() || recipe.tests == StringList{"zoology"}) {
    recipe.tests.clear();
    for (const TaskSegment& s : zoology_tests()) recipe.tests.push_back(fmt::format("{}x{}", s.length, s.pairs));
  }
  if (!recipe.lengths.empty())
    fail_usage("lengths: with --segments say with --tests, as LENGTHxPAIRS, where the model is judged");
  const TaskSegment first = training_segments(recipe).front();
  recipe.length = first.length;
  recipe.pairs = first.pairs;
  constexpr int64_t kRounds = 32;
  if (recipe.steps == 0) recipe.steps = kRounds * steps_per_round(recipe);
  if (recipe.eval_every == 0) recipe.eval_every = steps_per_round(recipe);
}

void check_sizes(TaskRecipe& recipe) {
  for (const KeyTable& table : key_tables(recipe)) {
    for (const Key& key : table.keys) {
      const auto* one = std::get_if<int64_t*>(&key.target);
      const auto* several = std::get_if<IntList*>(&key.target);
      for (const int64_t number : one != nullptr ? IntList{**one} : several != nullptr ? **several : IntList{}) {
        if (number > kMostOfAll) fail_usage("{}: expected at most {}, got {}", key.name, kMostOfAll, number);
      }
    }
  }
}

void complete(TaskRecipe& recipe, const std::string& task) {
  check_ranges(key_tables(recipe));
  check_sizes(recipe);
  const TaskOptions standard = default_options(task);
  // Kaczmarz Linear Attention's settings; mqar_zoology takes as many steps as Zoology's 32 passes over 180,000 examples
  // in batches of 256.
  const bool whole_sequence = task == "palindrome" || task == "stack";
  if (recipe.length == 0) recipe.length = standard.length;
  complete_mixture(recipe, task);
  if (recipe.steps == 0) recipe.steps = task == "mqar_zoology" ? 22500 : whole_sequence ? 20000 : 10000;
  if (recipe.eval_every == 0) recipe.eval_every = whole_sequence ? 500 : 200;
  if (recipe.lengths.empty() && recipe.segments.empty()) {
    recipe.lengths = whole_sequence ? IntList{256, 512, 1024, 2048}
                                    : IntList{recipe.length, 2 * recipe.length, 4 * recipe.length, 8 * recipe.length};
  }
  for (const int64_t length : recipe.lengths) {
    if (length < 1) fail_usage("lengths: expected lengths of at least 1, got {}", length);
    task_of(recipe, task, length);
  }
  for (const TaskSegment& s : training_segments(recipe)) task_of(recipe, task, s.length, s.pairs);
  for (const TestPoint& t : test_points(recipe)) task_of(recipe, task, t.length, t.pairs);
}

std::vector<TaskSegment> training_segments(const TaskRecipe& recipe) {
  if (recipe.segments.empty()) return {{recipe.length, 0, recipe.examples}};
  std::vector<TaskSegment> segments;
  segments.reserve(recipe.segments.size());
  for (const std::string& text : recipe.segments) {
    const std::vector<int64_t> n = parse_numbers(text, 3, "segments");
    segments.push_back({n[0], n[1], n[2]});
  }
  return segments;
}

std::vector<TestPoint> test_points(const TaskRecipe& recipe) {
  std::vector<TestPoint> points;
  points.reserve(recipe.tests.size() + recipe.lengths.size());
  for (const std::string& text : recipe.tests) {
    const std::vector<int64_t> n = parse_numbers(text, 2, "tests");
    points.push_back({n[0], n[1]});
  }
  if (!points.empty()) return points;
  for (const int64_t length : recipe.lengths) points.push_back({length, 0});
  return points;
}

int64_t steps_per_round(const TaskRecipe& recipe) {
  int64_t steps = 0;
  for (const TaskSegment& s : training_segments(recipe)) steps += 1 + (s.examples - 1) / recipe.batch;
  return steps;
}

double task_learning_rate(const TaskRecipe& recipe, double lr, int64_t step) {
  if (recipe.schedule == "constant") return lr;
  const int64_t per_round = steps_per_round(recipe), rounds = (recipe.steps + per_round - 1) / per_round,
                round = step / per_round;
  return lr * (1 + std::cos(std::numbers::pi * static_cast<double>(round) / static_cast<double>(rounds))) / 2;
}

ModelConfig task_model(const std::string& task) {
  ModelConfig model;
  const bool whole_sequence = task == "palindrome" || task == "stack";
  model.hidden_size = 256;
  model.num_hidden_layers = 2;
  model.num_heads = whole_sequence ? 2 : 4;
  model.head_dim = whole_sequence ? 96 : 48;
  model.expand_v = 2;
  model.intermediate_size = 1024;
  model.init = "normal";
  model.vocab_size = 0;
  return model;
}

void set_mixers(ModelConfig& model, const std::string& name) {
  const auto is_kind = [](const std::string& word) {
    ModelConfig one;
    one.layers = {word};
    return one.layer_kind(0) != LayerKind::kRecurrent;
  };
  const size_t plus = name.rfind('+');
  const bool pair = plus != std::string::npos && is_kind(name.substr(plus + 1));
  if (!pair && !is_kind(name)) {
    model.rule = name;
    return;
  }
  if (!model.layers.empty())
    fail_usage("rule: '{}' says which layers there are, and so does layers: leave one of them out", name);
  if (!pair) {
    model.layers = {name};
    return;
  }
  const std::string first = name.substr(0, plus);
  const bool rule = !is_kind(first);
  if (rule) model.rule = first;
  model.layers = {rule ? "recurrent" : first, name.substr(plus + 1)};
}

}  // namespace fw
