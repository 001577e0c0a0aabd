// The observer that analyses: replays every head of the layers it is asked for and keeps distributions, the state's
// norm and effective rank over positions, and the moments of the reads. Memory is that of the results, whatever the
// number of tokens. A task is one key head of one sequence with its value heads; the sequences of a head follow one
// another, so that results do not depend on threads.
#pragma once

#include <cstdint>
#include <limits>
#include <vector>

#include "analyze/distribution.h"
#include "analyze/quantity.h"
#include "analyze/subspace.h"
#include "nn/observer.h"
#include "rule/rule.h"

namespace fw {

// Means over windows at the positions every, 2 every, ... of a window.
struct PositionSeries {
  std::vector<double> sum;
  std::vector<int64_t> windows;
  void add(int64_t index, double x);
  double mean(size_t index) const { return sum[index] / static_cast<double>(windows[index]); }
};

// What belongs to one value head beside its distributions.
struct HeadAnalysis {
  explicit HeadAnalysis(int64_t value_dim)
      : key_reads(value_dim), query_reads(value_dim), prior_key_reads(value_dim), prior_query_reads(value_dim) {}
  PositionSeries state_norm, effective_rank;
  Moments key_reads, query_reads;                      // S^T k and o over all tokens
  SubspaceOverlap overlap;                             // of the two, from Analyzer::take
  Moments prior_key_reads, prior_query_reads;          // S_{t-1}^T k and S_{t-1}^T q
  SharedEnergy energy;                                 // of the former in the latter's components, from Analyzer::take
  double replay_difference = 0, replay_reference = 0;  // sums of squares of (replayed - observed o) and of the observed
};

// What belongs to one key head.
struct KeyHeadAnalysis {
  explicit KeyHeadAnalysis(int64_t key_dim) : keys(key_dim) {}
  Moments keys;       // k after its norm
  GramSpectrum gram;  // of the keys, from Analyzer::take
  // of a preconditioner that squashes: mean of |y| / (1 + |y|) over the channels
  PositionSeries saturation;
  double center = std::numeric_limits<double>::quiet_NaN();  // its learned center
};

struct LayerAnalysis {
  int64_t layer = 0, heads = 0, v_heads = 0, key_dim = 0, value_dim = 0;
  Rule rule;
  // [quantity][head], key heads or value heads; empty where the rule has no such quantity.
  std::vector<std::vector<Distribution>> distributions;
  std::vector<HeadAnalysis> value_heads;
  std::vector<KeyHeadAnalysis> key_heads;

  const std::vector<Distribution>& of(Quantity q) const { return distributions[static_cast<size_t>(q)]; }
  // |replayed o - observed o| / |observed o| over all heads and tokens: rounding, or the analysis has another rule than the model.
  double replay_error() const;
};

template <class T>
class Analyzer final : public PassObserver<T> {
 public:
  // layers: which; empty: all. every: tokens between two samples of the state, >= 1.
  Analyzer(std::vector<int64_t> layers, int64_t every);
  // Where in their windows the sequences of the next pass begin.
  void set_position(int64_t position) { position_ = position; }
  void begin_layer(int64_t layer) override { layer_ = layer; }
  void recurrence(const RecurrenceView<T>& view) override;
  // In order of the layers.
  const std::vector<LayerAnalysis>& layers() const { return layers_; }
  // The same with the overlaps computed; the analyzer is empty after it.
  std::vector<LayerAnalysis> take();

 private:
  LayerAnalysis* find(const RecurrenceView<T>& view);
  void key_head(const RecurrenceView<T>& view, int64_t sequence, int64_t h, LayerAnalysis& layer) const;

  std::vector<int64_t> wanted_;
  int64_t every_, position_ = 0, layer_ = 0;
  std::vector<LayerAnalysis> layers_;
};

}  // namespace fw
