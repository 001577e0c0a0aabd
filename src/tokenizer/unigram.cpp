// Unigram: the tokens whose scores add to the most, found character by character from the left. A character that is no
// token scores 10 less than the worst.
#include <algorithm>
#include <cmath>
#include <limits>

#include "base/error.h"
#include "tokenizer/text_matcher.h"
#include "tokenizer/token_model.h"
#include "tokenizer/utf8.h"

namespace fw {
namespace {

class Unigram final : public TokenModel {
 public:
  explicit Unigram(const JsonPart& part) {
    byte_fallback_ = part.flag_or("byte_fallback", false);
    const JsonPart vocab = part.at("vocab");
    vocab.expect_array();
    const nlohmann::json& list = vocab.value();
    if (list.empty() || list.size() > kMost) vocab.refuse(fmt::format("1 to {} pieces", kMost));
    if (part.has("unk_id"))
      unknown_ = static_cast<int32_t>(part.at("unk_id").integer(0, static_cast<int64_t>(list.size()) - 1));
    scores_.reserve(list.size());
    double least = std::numeric_limits<double>::infinity();
    for (size_t i = 0; i < list.size(); ++i) {
      const nlohmann::json& piece = list[i];
      if (!piece.is_array() || piece.size() != 2 || !piece[0].is_string() || !piece[1].is_number())
        vocab.element(i).refuse("[\"PIECE\", SCORE]");
      scores_.push_back(piece[1].get<double>());
      if (!std::isfinite(scores_.back())) vocab.element(i).refuse("a finite score");
      least = std::min(least, scores_.back());
      const auto id = static_cast<int32_t>(i);
      const std::string& token = piece[0].get_ref<const std::string&>();
      vocabulary_.add(token, id);
    }
    unknown_score_ = least - 10;
    size_ = static_cast<int32_t>(list.size());
    std::vector<std::pair<std::string_view, int32_t>> words;
    for (size_t i = list.size(); i-- > 0;)
      // the last of equal ones counts
      words.emplace_back(list[i][0].get_ref<const std::string&>(), static_cast<int32_t>(i));
    matcher_ = TextMatcher(words);
  }

  int32_t size() const override { return size_; }

  void encode(std::string_view piece, std::vector<int32_t>& ids) const override {
    std::vector<Node> best(piece.size() + 1);
    std::vector<TextMatcher::Found> found;
    matcher_.find(piece, found);
    for (size_t begin = 0; begin < piece.size();) {
      const double before = best[begin].score;
      size_t next = begin;
      utf8_next(piece, next);
      bool single = false;
      const auto offer = [&](size_t end, double score, int32_t id) {
        Node& node = best[end];
        if (node.begin != kNone && score <= node.score) return;
        node = {score, begin, id};
      };
      while (!found.empty() && found.back().begin < begin) found.pop_back();
      if (!found.empty() && found.back().begin == begin) {
        TextMatcher::Found word = found.back();
        do {
          offer(begin + word.length, scores_[static_cast<size_t>(word.value)] + before, word.value);
          single = single || begin + word.length == next;
        } while (matcher_.next_shorter(word));
      }
      if (!single) {
        if (unknown_ < 0) fail_unknown(piece.substr(begin, next - begin));
        offer(next, unknown_score_ + before, unknown_);
      }
      begin = next;
    }
    append(piece, best, ids);
  }

 private:
  static constexpr size_t kNone = std::string::npos;
  static constexpr size_t kMost = size_t{1} << 22;
  struct Node {
    double score = 0;
    size_t begin = kNone;  // of the token that ends here
    int32_t id = 0;
  };
  [[noreturn]] static void fail_unknown(std::string_view text) {
    fail_usage("the tokenizer has no token for '{}' and no unk_id for what it does not know", utf8_start(text, 40));
  }

  // Back from the end. Unknown characters in a row are one token, or the bytes of all of them.
  void append(std::string_view piece, const std::vector<Node>& best, std::vector<int32_t>& ids) const {
    std::vector<std::string_view> tokens;
    size_t unknown_end = kNone;
    for (size_t end = piece.size(); end > 0;) {
      const Node& node = best[end];
      if (unknown_ >= 0 && node.id == unknown_) {
        if (unknown_end == kNone) unknown_end = end;
      } else {
        if (unknown_end != kNone) tokens.push_back(piece.substr(end, unknown_end - end));
        unknown_end = kNone;
        tokens.push_back(piece.substr(node.begin, end - node.begin));
      }
      end = node.begin;
    }
    if (unknown_end != kNone) tokens.push_back(piece.substr(0, unknown_end));
    std::reverse(tokens.begin(), tokens.end());
    for (const auto& token : tokens) {
      const int32_t id = vocabulary_.find(token);
      if (id < 0 && byte_fallback_ && byte_pieces(token, ids)) continue;
      if (id < 0 && unknown_ < 0) fail_unknown(token);
      ids.push_back(id >= 0 ? id : unknown_);
    }
  }

  bool byte_fallback_ = false;
  int32_t unknown_ = -1, size_ = 0;
  double unknown_score_ = 0;
  std::vector<double> scores_;
  TextMatcher matcher_;
};

}  // namespace

std::unique_ptr<TokenModel> unigram_model(const JsonPart& part) { return std::make_unique<Unigram>(part); }

}  // namespace fw
