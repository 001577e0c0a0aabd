// SentencePiece models: their pieces, what the files beside a model add to them, and training.
#include <sentencepiece_processor.h>
#include <sentencepiece_trainer.h>

#include <algorithm>
#include <array>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <unordered_map>

#include "base/checksum.h"
#include "base/error.h"
#include "base/file.h"
#include "tokenizer/sentencepiece_check.h"
#include "tokenizer/sentencepiece_folder.h"
#include "tokenizer/tokenizer.h"
#include "tokenizer/utf8.h"

namespace fw {
namespace {

constexpr std::string_view kSpaceMark = "\xe2\x96\x81";    // U+2581, how SentencePiece writes a space
constexpr std::string_view kReplacement = "\xef\xbf\xbd";  // U+FFFD
constexpr const char* kJsonName = "tokenizer.json";
constexpr const char* kModelName = "tokenizer.model";

// SentencePiece's words without the source position in front and the options that do not exist here.
std::string reason(const sentencepiece::util::Status& status) {
  std::string text = status.error_message();
  const size_t position = text.find(") [");
  const size_t end = position == std::string::npos ? position : text.rfind("] ");
  if (end != std::string::npos && end + 2 < text.size()) text.erase(0, end + 2);
  const size_t option = text.find(" or decrease character_coverage");
  return text.substr(0, option);
}

void check_piece(int32_t id, int32_t vocab_size) {
  if (id < 0 || id >= vocab_size) fail_usage("token id {} is outside the tokenizer's vocabulary of {}", id, vocab_size);
}

std::string checksum_of(std::string_view content) {
  Checksum sum;
  sum.add(content);
  return fmt::format("{:016x}", sum.value());
}

class SentencePieceTokenizer final : public Tokenizer {
 public:
  SentencePieceTokenizer(std::string model, const std::string& path, SentencePieceFolder beside)
      : model_(std::move(model)), files_(std::move(beside.files)) {
    if (const std::string fault = sentencepiece_fault(model_); !fault.empty())
      fail_usage("'{}': not a SentencePiece model, or damaged: {}", path, fault);
    const auto status = processor_.LoadFromSerializedProto(model_);
    if (!status.ok()) fail_usage("'{}': not a SentencePiece model, or damaged: {}", path, reason(status));
    const int size = processor_.GetPieceSize();
    if (size < 1) fail_usage("'{}': the SentencePiece model has no pieces", path);
    pieces_.reserve(static_cast<size_t>(size));
    byte_ids_.fill(-1);
    for (int id = 0; id < size; ++id) pieces_.push_back(surface(id));
    std::string definition = model_;
    for (const auto& [name, content] : files_) definition.append(1, '\n').append(name).append(1, '\n').append(content);
    checksum_ = tokenizer_checksum(type(), definition);
    bytes_complete_ = std::find(byte_ids_.begin(), byte_ids_.end(), -1) == byte_ids_.end();
    probe_prefix();
    end_ = processor_.eos_id();
    if (!files_.empty()) add_tokens(beside);
  }

  int32_t vocab_size() const override { return static_cast<int32_t>(pieces_.size()); }

  std::vector<int32_t> encode(std::string_view text) const override {
    std::vector<int32_t> ids;
    if (added_.empty()) {
      encode_text(text, ids);
      return ids;
    }
    if (utf8_prefix(text) == text.size()) {
      encode_parts(text, ids);
      return ids;
    }
    std::string replaced;
    while (!text.empty()) {
      const size_t valid = utf8_prefix(text);
      if (cuts_text()) {
        encode_parts(text.substr(0, valid), ids);
        if (valid < text.size()) encode_text(text.substr(valid, 1), ids);
      } else {
        replaced += text.substr(0, valid);
        if (valid < text.size()) replaced += kReplacement;
      }
      text.remove_prefix(std::min(valid + 1, text.size()));
    }
    encode_parts(replaced, ids);
    return ids;
  }

  // encode() goes line by line where it cuts text at all and no piece reaches over a line's end.
  size_t whole_prefix(std::string_view text) const override {
    if (!cuts_text() || newline_pieces_ || tokens_reach_out_) return 0;
    const size_t end = text.rfind('\n');
    return end == std::string_view::npos ? 0 : end + 1;
  }

  std::string decode(const std::vector<int32_t>& ids) const override {
    std::string text;
    for (const int32_t id : ids) {
      check_piece(id, vocab_size());
      text += pieces_[static_cast<size_t>(id)];
    }
    if (adds_prefix_ && !text.empty() && text[0] == ' ') text.erase(0, 1);
    return text;
  }

  std::string piece(int32_t id) const override {
    check_piece(id, vocab_size());
    return pieces_[static_cast<size_t>(id)];
  }

  int32_t end_of_text() const override { return end_; }

  std::string type() const override { return "sentencepiece"; }
  uint64_t checksum() const override { return checksum_; }

  void save(const std::string& folder) const override {
    write_file_atomic(folder + "/" + kModelName, model_);
    const nlohmann::ordered_json json = {
        {"type", "sentencepiece"}, {"model", kModelName}, {"checksum", checksum_of(model_)}};
    write_file_atomic(folder + "/" + kJsonName, json.dump() + "\n");
    for (const auto& [name, content] : files_) write_file_atomic(folder + "/" + name, content);
  }

 private:
  bool cuts_text() const { return bytes_complete_ && !adds_prefix_; }

  // Added tokens, and each text between them by itself: as SentencePiece makes of a whole text.
  void encode_parts(std::string_view text, std::vector<int32_t>& ids) const {
    std::vector<AddedTokens::Part> parts;
    added_.cut(text, parts);
    for (const auto& part : parts) {
      if (part.id >= 0) {
        ids.push_back(part.id);
      } else {
        encode_text(part.text, ids);
      }
    }
  }

  void encode_text(std::string_view text, std::vector<int32_t>& ids) const {
    // With a piece for every byte and no space added in front, text can be cut. These go to byte pieces, the rest line
    // by line:
    // - a real U+2581 (SentencePiece would read it as a space),
    // - bytes that are not UTF-8 (it would replace them),
    // - NUL.
    if (!cuts_text()) return encode_run(text, &ids);
    size_t begin = 0;
    for (size_t i = 0; i < text.size();) {
      const size_t length = utf8_length(text.substr(i));
      const std::string_view character = text.substr(i, std::max<size_t>(length, 1));
      i += character.size();
      if (length == 0 || character == kSpaceMark || character[0] == '\0') {
        encode_run(text.substr(begin, i - character.size() - begin), &ids);
        for (const char c : character) ids.push_back(byte_ids_[static_cast<unsigned char>(c)]);
        begin = i;
      } else if (character[0] == '\n' && !newline_pieces_) {
        encode_run(text.substr(begin, i - begin), &ids);
        begin = i;
      }
    }
    encode_run(text.substr(begin), &ids);
  }

  // Tokens beside the model, and its own control pieces, are found in a text. Ids go on after the pieces.
  void add_tokens(const SentencePieceFolder& beside) {
    const auto size = static_cast<int32_t>(pieces_.size());
    std::vector<AddedToken> tokens = beside.tokens;
    std::ranges::sort(tokens, {}, &AddedToken::id);
    std::unordered_map<std::string, int32_t> ids;
    for (const AddedToken& token : tokens) {
      if (!ids.try_emplace(token.content, token.id).second)
        fail_usage("'{}': the token '{}' comes twice", beside.source, token.content);
      if (token.id < size && processor_.IdToPiece(token.id) != token.content) {
        fail_usage("'{}': the token '{}' has the id {}, at which the model has '{}'", beside.source, token.content,
                   token.id, processor_.IdToPiece(token.id));
      }
      if (token.id >= size && token.id != vocab_size()) {
        fail_usage("'{}': the token '{}': expected the id {}, which follows those before it, got {}", beside.source,
                   token.content, vocab_size(), token.id);
      }
      if (token.id >= size) pieces_.push_back(token.content);
      add(token);
    }
    for (int32_t id = 0; id < size; ++id) {
      if (!processor_.IsControl(id) && !processor_.IsUnknown(id)) continue;
      AddedToken token;
      token.id = id;
      token.content = processor_.IdToPiece(id);
      if (ids.try_emplace(token.content, id).second) add(token);
    }
    added_.finish();
    if (beside.end.empty()) return;
    const auto found = ids.find(beside.end);
    end_ = found != ids.end() ? found->second : processor_.PieceToId(beside.end);
    if (found == ids.end() && (end_ < 0 || processor_.IsUnknown(end_))) {
      fail_usage(
          "'{}': eos_token: expected a piece of the model or a token of added_tokens.json or added_tokens_decoder, got "
          "'{}'",
          beside.end_source, beside.end);
    }
  }

  void add(const AddedToken& token) {
    added_.add(token, token.content);
    tokens_reach_out_ = tokens_reach_out_ || token.lstrip || token.rstrip || token.single_word ||
                        token.content.find('\n') != std::string::npos;
  }

  // The bytes that a piece stands for; notes byte pieces and pieces with a newline on the way.
  std::string surface(int id) {
    const std::string& name = processor_.IdToPiece(id);
    if (processor_.IsControl(id)) return "";
    if (processor_.IsUnknown(id)) return "\xe2\x81\x87";  // U+2047, as SentencePiece shows it
    if (processor_.IsByte(id)) {
      // <0x0A>
      const int value = name.size() == 6 ? static_cast<int>(std::strtol(name.substr(3, 2).c_str(), nullptr, 16)) : 0;
      byte_ids_[static_cast<size_t>(value)] = id;
      return std::string(1, static_cast<char>(value));
    }
    if (name.find('\n') != std::string::npos) newline_pieces_ = true;
    std::string text;
    for (size_t i = 0; i < name.size();) {
      const bool space = name.compare(i, kSpaceMark.size(), kSpaceMark) == 0;
      text += space ? ' ' : name[i];
      i += space ? kSpaceMark.size() : 1;
    }
    return text;
  }

  // Whether this model puts a space before every text (most published models do).
  void probe_prefix() {
    std::vector<int> ids;
    if (!processor_.Encode("a", &ids).ok()) return;
    adds_prefix_ =
        !ids.empty() && !pieces_[static_cast<size_t>(ids[0])].empty() && pieces_[static_cast<size_t>(ids[0])][0] == ' ';
  }

  void encode_run(std::string_view text, std::vector<int32_t>* ids) const {
    if (text.empty()) return;
    std::vector<int> run;
    const auto status = processor_.Encode(text, &run);
    if (!status.ok()) fail_usage("SentencePiece cannot encode {} bytes of text: {}", text.size(), reason(status));
    ids->insert(ids->end(), run.begin(), run.end());
  }

  sentencepiece::SentencePieceProcessor processor_;
  std::string model_;
  std::vector<std::pair<std::string, std::string>> files_;  // beside the model: names and contents
  uint64_t checksum_ = 0;
  AddedTokens added_;
  int32_t end_ = -1;
  bool tokens_reach_out_ = false;  // what is around an added token matters, or one has a line break
  std::vector<std::string> pieces_;
  std::array<int32_t, 256> byte_ids_ = {};
  bool bytes_complete_ = false, adds_prefix_ = false, newline_pieces_ = false;
};

// The lines of a text without their ends, cut to what SentencePiece takes in one sentence (it drops longer ones).
class LineIterator final : public sentencepiece::SentenceIterator {
 public:
  explicit LineIterator(std::string_view text) : rest_(text) { Next(); }
  bool done() const override { return done_; }
  const std::string& value() const override { return line_; }
  sentencepiece::util::Status status() const override { return {}; }
  void Next() override {
    line_.clear();
    while (line_.empty() && !rest_.empty()) {
      size_t end = std::min(rest_.find('\n'), rest_.size());
      if (end > kMaxBytes) {
        const size_t space = rest_.rfind(' ', kMaxBytes);
        end = space != std::string_view::npos && space > 0 ? space : kMaxBytes;
        while (end < rest_.size() && (static_cast<unsigned char>(rest_[end]) & 0xc0u) == 0x80u) ++end;
      }
      line_ = rest_.substr(0, end);
      // The trainer leaves out lines that have a NUL.
      std::replace(line_.begin(), line_.end(), '\0', ' ');
      rest_.remove_prefix(end);
      if (!rest_.empty() && rest_[0] == '\n') rest_.remove_prefix(1);
    }
    done_ = line_.empty();
  }

 private:
  static constexpr size_t kMaxBytes = 4000;
  std::string_view rest_;
  std::string line_;
  bool done_ = false;
};

}  // namespace

std::unique_ptr<Tokenizer> sentencepiece_tokenizer(std::string model, const std::string& path,
                                                   const std::string& folder) {
  return std::make_unique<SentencePieceTokenizer>(std::move(model), path, read_sentencepiece_folder(folder));
}

std::unique_ptr<Tokenizer> sentencepiece_tokenizer(const std::string& model_path) {
  const std::string folder = std::filesystem::path(model_path).parent_path().string();
  return sentencepiece_tokenizer(read_file(model_path, size_t{1} << 30), model_path, folder.empty() ? "." : folder);
}

void train_sentencepiece(const std::string& text_path, const std::string& model_path, int32_t vocab_size,
                         const std::string& model_type) {
  if (model_type != "unigram" && model_type != "bpe")
    fail_usage("tokenizer model type: expected unigram or bpe, got '{}'", model_type);
  // 256 byte pieces and the unknown piece, which every model has, leave room for nothing below this.
  constexpr int32_t kSmallest = 258;
  if (vocab_size < kSmallest)
    fail_usage("tokenizer vocabulary size: expected at least {} (256 bytes, unknown, one piece), got {}", kSmallest,
               vocab_size);
  const std::string text = read_file(text_path);
  LineIterator lines(text);
  if (lines.done()) fail_usage("'{}': expected a text to train a tokenizer on, it is empty", text_path);
  const std::unordered_map<std::string, std::string> options = {
      {"model_type", model_type},
      {"vocab_size", std::to_string(vocab_size)},
      {"byte_fallback", "true"},
      {"normalization_rule_name", "identity"},
      {"remove_extra_whitespaces", "false"},
      {"add_dummy_prefix", "false"},
      {"allow_whitespace_only_pieces", "true"},
      {"bos_id", "-1"},
      {"eos_id", "-1"},
      {"pad_id", "-1"},
      {"num_threads", "2"},  // sums are cut by this number: fixed, so that the model is the same everywhere
      {"minloglevel", "3"},
  };
  std::string model;
  const auto status = sentencepiece::SentencePieceTrainer::Train(options, &lines, &model);
  if (!status.ok())
    fail_usage("'{}': SentencePiece cannot train a {} model with {} pieces on this text: {}", text_path, model_type,
               vocab_size, reason(status));
  write_file_atomic(model_path, model);
}

}  // namespace fw
