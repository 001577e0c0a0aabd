// Engine: the passes of a model, used by LanguageModel<W>. W is the type of its parameters, their gradients and its
// results; the type of its activations is the engine's own: W, or bf16 on a device where models of W have bf16
// activations. Arguments are checked by the caller.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>

#include "base/seq_layout.h"
#include "model/config.h"
#include "model/decoder.h"
#include "model/draft_decoder.h"
#include "model/state.h"
#include "nn/lora.h"
#include "nn/params.h"
#include "nn/recompute_layers.h"
#include "ops/exec.h"

namespace fw {

template <class T>
class PassObserver;  // nn/observer.h

template <class W>
class Engine {
 public:
  Engine() = default;
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;
  virtual ~Engine() = default;

  virtual const Exec<W>& over_parameters() const = 0;  // for what runs over parameters and their gradients
  virtual void set_precision(Precision precision) = 0;
  virtual void set_recompute(RecomputeLayers what) = 0;
  virtual void set_form(fw_form form) = 0;
  virtual void set_decode_bits(bool on) = 0;
  virtual const std::optional<int64_t>& decode_ring() const = 0;
  virtual void set_decode_ring(const std::optional<int64_t>& tokens) = 0;
  virtual void observe(PassObserver<W>* observer) = 0;
  virtual void adapt(Lora<W>* lora) = 0;  // passes compute these adapters; null: none

  // As LanguageModel has them, with at least one token; *sum is in device memory, logits and nll in the host's.
  virtual void accumulate(std::span<const int32_t> ids, std::span<const int32_t> targets, const SeqLayout& layout,
                          W grad_scale, ModelState<W>* state, LossSum* sum) = 0;
  virtual void evaluate(std::span<const int32_t> ids, std::span<const int32_t> targets, const SeqLayout& layout,
                        ModelState<W>* state, W* nll, LossSum* sum) = 0;
  virtual void forward_last(std::span<const int32_t> ids, const SeqLayout& layout, ModelState<W>& state,
                            Mat<W> logits) = 0;
  virtual void forward_all(std::span<const int32_t> ids, const SeqLayout& layout, ModelState<W>* state,
                           Mat<W> logits) = 0;
  virtual void likeliest(std::span<const int32_t> ids, std::span<const int64_t> rows, const SeqLayout& layout,
                         ModelState<W>* state, int32_t* to) = 0;
  virtual std::unique_ptr<Decoder<W>> decoder(ModelState<W>& state) = 0;
  virtual void require_drafts(int64_t drafts) const = 0;
  virtual std::unique_ptr<DraftDecoder<W>> draft_decoder(ModelState<W>& state, int64_t drafts) = 0;
  virtual std::vector<int64_t> take_expert_load() = 0;
  virtual size_t scratch_bytes() const = 0;
  virtual Scratch planned_scratch() const = 0;
  virtual void reserve_scratch(Scratch bytes) = 0;
};

// Declares the model's parameters and allocates them on the device; kBf16PlusLow splits them where activations are
// bf16, and nowhere else. Throws Error(kUsage) where the device lacks an operation.
template <class W>
std::unique_ptr<Engine<W>> make_engine(const ModelConfig& config, Device& device, Params<W>& params,
                                       MasterFormat master_format = MasterFormat::kBf16PlusLow);

}  // namespace fw
