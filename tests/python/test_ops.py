"""fastweight.torch.ops under the names of flash-linear-attention: values against the torch loop with the gates formed beside it, the way back for what is
not served, and, where that package is installed, signatures and values of its own reference functions."""

import importlib
import inspect
import os
import unittest
from unittest import mock

import torch
import torch.nn.functional as F

from fastweight.torch import _serving, ops
from reference import random_inputs, recurrence

B, T, H, HV, K, V = 2, 21, 2, 4, 8, 12


def near(found, expected, tolerance=1e-9):
    return float((found - expected).detach().abs().max()) <= tolerance * max(1.0, float(expected.detach().abs().max()))


def rand(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)), dtype=torch.float64)


def fla():
    try:
        import fla.ops  # noqa: F401
    except Exception as error:
        raise unittest.SkipTest(f"flash-linear-attention is not there: {error}")


class Ops(unittest.TestCase):
    def setUp(self):
        self.environment = mock.patch.dict(os.environ, {"FASTWEIGHT_STRICT": "1"})
        self.environment.start()
        self.addCleanup(self.environment.stop)

    def agree(self, out, rule, named, state=None, precond=None, v_first=False, **call):
        o, final, final_precond = recurrence(rule, named, state, precond, **call)
        self.assertTrue(near(out[0], o), rule)
        self.assertTrue(near(out[1].transpose(-1, -2) if v_first else out[1], final), rule)
        if len(out) == 3:
            self.assertTrue(near(out[2], final_precond), rule)

    def test_gated_delta_rule_with_raw_gates_and_without(self):
        n = random_inputs("gated_deltanet", B, T, H, HV, K, V)
        n["k"] = F.normalize(n["k"], dim=-1)
        state = rand(B, HV, K, V)
        raw, logits, A_log, bias = rand(B, T, HV), rand(B, T, HV, seed=1), rand(HV), rand(HV, seed=2)
        for op in (ops.chunk_gated_delta_rule, ops.fused_recurrent_gated_delta_rule):
            for norm in (False, True):
                rule = "decay=scalar gain=gate" + (" q_norm=l2 k_norm=l2" if norm else "")
                out = op(n["q"], n["k"], n["v"], g=n["g"], beta=n["beta"], scale=0.5, initial_state=state, output_final_state=True,
                         use_qk_l2norm_in_kernel=norm)
                self.agree(out, rule, n, state, scale=0.5)
            for negative in (False, True):
                formed = {**n, "g": -A_log.exp() * F.softplus(raw + bias), "beta": logits.sigmoid() * (2 if negative else 1)}
                out = op(n["q"], n["k"], n["v"], g=raw, beta=logits, use_gate_in_kernel=True, A_log=A_log, dt_bias=bias, use_beta_sigmoid_in_kernel=True,
                         allow_neg_eigval=negative, use_qk_l2norm_in_kernel=True, initial_state=state.transpose(-1, -2), output_final_state=True,
                         state_v_first=True)
                o = recurrence("gated_deltanet gain_bound=2", formed, state)[0]
                self.assertTrue(near(out[0], o, 1e-5))  # gates are formed in float32
            self.assertIsNone(op(n["q"], n["k"], n["v"], g=n["g"], beta=n["beta"])[1])

    def test_kda_bounded_and_softplus_gates(self):
        n = random_inputs("kda", B, T, H, HV, K, V)
        raw, A_log, bias = rand(B, T, HV, K), rand(HV), rand(HV * K)
        self.agree(ops.chunk_kda(**n, use_qk_l2norm_in_kernel=True, output_final_state=True), "kda", n)
        wide, b = A_log.exp()[:, None], bias.view(HV, K)
        for bound, formed in ((None, -wide * F.softplus(raw + b)), (-5.0, -5 * torch.sigmoid(wide * (raw + b)))):
            for op in (ops.chunk_kda, ops.fused_recurrent_kda):
                out = op(n["q"], n["k"], n["v"], raw, n["beta"], use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True, A_log=A_log, dt_bias=bias,
                         lower_bound=bound)
                self.assertTrue(near(out[0], recurrence("kda", {**n, "g": formed})[0], 1e-5))

    def test_delta_rule_gdn2_gla_simple_gla_retention_comba(self):
        n = random_inputs("deltanet", B, T, H, HV, K, V)
        for op in (ops.chunk_delta_rule, ops.fused_recurrent_delta_rule):
            self.agree(op(**n, use_qk_l2norm_in_kernel=True, output_final_state=True), "deltanet", n)
        n = random_inputs("gated_deltanet2", B, T, HV, HV, K, V)
        for op in (ops.chunk_gdn2, ops.fused_recurrent_gdn2):
            out = op(n["q"], n["k"], n["v"], n["g"], n["erase_gate"], n["write_gate"], use_qk_l2norm_in_kernel=True, output_final_state=True)
            self.agree(out, "gated_deltanet2", n)
        n = random_inputs("gla", B, T, HV, HV, K, V)
        self.agree(ops.chunk_gla(**n, output_final_state=True, state_v_first=True), "gla", n, v_first=True)
        self.agree(ops.fused_recurrent_gla(n["q"], n["k"], n["v"], gk=n["g"], output_final_state=True), "gla", n)
        n = random_inputs("mamba2", B, T, HV, HV, K, V)
        gamma = -rand(HV).abs()
        for op in (ops.chunk_simple_gla, ops.fused_recurrent_simple_gla):
            self.agree(op(**n, output_final_state=True), "mamba2", n)
            constant = {**n, "g": gamma.float().double().expand(B, T, HV)}
            self.agree(op(n["q"], n["k"], n["v"], g_gamma=gamma, output_final_state=True), "mamba2", constant)
        del n["g"]
        for op in (ops.chunk_retention, ops.fused_recurrent_retention):
            self.agree(op(**n, output_final_state=True), "retnet", n)
        rule = "decay=scalar gain=gate erase_key=own erase_state=previous q_norm=l2 k_norm=l2"
        n = random_inputs(rule, B, T, H, HV, K, V)
        for op in (ops.chunk_comba, ops.fused_recurrent_comba):
            out = op(q=n["q"], k=n["k"], v=n["v"], p=n["erase_key"], g=n["g"], beta=n["beta"], use_qk_l2norm_in_kernel=True, output_final_state=True)
            self.agree(out, rule, n)

    def test_preconditioned_forms_return_three(self):
        for kind, names in (("scalar", ("chunk_precond_gated_delta_rule", "fused_recurrent_precond_gated_delta_rule")),
                            ("channel", ("chunk_precond_kda", "fused_recurrent_precond_kda"))):
            rule = f"decay={kind} gain=gate precond=diagonal q_norm=l2 k_norm=l2"
            n = random_inputs(rule, B, T, H, HV, K, V)
            state, precond = rand(B, HV, K, V), rand(B, H, K).abs()
            for name in names:
                out = getattr(ops, name)(n["q"], n["k"], n["v"], g_atk=n["precond_g"], g=n["g"], beta_atk=n["precond_beta"], beta=n["beta"],
                                         initial_state=state, initial_A_state=precond, output_final_state=True, log_atk_scale=n["precond_center"])
                self.agree(out, rule, n, state, precond)
                default = getattr(ops, name)(n["q"], n["k"], n["v"], g_atk=n["precond_g"], g=n["g"], beta_atk=n["precond_beta"], beta=n["beta"])
                centered = {**n, "precond_center": torch.full((H,), -0.2).double()}
                self.assertTrue(near(default[0], recurrence(rule, centered)[0], 1e-7))
                self.assertEqual(default[1:], (None, None))

    def test_a_decode_step_leaves_the_callers_state_as_it_was(self):
        n = {name: x[:, :1] for name, x in random_inputs("gated_deltanet", B, T, H, HV, K, V).items()}
        state = rand(B, HV, K, V)
        before = state.clone()
        with torch.no_grad():
            out = ops.fused_recurrent_gated_delta_rule(**n, use_qk_l2norm_in_kernel=True, initial_state=state, output_final_state=True)
        self.assertTrue(torch.equal(state, before))
        self.agree(out, "gated_deltanet", n, state)

    def test_gradients_reach_the_raw_gates(self):
        n = {name: x.float() for name, x in random_inputs("kda", 1, 9, 1, 1, 4, 4).items()}
        leaves = [rand(1, 9, 1, 4).float(), rand(1).float(), rand(4).float(), rand(1, 9, 1).bfloat16()]
        raw, A_log, bias, logits = (x.requires_grad_() for x in leaves)
        out, _ = ops.chunk_kda(n["q"], n["k"], n["v"], raw, logits, use_gate_in_kernel=True, A_log=A_log, dt_bias=bias, use_beta_sigmoid_in_kernel=True)
        formed = {**n, "g": -A_log.exp()[:, None] * F.softplus(raw + bias.view(1, 4)), "beta": logits.float().sigmoid()}
        expected = recurrence("decay=channel gain=gate", formed)[0]
        d = torch.randn_like(out)
        for x, a, b in zip(leaves, torch.autograd.grad(out, leaves, d), torch.autograd.grad(expected, leaves, d)):
            self.assertEqual(a.dtype, x.dtype)
            self.assertTrue(near(a.float(), b.float(), 1e-2 if x.dtype == torch.bfloat16 else 1e-4))

    def test_what_is_not_served_says_why_or_goes_back(self):
        n = random_inputs("kda", B, T, H, HV, K, V)
        for arguments, reason in (({"return_intermediate_states": True}, "return_intermediate_states: not served, got True"), ({"unknown": 1}, "unknown: not served")):
            with self.assertRaisesRegex(_serving.NotServed, reason):
                ops.chunk_kda(**n, **arguments)
        with self.assertRaisesRegex(_serving.NotServed, "chunk_size: expected one of"):
            ops.chunk_kda(**n, chunk_size=16)
        with self.assertRaisesRegex(_serving.NotServed, "gv: not served, got Tensor"):
            ops.fused_recurrent_gla(n["q"], n["k"], n["v"], gv=n["g"])
        with self.assertRaisesRegex(ValueError, "allow_neg_eigval: expected use_beta_sigmoid_in_kernel"):
            ops.chunk_kda(**n, allow_neg_eigval=True)
        os.environ["FASTWEIGHT_STRICT"] = "0"
        before = _serving.counts["chunk_kda"].fell_back
        with mock.patch.dict(_serving.originals, {"chunk_kda": lambda *a, **k: "theirs"}):
            self.assertEqual(ops.chunk_kda(**n, unknown=1), "theirs")
        self.assertEqual(_serving.counts["chunk_kda"].fell_back, before + 1)
        self.assertIn("unknown: not served", _serving.counts["chunk_kda"].reasons)

    def test_compiles_without_a_break(self):
        torch._dynamo.reset()
        n = {name: x.float() for name, x in random_inputs("gated_deltanet", B, T, H, HV, K, V).items()}
        call = lambda **x: ops.chunk_gated_delta_rule(**x, use_qk_l2norm_in_kernel=True, use_beta_sigmoid_in_kernel=True)[0]
        self.assertTrue(torch.equal(torch.compile(call, backend="aot_eager", fullgraph=True)(**n), call(**n)))


class BesideFla(unittest.TestCase):
    def test_signatures_are_theirs(self):
        fla()
        self.assertEqual(len(ops.__all__), 20)
        for name in ops.__all__:
            theirs = getattr(importlib.import_module(f"fla.ops.{getattr(ops, name).module}"), name)
            a, b = (list(inspect.signature(f, follow_wrapped=True).parameters) for f in (getattr(ops, name), theirs))
            self.assertEqual(a, b, name)

    def test_values_of_their_reference_functions(self):
        fla()
        from fla.ops.comba.naive import naive_chunk_comba
        from fla.ops.gated_delta_rule.naive import naive_recurrent_gated_delta_rule
        from fla.ops.gdn2.naive import naive_recurrent_gdn2
        from fla.ops.kda.naive import naive_recurrent_kda
        from fla.ops.precond_gated_delta_rule.naive import naive_recurrent_precond_gated_delta_rule

        n = {name: x.float() for name, x in random_inputs("gated_deltanet", B, T, HV, HV, K, V).items()}
        self.assertTrue(near(ops.chunk_gated_delta_rule(**n)[0], naive_recurrent_gated_delta_rule(n["q"], n["k"], n["v"], n["beta"], n["g"])[0], 1e-5))
        n = {name: x.float() for name, x in random_inputs("kda", B, T, HV, HV, K, V).items()}
        self.assertTrue(near(ops.chunk_kda(**n)[0], naive_recurrent_kda(**n)[0], 1e-5))
        n = {name: x.float() for name, x in random_inputs("gated_deltanet2", B, T, HV, HV, K, V).items()}
        positional = [n[name] for name in ("q", "k", "v", "g", "erase_gate", "write_gate")]
        self.assertTrue(near(ops.chunk_gdn2(*positional)[0], naive_recurrent_gdn2(*positional)[0], 1e-5))
        n = {name: x.float() for name, x in random_inputs("decay=scalar gain=gate erase_key=own", B, 64, HV, HV, K, V).items()}
        call = {"q": n["q"], "k": n["k"], "v": n["v"], "p": n["erase_key"], "g": n["g"], "beta": n["beta"], "scale": 0.3}
        for op in (ops.chunk_comba, ops.fused_recurrent_comba):
            self.assertTrue(near(op(**call)[0], naive_chunk_comba(**call, chunk_size=64)[0], 1e-5))
        n = {name: x.float() for name, x in random_inputs("precond_gated_deltanet", B, T, H, HV, K, V).items()}
        call = {"g_atk": n["precond_g"], "g": n["g"], "beta_atk": n["precond_beta"], "beta": n["beta"], "log_atk_scale": n["precond_center"], "output_final_state": True}
        for a, b in zip(ops.chunk_precond_gated_delta_rule(n["q"], n["k"], n["v"], **call), naive_recurrent_precond_gated_delta_rule(n["q"], n["k"], n["v"], **call)):
            self.assertTrue(near(a, b, 1e-5))


if __name__ == "__main__":
    unittest.main()
