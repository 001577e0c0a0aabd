// What ranks that were started apart must have in common. Ranks that disagree would send each other parts of other
// sizes, wait for ever, or train a model that none of them was asked for.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "base/communicator.h"
#include "base/error.h"

namespace fw {

// Thrown on all ranks together.
class RanksDisagree : public Error {
 public:
  explicit RanksDisagree(const std::string& message) : Error(ErrorKind::kUsage, message) {}
};

// A name, as a user knows it, and its value on this rank.
using Facts = std::vector<std::pair<std::string, std::string>>;

// All ranks call it, each with its facts in the same order. Where one digest of them differs, every rank throws
// RanksDisagree with what differs and on which ranks.
void require_agreement(Communicator& ranks, const Facts& facts);

}  // namespace fw
