// Times forward, backward and decode of rules through the C header.
//
// GFLOP/s counts the algebra of (recurrence.md sections 4 and 5), triangles as half, and nothing else: no
// exponentials, no norms, no gates. Per token and value head, with chunks of C rows (token form: C = 1):
//   forward   6 K V + 2 C (K + V)   (rules without an erase: 4 K V + (C + 1) (K + V))
//   backward  twice that
// GB/s counts the caller's tensors, each read or written once; decode: the state in and out, and one token's inputs.
#include <fmt/format.h>

#include <algorithm>
#include <cstddef>
#include <cstdlib>
#include <memory>
#include <nlohmann/json.hpp>
#include <type_traits>

#include "base/bf16.h"
#include "base/error.h"
#include "base/memory.h"
#include "base/stop.h"
#include "base/threads.h"
#include "cli/bench_report.h"
#include "cli/say.h"
#include "reference/header_tensors.h"
#include "reference/problem.h"
#include "report/progress.h"
#include "report/table.h"
#include "scan/plan.h"

namespace fw::cli {
namespace {

using PlainJson = nlohmann::json;

void check(fw_status status) {
  if (status == FW_OK) return;
  if (status == FW_ERROR_ARGUMENT) fail_usage("{}", fw_last_error());
  if (status == FW_ERROR_MEMORY) fail_io("{}", fw_last_error());
  fail_internal("{}", fw_last_error());
}

struct Free {
  void operator()(void* p) const { fw_free(p); }
};
struct Workspace {
  explicit Workspace(size_t n) : bytes(n), data(fw_alloc(n)) {
    if (!data) fail_io("{}", fw_last_error());
  }
  size_t bytes;
  std::unique_ptr<void, Free> data;
};

int64_t element_bytes(const fw_tensor& t) { return t.dtype == FW_BF16 ? 2 : t.dtype == FW_F32 ? 4 : 8; }

double tensor_bytes(const fw_tensor& t) {
  if (t.data == nullptr) return 0;
  double count = 1;
  for (int i = 0; i < t.rank; ++i) count *= static_cast<double>(t.shape[i]);
  return count * static_cast<double>(element_bytes(t));
}

fw_desc desc_of(const Rule& rule, const RecurrenceBench& bench, fw_form form) {
  fw_desc desc;
  fw_desc_init(&desc);
  desc.rule = to_c(rule);
  desc.dtype = bench.dtype == "f64" ? FW_F64 : FW_F32;
  if (bench.dtype == "bf16") desc.io_dtype = FW_BF16;
  if (bench.operands == "bf16") desc.operands = FW_BF16;
  desc.form = form;
  desc.B = bench.batch;
  desc.T = bench.tokens;
  desc.H = bench.heads;
  desc.HV = bench.value_heads;
  desc.K = bench.key_dim;
  desc.V = bench.value_dim;
  desc.chunk = bench.chunk;
  return desc;
}

// Before memory is taken: the random problem in double, the tensors of both passes, and what the calls ask for.
void require_memory_of(const Rule& rule, const RecurrenceBench& bench, fw_form form) {
  const fw_desc desc = desc_of(rule, bench, form);
  fw_sizes sizes;
  fw_sizes_init(&sizes);
  check(fw_workspace_query(&desc, &sizes));
  const std::string what = fmt::format("a call of B={} T={} H={} HV={} K={} V={}", bench.batch, bench.tokens,
                                       bench.heads, bench.value_heads, bench.key_dim, bench.value_dim);
  const char* advice =
      "lower --tokens, --sequences, --heads, --key-dim or --value-dim; --no-check-memory tries all the same";
  const double element = bench.dtype == "f64" ? 8 : 4;
  const double tokens = static_cast<double>(bench.batch) * static_cast<double>(bench.tokens);
  const double states = static_cast<double>(bench.batch) * static_cast<double>(bench.value_heads) *
                        static_cast<double>(bench.key_dim) * static_cast<double>(bench.value_dim);
  const double outputs =
      tokens * static_cast<double>(bench.value_heads) * static_cast<double>(bench.value_dim) * (8 + 2 * element) +
      states * (8 + element);
  const double bytes = input_values(rule, bench, tokens) * (8 + 2 * element) + outputs;
  require_memory(bytes + static_cast<double>(sizes.forward) + static_cast<double>(sizes.backward) +
                     static_cast<double>(sizes.saved),
                 what, advice);
}

// One problem in type T, contiguous [B, T, ...]: inputs, outputs, cotangents, gradients.
template <class T>
class Problem {
 public:
  Problem(const Rule& rule, const RecurrenceBench& bench, fw_form form) {
    ProblemOptions options;
    options.sequences = SeqLayout::uniform(bench.batch, bench.tokens);
    options.H = bench.heads;
    options.HV = bench.value_heads;
    options.K = bench.key_dim;
    options.V = bench.value_dim;
    options.initial_state = false;
    ReferenceProblem p = random_problem(rule, options);
    for (double& g : p.in.g) g *= bench.decay_scale;
    desc = desc_of(rule, bench, form);
    fw_inputs_init(&in);
    fw_inputs_init(&grads);
    fw_outputs_init(&out);
    fw_outputs_init(&d);
    for (const auto& field : reference_input_fields()) {
      const std::vector<int64_t> shape = field.shape(rule, p.shape);
      for (const auto& named : kInputTensors) {
        if (shape.empty() || std::string_view(named.name) != field.name || field.optional) continue;
        in.*named.tensor = tensor(shape, &(p.in.*field.values));
        grads.*named.tensor = tensor(shape, nullptr);
      }
    }
    const std::vector<int64_t> o_shape{bench.batch * bench.tokens, bench.value_heads, bench.value_dim};
    out.o = tensor(o_shape, nullptr);
    d.o = tensor(o_shape, &p.d.o);
    out.final_state = state_tensor({bench.batch, bench.value_heads, bench.key_dim, bench.value_dim});
    if (rule.uses_precond()) out.final_precond = state_tensor({bench.batch, bench.heads, bench.key_dim});
  }

  fw_desc desc;
  fw_inputs in, grads;
  fw_outputs out, d;

 private:
  // Shapes of the reference begin with all tokens (which are B sequences of T) or, for the center, with heads.
  fw_tensor tensor(std::vector<int64_t> shape, const std::vector<double>* values) {
    size_t count = 1;
    for (const int64_t n : shape) count *= static_cast<size_t>(n);
    if (shape.size() > 1) {
      shape[0] = desc.T;
      shape.insert(shape.begin(), desc.B);
    }
    T* const memory = zeros(count);
    if (desc.io_dtype == FW_BF16 && shape.size() > 1) {
      Bf16* bits = reinterpret_cast<Bf16*>(memory);
      for (size_t i = 0; values != nullptr && i < count; ++i) {
        const float value = static_cast<float>((*values)[i]);
        round_to_bf16(1, &value, bits + i);
      }
      return fw_tensor_of(bits, FW_BF16, static_cast<int>(shape.size()), shape.data());
    }
    if (values != nullptr)
      std::transform(values->begin(), values->end(), memory, [](double x) { return static_cast<T>(x); });
    return fw_tensor_of(memory, static_cast<fw_dtype>(desc.dtype), static_cast<int>(shape.size()), shape.data());
  }
  fw_tensor state_tensor(const std::vector<int64_t>& shape) {
    size_t count = 1;
    for (const int64_t n : shape) count *= static_cast<size_t>(n);
    return fw_tensor_of(zeros(count), static_cast<fw_dtype>(desc.dtype), static_cast<int>(shape.size()), shape.data());
  }

  // At a multiple of 64 bytes, as PyTorch and models have tensors.
  T* zeros(size_t count) {
    T* const data = static_cast<T*>(memory_.emplace_back(count * sizeof(T)).data.get());
    std::fill_n(data, count, T(0));
    return data;
  }

  std::vector<Workspace> memory_;
};

// Decodes `count` tokens of every sequence, one at a time, from the problem's own inputs, the state in place. Planned
// once, as models do it.
template <class T>
class Decoder {
 public:
  explicit Decoder(Problem<T>& problem) : desc_(problem.desc), in_(problem.in), out_(problem.out) {
    desc_.T = 1;
    // the problem has no initial states: these are tensors of tokens and the center
    for (const auto& named : kInputTensors) {
      fw_tensor& t = in_.*named.tensor;
      if (t.data != nullptr && t.rank > 1) moving_.push_back(&t);
    }
    in_.initial_state = out_.final_state;
    in_.initial_precond = out_.final_precond;
    moving_.push_back(&out_.o);
    for (fw_tensor* t : moving_) t->shape[1] = 1;
    fw_sizes sizes;
    fw_sizes_init(&sizes);
    fw_plan* plan = nullptr;
    check(fw_plan_create(&desc_, 1, &plan));
    plan_.reset(plan);
    check(fw_plan_sizes(plan, &sizes));
    workspace_ = std::make_unique<Workspace>(sizes.forward);
  }
  Decoder(const Decoder&) = delete;
  Decoder& operator=(const Decoder&) = delete;

  void run(int64_t count) {
    std::vector<void*> begin;
    for (const fw_tensor* t : moving_) begin.push_back(t->data);
    for (int64_t i = 0; i < count; ++i) {
      check(fw_plan_step(plan_.get(), &in_, &out_, workspace_->data.get(), workspace_->bytes));
      for (fw_tensor* t : moving_) t->data = static_cast<std::byte*>(t->data) + t->stride[1] * element_bytes(*t);
    }
    for (size_t i = 0; i < moving_.size(); ++i) moving_[i]->data = begin[i];
  }
  // Bytes of one step: the state in and out, and one token.
  double bytes() const {
    double sum = 2 * (tensor_bytes(out_.final_state) + tensor_bytes(out_.final_precond));
    for (const fw_tensor* t : moving_) sum += tensor_bytes(*t);
    return sum;
  }

 private:
  fw_desc desc_;
  fw_inputs in_;
  fw_outputs out_;
  std::vector<fw_tensor*> moving_;
  struct Destroy {
    void operator()(fw_plan* plan) const { fw_plan_destroy(plan); }
  };
  std::unique_ptr<fw_plan, Destroy> plan_;
  std::unique_ptr<Workspace> workspace_;
};

struct Result {
  Samples forward, both, ratio, decode;  // seconds of a call, of a call, backward / forward, seconds of one step
  double forward_flops = 0, forward_bytes = 0, decode_bytes = 0;
  int64_t chunk = 0;
};

template <class T>
Result measure(const Rule& rule, const RecurrenceBench& bench, fw_form form) {
  require_memory_of(rule, bench, form);
  Problem<T> p(rule, bench, form);
  fw_sizes sizes;
  fw_sizes_init(&sizes);
  check(fw_workspace_query(&p.desc, &sizes));
  const Workspace forward_space(sizes.forward), backward_space(sizes.backward), saved(sizes.saved);
  Decoder<T> decoder(p);
  const int64_t steps = std::min<int64_t>(bench.tokens, 64);

  const auto forward = [&] {
    check(fw_forward(&p.desc, &p.in, &p.out, nullptr, 0, forward_space.data.get(), forward_space.bytes));
  };
  const auto forward_saving = [&] {
    check(fw_forward(&p.desc, &p.in, &p.out, saved.data.get(), saved.bytes, forward_space.data.get(),
                     forward_space.bytes));
  };
  const auto backward = [&] {
    check(fw_backward(&p.desc, &p.in, &p.d, &p.grads, saved.data.get(), saved.bytes, backward_space.data.get(),
                      backward_space.bytes));
  };
  // Once untimed, so that all memory has been touched; then one of each in turn, so that a slow moment meets all alike.
  Result r;
  forward_saving();
  backward();
  decoder.run(1);
  for (int64_t i = 0; i < bench.repeats; ++i) {
    stop_point("bench", i, bench.repeats, "repeats of this rule");
    const double f = seconds_of(forward);
    const double s = seconds_of(forward_saving);
    const double b = seconds_of(backward);
    r.forward.add(f);
    r.both.add(s + b);
    r.ratio.add(b / f);
    decoder.run(1);  // backward has taken the states' place in the caches
    r.decode.add(seconds_of([&] { decoder.run(steps); }) / static_cast<double>(steps));
  }

  const Plan plan = make_plan(p.desc);
  r.chunk = plan.token_form(0) ? 1 : std::min(plan.chunk, bench.tokens);
  const double K = static_cast<double>(bench.key_dim), V = static_cast<double>(bench.value_dim),
               C = static_cast<double>(r.chunk);
  const double per_head = rule.is_delta() ? 6 * K * V + 2 * C * (K + V) : 4 * K * V + (C + 1) * (K + V);
  // its triangles, and what it writes
  const double of_second_key = rule.uses_erase_write() ? 2 * K * V + 2 * C * (K + V) : 0;
  r.forward_flops = (per_head + of_second_key) * static_cast<double>(bench.batch * bench.tokens * bench.value_heads);
  for (const auto& named : kInputTensors) r.forward_bytes += tensor_bytes(p.in.*named.tensor);
  r.forward_bytes += tensor_bytes(p.out.o) + tensor_bytes(p.out.final_state) + tensor_bytes(p.out.final_precond);
  r.decode_bytes = decoder.bytes();
  return r;
}

}  // namespace

double input_values(const Rule& rule, const RecurrenceBench& bench, double tokens) {
  // Shapes of the reference begin with all tokens, here one, or, for the center, with heads; their product is made in
  // double, as it may be huge.
  const ReferenceShape shape = {
      SeqLayout::uniform(1, 1), bench.heads, bench.value_heads, bench.key_dim, bench.value_dim, 0, 0, 0};
  double sum = 0;
  for (const auto& field : reference_input_fields()) {
    const std::vector<int64_t> dims = field.shape(rule, shape);
    if (dims.empty() || field.optional) continue;
    double count = dims.size() > 1 ? tokens : 1;
    for (const int64_t n : dims) count *= static_cast<double>(n);
    sum += count;
  }
  return sum;
}

fw_form form_of(const std::string& name) {
  if (name == "auto") return FW_FORM_AUTO;
  if (name == "token") return FW_FORM_TOKEN;
  if (name == "chunk") return FW_FORM_CHUNK;
  fail_usage("--form: expected auto, chunk or token, got '{}'", name);
}

PlainJson bench_recurrence(const RecurrenceBench& given) {
  RecurrenceBench bench = given;
  if (bench.value_heads == 0) bench.value_heads = bench.heads;
  const fw_form form = form_of(bench.form);
  if (bench.dtype != "f32" && bench.dtype != "f64" && bench.dtype != "bf16")
    fail_usage("--dtype: expected f32, f64 or bf16, got '{}'", bench.dtype);
  if (bench.operands != "f32" && (bench.operands != "bf16" || bench.dtype == "f64")) {
    fail_usage("--operands: expected f32 or, unless --dtype is f64, bf16, got '{}'", bench.operands);
  }
  std::vector<Rule> rules;
  for (const std::string& name : bench.rules) rules.push_back(parse_rule(name));

  say("recurrence: B={} T={} H={} HV={} K={} V={}, {}{}, {} threads, {}; {} repeats, median (best)\n", bench.batch,
      bench.tokens, bench.heads, bench.value_heads, bench.key_dim, bench.value_dim, bench.dtype,
      bench.operands == "bf16" ? " with bf16 products" : "", num_threads(), fw_simd_target(), bench.repeats);
  std::fflush(stdout);
  Table table;
  table.column("rule", Table::Align::kLeft);
  table.column("form", Table::Align::kLeft);
  for (const char* heading : {"forward us/token", "fwd+bwd us/token", "bwd/fwd", "decode us/token", "fwd GFLOP/s",
                              "f+b GFLOP/s", "fwd GB/s", "decode GB/s"}) {
    table.column(heading);
  }
  PlainJson results = PlainJson::array();
  const double tokens = static_cast<double>(bench.batch * bench.tokens), sequences = static_cast<double>(bench.batch);
  for (size_t i = 0; i < rules.size(); ++i) {
    stop_point("bench", static_cast<int64_t>(i), static_cast<int64_t>(rules.size()), "rules");
    if (can_redraw(2)) fmt::print(stderr, "\r\033[K{} ({} of {})", bench.rules[i], i + 1, rules.size());
    const Result r =
        bench.dtype == "f64" ? measure<double>(rules[i], bench, form) : measure<float>(rules[i], bench, form);
    const auto us = [](const Samples& s, double count) {
      return fmt::format("{:.2f} ({:.2f})", 1e6 * s.median() / count, 1e6 * s.best() / count);
    };
    const std::string form_text = r.chunk == 1 ? "token" : fmt::format("chunk {}", r.chunk);
    table.row({bench.rules[i], form_text, us(r.forward, tokens), us(r.both, tokens),
               fmt::format("{:.2f}", r.ratio.median()), us(r.decode, sequences),
               fmt::format("{:.1f}", 1e-9 * r.forward_flops / r.forward.median()),
               fmt::format("{:.1f}", 3e-9 * r.forward_flops / r.both.median()),
               fmt::format("{:.1f}", 1e-9 * r.forward_bytes / r.forward.median()),
               fmt::format("{:.1f}", 1e-9 * r.decode_bytes / r.decode.median())});
    const auto both_figures = [](const Samples& s, double factor) {
      return PlainJson{{"median", factor * s.median()}, {"best", factor * s.best()}};
    };
    results.push_back({{"rule", bench.rules[i]},
                       {"form", r.chunk == 1 ? "token" : "chunk"},
                       {"chunk", r.chunk},
                       {"forward_us_per_token", both_figures(r.forward, 1e6 / tokens)},
                       {"forward_backward_us_per_token", both_figures(r.both, 1e6 / tokens)},
                       {"backward_over_forward", both_figures(r.ratio, 1)},
                       {"decode_us_per_token", both_figures(r.decode, 1e6 / sequences)},
                       {"forward_gflops", 1e-9 * r.forward_flops / r.forward.median()},
                       {"forward_backward_gflops", 3e-9 * r.forward_flops / r.both.median()},
                       {"forward_gb_per_s", 1e-9 * r.forward_bytes / r.forward.median()},
                       {"decode_gb_per_s", 1e-9 * r.decode_bytes / r.decode.median()}});
  }
  if (can_redraw(2)) fmt::print(stderr, "\r\033[K");
  say("{}", table.text());
  return {{"shape",
           {{"B", bench.batch},
            {"T", bench.tokens},
            {"H", bench.heads},
            {"HV", bench.value_heads},
            {"K", bench.key_dim},
            {"V", bench.value_dim}}},
          {"dtype", bench.dtype},
          {"operands", bench.operands},
          {"decay_scale", bench.decay_scale},
          {"repeats", bench.repeats},
          {"results", results}};
}

}  // namespace fw::cli
