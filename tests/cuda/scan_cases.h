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
  bool pairs = false;    // rows, with A, P and numbers in place of chunk tiles: forward
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

inline std::vector<Case> cases() {
  const std::vector<int> packed = {0, 130, 64, 0, 1, 63, 320, 0};
  std::vector<Case> all;
  for (const bool is_delta : {true, false}) {
    for (const int key : {128, 64}) {
      const std::string prefix = (is_delta ? "delta " : "additive ") + std::to_string(key) + " ";
      Case base{prefix, key, key, 128, 2, {130}, false, is_delta, true};
      const auto add = [&](const std::string& name, auto change) {
        Case c = base;
        c.name += name;
        change(c);
        all.push_back(c);
      };
      add("one chunk", [](Case& c) { c.lengths = {64}; });
      add("batch, 3 chunks", [](Case& c) { c.lengths = {130, 130}; });
      add("no tokens", [](Case& c) { c.lengths = {0, 0}; });
      add("no tokens, no state", [](Case& c) { c.lengths = {0, 0}, c.has_initial = false; });
      add("packed", [&](Case& c) { c.lengths = packed, c.packed = true; });
      add("packed, no saves", [&](Case& c) { c.lengths = packed, c.packed = true, c.save = false; });
      add("packed, saves only", [&](Case& c) { c.lengths = packed, c.packed = true, c.out = false; });
      add("packed, state only", [&](Case& c) { c.lengths = packed, c.packed = true, c.out = c.save = false; });
      add("packed, prepared z", [&](Case& c) { c.lengths = packed, c.packed = true, c.prepared_z = true; });
      add("9 chunks, no saves", [&](Case& c) { c.lengths = {570}, c.save = false, c.V = 64; });
      add("a short tail behind nine chunks, no saves",
          [](Case& c) { c.lengths = {586}, c.packed = true, c.save = false, c.V = 64, c.HV = 1; });
      add("9 chunks", [&](Case& c) { c.lengths = {570}, c.V = 64; });
      add("float32, V-first", [&](Case& c) { c.lengths = {130, 130}, c.bf16 = false, c.value_first = true; });
      add("float32, no saves", [&](Case& c) { c.lengths = packed, c.packed = true, c.bf16 = false, c.save = false; });
      add("bf16 states",
          [&](Case& c) { c.lengths = packed, c.packed = true, c.state_bf16 = true, c.value_first = true; });
      add("without TMA", [&](Case& c) { c.lengths = packed, c.packed = true, c.tma = false; });
      add("neighbours of no numbers",
          [&](Case& c) { c.lengths = {70, 3, 64, 130, 1, 65}, c.packed = c.damaged = true; });
      add("V 16", [&](Case& c) { c.V = 16; });
      add("V 100", [&](Case& c) { c.V = 100; });
      add("V 37", [&](Case& c) { c.V = 37, c.packed = true, c.lengths = packed; });
      add("V 100, float32", [&](Case& c) { c.V = 100, c.bf16 = false; });
      add("rows not aligned", [&](Case& c) { c.row_padding = 3; });
      add("rows with gaps", [&](Case& c) { c.row_padding = 8; });
      add("K less", [&](Case& c) { c.K = c.key == 128 ? 100 : 16, c.V = 72, c.value_first = true; });
      add("no d_o, no state", [&](Case& c) { c.has_d_o = c.has_initial = false; });
      add("no d_o", [&](Case& c) { c.has_d_o = false; });
      if (!is_delta) continue;
      const auto add_rows = [&](const std::string& more, auto change) {
        add("rows" + more, [&](Case& c) {
          c.rows = true, c.lengths = packed, c.packed = true;
          change(c);
        });
      };
      add_rows("", [](Case&) {});
      add_rows(", no saves", [](Case& c) { c.save = false; });
      add_rows(", saves only", [](Case& c) { c.out = false; });
      add_rows(", state only", [](Case& c) { c.out = c.save = false; });
      add_rows(", prepared z", [](Case& c) { c.prepared_z = true; });
      add_rows(" of groups, with gaps", [](Case& c) { c.HV = 4, c.group = 2, c.row_padding = 8; });
      add_rows(" of groups, batch", [](Case& c) { c.HV = 4, c.group = 4, c.packed = false, c.lengths = {130, 130}; });
      add_rows(", the same for all", [](Case& c) {
        c.same_rows = true, c.packed = false, c.lengths = {130, 130, 130};
      });
      add_rows(", without TMA", [](Case& c) { c.tma = false; });
      add_rows(", neighbours of no numbers", [](Case& c) { c.lengths = {70, 3, 64, 130, 1, 65}, c.damaged = true; });
      add_rows(", float32, V 37", [](Case& c) { c.bf16 = false, c.V = 37; });
      add_rows(", no tokens", [](Case& c) { c.lengths = {0, 0}, c.packed = false; });
      add_rows(", 9 chunks", [](Case& c) { c.lengths = {570}, c.packed = false, c.V = 64; });
      add_rows(", K less", [](Case& c) { c.K = c.key == 128 ? 72 : 40; });
      add_rows(", no d_o, no state", [](Case& c) { c.has_d_o = c.has_initial = false; });
      add_rows(", sums", [](Case& c) { c.mixed = true; });
      add_rows(", sums, no saves, no tail", [](Case& c) {
        c.mixed = true, c.save = false, c.packed = false, c.lengths = {128, 128};
      });
      const auto add_pairs = [&](const std::string& more, auto change) {
        add("rows, A and P" + more, [&](Case& c) {
          c.rows = c.pairs = true, c.lengths = packed, c.packed = true;
          change(c);
        });
      };
      add_pairs("", [](Case&) {});
      add_pairs(", no saves", [](Case& c) { c.save = false; });
      add_pairs(", saves only", [](Case& c) { c.out = false; });
      add_pairs(", state only", [](Case& c) { c.out = c.save = false; });
      add_pairs(", prepared z", [](Case& c) { c.prepared_z = true; });
      add_pairs(" of groups, with gaps", [](Case& c) { c.HV = 4, c.group = 2, c.row_padding = 8; });
      add_pairs(", without TMA", [](Case& c) { c.tma = false; });
      add_pairs(", neighbours of no numbers", [](Case& c) { c.lengths = {70, 3, 64, 130, 1, 65}, c.damaged = true; });
      add_pairs(", float32, V 37", [](Case& c) { c.bf16 = false, c.V = 37; });
      add_pairs(", no tokens", [](Case& c) { c.lengths = {0, 0}, c.packed = false; });
      add_pairs(", 9 chunks", [](Case& c) { c.lengths = {570}, c.packed = false, c.V = 64; });
      add_pairs(", K less", [](Case& c) { c.K = c.key == 128 ? 72 : 40; });
      add_pairs(", sums", [](Case& c) { c.mixed = true; });
      add_pairs(", sums, no saves", [](Case& c) { c.mixed = true, c.save = false; });
      add_pairs(", sums, saves only", [](Case& c) { c.mixed = true, c.out = false; });
      add_pairs(", sums, state only, without TMA", [](Case& c) { c.mixed = true, c.out = c.save = c.tma = false; });
      const auto add_keys = [&](const std::string& more, auto change) {
        add("streams apart" + more, [&](Case& c) {
          c.keys = true, c.lengths = packed, c.packed = true;
          change(c);
        });
      };
      add_keys("", [](Case&) {});
      add_keys(", no saves", [](Case& c) { c.save = false; });
      add_keys(", saves only", [](Case& c) { c.out = false; });
      add_keys(", state only", [](Case& c) { c.out = c.save = false; });
      add_keys(", prepared z, bf16 states", [](Case& c) { c.prepared_z = c.state_bf16 = c.value_first = true; });
      add_keys(", without TMA, batch", [](Case& c) { c.tma = c.packed = false, c.lengths = {130, 130}; });
      add_keys(", neighbours of no numbers", [](Case& c) { c.lengths = {70, 3, 64, 130, 1, 65}, c.damaged = true; });
      add_keys(", float32, V 37, K less", [](Case& c) { c.bf16 = false, c.V = 37, c.K = c.key == 128 ? 100 : 16; });
      add_keys(", no tokens", [](Case& c) { c.lengths = {0, 0}, c.packed = false; });
      add_keys(", 9 chunks", [](Case& c) { c.lengths = {570}, c.packed = false, c.V = 64; });
      add_keys(", no d_o, no state", [](Case& c) { c.has_d_o = c.has_initial = false; });
      for (const bool lo_parts : {false, true}) {
        const std::string name = lo_parts ? "hi_lo with lo parts of keys" : "hi_lo";
        const auto add_hi_lo = [&](const std::string& more, auto change) {
          add(name + more, [&](Case& c) {
            c.hi_lo = true, c.keys_lo = lo_parts, c.lengths = packed, c.packed = true;
            change(c);
          });
        };
        add_hi_lo("", [](Case&) {});
        add_hi_lo(", no saves", [](Case& c) { c.save = false; });
        add_hi_lo(", saves only", [](Case& c) { c.out = false; });
        add_hi_lo(", state only", [](Case& c) { c.out = c.save = false; });
        add_hi_lo(", prepared z, bf16 states", [](Case& c) { c.prepared_z = c.state_bf16 = c.value_first = true; });
        add_hi_lo(", float32, V 37, K less", [](Case& c) { c.bf16 = false, c.V = 37, c.K = c.key == 128 ? 100 : 16; });
        add_hi_lo(", no tokens", [](Case& c) { c.lengths = {0, 0}, c.packed = false; });
        add_hi_lo(", 9 chunks", [](Case& c) { c.lengths = {570}, c.packed = false, c.V = 64; });
      }
    }
  }
  return all;
}

}  // namespace fw::cuda
