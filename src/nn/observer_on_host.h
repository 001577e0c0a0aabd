// What an observer sees of a pass on a device: an observer of that pass which brings each recurrence's tensors to the
// host, widens them, and shows them to another. The numbers are those that the device computed with; it waits for each
// layer.
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>
#include <vector>

#include "base/bf16.h"
#include "base/device.h"
#include "nn/layer_state.h"
#include "nn/observer.h"

namespace fw {

template <class T>
class ObserverOnHost final : public PassObserver<T> {
 public:
  using W = Wide<T>;

  // Both outlive it.
  ObserverOnHost(Device& device, PassObserver<W>& to) : device_(device), to_(to) {}

  void begin_layer(int64_t layer) override { to_.begin_layer(layer); }

  void recurrence(const RecurrenceView<T>& view) override {
    const int64_t states = view.layout.count();
    RecurrenceInputs<W> in;
#define FW_TOKEN(name, heads, width, used) in.name = matrix(view.in.name, name##_);
#include "rule/tokens.def"
    in.precond_center = numbers(view.in.precond_center, view.heads, precond_center_);
    in.s = numbers(view.in.s, states * view.v_heads * view.key_dim * view.value_dim, s_);
    if (in.s != nullptr && view.v_first) {
      s_ = transposed(s_, view.value_dim, view.key_dim);
      in.s = s_.data();
    }
    in.a = numbers(view.in.a, states * view.heads * view.key_dim, a_);
    const Mat<W> o = matrix(view.o, o_);
    to_.recurrence({view.rule, view.layout, view.heads, view.v_heads, view.key_dim, view.value_dim, in, o, view.scale});
  }

 private:
  // [rows, cols] without what else its rows have.
  template <class Value>
  Mat<W> matrix(Mat<Value> from, std::vector<W>& to) {
    if (from.data == nullptr || from.rows == 0) return {};
    // The last row may be the memory's end.
    const std::vector<std::remove_const_t<Value>> all = brought(from.data, (from.rows - 1) * from.stride + from.cols);
    to.resize(static_cast<size_t>(from.rows * from.cols));
    for (int64_t r = 0; r < from.rows; ++r) widen(from.cols, all.data() + r * from.stride, to.data() + r * from.cols);
    return {to.data(), from.rows, from.cols};
  }
  W* numbers(const W* from, int64_t count, std::vector<W>& to) {
    if (from == nullptr) return nullptr;
    to = brought(from, count);
    return to.data();
  }
  template <class Value>
  std::vector<std::remove_const_t<Value>> brought(Value* from, int64_t count) {
    std::vector<std::remove_const_t<Value>> values(static_cast<size_t>(count));
    device_.to_host(values.data(), from, values.size() * sizeof(Value));
    return values;
  }
  static void widen(int64_t n, const W* from, W* to) { std::copy_n(from, n, to); }
  static void widen(int64_t n, const Bf16* from, W* to) { widen_bf16(n, from, to); }

  Device& device_;
  PassObserver<W>& to_;
#define FW_TOKEN(name, heads, width, used) std::vector<W> name##_;
#include "rule/tokens.def"
  std::vector<W> precond_center_, s_, a_, o_;
};

}  // namespace fw
