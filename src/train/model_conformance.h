// Checks of a model against values that another program computed with it. A folder has config.json, model.safetensors
// (ours or a Hugging Face one, model/interop/hf_config.h) and io.safetensors with:
// - input_ids [B, T], logits [B, T, vocab],
// - loss [1], the mean over all but the last position of each row,
// - grad/<parameter> of that loss, names as in model.safetensors,
// - greedy [1, n], what follows the first 40 ids of row 0,
// - trace/: training steps from the saved weights: input_ids [S, B, T], lr [S], loss [S] before each step, norm [S] of
//   the gradient before clipping. AdamW with betas 0.9, 0.95, eps 1e-8, weight decay 0.1, clipped to norm 1.
//
// With adapter_config.json and adapter_model.safetensors (model/adapters.h) the model has those adapters, and gradients
// and training are theirs.
//
// What a file does not have is not compared; input_ids it must have, and one thing more.
#pragma once

#include <string>
#include <vector>

#include "base/comparison.h"
#include "base/device.h"
#include "fastweight/fastweight.h"

namespace fw {

// Relative errors. Logits as one vector; gradients by parameter, the denominator at least 1e-3 of all gradients
// together, because some parameters have gradients of 5e-5 of the whole, which float32 cannot give to three digits.
// Loss and norm step by step.
struct ModelBounds {
  double logits = 1e-4, loss = 1e-4, gradients = 1e-3;
  double trace_loss = 2e-4, trace_norm = 1e-3;
};
// The bounds for a type; bf16: parameters and sums in float32, operands of matrix products rounded, so they are wider
// (5e-2, 1e-3, 3e-1): an operand has 8 bits. In float32 the norms of the training are those at the weights of a
// training in double.
ModelBounds model_bounds(ConformanceType type);

// Of a model whose activations are bf16, on a CUDA device: (3e-2, 3e-2, 3e-2), training loss 5e-3. Where a model turns
// the rounding itself into more, its bound is kDeviceConditioning times what bf16 does to it on the CPU. That is the
// larger of float64 with rounded weights and float32 with rounded operands of products (where that is within
// model_bounds(kBf16)). Activations, which are rounded on the device besides, are several for each of those.
ModelBounds device_model_bounds();
inline constexpr double kDeviceConditioning = 4;

struct ModelConformanceOptions {
  ConformanceType type = ConformanceType::kF64;
  fw_form form = FW_FORM_AUTO;
  // where the model is; null: the host. On a CUDA device activations are bf16, whatever the type
  Device* device = nullptr;
  bool rounded_weights = false;  // to bf16, before anything is computed
};

// Whether the folder is a model's: it has a config.json.
bool is_model_folder(const std::string& folder);
// One entry for each thing compared. Greedy tokens are an error of 0 or 1. In bf16 neither they nor training are
// compared. A near tie may fall either way. Ten steps of AdamW, which divides by the size of the gradient, turn the
// rounding of small gradients into other weights. On a CUDA device greedy tokens and norms are left out, the training's
// losses are compared. A model of an unknown type, or one that the device lacks, is one entry that says so. Throws
// Error(kUsage) for files that cannot be read, DeviceError without such a device.
std::vector<Comparison> check_model(const std::string& folder, const ModelConformanceOptions& options);

}  // namespace fw
