// The host's functions of ops.def, one operation a file. T is float or double, and parameters have the activations'
// type.
#pragma once

#include "ops/exec.h"

namespace fw::cpu {

#define W T
#define FW_OP_ARGS(...) __VA_ARGS__
#define FW_OP(name, args) \
  template <class T>      \
  void name(const Exec<T>&, FW_OP_ARGS args);
#include "ops/ops.def"
#undef FW_OP
#undef FW_OP_ARGS
#undef W

// A function of the list without its context: what a kernel of one instruction set takes.
template <class Function>
struct WithoutExec;
template <class Context, class... Args>
struct WithoutExec<void (*)(Context, Args...)> {
  using Type = void (*)(Args...);
};
template <auto function>
using Kernel = typename WithoutExec<decltype(function)>::Type;

}  // namespace fw::cpu
