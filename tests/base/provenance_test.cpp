// Where results come from: in JSON, as the words of a command, and as a sentence.
#include "base/provenance.h"

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

namespace fw {
namespace {

TEST(Provenance, ComesBackFromJson) {
  const Provenance one{"fastweight 1", "fastweight sweep lm", "NVIDIA H200", "2026-12-01"};
  EXPECT_EQ(to_json(provenance_from_json(to_json(one))), to_json(one));
  EXPECT_EQ(to_json(provenance_from_json(nullptr)), to_json(Provenance{}));
  EXPECT_THROW(provenance_from_json({{"program", 1}}), nlohmann::json::exception);
}

TEST(Provenance, ACommandIsQuotedForAShell) {
  EXPECT_EQ(command_text({"fastweight", "sweep", "--lr", "1e-3,2e-3", "--out", "a/b_c.d"}),
            "fastweight sweep --lr 1e-3,2e-3 --out a/b_c.d");
  EXPECT_EQ(command_text({"--rule", "kda q_norm=raw", "", "it's", "$HOME"}),
            "--rule 'kda q_norm=raw' '' 'it'\\''s' '$HOME'");
}

TEST(Provenance, WhatDiffersReadsSeveral) {
  const Provenance one{"fastweight 1", "", "NVIDIA H200", "2026-12-01"};
  Provenance other = one;
  EXPECT_EQ(provenance_text({one, other}), "Provenance: program fastweight 1, device NVIDIA H200, date 2026-12-01.");
  other.device = "NVIDIA A100";
  EXPECT_EQ(provenance_text({one, other}), "Provenance: program fastweight 1, device several, date 2026-12-01.");
  EXPECT_EQ(provenance_text({{}, {}}), "");
  EXPECT_EQ(provenance_text({}), "");
}

}  // namespace
}  // namespace fw
