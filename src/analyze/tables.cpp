#include "analyze/tables.h"

#include <fmt/format.h>

#include <array>
#include <cmath>
#include <functional>
#include <limits>
#include <nlohmann/json.hpp>
#include <vector>

namespace fw {
namespace {

using Json = nlohmann::ordered_json;

constexpr std::array<double, 7> kQuantiles = {0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99};

Json distribution_json(const Distribution& d, size_t head, int64_t bins) {
  Json quantiles = Json::object();
  for (const double p : kQuantiles) quantiles[fmt::format("{}", p)] = d.quantile(p);
  const Distribution::Histogram histogram = d.histogram(bins);
  return {{"head", head},
          {"count", d.count()},
          {"skipped", d.skipped()},
          {"mean", d.mean()},
          {"std", d.deviation()},
          {"min", d.min()},
          {"max", d.max()},
          {"quantiles", quantiles},
          {"histogram", {{"edges", histogram.edges}, {"counts", histogram.counts}}}};
}

Json series_json(const PositionSeries& series, size_t head, int64_t every) {
  Json positions = Json::array(), means = Json::array(), windows = Json::array();
  for (size_t i = 0; i < series.sum.size(); ++i) {
    positions.push_back(static_cast<int64_t>(i + 1) * every);
    means.push_back(series.mean(i));
    windows.push_back(series.windows[i]);
  }
  return {{"head", head}, {"position", positions}, {"mean", means}, {"windows", windows}};
}

Json overlap_json(const SubspaceOverlap& overlap, size_t head) {
  return {{"head", head},
          {"key_components", overlap.components_a},
          {"query_components", overlap.components_b},
          {"components", overlap.components},
          {"overlap", overlap.overlap},
          {"chance", overlap.chance},
          {"overlap_by_components", overlap.by_rank},
          {"key_explained", overlap.explained_a},
          {"query_explained", overlap.explained_b}};
}

Json key_head_json(const KeyHeadAnalysis& key, size_t head) {
  Json json = {{"head", head},
               {"gram_eigenvalues", key.gram.eigenvalues},
               {"gram_diagonal", key.gram.diagonal},
               {"axis_alignment", key.gram.alignment}};
  if (std::isfinite(key.center)) json["center"] = key.center;
  return json;
}

// One value of a head for the terminal's table.
struct Column {
  std::string heading;
  std::function<bool(const Rule&)> applies;
  std::function<double(const LayerAnalysis&, int64_t hv)> value;
};

Column distribution_column(const std::string& heading, Quantity q, double (*statistic)(const Distribution&)) {
  return {heading, info(q).applies, [q, statistic](const LayerAnalysis& layer, int64_t hv) {
            const int64_t head = info(q).of_key_head(layer.rule) ? hv / (layer.v_heads / layer.heads) : hv;
            return statistic(layer.of(q)[static_cast<size_t>(head)]);
          }};
}

double last_mean(const PositionSeries& series) {
  return series.sum.empty() ? std::numeric_limits<double>::quiet_NaN() : series.mean(series.sum.size() - 1);
}

std::vector<Column> columns() {
  const auto mean = [](const Distribution& d) { return d.mean(); };
  const auto median = [](const Distribution& d) { return d.quantile(0.5); };
  const auto always = [](const Rule&) { return true; };
  return {
      distribution_column("decay", Quantity::kDecay, mean),
      distribution_column("gain", Quantity::kGain, median),
      distribution_column("erase", Quantity::kEraseGate, mean),
      distribution_column("write", Quantity::kWriteGate, mean),
      distribution_column("lambda", Quantity::kLambda, mean),
      distribution_column("eigenvalue", Quantity::kEigenvalue, mean),
      distribution_column("k.w", Quantity::kKeyWrite, median),
      distribution_column("cos key", Quantity::kCosKeyRead, mean),
      distribution_column("cos query", Quantity::kCosQueryRead, mean),
      {"overlap", always,
       [](const LayerAnalysis& l, int64_t hv) { return l.value_heads[static_cast<size_t>(hv)].overlap.overlap; }},
      {"center", info(Quantity::kPrecondRaw).applies,
       [](const LayerAnalysis& l, int64_t hv) {
         return l.key_heads[static_cast<size_t>(hv / (l.v_heads / l.heads))].center;
       }},
      {"feedback/write", info(Quantity::kFeedbackToWrite).applies,
       [](const LayerAnalysis& l, int64_t hv) {
         return l.of(Quantity::kFeedbackToWrite)[static_cast<size_t>(hv)].quantile(0.5);
       }},
      {"|S| last", always,
       [](const LayerAnalysis& l, int64_t hv) { return last_mean(l.value_heads[static_cast<size_t>(hv)].state_norm); }},
      {"rank last", always, [](const LayerAnalysis& l, int64_t hv) {
         return last_mean(l.value_heads[static_cast<size_t>(hv)].effective_rank);
       }}};
}

std::string number(double x) { return std::isfinite(x) ? fmt::format("{:.4g}", x) : "-"; }

}  // namespace

Json analysis_json(const Analysis& analysis, int64_t bins) {
  Json report = {{"format", "fastweight-analysis-1"},
                 {"rule", analysis.rule},
                 {"tokens", analysis.tokens},
                 {"windows", analysis.windows},
                 {"context", analysis.context},
                 {"every", analysis.every},
                 {"loss", analysis.loss}};
  Json definitions = Json::object(), layers = Json::array();
  for (const LayerAnalysis& layer : analysis.layers) {
    Json quantity_map = Json::object();
    for (const QuantityInfo& q : quantities()) {
      if (!q.applies(layer.rule)) continue;
      definitions[std::string(q.name)] = q.formula;
      Json heads = Json::array();
      for (size_t h = 0; h < layer.of(q.id).size(); ++h) heads.push_back(distribution_json(layer.of(q.id)[h], h, bins));
      quantity_map[std::string(q.name)] = {{"of", q.of_key_head(layer.rule) ? "key head" : "value head"},
                                           {"bins", q.logarithmic(layer.rule) ? "logarithmic" : "linear"},
                                           {"heads", heads}};
    }
    Json norms = Json::array(), ranks = Json::array(), overlaps = Json::array(), energies = Json::array(),
         keys = Json::array(), saturations = Json::array();
    for (size_t h = 0; h < layer.value_heads.size(); ++h) {
      norms.push_back(series_json(layer.value_heads[h].state_norm, h, analysis.every));
      ranks.push_back(series_json(layer.value_heads[h].effective_rank, h, analysis.every));
      overlaps.push_back(overlap_json(layer.value_heads[h].overlap, h));
      energies.push_back({{"head", h},
                          {"query_energy", layer.value_heads[h].energy.own},
                          {"key_energy", layer.value_heads[h].energy.shared}});
    }
    for (size_t h = 0; h < layer.key_heads.size(); ++h) {
      keys.push_back(key_head_json(layer.key_heads[h], h));
      if (layer.rule.uses_precond_center())
        saturations.push_back(series_json(layer.key_heads[h].saturation, h, analysis.every));
    }
    Json over_time = {{"state_norm", norms}, {"effective_rank", ranks}};
    if (!saturations.empty()) over_time["saturation"] = std::move(saturations);
    layers.push_back({{"layer", layer.layer},
                      {"rule", to_string(layer.rule)},
                      {"heads", layer.heads},
                      {"v_heads", layer.v_heads},
                      {"key_dim", layer.key_dim},
                      {"value_dim", layer.value_dim},
                      {"replay_error", layer.replay_error()},
                      {"quantities", quantity_map},
                      {"over_time", over_time},
                      {"subspace_overlap", overlaps},
                      {"prior_energy", energies},
                      {"key_heads", keys}});
  }
  report["definitions"] = std::move(definitions);
  report["layers"] = std::move(layers);
  return report;
}

std::string analysis_csv(const Analysis& analysis, int64_t bins) {
  std::string csv = "layer,head,quantity,statistic,x,x_end,value\n";
  for (const LayerAnalysis& layer : analysis.layers) {
    const auto row = [&](size_t head, std::string_view quantity, std::string_view statistic, const std::string& x,
                         const std::string& x_end, double value) {
      if (std::isfinite(value))
        csv += fmt::format("{},{},{},{},{},{},{}\n", layer.layer, head, quantity, statistic, x, x_end, value);
    };
    for (const QuantityInfo& q : quantities()) {
      for (size_t h = 0; h < layer.of(q.id).size(); ++h) {
        const Distribution& d = layer.of(q.id)[h];
        row(h, q.name, "count", "", "", static_cast<double>(d.count()));
        row(h, q.name, "skipped", "", "", static_cast<double>(d.skipped()));
        row(h, q.name, "mean", "", "", d.mean());
        row(h, q.name, "std", "", "", d.deviation());
        row(h, q.name, "min", "", "", d.min());
        row(h, q.name, "max", "", "", d.max());
        for (const double p : kQuantiles) row(h, q.name, "quantile", fmt::format("{}", p), "", d.quantile(p));
        const Distribution::Histogram histogram = d.histogram(bins);
        for (size_t i = 0; i < histogram.counts.size(); ++i) {
          row(h, q.name, "bin", fmt::format("{}", histogram.edges[i]), fmt::format("{}", histogram.edges[i + 1]),
              static_cast<double>(histogram.counts[i]));
        }
      }
    }
    const auto series = [&](size_t h, std::string_view name, const PositionSeries& s) {
      for (size_t i = 0; i < s.sum.size(); ++i)
        row(h, name, "at_position", fmt::format("{}", static_cast<int64_t>(i + 1) * analysis.every), "", s.mean(i));
    };
    const auto numbered = [&](size_t h, std::string_view name, std::string_view statistic,
                              const std::vector<double>& values) {
      for (size_t r = 0; r < values.size(); ++r) row(h, name, statistic, fmt::format("{}", r + 1), "", values[r]);
    };
    for (size_t h = 0; h < layer.key_heads.size(); ++h) {
      const KeyHeadAnalysis& head = layer.key_heads[h];
      series(h, "saturation", head.saturation);
      row(h, "center", "value", "", "", head.center);
      row(h, "key_gram", "axis_alignment", "", "", head.gram.alignment);
      numbered(h, "key_gram", "eigenvalue", head.gram.eigenvalues);
      numbered(h, "key_gram", "diagonal", head.gram.diagonal);
    }
    for (size_t h = 0; h < layer.value_heads.size(); ++h) {
      const HeadAnalysis& head = layer.value_heads[h];
      series(h, "state_norm", head.state_norm);
      series(h, "effective_rank", head.effective_rank);
      numbered(h, "prior_energy", "query", head.energy.own);
      numbered(h, "prior_energy", "key", head.energy.shared);
      row(h, "subspace_overlap", "overlap", "", "", head.overlap.overlap);
      row(h, "subspace_overlap", "chance", "", "", head.overlap.chance);
      row(h, "subspace_overlap", "key_components", "", "", static_cast<double>(head.overlap.components_a));
      row(h, "subspace_overlap", "query_components", "", "", static_cast<double>(head.overlap.components_b));
      for (size_t r = 0; r < head.overlap.by_rank.size(); ++r) {
        row(h, "subspace_overlap", "with_components", fmt::format("{}", r + 1), "", head.overlap.by_rank[r]);
      }
    }
  }
  return csv;
}

Table analysis_table(const Analysis& analysis, int64_t rows) {
  int64_t heads = 0;
  for (const LayerAnalysis& layer : analysis.layers) heads += layer.v_heads;
  const bool each = heads <= rows;
  Table table;
  table.column("layer");
  if (each) table.column("head");
  std::vector<Column> used;
  for (Column& column : columns()) {
    for (const LayerAnalysis& layer : analysis.layers) {
      if (!column.applies(layer.rule)) continue;
      table.column(column.heading);
      used.push_back(std::move(column));
      break;
    }
  }
  for (const LayerAnalysis& layer : analysis.layers) {
    const auto mean = [&](const Column& column, int64_t begin, int64_t end) {
      if (!column.applies(layer.rule)) return std::numeric_limits<double>::quiet_NaN();
      double sum = 0;
      for (int64_t h = begin; h < end; ++h) sum += column.value(layer, h);
      return sum / static_cast<double>(end - begin);
    };
    for (int64_t h = 0; h < (each ? layer.v_heads : 1); ++h) {
      std::vector<std::string> cells{fmt::format("{}", layer.layer)};
      if (each) cells.push_back(fmt::format("{}", h));
      for (const Column& column : used)
        cells.push_back(number(each ? mean(column, h, h + 1) : mean(column, 0, layer.v_heads)));
      table.row(std::move(cells));
    }
  }
  return table;
}

}  // namespace fw
