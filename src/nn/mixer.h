// What a block asks of a mixer, whichever it is: y = mixer(x) over packed sequences, forward and backward.
// A forward pass that keeps contexts puts everything its backward needs into the arena, and a context that says where
// into the host's. A pass that keeps nothing uses the arena as scratch, and the caller rewinds it.
#pragma once

#include <cstdint>

#include "base/mat.h"
#include "fastweight/fastweight.h"
#include "nn/layer_state.h"
#include "nn/params.h"
#include "nn/recompute.h"
#include "ops/exec.h"

namespace fw {

template <class T>
class PassObserver;  // nn/observer.h
template <class T>
class Recurrences;  // nn/recurrence.h
template <class T>
class RowNorm;  // nn/norm.h

// The value of a model's first RWKV-7 layer, which the later ones mix with theirs. Memory of the model's: it outlives
// the blocks' scratch.
template <class T>
struct FirstValue {
  Mat<T> value;    // [T, d]; that layer's forward fills it
  Mat<T> d_value;  // in backward, zero before the last block: the later layers add to it, the first reads it
};

// One pass over the model: what all modules share.
template <class T>
struct Pass {
  Params<Wide<T>>& params;
  PassLayout layout;
  const Exec<T>& exec;
  Recurrences<T>& recurrences;
  bool keep = false;                    // contexts for backward
  fw_form form = FW_FORM_AUTO;          // of the recurrence
  PassObserver<T>* observer = nullptr;  // sees every recurrence
  Recompute recompute = Recompute::kNone;
  // The same context with an arena of its own, where what is recomputed lies; it is empty again after each half of
  // a block. Null where everything is kept.
  const Exec<T>* recompute_exec = nullptr;
  FirstValue<T>* first_value = nullptr;  // null where no layer asks for one
  // Of a decoded token's half of a block (block.cpp) that takes_norm(): its first products' norm, null where x is
  // normed already. And whether its last product adds to y, which is then the residual stream (and x, where there is a
  // norm) itself.
  const RowNorm<T>* norm = nullptr;
  bool adds = false;
  // Of other sublayers that take_norm(), on a GPU: what the last product's result is added to, which is kept; null:
  // nothing.
  Mat<const T> addend = {};
  // Of a layer with experts, in training: the coefficient of its balance (ops.def: route_backward), and where it counts
  // the rows of each expert [E]; null: nowhere.
  Wide<T> balance = 0;
  int64_t* expert_load = nullptr;

  // For what backward may recompute.
  const Exec<T>& transient_exec() const { return recompute_exec != nullptr ? *recompute_exec : exec; }
  Write last_write() const { return adds ? Write::kAccumulate : Write::kOverwrite; }
  // A pass whose contexts all lie on transient_exec().
  Pass on_transient_exec() const {
    Pass there{params, layout, transient_exec(), recurrences, keep, form, observer};
    there.first_value = first_value;
    there.norm = norm;
    there.adds = adds;
    there.addend = addend;
    return there;
  }
};

// The last product of a half that takes_norm().
template <class T>
void last_product(const Pass<T>& pass, Mat<const T> x, const Weight<Wide<T>>& weight, Mat<T> y) {
  if (pass.addend.data != nullptr) return pass.exec.linear_add_forward(x, weight, pass.addend, y);
  pass.exec.linear_forward(x, weight, nullptr, y, pass.last_write());
}

// The base of a mixer's own context, which lives in exec.contexts.
struct MixerContext {};

template <class T>
class Mixer {
 public:
  virtual ~Mixer() = default;
  // Whether x is read by one product, the first, and y written by one, the last, so that Pass::norm and Pass::adds are
  // understood.
  virtual bool takes_norm() const { return false; }
  // x [T, d]; y [T, d] is overwritten, or its data is null in a pass that recomputes for a backward, which does not
  // need it. Returns the context, null when pass.keep is false.
  virtual MixerContext* forward(const Pass<T>& pass, Mat<const T> x, LayerState<T> state, Mat<T> y) const = 0;
  // x as forward had it. dx [T, d] is overwritten, gradients of parameters accumulate. The context may be used up.
  virtual void backward(const Pass<T>& pass, MixerContext* context, Mat<const T> x, Mat<const T> dy,
                        Mat<T> dx) const = 0;
};

}  // namespace fw
