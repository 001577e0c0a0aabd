// Bytes of the text that tokens stand for: of pieces that are the text, and of tokenizers that change it.
#include "tokenizer/text_bytes.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <numeric>

namespace fw {
namespace {

// Pieces by their number; texts are not encoded.
class Pieces final : public Tokenizer {
 public:
  explicit Pieces(std::vector<std::string> pieces) : pieces_(std::move(pieces)) {}
  int32_t vocab_size() const override { return static_cast<int32_t>(pieces_.size()); }
  std::vector<int32_t> encode(std::string_view) const override { return {}; }
  std::string decode(const std::vector<int32_t>&) const override { return {}; }
  std::string piece(int32_t id) const override { return pieces_[static_cast<size_t>(id)]; }
  std::string type() const override { return "pieces"; }
  uint64_t checksum() const override { return 1; }
  void save(const std::string&) const override {}

 private:
  std::vector<std::string> pieces_;
};

// Of a text whose tokens are these pieces in this order.
std::vector<int64_t> bytes_of(const std::string& text, const std::vector<std::string>& pieces) {
  std::vector<int32_t> ids(pieces.size());
  std::iota(ids.begin(), ids.end(), 0);
  std::vector<int64_t> bytes;
  const Pieces tokenizer(pieces);
  TextBytes(tokenizer).measure(text, ids, bytes);
  return bytes;
}

using Bytes = std::vector<int64_t>;

TEST(TextBytes, PiecesThatAreTheText) {
  EXPECT_EQ(bytes_of("one two", {"one", " ", "two"}), (Bytes{3, 1, 3}));
  EXPECT_EQ(bytes_of("\xc3\xa9!", {"\xc3", "\xa9", "!"}), (Bytes{1, 1, 1})) << "half characters";
}

TEST(TextBytes, ChangedCharactersCountAsTheText) {
  EXPECT_EQ(bytes_of("The CAF\xc3\x89 is", {"the", " cafe", " is"}), (Bytes{3, 6, 3})) << "without case and accents";
  EXPECT_EQ(bytes_of("e\xcc\x81t\xc3\xa9", {"\xc3\xa9", "te\xcc\x81"}), (Bytes{3, 3})) << "the other form";
  EXPECT_EQ(bytes_of("\xef\xac\x81ne", {"f", "in", "e"}), (Bytes{3, 1, 1})) << "one character as two";
  EXPECT_EQ(bytes_of("\xe2\x91\xa0 x", {"1", " x"}), (Bytes{3, 2}));
}

TEST(TextBytes, SpacesComeAndGo) {
  EXPECT_EQ(bytes_of("The end", {" ", "The", " end"}), (Bytes{0, 3, 4})) << "a space in front";
  EXPECT_EQ(bytes_of("The end", {" The", " end"}), (Bytes{3, 4}));
  EXPECT_EQ(bytes_of("a   b", {"a", " b"}), (Bytes{1, 4})) << "of three one stays, and stands for all of them";
  EXPECT_EQ(bytes_of("  a b  ", {"a", " b"}), (Bytes{3, 4})) << "those at the ends are gone";
  const std::string gap(600, ' ');
  EXPECT_EQ(bytes_of("one" + gap + "two three four five", {"one", "two", " three", " four", " five"}),
            (Bytes{603, 3, 6, 5, 5}));
}

TEST(TextBytes, UnknownTokensStandForAnything) {
  EXPECT_EQ(bytes_of("a \xe4\xb8\xad b", {"a", " ", "<unk>", " b"}), (Bytes{1, 1, 3, 2}));
  EXPECT_EQ(bytes_of("a \xe4\xb8\xad\xe6\x96\x87 b", {"a", " ", "<unk>", " b"}), (Bytes{1, 1, 6, 2}))
      << "several as one";
  EXPECT_EQ(bytes_of("literally <unk>", {"literally", " ", "<unk>"}), (Bytes{9, 1, 5}));
}

// Whatever the pieces are, all bytes are counted once.
TEST(TextBytes, TheSumIsTheText) {
  uint64_t random = 7;
  const auto next = [&random](uint64_t below) {
    return (random = random * 6364136223846793005u + 1442695040888963407u) / (uint64_t{1} << 33) % below;
  };
  const std::vector<std::string> parts{"a",     " ",    "  ", "B", "\xc3\xa9", "e\xcc\x81",    "\xef\xac\x81",
                                       "<unk>", "\xff", "\n", "",  "word",     "\xe2\x96\x81x"};
  for (int round = 0; round < 300; ++round) {
    std::string text;
    std::vector<std::string> pieces;
    for (uint64_t i = next(200); i > 0; --i) text += parts[next(parts.size())];
    for (uint64_t i = 1 + next(200); i > 0; --i) pieces.push_back(parts[next(parts.size())]);
    const Bytes bytes = bytes_of(text, pieces);
    EXPECT_EQ(std::accumulate(bytes.begin(), bytes.end(), int64_t{0}), static_cast<int64_t>(text.size())) << round;
    EXPECT_GE(*std::min_element(bytes.begin(), bytes.end()), 0) << round;
  }
}

TEST(TextBytes, NumbersAreOfNoText) {
  const auto ids = id_tokenizer(std::numeric_limits<int32_t>::max()), bytes = byte_tokenizer();
  EXPECT_FALSE(TextBytes(*ids).known());
  EXPECT_TRUE(TextBytes(*bytes).known());
}

}  // namespace
}  // namespace fw
