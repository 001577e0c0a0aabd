#include "ops/product_record.h"

#include <algorithm>
#include <chrono>

#include "base/bf16.h"
#include "base/buffer.h"
#include "base/error.h"
#include "base/random.h"
#include "ops/cuda/products.h"

namespace fw {
namespace {

std::vector<cuda::Product>* listening = nullptr;  // models are run by one thread

constexpr size_t kAlign = 256;  // bytes; more is not looked at when an algorithm is chosen

size_t bytes_of(int64_t rows, int64_t cols, int64_t stride, fw_dtype dtype) {
  return static_cast<size_t>((rows - 1) * stride + cols) * (dtype == FW_BF16 ? 2 : 4);
}
size_t a_bytes(const cuda::Product& p) {
  return bytes_of(p.a_transposed ? p.k : p.m, p.a_transposed ? p.m : p.k, p.a_stride, p.operands);
}
size_t b_bytes(const cuda::Product& p) {
  return bytes_of(p.b_transposed ? p.n : p.k, p.b_transposed ? p.k : p.n, p.b_stride, p.operands);
}
size_t c_bytes(const cuda::Product& p) { return bytes_of(p.m, p.n, p.c_stride, p.result); }
bool adds_another(const cuda::Product& p) { return p.addend != nullptr && p.addend != p.c; }

// The next offset for so many bytes in a pool, aligned as `like` is.
size_t next_offset(size_t& used, size_t pool, size_t bytes, const void* like) {
  size_t at = (used + kAlign - 1) / kAlign * kAlign + reinterpret_cast<uintptr_t>(like) % kAlign;
  if (at + bytes > pool) at = reinterpret_cast<uintptr_t>(like) % kAlign;
  used = at + bytes;
  return at;
}

}  // namespace

namespace cuda {

void note_product(const Product& product) {
  if (listening != nullptr) listening->push_back(product);
}

}  // namespace cuda

struct ProductRecord::List {
  std::vector<cuda::Product> products;
};

ProductRecord::ProductRecord() : list_(std::make_unique<List>()) {
  if (listening != nullptr) fail_internal("products: expected one record at a time");
  listening = &list_->products;
}
ProductRecord::~ProductRecord() { stop(); }
void ProductRecord::stop() {
  if (listening == &list_->products) listening = nullptr;
}

int64_t ProductRecord::count() const { return static_cast<int64_t>(list_->products.size()); }

double ProductRecord::flops() const {
  double sum = 0;
  for (const cuda::Product& p : list_->products)
    sum += 2.0 * static_cast<double>(p.m) * static_cast<double>(p.n) * static_cast<double>(p.k);
  return sum;
}

std::vector<double> ProductRecord::seconds_alone(Device& device, int repeats) {
  stop();
  size_t operand = 0, result = 0, addend = 0;
  for (const cuda::Product& p : list_->products) {
    operand = std::max({operand, a_bytes(p), b_bytes(p)});
    result = std::max(result, c_bytes(p));
    if (adds_another(p)) addend = std::max(addend, bytes_of(p.m, p.n, p.addend_stride, p.result));
  }
  const size_t pool = std::max<size_t>(2 * operand + 4 * kAlign, size_t{128} << 20);
  Buffer<Bf16> operands(device, static_cast<int64_t>(pool / sizeof(Bf16)));
  Buffer<std::byte> results(device, static_cast<int64_t>(result + kAlign)),
      addends(device, static_cast<int64_t>(addend + kAlign));
  // Random numbers, since zeros take less power; one block of them again and again. As floats they are numbers of about
  // the same size.
  std::vector<Bf16> block(size_t{1} << 20);
  Random random(11);
  for (Bf16& x : block) {
    const auto value = static_cast<float>(random.normal());
    round_to_bf16(1, &value, &x);
  }
  for (int64_t at = 0; at < operands.size(); at += static_cast<int64_t>(block.size()))
    operands.write(
        at, std::span<const Bf16>(block).first(std::min(block.size(), static_cast<size_t>(operands.size() - at))));

  std::vector<cuda::Product> moved = list_->products;
  auto* const base = reinterpret_cast<std::byte*>(operands.data());
  size_t used = 0;
  for (cuda::Product& p : moved) {
    const size_t a = a_bytes(p), b = b_bytes(p);
    p.a = base + next_offset(used, pool, a, p.a);
    p.b = base + next_offset(used, pool, b, p.b);
    const bool another = adds_another(p);
    p.c = results.data() + reinterpret_cast<uintptr_t>(p.c) % kAlign;
    if (p.addend != nullptr) p.addend = another ? addends.data() + reinterpret_cast<uintptr_t>(p.addend) % kAlign : p.c;
  }
  std::vector<double> seconds;
  for (int i = 0; i <= repeats; ++i) {
    device.synchronise();
    const auto start = std::chrono::steady_clock::now();
    for (const cuda::Product& p : moved) cuda::multiply(p, device.stream());
    device.synchronise();
    if (i > 0) seconds.push_back(std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
  }
  return seconds;
}

}  // namespace fw
