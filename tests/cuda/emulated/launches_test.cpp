// What a plan says is what a call launches: the kernels of fw_plan_text() against those that the emulated device was
// asked to run. It holds for every preset, every composed rule and random ones, over shapes, layouts, number formats
// and both directions. A kernel's name in the plan is folder/file; names of functions come from the program's symbols.
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <link.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <cstdint>
#include <cstdio>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/random.h"
#include "cuda/device_runs.h"
#include "cuda/random_rule.h"
#include "emulation/gpu.h"
#include "emulation/run.h"

namespace fw::testing {
namespace {

// Kernels whose functions are not called as the plan calls them (named_as_planned()), by the name of the function
// without namespace and template arguments. An empty one: tables, zeros and copies that every call may need, which
// plans do not list.
constexpr std::pair<std::string_view, std::string_view> kNames[] = {
    {"additive_gradient_kernel", "additive/gradients"},
    {"additive_join_kernel", "additive/join"},
    {"channel_gradient_kernel", "gradients/channel"},
    {"chunk_walk_kernel", "precond"},
    {"clear_kernel", ""},
    {"copy_checkpoints_kernel", ""},
    {"divide_erase_gate_backward_kernel", "erase_over_decay"},
    {"divide_erase_gate_kernel", "erase_over_decay"},
    {"expand_rows_kernel", "dplr"},
    {"gate_gradients_kernel", "gates"},
    {"gate_sums_kernel", "gates"},
    {"gate_values_kernel", "gates"},
    {"general_gradient_kernel", "gradients/general"},
    {"join_kernel", "scan/join"},
    {"k256_join_kernel", "k256/join"},
    {"key_from_decay_gradients_kernel", "key_from_decay"},
    {"key_from_decay_kernel", "key_from_decay"},
    {"make_sequences_kernel", ""},
    {"precond_backward_kernel", "precond"},
    {"precond_carry_kernel", "precond"},
    {"precond_center_kernel", "precond"},
    {"precond_rows_kernel", "precond"},
    {"precond_step_kernel", "precond"},
    {"precond_sums_kernel", "precond"},
    {"precond_tokens_kernel", "precond"},
    {"reduce_rows_kernel", "dplr"},
    {"scalar_gradient_kernel", "gradients/scalar"},
    {"sequences_kernel", ""},
    {"sm80_row_gradients_kernel", "sm80/gradients"},
    {"stage_kernel", "stage_rows"},
    {"sum_groups_kernel", "gradients/sum_groups"},
    {"token_backward_kernel", "token/backward"},
    {"token_head_kernel", "token/forward"},
    {"token_step_kernel", "token/forward"},
    {"upload_kernel", ""},
};

// folder_file_kernel of a name folder/file of kernels.def, as folder/file; "" where no line has it.
std::string named_as_planned(std::string_view function) {
  constexpr std::string_view kEnd = "_kernel";
  std::string name(function.substr(0, function.size() - std::min(function.size(), kEnd.size())));
  const size_t underscore = name.find('_');
  if (underscore == std::string::npos) return {};
  name[underscore] = '/';
  for (const std::string_view line : {
#define FW_PREPARE(id, name, arch, leaves, fuses, launch, takes) name,
#define FW_FORWARD_SCAN(id, name, arch, reads, launch, takes) name,
#define FW_REVERSE_SCAN(id, name, arch, launch, takes) name,
#define FW_GRADIENTS(id, name, arch, sums_heads, launch, takes) name,
#define FW_TOKEN_FORWARD(id, name, arch, takes) name,
#include "scan/cuda/kernels.def"
       }) {
    if (line.substr(0, line.find(" (")) == name) return name;
  }
  return {};
}

// The functions of this program by their addresses, from its table of symbols (nm; the debugger's names).
class Symbols {
 public:
  Symbols() {
    dl_iterate_phdr(
        [](dl_phdr_info* info, size_t, void* base) {
          *static_cast<uintptr_t*>(base) = info->dlpi_addr;
          return 1;  // the first is the program
        },
        &base_);
    const std::unique_ptr<FILE, int (*)(FILE*)> nm(popen("nm --defined-only --demangle /proc/$PPID/exe", "r"), pclose);
    std::array<char, 4096> line{};
    while (nm != nullptr && std::fgets(line.data(), line.size(), nm.get()) != nullptr) {
      unsigned long address = 0;
      int name = 0;
      if (std::sscanf(line.data(), "%lx %*c %n", &address, &name) == 1 && name > 0)
        names_.emplace(address, line.data() + name);
    }
  }
  // The last word of the function's name that ends with _kernel.
  std::string kernel(const void* function) const {
    const auto found = names_.find(reinterpret_cast<uintptr_t>(function) - base_);
    if (found == names_.end()) return "a function without a symbol";
    const std::string_view name = found->second;
    constexpr std::string_view kEnd = "_kernel";
    for (size_t at = name.find(kEnd); at != std::string_view::npos; at = name.find(kEnd, at + 1)) {
      const size_t end = at + kEnd.size();
      if (end < name.size() && name[end] != '<' && name[end] != '(' && name[end] != '\n') continue;
      size_t begin = at;
      while (begin > 0 && (std::isalnum(static_cast<unsigned char>(name[begin - 1])) != 0 || name[begin - 1] == '_'))
        --begin;
      return std::string(name.substr(begin, end - begin));
    }
    return std::string(name);
  }

 private:
  uintptr_t base_ = 0;
  std::map<uintptr_t, std::string> names_;
};

// Names in a row, each once where several kernels of one name follow each other.
void add(std::vector<std::string>& names, const std::string& name) {
  if (!name.empty() && (names.empty() || names.back() != name)) names.push_back(name);
}

std::vector<std::string> launched(const std::vector<const void*>& kernels) {
  static const Symbols symbols;
  std::vector<std::string> names;
  for (const void* const kernel : kernels) {
    const std::string function = symbols.kernel(kernel);
    const auto* const known =
        std::find_if(std::begin(kNames), std::end(kNames), [&](const auto& each) { return each.first == function; });
    const std::string name = known != std::end(kNames) ? std::string(known->second) : named_as_planned(function);
    add(names, known == std::end(kNames) && name.empty() ? "unknown: " + function : name);
  }
  return names;
}

// "a (what of it) -> b" as names: without what stands in parentheses, precond/... as one, k256's gradients as those of
// half of the channels.
std::vector<std::string> names_of(std::string_view text) {
  std::vector<std::string> names;
  while (!text.empty()) {
    const size_t end = text.find(" -> ");
    std::string name(text.substr(0, end));
    text.remove_prefix(end == std::string_view::npos ? text.size() : end + 4);
    if (const size_t open = name.find(" ("); open != std::string::npos) name.resize(open);
    if (name.starts_with("precond/") || name == "token/precond_tokens") name = "precond";
    if (name.starts_with("k256/gradients"))
      name = name == "k256/gradients_keys" ? "gradients/channel" : "gradients/scalar";
    add(names, name);
  }
  return names;
}

// A line of the plan, as the kernels in their order. "twice: a -> b; c" is a, b, a, b, c.
std::vector<std::string> planned(const std::string& text, const std::string& line) {
  const size_t at = text.find(line + ": ");
  if (at == std::string::npos) return {"no line: " + line};
  std::string_view kernels = std::string_view(text).substr(at + line.size() + 2);
  kernels = kernels.substr(0, kernels.find('\n'));
  constexpr std::string_view kTwice = "twice: ";
  const size_t twice = kernels.find(kTwice);
  if (twice == std::string_view::npos) return names_of(kernels);
  std::vector<std::string> names = names_of(kernels.substr(0, twice));
  const std::string_view rest = kernels.substr(twice + kTwice.size());
  const size_t semicolon = rest.find("; ");
  for (int i = 0; i < 2; ++i) {
    for (const std::string& name : names_of(rest.substr(0, semicolon))) add(names, name);
  }
  for (const std::string& name : names_of(rest.substr(semicolon + 2))) add(names, name);
  return names;
}

class Recorded {
 public:
  Recorded() { cuda::emulation::record_launches(&kernels_); }
  Recorded(const Recorded&) = delete;
  Recorded& operator=(const Recorded&) = delete;
  ~Recorded() { cuda::emulation::record_launches(nullptr); }
  std::vector<std::string> names() const { return launched(kernels_); }

 private:
  std::vector<const void*> kernels_;
};

std::string joined(const std::vector<std::string>& names) { return fmt::format("{}", fmt::join(names, " -> ")); }

void expect_planned(const Problem& problem, HeaderRun run) {
  SCOPED_TRACE(describe(problem));
  std::string text;
  run.plan_text = &text;
  {
    const Recorded recorded;
    header_forward(problem, run);
    EXPECT_FALSE(recorded.names().empty());
    EXPECT_EQ(joined(recorded.names()), joined(planned(text, "kernels forward"))) << text;
  }
  const Recorded recorded;
  header_backward(problem, run);
  std::vector<std::string> both = planned(text, "kernels forward");
  for (const std::string& name : planned(text, "kernels backward")) add(both, name);
  EXPECT_EQ(joined(recorded.names()), joined(both)) << text;
}

HeaderRun run_of(uint64_t seed, fw_form form) {
  HeaderRun run = device_run(form);
  run.bf16 = seed % 3 == 0 ? HeaderRun::Bf16Tensors::kNone : HeaderRun::Bf16Tensors::kAll;
  run.float16 = seed % 9 == 1;
  run.state_layout = seed / 3 % 2 == 0 ? FW_STATE_V_FIRST : FW_STATE_K_FIRST;
  return run;
}

TEST(Launches, ArePlannedForEveryRule) {
  for (const Rule& rule : all_rules()) {
    for (const fw_form form : {FW_FORM_TOKEN, FW_FORM_CHUNK}) {
      const uint64_t seed = rule_seed(rule, form == FW_FORM_TOKEN ? 301 : 302);
      if (lacks(rule) || (form == FW_FORM_TOKEN && rule.general_erase())) continue;
      ProblemOptions options;
      options.sequences = seed % 2 == 0 ? SeqLayout({0, 70, 71, 136}) : SeqLayout::uniform(2, 65);
      options.H = 1;
      options.HV = seed % 4 == 1 && !rule.general_erase() ? 2 : 1;
      options.K = seed / 4 % 3 == 0 ? 48 : seed / 4 % 3 == 1 ? 64 : 128;
      options.V = seed % 5 == 0 ? 100 : 64;
      options.gates_per_value_head = seed % 7 == 0;
      options.initial_state = seed % 3 != 1;
      options.seed = seed;
      expect_planned(of_bf16_numbers(random_problem(rule, options)), run_of(seed, form));
    }
  }
}

// Of a GPU that runs the kernels of sm80/.
TEST(Launches, ArePlannedForOlderGpus) {
  const cuda::emulation::Gpu before = cuda::emulation::gpu;
  cuda::emulation::gpu.major = 8;
  uint64_t seed = 320;
  const auto expect_rule = [&](const char* name, int64_t K) {
    const Rule& rule = preset(name).rule;
    ProblemOptions options;
    options.sequences = SeqLayout({0, 70, 71});
    options.H = 1, options.HV = seed % 2 == 0 && !rule.general_erase() ? 2 : 1;
    options.K = K, options.V = 64;
    options.seed = ++seed;
    expect_planned(of_bf16_numbers(random_problem(rule, options)), run_of(seed, FW_FORM_CHUNK));
  };
  for (const char* name :
       {"gated_deltanet", "qdelta", "comba", "retnet", "precond_gated_deltanet", "kda", "gated_deltanet2",
        "precond_kda", "precond_gla", "hgrn2", "dplr", "deltanet_neg", "gated_deltanet_neg", "kda_neg"})
    expect_rule(name, 64);
  for (const char* name :
       {"gated_deltanet", "deltanet", "qdelta", "comba", "retnet", "mamba2", "kaczmarz", "kda", "gla"})
    expect_rule(name, 160);
  cuda::emulation::gpu = before;
}

// Keys of more than 128 channels, of which some rules have kernels of their own and others are split along K.
TEST(Launches, ArePlannedForWideKeys) {
  for (const Rule& rule : all_rules()) {
    if (lacks(rule)) continue;
    const uint64_t seed = rule_seed(rule, 303);
    ProblemOptions options;
    options.sequences = SeqLayout({0, 65, 66});
    options.K = seed % 2 == 0 ? 160 : 256;
    options.V = 64;
    options.initial_state = seed % 3 != 1;
    options.seed = seed;
    HeaderRun run = run_of(seed, FW_FORM_AUTO);
    run.bf16_operands = true;
    expect_planned(of_bf16_numbers(random_problem(rule, options)), run);
  }
}

// Rules that nobody listed, in both forms, over key dimensions, value heads, layouts and number formats.
TEST(Launches, ArePlannedForRandomRules) {
  constexpr int kCalls = 24;
  Random random(20261130);
  int calls = 0;
  for (uint64_t seed = 1; calls < kCalls; ++seed) {
    const Rule rule = random_rule(random);
    const fw_form form = seed % 4 == 0 ? FW_FORM_TOKEN : FW_FORM_CHUNK;
    if (!is_valid(rule) || (form == FW_FORM_TOKEN ? rule.general_erase() : lacks(rule))) continue;
    ++calls;
    constexpr int64_t kKeys[] = {24, 64, 100, 128, 160, 256};
    ProblemOptions options;
    options.sequences = random.below(2) == 0 ? SeqLayout({0, 65, 65, 66}) : SeqLayout::uniform(2, 65);
    options.H = 1;
    options.HV = rule.general_erase() ? 1 : 1 + static_cast<int64_t>(random.below(2));
    options.K = kKeys[random.below(std::size(kKeys))];
    options.V = 16 + static_cast<int64_t>(random.below(80));
    options.gates_per_value_head = random.below(2) == 0;
    options.initial_state = random.below(2) == 0;
    options.edge_decays = random.below(4) == 0;
    options.seed = seed;
    SCOPED_TRACE(fmt::format("seed {}", seed));
    // Above K 128 not every rule has the chunk form.
    HeaderRun run = run_of(seed, form == FW_FORM_CHUNK && options.K > 128 ? FW_FORM_AUTO : form);
    run.bf16_operands = form == FW_FORM_CHUNK;
    expect_planned(of_bf16_numbers(random_problem(rule, options)), run);
  }
}

// Gates given as logits: kernels of the scan make their values, or kernels in front of it do.
TEST(Launches, ArePlannedForGatesAsLogits) {
  for (const Preset& preset : presets()) {
    for (const GateActivation decay : kDecayActivations) {
      const uint64_t seed = rule_seed(preset.rule, 304 + static_cast<uint64_t>(decay));
      const fw_form form = seed % 3 == 2 ? FW_FORM_TOKEN : FW_FORM_CHUNK;
      if (form == FW_FORM_TOKEN ? preset.rule.general_erase() : lacks(preset.rule)) continue;
      ProblemOptions options;
      options.sequences = seed % 2 == 0 ? SeqLayout({0, 70, 71}) : SeqLayout::uniform(2, 65);
      options.K = options.V = 64;
      options.gates = logits_of(preset.rule, decay);
      options.seed = seed;
      expect_planned(of_bf16_numbers(random_problem(preset.rule, options)), run_of(seed / 3, form));
    }
  }
}

}  // namespace
}  // namespace fw::testing
