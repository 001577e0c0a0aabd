// Times of the operations of src/ops/cuda that memory limits, in bf16, one JSON line each. A line has:
// - the milliseconds,
// - the bytes that must move (each tensor once),
// - "of_copy": their rate as a share of that of a copy of [tokens, width], on the same device in the same run,
// - "of_long_copy": the same of a copy of [tokens, conv_channels], long enough that its beginning and end do not count.
//
//   elementwise_bench [tokens width conv_channels]
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <vector>

#include "base/buffer.h"
#include "device_times.h"
#include "gpu/launch.h"
#include "ops/backend.h"

namespace {

using namespace fw;
using bench::median_ms;

// All of [tokens, width] unless said otherwise: gates, maps, norms of heads of 128, rows, embedding, optimiser.
template <class Tensor, class Report>
void time_lo(int64_t tokens, int64_t width, const Exec<Bf16>& exec, const Tensor& tensor, const Report& report,
             const PassLayout& pass) {
  Device& device = exec.device;
  constexpr int64_t kHead = 128, kVocab = 32000, kPiece = 16384, kVec16 = 4096;
  const double u = 2.0 * static_cast<double>(tokens * width);
  Buffer<Bf16> x = tensor(tokens, width), z = tensor(tokens, width), dy = tensor(tokens, width),
               y = tensor(tokens, width), w = tensor(tokens, width);
  Buffer<float> wide(device, tokens * width), parameters(device, width), sums(device, width),
      rstd(device, tokens * width / kHead);
  const auto mat = [&](Buffer<Bf16>& b) { return Mat<Bf16>(b.data(), tokens, width); };
  const Mat<float> g(wide.data(), tokens, width);
  float *const p = parameters.data(), *const s = sums.data();
  report("copy_rows", 2 * u, [&] { exec.copy_rows(mat(x), mat(y)); });
  report("gated_rmsnorm_forward", 3 * u, [&] {
    exec.gated_rmsnorm_forward(mat(x), mat(z), nullptr, p, 1e-5F, kHead, GateKind::kSilu, mat(y), rstd.data());
  });
  report("gated_rmsnorm_backward", 5 * u, [&] {
    exec.gated_rmsnorm_backward(mat(dy), mat(x), mat(z), nullptr, p, rstd.data(), kHead, GateKind::kSilu, mat(y),
                                mat(w), s);
  });
  report("gated_conv_forward", 3 * u,
         [&] { exec.gated_conv_forward(mat(x), mat(z), wide.data(), p, int64_t{4}, pass, nullptr, nullptr, mat(y)); });
  Buffer<float> taps(device, 4 * width);
  report("gated_conv_backward", 5 * u, [&] {
    exec.gated_conv_backward(mat(dy), mat(x), mat(z), wide.data(), p, int64_t{4}, pass, nullptr, mat(y), mat(w),
                             taps.data(), s);
  });
  report("sigmoid_gate_forward", 2 * u, [&] { exec.sigmoid_gate_forward(mat(x), nullptr, 1.0F, mat(y)); });
  report("sigmoid_gate_backward", 3 * u, [&] { exec.sigmoid_gate_backward(mat(dy), mat(x), 1.0F, mat(y), nullptr); });
  report("sigmoid_gate_backward with bias", 3 * u,
         [&] { exec.sigmoid_gate_backward(mat(dy), mat(x), 1.0F, mat(y), s); });
  report("decay_gate_forward", 3 * u, [&] { exec.decay_gate_forward(mat(x), p, p, kHead, g); });
  report("decay_gate_backward", 4 * u, [&] { exec.decay_gate_backward(g, mat(x), p, p, kHead, mat(y), s, s); });
  report("log_sigmoid_decay_forward", 3 * u, [&] { exec.log_sigmoid_decay_forward(mat(x), p, 1.0F, g); });
  report("log_sigmoid_decay_backward", 4 * u, [&] { exec.log_sigmoid_decay_backward(g, mat(x), p, 1.0F, mat(y), s); });
  report("learned_gate_forward", u, [&] { exec.learned_gate_forward(p, 1.0F, mat(y)); });
  report("position_factor", 2 * u, [&] { exec.position_factor(mat(x), PositionFactor::kInverse, pass, mat(y)); });
  report("single_gate_decay_forward", 3 * u, [&] { exec.single_gate_decay_forward(mat(x), g); });
  report("single_gate_decay_backward", 5 * u, [&] { exec.single_gate_decay_backward(g, mat(x), mat(y)); });
  report("feature_map_forward", 2 * u, [&] { exec.feature_map_forward(FeatureMap::kElu, mat(x), mat(y)); });
  report("feature_map_backward", 3 * u, [&] { exec.feature_map_backward(FeatureMap::kElu, mat(dy), mat(x), mat(y)); });
  report("product_forward", 3 * u, [&] { exec.product_forward(mat(x), mat(z), mat(y)); });
  report("product_backward", 5 * u, [&] { exec.product_backward(mat(dy), mat(x), mat(z), mat(y), mat(w)); });
  report("rotary", 2 * u, [&] { exec.rotary(mat(x), kHead, kHead, 10000.0, pass, Rotation::kForward); });
  report("head_scale_forward", 2 * u, [&] { exec.head_scale_forward(mat(x), p, kHead, mat(y)); });
  report("head_scale_backward", 4 * u, [&] { exec.head_scale_backward(mat(dy), mat(x), p, kHead, mat(y), s); });
  report("head_constant_backward", u, [&] { exec.head_constant_backward(mat(dy), kHead, s); });
  report("head_subtract_forward", 3 * u, [&] { exec.head_subtract_forward(mat(x), p, kHead, mat(y)); });
  report("head_subtract_backward", 4 * u, [&] { exec.head_subtract_backward(mat(dy), mat(x), p, kHead, mat(y), s); });
  report("group_mean_forward", u, [&] { exec.group_mean_forward(mat(x), Mat<Bf16>(y.data(), tokens, width / kHead)); });
  report("group_mean_backward", 2 * u,
         [&] { exec.group_mean_backward(Mat<Bf16>(z.data(), tokens, width / kHead), mat(y)); });
  report("swiglu_forward", 3 * u, [&] { exec.swiglu_forward(mat(x), mat(z), mat(y)); });
  report("swiglu_backward", 5 * u, [&] { exec.swiglu_backward(mat(dy), mat(x), mat(z), mat(y), mat(w)); });

  std::vector<int32_t> drawn(static_cast<size_t>(tokens));
  std::vector<char> seen(kVocab);
  uint32_t seed = 1;
  for (int32_t& id : drawn) {
    seed = seed * 1664525u + 1013904223u;
    id = static_cast<int32_t>((seed >> 8) % kVocab);
    seen[static_cast<size_t>(id)] = 1;
  }
  const double rows = static_cast<double>(std::count(seen.begin(), seen.end(), 1)),
               row = 4.0 * static_cast<double>(width);
  Buffer<int32_t> ids(device, tokens);
  ids.write(0, drawn);
  Buffer<float> table(device, kVocab * width);
  Buffer<Bf16> rounded(device, kVocab * width);
  const Weight<float> weight(Mat<float>(table.data(), kVocab, width), {rounded.data(), kVocab, width});
  report("embedding_forward", rows * row / 2 + u, [&] { exec.embedding_forward(ids.data(), weight, mat(y)); });
  report("embedding_backward", 2 * rows * row + u,
         [&] { exec.embedding_backward(ids.data(), mat(dy), Mat<float>(table.data(), kVocab, width)); });

  std::vector<ParamPiece> list;
  for (int64_t i = 0; i < kVec16; ++i) list.push_back({i * kPiece, static_cast<int32_t>(kPiece), 1});
  Buffer<ParamPiece> pieces(device, kVec16);
  pieces.write(0, list);
  const ParamPieces all{pieces.data(), kVec16};
  Buffer<float> grads(device, kVec16 * kPiece), values(device, kVec16 * kPiece), m(device, kVec16 * kPiece),
      v(device, kVec16 * kPiece);
  Buffer<double> sum(device, 1);
  const double bytes = 4.0 * kVec16 * kPiece;
  report("square_sum", bytes, [&] { exec.square_sum(grads.data(), all, sum.data()); });
  report("add_values", 3 * bytes, [&] { exec.add_values(grads.data(), grads.size(), values.data()); });
  const AdamWStep<float> step{0.9F, 0.1F, 0.95F, 0.05F, 1e-8F, 1, 1e-3F, 1, 1e-4F};
  Buffer<Bf16> upper(device, kVec16 * kPiece), m16(device, kVec16 * kPiece), v16(device, kVec16 * kPiece);
  Buffer<uint16_t> lo(device, kVec16 * kPiece);
  const ParamValues<float> whole{values.data()}, split{nullptr, upper.data(), lo.data(), nullptr};
  const MomentValues<float> wide_moments{m.data(), v.data()}, narrow{nullptr, nullptr, m16.data(), v16.data()};
  report("adamw, whole masters", 7 * bytes, [&] { exec.adamw(step, all, grads.data(), whole, wide_moments); });
  report("adamw", 7 * bytes, [&] { exec.adamw(step, all, grads.data(), split, wide_moments); });
  report("adamw, bf16 moments", 5 * bytes, [&] { exec.adamw(step, all, grads.data(), split, narrow); });
}

void time_all(int64_t tokens, int64_t width, int64_t channels) {
  Device& device = cuda_device();
  Arena arena(device), contexts;
  const Exec<Bf16> exec{table_of<Bf16>(device), device, arena, contexts};
  // Bits of small numbers: times do not depend on them, but zeros could be told apart by the memory.
  const auto tensor = [&](int64_t rows, int64_t cols) {
    Buffer<Bf16> memory(device, rows * cols);
    std::vector<Bf16> values(static_cast<size_t>(rows * cols));
    uint32_t seed = 1;
    for (Bf16& x : values) {
      seed = seed * 1664525u + 1013904223u;
      x.bits = static_cast<uint16_t>(0x3f00u | seed >> 25 | (seed >> 9 & 0x8000u));
    }
    memory.write(0, values);
    return memory;
  };
  double copy_rate = 0, long_rate = 0;  // GB/s
  const auto time = [&](const char* name, double bytes, const std::function<void()>& call) {
    const double ms = median_ms(device, call), rate = bytes / ms * 1e-6;
    std::printf("{\"operation\": \"%s\", \"ms\": %.4f, \"MB\": %.1f, \"GB_s\": %.0f", name, ms, bytes * 1e-6, rate);
    if (long_rate != 0) std::printf(", \"of_copy\": %.3f, \"of_long_copy\": %.3f", rate / copy_rate, rate / long_rate);
    std::printf("}\n");
    std::fflush(stdout);
    return rate;
  };
  const auto report = [&](const char* name, double bytes, const std::function<void()>& call) {
    time(name, bytes, call);
  };

  const double u = 2.0 * static_cast<double>(tokens * width), c = 2.0 * static_cast<double>(tokens * channels);
  {
    Buffer<Bf16> from = tensor(tokens, channels), to(device, tokens * channels);
    copy_rate = time("copy", 2 * u, [&] { device.copy(to.data(), from.data(), static_cast<size_t>(u)); });
    long_rate = time("long copy", 2 * c, [&] { device.copy(to.data(), from.data(), static_cast<size_t>(c)); });
  }
  {
    Buffer<Bf16> x = tensor(tokens, width), delta = tensor(tokens, width), y = tensor(tokens, width);
    Buffer<float> weight(device, width), rstd(device, tokens), dweight(device, width);
    const auto mat = [&](Buffer<Bf16>& b) { return Mat<Bf16>(b.data(), tokens, width); };
    report("rmsnorm_forward", 2 * u, [&] { exec.rmsnorm_forward(mat(x), weight.data(), 1e-6F, mat(y), rstd.data()); });
    report("add_rmsnorm_forward", 4 * u,
           [&] { exec.add_rmsnorm_forward(mat(x), mat(delta), weight.data(), 1e-6F, mat(y), rstd.data()); });
    report("rmsnorm_backward", 3 * u, [&] {
      exec.rmsnorm_backward(mat(delta), mat(x), weight.data(), rstd.data(), mat(y), dweight.data(), Write::kOverwrite);
    });
    report("rmsnorm_backward accumulating", 4 * u, [&] {
      exec.rmsnorm_backward(mat(delta), mat(x), weight.data(), rstd.data(), mat(y), dweight.data(), Write::kAccumulate);
    });
  }
  constexpr int64_t kWidth = 4, kSequences = 8;
  const SeqLayout layout = SeqLayout::uniform(kSequences, tokens / kSequences);
  Buffer<int64_t> offsets(device, kSequences + 1);
  offsets.write(0, layout.offsets());
  const PassLayout pass(layout, offsets.data(), nullptr);
  Buffer<Bf16> x = tensor(tokens, channels), dy = tensor(tokens, channels), y = tensor(tokens, channels);
  Buffer<float> weight(device, channels * kWidth), dweight(device, channels * kWidth);
  const auto mat = [&](Buffer<Bf16>& b) { return Mat<Bf16>(b.data(), tokens, channels); };
  report("short_conv_forward", 2 * c,
         [&] { exec.short_conv_forward(mat(x), weight.data(), nullptr, kWidth, pass, nullptr, nullptr, mat(y)); });
  report("short_conv_backward", 3 * c, [&] {
    exec.short_conv_backward(mat(dy), mat(x), weight.data(), nullptr, kWidth, pass, nullptr, mat(y), dweight.data(),
                             nullptr);
  });

  time_lo(tokens, width, exec, tensor, report, pass);
}

}  // namespace

int main(int argc, char** argv) {
  const auto number = [&](int i, int64_t usual) { return argc > i ? std::atoll(argv[i]) : usual; };
  time_all(number(1, 16384), number(2, 2048), number(3, 6144));
  return 0;
}
