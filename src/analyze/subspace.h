// What vectors over time span: their second moments, principal components, and how far two such spans agree. And the
// effective rank of a matrix.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace fw {

// exp of the entropy of the normalised singular values of a matrix [m, n]: p_i = sigma_i / sum sigma, rank = exp(-sum
// p_i log p_i). 1 for a rank-one matrix, min(m, n) when all are equal; NaN for a zero matrix.
double effective_rank(int64_t m, int64_t n, std::span<const double> a);

// Mean and covariance of vectors [V] that come block by block.
class Moments {
 public:
  explicit Moments(int64_t dim)
      : dim_(dim), sum_(static_cast<size_t>(dim)), products_(static_cast<size_t>(dim * dim)) {}
  void add(int64_t count, const double* rows);  // [count, V], rows one after the other
  int64_t dim() const { return dim_; }
  int64_t count() const { return count_; }
  std::vector<double> covariance() const;  // [V, V] about the mean; zeros for no vectors
  std::vector<double> gram() const;        // [V, V], the sum of the outer products

 private:
  int64_t dim_, count_ = 0;
  std::vector<double> sum_, products_;
};

// Principal components of two covariances: U, W [V, r], the eigenvectors of the r largest eigenvalues.
struct SubspaceOverlap {
  // The smallest numbers of components that hold kExplained of the variance; 0 where there is none.
  int64_t components_a = 0, components_b = 0;
  int64_t components = 0;  // r: the larger of the two; 0 when either is 0
  // |U^T W|_F^2 / r, the mean squared cosine of the principal angles; NaN when r is 0
  double overlap = 0;
  double chance = 0;                             // r / V: what two random subspaces have on average
  std::vector<double> by_rank;                   // overlap with r = 1 ... V
  std::vector<double> explained_a, explained_b;  // share of the variance in the first 1 ... V components
};
inline constexpr double kExplained = 0.9;
// Vectors that are not finite span nothing: r = 0, and the lists are empty.
SubspaceOverlap subspace_overlap(const Moments& a, const Moments& b);

// How much of one kind of vectors lies where another kind varies: W [V, r] the first r principal components of b,
// C_a and C_b the covariances. Empty lists for vectors that are not finite or do not vary.
struct SharedEnergy {
  std::vector<double> own;     // tr(W^T C_b W) / tr(C_b), r = 1 ... V
  std::vector<double> shared;  // tr(W^T C_a W) / tr(C_a)
};
SharedEnergy shared_energy(const Moments& a, const Moments& b);

// A Gram matrix against its diagonal. Shares of the trace, largest first; empty and NaN for vectors that are zero or
// not finite.
struct GramSpectrum {
  std::vector<double> eigenvalues, diagonal;
  double alignment = 0;  // sum_i lambda_i |u_i|_inf / sum_i lambda_i: 1 when the eigenvectors u_i are the axes
};
GramSpectrum gram_spectrum(const Moments& vectors);

}  // namespace fw
