// A build without CUDA: no product is queued for such a device, so none is noted.
#include "ops/product_record.h"

namespace fw {

struct ProductRecord::List {};

ProductRecord::ProductRecord() = default;
ProductRecord::~ProductRecord() = default;
void ProductRecord::stop() {}
int64_t ProductRecord::count() const { return 0; }
double ProductRecord::flops() const { return 0; }
std::vector<double> ProductRecord::seconds_alone(Device&, int repeats) {
  return std::vector<double>(static_cast<size_t>(repeats));
}

}  // namespace fw
