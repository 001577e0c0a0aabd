// LanguageModel: embedding, blocks (x + mixer(norm x), x + swiglu(norm x)), final norm, head. T is float (training and
// use) or double (gradient checks): the type of parameters, gradients and results, whatever the device. On a GPU
// activations are bf16 (engine.h). Names as flash-linear-attention's models have them.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "base/seq_layout.h"
#include "model/adapters.h"
#include "model/config.h"
#include "model/decoder.h"
#include "model/draft_decoder.h"
#include "model/state.h"
#include "nn/params.h"
#include "nn/recompute_layers.h"
#include "ops/exec.h"

namespace fw {

template <class T>
class PassObserver;  // nn/observer.h
class OtherTensors;  // model/other_tensors.h

template <class T>
class LanguageModel {
 public:
  // Validates; parameters allocated on the device, where everything is computed, and not initialised. With bf16
  // activations they are split (MasterFormat); whole ones there compute the same bits with 6 bytes a parameter in place
  // of 4, for comparison.
  explicit LanguageModel(const ModelConfig& config, Device& device = host_device(),
                         MasterFormat master_format = MasterFormat::kBf16PlusLow);
  ~LanguageModel();
  LanguageModel(LanguageModel&&) noexcept;

  const ModelConfig& config() const;
  void set_hf(const std::string& hf);  // ModelConfig::hf, which nothing here computes with
  // Checksum of the tokenizer that the model's ids are of, which is saved with it; 0: not known.
  uint64_t tokenizer() const;
  void set_tokenizer(uint64_t checksum);
  Params<T>& params();
  const Params<T>& params() const;
  const Exec<T>& exec() const;  // for what runs over its parameters
  Device& device() const;       // where its parameters are, and where its states must be
  void init(Random& random) { params().init(random); }

  // LoRA (model/adapters.h): from here on the model's own parameters are frozen, and gradients are those of adapters,
  // which are not initialised. Called before the first gradient. Throws Error(kUsage) for modules that the model lacks.
  void add_adapters(const AdapterConfig& config);
  const AdapterConfig* adapters() const;  // null: none
  std::span<const LoraTarget> adapter_targets() const;
  // What is trained: the adapters' parameters, or where there are none params().
  Params<T>& trained();
  const Params<T>& trained() const;
  // Adds their products to the weights and drops them. Returns what had some.
  std::vector<LoraTarget> merge_adapters();

  void set_precision(Precision precision);  // of the matrix products outside the recurrence
  // Of training passes: memory for time, gradients keep their bits; nothing at first. Of all layers, or of some.
  void set_recompute(Recompute level) { set_recompute(RecomputeLayers{level}); }
  void set_recompute(RecomputeLayers what);
  void set_form(fw_form form);  // of the recurrence; FW_FORM_AUTO at first
  // Forward of every pass, training's too, computes a token with the bits that decoding it gives, and sampling has the
  // loss's log-probabilities; backward stays. On a GPU that holds for the recurrence alone. Slower. Recurrences have
  // FW_FORM_DECODE then. Throws Error(kUsage) for layers of mesa and mamba3.
  void set_decode_bits(bool on);
  // Decoders that follow fold a ring of the last tokens into the states every `tokens` tokens (nn/decode_ring.h): 1 to
  // 64, 0 for none, which is the default. With 1 a token has the same bits as without a ring, with
  // more it rounds otherwise. Throws Error(kUsage) for other numbers, and where no layer of the model has a ring.
  void set_decode_ring(const std::optional<int64_t>& tokens);
  const std::optional<int64_t>& decode_ring() const;
  // Sees every recurrence of the passes that follow, in host memory whatever the device; null: none. The caller keeps
  // it alive.
  void observe(PassObserver<T>* observer);
  bool parameters_finite() const;
  std::string hash() const;  // of names, shapes and values, adapters' too; ties a state to its model

  // Loss of packed sequences and, accumulated into trained().grads(), the gradient of grad_scale * (sum of losses).
  // targets[t] < 0 is not scored; where that is half of them or more, the head computes the scored rows alone. state
  // (may be null): initial states of the layout's sequences, replaced by the final ones; gradients do not flow through
  // it.
  LossSum forward_backward(std::span<const int32_t> ids, std::span<const int32_t> targets, const SeqLayout& layout,
                           double grad_scale, ModelState<T>* state = nullptr);

  // The same in parts, for several passes whose sums the host reads once:
  // - begin_step() zeroes gradients and sums,
  // - accumulate() is forward_backward() that leaves its loss in the sums,
  // - step_sums() is where they lie in device memory,
  // - read_sums() waits for them.
  void begin_step();
  void accumulate(std::span<const int32_t> ids, std::span<const int32_t> targets, const SeqLayout& layout,
                  double grad_scale, ModelState<T>* state = nullptr);
  StepSums* step_sums();
  StepSums read_sums() const;

  // Loss only; nll (per position, [T]) may be null.
  LossSum evaluate(std::span<const int32_t> ids, std::span<const int32_t> targets, const SeqLayout& layout,
                   ModelState<T>* state = nullptr, T* nll = nullptr);

  // Logits [N, vocab] of the last token of every sequence (each must have at least one token), state required: prefill
  // with long sequences, decode with one token each.
  void forward_last(std::span<const int32_t> ids, const SeqLayout& layout, ModelState<T>& state, Mat<T> logits);
  // Logits [T, vocab] of all positions (tests, conformance).
  void forward_all(std::span<const int32_t> ids, const SeqLayout& layout, ModelState<T>* state, Mat<T> logits);
  // The likeliest token after each of the positions `rows`, which grow: the id of the largest logit, the smallest of
  // equal ones; -1: a logit is NaN, or none is finite. Logits are made of these rows alone and stay on the device.
  // Throws Error(kUsage) for rows that do not grow or are no positions.
  void likeliest(std::span<const int32_t> ids, std::span<const int64_t> rows, const SeqLayout& layout,
                 ModelState<T>* state, std::span<int32_t> likeliest);

  // Generation from `state`, a token of each of its sequences at a time; model and state must outlive it. Form and
  // precision are what is set now.
  std::unique_ptr<Decoder<T>> decoder(ModelState<T>& state);
  // The same with up to `drafts` drafts a pass, 1 to kMostDrafts. Throws Error(kUsage) as require_drafts().
  std::unique_ptr<DraftDecoder<T>> draft_decoder(ModelState<T>& state, int64_t drafts);
  // Throws Error(kUsage) for other numbers, for a decode ring, and for the first layer that takes no tokens back. Those
  // are mamba, longhorn_diag, mesa and mamba3, on a GPU also rules with erase_state=previous or erase_write=own.
  void require_drafts(int64_t drafts) const;

  // Rows that each expert had in the training passes since the last call, [layers with experts, experts]; none without.
  std::vector<int64_t> take_expert_load();

  size_t scratch_bytes() const;  // memory held for activations
  // Of a model on a PlanDevice: what its passes would take. And memory that is taken now for passes to come, which a
  // plan has found (train/memory_plan.h); one that needs more takes more.
  Scratch planned_scratch() const;
  void reserve_scratch(Scratch bytes);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

// Model folders: config.json + model.safetensors (float32 values; metadata: the tokenizer's checksum). save writes
// aside, syncs and renames each file; load checks names, shapes and dtypes, and reads flash-linear-attention's folders
// too (interop/hf_config.h), and shards that model.safetensors.index.json names (model_files.h). What is saved of such
// a model is ours, in one file.
template <class T>
void save_model(const std::string& folder, const LanguageModel<T>& model);
// kForward: the model will not be trained. With bf16 activations the files' weights then stay bf16, 2 bytes each, if
// all operands of products are.
enum class LoadFor { kTraining, kForward };
template <class T>
LanguageModel<T> load_model(const std::string& folder, Device& device = host_device(),
                            LoadFor use = LoadFor::kTraining);
// The configuration of such a folder; `warnings` gets what its config.json has that is not looked at
// (interop/hf_config.h).
ModelConfig read_model_config(const std::string& folder, StringList* warnings = nullptr);
// eos_token_id of the folder's generation_config.json, an id or several; none where there is no such file or key.
std::vector<int64_t> generation_ends(const std::string& folder);
// Whether the folder is flash-linear-attention's, by its config.json. Throws Error(kUsage) when that cannot be read.
bool is_hf_folder(const std::string& folder);
// As flash-linear-attention lays its folders out. Throws Error(kUsage) when it has no such model. A tensor that was
// bf16 or f16 there is that again as long as its values are; all others are float32. end_of_text: the tokenizer's id or
// -1, which the configuration of a model that came from nowhere else says (without the key the other program has an end
// of its own).
// others: tensors to write besides, or null.
void export_model(const std::string& folder, const LanguageModel<float>& model, int32_t end_of_text = -1,
                  const OtherTensors* others = nullptr);

}  // namespace fw
