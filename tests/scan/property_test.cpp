// Properties of the recurrence for random rules (any combination of axes) and random shapes, through the C header: what
// the result does not depend on, and that backward is the adjoint of forward. Where the order of sums is the same the
// bits are compared, else the bounds are those of forms_test.cpp.
//
// The seed is fixed and printed; RC_PARAMS="seed=7 max_success=1000" test_scan --gtest_filter='Property.*' looks
// elsewhere, and a failure prints the RC_PARAMS that reproduces it, after it has looked for the smallest case that
// fails.
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <rapidcheck.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <numeric>
#include <sstream>

#include "base/error.h"
#include "base/random.h"
#include "base/threads.h"
#include "reference/fields.h"
#include "support/recurrence.h"

namespace fw::testing {
namespace {

#if defined(FW_SMALL_TESTS)
constexpr const char* kParams = "seed=20 max_success=8";
#else
constexpr const char* kParams = "seed=20 max_success=200";
#endif
// RapidCheck reads it at the first property.
const int kParamsAreSet = setenv("RC_PARAMS", kParams, 0);

// RC_GTEST_PROP, but that every property has a seed of its own and with it other cases than its neighbours.
void check_property(void (*property)()) {
  rc::detail::TestMetadata metadata;
  metadata.id = metadata.description =
      std::string("Property/") + ::testing::UnitTest::GetInstance()->current_test_info()->name();
  rc::detail::TestParams params = rc::detail::configuration().testParams;
  for (const char c : metadata.id) params.seed = params.seed * 31 + static_cast<unsigned char>(c);
  const rc::detail::TestResult result = rc::detail::checkTestable(property, metadata, params);
  if (result.is<rc::detail::SuccessResult>()) return;
  std::ostringstream text;
  rc::detail::printResultMessage(result, text);
  FAIL() << text.str();
}
#define FW_PROPERTY(Name)                                   \
  void property_##Name();                                   \
  TEST(Property, Name) { check_property(property_##Name); } \
  void property_##Name()

constexpr double kDoubleBound = 1e-10;
constexpr double kFloatBound = 2e-5;
// Denominators are at least this share of the norm of all fields together. A gradient that is zero but for rounding has
// no digits of its own. An example is that of a key with one channel, of which the norm takes away all but 1e-6. In
// float the bound times the share is three units of rounding of the whole.
constexpr double kDoubleFloor = 1e-3;
constexpr double kFloatFloor = 1e-2;

// --- running and comparing ---

// Forward and backward of a problem; the gradients in `in` and the outputs in `d` of a problem, so that slices of
// problems are slices of results too.
Problem results(const Problem& problem, const HeaderRun& run) {
  Problem r = problem;
  r.in = header_backward(problem, run);
  r.d = header_forward(problem, run);
  return r;
}

std::string context(const Problem& problem, const HeaderRun& run) {
  std::string lengths;
  for (int64_t n = 0; n < problem.shape.sequences.count(); ++n)
    lengths += fmt::format(" {}", problem.shape.sequences.length(n));
  return fmt::format("\n{}; lengths{}; {} form {} chunk {} layout {} padding {}", describe(problem), lengths,
                     run.dtype == FW_F32 ? "float" : "double", static_cast<int>(run.form), run.chunk,
                     static_cast<int>(run.state_layout), run.row_padding);
}

void require(const ::testing::AssertionResult& result, const Problem& problem, const HeaderRun& run) {
  if (!result) RC_FAIL(std::string(result.message()) + context(problem, run));
}

void require_close(const Problem& got, const Problem& expected, const Problem& problem, const HeaderRun& run) {
  const double bound = run.dtype == FW_F32 ? kFloatBound : kDoubleBound,
               floor = run.dtype == FW_F32 ? kFloatFloor : kDoubleFloor;
  require(close(got.d, expected.d, bound, floor), problem, run);
  require(close(got.in, expected.in, bound, floor), problem, run);
}

// Equal bits in every field but those named: a sum over sequences may take them in another order.
void require_same_bits(const Problem& got, const Problem& expected, const Problem& problem, const HeaderRun& run,
                       const std::string& but = "") {
  const auto check = [&](const char* name, const std::vector<double>& x, const std::vector<double>& y) {
    if (name == but ||
        (x.size() == y.size() && (x.empty() || std::memcmp(x.data(), y.data(), x.size() * sizeof(double)) == 0)))
      return;
    RC_FAIL(fmt::format("{}: the bits differ, by {:.3g}{}", name, relative_error(x, y), context(problem, run)));
  };
  for (const auto& field : reference_output_fields()) check(field.name, got.d.*field.values, expected.d.*field.values);
  for (const auto& field : reference_input_fields()) check(field.name, got.in.*field.values, expected.in.*field.values);
}

// Several problems (or results) of one rule and shape as one batch.
Problem joined(const std::vector<Problem>& parts) {
  Problem all = parts.front();
  std::vector<int64_t> offsets = {0};
  for (const Problem& part : parts) {
    for (int64_t n = 0; n < part.shape.sequences.count(); ++n)
      offsets.push_back(offsets.back() + part.shape.sequences.length(n));
  }
  all.shape.sequences = SeqLayout(offsets);
  const auto append = [](const char* name, std::vector<double>& to, const std::vector<double>& from) {
    if (!is_parameter(name)) to.insert(to.end(), from.begin(), from.end());
  };
  for (size_t i = 1; i < parts.size(); ++i) {
    for (const auto& field : reference_output_fields())
      append(field.name, all.d.*field.values, parts[i].d.*field.values);
    for (const auto& field : reference_input_fields())
      append(field.name, all.in.*field.values, parts[i].in.*field.values);
  }
  return all;
}

std::vector<Problem> sequences_of(const Problem& problem) {
  std::vector<Problem> list;
  for (int64_t n = 0; n < problem.shape.sequences.count(); ++n) list.push_back(slice_sequence(problem, n));
  return list;
}

// The results of the first and the second part of every sequence as those of the whole.
Problem rejoined(const Problem& first, const Problem& second) {
  std::vector<Problem> whole;
  for (int64_t n = 0; n < first.shape.sequences.count(); ++n) {
    Problem head = slice_sequence(first, n);
    const Problem tail = slice_sequence(second, n);
    const auto join = [](const std::string& name, std::vector<double>& x, const std::vector<double>& y) {
      if (of_tokens(name)) x.insert(x.end(), y.begin(), y.end());
      if (name.find("final_") == 0) x = y;
    };
    for (const auto& field : reference_output_fields()) join(field.name, head.d.*field.values, tail.d.*field.values);
    for (const auto& field : reference_input_fields()) join(field.name, head.in.*field.values, tail.in.*field.values);
    head.shape.sequences = SeqLayout::uniform(1, head.shape.sequences.tokens() + tail.shape.sequences.tokens());
    whole.push_back(std::move(head));
  }
  Problem all = joined(whole);
  for (size_t i = 0; i < all.in.precond_center.size(); ++i)
    all.in.precond_center[i] = first.in.precond_center[i] + second.in.precond_center[i];
  return all;
}

// --- random problems ---

// low to high. RapidCheck would begin with small ranges; here every case may have any value.
int64_t draw(const char* name, int64_t low, int64_t high) {
  return *rc::gen::resize(rc::kNominalSize, rc::gen::inRange<int64_t>(low, high + 1)).as(name);
}
bool draw_bool(const char* name) { return draw(name, 0, 1) == 1; }
uint64_t draw_seed() {
  return static_cast<uint64_t>(
      *rc::gen::noShrink(rc::gen::resize(rc::kNominalSize, rc::gen::inRange<int64_t>(0, 1 << 30))).as("seed"));
}

// Any combination of the axes that validate() accepts.
Rule draw_rule() {
  std::string text;
  for (const AxisInfo& axis : rule_axes()) {
    const int64_t value = draw(std::string(axis.name).c_str(), 0, static_cast<int64_t>(axis.values.size()) - 1);
    text += fmt::format("{}={} ", axis.name, axis.values[static_cast<size_t>(value)]);
  }
  for (const char* number : {"gain_bound=2", "precond_x=1", "precond_x=2", "norm_eps=0.01", "gain_eps=0.1", "lambda=1",
                             "precond_ridge=0.1"}) {
    if (draw(number, 0, 3) == 3) text += fmt::format("{} ", number);
  }
  try {
    return parse_rule(text);
  } catch (const Error&) {
    RC_DISCARD("not a valid combination: " + text);
  }
}

int64_t draw_length() {
  const int64_t kind = draw("kind of length", 0, 7);
  return kind < 2 ? kind : draw("length", 2, 100);
}

// Every value moved by a random part of itself, as rounding does.
void jitter(std::vector<double>& x, double by, Random& random) {
  for (double& y : x) y *= 1 + by * random.normal();
}

// By how much more than its inputs a problem's results move, forward and backward: with condition c no arithmetic of n
// bits can give more digits than c 2^-n leaves. Infinite where a state grows out of what float can hold.
double condition(const Problem& problem) {
  constexpr double kBy = 1e-8, kLarge = 1e12;
  Random random(1);
  Problem moved = problem;
  for (const auto& field : reference_input_fields()) jitter(moved.in.*field.values, kBy, random);
  const Problem before = results(problem, {}), after = results(moved, {});
  double largest = 0;
  const auto look_at = [&](const std::vector<double>& values) {
    for (const double x : values) largest = std::max(largest, std::abs(x));
  };
  for (const auto& field : reference_input_fields()) look_at(before.in.*field.values);
  for (const auto& field : reference_output_fields()) look_at(before.d.*field.values);
  if (largest > kLarge) return std::numeric_limits<double>::infinity();
  return std::max(worst(compare(after.d, before.d, kDoubleFloor)).error,
                  worst(compare(after.in, before.in, kDoubleFloor)).error) /
         kBy;
}

// How much larger a state gets on its way when nothing is written, as the reads see it: against reads of a state that
// stays as it was. A chunk adds up all that was written and erased in it, so that what grows and is erased again costs
// digits too.
double growth(Problem problem) {
  Random random(2);
  std::fill(problem.in.v.begin(), problem.in.v.end(), 0.0);
  problem.in.initial_state.resize(problem.d.final_state.size());
  for (double& x : problem.in.initial_state) x = random.normal();
  const auto longest_row = [&] {
    const std::vector<double> o = header_forward(problem, {}).o;
    double longest = 0;
    for (auto row = o.begin(); row != o.end(); row += problem.shape.V)
      longest = std::max(longest, std::inner_product(row, row + problem.shape.V, row, 0.0));
    return std::sqrt(longest);
  };
  const double moving = longest_row();
  problem.rule.update = Update::kAdditive;
  problem.rule.decay = Decay::kNone;
  problem.rule.key_source = KeySource::kGiven;
  if (problem.in.k.empty()) problem.in.k = problem.in.q;  // nothing is written
  const double resting = longest_row();
  return moving > 0 ? moving / resting : 0;
}

// What stable rules stay below.
constexpr double kStable = 30;

bool unstable(const Problem& problem) { return growth(problem) > kStable || condition(problem) > kStable; }

// Some combinations of axes are no stable rule for some inputs: a gain up to 2 with query feedback, an erase gate on
// long raw keys. Their states grow from token to token, and rounding with them. Such a problem gets smaller gates, then
// fewer tokens, until it is as well conditioned as a stable rule.
Problem tamed(Problem problem) {
  for (int i = 0; i < 6 && unstable(problem); ++i) {
    for (std::vector<double>* gate : {&problem.in.beta, &problem.in.lambda, &problem.in.erase_gate}) {
      for (double& x : *gate) x = static_cast<double>(static_cast<float>(0.7 * x));
    }
  }
  for (int64_t most = 64; most > 1 && unstable(problem); most /= 2) problem = slice_tokens(problem, 0, most);
  return problem;
}

Problem draw_problem() {
  const Rule rule = draw_rule();
  std::vector<int64_t> offsets = {0};
  for (int64_t n = draw("N", 1, 3); n > 0; --n) offsets.push_back(offsets.back() + draw_length());
  ProblemOptions options;
  options.sequences = SeqLayout(offsets);
  options.H = draw("H", 1, 2);
  options.HV = options.H * draw("HV / H", 1, 2);
  options.K = draw("K", 1, 40);
  // more than one block of value columns
  options.V = draw("kind of V", 0, 9) == 9 ? draw("V", 125, 140) : draw("V", 1, 40);
  options.gates_per_value_head = draw_bool("gates per value head");
  options.initial_state = draw_bool("initial state");
  options.edge_decays = draw_bool("edge decays");
  options.scale = draw_bool("scale") ? 0.3 : 0;
  options.seed = draw_seed();
  return random_problem(rule, options);
}

HeaderRun draw_run() {
  HeaderRun run;
  run.dtype = draw_bool("float") ? FW_F32 : FW_F64;
  run.form = static_cast<fw_form>(draw("form", 0, FW_FORM_DECODE));
  run.chunk = draw_bool("default chunk") ? 0 : draw("chunk", 1, 130);
  return run;
}

class Threads {
 public:
  explicit Threads(int n) { set_num_threads(n); }
  ~Threads() { set_num_threads(0); }
};

// --- what results do not depend on ---

FW_PROPERTY(ChunkSizesAndFormsAgreeUpToRounding) {
  const Problem problem = tamed(draw_problem());
  const HeaderRun run = draw_run();
  HeaderRun other = draw_run();
  other.dtype = run.dtype;
  require_close(results(problem, run), results(problem, other), problem, run);
}

FW_PROPERTY(APackedSequenceHasTheBitsThatItHasAlone) {
  const Problem problem = draw_problem();
  HeaderRun run = draw_run();
  const Problem packed = results(problem, run);
  std::vector<Problem> alone;
  for (const Problem& sequence : sequences_of(problem)) alone.push_back(results(sequence, run));
  require_same_bits(joined(alone), packed, problem, run, "precond_center");
}

FW_PROPERTY(TheOrderOfTheSequencesChangesNoBit) {
  const Problem problem = draw_problem();
  const HeaderRun run = draw_run();
  std::vector<Problem> sequences = sequences_of(problem), result = sequences_of(results(problem, run));
  const auto first = static_cast<std::ptrdiff_t>(draw("first", 0, problem.shape.sequences.count() - 1));
  for (std::vector<Problem>* list : {&sequences, &result}) {
    std::rotate(list->begin(), list->begin() + first, list->end());
    if (list->size() > 2) std::swap((*list)[0], (*list)[1]);
  }
  require_same_bits(results(joined(sequences), run), joined(result), problem, run, "precond_center");
}

// Also: a batch of equally long sequences as [B, T] and as one row with cu_seqlens of either width.
FW_PROPERTY(PaddingLayoutsAndWhatWasSavedChangeNoBit) {
  const Problem problem = draw_problem();
  const HeaderRun run = draw_run();
  HeaderRun other = run;
  other.row_padding = draw("row padding", 1, 9);
  other.state_layout = draw_bool("V first") ? FW_STATE_V_FIRST : FW_STATE_K_FIRST;
  other.seqlens = static_cast<int>(32 * draw("seqlens / 32", 0, 2));
  other.state_in_place = draw_bool("in place");
  other.saved = draw_bool("saved");
  require_same_bits(results(problem, other), results(problem, run), problem, other);
}

FW_PROPERTY(TheNumberOfThreadsChangesNoBit) {
  const Problem problem = draw_problem();
  const HeaderRun run = draw_run();
  const auto with = [&](int threads) {
    const Threads set(threads);
    return results(problem, run);
  };
  require_same_bits(with(2), with(1), problem, run);
}

// S and A handed on, and their gradients handed back. Token by token the sums have the same order, and so have those of
// chunks when the cut lies between two of them.
FW_PROPERTY(ASequenceCutInTwoIsTheWhole) {
  const Problem problem = tamed(draw_problem());
  const HeaderRun run = draw_run();
  const Problem whole = results(problem, run);
  int64_t longest = 0;
  for (int64_t n = 0; n < problem.shape.sequences.count(); ++n)
    longest = std::max(longest, problem.shape.sequences.length(n));
  const int64_t cut = draw("cut", 0, longest);
  Problem first = slice_tokens(problem, 0, cut), second = slice_tokens(problem, cut, longest);
  const ReferenceOutputs before = header_forward(first, run);
  second.in.initial_state = before.final_state;
  second.in.initial_precond = before.final_precond;
  const Problem after = results(second, run);
  first.d.final_state = after.in.initial_state;
  first.d.final_precond = after.in.initial_precond;
  const Problem parts = rejoined(results(first, run), after);
  require_close(parts, whole, problem, run);
  const bool same_order = run.form == FW_FORM_TOKEN || run.form == FW_FORM_DECODE ||
                          (run.form == FW_FORM_CHUNK && run.chunk > 0 && cut % run.chunk == 0);
  if (!same_order) return;
  Problem forward = whole, forward_parts = parts;
  forward.in = forward_parts.in = {};
  require_same_bits(forward_parts, forward, problem, run);
}

FW_PROPERTY(DecodingStepsHaveTheBitsOfTheTokenForm) {
  const Problem problem = draw_problem();
  HeaderRun run = draw_run();
  run.form = draw("decode form", 0, 1) == 0 ? FW_FORM_TOKEN : FW_FORM_DECODE;
  const int64_t tokens = draw("tokens per call", 1, 5);
  Problem steps = problem, whole = problem;
  steps.in = whole.in = {};
  steps.d = header_steps(problem, run, tokens);
  whole.d = header_forward(problem, run);
  require_same_bits(steps, whole, problem, run);
}

// --- backward is the adjoint of forward ---

double dot(const std::vector<double>& x, const std::vector<double>& y) {
  double sum = 0;
  for (size_t i = 0; i < x.size(); ++i) sum += x[i] * y[i];
  return sum;
}

// Sums over all fields of <x, y>, and of |x| |y|, which is the scale of its rounding.
struct Product {
  double value = 0, scale = 0;
};
template <class Struct>
Product product(std::span<const ReferenceField<Struct>> fields, const Struct& x, const Struct& y) {
  Product sum;
  for (const auto& field : fields) {
    if ((x.*field.values).empty() || (y.*field.values).empty()) continue;
    sum.value += dot(x.*field.values, y.*field.values);
    sum.scale += std::sqrt(dot(x.*field.values, x.*field.values) * dot(y.*field.values, y.*field.values));
  }
  return sum;
}

// Outputs are linear in the values and the initial state together, with all else fixed: <dO, J x> needs no difference
// there, and holds up to the rounding of two scalar products.
FW_PROPERTY(BackwardIsTheAdjointInValuesAndStateExactly) {
  Problem problem = tamed(draw_problem());
  const HeaderRun run = draw_run();
  problem.d.final_precond.clear();  // A does not depend on them
  ReferenceInputs x;
  x.v = problem.in.v;
  x.initial_state = problem.in.initial_state;
  const Product left = product(reference_output_fields(), problem.d, header_forward(problem, run));
  const Product right = product(reference_input_fields(), header_backward(problem, run), x);
  const double bound = (run.dtype == FW_F32 ? kFloatBound : 1e-13) * std::max(left.scale, right.scale);
  if (!(std::abs(left.value - right.value) <= bound)) {
    RC_FAIL(fmt::format("<dO, J x> = {:.17g}, <J^T dO, x> = {:.17g}, bound {:.3g}{}", left.value, right.value, bound,
                        context(problem, run)));
  }
}

// The derivative along a random direction x in all inputs at once, each moved in proportion to its size (so that the
// logarithm of a tiny A is as smooth as all else). Decays of 0, -1e4 and -inf stay where they are: the first has no
// neighbour on one side, the others no influence.
FW_PROPERTY(BackwardIsTheAdjointOfForward) {
  const Problem problem = tamed(draw_problem());
  HeaderRun run = draw_run();
  run.dtype = FW_F64;
  Random random(draw_seed());
  ReferenceInputs x = problem.in;
  for (const auto& field : reference_input_fields()) {
    const bool decay = std::string(field.name).ends_with("g");
    for (double& y : x.*field.values) y = decay && (y == 0 || y <= -1e4) ? 0.0 : y * random.normal();
  }
  const Product right = product(reference_input_fields(), header_backward(problem, run), x);
  // <dO, forward(in + h x)> - <dO, forward(in - h x)>, and from two of these the derivative by central differences of
  // fourth order.
  double size = 0;
  const auto value = [&](double h) {
    Problem moved = problem;
    for (const auto& field : reference_input_fields()) {
      const std::vector<double>& direction = x.*field.values;
      for (size_t i = 0; i < direction.size(); ++i) {
        if (direction[i] != 0) (moved.in.*field.values)[i] += h * direction[i];
      }
    }
    const Product p = product(reference_output_fields(), problem.d, header_forward(moved, run));
    size = std::max(size, p.scale);
    return p.value;
  };
  constexpr double kStep = 1e-4;
  double odd[4], left[3];
  for (int i = 0; i < 4; ++i) odd[i] = value(std::ldexp(kStep, i)) - value(-std::ldexp(kStep, i));
  for (int i = 0; i < 3; ++i) left[i] = (8 * odd[i] - odd[i + 1]) / (12 * std::ldexp(kStep, i));
  // The bound. Truncation falls by 16 when the step is halved. It falls by 2 or more where a second derivative jumps
  // between the points (the preconditioner's squash at 0). It is less than what the two longer steps differ by from the
  // shortest. Rounding: that of the sums, 1e-15 of their size a unit of condition, over the step.
  const double bound =
      std::max(std::abs(left[0] - left[1]), std::abs(left[0] - left[2])) + kStable * 1e-15 * size / kStep;
  RC_ASSERT(bound <= 1e-6 * (right.scale + size));  // else this says nothing
  if (!(std::abs(left[0] - right.value) <= bound)) {
    RC_FAIL(fmt::format("<dO, J x> = {:.17g}, <J^T dO, x> = {:.17g}, bound {:.3g}, scale {:.3g}{}", left[0],
                        right.value, bound, right.scale, context(problem, run)));
  }
}

}  // namespace
}  // namespace fw::testing
