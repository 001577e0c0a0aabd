// Distribution: a stream of numbers as count, mean, standard deviation, extremes, quantiles and histogram, in one pass
// and constant memory. The histogram adapts: its bins are multiples of a power of two. They double in width whenever
// the values would need more than kBins of them. So bins are merged whole and every value stays counted once.
#pragma once

#include <cstdint>
#include <vector>

namespace fw {

class Distribution {
 public:
  enum class Scale { kLinear, kLog10 };  // of the histogram's bins; mean and deviation are of the values themselves
  static constexpr int64_t kBins = 1024;

  explicit Distribution(Scale scale = Scale::kLinear) : scale_(scale) {}

  // Values that are not finite, and on a logarithmic scale those that are not positive, are skipped and counted as
  // such.
  void add(double x);
  // All values of another one of the same scale: counts, extremes and the histogram as if they had been added here,
  // moments up to rounding. Bins that differ in width become as wide as the wider ones, or wider where both together
  // need more than kBins.
  void add(const Distribution& other);

  Scale scale() const { return scale_; }
  int64_t count() const { return count_; }  // without the skipped
  int64_t skipped() const { return skipped_; }
  // NaN while count() is 0.
  double mean() const;
  double deviation() const;  // population: divided by count()
  double min() const;
  double max() const;
  // p in [0, 1]; exact up to the width of one of the kBins bins.
  double quantile(double p) const;

  // Neighbouring bins merged until at most `most` (>= 2) are left and each is at least `width` wide (on the scale of
  // the bins); edges has one more than counts, in units of the values.
  struct Histogram {
    std::vector<double> edges;
    std::vector<int64_t> counts;
    double width = 0;  // of a bin, a power of two: on the scale of the bins
  };
  Histogram histogram(int64_t most, double width = 0) const;

 private:
  void add_to_bin(double at);
  void coarsen();
  double value_at(double at) const;  // from the scale of the bins back

  Scale scale_;
  int64_t count_ = 0, skipped_ = 0;
  double mean_ = 0, squares_ = 0, min_ = 0, max_ = 0;
  double width_ = 0;  // of a bin, a power of two; 0: no value yet
  // counts_[i] belongs to bin base_ + i, that is [(base_ + i) width, (base_ + i + 1) width)
  int64_t base_ = 0;
  int64_t lowest_ = 0, highest_ = 0;  // bins with counts
  std::vector<int64_t> counts_;
};

}  // namespace fw
