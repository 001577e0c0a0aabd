#include "model/interop/hf_keys.h"

#include <algorithm>
#include <cmath>
#include <string_view>
#include <vector>

#include "base/nearest.h"
#include "base/printable.h"

namespace fw::hf {
namespace {

// Keys that any configuration may have and that change no number of a model that has its weights.
constexpr std::string_view kNoEffect[] = {
    // what the file is
    "model_type", "architectures", "auto_map", "transformers_version", "_name_or_path", "name_or_path", "_commit_hash",
    "dtype", "torch_dtype", "tokenizer_class", "unsloth_version", "unsloth_fixed",
    // ids of tokens: generation has them from the folder, scores do not depend on them
    "bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "cls_token_id", "mask_token_id", "unk_token_id",
    "decoder_start_token_id",
    // kernels, caches and what a call returns
    "attn_mode", "fuse_norm", "fuse_swiglu", "fuse_cross_entropy", "fuse_linear_cross_entropy", "use_cache",
    "return_dict", "output_attentions", "output_hidden_states", "torchscript", "use_bfloat16", "tf_legacy_loss",
    "chunk_size_feed_forward", "gradient_checkpointing", "attn_implementation", "_attn_implementation",
    "_attn_implementation_autoset", "_experts_implementation", "max_position_embeddings", "model_max_length",
    // training: first values and additions to the loss
    "initializer_range", "use_l2warp",
    // other tasks and other kinds of models
    "is_encoder_decoder", "is_decoder", "cross_attention_hidden_size", "add_cross_attention", "tie_encoder_decoder",
    "finetuning_task", "id2label", "label2id", "num_labels", "task_specific_params", "problem_type", "prefix",
    // generation
    "max_length", "min_length", "do_sample", "early_stopping", "num_beams", "num_beam_groups", "diversity_penalty",
    "temperature", "top_k", "top_p", "min_p", "typical_p", "repetition_penalty", "length_penalty",
    "no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "encoder_repetition_penalty", "bad_words_ids",
    "num_return_sequences", "output_scores", "return_dict_in_generate", "forced_bos_token_id", "forced_eos_token_id",
    "remove_invalid_values", "exponential_decay_length_penalty", "suppress_tokens", "begin_suppress_tokens",
    "epsilon_cutoff", "eta_cutoff", "num_assistant_tokens", "num_assistant_tokens_schedule",
    "assistant_confidence_threshold", "assistant_lookbehind", "target_lookbehind"};

// Keys with a value that asks for nothing. Any other value is an error.
struct Neutral {
  const char* key;
  double value;
};
constexpr Neutral kNeutral[] = {
    {"logit_scale", 1},        {"logits_scaling", 1},    {"embedding_multiplier", 1}, {"residual_multiplier", 1},
    {"lm_head_multiplier", 1}, {"attention_dropout", 0}, {"hidden_dropout", 0},       {"dropout", 0},
    {"resid_pdrop", 0},        {"embd_pdrop", 0},        {"attn_pdrop", 0},           {"classifier_dropout", 0}};
constexpr const char* kNeutralOff[] = {"attention_bias", "mlp_bias"};

bool has_numbers(const Json& value) {
  if (value.is_structured()) return std::any_of(value.begin(), value.end(), has_numbers);
  return value.is_number() || value.is_boolean();
}

}  // namespace

const Json* Keys::find(const char* key) const {
  known_.insert(key);
  const auto it = json_.find(key);
  return it == json_.end() || it->is_null() ? nullptr : &*it;
}

bool Keys::is_null(const char* key) const {
  known_.insert(key);
  const auto it = json_.find(key);
  return it != json_.end() && it->is_null();
}

int64_t Keys::whole(const char* key, int64_t standard) const {
  const Json* value = find(key);
  if (value == nullptr) return standard;
  constexpr double kMost = 4e18;
  if (!value->is_number_integer() || std::abs(value->get<double>()) > kMost) fail(key, "a whole number", *value);
  return value->get<int64_t>();
}

double Keys::number(const char* key, double standard) const {
  const Json* value = find(key);
  if (value == nullptr) return standard;
  if (!value->is_number() || !(std::abs(value->get<double>()) < 1e12)) fail(key, "a number", *value);
  return value->get<double>();
}

bool Keys::truth(const char* key, bool standard) const {
  const Json* value = find(key);
  if (value == nullptr) return standard;
  if (!value->is_boolean()) fail(key, "true or false", *value);
  return value->get<bool>();
}

std::string Keys::text(const char* key, const char* standard) const {
  const Json* value = find(key);
  if (value == nullptr) return standard;
  if (!value->is_string()) fail(key, "a string", *value);
  return value->get<std::string>();
}

const char* Keys::spelling(std::initializer_list<const char*> names) const {
  const char* first = nullptr;
  for (const char* name : names) {
    const Json* value = find(name);
    if (value == nullptr) continue;
    if (first != nullptr && *value != *find(first))
      fail(name, fmt::format("{} as {} says, which is another name of it", shown(*find(first)), first), *value);
    if (first == nullptr) first = name;
  }
  return first != nullptr ? first : *names.begin();
}

void Keys::must_be(const char* key, const Json& only) const {
  const Json* value = find(key);
  if (value != nullptr && *value != only) fail(key, shown(only) + " (nothing else is computed here)", *value);
}

void Keys::must_be_one_of(const char* key, std::initializer_list<const char*> names) const {
  const Json* value = find(key);
  if (value == nullptr || std::any_of(names.begin(), names.end(), [&](const char* name) { return *value == name; }))
    return;
  std::string list;
  for (const char* name : names) list += fmt::format("{}{}", list.empty() ? "" : " or ", name);
  fail(key, list + " (nothing else is computed here)", *value);
}

void Keys::must_be_absent(const char* key) const {
  const Json* value = find(key);
  if (value != nullptr) fail(key, "null (nothing else is computed here)", *value);
}

void Keys::must_agree(const char* key, int64_t value, const std::string& formula) const {
  const Json* given = find(key);
  if (given != nullptr && *given != value) fail(key, fmt::format("{} = {}", formula, value), *given);
}

void Keys::have_no_effect(std::initializer_list<const char*> keys) const {
  for (const char* key : keys) known_.insert(key);
}

Keys Keys::inner(const char* key) const { return {*find(key), where_ + ": " + key, warnings_}; }

void Keys::finish() const {
  for (const Neutral& neutral : kNeutral) must_be(neutral.key, neutral.value);
  for (const char* key : kNeutralOff) must_be(key, false);
  for (const auto& [key, value] : json_.items()) {
    if (value.is_null() || known_.count(key) != 0) continue;
    if (std::find(std::begin(kNoEffect), std::end(kNoEffect), key) != std::end(kNoEffect)) continue;
    if (has_numbers(value)) {
      const std::vector<std::string> names(known_.begin(), known_.end());
      const std::string near = nearest(key, names);
      fail_usage(
          "{}: {}: this key is not known here, and its value {} may change what the model computes: remove the key if "
          "it does not{}",
          where_, excerpt(key), shown(value), near.empty() ? "" : fmt::format(" (nearest known key: {})", near));
    }
    if (warnings_ != nullptr)
      warnings_->push_back(fmt::format("{}: {}: this key is not known here; its value {} is not looked at", where_,
                                       excerpt(key), shown(value)));
  }
}

void Keys::fail(const char* key, const std::string& expected, const Json& came) const {
  fail_usage("{}: {}: expected {}, got {}", where_, key, expected, shown(came));
}

}  // namespace fw::hf
