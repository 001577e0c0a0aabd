// What a mixer does in a pass with drafts (model/state_drafts.h). Its layout has each token as a sequence of its own,
// as a decoded token's pass has it. T neighbouring ones belong to one sequence. The recurrence takes them together
// (StepSlots).
#pragma once

#include <cstdint>

#include "nn/layer_state.h"
#include "nn/mixer.h"

namespace fw {

// The tail of each of the layout's sequences, which the pass may overwrite; null without a state. It is tensor `index`
// of the state. In a pass with drafts it is memory of the arena, and x [T, width] are the rows that tails have.
template <class T>
T* step_tails(const Pass<T>& pass, Mat<const T> x, LayerState<T> state, int index);

// attention_step of q, k and v, whose heads are as the shape has them. drafts: in a pass with drafts, whose tokens see
// those before them.
template <class T>
void attend_step(const Pass<T>& pass, Mat<T> q, Mat<T> k, Mat<const T> v, AttentionShape shape, Pages<T> past_k,
                 Pages<T> past_v, bool drafts, Mat<T> o);

}  // namespace fw
