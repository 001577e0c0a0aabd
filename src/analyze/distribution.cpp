#include "analyze/distribution.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "base/error.h"

namespace fw {
namespace {

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

int64_t floor_half(int64_t x) { return x >= 0 ? x / 2 : -((1 - x) / 2); }

int64_t floor_divide(int64_t x, int64_t by) { return x >= 0 ? x / by : -((by - 1 - x) / by); }

}  // namespace

void Distribution::add(double x) {
  if (!std::isfinite(x) || (scale_ == Scale::kLog10 && x <= 0)) {
    ++skipped_;
    return;
  }
  min_ = count_ == 0 ? x : std::min(min_, x);
  max_ = count_ == 0 ? x : std::max(max_, x);
  ++count_;
  const double step = x - mean_;
  mean_ += step / static_cast<double>(count_);
  squares_ += step * (x - mean_);
  add_to_bin(scale_ == Scale::kLog10 ? std::log10(x) : x);
}

void Distribution::add(const Distribution& other) {
  if (other.scale_ != scale_) fail_internal("distribution: expected one of the same scale to be added");
  skipped_ += other.skipped_;
  if (other.count_ == 0) return;
  if (count_ == 0) {
    const int64_t skipped = skipped_;
    *this = other;
    skipped_ = skipped;
    return;
  }
  const double here = static_cast<double>(count_), there = static_cast<double>(other.count_),
               step = other.mean_ - mean_;
  mean_ += step * there / (here + there);
  squares_ += other.squares_ + step * step * here * there / (here + there);
  count_ += other.count_;
  min_ = std::min(min_, other.min_);
  max_ = std::max(max_, other.max_);
  Distribution second = other;
  while (width_ < second.width_) coarsen();
  while (second.width_ < width_ || std::max(highest_, second.highest_) - std::min(lowest_, second.lowest_) >= kBins) {
    if (second.width_ >= width_) coarsen();
    second.coarsen();
  }
  const int64_t low = std::min(lowest_, second.lowest_), high = std::max(highest_, second.highest_);
  const int64_t base = low - (kBins - (high - low + 1)) / 2;
  std::vector<int64_t> both(kBins, 0);
  for (const Distribution* one : {static_cast<const Distribution*>(this), static_cast<const Distribution*>(&second)}) {
    for (int64_t i = one->lowest_; i <= one->highest_; ++i)
      both[static_cast<size_t>(i - base)] += one->counts_[static_cast<size_t>(i - one->base_)];
  }
  counts_.swap(both);
  base_ = base;
  lowest_ = low;
  highest_ = high;
}

void Distribution::add_to_bin(double at) {
  if (width_ == 0) {
    // A millionth of the first value: what differs by less is the same for a picture.
    width_ = std::ldexp(1.0, std::max(std::ilogb(std::max(std::abs(at), 1e-30)), -100) - 20);
    counts_.assign(kBins, 0);
    base_ = lowest_ = highest_ = static_cast<int64_t>(std::floor(at / width_));
  }
  constexpr double kLargestIndex = 1e15;
  while (std::abs(at) / width_ > kLargestIndex) coarsen();
  int64_t bin = static_cast<int64_t>(std::floor(at / width_));
  while (std::max(highest_, bin) - std::min(lowest_, bin) >= kBins) {
    coarsen();
    bin = static_cast<int64_t>(std::floor(at / width_));
  }
  const int64_t low = std::min(lowest_, bin), high = std::max(highest_, bin);
  if (bin < base_ || bin >= base_ + kBins) {
    // Room on both sides, so that a slowly growing range does not move the counts each time.
    std::vector<int64_t> moved(kBins, 0);
    const int64_t base = low - (kBins - (high - low + 1)) / 2;
    for (int64_t i = lowest_; i <= highest_; ++i)
      moved[static_cast<size_t>(i - base)] = counts_[static_cast<size_t>(i - base_)];
    counts_.swap(moved);
    base_ = base;
  }
  lowest_ = low;
  highest_ = high;
  ++counts_[static_cast<size_t>(bin - base_)];
}

void Distribution::coarsen() {
  const int64_t base = floor_half(base_);
  std::vector<int64_t> merged(kBins, 0);
  for (int64_t i = lowest_; i <= highest_; ++i)
    merged[static_cast<size_t>(floor_half(i) - base)] += counts_[static_cast<size_t>(i - base_)];
  counts_.swap(merged);
  base_ = base;
  lowest_ = floor_half(lowest_);
  highest_ = floor_half(highest_);
  width_ *= 2;
}

double Distribution::value_at(double at) const { return scale_ == Scale::kLog10 ? std::pow(10.0, at) : at; }

double Distribution::mean() const { return count_ > 0 ? mean_ : kNan; }
double Distribution::deviation() const {
  return count_ > 0 ? std::sqrt(std::max(squares_, 0.0) / static_cast<double>(count_)) : kNan;
}
double Distribution::min() const { return count_ > 0 ? min_ : kNan; }
double Distribution::max() const { return count_ > 0 ? max_ : kNan; }

double Distribution::quantile(double p) const {
  if (!(p >= 0 && p <= 1)) fail_internal("quantile: expected 0 <= p <= 1, got {}", p);
  if (count_ == 0) return kNan;
  const double rank = p * static_cast<double>(count_);
  double before = 0;
  for (int64_t i = lowest_; i <= highest_; ++i) {
    const double here = static_cast<double>(counts_[static_cast<size_t>(i - base_)]);
    if (here > 0 && before + here >= rank)
      return std::clamp(value_at((static_cast<double>(i) + (rank - before) / here) * width_), min_, max_);
    before += here;
  }
  return max_;
}

Distribution::Histogram Distribution::histogram(int64_t most, double width) const {
  if (most < 2) fail_internal("histogram: expected at least 2 bins, got {}", most);
  Histogram result;
  if (count_ == 0) return result;
  int64_t group = 1;
  while (static_cast<double>(group) * width_ < width && group < (int64_t{1} << 40)) group *= 2;
  while (floor_divide(highest_, group) - floor_divide(lowest_, group) + 1 > most) group *= 2;
  const int64_t first = floor_divide(lowest_, group), last = floor_divide(highest_, group);
  result.width = static_cast<double>(group) * width_;
  result.counts.assign(static_cast<size_t>(last - first + 1), 0);
  for (int64_t i = lowest_; i <= highest_; ++i)
    result.counts[static_cast<size_t>(floor_divide(i, group) - first)] += counts_[static_cast<size_t>(i - base_)];
  for (int64_t i = first; i <= last + 1; ++i) result.edges.push_back(value_at(static_cast<double>(i * group) * width_));
  return result;
}

}  // namespace fw
