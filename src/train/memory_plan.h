// The memory of a training step, known before any of it is taken: the step runs on a PlanDevice (base/plan_device.h)
// with batches of whole sequences. Where a batch has several documents in a sequence, the recurrence has a little more.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "model/config.h"
#include "model/language_model.h"
#include "nn/params.h"
#include "nn/recompute_layers.h"
#include "train/optimizer.h"
#include "train/trainer.h"

namespace fw {

struct MemoryPlan {
  // bytes; of several ranks the gradients' sum and what is received of others, and a part of the moments
  size_t parameters = 0, gradients = 0, moments = 0;
  size_t base = 0, adapters = 0;  // of LoRA: bytes of `parameters` that are frozen, and values that are trained
  // copies of the parameters in bf16, for products, where they are not a part of them
  size_t operands = 0;
  size_t activations = 0;  // and workspace: the arenas of a pass
  size_t libraries = 0;    // workspace of the device's libraries
  // of several ranks on GPUs: room for NCCL's own buffers, which NCCL takes and nothing here counts
  size_t messages = 0;
  size_t total() const { return parameters + gradients + moments + operands + activations + libraries + messages; }
  // of a GPU: the parts of activations, which a run reserves before its first step
  Scratch scratch;
  RecomputeLayers recompute;                     // train.recompute, or what train.memory needs
  MomentFormat format = MomentFormat::kFloat32;  // of the moments: train.moments, or what train.memory needs
  std::vector<ParamSpec> specs;                  // of all parameters
};

// A step on train.device, which need not be there: a GPU's plan is one for 132 SMs where there is none. With
// train.memory it is the step that fits and computes the least again: train.recompute, then each level above it, of as
// few layers as will do. Gradients have the same bits whatever it is. Only if none fits and train.moments is auto the
// moments become bf16, which changes the numbers of a run, and the search begins anew. Throws Error(kUsage) where none
// fits, saying what would do; for configurations that are not valid. And for steps that are beyond planning: of more
// tokens than kMostPlannedTokens, or that take more than this process has address space for.
inline constexpr int64_t kMostPlannedTokens = int64_t{1} << 28;
// Of several ranks it is the step of the one that has the largest part (data_parallel.h), the same on all of them.
MemoryPlan plan_memory(const ModelConfig& model, const TrainConfig& train, int ranks = 1);
// Room that is left for NCCL on each GPU, 0 for one rank. An estimate from its defaults: buffers of 4 MiB and two
// protocols more. There are up to 32 channels to both neighbours for broadcasts, and up to 16 to each other rank of a
// machine (of 8) for messages between two. To those beyond by 2.
size_t nccl_room(int ranks);
// "elementwise", or "recurrence in 7 of 20 layers, elementwise in the others".
std::string describe(const RecomputeLayers& what, int64_t layers);

// Error(kUsage) that says what to lower, when a step of one rank takes more memory than is available (base/memory.h):
// `lower` where train's options are not to be had. beside: bytes that the run takes later, when the step's gradients
// and moments are still there (memory_beside_steps).
void require_memory_of_step(const ModelConfig& model, const TrainConfig& train, const std::string& lower = "",
                            double beside = 0);
// Bytes that a run takes beside the parts of a step that stay: a held-out evaluation, whose pass may be larger than the
// step's, and the best model, which is read again for the test.
double memory_beside_steps(const ModelConfig& model, const TrainConfig& train, bool evaluates, bool tests);

// Bytes that a model takes beside its parameters: for a pass over `tokens` of one text on the CPU, and to make a token
// of each of `sequences` with rings as LanguageModel::set_decode_ring() has them. With drafts it makes several.
size_t plan_pass(const ModelConfig& model, int64_t tokens);
size_t plan_decoding(const ModelConfig& model, int64_t sequences, const std::optional<int64_t>& ring = std::nullopt,
                     fw_device kind = FW_DEVICE_CPU, int64_t drafts = 0);
// Error(kUsage) when that is more than is available, of a model on the CPU; advice says what to do.
void require_memory_of_pass(const LanguageModel<float>& model, int64_t tokens, const std::string& advice);
void require_memory_of_decoding(const LanguageModel<float>& model, int64_t sequences, const std::string& advice,
                                int64_t drafts = 0);

}  // namespace fw
