// The operations that only some kinds of layers need (FW_LAYER_OP), as test_device_list.cpp has the others: on every device against the host in double.
#include <cmath>

#include "ops/device_list.h"

namespace fw::testing {
namespace {

class DeviceLayers : public OnDevice {};
INSTANTIATE_TEST_SUITE_P(Devices, DeviceLayers, ::testing::ValuesIn(cases()), [](const auto& one) { return one.param.name; });

struct HeadShape {
  int64_t rows, heads, dim, pad;
};
const HeadShape kHeadShapes[] = {{0, 2, 8, 0}, {1, 1, 1, 3}, {1, 3, 40, 0}, {65, 2, 5, 1}, {70, 4, 64, 8}, {130, 1, 520, 0}};
template <class Body>
void for_heads(const Body& body) {
  for (const HeadShape& s : kHeadShapes) {
    SCOPED_TRACE(::testing::Message() << s.rows << " x " << s.heads << " x " << s.dim << " + " << s.pad);
    body(s);
  }
}

TEST_P(DeviceLayers, GroupNorm) {
  for_heads([](const HeadShape& s) {
    if (s.dim == 1) return;  // no variance
    for (const Write write : {Write::kOverwrite, Write::kAccumulate}) {
      compare(GetParam(), [&](auto& run) {
        using W = typename std::decay_t<decltype(run)>::W;
        const int64_t cols = s.heads * s.dim;
        auto x = run.matrix(s.rows, cols, s.pad, 1, 4), dy = run.matrix(s.rows, cols, s.pad), y = run.out(s.rows, cols, s.pad),
             dx = run.matrix(s.rows, cols, s.pad);
        Buffer<W> weight = run.parameters(cols), bias = run.parameters(cols), dweight = run.parameters(cols), dbias = run.parameters(cols);
        Buffer<W> rstd = run.parameters(std::max<int64_t>(1, s.rows * s.heads));
        run.on.exec.group_norm_forward(x.mat(), s.dim, weight.data(), bias.data(), W(1e-5), y.mat(), rstd.data());
        run.keep("y", y);
        run.keep_wide("rstd", rstd);
        run.on.exec.group_norm_backward(dy.mat(), x.mat(), s.dim, weight.data(), rstd.data(), dx.mat(), dweight.data(), dbias.data(), write);
        run.keep("dx", dx);
        run.keep_wide("dweight", dweight);
        run.keep_wide("dbias", dbias);
      });
    }
  });
}

TEST_P(DeviceLayers, UnitVectors) {
  for_heads([](const HeadShape& s) {
    compare(GetParam(), [&](auto& run) {
      using W = typename std::decay_t<decltype(run)>::W;
      const int64_t cols = s.heads * s.dim;
      auto x = run.matrix(s.rows, cols, s.pad), dy = run.matrix(s.rows, cols, s.pad), y = run.out(s.rows, cols, s.pad), dx = run.out(s.rows, cols, s.pad);
      run.on.exec.l2_norm_forward(x.mat(), s.dim, W(1e-3), y.mat());
      run.keep("y", y);
      if (s.dim == 1) return;  // y is a sign, and its slope is what rounding leaves
      run.on.exec.l2_norm_backward(dy.mat(), x.mat(), s.dim, W(1e-3), dx.mat());
      run.keep("dx", dx);
    });
  });
}

TEST_P(DeviceLayers, TokenShift) {
  const SeqLayout sequences({0, 1, 1, 70, 130});
  for (const Shape& shape : {Shape{130, 24, 8}, {130, 5, 2}, {130, 520, 0}}) {
    const int64_t cols = shape.cols, pad = shape.pad;
    for (const int64_t count : {int64_t{1}, int64_t{6}}) {
      for (const bool tails : {false, true}) {
        SCOPED_TRACE(::testing::Message() << cols << " columns, " << count << " mixes, tails " << tails);
        compare(GetParam(), [&](auto& run) {
          using W = typename std::decay_t<decltype(run)>::W;
          const Pass pass(run.on.device, sequences, {0, 0, 0, 0});
          auto x = run.matrix(130, cols, pad), y = run.out(130, count * cols, pad), dy = run.matrix(130, count * cols, pad), dx = run.out(130, cols, pad);
          auto tail = run.matrix(4, cols, 0), after = run.matrix(4, cols, 0);
          Buffer<W> mix = run.parameters(count * cols, 0, 1), dmix = run.parameters(count * cols);
          const auto* before = tails ? tail.mat().data : nullptr;
          run.on.exec.token_shift_forward(x.mat(), mix.data(), count, pass.layout, before, after.mat().data, y.mat());
          run.keep("y", y);
          run.keep("tails", after);
          run.on.exec.token_shift_backward(dy.mat(), x.mat(), mix.data(), count, pass.layout, before, dx.mat(), dmix.data());
          run.keep("dx", dx);
          run.keep_wide("dmix", dmix);
          run.on.exec.token_shift_forward(x.mat(), mix.data(), count, pass.layout, before, tail.mat().data, y.mat());
          run.keep("tails in place", tail);
        });
      }
    }
  }
}

TEST_P(DeviceLayers, Rwkv7) {
  for_heads([](const HeadShape& s) {
    for (const double eps : {0.0, 1e-3}) {
      compare(GetParam(), [&](auto& run) {
        using W = typename std::decay_t<decltype(run)>::W;
        const int64_t n = s.heads * s.dim;
        const Rwkv7Shape shape{s.dim, eps};
        auto in = [&] { return run.matrix(s.rows, n, s.pad); };
        auto out = [&] { return run.out(s.rows, n, s.pad); };
        auto decay = in(), rate = in(), k = in(), dp = in(), df = in(), dkey = in();
        auto p = out(), f = out(), key = out(), ddecay = out(), drate = out(), dk = out();
        auto g = run.wide(s.rows, n, s.pad), dg = run.wide(s.rows, n, s.pad);
        Buffer<W> k_k = run.parameters(n, 0.5, 1.5), k_a = run.parameters(n), dk_k = run.parameters(n), dk_a = run.parameters(n);
        run.on.exec.rwkv7_front_forward(shape, decay.mat(), rate.mat(), k.mat(), k_k.data(), k_a.data(), g.mat(), p.mat(), f.mat(), key.mat());
        run.keep_wide("g", g);
        run.keep("p", p);
        run.keep("f", f);
        run.keep("key", key);
        if (s.dim == 1 && eps == 0) return;  // p is a sign, and its slope is what rounding leaves
        run.on.exec.rwkv7_front_backward(shape, dg.mat(), dp.mat(), df.mat(), dkey.mat(), decay.mat(), rate.mat(), k.mat(), k_k.data(), k_a.data(),
                                         ddecay.mat(), drate.mat(), dk.mat(), dk_k.data(), dk_a.data());
        run.keep("ddecay", ddecay);
        run.keep("drate", drate);
        run.keep("dk", dk);
        run.keep_wide("dk_k", dk_k);
        run.keep_wide("dk_a", dk_a);
      });
    }
    compare(GetParam(), [&](auto& run) {
      using W = typename std::decay_t<decltype(run)>::W;
      const int64_t n = s.heads * s.dim;
      auto in = [&] { return run.matrix(s.rows, n, s.pad); };
      auto out = [&] { return run.out(s.rows, n, s.pad); };
      auto o = in(), r = in(), key = in(), v = in(), gate = in(), dy = in();
      auto y = out(), d_o = out(), dr = out(), dkey = out(), dv = out(), dgate = out();
      Buffer<W> r_k = run.parameters(n), dr_k = run.parameters(n);
      run.on.exec.bonus_gate_forward(o.mat(), r.mat(), key.mat(), v.mat(), gate.mat(), r_k.data(), s.dim, y.mat());
      run.keep("y", y);
      run.on.exec.bonus_gate_backward(dy.mat(), o.mat(), r.mat(), key.mat(), v.mat(), gate.mat(), r_k.data(), s.dim, d_o.mat(), dr.mat(), dkey.mat(), dv.mat(),
                                      dgate.mat(), dr_k.data());
      run.keep("d_o", d_o);
      run.keep("dr", dr);
      run.keep("dkey", dkey);
      run.keep("dv", dv);
      run.keep("dgate", dgate);
      run.keep_wide("dr_k", dr_k);
      auto to = in();
      run.on.exec.mixed_value_forward(o.mat(), to.mat(), gate.mat(), y.mat());
      run.keep("mixed", y);
      auto dto = in();
      run.on.exec.mixed_value_backward(dy.mat(), o.mat(), to.mat(), gate.mat(), dy.mat(), dto.mat(), dgate.mat());  // dx in place
      run.keep("mixed dx", dy);
      run.keep("mixed dto", dto);
      run.keep("mixed dgate", dgate);
    });
  });
}

TEST_P(DeviceLayers, SumsOfRows) {
  for_shapes([](const Shape& s) {
    compare(GetParam(), [&](auto& run) {
      auto from = run.matrix(s.rows, s.cols, s.pad), to = run.matrix(s.rows, s.cols, s.pad);
      run.on.exec.add_rows(from.mat(), to.mat());
      run.keep("sum", to);
      run.on.exec.subtract_rows(from.mat(), to.mat());
      run.keep("difference", to);
    });
  });
}

TEST_P(DeviceLayers, Mesa) {
  const SeqLayout sequences({0, 5, 5, 6, 20});
  for (const auto& form : {std::pair<int64_t, int64_t>{5, 0}, {40, 0}, {40, 60}, {5, 2}}) {
    const int64_t K = form.first, steps = form.second;
    for (const bool state : {false, true}) {
      SCOPED_TRACE(::testing::Message() << "K " << K << ", " << steps << " steps, state " << state);
      compare(GetParam(), [&](auto& run) {
        using W = typename std::decay_t<decltype(run)>::W;
        constexpr int64_t kHeads = 2, kV = 3;
        const MesaShape shape{kHeads, K, kV, 0.25, steps, 1e-9};
        const Pass pass(run.on.device, sequences, {0, 0, 0, 0});
        auto rhs = run.matrix(20, kHeads * K, 3), k = run.matrix(20, kHeads * K, 0, -0.5, 0.5), beta = run.matrix(20, kHeads, 1, 0, 1);
        auto x = run.out(20, kHeads * K, 5), y = run.matrix(20, kHeads * K, 5);
        auto g = run.wide(20, kHeads, 0);
        Buffer<W> lambda = run.parameters(kHeads * K), dlambda = run.parameters(kHeads * K);
        // H of a state: symmetric, not negative.
        std::vector<double> states(static_cast<size_t>(4 * kHeads * K * (kV + K)), 0.5);
        for (int64_t i = 0; i < 4 * kHeads * K; ++i) states[static_cast<size_t>(i * (kV + K) + kV + i % K)] = 2;
        Buffer<W> before = run.on.template buffer<W>(states);
        run.on.exec.mesa_solve(shape, rhs.mat(), k.mat(), beta.mat(), g.mat(), lambda.data(), pass.layout, state ? before.data() : nullptr, x.mat());
        run.keep("x", x);
        run.on.exec.mesa_lambda_backward(rhs.mat(), y.mat(), lambda.data(), dlambda.data());
        run.keep_wide("dlambda", dlambda);
      });
    }
  }
}

TEST_P(DeviceLayers, MapsOfOneNumber) {
  for (const FeatureMap map : {FeatureMap::kSilu, FeatureMap::kTanh, FeatureMap::kSquaredRelu}) {
    for_shapes([&](const Shape& s) {
      compare(GetParam(), [&](auto& run) {
        auto x = run.matrix(s.rows, s.cols, s.pad), y = run.out(s.rows, s.cols, s.pad), dy = run.matrix(s.rows, s.cols, s.pad);
        run.on.exec.feature_map_forward(map, x.mat(), y.mat());
        run.keep("y", y);
        run.on.exec.feature_map_backward(map, dy.mat(), x.mat(), dy.mat());  // in place
        run.keep("dx", dy);
      });
    });
  }
}

}  // namespace
}  // namespace fw::testing
