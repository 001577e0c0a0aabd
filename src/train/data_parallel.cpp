#include "train/data_parallel.h"

#include <algorithm>
#include <cmath>

#include "base/error.h"

namespace fw {
namespace {

constexpr int kGroups = 128;
constexpr int64_t kAlign = 16;  // elements: what vector instructions of any device want

// The pieces in kGroups groups of about as many, whatever the number of ranks is; some are empty where there are few. A group begins where its first piece is
// aligned.
std::vector<ParamRange> make_groups(const std::vector<ParamPiece>& pieces, int64_t extent) {
  const auto count = static_cast<int64_t>(pieces.size());
  std::vector<int64_t> first(kGroups + 1, count);
  first[0] = 0;
  for (int64_t group = 1; group < kGroups; ++group) {
    int64_t piece = std::max(first[static_cast<size_t>(group - 1)], group * count / kGroups);
    while (piece < count && pieces[static_cast<size_t>(piece)].begin % kAlign != 0) ++piece;
    first[static_cast<size_t>(group)] = piece;
  }
  const auto begin = [&](int64_t piece) { return piece == 0 ? 0 : piece < count ? pieces[static_cast<size_t>(piece)].begin : extent; };
  std::vector<ParamRange> groups;
  for (size_t group = 0; group < kGroups; ++group) {
    groups.push_back({first[group], first[group + 1] - first[group], begin(first[group]), begin(first[group + 1])});
  }
  return groups;
}

int first_group_of(int rank, int ranks) { return rank * kGroups / ranks; }

std::vector<ParamRange> make_ranges(const std::vector<ParamRange>& groups, int ranks) {
  std::vector<ParamRange> ranges;
  for (int rank = 0; rank < ranks; ++rank) {
    const ParamRange& from = groups[static_cast<size_t>(first_group_of(rank, ranks))];
    const ParamRange& to = groups[static_cast<size_t>(first_group_of(rank + 1, ranks) - 1)];
    ranges.push_back({from.first_piece, to.first_piece + to.pieces - from.first_piece, from.begin, to.end});
  }
  return ranges;
}

const std::vector<ParamRange>& checked(const std::vector<ParamRange>& groups, int ranks) {
  if (ranks > DataParallel<float>::kMostRanks) fail_usage("ranks: expected at most {}, got {}", DataParallel<float>::kMostRanks, ranks);
  return groups;
}

}  // namespace

template <class T>
DataParallel<T>::DataParallel(Communicator& values, Communicator& tensors, const AdamWConfig& config, const Params<W>& params)
    : values_(values),
      tensors_(tensors),
      groups_(make_groups(params.host_pieces(), params.extent())),
      ranges_(make_ranges(checked(groups_, values.size()), values.size())),
      first_group_(first_group_of(values.rank(), values.size())),
      last_group_(first_group_of(values.rank() + 1, values.size())),
      optimizer_(config, params, mine()),
      sum_(params.device(), mine().size()),
      received_(params.device(), mine().size() * (values.size() - 1)),
      squares_(params.device(), last_group_ - first_group_) {}

// The gradients of the batches first to first + N, as many as there are, into sum_.
template <class T>
void DataParallel<T>::add_round(LanguageModel<T>& model, size_t first, size_t batches) {
  const auto ranks = static_cast<size_t>(values_.size()), me = static_cast<size_t>(values_.rank());
  const size_t active = std::min(ranks, batches - first);
  const int64_t part = mine().size();
  const W* grads = me < active ? model.params().grads().data() : nullptr;
  std::vector<const W*> sources(active);  // of my part, by rank
  std::vector<ConstPart> send(ranks);
  std::vector<Part> receive(ranks);
  for (size_t rank = 0, place = 0; rank < ranks; ++rank) {
    if (rank == me) {
      if (me < active) sources[me] = grads + mine().begin;
      continue;
    }
    if (me < active) send[rank] = {grads + ranges_[rank].begin, static_cast<size_t>(ranges_[rank].size()) * sizeof(W)};
    W* const to = received_.data() + part * static_cast<int64_t>(place++);
    if (rank >= active) continue;
    receive[rank] = {to, static_cast<size_t>(part) * sizeof(W)};
    sources[rank] = to;
  }
  if (ranks > 1) tensors_.all_to_all(send, receive);
  for (const W* source : sources) model.exec().add_values(source, part, sum_.data());
}

// Of sum_ on all ranks.
template <class T>
double DataParallel<T>::square_norm(LanguageModel<T>& model) {
  for (int group = first_group_; group < last_group_; ++group) {
    const ParamRange& range = groups_[static_cast<size_t>(group)];
    const ParamPieces pieces = {optimizer_.pieces(model.params()).data + (range.first_piece - mine().first_piece), range.pieces};
    if (range.pieces > 0) model.exec().square_sum(sum_.data(), pieces, squares_.data() + (group - first_group_));
  }
  std::vector<double> all(kGroups);
  squares_.read(0, std::span<double>(all).subspan(static_cast<size_t>(first_group_), static_cast<size_t>(last_group_ - first_group_)));
  std::vector<Part> parts;
  for (int rank = 0; rank < values_.size(); ++rank) {
    const int first = first_group_of(rank, values_.size()), last = first_group_of(rank + 1, values_.size());
    parts.push_back(part_of(std::span<double>(all).subspan(static_cast<size_t>(first), static_cast<size_t>(last - first))));
  }
  values_.all_gather(parts);
  double total = 0;
  for (const double one : all) total += one;
  return total;
}

template <class T>
StepResult DataParallel<T>::step(LanguageModel<T>& model, std::span<const Batch> batches, double lr, double clip) {
  const auto ranks = static_cast<size_t>(values_.size()), me = static_cast<size_t>(values_.rank());
  StepResult result;
  result.count = scored(batches);
  const double scale = result.count > 0 ? 1.0 / static_cast<double>(result.count) : 0.0;
  sum_.zero();
  std::vector<double> losses(batches.size());  // by rank, and of a rank by batch
  std::vector<size_t> begins;
  size_t next = 0;
  for (size_t rank = 0; rank < ranks; ++rank) {
    begins.push_back(next);
    next += batches.size() / ranks + (rank < batches.size() % ranks ? 1 : 0);
  }
  begins.push_back(next);
  for (size_t first = 0; first < batches.size(); first += ranks) {
    if (first + me < batches.size()) {
      const Batch& batch = batches[first + me];
      model.begin_step();
      model.accumulate(batch.ids, batch.targets, batch.layout, scale);
      losses[begins[me] + first / ranks] = model.read_sums().loss.nll;
    }
    add_round(model, first, batches.size());
  }
  std::vector<Part> parts;
  for (size_t rank = 0; rank < ranks; ++rank) parts.push_back(part_of(std::span<double>(losses).subspan(begins[rank], begins[rank + 1] - begins[rank])));
  values_.all_gather(parts);
  for (size_t batch = 0; batch < batches.size(); ++batch) result.nll += losses[begins[batch % ranks] + batch / ranks];

  result.norm = std::sqrt(square_norm(model));
  result.finite = std::isfinite(result.nll) && std::isfinite(result.norm);
  if (!result.finite || result.count == 0) return result;
  optimizer_.update(model.exec(), model.params(), sum_.data(), lr, clip_factor(result.norm, clip));
  if (ranks > 1) {
    const std::span<W> all = model.params().values();
    std::vector<Part> values;
    for (const ParamRange& range : ranges_) values.push_back(part_of(all.subspan(static_cast<size_t>(range.begin), static_cast<size_t>(range.size()))));
    tensors_.all_gather(values);
  }
  return result;
}

// The ranks' parts in rank 0's `all`.
template <class T>
template <class Moment>
void DataParallel<T>::gather(const Buffer<Moment>& mine, Buffer<Moment>* all) {
  const auto ranks = static_cast<size_t>(values_.size());
  std::vector<ConstPart> send(ranks);
  std::vector<Part> receive(ranks);
  send[0] = {mine.data(), static_cast<size_t>(mine.size()) * sizeof(Moment)};
  for (size_t rank = 0; rank < ranks && all != nullptr; ++rank) {
    receive[rank] = {all->data() + ranges_[rank].begin, static_cast<size_t>(ranges_[rank].size()) * sizeof(Moment)};
  }
  tensors_.all_to_all(send, receive);
}

template <class T>
std::optional<BasicAdamW<T>> DataParallel<T>::whole(const Params<W>& params) {
  std::optional<BasicAdamW<T>> all;
  if (values_.rank() == 0) all.emplace(optimizer_.config(), params);
  if (optimizer_.format() == MomentFormat::kFloat32) {
    gather(optimizer_.first(), all ? &all->first() : nullptr);
    gather(optimizer_.second(), all ? &all->second() : nullptr);
  } else {
    gather(optimizer_.first_bf16(), all ? &all->first_bf16() : nullptr);
    gather(optimizer_.second_bf16(), all ? &all->second_bf16() : nullptr);
  }
  if (all) all->set_updates(optimizer_.updates());
  return all;
}

template class DataParallel<float>;
template class DataParallel<double>;

}  // namespace fw
