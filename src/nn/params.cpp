#include "nn/params.h"

#include <algorithm>

#include "base/error.h"
#include "nn/draw.h"

namespace fw {
namespace {

constexpr int64_t kAlignBytes = 64;
// Large enough that a task costs more than its start, small enough that two threads end together.
constexpr int64_t kPiece = 16384;

}  // namespace

int64_t ParamSpec::size() const {
  int64_t n = 1;
  for (int64_t s : shape) n *= s;
  return n;
}

template <class T>
int Params<T>::declare(ParamSpec spec) {
  if (device_ != nullptr) fail_internal("parameter '{}': declared after the parameters were allocated", spec.name);
  if (!names_.insert(spec.name).second) fail_internal("parameter '{}': declared twice", spec.name);
  constexpr int64_t kAlign = kAlignBytes / static_cast<int64_t>(sizeof(T));
  spec.offset = spec.continues ? extent_ : (extent_ + kAlign - 1) / kAlign * kAlign;
  size_ += spec.size();
  extent_ = spec.offset + spec.size();
  specs_.push_back(std::move(spec));
  return static_cast<int>(specs_.size()) - 1;
}

template <class T>
int Params<T>::find(std::string_view name) const {
  for (size_t i = 0; i < specs_.size(); ++i) {
    if (specs_[i].name == name) return static_cast<int>(i);
  }
  fail_internal("parameter '{}': not declared", name);
}

template <class T>
void Params<T>::allocate(Device& device) {
  device_ = &device;
  values_ = like();
  write_pieces();
}

template <class T>
void Params<T>::decay_all() {
  for (ParamSpec& spec : specs_) spec.weight_decay = true;
  if (device_ != nullptr) write_pieces();
}

template <class T>
void Params<T>::decay_matrices() {
  for (ParamSpec& spec : specs_) spec.weight_decay = spec.shape.size() > 1;
  if (device_ != nullptr) write_pieces();
}

template <class T>
void Params<T>::write_pieces() {
  std::vector<ParamPiece> pieces;
  for (const ParamSpec& spec : specs_) {
    for (int64_t begin = 0; begin < spec.size(); begin += kPiece) {
      pieces.push_back({spec.offset + begin, static_cast<int32_t>(std::min(kPiece, spec.size() - begin)), spec.weight_decay ? 1 : 0});
    }
  }
  pieces_ = Buffer<ParamPiece>(*device_, static_cast<int64_t>(pieces.size()));
  pieces_.write(0, pieces);
}

template <class T>
void Params<T>::init(Random& random) {
  if (device_ == nullptr) fail_internal("parameters: init() before allocate()");
  draw_parameters<T>(specs_, random, [this](const ParamSpec& spec, int64_t at, std::span<const T> values) {
    rounded_is_old_ = true;
    values_.write(spec.offset + at, values);
  });
}

template <class T>
void Params<T>::zero_grads() {
  if (grads_.size() == extent_) return grads_.zero();
  grads_ = like();
}

template <class T>
Bf16* Params<T>::old_rounded() {
  if (!rounded_is_old_) return nullptr;
  if (rounded_.size() != extent_) rounded_ = Buffer<Bf16>(*device_, extent_);
  rounded_is_old_ = false;
  return rounded_.data();
}

template <class T>
int Params<T>::checked(int first, int64_t count) const {
  size_t next = static_cast<size_t>(first);
  int64_t found = specs_[next].size();
  while (found < count && ++next < specs_.size() && specs_[next].continues) found += specs_[next].size();
  if (found < count)
    fail_internal("parameter '{}': {} values lie in a row from it on, a matrix of {} was asked for", specs_[static_cast<size_t>(first)].name, found, count);
  return first;
}

template class Params<float>;
template class Params<double>;

}  // namespace fw
