// What scan_kernels_test.cu tries, and how its tensors lie in memory.
#pragma once

#include <algorithm>
#include <bit>
#include <string>
#include <vector>

#include "device_buffer.h"
#include "scan/cuda/kernels.h"
#include "test_numbers.h"

namespace fw::cuda {

using testing::from_bf16;
using testing::kNan;
using testing::to_bf16;
inline constexpr uint16_t kNan16 = 0x7fc0;

struct Case {
  std::string name;
  int key, K, V, HV;
  std::vector<int> lengths;
  bool packed, is_delta, bf16;
  bool out = true, save = true, prepared_z = false;
  bool state_bf16 = false, value_first = false, has_initial = true;
  int row_padding = 0;  // elements between rows of tokens
  bool has_d_o = true;
  // tiles.h: LoTiles, and what e (k) leaves out alongside it.
  bool hi_lo = false, keys_lo = false;
  // From raw rows of k and q (tiles.h: RowTiles), one head of them for `group` value heads; same_rows: all sequences
  // have the same ones, which TMA does not take.
  bool rows = false, same_rows = false, mixed = false;
  int group = 1;
  bool pairs = false;    // rows, with A, P and numbers in the place of chunk tiles: forward
  bool keys = false;     // QETiles, and XMTiles forward, Khat, A and P in reverse (not with rows)
  bool tma = true;       // TMA may be asked
  bool damaged = false;  // every second sequence has no numbers in its rows
};

// Numbers of a tensor as they lie in memory, read as double.
struct Tensor {
  bool bf16;
  std::vector<float> f;
  std::vector<uint16_t> h;
  Tensor(bool is_bf16, size_t n) : bf16(is_bf16), f(is_bf16 ? 0 : n, kNan), h(is_bf16 ? n : 0, kNan16) {}
  void set(size_t i, double x) { bf16 ? void(h[i] = to_bf16(x)) : void(f[i] = static_cast<float>(x)); }
  double at(size_t i) const { return bf16 ? from_bf16(h[i]) : f[i]; }
  bool same_bits(const Tensor& other) const {
    return h == other.h && std::equal(f.begin(), f.end(), other.f.begin(), [](float a, float b) {
             return std::bit_cast<uint32_t>(a) == std::bit_cast<uint32_t>(b);
           });
  }
};
struct DeviceTensor {
  DeviceBuffer<float> f;
  DeviceBuffer<uint16_t> h;
  bool bf16;
  explicit DeviceTensor(const Tensor& t) : f(t.f), h(t.h), bf16(t.bf16) {}
  void* data() { return bf16 ? static_cast<void*>(h.data()) : static_cast<void*>(f.data()); }
  Tensor download() const {
    Tensor t(bf16, 0);
    t.f = f.download();
    t.h = h.download();
    return t;
  }
};

struct Layout {
  const Case& c;
  int N, chunks = 0, tokens = 0, blocks, row;
  std::vector<int32_t> offsets{0}, chunk_base{0};
  explicit Layout(const Case& one)
      : c(one),
        N(static_cast<int>(one.lengths.size())),
        blocks((one.V + 63) / 64),
        row(one.HV * one.V + one.row_padding) {
    for (const int length : c.lengths) {
      tokens += length;
      chunks += (length + 63) / 64;
      offsets.push_back(tokens);
      chunk_base.push_back(chunks);
    }
  }
  size_t token_at(int n, int t, int hv, int v) const {
    return static_cast<size_t>(offsets[n] + t) * row + hv * c.V + v;
  }
  int key_row() const { return c.HV / c.group * c.K + c.row_padding; }
  size_t key_at(int n, int t, int hv, int k) const {
    return static_cast<size_t>((c.same_rows ? 0 : offsets[n]) + t) * key_row() + hv / c.group * c.K + k;
  }
  TokenArg key_arg(void* data) const {
    return {data,   c.packed || c.same_rows ? 0 : static_cast<int64_t>(c.lengths[0]) * key_row(), key_row(), c.K, 1,
            c.group};
  }
  size_t state_at(int n, int hv, int k, int v) const {
    return (static_cast<size_t>(n) * c.HV + hv) * c.K * c.V +
           (c.value_first ? static_cast<size_t>(v) * c.K + k : static_cast<size_t>(k) * c.V + v);
  }
  size_t tile(int n, int chunk, int hv, int block) const {
    return (static_cast<size_t>(chunk_base[n] + chunk) * c.HV + hv) * blocks + block;
  }
  size_t chunk_tile(int n, int chunk, int hv) const { return static_cast<size_t>(chunk_base[n] + chunk) * c.HV + hv; }
  TokenArg token_arg(void* data) const {
    return {data, c.packed ? 0 : static_cast<int64_t>(c.lengths[0]) * row, row, c.V, c.bf16 ? 1 : 0, 1};
  }
  // Of sequence n and those after it.
  StateArg state_arg(void* data, int n) const {
    const int64_t head = static_cast<int64_t>(c.K) * c.V, before = n * c.HV * head * (c.state_bf16 ? 2 : 4);
    return {static_cast<char*>(data) + before, c.HV * head,         head, c.value_first ? 1 : c.V,
            c.value_first ? c.K : 1,           c.state_bf16 ? 1 : 0};
  }
  SequenceArg sequence_arg(int32_t* device_offsets, int32_t* device_chunk_base) const {
    if (c.packed) return {device_offsets, device_chunk_base, N, 0, 0};
    return {nullptr, nullptr, N, c.lengths[0], (c.lengths[0] + 63) / 64};
  }
  TokenShape shape() const {
    if (!c.tma) return {};
    return {c.packed ? 1 : N, c.packed ? tokens : c.lengths[0]};
  }
  bool is_damaged(int n) const { return c.damaged && n % 2 == 1; }
  int rows(int n, int chunk) const { return std::min(64, c.lengths[n] - 64 * chunk); }
};

}  // namespace fw::cuda
