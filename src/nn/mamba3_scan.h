// The recurrence of a Mamba-3 layer (Lahoti et al. 2026; docs/rules/mamba3.md), by the rule `mamba2` of the C header
// over R rows a token. With lam = sigmoid(trap), a = exp(g), q~ and k~ the queries and keys with their biases, rotated
// by the angles summed up to their token,
//   S_t = a_t S_{t-1} + (1 - lam_t) dt_t a_t sum_j k~^j_{t-1} v^j_{t-1}^T + lam_t dt_t sum_j k~^j_t v^j_t^T        y^i_t = S_t^T q~^i_t
// The rows write what they write now and ahead at once; what that puts too early into a token's own read is taken off
// again (ops.def: mamba3_diag).
#pragma once

#include "nn/recurrence.h"
#include "ops/exec.h"

namespace fw {

// Views of packed tokens; the gradients have the same type.
template <class T>
struct Mamba3Inputs {
  Mat<T> q, k;      // [T, R G N], before their biases
  Mat<T> v;         // [T R, H P]
  Mat<T> dt, trap;  // [T, H]: the step; before its sigmoid
  Mat<Wide<T>> g;   // [T, H]
  Mat<T> angle;     // [T, NA] of all heads, or [T, H NA]; before its tanh
};
template <class T>
struct Mamba3Parameters {
  T* q_bias = nullptr;  // [H, R, N]
  T* k_bias = nullptr;
  T* skip = nullptr;  // [H], of D v in the output; null: none
};

// What sequences remember, updated in place; all null: they begin from nothing.
template <class T>
struct Mamba3State {
  Wide<T>* s = nullptr;      // [N, H, N, P]
  T* k = nullptr;            // [N, R, H N]: the last token's keys, rotated
  T* v = nullptr;            // [N, R, H P]
  Wide<T>* angle = nullptr;  // [N, 2, H NA]: turns, and what their digits leave
};
// Gradients of the state before the pass; null: not wanted.
template <class T>
struct Mamba3StateGrads {
  Wide<T>* s = nullptr;
  T* k = nullptr;
  T* v = nullptr;
  Wide<T>* angle = nullptr;  // [N, H NA], of radians
};

template <class T>
class Mamba3Scan {
 public:
  explicit Mamba3Scan(const Mamba3Shape& shape) : shape_(shape) {}

  // Of one forward call, for its backward.
  struct Context {
    Wide<T>* checkpoints = nullptr;  // [rotary_checkpoints, 2, H NA], where backward follows
    Mat<Wide<T>> qk_self;            // [T, H R R]
    Mat<Wide<T>> now, ahead;         // [T, H]
    Mat<Wide<T>> first;              // [N, H]
    RecurrenceInputs<T> rows;        // [T R, ...]
    const T* k_last = nullptr;       // the state before the pass, where there is one
    const T* v_last = nullptr;
    void* saved = nullptr;  // of the recurrence
  };

  // o [T R, H P] is overwritten, with D v where there is a skip. What the context holds lies in the arena; keep: also
  // what backward needs of the recurrence.
  void forward(const Exec<T>& exec, Recurrences<T>& recurrences, const PassLayout& layout, fw_form form,
               const Mamba3Inputs<T>& in, const Mamba3Parameters<const Wide<T>>& parameters,
               const Mamba3State<T>& state, bool keep, Context& context, Mat<T> o) const;
  // After a forward that kept. d_o of o; ds_out, the gradient of the state S after the pass, or null. Overwrites what d
  // and d_state name, d_parameters accumulate.
  void backward(const Exec<T>& exec, Recurrences<T>& recurrences, const PassLayout& layout, fw_form form,
                const Mamba3Inputs<T>& in, const Mamba3Parameters<const Wide<T>>& parameters, const Context& context,
                Mat<const T> d_o, Wide<T>* ds_out, const Mamba3Inputs<T>& d,
                const Mamba3Parameters<Wide<T>>& d_parameters, const Mamba3StateGrads<T>& d_state) const;

  static Rule rule();
  RecurrenceShape recurrence(fw_form form) const;

 private:
  Mamba3Shape shape_;
};

}  // namespace fw
