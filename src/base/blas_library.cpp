#include "base/blas_library.h"

#include <dlfcn.h>

#include <algorithm>
#include <cstdlib>
#include <mutex>
#include <optional>
#include <thread>

#if !defined(FW_STD_THREADS)
#include <omp.h>
#endif

#include "base/error.h"
#include "base/memory.h"

namespace fw {
namespace {

constexpr const char* kName = "libopenblas.so.0";

// As OpenBLAS reads them, in its order.
int threads_of_library() {
  for (const char* name : {"OPENBLAS_NUM_THREADS", "GOTO_NUM_THREADS", "OMP_NUM_THREADS"}) {
    const char* text = std::getenv(name);
    const int number = text != nullptr ? std::atoi(text) : 0;
    if (number > 0) return number;
  }
  return std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
}

void require_address_space() {
  const std::optional<uint64_t> left = available_address_space();
  const int threads = threads_of_library();
  const uint64_t needed = blas_address_space(threads);
  if (!left || *left >= needed) return;
  fail_usage(
      "OpenBLAS, which computes in double, takes {} MB of address space with {} threads, and the limit of address "
      "space (ulimit -v) leaves {} MB: raise it, or "
      "set OPENBLAS_NUM_THREADS=1 ({} MB)",
      needed >> 20, threads, *left >> 20, blas_address_space(1) >> 20);
}

template <class Function>
void find(void* library, const char* name, Function& function) {
  function = reinterpret_cast<Function>(::dlsym(library, name));
  if (function == nullptr)
    fail_usage(
        "{}: expected a function {}, found none: install Debian's libopenblas0-openmp or another build of OpenBLAS",
        kName, name);
}

BlasLibrary open() {
  require_address_space();
  void* const library = ::dlopen(kName, RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    const char* reason = ::dlerror();
    fail_usage(
        "cannot open {}, which computes in double: {}; install Debian's libopenblas0-openmp or another build of "
        "OpenBLAS",
        kName, reason != nullptr ? reason : "no reason given");
  }
  BlasLibrary blas;
  find(library, "cblas_dgemm", blas.dgemm);
  find(library, "dgesvd_", blas.dgesvd);
  find(library, "dposv_", blas.dposv);
  find(library, "dsyev_", blas.dsyev);
  // It must not open threads of its own, whichever of its builds the system has. The OpenMP build passes the number on
  // to OpenMP for the calling thread, so that is put back.
  void (*set_threads)(int) = nullptr;
  find(library, "openblas_set_num_threads", set_threads);
#if !defined(FW_STD_THREADS)
  const int threads = omp_get_max_threads();
#endif
  set_threads(1);
#if !defined(FW_STD_THREADS)
  omp_set_num_threads(threads);
#endif
  return blas;
}

}  // namespace

// Measured with Debian's OpenBLAS 0.3.21: 40 MB of code and 131 MB of buffers a thread.
uint64_t blas_address_space(int threads) {
  constexpr uint64_t kMegabyte = uint64_t{1} << 20;
  return (64 + 136 * static_cast<uint64_t>(std::max(1, threads))) * kMegabyte;
}

const BlasLibrary& blas_library() {
  static const BlasLibrary blas = open();  // what throws is tried again by the next call
  return blas;
}

}  // namespace fw
