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

const RowLimits kRows = {8, 64};

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

// Megabytes of 64 sequences of 16 heads, as docs/notes/2026-11-ring.md has them without the token's tensors.
TEST(DecodeRing, TrafficIsThatOfTheNote) {
  const auto megabytes = [](const std::string& rule, int64_t tokens) {
    return step_traffic(shape_of(rule, 16, 128), tokens) * 64 * 16 * sizeof(float) / 1e6;
  };
  EXPECT_NEAR(megabytes("gated_deltanet", 0), 134.2, 0.1);
  EXPECT_NEAR(megabytes("gated_deltanet", 16), 81.4 - 1.1, 0.1);
  EXPECT_NEAR(megabytes("kda", 16), 86.3 - 1.6, 0.1);
  // With a fold after every token the ring comes on top.
  const RecurrenceShape shape = shape_of("retnet", 1, 16);
  EXPECT_EQ(ring_width(shape), 32);
  EXPECT_EQ(step_traffic(shape, 1), step_traffic(shape, 0) + 32);
}

TEST(DecodeRing, TheChoiceByCost) {
  struct Case {
    const char* rule;
    int64_t heads, dim, sequences;
    bool ring;
  };
  const Case cases[] = {
      {"gated_deltanet", 16, 128, 64, true},
      {"kda", 16, 128, 64, true},
      {"mamba2", 16, 128, 64, true},
      {"precond_gated_deltanet", 16, 128, 64, true},
      {"gated_deltanet", 16, 128, 9, true},   // above the few sequences that have the bits of each alone
      {"gated_deltanet", 16, 128, 8, false},  // just not
      {"gated_deltanet", 64, 128, 8, false},  // however many heads they have
      {"gated_deltanet", 16, 128, 1, false},
      {"gated_deltanet", 8, 128, 9, true},    // counts as 16 sequences, which have 128 heads
      {"gated_deltanet", 7, 128, 64, false},  // 112 heads: launches take the time
      {"gated_deltanet", 7, 128, 65, true},   // 455 heads
      {"kda", 8, 128, 64, false},             // a decay a channel: longer rows of the ring
      {"kda", 8, 128, 65, true},
      {"gated_deltanet", 9, 64, 65, false},     // 585 heads of 64 channels
      {"gated_deltanet", 9, 64, 66, true},      // 594
      {"gated_deltanet", 16, 32, 4096, false},  // the ring is nearly as long as the states
      {"kda", 16, 64, 4096, true},
      {"kda", 16, 32, 4096, false},
      {"gated_deltanet", 3, 256, 9, true},
      {"dplr", 16, 128, 64, false},  // no ring
  };
  for (const Case& c : cases) {
    const RecurrenceShape shape = shape_of(c.rule, c.heads, c.dim);
    const int64_t want = c.ring ? kRingTokens : 0;
    EXPECT_EQ(ring_by_cost(shape, c.sequences, FW_DEVICE_CUDA, kRows), want)
        << c.rule << ' ' << c.sequences << " x " << c.heads << " heads of " << c.dim;
    EXPECT_EQ(choose_ring(std::nullopt, shape, c.sequences, FW_DEVICE_CUDA, kRows), want) << c.rule;
    EXPECT_EQ(ring_by_cost(shape, c.sequences, FW_DEVICE_CPU, kRows), 0) << c.rule;
  }
}

// Every row of the table in the header, over all rules and shapes.
TEST(DecodeRing, EveryConditionIsNecessary) {
  for (const Preset& p : presets()) {
    for (const int64_t dim : {1, 16, 32, 64, 96, 128, 256}) {
      for (const int64_t heads : {1, 8, 16, 64}) {
        const RecurrenceShape shape{p.rule, heads, heads, dim, dim};
        int64_t before = 0;
        for (const int64_t sequences : {0, 1, 8, 9, 16, 64, 512, 4096}) {
          const int64_t tokens = ring_by_cost(shape, sequences, FW_DEVICE_CUDA, kRows);
          EXPECT_GE(tokens, before) << "more sequences never take a ring away";
          before = tokens;
          if (tokens == 0) continue;
          EXPECT_EQ(tokens, kRingTokens);
          EXPECT_TRUE(has_ring(p.rule, FW_DEVICE_CUDA));
          EXPECT_GT(sequences, kRows.decode);
          EXPECT_LE(step_traffic(shape, tokens), 0.75 * step_traffic(shape, 0));
        }
      }
    }
  }
}

// Among 9 to 64 sequences one has the same bits, whatever their number.
TEST(DecodeRing, SomeSequencesHaveOneChoice) {
  for (const Preset& p : presets()) {
    for (const int64_t dim : {32, 64, 128, 256}) {
      for (const int64_t heads : {1, 2, 4, 8, 9, 16, 64}) {
        const RecurrenceShape shape{p.rule, heads, heads, dim, dim};
        const int64_t choice = ring_by_cost(shape, 64, FW_DEVICE_CUDA, kRows);
        for (int64_t sequences = 9; sequences < 64; ++sequences)
          ASSERT_EQ(ring_by_cost(shape, sequences, FW_DEVICE_CUDA, kRows), choice) << p.name << ' ' << sequences;
      }
    }
  }
}

TEST(DecodeRing, ANumberThatIsGivenIsTaken) {
  EXPECT_EQ(choose_ring(5, shape_of("kda", 1, 4), 1, FW_DEVICE_CPU, kRows), 5);
  EXPECT_EQ(choose_ring(0, shape_of("kda", 16, 128), 64, FW_DEVICE_CUDA, kRows), 0);
  EXPECT_EQ(choose_ring(5, shape_of("dplr", 1, 4), 1, FW_DEVICE_CPU, kRows), 0) << "a layer without a ring steps";
}

}  // namespace
}  // namespace fw
