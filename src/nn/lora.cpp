#include "nn/lora.h"

#include <algorithm>
#include <cmath>
#include <map>

#include "base/threads.h"
#include "nn/init.h"

namespace fw {

double LoraConfig::scale() const {
  const auto n = static_cast<double>(rank);
  return alpha / (rank_stabilized ? std::sqrt(n) : n);
}

template <class W>
Lora<W>::Lora(std::vector<LoraTarget> targets, int64_t rank, double scale, const Params<W>& base)
    : targets_(std::move(targets)), scale_(scale), scale_there_(base.device(), 1) {
  for (const LoraTarget& target : targets_) {
    const double bound = 1.0 / std::sqrt(static_cast<double>(target.in));
    const int64_t matrices = std::max<int64_t>(target.experts, 1);
    params_.declare({target.module + ".lora_A.weight", {matrices * rank, target.in}, uniform_init(bound), true});
    params_.declare({target.module + ".lora_B.weight", {matrices * target.out, rank}, constant_init(0.0), true});
  }
  params_.allocate(base.device());
  const W value = static_cast<W>(scale);
  scale_there_.write(0, std::span<const W>(&value, 1));
}

// Of the rows of one part, as rows `row` on of a product.
template <class W>
LowRank<W> Lora<W>::low_rank(size_t target, const LoraTarget::Part& part, int64_t row, int64_t rows) {
  const int a = static_cast<int>(2 * target), b = a + 1;
  const std::vector<ParamSpec>& specs = params_.specs();
  const std::vector<int64_t>&of_a = specs[static_cast<size_t>(a)].shape, &of_b = specs[static_cast<size_t>(b)].shape;
  const int64_t rank = of_b[1];
  const auto rows_of = [&](auto m) {
    return m.data == nullptr ? decltype(m)(nullptr, rows, rank) : m.row_range(part.first, rows);
  };
  const Weight<W> whole = params_.weight(b, of_b[0], rank);
  LowRank<W> of;
  of.first = row;
  of.scale = scale_there_.data();
  of.a = params_.weight(a, of_a[0], of_a[1]);
  of.b = Weight<W>(rows_of(whole.values), rows_of(whole.rounded));
  if (params_.has_grads()) {
    of.da = params_.grad_matrix(a, of_a[0], of_a[1]);
    of.db = rows_of(params_.grad_matrix(b, of_b[0], rank));
  }
  return of;
}

template <class W>
void Lora<W>::attach(Params<W>& base) {
  if (targets_.empty()) return;
  const void *rounded = params_.weight(0, 0, 0).rounded.data,
             *grads = params_.has_grads() ? params_.grads().data() : nullptr;
  if (attached_ && rounded == attached_rounded_ && grads == attached_grads_) return;
  // Of every parameter, in order: the adapters of it and of those that lie right after it.
  const std::vector<ParamSpec>& specs = base.specs();
  std::map<int, std::pair<size_t, const LoraTarget::Part*>> target_of;
  for (size_t i = 0; i < targets_.size(); ++i) {
    for (const LoraTarget::Part& part : targets_[i].parts) target_of[part.parameter] = {i, &part};
  }
  for (size_t first = 0; first < specs.size(); ++first) {
    if (specs[first].stacked) {
      const auto found = target_of.find(static_cast<int>(first));
      if (found == target_of.end()) continue;
      const int64_t rows = specs[first].shape[0] * specs[first].shape[1];
      base.set_low_rank(static_cast<int>(first), {low_rank(found->second.first, *found->second.second, 0, rows)});
      continue;
    }
    if (specs[first].shape.size() != 2) continue;
    std::vector<LowRank<W>> additions;
    for (size_t next = first; next < specs.size() && (next == first || specs[next].continues); ++next) {
      const auto found = target_of.find(static_cast<int>(next));
      if (found == target_of.end()) continue;
      const int64_t row = (specs[next].offset - specs[first].offset) / specs[first].shape[1];
      additions.push_back(low_rank(found->second.first, *found->second.second, row, specs[next].shape[0]));
    }
    if (!additions.empty()) base.set_low_rank(static_cast<int>(first), std::move(additions));
  }
  attached_rounded_ = rounded;
  attached_grads_ = grads;
  attached_ = true;
}

template <class W>
void Lora<W>::merge_into(Params<W>& base) const {
  for (size_t i = 0; i < targets_.size(); ++i) {
    const ParamSpec &a_spec = params_.specs()[2 * i], &b_spec = params_.specs()[2 * i + 1];
    const HostView<W> a = params_.host_values(a_spec), b = params_.host_values(b_spec);
    const int64_t rank = b_spec.shape[1], in = a_spec.shape[1];
    for (const LoraTarget::Part& part : targets_[i].parts) {
      const ParamSpec& spec = base.specs()[static_cast<size_t>(part.parameter)];
      const HostView<W> before = base.host_values(spec);
      std::vector<W> values(before.span().begin(), before.span().end());
      parallel_for(spec.size() / in, [&](int64_t row) {
        const W* factors = a.span().data() + (spec.stacked ? row / targets_[i].out * rank * in : 0);
        std::vector<double> sums(static_cast<size_t>(in));
        for (int64_t r = 0; r < rank; ++r) {
          const double factor = static_cast<double>(b.span()[static_cast<size_t>((part.first + row) * rank + r)]);
          const W* from = factors + r * in;
          for (int64_t c = 0; c < in; ++c) sums[static_cast<size_t>(c)] += factor * static_cast<double>(from[c]);
        }
        W* to = values.data() + row * in;
        for (int64_t c = 0; c < in; ++c)
          to[c] = static_cast<W>(static_cast<double>(to[c]) + scale_ * sums[static_cast<size_t>(c)]);
      });
      base.write_values(spec, values);
    }
  }
}

template class Lora<float>;
template class Lora<double>;

}  // namespace fw
