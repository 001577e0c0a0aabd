// Matrix products of a warpgroup (sm_90a): four warps, the first of them a multiple of four, multiply 64 x 16 by 16 x N
// and add to 64 x N floats in registers. Part of sm90/ptx.cuh, which includes it.
//
// Warp w of the group holds rows 16 w to 16 w + 15. Thread t of it: d[4 j + 2 h + e] is element (16 w + t / 4 + 8 h, 8
// j + 2 (t % 4) + e); a[h + 2 g] of the register operand is elements (16 w + t / 4 + 8 h, 8 g + 2 (t % 4)) and the
// next.
//
// Matrices in shared memory lie in SW128 tiles of 64 columns (128 bytes a row, rows in order), base aligned to 1024
// bytes, where the 16-byte piece p of row r is at position p ^ (r % 8). With rows = M or N and columns = K ("K-major",
// no transpose) step k of 16 of the inner dimension is wgmma_descriptor(SW128 tile + 32 k, 16, 1024), k < 4; the next
// four are in the next SW128 tile. With rows = K and columns = M or N (transpose) it is wgmma_descriptor(SW128 tile +
// 2048 k, distance of SW128 tiles in bytes, 1024).
#pragma once

namespace fw::cuda {

FW_DEVICE uint64_t wgmma_descriptor(uint32_t address, uint32_t leading_offset, uint32_t stride_offset) {
  constexpr uint64_t kSwizzle128 = uint64_t{1} << 62;
  return static_cast<uint64_t>((address & 0x3ffffu) >> 4) | static_cast<uint64_t>(leading_offset >> 4) << 16 |
         static_cast<uint64_t>(stride_offset >> 4) << 32 | kSwizzle128;
}

// Before the first product, and after any ordinary access to the registers of d or a.
FW_DEVICE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
FW_DEVICE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int N>
FW_DEVICE void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
}
// Keeps the compiler from moving uses of d across: after wgmma_wait(), before d is read.
template <int N>
FW_DEVICE void keep(float (&d)[N]) {
  FW_UNROLL
  for (int i = 0; i < N; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

// The same for an operand in registers: nvcc makes nothing new in them before this, ptxas may (see below).
FW_DEVICE void keep(uint32_t (&a)[4]) {
  FW_UNROLL
  for (int i = 0; i < 4; ++i) asm volatile("" : "+r"(a[i])::"memory");
}

// An operand in registers that is made for the next round of a loop while products read this round's: `next` to `a`,
// once those products have been waited for. ptxas lets a register go when no instruction names it any more, and knows
// of no product that still reads it. After a plain copy it made `next` in the registers of `a` (tools/check_products.py
// finds that in machine code). So the copy is a choice that it cannot foresee: `positive` is above 0.
FW_DEVICE void take_over(uint32_t (&a)[4], const uint32_t (&next)[4], int32_t positive) {
  FW_UNROLL
  for (int i = 0; i < 4; ++i) {
    asm volatile("{\n.reg .pred p;\nsetp.gt.s32 p, %2, 0;\nselp.b32 %0, %1, %0, p;\n}"
                 : "+r"(a[i])
                 : "r"(next[i]), "r"(positive)
                 : "memory");
  }
}

// The operand list of N / 2 registers, eight at a time: the text of the instruction and the constraints.
#define FW_WGMMA_TEXT_4 "%0, %1, %2, %3"
#define FW_WGMMA_TEXT_8 FW_WGMMA_TEXT_4 ", %4, %5, %6, %7"
#define FW_WGMMA_TEXT_16 FW_WGMMA_TEXT_8 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define FW_WGMMA_TEXT_24 FW_WGMMA_TEXT_16 ", %16, %17, %18, %19, %20, %21, %22, %23"
#define FW_WGMMA_TEXT_32 FW_WGMMA_TEXT_24 ", %24, %25, %26, %27, %28, %29, %30, %31"
#define FW_WGMMA_TEXT_40 FW_WGMMA_TEXT_32 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define FW_WGMMA_TEXT_48 FW_WGMMA_TEXT_40 ", %40, %41, %42, %43, %44, %45, %46, %47"
#define FW_WGMMA_TEXT_56 FW_WGMMA_TEXT_48 ", %48, %49, %50, %51, %52, %53, %54, %55"
#define FW_WGMMA_TEXT_64 FW_WGMMA_TEXT_56 ", %56, %57, %58, %59, %60, %61, %62, %63"
#define FW_WGMMA_TEXT_72 FW_WGMMA_TEXT_64 ", %64, %65, %66, %67, %68, %69, %70, %71"
#define FW_WGMMA_TEXT_80 FW_WGMMA_TEXT_72 ", %72, %73, %74, %75, %76, %77, %78, %79"
#define FW_WGMMA_TEXT_88 FW_WGMMA_TEXT_80 ", %80, %81, %82, %83, %84, %85, %86, %87"
#define FW_WGMMA_TEXT_96 FW_WGMMA_TEXT_88 ", %88, %89, %90, %91, %92, %93, %94, %95"
#define FW_WGMMA_TEXT_104 FW_WGMMA_TEXT_96 ", %96, %97, %98, %99, %100, %101, %102, %103"
#define FW_WGMMA_TEXT_112 FW_WGMMA_TEXT_104 ", %104, %105, %106, %107, %108, %109, %110, %111"
#define FW_WGMMA_TEXT_120 FW_WGMMA_TEXT_112 ", %112, %113, %114, %115, %116, %117, %118, %119"
#define FW_WGMMA_TEXT_128 FW_WGMMA_TEXT_120 ", %120, %121, %122, %123, %124, %125, %126, %127"

#define FW_WGMMA_4(i) "+f"(d[(i)]), "+f"(d[(i) + 1]), "+f"(d[(i) + 2]), "+f"(d[(i) + 3])
#define FW_WGMMA_8(i) FW_WGMMA_4(i), FW_WGMMA_4((i) + 4)
#define FW_WGMMA_16(i) FW_WGMMA_8(i), FW_WGMMA_8((i) + 8)
#define FW_WGMMA_24(i) FW_WGMMA_16(i), FW_WGMMA_8((i) + 16)
#define FW_WGMMA_32(i) FW_WGMMA_16(i), FW_WGMMA_16((i) + 16)
#define FW_WGMMA_40(i) FW_WGMMA_32(i), FW_WGMMA_8((i) + 32)
#define FW_WGMMA_48(i) FW_WGMMA_32(i), FW_WGMMA_16((i) + 32)
#define FW_WGMMA_64(i) FW_WGMMA_32(i), FW_WGMMA_32((i) + 32)
#define FW_WGMMA_96(i) FW_WGMMA_64(i), FW_WGMMA_32((i) + 64)
#define FW_WGMMA_128(i) FW_WGMMA_64(i), FW_WGMMA_64((i) + 64)

// One shape: n columns, h = n / 2 registers; the others are the numbers of the operands after them.
#define FW_WGMMA_RS(n, h, o0, o1, o2, o3, o4, o5, o6)                                                         \
  if constexpr (N == n)                                                                                       \
    asm volatile("{.reg .pred p; setp.ne.b32 p, %" #o5 ", 0;\nwgmma.mma_async.sync.aligned.m64n" #n           \
                 "k16.f32.bf16.bf16 {" FW_WGMMA_TEXT_##h "}, {%" #o0 ", %" #o1 ", %" #o2 ", %" #o3 "}, %" #o4 \
                                                         ", p, 1, 1, %" #o6 ";}\n"                            \
                 : FW_WGMMA_##h(0)                                                                            \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(accumulate)),     \
                   "n"(kTransposeB ? 1 : 0));

#define FW_WGMMA_SS(n, h, o0, o1, o2, o3, o4)                                                                     \
  if constexpr (N == n)                                                                                           \
    asm volatile("{.reg .pred p; setp.ne.b32 p, %" #o2 ", 0;\nwgmma.mma_async.sync.aligned.m64n" #n               \
                 "k16.f32.bf16.bf16 {" FW_WGMMA_TEXT_##h "}, %" #o0 ", %" #o1 ", p, 1, 1, %" #o3 ", %" #o4 ";}\n" \
                 : FW_WGMMA_##h(0)                                                                                \
                 : "l"(a), "l"(b), "r"(static_cast<int>(accumulate)), "n"(kTransposeA ? 1 : 0),                   \
                   "n"(kTransposeB ? 1 : 0));

template <int N>
inline constexpr bool kWgmmaColumns =
    N == 8 || N == 16 || N == 32 || N == 48 || N == 64 || N == 80 || N == 96 || N == 128 || N == 192 || N == 256;

// d = a b, plus d if accumulate; complete after wgmma_commit() and wgmma_wait(). a and d stay untouched until then.
template <int N, bool kTransposeB>
FW_DEVICE void wgmma_rs(float (&d)[N / 2], const uint32_t (&a)[4], uint64_t b, bool accumulate) {
  static_assert(kWgmmaColumns<N>, "add the shape here");
  FW_WGMMA_RS(8, 4, 4, 5, 6, 7, 8, 9, 10)
  FW_WGMMA_RS(16, 8, 8, 9, 10, 11, 12, 13, 14)
  FW_WGMMA_RS(32, 16, 16, 17, 18, 19, 20, 21, 22)
  FW_WGMMA_RS(48, 24, 24, 25, 26, 27, 28, 29, 30)
  FW_WGMMA_RS(64, 32, 32, 33, 34, 35, 36, 37, 38)
  FW_WGMMA_RS(80, 40, 40, 41, 42, 43, 44, 45, 46)
  FW_WGMMA_RS(96, 48, 48, 49, 50, 51, 52, 53, 54)
  FW_WGMMA_RS(128, 64, 64, 65, 66, 67, 68, 69, 70)
  FW_WGMMA_RS(192, 96, 96, 97, 98, 99, 100, 101, 102)
  FW_WGMMA_RS(256, 128, 128, 129, 130, 131, 132, 133, 134)
}

template <int N, bool kTransposeA, bool kTransposeB>
FW_DEVICE void wgmma_ss(float (&d)[N / 2], uint64_t a, uint64_t b, bool accumulate) {
  static_assert(kWgmmaColumns<N>, "add the shape here");
  FW_WGMMA_SS(8, 4, 4, 5, 6, 7, 8)
  FW_WGMMA_SS(16, 8, 8, 9, 10, 11, 12)
  FW_WGMMA_SS(32, 16, 16, 17, 18, 19, 20)
  FW_WGMMA_SS(48, 24, 24, 25, 26, 27, 28)
  FW_WGMMA_SS(64, 32, 32, 33, 34, 35, 36)
  FW_WGMMA_SS(80, 40, 40, 41, 42, 43, 44)
  FW_WGMMA_SS(96, 48, 48, 49, 50, 51, 52)
  FW_WGMMA_SS(128, 64, 64, 65, 66, 67, 68)
  FW_WGMMA_SS(192, 96, 96, 97, 98, 99, 100)
  FW_WGMMA_SS(256, 128, 128, 129, 130, 131, 132)
}

#undef FW_WGMMA_RS
#undef FW_WGMMA_SS

// Registers of each thread of the warpgroup from here on. All of a kernel's must fit the 64 K of an SM; ignored by
// ptxas unless the kernel has __launch_bounds__(threads, blocks).
template <int N>
FW_DEVICE void register_count_decrease() {
  static_assert(N % 8 == 0 && N >= 24 && N <= 256);
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N));
}
template <int N>
FW_DEVICE void register_count_increase() {
  static_assert(N % 8 == 0 && N >= 24 && N <= 256);
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N));
}

}  // namespace fw::cuda
