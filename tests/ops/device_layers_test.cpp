// The operations that only some kinds of layers need (FW_LAYER_OP), as device_list_test.cpp has the others: on every
// device against the host in double.
#include <cmath>

#include "ops/device_list.h"

namespace fw::testing {
namespace {

class DeviceLayers : public OnDevice {};
INSTANTIATE_TEST_SUITE_P(Devices, DeviceLayers, ::testing::ValuesIn(cases()),
                         [](const auto& one) { return one.param.name; });

struct HeadShape {
  int64_t rows, heads, dim, pad;
};
const HeadShape kHeadShapes[] = {{0, 2, 8, 0},  {1, 1, 1, 3},   {1, 3, 40, 0},
                                 {65, 2, 5, 1}, {70, 4, 64, 8}, {130, 1, 520, 0}};
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
        auto x = run.matrix(s.rows, cols, s.pad, 1, 4), dy = run.matrix(s.rows, cols, s.pad),
             y = run.out(s.rows, cols, s.pad), dx = run.matrix(s.rows, cols, s.pad);
        Buffer<W> weight = run.parameters(cols), bias = run.parameters(cols), dweight = run.parameters(cols),
                  dbias = run.parameters(cols);
        Buffer<W> rstd = run.parameters(std::max<int64_t>(1, s.rows * s.heads));
        run.on.exec.group_norm_forward(x.mat(), s.dim, weight.data(), bias.data(), W(1e-5), y.mat(), rstd.data());
        run.keep("y", y);
        run.keep_wide("rstd", rstd);
        run.on.exec.group_norm_backward(dy.mat(), x.mat(), s.dim, weight.data(), rstd.data(), dx.mat(), dweight.data(),
                                        dbias.data(), write);
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
      auto x = run.matrix(s.rows, cols, s.pad), dy = run.matrix(s.rows, cols, s.pad), y = run.out(s.rows, cols, s.pad),
           dx = run.out(s.rows, cols, s.pad);
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
          auto x = run.matrix(130, cols, pad), y = run.out(130, count * cols, pad),
               dy = run.matrix(130, count * cols, pad), dx = run.out(130, cols, pad);
          auto tail = run.matrix(4, cols, 0), after = run.matrix(4, cols, 0);
          Buffer<W> mix = run.parameters(count * cols, 0, 1), dmix = run.parameters(count * cols);
          const auto* before = tails ? tail.mat().data : nullptr;
          run.on.exec.token_shift_forward(x.mat(), mix.data(), count, pass.layout, before, after.mat().data, y.mat());
          run.keep("y", y);
          run.keep("tails", after);
          run.on.exec.token_shift_backward(dy.mat(), x.mat(), mix.data(), count, pass.layout, before, dx.mat(),
                                           dmix.data());
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
        Buffer<W> k_k = run.parameters(n, 0.5, 1.5), k_a = run.parameters(n), dk_k = run.parameters(n),
                  dk_a = run.parameters(n);
        run.on.exec.rwkv7_front_forward(shape, decay.mat(), rate.mat(), k.mat(), k_k.data(), k_a.data(), g.mat(),
                                        p.mat(), f.mat(), key.mat());
        run.keep_wide("g", g);
        run.keep("p", p);
        run.keep("f", f);
        run.keep("key", key);
        if (s.dim == 1 && eps == 0) return;  // p is a sign, and its slope is what rounding leaves
        run.on.exec.rwkv7_front_backward(shape, dg.mat(), dp.mat(), df.mat(), dkey.mat(), decay.mat(), rate.mat(),
                                         k.mat(), k_k.data(), k_a.data(), ddecay.mat(), drate.mat(), dk.mat(),
                                         dk_k.data(), dk_a.data());
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
      run.on.exec.bonus_gate_backward(dy.mat(), o.mat(), r.mat(), key.mat(), v.mat(), gate.mat(), r_k.data(), s.dim,
                                      d_o.mat(), dr.mat(), dkey.mat(), dv.mat(), dgate.mat(), dr_k.data());
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
      // dx in place
      run.on.exec.mixed_value_backward(dy.mat(), o.mat(), to.mat(), gate.mat(), dy.mat(), dto.mat(), dgate.mat());
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
        auto rhs = run.matrix(20, kHeads * K, 3), k = run.matrix(20, kHeads * K, 0, -0.5, 0.5),
             beta = run.matrix(20, kHeads, 1, 0, 1);
        auto x = run.out(20, kHeads * K, 5), y = run.matrix(20, kHeads * K, 5);
        auto g = run.wide(20, kHeads, 0);
        Buffer<W> lambda = run.parameters(kHeads * K), dlambda = run.parameters(kHeads * K);
        // H of a state: symmetric, not negative.
        std::vector<double> states(static_cast<size_t>(4 * kHeads * K * (kV + K)), 0.5);
        for (int64_t i = 0; i < 4 * kHeads * K; ++i) states[static_cast<size_t>(i * (kV + K) + kV + i % K)] = 2;
        Buffer<W> before = run.on.template buffer<W>(states);
        run.on.exec.mesa_solve(shape, rhs.mat(), k.mat(), beta.mat(), g.mat(), lambda.data(), pass.layout,
                               state ? before.data() : nullptr, x.mat());
        run.keep("x", x);
        run.on.exec.mesa_lambda_backward(rhs.mat(), y.mat(), lambda.data(), dlambda.data());
        run.keep_wide("dlambda", dlambda);
      });
    }
  }
}

const SeqLayout kMamba3Sequences({0, 5, 5, 6, 70});
const Mamba3Shape kMamba3Shapes[] = {
    {4, 2, 8, 4, 1, 2, false}, {3, 1, 7, 5, 1, 3, false}, {8, 1, 64, 16, 1, 32, false},   {2, 1, 128, 64, 1, 32, true},
    {2, 1, 6, 4, 3, 3, true},  {4, 2, 8, 8, 4, 4, false}, {1, 1, 1030, 300, 2, 300, true}};
template <class Body>
void for_mamba3(const Body& body) {
  for (const Mamba3Shape& s : kMamba3Shapes) {
    SCOPED_TRACE(::testing::Message() << s.heads << " heads, " << s.groups << " groups, N " << s.state << ", P "
                                      << s.head_dim << ", R " << s.rank);
    body(s);
  }
}

TEST_P(DeviceLayers, Mamba3Rotary) {
  for_mamba3([](const Mamba3Shape& s) {
    for (const bool own : {false, true}) {
      for (const bool state : {false, true}) {
        SCOPED_TRACE(::testing::Message() << "own " << own << ", state " << state);
        compare(GetParam(), [&](auto& run) {
          using W = typename std::decay_t<decltype(run)>::W;
          const int64_t T = 70, N = 4, of_token = s.rank * s.groups * s.state, keys = s.heads * s.state,
                        all = s.heads * s.angles, biases = keys * s.rank;
          const Pass pass(run.on.device, kMamba3Sequences, {0, 0, 0, 0});
          auto q = run.matrix(T, of_token, 2), k = run.matrix(T, of_token, 4),
               angle = run.matrix(T, own ? all : s.angles, 1);
          auto dt = run.matrix(T, s.heads, 0, 0.01, 1);
          auto q_rows = run.out(T * s.rank, keys, 2), k_rows = run.out(T * s.rank, keys, 0);
          auto dq_rows = run.matrix(T * s.rank, keys, 2), dk_rows = run.matrix(T * s.rank, keys, 0);
          auto qk_self = run.wide_out(T, s.heads * s.rank * s.rank, 1),
               dqk_self = run.wide(T, s.heads * s.rank * s.rank, 1);
          Buffer<W> q_bias = run.parameters(biases), k_bias = run.parameters(biases), dq_bias = run.parameters(biases),
                    dk_bias = run.parameters(biases);
          Buffer<W> start = run.parameters(N * 2 * all, -0.4, 0.4),
                    checkpoints = run.parameters(rotary_checkpoints(T, N) * 2 * all), dstart = run.parameters(N * all);
          W* const before = state ? start.data() : nullptr;
          run.on.exec.mamba3_rotary_forward(s, q.mat(), k.mat(), q_bias.data(), k_bias.data(), angle.mat(), dt.mat(),
                                            pass.layout, before, checkpoints.data(), q_rows.mat(), k_rows.mat(),
                                            qk_self.mat());
          run.keep("q_rows", q_rows);
          run.keep("k_rows", k_rows);
          run.keep_wide("met", qk_self);
          auto dq = run.out(T, of_token, 2), dk = run.out(T, of_token, 4), dangle = run.out(T, own ? all : s.angles, 1),
               d_dt = run.out(T, s.heads, 0);
          run.on.exec.mamba3_rotary_backward(s, dq_rows.mat(), dk_rows.mat(), dqk_self.mat(), q.mat(), k.mat(),
                                             q_bias.data(), k_bias.data(), angle.mat(), dt.mat(), checkpoints.data(),
                                             pass.layout, dq.mat(), dk.mat(), dangle.mat(), d_dt.mat(), dq_bias.data(),
                                             dk_bias.data(), state ? dstart.data() : nullptr);
          run.keep("dq", dq);
          run.keep("dk", dk);
          run.keep("dangle", dangle);
          run.keep("d_dt", d_dt);
          run.keep_wide("dq_bias", dq_bias);
          run.keep_wide("dk_bias", dk_bias);
          if (state) run.keep_wide("dstart", dstart);
          // Without checkpoints, in place of a state that goes on.
          run.on.exec.mamba3_rotary_forward(s, q.mat(), k.mat(), q_bias.data(), k_bias.data(), angle.mat(), dt.mat(),
                                            pass.layout, before, nullptr, q_rows.mat(), k_rows.mat(), qk_self.mat());
          run.keep("q_rows again", q_rows);
        });
      }
    }
  });
}

// The state's angle after 200,000 tokens, at once and in pieces, beside the sum in double; whole turns are not looked
// at.
TEST_P(DeviceLayers, Mamba3AngleLosesNothing) {
  with_type([](auto&& on) {
    using T = typename std::decay_t<decltype(on)>::Activation;
    using W = Wide<T>;
    const int64_t tokens = 200'000, piece = 9'999;
    const Mamba3Shape s{1, 1, 2, 1, 1, 1, false};
    Matrix<T> q(on.device, tokens, 2, 0, std::vector<double>(2 * tokens, 0.5)),
        angle(on.device, tokens, 1, 0, on.random(tokens)), rows(on.device, tokens, 2, 0);
    std::vector<double> steps = on.random(tokens);
    for (double& x : steps) x = value_of(stored<T>(0.02 + 0.01 * std::abs(x)));
    Matrix<T> dt(on.device, tokens, 1, 0, steps), k_rows(on.device, tokens, 2, 0);
    Buffer<W> bias = on.template buffer<W>({1, 0}), qk_self(on.device, tokens);
    double sum = 0;
    const std::vector<double> angles = angle.values();
    for (int64_t t = 0; t < tokens; ++t)
      sum += std::tanh(angles[static_cast<size_t>(t)]) * steps[static_cast<size_t>(t)] / 2;
    for (const int64_t most : {tokens, piece}) {
      Buffer<W> start = on.template buffer<W>({0, 0});
      for (int64_t t = 0; t < tokens; t += most) {
        const int64_t count = std::min(most, tokens - t);
        const SeqLayout sequences({0, count});
        const Pass pass(on.device, sequences, {0});
        const auto part = [&](Matrix<T>& m) { return Mat<T>(m.mat().data + t * m.mat().cols, count, m.mat().cols); };
        on.exec.mamba3_rotary_forward(s, part(q), part(q), bias.data(), bias.data(), part(angle), part(dt), pass.layout,
                                      start.data(), nullptr, part(rows), part(k_rows),
                                      Mat<W>(qk_self.data(), count, 1));
      }
      const std::vector<W> kept = start.to_vector();
      const double off = sum - static_cast<double>(kept[0]) - static_cast<double>(kept[1]);
      EXPECT_LE(std::abs(off - std::nearbyint(off)), 1e-9) << "pieces of " << most;
    }
  });
}

TEST_P(DeviceLayers, Mamba3Trapezoid) {
  for_mamba3([](const Mamba3Shape& s) {
    for (const bool heavy : {false, true}) {
      compare(GetParam(), [&](auto& run) {
        using W = typename std::decay_t<decltype(run)>::W;
        const int64_t T = 70, N = 4, H = s.heads;
        const Pass pass(run.on.device, kMamba3Sequences, {0, 0, 0, 0});
        const Mamba3Decay decay{heavy, 0.5};
        auto dt_in = run.matrix(T, H, 1), a_in = run.matrix(T, H, 1, -4, 4), dt = run.out(T, H, 1),
             da_in = run.out(T, H, 0);
        auto g = run.wide_out(T, H, 2), dg = run.wide(T, H, 2);
        Buffer<W> bias = run.parameters(H), dbias = run.parameters(H);
        run.on.exec.mamba3_time_forward(decay, dt_in.mat(), a_in.mat(), bias.data(), dt.mat(), g.mat());
        run.keep("dt", dt);
        run.keep_wide("g", g);
        auto trap = run.matrix(T, H, 1), dtrap = run.out(T, H, 0), step = run.matrix(T, H, 0, 0.1, 1);
        auto now = run.wide_out(T, H, 0), ahead = run.wide_out(T, H, 1), row_g = run.wide_out(T * s.rank, H, 0),
             first = run.wide_out(N, H, 0);
        auto gate = run.out(T * s.rank, H, 0), dgate = run.matrix(T * s.rank, H, 0);
        run.on.exec.mamba3_weights_forward(s, step.mat(), trap.mat(), dg.mat(), pass.layout, now.mat(), ahead.mat(),
                                           gate.mat(), row_g.mat(), first.mat());
        run.keep_wide("now", now);
        run.keep_wide("ahead", ahead);
        run.keep("gate", gate);
        run.keep_wide("row_g", row_g);
        run.keep_wide("first", first);
        auto dnow = run.wide(T, H, 0), dahead = run.wide(T, H, 1), drow_g = run.wide(T * s.rank, H, 0),
             dfirst = run.wide(N, H, 0);
        for (const bool carried : {true, false}) {
          auto d_dt = run.matrix(T, H, 0);
          run.on.exec.mamba3_weights_backward(s, dnow.mat(), dahead.mat(), dgate.mat(), drow_g.mat(),
                                              carried ? dfirst.mat() : Mat<W>(), step.mat(), trap.mat(), pass.layout,
                                              d_dt.mat(), dtrap.mat(), g.mat());
          run.keep("d_dt", d_dt);
          run.keep("dtrap", dtrap);
          run.keep_wide("dg", g);
        }
        auto of_dt = run.matrix(T, H, 0);
        run.on.exec.mamba3_time_backward(decay, of_dt.mat(), dg.mat(), dt_in.mat(), a_in.mat(), bias.data(),
                                         of_dt.mat(), da_in.mat(), dbias.data());
        run.keep("ddt_in", of_dt);
        run.keep("da_in", da_in);
        run.keep_wide("dbias", dbias);
      });
    }
  });
}

TEST_P(DeviceLayers, Mamba3Carry) {
  for_mamba3([](const Mamba3Shape& s) {
    compare(GetParam(), [&](auto& run) {
      using W = typename std::decay_t<decltype(run)>::W;
      const int64_t T = 70 * s.rank, N = 4, keys = s.heads * s.state, values = s.heads * s.head_dim;
      const Pass pass(run.on.device, kMamba3Sequences, {0, 0, 0, 0});
      auto k_rows = run.matrix(T, keys, 1), v_rows = run.matrix(T, values, 2), k_last = run.matrix(N, s.rank * keys, 0),
           v_last = run.matrix(N, s.rank * values, 0);
      auto dk_last = run.out(N, s.rank * keys, 0), dv_last = run.out(N, s.rank * values, 0);
      auto first = run.wide(N, s.heads, 0), dfirst = run.wide_out(N, s.heads, 0);
      Buffer<W> state = run.parameters(N * keys * s.head_dim);
      run.on.exec.mamba3_carry_backward(s, state.data(), first.mat(), k_last.mat().data, v_last.mat().data,
                                        dfirst.mat(), dk_last.mat().data, dv_last.mat().data);
      run.keep_wide("dfirst", dfirst);
      run.keep("dk_last", dk_last);
      run.keep("dv_last", dv_last);
      run.on.exec.mamba3_carry_forward(s, first.mat(), k_rows.mat(), v_rows.mat(), pass.layout, k_last.mat().data,
                                       v_last.mat().data, state.data());
      run.keep_wide("s", state);
      run.keep("k_last", k_last);
      run.keep("v_last", v_last);
    });
  });
}

TEST_P(DeviceLayers, Mamba3Diag) {
  for_mamba3([](const Mamba3Shape& s) {
    for (const bool skips : {false, true}) {
      for (const int64_t pad : {0, 8}) {
        compare(GetParam(), [&](auto& run) {
          using W = typename std::decay_t<decltype(run)>::W;
          const int64_t T = 70, H = s.heads, values = H * s.head_dim, products = H * s.rank * s.rank;
          auto qk_self = run.wide(T, products, 0), now = run.wide(T, H, 0), ahead = run.wide(T, H, 0),
               dqk_self = run.wide_out(T, products, 0), dnow = run.wide_out(T, H, 0), dahead = run.wide_out(T, H, 0);
          auto v = run.matrix(T * s.rank, values, pad), o = run.matrix(T * s.rank, values, pad),
               d_o = run.matrix(T * s.rank, values, pad), dv = run.matrix(T * s.rank, values, pad);
          Buffer<W> skip = run.parameters(H), dskip = run.parameters(H);
          run.on.exec.mamba3_diag_forward(s, qk_self.mat(), v.mat(), now.mat(), ahead.mat(),
                                          skips ? skip.data() : nullptr, o.mat());
          run.keep("o", o);
          run.on.exec.mamba3_diag_backward(s, d_o.mat(), qk_self.mat(), v.mat(), now.mat(), ahead.mat(),
                                           skips ? skip.data() : nullptr, dv.mat(), dqk_self.mat(), dnow.mat(),
                                           dahead.mat(), skips ? dskip.data() : nullptr);
          run.keep("dv", dv);
          run.keep_wide("dmet", dqk_self);
          run.keep_wide("dnow", dnow);
          run.keep_wide("dahead", dahead);
          if (skips) run.keep_wide("dskip", dskip);
        });
      }
    }
  });
}

TEST_P(DeviceLayers, Mamba3Gates) {
  for_mamba3([](const Mamba3Shape& s) {
    for (const bool mimo : {false, true}) {
      for (const bool norm : {false, true}) {
        if (!mimo && s.rank > 1) continue;
        SCOPED_TRACE(::testing::Message() << "mimo " << mimo << ", norm " << norm);
        compare(GetParam(), [&](auto& run) {
          using W = typename std::decay_t<decltype(run)>::W;
          const int64_t T = 70, values = s.heads * s.head_dim, factors = s.rank * values;
          auto x = run.matrix(T, values, 1), z = run.matrix(T, values, 0), dy = run.matrix(T, values, 0),
               rows = run.out(T * s.rank, values, 3), o = run.matrix(T * s.rank, values, 0),
               d_o = run.out(T * s.rank, values, 0), dz = run.out(T, values, 0), y = run.out(T, values, 0),
               dx = run.out(T, values, 1);
          Buffer<W> up = run.parameters(factors), down = run.parameters(factors), weight = run.parameters(values),
                    dup = run.parameters(factors), ddown = run.parameters(factors), dweight = run.parameters(values),
                    rstd = run.parameters(T * s.rank * s.heads);
          const auto if_mimo = [&](Buffer<W>& of) { return mimo ? of.data() : nullptr; };
          const auto if_norm = [&](Buffer<W>& of) { return norm ? of.data() : nullptr; };
          run.on.exec.mamba3_gate_forward(s, o.mat(), z.mat(), if_mimo(up), if_mimo(down), if_norm(weight), W(1e-5),
                                          y.mat(), if_norm(rstd));
          run.keep("y", y);
          run.on.exec.mamba3_gate_backward(s, dy.mat(), o.mat(), z.mat(), if_mimo(up), if_mimo(down), if_norm(weight),
                                           if_norm(rstd), d_o.mat(), dz.mat(), if_mimo(dup), if_mimo(ddown),
                                           if_norm(dweight));
          run.keep("d_o", d_o);
          run.keep("dz", dz);
          if (norm) run.keep_wide("dnorm", dweight);
          if (!mimo) return;
          run.keep_wide("dup", dup);
          run.keep_wide("ddown", ddown);
          run.on.exec.mamba3_expand_forward(s, x.mat(), up.data(), rows.mat());
          run.keep("rows", rows);
          run.on.exec.mamba3_expand_backward(s, o.mat(), x.mat(), up.data(), dx.mat(), dup.data());
          run.keep("dx", dx);
          run.keep_wide("dup of spread", dup);
        });
      }
    }
  });
}

TEST_P(DeviceLayers, MapsOfOneNumber) {
  for (const FeatureMap map : {FeatureMap::kSilu, FeatureMap::kTanh, FeatureMap::kSquaredRelu}) {
    for_shapes([&](const Shape& s) {
      compare(GetParam(), [&](auto& run) {
        auto x = run.matrix(s.rows, s.cols, s.pad), y = run.out(s.rows, s.cols, s.pad),
             dy = run.matrix(s.rows, s.cols, s.pad);
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
