// niah_single_1 (needle.h) as a task of its own: RULER's text to the letter, a word, a digit or a mark a token, so that a small model can be trained on it and
// judged by its answers. Only the answer's digits are asked for: with a loss on the whole text models of this size do not find the needle in the time that a
// test has (docs/tasks.md).
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "tasks/synthetic.h"

namespace fw {

// options.length: lines of noise. An example is the prompt and all digits of the answer but the last, 82 + 24 length tokens; the labels are the seven digits.
std::unique_ptr<SyntheticTask> needle_words(const TaskOptions& options);

// The words, digits and marks of a text, white space left out.
std::vector<std::string_view> needle_pieces(std::string_view text);
// What a token of the task is; Error(kInternal) outside the vocabulary.
const std::string& needle_piece(int32_t token);

}  // namespace fw
