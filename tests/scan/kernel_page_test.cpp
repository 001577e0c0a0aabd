// docs/internals/gpu_kernels.md has the kernels of kernels.def in order of preference, and what a plan chooses for
// every named rule: key dimensions, kernels and layouts. With FW_WRITE_PAGES set the page is written instead.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <string>
#include <utility>
#include <vector>

#include "base/error.h"
#include "base/file.h"
#include "fastweight/fastweight.h"
#include "rule/rule.h"
#include "scan/cuda/pipeline.h"

namespace {

constexpr const char* kPage = FW_SOURCE_DIR "/docs/internals/gpu_kernels.md";

// Between which marks a table stands.
std::string begin_of(const std::string& name) {
  return "<!-- " + name + ": begin (tests/scan/kernel_page_test.cpp) -->\n";
}
std::string end_of(const std::string& name) { return "<!-- " + name + ": end -->\n"; }

// What the plan says after "name: ".
std::string line_of(const std::string& plan, const std::string& name) {
  const size_t at = plan.find("\n" + name + ": ");
  if (at == std::string::npos) return "none";
  const size_t begin = at + name.size() + 3;
  return plan.substr(begin, plan.find('\n', begin) - begin);
}

// 4 sequences of 4096 tokens, not cut, 16 heads of 128, bf16.
fw_desc desc_of(const char* rule) {
  fw_desc desc;
  fw_desc_init(&desc);
  EXPECT_EQ(fw_rule_preset(rule, &desc.rule), FW_OK);
  desc.device = FW_DEVICE_CUDA;
  desc.io_dtype = desc.operands = FW_BF16;
  desc.B = 4;
  desc.T = 4096;
  desc.H = desc.HV = 16;
  desc.K = desc.V = 128;
  desc.segment = -1;  // whether it is cut depends on the device
  return desc;
}

std::string plan_of(const fw_desc& desc) {
  std::string text(fw_plan_text(&desc, nullptr, 0) + 1, '\0');
  text.resize(fw_plan_text(&desc, text.data(), text.size()));
  return text;
}

// Names of rules with the same cells are one row, where the first of them is.
class Rows {
 public:
  void add(const std::string& name, const std::string& cells) {
    for (auto& [names, of] : rows_) {
      if (of != cells) continue;
      names += ", " + name;
      return;
    }
    rows_.emplace_back(name, cells);
  }
  std::string text(const std::string& head) const {
    std::string all = head;
    for (const auto& [names, cells] : rows_) all += fmt::format("| {} | {} |\n", names, cells);
    return all;
  }

 private:
  std::vector<std::pair<std::string, std::string>> rows_;
};

std::string table() {
  Rows rows;
  for (int i = 0; fw_rule_name(i) != nullptr; ++i) {
    const std::string plan = plan_of(desc_of(fw_rule_name(i)));
    rows.add(fmt::format("`{}`", fw_rule_name(i)),
             line_of(plan, "kernels forward") + " | " + line_of(plan, "kernels backward"));
  }
  return rows.text("| rule | forward | backward |\n|---|---|---|\n");
}

// The form that a call takes by itself, or that it is refused.
std::string form_of(const fw_desc& desc) {
  const std::string plan = plan_of(desc);
  const size_t at = plan.find("form: ");
  if (at == std::string::npos) return "refused";
  const size_t begin = at + 6;
  return plan.substr(begin, plan.find(',', begin) - begin);
}

// One word for the keys from `least` to `most`, or what each of some of them takes.
std::string form_of_keys(fw_desc desc, int least, int most) {
  std::string all;
  for (int key = least; key <= most; ++key) {
    desc.K = key;
    const std::string form = form_of(desc);
    if (all.empty()) all = form;
    if (all != form) return "differs by K";
  }
  return all;
}

std::string key_table() {
  Rows rows;
  const auto add = [&](const std::string& name, fw_desc desc) {
    std::string cells = form_of_keys(desc, 1, 128) + " | " + form_of_keys(desc, 129, 256);
    desc.rule.gain_bound = std::max(desc.rule.gain_bound, 1.3);  // what a preconditioner allows
    cells += " | " + form_of_keys(desc, 1, 128) + " | " + form_of_keys(desc, 129, 256);
    rows.add(name, cells);
  };
  for (int i = 0; fw_rule_name(i) != nullptr; ++i) add(fmt::format("`{}`", fw_rule_name(i)), desc_of(fw_rule_name(i)));
  // Parts that no named rule combines.
  struct Part {
    const char* rule;
    const char* text;
    int32_t fw_rule::*field;
    int32_t value;
  };
  const Part parts[] = {
      {"mamba2", "write=channel", &fw_rule::write, FW_GATE_CHANNEL},
      {"gated_deltanet", "erase=channel", &fw_rule::erase, FW_GATE_CHANNEL},
      {"gated_deltanet", "erase=averaged", &fw_rule::erase, FW_GATE_AVERAGED},
      {"gated_deltanet", "erase=scalar", &fw_rule::erase, FW_GATE_SCALAR},
      {"gated_deltanet", "erase_key=own", &fw_rule::erase_key, FW_ERASE_KEY_OWN},
      {"kda", "erase=averaged", &fw_rule::erase, FW_GATE_AVERAGED},
      {"kda", "erase_key=own", &fw_rule::erase_key, FW_ERASE_KEY_OWN},
      {"kda", "feedback=learned", &fw_rule::feedback, FW_FEEDBACK_LEARNED},
      {"gla", "write=channel", &fw_rule::write, FW_GATE_CHANNEL},
      {"gla", "k_norm=l2", &fw_rule::k_norm, FW_NORM_L2},
  };
  for (const Part& part : parts) {
    fw_desc desc = desc_of(part.rule);
    desc.rule.*part.field = part.value;
    add(fmt::format("`{} {}`", part.rule, part.text), desc);
  }
  return rows.text(
      "| rule | K 1 to 128 | K 129 to 256 | step bound above 1: K 1 to 128 | K 129 to 256 |\n|---|---|---|---|---|\n");
}

std::string layout_table() {
  Rows rows;
  for (int i = 0; fw_rule_name(i) != nullptr; ++i) {
    fw_desc desc = desc_of(fw_rule_name(i));
    fw_desc odd = desc, wide = desc, floats = desc, grouped = desc;
    odd.K = 100;
    wide.K = 256;
    floats.io_dtype = FW_F32;
    grouped.H = 4;
    std::string cells;
    for (const fw_desc& each : {odd, floats, grouped, wide}) {
      const std::string kernels = line_of(plan_of(each), "kernels forward");
      cells += (cells.empty() ? "" : " | ") + kernels;
    }
    rows.add(fmt::format("`{}`", fw_rule_name(i)), cells);
  }
  return rows.text(
      "| rule | K = 100 | float32 tensors | 4 key heads, 16 value heads | K = 256 |\n|---|---|---|---|---|\n");
}

// Tiles as kernels.def has them: "kFwdTiles | kLoTiles" or what decides.
std::string tiles_cell(const std::string& text) {
  if (text == "kNoTiles") return "";
  std::string cell;
  for (size_t i = 0; i < text.size(); ++i) {
    if (text[i] == 'k' && (i == 0 || text[i - 1] == ' ')) continue;
    cell += text[i] == '|' ? '+' : text[i];
  }
  return cell == "scalar_tiles(t)"    ? "FwdTiles, FwdTiles + LoTiles, RowTiles or RowScales + IntraChunk"
         : cell == "channel_tiles(t)" ? "QeTiles + XmTiles or FwdTiles"
                                      : cell;
}
std::string line_table() {
  std::string all = "| phase | kernel | from | tiles left, or read |\n|---|---|---|---|\n";
  const auto add = [&](const char* phase, const std::string& name, const char* arch, const char* tiles) {
    all += fmt::format("| {} | `{}` | sm_{} | {} |\n", phase, name, std::string(arch).substr(3), tiles_cell(tiles));
  };
#define FW_PREPARE(id, name, arch, leaves, fuses, launch, takes) add("prepare", name, #arch, #leaves);
#define FW_FORWARD_SCAN(id, name, arch, reads, launch, takes) add("forward scan", name, #arch, #reads);
#define FW_REVERSE_SCAN(id, name, arch, launch, takes) add("reverse scan", name, #arch, "kNoTiles");
#define FW_GRADIENTS(id, name, arch, sums_heads, launch, takes) add("gradients", name, #arch, "kNoTiles");
#define FW_TOKEN_FORWARD(id, name, arch, takes) add("token", name, #arch, "kNoTiles");
#include "scan/cuda/kernels.def"
  return all;
}

TEST(KernelPage, IsWhatTheSelectionSays) {
  const std::pair<const char*, std::string> tables[] = {
      {"keys", key_table()}, {"lines", line_table()}, {"kernels", table()}, {"layouts", layout_table()}};
  for (const auto& [name, text] : tables) {
    const std::string page = fw::read_file(kPage);
    const size_t begin = page.find(begin_of(name)), end = page.find(end_of(name));
    ASSERT_TRUE(begin != std::string::npos && end != std::string::npos && begin < end)
        << kPage << ": expected the two marks of " << name;
    const size_t from = begin + begin_of(name).size();
    if (std::getenv("FW_WRITE_PAGES") != nullptr) {
      fw::write_file_atomic(kPage, page.substr(0, from) + text + page.substr(end));
      continue;
    }
    EXPECT_EQ(page.substr(from, end - from), text) << "docs/internals/gpu_kernels.md: FW_WRITE_PAGES=1 writes it";
  }
}

// Every name of kernels.def is a file of kernels.
TEST(KernelPage, NamesFilesThatExist) {
  const auto look = [](std::string name) {
    if (const size_t variant = name.find(" ("); variant != std::string::npos) name.resize(variant);
    bool there = false;
    for (const char* folder : {"sm90/", ""}) {
      for (const char* ending : {".cu", "/gradients.cu", "/kernel.cuh"})
        there = there || fw::file_exists(std::string(FW_SOURCE_DIR "/src/scan/cuda/") + folder + name + ending);
    }
    EXPECT_TRUE(there) << name;
  };
#define FW_PREPARE(id, name, arch, leaves, fuses, launch, takes) look(name);
#define FW_FORWARD_SCAN(id, name, arch, reads, launch, takes) look(name);
#define FW_REVERSE_SCAN(id, name, arch, launch, takes) look(name);
#define FW_GRADIENTS(id, name, arch, sums_heads, launch, takes) look(name);
#define FW_TOKEN_FORWARD(id, name, arch, takes) look(name);
#include "scan/cuda/kernels.def"
}

}  // namespace
