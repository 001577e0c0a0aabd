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
  // What turns the order of characters, and a control of 8 bits that is no part of UTF-8.
  EXPECT_EQ(printable("a\xe2\x80\xae"
                      "b\xe2\x81\xa6"
                      "c\xe2\x80\xa8"),
            "a\\u202eb\\u2066c\\u2028");
  EXPECT_EQ(printable("\x9b"
                      "31m"),
            "\\x9b31m");
  for (const std::string& text :
       {std::string(), "plain text"s, "caf\xc3\xa9 \xc2\xa0 \xe2\x82\xac"s, "not \xff utf \xc2"s})
    EXPECT_EQ(printable(text), text);
}

TEST(Printable, WhatTurnsTextIsShown) {
  EXPECT_EQ(printable("a\u202eb\u2066c\u200fd\u061ce\u2028f"), "a\\u202eb\\u2066c\\u200fd\\u061ce\\u2028f");
  EXPECT_EQ(printable("\u200d\u2013\u2030\u206a"), "\u200d\u2013\u2030\u206a")
      << "joiners, dashes and their neighbours";
  EXPECT_EQ(printable("a\x9b"
                      "b"),
            "a\\x9bb")
      << "a control character where text is Latin-1";
  EXPECT_EQ(printable("\xe4\x9b\xbd"), "\xe4\x9b\xbd") << "the same byte inside a character";
}

// Wherever a text is cut, what is shown is the same.
TEST(Printable, AStreamIsShownAsItsText) {
  const std::string text = "caf\xc3\xa9 \u202e \xf0\x9f\x98\x80 \xff\xe2\x82 \xc2\x9b\x1b[31m\n\xe2\x80";
  for (size_t piece = 1; piece < 8; ++piece) {
    PrintableStream stream;
    std::string shown;
    for (size_t at = 0; at < text.size(); at += piece) shown += stream.add(std::string_view(text).substr(at, piece));
    EXPECT_EQ(shown + stream.rest(), printable_lines(text)) << piece;
  }
}

}  // namespace
}  // namespace fw
