#include "ops/profile.h"

#include <algorithm>
#include <type_traits>

#include "base/buffer.h"
#include "base/error.h"
#include "ops/backend.h"

namespace fw {
namespace {

Profile* the_profile = nullptr;
int depth = 0;  // of calls inside each other; models are run by one thread

double seconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

template <class T>
DeviceLimits limits_of(Device& device, int64_t rows) {
  constexpr int64_t kWidth = 2048;
  constexpr int kTimes = 5;
  Arena arena(device), contexts;
  const Exec<T> exec{ops_of<T>(device), device, arena, contexts};
  Buffer<T> x(device, rows * kWidth), y(device, rows * kWidth);
  Buffer<Wide<T>> weight(device, kWidth * kWidth);
  Buffer<Bf16> rounded(device, kWidth * kWidth);
  const Mat<const T> in(x.data(), rows, kWidth);
  const Mat<T> out(y.data(), rows, kWidth);
  const Weight<Wide<T>> w({weight.data(), kWidth, kWidth}, {rounded.data(), kWidth, kWidth});
  const auto best_of = [&](const auto& call) {
    double best = 0;
    for (int i = 0; i <= kTimes; ++i) {
      device.synchronise();
      const auto start = std::chrono::steady_clock::now();
      call();
      device.synchronise();
      const double seconds = seconds_since(start);
      if (i == 1 || (i > 1 && seconds < best)) best = seconds;  // the first makes ready
    }
    return best;
  };
  const double values = static_cast<double>(rows * kWidth);
  return {2 * values * sizeof(T) / best_of([&] { exec.copy_rows(in, out); }),
          2 * values * kWidth / best_of([&] { exec.linear_forward(in, w, nullptr, out, Write::kOverwrite); })};
}

}  // namespace

Profile::Profile() {
  if (the_profile != nullptr) fail_internal("profile: expected one at a time");
  the_profile = this;
}
Profile::~Profile() { the_profile = nullptr; }
Profile* Profile::current() { return the_profile; }

void Profile::add(const std::string& name, double seconds, double bytes, double flops) {
  OperationTime& of = of_[name];
  of.name = name;
  ++of.calls;
  of.seconds += seconds;
  of.bytes += bytes;
  of.flops += flops;
}

std::vector<OperationTime> Profile::by_time() const {
  std::vector<OperationTime> list;
  list.reserve(of_.size());
  for (const auto& [name, of] : of_) list.push_back(of);
  std::stable_sort(list.begin(), list.end(),
                   [](const OperationTime& a, const OperationTime& b) { return a.seconds > b.seconds; });
  return list;
}

ProfiledCall::ProfiledCall(const char* name, const Device& device, double bytes, double flops)
    // it is only waited for
    : name_(name),
      device_(the_profile == nullptr ? nullptr : const_cast<Device*>(&device)),
      bytes_(bytes),
      flops_(flops) {
  if (device_ == nullptr || depth++ > 0) return;
  device_->synchronise();
  start_ = std::chrono::steady_clock::now();
}

ProfiledCall::~ProfiledCall() {
  if (device_ == nullptr || --depth > 0 || the_profile == nullptr) return;
  try {
    device_->synchronise();
    the_profile->add(name_, seconds_since(start_), bytes_, flops_);
  } catch (...) {  // what failed on the device is said by whoever asks it next
  }
}

DeviceLimits measure_limits(Device& device, int64_t rows) {
  return device.kind() == FW_DEVICE_CPU ? limits_of<float>(device, rows) : limits_of<Bf16>(device, rows);
}

const char* kind_of_operation(const std::string& name) {
  if (name.starts_with("linear_") || name.starts_with("expert_linear_") || name.starts_with("cross_entropy_"))
    return "products";
  if (name.starts_with("recurrence_")) return "recurrence";
  return name.starts_with("attention_") ? "attention" : "rest";
}

// ---- what a call moves and computes, from its arguments ---------------------------------------------------------------------------

namespace {

double bytes_of(const auto& /*of no matrix*/) { return 0; }
template <class X>
double bytes_of(const Mat<X>& m) {
  return m.data == nullptr ? 0 : static_cast<double>(m.rows * m.cols) * sizeof(X);
}
template <class W>
double bytes_of(const Weight<W>& w) {
  return w.rounded.data != nullptr ? bytes_of(w.rounded) : bytes_of(w.values);
}

template <class X>
double area(const Mat<X>& m) {
  return static_cast<double>(m.rows) * static_cast<double>(m.cols);
}

// Bytes of a number of an embedding's table, or of its gradient.
template <class W>
double number_bytes(const Weight<W>& w) {
  return w.rounded.data != nullptr ? sizeof(Bf16) : sizeof(W);
}
template <class W>
double number_bytes(const Mat<W>&) {
  return sizeof(W);
}

// Pairs of tokens that see each other, of all sequences, times the channels of all query heads.
double pair_channels(const AttentionShape& shape, const PassLayout& layout) {
  double pairs = 0;
  for (int64_t n = 0; n < layout.host.count(); ++n) {
    const double T = static_cast<double>(layout.host.length(n)),
                 W = shape.window > 0 ? std::min(static_cast<double>(shape.window), T) : T;
    pairs += W * (W + 1) / 2 + (T - W) * W;
  }
  return pairs * static_cast<double>(shape.heads * shape.dim);
}

struct Cost {
  double bytes = 0, flops = 0;
};

enum Operation {
#define FW_OP(name, args) k_##name,
#include "ops/ops.def"
#undef FW_OP
};

// Of the pieces of all parameters, each piece as long as it may be.
double piece_values(const ParamPieces& pieces) { return 16384.0 * static_cast<double>(pieces.count); }

template <Operation op, class T, class... Args>
Cost cost_of_call(const Args&... args) {
  Cost cost{(bytes_of(args) + ... + 0.0), 0};
  const auto with = [&](const auto& body) { body(args...); };
  if constexpr (op == k_linear_forward) {
    with([&](const auto& x, const auto& w, auto, const auto&, Write) {
      cost.flops = 2 * area(x) * static_cast<double>(w.values.rows);
    });
  } else if constexpr (op == k_linear_add_forward) {
    with([&](const auto& x, const auto& w, const auto&, const auto&) {
      cost.flops = 2 * area(x) * static_cast<double>(w.values.rows);
    });
  } else if constexpr (op == k_linear_backward) {
    with([&](const auto&, const auto& x, const auto& w, const auto& dx, const auto& dw, auto, Write) {
      cost.flops = 2 * area(x) * static_cast<double>(w.values.rows) *
                   ((dx.data != nullptr ? 1 : 0) + (dw.data != nullptr ? 1 : 0));
    });
  } else if constexpr (op == k_expert_linear_forward) {
    with([&](const auto& x, const ExpertRows& rows, const auto& w, const auto&) {
      cost.flops = 2 * area(x) * static_cast<double>(w.values.rows) / static_cast<double>(rows.experts);
    });
  } else if constexpr (op == k_expert_linear_backward) {
    with([&](const auto&, const auto& x, const ExpertRows& rows, const auto& w, const auto& dx, const auto& dw) {
      cost.flops = 2 * area(x) * static_cast<double>(w.values.rows) / static_cast<double>(rows.experts) *
                   ((dx.data != nullptr ? 1 : 0) + (dw.data != nullptr ? 1 : 0));
    });
  } else if constexpr (op == k_cross_entropy_forward) {
    with([&](const auto& h, const auto& w, auto, auto, auto) {
      cost.flops = 2 * area(h) * static_cast<double>(w.values.rows);
      cost.bytes += 2 * static_cast<double>(h.rows * w.values.rows) * sizeof(T);  // logits
    });
  } else if constexpr (op == k_cross_entropy_backward) {
    with([&](const auto& h, const auto& w, auto, auto, const auto&, const auto&, auto) {
      cost.flops = 6 * area(h) * static_cast<double>(w.values.rows);
      cost.bytes += 4 * static_cast<double>(h.rows * w.values.rows) * sizeof(T);  // and their gradients
    });
  } else if constexpr (op == k_attention_forward) {
    with([&](const auto&, const auto&, const auto&, const AttentionShape& s, const PassLayout& layout, const auto&...) {
      cost.flops = 4 * pair_channels(s, layout);
    });
  } else if constexpr (op == k_attention_backward) {
    with([&](const auto&, const auto&, const auto&, const auto&, const AttentionShape& s, const PassLayout& layout,
             const auto&...) { cost.flops = 10 * pair_channels(s, layout); });
  } else if constexpr (op == k_embedding_forward || op == k_embedding_backward) {
    // Of the table the rows of the tokens alone.
    with([&](auto, const auto& a, const auto& b) {
      if constexpr (op == k_embedding_forward) {
        cost.bytes = bytes_of(b) + area(b) * number_bytes(a);
      } else {
        cost.bytes = bytes_of(a) + area(a) * 2 * number_bytes(b);
      }
    });
  } else if constexpr (op == k_round_values || op == k_add_values) {
    with([&](auto, int64_t n, auto) {
      cost.bytes = static_cast<double>(n) * (op == k_round_values ? sizeof(Wide<T>) + 2 : 3 * sizeof(Wide<T>));
    });
  } else if constexpr (op == k_exp_values_forward) {
    with([&](auto, int64_t n, auto) { cost.bytes = static_cast<double>(n) * 2 * sizeof(Wide<T>); });
  } else if constexpr (op == k_exp_values_backward) {
    with([&](auto, auto, int64_t n, auto) { cost.bytes = static_cast<double>(n) * 4 * sizeof(Wide<T>); });
  } else if constexpr (op == k_square_sum || op == k_bf16_square_sum) {
    with([&](auto, const ParamPieces& pieces, auto) {
      cost.bytes = piece_values(pieces) * (op == k_square_sum ? sizeof(Wide<T>) : sizeof(Bf16));
    });
  } else if constexpr (op == k_adamw) {
    // Gradients read, values and both moments read and written.
    with([&](const auto&, const ParamPieces& pieces, auto, const auto&, const MomentValues<Wide<T>>& moments) {
      cost.bytes = piece_values(pieces) *
                   (3 * sizeof(Wide<T>) + 4 * (moments.first != nullptr ? sizeof(Wide<T>) : sizeof(Bf16)));
    });
  }
  return cost;
}

template <class T, Operation op, auto member, class Function>
struct Timed;
template <class T, Operation op, auto member, class... Args>
struct Timed<T, op, member, void (*)(const Exec<T>&, Args...)> {
  static constexpr const char* kNames[] = {
#define FW_OP(name, args) #name,
#include "ops/ops.def"
#undef FW_OP
  };
  static void call(const Exec<T>& exec, Args... args) {
    const Cost cost = cost_of_call<op, T>(args...);
    const ProfiledCall timed(kNames[op], exec.device, cost.bytes, cost.flops);
    (plain_table_of<T>(exec.device).*member)(exec, args...);
  }
};

// Of a fused operation, which times itself (fused.cpp).
template <class T, auto member, class Function>
struct Plain;
template <class T, auto member, class... Args>
struct Plain<T, member, bool (*)(const Exec<T>&, Args...)> {
  static bool call(const Exec<T>& exec, Args... args) {
    const auto function = plain_table_of<T>(exec.device).*member;
    return function != nullptr && function(exec, args...);
  }
};

}  // namespace

template <class T>
const Ops<T>& profiled_ops() {
  static constexpr Ops<T> kTable = [] {
    Ops<T> ops;
#define FW_FUSED_OP(name, args) ops.name = &Plain<T, &Ops<T>::name, decltype(ops.name)>::call;
#define FW_OP(name, args) ops.name = &Timed<T, k_##name, &Ops<T>::name, decltype(ops.name)>::call;
#include "ops/ops.def"
#undef FW_OP
    return ops;
  }();
  return kTable;
}

template const Ops<float>& profiled_ops<float>();
template const Ops<double>& profiled_ops<double>();
template const Ops<Bf16>& profiled_ops<Bf16>();

}  // namespace fw
