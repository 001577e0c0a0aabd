#include "analyze/replay.h"

#include <algorithm>

namespace fw {
namespace {

// y += a x
void add(int64_t n, double a, const double* __restrict x, double* __restrict y) {
  for (int64_t j = 0; j < n; ++j) y[j] += a * x[j];
}

}  // namespace

HeadReplay::HeadReplay(int64_t K, int64_t V) : K_(K), V_(V), s_(static_cast<size_t>(K * V)) {
  for (std::vector<double>* x : {&reads_.o, &reads_.key_read, &reads_.prior_key, &reads_.prior_query, &reads_.erased,
                                 &reads_.left, &reads_.fed, &reads_.u})
    x->resize(static_cast<size_t>(V));
}

template <class T>
void HeadReplay::start(const T* state) {
  for (size_t i = 0; i < s_.size(); ++i) s_[i] = state != nullptr ? static_cast<double>(state[i]) : 0.0;
}

void HeadReplay::step(const HeadStreams& x, int64_t i) {
  for (std::vector<double>* y :
       {&reads_.o, &reads_.key_read, &reads_.prior_key, &reads_.prior_query, &reads_.erased, &reads_.left, &reads_.fed})
    std::fill(y->begin(), y->end(), 0.0);
  const int64_t at = i * K_;
  for (int64_t j = 0; j < K_; ++j) {
    double* row = s_.data() + j * V_;
    const auto look_up = [&] {
      if (!x.e.empty()) add(V_, x.e[static_cast<size_t>(at + j)], row, reads_.erased.data());
      if (!x.f.empty()) add(V_, x.f[static_cast<size_t>(at + j)], row, reads_.fed.data());
    };
    add(V_, x.k[static_cast<size_t>(at + j)], row, reads_.prior_key.data());
    add(V_, x.q[static_cast<size_t>(at + j)], row, reads_.prior_query.data());
    if (x.erases_before_decay) look_up();
    if (!x.decay.empty()) {
      const double alpha = x.decay[static_cast<size_t>(at + j)];
      for (int64_t c = 0; c < V_; ++c) row[c] *= alpha;
    }
    if (!x.erases_before_decay) look_up();
  }
  const double* z = x.z.data() + i * V_;
  for (int64_t c = 0; c < V_; ++c) reads_.u[static_cast<size_t>(c)] = z[c] - reads_.erased[static_cast<size_t>(c)];
  for (int64_t j = 0; j < K_; ++j) {
    double* row = s_.data() + j * V_;
    if (x.taken.empty()) {
      add(V_, x.w[static_cast<size_t>(at + j)], reads_.u.data(), row);
    } else {
      add(V_, x.w[static_cast<size_t>(at + j)], z, row);
      add(V_, -x.taken[static_cast<size_t>(at + j)], reads_.erased.data(), row);
    }
    add(V_, x.r[static_cast<size_t>(at + j)], row, reads_.o.data());
    add(V_, x.k[static_cast<size_t>(at + j)], row, reads_.key_read.data());
    if (!x.e.empty()) add(V_, x.e[static_cast<size_t>(at + j)], row, reads_.left.data());
  }
}

template void HeadReplay::start<float>(const float*);
template void HeadReplay::start<double>(const double*);

}  // namespace fw
