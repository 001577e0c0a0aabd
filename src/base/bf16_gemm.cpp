// oneDNN's bf16 matrix product. Making a primitive costs far more than running a small one, so each thread keeps those
// it has used, with the memory objects they run on; a key has everything the primitive depends on.
#include "base/bf16_gemm.h"

#include <algorithm>
#include <array>
#include <map>
#include <oneapi/dnnl/dnnl.hpp>

#include "base/bf16_check.h"
#include "base/error.h"
#include "base/threads.h"

namespace fw {
namespace {

using dnnl::matmul;
using dnnl::memory;

constexpr size_t kMaxCached = 1024;  // primitives; row counts vary without end in an engine that serves prompts
constexpr int64_t kPackRows = 256;   // rows for which the layout of a packed operand is chosen

const dnnl::engine& engine() {
  static const dnnl::engine instance(dnnl::engine::kind::cpu, 0);
  return instance;
}

dnnl::stream& stream() {
  thread_local dnnl::stream instance(engine());
  return instance;
}

memory::desc plain(int64_t rows, int64_t cols, memory::data_type type, Trans trans, int64_t ld) {
  return {memory::dims{rows, cols}, type, trans == Trans::kNo ? memory::dims{ld, 1} : memory::dims{1, ld}};
}

matmul::primitive_desc describe(const memory::desc& a, const memory::desc& b, const memory::desc& c, bool accumulate) {
  dnnl::primitive_attr attr;
  attr.set_scratchpad_mode(dnnl::scratchpad_mode::user);
  if (accumulate) {
    dnnl::post_ops ops;
    ops.append_sum(1.0F);
    attr.set_post_ops(ops);
  }
  return {matmul::desc(a, b, c), attr, engine()};
}

memory::desc packed_desc(int64_t n, int64_t k) {
  const memory::desc any(memory::dims{k, n}, memory::data_type::bf16, memory::format_tag::any);
  const memory::desc a = plain(kPackRows, k, memory::data_type::bf16, Trans::kNo, k);
  const memory::desc c = plain(kPackRows, n, memory::data_type::f32, Trans::kNo, n);
  return describe(a, any, c, false).weights_desc();
}

// One product, ready to run.
struct Product {
  matmul primitive;
  memory a, b, c, scratchpad;
  size_t scratchpad_bytes = 0;

  Product(const memory::desc& a_desc, const memory::desc& b_desc, const memory::desc& c_desc, bool accumulate) {
    const matmul::primitive_desc desc = describe(a_desc, b_desc, c_desc, accumulate);
    primitive = matmul(desc);
    a = memory(a_desc, engine(), nullptr);
    b = memory(b_desc, engine(), nullptr);
    c = memory(c_desc, engine(), nullptr);
    scratchpad = memory(desc.scratchpad_desc(), engine(), nullptr);
    scratchpad_bytes = desc.scratchpad_desc().get_size();
  }

  void run(const void* a_data, const void* b_data, float* c_data) {
    LocalScratch scratch;
    // oneDNN takes operands it only reads as plain pointers too.
    a.set_data_handle(const_cast<void*>(a_data));
    b.set_data_handle(const_cast<void*>(b_data));
    c.set_data_handle(c_data);
    scratchpad.set_data_handle(scratch.alloc<std::byte>(static_cast<int64_t>(scratchpad_bytes)));
    primitive.execute(stream(),
                      {{DNNL_ARG_SRC, a}, {DNNL_ARG_WEIGHTS, b}, {DNNL_ARG_DST, c}, {DNNL_ARG_SCRATCHPAD, scratchpad}});
    stream().wait();
  }
};

enum Form : int64_t { kPlain, kPacked };
using ProductKey = std::array<int64_t, 10>;  // form, transpositions, accumulate, m, n, k, three leading dimensions

template <class Make>
Product& cached(const ProductKey& key, const Make& make) {
  thread_local std::map<ProductKey, Product> products;
  auto found = products.find(key);
  if (found == products.end()) {
    if (products.size() >= kMaxCached) products.clear();
    found = products.emplace(key, make()).first;
  }
  return found->second;
}

// Turns oneDNN's exceptions into ours.
template <class Run>
void guarded(int64_t m, int64_t n, int64_t k, const Run& run) {
  try {
    run();
  } catch (const dnnl::error& e) {
    fail_internal("oneDNN bf16 product {}x{}x{}: {} (status {})", m, n, k, e.what(), static_cast<int>(e.status));
  }
}

void bf16_gemm_through_packing(Trans ta, Trans tb, int64_t m, int64_t n, int64_t k, const Bf16* a, int64_t lda,
                               const Bf16* b, int64_t ldb, bool accumulate, float* c, int64_t ldc) {
  // packed products have no such form
  if (ta != Trans::kNo) return bf16_gemm(ta, tb, m, n, k, a, lda, b, ldb, accumulate, c, ldc);
  LocalScratch scratch;
  bf16_gemm_packed(m, a, lda, pack_bf16(tb, n, k, b, ldb, scratch), accumulate, c, ldc);
}

}  // namespace

bool bf16_products_exist() {
  try {
    describe(plain(16, 16, memory::data_type::bf16, Trans::kNo, 16),
             plain(16, 16, memory::data_type::bf16, Trans::kYes, 16),
             plain(16, 16, memory::data_type::f32, Trans::kNo, 16), true);
    return true;
  } catch (const dnnl::error&) {
    return false;
  }
}

bool bf16_products_supported() {
  static const bool supported = bf16_products_exist() && bf16_products_are_right(bf16_gemm, bf16_gemm_through_packing);
  return supported;
}

Bf16Packed pack_bf16(Trans tb, int64_t n, int64_t k, const Bf16* b, int64_t ldb, LocalScratch& scratch) {
  Bf16Packed packed{nullptr, n, k};
  guarded(0, n, k, [&] {
    const memory::desc to_desc = packed_desc(n, k);
    void* data = scratch.alloc<std::byte>(static_cast<int64_t>(to_desc.get_size()));
    // One thread: waking others costs more than the copy, and the copy is the same.
    parallel_for(1, [&](int64_t) {
      memory from(plain(k, n, memory::data_type::bf16, tb, ldb), engine(), const_cast<Bf16*>(b));
      memory to(to_desc, engine(), data);
      dnnl::reorder(from, to).execute(stream(), from, to);
      stream().wait();
    });
    packed.data = data;
  });
  return packed;
}

void bf16_gemm_packed(int64_t m, const Bf16* a, int64_t lda, const Bf16Packed& b, bool accumulate, float* c,
                      int64_t ldc) {
  // oneDNN 2.6 falls back to its reference code (a thousand times slower) when packed operands meet a C with gaps
  // between its rows: such a C is made dense and copied.
  if (ldc != b.n) {
    LocalScratch scratch;
    float* dense = scratch.alloc<float>(m * b.n);
    bf16_gemm_packed(m, a, lda, b, false, dense, b.n);
    for (int64_t i = 0; i < m; ++i) {
      const float* from = dense + i * b.n;
      float* to = c + i * ldc;
      if (accumulate) {
        for (int64_t j = 0; j < b.n; ++j) to[j] += from[j];
      } else {
        std::copy_n(from, b.n, to);
      }
    }
    return;
  }
  guarded(m, b.n, b.k, [&] {
    Product& product = cached({kPacked, 0, 0, accumulate, m, b.n, b.k, lda, 0, ldc}, [&] {
      return Product(plain(m, b.k, memory::data_type::bf16, Trans::kNo, lda), packed_desc(b.n, b.k),
                     plain(m, b.n, memory::data_type::f32, Trans::kNo, ldc), accumulate);
    });
    product.run(a, b.data, c);
  });
}

void bf16_gemm(Trans ta, Trans tb, int64_t m, int64_t n, int64_t k, const Bf16* a, int64_t lda, const Bf16* b,
               int64_t ldb, bool accumulate, float* c, int64_t ldc) {
  guarded(m, n, k, [&] {
    Product& product = cached({kPlain, ta == Trans::kYes, tb == Trans::kYes, accumulate, m, n, k, lda, ldb, ldc}, [&] {
      return Product(plain(m, k, memory::data_type::bf16, ta, lda), plain(k, n, memory::data_type::bf16, tb, ldb),
                     plain(m, n, memory::data_type::f32, Trans::kNo, ldc), accumulate);
    });
    product.run(a, b, c);
  });
}

}  // namespace fw
