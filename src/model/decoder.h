// Decoder: generation of N sequences side by side, a token of each at a time, on the model's device. What changes from
// token to token (ids, positions, what was drawn) lies in the device's memory. So the pass of a token is recorded once
// (Device::record: one CUDA graph on a GPU) and queued again for each. The host waits for nothing but what was drawn,
// and that is there before the pass that reads it has begun. With sample(), step(), wait() in this order it may look at
// a token, and stop, while the device works on the next one's logits. The state has then seen exactly the tokens that
// were drawn. Where the state has rings (ModelState::use_rings), a step writes a row of each and not the matrix states.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>

#include "model/state.h"
#include "ops/sampling.h"

namespace fw {

// W: as the model's.
template <class W>
class Decoder {
 public:
  Decoder() = default;
  Decoder(const Decoder&) = delete;
  Decoder& operator=(const Decoder&) = delete;
  virtual ~Decoder() = default;

  // Sequence n goes on from its state (the decoder's, as it is now) with logits [vocab] of its next token, and the ids
  // that it has seen last, oldest first. Also after a pass of the model has changed that state; until it was called for
  // each sequence, those others draw from logits of zeros.
  virtual void begin(int64_t n, std::span<const W> logits, std::span<const int32_t> recent) = 0;
  // Draws a token of each sequence: ids below vocab, uniform [N] as DrawStreams has it, which may change once the call
  // has returned.
  virtual void sample(int64_t vocab, const Sampling& sampling, std::span<const double> uniform, bool logprobs) = 0;
  // The model sees what was drawn; its logits are those of the next token.
  virtual void step() = 0;
  // Of the last sample() [N], valid until the next. It comes between two of them.
  virtual std::span<const Drawn> wait() = 0;
  // The logits [vocab] of sequence n's next token; waits for all work.
  virtual void read_logits(int64_t n, std::span<W> logits) = 0;
};

template <class T>
class Network;  // model/network.h

// A decoder of the sequences of `state`, which it advances: on the device of exec, with its precision and bits. The
// network, the device and the state outlive it. ring: as ModelState::use_rings() has it.
template <class T>
std::unique_ptr<Decoder<Wide<T>>> make_decoder(Network<T>& network, const Exec<T>& exec, fw_form form,
                                               const std::optional<int64_t>& ring, ModelState<Wide<T>>& state);

}  // namespace fw
