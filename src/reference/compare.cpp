#include "reference/compare.h"

#include <algorithm>
#include <cmath>

namespace fw {
namespace {

template <class Struct>
double norm_of_all(std::span<const ReferenceField<Struct>> fields, const Struct& expected) {
  double square = 0;
  for (const auto& field : fields) square += std::pow(euclidean_norm(expected.*field.values), 2);
  return std::sqrt(square);
}

template <class Struct>
std::vector<FieldError> compare_fields(std::span<const ReferenceField<Struct>> fields, const Struct& got,
                                       const Struct& expected, double floor_share) {
  const double floor = floor_share * norm_of_all(fields, expected);
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

std::vector<FieldError> compare_parameters(const ReferenceInputs& got, const ReferenceInputs& expected,
                                           double floor_share) {
  const double floor = floor_share * norm_of_all(reference_input_fields(), expected);
  std::vector<FieldError> errors;
  const auto compare_one = [&](const char* name, std::vector<double> ReferenceInputs::*values,
                               const std::vector<double>& terms) {
    if (!(expected.*values).empty())
      errors.push_back({name, relative_error(got.*values, expected.*values, std::max(euclidean_norm(terms), floor))});
  };
  compare_one("a_log", &ReferenceInputs::a_log, expected.g);
  compare_one("dt_bias", &ReferenceInputs::dt_bias, expected.g);
  compare_one("precond_a_log", &ReferenceInputs::precond_a_log, expected.precond_g);
  compare_one("precond_dt_bias", &ReferenceInputs::precond_dt_bias, expected.precond_g);
  return errors;
}

ReferenceInputs without_parameters(ReferenceInputs grads) {
  for (auto* values : {&grads.a_log, &grads.dt_bias, &grads.precond_a_log, &grads.precond_dt_bias}) values->clear();
  return grads;
}

FieldError worst(const std::vector<FieldError>& errors) {
  FieldError result{"none", 0};
  for (const FieldError& e : errors) {
    if (e.error > result.error) result = e;
  }
  return result;
}

}  // namespace fw
