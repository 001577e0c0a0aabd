// First values that the device draws are the host's, to the bit, and leave the generator where the host does.
#include <gtest/gtest.h>

#include <bit>
#include <vector>

#include "base/device.h"
#include "nn/init_random.h"
#include "nn/params.h"

namespace fw::testing {
namespace {

// Normal and uniform values, of one and of two numbers, of which pieces of the generator cut some anywhere; others come
// from the host between them.
void declare(Params<float>& params) {
  params.declare({.name = "table", .shape = {67, 129}, .init = normal_init(0.02)});
  params.declare({.name = "a", .shape = {7}, .init = decay_a_init(0.0)});
  params.declare({.name = "first", .shape = {31, 33}, .init = uniform_init(0.3)});
  params.declare({.name = "second", .shape = {1, 33}, .init = uniform_init(0.3), .continues = true});
  params.declare({.name = "ones", .shape = {50}, .init = constant_init(1.0)});
  params.declare({.name = "conv", .shape = {1025, 4}, .init = normal_init(1.0), .fp32_param = true});
  params.declare({.name = "delta", .shape = {129}, .init = decay_delta_init()});
  params.declare({.name = "places", .shape = {65}, .init = index_init([](double i) { return i / 3; })});
  params.declare({.name = "one", .shape = {1, 1}, .init = uniform_init(2.0)});
  params.declare({.name = "last", .shape = {90, 91}, .init = normal_init(0.02)});
}

std::vector<uint32_t> bits_of(const Params<float>& params) {
  std::vector<uint32_t> bits;
  for (const ParamSpec& spec : params.specs()) {
    const HostView<float> values = params.host_values(spec);
    for (const float x : values.span()) bits.push_back(std::bit_cast<uint32_t>(x));
  }
  return bits;
}

class DeviceDraw : public ::testing::Test {
 protected:
  void SetUp() override { init_on_device_from = 1; }
  void TearDown() override { init_on_device_from = before_; }

 private:
  int64_t before_ = init_on_device_from;
};

TEST_F(DeviceDraw, HasTheBitsOfTheHost) {
  for (const uint64_t seed : {uint64_t{3}, uint64_t{4}}) {
    Params<float> host;
    declare(host);
    host.allocate();
    Random by_host(seed);
    by_host.bits();  // not a fresh one
    host.init(by_host);
    for (const MasterFormat master_format : {MasterFormat::kBf16PlusLow, MasterFormat::kFp32}) {
      Params<float> device;
      declare(device);
      device.allocate(cuda_device(), master_format);
      Random by_device(seed);
      by_device.bits();
      device.init(by_device);
      EXPECT_EQ(bits_of(device), bits_of(host));
      EXPECT_EQ(by_device.bits(), Random(by_host).bits());
      if (master_format == MasterFormat::kFp32) continue;
      // What is read as numbers has them so too.
      const auto conv = device.find("conv");
      std::vector<float> numbers(4100);
      cuda_device().to_host(numbers.data(), device.value(conv), numbers.size() * sizeof(float));
      const HostView<float> want = host.host_values(host.specs()[static_cast<size_t>(conv)]);
      EXPECT_TRUE(std::equal(numbers.begin(), numbers.end(), want.span().begin()));
    }
  }
}

// Few numbers, and initialisers that do not say how many they take, are the host's.
TEST_F(DeviceDraw, LeavesTheRestToTheHost) {
  Params<float> params;
  params.declare({.name = "own", .shape = {40, 50}, .init = [](std::span<double> values, Random& random) {
                    for (double& x : values) x = static_cast<double>(random.below(3));
                  }});
  params.allocate(cuda_device(), MasterFormat::kBf16PlusLow);
  Random random(1), same(1);
  params.init(random);
  const HostView<float> values = params.host_values(params.specs()[0]);
  for (const float x : values.span()) ASSERT_EQ(x, static_cast<float>(same.below(3)));
}

}  // namespace
}  // namespace fw::testing
