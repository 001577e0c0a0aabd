#include "train/data_parallel.h"

#include <algorithm>
#include <cmath>

#include "base/agreement.h"
#include "base/error.h"
#include "nn/param_pieces.h"

namespace fw {
namespace {

constexpr int kGroups = 128;
constexpr int64_t kAlign = 16;  // elements: what vector instructions of any device want

// The pieces in kGroups groups of about as many, whatever the number of ranks is; some are empty where there are few. A
// group begins where its first piece is aligned.
std::vector<ParamRange> make_groups(const std::vector<ParamPiece>& pieces, int64_t extent) {
  const auto count = static_cast<int64_t>(pieces.size());
  std::vector<int64_t> first(kGroups + 1, count);
  first[0] = 0;
  for (int64_t group = 1; group < kGroups; ++group) {
    int64_t piece = std::max(first[static_cast<size_t>(group - 1)], group * count / kGroups);
    while (piece < count && pieces[static_cast<size_t>(piece)].begin % kAlign != 0) ++piece;
    first[static_cast<size_t>(group)] = piece;
  }
  const auto begin = [&](int64_t piece) {
    return piece == 0 ? 0 : piece < count ? pieces[static_cast<size_t>(piece)].begin : extent;
  };
  std::vector<ParamRange> groups;
  for (size_t group = 0; group < kGroups; ++group) {
    groups.push_back({first[group], first[group + 1] - first[group], begin(first[group]), begin(first[group + 1])});
  }
  return groups;
}

int first_group_of(int rank, int ranks) { return rank * kGroups / ranks; }

std::vector<ParamRange> make_ranges(const std::vector<ParamRange>& groups, int ranks) {
  if (ranks > kMostRanks) fail_usage("ranks: expected at most {}, got {}", kMostRanks, ranks);
  std::vector<ParamRange> ranges;
  for (int rank = 0; rank < ranks; ++rank) {
    const ParamRange& from = groups[static_cast<size_t>(first_group_of(rank, ranks))];
    const ParamRange& to = groups[static_cast<size_t>(first_group_of(rank + 1, ranks) - 1)];
    ranges.push_back({from.first_piece, to.first_piece + to.pieces - from.first_piece, from.begin, to.end});
  }
  return ranges;
}

// What the pieces of each range have among the float copies of split values: those of neighbouring pieces lie in the
// same order, with gaps that nobody has.
std::vector<ParamRange> make_numbers(const std::vector<ParamPiece>& pieces, const std::vector<ParamRange>& ranges) {
  std::vector<ParamRange> numbers;
  for (const ParamRange& range : ranges) {
    ParamRange& mine = numbers.emplace_back();
    for (int64_t i = range.first_piece; i < range.first_piece + range.pieces; ++i) {
      const ParamPiece& piece = pieces[static_cast<size_t>(i)];
      if (piece.numbers < 0) continue;
      if (mine.size() == 0) mine.begin = piece.numbers;
      mine.end = piece.numbers + piece.count;
    }
  }
  return numbers;
}

}  // namespace

template <class W>
std::vector<ParamRange> rank_ranges(const Params<W>& params, int ranks) {
  return make_ranges(make_groups(pieces_of(params.specs()), params.extent()), ranks);
}
template std::vector<ParamRange> rank_ranges(const Params<float>&, int);
template std::vector<ParamRange> rank_ranges(const Params<double>&, int);

template <class T>
DataParallel<T>::DataParallel(Communicator& values, Communicator& tensors, const AdamWConfig& config,
                              const Params<W>& params, GradientSums sums)
    : values_(values),
      tensors_(tensors),
      sums_(sums),
      groups_(make_groups(params.host_pieces(), params.extent())),
      ranges_(make_ranges(groups_, values.size())),
      numbers_(make_numbers(params.host_pieces(), ranges_)),
      first_group_(first_group_of(values.rank(), values.size())),
      last_group_(first_group_of(values.rank() + 1, values.size())),
      optimizer_(config, params, mine()),
      sum_(params.device(), mine().size()),
      received_(params.device(), mine().size() * (values.size() - 1)),
      squares_(params.device(), last_group_ - first_group_) {
  // Everything that is sent later has sizes that follow from these.
  require_agreement(values, {{"elements of the parameters", fmt::format("{}", params.extent())},
                             {"pieces of the parameters", fmt::format("{}", params.host_pieces().size())},
                             {"moments", fmt::format("{}", static_cast<int>(optimizer_.format()))},
                             {"sums", sums == GradientSums::kApart ? "apart" : "local"}});
}

// The gradients of the batches first to first + N, as many as there are, into sum_.
template <class T>
void DataParallel<T>::add_round(LanguageModel<T>& model, size_t first, size_t batches) {
  const auto ranks = static_cast<size_t>(values_.size()), me = static_cast<size_t>(values_.rank());
  const size_t active = std::min(ranks, batches - first);
  const int64_t part = mine().size();
  const W* grads = me < active ? model.trained().grads().data() : nullptr;
  std::vector<const W*> sources(active);  // of my part, by rank
  std::vector<ConstPart> send(ranks);
  std::vector<Part> receive(ranks);
  for (size_t rank = 0, slot = 0; rank < ranks; ++rank) {
    if (rank == me) {
      if (me < active) sources[me] = grads + mine().begin;
      continue;
    }
    if (me < active) send[rank] = {grads + ranges_[rank].begin, static_cast<size_t>(ranges_[rank].size()) * sizeof(W)};
    W* const to = received_.data() + part * static_cast<int64_t>(slot++);
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
    const ParamPieces pieces = {optimizer_.pieces(model.trained()).data + (range.first_piece - mine().first_piece),
                                range.pieces};
    if (range.pieces > 0) model.exec().square_sum(sum_.data(), pieces, squares_.data() + (group - first_group_));
  }
  std::vector<double> all(kGroups);
  squares_.read(0, std::span<double>(all).subspan(static_cast<size_t>(first_group_),
                                                  static_cast<size_t>(last_group_ - first_group_)));
  std::vector<Part> parts;
  for (int rank = 0; rank < values_.size(); ++rank) {
    const int first = first_group_of(rank, values_.size()), last = first_group_of(rank + 1, values_.size());
    parts.push_back(
        part_of(std::span<double>(all).subspan(static_cast<size_t>(first), static_cast<size_t>(last - first))));
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
  const bool apart = sums_ == GradientSums::kApart;
  for (size_t first = 0; first < batches.size(); first += ranks) {
    if (first + me < batches.size()) {
      const Batch& batch = batches[first + me];
      if (apart || first == 0) model.begin_step();
      model.accumulate(batch.ids, batch.targets, batch.layout, scale);
      if (apart) losses[begins[me] + first / ranks] = model.read_sums().loss.nll;
    }
    if (apart) add_round(model, first, batches.size());
  }
  if (!apart) {
    if (me < batches.size()) losses[begins[me]] = model.read_sums().loss.nll;  // of all its batches
    add_round(model, 0, batches.size());
  }
  std::vector<Part> parts;
  for (size_t rank = 0; rank < ranks; ++rank)
    parts.push_back(part_of(std::span<double>(losses).subspan(begins[rank], begins[rank + 1] - begins[rank])));
  values_.all_gather(parts);
  for (size_t batch = 0; batch < batches.size(); ++batch) result.nll += losses[begins[batch % ranks] + batch / ranks];

  result.norm = std::sqrt(square_norm(model));
  result.finite = std::isfinite(result.nll) && std::isfinite(result.norm);
  if (!result.finite || result.count == 0) return result;
  optimizer_.update(model.exec(), model.trained(), sum_.data(), lr, clip_factor(result.norm, clip));
  if (ranks > 1) share_values(model.trained());
  return result;
}

// Each rank's part of `whole` on all.
template <class T>
template <class Value>
void DataParallel<T>::all_gather(Value* whole, const std::vector<ParamRange>& ranges) {
  std::vector<Part> parts;
  parts.reserve(ranges.size());
  for (const ParamRange& range : ranges)
    parts.push_back({whole + range.begin, static_cast<size_t>(range.size()) * sizeof(Value)});
  tensors_.all_gather(parts);
}

template <class T>
void DataParallel<T>::share_values(Params<W>& params) {
  const ParamValues<W> all = params.all_values();
  if (!params.split()) return all_gather(all.values, ranges_);
  all_gather(all.rounded, ranges_);
  all_gather(all.numbers, numbers_);
  incomplete_ = true;
}

template <class T>
void DataParallel<T>::complete(Params<W>& params) {
  if (incomplete_) all_gather(params.all_values().low, ranges_);
  incomplete_ = false;
}

// The ranks' parts in rank 0's `all`, through the host: rank 0's device has no room for them.
template <class T>
template <class Moment>
void DataParallel<T>::gather(const Buffer<Moment>& mine, Buffer<Moment>* all) {
  const auto ranks = static_cast<size_t>(values_.size());
  std::vector<ConstPart> send(ranks);
  std::vector<Part> receive(ranks);
  const HostView<Moment> view = mine.host(0, mine.size());
  send[0] = {view.span().data(), view.span().size_bytes()};
  for (size_t rank = 0; rank < ranks && all != nullptr; ++rank) {
    receive[rank] = {all->data() + ranges_[rank].begin, static_cast<size_t>(ranges_[rank].size()) * sizeof(Moment)};
  }
  values_.all_to_all(send, receive);
}

template <class T>
std::optional<BasicAdamW<T>> DataParallel<T>::whole(const Params<W>& params) {
  std::optional<BasicAdamW<T>> all;
  if (values_.rank() == 0) all.emplace(optimizer_.config(), params, whole_range(params), host_device());
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
