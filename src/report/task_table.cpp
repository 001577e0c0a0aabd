#include "report/task_table.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <set>

#include "report/curves.h"
#include "tasks/published.h"

namespace fw {
namespace {

bool by_example(const TaskResult& result) { return result.task == "mqar_zoology"; }
double accuracy_of(const TaskResult& result, const TaskScore& score) {
  return 100 * (by_example(result) ? score.accuracy.macro : score.accuracy.micro);
}

struct Group {
  std::string rule;
  double lr;
  std::vector<const TaskResult*> seeds;
};

std::vector<Group> groups_of(const std::vector<TaskResult>& results) {
  std::vector<Group> groups;
  for (const TaskResult& r : results) {
    auto found = std::ranges::find_if(groups, [&](const Group& g) { return g.rule == r.rule && g.lr == r.lr; });
    if (found == groups.end()) found = groups.insert(groups.end(), {r.rule, r.lr, {}});
    found->seeds.push_back(&r);
  }
  return groups;
}

double mean_value(const std::vector<double>& values) {
  double mean = 0;
  for (const double x : values) mean += x / static_cast<double>(values.size());
  return mean;
}

std::string mean_and_spread(const std::vector<double>& values) {
  const double mean = mean_value(values);
  double squares = 0;
  for (const double x : values) squares += (x - mean) * (x - mean);
  if (values.size() < 2) return fmt::format("{:.2f}", mean);
  return fmt::format("{:.2f} ± {:.2f}", mean, std::sqrt(squares / static_cast<double>(values.size() - 1)));
}

// Where models are judged: length, and pairs of a mixture's tests (else 0).
using Setting = std::pair<int64_t, int64_t>;
Setting setting_of(const TaskScore& score) { return {score.length, score.pairs}; }

std::vector<Setting> settings_of(const std::vector<TaskResult>& results) {
  std::set<Setting> settings;
  for (const TaskResult& r : results) {
    for (const TaskScore& s : r.scores) settings.insert(setting_of(s));
  }
  return {settings.begin(), settings.end()};
}

std::vector<double> accuracies(const Group& group, const Setting& setting) {
  std::vector<double> values;
  for (const TaskResult* r : group.seeds) {
    for (const TaskScore& s : r->scores) {
      if (setting_of(s) == setting) values.push_back(accuracy_of(*r, s));
    }
  }
  return values;
}

// The rate where the rule has several.
std::string group_label(const Group& group, const std::vector<Group>& groups) {
  const bool one_rate =
      std::ranges::all_of(groups, [&](const Group& g) { return g.rule != group.rule || g.lr == group.lr; });
  return one_rate ? group.rule : fmt::format("{}, lr {:g}", group.rule, group.lr);
}

}  // namespace

Table task_table(const std::vector<TaskResult>& results) {
  Table table;
  table.column("rule", Table::Align::kLeft);
  for (const char* heading : {"lr", "seeds", "parameters"}) table.column(heading);
  const std::vector<Setting> settings = settings_of(results);
  for (const auto& [length, pairs] : settings)
    table.column(pairs == 0 ? fmt::format("{}", length) : fmt::format("{}, {} pairs", length, pairs));
  std::vector<std::vector<std::optional<double>>> means(settings.size());
  for (const Group& group : groups_of(results)) {
    const TaskResult& first = *group.seeds.front();
    std::vector<std::string> row{group.rule, fmt::format("{:g}", group.lr), fmt::format("{}", group.seeds.size()),
                                 fmt::format("{:.2f}M", first.parameters / 1e6)};
    for (size_t i = 0; i < settings.size(); ++i) {
      const Setting& setting = settings[i];
      const std::vector<double> values = accuracies(group, setting);
      means[i].push_back(values.empty() ? std::nullopt : std::optional(mean_value(values)));
      std::string cell = values.empty() ? "-" : mean_and_spread(values);
      if (const auto theirs = published(first, setting.first)) {
        cell += fmt::format(" ({:.{}f}{})", theirs->accuracy, theirs->digits, theirs->paper >= 0 ? "*" : "");
      }
      row.push_back(std::move(cell));
    }
    table.row(std::move(row));
  }
  for (size_t i = 0; i < settings.size(); ++i) table.mark_best(4 + i, means[i], Table::Best::kHighest);
  std::vector<std::string> ceiling{"last-write memory", "", "", ""};
  bool any = false;
  for (const Setting& setting : settings) {
    double sum = 0;
    int count = 0;
    for (const TaskResult& r : results) {
      for (const TaskScore& s : r.scores) {
        if (setting_of(s) == setting && s.ceiling >= 0) sum += 100 * s.ceiling, ++count;
      }
    }
    any = any || count > 0;
    ceiling.push_back(count > 0 ? fmt::format("{:.2f}", sum / count) : "-");
  }
  if (any) table.row(std::move(ceiling));
  return table;
}

std::string task_caption(const std::vector<TaskResult>& results) {
  const TaskResult& r = results.front();
  std::vector<Provenance> provenances;
  provenances.reserve(results.size());
  for (const TaskResult& one : results) provenances.push_back(one.provenance);
  const std::string provenance = provenance_text(provenances);
  return fmt::format(
      "Accuracy in per cent, mean{} over seeds, of {} examples a length. Trained {}: {} steps of {} examples, learning "
      "rate {}, "
      "weight decay {:g} of every parameter, clip {:g}; the model {} is judged.{}{}",
      by_example(r) ? " over examples of each one's share," : "", r.recipe.judged,
      r.recipe.segments.empty()
          ? fmt::format("at length {}", r.recipe.length)
          : fmt::format("on a mixture (length x pairs x examples: {})", fmt::join(r.recipe.segments, ", ")),
      r.recipe.steps, r.recipe.batch, r.recipe.schedule == "constant" ? "constant" : "falling to 0 as a cosine",
      r.recipe.weight_decay, r.recipe.clip,
      r.recipe.last               ? "after the last step"
      : r.recipe.segments.empty() ? "that was best at the training length"
                                  : "that was best over all tests",
      provenance.empty() ? "" : " ", provenance);
}

std::string task_report(const std::vector<TaskResult>& results) {
  if (results.empty()) return "No cell is finished yet.\n";
  const TaskResult& r = results.front();
  std::string text = fmt::format("# {}\n\n{}\n\n{}", markdown_text(r.task), markdown_text(task_caption(results)),
                                 task_table(results).markdown());
  bool beside = false, above = false;
  for (const TaskResult& one : results) {
    for (const TaskScore& s : one.scores) {
      const auto theirs = published(one, s.length);
      beside = beside || theirs.has_value();
      above = above || (theirs && theirs->paper >= 0);
    }
  }
  if (beside) {
    text +=
        "\nIn brackets what Kaczmarz Linear Attention's result files have for the same model and training: one seed "
        "each, the best of the evaluations at the training length. The initial weights may differ.\n";
  }
  if (above) text += "\n\\* The paper's table has a higher number than its result files.\n";
  if (r.scores.front().ceiling >= 0) {
    text +=
        "\nA last-write memory keeps for every token the one that last followed it; noise that repeats a key "
        "overwrites what it should keep.\n";
  }
  return text;
}

std::vector<RunCurve> task_curves(const std::vector<TaskResult>& results) {
  std::vector<RunCurve> curves;
  const std::vector<Group> groups = groups_of(results);
  for (const Group& group : groups) {
    for (const TaskResult* r : group.seeds) {
      RunCurve curve{group_label(group, groups), {}};
      curve.rule = group.rule;
      curve.group = fmt::format("{}, lr {:g}", group.rule, group.lr);
      for (const TaskPoint& p : r->curve) {
        MetricPoint point;
        point.step = p.step;
        point.loss = p.loss;
        point.accuracy = 100 * p.accuracy;
        curve.points.push_back(point);
      }
      curves.push_back(std::move(curve));
    }
  }
  return curves;
}

Plot task_lengths(const std::vector<TaskResult>& results) {
  Plot plot;
  plot.name = "lengths";
  plot.x_label = "length (tokens)";
  plot.y_label = "accuracy (per cent)";
  plot.log_x = true;
  std::map<int64_t, int64_t> pairs_at;  // by length
  for (const auto& [length, pairs] : settings_of(results)) pairs_at[length] = std::max(pairs_at[length], pairs);
  if (pairs_at.size() < 2) return plot;
  const TaskResult& one = results.front();
  plot.title = one.task;
  if (one.recipe.segments.empty()) plot.mark_x = static_cast<double>(one.recipe.length);
  const std::vector<Group> groups = groups_of(results);
  std::map<std::string, size_t> of_rule;
  for (const Group& group : groups) {
    const LineLook look = look_of(group.rule, of_rule[group.rule]++);
    PlotLine line{group_label(group, groups), look.color, look.dash, true, {}};
    for (const auto& [length, pairs] : pairs_at) {
      const std::vector<double> values = accuracies(group, {length, pairs});
      if (!values.empty()) line.points.push_back(mean_point(static_cast<double>(length), values));
    }
    plot.lines.push_back(std::move(line));
  }
  limit_bands(plot, 0, 100);
  return plot;
}

PictureResult write_task_curves(const std::vector<TaskResult>& results, const std::string& base) {
  PictureResult pictures =
      write_run_curves(task_curves(results), CurveValue::kAccuracy, CurveOver::kStep, results.front().task, base);
  std::string script = plot_script(task_lengths(results));
  if (script.empty()) return pictures;
  PictureResult lengths =
      draw_picture("picture of accuracies over lengths", base + "-lengths", 1080, 540, [&] { return script; });
  pictures.files.insert(pictures.files.end(), lengths.files.begin(), lengths.files.end());
  if (pictures.note.empty()) pictures.note = std::move(lengths.note);
  return pictures;
}

}  // namespace fw
