// One optimiser step: loss and gradient of its batches, global norm, clipping, AdamW. The loop (trainer.h) and the
// check against another program's training (model_conformance.h) both run this.
#pragma once

#include <span>

#include "model/language_model.h"
#include "train/optimizer.h"
#include "train/token_file.h"

namespace fw {

struct StepResult {
  double nll = 0;     // sum over the scored tokens, before the update
  int64_t count = 0;  // scored tokens
  double norm = 0;    // of the gradient of the mean loss, before clipping
  // Whether loss and norm are finite; otherwise parameters and moments are as they were.
  bool finite = false;
};

// Scored tokens of all batches.
int64_t scored(std::span<const Batch> batches);

// The gradient is that of the mean over all scored tokens of all batches, however they are spread. Without scored
// tokens nothing is updated either: decaying the weights for no gradient would not be learning.
template <class T>
StepResult train_step(LanguageModel<T>& model, BasicAdamW<T>& optimizer, std::span<const Batch> batches, double lr,
                      double clip);

}  // namespace fw
