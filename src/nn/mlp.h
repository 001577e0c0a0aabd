// SwiGLU MLP: y = (silu(x Wg^T) * (x Wu^T)) Wd^T. Wg and Wu are declared one after the other and run as one product.
#pragma once

#include <string>
#include <vector>

#include "nn/init.h"
#include "nn/mixer.h"

namespace fw {

struct MlpSpec {
  int64_t hidden = 0;  // d
  int64_t size = 0;    // m; 0: no MLP
  InitScheme init = InitScheme::kXavier;
};
// gate_proj [m, d], up_proj [m, d], down_proj [d, m], with `prefix` before the names; none for a size of 0.
std::vector<ParamSpec> mlp_parameters(const MlpSpec& spec, const std::string& prefix);

template <class T>
class Mlp {
 public:
  struct Context {
    Mat<T> gate_up;  // [T, 2 m]; backward turns it into its gradient
    Mat<T> act;      // [T, m]
  };

  Mlp(const MlpSpec& spec, const std::string& prefix, Params<Wide<T>>& params);
  // y [T, d] is overwritten; activations come from the arena.
  void forward(const Pass<T>& pass, Mat<const T> x, Mat<T> y, Context& context) const;
  // x as forward had it; dx [T, d] is overwritten; uses the context up.
  void backward(const Pass<T>& pass, Context& context, Mat<const T> x, Mat<const T> dy, Mat<T> dx) const;

 private:
  void project(const Pass<T>& pass, Mat<const T> x, Context& context) const;
  void activate(const Pass<T>& pass, Context& context) const;

  MlpSpec spec_;
  int gate_up_ = -1, down_ = -1;
};

}  // namespace fw
