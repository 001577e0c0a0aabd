// Softmax attention as a mixer, full or over a sliding window:
// - projections of q, k, v and of an output gate where a configuration has one (with bias or without),
// - RMSNorm of q and k, of each head or of all together, where a configuration has it,
// - rotary position embedding of q and k,
// - attention with grouped key/value heads,
// - times the sigmoid of the output gate,
// - output projection.
//
// What q, k, v and the gate read is one matrix product. Names are those of flash-linear-attention's Attention layer.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "nn/init.h"
#include "nn/mixer.h"

namespace fw {

struct AttentionSpec {
  int64_t hidden = 0;     // d
  int64_t heads = 0;      // H
  int64_t kv_heads = 0;   // HK, divides H
  int64_t head_dim = 0;   // D
  int64_t window = 0;     // W; 0: all tokens before
  double rope_theta = 0;  // 0: no rotation
  int64_t rotated = 0;    // channels of a head that are rotated, the first; even
  bool qk_norm = false;
  bool qk_norm_all_heads = false;      // RMSNorm of H D (HK D) values in place of D
  bool qk_norm_zero_centered = false;  // times 1 + weight
  double qk_norm_eps = 1e-5;
  bool output_gate = false;
  bool qkv_bias = false;
  InitScheme init = InitScheme::kXavier;

  int64_t query_size() const { return heads * head_dim; }
  int64_t kv_size() const { return kv_heads * head_dim; }
  int64_t gate_begin() const { return query_size() + 2 * kv_size(); }
  int64_t columns() const { return gate_begin() + (output_gate ? query_size() : 0); }
  int64_t q_norm_size() const { return qk_norm_all_heads ? query_size() : head_dim; }
  int64_t k_norm_size() const { return qk_norm_all_heads ? kv_size() : head_dim; }
};

// q_proj, k_proj, v_proj, g_proj (the output gate) .weight (and .bias), q_norm.weight, k_norm.weight, o_proj.weight,
// with `prefix` before the names.
std::vector<ParamSpec> mixer_parameters(const AttentionSpec& spec, const std::string& prefix);
// What it remembers: k (normed and rotated) and v, [HK D] a token: a ring of the last W, or a cache of all.
std::vector<StateTensor> mixer_state(const AttentionSpec& spec);

template <class T>
class AttentionMixer final : public Mixer<T> {
 public:
  AttentionMixer(const AttentionSpec& spec, const std::string& prefix, Params<Wide<T>>& params);
  bool takes_norm() const override { return true; }
  MixerContext* forward(const Pass<T>& pass, Mat<const T> x, LayerState<T> state, Mat<T> y) const override;
  void backward(const Pass<T>& pass, MixerContext* context, Mat<const T> x, Mat<const T> dy, Mat<T> dx) const override;

 private:
  struct Context;
  AttentionShape shape() const;
  void qk_norm_forward(const Pass<T>& pass, Context& c) const;
  void qk_norm_backward(const Pass<T>& pass, const Context& c, Mat<const T> dqk, Mat<T> draw) const;
  Pages<T> before(const Pass<T>& pass, LayerState<T> state, int index) const;

  AttentionSpec spec_;
  int stack_ = -1, bias_ = -1, q_norm_ = -1, k_norm_ = -1, o_proj_ = -1;
};

}  // namespace fw
