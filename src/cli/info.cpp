// info: what was built, and what it runs on here.
#include <fmt/format.h>
#include <oneapi/dnnl/dnnl.h>

#include <thread>

#include "base/threads.h"
#include "cli/command.h"
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

class Info : public Command {
 public:
  std::string name() const override { return "info"; }
  std::string summary() const override { return "version, build, instruction sets, threads, rules"; }
  void declare(Options& options) override { declare_threads(options, threads_); }
  int run(Options&) override {
    apply_threads(threads_);
    const auto line = [](const char* what, const std::string& value) { fmt::print("{:<14}{}\n", what, value); };
    line("version", fw_version());
    line("build", build_kind());
    line("compiler", compiler());
    line("SIMD target", fw_simd_target());
    const dnnl_version_t* version = dnnl_version();
    line("oneDNN", fmt::format("{}.{}.{}, {}", version->major, version->minor, version->patch, dnnl_isa()));
    line("cores", fmt::format("{}", std::thread::hardware_concurrency()));
    line("threads", fmt::format("{}", num_threads()));
    line("backends", "CPU");
    std::string names;
    for (const Preset& p : presets()) names += (names.empty() ? "" : " ") + std::string(p.name);
    line("presets", names);
    return kExitOk;
  }

 private:
  int64_t threads_ = 0;
};

}  // namespace

std::unique_ptr<Command> info_command() { return std::make_unique<Info>(); }

}  // namespace fw::cli
