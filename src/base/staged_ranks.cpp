#include "base/staged_ranks.h"

#include <algorithm>
#include <vector>

#include "base/gpus.h"

namespace fw {
namespace {

constexpr size_t kAlign = 16;

// Of `bytes` in pieces, the one that begins at `at`: none after the end.
size_t piece_at(size_t bytes, size_t at, size_t piece) { return at < bytes ? std::min(piece, bytes - at) : 0; }

}  // namespace

StagedRanks::StagedRanks(Communicator& host, Device& device, size_t staging)
    : host_(host),
      device_(device),
      piece_(std::max(kAlign, staging / static_cast<size_t>(host.size()) / kAlign * kAlign)) {
  out_ = cuda_staging(piece_ * static_cast<size_t>(host.size()));
  in_ = cuda_staging(piece_ * static_cast<size_t>(host.size()));
}

void StagedRanks::all_to_all(std::span<const ConstPart> send, std::span<const Part> receive) {
  const auto ranks = static_cast<size_t>(size());
  // As many turns on all ranks as the largest part of any of them takes: one that has none left goes on with empty
  // ones.
  std::vector<size_t> most(ranks);
  size_t& mine = most[static_cast<size_t>(rank())];
  for (const ConstPart& part : send) mine = std::max(mine, part.bytes);
  std::vector<Part> sizes;
  sizes.reserve(ranks);
  for (size_t& one : most) sizes.push_back(part_of(std::span<size_t>(&one, 1)));
  host_.all_gather(sizes);
  const size_t end = *std::max_element(most.begin(), most.end());

  std::vector<ConstPart> sent(ranks);
  std::vector<Part> received(ranks);
  for (size_t at = 0; at < end; at += piece_) {
    for (size_t to = 0; to < ranks; ++to) {
      sent[to] = {out(to), piece_at(send[to].bytes, at, piece_)};
      if (sent[to].bytes > 0)
        device_.to_host(out(to), static_cast<const std::byte*>(send[to].data) + at, sent[to].bytes);
    }
    for (size_t from = 0; from < ranks; ++from) received[from] = {in(from), piece_at(receive[from].bytes, at, piece_)};
    if (at > 0) device_.synchronise();  // the last turn's pieces have been read
    host_.all_to_all(sent, received);
    for (size_t from = 0; from < ranks; ++from) {
      if (received[from].bytes > 0)
        device_.from_host(static_cast<std::byte*>(receive[from].data) + at, in(from), received[from].bytes);
    }
  }
  device_.synchronise();
}

void StagedRanks::all_gather(std::span<const Part> parts) {
  const auto ranks = static_cast<size_t>(size()), me = static_cast<size_t>(rank());
  size_t end = 0;
  for (const Part& part : parts) end = std::max(end, part.bytes);
  std::vector<Part> pieces(ranks);
  for (size_t at = 0; at < end; at += piece_) {
    if (at > 0) device_.synchronise();
    for (size_t from = 0; from < ranks; ++from) pieces[from] = {in(from), piece_at(parts[from].bytes, at, piece_)};
    if (pieces[me].bytes > 0) device_.to_host(in(me), static_cast<std::byte*>(parts[me].data) + at, pieces[me].bytes);
    host_.all_gather(pieces);
    for (size_t from = 0; from < ranks; ++from) {
      if (from != me && pieces[from].bytes > 0)
        device_.from_host(static_cast<std::byte*>(parts[from].data) + at, in(from), pieces[from].bytes);
    }
  }
  device_.synchronise();
}

void StagedRanks::broadcast(Part data, int from) {
  const size_t room = piece_ * static_cast<size_t>(size());
  for (size_t at = 0; at < data.bytes; at += room) {
    const size_t bytes = piece_at(data.bytes, at, room);
    std::byte* const address = static_cast<std::byte*>(data.data) + at;
    if (at > 0) device_.synchronise();
    if (rank() == from) device_.to_host(in(0), address, bytes);
    host_.broadcast({in(0), bytes}, from);
    if (rank() != from) device_.from_host(address, in(0), bytes);
  }
  device_.synchronise();
}

void StagedRanks::barrier() {
  device_.synchronise();
  host_.barrier();
}

}  // namespace fw
