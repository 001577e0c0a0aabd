// token_forward, token_backward, the preconditioner, sum_groups and upload against the double reference: random rules
// over all axes, random shapes, packed and uniform, bf16 and float32 tensors, both layouts of the state, slots. And
// that bits do not depend on what they must not depend on. token_test [cases] [seed]; the exit status says whether all
// is right.
#include <fmt/format.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <random>

#include "base/error.h"
#include "cuda/kernels/token_run.h"
#include "gpu/upload.h"
#include "reference/compare.h"
#include "reference/fields.h"

namespace fw::cuda::test {
namespace {

std::mt19937_64 tma;
int64_t draw(int64_t low, int64_t high) {
  return low + static_cast<int64_t>(tma() % static_cast<uint64_t>(high - low + 1));
}
bool one_in(int64_t n) { return draw(1, n) == 1; }
template <class T>
T pick(std::initializer_list<T> list) {
  return list.begin()[draw(0, static_cast<int64_t>(list.size()) - 1)];
}

int failures = 0, checks = 0;
double worst_output = 0, worst_gradient = 0;

Rule draw_rule() {
  if (one_in(2)) {
    const auto& list = one_in(2) ? presets() : ablations();
    Rule rule = list[static_cast<size_t>(draw(0, static_cast<int64_t>(list.size()) - 1))].rule;
    // the kernels' own: a call makes other keys before them
    rule.key_source = KeySource::kGiven;
    rule.erase_state = EraseState::kDecayed, rule.erase_write = EraseWrite::kTied;  // a call refuses others
    if (rule.precond_form == PrecondForm::kTanh) rule.precond_form = PrecondForm::kSquash;
    return rule;
  }
  for (;;) {
    std::string text;
    for (const AxisInfo& axis : rule_axes()) {
      if (axis.name == "key_source" || axis.name == "erase_state" || axis.name == "erase_write") continue;
      text += fmt::format("{}={} ", axis.name,
                          axis.values[static_cast<size_t>(draw(0, static_cast<int64_t>(axis.values.size()) - 1))]);
    }
    for (const char* number : {"gain_bound=2", "precond_x=1", "precond_x=2", "norm_eps=0.01", "gain_eps=0.1",
                               "lambda=1", "precond_ridge=0.1"}) {
      if (one_in(4)) text += fmt::format("{} ", number);
    }
    try {
      Rule rule = parse_rule(text);
      if (rule.precond_form == PrecondForm::kTanh) continue;  // a call refuses it
      return rule;
    } catch (const Error&) {
    }
  }
}

double to_bf16(double x) {
  const float f = static_cast<float>(x);
  uint32_t bits;
  std::memcpy(&bits, &f, 4);
  if (!std::isfinite(f)) return x;
  bits = (bits + 0x7fffu + ((bits >> 16) & 1u)) & 0xffff0000u;
  float y;
  std::memcpy(&y, &bits, 4);
  return static_cast<double>(y);
}

// size 0 to 2: a few sequences, longer and longer; 3: one token each; 4: the same of so many that a block has a whole
// head.
ReferenceProblem draw_problem(const TokenRun& run, int64_t size) {
  Rule rule = draw_rule();
  while (size >= 3 && one_in(2) && !rule.uses_precond()) rule = draw_rule();
  ProblemOptions options;
  std::vector<int64_t> offsets = {0};
  const int64_t longest = size == 2 ? pick<int64_t>({64, 65, 130}) : size == 1 ? 24 : 4;
  if (size >= 3) {
    const int64_t count = size == 4 ? draw(132, 140) : draw(1, 5);
    for (int64_t n = 0; n < count; ++n) offsets.push_back(n + 1);
  } else if (one_in(2)) {
    const int64_t T = size == 2 ? longest : draw(0, longest);
    for (int64_t n = draw(1, 2); n > 0; --n) offsets.push_back(offsets.back() + T);
  } else {
    for (int64_t n = draw(1, 4); n > 0; --n) offsets.push_back(offsets.back() + (one_in(3) ? 0 : draw(0, longest)));
    offsets.push_back(offsets.back() + longest);
  }
  options.sequences = SeqLayout(offsets);
  options.H = draw(1, 2);
  options.HV = options.H * draw(1, 2);
  if (size == 4 && options.HV == 1) options.H = options.HV = 2;
  options.K = size == 4   ? pick<int64_t>({8, 64, 100, 128})
              : size == 2 ? pick<int64_t>({8, 33, 64})
                          : pick<int64_t>({1, 8, 33, 64, 100, 128, 129, 250, 256});
  options.V = size == 4   ? pick<int64_t>({20, 40, 65})
              : size == 2 ? pick<int64_t>({1, 20, 64})
                          : pick<int64_t>({1, 20, 64, 100, 128, 200, 260});
  options.gates_per_value_head = one_in(2);
  options.initial_state = !one_in(3);
  options.scale = one_in(2) ? 0.3 : 0;
  options.seed = tma();
  ReferenceProblem p = random_problem(rule, options);
  if (one_in(2)) {
    const double edges[] = {0, -20, -1000, -std::numeric_limits<double>::infinity(), -0.5};
    for (std::vector<double>* g : {&p.in.g, &p.in.precond_g}) {
      for (double& x : *g) {
        if (one_in(3)) x = edges[draw(0, 4)];
      }
    }
  }
  if (run.bf16_inputs) {
    for (const auto& field : reference_input_fields()) {
      if (of_tokens(field.name))
        for (double& x : p.in.*field.values) x = to_bf16(x);
    }
    for (double& x : p.d.o) x = to_bf16(x);
  }
  if (run.bf16_state) {
    for (double& x : p.in.initial_state) x = to_bf16(x);
    for (double& x : p.d.final_state) x = to_bf16(x);
  }
  return p;
}

// By how much results move when every input moves by a part in 10^7 of itself: what float arithmetic may well do.
template <class Struct>
double moves(const Struct& result, const Struct& moved, double floor) {
  return worst(compare(moved, result, floor)).error;
}
ReferenceProblem jittered(ReferenceProblem p) {
  std::mt19937_64 random(1);
  std::normal_distribution<double> normal;
  for (const auto& field : reference_input_fields()) {
    for (double& x : p.in.*field.values) x *= 1 + 1e-7 * normal(random);
  }
  return p;
}

std::string describe(const ReferenceProblem& p, const TokenRun& run) {
  std::string lengths;
  for (int64_t n = 0; n < p.shape.sequences.count(); ++n) lengths += fmt::format(" {}", p.shape.sequences.length(n));
  return fmt::format(
      "{}; H={} HV={} K={} V={} lengths{}; bf16 in {} out {} state {} v_first {} packed {} in place {} padding {} d_o "
      "{} d_final {}",
      to_string(p.rule), p.shape.H, p.shape.HV, p.shape.K, p.shape.V, lengths, run.bf16_inputs, run.bf16_outputs,
      run.bf16_state, run.v_first, run.packed, run.in_place, run.padding, run.d_o, run.d_final);
}

void wrong(const std::string& what, const ReferenceProblem& p, const TokenRun& run) {
  ++failures;
  std::printf("WRONG %s\n  %s\n", what.c_str(), describe(p, run).c_str());
  std::fflush(stdout);
}

template <class Struct>
void check_close(const char* what, const Struct& got, const Struct& expected, double bound, double floor,
                 double& worst_so_far, const ReferenceProblem& p, const TokenRun& run) {
  ++checks;
  const FieldError e = worst(compare(got, expected, floor));
  if (bound < 2e-3) worst_so_far = std::max(worst_so_far, e.error);
  if (!(e.error <= bound))
    wrong(fmt::format("{}: {} is off by {:.3g}, bound {:.3g}", what, e.name, e.error, bound), p, run);
}

template <class Struct>
void check_bits(const char* what, std::span<const ReferenceField<Struct>> fields, const Struct& got,
                const Struct& expected, const std::string& but, const ReferenceProblem& p, const TokenRun& run) {
  ++checks;
  for (const auto& field : fields) {
    const std::vector<double>&x = got.*field.values, &y = expected.*field.values;
    if (field.name == but ||
        (x.size() == y.size() && (x.empty() || std::memcmp(x.data(), y.data(), 8 * x.size()) == 0)))
      continue;
    wrong(fmt::format("{}: bits of {} differ, by {:.3g}", what, field.name, relative_error(x, y)), p, run);
  }
}

TokenRun draw_run() {
  TokenRun run;
  run.bf16_inputs = one_in(2);
  run.bf16_outputs = one_in(4);
  run.bf16_state = one_in(5);
  run.v_first = one_in(2);
  run.packed = one_in(3);
  run.in_place = one_in(2);
  run.padding = one_in(3) ? draw(1, 9) : one_in(3) ? 16 : 0;
  run.d_o = !one_in(8);
  run.d_final = !one_in(4);
  return run;
}

// Outputs of one sequence of a batch, and gradients.
template <class Struct>
Struct part_of(std::span<const ReferenceField<Struct>> fields, const Struct& all, const SeqLayout& sequences,
               int64_t n) {
  Struct part;
  for (const auto& field : fields) {
    const std::vector<double>& values = all.*field.values;
    const std::string name = field.name;
    if (values.empty() || is_parameter(name)) continue;
    const bool tokens = of_tokens(name);
    const int64_t rows = tokens ? sequences.tokens() : sequences.count(),
                  row = static_cast<int64_t>(values.size()) / std::max<int64_t>(1, rows);
    const int64_t first = tokens ? sequences.begin(n) : n, count = tokens ? sequences.length(n) : 1;
    (part.*field.values).assign(values.begin() + first * row, values.begin() + (first + count) * row);
  }
  return part;
}

void one_case(int64_t size) {
  TokenRun run = draw_run();
  if (size >= 3 && !one_in(4)) run.packed = false;
  if (size == 4 && !one_in(4)) run.v_first = true;
  ReferenceProblem p = draw_problem(run, size);
  if (!run.d_o) p.d.o.clear();
  if (!run.d_final) p.d.final_state.clear(), p.d.final_precond.clear();
  const ReferenceOutputs expected = p.forward();
  const ReferenceInputs gradients = p.backward();
  const ReferenceProblem moved = jittered(p);
  const double out_moves = moves(expected, moved.forward(), 0), grad_moves = moves(gradients, moved.backward(), 1e-2);
  if (!(out_moves < 1e-4 && grad_moves < 1e-3)) return;  // no stable rule, here

  TokenDevice device(p, run);
  const ReferenceOutputs out = device.forward();
  const double out_bound = run.bf16_outputs || run.bf16_state ? 6e-3 : std::max(1e-5, 4 * out_moves);
  check_close("forward", out, expected, out_bound, 0, worst_output, p, run);
  const ReferenceInputs grads = TokenDevice(p, run).backward();
  check_close("backward", grads, gradients, run.bf16_state ? 6e-3 : std::max(1e-4, 8 * grad_moves), 1e-2,
              worst_gradient, p, run);

  // Another time, and each sequence alone.
  check_bits("again", reference_output_fields(), TokenDevice(p, run).forward(), out, "", p, run);
  if (one_in(3)) check_bits("again", reference_input_fields(), TokenDevice(p, run).backward(), grads, "", p, run);
  if (one_in(3)) {
    const int64_t n = draw(0, p.shape.sequences.count() - 1);
    const ReferenceProblem alone = slice_sequence(p, n);
    TokenRun other = run;
    other.packed = one_in(2);
    other.in_place = one_in(2);
    check_bits("alone", reference_output_fields(), TokenDevice(alone, other).forward(),
               part_of(reference_output_fields(), out, p.shape.sequences, n), "", alone, other);
    check_bits("alone", reference_input_fields(), TokenDevice(alone, other).backward(),
               part_of(reference_input_fields(), grads, p.shape.sequences, n), "precond_center", alone, other);
  }
  // Cut in two, the state handed on.
  if (!run.bf16_state && !run.bf16_outputs && one_in(2)) {
    int64_t longest = 0;
    for (int64_t n = 0; n < p.shape.sequences.count(); ++n) longest = std::max(longest, p.shape.sequences.length(n));
    const int64_t cut = draw(0, longest);
    ReferenceProblem first = slice_tokens(p, 0, cut), second = slice_tokens(p, cut, longest);
    TokenRun packed = run;
    packed.packed = true;
    const ReferenceOutputs before = TokenDevice(first, packed).forward();
    second.in.initial_state = before.final_state;
    second.in.initial_precond = before.final_precond;
    const ReferenceOutputs after = TokenDevice(second, packed).forward();
    ReferenceOutputs joined = after;
    joined.o.clear();
    const int64_t row = p.shape.HV * p.shape.V;
    for (int64_t n = 0; n < p.shape.sequences.count(); ++n) {
      const SeqLayout &a = first.shape.sequences, &b = second.shape.sequences;
      joined.o.insert(joined.o.end(), before.o.begin() + a.begin(n) * row, before.o.begin() + a.end(n) * row);
      joined.o.insert(joined.o.end(), after.o.begin() + b.begin(n) * row, after.o.begin() + b.end(n) * row);
    }
    if (!p.rule.uses_precond()) {
      check_bits("cut", reference_output_fields(), joined, out, "", p, run);
    } else {
      check_close("cut", joined, expected, std::max(1e-5, 4 * out_moves), 0, worst_output, p, run);
    }
  }
  // Slots: some sequences are left alone.
  if (one_in(3)) {
    TokenRun slots = run;
    for (int64_t n = 0; n < p.shape.sequences.count(); ++n)
      slots.slots.push_back(static_cast<int32_t>(2 * (p.shape.sequences.count() - n)));
    const int64_t skipped = one_in(2) ? draw(0, p.shape.sequences.count() - 1) : -1;
    if (skipped >= 0) slots.slots[static_cast<size_t>(skipped)] = -1;
    const ReferenceOutputs other = TokenDevice(p, slots).forward();
    for (int64_t n = 0; n < p.shape.sequences.count(); ++n) {
      const ReferenceOutputs got = part_of(reference_output_fields(), other, p.shape.sequences, n);
      if (n == skipped) {
        for (const double x : got.o) {
          if (!std::isnan(x)) return wrong("slots: a skipped sequence's o was written", p, run);
        }
        continue;
      }
      check_bits("slots", reference_output_fields(), got, part_of(reference_output_fields(), out, p.shape.sequences, n),
                 "", p, slots);
    }
  }
}

void upload_case(int64_t count) {
  std::vector<int32_t> values(static_cast<size_t>(count));
  for (int32_t& x : values) x = static_cast<int32_t>(tma());
  DeviceBuffer<int32_t> buffer(std::vector<int32_t>(values.size() + 1, 5));
  upload(values.data(), count, buffer.data(), nullptr);
  values.push_back(5);
  ++checks;
  if (buffer.download() != values) {
    ++failures;
    std::printf("WRONG upload of %lld numbers\n", static_cast<long long>(count));
  }
}

}  // namespace
}  // namespace fw::cuda::test

int main(int argc, char** argv) {
  using namespace fw::cuda::test;
  if (!fw::cuda::hopper()) return fw::cuda::kNotRun;
  const int64_t cases = argc > 1 ? std::atoll(argv[1]) : 60;
  const uint64_t seed = argc > 2 ? std::strtoull(argv[2], nullptr, 10) : 1;
  tma.seed(seed);
  for (const int64_t count : {0, 1, 1000, 1001, 8000, 8001, 100001}) upload_case(count);
  for (int64_t i = 0; i < cases; ++i) {
    tma.seed(seed * 1000003 + static_cast<uint64_t>(i));
    const int before = failures;
    one_case(i % 8 == 7 ? 2 : i % 4 == 3 ? 1 : i % 8 == 2 ? 3 : i % 16 == 6 ? 4 : 0);
    if (failures != before)
      std::printf("  case %lld of seed %llu\n", static_cast<long long>(i), static_cast<unsigned long long>(seed));
  }
  std::printf("%d checks, %d wrong; largest error of outputs %.3g, of gradients %.3g\n", checks, failures, worst_output,
              worst_gradient);
  return failures != 0;
}
