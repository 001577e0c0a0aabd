#include "model/decoder.h"

#include <algorithm>
#include <memory>
#include <type_traits>
#include <vector>

#include "base/bf16.h"
#include "base/buffer.h"
#include "model/network.h"
#include "model/read_rows.h"
#include "nn/recurrence.h"
#include "ops/backend.h"
#include "ops/profile.h"

namespace fw {
namespace {

// Memory of its own, which no other pass of the model touches: what is recorded keeps its addresses.
template <class T>
class RecordedDecoder final : public Decoder<Wide<T>> {
 public:
  using W = Wide<T>;

  RecordedDecoder(Network<T>& network, const Exec<T>& exec, fw_form form, const std::optional<int64_t>& ring,
                  ModelState<W>& state)
      : network_(network),
        device_(exec.device),
        state_(state),
        layout_(SeqLayout::uniform(state.sequences(), 1)),
        arena_(device_, arena_block(device_)),
        exec_{ops_of<T>(device_), device_, arena_, contexts_arena_, exec.precision},
        recurrences_(device_),
        form_(form),
        offsets_(device_, layout_.count() + 1),
        positions_(device_, layout_.count()),
        seen_(device_, layout_.count()),
        ids_(device_, layout_.count()),
        recent_(device_, layout_.count() * kMostRecent),
        drawn_(device_, layout_.count()),
        logits_(device_, layout_.count() * vocab()),
        read_back_(device_.read_back(sizeof(Drawn) * static_cast<size_t>(layout_.count()))) {
    exec_.decode_bits = exec.decode_bits;
    state_.use_rings(ring);
    offsets_.write(0, layout_.offsets());
    // Of the last token, as for sequences that have seen none: those without begin() then stay where the host thinks
    // that they are.
    positions_.write(0, std::vector<int64_t>(static_cast<size_t>(layout_.count()), -1));
  }

  void begin(int64_t n, std::span<const W> logits, std::span<const int32_t> recent) override {
    const int64_t before = state_.positions()[static_cast<size_t>(n)] - 1;
    positions_.write(n, {&before, 1});
    if constexpr (std::is_same_v<T, W>) {
      logits_.write(n * vocab(), logits);
    } else {
      std::vector<T> rounded(logits.size());
      round_to_bf16(static_cast<int64_t>(logits.size()), logits.data(), rounded.data());
      logits_.write(n * vocab(), rounded);
    }
    recent = recent.last(std::min<size_t>(recent.size(), kMostRecent));
    recent_.write(n * kMostRecent, recent);
    const auto seen = static_cast<int64_t>(recent.size());
    seen_.write(n, {&seen, 1});
    room_ = 0;
  }

  void sample(int64_t vocab_size, const Sampling& sampling, std::span<const double> uniform, bool logprobs) override {
    DrawStreams streams;
    streams.uniform = uniform.data();
    streams.recent = recent_.data(), streams.seen = seen_.data(), streams.positions = positions_.data();
    streams.ids = ids_.data(), streams.drawn = drawn_.data();
    streams.logprobs = logprobs;
    if (StateRings<W>* rings = state_.rings()) {
      streams.ring_positions = rings->positions();
      streams.ring_tokens = static_cast<int32_t>(rings->tokens());
    }
    exec_.sample_tokens(logits(), vocab_size, sampling, streams);
    read_back_->queue(drawn_.data());
  }

  void step() override {
    network_.refresh_parameters(exec_);
    if (room_ == 0) {
      state_.prepare(layout_, kCacheRows - 1, StateWrites::kRings);
      room_ = kCacheRows;
      if (views_ != state_.views()) recorded_.reset();
      views_ = state_.views();
    }
    --room_;
    state_.advance(layout_, StateWrites::kRings);
    if (recorded_ != nullptr) return recorded_->queue();
    pass();  // plans, memory and the library's algorithms are made here
    if (Profile::current() == nullptr) recorded_ = device_.record([this] { pass(); });
  }

  std::span<const Drawn> wait() override {
    return {static_cast<const Drawn*>(read_back_->wait()), static_cast<size_t>(layout_.count())};
  }

  void read_logits(int64_t n, std::span<W> to) override {
    read_rows<T>(device_, logits().row_range(n, 1), Mat<W>(to.data(), 1, vocab()));
  }

 private:
  int64_t vocab() const { return network_.config().vocab_size; }
  Mat<T> logits() { return {logits_.data(), layout_.count(), vocab()}; }
  void pass() {
    arena_.release();
    contexts_arena_.release();
    const PassLayout layout(layout_, offsets_.data(), positions_.data());
    Pass<T> pass{network_.params(), layout, exec_, recurrences_, false, form_, nullptr};
    network_.share_first_value(pass, first_value_);
    Residual<T> residual = network_.forward(pass, ids_.data(), &state_);
    network_.head().logits(pass, residual, logits());
  }

  Network<T>& network_;
  Device& device_;
  ModelState<W>& state_;
  const SeqLayout layout_;
  Arena arena_, contexts_arena_;
  Exec<T> exec_;
  Recurrences<T> recurrences_;
  FirstValue<T> first_value_;
  fw_form form_;
  Buffer<int64_t> offsets_, positions_, seen_;
  Buffer<int32_t> ids_, recent_;
  Buffer<Drawn> drawn_;
  Buffer<T> logits_;  // [N, vocab]
  std::unique_ptr<ReadBack> read_back_;
  int64_t room_ = 0;  // tokens until the caches need more
  std::vector<std::vector<StateView>> views_;
  std::unique_ptr<RecordedWork> recorded_;
};

}  // namespace

template <class T>
std::unique_ptr<Decoder<Wide<T>>> make_decoder(Network<T>& network, const Exec<T>& exec, fw_form form,
                                               const std::optional<int64_t>& ring, ModelState<Wide<T>>& state) {
  return std::make_unique<RecordedDecoder<T>>(network, exec, form, ring, state);
}

template std::unique_ptr<Decoder<float>> make_decoder(Network<float>&, const Exec<float>&, fw_form,
                                                      const std::optional<int64_t>&, ModelState<float>&);
template std::unique_ptr<Decoder<double>> make_decoder(Network<double>&, const Exec<double>&, fw_form,
                                                       const std::optional<int64_t>&, ModelState<double>&);
template std::unique_ptr<Decoder<float>> make_decoder(Network<Bf16>&, const Exec<Bf16>&, fw_form,
                                                      const std::optional<int64_t>&, ModelState<float>&);

}  // namespace fw
