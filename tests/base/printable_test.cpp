#include "base/printable.h"

#include <gtest/gtest.h>

namespace fw {
namespace {

TEST(Printable, ControlCharactersAreShownAndAllElseStays) {
  using namespace std::string_literals;
  EXPECT_EQ(printable("a\x1b[31mb\0c\x7f\r\n\t"s), "a\\x1b[31mb\\x00c\\x7f\\x0d\\x0a\\x09");
  EXPECT_EQ(printable_lines("a\x1b\n\tb\r"), "a\\x1b\n\tb\\x0d");
  EXPECT_EQ(printable("a\xc2\x9b"
                      "31m"),
            "a\\u009b31m");  // a control sequence in one character
  for (const std::string& text : {std::string(), "plain text"s, "caf\xc3\xa9 \xc2\xa0 \xe2\x82\xac"s, "not \xff utf \xc2"s}) EXPECT_EQ(printable(text), text);
}

}  // namespace
}  // namespace fw
