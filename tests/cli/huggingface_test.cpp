// A tokenizer.json of Hugging Face's through the program: training, token files, evaluation, generation, and a folder
// of another library that has one.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <nlohmann/json.hpp>

#include "cli/program.h"
#include "tokenizer/byte_level.h"

namespace fw::test {
namespace {

using testing::HasSubstr;
using Args = std::vector<std::string>;

// Bytes, "th", "the", " the", and a token that ends a text.
std::string definition() {
  nlohmann::json vocab;
  for (int byte = 0; byte < 256; ++byte) vocab[to_byte_level(std::string(1, static_cast<char>(byte)))] = byte;
  const std::string space = to_byte_level(" "), the = space + "the";
  vocab["th"] = 256;
  vocab["the"] = 257;
  vocab[the] = 258;
  const nlohmann::json end = {{"id", 259}, {"content", "<end>"}, {"special", true}};
  return nlohmann::json{{"added_tokens", nlohmann::json::array({end})},
                        {"pre_tokenizer", {{"type", "ByteLevel"}, {"add_prefix_space", false}}},
                        {"decoder", {{"type", "ByteLevel"}}},
                        {"model", {{"type", "BPE"}, {"vocab", vocab}, {"merges", {"t h", "th e", space + " the"}}}}}
      .dump();
}

Outcome ok(const Args& args) {
  Outcome outcome = run(args);
  EXPECT_EQ(outcome.code, 0) << args[0] << ": " << outcome.err;
  return outcome;
}

TEST(HuggingFaceTokenizer, FromTextToText) {
  Folder folder;
  const std::string json = folder / "given.json", text = folder / "text", out = folder / "run";
  spill(json, definition());
  spill(folder / "tokenizer_config.json", R"({"eos_token": "<end>"})");
  spill(text, small_text());
  ok(tiny_train(text, out) + Args{"--tokenizer", json});
  EXPECT_THAT(slurp(out + "/config.toml"), HasSubstr("vocab_size = 260"));
  EXPECT_EQ(slurp(out + "/model/tokenizer.json"), definition());
  EXPECT_THAT(slurp(out + "/model/tokenizer_config.json"), HasSubstr("<end>"));
  EXPECT_FALSE(ok({"generate", out, "--tokens", "10", "--prompt", "the \xff the"}).out.empty());

  // A token file of the same tokenizer is what the text is, but for the end of its document; one of bytes is refused.
  ok({"tokenize", text, "--tokenizer", json, "--no-document-end", "--out", folder / "tokens"});
  const Args eval = {"eval", out, "--context", "64", "--json", "--text"};
  const auto loss = [&](const std::string& file) {
    return nlohmann::json::parse(ok(eval + Args{file}).out)["results"][0]["nll"].get<double>();
  };
  EXPECT_EQ(loss(folder / "tokens"), loss(text));
  const auto results = nlohmann::json::parse(ok(eval + Args{text}).out)["results"][0];
  EXPECT_GT(results["bytes"].get<double>(), results["tokens"].get<double>()) << "'the' is three bytes and one token";
  ok({"tokenize", text, "--out", folder / "bytes"});
  EXPECT_EQ(run(eval + Args{folder / "bytes"}).code, 2);
}

TEST(HuggingFaceTokenizer, AFolderOfAnotherLibraryThatHasOne) {
  Folder folder;
  const std::string json = folder / "given.json", text = folder / "text", out = folder / "run", hf = folder / "hf";
  spill(json, definition());
  spill(text, small_text());
  ok(tiny_train(text, out) + Args{"--tokenizer", json, "--layout", "fla", "--steps", "1"});
  ok({"export", out, hf});
  EXPECT_EQ(slurp(hf + "/tokenizer.json"), definition());
  std::filesystem::remove(hf + "/tokenizer.json");
  EXPECT_THAT(ok({"import", hf, folder / "ids"}).out, HasSubstr("tokenizer: ids"));
  for (const std::string& model : {hf, folder / "ids"}) {
    const Outcome text = run({"generate", model, "--prompt", "Once"});
    EXPECT_EQ(text.code, 2);
    EXPECT_THAT(text.err, HasSubstr(model + "' has no tokenizer; give --tokenizer bytes, or the path of"));
  }
  spill(hf + "/tokenizer.json", definition());
  EXPECT_THAT(ok({"import", hf, folder / "named"}).out, HasSubstr("tokenizer: huggingface"));
  EXPECT_EQ(slurp(folder / "named/tokenizer.json"), definition());
  spill(hf + "/tokenizer.json", R"({"model": {"type": "WordFragment", "vocab": {}}})");
  const Outcome refused = run({"import", hf, folder / "not"});
  EXPECT_EQ(refused.code, 2);
  EXPECT_THAT(refused.err, HasSubstr("hf/tokenizer.json': model.type: the model 'WordFragment' is not supported"));
}

}  // namespace
}  // namespace fw::test
