// --device: names that there are not, and a GPU that is not there.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>

#include "cli/program.h"
#include "fastweight/fastweight.h"

namespace fw::test {
namespace {

using testing::HasSubstr;
using Args = std::vector<std::string>;

TEST(DeviceOption, OtherNamesAreRefused) {
  Folder folder;
  spill(folder / "text", small_text());
  ASSERT_EQ(run(tiny_train(folder / "text", folder / "run")).code, 0);
  for (const char* name : {"gpu", "cuda:", "cuda:-1", "cuda:x", "cuda:0x", ""}) {
    const Outcome train = run(tiny_train(folder / "text", folder / "other") + Args{"--device", name});
    EXPECT_EQ(train.code, 2) << name;
    EXPECT_THAT(train.err, HasSubstr("device")) << name;
    EXPECT_THAT(train.err, HasSubstr("expected cpu, cuda or cuda:N")) << name;
    const Outcome eval = run({"eval", folder / "run", "--text", folder / "text", "--device", name});
    EXPECT_EQ(eval.code, 2) << name;
    EXPECT_THAT(eval.err, HasSubstr("expected cpu, cuda or cuda:N")) << name;
  }
  EXPECT_FALSE(std::filesystem::exists(folder / "other/model"));
}

TEST(DeviceOption, SaysWhatIsMissing) {
  if (fw_device_check(FW_DEVICE_CUDA) == FW_OK) GTEST_SKIP() << "there is a GPU";
  Folder folder;
  spill(folder / "text", small_text());
  ASSERT_EQ(run(tiny_train(folder / "text", folder / "run")).code, 0);
  const Args commands[] = {
      tiny_train(folder / "text", folder / "other") + Args{"--device", "cuda"},
      {"eval", folder / "run", "--text", folder / "text", "--device", "cuda:0"},
      {"generate", folder / "run", "--prompt", "a", "--device", "cuda"},
      {"analyze", folder / "run", "--text", folder / "text", "--out", folder / "analysis", "--device", "cuda"},
      {"verify", FW_SOURCE_DIR "/tests/conformance", "--device", "cuda"},
      {"task", "mqar", "--rule", "kda", "--out", folder / "task", "--device", "cuda"},
      {"bench", "--train", "--device", "cuda"}};
  for (const Args& command : commands) {
    const Outcome outcome = run(command);
    EXPECT_EQ(outcome.code, 2) << command[0];
    EXPECT_TRUE(outcome.err.find("no device code") != std::string::npos ||
                outcome.err.find("expected an NVIDIA GPU") != std::string::npos)
        << outcome.err;
  }
}

}  // namespace
}  // namespace fw::test
