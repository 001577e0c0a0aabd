#include "reference/compare.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace fw {
namespace {

double norm(std::span<const double> x) {
  double square = 0;
  for (double y : x) square += y * y;
  return std::sqrt(square);
}

template <class Struct>
std::vector<FieldError> compare_fields(std::span<const ReferenceField<Struct>> fields, const Struct& got, const Struct& expected, double floor_share) {
  double square = 0;
  for (const auto& field : fields) square += std::pow(norm(expected.*field.values), 2);
  const double floor = floor_share * std::sqrt(square);
  std::vector<FieldError> errors;
  for (const auto& field : fields) {
    if ((expected.*field.values).empty()) continue;
    errors.push_back({field.name, relative_error(got.*field.values, expected.*field.values, floor)});
  }
  return errors;
}

}  // namespace

double relative_error(std::span<const double> got, std::span<const double> expected, double floor) {
  constexpr double kWrong = std::numeric_limits<double>::infinity();
  if (got.size() != expected.size()) return kWrong;
  double square = 0;
  bool equal = true;
  for (size_t i = 0; i < got.size(); ++i) {
    if (!std::isfinite(got[i]) || !std::isfinite(expected[i])) return kWrong;
    equal = equal && got[i] == expected[i];
    square += (got[i] - expected[i]) * (got[i] - expected[i]);
  }
  if (equal) return 0;
  const double scale = std::max(norm(expected), floor);
  return scale > 0 ? std::sqrt(square) / scale : kWrong;
}

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
