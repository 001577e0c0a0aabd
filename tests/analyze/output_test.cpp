// A text through a model: windows and limits, and what JSON, CSV, table and pictures say of it.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <sstream>
#include <string>

#include "analyze/comparison.h"
#include "analyze/figures.h"
#include "analyze/run.h"
#include "analyze/tables.h"
#include "base/error.h"
#include "base/temp_folder.h"
#include "model/small_model.h"
#include "train/evaluate.h"
#include "train/token_writer.h"

namespace fw::testing {
namespace {

using Json = nlohmann::ordered_json;
using ::testing::HasSubstr;
using ::testing::Not;

ModelConfig byte_config(const std::string& rule) {
  ModelConfig config = small_config(rule);
  config.vocab_size = 256;
  return config;
}

// Two documents, of 150 and 40 letters.
class AnalysisOfText : public ::testing::Test {
 protected:
  AnalysisOfText() {
    const std::unique_ptr<Tokenizer> tokenizer = byte_tokenizer();
    const std::vector<std::string> texts{letters(150), letters(40)};
    write_token_file(texts, "", *tokenizer, folder_.path("t"));
    file_ = std::make_unique<TokenFile>(folder_.path("t"));
  }
  static std::string letters(int count) {
    std::string text;
    for (int i = 0; i < count; ++i) text += static_cast<char>('a' + i * i % 23);
    return text;
  }
  Analysis analyse(const std::string& rule, const AnalyzeOptions& options) const {
    LanguageModel<float> model = noisy_model<float>(byte_config(rule));
    return analyze_text(model, *file_, options);
  }
  TempFolder folder_;
  std::unique_ptr<TokenFile> file_;
};

TEST_F(AnalysisOfText, WindowsAreThoseOfTheEvaluation) {
  LanguageModel<float> model = noisy_model<float>(byte_config("kda"));
  for (const int64_t context : {0, 64, 1000}) {
    const Analysis a = analyze_text(model, *file_, {{}, 0, context, 16});
    EXPECT_EQ(a.tokens, 190);
    EXPECT_EQ(a.windows, context == 64 ? 4 : 2);
    const EvalResult evaluated = evaluate_file(model, *file_, *byte_tokenizer(), context, false);
    EXPECT_NEAR(a.loss, evaluated.loss, 1e-5 * evaluated.loss);
  }
  // The model is free again: a pass after it is not watched.
  const Analysis limited = analyze_text(model, *file_, {{1}, 160, 0, 16});
  EXPECT_EQ(limited.tokens, 160);
  EXPECT_EQ(limited.windows, 2);
  ASSERT_EQ(limited.layers.size(), 1u);
  EXPECT_EQ(limited.layers[0].layer, 1);
  EXPECT_EQ(limited.layers[0].of(Quantity::kCosQueryRead)[0].count(), 160);
  // Samples at 16, 32, ...: nine in the first window; ten tokens of the second are too few for one.
  EXPECT_EQ(limited.layers[0].value_heads[0].state_norm.windows, std::vector<int64_t>(9, 1));
}

TEST_F(AnalysisOfText, OptionsThatDoNotFit) {
  const auto error = [&](const AnalyzeOptions& options) {
    try {
      analyse("kda", options);
    } catch (const Error& e) {
      EXPECT_EQ(e.kind(), ErrorKind::kUsage);
      return std::string(e.what());
    }
    return std::string();
  };
  EXPECT_THAT(error({{2}, 0, 0, 16}), HasSubstr("layers: expected numbers from 0 to 1, got 2"));
  EXPECT_THAT(error({{-1}, 0, 0, 16}), HasSubstr("layers"));
  EXPECT_THAT(error({{}, -1, 0, 16}), HasSubstr("tokens"));
  EXPECT_THAT(error({{}, 0, -1, 16}), HasSubstr("context"));
  EXPECT_THAT(error({{}, 0, 0, 0}), HasSubstr("every"));
  LanguageModel<float> narrow = noisy_model<float>(small_config("kda"));
  EXPECT_THROW(analyze_text(narrow, *file_, {}), Error);
}

TEST_F(AnalysisOfText, JsonHasEveryQuantityOfTheRule) {
  const Analysis a = analyse(
      "decay=scalar gain=gate erase=channel write=channel feedback=learned precond=diagonal q_norm=l2 k_norm=l2",
      {{}, 0, 64, 16});
  const Json json = Json::parse(analysis_json(a, 20).dump());
  for (const char* key : {"format", "rule", "tokens", "windows", "context", "every", "loss", "definitions", "layers"})
    EXPECT_TRUE(json.contains(key)) << key;
  EXPECT_EQ(json["layers"].size(), 2u);
  // both gates are channel gates
  const std::set<std::string> without_gain{"beta", "gain", "target_move", "prediction_move", "discrepancy"};
  for (const Json& layer : json["layers"]) {
    for (const char* key : {"layer", "rule", "heads", "v_heads", "key_dim", "value_dim", "replay_error", "quantities",
                            "over_time", "subspace_overlap", "prior_energy", "key_heads"}) {
      EXPECT_TRUE(layer.contains(key)) << key;
    }
    EXPECT_LE(layer["replay_error"].get<double>(), 2e-5);
    for (const QuantityInfo& q : quantities()) {
      const std::string name(q.name);
      ASSERT_EQ(layer["quantities"].contains(name), !without_gain.contains(name)) << name;
      if (without_gain.contains(name)) continue;
      EXPECT_TRUE(json["definitions"].contains(name));
      EXPECT_EQ(layer["quantities"][name]["heads"].size(), 2u);
      for (const Json& head : layer["quantities"][name]["heads"]) {
        int64_t sum = 0;
        for (const Json& n : head["histogram"]["counts"]) sum += n.get<int64_t>();
        EXPECT_EQ(sum, head["count"].get<int64_t>()) << name;
        EXPECT_LE(head["histogram"]["counts"].size(), 20u);
        EXPECT_EQ(head["histogram"]["edges"].size(), head["histogram"]["counts"].size() + 1);
        EXPECT_LE(head["min"].get<double>(), head["quantiles"]["0.5"].get<double>());
        EXPECT_LE(head["quantiles"]["0.5"].get<double>(), head["max"].get<double>());
      }
    }
    EXPECT_EQ(layer["over_time"]["state_norm"][0]["position"], Json::array({16, 32, 48, 64}));
    // of 64, 64, 22 and 40 tokens
    EXPECT_EQ(layer["over_time"]["state_norm"][0]["windows"], Json::array({4, 3, 2, 2}));
    EXPECT_EQ(layer["over_time"]["effective_rank"].size(), 2u);
    EXPECT_EQ(layer["subspace_overlap"][1]["overlap_by_components"].size(), 8u);
    EXPECT_NEAR(layer["subspace_overlap"][1]["overlap_by_components"][7].get<double>(), 1, 1e-9);
  }
}

TEST_F(AnalysisOfText, CsvSaysTheSame) {
  const Analysis a = analyse("qdelta", {{}, 0, 64, 16});
  std::istringstream csv(analysis_csv(a, 20));
  std::string line;
  std::getline(csv, line);
  EXPECT_EQ(line, "layer,head,quantity,statistic,x,x_end,value");
  double binned = 0, counted = 0;
  while (std::getline(csv, line)) {
    EXPECT_EQ(std::count(line.begin(), line.end(), ','), 6) << line;
    EXPECT_THAT(line, Not(HasSubstr("nan")));
    const double value = std::stod(line.substr(line.rfind(',') + 1));
    if (line.starts_with("1,1,lambda,bin,")) binned += value;
    if (line.starts_with("1,1,lambda,count,")) counted = value;
  }
  EXPECT_EQ(counted, 190);
  EXPECT_EQ(binned, counted);
}

TEST_F(AnalysisOfText, TableHasHeadsOrLayers) {
  const Analysis a = analyse("linear_attention", {{}, 0, 64, 16});
  EXPECT_THAT(analysis_table(a).text(), HasSubstr("head"));
  EXPECT_THAT(analysis_table(a).text(), Not(HasSubstr("eigenvalue")));  // nothing is erased
  EXPECT_THAT(analysis_table(a, 3).text(), Not(HasSubstr("head")));
}

TEST_F(AnalysisOfText, PicturesAreWellFormed) {
  const Analysis a = analyse("kaczmarz", {{}, 0, 64, 16});
  const std::vector<Figure> figures = analysis_figures(a, 20);
  std::set<std::string> names;
  for (const Figure& figure : figures) {
    EXPECT_TRUE(names.insert(figure.name).second) << figure.name;
    EXPECT_EQ(figure.columns, 2u);
    ASSERT_EQ(figure.panels.size(), 4u);
    EXPECT_THAT(figure.panels[3].title, HasSubstr("layer 1, head 1"));
    const std::string script = figure_script(figure);
    EXPECT_THAT(script, HasSubstr("set multiplot layout 2,2"));
    EXPECT_THAT(script, Not(HasSubstr("nan")));
    EXPECT_FALSE(figure.x_label.empty() || figure.y_label.empty()) << figure.name;
    EXPECT_THAT(script, HasSubstr(fmt::format("set xlabel {}", gnuplot_quote(figure.x_label))));
    EXPECT_THAT(script, HasSubstr(fmt::format("set ylabel {}", gnuplot_quote(figure.y_label))));
    EXPECT_THAT(script, Not(HasSubstr("unset ytics"))) << "a histogram has a scale too";
    EXPECT_EQ(figure.logarithmic, figure.name == "gain" || figure.name == "key_write");  // raw keys
    for (const FigureCurve& curve : figure.panels[0].curves) {
      double sum = 0;
      for (const double y : curve.y) sum += y;
      if (curve.kind == FigureCurve::Kind::kBins) {
        EXPECT_NEAR(sum, 1, 1e-9) << figure.name;
      }
    }
  }
  for (const char* name : {"decay", "beta", "gain", "eigenvalue", "key_write", "cos_reads", "subspace_overlap",
                           "state_norm", "effective_rank", "prior_energy", "key_gram", "cos_prior_reads", "target_move",
                           "prediction_move", "discrepancy"}) {
    EXPECT_TRUE(names.contains(name)) << name;
  }
  EXPECT_EQ(names.size(), 15u);
}

// Layers with mixers of their own: the first has no gain, no erase and no lambda. The second's keys are normalised, the
// third's are not, so that one axis does not fit both; heads of keys and of values differ.
TEST_F(AnalysisOfText, EveryLayerIsDrawnByItsOwnRule) {
  Analysis mixed = analyse("linear_attention", {{0}, 0, 64, 16});
  const Analysis second = analyse("qdelta", {{1}, 0, 64, 16}), third = analyse("kaczmarz", {{0}, 0, 64, 16});
  mixed.layers.push_back(second.layers[0]);
  mixed.layers.push_back(third.layers[0]);
  mixed.layers[2].layer = 2;
  std::map<std::string, const Figure*> by_name;
  const std::vector<Figure> figures = analysis_figures(mixed, 20);
  for (const Figure& figure : figures) by_name[figure.name] = &figure;
  const auto layers_of = [&](const std::string& name) {
    std::set<std::string> layers;
    if (by_name.count(name) == 0) return layers;
    for (const FigurePanel& panel : by_name[name]->panels) {
      EXPECT_FALSE(panel.curves.empty()) << name << ": " << panel.title;
      layers.insert(panel.title.substr(0, panel.title.find(',')));
    }
    return layers;
  };
  using Set = std::set<std::string>;
  EXPECT_EQ(layers_of("lambda"), (Set{"layer 1"})) << "which the first layer does not have";
  EXPECT_EQ(layers_of("eigenvalue"), (Set{"layer 1", "layer 2"}));
  EXPECT_EQ(layers_of("cos_reads"), (Set{"layer 0", "layer 1", "layer 2"}));
  // k.w: of normalised keys on a linear axis, of others on a logarithmic one, each in a picture with the axis of its
  // bins.
  Set linear, logarithmic;
  for (const LayerAnalysis& layer : mixed.layers) {
    (info(Quantity::kKeyWrite).logarithmic(layer.rule) ? logarithmic : linear)
        .insert(fmt::format("layer {}", layer.layer));
  }
  ASSERT_FALSE(linear.empty());
  ASSERT_FALSE(logarithmic.empty());
  EXPECT_EQ(layers_of("key_write"), linear);
  EXPECT_EQ(layers_of("key_write_log"), logarithmic);
  EXPECT_FALSE(by_name["key_write"]->logarithmic);
  EXPECT_TRUE(by_name["key_write_log"]->logarithmic);
}

TEST_F(AnalysisOfText, WhatWasNeverSeenIsNotDrawn) {
  for (const Figure& figure : analysis_figures(analyse("kda", {{}, 0, 10, 16}), 20))
    EXPECT_THAT(figure.name, Not(HasSubstr("state_norm")));
}

// Parameters that have left the numbers: everything is skipped, nothing crashes, and the files are still JSON and CSV.
TEST_F(AnalysisOfText, ADivergedModelIsShownAsSuch) {
  LanguageModel<float> model = noisy_model<float>(byte_config("kda"));
  for (float& x : model.params().values()) x = std::nanf("");
  const Analysis a = analyze_text(model, *file_, {{}, 0, 64, 16});
  EXPECT_EQ(a.layers[0].of(Quantity::kCosQueryRead)[0].skipped(), 190);
  const Json json = Json::parse(analysis_json(a, 20).dump());
  EXPECT_TRUE(json["layers"][0]["subspace_overlap"][0]["overlap"].is_null());
  EXPECT_THAT(analysis_csv(a, 20), Not(HasSubstr("nan")));
  EXPECT_TRUE(analysis_figures(a, 20).empty());
  EXPECT_FALSE(analysis_table(a).empty());
}

TEST_F(AnalysisOfText, LargeModelsShowEvenlySpacedPanels) {
  Analysis a = analyse("kda", {{}, 0, 64, 16});
  const LayerAnalysis layer = a.layers[0];
  a.layers.assign(30, layer);
  for (size_t i = 0; i < 30; ++i) a.layers[i].layer = static_cast<int64_t>(i);
  const Figure figure = analysis_figures(a, 20)[0];
  EXPECT_EQ(figure.panels.size(), kFigureLayers * 2);
  EXPECT_THAT(figure.title, HasSubstr("12 of 30 layers, 2 of 2 heads"));
  EXPECT_THAT(figure.panels.back().title, HasSubstr("layer 29, head 1"));

  // A title longer than a row of panels is cut between words; quotes in it stay text.
  Figure titled = figure;
  titled.title = "a \"quoted\" word and " + std::string(120, 'x') + " end";
  const std::string script = figure_script(titled);
  EXPECT_THAT(script, HasSubstr("title \"a \\042quoted\\042 word and\\nxxx"));
  EXPECT_THAT(script, HasSubstr("xxx\\nend\" noenhanced"));
}

// Three runs: one without an erase, one of normalised keys with feedback, one of raw keys.
TEST_F(AnalysisOfText, RunsAreGathered) {
  const AnalyzeOptions options{{}, 0, 64, 16};
  std::vector<NamedAnalysis> runs{{"linear", analyse("linear_attention", options)},
                                  {"q, delta", analyse("qdelta", options)},
                                  {"raw", analyse("kaczmarz", options)}};
  std::map<std::string, Figure> figures;
  for (Figure& figure : comparison_figures(runs, 20)) {
    EXPECT_FALSE(figure.x_label.empty() || figure.y_label.empty() || figure.title.empty()) << figure.name;
    EXPECT_THAT(figure_script(figure), Not(HasSubstr(" nan")));
    EXPECT_TRUE(figures.emplace(figure.name, std::move(figure)).second);
  }
  const auto runs_of = [&](const std::string& name) {
    std::vector<std::string> found;
    for (const FigurePanel& panel : figures[name].panels)
      found.push_back(panel.title.substr(0, panel.title.find("   ")));
    return found;
  };
  using Names = std::vector<std::string>;
  EXPECT_EQ(runs_of("eigenvalue"), (Names{"q, delta", "raw"}));
  EXPECT_EQ(runs_of("eigenvalue_depth"), (Names{"q, delta", "raw"}));
  EXPECT_EQ(runs_of("effective_step"), (Names{"q, delta"}));
  EXPECT_EQ(runs_of("cos_reads"), (Names{"linear", "q, delta", "raw"}));
  EXPECT_EQ(runs_of("key_write_log"), (Names{"linear", "raw"})) << "raw keys alone have logarithmic bins";
  EXPECT_EQ(runs_of("key_write"), (Names{"q, delta"}));
  EXPECT_TRUE(figures.at("key_write_log").logarithmic);
  EXPECT_EQ(runs_of("subspace_overlap_depth").size(), 3u);
  EXPECT_EQ(figures.at("cos_reads").columns, 3u);

  // All heads and layers of a run, once each; the mean of the panel is that of all its values.
  const Analysis& qdelta = runs[1].analysis;
  double sum = 0;
  int64_t count = 0;
  for (const LayerAnalysis& layer : qdelta.layers) {
    for (const Distribution& head : layer.of(Quantity::kEigenvalue)) {
      sum += head.mean() * static_cast<double>(head.count());
      count += head.count();
    }
  }
  EXPECT_EQ(count, 2 * 2 * 190);
  EXPECT_THAT(figures.at("eigenvalue").panels[0].title,
              HasSubstr(fmt::format("mean {:.3g}", sum / static_cast<double>(count))));
  double share = 0;
  for (const double y : figures.at("eigenvalue").panels[0].curves.at(0).y) share += y;
  EXPECT_NEAR(share, 1, 1e-9);
  // Over the depth: low and high quantile, then the mean, at layers 0 and 1.
  const FigurePanel& depth = figures.at("eigenvalue_depth").panels[0];
  ASSERT_EQ(depth.curves.size(), 3u);
  EXPECT_EQ(depth.curves[2].x, (std::vector<double>{0, 1}));
  for (size_t i = 0; i < 2; ++i) {
    const auto& heads = qdelta.layers[i].of(Quantity::kEigenvalue);
    EXPECT_NEAR(depth.curves[2].y[i], (heads[0].mean() + heads[1].mean()) / 2, 1e-12);
    EXPECT_LT(depth.curves[0].y[i], depth.curves[2].y[i]);
    EXPECT_GT(depth.curves[1].y[i], depth.curves[2].y[i]);
  }

  const std::string table = comparison_table(runs).markdown();
  EXPECT_THAT(table, HasSubstr("| lambda | - | "));
  EXPECT_THAT(table, HasSubstr("| tokens | 190 | 190 | 190 |"));
  EXPECT_THAT(table, Not(HasSubstr("nan")));
  const std::string csv = comparison_csv(runs);
  EXPECT_THAT(csv, ::testing::StartsWith("run,layer,quantity,statistic,value\n"));
  EXPECT_THAT(csv, HasSubstr("\n\"q, delta\",all,eigenvalue,count,760\n"));
  EXPECT_THAT(csv, HasSubstr("\n\"q, delta\",1,eigenvalue,count,380\n"));
  EXPECT_THAT(csv, Not(HasSubstr("linear,all,eigenvalue")));
}

// Checkpoints of one training, in a shell's order, are drawn over their steps too; other names are not.
TEST_F(AnalysisOfText, CheckpointsAreDrawnOverTheTraining) {
  const AnalyzeOptions options{{}, 0, 64, 16};
  const auto figures_of = [&](const std::vector<std::string>& names) {
    std::vector<NamedAnalysis> runs;
    for (size_t i = 0; i < names.size(); ++i)
      runs.push_back({names[i], analyse(i == 0 ? "kaczmarz" : "qdelta", options)});
    std::map<std::string, Figure> figures;
    for (Figure& figure : comparison_figures(runs, 20)) figures.emplace(figure.name, std::move(figure));
    return figures;
  };
  const auto steps = figures_of({"step-1000", "step-200"});
  for (const char* name :
       {"eigenvalue_training", "discrepancy_training", "cos_key_read_training", "cos_query_read_training"}) {
    ASSERT_TRUE(steps.contains(name)) << name;
    ASSERT_EQ(steps.at(name).panels.size(), 1u);
    const std::vector<FigureCurve>& curves = steps.at(name).panels[0].curves;
    ASSERT_EQ(curves.size(), 3u);
    EXPECT_EQ(curves[2].x, (std::vector<double>{200, 1000}));
    for (size_t i = 0; i < 2; ++i) {
      EXPECT_LE(curves[0].y[i], curves[2].y[i]);
      EXPECT_GE(curves[1].y[i], curves[2].y[i]);
    }
  }
  const std::vector<FigureCurve>& lambda = steps.at("lambda_training").panels[0].curves;
  EXPECT_EQ(lambda[2].x, (std::vector<double>{200})) << "the other has none";
  for (const auto& names : {std::vector<std::string>{"step-1", "run-2"}, {"a", "b"}, {"step-1"}})
    EXPECT_FALSE(figures_of(names).contains("eigenvalue_training"));
}

}  // namespace
}  // namespace fw::testing
