// fw_short_conv_* of the C header on top of the engine's kernels (short_conv.h): checks, layout of the workspace.
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>
#include <optional>
#include <string_view>
#include <utility>
#include <vector>

#include "base/error.h"
#include "fastweight/fastweight.h"
#include "gpu/device.h"
#include "ops/cuda/scratch.h"
#include "ops/short_conv.h"
#include "rule/enum_names.h"
#include "rule/reserved.h"
#include "scan/backend.h"
#include "scan/status.h"
#include "scan/struct_size.h"

namespace fw {
namespace {

constexpr int64_t kMostTokens = (int64_t{1} << 31) - 1024;  // of a device's grid
constexpr int64_t kMostChannels = int64_t{1} << 24, kMostWidth = 256, kMostSequences = int64_t{1} << 30;

// Bytes of the structs in the first version that has them.
constexpr size_t kFirstConv = 112, kFirstTensors = 488, kFirstSizes = 48;
static_assert(sizeof(fw_short_conv) >= kFirstConv && sizeof(fw_short_conv_tensors) >= kFirstTensors);

fw_short_conv default_conv() {
  fw_short_conv conv;
  std::memset(&conv, 0, sizeof(conv));
  conv.size = sizeof(conv);
  conv.dtype = FW_F32;
  conv.device_number = -1;
  conv.seqlens.bits = 64;
  return conv;
}
fw_short_conv_tensors default_tensors() {
  fw_short_conv_tensors tensors;
  std::memset(&tensors, 0, sizeof(tensors));
  tensors.size = sizeof(tensors);
  return tensors;
}

fw_short_conv_tensors complete(const fw_short_conv_tensors* p, const char* name) {
  return complete_struct(not_null(p, name), default_tensors(), kFirstTensors, name, "fw_short_conv_tensors");
}

void check_range(std::string_view name, int64_t value, int64_t least, int64_t most) {
  if (value < least || value > most) fail_usage("conv: {}: expected {} to {}, got {}", name, least, most, value);
}

template <class Int>
std::vector<int64_t> read_offsets(const fw_short_conv& conv) {
  const Int* p = static_cast<const Int*>(conv.seqlens.cu_seqlens);
  std::vector<int64_t> offsets(p, p + conv.seqlens.num_sequences + 1);
  if (offsets.front() != 0) fail_usage("conv: seqlens.cu_seqlens[0]: expected 0, got {}", offsets.front());
  for (size_t i = 1; i < offsets.size(); ++i) {
    if (offsets[i] < offsets[i - 1]) {
      fail_usage("conv: seqlens.cu_seqlens[{}]: expected at least {} (offsets do not decrease), got {}", i,
                 offsets[i - 1], offsets[i]);
    }
  }
  if (offsets.back() != conv.T)
    fail_usage("conv: seqlens.cu_seqlens[{}]: expected T = {}, got {}", offsets.size() - 1, conv.T, offsets.back());
  return offsets;
}

// A checked descriptor.
struct ConvPlan {
  fw_short_conv conv;
  bool cuda = false;
  int64_t sequences = 0;                 // N
  SeqLayout layout;                      // of the host's offsets; otherwise layout_of() fills it
  const void* device_offsets = nullptr;  // the caller's, of memory DEVICE
  int64_t tokens() const { return conv.B * conv.T; }
  int64_t runs() const { return cuda::parts_of(tokens(), cuda::kConvRun); }
};

ConvPlan make_conv_plan(const fw_short_conv* given) {
  ConvPlan plan;
  fw_short_conv& conv = plan.conv;
  conv = complete_struct(not_null(given, "conv"), default_conv(), kFirstConv, "conv", "fw_short_conv");
  check_reserved("conv: reserved", conv.reserved);
  for (const int64_t x : conv.seqlens.reserved) check_reserved("conv: seqlens.reserved", x);
  if (conv.device != FW_DEVICE_CPU && conv.device != FW_DEVICE_CUDA)
    fail_usage("conv: device: expected FW_DEVICE_CPU or FW_DEVICE_CUDA, got {}", enum_text<fw_device>(conv.device));
  plan.cuda = conv.device == FW_DEVICE_CUDA;
  if (conv.dtype != FW_F32 && conv.dtype != (plan.cuda ? FW_BF16 : FW_F64)) {
    fail_usage("conv: dtype: expected FW_F32 or {} {}, got {}", plan.cuda ? "FW_BF16" : "FW_F64",
               plan.cuda ? "on CUDA" : "on the CPU", enum_text<fw_dtype>(conv.dtype));
  }
  if (conv.device_number < -1) {
    fail_usage("conv: device_number: expected -1 (the current one) or a number from 0 on, got {}", conv.device_number);
  }
  check_range("B", conv.B, 0, kMostTokens);
  check_range("T", conv.T, 0, kMostTokens);
  check_range("D", conv.D, 1, kMostChannels);
  check_range("W", conv.W, 1, plan.cuda ? cuda::kMostConvWidth : kMostWidth);
  int64_t all = 0;
  if (__builtin_mul_overflow(conv.B, conv.T, &all) || all > kMostTokens)
    fail_usage("conv: T: expected at most {} tokens in all, got {} sequences of {}", kMostTokens, conv.B, conv.T);
  if (conv.seqlens.cu_seqlens == nullptr) {
    plan.sequences = conv.B;
    return plan;
  }
  if (conv.B != 1) fail_usage("conv: B: expected 1 with cu_seqlens, got {}", conv.B);
  check_range("seqlens.num_sequences", conv.seqlens.num_sequences, 1, kMostSequences);
  if (conv.seqlens.bits != 32 && conv.seqlens.bits != 64)
    fail_usage("conv: seqlens.bits: expected 32 or 64, got {}", conv.seqlens.bits);
  plan.sequences = conv.seqlens.num_sequences;
  if (conv.seqlens.memory == FW_SEQLENS_DEVICE && plan.cuda) {
    check_range("seqlens.max_seqlen", conv.seqlens.max_seqlen, 0, conv.T);
    plan.device_offsets = conv.seqlens.cu_seqlens;
    return plan;
  }
  if (conv.seqlens.memory != FW_SEQLENS_HOST) {
    fail_usage("conv: seqlens.memory: expected FW_SEQLENS_HOST{}, got {}",
               plan.cuda ? " or FW_SEQLENS_DEVICE" : " on the CPU", enum_text<fw_seqlens_memory>(conv.seqlens.memory));
  }
  plan.layout = SeqLayout(conv.seqlens.bits == 32 ? read_offsets<int32_t>(conv) : read_offsets<int64_t>(conv));
  return plan;
}

// Parts of the workspace, one after the other.
class WorkspaceCursor {
 public:
  explicit WorkspaceCursor(void* base) : base_(static_cast<char*>(base)) {}
  template <class T>
  T* next(int64_t count) {
    T* const address = base_ == nullptr ? nullptr : reinterpret_cast<T*>(base_ + bytes_);
    constexpr size_t kAlign = 256;
    bytes_ += (static_cast<size_t>(count) * sizeof(T) + kAlign - 1) / kAlign * kAlign;
    return address;
  }
  size_t bytes() const { return bytes_; }

 private:
  char* base_;
  size_t bytes_ = 0;
};

// On CUDA: offsets of the sequences, what makes them, and partial sums of backward.
struct ConvSpace {
  int64_t* offsets = nullptr;
  int32_t* scratch = nullptr;
  float *partial = nullptr, *partial_bias = nullptr;
  size_t bytes = 0;
  ConvSpace(const ConvPlan& plan, bool backward, void* base) {
    if (!plan.cuda) return;
    WorkspaceCursor cursor(base);
    offsets = cursor.next<int64_t>(plan.sequences + 1);
    if (plan.device_offsets != nullptr) scratch = cursor.next<int32_t>(2 * (plan.sequences + 1));
    if (backward) {
      partial = cursor.next<float>(plan.runs() * plan.conv.D * plan.conv.W);
      partial_bias = cursor.next<float>(plan.runs() * plan.conv.D);
    }
    bytes = cursor.bytes();
  }
};

// The sequences as kernels take them. Forward looks nothing up where each sequence has one token. With offsets on the
// device the last of N sequences has all tokens on the host's side.
PassLayout layout_of(ConvPlan& plan, const ConvSpace& space, bool backward) {
  if (plan.conv.seqlens.cu_seqlens == nullptr) {
    plan.layout = SeqLayout::uniform(plan.conv.B, plan.conv.T);
  } else if (plan.device_offsets != nullptr) {
    std::vector<int64_t> offsets(static_cast<size_t>(plan.sequences) + 1, 0);
    offsets.back() = plan.conv.T;
    plan.layout = SeqLayout(std::move(offsets));
  }
  if (!plan.cuda) return {plan.layout};
  if (plan.device_offsets != nullptr) {
    const int64_t longest = plan.conv.seqlens.max_seqlen > 0 ? plan.conv.seqlens.max_seqlen : plan.conv.T;
    cuda::make_conv_offsets(plan.device_offsets, plan.conv.seqlens.bits == 64, plan.sequences, longest, plan.conv.T,
                            space.scratch, space.offsets, plan.conv.stream);
  } else if (backward || !plan.layout.single_tokens()) {
    cuda::upload_conv_offsets(plan.layout.offsets().data(), plan.sequences, space.offsets, plan.conv.stream);
  }
  return {plan.layout, space.offsets, nullptr};
}

std::string text_of(const int64_t* shape, int rank) {
  std::string text = "[";
  for (int i = 0; i < rank; ++i) text += fmt::format("{}{}", i > 0 ? ", " : "", shape[i]);
  return text + "]";
}

struct TensorName {
  const char* prefix;
  const char* name;
};

// A tensor of that shape and type; contiguous but for the strides of rows with `rows`. Null data: absent.
void check_tensor(TensorName of, const fw_tensor& t, int32_t dtype, std::initializer_list<int64_t> dims, bool required,
                  bool rows) {
  const char *prefix = of.prefix, *name = of.name;
  bool empty = false;
  for (const int64_t d : dims) empty = empty || d == 0;
  if (t.data == nullptr) {
    if (required && !empty) fail_usage("{}{}: expected a tensor, got none", prefix, name);
    return;
  }
  if (t.dtype != dtype) {
    fail_usage("{}{}: dtype: expected {}, got {}", prefix, name, enum_text<fw_dtype>(dtype),
               enum_text<fw_dtype>(t.dtype));
  }
  const int rank = static_cast<int>(dims.size());
  if (t.rank != rank) fail_usage("{}{}: rank: expected {}, got {}", prefix, name, rank, t.rank);
  if (!std::equal(dims.begin(), dims.end(), t.shape)) {
    fail_usage("{}{}: shape: expected {}, got {}", prefix, name, text_of(dims.begin(), rank), text_of(t.shape, rank));
  }
  if (empty) return;
  int64_t dense = 1;
  for (int i = rank - 1; i >= 0; --i) {
    if (t.shape[i] > 1) {
      if (rows && i == 1) {
        if (t.stride[1] < t.shape[2] || t.stride[1] > std::numeric_limits<int64_t>::max() / (2 * kMostTokens))
          fail_usage("{}{}: stride[1]: expected D = {} or more elements, got {}", prefix, name, t.shape[2],
                     t.stride[1]);
        dense = t.stride[1];
      } else if (t.stride[i] != dense && !(rows && i == 0 && t.shape[1] == 1 && t.stride[0] >= t.shape[2])) {
        fail_usage("{}{}: stride[{}]: expected {}{}, got {}", prefix, name, i, dense,
                   rows && i == 0 ? ", that of all tokens" : " (contiguous)", t.stride[i]);
      } else if (rows && i == 0 && t.stride[0] > (kMostExtent - dense) / (t.shape[0] - 1)) {
        fail_usage("{}{}: stride[0]: expected strides that reach at most {} elements, got {} for {} elements", prefix,
                   name, kMostExtent, t.stride[0], t.shape[0]);
      }
    }
    dense *= t.shape[i];
  }
}

template <class T>
Mat<T> rows_of(const ConvPlan& plan, const fw_tensor& t) {
  const int64_t stride = t.shape[1] > 1 ? t.stride[1] : t.shape[0] > 1 ? t.stride[0] : plan.conv.D;
  return {static_cast<T*>(t.data), plan.tokens(), plan.conv.D, stride};
}

int32_t parameter_type(const ConvPlan& plan) { return plan.conv.dtype == FW_F64 ? FW_F64 : FW_F32; }

void check_sources(const ConvPlan& plan, const fw_short_conv_tensors& t) {
  const fw_short_conv& c = plan.conv;
  check_tensor({"", "x"}, t.x, c.dtype, {c.B, c.T, c.D}, true, true);
  check_tensor({"", "weight"}, t.weight, parameter_type(plan), {c.D, c.W}, true, false);
  check_tensor({"", "bias"}, t.bias, parameter_type(plan), {c.D}, false, false);
  check_tensor({"", "initial_state"}, t.initial_state, c.dtype, {plan.sequences, c.W - 1, c.D}, false, false);
}

void require_absent(TensorName of, const fw_tensor& t, const char* why) {
  if (t.data != nullptr) fail_usage("{}{}: expected none ({}), got a tensor", of.prefix, of.name, why);
}

template <class T>
void run_forward(const ConvPlan& plan, const fw_short_conv_tensors& t, const PassLayout& layout) {
  const auto* weight = static_cast<const Wide<T>*>(t.weight.data);
  const auto* bias = static_cast<const Wide<T>*>(t.bias.data);
  const Mat<const T> x = rows_of<const T>(plan, t.x);
  const Mat<T> y = rows_of<T>(plan, t.y);
  const T* from = static_cast<const T*>(t.initial_state.data);
  T* to = static_cast<T*>(t.final_state.data);
  if constexpr (!std::is_same_v<T, Bf16>) {
    if (!plan.cuda) return host_conv_forward(x, weight, bias, plan.conv.W, layout, from, to, y);
  }
  if constexpr (!std::is_same_v<T, double>)
    cuda::conv_forward(x, weight, bias, plan.conv.W, layout, from, to, y, plan.conv.stream);
}

template <class T>
void run_backward(const ConvPlan& plan, const fw_short_conv_tensors& t, const fw_short_conv_tensors& grads,
                  const ConvSpace& space, const PassLayout& layout) {
  using W = Wide<T>;
  const W *weight = static_cast<const W*>(t.weight.data), *bias = static_cast<const W*>(t.bias.data);
  W *dweight = static_cast<W*>(grads.weight.data), *dbias = static_cast<W*>(grads.bias.data);
  const Mat<const T> x = rows_of<const T>(plan, t.x), dy = rows_of<const T>(plan, grads.y);
  const Mat<T> dx = rows_of<T>(plan, grads.x);
  const T* from = static_cast<const T*>(t.initial_state.data);
  const int64_t weights = plan.conv.D * plan.conv.W;
  if constexpr (!std::is_same_v<T, Bf16>) {
    if (!plan.cuda) {
      std::fill_n(dweight, weights, W(0));
      if (bias != nullptr) std::fill_n(dbias, plan.conv.D, W(0));
      return host_conv_backward(dy, x, weight, bias, plan.conv.W, layout, from, dx, dweight, dbias);
    }
  }
  if constexpr (!std::is_same_v<T, double>) {
    cuda::clear_floats(dweight, weights, plan.conv.stream);
    if (bias != nullptr) cuda::clear_floats(dbias, plan.conv.D, plan.conv.stream);
    if (plan.tokens() == 0) return;
    cuda::conv_backward(dy, x, weight, bias, plan.conv.W, layout, from, dx, dweight, dbias, space.partial,
                        space.partial_bias, plan.conv.stream);
  }
}

// run with a value of the type of the descriptor's tensors.
template <class Run>
void with_type(const ConvPlan& plan, const Run& run) {
  if (plan.conv.dtype == FW_F64) return run(double{});
  if (plan.conv.dtype == FW_BF16) return run(Bf16{});
  run(float{});
}

void forward(ConvPlan& plan, const fw_short_conv_tensors& t, void* workspace, size_t workspace_bytes) {
  const fw_short_conv& c = plan.conv;
  check_sources(plan, t);
  check_tensor({"", "y"}, t.y, c.dtype, {c.B, c.T, c.D}, true, true);
  check_tensor({"", "final_state"}, t.final_state, c.dtype, {plan.sequences, c.W - 1, c.D}, false, false);
  check_buffer("workspace", workspace, workspace_bytes, ConvSpace(plan, false, nullptr).bytes, "fw_short_conv_query");
  std::optional<cuda::DeviceScope> scope;
  if (plan.cuda) {
    scope.emplace(c.device_number);
    cuda::require_gpu();
  }
  if (plan.tokens() == 0 && (t.final_state.data == nullptr || c.W == 1)) return;
  const ConvSpace space(plan, false, workspace);
  const PassLayout layout = layout_of(plan, space, false);
  with_type(plan, [&](auto type) { run_forward<decltype(type)>(plan, t, layout); });
}

}  // namespace
}  // namespace fw

extern "C" {

void fw_short_conv_init_sized(fw_short_conv* conv, size_t size) { fw::init_struct(conv, size, fw::default_conv()); }
void fw_short_conv_tensors_init_sized(fw_short_conv_tensors* tensors, size_t size) {
  fw::init_struct(tensors, size, fw::default_tensors());
}

fw_status fw_short_conv_query(const fw_short_conv* conv, fw_sizes* sizes) {
  return fw::guarded([&] {
    const size_t size = fw::not_null(sizes, "sizes").size;
    fw::check_struct_size<fw_sizes>(size, fw::kFirstSizes, "sizes", "fw_sizes");
    const fw::ConvPlan plan = fw::make_conv_plan(conv);
    fw_sizes all;
    std::memset(&all, 0, sizeof(all));
    all.forward = all.forward_saving = fw::ConvSpace(plan, false, nullptr).bytes;
    all.backward = all.backward_alone = fw::ConvSpace(plan, true, nullptr).bytes;
    all.size = size;
    std::memcpy(sizes, &all, size);
  });
}

fw_status fw_short_conv_forward(const fw_short_conv* conv, const fw_short_conv_tensors* tensors, void* workspace,
                                size_t workspace_bytes) {
  return fw::guarded([&] {
    fw::ConvPlan plan = fw::make_conv_plan(conv);
    fw::forward(plan, fw::complete(tensors, "tensors"), workspace, workspace_bytes);
  });
}

fw_status fw_short_conv_backward(const fw_short_conv* conv, const fw_short_conv_tensors* tensors,
                                 const fw_short_conv_tensors* grads, void* workspace, size_t workspace_bytes) {
  return fw::guarded([&] {
    fw::ConvPlan plan = fw::make_conv_plan(conv);
    const fw_short_conv_tensors t = fw::complete(tensors, "tensors"), g = fw::complete(grads, "gradients");
    const fw_short_conv& c = plan.conv;
    fw::check_sources(plan, t);
    fw::require_absent({"", "y"}, t.y, "backward does not read it");
    fw::require_absent({"", "final_state"}, t.final_state, "backward does not read it");
    constexpr const char* kOf = "gradient of ";
    const int32_t parameters = fw::parameter_type(plan);
    fw::check_tensor({kOf, "y"}, g.y, c.dtype, {c.B, c.T, c.D}, true, true);
    fw::check_tensor({kOf, "x"}, g.x, c.dtype, {c.B, c.T, c.D}, true, true);
    fw::check_tensor({kOf, "weight"}, g.weight, parameters, {c.D, c.W}, true, false);
    fw::check_tensor({kOf, "bias"}, g.bias, parameters, {c.D}, t.bias.data != nullptr, false);
    if (t.bias.data == nullptr) fw::require_absent({kOf, "bias"}, g.bias, "there is no bias");
    fw::require_absent({kOf, "initial_state"}, g.initial_state, "states have no gradient");
    fw::require_absent({kOf, "final_state"}, g.final_state, "states have no gradient");
    fw::check_buffer("workspace", workspace, workspace_bytes, fw::ConvSpace(plan, true, nullptr).bytes,
                     "fw_short_conv_query");
    std::optional<fw::cuda::DeviceScope> scope;
    if (plan.cuda) {
      scope.emplace(c.device_number);
      fw::cuda::require_gpu();
    }
    const fw::ConvSpace space(plan, true, workspace);
    const fw::PassLayout layout = fw::layout_of(plan, space, true);
    fw::with_type(plan, [&](auto type) { fw::run_backward<decltype(type)>(plan, t, g, space, layout); });
  });
}

fw_status fw_short_conv_step(const fw_short_conv* conv, const fw_short_conv_tensors* tensors, void* workspace,
                             size_t workspace_bytes) {
  return fw::guarded([&] {
    fw::ConvPlan plan = fw::make_conv_plan(conv);
    if (plan.conv.seqlens.cu_seqlens != nullptr)
      fw::fail_usage("conv: seqlens.cu_seqlens: expected NULL in fw_short_conv_step, got an address");
    if (plan.conv.T != 1) fw::fail_usage("conv: T: expected 1 in fw_short_conv_step, got {}", plan.conv.T);
    fw_short_conv_tensors t = fw::complete(tensors, "tensors");
    fw::require_absent({"", "final_state"}, t.final_state, "initial_state is updated in place");
    if (t.initial_state.data == nullptr && plan.conv.W > 1 && plan.sequences > 0)
      fw::fail_usage("initial_state: expected a tensor, which the step updates in place, got none");
    t.final_state = t.initial_state;
    fw::forward(plan, t, workspace, workspace_bytes);
  });
}

}  // extern "C"
