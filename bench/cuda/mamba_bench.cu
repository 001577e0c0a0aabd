// Times of the state-space layers on a GPU in bf16, one JSON line each, milliseconds by events, medians of 20 after 5:
//   mamba3    Mamba-3's recurrence (nn/mamba3_scan.h) alongside a call of the rule mamba2 over rows of the same shape, which is the scan inside it, and the
//   same
//             with one group of keys; then a layer's mixer of each, products with weights included
//   scan      the selective scan of Mamba (1), [B, T] tokens, D channels, N states
//   mesa      Mesa's recurrence as its layer calls it (nn/mesa_mixer.cpp): the solve and the scan over values [v | k], with STEPS of conjugate gradients,
//             0: exact
//
//   mamba_bench [mamba3 B T H N P RANK GROUPS]... [scan B T D N]... [mesa B T H K STEPS]...
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <iterator>
#include <memory>
#include <string>
#include <vector>

#include "base/arena_mark.h"
#include "base/buffer.h"
#include "base/random.h"
#include "device_times.h"
#include "gpu/launch.h"
#include "nn/mamba3_mixer.h"
#include "nn/mamba3_scan.h"
#include "nn/mesa_mixer.h"
#include "nn/mixers.h"
#include "nn/ssd_mixer.h"
#include "ops/backend.h"

namespace {

using namespace fw;
using bench::median_ms;

// Device memory with random numbers, and what passes share.
struct Setting {
  Device& device;
  Arena arena{device}, contexts;
  Exec<Bf16> exec{ops_of<Bf16>(device), device, arena, contexts};
  Recurrences<Bf16> recurrences{device};
  SeqLayout sequences;
  Buffer<int64_t> offsets;
  PassLayout layout;
  Random random{1};

  Setting(Device& d, int64_t batch, int64_t length)
      : device(d),
        sequences(SeqLayout::uniform(batch, length)),
        offsets(d, batch + 1),
        layout(sequences, offsets.data(), nullptr) {
    offsets.write(0, sequences.offsets());
  }
  std::vector<float> numbers(int64_t n, double low, double high) {
    std::vector<float> values(static_cast<size_t>(std::min<int64_t>(n, 1 << 20)));
    for (float& x : values) x = static_cast<float>(low + (high - low) * random.uniform());
    return values;
  }
  // A million numbers, again and again.
  Mat<Bf16> matrix(int64_t rows, int64_t cols, double low = -1, double high = 1) {
    const std::vector<float> values = numbers(rows * cols, low, high);
    std::vector<Bf16> rounded(values.size());
    round_to_bf16(static_cast<int64_t>(values.size()), values.data(), rounded.data());
    Bf16* const memory = arena.alloc<Bf16>(rows * cols);
    fill(memory, rounded, rows * cols);
    return {memory, rows, cols};
  }
  Mat<float> wide(int64_t rows, int64_t cols, double low = -1, double high = 1) {
    float* const memory = arena.alloc<float>(rows * cols);
    fill(memory, numbers(rows * cols, low, high), rows * cols);
    return {memory, rows, cols};
  }
  template <class T>
  void fill(T* memory, const std::vector<T>& values, int64_t count) {
    const auto size = static_cast<int64_t>(values.size());
    for (int64_t i = 0; i < count; i += size)
      device.from_host(memory + i, values.data(), sizeof(T) * static_cast<size_t>(std::min(size, count - i)));
  }
  double time(const std::function<void()>& call) {
    return median_ms(device, [&] {
      const ArenaMark mark(arena);
      call();
    });
  }
};

// Of a recurrence alone: forward that keeps nothing, forward that keeps, backward.
struct Times {
  double forward, kept, backward;
};
void print(const std::string& what, const std::string& shape, const Times& t) {
  std::printf(
      "{\"what\": \"%s\", %s, \"forward_ms\": %.4f, \"forward_kept_ms\": %.4f, \"backward_ms\": %.4f, \"sum_ms\": "
      "%.4f}\n",
      what.c_str(), shape.c_str(), t.forward, t.kept, t.backward, t.kept + t.backward);
  std::fflush(stdout);
}

Times time_mamba2(Setting& s, int64_t rows, int64_t key_heads, int64_t heads, int64_t state, int64_t dim,
                  int64_t rows_of_token) {
  const ArenaMark mark(s.arena);
  RecurrenceInputs<Bf16> in, d;
  in.q = s.matrix(rows, key_heads * state), in.k = s.matrix(rows, key_heads * state),
  in.v = s.matrix(rows, heads * dim);
  in.write_gate = s.matrix(rows, heads, 0, 0.1), in.g = s.wide(rows, heads, -0.1, 0);
  d.q = s.matrix(rows, key_heads * state), d.k = s.matrix(rows, key_heads * state), d.v = s.matrix(rows, heads * dim);
  d.write_gate = s.matrix(rows, heads), d.g = s.wide(rows, heads);
  const Mat<Bf16> o = s.matrix(rows, heads * dim), d_o = s.matrix(rows, heads * dim);
  const Recurrence<Bf16>& recurrence = s.recurrences.of(
      {Mamba3Scan<Bf16>::rule(), key_heads, heads, state, dim, FW_FORM_AUTO, 1.0, rows_of_token}, s.sequences);
  void* const saved = s.arena.alloc<std::byte>(static_cast<int64_t>(recurrence.saved_bytes()) + 256);
  const double forward = s.time([&] { recurrence.forward(in, o, nullptr, nullptr, nullptr, s.arena); });
  const double kept = s.time([&] { recurrence.forward(in, o, nullptr, nullptr, saved, s.arena); });
  return {forward, kept, s.time([&] { recurrence.backward(in, d_o, d, saved, s.arena); })};
}

Times time_scan(Setting& s, const Mamba3Shape& shape, const std::string& text) {
  const ArenaMark mark(s.arena);
  const int64_t T = s.sequences.tokens(), R = shape.rank, shared = R * shape.groups * shape.state,
                keys = shape.heads * shape.state;
  const int64_t values = shape.heads * shape.head_dim, biases = R * keys;
  Mamba3Inputs<Bf16> in{s.matrix(T, shared),
                        s.matrix(T, shared),
                        s.matrix(T * R, values),
                        s.matrix(T, shape.heads, 0.001, 0.1),
                        s.matrix(T, shape.heads, -2, 2),
                        s.wide(T, shape.heads, -0.1, 0),
                        s.matrix(T, shape.angles)};
  Mamba3Inputs<Bf16> d{s.matrix(T, shared),      s.matrix(T, shared),      s.matrix(T * R, values),
                       s.matrix(T, shape.heads), s.matrix(T, shape.heads), s.wide(T, shape.heads),
                       s.matrix(T, shape.angles)};
  const Mat<Bf16> o = s.matrix(T * R, values), d_o = s.matrix(T * R, values);
  const Mamba3Parameters<float> parameters{s.wide(1, biases).data, s.wide(1, biases).data, s.wide(1, shape.heads).data},
      gradients{s.wide(1, biases).data, s.wide(1, biases).data, s.wide(1, shape.heads).data};
  const Mamba3Parameters<const float> read{parameters.q_bias, parameters.k_bias, parameters.skip};
  const Mamba3Scan<Bf16> scan(shape);
  Mamba3Scan<Bf16>::Context context;
  const auto forward = [&](bool keep) {
    scan.forward(s.exec, s.recurrences, s.layout, FW_FORM_AUTO, in, read, {}, keep, context, o);
  };
  Times times{};
  times.forward = s.time([&] { forward(false); });
  times.kept = s.time([&] { forward(true); });
  forward(true);
  times.backward = s.time([&] {
    scan.backward(s.exec, s.recurrences, s.layout, FW_FORM_AUTO, in, read, context, d_o, nullptr, d, gradients, {});
  });
  // What the scan does around the recurrence, of the memory of the last forward.
  const Mat<Bf16> dq = s.matrix(T * R, keys), dk = s.matrix(T * R, keys);
  const Mat<float> dqk_self = s.wide(T, shape.heads * R * R), dnow = s.wide(T, shape.heads),
                   dahead = s.wide(T, shape.heads);
  const double work_tile = s.time([&] {
    s.exec.mamba3_rotary_forward(shape, in.q, in.k, read.q_bias, read.k_bias, in.angle, in.dt, s.layout, nullptr,
                                 context.checkpoints, context.rows.q, context.rows.k, context.qk_self);
  });
  const double near = s.time(
      [&] { s.exec.mamba3_diag_forward(shape, context.qk_self, in.v, context.now, context.ahead, read.skip, o); });
  const double weights = s.time([&] {
    s.exec.mamba3_weights_forward(shape, in.dt, in.trap, in.g, s.layout, context.now, context.ahead,
                                  context.rows.write_gate, context.rows.g, context.first);
  });
  const double rotate_back = s.time([&] {
    s.exec.mamba3_rotary_backward(shape, dq, dk, dqk_self, in.q, in.k, read.q_bias, read.k_bias, in.angle, in.dt,
                                  context.checkpoints, s.layout, d.q, d.k, d.angle, d.dt, gradients.q_bias,
                                  gradients.k_bias, nullptr);
  });
  const double near_back = s.time([&] {
    s.exec.mamba3_diag_backward(shape, d_o, context.qk_self, in.v, context.now, context.ahead, read.skip, d.v, dqk_self,
                                dnow, dahead, gradients.skip);
  });
  std::printf(
      "{\"what\": \"mamba3 parts\", %s, \"turn_ms\": %.4f, \"near_ms\": %.4f, \"weights_ms\": %.4f, "
      "\"turn_backward_ms\": %.4f, \"near_backward_ms\": %.4f}\n",
      text.c_str(), work_tile, near, weights, rotate_back, near_back);
  return times;
}

// A layer's mixer with its products, over x [T, hidden].
Times time_mixer(Setting& s, const MixerSpec& spec, int64_t hidden) {
  const ArenaMark mark(s.arena);
  Params<float> params;
  const std::unique_ptr<Mixer<Bf16>> mixer = make_mixer<Bf16>(spec, "m.", params);
  params.allocate(s.device, MasterFormat::kBf16PlusLow);
  Random random(2);
  params.init(random);
  params.zero_grads();
  const int64_t T = s.sequences.tokens();
  const Mat<Bf16> x = s.matrix(T, hidden), y = s.matrix(T, hidden), dy = s.matrix(T, hidden), dx = s.matrix(T, hidden);
  Pass<Bf16> pass{params, s.layout, s.exec, s.recurrences};
  const double forward = s.time([&] { mixer->forward(pass, x, {}, y); });
  pass.keep = true;
  const double kept = s.time([&] {
    const Arena::Mark host = s.contexts.mark();
    mixer->forward(pass, x, {}, y);
    s.contexts.rewind(host);
  });
  MixerContext* const context = mixer->forward(pass, x, {}, y);
  return {forward, kept, s.time([&] { mixer->backward(pass, context, x, dy, dx); })};
}

void mamba3(Device& device, const std::vector<int64_t>& n) {
  const int64_t B = n[0], T = n[1], H = n[2], N = n[3], P = n[4], R = n[5], G = n[6], hidden = H * P / 2;
  Setting s(device, B, T);
  char text[200];
  std::snprintf(
      text, sizeof text, "\"B\": %lld, \"T\": %lld, \"H\": %lld, \"N\": %lld, \"P\": %lld, \"R\": %lld, \"G\": %lld",
      static_cast<long long>(B), static_cast<long long>(T), static_cast<long long>(H), static_cast<long long>(N),
      static_cast<long long>(P), static_cast<long long>(R), static_cast<long long>(G));
  print("mamba2 recurrence, a key head a value head", text, time_mamba2(s, B * T * R, H, H, N, P, R));
  if (R == 1) print("mamba2 recurrence, keys in groups", text, time_mamba2(s, B * T, G, H, N, P, 1));
  const Mamba3Shape shape{H, G, N, P, R, N / 4, R > 1};
  print("mamba3 recurrence", text, time_scan(s, shape, text));
  Mamba3Spec spec;
  spec.hidden = hidden, spec.heads = H, spec.head_dim = P, spec.groups = G, spec.state = N,
  spec.mimo_rank = R > 1 ? R : 0, spec.angles = shape.angles;
  spec.rotate_half = shape.rotate_half, spec.decay = {false, 1e-4};
  print("mamba3 mixer", text, time_mixer(s, spec, hidden));
  SsdSpec ssd;
  ssd.hidden = hidden, ssd.heads = H, ssd.head_dim = P, ssd.groups = G, ssd.state = N, ssd.conv_size = 4;
  print("mamba2 mixer", text, time_mixer(s, ssd, hidden));
}

void selective(Device& device, const std::vector<int64_t>& n) {
  const int64_t B = n[0], T = n[1], D = n[2], N = n[3], rows = B * T;
  Setting s(device, B, T);
  const Mat<Bf16> u = s.matrix(rows, D), step = s.matrix(rows, D, 0.001, 0.1), q = s.matrix(rows, N),
                  k = s.matrix(rows, N), y = s.matrix(rows, D);
  const Mat<Bf16> dy = s.matrix(rows, D), du = s.matrix(rows, D), dstep = s.matrix(rows, D), dq = s.matrix(rows, N),
                  dk = s.matrix(rows, N);
  const Mat<float> a_log = s.wide(D, N, 0, 2.7), skip = s.wide(1, D), da = s.wide(D, N), dskip = s.wide(1, D),
                   checkpoints = s.wide(chunk_checkpoints(rows, B) * N, D);
  Times times{};
  const auto forward = [&](float* keep) {
    s.exec.selective_scan_forward(ScanLaw::kMamba, u, step, q, k, a_log.data, skip.data, s.layout, nullptr, nullptr,
                                  keep, y);
  };
  times.forward = s.time([&] { forward(nullptr); });
  times.kept = s.time([&] { forward(checkpoints.data); });
  times.backward = s.time([&] {
    s.exec.selective_scan_backward(ScanLaw::kMamba, dy, u, step, q, k, a_log.data, skip.data, s.layout,
                                   checkpoints.data, nullptr, du, dstep, dq, dk, da.data, dskip.data, nullptr);
  });
  char text[120];
  std::snprintf(text, sizeof text, "\"B\": %lld, \"T\": %lld, \"D\": %lld, \"N\": %lld", static_cast<long long>(B),
                static_cast<long long>(T), static_cast<long long>(D), static_cast<long long>(N));
  print("selective scan", text, times);
}

void mesa(Device& device, const std::vector<int64_t>& n) {
  const int64_t B = n[0], T = n[1], H = n[2], K = n[3], rows = B * T;
  Setting s(device, B, T);
  const MesaShape shape{H, K, K, 0.25, n[4], 1e-6};
  RecurrenceInputs<Bf16> in, d, e;
  const auto tokens = [&](RecurrenceInputs<Bf16>& of, double size) {
    of.q = s.matrix(rows, H * K, -size, size), of.k = s.matrix(rows, H * K, -size, size),
    of.v = s.matrix(rows, H * 2 * K);
    of.write_gate = s.matrix(rows, H, 0, 1), of.g = s.wide(rows, H, -0.1, 0);
  };
  const double unit = std::sqrt(3.0 / static_cast<double>(K));  // rows of length 1
  tokens(in, unit), tokens(d, 1), tokens(e, 1);
  const Mat<Bf16> rhs = s.matrix(rows, H * K, -unit, unit), o = s.matrix(rows, H * 2 * K),
                  d_o = s.matrix(rows, H * 2 * K), y = s.matrix(rows, H * K);
  const Mat<float> lambda = s.wide(1, H * K), dlambda = s.wide(1, H * K);
  const Recurrence<Bf16>& recurrence =
      s.recurrences.of({MesaSpec::rule(), H, H, K, 2 * K, FW_FORM_AUTO, 1.0}, s.sequences);
  void* const saved = s.arena.alloc<std::byte>(static_cast<int64_t>(recurrence.saved_bytes()) + 256);
  const auto solve = [&](Mat<Bf16> of, Mat<Bf16> to) {
    s.exec.mesa_solve(shape, of, in.k, in.write_gate, in.g, lambda.data, s.layout, nullptr, to);
  };
  const auto forward = [&](void* keep) {
    solve(rhs, in.q);
    recurrence.forward(in, o, nullptr, nullptr, keep, s.arena);
  };
  Times times{};
  times.forward = s.time([&] { forward(nullptr); });
  times.kept = s.time([&] { forward(saved); });
  times.backward = s.time([&] {
    recurrence.backward(in, d_o, d, saved, s.arena);
    solve(d.q, y);
    RecurrenceInputs<Bf16> read = in;
    read.q = y;
    recurrence.backward(read, d_o, e, nullptr, s.arena);
    s.exec.mesa_lambda_backward(in.q, y, lambda.data, dlambda.data);
  });
  char text[120];
  std::snprintf(text, sizeof text, "\"B\": %lld, \"T\": %lld, \"H\": %lld, \"K\": %lld, \"steps\": %lld",
                static_cast<long long>(B), static_cast<long long>(T), static_cast<long long>(H),
                static_cast<long long>(K), static_cast<long long>(n[4]));
  print("mesa", text, times);
}

struct Mode {
  const char* name;
  int numbers;
  void (*run)(Device&, const std::vector<int64_t>&);
};
constexpr Mode kModes[] = {{"mamba3", 7, mamba3}, {"scan", 4, selective}, {"mesa", 5, mesa}};

}  // namespace

int main(int argc, char** argv) {
  Device& device = cuda_device();
  for (int i = 1; i < argc;) {
    const auto* const mode = std::find_if(std::begin(kModes), std::end(kModes),
                                          [&](const Mode& m) { return std::strcmp(argv[i], m.name) == 0; });
    if (mode == std::end(kModes) || i + mode->numbers >= argc) {
      std::fprintf(stderr, "mamba_bench [mamba3 B T H N P RANK GROUPS]... [scan B T D N]... [mesa B T H K STEPS]...\n");
      return 2;
    }
    std::vector<int64_t> numbers;
    for (int k = 1; k <= mode->numbers; ++k) numbers.push_back(std::atoll(argv[i + k]));
    mode->run(device, numbers);
    i += mode->numbers + 1;
  }
  return 0;
}
