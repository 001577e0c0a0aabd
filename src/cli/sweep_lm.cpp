#include "cli/sweep_lm.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>
#include <set>

#include "base/device.h"
#include "base/error.h"
#include "base/file.h"
#include "base/folder_lock.h"
#include "base/folders.h"
#include "base/json.h"
#include "cli/dataset.h"
#include "cli/effects.h"
#include "cli/made_by.h"
#include "cli/model_option.h"
#include "cli/outputs.h"
#include "cli/recipe.h"
#include "cli/run_config.h"
#include "cli/run_facts.h"
#include "cli/say.h"
#include "cli/signals.h"
#include "model/cost.h"
#include "report/gnuplot.h"
#include "report/metrics.h"
#include "report/plot.h"
#include "report/table.h"
#include "tasks/recipe.h"
#include "train/checkpoint.h"
#include "train/evaluate.h"
#include "train/trainer.h"

namespace fw::cli {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

constexpr const char* kRunComment = "A run of 'fastweight sweep lm'.";

// A model, learning rate and seed: a run folder, beside it the run file it was begun with.
struct LmCell {
  std::string name, folder;
  double lr = 0;
  ModelConfig model;
  TrainConfig train;
  bool finished() const { return file_exists(folder + "/model/config.json"); }
};

struct Judged {
  std::string name;
  Provenance provenance;  // of its training
  double lr = 0, parameters = 0, state_bytes = 0, state_bytes_token = 0, tokens = 0, tokens_per_second = 0;
  int64_t seed = 0;
  struct At {
    int64_t context = 0;
    std::optional<double> loss, bits_per_byte;  // one of them at least; older results have bits per byte alone
  };
  std::vector<At> at;
  // Of metrics.jsonl: the mean loss of the last records, how many these are, and the loss over the steps, thinned.
  // Results of earlier versions have no records.
  struct Training {
    double loss = 0;
    int64_t records = 0;
    std::vector<std::pair<int64_t, double>> curve;  // step, loss
  };
  Training training;
};

Judged::Training training_of(std::vector<MetricPoint> points) {
  std::erase_if(points, [](const MetricPoint& point) { return !std::isfinite(point.loss); });
  constexpr size_t kLastRecords = 10, kMostPoints = 50;
  Judged::Training training;
  const size_t last = std::min(kLastRecords, points.size());
  for (size_t i = points.size() - last; i < points.size(); ++i)
    training.loss += points[i].loss / static_cast<double>(last);
  training.records = static_cast<int64_t>(last);
  const size_t kept = std::min(kMostPoints, points.size());
  for (size_t i = 0; i < kept; ++i) {  // the first and the last are among them
    const MetricPoint& point = points[kept == 1 ? 0 : i * (points.size() - 1) / (kept - 1)];
    training.curve.emplace_back(point.step, point.loss);
  }
  return training;
}

json to_json(const Judged::Training& training) {
  if (training.records == 0) return {};
  json curve = json::array();
  for (const auto& [step, loss] : training.curve) curve.push_back({{"step", step}, {"loss", loss}});
  return {{"loss", training.loss}, {"records", training.records}, {"curve", curve}};
}
Judged::Training training_from_json(const json& found) {
  Judged::Training training;
  if (found.is_null()) return training;
  training.loss = found.at("loss").get<double>();
  training.records = found.at("records").get<int64_t>();
  for (const json& point : found.at("curve"))
    training.curve.emplace_back(point.at("step").get<int64_t>(), point.at("loss").get<double>());
  return training;
}

json json_or_null(const std::optional<double>& x) { return x ? json(*x) : json(); }
std::optional<double> number_or_null(const json& x) {
  return x.is_null() ? std::nullopt : std::optional(x.get<double>());
}

json to_json(const Judged& j) {
  json contexts = json::array();
  for (const Judged::At& a : j.at) {
    contexts.push_back({{"context", a.context},
                        {"loss", json_or_null(a.loss)},
                        {"perplexity", a.loss ? json(std::exp(*a.loss)) : json()},
                        {"bits_per_byte", json_or_null(a.bits_per_byte)}});
  }
  return {{"model", j.name},
          {"lr", j.lr},
          {"seed", j.seed},
          {"parameters", j.parameters},
          {"state_bytes", j.state_bytes},
          {"state_bytes_token", j.state_bytes_token},
          {"training_tokens", j.tokens},
          {"tokens_per_second", j.tokens_per_second},
          {"contexts", contexts},
          {"training", to_json(j.training)},
          {"provenance", to_json(j.provenance)}};
}
Judged judged_from_json(const json& one) {
  Judged j;
  j.name = one.at("model").get<std::string>();
  j.lr = one.at("lr").get<double>();
  j.seed = one.at("seed").get<int64_t>();
  j.provenance = provenance_from_json(one.value("provenance", json()));
  if (one.contains("program")) j.provenance.program = one.at("program").get<std::string>();  // as older sweeps have it
  j.parameters = one.at("parameters").get<double>();
  j.state_bytes = one.at("state_bytes").get<double>();
  j.state_bytes_token = one.at("state_bytes_token").get<double>();
  j.tokens = one.at("training_tokens").get<double>();
  j.tokens_per_second = one.at("tokens_per_second").get<double>();
  for (const json& a : one.at("contexts")) {
    j.at.push_back(
        {a.at("context").get<int64_t>(), number_or_null(a.at("loss")), number_or_null(a.at("bits_per_byte"))});
    if (!j.at.back().loss && !j.at.back().bits_per_byte)
      fail_usage("{}, context {}: expected a loss or bits per byte, got neither", j.name, j.at.back().context);
  }
  j.training = training_from_json(one.value("training", json()));
  return j;
}

double mean_value(const std::vector<double>& values) {
  double mean = 0;
  for (const double x : values) mean += x / static_cast<double>(values.size());
  return mean;
}

// Mean and, of several, the standard deviation of one (n - 1).
std::string spread(const std::vector<double>& values, int digits, bool has_sign = false) {
  const double mean = mean_value(values);
  double square = 0;
  for (const double x : values) square += (x - mean) * (x - mean);
  std::string text = has_sign ? fmt::format("{:+.{}f}", mean, digits) : fmt::format("{:.{}f}", mean, digits);
  if (values.size() < 2) return text;
  return fmt::format("{} ± {:.{}f}", text, std::sqrt(square / static_cast<double>(values.size() - 1)), digits);
}

// Whether every run has this at every context.
bool all_have(const std::vector<Judged>& all, std::optional<double> Judged::At::*value) {
  return std::ranges::all_of(all, [&](const Judged& j) {
    return std::ranges::all_of(j.at, [&](const Judged::At& a) { return (a.*value).has_value(); });
  });
}

// At context i, of each run the difference to the base's run of the same learning rate and seed.
std::vector<double> differences(const std::vector<const Judged*>& runs, const std::vector<Judged>& all,
                                const std::string& base, size_t i, bool bytes) {
  std::vector<double> values;
  for (const Judged* run : runs) {
    const auto other = std::ranges::find_if(
        all, [&](const Judged& j) { return j.name == base && j.lr == run->lr && j.seed == run->seed; });
    if (other == all.end() || run->name == base || i >= run->at.size() || i >= other->at.size()) continue;
    const Judged::At &ours = run->at[i], &theirs = other->at[i];
    if (ours.context != theirs.context) continue;
    const auto value = bytes ? &Judged::At::bits_per_byte : &Judged::At::loss;
    if (ours.*value && theirs.*value) values.push_back(*(ours.*value) - *(theirs.*value));
  }
  return values;
}

// A row for each model and learning rate, in the order in which they come. base: a model's name, "" for none.
Table lm_table(const std::vector<Judged>& all, const std::string& base) {
  Table table;
  if (all.empty()) return table;
  const bool one_rate = std::ranges::all_of(all, [&](const Judged& j) { return j.lr == all.front().lr; });
  const bool nats = all_have(all, &Judged::At::loss), bytes = all_have(all, &Judged::At::bits_per_byte);
  const bool trained = std::ranges::any_of(all, [](const Judged& j) { return j.training.records > 0; });
  table.column("model", Table::Align::kLeft);
  if (!one_rate) table.column("lr");
  for (const char* heading : {"parameters", "state", "seeds"}) table.column(heading);
  for (const Judged::At& a : all.front().at) {
    const std::string where = a.context == 0 ? "document" : fmt::format("{}", a.context);
    if (nats) table.column(fmt::format("loss at {}", where));
    if (nats) table.column(fmt::format("perplexity at {}", where));
    if (bytes) table.column(fmt::format("bits per byte at {}", where));
  }
  if (!base.empty()) {
    for (const Judged::At& a : all.front().at)
      table.column(fmt::format("from {} at {}", base, a.context == 0 ? "document" : fmt::format("{}", a.context)));
  }
  if (trained) table.column("train loss");
  table.column("ktok/s");
  std::vector<const Judged*> done;
  std::vector<std::vector<std::optional<double>>> losses(all.front().at.size());
  std::vector<std::optional<double>> train_losses;
  for (const Judged& first : all) {
    const auto alike = [&](const Judged& j) { return j.name == first.name && j.lr == first.lr; };
    if (std::ranges::any_of(done, [&](const Judged* d) { return alike(*d); })) continue;
    done.push_back(&first);
    std::vector<const Judged*> runs;
    for (const Judged& j : all) {
      if (alike(j)) runs.push_back(&j);
    }
    const auto over = [&](const auto& value, int digits) {
      std::vector<double> values(runs.size());
      std::transform(runs.begin(), runs.end(), values.begin(), [&](const Judged* run) { return value(*run); });
      return spread(values, digits);
    };
    std::vector<std::string> row{first.name};
    if (!one_rate) row.push_back(fmt::format("{:g}", first.lr));
    row.push_back(fmt::format("{:.3f}M", first.parameters / 1e6));
    const std::string grows =
        first.state_bytes_token > 0 ? fmt::format("{:.1f} KiB a token", first.state_bytes_token / 1024) : "";
    const std::string fixed = first.state_bytes > 0 ? fmt::format("{:.1f} KiB", first.state_bytes / 1024) : "";
    row.push_back(fmt::format("{}{}{}", fixed, !fixed.empty() && !grows.empty() ? " + " : "", grows));
    row.push_back(fmt::format("{}", runs.size()));
    for (size_t i = 0; i < first.at.size(); ++i) {
      double mean = 0;
      for (const Judged* run : runs)
        mean += (nats ? run->at[i].loss : run->at[i].bits_per_byte).value_or(NAN) / static_cast<double>(runs.size());
      losses[i].emplace_back(mean);
      if (nats) row.push_back(over([&](const Judged& j) { return *j.at[i].loss; }, 4));
      if (nats) row.push_back(over([&](const Judged& j) { return std::exp(*j.at[i].loss); }, 2));
      if (bytes) row.push_back(over([&](const Judged& j) { return *j.at[i].bits_per_byte; }, 4));
    }
    for (size_t i = 0; i < (base.empty() ? 0 : first.at.size()); ++i) {
      const std::vector<double> values = differences(runs, all, base, i, bytes);
      row.push_back(values.empty() ? "-" : spread(values, 4, true));
    }
    if (trained) {
      std::vector<double> values;
      for (const Judged* run : runs) {
        if (run->training.records > 0) values.push_back(run->training.loss);
      }
      train_losses.push_back(values.empty() ? std::nullopt : std::optional(mean_value(values)));
      row.push_back(values.empty() ? "-" : spread(values, 4));
    }
    row.push_back(over([](const Judged& j) { return j.tokens_per_second / 1e3; }, 1));
    table.row(std::move(row));
  }
  const size_t of_context = (nats ? 2 : 0) + (bytes ? 1 : 0), before = one_rate ? 4 : 5;
  for (size_t i = 0; i < losses.size(); ++i) {
    for (size_t c = 0; c < of_context; ++c)
      table.mark_best(before + i * of_context + c, losses[i], Table::Best::kLowest);
  }
  if (trained) {
    const size_t column = before + losses.size() * (of_context + (base.empty() ? 0 : 1));
    table.mark_best(column, train_losses, Table::Best::kLowest);
  }
  return table;
}

using ModelRate = std::pair<std::string, double>;  // a model and its learning rate

// Bits per byte, or the loss where the text's bytes are not known, over the context: a line for each of `groups`, with
// a band over its seeds. Whole documents (context 0) have no place on the axis.
Plot lm_contexts(const std::vector<Judged>& all, const std::vector<ModelRate>& groups) {
  Plot plot;
  plot.x_label = "context (tokens)";
  plot.log_x = true;
  plot.crop_outliers = true;
  const bool bytes = all_have(all, &Judged::At::bits_per_byte);
  plot.y_label = bytes ? "bits per byte" : "loss (nats per token)";
  std::map<std::string, size_t> of_model;
  for (const ModelRate& group : groups) {
    const std::string& name = group.first;
    const double lr = group.second;
    std::vector<std::vector<PlotPoint>> seeds;
    for (const Judged& j : all) {
      if (j.name != name || j.lr != lr) continue;
      std::vector<PlotPoint>& points = seeds.emplace_back();
      for (const Judged::At& a : j.at) {
        const double y = (bytes ? a.bits_per_byte : a.loss).value_or(NAN);
        if (a.context > 0) points.push_back({static_cast<double>(a.context), y, y, y});
      }
    }
    const bool one_rate =
        std::ranges::all_of(groups, [&](const ModelRate& other) { return other.first != name || other.second == lr; });
    const LineLook look = look_of(name, of_model[name]++);
    plot.lines.push_back(
        {one_rate ? name : fmt::format("{}, lr {:g}", name, lr), look.color, look.dash, true, mean_of(seeds)});
  }
  return plot;
}

// More than kMostLines are three pictures: rules and layers; hybrids beside what they are made of; ablations beside
// their base. kContextPictures has the names of the files.
constexpr size_t kMostLines = 12;
constexpr const char* kContextPictures[] = {"contexts", "contexts-hybrids", "contexts-ablations"};

std::vector<Plot> lm_plots(const std::vector<Judged>& all) {
  std::vector<ModelRate> groups;
  for (const Judged& j : all) {
    if (std::ranges::find(groups, ModelRate(j.name, j.lr)) == groups.end()) groups.emplace_back(j.name, j.lr);
  }
  const auto is_ablation = [](const std::string& name) { return !is_hybrid(name) && family_of(name) != name; };
  const auto is_plain = [&](const std::string& name) { return !is_hybrid(name) && !is_ablation(name); };
  const auto with_bases = [&](const auto& belongs, const auto& base_of) {
    std::set<std::string> bases;
    for (const ModelRate& group : groups) {
      if (belongs(group.first)) bases.insert(base_of(group.first));
    }
    std::vector<ModelRate> found;
    for (const ModelRate& group : groups) {
      if (belongs(group.first) || bases.contains(group.first)) found.push_back(group);
    }
    return bases.empty() ? std::vector<ModelRate>() : found;
  };
  std::vector<std::vector<ModelRate>> parts{groups};
  if (groups.size() > kMostLines) {
    const auto same = [](const std::string& name) { return name; };
    const auto first_part = [](const std::string& name) { return name.substr(0, name.find('+')); };
    parts = {with_bases(is_plain, same), with_bases(is_hybrid, first_part), with_bases(is_ablation, family_of)};
  }
  std::vector<Plot> plots;
  constexpr const char* kTitles[] = {"rules and layers", "hybrids", "ablations and negative eigenvalues"};
  for (size_t i = 0; i < parts.size(); ++i) {
    if (parts[i].empty()) continue;
    plots.push_back(lm_contexts(all, parts[i]));
    plots.back().name = kContextPictures[i];
    if (parts.size() > 1) plots.back().title = kTitles[i];
  }
  return plots;
}

double parse_rate(const std::string& text) {
  double rate = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), rate);
  if (error != std::errc() || end != text.data() + text.size() || !(rate > 0) || !std::isfinite(rate))
    fail_usage("--lr: expected numbers > 0 with commas between them, got '{}'", text);
  return rate;
}

class SweepLm : public Command {
 public:
  SweepLm() { model_.vocab_size = 0; }
  std::string name() const override { return "sweep lm"; }
  std::string summary() const override {
    return "language models of several rules and layers on one text, in one table; goes on where it was stopped";
  }
  std::string details() const override {
    return "Every model, learning rate and seed is a run, OUT/runs/NAME-lrX-seedN, as 'fastweight train' makes it; "
           "NAME.toml "
           "beside it is its run file. A finished run is not trained again, one that was stopped goes on from its "
           "checkpoint, and several processes may share one OUT. Each model is judged on the held-out text in windows "
           "of --contexts tokens that start from nothing. OUT/table.md, results.json, contexts.svg and contexts.png "
           "are made of what is finished: "
           "loss, perplexity, bits per byte, parameters, what a sequence's state takes in float32, the training loss "
           "of the last records, and the median of tokens a second. Of more than 12 models hybrids and ablations have "
           "pictures of their own. --parameters makes the models one size by the width of their MLPs.\n\n"
           "Examples:\n  fastweight sweep lm --small --text my.txt --out small\n"
           "  fastweight sweep lm --models gated_deltanet,kda,ssd,gated_deltanet2+window,attention --seeds 1,2,3 "
           "--text "
           "train.txt --valid valid.txt --parameters 28000000 --device cuda --out lm";
  }
  void declare(Options& options) override {
    options.section("", "Sweep");
    options.add(
        "models", "NAME,...", &models_,
        "models to train: names of 'fastweight rules' or of layers (ssd, mamba, mamba3, rwkv7, mesa, attention, "
        "...); X+window: layers of X and of a window in turn",
        ',');
    options.add("lr", "X,X,...", &rates_, "learning rates at their peak; without --min-lr a tenth of it is the last",
                ',');
    options.add("seeds", "N,N,...", &seeds_, "seeds, of weights and of the order of the data", ',');
    options.add(
        "contexts", "N,N,...", &contexts_,
        "tokens of a window when judged; 0: whole documents; without: the training's length and four times that", ',');
    options.add("parameters", "N", &parameters_,
                "the MLP of every model is as wide, in steps of 16, as brings its parameters nearest to N");
    options.add("base", "NAME", &base_,
                "one of --models: the table has the difference of every other model to it, seed by seed");
    options.add("small", "", &small_,
                "settings that take two minutes on two cores, where no option says otherwise: models gated_deltanet, "
                "mamba2 and attention");
    options.add("out", "FOLDER", &out_, "folder of the runs and the table");
    declare_threads(options, threads_);
    declare_memory_check(options, check_memory_);
    options.add(key_tables(data_), false);
    const auto without = [](KeyTables tables, const StringList& names) {
      std::erase_if(tables.front().keys,
                    [&](const Key& key) { return std::ranges::find(names, key.name) != names.end(); });
      return tables;
    };
    options.add(
        without(key_tables(train_), {"out", "lr", "seed", "from", "layout", "lora", "lora_alpha", "lora_modules"}),
        false);
    options.add(without(key_tables(model_), {"rule", "layers"}), false);
  }
  int run(Options& options) override;

 private:
  void take_small(const Options& options);
  std::vector<LmCell> cells(const Options& options);
  std::string run_file(const LmCell& cell);
  int train(const LmCell& cell);
  Judged judge(const LmCell& cell) const;
  void report(const std::vector<LmCell>& cells) const;

  StringList models_{"gated_deltanet", "kaczmarz", "gated_deltanet2", "kda", "qdelta", "mamba2", "attention"};
  StringList rates_{"2e-3"};
  IntList seeds_{1}, contexts_;
  int64_t parameters_ = 0, threads_ = 0;
  bool small_ = false, check_memory_ = true;
  std::string out_, base_;
  DataConfig data_;
  TrainConfig train_;
  ModelConfig model_;
};

void SweepLm::take_small(const Options& options) {
  const auto take = [&](const char* key, auto& to, const auto& value) {
    if (!options.given(key)) to = value;
  };
  take("models", models_, StringList{"gated_deltanet", "mamba2", "attention"});
  take("lr", rates_, StringList{"4e-3"});
  take("steps", train_.steps, 150);
  take("batch", train_.batch, 8);
  take("length", train_.length, 128);
  take("warmup", train_.warmup, 15);
  take("valid_tokens", train_.valid_tokens, 20000);
  take("hidden_size", model_.hidden_size, 64);
  take("num_hidden_layers", model_.num_hidden_layers, 2);
  take("num_heads", model_.num_heads, 2);
  take("head_dim", model_.head_dim, 32);
  if (!options.given("intermediate_size")) take("parameters", parameters_, 120000);
  if (out_.empty()) out_ = "lm-small";
}

// Parameters grow by the same number with every unit of the MLP's width.
int64_t width_for(ModelConfig model, const std::string& name, int64_t parameters) {
  if (model.mlp == "none") fail_usage("--parameters: expected an MLP, whose width it chooses, got --mlp none");
  const auto at = [&](int64_t width) {
    model.intermediate_size = width;
    validate(model);
    return cost_of(model, 1).parameters;
  };
  const double narrow = at(16), each = at(32) - narrow;
  const double width = 16 * std::round(1 + (static_cast<double>(parameters) - narrow) / each);
  if (!(width >= 16))
    fail_usage("--parameters: {} has {:.0f} at least with these options, more than {}", name, narrow, parameters);
  return static_cast<int64_t>(width);
}

std::vector<LmCell> SweepLm::cells(const Options& options) {
  const auto tokenizer = make_tokenizer(data_.tokenizer);
  std::vector<LmCell> cells;
  for (const std::string& name : models_) {
    ModelConfig model = model_;
    set_mixers(model, name);
    if (model.vocab_size == 0) model.vocab_size = tokenizer->vocab_size();
    validate(model);
    if (parameters_ > 0) model.intermediate_size = width_for(model, name, parameters_);
    std::string file = name;
    std::ranges::replace_if(
        file,
        [](char c) { return std::isalnum(static_cast<unsigned char>(c)) == 0 && c != '_' && c != '.' && c != '+'; },
        '-');
    for (const std::string& rate : rates_) {
      for (const int64_t seed : seeds_) {
        if (seed < 0) fail_usage("--seeds: expected numbers of at least 0, got {}", seed);
        LmCell cell{name, {}, parse_rate(rate), model, train_};
        cell.folder = fmt::format("{}/runs/{}-lr{:g}-seed{}", out_, file, cell.lr, seed);
        if (std::ranges::any_of(cells, [&](const LmCell& other) { return other.folder == cell.folder; }))
          fail_usage("--models, --lr, --seeds: '{}' is named twice", fs::path(cell.folder).filename().string());
        cell.train.out = cell.folder;
        cell.train.lr = cell.lr;
        if (!options.given("min_lr")) cell.train.min_lr = cell.lr / 10;
        cell.train.seed = static_cast<uint64_t>(seed);
        validate(cell.train);
        cells.push_back(std::move(cell));
      }
    }
  }
  return cells;
}

std::string SweepLm::run_file(const LmCell& cell) {
  LmCell one = cell;
  Options table;
  table.add(key_tables(data_));
  table.add(key_tables(one.train));
  table.add(key_tables(one.model));
  return to_toml(table, kRunComment, unused_tables(one.model));
}

// Written when a run ends, with the device that it ends on.
std::string provenance_file(const LmCell& cell) { return cell.folder + "/provenance.json"; }

// As the command `train` does it; its exit code.
int SweepLm::train(const LmCell& cell) {
  const std::string file = cell.folder + ".toml", text = run_file(cell);
  if (!file_exists(file)) write_file_atomic(file, text);
  if (cell.finished()) return kExitOk;
  const bool goes_on = !list_checkpoints(cell.folder + "/checkpoints").empty();
  std::vector<std::string> args =
      goes_on ? std::vector<std::string>{"--resume", "--out", cell.folder} : std::vector<std::string>{file};
  if (threads_ > 0) args.insert(args.end(), {"--threads", fmt::format("{}", threads_)});
  if (!check_memory_) args.emplace_back("--no-check-memory");
  const std::unique_ptr<Command> command = train_command();
  Options options;
  command->declare(options);
  parse_command_line(options, command->name(), args);
  const int code = command->run(options);
  if (cell.finished())
    write_file_atomic(provenance_file(cell), to_json(provenance_here(cell.train.device)).dump(1) + "\n");
  return code;
}

Provenance provenance_of(const LmCell& cell) {
  const std::string path = provenance_file(cell);
  Provenance provenance;
  if (file_exists(path)) provenance = provenance_from_json(parse_json(read_file(path), fmt::format("'{}'", path)));
  provenance.program = program_of_run(cell.folder);  // which began it
  return provenance;
}

// Of a finished run: kept in it, so that it is judged once.
Judged SweepLm::judge(const LmCell& cell) const {
  const std::string kept = cell.folder + "/judged.json";
  const std::string metrics = cell.folder + "/metrics.jsonl";
  if (file_exists(kept)) {
    try {
      Judged found = judged_from_json(parse_json(read_file(kept), fmt::format("'{}'", kept)));
      const auto same = [](const Judged::At& a, int64_t context) { return a.context == context; };
      if (found.training.records == 0 && file_exists(metrics))  // of an earlier version
        found.training = training_of(read_metrics(metrics));
      if (std::ranges::equal(found.at, contexts_, same)) return found;
    } catch (const json::exception&) {  // judged again
    }
  }
  Judged judged;
  judged.name = cell.name;
  judged.lr = cell.lr;
  judged.seed = static_cast<int64_t>(cell.train.seed);
  judged.provenance = provenance_of(cell);
  OpenModel open = open_model(cell.folder, "f32", "", cell.train.device);
  const ModelCost cost = cost_of(open.model.config(), cell.train.length);
  judged.parameters = cost.parameters;
  judged.state_bytes = cost.state_bytes;
  judged.state_bytes_token = cost.state_bytes_token;
  const std::string held = data_.valid.empty() ? held_out_tokens(cell.folder) : data_.valid;
  const TemporaryTokens tokens({held}, data_.field, data_.separator, *open.tokenizer);
  for (const int64_t context : contexts_) {
    const EvalResult r =
        evaluate_file(open.model, tokens.file(), *open.tokenizer, context, false, cell.train.valid_tokens);
    judged.at.push_back({context, r.loss, r.bits_per_byte});
  }
  const std::vector<MetricPoint> points = read_metrics(metrics);
  judged.training = training_of(points);
  std::vector<double> speeds;
  for (size_t i = points.size() / 2; i < points.size(); ++i) speeds.push_back(points[i].tokens_per_second);
  std::ranges::sort(speeds);
  if (!speeds.empty()) judged.tokens_per_second = speeds[speeds.size() / 2];
  if (!points.empty()) judged.tokens = points.back().tokens.value_or(0);
  write_file_atomic(kept, to_json(judged).dump(1) + "\n");
  return judged;
}

void SweepLm::report(const std::vector<LmCell>& cells) const {
  json runs = json::array();
  for (const LmCell& cell : cells) {
    if (cell.finished()) runs.push_back(to_json(judge(cell)));
  }
  if (runs.empty()) return;
  std::vector<std::string> texts;
  for (const std::string& text : data_.text) texts.push_back(fs::path(text).filename().string());
  json results = {{"sweep", kLanguageModels},
                  {"text", texts},
                  {"valid", data_.valid.empty() ? "the last part of the text" : fs::path(data_.valid).filename()},
                  {"steps", train_.steps},
                  {"tokens_a_step", train_.batch * train_.length * train_.accumulate},
                  {"runs", runs}};
  if (!base_.empty()) results["base"] = base_;
  const PageSection section = lm_section("", results);
  write_file_atomic(out_ + "/results.json", results.dump(1) + "\n");
  write_file_atomic(out_ + "/table.md", section.text + "\n\n" + section.table.markdown());
  say("\n{}\n{}/table.md\n{}/results.json\n", section.table.text(), out_, out_);
  for (const Plot& plot : section.plots) {
    std::string script = plot_script(plot);
    if (script.empty()) continue;
    const PictureResult picture =
        draw_picture("picture over contexts", out_ + "/" + plot.name, 1080, 540, [&] { return script; });
    for (const std::string& file : picture.files) say("{}\n", file);
    if (!picture.note.empty()) say("note: {}\n", picture.note);
  }
}

int SweepLm::run(Options& options) {
  const std::atomic<bool>& stop = stop_on_signal();
  apply_threads(threads_);
  if (small_) take_small(options);
  if (models_.empty()) fail_usage("--models: expected at least one, got none");
  if (rates_.empty()) fail_usage("--lr: expected at least one, got none");
  if (seeds_.empty()) fail_usage("--seeds: expected at least one, got none");
  if (out_.empty()) fail_usage("--out: expected a folder for the runs and the table, got none");
  if (parameters_ < 0) fail_usage("--parameters: expected a number of parameters, got {}", parameters_);
  if (parameters_ > 0)
    options.expect_without_effect({"--intermediate-size", "--hidden-ratio"},
                                  "with --parameters, which chooses the width of the MLP");
  if (!base_.empty() && std::ranges::find(models_, base_) == models_.end())
    fail_usage("--base: expected one of --models ({}), got '{}'", fmt::join(models_, ", "), base_);
  if (contexts_.empty()) contexts_ = {train_.length, 4 * train_.length};
  for (const int64_t context : contexts_) {
    if (context < 0 || context == 1) fail_usage("--contexts: expected 0 or numbers of at least 2, got {}", context);
  }
  if (data_.tokenizer.empty()) data_.tokenizer = "bytes";
  if (data_.valid.empty() && data_.valid_fraction == 0)
    fail_usage("--valid-fraction: expected a share to judge the models on, or a text with --valid, got 0");
  device_named(train_.device);  // one that is not there is said before any work
  validate(data_);
  make_paths_absolute(data_, train_);
  const std::vector<LmCell> all = cells(options);
  std::vector<ModelConfig> models;
  models.reserve(all.size());
  for (const LmCell& cell : all) models.push_back(cell.model);
  expect_options_of_models(options, models);
  for (const LmCell& cell : all) {
    const std::string file = cell.folder + ".toml";
    if (file_exists(file) && read_file(file) != run_file(cell)) {
      fail_usage("--out: '{}' was begun with other settings than these; give another folder, or the same options",
                 file);
    }
  }
  if (file_exists(out_)) {
    for (const char* name : {"results.json", "table.md"})
      check_output(options, "--out", fmt::format("{}/{}", out_, name));
    for (const char* name : kContextPictures) {
      for (const char* ending : {".svg", ".png"})
        check_output(options, "--out", fmt::format("{}/{}{}", out_, name, ending));
    }
  }
  NewFolders made;
  made.make(out_ + "/runs");
  int64_t busy = 0, failed = 0;
  for (size_t i = 0; i < all.size() && !stop.load(); ++i) {
    say("{} ({} of {}){}\n", fs::path(all[i].folder).filename().string(), i + 1, all.size(),
        all[i].finished() ? ": finished" : "");
    std::fflush(stdout);
    try {
      train(all[i]);
    } catch (const FolderLocked& locked) {
      say("  left to another process: {}\n", locked.what());
      ++busy;
    } catch (const Error& error) {
      if (error.kind() != ErrorKind::kNumeric) throw;
      say("  {}\n", error.what());
      ++failed;
    }
  }
  if (stop.load()) {
    say("interrupted; the same command goes on\n");
    return stopped_exit_code();
  }
  report(all);
  if (busy > 0)
    say("{} runs are being done by other processes; the same command makes the table when they are\n", busy);
  if (failed > 0) say("{} runs did not train\n", failed);
  return failed > 0 ? kExitFailed : kExitOk;
}

}  // namespace

bool is_lm_results(const json& results) {
  return results.is_object() && results.value("sweep", std::string()) == kLanguageModels;
}

PageSection lm_section(const std::string& title, const json& results) {
  PageSection section;
  section.title = title;
  try {
    std::vector<Judged> all;
    for (const json& one : results.at("runs")) all.push_back(judged_from_json(one));
    const auto base = results.value("base", std::string());
    section.table = lm_table(all, base);
    if (std::ranges::any_of(all, [](const Judged& j) { return j.at.size() > 1; })) section.plots = lm_plots(all);
    section.text = fmt::format(
        "Language models trained on {} ({} steps of {} tokens), judged on {} in windows that start from nothing. Mean "
        "and standard deviation over seeds, which is also the band of a picture.",
        fmt::join(results.at("text").get<StringList>(), ", "), results.at("steps").get<int64_t>(),
        results.at("tokens_a_step").get<int64_t>(), results.at("valid").get<std::string>());
    if (!base.empty()) {
      section.text += fmt::format(" 'from {}': difference in {} to that model, paired by seed.", base,
                                  all_have(all, &Judged::At::bits_per_byte) ? "bits per byte" : "loss");
    }
    std::set<int64_t> records;
    for (const Judged& j : all) {
      if (j.training.records > 0) records.insert(j.training.records);
    }
    if (!records.empty())
      section.text +=
          fmt::format(" The train loss is the mean of the last {} records of a run.", fmt::join(records, " or "));
    std::vector<Provenance> provenances;
    provenances.reserve(all.size());
    for (const Judged& j : all) provenances.push_back(j.provenance);
    if (const std::string provenance = provenance_text(provenances); !provenance.empty())
      section.text += " " + provenance;
  } catch (const json::exception& error) {
    fail_usage("{}results.json: not what 'fastweight sweep lm' writes: {}", title.empty() ? "" : title + "/",
               error.what());
  }
  return section;
}

std::unique_ptr<Command> sweep_lm_command() { return std::make_unique<SweepLm>(); }

}  // namespace fw::cli
