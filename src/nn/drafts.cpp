#include "nn/drafts.h"

#include "nn/activations.h"

namespace fw {

template <class T>
T* step_tails(const Pass<T>& pass, Mat<const T> x, LayerState<T> state, int index) {
  T* data = state.data(index);
  if (data == nullptr || !state.has_drafts(index)) return data;
  const StateView& view = state.view(index);
  const int64_t sequences = x.rows / view.draft_tokens, rows = x.rows * view.per_sequence;
  const Mat<T> all(data, sequences * view.rows, view.width);
  pass.exec.scatter_rows(x, view.put, all);
  const Mat<T> tails(pass.exec.arena.template alloc<T>(rows * view.width), rows, view.width);
  pass.exec.gather_rows(Mat<const T>(all), view.get, tails);
  return tails.data;
}

// The keys and values of all tokens lie in the pages before one is read. The copy stands between the two operations,
// which attention_step asks for. It writes the same rows once more.
template <class T>
void attend_step(const Pass<T>& pass, Mat<T> q, Mat<T> k, Mat<const T> v, AttentionShape shape, Pages<T> past_k,
                 Pages<T> past_v, bool drafts, Mat<T> o) {
  const Exec<T>& exec = pass.exec;
  if (!drafts) return exec.attention_step(q, k, v, shape, pass.layout, past_k, past_v, o);
  const Mat<T> queries = new_matrix<T>(exec.arena, q.rows, q.cols);
  const auto turn = [&](Mat<T> x) {
    if (shape.turns()) exec.rotary(x, shape.dim, shape.rotated, shape.theta, pass.layout, Rotation::kForward);
  };
  turn(k);
  exec.store_rows(Mat<const T>(k), pass.layout, past_k);
  if (past_v.table != past_k.table) exec.store_rows(v, pass.layout, past_v);
  exec.copy_rows(Mat<const T>(q), queries);
  turn(queries);
  shape.theta = 0;
  exec.attention_step(queries, k, v, shape, pass.layout, past_k, past_v, o);
}

#define FW_INSTANTIATE(T)                                                                                           \
  template T* step_tails(const Pass<T>&, Mat<const T>, LayerState<T>, int);                                         \
  template void attend_step(const Pass<T>&, Mat<T>, Mat<T>, Mat<const T>, AttentionShape, Pages<T>, Pages<T>, bool, \
                            Mat<T>);
FW_INSTANTIATE(float)
FW_INSTANTIATE(double)
FW_INSTANTIATE(Bf16)
#undef FW_INSTANTIATE

}  // namespace fw
