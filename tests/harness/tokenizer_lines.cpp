// Tokenizers and texts from standard input, what becomes of them to standard output, for tokenizers_fuzz.py. An object
// of JSON a line:
//     {"tokenizer": TEXT OF A tokenizer.json, "texts": [TEXT, ...]}
// and one of
//     {"refused": WORDS}
//     {"texts": [{"ids": [...], "back": HEX, "streamed": HEX} or {"error": WORDS}, ...]}
#include <fmt/format.h>

#include <cstdio>
#include <iostream>
#include <nlohmann/json.hpp>
#include <string>

#include "base/error.h"
#include "base/json.h"
#include "tokenizer/tokenizer.h"

namespace {

std::string hex(const std::string& bytes) {
  std::string out;
  for (const char c : bytes) out += fmt::format("{:02x}", static_cast<unsigned>(static_cast<unsigned char>(c)));
  return out;
}

nlohmann::json of_text(const fw::Tokenizer& tokenizer, const std::string& text) {
  try {
    const std::vector<int32_t> ids = tokenizer.encode(text);
    std::string streamed;
    for (size_t i = 0; i < ids.size(); ++i)
      streamed += i == 0 ? tokenizer.first_piece(ids[i]) : tokenizer.piece(ids[i]);
    return {{"ids", ids}, {"back", hex(tokenizer.decode(ids))}, {"streamed", hex(streamed)}};
  } catch (const fw::Error& error) {
    return {{"error", error.what()}};
  }
}

nlohmann::json of_line(const std::string& line) {
  const nlohmann::json request = fw::parse_json(line, "line");
  const std::string text = request.at("tokenizer");
  try {
    const auto tokenizer = fw::huggingface_tokenizer(text, fw::parse_json(text, "tokenizer"), "tokenizer");
    nlohmann::json texts = nlohmann::json::array();
    for (const auto& one : request.at("texts")) texts.push_back(of_text(*tokenizer, one));
    return {{"texts", texts}};
  } catch (const fw::Error& error) {
    return {{"refused", error.what()}};
  }
}

}  // namespace

int main() try {
  for (std::string line; std::getline(std::cin, line);) std::cout << of_line(line).dump(-1, ' ', true) << std::endl;
  return 0;
} catch (const std::exception& error) {
  std::fprintf(stderr, "%s\n", error.what());
  return 1;
}
