// info: what was built, and what it runs on here.
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <oneapi/dnnl/dnnl.h>
#include <unistd.h>

#include <cstring>
#include <fstream>
#include <set>
#include <sstream>
#include <string>
#include <thread>

#include "base/device.h"
#include "base/error.h"
#include "base/threads.h"
#include "cli/build_name.h"
#include "cli/command.h"
#include "cli/info_model.h"
#include "cli/json_output.h"
#include "cli/ranks.h"
#include "cli/say.h"
#include "fastweight/fastweight.h"
#include "rule/rule.h"

namespace fw::cli {
namespace {

const char* build_kind() {
#if defined(__SANITIZE_ADDRESS__)
  return "AddressSanitizer";
#elif defined(__SANITIZE_THREAD__)
  return "ThreadSanitizer";
#elif defined(NDEBUG)
  return "release (optimised, no assertions)";
#elif defined(__OPTIMIZE__)
  return "optimised, with assertions";
#else
  return "debug (not optimised)";
#endif
}

const char* compiler() {
#if defined(__clang__)
  return "clang " __clang_version__;
#else
  return "g++ " __VERSION__;
#endif
}

const char* dnnl_isa() {
  switch (dnnl_get_effective_cpu_isa()) {
    case dnnl_cpu_isa_sse41:
      return "SSE4.1";
    case dnnl_cpu_isa_avx:
      return "AVX";
    case dnnl_cpu_isa_avx2:
      return "AVX2";
    case dnnl_cpu_isa_avx2_vnni:
      return "AVX2 with VNNI";
    case dnnl_cpu_isa_avx512_core:
      return "AVX-512";
    case dnnl_cpu_isa_avx512_core_vnni:
      return "AVX-512 with VNNI";
    case dnnl_cpu_isa_avx512_core_bf16:
      return "AVX-512 with bf16";
    case dnnl_cpu_isa_avx512_core_amx:
      return "AVX-512 with AMX (bf16, int8)";
    default:
      return "other";
  }
}

// Those of the processor that kernels of this program or of oneDNN choose by.
std::string cpu_features() {
  std::ifstream in("/proc/cpuinfo");
  std::set<std::string> have;
  for (std::string line; std::getline(in, line);) {
    if (!line.starts_with("flags")) continue;
    std::istringstream words(line.substr(line.find(':') + 1));
    for (std::string word; words >> word;) have.insert(word);
    break;
  }
  std::string text;
  for (const char* feature :
       {"sse4_2", "avx2", "fma", "avx512f", "avx512_vnni", "avx512_bf16", "avx512_fp16", "amx_bf16", "avx_vnni"}) {
    if (have.contains(feature)) text += (text.empty() ? "" : " ") + std::string(feature);
  }
  return text.empty() ? "unknown" : text;
}

const Json kNoGpu = {{"name", nullptr},
                     {"compute_capability", nullptr},
                     {"multiprocessors", nullptr},
                     {"driver", nullptr},
                     {"runtime", nullptr}};

// line(words, key, value, text) of the GPU that --device cuda takes.
template <class Line>
void line_of_gpu(const Line& line) {
  if (device_code().empty()) {
    const bool there = ::access("/dev/nvidiactl", F_OK) == 0;
    line("GPU", "gpu", kNoGpu,
         there ? "an NVIDIA driver is loaded, but this build has no device code" : "no NVIDIA GPU found");
    return;
  }
  try {
    const DeviceInfo gpu = device_info();
    line("GPU", "gpu",
         {{"name", gpu.name},
          {"compute_capability", fmt::format("{}.{}", gpu.major, gpu.minor)},
          {"multiprocessors", gpu.sm_count},
          {"driver", gpu.driver},
          {"runtime", gpu.runtime}},
         fmt::format("{}, compute capability {}.{}, {} multiprocessors; driver for CUDA {}, runtime {}", gpu.name,
                     gpu.major, gpu.minor, gpu.sm_count, gpu.driver, gpu.runtime));
  } catch (const DeviceError& error) {
    std::string why = error.what();
    if (why.starts_with("device: expected an NVIDIA GPU, but ")) why = "no NVIDIA GPU found";
    line("GPU", "gpu", kNoGpu, why);
  }
}

class Info : public Command {
 public:
  std::string name() const override { return "info"; }
  std::string summary() const override {
    return "version, build, instruction sets, threads, rules; or what a model costs";
  }
  std::string details() const override {
    return "Of a RECIPE or a model: layers, parameters, floating-point operations a token (a multiplication and an "
           "addition are two), bytes that it "
           "remembers of a sequence (float32), and the memory of a training step of the recipe's batch: parameters, "
           "gradients, the optimiser's moments, "
           "activations and workspace, planned to the byte by running the step on a device that only allocates. No "
           "memory is taken for it.";
  }
  void declare(Options& options) override {
    options.positional("RECIPE", &recipe_, "a run file (recipes/), a model or a run folder", false);
    options.add("json", "", &json_, "print JSON instead");
    declare_threads(options, threads_);
  }
  int run(Options&) override {
    apply_threads(threads_);
    Json report = json_report("info");
    if (!recipe_.empty()) {
      report["model"] = model_report(recipe_);
      if (json_)
        print_json_report(report);
      else
        say("{}", model_text(report["model"]));
      return kExitOk;
    }
    // One list for both: the words of the text, the key and value of the JSON.
    const auto line = [&](const char* what, const char* key, const Json& value, const std::string& text) {
      report[key] = value;
      if (!json_) say("{:<14}{}\n", what, text);
    };
    const auto text_line = [&](const char* what, const char* key, const std::string& text) {
      line(what, key, text, text);
    };
    if (!json_) say("{:<14}{}\n", "version", build_name().substr(std::strlen("fastweight ")));  // every report has it
    text_line("build", "build", build_kind());
    text_line("compiler", "compiler", compiler());
    text_line("SIMD target", "simd_target", fw_simd_target());
    const dnnl_version_t* version = dnnl_version();
    const std::string number = fmt::format("{}.{}.{}", version->major, version->minor, version->patch);
    line("oneDNN", "onednn", {{"version", number}, {"isa", dnnl_isa()}}, fmt::format("{}, {}", number, dnnl_isa()));
    const unsigned cores = std::thread::hardware_concurrency();
    line("cores", "cores", cores, fmt::format("{}", cores));
    line("threads", "threads", num_threads(), fmt::format("{}", num_threads()));
    text_line("CPU features", "cpu_features", cpu_features());
    const std::string code = device_code();
    line("device code", "device_code", code.empty() ? Json() : Json(code),
         code.empty() ? "none (`make gpu` builds it)" : code);
    line_of_gpu(line);
    line("backends", "backends", code.empty() ? Json::array({"CPU"}) : Json::array({"CPU", "CUDA"}),
         code.empty() ? "CPU" : "CPU, CUDA");
    text_line("ranks", "ranks", ranks_library());
    StringList names;
    for (const Preset& p : presets()) names.emplace_back(p.name);
    line("presets", "presets", names, fmt::format("{}", fmt::join(names, " ")));
    if (json_) print_json_report(report);
    return kExitOk;
  }

 private:
  std::string recipe_;
  bool json_ = false;
  int64_t threads_ = 0;
};

}  // namespace

std::unique_ptr<Command> info_command() { return std::make_unique<Info>(); }

}  // namespace fw::cli
