// Plan: a descriptor, checked, with everything that follows from it: the sequences, the chunk size, the form of each
// sequence, and where workspace and saved buffers lie. A plain function of the descriptor and the number of threads.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "fastweight/fastweight.h"
#include "rule/gates.h"
#include "rule/rule.h"

namespace fw {

// Tiles and saved buffers have rows padded with zeros to a multiple of this many elements.
inline constexpr int64_t kPad = 16;
constexpr int64_t padded(int64_t n) { return (n + kPad - 1) / kPad * kPad; }

// What the kernels see of the decay; a constant decay is a scalar one without a tensor.
enum class DecayKind { kNone, kScalar, kChannel };

struct Backend;  // backend.h

// Which states of a pool a sequence has; arrays in the device's memory, read when the call runs (fw_desc.slots,
// token_slots).
struct Slots {
  const int32_t* own = nullptr;       // [N]
  const int32_t* tokens = nullptr;    // [N, columns]
  const int32_t* accepted = nullptr;  // [N]
  const int32_t* finals = nullptr;    // [N]
  int64_t columns = 0;
  int32_t first = 0;       // those below it are none
  bool clears = false;     // o of a skipped sequence is zero
  bool skips = false;      // sequences without a slot, as fw_step does; else they start from zero
  int32_t token_rows = 1;  // of a GPU's kernels, 1 or 2: the states after the last row of a token have its slot
  explicit operator bool() const { return own != nullptr || tokens != nullptr; }
  static constexpr int32_t kNone = -1;
  int32_t usable(int32_t slot) const { return slot < first ? kNone : slot; }
  // For a host that may read them: where sequence n starts, and where its states after token t go; kNone: nowhere.
  int64_t start(int64_t n) const {
    if (accepted != nullptr) {
      const int64_t column = accepted[n] < 1 ? 0 : accepted[n] < columns ? accepted[n] - 1 : columns - 1;
      return usable(tokens[n * columns + column]);
    }
    return own != nullptr ? usable(own[n]) : n;
  }
  int64_t after(int64_t n, int64_t t) const { return usable(tokens[n * columns + t]); }
  // Without slots of tokens: where its final states go.
  int64_t end(int64_t n) const { return finals != nullptr ? usable(finals[n]) : start(n); }
  bool skipped(int64_t n) const { return skips && start(n) < 0; }
  // Whether o of sequences that may be skipped must stay as it is.
  bool keeps_outputs() const { return *this && skips && !clears; }
};

// Copies of the states every so many tokens of a sequence (fw_desc.checkpoint_interval).
struct Checkpoints {
  int64_t interval = 0;            // tokens; 0: none
  const int32_t* slots = nullptr;  // [N, columns], in the device's memory
  int64_t columns = 0;
  int64_t count = 0;  // first dimension of the tensors
};

// Tokens that are not in the states yet (fw_desc.ring, scan/ring.h).
struct Ring {
  int64_t tokens = 0;                  // from fold to fold; 0: none
  int64_t rows = 0;                    // of the ring
  const int32_t* positions = nullptr;  // [N], in the device's memory
  const int32_t* previous = nullptr;   // [N], the same; null: no token is taken back
  int64_t decays = 0;                  // numbers of a token's decay
  explicit operator bool() const { return tokens > 0; }
  bool keeps() const { return previous != nullptr; }
};

struct Plan {
  Rule rule;
  Gates gates;
  fw_dtype dtype = FW_F32;
  bool bf16_io = false;        // tensors of tokens may be bf16,
  bool f16_io = false;         // or float16
  bool f32_gates = false;      // with bf16_io: log-decays and logits are float32 all the same (rewrites/staged_rows.h)
  bool bf16_operands = false;  // of the chunk form's products
  fw_form form = FW_FORM_AUTO;
  fw_state_layout state_layout = FW_STATE_K_FIRST;
  int64_t B = 0, T = 0, H = 0, HV = 0, K = 0, V = 0;
  double scale = 1;
  int64_t chunk = 64;   // rows C of a chunk
  bool packed = false;  // cu_seqlens were given (B = 1)
  // packed, of FW_SEQLENS_DEVICE: N + 1 offsets that only the device reads; what follows are then bounds
  const void* device_offsets = nullptr;
  bool offsets_are_64 = false;   // they are int64_t
  int64_t N = 0;                 // sequences
  std::vector<int64_t> offsets;  // packed: N + 1 offsets; empty with device_offsets
  // packed: N + 1 numbers of chunks before sequence n; with device_offsets all there may be, alone
  std::vector<int64_t> chunk_base;
  int64_t longest = 0;             // tokens of the longest sequence,
  int64_t longest_token_form = 0;  // and of the longest whose backward runs token by token
  int threads = 1;
  const Backend* backend = nullptr;  // of the descriptor's device
  int device_number = -1;            // CUDA's; -1: the calling thread's current one
  void* stream = nullptr;
  Slots slots;
  bool bits_of_steps = false;  // fw_step and FW_FORM_DECODE, also where a GPU's forward is a call of another form
  Checkpoints checkpoints;
  Ring ring;
  int64_t segment = 0;       // tokens of a segment as asked for: 0: by the shape, -1: none
  int64_t states = 0;        // first dimension of the initial states: N, or the number of slots
  int64_t final_states = 0;  // and of the final ones

  int64_t group() const { return HV / H; }
  DecayKind decay_kind() const;
  // Vectors along which a token changes the state: w, and f where the erase has one of its own.
  int64_t keys() const { return rule.uses_erase_write() ? 2 : 1; }
  int64_t length(int64_t n) const {
    return packed ? offsets[static_cast<size_t>(n) + 1] - offsets[static_cast<size_t>(n)] : T;
  }
  // Tokens are numbered over all sequences, in order: the index into workspace arrays [tokens, ...].
  int64_t first_token(int64_t n) const { return packed ? offsets[static_cast<size_t>(n)] : n * T; }
  int64_t tokens() const { return packed ? T : B * T; }
  int64_t chunks(int64_t n) const { return (length(n) + chunk - 1) / chunk; }
  int64_t total_chunks() const { return packed ? chunk_base.back() : N * chunks(0); }
  // Chunks before sequence n.
  int64_t first_chunk(int64_t n) const { return packed ? chunk_base[static_cast<size_t>(n)] : n * chunks(0); }
  // Whether forward of sequence n runs token by token: its own length decides, so that it gives the same bits alone or
  // in a batch. And whether its backward does.
  bool token_form(int64_t n) const;
  bool token_backward(int64_t n) const { return token_form(n) && form != FW_FORM_DECODE; }
  // Where checkpoint i of sequence n goes, of a host that may read slots; Slots::kNone: nowhere.
  int64_t checkpoint_index(int64_t n, int64_t i) const {
    if (checkpoints.slots != nullptr) return slots.usable(checkpoints.slots[n * checkpoints.columns + i]);
    return (packed ? first_token(n) / checkpoints.interval : n * (T / checkpoints.interval)) + i;
  }
  int64_t checkpoints_of(int64_t n) const { return checkpoints.interval > 0 ? length(n) / checkpoints.interval : 0; }
  // A token in the ring: w [K], u [V], the decay.
  int64_t ring_width() const { return K + V + ring.decays; }
  // Rows of the ring that a call reads and writes at most.
  int64_t ring_span_rows() const;
  size_t element() const { return dtype == FW_F32 ? sizeof(float) : sizeof(double); }

  // Saved by forward for backward, per value head (p: padded):
  // - the state at the start of every chunk [K, Vp],
  // - the residuals R [tokens, Vp],
  // - the triangular matrices A, T [2 C, Cp] of every chunk and key; without FW_FORM_DECODE, whose backward makes them.
  //
  // Offsets in elements.
  int64_t saved_residuals() const { return total_chunks() * HV * K * padded(V); }
  int64_t saved_triangles() const { return saved_residuals() + tokens() * HV * padded(V); }
  bool saves_triangles() const { return form != FW_FORM_DECODE; }
  int64_t saved_elements() const {
    return saved_triangles() + (saves_triangles() ? total_chunks() * HV * triangle_size() : 0);
  }
  int64_t triangle_size() const { return keys() * 2 * chunk * padded(chunk); }
  int64_t state_index(int64_t n, int64_t c, int64_t hv) const { return chunk_index(n, c, hv) * K * padded(V); }
  int64_t residual_index(int64_t token, int64_t hv) const {
    return saved_residuals() + (hv * tokens() + token) * padded(V);
  }
  int64_t triangle_index(int64_t n, int64_t c, int64_t hv) const {
    return saved_triangles() + chunk_index(n, c, hv) * triangle_size();
  }

 private:
  int64_t chunk_index(int64_t n, int64_t c, int64_t hv) const { return (first_chunk(n) + c) * HV + hv; }
};

// The line of fw_plan_text about a ring; nothing without one.
std::string ring_text(const Plan& plan);

// step: of fw_step. Throws Error(kUsage) naming the field, what was expected and what came.
Plan make_plan(const fw_desc& desc, bool step = false);

}  // namespace fw
