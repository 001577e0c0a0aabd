#include "base/agreement.h"

#include <gtest/gtest.h>

#include "support/thread_ranks.h"

namespace fw {
namespace {

using testing::ThreadRanks;

TEST(Agreement, RanksWithTheSameFactsGoOn) {
  for (const int size : {1, 2, 5}) {
    int reached = 0;
    std::mutex mutex;
    ThreadRanks::run(size, [&](Communicator& ranks) {
      require_agreement(ranks, {{"train.seed", "1"}, {"data.text", ""}});
      const std::lock_guard<std::mutex> lock(mutex);
      ++reached;
    });
    EXPECT_EQ(reached, size);
  }
}

// Every rank says what differs: on which rank, and how.
TEST(Agreement, AllRanksNameWhatDiffers) {
  std::vector<std::string> said(4);
  ThreadRanks::run(4, [&](Communicator& ranks) {
    const bool odd = ranks.rank() == 2;
    Facts facts{
        {"train.lr", "1"}, {"train.seed", odd ? "9" : "1"}, {"the file 'a b\n1 2'", odd ? "3 bytes" : "4 bytes"}};
    if (odd) facts.emplace_back("--resume", "on");
    try {
      require_agreement(ranks, facts);
    } catch (const RanksDisagree& error) {
      said[static_cast<size_t>(ranks.rank())] = error.what();
    }
  });
  for (const std::string& one : said) {
    EXPECT_EQ(one, said[0]);
    EXPECT_NE(one.find("train.seed (rank 0: 1, rank 2: 9)"), std::string::npos) << one;
    EXPECT_NE(one.find("the file 'a b\n1 2' (rank 0: 4 bytes, rank 2: 3 bytes)"), std::string::npos) << one;
    EXPECT_NE(one.find("--resume (rank 0: nothing, rank 2: on)"), std::string::npos) << one;
    EXPECT_EQ(one.find("train.lr"), std::string::npos) << one;
  }
}

}  // namespace
}  // namespace fw
