#include "tokenizer/tokenizer.h"

#include <sentencepiece_processor.h>
#include <sentencepiece_trainer.h>

#include <algorithm>
#include <array>
#include <filesystem>
#include <limits>
#include <nlohmann/json.hpp>
#include <unordered_map>

#include "base/checksum.h"
#include "base/error.h"
#include "base/file.h"
#include "base/json.h"
#include "base/nearest.h"
#include "tokenizer/utf8.h"

namespace fw {
namespace {

constexpr std::string_view kSpaceMark = "\xe2\x96\x81";  // U+2581, how SentencePiece writes a space
constexpr const char* kJsonName = "tokenizer.json";
constexpr const char* kModelName = "tokenizer.model";
constexpr size_t kMostJson = size_t{256} << 20;  // published ones have up to 40 MB

void check_id(int32_t id, int32_t vocab_size) {
  if (id < 0 || id >= vocab_size) fail_usage("token id {} is outside the tokenizer's vocabulary of {}", id, vocab_size);
}

std::string checksum_text(std::string_view content) {
  Checksum sum;
  sum.add(content);
  return fmt::format("{:016x}", sum.value());
}

// SentencePiece's words without the source position in front and the options that do not exist here.
std::string reason(const sentencepiece::util::Status& status) {
  std::string text = status.error_message();
  const size_t position = text.find(") [");
  const size_t end = position == std::string::npos ? position : text.rfind("] ");
  if (end != std::string::npos && end + 2 < text.size()) text.erase(0, end + 2);
  const size_t option = text.find(" or decrease character_coverage");
  return text.substr(0, option);
}

class ByteTokenizer final : public Tokenizer {
 public:
  int32_t vocab_size() const override { return 256; }
  std::vector<int32_t> encode(std::string_view text) const override {
    std::vector<int32_t> ids(text.size());
    std::transform(text.begin(), text.end(), ids.begin(), [](char c) { return static_cast<int32_t>(static_cast<unsigned char>(c)); });
    return ids;
  }
  size_t whole_prefix(std::string_view text) const override { return text.size(); }
  std::string decode(const std::vector<int32_t>& ids) const override {
    std::string text;
    text.reserve(ids.size());
    for (const int32_t id : ids) text += piece(id);
    return text;
  }
  std::string piece(int32_t id) const override {
    check_id(id, 256);
    return std::string(1, static_cast<char>(id));
  }
  std::string type() const override { return "bytes"; }
  uint64_t checksum() const override { return tokenizer_checksum(type(), ""); }
  void save(const std::string& folder) const override { write_file_atomic(folder + "/" + kJsonName, "{\"type\": \"bytes\"}\n"); }
};

class SentencePieceTokenizer final : public Tokenizer {
 public:
  SentencePieceTokenizer(std::string model, const std::string& path) : model_(std::move(model)) {
    const auto status = processor_.LoadFromSerializedProto(model_);
    if (!status.ok()) fail_usage("'{}': not a SentencePiece model, or damaged: {}", path, reason(status));
    const int size = processor_.GetPieceSize();
    if (size < 1) fail_usage("'{}': the SentencePiece model has no pieces", path);
    pieces_.reserve(static_cast<size_t>(size));
    byte_ids_.fill(-1);
    for (int id = 0; id < size; ++id) pieces_.push_back(surface(id));
    checksum_ = tokenizer_checksum(type(), model_);
    bytes_complete_ = std::find(byte_ids_.begin(), byte_ids_.end(), -1) == byte_ids_.end();
    probe_prefix();
  }

  int32_t vocab_size() const override { return static_cast<int32_t>(pieces_.size()); }

  std::vector<int32_t> encode(std::string_view text) const override {
    std::vector<int32_t> ids;
    // With a piece for every byte and no space added in front, text can be cut: a real U+2581 (SentencePiece would read
    // it as a space), bytes that are not UTF-8 (it would replace them) and NUL go to byte pieces, the rest line by line.
    if (!bytes_complete_ || adds_prefix_) {
      encode_run(text, &ids);
      return ids;
    }
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
    return ids;
  }

  // encode() goes line by line where it cuts text at all and no piece reaches over a line's end.
  size_t whole_prefix(std::string_view text) const override {
    if (!bytes_complete_ || adds_prefix_ || newline_pieces_) return 0;
    const size_t end = text.rfind('\n');
    return end == std::string_view::npos ? 0 : end + 1;
  }

  std::string decode(const std::vector<int32_t>& ids) const override {
    std::string text;
    for (const int32_t id : ids) {
      check_id(id, vocab_size());
      text += pieces_[static_cast<size_t>(id)];
    }
    if (adds_prefix_ && !text.empty() && text[0] == ' ') text.erase(0, 1);
    return text;
  }

  std::string piece(int32_t id) const override {
    check_id(id, vocab_size());
    return pieces_[static_cast<size_t>(id)];
  }

  int32_t end_of_text() const override { return processor_.eos_id(); }

  std::string type() const override { return "sentencepiece"; }
  uint64_t checksum() const override { return checksum_; }

  void save(const std::string& folder) const override {
    write_file_atomic(folder + "/" + kModelName, model_);
    const nlohmann::ordered_json json = {{"type", "sentencepiece"}, {"model", kModelName}, {"checksum", checksum_text(model_)}};
    write_file_atomic(folder + "/" + kJsonName, json.dump() + "\n");
  }

 private:
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

  // Whether this model puts a space in front of every text (most published models do).
  void probe_prefix() {
    std::vector<int> ids;
    if (!processor_.Encode("a", &ids).ok()) return;
    adds_prefix_ = !ids.empty() && !pieces_[static_cast<size_t>(ids[0])].empty() && pieces_[static_cast<size_t>(ids[0])][0] == ' ';
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
  uint64_t checksum_ = 0;
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

std::unique_ptr<Tokenizer> byte_tokenizer() { return std::make_unique<ByteTokenizer>(); }

std::unique_ptr<Tokenizer> sentencepiece_tokenizer(const std::string& model_path) {
  return std::make_unique<SentencePieceTokenizer>(read_file(model_path, size_t{1} << 30), model_path);
}

void train_sentencepiece(const std::string& text_path, const std::string& model_path, int32_t vocab_size, const std::string& model_type) {
  if (model_type != "unigram" && model_type != "bpe") fail_usage("tokenizer model type: expected unigram or bpe, got '{}'", model_type);
  // 256 byte pieces and the unknown piece, which every model has, leave room for nothing below this.
  constexpr int32_t kSmallest = 258;
  if (vocab_size < kSmallest) fail_usage("tokenizer vocabulary size: expected at least {} (256 bytes, unknown, one piece), got {}", kSmallest, vocab_size);
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
    fail_usage("'{}': SentencePiece cannot train a {} model with {} pieces on this text: {}", text_path, model_type, vocab_size, reason(status));
  write_file_atomic(model_path, model);
}

namespace {

// What Hugging Face writes has a model, ours a type.
bool is_huggingface(const nlohmann::json& json) { return json.is_object() && json.contains("model") && json["model"].is_object(); }

// eos_token of the tokenizer_config.json beside a tokenizer.json; "" where neither says one.
std::string end_token_beside(const std::string& json_path) {
  const std::string path = (std::filesystem::path(json_path).parent_path() / "tokenizer_config.json").string();
  if (!file_exists(path)) return "";
  const nlohmann::json json = parse_json(read_file(path, kMostJson), "'" + path + "'");
  const nlohmann::json none, &end = json.is_object() && json.contains("eos_token") ? json["eos_token"] : none;
  if (end.is_string()) return end;
  return end.is_object() && end.contains("content") && end["content"].is_string() ? end["content"].get<std::string>() : "";
}

std::unique_ptr<Tokenizer> huggingface_of(std::string text, const nlohmann::json& json, const std::string& path) {
  return huggingface_tokenizer(std::move(text), json, path, end_token_beside(path));
}

}  // namespace

std::unique_ptr<Tokenizer> load_tokenizer(const std::string& folder) {
  if (!std::filesystem::is_directory(folder)) fail_usage("cannot load a tokenizer from '{}': expected a model folder", folder);
  const std::string path = folder + "/" + kJsonName;
  if (!file_exists(path)) {
    if (file_exists(folder + "/" + kModelName)) {
      fail_usage("'{}' is missing, and '{}' beside it says that the model's tokenizer is not bytes: give {} back", path, kModelName, kJsonName);
    }
    return byte_tokenizer();
  }
  const auto unknown = [&path](const std::string& found) {
    fail_usage("'{}': expected {{\"type\": \"bytes\"}}, {{\"type\": \"sentencepiece\", \"model\": \"{}\"}} or a file of Hugging Face's tokenizers, got {}",
               path, kModelName, found);
  };
  nlohmann::json json;
  std::string text;
  try {
    text = read_file(path, kMostJson);
    json = parse_json(text, "'" + path + "'");
  } catch (const Error& error) {
    unknown(std::string("something else: ") + error.what());
  }
  if (is_huggingface(json)) return huggingface_of(std::move(text), json, path);
  if (!json.is_object() || !json.contains("type") || !json["type"].is_string()) unknown("something else");
  const std::string type = json["type"];
  if (type == "bytes") return byte_tokenizer();
  if (type == "ids") {
    const int64_t vocab = json.contains("vocab_size") && json["vocab_size"].is_number_integer() ? json["vocab_size"].get<int64_t>() : 0;
    if (vocab < 1 || vocab > std::numeric_limits<int32_t>::max()) fail_usage("'{}': expected the key \"vocab_size\" with a number of ids", path);
    return id_tokenizer(static_cast<int32_t>(vocab));
  }
  if (type != "sentencepiece") {
    const std::array<std::string, 3> known = {"bytes", "ids", "sentencepiece"};
    const std::string near = nearest(type, known);
    fail_usage("'{}': unknown tokenizer type '{}'{}", path, type,
               near.empty() ? "; expected bytes, ids or sentencepiece" : fmt::format("; did you mean {}?", near));
  }
  if (!json.contains("model") || !json["model"].is_string()) fail_usage("'{}': expected the key \"model\" with the name of the SentencePiece file", path);
  const std::string name = json["model"];
  if (name.empty() || name.find('/') != std::string::npos) fail_usage("'{}': \"model\": expected the name of a file in the same folder, got '{}'", path, name);
  const std::string model_path = folder + "/" + name;
  std::string model = read_file(model_path, size_t{1} << 30);
  if (json.contains("checksum") && json["checksum"] != checksum_text(model)) {
    fail_usage("'{}': its checksum is {}, {} expects {}: the file is damaged or was exchanged", model_path, checksum_text(model), kJsonName,
               json["checksum"].dump());
  }
  return std::make_unique<SentencePieceTokenizer>(std::move(model), model_path);
}

std::unique_ptr<Tokenizer> tokenizer_of_file(const std::string& path) {
  const std::string start = file_start(path, 64);
  const size_t solid = start.find_first_not_of(" \t\r\n");
  if (solid == std::string::npos || start[solid] != '{') return sentencepiece_tokenizer(path);
  std::string text = read_file(path, kMostJson);
  const nlohmann::json json = parse_json(text, "'" + path + "'");
  if (!is_huggingface(json)) fail_usage("tokenizer '{}': expected a tokenizer.json of Hugging Face's tokenizers, with an object \"model\"", path);
  return huggingface_of(std::move(text), json, path);
}

std::unique_ptr<Tokenizer> make_tokenizer(const std::string& spec) {
  if (spec == "bytes") return byte_tokenizer();
  if (!file_exists(spec)) fail_usage("tokenizer '{}': expected bytes or the path of a SentencePiece model or a tokenizer.json, there is no such file", spec);
  return tokenizer_of_file(spec);
}

}  // namespace fw
