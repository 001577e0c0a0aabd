// Every backend has every operation of ops.def, and every operation has a test in this folder.
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <new>
#include <regex>
#include <set>
#include <sstream>

#include "base/error.h"
#include "op_check.h"
#include "ops/backend.h"

namespace fw::testing {
namespace {

template <class T>
void expect_whole(const Ops<T>& ops, const char* backend) {
#define FW_OP(name, args) EXPECT_NE(ops.name, nullptr) << backend << " has no " #name;
#include "ops/ops.def"
#undef FW_OP
}

TEST(Table, TheHostHasEveryOperation) {
  expect_whole(host_ops<float>(), "the host's table for float");
  expect_whole(host_ops<double>(), "the host's table for double");
}

// A CUDA device by its kind alone: what is refused is refused before any of it is used.
class KindOnly final : public Device {
 public:
  fw_device kind() const override { return FW_DEVICE_CUDA; }
  size_t alignment() const override { return 64; }
  bool host_memory() const override { return false; }
  void* allocate(size_t) override { throw std::bad_alloc(); }
  void release(void*) noexcept override {}
  void from_host(void*, const void*, size_t) override {}
  void to_host(void*, const void*, size_t) override {}
  void copy(void*, const void*, size_t) override {}
  void fill(void*, int, size_t) override {}
  void synchronise() override {}
};

TEST(Table, LayersThatADeviceLacksAreRefusedThere) {
  const KindOnly device;
  EXPECT_NO_THROW(require_layer<float>("mesa", host_device()));
  for (const auto require : {&require_layer<float>, &require_layer<Bf16>}) {
    EXPECT_NO_THROW(require("conv", device));
    if (cuda_ops<float>().l2_norm_forward != nullptr) {  // of a build with CUDA
      EXPECT_NO_THROW(require("mesa", device));
      continue;
    }
    try {
      require("mesa", device);
      ADD_FAILURE() << "a device without l2_norm_forward runs layers that call it";
    } catch (const Error& e) {
      EXPECT_EQ(e.kind(), ErrorKind::kUsage);
      EXPECT_NE(
          std::string(e.what()).find("layers called mesa do not run on CUDA devices (no operation l2_norm_forward)"),
          std::string::npos)
          << e.what();
    }
  }
}

// The names that the tests of this folder call as members of a table or of a context: `.name(`.
std::set<std::string> called_by_the_tests() {
  const std::regex call(R"(\.\s*([a-z_0-9]+)\()");
  std::set<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator(FW_SOURCE_DIR "/tests/ops")) {
    if (entry.path().extension() != ".cpp" || entry.path().filename() == "table_test.cpp") continue;
    std::stringstream text;
    text << std::ifstream(entry.path()).rdbuf();
    const std::string source = text.str();
    for (auto match = std::sregex_iterator(source.begin(), source.end(), call); match != std::sregex_iterator();
         ++match)
      names.insert((*match)[1]);
  }
  return names;
}

// Where there is none Exec runs the operations that it is made of, as a plan does, which counts their memory.
TEST(Table, AGpuHasEveryFusedOperation) {
  const bool has_cuda = cuda_ops<Bf16>().linear_forward != nullptr;
#define FW_OP(name, args)
#define FW_FUSED_OP(name, args)                                                       \
  EXPECT_EQ(cuda_ops<Bf16>().name != nullptr, has_cuda) << "a kernel of bf16 " #name; \
  EXPECT_EQ(planned_cuda_ops<Bf16>().name, nullptr) << #name;                         \
  EXPECT_EQ(host_ops<float>().name, nullptr) << #name;
#include "ops/ops.def"
#undef FW_OP
}

TEST(Table, EveryOperationHasATest) {
  const std::set<std::string> called = called_by_the_tests();
#define FW_FUSED_OP(name, args) FW_OP(name, args)
#define FW_OP(name, args) \
  EXPECT_EQ(called.count(#name), 1U) << "no test of tests/ops calls " #name ": add one (op_check.h has the harness)";
#include "ops/ops.def"
#undef FW_OP
}

}  // namespace
}  // namespace fw::testing
