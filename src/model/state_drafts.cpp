#include "model/state_drafts.h"

#include <algorithm>

#include "base/error.h"

namespace fw {
namespace {

constexpr int64_t kPageAlignment = 16;  // bytes, which Pages::aligned promises

int64_t mod(int64_t x, int64_t n) { return (x % n + n) % n; }

}  // namespace

StateDrafts::StateDrafts(Device& device, int64_t sequences, int64_t tokens)
    : device_(&device),
      sequences_(sequences),
      tokens_(tokens),
      here_(static_cast<size_t>(sequences)),
      from_(sequences * tokens * static_cast<int64_t>(sizeof(int64_t))),
      to_(from_ + sequences * static_cast<int64_t>(sizeof(int32_t))),
      host_tables_(static_cast<size_t>(to_) + static_cast<size_t>(sequences * tokens) * sizeof(int32_t)),
      tables_(device, static_cast<int64_t>(host_tables_.size())) {}

void StateDrafts::add(size_t layer, size_t tensor, const StateTensor& spec, int64_t number_bytes) {
  if (spec.kind == StateKind::kCache) return;
  Part& part = parts_.emplace_back();
  part.layer = layer, part.tensor = tensor;
  if (spec.kind == StateKind::kMatrix) part.takes_back = spec.takes_back;
  if (part.takes_back == TakesBack::kSlots) {
    part.width = spec.size();
    part.held = part.value_rows = 1;
    part.rows = tokens_;
  } else if (part.takes_back == TakesBack::kTail || spec.kind == StateKind::kRing) {
    const bool tail = part.takes_back == TakesBack::kTail;
    part.width = spec.shape[1];
    part.held = part.value_rows = spec.shape[0];
    part.rows = part.held + tokens_ - (tail ? 0 : 1);
  } else {
    fail_internal("drafts: the tensor '{}' of layer {} takes no tokens back", spec.name, layer);
  }
  part.row_bytes = part.width * number_bytes;
  part.stride = part.rows * part.row_bytes;
  if (spec.kind == StateKind::kRing) part.stride = (part.stride + kPageAlignment - 1) / kPageAlignment * kPageAlignment;
  part.memory = Buffer<std::byte>(*device_, sequences_ * part.stride);
  if (spec.kind == StateKind::kRing) {
    for (const int64_t tokens : {int64_t{1}, tokens_}) {
      std::vector<void*> pages;
      for (int64_t i = 0; i < sequences_ * tokens; ++i) pages.push_back(part.memory.data() + i / tokens * part.stride);
      Buffer<void*>& table = part.pages[static_cast<size_t>(pass_index(tokens))];
      table = Buffer<void*>(*device_, static_cast<int64_t>(pages.size()));
      table.write(0, pages);
    }
  }
  const auto same = [&](const Tails& tails) { return tails.held == part.held; };
  if (part.takes_back != TakesBack::kTail || std::any_of(tails_.begin(), tails_.end(), same)) return;
  Tails& tails = tails_.emplace_back();
  tails.held = part.held;
  tails.put = static_cast<int64_t>(host_tables_.size());
  tails.get = tails.put + sequences_ * tokens_ * static_cast<int64_t>(sizeof(int32_t));
  host_tables_.resize(static_cast<size_t>(tails.get) +
                      static_cast<size_t>(sequences_ * tokens_ * tails.held) * sizeof(int32_t));
  tables_ = Buffer<std::byte>(*device_, static_cast<int64_t>(host_tables_.size()));
}

size_t StateDrafts::bytes() const {
  size_t bytes = host_tables_.size();
  for (const Part& part : parts_) {
    bytes += static_cast<size_t>(part.memory.size());
    for (const Buffer<void*>& pages : part.pages) bytes += static_cast<size_t>(pages.size()) * sizeof(void*);
  }
  return bytes;
}

// The rows that a sequence needs, from one place to the other; `here`: to this one.
void StateDrafts::copy(Part& part, const Values& values, int64_t sequence, int64_t position, bool here) {
  // A tail has its oldest row first, a window has rows by their position. Before a text a tail has rows of zeros.
  const int64_t begin = position - part.held, shift = part.takes_back == TakesBack::kTail ? begin : 0;
  std::byte* there = values(part.layer, part.tensor) + sequence * part.value_rows * part.row_bytes;
  std::byte* own = part.memory.data() + sequence * part.stride;
  int64_t at = part.takes_back == TakesBack::kNothing ? std::max<int64_t>(begin, 0) : begin;
  while (at < position) {
    const int64_t i = mod(at - shift, part.value_rows), j = mod(at, part.rows),
                  count = std::min({position - at, part.value_rows - i, part.rows - j});
    std::byte *outer = there + i * part.row_bytes, *inner = own + j * part.row_bytes;
    device_->copy(here ? inner : outer, here ? outer : inner, static_cast<size_t>(count * part.row_bytes));
    at += count;
  }
}

void StateDrafts::load(const Values& values, const std::vector<int64_t>& positions) {
  for (int64_t n = 0; n < sequences_; ++n) {
    char& here = here_[static_cast<size_t>(n)];
    if (here != 0) continue;
    for (Part& part : parts_) copy(part, values, n, positions[static_cast<size_t>(n)], true);
    here = 1;
  }
}

void StateDrafts::store(const Values& values, const std::vector<int64_t>& positions) {
  for (int64_t n = 0; n < sequences_; ++n) {
    if (here_[static_cast<size_t>(n)] == 0) continue;
    for (Part& part : parts_) copy(part, values, n, positions[static_cast<size_t>(n)], false);
  }
  clear();
}

void StateDrafts::set_positions(int64_t tokens, const std::vector<int64_t>& positions) {
  const auto host = [&]<class Value>(int64_t at) { return reinterpret_cast<Value*>(host_tables_.data() + at); };
  int64_t* all = host.template operator()<int64_t>(0);
  int32_t *from = host.template operator()<int32_t>(from_), *to = host.template operator()<int32_t>(to_);
  for (int64_t n = 0; n < sequences_; ++n) {
    const int64_t first = positions[static_cast<size_t>(n)];
    from[n] = static_cast<int32_t>(n * tokens_ + mod(first - 1, tokens_));
    for (int64_t t = 0; t < tokens; ++t) {
      all[n * tokens + t] = first + t;
      to[n * tokens + t] = static_cast<int32_t>(n * tokens_ + (first + t) % tokens_);
    }
  }
  for (const Tails& tails : tails_) {
    int32_t *put = host.template operator()<int32_t>(tails.put), *get = host.template operator()<int32_t>(tails.get);
    const int64_t rows = tails.held + tokens_;
    for (int64_t i = 0; i < sequences_ * tokens; ++i) {
      const int64_t n = i / tokens, position = positions[static_cast<size_t>(n)] + i % tokens;
      put[i] = static_cast<int32_t>(n * rows + position % rows);
      for (int64_t j = 0; j < tails.held; ++j)
        get[i * tails.held + j] = static_cast<int32_t>(n * rows + mod(position - tails.held + j, rows));
    }
  }
  tables_.write(0, host_tables_);
}

const StateDrafts::Tails& StateDrafts::tails(int64_t held) const {
  return *std::find_if(tails_.begin(), tails_.end(), [&](const Tails& tails) { return tails.held == held; });
}

void StateDrafts::show(size_t layer, size_t tensor, int64_t tokens, StateView& view) {
  view.draft_tokens = tokens;
  for (Part& part : parts_) {
    if (part.layer != layer || part.tensor != tensor) continue;
    view.data = part.memory.data();
    view.bytes = part.memory.size();
    view.rows = part.rows;
    view.width = part.width;
    switch (part.takes_back) {
      case TakesBack::kSlots:
        view.slots = {tokens, tokens_, table<int32_t>(from_), table<int32_t>(to_)};
        break;
      case TakesBack::kTail:
        view.per_sequence = part.held;
        view.put = table<int32_t>(tails(part.held).put);
        view.get = table<int32_t>(tails(part.held).get);
        break;
      case TakesBack::kNothing: {
        const Buffer<void*>& pages = part.pages[static_cast<size_t>(pass_index(tokens))];
        view.table = pages.data();
        view.data = nullptr;
        break;
      }
    }
  }
}

}  // namespace fw
