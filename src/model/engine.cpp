#include "model/engine.h"

#include <fmt/format.h>

#include <algorithm>
#include <optional>
#include <type_traits>
#include <vector>

#include "base/error.h"
#include "base/plan_device.h"
#include "model/chosen_rows.h"
#include "model/device_limits.h"
#include "model/network.h"
#include "model/read_rows.h"
#include "nn/activations.h"
#include "nn/decode_ring.h"
#include "nn/observer.h"
#include "nn/observer_on_host.h"
#include "nn/recurrence.h"
#include "ops/backend.h"

namespace fw {
namespace {

// T: the type of activations.
template <class T>
class EngineOf final : public Engine<Wide<T>> {
 public:
  using W = Wide<T>;

  EngineOf(const ModelConfig& c, Device& device, Params<W>& params, MasterFormat master_format)
      : config_(c),
        network_(c, params),
        arena_(device, arena_block(device)),
        recompute_arena_(device, arena_block(device)),
        exec_{ops_of<T>(device), device, arena_, contexts_arena_},
        recompute_exec_{ops_of<T>(device), device, recompute_arena_, contexts_arena_},
        wide_(wide_exec(exec_)),
        recurrences_(device) {
    require_layers<T>(c, device);
    params.allocate(device, master_format);
    network_.allocate(device);
  }

  const Exec<W>& over_parameters() const override { return wide_; }
  void set_precision(Precision precision) override { exec_.precision = recompute_exec_.precision = precision; }
  void set_recompute(RecomputeLayers what) override {
    if (!(what == network_.recompute())) largest_ = 0;  // the next pass begins with new memory
    network_.set_recompute(what, recompute_exec_);
  }
  void set_form(fw_form form) override { form_ = form; }
  void set_decode_bits(bool on) override {
    form_ = on ? FW_FORM_DECODE : FW_FORM_AUTO;
    exec_.decode_bits = recompute_exec_.decode_bits = on;
  }
  const std::optional<int64_t>& decode_ring() const override { return decode_ring_; }
  void set_decode_ring(const std::optional<int64_t>& tokens) override {
    const int32_t position = 0;  // the plan of a ring does not read it
    for (int64_t i = 0; tokens.value_or(0) > 0 && i < config_.num_hidden_layers; ++i) {
      for (const StateTensor& tensor : config_.layer_state(i)) {
        if (!tensor.recurrence || !has_ring(tensor.recurrence->rule, exec_.device.kind())) continue;
        RecurrenceShape shape = *tensor.recurrence;
        shape.ring = {*tokens, &position};
        require_ring<T>(shape, 1, exec_.device);
      }
    }
    decode_ring_ = tokens;
  }
  void adapt(Lora<W>* lora) override { network_.adapt(lora); }
  void observe(PassObserver<W>* observer) override {
    if constexpr (std::is_same_v<T, W>) {
      observer_ = observer;
    } else {
      on_host_.reset();
      if (observer != nullptr) on_host_.emplace(exec_.device, *observer);
      observer_ = on_host_ ? &*on_host_ : nullptr;
    }
  }

  void accumulate(std::span<const int32_t> ids, std::span<const int32_t> targets, const SeqLayout& layout, W grad_scale,
                  ModelState<W>* state, LossSum* sum) override {
    Pass<T> pass = begin(layout, state, true);
    if (const int64_t layers = network_.layers_with_experts(); layers > 0)
      pass.balance = static_cast<W>(config_.experts.balance) * grad_scale / static_cast<W>(layers);
    const int32_t* device_ids = upload(ids);
    const std::optional<ChosenRows> few = ChosenRows::few_scored(targets);
    const int32_t* device_targets = few ? upload(few->of(targets)) : upload(targets);
    Residual<T> residual = run(pass, device_ids, state);
    const Mat<T> dx = new_matrix<T>(arena_, layout.tokens(), config_.hidden_size);
    if (pass.first_value != nullptr) {
      Mat<T>& d_value = pass.first_value->d_value;
      d_value = new_matrix<T>(arena_, layout.tokens(), config_.hidden_size);
      exec_.device.fill(d_value.data, 0, static_cast<size_t>(d_value.rows * d_value.stride) * sizeof(T));
    }
    const Arena::Mark mark = arena_.mark();
    if (few) {
      Residual<T> rows = gather(residual, *few);
      const Mat<T> drows = new_matrix<T>(arena_, few->count(), config_.hidden_size);
      network_.head().loss_backward(pass, rows, device_targets, grad_scale, drows, sum);
      scatter(drows, *few, dx);
    } else {
      network_.head().loss_backward(pass, residual, device_targets, grad_scale, dx, sum);
    }
    arena_.rewind(mark);
    network_.backward(pass, device_ids, dx);
    if (state != nullptr) state->advance(layout);
  }

  void evaluate(std::span<const int32_t> ids, std::span<const int32_t> targets, const SeqLayout& layout,
                ModelState<W>* state, W* nll, LossSum* sum) override {
    const Pass<T> pass = begin(layout, state, false);
    const std::optional<ChosenRows> few = ChosenRows::few_scored(targets);
    const int32_t* device_targets = few ? upload(few->of(targets)) : upload(targets);
    Residual<T> residual = run(pass, upload(ids), state);
    if (state != nullptr) state->advance(layout);
    if (few) residual = gather(residual, *few);
    W* device_nll = nll == nullptr ? nullptr : arena_.alloc<W>(residual.x.rows);
    network_.head().loss(pass, residual, device_targets, device_nll, sum);
    if (nll == nullptr) return;
    if (!few) return exec_.device.to_host(nll, device_nll, sizeof(W) * ids.size());
    std::vector<W> scored(static_cast<size_t>(few->count()));
    exec_.device.to_host(scored.data(), device_nll, sizeof(W) * scored.size());
    std::fill_n(nll, ids.size(), W{});
    for (int64_t i = 0; i < few->count(); ++i) nll[few->number(i)] = scored[static_cast<size_t>(i)];
  }

  void likeliest(std::span<const int32_t> ids, std::span<const int64_t> rows, const SeqLayout& layout,
                 ModelState<W>* state, int32_t* to) override {
    const Pass<T> pass = begin(layout, state, false);
    const Residual<T> all = run(pass, upload(ids), state);
    if (state != nullptr) state->advance(layout);
    if (rows.empty()) return;
    const ChosenRows chosen(rows);
    const Residual<T> asked = gather(all, chosen);
    const int64_t slice =
        std::clamp<int64_t>(kSliceLogits / config_.vocab_size, 1, std::min(kSliceRows, chosen.count()));
    Drawn* drawn = arena_.alloc<Drawn>(chosen.count());
    DrawStreams streams;
    const std::vector<double> uniform(static_cast<size_t>(slice));  // greedy: not read
    streams.uniform = uniform.data();
    streams.recent = arena_.alloc<int32_t>(slice * kMostRecent);
    streams.seen = arena_.alloc_zero<int64_t>(slice);
    streams.positions = arena_.alloc_zero<int64_t>(slice);
    streams.ids = arena_.alloc<int32_t>(slice);
    Sampling greedy;
    greedy.temperature = 0;
    for (int64_t first = 0; first < chosen.count(); first += slice) {
      const Arena::Mark mark = arena_.mark();
      const int64_t count = std::min(slice, chosen.count() - first);
      Residual<T> now;
      now.pending = asked.pending;
      now.x = asked.x.row_range(first, count);
      now.delta = asked.delta.row_range(first, count);
      const Mat<T> logits = new_matrix<T>(arena_, count, config_.vocab_size);
      network_.head().logits(pass, now, logits);
      streams.drawn = drawn + first;
      exec_.sample_tokens(logits, config_.vocab_size, greedy, streams);
      arena_.rewind(mark);
    }
    std::vector<Drawn> found(static_cast<size_t>(chosen.count()));
    exec_.device.to_host(found.data(), drawn, sizeof(Drawn) * found.size());
    std::ranges::transform(found, to, &Drawn::id);
  }

  void forward_last(std::span<const int32_t> ids, const SeqLayout& layout, ModelState<W>& state,
                    Mat<W> logits) override {
    const Pass<T> pass = begin(layout, &state, false);
    const Residual<T> all = run(pass, upload(ids), &state);
    state.advance(layout);
    Residual<T> last = last_of(all, pass.layout);
    const Mat<T> rows = new_matrix<T>(arena_, logits.rows, logits.cols);
    network_.head().logits(pass, last, rows);
    read_rows<T>(exec_.device, rows, logits);
  }

  void forward_all(std::span<const int32_t> ids, const SeqLayout& layout, ModelState<W>* state,
                   Mat<W> logits) override {
    const Pass<T> pass = begin(layout, state, false);
    Residual<T> residual = run(pass, upload(ids), state);
    if (state != nullptr) state->advance(layout);
    const Mat<T> rows = new_matrix<T>(arena_, logits.rows, logits.cols);
    network_.head().logits(pass, residual, rows);
    read_rows<T>(exec_.device, rows, logits);
  }

  std::unique_ptr<Decoder<W>> decoder(ModelState<W>& state) override {
    return make_decoder<T>(network_, exec_, form_, decode_ring_, state);
  }

  void require_drafts(int64_t drafts) const override {
    for (int64_t i = 0; i < config_.num_hidden_layers; ++i) {
      for (const StateTensor& tensor : config_.layer_state(i)) {
        if (tensor.kind != StateKind::kMatrix) continue;
        if (tensor.takes_back == TakesBack::kNothing) {
          fail_usage("drafts: expected 0 with this model, whose layer {} ('{}') takes no tokens back, got {}", i,
                     config_.layer_rule(i), drafts);
        }
        if (tensor.takes_back == TakesBack::kSlots && tensor.recurrence)
          require_slots<T>(*tensor.recurrence, drafts + 1, exec_.device,
                           fmt::format("drafts: layer {} ('{}')", i, config_.layer_rule(i)));
      }
    }
  }
  std::unique_ptr<DraftDecoder<W>> draft_decoder(ModelState<W>& state, int64_t drafts) override {
    return make_draft_decoder<T>(network_, exec_, form_, drafts, state);
  }

  std::vector<int64_t> take_expert_load() override { return network_.take_expert_load(); }

  size_t scratch_bytes() const override { return arena_.reserved_bytes() + recompute_arena_.reserved_bytes(); }
  Scratch planned_scratch() const override {
    const auto* plan = dynamic_cast<const PlanDevice*>(&exec_.device);
    return plan == nullptr ? Scratch() : Scratch{plan->most_used(first_byte_), plan->most_used(first_recompute_)};
  }
  void reserve_scratch(Scratch bytes) override {
    reserved_ = bytes;
    new_arenas();
  }

 private:
  // Begins with an empty arena. One that is about to grow starts anew, so that memory is that of the largest pass and
  // not the sum of all sizes there were.
  Pass<T> begin(const SeqLayout& layout, const ModelState<W>* state, bool keep) {
    const int64_t extent = layout.tokens() * (keep ? config_.num_hidden_layers : 1);
    if (extent > largest_) {
      new_arenas();
      largest_ = extent;
    }
    arena_.release();
    recompute_arena_.release();
    contexts_arena_.release();
    network_.refresh_parameters(exec_);
    const int64_t* positions = state == nullptr ? nullptr : upload(std::span<const int64_t>(state->positions()));
    PassLayout pass_layout(layout, upload(std::span<const int64_t>(layout.offsets())), positions);
    if (state != nullptr) pass_layout.host_positions = state->positions().data();
    Pass<T> pass{network_.params(), pass_layout, exec_, recurrences_, keep, form_, observer_};
    network_.share_first_value(pass, first_value_);
    return pass;
  }

  // Empty, with memory where a plan has said how much, or where one is made. What they had goes first.
  void new_arenas() {
    // Where little is reserved, that is the size of every block.
    const auto block_of = [&](size_t bytes) {
      return bytes > 0 ? std::min(bytes, arena_block(exec_.device)) : arena_block(exec_.device);
    };
    arena_ = Arena(exec_.device, block_of(reserved_.kept));
    recompute_arena_ = Arena(exec_.device, block_of(reserved_.recomputed));
    PlanDevice* plan = exec_.device.kind() == FW_DEVICE_CPU ? nullptr : dynamic_cast<PlanDevice*>(&exec_.device);
    const auto first_of = [&](Arena& arena, size_t bytes) -> const void* {
      if (plan != nullptr) bytes = 1;
      const void* memory = bytes > 0 ? arena.alloc<std::byte>(static_cast<int64_t>(bytes)) : nullptr;
      arena.release();  // it keeps its block
      if (plan != nullptr) plan->forget_used(memory);
      return memory;
    };
    first_byte_ = first_of(arena_, reserved_.kept);
    first_recompute_ = first_of(recompute_arena_, reserved_.recomputed);
  }

  // Most logits and rows of them that likeliest() has at a time.
  static constexpr int64_t kSliceLogits = int64_t{1} << 23, kSliceRows = 1024;

  Residual<T> last_of(const Residual<T>& all, const PassLayout& layout) {
    Residual<T> last = rows_like(all, layout.host.count());
    exec_.last_rows(all.x, layout, last.x);
    if (all.pending) exec_.last_rows(all.delta, layout, last.delta);
    return last;
  }
  Residual<T> gather(const Residual<T>& all, const ChosenRows& rows) {
    const int32_t* numbers = upload(rows.numbers());
    Residual<T> chosen = rows_like(all, rows.count());
    exec_.gather_rows(all.x, numbers, chosen.x);
    if (all.pending) exec_.gather_rows(all.delta, numbers, chosen.delta);
    return chosen;
  }
  Residual<T> rows_like(const Residual<T>& all, int64_t count) {
    Residual<T> rows;
    rows.pending = all.pending;
    rows.x = new_matrix<T>(arena_, count, config_.hidden_size);
    rows.delta = new_matrix<T>(arena_, count, config_.hidden_size);
    return rows;
  }
  // The chosen rows of `to` = from, the others zero.
  void scatter(Mat<const T> from, const ChosenRows& rows, Mat<T> to) {
    exec_.device.fill(to.data, 0, static_cast<size_t>(to.rows * to.stride) * sizeof(T));
    exec_.scatter_rows(from, upload(rows.numbers()), to);
  }

  // What the host knows of a pass goes to the device once.
  template <class Value>
  const Value* upload(const std::vector<Value>& values) {
    return upload(std::span<const Value>(values));
  }
  template <class Value>
  Value* upload(std::span<const Value> values) {
    Value* to = arena_.alloc<Value>(static_cast<int64_t>(values.size()));
    exec_.device.from_host(to, values.data(), values.size_bytes());
    return to;
  }
  // The residual stream after all blocks.
  Residual<T> run(const Pass<T>& pass, const int32_t* ids, ModelState<W>* state) {
    if (state != nullptr) state->prepare(pass.layout.host);
    return network_.forward(pass, ids, state);
  }

  const ModelConfig config_;
  Network<T> network_;
  FirstValue<T> first_value_;
  Arena arena_, contexts_arena_;
  Arena recompute_arena_;  // of what backward recomputes
  int64_t largest_ = 0;
  Exec<T> exec_, recompute_exec_;
  Exec<W> wide_;
  Recurrences<T> recurrences_;
  fw_form form_ = FW_FORM_AUTO;
  std::optional<int64_t> decode_ring_;
  Scratch reserved_;
  const void *first_byte_ = nullptr, *first_recompute_ = nullptr;  // of the arenas' first blocks
  std::optional<ObserverOnHost<T>> on_host_;                       // of activations that are not W
  PassObserver<T>* observer_ = nullptr;
};

}  // namespace

template <class W>
std::unique_ptr<Engine<W>> make_engine(const ModelConfig& config, Device& device, Params<W>& params,
                                       MasterFormat master_format) {
  if constexpr (std::is_same_v<W, float>) {
    if (bf16_activations<W>(device)) return std::make_unique<EngineOf<Bf16>>(config, device, params, master_format);
  }
  // Products of floats on the CPU widen weights in bf16; what trains keeps floats.
  const bool widens =
      std::is_same_v<W, float> && device.kind() == FW_DEVICE_CPU && master_format == MasterFormat::kBf16;
  return std::make_unique<EngineOf<W>>(config, device, params, widens ? MasterFormat::kBf16 : MasterFormat::kFp32);
}

template std::unique_ptr<Engine<float>> make_engine(const ModelConfig&, Device&, Params<float>&, MasterFormat);
template std::unique_ptr<Engine<double>> make_engine(const ModelConfig&, Device&, Params<double>&, MasterFormat);

}  // namespace fw
