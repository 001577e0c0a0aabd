#include "tokenizer/tokenizer.h"

#include <gtest/gtest.h>

#include <array>
#include <memory>

#include "base/base_support.h"
#include "base/file.h"
#include "base/random.h"
#include "base/temp_folder.h"

namespace fw {
namespace {

using testing::fails;
using testing::TempFolder;

std::string all_bytes() {
  std::string text;
  for (int i = 0; i < 256; ++i) text += static_cast<char>(i);
  return text;
}

std::string streamed(const Tokenizer& tokenizer, const std::vector<int32_t>& ids) {
  std::string text;
  for (const int32_t id : ids) text += tokenizer.piece(id);
  return text;
}

TEST(ByteTokenizer, BytesAreIds) {
  const auto tokenizer = byte_tokenizer();
  EXPECT_EQ(tokenizer->vocab_size(), 256);
  EXPECT_EQ(tokenizer->type(), "bytes");
  EXPECT_EQ(tokenizer->encode("a\n\xff"), (std::vector<int32_t>{97, 10, 255}));
  EXPECT_TRUE(tokenizer->encode("").empty());
  EXPECT_EQ(tokenizer->decode(tokenizer->encode(all_bytes())), all_bytes());
  EXPECT_EQ(streamed(*tokenizer, tokenizer->encode(all_bytes())), all_bytes());
}

TEST(ByteTokenizer, IdsOutsideTheVocabulary) {
  const auto tokenizer = byte_tokenizer();
  EXPECT_TRUE(fails(ErrorKind::kUsage, {"256"}, [&] { tokenizer->piece(256); }));
  EXPECT_TRUE(fails(ErrorKind::kUsage, {"-1"}, [&] { tokenizer->decode({5, -1}); }));
}

// One small model of each kind, trained once: training takes a second.
class SentencePiece : public ::testing::TestWithParam<const char*> {
 protected:
  static constexpr int32_t kVec16 = 340;

  static void SetUpTestSuite() {
    folder_ = std::make_unique<TempFolder>();
    write_file_atomic(folder_->path("text"), training_text());
    for (const char* type : {"unigram", "bpe"})
      train_sentencepiece(folder_->path("text"), folder_->path(type), kVec16, type);
  }
  static void TearDownTestSuite() { folder_.reset(); }

  // Words of a small language, with indentation, tabs and characters beyond ASCII.
  static std::string training_text() {
    static constexpr std::array<const char*, 12> kSyllables = {"ka", "lo", "mi",  "ter", "an", "be",
                                                               "sh", "ü",  "ing", "ed",  "th", "e"};
    Random random(7);
    std::string text;
    for (int line = 0; line < 400; ++line) {
      if (line % 5 == 0) text += "    ";
      for (uint64_t word = 0; word <= random.below(8); ++word) {
        for (uint64_t part = 0; part <= random.below(3); ++part) text += kSyllables[random.below(kSyllables.size())];
        text += ' ';
      }
      text += line % 7 == 0 ? "\t\n\n" : ".\n";
    }
    return text;
  }

  static std::string model_path() { return folder_->path(GetParam()); }
  static std::unique_ptr<TempFolder> folder_;
};
std::unique_ptr<TempFolder> SentencePiece::folder_;

TEST_P(SentencePiece, HasTheSizeAskedForAndCompresses) {
  const auto tokenizer = sentencepiece_tokenizer(model_path());
  EXPECT_EQ(tokenizer->vocab_size(), kVec16);
  EXPECT_EQ(tokenizer->type(), "sentencepiece");
  const std::string text = training_text();
  EXPECT_LT(tokenizer->encode(text).size(), text.size() * 3 / 4);
}

TEST_P(SentencePiece, EveryTextComesBackAsItWas) {
  const auto tokenizer = sentencepiece_tokenizer(model_path());
  static constexpr std::array<std::string_view, 28> kParts = {"a",
                                                              " ",
                                                              "  ",
                                                              "\n",
                                                              "\n\n",
                                                              "\r\n",
                                                              "\t",
                                                              "the kalo ",
                                                              "ter",
                                                              "\xe2\x96\x81",
                                                              "<0x0A>",
                                                              "<unk>",
                                                              "<s>",
                                                              "</s>",
                                                              "\u00fc",
                                                              "日本",
                                                              "𝄞",
                                                              "\u2585",
                                                              "e\u0301",
                                                              "\u00a0",
                                                              "\u3000",
                                                              "\ufb01",
                                                              "\ufffd",
                                                              "\xff",
                                                              "\xe2\x96",
                                                              "\xc0\x80",
                                                              "\xed\xa0\x80",
                                                              "\xf4\x90\x80\x80"};
  Random random(11);
  for (int i = 0; i < 3000; ++i) {
    std::string text;
    for (uint64_t n = random.below(12); n > 0; --n) {
      if (random.below(8) == 0) {
        text += static_cast<char>(random.below(256));
      } else {
        text += kParts[random.below(kParts.size())];
      }
    }
    const auto ids = tokenizer->encode(text);
    for (const int32_t id : ids) {
      ASSERT_GE(id, 1) << "the unknown piece stands for text that is lost";
      ASSERT_LT(id, kVec16);
    }
    ASSERT_EQ(tokenizer->decode(ids), text);
    ASSERT_EQ(streamed(*tokenizer, ids), text);
  }
  for (const std::string& text :
       {std::string(), std::string(" "), std::string("\n"), std::string(3, '\0'), all_bytes(), training_text()}) {
    EXPECT_EQ(tokenizer->decode(tokenizer->encode(text)), text);
  }
}

TEST_P(SentencePiece, NewlineIsOneToken) {
  const auto tokenizer = sentencepiece_tokenizer(model_path());
  EXPECT_EQ(tokenizer->encode("\n").size(), 1u);
}

TEST_P(SentencePiece, TrainingTwiceGivesTheSameModel) {
  train_sentencepiece(folder_->path("text"), folder_->path("again"), kVec16, GetParam());
  EXPECT_EQ(read_file(folder_->path("again")), read_file(model_path()));
}

TEST_P(SentencePiece, SavedInAModelFolderAndLoaded) {
  const TempFolder model;
  const auto tokenizer = sentencepiece_tokenizer(model_path());
  tokenizer->save(model.path("."));
  const auto loaded = load_tokenizer(model.path("."));
  EXPECT_EQ(loaded->type(), "sentencepiece");
  EXPECT_EQ(loaded->vocab_size(), kVec16);
  EXPECT_EQ(loaded->encode(training_text()), tokenizer->encode(training_text()));
  EXPECT_EQ(make_tokenizer(model.path("tokenizer.model"))->encode("the kalo"), tokenizer->encode("the kalo"));

  std::string content = read_file(model.path("tokenizer.model"));
  content[content.size() / 2] = static_cast<char>(content[content.size() / 2] ^ 1);
  write_file_atomic(model.path("tokenizer.model"), content);
  EXPECT_TRUE(
      fails(ErrorKind::kUsage, {"tokenizer.model", "checksum", "damaged"}, [&] { load_tokenizer(model.path(".")); }));
}

TEST_P(SentencePiece, TruncatedAndFlippedModelsNeverCrash) {
  // A model given by a user has no checksum: some flips only change a score or a piece. What loads must work.
  const TempFolder folder;
  const std::string path = folder.path("damaged");
  const std::string model = read_file(model_path());
  Random random(5);
  const auto use = [&](const std::string& content) {
    write_file_atomic(path, content);
    try {
      const auto tokenizer = sentencepiece_tokenizer(path);
      for (const int32_t id : tokenizer->encode("the kalo mi\n\xff")) tokenizer->piece(id);
      return false;
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), ErrorKind::kUsage);
      EXPECT_NE(std::string(error.what()).find(path), std::string::npos) << error.what();
      return true;
    }
  };
  EXPECT_TRUE(use(""));
  EXPECT_TRUE(use("this is a text and no model"));
  int refused = 0;
  for (int i = 0; i < 60; ++i) {
    refused += use(model.substr(0, random.below(model.size())));
    std::string flipped = model;
    flipped[random.below(model.size())] ^= static_cast<char>(1 << random.below(8));
    refused += use(flipped);
  }
  EXPECT_GT(refused, 0);
}

TEST_P(SentencePiece, IdsOutsideTheVocabulary) {
  const auto tokenizer = sentencepiece_tokenizer(model_path());
  EXPECT_TRUE(fails(ErrorKind::kUsage, {"340"}, [&] { tokenizer->piece(kVec16); }));
  EXPECT_TRUE(fails(ErrorKind::kUsage, {"-5"}, [&] { tokenizer->decode({-5}); }));
}

TEST_P(SentencePiece, WhatCannotBeTrained) {
  const TempFolder folder;
  const std::string text = folder.path("text"), model = folder.path("model");
  const auto train = [&](int32_t pieces, const std::string& type) {
    return [&, pieces, type] { train_sentencepiece(text, model, pieces, type); };
  };
  EXPECT_TRUE(fails(ErrorKind::kUsage, {text, "No such file"}, train(300, GetParam())));
  for (const char* empty : {"", "\n\n\n"}) {
    write_file_atomic(text, empty);
    EXPECT_TRUE(fails(ErrorKind::kUsage, {text, "empty"}, train(300, GetParam())));
  }
  write_file_atomic(text, "hello world\n");
  EXPECT_TRUE(fails(ErrorKind::kUsage, {text, "Vocabulary size too high (1000)"}, train(1000, GetParam())));
  EXPECT_TRUE(fails(ErrorKind::kUsage, {"at least 258", "got 100"}, train(100, GetParam())));
  EXPECT_TRUE(fails(ErrorKind::kUsage, {"unigram or bpe", "'word'"}, train(300, "word")));
  EXPECT_FALSE(file_exists(model)) << "a training that failed left a model";
}

TEST_P(SentencePiece, SaysNothingOnItsOwn) {
  ::testing::internal::CaptureStderr();
  ::testing::internal::CaptureStdout();
  train_sentencepiece(folder_->path("text"), folder_->path("again"), kVec16, GetParam());
  sentencepiece_tokenizer(folder_->path("again"))->encode("\xff text");
  EXPECT_THROW(sentencepiece_tokenizer(folder_->path("text")), Error);
  EXPECT_EQ(::testing::internal::GetCapturedStdout(), "");
  EXPECT_EQ(::testing::internal::GetCapturedStderr(), "");
}

INSTANTIATE_TEST_SUITE_P(Kinds, SentencePiece, ::testing::Values("unigram", "bpe"),
                         [](const auto& kind) { return std::string(kind.param); });

TEST(LoadTokenizer, FoldersOfAllKinds) {
  const TempFolder folder;
  const std::string here = folder.path("."), json = here + "/tokenizer.json";
  EXPECT_EQ(load_tokenizer(here)->type(), "bytes") << "a folder without tokenizer.json";
  byte_tokenizer()->save(here);
  EXPECT_EQ(load_tokenizer(here)->type(), "bytes");
  EXPECT_TRUE(fails(ErrorKind::kUsage, {"missing", "expected a model folder"},
                    [&] { load_tokenizer(folder.path("missing")); }));
  EXPECT_TRUE(fails(ErrorKind::kUsage, {json, "expected a model folder"}, [&] { load_tokenizer(json); }));
  const auto load = [&] { load_tokenizer(here); };
  for (const char* content : {"", "{", "[]", "7", "{}", "{\"type\": 7}", "{\"version\": \"1.0\", \"model\": 7}"}) {
    write_file_atomic(json, content);
    EXPECT_TRUE(fails(ErrorKind::kUsage, {json, "expected {\"type\": \"bytes\"}"}, load)) << content;
  }
  write_file_atomic(json, R"({"version": "1.0", "model": {"type": "BPE"}})");
  EXPECT_TRUE(fails(ErrorKind::kUsage, {json, "model: expected the key \"vocab\""}, load));
  write_file_atomic(json, R"({"type": "sentencepeice"})");
  EXPECT_TRUE(fails(ErrorKind::kUsage, {json, "did you mean sentencepiece?"}, load));
  write_file_atomic(json, R"({"type": "sentencepiece"})");
  EXPECT_TRUE(fails(ErrorKind::kUsage, {json, "\"model\""}, load));
  write_file_atomic(json, R"({"type": "sentencepiece", "model": "../../etc/passwd"})");
  EXPECT_TRUE(fails(ErrorKind::kUsage, {json, "same folder"}, load));
  write_file_atomic(json, R"({"type": "sentencepiece", "model": "tokenizer.model"})");
  EXPECT_TRUE(fails(ErrorKind::kUsage, {"tokenizer.model", "No such file"}, load));
  write_file_atomic(folder.path("tokenizer.model"), "no model");
  EXPECT_TRUE(fails(ErrorKind::kUsage, {"tokenizer.model", "not a SentencePiece model"}, load));
}

TEST(MakeTokenizer, FromWhatAUserSays) {
  EXPECT_EQ(make_tokenizer("bytes")->type(), "bytes");
  EXPECT_TRUE(fails(ErrorKind::kUsage, {"'byte'", "expected bytes or the path"}, [] { make_tokenizer("byte"); }));
  EXPECT_TRUE(fails(ErrorKind::kUsage, {"/tmp", "folder"}, [] { make_tokenizer("/tmp"); }));
}

}  // namespace
}  // namespace fw
