// Conditions that are known when a kernel is launched, as constants that its template can take.
#pragma once

#include <type_traits>

namespace fw::cuda {

// body(constant...): for each condition std::true_type or std::false_type.
template <class Body>
void with_constants(const Body& body) {
  body();
}
template <class Body, class... Conditions>
void with_constants(const Body& body, bool condition, Conditions... others) {
  condition ? with_constants([&](auto... constants) { body(std::true_type(), constants...); }, others...)
            : with_constants([&](auto... constants) { body(std::false_type(), constants...); }, others...);
}

}  // namespace fw::cuda
