// ProductRecord: the matrix products of passes on the CUDA device, and how long they take alone. A step's time is
// compared with that (docs/performance.md), since a GPU at its power cap is faster or slower by what it is given, and
// by the card.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "base/device.h"

namespace fw {

// While one lives and listens, every product that is queued for the CUDA device is noted, in order. Not those of up to
// 64 rows by kernels of this library's own (ops/cuda/gemm_m8.h, gemm_m64.h).
class ProductRecord {
 public:
  ProductRecord();  // Error(kInternal) where there is one already
  ~ProductRecord();
  ProductRecord(const ProductRecord&) = delete;
  ProductRecord& operator=(const ProductRecord&) = delete;

  void stop();  // listening
  int64_t count() const;
  double flops() const;  // 2 m n k of each

  // Seconds of the same products, of each of `repeats` runs after a first, one after the other in the order in which
  // they were noted. A product has the shape, strides and alignment that were noted, on random numbers in memory of its
  // own. The largest operands are there twice, and none stays in the caches for the next. Stops listening.
  std::vector<double> seconds_alone(Device& device, int repeats);

 private:
  struct List;
  std::unique_ptr<List> list_;
};

}  // namespace fw
