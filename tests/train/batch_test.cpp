#include <gtest/gtest.h>

#include <limits>
#include <set>

#include "base/base_support.h"
#include "train/token_file.h"
#include "train/token_writer.h"
#include "train/training_support.h"

namespace fw {
namespace {

using testing::fails;
using testing::sample_text;
using testing::TempFolder;

std::shared_ptr<const TokenFile> file_of(const std::string& text, const std::string& separator) {
  const TempFolder folder;  // the map outlives the name
  write_token_file(text, separator, *byte_tokenizer(), folder.path("tokens"));
  return std::make_shared<const TokenFile>(folder.path("tokens"));
}

std::string text_of(const std::vector<int32_t>& ids) { return byte_tokenizer()->decode(ids); }

// A text in which every position can be told from its next three bytes.
std::string numbered(int count) {
  std::string text;
  for (int i = 0; i < count; ++i) {
    text += static_cast<char>('a' + i % 26);
    text += static_cast<char>('A' + i / 26 % 26);
    text += static_cast<char>('0' + i / 676 % 10);
  }
  return text;
}

TEST(Batch, ShapeAndTargetsInOneDocument) {
  const std::string text = numbered(400);
  const auto file = file_of(text, "");
  BatchSource source(file, 4, 32, 1);
  for (int i = 0; i < 30; ++i) {
    const Batch batch = source.next();
    ASSERT_EQ(batch.ids.size(), 128u);
    ASSERT_EQ(batch.targets.size(), 128u);
    ASSERT_EQ(batch.layout.offsets(), (std::vector<int64_t>{0, 32, 64, 96, 128}));
    for (size_t w = 0; w < 4; ++w) {
      const std::string window = text_of({batch.ids.begin() + static_cast<std::ptrdiff_t>(w * 32),
                                          batch.ids.begin() + static_cast<std::ptrdiff_t>(w * 32 + 32)});
      const size_t position = text.find(window);
      ASSERT_NE(position, std::string::npos);
      for (size_t t = 0; t < 32; ++t) {
        // The token after the window too; nothing after the end of the document.
        const int32_t expected = position + t + 1 < text.size() ? text[position + t + 1] : -1;
        ASSERT_EQ(batch.targets[w * 32 + t], expected);
      }
    }
  }
  EXPECT_EQ(source.position(), 120);
}

TEST(Batch, PiecesFollowTheDocuments) {
  const auto file = file_of(sample_text(60, 3), "%");
  BatchSource source(file, 3, 50, 9);
  std::vector<int32_t> all(static_cast<size_t>(file->tokens()));
  file->read(0, all);
  for (int i = 0; i < 100; ++i) {
    const Batch batch = source.next();
    ASSERT_EQ(batch.layout.tokens(), 150);
    ASSERT_EQ(batch.ids.size(), 150u);
    std::set<int64_t> boundaries(batch.layout.offsets().begin(), batch.layout.offsets().end());
    ASSERT_TRUE(boundaries.count(50) && boundaries.count(100)) << "windows do not share a state";
    for (int64_t n = 0; n < batch.layout.count(); ++n) {
      const int64_t begin = batch.layout.begin(n), end = batch.layout.end(n);
      ASSERT_LT(begin, end) << "an empty piece";
      for (int64_t t = begin; t < end; ++t) {
        const auto k = static_cast<size_t>(t);
        // Inside a piece the target is the next id; only its last token may have none, or one beyond the window.
        if (t + 1 < end) {
          ASSERT_EQ(batch.targets[k], batch.ids[k + 1]);
        }
        const bool document_ends =
            t >= 2 && batch.ids[k] == '\n' && batch.ids[k - 1] == '%' && batch.ids[k - 2] == '\n' && t - 2 >= begin;
        if (document_ends) {
          ASSERT_EQ(t + 1, end) << "a piece goes on past the end of its document";
          ASSERT_EQ(batch.targets[k], -1);
        }
        if (batch.targets[k] == -1) {
          ASSERT_EQ(t + 1, end);
          ASSERT_EQ(batch.ids[k], '\n');
        }
      }
      // A piece that begins inside a window begins a document.
      if (begin % 50 != 0) {
        ASSERT_EQ(batch.ids[static_cast<size_t>(begin)], '\n');
      }
    }
  }
}

TEST(Batch, AnEpochHasEveryWindowOnceAndTheNextAnotherOrder) {
  const std::string text = numbered(500);  // 1500 bytes: (1500 - 15) / 16 = 92 windows
  const auto file = file_of(text, "");
  BatchSource source(file, 1, 16, 5);
  ASSERT_EQ(source.windows_per_epoch(), 92);
  std::vector<std::vector<size_t>> epochs;
  std::set<size_t> firsts;
  for (int e = 0; e < 20; ++e) {
    std::vector<size_t> positions;
    for (int64_t w = 0; w < 92; ++w) positions.push_back(text.find(text_of(source.next().ids)));
    std::vector<size_t> sorted = positions;
    std::sort(sorted.begin(), sorted.end());
    for (size_t w = 0; w < sorted.size(); ++w)
      ASSERT_EQ(sorted[w], sorted[0] + 16 * w) << "windows do not lie side by side";
    ASSERT_LT(sorted[0], 16u);
    firsts.insert(sorted[0]);
    epochs.push_back(positions);
    EXPECT_NE(positions, sorted);
    EXPECT_DOUBLE_EQ(source.epoch(), e + 1);
  }
  EXPECT_EQ(std::set<std::vector<size_t>>(epochs.begin(), epochs.end()).size(), epochs.size());
  EXPECT_GT(firsts.size(), 5u) << "the cuts are the same in every epoch";
}

TEST(Batch, PositionIsAllTheState) {
  const auto file = file_of(sample_text(40, 2), "%");
  BatchSource source(file, 3, 20, 77);
  std::vector<Batch> batches;
  batches.reserve(200);
  for (int i = 0; i < 200; ++i) batches.push_back(source.next());  // several epochs
  ASSERT_GT(source.epoch(), 2);
  for (const int64_t i : {0, 1, 57, 199, 3}) {
    BatchSource other(file, 3, 20, 77);
    other.seek(i * 3);
    EXPECT_EQ(other.position(), i * 3);
    for (int64_t j = i; j < std::min<int64_t>(i + 40, 200); ++j) {
      const Batch batch = other.next();
      ASSERT_EQ(batch.ids, batches[static_cast<size_t>(j)].ids);
      ASSERT_EQ(batch.targets, batches[static_cast<size_t>(j)].targets);
      ASSERT_EQ(batch.layout.offsets(), batches[static_cast<size_t>(j)].layout.offsets());
    }
  }
  source.seek(0);
  EXPECT_EQ(source.next().ids, batches[0].ids) << "back to the beginning";
  BatchSource other_seed(file, 3, 20, 78);
  EXPECT_NE(other_seed.next().ids, batches[0].ids);
}

TEST(Batch, TheSequencesOfABatchDoNotChangeTheWindows) {
  const auto file = file_of(sample_text(40, 2), "%");
  BatchSource four(file, 4, 20, 1), one(file, 1, 20, 1);
  for (int i = 0; i < 50; ++i) {
    std::vector<int32_t> ids;
    for (int s = 0; s < 4; ++s) {
      const Batch batch = one.next();
      ids.insert(ids.end(), batch.ids.begin(), batch.ids.end());
    }
    ASSERT_EQ(four.next().ids, ids);
  }
}

TEST(Batch, SmallFiles) {
  const auto file = file_of("hello", "");
  EXPECT_TRUE(
      fails(ErrorKind::kUsage, {"has 5 tokens", "a window takes 6", "at most 5"}, [&] { BatchSource(file, 1, 6, 1); }));
  BatchSource whole(file, 2, 5, 1);  // one window: it comes twice
  const Batch batch = whole.next();
  EXPECT_EQ(text_of(batch.ids), "hellohello");
  EXPECT_EQ(batch.targets, (std::vector<int32_t>{'e', 'l', 'l', 'o', -1, 'e', 'l', 'l', 'o', -1}));
  EXPECT_DOUBLE_EQ(whole.epoch(), 2);
  BatchSource single(file, 1, 1, 1);
  EXPECT_EQ(single.windows_per_epoch(), 5);
  for (int64_t length = 1; length <= 5; ++length) {
    BatchSource source(file, 1, length, 3);
    for (int i = 0; i < 20; ++i) ASSERT_NE(std::string("hello").find(text_of(source.next().ids)), std::string::npos);
  }
}

TEST(Batch, WhatCannotBe) {
  const auto file = file_of("hello", "");
  EXPECT_TRUE(fails(ErrorKind::kUsage, {"at least 1 sequence", "got 0"}, [&] { BatchSource(file, 0, 2, 1); }));
  EXPECT_TRUE(fails(ErrorKind::kUsage, {"length", "got -2"}, [&] { BatchSource(file, 1, -2, 1); }));
  BatchSource source(file, 1, 2, 1);
  EXPECT_TRUE(fails(ErrorKind::kUsage, {"position", "got -1"}, [&] { source.seek(-1); }));
}

TokenMix two_files() {
  return TokenMix({{file_of(numbered(300), ""), 0.7},
                   {file_of(std::string(500, '#'), ""), 0.2},
                   {file_of(std::string(40, '!'), ""), 0.1}});
}

TEST(Mix, SharesHoldAllAlong) {
  BatchSource source(two_files(), 1, 8, 3);
  int64_t given[3] = {0, 0, 0};
  for (int64_t n = 1; n <= 1000; ++n) {
    const int32_t first = source.next().ids[0];
    ++given[first == '#' ? 1 : first == '!' ? 2 : 0];
    const double shares[] = {0.7, 0.2, 0.1};
    for (int i = 0; i < 3; ++i)
      EXPECT_NEAR(static_cast<double>(given[i]), shares[i] * static_cast<double>(n), 1.0 + 1e-9) << n;
  }
  EXPECT_EQ(given[0], 700);
}

TEST(Mix, EveryFileHasItsOwnEpochs) {
  BatchSource source(TokenMix({{file_of(numbered(320), ""), 1}, {file_of(std::string(64, '#'), ""), 1}}), 2, 8, 3);
  std::set<std::string> windows;
  const int64_t in_epoch = (320 * 3 - 7) / 8;
  for (int64_t i = 0; i < in_epoch; ++i) {
    const Batch batch = source.next();
    windows.insert(text_of({batch.ids.begin(), batch.ids.begin() + 8}));
    EXPECT_EQ(batch.ids[8], '#');
  }
  EXPECT_EQ(static_cast<int64_t>(windows.size()), in_epoch);
}

TEST(Mix, PositionIsAllItsState) {
  BatchSource whole(two_files(), 3, 16, 9);
  for (int i = 0; i < 37; ++i) whole.next();
  BatchSource resumed(two_files(), 3, 16, 9);
  resumed.next();
  resumed.seek(whole.position());
  for (int i = 0; i < 20; ++i) {
    const Batch a = whole.next(), b = resumed.next();
    ASSERT_EQ(a.ids, b.ids) << i;
    ASSERT_EQ(a.targets, b.targets) << i;
  }
}

TEST(Mix, AFileAloneIsAsWithoutAMix) {
  const auto file = file_of(numbered(400), "");
  BatchSource alone(file, 2, 16, 4), mixed(TokenMix({{file, 0.3}}), 2, 16, 4);
  for (int i = 0; i < 50; ++i) ASSERT_EQ(alone.next().ids, mixed.next().ids);
}

TEST(Mix, WeightsThatCannotBe) {
  const auto file = file_of(numbered(400), "");
  for (const double weight :
       {0.0, -1.0, std::numeric_limits<double>::infinity(), std::numeric_limits<double>::quiet_NaN()}) {
    EXPECT_TRUE(fails(ErrorKind::kUsage, {"weight > 0"}, [&] {
      BatchSource(TokenMix({{file, 1}, {file, weight}}), 1, 8, 1);
    })) << weight;
  }
}

}  // namespace
}  // namespace fw
