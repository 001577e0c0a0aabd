// How a tokenizer.json cuts a text into pieces that its model then looks at one by one: ByteLevel, Split, Metaspace,
// Digits, Punctuation, Whitespace, WhitespaceSplit, BertPreTokenizer, CharDelimiterSplit and sequences of these. Others
// are refused by name.
#pragma once

#include <deque>
#include <string>
#include <string_view>
#include <vector>

#include "tokenizer/json_part.h"
#include "tokenizer/pattern.h"

namespace fw {

struct Pieces {
  struct Piece {
    std::string_view text;  // not empty
    // bytes from its beginning on that stand for the first character of the whole text; may be more than it has
    size_t head = 0;
  };
  std::vector<Piece> list;
  std::deque<std::string> owned;  // texts that were made on the way
};

class PreTokenizer {
 public:
  PreTokenizer() = default;  // the whole is one piece
  explicit PreTokenizer(const JsonPart& part);

  // Whether the pieces' bytes stand for the characters of byte_level.h (its last step is ByteLevel, which is left to
  // whoever needs them).
  bool bytes_last() const { return bytes_last_; }
  // Whether a text may be cut before a space between two ASCII letters, whatever else it has: true of the patterns that
  // are known to begin a piece there.
  bool cuts_before_words() const { return cuts_before_words_; }

  // text: valid UTF-8, must outlive the pieces.
  Pieces apply(std::string_view text, size_t head, TextBudget& budget) const;

 private:
  enum class Behavior { kRemoved, kIsolated, kMergedWithPrevious, kMergedWithNext, kContiguous };
  enum class Kind { kPattern, kMetaspace, kByteLevel, kWords, kClass };
  enum class Class { kSpace, kNumber, kPunctuation, kCharacter };
  struct Step {
    Kind kind = Kind::kPattern;
    Behavior behavior = Behavior::kIsolated;
    Pattern pattern;                                                        // kPattern; kByteLevel with use_regex
    bool invert = false;                                                    // kPattern
    bool prefix = false;                                                    // kByteLevel: a space in front
    bool use_regex = false;                                                 // kByteLevel
    enum class Scheme { kNever, kFirst, kAlways } scheme = Scheme::kNever;  // kMetaspace
    bool split = true;                                                      // kMetaspace
    std::string character;                                                  // kMetaspace; Class::kCharacter
    Class of = Class::kSpace;                                               // kClass
  };
  void add(const JsonPart& part);
  void add_class(Class of, Behavior behavior, std::string character = "");
  void add_metaspace(const JsonPart& part);
  static Behavior behavior_of(const JsonPart& part, const char* otherwise);
  static void merge(std::vector<Span>& spans, Behavior behavior);
  static void word_spans(std::string_view text, std::vector<Span>& spans);
  static void class_spans(const Step& step, std::string_view text, std::vector<Span>& spans);
  bool known_to_cut_before_words() const;

  std::vector<Step> steps_;
  bool bytes_last_ = false, cuts_before_words_ = false;
};

}  // namespace fw
