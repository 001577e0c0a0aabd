// Times forward, forward + backward and decode of rules on the CUDA device through the C header, by events on the
// device.
//
// The roofline of a call is the larger of two times: the caller's tensors, each read or written once, at the copy
// bandwidth measured in the same run (bytes read + written of a large copy). And the algebra's operations, counted as
// cli/bench_recurrence.cpp does, at kMatrixRate.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <ctime>
#include <deque>
#include <map>
#include <nlohmann/json.hpp>

#include "base/bf16.h"
#include "base/device.h"
#include "base/error.h"
#include "base/f16.h"
#include "base/memory.h"
#include "base/random.h"
#include "cli/bench_report.h"
#include "cli/say.h"
#include "reference/fields.h"
#include "reference/header_tensors.h"
#include "reference/problem.h"
#include "report/table.h"

namespace fw::cli {
namespace {

using PlainJson = nlohmann::json;

// dense bf16 products of cuBLASLt on an H200 (docs/performance.md), operations a second
constexpr double kMatrixRate = 790e12;
// the random tokens that a problem repeats: prime, so that chunks differ
constexpr int64_t kPatternTokens = 509;
constexpr size_t kRotation = size_t{200} << 20;  // inputs of this many bytes rotate, several times the L2 cache

void check(fw_status status) {
  if (status == FW_OK) return;
  if (status == FW_ERROR_ARGUMENT || status == FW_ERROR_DEVICE) fail_usage("{}", fw_last_error());
  if (status == FW_ERROR_MEMORY) fail_io("{}", fw_last_error());
  fail_internal("{}", fw_last_error());
}

int64_t count_of(const fw_tensor& t) {
  int64_t count = 1;
  for (int i = 0; i < t.rank; ++i) count *= t.shape[i];
  return count;
}

double bytes_of(const fw_tensor& t) {
  return t.data == nullptr ? 0 : static_cast<double>(count_of(t) * (t.dtype == FW_F32 ? 4 : 2));
}

fw_dtype dtype_of(const std::string& name) {
  if (name == "bf16") return FW_BF16;
  if (name == "f16") return FW_F16;
  if (name == "f32") return FW_F32;
  fail_usage("--dtype: expected bf16, f16 or f32 with --device cuda, got '{}'", name);
}

// As bytes of a tensor of that type.
std::string bytes_as(fw_dtype dtype, const std::vector<float>& values) {
  std::string bytes(values.size() * (dtype == FW_F32 ? 4 : 2), '\0');
  const auto n = static_cast<int64_t>(values.size());
  if (dtype == FW_BF16)
    round_to_bf16(n, values.data(), reinterpret_cast<Bf16*>(bytes.data()));
  else if (dtype == FW_F16)
    round_to_f16(n, values.data(), reinterpret_cast<F16*>(bytes.data()));
  else
    std::copy_n(reinterpret_cast<const char*>(values.data()), bytes.size(), bytes.data());
  return bytes;
}

// The random tokens that a rule's problems repeat.
ReferenceProblem pattern_of(const Rule& rule, const RecurrenceBench& bench) {
  require_memory(input_values(rule, bench, kPatternTokens) * sizeof(double), "the random tokens",
                 "lower --heads, --key-dim or --value-dim");
  ProblemOptions options;
  options.sequences = SeqLayout::uniform(1, kPatternTokens);
  options.H = bench.heads;
  options.HV = bench.value_heads;
  options.K = bench.key_dim;
  options.V = bench.value_dim;
  options.initial_state = false;
  if (bench.gates == "logits") options.gates = logits_of(rule, GateActivation::kSoftplus);
  ReferenceProblem problem = random_problem(rule, options);
  for (double& g : problem.in.g) g *= bench.decay_scale;
  // Of logits, log-decays as logsigmoid(N(0, 1)) has them: with a rate of a head for all of its channels some heads'
  // would be bounded in every chunk.
  Random random(options.seed + 1);
  const auto normal = [&](std::vector<double>& logits, std::vector<double>& a_log, std::vector<double>& dt_bias) {
    if (a_log.empty()) return;
    for (double& x : logits) x = random.normal();
    std::ranges::fill(a_log, 0.0);
    std::ranges::fill(dt_bias, 0.0);
  };
  normal(problem.in.g, problem.in.a_log, problem.in.dt_bias);
  normal(problem.in.precond_g, problem.in.precond_a_log, problem.in.precond_dt_bias);
  return problem;
}

// One set of tensors of a rule on the device: inputs, outputs, cotangents, gradients.
class Problem {
 public:
  Problem(const ReferenceProblem& pattern, const RecurrenceBench& bench, int64_t tokens) {
    const Rule& rule = pattern.rule;
    fw_desc_init(&desc);
    desc.rule = to_c(rule);
    desc.device = FW_DEVICE_CUDA;
    const fw_dtype io = dtype_of(bench.dtype);
    if (io != FW_F32) desc.io_dtype = io;
    if (bench.operands != "f32") desc.operands = FW_BF16;
    desc.form = form_of(bench.form);
    desc.gates = to_c(pattern.shape.gates);
    if (tokens > 1) desc.segment = bench.segment;
    desc.B = bench.batch;
    desc.T = tokens;
    desc.H = bench.heads;
    desc.HV = bench.value_heads;
    desc.K = bench.key_dim;
    desc.V = bench.value_dim;
    fw_inputs_init(&in);
    fw_inputs_init(&grads);
    fw_outputs_init(&out);
    fw_outputs_init(&d);
    for (const auto& field : reference_input_fields()) {
      const std::vector<int64_t> shape = field.shape(rule, pattern.shape);
      for (const auto& named : kInputTensors) {
        if (shape.empty() || std::string_view(named.name) != field.name ||
            (field.optional && !is_parameter(field.name)))
          continue;
        const bool per_token = of_tokens(field.name);
        const fw_dtype dtype = per_token && (shape.size() == 3 || is_logits(pattern, field.name)) ? io : FW_F32;
        in.*named.tensor = tensor(shape, per_token, dtype, &(pattern.in.*field.values));
        grads.*named.tensor = tensor(shape, per_token, dtype, nullptr);
      }
    }
    const std::vector<int64_t> o_shape{pattern.shape.sequences.tokens(), bench.value_heads, bench.value_dim};
    out.o = tensor(o_shape, true, io, nullptr);
    d.o = tensor(o_shape, true, io, &pattern.d.o);
  }

  double input_bytes() const {
    double sum = 0;
    for (const auto& named : kInputTensors) sum += bytes_of(in.*named.tensor);
    return sum;
  }

  fw_desc desc;
  fw_inputs in, grads;
  fw_outputs out, d;

 private:
  static bool is_logits(const ReferenceProblem& pattern, std::string_view name) {
    for (const GateSpec& gate : gate_specs(pattern.rule, pattern.shape.gates)) {
      if (gate.name == name) return gate.logits();
    }
    return false;
  }

  // shape: the pattern's, with `tokens` first. values repeat over all tokens; none: memory as it is.
  fw_tensor tensor(std::vector<int64_t> shape, bool tokens, fw_dtype dtype, const std::vector<double>* values) {
    size_t row = 1;
    for (size_t i = tokens ? 1 : 0; i < shape.size(); ++i) row *= static_cast<size_t>(shape[i]);
    const size_t rows = tokens ? static_cast<size_t>(desc.B * desc.T) : 1;
    const size_t pattern_rows = tokens ? std::min(static_cast<size_t>(shape[0]), rows) : 1;
    if (tokens) {
      shape[0] = desc.T;
      shape.insert(shape.begin(), desc.B);
    }
    const size_t element = dtype == FW_F32 ? 4 : 2;
    const DeviceMemory& memory = memory_.emplace_back(rows * row * element);
    if (values != nullptr) {
      const std::string bytes =
          bytes_as(dtype, {values->begin(), values->begin() + static_cast<int64_t>(pattern_rows * row)});
      const DeviceMemory pattern(bytes.size());
      pattern.from_host(bytes.data(), bytes.size());
      for (size_t r = 0; r < rows; r += pattern_rows) {
        device_copy(static_cast<char*>(memory.data()) + r * row * element, pattern.data(),
                    std::min(pattern_rows, rows - r) * row * element, nullptr);
      }
      device_synchronize();
    } else {
      memory.fill(0xff);
    }
    return fw_tensor_of(memory.data(), dtype, static_cast<int>(shape.size()), shape.data());
  }

  std::deque<DeviceMemory> memory_;
};

fw_sizes sizes_of(const fw_desc& desc) {
  fw_sizes sizes;
  fw_sizes_init(&sizes);
  check(fw_workspace_query(&desc, &sizes));
  return sizes;
}

Samples samples_of(const std::vector<double>& ms) {
  Samples samples;
  for (const double x : ms) samples.add(1e-3 * x);
  return samples;
}

double copy_bandwidth() {
  const size_t bytes = size_t{1} << 30;
  const DeviceMemory a(bytes), b(bytes);
  a.fill(1);
  b.fill(2);
  return 2.0 * static_cast<double>(bytes) / samples_of(device_times(3, 15, [&](int, void* stream) {
                                              device_copy(b.data(), a.data(), bytes, stream);
                                            })).median();
}

struct Result {
  Samples forward, both;
  double forward_bytes = 0, both_bytes = 0, flops = 0;
  size_t extra_bytes = 0, forward_workspace = 0;
  bool chunk_form = false;
};

Result measure(const ReferenceProblem& pattern, const RecurrenceBench& given) {
  const Rule& rule = pattern.rule;
  RecurrenceBench bench = given;
  std::vector<int64_t> offsets;  // of packed sequences
  if (given.beside > 0) {
    offsets.push_back(0);
    for (int64_t n = 0; n < given.batch + given.beside; ++n)
      offsets.push_back(offsets.back() + (n < given.batch ? given.tokens : given.beside_tokens));
    bench.batch = 1, bench.tokens = offsets.back();
  }
  std::deque<Problem> sets;
  const auto add = [&] {
    fw_desc& desc = sets.emplace_back(pattern, bench, bench.tokens).desc;
    if (offsets.empty()) return;
    desc.seqlens.cu_seqlens = offsets.data();
    desc.seqlens.bits = 64;
    desc.seqlens.num_sequences = given.batch + given.beside;
  };
  add();
  while (sets.size() < 4 && sets[0].input_bytes() * static_cast<double>(sets.size()) < static_cast<double>(kRotation))
    add();
  const fw_sizes sizes = sizes_of(sets[0].desc);
  const DeviceMemory saved(sizes.saved), space(std::max(sizes.forward, sizes.backward));
  const auto forward = [&](int i, void* stream, bool save) {
    Problem& p = sets[static_cast<size_t>(i) % sets.size()];
    p.desc.stream = stream;
    check(fw_forward(&p.desc, &p.in, &p.out, save ? saved.data() : nullptr, save ? saved.size() : 0, space.data(),
                     space.size()));
  };
  const auto both = [&](int i, void* stream) {
    forward(i, stream, true);
    const Problem& p = sets[static_cast<size_t>(i) % sets.size()];
    check(fw_backward(&p.desc, &p.in, &p.d, &p.grads, saved.data(), saved.size(), space.data(), space.size()));
  };
  Result r;
  const int repeats = static_cast<int>(bench.repeats);
  r.forward = samples_of(device_times(3, repeats, [&](int i, void* stream) { forward(i, stream, false); }));
  r.both = samples_of(device_times(3, repeats, both));
  const Problem& p = sets[0];
  r.forward_bytes = p.input_bytes() + bytes_of(p.out.o);
  r.both_bytes = r.forward_bytes + p.input_bytes() + bytes_of(p.d.o) + p.input_bytes();
  const double K = static_cast<double>(bench.key_dim), V = static_cast<double>(bench.value_dim), C = 64;
  r.flops = (rule.is_delta() ? 6 * K * V + 2 * C * (K + V) : 4 * K * V + (C + 1) * (K + V)) *
            static_cast<double>(bench.batch * bench.tokens * bench.value_heads);
  r.extra_bytes = sizes.saved + std::max(sizes.forward_saving, sizes.backward);
  r.forward_workspace = sizes.forward;
  r.chunk_form = sizes.saved > 0;
  return r;
}

// One token of each of `sequences`, the state in place; graph replays, so that launches do not count.
struct DecodeResult {
  Samples step;
  double bytes = 0;
};
DecodeResult measure_decode(const ReferenceProblem& pattern, const RecurrenceBench& given, int64_t sequences) {
  const Rule& rule = pattern.rule;
  RecurrenceBench bench = given;
  bench.batch = sequences;
  std::deque<Problem> sets;
  std::deque<DeviceMemory> states;
  DecodeResult r;
  const bool v_first = bench.state_layout == "v_first";
  const int64_t rows = v_first ? bench.value_dim : bench.key_dim, columns = v_first ? bench.key_dim : bench.value_dim;
  const std::vector<int64_t> shape{sequences, bench.value_heads, rows, columns},
      precond_shape{sequences, bench.heads, bench.key_dim};
  double total = 0;
  while (sets.empty() || (total < static_cast<double>(kRotation) && sets.size() < 8)) {
    Problem& p = sets.emplace_back(pattern, bench, 1);
    p.desc.state_layout = v_first ? FW_STATE_V_FIRST : FW_STATE_K_FIRST;
    const auto make_state = [&](const std::vector<int64_t>& dims) {
      size_t count = 1;
      for (const int64_t n : dims) count *= static_cast<size_t>(n);
      const DeviceMemory& memory = states.emplace_back(count * sizeof(float));
      memory.fill(0);
      return fw_tensor_of(memory.data(), FW_F32, static_cast<int>(dims.size()), dims.data());
    };
    p.in.initial_state = p.out.final_state = make_state(shape);
    if (rule.uses_precond()) p.in.initial_precond = p.out.final_precond = make_state(precond_shape);
    r.bytes = 2 * (bytes_of(p.out.final_state) + bytes_of(p.out.final_precond)) + p.input_bytes() -
              bytes_of(p.in.initial_state) - bytes_of(p.in.initial_precond) + bytes_of(p.out.o);
    total += r.bytes;
  }
  const fw_sizes sizes = sizes_of(sets[0].desc);
  const DeviceMemory space(sizes.forward);
  r.step = samples_of(device_graph_times(3, static_cast<int>(given.repeats), 32, [&](int i, void* stream) {
    Problem& p = sets[static_cast<size_t>(i) % sets.size()];
    p.desc.stream = stream;
    check(fw_step(&p.desc, &p.in, &p.out, space.data(), space.size()));
  }));
  return r;
}

std::string today() {
  const std::time_t now = std::time(nullptr);
  std::tm date{};
  gmtime_r(&now, &date);
  char text[16];
  std::strftime(text, sizeof(text), "%Y-%m-%d", &date);
  return text;
}

}  // namespace

PlainJson bench_device(const RecurrenceBench& given) {
  RecurrenceBench bench = given;
  if (bench.value_heads == 0) bench.value_heads = bench.heads;
  const DeviceInfo info = device_info();
  const double bandwidth = copy_bandwidth();
  say("{} (driver CUDA {}), copy {:.2f} TB/s; B={} T={} H={} HV={} K={} V={}, {} tensors, {} products; medians "
      "(best) of {}\n",
      info.name, info.driver, 1e-12 * bandwidth, bench.batch, bench.tokens, bench.heads, bench.value_heads,
      bench.key_dim, bench.value_dim, bench.dtype, bench.operands == "f32" ? "f32" : "bf16", bench.repeats);
  Table table;
  table.column("rule", Table::Align::kLeft);
  table.column("form", Table::Align::kLeft);
  for (const char* heading : {"fwd ms", "roofline", "TB/s", "TFLOP/s", "fwd+bwd ms", "roofline", "extra MB",
                              "decode us, 1 seq.", "64 seq.", "64 seq. TB/s", "of copy"}) {
    table.column(heading);
  }
  PlainJson results = PlainJson::array();
  for (const std::string& name : bench.rules) {
    const ReferenceProblem pattern = pattern_of(parse_rule(name), bench);
    const Result r = measure(pattern, bench);
    const DecodeResult one = measure_decode(pattern, bench, 1), many = measure_decode(pattern, bench, 64);
    const double f = r.forward.median(), b = r.both.median();
    const double forward_floor = std::max(r.forward_bytes / bandwidth, r.flops / kMatrixRate),
                 both_floor = std::max(r.both_bytes / bandwidth, 3 * r.flops / kMatrixRate);
    const double decode_rate = many.bytes / many.step.median();
    const auto ms = [](const Samples& s) { return fmt::format("{:.3f} ({:.3f})", 1e3 * s.median(), 1e3 * s.best()); };
    table.row({name, r.chunk_form ? "chunk" : "token", ms(r.forward), fmt::format("{:.0f}%", 100 * forward_floor / f),
               fmt::format("{:.2f}", 1e-12 * r.forward_bytes / f), fmt::format("{:.0f}", 1e-12 * r.flops / f),
               ms(r.both), fmt::format("{:.0f}%", 100 * both_floor / b),
               fmt::format("{:.0f}", 1e-6 * static_cast<double>(r.extra_bytes)),
               fmt::format("{:.2f}", 1e6 * one.step.median()), fmt::format("{:.2f}", 1e6 * many.step.median()),
               fmt::format("{:.2f}", 1e-12 * decode_rate), fmt::format("{:.0f}%", 100 * decode_rate / bandwidth)});
    results.push_back(
        {{"rule", name},
         {"form", r.chunk_form ? "chunk" : "token"},
         {"forward_ms", {{"median", 1e3 * f}, {"best", 1e3 * r.forward.best()}, {"roofline", forward_floor / f}}},
         {"forward_backward_ms", {{"median", 1e3 * b}, {"best", 1e3 * r.both.best()}, {"roofline", both_floor / b}}},
         {"forward_bytes", r.forward_bytes},
         {"forward_flops", r.flops},
         {"workspace_forward_bytes", r.forward_workspace},
         {"extra_bytes", r.extra_bytes},
         {"decode_us", {{"1", 1e6 * one.step.median()}, {"64", 1e6 * many.step.median()}}},
         {"decode_64_bytes_per_s", decode_rate}});
    say_aside("{}: forward {:.3f} ms, both {:.3f} ms\n", name, 1e3 * f, 1e3 * b);
  }
  say("{}", table.text());
  return {{"gpu", info.name},
          {"driver", info.driver},
          {"date", today()},
          {"copy_bytes_per_s", bandwidth},
          {"beside", {{"sequences", bench.beside}, {"tokens", bench.beside_tokens}}},
          {"shape",
           {{"B", bench.batch},
            {"T", bench.tokens},
            {"H", bench.heads},
            {"HV", bench.value_heads},
            {"K", bench.key_dim},
            {"V", bench.value_dim}}},
          {"dtype", bench.dtype},
          {"operands", bench.operands},
          {"gates", bench.gates},
          {"state_layout", bench.state_layout},
          {"decay_scale", bench.decay_scale},
          {"segment", bench.segment},
          {"repeats", bench.repeats},
          {"results", results}};
}

}  // namespace fw::cli
