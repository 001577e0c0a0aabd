// DraftDecoder: generation of N sequences side by side, several tokens of each at a time. A pass reads a token that was
// drawn and drafts of those that may follow it, and draws a token after each. A draft that equals what was drawn in its
// place stays, with the token drawn after it; the rest is taken back (ModelState::take_back). What is drawn is what a
// Decoder draws, but for the rounding of matrix products of more rows, and on a GPU of gates. A pass of kExactRows on
// the CPU has a Decoder's bits.
#pragma once

#include <cstdint>
#include <memory>
#include <span>

#include "model/state.h"
#include "ops/sampling.h"

namespace fw {

// Rows of a pass on the CPU whose products are those of single tokens.
inline constexpr int64_t kExactRows = 16;
// Drafts of a sequence in a pass.
inline constexpr int64_t kMostDrafts = 16;

// W: as the model's.
template <class W>
class DraftDecoder {
 public:
  DraftDecoder() = default;
  DraftDecoder(const DraftDecoder&) = delete;
  DraftDecoder& operator=(const DraftDecoder&) = delete;
  virtual ~DraftDecoder() = default;

  // Tokens of a sequence in a pass at most: drafts and one.
  virtual int64_t most_tokens() const = 0;
  // Sequence n goes on from its state with logits [vocab] of its next token, and the ids that it has seen last, oldest
  // first. Also after a pass of the model has changed that state, and before `sampling` changes.
  virtual void begin(int64_t n, std::span<const W> logits, std::span<const int32_t> recent) = 0;
  // Draws sequence n's next token from the logits of begin(), as Decoder::sample() would.
  virtual Drawn draw(int64_t n, int64_t vocab, const Sampling& sampling, double uniform, bool logprob) = 0;
  // The model reads ids [N, tokens], 1 token of each sequence or most_tokens(), and draws one after each of them with
  // uniform [N, tokens]. Valid until the next call. All tokens stay until keep() says otherwise.
  virtual std::span<const Drawn> read(int64_t tokens, std::span<const int32_t> ids, int64_t vocab,
                                      const Sampling& sampling, std::span<const double> uniform, bool logprobs) = 0;
  // Of the last read() only the first `tokens` >= 1 of sequence n have come. Called again with fewer, it takes back
  // more. Comes before anyone else reads the state.
  virtual void keep(int64_t n, int64_t tokens) = 0;
  // The logits [vocab] after token `row` of sequence n of the last read(); waits for all work.
  virtual void read_logits(int64_t n, int64_t row, std::span<W> logits) = 0;
};

template <class T>
class Network;  // model/network.h

// As make_decoder(), with up to `drafts` drafts a pass.
template <class T>
std::unique_ptr<DraftDecoder<Wide<T>>> make_draft_decoder(Network<T>& network, const Exec<T>& exec, fw_form form,
                                                          int64_t drafts, ModelState<Wide<T>>& state);

}  // namespace fw
