// ModelState: what a model remembers of N sequences. It has the tensors that each layer's mixer declares
// (nn/layer_state.h) and the number of tokens that each sequence has seen. That number is the position of its next
// token. An object: create, copy (fork), save, load. Its file is a safetensors file whose metadata says layout, dtype,
// rule and the hash of the model's parameters; loading into another model is an error.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <type_traits>
#include <vector>

#include "base/buffer.h"
#include "base/safetensors.h"
#include "base/seq_layout.h"
#include "model/config.h"
#include "model/state_drafts.h"
#include "model/state_rings.h"
#include "nn/layer_state.h"

namespace fw {

// Whether models of type T have bf16 activations on a device: float ones do on a GPU; parameters, states of recurrences
// and sums stay T.
template <class T>
bool bf16_activations(const Device& device) {
  return std::is_same_v<T, float> && device.kind() == FW_DEVICE_CUDA;
}

// What the tokens of a pass change of a matrix state that has a ring: the state, or as in decoding the ring alone.
enum class StateWrites { kStates, kRings };

// T is float or double, whatever the activations are.
template <class T>
class ModelState {
 public:
  // All zero, caches empty; in the memory of the device of the model that it is for.
  ModelState(const ModelConfig& config, int64_t sequences, Device& device = host_device());
  // A copy has neither rings nor places of drafts; what they hold of `other` is folded and stored first.
  ModelState(const ModelState& other);
  ModelState(ModelState&&) noexcept = default;
  ModelState& operator=(const ModelState& other) {
    if (this != &other) *this = ModelState(other);
    return *this;
  }
  ModelState& operator=(ModelState&&) noexcept = default;
  ~ModelState() = default;
  Device& device() const { return *device_; }
  int64_t sequences() const { return sequences_; }
  int64_t layers() const { return static_cast<int64_t>(layers_.size()); }
  // Tokens seen by each sequence [N]. The model calls advance() once after a pass, when all its layers have read them.
  const std::vector<int64_t>& positions() const { return positions_; }
  void advance(const SeqLayout& layout, StateWrites writes = StateWrites::kStates);
  // Makes room in the caches for the tokens of a pass, and of each sequence for `ahead` more. Until the next call, or
  // until the state is copied or moved, layer(i) is what the pass works on.
  void prepare(const SeqLayout& layout, int64_t ahead = 0, StateWrites writes = StateWrites::kStates);
  // Rings for passes of one token a sequence, for the recurrences that have one (nn/decode_ring.h): of `tokens` tokens,
  // 0 or none given for none. Everything else that reads or replaces states folds or drops what rings
  // hold, so only those passes see them. A fold at another position than the ring's end changes the rounding of later
  // tokens.
  void use_rings(const std::optional<int64_t>& tokens);
  // Null where no recurrence has a ring. A decoder's sampler counts their positions on.
  StateRings<T>* rings() { return rings_.get(); }
  // Places for passes of up to `tokens` tokens a sequence, some of which are taken back (state_drafts.h); 0: none.
  // Every tensor of the model takes tokens back (StateTensor). Everything else that reads or replaces states stores or
  // drops what lies there. Not with rings.
  void use_drafts(int64_t tokens);
  // In place of prepare(), for passes of `tokens` tokens, 1 or the most. Pages of caches are there for `ahead` more.
  void prepare_drafts(int64_t tokens, int64_t ahead);
  // layer(i) is what a pass of so many works on, as it was prepared.
  void show_drafts(int64_t tokens) { shown_ = 1 + static_cast<size_t>(drafts_->pass_index(tokens)); }
  // In place of advance(), before the pass: its tables go to the device. Their positions of the tokens [N, tokens] are
  // at draft_positions().
  void begin_drafts(int64_t tokens);
  const int64_t* draft_positions() const { return drafts_->positions(); }
  // The last `tokens` of those that sequence n has seen since begin_drafts(), but not all of them, never came.
  void take_back(int64_t n, int64_t tokens) { positions_[static_cast<size_t>(n)] -= tokens; }
  // What all layers work on: passes that find it unchanged may be recorded ones.
  const std::vector<std::vector<StateView>>& views() const { return views_[shown_]; }
  // Sequence n becomes a copy of the only one of `one`, a state of the same model; prepare() comes before the next
  // pass.
  void put(int64_t n, const ModelState& one);
  // Activation: what the model's activations are, T or, on a device that has bf16 ones, Bf16.
  template <class Activation = T>
  LayerState<Activation> layer(int64_t i) const {
    const std::vector<StateView>& views = views_[shown_][static_cast<size_t>(i)];
    return {views.data(), static_cast<int64_t>(views.size())};
  }
  // One tensor as its file has it: [N, shape], or of a cache [tokens of all sequences, width]; empty where the layer
  // has none of that name.
  std::vector<T> values(int64_t layer, const std::string& name) const;

  size_t bytes() const;
  void reset();

  // A file of its own: atomic, exact (load refuses tensors that are not a state's).
  void save(const std::string& path, const std::string& rule, const std::string& model_hash) const;
  void load(const std::string& path, const std::string& rule, const std::string& model_hash);

  // The same as a part of a larger file (a session keeps logits and a generator beside it): tensors "state.*" and the
  // metadata keys state_layout, state_dtype, state_rule, state_model. The writer has copies, but of the positions,
  // which must live until writer.write().
  // read_from throws Error(kUsage) and leaves the state as it was when anything differs.
  void add_to(SafetensorsWriter& writer, const std::string& rule, const std::string& model_hash) const;
  void read_from(const SafetensorsReader& reader, const std::string& path, const std::string& rule,
                 const std::string& model_hash);

 private:
  struct Tensor {
    StateTensor spec;
    bool narrow = false;                                // stored in bf16
    Buffer<std::byte> values;                           // kMatrix, kRing: [N, shape]
    std::vector<std::vector<Buffer<std::byte>>> pages;  // kCache: of each sequence
    // kCache: of passes, and of those with drafts (StateDrafts::pass_index)
    std::array<Buffer<void*>, 3> tables;
    int64_t bytes(int64_t count) const { return count * static_cast<int64_t>(narrow ? sizeof(Bf16) : sizeof(T)); }
    Tensor() = default;
    Tensor(const Tensor& other);  // with memory of its own; the table is made by prepare()
    Tensor(Tensor&&) noexcept = default;
    Tensor& operator=(const Tensor& other) { return *this = Tensor(other); }
    Tensor& operator=(Tensor&&) noexcept = default;
    ~Tensor() = default;
  };
  // What rings hold goes into the values, and what lies in places of drafts; the state stays, but for rounding.
  void fold() const;
  StateDrafts::Values memory() const;
  std::string layout() const;  // for the metadata
  std::vector<int64_t> file_shape(const Tensor& tensor, const std::vector<int64_t>& positions) const;
  std::vector<T> rows(const Tensor& tensor) const;  // as its file has them
  bool is_v_first(const Tensor& tensor) const;      // on this device
  static std::vector<T> read(const Tensor& tensor, const Buffer<std::byte>& from, int64_t count);
  static void write(const Tensor& tensor, std::span<const T> values, Buffer<std::byte>& to);
  void grow(Tensor& tensor, int64_t sequence, int64_t tokens) const;
  // repeat: rows of the pass that a sequence has in tables of pages.
  StateView view(Tensor& tensor, size_t table, int64_t repeat) const;

  Device* device_;
  int64_t sequences_ = 0;
  std::vector<std::vector<Tensor>> layers_;
  std::array<std::vector<std::vector<StateView>>, 3> views_;  // as Tensor::tables
  size_t shown_ = 0;
  std::vector<int64_t> positions_;
  std::unique_ptr<StateRings<T>> rings_;
  std::unique_ptr<StateDrafts> drafts_;
};

}  // namespace fw
