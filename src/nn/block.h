// A block: x + mixer(norm x), then x + mlp(norm x) where it has an MLP, whatever the mixer. With its norms behind:
// x + norm(mixer(x)), then x + norm(mlp(x)).
//
// The residual stream is handed from block to block as two parts, x and a delta still to be added, so that each
// addition runs in one pass with the norm after it. On a GPU, after sublayers that take_norm(), as their sum, which the
// last product of a half makes.
#pragma once

#include <memory>
#include <string>

#include "nn/experts.h"
#include "nn/mixer.h"
#include "nn/mlp.h"
#include "nn/norm.h"

namespace fw {

template <class T>
struct Residual {
  Mat<T> x;              // [T, d]
  Mat<T> delta;          // [T, d]
  bool pending = false;  // whether delta is still to be added
};

// norm(x + delta) into y, rstd [T]. A pass that keeps contexts leaves residual.x unchanged in memory (the
// sum goes where delta was), else the sum replaces x. Afterwards residual.x is the sum and nothing is pending.
template <class T>
void settle(const Pass<T>& pass, Residual<T>& residual, const RowNorm<T>& norm, Mat<T> y, Wide<T>* rstd);

template <class T>
class Block {
 public:
  struct Context {
    Mat<T> mixer_in, mlp_in;          // [T, d]: the residual before each half
    Mat<T> mixer_normed, mlp_normed;  // [T, d]: its norm
    Mat<T> mixer_out, mlp_out;        // [T, d]: what norms behind take
    Wide<T>* mixer_rstd = nullptr;    // [T]
    Wide<T>* mlp_rstd = nullptr;
    MixerContext* mixer = nullptr;
    LayerState<T> state;  // the mixer's before the pass, where it is recomputed
    typename Mlp<T>::Context mlp;
    typename Experts<T>::Context experts;
  };

  // make_mixer(prefix) declares the mixer's parameters between the two norms', as checkpoints list them. A layer's
  // state: `mixer_tensors` of the mixer, then those of the MLP.
  template <class MakeMixer>
  Block(const std::string& prefix, const MlpSpec& mlp, const NormSpec& norm, NormPosition norm_position,
        int64_t mixer_tensors, Params<Wide<T>>& params, MakeMixer make_mixer)
      : hidden_(mlp.hidden),
        norm_position_(norm_position),
        mixer_tensors_(mixer_tensors),
        mixer_norm_(norm, prefix + "attn_norm", params),
        mixer_(make_mixer(prefix + "attn.")) {
    if (mlp.size == 0) return;
    mlp_norm_ = std::make_unique<RowNorm<T>>(norm, prefix + "mlp_norm", params);
    if (mlp.kind == MlpKind::kExperts) {
      experts_ = std::make_unique<Experts<T>>(mlp, prefix + "mlp.", params);
    } else {
      mlp_ = std::make_unique<Mlp<T>>(mlp, prefix + "mlp.", params);
    }
  }

  // context: filled when pass.keep; else the arena is rewound to where it was, residual's two buffers are reused.
  void forward(const Pass<T>& pass, Residual<T>& residual, LayerState<T> state, Context* context) const;
  // dx [T, d]: the gradient of the block's output becomes that of its input. The arena is rewound to where it was.
  void backward(const Pass<T>& pass, Context& context, Mat<T> dx) const;

 private:
  bool mlp_takes_norm() const { return mlp_ != nullptr && mlp_->takes_norm(); }
  void mlp_forward(const Pass<T>& pass, Mat<const T> x, LayerState<T> state, Mat<T> y, Context& context) const;
  void mlp_backward(const Pass<T>& pass, Context& context, Mat<const T> x, Mat<const T> dy, Mat<T> dx) const;
  LayerState<T> copy_of(const Pass<T>& pass, LayerState<T> state) const;
  template <class Run>
  void step_half(const Pass<T>& pass, Residual<T>& residual, const RowNorm<T>& norm, const Run& run) const;
  void run_mixer(const Pass<T>& pass, const Pass<T>& half, Mat<const T> x, LayerState<T> state, Mat<T> y,
                 Context& c) const;
  template <class Run>
  void behind_half(const Pass<T>& pass, Residual<T>& residual, const RowNorm<T>& norm, Mat<T>& in, Mat<T>& out,
                   Wide<T>*& rstd, const Run& run) const;
  void mixer_backward(const Pass<T>& pass, Context& c, Mat<const T> x, Mat<const T> dy, Mat<T> dx) const;
  void backward_behind(const Pass<T>& pass, Context& c, Mat<T> dx) const;
  Mat<T> recompute_norm(const Pass<T>& pass, Mat<T> in, const RowNorm<T>& norm, Wide<T>* rstd, Mat<T> kept) const;

  int64_t hidden_;
  NormPosition norm_position_;
  int64_t mixer_tensors_;
  RowNorm<T> mixer_norm_;
  std::unique_ptr<Mixer<T>> mixer_;
  std::unique_ptr<RowNorm<T>> mlp_norm_;  // null, with the two that follow: the block ends with the mixer
  std::unique_ptr<Mlp<T>> mlp_;           // or
  std::unique_ptr<Experts<T>> experts_;
};

}  // namespace fw
