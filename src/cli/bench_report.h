// What the benchmarks share: repeated times, memory of this process, temporary folders.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <vector>

#include "base/communicator.h"
#include "fastweight/fastweight.h"
#include "model/config.h"
#include "rule/rule.h"

namespace fw::cli {

// Times of one thing, repeated. A machine that others use too has outliers upwards: the best says what the code can do,
// the median what one gets.
class Samples {
 public:
  void add(double value) { values_.push_back(value); }
  bool empty() const { return values_.empty(); }
  double best() const;
  double median() const;

 private:
  std::vector<double> values_;
};

double seconds_of(const std::function<void()>& body);

int64_t resident_bytes();  // now
int64_t peak_bytes();      // largest since the start, or since reset_peak()
void reset_peak();         // where the system allows it (Linux: /proc/self/clear_refs)
// Each prints its table and returns its part of the JSON report.
struct RecurrenceBench {
  std::vector<std::string> rules;
  int64_t batch = 1, tokens = 2048, heads = 16, value_heads = 0, key_dim = 128, value_dim = 128, chunk = 0, repeats = 7;
  std::string dtype = "f32", operands = "f32", form = "auto", gates = "values",
              state_layout = "v_first";  // of decoding with a device
  int64_t segment = 0;                   // the descriptor's, with a device
  // with a device: so many sequences of so many tokens after the others, all packed in one
  int64_t beside = 0, beside_tokens = 16;
  double decay_scale = 1;  // of log-decays, which are minus the softplus of normal numbers
};
fw_form form_of(const std::string& name);  // auto, chunk, token
// How many values the inputs of a rule have, for so many tokens of all sequences.
double input_values(const Rule& rule, const RecurrenceBench& bench, double tokens);
nlohmann::json bench_recurrence(const RecurrenceBench& bench);
// The same on the CUDA device, by events on it. Tensors of tokens are of dtype, bf16, f16 or f32 (one value a head:
// float32), products of bf16 operands unless operands is "f32". gates "logits": all gates are logits of dtype,
// log-decays with a_log and dt_bias.
nlohmann::json bench_device(const RecurrenceBench& bench);

struct ModelBench {
  ModelConfig model;
  int64_t batch = 16, length = 256, accumulate = 1, steps = 20, decode_tokens = 100000, prefill = 0,
          prefill_sequences = 1;
  std::vector<int64_t> decode_sequences, decode_seen;
  std::optional<int64_t> decode_ring;  // as LanguageModel::set_decode_ring() has it
  int64_t decode_drafts = 0;           // timed beside plain decoding; 0: not
  std::string device = "cpu";
  std::string recompute = "none", memory, moments = "auto";  // as the keys of training (train/config.def)
  std::string sums = "apart";                                // of several ranks
};
nlohmann::json bench_train(const ModelBench& bench);  // on the CPU
// On a GPU, or on one of each rank: then the figures are those of all together, but for products and memory, which are
// rank 0's.
nlohmann::json bench_train_device(const ModelBench& bench, Communicator& ranks);
nlohmann::json bench_decode(const ModelBench& bench);
// Rows {model, sequences, seen, tok_s, ms_per_token} of decode_sequences x decode_seen, with decode_drafts also
// {drafts, drafted_tok_s, accepted}, and {model, sequences, tokens, ms, tok_s} of prefill.
nlohmann::json bench_generation(const ModelBench& bench);

}  // namespace fw::cli
