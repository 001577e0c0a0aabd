// Text as Unicode, where bytes are not enough, through ICU: sentences, case, code points, white space. Text is UTF-8;
// bytes that are none count as U+FFFD, one each as ICU reads them.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace fw {

// The sentences of a text (UAX 29), without the white space around them; none is empty.
std::vector<std::string> sentences_of(std::string_view text);
// Words between white space.
std::vector<std::string_view> words_of(std::string_view text);

int64_t code_points(std::string_view text);
std::string lower_case(std::string_view text);
// The first letter upper, all others lower case, as Python's str.capitalize.
std::string capitalized(std::string_view text);
bool contains_ignoring_case(std::string_view text, std::string_view part);

// Every match of a regular expression (ICU's) replaced; $1 is its first group.
std::string replaced(std::string_view text, const char* pattern, const char* replacement);

// How many bytes of white space stand at the end, white space being what Python's str.isspace says.
size_t trailing_space(std::string_view text);
std::string_view stripped(std::string_view text);
// What a split at runs of white space gives: pieces between the runs, and an empty one at an end that is white space.
int64_t pieces_between_space(std::string_view text);

}  // namespace fw
