#include "nn/params.h"

#include <algorithm>

#include "base/error.h"

namespace fw {

int64_t ParamSpec::size() const {
  int64_t n = 1;
  for (int64_t s : shape) n *= s;
  return n;
}

template <class T>
int Params<T>::declare(ParamSpec spec) {
  if (allocated_) fail_internal("parameter '{}': declared after the parameters were allocated", spec.name);
  if (!names_.insert(spec.name).second) fail_internal("parameter '{}': declared twice", spec.name);
  spec.offset = total_;
  total_ += spec.size();
  specs_.push_back(std::move(spec));
  return static_cast<int>(specs_.size()) - 1;
}

template <class T>
void Params<T>::allocate() {
  values_.assign(static_cast<size_t>(total_), T(0));
  allocated_ = true;
}

template <class T>
void Params<T>::init(Random& random) {
  if (!allocated_) fail_internal("parameters: init() before allocate()");
  std::vector<double> buffer;
  for (size_t i = 0; i < specs_.size(); ++i) {
    const ParamSpec& spec = specs_[i];
    buffer.assign(static_cast<size_t>(spec.size()), 0.0);
    spec.init(buffer, random);
    std::transform(buffer.begin(), buffer.end(), value(static_cast<int>(i)), [](double x) { return static_cast<T>(x); });
  }
}

template <class T>
void Params<T>::zero_grads() {
  grads_.assign(static_cast<size_t>(total_), T(0));
}

template class Params<float>;
template class Params<double>;

}  // namespace fw
