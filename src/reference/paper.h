// The named rules as their papers print them: one function per preset, from the paper's own formula, in its own letters
// and with its own state orientation. The general reference must agree with each (tests/reference), so that a slip in
// turning a paper into axes cannot stay hidden. A preset of presets.def without a function here fails a test.
#pragma once

#include <string_view>

#include "reference/reference.h"

namespace fw {

struct PaperMatrix {
  int64_t rows = 0, cols = 0;
  std::vector<double> a;  // row-major

  PaperMatrix(int64_t r, int64_t c) : rows(r), cols(c), a(static_cast<size_t>(r * c), 0.0) {}
  double& operator()(int64_t i, int64_t j) { return a[i * cols + j]; }
  double operator()(int64_t i, int64_t j) const { return a[i * cols + j]; }
};

// What one token of one value head brings, raw; a vector or number that the rule does not have is empty or 0.
struct PaperToken {
  std::vector<double> q, k;           // [K]
  std::vector<double> v;              // [V]
  double alpha;                       // exp(g), scalar decay
  std::vector<double> alpha_channel;  // [K]
  double beta, lambda;
  double beta_erase, d;   // Comba: the gain of the erase, the correction of the read
  std::vector<double> p;  // [K], erase key of its own
  std::vector<double> f;  // [K], what its erase takes away along
  std::vector<double> b;  // [K], erase gate
  std::vector<double> w;  // [V], write gate
  double precond_alpha, precond_beta, precond_center;
  int64_t head;  // value head, from 0
  double scale;  // of the read
};

struct PaperState {
  PaperMatrix S;          // [V, K] or [K, V], as the paper writes it
  std::vector<double> A;  // [K], preconditioner
};

struct PaperRule {
  std::string_view name;                                         // as in presets.def or ablations.def
  bool value_by_key;                                             // S is [V, K] in this paper
  std::vector<double> (*token)(PaperState&, const PaperToken&);  // updates the state, returns o [V]
};

std::span<const PaperRule> paper_rules();
// nullptr for a name that has none.
const PaperRule* find_paper_rule(std::string_view name);

// The same contract as reference_forward. rule: the preset of that name, whose axes say which inputs there are.
ReferenceOutputs paper_forward(const PaperRule& paper, const Rule& rule, const ReferenceShape& shape,
                               const ReferenceInputs& in);

}  // namespace fw
