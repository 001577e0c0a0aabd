// Multi-head latent attention (DeepSeek-V2) without positions, as Kimi Linear has it, as a mixer:
//   q_h = [q'_h, q''_h] = x Wq^T of head h       [c, s] = x Wkv^T, c = rmsnorm(c)
//   k_h = [c Uk_h^T, s]    v_h = c Uv_h^T        o_h = softmax(q_h . k_h / sqrt(K + S)) v_h
// Computed on the latent: q_h . k_h = [q'_h Uk_h, q''_h] . [c, s], and the values are summed before Uv_h. So attention
// has one key head [c, s] of R + S channels, which is also the value, and the cache has that row alone.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "nn/init.h"
#include "nn/mixer.h"

namespace fw {

struct MlaSpec {
  int64_t hidden = 0;      // d
  int64_t heads = 0;       // H
  int64_t rank = 0;        // R
  int64_t key_dim = 0;     // K
  int64_t shared_dim = 0;  // S
  int64_t value_dim = 0;   // V
  InitScheme init = InitScheme::kXavier;

  int64_t query_size() const { return heads * (key_dim + shared_dim); }
  int64_t latent() const { return rank + shared_dim; }
  int64_t columns() const { return query_size() + latent(); }
  int64_t value_size() const { return heads * value_dim; }
  int64_t expanded() const { return heads * (key_dim + value_dim); }
};

// q_proj [H (K + S), d], kv_a_proj_with_mqa [R + S, d], kv_a_layernorm [R], kv_b_proj [H (K + V), R] (of each head Uk,
// then Uv), o_proj [d, H V], all .weight with `prefix` before the names.
std::vector<ParamSpec> mixer_parameters(const MlaSpec& spec, const std::string& prefix);
// What it remembers: [c, s] of all tokens.
std::vector<StateTensor> mixer_state(const MlaSpec& spec);

template <class T>
class MlaMixer final : public Mixer<T> {
 public:
  MlaMixer(const MlaSpec& spec, const std::string& prefix, Params<Wide<T>>& params);
  bool takes_norm() const override { return true; }
  MixerContext* forward(const Pass<T>& pass, Mat<const T> x, LayerState<T> state, Mat<T> y) const override;
  void backward(const Pass<T>& pass, MixerContext* context, Mat<const T> x, Mat<const T> dy, Mat<T> dx) const override;

 private:
  struct Context;
  AttentionShape shape() const;
  // Rows of kv_b_proj: Uk_h [K, R], Uv_h [V, R]. addition: the same rows of its adapter, which the weight refers to.
  Weight<Wide<T>> up(const Pass<T>& pass, int64_t head, bool of_value, LowRank<Wide<T>>& addition) const;
  Mat<Wide<T>> up_gradient(const Pass<T>& pass, int64_t head, bool of_value) const;
  int64_t up_row(int64_t head, bool of_value) const;

  MlaSpec spec_;
  int stack_ = -1, norm_ = -1, up_ = -1, o_proj_ = -1;
};

}  // namespace fw
