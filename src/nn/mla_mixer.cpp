#include "nn/mla_mixer.h"

#include <cmath>
#include <new>

#include "nn/activations.h"
#include "nn/drafts.h"
#include "nn/norm.h"

namespace fw {
namespace {

constexpr double kLatentEps = 1e-6;  // of kv_a_layernorm: the published layer has it whatever the model's is

}  // namespace

template <class T>
struct MlaMixer<T>::Context : MixerContext {
  Mat<T> proj;              // [T, H (K + S) + R + S]: q | c before its norm, s
  Wide<T>* rstd = nullptr;  // [T], of c
  Mat<T> key;               // [T, R + S]: c, s
  Mat<T> query;             // [T, H (R + S)]
  Pages<T> past;
  Mat<T> sums;       // [T, H (R + S)]: of the keys, as values
  Mat<Wide<T>> lse;  // [T, H]
  Mat<T> o;          // [T, H V]
};

template <class T>
MlaMixer<T>::MlaMixer(const MlaSpec& spec, const std::string& prefix, Params<Wide<T>>& params) : spec_(spec) {
  std::vector<ParamSpec> list = mixer_parameters(spec, prefix);
  stack_ = params.declare(std::move(list[0]));
  params.declare(std::move(list[1]));
  norm_ = params.declare(std::move(list[2]));
  up_ = params.declare(std::move(list[3]));
  o_proj_ = params.declare(std::move(list[4]));
}

template <class T>
AttentionShape MlaMixer<T>::shape() const {
  AttentionShape shape;
  shape.heads = spec_.heads;
  shape.kv_heads = 1;
  shape.dim = spec_.latent();
  shape.scale = 1.0 / std::sqrt(static_cast<double>(spec_.key_dim + spec_.shared_dim));
  return shape;
}

template <class T>
int64_t MlaMixer<T>::up_row(int64_t head, bool of_value) const {
  return head * (spec_.key_dim + spec_.value_dim) + (of_value ? spec_.key_dim : 0);
}

template <class T>
Weight<Wide<T>> MlaMixer<T>::up(const Pass<T>& pass, int64_t head, bool of_value, LowRank<Wide<T>>& addition) const {
  const Weight<Wide<T>> all = pass.params.weight(up_, spec_.expanded(), spec_.rank);
  const int64_t first = up_row(head, of_value), rows = of_value ? spec_.value_dim : spec_.key_dim;
  const auto part = [&](const auto& of) {
    auto some = of;
    some.rows = rows;
    if (of.data != nullptr) some.data = of.row(first);
    return some;
  };
  Weight<Wide<T>> rows_of_head{part(all.values), part(all.rounded)};
  if (all.low_ranks == 0) return rows_of_head;
  addition = *all.low_rank;
  addition.b = {part(addition.b.values), part(addition.b.rounded)};
  if (addition.db.data != nullptr) addition.db = addition.db.row_range(first, rows);
  rows_of_head.low_rank = &addition;
  rows_of_head.low_ranks = 1;
  return rows_of_head;
}

template <class T>
Mat<Wide<T>> MlaMixer<T>::up_gradient(const Pass<T>& pass, int64_t head, bool of_value) const {
  const Mat<Wide<T>> all = pass.params.grad_matrix(up_, spec_.expanded(), spec_.rank);
  const int64_t rows = of_value ? spec_.value_dim : spec_.key_dim;
  if (all.data == nullptr) return {nullptr, rows, spec_.rank};  // it is not trained
  return all.row_range(up_row(head, of_value), rows);
}

template <class T>
MixerContext* MlaMixer<T>::forward(const Pass<T>& pass, Mat<const T> x, LayerState<T> state, Mat<T> y) const {
  const Params<Wide<T>>& params = pass.params;
  const Exec<T>& exec = pass.exec;
  Arena& arena = exec.arena;
  const int64_t tokens = x.rows, R = spec_.rank, S = spec_.shared_dim, K = spec_.key_dim, V = spec_.value_dim;
  Context* kept = pass.keep ? new (exec.contexts.template alloc<Context>(1)) Context() : nullptr;
  Context local;
  Context& c = kept != nullptr ? *kept : local;
  c.proj = new_matrix<T>(arena, tokens, spec_.columns());
  project(pass, x, params.weight(stack_, spec_.columns(), spec_.hidden), nullptr, c.proj);

  c.key = new_matrix<T>(arena, tokens, R + S);
  c.rstd = arena.alloc<Wide<T>>(tokens);
  const Mat<T> latent = c.proj.col_range(spec_.query_size(), R + S);
  exec.rmsnorm_forward(latent.col_range(0, R), params.value(norm_), static_cast<Wide<T>>(kLatentEps),
                       c.key.col_range(0, R), c.rstd);
  if (S > 0) exec.copy_rows(latent.col_range(R, S), c.key.col_range(R, S));
  LowRank<Wide<T>> addition;
  c.query = new_matrix<T>(arena, tokens, spec_.heads * (R + S));
  for (int64_t h = 0; h < spec_.heads; ++h) {
    const Mat<T> from = c.proj.col_range(h * (K + S), K + S), to = c.query.col_range(h * (R + S), R + S);
    // q' Uk, as linear's gradient computes it.
    const int64_t rows = exec.decode_bits ? 1 : tokens;
    for (int64_t t = 0; t < tokens; t += rows)
      exec.linear_backward(from.row_range(t, rows).col_range(0, K), Mat<const T>(), up(pass, h, false, addition),
                           to.row_range(t, rows).col_range(0, R), Mat<Wide<T>>(), nullptr, Write::kOverwrite);
    if (S > 0) exec.copy_rows(from.col_range(K, S), to.col_range(R, S));
  }

  c.past = state.pages(0);
  c.sums = new_matrix<T>(arena, tokens, spec_.heads * (R + S));
  if (state && !pass.keep && pass.layout.host.single_tokens()) {
    attend_step(pass, c.query, c.key, Mat<const T>(c.key), shape(), c.past, c.past, state.has_drafts(0), c.sums);
  } else {
    c.lse = new_matrix<Wide<T>>(arena, tokens, spec_.heads);
    exec.attention_forward(c.query, c.key, c.key, shape(), pass.layout, c.past, c.past, c.sums, c.lse);
    if (state) exec.store_rows(c.key, pass.layout, state.pages(0));
  }
  c.o = new_matrix<T>(arena, tokens, spec_.value_size());
  for (int64_t h = 0; h < spec_.heads; ++h)
    exec.linear_forward(c.sums.col_range(h * (R + S), R), up(pass, h, true, addition), nullptr, c.o.col_range(h * V, V),
                        Write::kOverwrite);
  if (y.data != nullptr)
    last_product(pass, Mat<const T>(c.o), params.weight(o_proj_, spec_.hidden, spec_.value_size()), y);
  return kept;
}

template <class T>
void MlaMixer<T>::backward(const Pass<T>& pass, MixerContext* context, Mat<const T> x, Mat<const T> dy,
                           Mat<T> dx) const {
  const Context& c = *static_cast<Context*>(context);
  Params<Wide<T>>& params = pass.params;
  const Exec<T>& exec = pass.exec;
  Arena& arena = exec.arena;
  const int64_t tokens = dy.rows, R = spec_.rank, S = spec_.shared_dim, K = spec_.key_dim, V = spec_.value_dim,
                H = spec_.heads;
  const Mat<T> d_o = new_matrix<T>(arena, tokens, spec_.value_size());
  exec.linear_backward(dy, c.o, params.weight(o_proj_, spec_.hidden, spec_.value_size()), d_o,
                       params.grad_matrix(o_proj_, spec_.hidden, spec_.value_size()), nullptr, Write::kOverwrite);
  LowRank<Wide<T>> addition;
  // Of the sums only c's channels are read.
  const Mat<T> dsums = new_matrix<T>(arena, tokens, H * (R + S));
  if (S > 0) exec.device.fill(dsums.data, 0, static_cast<size_t>(dsums.rows * dsums.stride) * sizeof(T));
  for (int64_t h = 0; h < H; ++h)
    exec.linear_backward(d_o.col_range(h * V, V), c.sums.col_range(h * (R + S), R), up(pass, h, true, addition),
                         dsums.col_range(h * (R + S), R), up_gradient(pass, h, true), nullptr, Write::kOverwrite);

  const Mat<T> dquery = new_matrix<T>(arena, tokens, H * (R + S)), dkey = new_matrix<T>(arena, tokens, R + S),
               dvalue = new_matrix<T>(arena, tokens, R + S);
  exec.attention_backward(dsums, c.query, c.key, c.key, shape(), pass.layout, c.past, c.past, c.sums, c.lse, dquery,
                          dkey, dvalue);
  exec.add_rows(dvalue, dkey);

  const Mat<T> dproj = new_matrix<T>(arena, tokens, spec_.columns());
  for (int64_t h = 0; h < H; ++h) {
    const Mat<T> from = dquery.col_range(h * (R + S), R + S), to = dproj.col_range(h * (K + S), K + S);
    exec.linear_forward(from.col_range(0, R), up(pass, h, false, addition), nullptr, to.col_range(0, K),
                        Write::kOverwrite);
    if (S > 0) exec.copy_rows(from.col_range(R, S), to.col_range(K, S));
    // dUk += q'^T d(q' Uk)
    exec.linear_backward(c.proj.col_range(h * (K + S), K), from.col_range(0, R), up(pass, h, false, addition), Mat<T>(),
                         up_gradient(pass, h, false), nullptr, Write::kOverwrite);
  }
  const Mat<T> latent = c.proj.col_range(spec_.query_size(), R + S),
               dlatent = dproj.col_range(spec_.query_size(), R + S);
  exec.rmsnorm_backward(dkey.col_range(0, R), latent.col_range(0, R), params.value(norm_), c.rstd,
                        dlatent.col_range(0, R), params.grad(norm_), Write::kOverwrite);
  if (S > 0) exec.copy_rows(dkey.col_range(R, S), dlatent.col_range(R, S));
  exec.linear_backward(dproj, x, params.weight(stack_, spec_.columns(), spec_.hidden), dx,
                       params.grad_matrix(stack_, spec_.columns(), spec_.hidden), nullptr, Write::kOverwrite);
}

template class MlaMixer<float>;
template class MlaMixer<double>;
template class MlaMixer<Bf16>;

}  // namespace fw
