// The streams of one value head in double, from what an observer sees. The coefficients are rule/front.h's and M is
// rule/precond.h's, so that a rule's formulas are written once. The factor rho that front.h moves between e, z and w
// (gain_pair) is taken out again, so that e, w and z are those of recurrence.md:
//     e = b (.) (p + lambda q)      f = b (.) lambda q, the feedback's part of e      z = c (.) v      w = M_w (.) k
//     r = scale M_r (.) (q - d k)      with p = k unless the erase key is one of its own
//
// A new coefficient of front.h, or a new input of a rule, is a line in load_streams; tests/analyze/replay_test.cpp
// fails for a preset that needs one and has none.
#pragma once

#include <cstdint>
#include <vector>

#include "nn/observer.h"

namespace fw {

// Rows [count, K] and [count, V], one after the other; a vector is empty where the rule has no such thing.
struct HeadStreams {
  int64_t count = 0, K = 0, V = 0;
  std::vector<double> k, q;                    // [K] after their normalisation
  std::vector<double> r, w, e, f;              // [K]; e and f for rules with an erase, f with feedback
  std::vector<double> taken;                   // [K], what is erased goes along it (recurrence.md's f); empty: along w
  std::vector<double> z, v;                    // [V]
  std::vector<double> decay;                   // [K], exp(g) of every channel; empty without decay
  std::vector<double> beta, gain, lambda;      // one a token: the raw gate, the gain s, the feedback
  std::vector<double> erase_gate, write_gate;  // [K], [V], as given; of scalar gates one a token
  bool scalar_decay = false;                   // all channels have the same
  bool erases_before_decay = false;

  int64_t erase_gate_dim() const { return static_cast<int64_t>(erase_gate.size()) / count; }
  int64_t write_gate_dim() const { return static_cast<int64_t>(write_gate.size()) / count; }
};

// The preconditioner of one key head, token after token.
struct PrecondStreams {
  std::vector<double> y, m;         // [count, K]: before and after squashing; y is empty where nothing is squashed
  std::vector<double> decay, gain;  // one a token: exp(gP), betaP
};

// Tokens [begin, begin + count) of key head h. `state` [K] goes on from A before to A after them.
template <class T>
void load_precond(const RecurrenceView<T>& view, int64_t begin, int64_t count, int64_t h, std::vector<double>& state,
                  PrecondStreams& out);

// Tokens [begin, begin + count) of value head hv. precond: of its key head, null without.
template <class T>
void load_streams(const RecurrenceView<T>& view, int64_t begin, int64_t count, int64_t hv,
                  const PrecondStreams* precond, HeadStreams& out);

}  // namespace fw
