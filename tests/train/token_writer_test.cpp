// Tokenization as a stream: the pieces in which text comes and interruptions change nothing, memory does not grow.
#include "train/token_writer.h"

#include <gtest/gtest.h>
#include <sys/resource.h>

#include <functional>
#include <vector>

#include "base/base_support.h"
#include "base/file.h"
#include "base/growing_file.h"
#include "train/training_support.h"

namespace fw {
namespace {

using testing::fails;
using testing::TempFolder;

class Texts final : public TextSource {
 public:
  explicit Texts(std::vector<std::string> texts) : texts_(std::move(texts)) {}
  const std::string& name() const override { return name_; }
  bool next() override {
    at_ = 0;
    return ++index_ < static_cast<int64_t>(texts_.size());
  }
  size_t read(std::span<char> out) override {
    const std::string& text = texts_[static_cast<size_t>(index_)];
    const size_t n = text.copy(out.data(), out.size(), at_);
    at_ += n;
    return n;
  }

 private:
  std::string name_ = "texts";
  std::vector<std::string> texts_;
  int64_t index_ = -1;
  size_t at_ = 0;
};

TextOpener opener(const std::vector<std::string>& texts) {
  return [texts] { return std::make_unique<Texts>(texts); };
}

class TokenWriter : public ::testing::Test {
 protected:
  std::string path() const { return folder_.path("tokens"); }
  size_t files() const {
    return static_cast<size_t>(std::distance(std::filesystem::directory_iterator(folder_.path("")), {}));
  }
  // What an undisturbed call writes.
  std::string whole(const std::vector<std::string>& texts, const Tokenizer& tokenizer) {
    write_token_file(opener(texts), options_, tokenizer, folder_.path("whole"));
    std::string content = read_file(folder_.path("whole"));
    std::filesystem::remove(folder_.path("whole"));
    return content;
  }

  TempFolder folder_;
  TokenizeOptions options_;
};

TEST_F(TokenWriter, PiecesOfAnySizeGiveTheSameFile) {
  const std::string text = testing::sample_text(40, 3);
  write_file_atomic(folder_.path("text"), text);
  train_sentencepiece(folder_.path("text"), folder_.path("model"), 280, "unigram");
  const auto pieces = sentencepiece_tokenizer(folder_.path("model"));
  const auto bytes = byte_tokenizer(), ids = id_tokenizer(1000);
  const std::vector<std::string> words{text.substr(0, 3000), "",
                                       "%\r\nno end\n%%\n %\n" + std::string(300, 'x') + "%\n%\n%",
                                       "\xff\n\xe2\x96\x81\n%\n\n\n%\nlast"};
  struct Case {
    const Tokenizer* tokenizer;
    std::vector<std::string> texts;
  };
  for (const Case& c :
       {Case{bytes.get(), words}, Case{pieces.get(), words}, Case{ids.get(), {"1 22 333\n4 5\n", "999\n\n7"}}}) {
    for (const char* separator : {"", "%", "a longer separator"}) {
      if (c.tokenizer == ids.get() && separator[0] != '\0') continue;  // it is no number
      options_ = {};
      options_.separator = separator;
      const std::string expected = whole(c.texts, *c.tokenizer);
      for (const size_t piece : {1, 2, 3, 7, 100}) {
        options_.piece = piece;
        write_token_file(opener(c.texts), options_, *c.tokenizer, path());
        EXPECT_TRUE(read_file(path()) == expected)
            << c.tokenizer->type() << " '" << separator << "', pieces of " << piece;
      }
    }
  }
  EXPECT_EQ(files(), 3u) << "text, model, tokens: no part is left";
}

TEST_F(TokenWriter, AStoppedCallIsGoneOnWith) {
  std::vector<std::string> texts{testing::sample_text(20, 1), testing::sample_text(15, 2)};
  options_.piece = 100;
  for (const char* separator : {"", "%"}) {
    options_.separator = separator;
    options_.progress = nullptr;
    const std::string expected = whole(texts, *byte_tokenizer());
    int stops = 0;
    int64_t furthest = 0;
    for (;; ++stops) {
      ASSERT_LT(stops, 1000);
      int calls = 0;
      options_.progress = [&](const TokenFileStats& stats) {
        // The text before is read again, and two pieces more are tokenized at each try.
        return stats.bytes <= furthest || ++calls < 3;
      };
      const TokenFileStats stats = write_token_file(opener(texts), options_, *byte_tokenizer(), path());
      EXPECT_EQ(stats.resumed_at > 0, stops > 0);
      furthest = stats.bytes;
      if (stats.complete) break;
      EXPECT_FALSE(file_exists(path()));
      EXPECT_TRUE(file_exists(path() + ".tokenizing.json"));
    }
    EXPECT_GT(stops, 5);
    EXPECT_TRUE(read_file(path()) == expected);
    EXPECT_EQ(files(), 1u);
    std::filesystem::remove(path());
  }
}

struct Killed {};

// A call that ends anywhere, with more in its files than its last note says.
TEST_F(TokenWriter, AnEndBetweenTwoNotesLosesOnlyWhatCameAfterTheFirst) {
  const std::vector<std::string> texts{testing::sample_text(100, 1)};
  options_.separator = "%";
  const std::string expected = whole(texts, *byte_tokenizer());
  options_.piece = 64;
  options_.safe_every = 500;
  for (int death = 1; death < 60; death += 7) {
    int calls = 0;
    options_.progress = [&](const TokenFileStats&) -> bool {
      if (++calls == death) throw Killed();
      return true;
    };
    EXPECT_THROW(write_token_file(opener(texts), options_, *byte_tokenizer(), path()), Killed);
    EXPECT_FALSE(file_exists(path()));
    options_.progress = nullptr;
    const TokenFileStats stats = write_token_file(opener(texts), options_, *byte_tokenizer(), path());
    EXPECT_EQ(stats.resumed_at > 0, death * 64 > 650) << death;
    EXPECT_TRUE(read_file(path()) == expected) << death;
    EXPECT_EQ(files(), 1u);
    std::filesystem::remove(path());
  }
}

// Text, document boundaries, separator or tokenizer that are not what the part was made of: it begins anew.
TEST_F(TokenWriter, APartOfSomethingElseIsNotUsed) {
  const std::string text = testing::sample_text(10, 1);
  const auto interrupt = [&](const std::vector<std::string>& texts) {
    TokenizeOptions options;
    options.separator = "%";
    options.piece = 100;
    options.progress = [](const TokenFileStats& stats) { return stats.bytes < 600; };
    EXPECT_FALSE(write_token_file(opener(texts), options, *byte_tokenizer(), path()).complete);
  };
  const auto expect_anew = [&](const std::vector<std::string>& texts, const std::string& separator,
                               const Tokenizer& tokenizer, const char* what) {
    options_.separator = separator;
    const std::string expected = whole(texts, tokenizer);
    const TokenFileStats stats = write_token_file(opener(texts), options_, tokenizer, path());
    EXPECT_EQ(stats.resumed_at, 0) << what;
    EXPECT_TRUE(read_file(path()) == expected) << what;
    EXPECT_EQ(files(), 1u) << what;
  };
  std::string changed = text;
  changed[50] = changed[50] == 'x' ? 'y' : 'x';
  interrupt({text});
  expect_anew({changed}, "%", *byte_tokenizer(), "another text");
  interrupt({text});
  expect_anew({text.substr(0, 300)}, "%", *byte_tokenizer(), "a shorter text");
  const size_t line = text.find(' ', 200) + 1;  // inside a document
  interrupt({text.substr(0, line), text.substr(line)});
  expect_anew({text}, "%", *byte_tokenizer(), "a boundary less");
  interrupt({text});
  expect_anew({text.substr(0, line), text.substr(line)}, "%", *byte_tokenizer(), "a boundary more");
  interrupt({text});
  expect_anew({text}, "", *byte_tokenizer(), "another separator");
  interrupt({"1 2 3\n" + std::string(2000, '4') + "\n"});
  expect_anew({"1 2 3\n4 5\n"}, "", *id_tokenizer(100), "another tokenizer");
  for (const char* note : {"", "{", "{\"made_by\": 3}", "[]"}) {
    interrupt({text});
    write_file_atomic(path() + ".tokenizing.json", note);
    expect_anew({text}, "%", *byte_tokenizer(), note);
  }
  interrupt({text});
  std::filesystem::resize_file(path() + ".tokenizing", 70);
  expect_anew({text}, "%", *byte_tokenizer(), "ids cut off");
}

class Endless final : public TextSource {
 public:
  explicit Endless(uint64_t bytes) : left_(bytes) {}
  const std::string& name() const override { return name_; }
  bool next() override { return !std::exchange(begun_, true); }
  size_t read(std::span<char> out) override {
    const size_t n = static_cast<size_t>(std::min<uint64_t>(left_, out.size()));
    for (size_t i = 0; i < n; ++i) out[i] = i % 61 == 60 ? '\n' : static_cast<char>('a' + i % 23);
    left_ -= n;
    return n;
  }

 private:
  std::string name_ = "endless";
  uint64_t left_;
  bool begun_ = false;
};

TEST_F(TokenWriter, MemoryDoesNotGrowWithTheText) {
  const auto peak_mib = [] {
    rusage usage = {};
    getrusage(RUSAGE_SELF, &usage);
    return usage.ru_maxrss / 1024;
  };
  const auto before = peak_mib();
  const TokenFileStats stats = write_token_file([] { return std::make_unique<Endless>(uint64_t{200} << 20); }, options_,
                                                *byte_tokenizer(), path());
  EXPECT_EQ(stats.tokens, int64_t{200} << 20);
  EXPECT_LT(peak_mib() - before, 60);
}

TEST_F(TokenWriter, OneAtATime) {
  const GrowingFile other(path() + ".tokenizing", path());
  EXPECT_TRUE(fails(ErrorKind::kIo, {path(), "another process"},
                    [&] { write_token_file("text", "", *byte_tokenizer(), path()); }));
  EXPECT_TRUE(file_exists(path() + ".tokenizing"));
}

TEST_F(TokenWriter, AnErrorOfTheTextLeavesTheOldFile) {
  write_token_file("old", "", *byte_tokenizer(), path());
  const std::string old = read_file(path());
  write_file_atomic(folder_.path("bad.jsonl"), "{\"text\": \"good\"}\nbad\n");
  EXPECT_TRUE(fails(ErrorKind::kUsage, {"bad.jsonl:2"}, [&] {
    write_token_file([&] { return open_text(folder_.path("bad.jsonl")); }, options_, *byte_tokenizer(), path());
  }));
  EXPECT_EQ(read_file(path()), old);
  EXPECT_EQ(files(), 2u);
}

}  // namespace
}  // namespace fw
