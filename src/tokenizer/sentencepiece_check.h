// Checks a serialized SentencePiece model before the library loads it: the library follows the tables in it without
// looking at their bounds.
#pragma once

#include <string>
#include <string_view>

namespace fw {

// What is wrong with the bytes of a model, "" where nothing is. Fields that are not known are passed over.
std::string sentencepiece_fault(std::string_view model);

}  // namespace fw
