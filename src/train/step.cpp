#include "train/step.h"

#include <algorithm>
#include <cmath>

namespace fw {

int64_t scored(std::span<const Batch> batches) {
  int64_t count = 0;
  for (const Batch& batch : batches)
    count += std::count_if(batch.targets.begin(), batch.targets.end(), [](int32_t target) { return target >= 0; });
  return count;
}

template <class T>
StepResult train_step(LanguageModel<T>& model, BasicAdamW<T>& optimizer, std::span<const Batch> batches, double lr,
                      double clip) {
  StepResult result;
  result.count = scored(batches);
  const double scale = result.count > 0 ? 1.0 / static_cast<double>(result.count) : 0.0;
  model.begin_step();
  for (const Batch& batch : batches) model.accumulate(batch.ids, batch.targets, batch.layout, scale);
  optimizer.square_norm(model.exec(), model.trained(), &model.step_sums()->square_norm);
  const StepSums sums = model.read_sums();
  result.nll = sums.loss.nll;
  result.norm = std::sqrt(sums.square_norm);
  result.finite = std::isfinite(result.nll) && std::isfinite(result.norm);
  if (result.finite && result.count > 0) {
    optimizer.update(model.exec(), model.trained(), lr, clip_factor(result.norm, clip));
  }
  return result;
}

template StepResult train_step(LanguageModel<float>&, BasicAdamW<float>&, std::span<const Batch>, double, double);
template StepResult train_step(LanguageModel<double>&, BasicAdamW<double>&, std::span<const Batch>, double, double);

}  // namespace fw
