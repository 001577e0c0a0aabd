// All code is compiled before a run, and nothing is tuned in it. Under run_log.c: a run loads no compiler, starts no
// process but gnuplot, and leaves nothing in a cache. With a GPU it runs while the driver may not compile PTX. And the
// device code of the built files is machine code alone, so that no driver has anything to compile.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <regex>
#include <set>
#include <sstream>

#include "cli/program.h"

namespace fw::test {
namespace {

namespace fs = std::filesystem;
using testing::Contains;
using testing::ElementsAre;
using testing::EndsWith;
using testing::HasSubstr;
using testing::IsEmpty;
using Args = std::vector<std::string>;
using Names = std::set<std::string>;

bool is_compiler(const std::string& library) {
  static const std::regex kCompilers("nvrtc|nvJitLink|nvptxcompiler|nvvm|LLVM|clang|triton|tvm|pocl|libgccjit|tcc",
                                     std::regex::icase);
  return std::regex_search(fs::path(library).filename().string(), kCompilers);
}

class AheadOfTime : public testing::Test {
 protected:
  void SetUp() override {
#if !defined(FW_RUN_LOG_LIBRARY)
    GTEST_SKIP() << "a sanitizer's runtime takes no library before it";
#endif
    fs::create_directory(home());
    spill(folder_ / "text", small_text());
  }
  std::string home() const { return folder_ / "home"; }

  // Everywhere that a cache could be is home(), and the driver may not compile.
  Args launcher(const std::string& library = "") const {
    Args args{"/usr/bin/env", "-C", home(), "FW_RUN_LOG=" + (folder_ / "run.log"), "CUDA_DISABLE_PTX_JIT=1"};
    for (const char* name : {"HOME", "TMPDIR", "XDG_CACHE_HOME", "XDG_DATA_HOME", "XDG_CONFIG_HOME", "CUDA_CACHE_PATH"})
      args.push_back(name + ("=" + home()));
#if defined(FW_RUN_LOG_LIBRARY)
    args.push_back("LD_PRELOAD=" FW_RUN_LOG_LIBRARY + (library.empty() ? "" : ":" + library));
#endif
    return args;
  }
  Outcome run_logged(const Args& args, const std::string& program = "", const std::string& library = "") {
    return Program(args, "", "/dev/null", launcher(library), program).wait();
  }
  // What stands in the log after `kind`.
  Names logged(const std::string& kind) const {
    Names names;
    std::istringstream log(slurp(folder_ / "run.log"));
    for (std::string line; std::getline(log, line);)
      if (line.starts_with(kind + " ")) names.insert(line.substr(kind.size() + 1));
    return names;
  }
  Names compilers() const {
    Names found = logged("load");
    EXPECT_THAT(found, Contains(HasSubstr("libc.so"))) << "the log has no libraries";
    std::erase_if(found, [](const std::string& library) { return !is_compiler(library); });
    return found;
  }
  Names cached() const {
    Names found;
    for (const auto& entry : fs::recursive_directory_iterator(home()))
      found.insert(fs::relative(entry.path(), home()).string());
    return found;
  }

  Folder folder_;
};

TEST_F(AheadOfTime, ARunLoadsNoCompilerStartsNoProcessAndFillsNoCache) {
  const Outcome info = run({"info", "--json"});
  Args devices{"cpu"};
  if (!nlohmann::json::parse(info.out).at("gpu").at("name").is_null()) devices.emplace_back("cuda");
  for (const std::string& device : devices) {
    const std::string out = folder_ / device;
    const Args on{"--device", device};
    for (const Args& args : {tiny_train(folder_ / "text", out) + on, Args{"eval", out, "--text", folder_ / "text"} + on,
                             Args{"generate", out, "--prompt", "a", "--tokens", "8"} + on}) {
      const Outcome outcome = run_logged(args);
      EXPECT_EQ(outcome.code, 0) << args.front() << " " << device << ": " << outcome.err;
    }
  }
  EXPECT_THAT(compilers(), IsEmpty());
  Names started = logged("start");
  std::erase_if(started, [](const std::string& name) { return name.ends_with("gnuplot"); });  // loss.svg
  EXPECT_THAT(started, IsEmpty());
  EXPECT_THAT(cached(), IsEmpty());
}

#ifdef FW_SHARED_LIBRARY
TEST_F(AheadOfTime, TheLibraryNeedsNoCompiler) {
  EXPECT_EQ(run_logged({}, "/bin/true", FW_SHARED_LIBRARY).code, 0);
  EXPECT_THAT(logged("load"), Contains(EndsWith(fs::path(FW_SHARED_LIBRARY).filename().string())));
  EXPECT_THAT(compilers(), IsEmpty());
}
#endif

// The log and the search see a program that does all three.
TEST_F(AheadOfTime, ACompilerAProcessAndACacheWouldBeSeen) {
#ifdef FW_RUN_LOG_LIBRARY
  const std::string jit = folder_ / "libnvrtc.so.12";
  fs::copy_file(FW_RUN_LOG_LIBRARY, jit);
  EXPECT_EQ(run_logged({"-c", "mkdir .cache; /bin/true"}, "/bin/sh", jit).code, 0);
  EXPECT_THAT(compilers(), ElementsAre(jit));
  EXPECT_THAT(logged("start"), Contains("/bin/true"));
  EXPECT_THAT(cached(), ElementsAre(".cache"));
#endif
}

// Kinds of the entries of all CUDA fat binaries in a file: 1 PTX, 2 machine code. A fat binary begins with
// {u32 magic, u16 version, u16 header, u64 size}, an entry of it with {u16 kind, u16, u32 header, u64 size}.
std::vector<int> device_code(const std::string& file) {
  constexpr uint32_t kMagic = 0xBA55ED50;
  std::vector<int> kinds;
  const auto number = [&](size_t at, auto of) {
    if (at + sizeof of <= file.size()) std::memcpy(&of, file.data() + at, sizeof of);
    return of;
  };
  const std::string magic(reinterpret_cast<const char*>(&kMagic), sizeof kMagic);
  for (size_t at = file.find(magic); at != std::string::npos; at = file.find(magic, at + 1)) {
    const size_t header = number(at + 6, uint16_t{0}), end = at + header + number(at + 8, uint64_t{0});
    if (number(at + 4, uint16_t{0}) != 1 || header != 16 || end > file.size()) continue;  // the number in code
    for (size_t entry = at + header; entry + 16 <= end;) {
      const size_t size = number(entry + 4, uint32_t{0}) + number(entry + 8, uint64_t{0});
      kinds.push_back(number(entry, uint16_t{0}));
      if (size < 16) break;
      entry += size;
    }
  }
  return kinds;
}

// A fat binary with entries of these kinds.
std::string fat_binary(const std::vector<uint16_t>& kinds) {
  std::string entries;
  const auto put = [](std::string& text, auto number) {
    text.append(reinterpret_cast<const char*>(&number), sizeof number);
  };
  for (const uint16_t kind : kinds) {
    put(entries, kind), put(entries, uint16_t{0x101}), put(entries, uint32_t{64}), put(entries, uint64_t{8});
    entries += std::string(64 - 16 + 8, 'x');
  }
  std::string all = "before";
  put(all, uint32_t{0xBA55ED50}), put(all, uint16_t{1}), put(all, uint16_t{16}), put(all, uint64_t{entries.size()});
  return all + entries + "behind";
}

TEST(DeviceCode, IsMachineCodeAlone) {
  EXPECT_THAT(device_code(fat_binary({2, 1, 2})), ElementsAre(2, 1, 2));
  size_t found = 0;
  std::vector<std::string> files{FW_BINARY_DIR "/fastweight"};
#ifdef FW_SHARED_LIBRARY
  files.emplace_back(FW_SHARED_LIBRARY);
#endif
  for (const std::string& file : files) {
    const std::vector<int> kinds = device_code(slurp(file));
    found += kinds.size();
    EXPECT_EQ(std::count(kinds.begin(), kinds.end(), 2), static_cast<int64_t>(kinds.size())) << file << " has PTX";
  }
  const bool has_kernels = !nlohmann::json::parse(run({"info", "--json"}).out).at("device_code").is_null();
  EXPECT_EQ(found > 0, has_kernels);
}

}  // namespace
}  // namespace fw::test
