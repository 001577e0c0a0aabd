// Conditions that are known when a kernel is launched, as constants that its template can take.
#pragma once

#include <type_traits>

namespace fw::cuda {

// body(constant...): for each condition std::true_type or std::false_type.
template <class Body>
void with_constants(const Body& body) {
  body();
}
template <class Body, class... Rest>
void with_constants(const Body& body, bool condition, Rest... rest) {
  condition ? with_constants([&](auto... others) { body(std::true_type(), others...); }, rest...)
            : with_constants([&](auto... others) { body(std::false_type(), others...); }, rest...);
}

}  // namespace fw::cuda
