// What a tokenizer.json does to a text before it is cut: NFC, NFD, NFKC, NFKD, Lowercase, Strip, StripAccents, Replace,
// Prepend, ByteLevel, BertNormalizer, Nmt, Precompiled and sequences of these. Others are refused by name.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "tokenizer/json_part.h"
#include "tokenizer/pattern.h"
#include "tokenizer/precompiled.h"

namespace fw {

class Normalizer {
 public:
  Normalizer() = default;  // leaves every text as it is
  explicit Normalizer(const JsonPart& part);

  bool empty() const { return steps_.empty(); }
  // Whether all it does is a Unicode normal form: what is on both sides of a space between ASCII letters is then
  // normalised by itself.
  bool is_form() const;
  // Valid UTF-8. `head`: how many bytes of the text stand for the first character of the whole text, before and
  // afterwards; 0: none.
  std::string apply(std::string text, size_t& head, TextBudget& budget) const;

 private:
  enum class Kind {
    kNfc,
    kNfd,
    kNfkc,
    kNfkd,
    kLowercase,
    kStrip,
    kStripAccents,
    kReplace,
    kPrepend,
    kByteLevel,
    kBertClean,
    kBertChinese,
    kBertAccents,
    kNmt,
    kPrecompiled
  };
  struct Step {
    Kind kind;
    bool left = true, right = true;                      // kStrip
    Pattern pattern;                                     // kReplace
    std::string content;                                 // kReplace, kPrepend
    std::shared_ptr<const Precompiled> table = nullptr;  // kPrecompiled
  };
  void add(const JsonPart& part);
  void add_bert(const JsonPart& part);
  static std::string applied(const Step& step, const std::string& text, size_t& head, TextBudget& budget);

  std::vector<Step> steps_;
};

}  // namespace fw
