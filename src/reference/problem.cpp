#include "reference/problem.h"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <limits>
#include <string>

#include "base/random.h"
#include "reference/fields.h"
#include "rule/tokens.h"

namespace fw {
namespace {

double as_float(double x) { return static_cast<double>(static_cast<float>(x)); }
double sigmoid(double x) { return 1 / (1 + std::exp(-x)); }

std::vector<double> draw(size_t n, auto&& value) {
  std::vector<double> x(n);
  for (double& y : x) y = as_float(value());
  return x;
}

double log_decay(Random& random, bool edges) {
  if (edges && random.below(3) == 0) {
    const double values[] = {0.0, -20.0, -1000.0, -1e4, -std::numeric_limits<double>::infinity()};
    return values[random.below(std::size(values))];
  }
  return -std::exp(random.uniform(-3, 1)) * std::log1p(std::exp(random.normal()));
}

// Of a gate or a log-decay; edges: about a third is where the value is at one of its limits.
double logit(Random& random, bool edges) {
  if (edges && random.below(3) == 0) {
    const double values[] = {-1e4, -100.0, -30.0, 30.0, 100.0, 1e4};
    return values[random.below(std::size(values))];
  }
  return 1.5 * random.normal();
}

bool is_logits(std::string_view name, const Rule& rule, const Gates& gates) {
  for (const GateSpec& spec : gate_specs(rule, gates)) {
    if (spec.name == name) return spec.logits();
  }
  return false;
}

// Rows of a length between low and high.
std::vector<double> draw_rows(Random& random, size_t n, int64_t dim, double low, double high) {
  std::vector<double> x(n);
  for (size_t row = 0; row < n; row += static_cast<size_t>(dim)) {
    double square = 0;
    for (int64_t i = 0; i < dim; ++i) {
      x[row + i] = random.normal();
      square += x[row + i] * x[row + i];
    }
    const double factor = random.uniform(low, high) / std::sqrt(square);
    for (int64_t i = 0; i < dim; ++i) x[row + i] = as_float(factor * x[row + i]);
  }
  return x;
}

// Copies the rows (tokens) [begins[n], begins[n] + length(n)) of each sequence; a row has values.size() / tokens
// values.
std::vector<double> take_tokens(const std::vector<double>& values, const SeqLayout& all, const SeqLayout& some,
                                const std::vector<int64_t>& begins) {
  std::vector<double> out;
  if (values.empty()) return out;
  const int64_t row = static_cast<int64_t>(values.size()) / all.tokens();
  for (int64_t n = 0; n < some.count(); ++n) {
    if (some.length(n) == 0) continue;
    const auto first = values.begin() + (all.begin(n) + begins[static_cast<size_t>(n)]) * row;
    out.insert(out.end(), first, first + some.length(n) * row);
  }
  return out;
}

}  // namespace

Gates logits_of(const Rule& rule, GateActivation decay) {
  Gates gates;
  const auto tokens = token_specs(rule);
  [[maybe_unused]] const auto given = [&](TokenIndex token, bool is_decay) {
    return !tokens[static_cast<size_t>(token)].used ? GateActivation::kValue
           : is_decay                               ? decay
                                                    : GateActivation::kSigmoid;
  };
#define FW_GATE(name, is_decay, bound) gates.name = given(TokenIndex::name, is_decay);
#include "rule/gates.def"
#undef FW_GATE
  return gates;
}

ReferenceProblem random_problem(const Rule& rule, const ProblemOptions& options) {
  ReferenceProblem p;
  p.rule = rule;
  p.shape = {options.sequences,       options.H, options.HV, options.K, options.V, 0, 0, options.scale, options.gates,
             options.rate_per_channel};
  if (options.gates_per_value_head) p.shape.erase_heads = options.HV;
  if (options.gates_per_value_head && rule.uses_k()) p.shape.g_heads = options.HV;
  check_shape(p.shape);

  Random random(options.seed);
  // Gains that a long key makes smaller take keys of any length.
  const bool any_length = rule.gain_uses_key_norm() && rule.k_norm == Norm::kRaw;
  for (const auto& field : reference_input_fields()) {
    const size_t n = static_cast<size_t>(field.count(rule, p.shape));
    const std::string name = field.name;
    std::vector<double>& x = p.in.*field.values;
    if (field.optional && !is_parameter(name) && !options.initial_state) continue;
    if (name == "q") {
      x = draw_rows(random, n, options.K, 0.5, rule.q_norm == Norm::kL2 ? 3.0 : 1.0);
    } else if (name == "k") {
      // With query feedback the step is beta (1 + lambda q.k / |k|^2): short keys would make it unstable. An erase that
      // the gain does not make smaller asks for keys of about unit length.
      const bool free_erase = rule.is_delta() && (rule.erase != Gate::kTied || rule.uses_erase_key());
      const double shortest = !any_length ? 0.5 : free_erase ? 0.9 : rule.uses_lambda() ? 1.0 : 0.1;
      const double longest = rule.k_norm == Norm::kL2 || (any_length && !free_erase) ? 3.0 : 1.0;
      x = draw_rows(random, n, options.K, shortest, longest);
    } else if (name == "erase_key") {
      x = draw_rows(random, n, options.K, 0.5, rule.k_norm == Norm::kL2 ? 3.0 : 1.0);
    } else if (name == "erase_write") {
      // As RWKV-7's: a gate of channels times the erase key, at most of unit length, so that f.p is between 0 and 1;
      // and a little of its own.
      x = draw_rows(random, n, options.K, 0.02, 0.1);
      const std::vector<double>& key = rule.uses_erase_key() ? p.in.erase_key : p.in.k;
      for (size_t i = 0; i < std::min(x.size(), key.size()); ++i) {
        const size_t row = i / static_cast<size_t>(options.K) * static_cast<size_t>(options.K);
        double square = 0;
        for (size_t j = row; j < row + static_cast<size_t>(options.K); ++j) square += key[j] * key[j];
        x[i] = as_float(x[i] + sigmoid(1.5 * random.normal()) * key[i] / std::max(1.0, std::sqrt(square)));
      }
    } else if (is_logits(name, rule, options.gates)) {
      const bool edges = options.edge_decays && (name == "g" || name == "precond_g");
      x = draw(n, [&] { return logit(random, edges); });
    } else if (name == "a_log" || name == "precond_a_log") {
      x = draw(n, [&] { return random.uniform(-3, 1); });
    } else if (name == "dt_bias" || name == "precond_dt_bias") {
      x = draw(n, [&] { return 0.5 * random.normal(); });
    } else if (name == "g" || name == "precond_g") {
      x = draw(n, [&] { return log_decay(random, options.edge_decays); });
    } else if (name == "beta" || name == "erase_gate") {
      x = draw(n, [&] { return rule.gain_bound * sigmoid(1.5 * random.normal()); });
    } else if (name == "lambda" || name == "write_gate" || name == "precond_beta") {
      x = draw(n, [&] { return sigmoid(1.5 * random.normal()); });
    } else if (name == "precond_center") {
      x = draw(n, [&] { return -0.2 + 0.3 * random.normal(); });
    } else if (name == "initial_precond") {
      x = draw(n, [&] { return random.uniform(0.02, 1.0); });
    } else {
      x = draw(n, [&] { return random.normal(); });
    }
  }
  for (const auto& field : reference_output_fields()) {
    p.d.*field.values = draw(static_cast<size_t>(field.count(rule, p.shape)), [&] { return random.normal(); });
  }
  return p;
}

ReferenceProblem slice_tokens(const ReferenceProblem& problem, int64_t begin, int64_t end) {
  return slice_tokens(problem, std::vector<int64_t>(static_cast<size_t>(problem.shape.sequences.count()), begin),
                      end - begin);
}

ReferenceProblem slice_tokens(const ReferenceProblem& problem, const std::vector<int64_t>& begins, int64_t count) {
  const SeqLayout& all = problem.shape.sequences;
  std::vector<int64_t> offsets = {0};
  for (int64_t n = 0; n < all.count(); ++n) {
    offsets.push_back(offsets.back() + std::clamp<int64_t>(all.length(n) - begins[static_cast<size_t>(n)], 0, count));
  }
  ReferenceProblem part = problem;
  part.shape.sequences = SeqLayout(offsets);
  for (const auto& field : reference_input_fields()) {
    if (of_tokens(field.name))
      part.in.*field.values = take_tokens(problem.in.*field.values, all, part.shape.sequences, begins);
  }
  for (const auto& field : reference_output_fields()) {
    if (of_tokens(field.name))
      part.d.*field.values = take_tokens(problem.d.*field.values, all, part.shape.sequences, begins);
  }
  return part;
}

ReferenceProblem slice_sequence(const ReferenceProblem& problem, int64_t n) {
  const SeqLayout& all = problem.shape.sequences;
  ReferenceProblem part = problem;
  part.shape.sequences = SeqLayout::uniform(1, all.length(n));
  const auto take = [&](const char* name, std::vector<double>& values) {
    if (values.empty() || is_parameter(name)) return;
    const int64_t rows = of_tokens(name) ? all.tokens() : all.count();
    const int64_t row = static_cast<int64_t>(values.size()) / rows;
    const int64_t first = of_tokens(name) ? all.begin(n) : n;
    const int64_t count = of_tokens(name) ? all.length(n) : 1;
    values = std::vector<double>(values.begin() + first * row, values.begin() + (first + count) * row);
  };
  for (const auto& field : reference_input_fields()) take(field.name, part.in.*field.values);
  for (const auto& field : reference_output_fields()) take(field.name, part.d.*field.values);
  return part;
}

}  // namespace fw
