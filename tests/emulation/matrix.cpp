// ldmatrix, stmatrix, mma and wgmma with the layouts of the PTX manual. Products of bf16 and tf32 are summed in float.
#include <array>
#include <cstring>

#include "emulation/block.h"
#include "emulation/emulation.h"

namespace fw::cuda {

namespace emulation {
namespace {

struct MatrixCall {
  uint32_t address;
  uint32_t* load;
  const uint32_t* store;
};

template <unsigned kCount, bool kTranspose, bool kStore>
bool run_matrix(void* const* operands, unsigned first_thread) {
  for (unsigned i = 0; i < kCount; ++i) {
    std::array<uint16_t*, 8> rows;
    for (unsigned r = 0; r < 8; ++r) {
      const auto* call = static_cast<const MatrixCall*>(operands[8 * i + r]);
      rows[r] = reinterpret_cast<uint16_t*>(
          Block::current().shared(call->address, 16, 16, kStore ? "stmatrix" : "ldmatrix", first_thread + 8 * i + r));
    }
    for (unsigned lane = 0; lane < 32; ++lane) {
      const auto* call = static_cast<const MatrixCall*>(operands[lane]);
      const unsigned row = lane / 4, column = 2 * (lane % 4);
      uint16_t& low = kTranspose ? rows[column][row] : rows[row][column];
      uint16_t& high = kTranspose ? rows[column + 1][row] : rows[row][column + 1];
      if constexpr (kStore) {
        low = static_cast<uint16_t>(call->store[i]);
        high = static_cast<uint16_t>(call->store[i] >> 16);
      } else {
        call->load[i] = low | static_cast<uint32_t>(high) << 16;
      }
    }
  }
  return true;
}
const Operation kLoad4{"ldmatrix_x4", 32, false, run_matrix<4, false, false>};
const Operation kLoad4Transpose{"ldmatrix_x4_trans", 32, false, run_matrix<4, true, false>};
const Operation kLoad2Transpose{"ldmatrix_x2_trans", 32, false, run_matrix<2, true, false>};
const Operation kStore4{"stmatrix_x4", 32, false, run_matrix<4, false, true>};
const Operation kStore4Transpose{"stmatrix_x4_trans", 32, false, run_matrix<4, true, true>};

void load(const Operation& operation, uint32_t* r, uint32_t address, unsigned addresses) {
  MatrixCall call{address, r, nullptr};
  Block& block = Block::current();
  const unsigned me = position.thread;
  if (races::kFound && me % 32 < addresses) races::read(block.shared(address, 16, 16, operation.name, me), 16);
  block.meet(operation, &call);
}
void store(const Operation& operation, uint32_t address, const uint32_t* r) {
  MatrixCall call{address, nullptr, r};
  Block& block = Block::current();
  block.needs_hopper(operation.name);
  if (races::kFound) races::write(block.shared(address, 16, 16, operation.name, position.thread), 16);
  block.meet(operation, &call);
}

struct MmaCall {
  float* d;
  const uint32_t* a;
  uint32_t b[2];
};

// d (16 x 8) += a (16 x kDepth) b (kDepth x 8), a and b as gather() lays them out.
template <int kDepth, class Gather>
bool run_mma(void* const* operands, const Gather& gather) {
  float a[16][kDepth], b[kDepth][8], d[16][8];
  for (int lane = 0; lane < 32; ++lane) {
    const auto& call = *static_cast<const MmaCall*>(operands[lane]);
    const int row = lane / 4, column = 2 * (lane % 4);
    gather(call, row, lane % 4, a, b);
    for (int h = 0; h < 2; ++h)
      for (int e = 0; e < 2; ++e) d[row + 8 * h][column + e] = call.d[2 * h + e];
  }
  for (int m = 0; m < 16; ++m)
    for (int k = 0; k < kDepth; ++k)
      for (int n = 0; n < 8; ++n) d[m][n] += a[m][k] * b[k][n];
  for (int lane = 0; lane < 32; ++lane) {
    const auto& call = *static_cast<const MmaCall*>(operands[lane]);
    for (int h = 0; h < 2; ++h)
      for (int e = 0; e < 2; ++e) call.d[2 * h + e] = d[lane / 4 + 8 * h][2 * (lane % 4) + e];
  }
  return true;
}

bool run_mma_bf16(void* const* operands, unsigned) {
  return run_mma<16>(operands, [](const MmaCall& call, int group, int t, float(&a)[16][16], float(&b)[16][8]) {
    for (int i = 0; i < 4; ++i) {
      a[group + 8 * (i & 1)][8 * (i >> 1) + 2 * t] = bf16_low(call.a[i]);
      a[group + 8 * (i & 1)][8 * (i >> 1) + 2 * t + 1] = bf16_high(call.a[i]);
    }
    for (int i = 0; i < 2; ++i) {
      b[8 * i + 2 * t][group] = bf16_low(call.b[i]);
      b[8 * i + 2 * t + 1][group] = bf16_high(call.b[i]);
    }
  });
}
bool run_mma_tf32(void* const* operands, unsigned) {
  return run_mma<8>(operands, [](const MmaCall& call, int group, int t, float(&a)[16][8], float(&b)[8][8]) {
    constexpr uint32_t kTf32 = 0xffffe000u;  // the hardware reads no more
    for (int i = 0; i < 4; ++i) a[group + 8 * (i & 1)][4 * (i >> 1) + t] = bits_float(call.a[i] & kTf32);
    for (int i = 0; i < 2; ++i) b[4 * i + t][group] = bits_float(call.b[i] & kTf32);
  });
}
const Operation kMmaBf16{"mma_bf16", 32, false, run_mma_bf16};
const Operation kMmaTf32{"mma_tf32", 32, false, run_mma_tf32};

// ---- wgmma

// A matrix of 16 k in shared memory, 128-byte swizzle, as a descriptor says.
class SharedMatrix {
 public:
  SharedMatrix(uint64_t descriptor, int rows, bool transposed, unsigned thread)
      : start_(static_cast<uint32_t>(descriptor & 0x3fff) << 4),
        leading_(static_cast<uint32_t>(descriptor >> 16 & 0x3fff) << 4),
        stride_(static_cast<uint32_t>(descriptor >> 32 & 0x3fff) << 4),
        transposed_(transposed) {
    Block& block = Block::current();
    if (descriptor >> 62 != 1 || (descriptor >> 49 & 7) != 0)
      block.fail(thread, "wgmma: descriptor %016llx is not of the 128-byte swizzle",
                 static_cast<unsigned long long>(descriptor));
    if (start_ & 0x380)
      block.fail(thread, "wgmma: offset %d is in the middle of the 8 rows of the swizzle",
                 static_cast<int>(start_ - Block::kSharedBase));
    const int in_row = transposed ? std::min(rows, 64) * 2 : 32;
    if (static_cast<int>(start_ & 0x7f) + in_row > 128)
      block.fail(thread, "wgmma: offset %d: 128-byte rows end within the step",
                 static_cast<int>(start_ - Block::kSharedBase));
    if (transposed && rows > 64 && leading_ == 0)
      block.fail(thread, "wgmma: %d columns in panels of 64, but their distance (leading offset) is 0", rows);
  }
  // The rows' 16-byte pieces, numbered.
  const char* piece(int number, int rows, unsigned thread) const {
    const Coord first = coord(number, rows);
    return Block::current().shared(address(first.row, first.k), 16, 16, "wgmma", thread);
  }
  // All of it: put(row, k, value).
  template <class Put>
  void read(int rows, unsigned thread, const Put& put) const {
    for (int number = 0; number < 2 * rows; ++number) {
      uint16_t bits[8];
      std::memcpy(bits, piece(number, rows, thread), sizeof bits);
      const Coord first = coord(number, rows);
      for (int i = 0; i < 8; ++i)
        put(first.row + (transposed_ ? i : 0), first.k + (transposed_ ? 0 : i), bf16_value(bits[i]));
    }
  }

 private:
  struct Coord {
    int row, k;
  };
  Coord coord(int number, int rows) const {
    return transposed_ ? Coord{number % (rows / 8) * 8, number / (rows / 8)} : Coord{number / 2, number % 2 * 8};
  }
  uint32_t address(int row, int k) const {
    const auto r = static_cast<uint32_t>(row), c = static_cast<uint32_t>(k);
    uint32_t address = start_;
    address += transposed_ ? r / 64 * leading_ + c / 8 * stride_ + c % 8 * 128 + r % 64 * 2
                           : r / 8 * stride_ + r % 8 * 128 + c * 2;
    return address ^ (address >> 7 & 7) << 4;
  }

  uint32_t start_, leading_, stride_;
  bool transposed_;
};

// Where the accumulator of this product is: in the registers, or in what a late one has left.
float* accumulator(Thread& thread, const Wgmma& product) {
  if (!Block::current().late()) return product.d;
  for (LateProduct& late : thread.products) {
    if (late.d != product.d) continue;
    late.group = thread.product_group;
    return late.values.data();
  }
  thread.products.push_back(
      {product.d, thread.product_group, std::vector<float>(product.d, product.d + product.n / 2)});
  std::fill_n(product.d, product.n / 2, std::numeric_limits<float>::quiet_NaN());
  return thread.products.back().values.data();
}

using Four = float __attribute__((vector_size(16)));

bool run_wgmma(void* const* operands, unsigned first_thread) {
  Block& block = Block::current();
  const Wgmma& common = *static_cast<const Wgmma*>(operands[0]);
  static thread_local float a[64][16], b[16][256], d[64][256];
  const SharedMatrix b_matrix(common.b_descriptor, common.n, common.transpose_b, first_thread);
  b_matrix.read(common.n, first_thread, [&](int n, int k, float x) { b[k][n] = x; });
  if (!common.a) {
    const SharedMatrix a_matrix(common.a_descriptor, 64, common.transpose_a, first_thread);
    a_matrix.read(64, first_thread, [&](int m, int k, float x) { a[m][k] = x; });
  }
  std::array<float*, 128> registers;
  for (int thread = 0; thread < 128; ++thread) {
    const auto& product = *static_cast<const Wgmma*>(operands[thread]);
    const unsigned index = first_thread + static_cast<unsigned>(thread);
    if (product.n != common.n || product.b_descriptor != common.b_descriptor ||
        product.a_descriptor != common.a_descriptor || product.accumulate != common.accumulate ||
        product.transpose_a != common.transpose_a || product.transpose_b != common.transpose_b ||
        !product.a != !common.a)
      block.fail(index, "wgmma: not the same product in all threads of the warpgroup");
    const int row = 16 * (thread / 32) + thread % 32 / 4, column = 2 * (thread % 4);
    for (int i = 0; product.a && i < 4; ++i) {
      a[row + 8 * (i & 1)][8 * (i >> 1) + column] = bf16_low(product.a[i]);
      a[row + 8 * (i & 1)][8 * (i >> 1) + column + 1] = bf16_high(product.a[i]);
    }
    float* from = registers[static_cast<std::size_t>(thread)] = accumulator(block.thread(index), product);
    for (int i = 0; i < common.n / 2; ++i)
      d[row + 8 * (i >> 1 & 1)][8 * (i >> 2) + column + (i & 1)] = common.accumulate ? from[i] : 0;
  }
  for (int m = 0; m < 64; ++m) {
    for (int n = 0; n < common.n; n += 8) {
      Four low, high;
      std::memcpy(&low, d[m] + n, sizeof low), std::memcpy(&high, d[m] + n + 4, sizeof high);
      for (int k = 0; k < 16; ++k) {
        Four b_low, b_high;
        std::memcpy(&b_low, b[k] + n, sizeof low), std::memcpy(&b_high, b[k] + n + 4, sizeof high);
        low += a[m][k] * b_low, high += a[m][k] * b_high;
      }
      std::memcpy(d[m] + n, &low, sizeof low), std::memcpy(d[m] + n + 4, &high, sizeof high);
    }
  }
  for (int thread = 0; thread < 128; ++thread) {
    const int row = 16 * (thread / 32) + thread % 32 / 4, column = 2 * (thread % 4);
    float* to = registers[static_cast<std::size_t>(thread)];
    for (int i = 0; i < common.n / 2; ++i) to[i] = d[row + 8 * (i >> 1 & 1)][8 * (i >> 2) + column + (i & 1)];
  }
  return true;
}
const Operation kWgmma{"wgmma", 128, false, run_wgmma};

}  // namespace

// What this thread reads of a matrix of the product that is under way.
void read_part(uint64_t descriptor, int rows, bool transposed) {
  const unsigned me = position.thread;
  const SharedMatrix matrix(descriptor, rows, transposed, me);
  for (int piece = static_cast<int>(me % 128); piece < 2 * rows; piece += 128) {
    const char* from = matrix.piece(piece, rows, me);
    races::touch(from, 16);
    races::read(from, 16);
    const races::Quiet quiet;
    Thread& thread = Block::current().thread();
    thread.operands.push_back({from, 16, thread.product_group});
  }
}

void wgmma(const Wgmma& product) {
  Block::current().needs_hopper("wgmma");
  if (races::kFound) {
    read_part(product.b_descriptor, product.n, product.transpose_b);
    if (product.a == nullptr) read_part(product.a_descriptor, 64, product.transpose_a);
  }
  Wgmma call = product;
  Block::current().meet(kWgmma, &call);
}

void wgmma_wait(int groups) {
  Thread& thread = Block::current().thread();
  const auto over = [&](const auto& part) { return part.group + static_cast<unsigned>(groups) < thread.product_group; };
  for (const Operand& operand : thread.operands) {
    if (over(operand)) races::read(operand.from, operand.bytes);
  }
  const races::Quiet quiet;
  std::erase_if(thread.operands, over);
  std::erase_if(thread.products, [&](const LateProduct& late) {
    if (!over(late)) return false;
    std::copy(late.values.begin(), late.values.end(), late.d);
    return true;
  });
}

}  // namespace emulation

using emulation::Block;

void ldmatrix_x4(uint32_t (&r)[4], uint32_t address) { emulation::load(emulation::kLoad4, r, address, 32); }
void ldmatrix_x4_trans(uint32_t (&r)[4], uint32_t address) {
  emulation::load(emulation::kLoad4Transpose, r, address, 32);
}
void ldmatrix_x2_trans(uint32_t (&r)[2], uint32_t address) {
  emulation::load(emulation::kLoad2Transpose, r, address, 16);
}
void stmatrix_x4(uint32_t address, const uint32_t (&r)[4]) { emulation::store(emulation::kStore4, address, r); }
void stmatrix_x4_trans(uint32_t address, const uint32_t (&r)[4]) {
  emulation::store(emulation::kStore4Transpose, address, r);
}
void mma_bf16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  emulation::MmaCall call{d, a, {b0, b1}};
  Block::current().meet(emulation::kMmaBf16, &call);
}
void mma_tf32(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  emulation::MmaCall call{d, a, {b0, b1}};
  Block::current().meet(emulation::kMmaTf32, &call);
}
void wgmma_commit() { ++Block::current().thread().product_group; }

}  // namespace fw::cuda
