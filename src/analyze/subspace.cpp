#include "analyze/subspace.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>

#include "base/error.h"
#include "base/gemm.h"
#include "base/lapack.h"

namespace fw {

double effective_rank(int64_t m, int64_t n, std::span<const double> a) {
  const std::vector<double> sigma = singular_values(m, n, a);
  double sum = 0, entropy = 0;
  for (const double s : sigma) sum += s;
  if (!(sum > 0)) return std::numeric_limits<double>::quiet_NaN();
  for (const double s : sigma) {
    if (s > 0) entropy -= s / sum * std::log(s / sum);
  }
  return std::exp(entropy);
}

void Moments::add(int64_t count, const double* rows) {
  for (int64_t i = 0; i < count; ++i) {
    for (int64_t j = 0; j < dim_; ++j) sum_[static_cast<size_t>(j)] += rows[i * dim_ + j];
  }
  gemm(Trans::kYes, Trans::kNo, dim_, dim_, count, 1.0, rows, dim_, rows, dim_, 1.0, products_.data(), dim_);
  count_ += count;
}

std::vector<double> Moments::covariance() const {
  std::vector<double> c(products_.size(), 0.0);
  if (count_ == 0) return c;
  const double n = static_cast<double>(count_);
  for (int64_t i = 0; i < dim_; ++i) {
    for (int64_t j = 0; j < dim_; ++j) {
      const size_t at = static_cast<size_t>(i * dim_ + j);
      c[at] = products_[at] / n - sum_[static_cast<size_t>(i)] / n * (sum_[static_cast<size_t>(j)] / n);
    }
  }
  return c;
}

std::vector<double> Moments::gram() const { return products_; }

namespace {

bool all_finite(const std::vector<double>& x) {
  return std::all_of(x.begin(), x.end(), [](double v) { return std::isfinite(v); });
}

std::vector<double> cumulative_share(const std::vector<double>& values) {
  std::vector<double> share;
  share.reserve(values.size());
  double sum = 0;
  for (const double v : values) share.push_back(sum += std::max(v, 0.0));
  for (double& x : share) x = sum > 0 ? x / sum : 0.0;
  return share;
}

int64_t components(const std::vector<double>& share) {
  if (share.empty() || share.back() <= 0) return 0;
  return std::find_if(share.begin(), share.end(), [](double x) { return x >= kExplained; }) - share.begin() + 1;
}

}  // namespace

SubspaceOverlap subspace_overlap(const Moments& a, const Moments& b) {
  const int64_t V = a.dim();
  if (b.dim() != V) fail_internal("subspace overlap: expected vectors of one length, got {} and {}", V, b.dim());
  SubspaceOverlap result;
  result.overlap = std::numeric_limits<double>::quiet_NaN();
  const std::vector<double> covariance_a = a.covariance(), covariance_b = b.covariance();
  if (!all_finite(covariance_a) || !all_finite(covariance_b)) return result;
  const SymmetricEigen u = symmetric_eigen(V, covariance_a), w = symmetric_eigen(V, covariance_b);
  result.explained_a = cumulative_share(u.values);
  result.explained_b = cumulative_share(w.values);
  result.components_a = components(result.explained_a);
  result.components_b = components(result.explained_b);

  std::vector<double> cosines(static_cast<size_t>(V * V));
  gemm(Trans::kNo, Trans::kYes, V, V, V, 1.0, u.vectors.data(), V, w.vectors.data(), V, 0.0, cosines.data(), V);
  double sum = 0;  // of the squares of the leading r x r block
  for (int64_t r = 1; r <= V; ++r) {
    for (int64_t i = 0; i < r; ++i) {
      const double right = cosines[static_cast<size_t>(i * V + r - 1)],
                   below = cosines[static_cast<size_t>((r - 1) * V + i)];
      sum += right * right + (i < r - 1 ? below * below : 0.0);
    }
    result.by_rank.push_back(sum / static_cast<double>(r));
  }
  if (result.components_a > 0 && result.components_b > 0) {
    result.components = std::max(result.components_a, result.components_b);
    result.overlap = result.by_rank[static_cast<size_t>(result.components - 1)];
  }
  result.chance = V > 0 ? static_cast<double>(result.components) / static_cast<double>(V) : 0.0;
  return result;
}

SharedEnergy shared_energy(const Moments& a, const Moments& b) {
  const int64_t V = a.dim();
  if (b.dim() != V) fail_internal("shared energy: expected vectors of one length, got {} and {}", V, b.dim());
  SharedEnergy result;
  const std::vector<double> covariance = a.covariance(), other = b.covariance();
  if (!all_finite(covariance) || !all_finite(other)) return result;
  double all = 0;
  for (int64_t i = 0; i < V; ++i) all += covariance[static_cast<size_t>(i * V + i)];
  const SymmetricEigen w = symmetric_eigen(V, other);
  result.own = cumulative_share(w.values);
  if (!(all > 0) || result.own.empty() || result.own.back() <= 0) return {};
  std::vector<double> turned(static_cast<size_t>(V * V));  // a row of w.vectors is an eigenvector
  gemm(Trans::kNo, Trans::kNo, V, V, V, 1.0, w.vectors.data(), V, covariance.data(), V, 0.0, turned.data(), V);
  double sum = 0;
  for (int64_t r = 0; r < V; ++r) {
    for (int64_t j = 0; j < V; ++j)
      sum += turned[static_cast<size_t>(r * V + j)] * w.vectors[static_cast<size_t>(r * V + j)];
    result.shared.push_back(sum / all);
  }
  return result;
}

GramSpectrum gram_spectrum(const Moments& vectors) {
  const int64_t K = vectors.dim();
  GramSpectrum result;
  result.alignment = std::numeric_limits<double>::quiet_NaN();
  const std::vector<double> gram = vectors.gram();
  if (!all_finite(gram)) return result;
  double trace = 0;
  for (int64_t i = 0; i < K; ++i) trace += gram[static_cast<size_t>(i * K + i)];
  if (!(trace > 0)) return result;
  const SymmetricEigen u = symmetric_eigen(K, gram);
  double weighted = 0;
  for (int64_t i = 0; i < K; ++i) {
    const double share = std::max(u.values[static_cast<size_t>(i)], 0.0) / trace;  // rounding may leave less than 0
    double largest = 0;
    for (int64_t j = 0; j < K; ++j) largest = std::max(largest, std::abs(u.vectors[static_cast<size_t>(i * K + j)]));
    weighted += share * largest;
    result.eigenvalues.push_back(share);
    result.diagonal.push_back(gram[static_cast<size_t>(i * K + i)] / trace);
  }
  std::sort(result.diagonal.begin(), result.diagonal.end(), std::greater<>());
  result.alignment = weighted;
  return result;
}

}  // namespace fw
