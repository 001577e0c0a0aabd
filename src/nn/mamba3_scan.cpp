#include "nn/mamba3_scan.h"

#include "nn/activations.h"

namespace fw {

template <class T>
Rule Mamba3Scan<T>::rule() {
  return parse_rule("mamba2 write=scalar");
}

template <class T>
RecurrenceShape Mamba3Scan<T>::recurrence(fw_form form) const {
  return {rule(), shape_.heads, shape_.heads, shape_.state, shape_.head_dim, form, 1.0, shape_.rank};
}

template <class T>
void Mamba3Scan<T>::forward(const Exec<T>& exec, Recurrences<T>& recurrences, const PassLayout& layout, fw_form form,
                            const Mamba3Inputs<T>& in, const Mamba3Parameters<const Wide<T>>& parameters,
                            const Mamba3State<T>& state, bool keep, Context& c, Mat<T> o) const {
  using W = Wide<T>;
  Arena& arena = exec.arena;
  const int64_t tokens = in.dt.rows, H = shape_.heads, R = shape_.rank, sequences = layout.host.count();
  const int64_t keys = H * shape_.state, values = H * shape_.head_dim;
  c.now = new_matrix<W>(arena, tokens, H);
  c.ahead = new_matrix<W>(arena, tokens, H);
  c.first = new_matrix<W>(arena, sequences, H);
  c.rows.write_gate = new_matrix<T>(arena, tokens * R, H);
  c.rows.g = new_matrix<W>(arena, tokens * R, H);
  exec.mamba3_weights_forward(shape_, in.dt, in.trap, in.g, layout, c.now, c.ahead, c.rows.write_gate, c.rows.g,
                              c.first);
  c.checkpoints = keep ? arena.alloc<W>(rotary_checkpoints(tokens, sequences) * 2 * H * shape_.angles) : nullptr;
  c.qk_self = new_matrix<W>(arena, tokens, H * R * R);
  c.rows.q = new_matrix<T>(arena, tokens * R, keys);
  c.rows.k = new_matrix<T>(arena, tokens * R, keys);
  exec.mamba3_rotary_forward(shape_, in.q, in.k, parameters.q_bias, parameters.k_bias, in.angle, in.dt, layout,
                             state.angle, c.checkpoints, c.rows.q, c.rows.k, c.qk_self);
  c.rows.v = in.v;

  c.rows.s = keep ? new_copy<T, W>(exec, state.s, sequences * keys * shape_.head_dim) : state.s;
  if (state.s != nullptr) {
    c.k_last = keep ? new_copy<T, T>(exec, state.k, sequences * R * keys) : nullptr;
    c.v_last = keep ? new_copy<T, T>(exec, state.v, sequences * R * values) : nullptr;
    exec.mamba3_carry_forward(shape_, c.first, c.rows.k, c.rows.v, layout, state.k, state.v, c.rows.s);
  }
  const Recurrence<T>& recurrence_of_rows = recurrences.of(recurrence(form), layout.host);
  if (keep && recurrence_of_rows.saved_bytes() > 0)
    c.saved = arena.alloc<std::byte>(static_cast<int64_t>(recurrence_of_rows.saved_bytes()));
  recurrence_of_rows.forward(c.rows, o, state.s, nullptr, c.saved, arena);
  exec.mamba3_diag_forward(shape_, c.qk_self, c.rows.v, c.now, c.ahead, parameters.skip, o);
}

template <class T>
void Mamba3Scan<T>::backward(const Exec<T>& exec, Recurrences<T>& recurrences, const PassLayout& layout, fw_form form,
                             const Mamba3Inputs<T>& in, const Mamba3Parameters<const Wide<T>>& parameters,
                             const Context& c, Mat<const T> d_o, Wide<T>* ds_out, const Mamba3Inputs<T>& d,
                             const Mamba3Parameters<Wide<T>>& d_parameters, const Mamba3StateGrads<T>& d_state) const {
  using W = Wide<T>;
  Arena& arena = exec.arena;
  const int64_t tokens = in.dt.rows, H = shape_.heads, R = shape_.rank, sequences = layout.host.count(),
                keys = H * shape_.state;
  RecurrenceInputs<T> rows;
  rows.q = new_matrix<T>(arena, tokens * R, keys);
  rows.k = new_matrix<T>(arena, tokens * R, keys);
  rows.v = d.v;
  rows.write_gate = new_matrix<T>(arena, tokens * R, H);
  rows.g = new_matrix<W>(arena, tokens * R, H);
  // The weight of what is carried in is a gradient of the state's, whoever else asks for that.
  rows.s = d_state.s != nullptr || c.rows.s == nullptr ? d_state.s : arena.alloc<W>(sequences * keys * shape_.head_dim);
  recurrences.of(recurrence(form), layout.host).backward(c.rows, d_o, ds_out, rows, c.saved, arena);
  const Mat<W> dnow = new_matrix<W>(arena, tokens, H), dahead = new_matrix<W>(arena, tokens, H),
               dqk_self = new_matrix<W>(arena, tokens, H * R * R);
  exec.mamba3_diag_backward(shape_, d_o, c.qk_self, c.rows.v, c.now, c.ahead, parameters.skip, rows.v, dqk_self, dnow,
                            dahead, d_parameters.skip);
  Mat<W> dfirst;
  if (c.rows.s != nullptr) {
    dfirst = new_matrix<W>(arena, sequences, H);
    exec.mamba3_carry_backward(shape_, rows.s, c.first, c.k_last, c.v_last, dfirst, d_state.k, d_state.v);
  }
  exec.mamba3_rotary_backward(shape_, rows.q, rows.k, dqk_self, in.q, in.k, parameters.q_bias, parameters.k_bias,
                              in.angle, in.dt, c.checkpoints, layout, d.q, d.k, d.angle, d.dt, d_parameters.q_bias,
                              d_parameters.k_bias, d_state.angle);
  exec.mamba3_weights_backward(shape_, dnow, dahead, rows.write_gate, rows.g, dfirst, in.dt, in.trap, layout, d.dt,
                               d.trap, d.g);
}

template class Mamba3Scan<float>;
template class Mamba3Scan<double>;
template class Mamba3Scan<Bf16>;

}  // namespace fw
