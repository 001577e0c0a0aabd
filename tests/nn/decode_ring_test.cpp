// When decoding uses a ring (nn/decode_ring.h): which rules have one, what it costs, and the choice by cost.
#include "nn/decode_ring.h"

#include <gtest/gtest.h>

#include <string>

#include "base/device.h"
#include "nn/recurrence.h"
#include "scan/ring.h"
#include "support/error_of.h"

namespace fw {
namespace {

RecurrenceShape shape_of(const std::string& rule, int64_t heads, int64_t dim) {
  return {preset(rule).rule, heads, heads, dim, dim};
}

TEST(DecodeRing, OnlyRulesWithOneHaveIt) {
  const int32_t position = 0;
  int without = 0;
  for (const Preset& p : presets()) {
    RecurrenceShape shape{p.rule, 2, 2, 16, 16};
    shape.ring = {kRingTokens, &position};
    if (has_ring(p.rule, FW_DEVICE_CPU)) {
      EXPECT_NO_THROW(require_ring<float>(shape, 3, host_device())) << p.name;
    } else {
      EXPECT_NE(testing::error_of([&] { require_ring<float>(shape, 3, host_device()); }).find("erase_write=own"),
                std::string::npos)
          << p.name;
      ++without;
    }
    EXPECT_EQ(has_ring(p.rule, FW_DEVICE_CUDA), has_ring(p.rule, FW_DEVICE_CPU) && !p.rule.general_erase()) << p.name;
  }
  EXPECT_GT(without, 0);
  RecurrenceShape shape = shape_of("kda", 1, 8);
  shape.ring = {kMostRingTokens + 1, &position};
  EXPECT_NE(testing::error_of([&] { require_ring<float>(shape, 1, host_device()); }).find("decode ring: "),
            std::string::npos);
}

TEST(DecodeRing, ANumberThatIsGivenIsTaken) {
  for (const fw_device kind : {FW_DEVICE_CPU, FW_DEVICE_CUDA}) {
    EXPECT_EQ(choose_ring(5, preset("kda").rule, kind), 5);
    EXPECT_EQ(choose_ring(0, preset("kda").rule, kind), 0);
    EXPECT_EQ(choose_ring(std::nullopt, preset("kda").rule, kind), 0);
    EXPECT_EQ(choose_ring(5, preset("dplr").rule, kind), 0) << "a layer without a ring steps";
  }
}

}  // namespace
}  // namespace fw
