#include "base/agreement.h"

#include <algorithm>
#include <cstdint>
#include <map>
#include <set>

#include "base/checksum.h"

namespace fw {
namespace {

// Of one size on all ranks, whatever they were started with.
struct Digest {
  uint64_t bytes = 0, checksum = 0;
  bool operator==(const Digest&) const = default;
};

// Names and values, each after its length.
std::string written(const Facts& facts) {
  std::string text;
  for (const auto& [name, value] : facts) text += fmt::format("{} {} {}{}", name.size(), value.size(), name, value);
  return text;
}

size_t number(const std::string& text, size_t& at) {
  size_t value = 0;
  for (; at < text.size() && text[at] != ' '; ++at) value = value * 10 + static_cast<size_t>(text[at] - '0');
  ++at;
  return value;
}

std::map<std::string, std::string> read(const std::string& text) {
  std::map<std::string, std::string> facts;
  for (size_t at = 0; at < text.size();) {
    const size_t name = number(text, at), value = number(text, at);
    facts[text.substr(at, name)] = text.substr(at + name, value);
    at += name + value;
  }
  return facts;
}

std::string shown(const std::map<std::string, std::string>& facts, const std::string& name) {
  constexpr size_t kMost = 160;
  const auto found = facts.find(name);
  if (found == facts.end()) return "nothing";
  return found->second.size() > kMost ? found->second.substr(0, kMost) + "..." : found->second;
}

}  // namespace

void require_agreement(Communicator& ranks, const Facts& facts) {
  if (ranks.size() == 1) return;
  const auto size = static_cast<size_t>(ranks.size()), me = static_cast<size_t>(ranks.rank());
  std::string mine = written(facts);
  Checksum sum;
  sum.add(mine);
  std::vector<Digest> digests(size);
  digests[me] = {mine.size(), sum.value()};
  std::vector<Part> parts;
  for (Digest& digest : digests) parts.push_back(part_of(std::span<Digest>(&digest, 1)));
  ranks.all_gather(parts);
  const auto other = std::ranges::find_if(digests, [&](const Digest& digest) { return digest != digests[0]; });
  if (other == digests.end()) return;

  std::vector<std::string> texts(size);
  for (size_t rank = 0; rank < size; ++rank) texts[rank].resize(digests[rank].bytes);
  texts[me] = std::move(mine);
  parts.clear();
  for (std::string& text : texts) parts.push_back({text.data(), text.size()});
  ranks.all_gather(parts);

  const size_t second = static_cast<size_t>(other - digests.begin());
  const std::map<std::string, std::string> first = read(texts[0]), theirs = read(texts[second]);
  std::set<std::string> names;
  for (const auto* all : {&first, &theirs}) {
    for (const auto& [name, value] : *all) names.insert(name);
  }
  constexpr size_t kShown = 5;
  std::string message;
  size_t count = 0;
  for (const std::string& name : names) {
    const std::string a = shown(first, name), b = shown(theirs, name);
    const bool same = first.count(name) > 0 && theirs.count(name) > 0 && first.at(name) == theirs.at(name);
    if (same || ++count > kShown) continue;
    message += fmt::format("{}{} (rank 0: {}, rank {}: {})", message.empty() ? "" : "; ", name, a, second, b);
  }
  if (count > kShown) message += fmt::format("; and {} more", count - kShown);
  throw RanksDisagree(
      fmt::format("the ranks were not started alike: {}. Start all with the same command, program and files", message));
}

}  // namespace fw
