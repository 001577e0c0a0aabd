// Tokenizers: bytes (256 ids, the default), a SentencePiece model, a tokenizer.json of Hugging Face's tokenizers, or
// the ids themselves as numbers. A model folder says which in tokenizer.json ({"type": "bytes"}, {"type":
// "sentencepiece", "model": "tokenizer.model"}, {"type": "ids", "vocab_size": 101}, or Hugging Face's own).
#pragma once

#include <cstdint>
#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <string_view>
#include <vector>

namespace fw {

class Tokenizer {
 public:
  virtual ~Tokenizer() = default;
  virtual int32_t vocab_size() const = 0;
  virtual std::vector<int32_t> encode(std::string_view text) const = 0;
  // How much of a text whose rest has not come can be encoded by itself: encode() of it and encode() of what follows,
  // one after the other, are encode() of both together, whatever follows. 0: nothing, the tokenizer must see the whole.
  virtual size_t whole_prefix(std::string_view) const { return 0; }
  virtual std::string decode(const std::vector<int32_t>& ids) const = 0;
  // The bytes that one more token adds when text is streamed (SentencePiece: '▁' is a space; byte pieces are bytes).
  virtual std::string piece(int32_t id) const = 0;
  // The same of a token that begins a text: no space between words goes before it.
  virtual std::string first_piece(int32_t id) const { return piece(id); }
  // The id that ends a text, -1 where there is none.
  virtual int32_t end_of_text() const { return -1; }
  virtual std::string type() const = 0;
  // Of everything that decides what text becomes, never 0: token files and models remember it, because two tokenizers
  // of one size make ids that look alike and mean other text.
  virtual uint64_t checksum() const = 0;
  virtual void save(const std::string& folder) const = 0;  // tokenizer.json and what it names
};

std::unique_ptr<Tokenizer> byte_tokenizer();
// Text is numbers between spaces; every piece is a number and a space.
// advice: what the error of a text that is no such numbers ends with.
std::unique_ptr<Tokenizer> id_tokenizer(int32_t vocab_size, std::string advice = "");
// A SentencePiece model, with the tokens and the end of text that added_tokens.json, tokenizer_config.json and
// special_tokens_map.json beside it say.
std::unique_ptr<Tokenizer> sentencepiece_tokenizer(const std::string& model_path);
// The same of a model's bytes; path names it in errors, the other files lie in the folder. "": there are none.
std::unique_ptr<Tokenizer> sentencepiece_tokenizer(std::string model, const std::string& path,
                                                   const std::string& folder);
// A file of Hugging Face's tokenizers: `text`, and what it says. Ids are those of its encode(add_special_tokens=False),
// without truncation and padding. `end` is the token that ends a text, "" where none is known; path names the file in
// errors. Error(kUsage) with the place of what is wrong or not supported.
std::unique_ptr<Tokenizer> huggingface_tokenizer(std::string text, const nlohmann::json& json, const std::string& path,
                                                 const std::string& end = "");
// A SentencePiece model or a tokenizer.json of Hugging Face's, by its content. The latter's tokenizer_config.json,
// where it lies beside, says the end token.
std::unique_ptr<Tokenizer> tokenizer_of_file(const std::string& path);
// Trains a SentencePiece model (unigram or bpe, byte fallback, no normalisation that loses text) and writes model_path.
void train_sentencepiece(const std::string& text_path, const std::string& model_path, int32_t vocab_size,
                         const std::string& model_type);
// From a model folder; one with neither tokenizer.json nor tokenizer.model is bytes.
std::unique_ptr<Tokenizer> load_tokenizer(const std::string& folder);
// What Tokenizer::checksum() is for a tokenizer that `definition` says all about.
uint64_t tokenizer_checksum(std::string_view type, std::string_view definition);
// "bytes" or the path of a file (tokenizer_of_file).
std::unique_ptr<Tokenizer> make_tokenizer(const std::string& spec);

}  // namespace fw
