// Every backend has every operation of ops.def.
#include <gtest/gtest.h>

#include "op_check.h"

namespace fw::testing {
namespace {

template <class T>
void expect_whole(const Ops<T>& ops, const char* backend) {
#define FW_OP(name, args) EXPECT_NE(ops.name, nullptr) << backend << " has no " #name;
#include "ops/ops.def"
#undef FW_OP
}

TEST(Table, TheHostHasEveryOperation) {
  expect_whole(host_ops<float>(), "the host's table for float");
  expect_whole(host_ops<double>(), "the host's table for double");
}

}  // namespace
}  // namespace fw::testing
