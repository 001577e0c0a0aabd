#include "cli/run_config.h"

#include <filesystem>

#include "base/error.h"
#include "base/file.h"
#include "train/checkpoint.h"

namespace fw::cli {

void validate(const DataConfig& data) {
  if (data.text.empty()) fail_usage("no text to train on: give a file with --text, or data.text in the run file");
  if (!(data.valid_fraction >= 0 && data.valid_fraction <= 0.9)) {
    fail_usage("data.valid_fraction (--valid-fraction): expected 0 to 0.9, got {}", data.valid_fraction);
  }
  if (data.separator.find('\n') != std::string::npos) fail_usage("data.separator (--separator): expected one line without a line break");
}

void declare_model(Options& options, ModelConfig& m, bool in_run_file) {
  options.section(in_run_file ? "model" : "", "Model");
  options.add("rule", "RULE", &m.rule, "a name of 'fastweight rules', or axes such as \"decay=channel gain=kaczmarz\"");
  options.add("vocab_size", "N", &m.vocab_size, "size of the vocabulary; 0: the tokenizer's");
  options.add("hidden_size", "N", &m.hidden_size, "width of the residual stream");
  options.add("num_hidden_layers", "N", &m.num_hidden_layers, "layers");
  options.add("num_heads", "N", &m.num_heads, "key heads of a layer");
  options.add("num_v_heads", "N", &m.num_v_heads, "value heads, a multiple of the key heads; 0: as many");
  options.add("head_dim", "N", &m.head_dim, "key dimension of a head");
  options.add("expand_v", "X", &m.expand_v, "value dimension of a head over its key dimension");
  options.add("conv_size", "N", &m.conv_size, "width of the causal convolution of q, k, v; 0: none");
  options.add("intermediate_size", "N", &m.intermediate_size, "width of the MLP; 0: from hidden_ratio");
  options.add("hidden_ratio", "X", &m.hidden_ratio, "the MLP has 2/3 of this times the width");
  options.add("norm_eps", "X", &m.norm_eps, "epsilon of the norms");
  options.add("tie_word_embeddings", "", &m.tie_word_embeddings, "one matrix for embedding and head");
  options.add("allow_neg_eigval", "", &m.allow_neg_eigval, "erase gain up to 2 instead of 1");
  options.add("output_gate", "KIND", &m.output_gate, "gate on the mixer's output: silu, sigmoid or none");
  options.add("output_gate_rank", "N", &m.output_gate_rank, "rank of the gate's projection; 0: full");
  options.add("decay_rank", "N", &m.decay_rank, "rank of the projection of a channel decay; 0: full");
  options.add("decay_per_value_head", "", &m.decay_per_value_head, "a channel decay for every value head instead of every key head");
  options.add("decay_gate", "KIND", &m.decay_gate, "how a channel decay comes from its projection: softplus, or logsigmoid as in gla");
  options.add("feature_map", "KIND", &m.feature_map, "of q and k: none, elu, relu or product (learned)");
  options.add("rope_theta", "X", &m.rope_theta, "base of a rotary position embedding of q and k; 0: none");
  options.add("gain_source", "KIND", &m.gain_source, "the gain gate: projection of the token, or one learned number a layer");
  options.add("gain_factor", "KIND", &m.gain_factor, "times none, 1/t, 1/sqrt(t) or 1/log(t+1) at token t");
  options.add("single_gate", "", &m.single_gate, "decay = 1 - gain gate (scalar decay)");
  options.add("precond_gates", "KIND", &m.precond_gates, "the preconditioner's gates: own, or tied to the main ones");
  options.add("raw_read_correction", "", &m.raw_read_correction, "read with q - D p before the norms, as Comba's published layer does");
  options.add("init", "SCHEME", &m.init, "initial weights: xavier or normal");
  options.add("precond_x", "X", &m.precond_x, "range of a preconditioner, 1 to 2");
}

void declare_train(Options& options, TrainConfig& t) {
  options.section("train", "Training");
  options.add("out", "FOLDER", &t.out, "folder of the run: model, checkpoints, metrics, curves");
  options.add("steps", "N", &t.steps, "optimiser steps");
  options.add("batch", "N", &t.batch, "sequences at a time");
  options.add("length", "N", &t.length, "tokens of a sequence");
  options.add("accumulate", "N", &t.accumulate, "batches whose gradients make one step");
  options.add("schedule", "SHAPE", &t.schedule, "of the learning rate after its warm-up: cosine, linear, constant, or wsd (stable, then a linear decay)");
  options.add("lr", "X", &t.lr, "learning rate at its peak");
  options.add("min_lr", "X", &t.min_lr, "learning rate at the last step (but of a constant one)");
  options.add("warmup", "N", &t.warmup, "steps of linear warm-up");
  options.add("decay_share", "X", &t.decay_share, "share of the steps, the last, in which wsd decays");
  options.add("beta1", "X", &t.beta1, "AdamW: decay of the mean");
  options.add("beta2", "X", &t.beta2, "AdamW: decay of the mean square");
  options.add("adam_eps", "X", &t.adam_eps, "AdamW: epsilon");
  options.add("weight_decay", "X", &t.weight_decay, "AdamW: decoupled weight decay of the matrices");
  options.add("clip", "X", &t.clip, "largest global norm of the gradient; 0: no clipping");
  options.add("seed", "N", &t.seed, "of the initial weights and the order of the data");
  options.add("precision", "TYPE", &t.precision, "operands of matrix products: f32, or bf16 with float32 sums");
  options.add("log_every", "N", &t.log_every, "steps from one log line to the next");
  options.add("eval_every", "N", &t.eval_every, "steps from one held-out evaluation to the next; 0: only at the end");
  options.add("checkpoint_every", "N", &t.checkpoint_every, "steps from one checkpoint to the next; 0: only at the end and on Ctrl-C");
  options.add("keep", "N", &t.keep, "checkpoints kept");
}

void declare_data(Options& options, DataConfig& d) {
  options.section("data", "Data");
  options.add("text", "FILE", &d.text, "text to train on; several times for several files; or one token file of 'fastweight tokenize'");
  options.add("valid", "FILE", &d.valid, "held-out text or token file, instead of the last part of the text");
  options.add("valid_fraction", "X", &d.valid_fraction, "share of the text, its end, that is held out");
  options.add("separator", "LINE", &d.separator, "a line that separates documents, such as % in fortune files; without: every file is one document");
  options.add("tokenizer", "SPEC", &d.tokenizer, "bytes, or the path of a SentencePiece model");
}

std::string describe(const ModelConfig& m) {
  std::string heads = fmt::format("{} heads of {}", m.num_heads, m.head_dim);
  if (m.v_heads() != m.num_heads || m.head_v_dim() != m.head_dim) heads += fmt::format(" (values: {} of {})", m.v_heads(), m.head_v_dim());
  return fmt::format("{}, {} layers, width {}, {}", m.rule, m.num_hidden_layers, m.hidden_size, heads);
}

std::string find_model_folder(const std::string& path) {
  namespace fs = std::filesystem;
  const auto is_model = [](const fs::path& folder) { return file_exists((folder / "config.json").string()); };
  std::error_code error;
  if (!fs::is_directory(path, error)) fail_usage("MODEL: expected a model or run folder, but there is no folder '{}'", path);
  if (is_model(path)) return path;
  if (is_model(fs::path(path) / "model")) return (fs::path(path) / "model").string();
  const std::string checkpoints = (fs::path(path) / "checkpoints").string();
  const std::vector<int64_t> steps = list_checkpoints(checkpoints);
  if (steps.empty()) fail_usage("MODEL: '{}' has neither config.json nor model/ nor checkpoints/: it is not a model or run folder", path);
  return checkpoint_path(checkpoints, steps.back());
}

}  // namespace fw::cli
