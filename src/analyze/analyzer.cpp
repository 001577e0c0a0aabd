#include "analyze/analyzer.h"

#include <algorithm>
#include <cmath>

#include "analyze/replay.h"
#include "analyze/streams.h"
#include "base/error.h"
#include "base/threads.h"
#include "rule/precond.h"

namespace fw {
namespace {

// Tokens whose streams exist at a time.
constexpr int64_t kBlock = 64;

double dot(int64_t n, const double* a, const double* b) {
  double sum = 0;
  for (int64_t j = 0; j < n; ++j) sum += a[j] * b[j];
  return sum;
}

double norm(int64_t n, const double* a) { return std::sqrt(dot(n, a, a)); }

// 0 / 0 and x / 0 are not finite: the distribution skips them.
double cosine(int64_t n, const double* a, const double* b) { return dot(n, a, b) / (norm(n, a) * norm(n, b)); }

// Where a head's values go.
class Sink {
 public:
  Sink(LayerAnalysis& layer, int64_t h, int64_t hv) : layer_(layer), h_(h), hv_(hv) {}
  void add(Quantity q, double x) { of(q).add(x); }
  void add_all(Quantity q, const std::vector<double>& values) {
    if (values.empty()) return;
    Distribution& d = of(q);
    for (const double x : values) d.add(x);
  }

 private:
  Distribution& of(Quantity q) {
    return layer_
        .distributions[static_cast<size_t>(q)][static_cast<size_t>(info(q).of_key_head(layer_.rule) ? h_ : hv_)];
  }
  LayerAnalysis& layer_;
  int64_t h_, hv_;
};

// What follows from the gates alone.
void add_gates(const Rule& rule, const HeadStreams& x, bool first_of_group, Sink& sink) {
  if (x.scalar_decay) {
    for (int64_t i = 0; i < x.count; ++i) sink.add(Quantity::kDecay, x.decay[static_cast<size_t>(i * x.K)]);
  } else {
    sink.add_all(Quantity::kDecay, x.decay);
  }
  sink.add_all(Quantity::kBeta, x.beta);
  sink.add_all(Quantity::kGain, x.gain);
  sink.add_all(Quantity::kLambda, x.lambda);
  sink.add_all(Quantity::kWriteGate, x.write_gate);
  // What belongs to the key head is the same for all its value heads.
  if (first_of_group || !info(Quantity::kEraseGate).of_key_head(rule)) sink.add_all(Quantity::kEraseGate, x.erase_gate);
  if (!first_of_group) return;
  for (int64_t i = 0; i < x.count; ++i)
    sink.add(Quantity::kKeyWrite, dot(x.K, x.k.data() + i * x.K, x.w.data() + i * x.K));
}

// What follows from the state's answers at token i.
void add_reads(const HeadStreams& x, int64_t i, const TokenReads& reads, Sink& sink) {
  const int64_t K = x.K, V = x.V;
  const double *k = x.k.data() + i * K, *v = x.v.data() + i * V;
  sink.add(Quantity::kCosKeyRead, cosine(V, v, reads.key_read.data()));
  sink.add(Quantity::kCosQueryRead, cosine(V, v, reads.o.data()));
  sink.add(Quantity::kCosPriorReads, cosine(V, reads.prior_query.data(), reads.prior_key.data()));
  if (x.e.empty()) return;
  const double* e = x.e.data() + i * K;
  sink.add(Quantity::kEigenvalue, 1.0 - dot(K, e, (x.taken.empty() ? x.w : x.taken).data() + i * K));
  if (x.f.empty()) return;
  sink.add(Quantity::kEffectiveStep, dot(K, e, k) / dot(K, k, k));
  const double feedback = norm(V, reads.fed.data());
  double by_key = 0;
  for (int64_t j = 0; j < V; ++j) {
    const double d = reads.erased[static_cast<size_t>(j)] - reads.fed[static_cast<size_t>(j)];
    by_key += d * d;
  }
  sink.add(Quantity::kFeedback, feedback);
  sink.add(Quantity::kFeedbackToKey, feedback / std::sqrt(by_key));
  sink.add(Quantity::kFeedbackToWrite, feedback / norm(V, reads.u.data()));
}

// Target and prediction of one token for the next one (Q-Delta, Theorem 3.2): v, and S_t^T x with x = e / s, which is
// what the state after the write predicts. A step size of 0 gives numbers that are not finite, which distributions
// skip.
struct Prediction {
  std::vector<double> v, read;

  // Of token i against the token before it; then token i is the one before.
  void step(const HeadStreams& x, int64_t i, const TokenReads& reads, Sink& sink) {
    const int64_t V = x.V;
    const double* now = x.v.data() + i * V;
    const double s = x.gain[static_cast<size_t>(i)];
    if (!v.empty()) {
      double target = 0, prediction = 0, both = 0;
      for (int64_t j = 0; j < V; ++j) {
        const size_t at = static_cast<size_t>(j);
        const double dv = now[j] - v[at], dp = reads.erased[at] / s - read[at];
        target += dv * dv;
        prediction += dp * dp;
        both += (dv - dp) * (dv - dp);
      }
      sink.add(Quantity::kTargetMove, std::sqrt(target));
      sink.add(Quantity::kPredictionMove, std::sqrt(prediction));
      sink.add(Quantity::kDiscrepancy, std::sqrt(both));
    }
    v.assign(now, now + V);
    read = reads.left;
    for (double& y : read) y /= s;
  }
};

// What a preconditioner does to the token at `i`: its share of the range that the squashing uses.
double saturation(const Rule& rule, const PrecondStreams& x, int64_t i, int64_t K) {
  double sum = 0;
  for (int64_t j = 0; j < K; ++j) {
    const double y = std::abs(x.y[static_cast<size_t>(i * K + j)]);
    sum += rule.precond_form == PrecondForm::kTanh ? std::tanh(y) : y / (1 + y);
  }
  return sum / static_cast<double>(K);
}

void add_state(const HeadReplay& replay, int64_t K, int64_t V, int64_t index, HeadAnalysis& head, Sink& sink) {
  const double size = norm(K * V, replay.state().data());
  // a diverged model is shown as what it is
  const double rank = std::isfinite(size) ? effective_rank(K, V, replay.state()) : size;
  sink.add(Quantity::kStateNorm, size);
  sink.add(Quantity::kEffectiveRank, rank);
  if (std::isfinite(size)) head.state_norm.add(index, size);
  if (std::isfinite(rank)) head.effective_rank.add(index, rank);
}

}  // namespace

void PositionSeries::add(int64_t index, double x) {
  if (index >= static_cast<int64_t>(sum.size())) {
    sum.resize(static_cast<size_t>(index) + 1);
    windows.resize(static_cast<size_t>(index) + 1);
  }
  sum[static_cast<size_t>(index)] += x;
  ++windows[static_cast<size_t>(index)];
}

double LayerAnalysis::replay_error() const {
  double difference = 0, reference = 0;
  for (const HeadAnalysis& head : value_heads) {
    difference += head.replay_difference;
    reference += head.replay_reference;
  }
  return reference > 0 ? std::sqrt(difference / reference) : std::sqrt(difference);
}

template <class T>
Analyzer<T>::Analyzer(std::vector<int64_t> layers, int64_t every) : wanted_(std::move(layers)), every_(every) {
  if (every_ < 1) fail_usage("analysis: expected a sample of the state every 1 or more tokens, got {}", every_);
}

// The results of the layer that runs, made when it is seen first; null when nobody wants it.
template <class T>
LayerAnalysis* Analyzer<T>::find(const RecurrenceView<T>& view) {
  if (!wanted_.empty() && std::find(wanted_.begin(), wanted_.end(), layer_) == wanted_.end()) return nullptr;
  auto at = std::lower_bound(layers_.begin(), layers_.end(), layer_,
                             [](const LayerAnalysis& l, int64_t i) { return l.layer < i; });
  if (at != layers_.end() && at->layer == layer_) return &*at;
  LayerAnalysis layer;
  layer.layer = layer_;
  layer.heads = view.heads;
  layer.v_heads = view.v_heads;
  layer.key_dim = view.key_dim;
  layer.value_dim = view.value_dim;
  layer.rule = view.rule;
  for (const QuantityInfo& q : quantities()) {
    const int64_t heads = q.applies(view.rule) ? (q.of_key_head(view.rule) ? view.heads : view.v_heads) : 0;
    layer.distributions.emplace_back(static_cast<size_t>(heads), Distribution(q.scale(view.rule)));
  }
  for (int64_t i = 0; i < view.v_heads; ++i) layer.value_heads.emplace_back(view.value_dim);
  for (int64_t i = 0; i < view.heads; ++i) layer.key_heads.emplace_back(view.key_dim);
  return &*layers_.insert(at, std::move(layer));
}

template <class T>
void Analyzer<T>::recurrence(const RecurrenceView<T>& view) {
  LayerAnalysis* layer = find(view);
  if (layer == nullptr) return;
  for (int64_t n = 0; n < view.layout.count(); ++n) {
    parallel_for(view.heads, [&](int64_t h) { key_head(view, n, h, *layer); });
  }
}

template <class T>
void Analyzer<T>::key_head(const RecurrenceView<T>& view, int64_t sequence, int64_t h, LayerAnalysis& layer) const {
  const int64_t K = view.key_dim, V = view.value_dim, group = view.v_heads / view.heads;
  std::vector<HeadReplay> replays(static_cast<size_t>(group), HeadReplay(K, V));
  for (int64_t i = 0; i < group; ++i) {
    replays[static_cast<size_t>(i)].start(
        view.in.s != nullptr ? view.in.s + (sequence * view.v_heads + h * group + i) * K * V : nullptr);
  }
  std::vector<double> a(static_cast<size_t>(K));
  if (view.in.a != nullptr) std::copy_n(view.in.a + (sequence * view.heads + h) * K, K, a.begin());

  PrecondStreams precond;
  HeadStreams x;
  std::vector<double> key_reads(static_cast<size_t>(kBlock * V)), query_reads(key_reads.size()),
      prior_key(key_reads.size()), prior_query(key_reads.size());
  std::vector<Prediction> predictions(static_cast<size_t>(group));
  const bool predicts = info(Quantity::kDiscrepancy).applies(view.rule);
  KeyHeadAnalysis& own = layer.key_heads[static_cast<size_t>(h)];
  if (view.in.precond_center != nullptr) own.center = static_cast<double>(view.in.precond_center[h]);
  for (int64_t begin = view.layout.begin(sequence); begin < view.layout.end(sequence); begin += kBlock) {
    const int64_t count = std::min(kBlock, view.layout.end(sequence) - begin);
    if (view.rule.uses_precond()) {
      load_precond(view, begin, count, h, a, precond);
      Sink sink(layer, h, h * group);
      sink.add_all(Quantity::kPrecondDecay, precond.decay);
      sink.add_all(Quantity::kPrecondGain, precond.gain);
      sink.add_all(Quantity::kPrecondRaw, precond.y);
      sink.add_all(Quantity::kPrecond, precond.m);
      const PrecondMap<double> map = precond_map(view.rule, std::log(view.rule.precond_x), 0.0);
      for (const double y : precond.y) sink.add(Quantity::kPrecondTanh, std::exp(map.slope * std::tanh(y) + map.shift));
      for (int64_t i = 0; i < count && !precond.y.empty(); ++i) {
        const int64_t after = position_ + begin - view.layout.begin(sequence) + i + 1;
        const double used = saturation(view.rule, precond, i, K);
        if (after % every_ == 0 && std::isfinite(used)) own.saturation.add(after / every_ - 1, used);
      }
    }
    for (int64_t member = 0; member < group; ++member) {
      const int64_t hv = h * group + member;
      HeadAnalysis& head = layer.value_heads[static_cast<size_t>(hv)];
      HeadReplay& replay = replays[static_cast<size_t>(member)];
      Sink sink(layer, h, hv);
      load_streams(view, begin, count, hv, view.rule.uses_precond() ? &precond : nullptr, x);
      add_gates(view.rule, x, member == 0, sink);
      if (member == 0) own.keys.add(count, x.k.data());
      for (int64_t i = 0; i < count; ++i) {
        replay.step(x, i);
        add_reads(x, i, replay.reads(), sink);
        std::copy_n(replay.reads().key_read.begin(), V, key_reads.begin() + i * V);
        std::copy_n(replay.reads().o.begin(), V, query_reads.begin() + i * V);
        std::copy_n(replay.reads().prior_key.begin(), V, prior_key.begin() + i * V);
        std::copy_n(replay.reads().prior_query.begin(), V, prior_query.begin() + i * V);
        if (predicts) predictions[static_cast<size_t>(member)].step(x, i, replay.reads(), sink);
        const T* observed = view.o.row(begin + i) + hv * V;
        for (int64_t j = 0; j < V; ++j) {
          const double o = static_cast<double>(observed[j]), difference = replay.reads().o[static_cast<size_t>(j)] - o;
          head.replay_difference += difference * difference;
          head.replay_reference += o * o;
        }
        const int64_t after = position_ + begin - view.layout.begin(sequence) + i + 1;
        if (after % every_ == 0) add_state(replay, K, V, after / every_ - 1, head, sink);
      }
      head.key_reads.add(count, key_reads.data());
      head.query_reads.add(count, query_reads.data());
      head.prior_key_reads.add(count, prior_key.data());
      head.prior_query_reads.add(count, prior_query.data());
    }
  }
}

template <class T>
std::vector<LayerAnalysis> Analyzer<T>::take() {
  for (LayerAnalysis& layer : layers_) {
    parallel_for(layer.v_heads, [&](int64_t h) {
      HeadAnalysis& head = layer.value_heads[static_cast<size_t>(h)];
      head.overlap = subspace_overlap(head.key_reads, head.query_reads);
      head.energy = shared_energy(head.prior_key_reads, head.prior_query_reads);
    });
    parallel_for(layer.heads, [&](int64_t h) {
      KeyHeadAnalysis& head = layer.key_heads[static_cast<size_t>(h)];
      head.gram = gram_spectrum(head.keys);
    });
  }
  return std::move(layers_);
}

template class Analyzer<float>;
template class Analyzer<double>;

}  // namespace fw
