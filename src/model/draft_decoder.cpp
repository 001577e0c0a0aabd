#include "model/draft_decoder.h"

#include <algorithm>
#include <array>
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

// Rows that are drawn in one call where draws do not depend on each other: each has recent ids of its own, 16 KiB.
constexpr int64_t kRowsAtOnce = 128;

template <class T>
class RecordedDraftDecoder final : public DraftDecoder<Wide<T>> {
 public:
  using W = Wide<T>;

  RecordedDraftDecoder(Network<T>& network, const Exec<T>& exec, fw_form form, int64_t drafts, ModelState<W>& state)
      : network_(network),
        device_(exec.device),
        state_(state),
        sequences_(state.sequences()),
        most_(drafts + 1),
        form_(form),
        sampling_arena_(device_, arena_block(device_)),
        sampling_{ops_of<T>(device_), device_, sampling_arena_, sampling_contexts_, exec.precision},
        ids_(device_, sequences_ * most_),
        drawn_(device_, sequences_ * most_),
        logits_(device_, sequences_ * most_ * vocab()),
        first_logits_(device_, sequences_ * vocab()),
        seen_(device_, sequences_),
        recent_(device_, sequences_ * kMostRecent),
        rows_at_once_(std::min(sequences_ * most_, kRowsAtOnce)),
        no_recent_(device_, rows_at_once_ * kMostRecent),
        counted_(device_, 2 * sequences_ * most_),
        next_ids_(device_, sequences_ * most_),
        host_seen_(static_cast<size_t>(sequences_)),
        kept_(static_cast<size_t>(sequences_)),
        host_drawn_(static_cast<size_t>(sequences_ * most_)),
        read_back_(device_.read_back(sizeof(Drawn) * host_drawn_.size())) {
    sampling_.decode_bits = exec.decode_bits;
    state_.use_rings(std::nullopt);
    state_.use_drafts(most_);
    for (const int64_t tokens : {int64_t{1}, most_}) {
      std::unique_ptr<Width>& width = widths_[tokens == 1 ? 0 : 1];
      width = std::make_unique<Width>(exec, sequences_, tokens);
    }
  }

  int64_t most_tokens() const override { return most_; }

  void begin(int64_t n, std::span<const W> logits, std::span<const int32_t> recent) override {
    if constexpr (std::is_same_v<T, W>) {
      first_logits_.write(n * vocab(), logits);
    } else {
      std::vector<T> rounded(logits.size());
      round_to_bf16(static_cast<int64_t>(logits.size()), logits.data(), rounded.data());
      first_logits_.write(n * vocab(), rounded);
    }
    recent = recent.last(std::min<size_t>(recent.size(), kMostRecent));
    recent_.write(n * kMostRecent, recent);
    host_seen_[static_cast<size_t>(n)] = static_cast<int64_t>(recent.size());
    for (const auto& width : widths_) width->room = 0;
  }

  Drawn draw(int64_t n, int64_t vocab_size, const Sampling& sampling, double uniform, bool logprob) override {
    int64_t& seen = host_seen_[static_cast<size_t>(n)];
    seen_.write(n, {&seen, 1});
    DrawStreams streams = this->streams(&uniform, logprob);
    streams.recent = recent_.data() + n * kMostRecent, streams.seen = seen_.data() + n;
    sampling_.sample_tokens(Mat<const T>(first_logits_.data() + n * vocab(), 1, vocab()), vocab_size, sampling,
                            streams);
    ++seen;
    Drawn drawn;
    drawn_.read(0, {&drawn, 1});
    return drawn;
  }

  std::span<const Drawn> read(int64_t tokens, std::span<const int32_t> ids, int64_t vocab_size,
                              const Sampling& sampling, std::span<const double> uniform, bool logprobs) override {
    Width& width = *widths_[tokens == 1 ? 0 : 1];
    tokens_ = tokens;
    ids_.write(0, ids);
    pass(width);
    sample(vocab_size, sampling, uniform, logprobs);
    std::fill(kept_.begin(), kept_.end(), tokens);
    for (int64_t& seen : host_seen_) seen += tokens;
    return {host_drawn_.data(), static_cast<size_t>(sequences_ * tokens)};
  }

  void keep(int64_t n, int64_t tokens) override {
    int64_t& kept = kept_[static_cast<size_t>(n)];
    state_.take_back(n, kept - tokens);
    host_seen_[static_cast<size_t>(n)] -= kept - tokens;
    kept = tokens;
  }

  void read_logits(int64_t n, int64_t row, std::span<W> to) override {
    const Mat<T> logits(logits_.data() + (n * tokens_ + row) * vocab(), 1, vocab());
    read_rows<T>(device_, logits, Mat<W>(to.data(), 1, vocab()));
  }

 private:
  // A pass of so many tokens of each sequence. Memory of its own, which no other pass touches: what is recorded keeps
  // its addresses. Each token is a sequence of the layout (nn/drafts.h).
  struct Width {
    Width(const Exec<T>& of, int64_t sequences, int64_t t)
        : tokens(t),
          layout(SeqLayout::uniform(sequences * tokens, 1)),
          offsets(of.device, layout.count() + 1),
          arena(of.device, arena_block(of.device)),
          exec{ops_of<T>(of.device), of.device, arena, contexts, of.precision},
          recurrences(of.device) {
      offsets.write(0, layout.offsets());
      const bool on_host = of.device.kind() == FW_DEVICE_CPU;
      exec.decode_bits = of.decode_bits || (on_host && layout.count() <= kExactRows);
    }
    const int64_t tokens;
    const SeqLayout layout;
    Buffer<int64_t> offsets;
    Arena arena, contexts;
    Exec<T> exec;
    Recurrences<T> recurrences;
    FirstValue<T> first_value;
    int64_t room = 0;  // tokens of a sequence until the caches need more
    std::vector<std::vector<StateView>> views;
    std::unique_ptr<RecordedWork> recorded;
  };

  int64_t vocab() const { return network_.config().vocab_size; }
  DrawStreams streams(const double* uniform, bool logprobs) {
    DrawStreams streams;
    streams.uniform = uniform;
    streams.positions = counted_.data(), streams.ids = next_ids_.data(), streams.drawn = drawn_.data();
    streams.logprobs = logprobs;
    return streams;
  }

  void pass(Width& width) {
    network_.refresh_parameters(width.exec);
    if (width.room < width.tokens) {
      state_.prepare_drafts(width.tokens, kCacheRows);
      width.room = width.tokens + kCacheRows;
      if (width.views != state_.views()) width.recorded.reset();
      width.views = state_.views();
    }
    for (const auto& any : widths_) any->room -= width.tokens;
    state_.begin_drafts(width.tokens);
    if (width.recorded != nullptr) return width.recorded->queue();
    run(width);  // plans, memory and the library's algorithms are made here
    if (Profile::current() == nullptr) width.recorded = device_.record([this, &width] { run(width); });
  }
  void run(Width& width) {
    width.arena.release();
    width.contexts.release();
    state_.show_drafts(width.tokens);
    const PassLayout layout(width.layout, width.offsets.data(), state_.draft_positions());
    Pass<T> pass{network_.params(), layout, width.exec, width.recurrences, false, form_, nullptr};
    network_.share_first_value(pass, width.first_value);
    Residual<T> residual = network_.forward(pass, ids_.data(), &state_);
    network_.head().logits(pass, residual, Mat<T>(logits_.data(), width.layout.count(), vocab()));
  }

  // Draws depend on each other where recent ids are less likely: then a draft's row is drawn after those before it. Of
  // a draft that was not drawn nothing behind it counts.
  void sample(int64_t vocab_size, const Sampling& sampling, std::span<const double> uniform, bool logprobs) {
    sampling_arena_.release();
    const int64_t rows = sequences_ * tokens_;
    DrawStreams streams = this->streams(uniform.data(), logprobs);
    if (sampling.repetition_penalty == 1 && rows <= rows_at_once_) {
      streams.recent = no_recent_.data(), streams.seen = counted_.data() + rows;
      sampling_.sample_tokens(Mat<const T>(logits_.data(), rows, vocab()), vocab_size, sampling, streams);
      const std::span<const Drawn> drawn = read_drawn();
      std::copy_n(drawn.begin(), rows, host_drawn_.begin());
      return;
    }
    seen_.write(0, host_seen_);
    streams.recent = recent_.data(), streams.seen = seen_.data();
    std::vector<double> of_row(static_cast<size_t>(sequences_));
    for (int64_t t = 0; t < tokens_; ++t) {
      for (int64_t n = 0; n < sequences_; ++n)
        of_row[static_cast<size_t>(n)] = uniform[static_cast<size_t>(n * tokens_ + t)];
      streams.uniform = of_row.data();
      streams.drawn = drawn_.data() + t * sequences_;
      sampling_.sample_tokens(Mat<const T>(logits_.data() + t * vocab(), sequences_, vocab(), tokens_ * vocab()),
                              vocab_size, sampling, streams);
    }
    const std::span<const Drawn> drawn = read_drawn();
    for (int64_t i = 0; i < rows; ++i)
      host_drawn_[static_cast<size_t>(i)] = drawn[static_cast<size_t>(i % tokens_ * sequences_ + i / tokens_)];
  }
  std::span<const Drawn> read_drawn() {
    read_back_->queue(drawn_.data());
    return {static_cast<const Drawn*>(read_back_->wait()), host_drawn_.size()};
  }

  Network<T>& network_;
  Device& device_;
  ModelState<W>& state_;
  const int64_t sequences_, most_;
  fw_form form_;
  Arena sampling_arena_, sampling_contexts_;
  Exec<T> sampling_;
  std::array<std::unique_ptr<Width>, 2> widths_;
  Buffer<int32_t> ids_;  // [N, tokens]
  Buffer<Drawn> drawn_;
  Buffer<T> logits_;        // [N, tokens, vocab]
  Buffer<T> first_logits_;  // [N, vocab]
  Buffer<int64_t> seen_;
  Buffer<int32_t> recent_;  // [N, kMostRecent]
  // What draws that do not depend on each other write and nobody reads.
  const int64_t rows_at_once_;
  Buffer<int32_t> no_recent_;
  Buffer<int64_t> counted_;
  Buffer<int32_t> next_ids_;
  std::vector<int64_t> host_seen_;  // [N]: recent ids that came, with the one that was drawn last
  std::vector<int64_t> kept_;       // [N]: tokens of the last read()
  std::vector<Drawn> host_drawn_;   // [N, tokens]
  std::unique_ptr<ReadBack> read_back_;
  int64_t tokens_ = 1;  // of a sequence in the last read()
};

}  // namespace

template <class T>
std::unique_ptr<DraftDecoder<Wide<T>>> make_draft_decoder(Network<T>& network, const Exec<T>& exec, fw_form form,
                                                          int64_t drafts, ModelState<Wide<T>>& state) {
  return std::make_unique<RecordedDraftDecoder<T>>(network, exec, form, drafts, state);
}

template std::unique_ptr<DraftDecoder<float>> make_draft_decoder(Network<float>&, const Exec<float>&, fw_form, int64_t,
                                                                 ModelState<float>&);
template std::unique_ptr<DraftDecoder<double>> make_draft_decoder(Network<double>&, const Exec<double>&, fw_form,
                                                                  int64_t, ModelState<double>&);
template std::unique_ptr<DraftDecoder<float>> make_draft_decoder(Network<Bf16>&, const Exec<Bf16>&, fw_form, int64_t,
                                                                 ModelState<float>&);

}  // namespace fw
