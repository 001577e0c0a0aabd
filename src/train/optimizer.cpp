#include "train/optimizer.h"

#include <algorithm>
#include <cmath>
#include <type_traits>

#include "base/bf16.h"
#include "base/error.h"

namespace fw {

const char* name_of(MomentFormat format) { return format == MomentFormat::kBf16 ? "bf16" : "float32"; }

template <class W>
ParamRange whole_range(const Params<W>& params) {
  return {0, params.pieces().count, 0, params.extent()};
}
template ParamRange whole_range(const Params<float>&);
template ParamRange whole_range(const Params<double>&);

template <class T>
BasicAdamW<T>::BasicAdamW(const AdamWConfig& config, const Params<W>& params, const ParamRange& range, Device& moments)
    : config_(config), range_(range), device_(&moments) {
  begin_anew(config.moments);
  if (range.pieces == params.pieces().count || range.pieces == 0) return;
  std::vector<ParamPiece> mine = params.host_pieces();
  mine = {mine.begin() + range.first_piece, mine.begin() + range.first_piece + range.pieces};
  for (ParamPiece& piece : mine) piece.begin -= range.begin;
  pieces_ = Buffer<ParamPiece>(params.device(), range.pieces);
  pieces_.write(0, mine);
}

template <class T>
void BasicAdamW<T>::begin_anew(MomentFormat format) {
  if (format == MomentFormat::kBf16 && !std::is_same_v<W, float>)
    fail_internal("AdamW: expected moments in double, got bf16");
  config_.moments = format;
  for (Buffer<W>* moments : {&first_, &second_}) *moments = Buffer<W>();
  for (Buffer<Bf16>* moments : {&first_bf16_, &second_bf16_}) *moments = Buffer<Bf16>();
  if (format == MomentFormat::kFloat32) {
    first_ = Buffer<W>(*device_, range_.size());
    second_ = Buffer<W>(*device_, range_.size());
  } else {
    first_bf16_ = Buffer<Bf16>(*device_, range_.size());
    second_bf16_ = Buffer<Bf16>(*device_, range_.size());
  }
}

template <class T>
void BasicAdamW<T>::square_norm(const Exec<T>& exec, const Params<W>& params, double* sum) const {
  exec.square_sum(params.grads().data(), params.pieces(), sum);
}

template <class T>
ParamPieces BasicAdamW<T>::pieces(const Params<W>& params) const {
  return pieces_.size() > 0 ? ParamPieces{pieces_.data(), pieces_.size()} : params.pieces();
}

template <class T>
void BasicAdamW<T>::write_part(Buffer<W>& moments, Buffer<Bf16>& narrow, int64_t offset,
                               std::span<const W> values) const {
  const int64_t begin = std::max(offset, range_.begin),
                end = std::min(offset + static_cast<int64_t>(values.size()), range_.end);
  if (begin >= end) return;
  const std::span<const W> mine = values.subspan(static_cast<size_t>(begin - offset), static_cast<size_t>(end - begin));
  if (format() == MomentFormat::kFloat32) return moments.write(begin - range_.begin, mine);
  if constexpr (std::is_same_v<W, float>) {
    std::vector<Bf16> rounded(mine.size());
    round_to_bf16(static_cast<int64_t>(mine.size()), mine.data(), rounded.data());
    narrow.write(begin - range_.begin, rounded);
  }
}

template <class T>
void BasicAdamW<T>::update(const Exec<T>& exec, Params<W>& params, double lr, double grad_scale) {
  update(exec, params, params.grads().data() + range_.begin, lr, grad_scale);
}

template <class T>
void BasicAdamW<T>::update(const Exec<T>& exec, Params<W>& params, const W* grads, double lr, double grad_scale) {
  const double t = static_cast<double>(updates_ + 1);
  AdamWStep<W> step = {};
  step.beta1 = static_cast<W>(config_.beta1);
  step.one_minus_beta1 = static_cast<W>(1 - config_.beta1);
  step.beta2 = static_cast<W>(config_.beta2);
  step.one_minus_beta2 = static_cast<W>(1 - config_.beta2);
  step.eps = static_cast<W>(config_.eps);
  step.grad_scale = static_cast<W>(grad_scale);
  step.step = static_cast<W>(lr / (1 - std::pow(config_.beta1, t)));
  step.inv_sqrt_debias2 = static_cast<W>(1 / std::sqrt(1 - std::pow(config_.beta2, t)));
  step.decay = static_cast<W>(lr * config_.weight_decay);
  step.seed = config_.seed;
  step.update = static_cast<uint64_t>(updates_ + 1);
  step.first = static_cast<uint64_t>(range_.begin);
  if (range_.pieces > 0) {
    exec.adamw(step, pieces(params), grads, params.all_values(range_.begin),
               MomentValues<W>{first_.data(), second_.data(), first_bf16_.data(), second_bf16_.data()});
  }
  ++updates_;
}

template class BasicAdamW<float>;
template class BasicAdamW<double>;

double clip_factor(double norm, double clip) { return clip > 0 ? std::min(1.0, clip / (norm + 1e-6)) : 1.0; }

}  // namespace fw
