// Ranks that are threads of one process: each gets a Communicator that copies out of the memory of the others. Those of
// one device take turns: one computes until it waits for the others.
#pragma once

#include <barrier>
#include <cstring>
#include <exception>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

#include "base/communicator.h"
#include "base/error.h"

namespace fw::testing {

class ThreadRanks {
 public:
  // Calls body(its communicator) on `size` threads and waits for them; throws what the lowest rank threw. A rank that
  // ends by itself leaves the others waiting for it, so body throws on all ranks or on none.
  static void run(int size, const std::function<void(Communicator&)>& body, bool in_turns = false) {
    ThreadRanks ranks(size, in_turns);
    std::vector<std::exception_ptr> failures(static_cast<size_t>(size));
    std::vector<std::thread> threads;
    threads.reserve(failures.size());
    for (int rank = 0; rank < size; ++rank) {
      threads.emplace_back([&, rank] {
        const std::unique_lock<std::mutex> turn =
            in_turns ? std::unique_lock<std::mutex>(ranks.turn_) : std::unique_lock<std::mutex>();
        try {
          Rank mine(ranks, rank);
          body(mine);
        } catch (...) {
          failures[static_cast<size_t>(rank)] = std::current_exception();
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
    for (const std::exception_ptr& failure : failures) {
      if (failure) std::rethrow_exception(failure);
    }
  }

 private:
  class Rank : public Communicator {
   public:
    Rank(ThreadRanks& all, int rank) : all_(all), rank_(rank) {}
    int rank() const override { return rank_; }
    int size() const override { return static_cast<int>(all_.sent_.size()); }

    void all_to_all(std::span<const ConstPart> send, std::span<const Part> receive) override {
      all_.sent_[me()].assign(send.begin(), send.end());
      barrier();
      for (size_t from = 0; from < receive.size(); ++from) take(all_.sent_[from][me()], receive[from]);
      barrier();
    }
    void all_gather(std::span<const Part> parts) override {
      const Part& mine = parts[me()];
      all_.sent_[me()].assign(parts.size(), {mine.data, mine.bytes});
      barrier();
      for (size_t from = 0; from < parts.size(); ++from) {
        if (from != me()) take(all_.sent_[from][me()], parts[from]);
      }
      barrier();
    }
    void broadcast(Part data, int from) override {
      if (rank_ == from) all_.sent_[me()].assign(all_.sent_.size(), {data.data, data.bytes});
      barrier();
      if (rank_ != from) take(all_.sent_[static_cast<size_t>(from)][me()], data);
      barrier();
    }
    void barrier() override {
      if (all_.in_turns_) all_.turn_.unlock();
      all_.barrier_.arrive_and_wait();
      if (all_.in_turns_) all_.turn_.lock();
    }

   private:
    size_t me() const { return static_cast<size_t>(rank_); }
    static void take(const ConstPart& from, const Part& to) {
      if (from.bytes != to.bytes)
        fail_internal("ranks: one sends {} bytes, the other expects {}", from.bytes, to.bytes);
      if (to.bytes > 0) std::memcpy(to.data, from.data, to.bytes);
    }

    ThreadRanks& all_;
    int rank_;
  };

  ThreadRanks(int size, bool in_turns) : sent_(static_cast<size_t>(size)), barrier_(size), in_turns_(in_turns) {}

  std::vector<std::vector<ConstPart>> sent_;  // by rank, for each rank
  std::barrier<> barrier_;
  bool in_turns_;
  std::mutex turn_;
};

}  // namespace fw::testing
