// Where NVIDIA's libraries are looked for: with other libraries in their place.
#include "base/cuda_library.h"

#include <dlfcn.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <string>

namespace fw {
namespace {

namespace fs = std::filesystem;

class CudaLibrary : public ::testing::Test {
 protected:
  void SetUp() override {
    std::string path = (fs::temp_directory_path() / "fw-library-XXXXXX").string();
    ASSERT_NE(::mkdtemp(path.data()), nullptr);
    folder_ = path;
    Dl_info math = {};
    double (*const sine)(double) = &::sin;
    ASSERT_NE(::dladdr(reinterpret_cast<void*>(sine), &math), 0);
    fs::copy_file(fs::canonical(math.dli_fname), folder_ + "/libfw-some.so.2");
    if (const char* before = std::getenv("FW_CUDA_LIBS")) before_ = before;
  }
  void TearDown() override {
    give(before_);
    fs::remove_all(folder_);
  }
  static void give(const std::string& folders) {
    folders.empty() ? ::unsetenv("FW_CUDA_LIBS") : ::setenv("FW_CUDA_LIBS", folders.c_str(), 1);
  }

  std::string folder_, before_;
};

TEST_F(CudaLibrary, IsFoundInAnyOfTheFoldersThatAreGiven) {
  give("/nowhere:" + folder_);
  void* const library = open_cuda_library({"libfw-none.so.3", "libfw-some.so.2"});
  ASSERT_NE(library, nullptr);
  EXPECT_NE(function_of(library, "sin"), nullptr);
  EXPECT_EQ(function_of(library, "fw_no_such_function"), nullptr);
}

TEST_F(CudaLibrary, IsNotFoundWhereItIsNot) {
  EXPECT_EQ(open_cuda_library({"libfw-some.so.2"}), nullptr);
  give(folder_);
  EXPECT_EQ(open_cuda_library({"libfw-none.so.2"}), nullptr);
}

// What the loader has is found beside the folders that are given, unless these are to be alone.
TEST_F(CudaLibrary, FoldersThatAreGivenAreAloneOrFirst) {
  give(folder_);
  EXPECT_EQ(open_cuda_library({"libm.so.6"}), nullptr);
  EXPECT_NE(open_cuda_library({"libm.so.6"}, false), nullptr);
}

}  // namespace
}  // namespace fw
