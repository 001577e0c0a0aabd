// What the C header promises to programs: structs by their size, reserved fields, rules as text, names of constants,
// memory, the version.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <fstream>
#include <functional>
#include <iterator>
#include <limits>
#include <map>
#include <regex>
#include <set>
#include <string>
#include <vector>

#include "base/random.h"
#include "fastweight/fastweight.h"
#include "rule/enum_names.h"
#include "rule/rule.h"
#include "scan/struct_size.h"
#include "support/error_of.h"

namespace fw::testing {
namespace {

// fw_rule has no padding (tests/abi); its numbers are compared by their bits.
bool same_bytes(const fw_rule& a, const fw_rule& b) {
  return std::memcmp(&a, &b, sizeof(a)) == 0;  // NOLINT(bugprone-suspicious-memory-comparison)
}

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::StartsWith;

std::string text_of(const std::string& file) {
  std::ifstream in(std::string(FW_SOURCE_DIR) + "/" + file);
  std::string text((std::istreambuf_iterator<char>(in)), std::istreambuf_iterator<char>());
  EXPECT_FALSE(text.empty()) << file;
  return text;
}

fw_desc small_desc() {
  fw_desc desc;
  fw_desc_init(&desc);
  desc.B = desc.T = desc.H = desc.HV = 1, desc.K = desc.V = 16;
  return desc;
}

std::string message_of(const fw_desc& desc) {
  fw_sizes sizes;
  fw_sizes_init(&sizes);
  return fw_workspace_query(&desc, &sizes) == FW_OK ? "" : fw_last_error();
}

// A struct as it may be in a later version of the header: `second` was added after the fields of the first version.
struct Grown {
  size_t size;
  int64_t first;
  double second;
};
constexpr size_t kGrownFirst = offsetof(Grown, second);

TEST(Structs, ShorterOnesGetTheDefaultsOfWhatTheyLack) {
  const Grown defaults = {sizeof(Grown), 3, 0.5};
  Grown given;
  std::memset(static_cast<void*>(&given), 0xff, sizeof(given));
  init_struct(&given, kGrownFirst, defaults);
  EXPECT_EQ(given.size, kGrownFirst);
  EXPECT_EQ(given.first, 3);
  EXPECT_TRUE(std::isnan(given.second)) << "bytes behind the caller's struct were written";
  given.first = 7;
  const Grown whole = complete_struct(given, defaults, kGrownFirst, "argument", "fw_grown");
  EXPECT_EQ(whole.size, sizeof(Grown));
  EXPECT_EQ(whole.first, 7);
  EXPECT_EQ(whole.second, 0.5);
  given.size = sizeof(Grown), given.second = 2;
  EXPECT_EQ(complete_struct(given, defaults, kGrownFirst, "argument", "fw_grown").second, 2);
  for (const size_t size : {size_t{0}, kGrownFirst - 8, kGrownFirst + 4, sizeof(Grown) + 8}) {
    given.size = size;
    EXPECT_THAT(error_of([&] { complete_struct(given, defaults, kGrownFirst, "argument", "fw_grown"); }),
                StartsWith("argument: size: expected "))
        << size;
  }
}

// Of a struct that a newer header has made longer, what is known has its default and the rest is zero; a call refuses
// it.
TEST(Structs, OfANewerHeaderAreRefused) {
  struct {
    fw_desc desc;
    unsigned char more[16];
  } newer;
  std::memset(static_cast<void*>(&newer), 0xff, sizeof(newer));
  fw_desc_init_sized(&newer.desc, sizeof(fw_desc) + 8);
  EXPECT_EQ(newer.desc.size, sizeof(fw_desc) + 8);
  EXPECT_EQ(newer.desc.device_number, -1);
  for (size_t i = 0; i < std::size(newer.more); ++i) EXPECT_EQ(newer.more[i], i < 8 ? 0 : 0xff) << i;
  EXPECT_EQ(
      message_of(newer.desc),
      fmt::format("descriptor: size: expected at most {}, the bytes of fw_desc in this library, got {}: the program "
                  "was compiled with a newer "
                  "fastweight.h; install that version's library, or compile the program with this library's header",
                  sizeof(fw_desc), sizeof(fw_desc) + 8));
}

TEST(Structs, OfAllOtherSizesAreRefusedByName) {
  constexpr size_t kFirst = offsetof(fw_desc, ring);  // of version 0.2.0
  size_t taken = 0;
  for (size_t size = 0; size <= sizeof(fw_desc) + 64; ++size) {
    fw_desc desc = small_desc();
    desc.size = size;
    const std::string message = message_of(desc);
    taken += message.empty() ? 1 : 0;
    if (!message.empty()) {
      EXPECT_THAT(message, AllOf(StartsWith("descriptor: size: expected "), HasSubstr("fw_desc"))) << size;
    }
  }
  EXPECT_EQ(taken, (sizeof(fw_desc) - kFirst) / alignof(fw_desc) + 1);
  const fw_desc desc = small_desc();
  fw_sizes sizes;
  fw_sizes_init(&sizes);
  sizes.size = 8;
  EXPECT_EQ(fw_workspace_query(&desc, &sizes), FW_ERROR_ARGUMENT);
  EXPECT_THAT(fw_last_error(), AllOf(StartsWith("sizes: size: expected "), HasSubstr("fw_sizes_init")));
  fw_inputs in;
  fw_outputs out;
  fw_inputs_init(&in);
  fw_outputs_init(&out);
  in.size -= 8;
  EXPECT_EQ(fw_forward(&desc, &in, &out, nullptr, 0, nullptr, 0), FW_ERROR_ARGUMENT);
  EXPECT_THAT(fw_last_error(), AllOf(StartsWith("inputs: size: expected "), HasSubstr("fw_inputs_init")));
  fw_inputs_init(&in);
  out.size += 8;
  EXPECT_EQ(fw_forward(&desc, &in, &out, nullptr, 0, nullptr, 0), FW_ERROR_ARGUMENT);
  EXPECT_THAT(fw_last_error(), AllOf(StartsWith("outputs: size: expected at most "), HasSubstr("newer fastweight.h")));
  fw_desc no_rule = small_desc();
  no_rule.rule.size = 0;
  EXPECT_THAT(message_of(no_rule), AllOf(StartsWith("rule: size: expected "), HasSubstr("fw_rule_init")));
}

TEST(Structs, ReservedFieldsAreZero) {
  const auto message = [](const std::function<void(fw_desc&)>& change) {
    fw_desc desc = small_desc();
    change(desc);
    return message_of(desc);
  };
  EXPECT_EQ(message([](fw_desc&) {}), "");
  EXPECT_THAT(message([](fw_desc& d) { d.reserved = 1; }), StartsWith("descriptor: reserved: expected 0, got 1"));
  EXPECT_THAT(message([](fw_desc& d) { d.rule.reserved[7] = 2; }), StartsWith("rule: reserved: expected 0, got 2"));
  EXPECT_THAT(message([](fw_desc& d) { d.gates.reserved[8] = 3; }), StartsWith("gates: reserved: expected 0, got 3"));
  EXPECT_THAT(message([](fw_desc& d) { d.seqlens.reserved[1] = 4; }),
              StartsWith("descriptor: seqlens.reserved: expected 0, got 4"));
  EXPECT_THAT(message([](fw_desc& d) { d.state_pool.reserved[0] = 5; }),
              StartsWith("descriptor: state_pool.reserved: expected 0, got 5"));
  EXPECT_THAT(message([](fw_desc& d) { d.speculation.reserved[1] = 6; }),
              StartsWith("descriptor: speculation.reserved: expected 0, got 6"));
  EXPECT_THAT(message([](fw_desc& d) { d.checkpoints.reserved[0] = 7; }),
              StartsWith("descriptor: checkpoints.reserved: expected 0, got 7"));
  EXPECT_THAT(message([](fw_desc& d) { d.ring.reserved[1] = 8; }),
              StartsWith("descriptor: ring.reserved: expected 0, got 8"));
}

// No bytes between fields, so that none can hide there: the fields' bytes add up.
TEST(Structs, HaveNoPadding) {
  EXPECT_EQ(sizeof(fw_rule), sizeof(size_t) + 16 * sizeof(int32_t) + 7 * sizeof(double) + 8 * sizeof(int64_t));
  EXPECT_EQ(sizeof(fw_gates), 16 * sizeof(int32_t) + 2 * sizeof(double));
  EXPECT_EQ(sizeof(fw_tensor), sizeof(void*) + 2 * sizeof(int32_t) + 8 * sizeof(int64_t));
  EXPECT_EQ(sizeof(fw_seqlens), sizeof(void*) + 4 * sizeof(int64_t) + 2 * sizeof(int32_t));
  EXPECT_EQ(sizeof(fw_state_pool), 2 * sizeof(void*) + 3 * sizeof(int64_t) + 2 * sizeof(int32_t));
  EXPECT_EQ(sizeof(fw_speculation), 2 * sizeof(void*) + 4 * sizeof(int64_t));
  EXPECT_EQ(sizeof(fw_checkpoints), sizeof(void*) + 5 * sizeof(int64_t));
  EXPECT_EQ(sizeof(fw_ring), 2 * sizeof(void*) + 4 * sizeof(int64_t));
  EXPECT_EQ(sizeof(fw_desc), sizeof(size_t) + sizeof(fw_rule) + sizeof(fw_gates) + 8 * sizeof(int32_t) + sizeof(void*) +
                                 8 * sizeof(int64_t) + sizeof(double) + sizeof(fw_seqlens) + sizeof(fw_state_pool) +
                                 sizeof(fw_speculation) + sizeof(fw_checkpoints) + sizeof(fw_ring));
  EXPECT_EQ(sizeof(fw_inputs), sizeof(size_t) + 20 * sizeof(fw_tensor));
  EXPECT_EQ(sizeof(fw_outputs), sizeof(size_t) + 6 * sizeof(fw_tensor));
  EXPECT_EQ(sizeof(fw_sizes), 6 * sizeof(size_t));
}

std::string format(const fw_rule& rule) {
  const size_t length = fw_rule_format(&rule, nullptr, 0);
  std::vector<char> text(length + 1, 'x');
  EXPECT_EQ(fw_rule_format(&rule, text.data(), text.size()), length) << fw_last_error();
  EXPECT_EQ(std::strlen(text.data()), length);
  return text.data();
}

// Byte for byte: a rule has no padding.
void expect_round_trip(const fw_rule& rule) {
  const std::string text = format(rule);
  fw_rule again;
  std::memset(static_cast<void*>(&again), 0xff, sizeof(again));
  ASSERT_EQ(fw_rule_parse(text.c_str(), &again), FW_OK) << text << ": " << fw_last_error();
  EXPECT_TRUE(same_bytes(rule, again)) << text;
}

TEST(RuleText, RoundTripsForEveryPreset) {
  for (const auto list : {presets(), ablations()}) {
    for (const Preset& p : list) {
      fw_rule rule, named;
      ASSERT_EQ(fw_rule_preset(std::string(p.name).c_str(), &rule), FW_OK) << fw_last_error();
      ASSERT_EQ(fw_rule_parse(std::string(p.name).c_str(), &named), FW_OK) << fw_last_error();
      EXPECT_TRUE(same_bytes(rule, named)) << p.name;
      expect_round_trip(rule);
    }
  }
  fw_rule rule;
  fw_rule_init(&rule);
  EXPECT_EQ(format(rule), "decay=none");
  expect_round_trip(rule);
}

TEST(RuleText, RoundTripsForRandomRules) {
  Random random(47);
  int tried = 0;
  for (int valid = 0; valid < 2000; ++tried) {
    ASSERT_LT(tried, 100000);
    Rule rule;
    for (const AxisInfo& axis : rule_axes()) axis.set(rule, static_cast<int>(random.below(axis.values.size())));
    for (const NumberInfo& number : rule_numbers()) {
      if (random.below(2) == 0) rule.*number.field *= 1 + static_cast<double>(random.below(1u << 30)) / (1u << 30);
    }
    if (!error_of([&] { validate(rule); }).empty()) continue;
    ++valid;
    expect_round_trip(to_c(rule));
    if (HasFailure()) return;
  }
}

TEST(RuleText, SaysWhatIsWrong) {
  fw_rule rule;
  fw_rule_init(&rule);
  const fw_rule before = rule;
  const auto error = [&](const char* text) {
    EXPECT_EQ(fw_rule_parse(text, &rule), FW_ERROR_ARGUMENT);
    EXPECT_TRUE(same_bytes(rule, before)) << text;
    return std::string(fw_last_error());
  };
  EXPECT_EQ(error(nullptr), "text: expected a preset's name or axis=value ..., got NULL");
  EXPECT_EQ(error(""), "rule: expected a preset's name or axis=value ..., got an empty text");
  EXPECT_EQ(error("kda decay=fast"), "rule: axis decay: expected one of none, constant, scalar, channel, got 'fast'");
  EXPECT_EQ(error("kda fast"), "rule: expected axis=value, got 'fast'");
  EXPECT_EQ(error("gain_bound=big"), "rule: gain_bound: expected a number, got 'big'");
  EXPECT_EQ(error("gain_bound=3"), "rule: gain_bound: expected 0 <= gain_bound <= 2, got 3");
  EXPECT_THAT(error("kdaa"), StartsWith("rule: unknown preset 'kdaa'; did you mean 'kda'?"));
  EXPECT_EQ(fw_rule_parse("kda", nullptr), FW_ERROR_ARGUMENT);
  EXPECT_STREQ(fw_last_error(), "rule: expected a struct, got NULL");
  EXPECT_EQ(fw_rule_format(nullptr, nullptr, 0), 0u);
  EXPECT_STREQ(fw_last_error(), "rule: expected a struct, got NULL");
  rule.gain = 99;
  EXPECT_EQ(fw_rule_format(&rule, nullptr, 0), 0u);
  EXPECT_STREQ(
      fw_last_error(),
      "rule: axis gain: expected one of one, gate, kaczmarz, nlms, longhorn, efla, precond_longhorn (0 to 6), got 99");
}

TEST(RuleText, IsCutAtTheBuffersEnd) {
  fw_rule rule;
  ASSERT_EQ(fw_rule_parse("kda", &rule), FW_OK);
  const std::string whole = format(rule);
  for (size_t bytes = 0; bytes <= whole.size() + 2; ++bytes) {
    std::vector<char> buffer(whole.size() + 3, '#');
    EXPECT_EQ(fw_rule_format(&rule, buffer.data(), bytes), whole.size());
    if (bytes == 0) {
      EXPECT_EQ(buffer[0], '#');
    } else {
      EXPECT_EQ(std::string(buffer.data()), whole.substr(0, bytes - 1));
      EXPECT_EQ(buffer[bytes], '#');
    }
  }
}

// The names of messages beside the header's own text: every constant, its number, and none beside them.
TEST(EnumNames, AreThoseOfTheHeader) {
  const std::string header =
      std::regex_replace(text_of("include/fastweight/fastweight.h"), std::regex(R"(/\*[^*]*\*+([^/*][^*]*\*+)*/)"), "");
  std::map<std::string, std::map<int, std::string>> declared;
  const std::regex whole(R"(typedef enum (\w+) \{([^}]*)\})"), item(R"((FW_\w+)\s*=\s*(\d+))");
  for (auto e = std::sregex_iterator(header.begin(), header.end(), whole); e != std::sregex_iterator(); ++e) {
    const std::string body = (*e)[2];
    for (auto i = std::sregex_iterator(body.begin(), body.end(), item); i != std::sregex_iterator(); ++i)
      declared[(*e)[1]][std::stoi((*i)[2])] = (*i)[1];
  }
  std::set<std::string> compared;
  const auto compare = [&](const std::string& type, auto zero) {
    compared.insert(type);
    std::map<int, std::string> named;
    for (int value = -300; value <= 300; ++value) {
      const char* name = enum_name(zero, value);
      if (name != nullptr) named[value] = name;
      EXPECT_EQ(enum_text<decltype(zero)>(value), name != nullptr ? name : std::to_string(value));
    }
    EXPECT_EQ(named, declared[type]) << type;
  };
#define FW_COMPARE(type) compare(#type, type{})
  FW_COMPARE(fw_status);
  FW_COMPARE(fw_device);
  FW_COMPARE(fw_dtype);
  FW_COMPARE(fw_decay);
  FW_COMPARE(fw_update);
  FW_COMPARE(fw_gain);
  FW_COMPARE(fw_gate);
  FW_COMPARE(fw_erase_key);
  FW_COMPARE(fw_erase_state);
  FW_COMPARE(fw_erase_write);
  FW_COMPARE(fw_feedback);
  FW_COMPARE(fw_read);
  FW_COMPARE(fw_precond);
  FW_COMPARE(fw_precond_form);
  FW_COMPARE(fw_normaliser);
  FW_COMPARE(fw_norm);
  FW_COMPARE(fw_key_source);
  FW_COMPARE(fw_given);
  FW_COMPARE(fw_form);
  FW_COMPARE(fw_state_layout);
  FW_COMPARE(fw_seqlens_memory);
  FW_COMPARE(fw_skipped);
#undef FW_COMPARE
  for (const auto& [type, values] : declared)
    EXPECT_EQ(compared.count(type), 1u) << type << ": add a line to this test";
}

TEST(EnumNames, AreInMessages) {
  const auto message = [](const std::function<void(fw_desc&)>& change) {
    fw_desc desc = small_desc();
    change(desc);
    return message_of(desc);
  };
  EXPECT_EQ(message([](fw_desc& d) { d.dtype = FW_F16; }), "descriptor: dtype: expected FW_F32 or FW_F64, got FW_F16");
  EXPECT_EQ(message([](fw_desc& d) { d.dtype = 9; }), "descriptor: dtype: expected FW_F32 or FW_F64, got 9");
  EXPECT_EQ(message([](fw_desc& d) { d.dtype = FW_F64, d.io_dtype = FW_BF16; }),
            "descriptor: io_dtype: expected 0, the dtype FW_F64 or, with dtype FW_F32, FW_BF16 or FW_F16, got FW_BF16");
  EXPECT_EQ(message([](fw_desc& d) { d.operands = FW_F16; }),
            "descriptor: operands: expected 0, the dtype FW_F32 or, with dtype FW_F32, FW_BF16, got FW_F16");
  EXPECT_EQ(message([](fw_desc& d) { d.form = 4; }),
            "descriptor: form: expected FW_FORM_AUTO, FW_FORM_TOKEN, FW_FORM_CHUNK or FW_FORM_DECODE, got 4");
  EXPECT_EQ(message([](fw_desc& d) { d.device = FW_DEVICE_CUDA, d.dtype = FW_F64; }),
            "descriptor: dtype: expected FW_F32 on CUDA, got FW_F64");
  EXPECT_EQ(message([](fw_desc& d) { d.seqlens.memory = FW_SEQLENS_DEVICE; }),
            "descriptor: seqlens.memory: expected FW_SEQLENS_HOST on the CPU, got FW_SEQLENS_DEVICE");
  EXPECT_STREQ(fw_status_name(FW_ERROR_WORKSPACE), "FW_ERROR_WORKSPACE");
  EXPECT_STREQ(fw_status_name(static_cast<fw_status>(77)), "unknown status");
}

TEST(Alloc, IsAlignedAndWhole) {
  for (const size_t bytes : {size_t{0}, size_t{1}, size_t{63}, size_t{64}, size_t{65}, size_t{100000}}) {
    void* memory = fw_alloc(bytes);
    ASSERT_NE(memory, nullptr) << bytes;
    EXPECT_EQ(reinterpret_cast<uintptr_t>(memory) % FW_ALIGNMENT, 0u) << bytes;
    std::memset(memory, 0xab, bytes);
    fw_free(memory);
  }
  fw_free(nullptr);
}

#if !defined(FW_SMALL_TESTS)  // a sanitizer's allocator ends the program
TEST(Alloc, SaysHowMuchIsMissing) {
  for (const size_t bytes : {SIZE_MAX, SIZE_MAX - 64, SIZE_MAX / 2}) {
    EXPECT_EQ(fw_alloc(bytes), nullptr) << bytes;
    EXPECT_EQ(
        fw_last_error(),
        fmt::format("fw_alloc: expected {} bytes of memory, got none: free memory, or make a smaller call", bytes));
  }
}
#endif

TEST(Alloc, AWorkspaceThatIsNotAlignedIsRefused) {
  const fw_desc desc = small_desc();
  fw_sizes sizes;
  fw_sizes_init(&sizes);
  ASSERT_EQ(fw_workspace_query(&desc, &sizes), FW_OK) << fw_last_error();
  ASSERT_GT(sizes.forward, 0u);
  fw_inputs in;
  fw_outputs out;
  fw_inputs_init(&in);
  fw_outputs_init(&out);
  unsigned char* memory = static_cast<unsigned char*>(fw_alloc(sizes.forward + 8));
  ASSERT_NE(memory, nullptr);
  EXPECT_EQ(fw_forward(&desc, &in, &out, nullptr, 0, memory + 8, sizes.forward), FW_ERROR_WORKSPACE);
  EXPECT_THAT(fw_last_error(), StartsWith("workspace: expected an address aligned to 64 bytes (fw_alloc), got "));
  fw_free(memory);
}

// The macros, the library, CMake and the newest release of the changelog say the same.
TEST(Version, IsOne) {
  const std::string macros = fmt::format("{}.{}.{}", FW_VERSION_MAJOR, FW_VERSION_MINOR, FW_VERSION_PATCH);
  EXPECT_EQ(fw_version(), macros);
  EXPECT_EQ(FW_PROJECT_VERSION, macros);
  const std::string changelog = text_of("CHANGELOG.md");
  std::smatch release;
  ASSERT_TRUE(std::regex_search(changelog, release, std::regex(R"(\n## \[(\d+\.\d+\.\d+)\] - (\d{4}-\d\d-\d\d)\n)")));
  EXPECT_EQ(release[1], macros);
  EXPECT_EQ(release[2].str().size(), 10u);
}

}  // namespace
}  // namespace fw::testing
