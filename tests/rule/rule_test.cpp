// Rules as values: names, texts, validation, the C struct.
#include "rule/rule.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <array>
#include <limits>
#include <set>

#include "base/error.h"

namespace fw {
namespace {

std::string refused(std::string_view text) {
  try {
    parse_rule(text);
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kUsage) << text;
    return error.what();
  }
  ADD_FAILURE() << "accepted: " << text;
  return "";
}

#define EXPECT_REFUSED(text, part) EXPECT_NE(refused(text).find(part), std::string::npos) << refused(text)

// Model files of fastweight 0.1 have it so.
TEST(Rule, TheOldNameOfTheAxisUpdateIsRead) {
  EXPECT_EQ(to_string(parse_rule("decay=scalar solve=offline")), "decay=scalar update=additive");
  EXPECT_EQ(to_string(parse_rule("gla solve=online")), to_string(parse_rule("gla update=delta")));
  EXPECT_REFUSED("solve=delta", "written update=delta");
  EXPECT_REFUSED("solve=offline update=additive", "expected one value");
}

TEST(Rule, PresetsHaveDistinctNamesAndRules) {
  std::set<std::string_view> names;
  std::set<std::string> rules;
  for (const Preset& p : presets()) {
    EXPECT_TRUE(names.insert(p.name).second) << p.name;
    EXPECT_TRUE(rules.insert(to_string(p.rule)).second) << p.name << " is another preset's rule";
    EXPECT_FALSE(p.summary.empty()) << p.name;
    EXPECT_NO_THROW(validate(p.rule)) << p.name;
    EXPECT_EQ(preset(p.name).rule, p.rule);
    EXPECT_EQ(parse_rule(p.name), p.rule);
  }
}

TEST(Rule, TheAxesAreListedAsTextsSpellThem) {
  EXPECT_EQ(rule_axes().front().name, "decay");
  for (const AxisInfo& axis : rule_axes()) {
    std::set<std::string> rules;
    const std::string needed = axis.name == "key_source" ? "decay=channel " : "";
    for (const std::string_view value : axis.values)
      rules.insert(to_string(parse_rule(fmt::format("{}{}={}", needed, axis.name, value))));
    EXPECT_EQ(rules.size(), axis.values.size()) << axis.name;
  }
}

// Every value of every axis, and numbers that decimal text holds only when it is written to the last digit.
TEST(Rule, TextRoundTrip) {
  Rule rule;
  for (const Decay decay : {Decay::kNone, Decay::kConstant, Decay::kScalar, Decay::kChannel}) {
    for (int bits = 0; bits < 256; ++bits) {
      rule.decay = decay;
      rule.update = static_cast<Update>(bits & 1);
      rule.erase = static_cast<Gate>(bits >> 1 & 1);
      rule.write = static_cast<Gate>(bits >> 2 & 1);
      rule.feedback = static_cast<Feedback>(bits >> 3 & 1);
      rule.precond = static_cast<Precond>(bits >> 4 & 1);
      rule.q_norm = static_cast<Norm>(bits >> 5 & 1);
      rule.k_norm = static_cast<Norm>(bits >> 6 & 1);
      rule.gain = static_cast<Gain>(bits % 6);
      rule.norm_eps = bits & 128 ? 1.0 / 3 : 1e-6;
      rule.gain_eps = bits & 128 ? 5e-324 : 1e-6;
      EXPECT_EQ(parse_rule(to_string(rule)), rule) << to_string(rule);
      EXPECT_EQ(from_c(to_c(rule)), rule) << to_string(rule);
    }
  }
}

TEST(Rule, ANameCanBeChanged) {
  const Rule rule = parse_rule("kda  gain=kaczmarz\twrite=channel");
  EXPECT_EQ(rule.decay, Decay::kChannel);
  EXPECT_EQ(rule.gain, Gain::kKaczmarz);
  EXPECT_EQ(rule.write, Gate::kChannel);
  EXPECT_EQ(rule.k_norm, Norm::kL2);
}

TEST(Rule, ErrorsNameTheAxisWhatWasExpectedAndWhatCame) {
  EXPECT_REFUSED("", "empty");
  EXPECT_REFUSED(" \n", "empty");
  EXPECT_REFUSED("gated_deltanet22", "'gated_deltanet2'");
  EXPECT_REFUSED("decya=scalar", "did you mean 'decay'");
  EXPECT_REFUSED("decay=diagonal", "none, constant, scalar, channel, got 'diagonal'");
  EXPECT_REFUSED("decay=", "got ''");
  EXPECT_REFUSED("kda scalar", "axis=value, got 'scalar'");
  EXPECT_REFUSED("gain_eps=1e-6x", "a number, got '1e-6x'");
  EXPECT_REFUSED("gain_eps=", "a number, got ''");
  EXPECT_REFUSED("norm_eps=-1", "norm_eps");
  EXPECT_REFUSED("norm_eps=nan", "norm_eps");
  EXPECT_REFUSED("gain_bound=2.5", "gain_bound");
  EXPECT_REFUSED("precond_eps=0", "precond_eps");
}

// An eigenvalue 1 - s k.(M k) may reach 1 - gain_bound * x, which must not leave the unit disk. It matters only where
// the rule erases and is preconditioned.
TEST(Rule, GainBoundTimesRangeIsAtMostTwo) {
  EXPECT_NO_THROW(parse_rule("precond_gated_deltanet precond_x=2"));
  EXPECT_NO_THROW(parse_rule("precond_gated_deltanet gain_bound=2 precond_x=1"));
  EXPECT_REFUSED("precond_gated_deltanet gain_bound=2", "lower precond_x to 1");
  EXPECT_REFUSED("precond_gated_deltanet gain_bound=1.6 precond_x=1.5", "gain_bound * precond_x <= 2");
  EXPECT_NO_THROW(parse_rule("gated_deltanet gain_bound=2"));
  EXPECT_NO_THROW(parse_rule("update=additive precond=diagonal gain_bound=2"));
}

// Numbers of the C struct that no enum has, far and near.
TEST(Rule, ValuesOutsideTheEnumsAreRefused) {
  const std::array<int32_t fw_rule::*, 16> fields = {
      &fw_rule::decay,   &fw_rule::update,       &fw_rule::gain,        &fw_rule::erase,
      &fw_rule::write,   &fw_rule::erase_key,    &fw_rule::feedback,    &fw_rule::read,
      &fw_rule::precond, &fw_rule::precond_form, &fw_rule::normaliser,  &fw_rule::q_norm,
      &fw_rule::k_norm,  &fw_rule::key_source,   &fw_rule::erase_state, &fw_rule::erase_write};
  for (const auto field : fields) {
    for (const int32_t value : {-1, 7, std::numeric_limits<int32_t>::max(), std::numeric_limits<int32_t>::min()}) {
      fw_rule c = to_c(Rule());
      c.*field = value;
      EXPECT_THROW(from_c(c), Error) << value;
    }
  }
}

// Which inputs a rule takes, for the cases where two axes decide together.
TEST(Rule, TakesWhatItsAxesUse) {
  EXPECT_FALSE(parse_rule("update=additive erase=channel feedback=learned").uses_erase_gate());
  EXPECT_FALSE(parse_rule("update=additive erase=channel feedback=learned").uses_lambda());
  EXPECT_FALSE(parse_rule("gain=gate erase=channel write=channel").uses_beta());
  EXPECT_TRUE(parse_rule("gain=gate erase=channel").uses_beta());
  EXPECT_TRUE(parse_rule("update=additive gain=gate").uses_beta());
  EXPECT_FALSE(parse_rule("decay=constant").uses_g());
  EXPECT_FALSE(parse_rule("gain=nlms").uses_beta());
  EXPECT_TRUE(parse_rule("gain=longhorn write=channel").uses_beta());
  EXPECT_TRUE(parse_rule("precond=read").uses_precond());
  EXPECT_FALSE(parse_rule("update=additive erase_key=own").uses_erase_key());
  EXPECT_FALSE(parse_rule("update=additive erase_write=own").uses_erase_write());
  EXPECT_TRUE(parse_rule("erase_write=own").general_erase());
  EXPECT_FALSE(parse_rule("erase_state=previous").general_erase());  // without a decay both states are one
  EXPECT_TRUE(parse_rule("decay=constant erase_state=previous").general_erase());
  for (const char* text : {"comba erase_state=previous", "gated_deltanet erase_state=previous",
                           "decay=scalar gain=nlms erase=scalar erase_state=previous"}) {
    EXPECT_TRUE(parse_rule(text).can_divide_erase_gate()) << text;
    EXPECT_FALSE(parse_rule(text).general_erase()) << text;
  }
  for (const char* text : {"gated_deltanet", "kda erase_state=previous", "kaczmarz erase_state=previous",
                           "precond_gated_deltanet erase_state=previous", "comba erase_write=own",
                           "decay=constant erase=scalar erase_state=previous"})
    EXPECT_FALSE(parse_rule(text).can_divide_erase_gate()) << text;
  EXPECT_FALSE(parse_rule("feedback=fixed").uses_lambda());
  EXPECT_TRUE(parse_rule("update=additive read=corrected").uses_read_correction());
  EXPECT_FALSE(parse_rule("precond=read precond_form=inverse").uses_precond_center());
  EXPECT_FALSE(parse_rule("hgrn2").uses_k());
}

// The C struct carries every axis and number: nothing of a rule is lost on the way through it.
TEST(Rule, EveryAxisAndNumberPassesThroughTheHeader) {
  for (const AxisInfo& axis : rule_axes()) {
    for (size_t value = 0; value < axis.values.size(); ++value) {
      Rule rule;
      if (axis.name == "key_source") rule.decay = Decay::kChannel;
      axis.set(rule, static_cast<int>(value));
      EXPECT_EQ(from_c(to_c(rule)), rule) << axis.name << "=" << axis.values[value];
      EXPECT_EQ(parse_rule(to_string(rule)), rule) << to_string(rule);
    }
  }
  for (const NumberInfo& number : rule_numbers()) {
    Rule rule;
    rule.*number.field = number.name == "precond_x" ? 1.25 : 0.125;
    EXPECT_EQ(from_c(to_c(rule)), rule) << number.name;
    EXPECT_EQ(parse_rule(to_string(rule)), rule) << number.name;
  }
}

// The step along M k stays in the unit disk, whichever form M has.
TEST(Rule, UnstablePreconditionersAreRefused) {
  EXPECT_THROW(parse_rule("gain=gate precond=diagonal precond_form=inverse"), Error);
  EXPECT_THROW(parse_rule("gain=gate precond=diagonal precond_form=inverse_previous"), Error);
  EXPECT_NO_THROW(parse_rule("gain=gate precond=diagonal precond_form=inverse normaliser=one_plus"));
  EXPECT_NO_THROW(parse_rule("gain=gate precond=read precond_form=inverse"));
  EXPECT_THROW(parse_rule("gain=gate gain_bound=2 precond=diagonal precond_form=squash_high"), Error);
  EXPECT_NO_THROW(parse_rule("gain=gate gain_bound=2 precond=diagonal precond_form=squash_low precond_x=2"));
  EXPECT_NO_THROW(parse_rule("gain=gate gain_bound=2 precond=diagonal normaliser=key"));
}

// k = 1 - exp(g) needs a g of every channel, and the preconditioner a k before there are value heads.
TEST(Rule, AKeyFromTheDecayNeedsAChannelDecay) {
  EXPECT_REFUSED("key_source=decay decay=scalar", "expected decay=channel and precond=none");
  EXPECT_REFUSED("hgrn2 precond=read", "expected decay=channel and precond=none");
  EXPECT_NO_THROW(parse_rule("kda key_source=decay"));
}

// Its step is 1 / (1 + beta k.(M k)), stable for any M.
TEST(Rule, TheImplicitPreconditionedStepIsNeverRefused) {
  EXPECT_NO_THROW(parse_rule("precond_longhorn gain_bound=2 precond_x=2"));
  EXPECT_NO_THROW(parse_rule("precond_longhorn precond_form=inverse"));
  EXPECT_THROW(parse_rule("precond_longhorn gain_bound=2 precond_x=2 erase=channel"), Error);
}

TEST(Rule, AnAxisIsGivenOnce) {
  EXPECT_REFUSED("decay=scalar decay=none", "a second with 'decay=none'");
  EXPECT_REFUSED("kda precond_x=1 precond_x=1", "a second");
}

// What a refusal advises is accepted.
TEST(Rule, AdviceOnThePreconditionerIsAccepted) {
  const auto with_bound = [](const std::string& bound) {
    return fmt::format("precond=diagonal gain=gate k_norm=l2 gain_bound={}", bound);
  };
  for (const char* bound : {"1.37", "1.5", "1.9", "1.99", "2"}) {
    const std::string message = refused(with_bound(bound));
    const auto advised = [&message](const std::string& words) {
      return message.substr(message.find(words) + words.size()).substr(0, 6);
    };
    const double x = std::stod(advised("lower precond_x to ")), other = std::stod(advised("or gain_bound to "));
    EXPECT_NO_THROW(parse_rule(fmt::format("{} precond_x={}", with_bound(bound), x))) << message;
    EXPECT_NO_THROW(parse_rule(with_bound(fmt::format("{}", other)))) << message;
  }
}

}  // namespace
}  // namespace fw
