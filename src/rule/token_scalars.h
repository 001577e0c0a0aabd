// The numbers of a token and value head (FW_TOKEN_SCALAR of tokens.def) without naming one: structs with a field each,
// and how a rule's are loaded and their gradients stored. Kernels of the CPU and the device use it alike; a struct has
// fields of the tensors' names where a function takes it.
#pragma once

#include <cstddef>
#include <cstdint>

#include "rule/axes.h"

#if defined(__CUDACC__)
#define FW_HOST_DEVICE __host__ __device__
// Of a template whose argument may be a function of the device alone.
#define FW_CALLS_EITHER _Pragma("nv_exec_check_disable")
#else
#define FW_HOST_DEVICE
#define FW_CALLS_EITHER
#endif

namespace fw {

// One X for each number.
template <class X>
struct TokenScalars {
#define FW_TOKEN_SCALAR(name, neutral, used) X name{};
#include "rule/tokens.def"
};

inline constexpr TokenScalars<const char*> kTokenScalarNames = {
#define FW_TOKEN_SCALAR(name, neutral, used) #name,
#include "rule/tokens.def"
};

#define FW_TOKEN_SCALAR(name, neutral, used) +1
inline constexpr int kTokenScalars = 0
#include "rule/tokens.def"
    ;

// Whether a call of for_each_scalar() and the like passes over beta, where that is loaded and stored by other threads.
enum class Numbers { kAll, kExceptBeta };

namespace scalars_detail {
enum class Name {
#define FW_TOKEN_SCALAR(name, neutral, used) name,
#include "rule/tokens.def"
};
template <Numbers kWhich>
constexpr bool taken(Name name) {
  return kWhich == Numbers::kAll || name != Name::beta;
}
}  // namespace scalars_detail

// Whether a rule takes one besides beta: then streams depend on more than norms, beta and the gates of e and z.
constexpr bool takes_other_scalars([[maybe_unused]] const Rule& r) {
  bool others = false;
#define FW_TOKEN_SCALAR(name, neutral, used) \
  if constexpr (scalars_detail::taken<Numbers::kExceptBeta>(scalars_detail::Name::name)) others = others || (used);
#include "rule/tokens.def"
  return others;
}

// body(x.name...) of each number that the rule takes.
FW_CALLS_EITHER
template <Numbers kWhich = Numbers::kAll, class Body, class... X>
FW_HOST_DEVICE inline void for_each_scalar(const Rule& r, Body&& body, X&&... x) {
#define FW_TOKEN_SCALAR(name, neutral, used)                                 \
  if constexpr (scalars_detail::taken<kWhich>(scalars_detail::Name::name)) { \
    if (used) body(x.name...);                                               \
  }
#include "rule/tokens.def"
}

// The same of every number, whether a rule takes it or not.
FW_CALLS_EITHER
template <Numbers kWhich = Numbers::kAll, class Body, class... X>
FW_HOST_DEVICE inline void for_all_scalars(Body&& body, X&&... x) {
#define FW_TOKEN_SCALAR(name, neutral, used) \
  if constexpr (scalars_detail::taken<kWhich>(scalars_detail::Name::name)) body(x.name...);
#include "rule/tokens.def"
}

}  // namespace fw
