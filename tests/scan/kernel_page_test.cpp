// docs/internals/gpu_kernels.md has what call/select.h chooses for every named rule. With FW_WRITE_PAGES set the page is written instead.
#include <gtest/gtest.h>

#include <cstdlib>
#include <string>
#include <utility>
#include <vector>

#include "base/error.h"
#include "base/file.h"
#include "fastweight/fastweight.h"
#include "rule/rule.h"

namespace {

constexpr const char* kPage = FW_SOURCE_DIR "/docs/internals/gpu_kernels.md";
const std::string kBegin = "<!-- kernels: begin (tests/scan/kernel_page_test.cpp) -->\n", kEnd = "<!-- kernels: end -->\n";

// What the plan says behind "name: ".
std::string line_of(const std::string& plan, const std::string& name) {
  const size_t at = plan.find("\n" + name + ": ");
  if (at == std::string::npos) return "none";
  const size_t begin = at + name.size() + 3;
  return plan.substr(begin, plan.find('\n', begin) - begin);
}

std::string plan_of(const char* rule, fw_form form) {
  fw_desc desc;
  FW_INIT(&desc);
  EXPECT_EQ(fw_rule_preset(rule, &desc.rule), FW_OK);
  desc.device = FW_DEVICE_CUDA;
  desc.io_dtype = desc.operands = FW_BF16;
  desc.form = form;
  desc.B = 4;
  desc.T = form == FW_FORM_TOKEN ? 1 : 4096;
  desc.H = desc.HV = 16;
  desc.K = desc.V = 128;
  desc.segment = -1;  // whether it is cut depends on the device
  std::string text(fw_plan_text(&desc, nullptr, 0) + 1, '\0');
  text.resize(fw_plan_text(&desc, text.data(), text.size()));
  return text;
}

// Rules with the same kernels are one row, where the first of them is.
std::string table() {
  std::vector<std::pair<std::string, std::string>> rows;  // names; kernels
  for (int i = 0; fw_rule_name(i) != nullptr; ++i) {
    const std::string name = std::string("`") + fw_rule_name(i) + "`", plan = plan_of(fw_rule_name(i), FW_FORM_CHUNK);
    const std::string kernels = line_of(plan, "kernels forward") + " | " + line_of(plan, "kernels backward");
    bool found = false;
    for (auto& [names, of] : rows) {
      if (found || of != kernels) continue;
      names += ", " + name;
      found = true;
    }
    if (!found) rows.emplace_back(name, kernels);
  }
  std::string text = "| rule | forward | backward |\n|---|---|---|\n";
  for (const auto& [names, kernels] : rows) text += fmt::format("| {} | {} |\n", names, kernels);
  return text;
}

TEST(KernelPage, IsWhatTheSelectionSays) {
  const std::string page = fw::read_file(kPage);
  const size_t begin = page.find(kBegin), end = page.find(kEnd);
  ASSERT_TRUE(begin != std::string::npos && end != std::string::npos && begin < end) << kPage << ": expected the two marks";
  const size_t from = begin + kBegin.size();
  if (std::getenv("FW_WRITE_PAGES") != nullptr) {
    fw::write_file_atomic(kPage, page.substr(0, from) + table() + page.substr(end));
    return;
  }
  EXPECT_EQ(page.substr(from, end - from), table()) << "docs/internals/gpu_kernels.md: FW_WRITE_PAGES=1 writes it";
}

// Every name of the table is a file of kernels, and every file of kernels that a rule can choose has a name on the page.
TEST(KernelPage, NamesFilesThatExist) {
  const std::string text = table();
  for (size_t at = text.find('/'); at != std::string::npos; at = text.find('/', at + 1)) {
    const size_t begin = text.find_last_of(" |", at) + 1, end = text.find_first_of(" |", at);
    const std::string name = text.substr(begin, end - begin);
    bool there = false;
    for (const char* ending : {".cu", "/gradients.cu", "/kernel.cuh"})
      there = there || fw::file_exists(std::string(FW_SOURCE_DIR "/src/scan/cuda/") + name + ending);
    EXPECT_TRUE(there) << name;
  }
}

}  // namespace
