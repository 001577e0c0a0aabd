// First values drawn in pieces by several threads are those of one generator that draws one after the other.
#include "nn/init_random.h"

#include <gtest/gtest.h>

#include <map>

#include "base/threads.h"
#include "nn/params.h"

namespace fw::testing {
namespace {

struct Drawn {
  std::map<std::string, std::vector<float>> values;
  std::string random;  // afterwards
  bool operator==(const Drawn&) const = default;
};

Drawn draw(const std::vector<ParamSpec>& specs, uint64_t seed, int log_piece) {
  Drawn drawn;
  Random random(seed);
  random.normal();  // not a fresh one
  for (const ParamSpec& spec : specs) drawn.values[spec.name].assign(static_cast<size_t>(spec.size()), -100.0F);
  init_random<float>(
      specs, random,
      [&](const ParamSpec& spec, int64_t at, std::span<const float> values) {
        std::copy(values.begin(), values.end(), drawn.values.at(spec.name).begin() + at);
      },
      log_piece);
  drawn.random = random.save();
  return drawn;
}

// Of one number a value, of two, of none, and sizes that pieces cut anywhere: a normal value's two numbers too.
std::vector<ParamSpec> mixed() {
  return {{"uniform", {3, 431}, uniform_init(0.5)},
          {"constant", {700}, constant_init(3.0)},
          {"normal", {1999}, normal_init(0.02)},
          {"one", {1}, uniform_init(2.0)},
          {"normal again", {50, 41}, normal_init(1.0)},
          {"places", {5000}, index_init([](double i) { return i / 2; })},
          {"a", {129}, decay_a_init(0.0)},
          {"delta", {64}, decay_delta_init()},
          {"empty", {0}, normal_init(1.0)},
          {"last", {9}, constant_init(-1.0)}};
}

TEST(InitRandom, PiecesHaveTheNumbersOfTheWhole) {
  const std::vector<ParamSpec> specs = mixed();
  const Drawn whole = draw(specs, 3, 30);
  EXPECT_EQ(whole.values.at("constant"), std::vector<float>(700, 3.0F));
  for (size_t i = 0; i < 5000; ++i) EXPECT_EQ(whole.values.at("places")[i], static_cast<float>(i) / 2);
  const int threads = num_threads();
  for (const int count : {1, 3}) {
    set_num_threads(count);
    for (const int log_piece : {5, 8, 11}) {
      SCOPED_TRACE(::testing::Message() << "pieces of 2^" << log_piece << ", threads " << count);
      EXPECT_TRUE(draw(specs, 3, log_piece) == whole);
    }
  }
  set_num_threads(threads);
  EXPECT_FALSE(draw(specs, 4, 7) == whole);
}

// One that says nothing of how much it draws is drawn as it always was, and so is what comes with it.
TEST(InitRandom, WhatIsNotCountedIsDrawnInOne) {
  std::vector<ParamSpec> specs = mixed();
  size_t seen = 0;
  specs.push_back({"own", {5000}, [&](std::span<double> values, Random& random) {
                     seen = values.size();
                     for (double& x : values) x = static_cast<double>(random.below(3));
                   }});
  const Drawn whole = draw(specs, 3, 30);
  EXPECT_TRUE(draw(specs, 3, 4) == whole);
  EXPECT_EQ(seen, 5000U);
}

// As many numbers as a spec says are as many as its function draws.
TEST(InitRandom, InitialisersDrawWhatTheySay) {
  for (const ParamSpec& spec : mixed()) {
    Random drawn(9), counted(9);
    std::vector<double> values(static_cast<size_t>(spec.size()));
    spec.init(values, drawn);
    for (int64_t i = 0; i < draws_of(spec.init) * spec.size(); ++i) counted.bits();
    EXPECT_EQ(drawn.bits(), counted.bits()) << spec.name;
  }
}

}  // namespace
}  // namespace fw::testing
