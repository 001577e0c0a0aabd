#include "cli/selftest_scans.h"

#include <cmath>

#include "cli/selftest_worst.h"
#include "ops/exec.h"
#include "reference/element_scan.h"

namespace fw::cli {
namespace {

// One problem in T.
template <class T>
struct Run {
  const ElementScan& scan;
  std::vector<T> u, step, q, k, a_log, skip, s, y, checkpoints;
  Arena arena, contexts;

  Run(const ElementScan& problem, const ElementScan::Inputs& in)
      : scan(problem),
        u(cast<T>(in.u)),
        step(cast<T>(in.step)),
        q(cast<T>(in.q)),
        k(cast<T>(in.k)),
        skip(cast<T>(in.skip)),
        s(cast<T>(in.s0)),
        y(in.u.size()),
        checkpoints(static_cast<size_t>(chunk_checkpoints(problem.sequences.tokens(), problem.sequences.count()) *
                                        problem.states * problem.channels)) {
    a_log.reserve(in.a.size());
    for (const double rate : in.a) a_log.push_back(static_cast<T>(std::log(-rate)));
  }
  ScanLaw law() const { return scan.longhorn ? ScanLaw::kLonghorn : ScanLaw::kMamba; }
  const T* rates() const { return a_log.empty() ? nullptr : a_log.data(); }
  Exec<T> exec() { return {host_ops<T>(), host_device(), arena, contexts}; }
  Mat<T> wide(std::vector<T>& x, int64_t first = 0) const {
    return {x.data() + first * scan.channels, tokens() - first, scan.channels};
  }
  Mat<T> narrow(std::vector<T>& x, int64_t first = 0) const {
    return {x.data() + first * scan.states, tokens() - first, scan.states};
  }
  int64_t tokens() const { return scan.sequences.tokens(); }

  void forward() {
    exec().selective_scan_forward(law(), wide(u), wide(step), narrow(q), narrow(k), rates(), skip.data(),
                                  PassLayout(scan.sequences), s.data(), s.data(), checkpoints.data(), wide(y));
  }
  void steps() {
    const SeqLayout one({0, 1});
    const int64_t size = scan.states * scan.channels;
    for (int64_t i = 0; i < scan.sequences.count(); ++i) {
      for (int64_t t = scan.sequences.begin(i); t < scan.sequences.end(i); ++t) {
        const auto row = [](Mat<T> m) { return Mat<T>(m.data, 1, m.cols); };
        exec().selective_scan_forward(law(), row(wide(u, t)), row(wide(step, t)), row(narrow(q, t)), row(narrow(k, t)),
                                      rates(), skip.data(), PassLayout(one), s.data() + i * size, s.data() + i * size,
                                      nullptr, row(wide(y, t)));
      }
    }
  }
};

template <class T>
void check(const ElementScan& scan, ScanErrors& errors) {
  const ElementScan::Inputs in = scan.random(21);
  const ElementScan::Outputs d = scan.random_cotangents(22), expected = scan.forward(in);
  const ElementScan::Inputs gradients = scan.backward(in, d);
  Run<T> run(scan, in), single(scan, in);
  run.forward();
  keep_worst(errors.forward, "o", doubles(run.y), expected.y);
  keep_worst(errors.forward, "final_state", doubles(run.s), expected.s);
  single.steps();
  keep_worst(errors.step, "o", doubles(single.y), expected.y);
  keep_worst(errors.step, "final_state", doubles(single.s), expected.s);

  std::vector<T> dy = cast<T>(d.y), ds = cast<T>(d.s), du(run.u.size()), dstep(run.step.size()), dq(run.q.size()),
                 dk(run.k.size());
  std::vector<T> da(run.a_log.size()), dskip(run.skip.size()), ds_in(run.s.size());
  run.exec().selective_scan_backward(run.law(), run.wide(dy), run.wide(run.u), run.wide(run.step), run.narrow(run.q),
                                     run.narrow(run.k), run.rates(), run.skip.data(), PassLayout(scan.sequences),
                                     run.checkpoints.data(), ds.data(), run.wide(du), run.wide(dstep), run.narrow(dq),
                                     run.narrow(dk), da.empty() ? nullptr : da.data(), dskip.data(), ds_in.data());
  std::vector<double> of_rates = doubles(da);
  for (size_t i = 0; i < of_rates.size(); ++i) of_rates[i] /= in.a[i];  // A = -exp(a_log)
  keep_worst(errors.backward, "u", doubles(du), gradients.u);
  keep_worst(errors.backward, "step", doubles(dstep), gradients.step);
  keep_worst(errors.backward, "q", doubles(dq), gradients.q);
  keep_worst(errors.backward, "k", doubles(dk), gradients.k);
  keep_worst(errors.backward, "skip", doubles(dskip), gradients.skip);
  keep_worst(errors.backward, "initial_state", doubles(ds_in), gradients.s0);
  if (!da.empty()) keep_worst(errors.backward, "A", of_rates, gradients.a);
}

}  // namespace

std::vector<ScanErrors> check_scans_here() {
  std::vector<ScanErrors> found;
  for (const bool longhorn : {false, true}) {
    for (const bool is_double : {true, false}) {
      ScanErrors errors;
      errors.layer = longhorn ? "longhorn_diag" : "mamba";
      errors.is_double = is_double;
      for (const ElementScan& scan : {ElementScan{longhorn, SeqLayout({0, 1, 131, 131, 148, 211}), 37, 5},
                                      ElementScan{longhorn, SeqLayout({0, 96, 192}), 160, 16}}) {
        if (is_double) {
          check<double>(scan, errors);
        } else {
          check<float>(scan, errors);
        }
      }
      found.push_back(errors);
    }
  }
  return found;
}

}  // namespace fw::cli
