// The host's table.
#include "ops/cpu/operations.h"

namespace fw {

template <class T>
const Ops<T>& host_ops() {
  static constexpr Ops<T> kTable = [] {
    Ops<T> ops;
#define FW_OP(name, args) ops.name = &cpu::name<T>;
#include "ops/ops.def"
#undef FW_OP
    return ops;
  }();
  return kTable;
}

template const Ops<float>& host_ops<float>();
template const Ops<double>& host_ops<double>();

}  // namespace fw
