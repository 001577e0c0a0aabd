// What messages quote of files that nobody has vouched for: it does not make them long.
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "base/error.h"
#include "base/json.h"
#include "base/printable.h"
#include "base/python_json.h"
#include "support/error_of.h"

namespace fw {
namespace {

using testing::error_of;

TEST(Message, AnExcerptIsShortAndEndsBetweenCharacters) {
  EXPECT_EQ(excerpt("short"), "short");
  EXPECT_EQ(excerpt(std::string(kExcerptBytes, 'a')), std::string(kExcerptBytes, 'a'));
  EXPECT_EQ(excerpt(std::string(kExcerptBytes + 1, 'a')), std::string(kExcerptBytes, 'a') + "...");
  EXPECT_EQ(excerpt(std::string(kExcerptBytes - 1, 'a') + "\xc3\xa9 and more"),
            std::string(kExcerptBytes - 1, 'a') + "...");
  EXPECT_EQ(excerpt("a\x1b"), "a\\x1b");
}

TEST(Message, BeginningAndEndOfALongOneStay) {
  const std::string words = error_of([] { fail_usage("file: {}: what to do", std::string(size_t{50} << 20, 'x')); });
  EXPECT_LT(words.size(), 10000U);
  EXPECT_EQ(words.rfind("file: xxx", 0), 0U);
  EXPECT_TRUE(words.ends_with("xxx: what to do"));
  EXPECT_NE(words.find("bytes left out"), std::string::npos);
  EXPECT_EQ(error_of([] { fail_usage("short"); }), "short");
}

TEST(Message, TheJsonParserQuotesNoMegabytes) {
  EXPECT_LT(error_of([] { parse_json("{\"a\": \"" + std::string(size_t{8} << 20, 'x'), "file"); }).size(), 1000U);
}

TEST(PythonJson, BareNumbersThatJsonDoesNotHave) {
  const auto read = [](const char* text) { return parse_python_config(text, "file"); };
  const nlohmann::json infinity = {{"__float__", "Infinity"}}, minus = {{"__float__", "-Infinity"}},
                       nan = {{"__float__", "NaN"}};
  EXPECT_EQ(read("[0.0, Infinity]"), (nlohmann::json{0.0, infinity}));
  EXPECT_EQ(read("{\"a\": -Infinity,\"b\":NaN}"), (nlohmann::json{{"a", minus}, {"b", nan}}));
  EXPECT_EQ(read("[\"Infinity\", \"a\\\"NaN\", {\"NaN\": -1}]"), (nlohmann::json{"Infinity", "a\"NaN", {{"NaN", -1}}}));
  EXPECT_NE(error_of([&] { read("[Infinit]"); }), "");
  EXPECT_NE(error_of([&] { read("{Infinity: 1}"); }), "");
  EXPECT_NE(error_of([&] { read("[\"a"); }), "");
  EXPECT_NE(error_of([&] { read("[\"a\\"); }), "");
}

}  // namespace
}  // namespace fw
