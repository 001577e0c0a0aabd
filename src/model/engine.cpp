#include "model/engine.h"

#include <algorithm>
#include <optional>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

#include "base/error.h"
#include "base/plan_device.h"
#include "model/chosen_rows.h"
#include "nn/activations.h"
#include "nn/block.h"
#include "nn/head.h"
#include "nn/mixers.h"
#include "nn/observer.h"
#include "nn/observer_on_host.h"
#include "nn/recurrence.h"
#include "ops/backend.h"
#include "ops/cuda/kinds.h"
#include "ops/profile.h"
#include "scan/backend.h"

namespace fw {
namespace {

// Blocks of an arena: on a GPU, where each costs a call that waits, larger than all but the largest activations. The
// plan of a GPU has one block without an end: what a pass uses of it is what the GPU's arena is to reserve.
size_t arena_block(const Device& device) {
  if (device.kind() == FW_DEVICE_CPU) return size_t{4} << 20;
  return only_plans(device) ? size_t{1} << 40 : size_t{64} << 20;
}

// Rules that a device's recurrence lacks and heads that its kernels cannot hold are refused where a model is made,
// before it takes any memory.
void require_layers(const ModelConfig& c, const Device& device) {
  if (device.kind() == FW_DEVICE_CPU) return;
  if (c.mlp == "experts" && c.experts.num_experts > cuda::kinds::kMostExperts) {
    fail_usage("device: expected the CPU, or at most {} experts of a layer on CUDA devices, got {}",
               cuda::kinds::kMostExperts, c.experts.num_experts);
  }
  for (int64_t i = 0; i < c.num_hidden_layers; ++i) {
    const MixerSpec spec = c.layer_spec(i);
    const auto* mesa = std::get_if<MesaSpec>(&spec);
    if (mesa != nullptr && mesa->dim > cuda::kinds::kMostMesaKey) {
      fail_usage("device: expected the CPU, or Mesa layers with a head_dim of at most {} on CUDA devices, got {}",
                 cuda::kinds::kMostMesaKey, mesa->dim);
    }
    const auto* mamba3 = std::get_if<Mamba3Spec>(&spec);
    if (mamba3 != nullptr && mamba3->mimo_rank > 0 &&
        (2 * mamba3->rank() + 1) * mamba3->head_dim > cuda::kinds::kMostMamba3Sums) {
      fail_usage(
          "device: expected the CPU, or Mamba-3 layers with (2 mimo_rank + 1) head_dim of at most {} on CUDA devices, "
          "got {}",
          cuda::kinds::kMostMamba3Sums, (2 * mamba3->rank() + 1) * mamba3->head_dim);
    }
    const auto* mla = std::get_if<MlaSpec>(&spec);
    if (mla != nullptr && mla->latent() > cuda::kinds::kMostAttentionDim) {
      fail_usage(
          "device: expected the CPU, or latent attention with kv_rank + shared_key_dim of at most {} on CUDA devices, "
          "got {}",
          cuda::kinds::kMostAttentionDim, mla->latent());
    }
    const auto* recurrent = std::get_if<RecurrentMixerSpec>(&spec);
    if (recurrent == nullptr) continue;
    if (const char* expected = cuda_backend().lacks(recurrent->rule, recurrent->heads, recurrent->v_heads)) {
      fail_usage("device: expected the CPU, or {}: the rule '{}' does not run on CUDA devices", expected,
                 c.layer_rule(i));
    }
  }
}

// T: the type of activations.
template <class T>
class EngineOf final : public Engine<Wide<T>> {
 public:
  using W = Wide<T>;

  EngineOf(const ModelConfig& c, Device& device, Params<W>& params, MasterFormat master_format)
      : config_(c),
        params_(params),
        norm_(c.norm_spec()),
        embedding_("model.embeddings.weight", c.vocab_size, c.hidden_size, c.embedding_norm ? &norm_ : nullptr,
                   "model.embeddings_norm", params),
        blocks_(make_blocks(c, params)),
        head_("model.norm", "lm_head.weight", c.tie_word_embeddings ? embedding_.index() : -1, c.vocab_size,
              c.hidden_size, norm_, params),
        arena_(device, arena_block(device)),
        recompute_arena_(device, arena_block(device)),
        exec_{ops_of<T>(device), device, arena_, contexts_arena_},
        recompute_exec_{ops_of<T>(device), device, recompute_arena_, contexts_arena_},
        wide_(wide_exec(exec_)),
        recurrences_(device) {
    for (const std::string& kind : c.layers) require_layer<T>(kind, device);
    require_layers(c, device);
    if (norm_.kind == NormKind::kLayer) require_layer<T>("layernorm", device);
    if (c.mlp == "channel_mix" || c.mlp == "experts") require_layer<T>(c.mlp, device);
    params.allocate(device, master_format);
    contexts_.resize(blocks_.size());
    if (layers_with_experts() > 0) {
      expert_load_ = Buffer<int64_t>(device, layers_with_experts() * c.experts.num_experts);
      expert_load_.zero();
    }
  }

  const Exec<W>& over_parameters() const override { return wide_; }
  void set_precision(Precision precision) override { exec_.precision = recompute_exec_.precision = precision; }
  void set_recompute(RecomputeLayers what) override {
    if (!(what == recompute_)) largest_ = 0;  // the next pass begins with new memory
    recompute_ = what;
  }
  void set_form(fw_form form) override { form_ = form; }
  void adapt(Lora<W>* lora) override { lora_ = lora; }
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
    if (layers_with_experts() > 0)
      pass.balance = static_cast<W>(config_.experts.balance) * grad_scale / static_cast<W>(layers_with_experts());
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
      head_.loss_backward(pass, rows, device_targets, grad_scale, drows, sum);
      scatter(drows, *few, dx);
    } else {
      head_.loss_backward(pass, residual, device_targets, grad_scale, dx, sum);
    }
    arena_.rewind(mark);
    for (size_t i = blocks_.size(); i-- > 0;) blocks_[i].backward(pass_of(pass, i), contexts_[i], dx);
    embedding_.backward(pass, device_ids, dx);
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
    head_.loss(pass, residual, device_targets, device_nll, sum);
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
      head_.logits(pass, now, logits);
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
    head_.logits(pass, last, rows);
    download(rows, logits);
  }

  void forward_all(std::span<const int32_t> ids, const SeqLayout& layout, ModelState<W>* state,
                   Mat<W> logits) override {
    const Pass<T> pass = begin(layout, state, false);
    Residual<T> residual = run(pass, upload(ids), state);
    if (state != nullptr) state->advance(layout);
    const Mat<T> rows = new_matrix<T>(arena_, logits.rows, logits.cols);
    head_.logits(pass, residual, rows);
    download(rows, logits);
  }

  std::unique_ptr<Decoder<W>> decoder(ModelState<W>& state) override {
    return std::make_unique<DecoderOf>(*this, state);
  }

  std::vector<int64_t> take_expert_load() override {
    if (layers_with_experts() == 0) return {};
    std::vector<int64_t> load = expert_load_.to_vector();
    expert_load_.zero();
    return load;
  }

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
  // Memory of its own, which no other pass of the model touches: what is recorded keeps its places.
  class DecoderOf final : public Decoder<W> {
   public:
    DecoderOf(EngineOf& engine, ModelState<W>& state)
        : engine_(engine),
          device_(engine.exec_.device),
          state_(state),
          layout_(SeqLayout::uniform(state.sequences(), 1)),
          arena_(device_, arena_block(device_)),
          exec_{ops_of<T>(device_), device_, arena_, contexts_arena_, engine.exec_.precision},
          recurrences_(device_),
          form_(engine.form_),
          offsets_(device_, layout_.count() + 1),
          positions_(device_, layout_.count()),
          seen_(device_, layout_.count()),
          ids_(device_, layout_.count()),
          recent_(device_, layout_.count() * kMostRecent),
          drawn_(device_, layout_.count()),
          logits_(device_, layout_.count() * engine.config_.vocab_size),
          read_back_(device_.read_back(sizeof(Drawn) * static_cast<size_t>(layout_.count()))) {
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
      exec_.sample_tokens(logits(), vocab_size, sampling, streams);
      read_back_->queue(drawn_.data());
    }

    void step() override {
      engine_.refresh_parameters(exec_);
      if (room_ == 0) {
        state_.prepare(layout_, kCacheRows - 1);
        room_ = kCacheRows;
        if (views_ != state_.views()) recorded_.reset();
        views_ = state_.views();
      }
      --room_;
      state_.advance(layout_);
      if (recorded_ != nullptr) return recorded_->queue();
      pass();  // plans, memory and the library's algorithms are made here
      if (Profile::current() == nullptr) recorded_ = device_.record([this] { pass(); });
    }

    std::span<const Drawn> wait() override {
      return {static_cast<const Drawn*>(read_back_->wait()), static_cast<size_t>(layout_.count())};
    }

    void read_logits(int64_t n, std::span<W> to) override {
      engine_.download(logits().row_range(n, 1), Mat<W>(to.data(), 1, vocab()));
    }

   private:
    int64_t vocab() const { return engine_.config_.vocab_size; }
    Mat<T> logits() { return {logits_.data(), layout_.count(), vocab()}; }
    void pass() {
      arena_.release();
      contexts_arena_.release();
      const PassLayout layout(layout_, offsets_.data(), positions_.data());
      Pass<T> pass{engine_.params_, layout, exec_, recurrences_, false, form_, nullptr};
      engine_.share_first_value(pass, first_value_);
      Residual<T> residual = engine_.run_prepared(pass, ids_.data(), &state_);
      engine_.head_.logits(pass, residual, logits());
    }

    EngineOf& engine_;
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

  static std::vector<Block<T>> make_blocks(const ModelConfig& c, Params<W>& params) {
    for (ParamSpec& spec : shared_parameters(c)) params.declare(std::move(spec));
    std::vector<Block<T>> list;
    list.reserve(static_cast<size_t>(c.num_hidden_layers));
    for (int64_t i = 0; i < c.num_hidden_layers; ++i) {
      const MixerSpec mixer = c.layer_spec(i);
      list.emplace_back(fmt::format("model.layers.{}.", i), c.mlp_spec(i), c.norm_spec(), c.norm_position(i),
                        static_cast<int64_t>(mixer_state(mixer).size()), params,
                        [&](const std::string& prefix) { return make_mixer<T>(mixer, prefix, params); });
    }
    return list;
  }

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
    refresh_parameters(exec_);
    const int64_t* positions = state == nullptr ? nullptr : upload(std::span<const int64_t>(state->positions()));
    PassLayout pass_layout(layout, upload(std::span<const int64_t>(layout.offsets())), positions);
    if (state != nullptr) pass_layout.host_positions = state->positions().data();
    Pass<T> pass{params_, pass_layout, exec_, recurrences_, keep, form_, observer_};
    share_first_value(pass, first_value_);
    return pass;
  }

  // Where the first layer of RWKV-7 leaves its values for those after it.
  void share_first_value(Pass<T>& pass, FirstValue<T>& value) const {
    if (config_.first_rwkv7() < 0) return;
    value.value = new_matrix<T>(pass.exec.arena, pass.layout.host.tokens(), config_.hidden_size);
    pass.first_value = &value;
  }

  int64_t layers_with_experts() const { return config_.num_hidden_layers - config_.dense_layers(); }

  // The pass as layer i takes it.
  Pass<T> pass_of(const Pass<T>& pass, size_t i) {
    Pass<T> of = pass;
    of.recompute = pass.keep ? recompute_.of(static_cast<int64_t>(i)) : Recompute::kNone;
    of.recompute_exec = of.recompute != Recompute::kNone ? &recompute_exec_ : nullptr;
    const int64_t expert_layer = static_cast<int64_t>(i) - config_.dense_layers();
    if (pass.keep && expert_layer >= 0)
      of.expert_load = expert_load_.data() + expert_layer * config_.experts.num_experts;
    return of;
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

  // What passes read beside the values themselves, made again where those may have changed.
  void refresh_parameters(const Exec<T>& exec) {
    params_.refresh_scales([&](const W* from, int64_t n, W* to) { exec.add_values(from, n, to); });
    const auto round = [&](Params<W>& params) {
      if (std::is_same_v<T, W> && exec.precision != Precision::kBf16) return;
      if (Bf16* to = params.old_rounded()) {
        const std::span<const W> values = std::as_const(params).values();
        exec_.round_values(values.data(), static_cast<int64_t>(values.size()), to);
      }
    };
    round(params_);
    if (lora_ == nullptr) return;
    round(lora_->params());
    lora_->attach(params_);
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
  // Rows of a matrix of the arena become rows of the caller's, which is host memory: one wait for all.
  void download(Mat<const T> from, Mat<W> to) {
    std::vector<T> rows(static_cast<size_t>(from.rows * from.stride));
    exec_.device.to_host(rows.data(), from.data, sizeof(T) * rows.size());
    for (int64_t r = 0; r < from.rows; ++r) {
      const T* row = rows.data() + r * from.stride;
      if constexpr (std::is_same_v<T, W>) {
        std::copy(row, row + from.cols, to.row(r));
      } else {
        widen_bf16(from.cols, row, to.row(r));
      }
    }
  }

  // The residual stream after all blocks.
  Residual<T> run(const Pass<T>& pass, const int32_t* ids, ModelState<W>* state) {
    if (state != nullptr) state->prepare(pass.layout.host);
    return run_prepared(pass, ids, state);
  }
  Residual<T> run_prepared(const Pass<T>& pass, const int32_t* ids, ModelState<W>* state) {
    Residual<T> residual;
    Arena& arena = pass.exec.arena;
    residual.x = new_matrix<T>(arena, pass.layout.host.tokens(), config_.hidden_size);
    if (!pass.keep) residual.delta = new_matrix<T>(arena, pass.layout.host.tokens(), config_.hidden_size);
    embedding_.forward(pass, ids, residual.x);
    for (size_t i = 0; i < blocks_.size(); ++i) {
      if (pass.observer != nullptr) pass.observer->begin_layer(static_cast<int64_t>(i));
      blocks_[i].forward(pass_of(pass, i), residual,
                         state == nullptr ? LayerState<T>() : state->template layer<T>(static_cast<int64_t>(i)),
                         &contexts_[i]);
    }
    return residual;
  }

  const ModelConfig config_;
  Params<W>& params_;
  const NormSpec norm_;
  Embedding<T> embedding_;
  std::vector<Block<T>> blocks_;
  Head<T> head_;
  std::vector<typename Block<T>::Context> contexts_;
  FirstValue<T> first_value_;
  Buffer<int64_t> expert_load_;  // [layers with experts, E]
  Arena arena_, contexts_arena_;
  Arena recompute_arena_;  // of what backward recomputes
  int64_t largest_ = 0;
  Exec<T> exec_, recompute_exec_;
  Exec<W> wide_;
  Recurrences<T> recurrences_;
  fw_form form_ = FW_FORM_AUTO;
  RecomputeLayers recompute_;
  Scratch reserved_;
  const void *first_byte_ = nullptr, *first_recompute_ = nullptr;  // of the arenas' first blocks
  std::optional<ObserverOnHost<T>> on_host_;                       // of activations that are not W
  PassObserver<T>* observer_ = nullptr;
  Lora<W>* lora_ = nullptr;
};

}  // namespace

template <class W>
std::unique_ptr<Engine<W>> make_engine(const ModelConfig& config, Device& device, Params<W>& params,
                                       MasterFormat master_format) {
  if constexpr (std::is_same_v<W, float>) {
    if (bf16_activations<W>(device)) return std::make_unique<EngineOf<Bf16>>(config, device, params, master_format);
  }
  return std::make_unique<EngineOf<W>>(config, device, params, MasterFormat::kFp32);
}

template std::unique_ptr<Engine<float>> make_engine(const ModelConfig&, Device&, Params<float>&, MasterFormat);
template std::unique_ptr<Engine<double>> make_engine(const ModelConfig&, Device&, Params<double>&, MasterFormat);

}  // namespace fw
