// The delta-rule mixer of recurrence.md section 7:
// - projections,
// - causal convolution + SiLU on q, k, v,
// - feature maps and rotation of q and k where a configuration has them (query_key.h),
// - the rule's gates,
// - the recurrence (through the C header),
// - RMSNorm per head with an output gate,
// - output projection.
//
// Which projections there are follows from the rule; all that read x are one matrix product.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "nn/gain.h"
#include "nn/init.h"
#include "nn/mixer.h"
#include "nn/query_key.h"
#include "nn/recurrence.h"
#include "rule/rule.h"

namespace fw {

struct RecurrentMixerSpec {
  Rule rule;
  int64_t hidden = 0;     // d
  int64_t heads = 0;      // H
  int64_t v_heads = 0;    // HV, a multiple of H
  int64_t key_dim = 0;    // K
  int64_t value_dim = 0;  // V
  int64_t conv_size = 0;  // W; 0: none
  GateKind gate = GateKind::kSilu;
  int64_t gate_rank = 0;   // 0: full
  bool gate_bias = true;   // of a low rank
  int64_t decay_rank = 0;  // 0: full; channel decay only
  bool decay_per_value_head = false;
  bool log_sigmoid_decay = false;  // channel decay: log sigmoid(x + bias) / 16 instead of -exp(a) softplus(x + delta)
  // channel decay exp g = b + (1 - b) sigmoid(x), b of this layer (kDecayBounds); -1: another decay
  int64_t bounded_layer = -1;
  bool raw_read_correction = false;  // q - D p instead of q, before the norms; p is the erase key of its own, or k
  QueryKeySpec query_key;
  GainSpec gain;
  // the preconditioner's gates are the main ones, averaged over the value heads of a key head
  bool tied_precond = false;
  bool exp_precond_center = false;  // the preconditioner's center is exp(log_atk_scale) instead of log_atk_scale
  bool width_norm = false;          // RMSNorm of the output over all heads together instead of head by head
  double norm_eps = 1e-5;           // of that norm
  InitScheme init = InitScheme::kXavier;

  bool projects_gain() const { return rule.uses_beta() && !gain.learned; }
  bool projects_decay() const { return rule.uses_g() && !gain.single_gate; }
  bool projects_precond() const { return rule.uses_precond() && !tied_precond; }
  int64_t key_size() const { return heads * key_dim; }
  int64_t value_size() const { return v_heads * value_dim; }
  // columns of q and, where the rule takes one, k come before v
  int64_t value_begin() const { return rule.uses_k() ? 2 * key_size() : key_size(); }
  int64_t conv_channels() const { return value_begin() + value_size(); }
  int64_t norm_size() const { return width_norm ? value_size() : value_dim; }
  int64_t decay_heads() const { return decay_per_value_head ? v_heads : heads; }
  // An erase-write vector of its own is n times a sigmoid of a projection, n the key's RMSNorm with a weight that
  // begins at K^-1/2; an erase key of its own is then n.
  bool makes_erase_write() const { return rule.uses_erase_write(); }
  // A scalar erase gate beside the gain is beta times a learned inner decay per head (Comba); an erase key of its own
  // is the key times it.
  bool derives_erase_gate() const {
    return rule.uses_erase_gate() && rule.erase == Gate::kScalar && rule.uses_beta() && !rule.uses_erase_key();
  }
  bool scales_erase_key() const { return rule.uses_erase_key() && !makes_erase_write(); }
  bool uses_inner_decay() const { return derives_erase_gate() || scales_erase_key(); }
  // Largest value of the gate that multiplies the erase key; the other gates end at 1.
  bool gain_doubles() const {
    return rule.is_delta() && (rule.erase == Gate::kTied || derives_erase_gate()) && rule.uses_beta() &&
           rule.gain_bound > 1.0;
  }
  bool erase_doubles() const { return rule.uses_erase_gate() && !derives_erase_gate() && rule.gain_bound > 1.0; }
};

// The model's parameter that bounds its layers' decays from below, [layers, H K]. The bound b of layer i is the sum of
// the softmax over the layers of rows 1 to i. So the first layer has 0. Declared before the layers.
inline constexpr const char* kDecayBounds = "model.lower_bounds";
ParamSpec decay_bounds_parameter(int64_t layers, int64_t channels);

// One bias-free projection of x: a range of rows of the tall matrix, a range of columns of its product.
struct Projection {
  const char* name;  // "q_proj"
  int64_t begin = 0;
  int64_t size = 0;
  bool used() const { return size > 0; }
};

// The stacked projections, wide ones first so that narrow gates do not break the alignment of the wide.
struct Projections {
  explicit Projections(const RecurrentMixerSpec& spec);
  Projection q, k, v;
  Projection decay;        // f_proj (or its first factor), or a_proj
  Projection erase;        // b_proj, H K wide (scalar: HV)
  Projection erase_write;  // e_proj, H K wide
  Projection write;        // w_proj, HV V wide (scalar: HV)
  Projection gate;         // g_proj, or its first factor
  // The numbers of tokens.def that are projected: beta: b_proj, or beta_proj beside an erase gate; lambda: l_proj.
#define FW_TOKEN_SCALAR(name, neutral, used) Projection name;
#include "rule/tokens.def"
  Projection precond_decay, precond_beta;  // a_atk_proj, b_atk_proj
  int64_t columns = 0;
  std::vector<const Projection*> in_order() const;
};

// The mixer's parameters in order of declaration, names with `prefix` before them. No memory is allocated for values,
// so that a configuration's size can be checked first.
std::vector<ParamSpec> mixer_parameters(const RecurrentMixerSpec& spec, const std::string& prefix);

// Its recurrence, but for form, gates and layout.
RecurrenceShape recurrence_of(const RecurrentMixerSpec& spec);

// What it remembers: s [HV, K, V], K-first; a [H, K], the preconditioner's, where the rule has one; tail [W-1,
// conv_channels()], the convolution's last inputs, q | k | v, oldest first, where W > 1.
std::vector<StateTensor> mixer_state(const RecurrentMixerSpec& spec);

template <class T>
class RecurrentMixer final : public Mixer<T> {
 public:
  // Declares its parameters as prefix + "q_proj.weight" ...
  RecurrentMixer(const RecurrentMixerSpec& spec, const std::string& prefix, Params<Wide<T>>& params);
  bool takes_norm() const override { return true; }
  MixerContext* forward(const Pass<T>& pass, Mat<const T> x, LayerState<T> state, Mat<T> y) const override;
  void backward(const Pass<T>& pass, MixerContext* context, Mat<const T> x, Mat<const T> dy, Mat<T> dx) const override;

 private:
  struct Context;
  // The offset of the decay's logit.
  int decay_offset() const { return spec_.log_sigmoid_decay ? index_.decay_bias : index_.dt_bias; }
  // Whether a number's logit has a bias.
  bool biased(const Projection& p) const { return p.used() && &p == &projections_.lambda; }
  struct Indices {
    int stack = -1, conv = -1, decay_up = -1, decay_bias = -1, gate_up = -1, gate_bias = -1, a_log = -1, dt_bias = -1,
        lambda_bias = -1;
    int inner_decay = -1, correction = -1, gain = -1, erase_norm = -1;
    int atk_a_log = -1, atk_dt_bias = -1, atk_center = -1, o_norm = -1, o_proj = -1, bounds = -1;
  };
  // The gates that the recurrence of a pass makes of their projections itself: log-decays and gates of channels. It
  // does so in passes of a GPU that are kept for backward, where its kernels do so in both directions
  // (scan/cuda/pipeline.h: prepare_fuses_gates(), gradients_fuse_gates()). Nothing: it takes values.
  Gates gates_inside(const Pass<T>& pass) const;
  const Recurrence<T>& planned(const Pass<T>& pass, const Gates& gates, const StepRing& ring = {},
                               const StepSlots& slots = {}) const;
  void tokens_forward(const Pass<T>& pass, Context& c, T* tail) const;
  void gates_forward(const Pass<T>& pass, Context& c) const;
  void ranks_forward(const Pass<T>& pass, Context& c) const;
  // Erase key and erase-write vector where the rule has one, from k and the gate's projection.
  void erase_write_forward(const Pass<T>& pass, Context& c) const;
  void erase_write_backward(const Pass<T>& pass, const Context& c, Mat<T> dgate, const RecurrenceInputs<T>& d) const;
  void correct_read(const Pass<T>& pass, Context& c) const;
  const Wide<T>* gate_bias(const Pass<T>& pass) const;  // of the output gate's second factor; null: none
  void output_norm(const Pass<T>& pass, Context& c) const;
  void complete(const Pass<T>& pass, Context& c) const;
  // d: gradients with respect to what the recurrence took. Those of the gates' values lie in dproj at the gates'
  // columns and become gradients of the projections there; d.k takes what reaches k through an erase key of its own.
  void gates_backward(const Pass<T>& pass, const Context& c, Mat<T> dproj, const RecurrenceInputs<T>& d) const;

  RecurrentMixerSpec spec_;
  Projections projections_;
  Indices index_;
  struct {
    int s = -1, a = -1, tail = -1;
  } state_;  // indices of mixer_state()'s tensors
  std::unique_ptr<QueryKey<T>> query_key_;
  std::unique_ptr<GainGate<T>> gain_;
};

}  // namespace fw
