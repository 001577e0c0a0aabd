// The gradient kernel against the adjoint of the token recurrence in double: gradients_test [quick | all | many |
// <rule>]. A program of its own, on a device or in emulation.
#include "device_buffer.h"
#include "gradients_problem.h"

using namespace gradients_test;

namespace {

int failures = 0, runs = 0;

void check(Case c) {
  c.rule = rule_of(c.name);
  c.seed = 77 + static_cast<uint64_t>(runs++);
  Run run(c);
  if (!(run.check(true) <= 1)) ++failures;
}

// A sequence alone and packed, and twice: the same bits.
void check_bits(const std::string& name, const std::string& decay) {
  Case c;
  c.name = name, c.rule = rule_of(name), c.decay = decay;
  c.T = 100;
  std::vector<uint64_t> bits[2];
  for (auto& b : bits) {
    Run run(c);
    run.check(false);
    b = run.bits();
  }
  if (bits[0] != bits[1]) std::printf("FAIL %s: two runs differ\n", name.c_str()), ++failures;
}

}  // namespace

int main(int argc, char** argv) {
  if (!fw::cuda::hopper()) return fw::cuda::kNotRun;
  const std::string what = argc > 1 ? argv[1] : "quick";
  const std::vector<std::string> rules = {"gated_deltanet",
                                          "kda",
                                          "deltanet",
                                          "gated_deltanet2",
                                          "mamba2",
                                          "gla",
                                          "qdelta",
                                          "kaczmarz",
                                          "comba",
                                          "precond_gated_deltanet",
                                          "averaged",
                                          "averaged_write",
                                          "own_key",
                                          "retnet",
                                          "efla",
                                          "precond_kda_gated",
                                          "kaczmarz_channel",
                                          "precond_gla",
                                          "nlms",
                                          "longhorn",
                                          "all_linear",
                                          "linear_corrected",
                                          "precond_kda",
                                          "comba_channel",
                                          "own_key_channel",
                                          "all_channel"};
  const auto decays = [](const std::string& name) {
    const fw::Rule r = rule_of(name);
    return r.uses_g() ? std::vector<std::string>{"mild", "strong", "mixed", "reset", "none"}
                      : std::vector<std::string>{"none"};
  };
  for (const std::string& name : rules) {
    if (what != "quick" && what != "all" && what != name) continue;
    for (const std::string& decay : decays(name)) {
      Case c;
      c.name = name, c.decay = decay;
      for (const int T : what == "quick" ? std::vector<int>{65} : std::vector<int>{1, 16, 63, 64, 65, 130}) {
        c.T = T;
        c.K = c.V = 64, c.H = c.HV = T < 64 ? 8 : 4, c.bf16 = true, c.pad = 0, c.lengths.clear(),
        c.g_per_value_head = true;
        check(c);
        if (what == "quick") break;
        if (T == 1 || T == 65) {
          c.K = c.V = 128, c.H = T < 64 ? 8 : 1, c.HV = 2 * c.H;
          check(c);
          c.K = 48, c.V = 100, c.bf16 = false, c.g_per_value_head = false;
          check(c);
        }
        if (T == 130) {
          c.K = 100, c.V = 200, c.H = 2, c.HV = 4, c.pad = 1, c.lengths = {0, 70, 0, 60};
          check(c);
          c.pad = 0;
          c.K = 72, c.V = 136;  // rows in vectors
          check(c);
          c.K = 56, c.V = 72;
          check(c);
          runs -= 2;  // the other cases keep their seeds
        }
      }
    }
  }
  if (what == "all" || what == "many") {  // more chunks than the device takes at a time
    for (const char* name :
         {"gated_deltanet", "mamba2", "precond_gated_deltanet", "qdelta", "kda", "gated_deltanet2"}) {
      Case c;
      c.name = name, c.decay = "mild";
      c.T = 65, c.H = c.HV = 4, c.B = 3;
#ifndef FW_CUDA_EMULATION
      c.B = 36;
#endif
      check(c);
#ifndef FW_CUDA_EMULATION
      c.B = 18;
#endif
      c.K = c.V = 128;
      check(c);
    }
    Case c;  // more sequences than a warp has lanes, some of them empty
    c.name = "kda", c.T = 0;
    for (int i = 0; i < 70; ++i) c.lengths.push_back(i % 3), c.T += i % 3;
    check(c);
  }
  if (what == "quick" || what == "all") {
    Case c;
    c.name = "gated_deltanet";
    c.d_out = false;
    check(c);
    check_bits("gated_deltanet", "mild");
    check_bits("kda", "strong");
  }
  std::printf("%d failures of %d\n", failures, runs);
  return failures != 0;
}
