// Strides that say nothing (of one element, of an empty tensor), strides that no product takes, and sizes that no
// machine has.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/mman.h>

#include <cstdint>
#include <cstring>
#include <vector>

#include "base/error.h"
#include "base/gemm.h"
#include "fastweight/fastweight.h"

namespace fw {
namespace {

using ::testing::HasSubstr;

// gated_deltanet of one sequence and head, K = V = 16, in the chunk form unless said otherwise; o with whatever stride.
template <class T>
struct Call {
  static constexpr int64_t kDim = 16;
  explicit Call(int64_t tokens)
      : x(static_cast<size_t>(tokens * kDim)), g(static_cast<size_t>(tokens), T(-0.1)), beta(g.size(), T(0.5)) {
    fw_desc_init(&desc);
    EXPECT_EQ(fw_rule_preset("gated_deltanet", &desc.rule), FW_OK);
    constexpr fw_dtype kType = sizeof(T) == 4 ? FW_F32 : FW_F64;
    desc.dtype = kType, desc.form = FW_FORM_CHUNK;
    desc.B = 1, desc.T = tokens, desc.H = desc.HV = 1, desc.K = desc.V = kDim;
    for (size_t i = 0; i < x.size(); ++i) x[i] = T(static_cast<double>(i % 5) - 1.5);
    const int64_t rows[4] = {1, tokens, 1, kDim}, gates[3] = {1, tokens, 1};
    fw_inputs_init(&in);
    fw_outputs_init(&out);
    in.q = in.k = in.v = fw_tensor_of(x.data(), kType, 4, rows);
    in.g = fw_tensor_of(g.data(), kType, 3, gates), in.beta = fw_tensor_of(beta.data(), kType, 3, gates);
    out.o = fw_tensor_of(nullptr, kType, 4, rows);
  }
  fw_status run(T* o) {
    out.o.data = o;
    fw_sizes sizes;
    fw_sizes_init(&sizes);
    EXPECT_EQ(fw_workspace_query(&desc, &sizes), FW_OK) << fw_last_error();
    std::vector<unsigned char> memory(sizes.forward + 64);
    void* aligned = memory.data();
    size_t room = memory.size();
    return fw_forward(&desc, &in, &out, nullptr, 0, std::align(64, sizes.forward, aligned, room), sizes.forward);
  }
  std::vector<T> x, g, beta;
  fw_desc desc;
  fw_inputs in;
  fw_outputs out;
};

template <class T>
class Strides : public ::testing::Test {};
using Types = ::testing::Types<float, double>;
TYPED_TEST_SUITE(Strides, Types);

TYPED_TEST(Strides, OfADimensionOfOneElementSayNothing) {
  Call<TypeParam> plain(1);
  std::vector<TypeParam> expected(16, 7), o(16, 7);
  ASSERT_EQ(plain.run(expected.data()), FW_OK) << fw_last_error();
  for (const int64_t stride : {int64_t{0}, int64_t{1}, int64_t{8}, int64_t{1} << 40}) {
    for (int which = 0; which < 3; ++which) {  // batch, tokens, heads
      Call<TypeParam> call(1);
      call.out.o.stride[which] = call.in.q.stride[which] = call.in.v.stride[which] = call.in.g.stride[which] = stride;
      o.assign(16, 7);
      ASSERT_EQ(call.run(o.data()), FW_OK) << fw_last_error();
      EXPECT_EQ(o, expected) << "stride " << stride << " of dimension " << which;
    }
  }
}

// In memory that is reserved and hardly used.
TYPED_TEST(Strides, OfRowsFurtherApartThanProductsTake) {
  const int64_t wide = (int64_t{1} << 32) + 16;
  const size_t bytes = static_cast<size_t>(wide + 16) * sizeof(TypeParam);
  void* const memory =
      ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) GTEST_SKIP() << "no " << bytes << " bytes of address space";
  auto* const o = static_cast<TypeParam*>(memory);
  Call<TypeParam> plain(2), call(2);
  std::vector<TypeParam> expected(32);
  ASSERT_EQ(plain.run(expected.data()), FW_OK) << fw_last_error();
  call.out.o.stride[1] = wide;
  ASSERT_EQ(call.run(o), FW_OK) << fw_last_error();
  EXPECT_EQ(std::vector<TypeParam>(o, o + 16), std::vector<TypeParam>(expected.begin(), expected.begin() + 16));
  EXPECT_EQ(std::vector<TypeParam>(o + wide, o + wide + 16),
            std::vector<TypeParam>(expected.begin() + 16, expected.end()));
  EXPECT_EQ(o[17], TypeParam(0)) << "a row was written where none is";
  ::munmap(memory, bytes);
}

// numpy gives arrays without elements strides of 0.
TYPED_TEST(Strides, OfEmptyTensorsSayNothing) {
  Call<TypeParam> call(0);
  for (fw_tensor* t : {&call.in.q, &call.in.k, &call.in.v, &call.out.o}) std::memset(t->stride, 0, sizeof(t->stride));
  TypeParam some[1] = {7};
  call.in.q.data = call.in.k.data = call.in.v.data = call.in.g.data = call.in.beta.data = some;
  EXPECT_EQ(call.run(some), FW_OK) << fw_last_error();
  EXPECT_EQ(some[0], TypeParam(7));
}

TYPED_TEST(Strides, ThatReachBeyondAnyMemoryAreRefused) {
  Call<TypeParam> call(3);
  call.out.o.stride[1] = INT64_MAX / 2;
  std::vector<TypeParam> o(48);
  EXPECT_EQ(call.run(o.data()), FW_ERROR_ARGUMENT);
  EXPECT_THAT(fw_last_error(), HasSubstr("o: stride[1]: expected strides that reach at most"));
}

// A product that a library would not make, or would make elsewhere, is refused by ours.
TYPED_TEST(Strides, ProductsCheckLeadingDimensions) {
  std::vector<TypeParam> a(64, 1), b(64, 1), c(64, 3);
  const auto product = [&](int64_t lda, int64_t ldb, int64_t ldc) {
    gemm(Trans::kNo, Trans::kNo, 4, 4, 4, TypeParam(1), a.data(), lda, b.data(), ldb, TypeParam(0), c.data(), ldc);
  };
  EXPECT_THROW(product(3, 4, 4), Error);
  EXPECT_THROW(product(4, 3, 4), Error);
  EXPECT_THROW(product(4, 4, 3), Error);
  EXPECT_THROW(product(4, 4, (int64_t{1} << 32) + 4), Error);
  EXPECT_EQ(c, std::vector<TypeParam>(64, 3));
  product(4, 4, 4);
  EXPECT_EQ(c[0], TypeParam(4));
}

TEST(Sizes, ThatWrapAreRefused) {
  fw_desc desc;
  fw_desc_init(&desc);
  desc.B = 1, desc.T = int64_t{1} << 31, desc.H = desc.HV = 65536, desc.K = 4096, desc.V = 65536;
  fw_sizes sizes;
  fw_sizes_init(&sizes);
  EXPECT_EQ(fw_workspace_query(&desc, &sizes), FW_ERROR_ARGUMENT);
  EXPECT_THAT(fw_last_error(), HasSubstr("B, T, HV, K and V"));
}

// A batch of sequences of one length has no table of them.
TEST(Sizes, OfManySequencesTakeNoMemoryToPlan) {
  fw_desc desc;
  fw_desc_init(&desc);
  desc.B = int64_t{1} << 31, desc.T = 1, desc.H = desc.HV = 1, desc.K = desc.V = 16;
  fw_sizes sizes;
  fw_sizes_init(&sizes);
  EXPECT_EQ(fw_workspace_query(&desc, &sizes), FW_OK) << fw_last_error();
  EXPECT_GT(sizes.forward, 0U);
}

}  // namespace
}  // namespace fw
