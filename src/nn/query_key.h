// What q and k pass between the convolution and the recurrence, head by head: a feature map, then rotary position
// embedding. k is absent (no data) where a rule takes none.
// Most models have neither; then q and k go through untouched and nothing is allocated.
#pragma once

#include <string>
#include <vector>

#include "nn/init.h"
#include "nn/mixer.h"

namespace fw {

struct QueryKeySpec {
  int64_t heads = 0;    // H
  int64_t key_dim = 0;  // K
  FeatureMap map = FeatureMap::kNone;
  double rope_theta = 0;  // 0: no rotation; else K is even
  InitScheme init = InitScheme::kXavier;
};
// kProduct: feature_map_{q,k}.layer{1,2}.{weight [K, K], bias [K]}, shared by the heads; else none. A side's four are
// declared in a row.
std::vector<ParamSpec> query_key_parameters(const QueryKeySpec& spec, const std::string& prefix);

template <class T>
class QueryKey {
 public:
  struct Side {
    Mat<const T> in;  // [T H, K] (kProduct, a copy) or [T, H K]: before the map
    Mat<T> one, two;  // [T H, K]: the two affine maps of kProduct
  };
  struct Context {
    Side q, k;
  };

  // q_first, k_first: index of each side's first parameter, -1 where there are none.
  QueryKey(const QueryKeySpec& spec, int q_first, int k_first) : spec_(spec), q_first_(q_first), k_first_(k_first) {}
  // q, k [T, H K] become what the recurrence takes: memory of the arena, or the same memory (the rotation runs in
  // place).
  void forward(const Pass<T>& pass, Mat<T>& q, Mat<T>& k, Context& context) const;
  // Where the recurrence is to write its gradient: memory of the arena, or `din` itself where there is no map.
  Mat<T> gradient(const Pass<T>& pass, Mat<T> din) const;
  // dq, dk as gradient() gave them, used up; dq_in, dk_in [T, H K] are overwritten. Gradients of parameters accumulate.
  void backward(const Pass<T>& pass, const Context& context, Mat<T> dq, Mat<T> dk, Mat<T> dq_in, Mat<T> dk_in) const;

 private:
  Mat<T> map_forward(const Pass<T>& pass, Mat<T> x, int first, Side& side) const;
  void map_backward(const Pass<T>& pass, const Side& side, int first, Mat<T> dy, Mat<T> dx) const;

  QueryKeySpec spec_;
  int q_first_, k_first_;  // layer1.weight, then layer1.bias, layer2.weight, layer2.bias
};

}  // namespace fw
