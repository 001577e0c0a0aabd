#include "reference/compare.h"

#include <cmath>

namespace fw {
namespace {

template <class Struct>
std::vector<FieldError> compare_fields(std::span<const ReferenceField<Struct>> fields, const Struct& got, const Struct& expected, double floor_share) {
  double square = 0;
  for (const auto& field : fields) square += std::pow(euclidean_norm(expected.*field.values), 2);
  const double floor = floor_share * std::sqrt(square);
  std::vector<FieldError> errors;
  for (const auto& field : fields) {
    if ((expected.*field.values).empty()) continue;
    errors.push_back({field.name, relative_error(got.*field.values, expected.*field.values, floor)});
  }
  return errors;
}

}  // namespace

std::vector<FieldError> compare(const ReferenceOutputs& got, const ReferenceOutputs& expected, double floor_share) {
  return compare_fields(reference_output_fields(), got, expected, floor_share);
}

std::vector<FieldError> compare(const ReferenceInputs& got, const ReferenceInputs& expected, double floor_share) {
  return compare_fields(reference_input_fields(), got, expected, floor_share);
}

FieldError worst(const std::vector<FieldError>& errors) {
  FieldError result{"none", 0};
  for (const FieldError& e : errors) {
    if (e.error > result.error) result = e;
  }
  return result;
}

}  // namespace fw
