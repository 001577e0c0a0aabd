// A state S [N, D] with a decay of each of its elements: S = a (.) S + k z^T, y = S^T q + skip u. With the step s of a
// channel,
//   kMamba:    e = s,                  a = exp(e A),      z = e u
//   kLonghorn: e = s / (1 + s |k|^2),  a = 1 - e k^2,     z = e u
// Channels do not meet but in dq and dk, so a task has a block of them and, in forward, a sequence. Vectors lie along
// the channels; a few rows of the state stay in registers while the tokens of a chunk pass. Backward goes through the
// chunks from the last, makes the states of each again from the checkpoint that forward left at its beginning, and with
// dS = dS + q dy^T before a token's step:
//   dq = S dy     dk = dS z     dz = dS^T k     da = dS (.) S_{t-1}     dS_{t-1} = a (.) dS     du = skip dy + e dz     de = u dz + (da/de)^T ...
// Sums over channels: lanes first, then the blocks in their order, so that they are those of the shape alone.
#include <algorithm>
#include <cmath>

#include "ops/cpu/operations.h"
#include "ops/cpu/row_blocks.h"
#include "ops/cpu/scratch.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/cpu/selective_scan.cpp"
#include "hwy/foreach_target.h"
#include "ops/cpu/simd-inl.h"

#ifndef FW_OPS_CPU_SELECTIVE_SCAN_KERNELS
#define FW_OPS_CPU_SELECTIVE_SCAN_KERNELS
namespace fw {

// What both directions read.
template <class T>
struct ScanTensors {
  Mat<const T> u, step, q, k;
  const T *a_log, *skip;
  const SeqLayout& layout;

  int64_t channels() const { return u.cols; }
  int64_t states() const { return q.cols; }
  int64_t blocks() const { return cpu::scan_blocks(u.cols); }
  // The state that belongs to a chunk, of all channels.
  template <class Value>
  Value* checkpoint(Value* checkpoints, int64_t sequence, int64_t chunk) const {
    return checkpoints + (layout.begin(sequence) / kScanChunk + sequence + chunk) * states() * channels();
  }
};

template <class T>
struct ScanGradients {
  Mat<const T> dy;
  const T *checkpoints, *ds_out;
  Mat<T> du, dstep, dq, dk;
  T *da_log, *dskip, *ds_in;
};

template <class T>
struct ScanKernels {
  void (*forward)(ScanLaw law, const ScanTensors<T>& in, const T* s_in, T* s_out, T* checkpoints, Mat<T> y);
  void (*backward)(ScanLaw law, const ScanTensors<T>& in, const ScanGradients<T>& d,
                   const cpu::ScanScratch<T>& scratch);
};

// Rows of a block's channels, as wide as the widest block: [rows, kScanBlock], zero after the last channel.
template <class T>
T* block_rows(int64_t rows, LocalScratch& scratch) {
  return scratch.alloc_zero<T>(rows * cpu::kScanBlock);
}
template <class T>
void copy_block(const T* from, int64_t rows, int64_t from_stride, int64_t width, T* to, int64_t to_stride) {
  for (int64_t r = 0; r < rows; ++r) std::copy_n(from + r * from_stride, width, to + r * to_stride);
}

}  // namespace fw
#endif

HWY_BEFORE_NAMESPACE();
namespace fw {
namespace HWY_NAMESPACE {

using cpu::kScanBlock;
constexpr int kStateRows = 4;  // in registers

// A block of channels [first, first + width) and the tokens of one chunk of it: copies beside each other.
template <class T>
struct BlockChunk {
  int64_t first, width, padded;  // padded: to whole vectors
  T *u, *z, *e;                  // [kScanChunk, kScanBlock]
  T* rates;                      // [N, kScanBlock]: A, of kMamba

  BlockChunk(ScanLaw law, const ScanTensors<T>& in, int64_t block, LocalScratch& scratch)
      : first(block * kScanBlock),
        width(std::min(kScanBlock, in.channels() - first)),
        u(block_rows<T>(kScanChunk, scratch)),
        z(block_rows<T>(kScanChunk, scratch)),
        e(block_rows<T>(kScanChunk, scratch)),
        rates(law == ScanLaw::kMamba ? block_rows<T>(in.states(), scratch) : nullptr) {
    const hn::ScalableTag<T> d;
    const int64_t lanes = static_cast<int64_t>(hn::Lanes(d)), N = in.states();
    padded = (width + lanes - 1) / lanes * lanes;
    if (law != ScanLaw::kMamba) return;
    for (int64_t c = 0; c < width; ++c) {
      for (int64_t n = 0; n < N; ++n) rates[n * kScanBlock + c] = in.a_log[(first + c) * N + n];
    }
    for (int64_t n = 0; n < N; ++n) {
      for (int64_t i = 0; i < padded; i += lanes)
        hn::StoreU(hn::Neg(hn::Exp(d, hn::LoadU(d, rates + n * kScanBlock + i))), d, rates + n * kScanBlock + i);
    }
  }
};

template <class T>
T square_norm(const T* k, int64_t n) {
  T sum = 0;
  for (int64_t i = 0; i < n; ++i) sum += k[i] * k[i];
  return sum;
}

// u, e and z of the tokens [begin, begin + count).
template <ScanLaw law, class T>
void load_chunk(const ScanTensors<T>& in, int64_t begin, int64_t count, const BlockChunk<T>& b) {
  const hn::ScalableTag<T> d;
  const auto one = hn::Set(d, T(1));
  for (int64_t t = 0; t < count; ++t) {
    const T* u = in.u.row(begin + t) + b.first;
    const T* step = in.step.row(begin + t) + b.first;
    const int64_t row = t * kScanBlock;
    const auto square = hn::Set(d, law == ScanLaw::kLonghorn ? square_norm(in.k.row(begin + t), in.states()) : T(0));
    for_lanes(d, b.width, [&](auto m, int64_t i) HWY_ATTR {
      const auto x = m.load(d, u + i);
      auto e = m.load(d, step + i);
      if constexpr (law == ScanLaw::kLonghorn) e = hn::Div(e, hn::MulAdd(e, square, one));
      m.store(d, x, b.u + row + i);
      m.store(d, e, b.e + row + i);
      m.store(d, hn::Mul(e, x), b.z + row + i);
    });
  }
}

// The decay of an element.
template <ScanLaw law, class D, class V = hn::Vec<D>>
HWY_INLINE V element_decay(D d, V e, V rate, V k) {
  if constexpr (law == ScanLaw::kMamba) return exp_nonpositive(d, hn::Mul(e, rate));
  return hn::NegMulAdd(hn::Mul(e, k), k, hn::Set(d, hn::TFromD<D>(1)));
}

// Rows n .. n + R of the state through `count` tokens: s [N, kScanBlock] in place, y [kScanChunk, kScanBlock]
// accumulates.
template <ScanLaw law, int R, class T>
void scan_rows(const ScanTensors<T>& in, const BlockChunk<T>& b, int64_t begin, int64_t count, int64_t n, T* s, T* y) {
  const hn::ScalableTag<T> d;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  for (int64_t i = 0; i < b.padded; i += lanes) {
    hn::Vec<decltype(d)> state[R], rate[R];
    for (int r = 0; r < R; ++r) {
      state[r] = hn::Load(d, s + (n + r) * kScanBlock + i);
      rate[r] = law == ScanLaw::kMamba ? hn::Load(d, b.rates + (n + r) * kScanBlock + i) : hn::Zero(d);
    }
    for (int64_t t = 0; t < count; ++t) {
      const T* k = in.k.row(begin + t) + n;
      const T* q = in.q.row(begin + t) + n;
      const int64_t at = t * kScanBlock + i;
      const auto e = hn::Load(d, b.e + at), z = hn::Load(d, b.z + at);
      auto sum = hn::Load(d, y + at);
      for (int r = 0; r < R; ++r) {
        const auto key = hn::Set(d, k[r]);
        state[r] = hn::MulAdd(element_decay<law>(d, e, rate[r], key), state[r], hn::Mul(key, z));
        sum = hn::MulAdd(hn::Set(d, q[r]), state[r], sum);
      }
      hn::Store(sum, d, y + at);
    }
    for (int r = 0; r < R; ++r) hn::Store(state[r], d, s + (n + r) * kScanBlock + i);
  }
}

// body.template operator()<R>(n) for all rows of the state.
template <class Body>
HWY_INLINE void for_state_rows(int64_t states, const Body& body) {
  int64_t n = 0;
  for (; n + kStateRows <= states; n += kStateRows) body.template operator()<kStateRows>(n);
  for (; n < states; ++n) body.template operator()<1>(n);
}

template <ScanLaw law, class T>
void forward_block(const ScanTensors<T>& in, int64_t sequence, int64_t block, const T* s_in, T* s_out, T* checkpoints,
                   Mat<T> out) {
  const hn::ScalableTag<T> d;
  const int64_t N = in.states(), D = in.channels();
  LocalScratch scratch;
  const BlockChunk<T> b(law, in, block, scratch);
  T* s = block_rows<T>(N, scratch);
  T* y = block_rows<T>(kScanChunk, scratch);
  if (s_in != nullptr) copy_block(s_in + sequence * N * D + b.first, N, D, b.width, s, kScanBlock);
  const int64_t length = in.layout.length(sequence);
  for (int64_t from = 0; from < length; from += kScanChunk) {
    const int64_t begin = in.layout.begin(sequence) + from, count = std::min(kScanChunk, length - from);
    if (checkpoints != nullptr)
      copy_block(s, N, kScanBlock, b.width, in.checkpoint(checkpoints, sequence, from / kScanChunk) + b.first, D);
    load_chunk<law>(in, begin, count, b);
    for (int64_t t = 0; t < count; ++t) {
      const int64_t row = t * kScanBlock;
      for_lanes(d, b.width, [&](auto m, int64_t i) HWY_ATTR {
        m.store(d, hn::Mul(m.load(d, in.skip + b.first + i), m.load(d, b.u + row + i)), y + row + i);
      });
    }
    for_state_rows(N, [&]<int R>(int64_t n) HWY_ATTR { scan_rows<law, R>(in, b, begin, count, n, s, y); });
    copy_block(y, count, kScanBlock, b.width, out.row(begin) + b.first, out.stride);
  }
  if (s_out != nullptr) copy_block(s, N, kScanBlock, b.width, s_out + sequence * N * D + b.first, D);
}

// What the rows of the state add up while a chunk is gone through backwards.
template <class T>
struct BackRows {
  // [N, kScanBlock]: the state at the chunk's beginning; the gradient at its end, then at its beginning; of A
  T *s, *ds, *da;
  T *dy, *dz, *de;     // [kScanChunk, kScanBlock]; dz and de accumulate
  T *before, *decays;  // [kScanChunk, kStateRows, lanes]: the state before a token, its decay
  T *dq, *dk;          // [kScanChunk, kStateRows, lanes]: sums over the vectors of a block

  BackRows(int64_t states, LocalScratch& scratch)
      : s(block_rows<T>(states, scratch)),
        ds(block_rows<T>(states, scratch)),
        da(block_rows<T>(states, scratch)),
        dy(block_rows<T>(kScanChunk, scratch)),
        dz(block_rows<T>(kScanChunk, scratch)),
        de(block_rows<T>(kScanChunk, scratch)),
        before(of_vectors(scratch)),
        decays(of_vectors(scratch)),
        dq(of_vectors(scratch)),
        dk(of_vectors(scratch)) {}
  static int64_t vectors() { return kScanChunk * kStateRows * static_cast<int64_t>(hn::Lanes(hn::ScalableTag<T>())); }
  static T* of_vectors(LocalScratch& scratch) { return scratch.alloc<T>(vectors()); }
};

template <ScanLaw law, int R, class T>
void scan_rows_backward(const ScanTensors<T>& in, const BlockChunk<T>& b, int64_t begin, int64_t count, int64_t n,
                        const BackRows<T>& w) {
  const hn::ScalableTag<T> d;
  using V = hn::Vec<decltype(d)>;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  std::fill_n(w.dq, count * R * lanes, T(0));
  std::fill_n(w.dk, count * R * lanes, T(0));
  for (int64_t i = 0; i < b.padded; i += lanes) {
    V state[R], rate[R], drate[R];
    for (int r = 0; r < R; ++r) {
      state[r] = hn::Load(d, w.s + (n + r) * kScanBlock + i);
      rate[r] = law == ScanLaw::kMamba ? hn::Load(d, b.rates + (n + r) * kScanBlock + i) : hn::Zero(d);
      drate[r] = hn::Load(d, w.da + (n + r) * kScanBlock + i);
    }
    for (int64_t t = 0; t < count; ++t) {
      const T* k = in.k.row(begin + t) + n;
      const auto e = hn::Load(d, b.e + t * kScanBlock + i), z = hn::Load(d, b.z + t * kScanBlock + i);
      for (int r = 0; r < R; ++r) {
        const auto key = hn::Set(d, k[r]);
        const V decay = element_decay<law>(d, e, rate[r], key);
        hn::Store(state[r], d, w.before + (t * R + r) * lanes);
        hn::Store(decay, d, w.decays + (t * R + r) * lanes);
        state[r] = hn::MulAdd(decay, state[r], hn::Mul(key, z));
      }
    }
    V ds[R];
    for (int r = 0; r < R; ++r) ds[r] = hn::Load(d, w.ds + (n + r) * kScanBlock + i);
    for (int64_t t = count - 1; t >= 0; --t) {
      const T* k = in.k.row(begin + t) + n;
      const T* q = in.q.row(begin + t) + n;
      const int64_t at = t * kScanBlock + i;
      const auto e = hn::Load(d, b.e + at), z = hn::Load(d, b.z + at), dy = hn::Load(d, w.dy + at);
      auto dz = hn::Load(d, w.dz + at), de = hn::Load(d, w.de + at);
      for (int r = 0; r < R; ++r) {
        const int64_t offset = (t * R + r) * lanes;
        const auto key = hn::Set(d, k[r]);
        const V before = hn::Load(d, w.before + offset), decay = hn::Load(d, w.decays + offset);
        const V after = hn::MulAdd(decay, before, hn::Mul(key, z));
        hn::Store(hn::MulAdd(after, dy, hn::Load(d, w.dq + offset)), d, w.dq + offset);
        ds[r] = hn::MulAdd(hn::Set(d, q[r]), dy, ds[r]);
        dz = hn::MulAdd(key, ds[r], dz);
        V dk = hn::MulAdd(ds[r], z, hn::Load(d, w.dk + offset));
        const V of_decay = hn::Mul(ds[r], before);
        ds[r] = hn::Mul(ds[r], decay);
        if constexpr (law == ScanLaw::kMamba) {
          const V of_log = hn::Mul(of_decay, decay);
          de = hn::MulAdd(rate[r], of_log, de);
          drate[r] = hn::MulAdd(e, of_log, drate[r]);
        } else {
          const V scaled = hn::Mul(of_decay, key);
          de = hn::NegMulAdd(scaled, key, de);
          dk = hn::NegMulAdd(hn::Add(scaled, scaled), e, dk);
        }
        hn::Store(dk, d, w.dk + offset);
      }
      hn::Store(dz, d, w.dz + at);
      hn::Store(de, d, w.de + at);
    }
    for (int r = 0; r < R; ++r) {
      hn::Store(ds[r], d, w.ds + (n + r) * kScanBlock + i);
      hn::Store(drate[r], d, w.da + (n + r) * kScanBlock + i);
    }
  }
}

template <ScanLaw law, class T>
void backward_block(const ScanTensors<T>& in, const ScanGradients<T>& g, const cpu::ScanScratch<T>& sums, int64_t group,
                    int64_t block) {
  const hn::ScalableTag<T> d;
  const int64_t N = in.states(), D = in.channels(), lanes = static_cast<int64_t>(hn::Lanes(d)), tokens = in.u.rows;
  LocalScratch scratch;
  const BlockChunk<T> b(law, in, block, scratch);
  const BackRows<T> w(N, scratch);
  T* dskip = block_rows<T>(1, scratch);
  T* dq = sums.dq + block * tokens * N;
  T* dk = sums.dk + block * tokens * N;
  for (int64_t sequence = sums.first_sequence(group); sequence < sums.first_sequence(group + 1); ++sequence) {
    std::fill_n(w.ds, N * kScanBlock, T(0));
    if (g.ds_out != nullptr) copy_block(g.ds_out + sequence * N * D + b.first, N, D, b.width, w.ds, kScanBlock);
    const int64_t length = in.layout.length(sequence);
    for (int64_t chunk = (length + kScanChunk - 1) / kScanChunk - 1; chunk >= 0; --chunk) {
      const int64_t begin = in.layout.begin(sequence) + chunk * kScanChunk,
                    count = std::min(kScanChunk, length - chunk * kScanChunk);
      copy_block(in.checkpoint(g.checkpoints, sequence, chunk) + b.first, N, D, b.width, w.s, kScanBlock);
      load_chunk<law>(in, begin, count, b);
      copy_block(g.dy.row(begin) + b.first, count, g.dy.stride, b.width, w.dy, kScanBlock);
      std::fill_n(w.dz, count * kScanBlock, T(0));
      std::fill_n(w.de, count * kScanBlock, T(0));
      for_state_rows(N, [&]<int R>(int64_t n) HWY_ATTR {
        scan_rows_backward<law, R>(in, b, begin, count, n, w);
        for (int64_t t = 0; t < count; ++t) {
          for (int r = 0; r < R; ++r) {
            dq[(begin + t) * N + n + r] = sum_lanes(d, hn::Load(d, w.dq + (t * R + r) * lanes));
            dk[(begin + t) * N + n + r] = sum_lanes(d, hn::Load(d, w.dk + (t * R + r) * lanes));
          }
        }
      });
      for (int64_t t = 0; t < count; ++t) {
        const int64_t row = t * kScanBlock;
        T* du = g.du.row(begin + t) + b.first;
        T* dstep = g.dstep.row(begin + t) + b.first;
        const T* step = in.step.row(begin + t) + b.first;
        const auto one = hn::Set(d, T(1)),
                   square = hn::Set(d, law == ScanLaw::kLonghorn ? square_norm(in.k.row(begin + t), N) : T(0));
        auto of_square = hn::Zero(d);
        for_lanes(d, b.width, [&](auto m, int64_t i) HWY_ATTR {
          const auto u = m.load(d, b.u + row + i), e = m.load(d, b.e + row + i), dy = m.load(d, w.dy + row + i),
                     dz = m.load(d, w.dz + row + i);
          auto de = hn::MulAdd(u, dz, m.load(d, w.de + row + i));
          if constexpr (law == ScanLaw::kLonghorn) {
            // de / d|k|^2 = -e^2, de / dstep = 1 / (1 + step |k|^2)^2
            of_square = hn::Sub(of_square, m.zero_missing(d, hn::Mul(hn::Mul(e, e), de)));
            const auto share = hn::Div(one, hn::MulAdd(m.load(d, step + i), square, one));
            de = hn::Mul(de, hn::Mul(share, share));
          }
          m.store(d, hn::MulAdd(e, dz, hn::Mul(m.load(d, in.skip + b.first + i), dy)), du + i);
          m.store(d, de, dstep + i);
          m.store(d, hn::MulAdd(dy, u, m.load(d, dskip + i)), dskip + i);
        });
        if constexpr (law == ScanLaw::kLonghorn) sums.square[block * tokens + begin + t] = sum_lanes(d, of_square);
      }
    }
    if (g.ds_in != nullptr) copy_block(w.ds, N, kScanBlock, b.width, g.ds_in + sequence * N * D + b.first, D);
  }
  if constexpr (law == ScanLaw::kMamba) copy_block(w.da, N, kScanBlock, b.width, sums.da + group * N * D + b.first, D);
  std::copy_n(dskip, b.width, sums.dskip + group * D + b.first);
}

template <class T>
void scan_forward(ScanLaw law, const ScanTensors<T>& in, const T* s_in, T* s_out, T* checkpoints, Mat<T> y) {
  const int64_t blocks = in.blocks();
  parallel_for(in.layout.count() * blocks, [&](int64_t task) {
    const int64_t sequence = task / blocks, block = task % blocks;
    if (law == ScanLaw::kMamba) {
      forward_block<ScanLaw::kMamba>(in, sequence, block, s_in, s_out, checkpoints, y);
    } else {
      forward_block<ScanLaw::kLonghorn>(in, sequence, block, s_in, s_out, checkpoints, y);
    }
  });
}

template <class T>
void scan_backward(ScanLaw law, const ScanTensors<T>& in, const ScanGradients<T>& g, const cpu::ScanScratch<T>& sums) {
  const int64_t blocks = in.blocks();
  parallel_for(sums.groups * blocks, [&](int64_t task) {
    const int64_t group = task / blocks, block = task % blocks;
    if (law == ScanLaw::kMamba) {
      backward_block<ScanLaw::kMamba>(in, g, sums, group, block);
    } else {
      backward_block<ScanLaw::kLonghorn>(in, g, sums, group, block);
    }
  });
}

ScanKernels<float> scan_kernels_f32() { return {scan_forward<float>, scan_backward<float>}; }
ScanKernels<double> scan_kernels_f64() { return {scan_forward<double>, scan_backward<double>}; }

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace fw
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace fw {
namespace {

HWY_EXPORT(scan_kernels_f32);
HWY_EXPORT(scan_kernels_f64);

template <class T>
auto kernels() {
  if constexpr (sizeof(T) == sizeof(float)) {
    return HWY_DYNAMIC_DISPATCH(scan_kernels_f32)();
  } else {
    return HWY_DYNAMIC_DISPATCH(scan_kernels_f64)();
  }
}

// The sums of all blocks and groups, in their order.
template <class T>
void add_up(ScanLaw law, const ScanTensors<T>& in, const ScanGradients<T>& g, const cpu::ScanScratch<T>& sums) {
  const int64_t tokens = in.u.rows, N = in.states(), D = in.channels(), blocks = in.blocks();
  for_row_blocks(RowBlocks::cut(tokens, N * blocks), [&](int64_t, int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      T square = 0;
      for (int64_t block = 0; law == ScanLaw::kLonghorn && block < blocks; ++block)
        square += sums.square[block * tokens + t];
      for (int64_t n = 0; n < N; ++n) {
        T dq = 0, dk = 2 * square * in.k.row(t)[n];
        for (int64_t block = 0; block < blocks; ++block) {
          dq += sums.dq[(block * tokens + t) * N + n];
          dk += sums.dk[(block * tokens + t) * N + n];
        }
        g.dq.row(t)[n] = dq;
        g.dk.row(t)[n] = dk;
      }
    }
  });
  for_row_blocks(RowBlocks::cut(D, N * sums.groups), [&](int64_t, int64_t begin, int64_t end) {
    for (int64_t c = begin; c < end; ++c) {
      for (int64_t group = 0; group < sums.groups; ++group) g.dskip[c] += sums.dskip[group * D + c];
      for (int64_t n = 0; law == ScanLaw::kMamba && n < N; ++n) {
        T da = 0;
        for (int64_t group = 0; group < sums.groups; ++group) da += sums.da[(group * N + n) * D + c];
        g.da_log[c * N + n] -= da * std::exp(in.a_log[c * N + n]);  // A = -exp(a_log)
      }
    }
  });
}

}  // namespace

namespace cpu {

template <class T>
void selective_scan_forward(const Exec<T>&, ScanLaw law, Mat<const T> u, Mat<const T> step, Mat<const T> q,
                            Mat<const T> k, const T* a_log, const T* skip, const PassLayout& layout, const T* s_in,
                            T* s_out, T* checkpoints, Mat<T> y) {
  kernels<T>().forward(law, {u, step, q, k, a_log, skip, layout.host}, s_in, s_out, checkpoints, y);
}

template <class T>
void selective_scan_backward(const Exec<T>& exec, ScanLaw law, Mat<const T> dy, Mat<const T> u, Mat<const T> step,
                             Mat<const T> q, Mat<const T> k, const T* a_log, const T* skip, const PassLayout& layout,
                             const T* checkpoints, const T* ds_out, Mat<T> du, Mat<T> dstep, Mat<T> dq, Mat<T> dk,
                             T* da_log, T* dskip, T* ds_in) {
  const ArenaMark mark(exec.arena);
  const ScanScratch<T> sums(exec.arena, law, u.rows, layout.host.count(), u.cols, q.cols);
  const ScanTensors<T> in{u, step, q, k, a_log, skip, layout.host};
  const ScanGradients<T> gradients{dy, checkpoints, ds_out, du, dstep, dq, dk, da_log, dskip, ds_in};
  kernels<T>().backward(law, in, gradients, sums);
  add_up(law, in, gradients, sums);
}

#define FW_INSTANTIATE(T)                                                                                        \
  template void selective_scan_forward<T>(const Exec<T>&, ScanLaw, Mat<const T>, Mat<const T>, Mat<const T>,     \
                                          Mat<const T>, const T*, const T*, const PassLayout&, const T*, T*, T*, \
                                          Mat<T>);                                                               \
  template void selective_scan_backward<T>(const Exec<T>&, ScanLaw, Mat<const T>, Mat<const T>, Mat<const T>,    \
                                           Mat<const T>, Mat<const T>, const T*, const T*, const PassLayout&,    \
                                           const T*, const T*, Mat<T>, Mat<T>, Mat<T>, Mat<T>, T*, T*, T*);
FW_INSTANTIATE(float)
FW_INSTANTIATE(double)
#undef FW_INSTANTIATE

}  // namespace cpu
}  // namespace fw
#endif
