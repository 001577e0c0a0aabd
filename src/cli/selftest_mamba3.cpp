#include "cli/selftest_mamba3.h"

#include <cmath>

#include "cli/selftest_worst.h"
#include "nn/mamba3_scan.h"
#include "reference/mamba3.h"

namespace fw::cli {
namespace {

constexpr double kTurn = 2 * 3.14159265358979323846;

// One problem in T.
template <class T>
struct Run {
  const Mamba3Problem& problem;
  Mamba3Shape shape;
  std::vector<T> q, k, v, dt, trap, g, angle, q_bias, k_bias, s, k_last, v_last, turns, y;
  Arena arena, contexts;
  Recurrences<T> recurrences{host_device()};
  typename Mamba3Scan<T>::Context context;

  Run(const Mamba3Problem& p, const Mamba3Problem::Inputs& in)
      : problem(p),
        shape{p.heads, p.groups, p.state, p.head_dim, p.rank, p.angles, p.rotate_half},
        q(cast<T>(in.q)),
        k(cast<T>(in.k)),
        v(cast<T>(in.v)),
        dt(cast<T>(in.dt)),
        trap(cast<T>(in.trap)),
        g(cast<T>(in.g)),
        angle(cast<T>(in.angle)),
        q_bias(cast<T>(in.q_bias)),
        k_bias(cast<T>(in.k_bias)),
        s(cast<T>(in.s)),
        k_last(cast<T>(in.k_last)),
        v_last(cast<T>(in.v_last)),
        turns(2 * in.theta.size()),
        y(in.v.size()) {
    const int64_t of_sequence = p.heads * p.angles;
    for (int64_t i = 0; i < static_cast<int64_t>(in.theta.size()); ++i) {
      const double turn = in.theta[static_cast<size_t>(i)] / kTurn;
      T* high = turns.data() + i / of_sequence * 2 * of_sequence + i % of_sequence;
      *high = static_cast<T>(turn);
      high[of_sequence] = static_cast<T>(turn - static_cast<double>(*high));
    }
  }
  Exec<T> exec() { return {host_ops<T>(), host_device(), arena, contexts}; }
  // Rows of `count` tokens from `first` on; `per_token` rows each.
  Mat<T> part(std::vector<T>& x, int64_t first, int64_t count, int64_t per_token = 1) const {
    const int64_t columns = static_cast<int64_t>(x.size()) / (problem.sequences.tokens() * per_token);
    return {x.data() + first * per_token * columns, count * per_token, columns};
  }
  Mamba3Inputs<T> inputs(int64_t first, int64_t count) {
    return {part(q, first, count),    part(k, first, count), part(v, first, count, shape.rank), part(dt, first, count),
            part(trap, first, count), part(g, first, count), part(angle, first, count)};
  }
  void forward(const SeqLayout& layout, int64_t first, int64_t sequence, fw_form form, bool keep) {
    const auto of = [&](std::vector<T>& x) {
      return x.data() + sequence * static_cast<int64_t>(x.size()) / problem.sequences.count();
    };
    Mamba3Scan<T>(shape).forward(exec(), recurrences, PassLayout(layout), form, inputs(first, layout.tokens()),
                                 {q_bias.data(), k_bias.data(), nullptr}, {of(s), of(k_last), of(v_last), of(turns)},
                                 keep, context, part(y, first, layout.tokens(), shape.rank));
  }
  void steps() {
    const SeqLayout one({0, 1});
    for (int64_t n = 0; n < problem.sequences.count(); ++n) {
      for (int64_t t = problem.sequences.begin(n); t < problem.sequences.end(n); ++t)
        forward(one, t, n, FW_FORM_AUTO, false);
    }
  }
};

template <class T>
void check(const Mamba3Problem& problem, Mamba3Errors& errors) {
  const Mamba3Problem::Inputs in = problem.random(31);
  const Mamba3Problem::Outputs d = problem.random_cotangents(32), expected = problem.forward(in);
  const Mamba3Problem::Inputs gradients = problem.backward(in, d);
  const int64_t tokens = problem.sequences.tokens();
  const auto compare_outputs = [&](FieldError& worst, const Run<T>& run) {
    keep_worst(worst, "o", doubles(run.y), expected.y);
    keep_worst(worst, "final_state", doubles(run.s), expected.s);
  };
  Run<T> single(problem, in);
  single.steps();
  compare_outputs(errors.step, single);
  for (const fw_form form : {FW_FORM_CHUNK, FW_FORM_TOKEN}) {
    const bool chunk = form == FW_FORM_CHUNK;
    Run<T> run(problem, in), of(problem, in);  // the second's tensors hold the gradients
    run.forward(problem.sequences, 0, 0, form, true);
    compare_outputs(chunk ? errors.chunk_forward : errors.token_forward, run);
    std::vector<T> dy = cast<T>(d.y), ds = cast<T>(d.s), dtheta(in.theta.size());
    of.q_bias.assign(of.q_bias.size(), T(0));
    of.k_bias.assign(of.k_bias.size(), T(0));
    Mamba3Scan<T>(run.shape).backward(run.exec(), run.recurrences, PassLayout(problem.sequences), form,
                                      run.inputs(0, tokens), {run.q_bias.data(), run.k_bias.data(), nullptr},
                                      run.context, run.part(dy, 0, tokens, problem.rank), ds.data(),
                                      of.inputs(0, tokens), {of.q_bias.data(), of.k_bias.data(), nullptr},
                                      {of.s.data(), of.k_last.data(), of.v_last.data(), dtheta.data()});
    FieldError& worst = chunk ? errors.chunk_backward : errors.token_backward;
    keep_worst(worst, "q", doubles(of.q), gradients.q);
    keep_worst(worst, "k", doubles(of.k), gradients.k);
    keep_worst(worst, "v", doubles(of.v), gradients.v);
    keep_worst(worst, "dt", doubles(of.dt), gradients.dt);
    keep_worst(worst, "trap", doubles(of.trap), gradients.trap);
    keep_worst(worst, "g", doubles(of.g), gradients.g);
    keep_worst(worst, "angle", doubles(of.angle), gradients.angle);
    keep_worst(worst, "q_bias", doubles(of.q_bias), gradients.q_bias);
    keep_worst(worst, "k_bias", doubles(of.k_bias), gradients.k_bias);
    keep_worst(worst, "initial_state", doubles(of.s), gradients.s);
    keep_worst(worst, "k_last", doubles(of.k_last), gradients.k_last);
    keep_worst(worst, "v_last", doubles(of.v_last), gradients.v_last);
    keep_worst(worst, "theta", doubles(dtheta), gradients.theta);
  }
}

}  // namespace

std::vector<Mamba3Errors> check_mamba3_here() {
  const SeqLayout packed({0, 1, 130, 130, 147, 210});
  std::vector<Mamba3Errors> found;
  for (const bool mimo : {false, true}) {
    const Mamba3Problem problem =
        mimo ? Mamba3Problem{3, 1, 16, 24, 3, 4, true, packed} : Mamba3Problem{4, 2, 17, 20, 1, 8, false, packed};
    for (const bool is_double : {true, false}) {
      Mamba3Errors errors;
      errors.layer = mimo ? "mamba3 mimo" : "mamba3";
      errors.is_double = is_double;
      if (is_double) {
        check<double>(problem, errors);
      } else {
        check<float>(problem, errors);
      }
      found.push_back(errors);
    }
  }
  return found;
}

}  // namespace fw::cli
