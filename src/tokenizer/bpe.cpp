// Byte pair encoding: a piece begins as its characters, and the pair that stands first in the list of merges is joined,
// the leftmost of equal ones, until no pair is in the list.
#include <algorithm>
#include <optional>
#include <queue>

#include "base/error.h"
#include "tokenizer/token_model.h"
#include "tokenizer/utf8.h"

namespace fw {
namespace {

struct PairHash {
  size_t operator()(uint64_t pair) const { return static_cast<size_t>((pair ^ pair >> 29) * 0x9e3779b97f4a7c15u >> 7); }
};

class Bpe final : public TokenModel {
 public:
  explicit Bpe(const JsonPart& part) {
    if (part.has("dropout")) {
      const JsonPart dropout = part.at("dropout");
      if (!dropout.value().is_number() || dropout.value().get<double>() != 0)
        dropout.refuse("null or 0: with dropout a text has no fixed ids");
    }
    prefix_ = part.text_or("continuing_subword_prefix", "");
    suffix_ = part.text_or("end_of_word_suffix", "");
    fuse_unknown_ = part.flag_or("fuse_unk", false);
    byte_fallback_ = part.flag_or("byte_fallback", false);
    ignore_merges_ = part.flag_or("ignore_merges", false);
    read_vocabulary(part.at("vocab"));
    if (part.has("unk_token")) {
      unknown_ = vocabulary_.find(part.at("unk_token").text());
      unknown_name_ = part.at("unk_token").text();
    }
    const JsonPart merges = part.at("merges");
    merges.expect_array();
    merges_.reserve(merges.value().size());
    for (size_t i = 0; i < merges.value().size(); ++i) read_merge(merges, i);
  }

  void encode(std::string_view piece, std::vector<int32_t>& ids) const override {
    if (ignore_merges_) {
      if (const int32_t id = vocabulary_.find(piece); id >= 0) {
        ids.push_back(id);
        return;
      }
    }
    const size_t before = ids.size();
    first_ids(piece, ids);
    join(ids, before);
  }

 private:
  struct Merge {
    int32_t rank, id;
  };
  struct Symbol {
    int32_t id;
    int32_t previous, next;  // -1: none
    bool gone;
  };
  struct Candidate {
    int32_t rank, at, id;
    // The queue's top is the least rank, the leftmost of equal ones.
    bool operator<(const Candidate& o) const { return rank != o.rank ? rank > o.rank : at > o.at; }
  };

  void read_vocabulary(const JsonPart& part) {
    part.expect_object();
    for (const auto& [token, id] : part.value().items()) {
      if (!id.is_number_integer() || id < 0 || id > kMostIds) {
        part.fail(fmt::format("the token '{}': expected an id from 0 to {}, got {}", token, kMostIds,
                              id.dump(-1, ' ', true).substr(0, 40)));
      }
      const int32_t value = id.get<int32_t>();
      if (const std::string* other = vocabulary_.token(value))
        part.fail(fmt::format("the tokens '{}' and '{}' have the same id, {}", *other, token, value));
      vocabulary_.add(token, value);
    }
    if (vocabulary_.count() == 0) part.refuse("tokens and their ids");
  }

  // "a b", or ["a", "b"].
  void read_merge(const JsonPart& merges, size_t index) {
    const nlohmann::json& merge = merges.value()[index];
    std::string left, right;
    if (merge.is_string()) {
      const std::string& text = merge.get_ref<const std::string&>();
      if (index == 0 && text.starts_with("#version")) return;
      const size_t space = text.find(' ');
      if (space == std::string::npos || text.find(' ', space + 1) != std::string::npos)
        merges.element(index).refuse("two tokens with a space between");
      left = text.substr(0, space);
      right = text.substr(space + 1);
    } else if (merge.is_array() && merge.size() == 2 && merge[0].is_string() && merge[1].is_string()) {
      left = merge[0];
      right = merge[1];
    } else {
      merges.element(index).refuse("\"LEFT RIGHT\" or [\"LEFT\", \"RIGHT\"]");
    }
    const auto id_of = [&](const std::string& token) {
      const int32_t id = vocabulary_.find(token);
      if (id < 0) merges.element(index).fail(fmt::format("the token '{}' is not in the vocabulary", token));
      return id;
    };
    if (right.size() < prefix_.size())
      merges.element(index).fail(fmt::format("'{}' is shorter than continuing_subword_prefix", right));
    const int32_t a = id_of(left), b = id_of(right), joined = id_of(left + right.substr(prefix_.size()));
    merges_[pair(a, b)] = {static_cast<int32_t>(index), joined};
  }

  static uint64_t pair(int32_t a, int32_t b) {
    return uint64_t{static_cast<uint32_t>(a)} << 32 | static_cast<uint32_t>(b);
  }

  // Of characters; what has none is bytes, or the unknown token (one for several in a row with fuse_unk), or nothing.
  void first_ids(std::string_view piece, std::vector<int32_t>& ids) const {
    bool pending = false;  // an unknown token that goes before what comes next
    const auto flush = [&] {
      if (pending) ids.push_back(unknown_);
      pending = false;
    };
    std::string changed;
    for (size_t i = 0; i < piece.size();) {
      const size_t at = i;
      utf8_next(piece, i);
      std::string_view character = piece.substr(at, i - at);
      if ((at > 0 && !prefix_.empty()) || (i == piece.size() && !suffix_.empty())) {
        changed = fmt::format("{}{}{}", at > 0 ? prefix_ : "", character, i == piece.size() ? suffix_ : "");
        character = changed;
      }
      if (const int32_t id = vocabulary_.find(character); id >= 0) {
        flush();
        ids.push_back(id);
        continue;
      }
      if (byte_fallback_ && byte_pieces(character, ids)) continue;
      if (unknown_name_.empty()) continue;
      if (unknown_ < 0)
        fail_usage("the tokenizer has no token for '{}' and its unk_token '{}' is not in its vocabulary", character,
                   unknown_name_);
      if (!fuse_unknown_) flush();
      pending = true;
    }
    flush();
  }

  void join(std::vector<int32_t>& ids, size_t from) const {
    const size_t count = ids.size() - from;
    if (count < 2 || merges_.empty()) return;
    if (count > size_t{1} << 30)
      fail_usage("a piece of {} characters: expected at most 2^30 where a tokenizer joins them", count);
    std::vector<Symbol> symbols(count);
    for (size_t i = 0; i < count; ++i) {
      symbols[i] = {ids[from + i], static_cast<int32_t>(i) - 1, i + 1 < count ? static_cast<int32_t>(i) + 1 : -1,
                    false};
    }
    std::vector<Candidate> first;
    first.reserve(count);
    const auto candidate = [&](int32_t at) -> std::optional<Candidate> {
      const Symbol& left = symbols[static_cast<size_t>(at)];
      const auto found = merges_.find(pair(left.id, symbols[static_cast<size_t>(left.next)].id));
      if (found == merges_.end()) return std::nullopt;
      return Candidate{found->second.rank, at, found->second.id};
    };
    for (size_t i = 0; i + 1 < count; ++i) {
      if (const auto c = candidate(static_cast<int32_t>(i))) first.push_back(*c);
    }
    std::priority_queue<Candidate> queue(std::less<Candidate>(), std::move(first));
    while (!queue.empty()) {
      const Candidate top = queue.top();
      queue.pop();
      Symbol& left = symbols[static_cast<size_t>(top.at)];
      if (left.gone || left.next < 0) continue;
      // Something else may stand here by now.
      const auto now = candidate(top.at);
      if (!now || now->id != top.id) continue;
      Symbol& right = symbols[static_cast<size_t>(left.next)];
      left.id = top.id;
      left.next = right.next;
      right.gone = true;
      if (right.next >= 0) symbols[static_cast<size_t>(right.next)].previous = top.at;
      if (left.previous >= 0) {
        if (const auto c = candidate(left.previous)) queue.push(*c);
      }
      if (left.next >= 0) {
        if (const auto c = candidate(top.at)) queue.push(*c);
      }
    }
    ids.resize(from);
    for (const Symbol& symbol : symbols) {
      if (!symbol.gone) ids.push_back(symbol.id);
    }
  }

  static constexpr int32_t kMostIds = 1 << 22;
  std::string prefix_, suffix_, unknown_name_;
  int32_t unknown_ = -1;
  bool fuse_unknown_ = false, byte_fallback_ = false, ignore_merges_ = false;
  std::unordered_map<uint64_t, Merge, PairHash> merges_;
};

}  // namespace

std::unique_ptr<TokenModel> bpe_model(const JsonPart& part) { return std::make_unique<Bpe>(part); }

}  // namespace fw
