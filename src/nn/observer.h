// An observer of a pass: sees what every recurrent mixer, and every layer of RWKV-7, gave its recurrence and what came
// out, and changes nothing. A pass without one (the usual one) does no work for it.
#pragma once

#include <cstdint>

#include "base/mat.h"
#include "base/seq_layout.h"
#include "nn/recurrence.h"
#include "rule/rule.h"

namespace fw {

// One layer's recurrence in one pass. All views are valid during the call only.
template <class T>
struct RecurrenceView {
  const Rule& rule;
  const SeqLayout& layout;
  int64_t heads, v_heads, key_dim, value_dim;  // H, HV, K, V
  // q, k, v after convolution, gates after their activation, s and a before the pass
  const RecurrenceInputs<T>& in;
  Mat<const T> o;        // [T, HV V]: the recurrence's output, before the norm
  double scale = 0;      // of the read vector; 0: K^-1/2
  bool v_first = false;  // s is [N, HV, V, K], not [N, HV, K, V]
};

template <class T>
class PassObserver {
 public:
  virtual ~PassObserver() = default;
  // The layer that runs next. A layer without a recurrence has no call of `recurrence`.
  virtual void begin_layer(int64_t layer) = 0;
  virtual void recurrence(const RecurrenceView<T>& view) = 0;
};

}  // namespace fw
