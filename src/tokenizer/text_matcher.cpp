#include "tokenizer/text_matcher.h"

namespace fw {

TextMatcher::TextMatcher(const std::vector<std::pair<std::string_view, int32_t>>& words) {
  struct Edge {
    uint32_t parent, child;
    char c;
    uint32_t depth;
  };
  std::vector<Edge> edges;
  for (const auto& [word, value] : words) {
    uint32_t node = 0;
    for (size_t i = word.size(); i-- > 0;) {
      const auto [found, added] = children_.try_emplace(edge_key(node, word[i]), static_cast<uint32_t>(nodes_.size()));
      if (added) {
        edges.push_back({node, found->second, word[i], static_cast<uint32_t>(word.size() - i)});
        nodes_.emplace_back();
        if (node == 0) first_[static_cast<unsigned char>(word[i])] = found->second;
      }
      node = found->second;
    }
    if (node != 0 && nodes_[node].length == 0) {
      nodes_[node].length = static_cast<uint32_t>(word.size());
      nodes_[node].value = value;
    }
  }
  // By depth, so that the failures of what is shorter are known. Nodes are counted along each word: counting sort.
  uint32_t deepest = 0;
  for (const Edge& edge : edges) deepest = edge.depth > deepest ? edge.depth : deepest;
  std::vector<uint32_t> begins(deepest + 2, 0), order(edges.size());
  for (const Edge& edge : edges) ++begins[edge.depth + 1];
  for (size_t d = 1; d < begins.size(); ++d) begins[d] += begins[d - 1];
  for (uint32_t e = 0; e < edges.size(); ++e) order[begins[edges[e].depth]++] = e;
  for (const uint32_t e : order) {
    const Edge& edge = edges[e];
    Node& node = nodes_[edge.child];
    node.failure = edge.parent == 0 ? 0 : next(nodes_[edge.parent].failure, edge.c);
    const Node& other = nodes_[node.failure];
    if (node.length == 0) {
      node.length = other.length;
      node.value = other.value;
      node.shorter = other.shorter;
    } else if (other.length > 0) {
      node.shorter = node.failure;
    }
  }
}

uint32_t TextMatcher::next(uint32_t node, char c) const {
  while (node != 0) {
    const auto found = children_.find(edge_key(node, c));
    if (found != children_.end()) return found->second;
    node = nodes_[node].failure;
  }
  return first_[static_cast<unsigned char>(c)];
}

void TextMatcher::find(std::string_view text, std::vector<Found>& found) const {
  found.clear();
  if (nodes_.size() == 1) return;
  uint32_t node = 0;
  for (size_t i = text.size(); i-- > 0;) {
    node = next(node, text[i]);
    if (nodes_[node].length > 0) found.push_back({i, nodes_[node].length, nodes_[node].value, nodes_[node].shorter});
  }
}

bool TextMatcher::next_shorter(Found& found) const {
  if (found.shorter == 0) return false;
  const Node& node = nodes_[found.shorter];
  found = {found.begin, node.length, node.value, node.shorter};
  return true;
}

}  // namespace fw
