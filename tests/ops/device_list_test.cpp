// Every operation of the list that a device has, against the host's in double on the same (rounded) numbers. The cases:
// - the shapes that kernels treat apart,
// - rows with columns after them that must not be touched,
// - packed sequences,
// - outputs that lie where inputs do as far as the list allows it.
#include "ops/device_list.h"

#include <cmath>
#include <numeric>

namespace fw::testing {
namespace {

class DeviceList : public OnDevice {};
INSTANTIATE_TEST_SUITE_P(Devices, DeviceList, ::testing::ValuesIn(cases()),
                         [](const auto& one) { return one.param.name; });

TEST_P(DeviceList, SigmoidGate) {
  for_shapes([](const Shape& s) {
    compare(GetParam(), [&](auto& run) {
      using W = typename std::decay_t<decltype(run)>::W;
      auto x = run.matrix(s.rows, s.cols, s.pad, -6, 6), y = run.out(s.rows, s.cols, s.pad);
      Buffer<W> bias = run.parameters(1), dbias = run.parameters(1);
      run.on.exec.sigmoid_gate_forward(x.mat(), bias.data(), W(1.5), y.mat());
      run.keep("y", y);
      run.on.exec.sigmoid_gate_forward(x.mat(), nullptr, W(2), x.mat());  // in place
      run.keep("in place", x);
      auto dy = run.matrix(s.rows, s.cols, s.pad), gate = run.matrix(s.rows, s.cols, s.pad, 0, 1.5),
           dx = run.out(s.rows, s.cols, s.pad);
      run.on.exec.sigmoid_gate_backward(dy.mat(), gate.mat(), W(1.5), dx.mat(), nullptr);
      run.keep("dx", dx);
      run.on.exec.sigmoid_gate_backward(dy.mat(), gate.mat(), W(1.5), dy.mat(), dbias.data());
      run.keep("dx in place", dy);
      run.keep_wide("dbias", dbias);
    });
  });
}

TEST_P(DeviceList, DecayGates) {
  for_shapes([](const Shape& s) {
    for (const int64_t group : {int64_t{1}, s.cols % 8 == 0 ? int64_t{8} : s.cols}) {
      compare(GetParam(), [&](auto& run) {
        using W = typename std::decay_t<decltype(run)>::W;
        auto x = run.matrix(s.rows, s.cols, s.pad, -12, 6), dx = run.out(s.rows, s.cols, s.pad);
        auto g = run.wide(s.rows, s.cols, s.pad), dg = run.wide(s.rows, s.cols, s.pad);
        Buffer<W> a_log = run.parameters(s.cols / group), bias = run.parameters(s.cols),
                  da = run.parameters(s.cols / group), dbias = run.parameters(s.cols);
        run.on.exec.decay_gate_forward(x.mat(), a_log.data(), bias.data(), group, g.mat());
        run.keep_wide("g", g);
        run.on.exec.decay_gate_backward(dg.mat(), x.mat(), a_log.data(), bias.data(), group, dx.mat(), da.data(),
                                        dbias.data());
        run.keep("dx", dx);
        run.keep_wide("da_log", da);
        run.keep_wide("ddt_bias", dbias);
        run.on.exec.log_sigmoid_decay_forward(x.mat(), bias.data(), W(0.0625), g.mat());
        run.keep_wide("log sigmoid", g);
        run.on.exec.log_sigmoid_decay_backward(dg.mat(), x.mat(), bias.data(), W(0.0625), dx.mat(), dbias.data());
        run.keep("log sigmoid dx", dx);
        run.keep_wide("log sigmoid dbias", dbias);
      });
    }
  });
}

TEST_P(DeviceList, TimeStep) {
  for_shapes([](const Shape& s) {
    compare(GetParam(), [&](auto& run) {
      using W = typename std::decay_t<decltype(run)>::W;
      auto x = run.matrix(s.rows, s.cols, s.pad, -12, 6), dt = run.out(s.rows, s.cols, s.pad),
           d_dt = run.matrix(s.rows, s.cols, s.pad);
      auto g = run.wide(s.rows, s.cols, s.pad), dg = run.wide(s.rows, s.cols, s.pad);
      Buffer<W> a_log = run.parameters(s.cols), bias = run.parameters(s.cols), da = run.parameters(s.cols),
                dbias = run.parameters(s.cols);
      run.on.exec.time_step_forward(x.mat(), a_log.data(), bias.data(), dt.mat(), g.mat());
      run.keep("dt", dt);
      run.keep_wide("g", g);
      run.on.exec.time_step_backward(d_dt.mat(), dg.mat(), x.mat(), a_log.data(), bias.data(), d_dt.mat(), da.data(),
                                     dbias.data());
      run.keep("dx in place", d_dt);
      run.keep_wide("da_log", da);
      run.keep_wide("dbias", dbias);
    });
  });
}

TEST_P(DeviceList, Softplus) {
  for_shapes([](const Shape& s) {
    compare(GetParam(), [&](auto& run) {
      auto x = run.matrix(s.rows, s.cols, s.pad, -12, 6), y = run.out(s.rows, s.cols, s.pad),
           dy = run.matrix(s.rows, s.cols, s.pad);
      auto value = run.matrix(s.rows, s.cols, s.pad, 0, 6);
      run.on.exec.softplus_forward(x.mat(), y.mat());
      run.keep("y", y);
      run.on.exec.softplus_forward(x.mat(), x.mat());
      run.keep("in place", x);
      run.on.exec.softplus_backward(dy.mat(), value.mat(), dy.mat());
      run.keep("dx in place", dy);
    });
  });
}

// Both laws: one token, chunks that end early, empty sequences, more sequences than groups, channels and rows that fill
// no block and no group. Sequences that are cut into parts, with one of ten tokens and an empty one beside it.
TEST_P(DeviceList, SelectiveScan) {
  std::vector<int64_t> singles(41);
  std::iota(singles.begin(), singles.end(), int64_t{0});
  const struct {
    SeqLayout layout;
    int64_t channels, states, pad;
    bool states_given;
  } cases[] = {{SeqLayout({0, 1}), 1, 1, 0, true},     {SeqLayout({0, 0, 16, 33, 33, 40}), 130, 16, 8, true},
               {SeqLayout({0, 50}), 20, 5, 3, false},  {SeqLayout({0, 15, 20}), 12, 17, 0, true},
               {SeqLayout(singles), 24, 16, 0, true},  {SeqLayout({0, 0}), 8, 16, 0, true},
               {SeqLayout({0, 1540}), 8, 16, 0, true}, {SeqLayout({0, 1600, 1610, 1610}), 3, 5, 3, false}};
  for (const auto& s : cases) {
    for (const ScanLaw law : {ScanLaw::kMamba, ScanLaw::kLonghorn}) {
      SCOPED_TRACE(::testing::Message() << s.layout.tokens() << " tokens, " << s.states << " x " << s.channels
                                        << (law == ScanLaw::kMamba ? " mamba" : " longhorn"));
      compare(GetParam(), [&](auto& run) {
        using W = typename std::decay_t<decltype(run)>::W;
        const int64_t T = s.layout.tokens(), D = s.channels, N = s.states, size = s.layout.count() * N * D;
        Pass pass(run.on.device, s.layout, std::vector<int64_t>(static_cast<size_t>(s.layout.count())));
        auto u = run.matrix(T, D, s.pad), step = run.matrix(T, D, s.pad, 0.01, 0.6), q = run.matrix(T, N, s.pad),
             k = run.matrix(T, N, s.pad);
        auto y = run.out(T, D, s.pad), dy = run.matrix(T, D, s.pad), du = run.out(T, D, s.pad),
             dstep = run.out(T, D, s.pad), dq = run.out(T, N, s.pad);
        auto dk = run.out(T, N, s.pad);
        Buffer<W> a_log = run.parameters(D * N, -1, 2), skip = run.parameters(D), state = run.parameters(size),
                  ds = run.parameters(size);
        Buffer<W> da = run.parameters(D * N), dskip = run.parameters(D),
                  checkpoints = run.parameters(chunk_checkpoints(T, s.layout.count()) * N * D);
        const W* rates = law == ScanLaw::kMamba ? a_log.data() : nullptr;
        W* const given = s.states_given ? state.data() : nullptr;
        run.on.exec.selective_scan_forward(law, u.mat(), step.mat(), q.mat(), k.mat(), rates, skip.data(), pass.layout,
                                           given, given, checkpoints.data(), y.mat());
        run.keep("y", y);
        run.keep_wide("state", state);
        W* const of_state = s.states_given ? ds.data() : nullptr;
        run.on.exec.selective_scan_backward(law, dy.mat(), u.mat(), step.mat(), q.mat(), k.mat(), rates, skip.data(),
                                            pass.layout, checkpoints.data(), of_state, du.mat(), dstep.mat(), dq.mat(),
                                            dk.mat(), rates == nullptr ? nullptr : da.data(), dskip.data(), of_state);
        run.keep("du", du);
        run.keep("dstep", dstep);
        run.keep("dq", dq);
        run.keep("dk", dk);
        run.keep_wide("da_log", da);
        run.keep_wide("dskip", dskip);
        run.keep_wide("ds", ds);
      });
    }
  }
}

// A decay near zero keeps its digits: no logarithm of a number near 1.
TEST_P(DeviceList, SmallDecaysKeepTheirDigits) {
  if (GetParam().type != Type::kFloat) return;
  Context<float> on(*GetParam().device);
  Matrix<float> x(on.device, 1, 4, 0, {-5, -10, -14, -15.5}), g(on.device, 1, 4, 0);
  Buffer<float> zero(on.device, 4);
  on.exec.decay_gate_forward(x.mat(), zero.data(), zero.data(), 1, g.mat());
  const std::vector<double> at = {-5, -10, -14, -15.5}, got = g.values();
  for (size_t i = 0; i < at.size(); ++i) EXPECT_NEAR(got[i] / -std::log1p(std::exp(at[i])), 1, 4e-6);
}

TEST_P(DeviceList, BoundedDecay) {
  for_shapes([](const Shape& s) {
    for (const int64_t layer : {0, 1, 2}) {
      compare(GetParam(), [&](auto& run) {
        using W = typename std::decay_t<decltype(run)>::W;
        auto x = run.matrix(s.rows, s.cols, s.pad, -12, 6), dx = run.out(s.rows, s.cols, s.pad);
        auto g = run.wide(s.rows, s.cols, s.pad), dg = run.wide(s.rows, s.cols, s.pad);
        Buffer<W> bounds = run.parameters(3 * s.cols), dbounds = run.parameters(3 * s.cols);
        const Mat<W> logits(bounds.data(), 3, s.cols);
        run.on.exec.bounded_decay_forward(x.mat(), logits, layer, g.mat());
        run.keep_wide("g", g);
        run.on.exec.bounded_decay_backward(dg.mat(), x.mat(), logits, layer, dx.mat(),
                                           Mat<W>(dbounds.data(), 3, s.cols));
        run.keep("dx", dx);
        run.keep_wide("dbounds", dbounds);
      });
    }
  });
}

// A weight with the bf16 copy that a model keeps of it.
template <class R>
struct Weights {
  using W = typename R::W;
  Buffer<W> values;
  Buffer<Bf16> rounded;
  int64_t rows, cols;
  Weights(R& run, int64_t out, int64_t in, double size)
      : values(run.parameters(out * in, -size, size)), rounded(run.on.device, out * in), rows(out), cols(in) {
    run.on.exec.round_values(values.data(), out * in, rounded.data());
  }
  Weight<W> weight() const { return {{values.data(), rows, cols}, {rounded.data(), rows, cols}}; }
};

TEST_P(DeviceList, LinearLayers) {
  struct LinearShape {
    int64_t rows, in, out, pad;
  };
  for (const LinearShape& s : {LinearShape{0, 16, 8, 0},
                               {1, 1, 1, 0},
                               {3, 24, 65, 3},
                               {9, 72, 50, 8},
                               {17, 36, 12, 3},
                               {33, 520, 140, 0},
                               {64, 2056, 66, 8},
                               {65, 40, 24, 8},
                               {66, 40, 77, 3},
                               {67, 64, 204, 8},  // in groups of 64 outputs, and the rest
                               {130, 64, 128, 0}}) {
    for (const Write write : {Write::kOverwrite, Write::kAccumulate}) {
      SCOPED_TRACE(::testing::Message() << s.rows << ", " << s.in << " to " << s.out);
      const bool biased = write == Write::kAccumulate;  // added to the rounded product, and rounded again
      compare(
          GetParam(),
          [&](auto& run) {
            using W = typename std::decay_t<decltype(run)>::W;
            const Weights<std::decay_t<decltype(run)>> w(run, s.out, s.in, 1);
            auto x = run.matrix(s.rows, s.in, s.pad), y = run.matrix(s.rows, s.out, s.pad),
                 dy = run.matrix(s.rows, s.out, s.pad), dx = run.matrix(s.rows, s.in, s.pad);
            Buffer<W> bias = run.parameters(s.out), dbias = run.parameters(s.out),
                      dweight = run.parameters(s.out * s.in);
            run.on.exec.linear_forward(x.mat(), w.weight(), biased ? bias.data() : nullptr, y.mat(), write);
            run.keep("y", y);
            run.on.exec.linear_backward(dy.mat(), x.mat(), w.weight(), dx.mat(), Mat<W>(dweight.data(), s.out, s.in),
                                        dbias.data(), write);
            run.keep("dx", dx);
            run.keep_wide("dweight", dweight);
            run.keep_wide("dbias", dbias);
            if (biased) return;
            auto sum = run.matrix(s.rows, s.out, 0), beside = run.matrix(s.rows, s.out, s.pad);
            run.on.exec.linear_add_forward(x.mat(), w.weight(), beside.mat(), sum.mat());
            run.keep("sum", sum);
          },
          biased ? 2 * kTolerance<Bf16> : kTolerance<Bf16>);
    }
  }
}

// Products after a norm: widths of one warp, of a few and of more turns than one, outputs that fill no block, rows
// that are no packets, and more rows than are few. Columns, norm and rows of very different sizes, so that the order in
// which they are multiplied shows.
TEST_P(DeviceList, NormedLinear) {
  struct LinearShape {
    int64_t rows, in, out, pad;
  };
  for (const LinearShape& s : {LinearShape{0, 16, 8, 0},
                               {1, 24, 66, 8},
                               {3, 264, 50, 0},
                               {8, 1040, 34, 8},
                               {2, 5000, 18, 0},
                               {5, 36, 10, 3},
                               {9, 64, 12, 0}}) {
    for (const bool swiglu : {false, true}) {
      SCOPED_TRACE(::testing::Message() << s.rows << ", " << s.in << " to " << s.out << (swiglu ? ", swiglu" : ""));
      // Two roundings of bf16 before the result's, and with swiglu a product of two such.
      compare(
          GetParam(),
          [&](auto& run) {
            using W = typename std::decay_t<decltype(run)>::W;
            const Weights<std::decay_t<decltype(run)>> w(run, s.out, s.in, 4 / std::sqrt(static_cast<double>(s.in)));
            auto x = run.matrix(s.rows, s.in, s.pad, -20, 20), y = run.out(s.rows, swiglu ? s.out / 2 : s.out, s.pad);
            Buffer<W> norm = run.parameters(s.in, 0.2, 2), bias = run.parameters(s.out);
            // Sigmoids of columns in the middle of a tile's.
            const SigmoidColumns gates{3, swiglu ? 0 : s.out / 2, 1.5};
            run.on.exec.normed_linear_forward(x.mat(), norm.data(), W(1e-2), w.weight(), swiglu ? nullptr : bias.data(),
                                              swiglu, gates, y.mat());
            run.keep("y", y);
          },
          swiglu ? 1.6e-2 : 8e-3);
    }
  }
}

// Two products at a time, of one width: rows of every kernel, and those that none takes together (other widths, no
// packets, wide ones); the bits of each alone. Where the device is not Hopper, a library serves more than 32 rows. It
// rounds a product before its bias is added: twice half a unit of bf16, 2^-8 each.
TEST_P(DeviceList, LinearPair) {
  struct PairShape {
    int64_t rows, in, out, other_in, other_out, pad;
  };
  for (const PairShape& s : {PairShape{0, 16, 8, 16, 8, 0},
                             {1, 24, 66, 24, 20, 8},
                             {8, 128, 50, 128, 130, 0},
                             {3, 36, 10, 36, 12, 3},
                             {2, 300, 20, 300, 20, 4},
                             {4, 16, 10, 24, 12, 0},
                             {9, 128, 260, 128, 20, 0},
                             {17, 64, 30, 64, 140, 8},
                             {40, 72, 50, 72, 50, 0},
                             {64, 520, 140, 520, 140, 0},
                             {65, 16, 24, 16, 24, 0}}) {
    SCOPED_TRACE(::testing::Message() << s.rows << ", " << s.in << " to " << s.out << ", " << s.other_in << " to "
                                      << s.other_out);
    compare(
        GetParam(),
        [&](auto& run) {
          using W = typename std::decay_t<decltype(run)>::W;
          const Weights<std::decay_t<decltype(run)>> w(run, s.out, s.in, 1), other(run, s.other_out, s.other_in, 1);
          auto x = run.matrix(s.rows, s.in, s.pad), z = run.matrix(s.rows, s.other_in, s.pad);
          auto y = run.out(s.rows, s.out, s.pad), u = run.out(s.rows, s.other_out, s.pad),
               alone = run.out(s.rows, s.other_out, s.pad);
          Buffer<W> bias = run.parameters(s.other_out);
          run.on.exec.linear_pair_forward({x.mat(), w.weight(), nullptr, y.mat()},
                                          {z.mat(), other.weight(), bias.data(), u.mat()});
          run.on.exec.linear_forward(z.mat(), other.weight(), bias.data(), alone.mat(), Write::kOverwrite);
          run.keep("y", y);
          run.keep("u", u);
          EXPECT_EQ(u.values(), alone.values());
        },
        s.rows > 32 ? 8e-3 : kTolerance<Bf16>);
  }
}

// Products before SwiGLU: rows of every kernel, and those that none takes.
TEST_P(DeviceList, SwigluLinear) {
  struct LinearShape {
    int64_t rows, in, out, pad;
  };
  for (const LinearShape& s : {LinearShape{0, 16, 8, 0},
                               {3, 24, 66, 8},
                               {9, 72, 50, 8},
                               {17, 520, 140, 0},
                               {33, 36, 10, 3},
                               {64, 1032, 260, 0},
                               {65, 40, 24, 0}}) {
    SCOPED_TRACE(::testing::Message() << s.rows << ", " << s.in << " to " << s.out);
    compare(
        GetParam(),
        [&](auto& run) {
          const Weights<std::decay_t<decltype(run)>> w(run, s.out, s.in, 4 / std::sqrt(static_cast<double>(s.in)));
          auto x = run.matrix(s.rows, s.in, s.pad), y = run.out(s.rows, s.out / 2, s.pad);
          run.on.exec.swiglu_linear_forward(x.mat(), w.weight(), y.mat());
          run.keep("y", y);
        },
        8e-3);
  }
}

// Heads that are turns of a warp of the kernel (32 to 256 columns), with fewer and more of them than its warps have
// turns, and heads and rows that it leaves to the operations.
TEST_P(DeviceList, GatedLinear) {
  struct Shape {
    int64_t rows, heads, dim, out, pad;
    GateKind kind;
  };
  for (const Shape& s : {Shape{0, 2, 32, 8, 0, GateKind::kSilu}, Shape{1, 3, 32, 66, 8, GateKind::kSilu},
                         Shape{3, 5, 64, 50, 0, GateKind::kSigmoid}, Shape{8, 16, 128, 34, 8, GateKind::kSilu},
                         Shape{2, 19, 128, 18, 0, GateKind::kNone}, Shape{5, 9, 256, 20, 0, GateKind::kSilu},
                         Shape{2, 3, 96, 12, 0, GateKind::kSilu}, Shape{4, 2, 24, 10, 3, GateKind::kSigmoid},
                         Shape{9, 2, 64, 12, 0, GateKind::kSilu}}) {
    SCOPED_TRACE(::testing::Message() << s.rows << ", " << s.heads << " of " << s.dim << " to " << s.out);
    compare(
        GetParam(),
        [&](auto& run) {
          using W = typename std::decay_t<decltype(run)>::W;
          using T = typename std::decay_t<decltype(run.on)>::Activation;
          const int64_t in = s.heads * s.dim;
          const Weights<std::decay_t<decltype(run)>> w(run, s.out, in, 4 / std::sqrt(static_cast<double>(in)));
          auto o = run.matrix(s.rows, in, s.pad, -20, 20), gate = run.matrix(s.rows, in, s.pad, -3, 3),
               y = run.out(s.rows, s.out, s.pad), more = run.matrix(s.rows, s.out, s.pad);
          auto copy = run.matrix(s.rows, in, s.pad, -20, 20);
          Buffer<W> norm = run.parameters(s.dim, 0.2, 2);
          const Mat<const T> given = s.kind == GateKind::kNone ? Mat<const T>() : Mat<const T>(gate.mat());
          run.on.exec.gated_linear_forward(o.mat(), given, norm.data(), W(1e-2), s.dim, s.kind, w.weight(), y.mat(),
                                           Write::kOverwrite);
          run.on.exec.gated_linear_forward(copy.mat(), given, norm.data(), W(1e-2), s.dim, s.kind, w.weight(),
                                           more.mat(), Write::kAccumulate);
          run.keep("y", y);
          run.keep("more", more);
        },
        8e-3);
  }
}

// Vocabularies that kernels treat apart: unaligned ones, those of one and of four packets a thread, and wider ones.
TEST_P(DeviceList, CrossEntropy) {
  for (const auto& [rows, vocab] :
       std::vector<std::pair<int64_t, int64_t>>{{1, 7}, {300, 67}, {70, 2056}, {9, 9000}, {3, 33000}}) {
    SCOPED_TRACE(::testing::Message() << rows << " of " << vocab);
    // bf16 logits on the way: twice the rounding of a result.
    compare(
        GetParam(),
        [rows = rows, vocab = vocab](auto& run) {
          using W = typename std::decay_t<decltype(run)>::W;
          const int64_t d = 24;
          const Weights<std::decay_t<decltype(run)>> w(run, vocab, d, 0.25);
          auto h = run.matrix(rows, d, 8), dh = run.out(rows, d, 8);
          Buffer<W> nll(run.on.device, rows), dweight = run.parameters(vocab * d, -1e-3, 1e-3);
          std::vector<int32_t> ids;
          for (int64_t t = 0; t < rows; ++t) ids.push_back(t % 5 == 3 ? -1 : static_cast<int32_t>(t * 7919 % vocab));
          Buffer<int32_t> targets(run.on.device, rows);
          targets.write(0, ids);
          Buffer<LossSum> sums(run.on.device, 2);
          run.on.exec.cross_entropy_forward(h.mat(), w.weight(), targets.data(), nll.data(), sums.data());
          run.on.exec.cross_entropy_backward(h.mat(), w.weight(), targets.data(), W(0.5), dh.mat(),
                                             Mat<W>(dweight.data(), vocab, d), sums.data() + 1);
          run.results.push_back({"nll", values_of(nll), false});
          run.keep("dh", dh);
          run.results.push_back({"dweight", values_of(dweight), false});
          for (const LossSum& sum : sums.to_vector())
            run.results.push_back({"loss", {sum.nll, static_cast<double>(sum.count)}, false});
        },
        8e-3);
  }
}

TEST_P(DeviceList, GainGates) {
  for_shapes([](const Shape& s) {
    compare(GetParam(), [&](auto& run) {
      using W = typename std::decay_t<decltype(run)>::W;
      auto y = run.out(s.rows, s.cols, s.pad), gate = run.matrix(s.rows, s.cols, s.pad, 0.01, 0.98),
           dlogit = run.matrix(s.rows, s.cols, s.pad);
      auto g = run.wide(s.rows, s.cols, s.pad), dg = run.wide(s.rows, s.cols, s.pad);
      Buffer<W> parameter = run.parameters(1);
      run.on.exec.learned_gate_forward(parameter.data(), W(2), y.mat());
      run.keep("learned", y);
      run.on.exec.single_gate_decay_forward(gate.mat(), g.mat());
      run.keep_wide("single", g);
      run.on.exec.single_gate_decay_backward(dg.mat(), gate.mat(), dlogit.mat());
      run.keep("dlogit", dlogit);
      const SeqLayout layout({0, s.rows / 3, s.rows / 3, s.rows});
      const Pass pass(run.on.device, layout, {5, 0, 1000});
      for (const PositionFactor factor : {PositionFactor::kNone, PositionFactor::kInverse, PositionFactor::kInverseSqrt,
                                          PositionFactor::kInverseLog}) {
        run.on.exec.position_factor(gate.mat(), factor, pass.layout, y.mat());
        run.keep("place", y);
      }
    });
  });
}

TEST_P(DeviceList, MapsProductsAndSwiglu) {
  for_shapes([](const Shape& s) {
    compare(GetParam(), [&](auto& run) {
      auto a = run.matrix(s.rows, s.cols, s.pad, -6, 6), b = run.matrix(s.rows, s.cols, s.pad),
           dy = run.matrix(s.rows, s.cols, s.pad);
      auto y = run.out(s.rows, s.cols, s.pad), da = run.out(s.rows, s.cols, s.pad), db = run.out(s.rows, s.cols, s.pad);
      for (const FeatureMap map : {FeatureMap::kElu, FeatureMap::kRelu}) {
        run.on.exec.feature_map_forward(map, a.mat(), y.mat());
        run.keep("map", y);
        run.on.exec.feature_map_backward(map, dy.mat(), a.mat(), da.mat());
        run.keep("map dx", da);
      }
      run.on.exec.product_forward(a.mat(), b.mat(), y.mat());
      run.keep("product", y);
      run.on.exec.product_backward(dy.mat(), a.mat(), b.mat(), da.mat(), db.mat());
      run.keep("da", da);
      run.keep("db", db);
      auto grad = run.matrix(s.rows, s.cols, s.pad);
      run.on.exec.product_backward(grad.mat(), a.mat(), b.mat(), grad.mat(), db.mat());
      run.keep("da in place", grad);
      run.on.exec.swiglu_forward(a.mat(), b.mat(), y.mat());
      run.keep("swiglu", y);
      run.on.exec.swiglu_backward(dy.mat(), a.mat(), b.mat(), a.mat(), b.mat());
      run.keep("dgate", a);
      run.keep("dup", b);
    });
  });
}

TEST_P(DeviceList, HeadGatesAndMeans) {
  for_shapes([](const Shape& s) {
    for (const int64_t group : {int64_t{1}, int64_t{4}, int64_t{8}, s.cols}) {
      if (s.cols % group != 0) continue;
      compare(GetParam(), [&](auto& run) {
        using W = typename std::decay_t<decltype(run)>::W;
        const int64_t heads = s.cols / group;
        auto x = run.matrix(s.rows, s.cols, s.pad), dy = run.matrix(s.rows, s.cols, s.pad),
             y = run.matrix(s.rows, s.cols, s.pad);
        Buffer<W> gate = run.parameters(heads), ds = run.parameters(heads);
        run.on.exec.head_subtract_forward(x.mat(), gate.data(), group, y.mat());
        run.keep("subtract", y);
        run.on.exec.head_add_forward(x.mat(), gate.data(), group, y.mat());
        run.keep("add", y);
        run.on.exec.head_scale_forward(x.mat(), gate.data(), group, y.mat());
        run.keep("scale", y);
        run.on.exec.head_constant_forward(gate.data(), group, y.mat());
        run.keep("constant", y);
        auto dx = run.matrix(s.rows, s.cols, s.pad), dz = run.matrix(s.rows, s.cols, s.pad);
        run.on.exec.head_scale_backward(dy.mat(), x.mat(), gate.data(), group, dx.mat(), ds.data());
        run.keep("scale dx", dx);
        run.keep_wide("scale ds", ds);
        run.on.exec.head_constant_backward(dy.mat(), group, ds.data());
        run.keep_wide("constant ds", ds);
        run.on.exec.head_subtract_backward(dy.mat(), x.mat(), gate.data(), group, dz.mat(), ds.data());
        run.keep("subtract dx", dz);
        run.keep_wide("subtract ds", ds);
        run.on.exec.head_add_backward(dy.mat(), x.mat(), gate.data(), group, dz.mat(), ds.data());
        run.keep("add dx", dz);
        run.keep_wide("add ds", ds);
        auto mean = run.out(s.rows, heads, s.pad), dmean = run.matrix(s.rows, heads, s.pad),
             to = run.matrix(s.rows, s.cols, s.pad);
        run.on.exec.group_mean_forward(x.mat(), mean.mat());
        run.keep("mean", mean);
        run.on.exec.group_mean_backward(dmean.mat(), to.mat());
        run.keep("mean dx", to);
        using T = std::remove_reference_t<decltype(*x.mat().data)>;
        run.on.exec.group_mean_forward(Mat<T>(), mean.mat());
        run.keep("mean of nothing", mean);
        run.on.exec.group_mean_backward(dmean.mat(), Mat<T>());
      });
    }
  });
}

// Heads whose sums take several lanes, some or all of a warp, and more rows than a block of head_constant has.
TEST_P(DeviceList, SumsOfHeads) {
  const struct {
    int64_t rows, heads, group, pad;
  } shapes[] = {{37, 5, 32, 0},   {70, 3, 64, 8},   {21, 4, 72, 0}, {9, 2, 520, 0},
                {130, 1, 128, 0}, {8195, 1, 32, 0}, {8200, 3, 8, 0}};
  for (const auto& s : shapes) {
    SCOPED_TRACE(::testing::Message() << s.rows << " x " << s.heads << " x " << s.group << " + " << s.pad);
    compare(GetParam(), [&](auto& run) {
      using W = typename std::decay_t<decltype(run)>::W;
      auto x = run.matrix(s.rows, s.heads * s.group, s.pad), mean = run.out(s.rows, s.heads, s.pad);
      Buffer<W> ds = run.parameters(s.heads);
      run.on.exec.head_constant_backward(x.mat(), s.group, ds.data());
      run.keep_wide("constant ds", ds);
      run.on.exec.group_mean_forward(x.mat(), mean.mat());
      run.keep("mean", mean);
    });
  }
}

TEST_P(DeviceList, GatedRmsnorm) {
  const struct {
    int64_t rows, heads, dim, pad;
  } shapes[] = {{0, 2, 16, 0},  {1, 1, 1, 0},  {65, 3, 128, 8}, {130, 2, 24, 8}, {40, 5, 7, 1},
                {3, 2, 520, 0}, {2, 3, 50, 3}, {3, 3, 50, 3},   {600, 1, 64, 0}, {601, 3, 64, 0}};
  for (const auto& s : shapes) {
    for (const GateKind kind : {GateKind::kNone, GateKind::kSilu, GateKind::kSigmoid}) {
      SCOPED_TRACE(::testing::Message() << s.rows << " x " << s.heads << " x " << s.dim << " + " << s.pad << ", gate "
                                        << static_cast<int>(kind));
      compare(GetParam(), [&](auto& run) {
        using W = typename std::decay_t<decltype(run)>::W;
        const int64_t cols = s.heads * s.dim;
        auto o = run.matrix(s.rows, cols, s.pad), gate = run.matrix(s.rows, cols, s.pad),
             dy = run.matrix(s.rows, cols, s.pad);
        auto y = run.out(s.rows, cols, s.pad), d_o = run.out(s.rows, cols, s.pad),
             dgate = run.matrix(s.rows, cols, s.pad);
        Buffer<W> weight = run.parameters(s.dim), rstd = run.parameters(s.rows * s.heads),
                  dweight = run.parameters(s.dim), bias = run.parameters(cols);
        const W* const gate_bias = s.rows % 2 == 1 && kind != GateKind::kNone ? bias.data() : nullptr;
        run.on.exec.gated_rmsnorm_forward(o.mat(), gate.mat(), gate_bias, weight.data(), W(1e-2), s.dim, kind, y.mat(),
                                          rstd.data());
        run.keep("y", y);
        run.keep_wide("rstd", rstd);
        run.on.exec.gated_rmsnorm_backward(dy.mat(), o.mat(), gate.mat(), gate_bias, weight.data(), rstd.data(), s.dim,
                                           kind, d_o.mat(), dgate.mat(), dweight.data());
        run.keep("d_o", d_o);
        run.keep("dgate", dgate);
        run.keep_wide("dweight", dweight);
        run.on.exec.gated_rmsnorm_forward(o.mat(), gate.mat(), gate_bias, weight.data(), W(1e-2), s.dim, kind, o.mat(),
                                          rstd.data());
        run.keep("y over o", o);
      });
    }
  }
}

TEST_P(DeviceList, GatedConv) {
  const struct {
    int64_t width, cols, pad;
    bool tails;
  } shapes[] = {{4, 24, 8, true}, {4, 16, 0, false}, {4, 5, 3, true},
                {3, 8, 0, true},  {9, 8, 0, true},   {1, 8, 0, false}};
  const SeqLayout layouts[] = {SeqLayout({0, 0, 1, 3, 3, 130, 131}), SeqLayout({0, 65}),
                               SeqLayout({0, 62, 63, 66, 126, 131})};
  for (const SeqLayout& sequences : layouts) {
    for (const auto& s : shapes) {
      SCOPED_TRACE(::testing::Message() << "width " << s.width << ", " << sequences.tokens() << " x " << s.cols << " + "
                                        << s.pad);
      compare(GetParam(), [&](auto& run) {
        using W = typename std::decay_t<decltype(run)>::W;
        const int64_t rows = sequences.tokens(), kept = s.width - 1;
        auto x = run.matrix(rows, s.cols, s.pad), gate = run.matrix(rows, s.cols, s.pad),
             dy = run.matrix(rows, s.cols, s.pad);
        auto y = run.out(rows, s.cols, s.pad), dx = run.out(rows, s.cols, s.pad), dgate = run.out(rows, s.cols, s.pad);
        auto tail = run.matrix(sequences.count() * kept, s.cols, 0),
             tail_out = run.out(sequences.count() * kept, s.cols, 0);
        Buffer<W> weight = run.parameters(s.cols * s.width), bias = run.parameters(s.cols),
                  dweight = run.parameters(s.cols * s.width), dbias = run.parameters(s.cols);
        const Pass pass(run.on.device, sequences, std::vector<int64_t>(static_cast<size_t>(sequences.count())));
        const auto* in = s.tails ? tail.mat().data : nullptr;
        run.on.exec.gated_conv_forward(x.mat(), gate.mat(), weight.data(), bias.data(), s.width, pass.layout, in,
                                       tail_out.mat().data, y.mat());
        run.keep("y", y);
        run.keep("tails", tail_out);
        run.on.exec.gated_conv_backward(dy.mat(), x.mat(), gate.mat(), weight.data(), bias.data(), s.width, pass.layout,
                                        in, dx.mat(), dgate.mat(), dweight.data(), dbias.data());
        run.keep("dx", dx);
        run.keep("dgate", dgate);
        run.keep_wide("dweight", dweight);
        run.keep_wide("dbias", dbias);
      });
    }
  }
}

TEST_P(DeviceList, Embedding) {
  const struct {
    int64_t tokens, vocab, cols, pad;
    bool one;  // half of the tokens have the same id
  } shapes[] = {{0, 10, 8, 0, false},
                {1, 1, 3, 1, false},
                {130, 7, 24, 8, false},
                {2100, 300, 8, 0, true},
                // the last one: sorted by turns
                {65, 70000, 5, 0, false},
                {300, 40, 2056, 8, true},
                {1500, 1000, 8, 0, false},
                {3100, 700000, 1, 0, false}};
  for (const auto& s : shapes) {
    SCOPED_TRACE(::testing::Message() << s.tokens << " of " << s.vocab << " x " << s.cols);
    compare(GetParam(), [&](auto& run) {
      auto weight = run.wide(s.vocab, s.cols, s.pad), dweight = run.wide(s.vocab, s.cols, s.pad);
      auto out = run.out(s.tokens, s.cols, s.pad), dout = run.matrix(s.tokens, s.cols, s.pad);
      std::vector<int32_t> ids;
      for (int64_t t = 0; t < s.tokens; ++t)
        ids.push_back(static_cast<int32_t>(s.one && t % 2 == 0 ? s.vocab - 1 : t * 7919 % s.vocab));
      Buffer<int32_t> memory(run.on.device, s.tokens);
      memory.write(0, ids);
      using W = typename std::decay_t<decltype(run)>::W;
      const Mat<W> values = weight.mat();
      Buffer<Bf16> rounded(run.on.device, s.vocab * values.stride);
      run.on.exec.round_values(values.data, s.vocab * values.stride, rounded.data());
      run.on.exec.embedding_forward(memory.data(), Weight<W>(values, {rounded.data(), s.vocab, s.cols, values.stride}),
                                    out.mat());
      run.keep("out", out);
      run.on.exec.embedding_backward(memory.data(), dout.mat(), dweight.mat());
      run.keep_wide("dweight", dweight);
    });
  }
}

TEST_P(DeviceList, Rows) {
  for_shapes([](const Shape& s) {
    compare(GetParam(), [&](auto& run) {
      auto from = run.matrix(s.rows, s.cols, s.pad), to = run.out(s.rows, s.cols, s.pad);
      run.on.exec.copy_rows(from.mat(), to.mat());
      run.keep("copy", to);
      const SeqLayout sequences = s.rows > 2 ? SeqLayout({0, 1, s.rows / 2, s.rows}) : SeqLayout::uniform(s.rows, 1);
      const Pass pass(run.on.device, sequences, std::vector<int64_t>(static_cast<size_t>(sequences.count()), 3));
      auto last = run.out(sequences.count(), s.cols, s.pad);
      run.on.exec.last_rows(from.mat(), pass.layout, last.mat());
      run.keep("last", last);
      // Every third row from the end on; the other rows stay what they are.
      std::vector<int32_t> numbers;
      for (int64_t r = s.rows - 1; r >= 0; r -= 3) numbers.push_back(static_cast<int32_t>(r));
      Buffer<int32_t> rows(run.on.device, static_cast<int64_t>(numbers.size()));
      rows.write(0, numbers);
      auto chosen = run.out(rows.size(), s.cols, s.pad), some = run.matrix(rows.size(), s.cols, s.pad),
           back = run.matrix(s.rows, s.cols, s.pad);
      run.on.exec.gather_rows(from.mat(), rows.data(), chosen.mat());
      run.keep("gathered", chosen);
      run.on.exec.scatter_rows(some.mat(), rows.data(), back.mat());
      run.keep("scattered", back);
      using T = std::remove_reference_t<decltype(*from.mat().data)>;
      for (const int64_t pages_of : {1, 3}) {
        auto memory = run.matrix(sequences.count() * pages_of * 10, s.cols, 0);
        run.on.exec.store_rows(from.mat(), pass.layout, Pages<T>{memory.mat().data, nullptr, pages_of, 10, s.cols});
        run.keep("pages", memory);
      }
      auto a = run.parameters(5000 + s.cols), b = run.parameters(5000 + s.cols);
      run.on.exec.add_values(a.data(), a.size(), b.data());
      run.keep_wide("sum", b);
      auto power = run.parameters(a.size());
      run.on.exec.exp_values_forward(a.data(), a.size(), power.data());
      run.keep_wide("powers", power);
      run.on.exec.exp_values_backward(a.data(), power.data(), a.size(), b.data());
      run.keep_wide("powers' gradient", b);
    });
  });
}

TEST_P(DeviceList, Optimizer) {
  compare(GetParam(), [&](auto& run) {
    using W = typename std::decay_t<decltype(run)>::W;
    const std::vector<ParamPiece> list = {{0, 4096, 1}, {4096, 5, 0}, {4101, 1, 1}, {4102, 0, 0}, {4103, 2000, 0}};
    Buffer<ParamPiece> pieces(run.on.device, static_cast<int64_t>(list.size()));
    pieces.write(0, list);
    const ParamPieces all{pieces.data(), pieces.size()};
    Buffer<W> grads = run.parameters(6200), values = run.parameters(6200), m = run.parameters(6200),
              v = run.parameters(6200, 0, 1);
    Buffer<double> sum(run.on.device, 1);
    run.on.exec.square_sum(grads.data(), all, sum.data());
    run.results.push_back({"square sum", sum.to_vector(), true});
    const auto f = [](double x) { return static_cast<W>(static_cast<float>(x)); };
    const AdamWStep<W> step{f(0.9), f(0.1), f(0.95), f(0.05), f(1e-8), f(0.5), f(0.01), f(1.5), f(0.001)};
    run.on.exec.adamw(step, all, grads.data(), ParamValues<W>{values.data()}, MomentValues<W>{m.data(), v.data()});
    run.keep_wide("values", values);
    run.keep_wide("m", m);
    run.keep_wide("v", v);
  });
}

TEST_P(DeviceList, Attention) {
  const struct {
    int64_t heads, kv_heads, dim, window, pad;
    std::vector<int64_t> offsets, before;  // before: tokens in pages; none: no pages
    int64_t pages;                         // of a sequence, of 16 rows
    int64_t rotated = 0;                   // of a head's channels
  } shapes[] = {{2, 1, 64, 0, 0, {0, 3, 3, 133}, {}, 0},
                {4, 2, 128, 20, 8, {0, 65}, {}, 0},
                {2, 2, 24, 7, 0, {0, 1, 40}, {}, 0},
                {3, 1, 5, 0, 1, {0, 30}, {}, 0},
                {2, 1, 200, 0, 0, {0, 9, 20}, {}, 0},
                // latents of published models, and of any width
                {4, 1, 576, 0, 8, {0, 9, 20}, {}, 0},
                {3, 1, 576, 0, 0, {0, 1, 5}, {30, 0}, 3},
                {2, 1, 257, 5, 1, {0, 9}, {}, 0},
                {4, 1, 64, 16, 0, {0, 1, 2, 3}, {0, 5, 100}, 1},
                {2, 2, 128, 0, 8, {0, 1, 5}, {30, 0}, 3},
                // Whole heads turn in the kernels of the gradients, others after them.
                {2, 1, 64, 0, 0, {0, 3, 3, 133}, {}, 0, 64},
                {4, 2, 128, 20, 8, {0, 65, 70}, {1000000, 7}, 0, 128},
                {2, 2, 128, 0, 0, {0, 40}, {}, 0, 64},
                {2, 1, 24, 7, 8, {0, 1, 40}, {5, 9}, 0, 24},
                {4, 1, 256, 20, 8, {0, 65, 70}, {1000000, 7}, 0, 64},
                {3, 1, 6, 0, 1, {0, 30}, {}, 0, 4},
                {2, 2, 64, 0, 8, {0, 1, 5}, {30, 0}, 3, 64}};
  for (const auto& s : shapes) {
    SCOPED_TRACE(::testing::Message() << s.heads << " / " << s.kv_heads << " x " << s.dim << ", window " << s.window
                                      << ", pages " << s.pages << ", turned " << s.rotated);
    const auto body = [&](auto& run) {
      using W = typename std::decay_t<decltype(run)>::W;
      const SeqLayout sequences(s.offsets);
      const int64_t rows = sequences.tokens(), columns = s.heads * s.dim, kv_columns = s.kv_heads * s.dim;
      const Pass pass(run.on.device, sequences,
                      s.before.empty() ? std::vector<int64_t>(static_cast<size_t>(sequences.count())) : s.before);
      auto q = run.matrix(rows, columns, s.pad), k = run.matrix(rows, kv_columns, s.pad),
           v = run.matrix(rows, kv_columns, s.pad);
      auto d_o = run.matrix(rows, columns, s.pad), o = run.out(rows, columns, s.pad);
      auto dq = run.out(rows, columns, s.pad), dk = run.out(rows, kv_columns, s.pad),
           dv = run.out(rows, kv_columns, s.pad);
      auto old_k = run.matrix(sequences.count() * s.pages * 16, kv_columns, 0),
           old_v = run.matrix(sequences.count() * s.pages * 16, kv_columns, 0);
      using T = std::remove_reference_t<decltype(*q.mat().data)>;
      Pages<T> past_k, past_v;
      if (s.pages > 0) {
        past_k = {old_k.mat().data, nullptr, s.pages, 16, kv_columns};
        past_v = {old_v.mat().data, nullptr, s.pages, 16, kv_columns};
      }
      Matrix<W> lse(run.on.device, rows, s.heads, 0);
      const AttentionShape shape{s.heads,
                                 s.kv_heads,
                                 s.dim,
                                 s.window,
                                 1 / std::sqrt(static_cast<double>(s.dim)),
                                 s.rotated > 0 ? 10000.0 : 0.0,
                                 s.rotated};
      run.on.exec.attention_forward(q.mat(), k.mat(), v.mat(), shape, pass.layout, past_k, past_v, o.mat(), lse.mat());
      run.keep("o", o);
      run.keep_wide("lse", lse);
      run.on.exec.attention_backward(d_o.mat(), q.mat(), k.mat(), v.mat(), shape, pass.layout, past_k, past_v, o.mat(),
                                     lse.mat(), dq.mat(), dk.mat(), dv.mat());
      run.keep("dq", dq);
      run.keep("dk", dk);
      run.keep("dv", dv);
    };
    // probabilities and their slopes are rounded to bf16 before the second products (tests/cuda/attention_test.cu)
    compare(GetParam(), body, 1e-2);
  }
}

}  // namespace
}  // namespace fw::testing
